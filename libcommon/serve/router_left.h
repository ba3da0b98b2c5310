/* Inside the router: what a former life left at the workers, and the pairs that a person is asked about. */
#ifndef PD_SERVE_ROUTER_LEFT_H
#define PD_SERVE_ROUTER_LEFT_H
struct pd_router;
/* The workers of what was left are told to drop it, each over a connection of its own, until they have answered; what a worker that does not come back in
 * ten minutes had is forgotten. */
void pd_rt_left_beat(struct pd_router *r, int64_t now);
void pd_rt_left_free(struct pd_router *r);
/* A hold, or the end of one, into the trace. */
void pd_rt_trace_pair(struct pd_router *r, const char *what, const char *p, const char *d, const char *key, const char *text);
#endif
