/* The reading child of dump files. A program that reads a dump runs itself again (/proc/self/exe) under the name PD_DUMP_READER; the constructor below sees
 * that name and never lets the program's own main begin. A fresh image has one thread, none of the parent's memory and an address space small enough to
 * limit, none of which a plain fork gives. It opens the file on descriptor 3, writes a record stream to 1 and, when it fails, a code byte and a message to 4. */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>
#include "../wire/frame.h"
#include "../wire/json.h"
#include "../wire/stream.h"
#include "dump.h"
#include "dump_format.h"
#include "fingerprint.h"
#include "h5fd.h"
#include "h5zstd.h"
#include "prefix.h"

#define STALL_S 10              /* seconds between two records; time spent waiting for the consumer does not count */
#define AS_LIMIT ((rlim_t)1 << 30)
#define MAX_RUNS 100000

struct child {
    enum pd_dump_mode mode;
    const char *path;
    struct pd_wstream *out;
    struct pd_err e;
};

/* Everything of one run that reading needs. */
struct run {
    char name[PD_RUN_LEN + 1];
    hid_t group, layers;
    struct pd_arena arena;
    struct pd_buf rec;          /* the stored descriptor as msgpack: d points into arena */
    struct pd_kvdesc d;
    struct pd_plan plan;
    hid_t *set;                 /* [layers][2] */
    uint64_t *sum;              /* [layers][2][n_blocks] */
    bool faulty;                /* a chunk of it did not verify, and was told */
    size_t bytes, el;           /* of a chunk, of an element */
    uint8_t *packed, *tmp, *rows, *data;
};

static int bad(struct child *c, const struct run *r, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static int bad(struct child *c, const struct run *r, const char *fmt, ...)
{
    char text[300];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return r ? pd_fail(&c->e, PD_ECORRUPT, "run %s: %s", r->name, text) : pd_fail(&c->e, PD_ECORRUPT, "%s", text);
}

/* What a parser said of the file's bytes is corruption, whatever code it has for bytes from elsewhere; but want of memory is not the file's fault. */
static int blame(struct child *c, const struct run *r, const char *what)
{
    if (c->e.code != PD_ENOMEM)
        c->e.code = PD_ECORRUPT;
    return pd_err_prefix(&c->e, "run %s: %s", r->name, what);
}

/* A hard link to an object of the wanted type: a soft or external one could lead anywhere. */
static bool is_hard(hid_t at, const char *name, H5O_type_t type)
{
    H5L_info_t li;
    H5O_info_t oi;
    return H5Lexists(at, name, H5P_DEFAULT) > 0 && H5Lget_info(at, name, &li, H5P_DEFAULT) >= 0 && li.type == H5L_TYPE_HARD &&
           H5Oget_info_by_name2(at, name, &oi, H5O_INFO_BASIC, H5P_DEFAULT) >= 0 && oi.type == type;
}

static hid_t open_group(hid_t at, const char *name)
{
    return is_hard(at, name, H5O_TYPE_GROUP) ? H5Gopen2(at, name, H5P_DEFAULT) : -1;
}

/* A dataset of exactly this type and shape, whose bytes lie in this file. chunk NULL: contiguous or compact without filters; else chunked so, shuffle + zstd. */
static hid_t open_set(hid_t at, const char *name, hid_t type, int rank, const hsize_t *dims, const hsize_t *chunk)
{
    hid_t set = is_hard(at, name, H5O_TYPE_DATASET) ? H5Dopen2(at, name, H5P_DEFAULT) : -1, t = -1, space = -1, cpl = -1;
    hsize_t got[3] = { 0 }, has[3] = { 0 };
    unsigned flags, cd[8], info;
    size_t n_cd = 8;
    bool ok = set >= 0 && (t = H5Dget_type(set)) >= 0 && (space = H5Dget_space(set)) >= 0 && (cpl = H5Dget_create_plist(set)) >= 0 && H5Tequal(t, type) > 0 &&
              H5Sget_simple_extent_ndims(space) == rank && H5Sget_simple_extent_dims(space, got, NULL) == rank && !memcmp(got, dims, (size_t)rank * sizeof *dims);
    H5D_layout_t layout = ok ? H5Pget_layout(cpl) : H5D_LAYOUT_ERROR;
    if (ok && chunk)
        ok = layout == H5D_CHUNKED && H5Pget_chunk(cpl, 3, has) == rank && !memcmp(has, chunk, (size_t)rank * sizeof *chunk) && H5Pget_nfilters(cpl) == 2 &&
             H5Pget_filter2(cpl, 0, &flags, &n_cd, cd, 0, NULL, &info) == H5Z_FILTER_SHUFFLE &&
             (n_cd = 8, H5Pget_filter2(cpl, 1, &flags, &n_cd, cd, 0, NULL, &info)) == PD_H5Z_ZSTD;
    else if (ok)
        ok = (layout == H5D_COMPACT || layout == H5D_CONTIGUOUS) && H5Pget_nfilters(cpl) == 0 && H5Pget_external_count(cpl) == 0;
    if (t >= 0)
        H5Tclose(t);
    if (space >= 0)
        H5Sclose(space);
    if (cpl >= 0)
        H5Pclose(cpl);
    if (!ok && set >= 0) {
        H5Dclose(set);
        set = -1;
    }
    return set;
}

static int read_small(struct child *c, const struct run *r, hid_t at, const char *name, hid_t type, int rank, const hsize_t *dims, void *out)
{
    hid_t set = open_set(at, name, type, rank, dims, NULL);
    if (set < 0)
        return bad(c, r, "dataset %s is missing or of another type or shape", name);
    herr_t rc = H5Dread(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, out);
    H5Dclose(set);
    return rc < 0 ? bad(c, r, "dataset %s cannot be read", name) : 0;
}

/* An attribute with its type and space; ids < 0 where there is none. Closed by attr_close. */
struct attr { hid_t a, type, space; };

static struct attr attr_open(hid_t at, const char *name)
{
    hid_t a = H5Aexists(at, name) > 0 ? H5Aopen(at, name, H5P_DEFAULT) : -1;
    return (struct attr){ a, a < 0 ? -1 : H5Aget_type(a), a < 0 ? -1 : H5Aget_space(a) };
}

static void attr_close(struct attr *v)
{
    if (v->space >= 0)
        H5Sclose(v->space);
    if (v->type >= 0)
        H5Tclose(v->type);
    if (v->a >= 0)
        H5Aclose(v->a);
}

static bool attr_is(const struct attr *v, H5T_class_t cls)
{
    return v->type >= 0 && v->space >= 0 && H5Tget_class(v->type) == cls && H5Sget_simple_extent_npoints(v->space) == 1;
}

static int get_text(struct child *c, const struct run *r, hid_t at, const char *name, size_t max, struct pd_buf *out)
{
    struct attr v = attr_open(at, name);
    int rc = 0;
    size_t n = v.type < 0 ? 0 : H5Tget_size(v.type);
    if (!attr_is(&v, H5T_STRING) || H5Tis_variable_str(v.type) != 0 || !n || n > max)
        rc = bad(c, r, "attribute %s is missing or no text of at most %zu bytes", name, max);
    else if (!(rc = pd_buf_reserve(out, n + 1, &c->e))) {
        if (H5Aread(v.a, v.type, out->p) < 0)
            rc = bad(c, r, "attribute %s cannot be read", name);
        else
            out->n = strnlen((char *)out->p, n), out->p[out->n] = 0;
    }
    attr_close(&v);
    return rc;
}

static int expect_int(struct child *c, const struct run *r, hid_t at, const char *name, int64_t want)
{
    struct attr v = attr_open(at, name);
    int64_t got = 0;
    bool ok = attr_is(&v, H5T_INTEGER) && H5Tget_size(v.type) <= 8 && H5Aread(v.a, H5T_NATIVE_INT64, &got) >= 0;
    attr_close(&v);
    if (!ok)
        return bad(c, r, "attribute %s is missing or no integer", name);
    return got == want ? 0 : bad(c, r, "attribute %s is %" PRId64 ", expected %" PRId64, name, got, want);
}

static int expect_text(struct child *c, const struct run *r, hid_t at, const char *name, const char *want, size_t n)
{
    struct pd_buf got = { 0 };
    int rc = get_text(c, r, at, name, PD_MAX_RECORD_DEFAULT, &got);
    if (!rc && (got.n != n || memcmp(got.p, want, n)))
        rc = bad(c, r, "attribute %s is '%.64s', the descriptor says '%.64s'", name, (char *)got.p, want);
    pd_buf_free(&got);
    return rc;
}

static int expect_hex(struct child *c, const struct run *r, hid_t at, const char *name, const uint8_t *p, size_t n)
{
    char hex[2 * PD_SHA_LEN + 1];
    pd_hex(p, n, hex);
    return expect_text(c, r, at, name, hex, 2 * n);
}

/* The descriptor, and that the attributes beside it say the same. */
static int read_desc(struct child *c, struct run *r)
{
    struct pd_buf json = { 0 }, fp = { 0 };
    uint8_t sha[PD_SHA_LEN], lh[8];
    int rc = get_text(c, r, r->group, "descriptor", PD_MAX_RECORD_DEFAULT, &json);
    if (rc)
        goto out;
    if (pd_json_to_msgpack((char *)json.p, json.n, &r->rec, &c->e) || pd_kvdesc_decode(r->rec.p, r->rec.n, &r->arena, &r->d, &c->e)) {
        rc = blame(c, r, "descriptor");
        goto out;
    }
    struct pd_kvdesc *d = &r->d;
    if (strcmp(d->run, r->name) || d->offer || strcmp(d->payload.scheme, "h5") || !d->n_tokens) {
        rc = bad(c, r, "its descriptor is that of run %s, payload '%s', %u tokens", d->run, d->payload.scheme, d->n_tokens);
        goto out;
    }
    if ((rc = pd_layout_check(&d->layout, &c->e)) || (rc = pd_plan_make(&d->layout, d->n_tokens, c->mode == PD_DUMP_EACH ? 1 : d->payload.chunk_blocks, &r->plan, &c->e))) {
        rc = blame(c, r, "layout");
        goto out;
    }
    pd_put_be64(lh, d->layout.layout_hash);
    if ((rc = pd_sha256(d->fp_fields.p, d->fp_fields.p ? d->fp_fields.n : 0, sha, &c->e)))
        goto out;
    if (memcmp(sha, d->fp_sha, sizeof sha)) {
        rc = bad(c, r, "the fingerprint's SHA-256 is not that of its fields");
        goto out;
    }
    if ((rc = pd_msgpack_to_json(d->fp_fields.p, d->fp_fields.n, &fp, &c->e)) || (rc = expect_int(c, r, r->group, "n_tokens", d->n_tokens)) ||
        (rc = expect_int(c, r, r->group, "block_size", d->layout.block_size)) || (rc = expect_hex(c, r, r->group, "gen", d->gen, PD_GEN_LEN)) ||
        (rc = expect_hex(c, r, r->group, "layout_hash", lh, 8)) || (rc = expect_hex(c, r, r->group, "fingerprint_sha256", d->fp_sha, PD_SHA_LEN)) ||
        (rc = expect_text(c, r, r->group, "fingerprint", (char *)fp.p, fp.n)))
        goto out;
out:
    pd_buf_free(&json);
    pd_buf_free(&fp);
    return rc;
}

static int read_tokens(struct child *c, struct run *r)
{
    hsize_t n = r->d.n_tokens;
    int32_t *ids = pd_arena_alloc(&r->arena, r->d.n_tokens, sizeof *ids, &c->e);
    if (!ids)
        return PD_ENOMEM;
    int rc = read_small(c, r, r->group, "tokens", H5T_STD_I32LE, 1, &n, ids);
    if (!rc && memcmp(ids, r->d.token_ids, n * sizeof *ids))
        rc = bad(c, r, "dataset tokens differs from the descriptor's token_ids");
    return rc;
}

/* Block hashes are optional; where they are they must be those of the tokens. */
static int read_hashes(struct child *c, struct run *r)
{
    uint32_t n = r->d.n_tokens / r->d.layout.block_size;
    hsize_t dims[2] = { n, 16 };
    uint64_t seed;
    if (H5Lexists(r->group, "block_hashes", H5P_DEFAULT) == 0 || !n)
        return 0;
    uint8_t (*got)[16] = pd_arena_alloc(&r->arena, n, 16, &c->e), (*want)[16] = pd_arena_alloc(&r->arena, n, 16, &c->e);
    if (!got || !want)
        return PD_ENOMEM;
    int rc = read_small(c, r, r->group, "block_hashes", H5T_STD_U8LE, 2, dims, got);
    if (!rc)
        rc = pd_fp_must_seed(r->d.fp_fields, &seed, &c->e);
    if (rc)
        return rc;
    pd_block_hashes(seed, r->d.token_ids, r->d.n_tokens, r->d.layout.block_size, r->d.request.adapter, r->d.request.cache_salt, want);
    for (uint32_t i = 0; i < n; i++)
        if (memcmp(got[i], want[i], 16))
            return bad(c, r, "block hash %u is not that of its tokens", i);
    return 0;
}

static int open_layers(struct child *c, struct run *r)
{
    const struct pd_kv_layout *l = &r->d.layout;
    uint32_t nb = r->plan.n_blocks;
    hsize_t dims[3] = { r->d.n_tokens, l->kv_heads, l->head_dim }, chunk[3] = { l->block_size, l->kv_heads, l->head_dim }, n = nb;
    hid_t type = pd_dump_type(l->dtype);
    int rc = 0;
    if (type < 0 || (r->layers = open_group(r->group, "layers")) < 0)
        rc = bad(c, r, "group layers is missing");
    for (uint32_t i = 0; !rc && i < l->layers; i++) {
        char name[32];
        for (int v = 0; !rc && v < 2; v++) {
            snprintf(name, sizeof name, "%03u", i);
            hid_t g = open_group(r->layers, name);
            if (g < 0) {
                rc = bad(c, r, "group layers/%s is missing", name);
                break;
            }
            if ((r->set[i * 2 + (uint32_t)v] = open_set(g, v ? "v" : "k", type, 3, dims, chunk)) < 0)
                rc = bad(c, r, "layers/%s/%s is missing or not %s [%u, %u, %u] in chunks of %u tokens, shuffle and zstd", name, v ? "v" : "k", l->dtype,
                         r->d.n_tokens, l->kv_heads, l->head_dim, l->block_size);
            else
                rc = read_small(c, r, g, v ? "v_xxh3" : "k_xxh3", H5T_STD_U64LE, 1, &n, r->sum + ((size_t)i * 2 + (size_t)v) * nb);
            H5Gclose(g);
        }
    }
    if (type >= 0)
        H5Tclose(type);
    return rc;
}

static int open_run(struct child *c, hid_t runs, struct run *r)
{
    if ((r->group = open_group(runs, r->name)) < 0)
        return bad(c, r, "is not a group");
    int rc = read_desc(c, r);
    if (rc || (rc = read_tokens(c, r)) || (rc = read_hashes(c, r)))
        return rc;
    size_t n_sets = (size_t)r->plan.layers * 2;
    r->el = pd_layout_elem_size(&r->d.layout);
    r->bytes = (size_t)(r->plan.chunk_bytes / r->plan.chunk_blocks / 2);
    if (!(r->set = pd_calloc(n_sets, sizeof *r->set, "datasets", &c->e)))
        return PD_ENOMEM;
    for (size_t i = 0; i < n_sets; i++)
        r->set[i] = -1;
    if (!(r->sum = pd_calloc(n_sets, (size_t)r->plan.n_blocks * 8, "checksums", &c->e)) || !(r->packed = pd_alloc_aligned(pd_h5z_bound(r->bytes), "chunk", &c->e)) ||
        !(r->tmp = pd_alloc_aligned(r->bytes, "chunk", &c->e)) || !(r->rows = pd_alloc_aligned(r->bytes, "chunk", &c->e)) ||
        !(r->data = pd_alloc_aligned((size_t)r->plan.chunk_bytes, "chunk", &c->e)))
        return PD_ENOMEM;
    return open_layers(c, r);
}

static void close_run(struct run *r)
{
    for (size_t i = 0; r->set && i < (size_t)r->plan.layers * 2; i++)
        if (r->set[i] >= 0)
            H5Dclose(r->set[i]);
    if (r->layers >= 0)
        H5Gclose(r->layers);
    if (r->group >= 0)
        H5Gclose(r->group);
    pd_free(r->set);
    pd_free(r->sum);
    pd_free(r->packed);
    pd_free(r->tmp);
    pd_free(r->rows);
    pd_free(r->data);
    pd_buf_free(&r->rec);
    pd_arena_free(&r->arena);
}

/* One chunk of the file, decoded, verified and turned into a block of the layout's order. */
static int read_block(struct child *c, struct run *r, uint32_t layer, int v, uint32_t block, uint8_t *out)
{
    hid_t set = r->set[layer * 2 + (uint32_t)v];
    hsize_t at[3] = { (hsize_t)block * r->d.layout.block_size, 0, 0 }, len = 0;
    const char *kv = v ? "V" : "K";
    uint32_t mask = 0;
    if (H5Dget_chunk_storage_size(set, at, &len) < 0 || !len)
        return bad(c, r, "layer %u block %u %s: not in the file", layer, block, kv);
    if (len > pd_h5z_bound(r->bytes))
        return bad(c, r, "layer %u block %u %s: %" PRIu64 " bytes packed, %zu plain", layer, block, kv, (uint64_t)len, r->bytes);
    if (H5Dread_chunk(set, H5P_DEFAULT, at, &mask, r->packed) < 0 || mask)
        return bad(c, r, "layer %u block %u %s: cannot be read", layer, block, kv);
    struct pd_err why = { 0 };
    if (pd_h5z_decode(r->packed, (size_t)len, r->el, r->tmp, r->rows, r->bytes, &why))
        return bad(c, r, "layer %u block %u %s: %s", layer, block, kv, why.msg);
    if (pd_xxh3(r->rows, r->bytes, pd_dump_seed(&r->d, layer, v, block)) != r->sum[((size_t)layer * 2 + (size_t)v) * r->plan.n_blocks + block])
        return bad(c, r, "layer %u block %u %s: checksum differs", layer, block, kv);
    if (!strcmp(r->d.layout.order, "NHD"))
        memcpy(out, r->rows, r->bytes);
    else
        pd_dump_block_of_rows(&r->d.layout, r->el, r->rows, out);
    return 0;
}

/* The alarm watches libhdf5, not the consumer. */
static int put(struct child *c, const struct iovec *v, int n)
{
    alarm(0);
    int rc = n == 1 ? pd_wstream_put(c->out, v->iov_base, v->iov_len, &c->e) : pd_wstream_putv(c->out, v, n, &c->e);
    alarm(STALL_S);
    return rc;
}

/* A record that encoding made (rc of that); the buffer goes. */
static int put_record(struct child *c, int rc, struct pd_buf *b)
{
    if (!rc)
        rc = put(c, &(struct iovec){ b->p, b->n }, 1);
    pd_buf_free(b);
    return rc;
}

static int put_desc(struct child *c, struct run *r, bool offer)
{
    struct pd_kvdesc d = r->d;
    struct pd_buf b = { 0 };
    d.offer = offer;
    d.payload = (struct pd_payload){ .scheme = "inline", .bytes = r->plan.bytes, .chunk_bytes = r->plan.chunk_bytes, .n_chunks = r->plan.n_chunks,
                                     .chunk_blocks = r->plan.chunk_blocks, .codec = "none" };
    if (offer) {
        d.first = NULL;
        d.n_first = 0;
        d.t = (struct pd_bin){ NULL, 0 };
    }
    return put_record(c, pd_kvdesc_encode(&d, &b, &c->e), &b);
}

static int put_fault(struct child *c, struct run *r, uint32_t index)
{
    struct pd_error_rec er = { .code = PD_ECORRUPT, .class_ = "integrity", .message = { c->e.msg, strlen(c->e.msg) } };
    struct pd_buf b = { 0 };
    memcpy(er.run, r->name, sizeof er.run);
    snprintf(er.action, sizeof er.action, "%u", index);
    return put_record(c, pd_error_encode(&er, &b, &c->e), &b);
}

static int put_chunk(struct child *c, struct run *r, uint32_t index)
{
    const struct pd_plan *p = &r->plan;
    struct pd_buf head = { 0 };
    struct pd_chunk k = { .index = index, .layers = 1, .codec = "none" };
    int rc = 0;
    k.layer0 = index % p->layers;
    k.block0 = index / p->layers * p->chunk_blocks;
    k.blocks = p->n_blocks - k.block0 < p->chunk_blocks ? p->n_blocks - k.block0 : p->chunk_blocks;
    k.raw_len = 2 * (uint64_t)r->bytes * k.blocks;
    memcpy(k.run, r->name, sizeof k.run);
    memcpy(k.gen, r->d.gen, sizeof k.gen);
    for (int v = 0; !rc && v < 2; v++)
        for (uint32_t i = 0; !rc && i < k.blocks; i++)
            rc = read_block(c, r, k.layer0, v, k.block0 + i, r->data + ((size_t)v * k.blocks + i) * r->bytes);
    if (rc)
        return rc == PD_ECORRUPT && (c->mode == PD_DUMP_EACH || c->mode == PD_DUMP_SERVE) ? (r->faulty = true, put_fault(c, r, index)) : rc;
    k.data = (struct pd_bin){ r->data, (size_t)k.raw_len };
    k.xxh3 = pd_xxh3(r->data, k.data.n, pd_chunk_seed(r->d.gen, r->d.layout.layout_hash, k.layer0, k.block0));
    rc = pd_chunk_encode_head(&k, &head, &c->e);
    if (!rc)
        rc = put(c, (struct iovec[]){ { head.p, head.n }, { r->data, k.data.n } }, 2);
    pd_buf_free(&head);
    return rc;
}

static int put_run(struct child *c, hid_t runs, const char *name)
{
    struct run r = { .group = -1, .layers = -1 };
    memcpy(r.name, name, sizeof r.name);
    int rc = open_run(c, runs, &r);
    if (!rc && c->mode != PD_DUMP_HEAD) {
        rc = put_desc(c, &r, true);
        for (uint32_t i = 0; !rc && i < r.plan.n_chunks && !(r.faulty && c->mode == PD_DUMP_SERVE); i++)
            rc = put_chunk(c, &r, i);
    }
    if (!rc)
        rc = put_desc(c, &r, false);
    close_run(&r);
    return rc;
}

/* *sys: errno of a read that failed, which is not the file's fault. */
static int read_runs(struct child *c, const char *only, int *sys)
{
    H5G_info_t gi;
    hid_t file = -1, runs = -1, fapl = H5Pcreate(H5P_FILE_ACCESS);
    int rc = 0;
    H5Pset_fclose_degree(fapl, H5F_CLOSE_STRONG);
    if (!pd_h5fd_set(fapl, 3, false, sys) || (file = H5Fopen(c->path, H5F_ACC_RDONLY, fapl)) < 0)
        return bad(c, NULL, "cannot be opened as HDF5");
    if ((rc = expect_text(c, NULL, file, "format", PD_DUMP_FORMAT, strlen(PD_DUMP_FORMAT))) || (rc = expect_int(c, NULL, file, "version", PD_DUMP_VERSION)))
        return rc;
    if ((runs = open_group(file, "runs")) < 0 || H5Gget_info(runs, &gi) < 0 || gi.nlinks > MAX_RUNS)
        return bad(c, NULL, "group /runs is missing");
    if (only[0])
        return H5Lexists(runs, only, H5P_DEFAULT) > 0 ? put_run(c, runs, only) : pd_fail(&c->e, PD_EFAIL, "has no run %s", only);
    H5_index_t by = H5Lget_name_by_idx(runs, ".", H5_INDEX_CRT_ORDER, H5_ITER_INC, 0, NULL, 0, H5P_DEFAULT) >= 0 ? H5_INDEX_CRT_ORDER : H5_INDEX_NAME;
    for (hsize_t i = 0; !rc && !*sys && i < gi.nlinks; i++) {
        char name[PD_RUN_LEN + 2];
        if (H5Lget_name_by_idx(runs, ".", by, H5_ITER_INC, i, name, sizeof name, H5P_DEFAULT) != PD_RUN_LEN || !pd_run_valid(name, PD_RUN_LEN))
            rc = bad(c, NULL, "link %" PRIu64 " of /runs has no run's name", (uint64_t)i);
        else
            rc = put_run(c, runs, name);
        if (rc == PD_ECORRUPT && !*sys && (c->mode == PD_DUMP_EACH || c->mode == PD_DUMP_SERVE)) {     /* the other runs may be whole */
            struct run lost = { .group = -1 };
            snprintf(lost.name, sizeof lost.name, "%.26s", pd_run_valid(name, strnlen(name, sizeof name)) ? name : "");
            rc = put_fault(c, &lost, UINT32_MAX);
        }
    }
    return rc;
}

static int read_file(struct child *c, const char *only)
{
    int sys = 0, rc = read_runs(c, only, &sys);
    errno = sys;
    return sys ? pd_fail_sys(&c->e, "cannot be read") : rc;
}

static void limit(int what, rlim_t soft, rlim_t hard)
{
    setrlimit(what, &(struct rlimit){ soft, hard });
}

/* argv: name, mode, run or "", CPU seconds */
static int child_main(char **argv)
{
    struct child c = { .mode = (enum pd_dump_mode)atoi(argv[1]), .path = argv[0] };
    close_range(5, ~0U, 0);
    limit(RLIMIT_CORE, 0, 0);
    limit(RLIMIT_FSIZE, 0, 0);
    limit(RLIMIT_CPU, (rlim_t)atoi(argv[3]), (rlim_t)atoi(argv[3]) + 1);
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__      /* their shadow alone is terabytes */
    limit(RLIMIT_AS, AS_LIMIT, AS_LIMIT);
#endif
    prctl(PR_SET_DUMPABLE, 0);
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    alarm(STALL_S);
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    H5PLset_loading_state(0);           /* a file must not choose code to load */
    int rc = pd_wstream_new(1, PD_FMT_MSGPACK, false, "dump reader", &c.out, &c.e);
    if (!rc)
        rc = H5Zregister(&pd_h5z_class) < 0 ? pd_fail(&c.e, PD_EFAIL, "libhdf5 takes no filter") : read_file(&c, argv[2]);
    alarm(0);
    if (c.out) {
        int end = pd_wstream_close(c.out, rc ? NULL : &c.e);
        rc = rc ? rc : end;
    }
    if (rc) {
        char msg[1 + sizeof c.e.msg];
        msg[0] = (char)-rc;
        size_t n = strlen(c.e.msg);
        memcpy(msg + 1, c.e.msg, n);
        if (write(4, msg, n + 1) < 0)
            return 1;
    }
    return pd_exit_status(rc);
}

__attribute__((constructor)) static void be_the_child(int argc, char **argv, char **envp)
{
    if (argc == 4 && argv && argv[0] && !strcmp(argv[0], PD_DUMP_READER))
        _exit(child_main(argv));        /* no exit handlers: libhdf5's would walk what a hostile file left behind */
}

void pd_dump_child_link(void) { }
