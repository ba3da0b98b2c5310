/* Where a run goes: the workers that may do it, why the others may not, and the choice. Pure: the same registry and need give the same decision.
 *
 *   aggregated   all of it on one worker of role both or decode
 *   fixed        prefill on a worker of role prefill, decode on another of role decode; KV goes between the two. One of role both has the side that it prefers,
 *                and runs whole requests where no KV can be had
 * A policy is a function from candidates to a pair (policy.c, `choose_*`); what may be a candidate at all is the same for all of them.
 *
 * Epochs. New runs go to the newest epoch that has a ready worker for each role that the policy needs; pairs are of one epoch. Exclusions carry what differs.
 * Choice. The least load counts (own ledger and what others gave), per worker: prompt tokens ahead, in blocks, and blocks of running sequences. Of equals the
 * one that was given fewest runs so far goes first, so that none starves; then the order of registration.
 */
#ifndef PD_ROUTE_POLICY_H
#define PD_ROUTE_POLICY_H
#include "registry.h"

enum pd_policy { PD_POLICY_AGGREGATED, PD_POLICY_FIXED };
bool pd_policy_find(const char *name, enum pd_policy *out);
extern const char *const pd_policy_names[];     /* by enum, NULL-ended */
enum pd_mode { PD_MODE_AGGREGATED, PD_MODE_REMOTE, PD_MODE_LOCAL };
extern const char *const pd_mode_names[];       /* as in route and result */

struct pd_tried { const struct pd_member *m; uint32_t life; };
struct pd_need {
    enum pd_policy policy;
    int64_t now_us, suspect_us;         /* a worker that has been silent for so long gets nothing new */
    uint32_t prompt_tokens; bool exact; /* exact: the request brought token ids; else a guess from its length */
    uint32_t max_tokens, n;
    struct pd_str adapter;
    const struct pd_tried *tried; int n_tried;  /* who failed this run already */
    bool local;                         /* one worker does all of it, mode local: a fallback */
    const struct pd_member *d;          /* decode stays here (another P is looked for); or NULL */
    int like; const char *numerics;     /* migration: only workers whose KV and numerics are those of a fingerprint; -1: any */
};

/* From PD_X_RUNS on: it has no room for now. */
enum pd_excluded { PD_X_NO, PD_X_UNKNOWN, PD_X_STATE, PD_X_UNREACHABLE, PD_X_SILENT, PD_X_EPOCH, PD_X_TRIED, PD_X_ADAPTER, PD_X_CONTEXT, PD_X_FINGERPRINT,
                   PD_X_NUMERICS, PD_X_RUNS, PD_X_BEHIND, PD_X_BLOCKS };
struct pd_candidate {
    struct pd_member *m;
    enum pd_excluded x;
    const char *detail;                 /* of PD_X_FINGERPRINT, the registry's */
    uint64_t cost;
};
enum pd_outcome {
    PD_CHOSEN,
    PD_WAIT_ROOM,       /* somebody may, and is full: it comes when a run ends */
    PD_WAIT_WORKER,     /* nobody may now */
    PD_NO_PREFILL,      /* fixed: somebody could decode, and no prefill worker is there, or each has failed this run */
    PD_NEVER            /* no worker that is here could ever: an adapter or a context that none has */
};
#define PD_MAX_CANDIDATES 1024
struct pd_decision {
    struct pd_need need;
    enum pd_outcome outcome;
    enum pd_mode mode;
    struct pd_member *p, *d;
    unsigned converts;                  /* PD_CONV_* (../kv/convert.h): what d has to convert in p's KV */
    uint64_t epoch;                     /* of those considered */
    uint32_t n_p, n_d, left_out;        /* left_out: workers past PD_MAX_CANDIDATES, never looked at */
    struct pd_candidate p_row[PD_MAX_CANDIDATES], d_row[PD_MAX_CANDIDATES];
};
/* Fills *out, which is large: keep one. */
void pd_decide(struct pd_registry *r, const struct pd_need *need, struct pd_decision *out);

/* "draining", "fingerprint: rope_theta differs (prefill 10000, decode 500000)"; "" when it is not excluded. */
const char *pd_excluded_text(const struct pd_decision *d, const struct pd_candidate *c, char *out, size_t cap);
/* All exclusions in a line, for a person. */
int pd_decision_text(const struct pd_decision *d, struct pd_buf *out, struct pd_err *e);
/* The list [{worker, role, reason}] as raw msgpack: `excluded` of a blocked result. */
int pd_decision_excluded(const struct pd_decision *d, struct pd_buf *out, struct pd_err *e);

/* The `route` record (pd-wire.5): the whole reason. Of workers past 128 a role only the number is told. */
struct pd_route_note { const char *run, *reason, *fallback /* or NULL */; const uint8_t *op; uint32_t attempt, resumed /* tokens */;
                       int64_t t_us /* wall */, waited_us; };
int pd_decision_encode(const struct pd_decision *d, const struct pd_route_note *note, struct pd_buf *out, struct pd_err *e);
/* What a run holds of a worker while it is there. */
struct pd_share pd_share_of(const struct pd_need *need, const struct pd_member *m, bool prefills, bool decodes);
#endif
