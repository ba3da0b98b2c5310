/* 16 virtual float lanes (vf), 16 int lanes (vi) and 64 bytes (vb) in every instruction set, for the kernels beside this file.
 *
 * Every function gives the same bits in every build: fused multiply-adds are written where they are meant, there is no approximate
 * instruction, reductions have one fixed tree, and integer sums are exact. Builds: __m512 (PD_ISA_AVX512), two __m256 (PD_ISA_AVX2), arrays.
 * NaN: results are NaN in every build, their payload may differ.
 */
#ifndef PD_CPU_VEC_H
#define PD_CPU_VEC_H

#include <stdint.h>
#include <string.h>
#if defined(PD_ISA_AVX2) || defined(PD_ISA_AVX512)
#include <immintrin.h>
#endif
#include "../kernels.h"

#define PD_CAT2(a, b) a##_##b
#define PD_CAT(a, b) PD_CAT2(a, b)
#define K(name) PD_CAT(pd_k_##name, PD_ISA)     /* a name of its own in each build */
#if defined(__SANITIZE_ADDRESS__)
#define PD_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PD_SANITIZED 1
#endif
#endif
/* Tiles: one body with constant sizes, inlined into each of its users. The sanitizers' builds keep one general copy, for the compiler's sake. */
#if defined(PD_SANITIZED)
#define TILE_INL static __attribute__((noinline, unused))
#else
#define TILE_INL static inline __attribute__((always_inline, unused))
#endif
#if defined(PD_SANITIZED) && !defined(PD_ISA_AVX2) && !defined(PD_ISA_AVX512)
#define INL static __attribute__((noinline, unused))    /* arrays in place of registers, each with its red zones: inlined, they take the compiler minutes */
#else
#define INL static inline __attribute__((always_inline, unused))
#endif

INL uint32_t f_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
INL float f_of(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }

/* Scalar conversions, exact in every build (the vector ones below agree with them). */
INL float half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 0x3ff;
    if (e == 31)
        return f_of(sign | 0x7f800000 | m << 13 | (m ? 0x400000 : 0));
    if (e)
        return f_of(sign | (e + 112) << 23 | m << 13);
    float f = (float)(int32_t)m * 0x1p-24f;
    return f_of(sign | f_bits(f));
}

INL uint16_t float_to_half(float f)
{
    uint32_t u = f_bits(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x3ff));
    if (a >= 0x47800000)                        /* 65536 and above, and infinity */
        return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000) {                       /* below the smallest normal half: a fixed-point number of 2^-24 units; the addition rounds */
        uint32_t r = f_bits(f_of(a) + 0.5f) - f_bits(0.5f);
        return (uint16_t)(sign | r);
    }
    uint32_t r = a - 0x38000000;
    r += 0xfff + (r >> 13 & 1);                 /* ties to even; a carry into the exponent is right, up to infinity */
    return (uint16_t)(sign | r >> 13);
}

INL float bf16_to_float(uint16_t b) { return f_of((uint32_t)b << 16); }
INL uint16_t float_to_bf16(float f)
{
    uint32_t u = f_bits(f);
    if ((u & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* max in the sense of x86: b where either is NaN or they are equal. */
INL float f_max(float a, float b) { return a > b ? a : b; }

#if defined(PD_ISA_AVX512)

INL int v_sum_i8(__m128i q)
{
    __m128i s = _mm_sad_epu8(_mm_xor_si128(q, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(s) + _mm_extract_epi16(s, 4) - 16 * 128;
}
typedef __m512 vf;
typedef __m512i vi;
typedef __m512i vb;
typedef __m512i vx;             /* four activation bytes, broadcast */

INL __mmask16 v_mask(int n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }
INL vf vf_set1(float x) { return _mm512_set1_ps(x); }
INL vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INL void vf_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
INL vf vf_loadn(const float *p, int n, float fill) { return _mm512_mask_loadu_ps(_mm512_set1_ps(fill), v_mask(n), p); }
INL void vf_storen(float *p, vf v, int n) { _mm512_mask_storeu_ps(p, v_mask(n), v); }
INL vf vf_keepn(vf v, int n, float fill) { return _mm512_mask_mov_ps(_mm512_set1_ps(fill), v_mask(n), v); }
INL vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INL vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INL vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INL vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INL vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INL vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INL vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INL vf vf_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
INL vf vf_bf16(const uint16_t *p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16)); }
INL vi vf_bits(vf v) { return _mm512_castps_si512(v); }
INL vf vf_of(vi v) { return _mm512_castsi512_ps(v); }
INL vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
INL vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INL vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
INL vi vi_shl23(vi a) { return _mm512_slli_epi32(a, 23); }
INL vi vi_sar1(vi a) { return _mm512_srai_epi32(a, 1); }
INL vf vi_float(vi a) { return _mm512_cvtepi32_ps(a); }
INL vb vb_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
INL void vb_store(uint8_t *p, vb v) { _mm512_storeu_si512(p, v); }
INL vb vb_xor(vb a, vb b) { return _mm512_xor_si512(a, b); }
INL vb vb_lo4(vb v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
INL vb vb_hi4(vb v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
/* The sums of a sub-block of n <= 32 k, four products a lane and step, unsigned w, signed x other than -128; exact. small: every w is below 16. `wide` is
 * room for what a build makes of the x of a whole sub-block first. */
typedef vi vs;
INL void vx_open(int16_t *wide, const int8_t *q, int n, int small) { }
INL vx vx_quad(const int16_t *wide, const int8_t *q, int i, int n, int small) { int32_t x; memcpy(&x, q + 4 * i, 4); return _mm512_set1_epi32(x); }
INL vs vs_start(vi bias, int small) { return bias; }
INL vs vs_dot(vs acc, vb w, vx x, int small) { return _mm512_dpbusd_epi32(acc, w, x); }
INL vi vs_end(vs acc, vi bias, int small) { return acc; }
/* lo * (low 16 bits of *p) + hi * (high 16 bits), all signed, in every lane */
INL vi vi_madd16(const int16_t *p, int lo, int hi)
{
    int32_t x;
    memcpy(&x, p, 4);
    return _mm512_madd_epi16(_mm512_set1_epi32(x), _mm512_set1_epi32((int32_t)((uint32_t)(hi & 0xffff) << 16 | (uint32_t)(lo & 0xffff))));
}
INL float vf_sum(vf v)
{
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
INL float vf_maxlane(vf v)
{
    __m256 a = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
/* The greatest of 32 magnitudes, compared as integers, so that a NaN wins. */
INL float vf_top(vf a, vf b)
{
    __m512i m = _mm512_set1_epi32(0x7fffffff);
    return f_of(_mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512(vf_bits(a), m), _mm512_and_si512(vf_bits(b), m))));
}
/* The low byte of every lane to q; their signed sum. */
INL int vi_store8(int8_t *q, vi v)
{
    __m128i b = _mm512_cvtepi32_epi8(v);
    _mm_storeu_si128((void *)q, b);
    return v_sum_i8(b);
}
/* 16 halves, rounded to nearest even */
INL void vf_store_half(uint16_t *p, vf v) { _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }

#elif defined(PD_ISA_AVX2)

INL int v_sum_i8(__m128i q)
{
    __m128i s = _mm_sad_epu8(_mm_xor_si128(q, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(s) + _mm_extract_epi16(s, 4) - 16 * 128;
}
typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;
typedef vi vb;
typedef struct { __m256i even, odd; } vx;       /* four activation bytes, broadcast; or bytes 0 and 2, 1 and 3, widened to 16 bits */

INL __m256i v_mask8(int n)
{
    static const int32_t t[16] = { -1, -1, -1, -1, -1, -1, -1, -1 };
    return _mm256_loadu_si256((const void *)(t + 8 - (n < 0 ? 0 : n > 8 ? 8 : n)));
}
INL vf vf_set1(float x) { __m256 t = _mm256_set1_ps(x); return (vf){ t, t }; }
INL vf vf_load(const float *p) { return (vf){ _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8) }; }
INL void vf_store(float *p, vf v) { _mm256_storeu_ps(p, v.a); _mm256_storeu_ps(p + 8, v.b); }
INL vf vf_keepn(vf v, int n, float fill)
{
    __m256 f = _mm256_set1_ps(fill);
    return (vf){ _mm256_blendv_ps(f, v.a, _mm256_castsi256_ps(v_mask8(n))), _mm256_blendv_ps(f, v.b, _mm256_castsi256_ps(v_mask8(n - 8))) };
}
INL vf vf_loadn(const float *p, int n, float fill)
{
    if (n >= 16)
        return vf_load(p);
    vf v = { _mm256_maskload_ps(p, v_mask8(n)), n > 8 ? _mm256_maskload_ps(p + 8, v_mask8(n - 8)) : _mm256_setzero_ps() };
    return vf_keepn(v, n, fill);
}
INL void vf_storen(float *p, vf v, int n)
{
    _mm256_maskstore_ps(p, v_mask8(n), v.a);
    if (n > 8)
        _mm256_maskstore_ps(p + 8, v_mask8(n - 8), v.b);
}
#define VF_OP(name, ins) INL vf name(vf x, vf y) { return (vf){ ins(x.a, y.a), ins(x.b, y.b) }; }
VF_OP(vf_add, _mm256_add_ps) VF_OP(vf_sub, _mm256_sub_ps) VF_OP(vf_mul, _mm256_mul_ps) VF_OP(vf_div, _mm256_div_ps)
VF_OP(vf_max, _mm256_max_ps) VF_OP(vf_min, _mm256_min_ps)
INL vf vf_fma(vf x, vf y, vf c) { return (vf){ _mm256_fmadd_ps(x.a, y.a, c.a), _mm256_fmadd_ps(x.b, y.b, c.b) }; }
INL vf vf_half(const uint16_t *p)
{
    return (vf){ _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p + 8))) };
}
INL __m256 v_bf8(const uint16_t *p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16)); }
INL vf vf_bf16(const uint16_t *p) { return (vf){ v_bf8(p), v_bf8(p + 8) }; }
INL vi vf_bits(vf v) { return (vi){ _mm256_castps_si256(v.a), _mm256_castps_si256(v.b) }; }
INL vf vf_of(vi v) { return (vf){ _mm256_castsi256_ps(v.a), _mm256_castsi256_ps(v.b) }; }
INL vi vi_set1(int32_t x) { __m256i t = _mm256_set1_epi32(x); return (vi){ t, t }; }
INL vi vi_add(vi x, vi y) { return (vi){ _mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b) }; }
INL vi vi_sub(vi x, vi y) { return (vi){ _mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b) }; }
INL vi vi_shl23(vi x) { return (vi){ _mm256_slli_epi32(x.a, 23), _mm256_slli_epi32(x.b, 23) }; }
INL vi vi_sar1(vi x) { return (vi){ _mm256_srai_epi32(x.a, 1), _mm256_srai_epi32(x.b, 1) }; }
INL vf vi_float(vi x) { return (vf){ _mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b) }; }
INL vb vb_load(const uint8_t *p) { return (vb){ _mm256_loadu_si256((const void *)p), _mm256_loadu_si256((const void *)(p + 32)) }; }
INL void vb_store(uint8_t *p, vb v) { _mm256_storeu_si256((void *)p, v.a); _mm256_storeu_si256((void *)(p + 32), v.b); }
INL vb vb_xor(vb x, vb y) { return (vb){ _mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b) }; }
INL vb vb_lo4(vb v) { __m256i m = _mm256_set1_epi8(15); return (vb){ _mm256_and_si256(v.a, m), _mm256_and_si256(v.b, m) }; }
INL vb vb_hi4(vb v)
{
    __m256i m = _mm256_set1_epi8(15);
    return (vb){ _mm256_and_si256(_mm256_srli_epi16(v.a, 4), m), _mm256_and_si256(_mm256_srli_epi16(v.b, 4), m) };
}
/* Bytes below 16 by bytes: a pair's sum stays within 3810, the eight that a lane of 16 bits takes within 30480. The 8-bit multiply-add of greater ones
 * would saturate: they go in 16 bits, bytes 0 and 2 of every four and bytes 1 and 3 apart. */
typedef vi vs;
INL void vx_open(int16_t *wide, const int8_t *q, int n, int small)
{
    if (small)
        return;
    if (n == 32) {
        __m256i x = _mm256_loadu_si256((const void *)q);
        _mm256_storeu_si256((void *)wide, _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
        _mm256_storeu_si256((void *)(wide + 16), _mm256_srai_epi16(x, 8));
    } else {
        __m128i x = _mm_loadu_si128((const void *)q);
        _mm_storeu_si128((void *)wide, _mm_srai_epi16(_mm_slli_epi16(x, 8), 8));
        _mm_storeu_si128((void *)(wide + 8), _mm_srai_epi16(x, 8));
    }
    /* each pair is broadcast from memory, at no cost; compilers would rather shuffle it out of a register */
    __asm__ volatile("" : "+m"(*(int16_t (*)[32])wide));
}
INL __m256i v_pair(const void *p) { int32_t i; memcpy(&i, p, 4); return _mm256_set1_epi32(i); }
INL vx vx_quad(const int16_t *wide, const int8_t *q, int i, int n, int small)
{
    return small ? (vx){ v_pair(q + 4 * i), _mm256_setzero_si256() } : (vx){ v_pair(wide + 2 * i), v_pair(wide + n / 2 + 2 * i) };
}
INL vs vs_start(vi bias, int small) { return small ? vi_set1(0) : bias; }
INL __m256i v_dot(__m256i acc, __m256i w, vx x, int small)
{
    if (small) {
        acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x.even));
    } else {
        acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), x.even));
        acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_srli_epi16(w, 8), x.odd));
    }
    __asm__("" : "+x"(acc));    /* in this order: compilers would rather keep all products, more than there are registers, and add them up in the end */
    return acc;
}
INL vs vs_dot(vs acc, vb w, vx x, int small) { return (vs){ v_dot(acc.a, w.a, x, small), v_dot(acc.b, w.b, x, small) }; }
INL vi vs_end(vs acc, vi bias, int small)
{
    __m256i one = _mm256_set1_epi16(1);
    return small ? (vi){ _mm256_add_epi32(bias.a, _mm256_madd_epi16(acc.a, one)), _mm256_add_epi32(bias.b, _mm256_madd_epi16(acc.b, one)) } : acc;
}
INL vi vi_madd16(const int16_t *p, int lo, int hi)
{
    __m256i t = _mm256_madd_epi16(v_pair(p), _mm256_set1_epi32((int32_t)((uint32_t)(hi & 0xffff) << 16 | (uint32_t)(lo & 0xffff))));
    return (vi){ t, t };
}
INL float v_sum8(__m256 a)
{
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
INL float vf_sum(vf v) { return v_sum8(_mm256_add_ps(v.a, v.b)); }
INL float vf_maxlane(vf v)
{
    __m256 a = _mm256_max_ps(v.a, v.b);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
INL float vf_top(vf x, vf y)
{
    __m256i m = _mm256_set1_epi32(0x7fffffff);
    __m256i a = _mm256_max_epu32(_mm256_and_si256(_mm256_castps_si256(x.a), m), _mm256_and_si256(_mm256_castps_si256(x.b), m));
    __m256i b = _mm256_max_epu32(_mm256_and_si256(_mm256_castps_si256(y.a), m), _mm256_and_si256(_mm256_castps_si256(y.b), m));
    a = _mm256_max_epu32(a, b);
    __m128i c = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    c = _mm_max_epu32(c, _mm_unpackhi_epi64(c, c));
    c = _mm_max_epu32(c, _mm_srli_epi64(c, 32));
    return f_of((uint32_t)_mm_cvtsi128_si32(c));
}
INL int vi_store8(int8_t *q, vi v)
{
    __m256i pick = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    __m256i a = _mm256_shuffle_epi8(v.a, pick), b = _mm256_shuffle_epi8(v.b, pick);
    __m128i lo = _mm_unpacklo_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    __m128i hi = _mm_unpacklo_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    __m128i r = _mm_unpacklo_epi64(lo, hi);
    _mm_storeu_si128((void *)q, r);
    return v_sum_i8(r);
}
INL void vf_store_half(uint16_t *p, vf v)
{
    _mm_storeu_si128((void *)p, _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((void *)(p + 8), _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#else

typedef struct { float v[16]; } vf;
typedef struct { int32_t v[16]; } vi;
typedef struct { uint8_t v[64]; } vb;
typedef struct { int8_t v[4]; } vx;
#define EACH for (int l = 0; l < 16; l++)

INL vf vf_set1(float x) { vf r; EACH r.v[l] = x; return r; }
INL vf vf_load(const float *p) { vf r; memcpy(r.v, p, 64); return r; }
INL void vf_store(float *p, vf v) { memcpy(p, v.v, 64); }
INL vf vf_keepn(vf v, int n, float fill) { vf r; EACH r.v[l] = l < n ? v.v[l] : fill; return r; }
INL vf vf_loadn(const float *p, int n, float fill) { vf r; EACH r.v[l] = l < n ? p[l] : fill; return r; }
INL void vf_storen(float *p, vf v, int n) { EACH if (l < n) p[l] = v.v[l]; }
INL vf vf_add(vf a, vf b) { vf r; EACH r.v[l] = a.v[l] + b.v[l]; return r; }
INL vf vf_sub(vf a, vf b) { vf r; EACH r.v[l] = a.v[l] - b.v[l]; return r; }
INL vf vf_mul(vf a, vf b) { vf r; EACH r.v[l] = a.v[l] * b.v[l]; return r; }
INL vf vf_div(vf a, vf b) { vf r; EACH r.v[l] = a.v[l] / b.v[l]; return r; }
INL vf vf_max(vf a, vf b) { vf r; EACH r.v[l] = f_max(a.v[l], b.v[l]); return r; }
INL vf vf_min(vf a, vf b) { vf r; EACH r.v[l] = a.v[l] < b.v[l] ? a.v[l] : b.v[l]; return r; }
INL vf vf_fma(vf a, vf b, vf c) { vf r; EACH r.v[l] = __builtin_fmaf(a.v[l], b.v[l], c.v[l]); return r; }
INL vf vf_half(const uint16_t *p) { vf r; EACH r.v[l] = half_to_float(p[l]); return r; }
INL vf vf_bf16(const uint16_t *p) { vf r; EACH r.v[l] = bf16_to_float(p[l]); return r; }
INL vi vf_bits(vf v) { vi r; memcpy(r.v, v.v, 64); return r; }
INL vf vf_of(vi v) { vf r; memcpy(r.v, v.v, 64); return r; }
INL vi vi_set1(int32_t x) { vi r; EACH r.v[l] = x; return r; }
INL vi vi_add(vi a, vi b) { vi r; EACH r.v[l] = (int32_t)((uint32_t)a.v[l] + (uint32_t)b.v[l]); return r; }
INL vi vi_sub(vi a, vi b) { vi r; EACH r.v[l] = (int32_t)((uint32_t)a.v[l] - (uint32_t)b.v[l]); return r; }
INL vi vi_shl23(vi a) { vi r; EACH r.v[l] = (int32_t)((uint32_t)a.v[l] << 23); return r; }
INL vi vi_sar1(vi a) { vi r; EACH r.v[l] = a.v[l] >> 1; return r; }
INL vf vi_float(vi a) { vf r; EACH r.v[l] = (float)a.v[l]; return r; }
INL vb vb_load(const uint8_t *p) { vb r; memcpy(r.v, p, 64); return r; }
INL void vb_store(uint8_t *p, vb v) { memcpy(p, v.v, 64); }
INL vb vb_xor(vb a, vb b) { vb r; for (int i = 0; i < 64; i++) r.v[i] = a.v[i] ^ b.v[i]; return r; }
INL vb vb_lo4(vb v) { vb r; for (int i = 0; i < 64; i++) r.v[i] = v.v[i] & 15; return r; }
INL vb vb_hi4(vb v) { vb r; for (int i = 0; i < 64; i++) r.v[i] = v.v[i] >> 4; return r; }
typedef vi vs;
INL void vx_open(int16_t *wide, const int8_t *q, int n, int small) { }
INL vx vx_quad(const int16_t *wide, const int8_t *q, int i, int n, int small) { vx r; memcpy(r.v, q + 4 * i, 4); return r; }
INL vs vs_start(vi bias, int small) { return bias; }
INL vs vs_dot(vs acc, vb w, vx x, int small)
{
    (void)small;
    EACH acc.v[l] += w.v[4 * l] * x.v[0] + w.v[4 * l + 1] * x.v[1] + w.v[4 * l + 2] * x.v[2] + w.v[4 * l + 3] * x.v[3];
    return acc;
}
INL vi vs_end(vs acc, vi bias, int small) { return acc; }
INL vi vi_madd16(const int16_t *p, int lo, int hi) { return vi_set1(p[0] * lo + p[1] * hi); }
INL float vf_sum(vf v)
{
    for (int h = 8; h; h /= 2)
        for (int l = 0; l < h; l++)
            v.v[l] += v.v[l + h];
    return v.v[0];
}
INL float vf_maxlane(vf v)
{
    for (int h = 8; h; h /= 2)
        for (int l = 0; l < h; l++)
            v.v[l] = f_max(v.v[l], v.v[l + h]);
    return v.v[0];
}
INL float vf_top(vf a, vf b)
{
    uint32_t top = 0, u;
    EACH { u = f_bits(a.v[l]) & 0x7fffffff; top = u > top ? u : top; u = f_bits(b.v[l]) & 0x7fffffff; top = u > top ? u : top; }
    return f_of(top);
}
INL int vi_store8(int8_t *q, vi v)
{
    int s = 0;
    EACH { q[l] = (int8_t)(uint8_t)v.v[l]; s += q[l]; }
    return s;
}
INL void vf_store_half(uint16_t *p, vf v) { EACH p[l] = float_to_half(v.v[l]); }
#endif

/* exp, at most 2 units in the last place from the true value over the whole range: x = n ln 2 + r, a polynomial in r, and 2^n as two exact
 * factors, so that results below the normal range are right too. NaN stays NaN, -inf gives 0, +inf gives +inf. No branch, no conversion. */
INL vf vf_exp(vf x)
{
    x = vf_min(vf_set1(89.0f), vf_max(vf_set1(-104.5f), x));            /* both return x when it is NaN */
    vf magic = vf_set1(0x1.8p23f);
    vf t = vf_fma(x, vf_set1(0x1.715476p+0f), magic);                   /* rounds x log2(e) to an integer in the low bits */
    vf nf = vf_sub(t, magic);
    vf r = vf_fma(nf, vf_set1(-0x1.62e400p-1f), x);
    r = vf_fma(nf, vf_set1(-0x1.7f7d1cp-20f), r);
    vf p = vf_set1(0x1.a01a02p-13f);                                    /* exp(r) = 1 + r + r^2 q(r), q by Taylor: |r| <= ln 2 / 2 leaves 2^-27 */
    p = vf_fma(p, r, vf_set1(0x1.6c16c2p-10f));
    p = vf_fma(p, r, vf_set1(0x1.111112p-7f));
    p = vf_fma(p, r, vf_set1(0x1.555556p-5f));
    p = vf_fma(p, r, vf_set1(0x1.555556p-3f));
    p = vf_fma(p, r, vf_set1(0.5f));
    p = vf_fma(vf_mul(p, r), r, r);
    p = vf_add(p, vf_set1(1.0f));
#if defined(PD_ISA_AVX512)
    return _mm512_scalef_ps(p, nf);                                     /* rounds once, as the two steps below do */
#else
    vi n = vi_sub(vf_bits(t), vf_bits(magic));
    vi n1 = vi_sar1(n), n2 = vi_sub(n, n1), bias = vi_set1(127);
    p = vf_mul(p, vf_of(vi_shl23(vi_add(n1, bias))));
    return vf_mul(p, vf_of(vi_shl23(vi_add(n2, bias))));
#endif
}

#endif
