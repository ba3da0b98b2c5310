/* The kernels against references written from their definitions, and against each other bit for bit. */
#include <immintrin.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "../../kernels/kernels.h"

enum { ISAS = 5 };
static const struct pd_kernels *isa[ISAS];
static int n_isa;

/* Equal strings promise equal bits. */
static const char *class_of(const struct pd_kernels *k, enum pd_pack p) { return p == PD_PK_BF16 ? k->cls_bf16 : p == PD_PK_U8 || p == PD_PK_U4 ? k->cls_int : k->cls_float; }
static bool same_class(const struct pd_kernels *a, const struct pd_kernels *b, enum pd_pack p) { return !strcmp(class_of(a, p), class_of(b, p)); }

static uint64_t seed = 1;
static uint32_t rnd(void) { seed = seed * 6364136223846793005u + 1442695040888963407u; return (uint32_t)(seed >> 33) ^ (uint32_t)(seed >> 40); }
static float uniform(void) { return (float)(rnd() & 0xffffff) / 0x800000p0f - 1.0f; }
static float bits_f(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static uint32_t f_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

/* Exactly the bytes asked for, so that the sanitizer sees an over-read. */
static void *block(size_t n) { void *p = NULL; assert_int_equal(posix_memalign(&p, 64, n ? n : 1), 0); memset(p, 0xee, n); return p; }

static double half_value(uint16_t h)
{
    int e = h >> 10 & 31, m = h & 1023;
    double v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return h & 0x8000 ? -v : v;
}
static uint16_t half_near(float f)      /* a half near f, for making weights: any will do */
{
    int e;
    double m = frexp(fabs((double)f), &e);
    if (m == 0 || e < -13)
        return 0;
    return (uint16_t)((f < 0 ? 0x8000 : 0) | (uint32_t)(e + 14) << 10 | ((uint32_t)(m * 2048) & 1023));
}

/* A random matrix in packed form, and its values in double, [n_out][n_in_pad]. */
struct mat { struct pd_pmat p; double *w; };
struct spec { enum pd_pack pack; int sub, off, scale_f32, has_min, top; };

static struct mat make(struct spec s, int n_out, int n_in)
{
    struct mat m = { .p = { .pack = s.pack, .n_out = n_out, .n_in = n_in, .n_in_pad = (n_in + 31) / 32 * 32, .n_groups = (n_out + 31) / 32,
                            .sub = s.sub, .off = s.off, .scale_f32 = s.scale_f32, .has_min = s.has_min } };
    int np = m.p.n_in_pad, sb = s.scale_f32 ? 4 : 2, integer = s.pack == PD_PK_U8 || s.pack == PD_PK_U4;
    m.p.group_bytes = integer ? (size_t)(np / s.sub) * (size_t)(s.sub * 32 / (s.pack == PD_PK_U4 ? 2 : 1) + 32 * sb * (1 + s.has_min))
                              : (size_t)np * 32 * (s.pack == PD_PK_F32 ? 4 : 2);
    m.p.data = block(m.p.group_bytes * (size_t)m.p.n_groups);
    memset(m.p.data, 0, m.p.group_bytes * (size_t)m.p.n_groups);
    m.w = calloc((size_t)m.p.n_groups * 32 * (size_t)np, sizeof(double));
    for (int o = 0; o < n_out; o++)
        for (int k = 0; k < n_in; k++) {
            uint8_t *g = m.p.data + (size_t)(o / 32) * m.p.group_bytes;
            int l = o % 32;
            double *w = &m.w[(size_t)o * (size_t)np + (size_t)k];
            if (s.pack == PD_PK_F32) {
                float f = uniform();
                memcpy(g + ((size_t)k * 32 + (size_t)l) * 4, &f, 4);
                *w = f;
            } else if (s.pack == PD_PK_F16) {
                uint16_t h = half_near(uniform());
                memcpy(g + ((size_t)k * 32 + (size_t)l) * 2, &h, 2);
                *w = half_value(h);
            } else if (s.pack == PD_PK_BF16) {
                uint16_t b = (uint16_t)(f_bits(uniform()) >> 16);
                memcpy(g + (((size_t)(k / 2) * 32 + (size_t)l) * 2 + (size_t)(k % 2)) * 2, &b, 2);
                *w = bits_f((uint32_t)b << 16);
            } else {
                size_t sub_bytes = m.p.group_bytes / (size_t)(np / s.sub), quants = sub_bytes - (size_t)(32 * sb * (1 + s.has_min));
                uint8_t *b = g + (size_t)(k / s.sub) * sub_bytes;
                int i = k % s.sub, u = (int)(rnd() % (unsigned)(s.top + 1));
                if (s.pack == PD_PK_U8)
                    b[i / 4 * 128 + l * 4 + i % 4] = (uint8_t)u;
                else
                    b[i / 8 * 128 + l * 4 + i % 4] |= (uint8_t)(u << (i / 4 % 2 * 4));
                double sc[2];
                for (int n = 0; n <= s.has_min; n++) {
                    uint8_t *at = b + quants + (size_t)(n * 32 + l) * (size_t)sb;
                    float f = (n ? 0.5f : 0.02f) * uniform();
                    uint16_t h = half_near(f);
                    if (i == 0)
                        memcpy(at, s.scale_f32 ? (void *)&f : (void *)&h, (size_t)sb);
                    memcpy(&f, at, 4 <= sb ? 4 : 2);
                    memcpy(&h, at, 2);
                    sc[n] = s.scale_f32 ? (double)f : half_value(h);
                }
                *w = sc[0] * (u - s.off) + (s.has_min ? sc[1] : 0);
            }
        }
    return m;
}
static void drop(struct mat *m) { free(m->p.data); free(m->w); }

static void *prepare(const struct pd_kernels *k, const struct pd_pmat *p, const float *x, int rows)
{
    size_t st = k->act_stride(p->pack, p->n_in_pad);
    assert_int_equal(st % 64, 0);
    uint8_t *a = block(st * (size_t)rows);
    memset(a, 0, st * (size_t)rows);
    for (int r = 0; r < rows; r++)
        k->prep(p->pack, x + (size_t)r * (size_t)p->n_in, p->n_in, p->n_in_pad, a + st * (size_t)r);
    return a;
}

/* What the weights' kind makes of x before the product, from the definition. */
static void rounded(enum pd_pack pack, const float *x, int n, double *out)
{
    for (int b = 0; b < n; b += 32) {
        float amax = 0;
        int e = b + 32 < n ? b + 32 : n;
        for (int i = b; i < e; i++)
            amax = fmaxf(amax, fabsf(x[i]));
        for (int i = b; i < e; i++) {
            if (pack == PD_PK_F32 || pack == PD_PK_F16)
                out[i] = x[i];
            else if (pack == PD_PK_BF16) {
                uint32_t lo = f_bits(x[i]) & 0xffff0000, hi = lo + 0x10000;      /* the nearer neighbour; ties do not matter to the tolerance */
                out[i] = fabs((double)bits_f(lo) - x[i]) <= fabs((double)bits_f(hi) - x[i]) ? bits_f(lo) : bits_f(hi);
            } else
                out[i] = amax == 0 ? 0 : rint((double)(x[i] * (127.0f / amax))) * (double)(amax / 127.0f);
        }
    }
}

enum { ROWS = 55 };             /* more than three times what a tile holds, and a rest */

static void one_gemm(struct spec s, int n_out, int n_in)
{
    struct mat m = make(s, n_out, n_in);
    int np = m.p.n_in_pad, ldy = n_out + 3;
    float *x = block((size_t)ROWS * (size_t)n_in * 4), *first = NULL;
    for (int i = 0; i < ROWS * n_in; i++)
        x[i] = uniform() * (i / 32 % 3 ? 1.0f : 30.0f);
    memset(x + (size_t)n_in * 3, 0, (size_t)n_in * 4);                  /* a row of zeros */
    size_t bytes = (size_t)ROWS * (size_t)ldy * 4;
    for (int t = 0; t < n_isa; t++) {
        const struct pd_kernels *k = isa[t];
        uint8_t *a = prepare(k, &m.p, x, ROWS);
        size_t st = k->act_stride(s.pack, np);
        void *scratch = block(k->gemm_scratch(&m.p));
        float *y = block(bytes), *z = block(bytes);
        k->gemm(&m.p, a, ROWS, y, (size_t)ldy, 0, 0, m.p.n_groups, scratch);
        if (!t || !same_class(isa[0], k, s.pack)) {
            double *xr = calloc((size_t)np, sizeof *xr);
            for (int r = 0; r < ROWS; r++) {
                rounded(s.pack, x + (size_t)r * (size_t)n_in, n_in, xr);
                for (int o = 0; o < n_out; o++) {
                    double want = 0, mass = 0;
                    for (int i = 0; i < n_in; i++) {
                        double w = m.w[(size_t)o * (size_t)np + (size_t)i];
                        want += w * xr[i];
                        mass += fabs(w * xr[i]);
                    }
                    if (fabs(want - y[r * ldy + o]) > 2e-6 * mass + 1e-30)
                        fail_msg("pack %d sub %d, %d x %d, row %d output %d: %.9g, not %.9g", s.pack, s.sub, n_out, n_in, r, o, (double)y[r * ldy + o], want);
                }
            }
            free(xr);
            if (!t) {
                first = block(bytes);
                memcpy(first, y, bytes);
            }
        } else if (memcmp(first, y, bytes)) {
            fail_msg("pack %d sub %d, %d x %d: %s and %s differ", s.pack, s.sub, n_out, n_in, isa[0]->name, k->name);
        }
        for (int r = 0; r < ROWS; r++)                                  /* columns past n_out untouched */
            for (int o = n_out; o < ldy; o++)
                assert_int_equal(f_bits(y[r * ldy + o]), 0xeeeeeeee);
        for (int at = 0, n = 1; at < ROWS; at += n, n = n % 20 + 1) {   /* the same rows in uneven bites, groups one by one */
            if (at + n > ROWS)
                n = ROWS - at;
            for (int g = 0; g < m.p.n_groups; g++)
                k->gemm(&m.p, a + (size_t)at * st, n, z + at * ldy, (size_t)ldy, 0, g, g + 1, scratch);
        }
        assert_memory_equal(y, z, bytes);
        for (int r = 0; r < ROWS; r++)
            for (int o = 0; o < n_out; o++)
                z[r * ldy + o] = (float)(o - r) * 0.37f;
        k->gemm(&m.p, a, ROWS, z, (size_t)ldy, 1, 0, m.p.n_groups, scratch);
        for (int r = 0; r < ROWS; r++)
            for (int o = 0; o < n_out; o++)
                assert_int_equal(f_bits(z[r * ldy + o]), f_bits((float)(o - r) * 0.37f + y[r * ldy + o]));
        free(a); free(scratch); free(y); free(z);
    }
    free(x); free(first);
    drop(&m);
}

static void gemm_sweep(struct spec s)
{
    static const int shapes[][2] = { { 32, 32 }, { 1, 64 }, { 40, 96 }, { 64, 576 }, { 33, 50 }, { 95, 608 } };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        one_gemm(s, shapes[i][0], shapes[i][1]);
}

static void gemm_f32(void **st) { gemm_sweep((struct spec){ .pack = PD_PK_F32 }); }
static void gemm_f16(void **st) { gemm_sweep((struct spec){ .pack = PD_PK_F16 }); }
static void gemm_bf16(void **st) { gemm_sweep((struct spec){ .pack = PD_PK_BF16 }); }
static void gemm_u8(void **st)
{
    gemm_sweep((struct spec){ PD_PK_U8, 32, 128, 0, 0, 255 });         /* Q8_0 */
    gemm_sweep((struct spec){ PD_PK_U8, 32, 16, 0, 0, 31 });           /* Q5_0 */
    gemm_sweep((struct spec){ PD_PK_U8, 32, 0, 0, 1, 31 });            /* Q5_1 */
    gemm_sweep((struct spec){ PD_PK_U8, 32, 0, 1, 1, 31 });            /* Q5_K */
    gemm_sweep((struct spec){ PD_PK_U8, 16, 32, 1, 0, 63 });           /* Q6_K */
    gemm_sweep((struct spec){ PD_PK_U8, 16, 0, 0, 1, 255 });
}
static void gemm_u4(void **st)
{
    gemm_sweep((struct spec){ PD_PK_U4, 32, 8, 0, 0, 15 });            /* Q4_0 */
    gemm_sweep((struct spec){ PD_PK_U4, 32, 0, 0, 1, 15 });            /* Q4_1 */
    gemm_sweep((struct spec){ PD_PK_U4, 32, 0, 1, 1, 15 });            /* Q4_K */
    gemm_sweep((struct spec){ PD_PK_U4, 16, 8, 1, 0, 15 });
}

/* The greatest sums that there are, of either sign: nothing on the way to them may saturate or wrap. The scalar build has the definition's sums. */
static void gemm_extremes(void **st)
{
    enum { N = 32, KK = 96, M = 9 };
    static const struct spec s[] = { { PD_PK_U8, 32, 128, 0, 0, 255 }, { PD_PK_U8, 32, 0, 0, 1, 255 }, { PD_PK_U8, 16, 32, 1, 0, 255 }, { PD_PK_U8, 16, 0, 1, 1, 255 },
                                     { PD_PK_U4, 32, 8, 0, 0, 15 }, { PD_PK_U4, 32, 0, 0, 1, 15 }, { PD_PK_U4, 16, 8, 1, 0, 15 } };
    for (size_t c = 0; c < sizeof s / sizeof *s; c++)
        for (int top = 0; top < 2; top++) {
            struct mat m = make(s[c], N, KK);
            size_t sub_bytes = m.p.group_bytes / (size_t)(KK / s[c].sub), quants = (size_t)(s[c].sub * 32 / (s[c].pack == PD_PK_U4 ? 2 : 1));
            for (int b = 0; b < KK / s[c].sub; b++)
                memset(m.p.data + (size_t)b * sub_bytes, top ? 255 : 0, quants);
            float x[M * KK], first[M * N], y[M * N];
            for (int i = 0; i < M * KK; i++)            /* all of one sign, all of the other, and by turns */
                x[i] = i / KK % 3 == 0 || (i / KK % 3 == 2 && i / 2 % 2) ? 1.0f : -1.0f;
            for (int t = 0; t < n_isa; t++) {
                uint8_t *a = prepare(isa[t], &m.p, x, M);
                void *scratch = block(isa[t]->gemm_scratch(&m.p));
                isa[t]->gemm(&m.p, a, M, t ? y : first, N, 0, 0, 1, scratch);
                if (t && memcmp(first, y, sizeof y))
                    fail_msg("pack %d sub %d, weights all %s: %s and %s differ", s[c].pack, s[c].sub, top ? "greatest" : "least", isa[0]->name, isa[t]->name);
                free(a); free(scratch);
            }
            drop(&m);
        }
}

/* Enough rows and k that the product is taken in several chunks of rows and of k; a row at a time, by the first build of the class, gives the same. */
static void gemm_many_rows(void **st)
{
    enum { N = 40, M = 300, KK = 2048 };
    struct spec s[] = { { PD_PK_U4, 32, 0, 0, 1, 15 }, { PD_PK_U8, 16, 32, 1, 0, 63 }, { PD_PK_U8, 32, 128, 0, 0, 255 }, { .pack = PD_PK_F16 }, { .pack = PD_PK_BF16 } };
    for (size_t c = 0; c < sizeof s / sizeof *s; c++) {
        struct mat m = make(s[c], N, KK);
        float *x = block((size_t)M * KK * 4), *y = block((size_t)M * N * 4), *z = block((size_t)M * N * 4);
        for (int i = 0; i < M * KK; i++)
            x[i] = uniform();
        for (int t = n_isa > 2 ? 2 : n_isa - 1; t < n_isa; t++) {
            const struct pd_kernels *k = isa[t];
            uint8_t *a = prepare(k, &m.p, x, M);
            void *scratch = block(k->gemm_scratch(&m.p));
            k->gemm(&m.p, a, M, y, N, 0, 0, m.p.n_groups, scratch);
            for (int r = 0; r < M; r++)
                k->gemm(&m.p, a + (size_t)r * k->act_stride(s[c].pack, KK), 1, z + r * N, N, 0, 0, m.p.n_groups, scratch);
            assert_memory_equal(y, z, (size_t)M * N * 4);
            free(a); free(scratch);
        }
        free(x); free(y); free(z);
        drop(&m);
    }
}

/* One output of a bf16 product by its definition: a step of VDPBF16PS a pair of k, or a step of TDPBF16PS every 32 k. The processor's own
 * fused multiply-add with its flush modes set. */
__attribute__((target("fma"), noinline)) static float bf16_sum(bool tile, const uint16_t *x, const uint16_t *w, size_t w_step, int n)
{
    float sum = 0;
    unsigned csr = _mm_getcsr();
    _mm_setcsr(csr | 0x8040);
#define X(k) bits_f((uint32_t)x[k] << 16)
#define W(k) bits_f((uint32_t)w[(size_t)((k) / 2) * w_step + (size_t)((k) % 2)] << 16)
    for (int k = 0; k < n; k += tile ? 32 : 2) {
        if (tile) {
            float even = 0, odd = 0;
            for (int i = k; i < k + 32; i += 2) {
                even = __builtin_fmaf(X(i), W(i), even);
                odd = __builtin_fmaf(X(i + 1), W(i + 1), odd);
            }
            sum += even + odd;
        } else {
            sum = __builtin_fmaf(X(k + 1), W(k + 1), sum);
            sum = __builtin_fmaf(X(k), W(k), sum);
        }
    }
    _mm_setcsr(csr);
    return sum;
}

/* bf16 products follow their instruction's definition to the bit, denormal and huge values included, in every build of the class; `add` keeps denormals. */
static void bf16_edges(void **st)
{
    enum { N = 64, KK = 96 };
    for (int round = 0; round < 400; round++) {
        struct mat m = make((struct spec){ .pack = PD_PK_BF16 }, N, KK);
        uint16_t *w = (uint16_t *)(void *)m.p.data;
        float x[KK];
        int lo = round % 2 ? 55 : 0;
        for (int i = 0; i < N * KK; i++)
            w[i] = (uint16_t)((rnd() & 0x8000) | (rnd() % 12 + (unsigned)lo) << 7 | (rnd() & 127));
        for (int i = 0; i < KK; i++)
            x[i] = bits_f((rnd() & 0x80000000) | ((round % 2 ? rnd() % 12 : 120 + rnd() % 12) + (unsigned)lo) << 23 | (rnd() & 0x7fffff));
        for (int t = 0; t < n_isa; t++) {
            void *a = prepare(isa[t], &m.p, x, 1);
            float y[N];
            for (int i = 0; i < N; i++)
                y[i] = bits_f(0x00012345u + (uint32_t)i);
            isa[t]->gemm(&m.p, a, 1, y, N, 1, 0, 2, NULL);
            if (!t && !__builtin_cpu_supports("fma"))
                continue;
            for (int i = 0; i < N; i++) {
                float sum = bf16_sum(!strcmp(isa[t]->cls_bf16, "bf16amx-1"), a, w + (size_t)(i / 32) * KK * 32 + (size_t)(i % 32) * 2, 64, KK);
                if (f_bits(y[i]) != f_bits(bits_f(0x00012345u + (uint32_t)i) + sum))
                    fail_msg("%s, round %d, output %d: %a, not %a", isa[t]->name, round, i, (double)y[i], (double)(bits_f(0x00012345u + (uint32_t)i) + sum));
            }
            free(a);
        }
        drop(&m);
    }
}

static void prep_same_bits(void **st)
{
    enum { N = 96 };
    static const enum pd_pack packs[] = { PD_PK_F32, PD_PK_F16, PD_PK_BF16, PD_PK_U8, PD_PK_U4 };
    for (int round = 0; round < 300; round++) {
        float x[N];
        for (int i = 0; i < N; i++)
            x[i] = round < 100 ? uniform() : round < 200 ? ldexpf(uniform(), (int)(rnd() % 250) - 140) : bits_f(rnd() << 1 ^ rnd());
        int n = round % 2 ? N : 65 + (int)(rnd() % 31);
        for (int p = 0; p < 5; p++) {
            size_t bytes = isa[0]->act_stride(packs[p], N);
            uint8_t *a = block(bytes), *b = block(bytes);
            memset(a, 0, bytes);
            isa[0]->prep(packs[p], x, n, N, a);
            for (int t = 1; t < n_isa; t++) {
                memset(b, 0, bytes);
                assert_int_equal(isa[t]->act_stride(packs[p], N), bytes);
                isa[t]->prep(packs[p], x, n, N, b);
                if (round < 200)        /* the payload of a NaN is nobody's promise */
                    assert_memory_equal(a, b, bytes);
            }
            free(a); free(b);
        }
    }
}

/* 65,536 halves through the products, and rounding to half over every exponent and tie. */
static void halves(void **st)
{
    for (int t = 0; t < n_isa; t++) {
        struct spec s = { .pack = PD_PK_F16 };
        struct mat m = make(s, 32, 32);
        float x[32] = { 1 }, y[32];
        void *a = prepare(isa[t], &m.p, x, 1);
        for (uint32_t h0 = 0; h0 < 0x10000; h0 += 32) {
            if ((h0 & 0x7c00) == 0x7c00)
                continue;
            for (uint32_t i = 0; i < 32; i++)
                ((uint16_t *)(void *)m.p.data)[i] = (uint16_t)(h0 + i);
            isa[t]->gemm(&m.p, a, 1, y, 32, 0, 0, 1, NULL);
            for (uint32_t i = 0; i < 32; i++)
                assert_true((double)y[i] == half_value((uint16_t)(h0 + i)));
        }
        free(a);
        drop(&m);
        /* between each pair of neighbours: below, at and above the tie */
        for (uint32_t h = 0; h < 0x7c00; h++) {
            double lo = half_value((uint16_t)h), hi = h == 0x7bff ? 65536 : half_value((uint16_t)(h + 1)), mid = (lo + hi) / 2;
            float in[19];
            uint16_t out[20];
            uint32_t want[3] = { h, h & 1 ? h + 1 : h, h + 1 };
            float v[3] = { nextafterf((float)mid, 0), (float)mid, nextafterf((float)mid, INFINITY) };
            for (int i = 0; i < 19; i++)
                in[i] = i == 18 ? (float)lo : i % 2 ? -v[i % 3] : v[i % 3];
            out[19] = 0x5a5a;
            isa[t]->kv_write(out, PD_F16, in, 19);
            for (int i = 0; i < 18; i++)
                assert_int_equal(out[i], want[i % 3] | (i % 2 ? 0x8000u : 0));
            assert_int_equal(out[18], h);
            assert_int_equal(out[19], 0x5a5a);
        }
        float odd[17] = { INFINITY, -INFINITY, 70000, -1e30f, 1e-30f, -0.0f };
        uint16_t out[17];
        isa[t]->kv_write(out, PD_F16, odd, 17);
        static const uint16_t want[6] = { 0x7c00, 0xfc00, 0x7c00, 0xfc00, 0, 0x8000 };
        assert_memory_equal(out, want, sizeof want);
        float b[3] = { bits_f(0x3f808000), bits_f(0x3f818000), bits_f(0x3f808001) };       /* bf16: tie to even down, up, and above a tie */
        isa[t]->kv_write(out, PD_BF16, b, 3);
        assert_int_equal(out[0], 0x3f80);
        assert_int_equal(out[1], 0x3f82);
        assert_int_equal(out[2], 0x3f81);
    }
}

static double ulps(float got, double want)
{
    int e;
    frexp(want, &e);
    return fabs((double)got - want) / ldexp(1, e < -125 ? -149 : e - 24);
}

static void exp_accuracy(void **st)
{
    enum { N = 4096 };
    static float x[N], y[ISAS][N];
    double worst = 0;
    for (uint64_t u = 0; u < 0xffffffffu;) {
        for (int i = 0; i < N; i++, u += 4099)
            x[i] = bits_f((uint32_t)(u < 0xffffffffu ? u : 0));
        for (int i = 0; i < N; i += 2)          /* half of them where the result is a number */
            x[i] = uniform() * 105.0f;
        float sum[ISAS];
        for (int t = 0; t < n_isa; t++)
            isa[t]->exp_sub(y[t], x, N, 0, &sum[t]);
        for (int i = 0; i < N; i++) {
            for (int t = 1; t < n_isa; t++)
                assert_true(f_bits(y[t][i]) == f_bits(y[0][i]) || (isnan(y[t][i]) && isnan(y[0][i])));
            if (isnan(x[i])) {
                assert_true(isnan(y[0][i]));
                continue;
            }
            double want = exp((double)x[i]);
            if (want > 3.4028235677973366e38)
                assert_true(isinf(y[0][i]));
            else {
                double d = ulps(y[0][i], want);
                worst = d > worst ? d : worst;
            }
        }
    }
    print_message("# exp: at most %.3f ulp\n", worst);
    assert_true(worst <= 2);
}

static void rows_same_bits(void **st)
{
    static const int sizes[] = { 1, 15, 16, 17, 64, 576, 1000 };
    for (size_t c = 0; c < sizeof sizes / sizeof *sizes; c++) {
        int n = sizes[c];
        float *x = block((size_t)n * 4), *w = block((size_t)n * 4), *y[ISAS], *e[ISAS], *s[ISAS], sum[ISAS], mx[ISAS] = { 0 };
        for (int i = 0; i < n; i++) {
            x[i] = uniform() * 9;
            w[i] = uniform();
        }
        for (int t = 0; t < n_isa; t++) {
            y[t] = block((size_t)n * 4);
            e[t] = block((size_t)n * 4);
            s[t] = block((size_t)n * 4);
            isa[t]->rmsnorm(y[t], x, w, n, 1e-5f);
            mx[t] = isa[t]->max(x, n);
            isa[t]->exp_sub(e[t], x, n, mx[t], &sum[t]);
            isa[t]->silu_mul(s[t], x, w, n);
            isa[t]->add(s[t], w, n);
        }
        double sq = 0, es = 0, top = -1e30;
        for (int i = 0; i < n; i++) {
            sq += (double)x[i] * x[i];
            top = x[i] > top ? x[i] : top;
        }
        for (int i = 0; i < n; i++) {
            double want = x[i] / sqrt(sq / n + 1e-5) * w[i], silu = x[i] / (1 + exp(-(double)x[i])) * w[i];
            assert_true(fabs(want - y[0][i]) <= 1e-6 * fabs(want) + 1e-30);
            assert_true(fabs(silu + w[i] - s[0][i]) <= 1e-6 * (fabs(silu) + fabs((double)w[i])));
            assert_true(ulps(e[0][i], exp((double)(x[i] - mx[0]))) <= 2);
            es += exp((double)(x[i] - mx[0]));
        }
        assert_true(mx[0] == (float)top && fabs(sum[0] - es) <= 1e-6 * es);
        for (int t = 0; t < n_isa; t++) {
            assert_memory_equal(y[0], y[t], (size_t)n * 4);
            assert_memory_equal(e[0], e[t], (size_t)n * 4);
            assert_memory_equal(s[0], s[t], (size_t)n * 4);
            assert_true(f_bits(sum[0]) == f_bits(sum[t]) && f_bits(mx[0]) == f_bits(mx[t]));
        }
        for (int t = 0; t < n_isa; t++) { free(y[t]); free(e[t]); free(s[t]); }
        free(x); free(w);
    }
}

static void rope(void **st)
{
    enum { H = 3, D = 64 };
    static const int rots[] = { 64, 32, 2 };
    for (int c = 0; c < 6; c++) {
        int rot = rots[c / 2], pairs = c % 2;
        float x[H * D], y[ISAS][H * D], cs[D];
        for (int i = 0; i < H * D; i++)
            x[i] = uniform();
        for (int i = 0; i < rot / 2; i++) {
            cs[2 * i] = cosf((float)i + 0.3f);
            cs[2 * i + 1] = sinf((float)i + 0.3f);
        }
        for (int t = 0; t < n_isa; t++) {
            memcpy(y[t], x, sizeof x);
            isa[t]->rope(y[t], H, D, rot, cs, pairs);
            assert_memory_equal(y[0], y[t], sizeof x);
        }
        for (int h = 0; h < H; h++)
            for (int i = 0; i < D; i++) {
                int at = h * D + i;
                if (i >= rot) {
                    assert_true(y[0][at] == x[at]);
                    continue;
                }
                int j = pairs ? i / 2 : i % (rot / 2), second = pairs ? i % 2 : i >= rot / 2;
                int mate = pairs ? at ^ 1 : second ? at - rot / 2 : at + rot / 2;
                double want = second ? (double)x[mate] * cs[2 * j + 1] + (double)x[at] * cs[2 * j] : (double)x[at] * cs[2 * j] - (double)x[mate] * cs[2 * j + 1];
                assert_true(fabs(want - y[0][at]) < 1e-6);
            }
    }
}

/* KV of n positions in blocks, two heads a block with K and V of this head in the middle; positions from n on hold NaN. */
struct kvs { uint8_t *mem; const uint8_t **blk; size_t k_off, v_off; double *k, *v; };

static struct kvs make_kv(int n, int hd, int block_size, enum pd_dtype t, const float *k, const float *v)
{
    size_t es = t == PD_F32 ? 4 : 2, plane = (size_t)block_size * (size_t)hd * es, stride = 4 * plane;
    int blocks = (n + block_size - 1) / block_size;
    struct kvs r = { .mem = block(stride * (size_t)blocks), .blk = calloc((size_t)blocks, sizeof *r.blk), .k_off = plane, .v_off = 2 * plane,
                     .k = calloc((size_t)n * (size_t)hd, 8), .v = calloc((size_t)n * (size_t)hd, 8) };
    memset(r.mem, 0xff, stride * (size_t)blocks);
    for (int b = 0; b < blocks; b++)            /* blocks out of order */
        r.blk[b] = r.mem + stride * (size_t)(blocks - 1 - b);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < 2; j++) {
            const float *src = (j ? v : k) + (size_t)i * (size_t)hd;
            uint8_t *at = (uint8_t *)(uintptr_t)r.blk[i / block_size] + (j ? r.v_off : r.k_off) + (size_t)(i % block_size) * (size_t)hd * es;
            isa[0]->kv_write(at, t, src, hd);
            for (int d = 0; d < hd; d++) {
                uint16_t h;
                memcpy(&h, at + (size_t)d * es, 2);
                (j ? r.v : r.k)[(size_t)i * (size_t)hd + (size_t)d] = t == PD_F32 ? src[d] : t == PD_F16 ? half_value(h) : bits_f((uint32_t)h << 16);
            }
        }
    return r;
}
static void drop_kv(struct kvs *r) { free(r->mem); free(r->blk); free(r->k); free(r->v); }

static void attn_ref(const struct kvs *kv, const float *q, int hd, int n, double scale, double *out, double *mass)
{
    double *s = calloc((size_t)n, 8), top = -1e300, sum = 0;
    for (int i = 0; i < n; i++) {
        for (int d = 0; d < hd; d++)
            s[i] += q[d] * kv->k[(size_t)i * (size_t)hd + (size_t)d];
        s[i] *= scale;
        top = s[i] > top ? s[i] : top;
    }
    for (int i = 0; i < n; i++)
        sum += s[i] = exp(s[i] - top);
    *mass = 0;
    for (int d = 0; d < hd; d++) {
        out[d] = 0;
        for (int i = 0; i < n; i++)
            out[d] += s[i] / sum * kv->v[(size_t)i * (size_t)hd + (size_t)d];
        *mass = fmax(*mass, fabs(out[d]));
    }
    free(s);
}

static void one_attn(int hd, int group, int pos0, int rows, enum pd_dtype t, int spread)
{
    int n = pos0 + rows, w = group * hd, qs = w + 16;
    float *k = block((size_t)(n * hd) * 4), *v = block((size_t)(n * hd) * 4), *q = block((size_t)(rows * qs) * 4);
    for (int i = 0; i < n * hd; i++) {
        k[i] = uniform() * (float)spread;
        v[i] = uniform() * (i / hd % 7 == 3 ? 5.0f : 1.0f);
    }
    for (int i = 0; i < rows * qs; i++)
        q[i] = uniform() * 2;
    size_t out_bytes = (size_t)(rows * w) * 4;
    float *first = NULL, *out = block(out_bytes);
    for (int bs = 16; bs <= 48; bs += 32) {                             /* the bits do not depend on the block size */
        struct kvs kv = make_kv(n, hd, bs, t, k, v);
        struct pd_attn a = { .blk = kv.blk, .k_off = kv.k_off, .v_off = kv.v_off, .block_size = bs, .head_dim = hd, .kv_dtype = t, .q = q, .q_stride = (size_t)qs,
                             .out = out, .out_stride = (size_t)w, .n_rows = rows, .n_group = group, .pos0 = pos0, .scale = 1.0f / sqrtf((float)hd) };
        for (int i = 0; i < n_isa; i++) {
            void *scratch = block(isa[i]->attn_scratch(hd, group, 1));
            memset(out, 0xee, out_bytes);
            isa[i]->attn(&a, 0, rows, scratch);
            if (!first) {
                double *want = calloc((size_t)hd, 8), mass;
                for (int r = 0; r < rows; r++)
                    for (int h = 0; h < group; h++) {
                        attn_ref(&kv, q + r * qs + h * hd, hd, pos0 + r + 1, (double)a.scale, want, &mass);
                        for (int d = 0; d < hd; d++)
                            if (!(fabs(want[d] - out[r * w + h * hd + d]) <= 2e-5 * (mass + 1)))
                                fail_msg("head_dim %d group %d pos %d row %d head %d d %d: %g, not %g", hd, group, pos0, r, h, d, (double)out[r * w + h * hd + d], want[d]);
                    }
                free(want);
                first = block(out_bytes);
                memcpy(first, out, out_bytes);
            }
            if (memcmp(first, out, out_bytes))
                fail_msg("head_dim %d group %d pos %d rows %d block %d: %s differs", hd, group, pos0, rows, bs, isa[i]->name);
            memset(out, 0xee, out_bytes);                               /* rows in other bites */
            for (int r = 0; r < rows; r += 5)
                isa[i]->attn(&a, r, r + 5 < rows ? r + 5 : rows, scratch);
            assert_memory_equal(first, out, out_bytes);
            memset(out, 0xee, out_bytes);                               /* row by row, as decode does: in segments, then merged */
            for (int r = 0; r < rows; r += rows > 9 ? 9 : 1) {
                struct pd_attn one = a;
                int segs = (pos0 + r) / PD_ATTN_SEG + 1;
                one.q += r * qs;
                one.out += r * w;
                one.n_rows = 1;
                one.pos0 += r;
                size_t part = (size_t)(group * (2 + hd));
                float *parts = block((size_t)segs * part * 4);
                for (int s = segs - 1; s >= 0; s--)
                    isa[i]->attn_seg(&one, 1, s, parts + (size_t)s * part, 0, scratch);
                isa[i]->attn_merge(&one, parts, segs);
                assert_memory_equal(first + r * w, out + r * w, (size_t)w * 4);
                free(parts);
            }
            free(scratch);
        }
        drop_kv(&kv);
    }
    free(k); free(v); free(q); free(out); free(first);
}

/* One row of all KV heads, segment by segment, against each head by itself. */
static void one_attn_heads(int hd, int group, int heads, int pos, enum pd_dtype t)
{
    enum { BS = 16 };
    const size_t es = t == PD_F32 ? 4 : 2, head = BS * (size_t)hd * es, n_blocks = (size_t)(pos / BS + 1);
    const int w = heads * group * hd, segs = pos / PD_ATTN_SEG + 1;
    const size_t part = (size_t)(group * (2 + hd)), stride = part * (size_t)segs;
    uint8_t *kv = block(n_blocks * head * (size_t)(2 * heads));
    const uint8_t **blk = malloc(n_blocks * sizeof *blk);
    float *q = block((size_t)w * 4), *want = block((size_t)w * 4), *out = block((size_t)w * 4), *parts = block(stride * (size_t)heads * 4);
    for (size_t i = 0; i < n_blocks; i++)               /* backwards, so that they are no neighbours */
        blk[i] = kv + (n_blocks - 1 - i) * head * (size_t)(2 * heads);
    float *row = block((size_t)hd * 4);
    for (size_t i = 0; i < n_blocks * (size_t)(2 * heads * BS); i++) {
        for (int d = 0; d < hd; d++)
            row[d] = uniform();
        isa[0]->kv_write(kv + i * (size_t)hd * es, t, row, hd);
    }
    for (int i = 0; i < w; i++)
        q[i] = uniform() * 3;
    struct pd_attn a = { .blk = blk, .v_off = head * (size_t)heads, .block_size = BS, .head_dim = hd, .kv_dtype = t, .q = q, .q_stride = (size_t)w,
                         .out_stride = (size_t)w, .n_rows = 1, .n_group = group, .pos0 = pos, .scale = 0.125f };
    for (int i = 0; i < n_isa; i++) {
        void *scratch = block(isa[i]->attn_scratch(hd, group, heads));
        for (int h = 0; h < heads; h++) {
            struct pd_attn one = a;
            one.k_off += (size_t)h * head;
            one.v_off += (size_t)h * head;
            one.q += h * group * hd;
            one.out = want + h * group * hd;
            isa[i]->attn(&one, 0, 1, scratch);
        }
        memset(parts, 0xee, stride * (size_t)heads * 4);
        for (int s = segs - 1; s >= 0; s--)
            isa[i]->attn_seg(&a, heads, s, parts + (size_t)s * part, stride, scratch);
        for (int h = 0; h < heads; h++) {
            struct pd_attn one = a;
            one.out = out + h * group * hd;
            isa[i]->attn_merge(&one, parts + (size_t)h * stride, segs);
        }
        if (memcmp(want, out, (size_t)w * 4))
            fail_msg("head_dim %d, %d KV heads of %d, position %d: %s: all heads at once differ from each alone", hd, heads, group, pos, isa[i]->name);
        free(scratch);
    }
    free(kv); free(blk); free(q); free(want); free(out); free(parts); free(row);
}

static void attention_heads(void **st)
{
    static const int pos[] = { 0, 30, 31, 255, 256, 700, 1023 };
    for (size_t i = 0; i < sizeof pos / sizeof *pos; i++) {
        one_attn_heads(64, 3, 3, pos[i], PD_F16);
        one_attn_heads(48, 7, 2, pos[i], PD_BF16);
        one_attn_heads(128, 1, 5, pos[i], PD_F32);
        one_attn_heads(256, 8, 1, pos[i], PD_F16);
    }
    (void)st;
}

static void attention(void **st)
{
    one_attn(64, 3, 0, 40, PD_F16, 1);
    one_attn(64, 3, 250, 14, PD_F16, 1);
    one_attn(64, 3, 600, 3, PD_F16, 12);
    one_attn(64, 1, 255, 2, PD_F16, 1);
    one_attn(16, 2, 511, 70, PD_F16, 4);
    one_attn(80, 4, 30, 5, PD_F16, 1);
    one_attn(128, 7, 257, 4, PD_BF16, 2);
    one_attn(256, 1, 40, 3, PD_F32, 1);
    one_attn(48, 9, 3, 9, PD_BF16, 1);
    one_attn(32, 8, 100, 33, PD_F32, 1);
}

static void selection(void **st)
{
    const char *why = NULL;
    assert_ptr_equal(pd_kernels_cpu("scalar", &why), isa[0]);
    assert_null(why);
    assert_non_null(pd_kernels_cpu(NULL, &why));
    assert_non_null(pd_kernels_cpu("", NULL));
    assert_null(pd_kernels_cpu("sse9", &why));
    assert_non_null(strstr(why, "avx512"));
    for (int i = 0; i < n_isa; i++) {
        assert_string_equal(isa[i]->cls_int, isa[0]->cls_int);
        assert_string_equal(isa[i]->cls_bf16, strcmp(isa[i]->name, "amx") ? isa[0]->cls_bf16 : "bf16amx-1");
        assert_string_equal(isa[i]->cls_float, isa[0]->cls_float);
    }
}

int main(void)
{
    static const char *const names[] = { "scalar", "avx2", "avx512", "amx" };
    for (int i = 0; i < 4; i++) {
        const char *why = NULL;
        const struct pd_kernels *k = pd_kernels_cpu(names[i], &why);
        if (k)
            isa[n_isa++] = k;
        else
            printf("# %s: %s\n", names[i], why);
    }
    extern const struct pd_kernels pd_kernels_avx512, pd_kernels_avx512_dpbf16;     /* by its maker one of them is taken: both are tested */
    if (__builtin_cpu_supports("avx512bf16") && n_isa > 2)
        isa[n_isa++] = isa[2] == &pd_kernels_avx512 ? &pd_kernels_avx512_dpbf16 : &pd_kernels_avx512;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(selection), cmocka_unit_test(gemm_f32), cmocka_unit_test(gemm_f16), cmocka_unit_test(gemm_bf16), cmocka_unit_test(gemm_u8),
        cmocka_unit_test(gemm_u4), cmocka_unit_test(gemm_extremes), cmocka_unit_test(gemm_many_rows), cmocka_unit_test(bf16_edges), cmocka_unit_test(prep_same_bits), cmocka_unit_test(halves),
        cmocka_unit_test(exp_accuracy), cmocka_unit_test(rows_same_bits), cmocka_unit_test(rope), cmocka_unit_test(attention), cmocka_unit_test(attention_heads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
