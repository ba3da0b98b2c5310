/* Inside the router, shared by its files: router.c (daemon, workers, metrics), router_run.c (a run until its end), router_back.c
 * (what workers send back), router_fail.c (when they fail it), router_feed.c (what workers hold of a prompt), router_text.c (a prompt's token ids), router_learn.c (what runs take), router_path.c
 * (paths of KV, limits), router_left.c (what a former life left), router_client.c (clients and what they
 * are sent), router_key.c (idempotency keys). Everything is the loop thread's. */
#ifndef PD_SERVE_ROUTER_IN_H
#define PD_SERVE_ROUTER_IN_H
#include "../base/seen.h"
#include "../trace/keyed.h"
#include "../wire/routing.h"
#include "../wire/value.h"
#include "router.h"
#include "router_path.h"
#include "router_feed.h"
#include "router_learn.h"
#include "upstream.h"

#define PD_RT_TRIED 16
enum { PD_RT_MAX_MIGRATIONS = 2, PD_RT_CANCEL_US = 1000000, PD_RT_GRACE_US = 500000, PD_RT_SWEEP_US = 10000, PD_RT_NO_P_US = 1000000,
       PD_RT_DOUBT_US = 200000, PD_RT_LATE_US = 1000000 /* no KV is late before that: a decode worker that is busy looks like a slow path */, PD_RT_MAX_BODIES = 256 << 20 };

/* A worker. */
struct pd_rt_worker {
    struct pd_router *r;
    struct pd_member *m;
    struct pd_upstream *u;
    struct pd_conn *reg;        /* it registered over this one; NULL: it is asked, or the connection has ended */
    struct pd_rt_feed feed;
    bool named;                 /* by --worker: never forgotten */
    bool draining, told_silent;
    bool brought;               /* its connection has brought it a request: before that a cancel would make it one that only asks, and no request is taken on it */
    bool same_tokens, same_chat, told_text;     /* its tokenizer is ours, and its chat template too; told: it is not */
    struct pd_rt_worker *next;
};

/* Who gets a run's records. Lives until all of them are put, also after the run. */
struct pd_rt_listener {
    struct pd_rt_listener *next_of_run, *next, **prev;  /* next, prev: of its client */
    struct pd_rt_client *k;
    struct pd_rt_run *run;      /* NULL: it has ended */
    bool stream;
    char name[PD_RUN_LEN + 1];
    struct pd_buf id;           /* its own `id`, raw, when it joined a run with another one; `other` then */
    bool other;
    struct pd_buf pending; size_t at;   /* records that wait for room */
};

struct pd_rt_client { struct pd_conn *c; struct pd_rt_listener *first; size_t waiting; bool held; struct pd_rt_client *next_held; };

struct pd_rt_choice {
    uint32_t sent;              /* tokens that have come, position after position */
    struct pd_buf tokens, text, logprobs;       /* int32; float, where they are asked for */
    struct pd_buf carry;        /* text of a first token that went out early, without it: it goes with the next one */
    bool no_text;               /* such a one did, and its text has not come yet */
    uint32_t told;              /* of sent: in the trace */
    bool done;
    uint32_t total;             /* of its result */
};

/* A request as pairs, less what is set anew each time it is sent. */
struct pd_rt_body { struct pd_buf b; uint32_t pairs; };

struct pd_rt_run {
    struct pd_node node;        /* by name */
    char name[PD_RUN_LEN + 1];
    struct pd_rt_run *next_queued, *prev_queued; bool queued;
    struct pd_rt_listener *listeners;
    struct pd_rt_body body, ids;        /* as it came; with token ids for its text (router_text.c), or empty */
    bool of_messages;           /* the text */
    struct pd_buf id;
    uint64_t body_hash;
    uint8_t token[16], own_token[16]; bool has_token;   /* own: of a request that brings none, when there is a ledger */
    struct pd_need need;
    struct pd_buf adapter;
    struct pd_rt_choice *choice;
    uint32_t n, n_done;
    bool stream_up, logprobs;   /* workers are asked for tokens */
    struct pd_rt_key *key;
    /* times, mono us; 0: none */
    int64_t t_accept, t_sent, t_first, deadline_us, queue_us, first_us, transfer_us, none_since, cancel_us, doubt_us;
    int64_t age;                /* t_accept, less what its priority is worth: who is older goes first */
    struct pd_buf timeouts;     /* its timeouts_ms, raw: workers are told what is left */
    /* the attempt */
    struct pd_rt_worker *d, *p, *old_p;
    struct pd_share d_share, p_share;
    bool p_done, early, sign;   /* prefill has answered; first token may go out early; something came from d */
    enum pd_mode mode;
    uint8_t op[16]; bool has_op;
    uint32_t attempt, p_tries, failures, migrations;
    struct pd_tried tried[PD_RT_TRIED]; int n_tried;
    struct pd_buf fallback;     /* text, NUL-ended */
    struct pd_rt_lent lent;
    struct pd_rt_fall fall;
    int like; char numerics[48];        /* migration */
    struct pd_rt_hashes *hashed; uint32_t n_hashed;     /* [PD_RT_CLASSES] */
    bool delivered;             /* something went out to a client: only migration or an end may follow */
    struct pd_buf held;         /* results that go out together (n > 1) */
    struct pd_buf why;          /* the cause of its failure, for the trace */
    int64_t retry_after_ms;     /* of its error record */
    bool failed, cancelled, cancelling;
    const char *cancel_cause;
    struct pd_rt_told told;     /* what was expected of it, and what it took */
    struct pd_rt_took took;
};

struct pd_router {
    struct pd_router_opts o;
    struct pd_daemon *d;
    struct pd_loop *l;
    struct pd_registry reg;
    struct pd_rt_worker *workers;
    struct pd_decision decision;        /* the last one */
    struct pd_keyed runs;
    struct pd_rt_run *queue, *queue_last;       /* those whose stream has begun first, then by age */
    uint32_t n_runs, n_queued;
    size_t body_bytes;                  /* of the requests in hand, and of their blocks' hashes */
    struct pd_rt_index index;
    struct pd_rt_learning learning;
    struct pd_rt_paths paths;
    struct pd_rt_client *held, **last_held;
    struct pd_seen seen;
    struct pd_keyed keys; size_t key_bytes;
    struct pd_timer *sweep;
    bool sweeping, dispatching, dispatch_again, policy_known;
    int64_t since, next_dispatch;
    struct pd_buf scratch;
    struct pd_metric *m_runs, *m_queue, *m_ends[5], *m_modes[3], *m_retry[3] /* prefill, decode, local */, *m_migrated, *m_joined, *m_dropped, *m_ttft,
        *m_e2e, *m_wait, *m_disagree;
};

/* ---- router_run.c ---- */
/* A request became a run: it is routed at once, or waits; it may have ended on return. */
int pd_rt_begin(struct pd_router *r, struct pd_rt_run *run, struct pd_err *e);
void pd_rt_dispatch(struct pd_router *r);       /* those that wait, as far as somebody may have them */
void pd_rt_record(struct pd_router *r, struct pd_rt_worker *w, const struct pd_rec *rec);
void pd_rt_down(struct pd_router *r, struct pd_rt_worker *w, const struct pd_err *why);
void pd_rt_cancel(struct pd_router *r, struct pd_rt_run *run, const char *cause);
void pd_rt_sweep(struct pd_router *r, int64_t now);
void pd_rt_end_all(struct pd_router *r);        /* at the end of the process: each run has an end in the trace */
void pd_rt_run_free(struct pd_router *r, struct pd_rt_run *run);
struct pd_rt_run *pd_rt_find(struct pd_router *r, const char *name, size_t n);
void pd_rt_wake(struct pd_router *r);           /* the sweep runs while there is something to look at */

/* what its other files use: */
/* While runs are walked nothing else may end one: who would be routed now is looked at by pd_rt_end_walk. */
bool pd_rt_begin_walk(struct pd_router *r);
/* The request with this route, into r->scratch. */
int pd_rt_compose(struct pd_router *r, struct pd_rt_run *run, const struct pd_routing *route, struct pd_err *e);
void pd_rt_end_cancelled(struct pd_router *r, struct pd_rt_run *run);
void pd_rt_end_run(struct pd_router *r, struct pd_rt_run *run, enum pd_state_id state);
void pd_rt_end_walk(struct pd_router *r, bool outer);
void pd_rt_enqueue(struct pd_router *r, struct pd_rt_run *run);
/* Both end the run, with results of our own; it is gone afterwards. */
void pd_rt_fail(struct pd_router *r, struct pd_rt_run *run, const struct pd_err *why);
void pd_rt_falls_back(struct pd_router *r, struct pd_rt_run *run, const char *kind, const char *why);
const char *pd_rt_name_of(const struct pd_rt_worker *w);
struct pd_need pd_rt_need_of(struct pd_router *r, const struct pd_rt_run *run, int64_t now);
void pd_rt_note_route(struct pd_router *r, struct pd_rt_run *run, const char *reason, int64_t now);
void pd_rt_release_d(struct pd_rt_run *run);
void pd_rt_release_p(struct pd_rt_run *run, const char *cancel);
bool pd_rt_only_early(const struct pd_rt_run *run);
struct pd_routing pd_rt_routing(struct pd_router *r, const struct pd_rt_run *run);
void pd_rt_send(struct pd_router *r, struct pd_rt_worker *w);           /* r->scratch */
void pd_rt_send_cancel(struct pd_rt_worker *w, const struct pd_rt_run *run, const char *cause);
bool pd_rt_set_text(struct pd_buf *b, const char *text);
void pd_rt_step(struct pd_router *r, struct pd_rt_run *run, enum pd_state_id state, const char *cause);
void pd_rt_step_tokens(struct pd_router *r, struct pd_rt_run *run, enum pd_state_id state, uint32_t choice, uint32_t pos, uint32_t tokens, const char *cause);
bool pd_rt_streams(const struct pd_rt_run *run);
const char *pd_rt_text_of(const struct pd_buf *b);
void pd_rt_trace_end(struct pd_router *r, struct pd_rt_run *run, enum pd_state_id state, const char *cause);

/* ---- router_back.c: pd_rt_record; router_fail.c: pd_rt_down, and ---- */
void pd_rt_d_lost(struct pd_router *r, struct pd_rt_run *run, const char *why, bool counts);
void pd_rt_p_lost(struct pd_router *r, struct pd_rt_run *run, const char *kind, const char *why, bool another);
void pd_rt_p_lost_late(struct pd_router *r, struct pd_rt_run *run, const char *kind, const char *why);
void pd_rt_kv_late(struct pd_router *r, struct pd_rt_run *run, int64_t now);   /* it is time to look */

/* ---- router_client.c ---- */
extern const struct pd_conn_cb pd_rt_client_cb; /* ctx: the router */
int pd_rt_listen(struct pd_router *r, struct pd_rt_client *k, struct pd_rt_run *run, const char *name, bool stream, struct pd_rt_listener **out,
    struct pd_err *e);
void pd_rt_put(struct pd_router *r, struct pd_rt_listener *l, const void *rec, size_t n);
void pd_rt_put_all(struct pd_router *r, struct pd_rt_run *run, const void *recs, size_t n, bool tokens);      /* records, one after the other */
void pd_rt_leave(struct pd_router *r, struct pd_rt_run *run);   /* the run has ended: its listeners get what waits, and go */
void pd_rt_listener_over(struct pd_router *r, struct pd_rt_listener *l);
void pd_rt_client_free(struct pd_rt_client *k);         /* at the end of the process */
void pd_rt_let_read(struct pd_router *r);
int pd_rt_on_cancel(void *ctx, const struct pd_rec *rec, const char **state, struct pd_err *e);
uint32_t pd_rt_guess_tokens(const struct pd_request *q);        /* of its text, by its length */
void pd_rt_refuse(struct pd_router *r, struct pd_conn *c, const struct pd_request *q, const struct pd_err *why);

int pd_rt_body_make(const struct pd_request *q, struct pd_rt_body *out, struct pd_err *e);

/* ---- router_text.c ---- */
void pd_rt_text_said(struct pd_router *r, struct pd_rt_worker *w);      /* its `worker` record was taken */
int pd_rt_tokenise(struct pd_router *r, struct pd_rt_run *run, const struct pd_request *q, struct pd_err *e);   /* fills run->ids, if it can be done */
const struct pd_rt_body *pd_rt_body_for(const struct pd_rt_run *run);   /* what its workers are sent */

/* ---- router_key.c ---- */
struct pd_rt_key {
    struct pd_node node;        /* by a hash of the key */
    char *key; size_t n_key;
    uint64_t body_hash;
    struct pd_rt_run *run;      /* NULL: it has ended */
    char name[PD_RUN_LEN + 1];
    struct pd_buf tokens, results;
    int64_t expires_us;
};
struct pd_rt_key *pd_rt_key_find(struct pd_router *r, struct pd_str key);
int pd_rt_key_new(struct pd_router *r, struct pd_str key, struct pd_rt_run *run, struct pd_err *e);
void pd_rt_key_log(struct pd_router *r, struct pd_rt_run *run, const void *rec, size_t n, bool token);
void pd_rt_key_restart(struct pd_router *r, struct pd_rt_run *run);     /* nothing of it counts: the run begins again */
void pd_rt_key_end(struct pd_router *r, struct pd_rt_run *run, bool keep);
void pd_rt_key_sweep(struct pd_router *r, int64_t now);
void pd_rt_keys_free(struct pd_router *r);
#endif
