/* What becomes of a run: routed, sent, its records passed on, done again elsewhere when its workers fail it, ended. */
#include <inttypes.h>
#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../engine/reply.h"
#include "../wire/pack.h"
#include "../wire/transfer.h"
#include "router_in.h"

static void d_lost(struct pd_router *r, struct pd_rt_run *run, const char *why, bool counts);
static void p_lost(struct pd_router *r, struct pd_rt_run *run, const char *kind, const char *why, bool another);
static void p_lost_late(struct pd_router *r, struct pd_rt_run *run, const char *kind, const char *why);

/* ---- small things ---- */

static void step_tokens(struct pd_router *r, struct pd_rt_run *run, enum pd_state_id state, uint32_t choice, uint32_t pos, uint32_t tokens, const char *cause)
{
    if (!r->o.trace && !pd_log_verbose())
        return;
    pd_run_step(r->o.trace, &(struct pd_step){ .run = run->name, .where = run->has_op ? pd_mode_names[run->mode] : "route", .op = run->has_op ? run->op : NULL,
                                               .choice = choice, .pos = pos, .tokens = tokens }, state, 0, cause);
}
static void step(struct pd_router *r, struct pd_rt_run *run, enum pd_state_id state, const char *cause) { step_tokens(r, run, state, 0, 0, 0, cause); }

struct pd_rt_run *pd_rt_find(struct pd_router *r, const char *name, size_t n)
{
    return n == PD_RUN_LEN ? pd_keyed_find(&r->runs, name, n) : NULL;
}

static const char *name_of(const struct pd_rt_worker *w) { return pd_member_name(w->m); }

static bool set_text(struct pd_buf *b, const char *text)
{
    b->n = 0;
    return pd_buf_add(b, text, strlen(text) + 1, NULL) == 0;
}

static const char *text_of(const struct pd_buf *b) { return b->n ? (const char *)b->p : NULL; }

static bool streams(const struct pd_rt_run *run)
{
    for (const struct pd_rt_listener *l = run->listeners; l; l = l->next_of_run)
        if (l->stream)
            return true;
    return false;
}

/* While runs are walked nothing else may end one: who would be routed now is looked at afterwards. */
static bool begin_walk(struct pd_router *r)
{
    bool outer = !r->dispatching;
    r->dispatching = true;
    return outer;
}

static void end_walk(struct pd_router *r, bool outer)
{
    if (!outer)
        return;
    r->dispatching = false;
    if (r->queue || r->dispatch_again)
        pd_rt_dispatch(r);
}

/* ---- queue ---- */

static void enqueue(struct pd_router *r, struct pd_rt_run *run, bool first)
{
    struct pd_rt_run **at = first ? &r->queue : r->queue_last;
    run->next_queued = *at;
    run->prev_queued = at;
    *at = run;
    if (run->next_queued)
        run->next_queued->prev_queued = &run->next_queued;
    else
        r->queue_last = &run->next_queued;
    pd_metric_set(r->m_queue, ++r->n_queued);
}

static void dequeue(struct pd_router *r, struct pd_rt_run *run)
{
    if (!run->prev_queued)
        return;
    *run->prev_queued = run->next_queued;
    if (run->next_queued)
        run->next_queued->prev_queued = run->prev_queued;
    else
        r->queue_last = run->prev_queued;
    run->prev_queued = NULL;
    pd_metric_set(r->m_queue, --r->n_queued);
}

/* ---- what is sent to workers ---- */

static struct pd_place place_of(const struct pd_rt_worker *w)
{
    const struct pd_member *m = w->m;
    struct pd_str at = { m->at, strlen(m->at) };
    return (struct pd_place){ { name_of(w), strlen(name_of(w)) }, m->said.listen.p ? m->said.listen : at };
}

/* The request with this route, into r->scratch. */
static int compose(struct pd_router *r, struct pd_rt_run *run, const struct pd_routing *route, struct pd_err *e)
{
    struct pd_buf *b = &r->scratch;
    uint32_t pairs = run->body_pairs + 2 + (run->deadline_us > 0);
    uint8_t head[3] = { 0xde, (uint8_t)(pairs >> 8), (uint8_t)pairs };
    struct pd_packer k;
    b->n = 0;
    int rc = pd_buf_add(b, head, sizeof head, e);
    if (rc || (rc = pd_buf_add(b, run->body.p, run->body.n, e)))
        return rc;
    pd_pack_init(&k, b, e);
    pd_pack_text(&k, "stream");
    run->stream_up ? msgpack_pack_true(&k.pk) : msgpack_pack_false(&k.pk);
    if (run->deadline_us) {     /* what is left of it */
        int64_t left = (run->deadline_us - pd_mono_us()) / 1000;
        pd_pack_text(&k, "deadline_ms");
        msgpack_pack_int64(&k.pk, left > 1 ? left : 1);
    }
    pd_pack_text(&k, "route");
    return k.rc ? k.rc : pd_routing_encode(route, b, e);
}

static void send_cancel(struct pd_rt_worker *w, const struct pd_rt_run *run, const char *cause)
{
    struct pd_cancel c = { .cause = { cause, strlen(cause) } };
    struct pd_buf b = { 0 };
    struct pd_err e;
    memcpy(c.run, run->name, sizeof c.run);
    if (pd_cancel_encode(&c, &b, &e) == 0)
        pd_upstream_put(w->u, b.p, b.n, &e);    /* lost with the connection, as the run is then */
    pd_buf_free(&b);
}

static void release_d(struct pd_rt_run *run)
{
    if (!run->d)
        return;
    pd_member_give_back(run->d->m, run->d_share);
    run->d = NULL;
}

static void release_p(struct pd_rt_run *run, const char *cancel)
{
    if (!run->p)
        return;
    if (!run->p_done) {
        pd_member_give_back(run->p->m, run->p_share);
        if (cancel)
            send_cancel(run->p, run, cancel);
    }
    run->p = NULL;
}

/* The prefill worker of an attempt before, unless it is this one's too. */
static void leave_old_p(struct pd_rt_run *run)
{
    if (run->old_p && run->old_p != run->p)
        send_cancel(run->old_p, run, "its decode worker is lost");
    run->old_p = NULL;
}

/* ---- ends ---- */

void pd_rt_run_free(struct pd_router *r, struct pd_rt_run *run)
{
    struct pd_buf *bufs[] = { &run->body, &run->id, &run->adapter, &run->fallback, &run->held, &run->why };
    for (size_t i = 0; i < sizeof bufs / sizeof *bufs; i++)
        pd_buf_free(bufs[i]);
    for (uint32_t i = 0; run->choice && i < run->n; i++) {
        pd_buf_free(&run->choice[i].tokens);
        pd_buf_free(&run->choice[i].text);
        pd_buf_free(&run->choice[i].logprobs);
        pd_buf_free(&run->choice[i].carry);
    }
    pd_registry_let_fp(&r->reg, run->like);
    pd_free(run->choice);
    pd_free(run);
}

/* Its results were put. */
static void end_run(struct pd_router *r, struct pd_rt_run *run, enum pd_state_id state)
{
    int end = state == PD_ST_COMPLETED ? 0 : state == PD_ST_FAILED ? 1 : state == PD_ST_CANCELLED ? 2 : 3;
    pd_metric_add(r->m_ends[end], 1);
    pd_metric_observe(r->m_e2e, pd_mono_us() - run->t_accept);
    dequeue(r, run);
    release_p(run, "the run is over");
    release_d(run);
    leave_old_p(run);
    pd_rt_key_end(r, run, state == PD_ST_COMPLETED);
    pd_rt_leave(r, run);
    pd_keyed_remove(&r->runs, run);
    pd_metric_set(r->m_runs, --r->n_runs);
    pd_rt_run_free(r, run);
    pd_rt_let_read(r);
    if (r->queue)
        pd_rt_dispatch(r);
    pd_daemon_poke(r->d);
}

/* What went out, and the end, into the trace: before any of it leaves. */
static void trace_end(struct pd_router *r, struct pd_rt_run *run, enum pd_state_id state, const char *cause)
{
    uint32_t all = 0;
    if (!r->o.trace && !pd_log_verbose())
        return;
    for (uint32_t i = 0; i < run->n; i++) {
        struct pd_rt_choice *c = &run->choice[i];
        uint32_t total = c->done && state == PD_ST_COMPLETED ? c->total : c->told ? c->sent : 0;
        all += total;
        if (total > c->told)
            step_tokens(r, run, PD_ST_STREAMING, i, c->told, total - c->told, NULL);
    }
    step_tokens(r, run, state, 0, 0, state == PD_ST_COMPLETED ? all : 0, cause);
}

/* A result of our own for a choice that will get none from a worker. */
static int own_result(struct pd_router *r, struct pd_rt_run *run, uint32_t choice, const char *finish, const struct pd_extra *extra, struct pd_buf *b, struct pd_err *e)
{
    struct pd_rt_choice *c = &run->choice[choice];
    bool out = run->delivered;          /* what nobody saw is not told */
    struct pd_result res = { .id = { run->id.p, run->id.n }, .choice = choice, .ttft_ms = -1, .tpot_ms = -1, .e2e_ms = (double)(pd_mono_us() - run->t_accept) / 1e3,
                             .kv_ms = -1, .text = { out && c->text.p ? (char *)c->text.p : "", out ? c->text.n : 0 }, .tokens = (int32_t *)(void *)c->tokens.p,
                             .n_tokens = out ? c->sent : 0, .completion_tokens = out ? c->sent : 0 };
    memcpy(res.run, run->name, sizeof res.run);
    snprintf(res.finish_reason, sizeof res.finish_reason, "%s", finish);
    snprintf(res.mode, sizeof res.mode, "%s", pd_mode_names[run->mode]);
    if (out && run->t_first)
        res.ttft_ms = (double)(run->t_first - run->t_accept) / 1e3;
    if (text_of(&run->fallback))
        res.fallback = (struct pd_str){ text_of(&run->fallback), strlen(text_of(&run->fallback)) };
    if (run->d)
        res.decode_worker = (struct pd_str){ name_of(run->d), strlen(name_of(run->d)) };
    if (extra)
        res.extra = *extra;
    return pd_result_encode(&res, b, e);
}

/* Ended here, not by a worker. why NULL: cancelled. */
static void end_own(struct pd_router *r, struct pd_rt_run *run, const struct pd_err *why, const char *finish, enum pd_state_id state, const struct pd_extra *extra)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    int rc = 0;
    if (run->d)
        send_cancel(run->d, run, why ? why->msg : run->cancel_cause);
    trace_end(r, run, state, why ? why->msg : run->cancel_cause);
    pd_rt_put_all(r, run, run->held.p, run->held.n, false);
    if (why) {
        struct pd_error_rec er = { .id = { run->id.p, run->id.n }, .code = pd_exit_status(why->code), .message = { why->msg, strlen(why->msg) } };
        memcpy(er.run, run->name, sizeof er.run);
        snprintf(er.class_, sizeof er.class_, "%s", pd_code_name(why->code));
        snprintf(er.action, sizeof er.action, "abort");
        pd_error("run %s: %s", run->name, why->msg);
        rc = pd_error_encode(&er, &b, &e);
    }
    for (uint32_t i = 0; rc == 0 && i < run->n; i++)
        if (!run->choice[i].done)
            rc = own_result(r, run, i, finish, extra, &b, &e);
    if (rc < 0)                 /* a client that cannot be told is not left waiting */
        for (struct pd_rt_listener *l = run->listeners; l; l = l->next_of_run)
            pd_conn_close(l->k->c, &e);
    pd_rt_put_all(r, run, b.p, b.n, false);
    pd_buf_free(&b);
    end_run(r, run, state);
}

static void fail(struct pd_router *r, struct pd_rt_run *run, const struct pd_err *why) { end_own(r, run, why, "error", PD_ST_FAILED, NULL); }
static void end_cancelled(struct pd_router *r, struct pd_rt_run *run) { end_own(r, run, NULL, "cancelled", PD_ST_CANCELLED, NULL); }

static struct pd_need need_of(struct pd_router *r, const struct pd_rt_run *run, int64_t now)
{
    struct pd_need q = run->need;
    q.policy = r->o.policy;
    q.now_us = now;
    q.tried = run->tried;
    q.n_tried = run->n_tried;
    q.like = run->like;
    q.numerics = run->numerics;
    return q;
}

/* Nobody may have it, and it has waited long enough: who was excluded, and why. */
static void block(struct pd_router *r, struct pd_rt_run *run, int64_t now)
{
    struct pd_buf list = { 0 }, pairs = { 0 }, line = { 0 };
    struct pd_extra extra = { 0 };
    struct pd_packer k;
    struct pd_err why, e;
    struct pd_need need = need_of(r, run, now);
    pd_decide(&r->reg, &need, &r->decision);
    pd_pack_init(&k, &pairs, &e);
    pd_pack_text(&k, "excluded");
    if (pd_decision_text(&r->decision, &line, &e) < 0 || pd_buf_add(&line, "", 1, &e) < 0 || pd_decision_excluded(&r->decision, &list, &e) < 0 || k.rc ||
        pd_buf_add(&pairs, list.p, list.n, &e) < 0)
        pd_fail(&why, PD_ENOWORKER, "no worker after %.1f s", (double)(now - run->t_accept) / 1e6);
    else {
        extra = (struct pd_extra){ pairs.p, pairs.n, 1 };
        pd_fail(&why, PD_ENOWORKER, "no worker after %.1f s: %.400s", (double)(now - run->t_accept) / 1e6, (char *)line.p);
    }
    if (run->delivered) {
        struct pd_err was = why;
        pd_fail(&why, PD_ENOWORKER, "its stream cannot go on: %.440s", was.msg);
        fail(r, run, &why);
    } else
        end_own(r, run, &why, "blocked", PD_ST_BLOCKED, &extra);
    pd_buf_free(&list);
    pd_buf_free(&pairs);
    pd_buf_free(&line);
}

/* ---- routing ---- */

static void make_op(struct pd_rt_run *run, const struct pd_rt_worker *d, const char *what)
{
    struct pd_str at = place_of(d).at;
    uint64_t h[3] = { pd_xxh3(run->body.p, run->body.n, 0), pd_xxh3(at.p, at.n, d->m->life), run->choice[0].sent };
    pd_op_make(run->op, run->name, what, h, sizeof h);
    run->has_op = true;
}

static void note_route(struct pd_router *r, struct pd_rt_run *run, const char *reason, int64_t now)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    if (!r->o.trace)
        return;
    struct pd_route_note note = { .run = run->name, .reason = reason, .fallback = text_of(&run->fallback), .op = run->op, .attempt = run->attempt,
                                  .resumed = run->delivered ? run->choice[0].sent : 0, .t_us = pd_wall_us(), .waited_us = now - run->t_accept };
    if (pd_decision_encode(&r->decision, &note, &b, &e) == 0)
        pd_trace_record(r->o.trace, b.p, b.n);
    pd_buf_free(&b);
}

static struct pd_routing routing(struct pd_router *r, const struct pd_rt_run *run)
{
    struct pd_routing x = { .policy = { pd_policy_names[r->o.policy], strlen(pd_policy_names[r->o.policy]) }, .d = place_of(run->d), .early = run->early };
    const char *f = text_of(&run->fallback);
    memcpy(x.op, run->op, sizeof x.op);
    snprintf(x.mode, sizeof x.mode, "%s", pd_mode_names[run->mode]);
    if (run->mode == PD_MODE_REMOTE) {
        x.has_p = true;
        x.p = place_of(run->p);
    } else if (f)
        x.fallback = (struct pd_str){ f, strlen(f) };
    if (run->delivered && run->migrations) {
        x.has_resume = true;
        x.resume = (const int32_t *)(const void *)run->choice[0].tokens.p;
        x.n_resume = run->choice[0].sent;
    }
    return x;
}

/* What the decision says is done: the worker that decodes is told first, as the other one will call it. A connection that fails now ends, and `down` does the
 * rest. */
static void send_run(struct pd_router *r, struct pd_rt_run *run, int64_t now)
{
    const struct pd_decision *o = &r->decision;
    struct pd_err e;
    bool remote = o->mode == PD_MODE_REMOTE;
    dequeue(r, run);
    run->none_since = 0;
    run->mode = o->mode;
    run->d = o->d->user;
    run->p = remote ? o->p->user : NULL;
    run->p_done = run->sign = false;
    run->p_tries = remote;
    run->early = remote && r->o.early && run->need.max_tokens > 1 && streams(run);
    run->attempt++;
    run->t_sent = now;
    run->d_share = pd_share_of(&run->need, run->d->m, !remote, true);
    pd_member_take(run->d->m, run->d_share);
    if (remote) {
        run->p_share = pd_share_of(&run->need, run->p->m, true, false);
        pd_member_take(run->p->m, run->p_share);
    }
    make_op(run, run->d, remote ? "prefill" : "decode");
    pd_metric_add(r->m_modes[o->mode], 1);
    pd_metric_observe(r->m_wait, now - run->t_accept);
    step(r, run, PD_ST_ROUTE_SELECTED, NULL);
    note_route(r, run, NULL, now);
    struct pd_routing x = routing(r, run);
    if (compose(r, run, &x, &e) < 0) {
        fail(r, run, &e);
        return;
    }
    leave_old_p(run);
    pd_upstream_put(run->d->u, r->scratch.p, r->scratch.n, &e);
    if (remote)
        pd_upstream_put(run->p->u, r->scratch.p, r->scratch.n, &e);
}

/* It will be computed where it is decoded. The event is told by who does so: here, when its decode worker never heard of anything else. */
static void falls_back(struct pd_router *r, struct pd_rt_run *run, const char *kind, const char *why)
{
    char text[360];
    snprintf(text, sizeof text, "%s: %.300s", kind, why);
    set_text(&run->fallback, text);
    run->need.local = true;
    pd_metric_add(r->m_retry[2], 1);
    if (!run->d)
        step(r, run, PD_ST_FALLBACK, text);
}

static enum pd_outcome try_route(struct pd_router *r, struct pd_rt_run *run, int64_t now)
{
    struct pd_need q = need_of(r, run, now);
    struct pd_err why;
    pd_decide(&r->reg, &q, &r->decision);
    if (r->decision.outcome == PD_NO_PREFILL && run->none_since && now - run->none_since >= PD_RT_NO_P_US) {
        struct pd_buf line = { 0 };
        bool told = pd_decision_text(&r->decision, &line, &why) == 0 && pd_buf_add(&line, "", 1, &why) == 0;
        falls_back(r, run, "no_prefill_worker", told && line.n ? (char *)line.p : "none is there");
        pd_buf_free(&line);
        q = need_of(r, run, now);
        pd_decide(&r->reg, &q, &r->decision);
    }
    enum pd_outcome got = r->decision.outcome;
    if (got == PD_CHOSEN)
        send_run(r, run, now);
    else if (got == PD_WAIT_ROOM)
        run->none_since = 0;
    else if (got == PD_NEVER) {
        char text[300];
        pd_fail(&why, PD_EINCOMPAT, "no worker can run it: %s", pd_excluded_text(&r->decision, &r->decision.d_row[0], text, sizeof text));
        fail(r, run, &why);
    } else if (!run->none_since)
        run->none_since = now;
    return got;
}

static bool plain(const struct pd_rt_run *run) { return !run->n_tried && run->like < 0 && !run->need.local && !run->need.adapter.n; }

void pd_rt_dispatch(struct pd_router *r)
{
    if (r->dispatching) {
        r->dispatch_again = true;
        return;
    }
    if (!r->policy_known) {     /* a moment after the start: it depends on workers that have not been heard of yet */
        for (struct pd_rt_run *run = r->queue; run; run = run->next_queued)
            run->none_since = run->none_since ? run->none_since : pd_mono_us();
        pd_rt_wake(r);
        return;
    }
    r->dispatching = true;
    do {
        r->dispatch_again = false;
        int64_t now = pd_mono_us();
        enum pd_outcome got, others = PD_CHOSEN;        /* what every plain run gets from now on */
        for (struct pd_rt_run *run = r->queue, *next; run; run = next) {
            next = run->next_queued;
            if (plain(run) && others == PD_WAIT_ROOM)
                continue;
            if (plain(run) && others == PD_WAIT_WORKER) {
                run->none_since = run->none_since ? run->none_since : now;
                continue;
            }
            bool is_plain = plain(run);
            got = try_route(r, run, now);
            if (is_plain && (got == PD_WAIT_ROOM || got == PD_WAIT_WORKER))
                others = got;
        }
    } while (r->dispatch_again);
    r->dispatching = false;
    pd_rt_wake(r);
}

int pd_rt_begin(struct pd_router *r, struct pd_rt_run *run, struct pd_err *e)
{
    int rc = pd_keyed_add(&r->runs, run, run->name, PD_RUN_LEN, e);
    if (rc < 0)
        return rc;
    r->n_runs++;
    pd_metric_set(r->m_runs, r->n_runs);
    step(r, run, PD_ST_ACCEPTED, NULL);
    enqueue(r, run, false);
    pd_rt_dispatch(r);
    return 0;
}

/* ---- records of workers ---- */

/* What the router looks at in a record, in one pass. */
struct brief { struct pd_str run, finish, mode; struct pd_bin text, ttft, e2e, logprob; int64_t choice, pos, token, total; };

static bool read_brief(const struct pd_rec *rec, struct brief *b)
{
    struct pd_iter it;
    struct pd_str key;
    struct pd_bin v;
    *b = (struct brief){ .pos = -1, .token = -1, .total = -1 };
    if (!pd_iter_open(&it, (struct pd_bin){ rec->p, rec->n }, PD_T_MAP))
        return false;
    while (pd_iter_pair(&it, &key, &v)) {
        if (!key.p || key.n < 3)
            continue;
        switch (key.p[0]) {
        case 'r': if (pd_str_eq(key, "run")) pd_get_str(v, &b->run); break;
        case 'p': if (pd_str_eq(key, "pos")) pd_get_int(v, &b->pos); break;
        case 't':
            if (pd_str_eq(key, "token"))
                pd_get_int(v, &b->token);
            else if (pd_str_eq(key, "text"))
                b->text = v;
            else if (pd_str_eq(key, "ttft_ms"))
                b->ttft = v;
            break;
        case 'c':
            if (pd_str_eq(key, "choice"))
                pd_get_int(v, &b->choice);
            else if (pd_str_eq(key, "completion_tokens"))
                pd_get_int(v, &b->total);
            break;
        case 'e': if (pd_str_eq(key, "e2e_ms")) b->e2e = v; break;
        case 'l': if (pd_str_eq(key, "logprob")) b->logprob = v; break;
        case 'm': if (pd_str_eq(key, "mode")) pd_get_str(v, &b->mode); break;
        case 'f': if (pd_str_eq(key, "finish_reason")) pd_get_str(v, &b->finish); break;
        }
    }
    return b->run.p != NULL;
}

/* The first token of a run is here. */
static void first_seen(struct pd_router *r, struct pd_rt_run *run)
{
    if (run->t_first)
        return;
    run->t_first = pd_mono_us();
    pd_metric_observe(r->m_ttft, run->t_first - run->t_accept);
}

/* A token record goes out. */
static void deliver(struct pd_router *r, struct pd_rt_run *run, uint32_t choice, const uint8_t *rec, size_t n)
{
    struct pd_rt_choice *c = &run->choice[choice];
    if (streams(run)) {
        if (!c->told) {         /* also of what went before, for who has joined since */
            step_tokens(r, run, PD_ST_STREAMING, choice, 0, c->sent, NULL);
            c->told = c->sent;
        }
        run->delivered = true;
    }
    pd_rt_put_all(r, run, rec, n, true);
    pd_rt_key_log(r, run, rec, n, true);
}

static double number_of(struct pd_bin v)
{
    double x = 0;
    return v.p && pd_get_float(v, &x) ? x : 0;
}

/* The record with another text. */
static int with_text(const struct pd_rec *rec, struct pd_bin text, const struct pd_buf *before, struct pd_buf *out, struct pd_err *e)
{
    struct pd_packer k;
    struct pd_str s;
    if (!pd_get_str(text, &s))
        return pd_buf_add(out, rec->p, rec->n, e);
    int rc = pd_buf_add(out, rec->p, (size_t)(text.p - rec->p), e);
    pd_pack_init(&k, out, e);
    k.rc = rc;
    msgpack_pack_str(&k.pk, before->n + s.n);
    msgpack_pack_str_body(&k.pk, before->p, before->n);
    msgpack_pack_str_body(&k.pk, s.p, s.n);
    return k.rc ? k.rc : pd_buf_add(out, text.p + text.n, (size_t)(rec->p + rec->n - text.p - text.n), e);
}

static void on_token(struct pd_router *r, struct pd_rt_run *run, const struct pd_rec *rec, const struct brief *b)
{
    struct pd_str s = { NULL, 0 };
    struct pd_err e;
    if (b->choice < 0 || b->choice >= run->n || b->pos < 0 || b->token < 0 || b->token > INT32_MAX)
        return;
    struct pd_rt_choice *c = &run->choice[b->choice];
    int32_t id = (int32_t)b->token;
    if (!run->sign && run->p && !run->p_done)   /* did it without the KV, or is that answer on its way? */
        run->doubt_us = pd_mono_us() + PD_RT_DOUBT_US;
    run->sign = true;
    if (c->done)
        return;
    if (b->text.p)
        pd_get_str(b->text, &s);
    if (b->pos < c->sent) {     /* went out before: early, or by the worker that died */
        if (b->pos == 0 && c->sent == 1 && run->early && s.n) {
            pd_buf_add(&c->carry, s.p, s.n, NULL);
            pd_buf_add(&c->text, s.p, s.n, NULL);
        }
        return;
    }
    if (b->pos > c->sent) {
        char why[200];
        snprintf(why, sizeof why, "decode worker %.80s sent position %" PRId64 " where %u is next", name_of(run->d), b->pos, c->sent);
        send_cancel(run->d, run, why);
        d_lost(r, run, why, true);
        return;
    }
    first_seen(r, run);
    float logprob = (float)number_of(b->logprob);
    if (pd_buf_add(&c->tokens, &id, sizeof id, &e) < 0 || (s.n && pd_buf_add(&c->text, s.p, s.n, &e) < 0) ||
        (run->logprobs && pd_buf_add(&c->logprobs, &logprob, sizeof logprob, &e) < 0)) {
        fail(r, run, &e);
        return;
    }
    c->sent++;
    if (c->carry.n) {
        struct pd_buf out = { 0 };
        if (with_text(rec, b->text, &c->carry, &out, &e) == 0)
            deliver(r, run, (uint32_t)b->choice, out.p, out.n);
        pd_buf_free(&out);
        c->carry.n = 0;
    } else
        deliver(r, run, (uint32_t)b->choice, rec->p, rec->n);
}

static void put_ms(struct pd_buf *b, const struct pd_rec *rec, struct pd_bin v, double ms)
{
    uint64_t bits;
    if (!v.p || v.n != 9 || v.p[0] != 0xcb)     /* null, or not as we write it */
        return;
    memcpy(&bits, &ms, sizeof bits);
    pd_put_be64(b->p + (v.p - rec->p) + 1, bits);
}

/* The result of a run that has moved: whoever went on with it does not know the logprobs of the tokens that came before. */
static int with_logprobs(const struct pd_rt_run *run, const struct pd_rec *rec, struct pd_buf *out, struct pd_err *e)
{
    struct pd_arena mem = { 0 };
    struct pd_result res;
    float *all = NULL;
    int rc = pd_result_decode(rec->p, rec->n, &mem, &res, e);
    if (rc == 0 && res.logprobs && res.choice < run->n) {
        const struct pd_buf *kept = &run->choice[res.choice].logprobs;
        uint32_t n = (uint32_t)(kept->n / sizeof *all) < res.n_tokens ? (uint32_t)(kept->n / sizeof *all) : res.n_tokens;
        if (!(all = pd_arena_dup(&mem, res.logprobs, res.n_tokens * sizeof *all, e)))
            rc = PD_ENOMEM;
        else {
            memcpy(all, kept->p ? kept->p : (const uint8_t *)"", n * sizeof *all);
            res.logprobs = all;
        }
    }
    rc = rc ? rc : pd_result_encode(&res, out, e);
    pd_arena_free(&mem);
    return rc;
}

static void on_result(struct pd_router *r, struct pd_rt_run *run, const struct pd_rec *rec, const struct brief *b)
{
    struct pd_err e;
    int64_t now = pd_mono_us();
    if (b->choice < 0 || b->choice >= run->n || run->choice[b->choice].done)
        return;
    struct pd_rt_choice *c = &run->choice[b->choice];
    bool error = pd_str_eq(b->finish, "error"), cancelled = pd_str_eq(b->finish, "cancelled");
    c->done = true;
    c->total = b->total > 0 && b->total < INT32_MAX ? (uint32_t)b->total : 0;
    run->n_done++;
    run->failed |= error;
    run->cancelled |= cancelled;
    if (pd_str_eq(b->mode, "remote") && !error && !cancelled)     /* prefill has done its part, whether its answer was read yet or not */
        release_p(run, NULL);
    if (!error && !cancelled && c->told && c->total != c->sent)
        pd_warn("run %s: decode worker %s sent %u tokens and tells of %u", run->name, name_of(run->d), c->sent, c->total);
    size_t from = run->held.n;
    if (pd_buf_add(&run->held, rec->p, rec->n, &e) < 0) {
        c->done = false;
        fail(r, run, &e);
        return;
    }
    /* The client's times: from its request to now, whatever was tried before and however long it waited. */
    struct pd_buf at = { run->held.p + from, rec->n, rec->n };
    double before = (double)(run->t_sent - run->t_accept) / 1e3;
    put_ms(&at, rec, b->e2e, (double)(now - run->t_accept) / 1e3);
    put_ms(&at, rec, b->ttft, run->t_first ? (double)(run->t_first - run->t_accept) / 1e3 : number_of(b->ttft) + before);
    enum pd_state_id state = run->failed ? PD_ST_FAILED : run->cancelled ? PD_ST_CANCELLED : PD_ST_COMPLETED;
    bool over = run->n_done == run->n;
    if (!run->delivered && !over)
        return;
    if (over)
        trace_end(r, run, state, run->failed ? text_of(&run->why) : run->cancelled ? run->cancel_cause : NULL);
    run->delivered = true;
    pd_rt_put_all(r, run, run->held.p, run->held.n, false);
    pd_rt_key_log(r, run, run->held.p, run->held.n, false);
    run->held.n = 0;
    if (over)
        end_run(r, run, state);
}

/* The first token out of prefill's descriptor, before anybody has verified the KV. Its text is not known here: it goes out with the next one. */
static void put_early(struct pd_router *r, struct pd_rt_run *run, const struct pd_rec *rec)
{
    struct pd_arena mem = { 0 };
    struct pd_kvdesc d;
    struct pd_err e;
    if (pd_kvdesc_decode(rec->p, rec->n, &mem, &d, &e) == 0 && d.n_first == run->n) {
        bool told = false;
        for (uint32_t i = 0; i < run->n; i++) {
            struct pd_rt_choice *c = &run->choice[i];
            struct pd_token t = { .choice = i, .token = d.first[i].token, .text = { "", 0 }, .has_logprob = run->logprobs,
                                  .logprob = d.first[i].logprob, .top = d.first[i].top, .n_top = d.first[i].n_top, .t_us = pd_mono_us() - run->t_accept };
            struct pd_buf b = { 0 };
            memcpy(t.run, run->name, sizeof t.run);
            if (c->sent || pd_token_encode(&t, &b, &e) < 0 || pd_buf_add(&c->tokens, &t.token, sizeof t.token, &e) < 0 ||
                (run->logprobs && pd_buf_add(&c->logprobs, &t.logprob, sizeof t.logprob, &e) < 0)) {
                pd_buf_free(&b);
                continue;
            }
            if (!told)
                step(r, run, PD_ST_FIRST_TOKEN_EARLY, NULL);
            told = true;
            first_seen(r, run);
            c->sent = 1;
            deliver(r, run, i, b.p, b.n);
            pd_buf_free(&b);
        }
    }
    pd_arena_free(&mem);
}

static void on_error(struct pd_router *r, struct pd_rt_run *run, struct pd_rt_worker *w, const struct pd_rec *rec)
{
    struct pd_arena mem = { 0 };
    struct pd_error_rec er = { 0 };
    struct pd_err e;
    char why[300];
    if (pd_error_decode(rec->p, rec->n, &mem, &er, &e) < 0)
        snprintf(why, sizeof why, "%.280s", e.msg);
    else
        snprintf(why, sizeof why, "%.280s", er.message.p ? er.message.p : "");
    bool again = !strcmp(er.action, "reroute") || !strcmp(er.action, "retry");
    bool drains = !strcmp(er.action, "reroute"), ours = !strcmp(er.class_, pd_code_name(PD_ECANCEL)) && !run->cancelling;
    pd_arena_free(&mem);
    if (w == run->p && w != run->d) {
        if (ours)               /* the answer to our cancel of an attempt before */
            return;
        if (!run->p_done)
            p_lost(r, run, "prefill_failed", why, again);
        else
            p_lost_late(r, run, "prefill_failed", why);
    } else if (again && !run->cancelling)
        d_lost(r, run, why, !drains);
    else {
        set_text(&run->why, why);
        run->failed = true;
        pd_error("run %s: %s: %s", run->name, name_of(w), why);
        pd_rt_put_all(r, run, rec->p, rec->n, false);
        pd_rt_key_log(r, run, rec->p, rec->n, false);
    }
}

/* Of this attempt, not of one before that the same worker had. */
static bool of_op(const struct pd_rt_run *run, const struct pd_rec *rec)
{
    struct pd_bin v, op;
    return pd_map_find(rec->p, rec->n, "op", &v) != 1 || !pd_get_bin(v, &op) || (op.n == sizeof run->op && !memcmp(op.p, run->op, op.n));
}

void pd_rt_record(struct pd_router *r, struct pd_rt_worker *w, const struct pd_rec *rec)
{
    struct brief b;
    struct pd_rt_run *run = read_brief(rec, &b) ? pd_rt_find(r, b.run.p, b.run.n) : NULL;
    bool from_d = run && run->d == w, from_p = run && run->p == w;
    if (!from_d && !from_p) {   /* of a run that is over, or was given to another */
        pd_metric_add(r->m_dropped, 1);
        return;
    }
    if (rec->kind == PD_K_TOKEN && from_d)
        on_token(r, run, rec, &b);
    else if (rec->kind == PD_K_RESULT && from_d && run->migrations && run->logprobs) {
        struct pd_buf mended = { 0 };
        struct pd_err e;
        struct pd_rec whole = *rec;
        if (with_logprobs(run, rec, &mended, &e) == 0) {
            whole.p = mended.p;
            whole.n = mended.n;
            read_brief(&whole, &b);
        }
        on_result(r, run, &whole, &b);
        pd_buf_free(&mended);
    } else if (rec->kind == PD_K_RESULT && from_d)
        on_result(r, run, rec, &b);
    else if (rec->kind == PD_K_ERROR)
        on_error(r, run, w, rec);
    else if (rec->kind == PD_K_KV && from_p && !run->p_done && of_op(run, rec)) {
        pd_member_give_back(run->p->m, run->p_share);
        run->p_done = true;
        if (run->early && !run->sign && !run->cancelling)
            put_early(r, run, rec);
    } else
        pd_metric_add(r->m_dropped, 1);
}

/* ---- what fails ---- */

static void remember(struct pd_rt_run *run, const struct pd_rt_worker *w)
{
    if (run->n_tried == PD_RT_TRIED)
        memmove(run->tried, run->tried + 1, sizeof *run->tried * (size_t)--run->n_tried);
    run->tried[run->n_tried++] = (struct pd_tried){ w->m, w->m->life };
}

/* Nothing has gone out: all of it is done again. */
static void start_over(struct pd_router *r, struct pd_rt_run *run)
{
    for (uint32_t i = 0; i < run->n; i++) {
        struct pd_rt_choice *c = &run->choice[i];
        c->sent = c->total = 0;
        c->done = false;
        c->tokens.n = c->text.n = c->logprobs.n = c->carry.n = 0;
    }
    run->n_done = 0;
    run->failed = run->cancelled = false;
    run->held.n = 0;
    run->t_first = 0;
    pd_rt_key_restart(r, run);
}

/* Its decode worker will not end it. */
static void d_lost(struct pd_router *r, struct pd_rt_run *run, const char *why, bool counts)
{
    struct pd_rt_worker *w = run->d;
    struct pd_err e;
    if (run->cancelling) {
        release_p(run, run->cancel_cause);
        release_d(run);
        end_cancelled(r, run);
        return;
    }
    remember(run, w);
    run->failures += counts;
    if (!run->delivered && run->p)
        run->old_p = run->p;    /* what it computes or has is of use, if it is chosen again */
    release_p(run, run->delivered ? "its decode worker is lost" : NULL);
    release_d(run);
    if (run->delivered && run->n > 1)
        pd_fail(&e, PD_EFAIL, "%.300s; %u choices were streaming, and only a request with n = 1 can go on elsewhere", why, run->n);
    else if (run->delivered && run->migrations == PD_RT_MAX_MIGRATIONS)
        pd_fail(&e, PD_EFAIL, "%.300s; the run has been moved %d times already", why, PD_RT_MAX_MIGRATIONS);
    else if (!run->delivered && run->failures >= (uint32_t)r->o.attempts)
        pd_fail(&e, PD_EFAIL, "%.300s; it was the last of %d attempts", why, r->o.attempts);
    else {
        pd_warn("run %s: %s; %s", run->name, why, run->delivered ? "another worker goes on with it" : "it begins again elsewhere");
        if (run->delivered) {
            char text[360];
            run->migrations++;
            if (run->like < 0) {
                run->like = w->m->fp;
                pd_registry_hold_fp(&r->reg, run->like);
                snprintf(run->numerics, sizeof run->numerics, "%s", w->m->said.numerics.p ? w->m->said.numerics.p : "");
            }
            snprintf(text, sizeof text, "migrated: %.300s", why);
            set_text(&run->fallback, text);
            pd_metric_add(r->m_migrated, 1);
            for (uint32_t i = 0; i < run->n; i++)       /* what the first one brought is told before */
                if (run->choice[i].sent > run->choice[i].told) {
                    step_tokens(r, run, PD_ST_STREAMING, i, run->choice[i].told, run->choice[i].sent - run->choice[i].told, NULL);
                    run->choice[i].told = run->choice[i].sent;
                }
            step(r, run, PD_ST_MIGRATED, why);
        } else {
            start_over(r, run);
            pd_metric_add(r->m_retry[1], 1);
            step(r, run, PD_ST_RETRY, why);
        }
        enqueue(r, run, true);
        pd_rt_dispatch(r);
        return;
    }
    fail(r, run, &e);
}

/* Its decode worker, which waits for KV, is told what is to be done instead. */
static bool tell_d(struct pd_router *r, struct pd_rt_run *run)
{
    struct pd_routing x = routing(r, run);
    struct pd_err e;
    x.again = true;
    int rc = compose(r, run, &x, &e);
    if (rc == 0)
        pd_upstream_put(run->d->u, r->scratch.p, r->scratch.n, &e);
    x.again = false;            /* to a prefill worker it is new */
    if (rc == 0 && run->p && (rc = compose(r, run, &x, &e)) == 0)
        pd_upstream_put(run->p->u, r->scratch.p, r->scratch.n, &e);
    if (rc < 0)
        fail(r, run, &e);
    return rc == 0;
}

/* Its decode worker computes the prompt. */
static void d_alone(struct pd_router *r, struct pd_rt_run *run, const char *kind, const char *why)
{
    struct pd_share was = run->d_share;
    pd_warn("run %s: %s; %s computes its prompt", run->name, why, name_of(run->d));
    falls_back(r, run, kind, why);
    run->mode = PD_MODE_LOCAL;
    run->early = false;
    pd_metric_add(r->m_modes[PD_MODE_LOCAL], 1);
    run->d_share.prefill_tokens = run->need.prompt_tokens;
    run->d->m->own.prefill_tokens += run->d_share.prefill_tokens - was.prefill_tokens;
    tell_d(r, run);
}

/* No KV will come from its prefill worker. another: a second one may be asked. */
static void p_lost(struct pd_router *r, struct pd_rt_run *run, const char *kind, const char *why, bool another)
{
    int64_t now = pd_mono_us();
    remember(run, run->p);
    release_p(run, NULL);
    if (run->sign || run->cancelling || !run->d)        /* it does without already */
        return;
    if (another && run->p_tries < 2) {
        struct pd_need q = need_of(r, run, now);
        q.d = run->d->m;
        pd_decide(&r->reg, &q, &r->decision);
        if (r->decision.outcome == PD_CHOSEN) {
            pd_warn("run %s: %s; %s computes its prompt", run->name, why, pd_member_name(r->decision.p));
            run->p = r->decision.p->user;
            run->p_done = false;
            run->p_tries++;
            run->attempt++;
            run->p_share = pd_share_of(&run->need, run->p->m, true, false);
            pd_member_take(run->p->m, run->p_share);
            pd_metric_add(r->m_retry[0], 1);
            step(r, run, PD_ST_RETRY, why);
            step(r, run, PD_ST_ROUTE_SELECTED, NULL);
            note_route(r, run, "another prefill worker", now);
            tell_d(r, run);
            return;
        }
    }
    d_alone(r, run, kind, why);
}

/* Its prefill worker is gone, or has failed, after it had published. Whether the KV is at its decode worker is known there alone: one that still waits is to
 * compute, one that does not passes this over. */
static void p_lost_late(struct pd_router *r, struct pd_rt_run *run, const char *kind, const char *why)
{
    enum pd_mode was = run->mode;
    char text[360];
    run->p = NULL;
    if (run->sign || run->n_done || run->cancelling || !run->d)
        return;
    snprintf(text, sizeof text, "%s: %.300s", kind, why);
    set_text(&run->fallback, text);
    run->mode = PD_MODE_LOCAL;
    if (!tell_d(r, run))
        return;
    run->mode = was;
    run->fallback.n = 0;
}

void pd_rt_down(struct pd_router *r, struct pd_rt_worker *w, const struct pd_err *why)
{
    char text[400];
    bool outer = begin_walk(r), drains = w->draining || (!why && w->m->known && strcmp(w->m->said.state, "ready"));
    for (struct pd_node *p = r->runs.first, *next; p; p = next) {
        struct pd_rt_run *run = (struct pd_rt_run *)p;
        next = p->next;
        if (run->old_p == w)
            run->old_p = NULL;
        if (run->d == w) {
            snprintf(text, sizeof text, "decode worker %.100s is gone (%.200s)", name_of(w), why ? why->msg : "it closed the connection");
            d_lost(r, run, text, !drains);
        } else if (run->p == w) {
            snprintf(text, sizeof text, "prefill worker %.100s is gone (%.200s)", name_of(w), why ? why->msg : "it closed the connection");
            run->p_done ? p_lost_late(r, run, "prefill_worker_gone", text) : p_lost(r, run, "prefill_worker_gone", text, true);
        }
    }
    end_walk(r, outer);
}

void pd_rt_cancel(struct pd_router *r, struct pd_rt_run *run, const char *cause)
{
    if (run->cancelling)
        return;
    run->cancelling = true;
    run->cancel_cause = cause;
    run->cancel_us = pd_mono_us() + PD_RT_CANCEL_US;
    if (!run->d) {
        end_cancelled(r, run);
        return;
    }
    send_cancel(run->d, run, cause);
    release_p(run, cause);
    pd_rt_wake(r);
}

/* ---- time ---- */

static void out_of_time(struct pd_router *r, struct pd_rt_run *run, const char *what, int64_t us, int64_t now)
{
    struct pd_err why;
    if (run->prev_queued && run->none_since) {
        block(r, run, now);
        return;
    }
    pd_fail(&why, PD_ETIME, "%s of %.3f s has passed %s", what, (double)us / 1e6,
            run->prev_queued ? "while it waited for a worker with room" : run->t_first ? "while it was decoded" : "before its first token");
    fail(r, run, &why);
}

void pd_rt_sweep(struct pd_router *r, int64_t now)
{
    bool outer = begin_walk(r);
    for (struct pd_node *p = r->runs.first, *next; p; p = next) {
        struct pd_rt_run *run = (struct pd_rt_run *)p;
        next = p->next;
        bool waits = run->prev_queued != NULL;
        int64_t grace = waits ? 0 : PD_RT_GRACE_US;     /* its worker has the same limits, and knows more of what there is */
        if (run->p && !run->p_done && run->sign && now >= run->doubt_us)
            release_p(run, "its decode worker went on without it");
        if (run->cancelling && now >= run->cancel_us)
            end_cancelled(r, run);
        else if (run->deadline_us && now >= run->deadline_us + grace)
            out_of_time(r, run, "its deadline", run->deadline_us - run->t_accept, now);
        else if (run->queue_us && waits && !run->attempt && now >= run->t_accept + run->queue_us)
            out_of_time(r, run, "timeouts_ms.queue", run->queue_us, now);
        else if (run->first_us && !run->t_first && now >= run->t_accept + run->first_us + grace)
            out_of_time(r, run, "timeouts_ms.first_token", run->first_us, now);
        else if (waits && run->none_since && now - run->none_since >= r->o.wait_us)
            block(r, run, now);
    }
    end_walk(r, outer);
}

void pd_rt_end_all(struct pd_router *r)
{
    while (r->runs.first) {
        struct pd_rt_run *run = (struct pd_rt_run *)r->runs.first;
        trace_end(r, run, PD_ST_FAILED, "the router was stopped");
        pd_keyed_remove(&r->runs, run);
        if (run->key)
            run->key->run = NULL;
        pd_rt_run_free(r, run);
    }
}
