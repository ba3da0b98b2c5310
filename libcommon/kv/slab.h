/* Slabs of another process: memory that its owner gave by descriptor, mapped here to be read.
 *
 * A slab is mapped once, read-only, and only when it is sealed against shrinking and has the size it must have: an owner that cuts its slab can then not
 * make a reader die of it. What lies there is checked by its reader (checksums), never trusted.
 * Address: `base` counts through the owner's slabs, one after the other. Within a slab as in pool.h: layer by layer all K, then all V of its blocks. */
#ifndef PD_KV_SLAB_H
#define PD_KV_SLAB_H
#include "../wire/record.h"
#include "pool.h"

#define PD_SLABS_MAX 1024       /* of one peer */
/* A slab of one's own: a memfd, filled with zeros (no page of it is missing later), in huge pages where the kernel gives them, mapped and sealed. Both are the
 * caller's. */
int pd_slab_make(size_t bytes, int *fd, uint8_t **map, struct pd_err *e);
/* against shrinking, growing, new writable mappings (where the kernel can), and other seals. After the owner mapped it */
int pd_slab_seal(int fd, struct pd_err *e);
/* Checks seals first, then the size (want 0: any but nothing), then maps read-only. fd stays the caller's; *map is for munmap(*bytes). PD_EINCOMPAT: not safe
 * to map. */
int pd_slab_map(int fd, const char *name, size_t want, const uint8_t **map, size_t *bytes, struct pd_err *e);

struct pd_slab_shape { uint64_t slab_bytes; uint32_t slab_blocks, layers; size_t layer_bytes; };    /* layer_bytes: K (or V) of one layer of one block */
/* Of a pool; of what a peer said, held against its layout: PD_ECORRUPT where the numbers do not fit each other. */
void pd_slab_shape_of(const struct pd_pool *p, struct pd_slab_shape *s);
int pd_slab_shape_check(const struct pd_slab_shape *s, struct pd_err *e);

struct pd_slabs;
int pd_slabs_new(const struct pd_slab_shape *s, struct pd_slabs **out, struct pd_err *e);
int pd_slabs_add(struct pd_slabs *s, uint32_t index, int fd, struct pd_err *e);         /* maps; fd stays the caller's. PD_ECORRUPT: that index came before */
const struct pd_slab_shape *pd_slabs_shape(const struct pd_slabs *s);
uint32_t pd_slabs_count(const struct pd_slabs *s);
/* The peer's numbers of the blocks that an offer's runs name, in order. 0; 1: a slab is named that is not mapped yet; PD_ECORRUPT: the runs do not lie in
 * slabs of this shape, or are not n_blocks in all. */
int pd_slabs_blocks(const struct pd_slabs *s, const struct pd_payload_run *runs, uint32_t n_runs, uint32_t n_blocks, uint32_t *blocks, struct pd_err *e);
const uint8_t *pd_slabs_at(const struct pd_slabs *s, uint32_t block, int layer, int v); /* of a block whose slab is mapped */
/* Lend the slab to a pool of the same shape, to be read in place: its number there (see pd_pool_adopt); PD_EFAIL: the shapes differ; or another PD_E. The pool
 * keeps the memory as long as it needs it. */
int64_t pd_slabs_lend(struct pd_slabs *s, uint32_t slab, struct pd_pool *p, struct pd_err *e);
void pd_slabs_free(struct pd_slabs *s);      /* before the pools that it lent to */

/* The other way: the runs of a pool's own blocks, neighbours merged. Room for n_blocks. Returns how many. */
uint32_t pd_slab_runs(const struct pd_pool *p, const uint32_t *blocks, uint32_t n_blocks, struct pd_payload_run *runs);
#endif
