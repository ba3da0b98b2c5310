/* The map `route` of a routed request (pd_request.route, raw msgpack): what the router decided for one attempt, as its workers need it.
 *
 * remote: p prefills and gives the KV to d, which decodes. local, aggregated: d does all; p is null. The same op means the same work: who gets one that it
 * knows joins it. A later request record of the same run with another route changes the plan (serve/router.h).
 */
#ifndef PD_WIRE_ROUTING_H
#define PD_WIRE_ROUTING_H
#include "record.h"

struct pd_place { struct pd_str worker, at; };          /* role@host:pid; "unix:/absolute/path" */
struct pd_routing {
    uint8_t op[16];
    struct pd_str policy;
    char mode[12];                      /* "aggregated", "remote", "local" */
    struct pd_place p, d; bool has_p;   /* p if and only if remote */
    bool early;                         /* the first token may go out from p's kv, before the KV is verified */
    bool again;                         /* a word on a run that was sent before: who has it no more passes it over */
    int64_t waited_us;                  /* at the router, since it accepted the run: it is so much older among those that wait; 0 = absent */
    struct pd_str fallback;             /* why not as first meant; absent = null */
    const int32_t *resume; uint32_t n_resume; bool has_resume;  /* tokens that the client has already: generation goes on after them */
    struct pd_extra extra;
};
/* Appends the map. PD_EFAIL: p is there and mode is not remote, or the other way round. */
int pd_routing_encode(const struct pd_routing *r, struct pd_buf *b, struct pd_err *e);
/* Of pd_request.route. PD_EFAIL, as for any fault of a request; the message begins with "route". */
int pd_routing_decode(struct pd_bin map, struct pd_arena *a, struct pd_routing *r, struct pd_err *e);
#endif
