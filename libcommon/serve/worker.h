/* A worker as a daemon: one process, one model, one pool of blocks, one batch and the thread that computes it; for many clients at once.
 *
 * By its role it has one side or two:
 *   decode    it answers requests: whole ones, and those whose KV another worker gives it (runner.h)
 *   prefill   it prefills, and gives the KV to others (giver.h)
 *   both      either: a request that is routed remote with this worker as p is prefilled and given, any other is answered. All of them share the batch, so
 *             that prompts of either side are computed in chunks beside what decodes, oldest first.
 *
 * Blocks of a worker with both sides. What it gives stays in the pool until the other end has it, and cannot be preempted. So it holds half of the pool at the
 * most: what is taken from others and what decodes always find the rest. Two workers that give to each other can then not wait for each other: KV that one
 * gives fits in what the other keeps free of its own giving (of workers with pools of different sizes: a KV can wait for a lease only at a worker with a
 * smaller pool than its giver's, so there is no circle). A run that outgrows the other half may need leased blocks all the same: after a while the youngest
 * lease is revoked for it, and the worker that had it computes its KV itself.
 * A prompt that needs more than half is not prefilled for others here.
 */
#ifndef PD_SERVE_WORKER_H
#define PD_SERVE_WORKER_H
#include "../engine/runtime.h"
#include "../trace/event.h"
#include "daemon.h"

struct pd_worker_opts {
    const char *prefer;         /* of role both, or NULL: register.h */
    int64_t seed;               /* of requests that bring none */
    bool stream;
    uint32_t max_runs;          /* taken in at once; who brings one more is not read until one ends. 0: four times max_seqs */
    const char *via;            /* schemes for KV, best first; NULL: pd_via_default */
    bool in_place;              /* KV that comes by shm is read where its giver has it, under its lease, and not copied */
    int64_t lease_us;           /* of KV that is given; 0: 30 s */
    uint32_t streams;           /* of tcp; 0: PD_XFER_STREAMS */
    struct pd_trace *trace;     /* or NULL */
    const char *const *routers; /* where to register (register.h), NULL-ended, or NULL */
};
/* From `starting` to `gone`; the role is the daemon's, its entries and worker are filled in here. 0 after a drain, PD_ECANCEL after a second signal. */
int pd_worker_serve(struct pd_runtime *rt, const struct pd_worker_opts *o, struct pd_daemon_opts *d, struct pd_err *e);
#endif
