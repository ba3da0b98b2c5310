#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/fault.h"
#include "../base/log.h"
#include "../wire/json.h"
#include "../wire/lookup.h"
#include "../wire/tcp.h"
#include "../wire/unix.h"
#include "conn.h"

enum {
    HIGH = 1 << 20,
    TURN = 1 << 18,             /* bytes that one connection reads or writes in one turn of the loop, so that others have theirs */
    CMSG_FDS = 16, MAX_FDS = 64,
    PIECES = 64,
    OPEN_US = 5000000,          /* to stand: connected, and a key proved */
    LINGER_US = 500000          /* for a peer that we have done with and that still writes: it is to see our last words, not a reset */
};

/* Descriptors that go with the byte at `at` of all that is written. */
struct with_fds { struct with_fds *next; uint64_t at; int n, fd[CMSG_FDS]; };

/* Where it is dialled: each address in turn, once a name was looked up. */
struct dial { struct pd_lookup *lookup; struct pd_tcp_addr a[PD_TCP_ADDRS]; int n, at; };

struct pd_conn {
    struct pd_loop *l;
    int fd;
    struct pd_tls *tls;         /* or NULL */
    struct pd_watch *w;
    struct pd_timer *linger;    /* and, before that, for it to stand */
    struct dial *dial;          /* while it is being connected */
    bool opening, dialled, tcp;
    struct pd_conn_opts o;
    const struct pd_conn_cb *cb;
    void *ctx, *user;
    struct pd_rstream *in;
    struct pd_buf out;
    size_t at;                  /* of out: written */
    uint64_t base;              /* of out.p[0] among all bytes written */
    struct with_fds *send, **send_last;
    int got[MAX_FDS], n_got;
    uint32_t holds, owed;
    bool full, blocked;         /* above the mark, until below the low one; the socket takes no more for now */
    bool garbage;               /* what came is no stream of records */
    bool eof, ended, ended_told;        /* the peer's end; no more is read */
    bool finishing;             /* nothing more is put */
    bool dry;                   /* the last pull gave nothing */
    bool hup, lingering;
    bool dying, no_gone, buried;        /* buried: its last turn has begun */
    bool queued, busy;          /* busy: inside input(), which must not be entered again */
    bool first;                 /* no record has been given out yet, or the first one is in hand */
    struct pd_err why;
    struct pd_post turn;
    int pid;
    int64_t since;
    struct pd_conn *next, **prev;
};

static void on_turn(void *ctx);
static void on_ready(void *ctx, unsigned ready);
static void on_not_standing(void *ctx);
static void input(struct pd_conn *c);

static void soon(struct pd_conn *c)
{
    if (c->queued || c->buried)
        return;
    c->queued = true;
    c->turn = (struct pd_post){ .fn = on_turn, .ctx = c };
    pd_loop_defer(c->l, &c->turn);
}

static size_t waiting(const struct pd_conn *c) { return c->out.n - c->at; }
static bool unsent(const struct pd_conn *c) { return c->tls && pd_tls_unsent(c->tls); }
static const char *name(const struct pd_conn *c) { return c->o.name ? c->o.name : "peer"; }
static bool dry(const struct pd_conn *c) { return !c->cb->pull || c->dry; }
static size_t high(const struct pd_conn *c) { return c->o.high ? c->o.high : HIGH; }
static bool may_read(const struct pd_conn *c) { return !c->opening && !c->ended && !c->holds && (!c->full || c->o.asks) && !c->finishing && !c->dying; }

static void count(struct pd_metric *m, size_t n) { pd_metric_add(m, (int64_t)n); }
#define METER(c, what, n) count((c)->o.meter ? (c)->o.meter->what : NULL, n)

/* ---- birth and death ---- */

static void release(struct pd_conn *c)
{
    if (c->queued)
        pd_loop_undefer(c->l, &c->turn);
    pd_watch_free(c->w);
    pd_timer_free(c->linger);
    pd_tls_free(c->tls);
    if (c->dial)
        pd_lookup_free(c->dial->lookup);
    pd_free(c->dial);
    if (c->fd >= 0)
        close(c->fd);
    while (c->n_got)
        close(c->got[--c->n_got]);
    for (struct with_fds *f = c->send, *next; f; f = next) {
        next = f->next;
        for (int i = 0; i < f->n; i++)
            close(f->fd[i]);
        pd_free(f);
    }
    pd_rstream_free(c->in);
    pd_buf_free(&c->out);
    struct pd_conns *set = c->o.set;
    if (c->prev) {
        *c->prev = c->next;
        if (c->next)
            c->next->prev = c->prev;
        set->n--;
    }
    bool in_set = c->prev != NULL;
    pd_free(c);
    if (in_set && set->left)
        set->left(set->ctx);
}

/* From now on nothing is read or written; `gone` and the freeing come with the turn. */
static void die(struct pd_conn *c, const struct pd_err *why)
{
    if (c->dying)
        return;
    c->dying = true;
    if (why)
        c->why = *why;
    pd_watch_free(c->w);
    c->w = NULL;
    soon(c);
}

/* All but the socket. */
static int make(struct pd_loop *l, const struct pd_conn_opts *o, const struct pd_conn_cb *cb, void *ctx, struct pd_conn **out, struct pd_err *e)
{
    struct pd_conn *c = pd_calloc(1, sizeof *c, "a connection", e);
    if (!c)
        return PD_ENOMEM;
    c->l = l;
    c->fd = -1;
    c->o = *o;
    c->cb = cb;
    c->ctx = ctx;
    c->first = true;
    c->send_last = &c->send;
    c->since = pd_mono_us();
    if (c->o.max_fds > MAX_FDS)
        c->o.max_fds = MAX_FDS;
    struct pd_rstream_opts ro = { .max_record = o->max_record, .name = name(c) };
    int rc = pd_rstream_new(-1, &ro, &c->in, e);
    if (rc)
        release(c);
    else
        *out = c;
    return rc;
}

static void join_set(struct pd_conn *c)
{
    struct pd_conns *set = c->o.set;
    if (!set)
        return;
    c->next = set->first;
    c->prev = &set->first;
    if (c->next)
        c->next->prev = &c->next;
    set->first = c;
    set->n++;
}

static int watch(struct pd_conn *c, struct pd_err *e)
{
    bool asks = c->dial && c->dial->lookup;
    int rc = pd_watch_new(c->l, asks ? pd_lookup_fd(c->dial->lookup) : c->fd, on_ready, c, &c->w, e);
    return rc ? rc : pd_watch_set(c->w, c->dial && !asks ? PD_WRITE : PD_READ, e);
}

/* It may take this long to stand. */
static int begin_opening(struct pd_conn *c, struct pd_err *e)
{
    c->opening = true;
    int rc = pd_timer_new(c->l, on_not_standing, c, &c->linger, e);
    return rc ? rc : pd_timer_in(c->linger, OPEN_US, e);
}

static int begin_tls(struct pd_conn *c, bool client, struct pd_err *e)
{
    int rc = pd_tls_new(c->o.net->keys, c->fd, client, name(c), &c->tls, e);
    return rc || c->opening ? rc : begin_opening(c, e);
}

static bool sealed(const struct pd_conn *c) { return c->tcp && c->o.net && c->o.net->keys; }

int pd_conn_new(struct pd_loop *l, int fd, const struct pd_conn_opts *o, const struct pd_conn_cb *cb, void *ctx, struct pd_conn **out, struct pd_err *e)
{
    struct ucred cred;
    socklen_t n = sizeof cred;
    struct pd_conn *c;
    int rc = make(l, o, cb, ctx, &c, e);
    if (rc) {
        close(fd);
        return rc;
    }
    c->fd = fd;
    c->tcp = pd_is_tcp(fd);
    if (!c->tcp && !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &n))
        c->pid = cred.pid;
    if (c->tcp)
        pd_tcp_tune(fd);
    if (fcntl(fd, F_SETFL, O_NONBLOCK))
        rc = pd_fail_sys(e, "%s: cannot use the connection", name(c));
    if (!rc && sealed(c))
        rc = begin_tls(c, false, e);
    if (rc || (rc = watch(c, e))) {
        release(c);
        return rc;
    }
    join_set(c);
    *out = c;
    return 0;
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
    return rc ? rc : watch(c, e);
}

/* Its addresses are known. */
static int dial_found(struct pd_conn *c, const char *where, struct pd_err *e)
{
    int rc = pd_tcp_may(c->dial->a, c->dial->n, c->o.net, where, e);
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
    int rc = make(l, o, cb, ctx, &c, e);
    if (rc)
        return rc;
    c->tcp = c->dialled = true;
    if (!(c->dial = pd_calloc(1, sizeof *c->dial, "addresses", e)))
        rc = PD_ENOMEM;
    rc = rc ? rc : begin_opening(c, e);
    rc = rc ? rc : pd_tcp_numeric(where, c->dial->a, &c->dial->n, e);
    if (rc == 1) {
        rc = pd_lookup_new(where, &c->dial->lookup, e);
        rc = rc ? rc : watch(c, e);
    } else
        rc = rc ? rc : dial_found(c, where, e);
    if (rc) {
        release(c);
        return rc;
    }
    join_set(c);
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
    die(c, why);
}

static void on_not_standing(void *ctx)
{
    struct pd_conn *c = ctx;
    struct pd_err e;
    pd_fail(&e, PD_ENOWORKER, "%s: %s within %d ms", name(c), c->dial && c->dial->lookup ? "the name of its host was not looked up" : c->dial ? "no connection" : "no TLS handshake (does the other side have --key-file?)", OPEN_US / 1000);
    not_standing(c, &e);
}

/* The socket has news while it does not stand yet. */
static void open_on(struct pd_conn *c)
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
        if (!rc && sealed(c))
            rc = begin_tls(c, true, &e);
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
    soon(c);
}

void pd_conn_free(struct pd_conn *c)
{
    if (c)
        release(c);
}

void pd_conn_handle(struct pd_conn *c, const struct pd_conn_cb *cb, void *ctx)
{
    struct pd_err e = { 0 };
    static const struct pd_conn_cb nobody;
    if (c->dying)
        return;
    c->cb = cb;
    c->ctx = ctx;
    if (cb->opened && cb->opened(ctx, c, &e) < 0) {
        c->cb = &nobody;
        pd_conn_refuse(c, &e);
    }
}

void pd_conn_set(struct pd_conn *c, void *user) { c->user = user; }
void *pd_conn_get(const struct pd_conn *c) { return c->user; }

/* ---- interest ---- */

static void interest(struct pd_conn *c)
{
    struct pd_err e;
    if (c->dying)
        return;
    bool read = may_read(c) || c->lingering, write = c->blocked;
    if (c->opening) {
        short wants = c->dial ? c->dial->lookup ? POLLIN : POLLOUT : c->tls ? pd_tls_wants(c->tls) : 0;
        read = wants & POLLIN;
        write = wants & POLLOUT;
    }
    if (pd_watch_set(c->w, (read ? PD_READ : 0) | (write ? PD_WRITE : 0), &e) < 0)
        die(c, &e);
}

/* ---- writing ---- */

static void peer_gone(struct pd_conn *c, const char *how, int sys)
{
    struct pd_err e;
    pd_fail(&e, PD_ECANCEL, "%s: the peer went away (%s)", name(c), sys ? strerror(sys) : how);
    e.sys = sys;
    if (!c->hup) {
        c->hup = true;
        if (!c->why.code)
            c->why = e;
        c->at = c->out.n;       /* nobody will read it */
        c->blocked = false;
        c->full = false;
        if (may_read(c)) {      /* all that came before is read first */
            if (!c->busy)
                input(c);
            else
                soon(c);
            return;
        }
    }
    die(c, &c->why);
}

/* What was written goes; the queue keeps little memory when it is empty. */
static void wrote(struct pd_conn *c, size_t n)
{
    c->at += n;
    METER(c, bytes_out, n);
    if (c->at == c->out.n) {
        c->base += c->at;
        c->at = c->out.n = 0;
        if (c->out.cap > 1 << 16)
            pd_buf_free(&c->out);
    } else if (c->at > 1 << 16 && c->at > c->out.n / 2) {
        memmove(c->out.p, c->out.p + c->at, c->out.n - c->at);
        c->base += c->at;
        c->out.n -= c->at;
        c->at = 0;
    }
}

static void write_failed(struct pd_conn *c, int sys)
{
    struct pd_err e;
    if (sys == EPIPE || sys == ECONNRESET || sys == ETIMEDOUT || sys == EHOSTUNREACH) {
        peer_gone(c, NULL, sys);
        return;
    }
    errno = sys;
    if (c->tls && sys == EPROTO)
        e = *pd_tls_why(c->tls);
    else
        pd_fail_sys(&e, "%s: cannot write", name(c));
    die(c, &e);
}

static ssize_t send_some(struct pd_conn *c, struct iovec *v, int n, const struct with_fds *f)
{
    union { struct cmsghdr h; char room[CMSG_SPACE(sizeof(int) * CMSG_FDS)]; } ctl;
    struct msghdr m = { .msg_iov = v, .msg_iovlen = (size_t)n };
    if (c->tls) {
        ssize_t k = pd_fault("write") ? (errno = ENOSPC, -1) : pd_tls_writev(c->tls, v, n);
        c->blocked = unsent(c);
        return k >= 0 || errno == EAGAIN ? k : (write_failed(c, errno), k);
    }
    if (f) {
        memset(&ctl, 0, sizeof ctl);
        m.msg_control = ctl.room;
        m.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)f->n);
        ctl.h.cmsg_level = SOL_SOCKET;
        ctl.h.cmsg_type = SCM_RIGHTS;
        ctl.h.cmsg_len = CMSG_LEN(sizeof(int) * (size_t)f->n);
        memcpy(CMSG_DATA(&ctl.h), f->fd, sizeof(int) * (size_t)f->n);
    }
    ssize_t k;
    do
        k = pd_fault("write") ? (errno = ENOSPC, -1) : sendmsg(c->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (k < 0 && errno == EINTR);
    c->blocked = k < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    if (k < 0 && !c->blocked)
        write_failed(c, errno);
    return k;
}

/* The queue, then what is pulled; about one turn's share. */
static void output(struct pd_conn *c)
{
    size_t left = TURN;
    if (c->opening)
        return;
    if (unsent(c)) {
        int rc = pd_tls_flush(c->tls);
        c->blocked = rc == 1;
        if (rc < 0)
            peer_gone(c, NULL, ECONNRESET);
        if (rc)
            return;
    }
    while (left && waiting(c) && !c->blocked && !c->dying && !c->hup) {
        uint64_t here = c->base + c->at;
        struct with_fds *f = c->send && c->send->at == here ? c->send : NULL, *next = f ? f->next : c->send;
        size_t n = waiting(c);
        if (next && next->at - here < n)        /* up to the next byte that has descriptors of its own */
            n = (size_t)(next->at - here);
        struct iovec v = { c->out.p + c->at, n };
        ssize_t k = send_some(c, &v, 1, f);
        if (k < 0)
            break;
        if (f) {
            for (int i = 0; i < f->n; i++)
                close(f->fd[i]);
            if (!(c->send = f->next))
                c->send_last = &c->send;
            pd_free(f);
        }
        left -= (size_t)k < left ? (size_t)k : left;
        wrote(c, (size_t)k);
    }
    c->dry = false;
    while (left && !waiting(c) && !c->blocked && !dry(c) && !c->dying && !c->hup) {
        struct iovec v[PIECES];
        struct pd_err e = { 0 };
        int n = c->cb->pull(c->ctx, c, v, PIECES, &e);
        if (n < 0)
            die(c, &e);
        c->dry = n <= 0;
        if (c->dry || c->dying)
            break;
        ssize_t k = send_some(c, v, n, NULL);
        if (k < 0)
            break;
        left -= (size_t)k < left ? (size_t)k : left;
        METER(c, bytes_out, (size_t)k);
        if (c->cb->pulled)
            c->cb->pulled(c->ctx, c, (size_t)k);
    }
    if (!left && !c->dying)
        c->blocked = true;      /* there may be more: when the socket says so, and others have had their turn */
    if (c->full && waiting(c) <= high(c) / 4 && !c->dying && !c->hup) {
        c->full = false;
        if (c->cb->room)
            c->cb->room(c->ctx, c);
        soon(c);                /* records that were read before wait to be given out */
    }
}

static int can_put(struct pd_conn *c, struct pd_err *e)
{
    if (c->dying || c->hup || c->finishing)
        return pd_fail(e, PD_ECANCEL, "%s: the peer is gone", name(c));
    if (!c->o.asks && waiting(c) / 8 >= high(c)) {
        struct pd_err why;
        pd_fail(&why, PD_ENOMEM, "%s: the peer reads too slowly: %zu bytes wait for it", name(c), waiting(c));
        if (e)
            *e = why;
        die(c, &why);
        return PD_ENOMEM;
    }
    return 0;
}

int pd_conn_put_fds(struct pd_conn *c, const void *rec, size_t n, const int *fd, int n_fd, struct pd_err *e)
{
    struct with_fds *f = NULL;
    size_t from = c->out.n;
    int rc = can_put(c, e);
    if (!rc && n_fd > CMSG_FDS)
        rc = pd_fail(e, PD_EFAIL, "%d descriptors are more than %d", n_fd, CMSG_FDS);
    if (!rc && n_fd && !(f = pd_calloc(1, sizeof *f, "descriptors to send", e)))
        rc = PD_ENOMEM;
    if (!rc && !pd_rstream_is_json(c->in) && !c->garbage)
        rc = pd_buf_add(&c->out, rec, n, e);
    else if (!rc) {
        rc = pd_msgpack_to_json(rec, n, &c->out, e);
        rc = rc ? rc : pd_buf_add(&c->out, "\n", 1, e);
    }
    if (rc) {
        if (!c->dying)
            c->out.n = from;
        if (rc == PD_ENOMEM) {          /* a record is missing: no more can follow it */
            struct pd_err why;
            pd_fail(&why, PD_ENOMEM, "%s: out of memory for a record", name(c));
            die(c, &why);
        }
        for (int i = 0; i < n_fd; i++)
            close(fd[i]);
        pd_free(f);
        return rc;
    }
    if (f) {
        f->at = c->base + from;
        f->n = n_fd;
        memcpy(f->fd, fd, sizeof *fd * (size_t)n_fd);
        *c->send_last = f;
        c->send_last = &f->next;
    }
    METER(c, records_out, 1);
    if (!c->full && waiting(c) >= high(c)) {
        c->full = true;
        METER(c, full, 1);
    }
    soon(c);
    return 0;
}

int pd_conn_put(struct pd_conn *c, const void *rec, size_t n, struct pd_err *e) { return pd_conn_put_fds(c, rec, n, NULL, 0, e); }

int pd_conn_put_error(struct pd_conn *c, const char *run, const struct pd_err *why, const char *action)
{
    struct pd_buf b = { 0 };
    struct pd_error_rec r = { .code = pd_exit_status(why->code), .message = { why->msg, strlen(why->msg) } };
    snprintf(r.class_, sizeof r.class_, "%s", pd_code_name(why->code));
    snprintf(r.action, sizeof r.action, "%s", action ? action : "");
    if (run)
        snprintf(r.run, sizeof r.run, "%s", run);
    int rc = pd_error_encode(&r, &b, NULL);
    rc = rc ? rc : pd_conn_put(c, b.p, b.n, NULL);
    pd_buf_free(&b);
    return rc;
}

bool pd_conn_full(const struct pd_conn *c) { return c->full; }
void pd_conn_want(struct pd_conn *c) { soon(c); }

/* ---- reading ---- */

/* The descriptors of a message, into the queue. */
static int take_fds(struct pd_conn *c, struct msghdr *m, struct pd_err *e)
{
    int rc = 0;
    for (struct cmsghdr *h = CMSG_FIRSTHDR(m); h; h = CMSG_NXTHDR(m, h)) {
        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(h) + i * sizeof fd, sizeof fd);
            if (c->n_got < c->o.max_fds)
                c->got[c->n_got++] = fd;
            else {
                close(fd);
                rc = pd_fail(e, PD_EFAIL, "%s: the peer sent more descriptors than %d that nobody has taken", name(c), c->o.max_fds);
            }
        }
    }
    if (!rc && m->msg_flags & MSG_CTRUNC)
        rc = pd_fail(e, PD_ENOMEM, "%s: descriptors that the peer sent could not be taken (%d at once at the most; is the descriptor limit reached?)", name(c),
                     CMSG_FDS);
    return rc;
}

/* One read. 1 bytes or the end came, 0 nothing for now, < 0 the connection is over. */
static int receive(struct pd_conn *c, size_t *budget)
{
    union { struct cmsghdr h; char room[CMSG_SPACE(sizeof(int) * CMSG_FDS)]; } ctl;
    struct iovec v;
    struct pd_err e;
    uint8_t *p;
    int rc = pd_rstream_room(c->in, &p, &v.iov_len, &e);
    if (rc) {
        die(c, &e);
        return rc;
    }
    v.iov_base = p;
    struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = ctl.room, .msg_controllen = sizeof ctl.room };
    if (c->tls)
        m.msg_controllen = 0;
    ssize_t k = pd_fault("read") ? (errno = EIO, -1) : c->tls ? pd_tls_read(c->tls, v.iov_base, v.iov_len) : recvmsg(c->fd, &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (k < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return 0;
    if (k < 0 && (errno == ECONNRESET || (c->tcp && (errno == ETIMEDOUT || errno == EHOSTUNREACH)))) {
        c->eof = c->ended = true;
        if (!c->hup && c->tls)
            c->why = *pd_tls_why(c->tls);
        else if (!c->hup)
            pd_fail(&c->why, PD_ECANCEL, "%s: the peer went away (%s)", name(c), strerror(errno));
        c->hup = true;
        die(c, &c->why);
        return PD_ECANCEL;
    }
    if (k < 0) {
        if (c->tls && errno == EPROTO)
            e = *pd_tls_why(c->tls);
        else
            pd_fail_sys(&e, "%s: cannot read", name(c));
        die(c, &e);
        return e.code;
    }
    *budget -= (size_t)k < *budget ? (size_t)k : *budget;
    METER(c, bytes_in, (size_t)k);
    if ((m.msg_controllen || m.msg_flags & MSG_CTRUNC) && (rc = take_fds(c, &m, &e)) < 0) {
        pd_conn_refuse(c, &e);
        return rc;
    }
    pd_rstream_fed(c->in, (size_t)k);
    return 1;
}

static void done_if_owed_nothing(struct pd_conn *c)
{
    if (c->ended && c->ended_told && !c->owed && !c->finishing && !c->dying)
        pd_conn_finish(c);
}

static void end_of_input(struct pd_conn *c)
{
    c->ended = true;
    if (c->ended_told || c->dying)
        return;
    c->ended_told = true;
    if (c->hup)
        return;
    if (c->cb->ended)
        c->cb->ended(c->ctx, c);
    done_if_owed_nothing(c);
}

static void input(struct pd_conn *c)
{
    size_t budget = TURN;
    bool more = true;           /* as far as we know */
    c->busy = true;
    while (more && (budget || c->hup) && may_read(c)) {
        struct pd_rec rec;
        struct pd_err e = { 0 };
        bool bad;
        int rc = pd_rstream_next(c->in, 0, &rec, &bad, &e);
        budget -= budget > 64 ? 64 : budget;    /* many small records cost time too */
        if (rc == 1) {
            METER(c, records_in, 1);
            if (c->cb->record)
                c->cb->record(c->ctx, c, &rec);
            c->first = false;
        } else if (rc == 2)
            more = receive(c, &budget) > 0;
        else if (rc == 0) {
            c->eof = true;
            end_of_input(c);
        } else if (bad && c->cb->bad)
            c->cb->bad(c->ctx, c, &e);
        else if (bad)
            pd_conn_put_error(c, NULL, &e, "abort");
        else {
            c->garbage = c->first;      /* a person may have typed it: the answer is text */
            pd_conn_refuse(c, &e);
        }
    }
    c->busy = false;
    if (c->dying)
        return;
    if (c->hup && (!may_read(c) || !more))
        die(c, &c->why);
    else if (more && may_read(c))
        soon(c);
    else
        interest(c);
}

void pd_conn_hold(struct pd_conn *c)
{
    c->holds++;
    if (!c->busy)
        interest(c);
}

void pd_conn_unhold(struct pd_conn *c)
{
    if (c->holds && !--c->holds)
        soon(c);
}

int pd_conn_take_fd(struct pd_conn *c)
{
    if (!c->n_got)
        return -1;
    int fd = c->got[0];
    memmove(c->got, c->got + 1, sizeof *c->got * (size_t)--c->n_got);
    return fd;
}

int pd_conn_detach(struct pd_conn *c, struct pd_tls **tls, struct pd_err *e)
{
    if (!c->first || c->dying || c->hup || waiting(c) || unsent(c) || pd_rstream_is_json(c->in) || !pd_rstream_empty(c->in))
        return pd_fail(e, PD_EFAIL, "%s: the socket cannot be handed on any more", name(c));
    int fd = c->fd;
    die(c, NULL);
    c->no_gone = true;
    c->fd = -1;
    *tls = c->tls;
    c->tls = NULL;
    return fd;
}

/* ---- ends ---- */

static void on_linger(void *ctx) { die(ctx, NULL); }

/* All is written: close, or wait a moment for a peer that still writes. */
static void close_when_done(struct pd_conn *c)
{
    struct pd_err e;
    if (!c->finishing || c->lingering || c->dying || c->hup || waiting(c) || !dry(c))
        return;
    if (c->opening) {           /* nothing came from there, and nothing waits to go there */
        die(c, NULL);
        return;
    }
    if (c->tls && pd_tls_end(c->tls) == 1) {
        c->blocked = true;
        return;
    }
    if (!c->eof && !shutdown(c->fd, SHUT_WR) && !pd_timer_new(c->l, on_linger, c, &c->linger, &e) && !pd_timer_in(c->linger, LINGER_US, &e)) {
        c->lingering = true;
        interest(c);
    } else
        die(c, NULL);
}

static void discard(struct pd_conn *c)
{
    char waste[1 << 14];
    for (size_t left = TURN; left;) {
        ssize_t k = recv(c->fd, waste, sizeof waste, MSG_DONTWAIT);
        if (k < 0 && errno == EINTR)
            continue;
        if (k == 0 || (k < 0 && errno != EAGAIN && errno != EWOULDBLOCK))
            die(c, NULL);
        if (k <= 0)
            return;
        left -= (size_t)k < left ? (size_t)k : left;
    }
}

static void on_ready(void *ctx, unsigned ready)
{
    struct pd_conn *c = ctx;
    if (c->opening) {
        open_on(c);
        if (c->opening)
            interest(c);
        return;
    }
    if (ready & PD_WRITE) {
        c->blocked = false;
        output(c);
        close_when_done(c);
        interest(c);
    }
    if (ready & PD_READ && !c->dying)
        c->lingering ? discard(c) : input(c);
    if (ready & PD_HUP && !c->dying) {
        if (c->finishing && !waiting(c) && dry(c)) {
            discard(c);         /* what is left unread would reset him */
            die(c, NULL);
        } else
            peer_gone(c, "hung up", 0);
    }
}

static void on_turn(void *ctx)
{
    struct pd_conn *c = ctx;
    c->queued = false;
    if (!c->dying && !c->blocked)
        output(c);
    if (may_read(c) || (c->hup && !c->dying))
        input(c);
    if (!c->dying && !c->blocked && waiting(c))
        output(c);
    close_when_done(c);
    interest(c);
    if (!c->dying)
        return;
    if (c->queued)              /* it died just now: a turn for that is coming */
        return;
    c->buried = true;
    if (c->cb->gone && !c->no_gone)
        c->cb->gone(c->ctx, c, c->why.code ? &c->why : NULL);
    release(c);
}

void pd_conn_owe(struct pd_conn *c, int n)
{
    c->owed = (uint32_t)((int64_t)c->owed + n);
    done_if_owed_nothing(c);
}

void pd_conn_end_input(struct pd_conn *c)
{
    end_of_input(c);
    interest(c);
}

void pd_conn_finish(struct pd_conn *c)
{
    c->finishing = true;
    if (!c->dying)
        soon(c);
}

void pd_conn_refuse(struct pd_conn *c, const struct pd_err *why)
{
    if (c->dying || c->finishing)
        return;
    pd_conn_put_error(c, NULL, why, "abort");
    if (!c->why.code)
        c->why = *why;
    pd_conn_finish(c);
}

void pd_conn_close(struct pd_conn *c, const struct pd_err *why) { die(c, why); }

void pd_conn_drain(struct pd_conn *c)
{
    if (c->dying || c->finishing)
        return;
    if (c->cb->drain)
        c->cb->drain(c->ctx, c);
    else
        pd_conn_end_input(c);
}

bool pd_conn_is_json(const struct pd_conn *c) { return pd_rstream_is_json(c->in); }
bool pd_conn_ended(const struct pd_conn *c) { return c->ended; }
bool pd_conn_open(const struct pd_conn *c) { return !c->dying && !c->hup && !c->finishing; }
bool pd_conn_opening(const struct pd_conn *c) { return c->opening; }
int pd_conn_fd(const struct pd_conn *c) { return c->fd; }
bool pd_conn_is_tcp(const struct pd_conn *c) { return c->tcp; }
int pd_conn_pid(const struct pd_conn *c) { return c->pid; }
int64_t pd_conn_since(const struct pd_conn *c) { return c->since; }
uint32_t pd_conn_owed(const struct pd_conn *c) { return c->owed; }
const struct pd_conn_cb *pd_conn_handler(const struct pd_conn *c) { return c->cb; }
struct pd_conn *pd_conn_next(const struct pd_conn *c) { return c->next; }
void pd_conn_exact(struct pd_conn *c, bool exact) { pd_rstream_exact(c->in, exact); }
