/* How fast KV gets from here to a pd-kvsend that listens: the very transfers that KV makes, of a KV made up for it (each 8 bytes tell their place), verified by
 * the other end chunk by chunk and dropped there.
 *
 * Each transport that both can use, sizes from 4 KiB to 256 MiB: the first transfer of a size (cold: memory that nobody has touched, slabs not mapped yet) and
 * the median and the 99th percentile of those after it (warm), from the offer until the other end has verified all of it. Beside each size its ceiling, in the
 * same minute: of shm a copy of as many bytes within memory, of the others as many bytes written to the same connection and read there, neither hashed nor kept.
 * One connection; it counts as a peer. */
#ifndef PD_SERVE_PROBE_H
#define PD_SERVE_PROBE_H
#include "../wire/endpoint.h"

struct pd_probe_opts {
    const char *at;                     /* endpoint to dial */
    const char *via, *worker;           /* as pd_sender_opts */
    const struct pd_net *net;
    size_t max_record;
    uint64_t max_bytes;                 /* largest size; 0: 256 MiB */
};
struct pd_probe_row { char scheme[12]; uint64_t bytes; uint32_t n; int64_t cold_us, p50_us, p99_us; double bytes_s, ceiling_bytes_s; };
enum { PD_PROBE_ROWS = 64 };
struct pd_probe {
    char from[100], to[100], at[300], via[300];     /* via: what is in use, best first, and why the others are not */
    bool one_host;
    int64_t ping_p50_us, ping_p99_us;   /* a word there and back */
    struct pd_probe_row row[PD_PROBE_ROWS]; uint32_t n_rows;
    struct pd_err slow;                 /* a faster way that should have been used and was not, and why; code 0: none */
    struct pd_err cut;                  /* sizes were left out, and why */
    struct pd_err none;                 /* a way that was agreed on carried nothing, and why */
};
int pd_probe_run(const struct pd_probe_opts *o, struct pd_probe *out, struct pd_err *e);
int pd_probe_text(const struct pd_probe *p, struct pd_buf *b, struct pd_err *e);
int pd_probe_record(const struct pd_probe *p, struct pd_buf *b, struct pd_err *e);    /* a `path` record (pd-wire.5) */
#endif
