/* kv/convert: every form into every other, by every build of the kernels, against a reference that moves one number at a time; hostile sizes. */
#include "kv_fixture.h"
#include "../../libcommon/kv/convert.h"

static uint8_t **table(const struct pd_kv_form *f, uint32_t n, uint8_t **mem, size_t *bytes)
{
    assert_int_equal(pd_form_bytes(f, bytes, NULL), 0);
    *mem = calloc(n, *bytes);
    uint8_t **t = calloc(n, sizeof *t);
    for (uint32_t i = 0; i < n; i++)
        t[i] = *mem + i * *bytes;
    return t;
}

/* Where a token's head begins: the definition. */
static uint8_t *at(const struct pd_kv_view *v, uint32_t t, uint32_t h)
{
    const struct pd_kv_form *f = &v->form;
    t += v->token0;
    h += v->head0;
    size_t in = t % f->block_size, row = f->nhd ? in * f->heads + h : (size_t)h * f->block_size + in;
    return v->block[t / f->block_size] + row * f->head_dim * f->el;
}

static void one(const struct pd_kernels *k, struct pd_kv_form a, struct pd_kv_form b, uint32_t ta, uint32_t tb, uint32_t ha, uint32_t hb, uint32_t n, uint32_t heads,
                uint64_t *seed)
{
    uint32_t na = (ta + n + a.block_size - 1) / a.block_size, nb = (tb + n + b.block_size - 1) / b.block_size;
    size_t za, zb;
    uint8_t *ma, *mb, *mr, **blocks_a = table(&a, na, &ma, &za), **blocks_b = table(&b, nb, &mb, &zb), **ref = table(&b, nb, &mr, &zb);
    struct pd_err e = { 0 };
    for (size_t i = 0; i < za * na; i++)
        ma[i] = (uint8_t)fix_random(seed);
    memset(mb, 0xee, zb * nb);          /* what is not meant stays */
    memset(mr, 0xee, zb * nb);
    struct pd_kv_view from = { a, blocks_a, na, ta, ha }, to = { b, blocks_b, nb, tb, hb }, want = { b, ref, nb, tb, hb };
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t h = 0; h < heads; h++)
            memcpy(at(&want, t, h), at(&from, t, h), a.head_dim * a.el);
    assert_int_equal(pd_convert(k, &to, &from, n, heads, &e), 0);
    assert_memory_equal(mb, mr, zb * nb);
    free(ma);
    free(mb);
    free(mr);
    free(blocks_a);
    free(blocks_b);
    free(ref);
}

static void every_form_into_every_other(void **state)
{
    static const char *const builds[] = { "scalar", "avx2", "avx512" };
    static const uint32_t sizes[] = { 1, 5, 16, 32, 64 }, dims[] = { 8, 33, 64, 96, 128 };
    uint64_t seed = 11;
    for (size_t i = 0; i < sizeof builds / sizeof *builds; i++) {
        const struct pd_kernels *k = pd_kernels_cpu(builds[i], NULL);
        for (int c = 0; k && c < 4; c++)
            for (size_t x = 0; x < 5; x++)
                for (size_t y = 0; y < 5; y++) {
                    uint32_t dim = dims[(x + y) % 5], heads = 1 + (uint32_t)(fix_random(&seed) % 3), n = 1 + (uint32_t)(fix_random(&seed) % 150);
                    struct pd_kv_form a = { sizes[x], heads + 2, dim, c & 1 ? 4 : 2, c & 1 }, b = { sizes[y], heads + 1, dim, c & 1 ? 4 : 2, c & 2 };
                    one(k, a, b, (uint32_t)(fix_random(&seed) % 40), (uint32_t)(fix_random(&seed) % 40), (uint32_t)(fix_random(&seed) % 3), (uint32_t)(fix_random(&seed) % 2), n,
                        heads, &seed);
                    a.heads = b.heads = heads;          /* all of them: the longest rows */
                    one(k, a, b, 0, 0, 0, 0, n, heads, &seed);
                }
    }
}

static void hostile_sizes_are_refused(void **state)
{
    const struct pd_kernels *k = pd_kv_kernels();
    struct pd_kv_form f = { 16, 2, 8, 2, false }, g;
    struct pd_err e = { 0 };
    size_t bytes;
    uint8_t *mem, **t = table(&f, 4, &mem, &bytes);
    struct pd_kv_view ok = { f, t, 4, 0, 0 }, v;
    assert_int_equal(pd_convert(k, &ok, &ok, 0, 2, &e), 0);
#define REFUSED(change, tokens, heads, code, text) do { v = ok; change; FAILS_WITH(pd_convert(k, &v, &ok, tokens, heads, &e), code, text); \
        FAILS_WITH(pd_convert(k, &ok, &v, tokens, heads, &e), code, text); } while (0)
    REFUSED((void)0, 65, 2, PD_ECORRUPT, "tokens 0 to 64 of 4 blocks of 16");
    REFUSED(v.token0 = 1, 64, 2, PD_ECORRUPT, "tokens 1 to 64 of 4 blocks of 16");
    REFUSED(v.token0 = UINT32_MAX, 2, 2, PD_ECORRUPT, "of 4 blocks of 16");
    REFUSED((void)0, UINT32_MAX, 2, PD_ECORRUPT, "of 4 blocks of 16");
    REFUSED((void)0, 1, 3, PD_ECORRUPT, "heads 0 to 2 of 2");
    REFUSED(v.head0 = UINT32_MAX, 1, 1, PD_ECORRUPT, "of 2");
    REFUSED(v.form.head_dim = 16, 1, 1, PD_EINCOMPAT, "without a change");
    REFUSED(v.form.el = 4, 1, 1, PD_EINCOMPAT, "without a change");
    REFUSED(v.form.block_size = 0, 1, 1, PD_ECORRUPT, "makes no sense");
    REFUSED((v.form.head_dim = UINT32_MAX, v.form.heads = UINT32_MAX), 1, 1, PD_ECORRUPT, "makes no sense");
    REFUSED((v.form.head_dim = v.form.heads = v.form.block_size = UINT32_MAX), 1, 1, PD_ECORRUPT, "makes no sense");
    g = f;
    g.el = 0;
    FAILS_WITH(pd_form_bytes(&g, &bytes, &e), PD_ECORRUPT, "makes no sense");
    free(mem);
    free(t);
}

static void names(void **state)
{
    struct pd_err e = { 0 };
    unsigned m = 9;
    char text[PD_CONV_MAX];
    assert_int_equal(pd_conv_parse("order,block_size", &m, &e), 0);
    assert_int_equal(m, PD_CONV_ALL);
    assert_string_equal(pd_conv_text(m, text), "block_size,order");
    assert_string_equal(pd_conv_text(0, text), "");
    FAILS_WITH(pd_conv_parse("", &m, &e), PD_EUSAGE, "''");
    FAILS_WITH(pd_conv_parse("order,", &m, &e), PD_EUSAGE, "''");
    FAILS_WITH(pd_conv_parse("order,kv_dtype", &m, &e), PD_EUSAGE, "'kv_dtype' cannot be converted");
    FAILS_WITH(pd_conv_parse("tp", &m, &e), PD_EUSAGE, "no worker of this build is split by heads");
    struct pd_str caps[3] = { { "resume", 6 }, { "convert_order", 13 }, { "convert_tp", 10 } };
    assert_int_equal(pd_conv_of_caps(caps, 3), PD_CONV_ORDER);
    assert_int_equal(pd_conv_caps(PD_CONV_ALL, caps), 2);
    assert_int_equal(pd_conv_of_caps(caps, 2), PD_CONV_ALL);
}

/* An import into blocks of another size: each size into each, in any order of chunks, with resume, and what is wrong still refused. */
static void imports_convert(void **state)
{
    static const int sizes[] = { 1, 8, 16, 32, 100 };
    struct pd_err e = { 0 };
    for (size_t a = 0; a < 5; a++)
        for (size_t b = 0; b < 5; b++) {
            struct pd_pool_geom g = { .layers = 3, .kv_heads = 2, .head_dim = 8, .block_size = sizes[a], .dtype = PD_F16 }, h = g;
            struct fix f, want;
            struct pd_pool *to = NULL;
            struct pd_import *im = NULL;
            uint32_t n = 0;
            h.block_size = sizes[b];
            fix_make(&f, &g, 77, 3, 42);
            fix_make(&want, &h, 77, 0, 42);     /* the same numbers, token by token */
            assert_int_equal(pd_pool_new(&h, 16 << 20, &to, &e), 0);
            if (a != b)
                FAILS_WITH(pd_import_begin_with(to, &f.d, &(struct pd_import_opts){ .convert = PD_CONV_ORDER }, &im, &e), PD_EINCOMPAT, "block_size of the KV layout differs");
            assert_int_equal(pd_import_begin_with(to, &f.d, &(struct pd_import_opts){ .convert = PD_CONV_BLOCK_SIZE, .lend = true }, &im, &e), 0);
            assert_int_equal(pd_import_converts(im), a != b ? PD_CONV_BLOCK_SIZE : 0);
            for (uint32_t c = f.plan.n_chunks; c-- > 0; ) {
                struct pd_chunk ch;
                fix_chunk(&f, c, &ch);
                uint8_t *p = (uint8_t *)(uintptr_t)ch.data.p;
                p[3] ^= 1;
                FAILS_WITH(pd_import_chunk(im, &ch, &e), PD_ECORRUPT, "checksum");
                p[3] ^= 1;
                assert_int_equal(pd_import_chunk(im, &ch, &e), 0);
                free(p);
                if (c == f.plan.n_chunks / 2)
                    assert_int_equal(pd_import_resume(im, &f.d, &(struct pd_import_opts){ .lend = false }, &e), 0);
            }
            assert_int_equal(pd_import_finish(im, &f.d, &e), 0);
            uint32_t *blocks = pd_import_take(im, &n);
            assert_int_equal(n, want.plan.n_blocks);
            assert_true(fix_same(want.pool, want.blocks, to, blocks, n));
            for (uint32_t i = 0; i < n; i++)
                pd_pool_put(to, blocks[i]);
            assert_int_equal(pd_pool_stats(to).used, 0);
            pd_free(blocks);
            pd_import_free(im);
            pd_pool_free(to);
            fix_free(&f);
            fix_free(&want);
        }
}

int main(void)
{
    const struct CMUnitTest t[] = { cmocka_unit_test(every_form_into_every_other), cmocka_unit_test(hostile_sizes_are_refused), cmocka_unit_test(names),
                                    cmocka_unit_test(imports_convert) };
    return cmocka_run_group_tests(t, NULL, NULL);
}
