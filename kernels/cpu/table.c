/* The table of one build. */
#include "kern.h"

#define STR2(x) #x
#define STR(x) STR2(x)

static void gemm(const struct pd_pmat *w, const void *x, int m, float *y, size_t ldy, int add, int g0, int g1, void *scratch)
{
    if (w->pack == PD_PK_U8 || w->pack == PD_PK_U4)
        K(gemm_int)(w, x, m, y, ldy, add, g0, g1, scratch);
    else
        K(gemm_float)(w, x, m, y, ldy, add, g0, g1, scratch);
}

static size_t gemm_scratch(const struct pd_pmat *w)
{
    return w->pack == PD_PK_U8 || w->pack == PD_PK_U4 ? K(gemm_int_scratch)(w) : K(gemm_float_scratch)(w);
}

#define TABLE(gemm_, peak_) { \
    .name = STR(PD_ISA), \
    .cls_int = PD_CLS_INT, .cls_bf16 = PD_CLS_BF16, .cls_float = PD_CLS_FLOAT, \
    .gemm = gemm_, .gemm_scratch = gemm_scratch, .act_part = K(act_part), .act_stride = K(act_stride), .prep = K(prep), \
    .rmsnorm = K(rmsnorm), .rope = K(rope), .silu_mul = K(silu_mul), .add = K(add), .kv_write = K(kv_write), \
    .attn = K(attn), .attn_seg = K(attn_seg), .attn_merge = K(attn_merge), .attn_scratch = K(attn_scratch), \
    .exp_sub = K(exp_sub), .max = K(max), .split16 = K(split16), .merge16 = K(merge16), .rows = K(rows), .peak = peak_, .read = K(read), \
}
const struct pd_kernels PD_CAT(pd_kernels, PD_ISA) = TABLE(gemm, K(peak));

#if defined(PD_ISA_AVX512)
static void gemm_dp(const struct pd_pmat *w, const void *x, int m, float *y, size_t ldy, int add, int g0, int g1, void *scratch)
{
    if (w->pack == PD_PK_BF16)
        K(gemm_dpbf16)(w, x, m, y, ldy, add, g0, g1, scratch);
    else
        gemm(w, x, m, y, ldy, add, g0, g1, scratch);
}
const struct pd_kernels pd_kernels_avx512_dpbf16 = TABLE(gemm_dp, K(peak_dpbf16));
#endif
