#include <inttypes.h>
#include <sys/uio.h>
#include "../base/clock.h"
#include "../base/fault.h"
#include "../model/dtype.h"
#include "../wire/frame.h"
#include "codec.h"
#include "convert.h"
#include "handover.h"

#define CHUNK_TARGET ((uint64_t)1 << 20)
#define CHUNK_MAX_BLOCKS 256    /* when we choose: a chunk's pieces stay within one writev */
#define HEAD_ROOM 1024          /* bytes of a chunk record besides its data, generously */

size_t pd_layout_elem_size(const struct pd_kv_layout *l)
{
    enum pd_dtype t;
    return pd_kv_dtype_parse(l->dtype, &t) ? pd_dtype_size(t) : 0;
}

static void put_be32(uint8_t out[4], uint32_t v)
{
    for (int i = 0; i < 4; i++)
        out[i] = (uint8_t)(v >> (24 - 8 * i));
}

/* XXH3-64, seed 0, over four big-endian 32-bit numbers, then the two names each with its NUL. */
uint64_t pd_layout_hash(const struct pd_kv_layout *l)
{
    uint8_t b[16 + sizeof l->dtype + sizeof l->order + 2];
    size_t n = 16, d = strnlen(l->dtype, sizeof l->dtype), o = strnlen(l->order, sizeof l->order);
    put_be32(b, l->block_size);
    put_be32(b + 4, l->layers);
    put_be32(b + 8, l->kv_heads);
    put_be32(b + 12, l->head_dim);
    memcpy(b + n, l->dtype, d);
    n += d;
    b[n++] = 0;
    memcpy(b + n, l->order, o);
    n += o;
    b[n++] = 0;
    return pd_xxh3(b, n, 0);
}

void pd_layout_from_pool(const struct pd_pool *p, struct pd_kv_layout *l)
{
    const struct pd_pool_geom *g = pd_pool_geom(p);
    memset(l, 0, sizeof *l);
    l->block_size = (uint32_t)g->block_size;
    l->layers = (uint32_t)g->layers;
    l->kv_heads = (uint32_t)g->kv_heads;
    l->head_dim = (uint32_t)g->head_dim;
    strcpy(l->dtype, pd_kv_dtype_name(g->dtype));       /* a pool has no other types */
    strcpy(l->order, "HND");
    l->layout_hash = pd_layout_hash(l);
}

int pd_layout_check(const struct pd_kv_layout *l, struct pd_err *e)
{
    if (!pd_layout_elem_size(l))
        return pd_fail(e, PD_EINCOMPAT, "KV dtype '%.8s' is not " PD_KV_DTYPE_LIST, l->dtype);
    if (strcmp(l->order, "HND") && strcmp(l->order, "NHD"))
        return pd_fail(e, PD_EINCOMPAT, "KV order '%.8s' is not HND or NHD", l->order);
    if (l->block_size < 1 || l->block_size > 65536 || l->layers < 1 || l->layers > 4096 || l->kv_heads < 1 || l->kv_heads > 65536 || l->head_dim < 1 ||
        l->head_dim > 65536)
        return pd_fail(e, PD_ECORRUPT, "KV layout makes no sense: blocks of %u tokens, %u layers, %u heads of %u", l->block_size, l->layers, l->kv_heads, l->head_dim);
    if (l->layout_hash != pd_layout_hash(l))
        return pd_fail(e, PD_ECORRUPT, "KV layout hash %016" PRIx64 " is not that of its fields (%016" PRIx64 ")", l->layout_hash, pd_layout_hash(l));
    return 0;
}

int pd_plan_make(const struct pd_kv_layout *l, uint32_t n_tokens, uint32_t chunk_blocks, struct pd_plan *plan, struct pd_err *e)
{
    size_t per = pd_layout_elem_size(l), bytes, total, chunks;
    memset(plan, 0, sizeof *plan);
    if (!per || !l->block_size || !l->layers || !l->kv_heads || !l->head_dim || !n_tokens)
        return pd_fail(e, PD_ECORRUPT, "KV of %u tokens in blocks of %u, %u layers, %u heads of %u, dtype '%.8s' makes no sense", n_tokens, l->block_size, l->layers,
                       l->kv_heads, l->head_dim, l->dtype);
    /* K and V of one layer of one block */
    if (!pd_mul_size(per, 2, &per) || !pd_mul_size(per, l->block_size, &per) || !pd_mul_size(per, l->kv_heads, &per) || !pd_mul_size(per, l->head_dim, &per) ||
        per > PD_MAX_RECORD_DEFAULT - HEAD_ROOM)
        return pd_fail(e, PD_ECORRUPT, "a KV block of %u tokens, %u heads of %u does not fit a record of %u bytes (use a smaller --block-size)", l->block_size,
                       l->kv_heads, l->head_dim, PD_MAX_RECORD_DEFAULT);
    plan->layers = l->layers;
    plan->n_blocks = (uint32_t)(((uint64_t)n_tokens + l->block_size - 1) / l->block_size);
    if (!chunk_blocks) {
        uint64_t c = CHUNK_TARGET / per;
        chunk_blocks = c < 1 ? 1 : c > CHUNK_MAX_BLOCKS ? CHUNK_MAX_BLOCKS : (uint32_t)c;
    }
    if (chunk_blocks > plan->n_blocks)
        chunk_blocks = plan->n_blocks;
    plan->chunk_blocks = chunk_blocks;
    plan->n_ranges = (plan->n_blocks - 1) / chunk_blocks + 1;
    if (!pd_mul_size(per, chunk_blocks, &bytes) || bytes > PD_MAX_RECORD_DEFAULT - HEAD_ROOM)
        return pd_fail(e, PD_ECORRUPT, "a chunk of %u blocks of %zu bytes does not fit a record of %u bytes", chunk_blocks, per, PD_MAX_RECORD_DEFAULT);
    if (!pd_mul_size(plan->n_ranges, l->layers, &chunks) || chunks > UINT32_MAX || !pd_mul_size(per, plan->n_blocks, &total) || !pd_mul_size(total, l->layers, &total))
        return pd_fail(e, PD_ECORRUPT, "KV of %u tokens of %u layers overflows", n_tokens, l->layers);
    plan->n_chunks = (uint32_t)chunks;
    plan->bytes = total;
    plan->chunk_bytes = bytes;
    return 0;
}

uint64_t pd_chunk_seed(const uint8_t gen[16], uint64_t layout_hash, uint32_t layer0, uint32_t block0)
{
    uint8_t b[32];
    memcpy(b, gen, 16);
    pd_put_be64(b + 16, layout_hash);
    put_be32(b + 24, layer0);
    put_be32(b + 28, block0);
    return pd_xxh3(b, sizeof b, 0);
}

/* What the plan says about chunk `index`. */
struct place { uint32_t layer, block0, blocks; };

static struct place place_of(const struct pd_plan *plan, uint32_t index)
{
    struct place at = { index % plan->layers, index / plan->layers * plan->chunk_blocks, plan->chunk_blocks };
    if (at.blocks > plan->n_blocks - at.block0)
        at.blocks = plan->n_blocks - at.block0;
    return at;
}

/* The pieces of pool memory that hold K, then V of the blocks, in order; neighbours are one piece. */
static int pieces(const struct pd_pool *p, const uint32_t *blocks, struct place at, struct iovec *iov)
{
    size_t bytes = pd_pool_layer_bytes(p);
    int n = 0;
    for (int v = 0; v < 2; v++) {
        size_t off = pd_pool_off(p, (int)at.layer, v);
        for (uint32_t i = 0; i < at.blocks; i++) {
            uint8_t *a = pd_pool_base(p, blocks[at.block0 + i]) + off;
            if (n && (uint8_t *)iov[n - 1].iov_base + iov[n - 1].iov_len == a)
                iov[n - 1].iov_len += bytes;
            else
                iov[n++] = (struct iovec){ a, bytes };
        }
    }
    return n;
}

unsigned pd_layout_converts(const struct pd_kv_layout *a, const struct pd_kv_layout *b)
{
    return (a->block_size != b->block_size ? PD_CONV_BLOCK_SIZE : 0) | (strcmp(a->order, b->order) ? PD_CONV_ORDER : 0);
}

/* But for what may be converted. */
static int same_layout(const struct pd_kv_layout *l, const struct pd_pool *p, unsigned convert, struct pd_err *e)
{
    struct pd_kv_layout mine;
    pd_layout_from_pool(p, &mine);
    const struct { const char *name; uint32_t theirs, ours; bool bridged; } f[] = {
        { "block_size", l->block_size, mine.block_size, convert & PD_CONV_BLOCK_SIZE }, { "layers", l->layers, mine.layers, false },
        { "kv_heads", l->kv_heads, mine.kv_heads, false }, { "head_dim", l->head_dim, mine.head_dim, false },
    };
    if (strcmp(l->order, mine.order) && !(convert & PD_CONV_ORDER))
        return pd_fail(e, PD_EINCOMPAT, "order of the KV layout differs (prefill %.8s, decode %.8s)", l->order, mine.order);
    for (size_t i = 0; i < sizeof f / sizeof *f; i++)
        if (f[i].theirs != f[i].ours && !f[i].bridged)
            return pd_fail(e, PD_EINCOMPAT, "%s of the KV layout differs (prefill %u, decode %u)", f[i].name, f[i].theirs, f[i].ours);
    if (strcmp(l->dtype, mine.dtype))
        return pd_fail(e, PD_EINCOMPAT, "kv_dtype of the KV layout differs (prefill %.8s, decode %.8s)", l->dtype, mine.dtype);
    return 0;
}

int pd_export_chunk(const struct pd_pool *p, const uint32_t *blocks, const struct pd_plan *plan, const struct pd_kvdesc *offer, uint32_t index,
                    struct pd_chunk *c, struct iovec *iov, int *n_iov, struct pd_err *e)
{
    if (index >= plan->n_chunks || plan->layers != (uint32_t)pd_pool_geom(p)->layers)
        return pd_fail(e, PD_EFAIL, "run %s: no chunk %u in a plan of %u chunks of %u layers", offer->run, index, plan->n_chunks, plan->layers);
    struct place at = place_of(plan, index);
    memset(c, 0, sizeof *c);
    memcpy(c->run, offer->run, sizeof c->run);
    memcpy(c->gen, offer->gen, sizeof c->gen);
    c->index = index;
    c->layer0 = at.layer;
    c->layers = 1;
    c->block0 = at.block0;
    c->blocks = at.blocks;
    strcpy(c->codec, "none");
    c->raw_len = 2 * (uint64_t)pd_pool_layer_bytes(p) * at.blocks;
    c->data.n = c->raw_len;
    *n_iov = pieces(p, blocks, at, iov);
    c->xxh3 = pd_xxh3v(iov, *n_iov, pd_chunk_seed(offer->gen, offer->layout.layout_hash, at.layer, at.block0));
    return 0;
}

struct pd_import {
    struct pd_pool *pool;
    struct pd_plan plan;
    struct pd_kvdesc offer;             /* its pointers lead into `arena` or are NULL */
    struct pd_buf request;              /* the offer's request, encoded: compared with the closing one */
    struct pd_arena arena;
    uint32_t *blocks, n_taken, n_held;
    struct iovec *iov;                  /* [2 * chunk_blocks] */
    unsigned converts;                  /* PD_CONV_*: what differs between the payload's layout and the pool's */
    struct pd_kv_form form;             /* the payload's */
    size_t bytes_a_block;               /* of its K (or V) of one layer */
    struct pd_codec *codec;             /* from the first coded chunk to the last */
    const struct pd_kernels *k;         /* converting */
    uint8_t *scratch;                   /* converting from the peer's memory: [chunk_bytes] */
    uint8_t **src, **dst;               /* converting: [chunk_blocks], [blocks of the pool] */
    uint32_t n_table;                   /* blocks of the pool that the run takes */
    uint64_t *seen; uint32_t n_seen;    /* a bit a chunk */
    const struct pd_slabs *from;        /* another process's memory, or NULL: chunks bring their bytes */
    uint32_t *from_blocks;              /* [n_blocks] */
    bool finished, in_place, look, landing;     /* landing: the peer writes into the blocks */
    uint64_t bytes;
    int64_t us;
};

static int check_payload(const struct pd_kvdesc *d, const struct pd_plan *plan, const char *scheme, struct pd_err *e)
{
    const struct pd_payload *y = &d->payload;
    const struct { const char *name; uint64_t said, is; } f[] = {
        { "chunk_blocks", y->chunk_blocks, plan->chunk_blocks }, { "n_chunks", y->n_chunks, plan->n_chunks },
        { "chunk_bytes", y->chunk_bytes, plan->chunk_bytes }, { "bytes", y->bytes, plan->bytes },
    };
    if (strcmp(y->scheme, scheme))
        return pd_fail(e, PD_EINCOMPAT, "run %s: payload scheme '%.12s' is not %s (%s)", d->run, y->scheme,
                       *scheme == 'i' ? "one that is read from a stream" : "what was agreed on", scheme);
    if (strcmp(y->codec, "none") && strcmp(y->codec, "zstd"))
        return pd_fail(e, PD_EINCOMPAT, "run %s: payload codec '%.8s' is not known (none, zstd)", d->run, y->codec);
    if (*y->codec == 'z' && (!pd_codec_fits(d->layout.dtype) || !strcmp(scheme, "shm")))
        return pd_fail(e, PD_EINCOMPAT, "run %s: payload codec zstd is for f16 and bf16 that travel, not for %.8s by %s", d->run, d->layout.dtype, scheme);
    for (size_t i = 0; i < sizeof f / sizeof *f; i++)
        if (f[i].said != f[i].is)
            return pd_fail(e, PD_ECORRUPT, "run %s: descriptor says %s %" PRIu64 ", its layout and %u tokens give %" PRIu64, d->run, f[i].name, f[i].said,
                           d->n_tokens, f[i].is);
    return 0;
}

static int check_offer(const struct pd_pool *p, const struct pd_kvdesc *d, const char *scheme, unsigned convert, struct pd_plan *plan, struct pd_err *e)
{
    uint8_t sha[PD_SHA_LEN];
    int rc;
    if (!d->n_tokens || !d->token_ids)
        return pd_fail(e, PD_ECORRUPT, "run %s: descriptor has no tokens", d->run);
    if (!d->payload.scheme[0])
        return pd_fail(e, PD_EFAIL, "run %s: descriptor has no payload (its request ended at prefill)", d->run);
    if ((rc = pd_layout_check(&d->layout, e)) || (rc = same_layout(&d->layout, p, convert, e)))
        return pd_err_prefix(e, "run %s", d->run);
    if (!d->payload.chunk_blocks)
        return pd_fail(e, PD_ECORRUPT, "run %s: descriptor says chunk_blocks 0", d->run);
    if ((rc = pd_plan_make(&d->layout, d->n_tokens, d->payload.chunk_blocks, plan, e)))
        return pd_err_prefix(e, "run %s", d->run);
    if ((rc = check_payload(d, plan, scheme, e)) || (rc = pd_sha256(d->fp_fields.p, d->fp_fields.p ? d->fp_fields.n : 0, sha, e)))
        return rc;
    if (memcmp(sha, d->fp_sha, sizeof sha))
        return pd_fail(e, PD_ECORRUPT, "run %s: the fingerprint's SHA-256 is not that of its fields", d->run);
    return 0;
}

static int keep_payload(struct pd_import *im, const struct pd_payload *y, struct pd_err *e)
{
    struct pd_payload *mine = &im->offer.payload;
    *mine = *y;
    mine->where = (struct pd_str){ NULL, 0 };
    mine->runs = NULL;
    mine->n_runs = 0;
    if (y->where.p && !(mine->where.p = pd_arena_dup(&im->arena, y->where.p, mine->where.n = y->where.n, e)))
        return PD_ENOMEM;
    if (y->n_runs && !(mine->runs = pd_arena_dup(&im->arena, y->runs, y->n_runs * sizeof *y->runs, e)))
        return PD_ENOMEM;
    mine->n_runs = y->n_runs;
    return 0;
}

static int keep_bin(struct pd_arena *a, struct pd_bin *b, struct pd_err *e)
{
    if (b->p && !(b->p = pd_arena_dup(a, b->p, b->n, e)))
        return PD_ENOMEM;
    return 0;
}

static int keep_str(struct pd_arena *a, struct pd_str *s, struct pd_err *e)
{
    if (s->p && !(s->p = pd_arena_dup(a, s->p, s->n, e)))
        return PD_ENOMEM;
    return 0;
}

/* The offer's own copy: the record it came in may be gone when the kv arrives. */
static int keep_offer(struct pd_import *im, const struct pd_kvdesc *offer, struct pd_err *e)
{
    struct pd_kvdesc *d = &im->offer;
    int rc = pd_request_encode(&offer->request, &im->request, e);
    if (rc)
        return rc;
    *d = *offer;
    memset(&d->request, 0, sizeof d->request);
    memset(&d->extra, 0, sizeof d->extra);
    d->first = NULL;
    d->n_first = 0;
    d->t = d->lease = (struct pd_bin){ NULL, 0 };
    if (keep_bin(&im->arena, &d->fp_fields, e) || keep_str(&im->arena, &d->domain, e) || keep_str(&im->arena, &d->worker, e) ||
        keep_payload(im, &offer->payload, e))
        return PD_ENOMEM;
    size_t n = (size_t)d->n_tokens * sizeof *d->token_ids;
    return (d->token_ids = pd_arena_dup(&im->arena, d->token_ids, n, e)) ? 0 : PD_ENOMEM;
}

int pd_import_begin(struct pd_pool *p, const struct pd_kvdesc *offer, struct pd_import **out, struct pd_err *e)
{
    return pd_import_begin_with(p, offer, NULL, out, e);
}

/* What converting needs. */
static int set_form(struct pd_import *im, struct pd_err *e)
{
    struct pd_kv_layout mine;
    const struct pd_kv_layout *l = &im->offer.layout;
    pd_layout_from_pool(im->pool, &mine);
    im->form = pd_form_of(l, pd_layout_elem_size(l));
    im->bytes_a_block = (size_t)(im->plan.chunk_bytes / im->plan.chunk_blocks / 2);
    im->converts = pd_layout_converts(l, &mine);
    im->n_table = (uint32_t)(((uint64_t)im->offer.n_tokens + mine.block_size - 1) / mine.block_size);
    if (!im->converts)
        return 0;
    im->k = pd_kv_kernels();
    return (im->src = pd_calloc(im->plan.chunk_blocks, sizeof *im->src, "KV pieces", e)) && (im->dst = pd_calloc(im->n_table, sizeof *im->dst, "KV pieces", e)) ? 0 : PD_ENOMEM;
}

/* The block table: held ones, then the peer's where they can be read in place, then own ones. n_taken counts references held, so that any failure gives them back. */
static int take_blocks(struct pd_import *im, const struct pd_import_opts *o, struct pd_err *e)
{
    uint32_t full = im->offer.n_tokens / im->offer.layout.block_size;
    for (; im->n_taken < im->n_held; im->n_taken++)
        pd_pool_ref(im->pool, im->blocks[im->n_taken] = o->held[im->n_taken]);
    while (o->lend && o->from && !im->converts && im->n_taken < full) {
        uint32_t theirs = o->from_blocks[im->n_taken], per = pd_slabs_shape(o->from)->slab_blocks;
        int64_t slab = pd_slabs_lend(o->from, theirs / per, im->pool, e);
        if (slab < 0)
            break;          /* another shape, or no room: the rest is copied */
        uint32_t b = (uint32_t)slab * per + theirs % per;
        int rc = pd_pool_borrow(im->pool, b, e);
        if (rc)
            return rc;
        im->blocks[im->n_taken++] = b;
        im->in_place = true;
    }
    if (im->n_taken == im->n_table)
        return 0;
    uint32_t n = im->n_table - im->n_taken, *to = im->blocks + im->n_taken;
    int rc = im->converts ? pd_pool_take(im->pool, n, to, e) : pd_pool_take_raw(im->pool, n, to, e);     /* a block may be filled from several chunks, and not whole */
    if (rc)
        return rc;
    im->n_taken = im->n_table;
    return 0;
}

static int keep_from(struct pd_import *im, struct pd_slabs *from, const uint32_t *from_blocks, struct pd_err *e)
{
    im->from = from;
    if (!from)
        return 0;
    if (!im->from_blocks && !(im->from_blocks = pd_calloc(im->plan.n_blocks, sizeof *im->from_blocks, "the peer's block table", e)))
        return PD_ENOMEM;
    memcpy(im->from_blocks, from_blocks, im->plan.n_blocks * sizeof *from_blocks);
    return 0;
}

int pd_import_begin_with(struct pd_pool *p, const struct pd_kvdesc *offer, const struct pd_import_opts *o, struct pd_import **out, struct pd_err *e)
{
    static const struct pd_import_opts none;
    struct pd_plan plan;
    o = o ? o : &none;
    int rc = check_offer(p, offer, o->from ? "shm" : o->landing ? o->landing : "inline", o->convert, &plan, e);
    if (rc)
        return rc;
    struct pd_import *im = pd_calloc(1, sizeof *im, "KV import", e);
    if (!im)
        return PD_ENOMEM;
    im->pool = p;
    im->plan = plan;
    im->landing = o->landing != NULL;
    im->look = o->look && !o->from && !o->landing;
    if ((rc = keep_offer(im, offer, e)) || (rc = set_form(im, e)))
        goto out;
    if (im->landing && im->converts) {
        rc = pd_fail(e, PD_EINCOMPAT, "run %s: what has to be converted cannot be written straight into its place (%s)", offer->run, o->landing);
        goto out;
    }
    uint32_t held_ranges = im->converts ? 0 : (o->n_held < plan.n_blocks ? o->n_held : plan.n_blocks) / plan.chunk_blocks;
    im->n_held = held_ranges * plan.chunk_blocks;
    rc = PD_ENOMEM;
    if (!(im->blocks = pd_calloc(im->n_table, sizeof *im->blocks, "KV block table", e)) ||
        !(im->iov = pd_calloc((size_t)plan.chunk_blocks * 2, sizeof *im->iov, "KV pieces", e)) ||
        !(im->seen = pd_calloc((plan.n_chunks + (size_t)63) / 64, 8, "KV chunk bitmap", e)))
        goto out;
    if ((rc = keep_from(im, o->from, o->from_blocks, e)))
        goto out;
    if (!im->look && (rc = take_blocks(im, o, e))) {
        pd_err_prefix(e, "run %s", offer->run);
        goto out;
    }
    for (uint32_t i = 0; i < held_ranges * plan.layers; i++, im->n_seen++)
        im->seen[i / 64] |= (uint64_t)1 << (i % 64);
    *out = im;
    return 0;
out:
    pd_import_free(im);
    return rc;
}

/* The unused tokens of the last block are zero by contract: a tail that is not would be memory of somebody else. */
static bool tail_is_zero(const struct pd_import *im, const uint8_t *const last[2] /* its K and V, of the chunk's layer */, struct place at)
{
    const struct pd_kv_form *f = &im->form;
    uint32_t used = im->offer.n_tokens % f->block_size, parts = f->nhd ? 1 : f->heads;
    if (at.block0 + at.blocks != im->plan.n_blocks || !used)
        return true;
    size_t row = im->bytes_a_block / parts / f->block_size, from = row * used, n = row * (f->block_size - used);
    for (int v = 0; v < 2; v++) {
        const uint8_t *block = last[v];
        for (uint32_t h = 0; h < parts; h++) {
            const uint8_t *q = block + (size_t)h * row * f->block_size + from;
            if (q[0] || memcmp(q, q + 1, n - 1))
                return false;
        }
    }
    return true;
}

static int check_chunk(const struct pd_import *im, const struct pd_chunk *c, struct place *out, struct pd_err *e)
{
    if (strcmp(c->run, im->offer.run))
        return pd_fail(e, PD_ECORRUPT, "run %s: chunk %u belongs to run %.26s", im->offer.run, c->index, c->run);
    if (memcmp(c->gen, im->offer.gen, sizeof c->gen))
        return pd_fail(e, PD_ECORRUPT, "run %s: chunk %u is of another generation", c->run, c->index);
    if (c->index >= im->plan.n_chunks)
        return pd_fail(e, PD_ECORRUPT, "run %s: chunk %u is beyond the %u that were offered", c->run, c->index, im->plan.n_chunks);
    struct place at = place_of(&im->plan, c->index);
    const struct { const char *name; uint64_t said, is; } f[] = {
        { "layer0", c->layer0, at.layer }, { "layers", c->layers, 1 }, { "block0", c->block0, at.block0 }, { "blocks", c->blocks, at.blocks },
        { "raw_len", c->raw_len, 2 * (uint64_t)im->bytes_a_block * at.blocks },
    };
    for (size_t i = 0; i < sizeof f / sizeof *f; i++)
        if (f[i].said != f[i].is)
            return pd_fail(e, PD_ECORRUPT, "run %s: chunk %u says %s %" PRIu64 ", the offer implies %" PRIu64, c->run, c->index, f[i].name, f[i].said, f[i].is);
    bool coded = !strcmp(c->codec, "zstd");
    if (coded ? strcmp(im->offer.payload.codec, "zstd") != 0 : strcmp(c->codec, "none") != 0)
        return pd_fail(e, PD_ECORRUPT, "run %s: chunk %u says codec '%.8s', the offer %.8s", c->run, c->index, c->codec, im->offer.payload.codec);
    if (!coded && c->data.n != c->raw_len)
        return pd_fail(e, PD_ECORRUPT, "run %s: chunk %u holds %zu bytes, not %" PRIu64, c->run, c->index, c->data.n, c->raw_len);
    if (im->seen[c->index / 64] >> (c->index % 64) & 1)
        return pd_fail(e, PD_ECORRUPT, "run %s: chunk %u came twice", c->run, c->index);
    *out = at;
    return 0;
}

/* The chunk's bytes into the pool: as they are, or into the pool's form. */
static int place(struct pd_import *im, struct place at, const uint8_t *data, struct pd_err *e)
{
    if (!im->converts) {
        int n = pieces(im->pool, im->blocks, at, im->iov);
        for (int i = 0; i < n; data += im->iov[i++].iov_len)
            memcpy(im->iov[i].iov_base, data, im->iov[i].iov_len);
        return 0;
    }
    const struct pd_pool_geom *g = pd_pool_geom(im->pool);
    uint32_t bs = im->form.block_size, t0 = at.block0 * bs, n = at.blocks * bs < im->offer.n_tokens - t0 ? at.blocks * bs : im->offer.n_tokens - t0;
    struct pd_kv_form mine = { (uint32_t)g->block_size, im->form.heads, im->form.head_dim, im->form.el, false };
    int rc = 0;
    for (int v = 0; v < 2 && !rc; v++) {
        for (uint32_t i = 0; i < at.blocks; i++)
            im->src[i] = (uint8_t *)(uintptr_t)data + ((size_t)v * at.blocks + i) * im->bytes_a_block;
        for (uint32_t i = t0 / mine.block_size; i <= (t0 + n - 1) / mine.block_size; i++)
            im->dst[i] = pd_pool_base(im->pool, im->blocks[i]) + pd_pool_off(im->pool, (int)at.layer, v);
        rc = pd_convert(im->k, &(struct pd_kv_view){ mine, im->dst, im->n_table, t0, 0 }, &(struct pd_kv_view){ im->form, im->src, at.blocks, 0, 0 }, n,
                        im->form.heads, e);
    }
    return rc;
}

static int wrong_sum(const struct pd_import *im, uint32_t index, struct place at, uint64_t said, uint64_t is, struct pd_err *e)
{
    return pd_fail(e, PD_ECORRUPT, "run %s: chunk %u (layer %u, blocks %u to %u): checksum %016" PRIx64 ", its bytes give %016" PRIx64, im->offer.run, index, at.layer,
                   at.block0, at.block0 + at.blocks - 1, said, is);
}

static int wrong_tail(const struct pd_import *im, uint32_t index, struct pd_err *e)
{
    return pd_fail(e, PD_ECORRUPT, "run %s: chunk %u: the unused tail of the last block is not zero", im->offer.run, index);
}

static uint64_t seed_of(const struct pd_import *im, struct place at)
{
    return pd_chunk_seed(im->offer.gen, im->offer.layout.layout_hash, at.layer, at.block0);
}

static void came(struct pd_import *im, uint32_t index, uint64_t bytes)
{
    im->seen[index / 64] |= (uint64_t)1 << (index % 64);
    im->bytes += bytes;
    if (++im->n_seen < im->plan.n_chunks)
        return;
    pd_codec_free(im->codec);           /* its room is a chunk's, and runs wait long */
    im->codec = NULL;
}

/* A chunk's bytes all in one place: checked, then put into the pool. */
static int take_data(struct pd_import *im, uint32_t index, struct place at, const uint8_t *data, size_t n, uint64_t xxh3, struct pd_err *e)
{
    uint64_t sum = pd_xxh3(data, n, seed_of(im, at));
    const uint8_t *last = data + (at.blocks - 1) * im->bytes_a_block;
    if (sum != xxh3)
        return wrong_sum(im, index, at, xxh3, sum, e);
    if (!tail_is_zero(im, (const uint8_t *const[2]){ last, last + at.blocks * im->bytes_a_block }, at))
        return wrong_tail(im, index, e);
    return im->look ? 0 : place(im, at, data, e);
}

int pd_import_chunk(struct pd_import *im, const struct pd_chunk *c, struct pd_err *e)
{
    struct place at;
    const uint8_t *data = c->data.p;
    int rc = check_chunk(im, c, &at, e);
    if (rc)
        return rc;
    int64_t t0 = pd_mono_us();
    if (pd_fault("flip"))
        ((uint8_t *)(uintptr_t)c->data.p)[c->data.n / 2] ^= 1;
    if (*c->codec == 'z') {
        if ((!im->codec && (rc = pd_codec_new(&im->codec, e))) || (rc = pd_codec_decode(im->codec, c->data.p, c->data.n, c->raw_len, &data, e)))
            return pd_err_prefix(e, "run %s: chunk %u", c->run, c->index);
    }
    if ((rc = take_data(im, c->index, at, data, c->raw_len, c->xxh3, e)))
        return rc;
    came(im, c->index, c->raw_len);
    im->us += pd_mono_us() - t0;
    return 0;
}

/* From the peer's memory, which it may change at any time: what is used is copied first, then held against the checksum. */
static int take_elsewhere(struct pd_import *im, uint32_t index, struct place at, uint64_t xxh3, struct pd_err *e)
{
    uint8_t *to = im->scratch;
    size_t n = 2 * (size_t)at.blocks * im->bytes_a_block;
    if (!to && !(to = im->scratch = pd_alloc_aligned((size_t)im->plan.chunk_bytes, "KV to be converted", e)))
        return PD_ENOMEM;
    for (int v = 0; v < 2; v++)
        for (uint32_t i = at.block0; i < at.block0 + at.blocks; i++, to += im->bytes_a_block)
            memcpy(to, pd_slabs_at(im->from, im->from_blocks[i], (int)at.layer, v), im->bytes_a_block);
    if (pd_fault("flip"))
        im->scratch[n / 2] ^= 1;
    return take_data(im, index, at, im->scratch, n, xxh3, e);
}

int pd_import_place(struct pd_import *im, uint32_t index, uint64_t bytes, struct iovec *iov, int *n_iov, struct pd_err *e)
{
    if (!im->landing || index >= im->plan.n_chunks)
        return pd_fail(e, PD_ECORRUPT, "run %s: chunk %u is beyond the %u that were offered", im->offer.run, index, im->plan.n_chunks);
    struct place at = place_of(&im->plan, index);
    if (pd_import_has(im, index))
        return pd_fail(e, PD_ECORRUPT, "run %s: chunk %u came twice", im->offer.run, index);
    if (bytes != 2 * (uint64_t)im->bytes_a_block * at.blocks)
        return pd_fail(e, PD_ECORRUPT, "run %s: chunk %u has %" PRIu64 " bytes, the offer implies %" PRIu64, im->offer.run, index, bytes, 2 * (uint64_t)im->bytes_a_block * at.blocks);
    *n_iov = pieces(im->pool, im->blocks, at, iov);
    return 0;
}

int pd_import_sum(struct pd_import *im, uint32_t index, uint64_t xxh3, struct pd_err *e)
{
    if ((!im->from && !im->landing) || index >= im->plan.n_chunks)
        return pd_fail(e, PD_ECORRUPT, "run %s: chunk %u is not one of %u that lie in memory", im->offer.run, index, im->from || im->landing ? im->plan.n_chunks : 0);
    if (pd_import_has(im, index))
        return pd_fail(e, PD_ECORRUPT, "run %s: chunk %u came twice", im->offer.run, index);
    struct place at = place_of(&im->plan, index);
    size_t bytes = im->bytes_a_block;
    const uint8_t *last[2] = { NULL, NULL };
    int64_t t0 = pd_mono_us();
    if (im->converts) {
        int rc = take_elsewhere(im, index, at, xxh3, e);
        if (rc)
            return rc;
        came(im, index, 2 * (uint64_t)bytes * at.blocks);
        im->us += pd_mono_us() - t0;
        return 0;
    }
    struct pd_xxh3_sum s;
    bool copied = false;        /* then each block is summed while it is in the cache; else they are, in pieces as long as they lie together */
    pd_xxh3_begin(&s, seed_of(im, at));
    for (int v = 0; v < 2; v++)
        for (uint32_t i = at.block0; i < at.block0 + at.blocks; i++) {
            uint8_t *to = pd_pool_base(im->pool, im->blocks[i]) + pd_pool_off(im->pool, (int)at.layer, v);
            const uint8_t *what = im->from ? pd_slabs_at(im->from, im->from_blocks[i], (int)at.layer, v) : to;
            if (to != what)
                memcpy(to, what, bytes);
            if ((to != what || !im->from) && pd_fault("flip"))
                to[bytes / 2] ^= 1;
            copied |= i == at.block0 && !v && to != what;
            if (copied)
                pd_xxh3_add(&s, to, bytes);
            last[v] = to;
        }
    uint64_t sum = copied ? pd_xxh3_end(&s) : pd_xxh3v(im->iov, pieces(im->pool, im->blocks, at, im->iov), seed_of(im, at));
    im->us += pd_mono_us() - t0;
    if (sum != xxh3)
        return wrong_sum(im, index, at, xxh3, sum, e);
    if (!tail_is_zero(im, last, at))
        return wrong_tail(im, index, e);
    came(im, index, 2 * (uint64_t)bytes * at.blocks);
    return 0;
}

static bool bin_eq(struct pd_bin a, struct pd_bin b) { return !a.p == !b.p && (!a.p || (a.n == b.n && !memcmp(a.p, b.p, a.n))); }
static bool str_eq(struct pd_str a, struct pd_str b) { return !a.p == !b.p && (!a.p || (a.n == b.n && !memcmp(a.p, b.p, a.n))); }

static bool same_payload(const struct pd_payload *x, const struct pd_payload *y)
{
    for (uint32_t i = 0; i < x->n_runs && x->n_runs == y->n_runs; i++) {
        const struct pd_payload_run *a = &x->runs[i], *b = &y->runs[i];
        if (a->base != b->base || a->stride != b->stride || a->count != b->count || a->len != b->len)
            return false;
    }
    return !strcmp(x->scheme, y->scheme) && !strcmp(x->codec, y->codec) && x->bytes == y->bytes && x->chunk_bytes == y->chunk_bytes && x->n_chunks == y->n_chunks &&
           x->chunk_blocks == y->chunk_blocks && str_eq(x->where, y->where) && x->n_runs == y->n_runs;
}

/* The name of the first part of kv that does not repeat the offer, or NULL. */
static const char *changed(const struct pd_kvdesc *a, const struct pd_kvdesc *b)
{
    return strcmp(a->run, b->run) ? "run" : memcmp(a->op, b->op, sizeof a->op) ? "op" : memcmp(a->gen, b->gen, sizeof a->gen) ? "gen" :
           a->epoch != b->epoch ? "epoch" : memcmp(a->fp_sha, b->fp_sha, sizeof a->fp_sha) || !bin_eq(a->fp_fields, b->fp_fields) ? "fingerprint" :
           a->n_tokens != b->n_tokens ? "n_tokens" : memcmp(a->token_ids, b->token_ids, (size_t)a->n_tokens * sizeof *a->token_ids) ? "token_ids" :
           a->layout.layout_hash != b->layout.layout_hash || a->layout.layout_hash != pd_layout_hash(&b->layout) ? "layout" : !same_payload(&a->payload, &b->payload) ? "payload" :
           !str_eq(a->domain, b->domain) ? "domain" : !str_eq(a->worker, b->worker) ? "worker" : NULL;
}

int pd_import_repeats(const struct pd_import *im, const struct pd_kvdesc *kv, struct pd_err *e)
{
    struct pd_buf request = { 0 };
    int rc = 0;
    if (kv->offer || !kv->token_ids)
        return pd_fail(e, PD_ECORRUPT, "run %s: not a closing kv record", im->offer.run);
    const char *what = changed(&im->offer, kv);
    if (!what) {
        rc = pd_request_encode(&kv->request, &request, e);
        if (!rc && (request.n != im->request.n || memcmp(request.p, im->request.p, request.n)))
            what = "request";
    }
    if (what)
        rc = pd_fail(e, PD_ECORRUPT, "run %s: %s of the kv record is not that of its offer", im->offer.run, what);
    pd_buf_free(&request);
    return rc;
}

int pd_import_finish(struct pd_import *im, const struct pd_kvdesc *kv, struct pd_err *e)
{
    int rc = pd_import_repeats(im, kv, e);
    if (!rc && im->n_seen != im->plan.n_chunks) {
        uint32_t i = 0;
        while (im->seen[i / 64] >> (i % 64) & 1)
            i++;
        rc = pd_fail(e, PD_ECORRUPT, "run %s: %u of %u chunks are missing (the first is %u)", im->offer.run, im->plan.n_chunks - im->n_seen, im->plan.n_chunks, i);
    }
    im->finished = !rc;
    return rc;
}

int pd_import_resume(struct pd_import *im, const struct pd_kvdesc *offer, const struct pd_import_opts *o, struct pd_err *e)
{
    struct pd_plan plan;
    struct pd_kvdesc same = *offer;
    int rc = check_offer(im->pool, offer, o->from ? "shm" : o->landing ? o->landing : "inline", im->converts, &plan, e);
    if (rc)
        return rc;
    if (im->in_place)
        return pd_fail(e, PD_EFAIL, "run %s: what was read in place cannot go on from elsewhere", offer->run);
    same.payload = im->offer.payload;
    const char *what = plan.chunk_blocks != im->plan.chunk_blocks ? "payload" : changed(&im->offer, &same);
    if (what)
        return pd_fail(e, PD_ECORRUPT, "run %s: %s of this offer is not that of the one before: it cannot go on", offer->run, what);
    if ((rc = keep_payload(im, &offer->payload, e)))
        return rc;
    im->finished = false;
    im->landing = o->landing != NULL;
    return keep_from(im, o->from, o->from_blocks, e);
}

void pd_import_lands(struct pd_import *im, bool lands) { im->landing = lands; }
uint32_t pd_import_missing(const struct pd_import *im) { return im->plan.n_chunks - im->n_seen; }
uint32_t pd_import_held(const struct pd_import *im) { return im->n_held; }
bool pd_import_in_place(const struct pd_import *im) { return im->in_place; }
const uint32_t *pd_import_blocks(const struct pd_import *im) { return im->look ? NULL : im->blocks; }
const struct pd_plan *pd_import_plan(const struct pd_import *im) { return &im->plan; }
bool pd_import_has(const struct pd_import *im, uint32_t index) { return index < im->plan.n_chunks && im->seen[index / 64] >> (index % 64) & 1; }

uint32_t *pd_import_take(struct pd_import *im, uint32_t *n_blocks) { return im->finished ? pd_import_take_part(im, n_blocks) : NULL; }

uint32_t *pd_import_take_part(struct pd_import *im, uint32_t *n_blocks)
{
    uint32_t *b = im->blocks;
    struct iovec *iov = im->iov;
    if (im->in_place && im->n_seen != im->plan.n_chunks)
        return NULL;                                            /* the peer's memory is not ours to clear */
    for (uint32_t c = 0; c < im->plan.n_chunks; c++) {          /* what did not come must not show what the blocks held before */
        int n = im->converts || pd_import_has(im, c) ? 0 : pieces(im->pool, b, place_of(&im->plan, c), iov);
        for (int i = 0; i < n; i++)
            memset(iov[i].iov_base, 0, iov[i].iov_len);
    }
    *n_blocks = im->n_taken;
    im->blocks = NULL;
    im->n_taken = 0;
    im->finished = false;
    return b;
}

uint64_t pd_import_bytes(const struct pd_import *im) { return im->bytes; }
int64_t pd_import_us(const struct pd_import *im) { return im->us; }
unsigned pd_import_converts(const struct pd_import *im) { return im->converts; }

void pd_import_free(struct pd_import *im)
{
    if (!im)
        return;
    for (uint32_t i = 0; i < im->n_taken; i++)
        pd_pool_put(im->pool, im->blocks[i]);
    pd_free(im->blocks);
    pd_free(im->from_blocks);
    pd_free(im->iov);
    pd_free(im->seen);
    pd_free(im->src);
    pd_free(im->dst);
    pd_free(im->scratch);
    pd_codec_free(im->codec);
    pd_buf_free(&im->request);
    pd_arena_free(&im->arena);
    pd_free(im);
}
