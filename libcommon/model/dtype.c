/* Block layouts and formulas: ggml's quantised types as published with GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
 * Everything stored is little-endian; a block has no alignment, so scalars are copied out. */
#include "dtype.h"

static uint16_t load16(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return v; }
static uint64_t load64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }
static float load_half(const uint8_t *p) { return pd_half_to_float(load16(p)); }
static float bits_to_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static uint32_t float_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

float pd_half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = h >> 10 & 31, mant = h & 0x3ff;
    if (exp == 31)
        return bits_to_float(sign | 0x7f800000 | mant << 13);
    if (exp)
        return bits_to_float(sign | (exp + 112) << 23 | mant << 13);
    float f = (float)mant * 0x1p-24f;                       /* zero and subnormals, exact */
    return sign ? -f : f;
}

uint16_t pd_float_to_half(float f)
{
    uint32_t u = float_to_bits(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x3ff));
    if (a >= 0x47800000)                                    /* 65536 and up; 65520..65536 carry into infinity below */
        return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000)                                     /* below 2^-14: the adder rounds to multiples of 2^-24 */
        return (uint16_t)(sign | (float_to_bits(bits_to_float(a) + 0.5f) - 0x3f000000));
    a += 0xfff + (a >> 13 & 1);
    return (uint16_t)(sign | (a - (112u << 23)) >> 13);
}

float pd_bf16_to_float(uint16_t h) { return bits_to_float((uint32_t)h << 16); }

uint16_t pd_float_to_bf16(float f)
{
    uint32_t u = float_to_bits(f);
    if ((u & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

size_t pd_dtype_size(enum pd_dtype t)
{
    return t == PD_F32 ? 4 : t == PD_F16 || t == PD_BF16 ? 2 : 0;
}

/* --- plain types --- */

static void dequant_f32(const void *blocks, float *out, int64_t n) { memcpy(out, blocks, (size_t)n * 4); }

static void dequant_f16(const void *blocks, float *out, int64_t n)
{
    const uint8_t *p = blocks;
    for (int64_t i = 0; i < n; i++)
        out[i] = load_half(p + 2 * i);
}

static void dequant_bf16(const void *blocks, float *out, int64_t n)
{
    const uint8_t *p = blocks;
    for (int64_t i = 0; i < n; i++)
        out[i] = pd_bf16_to_float(load16(p + 2 * i));
}

/* --- 32-element types: {half d; [half m;] [u32 fifth bits;] 16 bytes of nibble pairs (j, j+16)} or {half d; int8 q[32]} --- */

#define NIBBLES 0x0f0f0f0f0f0f0f0full

static void nibbles32(const uint8_t *qs, uint8_t *u)
{
    for (int i = 0; i < 16; i += 8) {
        uint64_t x = load64(qs + i), lo = x & NIBBLES, hi = x >> 4 & NIBBLES;
        memcpy(u + i, &lo, 8);
        memcpy(u + 16 + i, &hi, 8);
    }
}

/* Bit i of b becomes 0x10 of byte i. */
static uint64_t spread_fifth(unsigned b)
{
    uint64_t x = (b * 0x0101010101010101ull) & 0x8040201008040201ull;
    return ((x + 0x7f7f7f7f7f7f7f7full) | x) >> 3 & 0x1010101010101010ull;
}

static void fifth_bits32(const uint8_t *qh, uint8_t *u)
{
    for (int i = 0; i < 4; i++) {
        uint64_t x = load64(u + 8 * i) | spread_fifth(qh[i]);
        memcpy(u + 8 * i, &x, 8);
    }
}

static void unpack_q4_0(const void *block, uint8_t *u, float *scale, float *min)
{
    const uint8_t *p = block;
    *scale = load_half(p);
    nibbles32(p + 2, u);
}

static void unpack_q4_1(const void *block, uint8_t *u, float *scale, float *min)
{
    const uint8_t *p = block;
    *scale = load_half(p);
    *min = load_half(p + 2);
    nibbles32(p + 4, u);
}

static void unpack_q5_0(const void *block, uint8_t *u, float *scale, float *min)
{
    const uint8_t *p = block;
    *scale = load_half(p);
    nibbles32(p + 6, u);
    fifth_bits32(p + 2, u);
}

static void unpack_q5_1(const void *block, uint8_t *u, float *scale, float *min)
{
    const uint8_t *p = block;
    *scale = load_half(p);
    *min = load_half(p + 2);
    nibbles32(p + 8, u);
    fifth_bits32(p + 4, u);
}

static void unpack_q8_0(const void *block, uint8_t *u, float *scale, float *min)
{
    const uint8_t *p = block;
    *scale = load_half(p);
    for (int i = 0; i < 32; i += 8) {
        uint64_t x = load64(p + 2 + i) ^ 0x8080808080808080ull;     /* int8 + 128 */
        memcpy(u + i, &x, 8);
    }
}

/* --- K types: 256 elements; scales of 32 (Q4_K, Q5_K: 6-bit scale and minimum) or of 16 (Q6_K: int8) --- */

/* Sub-block j of 8: its 6-bit scale and minimum out of 12 bytes. The first four lie plain in bytes j and j+4; of the others the low four bits
 * share byte j+4 and the high two are the spare bits of bytes j-4 and j. */
static void k4_scale_min(const uint8_t *s, int j, int *sc, int *m)
{
    if (j < 4) {
        *sc = s[j] & 63;
        *m = s[j + 4] & 63;
    } else {
        *sc = (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
        *m = s[j + 4] >> 4 | s[j] >> 6 << 4;
    }
}

static void k4_scales(const uint8_t *p, float *scale, float *min)
{
    float d = load_half(p), dmin = load_half(p + 2);
    for (int j = 0; j < 8; j++) {
        int sc, m;
        k4_scale_min(p + 4, j, &sc, &m);
        scale[j] = d * (float)sc;
        min[j] = -(dmin * (float)m);
    }
}

static void unpack_q4_k(const void *block, uint8_t *u, float *scale, float *min)
{
    const uint8_t *p = block, *qs = p + 16;
    k4_scales(p, scale, min);
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 32; i += 8) {
            uint64_t x = load64(qs + 32 * j + i), lo = x & NIBBLES, hi = x >> 4 & NIBBLES;
            memcpy(u + 64 * j + i, &lo, 8);
            memcpy(u + 64 * j + 32 + i, &hi, 8);
        }
}

static void unpack_q5_k(const void *block, uint8_t *u, float *scale, float *min)
{
    const uint8_t *p = block, *qh = p + 16, *qs = p + 48;
    const uint64_t ones = 0x0101010101010101ull;
    k4_scales(p, scale, min);
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 32; i += 8) {
            uint64_t x = load64(qs + 32 * j + i), h = load64(qh + i) >> 2 * j;
            uint64_t lo = (x & NIBBLES) | (h & ones) << 4, hi = (x >> 4 & NIBBLES) | (h >> 1 & ones) << 4;
            memcpy(u + 64 * j + i, &lo, 8);
            memcpy(u + 64 * j + 32 + i, &hi, 8);
        }
}

static void unpack_q6_k(const void *block, uint8_t *u, float *scale, float *min)
{
    const uint8_t *p = block, *ql = p, *qh = p + 128, *sc = p + 192;
    const uint64_t twos = 0x0303030303030303ull;
    float d = load_half(p + 208);
    for (int j = 0; j < 16; j++)
        scale[j] = d * (float)(int8_t)sc[j];
    for (int half = 0; half < 2; half++, ql += 64, qh += 32, u += 128)
        for (int i = 0; i < 32; i += 8) {
            uint64_t a = load64(ql + i), b = load64(ql + 32 + i), h = load64(qh + i);
            uint64_t q0 = (a & NIBBLES) | (h & twos) << 4, q1 = (b & NIBBLES) | (h >> 2 & twos) << 4;
            uint64_t q2 = (a >> 4 & NIBBLES) | (h >> 4 & twos) << 4, q3 = (b >> 4 & NIBBLES) | (h >> 6 & twos) << 4;
            memcpy(u + i, &q0, 8);
            memcpy(u + 32 + i, &q1, 8);
            memcpy(u + 64 + i, &q2, 8);
            memcpy(u + 96 + i, &q3, 8);
        }
}

/* w = scale * (u - off) + min, in the order of operations that the formulas have: (d * sc) * q, then the minimum. */
static void dequant_quantised(const struct pd_dtype_traits *t, const uint8_t *p, float *out, int64_t n)
{
    uint8_t u[256];
    float scale[16], min[16];
    int sub = t->form.sub, off = t->form.off;
    for (int64_t done = 0; done < n; done += t->block, p += t->block_bytes) {
        t->unpack(p, u, scale, min);
        for (int s = 0; s * sub < t->block; s++) {
            float d = scale[s], m = min[s];
            if (t->form.has_min)
                for (int i = s * sub; i < (s + 1) * sub; i++)
                    *out++ = d * (float)(u[i] - off) + m;
            else
                for (int i = s * sub; i < (s + 1) * sub; i++)
                    *out++ = d * (float)(u[i] - off);
        }
    }
}

#define DEQUANT(fn, id) static void fn(const void *b, float *out, int64_t n) { dequant_quantised(pd_dtype_traits(id), b, out, n); }
DEQUANT(dequant_q4_0, PD_Q4_0)
DEQUANT(dequant_q4_1, PD_Q4_1)
DEQUANT(dequant_q5_0, PD_Q5_0)
DEQUANT(dequant_q5_1, PD_Q5_1)
DEQUANT(dequant_q8_0, PD_Q8_0)
DEQUANT(dequant_q4_k, PD_Q4_K)
DEQUANT(dequant_q5_k, PD_Q5_K)
DEQUANT(dequant_q6_k, PD_Q6_K)

/* form: {sub, off, has_min, scale_f16, four_bit}. A K type's scale is a product of a half and a 6- or 8-bit integer: exact in float, not in half. */
static const struct pd_dtype_traits traits[] = {
    { PD_F32,  "F32",  1, 4, false, { 0 }, dequant_f32, NULL },
    { PD_F16,  "F16",  1, 2, false, { 0 }, dequant_f16, NULL },
    { PD_BF16, "BF16", 1, 2, false, { 0 }, dequant_bf16, NULL },
    { PD_Q8_0, "Q8_0", 32, 34, true, { 32, 128, false, true, false }, dequant_q8_0, unpack_q8_0 },
    { PD_Q4_0, "Q4_0", 32, 18, true, { 32, 8, false, true, true }, dequant_q4_0, unpack_q4_0 },
    { PD_Q4_1, "Q4_1", 32, 20, true, { 32, 0, true, true, true }, dequant_q4_1, unpack_q4_1 },
    { PD_Q5_0, "Q5_0", 32, 22, true, { 32, 16, false, true, false }, dequant_q5_0, unpack_q5_0 },
    { PD_Q5_1, "Q5_1", 32, 24, true, { 32, 0, true, true, false }, dequant_q5_1, unpack_q5_1 },
    { PD_Q4_K, "Q4_K", 256, 144, true, { 32, 0, true, false, true }, dequant_q4_k, unpack_q4_k },
    { PD_Q5_K, "Q5_K", 256, 176, true, { 32, 0, true, false, false }, dequant_q5_k, unpack_q5_k },
    { PD_Q6_K, "Q6_K", 256, 210, true, { 16, 32, false, false, false }, dequant_q6_k, unpack_q6_k },
};

const struct pd_dtype_traits *pd_dtype_traits(uint32_t ggml_type)
{
    for (size_t i = 0; i < sizeof traits / sizeof *traits; i++)
        if ((uint32_t)traits[i].id == ggml_type)
            return &traits[i];
    return NULL;
}

const char *pd_ggml_type_name(uint32_t ggml_type)
{
    static const char *const names[] = {
        "F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K",
        "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16",
        "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4"
    };
    return ggml_type < sizeof names / sizeof *names ? names[ggml_type] : "unknown";
}

static const struct { enum pd_dtype id; const char *name; } kv_types[] = { { PD_F16, "f16" }, { PD_BF16, "bf16" }, { PD_F32, "f32" } };

const char *pd_kv_dtype_name(enum pd_dtype t)
{
    for (size_t i = 0; i < sizeof kv_types / sizeof *kv_types; i++)
        if (kv_types[i].id == t)
            return kv_types[i].name;
    return NULL;
}

bool pd_kv_dtype_parse(const char *name, enum pd_dtype *t)
{
    for (size_t i = 0; i < sizeof kv_types / sizeof *kv_types; i++)
        if (!strcmp(kv_types[i].name, name)) {
            *t = kv_types[i].id;
            return true;
        }
    return false;
}
