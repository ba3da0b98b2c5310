#include "../base/clock.h"
#include "../base/hash.h"
#include "../base/log.h"
#include "../base/seen.h"
#include "../base/stop.h"
#include "../kv/prefix.h"
#include "../wire/routing.h"
#include "describe.h"
#include "prefiller.h"
#include "publish.h"

struct pf_run {
    struct pd_intake in;
    struct pd_kvdesc desc;
    struct pd_plan plan;
    struct pd_run *run;
    uint32_t *sent;             /* [layers] ranges published so far */
    struct pd_first *first;     /* [n] */
    uint8_t (*hashes)[16];
    struct pd_buf t;
    struct pd_err why;          /* set: the run failed */
    bool offered, ended;        /* ended: its last event is written, or its kv is whole and on its way out */
    struct pf_run *next;
};

struct prefiller {
    struct pd_runtime *rt;
    const struct pd_prefill_opts *o;
    struct pd_batch *batch;
    struct pd_publish *pub;
    bool dumping;
    struct pd_trace *trace;
    struct pf_run *runs;        /* all alive, for clean-up */
    uint32_t n_runs;
    struct pd_seen seen;
    int status;
    struct pd_err fatal;
    uint64_t tokens_done;
    int64_t t0;
};

static void fatal(struct prefiller *p, const struct pd_err *e)
{
    if (!p->fatal.code)
        p->fatal = *e;
}

static void run_free(struct prefiller *p, struct pf_run *r)
{
    for (struct pf_run **q = &p->runs; *q; q = &(*q)->next)
        if (*q == r) {
            *q = r->next;
            break;
        }
    p->n_runs--;
    if (r->run)
        pd_run_drop(p->batch, r->run);
    pd_buf_free(&r->t);
    pd_intake_free(&r->in);
    pd_free(r);
}

static void reap(struct prefiller *p, bool wait)
{
    struct pf_run *r;
    while ((r = pd_publish_ended(p->pub, wait))) {
        run_free(p, r);
        wait = false;
    }
}

static void step_of(struct prefiller *p, struct pf_run *r, enum pd_state_id state, uint64_t bytes)
{
    struct pd_step s = { .run = r->desc.run, .where = "remote", .gen = r->desc.gen, .op = r->desc.op };
    pd_run_step(p->trace, &s, state, bytes, NULL);
}

/* The run will not be published. */
static void end_step(struct prefiller *p, struct pf_run *r, const struct pd_err *why)
{
    bool known = r->desc.fp_fields.p;
    struct pd_step s = { .run = r->in.req.run, .where = "remote", .gen = known ? r->desc.gen : NULL, .op = known ? r->desc.op : NULL };
    r->ended = true;
    pd_run_step(p->trace, &s, why->code == PD_ECANCEL ? PD_ST_CANCELLED : PD_ST_FAILED, 0, why->msg);
}

/* A failed request: its error and results, on the stream or (a dump has no place for them) on stderr alone. */
static void refuse(struct prefiller *p, struct pf_run *r, const struct pd_err *why)
{
    const struct pd_request *req = &r->in.req;
    struct pd_buf b = { 0 };
    struct pd_err e;
    struct pd_result as = { .mode = "remote", .prefill_worker = { p->rt->worker, strlen(p->rt->worker) } };
    pd_refusal_log(req, why);
    end_step(p, r, why);
    p->status = pd_exit_worse(p->status, why->code);
    if (p->dumping)
        return;
    if (pd_refusal_encode(req, why, "abort", &as, &b, &e) < 0 || pd_publish_record(p->pub, &b, &e) < 0)
        fatal(p, &e);
    pd_buf_free(&b);
}

/* --- descriptor ----------------------------------------------------------------------------------------------------------------------------------- */

static int describe(struct prefiller *p, struct pf_run *r, struct pd_err *e)
{
    struct pd_kvdesc *d = &r->desc;
    const struct pd_request *q = &r->in.req;
    int rc = pd_gen_new(d->gen, e);
    if (rc < 0)
        return rc;
    pd_describe(p->rt, &r->in, d);
    pd_op_make(d->op, q->run, "prefill", r->in.tokens, (size_t)r->in.n_tokens * sizeof *r->in.tokens);
    if (!p->dumping && q->max_tokens == 1)
        return 0;       /* ends here: no payload */
    if ((rc = pd_describe_plan(p->rt, d, &r->plan, e)) < 0)
        return rc;
    strcpy(d->payload.scheme, p->dumping ? "h5" : "inline");
    if (!p->dumping)
        strcpy(d->payload.codec, pd_codec_name(p->o->codec, d->layout.dtype));
    if (!(r->sent = pd_arena_alloc(&r->in.mem, (size_t)d->layout.layers, sizeof *r->sent, e)))
        return PD_ENOMEM;
    if (p->dumping) {
        uint32_t bs = d->layout.block_size, full = d->n_tokens / bs;
        if (!(r->hashes = pd_arena_alloc(&r->in.mem, full ? full : 1, 16, e)))
            return PD_ENOMEM;
        pd_block_hashes(p->rt->fp.must_seed, d->token_ids, d->n_tokens, bs, q->adapter, q->cache_salt, r->hashes);
    }
    return 0;
}

static int put_desc(struct prefiller *p, struct pf_run *r, bool offer, struct pd_err *e)
{
    struct pd_buf b = { 0 };
    r->desc.offer = offer;
    int rc = pd_kvdesc_encode(&r->desc, &b, e);
    if (rc == 0)
        rc = pd_publish_record(p->pub, &b, e);
    pd_buf_free(&b);
    return rc;
}

/* --- callbacks of the batch ----------------------------------------------------------------------------------------------------------------------- */

static void on_layer(void *ctx, struct pd_run *run, int layer, uint32_t n)
{
    struct prefiller *p = ctx;
    struct pf_run *r = run->user;
    struct pd_err e;
    if (p->dumping || p->fatal.code)
        return;
    if (!r->offered) {      /* also of a run without payload: offers tell the order of the runs */
        r->offered = true;
        if (r->plan.n_chunks)
            step_of(p, r, PD_ST_KV_TRANSFER_STARTED, 0);
        if (put_desc(p, r, true, &e) < 0) {
            fatal(p, &e);
            return;
        }
    }
    if (!r->plan.n_chunks)
        return;
    uint32_t bs = r->desc.layout.block_size;
    for (; r->sent[layer] < r->plan.n_ranges; r->sent[layer]++) {
        uint64_t end = (uint64_t)(r->sent[layer] + 1) * r->plan.chunk_blocks * bs;
        if ((end < r->desc.n_tokens ? end : r->desc.n_tokens) > n)
            break;
        uint32_t index = r->sent[layer] * r->plan.layers + (uint32_t)layer;
        if (pd_publish_chunk(p->pub, &r->desc, &r->plan, pd_seq_blocks(&run->seq[0]), index, &e) < 0) {
            fatal(p, &e);
            return;
        }
    }
}

static void on_started(void *ctx, struct pd_run *run) { step_of(ctx, run->user, PD_ST_PREFILL_STARTED, 0); }

static bool on_token(void *ctx, struct pd_seq *s, uint32_t pos, const struct pd_sampled *t)
{
    struct pf_run *r = s->run->user;
    (void)ctx;
    (void)pos;
    pd_describe_first(&r->first[s->choice], t, &r->in.mem);
    return false;
}

static void complete(struct prefiller *p, struct pf_run *r)
{
    struct pd_err e;
    int rc;
    r->desc.first = r->first;
    r->desc.n_first = (uint32_t)r->in.req.n;
    step_of(p, r, PD_ST_PREFILL_COMPLETED, 0);
    step_of(p, r, PD_ST_KV_PUBLISHED, r->plan.bytes);   /* before the kv leaves: what decode does next comes after it in the log */
    if ((rc = pd_describe_times(&r->desc, r->run, r->in.t_accept, &r->t, &e)) == 0)
        rc = p->dumping ? pd_publish_dump(p->pub, &r->desc, pd_seq_blocks(&r->run->seq[0]), (const uint8_t (*)[16])r->hashes,
                                          r->desc.n_tokens / r->desc.layout.block_size, &e)
                        : put_desc(p, r, false, &e);
    if (rc < 0)
        fatal(p, &e);
    p->tokens_done += r->desc.n_tokens;
}

static void on_finished(void *ctx, struct pd_seq *s, const char *reason, const struct pd_err *why)
{
    struct prefiller *p = ctx;
    struct pf_run *r = s->run->user;
    struct pd_err e;
    (void)reason;
    if (why && !r->why.code)
        r->why = *why;
    if (s->run->n_open)
        return;
    r->run = s->run;
    if (r->why.code)
        refuse(p, r, &r->why);
    else
        complete(p, r);
    if (pd_publish_end(p->pub, r, &e) < 0)
        fatal(p, &e);
}

/* --- the loop ------------------------------------------------------------------------------------------------------------------------------------- */

static void take_request(struct prefiller *p, const struct pd_rec *rec, struct pd_err *e)
{
    struct pf_run *r = pd_calloc(1, sizeof *r, "run", e);
    if (!r) {
        fatal(p, e);
        return;
    }
    r->next = p->runs;
    p->runs = r;
    p->n_runs++;
    struct pd_job j;
    struct pd_run *run;
    int rc = pd_intake_take(p->rt, rec->p, rec->n, p->o->seed, &r->in, e);
    if (rc < 0)
        goto refused;
    if ((rc = pd_seen_add(&p->seen, r->in.req.run, PD_RUN_LEN, e)) != 0) {
        if (rc > 0)
            pd_fail(e, PD_EFAIL, PD_RUN_TWICE, r->in.req.run);
        pd_run_new(r->in.req.run, NULL);        /* the answer to the other keeps the name */
        goto refused;
    }
    pd_run_step(p->trace, &(struct pd_step){ .run = r->in.req.run, .where = "remote" }, PD_ST_ACCEPTED, 0, NULL);
    if ((rc = describe(p, r, e)) < 0 || (rc = pd_describe_check(&r->desc, p->o->max_record, e)) < 0)
        goto refused;
    if (!(r->first = pd_arena_alloc(&r->in.mem, (size_t)r->in.req.n, sizeof *r->first, e)))
        goto refused;
    j = (struct pd_job){ .req = &r->in.req, .prompt = r->in.tokens, .n_prompt = r->in.n_tokens, .user = r, .prefill_only = true,
                        .spent_us = pd_mono_us() - r->in.t_accept };
    if ((rc = pd_batch_submit(p->batch, &j, &run, e)) < 0)
        goto refused;
    r->run = run;
    return;
refused:
    refuse(p, r, e);
    run_free(p, r);
}

static void pass_through(struct prefiller *p, const struct pd_rec *rec)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    if (p->dumping)
        return;
    if (pd_buf_add(&b, rec->p, rec->n, &e) < 0 || pd_publish_record(p->pub, &b, &e) < 0)
        fatal(p, &e);
    pd_buf_free(&b);
}

/* A router before us says that whoever decodes it computes the prompt. */
static bool goes_on_bare(const struct pd_rec *rec)
{
    struct pd_arena mem = { 0 };
    struct pd_routing route;
    struct pd_bin map;
    bool bare = pd_map_find(rec->p, rec->n, "route", &map) == 1 && pd_routing_decode(map, &mem, &route, NULL) == 0 && !route.has_p;
    pd_arena_free(&mem);
    return bare;
}

/* A record that is not a request: another filter's. It is passed on; an error counts towards our status, so that the last command of a pipe tells. */
static int take_record(struct prefiller *p, struct pd_rstream *in, int timeout, struct pd_err *e)
{
    struct pd_rec rec;
    bool bad = false;
    int rc = pd_rstream_next(in, timeout, &rec, &bad, e);
    if (rc < 0 && bad) {
        struct pf_run none = { .in.req.n = 1 };
        pd_run_new(none.in.req.run, NULL);
        refuse(p, &none, e);
        return 1;
    }
    if (rc != 1)
        return rc;
    if (rec.kind == PD_K_REQUEST && (p->dumping || !goes_on_bare(&rec)))
        take_request(p, &rec, e);
    else
        pass_through(p, &rec);
    return 1;
}

static void run_step(struct prefiller *p)
{
    struct pd_err e;
    int rows = pd_batch_step(p->batch, &e);
    if (rows < 0)
        fatal(p, &e);
    if (rows == 0 && pd_batch_busy(p->batch)) {
        uint32_t before = p->n_runs;
        reap(p, true);          /* the blocks are on their way out */
        if (p->n_runs == before && pd_publish_error(p->pub, &e) == 0)
            pd_batch_fail_oldest(p->batch);
    }
    struct pd_batch_stats st = pd_batch_stats(p->batch);
    pd_run_progress("prefill", p->t0, st.prompt_rows + st.decode_rows, st.rows_left, st.runs);
}

int pd_prefill_run(struct pd_runtime *rt, const struct pd_prefill_opts *o, struct pd_rstream *in, struct pd_wstream *out, struct pd_dump_w *dump,
                   struct pd_trace *trace, int *status, struct pd_err *e)
{
    struct prefiller p = { .rt = rt, .o = o, .trace = trace, .dumping = dump != NULL, .t0 = pd_mono_us() };
    struct pd_batch_cb cb = { .ctx = &p, .layer_done = on_layer, .token = on_token, .finished = on_finished, .started = on_started };
    struct pd_batch_opts bo = pd_batch_opts_of(rt);
    bool open = true;
    int rc = pd_batch_new(rt->model, rt->threads, rt->k, rt->pool, &bo, &cb, &p.batch, e);
    if (rc < 0 || (rc = pd_publish_new(out, dump, rt->pool, &p.pub, e)) < 0)
        goto out;
    pd_publish_codec(p.pub, o->codec);
    while (!p.fatal.code && (open || pd_batch_busy(p.batch))) {
        reap(&p, false);
        if (pd_stop_level() > 1) {
            rc = pd_fail(e, PD_ECANCEL, "stopped by a signal with %u runs unfinished", p.n_runs);
            goto out;
        }
        if (pd_stop_level() && open) {
            pd_run_draining(p.n_runs);
            open = false;
        }
        if (open && p.n_runs < 4 * rt->max_seqs) {
            int got = take_record(&p, in, pd_batch_busy(p.batch) ? 0 : 500, e);
            if (got == 0)
                open = false;
            else if (got < 0) {         /* the stream itself is broken: finish what came before it, then say so */
                pd_error("%s", e->msg);
                p.status = pd_exit_worse(p.status, e->code);
                open = false;
            } else if (got == 1)
                continue;               /* take all that is there before a step */
        }
        if (pd_batch_busy(p.batch))
            run_step(&p);
        else if (!open || p.n_runs >= 4 * rt->max_seqs)
            reap(&p, true);
        if (pd_publish_error(p.pub, e))
            fatal(&p, e);
    }
    pd_progress_end();
    rc = pd_publish_finish(p.pub, e);
    if (p.fatal.code) {
        *e = p.fatal;
        rc = e->code;
    }
out:
    if (pd_stop_level())
        p.status = pd_exit_worse(p.status, PD_ECANCEL);
    *status = p.status;
    if (rc < 0 && p.pub)
        reap(&p, false);        /* these went out before it failed */
    for (struct pf_run *r = p.runs; r && rc < 0; r = r->next)
        if (!r->ended)
            end_step(&p, r, e);
    pd_publish_free(p.pub);
    while (p.runs)
        run_free(&p, p.runs);
    pd_batch_free(p.batch);
    pd_seen_free(&p.seen);
    return rc;
}
