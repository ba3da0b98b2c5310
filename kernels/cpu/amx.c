/* bf16 products with the tile unit (AMX), for CPUs that have one; everything else is the avx512 build's.
 *
 * One row or many, every 32 k are one step of TDPBF16PS: the even and the odd k are summed apart, each by fused multiply-adds from zero in order, denormals
 * taken as zero; then the two sums are added, and the result to the output's sum. That is another order than VDPBF16PS has, so the numerics class has
 * a name of its own. The quantised kinds stay with the avx512 build: their sums must leave the tiles every 32 k for their scales, which was
 * measured to take as long as that build needs for the whole product. */
#include "kern.h"

enum { T = 16, STEP = 32 };     /* rows and outputs of a tile; k of one tile product */

struct __attribute__((packed)) shape { uint8_t palette, start; uint8_t reserved[14]; uint16_t colsb[16]; uint8_t rows[16]; };

/* Tiles 0-3: sums, [m][16] floats; 4, 5: activations, [m][32] bf16; 6, 7: weights, [16 pairs of k][16 outputs][2] bf16. */
static void shape_tiles(int m)
{
    struct shape s = { .palette = 1 };
    for (int t = 0; t < 8; t++) {
        s.colsb[t] = 64;
        s.rows[t] = (uint8_t)(t < 6 ? m : T);
    }
    __asm__ volatile("" : : "m"(s));        /* some compilers take the instruction to read eight bytes only */
    _tile_loadconfig(&s);
}

INL void put(float *y, vf acc, int add, int n)
{
    if (n >= 16)
        vf_store(y, add ? vf_add(vf_load(y), acc) : acc);
    else if (n > 0)
        vf_storen(y, add ? vf_add(vf_loadn(y, n, 0), acc) : acc, n);
}

/* The sums [16][32] of rows from `at`, to rows [r0, r1) of y. */
static void put_rows(const float *sums, int at, int r0, int r1, float *y, size_t ldy, int add, int n_out)
{
    for (int r = r0; r < r1; r++)
        for (int v = 0; v < 2; v++)
            put(y + (size_t)r * ldy + 16 * v, vf_load(sums + (r - at) * 32 + 16 * v), add, n_out - 16 * v);
}

/* One tile of rows (x1 NULL) or two, whole k, to sums [16][32] each. ahead: bytes from here to what to ask memory for meanwhile, or 0. */
static void tiles(const uint8_t *p, int n_in, const uint8_t *x0, const uint8_t *x1, size_t stride, size_t ahead, float *sums)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < n_in; k += STEP, p += STEP * 64) {
        for (int o = 0; ahead && o < STEP * 64; o += 64)
            __builtin_prefetch(p + ahead + o, 0, 2);
        _tile_loadd(4, x0 + (size_t)k * 2, stride);
        _tile_loadd(6, p, 128);
        _tile_loadd(7, p + 64, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (x1) {
            _tile_loadd(5, x1 + (size_t)k * 2, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    if (x1) {
        _tile_stored(2, sums + T * 32, 128);
        _tile_stored(3, sums + T * 32 + 16, 128);
    }
}

static void gemm(const struct pd_pmat *w, const void *x, int m, float *y, size_t ldy, int add, int g0, int g1, void *scratch)
{
    if (w->pack == PD_PK_U8 || w->pack == PD_PK_U4) {
        K(gemm_int)(w, x, m, y, ldy, add, g0, g1, scratch);
        return;
    }
    if (w->pack != PD_PK_BF16) {
        K(gemm_float)(w, x, m, y, ldy, add, g0, g1, scratch);
        return;
    }
    const size_t stride = K(act_stride)(w->pack, w->n_in_pad);
    _Alignas(64) float sums[2 * T * 32];
    shape_tiles(m < T ? m : T);
    for (int gi = g0; gi < g1; gi++) {
        for (int r = 0; r < m; r += 2 * T) {
            /* the last tile overlaps those before, so that every tile is full when one can be */
            int a = r + T <= m || m < T ? r : m - T, b = r + 2 * T <= m ? r + T : m - T;
            const uint8_t *x0 = (const uint8_t *)x + (size_t)a * stride, *x1 = r + T < m ? (const uint8_t *)x + (size_t)b * stride : NULL;
            tiles(w->data + (size_t)gi * w->group_bytes, w->n_in_pad, x0, x1, stride, r ? 0 : w->group_bytes, sums);
            put_rows(sums, a, r, r + T < m ? r + T : m, y + gi * 32, ldy, add, w->n_out - gi * 32);
            if (x1)
                put_rows(sums + T * 32, b, r + T, r + 2 * T < m ? r + 2 * T : m, y + gi * 32, ldy, add, w->n_out - gi * 32);
        }
    }
    _tile_release();
}

static size_t gemm_scratch(const struct pd_pmat *w)
{
    return w->pack == PD_PK_U8 || w->pack == PD_PK_U4 ? K(gemm_int_scratch)(w) : K(gemm_float_scratch)(w);
}

/* Tile products on registers. */
static double peak(enum pd_pack pack, long n, float *sink)
{
    if (pack != PD_PK_BF16)
        return K(peak)(pack, n, sink);
    float sums[T * 16];
    shape_tiles(T);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (long i = 0; i < n; i += 8) {       /* a tile product lasts about as long as sixteen vector ones */
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_release();
    *sink = sums[0];
    return (double)((n + 7) / 8) * 4 * 2 * T * 16 * STEP;
}

const struct pd_kernels pd_kernels_amx = {
    .name = "amx",
    .cls_int = PD_CLS_INT, .cls_bf16 = "bf16amx-1", .cls_float = PD_CLS_FLOAT,
    .gemm = gemm, .gemm_scratch = gemm_scratch, .act_part = K(act_part), .act_stride = K(act_stride), .prep = K(prep),
    .rmsnorm = K(rmsnorm), .rope = K(rope), .silu_mul = K(silu_mul), .add = K(add), .kv_write = K(kv_write),
    .attn = K(attn), .attn_seg = K(attn_seg), .attn_merge = K(attn_merge), .attn_scratch = K(attn_scratch),
    .exp_sub = K(exp_sub), .max = K(max), .split16 = K(split16), .merge16 = K(merge16), .rows = K(rows), .peak = peak, .read = K(read),
};
