/* The router's clients: their requests become runs, and they are sent what comes back. */
#include <stdio.h>
#include <sys/random.h>
#include "../base/clock.h"
#include "../engine/batch.h"
#include "../engine/reply.h"
#include "../wire/frame.h"
#include "../wire/pack.h"
#include "../wire/transfer.h"
#include "router_in.h"

enum { MAX_WAITING = 32 << 20 };        /* bytes of records that wait for one client, besides its connection's queue */

/* ---- what goes out ---- */

/* The record with another `id`: who joined a run gets his own back. */
static int with_id(const struct pd_rt_listener *l, const uint8_t *rec, size_t n, struct pd_buf *out, struct pd_err *e)
{
    static const uint8_t nil = 0xc0, key[] = { 0xa2, 'i', 'd' };
    struct pd_bin id = { l->id.n ? l->id.p : &nil, l->id.n ? l->id.n : 1 }, v;
    enum pd_kind kind = pd_kind_of(rec, n);
    struct pd_head h;
    int rc;
    if (pd_map_find(rec, n, "id", &v) == 1) {
        rc = pd_buf_add(out, rec, (size_t)(v.p - rec), e);
        rc = rc ? rc : pd_buf_add(out, id.p, id.n, e);
        return rc ? rc : pd_buf_add(out, v.p + v.n, (size_t)(rec + n - v.p - v.n), e);
    }
    if ((kind != PD_K_RESULT && kind != PD_K_ERROR) || !l->id.n || !pd_head_read(rec, n, &h) || h.count / 2 >= UINT16_MAX)
        return pd_buf_add(out, rec, n, e);
    uint8_t head[3] = { 0xde, (uint8_t)((h.count / 2 + 1) >> 8), (uint8_t)(h.count / 2 + 1) };
    rc = pd_buf_add(out, head, sizeof head, e);
    rc = rc ? rc : pd_buf_add(out, rec + h.hdr, n - h.hdr, e);
    rc = rc ? rc : pd_buf_add(out, key, sizeof key, e);
    return rc ? rc : pd_buf_add(out, id.p, id.n, e);
}

static void give(struct pd_rt_listener *l, const uint8_t *rec, size_t n)
{
    struct pd_err e;
    struct pd_conn *c = l->k->c;
    if (!l->pending.n && !pd_conn_full(c)) {
        if (pd_conn_put(c, rec, n, &e) == PD_EFAIL)
            pd_conn_put_error(c, l->name, &e, "abort");
        return;                 /* another failure: the client is gone, and `gone` follows */
    }
    if (l->k->waiting + n > MAX_WAITING) {
        pd_fail(&e, PD_ENOMEM, "the client reads too slowly: %zu bytes wait for it", l->k->waiting);
        pd_conn_close(c, &e);
    } else if (pd_buf_add(&l->pending, rec, n, &e) < 0)
        pd_conn_close(c, &e);
    else
        l->k->waiting += n;
}

void pd_rt_put(struct pd_router *r, struct pd_rt_listener *l, const void *rec, size_t n)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    if (!l->other)
        give(l, rec, n);
    else if (with_id(l, rec, n, &b, &e) < 0)
        pd_conn_close(l->k->c, &e);
    else
        give(l, b.p, b.n);
    pd_buf_free(&b);
}

/* Framed once already, or of our own making: its length asks for no memory. */
static size_t next_record(const uint8_t *p, size_t n) { return pd_value_len(p, n); }

static void put_each(struct pd_router *r, struct pd_rt_listener *l, const uint8_t *p, size_t n)
{
    for (size_t at = 0, len; at < n && (len = next_record(p + at, n - at)); at += len)
        pd_rt_put(r, l, p + at, len);
}

void pd_rt_put_all(struct pd_router *r, struct pd_rt_run *run, const void *recs, size_t n, bool tokens)
{
    for (struct pd_rt_listener *l = run->listeners; l; l = l->next_of_run)
        if (!tokens)
            put_each(r, l, recs, n);
        else if (l->stream)
            pd_rt_put(r, l, recs, n);
}

/* ---- listeners ---- */

int pd_rt_listen(struct pd_router *r, struct pd_rt_client *k, struct pd_rt_run *run, const char *name, bool stream, struct pd_rt_listener **out,
    struct pd_err *e)
{
    struct pd_rt_listener *l = pd_calloc(1, sizeof *l, "a listener", e);
    if (!l)
        return PD_ENOMEM;
    l->k = k;
    l->run = run;
    l->stream = stream;
    snprintf(l->name, sizeof l->name, "%s", name);
    if (run) {
        l->next_of_run = run->listeners;
        run->listeners = l;
    }
    l->prev = &k->first;
    if ((l->next = k->first))
        l->next->prev = &l->next;
    k->first = l;
    pd_conn_owe(k->c, 1);
    *out = l;
    return 0;
}

static void listener_free(struct pd_rt_listener *l)
{
    *l->prev = l->next;
    if (l->next)
        l->next->prev = l->prev;
    l->k->waiting -= l->pending.n - l->at;
    pd_buf_free(&l->pending);
    pd_buf_free(&l->id);
    pd_free(l);
}

/* All was put, and the run has ended. */
void pd_rt_listener_over(struct pd_router *r, struct pd_rt_listener *l)
{
    struct pd_conn *c = l->k->c;
    if (l->run || l->pending.n)
        return;
    listener_free(l);
    pd_conn_owe(c, -1);
}

void pd_rt_leave(struct pd_router *r, struct pd_rt_run *run)
{
    while (run->listeners) {
        struct pd_rt_listener *l = run->listeners;
        run->listeners = l->next_of_run;
        l->run = NULL;
        pd_rt_listener_over(r, l);
    }
}

static void send_pending(struct pd_rt_listener *l)
{
    struct pd_err e;
    while (l->at < l->pending.n && !pd_conn_full(l->k->c)) {
        size_t len = next_record(l->pending.p + l->at, l->pending.n - l->at);
        int rc = pd_conn_put(l->k->c, l->pending.p + l->at, len, &e);
        if (rc == PD_EFAIL)
            pd_conn_put_error(l->k->c, l->name, &e, "abort");
        l->at += len;
        l->k->waiting -= len;
        if (!len || rc == PD_ECANCEL || rc == PD_ENOMEM)        /* nobody to tell; `gone` follows */
            break;
    }
    if (l->at == l->pending.n)
        l->at = l->pending.n = 0;
}

static void on_room(void *ctx, struct pd_conn *c)
{
    struct pd_rt_client *k = pd_conn_get(c);
    for (struct pd_rt_listener *l = k->first, *next; l && !pd_conn_full(c); l = next) {
        next = l->next;
        if (!l->pending.n)
            continue;
        send_pending(l);
        pd_rt_listener_over(ctx, l);
    }
}

/* ---- who may be read ---- */

static bool has_room(const struct pd_router *r) { return r->n_runs < r->o.max_runs && r->body_bytes < PD_RT_MAX_BODIES; }

void pd_rt_let_read(struct pd_router *r)
{
    while (has_room(r) && r->held) {
        struct pd_rt_client *k = r->held;
        if (!(r->held = k->next_held))
            r->last_held = &r->held;
        k->held = false;
        pd_conn_unhold(k->c);
    }
}

static void hold_if_full(struct pd_router *r, struct pd_rt_client *k)
{
    if (has_room(r) || k->held)
        return;
    k->held = true;
    k->next_held = NULL;
    *r->last_held = k;
    r->last_held = &k->next_held;
    pd_conn_hold(k->c);
}

/* ---- requests ---- */

/* Before it became a run: its error and its results. */
void pd_rt_refuse(struct pd_router *r, struct pd_conn *c, const struct pd_request *q, const struct pd_err *why)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    struct pd_result as = { .mode = "local" };
    pd_refusal_log(q, why);
    pd_metric_add(r->m_ends[4], 1);
    if (pd_refusal_encode(q, why, "abort", &as, &b, &e) < 0)
        pd_conn_close(c, &e);
    for (size_t at = 0, len; at < b.n && (len = next_record(b.p + at, b.n - at)) && pd_conn_put(c, b.p + at, len, &e) == 0; at += len) {}
    pd_buf_free(&b);
}

/* Pairs that the router itself uses, taken out. */
static int without(const struct pd_extra *x, const char *key, struct pd_extra *out, struct pd_buf *mem, struct pd_err *e)
{
    *out = *x;
    for (size_t at = 0; at < x->n;) {
        struct pd_bin k = { x->p + at, pd_value_len(x->p + at, x->n - at) };
        size_t v = k.n ? pd_value_len(x->p + at + k.n, x->n - at - k.n) : 0;
        struct pd_str s;
        if (!v)
            break;
        if (pd_get_str(k, &s) && pd_str_eq(s, key)) {
            int rc = pd_buf_add(mem, x->p, at, e);
            rc = rc ? rc : pd_buf_add(mem, x->p + at + k.n + v, x->n - at - k.n - v, e);
            *out = (struct pd_extra){ mem->p, mem->n, x->pairs - 1 };
            return rc;
        }
        at += k.n + v;
    }
    return 0;
}

static int64_t ms_in(struct pd_bin map, const char *key)
{
    struct pd_bin v;
    int64_t ms;
    return map.p && pd_map_find(map.p, map.n, key, &v) == 1 && pd_get_int(v, &ms) && ms > 0 && ms < INT64_MAX / 2000 ? ms * 1000 : 0;
}

uint32_t pd_rt_guess_tokens(const struct pd_request *q)
{
    uint64_t n = q->prompt.n;
    for (uint32_t i = 0; i < q->n_messages; i++)
        n += q->messages[i].content.n + 16;
    n = n / 4 + 1;
    return n < UINT32_MAX ? (uint32_t)n : UINT32_MAX;
}

int pd_rt_body_make(const struct pd_request *q, struct pd_rt_body *out, struct pd_err *e)
{
    struct pd_buf b = { 0 };
    struct pd_head h;
    int rc = pd_request_encode(q, &b, e);
    if (rc == 0 && (!pd_head_read(b.p, b.n, &h) || h.type != PD_T_MAP || h.count / 2 > UINT16_MAX - 8))
        rc = pd_fail(e, PD_EFAIL, "request: it has too many keys");
    if (rc == 0 && (rc = pd_buf_add(&out->b, b.p + h.hdr, b.n - h.hdr, e)) == 0)
        out->pairs = (uint32_t)(h.count / 2);
    pd_buf_free(&b);
    return rc;
}

/* The request as it goes to workers, and what is known of it. q is changed. */
static int prepare(struct pd_router *r, struct pd_rt_run *run, struct pd_request *q, struct pd_err *e)
{
    struct pd_buf extra = { 0 }, b = { 0 };
    struct pd_bin id = q->id, token = q->cancel_token, timeouts = q->timeouts_ms;
    char name[PD_RUN_LEN + 1];
    bool keyed = q->idempotency_key.p != NULL;
    run->deadline_us = q->has & PD_RQ_DEADLINE && q->deadline_ms < INT64_MAX / 2000 ? run->t_accept + (q->deadline_ms > 0 ? q->deadline_ms : 0) * 1000 : 0;
    run->queue_us = ms_in(q->timeouts_ms, "queue");
    run->first_us = ms_in(q->timeouts_ms, "first_token");
    run->transfer_us = ms_in(q->timeouts_ms, "transfer");
    run->n = (uint32_t)q->n;
    run->logprobs = q->logprobs || q->top_logprobs > 0;         /* as tokens have them */
    run->need = (struct pd_need){ .policy = r->o.policy, .suspect_us = r->o.suspect_us, .exact = q->has_token_ids, .max_tokens = (uint32_t)q->max_tokens,
        .n = run->n,
                                  .prompt_tokens = q->has_token_ids ? q->n_token_ids : pd_rt_guess_tokens(q), .like = -1 };
    run->age = run->t_accept - pd_request_steps(q) * PD_PRIORITY_US;
    q->has &= ~(uint32_t)PD_RQ_DEADLINE;
    q->idempotency_key = (struct pd_str){ NULL, 0 };
    q->route = (struct pd_bin){ NULL, 0 };
    int rc = without(&q->extra, "stream", &q->extra, &extra, e);
    if (rc == 0 && q->adapter.n && (rc = pd_buf_add(&run->adapter, q->adapter.p, q->adapter.n, e)) == 0)
        run->need.adapter = (struct pd_str){ (char *)run->adapter.p, run->adapter.n };
    if (rc == 0 && id.n)
        rc = pd_buf_add(&run->id, id.p, id.n, e);
    if ((run->has_token = token.n == sizeof run->token))
        memcpy(run->token, token.p, sizeof run->token);
    else if (r->paths.kept && getrandom(run->own_token, sizeof run->own_token, 0) != sizeof run->own_token)
        rc = rc ? rc : pd_fail_sys(e, "no random bytes for a token");
    if (rc == 0 && keyed) {     /* what makes two requests the same */
        memcpy(name, q->run, sizeof name);
        q->run[0] = 0;
        q->id = q->cancel_token = (struct pd_bin){ NULL, 0 };
        if ((rc = pd_request_encode(q, &b, e)) == 0)
            run->body_hash = pd_xxh3(b.p, b.n, 0);
        b.n = 0;
        memcpy(q->run, name, sizeof name);
        q->id = id;
        q->cancel_token = token;
    }
    q->timeouts_ms = (struct pd_bin){ NULL, 0 };
    if (rc == 0 && timeouts.n)
        rc = pd_buf_add(&run->timeouts, timeouts.p, timeouts.n, e);
    rc = rc ? rc : pd_rt_body_make(q, &run->body, e);
    rc = rc ? rc : pd_rt_tokenise(r, run, q, e);
    pd_buf_free(&b);
    pd_buf_free(&extra);
    return rc;
}

/* Its key is known: the run that goes on with it is joined, one that has ended is told again. */
static int join(struct pd_router *r, struct pd_rt_client *k, struct pd_rt_key *key, struct pd_rt_run *like, bool stream, struct pd_err *e)
{
    struct pd_rt_listener *l;
    struct pd_rt_run *run = key->run;
    if (key->body_hash != like->body_hash)
        return pd_fail(e, PD_EFAIL, "request: its idempotency_key came already with another request (run %s)", key->name);
    int rc = pd_rt_listen(r, k, run, key->name, stream, &l, e);
    if (rc < 0)
        return rc;
    pd_metric_add(r->m_joined, 1);
    l->other = true;
    if (like->id.n && pd_buf_add(&l->id, like->id.p, like->id.n, e) < 0)
        pd_conn_close(k->c, e);
    if (stream) {
        put_each(r, l, key->tokens.p, key->tokens.n);
        if (run && key->tokens.n)
            run->delivered = true;
    }
    put_each(r, l, key->results.p, key->results.n);
    if (!run)
        pd_rt_listener_over(r, l);
    return 0;
}

static void take(struct pd_router *r, struct pd_conn *c, const struct pd_rec *rec)
{
    struct pd_rt_client *k = pd_conn_get(c);
    struct pd_rt_listener *l;
    struct pd_intake in;
    struct pd_bin v;
    struct pd_err e;
    bool stream = r->o.stream;
    struct pd_rt_key *key = NULL;
    int rc = pd_intake_read(rec->p, rec->n, r->o.seed, &in, &e);
    struct pd_rt_run *run = rc < 0 ? NULL : pd_calloc(1, sizeof *run, "a run", &e);
    if (run)
        run->like = -1;         /* before anything may free it */
    if (!run || !(run->choice = pd_calloc((size_t)in.req.n, sizeof *run->choice, "a run's choices", &e))) {
        rc = rc < 0 ? rc : PD_ENOMEM;
        goto out;
    }
    if (pd_map_find(rec->p, rec->n, "stream", &v) == 1)
        pd_get_bool(v, &stream);
    struct pd_str name = in.req.idempotency_key;
    run->t_accept = in.t_accept;
    memcpy(run->name, in.req.run, sizeof run->name);
    if ((rc = prepare(r, run, &in.req, &e)) < 0)
        goto out;
    if (name.p && (key = pd_rt_key_find(r, name))) {
        rc = join(r, k, key, run, stream, &e);
        pd_rt_run_free(r, run);
        run = NULL;
        goto out;
    }
    if ((rc = pd_seen_add(&r->seen, run->name, PD_RUN_LEN, &e)) == 1) {
        rc = pd_fail(&e, PD_EFAIL, "request: run %s came already here (leave run out: one is made)", run->name);
        pd_run_new(in.req.run, NULL);           /* the answer to the other keeps the name */
    }
    if (rc < 0 || (name.p && (rc = pd_rt_key_new(r, name, run, &e)) < 0) || (rc = pd_rt_listen(r, k, run, run->name, stream, &l, &e)) < 0)
        goto out;
    run->stream_up = stream || name.p || run->first_us;
    if ((rc = pd_rt_begin(r, run, &e)) < 0) {
        pd_rt_leave(r, run);
        goto out;
    }
    run = NULL;
    hold_if_full(r, k);
out:
    if (rc < 0)
        pd_rt_refuse(r, c, &in.req, &e);
    if (run) {
        pd_rt_key_end(r, run, false);
        pd_rt_run_free(r, run);
    }
    pd_intake_free(&in);
}

/* ---- cancel ---- */

/* From the client that brought the run, over the same connection: no token is needed. */
static void cancel_own(struct pd_router *r, struct pd_conn *c, const struct pd_rec *rec)
{
    struct pd_rt_client *k = pd_conn_get(c);
    struct pd_arena mem = { 0 };
    struct pd_cancel q;
    struct pd_err e;
    int rc = pd_cancel_decode(rec->p, rec->n, &mem, &q, &e);
    if (rc == 0) {
        struct pd_rt_listener *l = k->first;
        while (l && (!l->run || strcmp(l->run->name, q.run)))
            l = l->next;
        if (l)
            pd_rt_cancel(r, l->run, "cancelled by its client");
    } else
        pd_conn_put_error(c, NULL, &e, "abort");
    pd_arena_free(&mem);
}

int pd_rt_on_cancel(void *ctx, const struct pd_rec *rec, const char **state, struct pd_err *e)
{
    struct pd_router *r = ctx;
    struct pd_bin token;
    struct pd_str name;
    struct pd_rt_run *run;
    int rc = pd_cancel_names(rec, &name, &token, e);
    if (rc < 0 || !(run = pd_rt_find(r, name.p, name.n)))
        return rc;              /* 0: "unknown": it is over, or never was */
    if ((rc = pd_cancel_may(token, run->token, run->has_token, run->name, e)) < 0)
        return rc;
    pd_rt_cancel(r, run, "cancelled by its client");
    *state = "cancelled";
    return 0;
}

/* ---- connections ---- */

static int on_opened(void *ctx, struct pd_conn *c, struct pd_err *e)
{
    struct pd_rt_client *k = pd_calloc(1, sizeof *k, "a client", e);
    (void)ctx;
    if (!k)
        return PD_ENOMEM;
    k->c = c;
    pd_conn_set(c, k);
    return 0;
}

static void on_record(void *ctx, struct pd_conn *c, const struct pd_rec *rec)
{
    struct pd_err e;
    if (rec->kind == PD_K_REQUEST)
        take(ctx, c, rec);
    else if (rec->kind == PD_K_CANCEL)
        cancel_own(ctx, c, rec);
    else {
        struct pd_str kind = pd_rec_kind(rec);
        pd_fail(&e, PD_EFAIL, "a record of kind '%.*s' is not served here; requests are", (int)(kind.n < 40 ? kind.n : 40), kind.p);
        pd_conn_put_error(c, NULL, &e, "abort");
    }
}

static void on_bad(void *ctx, struct pd_conn *c, const struct pd_err *why)
{
    struct pd_request q = { .n = 1 };
    pd_run_new(q.run, NULL);
    pd_rt_refuse(ctx, c, &q, why);
}

static void on_gone(void *ctx, struct pd_conn *c, const struct pd_err *why)
{
    struct pd_router *r = ctx;
    struct pd_rt_client *k = pd_conn_get(c);
    (void)why;
    for (struct pd_rt_client **q = &r->held; *q; q = &(*q)->next_held)
        if (*q == k) {
            *q = k->next_held;
            if (!*q)
                r->last_held = q;
            break;
        }
    while (k->first) {
        struct pd_rt_listener *l = k->first;
        struct pd_rt_run *run = l->run;
        for (struct pd_rt_listener **q = run ? &run->listeners : NULL; q && *q; q = &(*q)->next_of_run)
            if (*q == l) {
                *q = l->next_of_run;
                break;
            }
        listener_free(l);
        if (run && !run->listeners && !run->key)
            pd_rt_cancel(r, run, "the client is gone");
    }
    pd_free(k);
}

void pd_rt_client_free(struct pd_rt_client *k)
{
    while (k && k->first)
        listener_free(k->first);
    pd_free(k);
}

const struct pd_conn_cb pd_rt_client_cb = { .opened = on_opened, .record = on_record, .bad = on_bad, .room = on_room, .gone = on_gone };
