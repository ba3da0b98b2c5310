/* Which worker holds which blocks of KV, by block hash (kv/prefix.h): how deep a prompt's prefix is held by each. Pure: no clock, no I/O; the same calls give
 * the same answers.
 *
 * A worker has a slot. What it stored and removed is told here in the order in which it happened (feed.h does that from `kvevent` records). A match asks for
 * the deepest block that each worker holds, and takes it that who holds a block holds those before it: true of workers that evict a chain from its tail. Where
 * it is not true, a worker may be credited with too much or too little; the worker itself compares tokens before it uses anything.
 * A match of n blocks costs about log2(n) searches for each depth at which workers differ, and a step for each worker that holds anything of it.
 *
 * Memory: at most max_bytes, and 1.4 MB beside it. A block takes 32 bytes, at most 3/4 of a table are in use; one that more than four workers hold takes two
 * bytes more for each. Tables may take 3/4 of it: then blocks go by second chance (a hand goes round, and what nobody asked for or stored since it last came by
 * is forgotten, for all workers). Sets may take 1/4: then holders past it are not noted (`left_out`).
 * Not for several threads at once. */
#ifndef PD_ROUTE_INDEX_H
#define PD_ROUTE_INDEX_H
#include "../base/mem.h"

#define PD_INDEX_SLOTS 65535
enum { PD_INDEX_SHARDS = 256 };
struct pd_index;
struct pd_index_opts { size_t max_bytes /* 0: 256 MiB; at least 1 MiB */; uint64_t seed; /* of the tables' order, so that nobody can aim at one place */ };
int pd_index_new(const struct pd_index_opts *o, struct pd_index **out, struct pd_err *e);      /* PD_EUSAGE: less than 1 MiB */
void pd_index_free(struct pd_index *x);

/* A slot for a worker that holds nothing. PD_ENOMEM: all are taken; those given up come back once pd_index_sweep has been round. */
int pd_index_join(struct pd_index *x, uint16_t *slot, struct pd_err *e);
void pd_index_leave(struct pd_index *x, uint16_t slot);        /* at once: it is never matched again */
/* Cleans up after those that left, one shard a call. true: there is more to do. */
bool pd_index_sweep(struct pd_index *x);

/* hashes [n][16]. Those that are held already (stored) or not (removed) change nothing. PD_ENOMEM: those before it are in. */
int pd_index_stored(struct pd_index *x, uint16_t slot, const uint8_t (*hashes)[16], uint32_t n, struct pd_err *e);
void pd_index_removed(struct pd_index *x, uint16_t slot, const uint8_t (*hashes)[16], uint32_t n);
bool pd_index_has(const struct pd_index *x, uint16_t slot, const uint8_t hash[16]);
uint32_t pd_index_held(const struct pd_index *x, uint16_t slot);       /* blocks */

struct pd_hit { uint32_t blocks; uint16_t slot; };
/* Who holds a beginning of the chain, deepest first; the index's, until the next call of anything. */
const struct pd_hit *pd_index_match(struct pd_index *x, const uint8_t (*hashes)[16], uint32_t n, uint32_t *n_hits);

struct pd_index_stats { uint64_t blocks, copies /* (block, worker) pairs */, forgotten /* blocks */, left_out, searches; size_t bytes; uint32_t slots /* taken */; };
struct pd_index_stats pd_index_stats(const struct pd_index *x);
#endif
