/* bench_kv PART [ARG...]: the figures of the KV plane that one process can take; scripts/bench-kv gives them goals. A line a figure: name, value, unit, n.
 *   codec NAME STREAM   coding and decoding of the chunks in a recorded stream of KV, one core
 *   convert             blocks of one layer into other forms, against memcpy of the same bytes
 *   sum                 checksums of chunks over a pool's blocks, against XXH3 over the same memory in one piece
 *   descriptor          the address part of 32 layers x 8,192 contiguous blocks: bytes, and time to make, encode, decode and resolve
 *   inline              a hand-over over a pipe against cat of the same bytes */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/uio.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/engine/measure.h"
#include "../../libcommon/kv/codec.h"
#include "../../libcommon/kv/convert.h"
#include "../../libcommon/kv/handover.h"
#include "../../libcommon/wire/stream.h"

enum { REPS = 7 };
static struct pd_err e;

static void must(int rc)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "bench_kv: %s\n", e.msg);
    exit(1);
}

static void *mem(size_t n)
{
    void *p = pd_alloc_aligned(n, "bench", &e);
    must(p ? 0 : PD_ENOMEM);
    memset(p, 0x3c, n);         /* touched, and finite numbers */
    return p;
}

static void row(const char *part, const char *name, double value, const char *unit, int n) { printf("%s%s %.6g %s %d\n", part, name, value, unit, n); }
static double speed(uint64_t bytes, int64_t us) { return (double)bytes / (double)(us > 0 ? us : 1) / 1e3; }

struct piece { uint8_t *p; size_t n; };

/* The payload of every chunk of the stream. */
static struct piece *chunks(const char *path, size_t *n)
{
    struct pd_rstream *s = NULL;
    struct piece *v = NULL;
    struct pd_rec rec;
    bool bad;
    int fd = open(path, O_RDONLY | O_CLOEXEC), rc;
    must(fd < 0 ? pd_fail_sys(&e, "%s", path) : 0);
    must(pd_rstream_new(fd, &(struct pd_rstream_opts){ .own_fd = true, .name = path }, &s, &e));
    for (*n = 0; (rc = pd_rstream_next(s, -1, &rec, &bad, &e)) == 1; ) {
        struct pd_chunk c;
        if (rec.kind != PD_K_CHUNK)
            continue;
        must(pd_chunk_decode(rec.p, rec.n, &c, &e));
        must(strcmp(c.codec, "none") ? pd_fail(&e, PD_EUSAGE, "%s: its chunks are coded already", path) : 0);
        v = pd_realloc(v, *n + 1, sizeof *v, "chunks", &e);
        must(v ? 0 : PD_ENOMEM);
        v[*n] = (struct piece){ mem(c.raw_len), c.raw_len };
        memcpy(v[(*n)++].p, c.data.p, c.raw_len);
    }
    must(rc);
    must(*n ? 0 : pd_fail(&e, PD_EUSAGE, "%s: no chunks", path));
    pd_rstream_free(s);
    return v;
}

static void codec(const char *name, const char *path)
{
    size_t n, most = 0;
    struct piece *v = chunks(path, &n);
    double enc[REPS], dec[REPS], cpy[REPS];
    uint64_t raw = 0, packed = 0;
    struct pd_codec *c = NULL, *d = NULL;
    char part[64];
    must(pd_codec_new(&c, &e));
    must(pd_codec_new(&d, &e));
    for (size_t i = 0; i < n; i++) {
        raw += v[i].n;
        most = v[i].n > most ? v[i].n : most;
    }
    uint8_t *to = mem(most);
    for (int r = -1; r < REPS; r++) {
        int64_t te = 0, td = 0, tc = 0;
        packed = 0;
        for (size_t i = 0; i < n; i++) {
            const uint8_t *out, *back;
            size_t m;
            int64_t t0 = pd_mono_us();
            must(pd_codec_encode(c, &(struct iovec){ v[i].p, v[i].n }, 1, v[i].n, &out, &m, &e));
            int64_t t1 = pd_mono_us();
            te += t1 - t0;
            packed += m ? m : v[i].n;
            if (m) {
                must(pd_codec_decode(d, out, m, v[i].n, &back, &e));
                td += pd_mono_us() - t1;
                must(memcmp(back, v[i].p, v[i].n) ? pd_fail(&e, PD_ECORRUPT, "chunk %zu did not come back", i) : 0);
            }
            t0 = pd_mono_us();
            memcpy(to, v[i].p, v[i].n);
            tc += pd_mono_us() - t0;
        }
        if (r >= 0) {
            enc[r] = speed(raw, te);
            dec[r] = speed(raw, td);
            cpy[r] = speed(raw, tc);
        }
    }
    snprintf(part, sizeof part, "codec.%s.", name);
    row(part, "ratio", (double)raw / (double)packed, "of 1", (int)n);
    row(part, "encode", pd_median(enc, REPS), "GB/s", REPS);
    row(part, "decode", pd_median(dec, REPS), "GB/s", REPS);
    row(part, "memcpy", pd_median(cpy, REPS), "GB/s", REPS);
}

static uint8_t **table(const struct pd_kv_form *f, uint32_t tokens, uint32_t *n)
{
    size_t bytes;
    must(pd_form_bytes(f, &bytes, &e));
    *n = (tokens + f->block_size - 1) / f->block_size;
    uint8_t *m = mem(bytes * *n), **t = pd_calloc(*n, sizeof *t, "bench", &e);
    must(t ? 0 : PD_ENOMEM);
    for (uint32_t i = 0; i < *n; i++)
        t[i] = m + i * bytes;
    return t;
}

/* Once through 128 MiB of tokens, and memcpy of as much, turn about. */
static void convert_one(const char *name, struct pd_kv_form a, struct pd_kv_form b)
{
    const struct pd_kernels *k = pd_kv_kernels();
    uint32_t heads = a.heads < b.heads ? a.heads : b.heads, row_bytes = heads * a.head_dim * (uint32_t)a.el, tokens = (128u << 20) / row_bytes, na, nb;
    uint8_t **from = table(&a, tokens, &na), **to = table(&b, tokens, &nb), *src = mem((size_t)tokens * row_bytes), *dst = mem((size_t)tokens * row_bytes);
    double ours[REPS], share[REPS];
    for (int r = -1; r < REPS; r++) {
        int64_t t0 = pd_mono_us();
        must(pd_convert(k, &(struct pd_kv_view){ b, to, nb, 0, 0 }, &(struct pd_kv_view){ a, from, na, 0, 0 }, tokens, heads, &e));
        int64_t t1 = pd_mono_us();
        memcpy(dst, src, (size_t)tokens * row_bytes);
        int64_t t2 = pd_mono_us();
        if (r >= 0) {
            ours[r] = speed((uint64_t)tokens * row_bytes, t1 - t0);
            share[r] = (double)(t2 - t1) / (double)(t1 - t0);
        }
    }
    char part[64];
    snprintf(part, sizeof part, "convert.%s", name);
    row(part, "", pd_median(ours, REPS), "GB/s", REPS);
    row(part, ".of_memcpy", pd_median(share, REPS), "of 1", REPS);
    pd_free(from[0]);
    pd_free(from);
    pd_free(to[0]);
    pd_free(to);
    pd_free(src);
    pd_free(dst);
}

static void convert(void)
{
    const struct pd_kv_form small = { 16, 3, 64, 2, false }, big = { 16, 8, 128, 2, false };    /* SmolLM2-135M; Llama 3 8B */
    struct pd_kv_form f = small;
    f.block_size = 32;
    convert_one("16_32", small, f);
    convert_one("32_16", f, small);
    f = big;
    f.block_size = 64;
    convert_one("8x128.16_64", big, f);
    f = small;
    f.nhd = true;
    convert_one("hnd_nhd", small, f);
    convert_one("nhd_hnd", f, small);
    f = big;
    f.heads = 4;
    convert_one("8x128.tp2", big, f);
    f.nhd = true;
    convert_one("8x128.tp2_nhd", big, f);
}

/* A run in a pool of this shape, blocks neighbours; their memory is there after hold_memory. */
struct held { struct pd_pool *pool; struct pd_kvdesc d; struct pd_plan plan; uint32_t *blocks; };

static void hold(struct held *h, const struct pd_pool_geom *g, uint32_t n_blocks)
{
    *h = (struct held){ .pool = NULL };
    size_t block = (size_t)2 * (size_t)g->layers * (size_t)g->kv_heads * (size_t)g->head_dim * (size_t)g->block_size * 2;
    must(pd_pool_new(g, (int64_t)(block * n_blocks + (128 << 20)), &h->pool, &e));
    h->d.n_tokens = n_blocks * (uint32_t)g->block_size;
    int32_t *ids = pd_calloc(h->d.n_tokens, sizeof *ids, "bench", &e);
    h->blocks = pd_calloc(n_blocks, sizeof *h->blocks, "bench", &e);
    must(ids && h->blocks ? 0 : PD_ENOMEM);
    h->d.token_ids = ids;
    pd_layout_from_pool(h->pool, &h->d.layout);
    must(pd_run_new(h->d.run, &e));
    must(pd_gen_new(h->d.gen, &e));
    must(pd_plan_make(&h->d.layout, h->d.n_tokens, 0, &h->plan, &e));
    for (uint32_t i = 0; i < n_blocks; i++)
        h->blocks[i] = i;
}

static void hold_memory(struct held *h) { must(pd_pool_take(h->pool, h->plan.n_blocks, h->blocks, &e)); }

static void sum(void)
{
    const struct pd_pool_geom g = { .layers = 30, .kv_heads = 3, .head_dim = 64, .block_size = 16, .dtype = PD_F16 };
    struct held h;
    double ours[REPS], alone[REPS], share[REPS];
    hold(&h, &g, 512);
    hold_memory(&h);
    struct iovec *iov = pd_calloc(2 * (size_t)h.plan.chunk_blocks, sizeof *iov, "bench", &e);
    uint8_t *flat = mem(h.plan.bytes);
    volatile uint64_t sink = 0;
    must(iov ? 0 : PD_ENOMEM);
    for (int r = -1; r < REPS; r++) {
        struct pd_chunk c;
        int n;
        int64_t t0 = pd_mono_us();
        for (uint32_t i = 0; i < h.plan.n_chunks; i++) {
            must(pd_export_chunk(h.pool, h.blocks, &h.plan, &h.d, i, &c, iov, &n, &e));
            sink += c.xxh3;
        }
        int64_t t1 = pd_mono_us();
        for (uint64_t at = 0; at < h.plan.bytes; at += h.plan.chunk_bytes)
            sink += pd_xxh3(flat + at, (size_t)(h.plan.bytes - at < h.plan.chunk_bytes ? h.plan.bytes - at : h.plan.chunk_bytes), at);
        int64_t t2 = pd_mono_us();
        if (r >= 0) {
            ours[r] = speed(h.plan.bytes, t1 - t0);
            alone[r] = speed(h.plan.bytes, t2 - t1);
            share[r] = (double)(t2 - t1) / (double)(t1 - t0);
        }
    }
    row("sum.", "chunks", pd_median(ours, REPS), "GB/s", REPS);
    row("sum.", "xxh3", pd_median(alone, REPS), "GB/s", REPS);
    row("sum.", "of_xxh3", pd_median(share, REPS), "of 1", REPS);
    pd_pool_free(h.pool);
}

/* As the shm transport does it: runs, offer, and at the other end the offer and its blocks. Of Llama 3 8B: 2 MiB a block. 16 GiB lie nowhere: nothing here
 * reads them. */
static void descriptor(void)
{
    const struct pd_pool_geom g = { .layers = 32, .kv_heads = 8, .head_dim = 128, .block_size = 16, .dtype = PD_F16 };
    enum { BLOCKS = 8192 };
    struct held h;
    double give[REPS], take[REPS];
    struct pd_slab_shape shape;
    struct pd_slabs *slabs = NULL;
    size_t with = 0, without = 0;
    hold(&h, &g, BLOCKS);
    static const uint8_t fp[] = { 0x81, 0xa1, 'x', 1 };
    h.d.fp_fields = (struct pd_bin){ fp, sizeof fp };
    must(pd_sha256(fp, sizeof fp, h.d.fp_sha, &e));
    must(pd_request_resolve(&h.d.request, 1, &e));
    memcpy(h.d.request.run, h.d.run, sizeof h.d.run);
    h.d.offer = true;
    h.d.payload = (struct pd_payload){ .scheme = "shm", .bytes = h.plan.bytes, .chunk_bytes = h.plan.chunk_bytes, .n_chunks = h.plan.n_chunks,
                                       .chunk_blocks = h.plan.chunk_blocks, .codec = "none" };
    pd_slab_shape_of(h.pool, &shape);
    must(pd_slabs_new(&shape, &slabs, &e));
    struct pd_payload_run *runs = pd_calloc(BLOCKS, sizeof *runs, "bench", &e);
    uint32_t *theirs = pd_calloc(BLOCKS, sizeof *theirs, "bench", &e);
    must(runs && theirs ? 0 : PD_ENOMEM);
    for (int r = -1; r < REPS; r++) {
        struct pd_buf b = { 0 };
        struct pd_arena a = { 0 };
        struct pd_kvdesc got;
        int64_t t0 = pd_mono_us();
        h.d.payload.runs = runs;
        h.d.payload.n_runs = pd_slab_runs(h.pool, h.blocks, BLOCKS, runs);
        must(pd_kvdesc_encode(&h.d, &b, &e));
        int64_t t1 = pd_mono_us();
        must(pd_kvdesc_decode(b.p, b.n, &a, &got, &e));
        must(pd_slabs_blocks(slabs, got.payload.runs, got.payload.n_runs, BLOCKS, theirs, &e));
        int64_t t2 = pd_mono_us();
        must(memcmp(theirs, h.blocks, BLOCKS * sizeof *theirs) ? pd_fail(&e, PD_ECORRUPT, "other blocks came out") : 0);
        with = b.n;
        b.n = 0;
        h.d.payload.runs = NULL;
        h.d.payload.n_runs = 0;
        must(pd_kvdesc_encode(&h.d, &b, &e));
        without = b.n;
        if (r >= 0) {
            give[r] = (double)(t1 - t0) / 1e3;
            take[r] = (double)(t2 - t1) / 1e3;
        }
        pd_buf_free(&b);
        pd_arena_free(&a);
    }
    row("descriptor.", "address_bytes", (double)(with - without), "bytes", 1);
    row("descriptor.", "give_ms", pd_median(give, REPS), "ms", REPS);
    row("descriptor.", "take_ms", pd_median(take, REPS), "ms", REPS);
    pd_slabs_free(slabs);
    pd_pool_free(h.pool);
}

static int handover_row(void *ctx, const struct pd_row *r, struct pd_err *err)
{
    (void)err;
    row(ctx, r->name, r->value, r->unit, r->n);
    return 0;
}

int main(int argc, char **argv)
{
    const char *part = argc > 1 ? argv[1] : "";
    const struct pd_pool_geom g = { .layers = 30, .kv_heads = 3, .head_dim = 64, .block_size = 16, .dtype = PD_F16 };
    if (!strcmp(part, "codec") && argc == 4)
        codec(argv[2], argv[3]);
    else if (!strcmp(part, "convert"))
        convert();
    else if (!strcmp(part, "sum"))
        sum();
    else if (!strcmp(part, "descriptor"))
        descriptor();
    else if (!strcmp(part, "inline"))
        must(pd_measure_handover(&g, 256 << 20, REPS, handover_row, (void *)(uintptr_t)"inline.", &e));
    else
        return fprintf(stderr, "usage: bench_kv codec NAME STREAM | convert | sum | descriptor | inline\n"), 2;
    return fflush(stdout) ? 1 : 0;
}
