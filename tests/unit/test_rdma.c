/* KV over RDMA: two ends in one process, on two devices (rxe_a, rxe_b) or one (rxe_0), as in the guest of scripts/rdma-vm. Without devices: what is said then. */
#include <msgpack.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/xfer/rdma_dev.h"
#include "xfer_fixture.h"

static const char *dev[2];              /* giver's, taker's */
static bool here;                       /* there are devices */
#define NEEDED() do { if (!here) { puts("# skip: no RDMA device here; make check-rdma"); skip(); } } while (0)

static void ends(struct xf *w, const char *via)
{
    struct pd_xfer_opts g = { .epoch = 3, .via = via }, t = { .epoch = 3, .via = via };
    g.giving = true;
    g.unix_socket = t.unix_socket = true;
    g.pool = w->f.pool;
    g.leases = w->leases;
    t.pool = w->pool;
    g.fp_fields = t.fp_fields = w->f.d.fp_fields;
    g.worker = "p0";
    t.worker = "d0";
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, w->sock), 0);
    setenv("PD_RDMA_DEVICE", dev[0], 1);
    assert_int_equal(pd_xfer_new(&g, w->now, &w->g, NULL), 0);
    setenv("PD_RDMA_DEVICE", dev[1], 1);
    assert_int_equal(pd_xfer_new(&t, w->now, &w->t, NULL), 0);
    w->no_fds = true;
}

static void opened(struct xf *w, const char *via)
{
    xf_open(w, NULL, NULL);             /* pools and run; its ends are made again, on their devices */
    xf_close_ends(w);
    ends(w, via);
}

/* Until all hand-overs are over, or nothing moved for a while of real time: the devices work beside us. */
static void run(struct xf *w, int ms)
{
    for (int64_t idle = pd_mono_us(); pd_mono_us() - idle < ms * 1000;) {
        pd_xfer_poll(w->g, w->now);
        pd_xfer_poll(w->t, w->now);
        if (xf_step(w))
            idle = pd_mono_us();
        else if ((pd_xfer_open(w->g) || (w->got[0][PD_XE_CLOSED] && w->got[1][PD_XE_CLOSED])) && !(pd_xfer_counts(w->g).moves + pd_xfer_counts(w->t).moves))
            return;
    }
}

static void give_all(struct xf *w)
{
    struct pd_err e = { 0 };
    if (xf_give(w, "rdma", &e) || pd_give_finish(w->gm, &w->f.d, &e))
        fail_msg("%s", e.msg);
}

static void without(void **state)
{
    struct xf w;
    dev[0] = dev[1] = "nonesuch";
    opened(&w, "rdma,inline");
    xf_pump(&w);
    assert_true(pd_xfer_open(w.g));
    assert_non_null(strstr(pd_xfer_via(w.g), "inline (rdma: there is no"));
    assert_int_equal(pd_xfer_fd(w.g), -1);
    struct pd_err e;
    assert_int_equal(xf_give(&w, NULL, &e), 0);
    assert_string_equal(pd_move_scheme(w.gm), "inline");
    assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
    xf_pump(&w);
    assert_true(xf_same(&w));
    xf_close(&w);
    opened(&w, "rdma");         /* no other way: that is said, too */
    xf_pump(&w);
    assert_false(pd_xfer_open(w.g));
    assert_non_null(strstr(w.last[0].err.msg, "rdma: there is no"));
    xf_close(&w);
}

static void identical(void **state)
{
    NEEDED();
    struct xf w;
    opened(&w, "rdma,inline");
    run(&w, 100);
    assert_string_equal(pd_xfer_via(w.g), "rdma, inline");
    assert_true(pd_xfer_fd(w.g) >= 0 && pd_xfer_fd(w.t) >= 0);
    for (int i = 0; i < 5; i++) {
        if (i)
            xf_regen(&w);
        give_all(&w);
        run(&w, 2000);
        assert_int_equal(w.got[1][PD_XE_TAKEN], i + 1);
        assert_int_equal(w.got[0][PD_XE_RELEASED], i + 1);
        assert_true(xf_same(&w));
    }
    struct pd_xfer_counts n = pd_xfer_counts(w.g);
    assert_true(n.bytes_out < 5 * w.f.plan.bytes / 2);          /* they did not go in the stream */
    xf_close(&w);
}

/* Half of the chunks in a first connection, the rest in another, by another way. */
static void resumed(void **state)
{
    NEEDED();
    static const char *const then[] = { "rdma", "inline" };
    for (int i = 0; i < 2; i++) {
        struct xf w;
        struct pd_err e;
        opened(&w, "rdma,inline");
        run(&w, 100);
        assert_int_equal(xf_give(&w, "rdma", &e), 0);
        pd_give_ready(w.gm, 0, 7);
        run(&w, 500);
        pd_xfer_lost(w.g, "cut", w.now);
        pd_xfer_lost(w.t, "cut", w.now);
        xf_events(&w);
        assert_non_null(w.parked);
        assert_int_equal(pd_import_missing(w.parked), 15 - 7);
        xf_close_ends(&w);
        memset(w.got, 0, sizeof w.got);
        struct pd_import *im = w.parked;
        ends(&w, "rdma,inline");
        w.parked = NULL;
        w.take.resume = im;
        run(&w, 100);
        struct pd_give again = { .desc = &w.f.d, .blocks = w.f.blocks, .chunk_blocks = XF_CHUNK, .via = then[i] };
        memcpy(again.lease, w.lease, 16);
        assert_int_equal(pd_give(w.g, &again, w.now, &w.gm, &e), 0);
        assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
        run(&w, 2000);
        assert_int_equal(w.got[1][PD_XE_TAKEN], 1);
        assert_true(xf_same(&w));
        xf_close(&w);
    }
}

/* Cancelled by either end, when some, all or none has been written: everything is back, and the connection carries the next one. */
static void cancel_all(int rounds)
{
    struct xf w;
    opened(&w, "rdma,inline");
    run(&w, 100);
    for (int i = 0; i < rounds; i++) {
        struct pd_err e;
        xf_regen(&w);
        assert_int_equal(xf_give(&w, "rdma", &e), 0);
        pd_give_ready(w.gm, 0, (uint32_t)(i * 5) % 16);
        for (int k = 0; k < i; k++)
            xf_step(&w);
        struct pd_move *m = i & 1 ? w.tm : w.gm;
        if (m)
            pd_move_cancel(m, "asked", w.now);
        else
            pd_move_cancel(w.gm, "asked", w.now);
        run(&w, 300);
        assert_int_equal(w.got[0][PD_XE_CANCELLED], i + 1);
        if (pd_xfer_counts(w.g).moves + pd_xfer_counts(w.t).moves)
            fail_msg("round %d: giver %s, taker %s", i, w.gm ? pd_move_state(w.gm) : "-", w.tm ? pd_move_state(w.tm) : "-");
        assert_int_equal(pd_pool_stats(w.pool).used, 0);
        assert_int_equal(pd_leases_counts(w.leases).live + pd_leases_counts(w.leases).cancelling, 0);
    }
    xf_regen(&w);
    give_all(&w);
    run(&w, 2000);
    assert_int_equal(w.got[1][PD_XE_TAKEN], 1);
    assert_true(xf_same(&w));
    xf_close(&w);
}

static void cancelled(void **state)
{
    NEEDED();
    cancel_all(24);
}

/* The giver's next step, without a word from the taker. */
static void giver_alone(struct xf *w, int ms)
{
    for (int64_t until = pd_mono_us() + ms * 1000; pd_mono_us() < until;) {
        xf_flush(w, false);
        pd_xfer_poll(w->g, w->now);
        pd_xfer_poll(w->t, w->now);
        xf_events(w);
    }
}

/* The link goes in the middle: both ends know within seconds, and what was verified goes on over another way. */
static void link_dies(const char *how, const char *mend, const char *words)
{
    struct xf w;
    struct pd_err e;
    opened(&w, "rdma,inline");
    run(&w, 100);
    assert_int_equal(xf_give(&w, "rdma", &e), 0);
    pd_give_ready(w.gm, 0, 7);
    run(&w, 500);
    assert_int_equal(system(how), 0);
    assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
    int64_t t0 = pd_mono_us();
    run(&w, 8000);
    assert_int_equal(system(mend), 0);
    assert_true(pd_mono_us() - t0 < 12000000);
    assert_int_equal(w.got[0][PD_XE_CLOSED] + w.got[1][PD_XE_CLOSED], 2);
    assert_int_equal(w.last[0].err.code, PD_ECANCEL);
    if (!strstr(w.last[0].err.msg, words))
        fail_msg("%s", w.last[0].err.msg);
    assert_non_null(w.parked);
    assert_int_equal(pd_import_missing(w.parked), 15 - 7);
    xf_close_ends(&w);
    w.take.resume = w.parked;
    w.parked = NULL;
    memset(w.got, 0, sizeof w.got);
    ends(&w, "rdma,inline");
    run(&w, 100);
    if (!strstr(pd_xfer_via(w.g), "inline (rdma: 10.9.1.2 did not answer "))     /* it is left alone for a while */
        fail_msg("%s", pd_xfer_via(w.g));
    struct pd_give again = { .desc = &w.f.d, .blocks = w.f.blocks, .chunk_blocks = XF_CHUNK };
    memcpy(again.lease, w.lease, 16);
    assert_int_equal(pd_give(w.g, &again, w.now, &w.gm, &e), 0);
    assert_string_equal(pd_move_scheme(w.gm), "inline");
    assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
    run(&w, 2000);
    assert_int_equal(w.got[1][PD_XE_TAKEN], 1);
    assert_true(xf_same(&w));
    xf_close(&w);
    usleep(PD_RDMA_SHUN_US);
}

static void link_down(void **state)
{
    NEEDED();
    link_dies("tc qdisc add dev a0 root netem loss 100%", "tc qdisc del dev a0 root", "10.9.1.2 does not answer: transport retry counter exceeded");
    link_dies("ip link set a0 down", "pd-link-up", "rdma: ");
}

/* What was written is on its way for a while: a cancel does not take memory away under it, which would break the connection, and no block is free before. */
static void slow_link(void **state)
{
    NEEDED();
    struct xf w;
    struct pd_err e;
    assert_int_equal(system("tc qdisc add dev a0 root netem delay 60ms"), 0);
    cancel_all(12);
    opened(&w, "rdma,inline");
    run(&w, 300);
    assert_int_equal(xf_give(&w, "rdma", &e), 0);
    pd_give_ready(w.gm, 0, 8);
    run(&w, 300);
    pd_give_ready(w.gm, 8, 7);
    giver_alone(&w, 10);                /* posted, and not there */
    pd_move_cancel(w.gm, "asked", w.now);
    assert_int_equal(pd_leases_counts(w.leases).cancelling, 1);
    pd_move_cancel(w.tm, "asked", w.now);
    xf_pump(&w);
    assert_int_equal(pd_leases_counts(w.leases).cancelling, 1);
    assert_true(pd_pool_stats(w.pool).used > 0);
    run(&w, 500);
    assert_int_equal(pd_leases_counts(w.leases).cancelling, 0);
    assert_int_equal(pd_pool_stats(w.pool).used, 0);
    assert_true(pd_xfer_open(w.g) && pd_xfer_open(w.t));
    xf_close(&w);
    assert_int_equal(system("tc qdisc del dev a0 root"), 0);
}

int main(void)
{
    int n = 0, failed = 0;
    struct ibv_device **all = ibv_get_device_list(&n);
    here = all && n > 0;
    if (all)
        ibv_free_device_list(all);
    const struct CMUnitTest one[] = { cmocka_unit_test(without) };
    const struct CMUnitTest tests[] = { cmocka_unit_test(identical), cmocka_unit_test(resumed), cmocka_unit_test(cancelled) };
    const struct CMUnitTest link[] = { cmocka_unit_test(slow_link), cmocka_unit_test(link_down) };
    failed += cmocka_run_group_tests(one, NULL, NULL);
    dev[0] = "rxe_a";
    dev[1] = "rxe_b";
    failed += cmocka_run_group_tests_name("two devices", tests, NULL, NULL);
    if (getenv("RDMA_VM"))
        failed += cmocka_run_group_tests_name("their link", link, NULL, NULL);
    if (here) {
        dev[0] = dev[1] = "rxe_0";
        failed += cmocka_run_group_tests_name("one device", tests, NULL, NULL);
    }
    return failed;
}
