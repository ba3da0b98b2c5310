/* What goes out of the decoder: token and result records, text, refusals. */
#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../kv/convert.h"
#include "../wire/pack.h"
#include "decoding.h"

/* One record or several of a run. */
static void put(struct pd_decoder *d, struct pd_dc_run *r, const struct pd_buf *b, int rc, struct pd_err *e)
{
    if (rc == 0 && d->sink)
        d->sink->put(d->sink->ctx, r, b->p, b->n);
    else if (rc == 0)
        rc = pd_put_records(d->out, b->p, b->n, e);
    if (rc < 0) {
        r->lost = true;
        pd_dc_fatal(d, e);
    }
}

static void put_token(struct pd_decoder *d, struct pd_dc_run *r, uint32_t choice, uint32_t pos, const struct pd_sampled *t)
{
    struct pd_dc_choice *c = &r->choice[choice];
    r->lost |= d->fatal.code != 0;
    if (r->lost)                /* a token may be missing from what was kept */
        return;
    struct pd_token rec = { .choice = choice, .pos = (int32_t)pos, .token = t->token, .has_logprob = t->has_logprob, .logprob = t->logprob, .top = t->top,
                            .n_top = t->n_top, .t_us = c->t_last - d->t0 };
    memcpy(rec.run, r->in.req.run, sizeof rec.run);
    rec.text = (struct pd_str){ (const char *)c->text.text.p + c->streamed, c->text.text.n - c->streamed };
    if (!rec.text.n)
        rec.text.p = "";
    c->streamed = c->text.text.n;
    struct pd_buf b = { 0 };
    struct pd_err e;
    put(d, r, &b, pd_token_encode(&rec, &b, &e), &e);
    pd_buf_free(&b);
}

static int pack_times(const struct pd_dc_run *r, struct pd_buf *t, struct pd_err *e)
{
    struct pd_packer k;
    pd_pack_init(&k, t, e);
    msgpack_pack_map(&k.pk, 2);
    pd_pack_text(&k, "queue_us");
    msgpack_pack_int64(&k.pk, r->queue_us > 0 ? r->queue_us : 0);
    pd_pack_text(&k, "prefill_us");
    msgpack_pack_int64(&k.pk, r->prefill_us);
    return k.rc;
}

static void put_result(struct pd_decoder *d, struct pd_dc_run *r, uint32_t choice, const char *reason)
{
    struct pd_dc_choice *c = &r->choice[choice];
    r->lost |= d->fatal.code != 0;
    if (r->lost)
        return;
    uint32_t n = (uint32_t)(c->tokens.n / sizeof(int32_t));
    struct pd_result res = {
        .id = r->in.req.id, .choice = choice, .text = { c->text.text.p ? (const char *)c->text.text.p : "", c->text.text.n }, .tokens = (const int32_t *)(const void *)c->tokens.p,
        .n_tokens = n, .logprobs = r->in.req.logprobs ? (const float *)(const void *)c->logprobs.p : NULL, .prompt_tokens = r->in.n_tokens, .completion_tokens = n, .cached_tokens = r->cached,
        .kv_ms = (double)r->kv_us / 1e3, .kv_bytes = r->kv_bytes, .ttft_ms = -1, .tpot_ms = -1, .e2e_ms = -1, .has_fingerprint = true,
        .decode_worker = { d->rt->worker, strlen(d->rt->worker) },
    };
    memcpy(res.run, r->in.req.run, sizeof res.run);
    snprintf(res.finish_reason, sizeof res.finish_reason, "%s", reason);
    snprintf(res.mode, sizeof res.mode, "%s", r->mode);
    memcpy(res.fingerprint, d->rt->fp.sha, sizeof res.fingerprint);
    bool used = !strcmp(r->mode, "remote");
    if (r->fallback)
        res.recomputed_tokens = r->in.n_tokens - r->cached;
    if (r->remote) {
        res.has_gen = true;
        memcpy(res.gen, r->desc.gen, sizeof res.gen);
        res.prefill_worker = r->desc.worker;
        res.recomputed_tokens = used ? !r->desc.n_first : r->in.n_tokens - r->cached;
        res.transferred_tokens = used && r->kv_bytes ? r->in.n_tokens - res.recomputed_tokens - r->cached : 0;
    }
    if (used)
        pd_conv_text(r->converted, res.converted);
    if (r->fallback)
        res.fallback = (struct pd_str){ r->fallback, strlen(r->fallback) };
    if (c->t_first) {
        res.ttft_ms = (double)(r->before_us + c->t_first - r->in.t_accept) / 1e3;
        res.e2e_ms = (double)(r->before_us + c->t_last - r->in.t_accept) / 1e3;
        if (n > r->n_resume + 1)
            res.tpot_ms = (res.e2e_ms - res.ttft_ms) / (n - r->n_resume - 1);
    }
    struct pd_buf b = { 0 }, t = { 0 };
    struct pd_err e;
    int rc = r->prefill_us > 0 ? pack_times(r, &t, &e) : 0;
    res.t = (struct pd_bin){ t.p, t.n };
    put(d, r, &b, rc ? rc : pd_result_encode(&res, &b, &e), &e);
    pd_buf_free(&b);
    pd_buf_free(&t);
}

/* Text mode: what may be shown of the oldest run goes out; a finished one makes way for the next. */
void pd_dc_print_text(struct pd_decoder *d)
{
    struct pd_err e;
    while (d->head && !d->fatal.code) {
        struct pd_dc_run *r = d->head;
        uint32_t n = r->choice ? (uint32_t)r->in.req.n : 0;
        for (uint32_t i = 0; i < n; i++) {
            struct pd_dc_choice *c = &r->choice[i];
            if (c->text.text.n > c->printed && pd_wstream_raw(d->out, c->text.text.p + c->printed, c->text.text.n - c->printed, &e) < 0)
                pd_dc_fatal(d, &e);
            c->printed = c->text.text.n;
            if (!c->done)
                return;
            if (!c->closed && pd_wstream_raw(d->out, "\n", 1, &e) < 0)
                pd_dc_fatal(d, &e);
            c->closed = true;
        }
        if (!r->choice || r->n_done < n)
            return;
        pd_dc_run_free(d, r);
    }
}

int pd_dc_make_choices(struct pd_dc_run *r, const struct pd_tokenizer *tok, struct pd_err *e)
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
            rc = pd_text_echo(&r->choice[i].text, tok, r->in.tokens, r->in.n_tokens, e);
        if (rc < 0)
            return rc;
        r->choice[i].streamed = t->n;
    }
    return 0;
}

void pd_dc_tell(struct pd_decoder *d, struct pd_dc_run *r, const struct pd_err *why)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    r->failure = pd_arena_dup(&r->in.mem, why->msg, strlen(why->msg), NULL);
    pd_refusal_log(&r->in.req, why);
    d->status = pd_exit_worse(d->status, why->code);
    if (!d->o->text)
        put(d, r, &b, pd_refusal_error(&r->in.req, why, "abort", &b, &e), &e);
    pd_buf_free(&b);
}

/* The run fails: an error, and a result a choice. */
void pd_dc_refuse(struct pd_decoder *d, struct pd_dc_run *r, const struct pd_err *why)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    struct pd_result as = { .prompt_tokens = r->in.n_tokens, .decode_worker = { d->rt->worker, strlen(d->rt->worker) } };
    snprintf(as.mode, sizeof as.mode, "%s", r->mode);
    if (r->remote && r->desc.fp_fields.p) {
        as.has_gen = true;
        memcpy(as.gen, r->desc.gen, sizeof as.gen);
        as.prefill_worker = r->desc.worker;
    }
    pd_refusal_log(&r->in.req, why);
    pd_dc_step_end(d, r, why);
    d->status = pd_exit_worse(d->status, why->code);
    if (!d->o->text) {
        put(d, r, &b, pd_refusal_encode(&r->in.req, why, "abort", &as, &b, &e), &e);
        pd_buf_free(&b);
    }
    pd_dc_run_free(d, r);
}

/* The event of its first token was written when that went out; this is all others. */
static void rest_streamed(struct pd_decoder *d, struct pd_dc_run *r, uint32_t choice)
{
    uint32_t tokens = (uint32_t)(r->choice[choice].tokens.n / sizeof(int32_t)), from = r->n_resume + 1;
    if (tokens > from)
        pd_dc_step_tokens(d, r, PD_ST_STREAMING, choice, from, tokens - from);
}

void pd_dc_end(struct pd_decoder *d, struct pd_dc_run *r, const struct pd_err *why)
{
    bool cancelled = why->code == PD_ECANCEL;
    if (r->run) {
        pd_run_drop(d->batch, r->run);
        r->run = NULL;
        d->n_active--;
    }
    if (!r->choice) {
        pd_dc_refuse(d, r, why);
        return;
    }
    for (int32_t i = 0; i < r->in.req.n; i++) {
        if (!r->choice[i].done)
            rest_streamed(d, r, (uint32_t)i);
    }
    if (!cancelled && !r->told) {
        r->told = true;
        pd_dc_tell(d, r, why);
    }
    pd_dc_step_end(d, r, why);
    for (int32_t i = 0; i < r->in.req.n; i++)
        if (!r->choice[i].done)
            put_result(d, r, (uint32_t)i, cancelled ? "cancelled" : "error");
    pd_dc_run_free(d, r);
}

static bool is_last(const struct pd_decoder *d, const struct pd_dc_run *r, uint32_t pos, int32_t token)
{
    return pd_is_stop_token(d->rt->model->tok, &r->in.req, token) || (int64_t)pos + 1 >= r->in.req.max_tokens ||
           r->in.n_tokens + pos + 1 >= (uint32_t)d->rt->model->cfg.n_ctx;
}

/* A token becomes part of its choice and of its text. */
static int keep(struct pd_decoder *d, struct pd_dc_run *r, struct pd_dc_choice *c, uint32_t pos, const struct pd_sampled *t, struct pd_err *e)
{
    const struct pd_tokenizer *tok = d->rt->model->tok;
    int rc = pd_buf_add(&c->tokens, &t->token, sizeof t->token, e);
    if (rc == 0 && t->has_logprob)
        rc = pd_buf_add(&c->logprobs, &t->logprob, sizeof t->logprob, e);
    if (rc == 0 && !pd_is_stop_token(tok, &r->in.req, t->token))
        rc = pd_text_add(&c->text, tok, &r->in.req, t->token, (int64_t)pos + 1 >= r->in.req.min_tokens, e);
    if (rc == 0 && is_last(d, r, pos, t->token) && !c->text.stopped)        /* what was held back belongs to the last token */
        rc = pd_text_end(&c->text, e);
    return rc;
}

int pd_dc_resume(struct pd_decoder *d, struct pd_dc_run *r, const int32_t *tokens, uint32_t n, struct pd_err *e)
{
    struct pd_dc_choice *c = r->choice;
    int32_t vocab = d->rt->model->cfg.n_vocab;
    if (!n)
        return 0;
    if (!(r->resume = pd_arena_dup(&r->in.mem, tokens, n * sizeof *tokens, e)))
        return PD_ENOMEM;
    r->n_resume = n;
    for (uint32_t i = 0; i < n; i++) {
        struct pd_sampled t = { .token = tokens[i], .has_logprob = r->in.req.logprobs || r->in.req.top_logprobs > 0 };
        if (t.token < 0 || t.token >= vocab)
            return pd_fail(e, PD_EFAIL, "route: resume[%u] is %d: the vocabulary has ids 0 to %d", i, t.token, vocab - 1);
        int rc = keep(d, r, c, i, &t, e);
        if (rc < 0)
            return rc;
        bool last = c->text.stopped || is_last(d, r, i, t.token);
        if (last && i + 1 < n)
            return pd_fail(e, PD_EFAIL, "route: resume has %u tokens, and the run ended with the %u.", n, i + 1);
        if (!last)
            continue;
        bool stop = c->text.stopped || pd_is_stop_token(d->rt->model->tok, &r->in.req, t.token);
        pd_dc_choice_done(d, r, 0, stop ? "stop" : "length");
        return 1;
    }
    c->streamed = c->text.text.n;
    return 0;
}

/* One token of a choice reaches the run: kept, turned into text, streamed. True: a stop string ends the choice. */
bool pd_dc_deliver(struct pd_decoder *d, struct pd_dc_run *r, uint32_t choice, uint32_t pos, const struct pd_sampled *t)
{
    struct pd_dc_choice *c = &r->choice[choice];
    struct pd_err e;
    c->t_last = pd_mono_us();
    if (!c->t_first) {
        c->t_first = c->t_last;
        if (!r->decoding && !(r->remote && !strcmp(r->mode, "remote"))) {      /* the prompt was computed here */
            pd_dc_step(d, r, PD_ST_PREFILL_COMPLETED, 0, NULL);
            pd_dc_step(d, r, PD_ST_DECODE_STARTED, 0, NULL);
        }
        r->decoding = true;
        pd_dc_step_tokens(d, r, PD_ST_STREAMING, choice, pos, 1);
    }
    if (keep(d, r, c, pos, t, &e) < 0)
        pd_dc_fatal(d, &e);
    if (r->stream && !d->o->text)
        put_token(d, r, choice, pos, t);
    return c->text.stopped;
}

void pd_dc_choice_done(struct pd_decoder *d, struct pd_dc_run *r, uint32_t choice, const char *reason)
{
    uint32_t all = 0;
    if (!(d->sink && d->fatal.code)) {
        rest_streamed(d, r, choice);
        if (!d->o->text)
            put_result(d, r, choice, reason);
    }
    if (d->sink && d->fatal.code)       /* its last words are not out: whoever ends all runs in hand ends it too, so that it gets a result */
        return;
    r->choice[choice].done = true;
    r->n_done++;
    if (r->n_done < (uint32_t)r->in.req.n)
        return;
    for (int32_t i = 0; i < r->in.req.n; i++)
        all += (uint32_t)(r->choice[i].tokens.n / sizeof(int32_t));
    if (r->told)
        pd_dc_step(d, r, PD_ST_FAILED, 0, r->failure);
    else
        pd_dc_step_tokens(d, r, PD_ST_COMPLETED, 0, 0, all);
    r->ended = true;
    if (!d->o->text)
        pd_dc_run_free(d, r);
}
