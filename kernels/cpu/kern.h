/* What the kernel sources of one build share: the functions that table.c gathers, and the form of prepared activations. */
#ifndef PD_CPU_KERN_H
#define PD_CPU_KERN_H

#include "vec.h"

/* Activations for the integer kinds: one record for each 32 k of a row. x ~ scale * q. */
struct act {
    int8_t q[32];               /* in [-127, 127] */
    float scale;                /* max|x| / 127 */
    int16_t isum[2];            /* sums of q over each 16 */
    float fsum;                 /* scale * (isum[0] + isum[1]): what a weight's minimum is multiplied by */
    float pad;
};
_Static_assert(sizeof(struct act) == 48, "an activation record is 48 bytes");

/* Vectors of 16 outputs that a product's tile of R rows has side by side: both halves of a group where the registers hold them, so that its weights pass once. */
#if defined(PD_ISA_AVX512)
#define SIDE_BY_SIDE(R) 2
#elif defined(PD_ISA_AVX2)
#define SIDE_BY_SIDE(R) ((R) == 1 ? 2 : 1)
#else
#define SIDE_BY_SIDE(R) 1
#endif

/* gemm by family of pack; the same arguments as pd_kernels.gemm */
void K(gemm_int)(const struct pd_pmat *w, const void *x, int m, float *y, size_t ldy, int add, int g0, int g1, void *scratch);
void K(gemm_float)(const struct pd_pmat *w, const void *x, int m, float *y, size_t ldy, int add, int g0, int g1, void *scratch);
#if defined(PD_ISA_AVX512)     /* the same with the bf16 instruction; only where the CPU has it */
void K(gemm_dpbf16)(const struct pd_pmat *w, const void *x, int m, float *y, size_t ldy, int add, int g0, int g1, void *scratch);
double K(peak_dpbf16)(enum pd_pack pack, long n, float *sink);
#endif
size_t K(gemm_int_scratch)(const struct pd_pmat *w);
size_t K(gemm_float_scratch)(const struct pd_pmat *w);
size_t K(act_part)(enum pd_pack pack);
size_t K(act_stride)(enum pd_pack pack, int n_in_pad);
void K(prep)(enum pd_pack pack, const float *x, int n_in, int n_in_pad, void *row);

void K(rmsnorm)(float *out, const float *x, const float *w, int n, float eps);
void K(rope)(float *x, int n_heads, int head_dim, int n_rot, const float *cs, int pairs);
void K(silu_mul)(float *out, const float *gate, const float *up, int n);
void K(add)(float *x, const float *y, int n);
void K(kv_write)(void *dst, enum pd_dtype t, const float *x, int n);
void K(exp_sub)(float *out, const float *x, int n, float max, float *sum);
float K(max)(const float *x, int n);

void K(attn)(const struct pd_attn *a, int row0, int row1, void *scratch);
void K(attn_seg)(const struct pd_attn *a, int n_heads, int seg, float *parts, size_t part_stride, void *scratch);
void K(attn_merge)(const struct pd_attn *a, const float *parts, int n_segs);
size_t K(attn_scratch)(int head_dim, int n_group, int n_heads);

void K(split16)(uint8_t *restrict hi, uint8_t *restrict lo, const uint16_t *restrict x, size_t n);
void K(merge16)(uint16_t *restrict x, const uint8_t *restrict hi, const uint8_t *restrict lo, size_t n);
void K(rows)(void *dst, size_t dst_step, const void *src, size_t src_step, size_t row, size_t n);

double K(peak)(enum pd_pack pack, long n, float *sink);
uint64_t K(read)(const void *p, size_t n);

/* Numerics classes: the tests assert that all builds of a class agree in every bit, for the bf16 instruction too (its two fused steps, odd then
 * even, and its flushing of denormals are reproduced where it is missing). */
#define PD_CLS_INT "i8b32-1"
#define PD_CLS_BF16 "bf16dp-1"
#define PD_CLS_FLOAT "f32seq-1"

extern const struct pd_kernels PD_CAT(pd_kernels, PD_ISA);

#endif
