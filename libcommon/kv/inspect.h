/* The verbs of `pd-trace kv`: what is in dump files, is it whole, what are its numbers. All read through the dump reader's child (dump.h), run by run, each
 * into a pool of its own; none trusts the file. Text or JSON Lines go to o->out. Failures are told by the returned error; findings that are no
 * failure of the verb itself (a chunk that does not verify, a difference) are printed and counted. */
#ifndef PD_KV_INSPECT_H
#define PD_KV_INSPECT_H
#include <stdio.h>
#include "dump.h"
#include "dump_format.h"

struct pd_kv_opts {
    FILE *out;
    bool json, quiet, verbose;
    const char *run;                    /* NULL: all runs */
    uint32_t block_size;                /* convert: 0: as it is */
    const char *order;                  /* convert: "HND", "NHD", NULL: as it is */
    int64_t t0, t1, l0, l1;             /* slice: tokens [t0, t1), layers [l0, l1); -1: from the first, to the last */
};
int pd_kv_ls(const char *path, const struct pd_kv_opts *o, struct pd_err *e);
int pd_kv_quickcheck(const char *path, const struct pd_kv_opts *o, struct pd_err *e);
int pd_kv_verify(const char *path, const struct pd_kv_opts *o, struct pd_err *e);       /* PD_ECORRUPT when anything did not verify */
int pd_kv_stat(const char *path, const struct pd_kv_opts *o, struct pd_err *e);
int pd_kv_diff(const char *a, const char *b, const struct pd_kv_opts *o, bool *differ, struct pd_err *e);
int pd_kv_slice(const char *path, const char *to, const struct pd_kv_opts *o, struct pd_err *e);
int pd_kv_convert(const char *path, const char *to, const struct pd_kv_opts *o, struct pd_err *e);
int pd_kv_salvage(const char *path, const char *to, const struct pd_kv_opts *o, struct pd_err *e);     /* PD_ECORRUPT when nothing could be saved */
int pd_kv_png(const char *path, const char *to, const struct pd_kv_opts *o, struct pd_err *e);

/* One run, loaded. EACH mode: `seen` says which (block, layer) came and verified; n_faults what did not; closed: its kv record came. HEAD: no pool. */
struct pd_kv_run {
    struct pd_arena arena;
    struct pd_kvdesc d;
    struct pd_pool *pool; uint32_t *blocks, n_blocks;
    uint8_t *seen;                      /* [n_blocks][layers], EACH only */
    uint32_t n_faults, n_chunks;
    bool closed;
};
typedef int pd_kv_run_fn(void *ctx, struct pd_kv_run *r, struct pd_err *e);
typedef void pd_kv_fault_fn(void *ctx, const char *message);
struct pd_kv_walk { enum pd_dump_mode mode; const char *run; pd_kv_run_fn *run_fn; pd_kv_fault_fn *fault_fn; void *ctx; };
/* file_fd: read this descriptor (already checked) and use path for messages; -1: open path. */
int pd_kv_each_run(const char *path, int file_fd, const struct pd_kv_walk *w, struct pd_err *e);
/* The run w->run of a stream of records, among whatever else is there; DATA. fd stays the caller's. */
int pd_kv_run_in(int fd, const char *name, size_t max_record, const struct pd_kv_walk *w, struct pd_err *e);
/* Element i of a row: token t, head h of layer l, K (v 0) or V (1), as float. `out` [head_dim]. */
void pd_kv_row(const struct pd_kv_run *r, uint32_t l, int v, uint32_t t, uint32_t h, float *out);
void pd_kv_json_str(FILE *f, const char *s);
/* A part of a loaded run as a new run in a dump being written. */
struct pd_kv_cut { uint32_t t0, t1, l0, l1; };
int pd_kv_write_cut(struct pd_dump_w *w, const struct pd_kv_run *r, const struct pd_kv_cut *c, struct pd_err *e);
#endif
