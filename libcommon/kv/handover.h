/* KV as chunks: the plan that an offer implies, exporting pool blocks and importing verified bytes into them.
 *
 * Plan: block ranges of chunk_blocks outermost, layers inner; chunk index = range * layers + layer. A chunk's XXH3-64 is seeded with
 * XXH3-64(gen | layout_hash | layer0 | block0) (16 + 8 + 4 + 4 bytes, big-endian), so that right bytes in a wrong place fail. */
#ifndef PD_KV_HANDOVER_H
#define PD_KV_HANDOVER_H
#include "../wire/record.h"
#include "pool.h"
#include "slab.h"
struct iovec;
struct pd_plan { uint32_t n_blocks, chunk_blocks, n_ranges, n_chunks, layers; uint64_t bytes, chunk_bytes; };
uint64_t pd_layout_hash(const struct pd_kv_layout *l);
int pd_layout_check(const struct pd_kv_layout *l, struct pd_err *e);            /* known dtype and order, sane sizes, layout_hash that of the fields */
size_t pd_layout_elem_size(const struct pd_kv_layout *l);                       /* bytes of an element; 0: unknown dtype */
unsigned pd_layout_converts(const struct pd_kv_layout *a, const struct pd_kv_layout *b);      /* PD_CONV_* (convert.h) of what differs between the two */
void pd_layout_from_pool(const struct pd_pool *p, struct pd_kv_layout *l);      /* fills layout_hash too */
/* chunk_blocks 0: chosen so that a chunk is about 1 MiB. PD_ECORRUPT when sizes overflow or exceed the record limit. */
int pd_plan_make(const struct pd_kv_layout *l, uint32_t n_tokens, uint32_t chunk_blocks, struct pd_plan *plan, struct pd_err *e);
uint64_t pd_chunk_seed(const uint8_t gen[16], uint64_t layout_hash, uint32_t layer0, uint32_t block0);

/* Export: fill the chunk's head (run, gen, index, ..., xxh3 over pool memory) and the pieces of its data as iovecs into the pool (at most 2*chunk_blocks,
 * neighbours merged). blocks[n_blocks]: the run's block table. The unused tail of the last block is zero (the pool zeroes). */
int pd_export_chunk(const struct pd_pool *p, const uint32_t *blocks, const struct pd_plan *plan, const struct pd_kvdesc *offer, uint32_t index,
                    struct pd_chunk *c, struct iovec *iov, int *n_iov, struct pd_err *e);

/* Import of one run. begin: checks the offer (plan repeated exactly, layout equals the pool's) and takes blocks. chunk: checks every field against the
 * plan, the checksum, duplicates (a replayed chunk is PD_ECORRUPT), then copies into the pool; PD_ECORRUPT names run, chunk and what was wrong.
 * finish: the closing kv repeats the offer and every chunk was verified. Blocks are the importer's until taken by pd_import_take; pd_import_free drops them. */
struct pd_import;
int pd_import_begin(struct pd_pool *p, const struct pd_kvdesc *offer, struct pd_import **out, struct pd_err *e);
int pd_import_chunk(struct pd_import *im, const struct pd_chunk *c, struct pd_err *e);
int pd_import_repeats(const struct pd_import *im, const struct pd_kvdesc *kv, struct pd_err *e);     /* the half of finish that needs no chunks */
int pd_import_finish(struct pd_import *im, const struct pd_kvdesc *kv, struct pd_err *e);
/* The same with more at hand (o may be NULL).
 * held: blocks of this pool that hold the run's beginning already: chunks that lie wholly in them count as come, and the rest of them is dropped. The import
 * takes a reference of its own of each that it uses (pd_import_held of them).
 * from, from_blocks [n_blocks]: the payload (scheme shm) lies in another process's slabs, in its blocks of these numbers. lend: read it in place where the
 * slabs have the pool's shape: full blocks stand in the block table as the peer's, only a last block that is not full is copied. from outlives the import.
 * look: only look: each chunk is checked, nothing is kept and no block taken (the caller passes the bytes on).
 * convert: PD_CONV_* (convert.h) of what may differ between the offer's layout and the pool's: it is verified as it came, then put into the pool's form. What is
 * converted is neither held nor read in place, and does not land.
 * landing: the scheme by which the peer writes the payload into the blocks themselves (pd_import_blocks); pd_import_sum then says that a chunk is there. */
struct pd_import_opts {
    const uint32_t *held; uint32_t n_held;
    struct pd_slabs *from; const uint32_t *from_blocks;
    bool lend, look;
    unsigned convert;
    const char *landing;
};
int pd_import_begin_with(struct pd_pool *p, const struct pd_kvdesc *offer, const struct pd_import_opts *o, struct pd_import **out, struct pd_err *e);
void pd_import_lands(struct pd_import *im, bool lands);      /* of one that was to land, before anything came: by another way, which lands too, or by chunks after all */
/* A chunk that lies in the peer's memory, or has landed: copied where that is not where it will be used, then what will be used is held against its checksum. Errors as pd_import_chunk. */
int pd_import_sum(struct pd_import *im, uint32_t index, uint64_t xxh3, struct pd_err *e);
/* Where a chunk of `bytes` lands: at most 2 * chunk_blocks pieces. PD_ECORRUPT: it is none that is missing, or not of that length. */
int pd_import_place(struct pd_import *im, uint32_t index, uint64_t bytes, struct iovec *iov, int *n_iov, struct pd_err *e);
/* The same run offered again, after its link died: the import goes on, with what was verified. PD_ECORRUPT: not that run, generation, tokens, layout.
 * Blocks read in place are not resumed (PD_EFAIL). Of o only from, from_blocks, landing. */
int pd_import_resume(struct pd_import *im, const struct pd_kvdesc *offer, const struct pd_import_opts *o, struct pd_err *e);
uint32_t pd_import_missing(const struct pd_import *im);                         /* chunks */
unsigned pd_import_converts(const struct pd_import *im);                        /* what it converts */
uint32_t pd_import_held(const struct pd_import *im);                            /* blocks that were here before */
bool pd_import_in_place(const struct pd_import *im);                            /* some block is read where the peer has it */
uint32_t *pd_import_take(struct pd_import *im, uint32_t *n_blocks);             /* ownership of the block table (pd_free) and of one reference each; NULL unless finish said 0 */
/* For salvage: the block table although chunks are missing (their memory is zero), and whether a chunk came and was verified. */
uint32_t *pd_import_take_part(struct pd_import *im, uint32_t *n_blocks);
const uint32_t *pd_import_blocks(const struct pd_import *im);                    /* its block table [plan's n_blocks]; look: NULL */
bool pd_import_has(const struct pd_import *im, uint32_t index);
const struct pd_plan *pd_import_plan(const struct pd_import *im);
uint64_t pd_import_bytes(const struct pd_import *im);
int64_t pd_import_us(const struct pd_import *im);                               /* time spent verifying and copying */
void pd_import_free(struct pd_import *im);
#endif
