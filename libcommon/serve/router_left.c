#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../wire/pack.h"
#include "../wire/transfer.h"
#include "router_in.h"
#include "router_left.h"

enum { FORGET_US = 600000000, ANSWER_US = 5000000 };

/* A worker that is asked to drop runs, one after the other. */
struct pd_rt_query {
    struct pd_rt_query *next;
    struct pd_router *r;
    struct pd_conn *c;
    char at[300];
    char run[PD_RUN_LEN + 1]; uint8_t attempt;  /* which was asked about */
    int64_t since_us;
};

enum { AT_P = 1, AT_D = 2, AT_BOTH = 3 };

static unsigned side_of(const struct pd_ledger_item *i, const char *at) { return (strcmp(i->p, at) ? 0 : AT_P) | (strcmp(i->d, at) ? 0 : AT_D); }

static struct pd_ledger_item *next_for(const struct pd_router *r, const char *at)
{
    struct pd_ledger_item *i = pd_ledger_left(r->paths.ledger) ? pd_ledger_first(r->paths.ledger) : NULL;
    while (i && !(i->left && (side_of(i, at) & ~i->user)))
        i = (void *)i->node.next;
    return i;
}

/* The last one may also have been given anew, by its client who came back. */
static void look_if_over(struct pd_router *r)
{
    if (!r->paths.has_left || pd_ledger_left(r->paths.ledger))
        return;
    r->paths.has_left = false;
    pd_warn("what a former life left at the workers is dropped (%u runs were still there)", r->paths.n_found);
}

static void settle(struct pd_router *r, struct pd_ledger_item *i, unsigned sides, bool found)
{
    i->user |= (uint8_t)sides;
    i->found |= found;
    if (i->user != AT_BOTH)
        return;
    r->paths.n_found += i->found;
    pd_ledger_end(r->paths.ledger, i);
    look_if_over(r);
}

static void ask(struct pd_rt_query *q)
{
    struct pd_ledger_item *i = next_for(q->r, q->at);
    struct pd_buf b = { 0 };
    struct pd_err e;
    if (!i) {
        pd_conn_finish(q->c);
        return;
    }
    struct pd_cancel c = { .cause = { "the router that gave it is gone", 31 }, .has_token = true };
    memcpy(c.cancel_token, i->token, sizeof c.cancel_token);
    memcpy(c.run, i->run, sizeof c.run);
    memcpy(q->run, i->run, sizeof q->run);
    q->attempt = i->attempt;
    q->since_us = pd_mono_us();
    if (pd_cancel_encode(&c, &b, &e) < 0 || pd_conn_put(q->c, b.p, b.n, &e) < 0)
        pd_conn_close(q->c, &e);
    pd_buf_free(&b);
}

static void on_answer(void *ctx, struct pd_conn *c, const struct pd_rec *rec)
{
    struct pd_rt_query *q = ctx;
    struct pd_ledger_item *i = pd_ledger_find(q->r->paths.ledger, q->run, q->attempt);
    struct pd_bin v;
    struct pd_str state = { NULL, 0 };
    (void)c;
    if (rec->kind == PD_K_STATUS && pd_map_find(rec->p, rec->n, "state", &v) == 1)
        pd_get_str(v, &state);
    if (i && i->left)           /* an error says that the run of that name is another one by now */
        settle(q->r, i, side_of(i, q->at), pd_str_eq(state, "cancelled"));
    ask(q);
}

static void on_gone(void *ctx, struct pd_conn *c, const struct pd_err *why)
{
    struct pd_rt_query *q = ctx, **p = &q->r->paths.queries;
    (void)c, (void)why;
    while (*p != q)
        p = &(*p)->next;
    *p = q->next;
    pd_free(q);
}

static const struct pd_conn_cb query_cb = { .record = on_answer, .gone = on_gone, .looks_on = true };

static void begin(struct pd_router *r, const char *at)
{
    struct pd_rt_query *q;
    struct pd_err e;
    for (q = r->paths.queries; q; q = q->next)
        if (!strcmp(q->at, at))
            return;
    if (!(q = pd_calloc(1, sizeof *q, "a query", &e)))
        return;
    q->r = r;
    snprintf(q->at, sizeof q->at, "%s", at);
    struct pd_conn_opts o = { .asks = true, .name = q->at, .net = &pd_daemon_get_opts(r->d)->net };
    if (pd_conn_dial(r->l, q->at, &o, &query_cb, q, &q->c, &e) < 0) {
        pd_free(q);             /* the next beat tries again */
        return;
    }
    q->next = r->paths.queries;
    r->paths.queries = q;
    ask(q);
}

void pd_rt_left_beat(struct pd_router *r, int64_t now)
{
    uint32_t forgotten = 0;
    for (struct pd_rt_query *q = r->paths.queries; q; q = q->next)
        if (now - q->since_us > ANSWER_US)
            pd_conn_close(q->c, NULL);
    look_if_over(r);
    if (!r->paths.has_left)
        return;
    for (const struct pd_rt_worker *w = r->workers; w; w = w->next)
        if (w->m->known && next_for(r, w->m->at))
            begin(r, w->m->at);
    for (struct pd_ledger_item *i = pd_ledger_first(r->paths.ledger), *next; i && now - r->since > FORGET_US; i = next) {
        next = (void *)i->node.next;
        if (!i->left)
            continue;
        pd_ledger_end(r->paths.ledger, i);
        forgotten++;
    }
    r->paths.has_left &= !forgotten;
    if (forgotten)
        pd_warn("%u runs of a former life are forgotten: their workers did not come back", forgotten);
}

void pd_rt_left_free(struct pd_router *r)
{
    while (r->paths.queries) {
        struct pd_rt_query *q = r->paths.queries;
        r->paths.queries = q->next;
        pd_conn_free(q->c);
        pd_free(q);
    }
}

/* ---- pairs on hold ---- */

static void pack_pair(struct pd_packer *k, const char *p, const char *d, const char *key, const char *text, int64_t t_us)
{
    pd_pack_text(k, "p");
    pd_pack_text(k, p);
    pd_pack_text(k, "d");
    pd_pack_text(k, d);
    pd_pack_text(k, key);
    pd_pack_text(k, text);
    pd_pack_text(k, "t_us");
    msgpack_pack_int64(&k->pk, t_us);
}

void pd_rt_trace_pair(struct pd_router *r, const char *what, const char *p, const char *d, const char *key, const char *text)
{
    struct pd_buf b = { 0 };
    struct pd_packer k;
    if (!r->o.trace)
        return;
    pd_pack_init(&k, &b, NULL);
    msgpack_pack_map(&k.pk, 7);
    pd_pack_text(&k, "pd");
    pd_pack_text(&k, "ledger");
    pd_pack_text(&k, "v");
    msgpack_pack_int(&k.pk, 1);
    pd_pack_text(&k, "do");
    pd_pack_text(&k, what);
    pack_pair(&k, p, d, key, text, pd_wall_us());
    if (!k.rc)
        pd_trace_record(r->o.trace, b.p, b.n);
    pd_buf_free(&b);
}

/* An endpoint as it is, or that of the worker of this name. */
static const char *place(const struct pd_router *r, struct pd_str who, char out[PD_LEDGER_TEXT + 1])
{
    const char *at = NULL;
    for (const struct pd_rt_worker *w = r->workers; w && !at; w = w->next)
        if (w->m->known && w->m->said.worker.n == who.n && !memcmp(w->m->said.worker.p, who.p, who.n))
            at = w->m->at;
    snprintf(out, PD_LEDGER_TEXT + 1, "%.*s", at ? (int)strlen(at) : (int)who.n, at ? at : who.p);
    return out;
}

static uint32_t release(struct pd_router *r, const char *p, const char *d, const char *reason)
{
    const struct pd_ledger_hold *h = pd_ledger_first_hold(r->paths.ledger), *next;
    uint32_t n = 0;
    for (; h; h = next) {
        next = (void *)h->node.next;
        if ((p && strcmp(p, h->p)) || (d && strcmp(d, h->d)))
            continue;
        pd_warn("KV from %s to %s is released from hold: %s", h->p, h->d, reason);
        pd_rt_trace_pair(r, "release", h->p, h->d, "reason", reason);
        pd_ledger_release(r->paths.ledger, h->p, h->d, reason, pd_wall_us());
        n++;
    }
    return n;
}

static int order(struct pd_router *r, struct pd_bin v, const struct pd_rec *rec, uint32_t *n, struct pd_err *e)
{
    char p[PD_LEDGER_TEXT + 1], d[PD_LEDGER_TEXT + 1], why[PD_LEDGER_TEXT + 1];
    struct pd_str pair, reason = { NULL, 0 };
    struct pd_bin x;
    if (pd_map_find(rec->p, rec->n, "reason", &x) != 1 || !pd_get_str(x, &reason) || !reason.n || reason.n > PD_LEDGER_TEXT)
        return pd_fail(e, PD_EUSAGE, "status: release goes with a reason, of at most %d bytes", PD_LEDGER_TEXT);
    snprintf(why, sizeof why, "%.*s", (int)reason.n, reason.p);
    if (!pd_get_str(v, &pair) || !pair.n || pair.n > PD_LEDGER_TEXT)
        return pd_fail(e, PD_EUSAGE, "status: release is no pair (example: unix:/run/pd/p0,unix:/run/pd/d0; or all)");
    const char *comma = memchr(pair.p, ',', pair.n);
    if (pd_str_eq(pair, "all"))
        *n = release(r, NULL, NULL, why);
    else if (!comma || comma == pair.p || comma + 1 == pair.p + pair.n)
        return pd_fail(e, PD_EUSAGE, "status: release '%.*s' is no pair (example: unix:/run/pd/p0,unix:/run/pd/d0; or all)", (int)(pair.n < 80 ? pair.n : 80), pair.p);
    else {
        struct pd_str from = { pair.p, (size_t)(comma - pair.p) }, to = { comma + 1, (size_t)(pair.p + pair.n - comma - 1) };
        *n = release(r, place(r, from, p), place(r, to, d), why);
        if (!*n)
            return pd_fail(e, PD_EFAIL, "%.100s to %.100s is not on hold (--holds lists who is)", p, d);
    }
    return 0;
}

int pd_rt_paths_order(void *ctx, const struct pd_rec *rec, struct pd_buf *out, struct pd_err *e)
{
    struct pd_router *r = ctx;
    struct pd_bin v;
    struct pd_packer k;
    uint32_t n = 0, holds = 0;
    bool releases = pd_map_find(rec->p, rec->n, "release", &v) == 1;
    int rc = releases ? order(r, v, rec, &n, e) : 0;
    if (rc < 0)
        return rc;
    for (const struct pd_ledger_hold *h = pd_ledger_first_hold(r->paths.ledger); h; h = (void *)h->node.next)
        holds++;
    pd_pack_init(&k, out, e);
    msgpack_pack_map(&k.pk, 3 + releases);
    pd_pack_text(&k, "pd");
    pd_pack_text(&k, "status");
    pd_pack_text(&k, "v");
    msgpack_pack_int(&k.pk, 1);
    if (releases) {
        pd_pack_text(&k, "released");
        msgpack_pack_uint32(&k.pk, n);
    }
    pd_pack_text(&k, "holds");
    msgpack_pack_array(&k.pk, holds);
    for (const struct pd_ledger_hold *h = pd_ledger_first_hold(r->paths.ledger); h; h = (void *)h->node.next) {
        msgpack_pack_map(&k.pk, 4);
        pack_pair(&k, h->p, h->d, "cause", h->cause, h->t_us);
    }
    if (releases)
        pd_rt_dispatch(r);
    return k.rc;
}
