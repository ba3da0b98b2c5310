#include <stdatomic.h>
#include <stdio.h>
#include "../base/clock.h"
#include "../base/fault.h"
#include "../base/hash.h"
#include "../base/log.h"
#include "../engine/decoding.h"
#include "../wire/value.h"
#include "runner.h"
#include "taker.h"

enum { PREFILL_US = 60000000 };

struct run {
    struct pd_side_run s;
    /* the loop's */
    struct pd_expect x;
    struct pd_call c_take, c_end;
    /* handed to the thread with c_take */
    struct pd_kv_in kv; bool has_kv;
    char *fallback;
    const char *mode;
    /* the thread's */
    struct pd_dc_run *dr;
    uint32_t n_readbacks;       /* of it that go on: it stays until they are done. The loop's */
    struct pd_runner *r;
};

struct pd_runner {
    struct pd_worker *w;
    struct pd_side side;
    struct pd_taker *taker;
    /* the thread's */
    struct pd_decoder dc;
    struct pd_decode_opts dco;
    struct pd_dc_sink sink;
    /* counted by both */
    struct pd_metric *m_ttft, *m_tokens, *m_modes[3];
};

/* ---- the compute thread ---- */

static void on_put(void *ctx, struct pd_dc_run *dr, const uint8_t *p, size_t n)
{
    struct pd_runner *k = ctx;
    struct run *r = dr->user;
    if (r)
        pd_desk_add(k->w->desk, &r->s.d, p, n);
}

static void on_over(void *ctx, struct pd_dc_run *dr)
{
    struct pd_runner *k = ctx;
    struct run *r = dr->user;
    if (!r)
        return;
    for (int32_t i = 0; dr->choice && i < dr->in.req.n; i++) {
        if (dr->choice[i].t_first)
            pd_metric_observe(k->m_ttft, dr->choice[i].t_first - dr->in.t_accept);
        pd_metric_add(k->m_tokens, (int64_t)(dr->choice[i].tokens.n / sizeof(int32_t)) - dr->n_resume);
    }
    enum pd_why why = (enum pd_why)atomic_load(&r->s.d.cancelled);
    pd_metric_add(k->w->m_ends[why ? PD_WK_CANCELLED : dr->told || dr->n_done < (uint32_t)dr->in.req.n ? PD_WK_FAILED : PD_WK_COMPLETED], 1);
    pd_metric_add(k->m_modes[dr->mode[0] == 'r' ? 0 : dr->mode[0] == 'l' ? 1 : 2], 1);
    dr->user = NULL;
    r->dr = NULL;
    r->s.d.lost |= dr->lost;
    pd_desk_over(k->w->desk, &r->s.d);
}

/* Is what came the KV of just this prompt? */
static int check_kv(const struct pd_runner *k, const struct pd_dc_run *dr, const struct pd_kvdesc *d, struct pd_err *e)
{
    if (d->n_tokens != dr->in.n_tokens || memcmp(d->token_ids, dr->in.tokens, (size_t)d->n_tokens * sizeof *d->token_ids))
        return pd_fail(e, PD_ECORRUPT, "its KV is of other tokens (%u) than the request's (%u)", d->n_tokens, dr->in.n_tokens);
    if (d->n_first != (uint32_t)dr->in.req.n)
        return pd_fail(e, PD_ECORRUPT, "its kv carries %u first tokens for %d choices", d->n_first, dr->in.req.n);
    for (uint32_t i = 0; i < d->n_first; i++)
        if (d->first[i].token < 0 || d->first[i].token >= k->w->rt->model->cfg.n_vocab)
            return pd_fail(e, PD_ECORRUPT, "its first token %d is outside the vocabulary of %d", d->first[i].token, k->w->rt->model->cfg.n_vocab);
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
        pd_warn("run %s: lease_ended: its KV is gone while it was read in place; computing it again", r->s.d.name);
        say_fallback(dr, "lease_ended", "its KV was gone while it was read in place", &e);
        dr->mode = "remote";
    }
    return false;
}

static bool unwanted(const struct pd_dc_run *dr)
{
    const struct run *r = dr->user;
    return r && atomic_load(&r->s.d.cancelled);
}

static void end_cancelled(struct pd_runner *k, struct run *r)
{
    struct pd_err why;
    pd_fail(&why, PD_ECANCEL, "%s", pd_why_text((enum pd_why)atomic_load(&r->s.d.cancelled)));
    pd_dc_end(&k->dc, r->dr, &why);
}

static void submit(struct pd_runner *k, struct run *r, struct pd_dc_run *dr)
{
    struct pd_err e;
    int rc = pd_intake_tokens(k->w->rt, &dr->in, &e);
    rc = rc ? rc : pd_dc_make_choices(dr, k->w->rt->model->tok, &e);
    rc = rc < 0 || !r->fallback ? rc : say_fallback(dr, r->fallback, "", &e);
    if (rc == 0 && r->has_kv && check_kv(k, dr, &r->kv.desc, &e) < 0) {
        pd_warn("run %s: %s; recomputing %u tokens locally", r->s.d.name, e.msg, dr->in.n_tokens);
        struct pd_err why = e;
        pd_kv_in_put(k->w->rt->pool, &r->kv);
        r->has_kv = false;
        if ((rc = say_fallback(dr, "integrity", why.msg, &e)) == 0)
            pd_dc_step(&k->dc, dr, PD_ST_FALLBACK, 0, dr->fallback);
    }
    if (rc == 0 && r->s.d.route.has_resume && (rc = pd_dc_resume(&k->dc, dr, r->s.d.route.resume, r->s.d.route.n_resume, &e)) == 1)
        return;                 /* they were its last ones */
    if (rc < 0) {
        pd_dc_refuse(&k->dc, dr, &e);
        return;
    }
    if (atomic_load(&r->s.d.cancelled)) {
        end_cancelled(k, r);
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
    pd_dc_submit(&k->dc, dr, blocks, n);
}

/* A request from the loop becomes a run of the batch. */
static void take(void *ctx)
{
    struct run *r = ctx;
    struct pd_runner *k = r->r;
    struct pd_err e;
    struct pd_dc_run *dr = pd_dc_run_new(&k->dc, &e);
    atomic_store(&r->s.at_batch, true);
    if (!dr) {                  /* not even a refusal: the client is closed */
        r->s.d.lost = true;
        pd_desk_over(k->w->desk, &r->s.d);
        return;
    }
    dr->in = r->s.d.in;
    r->s.d.in = (struct pd_intake){ 0 };
    dr->user = r;
    dr->stream = r->s.d.stream;
    dr->mode = r->mode;
    r->dr = dr;
    if (r->s.d.routed) {
        pd_dc_set_parent(dr, r->s.d.route.op);
        dr->waited_us = r->s.d.route.waited_us;
    }
    submit(k, r, dr);
}

static void end_run(void *ctx)
{
    struct run *r = ctx;
    if (r->dr)
        end_cancelled(r->r, r);
}

/* Memory ran out somewhere in the middle: which run lacks what is not known, so all in hand fail, and the process goes on. */
void pd_runner_after(struct pd_runner *k)
{
    struct pd_err why = k->dc.fatal;
    if (!why.code)
        return;
    pd_error("all runs in hand fail: %s", why.msg);
    k->dc.fatal = (struct pd_err){ 0 };
    why.code = why.code == PD_ECANCEL ? PD_EFAIL : why.code;
    while (k->dc.head)
        pd_dc_end(&k->dc, k->dc.head, &why);
}

/* ---- the loop: runs ---- */

static void begin(struct pd_runner *k, struct run *r, const char *mode)
{
    r->mode = mode;
    r->s.n_ids = r->has_kv ? 0 : r->s.d.in.req.n_token_ids;
    pd_desk_call(k->w->desk, &r->s.d, &r->c_take, take, r);
}

static void step_of(struct pd_runner *k, const struct run *r, enum pd_state_id state, uint64_t bytes, const char *cause, const uint8_t *gen)
{
    struct pd_step s = { .run = r->s.d.name, .where = r->mode, .gen = gen, .parent = r->s.d.routed ? r->s.d.route.op : NULL };
    pd_run_step(k->w->o.trace, &s, state, bytes, cause);
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
    struct pd_runner *k = ctx;
    struct run *r = run_of(x);
    char text[600];
    snprintf(text, sizeof text, "%s: %s", kind, why->msg);
    pd_warn("run %s: %s; computing it here", r->s.d.name, text);
    keep_text(r, text, strlen(text));
    step_of(k, r, PD_ST_FALLBACK, 0, text, NULL);
    begin(k, r, "local");
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
    struct pd_runner *k = ctx;
    struct run *r = run_of(x);
    if (pd_fault("flip_held"))
        flip(k->w->rt->pool, kv->blocks[kv->n_blocks / 2]);
    r->kv = *kv;
    r->has_kv = true;
    step_of(k, r, PD_ST_KV_TRANSFER_COMPLETED, kv->bytes, NULL, kv->desc.gen);
    begin(k, r, "remote");
}

/* One that we give to another may come back for us to decode: that is not this one. */
static bool is_known(void *ctx, const char *run)
{
    struct pd_runner *k = ctx;
    const struct run *r = (const struct run *)pd_desk_find(k->w->desk, run, PD_RUN_LEN);
    return r && r->s.side == &k->side;
}

/* Not for what waits to be given: that has its own share, and may be waiting for what this KV's giver waits for. */
static uint32_t reserve(void *ctx) { return atomic_load(&((struct pd_runner *)ctx)->w->to_answer); }

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
    struct pd_runner *k = ctx;
    struct run *r = (struct run *)d;
    bool remote = d->routed && !strcmp(d->route.mode, "remote"), local = d->routed && !strcmp(d->route.mode, "local");
    int rc = d->routed ? check_route(d, e) : 0;
    if (rc < 0)
        return rc;
    r->r = k;
    r->mode = remote ? "remote" : local ? "local" : "aggregated";
    if (d->routed && d->route.fallback.p)
        keep_text(r, d->route.fallback.p, d->route.fallback.n);
    step_of(k, r, PD_ST_ACCEPTED, 0, NULL, NULL);
    if (!remote) {
        begin(k, r, r->mode);
        return 0;
    }
    memcpy(r->x.op, d->route.op, sizeof r->x.op);
    r->x.key = (struct pd_prefix_key){ d->in.req.adapter, d->in.req.cache_salt };
    r->x.give_up = pd_mono_us() + timeout_us(&d->in.req, "prefill", PREFILL_US);
    r->x.transfer_us = timeout_us(&d->in.req, "transfer", 0);
    return pd_taker_expect(k->taker, &r->x, d->name, e);
}

static bool again(void *ctx, struct pd_desk_run *d, struct pd_client *from, const struct pd_intake *in, const struct pd_routing *route)
{
    struct pd_runner *k = ctx;
    struct run *r = (struct run *)d;
    struct pd_err e;
    if (d->over || atomic_load(&d->cancelled))
        return false;
    if (d->client != from) {
        pd_fail(&e, PD_EFAIL, "request: run %s is in hand here for another connection", d->name);
        pd_desk_refuse(k->w->desk, from, &in->req, &e, "reroute");
        return true;
    }
    if (!r->x.expected)
        return true;            /* it is being computed, or decoded */
    if (strcmp(route->mode, "remote")) {
        pd_taker_forget(k->taker, &r->x, "the router says local");
        if (route->fallback.p)
            keep_text(r, route->fallback.p, route->fallback.n);
        r->mode = !strcmp(route->mode, "local") ? "local" : "aggregated";
        step_of(k, r, PD_ST_FALLBACK, 0, r->fallback ? r->fallback : "the router says so", NULL);
        begin(k, r, r->mode);
        return true;
    }
    if (memcmp(route->op, r->x.op, sizeof r->x.op)) {
        pd_taker_forget(k->taker, &r->x, "the router names another op");
        memcpy(r->x.op, route->op, sizeof r->x.op);
        memcpy(d->route.op, route->op, sizeof d->route.op);
    }
    r->x.why = (struct pd_err){ 0 };
    r->x.give_up = pd_mono_us() + timeout_us(&in->req, "prefill", PREFILL_US);
    if (!r->x.expected && pd_taker_expect(k->taker, &r->x, d->name, &e) < 0)
        begin(k, r, "local");
    pd_taker_room(k->taker);
    return true;
}

static void on_cancel_run(void *ctx, struct pd_desk_run *d)
{
    struct pd_runner *k = ctx;
    struct run *r = (struct run *)d;
    if (r->x.expected) {
        pd_taker_forget(k->taker, &r->x, pd_why_text((enum pd_why)atomic_load(&d->cancelled)));
        begin(k, r, r->mode);   /* to its end */
    } else
        pd_desk_call(k->w->desk, &r->s.d, &r->c_end, end_run, r);
}

static void on_freed(void *ctx, struct pd_desk_run *d)
{
    struct pd_runner *k = ctx;
    struct run *r = (struct run *)d;
    if (k->taker)
        pd_taker_forget(k->taker, &r->x, "the run is over");
    if (r->has_kv)
        pd_readback_keep(&k->w->readbacks, &r->kv.desc, &r->kv.mem);
    pd_kv_in_free(k->w->rt->pool, &r->kv);
    pd_free(r->fallback);
}

static void refuse(void *ctx, const struct pd_request *q, const struct pd_err *why, const char *action, struct pd_buf *b)
{
    struct pd_runner *k = ctx;
    struct pd_err e;
    struct pd_result as = { .mode = "aggregated", .decode_worker = { k->w->rt->worker, strlen(k->w->rt->worker) } };
    pd_refusal_log(q, why);
    pd_metric_add(k->w->m_ends[PD_WK_REFUSED], 1);
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
    r->s.d.kept = false;
    pd_desk_look(r->r->w->desk, &r->s.d);
}

int pd_runner_verify_past(struct pd_runner *k, struct pd_conn *c, struct pd_str run, struct pd_err *e)
{
    return pd_readback_past(&k->w->readbacks, c, run, e);
}

static int verify(void *ctx, struct pd_conn *c, struct pd_desk_run *d, struct pd_err *e)
{
    struct pd_runner *k = ctx;
    struct run *r = (struct run *)d;
    struct pd_readback *b;
    int rc = pd_readback_new(&k->w->readbacks, c, r->s.d.name, &b, e);
    if (rc < 0)
        return rc;
    if (r->x.expected) {        /* its KV is on its way */
        pd_readback_go(b);
        return 0;
    }
    b->user = r;
    b->done = looked;
    r->n_readbacks++;
    r->s.d.kept = true;
    pd_desk_call(k->w->desk, &r->s.d, &b->call, look, b);
    return 0;
}

/* ---- for its worker ---- */

static void ledger(void *ctx, pd_ledger_fn *put, void *to)
{
    struct pd_runner *k = ctx;
    struct pd_taker_counts n = pd_taker_counts(k->taker);
    put(to, "blocks_borrowed", pd_pool_stats(k->w->rt->pool).borrowed);
    put(to, "tokens", pd_metric_value(k->m_tokens));
    put(to, "completed", pd_metric_value(k->w->m_ends[PD_WK_COMPLETED]));
    put(to, "remote", pd_metric_value(k->m_modes[0]));
    put(to, "local", pd_metric_value(k->m_modes[1]));
    put(to, "aggregated", pd_metric_value(k->m_modes[2]));
    put(to, "expected", n.expected);
    put(to, "offers_early", n.early);
    put(to, "moves_waiting", n.waiting);
    put(to, "in_place", n.pinned);
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

static void cut(void *ctx, struct pd_desk_run *d, const struct pd_err *why)
{
    struct run *r = (struct run *)d;
    if (!r->dr && !d->over && !d->ended)
        step_of(ctx, r, PD_ST_FAILED, 0, why->msg, NULL);
}

uint32_t pd_runner_links_n(const struct pd_runner *k) { return pd_taker_counts(k->taker).links; }
uint32_t pd_runner_moves(const struct pd_runner *k) { return pd_taker_counts(k->taker).moving; }
size_t pd_runner_run_size(void) { return sizeof (struct run); }
const struct pd_side *pd_runner_side(const struct pd_runner *k) { return &k->side; }
struct pd_links *pd_runner_links(struct pd_runner *k) { return pd_taker_links(k->taker); }
bool pd_runner_give_up_one(struct pd_runner *k) { return pd_taker_give_up_one(k->taker); }
void pd_runner_room(struct pd_runner *k) { pd_taker_room(k->taker); }
void pd_runner_close(struct pd_runner *k) { pd_taker_close(k->taker); }
void pd_runner_failed(struct pd_runner *k, const struct pd_err *why) { pd_dc_fatal(&k->dc, why); }

int pd_runner_new(struct pd_worker *w, struct pd_runner **out, struct pd_err *e)
{
    struct pd_runner *k = pd_calloc(1, sizeof *k, "what answers", e);
    if (!k)
        return PD_ENOMEM;
    *out = k;
    k->w = w;
    k->side = (struct pd_side){ .ctx = k, .admit = admit, .again = again, .refuse = refuse, .cancel = on_cancel_run, .freed = on_freed,
                                .verify = verify, .ledger = ledger, .cut = cut };
    k->sink = (struct pd_dc_sink){ k, on_put, on_over };
    k->dco = (struct pd_decode_opts){ .seed = w->o.seed, .keep_going = true, .stream = w->o.stream };
    k->dc = (struct pd_decoder){ .rt = w->rt, .o = &k->dco, .batch = w->batch, .sink = &k->sink, .trace = w->o.trace, .t0 = pd_mono_us(),
                                 .kv_valid = w->o.in_place ? kv_valid : NULL, .unwanted = unwanted };
    const struct pd_taker_ops to = { .ctx = k, .known = is_known, .started = on_transfer, .taken = on_taken, .failed = on_failed, .reserve = reserve };
    const struct pd_taker_opts xo = { .rt = w->rt, .via = w->o.via, .max_record = w->max_record, .in_place = w->o.in_place };
    int rc = pd_dc_open(&k->dc, e);
    return rc ? rc : pd_taker_new(&xo, &to, &k->taker, e);
}

int pd_runner_on(struct pd_runner *k, struct pd_err *e)
{
    static const struct pd_metric_about tokens = { .name = "pd_generated_tokens_total", .help = "Tokens generated.", .type = PD_COUNTER },
        modes = { .name = "pd_runs_by_mode_total", .help = "Runs that ended, by where their prompt was computed.", .type = PD_COUNTER, .label = { "mode" } };
    const struct pd_metric_about ttft = { .name = "pd_ttft_seconds", .help = "From acceptance to the first token.", .type = PD_HISTOGRAM, .scale = 6,
                                          .bounds = pd_latency_bounds, .n_bounds = pd_n_latency_bounds };
    static const char *const mode[] = { "remote", "local", "aggregated" };
    struct pd_metrics *m = pd_daemon_metrics(k->w->d);
    int rc = pd_metric_get(m, &tokens, (const char *const[PD_METRIC_LABELS]){ NULL }, &k->m_tokens, e);
    rc = rc ? rc : pd_metric_get(m, &ttft, (const char *const[PD_METRIC_LABELS]){ NULL }, &k->m_ttft, e);
    for (int i = 0; i < 3 && !rc; i++)
        rc = pd_metric_get(m, &modes, (const char *const[PD_METRIC_LABELS]){ mode[i] }, &k->m_modes[i], e);
    return rc ? rc : pd_taker_on(k->taker, pd_daemon_loop(k->w->d), m, e);
}

void pd_runner_end(struct pd_runner *k, const struct pd_err *why)
{
    for (struct pd_dc_run *r = k->dc.head; r && why; r = r->next)
        pd_dc_step_end(&k->dc, r, why);
    pd_dc_close(&k->dc);
}

void pd_runner_free(struct pd_runner *k)
{
    if (!k)
        return;
    pd_taker_free(k->taker);
    pd_free(k);
}
