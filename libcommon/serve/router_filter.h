/* pd-route between other commands: requests in, each goes on with its route inside (../wire/routing.h), by the workers of a file. Nothing comes back here, so no worker
 * is ever busy: what counts is what they are and what a request asks for; of equals the one that was given fewest comes first. Other records pass. */
#ifndef PD_SERVE_ROUTER_FILTER_H
#define PD_SERVE_ROUTER_FILTER_H
#include "../wire/stream.h"
#include "router.h"
/* Until the input ends or a signal drains. o: policy, rules, profile, seed, topology, domain, trace. *status: over all requests; a request that nobody may have is answered (blocked)
 * and not passed on. < 0: a stream error, which ended it. */
int pd_router_filter(const struct pd_router_opts *o, const char *workers, struct pd_rstream *in, struct pd_wstream *out, int *status, struct pd_err *e);
#endif
