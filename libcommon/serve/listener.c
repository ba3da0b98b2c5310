#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../wire/json.h"
#include "../wire/tcp.h"
#include "../wire/unix.h"
#include "listener.h"

enum { BACKLOG = 1024, MAX_CONNS = 4096, A_TURN = 64, PAUSE_US = 100000, QUIET_US = 10000000 };

struct pd_listener {
    struct pd_loop *l;
    struct pd_listener_opts o;
    char *path;                 /* NULL: TCP */
    char *name;
    struct pd_unix_name made;
    int fd;
    struct pd_watch *w;
    struct pd_timer *again;
    bool paused;
    int64_t told, told_full;    /* when a person was last told that descriptors, or connections, have run out */
};

/* A peer that cannot be served hears why, as text: every reader of records takes a line of JSON. */
static void turn_away(int fd, bool sealed, const struct pd_err *why)
{
    struct pd_buf b = { 0 }, text = { 0 };
    if (sealed) {       /* it would not take text */
        close(fd);
        return;
    }
    struct pd_error_rec r = { .code = pd_exit_status(why->code), .message = { why->msg, strlen(why->msg) } };
    snprintf(r.class_, sizeof r.class_, "%s", pd_code_name(why->code));
    snprintf(r.action, sizeof r.action, "retry");
    if (!pd_error_encode(&r, &b, NULL) && !pd_msgpack_to_json(b.p, b.n, &text, NULL) && !pd_buf_add(&text, "\n", 1, NULL) &&
        send(fd, text.p, text.n, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {}
    pd_buf_free(&b);
    pd_buf_free(&text);
    close(fd);
}

static void resume(struct pd_listener *s)
{
    struct pd_err e;
    s->paused = false;
    if (pd_watch_set(s->w, PD_READ, &e) < 0)
        pd_error("%s: %s", s->name, e.msg);
}

static void pause_accepting(struct pd_listener *s, int sys)
{
    struct pd_err e;
    int64_t now = pd_mono_us();
    if (!s->told || now - s->told > QUIET_US)
        pd_error("%s: no connection can be accepted for now (%s); trying again as others close (raise the limit of open files: ulimit -n)", s->name,
                 strerror(sys));
    s->told = now;
    s->paused = true;
    pd_metric_add(s->o.paused, 1);
    if (pd_watch_set(s->w, 0, &e) < 0 || pd_timer_in(s->again, PAUSE_US, &e) < 0)
        pd_error("%s: %s", s->name, e.msg);
}

static void on_again(void *ctx)
{
    struct pd_listener *s = ctx;
    if (s->paused)
        resume(s);
}

void pd_listener_left(struct pd_listener *s)
{
    if (s->paused) {
        pd_timer_stop(s->again);
        resume(s);
    }
}

static void on_ready(void *ctx, unsigned ready)
{
    struct pd_listener *s = ctx;
    (void)ready;
    for (int i = 0; i < A_TURN; i++) {
        struct pd_err e;
        struct pd_conn *c;
        int fd = accept4(s->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
            continue;
        if (fd < 0) {
            pause_accepting(s, errno);
            return;
        }
        if (s->path && pd_unix_check_peer(fd, s->name, &e) < 0) {
            pd_warn("%s", e.msg);
            pd_metric_add(s->o.refused, 1);
            close(fd);
            continue;
        }
        if (s->o.conn.set->n >= s->o.max_conns) {
            pd_fail(&e, PD_ENOMEM, "%s: %u connections are open, the most that are served (see --max-connections)", s->name, s->o.max_conns);
            if (!s->told_full || pd_mono_us() - s->told_full > QUIET_US)
                pd_warn("%s", e.msg);
            s->told_full = pd_mono_us();
            pd_metric_add(s->o.refused, 1);
            turn_away(fd, !s->path && s->o.conn.net && s->o.conn.net->keys, &e);
            continue;
        }
        if (pd_conn_new(s->l, fd, &s->o.conn, &pd_dispatch_cb, s->o.dispatch, &c, &e) < 0) {
            pd_error("%s: a connection is dropped: %s", s->name, e.msg);
            pd_metric_add(s->o.refused, 1);
            continue;
        }
        pd_metric_add(s->o.accepted, 1);
        pd_dispatch_begin(c);
    }
}

int pd_listener_new(struct pd_loop *l, const struct pd_listener_opts *o, struct pd_listener **out, struct pd_err *e)
{
    struct pd_listener *s = pd_calloc(1, sizeof *s, "a listening socket", e);
    int rc = PD_ENOMEM;
    if (!s)
        return rc;
    s->l = l;
    s->o = *o;
    s->fd = -1;
    if (!s->o.max_conns)
        s->o.max_conns = MAX_CONNS;
    const char *where = !strncmp(o->at, "tcp-listen:", 11) ? o->at + 11 : !strncmp(o->at, "tcp:", 4) ? o->at + 4 : NULL;
    if (where) {
        char told[PD_TCP_NAME];
        if ((rc = pd_tcp_listen(where, BACKLOG, o->conn.net, &s->fd, told, e)) < 0)
            goto out;
        rc = PD_ENOMEM;
        if (!(s->name = pd_calloc(sizeof told + 4, 1, "a name", e)))
            goto out;
        snprintf(s->name, sizeof told + 4, "tcp:%s", told);
    } else if (strncmp(o->at, "unix:", 5) || !o->at[5]) {
        rc = pd_fail(e, PD_EUSAGE, "'%s' is no endpoint to listen on (examples: unix:/run/pd/d0, tcp-listen:127.0.0.1:7000)", o->at);
        goto out;
    } else if (!(s->path = pd_strndup(o->at + 5, strlen(o->at + 5), e)) || !(s->name = pd_strndup(o->at, strlen(o->at), e)) ||
               (rc = pd_unix_listen(s->path, BACKLOG, &s->fd, &s->made, e)) < 0)
        goto out;
    s->o.conn.name = s->name;
    if (fcntl(s->fd, F_SETFL, O_NONBLOCK)) {
        rc = pd_fail_sys(e, "%s: cannot listen", s->name);
        goto out;
    }
    if ((rc = pd_watch_new(l, s->fd, on_ready, s, &s->w, e)) < 0 || (rc = pd_timer_new(l, on_again, s, &s->again, e)) < 0)
        goto out;
    rc = pd_watch_set(s->w, PD_READ, e);
out:
    if (rc < 0)
        pd_listener_free(s);
    else
        *out = s;
    return rc;
}

const char *pd_listener_name(const struct pd_listener *s) { return s->name; }
bool pd_listener_paused(const struct pd_listener *s) { return s->paused; }

void pd_listener_free(struct pd_listener *s)
{
    if (!s)
        return;
    pd_watch_free(s->w);
    pd_timer_free(s->again);
    if (s->fd >= 0) {
        if (s->path)
            pd_unix_unlink(s->path, &s->made);
        close(s->fd);
    }
    pd_free(s->path);
    pd_free(s->name);
    pd_free(s);
}
