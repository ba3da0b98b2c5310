/* What the tests of kv share: a seeded run in a pool, with its descriptor. */
#ifndef KV_FIXTURE_H
#define KV_FIXTURE_H
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include <cmocka.h>
#include <msgpack.h>
#include "../../libcommon/kv/dump.h"
#include "../../libcommon/kv/fingerprint.h"
#include "../../libcommon/kv/handover.h"
#include "../../libcommon/kv/prefix.h"

#ifndef FIX_POOL_BYTES
#define FIX_POOL_BYTES (64 << 20)
#endif
struct fix {
    struct pd_pool *pool;
    struct pd_kvdesc d;
    struct pd_plan plan;
    uint32_t *blocks;
    int32_t *ids;
    uint8_t (*hashes)[16]; uint32_t n_hashes;
    msgpack_sbuffer fp;
    struct pd_first first;
    struct pd_top top[2];
};

static inline uint64_t fix_random(uint64_t *s)
{
    *s += 0x9e3779b97f4a7c15u;
    uint64_t z = *s;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline void fix_pack_str(msgpack_packer *k, const char *s) { msgpack_pack_str_with_body(k, s, strlen(s)); }

/* A fingerprint in the canonical form, short. */
static inline void fix_fp(msgpack_sbuffer *b, const char *theta_name, double theta, const char *software)
{
    msgpack_packer k;
    msgpack_sbuffer_init(b);
    msgpack_packer_init(&k, b, msgpack_sbuffer_write);
    msgpack_pack_map(&k, 6);
    fix_pack_str(&k, "layers");
    msgpack_pack_int(&k, 3);
    fix_pack_str(&k, theta_name);
    msgpack_pack_double(&k, theta);
    fix_pack_str(&k, "weights_digest");
    msgpack_pack_bin_with_body(&k, "\x01\x02\x03\x04\x05\x06\x07\x08", 8);
    fix_pack_str(&k, "kv_dtype");
    fix_pack_str(&k, "f16");
    fix_pack_str(&k, "numerics");
    fix_pack_str(&k, "u8");
    fix_pack_str(&k, "software");
    fix_pack_str(&k, software);
}

/* Finite numbers of the dtype, all of a token's place and none of its tail. */
static inline void fix_fill(struct fix *f, uint64_t seed)
{
    const struct pd_kv_layout *y = &f->d.layout;
    size_t el = pd_dtype_size(pd_pool_geom(f->pool)->dtype), row = y->head_dim * el;
    for (uint32_t l = 0; l < y->layers; l++)
        for (int v = 0; v < 2; v++)
            for (uint32_t t = 0; t < f->d.n_tokens; t++)
                for (uint32_t h = 0; h < y->kv_heads; h++) {
                    uint8_t *p = pd_pool_base(f->pool, f->blocks[t / y->block_size]) + pd_pool_off(f->pool, (int)l, v) +
                                 ((size_t)h * y->block_size + t % y->block_size) * row;
                    for (uint32_t i = 0; i < y->head_dim; i++) {
                        float x = (float)((double)(int64_t)fix_random(&seed) / 9.3e18) * (float)(l + 1);
                        uint16_t u = el == 4 ? 0 : pd_pool_geom(f->pool)->dtype == PD_F16 ? pd_float_to_half(x) : pd_float_to_bf16(x);
                        memcpy(p + i * el, el == 4 ? (void *)&x : (void *)&u, el);
                    }
                }
}

static inline void fix_make(struct fix *f, const struct pd_pool_geom *g, uint32_t n_tokens, uint32_t chunk_blocks, uint64_t seed)
{
    struct pd_err e = { 0 };
    memset(f, 0, sizeof *f);
    assert_int_equal(pd_pool_new(g, FIX_POOL_BYTES, &f->pool, &e), 0);
    struct pd_kvdesc *d = &f->d;
    assert_int_equal(pd_run_new(d->run, &e), 0);
    assert_int_equal(pd_gen_new(d->gen, &e), 0);
    memset(d->op, 7, sizeof d->op);
    d->epoch = 3;
    fix_fp(&f->fp, "rope_theta", 10000, "pd 0.1");
    d->fp_fields = (struct pd_bin){ (uint8_t *)f->fp.data, f->fp.size };
    assert_int_equal(pd_sha256(f->fp.data, f->fp.size, d->fp_sha, &e), 0);
    d->n_tokens = n_tokens;
    f->ids = calloc(n_tokens + 1, sizeof *f->ids);
    for (uint32_t i = 0; i < n_tokens; i++)
        f->ids[i] = (int32_t)(fix_random(&seed) % 50000);
    d->token_ids = f->ids;
    pd_layout_from_pool(f->pool, &d->layout);
    assert_int_equal(pd_plan_make(&d->layout, n_tokens, chunk_blocks, &f->plan, &e), 0);
    d->payload = (struct pd_payload){ .scheme = "inline", .bytes = f->plan.bytes, .chunk_bytes = f->plan.chunk_bytes, .n_chunks = f->plan.n_chunks,
                                      .chunk_blocks = f->plan.chunk_blocks, .codec = "none" };
    f->top[0] = (struct pd_top){ 11, -0.25f };
    f->top[1] = (struct pd_top){ 12, -2.5f };
    f->first = (struct pd_first){ 11, -0.25f, f->top, 2 };
    d->first = &f->first;
    d->n_first = 1;
    d->worker = (struct pd_str){ "p0", 2 };
    d->domain = (struct pd_str){ "host", 4 };
    d->request.prompt = (struct pd_str){ "Once upon", 9 };
    assert_int_equal(pd_request_resolve(&d->request, 1, &e), 0);
    memcpy(d->request.run, d->run, sizeof d->run);
    f->blocks = calloc(f->plan.n_blocks, sizeof *f->blocks);
    assert_int_equal(pd_pool_take(f->pool, f->plan.n_blocks, f->blocks, &e), 0);
    fix_fill(f, seed);
    f->n_hashes = n_tokens / (uint32_t)g->block_size;
    f->hashes = calloc(f->n_hashes + 1, 16);
    uint64_t must;
    assert_int_equal(pd_fp_must_seed(d->fp_fields, &must, &e), 0);
    pd_block_hashes(must, f->ids, n_tokens, (uint32_t)g->block_size, (struct pd_str){ NULL, 0 }, (struct pd_str){ NULL, 0 }, f->hashes);
}

static inline void fix_free(struct fix *f)
{
    pd_pool_free(f->pool);
    free(f->blocks);
    free(f->ids);
    free(f->hashes);
    msgpack_sbuffer_destroy(&f->fp);
}

/* Chunk `index` with its bytes in one piece (malloc). */
static inline void fix_chunk(struct fix *f, uint32_t index, struct pd_chunk *c)
{
    struct pd_err e = { 0 };
    struct iovec *iov = calloc((size_t)f->plan.chunk_blocks * 2, sizeof *iov);
    int n = 0;
    assert_int_equal(pd_export_chunk(f->pool, f->blocks, &f->plan, &f->d, index, c, iov, &n, &e), 0);
    uint8_t *p = malloc(c->raw_len), *q = p;
    for (int i = 0; i < n; i++) {
        memcpy(q, iov[i].iov_base, iov[i].iov_len);
        q += iov[i].iov_len;
    }
    assert_int_equal(q - p, c->raw_len);
    c->data = (struct pd_bin){ p, (size_t)c->raw_len };
    free(iov);
}

/* Whether two runs' KV is the same in every bit, whatever their blocks are. */
static inline bool fix_same(const struct pd_pool *a, const uint32_t *ab, const struct pd_pool *b, const uint32_t *bb, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        for (int l = 0; l < pd_pool_geom(a)->layers; l++)
            for (int v = 0; v < 2; v++)
                if (memcmp(pd_pool_base(a, ab[i]) + pd_pool_off(a, l, v), pd_pool_base(b, bb[i]) + pd_pool_off(b, l, v), pd_pool_layer_bytes(a)))
                    return false;
    return true;
}

#define FAILS_WITH(call, wanted, text) do { \
        memset(&e, 0, sizeof e); \
        assert_int_equal(call, wanted); \
        assert_int_equal(e.code, wanted); \
        if (!strstr(e.msg, text)) \
            fail_msg("message '%s' lacks '%s'", e.msg, text); \
    } while (0)
#endif
