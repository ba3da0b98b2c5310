/* Does a log keep the rules? Records of a log (log.h) go in, in order; findings come out, each with its rule, the run and the two records that clash.
 *
 * Rules (a finding's `rule`):
 *   order                   a state that may not follow what came before it (state.h), or that came twice in an attempt
 *   boundary                a retry or fallback after the first token went out
 *   after_end               a step of a run after its end, by whoever ended it, or by another later than the bound
 *   first_token             the first token of a choice went out twice
 *   position                a gap in the positions of a choice, or one that went out twice (not after `migrated`, where another worker delivers)
 *   token_count             `completed` counts other tokens than went out
 *   run_open                a run was accepted, its process has closed its log, and there is no end
 *   transfer_after_cancel   a transfer or a read of a lease, later than the bound after the run was cancelled
 *   lease_grant             a lease granted twice, or used or ended without a grant
 *   lease_use               a lease read or renewed after its end
 *   lease_end               a lease ended twice
 *   lease_open              a lease granted, never ended, and its grantor has closed its log
 * First tokens and positions are judged where they were delivered: by front, else by router, else by the worker.
 *
 * Not a violation, but told (`lost`): what ended with a process that has no `gone`, and what is missing where records were torn. A run whose log begins
 * or ends in another file (an event whose parent is not here; a prefill that handed its KV over) is only counted; nor is what workers did missed in the
 * log of a router that none of theirs is with.
 *
 * Memory: live runs and leases, the last ones that ended, 64 bits each of those before them; and what was found.
 */
#ifndef PD_TRACE_CHECK_H
#define PD_TRACE_CHECK_H
#include "log.h"

struct pd_ref {                 /* a record of the log */
    enum pd_state_id state;     /* PD_ST_UNKNOWN: there is none, or it is no longer held */
    uint32_t file; uint64_t offset;
    int64_t at_us;
    const char *worker;         /* the checker's */
};
struct pd_finding {
    const char *rule;
    bool lost;
    char run[PD_RUN_LEN + 1];
    char text[240];             /* one line */
    struct pd_ref first, second;
};
/* < 0 ends the check with that code. */
typedef int pd_finding_fn(void *ctx, const struct pd_finding *f, struct pd_err *e);

struct pd_check_opts {
    int64_t bound_us;           /* after a cancel or an end, for what others were about to do; 0: PD_CHECK_BOUND_US */
    pd_finding_fn *found;
    void *ctx;
};
#define PD_CHECK_BOUND_US 1000000
struct pd_check_sum {
    uint64_t events, unknown;           /* unknown: of states that this version does not know */
    uint64_t runs, completed, failed, cancelled, blocked, elsewhere, handed_over, lost;
    uint64_t leases, leases_ended;
    uint64_t processes, processes_lost;
    uint64_t violations;
};
struct pd_check;
int pd_check_new(const struct pd_check_opts *o, struct pd_check **out, struct pd_err *e);
int pd_check_record(struct pd_check *c, const struct pd_log_rec *r, struct pd_err *e);
/* After the last record. torn: records that the reader lost (pd_log_stats). */
int pd_check_end(struct pd_check *c, uint64_t torn, struct pd_check_sum *sum, struct pd_err *e);
void pd_check_free(struct pd_check *c);
#endif
