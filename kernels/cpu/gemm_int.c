/* Products with integer-dot weights (PD_PK_U8, PD_PK_U4), and the activations that they take.
 *
 * One output: acc = 0; for each sub-block of k in order: i = sum u*q - off*sum q (exact), acc = fma((float)i, xscale*wscale, acc), and with
 * mins acc = fma(min, xscale * (float)sum q, acc). Outputs sit in lanes, so neither the number of rows nor the tile matters.
 * A tile is R rows x 16 * SIDE_BY_SIDE(R) outputs held in registers; its sums of four-bit weights come from the packed form. The scalar build, where picking nibbles
 * costs as much as the product, widens a group to the 8-bit form once for WIDEN_FROM rows and more.
 */
#include "kern.h"

#if defined(PD_ISA_AVX512)
enum { R_MAX = 6, WIDEN_FROM = 1 << 30 };
#elif defined(PD_ISA_AVX2)
enum { R_MAX = 4, WIDEN_FROM = 1 << 30 };
#else
enum { R_MAX = 1, WIDEN_FROM = 2 };
#endif

enum { ASKERS = 4 };
struct group {                  /* the group in hand: its bytes, and what the matrix says about it */
    const uint8_t *p;
    int n_sub, off, scale_f32, has_min, scale_bytes;    /* scale_bytes: of all scales and mins of one sub-block */
    size_t ahead;               /* bytes from here to the next group, which is asked of memory while the first rows pass through this one: */
    int ask, ask_step;          /* these bytes' lines of every sub-block, by each of the first tiles its share; ask_step 0: none */
};

INL vf scales(const uint8_t *p, int f32, int v)
{
    return f32 ? vf_load((const float *)p + 16 * v) : vf_half((const uint16_t *)p + 16 * v);
}

/* R rows of activations `stride` apart, the SIDE_BY_SIDE(R) vectors of outputs from `v0`. sub: 32 or 16 k a scale. */
TILE_INL void tile(const int R, const int sub, const int u4, struct group g, const uint8_t *x, size_t stride, int v0, vf acc[][2])
{
    const int NV = SIDE_BY_SIDE(R);
    const int planes = u4 ? sub / 8 : sub / 4;
    const uint8_t *p = g.p;
    for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++)
            acc[r][v] = vf_set1(0);
    for (int b = 0; b < g.n_sub; b++) {
        const uint8_t *xb = sub == 32 ? x + (size_t)b * sizeof(struct act) : x + (size_t)(b / 2) * sizeof(struct act);
        const int half = sub == 32 ? 0 : b & 1;
        for (int o = g.ask; g.ask_step && o < planes * 128 + g.scale_bytes; o += g.ask_step)
            __builtin_prefetch(p + g.ahead + o, 0, 2);
        int lo = sub == 32 || !half ? -g.off : 0, hi = sub == 32 || half ? -g.off : 0;
        vs i[R_MAX][2];
        int16_t wide[R_MAX][32];
        for (int r = 0; r < R; r++) {
            const struct act *a = (const void *)(xb + r * stride);
            vx_open(wide[r], a->q + half * 16, sub, u4);
            i[r][0] = vs_start(g.off ? vi_madd16(a->isum, lo, hi) : vi_set1(0), u4);
            for (int v = 1; v < NV; v++)
                i[r][v] = i[r][0];
        }
#pragma GCC unroll 8
        for (int q = 0; q < planes; q++) {
            vb w[2];
            for (int v = 0; v < NV; v++)
                w[v] = vb_load(p + q * 128 + (v0 + v) * 64);
            for (int n = 0; n <= u4; n++) {
                vb d[2];
                for (int v = 0; v < NV; v++)
                    d[v] = !u4 ? w[v] : n ? vb_hi4(w[v]) : vb_lo4(w[v]);
                for (int r = 0; r < R; r++) {
                    const struct act *a = (const void *)(xb + r * stride);
                    vx xq = vx_quad(wide[r], a->q + half * 16, u4 ? 2 * q + n : q, sub, u4);
                    for (int v = 0; v < NV; v++)
                        i[r][v] = vs_dot(i[r][v], d[v], xq, u4);
                }
            }
        }
        p += planes * 128;
        for (int v = 0; v < NV; v++) {
            vf s = scales(p, g.scale_f32, v0 + v);
            for (int r = 0; r < R; r++) {
                const struct act *a = (const void *)(xb + r * stride);
                vi sum = vs_end(i[r][v], g.off ? vi_madd16(a->isum, lo, hi) : vi_set1(0), u4);
                acc[r][v] = vf_fma(vi_float(sum), vf_mul(vf_set1(a->scale), s), acc[r][v]);
            }
        }
        if (g.has_min)
            for (int v = 0; v < NV; v++) {
                vf mn = scales(p + g.scale_bytes / 2, g.scale_f32, v0 + v);
                for (int r = 0; r < R; r++) {
                    const struct act *a = (const void *)(xb + r * stride);
                    acc[r][v] = vf_fma(mn, vf_set1(sub == 32 ? a->fsum : a->scale * (float)a->isum[half]), acc[r][v]);
                }
            }
        p += g.scale_bytes;
    }
}

INL void put(float *y, vf acc, int add, int n)
{
    if (n >= 16)
        vf_store(y, add ? vf_add(vf_load(y), acc) : acc);
    else if (n > 0)
        vf_storen(y, add ? vf_add(vf_loadn(y, n, 0), acc) : acc, n);
}

TILE_INL void rows_tile(const int R, const int sub, const int u4, struct group g, const uint8_t *x, size_t stride, float *y, size_t ldy, int add, int n_out)
{
    for (int r = 0; r < R; r++) {               /* the output's lines are on their way while the sums form */
        __builtin_prefetch(y + r * ldy, 1);
        __builtin_prefetch(y + r * ldy + 16, 1);
    }
    const int NV = SIDE_BY_SIDE(R);
    for (int v0 = 0; v0 < 2; v0 += NV) {
        vf acc[R_MAX][2];
        tile(R, sub, u4, g, x, stride, v0, acc);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < NV; v++)
                put(y + r * ldy + 16 * (v0 + v), acc[r][v], add, n_out - 16 * (v0 + v));
    }
}

/* Every tile as a function of its own, so that each has the registers to itself. */
#define TILE(R, sub, u4) \
    static __attribute__((noinline)) void tile_##R##_##sub##_##u4(struct group g, const uint8_t *x, size_t stride, float *y, size_t ldy, int add, int n) \
    { rows_tile(R, sub, u4, g, x, stride, y, ldy, add, n); }
typedef void tile_fn(struct group g, const uint8_t *x, size_t stride, float *y, size_t ldy, int add, int n_out);
TILE(1, 32, 0) TILE(1, 16, 0) TILE(1, 32, 1) TILE(1, 16, 1)
#if defined(PD_ISA_AVX512)
TILE(2, 32, 0) TILE(3, 32, 0) TILE(4, 32, 0) TILE(5, 32, 0) TILE(6, 32, 0)
TILE(2, 16, 0) TILE(3, 16, 0) TILE(4, 16, 0) TILE(5, 16, 0) TILE(6, 16, 0)
TILE(2, 32, 1) TILE(3, 32, 1) TILE(4, 32, 1) TILE(5, 32, 1) TILE(6, 32, 1)
TILE(2, 16, 1) TILE(3, 16, 1) TILE(4, 16, 1) TILE(5, 16, 1) TILE(6, 16, 1)
static tile_fn *const u8_tiles[2][R_MAX + 1] = {
    { NULL, tile_1_32_0, tile_2_32_0, tile_3_32_0, tile_4_32_0, tile_5_32_0, tile_6_32_0 },
    { NULL, tile_1_16_0, tile_2_16_0, tile_3_16_0, tile_4_16_0, tile_5_16_0, tile_6_16_0 } };
static tile_fn *const u4_tiles[2][R_MAX + 1] = {
    { NULL, tile_1_32_1, tile_2_32_1, tile_3_32_1, tile_4_32_1, tile_5_32_1, tile_6_32_1 },
    { NULL, tile_1_16_1, tile_2_16_1, tile_3_16_1, tile_4_16_1, tile_5_16_1, tile_6_16_1 } };
#elif defined(PD_ISA_AVX2)
#define TILES(sub, u4) TILE(2, sub, u4) TILE(3, sub, u4) TILE(4, sub, u4)
TILES(32, 0) TILES(16, 0) TILES(32, 1) TILES(16, 1)
#define ROW(sub, u4) { NULL, tile_1_##sub##_##u4, tile_2_##sub##_##u4, tile_3_##sub##_##u4, tile_4_##sub##_##u4 }
static tile_fn *const u8_tiles[2][R_MAX + 1] = { ROW(32, 0), ROW(16, 0) };
static tile_fn *const u4_tiles[2][R_MAX + 1] = { ROW(32, 1), ROW(16, 1) };
#else
static tile_fn *const u8_tiles[2][R_MAX + 1] = { { NULL, tile_1_32_0 }, { NULL, tile_1_16_0 } };
static tile_fn *const u4_tiles[2][R_MAX + 1] = { { NULL, tile_1_32_1 }, { NULL, tile_1_16_1 } };
#endif

/* One packed 4-bit group as an 8-bit group. */
static void widen(const struct pd_pmat *w, const uint8_t *src, uint8_t *dst, int n_sub, int scale_bytes)
{
    for (int b = 0; b < n_sub; b++) {
        for (int q = 0; q < w->sub / 8; q++, src += 128, dst += 256)
            for (int v = 0; v < 2; v++) {
                vb x = vb_load(src + 64 * v);
                vb_store(dst + 64 * v, vb_lo4(x));
                vb_store(dst + 128 + 64 * v, vb_hi4(x));
            }
        for (int i = 0; i < scale_bytes; i += 64)
            vb_store(dst + i, vb_load(src + i));
        src += scale_bytes;
        dst += scale_bytes;
    }
}

INL int scale_bytes_of(const struct pd_pmat *w) { return 32 * (w->scale_f32 ? 4 : 2) * (w->has_min ? 2 : 1); }

size_t K(gemm_int_scratch)(const struct pd_pmat *w)
{
    return w->pack == PD_PK_U4 && WIDEN_FROM < 1 << 30 ? (size_t)(w->n_in_pad / w->sub) * (size_t)(w->sub * 32 + scale_bytes_of(w)) : 64;
}

void K(gemm_int)(const struct pd_pmat *w, const void *x, int m, float *y, size_t ldy, int add, int g0, int g1, void *scratch)
{
    const size_t stride = K(act_stride)(w->pack, w->n_in_pad);
    struct group g = { .n_sub = w->n_in_pad / w->sub, .off = w->off, .scale_f32 = w->scale_f32, .has_min = w->has_min, .scale_bytes = scale_bytes_of(w), .ahead = w->group_bytes };
    const int widening = w->pack == PD_PK_U4 && m >= WIDEN_FROM, narrow = w->sub == 16;
    tile_fn *const *const tiles = w->pack == PD_PK_U4 && !widening ? u4_tiles[narrow] : u8_tiles[narrow];
    /* As many rows at a time as stay in the second-level cache beside a group. */
    int chunks = (int)((size_t)m * stride / (400 * 1024)) + 1, chunk = ((m + chunks - 1) / chunks + R_MAX - 1) / R_MAX * R_MAX;
    for (int r0 = 0; r0 < m; r0 += chunk) {
        int r1 = r0 + chunk < m ? r0 + chunk : m;
        for (int gi = g0; gi < g1; gi++) {
            g.p = w->data + (size_t)gi * w->group_bytes;
            if (widening) {
                widen(w, g.p, scratch, g.n_sub, g.scale_bytes);
                g.p = scratch;
            }
            int n_out = w->n_out - gi * 32;
            const int tiles_here = (r1 - r0 + R_MAX - 1) / R_MAX;
            for (int r = r0, left = tiles_here; r < r1; left--) {
                int n = (r1 - r + left - 1) / left;     /* tiles of even height: a low one wastes the weights that it loads */
                g.ask = 64 * (tiles_here - left);
                g.ask_step = tiles_here - left < ASKERS ? 64 * (tiles_here < ASKERS ? tiles_here : ASKERS) : 0;
                tiles[n](g, (const uint8_t *)x + (size_t)r * stride, stride, y + (size_t)r * ldy + gi * 32, ldy, add, n_out);
                r += n;
            }
        }
    }
}

size_t K(act_part)(enum pd_pack pack) { return pack == PD_PK_BF16 ? 64 : pack == PD_PK_U8 || pack == PD_PK_U4 ? sizeof(struct act) : 128; }
size_t K(act_stride)(enum pd_pack pack, int n_in_pad) { return ((size_t)n_in_pad / 32 * K(act_part)(pack) + 63) & ~(size_t)63; }

static void prep_int(const float *x, struct act *a)
{
    vf x0 = vf_load(x), x1 = vf_load(x + 16), magic = vf_set1(0x1.8p23f);
    float amax = vf_top(x0, x1);                            /* a NaN shows in the scale */
    float inv = amax < 0x1p-115f ? 0 : 127.0f / amax;       /* below that 127/amax might overflow: such a block counts as zero */
    a->scale = amax < 0x1p-115f ? 0 : amax / 127.0f;
    /* adding the magic number rounds to nearest even and leaves the integer in the low bits */
    vf t0 = vf_add(vf_mul(x0, vf_set1(inv)), magic), t1 = vf_add(vf_mul(x1, vf_set1(inv)), magic);
    int s0 = vi_store8(a->q, vi_sub(vf_bits(t0), vf_bits(magic))), s1 = vi_store8(a->q + 16, vi_sub(vf_bits(t1), vf_bits(magic)));
    a->isum[0] = (int16_t)s0;
    a->isum[1] = (int16_t)s1;
    a->fsum = a->scale * (float)(s0 + s1);
    a->pad = 0;
}

void K(prep)(enum pd_pack pack, const float *x, int n_in, int n_in_pad, void *row)
{
    if (pack == PD_PK_F32 || pack == PD_PK_F16) {
        memcpy(row, x, (size_t)n_in * 4);
        memset((float *)row + n_in, 0, (size_t)(n_in_pad - n_in) * 4);
    } else if (pack == PD_PK_BF16) {
        uint16_t *d = row;
        for (int i = 0; i < n_in; i++)
            d[i] = float_to_bf16(x[i]);
        memset(d + n_in, 0, (size_t)(n_in_pad - n_in) * 2);
    } else {
        struct act *a = row;
        int full = n_in / 32 * 32;
        for (int i = 0; i < full; i += 32)
            prep_int(x + i, a++);
        if (full < n_in) {
            float tail[32] = { 0 };
            memcpy(tail, x + full, (size_t)(n_in - full) * 4);
            prep_int(tail, a++);
            full += 32;
        }
        for (; full < n_in_pad; full += 32)
            memset(a++, 0, sizeof *a);
    }
}
