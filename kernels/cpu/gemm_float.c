/* Products with F32, F16 and BF16 weights.
 *
 * F32, F16: acc = fma(x[k], w[k], acc) over k in order; halves widen exactly. BF16: the activations are rounded to bf16 and every pair of k is
 * one step of VDPBF16PS: acc = fma(x1, w1, acc), then acc = fma(x0, w0, acc), denormal inputs and results taken as zero. Elsewhere, and where
 * that instruction is missing or slower than what it stands for (Intel's), the same two steps run with the processor's flush modes set, which gives
 * the same bits.
 */
#include "kern.h"
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#if defined(PD_ISA_AVX512)
enum { R_MAX = 8 };
#elif defined(PD_ISA_AVX2)
enum { R_MAX = 4 };
#else
enum { R_MAX = 1 };
#endif
enum { WIDEN_FROM = 4 };        /* rows from which a group of halves is widened once */
enum kind { F32, F16, BF16, DPBF16 /* the instruction */ };

#if defined(__SSE__)
static unsigned flush_on(void) { unsigned csr = _mm_getcsr(); _mm_setcsr(csr | 0x8040); return csr; }
static void flush_off(unsigned csr) { _mm_setcsr(csr); }
#else
static unsigned flush_on(void) { return 0; }
static void flush_off(unsigned csr) { (void)csr; }
#endif

/* Pairs of k of 16 outputs: the odd ones and the even ones as floats; one pair for all outputs. */
#if defined(PD_ISA_AVX512)
INL vf odd(vb w) { return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int32_t)0xffff0000))); }
INL vf even(vb w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
INL vb same_pair(const uint16_t *x) { int32_t i; memcpy(&i, x, 4); return _mm512_set1_epi32(i); }
INL vf dp_bf16(vf acc, vb w, const uint16_t *x) { return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)same_pair(x)); }
#elif defined(PD_ISA_AVX2)
INL vf odd(vb w)
{
    __m256i m = _mm256_set1_epi32((int32_t)0xffff0000);
    return (vf){ _mm256_castsi256_ps(_mm256_and_si256(w.a, m)), _mm256_castsi256_ps(_mm256_and_si256(w.b, m)) };
}
INL vf even(vb w) { return (vf){ _mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16)) }; }
INL vb same_pair(const uint16_t *x) { int32_t i; memcpy(&i, x, 4); return (vb){ _mm256_set1_epi32(i), _mm256_set1_epi32(i) }; }
#else
INL vb same_pair(const uint16_t *x) { vb r; EACH memcpy(r.v + 4 * l, x, 4); return r; }
INL vf odd(vb w) { vf r; EACH r.v[l] = bf16_to_float((uint16_t)(w.v[4 * l + 2] | w.v[4 * l + 3] << 8)); return r; }
INL vf even(vb w) { vf r; EACH r.v[l] = bf16_to_float((uint16_t)(w.v[4 * l] | w.v[4 * l + 1] << 8)); return r; }
#endif

INL void ask(const uint8_t *p, int bytes)
{
    for (int o = 0; o < bytes; o += 64)
        __builtin_prefetch(p + o, 0, 2);
}

/* acc_out [R][32] for R rows of activations `stride` bytes apart, over n_in k. ahead: bytes from here to what to ask memory for meanwhile (the next
 * group, while the first rows pass through this one), or 0. */
TILE_INL void tile(const int R, const enum kind kind, const uint8_t *p, int n_in, const uint8_t *x, size_t stride, size_t ahead, float *acc_out)
{
    const int NV = SIDE_BY_SIDE(R);
    for (int v0 = 0; v0 < 2; v0 += NV) {
        vf acc[R_MAX][2];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < NV; v++)
                acc[r][v] = vf_set1(0);
        if (kind == BF16 || kind == DPBF16) {
            for (int k = 0; k < n_in; k += 2) {
                vb w[2];
                if (ahead && !v0)
                    ask(p + ahead + (size_t)k * 64, 128);
                for (int v = 0; v < NV; v++)
                    w[v] = vb_load(p + (size_t)k * 64 + (v0 + v) * 64);
#if defined(PD_ISA_AVX512)
                if (kind == DPBF16) {
                    for (int r = 0; r < R; r++)
                        for (int v = 0; v < NV; v++)
                            acc[r][v] = dp_bf16(acc[r][v], w[v], (const uint16_t *)(const void *)(x + r * stride) + k);
                    continue;
                }
#endif
                vf w1[2], w0[2];
                for (int v = 0; v < NV; v++) {
                    w1[v] = odd(w[v]);
                    w0[v] = even(w[v]);
                }
                for (int r = 0; r < R; r++) {
                    vb pair = same_pair((const uint16_t *)(const void *)(x + r * stride) + k);
                    vf x1 = odd(pair), x0 = even(pair);
                    for (int v = 0; v < NV; v++)
                        acc[r][v] = vf_fma(w0[v], x0, vf_fma(w1[v], x1, acc[r][v]));
                }
            }
        } else {
            for (int k = 0; k < n_in; k++) {
                vf w[2];
                if (ahead && !v0)
                    ask(p + ahead + (size_t)k * (kind == F32 ? 128 : 64), kind == F32 ? 128 : 64);
                for (int v = 0; v < NV; v++)
                    w[v] = kind == F32 ? vf_load((const float *)(const void *)p + (size_t)k * 32 + (v0 + v) * 16)
                                       : vf_half((const uint16_t *)(const void *)p + (size_t)k * 32 + (v0 + v) * 16);
                for (int r = 0; r < R; r++) {
                    vf xk = vf_set1(((const float *)(const void *)(x + r * stride))[k]);
                    for (int v = 0; v < NV; v++)
                        acc[r][v] = vf_fma(xk, w[v], acc[r][v]);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < NV; v++)
                vf_store(acc_out + r * 32 + (v0 + v) * 16, acc[r][v]);
    }
}

typedef void tile_fn(const uint8_t *p, int n_in, const uint8_t *x, size_t stride, size_t ahead, float *acc);
#define TILE(R, kind) \
    static __attribute__((noinline)) void tile_##R##_##kind(const uint8_t *p, int n_in, const uint8_t *x, size_t stride, size_t ahead, float *acc) \
    { tile(R, kind, p, n_in, x, stride, ahead, acc); }
#if defined(PD_ISA_AVX512)
#define TILES(R) TILE(R, F32) TILE(R, F16) TILE(R, BF16) TILE(R, DPBF16)
#else
#define TILES(R) TILE(R, F32) TILE(R, F16) TILE(R, BF16)
#endif
TILES(1)
#if defined(PD_ISA_AVX512)
TILES(2) TILES(3) TILES(4) TILES(5) TILES(6) TILES(7) TILES(8)
#define ROW(k) { NULL, tile_1_##k, tile_2_##k, tile_3_##k, tile_4_##k, tile_5_##k, tile_6_##k, tile_7_##k, tile_8_##k }
#elif defined(PD_ISA_AVX2)
TILES(2) TILES(3) TILES(4)
#define ROW(k) { NULL, tile_1_##k, tile_2_##k, tile_3_##k, tile_4_##k }
#else
#define ROW(k) { NULL, tile_1_##k }
#endif
static tile_fn *const tiles[][R_MAX + 1] = { ROW(F32), ROW(F16), ROW(BF16),
#if defined(PD_ISA_AVX512)
                                             ROW(DPBF16)
#endif
};

size_t K(gemm_float_scratch)(const struct pd_pmat *w) { return w->pack == PD_PK_F16 ? (size_t)w->n_in_pad * 32 * 4 : 64; }

INL void product(enum kind bf16, const struct pd_pmat *w, const void *x, int m, float *y, size_t ldy, int add, int g0, int g1, void *scratch)
{
    const size_t stride = K(act_stride)(w->pack, w->n_in_pad);
    const int widening = w->pack == PD_PK_F16 && m >= WIDEN_FROM;
    const enum kind kind = w->pack == PD_PK_BF16 ? bf16 : w->pack == PD_PK_F16 && !widening ? F16 : F32;
    int chunks = (int)((size_t)m * stride / (400 * 1024)) + 1, chunk = ((m + chunks - 1) / chunks + R_MAX - 1) / R_MAX * R_MAX;
    for (int r0 = 0; r0 < m; r0 += chunk) {
        int r1 = r0 + chunk < m ? r0 + chunk : m;
        for (int gi = g0; gi < g1; gi++) {
            const uint8_t *p = w->data + (size_t)gi * w->group_bytes;
            if (widening) {
                float *d = scratch;
                for (int k = 0; k < w->n_in_pad * 32; k += 16)
                    vf_store(d + k, vf_half((const uint16_t *)(const void *)p + k));
                p = scratch;
            }
            int n_out = w->n_out - gi * 32;
            n_out = n_out < 32 ? n_out : 32;
            for (int r = r0; r < r1; ) {
                float acc[R_MAX * 32];
                int n = r1 - r < R_MAX ? r1 - r : R_MAX;
                const uint8_t *xr = (const uint8_t *)x + (size_t)r * stride;
                size_t ahead = r == r0 && !widening ? w->group_bytes : 0;
                if (kind == BF16) {
                    unsigned csr = flush_on();
                    tiles[BF16][n](p, w->n_in_pad, xr, stride, ahead, acc);
                    flush_off(csr);
                } else {
                    tiles[kind][n](p, w->n_in_pad, xr, stride, ahead, acc);
                }
                for (int i = 0; i < n; i++) {
                    float *yr = y + (size_t)(r + i) * ldy + gi * 32;
                    if (add)
                        for (int o = 0; o < n_out; o++)
                            yr[o] += acc[i * 32 + o];
                    else
                        memcpy(yr, acc + i * 32, (size_t)n_out * 4);
                }
                r += n;
            }
        }
    }
}

void K(gemm_float)(const struct pd_pmat *w, const void *x, int m, float *y, size_t ldy, int add, int g0, int g1, void *scratch)
{
    product(BF16, w, x, m, y, ldy, add, g0, g1, scratch);
}

#if defined(PD_ISA_AVX512)
void K(gemm_dpbf16)(const struct pd_pmat *w, const void *x, int m, float *y, size_t ldy, int add, int g0, int g1, void *scratch)
{
    product(DPBF16, w, x, m, y, ldy, add, g0, g1, scratch);
}
#endif
