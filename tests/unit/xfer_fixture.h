/* What the tests of xfer share: a giving and a taking end in one process, joined by memory (and a socket pair for descriptors,
 * streams over loopback for tcp: opts.tcp of the giving end; opts.dialled of the taking end: it is the one that dials). */
#ifndef XFER_FIXTURE_H
#define XFER_FIXTURE_H
#include <poll.h>
#include <sys/socket.h>
#ifndef FIX_POOL_BYTES
#define FIX_POOL_BYTES (1 << 20)      /* thousands of worlds are made */
#endif
#include "../../libcommon/base/clock.h"
#include "../../libcommon/wire/frame.h"
#include "../../libcommon/xfer/proto.h"
#include "kv_fixture.h"

static const struct pd_pool_geom xf_geom = { .layers = 3, .kv_heads = 2, .head_dim = 8, .block_size = 4, .dtype = PD_F16 };
enum { XF_TOKENS = 50, XF_CHUNK = 3 };         /* 13 blocks, the last with 2 tokens; 5 ranges x 3 layers = 15 chunks */

struct xf {
    struct fix f;                       /* the giver's pool and run */
    struct pd_pool *pool;               /* the taker's */
    struct pd_leases *leases;
    struct pd_xfer *g, *t;
    struct pd_move *gm, *tm;            /* the last ones seen */
    uint8_t lease[16];
    int64_t now;
    int sock[2];                        /* descriptors: giver, taker */
    struct pd_buf to_t, to_g;           /* what is on its way */
    uint32_t got[2][16];                /* events, by end and kind */
    struct pd_xfer_event last[2];       /* the last one of each end that had words */
    struct pd_take take;                /* how OFFERED is answered */
    bool manual;                        /* it is not */
    uint32_t *blocks, n_blocks;         /* taken */
    struct pd_import *parked;
    struct pd_buf log[2];               /* all that each end wrote, when logging */
    bool logging;
    bool no_fds;
    bool tcp, t_dials, hold;            /* hold: of streams the first flight is answered, and nothing more is read yet */
    int listener;
    struct xf_coming { int fd; struct pd_tls *tls; bool answered; uint8_t buf[200]; size_t n; } coming[PD_XFER_STREAMS_MAX];       /* streams whose first record is not whole */
    uint32_t n_coming;
    bool may_cut;                       /* a record may be cut: the connection ended for want of memory */
    bool wired; int conn[2];            /* records go over this socket pair: giver, taker */
    uint64_t lose[2], twice[2];         /* a bit a kind: records to the giver, to the taker, that are lost, or come twice */
    /* Streams pass through a pair of sockets each, where their bytes can be stopped (dam): then they gather in `dammed`. */
    bool tapped, dam;
    struct xf_tap { int a, b; bool a_over, b_over; } tap[PD_XFER_STREAMS_MAX]; uint32_t n_taps;
    struct pd_buf dammed, tap_log;      /* tap_log: all that giving ends wrote on them */
    int patience_ms;                    /* of xf_pump, where devices work beside us */
};

static const struct pd_keys *xf_keys;          /* of tcp, when set */
static const char *xf_device[2];               /* of rdma, giver's and taker's, when set */

static inline int xf_tap(struct xf *w, int fd)
{
    int s[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, s), 0);
    w->tap[w->n_taps++] = (struct xf_tap){ .a = fd, .b = s[0] };
    return s[1];
}

static inline bool xf_taps(struct xf *w)
{
    uint8_t buf[65536];
    bool any = false;
    for (uint32_t i = 0; i < w->n_taps; i++) {
        struct xf_tap *t = &w->tap[i];
        ssize_t k = t->a_over ? -1 : recv(t->a, buf, sizeof buf, MSG_DONTWAIT);
        any |= k >= 0;
        if (k > 0) {
            pd_buf_add(&w->tap_log, buf, (size_t)k, NULL);
            if (w->dam)
                pd_buf_add(&w->dammed, buf, (size_t)k, NULL);
            else
                send(t->b, buf, (size_t)k, MSG_NOSIGNAL);
        } else if (k == 0 || errno != EAGAIN) {
            t->a_over = true;
            shutdown(t->b, SHUT_WR);
        }
        k = t->b_over ? -1 : recv(t->b, buf, sizeof buf, MSG_DONTWAIT);
        any |= k >= 0;
        if (k > 0)
            send(t->a, buf, (size_t)k, MSG_NOSIGNAL);
        else if (k == 0 || errno != EAGAIN) {
            t->b_over = true;
            shutdown(t->a, SHUT_WR);
        }
    }
    return any;
}

/* A stream goes to x when its first record is whole. false: not yet. */
static inline bool xf_first_record(struct xf_coming *c, struct pd_xfer *x, int64_t now, bool *any)
{
    size_t len = 0;
    ssize_t k = 0;
    while (c->n < sizeof c->buf && !len && (k = c->tls ? pd_tls_read(c->tls, c->buf + c->n, 1) : recv(c->fd, c->buf + c->n, 1, MSG_DONTWAIT)) == 1) {
        struct pd_frame_scan s = { 0 };
        *any = true;
        if (pd_frame_next(&s, c->buf, ++c->n, sizeof c->buf, &len, NULL) != 1)
            len = 0;
    }
    if (!len && k < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (len)
        pd_xfer_stream(x, c->fd, c->tls, now, NULL);
    else {
        pd_tls_free(c->tls);
        close(c->fd);
    }
    return true;
}

/* Streams are accepted, and handed on after their first record; both ends look at theirs. */
static inline bool xf_net(struct xf *w)
{
    bool any = false;
    struct pd_err e;
    if (!w->tcp)
        return false;
    for (int fd; w->n_coming < PD_XFER_STREAMS_MAX && (fd = accept4(w->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0; any = true) {
        struct xf_coming *c = &w->coming[w->n_coming++];
        if (w->tapped && w->n_taps < PD_XFER_STREAMS_MAX)
            fd = xf_tap(w, fd);
        *c = (struct xf_coming){ .fd = fd };
        if (xf_keys && pd_tls_new(xf_keys, fd, false, "T", &c->tls, &e)) {
            close(fd);
            w->n_coming--;
        }
    }
    for (uint32_t i = 0; i < w->n_coming; i++) {
        struct xf_coming *c = &w->coming[i];
        if (w->hold) {
            if (c->tls && !c->answered && poll(&(struct pollfd){ c->fd, POLLIN, 0 }, 1, 0) == 1)
                c->answered = pd_tls_shake(c->tls) == 0;
            continue;
        }
        if (!xf_first_record(c, w->t_dials ? w->g : w->t, w->now, &any))
            continue;
        w->coming[i--] = w->coming[--w->n_coming];
    }
    any |= xf_taps(w);
    pd_xfer_poll(w->g, w->now);
    pd_xfer_poll(w->t, w->now);
    return any;
}

/* Is there news on a socket, now or in a moment? */
static inline bool xf_news(struct xf *w)
{
    struct pollfd p[3 + 3 * PD_XFER_STREAMS_MAX] = { { w->listener, POLLIN, 0 }, { pd_xfer_fd(w->g), POLLIN, 0 }, { pd_xfer_fd(w->t), POLLIN, 0 } };
    uint32_t n = 3;
    for (uint32_t i = 0; i < w->n_coming; i++)
        p[n++] = (struct pollfd){ w->coming[i].fd, POLLIN, 0 };
    for (uint32_t i = 0; i < w->n_taps; i++) {
        p[n++] = (struct pollfd){ w->tap[i].a_over ? -1 : w->tap[i].a, POLLIN, 0 };
        p[n++] = (struct pollfd){ w->tap[i].b_over ? -1 : w->tap[i].b, POLLIN, 0 };
    }
    return poll(p, n, 1) > 0;
}

static inline void xf_open_ends(struct xf *w, const struct pd_xfer_opts *g, const struct pd_xfer_opts *t)
{
    struct pd_err e;
    struct pd_xfer_opts og = g ? *g : (struct pd_xfer_opts){ .epoch = 3 }, ot = t ? *t : (struct pd_xfer_opts){ .epoch = 3 };
    og.giving = true;
    og.unix_socket = ot.unix_socket = !og.tcp;
    w->tcp = og.tcp;
    if (w->tcp) {
        char told[PD_TCP_NAME];
        struct pd_tcp_addr a[PD_TCP_ADDRS];
        static struct pd_net net;
        int n;
        net.keys = xf_keys;
        ot.tcp = true;
        og.net = ot.net = &net;
        assert_int_equal(pd_tcp_listen("127.0.0.1:0", 64, NULL, &w->listener, told, &e), 0);
        assert_int_equal(pd_tcp_resolve(told, false, a, &n, &e), 0);
        w->t_dials = ot.dialled;
        *(w->t_dials ? &ot.dialled : &og.dialled) = true;
        (w->t_dials ? &ot : &og)->peer = a[0];
    }
    og.pool = w->f.pool;
    og.leases = w->leases;
    ot.pool = w->pool;
    if (!og.fp_fields.p)
        og.fp_fields = w->f.d.fp_fields;
    if (!ot.fp_fields.p)
        ot.fp_fields = w->f.d.fp_fields;
    og.worker = "p0";
    ot.worker = "d0";
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, w->sock), 0);
    if (w->wired)
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, w->conn), 0);
    if (xf_device[0])
        setenv("PD_RDMA_DEVICE", xf_device[0], 1);
    assert_int_equal(pd_xfer_new(&og, w->now, &w->g, &e), 0);
    if (xf_device[1])
        setenv("PD_RDMA_DEVICE", xf_device[1], 1);
    assert_int_equal(pd_xfer_new(&ot, w->now, &w->t, &e), 0);
}

/* Pools, a run, a ledger; no ends yet. */
static inline void xf_world(struct xf *w)
{
    struct pd_err e;
    memset(w, 0, sizeof *w);
    w->now = 1000000;
    fix_make(&w->f, &xf_geom, XF_TOKENS, XF_CHUNK, 11);
    assert_int_equal(pd_pool_new(&xf_geom, FIX_POOL_BYTES, &w->pool, &e), 0);
    assert_int_equal(pd_leases_new(&(struct pd_leases_opts){ .pool = w->f.pool }, &w->leases, &e), 0);
}

static inline void xf_open(struct xf *w, const struct pd_xfer_opts *g, const struct pd_xfer_opts *t)
{
    xf_world(w);
    xf_open_ends(w, g, t);
}

static inline void xf_drop_blocks(struct xf *w)
{
    for (uint32_t i = 0; i < w->n_blocks; i++)
        pd_pool_put(w->pool, w->blocks[i]);
    pd_free(w->blocks);
    w->blocks = NULL;
    w->n_blocks = 0;
}

static inline void xf_close_ends(struct xf *w)
{
    pd_xfer_free(w->g);
    pd_xfer_free(w->t);
    w->g = w->t = NULL;
    w->gm = w->tm = NULL;
    close(w->sock[0]);
    close(w->sock[1]);
    if (w->tcp)
        close(w->listener);
    for (; w->n_coming; w->n_coming--) {
        pd_tls_free(w->coming[w->n_coming - 1].tls);
        close(w->coming[w->n_coming - 1].fd);
    }
    for (; w->n_taps; w->n_taps--) {
        close(w->tap[w->n_taps - 1].a);
        close(w->tap[w->n_taps - 1].b);
    }
    if (w->wired) {
        close(w->conn[0]);
        close(w->conn[1]);
    }
    pd_buf_free(&w->dammed);
    pd_buf_free(&w->tap_log);
    pd_buf_free(&w->to_t);
    pd_buf_free(&w->to_g);
}

/* Every count is back at its start. */
static inline void xf_close(struct xf *w)
{
    xf_close_ends(w);
    xf_drop_blocks(w);
    pd_import_free(w->parked);
    pd_leases_revoke_all(w->leases, "end", w->now);
    struct pd_lease_counts n = pd_leases_counts(w->leases);
    assert_int_equal(n.live + n.unread + n.cancelling, 0);
    assert_int_equal(n.granted, n.released + n.expired + n.revoked);
    for (uint32_t i = 0; i < w->f.plan.n_blocks; i++)
        pd_pool_put(w->f.pool, w->f.blocks[i]);
    assert_int_equal(pd_pool_stats(w->f.pool).used, 0);
    assert_int_equal(pd_pool_stats(w->pool).used, 0);
    assert_int_equal(pd_pool_stats(w->pool).borrowed, 0);
    pd_leases_free(w->leases);
    pd_pool_free(w->pool);
    fix_free(&w->f);
}

static inline void xf_events(struct xf *w)
{
    struct pd_xfer_event ev;
    for (int end = 0; end < 2; end++)
        while (pd_xfer_event(end ? w->t : w->g, &ev)) {
            w->got[end][ev.kind]++;
            if (ev.err.code)
                w->last[end] = ev;
            if (ev.move)
                *(end ? &w->tm : &w->gm) = ev.move;
            if (end && ev.kind == PD_XE_OFFERED && !w->manual)
                pd_take(ev.move, &w->take, w->now, NULL);
            if (end && ev.kind == PD_XE_TAKEN && !w->take.again) {
                xf_drop_blocks(w);
                w->blocks = pd_take_blocks(ev.move, &w->n_blocks);
                assert_non_null(w->blocks);
            }
            if (end && ev.kind == PD_XE_FAILED && !w->parked)
                w->parked = pd_take_park(ev.move);
            if (ev.last)
                *(end ? &w->tm : &w->gm) = NULL;
        }
}

/* What one end has to write, into the other's queue. */
static inline bool xf_flush(struct xf *w, bool from_taker)
{
    struct iovec v[64];
    struct pd_xfer *x = from_taker ? w->t : w->g;
    struct pd_buf *b = from_taker ? &w->to_g : &w->to_t;
    bool any = false;
    int n;
    while ((n = pd_xfer_iov(x, v, 64, w->now, NULL)) > 0) {
        size_t bytes = 0, take = v[0].iov_len > 700 ? 700 : v[0].iov_len;       /* in small pieces, so that partial writes are common */
        if (w->wired) {
            struct msghdr m = { .msg_iov = v, .msg_iovlen = (size_t)n };
            ssize_t k = sendmsg(w->conn[from_taker], &m, MSG_DONTWAIT | MSG_NOSIGNAL);
            uint8_t buf[65536];
            if (k > 0)
                pd_xfer_wrote(x, (size_t)k, w->now);
            any |= k > 0;
            while ((k = recv(w->conn[!from_taker], buf, sizeof buf, MSG_DONTWAIT)) > 0)
                pd_buf_add(b, buf, (size_t)k, NULL);
            continue;
        }
        for (int i = 0; i < n && bytes < take; i++) {
            size_t k = v[i].iov_len < take - bytes ? v[i].iov_len : take - bytes;
            while (pd_buf_add(b, v[i].iov_base, k, NULL)) {}    /* a drill makes one allocation fail: not this one's turn */
            if (w->logging)
                pd_buf_add(&w->log[from_taker], v[i].iov_base, k, NULL);
            bytes += k;
        }
        pd_xfer_wrote(x, bytes, w->now);
        any = true;
    }
    return any;
}

/* Feed one record that is on its way. */
static inline bool xf_feed_one(struct xf *w, bool to_taker)
{
    struct pd_buf *b = to_taker ? &w->to_t : &w->to_g;
    struct pd_frame_scan s = { 0 };
    size_t len;
    if (!b->n)
        return false;
    if (pd_frame_next(&s, b->p, b->n, PD_MAX_RECORD_DEFAULT, &len, NULL) != 1) {
        assert_true(w->may_cut);
        b->n = 0;
        return false;
    }
    uint64_t kind = (uint64_t)1 << pd_kind_of(b->p, len);
    for (int times = w->lose[to_taker] & kind ? 0 : w->twice[to_taker] & kind ? 2 : 1; times; times--)
        pd_xfer_feed(to_taker ? w->t : w->g, b->p, len, w->now, NULL);
    memmove(b->p, b->p + len, b->n -= len);
    return true;
}

static inline void xf_fds(struct xf *w)
{
    struct pd_err e;
    if (w->no_fds || w->tcp || !pd_xfer_open(w->g) || !pd_xfer_open(w->t))
        return;
    pd_xfer_fds(w->g, w->sock[0], w->now, &e);
    pd_xfer_fds(w->t, w->sock[1], w->now, &e);
}

static inline bool xf_step(struct xf *w)
{
    bool any = xf_flush(w, false) | xf_flush(w, true);
    any |= xf_feed_one(w, true);
    any |= xf_feed_one(w, false);
    any |= pd_xfer_work(w->t, 1, w->now);
    xf_fds(w);
    any |= xf_net(w);
    xf_events(w);
    return any;
}

static inline void xf_pump(struct xf *w)
{
    for (int64_t since = pd_mono_us(); w->patience_ms && pd_mono_us() - since < w->patience_ms * 1000;) {
        pd_xfer_poll(w->g, w->now);
        pd_xfer_poll(w->t, w->now);
        if (xf_step(w))
            since = pd_mono_us();
        else if ((pd_xfer_open(w->g) && pd_xfer_open(w->t) && w->got[0][PD_XE_READY]) && !(pd_xfer_counts(w->g).moves + pd_xfer_counts(w->t).moves))
            break;
    }
    for (int idle = 0; idle < (w->tcp ? 4 : 2); idle = xf_step(w) ? 0 : idle + 1) {      /* work makes records, which make work */
        if (idle && w->tcp && w->g && w->t && xf_news(w))
            idle = 0;
    }
}

static inline int xf_give(struct xf *w, const char *via, struct pd_err *e)
{
    int rc = pd_lease_grant(w->leases, w->f.d.run, w->f.d.gen, w->f.blocks, w->f.plan.n_blocks, 0, w->now, w->lease, e);
    rc = rc ? rc : pd_lease_fill(w->leases, w->lease, e);
    struct pd_give g = { .desc = &w->f.d, .blocks = w->f.blocks, .chunk_blocks = XF_CHUNK, .via = via };
    memcpy(g.lease, w->lease, 16);
    return rc ? rc : pd_give(w->g, &g, w->now, &w->gm, e);
}

/* The same run, as a new generation. */
static inline void xf_regen(struct xf *w) { assert_int_equal(pd_gen_new(w->f.d.gen, NULL), 0); }
static inline bool xf_same(const struct xf *w) { return w->blocks && w->n_blocks == w->f.plan.n_blocks &&
                                                fix_same(w->f.pool, w->f.blocks, w->pool, w->blocks, w->n_blocks); }
#endif
