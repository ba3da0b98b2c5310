/* The decisions of a log and what came of them: what the verbs of pd-trace on route and outcome records share.
 *
 * An outcome is joined to the decision of its run that has its op and attempt: the last that was carried out. Memory is that of the runs that have no outcome yet. A record
 * that cannot be read is counted and passed over. */
#ifndef PD_ROUTE_HISTORY_H
#define PD_ROUTE_HISTORY_H
#include "../trace/report.h"
#include "way.h"

enum { PD_REGRET_US = 10000 };
#define PD_REGRET_SHARE 0.2
struct pd_review_opts {
    struct pd_report_opts log;          /* run: why's */
    const char *policy;                 /* replay: another one; NULL: each record's own */
    bool identical;                     /* replay: a record that does not come out as it was makes the status 4 */
    int64_t window_us;                  /* drift: 0: a tenth of the log */
    int64_t least_us; double least_share;       /* regret: a misjudgement is worse by more than both; < 0: PD_REGRET_US, PD_REGRET_SHARE */
};
/* Each 0 or the error's code; *status: 4, 9. PD_EFAIL: there is nothing in the log that they could tell of. */
int pd_review_why(const struct pd_review_opts *o, int *status, struct pd_err *e);       /* explain.c: the decisions of one run, in words */
int pd_review_replay(const struct pd_review_opts *o, int *status, struct pd_err *e);    /* replay.c: each decision again */
int pd_review_drift(const struct pd_review_opts *o, int *status, struct pd_err *e);     /* drift.c: the error of each term over time */
int pd_review_regret(const struct pd_review_opts *o, int *status, struct pd_err *e);    /* regret.c: the best other way, as far as it can be known */

struct pd_history_sum {
    uint64_t decisions, outcomes, joined;
    uint64_t again;                     /* decisions that another one of their run took the place of */
    uint64_t alone, open;               /* outcomes whose decision is not here; runs that have no outcome */
    uint64_t bad; char first_bad[400];
};
/* raw: the route record itself. r, o: valid until it returns. */
typedef int pd_decided_fn(void *ctx, struct pd_bin raw, struct pd_err *e);
typedef int pd_ended_fn(void *ctx, const struct pd_route_rec *r, const struct pd_outcome_rec *o, struct pd_err *e);
struct pd_history { pd_decided_fn *decided; pd_ended_fn *ended; void *ctx; struct pd_history_sum sum; };    /* either may be NULL */

int pd_history_walk(const struct pd_report_opts *o, struct pd_history *h, struct pd_log **log, struct pd_err *e);       /* *log is the caller's to free */
/* A record that cannot be read: PD_ENOMEM stays an error, everything else is counted. */
int pd_history_bad(struct pd_history *h, int rc, struct pd_err *e);
/* Tells of what could not be read and of what was torn; the status under strict. PD_EFAIL: no decision is here, or, of whoever only asked for ends, no end. */
int pd_history_end(const struct pd_report_opts *o, const struct pd_history *h, const struct pd_log *log, int *status, struct pd_err *e);
/* Run and op of either kind; false: it has none. run [PD_RUN_LEN], op [16] bytes of the record. */
bool pd_history_key(struct pd_bin raw, struct pd_str *run, struct pd_bin *op);
#endif
