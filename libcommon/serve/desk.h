/* What every worker has: clients whose requests become runs, one compute thread that works on them, and records that go back to each run's client.
 *
 * The loop owns clients, runs and what is sent; the thread owns the engine and no socket. To the thread go calls (pd_desk_call), which it makes between two
 * turns of its work. Back come a run's records and news, gathered over a turn and handed over in one piece (or at once: pd_desk_flush). Whatever the thread
 * wrote into a run before is seen by `news`.
 *
 * A run is in hand from its record on until the thread is done with it (pd_desk_over) and with all calls for it, all its records are put, and its owner keeps
 * it no longer (`kept`); so long its client's answer is owed. A run whose client goes away is cancelled.
 *
 * Requests with a route come from a router, which multiplexes many clients over one connection: that connection is never held, since what would free a run (a
 * cancel, another route) comes over it too. Past PD_DESK_MOST runs they are refused, to be tried elsewhere. A request that names a run in hand is `again`: a
 * router tries anew when a worker failed it, under the run's one name.
 */
#ifndef PD_SERVE_DESK_H
#define PD_SERVE_DESK_H
#include "../base/seen.h"
#include "../engine/reply.h"
#include "../trace/keyed.h"
#include "../wire/routing.h"
#include "daemon.h"

#define PD_DESK_MOST 16384

struct pd_desk;
struct pd_client;
/* A piece of work for the thread; part of what it is about, so that it cannot fail. May be queued again once its fn has begun. */
struct pd_call { void (*fn)(void *ctx); void *ctx; struct pd_call *next; struct pd_desk_run *run; bool queued; };

enum pd_why { PD_WHY_NOT, PD_WHY_GONE, PD_WHY_RECORD };         /* cancelled by: its client going away; a record */
const char *pd_why_text(enum pd_why w);

struct pd_desk_run {            /* the owner's run begins with it */
    struct pd_node node;        /* of all in hand, by name, in order of arrival */
    char name[PD_RUN_LEN + 1];
    struct pd_client *client;   /* NULL: gone */
    uint8_t token[16]; bool has_token;  /* cancel_token */
    bool routed;
    struct pd_routing route;    /* its text lives in mem */
    struct pd_arena mem;
    struct pd_intake in;        /* as read, not tokenised; whoever takes it over zeroes it */
    bool stream;
    bool kept;                  /* the owner's: not to be freed; pd_desk_look after it has become false */
    _Atomic int cancelled;      /* an enum pd_why, set by the loop */
    /* the desk's: the loop */
    struct pd_buf pending; size_t at;   /* records that wait for room */
    bool over, lost_here, told_lost;
    /* the thread */
    struct pd_buf out;
    bool ended, touched, told;          /* told: there is news of it */
    uint32_t n_called;                  /* calls of it that were made since the last hand-over */
    struct pd_desk_run *next_touched;
    /* under the lock */
    struct pd_buf ready;
    bool ready_over, ready_told, lost, queued;  /* lost: records are missing for want of memory */
    uint32_t n_calls;                   /* queued, or made and not handed over yet */
    struct pd_desk_run *next_ready;
    /* taken from there by the loop */
    struct pd_buf taken;
    bool taken_over, taken_told;
    struct pd_desk_run *next_taken;
};

struct pd_desk_ops {
    void *ctx;
    size_t run_size;
    /* loop */
    int (*admit)(void *ctx, struct pd_desk_run *r, struct pd_err *e);   /* a new one, to be begun; < 0: refused */
    /* The same run again, from whichever client; in and route: during the call. true: it is dealt with. false: the one in hand is on its way out, and this one
     * is admitted as a new run beside it: the name is found to be the new one's from here on. */
    bool (*again)(void *ctx, struct pd_desk_run *r, struct pd_client *from, const struct pd_intake *in, const struct pd_routing *route);
    void (*refuse)(void *ctx, const struct pd_request *q, const struct pd_err *why, const char *action, struct pd_buf *b);      /* encode the answer */
    void (*news)(void *ctx, struct pd_desk_run *r);                     /* the thread touched it; its records are put already. May be NULL */
    void (*cancel)(void *ctx, struct pd_desk_run *r);                   /* `cancelled` was set just now */
    void (*freed)(void *ctx, struct pd_desk_run *r);                    /* about to be. May be NULL */
    void (*idle)(void *ctx);                                            /* no run is in hand any more. May be NULL */
    /* thread */
    bool (*busy)(void *ctx);            /* there is work for a turn */
    bool (*turn)(void *ctx);            /* false: nothing could be done for now; the next call, or a moment, may help */
    void (*after)(void *ctx);           /* after each turn and the calls before it */
    void (*spare)(void *ctx);           /* there is nothing to do. May be NULL */
};
struct pd_desk_opts { struct pd_runtime *rt; int64_t seed; bool stream; uint32_t max_runs; struct pd_trace *trace; };

int pd_desk_new(const struct pd_desk_opts *o, const struct pd_desk_ops *ops, struct pd_desk **out, struct pd_err *e);
void pd_desk_on(struct pd_desk *k, struct pd_daemon *d);        /* before its first client */
int pd_desk_start(struct pd_desk *k, struct pd_err *e);         /* the thread */
void pd_desk_stop(struct pd_desk *k);                           /* joins it: what it owned is the caller's again */
void pd_desk_free(struct pd_desk *k);                           /* clients and runs, before the daemon is freed. NULL: nothing */
extern const struct pd_conn_cb pd_desk_cb;                      /* the entry of plain streams; ctx: the desk */

/* ---- the loop's ---- */
/* One that is queued already stays as it is. r: whose it is: the run stays until it was made; NULL: it is nobody's. */
void pd_desk_call(struct pd_desk *k, struct pd_desk_run *r, struct pd_call *c, void (*fn)(void *ctx), void *ctx);
struct pd_desk_run *pd_desk_find(const struct pd_desk *k, const char *name, size_t n);
struct pd_desk_run *pd_desk_first(const struct pd_desk *k);     /* then (void *)r->node.next */
void pd_desk_put(struct pd_desk *k, struct pd_desk_run *r, struct pd_buf *b);   /* records of the loop's own making; empties b */
void pd_desk_done(struct pd_desk *k, struct pd_desk_run *r);    /* the thread never had it, or has it no more: as pd_desk_over */
void pd_desk_look(struct pd_desk *k, struct pd_desk_run *r);    /* is it over and kept no longer? It may be freed by this */
void pd_desk_cancel(struct pd_desk *k, struct pd_desk_run *r, enum pd_why why);
void pd_desk_move(struct pd_desk *k, struct pd_desk_run *r, struct pd_client *to);      /* its answers go to another client from here on */
/* Refuse a request of this client, which was no new run. */
void pd_desk_refuse(struct pd_desk *k, struct pd_client *c, const struct pd_request *q, const struct pd_err *why, const char *action);
/* The hook of a daemon: a `cancel` record with its token. */
int pd_desk_on_cancel(struct pd_desk *k, const struct pd_rec *rec, const char **state, struct pd_err *e);
uint32_t pd_desk_runs(const struct pd_desk *k);
uint32_t pd_desk_max(const struct pd_desk *k);

/* ---- the thread's ---- */
void pd_desk_touch(struct pd_desk *k, struct pd_desk_run *r);   /* there is news of it */
void pd_desk_add(struct pd_desk *k, struct pd_desk_run *r, const uint8_t *p, size_t n);         /* records */
void pd_desk_over(struct pd_desk *k, struct pd_desk_run *r);    /* the thread knows it no more: the last word */
void pd_desk_flush(struct pd_desk *k);                          /* hand over now */
#endif
