/* offer and kv: the KV descriptor. Its last pair is `sum`, at a fixed distance from the end, so that it can be checked before anything is read. */
#include "fields.h"

/* fixstr "sum", bin8 of 8 bytes, the hash */
static const uint8_t sum_key[] = { 0xa3, 's', 'u', 'm', 0xc4, 8 };
enum { SUM_BYTES = sizeof sum_key + 8 };

static const struct pd_kvdesc *desc(const void *rec) { return rec; }

/* ---- fingerprint {sha, fields} ---- */

#define FP(m) PD_FIELD(struct pd_fp_rec, m)
static const struct pd_field fp_field[] = { { "sha", PD_F_BYTES, PD_FF_REQ, FP(sha) }, { "fields", PD_F_MAP, PD_FF_REQ, FP(fields) } };
const struct pd_table pd_fp_table = { "fingerprint", fp_field, 2, -1 };

int pd_unpack_fp(struct pd_bin v, struct pd_fp_rec *fp, struct pd_unpack *u)
{
    struct pd_bin raw;
    uint8_t sha[PD_SHA_LEN];
    int rc = pd_fields_decode(&pd_fp_table, v, fp, u);
    if (rc)
        return rc;
    if (pd_map_find(v.p, v.n, "fields", &raw) != 1 || raw.n != fp->fields.n || memcmp(raw.p, fp->fields.p, raw.n))
        return pd_fail(u->e, u->code, "fingerprint.fields is not in canonical form");
    if ((rc = pd_sha256(raw.p, raw.n, sha, u->e)))
        return rc;
    return memcmp(sha, fp->sha, sizeof sha) ? pd_fail(u->e, u->code, "fingerprint.sha is not the SHA-256 of fingerprint.fields") : 0;
}

static void enc_fp(const void *rec, struct pd_packer *k)
{
    struct pd_fp_rec fp = { .fields = desc(rec)->fp_fields };
    memcpy(fp.sha, desc(rec)->fp_sha, sizeof fp.sha);
    pd_fields_encode(&pd_fp_table, &fp, false, 0, 0, k);
}

static int dec_fp(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_kvdesc *d = rec;
    struct pd_fp_rec fp = { .fields = { NULL, 0 } };
    int rc = pd_unpack_fp(v, &fp, u);
    d->fp_fields = fp.fields;
    memcpy(d->fp_sha, fp.sha, sizeof fp.sha);
    return rc;
}

/* ---- token_ids: bin of int32, little-endian ---- */

static void enc_ids(const void *rec, struct pd_packer *k) { pd_pack_bin(k, desc(rec)->token_ids, (size_t)desc(rec)->n_tokens * 4); }

static int dec_ids(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_kvdesc *d = rec;
    struct pd_bin b;
    int32_t *ids;
    if (!pd_get_bin(v, &b))
        return pd_fail(u->e, u->code, "token_ids must be bin");
    int rc = pd_unpack_ids("token_ids", v, &ids, &d->n_tokens, u);
    d->token_ids = ids;
    return rc;
}

/* n_tokens is told apart from the row's length; the two must agree. */
static void enc_n(const void *rec, struct pd_packer *k) { msgpack_pack_uint32(&k->pk, desc(rec)->n_tokens); }

/* ---- layout, payload ---- */

#define L(m) PD_FIELD(struct pd_kv_layout, m)
static const struct pd_field layout_field[] = {
    { "layout_hash", PD_F_HASH, PD_FF_REQ, L(layout_hash) }, { "block_size", PD_F_U32, PD_FF_REQ, L(block_size) }, { "dtype", PD_F_CHARS, PD_FF_REQ, L(dtype) },
    { "order", PD_F_CHARS, PD_FF_REQ, L(order) }, { "layers", PD_F_U32, PD_FF_REQ, L(layers) }, { "kv_heads", PD_F_U32, PD_FF_REQ, L(kv_heads) },
    { "head_dim", PD_F_U32, PD_FF_REQ, L(head_dim) } };
const struct pd_table pd_layout_table = { "layout", layout_field, sizeof layout_field / sizeof *layout_field, -1 };

static void enc_layout(const void *rec, struct pd_packer *k) { pd_fields_encode(&pd_layout_table, &desc(rec)->layout, false, 0, 0, k); }
static int dec_layout(void *rec, struct pd_bin v, struct pd_unpack *u) { return pd_fields_decode(&pd_layout_table, v, &((struct pd_kvdesc *)rec)->layout, u); }

/* runs: a list of [base, stride, count, len] */
enum { RUN_NUMBERS = 4 };

void pd_pack_runs(const char *name, const struct pd_payload_run *runs, uint32_t n, struct pd_packer *k)
{
    msgpack_pack_array(&k->pk, n);
    for (uint32_t i = 0; i < n; i++) {
        const struct pd_payload_run *r = &runs[i];
        if ((r->base | r->stride | r->len) > INT64_MAX && !k->rc)
            k->rc = pd_fail(k->e, PD_EFAIL, "%s[%u] is past 2^63-1; a record cannot hold it", name, i);
        msgpack_pack_array(&k->pk, RUN_NUMBERS);
        msgpack_pack_uint64(&k->pk, r->base);
        msgpack_pack_uint64(&k->pk, r->stride);
        msgpack_pack_uint32(&k->pk, r->count);
        msgpack_pack_uint64(&k->pk, r->len);
    }
}

int pd_unpack_runs(const char *name, struct pd_bin v, struct pd_payload_run **runs, uint32_t *n_runs, struct pd_unpack *u)
{
    struct pd_iter it, quad;
    struct pd_bin x, y;
    if (!pd_iter_open(&it, v, PD_T_ARRAY))
        return pd_fail(u->e, u->code, "%s must be a list", name);
    if (!(*runs = pd_arena_alloc(u->a, (size_t)it.left, sizeof **runs, u->e)))
        return PD_ENOMEM;
    for (*n_runs = 0; pd_iter_next(&it, &x); ++*n_runs) {
        int64_t q[RUN_NUMBERS];
        int n = 0;
        if (pd_iter_open(&quad, x, PD_T_ARRAY))
            while (n < RUN_NUMBERS && pd_iter_next(&quad, &y) && pd_get_int(y, &q[n]) && q[n] >= 0)
                n++;
        if (n < RUN_NUMBERS || quad.left || q[2] > UINT32_MAX)
            return pd_fail(u->e, u->code, "%s[%u] must be 4 whole numbers: base, stride, count, len", name, *n_runs);
        (*runs)[*n_runs] = (struct pd_payload_run){ (uint64_t)q[0], (uint64_t)q[1], (uint32_t)q[2], (uint64_t)q[3] };
    }
    return 0;
}

static void enc_runs(const void *rec, struct pd_packer *k)
{
    const struct pd_payload *p = rec;
    pd_pack_runs("payload.runs", p->runs, p->n_runs, k);
}

static int dec_runs(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_payload *p = rec;
    return pd_unpack_runs("payload.runs", v, &p->runs, &p->n_runs, u);
}

#define P(m) PD_FIELD(struct pd_payload, m)
static const struct pd_field payload_field[] = {
    { "scheme", PD_F_CHARS, PD_FF_REQ, P(scheme) }, { "where", PD_F_STR, 0, P(where) }, { "bytes", PD_F_U64, PD_FF_REQ, P(bytes) },
    { "chunk_bytes", PD_F_U64, PD_FF_REQ, P(chunk_bytes) }, { "n_chunks", PD_F_U32, PD_FF_REQ, P(n_chunks) }, { "chunk_blocks", PD_F_U32, PD_FF_REQ, P(chunk_blocks) },
    { "codec", PD_F_CHARS, PD_FF_REQ, P(codec) },
    { "runs", PD_F_CUSTOM, PD_FF_COUNT, P(runs), .aux = offsetof(struct pd_payload, n_runs), .enc = enc_runs, .dec = dec_runs } };
static const struct pd_table payload_table = { "payload", payload_field, sizeof payload_field / sizeof *payload_field, -1 };

static void enc_payload(const void *rec, struct pd_packer *k)
{
    if (desc(rec)->payload.scheme[0])
        pd_fields_encode(&payload_table, &desc(rec)->payload, false, 0, 0, k);
    else
        msgpack_pack_nil(&k->pk);
}

static int dec_payload(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_payload *p = &((struct pd_kvdesc *)rec)->payload;
    int rc = pd_fields_decode(&payload_table, v, p, u);
    return !rc && !p->scheme[0] ? pd_fail(u->e, u->code, "payload.scheme is empty") : rc;
}

/* ---- first: one a choice ---- */

static void enc_first(const void *rec, struct pd_packer *k)
{
    const struct pd_kvdesc *d = rec;
    msgpack_pack_array(&k->pk, d->n_first);
    for (uint32_t i = 0; i < d->n_first; i++) {
        const struct pd_first *f = &d->first[i];
        msgpack_pack_map(&k->pk, 2 + (f->n_top > 0));
        pd_pack_text(k, "token");
        msgpack_pack_int32(&k->pk, f->token);
        pd_pack_text(k, "logprob");
        pd_pack_float(k, "first.logprob", f->logprob);
        if (f->n_top) {
            pd_pack_text(k, "top");
            pd_pack_top(k, f->top, f->n_top);
        }
    }
}

static int dec_first_top(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_first *f = rec;
    return pd_unpack_top(v, &f->top, &f->n_top, u);
}

#define F(m) PD_FIELD(struct pd_first, m)
static const struct pd_field first_field[] = {
    { "token", PD_F_I32, PD_FF_REQ, F(token) }, { "logprob", PD_F_FLOAT, PD_FF_REQ, F(logprob) }, { "top", PD_F_CUSTOM, PD_FF_COUNT, F(top), .dec = dec_first_top } };
static const struct pd_table first_table = { "first", first_field, 3, -1 };

static int dec_first(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_kvdesc *d = rec;
    struct pd_iter it;
    struct pd_bin x;
    if (!pd_iter_open(&it, v, PD_T_ARRAY))
        return pd_fail(u->e, u->code, "first must be a list");
    if (!(d->first = pd_arena_alloc(u->a, (size_t)it.left, sizeof *d->first, u->e)))
        return PD_ENOMEM;
    for (; pd_iter_next(&it, &x); d->n_first++) {
        int rc = pd_fields_decode(&first_table, x, &d->first[d->n_first], u);
        if (rc)
            return rc;
        if (d->first[d->n_first].token < 0)
            return pd_fail(u->e, u->code, "first.token = %d is no token id", d->first[d->n_first].token);
    }
    return 0;
}

/* ---- the whole ---- */

#define D(m) PD_FIELD(struct pd_kvdesc, m)
static void enc_request(const void *rec, struct pd_packer *k) { pd_request_pack_inside(&desc(rec)->request, k); }
static int dec_request(void *rec, struct pd_bin v, struct pd_unpack *u) { return pd_request_unpack_inside(v, &((struct pd_kvdesc *)rec)->request, u); }

static const struct pd_field field[] = {
    { "run", PD_F_RUN, PD_FF_REQ, D(run) }, { "op", PD_F_BYTES, PD_FF_REQ, D(op) }, { "gen", PD_F_BYTES, PD_FF_REQ, D(gen) }, { "epoch", PD_F_U64, PD_FF_REQ, D(epoch) },
    { "fingerprint", PD_F_CUSTOM, PD_FF_REQ, D(fp_sha), .enc = enc_fp, .dec = dec_fp }, { "n_tokens", PD_F_CUSTOM, PD_FF_REQ, D(n_tokens), .enc = enc_n },
    { "token_ids", PD_F_CUSTOM, PD_FF_REQ, D(token_ids), .enc = enc_ids, .dec = dec_ids }, { "layout", PD_F_CUSTOM, PD_FF_REQ, D(layout), .enc = enc_layout, .dec = dec_layout },
    { "lease", PD_F_MAP, PD_FF_NULL, D(lease) }, { "payload", PD_F_CUSTOM, PD_FF_ALWAYS, D(payload), .enc = enc_payload, .dec = dec_payload },
    { "first", PD_F_CUSTOM, PD_FF_ALWAYS, D(first), .enc = enc_first, .dec = dec_first }, { "request", PD_F_CUSTOM, PD_FF_REQ, D(request), .enc = enc_request, .dec = dec_request },
    { "t", PD_F_MAP, PD_FF_NULL, D(t) }, { "domain", PD_F_STR, 0, D(domain) }, { "worker", PD_F_STR, 0, D(worker) } };
enum { N_TOKENS = 5, FIRST = 10, TIMES = 12, N_FIELDS = sizeof field / sizeof *field };
static const struct pd_table kv_table = { "kv", field, N_FIELDS, offsetof(struct pd_kvdesc, extra) };
static const struct pd_table offer_table = { "offer", field, N_FIELDS, offsetof(struct pd_kvdesc, extra) };

int pd_kvdesc_encode(const struct pd_kvdesc *d, struct pd_buf *b, struct pd_err *e)
{
    struct pd_packer k;
    size_t from = b->n;
    uint8_t sum[8];
    pd_pack_init(&k, b, e);
    if (!d->fp_fields.p)
        return pd_fail(e, PD_EFAIL, "%s: fingerprint.fields is missing", d->offer ? "offer" : "kv");
    pd_fields_encode(d->offer ? &offer_table : &kv_table, d, true, d->offer ? 1ull << FIRST | 1ull << TIMES : 0, 1, &k);
    if (!k.rc)
        pd_put_be64(sum, pd_xxh3(b->p + from, b->n - from, 0));
    pd_pack_raw(&k, sum_key, sizeof sum_key);
    pd_pack_raw(&k, sum, sizeof sum);
    return pd_record_close(&k, from);
}

int pd_kvdesc_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_kvdesc *d, struct pd_err *e)
{
    struct pd_unpack u = { a, e, PD_ECORRUPT };
    const uint8_t *p = rec;
    struct pd_bin v;
    int64_t n_tokens;
    bool offer = pd_kind_of(rec, n) == PD_K_OFFER;
    const struct pd_table *t = offer ? &offer_table : &kv_table;
    *d = (struct pd_kvdesc){ .offer = offer };
    if (n < SUM_BYTES || memcmp(p + n - SUM_BYTES, sum_key, sizeof sum_key))
        return pd_fail(e, PD_ECORRUPT, "%s: no sum at its end; it is cut or was changed", t->kind);
    if (pd_get_be64(p + n - 8) != pd_xxh3(p, n - SUM_BYTES, 0))
        return pd_fail(e, PD_ECORRUPT, "%s: sum differs; the record was changed on its way", t->kind);
    int rc = pd_record_open(t->kind, rec, n, false, &u);
    if (!rc && (pd_map_find(rec, n, "sum", &v) != 1 || v.p + v.n != p + n))
        rc = pd_fail(e, PD_ECORRUPT, "%s: no sum of its own at its end", t->kind);
    rc = rc ? rc : pd_fields_decode(t, (struct pd_bin){ rec, n }, d, &u);
    if (rc)
        return rc;
    if (pd_map_find(rec, n, "n_tokens", &v) != 1 || !pd_get_int(v, &n_tokens) || n_tokens != d->n_tokens)
        return pd_fail(e, PD_ECORRUPT, "%s: n_tokens differs from the %u token_ids", t->kind, d->n_tokens);
    memcpy(d->request.run, d->run, sizeof d->run);
    return 0;
}
