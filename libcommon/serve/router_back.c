/* What workers send back of a run: tokens, results, errors, the word of a prefill worker that it has published. */
#include <inttypes.h>
#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../wire/pack.h"
#include "router_in.h"

/* What the router looks at in a record, in one pass. */
struct brief { struct pd_str run, finish, mode; struct pd_bin text, ttft, e2e, logprob; int64_t choice, pos, token, total; };

static bool read_brief(const struct pd_rec *rec, struct brief *b)
{
    struct pd_iter it;
    struct pd_str key;
    struct pd_bin v;
    *b = (struct brief){ .pos = -1, .token = -1, .total = -1 };
    if (!pd_iter_open(&it, (struct pd_bin){ rec->p, rec->n }, PD_T_MAP))
        return false;
    while (pd_iter_pair(&it, &key, &v)) {
        if (!key.p || key.n < 3)
            continue;
        switch (key.p[0]) {
        case 'r': if (pd_str_eq(key, "run")) pd_get_str(v, &b->run); break;
        case 'p': if (pd_str_eq(key, "pos")) pd_get_int(v, &b->pos); break;
        case 't':
            if (pd_str_eq(key, "token"))
                pd_get_int(v, &b->token);
            else if (pd_str_eq(key, "text"))
                b->text = v;
            else if (pd_str_eq(key, "ttft_ms"))
                b->ttft = v;
            break;
        case 'c':
            if (pd_str_eq(key, "choice"))
                pd_get_int(v, &b->choice);
            else if (pd_str_eq(key, "completion_tokens"))
                pd_get_int(v, &b->total);
            break;
        case 'e': if (pd_str_eq(key, "e2e_ms")) b->e2e = v; break;
        case 'l': if (pd_str_eq(key, "logprob")) b->logprob = v; break;
        case 'm': if (pd_str_eq(key, "mode")) pd_get_str(v, &b->mode); break;
        case 'f': if (pd_str_eq(key, "finish_reason")) pd_get_str(v, &b->finish); break;
        }
    }
    return b->run.p != NULL;
}

/* The first token of a run is here. */
static void first_seen(struct pd_router *r, struct pd_rt_run *run)
{
    if (run->t_first)
        return;
    run->t_first = pd_mono_us();
    pd_metric_observe(r->m_ttft, run->t_first - run->t_accept);
    pd_rt_learn_arrived(r, run);
    if (run->d && run->d_share.prefill_tokens) {        /* its prompt is computed */
        pd_member_give_back(run->d->m, (struct pd_share){ .prefill_tokens = run->d_share.prefill_tokens });
        run->d_share.prefill_tokens = 0;
    }
}

/* A token record goes out. */
static void deliver(struct pd_router *r, struct pd_rt_run *run, uint32_t choice, const uint8_t *rec, size_t n)
{
    struct pd_rt_choice *c = &run->choice[choice];
    if (pd_rt_streams(run)) {
        if (!c->told) {         /* also of what went before, for who has joined since */
            pd_rt_step_tokens(r, run, PD_ST_STREAMING, choice, 0, c->sent, NULL);
            c->told = c->sent;
        }
        run->delivered = true;
    }
    pd_rt_put_all(r, run, rec, n, true);
    pd_rt_key_log(r, run, rec, n, true);
}

static double number_of(struct pd_bin v)
{
    double x = 0;
    return v.p && pd_get_float(v, &x) ? x : 0;
}

/* The record with another text. */
static int with_text(const struct pd_rec *rec, struct pd_bin text, const struct pd_buf *before, struct pd_buf *out, struct pd_err *e)
{
    struct pd_packer k;
    struct pd_str s;
    if (!pd_get_str(text, &s))
        return pd_buf_add(out, rec->p, rec->n, e);
    int rc = pd_buf_add(out, rec->p, (size_t)(text.p - rec->p), e);
    pd_pack_init(&k, out, e);
    k.rc = rc;
    msgpack_pack_str(&k.pk, before->n + s.n);
    msgpack_pack_str_body(&k.pk, before->p, before->n);
    msgpack_pack_str_body(&k.pk, s.p, s.n);
    return k.rc ? k.rc : pd_buf_add(out, text.p + text.n, (size_t)(rec->p + rec->n - text.p - text.n), e);
}

static void on_token(struct pd_router *r, struct pd_rt_run *run, const struct pd_rec *rec, const struct brief *b)
{
    struct pd_str s = { NULL, 0 };
    struct pd_err e;
    if (b->choice < 0 || b->choice >= run->n || b->pos < 0 || b->token < 0 || b->token > INT32_MAX)
        return;
    struct pd_rt_choice *c = &run->choice[b->choice];
    int32_t id = (int32_t)b->token;
    if (!run->sign && run->p && !run->p_done)   /* did it without the KV, or is that answer on its way? */
        run->doubt_us = pd_mono_us() + PD_RT_DOUBT_US;
    if (!run->sign) {           /* it has the KV, or does without */
        pd_rt_lent_read(r, run);
        pd_rt_fall_over(r, run, true);
    }
    run->sign = true;
    if (c->done)
        return;
    if (b->text.p)
        pd_get_str(b->text, &s);
    if (b->pos < c->sent) {     /* went out before: early, or by the worker that died */
        if (b->pos == 0 && c->no_text) {
            c->no_text = false;
            if (s.n && (pd_buf_add(&c->carry, s.p, s.n, &e) < 0 || pd_buf_add(&c->text, s.p, s.n, &e) < 0))
                pd_rt_fail(r, run, &e);
        }
        return;
    }
    if (b->pos > c->sent) {
        char why[200];
        snprintf(why, sizeof why, "decode worker %.80s sent position %" PRId64 " where %u is next", pd_rt_name_of(run->d), b->pos, c->sent);
        pd_rt_send_cancel(run->d, run, why);
        pd_rt_d_lost(r, run, why, true);
        return;
    }
    first_seen(r, run);
    float logprob = (float)number_of(b->logprob);
    if (pd_buf_add(&c->tokens, &id, sizeof id, &e) < 0 || (s.n && pd_buf_add(&c->text, s.p, s.n, &e) < 0) ||
        (run->logprobs && pd_buf_add(&c->logprobs, &logprob, sizeof logprob, &e) < 0)) {
        pd_rt_fail(r, run, &e);
        return;
    }
    c->sent++;
    if (c->carry.n) {
        struct pd_buf out = { 0 };
        if (with_text(rec, b->text, &c->carry, &out, &e) == 0)
            deliver(r, run, (uint32_t)b->choice, out.p, out.n);
        pd_buf_free(&out);
        c->carry.n = 0;
    } else
        deliver(r, run, (uint32_t)b->choice, rec->p, rec->n);
}

static void put_ms(struct pd_buf *b, const struct pd_rec *rec, struct pd_bin v, double ms)
{
    uint64_t bits;
    if (!v.p || v.n != 9 || v.p[0] != 0xcb)     /* null, or not as we write it */
        return;
    memcpy(&bits, &ms, sizeof bits);
    pd_put_be64(b->p + (v.p - rec->p) + 1, bits);
}

/* The result of a run that has moved: whoever went on with it does not know the logprobs of the tokens that came before. */
static int with_logprobs(const struct pd_rt_run *run, const struct pd_rec *rec, struct pd_buf *out, struct pd_err *e)
{
    struct pd_arena mem = { 0 };
    struct pd_result res;
    float *all = NULL;
    int rc = pd_result_decode(rec->p, rec->n, &mem, &res, e);
    if (rc == 0 && res.logprobs && res.choice < run->n) {
        const struct pd_buf *kept = &run->choice[res.choice].logprobs;
        uint32_t n = (uint32_t)(kept->n / sizeof *all) < res.n_tokens ? (uint32_t)(kept->n / sizeof *all) : res.n_tokens;
        if (!(all = pd_arena_dup(&mem, res.logprobs, res.n_tokens * sizeof *all, e)))
            rc = PD_ENOMEM;
        else {
            memcpy(all, kept->p ? kept->p : (const uint8_t *)"", n * sizeof *all);
            res.logprobs = all;
        }
    }
    rc = rc ? rc : pd_result_encode(&res, out, e);
    pd_arena_free(&mem);
    return rc;
}

static void on_result(struct pd_router *r, struct pd_rt_run *run, const struct pd_rec *rec, const struct brief *b)
{
    struct pd_err e;
    int64_t now = pd_mono_us();
    if (b->choice < 0 || b->choice >= run->n || run->choice[b->choice].done)
        return;
    struct pd_rt_choice *c = &run->choice[b->choice];
    bool error = pd_str_eq(b->finish, "error"), cancelled = pd_str_eq(b->finish, "cancelled");
    c->done = true;
    c->total = b->total > 0 && b->total < INT32_MAX ? (uint32_t)b->total : 0;
    pd_rt_learn_result(run, rec->p, rec->n);
    run->n_done++;
    pd_rt_lent_result(r, run, rec);
    pd_rt_fall_over(r, run, !error && !cancelled);
    run->failed |= error;
    run->cancelled |= cancelled;
    if (pd_str_eq(b->mode, "remote") && !error && !cancelled)     /* prefill has done its part, whether its answer was read yet or not */
        pd_rt_release_p(run, NULL);
    if (!error && !cancelled && c->told && c->total != c->sent)
        pd_warn("run %s: decode worker %s sent %u tokens and tells of %u", run->name, pd_rt_name_of(run->d), c->sent, c->total);
    size_t from = run->held.n;
    if (pd_buf_add(&run->held, rec->p, rec->n, &e) < 0) {
        c->done = false;
        pd_rt_fail(r, run, &e);
        return;
    }
    /* The client's times: from its request to now, whatever was tried before and however long it waited. */
    struct pd_buf at = { run->held.p + from, rec->n, rec->n };
    double before = (double)(run->t_sent - run->t_accept) / 1e3;
    put_ms(&at, rec, b->e2e, (double)(now - run->t_accept) / 1e3);
    put_ms(&at, rec, b->ttft, run->t_first ? (double)(run->t_first - run->t_accept) / 1e3 : number_of(b->ttft) + before);
    enum pd_state_id state = run->failed ? PD_ST_FAILED : run->cancelled ? PD_ST_CANCELLED : PD_ST_COMPLETED;
    bool over = run->n_done == run->n;
    if (!run->delivered && !over)
        return;
    if (over)
        pd_rt_trace_end(r, run, state, run->failed ? pd_rt_text_of(&run->why) : run->cancelled ? run->cancel_cause : NULL);
    run->delivered = true;
    pd_rt_put_all(r, run, run->held.p, run->held.n, false);
    pd_rt_key_log(r, run, run->held.p, run->held.n, false);
    run->held.n = 0;
    if (over)
        pd_rt_end_run(r, run, state);
}

/* The first token out of prefill's descriptor, before anybody has verified the KV. Its text is not known here: it goes out with the next one. */
static void put_early(struct pd_router *r, struct pd_rt_run *run, const struct pd_rec *rec)
{
    struct pd_arena mem = { 0 };
    struct pd_kvdesc d;
    struct pd_err e;
    if (pd_kvdesc_decode(rec->p, rec->n, &mem, &d, &e) == 0 && d.n_first == run->n) {
        bool told = false;
        for (uint32_t i = 0; i < run->n; i++) {
            struct pd_rt_choice *c = &run->choice[i];
            struct pd_token t = { .choice = i, .token = d.first[i].token, .text = { "", 0 }, .has_logprob = run->logprobs,
                                  .logprob = d.first[i].logprob, .top = d.first[i].top, .n_top = d.first[i].n_top, .t_us = pd_mono_us() - run->t_accept };
            struct pd_buf b = { 0 };
            memcpy(t.run, run->name, sizeof t.run);
            if (c->sent || pd_token_encode(&t, &b, &e) < 0 || pd_buf_add(&c->tokens, &t.token, sizeof t.token, &e) < 0 ||
                (run->logprobs && pd_buf_add(&c->logprobs, &t.logprob, sizeof t.logprob, &e) < 0)) {
                pd_buf_free(&b);
                continue;
            }
            if (!told)
                pd_rt_step(r, run, PD_ST_FIRST_TOKEN_EARLY, NULL);
            told = true;
            first_seen(r, run);
            c->sent = 1;
            c->no_text = true;
            deliver(r, run, i, b.p, b.n);
            pd_buf_free(&b);
        }
    }
    pd_arena_free(&mem);
}

/* Of this attempt, not of one before that the same worker had. */
static bool of_op(const struct pd_rt_run *run, const struct pd_rec *rec)
{
    struct pd_bin v, op;
    return pd_map_find(rec->p, rec->n, "op", &v) != 1 || !pd_get_bin(v, &op) || (op.n == sizeof run->op && !memcmp(op.p, run->op, op.n));
}

static void on_error(struct pd_router *r, struct pd_rt_run *run, struct pd_rt_worker *w, const struct pd_rec *rec)
{
    struct pd_arena mem = { 0 };
    struct pd_error_rec er = { 0 };
    struct pd_err e;
    char why[300];
    if (pd_error_decode(rec->p, rec->n, &mem, &er, &e) < 0)
        snprintf(why, sizeof why, "%.280s", e.msg);
    else
        snprintf(why, sizeof why, "%.280s", er.message.p ? er.message.p : "");
    bool again = !strcmp(er.action, "reroute") || !strcmp(er.action, "retry");
    bool far = !strcmp(er.class_, pd_code_name(PD_ENOWORKER)) || !strcmp(er.class_, pd_code_name(PD_ETIME));
    bool drains = !strcmp(er.action, "reroute"), ours = !strcmp(er.class_, pd_code_name(PD_ECANCEL)) && !run->cancelling;
    pd_arena_free(&mem);
    if (w == run->p && w != run->d) {
        if (ours)               /* the answer to our cancel of an attempt before */
            return;
        if (far && again && !drains)    /* it does not reach its decode worker; what is aborted is so by the request's own limits */
            pd_rt_lent_went(r, run, PD_WENT_WRONG, "kv_failed", pd_mono_us());
        if (!run->p_done)
            pd_rt_p_lost(r, run, "prefill_failed", why, again);
        else
            pd_rt_p_lost_late(r, run, "prefill_failed", why);
    } else if (again && !run->cancelling)
        pd_rt_d_lost(r, run, why, !drains);
    else {
        pd_rt_set_text(&run->why, why);
        run->failed = true;
        pd_error("run %s: %s: %s", run->name, pd_rt_name_of(w), why);
        pd_rt_put_all(r, run, rec->p, rec->n, false);
        pd_rt_key_log(r, run, rec->p, rec->n, false);
    }
}

void pd_rt_record(struct pd_router *r, struct pd_rt_worker *w, const struct pd_rec *rec)
{
    struct brief b;
    struct pd_rt_run *run = read_brief(rec, &b) ? pd_rt_find(r, b.run.p, b.run.n) : NULL;
    if (run && run->fall.skip && run->fall.skip_of == w) {      /* dropped there at our word; it may have the run again by now, and answers in order */
        run->fall.skip -= rec->kind == PD_K_RESULT;
        return;
    }
    bool from_d = run && run->d == w, from_p = run && run->p == w;
    if (!from_d && !from_p) {   /* of a run that is over, or was given to another */
        pd_metric_add(r->m_dropped, 1);
        return;
    }
    if (rec->kind == PD_K_TOKEN && from_d)
        on_token(r, run, rec, &b);
    else if (rec->kind == PD_K_RESULT && from_d && run->migrations && run->logprobs) {
        struct pd_buf mended = { 0 };
        struct pd_err e;
        struct pd_rec whole = *rec;
        if (with_logprobs(run, rec, &mended, &e) < 0)
            pd_rt_fail(r, run, &e);     /* zeros for what it does not know would look like logprobs */
        else {
            whole.p = mended.p;
            whole.n = mended.n;
            read_brief(&whole, &b);
            on_result(r, run, &whole, &b);
        }
        pd_buf_free(&mended);
    } else if (rec->kind == PD_K_RESULT && from_d)
        on_result(r, run, rec, &b);
    else if (rec->kind == PD_K_ERROR && of_op(run, rec))
        on_error(r, run, w, rec);
    else if (rec->kind == PD_K_KV && from_p && !run->p_done && of_op(run, rec)) {
        pd_rt_lent_published(r, run, rec);
        run->p_done = true;
        pd_rt_learn_published(r, run, rec, pd_mono_us());
        if (run->early && !run->sign && !run->cancelling)
            put_early(r, run, rec);
    } else
        pd_metric_add(r->m_dropped, 1);
}
