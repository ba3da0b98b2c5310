/* Inside a choice: what choose.c (ranks, ways, the choice) and reach.c (who reaches whom) share. */
#ifndef PD_ROUTE_CHOOSE_IN_H
#define PD_ROUTE_CHOOSE_IN_H
#include <string.h>
#include "choose.h"

#define SMALL ((uint64_t)1 << 40)       /* no count is taken for more */

/* The two nearest on the other side, the nearer one first; -1: nobody. Two, as one may be the worker itself. */
struct near { int64_t cost[2]; int32_t of[2]; };
/* Of one side, domain and kin, none of them with a path of its own: whoever is reached by one is reached by all. Two of them, and who is near to them. */
struct group { uint32_t domain, kin; int32_t i[2], next; bool known; struct near to; };
struct ground {                 /* what the paths of a record come to */
    int16_t path[PD_ROUTE_DOMAINS][PD_ROUTE_DOMAINS];   /* of those without one of their own */
    bool table, any_own, own[2][PD_ROUTE_MOST], any_apart, apart[2][PD_ROUTE_MOST];
    struct group group[2][PD_ROUTE_MOST];
    int16_t head[2][PD_ROUTE_DOMAINS], of[2][PD_ROUTE_MOST]; int n[2];
};
struct choice {
    struct pd_route_rec *r;
    struct pd_policy_spec policy;
    bool remote, local;         /* ways that may be looked at */
    double scale;
    uint32_t queue_lo[2], queue_hi[2];
    int32_t best[2][PD_ROUTE_BEST]; int n[2];   /* rows, P and D */
    struct ground *g;
};

static inline int64_t small(uint64_t v) { return (int64_t)(v < SMALL ? v : SMALL); }
static inline const struct pd_route_row *row_of(const struct choice *c, int side, int32_t i) { return side ? &c->r->d[i] : &c->r->p[i]; }
static inline bool may(const struct choice *c, int side, int32_t i, bool remote)
{
    const struct pd_route_row *w = row_of(c, side, i);
    return !w->x && !(side && remote && w->x_kv);
}
static inline bool same(const struct pd_route_row *p, const struct pd_route_row *d) { return p->at.n == d->at.n && !memcmp(p->at.p, d->at.p, p->at.n); }

void pd_reach_survey(struct choice *c);         /* first; then muster both sides */
void pd_reach_muster(struct choice *c, int side);
int32_t pd_reach_path(const struct choice *c, int32_t p, int32_t d);    /* of r->paths; -1: none is told */
/* What moving the KV of so many tokens from p to d takes, us, by the policies that tell a path from another; -1: none can go. */
int64_t pd_reach_move(const struct choice *c, int32_t p, int32_t d, uint32_t tokens);
/* The same of a pair that may, in the unit that the policy compares; blocks: of the prompt, as p computes them meanwhile, or as d does (a replay may lack p's row). */
int64_t pd_reach_adds(const struct choice *c, int32_t p, int32_t d);
int64_t pd_reach_adds_to(const struct choice *c, int32_t p, int32_t d);
int32_t pd_reach_giver(struct choice *c, int32_t d);    /* who gives to d at the least cost; -1: nobody may */
int32_t pd_reach_taker(struct choice *c, int32_t p);    /* which of the best D is nearest to p; -1: it reaches none */
#endif
