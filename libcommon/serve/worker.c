#include <stdatomic.h>
#include <stdio.h>
#include "../base/clock.h"
#include "../base/fault.h"
#include "../base/hash.h"
#include "../base/log.h"
#include "../engine/decoding.h"
#include "../wire/value.h"
#include "desk.h"
#include "readback.h"
#include "register.h"
#include "taker.h"
#include "worker.h"

enum { PREFILL_US = 60000000, STUCK_TURNS = 5 };

struct run {
    struct pd_desk_run d;
    /* the loop's */
    struct pd_expect x;
    uint32_t n_ids;             /* of its prompt, as far as it brought ids and they are computed here: for heartbeats, while the thread has the request */
    struct pd_call c_take, c_end;
    /* handed to the thread with c_take */
    struct pd_kv_in kv; bool has_kv;
    char *fallback;
    const char *mode;
    /* the thread's */
    struct pd_dc_run *dr;
    _Atomic bool at_batch;      /* the thread has it, or had */
    uint32_t n_readbacks;       /* of it that go on: it stays until they are done. The loop's */
    struct worker *w;
};

struct worker {
    struct pd_runtime *rt;
    struct pd_worker_opts o;
    struct pd_daemon *d;
    struct pd_desk *desk;
    struct pd_taker *taker;
    struct pd_register *reg;
    struct pd_readbacks readbacks;
    struct pd_post stuck;
    struct pd_call c_stuck;
    _Atomic bool is_stuck;
    /* the thread's */
    struct pd_decoder dc;
    struct pd_decode_opts dco;
    int stuck_turns;
    _Atomic uint64_t prompt_left, kv_tokens;    /* of the batch, and how many sequences are without KV, after the last step */
    _Atomic uint32_t waiting;
    /* counted by both */
    struct pd_metric *m_seqs, *m_blocks[3], *m_rows[3], *m_steps, *m_preempted, *m_ends[4], *m_ttft, *m_tokens, *m_modes[3];
};

/* ---- the compute thread ---- */

static void on_put(void *ctx, struct pd_dc_run *dr, const uint8_t *p, size_t n)
{
    struct worker *w = ctx;
    struct run *r = dr->user;
    if (r)
        pd_desk_add(w->desk, &r->d, p, n);
}

static void on_over(void *ctx, struct pd_dc_run *dr)
{
    struct worker *w = ctx;
    struct run *r = dr->user;
    if (!r)
        return;
    for (int32_t i = 0; dr->choice && i < dr->in.req.n; i++) {
        if (dr->choice[i].t_first)
            pd_metric_observe(w->m_ttft, dr->choice[i].t_first - dr->in.t_accept);
        pd_metric_add(w->m_tokens, (int64_t)(dr->choice[i].tokens.n / sizeof(int32_t)) - dr->n_resume);
    }
    enum pd_why why = (enum pd_why)atomic_load(&r->d.cancelled);
    pd_metric_add(w->m_ends[why ? 2 : dr->told || dr->n_done < (uint32_t)dr->in.req.n ? 1 : 0], 1);
    pd_metric_add(w->m_modes[dr->mode[0] == 'r' ? 0 : dr->mode[0] == 'l' ? 1 : 2], 1);
    dr->user = NULL;
    r->dr = NULL;
    r->d.lost |= dr->lost;
    pd_desk_over(w->desk, &r->d);
}

/* Is what came the KV of just this prompt? */
static int check_kv(const struct worker *w, const struct pd_dc_run *dr, const struct pd_kvdesc *d, struct pd_err *e)
{
    if (d->n_tokens != dr->in.n_tokens || memcmp(d->token_ids, dr->in.tokens, (size_t)d->n_tokens * sizeof *d->token_ids))
        return pd_fail(e, PD_ECORRUPT, "its KV is of other tokens (%u) than the request's (%u)", d->n_tokens, dr->in.n_tokens);
    if (d->n_first != (uint32_t)dr->in.req.n)
        return pd_fail(e, PD_ECORRUPT, "its kv carries %u first tokens for %d choices", d->n_first, dr->in.req.n);
    for (uint32_t i = 0; i < d->n_first; i++)
        if (d->first[i].token < 0 || d->first[i].token >= w->rt->model->cfg.n_vocab)
            return pd_fail(e, PD_ECORRUPT, "its first token %d is outside the vocabulary of %d", d->first[i].token, w->rt->model->cfg.n_vocab);
    return 0;
}

static int say_fallback(struct pd_dc_run *dr, const char *kind, const char *words, struct pd_err *e)
{
    size_t n = strlen(kind) + strlen(words) + 3;
    dr->mode = "local";
    if (!(dr->fallback = pd_arena_alloc(&dr->in.mem, n, 1, e)))
        return PD_ENOMEM;
    snprintf(dr->fallback, n, "%s%s%s", kind, *words ? ": " : "", words);
    return 0;
}

/* Of a run that reads its KV in place. */
static bool kv_valid(void *ctx, struct pd_dc_run *dr)
{
    struct run *r = dr->user;
    struct pd_err e;
    (void)ctx;
    if (!r || !r->kv.pin || pd_pin_valid(r->kv.pin))
        return true;
    if (!dr->fallback) {
        pd_warn("run %s: lease_ended: its KV is gone while it was read in place; computing it again", r->d.name);
        say_fallback(dr, "lease_ended", "its KV was gone while it was read in place", &e);
        dr->mode = "remote";
    }
    return false;
}

static void end_cancelled(struct worker *w, struct run *r)
{
    struct pd_err why;
    pd_fail(&why, PD_ECANCEL, "%s", pd_why_text((enum pd_why)atomic_load(&r->d.cancelled)));
    pd_dc_end(&w->dc, r->dr, &why);
}

static void submit(struct worker *w, struct run *r, struct pd_dc_run *dr)
{
    struct pd_err e;
    int rc = pd_intake_tokens(w->rt, &dr->in, &e);
    rc = rc ? rc : pd_dc_make_choices(dr, w->rt->model->tok, &e);
    rc = rc < 0 || !r->fallback ? rc : say_fallback(dr, r->fallback, "", &e);
    if (rc == 0 && r->has_kv && check_kv(w, dr, &r->kv.desc, &e) < 0) {
        pd_warn("run %s: %s; recomputing %u tokens locally", r->d.name, e.msg, dr->in.n_tokens);
        struct pd_err why = e;
        pd_kv_in_put(w->rt->pool, &r->kv);
        r->has_kv = false;
        if ((rc = say_fallback(dr, "integrity", why.msg, &e)) == 0)
            pd_dc_step(&w->dc, dr, PD_ST_FALLBACK, 0, dr->fallback);
    }
    if (rc == 0 && r->d.route.has_resume && (rc = pd_dc_resume(&w->dc, dr, r->d.route.resume, r->d.route.n_resume, &e)) == 1)
        return;                 /* they were its last ones */
    if (rc < 0) {
        pd_dc_refuse(&w->dc, dr, &e);
        return;
    }
    if (atomic_load(&r->d.cancelled)) {
        end_cancelled(w, r);
        return;
    }
    uint32_t *blocks = NULL, n = 0;
    if (r->has_kv) {
        dr->desc = r->kv.desc;
        dr->remote = dr->submitted = true;
        dr->mode = "remote";
        dr->kv_bytes = r->kv.bytes;
        dr->kv_us = r->kv.us;
        dr->converted = r->kv.converted;
        dr->cached = r->kv.held_tokens;
        blocks = r->kv.blocks;
        n = r->kv.n_blocks;
        r->kv.n_blocks = 0;     /* their references go to the batch */
    }
    pd_dc_submit(&w->dc, dr, blocks, n);
}

/* A request from the loop becomes a run of the batch. */
static void take(void *ctx)
{
    struct run *r = ctx;
    struct worker *w = r->w;
    struct pd_err e;
    struct pd_dc_run *dr = pd_dc_run_new(&w->dc, &e);
    atomic_store(&r->at_batch, true);
    if (!dr) {                  /* not even a refusal: the client is closed */
        r->d.lost = true;
        pd_desk_over(w->desk, &r->d);
        return;
    }
    dr->in = r->d.in;
    r->d.in = (struct pd_intake){ 0 };
    dr->user = r;
    dr->stream = r->d.stream;
    dr->mode = r->mode;
    r->dr = dr;
    if (r->d.routed) {
        pd_dc_set_parent(dr, r->d.route.op);
        dr->waited_us = r->d.route.waited_us;
    }
    submit(w, r, dr);
}

static void end_run(void *ctx)
{
    struct run *r = ctx;
    if (r->dr)
        end_cancelled(r->w, r);
}

/* Memory ran out somewhere in the middle: which run lacks what is not known, so all in hand fail, and the process goes on. */
static void end_all(struct worker *w)
{
    struct pd_err why = w->dc.fatal;
    pd_error("all runs in hand fail: %s", why.msg);
    w->dc.fatal = (struct pd_err){ 0 };
    why.code = why.code == PD_ECANCEL ? PD_EFAIL : why.code;
    while (w->dc.head)
        pd_dc_end(&w->dc, w->dc.head, &why);
}

static void tell_load(void *ctx)
{
    struct worker *w = ctx;
    if (w->dc.fatal.code)
        end_all(w);
    struct pd_batch_stats b = pd_batch_stats(w->dc.batch);
    struct pd_pool_stats p = pd_pool_stats(w->rt->pool);
    atomic_store(&w->prompt_left, b.prompt_left);
    atomic_store(&w->kv_tokens, b.kv_tokens);
    atomic_store(&w->waiting, b.waiting);
    pd_metric_set(w->m_seqs, b.seqs);
    pd_metric_set(w->m_rows[0], (int64_t)b.prompt_rows);
    pd_metric_set(w->m_rows[1], (int64_t)b.decode_rows);
    pd_metric_set(w->m_steps, (int64_t)b.steps);
    pd_metric_set(w->m_preempted, (int64_t)b.preemptions);
    pd_metric_set(w->m_blocks[0], p.used);
    pd_metric_set(w->m_blocks[1], (int64_t)p.max - p.used - p.cached);
    pd_metric_set(w->m_blocks[2], p.cached);
    pd_metric_set(w->m_rows[2], (int64_t)b.cached_rows);
}

static void spare(void *ctx) { pd_pool_ahead(((struct worker *)ctx)->rt->pool); }
static bool is_busy(void *ctx) { return pd_batch_busy(((struct worker *)ctx)->dc.batch); }

/* One step. Where nothing can run for want of blocks, KV that is on its way holds them: it comes soon, or gives them up. */
static bool turn(void *ctx)
{
    struct worker *w = ctx;
    if (pd_dc_step_batch(&w->dc)) {
        w->stuck_turns = 0;
        return true;
    }
    if (++w->stuck_turns >= STUCK_TURNS && !atomic_exchange(&w->is_stuck, true))
        pd_loop_post(pd_daemon_loop(w->d), &w->stuck);
    return false;
}

static void fail_oldest(void *ctx)
{
    struct worker *w = ctx;
    if (w->stuck_turns >= STUCK_TURNS)
        pd_batch_fail_oldest(w->dc.batch);      /* it has outgrown the pool */
    w->stuck_turns = 0;
}

/* ---- the loop: runs ---- */

static void on_stuck(void *ctx)
{
    struct worker *w = ctx;
    atomic_store(&w->is_stuck, false);
    if (!pd_taker_give_up_one(w->taker))
        pd_desk_call(w->desk, NULL, &w->c_stuck, fail_oldest, w);
}

static void begin(struct worker *w, struct run *r, const char *mode)
{
    r->mode = mode;
    pd_desk_call(w->desk, &r->d, &r->c_take, take, r);
}

static void step_of(struct worker *w, const struct run *r, enum pd_state_id state, uint64_t bytes, const char *cause, const uint8_t *gen)
{
    struct pd_step s = { .run = r->d.name, .where = r->mode, .gen = gen, .parent = r->d.routed ? r->d.route.op : NULL };
    pd_run_step(w->o.trace, &s, state, bytes, cause);
}

static struct run *run_of(struct pd_expect *x) { return (struct run *)((char *)x - offsetof(struct run, x)); }

static void keep_text(struct run *r, const char *p, size_t n)
{
    pd_free(r->fallback);
    r->fallback = pd_strndup(p, n, NULL);
}

/* The KV will not come. */
static void on_failed(void *ctx, struct pd_expect *x, const char *kind, const struct pd_err *why)
{
    struct worker *w = ctx;
    struct run *r = run_of(x);
    char text[600];
    snprintf(text, sizeof text, "%s: %s", kind, why->msg);
    pd_warn("run %s: %s; computing it here", r->d.name, text);
    keep_text(r, text, strlen(text));
    step_of(w, r, PD_ST_FALLBACK, 0, text, NULL);
    begin(w, r, "local");
}

static void on_transfer(void *ctx, struct pd_expect *x, const struct pd_kvdesc *offer)
{
    step_of(ctx, run_of(x), PD_ST_KV_TRANSFER_STARTED, 0, NULL, offer->gen);
}

/* As memory that goes bad after the KV was verified. */
static void flip(struct pd_pool *p, uint32_t block)
{
    if (!pd_pool_is_foreign(p, block))
        pd_pool_base(p, block)[pd_pool_off(p, pd_pool_geom(p)->layers - 1, 1)] ^= 1;
}

static void on_taken(void *ctx, struct pd_expect *x, struct pd_kv_in *kv)
{
    struct worker *w = ctx;
    struct run *r = run_of(x);
    if (pd_fault("flip_held"))
        flip(w->rt->pool, kv->blocks[kv->n_blocks / 2]);
    r->kv = *kv;
    r->has_kv = true;
    r->n_ids = 0;
    step_of(w, r, PD_ST_KV_TRANSFER_COMPLETED, kv->bytes, NULL, kv->desc.gen);
    begin(w, r, "remote");
}

static bool is_known(void *ctx, const char *run) { return pd_desk_find(((struct worker *)ctx)->desk, run, PD_RUN_LEN) != NULL; }
static uint32_t reserve(void *ctx) { return (uint32_t)pd_metric_value(((struct worker *)ctx)->m_seqs); }

static int64_t timeout_us(const struct pd_request *q, const char *stage, int64_t otherwise)
{
    struct pd_bin v;
    int64_t ms;
    if (!q->timeouts_ms.p || pd_map_find(q->timeouts_ms.p, q->timeouts_ms.n, stage, &v) != 1 || !pd_get_int(v, &ms) || ms < 0 || ms > 86400000)
        return otherwise;
    return ms * 1000;
}

static int check_route(const struct pd_desk_run *d, struct pd_err *e)
{
    const struct pd_routing *t = &d->route;
    bool remote = !strcmp(t->mode, "remote");
    if (t->has_resume && remote)
        return pd_fail(e, PD_EFAIL, "route: resume goes with mode local or aggregated, not remote");
    if (t->has_resume && d->in.req.n != 1)
        return pd_fail(e, PD_EFAIL, "route: resume of a request with n %d: one choice can be resumed", d->in.req.n);
    return 0;
}

static int admit(void *ctx, struct pd_desk_run *d, struct pd_err *e)
{
    struct worker *w = ctx;
    struct run *r = (struct run *)d;
    bool remote = d->routed && !strcmp(d->route.mode, "remote"), local = d->routed && !strcmp(d->route.mode, "local");
    int rc = d->routed ? check_route(d, e) : 0;
    if (rc < 0)
        return rc;
    r->w = w;
    r->n_ids = d->in.req.n_token_ids;
    r->mode = remote ? "remote" : local ? "local" : "aggregated";
    if (d->routed && d->route.fallback.p)
        keep_text(r, d->route.fallback.p, d->route.fallback.n);
    step_of(w, r, PD_ST_ACCEPTED, 0, NULL, NULL);
    if (!remote) {
        begin(w, r, r->mode);
        return 0;
    }
    memcpy(r->x.op, d->route.op, sizeof r->x.op);
    r->x.key = (struct pd_prefix_key){ d->in.req.adapter, d->in.req.cache_salt };
    r->x.give_up = pd_mono_us() + timeout_us(&d->in.req, "prefill", PREFILL_US);
    r->x.transfer_us = timeout_us(&d->in.req, "transfer", 0);
    return pd_taker_expect(w->taker, &r->x, d->name, e);
}

static bool again(void *ctx, struct pd_desk_run *d, struct pd_client *from, const struct pd_intake *in, const struct pd_routing *route)
{
    struct worker *w = ctx;
    struct run *r = (struct run *)d;
    struct pd_err e;
    if (d->over || atomic_load(&d->cancelled))
        return false;
    if (d->client != from) {
        pd_fail(&e, PD_EFAIL, "request: run %s is in hand here for another connection", d->name);
        pd_desk_refuse(w->desk, from, &in->req, &e, "reroute");
        return true;
    }
    if (!r->x.expected)
        return true;            /* it is being computed, or decoded */
    if (strcmp(route->mode, "remote")) {
        pd_taker_forget(w->taker, &r->x, "the router says local");
        if (route->fallback.p)
            keep_text(r, route->fallback.p, route->fallback.n);
        r->mode = !strcmp(route->mode, "local") ? "local" : "aggregated";
        step_of(w, r, PD_ST_FALLBACK, 0, r->fallback ? r->fallback : "the router says so", NULL);
        begin(w, r, r->mode);
        return true;
    }
    if (memcmp(route->op, r->x.op, sizeof r->x.op)) {
        pd_taker_forget(w->taker, &r->x, "the router names another op");
        memcpy(r->x.op, route->op, sizeof r->x.op);
        memcpy(d->route.op, route->op, sizeof d->route.op);
    }
    r->x.why = (struct pd_err){ 0 };
    r->x.give_up = pd_mono_us() + timeout_us(&in->req, "prefill", PREFILL_US);
    if (!r->x.expected && pd_taker_expect(w->taker, &r->x, d->name, &e) < 0)
        begin(w, r, "local");
    pd_taker_room(w->taker);
    return true;
}

static void on_cancel_run(void *ctx, struct pd_desk_run *d)
{
    struct worker *w = ctx;
    struct run *r = (struct run *)d;
    if (r->x.expected) {
        pd_taker_forget(w->taker, &r->x, pd_why_text((enum pd_why)atomic_load(&d->cancelled)));
        begin(w, r, r->mode);   /* to its end */
    } else
        pd_desk_call(w->desk, &r->d, &r->c_end, end_run, r);
}

static void on_freed(void *ctx, struct pd_desk_run *d)
{
    struct worker *w = ctx;
    struct run *r = (struct run *)d;
    if (w->taker)
        pd_taker_forget(w->taker, &r->x, "the run is over");
    if (r->has_kv)
        pd_readback_keep(&w->readbacks, &r->kv.desc, &r->kv.mem);
    pd_kv_in_free(w->rt->pool, &r->kv);
    pd_free(r->fallback);
}

static void on_news(void *ctx, struct pd_desk_run *d)
{
    if (d->over)
        pd_taker_room(((struct worker *)ctx)->taker);
}

static void refuse(void *ctx, const struct pd_request *q, const struct pd_err *why, const char *action, struct pd_buf *b)
{
    struct worker *w = ctx;
    struct pd_err e;
    struct pd_result as = { .mode = "aggregated", .decode_worker = { w->rt->worker, strlen(w->rt->worker) } };
    pd_refusal_log(q, why);
    pd_metric_add(w->m_ends[3], 1);
    pd_refusal_encode(q, why, action, &as, b, &e);
}

/* ---- reading back ---- */

/* The thread's: the blocks of the choice that has most of it. */
static void look(void *ctx)
{
    struct pd_readback *b = ctx;
    struct run *r = b->user;
    struct pd_dc_run *dr = r->dr;
    const struct pd_seq *best = NULL;
    for (uint32_t i = 0; dr && dr->run && i < dr->run->n_seqs; i++)
        if (!best || dr->run->seq[i].n_kv > best->n_kv)
            best = &dr->run->seq[i];
    b->state = !dr ? "over" : !best || !best->n_kv ? "waiting" : best->n_kv < dr->in.n_tokens ? "filling" : "decoding";
    if (dr) {
        b->n_tokens = dr->in.n_tokens;
        b->tokens_sum = pd_xxh3(dr->in.tokens, (size_t)dr->in.n_tokens * sizeof *dr->in.tokens, 0);
        if ((b->has_gen = dr->remote))
            memcpy(b->gen, dr->desc.gen, sizeof b->gen);
        /* fallback: it is computed here again, or was */
        b->lease = !dr->remote ? "none" : !r->kv.pin ? "released" : !dr->fallback ? "reading" : !strcmp(b->state, "decoding") ? "released" : "over";
    }
    if (best)
        pd_readback_blocks(b, pd_seq_blocks(best), best->n_kv);
    pd_readback_go(b);
}

static void looked(struct pd_readback *b)
{
    struct run *r = b->user;
    if (!strcmp(b->lease, "reading") && !pd_pin_valid(r->kv.pin))
        b->lease = "over";
    if (--r->n_readbacks)
        return;
    r->d.kept = false;
    pd_desk_look(r->w->desk, &r->d);
}

static int on_verify(void *ctx, struct pd_conn *c, struct pd_str run, struct pd_err *e)
{
    struct worker *w = ctx;
    struct run *r = (struct run *)pd_desk_find(w->desk, run.p, run.n);
    struct pd_readback *b;
    if (!r)
        return pd_readback_past(&w->readbacks, c, run, e);
    int rc = pd_readback_new(&w->readbacks, c, r->d.name, &b, e);
    if (rc < 0)
        return rc;
    if (r->x.expected) {        /* its KV is on its way */
        pd_readback_go(b);
        return 0;
    }
    b->user = r;
    b->done = looked;
    r->n_readbacks++;
    r->d.kept = true;
    pd_desk_call(w->desk, &r->d, &b->call, look, b);
    return 0;
}

/* ---- hooks ---- */

static bool daemon_busy(void *ctx) { return pd_desk_runs(((struct worker *)ctx)->desk) > 0; }

static int on_cancel(void *ctx, const struct pd_rec *rec, const char **state, struct pd_err *e)
{
    return pd_desk_on_cancel(((struct worker *)ctx)->desk, rec, state, e);
}

static void ledger(void *ctx, void (*put)(void *to, const char *key, int64_t value), void *to)
{
    struct worker *w = ctx;
    struct pd_taker_counts n = pd_taker_counts(w->taker);
    struct pd_pool_stats p = pd_pool_stats(w->rt->pool);
    put(to, "runs", pd_desk_runs(w->desk));
    put(to, "runs_most", pd_desk_max(w->desk));
    put(to, "sequences", pd_metric_value(w->m_seqs));
    put(to, "blocks_used", p.used);
    put(to, "blocks_free", (int64_t)p.max - p.used - p.cached);
    put(to, "blocks_cached", p.cached);
    put(to, "rows_cached", pd_metric_value(w->m_rows[2]));
    put(to, "blocks_borrowed", p.borrowed);
    put(to, "steps", pd_metric_value(w->m_steps));
    put(to, "tokens", pd_metric_value(w->m_tokens));
    put(to, "preemptions", pd_metric_value(w->m_preempted));
    put(to, "completed", pd_metric_value(w->m_ends[0]));
    put(to, "failed", pd_metric_value(w->m_ends[1]) + pd_metric_value(w->m_ends[3]));
    put(to, "cancelled", pd_metric_value(w->m_ends[2]));
    put(to, "remote", pd_metric_value(w->m_modes[0]));
    put(to, "local", pd_metric_value(w->m_modes[1]));
    put(to, "aggregated", pd_metric_value(w->m_modes[2]));
    put(to, "links", n.links);
    put(to, "expected", n.expected);
    put(to, "offers_early", n.early);
    put(to, "moves_waiting", n.waiting);
    put(to, "in_place", n.pinned);
    put(to, "moves", n.moving);
    for (int i = 0; i < PD_TRANSPORTS; i++) {
        char name[40];
        snprintf(name, sizeof name, "taken_%s", pd_transports[i]->scheme);
        put(to, name, (int64_t)n.taken[i]);
    }
    put(to, "taken_bytes", (int64_t)n.bytes);
    put(to, "not_taken", (int64_t)n.failed);
    put(to, "held_blocks", (int64_t)n.held_blocks);
    put(to, "resumed", (int64_t)n.resumed);
    put(to, "committed", (int64_t)n.committed);
}

/* What a heartbeat says. Prompts that have not reached the batch count by the ids that they brought: the others are not tokenised yet. */
static void load(void *ctx, struct pd_load *l)
{
    struct worker *w = ctx;
    *l = (struct pd_load){ .runs = pd_desk_runs(w->desk), .seqs = (uint32_t)pd_metric_value(w->m_seqs), .waiting = atomic_load(&w->waiting),
                           .blocks_used = pd_pool_stats(w->rt->pool).used, .prefill_tokens_ahead = atomic_load(&w->prompt_left),
                           .kv_tokens = atomic_load(&w->kv_tokens) };
    for (struct run *r = (void *)pd_desk_first(w->desk); r; r = (void *)r->d.node.next)
        if (!atomic_load(&r->at_batch)) {
            l->waiting++;
            if (!r->x.expected)
                l->prefill_tokens_ahead += r->n_ids;
        }
}

static void on_beat(void *ctx) { pd_register_beat(((struct worker *)ctx)->reg); }

static int on_follow(void *ctx, struct pd_conn *c, const struct pd_rec *rec, struct pd_err *e)
{
    return pd_register_follow(((struct worker *)ctx)->reg, c, rec, e);
}

static void on_idle(void *ctx)
{
    struct worker *w = ctx;
    if (pd_daemon_state(w->d) >= PD_DRAINING)
        pd_taker_close(w->taker);
}

static void on_drain(void *ctx)
{
    struct worker *w = ctx;
    pd_trace_process(w->o.trace, PD_ST_DRAINING);
    pd_register_beat(w->reg);
    if (!pd_desk_runs(w->desk))
        pd_taker_close(w->taker);
}

static int make_metrics(struct worker *w, struct pd_err *e)
{
#define COUNTER(n, h, ...) { .name = n, .help = h, .type = PD_COUNTER, __VA_ARGS__ }
#define GAUGE(n, h, ...) { .name = n, .help = h, .type = PD_GAUGE, __VA_ARGS__ }
    const struct pd_metric_about seqs = GAUGE("pd_sequences", "Sequences in the batch, waiting ones too."),
        blocks = GAUGE("pd_kv_blocks", "KV blocks of the pool.", .label = { "state" }),
        rows = COUNTER("pd_rows_total", "Rows computed, of prompts and of decoding.", .label = { "phase" }),
        cached = COUNTER("pd_cached_rows_total", "Rows not computed, as their KV was in the prefix cache."),
        steps = COUNTER("pd_steps_total", "Steps of the batch."), preempted = COUNTER("pd_preemptions_total", "Sequences put back for want of blocks."),
        ends = COUNTER("pd_runs_total", "Runs, by how they ended.", .label = { "end" }), tokens = COUNTER("pd_generated_tokens_total", "Tokens generated."),
        modes = COUNTER("pd_runs_by_mode_total", "Runs that ended, by where their prompt was computed.", .label = { "mode" }),
        ttft = { .name = "pd_ttft_seconds", .help = "From acceptance to the first token.", .type = PD_HISTOGRAM, .scale = 6,
                 .bounds = pd_latency_bounds, .n_bounds = pd_n_latency_bounds };
    const struct { const struct pd_metric_about *about; struct pd_metric **to; const char *label; } t[] = {
        { &seqs, &w->m_seqs, NULL }, { &blocks, &w->m_blocks[0], "used" }, { &blocks, &w->m_blocks[1], "free" },
        { &blocks, &w->m_blocks[2], "cached" }, { &cached, &w->m_rows[2], NULL },
        { &rows, &w->m_rows[0], "prompt" }, { &rows, &w->m_rows[1], "decode" }, { &steps, &w->m_steps, NULL }, { &preempted, &w->m_preempted, NULL },
        { &ends, &w->m_ends[0], "completed" }, { &ends, &w->m_ends[1], "failed" }, { &ends, &w->m_ends[2], "cancelled" }, { &ends, &w->m_ends[3], "refused" },
        { &modes, &w->m_modes[0], "remote" }, { &modes, &w->m_modes[1], "local" }, { &modes, &w->m_modes[2], "aggregated" },
        { &tokens, &w->m_tokens, NULL }, { &ttft, &w->m_ttft, NULL } };
#undef COUNTER
#undef GAUGE
    int rc = 0;
    for (size_t i = 0; !rc && i < sizeof t / sizeof *t; i++)
        rc = pd_metric_get(pd_daemon_metrics(w->d), t[i].about, (const char *const[PD_METRIC_LABELS]){ t[i].label }, t[i].to, e);
    return rc;
}

int pd_worker_serve(struct pd_runtime *rt, const struct pd_worker_opts *o, struct pd_daemon_opts *dopts, struct pd_err *e)
{
    struct worker *w = pd_calloc(1, sizeof *w, "a worker", e);
    if (!w)
        return PD_ENOMEM;
    const struct pd_dc_sink sink = { w, on_put, on_over };
    const struct pd_desk_ops ops = { .ctx = w, .run_size = sizeof (struct run), .admit = admit, .again = again, .refuse = refuse, .news = on_news,
                                     .cancel = on_cancel_run, .freed = on_freed, .idle = on_idle, .busy = is_busy, .turn = turn, .after = tell_load, .spare = spare };
    const struct pd_desk_opts ko = { .rt = rt, .seed = o->seed, .stream = o->stream, .max_runs = o->max_runs, .trace = o->trace };
    const struct pd_taker_ops to = { .ctx = w, .known = is_known, .started = on_transfer, .taken = on_taken, .failed = on_failed, .reserve = reserve };
    const struct pd_daemon_hooks hooks = { .ctx = w, .drain = on_drain, .busy = daemon_busy, .beat = on_beat, .ledger = ledger,
                                           .cancel = on_cancel, .follow = on_follow, .verify = on_verify };
    w->rt = rt;
    w->readbacks.rt = rt;
    w->o = *o;
    w->stuck = (struct pd_post){ .fn = on_stuck, .ctx = w };
    w->dco = (struct pd_decode_opts){ .seed = o->seed, .keep_going = true, .stream = o->stream };
    w->dc = (struct pd_decoder){ .rt = rt, .o = &w->dco, .sink = &sink, .trace = o->trace, .t0 = pd_mono_us(),
                                .kv_valid = o->in_place ? kv_valid : NULL };
    int rc = pd_dc_open(&w->dc, e);
    rc = rc ? rc : pd_desk_new(&ko, &ops, &w->desk, e);
    struct pd_entry entry[2] = { { NULL, &pd_desk_cb, w->desk, false }, { "hello", &pd_links_cb, NULL, false } };
    dopts->entry = entry;
    dopts->n_entry = 2;
    dopts->worker = rt->worker;
    struct pd_taker_opts xo = { .rt = rt, .via = o->via, .max_record = dopts->max_record, .in_place = o->in_place };
    rc = rc ? rc : pd_taker_new(&xo, &to, &w->taker, e);
    if (!rc)
        entry[1].ctx = pd_taker_links(w->taker);
    rc = rc ? rc : pd_daemon_new(dopts, &hooks, &w->d, e);
    rc = rc ? rc : pd_taker_on(w->taker, pd_daemon_loop(w->d), pd_daemon_metrics(w->d), e);
    if (rc < 0)
        goto out;
    w->readbacks.l = pd_daemon_loop(w->d);
    pd_desk_on(w->desk, w->d);
    if ((rc = make_metrics(w, e)) < 0)
        goto out;
    tell_load(w);
    struct pd_register_opts ro = { .rt = rt, .role = dopts->role, .max_runs = pd_desk_max(w->desk), .via = o->via, .routers = o->routers, .load = load,
                                   .ctx = w };
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
    for (struct pd_dc_run *r = w->dc.head; r && rc < 0; r = r->next)
        pd_dc_step_end(&w->dc, r, e);
    for (struct run *r = w->desk ? (void *)pd_desk_first(w->desk) : NULL; r && rc < 0; r = (void *)r->d.node.next)
        if (!r->dr && !r->d.over && !r->d.ended)
            step_of(w, r, PD_ST_FAILED, 0, e->msg, NULL);
    pd_dc_close(&w->dc);
    pd_register_free(w->reg);
    pd_desk_free(w->desk);
    pd_taker_free(w->taker);
    pd_daemon_free(w->d);
    pd_readbacks_free(&w->readbacks);
    pd_free(w);
    return rc;
}
