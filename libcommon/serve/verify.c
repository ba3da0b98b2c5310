#include <fcntl.h>
#include <inttypes.h>
#include <sys/uio.h>
#include <unistd.h>
#include "../base/hash.h"
#include "../kv/fingerprint.h"
#include "../kv/inspect.h"
#include "../wire/endpoint.h"
#include "../wire/value.h"
#include "ask.h"
#include "verify.h"

enum { NAMED = 20 };            /* differences that are named; the others are counted */

/* What one side has. sums: big-endian, block by block, layer by layer. */
struct side {
    const char *name;
    struct pd_buf rec;          /* of a daemon: the rest points into it */
    struct pd_str worker, state, lease;
    struct pd_bin fp, gen, sums;
    int64_t epoch, layers, block_size, n_tokens, blocks;
    uint64_t layout_hash, tokens;
    struct pd_buf fp_own, sums_own;
    const struct side *like;    /* of a record that was kept: sums are made as this side's are */
    bool there;
};

static void side_free(struct side *s)
{
    pd_buf_free(&s->rec);
    pd_buf_free(&s->fp_own);
    pd_buf_free(&s->sums_own);
}

static bool text_of(struct pd_bin map, const char *key, struct pd_str *out)
{
    struct pd_bin v;
    return pd_map_find(map.p, map.n, key, &v) == 1 && pd_get_str(v, out);
}

static bool bin_of(struct pd_bin map, const char *key, size_t n, struct pd_bin *out)
{
    struct pd_bin v;
    return pd_map_find(map.p, map.n, key, &v) == 1 && pd_get_bin(v, out) && (!n || out->n == n);
}

static bool count_of(struct pd_bin map, const char *key, int64_t *out)
{
    struct pd_bin v;
    return pd_map_find(map.p, map.n, key, &v) == 1 && pd_get_int(v, out) && *out >= 0 && *out <= UINT32_MAX;
}

static int ask(const struct pd_verify_opts *o, const char *at, struct side *s, struct pd_err *e)
{
    struct pd_bin all, v, hash, tokens, epoch;
    s->name = at;
    int rc = pd_ask_verify(at, o->run, o->net, &s->rec, e);
    if (rc < 0)
        return rc;
    all = (struct pd_bin){ s->rec.p, s->rec.n };
    if (pd_map_find(all.p, all.n, "verify", &v) != 1 || !text_of(all, "state", &s->state) || !text_of(all, "worker", &s->worker) ||
        !text_of(v, "lease", &s->lease) || pd_map_find(v.p, v.n, "fingerprint", &s->fp) != 1 || !bin_of(v, "layout_hash", 8, &hash) ||
        !bin_of(v, "tokens", 8, &tokens) || !bin_of(v, "sums", 0, &s->sums) || !count_of(v, "layers", &s->layers) ||
        !count_of(v, "block_size", &s->block_size) || !count_of(v, "n_tokens", &s->n_tokens) || !count_of(v, "blocks", &s->blocks) ||
        pd_map_find(v.p, v.n, "epoch", &epoch) != 1 || !pd_get_int(epoch, &s->epoch) || !s->layers || !s->block_size ||
        s->sums.n != (uint64_t)s->blocks * (uint64_t)s->layers * 8)
        return pd_fail(e, PD_ECORRUPT, "%s: its answer is not what a read-back has", at);
    bin_of(v, "gen", PD_GEN_LEN, &s->gen);
    s->layout_hash = pd_get_be64(hash.p);
    s->tokens = pd_get_be64(tokens.p);
    s->there = true;
    return 0;
}

/* A record that was kept: its chunks have been held against their own checksums when this is called. */
static int kept(void *ctx, struct pd_kv_run *r, struct pd_err *e)
{
    struct side *s = ctx;
    struct pd_kvdesc d = r->d;
    struct pd_plan plan;
    struct pd_chunk c;
    struct iovec iov[2];
    int n, rc;
    if (!r->blocks)
        return pd_fail(e, PD_EFAIL, "run %s: its KV itself is not in this record", d.run);
    *s = (struct side){ .name = s->name, .like = s->like, .layers = d.layout.layers, .block_size = d.layout.block_size, .n_tokens = d.n_tokens,
                        .epoch = (int64_t)d.epoch, .blocks = r->n_blocks, .layout_hash = d.layout.layout_hash,
                        .tokens = pd_xxh3(d.token_ids, (size_t)d.n_tokens * sizeof *d.token_ids, 0),
                        .worker = { s->name, strlen(s->name) }, .there = true };
    memset(d.gen, 0, sizeof d.gen);
    if (s->like->gen.p)         /* the numbers are what is compared: a prompt that was prefilled again has another generation */
        memcpy(d.gen, s->like->gen.p, sizeof d.gen);
    if ((rc = pd_buf_add(&s->fp_own, d.fp_fields.p, d.fp_fields.n, e)) < 0)
        return rc;
    s->fp = (struct pd_bin){ s->fp_own.p, s->fp_own.n };
    if ((rc = pd_plan_make(&d.layout, d.n_tokens, 1, &plan, e)) < 0 || (rc = pd_buf_reserve(&s->sums_own, (size_t)plan.n_chunks * 8, e)) < 0)
        return rc;
    for (uint32_t i = 0; !rc && i < plan.n_chunks; i++)         /* block by block, layers inner */
        if ((rc = pd_export_chunk(r->pool, r->blocks, &plan, &d, i, &c, iov, &n, e)) == 0)
            pd_put_be64(s->sums_own.p + (size_t)i * 8, c.xxh3);
    s->sums = (struct pd_bin){ s->sums_own.p, (size_t)plan.n_chunks * 8 };
    return rc;
}

static int load(const struct pd_verify_opts *o, const struct side *like, struct side *s, struct pd_err *e)
{
    struct pd_kv_walk w = { .mode = PD_DUMP_DATA, .run = o->run, .run_fn = kept, .ctx = s };
    s->name = o->with;
    s->like = like;
    if (!strncmp(o->with, "unix:", 5) || !strncmp(o->with, "tcp:", 4))
        return ask(o, o->with, s, e);
    if (pd_dump_is(o->with)) {
        int rc = pd_kv_each_run(o->with, -1, &w, e);
        return rc || s->there ? rc : pd_fail(e, PD_EFAIL, "%s: there is no run %s in it", o->with, o->run);
    }
    int fd = open(o->with, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return pd_fail_sys(e, "%s", o->with);
    int rc = pd_kv_run_in(fd, o->with, o->max_record, &w, e);
    close(fd);
    return rc || s->there ? rc : pd_fail(e, PD_EFAIL, "%s: there is no KV of run %s in it", o->with, o->run);
}

static int same_kind(const struct side *a, const struct side *b, struct pd_err *e)
{
    struct pd_err why = { 0 };
    if (pd_fp_compare(b->fp, a->fp, &why) == PD_FP_DIFFERS)
        return pd_fail(e, PD_EINCOMPAT, "fingerprint: %s", why.msg);
    if (a->layout_hash != b->layout_hash || a->layers != b->layers || a->block_size != b->block_size)
        return pd_fail(e, PD_EINCOMPAT, "the KV layout differs (%s has blocks of %" PRId64 ", layout %016" PRIx64 "; %s of %" PRId64 ", %016" PRIx64 ")",
                       a->name, a->block_size, a->layout_hash, b->name, b->block_size, b->layout_hash);
    if (a->epoch != b->epoch)
        return pd_fail(e, PD_EINCOMPAT, "epoch differs (%s %" PRId64 ", %s %" PRId64 ")", a->name, a->epoch, b->name, b->epoch);
    if (a->n_tokens != b->n_tokens || a->tokens != b->tokens)
        return pd_fail(e, PD_EINCOMPAT, "the prompt differs (%s has %" PRId64 " tokens, %s %" PRId64 ")", a->name, a->n_tokens, b->name, b->n_tokens);
    if (!b->like && (a->gen.n != b->gen.n || (a->gen.n && memcmp(a->gen.p, b->gen.p, a->gen.n))))
        return pd_fail(e, PD_EINCOMPAT, "the generation differs between %s and %s: it is another prefill of this run", a->name, b->name);
    return 0;
}

/* Blocks that both have; how many sums differ. */
static int64_t compare(const struct pd_verify_opts *o, const struct side *a, const struct side *b, char *first, size_t cap)
{
    int64_t both = a->blocks < b->blocks ? a->blocks : b->blocks, n = 0;
    for (int64_t i = 0; i < both * a->layers; i++) {
        uint64_t x = pd_get_be64(a->sums.p + i * 8), y = pd_get_be64(b->sums.p + i * 8);
        if (x == y)
            continue;
        if (!n++)
            snprintf(first, cap, "block %" PRId64 ", layer %" PRId64 " (%016" PRIx64 " is held, %016" PRIx64 " was published)", i / a->layers,
                     i % a->layers, x, y);
        if (n > NAMED)
            continue;
        if (o->json)
            fprintf(o->out, "{\"run\":\"%s\",\"block\":%" PRId64 ",\"layer\":%" PRId64 ",\"held\":\"%016" PRIx64 "\",\"published\":\"%016" PRIx64 "\"}\n",
                    o->run, i / a->layers, i % a->layers, x, y);
        else
            fprintf(o->out, "block %" PRId64 "  layer %" PRId64 "  differs: held %016" PRIx64 "  published %016" PRIx64 "\n", i / a->layers,
                    i % a->layers, x, y);
    }
    return n;
}

static void tell(const struct pd_verify_opts *o, const struct side *a, const struct side *b, int64_t differ)
{
    int64_t all = (a->n_tokens + a->block_size - 1) / a->block_size, both = b && b->blocks < a->blocks ? b->blocks : a->blocks;
    char gen[2 * PD_GEN_LEN + 1] = "";
    if (a->gen.p)
        pd_hex(a->gen.p, PD_GEN_LEN, gen);
    if (o->json)
        fprintf(o->out, "{\"run\":\"%s\",\"worker\":\"%.*s\",\"state\":\"%.*s\",\"lease\":\"%.*s\",\"epoch\":%" PRId64 ",\"gen\":\"%s\","
                "\"layout_hash\":\"%016" PRIx64 "\",\"tokens\":%" PRId64 ",\"blocks\":%" PRId64 ",\"read\":%" PRId64 ",\"compared\":%" PRId64
                ",\"layers\":%" PRId64 ",\"differ\":%" PRId64 "}\n",
                o->run, (int)a->worker.n, a->worker.p, (int)a->state.n, a->state.p, (int)a->lease.n, a->lease.p, a->epoch, gen, a->layout_hash,
                a->n_tokens, all, a->blocks, b ? both : 0, a->layers, differ);
    else if (!o->quiet || differ) {
        fprintf(o->out, "run %s  %.*s  %.*s  lease %.*s  gen %s  %" PRId64 " tokens  %" PRId64 " of %" PRId64 " blocks read  %" PRId64 " layers\n",
                o->run, (int)a->worker.n, a->worker.p, (int)a->state.n, a->state.p, (int)a->lease.n, a->lease.p, gen[0] ? gen : "-", a->n_tokens,
                a->blocks, all, a->layers);
        if (b)
            fprintf(o->out, "%s: %" PRId64 " of %" PRId64 " sums differ from those of %s%s\n", differ ? "differs" : "equal", differ, both * a->layers, b->name,
                    both < all ? "; blocks that are not there on both sides, or still written, are left out" : "");
    }
}

int pd_verify(const struct pd_verify_opts *o, struct pd_err *e)
{
    struct side a = { 0 }, b = { 0 };
    char first[160] = "";
    int64_t differ = 0;
    int rc = ask(o, o->at, &a, e);
    if (rc < 0)
        goto out;
    if (pd_str_eq(a.lease, "over"))
        rc = pd_fail(e, PD_ETIME, "run %s: %s: the lease by which its KV was read in place is over", o->run, o->at);
    else if (!a.blocks)
        rc = pd_fail(e, PD_EFAIL, "run %s: %s holds no block of its KV that could be read (it is %.*s)", o->run, o->at, (int)a.state.n, a.state.p);
    if (rc == 0 && o->with && (rc = load(o, &a, &b, e)) == 0) {
        if (pd_str_eq(b.lease, "over"))
            rc = pd_fail(e, PD_ETIME, "run %s: %s: its lease is over", o->run, o->with);
        else if (!b.blocks)
            rc = pd_fail(e, PD_EFAIL, "run %s: %s has no KV of it that is final", o->run, o->with);
        else if ((rc = same_kind(&a, &b, e)) < 0)
            pd_err_prefix(e, "run %s", o->run);
        else
            differ = compare(o, &a, &b, first, sizeof first);
    }
    if (rc == 0)
        tell(o, &a, o->with ? &b : NULL, differ);
    if (differ)
        rc = pd_fail(e, PD_ECORRUPT, "run %s: what %s holds is not what was published; sums that differ: %" PRId64 ", the first %s", o->run,
                     o->at, differ, first);
    if (rc == 0 && (fflush(o->out) || ferror(o->out)))
        rc = pd_fail_sys(e, "standard output");
    fflush(o->out);
out:
    side_free(&a);
    side_free(&b);
    return rc;
}
