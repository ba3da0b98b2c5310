#include "fields.h"
#include "transfer.h"

/* ---- hello ---- */

static const struct pd_hello *hello(const void *rec) { return rec; }
static void enc_via(const void *rec, struct pd_packer *k) { pd_pack_strs(hello(rec)->via, hello(rec)->n_via, k); }
static void enc_caps(const void *rec, struct pd_packer *k) { pd_pack_strs(hello(rec)->caps, hello(rec)->n_caps, k); }
static int dec_via(void *rec, struct pd_bin v, struct pd_unpack *u) { struct pd_hello *h = rec; return pd_unpack_strs("via", v, &h->via, &h->n_via, u); }
static int dec_caps(void *rec, struct pd_bin v, struct pd_unpack *u) { struct pd_hello *h = rec; return pd_unpack_strs("caps", v, &h->caps, &h->n_caps, u); }
static void enc_layout(const void *rec, struct pd_packer *k) { pd_fields_encode(&pd_layout_table, &hello(rec)->layout, false, 0, 0, k); }
static int dec_layout(void *rec, struct pd_bin v, struct pd_unpack *u) { return pd_fields_decode(&pd_layout_table, v, &((struct pd_hello *)rec)->layout, u); }

static void enc_fp(const void *rec, struct pd_packer *k)
{
    struct pd_fp_rec fp = { .fields = hello(rec)->fp_fields };
    memcpy(fp.sha, hello(rec)->fp_sha, sizeof fp.sha);
    pd_fields_encode(&pd_fp_table, &fp, false, 0, 0, k);
}

static int dec_fp(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_hello *h = rec;
    struct pd_fp_rec fp = { .fields = { NULL, 0 } };
    int rc = pd_unpack_fp(v, &fp, u);
    h->fp_fields = fp.fields;
    memcpy(h->fp_sha, fp.sha, sizeof fp.sha);
    return rc;
}

#define Q(m) PD_FIELD(struct pd_rdma_at, m)
static const struct pd_field rdma_field[] = { { "gid", PD_F_BYTES, PD_FF_REQ, Q(gid) }, { "lid", PD_F_U32, PD_FF_NZ, Q(lid) }, { "qp", PD_F_U32, PD_FF_REQ, Q(qp) },
    { "psn", PD_F_U32, PD_FF_NZ, Q(psn) }, { "mtu", PD_F_U32, PD_FF_NZ, Q(mtu) }, { "why", PD_F_STR, PD_FF_MEND, Q(why) } };
static const struct pd_table rdma_table = { "rdma", rdma_field, sizeof rdma_field / sizeof *rdma_field, -1 };
static void enc_rdma(const void *rec, struct pd_packer *k) { pd_fields_encode(&rdma_table, &hello(rec)->rdma, false, 0, 0, k); }

static int dec_rdma(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    ((struct pd_hello *)rec)->has_rdma = true;
    return pd_fields_decode(&rdma_table, v, &((struct pd_hello *)rec)->rdma, u);
}

#define H(m) PD_FIELD(struct pd_hello, m)
static const struct pd_field hello_field[] = {
    { "conn", PD_F_BYTES, PD_FF_REQ, H(conn) }, { "version", PD_F_U32, PD_FF_REQ, H(version) }, { "version_min", PD_F_U32, PD_FF_REQ, H(version_min) },
    { "role", PD_F_CHARS, PD_FF_REQ, H(role) }, { "worker", PD_F_STR, 0, H(worker) }, { "domain", PD_F_STR, 0, H(domain) },
    { "boot", PD_F_BYTES, PD_FF_HAS, H(boot), .aux = offsetof(struct pd_hello, has_boot) }, { "netns", PD_F_U64, PD_FF_NZ, H(netns) },
    { "epoch", PD_F_U64, PD_FF_REQ, H(epoch) }, { "life", PD_F_BYTES, PD_FF_REQ, H(life) },
    { "fingerprint", PD_F_CUSTOM, PD_FF_REQ, H(fp_sha), .enc = enc_fp, .dec = dec_fp },
    { "layout", PD_F_CUSTOM, PD_FF_REQ, H(layout), .enc = enc_layout, .dec = dec_layout },
    { "via", PD_F_CUSTOM, PD_FF_REQ, H(via), .enc = enc_via, .dec = dec_via },
    { "caps", PD_F_CUSTOM, PD_FF_COUNT, H(caps), .aux = offsetof(struct pd_hello, n_caps), .enc = enc_caps, .dec = dec_caps },
    { "slab_bytes", PD_F_U64, PD_FF_NZ, H(slab_bytes) }, { "slab_blocks", PD_F_U32, PD_FF_NZ, H(slab_blocks) },
    { "rdma", PD_F_CUSTOM, PD_FF_HAS, H(rdma), .aux = offsetof(struct pd_hello, has_rdma), .enc = enc_rdma, .dec = dec_rdma } };
static const struct pd_table hello_table = { "hello", hello_field, sizeof hello_field / sizeof *hello_field, -1 };
static const struct pd_field attach_field[] = { { "attach", PD_F_BYTES, PD_FF_REQ, H(attach) } };
static const struct pd_table attach_table = { "hello", attach_field, 1, -1 };

int pd_hello_encode(const struct pd_hello *r, struct pd_buf *b, struct pd_err *e)
{
    if (!r->has_attach && !r->fp_fields.p)
        return pd_fail(e, PD_EFAIL, "hello: fingerprint.fields is missing");
    return pd_table_encode(r->has_attach ? &attach_table : &hello_table, r, b, e);
}

int pd_hello_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_hello *r, struct pd_err *e)
{
    struct pd_bin v;
    *r = (struct pd_hello){ .has_attach = pd_map_find(rec, n, "attach", &v) == 1 };
    return pd_table_decode(r->has_attach ? &attach_table : &hello_table, rec, n, a, r, e);
}

/* ---- the others: a table each ---- */

#define RUN_GEN(T) { "run", PD_F_RUN, PD_FF_REQ, PD_FIELD(T, run) }, { "gen", PD_F_BYTES, PD_FF_REQ, PD_FIELD(T, gen) }
#define MAYBE(T, m) PD_F_BYTES, PD_FF_HAS, PD_FIELD(T, m)
#define HAS(T, m) .aux = offsetof(T, m)
#define PAIR(name, T, extra) \
    static const struct pd_table name##_table = { #name, name##_field, sizeof name##_field / sizeof *name##_field, extra }; \
    int pd_##name##_encode(const T *r, struct pd_buf *b, struct pd_err *e) { return pd_table_encode(&name##_table, r, b, e); } \
    int pd_##name##_decode(const void *rec, size_t n, struct pd_arena *a, T *r, struct pd_err *e) \
    { \
        memset(r, 0, sizeof *r); \
        return pd_table_decode(&name##_table, rec, n, a, r, e); \
    }

static void enc_target(const void *rec, struct pd_packer *k)
{
    const struct pd_accept *r = rec;
    pd_pack_runs("target", r->target, r->n_target, k);
}

static int dec_target(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_accept *r = rec;
    return pd_unpack_runs("target", v, &r->target, &r->n_target, u);
}

#define A(m) PD_FIELD(struct pd_accept, m)
static const struct pd_field accept_field[] = { RUN_GEN(struct pd_accept), { "mode", PD_F_CHARS, PD_FF_REQ, A(mode) }, { "have", PD_F_BIN, 0, A(have) },
                                               { "held", PD_F_U32, PD_FF_NZ, A(held) }, { "tag", PD_F_U32, PD_FF_NZ, A(tag) },
    { "target", PD_F_CUSTOM, PD_FF_COUNT, A(target), .aux = offsetof(struct pd_accept, n_target), .enc = enc_target, .dec = dec_target },
    { "rkeys", PD_F_BIN, 0, A(rkeys) }, { "via", PD_F_CHARS, 0, A(via) } };
PAIR(accept, struct pd_accept, -1)

#define D(m) PD_FIELD(struct pd_done, m)
static const struct pd_field done_field[] = { RUN_GEN(struct pd_done), { "chunk0", PD_F_U32, PD_FF_REQ, D(chunk0) },
                                             { "chunks", PD_F_U32, PD_FF_REQ, D(chunks) }, { "sums", PD_F_BIN, 0, D(sums) }, { "seq", PD_F_U32, PD_FF_NZ, D(seq) } };
PAIR(done, struct pd_done, -1)

#define V(m) PD_FIELD(struct pd_verified, m)
static const struct pd_field verified_field[] = { RUN_GEN(struct pd_verified), { "mode", PD_F_CHARS, PD_FF_REQ, V(mode) },
                                                 { "bytes", PD_F_U64, PD_FF_REQ, V(bytes) },
    { "verify_us", PD_F_I64, PD_FF_REQ, V(verify_us) } };
PAIR(verified, struct pd_verified, -1)

static const struct pd_field release_field[] = { RUN_GEN(struct pd_release), { "lease", MAYBE(struct pd_release, lease), HAS(struct pd_release, has_lease) } };
PAIR(release, struct pd_release, -1)

#define S(m) PD_FIELD(struct pd_status, m)
static const struct pd_field status_field[] = { { "run", PD_F_RUN, 0, S(run) }, { "gen", MAYBE(struct pd_status, gen), HAS(struct pd_status, has_gen) },
                                               { "state", PD_F_CHARS, 0, S(state) },
    { "lease", MAYBE(struct pd_status, lease), HAS(struct pd_status, has_lease) }, { "bytes", PD_F_U64, PD_FF_NZ, S(bytes) },
    { "worker", PD_F_STR, 0, S(worker) },
    { "cause", PD_F_STR, PD_FF_MEND, S(cause) }, { "ledger", PD_F_MAP, 0, S(ledger) } };
PAIR(status, struct pd_status, offsetof(struct pd_status, extra))

#define C(m) PD_FIELD(struct pd_cancel, m)
static const struct pd_field cancel_field[] = { { "run", PD_F_RUN, PD_FF_REQ, C(run) }, { "gen", MAYBE(struct pd_cancel, gen), HAS(struct pd_cancel, has_gen) },
    { "cancel_token", MAYBE(struct pd_cancel, cancel_token), HAS(struct pd_cancel, has_token) }, { "cause", PD_F_STR, PD_FF_MEND, C(cause) } };
PAIR(cancel, struct pd_cancel, -1)

#define L(m) PD_FIELD(struct pd_slab_rec, m)
static const struct pd_field slab_field[] = { { "what", PD_F_CHARS, PD_FF_REQ, L(what) }, { "index", PD_F_U32, PD_FF_REQ, L(index) },
                                             { "bytes", PD_F_U64, PD_FF_REQ, L(bytes) } };
PAIR(slab, struct pd_slab_rec, -1)

#define Y(m) PD_FIELD(struct pd_carry, m)
static const struct pd_field carry_field[] = { { "seq", PD_F_U64, PD_FF_REQ, Y(seq) }, { "end", PD_F_BOOL, PD_FF_NZ, Y(end) }, { "rec", PD_F_BIN, 0, Y(rec) } };
static const struct pd_table carry_table = { "carry", carry_field, 3, -1 };

int pd_carry_encode(const struct pd_carry *r, struct pd_buf *b, struct pd_err *e) { return pd_table_encode(&carry_table, r, b, e); }

int pd_carry_decode(const void *rec, size_t n, struct pd_carry *r, struct pd_err *e)
{
    *r = (struct pd_carry){ .seq = 0 };
    return pd_table_decode(&carry_table, rec, n, NULL, r, e);
}

/* ---- lease, the map in a descriptor ---- */

#define R(m) PD_FIELD(struct pd_lease_rec, m)
static const struct pd_field lease_field[] = { { "id", PD_F_BYTES, PD_FF_REQ, R(id) }, { "owner", PD_F_STR, PD_FF_REQ, R(owner) },
                                              { "ttl_us", PD_F_I64, PD_FF_REQ, R(ttl_us) },
    { "renew_us", PD_F_I64, PD_FF_REQ, R(renew_us) } };
static const struct pd_table lease_table = { "lease", lease_field, 4, -1 };

int pd_lease_rec_encode(const struct pd_lease_rec *r, struct pd_buf *b, struct pd_err *e)
{
    struct pd_packer k;
    size_t from = b->n;
    pd_pack_init(&k, b, e);
    pd_fields_encode(&lease_table, r, false, 0, 0, &k);
    return pd_record_close(&k, from);
}

int pd_lease_rec_decode(struct pd_bin map, struct pd_arena *a, struct pd_lease_rec *r, struct pd_err *e)
{
    struct pd_unpack u = { a, e, PD_ECORRUPT };
    *r = (struct pd_lease_rec){ .ttl_us = 0 };
    if (!map.p)
        return pd_fail(e, PD_ECORRUPT, "lease: there is none");
    int rc = pd_fields_decode(&lease_table, map, r, &u);
    if (!rc && (r->ttl_us < 1 || r->renew_us < 1 || r->renew_us > r->ttl_us))
        rc = pd_fail(e, PD_ECORRUPT, "lease: ttl_us %lld and renew_us %lld make no sense", (long long)r->ttl_us, (long long)r->renew_us);
    return rc;
}
