/* Text <-> token ids: byte-level BPE (pre-tokenizers by name, through PCRE2) and SentencePiece BPE with byte fallback. Immutable once made; thread safe.
 * Exact round trip: decode(encode(s)) == s. Special tokens in text are only parsed as such when parse_special is set. */
#ifndef PD_MODEL_TOKENIZER_H
#define PD_MODEL_TOKENIZER_H
#include "gguf.h"
struct pd_tokenizer;
enum pd_tok_kind { PD_TOK_BPE, PD_TOK_SPM };
int pd_tokenizer_from_gguf(const struct pd_gguf *g, struct pd_tokenizer **out, struct pd_err *e);
void pd_tokenizer_free(struct pd_tokenizer *t);
enum pd_tok_kind pd_tokenizer_kind(const struct pd_tokenizer *t);
int pd_tokenizer_vocab(const struct pd_tokenizer *t);
int pd_tokenizer_bos(const struct pd_tokenizer *t);             /* -1: none */
int pd_tokenizer_eos(const struct pd_tokenizer *t);
bool pd_tokenizer_is_eog(const struct pd_tokenizer *t, int id); /* eos, eot, eom: generation ends here */
bool pd_tokenizer_is_control(const struct pd_tokenizer *t, int id);     /* steers the model, is no text: control and unknown pieces */
bool pd_tokenizer_add_bos(const struct pd_tokenizer *t);
int pd_tokenizer_find(const struct pd_tokenizer *t, const char *piece, size_t n);       /* id of an exact vocabulary entry, or -1 */
const uint8_t *pd_tokenizer_digest(const struct pd_tokenizer *t);       /* SHA-256 over kind, pre, tokens, types, scores, merges, special ids, flags */
/* Appends int32 ids to `ids` (a pd_buf of int32). add_bos (and add_eos) follow the model's own flags when `bos` is set. User-defined tokens
 * are always found; control tokens only with parse_special. A character that the vocabulary cannot spell: PD_EFAIL with its offset. Invalid UTF-8: PD_EFAIL with the byte offset. */
int pd_tokenize(const struct pd_tokenizer *t, const char *s, size_t n, bool bos, bool parse_special, struct pd_buf *ids, struct pd_err *e);
/* The same over text made of runs, of which some are the caller's own and some came from outside: special tokens are only found inside runs with
 * parse_special set; ordinary text goes across runs as if there were none (so that a chat gives the tokens of its whole text). The runs' lengths
 * sum to the text's. */
struct pd_text_run { size_t n; bool parse_special; };
int pd_tokenize_runs(const struct pd_tokenizer *t, const char *s, const struct pd_text_run *run, size_t n_runs, bool bos, struct pd_buf *ids, struct pd_err *e);
/* Appends the bytes of one token; control tokens give nothing unless `special`. `first`: the text's first token, or the first after a
 * control token: SentencePiece took a space into it that the text did not have. */
int pd_detokenize(const struct pd_tokenizer *t, int32_t id, bool special, bool first, struct pd_buf *out, struct pd_err *e);
#endif
