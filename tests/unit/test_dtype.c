/* Weight types: conversions over every half, and each block format against values that gguf-py made (testdata/dequant). */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "../../libcommon/model/dtype.h"

static uint32_t bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
static float from_bits(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }

static void every_half_goes_there_and_back(void **state)
{
    for (uint32_t h = 0; h < 65536; h++) {
        float f = pd_half_to_float((uint16_t)h);
        uint32_t exp = h >> 10 & 31, mant = h & 0x3ff;
        if (exp == 31) {
            assert_true(mant ? isnan(f) : isinf(f));
            assert_int_equal(!!signbit(f), h >> 15);
            if (!mant)
                assert_int_equal(pd_float_to_half(f), h);
            else
                assert_true((pd_float_to_half(f) & 0x7c00) == 0x7c00 && (pd_float_to_half(f) & 0x3ff));
            continue;
        }
        double want = ldexp(exp ? 1024 + mant : mant, (exp ? (int)exp : 1) - 25) * (h & 0x8000 ? -1 : 1);
        assert_true((double)f == want);
        assert_int_equal(pd_float_to_half(f), h);       /* the sign of zero too */
    }
}

/* Between each two neighbouring halves: just below, at and just above the middle. */
static void halves_round_to_nearest_even(void **state)
{
    for (uint32_t h = 0; h < 0x7c00; h++) {
        float lo = pd_half_to_float((uint16_t)h), hi = h + 1 == 0x7c00 ? 65536.0f : pd_half_to_float((uint16_t)(h + 1));
        float mid = (lo + hi) / 2;                      /* exact: one more bit */
        uint16_t even = (uint16_t)(h & 1 ? h + 1 : h);
        assert_int_equal(pd_float_to_half(mid), even);
        assert_int_equal(pd_float_to_half(nextafterf(mid, 0)), h);
        assert_int_equal(pd_float_to_half(nextafterf(mid, INFINITY)), h + 1);
        assert_int_equal(pd_float_to_half(-mid), even | 0x8000);
    }
    assert_int_equal(pd_float_to_half(1e30f), 0x7c00);
    assert_int_equal(pd_float_to_half(-INFINITY), 0xfc00);
    assert_int_equal(pd_float_to_half(1e-30f), 0);
}

static void bf16_rounds_to_nearest_even(void **state)
{
    for (uint32_t h = 0; h < 0x7f80; h++) {
        float f = pd_bf16_to_float((uint16_t)h);
        assert_int_equal(bits(f), h << 16);
        assert_int_equal(pd_float_to_bf16(f), h);
        assert_int_equal(pd_float_to_bf16(from_bits(h << 16 | 0x7fff)), h);
        assert_int_equal(pd_float_to_bf16(from_bits(h << 16 | 0x8000)), h & 1 ? h + 1 : h);
        assert_int_equal(pd_float_to_bf16(from_bits(h << 16 | 0x8001)), h + 1);
    }
    assert_true(isnan(pd_bf16_to_float(pd_float_to_bf16(from_bits(0x7f800001)))));      /* not infinity */
    assert_int_equal(pd_float_to_bf16(-INFINITY), 0xff80);
}

struct golden { uint32_t n, n_bytes; uint8_t *blocks; float *values; };

static struct golden read_golden(const char *type)
{
    struct golden g;
    char path[128];
    snprintf(path, sizeof path, "testdata/dequant/%s.bin", type);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fread(&g, 4, 2, f), 2);
    g.blocks = malloc(g.n_bytes);
    g.values = malloc(g.n * sizeof *g.values);
    assert_int_equal(fread(g.blocks, 1, g.n_bytes, f), g.n_bytes);
    assert_int_equal(fread(g.values, 4, g.n, f), g.n);
    fclose(f);
    return g;
}

static const uint32_t types[] = { PD_F32, PD_F16, PD_BF16, PD_Q8_0, PD_Q4_0, PD_Q4_1, PD_Q5_0, PD_Q5_1, PD_Q4_K, PD_Q5_K, PD_Q6_K };

static void dequant_equals_gguf_py_in_every_bit(void **state)
{
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        const struct pd_dtype_traits *ty = pd_dtype_traits(types[t]);
        assert_non_null(ty);
        assert_string_equal(ty->name, pd_ggml_type_name(types[t]));
        struct golden g = read_golden(ty->name);
        assert_int_equal(g.n, 1024);
        assert_int_equal(g.n / (uint32_t)ty->block * (uint32_t)ty->block_bytes, g.n_bytes);
        float *out = malloc(g.n * sizeof *out);
        ty->dequant(g.blocks, out, g.n);
        for (uint32_t i = 0; i < g.n; i++)
            if (bits(out[i]) != bits(g.values[i]) && !(out[i] == 0 && g.values[i] == 0))
                fail_msg("%s[%u]: %.9g, expected %.9g", ty->name, i, (double)out[i], (double)g.values[i]);
        free(out);
        free(g.blocks);
        free(g.values);
    }
}

/* The integer form says the same as the formula, in the ranges that kernels rely on. */
static void unpack_gives_the_declared_form(void **state)
{
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        const struct pd_dtype_traits *ty = pd_dtype_traits(types[t]);
        if (!ty->quantised)
            continue;
        struct golden g = read_golden(ty->name);
        uint8_t seen_max = 0;
        for (uint32_t b = 0; b * (uint32_t)ty->block < g.n; b++) {
            uint8_t u[256];
            float scale[16], min[16] = { 0 };
            ty->unpack(g.blocks + b * (uint32_t)ty->block_bytes, u, scale, min);
            for (int i = 0; i < ty->block; i++) {
                int s = i / ty->form.sub;
                float w = scale[s] * (float)(u[i] - ty->form.off) + (ty->form.has_min ? min[s] : 0);
                assert_true(w == g.values[b * (uint32_t)ty->block + (uint32_t)i]);
                seen_max = u[i] > seen_max ? u[i] : seen_max;
            }
            for (int s = 0; s < ty->block / ty->form.sub && ty->form.scale_f16; s++) {
                assert_true(pd_half_to_float(pd_float_to_half(scale[s])) == scale[s]);
                assert_true(pd_half_to_float(pd_float_to_half(min[s])) == min[s]);
            }
        }
        assert_int_equal(seen_max, ty->form.four_bit ? 15 : ty->id == PD_Q8_0 ? 255 : ty->id == PD_Q6_K ? 63 : 31);
        free(g.blocks);
        free(g.values);
    }
}

static void types_have_names(void **state)
{
    assert_null(pd_dtype_traits(10));
    assert_null(pd_dtype_traits(UINT32_MAX));
    assert_string_equal(pd_ggml_type_name(10), "Q2_K");
    assert_string_equal(pd_ggml_type_name(30), "BF16");
    assert_string_equal(pd_ggml_type_name(39), "MXFP4");
    assert_string_equal(pd_ggml_type_name(UINT32_MAX), "unknown");
    assert_int_equal(pd_dtype_size(PD_F32), 4);
    assert_int_equal(pd_dtype_size(PD_BF16), 2);
    assert_int_equal(pd_dtype_size(PD_Q8_0), 0);
}

static void kv_types_have_names(void **state)
{
    static const struct { enum pd_dtype t; const char *name; } kv[] = { { PD_F16, "f16" }, { PD_BF16, "bf16" }, { PD_F32, "f32" } };
    enum pd_dtype t = PD_Q6_K;
    for (size_t i = 0; i < sizeof kv / sizeof *kv; i++) {
        assert_string_equal(pd_kv_dtype_name(kv[i].t), kv[i].name);
        assert_true(pd_kv_dtype_parse(kv[i].name, &t));
        assert_int_equal(t, kv[i].t);
        assert_non_null(strstr(PD_KV_DTYPE_LIST, kv[i].name));
    }
    assert_null(pd_kv_dtype_name(PD_Q8_0));
    assert_null(pd_kv_dtype_name((enum pd_dtype)77));
    t = PD_Q6_K;
    assert_false(pd_kv_dtype_parse("", &t));
    assert_false(pd_kv_dtype_parse("f16 ", &t));
    assert_false(pd_kv_dtype_parse("F16", &t));
    assert_false(pd_kv_dtype_parse("q8_0", &t));
    assert_int_equal(t, PD_Q6_K);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_half_goes_there_and_back), cmocka_unit_test(halves_round_to_nearest_even), cmocka_unit_test(bf16_rounds_to_nearest_even),
        cmocka_unit_test(dequant_equals_gguf_py_in_every_bit), cmocka_unit_test(unpack_gives_the_declared_form), cmocka_unit_test(types_have_names), cmocka_unit_test(kv_types_have_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
