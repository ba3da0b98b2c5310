/* A preference that does not flutter: between paths, or between modes. What is preferred stays so until another one has been better by a margin, and at least
 * for a while; it changes at once only when it can no longer be had. Pure: told the costs and the time. */
#ifndef PD_ROUTE_DWELL_H
#define PD_ROUTE_DWELL_H
#include <stdbool.h>
#include <stdint.h>
struct pd_dwell_opts { double margin /* 0: 0.1 of the cost */; int64_t least_us /* 0: 2 s */; };
struct pd_dwell { int32_t now /* preferred, from 1; 0: none yet */; int64_t since_us; };        /* zero-initialise */
/* Which of n (from 0): -1 when none may. cost [n], finite and not negative; may [n]. *held (may be NULL): another one is cheaper, and its time has not come. */
int pd_dwell_pick(struct pd_dwell *w, const struct pd_dwell_opts *o, const double *cost, const bool *may, int n, int64_t now_us, bool *held);
#endif
