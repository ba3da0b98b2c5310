/* The router: requests of many clients in, each given to workers by a policy (../route/choose.h), tokens and results back.
 *
 * Each request becomes a run. It waits until a worker may have it, is sent with a `route` inside (../wire/routing.h), and ends with exactly one result a
 * choice,
 * whatever fails on the way. Its records pass unchanged from the worker to the client; the router looks into them for run, choice, position and token alone,
 * and sets the times of a result to those that its client saw.
 *
 * What happens to a run that its workers fail (until the first token has gone out to a client everything may be done again):
 *   prefill worker lost, or says error     another one, once; then its decode worker is told to recompute: mode local, fallback "prefill_worker_gone: ..."
 *   no prefill worker is there             after a second, a worker does it alone: mode local, fallback "no_prefill_worker: ..."
 *   decode worker lost before that         another one from the start; at most `attempts` in all
 *   decode worker lost while streaming     `migrated`: another one of the same fingerprint and numerics goes on after the tokens that went out (n = 1),
 * twice at most
 *   worker drains                          another one; that counts for nothing
 *   nobody may have it                     it waits, within its deadline and at most `wait`; then `blocked`, with who was excluded and why
 *   client gone, cancel, deadline          the workers are told to drop it; what they have not confirmed in a second is ended here
 * A worker is lost when its connection ends, or when it has not been heard of for `gone`; it gets nothing new once it was silent for `suspect`.
 *
 * A run with an idempotency_key outlives its clients, and is answered again to who repeats the key (and the request) until `key_ttl` after its end.
 *
 * A worker that has a run may get a second `request` of it, with another route (`again`): remote with another p, or local. What a worker does then is said in
 * worker.h.
 */
#ifndef PD_SERVE_ROUTER_H
#define PD_SERVE_ROUTER_H
#include "../model/weights.h"
#include "../route/decide.h"
#include "../route/limit.h"
#include "../trace/event.h"
#include "daemon.h"

struct pd_router_opts {
    enum pd_policy policy; uint32_t policy_n;
    struct pd_rules rules;      /* risk 0: the usual ones */
    const char *profile;        /* a file to begin with (pd-profile.5), or NULL */
    const char *const *worker;  /* endpoints to dial, NULL-ended or NULL; others register */
    bool policy_given;          /* else: fixed once a prefill worker is known */
    bool stream, early;         /* clients that say nothing get token records; the first token goes out before the KV is verified */
    int64_t seed;               /* of requests that bring none */
    uint32_t max_runs;          /* taken in at once; 0: 4096 */
    int attempts;               /* of a run before its first token goes out; 0: 4 */
    int64_t wait_us, suspect_us, gone_us, key_ttl_us;   /* 0: 10 s, 3 s, 10 s, 10 min */
    const char *topology, *ledger;      /* files; or NULL */
    struct pd_domain_rule domain;
    struct pd_breaker_opts breaker;
    struct pd_limit_opts fallback;
    size_t max_record;          /* 0: 16 MiB */
    size_t index_bytes;         /* of the prefix index; 0: 256 MiB */
    const struct pd_model *model;       /* its tokenizer and chat template, for requests that bring text; or NULL */
    struct pd_trace *trace;     /* or NULL */
};
/* From `starting` to `gone`. 0 after a drain, PD_ECANCEL after a second signal. */
int pd_router_serve(const struct pd_router_opts *o, struct pd_daemon_opts *d, struct pd_err *e);
#endif
