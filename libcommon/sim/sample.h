/* Measured values, and what can be said of their quantiles.
 *
 * A quantile is the order statistic x(ceil(p n)). Its interval is (x(lo), x(hi)) such that P(x(lo) <= the true quantile < x(hi)) >= 95 % whatever the
 * distribution: of n independent values the number below the quantile is binomial (n, p), and lo and hi cut at most 2.5 % from each end of it [David,
 * Nagaraja: Order Statistics, 2003, 7.1]. Of few values the tail has no such hi (lo): the interval is open there, and the largest (smallest) value stands in. */
#ifndef PD_SIM_SAMPLE_H
#define PD_SIM_SAMPLE_H
#include "../base/mem.h"

struct pd_sample { double *v; size_t n, cap; bool sorted; };    /* zero-initialise */
int pd_sample_add(struct pd_sample *s, double v, struct pd_err *e);
void pd_sample_free(struct pd_sample *s);
double pd_sample_mean(const struct pd_sample *s);               /* 0 of none */

struct pd_quantile { double value, lo, hi; bool lo_open, hi_open; };
struct pd_quantile pd_sample_quantile(struct pd_sample *s, double p);   /* sorts; all 0 of none */
/* Ranks from 1: lo 0, hi n + 1: open. */
void pd_quantile_ranks(uint64_t n, double p, uint64_t *at, uint64_t *lo, uint64_t *hi);
#endif
