/* Attention of one sequence, one layer, one KV head, for the query heads that share it.
 *
 * Keys are taken in segments of PD_ATTN_SEG at fixed absolute positions. For a query vector (a row and a head) one segment gives
 *   s[key] = scale * (fma over d in order), m = max, p = exp(s - m), l = sum p (16 lanes), acc[d] = fma(p[key], v[key][d]) over the keys in order,
 * and the segments are merged in order: M' = max(M, m), a = exp(M - M'), b = exp(m - M'), L = fma(L, a, l b), O = fma(O, a, acc b).
 * Keys that a row may not see are never read into its sums. The keys of a segment are turned once into panels of 32 keys x head_dim floats, so that
 * keys sit in lanes and one conversion serves every row and head of the call. Query vectors go in tiles of VT through both products; no
 * result depends on the tile. Vector t of a call is row row0 + t / n_group, head t % n_group.
 */
#include <math.h>
#include "kern.h"

enum { SEG = PD_ATTN_SEG, PANEL = 32, ROWS = 32 };      /* ROWS: query rows that share a conversion */
#if defined(PD_ISA_AVX512)
enum { VT = 6, NV = 2, DV = 4 };        /* query vectors a tile, key vectors at once, output vectors at once */
#elif defined(PD_ISA_AVX2)
enum { VT = 6, NV = 1, DV = 1 };
#else
enum { VT = 1, NV = 1, DV = 1 };
#endif

struct seg {                    /* one segment in hand */
    const struct pd_attn *a;
    int first, n;               /* absolute position of its first key; keys that some row of the call may see */
    float *kt, *v;              /* [SEG/PANEL][head_dim][PANEL], [SEG][head_dim] */
};

size_t K(attn_scratch)(int head_dim, int n_group)
{
    size_t floats = 2 * (size_t)SEG * (size_t)head_dim          /* the segment's K^T and V */
                  + (size_t)VT * (SEG + (size_t)head_dim)       /* scores and accumulators of a tile */
                  + 2 * ROWS * (size_t)n_group;                 /* running maximum and sum */
    return (floats * 4 + 63) & ~(size_t)63;
}

INL size_t kv_size(enum pd_dtype t) { return t == PD_F32 ? 4 : 2; }

INL const uint8_t *kv_row(const struct pd_attn *a, size_t off, int pos)
{
    return a->blk[pos / a->block_size] + off + (size_t)(pos % a->block_size) * (size_t)a->head_dim * kv_size(a->kv_dtype);
}

INL vf kv_load(const uint8_t *row, enum pd_dtype t, int d)
{
    return t == PD_F16 ? vf_half((const uint16_t *)(const void *)row + d) : t == PD_BF16 ? vf_bf16((const uint16_t *)(const void *)row + d)
                                                                                        : vf_load((const float *)(const void *)row + d);
}

/* K of the segment into panels, V into rows; lanes past the last key are zero and are never used. */
static void load_seg(const struct seg *s)
{
    const struct pd_attn *a = s->a;
    const int hd = a->head_dim;
    for (int i = 0; i < s->n; i++) {
        const uint8_t *k = kv_row(a, a->k_off, s->first + i), *v = kv_row(a, a->v_off, s->first + i);
        float *kt = s->kt + (size_t)(i / PANEL) * PANEL * hd + i % PANEL;
        for (int d = 0; d < hd; d += 16) {
            float t[16];
            vf_store(t, kv_load(k, a->kv_dtype, d));
            for (int l = 0; l < 16; l++)
                kt[(d + l) * PANEL] = t[l];
            vf_store(s->v + (size_t)i * hd + d, kv_load(v, a->kv_dtype, d));
        }
    }
    for (int i = s->n; i % PANEL; i++) {
        float *kt = s->kt + (size_t)(i / PANEL) * PANEL * hd + i % PANEL;
        for (int d = 0; d < hd; d++)
            kt[d * PANEL] = 0;
    }
}

/* sc[t][0..n) = scale * q[t] . K, whole panels */
TILE_INL void scores(const int T, const struct seg *s, const float *const *q, float *sc)
{
    const int hd = s->a->head_dim;
    const vf scale = vf_set1(s->a->scale);
    for (int p = 0; p < s->n; p += PANEL)
        for (int v0 = 0; v0 < PANEL / 16; v0 += NV) {
            const float *kt = s->kt + (size_t)p * hd + v0 * 16;
            vf acc[VT][NV];
            for (int t = 0; t < T; t++)
                for (int v = 0; v < NV; v++)
                    acc[t][v] = vf_set1(0);
            for (int d = 0; d < hd; d++) {
                vf k[NV];
                for (int v = 0; v < NV; v++)
                    k[v] = vf_load(kt + d * PANEL + v * 16);
                for (int t = 0; t < T; t++) {
                    vf x = vf_set1(q[t][d]);
                    for (int v = 0; v < NV; v++)
                        acc[t][v] = vf_fma(x, k[v], acc[t][v]);
                }
            }
            for (int t = 0; t < T; t++)
                for (int v = 0; v < NV; v++)
                    vf_store(sc + t * SEG + p + (v0 + v) * 16, vf_mul(acc[t][v], scale));
        }
}

/* acc[t][d] = fma over the keys; the first `common` for all T vectors together, the rest of each alone */
TILE_INL void weigh(const int T, const struct seg *s, const float *p, const int *n, int common, float *acc)
{
    const int hd = s->a->head_dim;
    for (int d0 = 0; d0 < hd; d0 += 16 * DV) {
        const int dv = hd - d0 < 16 * DV ? (hd - d0) / 16 : DV;
        if (dv == DV) {
            vf o[VT][DV];
            for (int t = 0; t < T; t++)
                for (int v = 0; v < DV; v++)
                    o[t][v] = vf_set1(0);
            for (int i = 0; i < common; i++) {
                vf x[DV];
                for (int v = 0; v < DV; v++)
                    x[v] = vf_load(s->v + (size_t)i * hd + d0 + v * 16);
                for (int t = 0; t < T; t++) {
                    vf w = vf_set1(p[t * SEG + i]);
                    for (int v = 0; v < DV; v++)
                        o[t][v] = vf_fma(w, x[v], o[t][v]);
                }
            }
            for (int t = 0; t < T; t++)
                for (int v = 0; v < DV; v++)
                    vf_store(acc + (size_t)t * hd + d0 + v * 16, o[t][v]);
        } else {
            for (int t = 0; t < T; t++)
                for (int v = 0; v < dv; v++) {
                    vf o = vf_set1(0);
                    for (int i = 0; i < common; i++)
                        o = vf_fma(vf_set1(p[t * SEG + i]), vf_load(s->v + (size_t)i * hd + d0 + v * 16), o);
                    vf_store(acc + (size_t)t * hd + d0 + v * 16, o);
                }
        }
    }
    for (int t = 0; t < T; t++)
        for (int i = common; i < n[t]; i++)
            for (int d = 0; d < hd; d += 16) {
                float *o = acc + (size_t)t * hd + d;
                vf_store(o, vf_fma(vf_set1(p[t * SEG + i]), vf_load(s->v + (size_t)i * hd + d), vf_load(o)));
            }
}

/* T query vectors over the segment, of which vector t sees n[t] > 0 keys: maxima, sums and accumulators */
TILE_INL void part(const int T, const struct seg *s, const float *const *q, const int *n, float *sc, float *m, float *l, float *acc)
{
    scores(T, s, q, sc);
    int common = n[0];
    for (int t = 0; t < T; t++) {
        m[t] = K(max)(sc + t * SEG, n[t]);
        K(exp_sub)(sc + t * SEG, sc + t * SEG, n[t], m[t], &l[t]);
        common = n[t] < common ? n[t] : common;
    }
    weigh(T, s, sc, n, common, acc);
}

#define PART(T) \
    static __attribute__((noinline)) void part_##T(const struct seg *s, const float *const *q, const int *n, float *sc, float *m, float *l, float *acc) \
    { part(T, s, q, n, sc, m, l, acc); }
typedef void part_fn(const struct seg *s, const float *const *q, const int *n, float *sc, float *m, float *l, float *acc);
PART(1)
#if defined(PD_ISA_AVX2) || defined(PD_ISA_AVX512)
PART(2) PART(3) PART(4) PART(5) PART(6)
static part_fn *const parts_fn[VT + 1] = { NULL, part_1, part_2, part_3, part_4, part_5, part_6 };
#else
static part_fn *const parts_fn[VT + 1] = { NULL, part_1 };
#endif

INL float exp1(float x) { float t[16]; vf_store(t, vf_exp(vf_set1(x))); return t[0]; }

/* One part into the running state of a query vector. first: the state is empty. */
INL void merge(float *M, float *L, float *O, float m, float l, const float *acc, int hd, int first)
{
    if (first) {
        *M = m;
        *L = l;
        memcpy(O, acc, (size_t)hd * 4);
        return;
    }
    float top = f_max(m, *M), a = exp1(*M - top), b = exp1(m - top);
    vf va = vf_set1(a), vb_ = vf_set1(b);
    *M = top;
    *L = __builtin_fmaf(*L, a, l * b);
    for (int d = 0; d < hd; d += 16)
        vf_store(O + d, vf_fma(vf_load(O + d), va, vf_mul(vf_load(acc + d), vb_)));
}

INL void finish(float *O, float L, int hd)
{
    vf l = vf_set1(L);
    for (int d = 0; d < hd; d += 16)
        vf_store(O + d, vf_div(vf_load(O + d), l));
}

/* At most ROWS rows: all segments that they see, the running output kept in a->out. */
static void attn_rows(const struct pd_attn *a, int row0, int row1, float *scratch)
{
    const int hd = a->head_dim, n_vec = (row1 - row0) * a->n_group, last = a->pos0 + row1 - 1;
    struct seg s = { .a = a, .kt = scratch, .v = scratch + (size_t)SEG * hd };
    float *sc = s.v + (size_t)SEG * hd, *acc = sc + VT * SEG, *M = acc + (size_t)VT * hd, *L = M + ROWS * a->n_group;
    for (s.first = 0; s.first <= last; s.first += SEG) {
        s.n = last + 1 - s.first < SEG ? last + 1 - s.first : SEG;
        load_seg(&s);
        /* rows before the segment's first position see none of it */
        int skip = s.first - a->pos0 - row0;
        for (int t0 = skip > 0 ? skip * a->n_group : 0; t0 < n_vec; t0 += VT) {
            const int T = n_vec - t0 < VT ? n_vec - t0 : VT;
            const float *q[VT];
            float m[VT], l[VT];
            int n[VT];
            for (int t = 0; t < T; t++) {
                int row = row0 + (t0 + t) / a->n_group;
                q[t] = a->q + (size_t)row * a->q_stride + (size_t)((t0 + t) % a->n_group) * hd;
                n[t] = a->pos0 + row + 1 - s.first < SEG ? a->pos0 + row + 1 - s.first : SEG;
            }
            parts_fn[T](&s, q, n, sc, m, l, acc);
            for (int t = 0; t < T; t++) {
                float *O = a->out + (size_t)(row0 + (t0 + t) / a->n_group) * a->out_stride + (size_t)((t0 + t) % a->n_group) * hd;
                merge(&M[t0 + t], &L[t0 + t], O, m[t], l[t], acc + (size_t)t * hd, hd, !s.first);
            }
        }
    }
    for (int t = 0; t < n_vec; t++)
        finish(a->out + (size_t)(row0 + t / a->n_group) * a->out_stride + (size_t)(t % a->n_group) * hd, L[t], hd);
}

void K(attn)(const struct pd_attn *a, int row0, int row1, void *scratch)
{
    for (int r = row0; r < row1; r += ROWS)
        attn_rows(a, r, r + ROWS < row1 ? r + ROWS : row1, scratch);
}

void K(attn_seg)(const struct pd_attn *a, int seg, float *out, void *scratch)
{
    const int hd = a->head_dim, last = a->pos0;
    struct seg s = { .a = a, .first = seg * SEG, .kt = scratch, .v = (float *)scratch + (size_t)SEG * hd };
    float *sc = s.v + (size_t)SEG * hd, *acc = sc + VT * SEG;
    s.n = last + 1 - s.first < SEG ? last + 1 - s.first : SEG;
    load_seg(&s);
    for (int h0 = 0; h0 < a->n_group; h0 += VT) {
        const int T = a->n_group - h0 < VT ? a->n_group - h0 : VT;
        const float *q[VT];
        float m[VT], l[VT];
        int n[VT];
        for (int t = 0; t < T; t++) {
            q[t] = a->q + (size_t)(h0 + t) * hd;
            n[t] = s.n;
        }
        parts_fn[T](&s, q, n, sc, m, l, acc);
        for (int t = 0; t < T; t++) {
            float *o = out + (size_t)(h0 + t) * (2 + (size_t)hd);
            o[0] = m[t];
            o[1] = l[t];
            memcpy(o + 2, acc + (size_t)t * hd, (size_t)hd * 4);
        }
    }
}

void K(attn_merge)(const struct pd_attn *a, const float *parts, int n_segs)
{
    const int hd = a->head_dim;
    for (int h = 0; h < a->n_group; h++) {
        float M = 0, L = 0, *O = a->out + (size_t)h * hd;
        for (int s = 0; s < n_segs; s++) {
            const float *p = parts + ((size_t)s * a->n_group + h) * (2 + (size_t)hd);
            merge(&M, &L, O, p[0], p[1], p + 2, hd, !s);
        }
        finish(O, L, hd);
    }
}
