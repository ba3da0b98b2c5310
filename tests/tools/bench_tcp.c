/* KV by tcp between two processes, verified, as daemons do it: serve/link over pd_loop. One JSON row a run on standard output.
 *   bench_tcp [MIB [ROUNDS [STREAMS [KEYFILE [TAKER GIVER ADDRESS]]]]]      (256 7 4 -: in the clear; on loopback)
 * TAKER, GIVER: network namespaces (ip netns) that the two ends go to; ADDRESS: the taker's.
 * Time runs from the offer to the giver's hearing that all was verified. Both pools are warm, and larger than the caches. */
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/serve/link.h"
#include "../../libcommon/serve/listener.h"

static const struct pd_pool_geom geom = { .layers = 30, .kv_heads = 3, .head_dim = 64, .block_size = 16, .dtype = PD_F16 };
static const uint8_t fp[] = "\x83\xa4" "arch\xa5" "bench\xa8numerics\xa1x\xa8software\xa1y";
static const size_t block_bytes = 30 * 2 * 3 * 16 * 64 * 2;

static struct { struct pd_loop *l; struct pd_pool *pool; struct pd_leases *leases; struct pd_links links; struct pd_net net; uint32_t n, *blocks;
                int rounds, round; int64_t t0; struct pd_kvdesc d; uint8_t lease[16]; uint64_t bytes; } B;

static void must(int rc, const struct pd_err *e)
{
    if (rc) {
        fprintf(stderr, "bench_tcp: %s\n", e->msg);
        exit(1);
    }
}

static void offer(struct pd_link *k)
{
    struct pd_err e = { 0 };
    struct pd_move *m;
    must(pd_run_new(B.d.run, &e), &e);
    must(pd_gen_new(B.d.gen, &e), &e);
    memcpy(B.d.gen, pd_xfer_own(pd_link_xfer(k))->life, 8);
    must(pd_lease_grant(B.leases, B.d.run, B.d.gen, B.blocks, B.n, 0, pd_mono_us(), B.lease, &e), &e);
    must(pd_lease_fill(B.leases, B.lease, &e), &e);
    struct pd_give g = { .desc = &B.d, .blocks = B.blocks };
    memcpy(g.lease, B.lease, 16);
    B.t0 = pd_mono_ns();
    must(pd_give(pd_link_xfer(k), &g, pd_mono_us(), &m, &e), &e);
    must(strcmp(pd_move_scheme(m), "tcp") ? pd_fail(&e, 1, "it goes by %s", pd_move_scheme(m)) : 0, &e);
    must(pd_give_finish(m, &B.d, &e), &e);
    pd_link_soon(k);
}

static struct pd_link *the_link;
static void on_offer(void *ctx) { offer(the_link); }
static struct pd_timer *again;

static void giver_event(void *ctx, struct pd_link *k, const struct pd_xfer_event *ev)
{
    struct pd_err e;
    the_link = k;
    if (ev->kind == PD_XE_READY)        /* a moment for its streams */
        must(pd_timer_in(again, 100000, &e), &e);
    else if (ev->kind == PD_XE_VERIFIED) {
        double s = (double)(pd_mono_ns() - B.t0) / 1e9;
        if (B.round++)          /* the first one warms */
            printf("{\"name\":\"xfer.tcp.verified\",\"value\":%.3f,\"unit\":\"GB/s\",\"round\":%d}\n", (double)B.bytes / s / 1e9, B.round - 1);
        fflush(stdout);
    } else if (ev->kind == PD_XE_RELEASED) {
        if (B.round > B.rounds)
            pd_loop_quit(B.l);
        else
            must(pd_timer_in(again, 1000, &e), &e);
    } else if (ev->kind == PD_XE_FAILED || ev->kind == PD_XE_CLOSED)
        must(1, &ev->err);
}

static void taker_event(void *ctx, struct pd_link *k, const struct pd_xfer_event *ev)
{
    struct pd_err e;
    uint32_t n;
    if (ev->kind == PD_XE_OFFERED)
        must(pd_take(ev->move, &(struct pd_take){ .n_held = 0 }, pd_mono_us(), &e), &e);
    else if (ev->kind == PD_XE_TAKEN) {
        uint32_t *b = pd_take_blocks(ev->move, &n);
        for (uint32_t i = 0; i < n; i++)
            pd_pool_put(B.pool, b[i]);
        pd_free(b);
    } else if (ev->kind == PD_XE_CLOSED)
        exit(0);
    pd_link_soon(k);
}

static void go_to(const char *ns)
{
    struct pd_err e;
    char path[300];
    snprintf(path, sizeof path, "/var/run/netns/%s", ns);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    must(fd < 0 || setns(fd, CLONE_NEWNET) ? pd_fail_sys(&e, "%s", path) : 0, &e);
    close(fd);
}

static void make(int mib, bool giving, uint32_t streams)
{
    struct pd_err e = { 0 };
    B.n = (uint32_t)(((size_t)mib << 20) / block_bytes);
    B.bytes = (uint64_t)B.n * block_bytes;
    must(pd_loop_new(&B.l, &e), &e);
    must(pd_pool_new(&geom, (int64_t)(B.n + 1) * (int64_t)block_bytes, &B.pool, &e), &e);
    B.blocks = pd_calloc(B.n, sizeof *B.blocks, "blocks", &e);
    must(pd_pool_take(B.pool, B.n, B.blocks, &e), &e);
    for (uint32_t i = 0; i < B.n; i++)
        for (int l = 0; l < 30; l++)
            for (int v = 0; v < 2; v++)
                memset(pd_pool_base(B.pool, B.blocks[i]) + pd_pool_off(B.pool, l, v), (int)(i * 7 + (uint32_t)l), pd_pool_layer_bytes(B.pool));
    if (!giving)
        for (uint32_t i = 0; i < B.n; i++)
            pd_pool_put(B.pool, B.blocks[i]);
    else {
        must(pd_leases_new(&(struct pd_leases_opts){ .pool = B.pool }, &B.leases, &e), &e);
        B.d = (struct pd_kvdesc){ .fp_fields = { fp, sizeof fp - 1 }, .n_tokens = B.n * 16, .token_ids = pd_calloc((size_t)B.n * 16, 4, "ids", &e) };
        pd_sha256(fp, sizeof fp - 1, B.d.fp_sha, &e);
        pd_layout_from_pool(B.pool, &B.d.layout);
        B.d.request.prompt = (struct pd_str){ "x", 1 };
        must(pd_request_resolve(&B.d.request, 0, &e), &e);
    }
    B.links.o = (struct pd_links_opts){ .l = B.l, .net = &B.net, .event = giving ? giver_event : taker_event,
        .xfer = { .giving = giving, .fp_fields = { fp, sizeof fp - 1 }, .pool = B.pool, .leases = B.leases, .streams = streams } };
}

int main(int argc, char **argv)
{
    int mib = argc > 1 ? atoi(argv[1]) : 256, p[2];
    uint32_t streams = argc > 3 ? (uint32_t)atoi(argv[3]) : 0;
    struct pd_err e = { 0 };
    char at[100] = "", where[100];
    struct pd_keys *keys = NULL;
    B.rounds = argc > 2 ? atoi(argv[2]) : 7;
    signal(SIGPIPE, SIG_IGN);
    if (argc > 4 && strcmp(argv[4], "-"))
        must(pd_keys_load(argv[4], &keys, &e), &e);
    B.net.keys = keys;
    B.net.insecure = !keys;
    snprintf(where, sizeof where, "tcp-listen:%.60s:0", argc > 7 ? argv[7] : "127.0.0.1");
    if (pipe(p))
        return 1;
    pid_t pid = fork();
    if (!pid) {
        static const struct pd_entry entry = { NULL, &pd_links_cb, &B.links, true };
        static struct pd_dispatch dispatch = { &entry, 1, false };
        static struct pd_conns set;
        struct pd_listener *s;
        if (argc > 7)
            go_to(argv[5]);
        make(mib, false, streams);
        struct pd_listener_opts o = { .at = where, .dispatch = &dispatch, .conn = { .set = &set, .net = &B.net } };
        must(pd_listener_new(B.l, &o, &s, &e), &e);
        const char *name = pd_listener_name(s);
        if (write(p[1], name, strlen(name)) < 0)
            return 1;
        must(pd_loop_run(B.l, &e), &e);
        return 0;
    }
    if (argc > 7)
        go_to(argv[6]);
    make(mib, true, streams);
    must(pd_timer_new(B.l, on_offer, NULL, &again, &e), &e);
    if (read(p[0], at, sizeof at - 1) <= 0)
        return 1;
    struct pd_link *k;
    must(pd_links_dial(&B.links, at, NULL, &k, &e), &e);
    must(pd_loop_run(B.l, &e), &e);
    kill(pid, SIGTERM);
    waitpid(pid, NULL, 0);
    return 0;
}
