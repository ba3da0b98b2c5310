/* Hyperparameters: read, ranged, and what is not supported refused by name; the rope table against the formula in long double. */
#include <math.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdarg.h>
#include <cmocka.h>
#include "gguf_build.h"
#include "../../libcommon/model/config.h"

/* One key put in place of the default of its name, or added. kind: 'u' 'f' 's' 'b', 'i' (an i32), 'x' leave the default out, 'a' array of the two i32 (v, v2). */
struct change { const char *key; char kind; double v; const char *s; double v2; };

static const struct { const char *key; double v; char kind; } defaults[] = {
    { "llama.block_count", 2, 'u' }, { "llama.context_length", 256, 'u' }, { "llama.embedding_length", 64, 'u' }, { "llama.feed_forward_length", 160, 'u' },
    { "llama.attention.head_count", 4, 'u' }, { "llama.attention.head_count_kv", 2, 'u' }, { "llama.attention.layer_norm_rms_epsilon", 1e-5, 'f' },
};

static void put(struct gb *b, const char *key, char kind, double v, const char *s, double v2)
{
    int32_t i = (int32_t)v, j = (int32_t)v2;
    switch (kind) {
    case 'u': gb_kv_u32(b, key, (uint32_t)v); break;
    case 'f': gb_kv_f32(b, key, (float)v); break;
    case 's': gb_kv_str(b, key, s); break;
    case 'b': gb_kv_bool(b, key, (uint8_t)v); break;
    case 'i': gb_key(b, key, PD_GT_I32); gb_raw(b, &i, 4); break;
    case 'a': gb_key(b, key, PD_GT_ARR); gb_u32(b, PD_GT_I32); gb_u64(b, 2); gb_raw(b, &i, 4); gb_raw(b, &j, 4); break;
    default: break;
    }
}

static int config(const struct change *c, int n, struct pd_config *out, struct pd_err *e)
{
    struct gb b = { 0 };
    struct pd_gguf *g;
    char path[64];
    int fd, used = 0;
    gb_begin(&b);
    bool arch = false;
    for (int i = 0; i < n; i++)
        arch |= !strcmp(c[i].key, "general.architecture");
    if (!arch)
        gb_kv_str(&b, "general.architecture", "llama");
    for (size_t d = 0; d < sizeof defaults / sizeof *defaults; d++) {
        const struct change *over = NULL;
        for (int i = 0; i < n; i++)
            if (!strcmp(c[i].key, defaults[d].key))
                over = &c[i], used |= 1 << i;
        if (over)
            put(&b, over->key, over->kind, over->v, over->s, over->v2);
        else
            put(&b, defaults[d].key, defaults[d].kind, defaults[d].v, NULL, 0);
    }
    uint64_t rot = 0, rows = 32, width = 64;
    for (int i = 0; i < n; i++) {
        if (!strcmp(c[i].key, "rope_freqs.weight"))
            rot = (uint64_t)c[i].v;
        else if (!strcmp(c[i].key, "token_embd.weight"))
            width = (uint64_t)c[i].v, rows = (uint64_t)c[i].v2;
        else if (!(used >> i & 1))
            put(&b, c[i].key, c[i].kind, c[i].v, c[i].s, c[i].v2);
    }
    if (rows)
        gb_tensor(&b, "token_embd.weight", PD_F32, width, rows);
    if (rot)
        gb_tensor(&b, "rope_freqs.weight", PD_F32, rot, 0);         /* all zero: no good divisors */
    gb_end(&b);
    memset(e, 0, sizeof *e);
    assert_int_equal(pd_gguf_open(gb_file(b.p, b.n, &fd, path), &g, e), 0);
    int rc = pd_config_from_gguf(g, out, e);
    if (rc)
        assert_null(out->rope.freq_factors);
    pd_gguf_close(g);
    close(fd);
    free(b.p);
    return rc;
}

static void a_plain_config(void **state)
{
    struct pd_config c;
    struct pd_err e;
    assert_int_equal(config(NULL, 0, &c, &e), 0);
    assert_string_equal(c.arch, "llama");
    assert_true(c.n_layers == 2 && c.n_ctx == 256 && c.n_embd == 64 && c.n_ff == 160 && c.n_heads == 4 && c.n_kv_heads == 2 && c.head_dim == 16 && c.n_vocab == 32);
    assert_true(c.tied && c.rms_eps == 1e-5f);
    assert_true(c.rope.n_rot == 16 && c.rope.theta == 10000 && c.rope.pairs && c.rope.scaling == PD_ROPE_NONE && !c.rope.freq_factors);
    assert_true(pd_config_dim(&c, PD_D_HEADS) == 64 && pd_config_dim(&c, PD_D_KV) == 32 && pd_config_dim(&c, PD_D_ROT) == 8);
    pd_config_free(&c);
    const struct change other[] = { { "general.name", 's', 0, "A\tname \xff of some 80 bytes xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", 0 },
                                    { "llama.attention.head_count_kv", 'a', 1, NULL, 1 }, { "llama.attention.key_length", 'u', 32, NULL, 0 },
                                    { "llama.attention.value_length", 'u', 32, NULL, 0 }, { "llama.rope.dimension_count", 'u', 16, NULL, 0 },
                                    { "llama.rope.freq_base", 'f', 500000, NULL, 0 }, { "llama.vocab_size", 'u', 32, NULL, 0 }, { "llama.expert_count", 'u', 0, NULL, 0 } };
    assert_int_equal(config(other, 8, &c, &e), 0);
    assert_int_equal(strlen(c.name), 63);
    assert_memory_equal(c.name, "A?name ? of", 11);
    assert_true(c.n_kv_heads == 1 && c.head_dim == 32 && c.rope.n_rot == 16 && c.rope.theta == 500000);
    pd_config_free(&c);
}

static const struct { struct change c; int code; const char *says; } bad[] = {
    { { "general.architecture", 'x', 0, NULL, 0 }, PD_ECORRUPT, "'general.architecture' is missing" },
    { { "general.architecture", 's', 0, "qwen3moe", 0 }, PD_EINCOMPAT, "'qwen3moe' is not supported; supported: llama" },
    { { "general.architecture", 's', 0, "a name longer than any family's", 0 }, PD_EINCOMPAT, "is not supported" },
    { { "general.architecture", 'u', 1, NULL, 0 }, PD_ECORRUPT, "expected a string" },
    { { "llama.block_count", 'x', 0, NULL, 0 }, PD_ECORRUPT, "'llama.block_count' is missing" },
    { { "llama.block_count", 'u', 4294967295.0, NULL, 0 }, PD_ECORRUPT, "'llama.block_count'" },
    { { "llama.block_count", 'u', 0, NULL, 0 }, PD_ECORRUPT, "is 0, possible are 1 to 1024" },
    { { "llama.block_count", 'i', -1, NULL, 0 }, PD_ECORRUPT, "is -1" },
    { { "llama.block_count", 's', 0, "2", 0 }, PD_ECORRUPT, "expected an integer" },
    { { "llama.context_length", 'u', 0, NULL, 0 }, PD_ECORRUPT, "'llama.context_length'" },
    { { "llama.context_length", 'x', 0, NULL, 0 }, PD_ECORRUPT, "'llama.context_length' is missing" },
    { { "llama.embedding_length", 'u', 1 << 18, NULL, 0 }, PD_ECORRUPT, "'llama.embedding_length'" },
    { { "llama.embedding_length", 'u', 80, NULL, 0 }, PD_EINCOMPAT, "head_dim 20" },
    { { "llama.embedding_length", 'u', 128, NULL, 0 }, PD_ECORRUPT, "token_embd.weight is 64 x 32" },
    { { "llama.feed_forward_length", 'u', 1 << 21, NULL, 0 }, PD_ECORRUPT, "'llama.feed_forward_length'" },
    { { "llama.feed_forward_length", 'u', 168, NULL, 0 }, PD_EINCOMPAT, "feed_forward_length 168 is not supported" },
    { { "llama.attention.head_count", 'u', 0, NULL, 0 }, PD_ECORRUPT, "'llama.attention.head_count'" },
    { { "llama.attention.head_count", 'u', 1025, NULL, 0 }, PD_ECORRUPT, "'llama.attention.head_count'" },
    { { "llama.attention.head_count", 'u', 3, NULL, 0 }, PD_ECORRUPT, "3 attention heads do not divide among 2 KV heads" },
    { { "llama.attention.head_count", 'u', 6, NULL, 0 }, PD_ECORRUPT, "'llama.attention.key_length' is missing" },
    { { "llama.attention.head_count", 'u', 2, NULL, 0 }, 0, "" },
    { { "llama.attention.head_count_kv", 'u', 0, NULL, 0 }, PD_ECORRUPT, "'llama.attention.head_count_kv'" },
    { { "llama.attention.head_count_kv", 'u', 8, NULL, 0 }, PD_ECORRUPT, "'llama.attention.head_count_kv'" },
    { { "llama.attention.head_count_kv", 'a', 2, NULL, 4 }, PD_EINCOMPAT, "differs by layer (2, then 4)" },
    { { "llama.attention.head_count_kv", 'a', 2, NULL, 0 }, PD_ECORRUPT, "of layer 1 is 0" },
    { { "llama.attention.key_length", 'u', 24, NULL, 0 }, PD_EINCOMPAT, "head_dim 24 is not supported; a multiple of 16" },
    { { "llama.attention.key_length", 'u', 17, NULL, 0 }, PD_EINCOMPAT, "head_dim 17" },
    { { "llama.attention.key_length", 'u', 512, NULL, 0 }, PD_EINCOMPAT, "head_dim 512" },
    { { "llama.attention.value_length", 'u', 32, NULL, 0 }, PD_EINCOMPAT, "value_length 32 differs from key_length 16" },
    { { "llama.attention.layer_norm_rms_epsilon", 'x', 0, NULL, 0 }, PD_ECORRUPT, "is missing" },
    { { "llama.attention.layer_norm_rms_epsilon", 'f', -1, NULL, 0 }, PD_ECORRUPT, "is -1, possible" },
    { { "llama.attention.layer_norm_rms_epsilon", 'f', NAN, NULL, 0 }, PD_ECORRUPT, "not a finite number" },
    { { "llama.rope.dimension_count", 'u', 15, NULL, 0 }, PD_ECORRUPT, "must be even" },
    { { "llama.rope.dimension_count", 'u', 1u << 31, NULL, 0 }, PD_ECORRUPT, "'llama.rope.dimension_count'" },
    { { "llama.rope.freq_base", 'f', 0, NULL, 0 }, PD_ECORRUPT, "'llama.rope.freq_base'" },
    { { "llama.rope.freq_base", 'f', INFINITY, NULL, 0 }, PD_ECORRUPT, "not a finite number" },
    { { "llama.rope.scaling.type", 's', 0, "yarn", 0 }, PD_EINCOMPAT, "is 'yarn'; supported: none, linear, llama3" },
    { { "llama.rope.scaling.factor", 'f', 0, NULL, 0 }, PD_ECORRUPT, "'llama.rope.scaling.factor'" },
    { { "llama.expert_count", 'u', 8, NULL, 0 }, PD_EINCOMPAT, "mixture of experts is not supported" },
    { { "llama.final_logit_softcapping", 'f', 30, NULL, 0 }, PD_EINCOMPAT, "soft-capped logits" },
    { { "llama.attention.causal", 'b', 0, NULL, 0 }, PD_EINCOMPAT, "encoder" },
    { { "llama.attention.sliding_window", 'u', 128, NULL, 0 }, PD_EINCOMPAT, "sliding windows are not supported" },
    { { "llama.attention.sliding_window", 'u', 256, NULL, 0 }, 0, "" },
    { { "llama.vocab_size", 'u', 31, NULL, 0 }, PD_ECORRUPT, "vocab_size is 31, token_embd.weight has 32 rows" },
    { { "token_embd.weight", 0, 64, NULL, 0 }, PD_ECORRUPT, "'token_embd.weight' is missing" },
    { { "rope_freqs.weight", 0, 8, NULL, 0 }, PD_ECORRUPT, "rope_freqs.weight[0] is 0" },
    { { "rope_freqs.weight", 0, 4, NULL, 0 }, PD_ECORRUPT, "expected F32 with 8" },
};

static void what_is_wrong_is_refused_by_name(void **state)
{
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct pd_config c;
        struct pd_err e;
        int rc = config(&bad[i].c, 1, &c, &e);
        if (rc != bad[i].code || !strstr(e.msg, bad[i].says))
            fail_msg("%s: got %d, '%s'; expected %d with '%s'", bad[i].c.key, rc, e.msg, bad[i].code, bad[i].says);
        if (!rc)
            pd_config_free(&c);
    }
}

static void check_table(const struct pd_rope *r, long double (*divisor)(const struct pd_rope *, int), int pos0, int n)
{
    float *out = calloc((size_t)n * (size_t)r->n_rot, sizeof *out);
    pd_rope_table(r, pos0, n, out);
    for (int p = 0; p < n; p++)
        for (int i = 0; i < r->n_rot / 2; i++) {
            long double a = (pos0 + p) * powl(r->theta, -2.0L * i / r->n_rot) / divisor(r, i);
            assert_true(fabsl(out[p * r->n_rot + 2 * i] - cosl(a)) < 1e-7L);
            assert_true(fabsl(out[p * r->n_rot + 2 * i + 1] - sinl(a)) < 1e-7L);
        }
    /* A part of a table is that part. */
    float *part = calloc((size_t)r->n_rot, sizeof *part);
    pd_rope_table(r, pos0 + n - 1, 1, part);
    assert_memory_equal(part, out + (n - 1) * r->n_rot, (size_t)r->n_rot * sizeof *part);
    free(part);
    free(out);
}

static long double plain(const struct pd_rope *r, int i) { return 1; }
static long double by_four(const struct pd_rope *r, int i) { return 4; }
static long double by_llama3(const struct pd_rope *r, int i)
{
    long double wave = 2 * M_PIl * powl(r->theta, 2.0L * i / r->n_rot);
    if (wave < 64 / 4.0L)
        return 1;
    if (wave > 64 / 1.0L)
        return 8;
    long double smooth = (64 / wave - 1) / (4 - 1);
    return 1 / ((1 - smooth) / 8 + smooth);
}

static void rope_tables_follow_the_scaling(void **state)
{
    struct pd_config c;
    struct pd_err e;
    assert_int_equal(config(NULL, 0, &c, &e), 0);
    check_table(&c.rope, plain, 0, 100);
    check_table(&c.rope, plain, 100000, 10);
    pd_config_free(&c);
    const struct change linear[] = { { "llama.rope.scaling.type", 's', 0, "linear", 0 }, { "llama.rope.scaling.factor", 'f', 4, NULL, 0 } };
    assert_int_equal(config(linear, 2, &c, &e), 0);
    assert_true(c.rope.scaling == PD_ROPE_LINEAR && c.rope.factor == 4);
    check_table(&c.rope, by_four, 3, 100);
    pd_config_free(&c);
    const struct change old[] = { { "llama.rope.scale_linear", 'f', 4, NULL, 0 } };
    assert_int_equal(config(old, 1, &c, &e), 0);
    check_table(&c.rope, by_four, 0, 10);
    pd_config_free(&c);
    const struct change llama3[] = { { "llama.rope.scaling.type", 's', 0, "llama3", 0 }, { "llama.rope.scaling.factor", 'f', 8, NULL, 0 },
                                     { "llama.rope.scaling.low_freq_factor", 'f', 1, NULL, 0 }, { "llama.rope.scaling.high_freq_factor", 'f', 4, NULL, 0 },
                                     { "llama.rope.scaling.original_context_length", 'u', 64, NULL, 0 } };
    assert_int_equal(config(llama3, 5, &c, &e), 0);
    assert_true(c.rope.scaling == PD_ROPE_LLAMA3);
    check_table(&c.rope, by_llama3, 0, 100);
    /* A converted model carries the same divisors as a tensor. */
    struct pd_gguf *g;
    struct pd_config t;
    assert_int_equal(pd_gguf_open("testdata/tiny/llama-llama3.gguf", &g, &e), 0);
    assert_int_equal(pd_config_from_gguf(g, &t, &e), 0);
    assert_true(t.rope.scaling == PD_ROPE_LLAMA3 && t.rope.n_rot == c.rope.n_rot);
    for (int i = 0; i < 8; i++)
        assert_true(fabsf(t.rope.freq_factors[i] / c.rope.freq_factors[i] - 1) < 1e-6f);
    pd_config_free(&t);
    pd_gguf_close(g);
    pd_config_free(&c);
    struct change upside[5];
    memcpy(upside, llama3, sizeof upside);
    upside[2].v = 4;
    assert_int_equal(config(upside, 5, &c, &e), PD_ECORRUPT);
    assert_non_null(strstr(e.msg, "high_freq_factor 4 must be above low_freq_factor 4"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plain_config), cmocka_unit_test(what_is_wrong_is_refused_by_name), cmocka_unit_test(rope_tables_follow_the_scaling),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
