#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/uio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../base/stop.h"
#include "../wire/pack.h"
#include "probe.h"
#include "sender_chan.h"

enum { STEP_RECORDS = 64, BLOCK = 4096, PAD = 1 << 20, PINGS = 200, MAX_N = 200, PIECES = 256 };
static const uint64_t sizes[] = { 4ull << 10, 16ull << 10, 64ull << 10, 256ull << 10, 1ull << 20, 4ull << 20, 16ull << 20, 64ull << 20, 256ull << 20 };
#define PATIENCE_US 30000000

struct probe {
    const struct pd_probe_opts *o;
    struct pd_probe *out;
    struct pd_endpoint ep;
    struct pd_chan c;
    struct pd_pool *pool;
    struct pd_leases *leases;
    struct pd_buf fp;
    uint32_t *blocks, n_blocks;
    int32_t *tokens;
    bool ready, pong, more /* records came that no step has looked at */;
    struct pd_move *m;
    int64_t verified_us;
    struct pd_err failed;               /* of the move */
    struct pd_err none[PD_TRANSPORTS];  /* by its number: it did not carry a single KV, and why */
};

/* ---- what is sent ---- */

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static int make_kv(struct probe *p, uint64_t bytes, struct pd_err *e)
{
    struct pd_pool_geom g = { .layers = 1, .kv_heads = 8, .head_dim = 128, .block_size = 1, .dtype = PD_F16 };
    struct pd_leases_opts lo = { .max = 16 };
    struct pd_packer k;
    p->n_blocks = (uint32_t)(bytes / BLOCK);
    int rc = pd_pool_new(&g, (int64_t)bytes + (64 << 20), &p->pool, e);
    lo.pool = p->pool;
    rc = rc ? rc : pd_leases_new(&lo, &p->leases, e);
    if (rc)
        return rc;
    if (!(p->blocks = pd_calloc(p->n_blocks, sizeof *p->blocks, "blocks", e)) || !(p->tokens = pd_calloc(p->n_blocks, sizeof *p->tokens, "tokens", e)))
        return PD_ENOMEM;
    if ((rc = pd_pool_take_raw(p->pool, p->n_blocks, p->blocks, e)))
        return rc;
    for (uint32_t i = 0; i < p->n_blocks; i++)
        for (int v = 0; v < 2; v++) {
            uint8_t *to = pd_pool_base(p->pool, p->blocks[i]) + pd_pool_off(p->pool, 0, v);
            for (uint32_t w = 0; w < BLOCK / 2 / 8; w++) {
                uint64_t x = mix(((uint64_t)i * 2 + (uint64_t)v) * (BLOCK / 16) + w);
                memcpy(to + 8 * w, &x, 8);
            }
        }
    pd_pack_init(&k, &p->fp, e);
    msgpack_pack_map(&k.pk, 1);
    pd_pack_text(&k, "probe");
    msgpack_pack_int(&k.pk, 1);
    return k.rc;
}

/* ---- the connection ---- */

static int lost(struct probe *p, const char *why, struct pd_err *e) { return pd_fail(e, PD_ECANCEL, "%s: the connection was lost: %s", p->o->at, why); }

static int on_events(struct probe *p, struct pd_err *e)
{
    struct pd_xfer_event ev;
    while (pd_xfer_event(p->c.x, &ev))
        switch (ev.kind) {
        case PD_XE_READY: p->ready = true; break;
        case PD_XE_CLOSED:
            *e = ev.err;
            return pd_err_prefix(e, "%s%s", p->o->at, p->ready ? "" : ": no pd-kvsend takes probes there");
        case PD_XE_VERIFIED: p->verified_us = pd_mono_us(); break;
        case PD_XE_RELEASED: p->m = NULL; break;
        case PD_XE_FAILED: case PD_XE_CANCELLED:
            p->failed = ev.err;
            p->m = NULL;
            break;
        default: break;
        }
    return 0;
}

/* One round: read, write, wait at the most wait_ms for something to do. */
static int step(struct probe *p, int wait_ms, struct pd_err *e)
{
    struct pd_rec rec;
    bool bad;
    int rc;
    if (pd_stop_level())
        return pd_fail(e, PD_ECANCEL, "interrupted");
    int64_t now = pd_mono_us();
    pd_xfer_tick(p->c.x, now);
    pd_chan_raw(&p->c, now);
    if ((rc = on_events(p, e)) || (rc = pd_chan_flush(&p->c, now, e)) < 0)
        return rc;
    struct pollfd f[3] = { { .fd = p->c.fd, .events = (short)(POLLIN | (rc == 1 ? POLLOUT : 0)) }, { .fd = p->c.raw, .events = p->c.raw_waits ? POLLOUT : 0 },
                           { .fd = pd_xfer_fd(p->c.x), .events = POLLIN } };
    bool held = p->more || (p->c.tls && pd_tls_pending(p->c.tls));
    if (!held && poll(f, 3, wait_ms) < 0 && errno != EINTR)
        return pd_fail_sys(e, "poll");
    if (!held && !(f[0].revents & (POLLIN | POLLHUP | POLLERR)))
        return 0;
    p->more = true;
    for (int i = 0; i < STEP_RECORDS && (p->more = (rc = pd_chan_next(&p->c, &rec, &bad, now, e)) == 1); i++) {
        struct pd_arena mem = { 0 };
        struct pd_status s;
        if (rec.kind == PD_K_STATUS && pd_status_decode(rec.p, rec.n, &mem, &s, e) == 0 && !strcmp(s.state, "open"))
            p->pong = true;
        else if (rec.kind != PD_K_CARRY)
            pd_xfer_feed(p->c.x, rec.p, rec.n, pd_mono_us(), NULL);
        pd_arena_free(&mem);
    }
    if ((rc = on_events(p, e)))
        return rc;
    return p->c.eof ? lost(p, e->code ? e->msg : "the other end closed it", e) : 0;
}

static int until(struct probe *p, const bool *what, struct pd_err *e)
{
    int64_t end = pd_mono_us() + PATIENCE_US;
    int rc = 0;
    while (!rc && !*what)
        rc = pd_mono_us() >= end ? pd_fail(e, PD_ETIME, "%s: no answer within %d s", p->o->at, PATIENCE_US / 1000000) : step(p, 1000, e);
    return rc;
}

static int ping(struct probe *p, struct pd_err *e)
{
    struct pd_status s = { .bytes = 0 };
    struct pd_buf b = { 0 };
    p->pong = false;
    int rc = pd_status_encode(&s, &b, e);
    rc = rc ? rc : pd_xfer_say(p->c.x, b.p, b.n, e);
    pd_buf_free(&b);
    return rc ? rc : until(p, &p->pong, e);
}

static int open_it(struct probe *p, struct pd_err *e)
{
    int rc = pd_endpoint_open_out(p->o->at, p->o->net, &p->ep, e);
    if (rc)
        return rc;
    pd_chan_of(&p->c, &p->ep, p->o->at);
    p->c.giving = true;
    struct pd_xfer_opts o = { .giving = true, .relay = true, .probe = true, .via = p->o->via, .worker = p->o->worker,
        .fp_fields = { p->fp.p, p->fp.n }, .pool = p->pool, .leases = p->leases, .accept_us = PATIENCE_US, .stall_us = PATIENCE_US };
    if ((rc = pd_chan_reader(&p->c, p->o->at, p->o->max_record + 64, e)) || (rc = pd_chan_xfer(&p->c, &o, p->o->net, pd_mono_us(), e)) || (rc = until(p, &p->ready, e)))
        return rc;
    if (!pd_hello_can(pd_xfer_peer(p->c.x), "relay"))
        return pd_fail(e, PD_EINCOMPAT, "%s: what listens there is no pd-kvsend, and takes no probes", p->o->at);
    int64_t end = pd_mono_us() + PATIENCE_US;
    while (pd_chan_raw_awaited(&p->c, pd_mono_us()) && pd_mono_us() < end)
        if ((rc = step(p, 10, e)))
            return rc;
    return 0;
}

/* ---- measuring ---- */

static int transfer(struct probe *p, const char *scheme, uint64_t bytes, int64_t *us, struct pd_err *e)
{
    struct pd_kvdesc d = { .n_tokens = (uint32_t)(bytes / BLOCK), .token_ids = p->tokens, .fp_fields = { p->fp.p, p->fp.n } };
    struct pd_give g = { .desc = &d, .blocks = p->blocks, .via = scheme };
    bool over = false;
    int rc = pd_run_new(d.run, e);
    rc = rc ? rc : pd_gen_new(d.gen, e);
    rc = rc ? rc : pd_sha256(p->fp.p, p->fp.n, d.fp_sha, e);
    rc = rc ? rc : pd_request_resolve(&d.request, 0, e);
    memcpy(d.request.run, d.run, sizeof d.run);
    pd_layout_from_pool(p->pool, &d.layout);
    rc = rc ? rc : pd_lease_grant(p->leases, d.run, d.gen, p->blocks, d.n_tokens, 0, pd_mono_us(), g.lease, e);
    rc = rc ? rc : pd_lease_fill(p->leases, g.lease, e);
    if (rc)
        return rc;
    int64_t from = pd_mono_us(), end = from + PATIENCE_US;
    p->failed.code = 0;
    rc = pd_give(p->c.x, &g, from, &p->m, e);
    if (rc == PD_EINCOMPAT) {   /* it cannot carry it */
        p->failed = *e;
        p->m = NULL;
        rc = 0;
    } else
        rc = rc ? rc : pd_give_finish(p->m, &d, e);
    while (!rc && p->m && !over) {
        rc = step(p, 1000, e);
        over = pd_mono_us() > end;
    }
    pd_leases_sweep(p->leases, pd_mono_us());
    over &= p->m != NULL;
    if (!rc && over)            /* another way may be good */
        pd_move_cancel(p->m, "too slow", pd_mono_us());
    while (!rc && p->m)
        rc = step(p, 1000, e);
    if (!rc && over)
        pd_fail(&p->failed, PD_ETIME, "%s: %llu bytes by %s were not verified within %d s", p->o->at, (unsigned long long)bytes, scheme, PATIENCE_US / 1000000);
    if (!rc && p->failed.code) {
        *e = p->failed;
        pd_lease_revoke(p->leases, g.lease, "failed", pd_mono_us(), NULL);
        return 1;               /* the connection goes on */
    }
    *us = p->verified_us - from;
    return rc;
}

/* As many bytes in records that mean nothing, then a word that comes back when they have been read. */
static int pad(struct probe *p, uint64_t bytes, const uint8_t *what, int64_t *us, struct pd_err *e)
{
    int rc = 0;
    int64_t from = pd_mono_us();
    for (uint64_t left = bytes; !rc && left;) {
        size_t n = left < PAD ? (size_t)left : PAD;
        struct pd_buf head = { 0 };
        struct pd_packer k;
        pd_pack_init(&k, &head, e);
        msgpack_pack_map(&k.pk, 3);
        pd_pack_text(&k, "pd");
        pd_pack_text(&k, "padding");
        pd_pack_text(&k, "v");
        msgpack_pack_int(&k.pk, 1);
        pd_pack_text(&k, "data");
        msgpack_pack_bin(&k.pk, n);
        rc = k.rc;
        struct iovec v[2] = { { head.p, head.n }, { (void *)(uintptr_t)what, n } };
        for (int at = 0; !rc && at < 2;) {
            size_t wrote;
            rc = pd_chan_writev(&p->c, v + at, 2 - at, &wrote, e);
            if (rc == 1) {
                struct pollfd f = { .fd = p->c.fd, .events = POLLOUT };
                poll(&f, 1, 1000);
                rc = pd_stop_level() ? pd_fail(e, PD_ECANCEL, "interrupted") : pd_mono_us() - from <= PATIENCE_US ? 0 :
                     pd_fail(e, PD_ETIME, "%s: %llu bytes were not read within %d s", p->o->at, (unsigned long long)bytes, PATIENCE_US / 1000000);
            }
            for (; at < 2 && wrote; at += !v[at].iov_len) {
                size_t one = wrote < v[at].iov_len ? wrote : v[at].iov_len;
                v[at].iov_base = (char *)v[at].iov_base + one;
                v[at].iov_len -= one;
                wrote -= one;
            }
        }
        pd_buf_free(&head);
        left -= n;
    }
    rc = rc ? rc : ping(p, e);
    *us = pd_mono_us() - from;
    return rc;
}

static int by_time(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int64_t at_share(int64_t *us, uint32_t n, double share)
{
    qsort(us, n, sizeof *us, by_time);
    uint32_t i = (uint32_t)(share * n);
    return us[i < n ? i : n - 1];
}

static double rate(uint64_t bytes, int64_t us) { return (double)bytes * 1e6 / (double)(us > 0 ? us : 1); }

static int ceiling(struct probe *p, const char *scheme, uint64_t bytes, uint32_t n, uint8_t *room, double *bytes_s, struct pd_err *e)
{
    int64_t us[MAX_N];
    int rc = 0;
    n = n < 3 ? 3 : n > 20 ? 20 : n;
    for (uint32_t i = 0; !rc && i < n; i++) {
        int64_t from = pd_mono_us();
        if (strcmp(scheme, "shm"))
            rc = pad(p, bytes, room, &us[i], e);
        else {
            for (uint64_t at = 0; at < bytes; at += PAD) {      /* from the same memory */
                size_t one = bytes - at < PAD ? (size_t)(bytes - at) : PAD;
                memcpy(room + at, pd_pool_base(p->pool, p->blocks[0]) + at % (32 << 20), one);
            }
            us[i] = pd_mono_us() - from;
        }
    }
    *bytes_s = rc ? 0 : rate(bytes, at_share(us, n, 0.5));
    return rc;
}

static int measure(struct probe *p, const char *scheme, uint64_t bytes, uint8_t *room, struct pd_err *e)
{
    struct pd_probe *o = p->out;
    struct pd_probe_row *r = &o->row[o->n_rows];
    int64_t us[MAX_N];
    uint32_t n = bytes <= 64 << 10 ? MAX_N : bytes <= 1 << 20 ? 50 : bytes <= 16 << 20 ? 10 : 4;
    *r = (struct pd_probe_row){ .bytes = bytes, .n = n };
    snprintf(r->scheme, sizeof r->scheme, "%s", scheme);
    int rc = transfer(p, scheme, bytes, &r->cold_us, e);
    for (uint32_t i = 0; !rc && i < n; i++)
        rc = transfer(p, scheme, bytes, &us[i], e);
    if (rc)
        return rc;
    r->p50_us = at_share(us, n, 0.5);
    r->p99_us = at_share(us, n, 0.99);
    r->bytes_s = rate(bytes, r->p50_us);
    if ((rc = ceiling(p, scheme, bytes, n, room, &r->ceiling_bytes_s, e)))
        return rc;
    o->n_rows++;
    pd_progress("%s: %llu KiB, %.2f GB/s", scheme, (unsigned long long)(bytes >> 10), r->bytes_s / 1e9);
    return 0;
}

/* ---- what should have been ---- */

static bool listed(const struct pd_hello *h, const char *scheme)
{
    for (uint32_t i = 0; i < h->n_via; i++)
        if (pd_str_eq(h->via[i], scheme))
            return true;
    return false;
}

/* It has one that can be used, or one that cannot: not where there is none, and that is all. Of who does not list rdma it is not known. */
static bool has_device(const struct pd_hello *h) { return !h->has_rdma || h->rdma.qp || !pd_str_eq(h->rdma.why, PD_RDMA_NONE); }

/* Why that one carried nothing, or NULL. */
static const char *why_not(const struct probe *p, const char *scheme)
{
    const char *why = pd_xfer_unused(p->c.x, scheme);
    if (!why && !strcmp(scheme, "shm") && p->c.raw_dead)
        why = p->c.raw_why;
    const struct pd_err *e = &p->none[pd_transport_number(scheme)];
    return why ? why : e->code ? e->msg : NULL;
}

/* Afterwards: what carried KV, and what is faster, and did not although it should have. */
static void find_slow(struct probe *p)
{
    struct pd_probe *o = p->out;
    const struct pd_hello *mine = pd_xfer_own(p->c.x), *theirs = pd_xfer_peer(p->c.x);
    const char *first, *why;
    uint32_t k = 0;
    while ((first = pd_xfer_scheme(p->c.x, k)) && why_not(p, first))
        k++;
    const struct { const char *scheme; bool should; } all[] = { { "shm", o->one_host && p->c.unix_socket },
        { "rdma", mine->has_rdma && has_device(mine) && has_device(theirs) }, { "tcp", !p->c.unix_socket } };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const char *s = all[i].scheme;
        if (first && !strcmp(s, first))
            return;
        if (!all[i].should || !listed(mine, s))
            continue;
        why = listed(theirs, s) ? why_not(p, s) : "the other end does not allow it (its --via)";
        size_t own = strlen(s);
        if (why && !strncmp(why, s, own) && !strncmp(why + own, ": ", 2))
            why += own + 2;
        pd_fail(&o->slow, PD_EFAIL, "%s: %s should have been used and was not: %s", p->o->at, s, why ? why : "the other end prefers another way (its --via)");
        return;
    }
}

int pd_probe_run(const struct pd_probe_opts *opts, struct pd_probe *out, struct pd_err *e)
{
    struct probe p = { .o = opts, .out = out, .ep = { .fd = -1 } };
    uint64_t max = opts->max_bytes ? opts->max_bytes : sizes[sizeof sizes / sizeof *sizes - 1];
    int64_t us[PINGS];
    uint8_t *room = NULL;
    *out = (struct pd_probe){ .n_rows = 0 };
    pd_chan_init(&p.c);
    if (!pd_ep_dials(opts->at))
        return pd_fail(e, PD_EUSAGE, "--probe: '%s' cannot be dialled (example: --probe unix:/run/pd/kv.sock)", opts->at);
    int rc = make_kv(&p, max, e);
    rc = rc ? rc : open_it(&p, e);
    if (!rc && !(room = pd_alloc_aligned(max > PAD ? max : PAD, "room", e)))
        rc = PD_ENOMEM;
    if (rc)
        goto out;
    memset(room, 7, max > PAD ? max : PAD);
    const struct pd_hello *mine = pd_xfer_own(p.c.x), *theirs = pd_xfer_peer(p.c.x);
    snprintf(out->from, sizeof out->from, "%.99s", opts->worker ? opts->worker : "");
    snprintf(out->to, sizeof out->to, "%.*s", theirs->worker.n < 99 ? (int)theirs->worker.n : 99, theirs->worker.p ? theirs->worker.p : "");
    snprintf(out->at, sizeof out->at, "%s", opts->at);
    snprintf(out->via, sizeof out->via, "%s", pd_xfer_via(p.c.x));
    out->one_host = mine->has_boot && theirs->has_boot && !memcmp(mine->boot, theirs->boot, sizeof mine->boot);
    for (uint32_t i = 0; !rc && i < PINGS; i++) {
        us[i] = pd_mono_us();
        rc = ping(&p, e);
        us[i] = pd_mono_us() - us[i];
    }
    if (!rc) {
        out->ping_p50_us = at_share(us, PINGS, 0.5);
        out->ping_p99_us = at_share(us, PINGS, 0.99);
    }
    const char *scheme;
    for (uint32_t k = 0; !rc && (scheme = pd_xfer_scheme(p.c.x, k)); k++)
        for (size_t i = 0; !rc && i < sizeof sizes / sizeof *sizes && sizes[i] <= max && !why_not(&p, scheme); i++)
            if ((rc = measure(&p, scheme, sizes[i], room, e)) == 1) {
                *(i ? &out->cut : &p.none[pd_transport_number(scheme)]) = *e;
                rc = 0;
                break;
            }
    if (rc == PD_ETIME && out->n_rows) {        /* too slow for so much: what was measured counts, the connection is of no more use */
        out->cut = *e;
        rc = 0;
    }
    pd_progress_end();
    for (uint32_t k = 0; !rc && k < PD_TRANSPORTS && !out->none.code; k++)
        if (p.none[k].code)
            pd_fail(&out->none, p.none[k].code, "%s: %s", pd_transports[k]->scheme, p.none[k].msg);
    if (!rc && !out->n_rows && out->none.code) {
        *e = out->none;
        rc = e->code;
    }
    if (!rc)
        find_slow(&p);
out:
    pd_free(room);
    pd_chan_close(&p.c);
    pd_endpoint_abort(&p.ep);
    pd_leases_free(p.leases);
    for (uint32_t i = 0; p.blocks && i < p.n_blocks && pd_pool_stats(p.pool).used; i++)
        pd_pool_put(p.pool, p.blocks[i]);
    pd_pool_free(p.pool);
    pd_free(p.blocks);
    pd_free(p.tokens);
    pd_buf_free(&p.fp);
    return rc < 0 ? rc : 0;
}

/* ---- telling ---- */

int pd_probe_text(const struct pd_probe *p, struct pd_buf *b, struct pd_err *e)
{
    int rc = pd_buf_printf(b, e, "%s, %s: KV goes by %s\na word there and back: %lld us (P99 %lld)\n%-8s %9s %5s %11s %11s %11s %9s %9s %6s\n", p->at,
                           p->one_host ? "on this host" : "another host", p->via, (long long)p->ping_p50_us, (long long)p->ping_p99_us, "scheme", "bytes", "n", "cold us",
                           "P50 us", "P99 us", "GB/s", "ceiling", "%");
    for (uint32_t i = 0; !rc && i < p->n_rows; i++) {
        const struct pd_probe_row *r = &p->row[i];
        bool mib = r->bytes >= 1 << 20;
        rc = pd_buf_printf(b, e, "%-8s %5llu %s %5u %11lld %11lld %11lld %9.3f %9.3f %6.1f\n", r->scheme, (unsigned long long)(r->bytes >> (mib ? 20 : 10)),
                           mib ? "MiB" : "KiB", r->n, (long long)r->cold_us, (long long)r->p50_us,
                           (long long)r->p99_us, r->bytes_s / 1e9, r->ceiling_bytes_s / 1e9, 100 * r->bytes_s / r->ceiling_bytes_s);
    }
    if (!rc && p->none.code)
        rc = pd_buf_printf(b, e, "one carried nothing: %s\n", p->none.msg);
    if (!rc && p->cut.code)
        rc = pd_buf_printf(b, e, "larger ones were left out: %s\n", p->cut.msg);
    return rc;
}

/* Latency is that of the smallest transfer, bandwidth that of the largest, by the best transport. */
int pd_probe_record(const struct pd_probe *p, struct pd_buf *b, struct pd_err *e)
{
    struct pd_packer k;
    const struct pd_probe_row *small = p->n_rows ? &p->row[0] : NULL, *large = small;
    for (uint32_t i = 0; i < p->n_rows && !strcmp(p->row[i].scheme, small->scheme); i++)
        large = &p->row[i];
    pd_pack_init(&k, b, e);
    msgpack_pack_map(&k.pk, small ? 13 : 10);
    pd_pack_text(&k, "pd"); pd_pack_text(&k, "path");
    pd_pack_text(&k, "v"); msgpack_pack_int(&k.pk, 1);
    pd_pack_text(&k, "from"); pd_pack_text(&k, p->from);
    pd_pack_text(&k, "to"); pd_pack_text(&k, p->to);
    pd_pack_text(&k, "at"); pd_pack_text(&k, p->at);
    pd_pack_text(&k, "class"); pd_pack_text(&k, p->one_host ? "local" : "cross");
    pd_pack_text(&k, "via"); pd_pack_text(&k, p->via);
    pd_pack_text(&k, "slow"); p->slow.code ? pd_pack_text(&k, p->slow.msg) : (void)msgpack_pack_nil(&k.pk);
    pd_pack_text(&k, "ping_us");
    msgpack_pack_array(&k.pk, 2);
    msgpack_pack_int64(&k.pk, p->ping_p50_us);
    msgpack_pack_int64(&k.pk, p->ping_p99_us);
    if (small) {
        pd_pack_text(&k, "scheme"); pd_pack_text(&k, small->scheme);
        pd_pack_text(&k, "latency_us");
        msgpack_pack_array(&k.pk, 2);
        msgpack_pack_int64(&k.pk, small->p50_us);
        msgpack_pack_int64(&k.pk, small->p99_us);
        pd_pack_text(&k, "bandwidth"); pd_pack_float(&k, "bandwidth", large->bytes_s);
    }
    pd_pack_text(&k, "rows");
    msgpack_pack_array(&k.pk, p->n_rows);
    for (uint32_t i = 0; i < p->n_rows; i++) {
        const struct pd_probe_row *r = &p->row[i];
        msgpack_pack_map(&k.pk, 8);
        pd_pack_text(&k, "scheme"); pd_pack_text(&k, r->scheme);
        pd_pack_text(&k, "bytes"); msgpack_pack_uint64(&k.pk, r->bytes);
        pd_pack_text(&k, "n"); msgpack_pack_uint32(&k.pk, r->n);
        pd_pack_text(&k, "cold_us"); msgpack_pack_int64(&k.pk, r->cold_us);
        pd_pack_text(&k, "p50_us"); msgpack_pack_int64(&k.pk, r->p50_us);
        pd_pack_text(&k, "p99_us"); msgpack_pack_int64(&k.pk, r->p99_us);
        pd_pack_text(&k, "bytes_s"); pd_pack_float(&k, "bytes_s", r->bytes_s);
        pd_pack_text(&k, "ceiling_bytes_s"); pd_pack_float(&k, "ceiling_bytes_s", r->ceiling_bytes_s);
    }
    return k.rc;
}
