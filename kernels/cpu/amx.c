/* Products with the tile unit (AMX), for CPUs that have one; everything else is the avx512 build's.
 *
 * Integer-dot weights: a tile product gives the exact integer sums of 16 rows x 16 outputs x one sub-block, and the float part is the avx512
 * kernel's to the letter, so the bits are the same; that kernel also takes what is too few rows for a tile. The float part bounds the speed: each
 * sub-block of 32 k costs three instructions a vector of outputs (four with mins), while the tile unit could do two sub-blocks in that time.
 *
 * BF16 weights: one row or many, every 32 k are one step of TDPBF16PS: the even and the odd k are summed apart, each by fused multiply-adds from
 * zero in order, denormals taken as zero; then the two sums are added, and the result to the output's sum. That is another order than VDPBF16PS
 * has, so the numerics class has a name of its own. */
#include "kern.h"

enum { T = 16, AT_ONCE = 16 };          /* rows and outputs of a tile; sub-blocks taken before the next rows: their weights stay in the first-level cache */

/* --- the shape of the eight tiles ------------------------------------------------------------------------------------------------------------------ */

struct __attribute__((packed)) shape { uint8_t palette, start; uint8_t reserved[14]; uint16_t colsb[16]; uint8_t rows[16]; };

/* Tiles 0-3: sums, [m][16] of 32 bits; 4, 5: activations, [m][k_bytes]; 6, 7: weights, [k_bytes / 4][16] of 4 bytes. */
static void shape_tiles(int m, int k_bytes)
{
    struct shape s = { .palette = 1 };
    for (int t = 0; t < 8; t++) {
        s.colsb[t] = (uint16_t)(t == 4 || t == 5 ? k_bytes : 64);
        s.rows[t] = (uint8_t)(t < 6 ? m : k_bytes / 4);
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

/* The first row of tile t when `rows` rows (a tile's or more, else there is one tile) are cut into tiles: the last one overlaps the one before. */
INL int row_of(int t, int rows) { return (t + 1) * T <= rows || rows < T ? t * T : rows - T; }

/* The sums [16][32] of tile t, to the rows that no tile before it had. */
INL void put_tile(const float *sums, int t, int rows, float *y, size_t ldy, int add, int n_out)
{
    for (int r = t * T, at = row_of(t, rows); r < (t + 1) * T && r < rows; r++)
        for (int v = 0; v < 2; v++)
            put(y + (size_t)r * ldy + 16 * v, vf_load(sums + (r - at) * 32 + 16 * v), add, n_out - 16 * v);
}

/* --- integer-dot weights --------------------------------------------------------------------------------------------------------------------------- */

/* One group of 32 outputs as the tile unit wants it, in a thread's scratch. */
struct wide {
    int8_t *q;                  /* [n_in_pad / 4][32][4], u - off */
    float *scale, *min;         /* [n_sub][32] each */
};
INL struct wide wide_of(const struct pd_pmat *w, void *scratch)
{
    struct wide d = { .q = scratch };
    d.scale = (float *)(void *)(d.q + (size_t)w->n_in_pad * 32);
    d.min = d.scale + (size_t)(w->n_in_pad / w->sub) * 32;
    return d;
}
static float *sums_of(const struct pd_pmat *w, void *scratch) { return wide_of(w, scratch).min + (size_t)(w->n_in_pad / w->sub) * 32; }

enum { SUM_TILES = 8 };         /* tiles of rows whose sums wait in scratch for their next k */
static size_t int_scratch(const struct pd_pmat *w)
{
    size_t here = (size_t)w->n_in_pad * 32 + (size_t)(w->n_in_pad / w->sub) * 32 * 4 * 2 + SUM_TILES * T * 32 * 4, small = K(gemm_int_scratch)(w);
    return here > small ? here : small;
}

INL vf scales(const uint8_t *p, int f32, int v) { return f32 ? vf_load((const float *)(const void *)p + 16 * v) : vf_half((const uint16_t *)(const void *)p + 16 * v); }

static void widen(const struct pd_pmat *w, const uint8_t *p, struct wide d)
{
    const int planes = w->sub / (w->pack == PD_PK_U4 ? 8 : 4), one = 32 * (w->scale_f32 ? 4 : 2);
    const __m512i off = _mm512_set1_epi8((char)w->off);
    int8_t *q = d.q;
    for (int b = 0; b < w->n_in_pad / w->sub; b++) {
        for (int i = 0; i < planes; i++, p += 128)
            if (w->pack == PD_PK_U4) {
                __m512i a = vb_load(p), c = vb_load(p + 64);
                _mm512_store_si512(q, _mm512_sub_epi8(vb_lo4(a), off));
                _mm512_store_si512(q + 64, _mm512_sub_epi8(vb_lo4(c), off));
                _mm512_store_si512(q + 128, _mm512_sub_epi8(vb_hi4(a), off));
                _mm512_store_si512(q + 192, _mm512_sub_epi8(vb_hi4(c), off));
                q += 256;
            } else {
                _mm512_store_si512(q, _mm512_sub_epi8(vb_load(p), off));
                _mm512_store_si512(q + 64, _mm512_sub_epi8(vb_load(p + 64), off));
                q += 128;
            }
        for (int v = 0; v < 2; v++) {
            vf_store(d.scale + b * 32 + v * 16, scales(p, w->scale_f32, v));
            if (w->has_min)
                vf_store(d.min + b * 32 + v * 16, scales(p + one, w->scale_f32, v));
        }
        p += one * (1 + w->has_min);
    }
}

INL const uint8_t *act_of(const uint8_t *x, int sub, int b) { return x + (size_t)(sub == 32 ? b : b / 2) * sizeof(struct act); }

/* Adds sub-blocks [b0, b0 + n) of 16 rows x 16 outputs (vector v of the group) to `sums` ([16][32]; taken as zero when `first`).
 * First all tile products, then all arithmetic on them: vector and tile instructions run at half speed when mixed, and sums that are read back at
 * once would wait for their store to reach the cache. A tile is stored four products late, when it is finished. */
INL void int_tile(const int sub, const int has_min, struct wide g, const uint8_t *x, size_t stride, int b0, int n, int v, int first, float *sums)
{
    _Alignas(64) int32_t i32[AT_ONCE][T][16];
#define PRODUCT(c, a, w, j) do { \
        if ((j) >= 4) _tile_stored(c, i32[(j) - 4], 64); \
        _tile_zero(c); \
        _tile_loadd(a, act_of(x, sub, b0 + (j)) + (sub == 32 ? 0 : ((b0 + (j)) & 1) * 16), stride); \
        _tile_loadd(w, g.q + (size_t)(b0 + (j)) * (size_t)sub * 32 + v * 64, 128); \
        _tile_dpbssd(c, a, w); \
    } while (0)
    for (int j = 0; j < n; j += 4) {
        PRODUCT(0, 4, 6, j);
        if (j + 1 < n) PRODUCT(1, 5, 7, j + 1);
        if (j + 2 < n) PRODUCT(2, 4, 6, j + 2);
        if (j + 3 < n) PRODUCT(3, 5, 7, j + 3);
    }
    for (int j = n > 4 ? n - 4 : 0; j < n; j++)
        switch (j & 3) {
        case 0: _tile_stored(0, i32[j], 64); break;
        case 1: _tile_stored(1, i32[j], 64); break;
        case 2: _tile_stored(2, i32[j], 64); break;
        case 3: _tile_stored(3, i32[j], 64); break;
        }
#undef PRODUCT
    vf acc[T];
#pragma GCC unroll 16
    for (int r = 0; r < T; r++)
        acc[r] = first ? vf_set1(0) : vf_load(sums + r * 32);
    for (int j = 0; j < n; j++) {
        const uint8_t *xb = act_of(x, sub, b0 + j);
        const float *p = g.scale + (b0 + j) * 32 + v * 16;
        vf s = vf_load(p), mn = has_min ? vf_load(p + (g.min - g.scale)) : s;
#pragma GCC unroll 16
        for (int r = 0; r < T; r++) {
            const struct act *a = (const void *)(xb + r * stride);
            acc[r] = vf_fma(vi_float(_mm512_load_si512(i32[j][r])), vf_mul(vf_set1(a->scale), s), acc[r]);
            if (has_min)
                acc[r] = vf_fma(mn, vf_set1(a->fsum), acc[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < T; r++)
        vf_store(sums + r * 32, acc[r]);
}

#define INT_TILE(sub, has_min) \
    static __attribute__((noinline)) void int_tile_##sub##_##has_min(struct wide g, const uint8_t *x, size_t stride, int b0, int n, int v, int first, float *sums) \
    { int_tile(sub, has_min, g, x, stride, b0, n, v, first, sums); }
INT_TILE(32, 0) INT_TILE(32, 1) INT_TILE(16, 0)

static void gemm_int(const struct pd_pmat *w, const void *x, int m, float *y, size_t ldy, int add, int g0, int g1, void *scratch)
{
    enum { REST = 6 };          /* so few rows past the last full tile are cheaper without one */
    if (m < T || (w->sub == 16 && w->has_min)) {
        K(gemm_int)(w, x, m, y, ldy, add, g0, g1, scratch);
        return;
    }
    const size_t stride = K(act_stride)(w->pack, w->n_in_pad);
    const int n_sub = w->n_in_pad / w->sub, steps = (n_sub + AT_ONCE - 1) / AT_ONCE, rest = m % T <= REST ? m % T : 0, tiled = m - rest, tiles = (tiled + T - 1) / T;
    const struct wide g = wide_of(w, scratch);
    float *sums = sums_of(w, scratch);
    void (*tile)(struct wide, const uint8_t *, size_t, int, int, int, int, float *) = w->sub == 16 ? int_tile_16_0 : w->has_min ? int_tile_32_1 : int_tile_32_0;
    shape_tiles(T, w->sub);
    for (int gi = g0; gi < g1; gi++) {
        int n_out = w->n_out - gi * 32;
        widen(w, w->data + (size_t)gi * w->group_bytes, g);
        for (int t0 = 0; t0 < tiles; t0 += SUM_TILES) {
            int t1 = t0 + SUM_TILES < tiles ? t0 + SUM_TILES : tiles;
            for (int i = 0, b = 0, n; i < steps; i++, b += n) {
                n = (n_sub - b + steps - i - 1) / (steps - i);
                for (int t = t0; t < t1; t++)
                    for (int v = 0; v < 2; v++)
                        tile(g, (const uint8_t *)x + (size_t)row_of(t, tiled) * stride, stride, b, n, v, b == 0,
                             sums + (t - t0) * T * 32 + v * 16);
            }
            for (int t = t0; t < t1; t++)
                put_tile(sums + (t - t0) * T * 32, t, tiled, y + gi * 32, ldy, add, n_out);
        }
    }
    _tile_release();
    if (rest)
        K(gemm_int)(w, (const uint8_t *)x + (size_t)tiled * stride, rest, y + (size_t)tiled * ldy, ldy, add, g0, g1, scratch);
}

/* --- bf16 weights ---------------------------------------------------------------------------------------------------------------------------------- */

static void gemm_bf16(const struct pd_pmat *w, const void *x, int m, float *y, size_t ldy, int add, int g0, int g1)
{
    const size_t stride = K(act_stride)(w->pack, w->n_in_pad);
    const int tiles = (m + T - 1) / T;
    _Alignas(64) float sums[2][T * 32];
    shape_tiles(m < T ? m : T, 64);
    for (int gi = g0; gi < g1; gi++) {
        const uint8_t *p = w->data + (size_t)gi * w->group_bytes;
        int n_out = w->n_out - gi * 32;
        for (int t = 0; t < tiles; t += 2) {
            const uint8_t *x0 = (const uint8_t *)x + (size_t)row_of(t, m) * stride, *x1 = (const uint8_t *)x + (size_t)row_of(t + 1, m) * stride;
            int two = t + 1 < tiles;
            _tile_zero(0);
            _tile_zero(1);
            if (two) {
                _tile_zero(2);
                _tile_zero(3);
                for (int k = 0; k < w->n_in_pad; k += 32) {
                    _tile_loadd(4, x0 + k * 2, stride);
                    _tile_loadd(6, p + (size_t)k * 64, 128);
                    _tile_loadd(7, p + (size_t)k * 64 + 64, 128);
                    _tile_loadd(5, x1 + k * 2, stride);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            } else {
                for (int k = 0; k < w->n_in_pad; k += 32) {
                    for (int o = 0; m <= 4 && o < 2048; o += 64)
                        __builtin_prefetch(p + (size_t)k * 64 + 4096 + o, 0, 2);
                    _tile_loadd(4, x0 + k * 2, stride);
                    _tile_loadd(6, p + (size_t)k * 64, 128);
                    _tile_loadd(7, p + (size_t)k * 64 + 64, 128);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                }
            }
            _tile_stored(0, sums[0], 128);
            _tile_stored(1, sums[0] + 16, 128);
            put_tile(sums[0], t, m, y + gi * 32, ldy, add, n_out);
            if (two) {
                _tile_stored(2, sums[1], 128);
                _tile_stored(3, sums[1] + 16, 128);
                put_tile(sums[1], t + 1, m, y + gi * 32, ldy, add, n_out);
            }
        }
    }
    _tile_release();
}

/* --- the table ------------------------------------------------------------------------------------------------------------------------------------- */

static void gemm(const struct pd_pmat *w, const void *x, int m, float *y, size_t ldy, int add, int g0, int g1, void *scratch)
{
    if (w->pack == PD_PK_U8 || w->pack == PD_PK_U4)
        gemm_int(w, x, m, y, ldy, add, g0, g1, scratch);
    else if (w->pack == PD_PK_BF16)
        gemm_bf16(w, x, m, y, ldy, add, g0, g1);
    else
        K(gemm_float)(w, x, m, y, ldy, add, g0, g1, scratch);
}

static size_t gemm_scratch(const struct pd_pmat *w)
{
    return w->pack == PD_PK_U8 || w->pack == PD_PK_U4 ? int_scratch(w) : K(gemm_float_scratch)(w);
}

/* Tile products on registers, full tiles. */
static double peak(enum pd_pack pack, long n, float *sink)
{
    if (pack != PD_PK_U8 && pack != PD_PK_U4 && pack != PD_PK_BF16)
        return K(peak)(pack, n, sink);
    float sums[T * 16];
    shape_tiles(T, 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (long i = 0; i < n; i += 8) {       /* a tile product lasts about as long as sixteen vector ones */
        if (pack == PD_PK_BF16) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        } else {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 64);
    _tile_release();
    *sink = sums[0];
    return (double)((n + 7) / 8) * 4 * 2 * T * 16 * (pack == PD_PK_BF16 ? 32 : 64);
}

const struct pd_kernels pd_kernels_amx = {
    .name = "amx",
    .cls_int = PD_CLS_INT, .cls_bf16 = "bf16amx-1", .cls_float = PD_CLS_FLOAT,
    .gemm = gemm, .gemm_scratch = gemm_scratch, .act_part = K(act_part), .act_stride = K(act_stride), .prep = K(prep),
    .rmsnorm = K(rmsnorm), .rope = K(rope), .silu_mul = K(silu_mul), .add = K(add), .kv_write = K(kv_write),
    .attn = K(attn), .attn_seg = K(attn_seg), .attn_merge = K(attn_merge), .attn_scratch = K(attn_scratch),
    .exp_sub = K(exp_sub), .max = K(max), .peak = peak, .read = K(read),
};
