#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../engine/decoding.h"
#include "../wire/frame.h"
#include "../wire/value.h"
#include "register.h"
#include "worker.h"

/* One request in hand. Made by the loop, lent to the compute thread from submission until `over` comes back, freed by the loop. */
struct run {
    /* the loop's */
    struct run *next, **prev;           /* of all, in order of arrival */
    struct client *client;              /* NULL: gone */
    char name[PD_RUN_LEN + 1];
    uint8_t token[16]; bool has_token;  /* cancel_token */
    struct pd_buf pending; size_t at;   /* records that wait for room */
    bool over;
    /* handed in, then the thread's */
    struct pd_intake in;
    bool stream;
    struct run *next_in;
    _Atomic int cancelled;              /* an enum why, from the loop */
    /* the thread's */
    struct pd_buf out;                  /* records of the step at hand */
    bool ended, touched;
    struct run *next_touched;
    /* under the lock */
    struct pd_buf ready;
    bool ready_over, lost, queued;      /* lost: records are missing for want of memory */
    struct run *next_ready;
    /* taken from there by the loop */
    struct pd_buf taken;
    bool taken_over;
    struct run *next_taken;
};
enum why { NOT = 0, CLIENT_GONE, BY_RECORD };

struct client { struct pd_conn *c; bool held; struct client *next_held; };

struct worker {
    struct pd_runtime *rt;
    struct pd_worker_opts o;
    struct pd_daemon *d;
    struct pd_loop *l;
    struct pd_register *reg;
    /* the loop's */
    struct run *runs, **last;
    uint32_t n_runs, max_runs;
    struct client *held, **last_held;   /* who wait to be read again */
    struct pd_seen seen;                /* run ids: one that comes again is a replay */
    struct pd_post post;
    /* under the lock */
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct run *in, **last_in;
    struct run *ready, **last_ready;
    bool posted, stop, look;            /* look: some run was cancelled */
    /* the thread's */
    pthread_t thread;
    struct pd_decoder dc;
    struct pd_decode_opts dco;
    struct run *touched;
    /* counted by both */
    struct pd_metric *m_runs, *m_queue, *m_seqs, *m_blocks[3], *m_rows[3], *m_steps, *m_preempted, *m_ends[4], *m_ttft, *m_tokens;
    _Atomic uint64_t prompt_left, kv_tokens;    /* of the batch, and how many sequences are without KV, after the last step */
    _Atomic uint32_t waiting;
};

/* ---- the compute thread ---- */

static void touch(struct worker *w, struct run *r)
{
    if (r->touched)
        return;
    r->touched = true;
    r->next_touched = w->touched;
    w->touched = r;
}

static void on_put(void *ctx, struct pd_dc_run *dr, const uint8_t *p, size_t n)
{
    struct run *r = dr->user;
    if (!r)
        return;
    if (pd_buf_add(&r->out, p, n, NULL) < 0)
        r->lost = true;         /* read by the loop only after the hand-over */
    touch(ctx, r);
}

static void on_over(void *ctx, struct pd_dc_run *dr)
{
    struct worker *w = ctx;
    struct run *r = dr->user;
    if (!r)
        return;
    r->ended = true;
    touch(w, r);
    for (int32_t i = 0; dr->choice && i < dr->in.req.n; i++) {
        if (dr->choice[i].t_first)
            pd_metric_observe(w->m_ttft, dr->choice[i].t_first - dr->in.t_accept);
        pd_metric_add(w->m_tokens, (int64_t)(dr->choice[i].tokens.n / sizeof(int32_t)));
    }
    enum why why = atomic_load(&r->cancelled);
    pd_metric_add(w->m_ends[why ? 2 : dr->told || dr->n_done < (uint32_t)dr->in.req.n ? 1 : 0], 1);
    dr->user = NULL;
}

/* A request from the loop becomes a run of the batch. */
static void take(struct worker *w, struct run *r)
{
    struct pd_err e;
    struct pd_dc_run *dr = pd_dc_run_new(&w->dc, &e);
    if (!dr) {                  /* not even a refusal: the client is closed */
        r->lost = r->ended = true;
        touch(w, r);
        pd_intake_free(&r->in);
        return;
    }
    dr->in = r->in;
    r->in = (struct pd_intake){ 0 };
    dr->user = r;
    dr->stream = r->stream;
    int rc = pd_intake_tokens(w->rt, &dr->in, &e);
    if (rc == 0)
        rc = pd_dc_make_choices(dr, w->rt->model->tok, &e);
    if (rc < 0)
        pd_dc_refuse(&w->dc, dr, &e);
    else
        pd_dc_submit(&w->dc, dr, NULL, 0);
}

static void end_cancelled(struct worker *w)
{
    static const char *const cause[] = { "", "the client is gone", "cancelled by its client" };
    struct pd_err why;
    for (struct pd_dc_run *dr = w->dc.head, *next; dr; dr = next) {
        next = dr->next;
        int c = dr->user ? atomic_load(&((struct run *)dr->user)->cancelled) : NOT;
        if (!c)
            continue;
        pd_fail(&why, PD_ECANCEL, "%s", cause[c]);
        pd_dc_end(&w->dc, dr, &why);
    }
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

/* What the last step brought goes to the loop, in one piece. */
static void hand_over(struct worker *w)
{
    bool post = false;
    if (!w->touched)
        return;
    pthread_mutex_lock(&w->lock);
    for (struct run *r = w->touched, *next; r; r = next) {
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
        if (!r->queued) {
            r->queued = true;
            r->next_ready = NULL;
            *w->last_ready = r;
            w->last_ready = &r->next_ready;
        }
    }
    post = !w->posted;
    w->posted = true;
    pthread_mutex_unlock(&w->lock);
    w->touched = NULL;
    if (post)
        pd_loop_post(w->l, &w->post);
}

static void tell_load(struct worker *w)
{
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

static void *compute(void *arg)
{
    struct worker *w = arg;
    for (bool stop = false; !stop;) {
        pthread_mutex_lock(&w->lock);
        while (!w->in && !w->stop && !w->look && !pd_batch_busy(w->dc.batch))
            pthread_cond_wait(&w->more, &w->lock);
        struct run *in = w->in, *next;
        bool look = w->look;
        stop = w->stop;
        w->in = NULL;
        w->last_in = &w->in;
        w->look = false;
        pthread_mutex_unlock(&w->lock);
        for (; in; in = next) {
            next = in->next_in;
            take(w, in);
            look |= atomic_load(&in->cancelled) != NOT;
        }
        if (look)
            end_cancelled(w);
        if (!stop && pd_batch_busy(w->dc.batch))
            pd_dc_turn(&w->dc, false);
        if (w->dc.fatal.code)
            end_all(w);
        tell_load(w);
        hand_over(w);
    }
    return NULL;
}

/* ---- the loop: runs ---- */

static void wake(struct worker *w)
{
    pthread_cond_signal(&w->more);
}

static void run_free(struct run *r)
{
    pd_intake_free(&r->in);
    pd_buf_free(&r->pending);
    pd_buf_free(&r->out);
    pd_buf_free(&r->ready);
    pd_buf_free(&r->taken);
    pd_free(r);
}

static void let_read(struct worker *w)
{
    while (w->n_runs < w->max_runs && w->held) {
        struct client *k = w->held;
        if (!(w->held = k->next_held))
            w->last_held = &w->held;
        k->held = false;
        pd_conn_unhold(k->c);
    }
}

/* The run is over and all of it was put. */
static void forget(struct worker *w, struct run *r)
{
    struct client *k = r->client;
    *r->prev = r->next;
    if (r->next)
        r->next->prev = r->prev;
    else
        w->last = r->prev;
    w->n_runs--;
    pd_metric_set(w->m_runs, w->n_runs);
    run_free(r);
    if (k)
        pd_conn_owe(k->c, -1);
    let_read(w);
    pd_daemon_poke(w->d);
}

/* Put what there is room for. */
static void send_pending(struct run *r)
{
    struct pd_err e;
    while (r->at < r->pending.n && r->client && !pd_conn_full(r->client->c)) {
        struct pd_frame_scan scan = { 0 };
        size_t len = 0;
        int rc = pd_frame_next(&scan, r->pending.p + r->at, r->pending.n - r->at, SIZE_MAX / 2, &len, &e);
        if (rc == 1) {
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

static void deliver(void *ctx)
{
    struct worker *w = ctx;
    pthread_mutex_lock(&w->lock);
    struct run *list = w->ready, *next;
    w->ready = NULL;
    w->last_ready = &w->ready;
    w->posted = false;
    for (struct run *r = list; r; r = r->next_ready) {
        struct pd_buf t = r->taken;
        r->taken = r->ready;
        t.n = 0;
        r->ready = t;
        r->taken_over |= r->ready_over;
        r->queued = false;      /* from here on the thread may queue it again */
        r->next_taken = r->next_ready;
    }
    pthread_mutex_unlock(&w->lock);
    for (struct run *r = list; r; r = next) {
        next = r->next_taken;
        struct pd_err e;
        bool lost = false;
        if (r->client && r->taken.n)
            lost = pd_buf_add(&r->pending, r->taken.p, r->taken.n, &e) < 0;
        r->taken.n = 0;
        r->over |= r->taken_over;
        if (r->client && (lost || (r->over && r->lost))) {
            pd_fail(&e, PD_ENOMEM, "run %s: out of memory for its records", r->name);
            pd_conn_close(r->client->c, &e);
        }
        send_pending(r);
        if (r->over && !r->pending.n)
            forget(w, r);
    }
}

/* ---- the loop: clients ---- */

static int on_opened(void *ctx, struct pd_conn *c, struct pd_err *e)
{
    struct client *k = pd_calloc(1, sizeof *k, "a client", e);
    (void)ctx;
    if (!k)
        return PD_ENOMEM;
    k->c = c;
    pd_conn_set(c, k);
    return 0;
}

/* Refused before it became a run: its error and its results. */
static void refuse(struct worker *w, struct pd_conn *c, const struct pd_request *q, const struct pd_err *why)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    struct pd_result as = { .mode = "aggregated", .decode_worker = { w->rt->worker, strlen(w->rt->worker) } };
    pd_refusal_log(q, why);
    pd_metric_add(w->m_ends[3], 1);
    if (pd_refusal_encode(q, why, "abort", &as, &b, &e) < 0)
        pd_conn_close(c, &e);
    for (size_t at = 0, len = 0; at < b.n; at += len) {
        struct pd_frame_scan scan = { 0 };
        if (pd_frame_next(&scan, b.p + at, b.n - at, SIZE_MAX / 2, &len, &e) != 1 || pd_conn_put(c, b.p + at, len, &e) < 0)
            break;
    }
    pd_buf_free(&b);
}

static struct run *find(struct worker *w, const char *name, size_t n)
{
    for (struct run *r = w->runs; r; r = r->next)
        if (n == PD_RUN_LEN && !memcmp(r->name, name, n))
            return r;
    return NULL;
}

static void on_record(void *ctx, struct pd_conn *c, const struct pd_rec *rec)
{
    struct worker *w = ctx;
    struct client *k = pd_conn_get(c);
    struct pd_err e;
    struct pd_bin v;
    if (rec->kind != PD_K_REQUEST) {
        struct pd_str kind = pd_rec_kind(rec);
        pd_fail(&e, PD_EFAIL, "a record of kind '%.*s' is not served here; requests are", (int)(kind.n < 40 ? kind.n : 40), kind.p);
        pd_conn_put_error(c, NULL, &e, "abort");
        return;
    }
    struct run *r = pd_calloc(1, sizeof *r, "a run", &e);
    if (!r) {
        pd_conn_close(c, &e);
        return;
    }
    int rc = pd_intake_read(rec->p, rec->n, w->o.seed, &r->in, &e);
    if (rc == 0 && (rc = pd_seen_add(&w->seen, r->in.req.run, PD_RUN_LEN, &e)) == 1) {
        rc = pd_fail(&e, PD_EFAIL, "request: run %s came already here (leave run out: one is made)", r->in.req.run);
        pd_run_new(r->in.req.run, NULL);        /* the answer to the other keeps the name */
    }
    if (rc < 0) {
        refuse(w, c, &r->in.req, &e);
        run_free(r);
        return;
    }
    memcpy(r->name, r->in.req.run, sizeof r->name);
    r->has_token = r->in.req.cancel_token.n == sizeof r->token;
    if (r->has_token)
        memcpy(r->token, r->in.req.cancel_token.p, sizeof r->token);
    r->stream = w->o.stream;
    if (pd_map_find(rec->p, rec->n, "stream", &v) == 1)
        pd_get_bool(v, &r->stream);
    r->client = k;
    r->prev = w->last;
    *w->last = r;
    w->last = &r->next;
    w->n_runs++;
    pd_metric_set(w->m_runs, w->n_runs);
    pd_conn_owe(c, 1);
    pd_run_step(w->o.trace, &(struct pd_step){ .run = r->name, .where = "aggregated" }, PD_ST_ACCEPTED, 0, NULL);
    pthread_mutex_lock(&w->lock);
    *w->last_in = r;
    w->last_in = &r->next_in;
    pthread_mutex_unlock(&w->lock);
    wake(w);
    if (w->n_runs >= w->max_runs) {
        k->held = true;
        k->next_held = NULL;
        *w->last_held = k;
        w->last_held = &k->next_held;
        pd_conn_hold(c);
    }
}

static void on_bad(void *ctx, struct pd_conn *c, const struct pd_err *why)
{
    struct pd_request q = { .n = 1 };
    pd_run_new(q.run, NULL);
    refuse(ctx, c, &q, why);
}

static void on_room(void *ctx, struct pd_conn *c)
{
    struct worker *w = ctx;
    for (struct run *r = w->runs, *next; r && !pd_conn_full(c); r = next) {
        next = r->next;
        if (!r->client || r->client->c != c || !r->pending.n)
            continue;
        send_pending(r);
        if (r->over && !r->pending.n)
            forget(w, r);
    }
}

static void cancel(struct worker *w, struct run *r, enum why why)
{
    int was = NOT;
    if (!atomic_compare_exchange_strong(&r->cancelled, &was, why))
        return;
    pthread_mutex_lock(&w->lock);
    w->look = true;
    pthread_mutex_unlock(&w->lock);
    wake(w);
}

static void on_gone(void *ctx, struct pd_conn *c, const struct pd_err *why)
{
    struct worker *w = ctx;
    struct client *k = pd_conn_get(c);
    (void)why;
    for (struct client **q = &w->held; *q; q = &(*q)->next_held)
        if (*q == k) {
            *q = k->next_held;
            if (!*q)
                w->last_held = q;
            break;
        }
    for (struct run *r = w->runs, *next; r; r = next) {
        next = r->next;
        if (r->client != k)
            continue;
        r->client = NULL;
        r->pending.n = r->at = 0;
        if (r->over)
            forget(w, r);
        else
            cancel(w, r, CLIENT_GONE);
    }
    pd_free(k);
}

static const struct pd_conn_cb client_cb = { .opened = on_opened, .record = on_record, .bad = on_bad, .room = on_room, .gone = on_gone };

/* ---- hooks ---- */

static bool is_busy(void *ctx) { return ((struct worker *)ctx)->n_runs > 0; }

static int on_cancel(void *ctx, const struct pd_rec *rec, const char **state, struct pd_err *e)
{
    struct worker *w = ctx;
    struct pd_bin v, token;
    struct pd_str name;
    struct run *r;
    if (pd_map_find(rec->p, rec->n, "run", &v) != 1 || !pd_get_str(v, &name))
        return pd_fail(e, PD_EFAIL, "cancel: run is missing");
    if (pd_map_find(rec->p, rec->n, "cancel_token", &v) != 1 || !pd_get_bin(v, &token) || token.n != sizeof r->token)
        return pd_fail(e, PD_EFAIL, "cancel: cancel_token (16 bytes, as the request gave it) is missing");
    if (!(r = find(w, name.p, name.n)))
        return 0;               /* "unknown": it is over, or never was */
    unsigned differ = !r->has_token;
    for (size_t i = 0; i < sizeof r->token; i++)        /* in the same time whatever differs */
        differ |= (unsigned)(r->token[i] ^ token.p[i]);
    if (differ)
        return pd_fail(e, PD_EFAIL, "cancel: the token is not that of run %s", r->name);
    cancel(w, r, BY_RECORD);
    *state = "cancelled";
    return 0;
}

static void ledger(void *ctx, void (*put)(void *to, const char *key, int64_t value), void *to)
{
    struct worker *w = ctx;
    put(to, "runs", w->n_runs);
    put(to, "runs_most", w->max_runs);
    put(to, "sequences", pd_metric_value(w->m_seqs));
    put(to, "blocks_used", pd_metric_value(w->m_blocks[0]));
    put(to, "blocks_free", pd_metric_value(w->m_blocks[1]));
    put(to, "blocks_cached", pd_metric_value(w->m_blocks[2]));
    put(to, "rows_cached", pd_metric_value(w->m_rows[2]));
    put(to, "steps", pd_metric_value(w->m_steps));
    put(to, "tokens", pd_metric_value(w->m_tokens));
    put(to, "preemptions", pd_metric_value(w->m_preempted));
    put(to, "completed", pd_metric_value(w->m_ends[0]));
    put(to, "failed", pd_metric_value(w->m_ends[1]) + pd_metric_value(w->m_ends[3]));
    put(to, "cancelled", pd_metric_value(w->m_ends[2]));
}

/* What a heartbeat says. Prompts that have not reached the batch count by the ids that they brought: the others are not tokenised yet. */
static void load(void *ctx, struct pd_load *l)
{
    struct worker *w = ctx;
    *l = (struct pd_load){ .runs = w->n_runs, .seqs = (uint32_t)pd_metric_value(w->m_seqs), .waiting = atomic_load(&w->waiting),
                           .blocks_used = (uint32_t)pd_metric_value(w->m_blocks[0]), .prefill_tokens_ahead = atomic_load(&w->prompt_left), .kv_tokens = atomic_load(&w->kv_tokens) };
    pthread_mutex_lock(&w->lock);
    for (struct run *r = w->in; r; r = r->next_in) {
        l->waiting++;
        l->prefill_tokens_ahead += r->in.req.n_token_ids;
    }
    pthread_mutex_unlock(&w->lock);
}

static void on_beat(void *ctx) { pd_register_beat(((struct worker *)ctx)->reg); }
static int on_follow(void *ctx, struct pd_conn *c, const struct pd_rec *rec, struct pd_err *e) { return pd_register_follow(((struct worker *)ctx)->reg, c, rec, e); }

static void on_drain(void *ctx)
{
    struct worker *w = ctx;
    pd_trace_process(w->o.trace, PD_ST_DRAINING);
    pd_register_beat(w->reg);
}

static int make_metrics(struct worker *w, struct pd_err *e)
{
#define COUNTER(n, h, ...) { .name = n, .help = h, .type = PD_COUNTER, __VA_ARGS__ }
#define GAUGE(n, h, ...) { .name = n, .help = h, .type = PD_GAUGE, __VA_ARGS__ }
    const struct pd_metric_about runs = GAUGE("pd_runs", "Runs in hand."), seqs = GAUGE("pd_sequences", "Sequences in the batch, waiting ones too."),
        blocks = GAUGE("pd_kv_blocks", "KV blocks of the pool.", .label = { "state" }),
        rows = COUNTER("pd_rows_total", "Rows computed, of prompts and of decoding.", .label = { "phase" }),
        cached = COUNTER("pd_cached_rows_total", "Rows not computed, as their KV was in the prefix cache."), steps = COUNTER("pd_steps_total", "Steps of the batch."), preempted = COUNTER("pd_preemptions_total", "Sequences put back for want of blocks."),
        ends = COUNTER("pd_runs_total", "Runs, by how they ended.", .label = { "end" }), tokens = COUNTER("pd_generated_tokens_total", "Tokens generated."),
        ttft = { .name = "pd_ttft_seconds", .help = "From acceptance to the first token.", .type = PD_HISTOGRAM, .scale = 6,
                 .bounds = pd_latency_bounds, .n_bounds = pd_n_latency_bounds };
    const struct { const struct pd_metric_about *about; struct pd_metric **to; const char *label; } t[] = {
        { &runs, &w->m_runs, NULL }, { &seqs, &w->m_seqs, NULL }, { &blocks, &w->m_blocks[0], "used" }, { &blocks, &w->m_blocks[1], "free" },
        { &blocks, &w->m_blocks[2], "cached" },
        { &rows, &w->m_rows[0], "prompt" }, { &rows, &w->m_rows[1], "decode" }, { &cached, &w->m_rows[2], NULL }, { &steps, &w->m_steps, NULL }, { &preempted, &w->m_preempted, NULL },
        { &ends, &w->m_ends[0], "completed" }, { &ends, &w->m_ends[1], "failed" }, { &ends, &w->m_ends[2], "cancelled" }, { &ends, &w->m_ends[3], "refused" },
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
    int rc = PD_ENOMEM;
    bool running = false;
    if (!w)
        return rc;
    const struct pd_dc_sink sink = { w, on_put, on_over };
    const struct pd_entry entry = { NULL, &client_cb, w, false };
    const struct pd_daemon_hooks hooks = { .ctx = w, .drain = on_drain, .busy = is_busy, .beat = on_beat, .ledger = ledger, .cancel = on_cancel, .follow = on_follow };
    w->rt = rt;
    w->o = *o;
    w->max_runs = o->max_runs ? o->max_runs : 4 * rt->max_seqs;
    w->last = &w->runs;
    w->last_held = &w->held;
    w->last_in = &w->in;
    w->last_ready = &w->ready;
    w->post = (struct pd_post){ .fn = deliver, .ctx = w };
    w->dco = (struct pd_decode_opts){ .seed = o->seed, .keep_going = true, .stream = o->stream };
    w->dc = (struct pd_decoder){ .rt = rt, .o = &w->dco, .sink = &sink, .trace = o->trace, .t0 = pd_mono_us() };
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->more, NULL);
    dopts->entry = &entry;
    dopts->n_entry = 1;
    dopts->worker = rt->worker;
    if ((rc = pd_dc_open(&w->dc, e)) < 0 || (rc = pd_daemon_new(dopts, &hooks, &w->d, e)) < 0 || (rc = make_metrics(w, e)) < 0)
        goto out;
    w->l = pd_daemon_loop(w->d);
    tell_load(w);
    struct pd_register_opts ro = { .rt = rt, .role = dopts->role, .max_runs = w->max_runs, .routers = o->routers, .load = load, .ctx = w };
    if ((rc = pd_register_new(w->d, &ro, &w->reg, e)) < 0)
        goto out;
    if (pthread_create(&w->thread, NULL, compute, w)) {
        rc = pd_fail(e, PD_ENOMEM, "cannot make the compute thread");
        goto out;
    }
    running = true;
    pd_trace_process(o->trace, PD_ST_READY);
    if ((rc = pd_daemon_ready(w->d, e)) == 0)
        rc = pd_daemon_run(w->d, e);
out:
    if (running) {
        pthread_mutex_lock(&w->lock);
        w->stop = true;
        pthread_mutex_unlock(&w->lock);
        wake(w);
        pthread_join(w->thread, NULL);
    }
    for (struct pd_dc_run *r = w->dc.head; r && rc < 0; r = r->next)
        pd_dc_step_end(&w->dc, r, e);
    pd_dc_close(&w->dc);
    pd_register_free(w->reg);
    for (struct pd_conn *c = NULL; w->d && (c = pd_daemon_conns(w->d)->first);) {
        if (pd_conn_handler(c) == &client_cb)
            pd_free(pd_conn_get(c));
        pd_conn_free(c);
    }
    pd_daemon_free(w->d);
    while (w->runs) {
        struct run *r = w->runs;
        w->runs = r->next;
        run_free(r);
    }
    pd_seen_free(&w->seen);
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->more);
    pd_free(w);
    return rc;
}
