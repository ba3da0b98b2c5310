#include "cost.h"
#include <math.h>

static const double KIB = 1024, NS = 1e-3, TIGHT = 0.8;         /* bytes; us a nanosecond; share of D's blocks from which on they are short */
enum { DEAR = 5 };              /* blocks that are all taken: so many times the prompt's prefill, which a preempted run pays */

/* The normal distribution's quantile [Acklam's rational approximation, relative error below 1.2e-9], over that of 0.95. */
double pd_risk_scale(double risk)
{
    double q = risk - 0.5, r = q * q, z;
    if (risk <= 0.97575)
        z = (((((-3.969683028665376e+01 * r + 2.209460984245205e+02) * r - 2.759285104469687e+02) * r + 1.383577518672690e+02) * r - 3.066479806614716e+01) * r +
             2.506628277459239e+00) * q /
            (((((-5.447609879822406e+01 * r + 1.615858368580409e+02) * r - 1.556989798598866e+02) * r + 6.680131188771972e+01) * r - 1.328068155288572e+01) * r + 1);
    else {
        q = sqrt(-2 * log(1 - risk));
        z = -(((((-7.784894002430293e-03 * q - 3.223964580411365e-01) * q - 2.400758277161838e+00) * q - 2.549732539343734e+00) * q + 4.374664141464968e+00) * q +
              2.938163982698783e+00) /
            ((((7.784695709041462e-03 * q + 3.224671290700398e-01) * q + 2.445134137142996e+00) * q + 3.754408661907416e+00) * q + 1);
    }
    return z / 1.6448536269514722;
}

/* A sum under way. */
struct sum { double p50, spread2; uint32_t marks; };

static inline void plus(struct sum *o, struct pd_spread s)
{
    double w = (double)(s.p95 - s.p50);
    o->p50 += (double)s.p50;
    o->spread2 += w * w;
    o->marks |= s.marks;
}

/* permille: how wide such sums have been found to be, as their parts are not by chance alone large together; 0: not known. */
static inline struct pd_spread so_far(const struct sum *o, uint32_t permille)
{
    double wide = permille ? permille / 1000.0 : 1;
    return (struct pd_spread){ pd_us_of(o->p50 + wide * sqrt(o->spread2)), pd_us_of(o->p50), o->marks };
}

struct pd_spread pd_spread_sum(const struct pd_spread *s, int n)
{
    struct sum t = { 0, 0, 0 };
    for (int i = 0; i < n; i++)
        plus(&t, s[i]);
    return so_far(&t, 0);
}

struct pd_spread pd_spread_times(struct pd_spread s, double by) { return (struct pd_spread){ pd_us_of((double)s.p95 * by), pd_us_of((double)s.p50 * by), s.marks }; }

struct pd_spread pd_exposed(const struct pd_route_pair *o)
{
    int64_t over = pd_us_of((double)o->overlap_us);
    return (struct pd_spread){ o->transfer.p95 > over ? o->transfer.p95 - over : 0, o->transfer.p50 > over ? o->transfer.p50 - over : 0, o->transfer.marks };
}

static int particular(const struct pd_route_path *x) { return 4 * (x->p >= 0) + 4 * (x->d >= 0) + (x->from >= 0) + (x->to >= 0); }

int32_t pd_route_path_of(const struct pd_route_rec *r, int32_t p, int32_t d)
{
    int32_t best = -1, from = (int32_t)r->p[p].domain, to = (int32_t)r->d[d].domain;
    int rank = -1;
    for (uint32_t i = 0; i < r->n_paths; i++) {
        const struct pd_route_path *x = &r->paths[i];
        if ((x->p >= 0 && x->p != p) || (x->d >= 0 && x->d != d) || (x->from >= 0 && x->from != from) || (x->to >= 0 && x->to != to) || particular(x) <= rank)
            continue;
        rank = particular(x);
        best = (int32_t)i;
    }
    return best;
}

int32_t pd_route_fit_of(const struct pd_route_rec *r, uint32_t p_kin, uint32_t d_kin)
{
    for (uint32_t i = 0; i < r->n_fits; i++)
        if (r->fits[i].p == p_kin && r->fits[i].d == d_kin)
            return (int32_t)i;
    return -1;
}

static double out_tokens(const struct pd_route_rec *r) { return r->input.out_p50 ? r->input.out_p50 : 1; }

/* Blocks that run short cost a prefill now and then: whose, nobody knows, so this run's on D. */
static int64_t capacity(const struct pd_route_rec *r, const struct pd_route_row *d)
{
    uint32_t bs = r->input.block_size;
    if (!d->blocks_most || !bs)
        return 0;
    double need = ceil(((double)r->input.n_tokens + (double)r->input.out_p95 * r->input.n) / bs), u = ((double)d->blocks + need) / (double)d->blocks_most;
    double over = (u - TIGHT) / (1 - TIGHT);
    return over <= 0 ? 0 : pd_us_of((over < DEAR ? over : DEAR) * (double)d->prefill.p50);
}

static void local(const struct pd_route_rec *r, const struct pd_route_row *d, struct pd_route_pair *o)
{
    struct sum t = { 0, 0, 0 };
    plus(&t, d->slot);
    plus(&t, d->queue);
    plus(&t, d->prefill);
    plus(&t, d->interference);
    o->ttft = so_far(&t, r->input.local_ttft);
    plus(&t, pd_spread_times(d->tpot, out_tokens(r) - 1));
    o->completion = so_far(&t, r->input.local_completion);
    o->itl_us = pd_us_of((double)d->seqs * (double)d->prefill.p50);           /* its prompt is computed between their tokens */
    o->queue_us = pd_us_of((double)d->queue_runs * (double)d->prefill.p50);
}

static void remote(const struct pd_route_rec *r, const struct pd_route_row *p, const struct pd_route_row *d, struct pd_route_pair *o)
{
    static const struct pd_route_path guess = { .p = -1, .d = -1, .from = -1, .to = -1 };
    const struct pd_route_path *x = o->path >= 0 ? &r->paths[o->path] : &guess;
    o->bytes = (uint64_t)d->miss_tokens * r->input.kv_bytes;
    double shared = (double)o->bytes / KIB * NS * (1 + (double)x->active);
    struct sum way = { 0, 0, 0 }, t = { 0, 0, 0 };
    plus(&way, x->latency);
    plus(&way, (struct pd_spread){ pd_us_of((double)x->kib_ns.p95 * shared), pd_us_of((double)x->kib_ns.p50 * shared), x->kib_ns.marks });
    o->transfer = so_far(&way, 0);
    int64_t over = pd_us_of((double)p->prefill.p50 * x->overlap_permille / 1000);
    o->overlap_us = over < o->transfer.p50 ? over : o->transfer.p50;
    plus(&t, p->queue);
    plus(&t, p->prefill);
    if (r->input.early)
        o->ttft = so_far(&t, r->input.remote_ttft);
    plus(&t, (struct pd_spread){ o->transfer.p95 - o->overlap_us, o->transfer.p50 - o->overlap_us, o->transfer.marks });
    plus(&t, x->sync);
    plus(&t, d->slot);
    t.p50 += (double)x->penalty_us;
    if (!r->input.early)
        o->ttft = so_far(&t, r->input.remote_ttft);
    plus(&t, pd_spread_times(d->tpot, out_tokens(r) - 1));
    o->completion = so_far(&t, r->input.remote_completion);
    o->itl_us = pd_us_of((double)p->seqs * (double)p->prefill.p50);
    o->queue_us = pd_us_of((double)p->queue_runs * (double)p->prefill.p50);
    o->link_us = pd_us_of((double)x->active * (double)o->transfer.p50);
}

void pd_pair_cost(const struct pd_route_rec *r, int32_t p, int32_t d, int32_t path, struct pd_route_pair *o)
{
    const struct pd_route_row *w = &r->d[d];
    *o = (struct pd_route_pair){ .p = p, .d = d, .path = path };
    if (p < 0)
        local(r, w, o);
    else
        remote(r, &r->p[p], w, o);
    o->itl_us = pd_us_of((double)o->itl_us + (double)w->seqs * (double)w->itl_us * out_tokens(r) * (r->input.n ? r->input.n : 1));
    o->capacity_us = capacity(r, w);
    if (o->path >= 0 && r->paths[o->path].x) {
        o->x = r->paths[o->path].x;
        o->excluded = r->paths[o->path].excluded;
    } else if (p >= 0 && pd_route_apart(&r->p[p], d)) {
        o->x = PD_X_PATH;
        o->excluded = pd_route_apart_words;
    }
}

int64_t pd_pair_others(const struct pd_route_rec *r, const struct pd_route_pair *o)
{
    return pd_us_of(r->externality * ((double)o->itl_us + (double)o->queue_us + (double)o->link_us + (double)o->capacity_us));
}
