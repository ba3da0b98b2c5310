#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/fault.h"
#include "../base/log.h"
#include "../wire/json.h"
#include "conn_in.h"

enum {
    HIGH = 1 << 20,
    TURN = 1 << 18,             /* bytes that one connection reads or writes in one turn of the loop, so that others have theirs */
    PIECES = 64,
    LATE_MOST = 64 << 20,       /* of a peer that reads no more and goes on writing: more than any socket's buffer */
    LINGER_US = 500000          /* for a peer that we have done with and that still writes: it is to see our last words, not a reset */
};

static void on_turn(void *ctx);
static void on_ready(void *ctx, unsigned ready);
static void input(struct pd_conn *c);

void pd_conn_soon(struct pd_conn *c)
{
    if (c->queued || c->buried)
        return;
    c->queued = true;
    c->turn = (struct pd_post){ .fn = on_turn, .ctx = c };
    pd_loop_defer(c->l, &c->turn);
}

static size_t waiting(const struct pd_conn *c) { return c->out.n - c->at; }
static bool unsent(const struct pd_conn *c) { return c->tls && pd_tls_unsent(c->tls); }
static bool dry(const struct pd_conn *c) { return !c->cb->pull || c->dry; }
static size_t high(const struct pd_conn *c) { return c->o.high ? c->o.high : HIGH; }
static bool may_read(const struct pd_conn *c) { return !c->opening && !c->ended && !c->holds && (!c->full || c->o.asks) && !c->finishing && !c->dying; }

static void count(struct pd_metric *m, size_t n) { pd_metric_add(m, (int64_t)n); }
#define METER(c, what, n) count((c)->o.meter ? (c)->o.meter->what : NULL, n)

/* ---- birth and death ---- */

void pd_conn_release(struct pd_conn *c)
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
    for (struct pd_with_fds *f = c->send, *next; f; f = next) {
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
void pd_conn_die(struct pd_conn *c, const struct pd_err *why)
{
    if (c->dying)
        return;
    c->dying = true;
    if (why)
        c->why = *why;
    pd_watch_free(c->w);
    c->w = NULL;
    pd_conn_soon(c);
}

/* All but the socket. */
int pd_conn_make(struct pd_loop *l, const struct pd_conn_opts *o, const struct pd_conn_cb *cb, void *ctx, struct pd_conn **out, struct pd_err *e)
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
    if (c->o.max_fds > PD_CONN_MAX_FDS)
        c->o.max_fds = PD_CONN_MAX_FDS;
    struct pd_rstream_opts ro = { .max_record = o->max_record, .name = pd_conn_name(c) };
    int rc = pd_rstream_new(-1, &ro, &c->in, e);
    if (rc)
        pd_conn_release(c);
    else
        *out = c;
    return rc;
}

void pd_conn_join(struct pd_conn *c)
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

int pd_conn_watch(struct pd_conn *c, struct pd_err *e)
{
    bool asks = c->dial && c->dial->lookup;
    int rc = pd_watch_new(c->l, asks ? pd_lookup_fd(c->dial->lookup) : c->fd, on_ready, c, &c->w, e);
    return rc ? rc : pd_watch_set(c->w, c->dial && !asks ? PD_WRITE : PD_READ, e);
}

int pd_conn_new(struct pd_loop *l, int fd, const struct pd_conn_opts *o, const struct pd_conn_cb *cb, void *ctx, struct pd_conn **out, struct pd_err *e)
{
    struct ucred cred;
    socklen_t n = sizeof cred;
    struct pd_conn *c;
    int rc = pd_conn_make(l, o, cb, ctx, &c, e);
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
        rc = pd_fail_sys(e, "%s: cannot use the connection", pd_conn_name(c));
    if (!rc && pd_conn_sealed(c))
        rc = pd_conn_begin_tls(c, false, e);
    if (rc || (rc = pd_conn_watch(c, e))) {
        pd_conn_release(c);
        return rc;
    }
    pd_conn_join(c);
    *out = c;
    return 0;
}

void pd_conn_free(struct pd_conn *c)
{
    if (c)
        pd_conn_release(c);
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
        pd_conn_die(c, &e);
}

/* ---- writing ---- */

static void peer_gone(struct pd_conn *c, const char *how, int sys)
{
    struct pd_err e;
    pd_fail(&e, PD_ECANCEL, "%s: the peer went away (%s)", pd_conn_name(c), sys ? strerror(sys) : how);
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
                pd_conn_soon(c);
            return;
        }
    } else if (c->queued && may_read(c))        /* and still is, a turn at a time; its end is the connection's */
        return;
    pd_conn_die(c, &c->why);
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
        pd_fail_sys(&e, "%s: cannot write", pd_conn_name(c));
    pd_conn_die(c, &e);
}

static ssize_t send_some(struct pd_conn *c, struct iovec *v, int n, const struct pd_with_fds *f)
{
    union { struct cmsghdr h; char room[CMSG_SPACE(sizeof(int) * PD_CONN_CMSG_FDS)]; } ctl;
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
        struct pd_with_fds *f = c->send && c->send->at == here ? c->send : NULL, *next = f ? f->next : c->send;
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
            pd_conn_die(c, &e);
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
        pd_conn_soon(c);                /* records that were read before wait to be given out */
    }
}

static int can_put(struct pd_conn *c, struct pd_err *e)
{
    if (c->dying || c->hup || c->finishing)
        return pd_fail(e, PD_ECANCEL, "%s: the peer is gone", pd_conn_name(c));
    if (!c->o.asks && waiting(c) / 8 >= high(c)) {
        struct pd_err why;
        pd_fail(&why, PD_ENOMEM, "%s: the peer reads too slowly: %zu bytes wait for it", pd_conn_name(c), waiting(c));
        if (e)
            *e = why;
        pd_conn_die(c, &why);
        return PD_ENOMEM;
    }
    return 0;
}

int pd_conn_put_fds(struct pd_conn *c, const void *rec, size_t n, const int *fd, int n_fd, struct pd_err *e)
{
    struct pd_with_fds *f = NULL;
    size_t from = c->out.n;
    int rc = can_put(c, e);
    if (!rc && n_fd > PD_CONN_CMSG_FDS)
        rc = pd_fail(e, PD_EFAIL, "%d descriptors are more than %d", n_fd, PD_CONN_CMSG_FDS);
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
            pd_fail(&why, PD_ENOMEM, "%s: out of memory for a record", pd_conn_name(c));
            pd_conn_die(c, &why);
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
    pd_conn_soon(c);
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
void pd_conn_want(struct pd_conn *c) { pd_conn_soon(c); }

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
                rc = pd_fail(e, PD_EFAIL, "%s: the peer sent more descriptors than %d that nobody has taken", pd_conn_name(c), c->o.max_fds);
            }
        }
    }
    if (!rc && m->msg_flags & MSG_CTRUNC)
        rc = pd_fail(e, PD_ENOMEM, "%s: descriptors that the peer sent could not be taken (%d at once at the most; is the descriptor limit reached?)", pd_conn_name(c),
                     PD_CONN_CMSG_FDS);
    return rc;
}

/* One read. 1 bytes or the end came, 0 nothing for now, < 0 the connection is over. */
static int receive(struct pd_conn *c, size_t *budget)
{
    union { struct cmsghdr h; char room[CMSG_SPACE(sizeof(int) * PD_CONN_CMSG_FDS)]; } ctl;
    struct iovec v;
    struct pd_err e;
    uint8_t *p;
    int rc = pd_rstream_room(c->in, &p, &v.iov_len, &e);
    if (rc) {
        pd_conn_die(c, &e);
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
            pd_fail(&c->why, PD_ECANCEL, "%s: the peer went away (%s)", pd_conn_name(c), strerror(errno));
        c->hup = true;
        pd_conn_die(c, &c->why);
        return PD_ECANCEL;
    }
    if (k < 0) {
        if (c->tls && errno == EPROTO)
            e = *pd_tls_why(c->tls);
        else
            pd_fail_sys(&e, "%s: cannot read", pd_conn_name(c));
        pd_conn_die(c, &e);
        return e.code;
    }
    *budget -= (size_t)k < *budget ? (size_t)k : *budget;
    METER(c, bytes_in, (size_t)k);
    if ((m.msg_controllen || m.msg_flags & MSG_CTRUNC) && (rc = take_fds(c, &m, &e)) < 0) {
        pd_conn_refuse(c, &e);
        return rc;
    }
    pd_rstream_fed(c->in, (size_t)k);
    c->late += c->hup ? (size_t)k : 0;
    if (c->late > LATE_MOST) {
        pd_conn_die(c, &c->why);
        return c->why.code;
    }
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
    while (more && budget && may_read(c)) {
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
        pd_conn_die(c, &c->why);
    else if (more && may_read(c))
        pd_conn_soon(c);
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
        pd_conn_soon(c);
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
        return pd_fail(e, PD_EFAIL, "%s: the socket cannot be handed on any more", pd_conn_name(c));
    int fd = c->fd;
    pd_conn_die(c, NULL);
    c->no_gone = true;
    c->fd = -1;
    *tls = c->tls;
    c->tls = NULL;
    return fd;
}

/* ---- ends ---- */

static void on_linger(void *ctx) { pd_conn_die(ctx, NULL); }

/* All is written: close, or wait a moment for a peer that still writes. */
static void close_when_done(struct pd_conn *c)
{
    struct pd_err e;
    if (!c->finishing || c->lingering || c->dying || c->hup || waiting(c) || !dry(c))
        return;
    if (c->opening) {           /* nothing came from there, and nothing waits to go there */
        pd_conn_die(c, NULL);
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
        pd_conn_die(c, NULL);
}

static void discard(struct pd_conn *c)
{
    char waste[1 << 14];
    for (size_t left = TURN; left;) {
        ssize_t k = recv(c->fd, waste, sizeof waste, MSG_DONTWAIT);
        if (k < 0 && errno == EINTR)
            continue;
        if (k == 0 || (k < 0 && errno != EAGAIN && errno != EWOULDBLOCK))
            pd_conn_die(c, NULL);
        if (k <= 0)
            return;
        left -= (size_t)k < left ? (size_t)k : left;
    }
}

static void on_ready(void *ctx, unsigned ready)
{
    struct pd_conn *c = ctx;
    if (c->opening) {
        pd_conn_open_on(c);
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
            pd_conn_die(c, NULL);
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
    pd_conn_release(c);
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
        pd_conn_soon(c);
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

void pd_conn_close(struct pd_conn *c, const struct pd_err *why) { pd_conn_die(c, why); }

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
