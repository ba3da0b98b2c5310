#include <errno.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../base/proc.h"
#include "../wire/unix.h"
#include "link.h"

enum { SLICE = 1 << 20 /* payload verified between two looks at everything else */, AGAIN_US = 50000 };

struct pd_link {
    struct pd_links *s;
    struct pd_link *next, **prev;
    struct pd_conn *c;                  /* NULL: gone */
    struct pd_xfer *x;
    void *user;
    char at[300];                       /* of one that was dialled */
    int raw;                            /* the socket of descriptors, or -1 */
    struct pd_watch *w_raw, *w_done;    /* w_done: completions of rdma */
    bool raw_wanted, raw_dead;          /* giving: it is to be dialled; it cannot be */
    struct pd_timer *t_tick, *t_work, *t_raw;
    struct pd_post turn;
    bool queued, closed, closing, working;      /* closed: its last event was told */
};

static void on_turn(void *ctx);

void pd_link_soon(struct pd_link *k)
{
    if (k->queued)
        return;
    k->queued = true;
    k->turn = (struct pd_post){ .fn = on_turn, .ctx = k };
    pd_loop_defer(k->s->o.l, &k->turn);
}

static void close_raw(struct pd_link *k)
{
    pd_watch_free(k->w_raw);
    k->w_raw = NULL;
    if (k->raw >= 0)
        close(k->raw);
    k->raw = -1;
}

static void link_free(struct pd_link *k)
{
    if (k->queued)
        pd_loop_undefer(k->s->o.l, &k->turn);
    close_raw(k);
    pd_watch_free(k->w_done);
    pd_timer_free(k->t_tick);
    pd_timer_free(k->t_work);
    pd_timer_free(k->t_raw);
    pd_xfer_free(k->x);
    if (k->prev) {
        *k->prev = k->next;
        if (k->next)
            k->next->prev = k->prev;
        k->s->n--;
    }
    pd_free(k);
}

/* ---- descriptors ---- */

static bool giving(const struct pd_link *k) { return k->s->o.xfer.giving; }

static void raw_over(struct pd_link *k, const struct pd_err *e)
{
    pd_info("descriptors to a peer: %s; KV goes in the stream", e->msg);
    close_raw(k);
    k->raw_dead = true;
    k->raw_wanted = false;
}

static void pass_fds(struct pd_link *k)
{
    struct pd_err e = { 0 };
    if (k->raw < 0)
        return;
    int rc = pd_xfer_fds(k->x, k->raw, pd_mono_us(), &e);
    if (rc >= 0 && pd_watch_set(k->w_raw, giving(k) ? rc ? PD_WRITE : 0 : PD_READ, &e) < 0)
        rc = e.code;
    if (rc < 0)
        raw_over(k, &e);
}

static void on_raw(void *ctx, unsigned ready)
{
    struct pd_link *k = ctx;
    struct pd_err e;
    if (ready & (PD_READ | PD_WRITE))
        pass_fds(k);
    else if (ready & PD_HUP) {
        pd_fail(&e, PD_ECANCEL, "the peer closed their socket");
        raw_over(k, &e);
    }
    pd_link_soon(k);
}

static int take_raw(struct pd_link *k, int fd, struct pd_err *e)
{
    int rc = pd_watch_new(k->s->o.l, fd, on_raw, k, &k->w_raw, e);
    if (rc < 0) {
        close(fd);
        return rc;
    }
    k->raw = fd;
    pass_fds(k);
    pd_link_soon(k);
    return 0;
}

/* A second socket, which says whose it is. 0; 1: not now, try again. */
static int dial_raw(struct pd_link *k, struct pd_err *e)
{
    struct pd_hello h = { .has_attach = true };
    struct sockaddr_un a;
    struct pd_buf b = { 0 };
    int rc = pd_unix_address(k->at + strlen("unix:"), &a, e), fd = -1;
    memcpy(h.attach, pd_xfer_conn(k->x, true), sizeof h.attach);
    rc = rc ? rc : pd_hello_encode(&h, &b, e);
    if (!rc && (fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) < 0)
        rc = pd_fail_sys(e, "a socket");
    if (!rc && connect(fd, (struct sockaddr *)&a, sizeof a))
        rc = errno == EAGAIN || errno == EINTR ? 1 : pd_fail_sys(e, "%s: cannot connect", k->at);
    rc = rc ? rc : pd_unix_check_peer(fd, k->at, e);
    if (!rc && send(fd, b.p, b.n, MSG_NOSIGNAL) != (ssize_t)b.n)
        rc = pd_fail_sys(e, "%s: cannot write", k->at);
    pd_buf_free(&b);
    if (rc && fd >= 0)
        close(fd);
    return rc ? rc : take_raw(k, fd, e);
}

static void try_raw(struct pd_link *k)
{
    struct pd_err e = { 0 };
    if (!k->raw_wanted || k->raw >= 0 || k->raw_dead)
        return;
    int rc = dial_raw(k, &e);
    if (rc == 1)
        rc = pd_timer_in(k->t_raw, AGAIN_US, &e);
    if (rc < 0)
        raw_over(k, &e);
}

static void on_raw_again(void *ctx) { try_raw(ctx); }

/* "shm, inline" or "inline (shm: the two ends are not on one host)" */
static bool shm_is_used(const struct pd_link *k)
{
    const char *via = pd_xfer_via(k->x), *shm = strstr(via, "shm"), *not = strchr(via, '(');
    return shm && (!not || shm < not);
}

const char *pd_link_via(const struct pd_link *k, bool wait)
{
    return !strncmp(pd_xfer_via(k->x), "shm", 3) && k->raw < 0 && !(wait && k->raw_wanted) ? "inline" : NULL;
}

/* ---- completions ---- */

static void on_done(void *ctx, unsigned ready)
{
    struct pd_link *k = ctx;
    (void)ready;
    pd_xfer_poll(k->x, pd_mono_us());
    pd_link_soon(k);
}

static void watch_done(struct pd_link *k)
{
    struct pd_err e;
    int fd = pd_xfer_fd(k->x);
    if (fd < 0) {
        pd_watch_free(k->w_done);
        k->w_done = NULL;
    } else if (!k->w_done) {
        if (pd_watch_new(k->s->o.l, fd, on_done, k, &k->w_done, &e) < 0 || pd_watch_set(k->w_done, PD_READ, &e) < 0)
            pd_xfer_lost(k->x, e.msg, pd_mono_us());
        pd_xfer_poll(k->x, pd_mono_us());
    }
}

/* ---- the turn ---- */

static void set_tick(struct pd_link *k)
{
    struct pd_err e;
    int64_t next = pd_xfer_next(k->x);
    if (next == INT64_MAX)
        pd_timer_stop(k->t_tick);
    else if (pd_timer_at(k->t_tick, next, &e) < 0)
        pd_error("a transfer's timer: %s", e.msg);
}

static void on_tick(void *ctx)
{
    struct pd_link *k = ctx;
    pd_xfer_tick(k->x, pd_mono_us());
    pd_link_soon(k);
}

/* Payload in mapped memory is verified a slice at a time; others have their turn between two. */
static void work(struct pd_link *k)
{
    struct pd_err e;
    k->working = false;
    if (!giving(k) && pd_xfer_work(k->x, SLICE, pd_mono_us()))
        k->working = pd_timer_in(k->t_work, 0, &e) == 0;
}

static void on_work(void *ctx)
{
    struct pd_link *k = ctx;
    work(k);
    pd_link_soon(k);
}

static void on_turn(void *ctx)
{
    struct pd_link *k = ctx;
    struct pd_xfer_event ev;
    k->queued = false;
    if (!k->working)
        work(k);
    watch_done(k);
    if (giving(k))
        pass_fds(k);            /* slabs that are new, before offers that name them */
    while (!k->closed && pd_xfer_event(k->x, &ev)) {
        k->closed = ev.kind == PD_XE_CLOSED;
        if (ev.kind == PD_XE_READY && giving(k)) {
            k->raw_wanted = shm_is_used(k);
            try_raw(k);
        }
        if (k->s->o.event)
            k->s->o.event(k->s->o.ctx, k, &ev);
    }
    if (k->closing && !k->closed && k->c && !pd_xfer_counts(k->x).moves)
        pd_conn_close(k->c, NULL);
    set_tick(k);
    if (k->c)
        pd_conn_want(k->c);
    else if (k->closed)
        link_free(k);
}

/* ---- its connection ---- */

static int make(struct pd_links *s, struct pd_conn *c, struct pd_link **out, struct pd_err *e)
{
    struct pd_link *k = pd_calloc(1, sizeof *k, "a transfer connection", e);
    if (!k)
        return PD_ENOMEM;
    k->s = s;
    k->c = c;
    k->raw = -1;
    struct pd_xfer_opts xo = s->o.xfer;
    xo.unix_socket = !pd_conn_is_tcp(c);
    xo.tcp = pd_conn_is_tcp(c);
    xo.net = s->o.net;
    xo.peer_pid = pd_conn_pid(c);
    xo.peer_start = pd_conn_pid(c) ? pd_proc_start(pd_conn_pid(c)) : 0;
    int rc = pd_xfer_new(&xo, pd_mono_us(), &k->x, e);
    rc = rc ? rc : pd_timer_new(s->o.l, on_tick, k, &k->t_tick, e);
    rc = rc ? rc : pd_timer_new(s->o.l, on_work, k, &k->t_work, e);
    rc = rc ? rc : pd_timer_new(s->o.l, on_raw_again, k, &k->t_raw, e);
    if (rc) {
        link_free(k);
        return rc;
    }
    k->next = s->first;
    k->prev = &s->first;
    if (k->next)
        k->next->prev = &k->next;
    s->first = k;
    s->n++;
    pd_conn_set(c, k);
    *out = k;
    pd_link_soon(k);
    return 0;
}

/* It brings descriptors to a connection that is here: 1 when it was that. */
static int attach(struct pd_links *s, struct pd_conn *c, const struct pd_rec *rec, struct pd_err *e)
{
    struct pd_arena a = { 0 };
    struct pd_hello h;
    struct pd_link *k = s->first;
    int rc = rec->kind == PD_K_HELLO ? pd_hello_decode(rec->p, rec->n, &a, &h, e) : 0;
    pd_arena_free(&a);
    if (rc < 0 || rec->kind != PD_K_HELLO || !h.has_attach)
        return rc;
    while (k && (memcmp(pd_xfer_conn(k->x, false), h.attach, sizeof h.attach) || k->raw >= 0 || !k->c))
        k = k->next;
    if (!k)
        return pd_fail(e, PD_ECORRUPT, "hello: `attach` names no connection of this process that waits for descriptors");
    struct pd_tls *tls = NULL;
    bool tcp = pd_conn_is_tcp(c);
    int fd = pd_conn_detach(c, &tls, e);
    if (fd < 0)
        return fd;
    if (tcp) {          /* a stream of data; one that cannot be had is its dialler's loss */
        if (pd_xfer_stream(k->x, fd, tls, pd_mono_us(), e) < 0)
            pd_warn("a stream of data: %s", e->msg);
        pd_xfer_poll(k->x, pd_mono_us());
        pd_link_soon(k);
        return 1;
    }
    if (take_raw(k, fd, e) < 0)
        raw_over(k, e);
    return 1;
}

static void on_record(void *ctx, struct pd_conn *c, const struct pd_rec *rec)
{
    struct pd_links *s = ctx;
    struct pd_link *k = pd_conn_get(c);
    struct pd_err e = { 0 };
    if (!k) {
        int rc = attach(s, c, rec, &e);
        if (rc == 1)
            return;
        if (rc < 0 || (rc = make(s, c, &k, &e)) < 0) {
            pd_conn_refuse(c, &e);
            return;
        }
    }
    pd_xfer_feed(k->x, rec->p, rec->n, pd_mono_us(), NULL);     /* when it is over by that, its last words are pulled, then it is closed */
    pd_link_soon(k);
}

static int on_pull(void *ctx, struct pd_conn *c, struct iovec *v, int max, struct pd_err *e)
{
    struct pd_link *k = pd_conn_get(c);
    (void)ctx;
    return k ? pd_xfer_iov(k->x, v, max, pd_mono_us(), e) : 0;
}

static void on_pulled(void *ctx, struct pd_conn *c, size_t n)
{
    struct pd_link *k = pd_conn_get(c);
    (void)ctx;
    pd_xfer_wrote(k->x, n, pd_mono_us());
    pd_link_soon(k);
}

static void on_ended(void *ctx, struct pd_conn *c)
{
    (void)ctx;
    pd_conn_close(c, NULL);     /* a transfer has no half */
}

static void on_gone(void *ctx, struct pd_conn *c, const struct pd_err *why)
{
    struct pd_link *k = pd_conn_get(c);
    (void)ctx;
    if (!k)
        return;
    k->c = NULL;
    pd_xfer_lost(k->x, why ? why->msg : "the peer closed the connection", pd_mono_us());
    pd_link_soon(k);
}

static void leave_be(void *ctx, struct pd_conn *c) { (void)ctx; (void)c; }      /* its owner closes it when its runs are over */

static void on_stands(void *ctx, struct pd_conn *c)
{
    struct pd_link *k = pd_conn_get(c);
    (void)ctx;
    if (k)
        pd_xfer_dialled(k->x, pd_conn_fd(c));
}

const struct pd_conn_cb pd_links_cb = { .stands = on_stands, .record = on_record, .ended = on_ended, .pull = on_pull, .pulled = on_pulled, .drain = leave_be, .gone = on_gone };

int pd_links_dial(struct pd_links *s, const char *at, void *user, struct pd_link **out, struct pd_err *e)
{
    struct pd_conn_opts co = { .max_record = s->o.max_record, .name = "a decode worker", .meter = s->o.meter, .net = s->o.net };
    struct pd_conn *c;
    if (strlen(at) >= sizeof ((struct pd_link *)0)->at)
        return pd_fail(e, PD_EFAIL, "%.60s...: an address has at most %zu bytes", at, sizeof ((struct pd_link *)0)->at - 1);
    int rc = pd_conn_dial(s->o.l, at, &co, &pd_links_cb, s, &c, e);
    if (rc < 0)
        return rc;
    if ((rc = make(s, c, out, e)) < 0) {
        pd_conn_free(c);
        return rc;
    }
    (*out)->user = user;
    snprintf((*out)->at, sizeof (*out)->at, "%s", at);
    pd_conn_want(c);
    return 0;
}

/* ---- small things ---- */

struct pd_xfer *pd_link_xfer(struct pd_link *k) { return k->x; }
void *pd_link_get(const struct pd_link *k) { return k->user; }
void pd_link_set(struct pd_link *k, void *user) { k->user = user; }
struct pd_link *pd_link_next(const struct pd_link *k) { return k->next; }

void pd_links_soon(struct pd_links *s)
{
    for (struct pd_link *k = s->first; k; k = k->next)
        pd_link_soon(k);
}

void pd_links_close(struct pd_links *s)
{
    for (struct pd_link *k = s->first; k; k = k->next) {
        k->closing = true;
        pd_link_soon(k);
    }
}

void pd_links_free(struct pd_links *s)
{
    while (s->first) {
        struct pd_link *k = s->first;
        if (k->c)
            pd_conn_free(k->c);
        link_free(k);
    }
}
