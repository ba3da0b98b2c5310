#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../base/stop.h"
#include "batch.h"
#include "decoder.h"
#include "text.h"
#include "../wire/value.h"

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
    bool remote, submitted;     /* submitted: decided, also when it needed no decoding; before that a remote run is on its way */
    bool told;                  /* its error went out */
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

enum { MAX_ON_WAY = 16384,      /* runs whose KV is on its way: what prefill has in hand at the most */
       MAX_GENS = 4096 };       /* generations remembered, so that one that comes again is known */

struct decoder {
    struct pd_runtime *rt;
    const struct pd_decode_opts *o;
    struct pd_batch *batch;
    struct pd_wstream *out;
    struct pd_trace *trace;
    struct dc_run *head, **tail;
    uint32_t n_active;          /* submitted, not finished */
    uint32_t n_on_way;
    uint8_t (*gens)[PD_GEN_LEN];        /* [MAX_GENS] of the runs that were closed last; a ring */
    uint64_t n_gens;
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
        res.transferred_tokens = used ? r->in.n_tokens - res.recomputed_tokens : 0;
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

static bool on_way(const struct dc_run *r) { return r->remote && !r->submitted; }

static void run_free(struct decoder *d, struct dc_run *r)
{
    d->n_on_way -= on_way(r);
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

enum match { BY_GEN,        /* of this generation, or one whose offer could not be read */
             BY_NAME };     /* failing that any of the run's id */

/* A run whose KV is on its way. Two may have one run id. */
static struct dc_run *find_on_way(struct decoder *d, const char *run, const uint8_t *gen, enum match how)
{
    struct dc_run *named = NULL;
    for (struct dc_run *r = d->head; r; r = r->next) {
        if (!on_way(r) || strcmp(r->in.req.run, run))
            continue;
        if (gen && !memcmp(r->desc.gen, gen, sizeof r->desc.gen))
            return r;
        if (!named && (how == BY_NAME || !r->desc.fp_fields.p))
            named = r;
    }
    return named;
}

/* Was a run of this generation closed already? */
static bool known_gen(const struct decoder *d, const uint8_t *gen)
{
    for (uint64_t i = 0; i < d->n_gens && i < MAX_GENS; i++)
        if (!memcmp(d->gens[i], gen, PD_GEN_LEN))
            return true;
    return false;
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
            rc = pd_text_echo(&r->choice[i].text, tok, r->in.tokens, r->in.n_tokens, e);
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
    if (why && !r->told) {
        r->told = true;
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
    r->submitted = true;        /* its own, or set when its kv came */
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

/* Room in the pool for an import and its first new block: decoding goes on meanwhile, and the stream waits (its writer with it). */
static void wait_for_blocks(struct decoder *d, uint32_t n)
{
    struct pd_err e;
    uint32_t max = pd_pool_stats(d->rt->pool).max, want = n < max ? n + 1 : max;
    while (n <= max) {
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

static int adopt_desc(struct decoder *d, struct dc_run *r, struct pd_err *e)
{
    struct pd_kvdesc *k = &r->desc;
    d->n_on_way += !on_way(r);
    r->in.req = k->request;
    memcpy(r->in.req.run, k->run, sizeof r->in.req.run);
    r->in.tokens = (int32_t *)(uintptr_t)k->token_ids;
    r->in.n_tokens = k->n_tokens;
    r->in.t_accept = pd_mono_us();
    r->remote = true;
    r->mode = "remote";
    int rc = pd_request_resolve(&r->in.req, d->o->seed, e);     /* prefill has done so; a descriptor from elsewhere may lack a field or have an absurd one */
    if (rc == 0)
        rc = pd_check_adapter(&r->in.req, e);
    if (r->in.req.n < 1 || r->in.req.n > 128)
        r->in.req.n = 1;
    return rc;
}

/* A number or text that both fingerprints have, and have alike. */
static bool same_field(const struct decoder *d, const struct dc_run *r, const char *name)
{
    struct pd_bin a, b;
    return pd_map_find(r->desc.fp_fields.p, r->desc.fp_fields.n, name, &a) == 1 && pd_map_find(d->rt->fp.map.p, d->rt->fp.map.n, name, &b) == 1 && a.n == b.n &&
           !memcmp(a.p, b.p, a.n);
}

static bool compatible(struct decoder *d, const struct dc_run *r, struct pd_err *e)
{
    enum pd_fp_verdict v = pd_fp_compare(r->desc.fp_fields, (struct pd_bin){ d->rt->fp.map.p, d->rt->fp.map.n }, e);
    if (v == PD_FP_ADVISORY && !d->warned_advisory) {
        pd_warn("%s: output may differ from prefill's in the last bits", e->msg);
        d->warned_advisory = true;
    }
    return v != PD_FP_DIFFERS;
}

/* An offer that is refused leaves its run on its way, spoilt: the kv record, which has all that a recompute needs, decides. */
static void take_offer(struct decoder *d, const struct pd_rec *rec)
{
    struct pd_err e;
    struct pd_bin name;
    struct pd_str run;
    struct dc_run *twin, *r = d->n_on_way < MAX_ON_WAY ? run_new(d, &e) : NULL;
    if (!r && d->n_on_way < MAX_ON_WAY) {
        fatal(d, &e);
        return;
    }
    if (!r) {
        pd_error("an offer is dropped: the KV of %u runs is on its way already", d->n_on_way);
        return;
    }
    if (pd_kvdesc_decode(rec->p, rec->n, &r->in.mem, &r->desc, &e) < 0) {
        pd_err_prefix(&e, "offer");
        r->remote = pd_map_find(rec->p, rec->n, "run", &name) == 1 && pd_get_str(name, &run) && pd_run_valid(run.p, run.n);
        if (r->remote)
            memcpy(r->in.req.run, run.p, PD_RUN_LEN);
        twin = r->remote ? find_on_way(d, r->in.req.run, NULL, BY_NAME) : NULL;
        if (!r->remote || twin != r) {
            r->remote = false;
            pd_error("run %s: %s", r->in.req.run[0] ? r->in.req.run : "?", e.msg);
            d->status = pd_exit_worse(d->status, e.code);
            if (twin)
                reject_kv(d, twin, &e);
            run_free(d, r);
            return;
        }
        r->in.req.n = 1;
        d->n_on_way++;
        reject_kv(d, r, &e);
        return;
    }
    twin = find_on_way(d, r->desc.run, r->desc.gen, BY_GEN);
    if (known_gen(d, r->desc.gen) || (twin && !memcmp(twin->desc.gen, r->desc.gen, PD_GEN_LEN))) {
        pd_error("run %s: its offer came twice; the second is dropped", r->desc.run);
        d->status = pd_exit_worse(d->status, PD_ECORRUPT);
        run_free(d, r);
        return;
    }
    if (adopt_desc(d, r, &e) < 0) {
        pd_err_prefix(&e, "offer");
        reject_kv(d, r, &e);
        return;
    }
    if (!compatible(d, r, &e)) {
        reject_kv(d, r, &e);
        return;
    }
    if (!r->desc.payload.scheme[0])     /* the run ended at prefill: its kv has all there is */
        return;
    pd_run_state(d->trace, r->desc.run, "kv_transfer_started", "remote", r->desc.gen, 0, NULL);
    uint32_t bs = (uint32_t)pd_pool_geom(d->rt->pool)->block_size;
    wait_for_blocks(d, (uint32_t)(((uint64_t)r->desc.n_tokens + bs - 1) / bs));
    if (pd_import_begin(d->rt->pool, &r->desc, &r->import, &e) < 0)
        reject_kv(d, r, &e);
}

static void take_chunk(struct decoder *d, const struct pd_rec *rec)
{
    struct pd_err e;
    struct pd_chunk c;
    int rc = pd_chunk_decode(rec->p, rec->n, &c, &e);
    struct dc_run *r = rc == 0 ? find_on_way(d, c.run, c.gen, BY_NAME) : NULL;
    if (r && r->bad.code)
        return;
    if (r)
        rc = r->import ? pd_import_chunk(r->import, &c, &e) : pd_fail(&e, PD_ECORRUPT, "chunk %u of run %s, which has no payload", c.index, c.run);
    if (r && rc < 0)
        reject_kv(d, r, &e);
    if (r)
        return;
    if (d->dropped_chunks++ || d->o->keep_going)
        return;         /* told once, counted at the end */
    if (rc == 0)
        rc = pd_fail(&e, PD_ECORRUPT, "chunk %u of run %s, which is not being received", c.index, c.run);
    pd_error("%s", e.msg);
    d->status = pd_exit_worse(d->status, e.code);
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
    for (uint32_t i = 0; i < n; i++) {          /* the run is gone after its last choice */
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
    if (!same_field(d, r, "tokenizer_digest")) {
        pd_err_prefix(why, "kv refused");
        struct pd_err both = *why;
        pd_fail(why, PD_EINCOMPAT, "%.300s; the tokenizers differ, so its token ids mean other text here and cannot be recomputed", both.msg);
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
    if (!r->desc.t.p || pd_map_find(r->desc.t.p, r->desc.t.n, "total_us", &v) != 1 || v.n < 1)
        return;
    uint64_t x = 0;
    if (v.p[0] < 0x80)
        x = v.p[0];
    else if (v.p[0] >= 0xcc && v.p[0] <= 0xcf && v.n == 1 + ((size_t)1 << (v.p[0] - 0xcc)))
        for (size_t i = 1; i < v.n; i++)
            x = x << 8 | v.p[i];
    r->before_us = x < (uint64_t)1 << 50 ? (int64_t)x : 0;
}

static void take_kv(struct decoder *d, const struct pd_rec *rec)
{
    struct pd_err e;
    struct pd_arena mem = { 0 };
    struct pd_kvdesc kv;
    int rc = pd_kvdesc_decode(rec->p, rec->n, &mem, &kv, &e);
    if (rc < 0) {       /* the tokens themselves are in doubt: no recompute */
        struct pd_bin run;
        struct dc_run *r = NULL;
        char name[PD_RUN_LEN + 1] = "";
        if (pd_map_find(rec->p, rec->n, "run", &run) == 1 && run.n >= PD_RUN_LEN) {
            memcpy(name, run.p + run.n - PD_RUN_LEN, PD_RUN_LEN);
            r = find_on_way(d, name, NULL, BY_NAME);
        }
        pd_err_prefix(&e, "kv refused");
        if (r)
            refuse(d, r, &e);
        else {
            pd_error("run %s: %s", pd_run_valid(name, strlen(name)) ? name : "?", e.msg);
            d->status = pd_exit_worse(d->status, e.code);
        }
        pd_arena_free(&mem);
        return;
    }
    if (known_gen(d, kv.gen)) {
        pd_error("run %s: its kv record came twice; the second is dropped", kv.run);
        d->status = pd_exit_worse(d->status, PD_ECORRUPT);
        pd_arena_free(&mem);
        return;
    }
    memcpy(d->gens[d->n_gens++ % MAX_GENS], kv.gen, sizeof kv.gen);
    struct dc_run *r = find_on_way(d, kv.run, kv.gen, BY_GEN);
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
    if ((rc = adopt_desc(d, r, &e)) == 0 && (rc = make_choices(r, d->rt->model->tok, &e)) == 0 && !r->bad.code)
        rc = check_first(d, r, &e);
    r->in.t_accept = arrived;
    if (rc < 0) {
        refuse(d, r, &e);
        return;
    }
    r->submitted = true;
    d->n_on_way--;
    before_us_of(r);
    if (!r->import && !r->bad.code && !compatible(d, r, &e))
        reject_kv(d, r, &e);
    if (!r->bad.code && !r->import && ended_at_prefill(d, r)) {
        finish_from_first(d, r);
        return;
    }
    if (!r->bad.code && !r->import) {   /* as when the offer told of no payload, and the kv is not of a run that ended */
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
        int known = pd_error_decode(rec->p, rec->n, &mem, &er, &e);
        d->status = pd_exit_worse(d->status, known == 0 && er.code > 0 ? -er.code : PD_EFAIL);
        struct dc_run *r = known == 0 && er.run[0] ? find_on_way(d, er.run, NULL, BY_NAME) : NULL;
        if (r)          /* it failed there, and its results come from there */
            run_free(d, r);
        pd_arena_free(&mem);
    }
    if (d->o->text || pd_wstream_put(d->out, rec->p, rec->n, &e) == 0)
        return;
    if (pd_wstream_failed(d->out) || e.code == PD_ENOMEM) {
        fatal(d, &e);
        return;
    }
    pd_error("a record of kind %s is dropped: %s", pd_kind_name(rec->kind), e.msg);
    d->status = pd_exit_worse(d->status, PD_EFAIL);
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
        if (!on_way(r))
            continue;
        struct pd_err why;
        pd_fail(&why, PD_ECORRUPT, "the stream ended before the run's kv record: its KV is discarded%s%.300s", r->bad.code ? "; before that: " : "", r->bad.code ? r->bad.msg : "");
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

/* The run that began last of those whose KV is being received. */
static struct dc_run *youngest_import(const struct decoder *d)
{
    struct dc_run *last = NULL;
    for (struct dc_run *r = d->head; r; r = r->next)
        if (r->import && on_way(r))
            last = r;
    return last;
}

/* Nothing could run for want of blocks. An import that holds some may end with the next record; one that does not is given up for those that decode (it is
 * recomputed later); when there is none, the oldest run has outgrown the pool. True: wait for input. */
static bool unstick(struct decoder *d, bool may_wait)
{
    struct pd_err e;
    struct dc_run *r = youngest_import(d);
    if (!r)
        pd_batch_fail_oldest(d->batch);
    else if (may_wait)
        return true;
    else {
        pd_fail(&e, PD_ENOMEM, "its blocks were needed by runs that decode already (raise --kv-mem)");
        reject_kv(d, r, &e);
    }
    return false;
}

/* The input is over: what was still on its way gives its blocks back at once. */
static void close_input(struct decoder *d, bool *open)
{
    *open = false;
    if (!d->fatal.code)
        discard_unfinished(d);
}

int pd_decode_run(struct pd_runtime *rt, const struct pd_decode_opts *o, struct pd_rstream *in, struct pd_wstream *out, struct pd_trace *trace, int *status,
                  struct pd_err *e)
{
    struct decoder d = { .rt = rt, .o = o, .out = out, .trace = trace, .t0 = pd_mono_us() };
    d.tail = &d.head;
    struct pd_batch_cb cb = { &d, NULL, on_token, on_finished };
    struct pd_batch_opts bo = { rt->chunk, rt->max_seqs };
    bool open = true, stuck = false;    /* stuck: wait for input, as no run can go on before an import ends */
    uint32_t limit = 4 * rt->max_seqs;
    int rc;
    if (!(d.gens = pd_calloc(MAX_GENS, sizeof *d.gens, "generations", e)))
        return PD_ENOMEM;
    if ((rc = pd_batch_new(rt->model, rt->threads, rt->k, rt->pool, &bo, &cb, &d.batch, e)) < 0)
        goto out;
    while (!d.fatal.code && (open || pd_batch_busy(d.batch))) {
        if (pd_stop_level() > 1) {
            rc = pd_fail(e, PD_ECANCEL, "stopped by a signal with %u runs unfinished", d.n_active);
            goto out;
        }
        if (pd_stop_level() && open)
            close_input(&d, &open);
        if (open && d.n_active < limit) {
            int got = take_record(&d, in, pd_batch_busy(d.batch) && !stuck ? 0 : 500, e);
            if (got < 0) {
                pd_err_prefix(e, "input");
                pd_error("%s", e->msg);
                d.status = pd_exit_worse(d.status, e->code);
            }
            if (got <= 0)
                close_input(&d, &open);
            if (o->text)
                print_text(&d);
            if (stuck && got == 2)
                unstick(&d, false);
            stuck = false;
            if (got == 1)
                continue;
        }
        if (pd_batch_busy(d.batch)) {
            uint64_t before = pd_batch_stats(d.batch).steps;
            step(&d);
            if (pd_batch_stats(d.batch).steps == before && pd_batch_busy(d.batch))
                stuck = unstick(&d, open && d.n_active < limit);
        }
        if (o->text)
            print_text(&d);
        struct pd_err we;
        if (pd_wstream_flush(out, &we) < 0)
            fatal(&d, &we);
    }
    if (o->text)
        print_text(&d);
    pd_progress_end();
    if (d.dropped_chunks > 1 || (d.dropped_chunks && o->keep_going))
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
    pd_free(d.gens);
    return rc;
}
