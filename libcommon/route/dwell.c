#include <stddef.h>
#include "dwell.h"

int pd_dwell_pick(struct pd_dwell *w, const struct pd_dwell_opts *o, const double *cost, const bool *may, int n, int64_t now_us, bool *held)
{
    double margin = o && o->margin > 0 ? o->margin : 0.1;
    int64_t least = o && o->least_us ? o->least_us : 2000000;
    int best = -1, is = (int)w->now - 1;
    if (held)
        *held = false;
    for (int i = 0; i < n; i++)
        if (may[i] && (best < 0 || cost[i] < cost[best]))
            best = i;
    if (best < 0 || best == is)
        return best;
    if (is >= 0 && is < n && may[is] && (now_us - w->since_us < least || cost[best] >= cost[is] * (1 - margin))) {
        if (held)
            *held = cost[best] < cost[is];
        return is;
    }
    w->now = best + 1;
    w->since_us = now_us;
    return best;
}
