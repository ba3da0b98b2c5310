#include "estimate.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double FORGET = 0.995, TRACE = 1e4 /* nothing is forgotten while the fit knows as little as this */, ALPHA = 0.05, RATE = 0.02,
    WIDE = 4,           /* P95 / P50 of what is cold */
    STALE = 2,          /* P95 of what is stale, times this */
    LEAST = 1e-3;       /* no cost is predicted below this: a ratio to it would mean nothing */
enum { WARM = 20 };     /* steps that make a band */

void pd_term_open(struct pd_term *t, int k, const double *start, const double *typical, const double edge[PD_BANDS - 1])
{
    *t = (struct pd_term){ .fit.k = k };
    for (int i = 0; i < k; i++) {
        t->fit.theta[i] = start[i];
        t->fit.scale[i] = typical[i];
        t->fit.unit += start[i] * typical[i];
        t->fit.cov[i][i] = 100;
    }
    t->fit.guessed = t->fit.unit > 0;
    memcpy(t->edge, edge, sizeof t->edge);
    for (int b = 0; b < PD_BANDS; b++)
        t->band[b].miss = ALPHA;
    t->all.miss = ALPHA;
}

/* ---- the fit ---- */

static double linear(const struct pd_fit *f, const double *x)
{
    double y = 0;
    for (int i = 0; i < f->k; i++)
        y += f->theta[i] * x[i];
    return y;
}

static double predict(const struct pd_fit *f, const double *x)
{
    double y = linear(f, x);
    return y > LEAST ? y : LEAST;
}

/* A guess of what nobody has measured says how the parts of a cost stand to each other; the first measurement says how much it is. */
static void fit_scale(struct pd_fit *f, const double *x, double y)
{
    double by = y / predict(f, x);
    for (int i = 0; i < f->k; i++)
        f->theta[i] *= by;
    f->unit *= by;
}

/* Of errors relative to what was predicted: weights from the actual cost would favour cheap accidents. */
static void fit_learn(struct pd_fit *f, const double *x, double y, bool warm)
{
    double u[PD_FIT_MOST], pu[PD_FIT_MOST], den = FORGET, trace = 0, of = predict(f, x);
    if (!(f->unit > 0))
        f->unit = y;
    if (f->guessed)
        of = of < y / 64 ? y / 64 : of;
    else
        of = of < y / 4 ? y / 4 : of > 4 * y ? 4 * y : of;
    double err = (y - linear(f, x)) / of;
    if ((warm || f->guessed) && fabs(err) > 1)
        err = err > 0 ? 1 : -1;         /* one accident does not move it far */
    for (int i = 0; i < f->k; i++)
        u[i] = x[i] / f->scale[i] * (f->unit / of);
    for (int i = 0; i < f->k; i++) {
        pu[i] = 0;
        for (int j = 0; j < f->k; j++)
            pu[i] += f->cov[i][j] * u[j];
        den += u[i] * pu[i];
        trace += f->cov[i][i];
    }
    for (int i = 0; i < f->k; i++) {
        f->theta[i] += pu[i] / den * err * (f->unit / f->scale[i]);
        f->theta[i] = f->theta[i] > 0 ? f->theta[i] : 0;
        for (int j = 0; j < f->k; j++)
            f->cov[i][j] = (f->cov[i][j] - pu[i] * pu[j] / den) / (trace < TRACE ? FORGET : 1);
    }
}

/* ---- bands ---- */

static uint32_t kept(const struct pd_band *b) { return b->n < PD_BAND_KEEPS ? b->n : PD_BAND_KEEPS; }
bool pd_band_warm(const struct pd_band *b) { return b->n >= WARM; }

static uint32_t rank(const struct pd_band *b, uint32_t n, float v)
{
    uint32_t lo = 0, hi = n;
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        if (b->sorted[mid] < v)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

void pd_band_learn(struct pd_band *b, float ratio)
{
    uint32_t n = kept(b), at;
    if (!b->n)
        b->miss = ALPHA;
    if (pd_band_warm(b)) {
        bool missed = ratio > b->q95;
        b->judged++;
        b->covered += !missed;
        b->miss += RATE * (ALPHA - missed);
        b->miss = b->miss < 0 ? 0 : b->miss > 0.5 ? 0.5 : b->miss;
    }
    if (n == PD_BAND_KEEPS) {
        at = rank(b, n, b->ratio[b->n % PD_BAND_KEEPS]);
        memmove(b->sorted + at, b->sorted + at + 1, (--n - at) * sizeof *b->sorted);
    }
    at = rank(b, n, ratio);
    memmove(b->sorted + at + 1, b->sorted + at, (n - at) * sizeof *b->sorted);
    b->sorted[at] = ratio;
    b->ratio[b->n++ % PD_BAND_KEEPS] = ratio;
    n++;
    uint32_t r = (uint32_t)ceil((n + 1) * (1 - b->miss));       /* conformal: of n + 1, the next one counted in */
    b->q50 = (b->sorted[(n - 1) / 2] + b->sorted[n / 2]) / 2;
    b->q95 = r <= n ? b->sorted[r - 1] : 1.25f * b->sorted[n - 1];
    b->q95 = b->q95 > b->q50 ? b->q95 : b->q50;
}

static int size_of(const struct pd_term *t, const double *x)
{
    int b = 0;
    while (t->fit.k > 1 && b < PD_BANDS - 1 && x[1] > t->edge[b])
        b++;
    return b;
}

/* ---- a term ---- */

struct pd_cost pd_term_cost(const struct pd_term *t, const double *x, int64_t now_us, int64_t stale_us)
{
    const struct pd_band *b = &t->band[size_of(t, x)];
    double y = predict(&t->fit, x);
    struct pd_cost c = { .p50 = y, .p95 = WIDE * y, .cold = true };
    b = pd_band_warm(b) ? b : &t->all;
    if (pd_band_warm(b))
        c = (struct pd_cost){ .p50 = y * b->q50, .p95 = y * b->q95 };
    if (t->last_us && now_us - t->last_us > stale_us) {
        c.stale = true;
        c.p95 *= STALE;
    }
    return c;
}

bool pd_term_learn(struct pd_term *t, const double *x, double y, int64_t now_us)
{
    if (!isfinite(y) || y <= 0)
        return false;
    for (int i = 0; i < t->fit.k; i++)
        if (!isfinite(x[i]) || x[i] < 0)
            return false;
    bool known = t->all.n || linear(&t->fit, x) > 0, first = !t->all.n && t->fit.guessed;
    float ratio = (float)(y / predict(&t->fit, x));
    if (known) {                /* the very first one has nothing that it could be compared with */
        pd_band_learn(&t->band[size_of(t, x)], ratio);
        pd_band_learn(&t->all, ratio);
    }
    if (first && linear(&t->fit, x) > 0)
        fit_scale(&t->fit, x, y);
    fit_learn(&t->fit, x, y, pd_band_warm(&t->all));
    t->last_us = now_us;
    return true;
}

uint64_t pd_term_steps(const struct pd_term *t) { return t->all.n; }

double pd_term_coverage(const struct pd_term *t)
{
    uint64_t judged = 0, covered = 0;
    for (int b = 0; b < PD_BANDS; b++) {
        judged += t->band[b].judged;
        covered += t->band[b].covered;
    }
    return judged ? (double)covered / (double)judged : 1;
}

void pd_sum_add(struct pd_sum *s, struct pd_cost c)
{
    s->p50 += c.p50;
    s->spread2 += (c.p95 - c.p50) * (c.p95 - c.p50);
    s->cold |= c.cold;
    s->stale |= c.stale;
}

struct pd_cost pd_sum_cost(const struct pd_sum *s) { return (struct pd_cost){ s->p50, s->p50 + sqrt(s->spread2), s->cold, s->stale }; }
