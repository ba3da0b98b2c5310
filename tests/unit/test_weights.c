/* Packed weights read back by the layout that kernels.h states; a plain forward pass over them against Hugging Face's logits; what must be refused. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/stat.h>
#include <cmocka.h>
#include "files.h"
#include "gguf_build.h"
#include "../../libcommon/model/pack.h"
#include "../../libcommon/model/weights.h"

static const struct { const char *name; const char *quant; enum pd_pack numerics; int n_qkv; bool tied; } tiny[] = {
    { "f32", "F32", PD_PK_F32, 1, true }, { "f16", "F16", PD_PK_F16, 1, true }, { "bf16", "BF16", PD_PK_BF16, 1, true },
    { "q8_0", "Q8_0", PD_PK_U8, 1, true }, { "q4_0", "Q4_0", PD_PK_U8, 1, true }, { "q4_1", "Q4_1", PD_PK_U8, 1, true },
    { "q5_0", "Q5_0", PD_PK_U8, 1, true }, { "q5_1", "Q5_1", PD_PK_U8, 1, true }, { "q4_k", "Q4_K", PD_PK_U8, 1, true },
    { "q5_k", "Q5_K", PD_PK_U8, 1, true }, { "q6_k", "Q6_K", PD_PK_U8, 1, true }, { "mixed", "Q4_K", PD_PK_U8, 2, true },
    { "untied", "F32", PD_PK_F32, 1, false }, { "linear", "F16", PD_PK_F16, 2, false }, { "llama3", "F16", PD_PK_F16, 1, false },
    { "spm", "F16", PD_PK_F16, 1, false },
};
#define N_TINY (sizeof tiny / sizeof *tiny)

static const char *tiny_path(const char *name, const char *suffix)
{
    static char path[96];
    snprintf(path, sizeof path, "testdata/tiny/llama-%s.%s", name, suffix);
    return path;
}

/* gguf, config and weights, without tokenizer and digest. */
static int open_weights(const char *path, struct pd_threads *t, struct pd_model **out, struct pd_err *e)
{
    struct pd_model *m = pd_calloc(1, sizeof *m, "a model", e);
    memset(e, 0, sizeof *e);
    int rc = pd_gguf_open(path, &m->gguf, e);
    if (!rc)
        rc = pd_config_from_gguf(m->gguf, &m->cfg, e);
    if (!rc)
        rc = pd_weights_load(m, t, e);
    if (rc) {
        pd_model_free(m);
        m = NULL;
    }
    *out = m;
    return rc;
}

/* --- the layout, from kernels.h alone --- */

static float half_at(const uint8_t *p) { uint16_t h; memcpy(&h, p, 2); return pd_half_to_float(h); }
static float float_at(const uint8_t *p) { float f; memcpy(&f, p, 4); return f; }

static float weight(const struct pd_pmat *m, int o, int k)
{
    const uint8_t *g = m->data + (size_t)(o / 32) * m->group_bytes;
    size_t lane = (size_t)o % 32, kk = (size_t)k;
    switch (m->pack) {
    case PD_PK_F32: return float_at(g + (kk * 32 + lane) * 4);
    case PD_PK_F16: return half_at(g + (kk * 32 + lane) * 2);
    case PD_PK_BF16: {
        uint16_t h;
        memcpy(&h, g + (kk / 2 * 32 + lane) * 4 + kk % 2 * 2, 2);
        return pd_bf16_to_float(h);
    }
    default: break;
    }
    size_t sub = (size_t)m->sub, elem = m->scale_f32 ? 4 : 2, ints = m->pack == PD_PK_U4 ? sub * 16 : sub * 32;
    const uint8_t *s = g + kk / sub * (ints + 32 * elem * (m->has_min ? 2 : 1));
    size_t r = kk % sub;
    int u = m->pack == PD_PK_U4 ? s[r / 8 * 128 + lane * 4 + r % 4] >> (r % 8 / 4 * 4) & 15 : s[r / 4 * 128 + lane * 4 + r % 4];
    const uint8_t *sc = s + ints + lane * elem, *mn = sc + 32 * elem;
    return (m->scale_f32 ? float_at(sc) : half_at(sc)) * (float)(u - m->off) + (!m->has_min ? 0 : m->scale_f32 ? float_at(mn) : half_at(mn));
}

/* What a tensor holds, as it is stored; the caller frees it. */
static uint8_t *stored(const struct pd_gguf *g, const struct pd_gguf_tensor *t)
{
    struct pd_err e;
    uint8_t *p = malloc(t->bytes);
    assert_int_equal(pd_gguf_read(g, t->at, p, t->bytes, &e), 0);
    return p;
}

static void same_floats(const struct pd_gguf *g, const struct pd_gguf_tensor *t, const float *v, int n)
{
    uint8_t *p = stored(g, t);
    assert_memory_equal(v, p, (size_t)n * sizeof *v);
    free(p);
}

/* Rows [row, row + n) of m are the tensor's. */
static void check_rows(const struct pd_gguf *g, const struct pd_pmat *m, int row, const struct pd_gguf_tensor *t)
{
    const struct pd_dtype_traits *ty = pd_dtype_traits(t->type);
    float *want = calloc(t->ne[0], sizeof *want), *got = calloc(t->ne[0], sizeof *got);
    uint8_t *data = stored(g, t);
    assert_int_equal(m->n_in, t->ne[0]);
    for (int o = 0; o < (int)t->ne[1]; o++) {
        ty->dequant(data + (uint64_t)o * (t->bytes / t->ne[1]), want, (int64_t)t->ne[0]);
        pd_pack_row(m, row + o, got);
        assert_memory_equal(got, want, t->ne[0] * sizeof *got);
        for (int k = 0; k < m->n_in; k++)
            if (weight(m, row + o, k) != want[k])
                fail_msg("%s[%d][%d] packed %g, stored %g", pd_gguf_show(t->name).s, o, k, (double)weight(m, row + o, k), (double)want[k]);
    }
    free(want);
    free(got);
    free(data);
}

static void check_padding(const struct pd_pmat *m)
{
    assert_int_equal((uintptr_t)m->data % 64, 0);
    assert_int_equal(m->n_in_pad, (m->n_in + 31) / 32 * 32);
    for (int o = 0; o < m->n_groups * 32; o++)
        for (int k = o < m->n_out ? m->n_in : 0; k < m->n_in_pad; k++)
            assert_true(weight(m, o, k) == 0);
}

static const struct pd_gguf_tensor *layer_tensor(const struct pd_model *m, int layer, const char *name)
{
    char full[64];
    snprintf(full, sizeof full, "blk.%d.%s.weight", layer, name);
    return pd_gguf_tensor(m->gguf, full);
}

/* The tensors `names`, in order, are the rows of the n matrices. */
static void check_mats(const struct pd_model *m, int layer, const struct pd_pmat *mats, int n, const char *const *names, int n_names)
{
    int mat = 0, row = 0;
    for (int i = 0; i < n_names; i++) {
        const struct pd_gguf_tensor *t = layer_tensor(m, layer, names[i]);
        check_rows(m->gguf, &mats[mat], row, t);
        if ((row += (int)t->ne[1]) == mats[mat].n_out)
            row = 0, check_padding(&mats[mat++]);
        assert_true(mat == n || row <= mats[mat].n_out);
    }
    assert_int_equal(mat, n);
}

static void packed_weights_are_the_stored_ones(void **state)
{
    for (size_t i = 0; i < N_TINY; i++) {
        struct pd_model *m;
        struct pd_err e;
        if (open_weights(tiny_path(tiny[i].name, "gguf"), NULL, &m, &e))
            fail_msg("%s: %s", tiny[i].name, e.msg);
        assert_string_equal(m->quant, tiny[i].quant);
        assert_int_equal(m->numerics, tiny[i].numerics);
        assert_int_equal(m->cfg.tied, tiny[i].tied);
        for (int l = 0; l < m->cfg.n_layers; l++) {
            struct pd_layer_weights *w = &m->layer[l];
            assert_int_equal(w->n_qkv, tiny[i].n_qkv);
            check_mats(m, l, w->qkv, w->n_qkv, (const char *const[]){ "attn_q", "attn_k", "attn_v" }, 3);
            check_mats(m, l, &w->gate, 1, (const char *const[]){ "ffn_gate" }, 1);
            check_mats(m, l, &w->up, 1, (const char *const[]){ "ffn_up" }, 1);
            check_mats(m, l, &w->o, 1, (const char *const[]){ "attn_output" }, 1);
            check_mats(m, l, &w->down, 1, (const char *const[]){ "ffn_down" }, 1);
            same_floats(m->gguf, layer_tensor(m, l, "attn_norm"), w->attn_norm, m->cfg.n_embd);
            same_floats(m->gguf, layer_tensor(m, l, "ffn_norm"), w->ffn_norm, m->cfg.n_embd);
        }
        check_rows(m->gguf, &m->head, 0, pd_gguf_tensor(m->gguf, m->cfg.tied ? "token_embd.weight" : "output.weight"));
        check_rows(m->gguf, m->embd, 0, pd_gguf_tensor(m->gguf, "token_embd.weight"));
        check_padding(&m->head);
        check_padding(m->embd);
        pd_model_free(m);
    }
}

/* A last group that is not full, and rows that are no multiple of 32: no tiny model has them. */
static void ragged_matrices_are_padded_with_zeros(void **state)
{
    static const uint32_t types[] = { PD_F32, PD_F16, PD_BF16, PD_Q8_0, PD_Q4_1, PD_Q5_1, PD_Q6_K };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        const struct pd_dtype_traits *ty = pd_dtype_traits(types[i]);
        struct gb b = { 0 };
        struct pd_gguf *g;
        struct pd_err e = { 0 };
        struct pd_pmat m;
        char path[64];
        int fd;
        gb_begin(&b);
        gb_tensor(&b, "t", types[i], ty->quantised ? 256 : 48, 45);
        gb_end(&b);
        for (size_t at = b.n - b.data_bytes; at < b.n; at++)
            b.p[at] = (uint8_t)(at * 37 & 0x3b);            /* as a half: small and finite at any place */
        assert_int_equal(pd_gguf_open(gb_file(b.p, b.n, &fd, path), &g, &e), 0);
        struct pd_pack_job job = { &m, { pd_gguf_tensor(g, "t") }, 1 };
        assert_int_equal(pd_pack_shape(&job, &e), 0);
        m.data = pd_alloc_aligned((size_t)m.n_groups * m.group_bytes, "t", &e);
        memset(m.data, 0xa5, (size_t)m.n_groups * m.group_bytes);
        assert_int_equal(pd_pack_run(g, &job, 1, NULL, &e), 0);
        check_rows(g, &m, 0, job.src[0]);
        check_padding(&m);
        pd_free(m.data);
        pd_gguf_close(g);
        close(fd);
        free(b.p);
    }
}

static void threads_change_nothing(void **state)
{
    struct pd_model *one, *two;
    struct pd_threads *t;
    struct pd_err e;
    assert_int_equal(pd_threads_new(2, &t, &e), 0);
    assert_int_equal(open_weights(tiny_path("mixed", "gguf"), NULL, &one, &e), 0);
    assert_int_equal(open_weights(tiny_path("mixed", "gguf"), t, &two, &e), 0);
    assert_int_equal(one->packed_bytes, two->packed_bytes);
    for (int l = 0; l < one->cfg.n_layers; l++)
        assert_memory_equal(one->layer[l].down.data, two->layer[l].down.data, (size_t)one->layer[l].down.n_groups * one->layer[l].down.group_bytes);
    assert_memory_equal(one->head.data, two->head.data, (size_t)one->head.n_groups * one->head.group_bytes);
    pd_model_free(one);
    pd_model_free(two);
    pd_threads_free(t);
}

/* --- a forward pass in doubles, straight from the definition --- */

static double *dense(const struct pd_pmat *m)
{
    double *w = malloc((size_t)m->n_out * (size_t)m->n_in * sizeof *w);
    for (int o = 0; o < m->n_out; o++)
        for (int k = 0; k < m->n_in; k++)
            w[(size_t)o * (size_t)m->n_in + (size_t)k] = weight(m, o, k);
    return w;
}

/* y = W x over the matrices one below the other. */
static void product(const struct pd_pmat *m, int n, double *const *w, const double *x, double *y)
{
    for (int i = 0; i < n; y += m[i++].n_out)
        for (int o = 0; o < m[i].n_out; o++) {
            y[o] = 0;
            for (int k = 0; k < m[i].n_in; k++)
                y[o] += w[i][(size_t)o * (size_t)m[i].n_in + (size_t)k] * x[k];
        }
}

static void norm(double *out, const double *x, const float *w, int n, double eps)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += x[i] * x[i];
    for (int i = 0; i < n; i++)
        out[i] = x[i] / sqrt(sum / n + eps) * w[i];
}

static void rotate(const struct pd_rope *r, double *x, int heads, int head_dim, const float *cs)
{
    assert_true(r->pairs);
    for (int h = 0; h < heads; h++, x += head_dim)
        for (int i = 0; i < r->n_rot / 2; i++) {
            double a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cs[2 * i] - b * cs[2 * i + 1];
            x[2 * i + 1] = a * cs[2 * i + 1] + b * cs[2 * i];
        }
}

static void forward(const struct pd_model *m, const int32_t *tok, int n, double *logits)
{
    const struct pd_config *c = &m->cfg;
    int d = c->n_embd, hd = c->head_dim, nq = c->n_heads * hd, nkv = c->n_kv_heads * hd, qkv = nq + 2 * nkv;
    double *x = calloc((size_t)n * (size_t)d, sizeof *x), *h = calloc((size_t)d, sizeof *h), *all = calloc((size_t)n * (size_t)qkv, sizeof *all);
    double *att = calloc((size_t)nq, sizeof *att), *p = calloc((size_t)n, sizeof *p), *ff = calloc(2 * (size_t)c->n_ff, sizeof *ff);
    float *row = calloc((size_t)d, sizeof *row), *cs = calloc((size_t)n * (size_t)c->rope.n_rot, sizeof *cs);
    pd_rope_table(&c->rope, 0, n, cs);
    for (int t = 0; t < n; t++) {
        pd_model_embed(m, tok[t], row);
        for (int i = 0; i < d; i++)
            x[t * d + i] = row[i];
    }
    for (int l = 0; l < c->n_layers; l++) {
        const struct pd_layer_weights *w = &m->layer[l];
        double *wq[3], *wg = dense(&w->gate), *wu = dense(&w->up), *wo = dense(&w->o), *wd = dense(&w->down);
        for (int i = 0; i < w->n_qkv; i++)
            wq[i] = dense(&w->qkv[i]);
        for (int t = 0; t < n; t++) {
            norm(h, x + t * d, w->attn_norm, d, c->rms_eps);
            product(w->qkv, w->n_qkv, wq, h, all + t * qkv);
            rotate(&c->rope, all + t * qkv, c->n_heads + c->n_kv_heads, hd, cs + t * c->rope.n_rot);
        }
        for (int t = 0; t < n; t++) {
            for (int head = 0; head < c->n_heads; head++) {
                const double *q = all + t * qkv + head * hd;
                int kv = head / (c->n_heads / c->n_kv_heads);
                double sum = 0;
                for (int s = 0; s <= t; s++) {
                    double dot = 0;
                    for (int i = 0; i < hd; i++)
                        dot += q[i] * all[s * qkv + nq + kv * hd + i];
                    sum += p[s] = exp(dot / sqrt(hd));
                }
                for (int i = 0; i < hd; i++) {
                    att[head * hd + i] = 0;
                    for (int s = 0; s <= t; s++)
                        att[head * hd + i] += p[s] / sum * all[s * qkv + nq + nkv + kv * hd + i];
                }
            }
            product(&w->o, 1, &wo, att, h);
            for (int i = 0; i < d; i++)
                x[t * d + i] += h[i];
            norm(h, x + t * d, w->ffn_norm, d, c->rms_eps);
            product(&w->gate, 1, &wg, h, ff);
            product(&w->up, 1, &wu, h, ff + c->n_ff);
            for (int i = 0; i < c->n_ff; i++)
                ff[i] *= ff[c->n_ff + i] / (1 + exp(-ff[i]));
            product(&w->down, 1, &wd, ff, h);
            for (int i = 0; i < d; i++)
                x[t * d + i] += h[i];
        }
        for (int i = 0; i < w->n_qkv; i++)
            free(wq[i]);
        free(wg);
        free(wu);
        free(wo);
        free(wd);
    }
    double *wh = dense(&m->head);
    for (int t = 0; t < n; t++) {
        norm(h, x + t * d, m->out_norm, d, c->rms_eps);
        product(&m->head, 1, &wh, h, logits + (size_t)t * (size_t)c->n_vocab);
    }
    free(wh); free(x); free(h); free(all); free(att); free(p); free(ff); free(row); free(cs);
}

static void logits_agree_with_hugging_face(void **state)
{
    for (size_t i = 0; i < N_TINY; i++) {
        struct pd_model *m;
        struct pd_err e;
        size_t nt, nl;
        assert_int_equal(open_weights(tiny_path(tiny[i].name, "gguf"), NULL, &m, &e), 0);
        int32_t *tok = read_whole(tiny_path(tiny[i].name, "tokens.bin"), &nt);
        float *want = read_whole(tiny_path(tiny[i].name, "logits.bin"), &nl);
        int n = (int)(nt / 4);
        assert_int_equal(nl, nt * (size_t)m->cfg.n_vocab);
        double *got = calloc(nl / 4, sizeof *got), worst = 0;
        forward(m, tok, n, got);
        for (size_t k = 0; k < nl / 4; k++)
            worst = fmax(worst, fabs(got[k] - (double)want[k]));
        if (!(worst < 5e-5))
            fail_msg("%s: a logit differs by %g", tiny[i].name, worst);
        free(got);
        free(tok);
        free(want);
        pd_model_free(m);
    }
}

/* --- refusals --- */

struct patched { uint8_t *p; size_t n; int fd; char path[64]; };

static struct patched load_copy(const char *name)
{
    struct patched f = { 0 };
    f.p = read_whole(tiny_path(name, "gguf"), &f.n);
    return f;
}

static int open_patched(struct patched *f, struct pd_err *e)
{
    struct pd_model *m;
    gb_file(f->p, f->n, &f->fd, f->path);
    int rc = open_weights(f->path, NULL, &m, e);
    pd_model_free(m);
    close(f->fd);
    free(f->p);
    return rc;
}

/* Where the data of a tensor lies in the file. */
static size_t data_at(const char *model, const char *tensor)
{
    struct pd_gguf *g;
    struct pd_err e;
    assert_int_equal(pd_gguf_open(tiny_path(model, "gguf"), &g, &e), 0);
    size_t at = (size_t)pd_gguf_tensor(g, tensor)->at;
    pd_gguf_close(g);
    return at;
}

static void what_is_not_finite_is_refused_by_name(void **state)
{
    static const struct { const char *model, *tensor; size_t at; uint16_t v; } bad[] = {
        { "f32", "blk.1.ffn_up.weight", 2 + 4 * 77, 0x7f80 }, { "f32", "blk.0.attn_norm.weight", 2 + 4 * 63, 0x7fc0 }, { "f32", "output_norm.weight", 2, 0xff80 },
        { "f16", "blk.1.attn_q.weight", 2 * 100, 0x7c00 }, { "bf16", "blk.0.ffn_down.weight", 2 * 1000, 0x7fc1 }, { "q8_0", "blk.0.attn_k.weight", 34 * 5, 0xfc00 },
        { "q4_0", "blk.0.attn_v.weight", 18 * 63, 0x7e00 }, { "q4_1", "blk.0.attn_output.weight", 20 * 9 + 2, 0x7c01 }, { "q4_1", "token_embd.weight", 20 * 639, 0x7c00 },
        { "q5_0", "blk.1.ffn_gate.weight", 22 * 319, 0x7c00 }, { "q5_1", "blk.1.ffn_gate.weight", 24 * 1 + 2, 0xfe00 }, { "q4_k", "blk.0.attn_q.weight", 144 * 255, 0x7c00 },
        { "q5_k", "blk.0.attn_q.weight", 176 * 3 + 2, 0x7c00 }, { "q6_k", "blk.0.ffn_down.weight", 210 * 200 + 208, 0x7e00 },
        { "untied", "token_embd.weight", 2 + 4 * 20479, 0x7f80 }, { "untied", "output.weight", 2 + 4 * 20479, 0x7f80 },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct pd_err e;
        char quoted[80], *at;
        struct patched f = load_copy(bad[i].model);
        size_t place = data_at(bad[i].model, bad[i].tensor) + bad[i].at;
        memcpy(f.p + place, &bad[i].v, 2);
        int rc = open_patched(&f, &e);
        snprintf(quoted, sizeof quoted, "'%s' holds a ", bad[i].tensor);
        if (rc != PD_ECORRUPT || !strstr(e.msg, quoted) || !(at = strstr(e.msg, "not finite at byte ")) || strtoull(at + 19, NULL, 10) > place || strtoull(at + 19, NULL, 10) + 210 < place)
            fail_msg("%s %s: got %d, '%s'", bad[i].model, bad[i].tensor, rc, e.msg);
    }
}

/* The name `from` becomes `to` (as long). */
static int with_text(const char *model, const char *from, const char *to, struct pd_err *e)
{
    struct patched f = load_copy(model);
    uint64_t len = strlen(from);
    uint8_t *at = f.p, stored[72];
    memcpy(stored, &len, 8);
    memcpy(stored + 8, from, len);
    assert_int_equal(strlen(to), len);
    assert_non_null(at = memmem(f.p, f.n, stored, 8 + len));
    memcpy(at + 8, to, len);
    return open_patched(&f, e);
}

/* The u32 of a key becomes v. */
static int with_key(const char *model, const char *key, uint32_t v, struct pd_err *e)
{
    struct patched f = load_copy(model);
    memcpy((uint8_t *)memmem(f.p, f.n, key, strlen(key)) + strlen(key) + 4, &v, 4);
    return open_patched(&f, e);
}

static void tensors_must_be_those_of_the_model(void **state)
{
    struct pd_err e;
    assert_int_equal(with_text("f32", "blk.1.ffn_up.weight", "blk.1.ffn_UP.weight", &e), PD_ECORRUPT);
    assert_non_null(strstr(e.msg, "tensor 'blk.1.ffn_up.weight' is missing"));
    assert_int_equal(with_text("untied", "output.weight", "output.other!", &e), PD_EINCOMPAT);
    assert_non_null(strstr(e.msg, "is not part of a llama model"));
    assert_int_equal(with_key("f32", "llama.block_count", 1, &e), PD_EINCOMPAT);
    assert_non_null(strstr(e.msg, "tensor 'blk.1."));
    assert_int_equal(with_key("f32", "llama.block_count", 3, &e), PD_ECORRUPT);
    assert_non_null(strstr(e.msg, "tensor 'blk.2.attn_norm.weight' is missing"));
    assert_int_equal(with_key("f32", "llama.feed_forward_length", 176, &e), PD_ECORRUPT);
    assert_non_null(strstr(e.msg, "is 64 x 160, the model's hyperparameters make it 64 x 176"));
    assert_int_equal(with_key("f32", "llama.attention.head_count_kv", 1, &e), PD_ECORRUPT);
    assert_non_null(strstr(e.msg, "is 64 x 32, the"));
    assert_int_equal(with_key("f32", "llama.attention.head_count", 2, &e), PD_ECORRUPT);
    assert_non_null(strstr(e.msg, "attn_k.weight"));
}

static void embeddings_are_those_of_the_file(void **state)
{
    struct pd_model *m;
    struct pd_err e;
    float row[64], want[64];
    assert_int_equal(open_weights(tiny_path("q4_1", "gguf"), NULL, &m, &e), 0);
    uint8_t *data = stored(m->gguf, pd_gguf_tensor(m->gguf, "token_embd.weight"));
    pd_dtype_traits(PD_Q4_1)->dequant(data + 319 * 40, want, 64);
    free(data);
    pd_gguf_close(m->gguf);             /* the file is done with */
    m->gguf = NULL;
    pd_model_embed(m, 319, row);
    assert_memory_equal(row, want, sizeof row);
    pd_model_embed(m, 320, row);
    assert_true(isnan(row[0]) && isnan(row[63]));
    pd_model_embed(m, -1, row);
    assert_true(isnan(row[63]));
    pd_model_free(m);
}

/* A file that is cut, or written to, between any two steps of loading. */
static void a_file_that_changes_is_refused(void **state)
{
    for (int step = 0; step < 5; step++) {
        struct patched f = load_copy("untied");
        struct pd_gguf *g;
        struct pd_err e = { 0 };
        gb_file(f.p, f.n, &f.fd, f.path);
        assert_int_equal(pd_gguf_open(f.path, &g, &e), 0);
        assert_int_equal(pd_gguf_unchanged(g, &e), 0);
        if (step == 4) {                /* as long as before, written to */
            struct timespec then[2] = { { .tv_nsec = UTIME_OMIT }, { .tv_sec = 1 } };
            assert_int_equal(pwrite(f.fd, "x", 1, (off_t)f.n - 1), 1);
            assert_int_equal(futimens(f.fd, then), 0);
        } else {
            assert_int_equal(ftruncate(f.fd, step == 0 ? 0 : step == 1 ? (off_t)g->data_off : step == 2 ? (off_t)f.n - 1 : (off_t)pd_gguf_tensor(g, "token_embd.weight")->at), 0);
        }
        struct pd_model *m = pd_calloc(1, sizeof *m, "a model", &e);
        m->gguf = g;
        int rc = pd_config_from_gguf(g, &m->cfg, &e);
        if (step < 4) {
            assert_int_equal(rc, 0);    /* the header was read */
            assert_int_equal(pd_weights_load(m, NULL, &e), PD_ECORRUPT);
            assert_non_null(strstr(e.msg, "the file ends at byte "));
            assert_non_null(strstr(e.msg, f.path));
            assert_non_null(strstr(e.msg, "rename"));
        }
        assert_int_equal(pd_gguf_unchanged(g, &e), PD_ECORRUPT);
        assert_non_null(strstr(e.msg, "was written to"));
        pd_model_free(m);
        close(f.fd);
        free(f.p);
    }
}

static void a_model_opens_whole_or_in_part(void **state)
{
    struct pd_model *m;
    struct pd_err e = { 0 };
    struct pd_model_opts o = { 0 }, part = { .no_weights = true, .no_digest = true };
    assert_int_equal(pd_model_open(tiny_path("f32", "gguf"), &o, &m, &e), 0);
    assert_memory_equal(m->revision, "tiny llama-f32@", 15);
    assert_int_equal(strlen(m->revision), 15 + 12);
    assert_int_equal(pd_tokenizer_vocab(m->tok), 320);
    assert_string_equal(m->chat.family, "chatml");
    assert_non_null(m->head.data);
    assert_null(m->gguf);
    pd_model_free(m);
    assert_int_equal(pd_model_open(tiny_path("spm", "gguf"), &part, &m, &e), 0);
    assert_string_equal(m->revision, "tiny llama-spm");
    assert_int_equal(pd_tokenizer_kind(m->tok), PD_TOK_SPM);
    assert_null(m->layer);
    pd_model_free(m);
    m = (void *)1;
    assert_int_equal(pd_model_open("testdata/tiny/none.gguf", &o, &m, &e), PD_EFAIL);
    assert_null(m);
    pd_model_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packed_weights_are_the_stored_ones), cmocka_unit_test(ragged_matrices_are_padded_with_zeros), cmocka_unit_test(threads_change_nothing),
        cmocka_unit_test(logits_agree_with_hugging_face), cmocka_unit_test(what_is_not_finite_is_refused_by_name), cmocka_unit_test(tensors_must_be_those_of_the_model),
        cmocka_unit_test(embeddings_are_those_of_the_file), cmocka_unit_test(a_file_that_changes_is_refused), cmocka_unit_test(a_model_opens_whole_or_in_part),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
