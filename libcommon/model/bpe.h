/* Byte-level BPE: text is cut into words by the model's own pre-tokenizer (a PCRE2 pattern, chosen by name), the bytes of a word are merged by the
 * rank of the pair. Immutable after init; a call has its own match data and scratch memory. */
#ifndef PD_MODEL_BPE_H
#define PD_MODEL_BPE_H
#include "merge.h"
#include "vocab.h"

struct pd_bpe_pair { uint64_t key; uint32_t rank; int32_t made; };      /* key: left << 32 | right; rank PD_NO_RANK: free */
struct pd_bpe {
    const struct pd_vocab *vocab;
    void *pattern;                  /* pcre2_code_8 */
    void *memory;                   /* pcre2_general_context_8 over base/mem.h */
    void *limits;                   /* pcre2_match_context_8 */
    bool jit;
    bool whole_words;               /* a word that is a piece is not merged (Llama 3) */
    int32_t byte_id[256];           /* -1: the vocabulary lacks this byte */
    struct pd_bpe_pair *pair;
    uint64_t mask;
};

/* pre: tokenizer.ggml.pre. *bos_default: what an absent add_bos_token means for it. */
int pd_bpe_init(struct pd_bpe *b, const struct pd_vocab *v, struct pd_str pre, const struct pd_str *merges, size_t n_merges, bool *bos_default, struct pd_err *e);
void pd_bpe_free(struct pd_bpe *b);

/* One call's own state; zero-initialise, free with pd_bpe_call_free. */
struct pd_bpe_call { struct pd_merger m; void *match; struct pd_buf word; };
void pd_bpe_call_free(struct pd_bpe_call *c);
/* Appends the ids of text[at..end), which is valid UTF-8 and holds no special token. Offsets in messages are from text. */
int pd_bpe_encode(const struct pd_bpe *b, struct pd_bpe_call *c, const char *text, size_t at, size_t end, struct pd_buf *ids, struct pd_err *e);
/* Appends the bytes that a piece stands for. A piece with a character outside the byte alphabet stands for itself. */
int pd_bpe_decode(struct pd_str piece, struct pd_buf *out, struct pd_err *e);
#endif
