/* From logits to a token. No state travels: the random number of a draw is a hash of (seed, choice, position in the run), and penalties are counted
 * from the run's own tokens, so a resumed or moved run goes on with the same choices.
 *
 * Order: logit_bias, repetition / presence / frequency penalties (repetition over prompt and output, the others over output alone, as vLLM has them), the
 * ban on end tokens before min_tokens and under ignore_eos; then temperature 0 (or below 1e-5) takes the largest logit (lowest id among equals), else
 * temperature, min_p, top_k, top_p, and one draw. Logprobs are those of the model: before bias, penalties and temperature.
 */
#ifndef PD_ENGINE_SAMPLER_H
#define PD_ENGINE_SAMPLER_H
#include "../model/tokenizer.h"
#include "../wire/record.h"

struct pd_sampled { int32_t token; bool has_logprob; float logprob; struct pd_top *top; uint32_t n_top; };    /* top: the sampler's, until its next call */

struct pd_sampler;
int pd_sampler_new(const struct pd_kernels *k, const struct pd_tokenizer *tok, int n_vocab, struct pd_sampler **out, struct pd_err *e);
void pd_sampler_free(struct pd_sampler *s);
/* logits [n_vocab] are overwritten. tokens [n_tokens] = prompt (n_prompt of them) and output so far. out->token is -1 when every token is banned
 * (min_tokens with stop_token_ids, or ignore_eos, over the whole vocabulary): there is nothing to choose. */
void pd_sample(struct pd_sampler *s, const struct pd_request *r, int choice, const int32_t *tokens, uint32_t n_tokens, uint32_t n_prompt, float *logits,
               struct pd_sampled *out);
/* Does this token end the run by itself (end of generation, or one of stop_token_ids)? */
bool pd_is_stop_token(const struct pd_tokenizer *tok, const struct pd_request *r, int32_t token);
/* The number in [0, 1) of a draw. */
double pd_sample_uniform(int64_t seed, int choice, uint32_t pos);
#endif
