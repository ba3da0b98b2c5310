/* Sequences to measure with, and single steps: what a prefill, a decode step and a mix of both take. */
#include "../base/clock.h"
#include "measure_in.h"

enum { MOST_REPS = 64, LEAST_US = 4000 /* a repetition takes so long at the least: shorter steps are made several times in it */, MOST_TIMES = 32 };

void pd_bench_free(struct pd_bench *b)
{
    for (uint32_t i = 0; i < b->n_blocks; i++)
        pd_pool_put(b->rt->pool, b->blocks[i]);
    pd_fwd_free(b->fwd);
    pd_free(b->blocks);
    pd_free(b->base);
    pd_free(b->tokens);
    pd_free(b->span);
}

int pd_bench_new(struct pd_bench *b, struct pd_runtime *rt, struct pd_threads *threads, uint32_t n_seqs, uint32_t tokens, uint32_t max_rows, uint32_t max_logits,
                 struct pd_err *e)
{
    uint32_t bs = (uint32_t)pd_pool_geom(rt->pool)->block_size, per = (tokens + bs - 1) / bs, n = per * n_seqs;
    *b = (struct pd_bench){ .rt = rt, .n_seqs = n_seqs, .per_seq = per };
    int rc = PD_ENOMEM;
    if (!(b->blocks = pd_calloc(n, sizeof *b->blocks, "bench", e)) || !(b->base = pd_calloc(n, sizeof *b->base, "bench", e)) ||
        !(b->tokens = pd_calloc(tokens, sizeof *b->tokens, "bench", e)) || !(b->span = pd_calloc(n_seqs, sizeof *b->span, "bench", e)))
        goto out;
    if ((rc = pd_pool_take(rt->pool, n, b->blocks, e)) < 0)
        goto out;
    b->n_blocks = n;
    for (uint32_t i = 0; i < n; i++)
        b->base[i] = pd_pool_base(rt->pool, b->blocks[i]);
    uint64_t x = 1;
    for (uint32_t i = 0; i < tokens; i++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        b->tokens[i] = (int32_t)((x >> 33) % (uint64_t)rt->model->cfg.n_vocab);
    }
    rc = pd_fwd_new(rt->model, threads, rt->k, rt->pool, max_rows, max_logits, &b->fwd, e);
out:
    if (rc < 0)
        pd_bench_free(b);
    return rc;
}

int pd_bench_rows(struct pd_bench *b, uint32_t s0, uint32_t s1, uint32_t from, uint32_t n, uint32_t step, bool last_logits, struct pd_err *e)
{
    float *logits;
    for (uint32_t at = from; at < from + n; at += step) {
        uint32_t m = from + n - at < step ? from + n - at : step;
        for (uint32_t s = s0; s < s1; s++)
            b->span[s - s0] = (struct pd_span){ .tokens = b->tokens + at, .n = m, .pos0 = at, .blk = b->base + (size_t)s * b->per_seq,
                                                .want_logits = step == 1 || (last_logits && at + m == from + n) };
        int rc = pd_forward(b->fwd, b->span, s1 - s0, NULL, NULL, &logits, e);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* KV that nobody computed, and that is none of the zero page: small numbers of any type. */
static void fill(struct pd_bench *b)
{
    size_t bytes = pd_pool_layer_bytes(b->rt->pool);
    for (uint32_t i = 0; i < b->n_blocks; i++)
        for (int l = 0; l < b->rt->model->cfg.n_layers; l++)
            for (int v = 0; v < 2; v++)
                memset(b->base[i] + pd_pool_off(b->rt->pool, l, v), 0x21, bytes);
}

/* One forward call: sequences [0, batch) decode a token at `depth`, and the one after them takes n at `context`. */
static int mixed(struct pd_bench *b, const struct pd_work *w, uint32_t depth, struct pd_err *e)
{
    float *logits;
    for (uint32_t s = 0; s < w->batch; s++)
        b->span[s] = (struct pd_span){ .tokens = b->tokens + depth, .n = 1, .pos0 = depth, .blk = b->base + (size_t)s * b->per_seq, .want_logits = 1 };
    if (w->n)
        b->span[w->batch] = (struct pd_span){ .tokens = b->tokens + w->context, .n = w->n, .pos0 = w->context, .blk = b->base + (size_t)w->batch * b->per_seq,
                                              .want_logits = 1 };
    return pd_forward(b->fwd, b->span, w->batch + (w->n > 0), NULL, NULL, &logits, e);
}

static int once(struct pd_bench *b, const struct pd_work *w, uint32_t depth, struct pd_err *e)
{
    return w->batch ? mixed(b, w, depth, e) : pd_bench_rows(b, 0, 1, w->context, w->n, b->rt->chunk, true, e);
}

int pd_measure_work(struct pd_runtime *rt, const struct pd_work *w, int reps, double *us, struct pd_err *e)
{
    struct pd_bench b;
    double v[MOST_REPS];
    uint32_t depth = w->batch ? w->kv / w->batch : 0, tokens = w->n ? w->n + w->context : 1, rows = rt->chunk + w->batch, times = 1;
    tokens = w->batch && depth + 1 > tokens ? depth + 1 : tokens;
    if (reps < 1 || reps > MOST_REPS || (!w->n && !w->batch) || (w->batch && w->n > rt->chunk) || tokens > (uint32_t)rt->model->cfg.n_ctx)
        return pd_fail(e, PD_EFAIL, "a step of %u tokens after %u with %u sequences of %u cannot be measured", w->n, w->context, w->batch, depth);
    int rc = pd_bench_new(&b, rt, rt->threads, w->batch + (w->n > 0), tokens, rows, w->batch + 1, e);
    if (rc < 0)
        return rc;
    fill(&b);
    for (int i = -1; rc == 0 && i < reps; i++) {
        int64_t t0 = pd_mono_ns();
        for (uint32_t k = 0; rc == 0 && k < (i < 0 ? 1 : times); k++)
            rc = once(&b, w, depth, e);
        double took = (double)(pd_mono_ns() - t0) / 1e3;
        if (i >= 0)
            v[i] = took / times;
        else if (took < LEAST_US)
            times = took * MOST_TIMES < LEAST_US ? MOST_TIMES : (uint32_t)(LEAST_US / took) + 1;
    }
    pd_bench_free(&b);
    *us = rc == 0 ? pd_median(v, reps) : 0;
    return rc;
}
