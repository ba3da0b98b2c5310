/* What the writer and the reader of dump files share (pd-kv.5): names, types, the order of bytes in a chunk and the seed of its checksum. */
#ifndef PD_KV_DUMP_FORMAT_H
#define PD_KV_DUMP_FORMAT_H
#include <hdf5.h>
#include "handover.h"

#define PD_DUMP_FORMAT "pd-kv"
#define PD_DUMP_VERSION 1
#define PD_DUMP_COMPACT 60000           /* bytes: smaller datasets lie in their object header, so that they survive with the metadata */
#define PD_DUMP_READER "pd-dump-reader" /* argv[0] of the reading child */

/* The HDF5 type of a KV dtype; < 0 for others. The caller closes it. */
hid_t pd_dump_type(const char *dtype);
/* One chunk: a block's K or V of one layer, [block_size, kv_heads, head_dim]; a block of the pool is [kv_heads, block_size, head_dim]. */
void pd_dump_rows_of_block(const struct pd_kv_layout *l, size_t el, const uint8_t *block, uint8_t *rows);
void pd_dump_block_of_rows(const struct pd_kv_layout *l, size_t el, const uint8_t *rows, uint8_t *block);
/* XXH3-64 of a chunk is over all its bytes before the filters, the unused tail of the last one zero, seeded as a chunk on the wire is, with the top
 * bit of the layer set for V: right bytes in a wrong place, or K for V, fail. */
uint64_t pd_dump_seed(const struct pd_kvdesc *d, uint32_t layer, int v, uint32_t block);
/* Before a sequence of libhdf5 calls; then *e from the innermost entry of the first error since. Returns e's code. */
void pd_h5_begin(void);
int pd_h5_fail(struct pd_err *e, int code, const char *what);

/* The superblock, by our own parse: versions 2 and 3 with 8-byte offsets, base 0, no extension, closed. PD_ECORRUPT otherwise. `eof` is the length
 * that the file had when it was written; a shorter file was cut. */
struct pd_h5_super { int version; uint64_t eof, root, size /* of the file now */; };
int pd_h5_super_read(int fd, const char *path, struct pd_h5_super *s, struct pd_err *e);

/* What the child is asked for. HEAD: structure only; each run's kv alone. DATA: offer, chunks, kv; stops at the first fault. EACH: chunks of one
 * block each; a chunk that does not verify is an `error` record with its index in `action`, and reading goes on. SERVE: as DATA, but a run
 * that does not verify is told by an `error` record and left without the rest of its chunks; its kv and the other runs follow. */
enum pd_dump_mode { PD_DUMP_HEAD, PD_DUMP_DATA, PD_DUMP_EACH, PD_DUMP_SERVE };
struct pd_dump_r;
int pd_dump_spawn(int file_fd, const char *path, const char *run, enum pd_dump_mode mode, struct pd_dump_r **out, int *fd, struct pd_err *e);
void pd_dump_child_link(void);          /* pulls the child's object into every program that reads dumps */
#endif
