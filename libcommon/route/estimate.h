/* What a step costs, learnt from what it cost: P50 and P95 of a cost that is linear in a few known quantities. Pure: the time is told.
 *
 *   prefill (n tokens after `context` of them)    a + b n + c n (context + n / 2)
 *   decode step (batch, kv tokens in it)          d + e batch + f kv
 *   transfer (bytes)                              latency + bytes / bandwidth
 * Recursive least squares with forgetting, of relative errors (a short step counts as much as a long one), coefficients never below zero [Ljung, Soderstrom:
 * Theory and Practice of Recursive Identification, 1983, 2.6]. Around it a band: the quantiles of actual / predicted of the last steps of like size, whose rank
 * is moved so that 95 % of what comes lies below P95, also while the machine changes (adaptive conformal inference [Gibbs, Candes: Adaptive Conformal
 * Inference Under Distribution Shift, 2021]: after each step, rank += rate * (miss - 5 %)).
 * Before there is enough to go by an estimate is `cold`, some time after the last step `stale`, and wide in both cases. */
#ifndef PD_ROUTE_ESTIMATE_H
#define PD_ROUTE_ESTIMATE_H
#include <stdbool.h>
#include <stdint.h>

enum { PD_FIT_MOST = 3, PD_BAND_KEEPS = 256, PD_BANDS = 4 };

struct pd_fit {                 /* y = sum of theta[i] x[i] */
    int k;
    bool guessed;               /* it began with something: its first measurement scales it, and none moves it by more than it is */
    double theta[PD_FIT_MOST], cov[PD_FIT_MOST][PD_FIT_MOST], scale[PD_FIT_MOST], unit /* inside: theta * scale / unit is about 1 */;
};
struct pd_band {
    float ratio[PD_BAND_KEEPS], sorted[PD_BAND_KEEPS];          /* actual / predicted: a ring, and the same by value */
    uint32_t n;                         /* ever */
    float q50, q95;
    double miss;                        /* the share that is to lie above P95 by the ring's rank, so that 5 % do */
    uint64_t judged, covered;           /* steps whose P95 had been told by a warm band, and those of them that stayed below it */
};
struct pd_term {                /* one cost of one class of worker, or of one path */
    struct pd_fit fit;
    struct pd_band band[PD_BANDS], all;         /* by size, and of all sizes */
    double edge[PD_BANDS - 1];                  /* sizes (x[1]) between the bands */
    int64_t last_us;                            /* of the last step learnt; 0: none */
};
struct pd_cost { double p50, p95; bool cold, stale; };  /* the unit that was learnt */

/* start [k]: coefficients to begin with (a profile's, or a guess), typical [k]: the order of magnitude of each x; edge: sizes of x[1] between the bands. */
void pd_term_open(struct pd_term *t, int k, const double *start, const double *typical, const double edge[PD_BANDS - 1]);
/* x [k], x[0] is 1. stale_us: how long what was learnt last is good for. */
struct pd_cost pd_term_cost(const struct pd_term *t, const double *x, int64_t now_us, int64_t stale_us);
/* It took y. What is not finite or not above zero is nobody's measurement and is ignored: false. */
bool pd_term_learn(struct pd_term *t, const double *x, double y, int64_t now_us);
uint64_t pd_term_steps(const struct pd_term *t);
double pd_term_coverage(const struct pd_term *t);       /* of P95, of all bands; 1 before any was judged */

/* One more ratio; the band begins zeroed. And is there enough to go by? */
void pd_band_learn(struct pd_band *b, float ratio);
bool pd_band_warm(const struct pd_band *b);

/* Costs one after another: P95 of a sum = sum of P50 + root of the sum of squared (P95 - P50) (05-route). */
struct pd_sum { double p50, spread2; bool cold, stale; };
void pd_sum_add(struct pd_sum *s, struct pd_cost c);
struct pd_cost pd_sum_cost(const struct pd_sum *s);
#endif
