/* `kvevent`: what changed in a worker's prefix index (kv/prefix), for whoever keeps an image of it (pd-wire.5), under the rules of record.h.
 *
 * A publisher numbers its changes from 1 on within its life; a subscriber applies seq = last + 1 and nothing else. Another seq is a gap, another life a new
 * publisher: until a snapshot comes it knows nothing. A snapshot is the whole index as it was after change `seq`, in `parts` records, parents first; the
 * next change has seq + 1.
 *     stored    a chain: hashes one after the other, each the parent of the next; parent: of the first, absent at a chain's beginning. token_ids of all
 *     removed   hashes, each by itself
 *     cleared   everything
 *     snapshot  hashes; parents: 16 bytes each, zero at a chain's beginning; token_ids; one without hashes is that of an empty index
 * What a decoder fills points into its arena. */
#ifndef PD_WIRE_KVEVENT_H
#define PD_WIRE_KVEVENT_H
#include "record.h"
#define PD_LIFE_LEN 8

struct pd_kvevent {
    uint8_t life[PD_LIFE_LEN];          /* the publisher's: the first half of each generation it gives */
    uint64_t seq;
    char op[12];
    struct pd_bin hashes;               /* 16 bytes a block */
    uint8_t parent[16]; bool has_parent;
    struct pd_bin parents;
    struct pd_bin token_ids;            /* int32 little-endian, block_size a block */
    uint32_t block_size;
    char tier[12];                      /* "host" */
    uint32_t part, parts;
    struct pd_extra extra;
};
int pd_kvevent_encode(const struct pd_kvevent *r, struct pd_buf *b, struct pd_err *e);
int pd_kvevent_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_kvevent *r, struct pd_err *e);
static inline uint32_t pd_kvevent_blocks(const struct pd_kvevent *r) { return (uint32_t)(r->hashes.n / 16); }
#endif
