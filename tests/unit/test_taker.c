/* What a decode worker expects and takes, over real links: a giver dials in on the same loop, by script. */
#include <sys/socket.h>
#include <sys/uio.h>
#define FIX_POOL_BYTES (1 << 20)
#include "../../libcommon/base/clock.h"
#include "../../libcommon/serve/listener.h"
#include "../../libcommon/serve/taker.h"
#include "kv_fixture.h"
#include "files.h"

static const struct pd_pool_geom geom = { .layers = 3, .kv_heads = 2, .head_dim = 8, .block_size = 4, .dtype = PD_F16 };
enum { TOKENS = 50, CHUNK = 3, BLOCKS = 13, CHUNKS = 15 };     /* 5 ranges x 3 layers; the last block is not full */

static char at[] = "unix:/tmp/pd-test-XXXXXX/D", *const path = at + 5;
static struct pd_err e;
static struct fix F;                    /* the giver's pool and the KV that it gives, under one name after the other */
static struct pd_loop *loop;
static struct pd_metrics *metrics;
static struct pd_leases *leases;
static struct pd_links G;
static struct pd_link *glink;           /* the last one that was dialled; NULL: gone */
static struct pd_runtime rt;
static struct pd_taker *T;
static struct pd_listener *listener;
static struct pd_conns conns;
static struct pd_dispatch dispatch;
static struct pd_entry entry;

/* ---- what the two ends saw ---- */

struct run { struct pd_expect x; char name[PD_RUN_LEN + 1]; int started, taken; char failed[32], why[sizeof ((struct pd_err *)0)->msg]; struct pd_kv_in kv; };
static struct run R[4];
static char known[PD_RUN_LEN + 1];
static uint32_t reserved;
static int ready, closed;
struct give {
    struct pd_move *m;
    uint8_t lease[16];
    struct pd_kvdesc d;
    int accepted, over;
    uint64_t bytes;
    enum pd_xfer_event_kind how;
    char why[sizeof ((struct pd_err *)0)->msg];
};
static struct give gives[4];
static bool hold_back;                  /* what is accepted is not sent at once */
static int64_t lease_us;                /* 0: as usual */
static int at_ready;                    /* what is offered as soon as a connection is there; -1: nothing */
static void offer_again(int i);

static struct run *run_of(struct pd_expect *x) { return (struct run *)((char *)x - offsetof(struct run, x)); }
static bool is_known(void *ctx, const char *run) { return !strcmp(run, known); }
static void on_started(void *ctx, struct pd_expect *x, const struct pd_kvdesc *offer) { run_of(x)->started++; }
static uint32_t reserve(void *ctx) { return reserved; }
static void on_taken(void *ctx, struct pd_expect *x, struct pd_kv_in *kv)
{
    run_of(x)->taken++;
    run_of(x)->kv = *kv;
}
static void on_failed(void *ctx, struct pd_expect *x, const char *kind, const struct pd_err *why)
{
    snprintf(run_of(x)->failed, sizeof run_of(x)->failed, "%s", kind);
    snprintf(run_of(x)->why, sizeof run_of(x)->why, "%s", why->msg);
}

static void send_all(struct give *g)
{
    pd_give_ready(g->m, 0, CHUNKS);
    assert_int_equal(pd_give_finish(g->m, &g->d, &e), 0);
}

static void on_giver(void *ctx, struct pd_link *k, const struct pd_xfer_event *ev)
{
    struct give *g = ev->move ? pd_move_get(ev->move) : NULL;
    if (ev->kind == PD_XE_READY) {
        ready++;
        glink = k;
        struct pd_lease_info l;
        if (at_ready >= 0 && pd_lease_info(leases, gives[at_ready].lease, &l))         /* it may have been told in one piece with hello */
            offer_again(at_ready);
        at_ready = -1;
    }
    if (ev->kind == PD_XE_CLOSED) {
        closed++;
        glink = glink == k ? NULL : glink;
    }
    if (!g)
        return;
    if (ev->kind == PD_XE_ACCEPTED) {
        g->accepted++;
        g->bytes = ev->bytes;
        if (!hold_back)
            send_all(g);
    }
    if (ev->last) {
        g->over++;
        g->how = ev->kind;
        g->m = NULL;
        snprintf(g->why, sizeof g->why, "%s", ev->err.msg);
    }
    pd_link_soon(k);
}

/* ---- the loop ---- */

static void quit(void *ctx) { pd_loop_quit(ctx); }
static void run_for(int64_t us)
{
    struct pd_timer *t;
    assert_int_equal(pd_timer_new(loop, quit, loop, &t, &e), 0);
    assert_int_equal(pd_timer_in(t, us, &e), 0);
    assert_int_equal(pd_loop_run(loop, &e), 0);
    pd_timer_free(t);
}
#define UNTIL(c) for (int i_ = 0; !(c) && i_ < 2000; i_++) run_for(1000); assert_true(c)
#define PUMP run_for(15000)

static void dial(void)
{
    int was = ready;
    assert_int_equal(pd_links_dial(&G, at, NULL, &glink, &e), 0);
    UNTIL(ready > was);
}

/* The connection breaks: the other end sees its end of file. */
static void cut(void)
{
    int was = closed;
    pd_xfer_lost(pd_link_xfer(glink), "cut", pd_mono_us());
    pd_link_soon(glink);
    UNTIL(closed > was);
    PUMP;
}

static int knock(void)
{
    struct sockaddr_un { sa_family_t f; char p[108]; } a = { .f = AF_UNIX };
    int s = socket(AF_UNIX, SOCK_STREAM, 0);
    snprintf(a.p, sizeof a.p, "%s", path);
    assert_int_equal(connect(s, (struct sockaddr *)&a, sizeof a), 0);
    return s;
}

/* A giver that says hello, and reads nothing. */
static int a_deaf_giver(void)
{
    struct pd_xfer *x;
    struct pd_xfer_opts o = G.o.xfer;
    struct iovec v[8];
    int s = knock();
    o.unix_socket = true;
    assert_int_equal(pd_xfer_new(&o, pd_mono_us(), &x, &e), 0);
    int n = pd_xfer_iov(x, v, 8, pd_mono_us(), &e);
    assert_true(n > 0 && writev(s, v, n) > 0);
    pd_xfer_free(x);
    return s;
}

static int fds_before;
static int begin_with(uint32_t blocks, bool in_place, const char *via)
{
    static const struct pd_taker_ops ops = { .known = is_known, .started = on_started, .taken = on_taken, .failed = on_failed, .reserve = reserve };
    memcpy(path + 13, "XXXXXX", 6);
    path[19] = 0;
    if (!mkdtemp(path))
        return -1;
    path[19] = '/';
    fds_before = open_fds();
    memset(R, 0, sizeof R);
    memset(gives, 0, sizeof gives);
    known[0] = 0;
    reserved = 0;
    ready = closed = 0;
    hold_back = false;
    lease_us = 0;
    at_ready = -1;
    fix_make(&F, &geom, TOKENS, CHUNK, 11);
    size_t block = (size_t)geom.layers * 2 * 2 * 8 * 4 * 2;
    rt = (struct pd_runtime){ .worker = "decode@test", .domain = "host", .epoch = 3 };
    memcpy(rt.fp.sha, F.d.fp_sha, sizeof rt.fp.sha);
    rt.fp.map = (struct pd_buf){ .p = (uint8_t *)F.fp.data, .n = F.fp.size };
    struct pd_taker_opts to = { .rt = &rt, .via = via, .in_place = in_place };
    conns = (struct pd_conns){ .first = NULL };
    if (pd_pool_new(&geom, in_place ? FIX_POOL_BYTES : (int64_t)(blocks * block), &rt.pool, &e) ||
        pd_prefix_new(rt.pool, &(struct pd_prefix_opts){ .must_seed = 5 }, &rt.prefix, &e) ||
        pd_loop_new(&loop, &e) || pd_metrics_new(&metrics, &e) || pd_leases_new(&(struct pd_leases_opts){ .pool = F.pool }, &leases, &e) ||
        pd_taker_new(&to, &ops, &T, &e) || pd_taker_on(T, loop, metrics, &e))
        return -1;
    entry = (struct pd_entry){ "hello", &pd_links_cb, pd_taker_links(T), false };
    dispatch = (struct pd_dispatch){ .entry = &entry, .n = 1 };
    struct pd_listener_opts lo = { .at = at, .dispatch = &dispatch, .conn = { .set = &conns, .name = "D" } };
    if (pd_listener_new(loop, &lo, &listener, &e))
        return -1;
    G = (struct pd_links){ .o = { .l = loop, .event = on_giver,
                                  .xfer = { .giving = true, .worker = "p0", .epoch = 3, .fp_fields = F.d.fp_fields, .pool = F.pool, .leases = leases } } };
    dial();
    return 0;
}
static int begin(void **state) { return begin_with(100, false, "inline"); }
static int begin_small(void **state) { return begin_with(16, false, "inline"); }
static int begin_in_place(void **state) { return begin_with(100, true, "shm,inline"); }

/* Every count is back at its start. */
static int end(void **state)
{
    for (int i = 0; i < 4; i++)
        pd_kv_in_free(rt.pool, &R[i].kv);
    PUMP;
    pd_links_free(&G);
    pd_listener_free(listener);
    pd_taker_free(T);
    struct pd_lease_counts n = pd_leases_counts(leases);
    pd_leases_revoke_all(leases, "end", pd_mono_us());
    assert_int_equal(n.granted, n.released + n.expired + n.revoked + n.live);
    assert_int_equal(pd_pool_stats(rt.pool).used, 0);
    assert_int_equal(pd_pool_stats(rt.pool).borrowed, 0);
    pd_prefix_free(rt.prefix);
    for (uint32_t i = 0; i < F.plan.n_blocks; i++)
        pd_pool_put(F.pool, F.blocks[i]);
    assert_int_equal(pd_pool_stats(F.pool).used, 0);
    pd_leases_free(leases);
    pd_pool_free(rt.pool);
    pd_metrics_free(metrics);
    pd_loop_free(loop);
    fix_free(&F);
    assert_int_equal(open_fds(), fds_before);
    path[19] = 0;
    rmdir(path);
    path[19] = '/';
    return 0;
}

/* ---- acts ---- */

static void expect(int i, const char *name, int64_t wait_us)
{
    R[i].x.give_up = pd_mono_us() + wait_us;
    memset(R[i].x.op, 7, sizeof R[i].x.op);
    memcpy(R[i].name, name, sizeof R[i].name);
    assert_int_equal(pd_taker_expect(T, &R[i].x, name, &e), 0);
}

/* A new name, a new generation. */
static void name_it(int i)
{
    gives[i].d = F.d;
    assert_int_equal(pd_run_new(gives[i].d.run, &e), 0);
    memcpy(gives[i].d.request.run, gives[i].d.run, sizeof gives[i].d.run);
    assert_int_equal(pd_gen_new(gives[i].d.gen, &e), 0);
}

static void offer_again(int i)
{
    struct pd_give g = { .desc = &gives[i].d, .blocks = F.blocks, .chunk_blocks = CHUNK, .via = pd_link_via(glink, false) };
    memcpy(g.lease, gives[i].lease, sizeof g.lease);
    assert_int_equal(pd_give(pd_link_xfer(glink), &g, pd_mono_us(), &gives[i].m, &e), 0);
    pd_move_set(gives[i].m, &gives[i]);
    pd_link_soon(glink);
}

static void offer(int i)
{
    assert_int_equal(pd_lease_grant(leases, gives[i].d.run, gives[i].d.gen, F.blocks, F.plan.n_blocks, lease_us, pd_mono_us(), gives[i].lease, &e), 0);
    assert_int_equal(pd_lease_fill(leases, gives[i].lease, &e), 0);
    offer_again(i);
}

static bool same(const struct run *r) { return r->taken == 1 && r->kv.n_blocks == BLOCKS && fix_same(F.pool, F.blocks, rt.pool, r->kv.blocks, BLOCKS); }
static void is_failed(const struct run *r, const char *kind, const char *words)
{
    if (strcmp(r->failed, kind) || !strstr(r->why, words) || r->taken || r->x.expected)
        fail_msg("'%s': %s (wanted %s: %s)", r->failed, r->why, kind, words);
}

/* ---- tests ---- */

static void it_is_taken_whoever_came_first(void **state)
{
    for (int i = 0; i < 2; i++) {
        name_it(i);
        if (i == 0)
            expect(i, gives[i].d.run, 5000000);
        offer(i);
        if (i == 1) {
            UNTIL(pd_taker_counts(T).early == 1);
            expect(i, gives[i].d.run, 5000000);
        }
        UNTIL(R[i].taken);
        assert_true(same(&R[i]) && R[i].started == 1 && R[i].kv.bytes == F.plan.bytes && !R[i].kv.held_tokens && !R[i].x.expected && !R[i].failed[0]);
        assert_int_equal(R[i].kv.desc.first[0].token, 11);
        UNTIL(gives[i].over && gives[i].how == PD_XE_RELEASED);
    }
    struct pd_taker_counts n = pd_taker_counts(T);
    assert_true(n.taken[0] == 2 && n.bytes == 2 * F.plan.bytes && !n.early && !n.expected && !n.moving && !n.waiting && !n.failed && n.links == 1);
}

static void what_is_not_wanted_is_refused(void **state)
{
    static const char *const words[] = { "another op", "served already", "from elsewhere" };
    for (int i = 0; i < 3; i++) {
        name_it(i);
        if (i != 1)
            expect(i, gives[i].d.run, 5000000);
        if (i == 0)
            memset(gives[i].d.op, 8, sizeof gives[i].d.op);
        if (i == 1)
            memcpy(known, gives[i].d.run, sizeof known);
        if (i == 2) {           /* it comes over another connection too */
            hold_back = true;
            offer(i);
            UNTIL(gives[i].accepted);
            struct pd_link *first = glink;
            dial();
            memset(&gives[3], 0, sizeof gives[3]);
            gives[3].d = gives[i].d;
            assert_int_equal(pd_gen_new(gives[3].d.gen, &e), 0);
            offer(3);
            UNTIL(gives[3].over);
            assert_true(gives[3].how == PD_XE_FAILED && strstr(gives[3].why, words[i]));
            send_all(&gives[i]);
            pd_link_soon(first);
            UNTIL(R[i].taken);
            assert_true(same(&R[i]));
            continue;
        }
        offer(i);
        UNTIL(gives[i].over);
        if (gives[i].how != PD_XE_FAILED || !strstr(gives[i].why, words[i]))
            fail_msg("%d: %s", i, gives[i].why);
        assert_true(!R[i].taken && !R[i].failed[0]);    /* what it waits for may still come */
    }
    pd_taker_forget(T, &R[0].x, "over");
    assert_int_equal(pd_taker_counts(T).expected, 0);
}

static void nothing_comes(void **state)
{
    name_it(0);
    expect(0, gives[0].d.run, 20000);
    UNTIL(R[0].failed[0]);
    is_failed(&R[0], "prefill_timeout", "in time");
    offer(0);                   /* late; and its run is over */
    memcpy(known, gives[0].d.run, sizeof known);
    UNTIL(gives[0].over);
    assert_true(strstr(gives[0].why, "served already") && !R[0].taken);
}

/* It does not fit what the two said hello with: refused inside the protocol, and the run need not wait for its time. */
static void an_offer_that_cannot_be_is_told_at_once(void **state)
{
    name_it(0);
    gives[0].d.epoch = 4;
    expect(0, gives[0].d.run, 60000000);
    offer(0);
    UNTIL(R[0].failed[0]);
    is_failed(&R[0], "fingerprint_mismatch", "epoch differs");
    UNTIL(gives[0].over);
    assert_int_equal(gives[0].how, PD_XE_FAILED);
}

static void there_is_room_for_one(void **state)         /* 16 blocks; each wants 13 */
{
    for (int i = 0; i < 3; i++) {
        name_it(i);
        expect(i, gives[i].d.run, 5000000);
        offer(i);
        if (!i)
            UNTIL(R[0].taken);
    }
    UNTIL(pd_taker_counts(T).waiting == 2);
    PUMP;
    assert_true(!gives[1].accepted && !gives[2].accepted && !R[1].started);
    pd_taker_forget(T, &R[1].x, "not wanted any more");        /* one that waits may go */
    UNTIL(gives[1].over);
    assert_true(gives[1].how == PD_XE_CANCELLED && strstr(gives[1].why, "not wanted any more"));
    assert_int_equal(pd_taker_counts(T).waiting, 1);
    pd_kv_in_free(rt.pool, &R[0].kv);
    pd_taker_room(T);
    UNTIL(R[2].taken);
    assert_true(same(&R[2]));
}

/* A reserve for what decodes keeps it waiting; when the prefill worker loses patience the reason is the want of blocks. */
static void it_waits_and_is_given_up(void **state)
{
    uint32_t one;
    name_it(0);
    expect(0, gives[0].d.run, 5000000);
    reserved = 4;
    assert_int_equal(pd_pool_take(rt.pool, 1, &one, &e), 0);
    offer(0);
    UNTIL(pd_taker_counts(T).waiting == 1);
    pd_xfer_tick(pd_link_xfer(glink), pd_mono_us() + 6000000);          /* accept_us */
    pd_link_soon(glink);
    UNTIL(R[0].failed[0]);
    is_failed(&R[0], "out_of_blocks", "not answered");
    assert_int_equal(pd_taker_counts(T).waiting, 0);
    pd_pool_put(rt.pool, one);
}

static void blocks_are_needed_by_others(void **state)
{
    uint32_t held[5];
    assert_int_equal(pd_pool_take(rt.pool, 5, held, &e), 0);   /* 11 of 16 are left, for good */
    name_it(0);
    hold_back = true;
    expect(0, gives[0].d.run, 5000000);
    offer(0);
    UNTIL(pd_taker_counts(T).waiting == 1);
    assert_false(pd_taker_give_up_one(T));      /* it holds none */
    for (int i = 0; i < 5; i++)
        pd_pool_put(rt.pool, held[i]);
    UNTIL(gives[0].accepted);
    assert_true(pd_taker_give_up_one(T));       /* now it does, and others need them */
    is_failed(&R[0], "out_of_blocks", "needed by runs that decode");
    assert_false(pd_taker_give_up_one(T));
    UNTIL(gives[0].over);
    assert_true(gives[0].how == PD_XE_CANCELLED && pd_pool_stats(rt.pool).used == 0);
}

static void forgotten_on_the_way(void **state)
{
    name_it(0);
    hold_back = true;
    expect(0, gives[0].d.run, 5000000);
    offer(0);
    UNTIL(gives[0].accepted);
    pd_give_ready(gives[0].m, 0, 7);
    pd_link_soon(glink);
    PUMP;
    assert_int_equal(pd_taker_counts(T).moving, 1);
    pd_taker_forget(T, &R[0].x, "the run is over");
    pd_taker_forget(T, &R[0].x, "twice");
    UNTIL(gives[0].over);
    assert_true(gives[0].how == PD_XE_CANCELLED && strstr(gives[0].why, "the run is over") && !R[0].taken && !R[0].failed[0]);
    assert_int_equal(pd_taker_counts(T).moving, 0);
    assert_int_equal(pd_pool_stats(rt.pool).used, 0);
}

static void what_is_here_is_not_sent(void **state)
{
    const struct pd_prefix_key none = { { NULL, 0 }, { NULL, 0 } }, salt = { { NULL, 0 }, { "salt", 4 } };
    name_it(0);
    expect(0, gives[0].d.run, 5000000);
    offer(0);
    UNTIL(R[0].taken);
    assert_int_equal(pd_prefix_put(rt.prefix, &none, F.ids, R[0].kv.blocks, 8), 8);
    pd_kv_in_free(rt.pool, &R[0].kv);
    for (int i = 1; i < 4; i++) {
        name_it(i);
        R[i].x.key = i == 2 ? salt : none;
        if (i == 3)
            rt.fp.sha[0] ^= 1;  /* of another build than ours */
        expect(i, gives[i].d.run, 5000000);
        offer(i);
        UNTIL(R[i].taken);
        uint32_t held = i == 1 ? 6 : 0;         /* of 8, in chunks of 3 */
        assert_true(same(&R[i]));
        assert_int_equal(R[i].kv.held_tokens, held * 4);
        assert_int_equal(R[i].kv.bytes, F.plan.bytes / BLOCKS * (BLOCKS - held));
        assert_int_equal(gives[i].bytes, R[i].kv.bytes);
        if (i == 1)             /* it holds them: they cannot be evicted under it */
            assert_int_equal(pd_prefix_evict(rt.prefix, 100), 2);
    }
    assert_int_equal(pd_taker_counts(T).held_blocks, 6);
    rt.fp.sha[0] ^= 1;
}

static void the_connection_is_lost_and_it_goes_on(void **state)
{
    for (int i = 0; i < 2; i++) {       /* twice in the second one */
        name_it(i);
        R[i].x.transfer_us = 5000000;
        hold_back = true;
        expect(i, gives[i].d.run, 5000000);
        offer(i);
        for (int c = 0; c <= i; c++) {
            UNTIL(gives[i].accepted == c + 1);
            pd_give_ready(gives[i].m, 0, 6 + 3 * (uint32_t)c);
            pd_link_soon(glink);
            PUMP;
            cut();
            assert_true(gives[i].over == c + 1 && gives[i].how == PD_XE_FAILED && !R[i].failed[0] && R[i].x.parked && !R[i].x.move);
            assert_int_equal(pd_taker_counts(T).moving, 0);
            assert_int_equal(pd_pool_stats(rt.pool).used, BLOCKS * (i + 1));      /* it keeps its blocks, */
            dial();
            hold_back = c < i;
            offer_again(i);     /* and needs no room */
        }
        UNTIL(R[i].taken);
        assert_true(same(&R[i]) && R[i].started == 1 && !R[i].x.parked);
        assert_int_equal(R[i].kv.bytes, F.plan.bytes);          /* each chunk came once */
        uint32_t left = BLOCKS - 3 * 2 - (i ? 3 : 0);
        assert_int_equal(gives[i].bytes, F.plan.bytes / BLOCKS * left);
        assert_int_equal(pd_taker_counts(T).resumed, 1 + 2 * i);
    }
}

static void the_connection_is_lost_and_another_comes(void **state)
{
    name_it(0);
    hold_back = true;
    expect(0, gives[0].d.run, 5000000);
    offer(0);
    UNTIL(gives[0].accepted);
    pd_give_ready(gives[0].m, 0, 6);
    pd_link_soon(glink);
    PUMP;
    cut();
    dial();
    hold_back = false;
    gives[1].d = gives[0].d;    /* prefilled anew */
    assert_int_equal(pd_gen_new(gives[1].d.gen, &e), 0);
    offer(1);
    UNTIL(R[0].taken);
    assert_true(same(&R[0]) && R[0].started == 2 && gives[1].bytes == F.plan.bytes && R[0].kv.bytes == F.plan.bytes);
    assert_int_equal(pd_taker_counts(T).resumed, 0);
}

static void the_connection_is_lost_for_good(void **state)
{
    name_it(0);
    hold_back = true;
    expect(0, gives[0].d.run, 60000000);
    offer(0);
    UNTIL(gives[0].accepted);
    pd_give_ready(gives[0].m, 0, 6);
    pd_link_soon(glink);
    PUMP;
    cut();
    int64_t t0 = pd_mono_us();
    UNTIL(R[0].failed[0]);
    is_failed(&R[0], "prefill_worker_gone", "closed the connection");
    assert_true(pd_mono_us() - t0 < PD_TAKER_WORD_US + 500000 && !R[0].x.parked);
    assert_int_equal(pd_pool_stats(rt.pool).used, 0);
    /* what is parked gives way, too, when its blocks are needed */
    name_it(1);
    dial();
    expect(1, gives[1].d.run, 60000000);
    offer(1);
    UNTIL(gives[1].accepted);
    cut();
    assert_true(R[1].x.parked && pd_taker_give_up_one(T));
    is_failed(&R[1], "out_of_blocks", "needed");
    assert_int_equal(pd_pool_stats(rt.pool).used, 0);
}

static void cut_it(void *ctx, struct pd_expect *x, struct pd_kv_in *kv)
{
    on_taken(ctx, x, kv);
    pd_xfer_lost(pd_link_xfer(glink), "cut", pd_mono_us());     /* what was said of it is not read */
    pd_link_soon(glink);
}

static void what_was_taken_is_told_over_the_next_connection(void **state)
{
    /* the taker's own ops, with a `taken` that cuts */
    struct pd_taker_ops ops = { .known = is_known, .started = on_started, .taken = cut_it, .failed = on_failed, .reserve = reserve };
    struct pd_taker_opts to = { .rt = &rt, .via = "inline" };
    pd_links_free(&G);
    PUMP;
    pd_taker_free(T);
    assert_int_equal(pd_taker_new(&to, &ops, &T, &e), 0);
    assert_int_equal(pd_taker_on(T, loop, metrics, &e), 0);
    entry.ctx = pd_taker_links(T);
    dial();
    name_it(0);
    expect(0, gives[0].d.run, 5000000);
    offer(0);
    UNTIL(R[0].taken && gives[0].over);
    PUMP;
    assert_true(gives[0].how == PD_XE_FAILED && same(&R[0]) && pd_leases_counts(leases).live == 1);
    memcpy(known, gives[0].d.run, sizeof known);
    at_ready = 0;               /* it does not know */
    dial();
    UNTIL(!pd_leases_counts(leases).live && !gives[0].m);
    assert_int_equal(pd_leases_counts(leases).released, 1);
    assert_int_equal(pd_taker_counts(T).committed, 1);
    assert_true(R[0].taken == 1 && !R[0].failed[0] && (gives[0].over == 1 || gives[0].how == PD_XE_RELEASED));
    int was = ready;
    cut();
    dial();                     /* once is enough, */
    assert_true(ready > was && pd_taker_counts(T).committed == 1);
    name_it(1);                 /* unless that is not heard either */
    expect(1, gives[1].d.run, 5000000);
    offer(1);
    UNTIL(R[1].taken && gives[1].over);
    PUMP;
    int deaf = a_deaf_giver();
    UNTIL(pd_taker_counts(T).committed == 2);
    close(deaf);
    UNTIL(pd_taker_counts(T).links == 0);
    assert_int_equal(pd_leases_counts(leases).live, 1);
    dial();
    UNTIL(!pd_leases_counts(leases).live);
    assert_true(pd_taker_counts(T).committed == 3 && pd_leases_counts(leases).released == 2);
    name_it(2);                 /* it is back before its old connection is seen to end: told over the one that stands */
    expect(2, gives[2].d.run, 5000000);
    offer(2);
    UNTIL(R[2].taken && gives[2].over);
    PUMP;
    deaf = a_deaf_giver();
    UNTIL(pd_taker_counts(T).committed == 4);
    at_ready = 0;
    dial();
    was = ready;
    assert_int_equal(pd_leases_counts(leases).live, 1);
    close(deaf);
    UNTIL(!pd_leases_counts(leases).live);
    assert_true(pd_taker_counts(T).committed == 5 && pd_leases_counts(leases).released == 3 && ready == was);
}

static void read_in_place(void **state)
{
    name_it(0);
    UNTIL(!pd_link_via(glink, false)); /* descriptors pass */
    expect(0, gives[0].d.run, 5000000);
    offer(0);
    UNTIL(R[0].taken);
    assert_true(R[0].kv.pin && pd_pin_valid(R[0].kv.pin));
    assert_true(same(&R[0]));
    assert_false(gives[0].over);
    struct pd_taker_counts n = pd_taker_counts(T);
    assert_true(n.pinned == 1 && n.taken[1] == 1);
    assert_int_equal(pd_pool_stats(rt.pool).borrowed, 12);      /* the last block is not full: copied */
    pd_kv_in_free(rt.pool, &R[0].kv);
    UNTIL(gives[0].over);
    assert_true(gives[0].how == PD_XE_RELEASED && !pd_taker_counts(T).pinned);
    /* and when it goes under its reader: by a revoked lease, also while no connection says so */
    for (int i = 1; i < 3; i++) {
        name_it(i);
        expect(i, gives[i].d.run, 5000000);
        offer(i);
        UNTIL(R[i].taken);
        if (i == 2) {
            cut();
            assert_true(pd_pin_valid(R[i].kv.pin) && same(&R[i]));
        }
        pd_lease_revoke(leases, gives[i].lease, "needed", pd_mono_us(), NULL);
        assert_false(pd_pin_valid(R[i].kv.pin));        /* before a word came */
        pd_links_soon(&G);
        PUMP;
        assert_false(pd_pin_valid(R[i].kv.pin));        /* for ever */
        pd_kv_in_free(rt.pool, &R[i].kv);
        assert_int_equal(pd_taker_counts(T).pinned, 0);
    }
}

static void take_in_place(int i)
{
    UNTIL(!pd_link_via(glink, false));
    name_it(i);
    expect(i, gives[i].d.run, 5000000);
    offer(i);
    UNTIL(R[i].taken);
    assert_true(R[i].kv.pin && same(&R[i]));
}

static int64_t expires(int i)
{
    struct pd_lease_info l;
    return pd_lease_info(leases, gives[i].lease, &l) ? l.expires_us : 0;
}

/* The connection is lost, and another comes: that renews the lease from then on, and ends it. Twice. */
static void read_on_in_place(void **state)
{
    lease_us = 1200000;
    take_in_place(0);
    for (int times = 1; times < 3; times++) {
        cut();
        assert_true(gives[0].how == PD_XE_FAILED && pd_pin_valid(R[0].kv.pin) && pd_taker_counts(T).pinned == 1);
        dial();
        UNTIL(!pd_link_via(glink, false));
        offer_again(0);
        UNTIL(pd_taker_counts(T).resumed == (uint64_t)times);
        for (int64_t end = pd_mono_us() + 3 * lease_us / 2; pd_mono_us() < end;) {
            assert_int_equal(pd_leases_sweep(leases, pd_mono_us()), 0);
            assert_true(pd_pin_valid(R[0].kv.pin));
            run_for(10000);
        }
        assert_true(same(&R[0]) && gives[0].over == times);
    }
    assert_true(R[0].taken == 1 && R[0].started == 1 && gives[0].bytes == 0 && pd_taker_counts(T).taken[1] == 1 && pd_taker_counts(T).bytes == F.plan.bytes);
    pd_kv_in_free(rt.pool, &R[0].kv);
    UNTIL(gives[0].over == 3 && gives[0].how == PD_XE_RELEASED);
    assert_true(pd_leases_counts(leases).released == 1 && !pd_taker_counts(T).pinned && !pd_taker_counts(T).committed);
}

/* None comes: it is read as long as the lease lasts that was asked for last, and no longer, though the memory is as it was. */
static void read_on_in_place_until_the_lease_ends(void **state)
{
    lease_us = 2400000;
    take_in_place(0);
    run_for(900000);            /* it is renewed, each sixth */
    int64_t since = pd_mono_us();
    cut();
    while (pd_mono_us() < since + lease_us / 2)
        run_for(5000);
    assert_true(pd_pin_valid(R[0].kv.pin));
    run_for(expires(0) + 1000 - pd_mono_us());          /* by its giver's clock, which is the later one */
    assert_false(pd_pin_valid(R[0].kv.pin));
    dial();                     /* too late */
    UNTIL(!pd_link_via(glink, false));
    assert_false(pd_pin_valid(R[0].kv.pin));
}

/* The run is over while no connection stands: the next one says so, to a giver that offers it again or does not. */
static void released_over_another_connection(void **state)
{
    for (int i = 0; i < 2; i++) {
        take_in_place(i);
        cut();
        pd_kv_in_free(rt.pool, &R[i].kv);
        PUMP;
        assert_true(!pd_taker_counts(T).pinned && pd_leases_counts(leases).live == 1 && pd_pool_stats(rt.pool).borrowed == 0);
        memcpy(known, gives[i].d.run, sizeof known);
        at_ready = i ? i : -1;
        dial();
        UNTIL(pd_leases_counts(leases).released == (uint64_t)i + 1);
        UNTIL(!gives[i].m);
        assert_int_equal(pd_taker_counts(T).committed, i + 1);
        assert_true(R[i].taken == 1 && !R[i].failed[0] && pd_xfer_open(pd_link_xfer(glink)));
    }
}

/* It is over between its offer over another connection and its verification there; and that connection is lost, too, or not. */
static void released_while_it_is_offered_again(void **state)
{
    for (int i = 0; i < 2; i++) {
        take_in_place(i);
        cut();
        dial();
        UNTIL(!pd_link_via(glink, false));
        hold_back = true;
        int was = gives[i].accepted;
        offer_again(i);
        UNTIL(gives[i].accepted > was);
        pd_kv_in_free(rt.pool, &R[i].kv);
        PUMP;
        assert_true(!pd_taker_counts(T).pinned && gives[i].m && pd_leases_counts(leases).live == 1);
        hold_back = false;
        if (i) {
            cut();
            dial();
            UNTIL(pd_taker_counts(T).committed == 1);
        } else
            send_all(&gives[i]);
        pd_link_soon(glink);
        UNTIL(pd_leases_counts(leases).released == (uint64_t)i + 1 && !gives[i].m);
        assert_true(i || gives[i].how == PD_XE_RELEASED);
    }
}

/* What the lease of a generation was taken under, and nothing else; and not what has ended here. */
static void offered_again_otherwise(void **state)
{
    for (int i = 0; i < 3; i++) {
        lease_us = i == 2 ? 100000 : 0;
        take_in_place(i);
        cut();
        uint8_t first[16];
        memcpy(first, gives[i].lease, sizeof first);
        if (i == 2) {
            run_for(120000);
            pd_lease_renew(leases, first, gives[i].d.gen, 0, expires(i) - 1, &e);     /* its giver has a later clock */
        }
        dial();
        UNTIL(!pd_link_via(glink, false));
        if (i == 0) {           /* another lease */
            assert_int_equal(pd_lease_grant(leases, gives[i].d.run, gives[i].d.gen, F.blocks, F.plan.n_blocks, 0, pd_mono_us(), gives[i].lease, &e), 0);
            assert_int_equal(pd_lease_fill(leases, gives[i].lease, &e), 0);
            offer_again(i);
        } else if (i == 1) {    /* a way by which it cannot be read where it lies */
            struct pd_give g = { .desc = &gives[i].d, .blocks = F.blocks, .chunk_blocks = CHUNK, .via = "inline" };
            memcpy(g.lease, gives[i].lease, sizeof g.lease);
            if (pd_give(pd_link_xfer(glink), &g, pd_mono_us(), &gives[i].m, &e) < 0)
                continue;       /* it is not in use there */
            pd_move_set(gives[i].m, &gives[i]);
            pd_link_soon(glink);
        } else
            offer_again(i);
        UNTIL(!gives[i].m);
        if (gives[i].how != (i == 2 ? PD_XE_RELEASED : PD_XE_FAILED) || (i < 2 && !strstr(gives[i].why, "read in place here")))
            fail_msg("%d: %d %s", i, gives[i].how, gives[i].why);
        assert_true(pd_taker_counts(T).resumed == 0 && pd_pin_valid(R[i].kv.pin) == (i < 2));
        pd_lease_revoke(leases, first, "over", pd_mono_us(), NULL);
        assert_false(pd_pin_valid(R[i].kv.pin));
        pd_kv_in_free(rt.pool, &R[i].kv);
    }
}

/* What does not fit a link: descriptors for a connection that is not there, records before hello. */
static void strangers(void **state)
{
    static const struct { const char *rec; size_t n; } say[] = { { "\x82\xa2pd\xa5hello\xa1v\x01", 14 }, { "\x81\xa2pd\xa5hello", 10 } };
    for (size_t i = 0; i < sizeof say / sizeof *say; i++) {
        char got[600];
        int s = knock();
        assert_int_equal(write(s, say[i].rec, say[i].n), (ssize_t)say[i].n);
        PUMP;
        ssize_t n = recv(s, got, sizeof got, MSG_DONTWAIT), more = recv(s, got + (n > 0 ? n : 0), 10, MSG_DONTWAIT);
        assert_true(n > 0 && more == 0);        /* an error, and the end */
        close(s);
        PUMP;
    }
    assert_int_equal(pd_taker_counts(T).links, 1);
    name_it(0);
    expect(0, gives[0].d.run, 5000000);
    offer(0);
    UNTIL(R[0].taken);          /* others are served */
}

/* Offers that nobody has asked for, over two connections: so many wait, the others are refused at once, and what is expected is taken all the same. */
static void early_offers_are_bounded(void **state)
{
    struct pd_link *first = glink;
    dial();
    for (int i = 0; i < PD_TAKER_EARLY + 200; i++) {
        struct pd_kvdesc d = F.d;
        struct pd_give g = { .desc = &d, .blocks = F.blocks, .chunk_blocks = CHUNK, .via = "inline" };
        struct pd_move *m;
        struct pd_link *k = i & 1 ? first : glink;
        assert_int_equal(pd_run_new(d.run, &e) | pd_gen_new(d.gen, &e), 0);
        memcpy(d.request.run, d.run, sizeof d.run);
        assert_int_equal(pd_lease_grant(leases, d.run, d.gen, F.blocks, BLOCKS, 0, pd_mono_us(), g.lease, &e), 0);
        assert_int_equal(pd_lease_fill(leases, g.lease, &e), 0);
        assert_int_equal(pd_give(pd_link_xfer(k), &g, pd_mono_us(), &m, &e), 0);
        pd_link_soon(k);
        if (i % 100 == 0)
            PUMP;
    }
    UNTIL(pd_xfer_counts(pd_link_xfer(first)).moves + pd_xfer_counts(pd_link_xfer(glink)).moves == PD_TAKER_EARLY);
    assert_int_equal(pd_taker_counts(T).early, PD_TAKER_EARLY);
    name_it(0);
    expect(0, gives[0].d.run, 5000000);
    offer(0);
    UNTIL(R[0].taken);
    pd_leases_revoke_all(leases, "end", pd_mono_us());
    pd_links_soon(&G);
    UNTIL(!pd_taker_counts(T).early);
}

/* Few, and large: what counts is all that an offer brings, whatever field of it is long. */
static void large_early_offers_are_bounded(void **state)
{
    enum { N = 80, EACH = 1 << 20 };
    char *name = malloc(EACH);
    memset(name, 'a', EACH);
    for (int i = 0; i < N; i++) {
        struct pd_kvdesc d = F.d;
        struct pd_give g = { .desc = &d, .blocks = F.blocks, .chunk_blocks = CHUNK, .via = "inline" };
        struct pd_move *m;
        d.request.adapter = (struct pd_str){ name, EACH };
        assert_int_equal(pd_run_new(d.run, &e) | pd_gen_new(d.gen, &e), 0);
        memcpy(d.request.run, d.run, sizeof d.run);
        assert_int_equal(pd_lease_grant(leases, d.run, d.gen, F.blocks, BLOCKS, 0, pd_mono_us(), g.lease, &e), 0);
        assert_int_equal(pd_lease_fill(leases, g.lease, &e), 0);
        assert_int_equal(pd_give(pd_link_xfer(glink), &g, pd_mono_us(), &m, &e), 0);
        pd_link_soon(glink);
        PUMP;
    }
    free(name);
    UNTIL(pd_xfer_counts(pd_link_xfer(glink)).moves == 63);     /* of 64 MiB */
    assert_int_equal(pd_taker_counts(T).early, 63);
    pd_leases_revoke_all(leases, "end", pd_mono_us());
    pd_links_soon(&G);
    UNTIL(!pd_taker_counts(T).early);
}

int main(void)
{
#define TEST(f, b) cmocka_unit_test_setup_teardown(f, b, end)
    const struct CMUnitTest tests[] = {
        TEST(it_is_taken_whoever_came_first, begin), TEST(what_is_not_wanted_is_refused, begin), TEST(nothing_comes, begin),
        TEST(an_offer_that_cannot_be_is_told_at_once, begin),
        TEST(there_is_room_for_one, begin_small), TEST(it_waits_and_is_given_up, begin_small), TEST(blocks_are_needed_by_others, begin_small),
        TEST(forgotten_on_the_way, begin),
        TEST(what_is_here_is_not_sent, begin), TEST(the_connection_is_lost_and_it_goes_on, begin), TEST(the_connection_is_lost_and_another_comes, begin),
        TEST(the_connection_is_lost_for_good, begin), TEST(what_was_taken_is_told_over_the_next_connection, begin),
        TEST(read_in_place, begin_in_place), TEST(read_on_in_place, begin_in_place), TEST(read_on_in_place_until_the_lease_ends, begin_in_place),
        TEST(released_over_another_connection, begin_in_place), TEST(released_while_it_is_offered_again, begin_in_place),
        TEST(offered_again_otherwise, begin_in_place), TEST(strangers, begin), TEST(early_offers_are_bounded, begin), TEST(large_early_offers_are_bounded, begin),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
