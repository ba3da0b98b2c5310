#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>
#include "../base/log.h"
#include "../model/dtype.h"
#include "../wire/stream.h"
#include "../wire/value.h"
#include "convert.h"
#include "inspect.h"

/* The runs of a dump's stream come one after another: one is open at a time. */
struct load {
    const struct pd_kv_walk *w;
    struct pd_kv_run run;
    struct pd_import *im;
    bool open;
};

static void run_free(struct load *l)
{
    struct pd_kv_run *r = &l->run;
    pd_import_free(l->im);
    pd_free(r->blocks);
    pd_pool_free(r->pool);
    pd_free(r->seen);
    pd_arena_free(&r->arena);
    memset(r, 0, sizeof *r);
    l->im = NULL;
    l->open = false;
}

static int on_offer(struct load *l, const struct pd_rec *rec, struct pd_err *e)
{
    struct pd_kv_run *r = &l->run;
    struct pd_plan plan;
    if (l->open)
        return pd_fail(e, PD_ECORRUPT, "run %s was not closed", r->d.run);
    l->open = true;
    int rc = pd_kvdesc_decode(rec->p, rec->n, &r->arena, &r->d, e);
    if (rc)
        return rc;
    const struct pd_kv_layout *y = &r->d.layout;
    if ((rc = pd_layout_check(y, e)))
        return rc;
    struct pd_pool_geom g = { (int)y->layers, (int)y->kv_heads, (int)y->head_dim, (int)y->block_size, PD_F16 };
    pd_kv_dtype_parse(y->dtype, &g.dtype);
    if ((rc = pd_plan_make(y, r->d.n_tokens, r->d.payload.chunk_blocks, &plan, e)) ||
        (rc = pd_pool_new(&g, (int64_t)plan.bytes, &r->pool, e)) ||
        (rc = pd_import_begin_with(r->pool, &r->d, &(struct pd_import_opts){ .convert = PD_CONV_ORDER }, &l->im, e)))
        return rc;
    return 0;
}

/* Hand the run over: with all of its chunks, or (EACH) with those that came. */
static int deliver(struct load *l, struct pd_err *e)
{
    struct pd_kv_run *r = &l->run;
    int rc = 0;
    if (l->im) {
        const struct pd_plan *p = pd_import_plan(l->im);
        r->n_chunks = p->n_chunks;
        if (l->w->mode == PD_DUMP_EACH) {
            if (!(r->seen = pd_calloc(p->n_chunks, 1, "verified chunks", e)))
                return PD_ENOMEM;
            for (uint32_t i = 0; i < p->n_chunks; i++)
                r->seen[i] = pd_import_has(l->im, i);
            r->blocks = pd_import_take_part(l->im, &r->n_blocks);
        } else {
            r->blocks = pd_import_take(l->im, &r->n_blocks);
        }
        pd_import_free(l->im);
        l->im = NULL;
    }
    rc = l->w->run_fn(l->w->ctx, r, e);
    run_free(l);
    return rc;
}

static int on_kv(struct load *l, const struct pd_rec *rec, struct pd_err *e)
{
    struct pd_kvdesc kv;
    memset(&kv, 0, sizeof kv);
    int rc = pd_kvdesc_decode(rec->p, rec->n, &l->run.arena, &kv, e);
    if (!rc && l->im && l->w->mode != PD_DUMP_EACH)
        rc = pd_import_finish(l->im, &kv, e);
    if (rc)
        return rc;
    l->run.d = kv;
    l->run.closed = true;
    return deliver(l, e);
}

static int on_record(struct load *l, const struct pd_rec *rec, struct pd_err *e)
{
    struct pd_chunk c;
    struct pd_arena a = { 0 };
    struct pd_error_rec er;
    int rc;
    switch (rec->kind) {
    case PD_K_OFFER:
        return on_offer(l, rec, e);
    case PD_K_CHUNK:
        if (!l->im)
            return pd_fail(e, PD_ECORRUPT, "a chunk outside a run");
        if ((rc = pd_chunk_decode(rec->p, rec->n, &c, e)))
            return rc;
        pd_progress("run %s: %u of %u pieces", c.run, c.index, pd_import_plan(l->im)->n_chunks);
        return pd_import_chunk(l->im, &c, e);
    case PD_K_KV:
        return on_kv(l, rec, e);
    case PD_K_ERROR:
        if ((rc = pd_error_decode(rec->p, rec->n, &a, &er, e)) == 0) {
            l->run.n_faults++;
            if (l->w->fault_fn)
                l->w->fault_fn(l->w->ctx, er.message.p ? er.message.p : "");
            if (strtoul(er.action, NULL, 10) == UINT32_MAX)     /* the whole run, not one chunk of it */
                run_free(l);
        }
        pd_arena_free(&a);
        return rc;
    default:
        return pd_fail(e, PD_ECORRUPT, "a record of kind %s from the reader", pd_kind_name(rec->kind));
    }
}

int pd_kv_each_run(const char *path, int file_fd, const struct pd_kv_walk *w, struct pd_err *e)
{
    struct load l = { .w = w };
    struct pd_rstream_opts so = { .own_fd = true, .name = path };
    struct pd_rstream *s = NULL;
    struct pd_dump_r *r = NULL;
    struct pd_h5_super super;
    struct pd_err child = { 0 };
    struct pd_rec rec;
    bool skip = false;
    int fd = -1, file = file_fd < 0 ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : file_fd, rc;
    if (file < 0)
        return pd_fail_sys(e, "%s", path);
    rc = pd_h5_super_read(file, path, &super, e);
    if (!rc && super.size < super.eof)
        rc = pd_fail(e, PD_ECORRUPT, "%s: cut: %" PRIu64 " of %" PRIu64 " bytes are there (pd-trace kv salvage may save a part)", path, super.size, super.eof);
    if (!rc && w->run && !pd_run_valid(w->run, strlen(w->run)))
        rc = pd_fail(e, PD_EUSAGE, "'%.64s' is no run id", w->run);
    if (!rc)
        rc = pd_dump_spawn(file, path, w->run, w->mode, &r, &fd, e);
    if (file_fd < 0)
        close(file);
    if (rc)
        return rc;
    if ((rc = pd_rstream_new(fd, &so, &s, e)))
        close(fd);
    while (!rc && (rc = pd_rstream_next(s, -1, &rec, &skip, e)) != 0)
        rc = rc == 1 ? on_record(&l, &rec, e) : rc == 2 ? 0 : rc;
    pd_progress_end();
    pd_rstream_free(s);
    int end = pd_dump_read_end(r, &child);
    if (end && end != PD_ECANCEL) {             /* the child knows best what was wrong */
        rc = end;
        if (e)
            *e = child;
    } else if (rc) {
        pd_err_prefix(e, "%s", path);
    } else if (l.open && w->mode != PD_DUMP_EACH) {
        rc = pd_fail(e, PD_ECORRUPT, "%s: run %s ends without its kv record", path, l.run.d.run);
    }
    if (l.open && l.im && w->mode == PD_DUMP_EACH && rc == PD_ECORRUPT) {      /* the child died on the way: what came before still counts */
        struct pd_err late = { 0 };
        int failed = deliver(&l, &late);
        if (failed) {
            rc = failed;
            if (e)
                *e = late;
        }
    }
    run_free(&l);
    return rc;
}

int pd_kv_run_in(int fd, const char *name, size_t max_record, const struct pd_kv_walk *w, struct pd_err *e)
{
    struct load l = { .w = w };
    struct pd_rstream_opts so = { .name = name, .max_record = max_record };
    struct pd_rstream *s = NULL;
    struct pd_rec rec;
    struct pd_bin v;
    struct pd_str run;
    bool skip;
    int rc = pd_rstream_new(fd, &so, &s, e);
    while (!rc && (rc = pd_rstream_next(s, -1, &rec, &skip, e)) != 0) {
        bool kv = rec.kind == PD_K_OFFER || rec.kind == PD_K_CHUNK || rec.kind == PD_K_KV;
        kv &= rc == 1 && pd_map_find(rec.p, rec.n, "run", &v) == 1 && pd_get_str(v, &run) && pd_str_eq(run, w->run);
        rc = rc < 0 ? rc : kv ? on_record(&l, &rec, e) : 0;
    }
    pd_progress_end();
    pd_rstream_free(s);
    if (rc)
        pd_err_prefix(e, "%s", name);
    else if (l.open)
        rc = pd_fail(e, PD_ECORRUPT, "%s: run %s ends without its kv record", name, l.run.d.run);
    run_free(&l);
    return rc;
}

void pd_kv_row(const struct pd_kv_run *r, uint32_t l, int v, uint32_t t, uint32_t h, float *out)
{
    const struct pd_kv_layout *y = &r->d.layout;
    const uint8_t *row = pd_pool_base(r->pool, r->blocks[t / y->block_size]) + pd_pool_off(r->pool, (int)l, v) +
                         ((size_t)h * y->block_size + t % y->block_size) * y->head_dim * pd_layout_elem_size(y);
    enum pd_dtype type = pd_pool_geom(r->pool)->dtype;
    for (uint32_t i = 0; i < y->head_dim; i++) {
        uint16_t half;
        if (type == PD_F32) {
            memcpy(&out[i], row + (size_t)i * 4, 4);
            continue;
        }
        memcpy(&half, row + (size_t)i * 2, 2);
        out[i] = type == PD_F16 ? pd_half_to_float(half) : pd_bf16_to_float(half);
    }
}

void pd_kv_json_str(FILE *f, const char *s)
{
    fputc('"', f);
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\')
            fprintf(f, "\\%c", c);
        else if (c < 0x20)
            fprintf(f, "\\u%04x", c);
        else
            fputc(c, f);
    }
    fputc('"', f);
}

struct tally { const char *path; const struct pd_kv_opts *o; uint32_t runs, faults; uint64_t tokens, chunks; };

static void line_open(const struct tally *t, const struct pd_kvdesc *d)
{
    fputs("{\"file\":", t->o->out);
    pd_kv_json_str(t->o->out, t->path);
    fprintf(t->o->out, ",\"run\":\"%s\"", d->run);
}

static int ls_run(void *ctx, struct pd_kv_run *r, struct pd_err *e)
{
    struct tally *t = ctx;
    const struct pd_kvdesc *d = &r->d;
    const struct pd_kv_layout *l = &d->layout;
    char gen[2 * PD_GEN_LEN + 1];
    pd_hex(d->gen, PD_GEN_LEN, gen);
    if (t->o->json) {
        line_open(t, d);
        fprintf(t->o->out, ",\"tokens\":%u,\"layers\":%u,\"kv_heads\":%u,\"head_dim\":%u,\"dtype\":\"%s\",\"block_size\":%u,\"order\":\"%s\",\"bytes\":%" PRIu64 ",\"gen\":\"%s\"}\n",
                d->n_tokens, l->layers, l->kv_heads, l->head_dim, l->dtype, l->block_size, l->order, d->payload.bytes, gen);
    } else {
        fprintf(t->o->out, "%s  %u tokens  %u layers  %u x %u %s  blocks of %u  %" PRIu64 " bytes  gen %s\n", d->run, d->n_tokens, l->layers, l->kv_heads,
                l->head_dim, l->dtype, l->block_size, d->payload.bytes, gen);
    }
    return 0;
}

int pd_kv_ls(const char *path, const struct pd_kv_opts *o, struct pd_err *e)
{
    struct tally t = { .path = path, .o = o };
    return pd_kv_each_run(path, -1, &(struct pd_kv_walk){ .mode = PD_DUMP_HEAD, .run = o->run, .run_fn = ls_run, .ctx = &t }, e);
}

static int count_run(void *ctx, struct pd_kv_run *r, struct pd_err *e)
{
    struct tally *t = ctx;
    t->runs++;
    t->tokens += r->d.n_tokens;
    return 0;
}

int pd_kv_quickcheck(const char *path, const struct pd_kv_opts *o, struct pd_err *e)
{
    struct tally t = { .path = path, .o = o };
    int rc = pd_kv_each_run(path, -1, &(struct pd_kv_walk){ .mode = PD_DUMP_HEAD, .run = o->run, .run_fn = count_run, .ctx = &t }, e);
    if (rc || o->quiet)
        return rc;
    if (o->json) {
        fputs("{\"file\":", o->out);
        pd_kv_json_str(o->out, path);
        fprintf(o->out, ",\"runs\":%u,\"tokens\":%" PRIu64 ",\"ok\":true}\n", t.runs, t.tokens);
    } else {
        fprintf(o->out, "%s: ok, %u runs, %" PRIu64 " tokens (structure; `verify` reads the numbers)\n", path, t.runs, t.tokens);
    }
    return 0;
}

static void say_fault(void *ctx, const char *message)
{
    struct tally *t = ctx;
    t->faults++;
    if (t->o->json) {
        fputs("{\"file\":", t->o->out);
        pd_kv_json_str(t->o->out, t->path);
        fputs(",\"fault\":", t->o->out);
        pd_kv_json_str(t->o->out, message);
        fputs("}\n", t->o->out);
    } else {
        fprintf(t->o->out, "%s: %s\n", t->path, message);
    }
}

static int verified_run(void *ctx, struct pd_kv_run *r, struct pd_err *e)
{
    struct tally *t = ctx;
    uint32_t good = 0;
    for (uint32_t i = 0; i < r->n_chunks; i++)
        good += r->seen[i];
    t->runs++;
    t->chunks += good;
    if (t->o->quiet)
        return 0;
    if (t->o->json) {
        line_open(t, &r->d);
        fprintf(t->o->out, ",\"blocks\":%u,\"layers\":%u,\"verified\":%u,\"bad\":%u,\"complete\":%s}\n", r->n_blocks, r->d.layout.layers, good, r->n_chunks - good,
                r->closed ? "true" : "false");
    } else {
        fprintf(t->o->out, "%s: run %s: %u of %u pieces (a block of a layer) verified%s\n", t->path, r->d.run, good, r->n_chunks, r->closed ? "" : "; reading broke off");
    }
    return 0;
}

int pd_kv_verify(const char *path, const struct pd_kv_opts *o, struct pd_err *e)
{
    struct tally t = { .path = path, .o = o };
    int rc = pd_kv_each_run(path, -1, &(struct pd_kv_walk){ PD_DUMP_EACH, o->run, verified_run, say_fault, &t }, e);
    if (!rc && t.faults)
        rc = pd_fail(e, PD_ECORRUPT, "%s: %u faults", path, t.faults);
    return rc;
}
