/* Inside a decision: what decide.c (who may, rows, words) and decide_path.c (paths between them) share. */
#ifndef PD_ROUTE_DECIDE_IN_H
#define PD_ROUTE_DECIDE_IN_H
#include "decide.h"

enum { PD_DECIDE_OTHERS = PD_ROUTE_DOMAINS - 1 };       /* the index of all domains that there is no room for: as if they were in none */

/* Of this decision's paths, which are there. */
const struct pd_path_end *pd_decide_end(const struct pd_decision *o, struct pd_member *m);
/* Where m is: by the topology, else as it says. */
struct pd_str pd_decide_domain(const struct pd_decision *o, struct pd_member *m);
/* Fills the record's paths once its rows are there, and excludes prefill workers that reach nobody. heed: what the rule would rather not have is excluded too. */
void pd_decide_paths(struct pd_decision *o, bool heed);
#endif
