/* KV that is late: is it waited for, or is the prompt computed where it is decoded? Pure; pd_choose asks by what a route record tells (`late`).
 *
 * What is on its way for longer than its P95 is not as it was expected: what is left of it is taken to be the longer the longer it has taken, with the tail of
 * Pareto through P50 and P95: of those that have taken t 5 % take more than t (P95 / P50)^1.3. It is given up when that rest is more than computing all of it
 * at its decode worker takes at P95. What is cold is no reason to give up anything. */
#ifndef PD_ROUTE_LATE_H
#define PD_ROUTE_LATE_H
#include "cost.h"

/* P95 of what is left of a way that has taken since_us already; -1: it is not late. */
int64_t pd_late_rest(struct pd_spread way, int64_t since_us);
/* Fills rest_us and local_us of *l; local: what computing it takes. true: it is given up. */
bool pd_late_over(struct pd_route_late *l, struct pd_spread local);
/* It is not: after how long on its way it would be, as things are; -1: never. */
int64_t pd_late_until(const struct pd_route_late *l);
#endif
