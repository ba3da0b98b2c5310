#include "../base/clock.h"
#include "../base/log.h"
#include "../wire/value.h"
#include "giver.h"
#include "link.h"
#include "runner.h"

/* Turns of 20 ms in which nothing could run for want of blocks, before KV that is on its way here gives up its own; and before leased KV does. */
enum { STUCK_TURNS = 5, STUCK_LEASE_TURNS = 50 };

struct pd_desk_run *pd_worker_next(const struct pd_worker *w, const struct pd_side *side, const struct pd_desk_run *r)
{
    struct pd_desk_run *next = r ? (struct pd_desk_run *)r->node.next : pd_desk_first(w->desk);
    while (next && ((struct pd_side_run *)next)->side != side)
        next = (struct pd_desk_run *)next->node.next;
    return next;
}

/* ---- the compute thread ---- */

static void tell_load(void *ctx)
{
    struct pd_worker *w = ctx;
    if (w->runner)
        pd_runner_after(w->runner);
    struct pd_batch_stats b = pd_batch_stats(w->batch);
    struct pd_pool_stats p = pd_pool_stats(w->rt->pool);
    atomic_store(&w->prompt_left, b.prompt_left);
    atomic_store(&w->kv_tokens, b.kv_tokens);
    atomic_store(&w->waiting, b.waiting);
    atomic_store(&w->to_answer, b.seqs - b.to_give);
    pd_metric_set(w->m_seqs, b.seqs);
    pd_metric_set(w->m_rows[0], (int64_t)b.prompt_rows);
    pd_metric_set(w->m_rows[1], (int64_t)b.decode_rows);
    pd_metric_set(w->m_cached, (int64_t)b.cached_rows);
    pd_metric_set(w->m_steps, (int64_t)b.steps);
    pd_metric_set(w->m_preempted, (int64_t)b.preemptions);
    pd_metric_set(w->m_blocks[0], p.used);
    pd_metric_set(w->m_blocks[1], (int64_t)p.max - p.used - p.cached);
    pd_metric_set(w->m_blocks[2], p.cached);
}

static void spare(void *ctx) { pd_pool_ahead(((struct pd_worker *)ctx)->rt->pool); }
static bool is_busy(void *ctx) { return pd_batch_busy(((struct pd_worker *)ctx)->batch); }

/* One step. Where nothing can run for want of blocks, others hold them, who may be asked for them: that is the loop's. */
static bool turn(void *ctx)
{
    struct pd_worker *w = ctx;
    struct pd_err e;
    int rows = pd_batch_step(w->batch, &e);
    if (rows < 0 && w->runner)
        pd_runner_failed(w->runner, &e);
    else if (rows < 0)
        pd_error("all runs in hand fail: %s", e.msg);
    if (rows || !pd_batch_busy(w->batch)) {
        atomic_store(&w->stuck_turns, 0);
        return true;
    }
    atomic_fetch_add(&w->stuck_turns, 1);
    if (!atomic_exchange(&w->is_stuck, true))
        pd_loop_post(pd_daemon_loop(w->d), &w->stuck);
    return false;
}

static void fail_oldest(void *ctx)
{
    struct pd_worker *w = ctx;
    if (atomic_exchange(&w->stuck_turns, 0) >= STUCK_TURNS)
        pd_batch_fail_oldest(w->batch);         /* it has outgrown the pool */
}

/* ---- the loop: who has blocks ---- */

/* KV that nobody reads goes first, at once. Then, for what is answered here, KV that is on its way here and may yet take long; and what is read. When nobody
 * has any, the pool is too small. */
static void on_stuck(void *ctx)
{
    struct pd_worker *w = ctx;
    int turns = atomic_load(&w->stuck_turns);
    atomic_store(&w->is_stuck, false);
    if ((w->giver && pd_giver_give_up(w->giver)) || turns < STUCK_TURNS)
        return;
    bool answers = atomic_load(&w->to_answer) > 0;
    if (answers && w->runner && pd_runner_give_up_one(w->runner))
        return;
    if (w->giver && pd_giver_blocks(w->giver)) {
        if (answers && turns >= STUCK_LEASE_TURNS && pd_giver_revoke_one(w->giver))
            atomic_store(&w->stuck_turns, STUCK_TURNS);         /* the next one only if that was not enough */
        return;
    }
    if (answers || !w->runner)
        pd_desk_call(w->desk, NULL, &w->c_stuck, fail_oldest, w);
}

/* ---- the loop: runs ---- */

static int is_us(const struct pd_worker *w, const struct pd_place *p)
{
    return pd_str_eq(p->at, pd_daemon_at(w->d)) ? 2 : pd_str_eq(p->worker, w->rt->worker);
}

/* Whose request is it? NULL: p and d are one. */
static const struct pd_side *side_of(const struct pd_worker *w, const struct pd_routing *t /* or NULL */)
{
    const struct pd_side *answers = w->runner ? pd_runner_side(w->runner) : NULL, *gives = w->giver ? pd_giver_side(w->giver) : NULL;
    if (!answers || !gives)
        return answers ? answers : gives;
    int p = t && t->has_p ? is_us(w, &t->p) : 0, d = p ? is_us(w, &t->d) : 0;
    return p > d ? gives : p && p == d ? NULL : answers;
}

static int admit(void *ctx, struct pd_desk_run *d, struct pd_err *e)
{
    struct pd_worker *w = ctx;
    struct pd_side_run *r = (struct pd_side_run *)d;
    if (!(r->side = side_of(w, d->routed ? &d->route : NULL)))
        return pd_fail(e, PD_EFAIL, "route: p and d are both this worker (%.200s); send it with mode aggregated", pd_daemon_at(w->d));
    return r->side->admit(r->side->ctx, d, e);
}

static bool again(void *ctx, struct pd_desk_run *d, struct pd_client *from, const struct pd_intake *in, const struct pd_routing *route)
{
    struct pd_worker *w = ctx;
    const struct pd_side *side = ((struct pd_side_run *)d)->side;
    if (side == side_of(w, route))
        return side->again(side->ctx, d, from, in, route);
    pd_desk_cancel(w->desk, d, PD_WHY_RECORD);  /* an attempt before this one, which had us at its other end */
    return false;
}

static void refuse(void *ctx, const struct pd_request *q, const struct pd_err *why, const char *action, struct pd_buf *b)
{
    struct pd_worker *w = ctx;
    struct pd_arena mem = { 0 };
    struct pd_routing t;
    struct pd_err e;
    bool routed = q->route.p && pd_routing_decode(q->route, &mem, &t, &e) == 0;
    const struct pd_side *side = side_of(w, routed ? &t : NULL);
    side = side ? side : pd_runner_side(w->runner);
    pd_arena_free(&mem);
    side->refuse(side->ctx, q, why, action, b);
}

#define SIDE_OF(d) (((struct pd_side_run *)(d))->side)
static void on_news(void *ctx, struct pd_desk_run *d)
{
    struct pd_worker *w = ctx;
    bool over = d->over;
    if (SIDE_OF(d)->news)
        SIDE_OF(d)->news(SIDE_OF(d)->ctx, d);
    if (over && w->runner)
        pd_runner_room(w->runner);
}

static void on_cancel_run(void *ctx, struct pd_desk_run *d)
{
    (void)ctx;
    SIDE_OF(d)->cancel(SIDE_OF(d)->ctx, d);
}

static void on_freed(void *ctx, struct pd_desk_run *d)
{
    (void)ctx;
    if (SIDE_OF(d))
        SIDE_OF(d)->freed(SIDE_OF(d)->ctx, d);
}

/* ---- hooks ---- */

static bool daemon_busy(void *ctx) { return pd_desk_runs(((struct pd_worker *)ctx)->desk) > 0; }

static int on_cancel(void *ctx, const struct pd_rec *rec, const char **state, struct pd_err *e)
{
    return pd_desk_on_cancel(((struct pd_worker *)ctx)->desk, rec, state, e);
}

static int on_verify(void *ctx, struct pd_conn *c, struct pd_str run, struct pd_err *e)
{
    struct pd_worker *w = ctx;
    struct pd_desk_run *d = pd_desk_find(w->desk, run.p, run.n);
    if (d)
        return SIDE_OF(d)->verify(SIDE_OF(d)->ctx, c, d, e);
    return w->runner ? pd_runner_verify_past(w->runner, c, run, e) : pd_fail(e, PD_EFAIL, "run %.*s is unknown here: it is not in hand", (int)run.n, run.p);
}

static void ledger(void *ctx, pd_ledger_fn *put, void *to)
{
    struct pd_worker *w = ctx;
    struct pd_pool_stats p = pd_pool_stats(w->rt->pool);
    put(to, "runs", pd_desk_runs(w->desk));
    put(to, "runs_most", pd_desk_max(w->desk));
    put(to, "sequences", pd_metric_value(w->m_seqs));
    put(to, "blocks_used", p.used);
    put(to, "blocks_free", (int64_t)p.max - p.used - p.cached);
    put(to, "blocks_cached", p.cached);
    put(to, "rows_cached", pd_metric_value(w->m_cached));
    put(to, "steps", pd_metric_value(w->m_steps));
    put(to, "preemptions", pd_metric_value(w->m_preempted));
    put(to, "failed", pd_metric_value(w->m_ends[PD_WK_FAILED]) + pd_metric_value(w->m_ends[PD_WK_REFUSED]));
    put(to, "cancelled", pd_metric_value(w->m_ends[PD_WK_CANCELLED]));
    put(to, "links", (w->runner ? pd_runner_links_n(w->runner) : 0) + (w->giver ? pd_giver_links_n(w->giver) : 0));
    put(to, "moves", (w->runner ? pd_runner_moves(w->runner) : 0) + (w->giver ? pd_giver_moves(w->giver) : 0));
    if (w->runner)
        pd_runner_side(w->runner)->ledger(w->runner, put, to);
    if (w->giver)
        pd_giver_side(w->giver)->ledger(w->giver, put, to);
}

/* What a heartbeat says. Prompts that have not reached the batch count by the ids that they brought: the others are not tokenised yet. */
static void load(void *ctx, struct pd_load *l)
{
    struct pd_worker *w = ctx;
    *l = (struct pd_load){ .runs = pd_desk_runs(w->desk), .seqs = (uint32_t)pd_metric_value(w->m_seqs), .waiting = atomic_load(&w->waiting),
                           .blocks_used = pd_pool_stats(w->rt->pool).used, .blocks_leased = w->giver ? pd_giver_blocks(w->giver) : 0,
                           .prefill_tokens_ahead = atomic_load(&w->prompt_left), .kv_tokens = atomic_load(&w->kv_tokens) };
    for (struct pd_side_run *r = (void *)pd_desk_first(w->desk); r; r = (void *)r->d.node.next)
        if (!atomic_load(&r->at_batch)) {
            l->waiting++;
            l->prefill_tokens_ahead += r->n_ids;
        }
}

static void on_beat(void *ctx)
{
    struct pd_worker *w = ctx;
    pd_register_beat(w->reg);
    if (w->giver)
        pd_giver_beat(w->giver);
}

static int on_follow(void *ctx, struct pd_conn *c, const struct pd_rec *rec, struct pd_err *e)
{
    return pd_register_follow(((struct pd_worker *)ctx)->reg, c, rec, e);
}

static void on_idle(void *ctx)
{
    struct pd_worker *w = ctx;
    if (w->runner && pd_daemon_state(w->d) >= PD_DRAINING)
        pd_runner_close(w->runner);
}

static void on_drain(void *ctx)
{
    struct pd_worker *w = ctx;
    pd_trace_process(w->o.trace, PD_ST_DRAINING);
    pd_register_beat(w->reg);
    if (w->runner && !pd_desk_runs(w->desk))
        pd_runner_close(w->runner);
}

static int make_metrics(struct pd_worker *w, struct pd_err *e)
{
#define COUNTER(n, h, ...) { .name = n, .help = h, .type = PD_COUNTER, __VA_ARGS__ }
#define GAUGE(n, h, ...) { .name = n, .help = h, .type = PD_GAUGE, __VA_ARGS__ }
    const struct pd_metric_about seqs = GAUGE("pd_sequences", "Sequences in the batch, waiting ones too."),
        blocks = GAUGE("pd_kv_blocks", "KV blocks of the pool.", .label = { "state" }),
        rows = COUNTER("pd_rows_total", "Rows computed, of prompts and of decoding.", .label = { "phase" }),
        cached = COUNTER("pd_cached_rows_total", "Rows not computed, as their KV was in the prefix cache."),
        steps = COUNTER("pd_steps_total", "Steps of the batch."), preempted = COUNTER("pd_preemptions_total", "Sequences put back for want of blocks."),
        ends = COUNTER("pd_runs_total", "Runs, by how they ended.", .label = { "end" });
    const struct { const struct pd_metric_about *about; struct pd_metric **to; const char *label; } t[] = {
        { &seqs, &w->m_seqs, NULL }, { &blocks, &w->m_blocks[0], "used" }, { &blocks, &w->m_blocks[1], "free" },
        { &blocks, &w->m_blocks[2], "cached" }, { &cached, &w->m_cached, NULL },
        { &rows, &w->m_rows[0], "prompt" }, { &rows, &w->m_rows[1], "decode" }, { &steps, &w->m_steps, NULL }, { &preempted, &w->m_preempted, NULL },
        { &ends, &w->m_ends[PD_WK_FAILED], "failed" }, { &ends, &w->m_ends[PD_WK_CANCELLED], "cancelled" }, { &ends, &w->m_ends[PD_WK_REFUSED], "refused" },
        { w->runner ? &ends : NULL, &w->m_ends[PD_WK_COMPLETED], "completed" }, { w->giver ? &ends : NULL, &w->m_ends[PD_WK_PUBLISHED], "published" } };
#undef COUNTER
#undef GAUGE
    int rc = 0;
    for (size_t i = 0; !rc && i < sizeof t / sizeof *t; i++)
        if (t[i].about)
            rc = pd_metric_get(pd_daemon_metrics(w->d), t[i].about, (const char *const[PD_METRIC_LABELS]){ t[i].label }, t[i].to, e);
    return rc;
}

/* ---- birth and death ---- */

static int make_sides(struct pd_worker *w, const char *role, struct pd_err *e)
{
    struct pd_batch_opts bo = pd_batch_opts_of(w->rt);
    uint32_t max = pd_pool_stats(w->rt->pool).max;
    bool gives = strcmp(role, "decode") != 0, answers = strcmp(role, "prefill") != 0;
    int rc = pd_batch_new(w->rt->model, w->rt->threads, w->rt->k, w->rt->pool, &bo, NULL, &w->batch, e);
    rc = rc || !answers ? rc : pd_runner_new(w, &w->runner, e);
    return rc || !gives ? rc : pd_giver_new(w, answers ? max / 2 : max, &w->giver, e);
}

/* Its desk, its daemon, and what its sides need of the two. */
static int make_daemon(struct pd_worker *w, struct pd_daemon_opts *dopts, struct pd_entry entry[2], struct pd_err *e)
{
    const struct pd_desk_ops ops = { .ctx = w, .run_size = pd_runner_run_size() > pd_giver_run_size() ? pd_runner_run_size() : pd_giver_run_size(),
                                     .admit = admit, .again = again, .refuse = refuse, .news = on_news, .cancel = on_cancel_run, .freed = on_freed, .idle = on_idle,
                                     .busy = is_busy, .turn = turn, .after = tell_load, .spare = spare };
    const struct pd_desk_opts ko = { .rt = w->rt, .seed = w->o.seed, .stream = w->o.stream, .max_runs = w->o.max_runs, .trace = w->o.trace };
    const struct pd_daemon_hooks hooks = { .ctx = w, .drain = on_drain, .busy = daemon_busy, .beat = on_beat, .ledger = ledger, .cancel = on_cancel,
                                           .follow = on_follow, .verify = on_verify };
    int rc = pd_desk_new(&ko, &ops, &w->desk, e);
    if (rc < 0)
        return rc;
    entry[0] = (struct pd_entry){ NULL, &pd_desk_cb, w->desk, false };
    if (w->runner)
        entry[1] = (struct pd_entry){ "hello", &pd_links_cb, pd_runner_links(w->runner), false };
    dopts->entry = entry;
    dopts->n_entry = w->runner ? 2 : 1;
    dopts->worker = w->rt->worker;
    if ((rc = pd_daemon_new(dopts, &hooks, &w->d, e)) < 0)
        return rc;
    w->readbacks.l = pd_daemon_loop(w->d);
    pd_desk_on(w->desk, w->d);
    rc = make_metrics(w, e);
    rc = rc || !w->runner ? rc : pd_runner_on(w->runner, e);
    return rc || !w->giver ? rc : pd_giver_on(w->giver, e);
}

int pd_worker_serve(struct pd_runtime *rt, const struct pd_worker_opts *o, struct pd_daemon_opts *dopts, struct pd_err *e)
{
    struct pd_entry entry[2];
    struct pd_worker *w = pd_calloc(1, sizeof *w, "a worker", e);
    if (!w)
        return PD_ENOMEM;
    *w = (struct pd_worker){ .rt = rt, .o = *o, .max_record = dopts->max_record, .readbacks.rt = rt, .stuck = { .fn = on_stuck, .ctx = w } };
    int rc = make_sides(w, dopts->role, e);
    if (rc < 0 || (rc = make_daemon(w, dopts, entry, e)) < 0)
        goto out;
    tell_load(w);
    struct pd_register_opts ro = { .rt = rt, .role = dopts->role, .prefer = o->prefer, .max_runs = pd_desk_max(w->desk), .via = o->via, .routers = o->routers,
                                   .load = load, .ctx = w };
    if ((rc = pd_register_new(w->d, &ro, &w->reg, e)) < 0)
        goto out;
    if ((rc = pd_desk_start(w->desk, e)) < 0)
        goto out;
    pd_trace_process(o->trace, PD_ST_READY);
    if ((rc = pd_daemon_ready(w->d, e)) == 0)
        rc = pd_daemon_run(w->d, e);
out:
    if (w->desk)
        pd_desk_stop(w->desk);
    for (struct pd_desk_run *d = w->desk ? pd_desk_first(w->desk) : NULL; d && rc < 0; d = (void *)d->node.next)
        SIDE_OF(d)->cut(SIDE_OF(d)->ctx, d, e);
    if (w->giver && w->desk)
        pd_giver_drop_all(w->giver);
    pd_batch_free(w->batch);
    if (w->runner)
        pd_runner_end(w->runner, rc < 0 ? e : NULL);
    if (w->giver && w->d)
        pd_giver_end(w->giver);
    pd_register_free(w->reg);
    pd_desk_free(w->desk);
    pd_runner_free(w->runner);
    pd_giver_free(w->giver);
    pd_daemon_free(w->d);
    pd_readbacks_free(&w->readbacks);
    pd_free(w);
    return rc;
}
