/* Finds a set of pieces (special tokens) in text: leftmost first, longest at each place, in time linear in the text whatever the pieces are.
 * It is an Aho-Corasick automaton over the reversed pieces, run from the end of the text: the state before byte i then knows the longest piece
 * that begins at i. Immutable after init. */
#ifndef PD_MODEL_SPECIAL_H
#define PD_MODEL_SPECIAL_H
#include "vocab.h"

struct pd_special {
    uint32_t n;                     /* nodes; node 0 is the root; 0 or 1 node: nothing to find */
    int32_t *fail;                  /* [n] longest proper suffix that is a node */
    int32_t *id;                    /* [n] the longest piece that ends here, or -1 */
    struct pd_special_edge { uint64_t key; int32_t to; } *edge;     /* open addressing; key 0: free, else (from << 8 | byte) + 1 */
    uint64_t mask;
    int32_t root[256];              /* the root's edges; 0: stay */
};
struct pd_special_hit { size_t pos; int32_t id; };

/* The pieces whose type's bit (1 << type) is in `types`. */
int pd_special_init(struct pd_special *s, const struct pd_vocab *v, unsigned types, struct pd_err *e);
void pd_special_free(struct pd_special *s);
/* Appends the hits in text[0..n), in order and without overlap, with positions from `base`, to `hits` (a pd_buf of pd_special_hit). */
int pd_special_scan(const struct pd_special *s, const struct pd_vocab *v, const char *text, size_t n, size_t base, struct pd_buf *hits, struct pd_err *e);
#endif
