/* Inside the side of a worker that gives, shared by its files: giver.c (requests, answers, leases), giver_prefill.c (the compute thread: a request becomes
 * KV), giver_move.c (the KV goes to decode workers). All but giver_prefill.c is the loop's. */
#ifndef PD_SERVE_GIVER_IN_H
#define PD_SERVE_GIVER_IN_H
#include "../engine/describe.h"
#include "giver.h"
#include "link.h"

/* A decode worker, by its address. */
struct pd_gv_peer {
    struct pd_giver *g;
    struct pd_gv_peer *next;
    char at[300];               /* "unix:PATH", "tcp:HOST:PORT" */
    struct pd_link *link;       /* NULL: not connected */
    bool open;                  /* hellos agree */
    struct pd_timer *again;
    int64_t again_us, failing_since;    /* 0: not */
    uint32_t n_runs;
};

/* A request in hand: its prefill, and the KV that is given. */
struct pd_gv_run {
    struct pd_side_run s;
    struct pd_giver *g;
    /* the loop's */
    struct pd_gv_peer *peer;
    uint8_t op[16], lease[PD_LEASE_ID_LEN];
    struct pd_move *move;       /* on its way, */
    struct pd_link *link;       /* over this */
    bool moved_on;              /* it is that of an attempt before this one */
    int64_t t_offer;            /* first, in this attempt */
    uint32_t n_lost;            /* connections that were lost while it was on its way, in this attempt; in place: since it was verified */
    int64_t transfer_us, until; /* timeouts_ms.transfer, 0: none; when it is over here, from its acceptance on */
    uint64_t had, sent, wire;   /* in this attempt: bytes that the decode worker had before it; that went over connections since lost, and how many as coded */
    bool in_place;              /* its decode worker, this process, reads it here; */
    int32_t reader; uint64_t reader_start;
    bool away;                  /* and goes on to, while the connection is lost: it is offered again */
    uint64_t sum;               /* of the request less what an attempt changes */
    /* published: it is computed; kv_told: the client has its kv; settled: the decode worker has its KV; failed: its error was put */
    bool leased, lease_over, published, kv_told, settled, failed, dropping, taken /* once, and counted */;
    struct pd_err no_d;         /* why the decode worker has no KV of it, after kv_told */
    struct pd_call c_take, c_drop;
    /* the thread's, read by the loop as the flags say */
    struct pd_intake in;
    struct pd_kvdesc desc;
    struct pd_plan plan;
    struct pd_run *run;
    struct pd_first *first;
    struct pd_buf t;
    struct pd_err why;
    uint32_t *blocks;           /* [plan.n_blocks], from started on */
    _Atomic uint32_t *done;     /* [layers]: ranges that are final */
    _Atomic int64_t t_final;    /* when the last layer of the last range was; 0: not yet */
    uint64_t untold;            /* bytes of those that the loop was not woken for */
    uint32_t *told;             /* [layers], the loop's: of them, what the move knows */
    _Atomic bool described, started, finished, counted /* among those of g->held */;
};

struct pd_giver {
    struct pd_worker *w;
    struct pd_side side;
    struct pd_links links;
    struct pd_leases *leases;
    struct pd_gv_peer *peers;
    struct pd_post tidy;
    struct pd_timer *t_lease;
    bool tidying;
    /* the thread's */
    struct pd_batch_cb cb;
    uint32_t most;              /* blocks that may be held for others at once */
    _Atomic uint32_t held;      /* that are: of runs that have begun, until their leases have ended */
    /* counted by both */
    struct pd_metric *m_lease[7], *m_live, *m_leased, *m_moves, *m_given[PD_TRANSPORTS], *m_given_bytes, *m_skipped, *m_exposed, *m_not_given, *m_links, *m_tokens;
};

/* giver_prefill.c: the thread's */
void pd_gv_callbacks(struct pd_giver *g);      /* g->cb */
void pd_gv_take(void *run);             /* the calls: a request from the loop becomes a run of the batch; */
void pd_gv_drop(void *run);             /* the batch has it no longer */
void pd_gv_uncount(struct pd_giver *g, struct pd_gv_run *r);     /* its blocks are nobody else's any more. Either's */
void pd_gv_step(struct pd_giver *g, const struct pd_gv_run *r, enum pd_state_id state, uint64_t bytes, const char *cause, const uint8_t *lease);  /* either's */

/* giver_move.c */
int pd_gv_peer_of(struct pd_giver *g, struct pd_str at, struct pd_gv_peer **out, struct pd_err *e);
void pd_gv_peer_drop(struct pd_gv_peer *p);     /* one that nobody needs is freed */
void pd_gv_reach(struct pd_gv_peer *p); /* connect, if it is not */
void pd_gv_try(struct pd_giver *g, struct pd_gv_run *r);        /* offer its KV, if there is a lease and a connection, and nobody has it yet */
void pd_gv_ready(struct pd_gv_run *r);  /* tell its move, if it has one, which layers are final */
void pd_gv_close(struct pd_giver *g, struct pd_gv_run *r);      /* offered and computed: the move closes, and the client is told */
void pd_gv_on_link(void *g, struct pd_link *k, const struct pd_xfer_event *ev);

/* giver.c: its runs in hand, after r (NULL: the first); answers */
static inline struct pd_gv_run *pd_gv_next(const struct pd_giver *g, struct pd_gv_run *r)
{
    return (struct pd_gv_run *)pd_worker_next(g->w, &g->side, r ? &r->s.d : NULL);
}
void pd_gv_fail(struct pd_giver *g, struct pd_gv_run *r, const struct pd_err *why, const char *action);         /* the run fails, before its kv was told */
/* The decode worker has no KV of it. It is kept for a while, for another to take up. */
void pd_gv_not_given(struct pd_giver *g, struct pd_gv_run *r, const struct pd_err *why, const char *action);
void pd_gv_put_kv(struct pd_giver *g, struct pd_gv_run *r);     /* the client's answer, once the KV is there and its decode worker has it offered */
void pd_gv_end_lease(struct pd_giver *g, struct pd_gv_run *r, const char *cause);
void pd_gv_settle(struct pd_giver *g, struct pd_gv_run *r);     /* it may be over */
struct pd_kvdesc pd_gv_desc(const struct pd_gv_run *r);         /* as it is for this attempt */
#endif
