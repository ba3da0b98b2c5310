/* Ceilings: how many multiply-adds a thread can issue, how fast it can read memory. Measured beside the engine, so that a figure can say what share it is. */
#include "kern.h"

#if defined(PD_ISA_AVX512)
enum { CHAINS = 12 };
#elif defined(PD_ISA_AVX2)
enum { CHAINS = 6 };
#else
enum { CHAINS = 1 };
#endif

/* Independent chains of the instruction that the kind's products are made of. The empty statement keeps the compiler from folding the loop. */
#define KEEP(x) __asm__ volatile("" : "+m"(x))
#define CHAIN_LOOP(type, zero, op, fold) do { \
        type acc[CHAINS]; \
        for (int c = 0; c < CHAINS; c++) acc[c] = zero; \
        for (long i = 0; i < n; i++) { \
            _Pragma("GCC unroll 12") \
            for (int c = 0; c < CHAINS; c++) acc[c] = op; \
        } \
        for (int c = 0; c < CHAINS; c++) total += fold(acc[c]); \
    } while (0)

static inline float sum_int(vi v) { return vf_sum(vi_float(v)); }

INL double peak(const int dpbf16, enum pd_pack pack, long n, float *sink)
{
    float total = 0;
    uint8_t bytes[64];
    int8_t x4[4] = { 1, 2, -1, 3 };
    uint16_t pair[2] = { 0x3f00, 0x3f80 };
    float half = 0.5f;
    for (int i = 0; i < 64; i++)
        bytes[i] = (uint8_t)i;
    KEEP(bytes);
    KEEP(x4);
    KEEP(pair);
    KEEP(half);
    double per = 2 * 16;
    if (pack == PD_PK_U8 || pack == PD_PK_U4) {
        vb w = vb_load(bytes);
        vx x = vx_bcast(x4);
        CHAIN_LOOP(vi, vi_set1(0), vi_dot4(acc[c], w, x), sum_int);
        per *= 4;
#if defined(PD_ISA_AVX512)
    } else if (dpbf16 && pack == PD_PK_BF16) {
        __m512bh w = (__m512bh)_mm512_set1_epi32((int)(pair[1] * 65537u)), x = (__m512bh)_mm512_set1_epi32((int)(pair[0] * 65537u));
        CHAIN_LOOP(vf, vf_set1(0), _mm512_dpbf16_ps(acc[c], w, x), vf_sum);
        per *= 2;
#endif
    } else {
        vf w = vf_set1(half), x = vf_set1(half);
        CHAIN_LOOP(vf, vf_set1(0), vf_fma(w, x, acc[c]), vf_sum);
    }
    *sink = total;
    return per * CHAINS * (double)n;
}

double K(peak)(enum pd_pack pack, long n, float *sink) { return peak(0, pack, n, sink); }
#if defined(PD_ISA_AVX512)
double K(peak_dpbf16)(enum pd_pack pack, long n, float *sink) { return peak(1, pack, n, sink); }
#endif

uint64_t K(read)(const void *p, size_t n)
{
    const uint8_t *b = p;
    vb any = vb_load(b);
    uint8_t last[64];
    uint64_t r;
    for (size_t i = 64; i + 64 <= n; i += 64) {
        __builtin_prefetch(b + i + 16384, 0, 2);        /* as the products ask for their next group */
        any = vb_xor(any, vb_load(b + i));
    }
    vb_store(last, any);
    memcpy(&r, last, sizeof r);
    return r;
}
