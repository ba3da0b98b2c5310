/* The block pool: KV memory of this process. Block = block_size tokens of all layers. Memory is slabs of at most 64 MiB, all of one size (one block, where
 * a block is over 1 MiB), each a memfd sealed against shrinking and growing and prefaulted, added as needed up to the pool's size. Lowest free blocks are
 * given first, so that a run's blocks tend to be neighbours and low slabs fill before new ones are made. Within a slab, per layer all K then all V of its
 * blocks, each [kv_heads, block_size, head_dim], so neighbours are contiguous per layer, and one offset (layer, k or v) serves every block of every slab.
 * Slabs of other processes can be adopted: their blocks, numbered after the pool's own, stand in block tables like any other, to be read and never written.
 * Invariant: free + cached + used == total (of the slabs made; cached: blocks that the prefix index alone holds; borrowed blocks are counted apart). Any thread
 * may call these (a daemon's loop holds leases while its compute thread runs the batch); a block's memory belongs to who holds it. */
#ifndef PD_KV_POOL_H
#define PD_KV_POOL_H
#include "../model/config.h"
struct pd_pool_geom { int layers, kv_heads, head_dim, block_size; enum pd_dtype dtype; };
struct pd_pool;
int pd_pool_new(const struct pd_pool_geom *g, int64_t max_bytes, struct pd_pool **out, struct pd_err *e);
void pd_pool_free(struct pd_pool *p);
const struct pd_pool_geom *pd_pool_geom(const struct pd_pool *p);
size_t pd_pool_layer_bytes(const struct pd_pool *p);    /* bytes of K (or V) of one layer of one block: kv_heads*block_size*head_dim*size */
size_t pd_pool_off(const struct pd_pool *p, int layer, int v);  /* add to a block's base: that layer's K (v 0) or V (v 1) */
uint8_t *pd_pool_base(const struct pd_pool *p, uint32_t block);
/* All or nothing: n blocks into out[], each with one reference. PD_ENOMEM names blocks wanted, free and the limit. Memory is zeroed at first use and again when a block is reused. */
int pd_pool_take(struct pd_pool *p, uint32_t n, uint32_t *out, struct pd_err *e);
/* The same without zeroing, for a caller that writes every byte of the blocks before anybody reads them (an import of whole blocks). */
int pd_pool_take_raw(struct pd_pool *p, uint32_t n, uint32_t *out, struct pd_err *e);
/* Makes the next slab when less than half of one is free, so that who takes blocks soon need not wait for it: for a thread that has nothing else to do, as that
 * takes from 10 ms up to 0.3 s (memory that a virtual machine never touched before). */
void pd_pool_ahead(struct pd_pool *p);
void pd_pool_ref(struct pd_pool *p, uint32_t block);
void pd_pool_put(struct pd_pool *p, uint32_t block);    /* drop one reference; at zero the block is free. A block that is not held is told on stderr and left alone */
int pd_pool_slab_fd(const struct pd_pool *p, uint32_t slab);    /* the sealed memfd of slab block / pd_pool_slab_blocks, or -1 */

/* For the prefix index (prefix.h). keep: a reference of its own of a block that somebody holds; false: it has one, or the block is not this pool's.
 * unkeep: drops it; true: the block is free now. idle: nobody else holds it. on_lack: called without the lock when blocks are wanted that are not there: gives
 * up to n back and says how many; before the pool refuses. */
bool pd_pool_keep(struct pd_pool *p, uint32_t block);
bool pd_pool_unkeep(struct pd_pool *p, uint32_t block);
bool pd_pool_idle(const struct pd_pool *p, uint32_t block);
typedef uint32_t pd_pool_lack_fn(void *ctx, uint32_t n);
void pd_pool_on_lack(struct pd_pool *p, pd_pool_lack_fn *fn, void *ctx);

/* A slab of another process, mapped read-only in this pool's shape. adopt takes the mapping over (on success) and gives its number: block i of it is
 * slab * pd_pool_slab_blocks + i. borrow: one reference of such a block (put drops it). disown: no more borrows; unmapped with the last of its blocks. */
#define PD_POOL_FOREIGN 1024
int pd_pool_adopt(struct pd_pool *p, const uint8_t *map, uint32_t *slab, struct pd_err *e);
int pd_pool_borrow(struct pd_pool *p, uint32_t block, struct pd_err *e);
void pd_pool_disown(struct pd_pool *p, uint32_t slab);
bool pd_pool_is_foreign(const struct pd_pool *p, uint32_t block);
uint32_t pd_pool_slab_blocks(const struct pd_pool *p);
size_t pd_pool_slab_bytes(const struct pd_pool *p);
uint32_t pd_pool_slabs(const struct pd_pool *p);        /* own ones made so far; they never go before the pool does */

struct pd_pool_stats { uint32_t free, cached, used, total, max, borrowed; uint64_t slab_bytes; };
struct pd_pool_stats pd_pool_stats(const struct pd_pool *p);
#endif
