/* One list of faults, by each way that KV can take: damage, loss, repetition, stale and forged words, wrong keys, late writers, peers that stop, vanish, starve,
 * flood or crawl. Each time what is used is right to the bit or nothing is used; the run is then computed (here: given) again and arrives; and every count, of
 * blocks, leases, hand-overs and descriptors, is back at its start. In the guest of scripts/rdma-vm the same by rdma, over two devices. */
#include <signal.h>
#include "xfer_live.h"

#define KEYS "new 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n"
static enum way first_way = INLINE, last_way = TLS;
#define EACH_WAY(y) for (enum way y = first_way; y <= last_way; y++)
#define SAY(y, what, words, ...) fail_msg("%s: %s: " words, way_name[y], what, ##__VA_ARGS__)

static void done_with(struct xf *w, int fds)
{
    xf_close(w);
    assert_int_equal(fds_of(), fds);
}

static void advance(struct xf *w, int64_t us)
{
    w->now += us;
    pd_xfer_tick(w->g, w->now);
    pd_leases_sweep(w->leases, w->now);
    pd_xfer_tick(w->t, w->now);
    xf_events(w);
}

/* ---- damage on the way ---- */

/* R: it arrives all the same. C: the run fails as corrupt, and the connection lives. T: it fails in time. X: the connection ends, and over the next one it goes on. */
struct damage { const char *what; void (*how)(struct xf *w, enum way y, struct load *l, int i); char want[WAYS + 1]; };

static void flip(struct xf *w, enum way y, struct load *l, int i)
{
    size_t n;
    if (way_sums(y))
        in_memory(w, y, (uint32_t)(i * 7), 1)[3] ^= 4;
    else {
        uint8_t *p = bytes_of(y, &l->u[l->payload[i * (l->n_payload - 1) / 2]], &n);
        p[n / 2] ^= 4;
    }
}

static void swap_bytes(uint8_t *a, uint8_t *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint8_t t = a[i];
        a[i] = b[i];
        b[i] = t;
    }
}

static void swap_units(struct load *l, int a, int b)
{
    struct unit t = l->u[a];
    l->u[a] = l->u[b];
    l->u[b] = t;
}

/* Right bytes in a wrong place: another layer, another block. */
static void swap(struct xf *w, enum way y, struct load *l, int i)
{
    size_t n, m;
    if (way_sums(y))
        swap_bytes(in_memory(w, y, 0, 0), in_memory(w, y, (uint32_t)(i + 1) * 2, 0), pd_pool_layer_bytes(w->pool));
    else if (y == TLS)
        swap_units(l, i, i + 1);
    else {
        uint8_t *a = bytes_of(y, &l->u[l->payload[0]], &n), *b = bytes_of(y, &l->u[l->payload[i + 1]], &m);
        assert_int_equal(n, m);
        swap_bytes(a, b, n);
    }
}

static void repeat(struct xf *w, enum way y, struct load *l, int i)
{
    int at = l->payload[i * (l->n_payload - 1) / 2];
    struct unit u = l->u[at];
    assert_true(l->n < 300);
    memmove(l->u + at + 1, l->u + at, (size_t)(l->n++ - at) * sizeof u);
    l->u[at].p = malloc(u.n);
    memcpy(l->u[at].p, u.p, u.n);
}

static void reorder(struct xf *w, enum way y, struct load *l, int i)
{
    for (int a = i, b = l->n_payload - 1; a < b; a++, b--)
        swap_units(l, l->payload[a], l->payload[b]);
}

static void lose(struct xf *w, enum way y, struct load *l, int i) { l->u[l->payload[i * (l->n_payload - 1) / 2]].n = 0; }

static const struct damage damages[] = { { "a flipped bit", flip, "CCCCCXC" }, { "chunks in each other's place", swap, "CCCCCXC" }, { "a chunk that comes twice", repeat, "CCCCCXC" },
                                         { "chunks in another order", reorder, "RRRRRXR" }, { "a chunk that does not come", lose, "CCCCTXC" } };

static void damaged(void **state)
{
    EACH_WAY (y)
        for (size_t k = 0; k < sizeof damages / sizeof *damages; k++)
            for (int i = 0; i < 3; i++) {
                const struct damage *d = &damages[k];
                struct xf w;
                struct load l;
                int fds = fds_of();
                if (d->how == reorder && i)
                    break;
                way_begin(&w, y);
                w.dam = true;
                way_finish(&w);
                gather(&w, y, &l);
                d->how(&w, y, &l, i);
                pass_on(&w, y, &l);
                xf_pump(&w);
                char want = y == TLS && d->how == lose && i == 2 ? 'T' : d->want[y];    /* after the last one nothing shows the gap */
                if (want == 'T') {
                    if (w.got[1][PD_XE_FAILED])
                        SAY(y, d->what, "ended before its time: %s", w.last[1].err.msg);
                    advance(&w, 30000000);
                }
                bool open = pd_xfer_open(w.g) && pd_xfer_open(w.t);
                int code = w.last[1].err.code;
                if (want == 'R' ? !xf_same(&w) : w.got[1][PD_XE_TAKEN] || open == (want == 'X') || (want == 'C' && code != PD_ECORRUPT) || (want == 'T' && code != PD_ETIME))
                    SAY(y, d->what, "(%d) taken %u, the connection is %s; %d %s", i, w.got[1][PD_XE_TAKEN], open ? "open" : "closed", code, w.last[1].err.msg);
                if (y == TLS && want == 'T') {          /* now anything would */
                    pd_xfer_lost(w.g, "cut", w.now);
                    pd_xfer_lost(w.t, "cut", w.now);
                }
                way_again(&w, y, d->what);
                done_with(&w, fds);
            }
}

/* ---- the commit ---- */

/* Verified, used, and the giver does not hear of it: over the next connection it does, once or twice, and the lease ends once. */
static void lost_commit(void **state)
{
    EACH_WAY (y)
        for (int what = 0; what < 2; what++) {
            struct xf w;
            struct pd_err e;
            struct pd_lease_counts n;
            char run[PD_RUN_LEN + 1];
            uint8_t gen[PD_GEN_LEN], lease[PD_LEASE_ID_LEN];
            int fds = fds_of();
            way_begin(&w, y);
            w.lose[0] = what ? 1u << PD_K_VERIFIED | 1u << PD_K_RELEASE : 1u << PD_K_RELEASE;
            way_finish(&w);
            xf_pump(&w);
            assert_true(xf_same(&w));
            memcpy(run, pd_move_run(w.tm), sizeof run);
            memcpy(gen, pd_move_gen(w.tm), sizeof gen);
            bool has = pd_move_lease(w.tm) != NULL;
            if (has)
                memcpy(lease, pd_move_lease(w.tm), sizeof lease);
            way_used(&w);
            assert_int_equal(w.got[1][PD_XE_RELEASED], 0);
            pd_xfer_lost(w.g, "cut", w.now);
            pd_xfer_lost(w.t, "cut", w.now);
            xf_events(&w);
            assert_int_equal(w.got[1][PD_XE_UNACKED], 1);
            n = pd_leases_counts(w.leases);
            assert_int_equal(n.live, 1);
            w.lose[0] = 0;
            xf_close_ends(&w);
            way_ends(&w, y);
            for (int twice = 0; twice < 2; twice++) {
                assert_int_equal(pd_xfer_commit(w.t, run, gen, has ? lease : NULL, w.now, &e), 0);
                xf_pump(&w);
                n = pd_leases_counts(w.leases);
                if (n.live || n.released != 1 || !pd_xfer_open(w.g))
                    SAY(y, "a lost commit", "%u live, %u released, %s", n.live, (unsigned)n.released, w.last[0].err.msg);
            }
            way_again(&w, y, "a lost commit");
            done_with(&w, fds);
        }
}

/* Each closing word twice: nothing is taken twice, no lease ends twice. */
static void doubled_commit(void **state)
{
    static const struct { int to; enum pd_kind kind; const char *what; } t[] = { { 0, PD_K_VERIFIED, "verified, twice" }, { 0, PD_K_RELEASE, "release, twice" },
        { 0, PD_K_ACCEPT, "accept, twice" }, { 1, PD_K_DONE, "done, twice" }, { 1, PD_K_KV, "kv, twice" }, { 1, PD_K_OFFER, "offer, twice" }, { 1, PD_K_STATUS, "released, twice" } };
    EACH_WAY (y)
        for (size_t k = 0; k < sizeof t / sizeof *t; k++) {
            struct xf w;
            int fds = fds_of();
            way_open(&w, y);
            w.twice[t[k].to] = (uint64_t)1 << t[k].kind;
            way_give(&w, y, false);
            xf_pump(&w);
            if (w.gm)
                way_finish(&w);
            xf_pump(&w);
            if (w.got[1][PD_XE_TAKEN] > 1 || (w.got[1][PD_XE_TAKEN] && !xf_same(&w)))
                SAY(y, t[k].what, "taken %u times", w.got[1][PD_XE_TAKEN]);
            if ((t[k].kind == PD_K_VERIFIED || t[k].kind == PD_K_RELEASE || t[k].kind == PD_K_STATUS) && (!pd_xfer_open(w.g) || !pd_xfer_open(w.t) || !w.got[1][PD_XE_TAKEN]))
                SAY(y, t[k].what, "it is no harm: %s; %s", w.last[0].err.msg, w.last[1].err.msg);
            way_used(&w);
            way_again(&w, y, t[k].what);
            done_with(&w, fds);
        }
}

/* ---- words of another time ---- */

/* All that was said of a generation that is over is said again while its successor is on its way. */
static void stale_generation(void **state)
{
    EACH_WAY (y) {
        struct xf w;
        struct pd_buf old = { 0 }, stream = { 0 };
        int fds = fds_of();
        way_open(&w, y);
        struct load l = { .n = 0 };
        way_give(&w, y, false);
        xf_pump(&w);
        w.dam = true;
        way_finish(&w);
        hold_back(&w);
        pd_buf_add(way_streams(y) ? &stream : &old, way_streams(y) ? w.dammed.p : w.to_t.p, way_streams(y) ? w.dammed.n : w.to_t.n, NULL);
        if (way_streams(y))
            pd_buf_add(&old, w.to_t.p, w.to_t.n, NULL);
        load_add(&l, w.dammed.p ? w.dammed.p : (uint8_t *)"", w.dammed.n, true);
        w.dammed.n = 0;
        if (way_streams(y))
            pass_on(&w, y, &l);
        load_free(&l);
        w.dam = false;
        xf_pump(&w);
        assert_true(xf_same(&w));
        way_used(&w);
        way_give(&w, y, true);
        xf_pump(&w);
        uint64_t late = pd_xfer_counts(w.t).late;
        pd_buf_add(&w.to_t, old.p, old.n, NULL);
        if (y == TCP)
            send(w.tap[0].b, stream.p, stream.n, MSG_NOSIGNAL);
        xf_pump(&w);
        if (!pd_xfer_open(w.t) || pd_xfer_counts(w.t).late == late || !w.gm)
            SAY(y, "a stale generation", "%s", w.last[1].err.msg);
        way_finish(&w);
        xf_pump(&w);
        assert_true(xf_same(&w));
        way_used(&w);
        pd_buf_free(&old);
        pd_buf_free(&stream);
        done_with(&w, fds);
    }
}

/* The taker has given up and its blocks are in use again, when a writer who has not heard of it goes on. By shm it is the reader who is late: the giver's blocks
 * are in use again, and the taker has not heard. */
static void after_the_fence(void **state)
{
    EACH_WAY (y) {
        struct xf w;
        struct load l;
        struct pd_err e;
        uint32_t n, b[13];
        int fds = fds_of();
        way_begin(&w, y);
        n = w.f.plan.n_blocks;
        w.dam = true;
        if (y != RDMA) {
            way_finish(&w);
            gather(&w, y, &l);
        } else {
            pd_give_ready(w.gm, 0, 2);
            hold_back(&w);
            w.to_t.n = 0;
        }
        if (y == SHM || y == PLACE) {
            pd_leases_revoke_all(w.leases, "its blocks are needed", w.now);
            xf_flush(&w, false);
            w.to_t.n = 0;                       /* that it was told is lost */
            for (uint32_t i = 0; i + 1 < n; i++)        /* the last one's tail stays as it is */
                memset(pd_pool_base(w.f.pool, w.f.blocks[i]) + pd_pool_off(w.f.pool, 1, 0), 0x5a, pd_pool_layer_bytes(w.f.pool));
            pass_on(&w, y, &l);
            while (xf_feed_one(&w, true) | pd_xfer_work(w.t, 1 << 20, w.now)) {}
            xf_events(&w);
            if (w.got[1][PD_XE_TAKEN] || w.got[1][PD_XE_FAILED] != 1)
                SAY(y, "a late reader", "taken %u", w.got[1][PD_XE_TAKEN]);
        } else {
            if (way_streams(y)) {               /* within a chunk */
                struct unit *u = &l.u[l.payload[0]];
                size_t half = u->n / 2;
                assert_int_equal(send(w.tap[0].b, u->p, half, MSG_NOSIGNAL), half);
                memmove(u->p, u->p + half, u->n -= half);
                xf_pump(&w);
            }
            pd_move_cancel(w.tm, "asked", w.now);
            xf_flush(&w, true);
            w.to_g.n = 0;                       /* lost */
            if (y == RDMA)                      /* it may be writing: its blocks are not free before the region is withdrawn */
                assert_int_equal(pd_pool_stats(w.pool).used, n);
            w.now += 1000001;
            pd_xfer_tick(w.t, w.now);
            xf_events(&w);
            assert_int_equal(w.got[1][PD_XE_CANCELLED], 1);
            assert_int_equal(pd_pool_stats(w.pool).used, 0);
            size_t bytes = pd_pool_slab_bytes(w.pool);
            assert_int_equal(pd_pool_take(w.pool, n, b, &e), 0);
            uint8_t *slab = pd_pool_base(w.pool, 0), *was = malloc(bytes);
            memset(slab, 0xa5, bytes);
            memcpy(was, slab, bytes);
            if (y != RDMA)
                pass_on(&w, y, &l);
            else {
                way_finish(&w);
                hold_back(&w);
                xf_events(&w);
                assert_int_equal(w.got[0][PD_XE_FAILED], 1);
                assert_non_null(strstr(w.last[0].err.msg, "lets nobody write there"));
            }
            xf_pump(&w);
            assert_memory_equal(slab, was, bytes);
            assert_int_equal(w.got[1][PD_XE_TAKEN], 0);
            free(was);
            memset(slab, 0, bytes);
            for (uint32_t i = 0; i < n; i++)
                pd_pool_put(w.pool, b[i]);
        }
        way_again(&w, y, "a late writer or reader");
        done_with(&w, fds);
    }
}

/* An offer by way y is there, and taken: the accept is made, and not on its way yet. */
static void way_accept(struct xf *w, enum way y)
{
    struct pd_err e;
    way_open(w, y);
    w->manual = true;
    way_give(w, y, false);
    hold_back(w);
    while (xf_feed_one(w, true)) {}
    xf_events(w);
    assert_int_equal(pd_take(w->tm, &w->take, w->now, &e), 0);
}

/* The taker accepts when the lease has ended meanwhile: its time is over and no sweep came by, or one did; or it was revoked and freed. Nothing is sent. */
static void accepted_too_late(void **state)
{
    EACH_WAY (y)
        for (int how = 0; how < 3; how++) {
            struct xf w;
            int fds = fds_of();
            way_accept(&w, y);
            way_finish(&w);
            size_t sent = pd_xfer_counts(w.g).bytes_out;
            if (how == 2)
                pd_leases_revoke_all(w.leases, "its blocks are needed", w.now);
            else
                w.now += PD_LEASE_TTL_US + 1;
            if (how == 1)
                pd_leases_sweep(w.leases, w.now);
            xf_events(&w);
            xf_pump(&w);
            w.now += 1000001;           /* what a cancel waits for at most */
            pd_xfer_tick(w.g, w.now);
            pd_xfer_tick(w.t, w.now);
            xf_pump(&w);
            if (!pd_xfer_open(w.g) || !pd_xfer_open(w.t) || w.got[1][PD_XE_TAKEN] || w.got[0][PD_XE_ACCEPTED] || w.gm || w.tm ||
                w.got[0][PD_XE_FAILED] + w.got[0][PD_XE_CANCELLED] != 1 || w.got[1][PD_XE_FAILED] + w.got[1][PD_XE_CANCELLED] != 1 ||
                pd_xfer_counts(w.g).bytes_out - sent > w.f.plan.bytes / 2)
                SAY(y, "an accept too late", "%d: %s; %s", how, w.last[0].err.msg, w.last[1].err.msg);
            assert_int_equal(pd_pool_stats(w.pool).used, 0);
            way_again(&w, y, "an accept too late");
            done_with(&w, fds);
        }
}

/* ---- who may write ---- */

/* A stream by the bytes of another one: with no key, with a key that is not known any more, with another by the same name; and one that was recorded. */
static void keys(void **state)
{
    static const char *const said[] = { NULL, "new aa0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n", "old 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n", "" };
    EACH_WAY (y)
        for (int k = 0; way_streams(y) && k < 4; k++) {
            struct xf w;
            struct pd_err e;
            struct pd_keys *mine = NULL;
            struct pd_tls *tls = NULL;
            struct pd_hello a = { .has_attach = true };
            struct pd_buf b = { 0 };
            struct sockaddr_in at;
            socklen_t n = sizeof at;
            if (y == TCP && k != 3)
                continue;
            int fds = fds_of();
            way_begin(&w, y);
            assert_int_equal(getsockname(w.listener, (struct sockaddr *)&at, &n), 0);
            int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
            assert_int_equal(connect(fd, (struct sockaddr *)&at, n), 0);
            assert_int_equal(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
            memcpy(a.attach, pd_xfer_conn(w.t, false), 16);
            assert_int_equal(pd_hello_encode(&a, &b, &e), 0);
            if (k == 3) {                       /* the first one's, again; with chunks that were sent */
                pd_give_ready(w.gm, 0, 5);
                xf_pump(&w);
                assert_int_equal(send(fd, w.tap_log.p, w.tap_log.n, MSG_NOSIGNAL), w.tap_log.n);
            } else if (k) {
                assert_int_equal(pd_keys_parse(said[k], strlen(said[k]), "keys", &mine, &e), 0);
                assert_int_equal(pd_tls_new(mine, fd, true, "S", &tls, &e), 0);
                for (int i = 0; i < 20; i++) {
                    assert_int_not_equal(pd_tls_shake(tls), 1);
                    xf_step(&w);
                }
            } else
                assert_int_equal(send(fd, b.p, b.n, MSG_NOSIGNAL), b.n);
            for (int i = 0; i < 20; i++) {
                xf_news(&w);
                xf_step(&w);
            }
            char c;
            if (y == TLS && (recv(fd, &c, 1, MSG_PEEK) < 0 && errno == EAGAIN))
                SAY(y, "a wrong key", "(%d) it is let in", k);
            assert_int_equal(w.n_coming, 0);
            if (y == TLS) {
                way_finish(&w);
                xf_pump(&w);
                assert_true(xf_same(&w));
            } else if (w.got[1][PD_XE_TAKEN] || !pd_xfer_open(w.t) || w.last[1].err.code != PD_ECORRUPT)
                SAY(y, "a stream again", "%s", w.last[1].err.msg);      /* who writes on a connection in the clear can break its run, and no more */
            pd_tls_free(tls);
            pd_keys_free(mine);
            pd_buf_free(&b);
            close(fd);
            way_again(&w, y, "a wrong key");
            done_with(&w, fds);
        }
}

/* The taker's word of where it may be written, changed on its way: rdma's device refuses. */
static void wrong_place(void **state)
{
    EACH_WAY (y)
        for (int what = 0; y == RDMA && what < 3; what++) {
            struct xf w;
            struct pd_err e;
            struct pd_arena a = { 0 };
            struct pd_accept r;
            struct pd_buf b = { 0 };
            int fds = fds_of();
            way_accept(&w, y);
            size_t before = w.to_g.n;
            xf_flush(&w, true);
            assert_int_equal(pd_accept_decode(w.to_g.p + before, w.to_g.n - before, &a, &r, &e), 0);
            if (what == 0)
                for (size_t i = 0; i < r.rkeys.n; i += 4)
                    ((uint8_t *)(uintptr_t)r.rkeys.p)[i + 3] ^= 0x5a;
            else
                for (uint32_t i = 0; i < r.n_target; i++)
                    r.target[i].base += what == 1 ? (uint64_t)1 << 30 : -(uint64_t)4096;
            assert_int_equal(pd_accept_encode(&r, &b, &e), 0);
            w.to_g.n = before;
            pd_buf_add(&w.to_g, b.p, b.n, NULL);
            size_t bytes = pd_pool_slab_bytes(w.pool);
            uint8_t *slab = pd_pool_base(w.pool, 0), *was = malloc(bytes);
            memcpy(was, slab, bytes);
            while (xf_feed_one(&w, false)) {}
            xf_events(&w);
            way_finish(&w);
            xf_pump(&w);
            assert_int_equal(w.got[1][PD_XE_TAKEN], 0);
            assert_int_equal(w.got[0][PD_XE_FAILED], 1);
            assert_non_null(strstr(w.last[0].err.msg, "lets nobody write there"));
            assert_memory_equal(slab, was, bytes);
            free(was);
            pd_arena_free(&a);
            pd_buf_free(&b);
            way_again(&w, y, "a wrong place");
            done_with(&w, fds);
        }
}

/* Offers whose `where` leads elsewhere, or whose blocks are none: nothing is opened, nothing else is read. */
static void forged_where(void **state)
{
    static char far_[70000];
    memset(far_, '/', sizeof far_ - 1);
    static const char *const where[] = { "/etc/passwd", "../../../../etc/shadow", "/proc/self/mem", "/proc/1/fd/3", "unix:/tmp/x", far_, NULL, NULL, NULL, NULL };
    EACH_WAY (y)
        for (int k = 0; k < 10; k++) {
            struct xf w;
            struct pd_err e;
            struct pd_arena a = { 0 };
            struct pd_kvdesc d;
            struct pd_payload_run runs[2] = { { .base = (uint64_t)1 << 62, .stride = 64, .count = 13, .len = 64 }, { 0 } };
            struct pd_buf b = { 0 };
            int fds = fds_of();
            way_open(&w, y);
            w.manual = true;
            way_give(&w, y, false);
            hold_back(&w);
            assert_int_equal(pd_kvdesc_decode(w.to_t.p, w.to_t.n, &a, &d, &e), 0);
            if (where[k])
                d.payload.where = (struct pd_str){ where[k], strlen(where[k]) };
            else if (k == 6 || !d.payload.n_runs) {     /* runs where none belong, too */
                d.payload.runs = runs;
                d.payload.n_runs = 1;
            } else if (k == 7)
                d.payload.runs[0].base += pd_pool_slab_bytes(w.f.pool) * 3;
            else if (k == 8)
                d.payload.runs[0].count = UINT32_MAX;
            else
                d.payload.runs[0].stride = INT64_MAX - 1;
            w.to_t.n = 0;
            if (pd_kvdesc_encode(&d, &w.to_t, &e))
                SAY(y, "a forged place", "%s", e.msg);
            w.manual = false;
            xf_pump(&w);
            if (w.gm)
                way_finish(&w);
            xf_pump(&w);
            bool waits = !w.got[1][PD_XE_TAKEN] && !w.got[1][PD_XE_FAILED];     /* for slabs that have no such number yet */
            if (waits)
                advance(&w, 5000000);
            if ((w.got[1][PD_XE_TAKEN] && !xf_same(&w)) || !pd_xfer_open(w.t) || (!w.got[1][PD_XE_TAKEN] && w.last[1].err.code != (waits ? PD_ETIME : PD_ECORRUPT)))
                SAY(y, "a forged place", "(%d) taken %u; %s", k, w.got[1][PD_XE_TAKEN], w.last[1].err.msg);
            way_used(&w);
            pd_arena_free(&a);
            pd_buf_free(&b);
            way_again(&w, y, "a forged place");
            done_with(&w, fds);
        }
}

/* ---- peers that are not as they should be ---- */

/* Nobody says anything any more, from one of four moments on: each end gives up in its time, and what the other says later does no harm. */
static void stopped(void **state)
{
    EACH_WAY (y)
        for (int when = 0; when < 4; when++) {
            struct xf w;
            int fds = fds_of();
            way_open(&w, y);
            w.manual = when == 0;
            way_give(&w, y, false);
            if (when)
                xf_pump(&w);
            if (when == 2)
                pd_give_ready(w.gm, 0, 4);
            w.dam = true;
            if (when == 3)
                way_finish(&w);
            hold_back(&w);              /* said, and never heard */
            if (when == 2)
                pd_give_ready(w.gm, 4, 4);
            for (int s = 0; s < 70 && (w.gm || w.tm); s++)
                advance(&w, 1000000);
            if (w.gm && when != 1)      /* 1: the prefill itself takes its time, as far as the giver knows */
                SAY(y, "stopped", "(%d) the giver waits for ever: %s", when, pd_move_state(w.gm));
            if (w.tm || w.got[1][PD_XE_TAKEN])
                SAY(y, "stopped", "(%d) the taker waits for ever", when);
            if (w.last[1].err.code && w.last[1].err.code != PD_ETIME)
                SAY(y, "stopped", "(%d) %s", when, w.last[1].err.msg);
            if (way_streams(y) && w.dammed.n)
                send(w.tap[0].b, w.dammed.p, w.dammed.n, MSG_NOSIGNAL);
            w.dam = w.manual = false;
            xf_pump(&w);
            assert_int_equal(w.got[1][PD_XE_TAKEN], 0);
            way_again(&w, y, "stopped");
            done_with(&w, fds);
        }
}

/* The connection ends after byte k of what the giver says: within each unit, and at its edges. What was verified goes on over the next one. */
static void cut_at_byte_k(void **state)
{
    EACH_WAY (y) {
        int units = 2, next = y == TLS ? 4 : 1;         /* TLS: a unit is a record of its own, and there are many */
        for (int u = 0; u < units; u += next)
            for (int part = 0; part < 4; part++) {
                struct xf w;
                struct load l;
                int fds = fds_of();
                way_begin(&w, y);
                w.dam = true;
                way_finish(&w);
                gather(&w, y, &l);
                units = l.n;
                for (int i = u + 1; i < l.n; i++)
                    l.u[i].n = 0;
                l.u[u].n = part == 0 ? 1 : part == 1 ? l.u[u].n / 2 : part == 2 ? l.u[u].n - 1 : l.u[u].n;
                if (way_streams(y))
                    w.to_t.n = 0;
                pass_on(&w, y, &l);
                if (!way_streams(y) && part < 3)        /* the rest of a record never comes: what is whole is fed */
                    for (int i = 0; i < u; i++)
                        xf_feed_one(&w, true);
                else
                    while (xf_feed_one(&w, true)) {}
                for (int i = 0; i < 4; i++) {
                    pd_xfer_poll(w.t, w.now);
                    pd_xfer_work(w.t, 1 << 20, w.now);
                    xf_events(&w);
                }
                bool taken = w.got[1][PD_XE_TAKEN];
                if (taken && !xf_same(&w))
                    SAY(y, "cut", "at unit %d, part %d: what was taken is wrong", u, part);
                w.to_t.n = 0;
                pd_xfer_lost(w.t, "cut", w.now);
                pd_xfer_lost(w.g, "cut", w.now);
                xf_events(&w);
                if (!taken && y != PLACE && !w.parked)
                    SAY(y, "cut", "at unit %d, part %d: nothing is kept: %s", u, part, w.last[1].err.msg);
                way_again(&w, y, "cut");
                done_with(&w, fds);
            }
        assert_in_range(units, 3, 100);
    }
}

/* No room for it at the taker: refused, with the class, and taken when there is some. */
static void no_room(void **state)
{
    EACH_WAY (y) {
        struct xf w;
        struct pd_err e;
        int fds = fds_of();
        way_open(&w, y);
        uint32_t n = pd_pool_stats(w.pool).max, *all = calloc(n, sizeof *all);
        assert_int_equal(pd_pool_take(w.pool, n, all, &e), 0);
        way_give(&w, y, false);
        xf_pump(&w);
        if (y != PLACE && (w.gm || w.last[0].err.code != PD_ENOMEM || !pd_xfer_open(w.g)))       /* in place it needs one block, for the last */
            SAY(y, "no room", "%s", w.last[0].err.msg);
        for (uint32_t i = 0; i < n; i++)
            pd_pool_put(w.pool, all[i]);
        free(all);
        way_again(&w, y, "no room");
        done_with(&w, fds);
    }
}

/* More descriptors, or streams, than any peer needs: so many are held and no more, and none when it is over. */
static void flood(void **state)
{
    EACH_WAY (y) {
        struct xf w;
        struct pd_err e;
        int fds = fds_of(), dialled[100], most = way_streams(y) ? 100 : 0;
        way_begin(&w, y);
        if (way_streams(y)) {
            struct pd_hello a = { .has_attach = true };
            struct pd_buf b = { 0 };
            struct sockaddr_in at;
            socklen_t n = sizeof at;
            memcpy(a.attach, pd_xfer_conn(w.t, false), 16);
            assert_int_equal(pd_hello_encode(&a, &b, &e), 0);
            assert_int_equal(getsockname(w.listener, (struct sockaddr *)&at, &n), 0);
            for (int i = 0; i < most; i++) {
                struct pd_tls *tls = NULL;
                dialled[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
                assert_int_equal(connect(dialled[i], (struct sockaddr *)&at, n), 0);
                assert_int_equal(fcntl(dialled[i], F_SETFL, O_NONBLOCK), 0);
                if (y == TLS) {
                    assert_int_equal(pd_tls_new(way_keys, dialled[i], true, "S", &tls, &e), 0);
                    for (int k = 0; k < 50 && pd_tls_shake(tls) == 0; k++) {
                        xf_news(&w);
                        xf_step(&w);
                    }
                    pd_tls_writev(tls, &(struct iovec){ b.p, b.n }, 1);
                    pd_tls_free(tls);
                } else
                    assert_int_equal(send(dialled[i], b.p, b.n, MSG_NOSIGNAL), b.n);
                xf_pump(&w);
            }
            if (fds_of() - fds - most > 3 * PD_XFER_STREAMS_MAX + 24)       /* and those of the taps */
                SAY(y, "a flood of streams", "%d descriptors are held", fds_of() - fds - most);
            pd_buf_free(&b);
        } else if (y == SHM || y == PLACE) {
            enum { MANY = 60 };
            int fd[MANY];
            union { struct cmsghdr align; char room[CMSG_SPACE(sizeof fd)]; } c = { .room = { 0 } };
            struct iovec v = { "\xa1", 1 };
            struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = c.room, .msg_controllen = sizeof c.room };
            for (int i = 0; i < MANY; i++)
                fd[i] = w.sock[0];
            struct cmsghdr *h = CMSG_FIRSTHDR(&m);
            *h = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd) };
            memcpy(CMSG_DATA(h), fd, sizeof fd);
            assert_int_equal(sendmsg(w.sock[0], &m, 0), 1);
            int rc = pd_xfer_fds(w.t, w.sock[1], w.now, &e);
            if (rc >= 0 || fds_of() - fds > MANY)
                SAY(y, "a flood of descriptors", "%d, %d held", rc, fds_of() - fds);
        }
        way_finish(&w);
        xf_pump(&w);
        if (!xf_same(&w))
            SAY(y, "a flood", "the run in hand is hurt: %s; %s", w.last[0].err.msg, w.last[1].err.msg);
        way_used(&w);
        for (int i = 0; i < most; i++)
            close(dialled[i]);
        if (y == SHM || y == PLACE) {   /* no more descriptors come there: over a new connection they do */
            pd_xfer_lost(w.g, "cut", w.now);
            pd_xfer_lost(w.t, "cut", w.now);
        }
        way_again(&w, y, "a flood");
        done_with(&w, fds);
    }
}

/* A record, or a little of a stream, each half second: slow is not stopped. */
static void slow(void **state)
{
    EACH_WAY (y) {
        struct xf w;
        struct load l;
        int fds = fds_of(), at = 0;
        way_begin(&w, y);
        w.dam = true;
        way_finish(&w);
        gather(&w, y, &l);
        for (int turn = 0; turn < 200 && !w.got[0][PD_XE_RELEASED]; turn++) {
            if (at < l.n && way_streams(y))
                send(w.tap[0].b, l.u[at].p, l.u[at].n, MSG_NOSIGNAL);
            else if (at < l.n)
                pd_buf_add(&w.to_t, l.u[at].p, l.u[at].n, NULL);
            at++;
            xf_feed_one(&w, true);
            xf_feed_one(&w, false);
            if (w.tcp)
                xf_net(&w);
            pd_xfer_work(w.t, 1, w.now);
            xf_flush(&w, true);
            advance(&w, 500000);
            xf_flush(&w, true);
            xf_flush(&w, false);
            if (w.got[1][PD_XE_TAKEN]) {
                assert_true(!w.blocks || xf_same(&w));
                xf_drop_blocks(&w);
                if (w.tm)
                    pd_take_release(w.tm, w.now);
            }
        }
        if (w.got[1][PD_XE_TAKEN] != 1 || !w.got[0][PD_XE_RELEASED])
            SAY(y, "slow", "%s; %s", w.last[0].err.msg, w.last[1].err.msg);
        w.dam = false;
        load_free(&l);
        way_again(&w, y, "slow");
        done_with(&w, fds);
    }
}

/* ---- two processes, one of them killed or stopped ---- */

static void killed(void **state) { live_faults(first_way == RDMA, SIGKILL); }
static void frozen(void **state) { live_faults(first_way == RDMA, SIGSTOP); }

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    assert_int_equal(pd_keys_parse(KEYS, strlen(KEYS), "keys", &way_keys, NULL), 0);
    if (getenv("RDMA_VM"))
        first_way = last_way = RDMA;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(damaged), cmocka_unit_test(lost_commit), cmocka_unit_test(doubled_commit), cmocka_unit_test(stale_generation), cmocka_unit_test(after_the_fence), cmocka_unit_test(accepted_too_late),
        cmocka_unit_test(keys), cmocka_unit_test(wrong_place), cmocka_unit_test(forged_where), cmocka_unit_test(stopped), cmocka_unit_test(cut_at_byte_k), cmocka_unit_test(no_room),
        cmocka_unit_test(flood), cmocka_unit_test(slow), cmocka_unit_test(killed), cmocka_unit_test(frozen),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    pd_keys_free(way_keys);
    return rc;
}
