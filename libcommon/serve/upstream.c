#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../wire/kvevent.h"
#include "../wire/pack.h"
#include "dispatch.h"
#include "upstream.h"

enum { BACKOFF_US = 50000, BACKOFF_MAX_US = 2000000 };

struct side {                   /* one of the two connections */
    struct pd_upstream *u;
    struct pd_conn *c;
    struct pd_timer *again;
    int64_t backoff_us;
    bool wanted, up;            /* up: it stands, and was told of */
};
struct pd_upstream {
    struct pd_loop *l;
    struct pd_upstream_opts o;
    char *at;
    struct side req, say;
    char trouble[200];
    bool warned;
};

static void dial(struct side *s);

static bool is_req(const struct side *s) { return s == &s->u->req; }

static void later(struct side *s)
{
    struct pd_err e;
    if (!s->wanted)
        return;
    s->backoff_us = s->backoff_us ? s->backoff_us * 2 : BACKOFF_US;
    if (s->backoff_us > BACKOFF_MAX_US)
        s->backoff_us = BACKOFF_MAX_US;
    int64_t jitter = s->backoff_us / 4, now = pd_mono_us();
    if (pd_timer_in(s->again, s->backoff_us - jitter + (int64_t)(((uint64_t)now * 2654435761u >> 7) % (uint64_t)(2 * jitter)), &e) < 0)
        pd_error("%s: it will not be dialled again: %s", s->u->at, e.msg);
}

static void on_record(void *ctx, struct pd_conn *c, const struct pd_rec *rec)
{
    struct side *s = ctx;
    struct pd_upstream *u = s->u;
    s->backoff_us = 0;
    if (is_req(s)) {
        u->o.cb->record(u->o.ctx, u, rec);
        return;
    }
    if (rec->kind == PD_K_WORKER)
        u->o.cb->said(u->o.ctx, u, rec);
    else if (rec->kind == PD_K_KVEVENT)
        u->o.cb->event(u->o.ctx, u, rec);
    else if (rec->kind == PD_K_STATUS && !u->warned) {
        u->warned = true;
        pd_warn("%s: it tells its status and sends no `worker` record: it is no worker, or of an older version", u->at);
    }
}

static void on_gone(void *ctx, struct pd_conn *c, const struct pd_err *why)
{
    struct side *s = ctx;
    s->c = NULL;
    if (why && why->code == PD_EUSAGE && strncmp(s->u->trouble, why->msg, sizeof s->u->trouble - 10))       /* a name that turned out to be where records may not go */
        pd_warn("worker %s: %s", s->u->at, why->msg);
    if (why)
        snprintf(s->u->trouble, sizeof s->u->trouble, "%.190s", why->msg);
    later(s);
    bool was = s->up;
    s->up = false;
    if (is_req(s) && was)
        s->u->o.cb->down(s->u->o.ctx, s->u, why);
    else if (!is_req(s))
        s->u->o.cb->silent(s->u->o.ctx, s->u);
}

static void on_stands(void *ctx, struct pd_conn *c)
{
    struct side *s = ctx;
    s->up = true;
    if (is_req(s))
        s->u->o.cb->up(s->u->o.ctx, s->u);
}

static void on_room(void *ctx, struct pd_conn *c)
{
    struct side *s = ctx;
    if (is_req(s) && s->u->o.cb->room)
        s->u->o.cb->room(s->u->o.ctx, s->u);
}

static const struct pd_conn_cb side_cb = { .stands = on_stands, .record = on_record, .room = on_room, .gone = on_gone };

int pd_follow_encode(bool events, const uint8_t *life, uint64_t seq, struct pd_buf *b, struct pd_err *e)
{
    struct pd_packer k;
    pd_pack_init(&k, b, e);
    msgpack_pack_map(&k.pk, 3 + (size_t)events + 2 * (life != NULL));
    pd_pack_text(&k, "pd");
    pd_pack_text(&k, "status");
    pd_pack_text(&k, "v");
    msgpack_pack_int(&k.pk, 1);
    pd_pack_text(&k, "follow");
    msgpack_pack_true(&k.pk);
    if (events) {
        pd_pack_text(&k, "events");
        msgpack_pack_true(&k.pk);
    }
    if (life) {
        pd_pack_text(&k, "life");
        pd_pack_bin(&k, life, PD_LIFE_LEN);
        pd_pack_text(&k, "seq");
        msgpack_pack_uint64(&k.pk, seq);
    }
    return k.rc;
}

static int ask_to_follow(struct pd_conn *c, struct pd_err *e)
{
    struct pd_buf b = { 0 };
    int rc = pd_follow_encode(false, NULL, 0, &b, e);
    rc = rc ? rc : pd_conn_put(c, b.p, b.n, e);
    pd_buf_free(&b);
    return rc;
}

static void dial(struct side *s)
{
    struct pd_upstream *u = s->u;
    struct pd_conn_opts co = { .max_record = u->o.max_record, .asks = true, .name = u->at, .net = u->o.net };
    struct pd_err e = { 0 };
    if (s->c || !s->wanted)
        return;
    int rc = pd_conn_dial(u->l, u->at, &co, &side_cb, s, &s->c, &e);
    if (rc == 0 && !is_req(s) && (rc = ask_to_follow(s->c, &e)) < 0)
        pd_conn_close(s->c, &e);
    else if (rc < 0) {
        char was[sizeof u->trouble];
        s->c = NULL;
        memcpy(was, u->trouble, sizeof was);
        snprintf(u->trouble, sizeof u->trouble, "%.190s", e.msg);
        if (rc != PD_ENOWORKER && strcmp(was, u->trouble))      /* the same is said once */
            pd_warn("worker %s: %s", u->at, e.msg);
        later(s);
    } else if (!pd_conn_opening(s->c))
        on_stands(s, s->c);
}

static void on_again(void *ctx) { dial(ctx); }

int pd_upstream_new(struct pd_loop *l, const struct pd_upstream_opts *o, struct pd_upstream **out, struct pd_err *e)
{
    int rc = pd_conn_can_dial(o->at, e);
    if (rc < 0)
        return rc;
    rc = PD_ENOMEM;
    struct pd_upstream *u = pd_calloc(1, sizeof *u, "a worker's connections", e);
    if (!u)
        return rc;
    u->l = l;
    u->o = *o;
    u->req.u = u->say.u = u;
    u->say.wanted = o->follow;
    if (!(u->at = pd_strndup(o->at, strlen(o->at), e)) || (rc = pd_timer_new(l, on_again, &u->req, &u->req.again, e)) < 0 ||
        (rc = pd_timer_new(l, on_again, &u->say, &u->say.again, e)) < 0 || (o->follow && (rc = pd_timer_in(u->say.again, 0, e)) < 0)) {
        pd_upstream_free(u);
        return rc;
    }
    *out = u;
    return 0;
}

void *pd_upstream_user(const struct pd_upstream *u) { return u->o.user; }

void pd_upstream_want(struct pd_upstream *u, bool wanted)
{
    bool begins = wanted && !u->req.wanted;
    struct pd_err e;
    u->req.wanted = wanted;
    if (begins && !u->req.c && pd_timer_in(u->req.again, u->req.backoff_us, &e) < 0)
        pd_error("%s: it will not be dialled: %s", u->at, e.msg);
}

bool pd_upstream_up(const struct pd_upstream *u) { return u->req.up && pd_conn_open(u->req.c); }
bool pd_upstream_full(const struct pd_upstream *u) { return u->req.c && pd_conn_full(u->req.c); }

int pd_upstream_put(struct pd_upstream *u, const void *rec, size_t n, struct pd_err *e)
{
    return u->req.c ? pd_conn_put(u->req.c, rec, n, e) : pd_fail(e, PD_ECANCEL, "%s: there is no connection", u->at);
}

int pd_upstream_tell(struct pd_upstream *u, const void *rec, size_t n, struct pd_err *e)
{
    return u->say.c ? pd_conn_put(u->say.c, rec, n, e) : pd_fail(e, PD_ECANCEL, "%s: there is no connection", u->at);
}

void pd_upstream_drop(struct pd_upstream *u, const struct pd_err *why)
{
    if (u->say.c)
        pd_conn_close(u->say.c, why);
    if (u->req.c)
        pd_conn_close(u->req.c, why);
}

const char *pd_upstream_trouble(const struct pd_upstream *u) { return u->trouble; }
bool pd_upstream_idle(const struct pd_upstream *u) { return !u->req.c && !u->say.c; }

void pd_upstream_free(struct pd_upstream *u)
{
    if (!u)
        return;
    pd_conn_free(u->req.c);
    pd_conn_free(u->say.c);
    pd_timer_free(u->req.again);
    pd_timer_free(u->say.again);
    pd_free(u->at);
    pd_free(u);
}
