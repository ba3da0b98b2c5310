/* KV packed and unpacked in one process, and the inline hand-over as two processes do it: one exports pool blocks through the publisher into a pipe, the other frames, verifies and copies them into
 * its own pool. Beside it, cat of the very same bytes through a pipe of the same size. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../kv/handover.h"
#include "../wire/stream.h"
#include "measure.h"
#include "publish.h"

#define PIPE (1 << 20)
#define RUN_TOKENS 8192

struct side { struct pd_pool *pool; uint32_t n_runs; uint32_t **blocks; struct pd_kvdesc *desc; struct pd_plan plan; int32_t *tokens; };

static void side_free(struct side *s)
{
    for (uint32_t i = 0; s->blocks && i < s->n_runs; i++)
        pd_free(s->blocks[i]);
    pd_free(s->blocks);
    pd_free(s->desc);
    pd_free(s->tokens);
    pd_pool_free(s->pool);
}

/* Runs of n_tokens each, with KV made up. */
static int side_new(struct side *s, const struct pd_pool_geom *g, uint32_t n_runs, uint32_t n_tokens, struct pd_err *e)
{
    struct pd_kv_layout l;
    memset(s, 0, sizeof *s);
    uint64_t token = 2ull * (uint64_t)g->layers * (uint64_t)g->kv_heads * (uint64_t)g->head_dim * pd_dtype_size(g->dtype);
    s->n_runs = n_runs;
    int rc = pd_pool_new(g, (int64_t)((n_runs * token * n_tokens) + (256 << 20)), &s->pool, e);
    if (rc < 0)
        return rc;
    pd_layout_from_pool(s->pool, &l);
    if ((rc = pd_plan_make(&l, n_tokens, 0, &s->plan, e)) < 0)
        goto out;
    rc = PD_ENOMEM;
    if (!(s->blocks = pd_calloc(s->n_runs, sizeof *s->blocks, "bench", e)) || !(s->desc = pd_calloc(s->n_runs, sizeof *s->desc, "bench", e)) ||
        !(s->tokens = pd_calloc(n_tokens, sizeof *s->tokens, "bench", e)))
        goto out;
    for (uint32_t i = 0; i < s->n_runs; i++) {
        struct pd_kvdesc *d = &s->desc[i];
        if (!(s->blocks[i] = pd_calloc(s->plan.n_blocks, sizeof **s->blocks, "bench", e)))
            goto out;
        if ((rc = pd_run_new(d->run, e)) < 0 || (rc = pd_gen_new(d->gen, e)) < 0 || (rc = pd_pool_take(s->pool, s->plan.n_blocks, s->blocks[i], e)) < 0)
            goto out;
        d->layout = l;
        d->n_tokens = n_tokens;
        d->token_ids = s->tokens;
        strcpy(d->payload.scheme, "inline");
        strcpy(d->payload.codec, "none");
        d->payload.bytes = s->plan.bytes;
        d->payload.chunk_bytes = s->plan.chunk_bytes;
        d->payload.n_chunks = s->plan.n_chunks;
        d->payload.chunk_blocks = s->plan.chunk_blocks;
        static const uint8_t nil = 0x80;        /* empty maps for what this bench does not look at */
        d->fp_fields = (struct pd_bin){ &nil, 1 };
        if ((rc = pd_sha256(&nil, 1, d->fp_sha, e)) < 0)
            goto out;
        d->request.n = d->request.max_tokens = 1;
        d->request.temperature = d->request.top_p = d->request.repetition_penalty = 1;
        d->request.prompt = (struct pd_str){ "-", 1 };
        uint64_t x = i + 1;
        for (uint32_t k = 0; k < s->plan.n_blocks; k++)
            for (int lay = 0; lay < g->layers; lay++)
                for (int v = 0; v < 2; v++) {
                    uint64_t *w = (uint64_t *)(void *)(pd_pool_base(s->pool, s->blocks[i][k]) + pd_pool_off(s->pool, lay, v));
                    for (size_t j = 0; j < pd_pool_layer_bytes(s->pool) / 8; j++)
                        w[j] = x = x * 6364136223846793005ull + 1442695040888963407ull;
                }
    }
    rc = 0;
out:
    if (rc < 0)
        side_free(s);
    return rc;
}

/* Heads and pieces of all chunks of run 0; with `copy`, the bytes too, one after the other. */
static int pack(const struct side *s, struct pd_chunk *heads, uint8_t *copy, struct iovec *iov, struct pd_err *e)
{
    int rc = 0;
    for (uint32_t c = 0; rc == 0 && c < s->plan.n_chunks; c++) {
        int n = 0;
        rc = pd_export_chunk(s->pool, s->blocks[0], &s->plan, &s->desc[0], c, &heads[c], iov, &n, e);
        for (int i = 0; rc == 0 && copy && i < n; copy += iov[i++].iov_len)
            memcpy(copy, iov[i].iov_base, iov[i].iov_len);
    }
    return rc;
}

static int unpack(struct pd_pool *to, const struct side *s, struct pd_chunk *heads, struct pd_err *e)
{
    struct pd_import *im = NULL;
    int rc = pd_import_begin(to, &s->desc[0], &im, e);
    for (uint32_t c = 0; rc == 0 && c < s->plan.n_chunks; c++)
        rc = pd_import_chunk(im, &heads[c], e);
    pd_import_free(im);
    return rc;
}

int pd_measure_pack(const struct pd_pool_geom *g, uint32_t n_tokens, int reps, double *bytes, double *pack_us, double *unpack_us, struct pd_err *e)
{
    struct side s = { 0 };
    struct pd_pool *to = NULL;
    struct pd_chunk *heads = NULL;
    struct iovec *iov = NULL;
    uint8_t *copy = NULL;
    double v[2][32];
    reps = reps > 32 ? 32 : reps;
    int rc = side_new(&s, g, 1, n_tokens, e);
    if (rc < 0)
        return rc;
    rc = pd_pool_new(g, (int64_t)s.plan.bytes + (256 << 20), &to, e);
    if (rc == 0 && (!(heads = pd_calloc(s.plan.n_chunks, sizeof *heads, "bench", e)) || !(copy = pd_alloc_aligned(s.plan.bytes, "bench", e)) ||
                    !(iov = pd_calloc(2 * (size_t)s.plan.chunk_blocks, sizeof *iov, "bench", e))))
        rc = PD_ENOMEM;
    rc = rc ? rc : pack(&s, heads, copy, iov, e);
    for (uint64_t c = 0, at = 0; rc == 0 && c < s.plan.n_chunks; at += heads[c++].raw_len)
        heads[c].data = (struct pd_bin){ copy + at, heads[c].raw_len };
    struct pd_chunk *again = rc == 0 ? pd_calloc(s.plan.n_chunks, sizeof *again, "bench", e) : NULL;
    rc = rc == 0 && !again ? PD_ENOMEM : rc;
    for (int i = -1; rc == 0 && i < reps; i++) {
        int64_t t0 = pd_mono_ns();
        rc = pack(&s, again, NULL, iov, e);
        int64_t t1 = pd_mono_ns();
        rc = rc ? rc : unpack(to, &s, heads, e);
        if (i >= 0) {
            v[0][i] = (double)(t1 - t0) / 1e3;
            v[1][i] = (double)(pd_mono_ns() - t1) / 1e3;
        }
    }
    *bytes = (double)s.plan.bytes;
    *pack_us = rc == 0 ? pd_median(v[0], reps) : 0;
    *unpack_us = rc == 0 ? pd_median(v[1], reps) : 0;
    pd_free(again);
    pd_free(iov);
    pd_free(copy);
    pd_free(heads);
    pd_pool_free(to);
    side_free(&s);
    return rc;
}

static int export_all(const struct side *s, int fd, struct pd_err *e)
{
    struct pd_wstream *w = NULL;
    struct pd_publish *p = NULL;
    int rc = pd_wstream_new(fd, PD_FMT_MSGPACK, false, "pipe", &w, e);
    if (rc == 0)
        rc = pd_publish_new(w, NULL, s->pool, &p, e);
    for (uint32_t i = 0; rc == 0 && i < s->n_runs; i++) {
        struct pd_buf b = { 0 };
        for (int offer = 1; rc == 0 && offer >= 0; offer--) {
            s->desc[i].offer = offer;
            if ((rc = pd_kvdesc_encode(&s->desc[i], &b, e)) == 0)
                rc = pd_publish_record(p, &b, e);
            pd_buf_free(&b);
            for (uint32_t c = 0; rc == 0 && offer && c < s->plan.n_chunks; c++)
                rc = pd_publish_chunk(p, &s->desc[i], &s->plan, s->blocks[i], c, e);
        }
    }
    if (p && rc == 0)
        rc = pd_publish_finish(p, e);
    pd_publish_free(p);
    pd_wstream_close(w, NULL);
    return rc;
}

/* Reads runs until n_runs have been verified and dropped. */
static int import_all(struct pd_pool *pool, struct pd_rstream *in, uint32_t n_runs, struct pd_err *e)
{
    struct pd_import *im = NULL;
    struct pd_arena mem = { 0 }, end = { 0 };
    struct pd_kvdesc d;
    struct pd_chunk c;
    struct pd_rec rec;
    bool bad;
    int rc = 0;
    while (rc == 0 && n_runs) {
        int got = pd_rstream_next(in, -1, &rec, &bad, e);
        if (got != 1) {
            rc = got < 0 ? got : pd_fail(e, PD_EFAIL, "the stream ended early");
            break;
        }
        if (rec.kind == PD_K_OFFER) {
            if ((rc = pd_kvdesc_decode(rec.p, rec.n, &mem, &d, e)) == 0)
                rc = pd_import_begin(pool, &d, &im, e);
        } else if (rec.kind == PD_K_CHUNK) {
            if ((rc = pd_chunk_decode(rec.p, rec.n, &c, e)) == 0)
                rc = pd_import_chunk(im, &c, e);
        } else if (rec.kind == PD_K_KV) {
            if ((rc = pd_kvdesc_decode(rec.p, rec.n, &end, &d, e)) == 0)
                rc = pd_import_finish(im, &d, e);
            pd_import_free(im);
            im = NULL;
            pd_arena_free(&mem);
            pd_arena_free(&end);
            n_runs--;
        }
    }
    pd_import_free(im);
    pd_arena_free(&mem);
    pd_arena_free(&end);
    return rc;
}

static void consumer(const struct pd_pool_geom *g, uint64_t pool_bytes, int fd, int done, uint32_t n_runs, int rounds)
{
    struct pd_pool *pool = NULL;
    struct pd_rstream *in = NULL;
    struct pd_err e;
    struct pd_rstream_opts o = { .max_record = 64 << 20, .name = "pipe" };
    int rc = pd_pool_new(g, (int64_t)pool_bytes, &pool, &e);
    if (rc == 0)
        rc = pd_rstream_new(fd, &o, &in, &e);
    for (int i = 0; rc == 0 && i < rounds; i++) {
        if ((rc = import_all(pool, in, n_runs, &e)) == 0 && write(done, "", 1) != 1)
            rc = PD_EFAIL;
    }
    if (rc < 0)
        fprintf(stderr, "hand-over: %s\n", e.msg);
    pd_rstream_free(in);
    pd_pool_free(pool);
    _exit(rc < 0);
}

static int make_pipe(int fd[2], struct pd_err *e)
{
    if (pipe2(fd, O_CLOEXEC) < 0)
        return pd_fail_sys(e, "pipe");
    (void)!fcntl(fd[1], F_SETPIPE_SZ, PIPE);
    return 0;
}

/* Seconds of `cat FILE | cat >/dev/null` over a pipe of the same size. */
static int cat_once(int file, double *s, struct pd_err *e)
{
    int p[2], rc = make_pipe(p, e), st = 0, bad = 0;
    if (rc < 0)
        return rc;
    int64_t t0 = pd_mono_us();
    pid_t pid[2];
    for (int i = 0; i < 2; i++)
        if ((pid[i] = fork()) == 0) {
            int null = open("/dev/null", O_WRONLY);
            if (i == 0 && lseek(file, 0, SEEK_SET) == 0)
                dup2(file, 0), dup2(p[1], 1);
            else
                dup2(p[0], 0), dup2(null, 1);
            execlp("cat", "cat", (char *)NULL);
            _exit(127);
        }
    close(p[0]);
    close(p[1]);
    for (int i = 0; i < 2; i++)
        bad |= pid[i] < 0 || waitpid(pid[i], &st, 0) < 0 || st != 0;
    *s = (double)(pd_mono_us() - t0) / 1e6;
    return bad ? pd_fail(e, PD_EFAIL, "cat could not be run") : 0;
}

int pd_measure_handover(const struct pd_pool_geom *g, uint64_t bytes, int reps, pd_row_fn *row, void *ctx, struct pd_err *e)
{
    struct side s;
    double ours[32], cat[32], ratio[32];
    int data[2] = { -1, -1 }, done[2] = { -1, -1 }, file = -1;
    pid_t child = -1;
    reps = reps > 32 ? 32 : reps;
    if (pipe2(data, O_CLOEXEC) < 0 || pipe2(done, O_CLOEXEC) < 0)
        return pd_fail_sys(e, "pipe");
    (void)!fcntl(data[1], F_SETPIPE_SZ, PIPE);
    uint64_t token = 2ull * (uint64_t)g->layers * (uint64_t)g->kv_heads * (uint64_t)g->head_dim * pd_dtype_size(g->dtype);
    uint32_t n_runs = (uint32_t)((bytes + token * RUN_TOKENS - 1) / (token * RUN_TOKENS));
    if ((child = fork()) == 0) {
        close(data[1]);
        close(done[0]);
        consumer(g, token * RUN_TOKENS * 2 + (256 << 20), data[0], done[1], n_runs, reps + 1);
    }
    close(data[0]);
    close(done[1]);
    int rc = child < 0 ? pd_fail_sys(e, "fork") : side_new(&s, g, n_runs, RUN_TOKENS, e);
    if (rc < 0)
        goto out;
    if ((file = memfd_create("pd-handover", MFD_CLOEXEC)) < 0 || (rc = export_all(&s, file, e)) < 0) {
        rc = rc < 0 ? rc : pd_fail_sys(e, "memfd_create");
        goto free;
    }
    off_t total = lseek(file, 0, SEEK_CUR);
    for (int i = -1; i < reps; i++) {       /* turn about, so that a change of the machine's speed meets both */
        char c;
        double cs;
        int64_t t0 = pd_mono_us();
        if ((rc = export_all(&s, data[1], e)) < 0)
            goto free;
        if (read(done[0], &c, 1) != 1) {
            rc = pd_fail(e, PD_EFAIL, "the receiving side of the hand-over failed");
            goto free;
        }
        double os = (double)(pd_mono_us() - t0) / 1e6;
        if ((rc = cat_once(file, &cs, e)) < 0)
            goto free;
        if (i >= 0) {
            ours[i] = (double)total / 1e9 / os;
            cat[i] = (double)total / 1e9 / cs;
            ratio[i] = cs / os;
        }
    }
    struct pd_row r = { .name = "handover_inline", .value = pd_median(ours, reps), .unit = "GB/s", .n = reps };
    struct pd_row k = { .name = "cat_same_bytes", .value = pd_median(cat, reps), .unit = "GB/s", .n = reps };
    struct pd_row q = { .name = "handover_of_cat", .value = pd_median(ratio, reps), .unit = "ratio", .goal = 0.5, .has_goal = true, .n = reps };
    if ((rc = row(ctx, &r, e)) == 0 && (rc = row(ctx, &k, e)) == 0)
        rc = row(ctx, &q, e);
free:
    side_free(&s);
out:
    if (file >= 0)
        close(file);
    close(data[1]);
    close(done[0]);
    if (child > 0)
        waitpid(child, NULL, 0);
    return rc;
}
