/* worker: registration and heartbeat. */
#include "fields.h"

static const struct pd_worker_rec *worker(const void *rec) { return rec; }

#define N(t) (int)(sizeof t / sizeof *t)
#define P(m) PD_FIELD(struct pd_parallel, m)
static const struct pd_field parallel_field[] = { { "tp", PD_F_U32, PD_FF_REQ, P(tp) }, { "pp", PD_F_U32, PD_FF_REQ, P(pp) }, { "ep", PD_F_U32, PD_FF_REQ, P(ep) } };
static const struct pd_table parallel_table = { "parallel", parallel_field, N(parallel_field), -1 };

#define C(m) PD_FIELD(struct pd_capacity, m)
static const struct pd_field capacity_field[] = {
    { "blocks", PD_F_U32, PD_FF_REQ, C(blocks) }, { "block_size", PD_F_U32, PD_FF_REQ, C(block_size) }, { "max_seqs", PD_F_U32, PD_FF_REQ, C(max_seqs) },
    { "max_runs", PD_F_U32, PD_FF_REQ, C(max_runs) }, { "context", PD_F_U32, PD_FF_REQ, C(context) } };
static const struct pd_table capacity_table = { "capacity", capacity_field, N(capacity_field), -1 };

#define L(m) PD_FIELD(struct pd_load, m)
static const struct pd_field load_field[] = {
    { "runs", PD_F_U32, PD_FF_REQ, L(runs) }, { "waiting", PD_F_U32, PD_FF_REQ, L(waiting) }, { "seqs", PD_F_U32, PD_FF_REQ, L(seqs) },
    { "blocks_used", PD_F_U32, PD_FF_REQ, L(blocks_used) }, { "blocks_leased", PD_F_U32, PD_FF_REQ, L(blocks_leased) },
    { "prefill_tokens_ahead", PD_F_U64, PD_FF_REQ, L(prefill_tokens_ahead) }, { "kv_tokens", PD_F_U64, PD_FF_REQ, L(kv_tokens) } };
static const struct pd_table load_table = { "load", load_field, N(load_field), -1 };

/* A map inside the record, by its table. */
#define INSIDE(name, table, member) \
    static void enc_##name(const void *rec, struct pd_packer *k) { pd_fields_encode(&table, &worker(rec)->member, false, 0, 0, k); } \
    static int dec_##name(void *rec, struct pd_bin v, struct pd_unpack *u) { return pd_fields_decode(&table, v, &((struct pd_worker_rec *)rec)->member, u); }
INSIDE(layout, pd_layout_table, layout)
INSIDE(parallel, parallel_table, parallel)
INSIDE(capacity, capacity_table, capacity)
INSIDE(load, load_table, load)

#define LIST(name) \
    static void enc_##name(const void *rec, struct pd_packer *k) { pd_pack_strs(worker(rec)->name, worker(rec)->n_##name, k); } \
    static int dec_##name(void *rec, struct pd_bin v, struct pd_unpack *u) \
    { \
        struct pd_worker_rec *w = rec; \
        return pd_unpack_strs(#name, v, &w->name, &w->n_##name, u); \
    }
LIST(adapters)
LIST(via)
LIST(caps)

static void enc_fp(const void *rec, struct pd_packer *k)
{
    struct pd_fp_rec fp = { .fields = worker(rec)->fp_fields };
    memcpy(fp.sha, worker(rec)->fp_sha, sizeof fp.sha);
    pd_fields_encode(&pd_fp_table, &fp, false, 0, 0, k);
}

static int dec_fp(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_worker_rec *w = rec;
    struct pd_fp_rec fp = { .fields = { NULL, 0 } };
    int rc = pd_unpack_fp(v, &fp, u);
    w->fp_fields = fp.fields;
    memcpy(w->fp_sha, fp.sha, sizeof fp.sha);
    return rc;
}

#define W(m) PD_FIELD(struct pd_worker_rec, m)
#define MAP(name, m) { #name, PD_F_CUSTOM, PD_FF_REQ, W(m), .enc = enc_##name, .dec = dec_##name }
static const struct pd_field field[] = {
    { "worker", PD_F_STR, PD_FF_REQ, W(worker) }, { "role", PD_F_CHARS, PD_FF_REQ, W(role) }, { "state", PD_F_CHARS, PD_FF_REQ, W(state) },
    { "model_revision", PD_F_STR, PD_FF_REQ, W(model_revision) }, { "fingerprint", PD_F_CUSTOM, PD_FF_REQ, W(fp_sha), .enc = enc_fp, .dec = dec_fp },
    MAP(layout, layout), MAP(parallel, parallel), MAP(adapters, adapters), MAP(capacity, capacity), MAP(load, load),
    { "domain", PD_F_STR, PD_FF_REQ, W(domain) }, MAP(via, via), MAP(caps, caps), { "epoch", PD_F_U64, PD_FF_REQ, W(epoch) },
    { "numerics", PD_F_STR, PD_FF_REQ, W(numerics) }, { "listen", PD_F_STR, 0, W(listen) }, { "prefer", PD_F_CHARS, 0, W(prefer) },
    { "life", PD_F_BYTES, PD_FF_HAS, W(life), .aux = offsetof(struct pd_worker_rec, has_life) },
    { "boot", PD_F_BYTES, PD_FF_HAS, W(boot), .aux = offsetof(struct pd_worker_rec, has_boot) }, { "netns", PD_F_U64, PD_FF_NZ, W(netns) },
    { "pid", PD_F_U32, PD_FF_NZ, W(pid) }, { "threads", PD_F_U32, PD_FF_NZ, W(threads) }, { "cpu", PD_F_STR, 0, W(cpu) }, { "beat_us", PD_F_I64, PD_FF_NZ, W(beat_us) }, { "seq", PD_F_U64, PD_FF_NZ, W(seq) } };
static const struct pd_table table = { "worker", field, N(field), offsetof(struct pd_worker_rec, extra) };

int pd_worker_rec_encode(const struct pd_worker_rec *w, struct pd_buf *b, struct pd_err *e)
{
    if (!w->fp_fields.p)
        return pd_fail(e, PD_EFAIL, "worker: fingerprint.fields is missing");
    return pd_table_encode(&table, w, b, e);
}

static int one_of(const char *name, const char *v, const char *const *word, struct pd_err *e)
{
    for (const char *const *s = word; *s; s++)
        if (!strcmp(v, *s))
            return 0;
    return pd_fail(e, PD_ECORRUPT, "worker: %s '%s' is not known here (one of %s, %s%s%s is)", name, v, word[0], word[1], word[2] ? ", " : "", word[2] ? word[2] : "");
}

int pd_worker_rec_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_worker_rec *w, struct pd_err *e)
{
    static const char *const roles[] = { "prefill", "decode", "both", NULL }, *const states[] = { "ready", "draining", "starting", "gone", NULL }, *const sides[] = { "prefill", "decode", NULL };
    *w = (struct pd_worker_rec){ 0 };
    int rc = pd_table_decode(&table, rec, n, a, w, e);
    if (rc || (rc = one_of("role", w->role, roles, e)) || (rc = one_of("state", w->state, states, e)) ||
        (*w->prefer && (rc = one_of("prefer", w->prefer, sides, e))))
        return rc;
    if (!w->worker.n)
        return pd_fail(e, PD_ECORRUPT, "worker: its name is empty");
    if (!w->layout.block_size || w->layout.block_size != w->capacity.block_size)
        return pd_fail(e, PD_ECORRUPT, "worker: capacity.block_size %u and layout.block_size %u make no sense", w->capacity.block_size, w->layout.block_size);
    if (w->beat_us < 0)
        return pd_fail(e, PD_ECORRUPT, "worker: beat_us %lld makes no sense", (long long)w->beat_us);
    return 0;
}
