#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>
#include "../base/log.h"
#include "../base/outfile.h"
#include "../wire/pack.h"
#include "fingerprint.h"
#include "inspect.h"
#include "prefix.h"

/* The note of what was cut out of what: a key and its value. */
static int slice_pair(const struct pd_kv_run *r, const struct pd_kv_cut *c, struct pd_buf *out, struct pd_err *e)
{
    const uint32_t v[5] = { c->t0, c->t1, c->l0, c->l1, r->d.n_tokens };
    struct pd_packer k;
    pd_pack_init(&k, out, e);
    pd_pack_text(&k, "slice");
    msgpack_pack_array(&k.pk, 5);
    for (int i = 0; i < 5; i++)
        msgpack_pack_uint32(&k.pk, v[i]);
    return k.rc;
}

/* The fingerprint of a part that is no prefix of all layers: one must-field more, `slice`, so that every consumer refuses it by name. */
static int fp_of_slice(struct pd_bin map, const struct pd_buf *pair, struct pd_buf *out, struct pd_err *e)
{
    struct pd_bin v;
    uint64_t seed;
    int rc = pd_fp_must_seed(map, &seed, e);    /* the canonical form, or an error */
    if (rc)
        return rc;
    pd_map_find(map.p, map.n, "numerics", &v);
    size_t head = map.p[0] == 0xde ? 3 : 1, at = (size_t)(v.p - map.p) - 9, n = map.p[0] == 0xde ? (size_t)map.p[1] << 8 | map.p[2] : map.p[0] & 15;
    uint8_t h[3] = { 0xde, (uint8_t)((n + 1) >> 8), (uint8_t)(n + 1) };
    if ((rc = pd_buf_add(out, h, 3, e)) || (rc = pd_buf_add(out, map.p + head, at - head, e)) || (rc = pd_buf_add(out, pair->p, pair->n, e)) ||
        (rc = pd_buf_add(out, map.p + at, map.n - at, e)))
        return rc;
    return 0;
}

static int copy_tokens(const struct pd_kv_run *r, const struct pd_kv_cut *c, struct pd_pool *to, const uint32_t *blocks)
{
    const struct pd_kv_layout *y = &r->d.layout;
    size_t row = y->head_dim * pd_layout_elem_size(y);
    for (uint32_t l = c->l0; l < c->l1; l++)
        for (int v = 0; v < 2; v++)
            for (uint32_t t = c->t0; t < c->t1; t++) {
                const uint8_t *src = pd_pool_base(r->pool, r->blocks[t / y->block_size]) + pd_pool_off(r->pool, (int)l, v);
                uint8_t *dst = pd_pool_base(to, blocks[(t - c->t0) / y->block_size]) + pd_pool_off(to, (int)(l - c->l0), v);
                for (uint32_t h = 0; h < y->kv_heads; h++)
                    memcpy(dst + ((size_t)h * y->block_size + (t - c->t0) % y->block_size) * row,
                           src + ((size_t)h * y->block_size + t % y->block_size) * row, row);
            }
    return 0;
}

int pd_kv_write_cut(struct pd_dump_w *w, const struct pd_kv_run *r, const struct pd_kv_cut *c, struct pd_err *e)
{
    const struct pd_kv_layout *y = &r->d.layout;
    bool prefix = !c->t0 && !c->l0 && c->l1 == y->layers, whole = prefix && c->t1 == r->d.n_tokens;
    struct pd_kvdesc d = r->d;
    struct pd_pool *pool = NULL;
    struct pd_buf fp = { 0 }, extra = { 0 }, pair = { 0 };
    uint8_t (*hashes)[16] = NULL;
    uint32_t *blocks = NULL, n_hashes = 0;
    struct pd_plan plan;
    uint64_t seed;
    int rc;
    d.n_tokens = c->t1 - c->t0;
    d.token_ids += c->t0;
    d.layout.layers = c->l1 - c->l0;
    d.layout.layout_hash = pd_layout_hash(&d.layout);
    if ((rc = pd_gen_new(d.gen, e)) || (rc = pd_plan_make(&d.layout, d.n_tokens, 0, &plan, e)) || (rc = slice_pair(r, c, &pair, e)))
        goto out;
    if (!whole) {
        /* The first token and the prompt's text belong to the whole prompt. */
        d.first = NULL;
        d.n_first = 0;
        d.request.prompt = (struct pd_str){ NULL, 0 };
        d.request.messages = NULL;
        d.request.n_messages = 0;
        const uint8_t head[5] = { 0xdf, (uint8_t)(d.extra.pairs >> 24), (uint8_t)(d.extra.pairs >> 16), (uint8_t)(d.extra.pairs >> 8), (uint8_t)d.extra.pairs };
        struct pd_bin old;
        if ((rc = pd_buf_add(&extra, head, 5, e)) || (rc = pd_buf_add(&extra, d.extra.p, d.extra.n, e)))
            goto out;
        if (pd_map_find(extra.p, extra.n, "slice", &old) != 1) {        /* a slice of a slice keeps the first one's note */
            if ((rc = pd_buf_add(&extra, pair.p, pair.n, e)))
                goto out;
            d.extra = (struct pd_extra){ extra.p + 5, extra.n - 5, d.extra.pairs + 1 };
        }
    }
    if (!prefix) {
        if ((rc = fp_of_slice(r->d.fp_fields, &pair, &fp, e)) || (rc = pd_sha256(fp.p, fp.n, d.fp_sha, e)))
            goto out;
        d.fp_fields = (struct pd_bin){ fp.p, fp.n };
    }
    struct pd_pool_geom g = *pd_pool_geom(r->pool);
    g.layers = (int)d.layout.layers;
    rc = PD_ENOMEM;
    n_hashes = prefix ? d.n_tokens / y->block_size : 0;
    if (!(blocks = pd_calloc(plan.n_blocks, sizeof *blocks, "block table", e)) || !(hashes = pd_calloc(n_hashes, 16, "block hashes", e)) ||
        (rc = pd_pool_new(&g, (int64_t)plan.bytes, &pool, e)) || (rc = pd_pool_take(pool, plan.n_blocks, blocks, e)) || (rc = copy_tokens(r, c, pool, blocks)))
        goto out;
    if (prefix) {
        if ((rc = pd_fp_must_seed(d.fp_fields, &seed, e)))
            goto out;
        pd_block_hashes(seed, d.token_ids, d.n_tokens, y->block_size, d.request.adapter, d.request.cache_salt, hashes);
    }
    rc = pd_dump_add(w, &d, pool, blocks, prefix ? (const uint8_t (*)[16])hashes : NULL, n_hashes, NULL, 0, e);
out:
    pd_pool_free(pool);
    pd_free(blocks);
    pd_free(hashes);
    pd_buf_free(&fp);
    pd_buf_free(&extra);
    pd_buf_free(&pair);
    return rc;
}

struct cutting { const char *path; const struct pd_kv_opts *o; struct pd_dump_w *w; uint32_t saved, faults; char first[300]; };

static int slice_run(void *ctx, struct pd_kv_run *r, struct pd_err *e)
{
    struct cutting *k = ctx;
    const struct pd_kv_opts *o = k->o;
    int64_t n = r->d.n_tokens, nl = r->d.layout.layers, t0 = o->t0 < 0 ? 0 : o->t0, t1 = o->t1 < 0 ? n : o->t1, l0 = o->l0 < 0 ? 0 : o->l0, l1 = o->l1 < 0 ? nl : o->l1;
    if (t0 >= t1 || t1 > n)
        return pd_fail(e, PD_EUSAGE, "run %s has tokens 0:%" PRId64 "; --tokens %" PRId64 ":%" PRId64 " is no part of it", r->d.run, n, t0, t1);
    if (l0 >= l1 || l1 > nl)
        return pd_fail(e, PD_EUSAGE, "run %s has layers 0:%" PRId64 "; --layers %" PRId64 ":%" PRId64 " is no part of it", r->d.run, nl, l0, l1);
    struct pd_kv_cut c = { (uint32_t)t0, (uint32_t)t1, (uint32_t)l0, (uint32_t)l1 };
    k->saved++;
    return pd_kv_write_cut(k->w, r, &c, e);
}

int pd_kv_slice(const char *path, const char *to, const struct pd_kv_opts *o, struct pd_err *e)
{
    struct cutting k = { .path = path, .o = o };
    int rc = pd_dump_create(to, &k.w, e);
    if (rc)
        return rc;
    rc = pd_kv_each_run(path, -1, &(struct pd_kv_walk){ .mode = PD_DUMP_DATA, .run = o->run, .run_fn = slice_run, .ctx = &k }, e);
    if (rc) {
        pd_dump_abort(k.w);
        return rc;
    }
    return pd_dump_commit(k.w, e);
}

/* One line a run says what is lost; -v names each piece. */
static void on_fault(void *ctx, const char *message)
{
    struct cutting *k = ctx;
    if (!k->faults++)
        snprintf(k->first, sizeof k->first, "%s", message);
    pd_info("%s: lost: %s", k->path, message);
}

/* The longest prefix of blocks of which every layer verified: what a decoder can go on from. */
static int salvage_run(void *ctx, struct pd_kv_run *r, struct pd_err *e)
{
    struct cutting *k = ctx;
    uint32_t layers = r->d.layout.layers, b = 0, n = r->d.n_tokens;
    for (; b < r->n_blocks; b++) {
        uint32_t l = 0;
        while (l < layers && r->seen[(size_t)b * layers + l])
            l++;
        if (l < layers)
            break;
    }
    uint32_t keep = b == r->n_blocks ? n : b * r->d.layout.block_size;
    if (keep < n)
        pd_warn("%s: run %s: lost: tokens %u to %u of %u (%s)", k->path, r->d.run, keep, n - 1, n, k->faults ? k->first : "reading broke off");
    if (!k->o->quiet)
        fprintf(k->o->out, "%s: run %s: %u of %u tokens saved\n", k->path, r->d.run, keep, n);
    k->faults = 0;
    if (!keep)
        return 0;
    k->saved++;
    return pd_kv_write_cut(k->w, r, &(struct pd_kv_cut){ 0, keep, 0, layers }, e);
}

/* libhdf5 opens only a file of its full length: a copy, which is never committed, is given that length, the missing part zero, which no checksum takes for data. */
static int padded_copy(int fd, const char *path, const char *to, const struct pd_h5_super *s, struct pd_outfile *copy, struct pd_err *e)
{
    uint8_t buf[65536];
    ssize_t n;
    off_t at = 0;
    int rc = pd_outfile_open(to, copy, e);
    if (rc)
        return rc;
    while ((n = pread(fd, buf, sizeof buf, at)) > 0) {
        if (write(copy->fd, buf, (size_t)n) != n)
            return pd_fail_sys(e, "%s: a copy to work on", path);
        at += n;
    }
    if (n < 0 || ftruncate(copy->fd, (off_t)s->eof))
        return pd_fail_sys(e, "%s: a copy to work on", path);
    return 0;
}

int pd_kv_salvage(const char *path, const char *to, const struct pd_kv_opts *o, struct pd_err *e)
{
    struct cutting k = { .path = path, .o = o };
    struct pd_h5_super s;
    struct pd_err read = { 0 };
    struct pd_outfile copy = { .fd = -1 };
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), rc;
    if (fd < 0)
        return pd_fail_sys(e, "%s", path);
    if ((rc = pd_h5_super_read(fd, path, &s, e)))
        goto out;
    if (s.size < s.eof) {
        if ((rc = padded_copy(fd, path, to, &s, &copy, e)))
            goto out;
        pd_warn("%s: cut: %" PRIu64 " of %" PRIu64 " bytes are there", path, s.size, s.eof);
    }
    if ((rc = pd_dump_create(to, &k.w, e)))
        goto out;
    rc = pd_kv_each_run(path, copy.path ? copy.fd : fd, &(struct pd_kv_walk){ PD_DUMP_EACH, o->run, salvage_run, on_fault, &k }, &read);
    if (rc && rc != PD_ECORRUPT) {
        if (e)
            *e = read;
    } else if (!k.saved) {
        rc = pd_fail(e, PD_ECORRUPT, "%s: nothing can be saved%s%.300s", path, rc || k.faults ? ": " : "", rc ? read.msg : k.faults ? k.first : "");
    } else {
        if (rc)
            pd_warn("%s", read.msg);
        rc = pd_dump_commit(k.w, e);
        k.w = NULL;
    }
    pd_dump_abort(k.w);
out:
    pd_outfile_abort(&copy);
    close(fd);
    return rc;
}
