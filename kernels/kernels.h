/* The table of kernel functions: everything that a backend does for the engine and the KV plane. Header only; no folder above includes kernels/cpu.
 *
 * Bit-identity: each output element is a reduction whose order depends only on its own position, never on the number of rows, the chunk, the thread or
 * the SIMD width. Every kernel is written over 16 virtual float lanes. Integer-dot results are equal across scalar, avx2, avx512 and amx in every bit.
 *
 * Packed weights (struct pd_pmat), W is [n_out, n_in], groups of 32 outputs (the last group zero-padded), n_in a multiple of 32 (rows are zero-padded):
 *   PD_PK_F32   for each group, for each k: 32 floats
 *   PD_PK_F16   for each group, for each k: 32 halves
 *   PD_PK_BF16  for each group, for each pair of k: 32 x 2 bf16 (k, k+1 adjacent)
 *   PD_PK_U8    for each group, for each sub-block of `sub` k: for each four k: 32 x 4 bytes (unsigned u); then the scales of the sub-block: 32 of
 *               (f16 | f32); then, if has_min, 32 mins of the same type.   w = scale * (u - off) + min
 *   PD_PK_U4    the same with two quads of k in one byte plane: for each eight k: 32 x 4 bytes, low nibble = quad 0, high nibble = quad 1
 * Activations are prepared once a row by `prep` into the form that the weights' kind wants (struct pd_act below).
 */
#ifndef PD_KERNELS_H
#define PD_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum pd_dtype {         /* values are GGUF's tensor type ids */
    PD_F32 = 0, PD_F16 = 1, PD_Q4_0 = 2, PD_Q4_1 = 3, PD_Q5_0 = 6, PD_Q5_1 = 7, PD_Q8_0 = 8,
    PD_Q4_K = 12, PD_Q5_K = 13, PD_Q6_K = 14, PD_BF16 = 30
};
enum pd_pack { PD_PK_F32, PD_PK_F16, PD_PK_BF16, PD_PK_U8, PD_PK_U4 };

struct pd_pmat {
    enum pd_pack pack;
    int n_out, n_in;            /* true sizes; n_in_pad = n_in rounded up to 32 */
    int n_in_pad, n_groups;     /* groups of 32 outputs */
    int sub;                    /* 32 or 16: k per scale (PD_PK_U*) */
    int off;                    /* integer zero point: 128 (Q8_0), 8 (Q4_0), 0 (with min), 16, 32 */
    int scale_f32, has_min;
    size_t group_bytes;
    uint8_t *data;              /* n_groups * group_bytes, 64-byte aligned */
};

/* One row of prepared activations, at `row + i * act_stride(kind, n_in_pad)`: a part of act_part(kind) bytes for each 32 k, each made of its own 32 k alone:
 *   PD_PK_F32, PD_PK_F16: 32 floats
 *   PD_PK_BF16: 32 bf16
 *   PD_PK_U8, PD_PK_U4: 48 bytes: int8 q[32], float scale (max|x| / 127), int16 isum[2] (sums of q over each 16), float scale * sum, 4 spare.
 *   x ~ scale * q. */

struct pd_attn {                /* attention of one sequence, one layer, one KV head; GQA group of query heads together */
    const uint8_t *const *blk;  /* [n_blocks] base pointer of each block of the sequence */
    size_t k_off, v_off;        /* bytes from a block's base to this layer's K and V of this KV head: [block_size, head_dim] */
    int block_size, head_dim;   /* head_dim a multiple of 16, <= 256 */
    enum pd_dtype kv_dtype;     /* PD_F16, PD_F32, PD_BF16 */
    const float *q; size_t q_stride;    /* row r, head h of the group: q + r*q_stride + h*head_dim; already roped */
    float *out; size_t out_stride;      /* the same for the output */
    int n_rows, n_group;        /* query rows (positions pos0 .. pos0+n_rows-1); query heads that share this KV head */
    int pos0;                   /* absolute position of row 0; row r attends to keys 0 .. pos0+r */
    float scale;                /* 1/sqrt(head_dim) */
};
#define PD_ATTN_SEG 256         /* keys a segment: scores, max, exp, sum and P.V are formed per segment at fixed absolute positions, then merged in order */

struct pd_kernels {
    const char *name;           /* "scalar" "avx2" "avx512" "amx" */
    const char *cls_int, *cls_bf16, *cls_float;         /* numerics class of integer-dot, bf16 and f32/f16 models: equal strings = equal bits */

    /* y[r*ldy + o] = (add ? y : 0) + sum_k x[r][k] W[o][k], for outputs of groups [g0, g1), rows 0..m-1. x: prepared rows, `act_stride` apart.
     * scratch: gemm_scratch(w) bytes a thread, 64-byte aligned. Outputs past n_out are not written. */
    void (*gemm)(const struct pd_pmat *w, const void *x, int m, float *y, size_t ldy, int add, int g0, int g1, void *scratch);
    size_t (*gemm_scratch)(const struct pd_pmat *w);
    size_t (*act_part)(enum pd_pack pack);
    size_t (*act_stride)(enum pd_pack pack, int n_in_pad);              /* bytes, a multiple of 64 */
    void (*prep)(enum pd_pack pack, const float *x, int n_in, int n_in_pad, void *row);

    void (*rmsnorm)(float *out, const float *x, const float *w, int n, float eps);      /* n a multiple of 16 or zero-padded reading of the tail */
    /* Rotates n_heads heads of head_dim in place; cs = cos/sin pairs [n_rot/2][2] of this position; pairs: 1 adjacent (Llama GGUF), 0 halves. Dims past n_rot stay. */
    void (*rope)(float *x, int n_heads, int head_dim, int n_rot, const float *cs, int pairs);
    void (*silu_mul)(float *out, const float *gate, const float *up, int n);            /* silu(gate) * up */
    void (*add)(float *x, const float *y, int n);                                       /* x += y */
    void (*kv_write)(void *dst, enum pd_dtype t, const float *x, int n);                /* rounded once, to nearest even */

    void (*attn)(const struct pd_attn *a, int row0, int row1, void *scratch);           /* whole rows */
    /* One segment of row 0 (n_rows == 1, decode), for all query heads of n_heads KV heads: a describes the first of them, and the next ones' K and V lie one
     * [block_size, head_dim] further each, their query vectors n_group * head_dim. A part a KV head, part_stride floats apart: per query head of it
     * {max, sum, acc[head_dim]}; merged in order by attn_merge: the same bits as attn. */
    void (*attn_seg)(const struct pd_attn *a, int n_heads, int seg, float *parts, size_t part_stride, void *scratch);
    void (*attn_merge)(const struct pd_attn *a, const float *parts, int n_segs);        /* parts [n_segs][n_group][2 + head_dim] -> a->out */
    size_t (*attn_scratch)(int head_dim, int n_group, int n_heads);

    void (*exp_sub)(float *out, const float *x, int n, float max, float *sum);          /* out = exp(x - max), *sum in 16-lane order */
    float (*max)(const float *x, int n);

    /* The KV plane's: values stay as they are. split16: n 16-bit numbers turned left by one bit, their upper and lower bytes apart; merge16: back. rows: n rows of
     * `row` bytes, each one step further; source and target do not overlap. */
    void (*split16)(uint8_t *hi, uint8_t *lo, const uint16_t *x, size_t n);
    void (*merge16)(uint16_t *x, const uint8_t *hi, const uint8_t *lo, size_t n);
    void (*rows)(void *dst, size_t dst_step, const void *src, size_t src_step, size_t row, size_t n);

    /* Ceilings, for benches. peak: n rounds of independent multiply-adds of the kind that products of `pack` are made of; returns the operations done
     * (a multiply and an add are two). read: touches n bytes (a multiple of 64). */
    double (*peak)(enum pd_pack pack, long n, float *sink);
    uint64_t (*read)(const void *p, size_t n);
};

/* The best table that this CPU runs, or the one that PD_CPU=scalar|avx2|avx512|amx names; NULL with *why set to a static text when that is unknown or cannot run here. */
const struct pd_kernels *pd_kernels_cpu(const char *force, const char **why);

#endif
