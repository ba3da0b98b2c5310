#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../engine/describe.h"
#include "../wire/value.h"
#include "desk.h"
#include "giver.h"
#include "link.h"
#include "register.h"

enum { TELL_BYTES = 1 << 20 /* of KV that became final before the loop is woken for it */ };
enum { REACH_US = 2000000 /* to reach a decode worker */, AGAIN_US = 20000, AGAIN_MOST_US = 500000, ACCEPT_US = 20000000 /* it may wait for blocks */ };

/* A decode worker, by its address. */
struct peer {
    struct giver *g;
    struct peer *next;
    char at[300];               /* "unix:PATH", "tcp:HOST:PORT" */
    struct pd_link *link;       /* NULL: not connected */
    bool open;                  /* hellos agree */
    struct pd_timer *again;
    int64_t again_us, failing_since;    /* 0: not */
    uint32_t n_runs;
};

struct give {
    struct pd_desk_run d;
    struct giver *g;
    /* the loop's */
    struct peer *peer;
    uint8_t op[16], lease[PD_LEASE_ID_LEN];
    struct pd_move *move;       /* on its way, */
    struct pd_link *link;       /* over this */
    bool moved_on;              /* it is that of an attempt before this one */
    uint64_t sum;               /* of the request less what an attempt changes */
    /* published: it is computed; kv_told: the client has its kv; settled: the decode worker has its KV; failed: its error was put */
    bool leased, lease_over, published, kv_told, settled, failed, dropping;
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
    uint64_t untold;            /* bytes of those that the loop was not woken for */
    uint32_t *told;             /* [layers], the loop's: of them, what the move knows */
    _Atomic bool at_batch, described, started, finished;
};

struct giver {
    struct pd_runtime *rt;
    struct pd_giver_opts o;
    struct pd_daemon *d;
    struct pd_desk *desk;
    struct pd_links links;
    struct pd_leases *leases;
    struct pd_register *reg;
    struct peer *peers;
    size_t max_record;
    struct pd_post tidy, stuck;
    bool tidying;
    _Atomic bool is_stuck;
    /* the thread's */
    struct pd_batch *batch;
    _Atomic uint64_t prompt_left;       /* after the last step */
    _Atomic uint32_t waiting;
    /* counted by both */
    struct pd_metric *m_rows, *m_cached, *m_steps, *m_seqs, *m_blocks[3], *m_ends[4], *m_lease[7], *m_live, *m_leased, *m_moves, *m_given[2], *m_given_bytes, *m_given_us,
        *m_not_given, *m_links, *m_tokens;
};

static void try_give(struct giver *g, struct give *r);
static void reach(struct peer *p);

/* ---- the thread ---- */

static void step_of(struct giver *g, const struct give *r, enum pd_state_id state, uint64_t bytes, const char *cause, const uint8_t *lease)
{
    struct pd_step s = { .run = r->d.name, .where = "remote", .gen = atomic_load(&r->described) ? r->desc.gen : NULL, .op = r->d.route.op, .lease = lease };
    pd_run_step(g->o.trace, &s, state, bytes, cause);
}

static int describe(struct giver *g, struct give *r, struct pd_err *e)
{
    struct pd_kvdesc *d = &r->desc;
    int rc = pd_gen_new(d->gen, e);
    if (rc)
        return rc;
    pd_describe(g->rt, &r->in, d);
    d->request.route = d->request.cancel_token = (struct pd_bin){ NULL, 0 };
    rc = pd_describe_plan(g->rt, d, &r->plan, e);
    rc = rc ? rc : pd_describe_check(d, g->max_record, e);
    if (rc)
        return rc;
    struct pd_arena *a = &r->in.mem;
    if (!(r->first = pd_arena_alloc(a, (size_t)r->in.req.n, sizeof *r->first, e)) || !(r->blocks = pd_arena_alloc(a, r->plan.n_blocks, sizeof *r->blocks, e)) ||
        !(r->done = pd_arena_alloc(a, r->plan.layers, sizeof *r->done, e)) || !(r->told = pd_arena_alloc(a, r->plan.layers, sizeof *r->told, e)))
        return PD_ENOMEM;
    atomic_store(&r->described, true);
    return 0;
}

static void finish(struct giver *g, struct give *r)
{
    atomic_store(&r->finished, true);
    pd_desk_touch(g->desk, &r->d);
}

static void take(void *ctx)
{
    struct give *r = ctx;
    struct giver *g = r->g;
    struct pd_err e;
    atomic_store(&r->at_batch, true);
    if (atomic_load(&r->d.cancelled))
        return;
    int rc = pd_intake_tokens(g->rt, &r->in, &e);
    rc = rc ? rc : describe(g, r, &e);
    struct pd_job j = { .req = &r->in.req, .prompt = r->in.tokens, .n_prompt = r->in.n_tokens, .user = r, .prefill_only = true,
                        .spent_us = pd_mono_us() - r->in.t_accept, .waited_us = r->d.route.waited_us };
    rc = rc ? rc : pd_batch_submit(g->batch, &j, &r->run, &e);
    if (rc < 0) {
        r->why = e;
        finish(g, r);
    }
}

static void drop(void *ctx)
{
    struct give *r = ctx;
    struct giver *g = r->g;
    if (r->run)
        pd_run_drop(g->batch, r->run);
    r->run = NULL;
    pd_desk_over(g->desk, &r->d);
}

static void on_started(void *ctx, struct pd_run *run)
{
    struct giver *g = ctx;
    struct give *r = run->user;
    if (!atomic_load(&r->d.cancelled))          /* it has ended in the trace then */
        step_of(g, r, PD_ST_PREFILL_STARTED, 0, NULL, NULL);
    memcpy(r->blocks, pd_seq_blocks(&run->seq[0]), r->plan.n_blocks * sizeof *r->blocks);
    atomic_store(&r->started, true);
    pd_desk_touch(g->desk, &r->d);
    pd_desk_flush(g->desk);     /* its lease and offer are on their way while it is computed */
}

static void on_layer(void *ctx, struct pd_run *run, int layer, uint32_t n)
{
    struct giver *g = ctx;
    struct give *r = run->user;
    uint32_t range = r->plan.chunk_blocks * r->desc.layout.block_size, done = n == r->desc.n_tokens ? r->plan.n_ranges : n / range;
    uint32_t new = done - atomic_load(&r->done[layer]);
    if (new) {
        atomic_store(&r->done[layer], done);
        r->untold += new * r->plan.chunk_bytes;
        pd_desk_touch(g->desk, &r->d);
    }
    /* Each time that the loops of both workers wake, compute threads stand aside; and what remains after the last layer's attention hides the last of it. */
    if (r->untold >= TELL_BYTES || (r->untold && (uint32_t)layer + 1 == r->plan.layers)) {
        r->untold = 0;
        pd_desk_flush(g->desk);
    }
}

static bool on_token(void *ctx, struct pd_seq *s, uint32_t pos, const struct pd_sampled *t)
{
    struct give *r = s->run->user;
    struct pd_first *f = &r->first[s->choice];
    (void)ctx;
    (void)pos;
    f->token = t->token;
    f->logprob = t->logprob;
    if (t->n_top && (f->top = pd_arena_dup(&r->in.mem, t->top, t->n_top * sizeof *t->top, NULL)))
        f->n_top = t->n_top;
    return false;
}

static void on_finished(void *ctx, struct pd_seq *s, const char *reason, const struct pd_err *why)
{
    struct giver *g = ctx;
    struct give *r = s->run->user;
    struct pd_err e;
    (void)reason;
    if (why && !r->why.code)
        r->why = *why;
    if (s->run->n_open)
        return;
    r->run = s->run;
    struct pd_kvdesc unused = { .offer = false };       /* the loop may be reading the run's own */
    if (!r->why.code && pd_describe_times(&unused, s->run, r->in.t_accept, &r->t, &e) < 0)
        r->why = e;
    if (!r->why.code && !atomic_load(&r->d.cancelled))
        step_of(g, r, PD_ST_PREFILL_COMPLETED, 0, NULL, NULL);
    finish(g, r);
}

static void spare(void *ctx) { pd_pool_ahead(((struct giver *)ctx)->rt->pool); }
static bool is_busy(void *ctx) { return pd_batch_busy(((struct giver *)ctx)->batch); }

static bool turn(void *ctx)
{
    struct giver *g = ctx;
    struct pd_err e;
    int rows = pd_batch_step(g->batch, &e);
    if (rows < 0)
        pd_error("all runs in hand fail: %s", e.msg);
    if (rows || !pd_batch_busy(g->batch))
        return true;
    if (!pd_pool_stats(g->rt->pool).used) {     /* nobody holds blocks, and still none can be had */
        pd_batch_fail_oldest(g->batch);
        return true;
    }
    if (!atomic_exchange(&g->is_stuck, true))
        pd_loop_post(pd_daemon_loop(g->d), &g->stuck);
    return false;
}

static void tell_load(void *ctx)
{
    struct giver *g = ctx;
    struct pd_batch_stats b = pd_batch_stats(g->batch);
    struct pd_pool_stats p = pd_pool_stats(g->rt->pool);
    atomic_store(&g->prompt_left, b.prompt_left);
    atomic_store(&g->waiting, b.waiting);
    pd_metric_set(g->m_seqs, b.seqs);
    pd_metric_set(g->m_rows, (int64_t)(b.prompt_rows + b.decode_rows));
    pd_metric_set(g->m_steps, (int64_t)b.steps);
    pd_metric_set(g->m_blocks[0], p.used);
    pd_metric_set(g->m_cached, (int64_t)b.cached_rows);
    pd_metric_set(g->m_blocks[1], (int64_t)p.max - p.used - p.cached);
    pd_metric_set(g->m_blocks[2], p.cached);
}

/* ---- the loop: answers ---- */

static void end_lease(struct giver *g, struct give *r, const char *cause)
{
    if (!r->leased)
        return;
    pd_lease_revoke(g->leases, r->lease, cause, pd_mono_us(), NULL);
    pd_links_soon(&g->links);
}

static void let_go(struct giver *g, struct give *r)
{
    if (r->dropping)
        return;
    r->dropping = true;
    pd_desk_call(g->desk, &r->d, &r->c_drop, drop, r);
}

static void settle(struct giver *g, struct give *r)
{
    r->d.kept = r->leased || r->move;
    pd_desk_look(g->desk, &r->d);
}

static void put_error(struct giver *g, struct give *r, const struct pd_err *why, const char *action)
{
    struct pd_buf b = { 0 };
    struct pd_request name = { .n = 1 };
    memcpy(name.run, r->d.name, sizeof name.run);
    if (pd_refusal_error(&name, why, action, &b, NULL) == 0)
        pd_desk_put(g->desk, &r->d, &b);
    pd_buf_free(&b);
}

/* The run fails, before its kv was told. */
static void fail(struct giver *g, struct give *r, const struct pd_err *why, const char *action)
{
    if (r->failed || r->kv_told)
        return;
    r->failed = true;
    pd_error("run %s: %s", r->d.name, why->msg);
    step_of(g, r, why->code == PD_ECANCEL ? PD_ST_CANCELLED : PD_ST_FAILED, 0, why->msg, NULL);
    pd_metric_add(g->m_ends[why->code == PD_ECANCEL ? 2 : 1], 1);
    put_error(g, r, why, action);
    end_lease(g, r, "the run failed");
    let_go(g, r);
}

/* The decode worker has no KV of it, and does not know. It is kept for a while, for another to take up. */
static void not_given(struct giver *g, struct give *r, const struct pd_err *why)
{
    if (r->settled || r->failed || r->no_d.code || atomic_load(&r->d.cancelled))
        return;
    if (!r->kv_told) {
        fail(g, r, why, "retry");
        return;
    }
    r->no_d = *why;
    pd_metric_add(g->m_not_given, 1);
    pd_warn("run %s: %s", r->d.name, why->msg);
    put_error(g, r, why, "retry");
}

/* The descriptor as it is for this attempt. */
static struct pd_kvdesc desc_of(const struct give *r)
{
    struct pd_kvdesc d = r->desc;
    memcpy(d.op, r->op, sizeof d.op);
    if (atomic_load(&r->finished)) {
        d.first = r->first;
        d.n_first = (uint32_t)d.request.n;
        d.t = (struct pd_bin){ r->t.p, r->t.n };
    }
    return d;
}

/* The client's answer, once the KV is there and its decode worker has it offered. */
static void put_kv(struct giver *g, struct give *r)
{
    struct pd_buf b = { 0 };
    struct pd_kvdesc kv = desc_of(r);
    struct pd_err e;
    kv.payload = (struct pd_payload){ .bytes = 0 };
    kv.lease = (struct pd_bin){ NULL, 0 };
    if (pd_kvdesc_encode(&kv, &b, &e) < 0)
        fail(g, r, &e, "abort");
    else {
        pd_desk_put(g->desk, &r->d, &b);
        r->kv_told = true;
    }
    pd_buf_free(&b);
}

/* Offered and computed: the move closes, and the client is told. */
static void close_move(struct giver *g, struct give *r)
{
    struct pd_kvdesc d = desc_of(r);
    struct pd_err e;
    if (pd_give_finish(r->move, &d, &e) < 0) {
        if (e.code != PD_ECANCEL)       /* else its last event is coming */
            not_given(g, r, &e);
        return;
    }
    pd_link_soon(r->peer->link);
    put_kv(g, r);
}

static void publish(struct giver *g, struct give *r)
{
    struct pd_err e;
    int rc = r->leased ? pd_lease_publish(g->leases, r->lease, &e) : pd_fail(&e, PD_ETIME, "its lease ended while it was being computed");
    if (rc < 0) {
        fail(g, r, &e, "retry");
        return;
    }
    step_of(g, r, PD_ST_KV_PUBLISHED, r->plan.bytes, NULL, r->lease);       /* before the kv leaves: what decode does next comes after it in the log */
    r->published = true;
    pd_metric_add(g->m_ends[0], 1);
    pd_metric_add(g->m_tokens, r->desc.n_tokens);
    let_go(g, r);
    if (r->move)
        close_move(g, r);
    else
        try_give(g, r);
}

/* ---- the loop: giving ---- */

static void ready_chunks(struct give *r)
{
    for (uint32_t l = 0; r->move && l < r->plan.layers; l++)
        for (uint32_t done = atomic_load(&r->done[l]); r->told[l] < done; r->told[l]++)
            pd_give_ready(r->move, r->told[l] * r->plan.layers + l, 1);
}

/* An earlier attempt at this run is still ending on that connection. */
static bool name_is_busy(const struct giver *g, const struct give *r)
{
    for (struct give *o = (void *)pd_desk_first(g->desk); o; o = (void *)o->d.node.next)
        if (o != r && o->move && o->link == r->peer->link && !strcmp(o->d.name, r->d.name))
            return true;
    return false;
}

static void try_give(struct giver *g, struct give *r)
{
    struct pd_err e;
    if (!r->leased || r->move || r->settled || r->failed || r->no_d.code || !r->peer->open || atomic_load(&r->d.cancelled) || name_is_busy(g, r))
        return;
    struct pd_kvdesc d = desc_of(r);
    struct pd_give give = { .desc = &d, .blocks = r->blocks, .chunk_blocks = r->plan.chunk_blocks, .via = pd_link_via(r->peer->link) };
    memcpy(give.lease, r->lease, sizeof give.lease);
    step_of(g, r, PD_ST_KV_TRANSFER_STARTED, 0, NULL, r->lease);
    int rc = pd_give(pd_link_xfer(r->peer->link), &give, pd_mono_us(), &r->move, &e);
    if (rc < 0) {
        r->move = NULL;
        not_given(g, r, &e);
        return;
    }
    r->link = r->peer->link;
    pd_move_set(r->move, r);
    pd_metric_add(g->m_moves, 1);
    memset(r->told, 0, r->plan.layers * sizeof *r->told);
    ready_chunks(r);
    if (r->published)
        close_move(g, r);
    pd_link_soon(r->link);
}

/* The first step has its blocks: they are leased from here on. */
static void lease(struct giver *g, struct give *r)
{
    struct pd_err e;
    int rc = pd_lease_grant(g->leases, r->d.name, r->desc.gen, r->blocks, r->plan.n_blocks, g->o.lease_us, pd_mono_us(), r->lease, &e);
    if (rc < 0) {
        fail(g, r, &e, "retry");
        return;
    }
    r->leased = r->d.kept = true;
    pd_lease_fill(g->leases, r->lease, NULL);
    try_give(g, r);
}

static void on_news(void *ctx, struct pd_desk_run *dr)
{
    struct giver *g = ctx;
    struct give *r = (struct give *)dr;
    bool finished = atomic_load(&r->finished);
    if (r->dropping)
        return;
    if (atomic_load(&r->started) && !r->leased && !r->lease_over && !r->failed && !(finished && r->why.code))
        lease(g, r);
    if (r->move) {
        ready_chunks(r);
        pd_link_soon(r->link);
    }
    if (finished && r->why.code)
        fail(g, r, &r->why, "abort");
    else if (finished && !r->failed)
        publish(g, r);
}

/* Its last event. */
static void move_over(struct giver *g, struct give *r, struct pd_link *k, const struct pd_xfer_event *ev)
{
    bool lost = !pd_xfer_open(pd_link_xfer(k)), moved_on = r->moved_on;
    struct pd_err why = ev->err;
    r->move = NULL;
    r->link = NULL;
    r->moved_on = false;
    pd_metric_add(g->m_moves, -1);
    if (ev->kind == PD_XE_CANCELLED)
        step_of(g, r, PD_ST_CANCEL_ACKED, 0, ev->err.msg, r->lease);
    if (moved_on)
        try_give(g, r);
    else if (ev->kind == PD_XE_RELEASED || r->settled)
        end_lease(g, r, "the decode worker has it");
    else if (lost) {
        pd_err_prefix(&why, "its KV did not reach the decode worker");
        not_given(g, r, &why);
    } else if (!r->kv_told && !atomic_load(&r->d.cancelled)) {
        pd_err_prefix(&why, "its KV is not wanted");
        fail(g, r, &why, "recompute");
    } else
        end_lease(g, r, "the decode worker does not want it");
    struct give *heir = (struct give *)pd_desk_find(g->desk, r->d.name, PD_RUN_LEN);
    if (heir && heir != r)
        try_give(g, heir);
    settle(g, r);
}

/* ---- the loop: decode workers ---- */

static bool waits(const struct give *r, const struct peer *p)
{
    return r->peer == p && !r->move && !r->settled && !r->failed && !r->no_d.code && !atomic_load(&r->d.cancelled) && !(r->published && !r->leased);
}

static void fail_waiting(struct peer *p, const struct pd_err *why)
{
    for (struct give *r = (void *)pd_desk_first(p->g->desk), *next; r; r = next) {
        next = (void *)r->d.node.next;
        if (waits(r, p))
            not_given(p->g, r, why);
    }
}

static void peer_drop(struct peer *p)
{
    if (p->n_runs || p->link)
        return;
    struct peer **q = &p->g->peers;
    while (*q != p)
        q = &(*q)->next;
    *q = p->next;
    pd_timer_free(p->again);
    pd_free(p);
}

static bool anyone_waits(const struct peer *p)
{
    for (struct give *r = (void *)pd_desk_first(p->g->desk); r; r = (void *)r->d.node.next)
        if (waits(r, p))
            return true;
    return false;
}

/* It did not work out, for now. */
static void failed_to_reach(struct peer *p, const struct pd_err *why)
{
    int64_t now = pd_mono_us();
    struct pd_err e = *why;
    if (!p->failing_since) {
        p->failing_since = now;
        p->again_us = AGAIN_US;
    }
    bool final = why->code == PD_EINCOMPAT || why->code == PD_ECORRUPT || now - p->failing_since >= REACH_US;
    if (!final && anyone_waits(p) && !pd_timer_in(p->again, p->again_us, &e)) {
        p->again_us = p->again_us * 2 < AGAIN_MOST_US ? p->again_us * 2 : AGAIN_MOST_US;
        return;
    }
    p->failing_since = 0;
    struct pd_err told = { .code = why->code == PD_ECANCEL ? PD_ENOWORKER : why->code };
    snprintf(told.msg, sizeof told.msg, "the decode worker at %.120s cannot be given its KV: %.300s", p->at, e.msg);
    p->n_runs++;                /* whatever ends with this */
    fail_waiting(p, &told);
    p->n_runs--;
    peer_drop(p);
}

static void reach(struct peer *p)
{
    struct pd_err e;
    if (p->link)
        return;
    pd_timer_stop(p->again);
    if (pd_links_dial(&p->g->links, p->at, p, &p->link, &e) < 0) {
        p->link = NULL;
        failed_to_reach(p, &e);
    }
}

static void on_again(void *ctx) { reach(ctx); }

static int peer_of(struct giver *g, struct pd_str at, struct peer **out, struct pd_err *e)
{
    if (at.n <= 5 || (memcmp(at.p, "unix:", 5) && memcmp(at.p, "tcp:", 4)) || at.n >= sizeof ((struct peer *)0)->at)
        return pd_fail(e, PD_EFAIL, "route: d is at '%.*s', where KV cannot be given (an address is unix:PATH or tcp:HOST:PORT)", (int)(at.n < 60 ? at.n : 60), at.p);
    for (struct peer *p = g->peers; p; p = p->next)
        if (pd_str_eq(at, p->at)) {
            *out = p;
            return 0;
        }
    struct peer *p = pd_calloc(1, sizeof *p, "a decode worker", e);
    if (!p)
        return PD_ENOMEM;
    p->g = g;
    memcpy(p->at, at.p, at.n);
    int rc = pd_timer_new(pd_daemon_loop(g->d), on_again, p, &p->again, e);
    if (rc < 0) {
        pd_free(p);
        return rc;
    }
    p->next = g->peers;
    g->peers = p;
    *out = p;
    return 0;
}

static void for_all_of(struct peer *p, void (*fn)(struct giver *, struct give *))
{
    for (struct give *r = (void *)pd_desk_first(p->g->desk), *next; r; r = next) {
        next = (void *)r->d.node.next;
        if (r->peer == p)
            fn(p->g, r);
    }
}

static void on_link_event(void *ctx, struct pd_link *k, const struct pd_xfer_event *ev)
{
    struct giver *g = ctx;
    struct peer *p = pd_link_get(k);
    struct give *r = ev->move ? pd_move_get(ev->move) : NULL;
    if (ev->move && !r)         /* of an attempt that was given up */
        return;
    switch (ev->kind) {
    case PD_XE_READY:
        if (ev->err.code)
            pd_warn("%s: %s: output may differ in the last bits", p->at, ev->err.msg);
        pd_info("%s: connected, by %s", p->at, pd_xfer_via(pd_link_xfer(k)));
        p->open = true;
        p->failing_since = 0;
        for_all_of(p, try_give);
        break;
    case PD_XE_VERIFIED:
        r->settled = !r->moved_on;
        pd_metric_add(g->m_given[!strcmp(pd_move_scheme(ev->move), "shm")], 1);
        pd_metric_add(g->m_given_bytes, (int64_t)ev->bytes);
        break;
    case PD_XE_RELEASED: case PD_XE_FAILED: case PD_XE_CANCELLED:
        move_over(g, r, k, ev);
        break;
    case PD_XE_CLOSED:
        p->link = NULL;
        p->open = false;
        if (anyone_waits(p))
            failed_to_reach(p, &ev->err);
        else
            peer_drop(p);
        break;
    default:
        break;
    }
}

/* ---- the loop: requests ---- */

/* Of a request, less what one attempt at it may have otherwise than another. */
static int sum_of(const struct pd_request *q, uint64_t *sum, struct pd_err *e)
{
    struct pd_request c = *q;
    struct pd_buf b = { 0 };
    c.route = c.cancel_token = c.timeouts_ms = c.slo = (struct pd_bin){ NULL, 0 };
    c.extra = (struct pd_extra){ NULL, 0, 0 };
    c.has &= ~(uint32_t)(PD_RQ_DEADLINE | PD_RQ_ARRIVAL | PD_RQ_PRIORITY);
    int rc = pd_request_encode(&c, &b, e);
    if (!rc)
        *sum = pd_xxh3(b.p, b.n, 0);
    pd_buf_free(&b);
    return rc;
}

static int admit(void *ctx, struct pd_desk_run *dr, struct pd_err *e)
{
    struct giver *g = ctx;
    struct give *r = (struct give *)dr;
    if (!dr->routed || !dr->route.d.at.p)
        return pd_fail(e, PD_EFAIL, "request: this worker only prefills; a request needs a route that says where its KV goes (send it to pd-route)");
    r->g = g;
    int rc = sum_of(&dr->in.req, &r->sum, e);
    rc = rc ? rc : peer_of(g, dr->route.d.at, &r->peer, e);
    if (rc < 0)
        return rc;
    r->peer->n_runs++;
    memcpy(r->op, dr->route.op, sizeof r->op);
    r->in = dr->in;
    dr->in = (struct pd_intake){ 0 };
    struct pd_step s = { .run = dr->name, .where = "remote", .op = r->op };
    pd_run_step(g->o.trace, &s, PD_ST_ACCEPTED, 0, NULL);
    pd_desk_call(g->desk, &r->d, &r->c_take, take, r);
    reach(r->peer);             /* while it is computed */
    return 0;
}

static bool again(void *ctx, struct pd_desk_run *dr, struct pd_client *from, const struct pd_intake *in, const struct pd_routing *route)
{
    struct giver *g = ctx;
    struct give *r = (struct give *)dr;
    struct peer *p = NULL;
    struct pd_err e;
    uint64_t sum;
    if (r->failed || atomic_load(&dr->cancelled) || (r->published && !r->leased))
        return false;
    int rc = route->d.at.p ? sum_of(&in->req, &sum, &e) : pd_fail(&e, PD_EFAIL, "request: its route does not say where its KV goes");
    rc = rc ? rc : peer_of(g, route->d.at, &p, &e);
    if (rc < 0) {
        pd_desk_refuse(g->desk, from, &in->req, &e, "abort");
        return true;
    }
    if (sum != r->sum) {        /* one name, another run */
        peer_drop(p);
        pd_desk_cancel(g->desk, dr, PD_WHY_RECORD);
        return false;
    }
    bool new = p != r->peer || memcmp(route->op, r->op, sizeof r->op);
    p->n_runs++;
    r->peer->n_runs--;
    if (p != r->peer)
        peer_drop(r->peer);
    r->peer = p;
    memcpy(r->op, route->op, sizeof r->op);
    pd_desk_move(g->desk, dr, from);
    if (new)
        r->settled = r->kv_told = false;
    if (new && r->move && r->link != p->link) {         /* the old attempt's: it ends by itself, beside the new one */
        pd_move_set(r->move, NULL);
        pd_metric_add(g->m_moves, -1);
        r->move = NULL;
        r->link = NULL;
    }
    r->moved_on = new && r->move;
    r->no_d = (struct pd_err){ 0 };
    if (r->kv_told)
        put_kv(g, r);
    reach(p);
    try_give(g, r);
    settle(g, r);
    return true;
}

static void on_cancel_run(void *ctx, struct pd_desk_run *dr)
{
    struct giver *g = ctx;
    struct give *r = (struct give *)dr;
    struct pd_err why;
    const char *text = pd_why_text((enum pd_why)atomic_load(&dr->cancelled));
    pd_fail(&why, PD_ECANCEL, "%s", text);
    if (!r->kv_told && !r->failed)
        fail(g, r, &why, "abort");
    else {
        step_of(g, r, PD_ST_CANCELLED, 0, text, NULL);
        end_lease(g, r, text);
    }
}

static void on_freed(void *ctx, struct pd_desk_run *dr)
{
    struct give *r = (struct give *)dr;
    (void)ctx;
    if (r->peer) {
        r->peer->n_runs--;
        peer_drop(r->peer);
    }
    pd_intake_free(&r->in);
    pd_buf_free(&r->t);
}

static void refuse(void *ctx, const struct pd_request *q, const struct pd_err *why, const char *action, struct pd_buf *b)
{
    struct giver *g = ctx;
    pd_refusal_log(q, why);
    pd_metric_add(g->m_ends[3], 1);
    pd_refusal_error(q, why, action, b, NULL);
}

/* ---- the loop: leases ---- */

static void on_lease(void *ctx, enum pd_lease_step step, const struct pd_lease_info *l)
{
    static const enum pd_state_id state[] = { PD_ST_LEASE_GRANTED, PD_ST_LEASE_READ, PD_ST_LEASE_RENEWED, PD_ST_LEASE_RELEASED, PD_ST_LEASE_EXPIRED,
                                              PD_ST_LEASE_REVOKED, PD_ST_REAPED };
    struct giver *g = ctx;
    struct give *r = (struct give *)pd_desk_find(g->desk, l->run, PD_RUN_LEN);
    if (step != PD_LEASE_STEP_GRANTED && !(r && !memcmp(r->lease, l->id, sizeof r->lease)))         /* one that gave up its name */
        for (r = (void *)pd_desk_first(g->desk); r && memcmp(r->lease, l->id, sizeof r->lease);)
            r = (void *)r->d.node.next;
    pd_metric_add(g->m_lease[step], 1);
    struct pd_step s = { .run = l->run, .gen = l->gen, .lease = l->id, .where = "remote", .op = r ? r->d.route.op : NULL };
    pd_trace_step(g->o.trace, &s, state[step], 0, l->cause);
    if (step != PD_LEASE_STEP_RELEASED && step != PD_LEASE_STEP_EXPIRED && step != PD_LEASE_STEP_REVOKED)
        return;
    if (r && r->leased && !memcmp(r->lease, l->id, sizeof r->lease)) {
        r->leased = false;
        r->lease_over = true;
    }
    if (!g->tidying) {
        g->tidying = true;
        pd_loop_defer(pd_daemon_loop(g->d), &g->tidy);
    }
}

/* What the end of leases means for their runs; and blocks are free again. */
static void on_tidy(void *ctx)
{
    struct giver *g = ctx;
    struct pd_err e;
    g->tidying = false;
    for (struct give *r = (void *)pd_desk_first(g->desk), *next; r; r = next) {
        next = (void *)r->d.node.next;
        if (!r->lease_over || r->leased)
            continue;
        if (r->published && !r->settled && !r->failed && !r->no_d.code && !r->move) {
            pd_fail(&e, PD_ETIME, "its lease ended before a decode worker had its KV");
            not_given(g, r, &e);
        } else if (!r->published && !r->failed) {
            pd_fail(&e, PD_ETIME, "its lease ended while it was being computed");
            fail(g, r, &e, "retry");
        }
        settle(g, r);
    }
    pd_links_soon(&g->links);
}

static void on_beat(void *ctx)
{
    struct giver *g = ctx;
    int64_t now = pd_mono_us();
    pd_register_beat(g->reg);
    pd_leases_sweep(g->leases, now);
    pd_leases_reconcile(g->leases, NULL, now);
    for (struct give *r = (void *)pd_desk_first(g->desk); r; r = (void *)r->d.node.next)       /* a lease lives while its run is computed */
        if (r->leased && !r->published)
            pd_lease_renew(g->leases, r->lease, r->desc.gen, 0, now, NULL);
    pd_links_soon(&g->links);
}

/* New runs find no blocks: what nobody reads is given up. */
static void on_stuck(void *ctx)
{
    struct giver *g = ctx;
    for (struct give *r = (void *)pd_desk_first(g->desk); r; r = (void *)r->d.node.next)
        if (r->leased && !r->move && r->no_d.code)
            end_lease(g, r, "its blocks were needed");
    atomic_store(&g->is_stuck, false);
}

/* ---- the daemon ---- */

static bool daemon_busy(void *ctx) { return pd_desk_runs(((struct giver *)ctx)->desk) > 0; }

static int on_cancel(void *ctx, const struct pd_rec *rec, const char **state, struct pd_err *e)
{
    return pd_desk_on_cancel(((struct giver *)ctx)->desk, rec, state, e);
}

static void ledger(void *ctx, void (*put)(void *to, const char *key, int64_t value), void *to)
{
    struct giver *g = ctx;
    struct pd_lease_counts n = pd_leases_counts(g->leases);
    struct pd_pool_stats p = pd_pool_stats(g->rt->pool);
    put(to, "runs", pd_desk_runs(g->desk));
    put(to, "runs_most", pd_desk_max(g->desk));
    put(to, "sequences", pd_metric_value(g->m_seqs));
    put(to, "blocks_used", p.used);
    put(to, "blocks_free", (int64_t)p.max - p.used - p.cached);
    put(to, "blocks_cached", p.cached);
    put(to, "rows_cached", pd_metric_value(g->m_cached));
    put(to, "blocks_leased", (int64_t)n.live_blocks);
    put(to, "steps", pd_metric_value(g->m_steps));
    put(to, "leases_live", n.live);
    put(to, "leases_granted", (int64_t)n.granted);
    put(to, "leases_released", (int64_t)n.released);
    put(to, "leases_expired", (int64_t)n.expired);
    put(to, "leases_revoked", (int64_t)n.revoked);
    put(to, "leases_reaped", (int64_t)n.reaped);
    put(to, "links", g->links.n);
    put(to, "moves", pd_metric_value(g->m_moves));
    put(to, "given_inline", pd_metric_value(g->m_given[0]));
    put(to, "given_shm", pd_metric_value(g->m_given[1]));
    put(to, "given_bytes", pd_metric_value(g->m_given_bytes));
    put(to, "not_given", pd_metric_value(g->m_not_given));
    put(to, "published", pd_metric_value(g->m_ends[0]));
    put(to, "failed", pd_metric_value(g->m_ends[1]) + pd_metric_value(g->m_ends[3]));
    put(to, "cancelled", pd_metric_value(g->m_ends[2]));
}

/* What a heartbeat says; see worker.c. */
static void load(void *ctx, struct pd_load *l)
{
    struct giver *g = ctx;
    *l = (struct pd_load){ .runs = pd_desk_runs(g->desk), .seqs = (uint32_t)pd_metric_value(g->m_seqs), .waiting = atomic_load(&g->waiting),
                           .blocks_used = pd_pool_stats(g->rt->pool).used, .blocks_leased = (uint32_t)pd_leases_counts(g->leases).live_blocks,
                           .prefill_tokens_ahead = atomic_load(&g->prompt_left) };
    for (struct give *r = (void *)pd_desk_first(g->desk); r; r = (void *)r->d.node.next)
        if (!atomic_load(&r->at_batch)) {
            l->waiting++;
            l->prefill_tokens_ahead += r->in.req.n_token_ids;
        }
}

static int on_follow(void *ctx, struct pd_conn *c, const struct pd_rec *rec, struct pd_err *e)
{
    return pd_register_follow(((struct giver *)ctx)->reg, c, rec, e);
}

static void on_drain(void *ctx)
{
    struct giver *g = ctx;
    pd_trace_process(g->o.trace, PD_ST_DRAINING);
    pd_register_beat(g->reg);
}

static void look_up(void *ctx)
{
    struct giver *g = ctx;
    struct pd_lease_counts n = pd_leases_counts(g->leases);
    pd_metric_set(g->m_live, n.live);
    pd_metric_set(g->m_leased, (int64_t)n.live_blocks);
    pd_metric_set(g->m_links, g->links.n);
}

static int make_metrics(struct giver *g, struct pd_err *e)
{
#define COUNTER(n, h, ...) { .name = n, .help = h, .type = PD_COUNTER, __VA_ARGS__ }
#define GAUGE(n, h, ...) { .name = n, .help = h, .type = PD_GAUGE, __VA_ARGS__ }
    const struct pd_metric_about seqs = GAUGE("pd_sequences", "Sequences in the batch, waiting ones too."),
        blocks = GAUGE("pd_kv_blocks", "KV blocks of the pool.", .label = { "state" }), rows = COUNTER("pd_rows_total", "Rows computed.", .label = { "phase" }),
        cached = COUNTER("pd_cached_rows_total", "Rows not computed, as their KV was in the prefix cache."),
        steps = COUNTER("pd_steps_total", "Steps of the batch."), ends = COUNTER("pd_runs_total", "Runs, by how they ended.", .label = { "end" }),
        tokens = COUNTER("pd_prompt_tokens_total", "Prompt tokens of published runs."), live = GAUGE("pd_leases", "Leases that live."),
        leased = GAUGE("pd_kv_blocks_leased", "KV blocks under a lease."), lease = COUNTER("pd_lease_steps_total", "Steps of leases.", .label = { "step" }),
        moves = GAUGE("pd_moves", "KV hand-overs on their way."), given = COUNTER("pd_given_total", "KV that a decode worker verified.", .label = { "scheme" }),
        bytes = COUNTER("pd_given_bytes_total", "Bytes of KV that decode workers verified."),
        not_given = COUNTER("pd_not_given_total", "Published KV that did not reach its decode worker."), links = GAUGE("pd_links", "Transfer connections.");
    const struct { const struct pd_metric_about *about; struct pd_metric **to; const char *label; } t[] = {
        { &seqs, &g->m_seqs, NULL }, { &blocks, &g->m_blocks[0], "used" }, { &blocks, &g->m_blocks[1], "free" }, { &blocks, &g->m_blocks[2], "cached" }, { &cached, &g->m_cached, NULL },
        { &rows, &g->m_rows, "prompt" },
        { &steps, &g->m_steps, NULL }, { &ends, &g->m_ends[0], "published" }, { &ends, &g->m_ends[1], "failed" }, { &ends, &g->m_ends[2], "cancelled" },
        { &ends, &g->m_ends[3], "refused" }, { &tokens, &g->m_tokens, NULL }, { &live, &g->m_live, NULL }, { &leased, &g->m_leased, NULL },
        { &lease, &g->m_lease[0], "granted" }, { &lease, &g->m_lease[1], "read" }, { &lease, &g->m_lease[2], "renewed" },
        { &lease, &g->m_lease[3], "released" }, { &lease, &g->m_lease[4], "expired" }, { &lease, &g->m_lease[5], "revoked" },
        { &lease, &g->m_lease[6], "reaped" }, { &moves, &g->m_moves, NULL }, { &given, &g->m_given[0], "inline" }, { &given, &g->m_given[1], "shm" },
        { &bytes, &g->m_given_bytes, NULL }, { &not_given, &g->m_not_given, NULL }, { &links, &g->m_links, NULL } };
#undef COUNTER
#undef GAUGE
    int rc = 0;
    for (size_t i = 0; !rc && i < sizeof t / sizeof *t; i++)
        rc = pd_metric_get(pd_daemon_metrics(g->d), t[i].about, (const char *const[PD_METRIC_LABELS]){ t[i].label }, t[i].to, e);
    return rc ? rc : pd_metrics_before(pd_daemon_metrics(g->d), look_up, g, e);
}

int pd_giver_serve(struct pd_runtime *rt, const struct pd_giver_opts *o, struct pd_daemon_opts *dopts, struct pd_err *e)
{
    struct giver *g = pd_calloc(1, sizeof *g, "a prefill worker", e);
    if (!g)
        return PD_ENOMEM;
    const struct pd_desk_ops ops = { .ctx = g, .run_size = sizeof (struct give), .admit = admit, .again = again, .refuse = refuse, .news = on_news,
                                     .cancel = on_cancel_run, .freed = on_freed, .busy = is_busy, .turn = turn, .after = tell_load, .spare = spare };
    const struct pd_desk_opts ko = { .rt = rt, .seed = o->seed, .max_runs = o->max_runs, .trace = o->trace };
    const struct pd_daemon_hooks hooks = { .ctx = g, .drain = on_drain, .busy = daemon_busy, .beat = on_beat, .ledger = ledger, .cancel = on_cancel,
                                           .follow = on_follow };
    const struct pd_batch_cb cb = { g, on_layer, on_token, on_finished, on_started, NULL };
    const struct pd_batch_opts bo = pd_batch_opts_of(rt);
    g->rt = rt;
    g->o = *o;
    g->max_record = dopts->max_record;
    g->tidy = (struct pd_post){ .fn = on_tidy, .ctx = g };
    g->stuck = (struct pd_post){ .fn = on_stuck, .ctx = g };
    int rc = pd_batch_new(rt->model, rt->threads, rt->k, rt->pool, &bo, &cb, &g->batch, e);
    rc = rc ? rc : pd_leases_new(&(struct pd_leases_opts){ .pool = rt->pool, .told = on_lease, .ctx = g }, &g->leases, e);
    rc = rc ? rc : pd_desk_new(&ko, &ops, &g->desk, e);
    const struct pd_entry entry = { NULL, &pd_desk_cb, g->desk, false };
    dopts->entry = &entry;
    dopts->n_entry = 1;
    dopts->worker = rt->worker;
    rc = rc ? rc : pd_daemon_new(dopts, &hooks, &g->d, e);
    if (rc < 0)
        goto out;
    g->links.o = (struct pd_links_opts){ .l = pd_daemon_loop(g->d), .max_record = dopts->max_record, .net = &pd_daemon_get_opts(g->d)->net, .event = on_link_event, .ctx = g,
        .xfer = { .giving = true, .via = o->via, .worker = rt->worker, .domain = rt->domain, .epoch = rt->epoch, .fp_fields = { rt->fp.map.p, rt->fp.map.n }, .pool = rt->pool,
                  .leases = g->leases, .accept_us = ACCEPT_US } };
    pd_desk_on(g->desk, g->d);
    if ((rc = make_metrics(g, e)) < 0)
        goto out;
    tell_load(g);
    struct pd_register_opts ro = { .rt = rt, .role = dopts->role, .max_runs = pd_desk_max(g->desk), .via = o->via, .routers = o->routers, .load = load,
                                   .ctx = g };
    if ((rc = pd_register_new(g->d, &ro, &g->reg, e)) < 0)
        goto out;
    if ((rc = pd_desk_start(g->desk, e)) < 0)
        goto out;
    pd_trace_process(o->trace, PD_ST_READY);
    if ((rc = pd_daemon_ready(g->d, e)) == 0)
        rc = pd_daemon_run(g->d, e);
out:
    if (g->desk)
        pd_desk_stop(g->desk);
    for (struct give *r = g->desk ? (void *)pd_desk_first(g->desk) : NULL; r && rc < 0; r = (void *)r->d.node.next)
        if (!r->failed && !r->published)
            step_of(g, r, PD_ST_FAILED, 0, e->msg, NULL);
    pd_batch_free(g->batch);
    if (g->leases)
        pd_leases_revoke_all(g->leases, "the prefill worker ends", pd_mono_us());
    if (g->tidying)
        pd_loop_undefer(pd_daemon_loop(g->d), &g->tidy);
    pd_links_free(&g->links);
    pd_register_free(g->reg);
    pd_desk_free(g->desk);
    while (g->peers) {
        struct peer *p = g->peers;
        p->n_runs = 0;
        p->link = NULL;
        peer_drop(p);
    }
    pd_daemon_free(g->d);
    pd_leases_free(g->leases);
    pd_free(g);
    return rc;
}
