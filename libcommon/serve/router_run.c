/* A run from its acceptance to its end: it waits, is routed and sent, and ends; also by time. What comes back of it is router_back.c, what is done when its
 * workers
 * fail it router_fail.c. */
#include <inttypes.h>
#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../engine/reply.h"
#include "../wire/pack.h"
#include "../wire/transfer.h"
#include "router_in.h"

/* ---- small things ---- */

void pd_rt_step_tokens(struct pd_router *r, struct pd_rt_run *run, enum pd_state_id state, uint32_t choice, uint32_t pos, uint32_t tokens, const char *cause)
{
    if (!r->o.trace && !pd_log_verbose())
        return;
    pd_run_step(r->o.trace, &(struct pd_step){ .run = run->name, .where = run->has_op ? pd_mode_names[run->mode] : "route", .op = run->has_op ? run->op : NULL,
                                               .choice = choice, .pos = pos, .tokens = tokens }, state, 0, cause);
}
void pd_rt_step(struct pd_router *r, struct pd_rt_run *run, enum pd_state_id state, const char *cause) { pd_rt_step_tokens(r, run, state, 0, 0, 0, cause); }

struct pd_rt_run *pd_rt_find(struct pd_router *r, const char *name, size_t n)
{
    return n == PD_RUN_LEN ? pd_keyed_find(&r->runs, name, n) : NULL;
}

const char *pd_rt_name_of(const struct pd_rt_worker *w) { return pd_member_name(w->m); }

bool pd_rt_set_text(struct pd_buf *b, const char *text)
{
    b->n = 0;
    return pd_buf_add(b, text, strlen(text) + 1, NULL) == 0;
}

const char *pd_rt_text_of(const struct pd_buf *b) { return b->n ? (const char *)b->p : NULL; }

bool pd_rt_streams(const struct pd_rt_run *run)
{
    for (const struct pd_rt_listener *l = run->listeners; l; l = l->next_of_run)
        if (l->stream)
            return true;
    return false;
}

/* While runs are walked nothing else may end one: who would be routed now is looked at afterwards. */
bool pd_rt_begin_walk(struct pd_router *r)
{
    bool outer = !r->dispatching;
    r->dispatching = true;
    return outer;
}

void pd_rt_end_walk(struct pd_router *r, bool outer)
{
    if (!outer)
        return;
    r->dispatching = false;
    if (r->queue || r->dispatch_again)
        pd_rt_dispatch(r);
}

/* ---- queue ---- */

/* A client that is in the middle of its answer does not wait behind those that have none yet. */
static bool goes_before(const struct pd_rt_run *a, const struct pd_rt_run *b)
{
    return a->delivered != b->delivered ? a->delivered : a->age < b->age;
}

void pd_rt_enqueue(struct pd_router *r, struct pd_rt_run *run)
{
    struct pd_rt_run *after = r->queue_last;
    while (after && goes_before(run, after))
        after = after->prev_queued;
    run->prev_queued = after;
    run->next_queued = after ? after->next_queued : r->queue;
    *(after ? &after->next_queued : &r->queue) = run;
    *(run->next_queued ? &run->next_queued->prev_queued : &r->queue_last) = run;
    run->queued = true;
    pd_metric_set(r->m_queue, ++r->n_queued);
}

static void dequeue(struct pd_router *r, struct pd_rt_run *run)
{
    if (!run->queued)
        return;
    *(run->prev_queued ? &run->prev_queued->next_queued : &r->queue) = run->next_queued;
    *(run->next_queued ? &run->next_queued->prev_queued : &r->queue_last) = run->prev_queued;
    run->queued = false;
    pd_metric_set(r->m_queue, --r->n_queued);
}

/* ---- what is sent to workers ---- */

static struct pd_place place_of(const struct pd_rt_worker *w)
{
    const struct pd_member *m = w->m;
    struct pd_str at = { m->at, strlen(m->at) };
    return (struct pd_place){ { pd_rt_name_of(w), strlen(pd_rt_name_of(w)) }, m->said.listen.p ? m->said.listen : at };
}

static int64_t ms_left(int64_t until, int64_t now) { return until - now < 2000 ? 1 : (until - now) / 1000; }

/* What is left of its timeouts_ms: those that count from acceptance have run on here, and one that was sent before has been begun, as far as is known. */
static void pack_timeouts(const struct pd_rt_run *run, int64_t now, struct pd_packer *k)
{
    struct pd_buf pairs = { 0 };
    struct pd_packer to;
    struct pd_iter it;
    struct pd_str stage;
    struct pd_bin v;
    uint32_t n = 0;
    pd_pack_init(&to, &pairs, k->e);
    pd_iter_open(&it, (struct pd_bin){ run->timeouts.p, run->timeouts.n }, PD_T_MAP);
    while (pd_iter_pair(&it, &stage, &v)) {
        bool queue = pd_str_eq(stage, "queue"), first = pd_str_eq(stage, "first_token");
        if ((queue && run->attempt > 1) || (first && run->t_first))
            continue;
        n++;
        pd_pack_str(&to, stage);
        if ((queue && run->queue_us) || (first && run->first_us))
            msgpack_pack_int64(&to.pk, ms_left(run->t_accept + (queue ? run->queue_us : run->first_us), now));
        else
            pd_pack_raw(&to, v.p, v.n);
    }
    pd_pack_text(k, "timeouts_ms");
    msgpack_pack_map(&k->pk, n);
    pd_pack_raw(k, pairs.p, pairs.n);
    k->rc = k->rc ? k->rc : to.rc;
    pd_buf_free(&pairs);
}

/* The request with this route, into r->scratch. */
int pd_rt_compose(struct pd_router *r, struct pd_rt_run *run, const struct pd_routing *route, struct pd_err *e)
{
    struct pd_buf *b = &r->scratch;
    const struct pd_rt_body *body = pd_rt_body_for(run);
    bool own_token = r->paths.kept && !run->has_token;
    uint32_t pairs = body->pairs + 2 + (run->deadline_us > 0) + (run->timeouts.n > 0) + own_token;
    int64_t now = pd_mono_us();
    uint8_t head[3] = { 0xde, (uint8_t)(pairs >> 8), (uint8_t)pairs };
    struct pd_packer k;
    b->n = 0;
    int rc = pd_buf_add(b, head, sizeof head, e);
    if (rc || (rc = pd_buf_add(b, body->b.p, body->b.n, e)))
        return rc;
    pd_pack_init(&k, b, e);
    pd_pack_text(&k, "stream");
    run->stream_up ? msgpack_pack_true(&k.pk) : msgpack_pack_false(&k.pk);
    if (run->deadline_us) {     /* what is left of it */
        pd_pack_text(&k, "deadline_ms");
        msgpack_pack_int64(&k.pk, ms_left(run->deadline_us, now));
    }
    if (run->timeouts.n)
        pack_timeouts(run, now, &k);
    if (own_token) {
        pd_pack_text(&k, "cancel_token");
        pd_pack_bin(&k, run->own_token, sizeof run->own_token);
    }
    pd_pack_text(&k, "route");
    return k.rc ? k.rc : pd_routing_encode(route, b, e);
}

/* What was composed last. */
void pd_rt_send(struct pd_router *r, struct pd_rt_worker *w)
{
    struct pd_err e;
    pd_upstream_put(w->u, r->scratch.p, r->scratch.n, &e);     /* a connection that fails now ends, and `down` does the rest */
    w->m->behind = pd_upstream_full(w->u);
    w->brought = true;
}

void pd_rt_send_cancel(struct pd_rt_worker *w, const struct pd_rt_run *run, const char *cause)
{
    struct pd_cancel c = { .cause = { cause, strlen(cause) } };
    struct pd_buf b = { 0 };
    struct pd_err e;
    memcpy(c.run, run->name, sizeof c.run);
    if (w->brought && pd_cancel_encode(&c, &b, &e) == 0)
        pd_upstream_put(w->u, b.p, b.n, &e);    /* lost with the connection, as the run is then */
    pd_buf_free(&b);
}

void pd_rt_release_d(struct pd_rt_run *run)
{
    if (!run->d)
        return;
    pd_rt_fall_over(run->d->r, run, false);
    run->fall.booked = false;
    pd_member_give_back(run->d->m, run->d_share);
    run->d = NULL;
}

void pd_rt_release_p(struct pd_rt_run *run, const char *cancel)
{
    if (!run->p)
        return;
    pd_member_give_back(run->p->m, run->p_share);
    run->p_share = (struct pd_share){ 0 };
    if (!run->p_done && cancel)
        pd_rt_send_cancel(run->p, run, cancel);
    run->p = NULL;
}

/* The prefill worker of an attempt before, unless it is this one's too. */
static void leave_old_p(struct pd_rt_run *run)
{
    if (run->old_p && run->old_p != run->p)
        pd_rt_send_cancel(run->old_p, run, "its decode worker is lost");
    run->old_p = NULL;
}

/* ---- ends ---- */

void pd_rt_run_free(struct pd_router *r, struct pd_rt_run *run)
{
    struct pd_buf *bufs[] = { &run->body.b, &run->ids.b, &run->id, &run->adapter, &run->timeouts, &run->fallback, &run->held, &run->why };
    for (size_t i = 0; i < sizeof bufs / sizeof *bufs; i++)
        pd_buf_free(bufs[i]);
    for (uint32_t i = 0; run->choice && i < run->n; i++) {
        pd_buf_free(&run->choice[i].tokens);
        pd_buf_free(&run->choice[i].text);
        pd_buf_free(&run->choice[i].logprobs);
        pd_buf_free(&run->choice[i].carry);
    }
    pd_registry_let_fp(&r->reg, run->like);
    pd_rt_hashes_free(r, run);
    pd_rt_learn_run_free(run);
    pd_free(run->choice);
    pd_free(run);
}

/* Its results were put. */
void pd_rt_end_run(struct pd_router *r, struct pd_rt_run *run, enum pd_state_id state)
{
    int end = state == PD_ST_COMPLETED ? 0 : state == PD_ST_FAILED ? 1 : state == PD_ST_CANCELLED ? 2 : 3;
    pd_metric_add(r->m_ends[end], 1);
    pd_metric_observe(r->m_e2e, pd_mono_us() - run->t_accept);
    dequeue(r, run);
    pd_rt_learn_end(r, run, state == PD_ST_COMPLETED ? "stop" : state == PD_ST_CANCELLED ? "cancelled" : state == PD_ST_BLOCKED ? "blocked" : "error");
    pd_rt_release_p(run, "the run is over");
    pd_rt_release_d(run);
    leave_old_p(run);
    pd_rt_lent_went(r, run, PD_WENT_NOWHERE, NULL, pd_mono_us());
    pd_rt_lent_over(r, run);
    pd_rt_key_end(r, run, state == PD_ST_COMPLETED);
    pd_rt_leave(r, run);
    pd_keyed_remove(&r->runs, run);
    r->body_bytes -= run->body.b.n + run->ids.b.n;
    pd_metric_set(r->m_runs, --r->n_runs);
    pd_rt_run_free(r, run);
    pd_rt_let_read(r);
    if (r->queue)
        pd_rt_dispatch(r);
    pd_daemon_poke(r->d);
}

/* What went out, and the end, into the trace: before any of it leaves. */
void pd_rt_trace_end(struct pd_router *r, struct pd_rt_run *run, enum pd_state_id state, const char *cause)
{
    uint32_t all = 0;
    if (!r->o.trace && !pd_log_verbose())
        return;
    for (uint32_t i = 0; i < run->n; i++) {
        struct pd_rt_choice *c = &run->choice[i];
        uint32_t total = c->done && state == PD_ST_COMPLETED ? c->total : c->told ? c->sent : 0;
        all += total;
        if (total > c->told)
            pd_rt_step_tokens(r, run, PD_ST_STREAMING, i, c->told, total - c->told, NULL);
    }
    pd_rt_step_tokens(r, run, state, 0, 0, state == PD_ST_COMPLETED ? all : 0, cause);
}

/* A result of our own for a choice that will get none from a worker. */
static int own_result(struct pd_router *r, struct pd_rt_run *run, uint32_t choice, const char *finish, const struct pd_extra *extra, struct pd_buf *b,
    struct pd_err *e)
{
    struct pd_rt_choice *c = &run->choice[choice];
    bool out = run->delivered;          /* what nobody saw is not told */
    struct pd_result res = { .id = { run->id.p, run->id.n }, .choice = choice, .ttft_ms = -1, .tpot_ms = -1,
        .e2e_ms = (double)(pd_mono_us() - run->t_accept) / 1e3,
                             .kv_ms = -1, .text = { out && c->text.p ? (char *)c->text.p : "", out ? c->text.n : 0 }, .tokens = (int32_t *)(void *)c->tokens.p,
                             .n_tokens = out ? c->sent : 0, .completion_tokens = out ? c->sent : 0 };
    memcpy(res.run, run->name, sizeof res.run);
    snprintf(res.finish_reason, sizeof res.finish_reason, "%s", finish);
    snprintf(res.mode, sizeof res.mode, "%s", pd_mode_names[run->mode]);
    if (out && run->t_first)
        res.ttft_ms = (double)(run->t_first - run->t_accept) / 1e3;
    if (pd_rt_text_of(&run->fallback))
        res.fallback = (struct pd_str){ pd_rt_text_of(&run->fallback), strlen(pd_rt_text_of(&run->fallback)) };
    if (run->d)
        res.decode_worker = (struct pd_str){ pd_rt_name_of(run->d), strlen(pd_rt_name_of(run->d)) };
    if (extra)
        res.extra = *extra;
    return pd_result_encode(&res, b, e);
}

/* Ended here, not by a worker. why NULL: cancelled. */
static void end_own(struct pd_router *r, struct pd_rt_run *run, const struct pd_err *why, const char *finish, enum pd_state_id state,
    const struct pd_extra *extra)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    int rc = 0;
    if (run->d)
        pd_rt_send_cancel(run->d, run, why ? why->msg : run->cancel_cause);
    pd_rt_trace_end(r, run, state, why ? why->msg : run->cancel_cause);
    pd_rt_put_all(r, run, run->held.p, run->held.n, false);
    if (why) {
        struct pd_error_rec er = { .id = { run->id.p, run->id.n }, .code = pd_exit_status(why->code), .message = { why->msg, strlen(why->msg) } };
        memcpy(er.run, run->name, sizeof er.run);
        snprintf(er.class_, sizeof er.class_, "%s", pd_code_name(why->code));
        snprintf(er.action, sizeof er.action, "abort");
        er.retry_after_ms = run->retry_after_ms;
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
    pd_rt_end_run(r, run, state);
}

void pd_rt_fail(struct pd_router *r, struct pd_rt_run *run, const struct pd_err *why) { end_own(r, run, why, "error", PD_ST_FAILED, NULL); }
void pd_rt_end_cancelled(struct pd_router *r, struct pd_rt_run *run) { end_own(r, run, NULL, "cancelled", PD_ST_CANCELLED, NULL); }

struct pd_need pd_rt_need_of(struct pd_router *r, const struct pd_rt_run *run, int64_t now)
{
    struct pd_need q = run->need;
    q.policy = r->o.policy;
    q.policy_n = r->o.policy_n;
    q.rules = &r->o.rules;
    q.quiet = !r->o.trace;
    q.learn = &r->learning.l;
    q.seed = pd_xxh3(run->name, PD_RUN_LEN, (uint64_t)r->o.seed + run->attempt);
    q.deadline_us = run->deadline_us > now ? run->deadline_us - now : 0;
    q.early = r->o.early && run->need.max_tokens > 1 && pd_rt_streams(run);
    q.now_us = now;
    q.tried = run->tried;
    q.n_tried = run->n_tried;
    q.like = run->like;
    q.numerics = run->numerics;
    q.paths = r->paths.paths;
    q.limit = run->fall.fell && !run->delivered ? &r->paths.limit : NULL;
    return q;
}

/* Nobody may have it, and it has waited long enough: who was excluded, and why. */
static void block(struct pd_router *r, struct pd_rt_run *run, int64_t now)
{
    struct pd_buf list = { 0 }, pairs = { 0 }, line = { 0 };
    struct pd_extra extra = { 0 };
    struct pd_packer k;
    struct pd_err why, e;
    pd_rt_hits(r, run, now);
    struct pd_need need = pd_rt_need_of(r, run, now);
    pd_decide(&r->reg, &need, &r->decision);
    run->attempt++;
    pd_rt_note_route(r, run, "blocked: it has waited for as long as it may", now);
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
        pd_rt_fail(r, run, &why);
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
    uint64_t h[3] = { pd_xxh3(run->body.b.p, run->body.b.n, 0), pd_xxh3(at.p, at.n, d->m->life), run->choice[0].sent };
    pd_op_make(run->op, run->name, what, h, sizeof h);
    run->has_op = true;
}

void pd_rt_note_route(struct pd_router *r, struct pd_rt_run *run, const char *reason, int64_t now)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    if (!r->o.trace)
        return;
    struct pd_route_note note = { .run = run->name, .cause = reason, .fallback = pd_rt_text_of(&run->fallback), .op = run->op, .attempt = run->attempt,
                                  .resumed = run->delivered && !pd_rt_only_early(run) ? run->choice[0].sent : 0, .t_us = pd_wall_us(), .waited_us = now - run->t_accept };
    if (pd_decision_encode(&r->decision, &note, &b, &e) == 0)
        pd_trace_record(r->o.trace, b.p, b.n);
    pd_buf_free(&b);
}

/* Nothing went out but first tokens before their text: who goes on computes them again, and they are not sent twice. */
bool pd_rt_only_early(const struct pd_rt_run *run)
{
    for (uint32_t i = 0; i < run->n; i++)
        if (run->choice[i].sent && !run->choice[i].no_text)
            return false;
    return true;
}

struct pd_routing pd_rt_routing(struct pd_router *r, const struct pd_rt_run *run)
{
    struct pd_routing x = { .policy = { pd_policy_names[r->o.policy], strlen(pd_policy_names[r->o.policy]) }, .d = place_of(run->d), .early = run->early,
                            .waited_us = pd_mono_us() - run->t_accept };
    const char *f = pd_rt_text_of(&run->fallback);
    memcpy(x.op, run->op, sizeof x.op);
    snprintf(x.mode, sizeof x.mode, "%s", pd_mode_names[run->mode]);
    if (run->mode == PD_MODE_REMOTE) {
        x.has_p = true;
        x.p = place_of(run->p);
    } else if (f)
        x.fallback = (struct pd_str){ f, strlen(f) };
    if (run->delivered && run->migrations && !pd_rt_only_early(run)) {
        x.has_resume = true;
        x.resume = (const int32_t *)(const void *)run->choice[0].tokens.p;
        x.n_resume = run->choice[0].sent;
    }
    return x;
}

/* What the decision says is done: the worker that decodes is told first, as the other one will call it. */
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
    run->early = remote && r->o.early && run->need.max_tokens > 1 && pd_rt_streams(run);
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
    pd_rt_step(r, run, PD_ST_ROUTE_SELECTED, NULL);
    pd_rt_learn_sent(r, run, now);
    pd_rt_note_route(r, run, NULL, now);
    pd_rt_lend(r, run, now);
    struct pd_routing x = pd_rt_routing(r, run);
    if (pd_rt_compose(r, run, &x, &e) < 0) {
        pd_rt_fail(r, run, &e);
        return;
    }
    leave_old_p(run);
    pd_rt_send(r, run->d);
    pd_rt_feed_sent(r, run, run->d, now);
    if (remote) {
        pd_rt_send(r, run->p);
        pd_rt_feed_sent(r, run, run->p, now);
    }
}

/* It will be computed where it is decoded. The event is told by who does so: here, when its decode worker never heard of anything else. */
void pd_rt_falls_back(struct pd_router *r, struct pd_rt_run *run, const char *kind, const char *why)
{
    char text[360];
    snprintf(text, sizeof text, "%s: %.300s", kind, why);
    pd_rt_set_text(&run->fallback, text);
    run->need.local = run->fall.fell = true;
    run->fall.times++;
    run->fall.since_us = pd_mono_us();
    pd_metric_add(r->m_retry[2], 1);
    if (!run->d)
        pd_rt_step(r, run, PD_ST_FALLBACK, text);
}

/* Too much falls back: it is told when to come again. */
static void shed(struct pd_router *r, struct pd_rt_run *run, int64_t retry_after_us, const char *words)
{
    struct pd_err why;
    char cause[120];
    run->retry_after_ms = (retry_after_us + 999) / 1000;
    pd_fail(&why, PD_ENOWORKER, "shed: it would be computed where it is decoded (%.200s), and %s; it may be asked for again in %lld ms",
            pd_rt_text_of(&run->fallback) ? pd_rt_text_of(&run->fallback) : "", words, (long long)run->retry_after_ms);
    pd_metric_add(r->paths.m_shed, 1);
    snprintf(cause, sizeof cause, "shed: %s", words);
    run->attempt++;
    pd_rt_note_route(r, run, cause, pd_mono_us());
    end_own(r, run, &why, "shed", PD_ST_BLOCKED, NULL);
}

static void decide(struct pd_router *r, struct pd_rt_run *run, int64_t now)
{
    pd_rt_hits(r, run, now);
    struct pd_need q = pd_rt_need_of(r, run, now);
    pd_decide(&r->reg, &q, &r->decision);
}

/* May what was decided of a run that fell back be done? false: it waits, or has ended. */
static bool may_fall(struct pd_router *r, struct pd_rt_run *run, int64_t now, enum pd_outcome *got)
{
    int64_t retry;
    const char *why;
    if (*got != PD_CHOSEN && *got != PD_WAIT_ROOM)
        return true;
    switch (pd_rt_fall_judge(r, run, now, &retry, &why)) {
    case PD_LIMIT_GO: return true;
    case PD_LIMIT_WAIT: run->none_since = 0; break;
    case PD_LIMIT_SHED:
        if (!run->deadline_us || now < run->deadline_us)        /* else the next sweep says that its time is over */
            shed(r, run, retry, why);
        break;
    }
    *got = PD_NO_PREFILL;       /* says nothing about runs that have not fallen back */
    return false;
}

/* One that fell back, behind another that waits for the same: false: it is to be decided. */
static bool waits_behind(struct pd_router *r, struct pd_rt_run *run, int64_t now)
{
    int64_t retry;
    const char *words;
    if (!run->fall.fell || run->fall.at || run->delivered || !r->paths.alike_ahead)
        return false;
    run->none_since = 0;
    if (pd_rt_fall_behind(r, run, now, &retry, &words) != PD_LIMIT_SHED || (run->deadline_us && now >= run->deadline_us))
        return true;
    if (r->o.trace)
        decide(r, run, now);
    shed(r, run, retry, words);
    return true;
}

/* No prefill worker for so long that it need not be waited for: before it would be blocked, and a dispatch or two before. */
static bool no_p_long(const struct pd_router *r, const struct pd_rt_run *run, int64_t now)
{
    int64_t most = r->o.wait_us / 2 < PD_RT_NO_P_US ? r->o.wait_us / 2 : PD_RT_NO_P_US;
    return most <= 2 * PD_RT_SWEEP_US || (run->none_since && now - run->none_since >= most);
}

static enum pd_outcome try_route(struct pd_router *r, struct pd_rt_run *run, int64_t now)
{
    struct pd_err why;
    decide(r, run, now);
    if (r->decision.outcome == PD_NO_PREFILL && no_p_long(r, run, now)) {
        struct pd_buf line = { 0 };
        bool told = pd_decision_text(&r->decision, &line, &why) == 0 && pd_buf_add(&line, "", 1, &why) == 0;
        pd_rt_falls_back(r, run, "no_prefill_worker", told && line.n ? (char *)line.p : "none is there");
        pd_buf_free(&line);
        if (waits_behind(r, run, now))
            return PD_NO_PREFILL;
        decide(r, run, now);
    }
    enum pd_outcome got = r->decision.outcome;
    if (run->fall.fell && !run->fall.at && !run->delivered && !may_fall(r, run, now, &got))
        return got;
    if (got == PD_CHOSEN)
        send_run(r, run, now);
    else if (got == PD_WAIT_ROOM)
        run->none_since = 0;
    else if (got == PD_NEVER) {
        char text[300];
        pd_fail(&why, PD_EINCOMPAT, "no worker can run it: %s", pd_excluded_text(&r->decision, &r->decision.d_row[0], text, sizeof text));
        pd_rt_fail(r, run, &why);
    } else if (!run->none_since)
        run->none_since = now;
    return got;
}

static bool plain(const struct pd_rt_run *run) { return !run->n_tried && run->like < 0 && !run->need.local && !run->need.adapter.n; }

/* What was decided of a plain run holds, as long as nobody is given anything back, for those after it: of prompts that every worker could take, in whatever
 * order; of longer ones for those between two of which the same was decided. */
struct verdict { enum pd_outcome got; uint32_t lo, hi; };       /* got PD_CHOSEN: nothing yet */

/* From so many tokens on there is one that never takes it. */
static uint32_t least_context(const struct pd_router *r)
{
    uint32_t least = UINT32_MAX;
    for (const struct pd_member *m = r->reg.first; m; m = m->next) {
        const struct pd_capacity *c = &m->said.capacity;
        uint64_t most = pd_room_to_give(m) * (c->block_size ? c->block_size : 1);
        if (m->known && c->context && c->context < least)
            least = c->context;
        if (m->known && c->blocks && pd_member_can_give(m) && most < least)
            least = (uint32_t)most + 1;
    }
    return least;
}

static bool told_already(const struct pd_router *r, const struct verdict *v, struct pd_rt_run *run, int64_t now)
{
    if (v->got == PD_CHOSEN || run->need.prompt_tokens < v->lo || run->need.prompt_tokens > v->hi ||
        (v->got == PD_NO_PREFILL && no_p_long(r, run, now)))
        return false;
    run->none_since = v->got == PD_WAIT_ROOM ? 0 : run->none_since ? run->none_since : now;
    return true;
}

static void tell(struct verdict *v, enum pd_outcome got, uint32_t tokens, bool is_long)
{
    bool same = v->got == got;
    if (got != PD_WAIT_ROOM && got != PD_WAIT_WORKER && got != PD_NO_PREFILL)
        return;
    *v = (struct verdict){ got, !is_long ? 0 : same && v->lo < tokens ? v->lo : tokens, !is_long ? UINT32_MAX : same && v->hi > tokens ? v->hi : tokens };
}

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
        r->paths.tokens_ahead = r->paths.runs_ahead = 0;
        r->paths.alike_ahead = false;
        struct verdict verdict[2] = { { PD_CHOSEN, 0, 0 } };
        uint32_t least = least_context(r);
        for (struct pd_rt_run *run = r->queue, *next; run; run = next) {
            next = run->next_queued;
            uint32_t tokens = run->need.prompt_tokens;
            bool is_long = run->need.exact && tokens >= least;
            struct verdict *v = plain(run) ? &verdict[is_long] : NULL;
            if ((v && told_already(r, v, run, now)) || waits_behind(r, run, now))
                continue;
            enum pd_outcome got = try_route(r, run, now);
            if (v)
                tell(v, got, tokens, is_long);
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
    r->body_bytes += run->body.b.n + run->ids.b.n;
    pd_metric_set(r->m_runs, r->n_runs);
    pd_rt_step(r, run, PD_ST_ACCEPTED, NULL);
    pd_rt_enqueue(r, run);
    pd_rt_dispatch(r);
    return 0;
}

void pd_rt_cancel(struct pd_router *r, struct pd_rt_run *run, const char *cause)
{
    if (run->cancelling)
        return;
    run->cancelling = true;
    run->cancel_cause = cause;
    run->cancel_us = pd_mono_us() + PD_RT_CANCEL_US;
    if (!run->d) {
        pd_rt_end_cancelled(r, run);
        return;
    }
    pd_rt_send_cancel(run->d, run, cause);
    pd_rt_release_p(run, cause);
    pd_rt_wake(r);
}

/* ---- time ---- */

static void out_of_time(struct pd_router *r, struct pd_rt_run *run, const char *what, int64_t us, int64_t now)
{
    struct pd_err why;
    if (run->queued && run->none_since) {
        block(r, run, now);
        return;
    }
    pd_fail(&why, PD_ETIME, "%s of %.3f s has passed %s", what, (double)us / 1e6,
            run->queued ? "while it waited for a worker with room" : run->t_first ? "while it was decoded" : "before its first token");
    pd_rt_fail(r, run, &why);
}

void pd_rt_sweep(struct pd_router *r, int64_t now)
{
    bool outer = pd_rt_begin_walk(r);
    for (struct pd_node *p = r->runs.first, *next; p; p = next) {
        struct pd_rt_run *run = (struct pd_rt_run *)p;
        next = p->next;
        bool waits = run->queued;
        int64_t grace = waits ? 0 : PD_RT_GRACE_US;     /* its worker has the same limits, and knows more of what there is */
        if (run->told.on_path && now >= run->told.on_path_until)
            pd_rt_learn_arrived(r, run);
        if (run->p && !run->p_done && run->sign && now >= run->doubt_us)
            pd_rt_release_p(run, "its decode worker went on without it");
        if (run->cancelling && now >= run->cancel_us)
            pd_rt_end_cancelled(r, run);
        else if (run->deadline_us && now >= run->deadline_us + grace)
            out_of_time(r, run, "its deadline", run->deadline_us - run->t_accept, now);
        else if (run->queue_us && waits && !run->attempt && now >= run->t_accept + run->queue_us)
            out_of_time(r, run, "timeouts_ms.queue", run->queue_us, now);
        else if (run->first_us && !run->t_first && now >= run->t_accept + run->first_us + grace)
            out_of_time(r, run, "timeouts_ms.first_token", run->first_us, now);
        else if (waits && run->none_since && now - run->none_since >= r->o.wait_us)
            block(r, run, now);
        else if (run->told.late_us && now >= run->told.late_us)
            pd_rt_kv_late(r, run, now);
    }
    pd_rt_end_walk(r, outer);
}

void pd_rt_end_all(struct pd_router *r)
{
    while (r->runs.first) {
        struct pd_rt_run *run = (struct pd_rt_run *)r->runs.first;
        pd_rt_trace_end(r, run, PD_ST_FAILED, "the router was stopped");
        pd_keyed_remove(&r->runs, run);
        if (run->key)
            run->key->run = NULL;
        pd_rt_run_free(r, run);
    }
}
