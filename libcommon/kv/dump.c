#include <errno.h>
#include <stdio.h>
#include <time.h>
#include "../base/outfile.h"
#include "../wire/json.h"
#include "dump.h"
#include "dump_format.h"
#include "h5fd.h"
#include "h5zstd.h"

/* Chunks are written block by block, all layers of each, so that what precedes a cut is a prefix of the tokens. */
struct pd_dump_w {
    struct pd_outfile out;
    int sys;                    /* errno of the first write that failed; the file is worth nothing then */
    hid_t file, runs;
    uint32_t n_runs;
};

static int h5_fail(const struct pd_dump_w *w, struct pd_err *e)
{
    if (!w->sys)
        return pd_h5_fail(e, PD_EFAIL, w->out.path);
    errno = w->sys;
    return pd_fail_sys(e, "%s", w->out.path);
}

static hid_t string_type(size_t n)
{
    hid_t t = H5Tcopy(H5T_C_S1);
    if (t >= 0 && (H5Tset_size(t, n ? n : 1) < 0 || H5Tset_cset(t, H5T_CSET_UTF8) < 0 || H5Tset_strpad(t, H5T_STR_NULLPAD) < 0)) {
        H5Tclose(t);
        return -1;
    }
    return t;
}

static bool put_attr(hid_t at, const char *name, hid_t type, const void *v)
{
    hid_t space = H5Screate(H5S_SCALAR), a = space < 0 ? -1 : H5Acreate2(at, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    bool ok = a >= 0 && H5Awrite(a, type, v) >= 0;
    if (a >= 0)
        ok &= H5Aclose(a) >= 0;
    if (space >= 0)
        H5Sclose(space);
    return ok;
}

static bool put_text(hid_t at, const char *name, const void *p, size_t n)
{
    hid_t t = string_type(n);
    bool ok = t >= 0 && put_attr(at, name, t, n ? p : "");
    if (t >= 0)
        H5Tclose(t);
    return ok;
}

static bool put_hex(hid_t at, const char *name, const uint8_t *p, size_t n)
{
    char hex[2 * PD_SHA_LEN + 1];
    pd_hex(p, n, hex);
    return put_text(at, name, hex, 2 * n);
}

int pd_dump_create(const char *path, struct pd_dump_w **out, struct pd_err *e)
{
    int rc;
    struct pd_dump_w *w = pd_calloc(1, sizeof *w, "dump writer", e);
    if (!w)
        return PD_ENOMEM;
    w->file = w->runs = -1;
    if ((rc = pd_outfile_open(path, &w->out, e)))
        goto bad;

    pd_h5_begin();
    hid_t fapl = H5Pcreate(H5P_FILE_ACCESS), gcpl = H5Pcreate(H5P_GROUP_CREATE);
    char when[32];
    time_t now = time(NULL);
    struct tm tm;
    unsigned version = PD_DUMP_VERSION;
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &tm));
    bool ok = H5Zregister(&pd_h5z_class) >= 0 && pd_h5fd_set(fapl, w->out.fd, true, &w->sys) && H5Pset_libver_bounds(fapl, H5F_LIBVER_V110, H5F_LIBVER_V110) >= 0 &&
              H5Pset_meta_block_size(fapl, 1 << 20) >= 0 && H5Pset_fclose_degree(fapl, H5F_CLOSE_STRONG) >= 0 &&
              H5Pset_link_creation_order(gcpl, H5P_CRT_ORDER_TRACKED | H5P_CRT_ORDER_INDEXED) >= 0 &&
              (w->file = H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, fapl)) >= 0 && put_text(w->file, "format", PD_DUMP_FORMAT, strlen(PD_DUMP_FORMAT)) &&
              put_attr(w->file, "version", H5T_NATIVE_UINT, &version) && put_text(w->file, "created", when, strlen(when)) &&
              (w->runs = H5Gcreate2(w->file, "runs", H5P_DEFAULT, gcpl, H5P_DEFAULT)) >= 0;
    H5Pclose(fapl);
    H5Pclose(gcpl);
    if (!ok) {
        rc = h5_fail(w, e);
        goto bad;
    }
    *out = w;
    return 0;
bad:
    pd_dump_abort(w);
    return rc;
}

/* A small dataset, written at once; within its object header where it fits. */
static bool put_small(hid_t at, const char *name, hid_t type, int rank, const hsize_t *dims, const void *v)
{
    hid_t space = H5Screate_simple(rank, dims, NULL), cpl = H5Pcreate(H5P_DATASET_CREATE), d = -1;
    size_t bytes = H5Tget_size(type);
    for (int i = 0; i < rank; i++)
        bytes *= dims[i];
    H5Pset_obj_track_times(cpl, 0);
    bool ok = space >= 0 && cpl >= 0 && H5Pset_layout(cpl, bytes && bytes <= PD_DUMP_COMPACT ? H5D_COMPACT : H5D_CONTIGUOUS) >= 0 &&
              (d = H5Dcreate2(at, name, type, space, H5P_DEFAULT, cpl, H5P_DEFAULT)) >= 0 &&
              (!bytes || H5Dwrite(d, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, v) >= 0);
    if (d >= 0)
        ok &= H5Dclose(d) >= 0;
    H5Sclose(space);
    H5Pclose(cpl);
    return ok;
}

/* The datasets of a run while its chunks are written. */
struct sheet { hid_t group, set[2]; uint64_t *sum[2]; };

static hid_t make_kv_set(hid_t at, const char *name, const struct pd_kvdesc *d, uint32_t n_blocks, hid_t type)
{
    const struct pd_kv_layout *l = &d->layout;
    hsize_t dims[3] = { d->n_tokens, l->kv_heads, l->head_dim }, max[3] = { (hsize_t)n_blocks * l->block_size, l->kv_heads, l->head_dim },
            chunk[3] = { l->block_size, l->kv_heads, l->head_dim };
    hid_t space = H5Screate_simple(3, dims, max), cpl = H5Pcreate(H5P_DATASET_CREATE), set = -1;
    unsigned level = PD_H5Z_LEVEL;
    if (space >= 0 && cpl >= 0 && H5Pset_chunk(cpl, 3, chunk) >= 0 && H5Pset_shuffle(cpl) >= 0 &&
        H5Pset_filter(cpl, PD_H5Z_ZSTD, H5Z_FLAG_MANDATORY, 1, &level) >= 0 && H5Pset_obj_track_times(cpl, 0) >= 0)
        set = H5Dcreate2(at, name, type, space, H5P_DEFAULT, cpl, H5P_DEFAULT);
    H5Sclose(space);
    H5Pclose(cpl);
    return set;
}

static bool put_attrs(hid_t run, const struct pd_kvdesc *d, const struct pd_buf *fp, const struct pd_buf *desc)
{
    uint8_t lh[8];
    int64_t n = d->n_tokens;
    unsigned bs = d->layout.block_size;
    pd_put_be64(lh, d->layout.layout_hash);
    return put_attr(run, "n_tokens", H5T_STD_I64LE, &n) && put_attr(run, "block_size", H5T_NATIVE_UINT, &bs) && put_hex(run, "gen", d->gen, PD_GEN_LEN) &&
           put_hex(run, "layout_hash", lh, 8) && put_hex(run, "fingerprint_sha256", d->fp_sha, PD_SHA_LEN) && put_text(run, "fingerprint", fp->p, fp->n) &&
           put_text(run, "descriptor", desc->p, desc->n);
}

/* The descriptor as it is stored: complete, its payload this file. */
static int stored_json(const struct pd_kvdesc *d, const struct pd_plan *plan, struct pd_buf *json, struct pd_err *e)
{
    struct pd_kvdesc s = *d;
    struct pd_buf rec = { 0 };
    char where[16 + PD_RUN_LEN];
    snprintf(where, sizeof where, "/runs/%s", d->run);
    s.offer = false;
    s.lease = (struct pd_bin){ NULL, 0 };
    s.payload = (struct pd_payload){ .scheme = "h5", .where = { where, strlen(where) }, .bytes = plan->bytes, .chunk_bytes = plan->chunk_bytes,
                                     .n_chunks = plan->n_chunks, .chunk_blocks = plan->chunk_blocks, .codec = "none" };
    int rc = pd_kvdesc_encode(&s, &rec, e);
    if (!rc)
        rc = pd_msgpack_to_json(rec.p, rec.n, json, e);
    pd_buf_free(&rec);
    return rc;
}

struct work { uint8_t *rows, *tmp, *packed; size_t bytes, el; };

static int write_block(const struct pd_dump_w *w, const struct pd_kvdesc *d, const struct pd_pool *p, uint32_t block, uint32_t i, uint32_t layer, struct sheet *s,
                       const struct work *k, struct pd_err *e)
{
    for (int v = 0; v < 2; v++) {
        hsize_t at[3] = { (hsize_t)i * d->layout.block_size, 0, 0 };
        size_t len = 0;
        pd_dump_rows_of_block(&d->layout, k->el, pd_pool_base(p, block) + pd_pool_off(p, (int)layer, v), k->rows);
        s->sum[v][i] = pd_xxh3(k->rows, k->bytes, pd_dump_seed(d, layer, v, i));
        int rc = pd_h5z_encode(k->rows, k->bytes, k->el, k->tmp, k->packed, &len, e);
        if (rc)
            return rc;
        if (H5Dwrite_chunk(s->set[v], H5P_DEFAULT, 0, at, len, k->packed) < 0)
            return h5_fail(w, e);
    }
    return 0;
}

static int open_sheets(const struct pd_dump_w *w, hid_t run, const struct pd_kvdesc *d, uint32_t n_blocks, struct sheet *sheet, struct pd_err *e)
{
    hid_t layers = H5Gcreate2(run, "layers", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), type = pd_dump_type(d->layout.dtype);
    int rc = layers < 0 || type < 0 ? h5_fail(w, e) : 0;
    for (uint32_t i = 0; !rc && i < d->layout.layers; i++) {
        char name[16];
        snprintf(name, sizeof name, "%03u", i);
        struct sheet *s = &sheet[i];
        if ((s->group = H5Gcreate2(layers, name, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT)) < 0 || (s->set[0] = make_kv_set(s->group, "k", d, n_blocks, type)) < 0 ||
            (s->set[1] = make_kv_set(s->group, "v", d, n_blocks, type)) < 0)
            rc = h5_fail(w, e);
        else if (!(s->sum[0] = pd_calloc(n_blocks, 8, "chunk checksums", e)) || !(s->sum[1] = pd_calloc(n_blocks, 8, "chunk checksums", e)))
            rc = PD_ENOMEM;
    }
    if (type >= 0)
        H5Tclose(type);
    if (layers >= 0)
        H5Gclose(layers);
    return rc;
}

static int close_sheets(const struct pd_dump_w *w, uint32_t layers, uint32_t n_blocks, struct sheet *sheet, bool write, struct pd_err *e)
{
    hsize_t n = n_blocks;
    bool ok = true;
    for (uint32_t i = 0; i < layers; i++) {
        struct sheet *s = &sheet[i];
        for (int v = 0; v < 2; v++) {
            if (s->set[v] >= 0)
                ok &= H5Dclose(s->set[v]) >= 0;
            if (write)
                ok &= put_small(s->group, v ? "v_xxh3" : "k_xxh3", H5T_STD_U64LE, 1, &n, s->sum[v]);
            pd_free(s->sum[v]);
        }
        if (s->group >= 0)
            ok &= H5Gclose(s->group) >= 0;
    }
    return !write || ok ? 0 : h5_fail(w, e);
}

static int write_run(const struct pd_dump_w *w, hid_t run, const struct pd_kvdesc *d, const struct pd_plan *plan, const struct pd_pool *p, const uint32_t *blocks,
                     struct pd_err *e)
{
    struct work k = { .el = pd_layout_elem_size(&d->layout), .bytes = pd_pool_layer_bytes(p) };
    int rc = PD_ENOMEM;
    struct sheet *sheet = pd_calloc(plan->layers, sizeof *sheet, "dump datasets", e);
    if (!sheet)
        return PD_ENOMEM;
    for (uint32_t i = 0; i < plan->layers; i++)
        sheet[i].group = sheet[i].set[0] = sheet[i].set[1] = -1;
    k.rows = pd_alloc_aligned(k.bytes, "dump chunk", e);
    k.tmp = pd_alloc_aligned(k.bytes, "dump chunk", e);
    k.packed = pd_alloc_aligned(pd_h5z_bound(k.bytes), "dump chunk", e);
    if (k.rows && k.tmp && k.packed)
        rc = open_sheets(w, run, d, plan->n_blocks, sheet, e);
    for (uint32_t b = 0; !rc && b < plan->n_blocks; b++)
        for (uint32_t i = 0; !rc && i < plan->layers; i++)
            rc = write_block(w, d, p, blocks[b], b, i, &sheet[i], &k, e);
    int closed = close_sheets(w, plan->layers, plan->n_blocks, sheet, !rc, rc ? NULL : e);
    pd_free(k.rows);
    pd_free(k.tmp);
    pd_free(k.packed);
    pd_free(sheet);
    return rc ? rc : closed;
}

int pd_dump_add(struct pd_dump_w *w, const struct pd_kvdesc *d, const struct pd_pool *p, const uint32_t *blocks, const uint8_t (*hashes)[16], uint32_t n_hashes,
                const float *logits, uint32_t n_logits, struct pd_err *e)
{
    struct pd_plan plan;
    struct pd_kv_layout mine;
    struct pd_buf json = { 0 }, fp = { 0 };
    hid_t run = -1;
    int rc = pd_layout_check(&d->layout, e);
    pd_h5_begin();
    pd_layout_from_pool(p, &mine);
    memcpy(mine.order, d->layout.order, sizeof mine.order);     /* rows are the same in either: tokens, then heads */
    mine.layout_hash = pd_layout_hash(&mine);
    if (!rc && mine.layout_hash != d->layout.layout_hash)
        rc = pd_fail(e, PD_EFAIL, "run %s: its layout is not that of the pool", d->run);
    if (rc || (rc = pd_plan_make(&d->layout, d->n_tokens, 0, &plan, e)) || (rc = stored_json(d, &plan, &json, e)) ||
        (rc = pd_msgpack_to_json(d->fp_fields.p, d->fp_fields.n, &fp, e)))
        goto out;
    hsize_t n = d->n_tokens, nh[2] = { n_hashes, 16 }, nl = n_logits;
    if ((run = H5Gcreate2(w->runs, d->run, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT)) < 0) {
        rc = H5Lexists(w->runs, d->run, H5P_DEFAULT) > 0 ? pd_fail(e, PD_EFAIL, "%s: run %s is in the file already", w->out.path, d->run) : h5_fail(w, e);
        goto out;
    }
    if (!put_attrs(run, d, &fp, &json) || !put_small(run, "tokens", H5T_STD_I32LE, 1, &n, d->token_ids) ||
        (hashes && !put_small(run, "block_hashes", H5T_STD_U8LE, 2, nh, hashes))) {
        rc = h5_fail(w, e);
        goto out;
    }
    rc = write_run(w, run, d, &plan, p, blocks, e);
    if (!rc && logits && !put_small(run, "logits_last", H5T_IEEE_F32LE, 1, &nl, logits))
        rc = h5_fail(w, e);
out:
    if (run >= 0)
        H5Gclose(run);
    if (!rc && w->sys)
        rc = h5_fail(w, e);
    w->n_runs += rc == 0;
    pd_buf_free(&json);
    pd_buf_free(&fp);
    return rc;
}

uint32_t pd_dump_runs(const struct pd_dump_w *w) { return w->n_runs; }

int pd_dump_commit(struct pd_dump_w *w, struct pd_err *e)
{
    int rc = 0;
    pd_h5_begin();
    if (H5Gclose(w->runs) < 0 || H5Fclose(w->file) < 0 || w->sys)
        rc = h5_fail(w, e);
    w->runs = w->file = -1;
    if (!rc)
        rc = pd_outfile_commit(&w->out, e);
    pd_dump_abort(w);
    return rc;
}

void pd_dump_abort(struct pd_dump_w *w)
{
    if (!w)
        return;
    if (w->runs >= 0)
        H5Gclose(w->runs);
    if (w->file >= 0)
        H5Fclose(w->file);
    pd_outfile_abort(&w->out);
    pd_free(w);
}
