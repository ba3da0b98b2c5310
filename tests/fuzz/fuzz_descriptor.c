/* A descriptor off the wire: decode, compare its fingerprint with another, plan, and what an import would check before it takes memory.
 * `sum` guards real ones against accident, not against malice: the target repairs it, so that mutations reach what lies behind. */
#include "../../libcommon/kv/fingerprint.h"
#include "../../libcommon/kv/handover.h"
#include "../../libcommon/kv/prefix.h"

static void repair(uint8_t *p, size_t n)
{
    static const uint8_t key[] = { 0xa3, 's', 'u', 'm', 0xc4, 8 };
    if (n > sizeof key + 8 && !memcmp(p + n - 8 - sizeof key, key, sizeof key))
        pd_put_be64(p + n - 8, pd_xxh3(p, n - 8 - sizeof key, 0));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct pd_pool_geom geom = { .layers = 3, .kv_heads = 2, .head_dim = 8, .block_size = 16, .dtype = PD_F16 };
    static struct pd_pool *pool;
    struct pd_arena a = { 0 };
    struct pd_kvdesc d;
    struct pd_err e;
    struct pd_import *im = NULL;
    struct pd_plan plan;
    uint64_t seed;
    uint8_t hash[64][16];
    if (!pool && pd_pool_new(&geom, 4 << 20, &pool, &e))
        return 0;
    uint8_t *p = pd_calloc(size, 1, "copy", &e);
    if (!p)
        return 0;
    memcpy(p, data, size);
    repair(p, size);
    memset(&d, 0, sizeof d);
    if (!pd_kvdesc_decode(p, size, &a, &d, &e)) {
        pd_fp_compare(d.fp_fields, (struct pd_bin){ p, size }, &e);
        pd_fp_compare(d.fp_fields, d.fp_fields, &e);
        if (!pd_fp_must_seed(d.fp_fields, &seed, &e) && d.n_tokens && d.layout.block_size && d.n_tokens / d.layout.block_size <= 64)
            pd_block_hashes(seed, d.token_ids, d.n_tokens, d.layout.block_size, d.request.adapter, d.request.cache_salt, hash);
        if (!pd_layout_check(&d.layout, &e))
            pd_plan_make(&d.layout, d.n_tokens, d.payload.chunk_blocks, &plan, &e);
        if (d.fp_fields.p && !pd_sha256(d.fp_fields.p, d.fp_fields.n, d.fp_sha, &e) && !pd_import_begin(pool, &d, &im, &e)) {
            d.offer = false;
            pd_import_finish(im, &d, &e);
            pd_import_free(im);
        }
    }
    pd_fp_compare((struct pd_bin){ p, size }, (struct pd_bin){ p, size / 2 }, &e);
    pd_fp_must_seed((struct pd_bin){ p, size }, &seed, &e);
    if (pd_pool_stats(pool).used)
        __builtin_trap();
    pd_arena_free(&a);
    pd_free(p);
    return 0;
}
