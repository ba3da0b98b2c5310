/* A dump in blocks of another size or order: the same numbers, under another layout, fingerprint and generation. */
#include "../model/dtype.h"
#include "../wire/pack.h"
#include "convert.h"
#include "fingerprint.h"
#include "inspect.h"
#include "prefix.h"

struct turning { const struct pd_kv_opts *o; struct pd_dump_w *w; };

/* Both pools are HND: order is what the descriptor says, and how blocks lie in a stream. */
static int copy(const struct pd_kv_run *r, struct pd_pool *to, const uint32_t *blocks, uint32_t n_blocks, struct pd_err *e)
{
    const struct pd_pool_geom *a = pd_pool_geom(r->pool), *b = pd_pool_geom(to);
    const struct pd_kernels *k = pd_kv_kernels();
    uint32_t heads = (uint32_t)a->kv_heads, dim = (uint32_t)a->head_dim;
    size_t el = pd_dtype_size(a->dtype);
    uint8_t **src = pd_calloc(r->n_blocks, sizeof *src, "block table", e), **dst = pd_calloc(n_blocks, sizeof *dst, "block table", e);
    int rc = src && dst ? 0 : PD_ENOMEM;
    for (int l = 0; l < a->layers && !rc; l++)
        for (int v = 0; v < 2 && !rc; v++) {
            for (uint32_t i = 0; i < r->n_blocks; i++)
                src[i] = pd_pool_base(r->pool, r->blocks[i]) + pd_pool_off(r->pool, l, v);
            for (uint32_t i = 0; i < n_blocks; i++)
                dst[i] = pd_pool_base(to, blocks[i]) + pd_pool_off(to, l, v);
            rc = pd_convert(k, &(struct pd_kv_view){ { (uint32_t)b->block_size, heads, dim, el, false }, dst, n_blocks, 0, 0 },
                            &(struct pd_kv_view){ { (uint32_t)a->block_size, heads, dim, el, false }, src, r->n_blocks, 0, 0 }, r->d.n_tokens, heads, e);
        }
    pd_free(src);
    pd_free(dst);
    return rc;
}

/* The descriptor notes it once: what was converted before stays converted. */
static int note(struct pd_kvdesc *d, unsigned what, struct pd_buf *out, struct pd_err *e)
{
    const uint8_t head[5] = { 0xdf, (uint8_t)(d->extra.pairs >> 24), (uint8_t)(d->extra.pairs >> 16), (uint8_t)(d->extra.pairs >> 8), (uint8_t)d->extra.pairs };
    struct pd_packer k;
    struct pd_bin old;
    char text[PD_CONV_MAX];
    int rc = pd_buf_add(out, head, sizeof head, e);
    rc = rc ? rc : pd_buf_add(out, d->extra.p, d->extra.n, e);
    if (rc || !what || pd_map_find(out->p, out->n, "converted", &old) == 1)
        return rc;
    pd_pack_init(&k, out, e);
    pd_pack_text(&k, "converted");
    pd_pack_text(&k, pd_conv_text(what, text));
    d->extra = (struct pd_extra){ out->p + sizeof head, out->n - sizeof head, d->extra.pairs + 1 };
    return k.rc;
}

static int convert_run(void *ctx, struct pd_kv_run *r, struct pd_err *e)
{
    const struct turning *t = ctx;
    struct pd_kvdesc d = r->d;
    struct pd_pool_geom g = *pd_pool_geom(r->pool);
    struct pd_buf fp = { 0 }, extra = { 0 };
    struct pd_pool *pool = NULL;
    struct pd_plan plan;
    uint32_t *blocks = NULL;
    uint8_t (*hashes)[16] = NULL;
    struct pd_bin old;
    uint64_t seed;
    int rc;
    if (t->o->block_size)
        d.layout.block_size = t->o->block_size;
    if (t->o->order)
        snprintf(d.layout.order, sizeof d.layout.order, "%s", t->o->order);
    d.layout.layout_hash = pd_layout_hash(&d.layout);
    g.block_size = (int)d.layout.block_size;
    uint32_t n_hashes = d.n_tokens / d.layout.block_size;
    if ((rc = pd_layout_check(&d.layout, e)) || (rc = pd_plan_make(&d.layout, d.n_tokens, 0, &plan, e)) || (rc = pd_gen_new(d.gen, e)) ||
        (rc = pd_fp_relayout(r->d.fp_fields, d.layout.block_size, d.layout.order, &fp, e)) || (rc = pd_sha256(fp.p, fp.n, d.fp_sha, e)) ||
        (rc = note(&d, pd_layout_converts(&r->d.layout, &d.layout), &extra, e)))
        goto out;
    d.fp_fields = (struct pd_bin){ fp.p, fp.n };
    rc = PD_ENOMEM;
    if (!(blocks = pd_calloc(plan.n_blocks, sizeof *blocks, "block table", e)) || !(hashes = pd_calloc(n_hashes, 16, "block hashes", e)) ||
        (rc = pd_pool_new(&g, (int64_t)plan.bytes, &pool, e)) || (rc = pd_pool_take(pool, plan.n_blocks, blocks, e)) ||
        (rc = copy(r, pool, blocks, plan.n_blocks, e)) || (rc = pd_fp_must_seed(d.fp_fields, &seed, e)))
        goto out;
    pd_block_hashes(seed, d.token_ids, d.n_tokens, d.layout.block_size, d.request.adapter, d.request.cache_salt, hashes);
    bool part = pd_map_find(fp.p, fp.n, "slice", &old) == 1;    /* not the beginning of a prompt: it has no hashes */
    rc = pd_dump_add(t->w, &d, pool, blocks, part ? NULL : (const uint8_t (*)[16])hashes, part ? 0 : n_hashes, NULL, 0, e);
out:
    pd_pool_free(pool);
    pd_free(blocks);
    pd_free(hashes);
    pd_buf_free(&fp);
    pd_buf_free(&extra);
    return rc ? pd_err_prefix(e, "run %s", r->d.run) : 0;
}

int pd_kv_convert(const char *path, const char *to, const struct pd_kv_opts *o, struct pd_err *e)
{
    struct turning t = { .o = o };
    int rc = o->block_size || o->order ? pd_dump_create(to, &t.w, e) :
             pd_fail(e, PD_EUSAGE, "kv convert: into what? (example: pd-trace kv convert run.h5 -o run32.h5 --block-size 32)");
    if (rc)
        return rc;
    rc = pd_kv_each_run(path, -1, &(struct pd_kv_walk){ .mode = PD_DUMP_DATA, .run = o->run, .run_fn = convert_run, .ctx = &t }, e);
    if (rc) {
        pd_dump_abort(t.w);
        return rc;
    }
    return pd_dump_commit(t.w, e);
}
