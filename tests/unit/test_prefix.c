/* kv/prefix: the chain of block hashes, the index by them, and its events. */
#include <pthread.h>
#include <sys/mman.h>
#include "kv_fixture.h"
#include "../../libcommon/wire/frame.h"
#include "../../libcommon/wire/value.h"

static const struct pd_str none = { NULL, 0 };

static void hashes_are_chained(void **state)
{
    int32_t a[64], b[64];
    uint8_t x[4][16], y[4][16];
    for (int i = 0; i < 64; i++)
        a[i] = b[i] = i * 3;
    pd_block_hashes(7, a, 64, 16, none, none, x);
    pd_block_hashes(7, a, 64, 16, none, none, y);
    assert_memory_equal(x, y, sizeof x);
    b[17]++;                    /* in block 1: block 0 stays, all later ones change */
    pd_block_hashes(7, b, 64, 16, none, none, y);
    assert_memory_equal(x[0], y[0], 16);
    for (int i = 1; i < 4; i++)
        assert_memory_not_equal(x[i], y[i], 16);
    /* the same tokens after another parent are another block */
    memcpy(b, a + 16, 32 * sizeof *b);
    pd_block_hashes(7, b, 32, 16, none, none, y);
    assert_memory_not_equal(x[1], y[0], 16);
}

static void only_full_blocks(void **state)
{
    int32_t a[40] = { 0 };
    uint8_t x[3][16], y[3][16];
    memset(x, 0xee, sizeof x);
    pd_block_hashes(7, a, 39, 16, none, none, x);
    pd_block_hashes(7, a, 32, 16, none, none, y);
    assert_memory_equal(x, y, 32);
    for (int i = 0; i < 16; i++)
        assert_int_equal(x[2][i], 0xee);
    pd_block_hashes(7, a, 15, 16, none, none, x);       /* none at all */
    assert_memory_equal(x, y, 32);
}

static void everything_counts(void **state)
{
    int32_t a[16] = { 5 };
    uint8_t h[6][16];
    struct pd_str ab = { "ab", 2 }, a1 = { "a", 1 }, c = { "c", 1 }, bc = { "bc", 2 };
    pd_block_hashes(7, a, 16, 16, none, none, &h[0]);
    pd_block_hashes(8, a, 16, 16, none, none, &h[1]);           /* other must-fields */
    pd_block_hashes(7, a, 16, 16, ab, c, &h[2]);
    pd_block_hashes(7, a, 16, 16, a1, bc, &h[3]);               /* the same letters, otherwise divided */
    pd_block_hashes(7, a, 16, 16, none, ab, &h[4]);
    pd_block_hashes(7, a, 16, 16, ab, none, &h[5]);
    for (int i = 0; i < 6; i++)
        for (int k = 0; k < i; k++)
            assert_memory_not_equal(h[i], h[k], 16);
}

/* The definition, byte by byte: parent, block size, ids, three lengths; little-endian. The digests were computed by another program, of salts of so many "s":
 * what is hashed is 40 bytes more, in one piece up to 512. */
static void the_definition_is_fixed(void **state)
{
    static const struct { size_t salt; const char *digest; } v[] = {
        { 1, "e837667495fb39d2d46a2d1c93e70fd9" }, { 472, "97b6fae78d3da70b16990de7b6a1353a" },
        { 473, "3bffedf53c3ec4bcd5c262e48d3d9822" }, { 700, "468a03abcf5bb5108e8156b25a3c37da" } };
    int32_t a[2] = { 1, -2 };
    uint8_t h[1][16];
    char hex[33], salt[700];
    memset(salt, 's', sizeof salt);
    for (size_t i = 0; i < sizeof v / sizeof *v; i++) {
        pd_block_hashes(42, a, 2, 2, none, (struct pd_str){ salt, v[i].salt }, h);
        pd_hex(h[0], 16, hex);
        assert_string_equal(hex, v[i].digest);
    }
}

/* ---- the index ---- */

#define BS 4
static const struct pd_pool_geom geom = { .layers = 1, .kv_heads = 1, .head_dim = 4, .block_size = BS, .dtype = PD_F16 };
static const struct pd_prefix_key no_key = { { NULL, 0 }, { NULL, 0 } };
struct rig { struct pd_pool *pool; struct pd_prefix *x; };

static struct rig rig(uint32_t blocks, struct pd_prefix_opts o)
{
    struct rig r;
    struct pd_err e = { 0 };
    assert_int_equal(pd_pool_new(&geom, (int64_t)blocks * 2 * BS * 4 * 2, &r.pool, &e), 0);
    assert_int_equal(pd_pool_stats(r.pool).max, blocks);
    o.must_seed = o.must_seed ? o.must_seed : 7;
    assert_int_equal(pd_prefix_new(r.pool, &o, &r.x, &e), 0);
    return r;
}

static void adds_up(const struct rig *r)
{
    struct pd_pool_stats s = pd_pool_stats(r->pool);
    assert_int_equal(s.free + s.cached + s.used, s.total);
    assert_true(s.cached <= pd_prefix_stats(r->x).blocks);
}

/* Everything goes, and nothing was lost. */
static void rig_end(struct rig *r)
{
    struct pd_pool_stats s = pd_pool_stats(r->pool);
    assert_int_equal(s.used, 0);
    assert_int_equal(s.cached, pd_prefix_stats(r->x).blocks);
    pd_prefix_free(r->x);
    s = pd_pool_stats(r->pool);
    assert_int_equal(s.free, s.total);
    pd_pool_free(r->pool);
}

/* A run as the batch makes one: what is cached is taken, the rest is computed (a block says whose it is), and all of it is left behind. How many hit. */
static void sign(struct pd_pool *p, uint32_t block, const int32_t *t) { memcpy(pd_pool_base(p, block), t, BS * sizeof *t); }
static void signed_by(struct pd_pool *p, uint32_t block, const int32_t *t)
{
    if (memcmp(pd_pool_base(p, block), t, BS * sizeof *t))
        fail_msg("block %u holds other tokens", block);
}

static uint32_t run(struct rig *r, const struct pd_prefix_key *k, const int32_t *t, uint32_t n)
{
    uint32_t b[64] = { 0 }, hit = pd_prefix_take(r->x, k, t, n * BS, b, n);
    struct pd_err e = { 0 };
    for (uint32_t i = 0; i < hit; i++)
        signed_by(r->pool, b[i], t + i * BS);
    for (uint32_t i = hit; i < n; i++) {
        assert_int_equal(pd_pool_take(r->pool, 1, &b[i], &e), 0);
        sign(r->pool, b[i], t + i * BS);
    }
    pd_prefix_put(r->x, k, t, b, n);
    for (uint32_t i = 0; i < n; i++)
        pd_pool_put(r->pool, b[i]);
    adds_up(r);
    return hit;
}

static void fill(int32_t *t, uint32_t blocks, int32_t from)
{
    for (uint32_t i = 0; i < blocks * BS; i++)
        t[i] = from + (int32_t)i;
}

static void what_was_left_is_found(void **state)
{
    struct rig r = rig(64, (struct pd_prefix_opts){ 0 });
    int32_t t[10 * BS];
    uint32_t b[10];
    fill(t, 10, 100);
    assert_int_equal(run(&r, &no_key, t, 6), 0);
    assert_int_equal(run(&r, &no_key, t, 6), 6);
    assert_int_equal(run(&r, &no_key, t, 10), 6);       /* goes on */
    assert_int_equal(pd_prefix_peek(r.x, &no_key, t, 10 * BS), 10);
    assert_int_equal(pd_prefix_peek(r.x, &no_key, t, 7 * BS - 1), 6);   /* whole blocks */
    t[4 * BS]++;
    assert_int_equal(pd_prefix_peek(r.x, &no_key, t, 10 * BS), 4);
    t[4 * BS]--;
    assert_int_equal(pd_prefix_peek(r.x, &no_key, t + BS, 9 * BS), 0);  /* the same tokens after another parent */
    assert_int_equal(pd_prefix_take(r.x, &no_key, t, 10 * BS, b, 3), 3);        /* no more than asked for */
    assert_int_equal(pd_pool_stats(r.pool).used, 3);
    for (int i = 0; i < 3; i++)
        pd_pool_put(r.pool, b[i]);
    assert_int_equal(pd_prefix_stats(r.x).blocks, 10);
    pd_prefix_clear(r.x);
    assert_int_equal(pd_prefix_peek(r.x, &no_key, t, 10 * BS), 0);
    assert_int_equal(pd_pool_stats(r.pool).cached, 0);
    rig_end(&r);
}

static void adapter_and_salt_divide(void **state)
{
    static const struct pd_prefix_key k[] = { { { NULL, 0 }, { NULL, 0 } }, { { "ab", 2 }, { "c", 1 } }, { { "a", 1 }, { "bc", 2 } }, { { NULL, 0 }, { "abc", 3 } },
                                             { { "abc", 3 }, { NULL, 0 } } };
    char large[PD_PREFIX_KEY + 1];
    int32_t t[4 * BS];
    /* with hashes that say nothing, only the comparison is left: one key gets in, and nobody else's question finds it */
    for (uint32_t bits = 0; bits < 2; bits++) {
        struct rig r = rig(64, (struct pd_prefix_opts){ .hash_bits = bits });
        fill(t, 4, 0);
        for (int round = 0; round < 2; round++)
            for (int i = 0; i < 5; i++) {
                uint32_t hit = run(&r, &k[i], t, 4);
                if (!bits)
                    assert_int_equal(hit, round ? 4 : 0);
                else
                    assert_true(hit == 0 || (round && i == 0));
            }
        memset(large, 'x', sizeof large);
        struct pd_prefix_key key = { { NULL, 0 }, { large, sizeof large } };
        assert_int_equal(run(&r, &key, t, 4), 0);
        assert_int_equal(run(&r, &key, t, 4), 0);       /* too long to be kept */
        rig_end(&r);
    }
}

/* Few bits: most contents share a hash with others. Whatever is found must hold just the tokens asked for (run looks). */
static void the_hash_locates_comparison_decides(void **state)
{
    for (uint32_t bits = 1; bits <= 9; bits += 4)
        for (int lru = 0; lru < 2; lru++) {
            struct rig r = rig(40, (struct pd_prefix_opts){ .hash_bits = bits, .evict = lru ? PD_EVICT_LRU : PD_EVICT_LRU_TAIL });
            uint64_t s = bits;
            int32_t t[8 * BS];
            uint32_t hits = 0;
            for (int i = 0; i < 3000; i++) {
                for (int j = 0; j < 8 * BS; j++)
                    t[j] = j % BS ? 0 : (int32_t)(fix_random(&s) % 3);
                hits += run(&r, &no_key, t, 1 + (uint32_t)(fix_random(&s) % 8));
            }
            assert_true(hits > 0);
            rig_end(&r);
        }
}

static void the_tail_goes_first_and_the_pinned_stay(void **state)
{
    struct rig r = rig(12, (struct pd_prefix_opts){ 0 });
    struct pd_err e = { 0 };
    int32_t a[6 * BS], b[6 * BS];
    uint32_t held[4], more[12];
    fill(a, 6, 0);
    fill(b, 6, 1000);
    run(&r, &no_key, a, 6);
    run(&r, &no_key, b, 6);
    assert_int_equal(pd_pool_stats(r.pool).cached, 12);
    assert_int_equal(pd_pool_take(r.pool, 2, more, &e), 0);     /* the pool asks the cache */
    assert_int_equal(pd_prefix_peek(r.x, &no_key, a, 6 * BS), 4);
    assert_int_equal(pd_prefix_peek(r.x, &no_key, b, 6 * BS), 6);
    assert_int_equal(pd_prefix_take(r.x, &no_key, a, 6 * BS, held, 3), 3);      /* 3 of a are in use, and young */
    assert_int_equal(pd_pool_take(r.pool, 7, more + 2, &e), 0);
    assert_int_equal(pd_prefix_peek(r.x, &no_key, a, 6 * BS), 3);
    assert_int_equal(pd_prefix_peek(r.x, &no_key, b, 6 * BS), 0);
    adds_up(&r);
    assert_int_equal(pd_pool_take(r.pool, 1, more + 9, &e), PD_ENOMEM);
    assert_non_null(strstr(e.msg, "1 blocks"));
    assert_int_equal(pd_pool_stats(r.pool).cached, 0);
    assert_int_equal(pd_prefix_peek(r.x, &no_key, a, 6 * BS), 3);       /* pinned: found, not evicted */
    for (int i = 0; i < 9; i++)
        pd_pool_put(r.pool, more[i]);
    for (int i = 0; i < 3; i++)
        pd_pool_put(r.pool, held[i]);
    assert_int_equal(pd_prefix_evict(r.x, 1), 1);
    assert_int_equal(pd_prefix_peek(r.x, &no_key, a, 6 * BS), 2);
    assert_int_equal(pd_prefix_evict(r.x, 99), 2);
    assert_int_equal(pd_prefix_evict(r.x, 99), 0);
    rig_end(&r);
}

/* Two runs compute the same blocks at once: one block each is kept, and what goes on from the other's does not hang the cache. */
static void the_same_computed_twice(void **state)
{
    struct rig r = rig(8, (struct pd_prefix_opts){ 0 });
    struct pd_err e = { 0 };
    int32_t t[3 * BS];
    uint32_t a[2], b[3], all[8];
    fill(t, 3, 0);
    assert_int_equal(pd_pool_take(r.pool, 2, a, &e), 0);
    assert_int_equal(pd_pool_take(r.pool, 3, b, &e), 0);
    assert_int_equal(pd_prefix_put(r.x, &no_key, t, a, 2), 2);
    assert_int_equal(pd_prefix_put(r.x, &no_key, t, b, 3), 1);
    assert_int_equal(pd_prefix_put(r.x, &no_key, t, b, 3), 0);
    pd_pool_put(r.pool, a[0]);
    pd_pool_put(r.pool, a[1]);
    adds_up(&r);
    assert_int_equal(pd_pool_take(r.pool, 5, all, &e), 0);      /* the two of a must go though the third block, held, goes on from them */
    assert_int_equal(pd_prefix_peek(r.x, &no_key, t, 3 * BS), 0);
    adds_up(&r);
    for (int i = 0; i < 3; i++)
        pd_pool_put(r.pool, b[i]);
    for (int i = 0; i < 5; i++)
        pd_pool_put(r.pool, all[i]);
    rig_end(&r);
}

/* ---- eviction against a list that does it in the plainest way ---- */

struct plain { uint64_t id[64]; uint32_t n, most; bool tail; };       /* oldest first */
static bool plain_has(const struct plain *p, uint64_t id)
{
    for (uint32_t i = 0; i < p->n; i++)
        if (p->id[i] == id)
            return true;
    return false;
}
static void plain_touch(struct plain *p, uint64_t id)
{
    for (uint32_t i = 0; i < p->n; i++)
        if (p->id[i] == id) {
            memmove(&p->id[i], &p->id[i + 1], (p->n - i - 1) * sizeof *p->id);
            p->id[p->n - 1] = id;
            return;
        }
    if (p->n == p->most)
        memmove(p->id, p->id + 1, --p->n * sizeof *p->id);
    p->id[p->n++] = id;
}
static uint32_t plain_run(struct plain *p, const uint64_t *id, uint32_t n)
{
    uint32_t hit = 0;
    while (hit < n && plain_has(p, id[hit]))
        hit++;
    for (uint32_t i = 0; i < n; i++)
        plain_touch(p, id[i]);
    for (uint32_t i = n; i-- && p->tail;)
        plain_touch(p, id[i]);
    return hit;
}

static void eviction_is_as_said(void **state)
{
    for (int tail = 0; tail < 2; tail++) {
        struct rig r = rig(100, (struct pd_prefix_opts){ .max_blocks = 24, .evict = tail ? PD_EVICT_LRU_TAIL : PD_EVICT_LRU });
        struct plain p = { .most = 24, .tail = tail };
        uint64_t s = 3, total = 0;
        uint32_t most = 0;
        for (int i = 0; i < 20000; i++) {
            int32_t t[6 * BS];
            uint64_t id[6], chain = 1;
            uint32_t n = 1 + (uint32_t)(fix_random(&s) % 6);
            for (uint32_t b = 0; b < n; b++) {
                uint64_t v = fix_random(&s) % (b < 2 ? 3 : 2);
                for (int j = 0; j < BS; j++)
                    t[b * BS + (uint32_t)j] = (int32_t)v * 10 + j;
                id[b] = chain = chain * 7 + v + 1;
            }
            uint32_t want = plain_run(&p, id, n), got = run(&r, &no_key, t, n);
            if (want != got)
                fail_msg("run %d of %s: %u blocks hit, %u expected", i, tail ? "lru-tail" : "lru", got, want);
            total += got;
            assert_int_equal(pd_prefix_stats(r.x).blocks, p.n);
            most = pd_prefix_stats(r.x).entries > most ? pd_prefix_stats(r.x).entries : most;
        }
        assert_true(total > 1000 && total < 60000);
        assert_true(tail ? most == 24 : most > 24 && most <= 200);      /* lru remembers parents that went before their children */
        struct pd_prefix_stats st = pd_prefix_stats(r.x);
        assert_int_equal(st.queries, 20000);
        assert_int_equal(st.hit_blocks, total);
        assert_int_equal(st.stored - st.evicted, 24);
        rig_end(&r);
    }
}

/* However many prompts come, the memory is that of the pool's blocks. */
static void memory_is_bounded(void **state)
{
    for (int lru = 0; lru < 2; lru++) {
        struct rig r = rig(64, (struct pd_prefix_opts){ .evict = lru ? PD_EVICT_LRU : PD_EVICT_LRU_TAIL, .ring_records = 16, .ring_bytes = 4096 });
        uint64_t s = 5;
        size_t early = 0;
        for (int i = 0; i < 20000; i++) {
            int32_t t[32 * BS];
            for (int j = 0; j < 32 * BS; j++)
                t[j] = (int32_t)(fix_random(&s) % 4);
            run(&r, &no_key, t, 1 + (uint32_t)(fix_random(&s) % 32));
            if (i == 1000)
                early = pd_prefix_stats(r.x).bytes;
        }
        assert_true(pd_prefix_stats(r.x).bytes < early + 4096);
        assert_true(pd_prefix_stats(r.x).entries <= (lru ? 128 : 64));
        rig_end(&r);
    }
}

static void another_process_s_blocks_do_not_enter(void **state)
{
    struct rig r = rig(16, (struct pd_prefix_opts){ 0 });
    struct pd_err e = { 0 };
    int32_t t[3 * BS];
    uint32_t b[3], slab;
    fill(t, 3, 0);
    assert_int_equal(pd_pool_take(r.pool, 2, b, &e), 0);
    size_t n = pd_pool_slab_bytes(r.pool);
    uint8_t *map = mmap(NULL, n, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_int_equal(pd_pool_adopt(r.pool, map, &slab, &e), 0);
    b[2] = b[1];
    b[1] = slab * pd_pool_slab_blocks(r.pool);
    assert_int_equal(pd_pool_borrow(r.pool, b[1], &e), 0);
    assert_int_equal(pd_prefix_put(r.x, &no_key, t, b, 3), 1);  /* nor what follows them */
    for (int i = 0; i < 3; i++)
        pd_pool_put(r.pool, b[i]);
    pd_pool_disown(r.pool, slab);
    rig_end(&r);
}

/* ---- events ---- */

/* An image of the index, kept from its events alone. */
struct image { uint8_t life[8]; uint64_t seq; bool known; uint32_t n, snapshots; struct { uint8_t hash[16], parent[16]; int32_t t[BS]; } b[256]; };

static void image_add(struct image *m, const uint8_t *hash, const uint8_t *parent, const uint8_t *t)
{
    for (uint32_t i = 0; i < m->n; i++)
        if (!memcmp(m->b[i].hash, hash, 16))
            fail_msg("a block is stored that is there already");
    assert_true(m->n < 256);
    memcpy(m->b[m->n].hash, hash, 16);
    memcpy(m->b[m->n].parent, parent, 16);
    memcpy(m->b[m->n++].t, t, sizeof m->b[0].t);
}

static void image_apply(struct image *m, const struct pd_kvevent *v)
{
    uint8_t parent[16] = { 0 };
    bool snap = !strcmp(v->op, "snapshot");
    if (snap && !v->part) {
        m->n = 0;
        m->known = true;
        m->snapshots++;
        memcpy(m->life, v->life, 8);
    }
    assert_true(m->known);
    assert_memory_equal(m->life, v->life, 8);
    assert_int_equal(v->seq, snap ? v->part ? m->seq : v->seq : m->seq + 1);    /* no gap that was not told by a snapshot */
    m->seq = v->seq;
    if (v->has_parent)
        memcpy(parent, v->parent, 16);
    if (!strcmp(v->op, "cleared"))
        m->n = 0;
    for (uint32_t i = 0; i < pd_kvevent_blocks(v); i++) {
        const uint8_t *h = v->hashes.p + i * 16;
        if (!strcmp(v->op, "removed")) {
            uint32_t k = 0;
            while (k < m->n && memcmp(m->b[k].hash, h, 16))
                k++;
            if (k == m->n)
                fail_msg("a block is removed that is not there");
            m->b[k] = m->b[--m->n];
            continue;
        }
        assert_int_equal(v->block_size, BS);
        image_add(m, h, snap ? v->parents.p + i * 16 : parent, v->token_ids.p + i * BS * 4);
        memcpy(parent, h, 16);
    }
}

static void listen_to(struct pd_prefix *x, struct pd_kvcursor *c, struct image *m, size_t bytes)
{
    struct pd_buf b = { 0 };
    struct pd_err e = { 0 };
    int more = pd_prefix_events(x, c, bytes, &b, &e);
    assert_true(more >= 0);
    for (size_t at = 0, n = 0; at < b.n; at += n) {
        struct pd_arena a = { 0 };
        struct pd_kvevent v;
        struct pd_frame_scan scan = { 0 };
        assert_int_equal(pd_frame_next(&scan, b.p + at, b.n - at, SIZE_MAX / 2, &n, &e), 1);
        if (pd_kvevent_decode(b.p + at, n, &a, &v, &e))
            fail_msg("%s", e.msg);
        image_apply(m, &v);
        pd_arena_free(&a);
    }
    pd_buf_free(&b);
    if (more)
        listen_to(x, c, m, bytes);
}

static int by_hash(const void *a, const void *b) { return memcmp(a, b, 16); }
static void images_equal(struct image *a, struct image *b)
{
    qsort(a->b, a->n, sizeof a->b[0], by_hash);
    qsort(b->b, b->n, sizeof b->b[0], by_hash);
    assert_int_equal(a->n, b->n);
    assert_int_equal(a->seq, b->seq);
    assert_memory_equal(a->b, b->b, a->n * sizeof a->b[0]);
}

static void subscribers_know_the_index(void **state)
{
    for (int lru = 0; lru < 2; lru++) {
        struct rig r = rig(48, (struct pd_prefix_opts){ .evict = lru ? PD_EVICT_LRU : PD_EVICT_LRU_TAIL, .ring_records = 12 });
        static struct image eager, lazy, late, back;
        struct pd_kvcursor ce, cl, cb, ct;
        uint64_t s = 9;
        memset(&eager, 0, sizeof eager);
        memset(&lazy, 0, sizeof lazy);
        memset(&back, 0, sizeof back);
        pd_kvcursor_open(&ce, r.x, NULL, 0);
        pd_kvcursor_open(&cl, r.x, NULL, 0);
        for (int i = 0; i < 4000; i++) {
            int32_t t[9 * BS];
            for (int j = 0; j < 9 * BS; j++)
                t[j] = j % BS ? 1 : (int32_t)(fix_random(&s) % 3);
            run(&r, &no_key, t, 1 + (uint32_t)(fix_random(&s) % 9));
            if (fix_random(&s) % 300 == 0)
                pd_prefix_clear(r.x);
            if (fix_random(&s) % 20 == 0)
                pd_prefix_evict(r.x, (uint32_t)(fix_random(&s) % 9));
            listen_to(r.x, &ce, &eager, 1);
            assert_int_equal(eager.n, pd_prefix_stats(r.x).blocks);
            if (i % 37 == 0) {
                memset(&late, 0, sizeof late);          /* comes now: a snapshot */
                pd_kvcursor_open(&ct, r.x, NULL, 0);
                listen_to(r.x, &ct, &late, 4096);
                pd_kvcursor_close(&ct);
                images_equal(&eager, &late);
                assert_int_equal(late.snapshots, 1);
                listen_to(r.x, &cl, &lazy, 200);
                images_equal(&eager, &lazy);
            }
            if (i % 5 == 0) {                           /* one that is off the line and comes back where it was */
                pd_kvcursor_open(&cb, r.x, back.known ? back.life : NULL, back.seq);
                listen_to(r.x, &cb, &back, 200);
                pd_kvcursor_close(&cb);
                images_equal(&eager, &back);
            }
        }
        assert_int_equal(eager.snapshots, 1);           /* the first word, and never again */
        assert_true(lazy.snapshots > 50);               /* the ring was too short for it */
        assert_in_range(back.snapshots, 1, 799);        /* mostly the ring was enough */
        pd_kvcursor_open(&cb, r.x, (const uint8_t *)"anotherl", eager.seq);     /* of another life: what it knows is nothing */
        uint32_t before = back.snapshots;
        listen_to(r.x, &cb, &back, 1 << 20);
        assert_int_equal(back.snapshots, before + 1);
        pd_kvcursor_open(&cb, r.x, eager.life, eager.seq + 1000);               /* and what lies in the future too */
        listen_to(r.x, &cb, &back, 1 << 20);
        assert_int_equal(back.snapshots, before + 2);
        images_equal(&eager, &back);
        pd_kvcursor_close(&ce);
        pd_kvcursor_close(&cl);
        rig_end(&r);
    }
}

/* A snapshot of more than one record. */
static void a_large_snapshot_comes_in_parts(void **state)
{
    struct rig r = rig(3000, (struct pd_prefix_opts){ 0 });
    struct pd_kvcursor c;
    struct pd_buf b = { 0 };
    struct pd_err e = { 0 };
    int32_t t[64 * BS];
    uint32_t n_blocks = 0, parts = 0;
    for (int i = 0; i < 40; i++) {
        fill(t, 64, i * 1000);
        run(&r, &no_key, t, 64);
    }
    pd_kvcursor_open(&c, r.x, NULL, 0);
    assert_int_equal(pd_prefix_events(r.x, &c, SIZE_MAX, &b, &e), 0);
    for (size_t at = 0, n = 0; at < b.n; at += n, parts++) {
        struct pd_arena a = { 0 };
        struct pd_kvevent v;
        n = pd_value_len(b.p + at, b.n - at);
        assert_int_equal(pd_kvevent_decode(b.p + at, n, &a, &v, &e), 0);
        assert_int_equal(v.part, parts);
        assert_int_equal(v.parts, 3);
        n_blocks += pd_kvevent_blocks(&v);
        pd_arena_free(&a);
    }
    assert_int_equal(parts, 3);
    assert_int_equal(n_blocks, 40 * 64);
    pd_kvcursor_close(&c);
    pd_buf_free(&b);
    rig_end(&r);
}

/* ---- two threads ---- */

static _Atomic int over;
static void *look_up(void *arg)
{
    struct rig *r = arg;
    struct pd_kvcursor c;
    struct pd_buf b = { 0 };
    uint64_t s = 17;
    uint32_t found = 0;
    pd_kvcursor_open(&c, r->x, NULL, 0);
    while (!over) {
        int32_t t[8 * BS];
        uint32_t out[8];
        for (int j = 0; j < 8 * BS; j++)
            t[j] = j % BS ? 0 : (int32_t)(fix_random(&s) % 2);
        uint32_t n = pd_prefix_take(r->x, &no_key, t, 8 * BS, out, 8);
        for (uint32_t i = 0; i < n; i++) {
            signed_by(r->pool, out[i], t + i * BS);
            pd_pool_put(r->pool, out[i]);
        }
        found += n;
        b.n = 0;
        pd_prefix_events(r->x, &c, 1000, &b, NULL);
    }
    pd_kvcursor_close(&c);
    pd_buf_free(&b);
    return found ? NULL : arg;
}

static void any_thread_may_look(void **state)
{
    struct rig r = rig(40, (struct pd_prefix_opts){ 0 });
    pthread_t other;
    void *failed;
    uint64_t s = 23;
    over = 0;
    assert_int_equal(pthread_create(&other, NULL, look_up, &r), 0);
    for (int i = 0; i < 6000; i++) {
        int32_t t[8 * BS];
        uint32_t b[8], n = 1 + (uint32_t)(fix_random(&s) % 8);
        for (int j = 0; j < 8 * BS; j++)
            t[j] = j % BS ? 0 : (int32_t)(fix_random(&s) % 2);
        uint32_t hit = pd_prefix_take(r.x, &no_key, t, n * BS, b, n);
        struct pd_err e;
        for (uint32_t k = hit; k < n; k++) {
            assert_int_equal(pd_pool_take(r.pool, 1, &b[k], &e), 0);
            sign(r.pool, b[k], t + k * BS);
        }
        pd_prefix_put(r.x, &no_key, t, b, n);
        for (uint32_t k = 0; k < n; k++)
            pd_pool_put(r.pool, b[k]);
        if (i % 100 == 0)
            pd_prefix_clear(r.x);
    }
    over = 1;
    pthread_join(other, &failed);
    assert_null(failed);
    rig_end(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hashes_are_chained), cmocka_unit_test(only_full_blocks), cmocka_unit_test(everything_counts), cmocka_unit_test(the_definition_is_fixed),
        cmocka_unit_test(what_was_left_is_found), cmocka_unit_test(adapter_and_salt_divide), cmocka_unit_test(the_hash_locates_comparison_decides),
        cmocka_unit_test(the_tail_goes_first_and_the_pinned_stay), cmocka_unit_test(the_same_computed_twice), cmocka_unit_test(eviction_is_as_said),
        cmocka_unit_test(memory_is_bounded), cmocka_unit_test(another_process_s_blocks_do_not_enter), cmocka_unit_test(subscribers_know_the_index),
        cmocka_unit_test(a_large_snapshot_comes_in_parts), cmocka_unit_test(any_thread_may_look),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
