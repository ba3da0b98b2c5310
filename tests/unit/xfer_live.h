/* Two processes over sockets, one of them killed (-9) at each of its steps, or stopped at some: the other ends cleanly, in time, holds nothing, leaks no
 * descriptor, and what it took is right. */
#ifndef XFER_LIVE_H
#define XFER_LIVE_H
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/base/proc.h"
#include "xfer_ways.h"

struct end {
    struct fix *f;
    int sock, fds;
    bool giving, eof, fds_open;
    enum way way;
    int sig, at, steps;                 /* which signal it gives itself, and when; 0: never */
    int listener;                       /* of streams (tcp); or -1 */
    struct xf_coming coming[PD_XFER_STREAMS_MAX]; uint32_t n_coming;
    struct pd_pool *pool;
    struct pd_leases *leases;
    struct pd_xfer *x;
    struct pd_move *m;
    uint8_t lease[16];
    struct pd_buf in;
    uint32_t got[16];
    bool given;
    int wrong;                          /* line of what was wrong */
};
#define MUST(c) do { if (!(c) && !w->wrong) w->wrong = __LINE__; } while (0)

static void step(struct end *w)
{
    if (++w->steps == w->at)
        raise(w->sig);
}

static void events(struct end *w, int64_t now)
{
    struct pd_xfer_event ev;
    struct pd_err e;
    while (pd_xfer_event(w->x, &ev)) {
        step(w);
        w->got[ev.kind]++;
        if (ev.move)
            w->m = ev.last ? NULL : ev.move;
        switch (ev.kind) {
        case PD_XE_READY:
            if (!w->giving)
                break;
            MUST(!pd_lease_grant(w->leases, w->f->d.run, w->f->d.gen, w->f->blocks, w->f->plan.n_blocks, 0, now, w->lease, &e));
            MUST(!pd_lease_fill(w->leases, w->lease, &e));
            struct pd_give g = { .desc = &w->f->d, .blocks = w->f->blocks, .chunk_blocks = XF_CHUNK, .via = way_via[w->way] };
            memcpy(g.lease, w->lease, 16);
            MUST(!pd_give(w->x, &g, now, &w->m, &e));
            w->given = true;
            break;
        case PD_XE_OFFERED: pd_take(ev.move, &(struct pd_take){ .in_place = w->way == PLACE }, now, &e); break;
        case PD_XE_ACCEPTED: {
            int rc = pd_give_finish(ev.move, &w->f->d, &e);
            MUST(!rc || rc == PD_ECANCEL);      /* the connection went since */
            break;
        }
        case PD_XE_TAKEN: {
            uint32_t n, *b = pd_take_blocks(ev.move, &n);
            step(w);
            MUST(b && n == w->f->plan.n_blocks && fix_same(w->f->pool, w->f->blocks, w->pool, b, n));
            step(w);
            for (uint32_t i = 0; b && i < n; i++)
                pd_pool_put(w->pool, b[i]);
            pd_free(b);
            pd_take_release(ev.move, now);
            break;
        }
        default: break;
        }
    }
}

static void write_out(struct end *w)
{
    struct iovec v[16];
    int n;
    while (!w->eof && (n = pd_xfer_iov(w->x, v, 16, pd_mono_us(), NULL)) > 0) {
        step(w);
        struct msghdr m = { .msg_iov = v, .msg_iovlen = (size_t)n };
        ssize_t k = sendmsg(w->sock, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (k < 0) {
            w->eof = errno != EAGAIN;
            return;
        }
        pd_xfer_wrote(w->x, (size_t)k, pd_mono_us());
    }
}

static void read_in(struct end *w)
{
    char buf[3000];
    for (;;) {
        ssize_t k = recv(w->sock, buf, sizeof buf, MSG_DONTWAIT);
        if (k < 0 && errno == EAGAIN)
            return;
        if (k <= 0) {
            w->eof = true;
            return;
        }
        pd_buf_add(&w->in, buf, (size_t)k, NULL);
        for (;;) {
            struct pd_frame_scan s = { 0 };
            size_t len;
            if (pd_frame_next(&s, w->in.p, w->in.n, PD_MAX_RECORD_DEFAULT, &len, NULL) != 1)
                break;
            step(w);
            if (pd_xfer_feed(w->x, w->in.p, len, pd_mono_us(), NULL))
                w->eof = true;
            memmove(w->in.p, w->in.p + len, w->in.n -= len);
            step(w);
        }
    }
}

static void streams(struct end *w, int64_t now)
{
    struct pd_err e;
    bool any;
    for (int fd; w->listener >= 0 && w->n_coming < PD_XFER_STREAMS_MAX && (fd = accept4(w->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0;) {
        struct xf_coming *c = &w->coming[w->n_coming++];
        *c = (struct xf_coming){ .fd = fd };
        if (w->way == TLS)
            MUST(!pd_tls_new(way_keys, fd, false, "T", &c->tls, &e));
        step(w);
    }
    for (uint32_t i = 0; i < w->n_coming; i++)
        if (xf_first_record(&w->coming[i], w->x, now, &any)) {
            w->coming[i--] = w->coming[--w->n_coming];
            step(w);
        }
}

/* One end's life. 0, or the line of what was wrong. */
static int live(struct end *w, pid_t peer)
{
    struct pd_err e;
    int64_t start = pd_mono_us();
    int before = fds_of();
    bool net = way_streams(w->way);
    struct pd_net keys = { .keys = w->way == TLS ? way_keys : NULL };
    struct pd_xfer_opts o = { .giving = w->giving, .unix_socket = !net, .tcp = net, .net = &keys, .streams = 2, .epoch = 3, .fp_fields = w->f->d.fp_fields, .peer_pid = peer,
                             .peer_start = peer ? pd_proc_start(peer) : 0 };
    if (w->sig == SIGSTOP)
        o.hello_us = o.accept_us = o.stall_us = o.cancel_us = 250000;
    w->fds_open = w->way == SHM || w->way == PLACE;
    if (w->way == RDMA) {
        o.via = "rdma,inline";
        setenv("PD_RDMA_DEVICE", w->giving ? "rxe_a" : "rxe_b", 1);
    }
    if (w->giving) {
        w->pool = w->f->pool;
        MUST(!pd_gen_new(w->f->d.gen, &e));
        MUST(!pd_leases_new(&(struct pd_leases_opts){ .pool = w->pool, .max = 8 }, &w->leases, &e));
    } else
        MUST(!pd_pool_new(&xf_geom, FIX_POOL_BYTES, &w->pool, &e));
    o.pool = w->pool;
    o.leases = w->leases;
    MUST(!pd_xfer_new(&o, start, &w->x, &e));
    if (net && w->giving)
        pd_xfer_dialled(w->x, w->sock);
    while (!w->wrong && !w->eof && !(w->got[PD_XE_RELEASED] + w->got[PD_XE_FAILED] + w->got[PD_XE_CANCELLED] + w->got[PD_XE_UNACKED] + w->got[PD_XE_CLOSED])) {
        int64_t now = pd_mono_us();
        streams(w, now);
        pd_xfer_tick(w->x, now);
        events(w, now);
        if (w->fds_open && pd_xfer_open(w->x)) {
            step(w);
            w->fds_open = pd_xfer_fds(w->x, w->fds, now, &e) >= 0;
        }
        pd_xfer_poll(w->x, now);
        bool more = pd_xfer_work(w->x, 1, now);
        events(w, now);
        write_out(w);
        struct pollfd p[4] = { { w->sock, POLLIN, 0 }, { w->fds_open ? w->fds : -1, w->giving ? 0 : POLLIN, 0 }, { pd_xfer_fd(w->x), POLLIN, 0 }, { w->listener, POLLIN, 0 } };
        poll(p, 4, more ? 0 : 5);
        read_in(w);
        MUST(now - start < 15000000);
    }
    if (w->eof)
        pd_xfer_lost(w->x, "the peer is gone", pd_mono_us());
    events(w, pd_mono_us());
    MUST(!w->m || w->got[PD_XE_RELEASED]);
    pd_xfer_free(w->x);
    for (; w->n_coming; w->n_coming--) {
        pd_tls_free(w->coming[w->n_coming - 1].tls);
        close(w->coming[w->n_coming - 1].fd);
    }
    if (w->giving) {
        pd_leases_reconcile(w->leases, NULL, pd_mono_us());
        struct pd_lease_counts n = pd_leases_counts(w->leases);
        if (n.live)         /* nobody reads under it: its time would end it */
            MUST(pd_leases_sweep(w->leases, INT64_MAX) == n.live);
        MUST(pd_leases_counts(w->leases).live == 0 && pd_leases_counts(w->leases).granted == w->given);
        for (uint32_t i = 0; i < w->f->plan.n_blocks; i++)
            pd_pool_put(w->f->pool, w->f->blocks[i]);
        MUST(pd_pool_stats(w->f->pool).used == 0);
        pd_leases_free(w->leases);
    } else {
        MUST(pd_pool_stats(w->pool).used == 0 && pd_pool_stats(w->pool).borrowed == 0);
        pd_pool_free(w->pool);
    }
    pd_buf_free(&w->in);
    MUST(fds_of() == before);
    return w->wrong;
}

/* Two connected sockets; over TCP from the giver's end to the listener's. */
static void join(enum way y, int s[2], int fd[2], int *listener)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t n = sizeof a;
    *listener = -1;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd), 0);
    if (!way_streams(y)) {
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, s), 0);
        return;
    }
    *listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    s[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(*listener, (struct sockaddr *)&a, sizeof a) | listen(*listener, 16) | getsockname(*listener, (struct sockaddr *)&a, &n), 0);
    assert_int_equal(connect(s[0], (struct sockaddr *)&a, n), 0);
    s[1] = accept4(*listener, NULL, NULL, SOCK_CLOEXEC);
    assert_int_equal(fcntl(*listener, F_SETFL, O_NONBLOCK), 0);
}

/* One at step n: how each ended, as wait says it (a stopped one is killed when the other has ended). */
static void one_life(enum way y, bool giver, int sig, int n, int status[2])
{
    struct fix f;
    int s[2], fd[2], listener;
    pid_t pid[2];
    fix_make(&f, &xf_geom, XF_TOKENS, XF_CHUNK, 3);
    join(y, s, fd, &listener);
    for (int i = 1; i >= 0; i--) {          /* the taker first, so that the giver knows it */
        if ((pid[i] = fork()) == 0) {
            struct end w = { .f = &f, .sock = s[i], .fds = fd[i], .giving = i == 0, .way = y, .sig = sig, .at = giver == (i == 0) ? n : 0, .listener = i ? listener : -1 };
            close(s[!i]);
            close(fd[!i]);
            if (!i && listener >= 0)
                close(listener);
            alarm(30);
            int line = live(&w, i == 0 ? pid[1] : 0);
            if (line)
                dprintf(2, "%s: the %s, with the %s gone at %d: line %d\n", way_name[y], i ? "taker" : "giver", giver ? "giver" : "taker", n, line);
            _exit(line ? 1 : 0);
        }
    }
    for (int i = 0; i < 2; i++) {
        close(s[i]);
        close(fd[i]);
    }
    if (listener >= 0)
        close(listener);
    for (int k = 0; k < 2; k++) {
        int i = k ? !giver : giver;         /* who lives, then the victim */
        if (k && sig == SIGSTOP) {
            assert_int_equal(waitpid(pid[i], &status[i], WUNTRACED), pid[i]);
            if (!WIFSTOPPED(status[i]))
                continue;
            kill(pid[i], SIGKILL);
        }
        assert_int_equal(waitpid(pid[i], &status[i], 0), pid[i]);
    }
    fix_free(&f);
}

static void live_faults(bool rdma, int sig)
{
    for (enum way y = rdma ? RDMA : UNIX; y <= (rdma ? RDMA : TLS); y++)
        for (int giver = 0; giver < 2; giver++)
            for (int n = 1;; n += sig == SIGSTOP ? 13 : 1) {
                int status[2];
                one_life(y, giver, sig, n, status);
                int victim = status[!giver], other = status[giver];
                if (!WIFEXITED(other) || WEXITSTATUS(other))
                    fail_msg("%s, %s gone at step %d: the other ended with %x", way_name[y], giver ? "giver" : "taker", n, other);
                if (WIFEXITED(victim)) {
                    assert_int_equal(WEXITSTATUS(victim), 0);
                    assert_in_range(n, 10, 1000);
                    break;
                }
                assert_int_equal(WTERMSIG(victim), SIGKILL);
            }
}
#endif
