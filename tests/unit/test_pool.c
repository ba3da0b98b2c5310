/* kv/pool: counts, contents, slabs, limits. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../libcommon/kv/slab.h"

static const struct pd_pool_geom small = { .layers = 3, .kv_heads = 2, .head_dim = 8, .block_size = 16, .dtype = PD_F16 };

static struct pd_pool *make(const struct pd_pool_geom *g, int64_t bytes)
{
    struct pd_pool *p = NULL;
    struct pd_err e = { 0 };
    assert_int_equal(pd_pool_new(g, bytes, &p, &e), 0);
    return p;
}

static size_t block_bytes(const struct pd_pool *p) { return pd_pool_layer_bytes(p) * 2 * (size_t)pd_pool_geom(p)->layers; }

static bool is_zero(const struct pd_pool *p, uint32_t b)
{
    for (int l = 0; l < pd_pool_geom(p)->layers; l++)
        for (int v = 0; v < 2; v++)
            for (size_t i = 0; i < pd_pool_layer_bytes(p); i++)
                if (pd_pool_base(p, b)[pd_pool_off(p, l, v) + i])
                    return false;
    return true;
}

static void fill(const struct pd_pool *p, uint32_t b, int byte)
{
    for (int l = 0; l < pd_pool_geom(p)->layers; l++)
        for (int v = 0; v < 2; v++)
            memset(pd_pool_base(p, b) + pd_pool_off(p, l, v), byte + l * 2 + v, pd_pool_layer_bytes(p));
}

static void blocks_are_apart_and_stay(void **state)
{
    struct pd_pool *p = make(&small, 1 << 20);
    struct pd_err e = { 0 };
    uint32_t b[40];
    assert_int_equal(pd_pool_layer_bytes(p), 2 * 8 * 16 * 2);
    assert_int_equal(pd_pool_take(p, 40, b, &e), 0);
    for (int i = 0; i < 40; i++) {
        assert_true(is_zero(p, b[i]));
        fill(p, b[i], i * 6);
    }
    for (int i = 0; i < 40; i++)
        for (int l = 0; l < 3; l++)
            for (int v = 0; v < 2; v++)
                for (size_t k = 0; k < pd_pool_layer_bytes(p); k++)
                    assert_int_equal(pd_pool_base(p, b[i])[pd_pool_off(p, l, v) + k], (i * 6 + l * 2 + v) & 255);
    /* neighbours are contiguous within a layer */
    assert_int_equal(b[1], b[0] + 1);
    assert_ptr_equal(pd_pool_base(p, b[1]), pd_pool_base(p, b[0]) + pd_pool_layer_bytes(p));
    pd_pool_free(p);
}

static void counts_hold(void **state)
{
    struct pd_pool *p = make(&small, 1 << 20);
    struct pd_err e = { 0 };
    uint32_t b[8], c[8];
    struct pd_pool_stats s = pd_pool_stats(p);
    uint32_t max = s.max;
    assert_int_equal(max, (1 << 20) / block_bytes(p));
    assert_int_equal(s.total, 0);
    assert_int_equal(pd_pool_take(p, 8, b, &e), 0);
    s = pd_pool_stats(p);
    assert_int_equal(s.used, 8);
    assert_int_equal(s.free + s.used, s.total);
    assert_true(s.slab_bytes >= 8 * block_bytes(p));
    pd_pool_ref(p, b[3]);
    for (int i = 0; i < 8; i++)
        pd_pool_put(p, b[i]);
    assert_int_equal(pd_pool_stats(p).used, 1);
    pd_pool_put(p, b[3]);
    assert_int_equal(pd_pool_stats(p).used, 0);
    pd_pool_put(p, b[3]);                       /* a release too many is survived and changes nothing */
    pd_pool_put(p, 1u << 30);
    s = pd_pool_stats(p);
    assert_int_equal(s.used, 0);
    assert_int_equal(s.free, s.total);
    assert_int_equal(pd_pool_take(p, 8, c, &e), 0);
    assert_memory_equal(b, c, sizeof b);        /* the lowest again */
    pd_pool_free(p);
}

static void reuse_is_zeroed(void **state)
{
    struct pd_pool *p = make(&small, 1 << 20);
    struct pd_err e = { 0 };
    uint32_t b[2];
    assert_int_equal(pd_pool_take(p, 2, b, &e), 0);
    fill(p, b[0], 7);
    fill(p, b[1], 9);
    pd_pool_put(p, b[0]);
    uint32_t again;
    assert_int_equal(pd_pool_take(p, 1, &again, &e), 0);
    assert_int_equal(again, b[0]);
    assert_true(is_zero(p, again));
    assert_false(is_zero(p, b[1]));             /* its neighbour is untouched */
    pd_pool_put(p, again);
    fill(p, b[0], 7);
    assert_int_equal(pd_pool_take_raw(p, 1, &again, &e), 0);
    pd_pool_put(p, again);
    assert_int_equal(pd_pool_take(p, 1, &again, &e), 0);        /* raw memory does not leak through a later zeroing take */
    assert_true(is_zero(p, again));
    pd_pool_free(p);
}

static void a_full_pool_says_numbers(void **state)
{
    struct pd_pool *p = make(&small, 64 * 1024);
    struct pd_err e = { 0 };
    uint32_t n = pd_pool_stats(p).max, *b = calloc(n + 1, sizeof *b);
    char want[64];
    assert_int_equal(pd_pool_take(p, n - 2, b, &e), 0);
    assert_int_equal(pd_pool_take(p, 3, b + n - 2, &e), PD_ENOMEM);
    snprintf(want, sizeof want, "3 blocks of 16 tokens wanted, 2 free of %u", n);
    assert_non_null(strstr(e.msg, want));
    assert_non_null(strstr(e.msg, "--kv-mem"));
    assert_int_equal(pd_pool_stats(p).used, n - 2);             /* all or nothing */
    assert_int_equal(pd_pool_take(p, 2, b + n - 2, &e), 0);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < i; k++)
            assert_int_not_equal(b[i], b[k]);
    free(b);
    pd_pool_free(p);
}

static void limits_are_kept(void **state)
{
    struct pd_pool *p = NULL;
    struct pd_err e = { 0 };
    assert_int_equal(pd_pool_new(&small, 1000, &p, &e), PD_ENOMEM);
    assert_non_null(strstr(e.msg, "1000"));
    struct pd_pool_geom g = small;
    g.head_dim = 0;
    assert_int_equal(pd_pool_new(&g, 1 << 20, &p, &e), PD_EFAIL);
    g.head_dim = 1 << 30;
    g.kv_heads = 1 << 30;
    g.block_size = 1 << 30;
    assert_int_equal(pd_pool_new(&g, INT64_MAX, &p, &e), PD_ENOMEM);
    g = small;
    g.dtype = PD_Q8_0;
    assert_int_equal(pd_pool_new(&g, 1 << 20, &p, &e), PD_EFAIL);
    assert_null(p);
}

/* Several slabs, the last one cut by the limit: every block is usable, none twice, and not one more. */
static void many_slabs(void **state)
{
    struct pd_pool_geom g = { .layers = 4, .kv_heads = 4, .head_dim = 64, .block_size = 128, .dtype = PD_F32 };    /* 1 MiB a block: slabs of 64 */
    struct pd_pool *p = make(&g, 131ll << 20);
    struct pd_err e = { 0 };
    uint32_t b[131];
    assert_int_equal(block_bytes(p), 1 << 20);
    assert_int_equal(pd_pool_stats(p).max, 131);
    assert_int_equal(pd_pool_take(p, 1, b, &e), 0);
    assert_true(pd_pool_stats(p).slab_bytes <= 64 << 20);       /* slabs are made as they are needed */
    assert_int_equal(pd_pool_take(p, 130, b + 1, &e), 0);
    for (int i = 0; i < 131; i++)
        *(uint32_t *)(pd_pool_base(p, b[i]) + pd_pool_off(p, 3, 1) + pd_pool_layer_bytes(p) - 4) = 1000 + (uint32_t)i;
    for (int i = 0; i < 131; i++)
        assert_int_equal(*(uint32_t *)(pd_pool_base(p, b[i]) + pd_pool_off(p, 3, 1) + pd_pool_layer_bytes(p) - 4), 1000 + i);
    assert_int_equal(pd_pool_take(p, 1, b, &e), PD_ENOMEM);
    pd_pool_put(p, 5);
    assert_int_equal(pd_pool_take(p, 1, b, &e), 0);
    assert_int_equal(b[0], 5);
    pd_pool_free(p);
}

/* A slab ahead of need, once less than half of one is free, and never more than the pool's own. */
static void slabs_are_made_ahead(void **state)
{
    struct pd_pool_geom g = { .layers = 4, .kv_heads = 4, .head_dim = 64, .block_size = 128, .dtype = PD_F32 };
    struct pd_pool *p = make(&g, 131ll << 20);
    struct pd_err e = { 0 };
    uint32_t b[131], per = pd_pool_slab_blocks(p);
    static const struct { uint32_t take, slabs, total; } step[] = { { 0, 1, 44 }, { 22, 1, 44 }, { 1, 2, 88 }, { 44, 3, 131 }, { 64, 3, 131 } };
    assert_int_equal(per, 44);
    uint32_t used = 0;
    for (size_t i = 0; i < sizeof step / sizeof *step; i++) {
        assert_int_equal(pd_pool_take(p, step[i].take, b + used, &e), 0);
        used += step[i].take;
        for (int twice = 0; twice < 2; twice++)
            pd_pool_ahead(p);
        struct pd_pool_stats s = pd_pool_stats(p);
        assert_int_equal(pd_pool_slabs(p), step[i].slabs);
        assert_int_equal(s.total, step[i].total);
        assert_int_equal(s.used, used);
        assert_int_equal(s.free, s.total - used);
    }
    for (uint32_t i = 0; i < used; i++) {
        assert_int_equal(b[i], i);
        *(uint32_t *)(pd_pool_base(p, b[i]) + pd_pool_off(p, 3, 1) + pd_pool_layer_bytes(p) - 4) = i;
    }
    pd_pool_free(p);
}

static void a_large_block_has_its_slab(void **state)
{
    struct pd_pool_geom g = { .layers = 20, .kv_heads = 32, .head_dim = 128, .block_size = 256, .dtype = PD_F16 };  /* 80 MiB */
    struct pd_pool *p = make(&g, 100ll << 20);
    struct pd_err e = { 0 };
    uint32_t b;
    assert_int_equal(pd_pool_stats(p).max, 1);
    assert_int_equal(pd_pool_take(p, 1, &b, &e), 0);
    pd_pool_base(p, b)[pd_pool_off(p, 19, 1) + pd_pool_layer_bytes(p) - 1] = 1;
    assert_int_equal(pd_pool_stats(p).slab_bytes, block_bytes(p));
    pd_pool_free(p);
}

/* As large models have them: a slab holds several, at most 1024 slabs hold a pool, and little of the memory is never given. */
static void slabs_hold_several_blocks(void **state)
{
    static const struct { int layers, heads, dim; int64_t bytes; uint32_t per; } t[] = {
        { 32, 8, 128, 4ll << 30, 32 }, { 32, 8, 128, 24ll << 30, 32 }, { 32, 8, 128, 400ll << 30, 256 }, { 80, 8, 128, 4ll << 30, 12 }, { 80, 8, 128, 120ll << 30, 24 },
        { 32, 32, 128, 4ll << 30, 8 }, { 80, 64, 128, 4ll << 30, 1 }, { 80, 64, 128, 400ll << 30, 16 } };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        struct pd_pool_geom g = { .layers = t[i].layers, .kv_heads = t[i].heads, .head_dim = t[i].dim, .block_size = 16, .dtype = PD_F16 };
        struct pd_pool *p = make(&g, t[i].bytes);
        uint32_t per = pd_pool_slab_blocks(p), max = pd_pool_stats(p).max, slabs = (max + per - 1) / per;
        if (per > t[i].per || 2 * per < t[i].per || slabs > PD_SLABS_MAX || max != (uint64_t)t[i].bytes / block_bytes(p) || 32 * (uint64_t)(slabs * per - max) > max)
            fail_msg("%zu: %u blocks in %u slabs of %u", i, max, slabs, per);
        pd_pool_free(p);
    }
    for (int heads = 1; heads <= 64; heads *= 2)        /* any size */
        for (uint32_t n = 1; n < 3000; n++) {
            struct pd_pool_geom g = { .layers = 32, .kv_heads = heads, .head_dim = 128, .block_size = 16, .dtype = PD_F16 };
            struct pd_pool *p = make(&g, (int64_t)n * heads << 18);
            uint32_t per = pd_pool_slab_blocks(p), slabs = (n + per - 1) / per;
            if (pd_pool_stats(p).max != n || slabs > PD_SLABS_MAX || 32 * (slabs * per - n) > n)
                fail_msg("%d heads, %u blocks: %u slabs of %u", heads, n, slabs, per);
            pd_pool_free(p);
        }
}

static void slabs_are_sealed(void **state)
{
    struct pd_pool *p = make(&small, 1 << 20);
    struct pd_err e = { 0 };
    uint32_t b;
    assert_int_equal(pd_pool_slab_fd(p, 0), -1);
    assert_int_equal(pd_pool_take(p, 1, &b, &e), 0);
    int fd = pd_pool_slab_fd(p, 0);
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(ftruncate(fd, 0), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(ftruncate(fd, st.st_size * 2), -1);
    assert_int_equal(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    /* what a peer that maps the slab sees */
    fill(p, b, 3);
    const uint8_t *peer = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    assert_true(peer != MAP_FAILED);
    assert_int_equal(peer[pd_pool_off(p, 2, 1)], 3 + 5);
    munmap((void *)(uintptr_t)peer, (size_t)st.st_size);
    pd_pool_free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_are_apart_and_stay), cmocka_unit_test(counts_hold), cmocka_unit_test(reuse_is_zeroed),
        cmocka_unit_test(a_full_pool_says_numbers), cmocka_unit_test(limits_are_kept), cmocka_unit_test(many_slabs), cmocka_unit_test(slabs_are_made_ahead),
        cmocka_unit_test(a_large_block_has_its_slab), cmocka_unit_test(slabs_hold_several_blocks), cmocka_unit_test(slabs_are_sealed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
