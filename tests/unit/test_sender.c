/* pd-kvsend's own, of KV that no model here is large enough to make: chunks of any size that is asked for, and none that a reader would refuse. */
#include "../../libcommon/serve/sender.h"
#include "../../libcommon/wire/frame.h"
#include "../../libcommon/wire/stream.h"
#include "../../libcommon/wire/transfer.h"
#include "kv_fixture.h"

static void put(int fd, struct pd_buf *b)
{
    for (size_t at = 0; at < b->n;) {
        ssize_t k = write(fd, b->p + at, b->n - at);
        assert_true(k > 0);
        at += (size_t)k;
    }
    pd_buf_free(b);
}

/* As pd-prefill writes it. */
static void write_stream(struct fix *f, const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    struct pd_buf b = { 0 };
    struct pd_kvdesc d = f->d;
    struct pd_done done = { .chunks = f->plan.n_chunks };
    struct pd_err e;
    d.offer = true;
    d.first = NULL;
    d.n_first = 0;
    assert_int_equal(pd_kvdesc_encode(&d, &b, &e), 0);
    put(fd, &b);
    for (uint32_t i = 0; i < f->plan.n_chunks; i++) {
        struct pd_chunk c;
        fix_chunk(f, i, &c);
        assert_int_equal(pd_chunk_encode_head(&c, &b, &e), 0);
        assert_int_equal(pd_buf_add(&b, c.data.p, c.data.n, &e), 0);
        put(fd, &b);
        free((void *)(uintptr_t)c.data.p);
    }
    memcpy(done.run, d.run, sizeof done.run);
    memcpy(done.gen, d.gen, sizeof done.gen);
    assert_int_equal(pd_done_encode(&done, &b, &e), 0);
    put(fd, &b);
    assert_int_equal(pd_kvdesc_encode(&f->d, &b, &e), 0);
    put(fd, &b);
    close(fd);
}

/* Reads it as whoever comes after does, with the default limit of a record. Chunks of the first layer; *largest: bytes of one. */
static uint32_t read_stream(struct fix *f, const char *path, uint64_t *largest)
{
    struct pd_rstream *s = NULL;
    struct pd_rec rec;
    struct pd_err e = { 0 };
    struct pd_import *im = NULL;
    struct pd_pool *pool;
    uint32_t n = 0, *blocks, n_blocks;
    int rc;
    assert_int_equal(pd_pool_new(pd_pool_geom(f->pool), FIX_POOL_BYTES, &pool, &e), 0);
    assert_int_equal(pd_rstream_new(open(path, O_RDONLY | O_CLOEXEC), &(struct pd_rstream_opts){ .own_fd = true, .name = path }, &s, &e), 0);
    for (*largest = 0; (rc = pd_rstream_next(s, -1, &rec, NULL, &e)) == 1;) {
        struct pd_arena a = { 0 };
        struct pd_kvdesc d;
        struct pd_chunk c;
        if (rec.kind == PD_K_OFFER) {
            assert_int_equal(pd_kvdesc_decode(rec.p, rec.n, &a, &d, &e), 0);
            assert_int_equal(pd_import_begin(pool, &d, &im, &e), 0);
        } else if (rec.kind == PD_K_CHUNK) {
            assert_int_equal(pd_chunk_decode(rec.p, rec.n, &c, &e), 0);
            if (pd_import_chunk(im, &c, &e))
                fail_msg("%s", e.msg);
            *largest = c.data.n > *largest ? c.data.n : *largest;
            n += c.layer0 == 0;
        } else if (rec.kind == PD_K_KV) {
            assert_int_equal(pd_kvdesc_decode(rec.p, rec.n, &a, &d, &e), 0);
            if (pd_import_finish(im, &d, &e))
                fail_msg("%s", e.msg);
        }
        pd_arena_free(&a);
    }
    if (rc < 0)
        fail_msg("%s", e.msg);
    assert_non_null(blocks = pd_import_take(im, &n_blocks));
    assert_true(fix_same(f->pool, f->blocks, pool, blocks, n_blocks));
    for (uint32_t i = 0; i < n_blocks; i++)
        pd_pool_put(pool, blocks[i]);
    pd_free(blocks);
    pd_import_free(im);
    pd_rstream_free(s);
    pd_pool_free(pool);
    return n;
}

/* What is asked for goes as far as a record does: whole blocks, and a record of 16 MiB holds them with what else is in it. */
static void chunks_of_any_size(void **state)
{
    static const struct pd_pool_geom g = { .layers = 1, .kv_heads = 8, .head_dim = 128, .block_size = 16, .dtype = PD_F16 };      /* 64 KiB a block */
    const struct { uint64_t ask; uint32_t n; uint64_t bytes; } c[] = {
        { 0, 21, 1 << 20 }, { 1, 321, 64 << 10 }, { 8 << 20, 3, 8 << 20 }, { (16 << 20) - 1, 2, 255 * (64 << 10) }, { 16 << 20, 2, 255 * (64 << 10) },
        { (16 << 20) + 1, 2, 255 * (64 << 10) }, { 64 << 20, 2, 255 * (64 << 10) }, { (uint64_t)1 << 40, 2, 255 * (64 << 10) }, { INT64_MAX, 2, 255 * (64 << 10) } };
    struct fix f;
    char dir[] = "/tmp/test_sender.XXXXXX", in[60], out[60];
    assert_non_null(mkdtemp(dir));
    snprintf(in, sizeof in, "%s/in", dir);
    snprintf(out, sizeof out, "%s/out", dir);
    fix_make(&f, &g, 16 * 320 + 5, 16, 3);
    write_stream(&f, in);
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        const char *outs[] = { out, NULL };
        struct pd_net net = { .connect_us = 1000 };
        struct pd_sender_opts o = { .in = in, .out = outs, .net = &net, .max_record = PD_MAX_RECORD_DEFAULT, .kv_mem = 64 << 20, .chunk_bytes = c[i].ask };
        struct pd_err e = { 0 };
        int status = 0;
        uint64_t largest;
        if (pd_sender_run(&o, &status, &e) || status)
            fail_msg("%llu: %d: %s", (unsigned long long)c[i].ask, status, e.msg);
        uint32_t n = read_stream(&f, out, &largest);
        if (n != c[i].n || largest != c[i].bytes)
            fail_msg("%llu: %u chunks, the largest of %llu bytes", (unsigned long long)c[i].ask, n, (unsigned long long)largest);
        unlink(out);
    }
    unlink(in);
    rmdir(dir);
    fix_free(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(chunks_of_any_size) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
