/* What a hand-over by rdma moves, verified, between two processes on two devices: MB/s (10^6) of each of ROUNDS transfers over one connection, one a line, from
 * the accept to the word that all was verified. The first one registers the pools.
 *   bench_rdma GIVER-DEVICE TAKER-DEVICE MIB ROUNDS */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/wire/frame.h"
#include "../../libcommon/xfer/proto.h"

static const struct pd_pool_geom geom = { .layers = 4, .kv_heads = 8, .head_dim = 128, .block_size = 16, .dtype = PD_F16 };
static const uint8_t fp[] = "\x83\xa4" "arch\xa5" "bench\xa8numerics\xa1x\xa8software\xa1y";
enum { BLOCK = 4 * 2 * 8 * 16 * 128 * 2 };

struct end { bool giving; int sock; struct pd_pool *pool; struct pd_leases *leases; struct pd_xfer *x; struct pd_buf in; uint32_t *blocks, n; struct pd_kvdesc d;
             int left; int64_t t0; };

static void must(bool wrong, const struct pd_err *e)
{
    if (wrong) {
        fprintf(stderr, "bench_rdma: %s\n", e->msg);
        exit(1);
    }
}

static void give(struct end *w)
{
    struct pd_err e = { 0 };
    struct pd_give g = { .desc = &w->d, .blocks = w->blocks, .via = "rdma" };
    struct pd_move *m;
    int64_t now = pd_mono_us();
    must(pd_run_new(w->d.run, &e) || pd_gen_new(w->d.gen, &e), &e);
    must(pd_lease_grant(w->leases, w->d.run, w->d.gen, w->blocks, w->n, 0, now, g.lease, &e) || pd_lease_fill(w->leases, g.lease, &e), &e);
    must(pd_give(w->x, &g, now, &m, &e) || pd_give_finish(m, &w->d, &e), &e);
}

static void events(struct end *w)
{
    struct pd_xfer_event ev;
    struct pd_err e = { 0 };
    uint32_t n;
    while (pd_xfer_event(w->x, &ev)) {
        if (ev.kind == PD_XE_READY && w->giving)
            give(w);
        else if (ev.kind == PD_XE_OFFERED)
            must(pd_take(ev.move, &(struct pd_take){ .deadline = 0 }, pd_mono_us(), &e), &e);
        else if (ev.kind == PD_XE_TAKEN) {
            uint32_t *b = pd_take_blocks(ev.move, &n);
            for (uint32_t i = 0; i < n; i++)
                pd_pool_put(w->pool, b[i]);
            pd_free(b);
        } else if (ev.kind == PD_XE_ACCEPTED)
            w->t0 = pd_mono_us();
        else if (ev.kind == PD_XE_VERIFIED)
            printf("%.1f\n", (double)w->n * BLOCK / (double)(pd_mono_us() - w->t0));
        else if (ev.kind == PD_XE_RELEASED && --w->left && w->giving)
            give(w);
        else if (ev.kind == PD_XE_FAILED || ev.kind == PD_XE_CLOSED)
            must(true, &ev.err);
    }
}

static void live(struct end *w)
{
    struct pd_err e = { 0 };
    static char buf[1 << 20];
    while (w->left) {
        struct iovec v[64];
        int n;
        pd_xfer_poll(w->x, pd_mono_us());
        bool more = pd_xfer_work(w->x, 1 << 20, pd_mono_us());
        pd_xfer_tick(w->x, pd_mono_us());
        events(w);
        while ((n = pd_xfer_iov(w->x, v, 64, pd_mono_us(), &e)) > 0) {
            ssize_t k = writev(w->sock, v, n);
            if (k < 0)
                return;
            pd_xfer_wrote(w->x, (size_t)k, pd_mono_us());
        }
        struct pollfd p[2] = { { w->sock, POLLIN, 0 }, { pd_xfer_fd(w->x), POLLIN, 0 } };
        if (!w->left || poll(p, 2, more ? 0 : 100) <= 0 || !p[0].revents)
            continue;
        ssize_t k = recv(w->sock, buf, sizeof buf, MSG_DONTWAIT);
        if (k <= 0)
            return;
        must(pd_buf_add(&w->in, buf, (size_t)k, &e), &e);
        size_t len, at = 0;
        for (struct pd_frame_scan s = { 0 }; at < w->in.n && pd_frame_next(&s, w->in.p + at, w->in.n - at, PD_MAX_RECORD_DEFAULT, &len, &e) == 1; at += len,
             s = (struct pd_frame_scan){ 0 })
            must(pd_xfer_feed(w->x, w->in.p + at, len, pd_mono_us(), &e), &e);
        memmove(w->in.p, w->in.p + at, w->in.n -= at);
    }
}

int main(int argc, char **argv)
{
    struct pd_err e = { 0 };
    int s[2], st = 0;
    if (argc != 5 || atoi(argv[3]) < 1 || atoi(argv[4]) < 1) {
        fprintf(stderr, "usage: bench_rdma GIVER-DEVICE TAKER-DEVICE MIB ROUNDS\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, s))
        return 1;
    pid_t pid = fork();
    struct end w = { .giving = pid > 0, .sock = s[pid > 0], .n = (uint32_t)(((size_t)atoi(argv[3]) << 20) / BLOCK), .left = atoi(argv[4]) };
    close(s[!w.giving]);
    setenv("PD_RDMA_DEVICE", argv[w.giving ? 1 : 2], 1);
    must(pd_pool_new(&geom, ((int64_t)w.n + 1) * BLOCK, &w.pool, &e), &e);
    struct pd_xfer_opts o = { .giving = w.giving, .unix_socket = true, .via = "rdma", .fp_fields = { fp, sizeof fp - 1 }, .pool = w.pool };
    if (w.giving) {
        must(pd_leases_new(&(struct pd_leases_opts){ .pool = w.pool }, &w.leases, &e), &e);
        w.blocks = pd_calloc(w.n, sizeof *w.blocks, "blocks", &e);
        int32_t *ids = pd_calloc((size_t)w.n * 16, sizeof *ids, "ids", &e);
        must(!w.blocks || !ids || pd_pool_take(w.pool, w.n, w.blocks, &e), &e);
        for (uint32_t i = 0; i < w.n; i++)
            for (int l = 0; l < 4; l++)
                for (int v = 0; v < 2; v++)
                    memset(pd_pool_base(w.pool, w.blocks[i]) + pd_pool_off(w.pool, l, v), (int)(i * 7 + (uint32_t)l * 2) + v, pd_pool_layer_bytes(w.pool));
        w.d = (struct pd_kvdesc){ .fp_fields = o.fp_fields, .n_tokens = w.n * 16, .token_ids = ids };
        pd_sha256(fp, sizeof fp - 1, w.d.fp_sha, &e);
        pd_layout_from_pool(w.pool, &w.d.layout);
        w.d.request.prompt = (struct pd_str){ "x", 1 };
        must(pd_request_resolve(&w.d.request, 0, &e), &e);
    }
    o.leases = w.leases;
    must(pd_xfer_new(&o, pd_mono_us(), &w.x, &e), &e);
    live(&w);
    if (!w.giving)
        _exit(w.left != 0);
    pd_xfer_free(w.x);
    close(w.sock);
    waitpid(pid, &st, 0);
    return w.left || st ? 1 : 0;
}
