#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "measure_in.h"

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double pd_median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

/* --- ceilings -------------------------------------------------------------------------------------------------------------------------------------- */

struct roof_job { const struct pd_kernels *k; enum pd_pack pack; const uint8_t *p; size_t part; long n; double ops; float sink[64]; };

static void read_task(void *ctx, int task, int tid)
{
    struct roof_job *j = ctx;
    j->sink[tid & 63] += (float)j->k->read(j->p + (size_t)task * j->part, j->part);
}

static void ops_task(void *ctx, int task, int tid)
{
    struct roof_job *j = ctx;
    double ops = j->k->peak(j->pack, j->n, &j->sink[tid & 63]);
    if (task == 0)
        j->ops = ops;
}

static double best_seconds(struct pd_threads *t, int n_tasks, pd_task_fn *fn, void *ctx)
{
    double best = 1e9;
    for (int i = 0; i < 8; i++) {
        int64_t t0 = pd_mono_ns();
        pd_threads_run(t, n_tasks, fn, ctx);
        double s = (double)(pd_mono_ns() - t0) / 1e9;
        best = s < best ? s : best;
    }
    return best;
}

/* Measures the ceilings of `threads` and gives their rows; with a count of its own in the names when `named`. */
static int measure_roof(const struct pd_runtime *rt, struct pd_threads *threads, bool named, struct pd_roof *roof, pd_row_fn *row, void *ctx, struct pd_err *e)
{
    enum { PARTS = 64 };
    size_t bytes = (size_t)256 << 20;
    int n = pd_threads_count(threads);
    uint8_t *p = pd_alloc_aligned(bytes, "bench", e);
    if (!p)
        return PD_ENOMEM;
    memset(p, 1, bytes);
    struct roof_job j = { .k = rt->k, .pack = rt->model->numerics, .p = p, .part = bytes / PARTS, .n = 200000 };
    roof->read = (double)bytes / best_seconds(threads, PARTS, read_task, &j) / 1e9;
    double s = best_seconds(threads, n, ops_task, &j);
    roof->ops = j.ops * n / s / 1e9;
    pd_free(p);
    struct pd_row r = { .value = roof->read, .unit = "GB/s", .n = 8, .threads = n }, o = { .value = roof->ops, .unit = "GOP/s", .n = 8, .threads = n };
    snprintf(r.name, sizeof r.name, named ? "roof_read@t%d" : "roof_read", n);
    snprintf(o.name, sizeof o.name, named ? "roof_ops@t%d" : "roof_ops", n);
    int rc = row(ctx, &r, e);
    return rc < 0 ? rc : row(ctx, &o, e);
}

int pd_measure_roof(struct pd_runtime *rt, struct pd_roof *roof, pd_row_fn *row, void *ctx, struct pd_err *e)
{
    return measure_roof(rt, rt->threads, false, roof, row, ctx, e);
}

/* --- tests ------------------------------------------------------------------------------------------------------------------------------------------ */

enum { MOST_TESTS = 64, MOST_THREADS = 256, BUSY_SECONDS = 300 };
#define GROWTH_GOAL 4.0     /* tokens/s of 8 sequences against one */
#define BUSY_GOAL 0.4       /* with one busy competitor against none */

struct test { bool decode, busy; uint32_t n, depth, batch, threads; /* 0: all */ char name[32]; double value; };

static int parse_test(const char *s, size_t n, struct test *t, struct pd_err *e)
{
    char *end;
    *t = (struct test){ .batch = 1 };
    snprintf(t->name, sizeof t->name, "%.*s", (int)n, s);
    if (n >= sizeof t->name || (strncmp(t->name, "pp", 2) && strncmp(t->name, "tg", 2)))
        goto bad;
    t->decode = t->name[0] == 't';
    t->n = (uint32_t)strtoul(t->name + 2, &end, 10);
    while (*end) {
        if (!strncmp(end, "@busy", 5)) {
            t->busy = true;
            end += 5;
        } else if (!strncmp(end, "@d", 2) || !strncmp(end, "@b", 2) || !strncmp(end, "@t", 2)) {
            uint32_t *to = end[1] == 'd' ? &t->depth : end[1] == 'b' ? &t->batch : &t->threads, v = (uint32_t)strtoul(end + 2, &end, 10);
            if (v < 1)
                goto bad;
            *to = v;
        } else {
            goto bad;
        }
    }
    if (t->n < 1 || t->n > 1 << 20 || t->depth > 1 << 20 || t->batch > 1024 || t->threads > MOST_THREADS)
        goto bad;
    return 0;
bad:
    return pd_fail(e, PD_EUSAGE, "--tests: '%.*s' is no test (example: --tests pp512,tg64,tg64@d4096,tg64@b8,pp512@t1,tg64@busy)", (int)n, s);
}

/* What the test must do at the least, for each token: operations (two a multiply-add) of all matrices and the attention; bytes of weights and KV read. */
static double ops_per_token(const struct pd_runtime *rt, const struct test *t)
{
    const struct pd_config *c = &rt->model->cfg;
    double q = (double)c->n_heads * c->head_dim, kv = (double)c->n_kv_heads * c->head_dim, at = t->depth + t->n / 2.0;
    double layer = c->n_embd * (2 * q + 2 * kv) + 3.0 * c->n_embd * c->n_ff, head = (double)c->n_embd * c->n_vocab;
    return 2 * (c->n_layers * (layer + 2 * q * at) + (t->decode ? head : head / t->n));
}

static double bytes_per_token(const struct pd_runtime *rt, const struct test *t)
{
    const struct pd_config *c = &rt->model->cfg;
    double kv = (double)c->n_kv_heads * c->head_dim, at = t->depth + t->n / 2.0;
    return (double)rt->model->packed_bytes / t->batch + at * 2 * kv * c->n_layers * (double)pd_dtype_size(pd_pool_geom(rt->pool)->dtype);
}

/* The busy competitor: a process that does nothing but spin. It ends with us, and by itself after BUSY_SECONDS. */
static int start_busy(pid_t *pid, struct pd_err *e)
{
    pid_t us = getpid();
    if ((*pid = fork()) < 0)
        return pd_fail_sys(e, "fork");
    if (*pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        signal(SIGALRM, SIG_DFL);
        alarm(BUSY_SECONDS);
        if (getppid() != us)
            _exit(1);
        for (volatile unsigned n = 0;; n++)
            ;
    }
    return 0;
}

static int stop_busy(pid_t pid, const char *test, struct pd_err *e)
{
    int early = waitpid(pid, NULL, WNOHANG) != 0;
    if (early)
        return pd_fail(e, PD_EFAIL, "%s: the busy competitor ended before the test did (it lives %d s); take fewer --reps", test, BUSY_SECONDS);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return 0;
}

/* Runs the test on `threads`; t->value: tokens a second of all sequences, median. */
static int run_test(struct pd_runtime *rt, struct pd_threads *threads, const struct pd_roof *roof, struct test *t, int reps, pd_row_fn *row, void *ctx,
                    struct pd_err *e)
{
    struct pd_bench b;
    double v[64];
    pid_t busy = 0;
    uint32_t step = t->decode ? 1 : rt->chunk, rows = rt->chunk > t->batch ? rt->chunk : t->batch;
    int rc = pd_bench_new(&b, rt, threads, t->batch, t->n + t->depth, rows, t->batch, e);
    if (rc < 0)
        return rc;
    for (uint32_t s = 0; rc == 0 && t->depth && s < t->batch; s++)
        rc = pd_bench_rows(&b, s, s + 1, 0, t->depth, rt->chunk, false, e);
    if (rc == 0 && t->busy)
        rc = start_busy(&busy, e);
    for (int i = -1; rc == 0 && i < reps; i++) {
        int64_t t0 = pd_mono_us();
        if (t->decode)
            rc = pd_bench_rows(&b, 0, t->batch, t->depth, t->n, step, true, e);
        for (uint32_t s = 0; rc == 0 && !t->decode && s < t->batch; s++)
            rc = pd_bench_rows(&b, s, s + 1, t->depth, t->n, step, true, e);
        if (i >= 0)
            v[i] = (double)t->n * t->batch / ((double)(pd_mono_us() - t0) / 1e6);
    }
    if (busy > 0) {
        int stopped = stop_busy(busy, t->name, rc < 0 ? NULL : e);
        rc = rc < 0 ? rc : stopped;
    }
    pd_bench_free(&b);
    if (rc < 0)
        return rc;
    t->value = pd_median(v, reps);
    struct pd_row r = { .value = t->value, .unit = "tokens/s", .n = reps, .threads = pd_threads_count(threads) };
    snprintf(r.name, sizeof r.name, "%s", t->name);
    if (roof) {
        double ops = ops_per_token(rt, t) * t->value / 1e9 / roof->ops, read = t->decode ? bytes_per_token(rt, t) * t->value / 1e9 / roof->read : 0;
        r.of_roof = ops > read ? ops : read;
        r.roof = ops > read ? "ops" : "read";
    }
    return row(ctx, &r, e);
}

/* A row that sets the test against the same one of one sequence, or without the competitor, if that was run. */
static int against(const struct test *done, int n_done, const struct test *t, int reps, pd_row_fn *row, void *ctx, struct pd_err *e)
{
    for (int i = 0; i < n_done; i++) {
        const struct test *o = &done[i];
        if (o->decode != t->decode || o->n != t->n || o->depth != t->depth || o->threads != t->threads || o->busy || o->batch != (t->busy ? t->batch : 1))
            continue;
        struct pd_row r = { .value = t->value / o->value, .unit = "ratio", .n = reps, .threads = (int)t->threads };
        r.has_goal = t->busy || (t->decode && t->batch == 8);
        r.goal = t->busy ? BUSY_GOAL : GROWTH_GOAL;
        snprintf(r.name, sizeof r.name, "%s/%s", t->name, o->name);
        return row(ctx, &r, e);
    }
    return 0;
}

int pd_measure_engine(struct pd_runtime *rt, const struct pd_roof *roof, const char *tests, int reps, pd_row_fn *row, void *ctx, struct pd_err *e)
{
    struct test done[MOST_TESTS];
    struct pd_threads *own = NULL;      /* of another count, and their ceilings */
    struct pd_roof own_roof;
    int n_done = 0, all = pd_threads_count(rt->threads), rc = 0;
    reps = reps > 64 ? 64 : reps;
    for (const char *s = tests ? tests : PD_BENCH_TESTS; rc == 0 && *s;) {
        size_t n = strcspn(s, ",");
        struct test t;
        if ((rc = parse_test(s, n, &t, e)) < 0)
            break;
        s += n + (s[n] == ',');
        if (t.n + t.depth > (uint32_t)rt->model->cfg.n_ctx) {
            if (!tests)
                continue;
            rc = pd_fail(e, PD_EUSAGE, "--tests: %s needs %u positions, the model's context has %d", t.name, t.n + t.depth, rt->model->cfg.n_ctx);
            break;
        }
        if (!tests && t.threads == (uint32_t)all)
            continue;                   /* has been run under its plain name */
        bool others = t.threads && t.threads != (uint32_t)all;
        if (others && (!own || pd_threads_count(own) != (int)t.threads)) {
            pd_threads_free(own);
            own = NULL;
            if ((rc = pd_threads_new((int)t.threads, &own, e)) < 0 || (roof && (rc = measure_roof(rt, own, true, &own_roof, row, ctx, e)) < 0))
                break;
        }
        rc = run_test(rt, others ? own : rt->threads, !roof ? NULL : others ? &own_roof : roof, &t, reps, row, ctx, e);
        if (rc == 0 && (t.batch > 1 || t.busy))
            rc = against(done, n_done, &t, reps, row, ctx, e);
        if (rc == 0 && n_done < MOST_TESTS)
            done[n_done++] = t;
    }
    pd_threads_free(own);
    return rc;
}

static int64_t status_kib(const char *key)
{
    char line[256];
    int64_t v = 0;
    FILE *f = fopen("/proc/self/status", "re");
    if (!f)
        return 0;
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, key, strlen(key)))
            v = atoll(line + strlen(key) + 1);
    fclose(f);
    return v;
}

int pd_measure_load(struct pd_runtime *rt, pd_open_fn *reopen, pd_row_fn *row, void *ctx, struct pd_err *e)
{
    double ms[5];
    int rc = 0;
    for (int i = 0; i < 5; i++) {
        pd_runtime_close(rt);
        int64_t t0 = pd_mono_us();
        if ((rc = reopen(rt, e)) < 0)
            return rc;
        ms[i] = (double)(pd_mono_us() - t0) / 1e3;
    }
    struct pd_row load = { .name = "load", .value = pd_median(ms, 5), .unit = "ms", .goal = 500, .has_goal = true, .n = 5 };
    struct pd_bench b;
    if ((rc = row(ctx, &load, e)) < 0 || (rc = pd_bench_new(&b, rt, rt->threads, 1, rt->chunk, rt->chunk + rt->max_seqs, rt->max_seqs, e)) < 0)
        return rc;
    if ((rc = pd_bench_rows(&b, 0, 1, 0, rt->chunk, rt->chunk, true, e)) == 0) {
        double rss = (double)(status_kib("RssAnon:") + status_kib("RssShmem:")) * 1024;
        double over = (rss - (double)(rt->model->packed_bytes + rt->model->embd_bytes) - (double)pd_pool_stats(rt->pool).slab_bytes) / (1 << 20);
        struct pd_row r = { .name = "memory_beyond_weights_and_kv", .value = over, .unit = "MiB", .goal = 100, .has_goal = true, .n = 1 };
        rc = row(ctx, &r, e);
    }
    pd_bench_free(&b);
    return rc;
}

/* --- logits ---------------------------------------------------------------------------------------------------------------------------------------- */

static int parse_ids(const char *line, int n_vocab, struct pd_buf *ids, struct pd_err *e)
{
    ids->n = 0;
    for (const char *s = line;;) {
        char *end;
        errno = 0;
        long v = strtol(s, &end, 10);
        if (end == s) {
            s += strspn(s, " \t\r\n");
            return *s ? pd_fail(e, PD_EFAIL, "'%.20s' is no token id", s) : 0;
        }
        if (errno || v < 0 || v >= n_vocab)
            return pd_fail(e, PD_EFAIL, "token id %ld is outside the vocabulary of %d", v, n_vocab);
        int32_t t = (int32_t)v;
        int rc = pd_buf_add(ids, &t, sizeof t, e);
        if (rc < 0)
            return rc;
        s = end;
    }
}

int pd_measure_logits(struct pd_runtime *rt, const char *ids_path, const char *out_path, struct pd_err *e)
{
    FILE *in = fopen(ids_path, "re"), *out = NULL;
    char *line = NULL;
    size_t cap = 0;
    struct pd_buf ids = { 0 };
    int rc = in && (out = fopen(out_path, "we")) ? 0 : pd_fail_sys(e, "%s", in ? out_path : ids_path);
    uint32_t step = 64;
    while (rc == 0 && getline(&line, &cap, in) > 0) {
        if ((rc = parse_ids(line, rt->model->cfg.n_vocab, &ids, e)) < 0 || !ids.n)
            continue;
        struct pd_bench b;
        uint32_t n = (uint32_t)(ids.n / sizeof(int32_t));
        if ((rc = pd_bench_new(&b, rt, rt->threads, 1, n, step, step, e)) < 0)
            break;
        memcpy(b.tokens, ids.p, ids.n);
        for (uint32_t at = 0; rc == 0 && at < n; at += step) {
            float *logits;
            struct pd_span s = { .tokens = b.tokens + at, .n = n - at < step ? n - at : step, .pos0 = at, .blk = b.base, .want_logits = 2 };
            if ((rc = pd_forward(b.fwd, &s, 1, NULL, NULL, &logits, e)) == 0 &&
                fwrite(logits, sizeof *logits * (size_t)rt->model->cfg.n_vocab, s.n, out) != s.n)
                rc = pd_fail_sys(e, "%s", out_path);
        }
        pd_bench_free(&b);
    }
    free(line);
    pd_buf_free(&ids);
    if (in)
        fclose(in);
    if (out && fclose(out) && rc == 0)
        rc = pd_fail_sys(e, "%s", out_path);
    return rc;
}
