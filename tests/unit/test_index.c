/* route/index against a plain model of it, and route/feed: what a worker tells of its blocks, in every order that is not the right one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>
#include "../../libcommon/base/hash.h"
#include "../../libcommon/route/feed.h"

typedef uint8_t hash_t[16];
static struct pd_err e;
static uint64_t rng = 1;

static uint32_t roll(uint32_t n)
{
    rng = rng * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng >> 33) % n;
}

/* The chain `c` at depth i: chains with the same c / 4 share their first 7 blocks. */
static void hash(uint32_t c, uint32_t i, uint8_t out[16])
{
    uint32_t v[2] = { i < 7 ? c / 4 : c, i };
    pd_put_be64(out, pd_xxh3(v, sizeof v, 1 + (i < 7)));
    pd_put_be64(out + 8, pd_xxh3(v, sizeof v, 3 + (i < 7)));
}

static hash_t *chain(uint32_t c, uint32_t n)
{
    hash_t *h = calloc(n, 16);
    for (uint32_t i = 0; i < n; i++)
        hash(c, i, h[i]);
    return h;
}

static struct pd_index *fresh(size_t bytes)
{
    struct pd_index *x;
    assert_int_equal(pd_index_new(&(struct pd_index_opts){ .max_bytes = bytes, .seed = 99 }, &x, &e), 0);
    return x;
}

static uint32_t depth_of(struct pd_index *x, uint16_t slot, hash_t *h, uint32_t n)
{
    uint32_t k, got = 0, last = UINT32_MAX;
    const struct pd_hit *hit = pd_index_match(x, (const hash_t *)h, n, &k);
    for (uint32_t i = 0; i < k; i++) {
        assert_true(hit[i].blocks <= last && hit[i].blocks);    /* deepest first */
        last = hit[i].blocks;
        if (hit[i].slot == slot) {
            assert_int_equal(got, 0);                           /* once */
            got = hit[i].blocks;
        }
    }
    return got;
}

/* Workers that hold beginnings of chains, growing and shrinking at their ends: each depth is right after each step. */
static void as_a_model_of_it(void **state)
{
    enum { W = 40, C = 12, N = 60 };
    static uint32_t held[W][C];
    struct pd_index *x = fresh(0);
    uint16_t slot[W];
    hash_t *h[C];
    for (int c = 0; c < C; c++)
        h[c] = chain((uint32_t)c, N);
    for (int w = 0; w < W; w++)
        assert_int_equal(pd_index_join(x, &slot[w], &e), 0);
    for (int step = 0; step < 6000; step++) {
        uint32_t w = roll(W), c = roll(C), to = roll(N + 1);
        if (to > held[w][c])
            assert_int_equal(pd_index_stored(x, slot[w], (const hash_t *)h[c], to, &e), 0);
        for (uint32_t i = held[w][c]; i > to; i--)              /* the blocks that chains share stay while another chain has them */
            if (i - 1 >= 7 || !(held[w][c / 4 * 4] * (c % 4 != 0) >= i || held[w][c / 4 * 4 + 1] * (c % 4 != 1) >= i ||
                                held[w][c / 4 * 4 + 2] * (c % 4 != 2) >= i || held[w][c / 4 * 4 + 3] * (c % 4 != 3) >= i))
                pd_index_removed(x, slot[w], (const hash_t *)&h[c][i - 1], 1);
        held[w][c] = to;
        uint32_t ask = roll(C), n = 1 + roll(N), k;
        pd_index_match(x, (const hash_t *)h[ask], n, &k);
        uint32_t holders = 0;
        for (int v = 0; v < W; v++) {
            uint32_t want = held[v][ask];
            for (uint32_t o = ask / 4 * 4; o < ask / 4 * 4 + 4; o++) {
                uint32_t shared = held[v][o] < 7 ? held[v][o] : 7;
                want = want < shared ? shared : want;
            }
            want = want < n ? want : n;
            holders += want > 0;
            if (step % 20 == 0)
                assert_int_equal(depth_of(x, slot[v], h[ask], n), want);
        }
        pd_index_match(x, (const hash_t *)h[ask], n, &k);
        assert_int_equal(k, holders);
    }
    for (int w = 0; w < W; w++)
        pd_index_leave(x, slot[w]);
    while (pd_index_sweep(x))
        ;
    struct pd_index_stats s = pd_index_stats(x);
    assert_int_equal(s.blocks + s.copies + s.slots, 0);
    for (int c = 0; c < C; c++)
        free(h[c]);
    pd_index_free(x);
}

static void who_left_is_not_matched(void **state)
{
    struct pd_index *x = fresh(0);
    uint16_t a, b, c;
    hash_t *h = chain(3, 5000);
    uint32_t k;
    assert_int_equal(pd_index_join(x, &a, &e) | pd_index_join(x, &b, &e), 0);
    assert_int_equal(pd_index_stored(x, a, (const hash_t *)h, 5000, &e) | pd_index_stored(x, b, (const hash_t *)h, 70, &e), 0);
    pd_index_leave(x, a);
    assert_int_equal(depth_of(x, a, h, 5000), 0);
    assert_int_equal(depth_of(x, b, h, 5000), 70);
    assert_int_equal(pd_index_join(x, &c, &e), 0);
    assert_true(c != a && c != b);                              /* what the old one held is not the new one's */
    assert_true(pd_index_sweep(x));
    pd_index_leave(x, b);                                       /* in the middle of a round */
    while (pd_index_sweep(x))
        ;
    pd_index_match(x, (const hash_t *)h, 5000, &k);
    struct pd_index_stats s = pd_index_stats(x);
    assert_int_equal(k + s.blocks + s.copies, 0);
    assert_int_equal(s.slots, 1);
    assert_int_equal(pd_index_held(x, a) + pd_index_held(x, b), 0);
    free(h);
    pd_index_free(x);
}

static void halves_of_a_hash_are_no_hash(void **state)
{
    struct pd_index *x = fresh(0);
    uint16_t a, b;
    hash_t h[3] = { "0123456789abcdef", "01234567ABCDEFGH", "ABCDEFGH89abcdef" };
    assert_int_equal(pd_index_join(x, &a, &e) | pd_index_join(x, &b, &e), 0);
    for (int i = 0; i < 3; i++)
        assert_int_equal(pd_index_stored(x, i ? b : a, (const hash_t *)h[i], 1, &e), 0);
    assert_int_equal(pd_index_stats(x).blocks, 3);
    for (int i = 0; i < 3; i++)
        assert_true(depth_of(x, a, &h[i], 1) == !i && depth_of(x, b, &h[i], 1) == (i > 0));
    for (uint64_t seed = 0; seed < 10; seed++) {                /* sooner or later in one place */
        struct pd_index *y;
        assert_int_equal(pd_index_new(&(struct pd_index_opts){ .seed = seed }, &y, &e), 0);
        assert_int_equal(pd_index_join(y, &a, &e), 0);
        for (uint32_t i = 0; i < 4000; i++) {
            hash_t v = "0123456789abcdef";
            memcpy(v + 8 * (i & 1), &i, 4);                     /* one half is always the same */
            assert_int_equal(pd_index_stored(y, a, (const hash_t *)&v, 1, &e), 0);
        }
        assert_int_equal(pd_index_stats(y).blocks, 4000);
        pd_index_free(y);
    }
    pd_index_free(x);
}

/* What one removes is its own; memory of many holders comes back; a match of a long chain costs its logarithm. */
static void holders_and_searches(void **state)
{
    enum { W = 40, N = 1024 };
    struct pd_index *x = fresh(0);
    uint16_t slot[W], other;
    hash_t *h = chain(9, N);
    uint32_t k;
    for (int i = 0; i < W; i++)
        assert_int_equal(pd_index_join(x, &slot[i], &e), 0);
    assert_int_equal(pd_index_join(x, &other, &e) | pd_index_stored(x, slot[0], (const hash_t *)h, N, &e), 0);
    size_t few = pd_index_stats(x).bytes;
    pd_index_removed(x, other, (const hash_t *)h, N);
    assert_true(pd_index_stats(x).copies == N && depth_of(x, slot[0], h, N) == N);
    for (int i = 1; i < W; i++)
        assert_int_equal(pd_index_stored(x, slot[i], (const hash_t *)h, N, &e), 0);
    uint64_t searches = pd_index_stats(x).searches;
    pd_index_match(x, (const hash_t *)h, N, &k);
    assert_true(k == W && pd_index_stats(x).searches - searches <= 12);
    pd_index_removed(x, slot[7], (const hash_t *)h + 700, N - 700);
    searches = pd_index_stats(x).searches;
    assert_int_equal(depth_of(x, slot[7], h, N), 700);
    assert_true(pd_index_stats(x).searches - searches <= 24);
    assert_true(pd_index_stats(x).bytes > few);
    for (int i = 3; i < W; i++)
        pd_index_removed(x, slot[i], (const hash_t *)h, N);
    assert_int_equal(pd_index_stats(x).bytes, few);             /* three holders have room in the block's own place */
    for (int i = 3; i < W; i++)
        assert_int_equal(pd_index_stored(x, slot[i], (const hash_t *)h, N, &e), 0);
    for (int i = 0; i < W; i++)
        pd_index_leave(x, slot[i]);
    while (pd_index_sweep(x))
        ;
    assert_true(pd_index_stats(x).bytes == few && !pd_index_stats(x).blocks);
    pd_index_leave(x, other);
    pd_index_leave(x, other);
    assert_int_equal(pd_index_stats(x).slots, 0);
    free(h);
    pd_index_free(x);
}

/* What is stored again, by its holder or by another, stays as what is asked for does. */
static void what_is_stored_again_stays(void **state)
{
    struct pd_index *x = fresh(1 << 20);
    uint16_t a, b, c;
    hash_t *h = chain(5, 60000), *kept = chain(6, 40);
    assert_int_equal(pd_index_join(x, &a, &e) | pd_index_join(x, &b, &e) | pd_index_join(x, &c, &e), 0);
    assert_int_equal(pd_index_stored(x, b, (const hash_t *)kept, 40, &e), 0);
    for (uint32_t i = 0; i < 60000; i++) {
        assert_int_equal(pd_index_stored(x, a, (const hash_t *)&h[i], 1, &e), 0);
        if (i % 2000 == 0) {
            assert_int_equal(pd_index_stored(x, b, (const hash_t *)kept, 20, &e), 0);
            pd_index_removed(x, c, (const hash_t *)kept + 20, 20);
            assert_int_equal(pd_index_stored(x, c, (const hash_t *)kept + 20, 20, &e), 0);
        }
    }
    assert_true(pd_index_stats(x).forgotten > 30000);
    for (int i = 0; i < 40; i++)
        assert_true(pd_index_has(x, b, kept[i]));
    for (int i = 0; i < 10; i++) {                              /* ten hold one block; it is forgotten with what that took */
        assert_int_equal(pd_index_join(x, &c, &e) | pd_index_stored(x, c, (const hash_t *)h, 1, &e), 0);
        assert_true(pd_index_has(x, c, h[0]));
    }
    assert_int_equal(pd_index_stats(x).bytes % 512, 32);        /* tables are of 16 places */
    assert_int_equal(pd_index_stored(x, a, (const hash_t *)h + 1, 59999, &e), 0);
    assert_true(!pd_index_has(x, c, h[0]) && pd_index_stats(x).bytes % 512 == 0);
    free(h);
    free(kept);
    pd_index_free(x);
}

static void all_slots(void **state)
{
    struct pd_index *x = fresh(64 << 20);
    hash_t *h = chain(1, 3);
    uint16_t s = 0;
    uint32_t k;
    for (uint32_t i = 0; i < PD_INDEX_SLOTS; i++) {
        assert_int_equal(pd_index_join(x, &s, &e), 0);
        assert_int_equal(pd_index_stored(x, s, (const hash_t *)h, 1 + (i & 1), &e), 0);
    }
    assert_int_equal(pd_index_join(x, &s, &e), PD_ENOMEM);
    pd_index_match(x, (const hash_t *)h, 3, &k);
    assert_int_equal(k, PD_INDEX_SLOTS);
    pd_index_leave(x, 77);
    assert_int_equal(pd_index_join(x, &s, &e), PD_ENOMEM);      /* not before it is swept */
    while (pd_index_sweep(x))
        ;
    assert_int_equal(pd_index_join(x, &s, &e), 0);
    assert_int_equal(s, 77);
    free(h);
    pd_index_free(x);
}

static void memory_is_bounded(void **state)
{
    struct pd_index *x = fresh(1 << 20);
    uint16_t slot[300], hot;
    hash_t *h = chain(5, 100000);
    assert_int_equal(pd_index_new(&(struct pd_index_opts){ .max_bytes = 1000 }, &x, &e), PD_EUSAGE);
    assert_int_equal(pd_index_join(x, &hot, &e), 0);
    for (int i = 0; i < 300; i++)
        assert_int_equal(pd_index_join(x, &slot[i], &e), 0);
    assert_int_equal(pd_index_stored(x, hot, (const hash_t *)h, 20, &e), 0);
    for (uint32_t i = 20; i < 100000; i++) {
        assert_int_equal(pd_index_stored(x, slot[0], (const hash_t *)&h[i], 1, &e), 0);
        assert_true(pd_index_stats(x).bytes <= 1 << 20);
        if (i % 64 == 0)
            for (int k = 0; k < 20; k++)                        /* asked for: stays */
                assert_int_equal(depth_of(x, hot, h + k, 1), 1);
    }
    struct pd_index_stats s = pd_index_stats(x);
    assert_true(s.forgotten > 70000 && s.blocks > 10000 && s.blocks + s.forgotten == 100000 && s.copies == s.blocks);
    assert_true(pd_index_held(x, hot) == 20 && pd_index_held(x, slot[0]) == s.blocks - 20);
    assert_true(s.blocks <= s.bytes / 32 / 4 * 3);              /* no table is fuller: searches stay short */
    for (int i = 0; i < 300; i++)                               /* sets have their own bound */
        assert_int_equal(pd_index_stored(x, slot[i], (const hash_t *)h + 90000, 9000, &e), 0);
    s = pd_index_stats(x);
    assert_true(s.bytes <= 1 << 20 && s.left_out > 0);
    free(h);
    pd_index_free(x);
}

/* ---- feeds ---- */

static struct pd_kvevent event(const char *op, uint64_t seq, hash_t *h, uint32_t n)
{
    struct pd_kvevent v = { .life = "ABCDEFG", .seq = seq, .hashes = { h ? h[0] : NULL, n * 16 }, .block_size = 16, .part = 0, .parts = 1 };
    strcpy(v.op, op);
    return v;
}

static int feed(struct pd_feed *f, struct pd_kvevent v) { return pd_feed_event(f, &v, &e); }

static void changes_in_their_order(void **state)
{
    struct pd_index *x = fresh(0);
    struct pd_feed f;
    hash_t *h = chain(9, 100), zero[100] = { { 0 } };
    uint32_t k;
    pd_feed_open(&f, x, 16, 100);
    assert_int_equal(feed(&f, event("stored", 4, h, 10)), PD_FED_GAP);          /* it began before us */
    assert_false(f.known);
    assert_int_equal(feed(&f, event("stored", 1, h, 10)), PD_FED);
    assert_int_equal(depth_of(x, f.slot, h, 100), 10);
    struct pd_kvevent v = event("stored", 2, h + 10, 5);
    v.has_parent = true;
    memcpy(v.parent, h[9], 16);
    assert_int_equal(feed(&f, v), PD_FED);
    assert_int_equal(feed(&f, v), PD_FED);                                      /* again: nothing */
    assert_int_equal(f.repeated, 1);
    assert_int_equal(feed(&f, event("removed", 3, h + 12, 3)), PD_FED);
    assert_int_equal(depth_of(x, f.slot, h, 100), 12);
    assert_int_equal(feed(&f, event("stored", 5, h + 12, 3)), PD_FED_GAP);
    assert_non_null(strstr(e.msg, "change 5 comes after change 3"));
    assert_int_equal(depth_of(x, f.slot, h, 100), 0);                           /* nothing is believed any more */
    assert_true(f.gaps == 2 && f.applied == 3);
    assert_int_equal(feed(&f, event("stored", 6, h + 12, 3)), PD_FED_GAP);

    v = event("snapshot", 8, h, 50);
    v.parents = (struct pd_bin){ zero[0], 50 * 16 };
    memcpy(zero[1], h[0], 49 * 16);
    v.parts = 2;
    assert_int_equal(feed(&f, v), PD_FED);
    assert_false(f.known);
    assert_int_equal(feed(&f, event("stored", 9, h + 50, 1)), PD_FED_GAP);      /* half of a snapshot is none */
    assert_int_equal(feed(&f, v), PD_FED);
    assert_int_equal(feed(&f, event("stored", 1, h, 1)), PD_FED_GAP);           /* nor does its life begin in the middle of one */
    struct pd_kvevent w = event("snapshot", 8, h + 50, 50);
    w.parents = (struct pd_bin){ h[49], 50 * 16 };
    w.parts = 2;
    w.part = 1;
    for (int i = 0; i < 3; i++) {                                               /* the second part of another one */
        struct pd_kvevent bad = w;
        assert_int_equal(feed(&f, v), PD_FED);
        bad.seq += i == 0;
        bad.life[0] ^= i == 1;
        if (i == 2)
            pd_feed_lost(&f);
        assert_int_equal(feed(&f, bad), PD_ECORRUPT);
        pd_index_match(x, (const hash_t *)h, 100, &k);
        assert_true(!k && !f.known && f.snapshots == 0);
    }
    f.orphans = 0;
    assert_int_equal(feed(&f, v), PD_FED);
    assert_int_equal(feed(&f, w), PD_FED);
    assert_true(f.known && f.snapshots == 1);
    assert_int_equal(f.orphans, 0);
    assert_int_equal(depth_of(x, f.slot, h, 100), 100);
    v = event("snapshot", 12, h + 60, 2);                                       /* another one: nothing of the first stays; a chain without its beginning */
    v.parents = (struct pd_bin){ h[59], 32 };
    assert_int_equal(feed(&f, v), PD_FED);
    pd_index_match(x, (const hash_t *)h, 100, &k);
    assert_true(!k && depth_of(x, f.slot, h + 60, 40) == 2 && f.orphans == 1 && f.snapshots == 2);
    assert_int_equal(feed(&f, w), PD_ECORRUPT);                                 /* a part that is not due */
    assert_false(f.known);
    pd_feed_close(&f);
    while (pd_index_sweep(x))
        ;
    assert_int_equal(pd_index_stats(x).blocks + pd_index_stats(x).slots, 0);
    free(h);
    pd_index_free(x);
}

static void other_lives_and_lies(void **state)
{
    struct pd_index *x = fresh(0);
    struct pd_feed f;
    hash_t *h = chain(2, 40);
    uint32_t k;
    pd_feed_open(&f, x, 16, 100);
    assert_int_equal(feed(&f, event("stored", 1, h, 10)), PD_FED);
    struct pd_kvevent v = event("stored", 2, h + 10, 10);
    v.life[0] = 'Z';
    assert_int_equal(feed(&f, v), PD_FED_GAP);
    assert_non_null(strstr(e.msg, "of another life"));
    assert_int_equal(depth_of(x, f.slot, h, 40), 0);
    v.seq = 1;                                                                  /* a life from its beginning */
    assert_int_equal(feed(&f, v), PD_FED);
    assert_int_equal(depth_of(x, f.slot, h + 10, 30), 10);
    v = event("cleared", 2, NULL, 0);
    v.life[0] = 'Z';
    assert_int_equal(feed(&f, v), PD_FED);
    pd_index_match(x, (const hash_t *)h + 10, 30, &k);
    assert_int_equal(k, 0);
    v = event("stored", 3, h, 5);
    v.life[0] = 'Z';
    v.has_parent = true;
    memcpy(v.parent, h[30], 16);
    assert_int_equal(feed(&f, v), PD_FED);
    assert_int_equal(f.orphans, 1);
    v.seq = 4;
    v.block_size = 32;
    assert_int_equal(feed(&f, v), PD_ECORRUPT);
    assert_non_null(strstr(e.msg, "blocks of 32 tokens, from a worker that registered blocks of 16"));
    assert_false(f.known);
    assert_int_equal(depth_of(x, f.slot, h, 5), 0);
    pd_feed_close(&f);
    pd_feed_open(&f, x, 16, 20);                                                /* a worker of 20 blocks */
    assert_int_equal(feed(&f, event("stored", 1, h, 20)), PD_FED);
    assert_int_equal(feed(&f, event("removed", 2, h + 19, 1)), PD_FED);
    assert_int_equal(feed(&f, event("stored", 3, h + 20, 1)), PD_FED);
    assert_int_equal(feed(&f, event("stored", 4, h + 21, 1)), PD_ECORRUPT);
    assert_non_null(strstr(e.msg, "more than 20 blocks"));
    assert_false(f.known);
    assert_int_equal(depth_of(x, f.slot, h, 20), 0);
    assert_int_equal(feed(&f, event("stored", 1, h, 5)), PD_FED);
    pd_feed_close(&f);
    pd_index_match(x, (const hash_t *)h, 20, &k);
    assert_int_equal(k, 0);
    free(h);
    pd_index_free(x);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(as_a_model_of_it), cmocka_unit_test(who_left_is_not_matched), cmocka_unit_test(halves_of_a_hash_are_no_hash),
        cmocka_unit_test(holders_and_searches), cmocka_unit_test(what_is_stored_again_stays), cmocka_unit_test(all_slots),
        cmocka_unit_test(memory_is_bounded), cmocka_unit_test(changes_in_their_order), cmocka_unit_test(other_lives_and_lies) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
