#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <time.h>
#include "../base/clock.h"
#include "../wire/frame.h"
#include "../wire/value.h"
#include "desk.h"

enum { PAUSE_MS = 20 };         /* for a thread that can do nothing until blocks come back */

struct pd_client { struct pd_conn *c; bool held, routes /* a router */, drains; struct pd_client *next_held; };

struct pd_desk {
    struct pd_desk_opts o;
    struct pd_desk_ops ops;
    struct pd_daemon *d;
    struct pd_loop *l;
    /* the loop's */
    struct pd_keyed runs;
    uint32_t max_runs;
    struct pd_client *held, **last_held;        /* who wait to be read again */
    uint64_t n_left;                    /* runs that gave up their name */
    struct pd_seen seen;                /* runs of bare requests: one that comes again is a replay */
    struct pd_post post;
    struct pd_metric *m_runs;
    /* under the lock */
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct pd_call *calls, **last_call;
    struct pd_desk_run *ready, **last_ready;
    bool posted, stop;
    /* the thread's */
    pthread_t thread;
    bool running, say;                  /* say: some of the touched have news or records */
    struct pd_desk_run *touched;
};

const char *pd_why_text(enum pd_why w)
{
    static const char *const text[] = { "", "the client is gone", "cancelled by its client" };
    return text[w];
}

/* ---- the thread ---- */

static void touch(struct pd_desk *k, struct pd_desk_run *r)
{
    if (r->touched)
        return;
    r->touched = true;
    r->next_touched = k->touched;
    k->touched = r;
}

void pd_desk_touch(struct pd_desk *k, struct pd_desk_run *r)
{
    r->told = k->say = true;
    touch(k, r);
}

void pd_desk_add(struct pd_desk *k, struct pd_desk_run *r, const uint8_t *p, size_t n)
{
    if (pd_buf_add(&r->out, p, n, NULL) < 0)
        r->lost = true;         /* read by the loop only after the hand-over */
    pd_desk_touch(k, r);
}

void pd_desk_over(struct pd_desk *k, struct pd_desk_run *r)
{
    r->ended = true;
    pd_desk_touch(k, r);
}

void pd_desk_flush(struct pd_desk *k)
{
    if (!k->touched)
        return;
    pthread_mutex_lock(&k->lock);
    for (struct pd_desk_run *r = k->touched, *next; r; r = next) {
        next = r->next_touched;
        r->touched = false;
        if (!r->ready.n) {
            struct pd_buf empty = r->ready;
            r->ready = r->out;
            r->out = empty;
            r->out.n = 0;
        } else {
            r->lost |= pd_buf_add(&r->ready, r->out.p, r->out.n, NULL) < 0;
            r->out.n = 0;
        }
        r->ready_over |= r->ended;
        r->ready_told |= r->told;
        r->told = false;
        r->n_calls -= r->n_called;
        r->n_called = 0;
        if (!r->queued) {
            r->queued = true;
            r->next_ready = NULL;
            *k->last_ready = r;
            k->last_ready = &r->next_ready;
        }
    }
    bool post = !k->posted;
    k->posted = true;
    pthread_mutex_unlock(&k->lock);
    k->touched = NULL;
    k->say = false;
    if (post)
        pd_loop_post(k->l, &k->post);
}

static void pause_or_call(struct pd_desk *k)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_nsec += PAUSE_MS * 1000000l;
    t.tv_sec += t.tv_nsec / 1000000000l;
    t.tv_nsec %= 1000000000l;
    pthread_cond_timedwait(&k->more, &k->lock, &t);
}

/* Under the lock, which it lets go of meanwhile. */
static void spare(struct pd_desk *k)
{
    if (k->calls || k->stop || !k->ops.spare || k->ops.busy(k->ops.ctx))
        return;
    pthread_mutex_unlock(&k->lock);
    k->ops.spare(k->ops.ctx);
    pthread_mutex_lock(&k->lock);
}

static void *compute(void *arg)
{
    struct pd_desk *k = arg;
    bool can = true;
    for (bool stop = false; !stop;) {
        pthread_mutex_lock(&k->lock);
        if (!can && !k->calls && !k->stop)
            pause_or_call(k);
        spare(k);
        while (!k->calls && !k->stop && !k->ops.busy(k->ops.ctx))
            pthread_cond_wait(&k->more, &k->lock);
        struct pd_call *c = k->calls, *next;
        stop = k->stop;
        k->calls = NULL;
        k->last_call = &k->calls;
        pthread_mutex_unlock(&k->lock);
        for (; c; c = next) {
            struct pd_call now = *c;
            next = c->next;
            pthread_mutex_lock(&k->lock);
            c->queued = false;          /* from here on the loop may write to it, to queue it again */
            pthread_mutex_unlock(&k->lock);
            now.fn(now.ctx);
            if (now.run) {
                now.run->n_called++;
                touch(k, now.run);
            }
        }
        if (k->say) {           /* a first token that came with its KV does not wait for the second one to be computed */
            pd_desk_flush(k);
            sched_yield();      /* the loop that made the call may stand behind us on this core */
        }
        can = stop || !k->ops.busy(k->ops.ctx) || k->ops.turn(k->ops.ctx);
        k->ops.after(k->ops.ctx);
        pd_desk_flush(k);
    }
    return NULL;
}

void pd_desk_call(struct pd_desk *k, struct pd_desk_run *r, struct pd_call *c, void (*fn)(void *ctx), void *ctx)
{
    pthread_mutex_lock(&k->lock);
    if (!c->queued) {
        *c = (struct pd_call){ .fn = fn, .ctx = ctx, .run = r, .queued = true };
        if (r)
            r->n_calls++;
        *k->last_call = c;
        k->last_call = &c->next;
    }
    pthread_mutex_unlock(&k->lock);
    pthread_cond_signal(&k->more);
}

/* ---- the loop: runs ---- */

static void run_free(struct pd_desk *k, struct pd_desk_run *r)
{
    if (k->ops.freed)
        k->ops.freed(k->ops.ctx, r);
    pd_intake_free(&r->in);
    pd_arena_free(&r->mem);
    pd_buf_free(&r->pending);
    pd_buf_free(&r->out);
    pd_buf_free(&r->ready);
    pd_buf_free(&r->taken);
    pd_free(r);
}

static void let_read(struct pd_desk *k)
{
    while (k->runs.n < k->max_runs && k->held) {
        struct pd_client *c = k->held;
        if (!(k->held = c->next_held))
            k->last_held = &k->held;
        c->held = false;
        pd_conn_unhold(c->c);
    }
}

/* An answer less is owed. A router is read until the last one while we drain. */
static void settle(struct pd_client *c)
{
    pd_conn_owe(c->c, -1);
    if (c->drains && !pd_conn_owed(c->c))
        pd_conn_end_input(c->c);
}

void pd_desk_look(struct pd_desk *k, struct pd_desk_run *r)
{
    struct pd_client *c = r->client;
    if (!r->over || r->pending.n || r->kept)
        return;
    /* A call that came too late for a run that has ended (a cancel), or word of it, is still on its way to the thread or back: it leads here again. */
    pthread_mutex_lock(&k->lock);
    bool wanted = r->n_calls || r->queued;
    pthread_mutex_unlock(&k->lock);
    if (wanted)
        return;
    pd_keyed_remove(&k->runs, r);
    pd_metric_set(k->m_runs, (int64_t)k->runs.n);
    run_free(k, r);
    if (c)
        settle(c);
    let_read(k);
    if (!k->runs.n && k->ops.idle)
        k->ops.idle(k->ops.ctx);
    pd_daemon_poke(k->d);
}

/* Put what there is room for. */
static void send_pending(struct pd_desk_run *r)
{
    struct pd_err e;
    while (r->at < r->pending.n && r->client && !pd_conn_full(r->client->c)) {
        size_t len = pd_value_len(r->pending.p + r->at, r->pending.n - r->at);     /* our own records: this asks for no memory */
        int rc = 0;
        if (len) {
            rc = pd_conn_put(r->client->c, r->pending.p + r->at, len, &e);
            if (rc == PD_EFAIL)
                pd_conn_put_error(r->client->c, r->name, &e, "abort");
            r->at += len;
        }
        if (rc == PD_ECANCEL || rc == PD_ENOMEM || !len)        /* nobody to tell; `gone` follows */
            r->at = r->pending.n;
    }
    if (!r->client)
        r->at = r->pending.n;
    if (r->at == r->pending.n)
        r->at = r->pending.n = 0;
}

/* What is left of its records does not make an answer: it fails, and others do not. */
static void no_memory(struct pd_desk *k, struct pd_desk_run *r)
{
    struct pd_err e;
    struct pd_buf b = { 0 };
    struct pd_request q = { .n = 1 };
    if (!r->client)
        return;
    pd_fail(&e, PD_ENOMEM, "run %s: out of memory for its records", r->name);
    memcpy(q.run, r->name, sizeof q.run);
    k->ops.refuse(k->ops.ctx, &q, &e, "retry", &b);
    r->pending.n = r->at;
    if (!b.n || pd_buf_add(&r->pending, b.p, b.n, NULL) < 0)
        pd_conn_close(r->client->c, &e);        /* not even that */
    pd_buf_free(&b);
}

void pd_desk_put(struct pd_desk *k, struct pd_desk_run *r, struct pd_buf *b)
{
    if (r->client && pd_buf_add(&r->pending, b->p, b->n, NULL) < 0)
        no_memory(k, r);
    pd_buf_free(b);
    send_pending(r);
}

void pd_desk_done(struct pd_desk *k, struct pd_desk_run *r)
{
    r->over = true;
    pd_desk_look(k, r);
}

static void deliver(void *ctx)
{
    struct pd_desk *k = ctx;
    pthread_mutex_lock(&k->lock);
    struct pd_desk_run *list = k->ready, *next;
    k->ready = NULL;
    k->last_ready = &k->ready;
    k->posted = false;
    for (struct pd_desk_run *r = list; r; r = r->next_ready) {
        struct pd_buf t = r->taken;
        r->taken = r->ready;
        t.n = 0;
        r->ready = t;
        r->taken_over |= r->ready_over;
        r->taken_told |= r->ready_told;
        r->ready_told = false;
        r->next_taken = r->next_ready;
        r->queued = false;      /* from here on the thread may queue it again */
    }
    pthread_mutex_unlock(&k->lock);
    for (struct pd_desk_run *r = list; r; r = next) {
        next = r->next_taken;
        bool lost = r->client && r->taken.n && pd_buf_add(&r->pending, r->taken.p, r->taken.n, NULL) < 0;
        r->taken.n = 0;
        r->over |= r->taken_over;
        r->lost_here |= lost;
        if (r->over && (r->lost || r->lost_here) && !r->told_lost) {
            r->told_lost = true;
            no_memory(k, r);
        }
        send_pending(r);
        bool told = r->taken_told;
        r->taken_told = false;
        if (k->ops.news && told)
            k->ops.news(k->ops.ctx, r);
        pd_desk_look(k, r);
    }
}

void pd_desk_cancel(struct pd_desk *k, struct pd_desk_run *r, enum pd_why why)
{
    int was = PD_WHY_NOT;
    if (atomic_compare_exchange_strong(&r->cancelled, &was, (int)why))
        k->ops.cancel(k->ops.ctx, r);
}

void pd_desk_move(struct pd_desk *k, struct pd_desk_run *r, struct pd_client *to)
{
    (void)k;
    if (r->client == to)
        return;
    if (r->client)
        settle(r->client);
    r->client = to;
    pd_conn_owe(to->c, 1);
}

struct pd_desk_run *pd_desk_find(const struct pd_desk *k, const char *name, size_t n)
{
    return n == PD_RUN_LEN ? pd_keyed_find(&k->runs, name, n) : NULL;
}

struct pd_desk_run *pd_desk_first(const struct pd_desk *k) { return (void *)k->runs.first; }
uint32_t pd_desk_runs(const struct pd_desk *k) { return (uint32_t)k->runs.n; }
uint32_t pd_desk_max(const struct pd_desk *k) { return k->max_runs; }

/* ---- the loop: clients ---- */

static int on_opened(void *ctx, struct pd_conn *c, struct pd_err *e)
{
    struct pd_client *k = pd_calloc(1, sizeof *k, "a client", e);
    (void)ctx;
    if (!k)
        return PD_ENOMEM;
    k->c = c;
    pd_conn_set(c, k);
    return 0;
}

/* Refused before it became a run. */
static void refuse(struct pd_desk *k, struct pd_conn *c, const struct pd_request *q, const struct pd_err *why, const char *action)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    k->ops.refuse(k->ops.ctx, q, why, action, &b);
    for (size_t at = 0, len = 0; at < b.n; at += len) {
        len = pd_value_len(b.p + at, b.n - at);
        if (!len || pd_conn_put(c, b.p + at, len, &e) < 0)
            break;
    }
    if (!b.n)
        pd_conn_close(c, why);          /* no memory even for that */
    pd_buf_free(&b);
}

void pd_desk_refuse(struct pd_desk *k, struct pd_client *c, const struct pd_request *q, const struct pd_err *why, const char *action)
{
    refuse(k, c->c, q, why, action);
}

static void hold(struct pd_desk *k, struct pd_client *c)
{
    c->held = true;
    c->next_held = NULL;
    *k->last_held = c;
    k->last_held = &c->next_held;
    pd_conn_hold(c->c);
}

/* A run of this connection: its client says so itself, and needs no token. */
static void cancel_of_client(struct pd_desk *k, struct pd_client *from, const struct pd_rec *rec)
{
    struct pd_bin v;
    struct pd_str name;
    struct pd_desk_run *r = NULL;
    if (pd_map_find(rec->p, rec->n, "run", &v) == 1 && pd_get_str(v, &name))
        r = pd_desk_find(k, name.p, name.n);
    if (r && r->client == from)
        pd_desk_cancel(k, r, PD_WHY_RECORD);
}

/* It is on its way out, and another run has its name now. */
static int give_up_name(struct pd_desk *k, struct pd_desk_run *r, struct pd_err *e)
{
    uint8_t key[8];
    pd_put_be64(key, ++k->n_left);
    pd_keyed_remove(&k->runs, r);
    int rc = pd_keyed_add(&k->runs, r, key, sizeof key, e);
    return rc < 0 ? pd_keyed_add(&k->runs, r, r->name, PD_RUN_LEN, NULL), rc : 0;      /* there was room for it a moment ago */
}

/* 0 a new one that may be taken in; 1 it is in hand, and was told so; < 0 refused. */
static int look_at(struct pd_desk *k, struct pd_client *from, struct pd_desk_run *r, const char **action, struct pd_err *e)
{
    struct pd_request *q = &r->in.req;
    struct pd_desk_run *old;
    int rc = 0;
    r->routed = q->route.p != NULL;
    if (r->routed && (rc = pd_routing_decode(q->route, &r->mem, &r->route, e)) < 0)
        return rc;
    if (r->routed && (old = pd_desk_find(k, q->run, PD_RUN_LEN))) {
        if (k->ops.again(k->ops.ctx, old, from, &r->in, &r->route) || r->route.again)
            return 1;
        if ((rc = give_up_name(k, old, e)) < 0)
            return rc;
    }
    from->routes |= r->routed;
    if (r->routed && r->route.again)    /* it is over: the answer is on its way */
        return 1;
    if (from->drains) {
        *action = "reroute";
        return pd_fail(e, PD_ENOWORKER, "this worker drains and begins nothing new");
    }
    if (r->routed && k->runs.n >= PD_DESK_MOST) {
        *action = "reroute";
        return pd_fail(e, PD_ENOWORKER, "%u runs are in hand here already", (uint32_t)k->runs.n);
    }
    if (!r->routed && (pd_desk_find(k, q->run, PD_RUN_LEN) || (rc = pd_seen_add(&k->seen, q->run, PD_RUN_LEN, e)) != 0)) {
        if (rc >= 0)
            rc = pd_fail(e, PD_EFAIL, "request: run %s came already here (leave run out: one is made)", q->run);
        pd_run_new(q->run, NULL);       /* the answer to the other keeps the name */
        return rc;
    }
    return 0;
}

static void on_record(void *ctx, struct pd_conn *c, const struct pd_rec *rec)
{
    struct pd_desk *k = ctx;
    struct pd_client *from = pd_conn_get(c);
    struct pd_err e;
    struct pd_bin v;
    const char *action = "abort";
    if (rec->kind == PD_K_CANCEL) {
        cancel_of_client(k, from, rec);
        return;
    }
    if (rec->kind != PD_K_REQUEST) {
        struct pd_str kind = pd_rec_kind(rec);
        pd_fail(&e, PD_EFAIL, "a record of kind '%.*s' is not served here; requests are", (int)(kind.n < 40 ? kind.n : 40), kind.p);
        pd_conn_put_error(c, NULL, &e, "abort");
        return;
    }
    struct pd_desk_run *r = pd_calloc(1, k->ops.run_size, "a run", &e);
    if (!r) {
        pd_conn_close(c, &e);
        return;
    }
    int rc = pd_intake_read(rec->p, rec->n, k->o.seed, &r->in, &e);
    if (rc == 0)
        rc = look_at(k, from, r, &action, &e);
    memcpy(r->name, r->in.req.run, sizeof r->name);
    if (rc == 0 && (rc = pd_keyed_add(&k->runs, r, r->name, PD_RUN_LEN, &e)) == 0) {
        r->has_token = r->in.req.cancel_token.n == sizeof r->token;
        if (r->has_token)
            memcpy(r->token, r->in.req.cancel_token.p, sizeof r->token);
        r->stream = k->o.stream;
        if (pd_map_find(rec->p, rec->n, "stream", &v) == 1)
            pd_get_bool(v, &r->stream);
        r->client = from;
        if ((rc = k->ops.admit(k->ops.ctx, r, &e)) < 0)
            pd_keyed_remove(&k->runs, r);
    }
    if (rc) {
        if (rc < 0)
            refuse(k, c, &r->in.req, &e, action);
        run_free(k, r);
        return;
    }
    pd_conn_owe(c, 1);
    pd_metric_set(k->m_runs, (int64_t)k->runs.n);
    if (k->runs.n >= k->max_runs && !from->held && !r->routed)
        hold(k, from);
}

static void on_bad(void *ctx, struct pd_conn *c, const struct pd_err *why)
{
    struct pd_request q = { .n = 1 };
    pd_run_new(q.run, NULL);
    refuse(ctx, c, &q, why, "abort");
}

static void on_room(void *ctx, struct pd_conn *c)
{
    struct pd_desk *k = ctx;
    for (struct pd_desk_run *r = pd_desk_first(k), *next; r && !pd_conn_full(c); r = next) {
        next = (void *)r->node.next;
        if (!r->client || r->client->c != c || !r->pending.n)
            continue;
        send_pending(r);
        pd_desk_look(k, r);
    }
}

/* What is in hand of a router may still be cancelled, or get another route; what it sends anew goes back at once. */
static void on_drain(void *ctx, struct pd_conn *c)
{
    struct pd_client *k = pd_conn_get(c);
    (void)ctx;
    k->drains = k->routes && pd_conn_owed(c);
    if (!k->drains)
        pd_conn_end_input(c);
}

static void on_gone(void *ctx, struct pd_conn *c, const struct pd_err *why)
{
    struct pd_desk *k = ctx;
    struct pd_client *client = pd_conn_get(c);
    (void)why;
    for (struct pd_client **q = &k->held; *q; q = &(*q)->next_held)
        if (*q == client) {
            *q = client->next_held;
            if (!*q)
                k->last_held = q;
            break;
        }
    for (struct pd_desk_run *r = pd_desk_first(k), *next; r; r = next) {
        next = (void *)r->node.next;
        if (r->client != client)
            continue;
        r->client = NULL;
        r->pending.n = r->at = 0;
        if (!r->over || r->kept)
            pd_desk_cancel(k, r, PD_WHY_GONE);
        else
            pd_desk_look(k, r);
    }
    pd_free(client);
}

const struct pd_conn_cb pd_desk_cb = { .opened = on_opened, .record = on_record, .bad = on_bad, .room = on_room, .drain = on_drain, .gone = on_gone };

int pd_desk_on_cancel(struct pd_desk *k, const struct pd_rec *rec, const char **state, struct pd_err *e)
{
    struct pd_bin token;
    struct pd_str name;
    struct pd_desk_run *r;
    int rc = pd_cancel_names(rec, &name, &token, e);
    if (rc < 0 || !(r = pd_desk_find(k, name.p, name.n)))
        return rc;              /* 0: "unknown": it is over, or never was */
    if ((rc = pd_cancel_may(token, r->token, r->has_token, r->name, e)) < 0)
        return rc;
    pd_desk_cancel(k, r, PD_WHY_RECORD);
    *state = "cancelled";
    return 0;
}

/* ---- birth and death ---- */

int pd_desk_new(const struct pd_desk_opts *o, const struct pd_desk_ops *ops, struct pd_desk **out, struct pd_err *e)
{
    pthread_condattr_t a;
    struct pd_desk *k = pd_calloc(1, sizeof *k, "a desk", e);
    if (!k)
        return PD_ENOMEM;
    k->o = *o;
    k->ops = *ops;
    k->max_runs = o->max_runs ? o->max_runs : 4 * o->rt->max_seqs;
    k->last_held = &k->held;
    k->last_call = &k->calls;
    k->last_ready = &k->ready;
    k->post = (struct pd_post){ .fn = deliver, .ctx = k };
    pthread_mutex_init(&k->lock, NULL);
    pthread_condattr_init(&a);
    pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
    pthread_cond_init(&k->more, &a);
    pthread_condattr_destroy(&a);
    *out = k;
    return 0;
}

void pd_desk_on(struct pd_desk *k, struct pd_daemon *d)
{
    static const struct pd_metric_about runs = { .name = "pd_runs_in_hand", .help = "Runs in hand.", .type = PD_GAUGE };
    k->d = d;
    k->l = pd_daemon_loop(d);
    pd_metric_get(pd_daemon_metrics(d), &runs, (const char *const[PD_METRIC_LABELS]){ NULL }, &k->m_runs, &(struct pd_err){ 0 });
}

int pd_desk_start(struct pd_desk *k, struct pd_err *e)
{
    if (pthread_create(&k->thread, NULL, compute, k))
        return pd_fail(e, PD_ENOMEM, "cannot make the compute thread");
    k->running = true;
    return 0;
}

void pd_desk_stop(struct pd_desk *k)
{
    if (!k->running)
        return;
    pthread_mutex_lock(&k->lock);
    k->stop = true;
    pthread_mutex_unlock(&k->lock);
    pthread_cond_signal(&k->more);
    pthread_join(k->thread, NULL);
    k->running = false;
}

void pd_desk_free(struct pd_desk *k)
{
    if (!k)
        return;
    pd_desk_stop(k);
    for (struct pd_conn *c = k->d ? pd_daemon_conns(k->d)->first : NULL, *next; c; c = next) {
        next = pd_conn_next(c);
        if (pd_conn_handler(c) == &pd_desk_cb) {
            pd_free(pd_conn_get(c));
            pd_conn_free(c);
        }
    }
    for (struct pd_desk_run *r; (r = pd_desk_first(k));) {
        pd_keyed_remove(&k->runs, r);
        run_free(k, r);
    }
    pd_keyed_free(&k->runs);
    pd_seen_free(&k->seen);
    pthread_mutex_destroy(&k->lock);
    pthread_cond_destroy(&k->more);
    pd_free(k);
}
