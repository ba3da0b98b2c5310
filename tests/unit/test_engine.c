/* The engine against Hugging Face's logits, and against itself: the same bits whatever the chunk, the batch, the threads, the instruction set, the way in. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../libcommon/engine/batch.h"
#include "../../libcommon/engine/runtime.h"
#include "../../libcommon/kv/handover.h"
#include "../../libcommon/wire/value.h"
#include "files.h"

#define TINY "testdata/tiny/"
static const char *const models[] = { "llama-f32", "llama-f16", "llama-bf16", "llama-q8_0", "llama-q4_0", "llama-q4_1", "llama-q5_0", "llama-q5_1",
                                      "llama-q4_k", "llama-q5_k", "llama-q6_k", "llama-mixed", "llama-linear", "llama-llama3", "llama-untied", "llama-spm" };

static void must(int rc, const struct pd_err *e)
{
    if (rc < 0)
        fail_msg("%s", e->msg);
}

static bool caching;
static enum pd_evict evict;
static struct pd_runtime open_model(const char *name, int threads, const char *cpu, const char *kv_dtype, int64_t kv_mem, int block_size)
{
    struct pd_runtime rt;
    struct pd_err e;
    char path[256];
    snprintf(path, sizeof path, name[0] == '/' ? "%s" : TINY "%s.gguf", name);
    if (cpu)
        setenv("PD_CPU", cpu, 1);
    else
        unsetenv("PD_CPU");
    struct pd_runtime_opts o = { .prefix_cache = caching, .evict = evict, .model = path, .role = "test", .threads = threads, .kv_dtype = kv_dtype, .kv_mem = kv_mem ? kv_mem : name[0] == '/' ? 64 << 20 : 4 << 20, .block_size = block_size };
    must(pd_runtime_open(&o, &rt, &e), &e);
    return rt;
}

static void *read_file(const char *name, const char *ext, size_t *n)
{
    char path[256];
    snprintf(path, sizeof path, TINY "%s.%s", name, ext);
    return read_whole(path, n);
}

/* Logits of every position, in steps of `chunk`. */
static float *all_logits(struct pd_runtime *rt, const int32_t *tokens, uint32_t n, uint32_t chunk)
{
    struct pd_err e;
    struct pd_fwd *f;
    uint32_t bs = (uint32_t)pd_pool_geom(rt->pool)->block_size, nb = (n + bs - 1) / bs, blocks[512];
    uint8_t *base[512];
    size_t V = (size_t)rt->model->cfg.n_vocab;
    float *out = malloc(n * V * sizeof *out), *l;
    must(pd_pool_take(rt->pool, nb, blocks, &e), &e);
    for (uint32_t i = 0; i < nb; i++)
        base[i] = pd_pool_base(rt->pool, blocks[i]);
    must(pd_fwd_new(rt->model, rt->threads, rt->k, rt->pool, chunk, chunk, &f, &e), &e);
    for (uint32_t at = 0; at < n; at += chunk) {
        struct pd_span s = { .tokens = tokens + at, .n = n - at < chunk ? n - at : chunk, .pos0 = at, .blk = base, .want_logits = 2 };
        must(pd_forward(f, &s, 1, NULL, NULL, &l, &e), &e);
        memcpy(out + at * V, l, s.n * V * sizeof *out);
    }
    pd_fwd_free(f);
    for (uint32_t i = 0; i < nb; i++)
        pd_pool_put(rt->pool, blocks[i]);
    return out;
}

static void test_golden(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        size_t nt, nl;
        int32_t *tokens = read_file(models[i], "tokens.bin", &nt);
        float *want = read_file(models[i], "logits.bin", &nl);
        struct pd_runtime rt = open_model(models[i], 2, NULL, "f32", 0, 0);
        uint32_t n = (uint32_t)(nt / 4);
        size_t total = n * (size_t)rt.model->cfg.n_vocab;
        assert_int_equal(nl, total * 4);
        float *got = all_logits(&rt, tokens, n, 64);
        double worst = 0, err2 = 0, ref2 = 0;
        for (size_t k = 0; k < total; k++) {
            double d = fabs((double)got[k] - want[k]);
            worst = d > worst ? d : worst;
            err2 += d * d;
            ref2 += (double)want[k] * want[k];
        }
        double rel = sqrt(err2 / ref2);
        print_message("# %s: max abs error %.2e, relative rms %.2e\n", models[i], worst, rel);
        if (rt.model->numerics == PD_PK_F32 || rt.model->numerics == PD_PK_F16)
            assert_true(worst <= 1e-4);
        else        /* activations are rounded to 8 bits (bf16: 8 bits of mantissa) on the way */
            assert_true(rel <= 0.06);
        free(got);
        free(want);
        free(tokens);
        pd_runtime_close(&rt);
    }
}

static void fill_tokens(int32_t *t, uint32_t n, int vocab, uint32_t seed)
{
    uint64_t x = seed * 2654435761u + 1;
    for (uint32_t i = 0; i < n; i++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        t[i] = (int32_t)((x >> 33) % (uint64_t)vocab);
    }
}

/* Bits of the logits over chunks, threads, block sizes and, for integer dots, instruction sets. 300 positions cross an attention segment. */
static void test_same_bits(void **state)
{
    (void)state;
    static const struct { int threads; const char *cpu; uint32_t chunk; int block_size; } v[] = {
        { 1, NULL, 512, 16 }, { 2, NULL, 512, 16 }, { 2, NULL, 64, 16 }, { 2, NULL, 7, 16 }, { 1, NULL, 1, 16 }, { 2, NULL, 1, 16 }, { 2, NULL, 512, 32 },
        { 2, "scalar", 512, 16 }, { 1, "scalar", 7, 16 }, { 2, "avx2", 512, 16 }, { 2, "avx2", 1, 16 }, { 2, "avx512", 512, 16 },
        { 2, "avx512", 1, 16 },
    };
    enum { N = 300 };
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        float *ref = NULL;
        int32_t tokens[N];
        const char *cls = NULL;
        for (size_t k = 0; k < sizeof v / sizeof *v; k++) {
            const char *why;
            if (v[k].cpu && !pd_kernels_cpu(v[k].cpu, &why))
                continue;       /* this CPU has no such path */
            struct pd_runtime rt = open_model(models[i], v[k].threads, v[k].cpu, NULL, 0, v[k].block_size);
            fill_tokens(tokens, N, rt.model->cfg.n_vocab, 7);
            uint32_t n = (uint32_t)rt.model->cfg.n_ctx < N ? (uint32_t)rt.model->cfg.n_ctx : N;
            size_t bytes = n * (size_t)rt.model->cfg.n_vocab * 4;
            float *got = all_logits(&rt, tokens, n, v[k].chunk);
            if (!ref) {
                ref = got;
                cls = rt.numerics;
            } else {
                if (!strcmp(cls, rt.numerics) && memcmp(ref, got, bytes))
                    fail_msg("%s: logits differ with %d threads, cpu %s, chunk %u, block size %d", models[i], v[k].threads, v[k].cpu ? v[k].cpu : "best", v[k].chunk, v[k].block_size);
                if (rt.model->numerics >= PD_PK_U8)
                    assert_string_equal(cls, rt.numerics);
                free(got);
            }
            pd_runtime_close(&rt);
        }
        free(ref);
    }
    unsetenv("PD_CPU");
}

/* --- runs through the batch ------------------------------------------------------------------------------------------------------------------------ */

#define MAX_GEN 40
struct out { int32_t tokens[4][MAX_GEN]; float lp[4][MAX_GEN]; uint32_t n[4]; char reason[4][12]; struct pd_run *run; uint32_t cached, nth_start, nth_end, preempted; char why[200]; };

static struct out *out_of(struct pd_seq *s) { return s->run->user; }
static struct pd_batch *the_batch;
static uint32_t n_started, n_ended;
static bool keep_runs;

static bool on_token(void *ctx, struct pd_seq *s, uint32_t pos, const struct pd_sampled *t)
{
    (void)ctx;
    struct out *o = out_of(s);
    assert_true(pos < MAX_GEN);
    assert_int_equal(pos, o->n[s->choice]);     /* no gap, no repeat */
    o->tokens[s->choice][pos] = t->token;
    o->lp[s->choice][pos] = t->logprob;
    o->n[s->choice]++;
    return false;
}

static void on_finished(void *ctx, struct pd_seq *s, const char *reason, const struct pd_err *e)
{
    (void)ctx;
    struct out *o = out_of(s);
    snprintf(o->reason[s->choice], sizeof o->reason[0], "%s", reason);
    if (e)
        print_message("# %s\n", e->msg);
    o->run = s->run;
    o->cached = s->run->n_cached;
    o->preempted = s->run->preempted;
    o->nth_end = ++n_ended;
    if (e)
        snprintf(o->why, sizeof o->why, "%d %.180s", e->code, e->msg);
    if (!s->run->n_open && !keep_runs)
        pd_run_drop(the_batch, s->run);
}

static void on_started(void *ctx, struct pd_run *r) { (void)ctx; ((struct out *)r->user)->nth_start = ++n_started; }
static void on_layer(void *ctx, struct pd_run *r, int layer, uint32_t n) { (void)ctx; (void)r; (void)layer; (void)n; }

/* Of the tests of steps that are given up: who is not wanted any more from a run's first layer on, and how long that layer takes. */
static const struct out *disliked;
static uint32_t n_layers_seen;
static useconds_t layer_us;
static void on_seen_layer(void *ctx, struct pd_run *r, int layer, uint32_t n)
{
    on_layer(ctx, r, layer, n);
    n_layers_seen++;
    disliked = r->user;
    usleep(layer_us);
}
static bool is_disliked(void *ctx, struct pd_run *r) { (void)ctx; return r->user == disliked; }

static int64_t priority_us;
static struct pd_batch *new_batch(struct pd_runtime *rt, uint32_t chunk, uint32_t max_seqs)
{
    struct pd_err e;
    struct pd_batch_opts o = { .chunk = chunk, .max_seqs = max_seqs, .prefix = rt->prefix, .priority_us = priority_us, .timeouts = priority_us > 0 };
    struct pd_batch_cb cb = { .layer_done = on_layer, .token = on_token, .finished = on_finished, .started = on_started };
    must(pd_batch_new(rt->model, rt->threads, rt->k, rt->pool, &o, &cb, &the_batch, &e), &e);
    return the_batch;
}

static void drain(struct pd_batch *b)
{
    struct pd_err e;
    for (int i = 0; pd_batch_busy(b); i++) {
        assert_true(i < 100000);
        must(pd_batch_step(b, &e), &e);
    }
}

static struct pd_request sampling(int i)
{
    struct pd_request r = { .n = 1, .max_tokens = 24, .top_p = 1, .repetition_penalty = 1, .logprobs = 1, .ignore_eos = true };
    switch (i % 6) {
    case 1: r.temperature = 1; break;
    case 2: r.temperature = 0.8f; r.top_p = 0.9f; break;
    case 3: r.temperature = 1.2f; r.top_k = 20; r.frequency_penalty = 0.5f; break;
    case 4: r.temperature = 0.7f; r.min_p = 0.05f; r.repetition_penalty = 1.1f; break;
    case 5: r.temperature = 1; r.top_k = 50; r.top_p = 0.95f; r.presence_penalty = 0.3f; r.n = 3; break;
    }
    r.seed = 100 + i;
    return r;
}

#define RUNS 12
static int32_t prompts[RUNS][128];
static uint32_t prompt_n[RUNS];

static void make_prompts(const struct pd_runtime *rt)
{
    for (int i = 0; i < RUNS; i++) {
        prompt_n[i] = (uint32_t)(1 + (i * 37) % 90);
        fill_tokens(prompts[i], prompt_n[i], rt->model->cfg.n_vocab, (uint32_t)i + 50);
    }
}

static void assert_same(const struct out *a, const struct out *b, int run, const char *what)
{
    for (int c = 0; c < 4; c++)
        if (a->n[c] != b->n[c] || memcmp(a->tokens[c], b->tokens[c], a->n[c] * 4) || memcmp(a->lp[c], b->lp[c], a->n[c] * 4) || strcmp(a->reason[c], b->reason[c]))
            fail_msg("run %d choice %d differs: %s (%u tokens %s, %u tokens %s)", run, c, what, a->n[c], a->reason[c], b->n[c], b->reason[c]);
}

/* Every run alone, chunk 512: what all else must equal. */
static void reference(struct pd_runtime *rt, struct out *ref)
{
    struct pd_err e;
    struct pd_run *run;
    memset(ref, 0, RUNS * sizeof *ref);
    struct pd_batch *b = new_batch(rt, 512, 8);
    for (int i = 0; i < RUNS; i++) {
        struct pd_request r = sampling(i);
        struct pd_job j = { .req = &r, .prompt = prompts[i], .n_prompt = prompt_n[i], .user = &ref[i] };
        must(pd_batch_submit(b, &j, &run, &e), &e);
        drain(b);
        assert_int_equal(ref[i].n[0], 24);
    }
    pd_batch_free(b);
    assert_int_equal(pd_pool_stats(rt->pool).used, 0);
}

static void test_batch(void **state)
{
    (void)state;
    static const struct { uint32_t chunk, seqs; int64_t mem; int threads; } v[] = { { 512, 64, 0, 2 }, { 7, 8, 0, 2 }, { 1, 3, 0, 1 }, { 64, 64, -1, 2 }, { 16, 4, -1, 1 } };
    static const char *const some[] = { "llama-f32", "llama-q4_1", "llama-bf16", "llama-mixed" };
    struct out ref[RUNS], got[RUNS];
    struct pd_err e;
    struct pd_run *run;
    for (size_t m = 0; m < sizeof some / sizeof *some; m++)
        for (size_t k = 0; k < sizeof v / sizeof *v; k++) {
            struct pd_runtime rt = open_model(some[m], v[k].threads, NULL, NULL, 0, 0);
            make_prompts(&rt);
            if (k == 0)
                reference(&rt, ref);
            if (v[k].mem < 0) { /* room for about 12 blocks: runs preempt each other */
                int64_t block = (int64_t)(2 * pd_pool_layer_bytes(rt.pool) * (size_t)rt.model->cfg.n_layers);
                pd_runtime_close(&rt);
                rt = open_model(some[m], v[k].threads, NULL, NULL, 12 * block, 0);
            }
            memset(got, 0, sizeof got);
            struct pd_batch *b = new_batch(&rt, v[k].chunk, v[k].seqs);
            struct pd_request r[RUNS];
            for (int i = 0; i < RUNS; i++) {
                r[i] = sampling(i);
                struct pd_job j = { .req = &r[i], .prompt = prompts[i], .n_prompt = prompt_n[i], .user = &got[i] };
                must(pd_batch_submit(b, &j, &run, &e), &e);
                if (i % 3 == 2)
                    must(pd_batch_step(b, &e), &e);     /* some come while others run */
            }
            drain(b);
            for (int i = 0; i < RUNS; i++)
                assert_same(&ref[i], &got[i], i, some[m]);
            if (v[k].mem < 0)
                assert_true(pd_batch_stats(b).preemptions > 0);
            pd_batch_free(b);
            assert_int_equal(pd_pool_stats(rt.pool).used, 0);
            pd_runtime_close(&rt);
        }
}

/* A step that nobody wants any more ends in the middle; one that somebody wants does not, and its bits are what they were. */
static void test_given_up(void **state)
{
    (void)state;
    static const struct pd_batch_cb cb = { .layer_done = on_seen_layer, .token = on_token, .finished = on_finished, .started = on_started, .unwanted = is_disliked };
    struct out ref[RUNS], giving = { 0 }, other = { 0 };
    struct pd_err e;
    struct pd_run *run, *late;
    struct pd_runtime rt = open_model("llama-q4_1", 2, NULL, NULL, 0, 0);
    const uint32_t layers = (uint32_t)rt.model->cfg.n_layers;
    int32_t prompt[40];
    assert_true(layers > 1);
    make_prompts(&rt);
    reference(&rt, ref);
    fill_tokens(prompt, 40, rt.model->cfg.n_vocab, 9);
    struct pd_batch *b = new_batch(&rt, 64, 8);
    struct pd_request plain = sampling(0), r = sampling(1), soon = sampling(0);
    const struct pd_job gives = { .req = &plain, .prompt = prompt, .n_prompt = 40, .user = &giving, .cb = &cb, .prefill_only = true };
    soon.has |= PD_RQ_DEADLINE;
    soon.deadline_ms = 2000;

    must(pd_batch_submit(b, &gives, &run, &e), &e);             /* alone */
    assert_int_equal(pd_batch_step(b, &e), 40);
    assert_int_equal(n_layers_seen, 1);
    assert_false(pd_batch_busy(b));
    assert_int_equal(giving.n[0], 0);
    assert_true(pd_pool_stats(rt.pool).used > 0);
    pd_run_drop(b, run);
    assert_int_equal(pd_pool_stats(rt.pool).used, 0);

    disliked = NULL;            /* beside one that is wanted */
    n_layers_seen = 0;
    const struct pd_job wanted = { .req = &r, .prompt = prompts[1], .n_prompt = prompt_n[1], .user = &other, .cb = &cb };
    must(pd_batch_submit(b, &gives, &run, &e), &e);
    must(pd_batch_submit(b, &wanted, &late, &e), &e);
    must(pd_batch_step(b, &e), &e);
    assert_int_equal(n_layers_seen, layers);
    assert_int_equal(giving.n[0], 1);           /* to its end, which drops it */
    drain(b);
    assert_same(&ref[1], &other, 1, "beside one that was given up");

    disliked = NULL;            /* beside one whose time ends meanwhile */
    n_layers_seen = 0;
    layer_us = 2100000;
    memset(&giving, 0, sizeof giving);
    memset(&other, 0, sizeof other);
    const struct pd_job ends = { .req = &soon, .prompt = prompts[1], .n_prompt = prompt_n[1], .user = &other, .cb = &cb };
    must(pd_batch_submit(b, &gives, &run, &e), &e);
    must(pd_batch_submit(b, &ends, &late, &e), &e);
    assert_true(pd_batch_step(b, &e) > 0);
    layer_us = 0;
    assert_int_equal(n_layers_seen, 1);
    assert_true(pd_batch_busy(b));
    must(pd_batch_step(b, &e), &e);
    assert_string_equal(other.reason[0], "error");
    assert_non_null(strstr(other.why, "the deadline of 2000 ms has passed"));
    assert_false(pd_batch_busy(b));
    pd_run_drop(b, run);
    pd_batch_free(b);
    assert_int_equal(pd_pool_stats(rt.pool).used, 0);
    pd_runtime_close(&rt);
}

/* Prefill in one pool, chunks through the hand-over, decode from another pool. */
static void test_import(void **state)
{
    (void)state;
    static const char *const some[] = { "llama-f32", "llama-q4_1", "llama-q8_0" };
    struct out ref[RUNS], got[RUNS];
    struct pd_err e;
    struct pd_run *run;
    for (size_t m = 0; m < sizeof some / sizeof *some; m++) {
        struct pd_runtime p = open_model(some[m], 2, NULL, NULL, 0, 0), d = open_model(some[m], 1, NULL, NULL, 0, 0);
        make_prompts(&p);
        reference(&d, ref);
        memset(got, 0, sizeof got);
        for (int i = 0; i < RUNS; i++) {
            struct pd_request r = sampling(i);
            struct out first = { 0 };
            struct pd_batch *pb = new_batch(&p, 16, 8);
            keep_runs = true;
            struct pd_job j = { .req = &r, .prompt = prompts[i], .n_prompt = prompt_n[i], .user = &first, .prefill_only = true };
            must(pd_batch_submit(pb, &j, &run, &e), &e);
            drain(pb);
            keep_runs = false;
            struct pd_first f[4] = { 0 };
            for (int c = 0; c < r.n; c++)
                f[c] = (struct pd_first){ .token = first.tokens[c][0], .logprob = first.lp[c][0] };
            struct pd_kvdesc desc = { .offer = true, .n_tokens = prompt_n[i], .token_ids = prompts[i] };
            struct pd_plan plan;
            memcpy(desc.fp_sha, p.fp.sha, sizeof desc.fp_sha);
            desc.fp_fields = (struct pd_bin){ p.fp.map.p, p.fp.map.n };
            must(pd_run_new(desc.run, &e), &e);
            must(pd_gen_new(desc.gen, &e), &e);
            pd_layout_from_pool(p.pool, &desc.layout);
            must(pd_plan_make(&desc.layout, desc.n_tokens, 1, &plan, &e), &e);
            strcpy(desc.payload.scheme, "inline");
            strcpy(desc.payload.codec, "none");
            desc.payload.bytes = plan.bytes;
            desc.payload.chunk_bytes = plan.chunk_bytes;
            desc.payload.n_chunks = plan.n_chunks;
            desc.payload.chunk_blocks = plan.chunk_blocks;
            struct pd_import *im;
            must(pd_import_begin(d.pool, &desc, &im, &e), &e);
            for (uint32_t c = plan.n_chunks; c-- > 0;) {        /* any order */
                struct pd_chunk ch;
                struct iovec iov[8];
                int n;
                must(pd_export_chunk(p.pool, pd_seq_blocks(&first.run->seq[0]), &plan, &desc, c, &ch, iov, &n, &e), &e);
                struct pd_buf data = { 0 };
                for (int k = 0; k < n; k++)
                    must(pd_buf_add(&data, iov[k].iov_base, iov[k].iov_len, &e), &e);
                ch.data = (struct pd_bin){ data.p, data.n };
                must(pd_import_chunk(im, &ch, &e), &e);
                pd_buf_free(&data);
            }
            desc.offer = false;
            must(pd_import_finish(im, &desc, &e), &e);
            pd_run_drop(pb, first.run);
            pd_batch_free(pb);
            uint32_t nb, *blocks = pd_import_take(im, &nb);
            pd_import_free(im);
            struct pd_batch *db = new_batch(&d, 512, 8);
            struct pd_job k = { .req = &r, .prompt = prompts[i], .n_prompt = prompt_n[i], .user = &got[i], .blocks = blocks, .n_blocks = nb, .first = f, .n_first = (uint32_t)r.n };
            must(pd_batch_submit(db, &k, &run, &e), &e);
            pd_free(blocks);
            drain(db);
            pd_batch_free(db);
            assert_same(&ref[i], &got[i], i, "imported KV");
        }
        assert_int_equal(pd_pool_stats(p.pool).used, 0);
        assert_int_equal(pd_pool_stats(d.pool).used, 0);
        pd_runtime_close(&p);
        pd_runtime_close(&d);
    }
}

/* --- with a prefix cache: the same bits, and less computed ---------------------------------------------------------------------------------------- */

/* Three families of prompts: one begins like the others of its family, for a number of tokens that is or is not one of whole blocks; some are alike. */
static void make_families(const struct pd_runtime *rt)
{
    static const uint32_t common[] = { 40, 33, 64 };
    for (int i = 0; i < RUNS; i++) {
        uint32_t shared = common[i % 3], own = (uint32_t)(i / 3 * 11);
        prompt_n[i] = shared + own;
        fill_tokens(prompts[i], shared, rt->model->cfg.n_vocab, (uint32_t)(i % 3) + 500);
        fill_tokens(prompts[i] + shared, own, rt->model->cfg.n_vocab, (uint32_t)(i % 6) + 900);
    }
}

static void blocks_add_up(const struct pd_runtime *rt)
{
    struct pd_pool_stats s = pd_pool_stats(rt->pool);
    assert_int_equal(s.free + s.cached + s.used, s.total);
}

static void test_cache(void **state)
{
    (void)state;
    static const struct { uint32_t chunk, seqs; int64_t blocks; enum pd_evict evict; } v[] = { { 512, 64, 0, PD_EVICT_LRU_TAIL }, { 7, 8, 0, PD_EVICT_LRU },
        { 1, 3, 24, PD_EVICT_LRU_TAIL }, { 64, 64, 13, PD_EVICT_LRU_TAIL }, { 16, 4, 13, PD_EVICT_LRU } };
    static const char *const some[] = { "llama-f32", "llama-q4_1", "llama-bf16", "llama-mixed", "llama-q8_0" };
    struct out ref[RUNS], got[RUNS];
    struct pd_err e;
    struct pd_run *run;
    for (size_t m = 0; m < sizeof some / sizeof *some; m++)
        for (size_t k = 0; k < sizeof v / sizeof *v; k++) {
            struct pd_runtime rt = open_model(some[m], 2, NULL, NULL, 0, 0);
            make_families(&rt);
            if (k == 0)
                reference(&rt, ref);
            int64_t block = (int64_t)(2 * pd_pool_layer_bytes(rt.pool) * (size_t)rt.model->cfg.n_layers);
            pd_runtime_close(&rt);
            caching = true;
            evict = v[k].evict;
            rt = open_model(some[m], 2, NULL, NULL, v[k].blocks * block, 0);
            caching = false;
            struct pd_batch *b = new_batch(&rt, v[k].chunk, v[k].seqs);
            uint32_t cached = 0, all = 0;
            for (uint32_t round = 0; round < 4; round++) {
                struct pd_request r[RUNS];
                memset(got, 0, sizeof got);
                for (int j = 0; j < RUNS; j++) {
                    int i = (j * 5 + (int)round) % RUNS;
                    r[i] = sampling(i);
                    struct pd_job job = { .req = &r[i], .prompt = prompts[i], .n_prompt = prompt_n[i], .user = &got[i] };
                    must(pd_batch_submit(b, &job, &run, &e), &e);
                    for (int s = 0; s < j % 4; s++) {
                        must(pd_batch_step(b, &e), &e);     /* some come while others run */
                        blocks_add_up(&rt);
                    }
                }
                drain(b);
                for (int i = 0; i < RUNS; i++) {
                    assert_same(&ref[i], &got[i], i, some[m]);
                    assert_true(got[i].cached % 16 == 0 && got[i].cached < prompt_n[i]);        /* the last token at least is computed */
                    if (round && !v[k].blocks)
                        assert_int_equal(got[i].cached, (prompt_n[i] - 1) / 16 * 16);
                    cached += round ? got[i].cached : 0;
                    all += round ? prompt_n[i] : 0;
                }
                assert_int_equal(pd_pool_stats(rt.pool).used, 0);
                blocks_add_up(&rt);
            }
            struct pd_prefix_stats ps = pd_prefix_stats(rt.prefix);
            print_message("# %s, chunk %u, %lld blocks: %u of %u prompt tokens were cached, %u preemptions, %u blocks evicted\n", some[m], v[k].chunk,
                          (long long)v[k].blocks, cached, all, (unsigned)pd_batch_stats(b).preemptions, (unsigned)ps.evicted);
            assert_true(cached > 0 && pd_batch_stats(b).cached_rows >= cached);
            assert_true(v[k].blocks ? ps.evicted > 0 : ps.evicted == 0);
            if (v[k].blocks == 13)
                assert_true(pd_batch_stats(b).preemptions > 0);
            pd_batch_free(b);
            assert_int_equal(pd_pool_stats(rt.pool).used, 0);
            pd_runtime_close(&rt);
        }
}

/* One tenant's blocks are not another's; what was computed for prefill alone, taken from elsewhere or decoded is found by who asks for its tokens. */
static void test_cache_divides(void **state)
{
    (void)state;
    struct pd_err e;
    struct pd_run *run;
    struct out ref = { 0 };
    caching = true;
    struct pd_runtime rt = open_model("llama-q4_1", 2, NULL, NULL, 0, 0);
    caching = false;
    make_families(&rt);
    struct pd_batch *b = new_batch(&rt, 32, 8);
    static const char *const salt[] = { NULL, "one", "two" };
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < 3; i++) {
            struct out got = { 0 };
            struct pd_request r = sampling(1);
            r.cache_salt = (struct pd_str){ salt[i], salt[i] ? 3 : 0 };
            struct pd_job j = { .req = &r, .prompt = prompts[2], .n_prompt = 64, .user = round + i ? &got : &ref };
            must(pd_batch_submit(b, &j, &run, &e), &e);
            drain(b);
            assert_int_equal(round + i ? got.cached : ref.cached, round ? 48 : 0);
            if (round + i)
                assert_same(&ref, &got, i, "another tenant");
        }
    /* the prompt and all that was generated but the last token: 64 + 23 tokens are 5 blocks */
    int32_t more[96];
    struct pd_request r = sampling(0);
    struct out got = { 0 };
    memcpy(more, prompts[2], 64 * 4);
    memcpy(more + 64, ref.tokens[0], 24 * 4);
    struct pd_job j = { .req = &r, .prompt = more, .n_prompt = 88, .user = &got };
    must(pd_batch_submit(b, &j, &run, &e), &e);
    drain(b);
    assert_int_equal(got.cached, 80);
    /* kept out: neither takes nor gives */
    struct out out[2] = { 0 };
    r = sampling(0);
    for (int i = 0; i < 2; i++) {
        j = (struct pd_job){ .req = &r, .prompt = prompts[1], .n_prompt = prompt_n[1], .user = &out[i], .keep_out = i == 0 };
        must(pd_batch_submit(b, &j, &run, &e), &e);
        drain(b);
        assert_int_equal(out[i].cached, 0);
    }
    assert_same(&out[0], &out[1], 0, "kept out");
    /* prefill alone, twice: the second one's blocks hold the same bytes as if it had computed them */
    uint8_t *copy = NULL;
    size_t len = pd_pool_layer_bytes(rt.pool);
    uint32_t layers = (uint32_t)rt.model->cfg.n_layers;
    keep_runs = true;
    for (int i = 0; i < 2; i++) {
        struct out first = { 0 };
        j = (struct pd_job){ .req = &r, .prompt = prompts[5], .n_prompt = prompt_n[5], .user = &first, .prefill_only = true };
        must(pd_batch_submit(b, &j, &run, &e), &e);
        drain(b);
        const uint32_t *blocks = pd_seq_blocks(&run->seq[0]);
        uint32_t n = pd_seq_n_blocks(&run->seq[0]);
        assert_int_equal(n, (prompt_n[5] + 15) / 16);
        assert_int_equal(first.cached, i ? (prompt_n[5] - 1) / 16 * 16 : 64);      /* its family's beginning */
        copy = copy ? copy : malloc(n * layers * 2 * len);
        for (uint32_t l = 0; l < layers * 2; l++)
            for (uint32_t k = 0; k < n; k++) {
                uint8_t *at = copy + (l * n + k) * len, *is = pd_pool_base(rt.pool, blocks[k]) + pd_pool_off(rt.pool, (int)l / 2, l % 2);
                if (i)
                    assert_memory_equal(at, is, len);
                memcpy(at, is, len);
            }
        pd_run_drop(b, run);
    }
    keep_runs = false;
    free(copy);
    pd_batch_free(b);
    assert_int_equal(pd_pool_stats(rt.pool).used, 0);
    pd_runtime_close(&rt);
}

/* --- priorities and times of stages --------------------------------------------------------------------------------------------------------------- */

static const struct { int32_t priority; uint32_t starts; } asked[] = { { 0, 4 }, { 7, 1 }, { -3, 6 }, { 2, 3 }, { 0, 5 }, { 3, 2 } };

static void test_priority(void **state)
{
    (void)state;
    enum { N = sizeof asked / sizeof *asked };
    struct out ref[RUNS], got[N];
    struct pd_request r[N];
    struct pd_run *run;
    struct pd_err e;
    struct pd_runtime rt = open_model("llama-q4_1", 2, NULL, NULL, 0, 0);
    make_families(&rt);
    reference(&rt, ref);
    for (int prefill = 0; prefill < 2; prefill++)
        for (int honoured = 0; honoured < 2; honoured++) {
            memset(got, 0, sizeof got);
            priority_us = honoured ? 3600000000 : 0;
            n_started = n_ended = 0;
            struct pd_batch *b = new_batch(&rt, 16, 8);
            for (int i = 0; i < N; i++) {
                r[i] = sampling(i);
                r[i].priority = asked[i].priority;
                r[i].has = asked[i].priority ? PD_RQ_PRIORITY : 0;
                struct pd_job j = { .req = &r[i], .prompt = prompts[i], .n_prompt = prompt_n[i], .user = &got[i], .prefill_only = prefill };
                must(pd_batch_submit(b, &j, &run, &e), &e);
            }
            drain(b);
            for (int i = 0; i < N; i++) {
                assert_int_equal(got[i].nth_start, honoured ? asked[i].starts : (uint32_t)i + 1);
                if (!prefill)
                    assert_same(&ref[i], &got[i], i, "with priorities");
            }
            pd_batch_free(b);
        }
    /* It comes while another's prompt is computed: that one waits. */
    priority_us = 3600000000;
    n_started = n_ended = 0;
    struct pd_batch *b = new_batch(&rt, 8, 8);
    struct out low = { 0 }, high = { 0 };
    r[0] = r[1] = sampling(0);
    r[1].priority = 1;
    r[1].has = PD_RQ_PRIORITY;
    struct pd_job j = { .req = &r[0], .prompt = prompts[2], .n_prompt = prompt_n[2], .user = &low, .prefill_only = true };
    must(pd_batch_submit(b, &j, &run, &e), &e);
    must(pd_batch_step(b, &e), &e);
    j = (struct pd_job){ .req = &r[1], .prompt = prompts[1], .n_prompt = prompt_n[1], .user = &high, .prefill_only = true };
    must(pd_batch_submit(b, &j, &run, &e), &e);
    drain(b);
    assert_true(low.nth_start == 1 && high.nth_start == 2 && high.nth_end == 1 && low.nth_end == 2);
    pd_batch_free(b);
    /* Age counts: who waits long enough goes before newer ones whatever they are. */
    priority_us = 1000;
    n_started = 0;
    b = new_batch(&rt, 8, 8);
    memset(&low, 0, sizeof low);
    memset(&high, 0, sizeof high);
    r[1].priority = INT32_MAX;  /* a hundred steps at the most */
    j = (struct pd_job){ .req = &r[0], .prompt = prompts[2], .n_prompt = prompt_n[2], .user = &low, .spent_us = 150000 };
    must(pd_batch_submit(b, &j, &run, &e), &e);
    j = (struct pd_job){ .req = &r[1], .prompt = prompts[1], .n_prompt = prompt_n[1], .user = &high };
    must(pd_batch_submit(b, &j, &run, &e), &e);
    drain(b);
    assert_true(low.nth_start == 1 && high.nth_start == 2);
    pd_batch_free(b);
    int64_t block = (int64_t)(2 * pd_pool_layer_bytes(rt.pool) * (size_t)rt.model->cfg.n_layers);
    pd_runtime_close(&rt);

    /* Want of blocks: the one of highest priority is never put back though it came last, and prefill-only runs that hold all do not stand in each other's way. */
    rt = open_model("llama-q4_1", 2, NULL, NULL, 12 * block, 0);
    priority_us = 3600000000;
    for (int prefill = 0; prefill < 2; prefill++) {
        b = new_batch(&rt, 16, 8);
        memset(got, 0, sizeof got);
        for (int i = 0; i < N; i++) {
            r[i] = sampling(i);
            r[i].priority = i;
            r[i].has = PD_RQ_PRIORITY;
            j = (struct pd_job){ .req = &r[i], .prompt = prompts[i], .n_prompt = prompt_n[i], .user = &got[i], .prefill_only = prefill };
            must(pd_batch_submit(b, &j, &run, &e), &e);
            must(pd_batch_step(b, &e), &e);
        }
        drain(b);
        for (int i = 0; i < N && !prefill; i++)
            assert_same(&ref[i], &got[i], i, "with priorities and few blocks");
        assert_true(prefill || (pd_batch_stats(b).preemptions > 0 && got[N - 1].preempted == 0));
        pd_batch_free(b);
    }
    priority_us = 0;
    pd_runtime_close(&rt);
}

static void test_timeouts(void **state)
{
    (void)state;
    static const struct { const char *map; uint32_t first_steps; const char *says; } t[] = {
        { "\x81\xa5queue\x01", 0, "-5 timed out in stage queue: 1 ms" }, { "\x81\xa7prefill\x01", 1, "-5 timed out in stage prefill: after 1 ms 16 of 64 tokens" },
        { "\x81\xab" "first_token\x01", 1, "-5 timed out in stage first_token: 1 ms" }, { "\x81\xab" "first_token\x01", 0, "-5 timed out in stage first_token: 1 ms" },
        { "\x83\xa5queue\xcd\x27\x10\xa7prefill\xcd\x27\x10\xab" "first_token\xcd\x27\x10", 1, NULL },    /* 10 s each */
        { "\x83\xa5queue\x01\xa7prefill\x01\xab" "first_token\x01", 4, NULL } };     /* past them all in time: they do not count any more */
    struct pd_runtime rt = open_model("llama-q4_1", 2, NULL, NULL, 0, 0);
    struct pd_err e;
    struct pd_run *run;
    make_families(&rt);
    for (int on = 0; on < 2; on++)
        for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
            struct out got = { 0 };
            struct pd_request r = sampling(0);
            priority_us = on;
            r.timeouts_ms = (struct pd_bin){ (const uint8_t *)t[i].map, 0 };
            r.timeouts_ms.n = pd_value_len(r.timeouts_ms.p, 64);
            struct pd_batch *b = new_batch(&rt, 16, 8);
            struct pd_job j = { .req = &r, .prompt = prompts[2], .n_prompt = 64, .user = &got };
            must(pd_batch_submit(b, &j, &run, &e), &e);
            const struct pd_timeouts due = run->timeouts;
            if (on) {           /* as if no time passed in the first steps: they are long where a sanitizer looks on */
                run->timeouts.queue += due.queue ? 3600000000 : 0;
                run->timeouts.prefill += due.prefill ? 3600000000 : 0;
                run->timeouts.first_token += due.first_token ? 3600000000 : 0;
            }
            for (uint32_t k = 0; k < t[i].first_steps; k++)
                must(pd_batch_step(b, &e), &e);
            if (on)
                run->timeouts = t[i].first_steps == 4 ? (struct pd_timeouts){ 1, 1, 0, 1 } : due;
            usleep(2000);
            drain(b);
            if (on && t[i].says && strncmp(got.why, t[i].says, strlen(t[i].says)))
                fail_msg("'%s', not '%s'", got.why, t[i].says);
            if (strcmp(got.reason[0], on && t[i].says ? "error" : "length"))
                fail_msg("case %zu: %s %s", i, got.reason[0], got.why);
            pd_batch_free(b);
            assert_int_equal(pd_pool_stats(rt.pool).used, 0);
        }
    priority_us = 0;
    pd_runtime_close(&rt);
}

/* A run taken up from the tokens it had made goes on with the same ones. */
static void resume_on(const char *model, int step, uint32_t cuts)
{
    struct out ref[RUNS];
    struct pd_err e;
    struct pd_run *run;
    struct pd_runtime rt = open_model(model, 2, NULL, NULL, 0, 0);
    make_prompts(&rt);
    reference(&rt, ref);
    for (int i = 0; i < RUNS; i += step) {
        struct pd_request r = sampling(i);
        if (r.n > 1)
            continue;
        for (uint32_t cut = 1; cut < 24; cut += cuts) {
            struct out got = { 0 };
            struct pd_batch *b = new_batch(&rt, 32, 8);
            struct pd_job j = { .req = &r, .prompt = prompts[i], .n_prompt = prompt_n[i], .user = &got, .resume = ref[i].tokens[0], .n_resume = cut };
            got.n[0] = cut;     /* positions go on */
            memcpy(got.tokens[0], ref[i].tokens[0], cut * 4);
            memcpy(got.lp[0], ref[i].lp[0], cut * 4);
            must(pd_batch_submit(b, &j, &run, &e), &e);
            drain(b);
            pd_batch_free(b);
            assert_same(&ref[i], &got, i, "resumed");
        }
    }
    pd_runtime_close(&rt);
}

static void test_resume(void **state)
{
    (void)state;
    resume_on("llama-q4_0", 1, 6);
    resume_on("llama-f32", 2, 11);
    resume_on("llama-bf16", 2, 11);
}

static void test_resume_real(void **state)
{
    (void)state;
    const char *model = getenv("PD_MODEL");
    if (!model || model[0] != '/') {
        print_message("# skip: no model\n");
        skip();
    }
    resume_on(model, 3, 13);
}

/* A run that fails before its choices were forked ends all of them, and gives everything back. */
static void test_failed_choices(void **state)
{
    (void)state;
    struct pd_err e;
    struct pd_run *run;
    struct pd_runtime rt = open_model("llama-q4_1", 1, NULL, NULL, 0, 0);
    make_prompts(&rt);
    struct pd_request r = sampling(5);
    for (int prefill_only = 0; prefill_only < 2; prefill_only++)
        for (uint32_t steps = 0; steps < 3; steps++) {      /* not begun, half the prompt, forked */
            struct out got = { 0 };
            struct pd_batch *b = new_batch(&rt, 40, 8);
            struct pd_job j = { .req = &r, .prompt = prompts[2], .n_prompt = prompt_n[2], .user = &got, .prefill_only = prefill_only };
            assert_in_range(prompt_n[2], 41, 80);
            must(pd_batch_submit(b, &j, &run, &e), &e);
            for (uint32_t i = 0; i < steps; i++)
                must(pd_batch_step(b, &e), &e);
            while (pd_batch_busy(b))
                pd_batch_fail_oldest(b);
            for (int c = 0; c < 3; c++)
                assert_string_equal(got.reason[c], prefill_only && steps == 2 ? "prefilled" : "error");
            assert_int_equal(pd_batch_stats(b).runs, 0);
            pd_batch_free(b);
            assert_int_equal(pd_pool_stats(rt.pool).used, 0);
        }
    pd_runtime_close(&rt);
}

static void test_limits(void **state)
{
    (void)state;
    struct pd_err e;
    struct pd_run *run;
    struct out got = { 0 };
    struct pd_runtime rt = open_model("llama-f32", 1, NULL, NULL, 0, 0);
    uint32_t ctx = (uint32_t)rt.model->cfg.n_ctx;
    int32_t *long_prompt = calloc(ctx + 1, 4);
    struct pd_request r = sampling(0);
    struct pd_batch *b = new_batch(&rt, 512, 8);
    struct pd_job j = { .req = &r, .prompt = long_prompt, .n_prompt = ctx, .user = &got };
    char number[16];
    snprintf(number, sizeof number, "%u", ctx);
    assert_int_equal(pd_batch_submit(b, &j, &run, &e), PD_EFAIL);
    assert_non_null(strstr(e.msg, number));
    j.n_prompt = ctx - 1;       /* room for one token exactly */
    must(pd_batch_submit(b, &j, &run, &e), &e);
    drain(b);
    assert_int_equal(got.n[0], 1);
    assert_string_equal(got.reason[0], "length");
    long_prompt[3] = rt.model->cfg.n_vocab;
    assert_int_equal(pd_batch_submit(b, &j, &run, &e), PD_EFAIL);
    assert_non_null(strstr(e.msg, "token_ids[3]"));
    long_prompt[3] = -1;
    assert_int_equal(pd_batch_submit(b, &j, &run, &e), PD_EFAIL);
    j.n_prompt = 0;
    assert_int_equal(pd_batch_submit(b, &j, &run, &e), PD_EFAIL);
    pd_batch_free(b);
    free(long_prompt);
    pd_runtime_close(&rt);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden), cmocka_unit_test(test_same_bits), cmocka_unit_test(test_batch), cmocka_unit_test(test_given_up),
        cmocka_unit_test(test_priority), cmocka_unit_test(test_timeouts), cmocka_unit_test(test_cache), cmocka_unit_test(test_cache_divides), cmocka_unit_test(test_import), cmocka_unit_test(test_resume), cmocka_unit_test(test_resume_real), cmocka_unit_test(test_limits), cmocka_unit_test(test_failed_choices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
