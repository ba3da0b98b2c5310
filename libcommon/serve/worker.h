/* The decode worker as a daemon: requests in, tokens and results out, for many clients at once; and KV from prefill workers.
 *
 * All requests of all clients share one batch. A request without a route, or with one that says aggregated or local, is run whole here. One that is routed
 * remote waits for the KV of its run and op, which a prefill worker dials in with (hello) and offers; it is taken, verified, and decoded from there, and
 * no token of it leaves before that. What goes wrong with the KV ends in computing it here at once, and the result says so in `fallback`: a kind, ": ", words.
 *   prefill_timeout       nobody offered it within timeouts_ms.prefill (60 s)
 *   prefill_worker_gone   the connection to the prefill worker ended: at once when its KV was complete, else unless the router names another within a second
 *   transfer_timeout      timeouts_ms.transfer has passed, or nothing came for a while
 *   lease_ended           the lease ran out, or the prefill worker withdrew it
 *   integrity             checksum, layout, other tokens than the request's
 *   fingerprint_mismatch  it is of another model
 *   out_of_blocks         its blocks were needed by what decodes already
 *   kv_failed             anything else
 * With in_place the lease lasts as long as the run, and is looked at before each token: a step that was read after its end is dropped, and the run's KV computed
 * again here (lease_ended; the mode stays remote).
 * The event `fallback` is told by this worker for the above, and when a run that waits for KV is told to do without; by the router when a run is local from
 * the start.
 *
 * A routed run in hand may come again, over the same connection, with another route: local, it is computed here now (nothing happens if that is so already);
 * remote with the same op, it goes on waiting for that; with another op, for the new one.
 * A route with `resume` (n 1): generation goes on after these tokens, whose text is rebuilt; token records begin after them, the result has all. Of `logprobs`
 * the first ones are 0: who resumes has them.
 *
 * A client gets `token` records when the request says stream: true, or it says nothing and `stream` is set, and one `result` a choice. A client that is gone, a
 * `cancel` on the run's own connection, or one with its cancel_token ends the run between two steps of the batch, and its transfer: its blocks are free then.
 * A run ends by completed, failed or cancelled in the trace.
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
    const char *via;            /* schemes for KV, best first; NULL: "shm,inline" */
    bool in_place;              /* KV that comes by shm is read where the prefill worker has it, under its lease, and not copied */
    struct pd_trace *trace;     /* or NULL */
    const char *const *routers; /* where to register (register.h), NULL-ended, or NULL */
};
/* From `starting` to `gone`; the daemon's entries and worker are filled in here. 0 after a drain, PD_ECANCEL after a second signal. */
int pd_worker_serve(struct pd_runtime *rt, const struct pd_worker_opts *o, struct pd_daemon_opts *d, struct pd_err *e);
#endif
