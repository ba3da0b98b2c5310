/* The dump file: KV of one or many runs in HDF5 (pd-kv.5). Written to a temporary name, fsynced, renamed. Reading is hostile input: libhdf5 runs in a
 * short-lived child with limits; its death is PD_ECORRUPT. */
#ifndef PD_KV_DUMP_H
#define PD_KV_DUMP_H
#include "handover.h"
struct pd_dump_w;
int pd_dump_create(const char *path, struct pd_dump_w **out, struct pd_err *e);
/* One run: desc is the whole kv record (raw msgpack; stored as JSON); hashes [n_full_blocks][16] or NULL; logits [n_vocab] or NULL. */
int pd_dump_add(struct pd_dump_w *w, const struct pd_kvdesc *d, const struct pd_pool *p, const uint32_t *blocks, const uint8_t (*hashes)[16], uint32_t n_hashes,
                const float *logits, uint32_t n_logits, struct pd_err *e);
uint32_t pd_dump_runs(const struct pd_dump_w *w);           /* added so far */
int pd_dump_commit(struct pd_dump_w *w, struct pd_err *e);      /* fsync, rename, free */
void pd_dump_abort(struct pd_dump_w *w);                        /* nothing stays */

/* Reading: gives each run back as the records of a stream (offer, chunks, kv), so that a consumer has one way in. The child's output is that stream:
 * *fd is the read end of a pipe, msgpack. Wait with pd_dump_read_end: PD_ECORRUPT when the child failed. */
struct pd_dump_r;
int pd_dump_read(const char *path, const char *run /* NULL: all */, struct pd_dump_r **out, int *fd, struct pd_err *e);
/* The same for a consumer that serves all it can: a run that does not verify is told by an `error` record, its kv follows without the rest of its chunks, and
 * the other runs go on. */
int pd_dump_serve(const char *path, struct pd_dump_r **out, int *fd, struct pd_err *e);
int pd_dump_read_end(struct pd_dump_r *r, struct pd_err *e);
bool pd_dump_is(const char *path);                              /* a regular file with the magic */
#endif
