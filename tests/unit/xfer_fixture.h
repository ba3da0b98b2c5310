/* What the tests of xfer share: a giving and a taking end in one process, joined by memory (and a socket pair for descriptors,
 * streams over loopback for tcp: opts.tcp of the giving end; opts.dialled of the taking end: it is the one that dials). */
#ifndef XFER_FIXTURE_H
#define XFER_FIXTURE_H
#include <poll.h>
#include <sys/socket.h>
#ifndef FIX_POOL_BYTES
#define FIX_POOL_BYTES (1 << 20)      /* thousands of worlds are made */
#endif
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
};

static const struct pd_keys *xf_keys;          /* of tcp, when set */

/* Streams are accepted, and handed on after their first record; both ends look at theirs. */
static inline bool xf_net(struct xf *w)
{
    bool any = false;
    struct pd_err e;
    if (!w->tcp)
        return false;
    for (int fd; w->n_coming < PD_XFER_STREAMS_MAX && (fd = accept4(w->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0; any = true) {
        struct xf_coming *c = &w->coming[w->n_coming++];
        *c = (struct xf_coming){ .fd = fd };
        if (xf_keys && pd_tls_new(xf_keys, fd, false, "T", &c->tls, &e)) {
            close(fd);
            w->n_coming--;
        }
    }
    for (uint32_t i = 0; i < w->n_coming; i++) {
        struct xf_coming *c = &w->coming[i];
        size_t len = 0;
        ssize_t k = 0;
        if (w->hold) {
            if (c->tls && !c->answered && poll(&(struct pollfd){ c->fd, POLLIN, 0 }, 1, 0) == 1)
                c->answered = pd_tls_shake(c->tls) == 0;
            continue;
        }
        while (c->n < sizeof c->buf && !len && (k = c->tls ? pd_tls_read(c->tls, c->buf + c->n, 1) : recv(c->fd, c->buf + c->n, 1, MSG_DONTWAIT)) == 1) {
            struct pd_frame_scan s = { 0 };
            any = true;
            if (pd_frame_next(&s, c->buf, ++c->n, sizeof c->buf, &len, NULL) != 1)
                len = 0;
        }
        if (!len && k != 0)
            continue;
        struct pd_xfer *x = w->t_dials ? w->g : w->t;
        if (len)
            pd_xfer_stream(x, c->fd, c->tls, w->now, NULL);
        else {
            pd_tls_free(c->tls);
            close(c->fd);
        }
        w->coming[i--] = w->coming[--w->n_coming];
    }
    pd_xfer_poll(w->g, w->now);
    pd_xfer_poll(w->t, w->now);
    return any;
}

/* Is there news on a socket, now or in a moment? */
static inline bool xf_news(struct xf *w)
{
    struct pollfd p[3 + PD_XFER_STREAMS_MAX] = { { w->listener, POLLIN, 0 }, { pd_xfer_fd(w->g), POLLIN, 0 }, { pd_xfer_fd(w->t), POLLIN, 0 } };
    for (uint32_t i = 0; i < w->n_coming; i++)
        p[3 + i] = (struct pollfd){ w->coming[i].fd, POLLIN, 0 };
    return poll(p, 3 + w->n_coming, 1) > 0;
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
    assert_int_equal(pd_xfer_new(&og, w->now, &w->g, &e), 0);
    assert_int_equal(pd_xfer_new(&ot, w->now, &w->t, &e), 0);
}

static inline void xf_open(struct xf *w, const struct pd_xfer_opts *g, const struct pd_xfer_opts *t)
{
    struct pd_err e;
    memset(w, 0, sizeof *w);
    w->now = 1000000;
    fix_make(&w->f, &xf_geom, XF_TOKENS, XF_CHUNK, 11);
    assert_int_equal(pd_pool_new(&xf_geom, FIX_POOL_BYTES, &w->pool, &e), 0);
    assert_int_equal(pd_leases_new(&(struct pd_leases_opts){ .pool = w->f.pool }, &w->leases, &e), 0);
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
            if (end && ev.kind == PD_XE_TAKEN) {
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
