/* Block hashes, and the index of full blocks by them: the prefix cache.
 *
 * A block's hash is XXH3-128 over (parent, tokens, adapter, multimodal, salt), seeded by the `must` fields of the fingerprint. Only full blocks. The hash
 * locates, comparison decides: a block counts as the next one of a prompt only when its stored tokens are equal, its parent is the block matched before, and
 * at the beginning of a chain adapter and salt are equal.
 *
 * The index holds one reference of the pool for each block in it (pd_pool_keep). A block that somebody else holds too, a run or a lease, is pinned: it is
 * found but not evicted. When the pool lacks blocks it asks the index (pd_pool_on_lack), which gives up what nobody holds, oldest first, before anybody has
 * to be preempted. So free + cached + used == total in pd_pool_stats, where cached counts the blocks that only the index holds.
 *
 * Eviction: `lru-tail`: a block is younger than those that go on from it, so that a chain goes from its tail; `lru`: blocks are touched from head to tail
 * and go one by one, oldest first. There a block may go before its children: what is known of it stays, without its memory, so that they count again once
 * it is back.
 *
 * Any thread may call these; one lock, taken before the pool's. Memory: at most twice as many entries as the pool has blocks (`lru-tail`: as many), each of
 * about 60 bytes and its tokens, and PD_PREFIX_KEY bytes at a chain's beginning. */
#ifndef PD_KV_PREFIX_H
#define PD_KV_PREFIX_H
#include "kvring.h"
#include "pool.h"

/* out [n_tokens / block_size][16], big-endian. parent of the first is zero. */
void pd_block_hashes(uint64_t must_seed, const int32_t *tokens, uint32_t n_tokens, uint32_t block_size, struct pd_str adapter, struct pd_str salt,
                     uint8_t (*out)[16]);

#define PD_PREFIX_KEY 256       /* adapter and salt, bytes together; what is longer is not cached */
enum pd_evict { PD_EVICT_LRU_TAIL, PD_EVICT_LRU };
struct pd_prefix_opts {
    uint64_t must_seed;
    enum pd_evict evict;
    uint32_t max_blocks;        /* in the index at once; 0: no limit but the pool */
    uint32_t ring_records;      /* changes kept for subscribers, 0: 1024; and bytes of them, 0: 512 KiB */
    size_t ring_bytes;
    uint32_t hash_bits;         /* for tests: this many bits of the hashes are kept, so that they collide. 0: all */
};
struct pd_prefix;
int pd_prefix_new(struct pd_pool *pool, const struct pd_prefix_opts *o, struct pd_prefix **out, struct pd_err *e);
void pd_prefix_free(struct pd_prefix *x);       /* before its pool */
bool pd_evict_parse(const char *name, enum pd_evict *v);        /* "lru-tail", "lru" */

/* What divides prompts that may share blocks from those that may not. */
struct pd_prefix_key { struct pd_str adapter, salt; };
/* The longest beginning of the tokens that is here, in whole blocks, at most `max`: blocks into out, with a reference of each for the caller. How many. */
uint32_t pd_prefix_take(struct pd_prefix *x, const struct pd_prefix_key *k, const int32_t *tokens, uint32_t n_tokens, uint32_t *out, uint32_t max);
uint32_t pd_prefix_peek(struct pd_prefix *x, const struct pd_prefix_key *k, const int32_t *tokens, uint32_t n_tokens);    /* the same, only counted */
/* blocks[i] holds the KV of the i-th block_size tokens, and nobody writes to it any more: those that are not here enter, up to the first that is another
 * process's. A block whose tokens are here already in another block does not. How many entered. Lack of memory is no error: fewer enter. */
uint32_t pd_prefix_put(struct pd_prefix *x, const struct pd_prefix_key *k, const int32_t *tokens, const uint32_t *blocks, uint32_t n_blocks);
uint32_t pd_prefix_evict(struct pd_prefix *x, uint32_t n);      /* give n blocks back to the pool, or what there is; how many */
void pd_prefix_clear(struct pd_prefix *x);      /* pinned ones stay their holders' */

struct pd_prefix_stats {
    uint32_t blocks /* in the index, pinned ones too */, entries;
    uint64_t queries, hit_blocks, asked_blocks, stored, evicted;
    size_t bytes;
};
struct pd_prefix_stats pd_prefix_stats(struct pd_prefix *x);

/* Subscribers. Each has a cursor; from (life, seq) that is still in the ring its changes come, from elsewhere a snapshot and then what follows it. */
struct pd_kvcursor { uint64_t seq; bool known; struct pd_buf snapshot; size_t at; };
void pd_kvcursor_open(struct pd_kvcursor *c, const struct pd_prefix *x, const uint8_t *life /* NULL: knows nothing */, uint64_t seq);
void pd_kvcursor_close(struct pd_kvcursor *c);
/* Append whole kvevent records to out, until it has grown by about `bytes`. 1: there is more, 0: up to date. */
int pd_prefix_events(struct pd_prefix *x, struct pd_kvcursor *c, size_t bytes, struct pd_buf *out, struct pd_err *e);
const uint8_t *pd_prefix_life(const struct pd_prefix *x);
/* Called when there is something for subscribers, under the lock: it may only post to a loop. NULL: none. */
void pd_prefix_on_change(struct pd_prefix *x, void (*fn)(void *ctx), void *ctx);
#endif
