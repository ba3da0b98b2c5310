/* kv/handover: plans, export, import; everything that a hostile or broken sender may do is refused by name. */
#include "kv_fixture.h"

static const struct pd_pool_geom geom = { .layers = 3, .kv_heads = 2, .head_dim = 8, .block_size = 16, .dtype = PD_F16 };

static void a_plan_covers_everything_once(void **state)
{
    struct pd_kv_layout l = { .block_size = 16, .layers = 5, .kv_heads = 3, .head_dim = 64, .dtype = "f16", .order = "HND" };
    struct pd_err e = { 0 };
    for (uint32_t n = 1; n < 400; n += 7)
        for (uint32_t cb = 0; cb < 9; cb++) {
            struct pd_plan p;
            assert_int_equal(pd_plan_make(&l, n, cb, &p, &e), 0);
            assert_int_equal(p.n_blocks, (n + 15) / 16);
            assert_true(p.chunk_blocks >= 1 && p.chunk_blocks <= p.n_blocks);
            assert_int_equal(p.n_ranges, (p.n_blocks + p.chunk_blocks - 1) / p.chunk_blocks);
            assert_int_equal(p.n_chunks, p.n_ranges * 5);
            assert_int_equal(p.bytes, (uint64_t)p.n_blocks * 5 * 2 * 16 * 3 * 64 * 2);
            assert_int_equal(p.chunk_bytes, (uint64_t)p.chunk_blocks * 2 * 16 * 3 * 64 * 2);
        }
    struct pd_plan big;
    assert_int_equal(pd_plan_make(&l, 8192, 0, &big, &e), 0);
    assert_true(big.chunk_bytes > 700000 && big.chunk_bytes <= 1 << 20);        /* about 1 MiB */
}

static void impossible_plans_are_refused(void **state)
{
    struct pd_kv_layout ok = { .block_size = 16, .layers = 5, .kv_heads = 3, .head_dim = 64, .dtype = "f16", .order = "HND" }, l = ok;
    struct pd_err e = { 0 };
    struct pd_plan p;
    FAILS_WITH(pd_plan_make(&l, 0, 0, &p, &e), PD_ECORRUPT, "makes no sense");
    l.dtype[1] = 'x';
    FAILS_WITH(pd_plan_make(&l, 5, 0, &p, &e), PD_ECORRUPT, "makes no sense");
    l = ok;
    l.head_dim = l.kv_heads = l.block_size = UINT32_MAX;
    FAILS_WITH(pd_plan_make(&l, 5, 0, &p, &e), PD_ECORRUPT, "does not fit a record");
    l = ok;
    l.layers = UINT32_MAX;
    FAILS_WITH(pd_plan_make(&l, UINT32_MAX, 1, &p, &e), PD_ECORRUPT, "overflows");
    l = ok;
    FAILS_WITH(pd_plan_make(&l, UINT32_MAX, 100000, &p, &e), PD_ECORRUPT, "does not fit a record");
}

static void layout_hash_tells_layouts_apart(void **state)
{
    struct pd_kv_layout a = { .block_size = 16, .layers = 5, .kv_heads = 3, .head_dim = 64, .dtype = "f16", .order = "HND" }, b = a;
    uint64_t h = pd_layout_hash(&a);
    b.kv_heads = 5;
    b.layers = 3;
    assert_true(pd_layout_hash(&b) != h);
    b = a;
    strcpy(b.dtype, "bf16");
    assert_true(pd_layout_hash(&b) != h);
    b = a;
    strcpy(b.order, "NHD");
    assert_true(pd_layout_hash(&b) != h);
    b = a;
    b.block_size = b.kv_heads;
    b.kv_heads = a.block_size;
    assert_true(pd_layout_hash(&b) != h);
    assert_true(pd_layout_hash(&a) == h);
    assert_true(h == 0xdec04dbef7c81870u);      /* XXH3-64 of those 24 bytes, computed by another program: the definition is fixed */
}

static struct pd_pool *fragmented(void)
{
    struct pd_pool *p = NULL;
    struct pd_err e = { 0 };
    uint32_t b[64];
    assert_int_equal(pd_pool_new(&geom, 16 << 20, &p, &e), 0);
    assert_int_equal(pd_pool_take(p, 64, b, &e), 0);
    for (int i = 0; i < 64; i += 3)
        pd_pool_put(p, b[i]);
    return p;
}

static void what_is_exported_arrives(void **state)
{
    static const uint32_t tokens[] = { 1, 15, 16, 17, 100, 333 }, chunk_blocks[] = { 0, 1, 3, 64 };
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        for (size_t k = 0; k < sizeof chunk_blocks / sizeof *chunk_blocks; k++) {
            struct fix f;
            struct pd_err e = { 0 };
            struct pd_import *im = NULL;
            fix_make(&f, &geom, tokens[i], chunk_blocks[k], 42 + i);
            struct pd_pool *to = fragmented();
            uint32_t used = pd_pool_stats(to).used, n = 0;
            assert_int_equal(pd_import_begin(to, &f.d, &im, &e), 0);
            for (uint32_t c = f.plan.n_chunks; c-- > 0; ) {     /* any order */
                struct pd_chunk ch;
                fix_chunk(&f, c, &ch);
                assert_int_equal(pd_import_chunk(im, &ch, &e), 0);
                free((void *)(uintptr_t)ch.data.p);
            }
            assert_null(pd_import_take(im, &n));                /* not before it is finished */
            assert_int_equal(pd_import_finish(im, &f.d, &e), 0);
            assert_int_equal(pd_import_bytes(im), f.plan.bytes);
            uint32_t *b = pd_import_take(im, &n);
            assert_non_null(b);
            assert_int_equal(n, f.plan.n_blocks);
            pd_import_free(im);
            assert_int_equal(pd_pool_stats(to).used, used + n);
            assert_true(fix_same(f.pool, f.blocks, to, b, n));
            for (uint32_t j = 0; j < n; j++)
                pd_pool_put(to, b[j]);
            assert_int_equal(pd_pool_stats(to).used, used);
            pd_free(b);
            pd_pool_free(to);
            fix_free(&f);
        }
}

/* One good import that stands ready for its chunks. */
struct bench { struct fix f; struct pd_pool *to; struct pd_import *im; };

static void bench_make(struct bench *b)
{
    struct pd_err e = { 0 };
    fix_make(&b->f, &geom, 100, 2, 9);
    b->to = fragmented();
    assert_int_equal(pd_import_begin(b->to, &b->f.d, &b->im, &e), 0);
}

static void bench_free(struct bench *b)
{
    uint32_t before = pd_pool_stats(b->to).used;
    pd_import_free(b->im);
    assert_int_equal(pd_pool_stats(b->to).used, before - (b->im ? b->f.plan.n_blocks : 0));     /* whatever failed, the blocks come back */
    pd_pool_free(b->to);
    fix_free(&b->f);
}

static void wrong_chunks_are_named(void **state)
{
    struct bench b;
    struct pd_err e = { 0 };
    struct pd_chunk c, x;
    bench_make(&b);
    fix_chunk(&b.f, 4, &c);
    uint8_t *bytes = (uint8_t *)(uintptr_t)c.data.p;
#define BROKEN(change, text) do { x = c; change; FAILS_WITH(pd_import_chunk(b.im, &x, &e), PD_ECORRUPT, text); assert_non_null(strstr(e.msg, b.f.d.run)); } while (0)
    BROKEN(x.run[25] ^= 1, "belongs to run");
    BROKEN(x.gen[15]++, "another generation");
    BROKEN(x.index = 12, "beyond the 12");
    BROKEN(x.index = UINT32_MAX, "beyond the 12");
    BROKEN(x.index = 5, "layer0 1, the offer implies 2");
    BROKEN(x.layer0 = 2, "layer0 2, the offer implies 1");
    BROKEN(x.layers = 2, "layers 2");
    BROKEN(x.block0 = 0, "block0 0, the offer implies 2");
    BROKEN(x.blocks = 1, "blocks 1, the offer implies 2");
    BROKEN(x.raw_len--, "raw_len");
    BROKEN(x.raw_len = UINT64_MAX, "raw_len");
    BROKEN(x.data.n--, "holds");
    BROKEN(x.data.n = 0, "holds 0 bytes");
    BROKEN(strcpy(x.codec, "zstd"), "codec 'zstd'");
    BROKEN(x.xxh3 ^= 1, "checksum");
    bytes[77] ^= 0x10;
    BROKEN((void)0, "checksum");
    bytes[77] ^= 0x10;
    /* right bytes, wrong place: another chunk's bytes under this chunk's name, with the checksum they came with */
    struct pd_chunk other;
    fix_chunk(&b.f, 5, &other);
    BROKEN((x.data = other.data, x.xxh3 = other.xxh3), "checksum");
    fix_chunk(&b.f, 7, &x);     /* the same layer of another range */
    struct pd_bin far = x.data;
    BROKEN(x.data = far, "checksum");
    free((void *)(uintptr_t)far.p);
    assert_int_equal(pd_import_chunk(b.im, &c, &e), 0);
    FAILS_WITH(pd_import_chunk(b.im, &c, &e), PD_ECORRUPT, "chunk 4 came twice");
    free(bytes);
    free((void *)(uintptr_t)other.data.p);
    bench_free(&b);
}

static void a_tail_that_is_not_zero_is_refused(void **state)
{
    struct bench b;
    struct pd_err e = { 0 };
    struct pd_chunk c;
    bench_make(&b);
    uint32_t last = b.f.plan.n_chunks - 1;      /* 100 tokens: 4 of the last block's 16 are used */
    fix_chunk(&b.f, last, &c);
    uint8_t *p = (uint8_t *)(uintptr_t)c.data.p;
    p[c.raw_len - 1] = 1;       /* the last head's last token of V */
    c.xxh3 = pd_xxh3(p, c.raw_len, pd_chunk_seed(c.gen, b.f.d.layout.layout_hash, c.layer0, c.block0));
    FAILS_WITH(pd_import_chunk(b.im, &c, &e), PD_ECORRUPT, "tail");
    p[c.raw_len - 1] = 0;
    c.xxh3 = pd_xxh3(p, c.raw_len, pd_chunk_seed(c.gen, b.f.d.layout.layout_hash, c.layer0, c.block0));
    assert_int_equal(pd_import_chunk(b.im, &c, &e), 0);
    free(p);
    bench_free(&b);
}

static void lying_offers_are_named(void **state)
{
    struct bench b;
    struct pd_err e = { 0 };
    struct pd_kvdesc x;
    struct pd_import *im = NULL;
    bench_make(&b);
#define LIE(change, code, text) do { x = b.f.d; change; FAILS_WITH(pd_import_begin(b.to, &x, &im, &e), code, text); assert_null(im); } while (0)
    uint32_t used = pd_pool_stats(b.to).used;
    LIE(x.n_tokens = 0, PD_ECORRUPT, "no tokens");
    LIE(x.payload.n_chunks++, PD_ECORRUPT, "n_chunks 13");
    LIE(x.payload.chunk_blocks = 0, PD_ECORRUPT, "chunk_blocks 0");
    LIE(x.payload.chunk_blocks = 8, PD_ECORRUPT, "chunk_blocks 8");
    LIE(x.payload.bytes = 1, PD_ECORRUPT, "bytes 1,");
    LIE(x.payload.chunk_bytes = UINT64_MAX, PD_ECORRUPT, "chunk_bytes 18446744073709551615");
    LIE(strcpy(x.payload.scheme, "shm"), PD_EINCOMPAT, "'shm'");
    LIE(x.payload.scheme[0] = 0, PD_EFAIL, "no payload");
    LIE(strcpy(x.payload.codec, "lz4"), PD_EINCOMPAT, "'lz4'");
    LIE(x.layout.layout_hash++, PD_ECORRUPT, "layout hash");
    LIE(x.layout.layers = 0, PD_ECORRUPT, "no sense");
    LIE((x.layout.layers = 4, x.layout.layout_hash = pd_layout_hash(&x.layout)), PD_EINCOMPAT, "layers of the KV layout differs (prefill 4, decode 3)");
    LIE((x.layout.block_size = 32, x.layout.layout_hash = pd_layout_hash(&x.layout)), PD_EINCOMPAT, "block_size of the KV layout differs (prefill 32, decode 16)");
    LIE((strcpy(x.layout.dtype, "bf16"), x.layout.layout_hash = pd_layout_hash(&x.layout)), PD_EINCOMPAT, "prefill bf16, decode f16");
    LIE(strcpy(x.layout.order, "NDH"), PD_EINCOMPAT, "'NDH'");
    LIE((strcpy(x.layout.order, "NHD"), x.layout.layout_hash = pd_layout_hash(&x.layout)), PD_EINCOMPAT, "order of the KV layout differs (prefill NHD, decode HND)");
    LIE(x.fp_sha[3] ^= 1, PD_ECORRUPT, "SHA-256");
    assert_int_equal(pd_pool_stats(b.to).used, used);
    bench_free(&b);
}

static void a_run_too_long_names_numbers(void **state)
{
    struct fix f;
    struct pd_err e = { 0 };
    struct pd_pool *to = NULL;
    struct pd_import *im = NULL;
    fix_make(&f, &geom, 500, 0, 3);
    assert_int_equal(pd_pool_new(&geom, 10 * (int64_t)(f.plan.bytes / f.plan.n_blocks), &to, &e), 0);
    FAILS_WITH(pd_import_begin(to, &f.d, &im, &e), PD_ENOMEM, "32 blocks of 16 tokens wanted, 10 free of 10");
    assert_int_equal(pd_pool_stats(to).used, 0);
    pd_pool_free(to);
    fix_free(&f);
}

static void send_all(struct bench *b)
{
    struct pd_err e = { 0 };
    for (uint32_t i = 0; i < b->f.plan.n_chunks; i++) {
        struct pd_chunk c;
        fix_chunk(&b->f, i, &c);
        assert_int_equal(pd_import_chunk(b->im, &c, &e), 0);
        free((void *)(uintptr_t)c.data.p);
    }
}

static void the_kv_must_repeat_the_offer(void **state)
{
    struct bench b;
    struct pd_err e = { 0 };
    struct pd_kvdesc x;
    int32_t ids[100];
    bench_make(&b);
    FAILS_WITH(pd_import_finish(b.im, &b.f.d, &e), PD_ECORRUPT, "12 of 12 chunks are missing (the first is 0)");
    send_all(&b);
#define CHANGED(change, text) do { x = b.f.d; change; FAILS_WITH(pd_import_finish(b.im, &x, &e), PD_ECORRUPT, text " of the kv record"); } while (0)
    CHANGED(x.run[20] ^= 1, "run");
    CHANGED(x.op[0]++, "op");
    CHANGED(x.gen[0]++, "gen");
    CHANGED(x.epoch++, "epoch");
    CHANGED(x.fp_sha[0]++, "fingerprint");
    CHANGED(x.fp_fields.n--, "fingerprint");
    CHANGED(x.n_tokens--, "n_tokens");
    memcpy(ids, b.f.ids, sizeof ids);
    ids[99]++;
    CHANGED(x.token_ids = ids, "token_ids");
    CHANGED(x.layout.head_dim++, "layout");
    CHANGED(x.payload.bytes++, "payload");
    CHANGED(x.worker.n--, "worker");
    CHANGED(x.domain.p = NULL, "domain");
    CHANGED(x.request.temperature = 0.5f, "request");
    CHANGED(x.request.prompt.n--, "request");
    x = b.f.d;
    x.offer = true;
    FAILS_WITH(pd_import_finish(b.im, &x, &e), PD_ECORRUPT, "not a closing kv record");
    x = b.f.d;
    x.first = NULL;             /* the parts that an offer lacks may differ */
    x.n_first = 0;
    assert_int_equal(pd_import_finish(b.im, &x, &e), 0);
    bench_free(&b);
}

static void one_chunk_missing_is_told(void **state)
{
    struct bench b;
    struct pd_err e = { 0 };
    bench_make(&b);
    for (uint32_t i = 0; i < b.f.plan.n_chunks; i++)
        if (i != 7) {
            struct pd_chunk c;
            fix_chunk(&b.f, i, &c);
            assert_int_equal(pd_import_chunk(b.im, &c, &e), 0);
            free((void *)(uintptr_t)c.data.p);
        }
    FAILS_WITH(pd_import_finish(b.im, &b.f.d, &e), PD_ECORRUPT, "1 of 12 chunks are missing (the first is 7)");
    uint32_t n;
    assert_null(pd_import_take(b.im, &n));
    bench_free(&b);
}

/* One who passes the bytes on checks as much, and keeps nothing. */
static void a_look_takes_no_blocks(void **state)
{
    struct bench b;
    struct pd_err e = { 0 };
    struct pd_chunk c;
    struct pd_import_opts look = { .look = true };
    bench_make(&b);
    pd_import_free(b.im);
    uint32_t used = pd_pool_stats(b.to).used, n = 7;
    assert_int_equal(pd_import_begin_with(b.to, &b.f.d, &look, &b.im, &e), 0);
    assert_int_equal(pd_pool_stats(b.to).used, used);
    assert_null(pd_import_blocks(b.im));
    fix_chunk(&b.f, 3, &c);
    ((uint8_t *)(uintptr_t)c.data.p)[9] ^= 1;
    FAILS_WITH(pd_import_chunk(b.im, &c, &e), PD_ECORRUPT, "checksum");
    free((void *)(uintptr_t)c.data.p);
    assert_false(pd_import_has(b.im, 3));
    send_all(&b);
    fix_chunk(&b.f, 3, &c);
    FAILS_WITH(pd_import_chunk(b.im, &c, &e), PD_ECORRUPT, "came twice");
    free((void *)(uintptr_t)c.data.p);
    assert_int_equal(pd_import_finish(b.im, &b.f.d, &e), 0);
    pd_free(pd_import_take(b.im, &n));
    assert_int_equal(n, 0);
    assert_int_equal(pd_pool_stats(b.to).used, used);
    pd_import_free(b.im);
    b.im = NULL;
    bench_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plan_covers_everything_once), cmocka_unit_test(impossible_plans_are_refused), cmocka_unit_test(layout_hash_tells_layouts_apart),
        cmocka_unit_test(what_is_exported_arrives), cmocka_unit_test(wrong_chunks_are_named), cmocka_unit_test(a_tail_that_is_not_zero_is_refused),
        cmocka_unit_test(lying_offers_are_named), cmocka_unit_test(a_run_too_long_names_numbers), cmocka_unit_test(the_kv_must_repeat_the_offer),
        cmocka_unit_test(one_chunk_missing_is_told), cmocka_unit_test(a_look_takes_no_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
