#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../base/stop.h"
#include "../wire/routing.h"
#include "decoding.h"

void pd_dc_fatal(struct pd_decoder *d, const struct pd_err *e)
{
    if (!d->fatal.code)
        d->fatal = *e;
}

struct pd_dc_run *pd_dc_run_new(struct pd_decoder *d, struct pd_err *e)
{
    struct pd_dc_run *r = pd_calloc(1, sizeof *r, "run", e);
    if (!r)
        return NULL;
    *d->tail = r;
    d->tail = &r->next;
    r->mode = "aggregated";
    r->stream = d->o->stream;
    return r;
}

void pd_dc_run_free(struct pd_decoder *d, struct pd_dc_run *r)
{
    d->n_on_way -= pd_dc_on_way(r);
    for (struct pd_dc_run **q = &d->head; *q; q = &(*q)->next)
        if (*q == r) {
            *q = r->next;
            if (!*q)
                d->tail = q;
            break;
        }
    if (d->sink && d->sink->over)
        d->sink->over(d->sink->ctx, r);
    for (int32_t i = 0; r->choice && i < r->in.req.n; i++) {
        pd_text_free(&r->choice[i].text);
        pd_buf_free(&r->choice[i].tokens);
        pd_buf_free(&r->choice[i].logprobs);
    }
    pd_import_free(r->import);
    pd_intake_free(&r->in);
    pd_free(r);
}

static void emit(struct pd_decoder *d, struct pd_dc_run *r, struct pd_step s, enum pd_state_id state, uint64_t bytes, const char *cause)
{
    if (!r->has_op && r->in.n_tokens) {
        pd_op_make(r->op, r->in.req.run, "decode", r->in.tokens, (size_t)r->in.n_tokens * sizeof *r->in.tokens);
        r->has_op = true;
    }
    bool known = r->remote && r->desc.fp_fields.p;
    s.run = r->in.req.run;
    s.where = r->mode;
    s.gen = known ? r->desc.gen : NULL;
    s.op = r->has_op ? r->op : NULL;
    s.parent = known ? r->desc.op : r->has_parent ? r->parent : NULL;
    pd_run_step(d->trace, &s, state, bytes, cause);
}

void pd_dc_step(struct pd_decoder *d, struct pd_dc_run *r, enum pd_state_id state, uint64_t bytes, const char *cause)
{
    emit(d, r, (struct pd_step){ 0 }, state, bytes, cause);
}

void pd_dc_step_tokens(struct pd_decoder *d, struct pd_dc_run *r, enum pd_state_id state, uint32_t choice, uint32_t pos, uint32_t tokens)
{
    r->ended |= state == PD_ST_COMPLETED;
    emit(d, r, (struct pd_step){ .choice = choice, .pos = pos, .tokens = tokens }, state, 0, NULL);
}

void pd_dc_step_end(struct pd_decoder *d, struct pd_dc_run *r, const struct pd_err *why)
{
    if (!r->ended)
        pd_dc_step(d, r, why->code == PD_ECANCEL ? PD_ST_CANCELLED : PD_ST_FAILED, 0, why->msg);
    r->ended = true;
}

/* A run whose KV is on its way. Two may have one run id. */
struct pd_dc_run *pd_dc_find_on_way(struct pd_decoder *d, const char *run, const uint8_t *gen, enum pd_dc_match how)
{
    struct pd_dc_run *named = NULL;
    for (struct pd_dc_run *r = d->head; r; r = r->next) {
        if (!pd_dc_on_way(r) || strcmp(r->in.req.run, run))
            continue;
        if (gen && !memcmp(r->desc.gen, gen, sizeof r->desc.gen))
            return r;
        if (!named && (how == PD_BY_NAME || !r->desc.fp_fields.p))
            named = r;
    }
    return named;
}

static void on_started(void *ctx, struct pd_run *run)
{
    struct pd_dc_run *r = run->user;
    r->cached = run->n_cached;
    if (!r->begun)      /* imported KV: decode_started is written at submission */
        pd_dc_step(ctx, r, PD_ST_PREFILL_STARTED, 0, NULL);
    r->begun = true;
}

static bool on_token(void *ctx, struct pd_seq *s, uint32_t pos, const struct pd_sampled *t)
{
    return pd_dc_deliver(ctx, s->run->user, (uint32_t)s->choice, pos, t);
}

static void on_finished(void *ctx, struct pd_seq *s, const char *reason, const struct pd_err *why)
{
    struct pd_decoder *d = ctx;
    struct pd_dc_run *r = s->run->user;
    struct pd_run *run = s->run;
    uint32_t choice = (uint32_t)s->choice;
    bool last = run->n_open == 0;
    if (last && run->t_first && !(r->remote && !strcmp(r->mode, "remote"))) {
        r->queue_us = run->t_start - run->t_submit;
        r->prefill_us = run->t_first - run->t_start;
    }
    if (last) {
        pd_run_drop(d->batch, run);
        r->run = NULL;
        d->n_active--;
    }
    if (why && !r->told) {
        r->told = true;
        pd_dc_tell(d, r, why);
    }
    pd_dc_choice_done(d, r, choice, reason);
}

void pd_dc_submit(struct pd_decoder *d, struct pd_dc_run *r, uint32_t *blocks, uint32_t n_blocks)
{
    struct pd_err e;
    struct pd_job j = { .req = &r->in.req, .prompt = r->in.tokens, .n_prompt = r->in.n_tokens, .user = r, .cb = &d->cb, .blocks = blocks, .n_blocks = n_blocks,
                        .spent_us = pd_mono_us() - r->in.t_accept + r->before_us, .waited_us = r->waited_us };
    if (blocks) {
        j.first = r->desc.first;
        j.n_first = r->desc.n_first;
        j.keep_out = !pd_dc_same_field(d, r, "numerics");
    }
    j.resume = r->resume;
    j.n_resume = r->n_resume;
    r->submitted = true;        /* its own, or set when its kv came */
    d->n_active++;
    r->begun = r->decoding = blocks != NULL;
    if (blocks)
        pd_dc_step(d, r, PD_ST_DECODE_STARTED, 0, NULL);
    int rc = pd_batch_submit(d->batch, &j, &r->run, &e);
    if (rc < 0) {
        d->n_active--;
        pd_dc_refuse(d, r, &e);
    }
}

static void take_request(struct pd_decoder *d, const struct pd_rec *rec)
{
    struct pd_err e;
    struct pd_dc_run *r = pd_dc_run_new(d, &e);
    if (!r) {
        pd_dc_fatal(d, &e);
        return;
    }
    int rc = pd_intake_take(d->rt, rec->p, rec->n, d->o->seed, &r->in, &e);
    if (rc == 0 && (rc = pd_seen_add(&d->requests, r->in.req.run, PD_RUN_LEN, &e)) == 1) {
        rc = pd_fail(&e, PD_EFAIL, PD_RUN_TWICE, r->in.req.run);
        pd_run_new(r->in.req.run, NULL);        /* the answer to the other keeps the name */
    }
    if (rc == 0)
        rc = pd_dc_make_choices(r, d->rt->model->tok, &e);
    if (rc < 0) {
        pd_dc_refuse(d, r, &e);
        return;
    }
    struct pd_routing route;
    if (r->in.req.route.p && pd_routing_decode(r->in.req.route, &r->in.mem, &route, NULL) == 0 && !strcmp(route.mode, "local"))
        r->mode = "local";      /* a router before us chose so */
    pd_dc_step(d, r, PD_ST_ACCEPTED, 0, NULL);
    pd_dc_submit(d, r, NULL, 0);
}

/* --- the loop ------------------------------------------------------------------------------------------------------------------------------------- */

/* An error record of what comes before us. A dump's reader says which KV is damaged: that run is recomputed when its kv comes. Another filter's counts
 * towards our status, so that the last command of a pipe tells. True: it is dealt with; false: it goes on. */
static bool take_error(struct pd_decoder *d, const struct pd_rec *rec)
{
    struct pd_err e;
    struct pd_arena mem = { 0 };
    struct pd_error_rec er;
    bool known = pd_error_decode(rec->p, rec->n, &mem, &er, &e) == 0;
    struct pd_dc_run *r = known && er.run[0] ? pd_dc_find_on_way(d, er.run, NULL, PD_BY_NAME) : NULL;
    int code = known && er.code ? er.code > 0 ? -er.code : er.code : PD_EFAIL;
    bool damaged = r && d->o->from_dump;
    if (known)
        pd_fail(&e, code, "%.*s", (int)er.message.n, er.message.p);
    if (damaged)
        pd_dc_reject_kv(d, r, &e);
    else {
        if (d->o->from_dump)
            pd_error("%s", e.msg);
        d->status = pd_exit_worse(d->status, code);
        if (r) {        /* it failed there, and its results come from there */
            pd_dc_step_end(d, r, &e);
            pd_dc_run_free(d, r);
        }
    }
    pd_arena_free(&mem);
    return damaged;
}

static void pass_through(struct pd_decoder *d, const struct pd_rec *rec)
{
    struct pd_err e;
    if (rec->kind == PD_K_ERROR && take_error(d, rec))
        return;
    if (d->o->text || pd_wstream_put(d->out, rec->p, rec->n, &e) == 0)
        return;
    if (pd_wstream_failed(d->out) || e.code == PD_ENOMEM) {
        pd_dc_fatal(d, &e);
        return;
    }
    pd_error("a record of kind %s is dropped: %s", pd_kind_name(rec->kind), e.msg);
    d->status = pd_exit_worse(d->status, PD_EFAIL);
}

static int take_record(struct pd_decoder *d, struct pd_rstream *in, int timeout, struct pd_err *e)
{
    struct pd_rec rec;
    bool bad = false;
    int rc = pd_rstream_next(in, timeout, &rec, &bad, e);
    if (rc < 0 && bad) {
        struct pd_dc_run *r = pd_dc_run_new(d, e);
        if (!r)
            return PD_ENOMEM;
        r->in.req.n = 1;
        pd_run_new(r->in.req.run, NULL);
        pd_dc_refuse(d, r, e);
        return 1;
    }
    if (rc != 1)
        return rc;
    switch (rec.kind) {
    case PD_K_REQUEST: take_request(d, &rec); break;
    case PD_K_OFFER: pd_dc_take_offer(d, &rec); break;
    case PD_K_CHUNK: pd_dc_take_chunk(d, &rec); break;
    case PD_K_KV: pd_dc_take_kv(d, &rec); break;
    case PD_K_HELLO: break;     /* pd-kvsend asks whether the transfer protocol is spoken here; a filter has no way to answer */
    default: pass_through(d, &rec); break;
    }
    return 1;
}

/* The stream is over: what was still on its way is discarded by name. */
static void discard_unfinished(struct pd_decoder *d)
{
    for (struct pd_dc_run *r = d->head, *next; r; r = next) {
        next = r->next;
        if (!pd_dc_on_way(r))
            continue;
        struct pd_err why;
        pd_fail(&why, PD_ECORRUPT, "the stream ended before the run's kv record: its KV is discarded%s%.300s", r->bad.code ? "; before that: " : "", r->bad.code ? r->bad.msg : "");
        pd_dc_refuse(d, r, &why);
    }
}

static void step(struct pd_decoder *d)
{
    struct pd_err e;
    int rows = pd_batch_step(d->batch, &e);
    if (rows < 0)
        pd_dc_fatal(d, &e);
    if (d->sink)
        return;         /* a daemon's work has no end to tell */
    struct pd_batch_stats st = pd_batch_stats(d->batch);
    pd_run_progress("decode", d->t0, st.prompt_rows + st.decode_rows, st.rows_left, st.runs);
}

/* The run that began last of those whose KV is being received. */
static struct pd_dc_run *youngest_import(const struct pd_decoder *d)
{
    struct pd_dc_run *last = NULL;
    for (struct pd_dc_run *r = d->head; r; r = r->next)
        if (r->import && pd_dc_on_way(r))
            last = r;
    return last;
}

/* Nothing could run for want of blocks. An import that holds some may end with the next record; one that does not is given up for those that decode (it is
 * recomputed later); when there is none, the oldest run has outgrown the pool. True: wait for input. */
static bool unstick(struct pd_decoder *d, bool may_wait)
{
    struct pd_err e;
    struct pd_dc_run *r = youngest_import(d);
    if (!r)
        pd_batch_fail_oldest(d->batch);
    else if (may_wait)
        return true;
    else {
        pd_fail(&e, PD_ENOMEM, "its blocks were needed by runs that decode already (raise --kv-mem)");
        pd_dc_reject_kv(d, r, &e);
    }
    return false;
}

bool pd_dc_step_batch(struct pd_decoder *d)
{
    uint64_t before = pd_batch_stats(d->batch).steps;
    step(d);
    return pd_batch_stats(d->batch).steps != before || !pd_batch_busy(d->batch);
}

bool pd_dc_turn(struct pd_decoder *d, bool may_wait)
{
    return !pd_dc_step_batch(d) && unstick(d, may_wait);
}

static bool on_valid(void *ctx, struct pd_run *run)
{
    struct pd_decoder *d = ctx;
    return d->kv_valid(d->kv_ctx, run->user);
}

static bool on_unwanted(void *ctx, struct pd_run *run) { return ((struct pd_decoder *)ctx)->unwanted(run->user); }

int pd_dc_open(struct pd_decoder *d, struct pd_err *e)
{
    struct pd_batch_opts bo = pd_batch_opts_of(d->rt);
    d->cb = (struct pd_batch_cb){ .ctx = d, .token = on_token, .finished = on_finished, .started = on_started, .valid = d->kv_valid ? on_valid : NULL,
                                  .unwanted = d->unwanted ? on_unwanted : NULL };
    d->tail = &d->head;
    d->own_batch = !d->batch;
    return d->batch ? 0 : pd_batch_new(d->rt->model, d->rt->threads, d->rt->k, d->rt->pool, &bo, NULL, &d->batch, e);
}

void pd_dc_close(struct pd_decoder *d)
{
    if (d->own_batch)
        pd_batch_free(d->batch);
    while (d->head) {
        d->head->run = NULL;    /* it went with the batch */
        pd_dc_run_free(d, d->head);
    }
    pd_seen_free(&d->gens);
    pd_seen_free(&d->requests);
}

/* The input is over: what was still on its way gives its blocks back at once. */
static void close_input(struct pd_decoder *d, bool *open)
{
    *open = false;
    if (!d->fatal.code)
        discard_unfinished(d);
}

int pd_decode_run(struct pd_runtime *rt, const struct pd_decode_opts *o, struct pd_rstream *in, struct pd_wstream *out, struct pd_trace *trace, int *status,
                  struct pd_err *e)
{
    struct pd_decoder d = { .rt = rt, .o = o, .out = out, .trace = trace, .t0 = pd_mono_us() };
    bool open = true, stuck = false;    /* stuck: wait for input, as no run can go on before an import ends */
    uint32_t limit = 4 * rt->max_seqs;
    int rc;
    if ((rc = pd_dc_open(&d, e)) < 0)
        goto out;
    while (!d.fatal.code && (open || pd_batch_busy(d.batch))) {
        if (pd_stop_level() > 1) {
            rc = pd_fail(e, PD_ECANCEL, "stopped by a signal with %u runs unfinished", d.n_active);
            goto out;
        }
        if (pd_stop_level() && open) {
            pd_run_draining(d.n_active);
            close_input(&d, &open);
        }
        if (open && d.n_active < limit) {
            int got = take_record(&d, in, pd_batch_busy(d.batch) && !stuck ? 0 : 500, e);
            if (got < 0) {
                pd_error("%s", e->msg);
                d.status = pd_exit_worse(d.status, e->code);
            }
            if (got <= 0)
                close_input(&d, &open);
            if (o->text)
                pd_dc_print_text(&d);
            if (stuck && got == 2)
                unstick(&d, false);
            stuck = false;
            if (got == 1)
                continue;
        }
        if (pd_batch_busy(d.batch))
            stuck = pd_dc_turn(&d, open && d.n_active < limit);
        if (o->text)
            pd_dc_print_text(&d);
        struct pd_err we;
        if (pd_wstream_flush(out, &we) < 0)
            pd_dc_fatal(&d, &we);
    }
    if (o->text)
        pd_dc_print_text(&d);
    pd_progress_end();
    if (d.dropped_chunks && o->keep_going)
        pd_warn("%llu chunks of refused or unknown runs were dropped", (unsigned long long)d.dropped_chunks);
    if (d.fatal.code) {
        *e = d.fatal;
        rc = e->code;
    } else
        rc = pd_wstream_flush(out, e);
out:
    if (pd_stop_level())
        d.status = pd_exit_worse(d.status, PD_ECANCEL);
    *status = d.status;
    for (struct pd_dc_run *r = d.head; r && rc < 0; r = r->next)
        pd_dc_step_end(&d, r, e);
    pd_dc_close(&d);
    return rc;
}
