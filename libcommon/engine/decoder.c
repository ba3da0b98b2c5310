#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../base/seen.h"
#include "../base/stop.h"
#include "../wire/value.h"
#include "batch.h"
#include "decoder.h"
#include "text.h"

struct choice {
    struct pd_text text;
    struct pd_buf tokens, logprobs;     /* int32, float */
    size_t printed, streamed;           /* bytes of text.text already written, in text mode and as token records */
    int64_t t_first, t_last;            /* mono us */
    bool done, closed;          /* closed: printed to its end */
};

struct dc_run {
    struct pd_intake in;
    struct pd_kvdesc desc;      /* of a run that came with KV */
    bool remote, submitted;
    struct pd_import *import;
    struct pd_err bad;          /* why its KV is not used */
    char *fallback;             /* the arena's: the reason in the result */
    const char *mode;
    uint64_t kv_bytes;
    int64_t kv_us, before_us;   /* verify and copy; what passed before the kv record came (the descriptor's stages) */
    struct choice *choice;      /* [req.n], the arena's */
    uint32_t n_done;
    struct dc_run *next;        /* in order of input */
};

struct decoder {
    struct pd_runtime *rt;
    const struct pd_decode_opts *o;
    struct pd_batch *batch;
    struct pd_wstream *out;
    struct pd_trace *trace;
    struct dc_run *head, **tail;
    uint32_t n_active;          /* submitted, not finished */
    struct pd_seen answered;    /* runs that had their results: what comes of them now is a replay, or the rest of a refused one */
    char told[PD_RUN_LEN + 1];  /* the run whose stray records a line was last written about */
    uint64_t dropped_chunks;
    bool warned_advisory;
    int status;
    struct pd_err fatal;
    int64_t t0;
};

static void fatal(struct decoder *d, const struct pd_err *e)
{
    if (!d->fatal.code)
        d->fatal = *e;
}

/* --- writing -------------------------------------------------------------------------------------------------------------------------------------- */

static void put(struct decoder *d, const struct pd_buf *b, int rc, struct pd_err *e)
{
    if (rc == 0)
        rc = pd_wstream_put(d->out, b->p, b->n, e);
    if (rc < 0)
        fatal(d, e);
}

static void put_token(struct decoder *d, struct dc_run *r, uint32_t choice, uint32_t pos, const struct pd_sampled *t)
{
    struct choice *c = &r->choice[choice];
    struct pd_token rec = { .choice = choice, .pos = (int32_t)pos, .token = t->token, .has_logprob = t->has_logprob, .logprob = t->logprob, .top = t->top,
                            .n_top = t->n_top, .t_us = c->t_last - d->t0 };
    memcpy(rec.run, r->in.req.run, sizeof rec.run);
    rec.text = (struct pd_str){ (const char *)c->text.text.p + c->streamed, c->text.text.n - c->streamed };
    if (!rec.text.n)
        rec.text.p = "";
    c->streamed = c->text.text.n;
    struct pd_buf b = { 0 };
    struct pd_err e;
    put(d, &b, pd_token_encode(&rec, &b, &e), &e);
    pd_buf_free(&b);
}

static void put_result(struct decoder *d, struct dc_run *r, uint32_t choice, const char *reason)
{
    struct choice *c = &r->choice[choice];
    uint32_t n = (uint32_t)(c->tokens.n / sizeof(int32_t));
    struct pd_result res = {
        .id = r->in.req.id, .choice = choice, .text = { c->text.text.p ? (const char *)c->text.text.p : "", c->text.text.n }, .tokens = (const int32_t *)(const void *)c->tokens.p,
        .n_tokens = n, .logprobs = r->in.req.logprobs ? (const float *)(const void *)c->logprobs.p : NULL, .prompt_tokens = r->in.n_tokens, .completion_tokens = n,
        .kv_ms = (double)r->kv_us / 1e3, .kv_bytes = r->kv_bytes, .tpot_ms = -1, .has_fingerprint = true,
        .decode_worker = { d->rt->worker, strlen(d->rt->worker) },
    };
    memcpy(res.run, r->in.req.run, sizeof res.run);
    snprintf(res.finish_reason, sizeof res.finish_reason, "%s", reason);
    snprintf(res.mode, sizeof res.mode, "%s", r->mode);
    memcpy(res.fingerprint, d->rt->fp.sha, sizeof res.fingerprint);
    bool used = !strcmp(r->mode, "remote");
    if (r->remote) {
        res.has_gen = true;
        memcpy(res.gen, r->desc.gen, sizeof res.gen);
        res.prefill_worker = r->desc.worker;
        res.recomputed_tokens = used ? !r->desc.n_first : r->in.n_tokens;
        res.transferred_tokens = used && r->kv_bytes ? r->in.n_tokens - res.recomputed_tokens : 0;
    }
    if (r->fallback)
        res.fallback = (struct pd_str){ r->fallback, strlen(r->fallback) };
    if (c->t_first) {
        res.ttft_ms = (double)(r->before_us + c->t_first - r->in.t_accept) / 1e3;
        res.e2e_ms = (double)(r->before_us + c->t_last - r->in.t_accept) / 1e3;
        if (n > 1)
            res.tpot_ms = (res.e2e_ms - res.ttft_ms) / (n - 1);
    }
    struct pd_buf b = { 0 };
    struct pd_err e;
    put(d, &b, pd_result_encode(&res, &b, &e), &e);
    pd_buf_free(&b);
}

static void run_free(struct decoder *d, struct dc_run *r)
{
    struct pd_err e;
    if (r->in.req.run[0] && pd_seen_add(&d->answered, r->in.req.run, &e) < 0)
        fatal(d, &e);
    for (struct dc_run **q = &d->head; *q; q = &(*q)->next)
        if (*q == r) {
            *q = r->next;
            if (!*q)
                d->tail = q;
            break;
        }
    for (int32_t i = 0; r->choice && i < r->in.req.n; i++) {
        pd_text_free(&r->choice[i].text);
        pd_buf_free(&r->choice[i].tokens);
        pd_buf_free(&r->choice[i].logprobs);
    }
    pd_import_free(r->import);
    pd_intake_free(&r->in);
    pd_free(r);
}

/* Text mode: what may be shown of the oldest run goes out; a finished one makes way for the next. */
static void print_text(struct decoder *d)
{
    struct pd_err e;
    while (d->head && !d->fatal.code) {
        struct dc_run *r = d->head;
        uint32_t n = r->choice ? (uint32_t)r->in.req.n : 0;
        for (uint32_t i = 0; i < n; i++) {
            struct choice *c = &r->choice[i];
            if (c->text.text.n > c->printed && pd_wstream_raw(d->out, c->text.text.p + c->printed, c->text.text.n - c->printed, &e) < 0)
                fatal(d, &e);
            c->printed = c->text.text.n;
            if (!c->done)
                return;
            if (!c->closed && pd_wstream_raw(d->out, "\n", 1, &e) < 0)
                fatal(d, &e);
            c->closed = true;
        }
        if (!r->choice || r->n_done < n)
            return;
        run_free(d, r);
    }
}

/* --- a run's life ---------------------------------------------------------------------------------------------------------------------------------- */

static struct dc_run *run_new(struct decoder *d, struct pd_err *e)
{
    struct dc_run *r = pd_calloc(1, sizeof *r, "run", e);
    if (!r)
        return NULL;
    *d->tail = r;
    d->tail = &r->next;
    r->mode = "aggregated";
    return r;
}

static struct dc_run *run_find(struct decoder *d, const char *run)
{
    for (struct dc_run *r = d->head; r; r = r->next)
        if (!strcmp(r->in.req.run, run))
            return r;
    return NULL;
}

static int make_choices(struct dc_run *r, const struct pd_tokenizer *tok, struct pd_err *e)
{
    const struct pd_request *q = &r->in.req;
    if (!(r->choice = pd_arena_alloc(&r->in.mem, (size_t)q->n, sizeof *r->choice, e)))
        return PD_ENOMEM;
    for (int32_t i = 0; q->echo && i < q->n; i++) {
        struct pd_buf *t = &r->choice[i].text.text;
        int rc = 0;
        if (q->prompt.p)
            rc = pd_buf_add(t, q->prompt.p, q->prompt.n, e);
        else
            for (uint32_t k = 0; rc == 0 && k < r->in.n_tokens; k++)
                rc = pd_detokenize(tok, r->in.tokens[k], false, k == 0, t, e);
        if (rc < 0)
            return rc;
        r->choice[i].streamed = t->n;
    }
    return 0;
}

/* The run fails: an error, and a result a choice. */
static void refuse(struct decoder *d, struct dc_run *r, const struct pd_err *why)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    pd_refusal_log(&r->in.req, why);
    pd_run_state(d->trace, r->in.req.run, "failed", r->mode, NULL, 0, why->msg);
    d->status = pd_exit_worse(d->status, why->code);
    if (!d->o->text) {
        if (pd_refusal_encode(&r->in.req, why, "abort", d->rt->worker, false, &b, &e) < 0)
            fatal(d, &e);
        else if (pd_put_records(d->out, b.p, b.n, &e) < 0)
            fatal(d, &e);
        pd_buf_free(&b);
    }
    run_free(d, r);
}

/* One token of a choice reaches the run: kept, turned into text, streamed. True: a stop string ends the choice. */
static bool deliver(struct decoder *d, struct dc_run *r, uint32_t choice, uint32_t pos, const struct pd_sampled *t)
{
    struct choice *c = &r->choice[choice];
    struct pd_err e;
    const struct pd_tokenizer *tok = d->rt->model->tok;
    c->t_last = pd_mono_us();
    if (!c->t_first)
        c->t_first = c->t_last;
    bool stop_token = pd_is_stop_token(tok, &r->in.req, t->token);
    if (pd_buf_add(&c->tokens, &t->token, sizeof t->token, &e) < 0 || (t->has_logprob && pd_buf_add(&c->logprobs, &t->logprob, sizeof t->logprob, &e) < 0) ||
        (!stop_token && pd_text_add(&c->text, tok, &r->in.req, t->token, (int64_t)pos + 1 >= r->in.req.min_tokens, &e) < 0))
        fatal(d, &e);
    bool last = stop_token || (int64_t)pos + 1 >= r->in.req.max_tokens || r->in.n_tokens + pos + 1 >= (uint32_t)d->rt->model->cfg.n_ctx;
    if (last && !c->text.stopped && pd_text_end(&c->text, &e) < 0)      /* what was held back belongs to the last token */
        fatal(d, &e);
    if (d->o->stream && !d->o->text)
        put_token(d, r, choice, pos, t);
    return c->text.stopped;
}

static bool on_token(void *ctx, struct pd_seq *s, uint32_t pos, const struct pd_sampled *t)
{
    return deliver(ctx, s->run->user, (uint32_t)s->choice, pos, t);
}

static void choice_done(struct decoder *d, struct dc_run *r, uint32_t choice, const char *reason)
{
    r->choice[choice].done = true;
    r->n_done++;
    if (!d->o->text)
        put_result(d, r, choice, reason);
    if (r->n_done < (uint32_t)r->in.req.n)
        return;
    pd_run_state(d->trace, r->in.req.run, "completed", r->mode, NULL, 0, NULL);
    if (!d->o->text)
        run_free(d, r);
}

static void on_finished(void *ctx, struct pd_seq *s, const char *reason, const struct pd_err *why)
{
    struct decoder *d = ctx;
    struct dc_run *r = s->run->user;
    struct pd_run *run = s->run;
    uint32_t choice = (uint32_t)s->choice;
    bool last = run->n_open == 0;
    if (last) {
        pd_run_drop(d->batch, run);
        d->n_active--;
    }
    if (why) {
        pd_refusal_log(&r->in.req, why);
        d->status = pd_exit_worse(d->status, why->code);
        struct pd_error_rec er = { .id = r->in.req.id, .code = pd_exit_status(why->code), .message = { why->msg, strlen(why->msg) }, .action = "abort" };
        memcpy(er.run, r->in.req.run, sizeof er.run);
        snprintf(er.class_, sizeof er.class_, "%s", pd_code_name(why->code));
        struct pd_buf b = { 0 };
        struct pd_err e;
        if (!d->o->text)
            put(d, &b, pd_error_encode(&er, &b, &e), &e);
        pd_buf_free(&b);
    }
    choice_done(d, r, choice, reason);
}

static void submit(struct decoder *d, struct dc_run *r, uint32_t *blocks, uint32_t n_blocks)
{
    struct pd_err e;
    struct pd_run *run;
    struct pd_job j = { .req = &r->in.req, .prompt = r->in.tokens, .n_prompt = r->in.n_tokens, .user = r, .blocks = blocks, .n_blocks = n_blocks };
    if (blocks) {
        j.first = r->desc.first;
        j.n_first = r->desc.n_first;
    }
    r->submitted = true;
    d->n_active++;
    pd_run_state(d->trace, r->in.req.run, blocks ? "decode_started" : "prefill_started", r->mode, NULL, 0, NULL);
    int rc = pd_batch_submit(d->batch, &j, &run, &e);
    if (rc < 0) {
        d->n_active--;
        refuse(d, r, &e);
    }
}

static void take_request(struct decoder *d, const struct pd_rec *rec)
{
    struct pd_err e;
    struct dc_run *r = run_new(d, &e);
    if (!r) {
        fatal(d, &e);
        return;
    }
    int rc = pd_intake_take(d->rt, rec->p, rec->n, d->o->seed, &r->in, &e);
    if (rc == 0 && (run_find(d, r->in.req.run) != r || pd_seen_has(&d->answered, r->in.req.run))) {
        rc = pd_fail(&e, PD_EFAIL, PD_RUN_TWICE, r->in.req.run);
        pd_run_new(r->in.req.run, NULL);        /* the answer to the other keeps the name */
    }
    if (rc == 0)
        rc = make_choices(r, d->rt->model->tok, &e);
    if (rc < 0) {
        refuse(d, r, &e);
        return;
    }
    pd_run_state(d->trace, r->in.req.run, "accepted", "local", NULL, 0, NULL);
    submit(d, r, NULL, 0);
}

/* --- runs that come with KV ------------------------------------------------------------------------------------------------------------------------ */

/* The KV of this run will not be used; the first reason counts. */
static void reject_kv(struct decoder *d, struct dc_run *r, const struct pd_err *why)
{
    (void)d;
    if (r->bad.code)
        return;
    r->bad = *why;
    pd_import_free(r->import);
    r->import = NULL;
}

/* Room in the pool for an import: decoding goes on meanwhile, and the stream waits (its writer with it). */
static void wait_for_blocks(struct decoder *d, uint32_t want)
{
    struct pd_err e;
    for (;;) {
        struct pd_pool_stats st = pd_pool_stats(d->rt->pool);
        if (st.max - st.used >= want || !pd_batch_busy(d->batch) || d->fatal.code || pd_stop_level() > 1)
            return;
        int rows = pd_batch_step(d->batch, &e);
        if (rows < 0)
            fatal(d, &e);
        if (rows <= 0)
            return;
        if (d->o->text)
            print_text(d);
    }
}

/* A record that no run takes: one line a run, not one a chunk. */
static void stray(struct decoder *d, const char *run, const struct pd_err *e)
{
    if (run[0] && !strcmp(d->told, run))
        return;
    snprintf(d->told, sizeof d->told, "%s", run);
    pd_error("%s; dropped", e->msg);
    d->status = pd_exit_worse(d->status, e->code);
}

/* The run that a descriptor names which cannot be trusted otherwise, or "". */
static void run_of_raw(const struct pd_rec *rec, char name[PD_RUN_LEN + 1])
{
    struct pd_bin v;
    struct pd_str run;
    name[0] = 0;
    if (pd_map_find(rec->p, rec->n, "run", &v) == 1 && pd_get_str(v, &run) && pd_run_valid(run.p, run.n))
        snprintf(name, PD_RUN_LEN + 1, "%.*s", PD_RUN_LEN, run.p);
}

static int adopt_desc(struct decoder *d, struct dc_run *r, struct pd_err *e)
{
    struct pd_kvdesc *k = &r->desc;
    r->in.req = k->request;
    memcpy(r->in.req.run, k->run, sizeof r->in.req.run);
    if (r->in.req.n < 1 || r->in.req.n > 128)
        r->in.req.n = 1;
    r->in.tokens = (int32_t *)(uintptr_t)k->token_ids;
    r->in.n_tokens = k->n_tokens;
    r->in.t_accept = pd_mono_us();
    r->remote = true;
    r->mode = "remote";
    struct pd_request q = k->request;
    memcpy(q.run, k->run, sizeof q.run);
    q.prompt = (struct pd_str){ "-", 1 };       /* the prompt went into token_ids; resolve only judges the sampling fields */
    q.n_messages = 0;
    q.has_token_ids = false;
    return pd_request_resolve(&q, d->o->seed, e);
}

/* Is the KV of this run that of our model? Otherwise it is rejected. */
static bool same_identity(struct decoder *d, struct dc_run *r)
{
    struct pd_err e;
    switch (pd_fp_compare(r->desc.fp_fields, (struct pd_bin){ d->rt->fp.map.p, d->rt->fp.map.n }, &e)) {
    case PD_FP_DIFFERS:
        reject_kv(d, r, &e);
        return false;
    case PD_FP_ADVISORY:
        if (!d->warned_advisory)
            pd_warn("%s: output may differ from prefill's in the last bits", e.msg);
        d->warned_advisory = true;
        break;
    case PD_FP_SAME:
        break;
    }
    return true;
}

static void take_offer(struct decoder *d, const struct pd_rec *rec)
{
    struct pd_err e = { 0 };
    struct pd_arena mem = { 0 };
    struct pd_kvdesc desc;
    char run[PD_RUN_LEN + 1];
    int rc = pd_kvdesc_decode(rec->p, rec->n, &mem, &desc, &e);
    run_of_raw(rec, run);
    if (run_find(d, run) || pd_seen_has(&d->answered, run)) {
        pd_fail(&e, PD_ECORRUPT, "run %s: a second offer", run);
        stray(d, run, &e);
        pd_arena_free(&mem);
        return;
    }
    struct pd_err why = e;
    struct dc_run *r = run_new(d, &e);
    if (!r) {
        fatal(d, &e);
        pd_arena_free(&mem);
        return;
    }
    r->in.mem = mem;
    r->in.req.n = 1;
    memcpy(r->in.req.run, run, sizeof run);
    if (rc == 0) {
        r->desc = desc;
        rc = adopt_desc(d, r, &why);
    }
    if (rc < 0) {
        memcpy(d->told, run, sizeof run);       /* the rest of the run is dropped without another word */
        pd_err_prefix(&why, "kv refused");
        refuse(d, r, &why);
        return;
    }
    pd_run_state(d->trace, r->desc.run, "kv_transfer_started", "remote", r->desc.gen, 0, NULL);
    if (!same_identity(d, r))
        return;
    uint32_t bs = (uint32_t)pd_pool_geom(d->rt->pool)->block_size;
    wait_for_blocks(d, (r->desc.n_tokens + bs - 1) / bs + 1);
    if (pd_import_begin(d->rt->pool, &r->desc, &r->import, &e) < 0)
        reject_kv(d, r, &e);
}

static void take_chunk(struct decoder *d, const struct pd_rec *rec)
{
    struct pd_err e;
    struct pd_chunk c;
    int rc = pd_chunk_decode(rec->p, rec->n, &c, &e);
    struct dc_run *r = rc == 0 ? run_find(d, c.run) : NULL;
    if (rc == 0 && r && r->import && !r->submitted)
        rc = pd_import_chunk(r->import, &c, &e);
    else if (rc == 0 && r && r->bad.code)
        return;
    else if (rc == 0)
        rc = pd_fail(&e, PD_ECORRUPT, "chunk %u of run %s, which is not being received", c.index, c.run);
    if (rc == 0)
        return;
    if (r && !r->submitted) {
        reject_kv(d, r, &e);
        return;
    }
    d->dropped_chunks++;
    if (!d->o->keep_going)
        stray(d, c.run, &e);
}

/* The run ended with its first tokens: every choice did? */
static bool ended_at_prefill(const struct decoder *d, const struct dc_run *r)
{
    for (uint32_t i = 0; i < r->desc.n_first; i++)
        if (r->in.req.max_tokens > 1 && !pd_is_stop_token(d->rt->model->tok, &r->in.req, r->desc.first[i].token))
            return false;
    return true;
}

static void finish_from_first(struct decoder *d, struct dc_run *r)
{
    uint32_t n = r->desc.n_first;
    for (uint32_t i = 0; i < n; i++) {
        const struct pd_first *f = &r->desc.first[i];
        struct pd_sampled t = { f->token, r->in.req.logprobs || r->in.req.top_logprobs > 0, f->logprob, f->top, f->n_top };
        bool stop = deliver(d, r, i, 0, &t) || pd_is_stop_token(d->rt->model->tok, &r->in.req, f->token);
        choice_done(d, r, i, stop ? "stop" : "length");
    }
}

static int check_first(const struct decoder *d, const struct dc_run *r, struct pd_err *e)
{
    if (!r->desc.n_first && r->import)
        return 0;       /* a slice or salvaged file: the last token is run again for its logits */
    if (r->desc.n_first != (uint32_t)r->in.req.n)
        return pd_fail(e, PD_ECORRUPT, "kv carries %u first tokens for %d choices", r->desc.n_first, r->in.req.n);
    for (uint32_t i = 0; i < r->desc.n_first; i++)
        if (r->desc.first[i].token < 0 || r->desc.first[i].token >= d->rt->model->cfg.n_vocab)
            return pd_fail(e, PD_ECORRUPT, "first token %d is outside the vocabulary of %d", r->desc.first[i].token, d->rt->model->cfg.n_vocab);
    return 0;
}

/* What was not checked is not used: recompute from the tokens, or refuse. */
static void fall_back(struct decoder *d, struct dc_run *r)
{
    struct pd_err *why = &r->bad;
    const char *kind = why->code == PD_EINCOMPAT ? "fingerprint_mismatch" : why->code == PD_ECORRUPT ? "integrity" : why->code == PD_ENOMEM ? "out_of_blocks" : "kv_failed";
    if (d->o->fail_on_mismatch) {
        pd_err_prefix(why, "kv refused");
        refuse(d, r, why);
        return;
    }
    pd_error("run %s: kv refused: %s; recomputing %u tokens locally", r->in.req.run, why->msg, r->in.n_tokens);
    if (d->o->strict && !d->status)
        d->status = 9;
    size_t n = strlen(kind) + strlen(why->msg) + 3;
    struct pd_err e;
    if (!(r->fallback = pd_arena_alloc(&r->in.mem, n, 1, &e))) {
        refuse(d, r, &e);
        return;
    }
    snprintf(r->fallback, n, "%s: %s", kind, why->msg);
    r->mode = "local";
    pd_run_state(d->trace, r->in.req.run, "fallback", "local", r->desc.gen, 0, r->fallback);
    submit(d, r, NULL, 0);
}

static void before_us_of(struct dc_run *r)
{
    struct pd_bin v;
    int64_t us;
    if (r->desc.t.p && pd_map_find(r->desc.t.p, r->desc.t.n, "total_us", &v) == 1 && pd_get_int(v, &us) && us >= 0 && us < (int64_t)1 << 50)
        r->before_us = us;
}

static void take_kv(struct decoder *d, const struct pd_rec *rec)
{
    struct pd_err e;
    struct pd_arena mem = { 0 };
    struct pd_kvdesc kv;
    int rc = pd_kvdesc_decode(rec->p, rec->n, &mem, &kv, &e);
    char name[PD_RUN_LEN + 1];
    run_of_raw(rec, name);
    struct dc_run *r = run_find(d, name);
    if (rc == 0 && ((r && (r->submitted || !r->remote)) || pd_seen_has(&d->answered, name)))
        rc = pd_fail(&e, PD_ECORRUPT, "a second kv record");
    if (rc < 0) {       /* the tokens themselves are in doubt: no recompute */
        pd_err_prefix(&e, "kv refused");
        if (r && r->remote && !r->submitted)
            refuse(d, r, &e);
        else {
            pd_err_prefix(&e, "run %s", name[0] ? name : "?");
            stray(d, name, &e);
        }
        pd_arena_free(&mem);
        return;
    }
    bool offered = r != NULL;
    if (!r && !(r = run_new(d, &e))) {
        fatal(d, &e);
        pd_arena_free(&mem);
        return;
    }
    int64_t arrived = pd_mono_us();
    if (offered && r->import && (rc = pd_import_finish(r->import, &kv, &e)) < 0)
        reject_kv(d, r, &e);
    /* From here the closing descriptor is the run's; its arena joins the run. */
    pd_arena_free(&r->in.mem);
    r->in.mem = mem;
    r->desc = kv;
    if (!offered)
        same_identity(d, r);
    if ((rc = adopt_desc(d, r, &e)) == 0 && (rc = make_choices(r, d->rt->model->tok, &e)) == 0 && !r->bad.code)
        rc = check_first(d, r, &e);
    r->in.t_accept = arrived;
    if (rc < 0) {
        refuse(d, r, &e);
        return;
    }
    before_us_of(r);
    if (!r->bad.code && !r->import && ended_at_prefill(d, r)) {
        finish_from_first(d, r);
        return;
    }
    if (!r->bad.code && !r->import) {
        pd_fail(&e, PD_ECORRUPT, offered ? "its KV was never received" : "kv came without its offer");
        reject_kv(d, r, &e);
    }
    if (r->bad.code) {
        fall_back(d, r);
        return;
    }
    r->kv_bytes = pd_import_bytes(r->import);
    r->kv_us = pd_import_us(r->import);
    pd_run_state(d->trace, r->desc.run, "kv_transfer_completed", "remote", r->desc.gen, r->kv_bytes, NULL);
    uint32_t n, *blocks = pd_import_take(r->import, &n);
    pd_import_free(r->import);
    r->import = NULL;
    submit(d, r, blocks, n);
    pd_free(blocks);
}

/* --- the loop ------------------------------------------------------------------------------------------------------------------------------------- */

static void pass_through(struct decoder *d, const struct pd_rec *rec)
{
    struct pd_err e;
    if (rec->kind == PD_K_ERROR) {      /* an upstream filter's: the last command of a pipe tells */
        struct pd_arena mem = { 0 };
        struct pd_error_rec er;
        if (pd_error_decode(rec->p, rec->n, &mem, &er, &e) == 0)
            d->status = pd_exit_worse(d->status, er.code ? -er.code : PD_EFAIL);
        pd_arena_free(&mem);
    }
    if (!d->o->text && pd_wstream_put(d->out, rec->p, rec->n, &e) < 0)
        fatal(d, &e);
}

static int take_record(struct decoder *d, struct pd_rstream *in, int timeout, struct pd_err *e)
{
    struct pd_rec rec;
    bool bad = false;
    int rc = pd_rstream_next(in, timeout, &rec, &bad, e);
    if (rc < 0 && bad) {
        struct dc_run *r = run_new(d, e);
        if (!r)
            return PD_ENOMEM;
        r->in.req.n = 1;
        pd_run_new(r->in.req.run, NULL);
        refuse(d, r, e);
        return 1;
    }
    if (rc != 1)
        return rc;
    switch (rec.kind) {
    case PD_K_REQUEST: take_request(d, &rec); break;
    case PD_K_OFFER: take_offer(d, &rec); break;
    case PD_K_CHUNK: take_chunk(d, &rec); break;
    case PD_K_KV: take_kv(d, &rec); break;
    default: pass_through(d, &rec); break;
    }
    return 1;
}

/* The stream is over: what was still on its way is discarded by name. */
static void discard_unfinished(struct decoder *d)
{
    for (struct dc_run *r = d->head, *next; r; r = next) {
        next = r->next;
        if (r->submitted || !r->remote)
            continue;
        struct pd_err why;
        pd_fail(&why, PD_ECORRUPT, "the stream ended before the run's kv record: its KV is discarded");
        refuse(d, r, &why);
    }
}

static void step(struct decoder *d)
{
    struct pd_err e;
    int rows = pd_batch_step(d->batch, &e);
    if (rows < 0)
        fatal(d, &e);
    struct pd_batch_stats st = pd_batch_stats(d->batch);
    double s = (double)(pd_mono_us() - d->t0) / 1e6;
    if (s > 2)
        pd_progress("decode: %llu tokens, %.0f tokens/s, %u runs in hand", (unsigned long long)st.decode_rows, (double)st.decode_rows / s, st.runs);
}

static bool importing(const struct decoder *d)
{
    for (const struct dc_run *r = d->head; r; r = r->next)
        if (r->import && !r->submitted)
            return true;
    return false;
}

int pd_decode_run(struct pd_runtime *rt, const struct pd_decode_opts *o, struct pd_rstream *in, struct pd_wstream *out, struct pd_trace *trace, int *status,
                  struct pd_err *e)
{
    struct decoder d = { .rt = rt, .o = o, .out = out, .trace = trace, .t0 = pd_mono_us() };
    d.tail = &d.head;
    struct pd_batch_cb cb = { &d, NULL, on_token, on_finished };
    struct pd_batch_opts bo = { rt->chunk, rt->max_seqs };
    bool open = true, starved = false;
    int rc = pd_batch_new(rt->model, rt->threads, rt->k, rt->pool, &bo, &cb, &d.batch, e);
    if (rc < 0)
        goto out;
    while (!d.fatal.code && (open || pd_batch_busy(d.batch))) {
        if (pd_stop_level() > 1) {
            rc = pd_fail(e, PD_ECANCEL, "stopped by a signal with %u runs unfinished", d.n_active);
            goto out;
        }
        if (pd_stop_level())
            open = false;
        if (open && (d.n_active < 4 * rt->max_seqs || starved)) {       /* starved: imports hold the blocks, and must get on */
            int got = take_record(&d, in, pd_batch_busy(d.batch) && !starved ? 0 : 500, e);
            if (got == 0)
                open = false;
            else if (got < 0) {
                pd_err_prefix(e, "input");
                pd_error("%s", e->msg);
                d.status = pd_exit_worse(d.status, e->code);
                open = false;
            }
            if (o->text)
                print_text(&d);
            if (got == 1)
                continue;
        }
        if (pd_batch_busy(d.batch)) {
            struct pd_batch_stats before = pd_batch_stats(d.batch);
            step(&d);
            starved = pd_batch_stats(d.batch).steps == before.steps && pd_batch_busy(d.batch);
            if (starved && !(open && importing(&d))) {
                pd_batch_fail_oldest(d.batch);      /* nobody else holds blocks that could come back */
                starved = false;
            }
        }
        if (o->text)
            print_text(&d);
        struct pd_err we;
        if (pd_wstream_flush(out, &we) < 0)
            fatal(&d, &we);
    }
    if (!d.fatal.code)
        discard_unfinished(&d);
    if (o->text)
        print_text(&d);
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
    pd_batch_free(d.batch);
    while (d.head)
        run_free(&d, d.head);
    pd_seen_free(&d.answered);
    return rc;
}
