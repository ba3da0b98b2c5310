#include <stdio.h>
#include "../base/clock.h"
#include "../base/hash.h"
#include "../base/log.h"
#include "../base/proc.h"
#include "../wire/value.h"
#include "giver_in.h"

enum { ACCEPT_US = 20000000 /* a decode worker may wait for blocks */ };

/* ---- the loop: answers ---- */

void pd_gv_end_lease(struct pd_giver *g, struct pd_gv_run *r, const char *cause)
{
    if (!r->leased)
        return;
    pd_lease_revoke(g->leases, r->lease, cause, pd_mono_us(), NULL);
    pd_links_soon(&g->links);
}

static void let_go(struct pd_giver *g, struct pd_gv_run *r)
{
    if (r->dropping)
        return;
    r->dropping = true;
    pd_desk_call(g->w->desk, &r->s.d, &r->c_drop, pd_gv_drop, r);
}

void pd_gv_settle(struct pd_giver *g, struct pd_gv_run *r)
{
    r->s.d.kept = r->leased || r->move;
    pd_desk_look(g->w->desk, &r->s.d);
}

static void put_error(struct pd_giver *g, struct pd_gv_run *r, const struct pd_err *why, const char *action)
{
    struct pd_buf b = { 0 };
    struct pd_error_rec er = { .has_op = true, .code = pd_exit_status(why->code), .message = { why->msg, strlen(why->msg) } };
    memcpy(er.run, r->s.d.name, sizeof er.run);
    memcpy(er.op, r->op, sizeof er.op);         /* this worker may have the run again, to decode it: that did not fail */
    snprintf(er.class_, sizeof er.class_, "%s", pd_code_name(why->code));
    snprintf(er.action, sizeof er.action, "%s", action);
    if (pd_error_encode(&er, &b, NULL) == 0)
        pd_desk_put(g->w->desk, &r->s.d, &b);
    pd_buf_free(&b);
}

void pd_gv_fail(struct pd_giver *g, struct pd_gv_run *r, const struct pd_err *why, const char *action)
{
    if (r->failed || r->kv_told)
        return;
    r->failed = true;
    pd_error("run %s: %s", r->s.d.name, why->msg);
    pd_gv_step(g, r, why->code == PD_ECANCEL ? PD_ST_CANCELLED : PD_ST_FAILED, 0, why->msg, NULL);
    pd_metric_add(g->w->m_ends[why->code == PD_ECANCEL ? PD_WK_CANCELLED : PD_WK_FAILED], 1);
    put_error(g, r, why, action);
    pd_gv_end_lease(g, r, "the run failed");
    let_go(g, r);
}

void pd_gv_not_given(struct pd_giver *g, struct pd_gv_run *r, const struct pd_err *why, const char *action)
{
    if (r->settled || r->failed || r->no_d.code || atomic_load(&r->s.d.cancelled))
        return;
    if (!r->kv_told) {
        pd_gv_fail(g, r, why, action);
        return;
    }
    r->no_d = *why;
    pd_metric_add(g->m_not_given, 1);
    pd_warn("run %s: %s", r->s.d.name, why->msg);
    put_error(g, r, why, action);
}

struct pd_kvdesc pd_gv_desc(const struct pd_gv_run *r)
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

void pd_gv_put_kv(struct pd_giver *g, struct pd_gv_run *r)
{
    struct pd_buf b = { 0 };
    struct pd_kvdesc kv = pd_gv_desc(r);
    struct pd_err e;
    kv.payload = (struct pd_payload){ .bytes = 0 };
    kv.lease = (struct pd_bin){ NULL, 0 };
    if (pd_kvdesc_encode(&kv, &b, &e) < 0)
        pd_gv_fail(g, r, &e, "abort");
    else {
        pd_desk_put(g->w->desk, &r->s.d, &b);
        r->kv_told = true;
    }
    pd_buf_free(&b);
}

static void publish(struct pd_giver *g, struct pd_gv_run *r)
{
    struct pd_err e;
    int rc = r->leased ? pd_lease_publish(g->leases, r->lease, &e) : pd_fail(&e, PD_EFAIL, "its lease ended while it was being computed");
    if (rc < 0) {
        pd_gv_fail(g, r, &e, "retry");
        return;
    }
    pd_gv_step(g, r, PD_ST_KV_PUBLISHED, r->plan.bytes, NULL, r->lease);       /* before the kv leaves: what decode does next comes after it in the log */
    r->published = true;
    pd_metric_add(g->w->m_ends[PD_WK_PUBLISHED], 1);
    pd_metric_add(g->m_tokens, r->desc.n_tokens);
    let_go(g, r);
    if (r->move)
        pd_gv_close(g, r);
    else
        pd_gv_try(g, r);
}

static void set_lease_timer(struct pd_giver *g)
{
    struct pd_err e;
    int64_t next = pd_leases_next(g->leases), early = next - (g->w->o.lease_us > 0 ? g->w->o.lease_us : PD_LEASE_TTL_US) / 2;
    if (next == INT64_MAX)
        pd_timer_stop(g->t_lease);
    else if (pd_timer_at(g->t_lease, early > pd_mono_us() ? early : next, &e) < 0)
        pd_error("the leases' timer: %s", e.msg);       /* the beat looks too */
}

/* The first step has its blocks: they are leased from here on. */
static void lease(struct pd_giver *g, struct pd_gv_run *r)
{
    struct pd_err e;
    int rc = pd_lease_grant(g->leases, r->s.d.name, r->desc.gen, r->blocks, r->plan.n_blocks, g->w->o.lease_us, pd_mono_us(), r->lease, &e);
    if (rc < 0) {
        pd_gv_fail(g, r, &e, "retry");
        return;
    }
    r->leased = r->s.d.kept = true;
    pd_lease_fill(g->leases, r->lease, NULL);
    set_lease_timer(g);
    pd_gv_try(g, r);
}

static void on_news(void *ctx, struct pd_desk_run *dr)
{
    struct pd_giver *g = ctx;
    struct pd_gv_run *r = (struct pd_gv_run *)dr;
    bool finished = atomic_load(&r->finished);
    if (r->dropping)
        return;
    if (atomic_load(&r->started) && !r->leased && !r->lease_over && !r->failed && !(finished && r->why.code))
        lease(g, r);
    if (r->move) {
        pd_gv_ready(r);
        pd_link_soon(r->link);
    }
    if (finished && r->why.code)
        pd_gv_fail(g, r, &r->why, r->why.code == PD_ENOMEM ? "retry" : "abort");         /* another may have more */
    else if (finished && !r->failed)
        publish(g, r);
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
    struct pd_giver *g = ctx;
    struct pd_gv_run *r = (struct pd_gv_run *)dr;
    if (!dr->routed || !dr->route.d.at.p)
        return pd_fail(e, PD_EFAIL, "request: this worker only prefills; a request needs a route that says where its KV goes (send it to pd-route)");
    r->g = g;
    r->s.n_ids = dr->in.req.n_token_ids;
    int rc = sum_of(&dr->in.req, &r->sum, e);
    struct pd_timeouts limits;
    rc = rc ? rc : pd_timeouts_read(&dr->in.req, &limits, e);
    rc = rc ? rc : pd_gv_peer_of(g, dr->route.d.at, &r->peer, e);
    if (rc < 0)
        return rc;
    r->transfer_us = limits.transfer;
    r->peer->n_runs++;
    memcpy(r->op, dr->route.op, sizeof r->op);
    r->in = dr->in;
    dr->in = (struct pd_intake){ 0 };
    struct pd_step s = { .run = dr->name, .where = "remote", .op = r->op };
    pd_run_step(g->w->o.trace, &s, PD_ST_ACCEPTED, 0, NULL);
    pd_desk_call(g->w->desk, &r->s.d, &r->c_take, pd_gv_take, r);
    pd_gv_reach(r->peer);             /* while it is computed */
    return 0;
}

static bool again(void *ctx, struct pd_desk_run *dr, struct pd_client *from, const struct pd_intake *in, const struct pd_routing *route)
{
    struct pd_giver *g = ctx;
    struct pd_gv_run *r = (struct pd_gv_run *)dr;
    struct pd_gv_peer *p = NULL;
    struct pd_err e;
    uint64_t sum;
    if (r->failed || atomic_load(&dr->cancelled) || (r->published && !r->leased))
        return false;
    int rc = route->d.at.p ? sum_of(&in->req, &sum, &e) : pd_fail(&e, PD_EFAIL, "request: its route does not say where its KV goes");
    rc = rc ? rc : pd_gv_peer_of(g, route->d.at, &p, &e);
    if (rc < 0) {
        pd_desk_refuse(g->w->desk, from, &in->req, &e, "abort");
        return true;
    }
    if (sum != r->sum) {        /* one name, another run */
        pd_gv_peer_drop(p);
        pd_desk_cancel(g->w->desk, dr, PD_WHY_RECORD);
        return false;
    }
    bool new = p != r->peer || memcmp(route->op, r->op, sizeof r->op);
    p->n_runs++;
    r->peer->n_runs--;
    if (p != r->peer)
        pd_gv_peer_drop(r->peer);
    r->peer = p;
    memcpy(r->op, route->op, sizeof r->op);
    pd_desk_move(g->w->desk, dr, from);
    if (new) {
        r->settled = r->kv_told = r->taken = r->in_place = r->away = false;
        r->n_lost = 0;
    }
    if (new && r->move && r->link != p->link) {         /* the old attempt's: it ends by itself, beside the new one */
        pd_move_set(r->move, NULL);
        pd_metric_add(g->m_moves, -1);
        r->move = NULL;
        r->link = NULL;
    }
    r->moved_on = new && r->move;
    r->no_d = (struct pd_err){ 0 };
    if (r->kv_told)
        pd_gv_put_kv(g, r);
    pd_gv_reach(p);
    pd_gv_try(g, r);
    pd_gv_settle(g, r);
    return true;
}

static void on_cancel_run(void *ctx, struct pd_desk_run *dr)
{
    struct pd_giver *g = ctx;
    struct pd_gv_run *r = (struct pd_gv_run *)dr;
    struct pd_err why;
    const char *text = pd_why_text((enum pd_why)atomic_load(&dr->cancelled));
    pd_fail(&why, PD_ECANCEL, "%s", text);
    if (!r->kv_told && !r->failed)
        pd_gv_fail(g, r, &why, "abort");
    else {
        pd_gv_step(g, r, PD_ST_CANCELLED, 0, text, NULL);
        pd_gv_end_lease(g, r, text);
    }
}

static void on_freed(void *ctx, struct pd_desk_run *dr)
{
    struct pd_gv_run *r = (struct pd_gv_run *)dr;
    pd_gv_uncount(ctx, r);
    if (r->peer) {
        r->peer->n_runs--;
        pd_gv_peer_drop(r->peer);
    }
    pd_intake_free(&r->in);
    pd_buf_free(&r->t);
}

static void refuse(void *ctx, const struct pd_request *q, const struct pd_err *why, const char *action, struct pd_buf *b)
{
    struct pd_giver *g = ctx;
    pd_refusal_log(q, why);
    pd_metric_add(g->w->m_ends[PD_WK_REFUSED], 1);
    pd_refusal_error(q, why, action, b, NULL);
}

/* ---- the loop: leases ---- */

static void on_lease(void *ctx, enum pd_lease_step step, const struct pd_lease_info *l)
{
    static const enum pd_state_id state[] = { PD_ST_LEASE_GRANTED, PD_ST_LEASE_READ, PD_ST_LEASE_RENEWED, PD_ST_LEASE_RELEASED, PD_ST_LEASE_EXPIRED,
                                              PD_ST_LEASE_REVOKED, PD_ST_REAPED };
    struct pd_giver *g = ctx;
    struct pd_gv_run *r = (struct pd_gv_run *)pd_desk_find(g->w->desk, l->run, PD_RUN_LEN);
    r = r && r->s.side == &g->side ? r : NULL;
    if (step != PD_LEASE_STEP_GRANTED && !(r && !memcmp(r->lease, l->id, sizeof r->lease)))         /* one that gave up its name */
        for (r = pd_gv_next(g, NULL); r && memcmp(r->lease, l->id, sizeof r->lease);)
            r = pd_gv_next(g, r);
    pd_metric_add(g->m_lease[step], 1);
    struct pd_step s = { .run = l->run, .gen = l->gen, .lease = l->id, .where = "remote", .op = r ? r->s.d.route.op : NULL };
    pd_trace_step(g->w->o.trace, &s, state[step], 0, l->cause);
    if (step != PD_LEASE_STEP_RELEASED && step != PD_LEASE_STEP_EXPIRED && step != PD_LEASE_STEP_REVOKED)
        return;
    if (r && r->leased && !memcmp(r->lease, l->id, sizeof r->lease)) {
        r->settled |= step == PD_LEASE_STEP_RELEASED && !r->moved_on;       /* its decode worker has it, whichever connection says so */
        r->leased = false;
        r->lease_over = true;
        pd_gv_uncount(g, r);
    }
    if (!g->tidying) {
        g->tidying = true;
        pd_loop_defer(pd_daemon_loop(g->w->d), &g->tidy);
    }
}

/* What the end of leases means for their runs; and blocks are free again. */
static void on_tidy(void *ctx)
{
    struct pd_giver *g = ctx;
    struct pd_err e;
    g->tidying = false;
    for (struct pd_gv_run *r = pd_gv_next(g, NULL), *next; r; r = next) {
        next = pd_gv_next(g, r);
        if (!r->lease_over || r->leased)
            continue;
        if (r->published && !r->settled && !r->failed && !r->no_d.code && !r->move) {
            pd_fail(&e, PD_ETIME, "its lease ended before a decode worker had its KV");
            pd_gv_not_given(g, r, &e, "retry");
        } else if (!r->published && !r->failed) {
            pd_fail(&e, PD_EFAIL, "its lease ended while it was being computed");
            pd_gv_fail(g, r, &e, "retry");
        }
        pd_gv_settle(g, r);
    }
    pd_links_soon(&g->links);
}

/* A lease lives while its run is computed; else it ends at its time. The timer comes half a life before the next end, and then at it. */
static void on_lease_time(void *ctx)
{
    struct pd_giver *g = ctx;
    int64_t now = pd_mono_us();
    for (struct pd_gv_run *r = pd_gv_next(g, NULL); r; r = pd_gv_next(g, r))
        if (r->leased && !r->published)
            pd_lease_renew(g->leases, r->lease, r->desc.gen, 0, now, NULL);
    if (pd_leases_sweep(g->leases, now))
        pd_links_soon(&g->links);
    set_lease_timer(g);
}

void pd_giver_beat(struct pd_giver *g)
{
    pd_leases_reconcile(g->leases, NULL, pd_mono_us());
    for (struct pd_gv_run *r = pd_gv_next(g, NULL); r; r = pd_gv_next(g, r))
        if (r->away && r->leased && r->reader && !pd_proc_alive(r->reader, r->reader_start))
            pd_gv_end_lease(g, r, "its reader died");
    on_lease_time(g);
    pd_links_soon(&g->links);
}

bool pd_giver_give_up(struct pd_giver *g)
{
    bool any = false;
    for (struct pd_gv_run *r = pd_gv_next(g, NULL); r; r = pd_gv_next(g, r))
        if (r->leased && !r->move && r->no_d.code) {
            pd_gv_end_lease(g, r, "its blocks were needed");
            any = true;
        }
    return any;
}

bool pd_giver_revoke_one(struct pd_giver *g)
{
    struct pd_gv_run *last = NULL;
    for (struct pd_gv_run *r = pd_gv_next(g, NULL); r; r = pd_gv_next(g, r))
        if (r->leased)
            last = r;
    if (!last)
        return false;
    pd_warn("run %s: its KV is given up: what decodes here needs the blocks", last->s.d.name);
    pd_gv_end_lease(g, last, "its blocks were needed by runs that decode");
    return true;
}

/* ---- for its worker ---- */

static void ledger(void *ctx, pd_ledger_fn *put, void *to)
{
    struct pd_giver *g = ctx;
    struct pd_lease_counts n = pd_leases_counts(g->leases);
    put(to, "blocks_leased", (int64_t)n.live_blocks);
    put(to, "leases_live", n.live);
    put(to, "leases_granted", (int64_t)n.granted);
    put(to, "leases_released", (int64_t)n.released);
    put(to, "leases_expired", (int64_t)n.expired);
    put(to, "leases_revoked", (int64_t)n.revoked);
    put(to, "leases_reaped", (int64_t)n.reaped);
    for (int i = 0; i < PD_TRANSPORTS; i++) {
        char name[40];
        snprintf(name, sizeof name, "given_%s", pd_transports[i]->scheme);
        put(to, name, pd_metric_value(g->m_given[i]));
    }
    put(to, "given_bytes", pd_metric_value(g->m_given_bytes));
    put(to, "not_given", pd_metric_value(g->m_not_given));
    put(to, "published", pd_metric_value(g->w->m_ends[PD_WK_PUBLISHED]));
}

static void look_up(void *ctx)
{
    struct pd_giver *g = ctx;
    struct pd_lease_counts n = pd_leases_counts(g->leases);
    pd_metric_set(g->m_live, n.live);
    pd_metric_set(g->m_leased, (int64_t)n.live_blocks);
    pd_metric_set(g->m_links, g->links.n);
}

static int make_metrics(struct pd_giver *g, struct pd_err *e)
{
#define COUNTER(n, h, ...) { .name = n, .help = h, .type = PD_COUNTER, __VA_ARGS__ }
#define GAUGE(n, h) { .name = n, .help = h, .type = PD_GAUGE }
    const struct pd_metric_about tokens = COUNTER("pd_prompt_tokens_total", "Prompt tokens of published runs."), live = GAUGE("pd_leases", "Leases that live."),
        leased = GAUGE("pd_kv_blocks_leased", "KV blocks under a lease."), lease = COUNTER("pd_lease_steps_total", "Steps of leases.", .label = { "step" }),
        moves = GAUGE("pd_moves", "KV hand-overs on their way."), given = COUNTER("pd_given_total", "KV that a decode worker verified.", .label = { "scheme" }),
        bytes = COUNTER("pd_given_bytes_total", "Bytes of KV that decode workers verified."),
        skipped = COUNTER("pd_skipped_bytes_total", "Bytes of KV that decode workers had already."),
        exposed = { .name = "pd_exposed_seconds", .help = "From a prompt's last layer, or its offer if that came later, until its KV was verified.", .type = PD_HISTOGRAM,
                    .scale = 6, .bounds = pd_latency_bounds, .n_bounds = pd_n_latency_bounds },
        not_given = COUNTER("pd_not_given_total", "Published KV that did not reach its decode worker."), links = GAUGE("pd_links", "Transfer connections.");
    const struct { const struct pd_metric_about *about; struct pd_metric **to; const char *label; } t[] = {
        { &tokens, &g->m_tokens, NULL }, { &live, &g->m_live, NULL }, { &leased, &g->m_leased, NULL },
        { &lease, &g->m_lease[0], "granted" }, { &lease, &g->m_lease[1], "read" }, { &lease, &g->m_lease[2], "renewed" },
        { &lease, &g->m_lease[3], "released" }, { &lease, &g->m_lease[4], "expired" }, { &lease, &g->m_lease[5], "revoked" },
        { &lease, &g->m_lease[6], "reaped" }, { &moves, &g->m_moves, NULL }, { &given, &g->m_given[0], "inline" }, { &given, &g->m_given[1], "shm" },
        { &given, &g->m_given[2], "tcp" }, { &given, &g->m_given[3], "rdma" },
        { &bytes, &g->m_given_bytes, NULL }, { &skipped, &g->m_skipped, NULL }, { &exposed, &g->m_exposed, NULL }, { &not_given, &g->m_not_given, NULL }, { &links, &g->m_links, NULL } };
#undef COUNTER
#undef GAUGE
    struct pd_metrics *m = pd_daemon_metrics(g->w->d);
    int rc = 0;
    for (size_t i = 0; !rc && i < sizeof t / sizeof *t; i++)
        rc = pd_metric_get(m, t[i].about, (const char *const[PD_METRIC_LABELS]){ t[i].label }, t[i].to, e);
    return rc ? rc : pd_metrics_before(m, look_up, g, e);
}

/* What is final of its KV in all layers, while it is leased. */
static int verify(void *ctx, struct pd_conn *c, struct pd_desk_run *dr, struct pd_err *e)
{
    struct pd_giver *g = ctx;
    struct pd_gv_run *r = (struct pd_gv_run *)dr;
    struct pd_lease_info l;
    struct pd_readback *b;
    int rc = pd_readback_new(&g->w->readbacks, c, r->s.d.name, &b, e);
    if (rc < 0)
        return rc;
    bool leased = r->leased && pd_lease_info(g->leases, r->lease, &l);
    b->lease = leased ? pd_lease_state_name(l.state) : r->lease_over ? "over" : "none";
    if (leased && atomic_load(&r->started)) {
        uint32_t ranges = r->plan.n_ranges;
        for (uint32_t i = 0; i < r->plan.layers; i++)
            ranges = atomic_load(&r->done[i]) < ranges ? atomic_load(&r->done[i]) : ranges;
        uint64_t n_kv = (uint64_t)ranges * r->plan.chunk_blocks * r->desc.layout.block_size;
        b->state = ranges == r->plan.n_ranges ? "published" : "filling";
        b->n_tokens = r->desc.n_tokens;
        b->tokens_sum = pd_xxh3(r->desc.token_ids, (size_t)r->desc.n_tokens * sizeof *r->desc.token_ids, 0);
        memcpy(b->gen, r->desc.gen, sizeof b->gen);
        b->has_gen = true;
        pd_readback_blocks(b, l.blocks, ranges == r->plan.n_ranges || n_kv > b->n_tokens ? b->n_tokens : (uint32_t)n_kv);
    }
    pd_readback_go(b);
    return 0;
}

static void cut(void *ctx, struct pd_desk_run *dr, const struct pd_err *why)
{
    struct pd_gv_run *r = (struct pd_gv_run *)dr;
    if (!r->failed && !r->published)
        pd_gv_step(ctx, r, PD_ST_FAILED, 0, why->msg, NULL);
}

const struct pd_side *pd_giver_side(const struct pd_giver *g) { return &g->side; }
size_t pd_giver_run_size(void) { return sizeof (struct pd_gv_run); }
uint32_t pd_giver_links_n(const struct pd_giver *g) { return g->links.n; }
uint32_t pd_giver_moves(const struct pd_giver *g) { return (uint32_t)pd_metric_value(g->m_moves); }
uint32_t pd_giver_blocks(const struct pd_giver *g) { return (uint32_t)pd_leases_counts(g->leases).live_blocks; }

int pd_giver_new(struct pd_worker *w, uint32_t most, struct pd_giver **out, struct pd_err *e)
{
    struct pd_giver *g = pd_calloc(1, sizeof *g, "what gives", e);
    if (!g)
        return PD_ENOMEM;
    *out = g;
    g->w = w;
    g->most = most;
    g->side = (struct pd_side){ .ctx = g, .admit = admit, .again = again, .refuse = refuse, .news = on_news, .cancel = on_cancel_run, .freed = on_freed,
                                .verify = verify, .ledger = ledger, .cut = cut };
    g->tidy = (struct pd_post){ .fn = on_tidy, .ctx = g };
    pd_gv_callbacks(g);
    return pd_leases_new(&(struct pd_leases_opts){ .pool = w->rt->pool, .told = on_lease, .ctx = g }, &g->leases, e);
}

int pd_giver_on(struct pd_giver *g, struct pd_err *e)
{
    const struct pd_worker *w = g->w;
    const struct pd_runtime *rt = w->rt;
    g->links.o = (struct pd_links_opts){ .l = pd_daemon_loop(w->d), .max_record = w->max_record, .net = &pd_daemon_get_opts(w->d)->net,
        .event = pd_gv_on_link, .ctx = g,
        .xfer = { .giving = true, .via = w->o.via, .streams = w->o.streams, .worker = rt->worker, .domain = rt->domain, .epoch = rt->epoch,
                  .fp_fields = { rt->fp.map.p, rt->fp.map.n }, .pool = rt->pool, .leases = g->leases, .accept_us = ACCEPT_US } };
    int rc = pd_timer_new(pd_daemon_loop(w->d), on_lease_time, g, &g->t_lease, e);
    return rc ? rc : make_metrics(g, e);
}

void pd_giver_drop_all(struct pd_giver *g)
{
    for (struct pd_gv_run *r = pd_gv_next(g, NULL); r; r = pd_gv_next(g, r)) {
        if (r->run)
            pd_run_drop(g->w->batch, r->run);
        r->run = NULL;
    }
}

void pd_giver_end(struct pd_giver *g)
{
    if (g->leases)
        pd_leases_revoke_all(g->leases, "the prefill worker ends", pd_mono_us());
    if (g->tidying)
        pd_loop_undefer(pd_daemon_loop(g->w->d), &g->tidy);
    pd_timer_free(g->t_lease);
    g->t_lease = NULL;
    pd_links_free(&g->links);
}

void pd_giver_free(struct pd_giver *g)
{
    if (!g)
        return;
    while (g->peers) {
        struct pd_gv_peer *p = g->peers;
        p->n_runs = 0;
        p->link = NULL;
        pd_gv_peer_drop(p);
    }
    pd_leases_free(g->leases);
    pd_free(g);
}
