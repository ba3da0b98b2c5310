/* What a way to do a run costs: sums of the costs that a record tells (../wire/record_route.h). Pure.
 *
 *   remote   queue(P) + prefill(P, what it lacks) + max(0, transfer(bytes that D lacks, path) - overlap) + sync + penalty(path)
 *   local    slot(D) + queue(D) + prefill(D, what it lacks) + interference
 *   completion = that (TTFT) + expected output tokens after the first x TPOT on D; of both ways
 * P95 of a sum is the sum of P50 plus the root of the summed squares of P95 - P50, times what the record tells of such sums (permille). What others are made to wait is told apart: `itl` of D's batch (and of P's, if
 * it decodes too), `queue` of prompts behind this one, `link` of transfers on the same path, `capacity` when D's blocks run short.
 */
#ifndef PD_ROUTE_COST_H
#define PD_ROUTE_COST_H
#include "../wire/record_route.h"

/* The quantile `risk` of a span, when (P95 - P50) * scale is added to P50. */
double pd_risk_scale(double risk);
static inline int64_t pd_spread_at(struct pd_spread s, double scale) { return s.p50 + (int64_t)((double)(s.p95 - s.p50) * scale + 0.5); }
static inline int64_t pd_us_of(double v) { return v > (double)PD_US_MOST ? PD_US_MOST : v > 0 ? (int64_t)(v + 0.5) : 0; }
struct pd_spread pd_spread_sum(const struct pd_spread *s, int n);
struct pd_spread pd_spread_times(struct pd_spread s, double by);
struct pd_spread pd_exposed(const struct pd_route_pair *o);     /* its transfer beyond what the prefill hides */

/* The path of a pair, an index of r->paths; -1: none is told. And what its kins need, of r->fits; -1: nothing. */
int32_t pd_route_path_of(const struct pd_route_rec *r, int32_t p, int32_t d);
int32_t pd_route_fit_of(const struct pd_route_rec *r, uint32_t p_kin, uint32_t d_kin);

/* Fill everything of o but score and share. p -1: d alone; path: of the two, an index or -1. */
void pd_pair_cost(const struct pd_route_rec *r, int32_t p, int32_t d, int32_t path, struct pd_route_pair *o);
int64_t pd_pair_others(const struct pd_route_rec *r, const struct pd_route_pair *o);     /* all that others are made to wait, as it counts */
#endif
