/* The router's daemon: its workers, who registers, time, metrics. */
#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "router_in.h"

enum { POLICY_US = 1000000, FORGET = 60 /* times gone_us: a worker that dialled in and is gone so long is known no more */ };

/* ---- workers ---- */

static void know_policy(struct pd_router *r)
{
    int64_t most = r->o.wait_us / 2 < POLICY_US ? r->o.wait_us / 2 : POLICY_US;
    bool all = true;
    for (const struct pd_rt_worker *w = r->workers; w; w = w->next) {
        if (!r->o.policy_given && w->m->known && pd_member_gives(w->m) && r->o.policy != PD_POLICY_FIXED) {
            r->o.policy = PD_POLICY_FIXED;
            r->policy_known = true;
        }
        all &= w->m->known;
    }
    if (r->policy_known)
        return;
    r->policy_known = r->o.policy_given || (all && r->workers) || (r->workers ? pd_mono_us() - r->since >= most : true);
}

static int said(struct pd_router *r, struct pd_rt_worker *w, enum pd_rt_from from, const struct pd_rec *rec, struct pd_err *e)
{
    bool fresh = false, disagreed = w->m->disagrees;
    char state[12];
    snprintf(state, sizeof state, "%s", w->m->said.state);
    int rc = pd_registry_said(&r->reg, w->m, rec->p, rec->n, pd_mono_us(), &fresh, e);
    if (rc < 0) {
        pd_warn("worker %s: its record is refused: %s", w->m->at, e->msg);
        return rc;
    }
    const struct pd_worker_rec *s = &w->m->said;
    bool ready = !strcmp(s->state, "ready");
    w->told_silent = false;
    w->draining = !strcmp(s->state, "draining") || !strcmp(s->state, "gone");
    if (fresh || strcmp(state, s->state))
        pd_info("worker %s (%s): %s, epoch %llu, %s", pd_member_name(w->m), s->role, s->state, (unsigned long long)s->epoch, w->m->at);
    if (w->m->disagrees && !disagreed) {
        pd_metric_add(r->m_disagree, 1);
        pd_warn("worker %s: load_disagrees: it reports %u runs, and has %u of this router's", pd_member_name(w->m), s->load.runs, w->m->own.runs);
    }
    pd_upstream_want(w->u, ready);
    pd_rt_text_said(r, w);
    pd_rt_learn_said(r, w);
    pd_rt_feed_said(r, w, from, fresh);
    pd_rt_paths_said(r, w, fresh);
    know_policy(r);
    pd_rt_dispatch(r);
    return 0;
}

static void on_said(void *ctx, struct pd_upstream *u, const struct pd_rec *rec)
{
    struct pd_err e;
    said(ctx, pd_upstream_user(u), PD_RT_FOLLOWED, rec, &e);    /* a bad one changes nothing */
}
static void on_event(void *ctx, struct pd_upstream *u, const struct pd_rec *rec) { pd_rt_feed_event(ctx, pd_upstream_user(u), PD_RT_FOLLOWED, rec); }
static void on_silent(void *ctx, struct pd_upstream *u) { pd_rt_feed_silent(pd_upstream_user(u), PD_RT_FOLLOWED); }
static void on_record(void *ctx, struct pd_upstream *u, const struct pd_rec *rec) { pd_rt_record(ctx, pd_upstream_user(u), rec); }

static void on_up(void *ctx, struct pd_upstream *u)
{
    struct pd_rt_worker *w = pd_upstream_user(u);
    w->m->reachable = true;
    w->m->behind = w->brought = false;
    w->m->life++;
    pd_rt_dispatch(ctx);
}

static void on_room(void *ctx, struct pd_upstream *u)
{
    struct pd_rt_worker *w = pd_upstream_user(u);
    w->m->behind = false;
    pd_rt_dispatch(ctx);
}

static void on_down(void *ctx, struct pd_upstream *u, const struct pd_err *why)
{
    struct pd_rt_worker *w = pd_upstream_user(u);
    w->m->reachable = false;
    if (w->m->own.runs)
        pd_warn("worker %s: the connection is lost with %u runs (%s)", pd_member_name(w->m), w->m->own.runs, why ? why->msg : "it closed it");
    pd_rt_down(ctx, w, why);
}

static const struct pd_upstream_cb upstream_cb = { .said = on_said, .event = on_event, .silent = on_silent, .record = on_record, .up = on_up, .room = on_room, .down = on_down };

static int add_worker(struct pd_router *r, const char *at, bool follow, struct pd_rt_worker **out, struct pd_err *e)
{
    struct pd_rt_worker *w;
    int rc;
    for (w = r->workers; w; w = w->next)
        if (!strcmp(w->m->at, at)) {
            *out = w;
            return 0;
        }
    if (!(w = pd_calloc(1, sizeof *w, "a worker", e)))
        return PD_ENOMEM;
    w->r = r;
    if ((rc = pd_registry_add(&r->reg, at, &w->m, e)) < 0) {
        pd_free(w);
        return rc;
    }
    struct pd_upstream_opts uo = { .at = at, .follow = follow, .net = &pd_daemon_get_opts(r->d)->net, .max_record = r->o.max_record, .cb = &upstream_cb, .ctx = r, .user = w };
    if ((rc = pd_upstream_new(r->l, &uo, &w->u, e)) < 0) {
        pd_registry_remove(&r->reg, w->m);
        pd_free(w);
        return rc;
    }
    w->named = follow;
    w->m->user = w;
    w->next = r->workers;
    r->workers = w;
    *out = w;
    return 0;
}

static void remove_worker(struct pd_router *r, struct pd_rt_worker *w)
{
    struct pd_rt_worker **q = &r->workers;
    while (*q != w)
        q = &(*q)->next;
    *q = w->next;
    if (w->reg)
        pd_conn_set(w->reg, NULL);
    pd_rt_feed_gone(r, w);
    if (r->paths.paths)
        pd_paths_forget(r->paths.paths, w->m->at);
    pd_upstream_free(w->u);
    pd_registry_remove(&r->reg, w->m);
    pd_free(w);
}

/* ---- who registers ---- */

static void on_register(void *ctx, struct pd_conn *c, const struct pd_rec *rec)
{
    struct pd_router *r = ctx;
    struct pd_rt_worker *w = pd_conn_get(c);
    struct pd_bin v;
    struct pd_str at;
    struct pd_err e;
    char path[300];
    if (rec->kind == PD_K_KVEVENT && w)
        pd_rt_feed_event(r, w, PD_RT_REGISTRATION, rec);
    if (rec->kind != PD_K_WORKER)
        return;
    if (!w) {
        if (pd_map_find(rec->p, rec->n, "listen", &v) != 1 || !pd_get_str(v, &at) || at.n >= sizeof path || memchr(at.p, 0, at.n)) {
            pd_fail(&e, PD_EFAIL, "worker: listen is missing: a worker that registers says where it can be reached");
            pd_conn_refuse(c, &e);
            return;
        }
        snprintf(path, sizeof path, "%.*s", (int)at.n, at.p);
        if (add_worker(r, path, false, &w, &e) < 0) {
            pd_conn_refuse(c, &e);
            return;
        }
        if (w->reg && w->reg != c)      /* an earlier life, or it redialled */
            pd_conn_set(w->reg, NULL);
        pd_rt_feed_silent(w, PD_RT_REGISTRATION);
        w->reg = c;
        pd_conn_set(c, w);
    }
    if (said(r, w, PD_RT_REGISTRATION, rec, &e) < 0 && !w->m->known && !w->named) {    /* it is nobody yet */
        remove_worker(r, w);
        pd_conn_refuse(c, &e);
    }
}

static void on_register_gone(void *ctx, struct pd_conn *c, const struct pd_err *why)
{
    struct pd_rt_worker *w = pd_conn_get(c);
    (void)ctx, (void)why;
    if (w && w->reg == c) {
        w->reg = NULL;
        pd_rt_feed_silent(w, PD_RT_REGISTRATION);
    }
}

static void leave_be(void *ctx, struct pd_conn *c) { (void)ctx, (void)c; }
/* A router that drains goes on hearing of its workers. */
static const struct pd_conn_cb register_cb = { .record = on_register, .drain = leave_be, .gone = on_register_gone, .looks_on = true };

/* ---- who asks after them: `status` with follow ---- */

static void tell_workers(struct pd_router *r, struct pd_conn *c)
{
    struct pd_err e;
    for (const struct pd_member *m = r->reg.first; m && !pd_conn_full(c); m = m->next) {
        struct pd_buf b = { 0 };
        if (m->known && pd_worker_rec_encode(&m->said, &b, &e) == 0)
            pd_conn_put(c, b.p, b.n, &e);
        pd_buf_free(&b);
    }
}

static const struct pd_conn_cb follow_cb = { .drain = leave_be, .looks_on = true };

static int on_follow(void *ctx, struct pd_conn *c, const struct pd_rec *rec, struct pd_err *e)
{
    (void)rec, (void)e;
    pd_conn_handle(c, &follow_cb, ctx);
    tell_workers(ctx, c);
    return 0;
}

/* ---- time ---- */

void pd_rt_wake(struct pd_router *r)
{
    struct pd_err e;
    if (r->sweeping || !r->n_runs)
        return;
    if (pd_timer_in(r->sweep, PD_RT_SWEEP_US, &e) < 0)
        pd_error("timer: %s", e.msg);
    else
        r->sweeping = true;
}

static void look_at_workers(struct pd_router *r, int64_t now)
{
    struct pd_err why;
    for (struct pd_rt_worker *w = r->workers, *next; w; w = next) {
        next = w->next;
        if (!w->m->known || now - w->m->said_us < r->o.gone_us)
            continue;
        if (!w->told_silent) {
            w->told_silent = true;
            pd_fail(&why, PD_ETIME, "no heartbeat for %.1f s", (double)(now - w->m->said_us) / 1e6);
            if (!pd_upstream_idle(w->u))
                pd_warn("worker %s: %s; it counts as gone", pd_member_name(w->m), why.msg);
            pd_upstream_want(w->u, false);
            pd_upstream_drop(w->u, &why);
            pd_rt_feed_gone(r, w);
        } else if (!w->m->own.runs && !w->reg && !w->named && now - w->m->said_us > FORGET * r->o.gone_us && pd_upstream_idle(w->u))
            remove_worker(r, w);
    }
}

static void on_sweep(void *ctx)
{
    struct pd_router *r = ctx;
    int64_t now = pd_mono_us();
    r->sweeping = false;
    if (!r->policy_known) {
        know_policy(r);
        r->next_dispatch = 0;
    }
    pd_rt_sweep(r, now);
    if (now >= r->next_dispatch) {
        r->next_dispatch = now + (r->o.wait_us < 1000000 ? r->o.wait_us / 10 : 100000);
        look_at_workers(r, now);
        if (r->queue)
            pd_rt_dispatch(r);
    }
    pd_rt_wake(r);
}

static void on_beat(void *ctx)
{
    struct pd_router *r = ctx;
    int64_t now = pd_mono_us();
    pd_rt_key_sweep(r, now);
    pd_rt_feed_beat(r, now);
    pd_rt_paths_beat(r, now);
    look_at_workers(r, now);
    for (struct pd_conn *c = pd_daemon_conns(r->d)->first; c; c = pd_conn_next(c))
        if (pd_conn_handler(c) == &follow_cb && pd_conn_open(c))
            tell_workers(r, c);
}

/* ---- hooks ---- */

static bool is_busy(void *ctx) { return ((struct pd_router *)ctx)->n_runs > 0; }
static void on_drain(void *ctx) { pd_trace_process(((struct pd_router *)ctx)->o.trace, PD_ST_DRAINING); }

static void ledger(void *ctx, void (*put)(void *to, const char *key, int64_t value), void *to)
{
    const struct pd_router *r = ctx;
    uint32_t n[3] = { 0 };      /* known, ready, silent */
    int64_t own = 0, now = pd_mono_us();
    for (const struct pd_rt_worker *w = r->workers; w; w = w->next) {
        n[0]++;
        n[1] += w->m->known && w->m->reachable && !strcmp(w->m->said.state, "ready");
        n[2] += w->m->known && now - w->m->said_us > r->o.suspect_us;
        own += w->m->own.runs;
    }
    put(to, "runs", r->n_runs);
    put(to, "runs_most", r->o.max_runs);
    put(to, "request_bytes", (int64_t)r->body_bytes);
    put(to, "queued", r->n_queued);
    put(to, "at_workers", own);
    put(to, "workers", n[0]);
    put(to, "workers_ready", n[1]);
    put(to, "workers_silent", n[2]);
    put(to, "keys", (int64_t)r->keys.n);
    put(to, "key_bytes", (int64_t)r->key_bytes);
    put(to, "completed", pd_metric_value(r->m_ends[0]));
    put(to, "failed", pd_metric_value(r->m_ends[1]) + pd_metric_value(r->m_ends[4]));
    put(to, "cancelled", pd_metric_value(r->m_ends[2]));
    put(to, "blocked", pd_metric_value(r->m_ends[3]));
    put(to, "retries", pd_metric_value(r->m_retry[0]) + pd_metric_value(r->m_retry[1]));
    put(to, "fallbacks", pd_metric_value(r->m_retry[2]));
    put(to, "migrations", pd_metric_value(r->m_migrated));
    pd_rt_feed_ledger(r, put, to);
    pd_rt_paths_ledger(r, put, to);
}

static int make_metrics(struct pd_router *r, struct pd_err *e)
{
#define COUNTER(n, h, ...) { .name = n, .help = h, .type = PD_COUNTER, __VA_ARGS__ }
#define GAUGE(n, h, ...) { .name = n, .help = h, .type = PD_GAUGE, __VA_ARGS__ }
#define SECONDS(n, h) { .name = n, .help = h, .type = PD_HISTOGRAM, .scale = 6, .bounds = pd_latency_bounds, .n_bounds = pd_n_latency_bounds }
    const struct pd_metric_about runs = GAUGE("pd_runs_in_hand", "Runs in hand."), queue = GAUGE("pd_route_queue", "Runs that wait for a worker."),
        ends = COUNTER("pd_runs_total", "Runs, by how they ended.", .label = { "end" }), modes = COUNTER("pd_routes_total", "Decisions, by mode.",
            .label = { "mode" }),
        again = COUNTER("pd_route_again_total", "Decisions for a run that its workers failed before its first token went out: another prefill worker, another "
                        "decode worker, or no KV from elsewhere.", .label = { "what" }),
        moved = COUNTER("pd_migrations_total", "Streams that went on at another worker."),
        joined = COUNTER("pd_joined_total", "Requests answered from a run with the same idempotency key."),
        dropped = COUNTER("pd_dropped_records_total", "Records of workers about runs that were over, or given to another."),
        disagree = COUNTER("pd_load_disagreements_total", "Times that a worker's load and what this router gave it began to differ by more than a factor."),
        ttft = SECONDS("pd_ttft_seconds", "From acceptance to the first token."), e2e = SECONDS("pd_e2e_seconds", "From acceptance to the end."),
        waited = SECONDS("pd_route_wait_seconds", "From acceptance to a worker.");
    const struct { const struct pd_metric_about *about; struct pd_metric **to; const char *label; } t[] = {
        { &runs, &r->m_runs, NULL }, { &queue, &r->m_queue, NULL }, { &ends, &r->m_ends[0], "completed" }, { &ends, &r->m_ends[1], "failed" },
        { &ends, &r->m_ends[2], "cancelled" }, { &ends, &r->m_ends[3], "blocked" }, { &ends, &r->m_ends[4], "refused" }, { &modes, &r->m_modes[0],
            "aggregated" },
        { &modes, &r->m_modes[1], "remote" }, { &modes, &r->m_modes[2], "local" }, { &again, &r->m_retry[0], "prefill" }, { &again, &r->m_retry[1], "decode" },
        { &again, &r->m_retry[2], "local" }, { &moved, &r->m_migrated, NULL }, { &joined, &r->m_joined, NULL }, { &dropped, &r->m_dropped, NULL },
        { &disagree, &r->m_disagree, NULL }, { &ttft, &r->m_ttft, NULL }, { &e2e, &r->m_e2e, NULL }, { &waited, &r->m_wait, NULL } };
#undef COUNTER
#undef GAUGE
#undef SECONDS
    int rc = 0;
    for (size_t i = 0; !rc && i < sizeof t / sizeof *t; i++)
        rc = pd_metric_get(pd_daemon_metrics(r->d), t[i].about, (const char *const[PD_METRIC_LABELS]){ t[i].label }, t[i].to, e);
    return rc;
}

/* ---- birth and death ---- */

static void set_defaults(struct pd_router *r)
{
    struct pd_router_opts *o = &r->o;
    if (o->rules.risk <= 0)
        o->rules = pd_rules_usual;
    o->max_runs = o->max_runs ? o->max_runs : 4096;
    o->attempts = o->attempts ? o->attempts : 4;
    o->wait_us = o->wait_us ? o->wait_us : 10000000;
    o->suspect_us = o->suspect_us ? o->suspect_us : 3000000;
    o->gone_us = o->gone_us ? o->gone_us : 10000000;
    o->key_ttl_us = o->key_ttl_us ? o->key_ttl_us : 600000000;
}

int pd_router_serve(const struct pd_router_opts *o, struct pd_daemon_opts *dopts, struct pd_err *e)
{
    struct pd_router *r = pd_calloc(1, sizeof *r, "a router", e);
    int rc = PD_ENOMEM;
    char path[4200];
    if (!r)
        return rc;
    const struct pd_entry entry[] = { { NULL, &pd_rt_client_cb, r, false }, { "worker", &register_cb, r, true } };
    const struct pd_daemon_hooks hooks = { .ctx = r, .drain = on_drain, .busy = is_busy, .beat = on_beat, .ledger = ledger, .cancel = pd_rt_on_cancel,
                                           .follow = on_follow, .order = pd_rt_paths_order };
    r->o = *o;
    set_defaults(r);
    r->since = pd_mono_us();
    r->last_held = &r->held;
    dopts->entry = entry;
    dopts->n_entry = sizeof entry / sizeof *entry;
    if ((rc = pd_daemon_new(dopts, &hooks, &r->d, e)) < 0)
        goto out;
    r->l = pd_daemon_loop(r->d);
    if ((rc = make_metrics(r, e)) < 0 || (rc = pd_rt_feed_new(r, o->index_bytes, e)) < 0 || (rc = pd_rt_learn_new(r, o->profile, e)) < 0 || (rc = pd_rt_paths_new(r, e)) < 0 || (rc = pd_timer_new(r->l, on_sweep, r, &r->sweep, e)) < 0)
        goto out;
    for (int i = 0; rc == 0 && o->worker && o->worker[i]; i++) {
        struct pd_rt_worker *w;
        if ((rc = pd_daemon_address(o->worker[i], path, sizeof path, e)) < 0)
            pd_err_prefix(e, "--worker");
        else
            rc = add_worker(r, path, true, &w, e);
    }
    if (rc < 0)
        goto out;
    know_policy(r);
    pd_trace_process(r->o.trace, PD_ST_READY);
    if ((rc = pd_daemon_ready(r->d, e)) == 0)
        rc = pd_daemon_run(r->d, e);
out:
    if (r->d)
        pd_rt_end_all(r);
    for (struct pd_conn *c = NULL; r->d && (c = pd_daemon_conns(r->d)->first);) {
        if (pd_conn_handler(c) == &pd_rt_client_cb)
            pd_rt_client_free(pd_conn_get(c));
        pd_conn_free(c);
    }
    while (r->workers) {
        struct pd_rt_worker *w = r->workers;
        r->workers = w->next;
        pd_upstream_free(w->u);
        pd_free(w);
    }
    pd_registry_free(&r->reg);
    pd_rt_keys_free(r);
    pd_rt_feed_free(r);
    pd_rt_learn_free(r);
    pd_rt_paths_free(r);
    pd_keyed_free(&r->runs);
    pd_timer_free(r->sweep);
    pd_seen_free(&r->seen);
    pd_buf_free(&r->scratch);
    pd_daemon_free(r->d);
    pd_free(r);
    return rc;
}
