#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include "inspect.h"

struct acc { float min, max; double sum, square; uint64_t n, nan, inf; };

static void add(struct acc *a, float x)
{
    if (isnan(x)) {
        a->nan++;
        return;
    }
    if (isinf(x)) {
        a->inf++;
        return;
    }
    if (!a->n || x < a->min)
        a->min = x;
    if (!a->n || x > a->max)
        a->max = x;
    a->sum += x;
    a->square += (double)x * x;
    a->n++;
}

struct stat_ctx { const char *path; const struct pd_kv_opts *o; };

static void print_stat(const struct stat_ctx *s, const struct pd_kv_run *r, uint32_t l, int v, uint32_t h, const struct acc *a)
{
    FILE *f = s->o->out;
    double n = a->n ? (double)a->n : 1;
    if (!s->o->json) {
        if (a->n)
            fprintf(f, "%5u  %s %4u  %12.6g %12.6g %12.6g %12.6g  %" PRIu64 "\n", l, v ? "v" : "k", h, a->min, a->max, a->sum / n, sqrt(a->square / n), a->nan + a->inf);
        else
            fprintf(f, "%5u  %s %4u  %12s %12s %12s %12s  %" PRIu64 "\n", l, v ? "v" : "k", h, "-", "-", "-", "-", a->nan + a->inf);
        return;
    }
    fprintf(f, "{\"run\":\"%s\",\"layer\":%u,\"kv\":\"%s\",\"head\":%u,\"n\":%" PRIu64, r->d.run, l, v ? "v" : "k", h, a->n + a->nan + a->inf);
    if (a->n)
        fprintf(f, ",\"min\":%.9g,\"max\":%.9g,\"mean\":%.17g,\"rms\":%.17g", a->min, a->max, a->sum / n, sqrt(a->square / n));
    else
        fputs(",\"min\":null,\"max\":null,\"mean\":null,\"rms\":null", f);
    fprintf(f, ",\"nan\":%" PRIu64 ",\"inf\":%" PRIu64 "}\n", a->nan, a->inf);
}

static int stat_run(void *ctx, struct pd_kv_run *r, struct pd_err *e)
{
    const struct stat_ctx *s = ctx;
    const struct pd_kv_layout *y = &r->d.layout;
    float *row = pd_calloc(y->head_dim, sizeof *row, "a row", e);
    if (!row)
        return PD_ENOMEM;
    if (!s->o->json)
        fprintf(s->o->out, "run %s  %u tokens  %s\nlayer kv head           min          max         mean          rms  nan+inf\n", r->d.run, r->d.n_tokens, y->dtype);
    for (uint32_t l = 0; l < y->layers; l++)
        for (int v = 0; v < 2; v++)
            for (uint32_t h = 0; h < y->kv_heads; h++) {
                struct acc a = { 0 };
                for (uint32_t t = 0; t < r->d.n_tokens; t++) {
                    pd_kv_row(r, l, v, t, h, row);
                    for (uint32_t i = 0; i < y->head_dim; i++)
                        add(&a, row[i]);
                }
                print_stat(s, r, l, v, h, &a);
            }
    pd_free(row);
    return 0;
}

int pd_kv_stat(const char *path, const struct pd_kv_opts *o, struct pd_err *e)
{
    struct stat_ctx s = { path, o };
    return pd_kv_each_run(path, -1, &(struct pd_kv_walk){ .mode = PD_DUMP_DATA, .run = o->run, .run_fn = stat_run, .ctx = &s }, e);
}

/* diff: runs are matched by id, or one with one. A run of A is loaded, then within its callback that of B. */
struct names { char (*id)[PD_RUN_LEN + 1]; size_t n, cap; };

static int name_run(void *ctx, struct pd_kv_run *r, struct pd_err *e)
{
    struct names *k = ctx;
    if (k->n == k->cap) {
        size_t cap = k->cap ? k->cap * 2 : 16;
        void *p = pd_realloc(k->id, cap, sizeof *k->id, "run ids", e);
        if (!p)
            return PD_ENOMEM;
        k->id = p;
        k->cap = cap;
    }
    memcpy(k->id[k->n++], r->d.run, sizeof *k->id);
    return 0;
}

static bool has_run(const struct names *k, const char *id)
{
    for (size_t i = 0; i < k->n; i++)
        if (!strcmp(k->id[i], id))
            return true;
    return false;
}

struct pair { const char *a, *b, *run_b; const struct pd_kv_opts *o; const struct pd_kv_run *left; bool differ; };

static void differ(struct pair *p, const char *what, const char *left, const char *right)
{
    p->differ = true;
    if (p->o->quiet)
        return;
    if (p->o->json) {
        fprintf(p->o->out, "{\"run\":\"%s\",\"what\":\"%s\",\"a\":", p->left ? p->left->d.run : "", what);
        pd_kv_json_str(p->o->out, left);
        fputs(",\"b\":", p->o->out);
        pd_kv_json_str(p->o->out, right);
        fputs("}\n", p->o->out);
    } else {
        fprintf(p->o->out, "%s differs: %s, %s\n", what, left, right);
    }
}

static void differ_num(struct pair *p, const char *what, uint64_t left, uint64_t right)
{
    char a[24], b[24];
    snprintf(a, sizeof a, "%" PRIu64, left);
    snprintf(b, sizeof b, "%" PRIu64, right);
    differ(p, what, a, b);
}

struct gap { double abs, rel; uint64_t n; uint32_t first; };

static void compare(struct gap *g, float x, float y, uint32_t token)
{
    if (!memcmp(&x, &y, sizeof x))
        return;
    double d = fabs((double)x - y), m = fmax(fabs((double)x), fabs((double)y));
    if (isnan(d))
        d = INFINITY;
    double rel = isinf(d) ? INFINITY : m > 0 ? d / m : 0;       /* +0 and -0 differ in bits only */
    g->abs = d > g->abs ? d : g->abs;
    g->rel = rel > g->rel ? rel : g->rel;
    if (!g->n++ || token < g->first)
        g->first = token;
}

static void say_gap(struct pair *p, uint32_t l, int v, uint32_t h, const struct gap *g)
{
    FILE *f = p->o->out;
    p->differ = true;
    if (p->o->quiet)
        return;
    if (!p->o->json) {
        fprintf(f, "layer %u %s head %u: %" PRIu64 " numbers differ, max abs %.6g, max rel %.6g, first at token %u\n", l, v ? "V" : "K", h, g->n, g->abs, g->rel, g->first);
        return;
    }
    fprintf(f, "{\"run\":\"%s\",\"what\":\"kv\",\"layer\":%u,\"kv\":\"%s\",\"head\":%u,\"n\":%" PRIu64, p->left->d.run, l, v ? "v" : "k", h, g->n);
    if (isinf(g->abs))
        fputs(",\"max_abs\":null,\"max_rel\":null", f);
    else
        fprintf(f, ",\"max_abs\":%.9g,\"max_rel\":%.9g", g->abs, g->rel);
    fprintf(f, ",\"first_token\":%u}\n", g->first);
}

static int compare_kv(struct pair *p, const struct pd_kv_run *a, const struct pd_kv_run *b, uint32_t n_tokens, struct pd_err *e)
{
    const struct pd_kv_layout *y = &a->d.layout;
    uint32_t first = UINT32_MAX;
    float *x = pd_calloc((size_t)y->head_dim * 2, sizeof *x, "rows", e), *z = x ? x + y->head_dim : NULL;
    if (!x)
        return PD_ENOMEM;
    for (uint32_t l = 0; l < y->layers; l++)
        for (int v = 0; v < 2; v++)
            for (uint32_t h = 0; h < y->kv_heads; h++) {
                struct gap g = { 0 };
                for (uint32_t t = 0; t < n_tokens; t++) {
                    pd_kv_row(a, l, v, t, h, x);
                    pd_kv_row(b, l, v, t, h, z);
                    for (uint32_t i = 0; i < y->head_dim; i++)
                        compare(&g, x[i], z[i], t);
                }
                if (g.n)
                    say_gap(p, l, v, h, &g);
                if (g.n && g.first < first)
                    first = g.first;
            }
    pd_free(x);
    if (first != UINT32_MAX && !p->o->quiet && !p->o->json)
        fprintf(p->o->out, "run %s: the first token whose KV differs is %u\n", a->d.run, first);
    return 0;
}

static int with_right(void *ctx, struct pd_kv_run *b, struct pd_err *e)
{
    struct pair *p = ctx;
    const struct pd_kv_run *a = p->left;
    const struct pd_kv_layout *x = &a->d.layout, *y = &b->d.layout;
    uint32_t n = a->d.n_tokens < b->d.n_tokens ? a->d.n_tokens : b->d.n_tokens, same = 0;
    while (same < n && a->d.token_ids[same] == b->d.token_ids[same])
        same++;
    if (a->d.n_tokens != b->d.n_tokens)
        differ_num(p, "number of tokens", a->d.n_tokens, b->d.n_tokens);
    if (same < n) {
        char what[48], va[16], vb[16];
        snprintf(what, sizeof what, "token %u, the first,", same);
        snprintf(va, sizeof va, "%" PRId32, a->d.token_ids[same]);
        snprintf(vb, sizeof vb, "%" PRId32, b->d.token_ids[same]);
        differ(p, what, va, vb);
    }
    if (strcmp(x->dtype, y->dtype))
        differ(p, "dtype", x->dtype, y->dtype);
    if (x->layers != y->layers || x->kv_heads != y->kv_heads || x->head_dim != y->head_dim) {
        char sa[64], sb[64];
        snprintf(sa, sizeof sa, "%u layers of %u x %u", x->layers, x->kv_heads, x->head_dim);
        snprintf(sb, sizeof sb, "%u layers of %u x %u", y->layers, y->kv_heads, y->head_dim);
        differ(p, "shape", sa, sb);
        return 0;
    }
    return compare_kv(p, a, b, n, e);
}

static int with_left(void *ctx, struct pd_kv_run *a, struct pd_err *e)
{
    struct pair *p = ctx;
    p->left = a;
    return pd_kv_each_run(p->b, -1, &(struct pd_kv_walk){ .mode = PD_DUMP_DATA, .run = p->run_b, .run_fn = with_right, .ctx = p }, e);
}

int pd_kv_diff(const char *a, const char *b, const struct pd_kv_opts *o, bool *differs, struct pd_err *e)
{
    struct names ka = { 0 }, kb = { 0 };
    struct pair p = { .a = a, .b = b, .o = o };
    int rc = pd_kv_each_run(a, -1, &(struct pd_kv_walk){ .mode = PD_DUMP_HEAD, .run = o->run, .run_fn = name_run, .ctx = &ka }, e);
    if (!rc)
        rc = pd_kv_each_run(b, -1, &(struct pd_kv_walk){ .mode = PD_DUMP_HEAD, .run = o->run, .run_fn = name_run, .ctx = &kb }, e);
    bool one = ka.n == 1 && kb.n == 1;
    for (size_t i = 0; !rc && i < ka.n; i++) {
        if (!one && !has_run(&kb, ka.id[i])) {
            differ(&p, "presence of a run", ka.id[i], "absent");
            continue;
        }
        p.run_b = one ? kb.id[0] : ka.id[i];
        rc = pd_kv_each_run(a, -1, &(struct pd_kv_walk){ .mode = PD_DUMP_DATA, .run = ka.id[i], .run_fn = with_left, .ctx = &p }, e);
        p.left = NULL;
    }
    for (size_t i = 0; !rc && !one && i < kb.n; i++)
        if (!has_run(&ka, kb.id[i]))
            differ(&p, "presence of a run", "absent", kb.id[i]);
    if (!rc && !p.differ && !o->quiet && !o->json)
        fprintf(o->out, "%s, %s: the same\n", a, b);
    *differs = p.differ;
    pd_free(ka.id);
    pd_free(kb.id);
    return rc;
}
