/* SentencePiece's BPE: spaces become U+2581, one may be put before the text, then the two neighbours that together make the piece of the highest
 * score are merged, again and again; a character with no piece of its own falls back to byte tokens. Immutable after init. */
#ifndef PD_MODEL_SPM_H
#define PD_MODEL_SPM_H
#include "merge.h"
#include "vocab.h"

struct pd_spm {
    const struct pd_vocab *vocab;
    uint32_t *rank;                 /* [vocab->n] 0 for the highest score; equal scores have equal ranks; PD_NO_RANK: not for merging */
    int32_t byte_id[256];           /* <0x00> to <0xFF>; -1: lacking */
};
int pd_spm_init(struct pd_spm *s, const struct pd_vocab *v, const float *scores, struct pd_err *e);
void pd_spm_free(struct pd_spm *s);

struct pd_spm_call { struct pd_merger m; struct pd_buf norm; };
void pd_spm_call_free(struct pd_spm_call *c);
/* Appends the ids of text[at..end), valid UTF-8 without special tokens; `prefix` puts a space before it. Offsets in messages are from text. */
int pd_spm_encode(const struct pd_spm *s, struct pd_spm_call *c, const char *text, size_t at, size_t end, bool prefix, struct pd_buf *ids, struct pd_err *e);
/* Appends the bytes of an ordinary or byte piece. */
int pd_spm_decode(const struct pd_spm *s, int32_t id, struct pd_buf *out, struct pd_err *e);
#endif
