#include "way.h"
#include <string.h>

const char *const pd_way_terms[PD_WT_N] = { "queue", "prefill", "transfer", "sync", "ttft", "tpot", "completion" };

enum { ALONE = 1 << PD_WT_QUEUE | 1 << PD_WT_PREFILL | 1 << PD_WT_TTFT | 1 << PD_WT_TPOT | 1 << PD_WT_COMPLETION,
       BOTH = ALONE | 1 << PD_WT_TRANSFER | 1 << PD_WT_SYNC };

unsigned pd_way_expected(const struct pd_route_rec *r, const struct pd_route_pair *o, struct pd_spread out[PD_WT_N])
{
    const struct pd_route_row *d = &r->d[o->d], *p = o->p < 0 ? d : &r->p[o->p];
    bool alone = o->p < 0;
    memset(out, 0, PD_WT_N * sizeof *out);
    out[PD_WT_QUEUE] = alone ? pd_spread_sum((struct pd_spread[]){ d->slot, d->queue }, 2) : p->queue;
    out[PD_WT_PREFILL] = alone ? pd_spread_sum((struct pd_spread[]){ d->prefill, d->interference }, 2) : p->prefill;
    out[PD_WT_TTFT] = o->ttft;
    out[PD_WT_TPOT] = d->tpot;
    out[PD_WT_COMPLETION] = o->completion;
    if (alone)
        return ALONE;
    struct pd_spread sync = o->path >= 0 ? r->paths[o->path].sync : (struct pd_spread){ 0, 0, 0 };
    out[PD_WT_TRANSFER] = pd_exposed(o);
    out[PD_WT_SYNC] = pd_spread_sum((struct pd_spread[]){ sync, d->slot }, 2);
    return BOTH;
}

unsigned pd_way_took(const struct pd_outcome_rec *o, int64_t out[PD_WT_N])
{
    const struct { uint32_t has; int64_t us; } of[PD_WT_N] = {
        { PD_OC_QUEUE, o->queue_us }, { PD_OC_PREFILL, o->prefill_us }, { PD_OC_TRANSFER, o->transfer_us }, { PD_OC_SYNC, o->sync_us },
        { PD_OC_TTFT, o->ttft_us }, { PD_OC_TPOT, o->tpot_us }, { PD_OC_COMPLETION, o->completion_us } };
    unsigned got = 0;
    for (int i = 0; i < PD_WT_N; i++) {
        bool sane = o->has & of[i].has && of[i].us >= 0 && of[i].us <= PD_US_MOST;
        out[i] = sane ? of[i].us : 0;
        got |= (unsigned)sane << i;
    }
    return got;
}

int64_t pd_way_price(const struct pd_route_rec *r, const struct pd_route_pair *o)
{
    return pd_spread_at(o->completion, pd_risk_scale(r->risk)) + pd_pair_others(r, o);
}

const struct pd_route_pair *pd_way_best(const struct pd_route_rec *r, bool remote)
{
    const struct pd_route_pair *best = NULL, *chosen = r->chosen.any ? &r->pair[r->chosen.pair] : NULL;
    if (chosen && (chosen->p >= 0) == remote)           /* of its own kind the one that was taken, whatever it went by */
        return chosen;
    for (uint32_t i = 0; i < r->n_pairs; i++) {
        const struct pd_route_pair *o = &r->pair[i];
        if (!o->x && (o->p >= 0) == remote && (!best || pd_way_price(r, o) < pd_way_price(r, best)))
            best = o;
    }
    return best;
}

bool pd_way_done(const struct pd_route_rec *r, const struct pd_outcome_rec *o)
{
    return r->chosen.any && !o->fallback.n && !o->migrations && !strcmp(o->mode, pd_mode_names[r->chosen.mode]) &&
           (!strcmp(o->finish_reason, "stop") || !strcmp(o->finish_reason, "length"));
}
