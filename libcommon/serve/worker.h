/* The aggregated worker (role both): requests in, tokens and results out, for many clients at once.
 *
 * As daemon.h says: the loop owns clients and what is sent to them, one compute thread owns the decoder with its batch and pool; requests go in one way,
 * records come out the other. All requests of all clients share the batch. A client gets `token` records when the request says stream: true, or it says
 * nothing and `stream` is set, and one `result` a choice. A client that is gone, or a `cancel` with the run's cancel_token, ends the run between two steps of
 * the batch: its blocks are free then. A run ends by completed, failed or cancelled in the trace.
 */
#ifndef PD_SERVE_WORKER_H
#define PD_SERVE_WORKER_H
#include "../engine/runtime.h"
#include "../trace/event.h"
#include "daemon.h"

struct pd_worker_opts {
    int64_t seed;               /* of requests that bring none */
    bool stream;
    uint32_t max_runs;          /* taken in at once; who brings one more is not read until one ends. 0: four times max_seqs */
    struct pd_trace *trace;     /* or NULL */
    const char *const *routers; /* where to register (register.h), NULL-ended, or NULL */
};
/* From `starting` to `gone`; the daemon's entries and worker are filled in here. 0 after a drain, PD_ECANCEL after a second signal. */
int pd_worker_serve(struct pd_runtime *rt, const struct pd_worker_opts *o, struct pd_daemon_opts *d, struct pd_err *e);
#endif
