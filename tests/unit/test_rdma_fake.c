/* KV over RDMA devices that the test makes itself (fake_verbs.h), so that it runs everywhere: what is registered and when that cannot be, how much is looked at in
 * one go. What devices do is tested on devices (test_rdma). */
#include <sys/resource.h>
#include "fake_verbs.h"
#include "xfer_fixture.h"

static const char refused[] = "cannot be registered: Cannot allocate memory (raise the locked-memory limit: ulimit -l)";

/* A world of that shape; the blocks of the taker's pool that are free lie apart from each other. */
static void scattered_world(struct xf *w, const struct pd_pool_geom *g, uint32_t tokens, uint32_t apart)
{
    struct pd_err e;
    memset(w, 0, sizeof *w);
    w->now = 1000000;
    fix_make(&w->f, g, tokens, XF_CHUNK, 11);
    assert_int_equal(pd_pool_new(g, FIX_POOL_BYTES, &w->pool, &e), 0);
    assert_int_equal(pd_leases_new(&(struct pd_leases_opts){ .pool = w->f.pool }, &w->leases, &e), 0);
    uint32_t *b = calloc(2 * apart, sizeof *b);
    assert_int_equal(pd_pool_take_raw(w->pool, 2 * apart, b, &e), 0);
    for (uint32_t i = 0; i < 2 * apart; i += 2)
        pd_pool_put(w->pool, b[i]);
    free(b);
}

static void take_back(struct xf *w, uint32_t apart)
{
    for (uint32_t i = 1; i < 2 * apart; i += 2)
        pd_pool_put(w->pool, i);
}

/* Until nothing moves. by: the way that a hand-over must take, or NULL. */
static void pump(struct xf *w, const char *by)
{
    for (int idle = 0; idle < (w->tcp ? 4 : 2); idle = xf_step(w) || (w->tcp && idle && xf_news(w)) ? 0 : idle + 1) {
        pd_xfer_poll(w->g, w->now);
        pd_xfer_poll(w->t, w->now);
        if (w->tm && by && w->got[0][PD_XE_ACCEPTED] > w->got[0][PD_XE_RELEASED] && (strcmp(pd_move_scheme(w->tm), by) || (w->gm && strcmp(pd_move_scheme(w->gm), by))))
            fail_msg("by %s, not %s", pd_move_scheme(w->tm), by);
    }
}

static void open_by(struct xf *w, const char *via, bool tcp)
{
    struct pd_xfer_opts g = { .epoch = 3, .via = via, .tcp = tcp }, t = { .epoch = 3, .via = via };
    xf_open_ends(w, &g, &t);
    w->no_fds = true;
    pump(w, NULL);
}

static void give_all(struct xf *w, const char *by)
{
    struct pd_err e = { 0 };
    uint32_t taken = w->got[1][PD_XE_TAKEN], released = w->got[0][PD_XE_RELEASED];
    xf_drop_blocks(w);
    xf_regen(w);
    if (xf_give(w, NULL, &e) || pd_give_finish(w->gm, &w->f.d, &e))
        fail_msg("%s", e.msg);
    pump(w, by);
    if (w->got[1][PD_XE_TAKEN] != taken + 1 || w->got[0][PD_XE_RELEASED] != released + 1)
        fail_msg("by %s: %s / %s", by, w->last[0].err.msg, w->last[1].err.msg);
    assert_true(xf_same(w));
}

static void identical(void **state)
{
    struct xf w;
    xf_world(&w);
    open_by(&w, "rdma,inline", false);
    assert_string_equal(pd_xfer_via(w.g), "rdma, inline");
    for (int i = 0; i < 5; i++)
        give_all(&w, "rdma");
    assert_true(pd_xfer_counts(w.g).bytes_out < 5 * w.f.plan.bytes / 2);       /* they did not go in the stream */
    xf_close(&w);
    assert_int_equal(fv.regions, 0);
}

/* The limit of locked memory is below a slab: seen at hello, at whichever end it is; KV goes another way from the first one on. */
static void no_memory_at_hello(void **state)
{
    struct rlimit was;
    assert_int_equal(getrlimit(RLIMIT_MEMLOCK, &was), 0);
    if (was.rlim_max < 2 << 20)
        skip();
    for (int end = 0; end < 3; end++)       /* the giver's, the taker's, both */
        for (int tcp = 0; tcp < 2; tcp++) {
            struct xf w;
            struct pd_xfer_opts g = { .epoch = 3, .via = "rdma,tcp,inline" }, t = g;
            xf_world(&w);
            assert_int_equal(fv.mrs != NULL, 0);
            g.tcp = tcp;
            fv.memlock = 4096;
            if (end == 1) {                 /* the giver's device is tried with its slab; the taker's with its own, which is larger */
                pd_pool_free(w.pool);
                assert_int_equal(pd_pool_new(&xf_geom, 4 << 20, &w.pool, NULL), 0);
                fv.memlock = 2 << 20;
            } else if (end == 0) {
                pd_pool_free(w.pool);
                assert_int_equal(pd_pool_new(&xf_geom, 4096, &w.pool, NULL), 0);
            }
            assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &(struct rlimit){ fv.memlock, was.rlim_max }), 0);
            xf_open_ends(&w, &g, &t);
            assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &was), 0);
            w.no_fds = true;
            pump(&w, NULL);
            assert_true(w.got[0][PD_XE_READY] && pd_xfer_open(w.g));
            assert_string_equal(pd_xfer_scheme(w.g, 0), tcp ? "tcp" : "inline");
            const char *mine = pd_xfer_unused(w.g, "rdma"), *theirs = pd_xfer_unused(w.t, "rdma");
            if (!mine || !theirs || (end != 1 ? !strstr(mine, refused) : !strstr(mine, "rdma: the other side has none: rdma: ")) ||
                (end != 0 ? !strstr(theirs, refused) : !strstr(theirs, "rdma: the other side has none: rdma: ")))
                fail_msg("end %d: %s / %s", end, mine, theirs);
            if (end)
                give_all(&w, tcp ? "tcp" : "inline");
            fv.memlock = 0;
            xf_close(&w);
        }
    assert_int_equal(fv.regions, 0);
}

/* It is reached later, with an offer: that KV comes another way, and the next one by rdma again. Of a giver that does not know of it, it is refused as ever. */
static void no_memory_at_an_offer(void **state)
{
    for (int tcp = 0; tcp < 2; tcp++)
        for (int old = 0; old < 2; old++) {
            struct xf w;
            struct pd_err e;
            struct pd_str cap = pd_xfer_caps[PD_XFER_CAPS - 1];
            xf_world(&w);
            if (old)
                pd_xfer_caps[PD_XFER_CAPS - 1] = (struct pd_str){ "x", 1 };
            open_by(&w, "rdma,tcp,inline", tcp);
            pd_xfer_caps[PD_XFER_CAPS - 1] = cap;
            assert_string_equal(pd_xfer_scheme(w.g, 0), "rdma");
            give_all(&w, "rdma");
            for (int i = 0; i < 3; i++) {
                fv.memlock = fv.locked + 100;       /* the giver's slab is known already; some of the taker's regions are */
                if (!old)
                    give_all(&w, tcp ? "tcp" : "inline");
                else {
                    xf_regen(&w);
                    assert_int_equal(xf_give(&w, NULL, &e), 0);
                    assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
                    pump(&w, NULL);
                    assert_int_equal(w.got[0][PD_XE_FAILED], i + 1);
                    assert_non_null(strstr(w.last[0].err.msg, refused));
                }
                assert_true(pd_xfer_open(w.g) && pd_xfer_open(w.t));
                assert_int_equal(pd_xfer_counts(w.t).detours, old ? 0 : i + 1);
                fv.memlock = 0;
                give_all(&w, "rdma");
            }
            xf_close(&w);
            assert_int_equal(fv.regions, 0);
        }
}

/* The giver's own is too little, seen with its first offer: it offers it another way, and all after it. */
static void no_memory_at_the_giver(void **state)
{
    for (int tcp = 0; tcp < 2; tcp++) {
        struct xf w;
        xf_world(&w);
        open_by(&w, "rdma,tcp,inline", tcp);
        assert_null(pd_xfer_unused(w.g, "rdma"));
        fv.memlock = 4096;
        give_all(&w, tcp ? "tcp" : "inline");
        assert_non_null(strstr(pd_xfer_unused(w.g, "rdma"), refused));
        fv.memlock = 0;
        give_all(&w, tcp ? "tcp" : "inline");
        xf_close(&w);
    }
}

/* A way that is not in use, or the one that was offered, is no other way. */
static void what_is_no_other_way(void **state)
{
    static const char *const via[] = { "rdma", "shm", "tcp", "x", "inlineinline" };
    for (size_t i = 0; i < sizeof via / sizeof *via; i++) {
        struct xf w;
        struct pd_err e;
        struct pd_buf b = { 0 };
        struct pd_accept r = { .mode = "copy" };
        xf_world(&w);
        open_by(&w, "rdma,inline", false);
        w.manual = true;
        assert_int_equal(xf_give(&w, NULL, &e), 0);
        memcpy(r.run, w.f.d.run, sizeof r.run);
        memcpy(r.gen, w.f.d.gen, sizeof r.gen);
        memcpy(r.via, via[i], strlen(via[i]) < sizeof r.via ? strlen(via[i]) : sizeof r.via - 1);
        assert_int_equal(pd_accept_encode(&r, &b, &e), 0);
        pd_xfer_feed(w.g, b.p, b.n, w.now, &e);
        pump(&w, NULL);
        assert_false(pd_xfer_open(w.g));
        if (w.last[0].err.code != PD_ECORRUPT || !strstr(w.last[0].err.msg, "which is not in use here"))
            fail_msg("%s: %s", via[i], w.last[0].err.msg);
        pd_buf_free(&b);
        xf_close(&w);
    }
}

/* Blocks of a pool that is in use lie apart: each run of neighbours is a region for each layer's K and V. So many as are registered in one go; a KV of more comes
 * another way, and none is refused. */
static void scattered(void **state)
{
    static const struct pd_pool_geom g = { .layers = 128, .kv_heads = 1, .head_dim = 8, .block_size = 1, .dtype = PD_F16 };
    const struct { uint32_t tokens; const char *by; } c[] = { { 60, "rdma" }, { 64, "rdma" }, { 65, "inline" }, { 100, "inline" } };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct xf w;
        scattered_world(&w, &g, c[i].tokens, 110);
        open_by(&w, "rdma,inline", false);
        fv.most_regions = 0;
        give_all(&w, c[i].by);
        assert_true(fv.most_regions <= 16384 + 1 && (fv.most_regions > 256 * 50) == (*c[i].by == 'r'));
        take_back(&w, 110);
        xf_close(&w);
        assert_int_equal(fv.regions, 0);
    }
}

/* A pool in the order in which it is given, of the blocks of an 8B model (2 MiB) in small: 100,000 tokens are a region a slab, and a few. */
static void in_order(void **state)
{
    static const struct pd_pool_geom g = { .layers = 32, .kv_heads = 1, .head_dim = 1, .block_size = 1, .dtype = PD_F16 };
    struct xf w;
    struct pd_err e;
    uint32_t b[7];
    memset(&w, 0, sizeof w);
    w.now = 1000000;
    fix_make(&w.f, &g, 6250, XF_CHUNK, 11);
    assert_int_equal(pd_pool_new(&g, FIX_POOL_BYTES, &w.pool, &e), 0);
    assert_int_equal(pd_leases_new(&(struct pd_leases_opts){ .pool = w.f.pool }, &w.leases, &e), 0);
    assert_int_equal(pd_pool_take_raw(w.pool, 7, b, &e), 0);
    for (int i = 0; i < 7; i += 2)
        pd_pool_put(w.pool, b[i]);
    open_by(&w, "rdma,inline", false);
    give_all(&w, "rdma");
    for (int i = 1; i < 7; i += 2)
        pd_pool_put(w.pool, b[i]);
    xf_close(&w);
    assert_int_equal(fv.regions, 0);
}

/* Completions that never end do not keep the loop: what is left has its turn, at once. */
static void not_for_ever(void **state)
{
    struct xf w;
    xf_world(&w);
    open_by(&w, "rdma,inline", false);
    give_all(&w, "rdma");
    for (int i = 0; i < 10; i++) {
        fv.flood = true;
        fv.polls = 0;
        fv.flooded = i ? fv.flooded : 4;        /* groups that the KV before took */
        alarm(20);
        pd_xfer_poll(w.t, ++w.now);
        alarm(0);
        assert_true(fv.polls && fv.polls <= 64 && pd_xfer_open(w.t));
        assert_true(pd_xfer_next(w.t) <= w.now);
        pd_xfer_tick(w.t, ++w.now);
        assert_true(fv.polls <= 128 && pd_xfer_next(w.t) <= w.now);
    }
    fv.flood = false;
    pd_xfer_tick(w.t, ++w.now);
    assert_true(pd_xfer_next(w.t) > w.now && pd_xfer_open(w.t));
    xf_close(&w);
}

int main(void)
{
    unsetenv("PD_RDMA_DEVICE");
    const struct CMUnitTest tests[] = { cmocka_unit_test(identical), cmocka_unit_test(no_memory_at_hello), cmocka_unit_test(no_memory_at_an_offer), cmocka_unit_test(no_memory_at_the_giver), cmocka_unit_test(what_is_no_other_way),
                                        cmocka_unit_test(scattered), cmocka_unit_test(in_order), cmocka_unit_test(not_for_ever) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
