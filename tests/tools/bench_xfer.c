/* What a hand-over by shm costs, step by step, between two ends in one process (one core: nothing overlaps), as JSON rows on standard output and a table on
 * standard error.
 *   bench_xfer [MIB]...      KV of these sizes (64 256 1024), in the shape of a 135M model: 30 layers, 3 KV heads of 64, f16, blocks of 16
 * offer_us: the giver makes the offer. mapped_us: from the offer's first byte being fed to the accept, in place, on slabs that are mapped already: decode,
 * check, block table, references. sums: the giver's hashing. verify: the taker's, in place. copy_verified: copied and verified. copy: bare, the taker's pieces
 * (a block of K or V) in its order. Beside them XXH3 of the same bytes and memcpy of whole slabs into the other pool, warm; memcpy_cached goes to a place
 * in the cache. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/wire/frame.h"
#include "../../libcommon/xfer/proto.h"

static const struct pd_pool_geom geom = { .layers = 30, .kv_heads = 3, .head_dim = 64, .block_size = 16, .dtype = PD_F16 };
static const uint8_t fp[] = "\x83\xa4" "arch\xa5" "bench\xa8numerics\xa1x\xa8software\xa1y";
enum { ROUNDS = 21 };

struct world { struct pd_pool *from, *to; struct pd_leases *leases; struct pd_xfer *g, *t; struct pd_buf to_t, to_g; int sock[2]; struct pd_move *gm,
              *tm; bool in_place; int64_t took_ns; uint32_t *blocks, n; };

static void must(int rc, const struct pd_err *e)
{
    if (rc) {
        fprintf(stderr, "bench_xfer: %s\n", e->msg);
        exit(1);
    }
}

static void flush(struct world *w, struct pd_xfer *x, struct pd_buf *b)
{
    struct iovec v[64];
    int n;
    while ((n = pd_xfer_iov(x, v, 64, 1, NULL)) > 0)
        for (int i = 0; i < n; i++) {
            pd_buf_add(b, v[i].iov_base, v[i].iov_len, NULL);
            pd_xfer_wrote(x, v[i].iov_len, 1);
        }
}

static void feed(struct pd_xfer *x, struct pd_buf *b)
{
    size_t at = 0, len;
    struct pd_err e = { 0 };
    for (struct pd_frame_scan s = { 0 }; at < b->n && pd_frame_next(&s, b->p + at, b->n - at, PD_MAX_RECORD_DEFAULT, &len, NULL) == 1; at += len,
         s = (struct pd_frame_scan){ 0 })
        must(pd_xfer_feed(x, b->p + at, len, 1, &e), &e);
    b->n = 0;
}

/* Events of both ends; an offer is taken, and the time until then stops. */
static void events(struct world *w, int64_t t0)
{
    struct pd_xfer_event ev;
    struct pd_err e;
    while (pd_xfer_event(w->g, &ev)) {
        w->gm = ev.last ? NULL : ev.move ? ev.move : w->gm;
        if (ev.kind == PD_XE_FAILED || ev.kind == PD_XE_CLOSED)
            must(1, &ev.err);
    }
    while (pd_xfer_event(w->t, &ev)) {
        w->tm = ev.last ? NULL : ev.move ? ev.move : w->tm;
        if (ev.kind == PD_XE_OFFERED) {
            must(pd_take(ev.move, &(struct pd_take){ .in_place = w->in_place }, 1, &e), &e);
            w->took_ns = pd_mono_ns() - t0;
        } else if (ev.kind == PD_XE_TAKEN)
            w->blocks = pd_take_blocks(ev.move, &w->n);
        else if (ev.kind == PD_XE_FAILED || ev.kind == PD_XE_CLOSED)
            must(1, &ev.err);
    }
}

static void settle(struct world *w)
{
    struct pd_err e;
    do {
        flush(w, w->g, &w->to_t);
        feed(w->t, &w->to_t);
        if (pd_xfer_open(w->t)) {
            must(pd_xfer_fds(w->g, w->sock[0], 1, &e) < 0, &e);
            must(pd_xfer_fds(w->t, w->sock[1], 1, &e) < 0, &e);
        }
        while (pd_xfer_work(w->t, 1 << 24, 1)) {}
        events(w, 0);
        flush(w, w->t, &w->to_g);
        feed(w->g, &w->to_g);
        events(w, 0);
        flush(w, w->t, &w->to_g);
    } while (w->to_g.n);
}

static int by_value(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b); }

static void row(const char *name, int mib, double *v, int n, const char *unit, double goal, bool at_least)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    double p50 = v[n / 2];
    char g[40] = "null", pass[8] = "null";
    if (goal > 0) {
        snprintf(g, sizeof g, "%g", goal);
        strcpy(pass, (at_least ? p50 >= goal : p50 < goal) ? "true" : "false");
    }
    printf("{\"name\":\"xfer.%s.%dMiB\",\"value\":%.6g,\"unit\":\"%s\",\"goal\":%s,\"pass\":%s,\"n\":%d}\n", name, mib, p50, unit, g, pass, n);
    fprintf(stderr, "%-14s %5d MiB  %12.1f %-5s (best %.1f, worst %.1f)%s%s\n", name, mib, p50, unit, at_least ? v[n - 1] : v[0], at_least ? v[0] : v[n - 1],
            goal > 0 ? "  goal " : "", goal > 0 ? g : "");
}

static void size(int mib)
{
    static const size_t block_bytes = 30 * 2 * 3 * 16 * 64 * 2;
    struct pd_err e = { 0 };
    struct world w = { .in_place = true };
    uint32_t n = (uint32_t)(((size_t)mib << 20) / block_bytes), *blocks = pd_calloc(n, sizeof *blocks, "blocks", &e);
    int32_t *ids = pd_calloc((size_t)n * 16, sizeof *ids, "ids", &e);
    double offer[ROUNDS], mapped[ROUNDS], sums[ROUNDS], verify[ROUNDS], copy[ROUNDS], cpy[ROUNDS], hash[ROUNDS],
           bare[ROUNDS], whole[ROUNDS];
    must(!blocks || !ids, &e);
    must(pd_pool_new(&geom, (int64_t)(n + 1) * (int64_t)block_bytes, &w.from, &e), &e);
    must(pd_pool_new(&geom, (int64_t)(n + 1) * (int64_t)block_bytes, &w.to, &e), &e);
    must(pd_pool_take(w.from, n, blocks, &e), &e);
    for (uint32_t i = 0; i < n; i++)
        for (int l = 0; l < 30; l++)
            for (int v = 0; v < 2; v++)
                memset(pd_pool_base(w.from, blocks[i]) + pd_pool_off(w.from, l, v), (int)(i * 7 + (uint32_t)l), pd_pool_layer_bytes(w.from));
    must(pd_leases_new(&(struct pd_leases_opts){ .pool = w.from }, &w.leases, &e), &e);
    struct pd_xfer_opts o = { .unix_socket = true, .fp_fields = { fp, sizeof fp - 1 }, .pool = w.to };
    must(pd_xfer_new(&o, 1, &w.t, &e), &e);
    o.giving = true;
    o.pool = w.from;
    o.leases = w.leases;
    must(pd_xfer_new(&o, 1, &w.g, &e), &e);
    must(socketpair(AF_UNIX, SOCK_STREAM, 0, w.sock), &e);
    flush(&w, w.t, &w.to_g);
    feed(w.g, &w.to_g);
    settle(&w);
    struct pd_kvdesc d = { .fp_fields = o.fp_fields, .n_tokens = n * 16, .token_ids = ids };
    pd_sha256(fp, sizeof fp - 1, d.fp_sha, &e);
    pd_layout_from_pool(w.from, &d.layout);
    d.request.prompt = (struct pd_str){ "x", 1 };
    must(pd_request_resolve(&d.request, 0, &e), &e);
    int copies = 0, places = 0;
    for (int r = 0; r < ROUNDS; r++) {
        uint8_t lease[16];
        w.in_place = r % 2 == 0 || mib > 256;       /* some are copied: a second pool of the size */
        must(pd_run_new(d.run, &e), &e);
        must(pd_gen_new(d.gen, &e), &e);
        must(pd_lease_grant(w.leases, d.run, d.gen, blocks, n, 0, 1, lease, &e), &e);
        must(pd_lease_fill(w.leases, lease, &e), &e);
        struct pd_give g = { .desc = &d, .blocks = blocks, .via = "shm" };
        memcpy(g.lease, lease, 16);
        int64_t t0 = pd_mono_ns();
        must(pd_give(w.g, &g, 1, &w.gm, &e), &e);
        flush(&w, w.g, &w.to_t);
        int64_t t1 = pd_mono_ns();
        feed(w.t, &w.to_t);
        events(&w, t1);
        offer[r] = (double)(t1 - t0) / 1e3;
        if (w.in_place)
            mapped[places] = (double)w.took_ns / 1e3;
        flush(&w, w.t, &w.to_g);
        feed(w.g, &w.to_g);
        events(&w, 0);
        must(pd_give_finish(w.gm, &d, &e), &e);
        t0 = pd_mono_ns();
        flush(&w, w.g, &w.to_t);
        t1 = pd_mono_ns();
        sums[r] = (double)n * block_bytes / (double)(t1 - t0);
        feed(w.t, &w.to_t);
        t0 = pd_mono_ns();
        while (pd_xfer_work(w.t, 1 << 26, 1)) {}
        t1 = pd_mono_ns();
        if (w.in_place)
            verify[places++] = (double)(t1 - t0) / 1e6;
        else
            copy[copies++] = (double)n * block_bytes / (double)(t1 - t0);
        events(&w, 0);
        for (uint32_t i = 0; i < w.n; i++)
            pd_pool_put(w.to, w.blocks[i]);
        pd_free(w.blocks);
        w.blocks = NULL;
        if (w.tm && w.in_place)
            pd_take_release(w.tm, 1);
        flush(&w, w.t, &w.to_g);
        feed(w.g, &w.to_g);
        settle(&w);
    }
    /* The ceilings, of the same bytes in the same pieces. */
    size_t part = pd_pool_layer_bytes(w.from) * 8;
    uint8_t *to = pd_alloc_aligned(part, "copy", &e);
    must(!to, &e);
    for (int r = 0; r < ROUNDS; r++) {
        uint64_t x = 0;
        const uint8_t *p = pd_pool_base(w.from, blocks[0]);
        size_t all = pd_pool_slab_bytes(w.from), done = 0;
        int64_t t0 = pd_mono_ns();
        for (size_t at = 0; at + part <= all; at += part, done += part)
            x ^= pd_xxh3(p + at, part, 1);
        int64_t t1 = pd_mono_ns();
        for (size_t at = 0; at + part <= all; at += part)
            memcpy(to, p + at, part);
        hash[r] = (double)done / (double)(t1 - t0) + (double)(x == 1);
        cpy[r] = (double)done / (double)(pd_mono_ns() - t1);
    }
    uint32_t *there = copies ? pd_calloc(n, sizeof *there, "blocks", &e) : NULL;
    if (copies) {
        must(!there, &e);
        must(pd_pool_take(w.to, n, there, &e), &e);
    }
    for (int r = 0; copies && r < ROUNDS; r++) {
        size_t slab = pd_pool_slab_bytes(w.from), piece = pd_pool_layer_bytes(w.from), done = 0;
        uint32_t slabs = pd_pool_slabs(w.from) < pd_pool_slabs(w.to) ? pd_pool_slabs(w.from) : pd_pool_slabs(w.to), per = pd_pool_slab_blocks(w.from);
        int64_t t0 = pd_mono_ns();
        for (uint32_t k = 0; k < slabs; k++, done += slab)
            memcpy(pd_pool_base(w.to, k * per), pd_pool_base(w.from, k * per), slab);
        int64_t t1 = pd_mono_ns();
        for (int l = 0; l < 30; l++)
            for (uint32_t b = 0; b < n; b += 8)         /* a chunk: K of some blocks, V of them */
                for (int v = 0; v < 2; v++)
                    for (uint32_t i = b; i < n && i < b + 8; i++)
                        memcpy(pd_pool_base(w.to, there[i]) + pd_pool_off(w.to, l, v), pd_pool_base(w.from, blocks[i]) + pd_pool_off(w.from, l, v), piece);
        bare[r] = (double)n * block_bytes / (double)(pd_mono_ns() - t1);
        whole[r] = (double)done / (double)(t1 - t0);
    }
    for (uint32_t i = 0; copies && i < n; i++)
        pd_pool_put(w.to, there[i]);
    pd_free(there);
    row("offer_us", mib, offer, ROUNDS, "us", 0, false);
    row("mapped_us", mib, mapped, places, "us", 1000, false);
    row("sums", mib, sums, ROUNDS, "GB/s", 0, true);
    row("verify_ms", mib, verify, places, "ms", 0, false);
    if (copies) {
        row("copy_verified", mib, copy, copies, "GB/s", 0, true);
        row("copy", mib, bare, ROUNDS, "GB/s", 0, true);
        row("memcpy", mib, whole, ROUNDS, "GB/s", 0, true);
    }
    row("xxh3", mib, hash, ROUNDS, "GB/s", 0, true);
    row("memcpy_cached", mib, cpy, ROUNDS, "GB/s", 0, true);
    pd_free(to);
    pd_xfer_free(w.g);
    pd_xfer_free(w.t);
    pd_leases_free(w.leases);
    pd_pool_free(w.from);
    pd_pool_free(w.to);
    pd_buf_free(&w.to_t);
    pd_buf_free(&w.to_g);
    close(w.sock[0]);
    close(w.sock[1]);
    pd_free(ids);
    pd_free(blocks);
}

int main(int argc, char **argv)
{
    static const int usual[] = { 64, 256, 1024 };
    for (int i = 1; i < argc; i++)
        size(atoi(argv[i]));
    for (int i = 0; argc == 1 && i < 3; i++)
        size(usual[i]);
    return 0;
}
