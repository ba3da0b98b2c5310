/* A straight fit of what was measured: the coefficients, none below zero, that make the squared relative errors least.
 *
 *   sum over i of ((theta . x[i] - y[i]) / y[i])^2  ->  least, theta >= 0
 * Of at most PD_FIT_MOST coefficients, so each choice of which are zero is solved and the best that holds is taken: exact, and the same bits every time.
 * estimate.h learns the same forms one step at a time; this is where it starts from. */
#ifndef PD_ROUTE_FIT_H
#define PD_ROUTE_FIT_H
#include <stdint.h>
#include "../base/err.h"
#include "estimate.h"

/* x [n][k], y [n] above zero. worst, p95 (may be NULL): of |actual / predicted - 1|, and of actual / predicted. PD_EFAIL: a value that is no cost, or nothing fits. */
int pd_fit_rows(int k, uint32_t n, const double *x, const double *y, double theta[PD_FIT_MOST], double *worst, double *p95, struct pd_err *e);
#endif
