/* What the engine's measurements share (internal to them): sequences of made-up tokens, and the step that runs them. */
#ifndef PD_ENGINE_MEASURE_IN_H
#define PD_ENGINE_MEASURE_IN_H
#include "forward.h"
#include "measure.h"

/* n_seqs sequences of equal length, with blocks for per_seq blocks of tokens each; all have the same tokens. */
struct pd_bench { struct pd_runtime *rt; struct pd_fwd *fwd; uint32_t *blocks, n_blocks, n_seqs, per_seq; uint8_t **base; int32_t *tokens; struct pd_span *span; };
int pd_bench_new(struct pd_bench *b, struct pd_runtime *rt, struct pd_threads *threads, uint32_t n_seqs, uint32_t tokens, uint32_t max_rows, uint32_t max_logits,
                 struct pd_err *e);
void pd_bench_free(struct pd_bench *b);
/* Positions [from, from + n) of sequences [s0, s1), `step` at a time. last_logits: of the last of them; a step of 1 has logits always. */
int pd_bench_rows(struct pd_bench *b, uint32_t s0, uint32_t s1, uint32_t from, uint32_t n, uint32_t step, bool last_logits, struct pd_err *e);
#endif
