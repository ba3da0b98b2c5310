/* pd-kvsend: two ends, runs flow from in to out.
 *
 * In: a record stream (stdin, a file, a socket), a dump file, or peers that give KV by the transfer protocol (xfer/proto.h), which a `hello` opens at any
 * point of a stream that comes over a socket. Out: any number of receivers, each of which gets everything: a record stream, a dump file, or a peer that takes
 * KV by the transfer protocol, which is asked with `hello` when the first KV is there; unanswered for 2 s the stream goes on as it was.
 *
 * Every chunk is verified here before any of it goes on, whatever brought it; only payload and lease of a descriptor are rewritten. Other records pass in
 * order. A run whose KV is damaged loses its KV and keeps its `kv` record: whoever decodes computes it again.
 *
 * Memory: where all ends are plain streams a chunk is in hand at a time, and no KV is kept. Else a run lies in the pool from its offer until each receiver
 * has verified it (so that a dropped connection can be resumed): at most kv_mem bytes for each KV layout. Beside it one record of each sender, and 1 MiB and
 * a record of each receiver. What does not fit waits, and its sender with it; a slow receiver that is alive is waited for as long as it takes.
 *
 * One thread, no callbacks: pd_sender_run returns when all has arrived, or with the reason. */
#ifndef PD_SERVE_SENDER_H
#define PD_SERVE_SENDER_H
#include "../kv/codec.h"
#include "../trace/event.h"
#include "../wire/endpoint.h"

struct pd_sender_opts {
    const char *in;                     /* endpoint; NULL: "-" */
    const char *const *out;             /* endpoints, NULL-ended; NULL: "-" */
    uint32_t peers;                     /* served by each listening endpoint; 0: 1 */
    const char *via;                    /* transports that may be used, best first; NULL: all */
    const struct pd_net *net;           /* patience with endpoints that are not there yet, keys */
    int64_t resume_us;                  /* until a dropped transfer is given up; 0: net's patience */
    size_t max_record;
    int64_t kv_mem;                     /* 0: an eighth of memory, 1 GiB at most */
    uint64_t chunk_bytes;               /* of chunks that go out; 0: as they come */
    const char *const *out_via;         /* instead of via, one of each of out; or NULL */
    bool coded;                         /* chunk records that go out are coded as `codec` says; else payload goes out plain, or as it came */
    enum pd_codec_mode codec;
    bool json, keep_going, strict;
    const char *worker;                 /* kvsend@host:pid */
    struct pd_trace *trace;             /* or NULL */
};
/* *status: the worst of what befell single runs. */
int pd_sender_run(const struct pd_sender_opts *o, int *status, struct pd_err *e);
#endif
