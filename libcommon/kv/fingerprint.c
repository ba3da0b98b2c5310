#include <inttypes.h>
#include <stdio.h>
#include "../model/dtype.h"
#include "../wire/frame.h"
#include "../wire/pack.h"
#include "../wire/record.h"
#include "convert.h"
#include "fingerprint.h"

/* The map is written must-fields first, in the order below, then the advisory ones: must_seed is taken over the bytes between. */
static const char *const advisory[] = { "numerics", "software" };

/* Pairs of the map, counted. */
struct pairs { struct pd_packer k; uint32_t n; };

static struct pd_packer *key(struct pairs *m, const char *name)
{
    m->n++;
    pd_pack_text(&m->k, name);
    return &m->k;
}
static void put_str(struct pairs *m, const char *name, const char *v) { pd_pack_text(key(m, name), v); }
static void put_int(struct pairs *m, const char *name, int64_t v) { msgpack_pack_int64(&key(m, name)->pk, v); }
static void put_f64(struct pairs *m, const char *name, double v) { pd_pack_float(key(m, name), name, v); }
static void put_bool(struct pairs *m, const char *name, bool v) { key(m, name); v ? msgpack_pack_true(&m->k.pk) : msgpack_pack_false(&m->k.pk); }
static void put_bin(struct pairs *m, const char *name, const uint8_t *p, size_t n) { pd_pack_bin(key(m, name), p, n); }
static void put_none(struct pairs *m, const char *name) { msgpack_pack_array(&key(m, name)->pk, 0); }

static const char *rope_type_name(enum pd_rope_scaling s)
{
    return s == PD_ROPE_LINEAR ? "linear" : s == PD_ROPE_LLAMA3 ? "llama3" : "plain";
}

static int put_rope(struct pairs *k, const struct pd_rope *r, struct pd_err *e)
{
    put_str(k, "rope_type", rope_type_name(r->scaling));
    put_f64(k, "rope_theta", r->theta);
    put_int(k, "rope_dims", r->n_rot);
    put_str(k, "rope_basis", r->pairs ? "pairs" : "halves");
    if (r->scaling != PD_ROPE_NONE) {
        put_f64(k, "rope_factor", r->factor);
        put_int(k, "rope_original_ctx", r->original_ctx);
    }
    if (r->scaling == PD_ROPE_LLAMA3) {
        put_f64(k, "rope_low_freq_factor", r->low_freq_factor);
        put_f64(k, "rope_high_freq_factor", r->high_freq_factor);
    }
    if (r->freq_factors && r->n_rot > 0) {
        uint8_t sha[PD_SHA_LEN];
        int rc = pd_sha256(r->freq_factors, (size_t)(r->n_rot / 2) * sizeof(float), sha, e);
        if (rc)
            return rc;
        put_bin(k, "rope_freq_factors", sha, sizeof sha);
    }
    return 0;
}

static int put_must(struct pairs *k, const struct pd_model *m, const struct pd_fp_params *p, struct pd_err *e)
{
    const struct pd_config *c = &m->cfg;
    const uint8_t *tok = m->tok ? pd_tokenizer_digest(m->tok) : NULL;
    static const uint8_t none[PD_SHA_LEN];
    if (!memcmp(m->digest, none, sizeof none))
        return pd_fail(e, PD_EFAIL, "fingerprint: model '%s' was opened without a digest of its weights", c->name);
    put_str(k, "arch", c->arch);
    put_int(k, "layers", c->n_layers);
    put_int(k, "heads", c->n_heads);
    put_int(k, "kv_heads", c->n_kv_heads);
    put_int(k, "head_dim", c->head_dim);
    put_int(k, "hidden", c->n_embd);
    put_int(k, "ff", c->n_ff);
    put_int(k, "vocab", c->n_vocab);
    put_f64(k, "rms_eps", c->rms_eps);
    put_bool(k, "tied_embeddings", c->tied);
    put_bin(k, "weights_digest", m->digest, PD_SHA_LEN);
    put_str(k, "weight_quant", m->quant);
    put_bin(k, "tokenizer_digest", tok ? tok : none, PD_SHA_LEN);
    put_bin(k, "chat_digest", m->chat.digest, PD_SHA_LEN);
    put_str(k, "kv_dtype", pd_kv_dtype_name(p->kv_dtype));
    put_str(k, "kv_quant", "none");
    put_str(k, "kv_scale", "none");
    put_int(k, "block_size", p->block_size);
    put_str(k, "layout", "layer-major");
    put_str(k, "order", "HND");
    int rc = put_rope(k, &c->rope, e);
    if (rc)
        return rc;
    put_int(k, "sliding_window", 0);
    put_str(k, "attention", "full");
    put_bool(k, "qk_norm", false);
    put_f64(k, "soft_cap", 0);
    put_int(k, "experts", 0);
    put_int(k, "tp", 1);
    put_int(k, "pp", 1);
    put_int(k, "ep", 1);
    put_none(k, "adapters");
    put_none(k, "multimodal");
    put_str(k, "cache_salt_rule", "in-block-hash");
    put_str(k, "hash", "xxh3-128");
    put_str(k, "hash_seed", "xxh3-64-of-must");
    put_int(k, "record_version", 1);
    return 0;
}

int pd_fp_make(const struct pd_model *m, const struct pd_fp_params *p, struct pd_fp *fp, struct pd_err *e)
{
    struct pd_buf pairs = { 0 };
    struct pairs k = { .n = 0 };
    int rc;
    memset(fp, 0, sizeof *fp);
    if (!pd_kv_dtype_name(p->kv_dtype))
        return pd_fail(e, PD_EUSAGE, "fingerprint: KV dtype %d is not " PD_KV_DTYPE_LIST, (int)p->kv_dtype);
    pd_pack_init(&k.k, &pairs, e);
    rc = put_must(&k, m, p, e);
    if (rc)
        goto out;
    size_t n_must = pairs.n;
    put_str(&k, advisory[0], p->numerics ? p->numerics : "unknown");
    put_str(&k, advisory[1], p->software ? p->software : "unknown");
    if ((rc = k.k.rc))
        goto out;
    uint8_t head[3] = { 0xde, (uint8_t)(k.n >> 8), (uint8_t)k.n };
    if ((rc = pd_buf_add(&fp->map, head, sizeof head, e)) || (rc = pd_buf_add(&fp->map, pairs.p, pairs.n, e)) ||
        (rc = pd_sha256(fp->map.p, fp->map.n, fp->sha, e)))
        goto out;
    fp->must_seed = pd_xxh3(pairs.p, n_must, 0);
out:
    pd_buf_free(&pairs);
    if (rc)
        pd_fp_free(fp);
    return rc;
}

int pd_fp_must_seed(struct pd_bin map, uint64_t *seed, struct pd_err *e)
{
    struct pd_bin v;
    size_t key = 1 + strlen(advisory[0]), head = map.n && (map.p[0] & 0xf0) == 0x80 ? 1 : map.n && map.p[0] == 0xde ? 3 : 0;
    if (!map.p || !head || pd_map_find(map.p, map.n, advisory[0], &v) != 1 || v.p < map.p + head + key || v.p[-(ptrdiff_t)key] != (uint8_t)(0xa0 | (key - 1)))
        return pd_fail(e, PD_ECORRUPT, "fingerprint has no field '%s' where it belongs", advisory[0]);
    *seed = pd_xxh3(map.p + head, (size_t)(v.p - map.p) - head - key, 0);
    return 0;
}

/* The map with the raw value of one key replaced. */
static int splice(struct pd_buf *map, const char *key, const struct pd_buf *value, struct pd_err *e)
{
    struct pd_bin v;
    struct pd_buf out = { 0 };
    if (pd_map_find(map->p, map->n, key, &v) != 1)
        return pd_fail(e, PD_ECORRUPT, "fingerprint has no field '%s'", key);
    size_t at = (size_t)(v.p - map->p), after = at + v.n;
    if (pd_buf_add(&out, map->p, at, e) || pd_buf_add(&out, value->p, value->n, e) || pd_buf_add(&out, map->p + after, map->n - after, e)) {
        pd_buf_free(&out);
        return PD_ENOMEM;
    }
    pd_buf_free(map);
    *map = out;
    return 0;
}

int pd_fp_relayout(struct pd_bin map, uint32_t block_size, const char *order, struct pd_buf *out, struct pd_err *e)
{
    struct pd_packer k;
    struct pd_buf size = { 0 }, name = { 0 };
    uint64_t seed;
    int rc = pd_fp_must_seed(map, &seed, e);    /* the canonical form, or an error */
    rc = rc ? rc : pd_buf_add(out, map.p, map.n, e);
    pd_pack_init(&k, &size, e);
    msgpack_pack_int64(&k.pk, block_size);
    rc = rc ? rc : k.rc;
    pd_pack_init(&k, &name, e);
    pd_pack_text(&k, order);
    rc = rc ? rc : k.rc;
    rc = rc ? rc : splice(out, "block_size", &size, e);
    rc = rc ? rc : splice(out, "order", &name, e);
    pd_buf_free(&size);
    pd_buf_free(&name);
    return rc;
}

void pd_fp_free(struct pd_fp *fp)
{
    pd_buf_free(&fp->map);
    memset(fp, 0, sizeof *fp);
}

/* Values come off the wire: whatever they hold, the text is short and printable. */
static const char *show(const msgpack_object *v, char *out, size_t cap)
{
    size_t n;
    switch (v->type) {
    case MSGPACK_OBJECT_NIL: snprintf(out, cap, "null"); break;
    case MSGPACK_OBJECT_BOOLEAN: snprintf(out, cap, "%s", v->via.boolean ? "true" : "false"); break;
    case MSGPACK_OBJECT_POSITIVE_INTEGER: snprintf(out, cap, "%" PRIu64, v->via.u64); break;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER: snprintf(out, cap, "%" PRId64, v->via.i64); break;
    case MSGPACK_OBJECT_FLOAT32: case MSGPACK_OBJECT_FLOAT64: snprintf(out, cap, "%.9g", v->via.f64); break;
    case MSGPACK_OBJECT_STR:
        n = v->via.str.size < 40 ? v->via.str.size : 40;
        n = n < cap - 1 ? n : cap - 1;
        for (size_t i = 0; i < n; i++)
            out[i] = v->via.str.ptr[i] >= 0x20 && v->via.str.ptr[i] < 0x7f ? v->via.str.ptr[i] : '?';
        out[n] = 0;
        break;
    case MSGPACK_OBJECT_BIN:
        n = v->via.bin.size < 6 ? v->via.bin.size : 6;
        pd_hex((const uint8_t *)v->via.bin.ptr, n, out);
        break;
    case MSGPACK_OBJECT_ARRAY: snprintf(out, cap, "a list of %u", v->via.array.size); break;
    case MSGPACK_OBJECT_MAP: snprintf(out, cap, "a map of %u", v->via.map.size); break;
    default: snprintf(out, cap, "an unknown type"); break;
    }
    return out;
}

static int parse(struct pd_bin b, msgpack_unpacked *u, const char *side, struct pd_err *e)
{
    struct pd_frame_scan scan = { 0 };
    struct pd_err why = { 0 };
    size_t len = 0, off = 0;
    if (!b.p || pd_frame_next(&scan, b.p, b.n, PD_MAX_RECORD_DEFAULT, &len, &why) != 1 || len != b.n || pd_frame_check(b.p, b.n, &why))
        return pd_fail(e, PD_ECORRUPT, "%s fingerprint is malformed: %s", side, why.msg[0] ? why.msg : "not one whole map");
    if (msgpack_unpack_next(u, (const char *)b.p, b.n, &off) != MSGPACK_UNPACK_SUCCESS || u->data.type != MSGPACK_OBJECT_MAP)
        return pd_fail(e, PD_ECORRUPT, "%s fingerprint is malformed", side);
    if (!u->data.via.map.size || u->data.via.map.size > 256)
        return pd_fail(e, PD_ECORRUPT, "%s fingerprint has %u fields (1 to 256 make sense)", side, u->data.via.map.size);
    return 0;
}

static const msgpack_object *find(const msgpack_object_map *m, const msgpack_object_str *name)
{
    for (uint32_t i = 0; i < m->size; i++) {
        const msgpack_object_str *k = &m->ptr[i].key.via.str;
        if (k->size == name->size && !memcmp(k->ptr, name->ptr, k->size))
            return &m->ptr[i].val;
    }
    return NULL;
}

static bool is_advisory(const msgpack_object_str *k)
{
    for (size_t i = 0; i < sizeof advisory / sizeof *advisory; i++)
        if (k->size == strlen(advisory[i]) && !memcmp(k->ptr, advisory[i], k->size))
            return true;
    return false;
}

static void tell(struct pd_err *e, const msgpack_object *name, const msgpack_object *a, const msgpack_object *b)
{
    char n[64], va[64], vb[64];
    pd_fail(e, PD_EINCOMPAT, "%s differs (prefill %s, decode %s)", show(name, n, sizeof n), a ? show(a, va, sizeof va) : "has none", b ? show(b, vb, sizeof vb) : "has none");
}

enum pd_fp_verdict pd_fp_compare(struct pd_bin prefill, struct pd_bin decode, struct pd_err *e) { return pd_fp_compare_with(prefill, decode, 0, NULL, e); }

enum pd_fp_verdict pd_fp_compare_with(struct pd_bin prefill, struct pd_bin decode, unsigned admit, unsigned *converts, struct pd_err *e)
{
    msgpack_unpacked ua, ub;
    enum pd_fp_verdict v = PD_FP_DIFFERS;
    struct pd_err soft = { 0 };
    unsigned bridged = 0;
    msgpack_unpacked_init(&ua);
    msgpack_unpacked_init(&ub);
    if (parse(prefill, &ua, "prefill", e) || parse(decode, &ub, "decode", e))
        goto out;
    const msgpack_object_map *a = &ua.data.via.map, *b = &ub.data.via.map;
    for (int pass = 0; pass < 2; pass++) {          /* all of a's fields, then those that only b has */
        const msgpack_object_map *m = pass ? b : a, *other = pass ? a : b;
        for (uint32_t i = 0; i < m->size; i++) {
            const msgpack_object *mine = &m->ptr[i].val, *its = find(other, &m->ptr[i].key.via.str);
            if (its && (pass || msgpack_object_equal(*mine, *its)))
                continue;
            const msgpack_object_str *name = &m->ptr[i].key.via.str;
            unsigned bit = its && !pass ? pd_conv_field(name->ptr, name->size) & admit : 0;
            bridged |= bit;
            if (bit)
                continue;
            if (!is_advisory(name)) {
                tell(e, &m->ptr[i].key, pass ? its : mine, pass ? mine : its);
                goto out;
            }
            struct pd_err one, before = soft;
            tell(&one, &m->ptr[i].key, pass ? its : mine, pass ? mine : its);
            if (before.code)
                pd_fail(&soft, PD_EINCOMPAT, "%.240s; %.240s", before.msg, one.msg);
            else
                soft = one;
        }
    }
    v = soft.code ? PD_FP_ADVISORY : PD_FP_SAME;
    if (converts)
        *converts = bridged;
    if (soft.code && e)
        *e = soft;
out:
    msgpack_unpacked_destroy(&ua);
    msgpack_unpacked_destroy(&ub);
    return v;
}
