#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include "../base/utf8.h"
#include "config.h"

/* Keys whose presence with another value than the neutral one means another computation than ours. */
static const struct { const char *suffix; double neutral; const char *what; } foreign[] = {
    { "expert_count", 0, "mixture of experts" }, { "expert_used_count", 0, "mixture of experts" },
    { "attn_logit_softcapping", 0, "soft-capped attention" }, { "final_logit_softcapping", 0, "soft-capped logits" },
    { "logit_scale", 1, "scaled logits" }, { "embedding_scale", 1, "a scaled embedding" }, { "residual_scale", 1, "scaled residuals" },
    { "attention.clamp_kqv", 0, "clamped attention" }, { "attention.max_alibi_bias", 0, "ALiBi" },
    { "rope.scaling.attn_factor", 1, "scaled attention" }, { "rope.scaling.yarn_log_multiplier", 0, "YaRN" },
};

static const char *arch_key(char key[96], const char *arch, const char *suffix)
{
    snprintf(key, 96, "%s.%s", arch, suffix);
    return key;
}

/* A required (dflt < 0) or defaulted integer in [lo, hi]. */
static int get_int(const struct pd_gguf *g, const struct pd_config *c, const char *suffix, int lo, int hi, int dflt, int *v, struct pd_err *e)
{
    char key[96];
    int64_t x = dflt;
    int rc = pd_gguf_get_int(g, arch_key(key, c->arch, suffix), lo, hi, &x, e);
    if (rc < 0)
        return rc;
    if (!rc && dflt < 0)
        return pd_fail(e, PD_ECORRUPT, "%s: the key '%s' is missing: the file is not a whole model", g->path, key);
    *v = (int)x;
    return 0;
}

/* A required (dflt NAN) or defaulted number in [lo, hi]. */
static int get_num(const struct pd_gguf *g, const struct pd_config *c, const char *suffix, double lo, double hi, double dflt, double *v, struct pd_err *e)
{
    char key[96];
    double x = dflt;
    int rc = pd_gguf_get_f64(g, arch_key(key, c->arch, suffix), &x, e);
    if (rc < 0)
        return rc;
    if (!rc && isnan(dflt))
        return pd_fail(e, PD_ECORRUPT, "%s: the key '%s' is missing: the file is not a whole model", g->path, key);
    if (x < lo || x > hi)
        return pd_fail(e, PD_ECORRUPT, "%s: '%s' at byte %" PRIu64 " is %g, possible are %g to %g", g->path, key, pd_gguf_find(g, key)->offset, x, lo, hi);
    *v = x;
    return 0;
}

static int read_family(const struct pd_gguf *g, struct pd_config *c, struct pd_err *e)
{
    struct pd_str s = { 0 };
    int rc = pd_gguf_get_str(g, "general.architecture", &s, e);
    if (rc < 0)
        return rc;
    if (!rc)
        return pd_fail(e, PD_ECORRUPT, "%s: the key 'general.architecture' is missing: the file is not a model", g->path);
    struct pd_gguf_shown shown = pd_gguf_show(s);
    if (s.n >= sizeof c->arch || memchr(s.p, 0, s.n) || !(c->family = pd_family_find(shown.s)))
        return pd_fail(e, PD_EINCOMPAT, "%s: general.architecture '%s' is not supported; supported: " PD_FAMILY_LIST, g->path, shown.s);
    memcpy(c->arch, s.p, s.n);
    return 0;
}

/* general.name, or what the file is called without its folder and ".gguf". */
static int read_name(const struct pd_gguf *g, struct pd_config *c, struct pd_err *e)
{
    struct pd_str s = { 0 };
    int rc = pd_gguf_get_str(g, "general.name", &s, e);
    if (rc < 0)
        return rc;
    if (!rc || !s.n) {
        const char *slash = strrchr(g->path, '/');
        s.p = slash ? slash + 1 : g->path;
        s.n = strlen(s.p);
        if (s.n > 5 && !memcmp(s.p + s.n - 5, ".gguf", 5))
            s.n -= 5;
    }
    if (s.n >= sizeof c->name)
        s.n = pd_utf8_complete(s.p, sizeof c->name - 1);
    bool utf8 = pd_utf8_invalid(s.p, s.n) < 0;
    for (size_t i = 0; i < s.n; i++) {      /* it is shown to people and travels in records */
        unsigned char b = (unsigned char)s.p[i];
        c->name[i] = b < 0x20 || b == 0x7f || (b >= 0x80 && !utf8) ? '?' : (char)b;
    }
    return 0;
}

static int refuse_foreign(const struct pd_gguf *g, const struct pd_config *c, struct pd_err *e)
{
    char key[96];
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
        double x = foreign[i].neutral;
        if (pd_gguf_get_f64(g, arch_key(key, c->arch, foreign[i].suffix), &x, e) < 0)
            return e ? e->code : PD_ECORRUPT;
        if (x != foreign[i].neutral)
            return pd_fail(e, PD_EINCOMPAT, "%s: '%s' is %g: %s is not supported", g->path, key, x, foreign[i].what);
    }
    bool causal = true, parallel = false;
    int rc;
    if ((rc = pd_gguf_get_bool(g, arch_key(key, c->arch, "attention.causal"), &causal, e)) < 0)
        return rc;
    if (!causal)
        return pd_fail(e, PD_EINCOMPAT, "%s: '%s' is false: an encoder is not supported", g->path, key);
    if ((rc = pd_gguf_get_bool(g, arch_key(key, c->arch, "use_parallel_residual"), &parallel, e)) < 0)
        return rc;
    if (parallel)
        return pd_fail(e, PD_EINCOMPAT, "%s: '%s' is true: parallel residuals are not supported", g->path, key);
    int64_t window = INT32_MAX;
    if ((rc = pd_gguf_get_int(g, arch_key(key, c->arch, "attention.sliding_window"), 0, INT32_MAX, &window, e)) < 0)
        return rc;
    if (window > 0 && window < c->n_ctx)
        return pd_fail(e, PD_EINCOMPAT, "%s: '%s' is %" PRId64 ", below the context of %d: sliding windows are not supported", g->path, key, window, c->n_ctx);
    return 0;
}

/* head_count_kv: one number, or one a layer (then all must agree). */
static int read_kv_heads(const struct pd_gguf *g, struct pd_config *c, struct pd_err *e)
{
    char key[96];
    const struct pd_gguf_kv *kv = pd_gguf_find(g, arch_key(key, c->arch, "attention.head_count_kv"));
    if (!kv || kv->type != PD_GT_ARR)
        return get_int(g, c, "attention.head_count_kv", 1, c->n_heads, c->n_heads, &c->n_kv_heads, e);
    int32_t *v = NULL;
    size_t n = 0;
    int rc = pd_gguf_get_i32s(g, key, &v, &n, e);
    if (rc < 0)
        return rc;
    rc = 0;
    if (n != (size_t)c->n_layers)
        rc = pd_fail(e, PD_ECORRUPT, "%s: '%s' has %zu values for %d layers", g->path, key, n, c->n_layers);
    for (size_t i = 0; !rc && i < n; i++) {
        if (v[i] < 1 || v[i] > c->n_heads)
            rc = pd_fail(e, PD_ECORRUPT, "%s: '%s' of layer %zu is %d, possible are 1 to %d", g->path, key, i, v[i], c->n_heads);
        else if (v[i] != v[0])
            rc = pd_fail(e, PD_EINCOMPAT, "%s: '%s' differs by layer (%d, then %d): that is not supported", g->path, key, v[0], v[i]);
    }
    if (!rc)
        c->n_kv_heads = v[0];
    pd_free(v);
    return rc;
}

static int read_heads(const struct pd_gguf *g, struct pd_config *c, struct pd_err *e)
{
    int value_dim, rc;
    if ((rc = get_int(g, c, "attention.head_count", 1, 1024, -1, &c->n_heads, e)) || (rc = read_kv_heads(g, c, e)))
        return rc;
    if (c->n_heads % c->n_kv_heads)
        return pd_fail(e, PD_ECORRUPT, "%s: %d attention heads do not divide among %d KV heads", g->path, c->n_heads, c->n_kv_heads);
    int dflt = c->n_embd % c->n_heads ? -1 : c->n_embd / c->n_heads;
    if ((rc = get_int(g, c, "attention.key_length", 1, 65536, dflt, &c->head_dim, e)) || (rc = get_int(g, c, "attention.value_length", 1, 65536, c->head_dim, &value_dim, e)))
        return rc;
    if (value_dim != c->head_dim)
        return pd_fail(e, PD_EINCOMPAT, "%s: attention.value_length %d differs from key_length %d: that is not supported", g->path, value_dim, c->head_dim);
    if (c->head_dim % 16 || c->head_dim > 256)
        return pd_fail(e, PD_EINCOMPAT, "%s: head_dim %d is not supported; a multiple of 16 up to 256 is", g->path, c->head_dim);
    return 0;
}

/* Llama 3.1 (https://huggingface.co/meta-llama/Llama-3.1-8B config.json, rope_type llama3): long waves are slowed by `factor`, short ones kept, those
 * between blended. The result is the divisor of each frequency, as rope_freqs.weight holds it. */
static int llama3_factors(struct pd_rope *r, struct pd_err *e)
{
    if (!(r->freq_factors = pd_calloc((size_t)r->n_rot / 2, sizeof *r->freq_factors, "rope factors", e)))
        return PD_ENOMEM;
    for (int i = 0; i < r->n_rot / 2; i++) {
        double wavelen = 2 * M_PI * pow(r->theta, 2.0 * i / r->n_rot), turns = r->original_ctx / wavelen;
        double blend = (turns - r->low_freq_factor) / (r->high_freq_factor - r->low_freq_factor);
        blend = blend < 0 ? 0 : blend > 1 ? 1 : blend;
        r->freq_factors[i] = (float)(1 / ((1 - blend) / r->factor + blend));
    }
    return 0;
}

/* rope_freqs.weight: the divisors worked out by whoever converted the model. */
static int factors_from_tensor(const struct pd_gguf *g, struct pd_rope *r, struct pd_err *e)
{
    const struct pd_gguf_tensor *t = pd_gguf_tensor(g, "rope_freqs.weight");
    if (!t)
        return 0;
    if (t->type != PD_F32 || t->n_dims != 1 || t->ne[0] != (uint64_t)r->n_rot / 2)
        return pd_fail(e, PD_ECORRUPT, "%s: rope_freqs.weight is %s with %" PRIu64 " elements, expected F32 with %d", g->path, pd_ggml_type_name(t->type), t->ne[0], r->n_rot / 2);
    if (!r->freq_factors && !(r->freq_factors = pd_calloc((size_t)r->n_rot / 2, sizeof *r->freq_factors, "rope factors", e)))
        return PD_ENOMEM;
    int rc = pd_gguf_read(g, t->at, r->freq_factors, t->bytes, e);
    if (rc)
        return rc;
    for (int i = 0; i < r->n_rot / 2; i++)
        if (!isfinite(r->freq_factors[i]) || r->freq_factors[i] < 1e-6f)
            return pd_fail(e, PD_ECORRUPT, "%s: rope_freqs.weight[%d] is %g, it must be finite and positive", g->path, i, (double)r->freq_factors[i]);
    if (r->scaling == PD_ROPE_NONE)
        r->scaling = PD_ROPE_LLAMA3;
    return 0;
}

static int read_rope(const struct pd_gguf *g, struct pd_config *c, struct pd_err *e)
{
    struct pd_rope *r = &c->rope;
    struct pd_str type = { "none", 4 };
    char key[96];
    int rc;
    r->pairs = c->family->rope_pairs;
    if ((rc = get_int(g, c, "rope.dimension_count", 2, c->head_dim, c->head_dim, &r->n_rot, e)) || (rc = get_num(g, c, "rope.freq_base", 1, 1e12, 10000, &r->theta, e)))
        return rc;
    if (r->n_rot % 2)
        return pd_fail(e, PD_ECORRUPT, "%s: %s.rope.dimension_count is %d, it must be even", g->path, c->arch, r->n_rot);
    double linear;      /* the key of older files */
    if ((rc = get_num(g, c, "rope.scale_linear", 1e-3, 1e6, 1, &linear, e)) || (rc = get_num(g, c, "rope.scaling.factor", 1e-3, 1e6, linear, &r->factor, e)))
        return rc;
    if (linear != 1)
        type = (struct pd_str){ "linear", 6 };
    if ((rc = pd_gguf_get_str(g, arch_key(key, c->arch, "rope.scaling.type"), &type, e)) < 0)
        return rc;
    if (pd_str_eq(type, "none")) {
        r->factor = 0;
    } else if (pd_str_eq(type, "linear")) {
        r->scaling = PD_ROPE_LINEAR;
    } else if (pd_str_eq(type, "llama3")) {
        r->scaling = PD_ROPE_LLAMA3;
        if ((rc = get_num(g, c, "rope.scaling.low_freq_factor", 1e-3, 1e6, 1, &r->low_freq_factor, e)) ||
            (rc = get_num(g, c, "rope.scaling.high_freq_factor", 1e-3, 1e6, 4, &r->high_freq_factor, e)) ||
            (rc = get_int(g, c, "rope.scaling.original_context_length", 1, 1 << 24, 8192, &r->original_ctx, e)))
            return rc;
        if (r->high_freq_factor <= r->low_freq_factor)
            return pd_fail(e, PD_ECORRUPT, "%s: rope.scaling.high_freq_factor %g must be above low_freq_factor %g", g->path, r->high_freq_factor, r->low_freq_factor);
        if ((rc = llama3_factors(r, e)))
            return rc;
    } else {
        return pd_fail(e, PD_EINCOMPAT, "%s: '%s' is '%s'; supported: none, linear, llama3", g->path, key, pd_gguf_show(type).s);
    }
    return factors_from_tensor(g, r, e);
}

static int read_vocab(const struct pd_gguf *g, struct pd_config *c, struct pd_err *e)
{
    const struct pd_gguf_tensor *t = pd_gguf_tensor(g, "token_embd.weight");
    int vocab;
    if (!t)
        return pd_fail(e, PD_ECORRUPT, "%s: tensor 'token_embd.weight' is missing: the file is not a whole model", g->path);
    if (t->n_dims != 2 || t->ne[0] != (uint64_t)c->n_embd || t->ne[1] > 1 << 21)
        return pd_fail(e, PD_ECORRUPT, "%s: token_embd.weight is %" PRIu64 " x %" PRIu64 ", expected embedding_length %d x the vocabulary (at most 2097152)", g->path, t->ne[0], t->ne[1], c->n_embd);
    c->n_vocab = (int)t->ne[1];
    int rc = get_int(g, c, "vocab_size", 1, 1 << 21, c->n_vocab, &vocab, e);
    if (!rc && vocab != c->n_vocab)
        return pd_fail(e, PD_ECORRUPT, "%s: %s.vocab_size is %d, token_embd.weight has %d rows", g->path, c->arch, vocab, c->n_vocab);
    c->tied = !pd_gguf_tensor(g, "output.weight");
    return rc;
}

int pd_config_from_gguf(const struct pd_gguf *g, struct pd_config *c, struct pd_err *e)
{
    double eps;
    int rc;
    memset(c, 0, sizeof *c);
    if ((rc = read_family(g, c, e)) || (rc = read_name(g, c, e)) ||
        (rc = get_int(g, c, "block_count", 1, 1024, -1, &c->n_layers, e)) ||
        (rc = get_int(g, c, "context_length", 1, 1 << 24, -1, &c->n_ctx, e)) ||
        (rc = get_int(g, c, "embedding_length", 16, 1 << 17, -1, &c->n_embd, e)) ||
        (rc = get_int(g, c, "feed_forward_length", 16, 1 << 20, -1, &c->n_ff, e)) ||
        (rc = get_num(g, c, "attention.layer_norm_rms_epsilon", 0, 1, NAN, &eps, e)) ||
        (rc = read_heads(g, c, e)) || (rc = refuse_foreign(g, c, e)) || (rc = read_rope(g, c, e)) || (rc = read_vocab(g, c, e)))
        goto out;
    c->rms_eps = (float)eps;
    if (c->n_embd % 16 || c->n_ff % 16)
        rc = pd_fail(e, PD_EINCOMPAT, "%s: %s %d is not supported; a multiple of 16 is", g->path, c->n_embd % 16 ? "embedding_length" : "feed_forward_length", c->n_embd % 16 ? c->n_embd : c->n_ff);
out:
    if (rc)
        pd_config_free(c);
    return rc;
}

void pd_config_free(struct pd_config *c)
{
    pd_free(c->rope.freq_factors);
    c->rope.freq_factors = NULL;
}

void pd_rope_table(const struct pd_rope *r, int pos0, int n, float *out)
{
    int half = r->n_rot / 2;
    for (int i = 0; i < half; i++) {
        double freq = pow(r->theta, -2.0 * i / r->n_rot);
        if (r->freq_factors)
            freq /= r->freq_factors[i];
        if (r->scaling == PD_ROPE_LINEAR)
            freq /= r->factor;
        for (int p = 0; p < n; p++) {
            double angle = (pos0 + p) * freq;
            out[2 * ((size_t)p * (size_t)half + (size_t)i)] = (float)cos(angle);
            out[2 * ((size_t)p * (size_t)half + (size_t)i) + 1] = (float)sin(angle);
        }
    }
}

uint64_t pd_config_dim(const struct pd_config *c, enum pd_tensor_dim d)
{
    switch (d) {
    case PD_D_EMBD: return (uint64_t)c->n_embd;
    case PD_D_FF: return (uint64_t)c->n_ff;
    case PD_D_VOCAB: return (uint64_t)c->n_vocab;
    case PD_D_HEADS: return (uint64_t)c->n_heads * (uint64_t)c->head_dim;
    case PD_D_KV: return (uint64_t)c->n_kv_heads * (uint64_t)c->head_dim;
    case PD_D_ROT: return (uint64_t)c->rope.n_rot / 2;
    default: return 1;
    }
}
