#include "sample.h"
#include <math.h>
#include <stdlib.h>

static const double TAIL = 0.025;

int pd_sample_add(struct pd_sample *s, double v, struct pd_err *e)
{
    if (s->n == s->cap) {
        size_t cap = s->cap ? 2 * s->cap : 256;
        double *more = pd_realloc(s->v, cap, sizeof *more, "samples", e);
        if (!more)
            return PD_ENOMEM;
        s->v = more;
        s->cap = cap;
    }
    s->v[s->n++] = v;
    s->sorted = false;
    return 0;
}

void pd_sample_free(struct pd_sample *s)
{
    pd_free(s->v);
    *s = (struct pd_sample){ 0 };
}

double pd_sample_mean(const struct pd_sample *s)
{
    double sum = 0;
    for (size_t i = 0; i < s->n; i++)
        sum += s->v[i];
    return s->n ? sum / (double)s->n : 0;
}

static double log_pmf(double n, double k, double p) { return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) + k * log(p) + (n - k) * log1p(-p); }

void pd_quantile_ranks(uint64_t n, double p, uint64_t *at, uint64_t *lo, uint64_t *hi)
{
    double below = 0, above = 0;
    *at = (uint64_t)ceil(p * (double)n - 1e-9);
    *at = *at < 1 ? 1 : *at > n ? n : *at;
    *lo = 0;                            /* the largest with P(B <= lo - 1) <= TAIL */
    for (uint64_t k = 0; k < n && (below += exp(log_pmf((double)n, (double)k, p))) <= TAIL; k++)
        *lo = k + 1;
    *hi = n + 1;                        /* the smallest with P(B >= hi) <= TAIL */
    for (uint64_t k = n; k > 0 && (above += exp(log_pmf((double)n, (double)k, p))) <= TAIL; k--)
        *hi = k;
}

static int by_value(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b); }

struct pd_quantile pd_sample_quantile(struct pd_sample *s, double p)
{
    uint64_t at, lo, hi;
    if (!s->n)
        return (struct pd_quantile){ 0 };
    if (!s->sorted)
        qsort(s->v, s->n, sizeof *s->v, by_value);
    s->sorted = true;
    pd_quantile_ranks(s->n, p, &at, &lo, &hi);
    return (struct pd_quantile){ s->v[at - 1], s->v[lo ? lo - 1 : 0], s->v[hi <= s->n ? hi - 1 : s->n - 1], lo == 0, hi > s->n };
}
