/* How near the kernels come to what this machine can do: each beside a roofline measured in the same run.
 *   bench_kernels [-t THREADS] [-k ISA] [WORD...]     only lines whose name holds one of the words
 * The best of many short repetitions is shown, so a busy machine hurts little. The rooflines of products are loops of the instruction that the kernel
 * is made of (the table's peak) on registers; that of matrix-vector work is reading memory. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "../../kernels/kernels.h"
#include "../../libcommon/base/clock.h"
#include "../../libcommon/base/mem.h"
#include "../../libcommon/base/threads.h"

static const struct pd_kernels *k;
static struct pd_threads *pool;
static int n_threads = 2;
static char **words;
static int n_words;

static bool wanted(const char *name)
{
    for (int i = 0; i < n_words; i++)
        if (strstr(name, words[i]))
            return true;
    return !n_words;
}

static void *mem(size_t n)
{
    struct pd_err e;
    void *p = pd_alloc_aligned((n + 63) & ~(size_t)63, "benchmark", &e);
    if (!p) {
        fprintf(stderr, "bench_kernels: %s\n", e.msg);
        exit(1);
    }
    return p;
}

/* One thread is timed by its own processor time, which leaves out what other processes took; several by the wall. */
static int64_t now_ns(void)
{
    struct timespec t;
    if (n_threads > 1)
        return pd_mono_ns();
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Least seconds of fn over `tasks` tasks: repeated for about 0.25 s, at least 5 times. */
static double best(pd_task_fn *fn, void *ctx, int tasks)
{
    double least = 1e9;
    int64_t start = pd_mono_ns();
    for (int i = 0; i < 5 || pd_mono_ns() - start < 250000000; i++) {
        int64_t t0 = now_ns();
        pd_threads_run(pool, tasks, fn, ctx);
        double s = (double)(now_ns() - t0) * 1e-9;
        least = s < least ? s : least;
    }
    return least;
}

/* Rooflines: what the table in use says of itself. */
enum { PEAK_ITER = 100000 };
static volatile float sink;
static double peak_ops;             /* of one task */
static void run_peak(void *ctx, int task, int tid)
{
    float f;
    double ops = k->peak(*(const enum pd_pack *)ctx, PEAK_ITER, &f);
    sink = f;
    if (!task)
        peak_ops = ops;
}
static uint8_t *big;
static size_t big_bytes = (size_t)256 << 20;
static void read_mem(void *ctx, int task, int tid) { sink = (float)k->read(big + big_bytes / 16 * (size_t)task, big_bytes / 16); }

static double roof_int, roof_bf16, roof_fma, roof_read;     /* GOP/s, GFLOP/s, GB/s */

/* Products. */
struct prod { struct pd_pmat w; int m; void *x; float *y; void *scratch[64]; int tasks; };
static void run_prod(void *ctx, int task, int tid)
{
    struct prod *p = ctx;
    int g = p->w.n_groups, g0 = (int)((long)g * task / p->tasks), g1 = (int)((long)g * (task + 1) / p->tasks);
    k->gemm(&p->w, p->x, p->m, p->y, (size_t)p->w.n_out, 0, g0, g1, p->scratch[tid]);
}

struct kind { const char *name; enum pd_pack pack; int sub, off, scale_f32, has_min; };
static const struct kind kinds[] = {
    { "f32", PD_PK_F32, 0, 0, 0, 0 },       { "f16", PD_PK_F16, 0, 0, 0, 0 },        { "bf16", PD_PK_BF16, 0, 0, 0, 0 },
    { "q8_0", PD_PK_U8, 32, 128, 0, 0 },    { "q5_1", PD_PK_U8, 32, 0, 0, 1 },       { "q6_k", PD_PK_U8, 16, 32, 1, 0 },
    { "q4_0", PD_PK_U4, 32, 8, 0, 0 },      { "q4_1", PD_PK_U4, 32, 0, 0, 1 },       { "q4_k", PD_PK_U4, 32, 0, 1, 1 },
};

static void prod_line(const struct kind *d, int m, int n, int kk)
{
    char name[80];
    snprintf(name, sizeof name, "gemm %-5s m=%d n=%d k=%d", d->name, m, n, kk);
    if (!wanted(name))
        return;
    struct prod p = { .w = { .pack = d->pack, .n_out = n, .n_in = kk, .n_in_pad = kk, .n_groups = n / 32, .sub = d->sub, .off = d->off,
                             .scale_f32 = d->scale_f32, .has_min = d->has_min }, .m = m };
    p.w.group_bytes = d->sub ? (size_t)(kk / d->sub) * (size_t)(d->sub * 32 / (d->pack == PD_PK_U4 ? 2 : 1) + 32 * (d->scale_f32 ? 4 : 2) * (1 + d->has_min))
                             : (size_t)kk * 32 * (d->pack == PD_PK_F32 ? 4 : 2);
    size_t bytes = p.w.group_bytes * (size_t)p.w.n_groups, st = k->act_stride(d->pack, kk);
    p.w.data = mem(bytes);
    memset(p.w.data, 0x11, bytes);
    p.x = mem(st * (size_t)m);
    p.y = mem((size_t)m * (size_t)n * 4);
    float *row = mem((size_t)kk * 4);
    for (int r = 0; r < m; r++) {
        for (int i = 0; i < kk; i++)
            row[i] = (float)((r * 31 + i * 17) % 97 - 48) / 48.0f;
        k->prep(d->pack, row, kk, kk, (uint8_t *)p.x + st * (size_t)r);
    }
    for (int t = 0; t < n_threads; t++)
        p.scratch[t] = mem(k->gemm_scratch(&p.w));
    p.tasks = n_threads == 1 ? 1 : n_threads * 4;
    double s = best(run_prod, &p, p.tasks);
    if (m >= 8) {
        double g = 2.0 * m * n * kk / s * 1e-9, roof = d->pack == PD_PK_BF16 ? roof_bf16 : d->sub ? roof_int : roof_fma;
        printf("%-38s %d thread%s %8.1f G/s   %5.1f %% of the instruction's peak\n", name, n_threads, n_threads > 1 ? "s" : " ", g, 100 * g / roof);
    } else {
        double g = (double)bytes / s * 1e-9;
        printf("%-38s %d thread%s %8.1f GB/s  %5.1f %% of reading memory\n", name, n_threads, n_threads > 1 ? "s" : " ", g, 100 * g / roof_read);
    }
    fflush(stdout);
    for (int t = 0; t < n_threads; t++)
        pd_free(p.scratch[t]);
    pd_free(p.w.data); pd_free(p.x); pd_free(p.y); pd_free(row);
}

/* Attention: 30 layers x 3 KV heads x 3 query heads each, head_dim 64, as SmolLM2-135M has it. */
enum { LAYERS = 30, KVH = 3, GROUP = 3, HD = 64, BS = 16 };
struct att { int depth, rows, layers; enum pd_dtype t; uint8_t *kv; const uint8_t **blk; float *q, *out, *parts; void *scratch[64]; size_t es; int segs, row_task; };
static struct pd_attn att_of(const struct att *a, int layer, int h)
{
    size_t plane = (size_t)BS * HD * a->es, region = plane * KVH * (size_t)((a->depth + BS - 1) / BS);      /* as in the pool: a layer's K of all blocks */
    return (struct pd_attn){ .blk = a->blk, .k_off = (size_t)(layer * 2) * region + (size_t)h * plane, .v_off = (size_t)(layer * 2 + 1) * region + (size_t)h * plane,
                             .block_size = BS, .head_dim = HD, .kv_dtype = a->t, .q = a->q + h * GROUP * HD, .q_stride = KVH * GROUP * HD, .out = a->out + h * GROUP * HD,
                             .out_stride = KVH * GROUP * HD, .n_rows = a->rows, .n_group = GROUP, .pos0 = a->depth - a->rows, .scale = 0.125f };
}
static void run_prefill(void *ctx, int task, int tid)
{
    struct att *a = ctx;
    int chunks = a->rows / a->row_task, c = task % chunks, h = task / chunks % KVH, layer = task / chunks / KVH;
    struct pd_attn d = att_of(a, layer, h);
    k->attn(&d, c * a->row_task, (c + 1) * a->row_task, a->scratch[tid]);
}
static void run_decode(void *ctx, int task, int tid)
{
    struct att *a = ctx;
    int s = task % a->segs, layer = task / a->segs;
    struct pd_attn d = att_of(a, layer, 0);
    const size_t part = GROUP * (2 + HD), head = part * (size_t)a->segs;
    k->attn_seg(&d, KVH, s, a->parts + (size_t)layer * KVH * head + (size_t)s * part, head, a->scratch[tid]);
}
static void attn_line(enum pd_dtype t, int depth, int rows)
{
    char name[80];
    snprintf(name, sizeof name, "attn %s %s depth=%d rows=%d", t == PD_F16 ? "f16" : t == PD_BF16 ? "bf16" : "f32", rows > 1 ? "prefill" : "decode", depth, rows);
    if (!wanted(name))
        return;
    struct att a = { .depth = depth, .rows = rows, .layers = rows > 1 ? 1 : LAYERS, .t = t, .es = t == PD_F32 ? 4 : 2, .segs = (depth + PD_ATTN_SEG - 1) / PD_ATTN_SEG };
    size_t block = (size_t)BS * HD * a.es * 2 * KVH * (size_t)a.layers, blocks = (size_t)((depth + BS - 1) / BS);
    a.kv = mem(block * blocks);
    for (size_t i = 0; i < block * blocks; i++)
        a.kv[i] = i % 2 ? (uint8_t)(0x30 + i / 2 % 8) : (uint8_t)(i * 37);
    a.blk = mem(blocks * sizeof *a.blk);
    for (size_t b = 0; b < blocks; b++)
        a.blk[b] = a.kv + b * BS * HD * a.es * KVH;
    size_t qn = (size_t)rows * KVH * GROUP * HD;
    a.q = mem(qn * 4);
    a.out = mem(qn * 4);
    for (size_t i = 0; i < qn; i++)
        a.q[i] = (float)(i * 13 % 31) / 31.0f - 0.5f;
    a.parts = mem((size_t)a.segs * KVH * LAYERS * GROUP * (2 + HD) * 4);
    for (int i = 0; i < n_threads; i++)
        a.scratch[i] = mem(k->attn_scratch(HD, GROUP, KVH));
    a.row_task = 64;
    double s = rows > 1 ? best(run_prefill, &a, rows / a.row_task * KVH) : best(run_decode, &a, a.segs * LAYERS);
    if (rows > 1) {
        double keys = (double)rows * (depth - rows) + (double)rows * (rows + 1) / 2, g = 4.0 * HD * KVH * GROUP * keys / s * 1e-9;
        printf("%-38s %d thread%s %8.1f G/s   %5.1f %% of the fma peak\n", name, n_threads, n_threads > 1 ? "s" : " ", g, 100 * g / roof_fma);
    } else {
        double g = (double)(block * blocks) / s * 1e-9;
        printf("%-38s %d thread%s %8.1f GB/s  %5.1f %% of reading memory\n", name, n_threads, n_threads > 1 ? "s" : " ", g, 100 * g / roof_read);
    }
    fflush(stdout);
    for (int i = 0; i < n_threads; i++)
        pd_free(a.scratch[i]);
    pd_free(a.kv); pd_free(a.blk); pd_free(a.q); pd_free(a.out); pd_free(a.parts);
}

int main(int argc, char **argv)
{
    const char *force = NULL, *why;
    int c;
    while ((c = getopt(argc, argv, "t:k:")) != -1) {
        if (c == 't')
            n_threads = atoi(optarg);
        else if (c == 'k')
            force = optarg;
        else
            return 2;
    }
    words = argv + optind;
    n_words = argc - optind;
    struct pd_err e;
    if (!(k = pd_kernels_cpu(force, &why))) {
        fprintf(stderr, "bench_kernels: %s\n", why);
        return 2;
    }
    if (n_threads > 64 || pd_threads_new(n_threads, &pool, &e)) {
        fprintf(stderr, "bench_kernels: bad number of threads %d\n", n_threads);
        return 2;
    }
    big = mem(big_bytes);
    memset(big, 1, big_bytes);
    double *roofs[] = { &roof_int, &roof_bf16, &roof_fma };
    for (int i = 0; i < 3; i++) {
        enum pd_pack pack = (enum pd_pack[]){ PD_PK_U8, PD_PK_BF16, PD_PK_F32 }[i];
        double s = best(run_peak, &pack, n_threads);
        *roofs[i] = peak_ops * n_threads / s * 1e-9;
    }
    roof_read = (double)big_bytes / best(read_mem, NULL, 16) * 1e-9;
    printf("%s, %d threads: int8 dot %.0f GOP/s, bf16 dot %.0f GFLOP/s, fma %.0f GFLOP/s, read %.1f GB/s\n", k->name, n_threads, roof_int, roof_bf16, roof_fma, roof_read);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        prod_line(&kinds[i], 512, 1536, 576);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        prod_line(&kinds[i], 512, 576, 1536);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        prod_line(&kinds[i], 1, kinds[i].pack == PD_PK_U4 ? 256 << 10 : 96 << 10, 576);
    for (int m = 2; m <= 16; m = m < 4 ? m + 1 : m * 2)
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
            prod_line(&kinds[i], m, kinds[i].pack == PD_PK_U4 ? 256 << 10 : 96 << 10, 576);
    static const enum pd_dtype kv[] = { PD_F16, PD_BF16, PD_F32 };
    for (int i = 0; i < 3; i++)
        attn_line(kv[i], 4096, 512);
    attn_line(PD_F16, 512, 512);
    for (int i = 0; i < 3; i++)
        attn_line(kv[i], 4096, 1);
    attn_line(PD_F16, 256, 1);
    pd_threads_free(pool);
    pd_free(big);
    return 0;
}
