/* Attention of one sequence, one layer, one KV head, for the query heads that share it.
 *
 * Keys are taken in segments of PD_ATTN_SEG at fixed absolute positions. For a query vector (a row and a head) one segment gives
 *   s[key] = scale * (fma over d in order), m = max, p = exp(s - m), l = sum p (16 lanes), acc[d] = fma(p[key], v[key][d]) over the keys in order,
 * and the segments are merged in order: M' = max(M, m), a = exp(M - M'), b = exp(m - M'), L = fma(L, a, l b), O = fma(O, a, acc b).
 * Keys that a row may not see are never read into its sums. The keys of a segment are turned once into panels of 32 keys x head_dim floats, so that
 * keys sit in lanes and one conversion serves every row and head of the call. Query vectors go in tiles of VT through both products; no
 * result depends on the tile. Vector t of a call is row row0 + t / n_group, head t % n_group.
 */
#include "kern.h"

enum { SEG = PD_ATTN_SEG, PANEL = 32, ROWS = 64, HD_MAX = 256 };     /* ROWS: query rows that share a conversion */
#if defined(PD_ISA_AVX512)
enum { VT = 6, NV = 2, DV = 4 };        /* query vectors a tile, key vectors at once, output vectors at once */
#elif defined(PD_ISA_AVX2)
enum { VT = 6, NV = 1, DV = 1 };
#else
enum { VT = 1, NV = 1, DV = 1 };
#endif

struct seg {                    /* one segment in hand, all in scratch */
    const struct pd_attn *a;
    int first, n;               /* absolute position of its first key; keys that some row of the call may see */
    const uint8_t **k, **v;     /* [SEG] rows as they lie in the blocks; past n, up to whole panels, k repeats the last: their scores are not used */
    float *kt, *vf;             /* [SEG/PANEL][head_dim][PANEL], [SEG][head_dim] */
    float *sc, *acc, *M, *L;    /* [vecs][SEG], [vecs][head_dim], [ROWS * n_group] each */
};

size_t K(attn_scratch)(int head_dim, int n_group, int n_heads)
{
    const size_t hd = (size_t)head_dim, vecs = (size_t)n_group * (size_t)n_heads > VT ? (size_t)n_group * (size_t)n_heads : VT;
    return (2 * SEG * sizeof(uint8_t *) + (2 * SEG * hd + vecs * SEG + vecs * hd + 2 * ROWS * (size_t)n_group) * sizeof(float) + 63) & ~(size_t)63;
}

/* vecs: query vectors whose scores are in hand at once */
static void carve(struct seg *s, void *scratch, int head_dim, int vecs, int n_group)
{
    const size_t hd = (size_t)head_dim, many = vecs > VT ? (size_t)vecs : VT;
    s->k = scratch;
    s->v = s->k + SEG;
    s->kt = (float *)(void *)(s->v + SEG);
    s->vf = s->kt + SEG * hd;
    s->sc = s->vf + SEG * hd;
    s->acc = s->sc + many * SEG;
    s->M = s->acc + many * hd;
    s->L = s->M + ROWS * (size_t)n_group;
}

/* Rows to ask for ahead of their use, a cache line at a time between other work: many requests at once would wait for each other. */
struct ahead { const uint8_t *const *row, *const *end; size_t off, at, bytes; };   /* at row + off, `bytes` each */

INL void ask(struct ahead *f)
{
    if (f->row >= f->end)
        return;
    __builtin_prefetch(*f->row + f->off + f->at, 0, 3);
    f->at += 64;
    if (f->at >= f->bytes) {
        f->at = 0;
        f->row++;
    }
}

/* Where n rows from position `first` on are. */
static void find_rows(const struct pd_attn *a, size_t off, int first, int n, const uint8_t **rows)
{
    const size_t row = (size_t)a->head_dim * (a->kv_dtype == PD_F32 ? 4 : 2);
    int b = first / a->block_size, o = first % a->block_size;
    for (int i = 0; i < n; i++) {
        rows[i] = a->blk[b] + (size_t)o * row + off;
        if (++o == a->block_size) {
            o = 0;
            b++;
        }
    }
}

static void find_keys(const struct pd_attn *a, int first, int n, const uint8_t **rows)
{
    find_rows(a, a->k_off, first, n, rows);
    for (int i = n; i % PANEL; i++)
        rows[i] = rows[n - 1];
}

INL vf kv_load(const uint8_t *row, enum pd_dtype t, int d)
{
    return t == PD_F16 ? vf_half((const uint16_t *)(const void *)row + d) : t == PD_BF16 ? vf_bf16((const uint16_t *)(const void *)row + d)
                                                                                        : vf_load((const float *)(const void *)row + d);
}

/* A panel of 32 keys turned to [head_dim][PANEL], in the KV's own type. Sixteen-bit types go eight by eight within each 128 bits (lane j holds keys
 * 8j .. 8j+7). */
#if defined(PD_ISA_AVX512)
INL __m512i four(const uint8_t *const *k, int step, size_t at)
{
    __m512i z = _mm512_castsi128_si512(_mm_loadu_si128((const void *)(k[0] + at)));
    z = _mm512_mask_broadcast_i32x4(z, 0x00f0, _mm_loadu_si128((const void *)(k[step] + at)));
    z = _mm512_mask_broadcast_i32x4(z, 0x0f00, _mm_loadu_si128((const void *)(k[2 * step] + at)));
    return _mm512_mask_broadcast_i32x4(z, 0xf000, _mm_loadu_si128((const void *)(k[3 * step] + at)));
}
#define WIDE_T __m512i
#define WIDE(op) _mm512_##op
#define WIDE_LOAD(k, step, at) four(k, step, at)
#define WIDE_STORE(p, z) _mm512_storeu_si512(p, z)
enum { LANES = 4 };
#elif defined(PD_ISA_AVX2)
#define WIDE_T __m128i
#define WIDE(op) _mm_##op
#define WIDE_LOAD(k, step, at) _mm_loadu_si128((const void *)((k)[0] + (at)))
#define WIDE_STORE(p, z) _mm_storeu_si128((void *)(p), z)
enum { LANES = 1 };
#endif

static void turn16(const uint8_t *const *k, size_t off, int hd, uint16_t *kt, struct ahead f)
{
#if defined(WIDE_T)
    for (int i = 0; i < PANEL; i += 8 * LANES)
        for (int d = 0; d < hd; d += 8) {
            WIDE_T a[8], b[8];
            for (int j = 0; j < 2 * LANES; j++)     /* over the whole panel its size in lines */
                ask(&f);
            for (int j = 0; j < 8; j++)
                a[j] = WIDE_LOAD(k + i + j, 8, off + (size_t)d * 2);
            for (int j = 0; j < 8; j += 2) {            /* pairs of keys */
                b[j] = WIDE(unpacklo_epi16)(a[j], a[j + 1]);
                b[j + 1] = WIDE(unpackhi_epi16)(a[j], a[j + 1]);
            }
            for (int j = 0; j < 8; j += 4)              /* fours */
                for (int h = 0; h < 2; h++) {
                    a[j + 2 * h] = WIDE(unpacklo_epi32)(b[j + h], b[j + 2 + h]);
                    a[j + 2 * h + 1] = WIDE(unpackhi_epi32)(b[j + h], b[j + 2 + h]);
                }
            for (int h = 0; h < 4; h++) {               /* eights */
                WIDE_STORE(kt + (d + 2 * h) * PANEL + i, WIDE(unpacklo_epi64)(a[h], a[h + 4]));
                WIDE_STORE(kt + (d + 2 * h + 1) * PANEL + i, WIDE(unpackhi_epi64)(a[h], a[h + 4]));
            }
        }
#else
    for (int i = 0; i < PANEL; i++)
        for (int d = 0; d < hd; d++)
            memcpy(&kt[d * PANEL + i], k[i] + off + 2 * d, 2);
#endif
}

static void turn32(const uint8_t *const *k, size_t off, int hd, float *kt, struct ahead f)
{
#if defined(WIDE_T)
    for (int i = 0; i < PANEL; i += 4 * LANES)
        for (int d = 0; d < hd; d += 4) {
            WIDE_T a[4], b[4];
            for (int j = 0; j < LANES; j++)
                ask(&f);
            for (int j = 0; j < 4; j++)
                a[j] = WIDE_LOAD(k + i + j, 4, off + (size_t)d * 4);
            for (int j = 0; j < 4; j += 2) {
                b[j] = WIDE(unpacklo_epi32)(a[j], a[j + 1]);
                b[j + 1] = WIDE(unpackhi_epi32)(a[j], a[j + 1]);
            }
            for (int h = 0; h < 2; h++) {
                WIDE_STORE(kt + (d + 2 * h) * PANEL + i, WIDE(unpacklo_epi64)(b[h], b[h + 2]));
                WIDE_STORE(kt + (d + 2 * h + 1) * PANEL + i, WIDE(unpackhi_epi64)(b[h], b[h + 2]));
            }
        }
#else
    for (int i = 0; i < PANEL; i++)
        for (int d = 0; d < hd; d++)
            memcpy(&kt[d * PANEL + i], k[i] + off + 4 * d, 4);
#endif
}

INL void turn(const uint8_t *const *k, size_t off, int hd, enum pd_dtype t, void *kt, struct ahead f)
{
    if (t == PD_F32)
        turn32(k, off, hd, kt, f);
    else
        turn16(k, off, hd, kt, f);
}

/* The same, widened to float. raw: room for a panel. */
static void turn_widened(const uint8_t *const *k, int hd, enum pd_dtype t, float *kt, void *raw)
{
    if (t == PD_F32) {
        turn32(k, 0, hd, kt, (struct ahead){ 0 });
        return;
    }
    turn16(k, 0, hd, raw, (struct ahead){ 0 });
    for (int i = 0; i < hd * PANEL; i += 16)
        vf_store(kt + i, kv_load(raw, t, i));
}

/* sc[t][0 .. PANEL) = scale * q[t] . K of one panel of type t */
TILE_INL void scores(const int T, const uint8_t *kt, const enum pd_dtype type, int hd, float factor, const float *const *q, float *sc, struct ahead f)
{
    const vf scale = vf_set1(factor);
    for (int v0 = 0; v0 < PANEL / 16; v0 += NV) {
        vf acc[VT][NV];
        for (int t = 0; t < T; t++)
            for (int v = 0; v < NV; v++)
                acc[t][v] = vf_set1(0);
        for (int d = 0; d < hd; d++) {
            vf k[NV];
            if (d % 2 == 0)
                ask(&f);
            for (int v = 0; v < NV; v++)
                k[v] = kv_load(kt, type, d * PANEL + (v0 + v) * 16);
            for (int t = 0; t < T; t++) {
                vf x = vf_set1(q[t][d]);
                for (int v = 0; v < NV; v++)
                    acc[t][v] = vf_fma(x, k[v], acc[t][v]);
            }
        }
        for (int t = 0; t < T; t++)
            for (int v = 0; v < NV; v++)
                vf_store(sc + t * SEG + (v0 + v) * 16, vf_mul(acc[t][v], scale));
    }
}

/* acc[t][d] goes on by fma over the keys in order: the first `common` for all T vectors together, the rest of each alone. V in type t. */
TILE_INL void weigh(const int T, const uint8_t *const *rows, size_t off, const enum pd_dtype type, int hd, const float *p, const int *n, int common, float *acc, struct ahead f)
{
    int d0 = 0;
    for (; d0 + 16 * DV <= hd; d0 += 16 * DV) {
        vf o[VT][DV];
        for (int t = 0; t < T; t++)
            for (int v = 0; v < DV; v++)
                o[t][v] = vf_load(acc + (size_t)t * hd + d0 + v * 16);
        for (int i = 0; i < common; i++) {
            vf x[DV];
            ask(&f);
            for (int v = 0; v < DV; v++)
                x[v] = kv_load(rows[i] + off, type, d0 + v * 16);
            for (int t = 0; t < T; t++) {
                vf w = vf_set1(p[t * SEG + i]);
                for (int v = 0; v < DV; v++)
                    o[t][v] = vf_fma(w, x[v], o[t][v]);
            }
        }
        for (int t = 0; t < T; t++)
            for (int v = 0; v < DV; v++)
                vf_store(acc + (size_t)t * hd + d0 + v * 16, o[t][v]);
    }
    for (; d0 < hd; d0 += 16)
        for (int t = 0; t < T; t++) {
            vf o = vf_load(acc + (size_t)t * hd + d0);
            for (int i = 0; i < common; i++)
                o = vf_fma(vf_set1(p[t * SEG + i]), kv_load(rows[i] + off, type, d0), o);
            vf_store(acc + (size_t)t * hd + d0, o);
        }
    for (int t = 0; t < T; t++)
        for (int i = common; i < n[t]; i++)
            for (int d = 0; d < hd; d += 16) {
                float *o = acc + (size_t)t * hd + d;
                vf_store(o, vf_fma(vf_set1(p[t * SEG + i]), kv_load(rows[i] + off, type, d), vf_load(o)));
            }
}

#define TILE(T) \
    static __attribute__((noinline)) void scores_##T(const void *kt, enum pd_dtype type, int hd, float factor, const float *const *q, float *sc, struct ahead f) \
    { \
        if (type == PD_F16) \
            scores(T, kt, PD_F16, hd, factor, q, sc, f); \
        else if (type == PD_BF16) \
            scores(T, kt, PD_BF16, hd, factor, q, sc, f); \
        else \
            scores(T, kt, PD_F32, hd, factor, q, sc, f); \
    } \
    static __attribute__((noinline)) void weigh_##T(const uint8_t *const *rows, size_t off, enum pd_dtype type, int hd, const float *p, const int *n, int common, float *acc, struct ahead f) \
    { \
        if (type == PD_F16) \
            weigh(T, rows, off, PD_F16, hd, p, n, common, acc, f); \
        else if (type == PD_BF16) \
            weigh(T, rows, off, PD_BF16, hd, p, n, common, acc, f); \
        else \
            weigh(T, rows, off, PD_F32, hd, p, n, common, acc, f); \
    }
typedef void scores_fn(const void *kt, enum pd_dtype type, int hd, float factor, const float *const *q, float *sc, struct ahead f);
typedef void weigh_fn(const uint8_t *const *rows, size_t off, enum pd_dtype type, int hd, const float *p, const int *n, int common, float *acc, struct ahead f);
TILE(1)
#if defined(PD_ISA_AVX2) || defined(PD_ISA_AVX512)
TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
static scores_fn *const scores_of[VT + 1] = { NULL, scores_1, scores_2, scores_3, scores_4, scores_5, scores_6 };
static weigh_fn *const weigh_of[VT + 1] = { NULL, weigh_1, weigh_2, weigh_3, weigh_4, weigh_5, weigh_6 };
#else
static scores_fn *const scores_of[VT + 1] = { NULL, scores_1 };
static weigh_fn *const weigh_of[VT + 1] = { NULL, weigh_1 };
#endif

INL void exp2of(float *x) { float t[16] = { x[0], x[1] }; vf_store(t, vf_exp(vf_load(t))); x[0] = t[0]; x[1] = t[1]; }

/* One part into the running state of a query vector. first: the state is empty. */
INL void merge(float *M, float *L, float *O, float m, float l, const float *acc, int hd, int first)
{
    if (first) {
        *M = m;
        *L = l;
        memcpy(O, acc, (size_t)hd * 4);
        return;
    }
    float top = f_max(m, *M), w[2] = { *M - top, m - top };
    exp2of(w);
    vf va = vf_set1(w[0]), vb_ = vf_set1(w[1]);
    *M = top;
    *L = __builtin_fmaf(*L, w[0], l * w[1]);
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
static void attn_rows(const struct pd_attn *a, int row0, int row1, void *scratch)
{
    const int hd = a->head_dim, n_vec = (row1 - row0) * a->n_group, last = a->pos0 + row1 - 1;
    /* few vectors: V is widened as it is used; many: once */
    const int widen_v = n_vec > VT && a->kv_dtype != PD_F32;
    struct seg s = { .a = a };
    carve(&s, scratch, hd, VT, a->n_group);
    for (s.first = 0; s.first <= last; s.first += SEG) {
        s.n = last + 1 - s.first < SEG ? last + 1 - s.first : SEG;
        find_keys(a, s.first, s.n, s.k);
        find_rows(a, a->v_off, s.first, s.n, s.v);
        for (int p = 0; p < s.n; p += PANEL)
            turn_widened(s.k + p, hd, a->kv_dtype, s.kt + (size_t)p * hd, s.vf);
        for (int i = 0; widen_v && i < s.n; i++) {
            float *v = s.vf + (size_t)i * hd;
            for (int d = 0; d < hd; d += 16)
                vf_store(v + d, kv_load(s.v[i], a->kv_dtype, d));
            s.v[i] = (const uint8_t *)v;
        }
        /* rows before the segment's first position see none of it */
        int skip = s.first - a->pos0 - row0;
        for (int t0 = skip > 0 ? skip * a->n_group : 0; t0 < n_vec; t0 += VT) {
            const int T = n_vec - t0 < VT ? n_vec - t0 : VT;
            const float *q[VT];
            float m[VT], l[VT];
            int n[VT], least = SEG, most = 0;
            for (int t = 0; t < T; t++) {
                int row = row0 + (t0 + t) / a->n_group;
                q[t] = a->q + (size_t)row * a->q_stride + (size_t)((t0 + t) % a->n_group) * hd;
                n[t] = a->pos0 + row + 1 - s.first < SEG ? a->pos0 + row + 1 - s.first : SEG;
                least = n[t] < least ? n[t] : least;
                most = n[t] > most ? n[t] : most;
            }
            for (int p = 0; p < most; p += PANEL)
                scores_of[T](s.kt + (size_t)p * hd, PD_F32, hd, a->scale, q, s.sc + p, (struct ahead){ 0 });
            for (int t = 0; t < T; t++) {
                m[t] = K(max)(s.sc + t * SEG, n[t]);
                K(exp_sub)(s.sc + t * SEG, s.sc + t * SEG, n[t], m[t], &l[t]);
            }
            memset(s.acc, 0, (size_t)T * (size_t)hd * sizeof(float));
            weigh_of[T](s.v, 0, widen_v ? PD_F32 : a->kv_dtype, hd, s.sc, n, least, s.acc, (struct ahead){ 0 });
            for (int t = 0; t < T; t++) {
                float *O = a->out + (size_t)(row0 + (t0 + t) / a->n_group) * a->out_stride + (size_t)((t0 + t) % a->n_group) * hd;
                merge(&s.M[t0 + t], &s.L[t0 + t], O, m[t], l[t], s.acc + (size_t)t * hd, hd, !s.first);
            }
        }
    }
    for (int t = 0; t < n_vec; t++)
        finish(a->out + (size_t)(row0 + t / a->n_group) * a->out_stride + (size_t)(t % a->n_group) * hd, s.L[t], hd);
}

void K(attn)(const struct pd_attn *a, int row0, int row1, void *scratch)
{
    for (int r = row0; r < row1; r += ROWS)
        attn_rows(a, r, r + ROWS < row1 ? r + ROWS : row1, scratch);
}

enum { AHEAD = 2 };             /* panels */

/* The rows of panel u, counted over all heads; none past the last key. */
INL struct ahead unit_ahead(const uint8_t *const *rows, int n, int u, int n_heads, size_t head, size_t row)
{
    const int p = u / n_heads * PANEL;
    return (struct ahead){ rows + (p < n ? p : n), rows + (p + PANEL < n ? p + PANEL : n), (size_t)(u % n_heads) * head, 0, row };
}

/* Panels of all heads in turn: what lies together is read together, and the processor's own prefetching follows it. */
void K(attn_seg)(const struct pd_attn *a, int n_heads, int seg, float *out, size_t part_stride, void *scratch)
{
    const int hd = a->head_dim, last = a->pos0, G = a->n_group;
    const size_t row = (size_t)hd * (a->kv_dtype == PD_F32 ? 4 : 2), head = row * (size_t)a->block_size;
    struct seg s = { .a = a, .first = seg * SEG };
    carve(&s, scratch, hd, n_heads * G, G);
    s.n = last + 1 - s.first < SEG ? last + 1 - s.first : SEG;
    find_keys(a, s.first, s.n, s.k);
    find_rows(a, a->v_off, s.first, s.n, s.v);
    const int units = (s.n + PANEL - 1) / PANEL * n_heads;
    for (int u = 0; u < units; u++) {                   /* a panel is used while it is in the nearest cache */
        const int p = u / n_heads * PANEL, h = u % n_heads;
        turn(s.k + p, (size_t)h * head, hd, a->kv_dtype, s.kt, unit_ahead(s.k, s.n, u + AHEAD, n_heads, head, row));
        struct ahead v = unit_ahead(s.v, s.n, u, n_heads, head, row);
        v.end = v.row + (v.end - v.row) / 2;
        for (int h0 = 0; h0 < G; h0 += VT) {
            const int T = G - h0 < VT ? G - h0 : VT;
            const float *q[VT];
            for (int t = 0; t < T; t++)
                q[t] = a->q + (size_t)(h * G + h0 + t) * hd;
            scores_of[T](s.kt, a->kv_dtype, hd, a->scale, q, s.sc + (h * G + h0) * SEG + p, v);
            v.row = v.end;
        }
    }
    for (int t = 0; t < n_heads * G; t++) {
        float *o = out + (size_t)(t / G) * part_stride + (size_t)(t % G) * (2 + (size_t)hd), *sc = s.sc + t * SEG;
        o[0] = K(max)(sc, s.n);
        K(exp_sub)(sc, sc, s.n, o[0], &o[1]);
    }
    memset(s.acc, 0, (size_t)(n_heads * G) * (size_t)hd * sizeof(float));
    for (int u = 0; u < units; u++) {
        const int p = u / n_heads * PANEL, h = u % n_heads, m = s.n - p < PANEL ? s.n - p : PANEL;
        struct ahead f = unit_ahead(s.v, s.n, u + AHEAD, n_heads, head, row);
        f.row += (f.end - f.row) / 2;
        for (int h0 = 0; h0 < G; h0 += VT, f.row = f.end) {
            const int T = G - h0 < VT ? G - h0 : VT;
            int n[VT];
            for (int t = 0; t < T; t++)
                n[t] = m;
            weigh_of[T](s.v + p, (size_t)h * head, a->kv_dtype, hd, s.sc + (h * G + h0) * SEG + p, n, m, s.acc + (size_t)(h * G + h0) * hd, f);
        }
    }
    for (int t = 0; t < n_heads * G; t++)
        memcpy(out + (size_t)(t / G) * part_stride + (size_t)(t % G) * (2 + (size_t)hd) + 2, s.acc + (size_t)t * hd, (size_t)hd * 4);
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
