/* Where a run goes: the workers that may do it, why the others may not, and the choice (choose.h). Pure: the same registry and need give the same decision.
 *
 * What may be a candidate at all is the same for all policies; it becomes the rows of a route record, and the policy chooses by that record alone.
 * Prefill: workers that can give KV. Decode, and whole requests: those that can decode. Under `fixed` each has one side, of role both the one that it prefers, and
 * runs whole requests where no KV can be had. A worker that is in both lists makes no pair with itself.
 *
 * Epochs. New runs go to the newest epoch that has a ready worker for each role that the policy needs (one that needs no prefill worker waits for none); pairs are
 * of one epoch. Exclusions carry what differs.
 */
#ifndef PD_ROUTE_DECIDE_H
#define PD_ROUTE_DECIDE_H
#include "choose.h"
#include "learn.h"
#include "registry.h"

/* How a router decides, for as long as it runs. */
struct pd_rules {
    double temperature, risk, externality;
    char shadow[24];                    /* a second policy, without effect; "": none */
};
extern const struct pd_rules pd_rules_usual;    /* 0, P95, 1, none */

struct pd_tried { const struct pd_member *m; uint32_t life; };
struct pd_need {
    enum pd_policy policy; uint32_t policy_n;   /* its number; 0: the usual one */
    const struct pd_rules *rules;       /* NULL: the usual ones */
    struct pd_learn *learn;             /* what is known of costs; NULL: nothing */
    uint64_t seed;                      /* of this decision */
    bool quiet;                         /* nobody asks for the reason in words */
    int64_t now_us, suspect_us;         /* a worker that has been silent for so long gets nothing new */
    uint32_t prompt_tokens; bool exact; /* exact: the request brought token ids; else a guess from its length */
    uint32_t max_tokens, n;
    struct pd_str adapter;
    uint64_t index;                     /* version of the prefix index that members' `held` was told by */
    const uint8_t *digest;              /* [16] the chained hash of the prompt's last whole block; NULL: not known */
    struct pd_bin slo;                  /* raw map; or absent */
    int64_t deadline_us;                /* left of it; 0: none */
    bool early;                         /* the first token may go out before its KV is verified */
    const struct pd_tried *tried; int n_tried;  /* who failed this run already */
    bool local;                         /* one worker does all of it, mode local: a fallback */
    const struct pd_member *d;          /* decode stays here (another P is looked for); or NULL */
    struct pd_paths *paths;             /* what is known of them; or NULL */
    const struct pd_limit *limit;       /* of fallbacks, when this is one; or NULL */
    const struct pd_route_late *late;   /* local at d, if its KV is not waited for; or NULL */
    int like; const char *numerics;     /* migration: only workers whose KV and numerics are those of a fingerprint; -1: any */
};

struct pd_candidate {
    struct pd_member *m;
    enum pd_excluded x, x_kv;           /* as in its row */
    bool stranded;                      /* x is that of its paths */
    const char *detail;                 /* of PD_X_FINGERPRINT, the registry's; of paths, the decision's */
};
#define PD_MAX_CANDIDATES PD_ROUTE_MOST
struct pd_decision {
    struct pd_need need;
    enum pd_outcome outcome;
    enum pd_mode mode;
    struct pd_member *p, *d;
    unsigned converts;                  /* PD_CONV_* (../kv/convert.h): what d has to convert in p's KV */
    uint64_t epoch;                     /* of those considered */
    uint32_t n_p, n_d, left_out;        /* left_out: workers past PD_MAX_CANDIDATES, never looked at */
    struct pd_candidate p_row[PD_MAX_CANDIDATES], d_row[PD_MAX_CANDIDATES];
    struct pd_route_rec rec;            /* the whole; its arrays are these: */
    struct pd_route_row p_rows[PD_MAX_CANDIDATES], d_rows[PD_MAX_CANDIDATES];
    struct pd_route_fit fits[PD_ROUTE_FITS];
    struct pd_route_path paths[PD_ROUTE_PATHS];
    struct pd_str domains[PD_ROUTE_DOMAINS];
    char words[PD_ROUTE_PATHS][80];     /* of paths */
    uint8_t apart[PD_MAX_CANDIDATES][PD_MAX_CANDIDATES / 8];    /* of rows */
    uint16_t domain_at[PD_TOPO_DOMAINS];        /* of the topology: 1 + its index in `domains`; 0: none yet */
};
/* Fills *out, which is large: keep one, zeroed before the first time. */
void pd_decide(struct pd_registry *r, const struct pd_need *need, struct pd_decision *out);

/* "draining", "fingerprint: rope_theta differs (prefill 10000, decode 500000)"; "" when it is not excluded. */
const char *pd_excluded_text(const struct pd_decision *d, const struct pd_candidate *c, char *out, size_t cap);
/* All exclusions in a line, for a person. */
int pd_decision_text(const struct pd_decision *d, struct pd_buf *out, struct pd_err *e);
/* The list [{worker, role, reason}] as raw msgpack: `excluded` of a blocked result. */
int pd_decision_excluded(const struct pd_decision *d, struct pd_buf *out, struct pd_err *e);

/* The `route` record (pd-wire.5): the whole reason. */
struct pd_route_note { const char *run, *cause, *fallback /* or NULL */; const uint8_t *op; uint32_t attempt, resumed /* tokens */;
                       int64_t t_us /* wall */, waited_us; };
int pd_decision_encode(struct pd_decision *d, const struct pd_route_note *note, struct pd_buf *out, struct pd_err *e);
/* What a run holds of a worker while it is there. */
struct pd_share pd_share_of(const struct pd_need *need, const struct pd_member *m, bool prefills, bool decodes);
/* Blocks that one that prefills can ever hold of a prompt: of one that decodes too, half its room. */
uint64_t pd_room_to_give(const struct pd_member *m);
#endif
