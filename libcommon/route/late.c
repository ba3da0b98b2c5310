#include "late.h"
#include <math.h>

static const double LEAST = 1.25;       /* P95 / P50: no way is known better than that */

/* x^1.3125 - 1, of roots, which are the same on every machine; the tail's own exponent is ln 20 / ln 10 = 1.301. */
static double more(struct pd_spread way)
{
    double x = (double)way.p95 / (double)(way.p50 > 0 ? way.p50 : 1);
    x = x > LEAST ? x : LEAST;
    double root = sqrt(sqrt(x));
    return x * root * sqrt(sqrt(root)) - 1;
}

int64_t pd_late_rest(struct pd_spread way, int64_t since_us) { return since_us <= way.p95 ? -1 : pd_us_of((double)since_us * more(way)); }

bool pd_late_over(struct pd_route_late *l, struct pd_spread local)
{
    l->rest_us = pd_late_rest(l->way, l->since_us);
    l->local_us = local.p95;
    return !((l->way.marks | local.marks) & PD_SPREAD_COLD) && l->rest_us > l->local_us;
}

int64_t pd_late_until(const struct pd_route_late *l)
{
    int64_t us = pd_us_of((double)l->local_us / more(l->way)) + 1;
    return l->way.marks & PD_SPREAD_COLD ? -1 : us > l->way.p95 ? us : l->way.p95 + 1;
}
