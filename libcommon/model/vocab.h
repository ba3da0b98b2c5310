/* The pieces of a tokenizer's vocabulary: one copy of their bytes, a type for each, and an exact look-up (open addressing over XXH3; nothing is
 * allocated for a single piece). Immutable after init. Non-empty pieces are distinct; an empty piece is kept (its id counts) but never found. */
#ifndef PD_MODEL_VOCAB_H
#define PD_MODEL_VOCAB_H
#include "../base/hash.h"
#include "../base/mem.h"

enum pd_piece_type { PD_PIECE_NORMAL = 1, PD_PIECE_UNKNOWN, PD_PIECE_CONTROL, PD_PIECE_USER, PD_PIECE_UNUSED, PD_PIECE_BYTE };  /* as GGUF numbers them */

struct pd_vocab_slot { uint32_t tag; int32_t id; };     /* tag: high half of the hash; id -1: free */
struct pd_vocab {
    int32_t n;
    size_t max_len;                 /* of the longest piece */
    size_t *off;                    /* [n + 1] into text */
    char *text;
    uint8_t *type;                  /* [n] enum pd_piece_type */
    struct pd_vocab_slot *slot;
    uint64_t mask;
};

/* types: NULL means all normal. The vocabulary does not point into `piece` afterwards. */
int pd_vocab_init(struct pd_vocab *v, const struct pd_str *piece, size_t n, const int32_t *types, struct pd_err *e);
void pd_vocab_free(struct pd_vocab *v);
int32_t pd_vocab_find(const struct pd_vocab *v, const char *p, size_t n);       /* -1: not there */
static inline struct pd_str pd_vocab_piece(const struct pd_vocab *v, int32_t id) { return (struct pd_str){ v->text + v->off[id], v->off[id + 1] - v->off[id] }; }
/* A piece made fit for a message: quoted, control bytes escaped, cut when long. */
const char *pd_piece_show(const char *p, size_t n, char out[64]);
#endif
