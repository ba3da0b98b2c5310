/* Runs that come with KV: offers, chunks and closing descriptors, checked before anything of them is used. */
#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../base/stop.h"
#include "../wire/value.h"
#include "decoding.h"

/* A record that no run takes: one line a run, not one a chunk. */
static void stray(struct pd_decoder *d, const char *run, const struct pd_err *e)
{
    if (run[0] && !strcmp(d->told, run))
        return;
    snprintf(d->told, sizeof d->told, "%s", run);
    pd_error("%s", e->msg);
    d->status = pd_exit_worse(d->status, e->code);
}

/* The KV of this run will not be used; the first reason counts. */
void pd_dc_reject_kv(struct pd_decoder *d, struct pd_dc_run *r, const struct pd_err *why)
{
    (void)d;
    if (r->bad.code)
        return;
    r->bad = *why;
    pd_import_free(r->import);
    r->import = NULL;
}

/* Room in the pool for an import and its first new block: decoding goes on meanwhile, and the stream waits (its writer with it). */
static void wait_for_blocks(struct pd_decoder *d, uint32_t n)
{
    struct pd_err e;
    uint32_t max = pd_pool_stats(d->rt->pool).max, want = n < max ? n + 1 : max;
    while (n <= max) {
        struct pd_pool_stats st = pd_pool_stats(d->rt->pool);
        if (st.max - st.used >= want || !pd_batch_busy(d->batch) || d->fatal.code || pd_stop_level() > 1)
            return;
        int rows = pd_batch_step(d->batch, &e);
        if (rows < 0)
            pd_dc_fatal(d, &e);
        if (rows <= 0)
            return;
        if (d->o->text)
            pd_dc_print_text(d);
    }
}

static int adopt_desc(struct pd_decoder *d, struct pd_dc_run *r, struct pd_err *e)
{
    struct pd_kvdesc *k = &r->desc;
    d->n_on_way += !pd_dc_on_way(r);
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
bool pd_dc_same_field(const struct pd_decoder *d, const struct pd_dc_run *r, const char *name)
{
    struct pd_bin a, b;
    return pd_map_find(r->desc.fp_fields.p, r->desc.fp_fields.n, name, &a) == 1 && pd_map_find(d->rt->fp.map.p, d->rt->fp.map.n, name, &b) == 1 && a.n == b.n &&
           !memcmp(a.p, b.p, a.n);
}

static bool compatible(struct pd_decoder *d, const struct pd_dc_run *r, struct pd_err *e)
{
    if (r->desc.epoch != d->rt->epoch)
        return pd_fail(e, PD_EINCOMPAT, "epoch differs (prefill %llu, decode %llu)", (unsigned long long)r->desc.epoch, (unsigned long long)d->rt->epoch), false;
    enum pd_fp_verdict v = pd_fp_compare_with(r->desc.fp_fields, (struct pd_bin){ d->rt->fp.map.p, d->rt->fp.map.n }, d->rt->convert, NULL, e);
    if (v == PD_FP_ADVISORY && !d->warned_advisory) {
        pd_warn("%s: output may differ from prefill's in the last bits", e->msg);
        d->warned_advisory = true;
    }
    return v != PD_FP_DIFFERS;
}

/* An offer that is refused leaves its run on its way, spoilt: the kv record, which has all that a recompute needs, decides. */
void pd_dc_take_offer(struct pd_decoder *d, const struct pd_rec *rec)
{
    struct pd_err e;
    struct pd_bin name;
    struct pd_str run;
    struct pd_dc_run *twin, *r = d->n_on_way < PD_MAX_ON_WAY ? pd_dc_run_new(d, &e) : NULL;
    if (!r && d->n_on_way < PD_MAX_ON_WAY) {
        pd_dc_fatal(d, &e);
        return;
    }
    if (!r) {
        pd_error("an offer is dropped: the KV of %u runs is on its way already", d->n_on_way);
        return;
    }
    if (pd_kvdesc_decode(rec->p, rec->n, &r->in.mem, &r->desc, &e) < 0) {
        r->remote = pd_map_find(rec->p, rec->n, "run", &name) == 1 && pd_get_str(name, &run) && pd_run_valid(run.p, run.n);
        if (r->remote)
            memcpy(r->in.req.run, run.p, PD_RUN_LEN);
        twin = r->remote ? pd_dc_find_on_way(d, r->in.req.run, NULL, PD_BY_NAME) : NULL;
        if (!r->remote || twin != r) {
            r->remote = false;
            pd_error("run %s: %s", r->in.req.run[0] ? r->in.req.run : "?", e.msg);
            d->status = pd_exit_worse(d->status, e.code);
            if (twin)
                pd_dc_reject_kv(d, twin, &e);
            pd_dc_run_free(d, r);
            return;
        }
        r->in.req.n = 1;
        d->n_on_way++;
        pd_dc_reject_kv(d, r, &e);
        return;
    }
    twin = pd_dc_find_on_way(d, r->desc.run, r->desc.gen, PD_BY_GEN);
    if (pd_seen_has(&d->gens, r->desc.gen, PD_GEN_LEN) || (twin && !memcmp(twin->desc.gen, r->desc.gen, PD_GEN_LEN))) {
        pd_fail(&e, PD_ECORRUPT, "run %s: its offer came twice; the second is dropped", r->desc.run);
        stray(d, r->desc.run, &e);
        pd_dc_run_free(d, r);
        return;
    }
    if (adopt_desc(d, r, &e) < 0) {
        pd_err_prefix(&e, "offer");
        pd_dc_reject_kv(d, r, &e);
        return;
    }
    if (!compatible(d, r, &e)) {
        pd_dc_reject_kv(d, r, &e);
        return;
    }
    if (!r->desc.payload.scheme[0])     /* the run ended at prefill: its kv has all there is */
        return;
    pd_dc_step(d, r, PD_ST_KV_TRANSFER_STARTED, 0, NULL);
    uint32_t bs = (uint32_t)pd_pool_geom(d->rt->pool)->block_size;
    wait_for_blocks(d, (uint32_t)(((uint64_t)r->desc.n_tokens + bs - 1) / bs));
    if (pd_import_begin_with(d->rt->pool, &r->desc, &(struct pd_import_opts){ .convert = d->rt->convert }, &r->import, &e) < 0)
        pd_dc_reject_kv(d, r, &e);
}

void pd_dc_take_chunk(struct pd_decoder *d, const struct pd_rec *rec)
{
    struct pd_err e;
    struct pd_chunk c;
    int rc = pd_chunk_decode(rec->p, rec->n, &c, &e);
    struct pd_dc_run *r = rc == 0 ? pd_dc_find_on_way(d, c.run, c.gen, PD_BY_NAME) : NULL;
    if (r && r->bad.code)
        return;
    if (r)
        rc = r->import ? pd_import_chunk(r->import, &c, &e) : pd_fail(&e, PD_ECORRUPT, "chunk %u of run %s, which has no payload", c.index, c.run);
    if (r && rc < 0)
        pd_dc_reject_kv(d, r, &e);
    if (r)
        return;
    d->dropped_chunks++;
    if (d->o->keep_going)
        return;         /* counted at the end */
    if (rc == 0)
        pd_fail(&e, PD_ECORRUPT, "chunk %u of run %s, which is not being received; dropped", c.index, c.run);
    stray(d, rc == 0 ? c.run : "", &e);
}

/* The run ended with its first tokens: every choice did? */
static bool ended_at_prefill(const struct pd_decoder *d, const struct pd_dc_run *r)
{
    for (uint32_t i = 0; i < r->desc.n_first; i++)
        if (r->in.req.max_tokens > 1 && !pd_is_stop_token(d->rt->model->tok, &r->in.req, r->desc.first[i].token))
            return false;
    return true;
}

static void finish_from_first(struct pd_decoder *d, struct pd_dc_run *r)
{
    uint32_t n = r->desc.n_first;
    for (uint32_t i = 0; i < n; i++) {          /* the run is gone after its last choice */
        const struct pd_first *f = &r->desc.first[i];
        struct pd_sampled t = { f->token, r->in.req.logprobs || r->in.req.top_logprobs > 0, f->logprob, f->top, f->n_top };
        bool stop = pd_dc_deliver(d, r, i, 0, &t) || pd_is_stop_token(d->rt->model->tok, &r->in.req, f->token);
        pd_dc_choice_done(d, r, i, stop ? "stop" : "length");
    }
}

static int check_first(const struct pd_decoder *d, const struct pd_dc_run *r, struct pd_err *e)
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
static void fall_back(struct pd_decoder *d, struct pd_dc_run *r)
{
    struct pd_err *why = &r->bad;
    const char *kind = why->code == PD_EINCOMPAT ? "fingerprint_mismatch" : why->code == PD_ECORRUPT ? "integrity" : why->code == PD_ENOMEM ? "out_of_blocks" : "kv_failed";
    if (d->o->fail_on_mismatch) {
        pd_err_prefix(why, "kv refused");
        pd_dc_refuse(d, r, why);
        return;
    }
    if (!pd_dc_same_field(d, r, "tokenizer_digest")) {
        pd_err_prefix(why, "kv refused");
        struct pd_err both = *why;
        pd_fail(why, PD_EINCOMPAT, "%.300s; the tokenizers differ, so its token ids mean other text here and cannot be recomputed", both.msg);
        pd_dc_refuse(d, r, why);
        return;
    }
    pd_warn("run %s: kv refused: %s; recomputing %u tokens locally", r->in.req.run, why->msg, r->in.n_tokens);
    if (d->o->strict && !d->status)
        d->status = 9;
    size_t n = strlen(kind) + strlen(why->msg) + 3;
    struct pd_err e;
    if (!(r->fallback = pd_arena_alloc(&r->in.mem, n, 1, &e))) {
        pd_dc_refuse(d, r, &e);
        return;
    }
    snprintf(r->fallback, n, "%s: %s", kind, why->msg);
    r->mode = "local";
    pd_dc_step(d, r, PD_ST_FALLBACK, 0, r->fallback);
    pd_dc_submit(d, r, NULL, 0);
}

static void before_us_of(struct pd_dc_run *r)
{
    struct pd_bin v;
    int64_t us;
    if (r->desc.t.p && pd_map_find(r->desc.t.p, r->desc.t.n, "total_us", &v) == 1 && pd_get_int(v, &us) && us >= 0 && us < (int64_t)1 << 50)
        r->before_us = us;
}

void pd_dc_take_kv(struct pd_decoder *d, const struct pd_rec *rec)
{
    struct pd_err e;
    struct pd_arena mem = { 0 };
    struct pd_kvdesc kv;
    int rc = pd_kvdesc_decode(rec->p, rec->n, &mem, &kv, &e);
    if (rc < 0) {       /* the tokens themselves are in doubt: no recompute */
        struct pd_bin run;
        struct pd_dc_run *r = NULL;
        char name[PD_RUN_LEN + 1] = "";
        if (pd_map_find(rec->p, rec->n, "run", &run) == 1 && run.n >= PD_RUN_LEN) {
            memcpy(name, run.p + run.n - PD_RUN_LEN, PD_RUN_LEN);
            r = pd_dc_find_on_way(d, name, NULL, PD_BY_NAME);
        }
        pd_err_prefix(&e, "kv refused");
        if (r)
            pd_dc_refuse(d, r, &e);
        else {
            pd_error("run %s: %s", pd_run_valid(name, strlen(name)) ? name : "?", e.msg);
            d->status = pd_exit_worse(d->status, e.code);
        }
        pd_arena_free(&mem);
        return;
    }
    if ((rc = pd_seen_add(&d->gens, kv.gen, PD_GEN_LEN, &e)) != 0) {
        if (rc < 0)
            pd_dc_fatal(d, &e);
        else {
            pd_fail(&e, PD_ECORRUPT, "run %s: its kv record came twice; the second is dropped", kv.run);
            stray(d, kv.run, &e);
        }
        pd_arena_free(&mem);
        return;
    }
    struct pd_dc_run *r = pd_dc_find_on_way(d, kv.run, kv.gen, PD_BY_GEN);
    bool offered = r != NULL;
    if (!r && !(r = pd_dc_run_new(d, &e))) {
        pd_dc_fatal(d, &e);
        pd_arena_free(&mem);
        return;
    }
    int64_t arrived = pd_mono_us();
    if (offered && r->import && (rc = pd_import_finish(r->import, &kv, &e)) < 0)
        pd_dc_reject_kv(d, r, &e);
    /* From here the closing descriptor is the run's; its arena joins the run. */
    pd_arena_free(&r->in.mem);
    r->in.mem = mem;
    r->desc = kv;
    if ((rc = adopt_desc(d, r, &e)) == 0 && (rc = pd_dc_make_choices(r, d->rt->model->tok, &e)) == 0 && !r->bad.code)
        rc = check_first(d, r, &e);
    r->in.t_accept = arrived;
    if (rc < 0) {
        pd_dc_refuse(d, r, &e);
        return;
    }
    r->submitted = true;
    d->n_on_way--;
    before_us_of(r);
    if (!r->import && !r->bad.code && !compatible(d, r, &e))
        pd_dc_reject_kv(d, r, &e);
    if (!r->bad.code && !r->import && ended_at_prefill(d, r)) {
        finish_from_first(d, r);
        return;
    }
    if (!r->bad.code && !r->import) {   /* as when the offer told of no payload, and the kv is not of a run that ended */
        pd_fail(&e, PD_ECORRUPT, offered ? "its KV was never received" : "kv came without its offer");
        pd_dc_reject_kv(d, r, &e);
    }
    if (r->bad.code) {
        fall_back(d, r);
        return;
    }
    r->kv_bytes = pd_import_bytes(r->import);
    r->kv_us = pd_import_us(r->import);
    r->converted = pd_import_converts(r->import);
    pd_dc_step(d, r, PD_ST_KV_TRANSFER_COMPLETED, r->kv_bytes, NULL);
    uint32_t n, *blocks = pd_import_take(r->import, &n);
    pd_import_free(r->import);
    r->import = NULL;
    pd_dc_submit(d, r, blocks, n);
    pd_free(blocks);
}
