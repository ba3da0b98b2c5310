/* What the rows and paths of a decision are expected to cost, by what was learnt (learn.h). Pure. */
#ifndef PD_ROUTE_PRICE_H
#define PD_ROUTE_PRICE_H
#include "decide.h"
/* The spreads of all rows that may be chosen, and what comes out of such a prompt. Where there is no memory for a place to learn in, the costs stay 0 and are
 * marked cold. */
void pd_price(struct pd_learn *l, struct pd_decision *o);
void pd_price_ways(struct pd_learn *l, struct pd_decision *o);        /* the paths between their domains, where nobody else knows of any */
struct pd_ahead pd_ahead_of(const struct pd_route_row *w);
/* Bytes of KV a token, by a worker's layout; 0: not known. */
uint32_t pd_kv_token_bytes(const struct pd_kv_layout *l);
#endif
