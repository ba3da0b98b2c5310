/* A way to do a run, looked at afterwards: its terms as they were expected (a pair of a route record) and as they were (an outcome). Pure.
 *
 *   queue       until the prompt is begun: P's queue; of D alone its slot and its queue
 *   prefill     of what is not held; of D alone with what its batch adds
 *   transfer    KV on its way beyond the prefill
 *   sync        the rest of the time to the first token: hand-over, room in D's batch. A path's penalty is a preference, and no part of it
 *   ttft, tpot, completion
 */
#ifndef PD_ROUTE_WAY_H
#define PD_ROUTE_WAY_H
#include "cost.h"

enum pd_way_term { PD_WT_QUEUE, PD_WT_PREFILL, PD_WT_TRANSFER, PD_WT_SYNC, PD_WT_TTFT, PD_WT_TPOT, PD_WT_COMPLETION, PD_WT_N };
extern const char *const pd_way_terms[PD_WT_N];
/* us. The bits of the terms that the way has, 1 << enum pd_way_term: no transfer and no sync of D alone. */
unsigned pd_way_expected(const struct pd_route_rec *r, const struct pd_route_pair *o, struct pd_spread out[PD_WT_N]);
unsigned pd_way_took(const struct pd_outcome_rec *o, int64_t out[PD_WT_N]);
/* What the conditional policy compares, us: completion at the record's risk, and what others are made to wait. */
int64_t pd_way_price(const struct pd_route_rec *r, const struct pd_route_pair *o);
/* The cheapest way that was possible, with KV from elsewhere or without; NULL: none was scored. */
const struct pd_route_pair *pd_way_best(const struct pd_route_rec *r, bool remote);
/* Did it come as it was decided? No fallback, no migration, no failure, the mode that was chosen. */
bool pd_way_done(const struct pd_route_rec *r, const struct pd_outcome_rec *o);
#endif
