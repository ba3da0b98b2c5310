/* kv/codec: what is coded comes back in every bit, from every build of the kernels; hostile bytes are refused and bounded; when it pays. */
#include <zstd.h>
#include "kv_fixture.h"
#include "../../libcommon/kv/codec.h"

static const char *const builds[] = { "scalar", "avx2", "avx512" };

/* Numbers as KV has them: of one scale, so that exponents are few. */
static uint16_t *numbers(size_t n, enum pd_dtype t, uint64_t seed)
{
    uint16_t *x = malloc((n + 1) * 2);
    for (size_t i = 0; i < n; i++) {
        float f = 0;
        for (int k = 0; k < 4; k++)
            f += (float)((double)(int64_t)fix_random(&seed) / 9.3e18);
        x[i] = t == PD_F16 ? pd_float_to_half(f) : pd_float_to_bf16(f);
    }
    return x;
}

static struct pd_codec *codec(void)
{
    struct pd_codec *c = NULL;
    assert_int_equal(pd_codec_new(&c, NULL), 0);
    return c;
}

/* In a few pieces of odd places. */
static size_t code(struct pd_codec *c, const uint16_t *x, size_t n, const uint8_t **out)
{
    struct pd_err e = { 0 };
    struct iovec v[3] = { { (void *)(uintptr_t)x, n / 3 * 2 }, { (void *)(uintptr_t)(x + n / 3), n / 2 * 2 }, { (void *)(uintptr_t)(x + n / 3 + n / 2), (n - n / 3 - n / 2) * 2 } };
    size_t got = 0;
    assert_int_equal(pd_codec_encode(c, v, 3, n * 2, out, &got, &e), 0);
    return got;
}

static void what_is_coded_comes_back(void **state)
{
    static const size_t sizes[] = { 64, 333, 4096, 172032, 524288 };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int t = 0; t < 2; t++) {
            size_t n = sizes[i], first_n = 0;
            uint16_t *x = numbers(n, t ? PD_BF16 : PD_F16, 5 + i);
            uint8_t *first = NULL;
            for (size_t b = 0; b < sizeof builds / sizeof *builds; b++) {
                if (!pd_kernels_cpu(builds[b], NULL))
                    continue;
                setenv("PD_CPU", builds[b], 1);
                struct pd_codec *c = codec(), *d = codec();
                const uint8_t *out = NULL, *back = NULL;
                struct pd_err e = { 0 };
                size_t m = code(c, x, n, &out);
                if (n >= 4096)
                    assert_true(m > n && m < 2 * n * (t ? 80 : 95) / 100);      /* bf16 gains more: its exponents are a byte */
                if (m) {
                    assert_int_equal(pd_codec_decode(d, out, m, 2 * n, &back, &e), 0);
                    assert_memory_equal(back, x, 2 * n);
                }
                if (!first)
                    first = memcpy(malloc(m + 1), out, first_n = m);
                assert_int_equal(m, first_n);
                assert_memory_equal(first, out, m);
                pd_codec_free(c);
                pd_codec_free(d);
            }
            unsetenv("PD_CPU");
            free(first);
            free(x);
        }
}

static void every_number_survives(void **state)
{
    uint16_t *x = malloc(65536 * 4 * 2);
    struct pd_codec *c = codec();
    const uint8_t *out, *back;
    struct pd_err e = { 0 };
    for (int i = 0; i < 65536 * 4; i++)         /* NaN, infinities, denormals; in runs, so that it is smaller */
        x[i] = (uint16_t)(i / 4);
    size_t m = code(c, x, 65536 * 4, &out);
    assert_true(m > 0);
    uint8_t *kept = memcpy(malloc(m), out, m);
    assert_int_equal(pd_codec_decode(c, kept, m, 65536 * 8, &back, &e), 0);
    assert_memory_equal(back, x, 65536 * 8);
    free(kept);
    free(x);
    pd_codec_free(c);
}

static void noise_is_left_as_it_is(void **state)
{
    uint64_t s = 3;
    uint16_t x[8192];
    for (size_t i = 0; i < 8192; i++)
        x[i] = (uint16_t)fix_random(&s);
    struct pd_codec *c = codec();
    const uint8_t *out;
    assert_int_equal(code(c, x, 8192, &out), 0);
    pd_codec_free(c);
}

static void hostile_bytes_are_refused(void **state)
{
    enum { N = 8192 };
    struct pd_err e = { 0 };
    struct pd_codec *c = codec(), *d = codec();
    const uint8_t *out, *back;
    uint16_t *x = numbers(N, PD_BF16, 1);
    size_t m = code(c, x, N, &out);
    uint8_t *p = malloc(4 * N), *bomb = calloc(1, 1 << 24);
    for (size_t cut = 0; cut < m; cut += cut < N ? 1009 : 13)
        assert_int_equal(pd_codec_decode(d, out, cut, 2 * N, &back, &e), PD_ECORRUPT);
    memcpy(p, out, m);
    p[m] = 0;
    FAILS_WITH(pd_codec_decode(d, p, m + 1, 2 * N, &back, &e), PD_ECORRUPT, "no single zstd frame");        /* something after it */
    FAILS_WITH(pd_codec_decode(d, out, m, 2 * N + 2, &back, &e), PD_ECORRUPT, "no single zstd frame");      /* of another length than was offered */
    FAILS_WITH(pd_codec_decode(d, out, m, 2 * N - 1, &back, &e), PD_ECORRUPT, "are no zstd coding");
    FAILS_WITH(pd_codec_decode(d, out, m, 0, &back, &e), PD_ECORRUPT, "are no zstd coding");
    FAILS_WITH(pd_codec_decode(d, out, m, m, &back, &e), PD_ECORRUPT, "are no zstd coding");
    size_t b = ZSTD_compress(p + N, 2 * N, bomb, 1 << 24, 1);           /* 16 MiB of zeros in a few hundred bytes */
    assert_true(b < N);
    FAILS_WITH(pd_codec_decode(d, p, N + b, 2 * N, &back, &e), PD_ECORRUPT, "no single zstd frame");
    size_t two = ZSTD_compress(p + N, N, bomb, N / 2, 1);               /* two frames that are right together */
    two += ZSTD_compress(p + N + two, N, bomb, N / 2, 1);
    FAILS_WITH(pd_codec_decode(d, p, N + two, 2 * N, &back, &e), PD_ECORRUPT, "no single zstd frame");
    int refused = 0, same = 0;
    for (size_t i = N; i < m; i += 7) {         /* every change of the frame is refused, or decodes to as many bytes: the checksum sees it */
        memcpy(p, out, m);
        p[i] ^= 0x40;
        int rc = pd_codec_decode(d, p, m, 2 * N, &back, &e);
        assert_true(rc == 0 || rc == PD_ECORRUPT);
        refused += rc != 0;
        same += rc == 0 && !memcmp(back, x, 2 * N);
    }
    assert_true(refused > 0);
    assert_int_equal(same, 0);
    assert_int_equal(pd_codec_decode(d, out, m, 2 * N, &back, &e), 0);          /* and is not spoilt by what it refused */
    assert_memory_equal(back, x, 2 * N);
    struct iovec odd[2] = { { x, 3 }, { x, 5 } };
    size_t n;
    assert_int_equal(pd_codec_encode(c, odd, 2, 8, &out, &n, &e), PD_EFAIL);
    assert_int_equal(pd_codec_encode(c, odd, 1, 8, &out, &n, &e), PD_EFAIL);
    assert_int_equal(pd_codec_encode(c, &(struct iovec){ x, 64 }, 1, 32, &out, &n, &e), PD_EFAIL);
    assert_int_equal(pd_codec_encode(c, &(struct iovec){ x, 64 }, 1, 128, &out, &n, &e), PD_EFAIL);
    pd_codec_free(c);
    pd_codec_free(d);
    free(bomb);
    free(p);
    free(x);
}

/* How many of 100 chunks of 1 MiB are coded, at these speeds (bytes a us) and this ratio. */
static int coded(enum pd_codec_mode m, double link, double coding, double ratio, uint32_t threads, double decode)
{
    struct pd_codec_rule r = { .mode = m, .n = threads, .decode = decode * 1e6 };
    int n = 0;
    for (int i = 0; i < 100; i++) {
        bool yes = pd_codec_choose(&r);
        uint64_t raw = 1 << 20, sent = yes ? (uint64_t)((double)raw / ratio) : raw;
        if (yes) {
            r.raw += raw;
            r.packed += sent;
            r.code_us += (int64_t)((double)raw / coding);
            r.coded++;
            n++;
        }
        pd_codec_wrote(&r, sent, (int64_t)((double)sent / link));
    }
    return n;
}

static void it_is_used_where_it_pays(void **state)
{
    assert_int_equal(coded(PD_CODEC_NONE, 10, 2000, 1.4, 0, 0), 0);
    assert_int_equal(coded(PD_CODEC_ZSTD, 10000, 500, 1.0, 0, 0), 100);
    assert_int_equal(coded(PD_CODEC_AUTO, 125, 2000, 1.45, 0, 0), 100);         /* 1 Gb/s */
    assert_int_equal(coded(PD_CODEC_AUTO, 5000, 2000, 1.45, 0, 0), 2);          /* the two of the trial */
    assert_int_equal(coded(PD_CODEC_AUTO, 5000, 2000, 1.45, 4, 0), 100);        /* four threads are faster than the link */
    assert_int_equal(coded(PD_CODEC_AUTO, 1250, 2000, 1.45, 0, 1000), 2);       /* the peer decodes more slowly than the link carries */
    assert_int_equal(coded(PD_CODEC_AUTO, 125, 2000, 1.0, 0, 0), 2);            /* nothing is gained */
    enum pd_codec_mode m;
    assert_true(pd_codec_parse("auto", &m) && m == PD_CODEC_AUTO && pd_codec_parse("none", &m) && m == PD_CODEC_NONE && !pd_codec_parse("zst", &m));
    assert_string_equal(pd_codec_name(PD_CODEC_AUTO, "bf16"), "zstd");
    assert_string_equal(pd_codec_name(PD_CODEC_AUTO, "f32"), "none");
    assert_string_equal(pd_codec_name(PD_CODEC_NONE, "f16"), "none");
}

/* A run whose chunks go coded, plain, coded, ...: what a payload of codec zstd may hold. */
static void coded_chunks_are_imported(void **state)
{
    const struct pd_pool_geom g = { .layers = 3, .kv_heads = 2, .head_dim = 64, .block_size = 16, .dtype = PD_BF16 };
    struct pd_err e = { 0 };
    struct fix f;
    struct pd_pool *to = NULL;
    struct pd_import *im = NULL;
    struct pd_codec *c = codec();
    fix_make(&f, &g, 100, 2, 9);
    strcpy(f.d.payload.codec, "zstd");
    assert_int_equal(pd_pool_new(&g, 16 << 20, &to, &e), 0);
    assert_int_equal(pd_import_begin(to, &f.d, &im, &e), 0);
    uint64_t sent = 0;
    for (uint32_t i = 0; i < f.plan.n_chunks; i++) {
        struct pd_codec_rule always = { .mode = i % 2 ? PD_CODEC_NONE : PD_CODEC_ZSTD };
        struct pd_chunk ch;
        fix_chunk(&f, i, &ch);
        void *plain = (void *)(uintptr_t)ch.data.p;
        struct iovec v[1] = { { plain, ch.raw_len } };
        int n = 1;
        assert_int_equal(pd_codec_chunk(c, &always, &ch, v, &n, &e), 0);
        assert_string_equal(ch.codec, i % 2 ? "none" : "zstd");
        sent += ch.data.n;
        if (!i) {       /* a changed byte, in either half; then more and fewer */
            uint8_t *p = memcpy(malloc(ch.data.n + 1), ch.data.p, ch.data.n);
            struct pd_chunk x = ch;
            x.data.p = p;
            p[5] ^= 1;
            FAILS_WITH(pd_import_chunk(im, &x, &e), PD_ECORRUPT, "checksum");
            p[5] ^= 1;
            x.data.n++;
            FAILS_WITH(pd_import_chunk(im, &x, &e), PD_ECORRUPT, "chunk 0: its exponents");
            x.data.n = 10;
            FAILS_WITH(pd_import_chunk(im, &x, &e), PD_ECORRUPT, "no zstd coding");
            x = ch;
            strcpy(x.codec, "lz4");
            FAILS_WITH(pd_import_chunk(im, &x, &e), PD_ECORRUPT, "codec 'lz4'");
            free(p);
        }
        assert_int_equal(pd_import_chunk(im, &ch, &e), 0);
        free(plain);
    }
    assert_true(sent < f.plan.bytes);
    assert_int_equal(pd_import_finish(im, &f.d, &e), 0);
    assert_int_equal(pd_import_bytes(im), f.plan.bytes);        /* decoded ones */
    uint32_t n = 0, *b = pd_import_take(im, &n);
    assert_true(fix_same(f.pool, f.blocks, to, b, n));
    pd_free(b);
    pd_import_free(im);
    im = NULL;
    strcpy(f.d.payload.codec, "none");
    assert_int_equal(pd_import_begin(to, &f.d, &im, &e), 0);
    struct pd_chunk ch;
    struct pd_codec_rule always = { .mode = PD_CODEC_ZSTD };
    fix_chunk(&f, 0, &ch);
    void *plain = (void *)(uintptr_t)ch.data.p;
    int pieces = 1;
    assert_int_equal(pd_codec_chunk(c, &always, &ch, &(struct iovec){ plain, ch.raw_len }, &pieces, &e), 0);
    FAILS_WITH(pd_import_chunk(im, &ch, &e), PD_ECORRUPT, "codec 'zstd', the offer none");
    free(plain);
    pd_import_free(im);
    strcpy(f.d.payload.codec, "zstd");
    strcpy(f.d.payload.scheme, "shm");
    FAILS_WITH(pd_import_begin(to, &f.d, &im, &e), PD_EINCOMPAT, "scheme");
    pd_codec_free(c);
    pd_pool_free(to);
    fix_free(&f);
}

static void f32_is_not_coded(void **state)
{
    const struct pd_pool_geom g = { .layers = 1, .kv_heads = 1, .head_dim = 8, .block_size = 16, .dtype = PD_F32 };
    struct pd_err e = { 0 };
    struct fix f;
    struct pd_import *im = NULL;
    fix_make(&f, &g, 20, 0, 9);
    strcpy(f.d.payload.codec, "zstd");
    FAILS_WITH(pd_import_begin(f.pool, &f.d, &im, &e), PD_EINCOMPAT, "codec zstd is for f16 and bf16");
    fix_free(&f);
}

int main(void)
{
    const struct CMUnitTest t[] = {
        cmocka_unit_test(what_is_coded_comes_back), cmocka_unit_test(every_number_survives), cmocka_unit_test(noise_is_left_as_it_is),
        cmocka_unit_test(hostile_bytes_are_refused), cmocka_unit_test(it_is_used_where_it_pays), cmocka_unit_test(coded_chunks_are_imported),
        cmocka_unit_test(f32_is_not_coded),
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
