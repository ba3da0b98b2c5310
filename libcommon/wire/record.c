/* Kinds, raw look-ups, and chunk, token, result, error and event records. */
#include <stdio.h>
#include "fields.h"

static const char *const kind_name[] = { "unknown", "request", "offer", "kv", "chunk", "token", "result", "error", "event", "worker", "route",
    "hello", "accept", "done", "verified", "release", "status", "cancel", "slab", "kvevent", "carry", "outcome" };

const char *pd_kind_name(enum pd_kind k)
{
    return (unsigned)k < sizeof kind_name / sizeof *kind_name ? kind_name[k] : kind_name[0];
}

enum pd_kind pd_kind_of(const void *rec, size_t n)
{
    struct pd_bin v;
    struct pd_str s;
    if (pd_map_find(rec, n, "pd", &v) != 1)
        return PD_K_REQUEST;
    if (pd_get_str(v, &s))
        for (unsigned k = 1; k < sizeof kind_name / sizeof *kind_name; k++)
            if (pd_str_eq(s, kind_name[k]))
                return (enum pd_kind)k;
    return PD_K_UNKNOWN;
}

int pd_map_find(const void *map, size_t n, const char *key, struct pd_bin *out)
{
    struct pd_iter it;
    struct pd_str k;
    if (!pd_iter_open(&it, (struct pd_bin){ map, n }, PD_T_MAP))
        return PD_ECORRUPT;
    while (pd_iter_pair(&it, &k, out))
        if (pd_str_eq(k, key))
            return 1;
    return it.left ? PD_ECORRUPT : 0;
}

const char *pd_id_text(struct pd_bin id, char *out, size_t cap)
{
    struct pd_str s;
    int64_t i;
    if (id.p && pd_get_str(id, &s))
        snprintf(out, cap, "%.*s", (int)(s.n < cap ? s.n : cap), s.p);
    else if (id.p && pd_get_int(id, &i))
        snprintf(out, cap, "%lld", (long long)i);
    else
        snprintf(out, cap, "-");
    return out;
}

/* ---- chunk ---- */

#define C(m) PD_FIELD(struct pd_chunk, m)
static const struct pd_field chunk_field[] = {
    { "run", PD_F_RUN, PD_FF_REQ, C(run) }, { "gen", PD_F_BYTES, PD_FF_REQ, C(gen) }, { "index", PD_F_U32, PD_FF_REQ, C(index) },
    { "layer0", PD_F_U32, PD_FF_REQ, C(layer0) }, { "layers", PD_F_U32, PD_FF_REQ, C(layers) }, { "block0", PD_F_U32, PD_FF_REQ, C(block0) },
    { "blocks", PD_F_U32, PD_FF_REQ, C(blocks) }, { "codec", PD_F_CHARS, PD_FF_REQ, C(codec) }, { "raw_len", PD_F_U64, PD_FF_REQ, C(raw_len) },
    { "xxh3", PD_F_HASH, PD_FF_REQ, C(xxh3) }, { "data", PD_F_BIN, PD_FF_REQ, C(data) } };
enum { CHUNK_DATA = sizeof chunk_field / sizeof *chunk_field - 1 };
static const struct pd_table chunk_table = { "chunk", chunk_field, CHUNK_DATA + 1, -1 };

int pd_chunk_encode_head(const struct pd_chunk *c, struct pd_buf *b, struct pd_err *e)
{
    struct pd_packer k;
    size_t from = b->n;
    pd_pack_init(&k, b, e);
    pd_fields_encode(&chunk_table, c, true, 1ull << CHUNK_DATA, 1, &k);
    pd_pack_text(&k, "data");
    if (c->data.n > UINT32_MAX && !k.rc)
        k.rc = pd_fail(e, PD_EFAIL, "a chunk of %zu bytes is too long for a record", c->data.n);
    msgpack_pack_bin(&k.pk, c->data.n);
    if (k.rc)
        b->n = from;
    return k.rc;
}

int pd_chunk_decode(const void *rec, size_t n, struct pd_chunk *c, struct pd_err *e)
{
    *c = (struct pd_chunk){ 0 };
    return pd_table_decode(&chunk_table, rec, n, NULL, c, e);
}

/* ---- token ---- */

static void token_enc_top(const void *rec, struct pd_packer *k)
{
    const struct pd_token *t = rec;
    pd_pack_top(k, t->top, t->n_top);
}

static int token_dec_top(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_token *t = rec;
    return pd_unpack_top(v, &t->top, &t->n_top, u);
}

#define T(m) PD_FIELD(struct pd_token, m)
static const struct pd_field token_field[] = {
    { "run", PD_F_RUN, PD_FF_REQ, T(run) }, { "choice", PD_F_U32, PD_FF_NZ, T(choice) }, { "pos", PD_F_I32, PD_FF_REQ, T(pos) }, { "token", PD_F_I32, PD_FF_REQ, T(token) },
    { "text", PD_F_STR, PD_FF_REQ, T(text) }, { "logprob", PD_F_FLOAT, PD_FF_HAS, T(logprob), .aux = offsetof(struct pd_token, has_logprob) },
    { "top", PD_F_CUSTOM, PD_FF_COUNT, T(top), .aux = offsetof(struct pd_token, n_top), .enc = token_enc_top, .dec = token_dec_top }, { "t_us", PD_F_I64, PD_FF_REQ, T(t_us) } };
static const struct pd_table token_table = { "token", token_field, sizeof token_field / sizeof *token_field, -1 };

int pd_token_encode(const struct pd_token *t, struct pd_buf *b, struct pd_err *e) { return pd_table_encode(&token_table, t, b, e); }

int pd_token_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_token *t, struct pd_err *e)
{
    *t = (struct pd_token){ 0 };
    return pd_table_decode(&token_table, rec, n, a, t, e);
}

/* ---- result ---- */

static void result_enc_logprobs(const void *rec, struct pd_packer *k)
{
    const struct pd_result *r = rec;
    msgpack_pack_array(&k->pk, r->n_tokens);
    for (uint32_t i = 0; i < r->n_tokens; i++)
        pd_pack_float(k, "logprobs", r->logprobs[i]);
}

static int result_dec_logprobs(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_result *r = rec;
    struct pd_iter it;
    struct pd_bin x;
    if (!pd_iter_open(&it, v, PD_T_ARRAY))
        return pd_fail(u->e, u->code, "logprobs must be a list");
    float *p = pd_arena_alloc(u->a, (size_t)it.left, sizeof *p, u->e);
    if (!p)
        return PD_ENOMEM;
    for (r->n_logprobs = 0; pd_iter_next(&it, &x); r->n_logprobs++) {
        int rc = pd_unpack_float("logprobs", x, &p[r->n_logprobs], u);
        if (rc)
            return rc;
    }
    r->logprobs = p;
    return 0;
}

#define R(m) PD_FIELD(struct pd_result, m)
static const struct pd_field result_field[] = {
    { "run", PD_F_RUN, 0, R(run) }, { "id", PD_F_ID, 0, R(id) }, { "choice", PD_F_U32, PD_FF_REQ, R(choice) }, { "text", PD_F_STR, PD_FF_REQ, R(text) },
    { "tokens", PD_F_I32S, PD_FF_REQ, R(tokens), .aux = offsetof(struct pd_result, n_tokens) },
    { "logprobs", PD_F_CUSTOM, 0, R(logprobs), .enc = result_enc_logprobs, .dec = result_dec_logprobs },
    { "prompt_tokens", PD_F_U32, PD_FF_REQ, R(prompt_tokens) }, { "completion_tokens", PD_F_U32, PD_FF_REQ, R(completion_tokens) },
    { "cached_tokens", PD_F_U32, PD_FF_REQ, R(cached_tokens) }, { "transferred_tokens", PD_F_U32, PD_FF_REQ, R(transferred_tokens) },
    { "recomputed_tokens", PD_F_U32, PD_FF_REQ, R(recomputed_tokens) }, { "finish_reason", PD_F_CHARS, PD_FF_REQ, R(finish_reason) },
    { "mode", PD_F_CHARS, 0, R(mode) }, { "fallback", PD_F_STR, PD_FF_NULL | PD_FF_MEND, R(fallback) }, { "converted", PD_F_CHARS, 0, R(converted) },
    { "ttft_ms", PD_F_MS, PD_FF_NULL, R(ttft_ms) },
    { "tpot_ms", PD_F_MS, PD_FF_NULL, R(tpot_ms) }, { "e2e_ms", PD_F_MS, PD_FF_NULL, R(e2e_ms) }, { "kv_bytes", PD_F_U64, 0, R(kv_bytes) }, { "kv_ms", PD_F_MS, PD_FF_NULL, R(kv_ms) },
    { "fingerprint", PD_F_BYTES, PD_FF_HAS, R(fingerprint), .aux = offsetof(struct pd_result, has_fingerprint) },
    { "gen", PD_F_BYTES, PD_FF_HAS, R(gen), .aux = offsetof(struct pd_result, has_gen) },
    { "prefill_worker", PD_F_STR, 0, R(prefill_worker) }, { "decode_worker", PD_F_STR, 0, R(decode_worker) }, { "t", PD_F_MAP, 0, R(t) } };
static const struct pd_table result_table = { "result", result_field, sizeof result_field / sizeof *result_field, offsetof(struct pd_result, extra) };

int pd_result_encode(const struct pd_result *r, struct pd_buf *b, struct pd_err *e) { return pd_table_encode(&result_table, r, b, e); }

int pd_result_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_result *r, struct pd_err *e)
{
    *r = (struct pd_result){ .ttft_ms = -1, .tpot_ms = -1, .e2e_ms = -1, .kv_ms = -1 };
    int rc = pd_table_decode(&result_table, rec, n, a, r, e);
    if (!rc && r->logprobs && r->n_logprobs != r->n_tokens)
        rc = pd_fail(e, PD_ECORRUPT, "result: %u logprobs for %u tokens", r->n_logprobs, r->n_tokens);
    return rc;
}

/* ---- error ---- */

static void error_enc_code(const void *rec, struct pd_packer *k)
{
    msgpack_pack_int(&k->pk, ((const struct pd_error_rec *)rec)->code);
}

static int error_dec_code(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    int64_t i;
    int rc = pd_unpack_int("code", v, INT32_MIN, INT32_MAX, &i, u);
    if (!rc)
        ((struct pd_error_rec *)rec)->code = (int)i;
    return rc;
}

#define E(m) PD_FIELD(struct pd_error_rec, m)
static const struct pd_field error_field[] = {
    { "run", PD_F_RUN, 0, E(run) }, { "op", PD_F_BYTES, PD_FF_HAS, E(op), .aux = offsetof(struct pd_error_rec, has_op) },
    { "gen", PD_F_BYTES, PD_FF_HAS, E(gen), .aux = offsetof(struct pd_error_rec, has_gen) }, { "id", PD_F_ID, 0, E(id) }, { "class", PD_F_CHARS, PD_FF_REQ, E(class_) },
    { "code", PD_F_CUSTOM, PD_FF_REQ, E(code), .enc = error_enc_code, .dec = error_dec_code }, { "message", PD_F_STR, PD_FF_REQ | PD_FF_MEND, E(message) },
    { "action", PD_F_CHARS, 0, E(action) }, { "retry_after_ms", PD_F_I64, PD_FF_NZ, E(retry_after_ms) } };
static const struct pd_table error_table = { "error", error_field, sizeof error_field / sizeof *error_field, -1 };

int pd_error_encode(const struct pd_error_rec *r, struct pd_buf *b, struct pd_err *e) { return pd_table_encode(&error_table, r, b, e); }

int pd_error_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_error_rec *r, struct pd_err *e)
{
    *r = (struct pd_error_rec){ 0 };
    return pd_table_decode(&error_table, rec, n, a, r, e);
}

/* ---- event ---- */

#define V(m) PD_FIELD(struct pd_event, m)
static const struct pd_field event_field[] = {
    { "run", PD_F_RUN, 0, V(run) }, { "op", PD_F_BYTES, PD_FF_HAS, V(op), .aux = offsetof(struct pd_event, has_op) },
    { "parent", PD_F_BYTES, PD_FF_HAS, V(parent), .aux = offsetof(struct pd_event, has_parent) }, { "state", PD_F_CHARS, PD_FF_REQ, V(state) },
    { "role", PD_F_CHARS, 0, V(role) }, { "where", PD_F_CHARS, 0, V(where) }, { "worker", PD_F_STR, 0, V(worker) }, { "domain", PD_F_STR, 0, V(domain) },
    { "model_revision", PD_F_STR, 0, V(model_revision) }, { "gen", PD_F_BYTES, PD_FF_HAS, V(gen), .aux = offsetof(struct pd_event, has_gen) },
    { "lease", PD_F_BYTES, PD_FF_HAS, V(lease), .aux = offsetof(struct pd_event, has_lease) }, { "bytes", PD_F_U64, PD_FF_NZ, V(bytes) },
    { "choice", PD_F_U32, PD_FF_NZ, V(choice) }, { "pos", PD_F_U32, PD_FF_NZ, V(pos) }, { "tokens", PD_F_U32, PD_FF_NZ, V(tokens) },
    { "t_us", PD_F_I64, PD_FF_REQ, V(t_us) }, { "mono_us", PD_F_I64, PD_FF_REQ, V(mono_us) }, { "cause", PD_F_STR, PD_FF_MEND, V(cause) } };
static const struct pd_table event_table = { "event", event_field, sizeof event_field / sizeof *event_field, -1 };

int pd_event_encode(const struct pd_event *v, struct pd_buf *b, struct pd_err *e) { return pd_table_encode(&event_table, v, b, e); }

int pd_event_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_event *v, struct pd_err *e)
{
    *v = (struct pd_event){ 0 };
    return pd_table_decode(&event_table, rec, n, a, v, e);
}
