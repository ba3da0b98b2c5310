/* The prefill worker as a daemon: routed requests in, KV to the decode workers that their routes name.
 *
 * A request needs a `route` with d (wire/routing). The worker dials d.at and says hello, one connection a decode worker, kept and dialled anew when it is gone;
 * prefills, all runs in one batch; and gives the KV of run and op as its layers finish, under a lease. Its client, the router, gets for each request one of
 *   kv      published: the descriptor without payload, with the first tokens and the times of the stages;
 *   error   it failed, or was cancelled (class cancelled);
 * and after a `kv` an `error` may still come: the decode worker could not be reached or went away, and has no KV of ours.
 *
 * A connection that is lost is made anew, and what was on its way is offered again over it: the decode worker says which chunks it has verified, and only the
 * others go.
 * Blocks: the lease holds them from the run's first step until the decode worker has released it, or it has expired (lease_us) or was revoked. What a decode
 * worker that died had not read stays leased, so that the same run can go to another: the same run and op with another d moves it there without a second
 * prefill. When new runs find no blocks such leases are revoked first; else they wait.
 * A run in hand that comes again with its op is joined: who asked last gets the answer.
 * Cancel, by a `cancel` record on the run's own connection or with its token, or because the client is gone: the run leaves the batch before its next step, its
 * lease is revoked, and the decode worker is told.
 * Drain: no new runs; those in hand are prefilled and given, and all leases end.
 */
#ifndef PD_SERVE_GIVER_H
#define PD_SERVE_GIVER_H
#include "../engine/runtime.h"
#include "../trace/event.h"
#include "daemon.h"

struct pd_giver_opts {
    int64_t seed;
    uint32_t max_runs;          /* see pd_desk; 0: four times max_seqs */
    int64_t lease_us;           /* 0: 30 s */
    const char *via;            /* NULL: PD_XFER_VIA */
    uint32_t streams;           /* of tcp; 0: PD_XFER_STREAMS */
    struct pd_trace *trace;     /* or NULL */
    const char *const *routers; /* where to register (register.h), NULL-ended, or NULL */
};
/* As pd_worker_serve. */
int pd_giver_serve(struct pd_runtime *rt, const struct pd_giver_opts *o, struct pd_daemon_opts *d, struct pd_err *e);
#endif
