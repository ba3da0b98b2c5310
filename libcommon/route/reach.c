/* Who reaches whom, by the paths, kins and rows of a record. */
#include "choose_in.h"

/* The paths of domains as a table: the more particular ones last, the earlier of equals after the later. */
void pd_reach_survey(struct choice *c)
{
    const struct pd_route_rec *r = c->r;
    struct ground *g = c->g;
    uint32_t n = r->n_domains ? r->n_domains : 1;
    g->any_own = false;
    for (uint32_t i = 0; i < r->n_paths; i++)
        g->any_own |= r->paths[i].p >= 0 || r->paths[i].d >= 0;
    memset(g->own[0], 0, g->any_own ? r->n_p : 0);
    memset(g->own[1], 0, g->any_own ? r->n_d : 0);
    for (uint32_t i = 0; i < r->n_paths; i++) {
        if (r->paths[i].p >= 0)
            g->own[0][r->paths[i].p] = true;
        if (r->paths[i].d >= 0)
            g->own[1][r->paths[i].d] = true;
    }
    g->any_apart = false;
    for (uint32_t i = 0; i < r->n_p; i++)
        g->any_apart |= r->p[i].apart.n > 0;
    memset(g->apart[0], 0, g->any_apart ? r->n_p : 0);
    memset(g->apart[1], 0, g->any_apart ? r->n_d : 0);
    for (uint32_t i = 0; g->any_apart && i < r->n_p; i++)
        for (uint32_t k = 0; r->p[i].apart.n && k < r->n_d; k++)
            if (pd_route_apart(&r->p[i], (int32_t)k))
                g->apart[0][i] = g->apart[1][k] = true;
    if (!(g->table = n <= PD_ROUTE_DOMAINS))
        return;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < n; k++)
            g->path[i][k] = -1;
    for (int rank = 0; rank < 3; rank++)
        for (uint32_t at = r->n_paths; at-- > 0;) {
            const struct pd_route_path *x = &r->paths[at];
            if (x->p >= 0 || x->d >= 0 || (x->from >= 0) + (x->to >= 0) != rank)
                continue;
            for (uint32_t i = x->from < 0 ? 0 : (uint32_t)x->from; i < (x->from < 0 ? n : (uint32_t)x->from + 1); i++)
                for (uint32_t k = x->to < 0 ? 0 : (uint32_t)x->to; k < (x->to < 0 ? n : (uint32_t)x->to + 1); k++)
                    g->path[i][k] = (int16_t)at;
        }
}

static bool own(const struct choice *c, int side, int32_t i)
{
    return (c->g->any_own && c->g->own[side][i]) || (c->g->any_apart && c->g->apart[side][i]);
}

int32_t pd_reach_path(const struct choice *c, int32_t p, int32_t d)
{
    if (!c->g->table || (c->g->any_own && (c->g->own[0][p] || c->g->own[1][d])))
        return pd_route_path_of(c->r, p, d);
    return c->g->path[c->r->p[p].domain][c->r->d[d].domain];
}

/* What moving the KV of so many tokens from p to d takes, us, by the policies that tell a path from another; -1: none can go. */
int64_t pd_reach_move(const struct choice *c, int32_t p, int32_t d, uint32_t tokens)
{
    const struct pd_route_rec *r = c->r;
    bool priced_ways = c->policy.kind == PD_POLICY_CONDITIONAL;
    int32_t fit = pd_route_fit_of(r, r->p[p].kin, r->d[d].kin), path = pd_reach_path(c, p, d);
    if (same(&r->p[p], &r->d[d]) || (fit >= 0 && r->fits[fit].why.p) || (path >= 0 && r->paths[path].x) || pd_route_apart(&r->p[p], d))
        return -1;
    if (path < 0 || (!priced_ways && c->policy.kind != PD_POLICY_FIXED))
        return 0;
    const struct pd_route_path *x = &r->paths[path];
    double scale = priced_ways ? c->scale : 0, ns = (double)tokens * r->input.kv_bytes / 1024 * (1 + (double)x->active);
    return pd_spread_at(x->latency, scale) + pd_spread_at(pd_spread_times(x->kib_ns, ns / 1e3), scale) + pd_spread_at(x->sync, scale) + x->penalty_us;
}

/* The same of a pair that may, in the unit that the policy compares. Blocks: those of the prompt that p computes in the meantime. */
int64_t pd_reach_adds(const struct choice *c, int32_t p, int32_t d)
{
    const struct pd_route_row *w = &c->r->p[p];
    int64_t us = pd_reach_move(c, p, d, c->r->d[d].miss_tokens);
    if (us <= 0 || c->policy.kind != PD_POLICY_FIXED)
        return us;
    return w->prefill.p50 > 0 ? small((uint64_t)((double)us * w->miss_blocks / (double)w->prefill.p50 + 0.5)) : 0;
}

/* The same by d's own row, as a replay may lack p's. Blocks: those of the prompt that d computes in the meantime. */
int64_t pd_reach_adds_to(const struct choice *c, int32_t p, int32_t d)
{
    const struct pd_route_row *w = &c->r->d[d];
    int64_t us = pd_reach_move(c, p, d, w->miss_tokens);
    if (us <= 0 || c->policy.kind != PD_POLICY_FIXED)
        return us;
    return w->prefill.p50 > 0 ? small((uint64_t)((double)us * w->miss_blocks / (double)w->prefill.p50 + 0.5)) : 0;
}

static void nearer(struct near *o, int64_t cost, int32_t of)
{
    if (cost < 0 || (o->of[1] >= 0 && cost >= o->cost[1]))
        return;
    int at = o->of[0] < 0 || cost < o->cost[0] ? 0 : 1;
    o->cost[1] = at ? cost : o->cost[0];
    o->of[1] = at ? of : o->of[0];
    o->cost[0] = at ? o->cost[0] : cost;
    o->of[0] = at ? o->of[0] : of;
}

/* Those of a side that may, put together. */
void pd_reach_muster(struct choice *c, int side)
{
    struct ground *g = c->g;
    uint32_t rows = side ? c->r->n_d : c->r->n_p;
    g->n[side] = 0;
    memset(g->head[side], -1, sizeof g->head[side]);
    for (uint32_t i = 0; i < rows; i++) {
        const struct pd_route_row *w = row_of(c, side, (int32_t)i);
        int16_t *head = &g->head[side][w->domain % PD_ROUTE_DOMAINS];
        bool alone = own(c, side, (int32_t)i);
        if (!may(c, side, (int32_t)i, true))
            continue;
        int32_t k = alone ? -1 : *head;
        while (k >= 0 && (g->group[side][k].domain != w->domain || g->group[side][k].kin != w->kin))
            k = g->group[side][k].next;
        if (k < 0) {
            k = g->n[side]++;
            g->group[side][k] = (struct group){ w->domain, w->kin, { (int32_t)i, -1 }, alone ? -1 : *head, false, { { 0, 0 }, { -1, -1 } } };
            if (!alone)
                *head = (int16_t)k;
        } else if (g->group[side][k].i[1] < 0)
            g->group[side][k].i[1] = (int32_t)i;
        g->of[side][i] = (int16_t)k;
    }
}

/* Who gives to d at the least cost; -1: nobody may. */
int32_t pd_reach_giver(struct choice *c, int32_t d)
{
    struct ground *g = c->g;
    struct group *o = &g->group[1][g->of[1][d]];
    for (int i = 0; !o->known && i < g->n[0]; i++)
        for (int k = 0; k < 2 && g->group[0][i].i[k] >= 0; k++)
            for (int m = 0; m < 2 && o->i[m] >= 0; m++) {       /* one of them may be the worker itself */
                int64_t cost = pd_reach_move(c, g->group[0][i].i[k], o->i[m], c->r->input.n_tokens);
                if (cost < 0)
                    continue;
                nearer(&o->to, cost, g->group[0][i].i[k]);
                break;
            }
    o->known = true;
    return o->to.of[0] >= 0 && same(&c->r->p[o->to.of[0]], &c->r->d[d]) ? o->to.of[1] : o->to.of[0];
}

/* Which of the best D is nearest to p; -1: it reaches none. */
int32_t pd_reach_taker(struct choice *c, int32_t p)
{
    struct group *o = &c->g->group[0][c->g->of[0][p]];
    for (int k = 0; !o->known && k < c->n[1]; k++) {
        int32_t d = c->best[1][k];
        uint32_t lacks = c->r->d[d].miss_tokens;
        int64_t cost = c->r->d[d].x_kv ? -1 : pd_reach_move(c, o->i[0], d, lacks);
        nearer(&o->to, cost < 0 && !c->r->d[d].x_kv && o->i[1] >= 0 ? pd_reach_move(c, o->i[1], d, lacks) : cost, d);
    }
    o->known = true;
    return o->to.of[0] >= 0 && same(&c->r->p[p], &c->r->d[o->to.of[0]]) ? o->to.of[1] : o->to.of[0];
}
