#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../wire/unix.h"
#include "conn_in.h"

enum { OPEN_US = 5000000 };     /* to stand: connected, and a key proved */

static void on_not_standing(void *ctx);

/* It may take this long to stand. */
static int begin_opening(struct pd_conn *c, struct pd_err *e)
{
    c->opening = true;
    int rc = pd_timer_new(c->l, on_not_standing, c, &c->linger, e);
    return rc ? rc : pd_timer_in(c->linger, OPEN_US, e);
}

int pd_conn_begin_tls(struct pd_conn *c, bool client, struct pd_err *e)
{
    int rc = pd_tls_new(c->o.net->keys, c->fd, client, pd_conn_name(c), &c->tls, e);
    return rc || c->opening ? rc : begin_opening(c, e);
}

/* ---- dialling ---- */

static int dial_unix(struct pd_loop *l, const char *path, const struct pd_conn_opts *o, const struct pd_conn_cb *cb, void *ctx, struct pd_conn **out,
                     struct pd_err *e)
{
    struct sockaddr_un a;
    int rc = pd_unix_address(path, &a, e);
    if (rc)
        return rc;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return pd_fail_sys(e, "%s: cannot make a socket", path);
    if (connect(fd, (struct sockaddr *)&a, sizeof a)) {
        bool later = errno == ENOENT || errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR;
        rc = pd_fail_sys(e, "%s: cannot connect", path);
        if (later && e)
            e->code = PD_ENOWORKER;
        rc = later ? PD_ENOWORKER : rc;
    } else
        rc = pd_unix_check_peer(fd, path, e);
    if (rc) {
        close(fd);
        return rc;
    }
    return pd_conn_new(l, fd, o, cb, ctx, out, e);
}

/* The next of the addresses, until one is on its way. */
static int dial_next(struct pd_conn *c, struct pd_err *e)
{
    int rc = PD_ENOWORKER;
    pd_watch_free(c->w);
    c->w = NULL;
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
    while (rc == PD_ENOWORKER && c->dial->at < c->dial->n)
        rc = pd_tcp_dial(&c->dial->a[c->dial->at++], &c->fd, e);
    return rc ? rc : pd_conn_watch(c, e);
}

/* Its addresses are known. */
static int dial_found(struct pd_conn *c, const char *where, struct pd_err *e)
{
    int rc = pd_tcp_may(c->dial->a, c->dial->n, c->o.net, where, false, e);
    return rc ? rc : dial_next(c, e);
}

static int looked_up(struct pd_conn *c, struct pd_err *e)
{
    struct pd_lookup *u = c->dial->lookup;
    int rc = pd_lookup_take(u, c->dial->a, &c->dial->n, e);
    pd_watch_free(c->w);
    c->w = NULL;
    c->dial->lookup = NULL;
    rc = rc ? rc : dial_found(c, pd_lookup_where(u), e);
    pd_lookup_free(u);
    return rc;
}

static int dial_tcp(struct pd_loop *l, const char *where, const struct pd_conn_opts *o, const struct pd_conn_cb *cb, void *ctx, struct pd_conn **out,
                    struct pd_err *e)
{
    struct pd_conn *c;
    int rc = pd_conn_make(l, o, cb, ctx, &c, e);
    if (rc)
        return rc;
    c->tcp = c->dialled = true;
    if (!(c->dial = pd_calloc(1, sizeof *c->dial, "addresses", e)))
        rc = PD_ENOMEM;
    rc = rc ? rc : begin_opening(c, e);
    rc = rc ? rc : pd_tcp_numeric(where, c->dial->a, &c->dial->n, e);
    if (rc == 1) {
        rc = pd_lookup_new(where, &c->dial->lookup, e);
        rc = rc ? rc : pd_conn_watch(c, e);
    } else
        rc = rc ? rc : dial_found(c, where, e);
    if (rc) {
        pd_conn_release(c);
        return rc;
    }
    pd_conn_join(c);
    *out = c;
    return 0;
}

int pd_conn_can_dial(const char *at, struct pd_err *e)
{
    struct sockaddr_un a;
    if (!strncmp(at, "unix:", 5) && at[5])
        return pd_unix_address(at + 5, &a, e);
    if (!strncmp(at, "tcp:", 4))
        return pd_tcp_check(at + 4, false, e);
    return pd_fail(e, PD_EUSAGE, "'%.200s' is no endpoint to connect to (examples: unix:/run/pd/d0, tcp:hostB:7000)", at);
}

int pd_conn_dial(struct pd_loop *l, const char *at, const struct pd_conn_opts *o, const struct pd_conn_cb *cb, void *ctx, struct pd_conn **out,
                 struct pd_err *e)
{
    int rc = pd_conn_can_dial(at, e);
    return rc ? rc : *at == 'u' ? dial_unix(l, at + 5, o, cb, ctx, out, e) : dial_tcp(l, at + 4, o, cb, ctx, out, e);
}

/* ---- opening ---- */

static void not_standing(struct pd_conn *c, const struct pd_err *why)
{
    static int64_t since;
    static int n;
    if (!since || pd_mono_us() - since > 10000000) {
        since = pd_mono_us();
        n = 0;
    }
    if (!c->dialled && n++ < 20)        /* somebody who came: nobody else would tell of it; nor shall it fill the log */
        pd_warn("%s", why->msg);
    pd_conn_die(c, why);
}

static void on_not_standing(void *ctx)
{
    struct pd_conn *c = ctx;
    struct pd_err e;
    pd_fail(&e, PD_ENOWORKER, "%s: %s within %d ms", pd_conn_name(c), c->dial && c->dial->lookup ? "the name of its host was not looked up" : c->dial ? "no connection" : "no TLS handshake (does the other side have --key-file?)", OPEN_US / 1000);
    not_standing(c, &e);
}

void pd_conn_open_on(struct pd_conn *c)
{
    struct pd_err e = { 0 };
    int rc = 0;
    if (c->dial && c->dial->lookup) {
        if (looked_up(c, &e))
            not_standing(c, &e);
        return;
    }
    if (c->dial) {
        char where[PD_TCP_NAME];
        pd_tcp_name(&c->dial->a[c->dial->at - 1], where);
        if ((rc = pd_tcp_stands(c->fd, where, &e)) == PD_ENOWORKER && c->dial->at < c->dial->n && !(rc = dial_next(c, &e)))
            return;
        pd_free(c->dial);
        c->dial = NULL;
        if (!rc && pd_conn_sealed(c))
            rc = pd_conn_begin_tls(c, true, &e);
    }
    if (!rc && c->tls && (rc = pd_tls_shake(c->tls)) >= 0) {
        if (!rc)
            return;
        rc = 0;
    } else if (rc == -1 && c->tls && !e.code)
        e = *pd_tls_why(c->tls);
    if (e.code) {
        not_standing(c, &e);
        return;
    }
    c->opening = false;
    pd_timer_free(c->linger);
    c->linger = NULL;
    if (c->cb->stands)
        c->cb->stands(c->ctx, c);
    pd_conn_soon(c);
}
