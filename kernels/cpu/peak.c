/* Ceilings: how many multiply-adds a thread can issue, how fast it can read memory. Measured beside the engine, so that a figure can say what share it is. */
#include "kern.h"

#if defined(PD_ISA_AVX512)
enum { CHAINS = 12, INT_CHAINS = 12 };
#elif defined(PD_ISA_AVX2)
enum { CHAINS = 6, INT_CHAINS = 3 };    /* weights and activations want registers too */
#else
enum { CHAINS = 1, INT_CHAINS = 1 };
#endif

/* Independent chains of the instruction that the kind's products are made of. The empty statement keeps the compiler from folding the loop. */
#define KEEP(x) __asm__ volatile("" : "+m"(x))
#define CHAIN_LOOP(chains, type, zero, op, fold) do { \
        type acc[chains]; \
        for (int c = 0; c < chains; c++) acc[c] = zero; \
        for (long i = 0; i < n; i++) { \
            _Pragma("GCC unroll 12") \
            for (int c = 0; c < chains; c++) acc[c] = op; \
        } \
        for (int c = 0; c < chains; c++) total += fold(acc[c]); \
    } while (0)

/* The same x, unknown to the compiler: where a product and its sum are two instructions, the product would leave the loop. */
INL vx fresh(vx *x)
{
#if defined(PD_ISA_AVX2)
    __asm__ volatile("" : "+x"(x->even), "+x"(x->odd));
#endif
    return *x;
}

static inline float sum_int(vi v) { return vf_sum(vi_float(v)); }

INL double peak(const int dpbf16, enum pd_pack pack, long n, float *sink)
{
    float total = 0;
    uint8_t bytes[64];
    int8_t x4[16] = { 1, 2, -1, 3 };
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
        int16_t wide[32];
        vx_open(wide, x4, 16, pack == PD_PK_U4);
        vx x = vx_quad(wide, x4, 0, 16, pack == PD_PK_U4);
        if (pack == PD_PK_U4)
            CHAIN_LOOP(INT_CHAINS, vs, vs_start(vi_set1(0), 1), vs_dot(acc[c], w, fresh(&x), 1), sum_int);
        else
            CHAIN_LOOP(INT_CHAINS, vs, vs_start(vi_set1(0), 0), vs_dot(acc[c], w, fresh(&x), 0), sum_int);
        per *= 4.0 * INT_CHAINS / CHAINS;
#if defined(PD_ISA_AVX512)
    } else if (dpbf16 && pack == PD_PK_BF16) {
        __m512bh w = (__m512bh)_mm512_set1_epi32((int)(pair[1] * 65537u)), x = (__m512bh)_mm512_set1_epi32((int)(pair[0] * 65537u));
        CHAIN_LOOP(CHAINS, vf, vf_set1(0), _mm512_dpbf16_ps(acc[c], w, x), vf_sum);
        per *= 2;
#endif
    } else {
        vf w = vf_set1(half), x = vf_set1(half);
        CHAIN_LOOP(CHAINS, vf, vf_set1(0), vf_fma(w, x, acc[c]), vf_sum);
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
