/* The choice: who does a run, and where its prompt is computed. A pure function of what a route record tells of the request, the workers and the paths; the live
 * router, the replay of a log and the simulator call the same one.
 *
 *   aggregated     all of it on one worker: the least load, in blocks (what it lacks of the prompt, what is ahead, what runs)
 *   fixed          prefill on one worker, decode on another, each the least loaded
 *   conditional    every way is priced (cost.h), its --risk quantile plus what others are made to wait; the least is done. No threshold decides
 *   threshold[:N]  the least loaded D; remote if it lacks more than N tokens of the prompt (1000): Dynamo's rule of 2024
 *   dynamo[:N]     Dynamo's published rule of 2026: local if D lacks fewer than N tokens (2048) and less than 0.7 of the prompt
 *   llmd[:N]       llm-d's: D by twice its prefix and once its queue, local if it lacks fewer than N tokens (16), P by the same scores
 *   random         any D that may have the run, all alike; then that D alone or any P that reaches it, at most PD_ROUTE_BEST of them, all alike
 * Only the PD_ROUTE_BEST best of each side are looked at together. Equal scores: the smaller P50, then who was given fewer runs, then the order of the rows.
 * With a temperature T a way whose score is s is drawn with a weight of exp(-(s - least) / (T least)), by the record's seed; T is of the policies that compare
 * one score (aggregated, fixed, conditional) and, for the others, of their choice of P.
 */
#ifndef PD_ROUTE_CHOOSE_H
#define PD_ROUTE_CHOOSE_H
#include "cost.h"

enum pd_policy { PD_POLICY_AGGREGATED, PD_POLICY_FIXED, PD_POLICY_CONDITIONAL, PD_POLICY_THRESHOLD, PD_POLICY_DYNAMO, PD_POLICY_LLMD, PD_POLICY_RANDOM };
extern const char *const pd_policy_names[];     /* by enum, NULL-ended */
struct pd_policy_spec { enum pd_policy kind; uint32_t n; };
/* "threshold:512"; PD_EUSAGE names what is wrong. */
int pd_policy_parse(const char *text, struct pd_policy_spec *out, struct pd_err *e);

/* Fills the second half of *r, and `keep` and `cost` of its rows. PD_EUSAGE: a policy that is not known. */
int pd_choose(struct pd_route_rec *r, struct pd_err *e);

/* A recorded decision, made again: by its own policy, or another one. Appends the record of it: by its own policy, the same bytes. *was, *now (either may be
 * NULL; both large) are the arena's. */
int pd_route_replay(const void *rec, size_t n, const char *policy, struct pd_arena *a, struct pd_route_rec *was, struct pd_route_rec *now, struct pd_buf *out,
    struct pd_err *e);
#endif
