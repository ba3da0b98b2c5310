#include "profile.h"
#include <math.h>
#include <stdio.h>
#include "../base/infile.h"
#include "../wire/json.h"
#include "../wire/record.h"
#include "../wire/value.h"

const char *const pd_profile_term_names[PD_PT_TERMS] = { "prefill", "decode", "mixed", "pack", "unpack" };
static const int coefs[] = { 3, 3, 3, 2, 2 };
static const uint32_t columns[] = { 3, 3, 5, 2, 2 };
enum { MAX_FILE = 4 << 20, MAX_NAME = 200 };

struct reader { struct pd_profile *p; const char *name; struct pd_err *e; };

static int bad(struct reader *r, const char *where, const char *what) { return pd_fail(r->e, PD_ECORRUPT, "%s: %s%s", r->name, where, what); }

static bool find(struct pd_bin map, const char *key, struct pd_bin *v) { return pd_map_find(map.p, map.n, key, v) == 1 && pd_value_type(*v) != PD_T_NIL; }

static int text(struct reader *r, struct pd_bin map, const char *where, const char *key, bool needed, struct pd_str *out)
{
    struct pd_bin v;
    struct pd_str s;
    char what[160], t[80];
    if (!find(map, key, &v)) {
        snprintf(what, sizeof what, "%s is missing", key);
        return needed ? bad(r, where, what) : 0;
    }
    if (!pd_get_str(v, &s) || !s.n || s.n > MAX_NAME) {
        snprintf(what, sizeof what, "%s: %.60s is no name of 1 to %d bytes", key, pd_value_text(v, t, sizeof t), MAX_NAME);
        return bad(r, where, what);
    }
    out->n = s.n;
    return (out->p = pd_arena_dup(&r->p->mem, s.p, s.n, r->e)) ? 0 : PD_ENOMEM;
}

/* A list of n numbers, finite and not below zero. */
static int numbers(struct reader *r, struct pd_bin v, const char *where, const char *key, uint32_t n, double *out)
{
    struct pd_iter it;
    char what[160], t[80];
    if (!pd_iter_open(&it, v, PD_T_ARRAY) || it.left != n) {
        snprintf(what, sizeof what, "%s: a list of %u numbers is expected", key, n);
        return bad(r, where, what);
    }
    for (uint32_t i = 0; i < n; i++) {
        struct pd_bin one = { 0 };
        if (!pd_iter_next(&it, &one) || !pd_get_float(one, &out[i]) || !isfinite(out[i]) || out[i] < 0 || out[i] > 1e15) {
            snprintf(what, sizeof what, "%s: %.60s is no number from 0 to 1e15", key, pd_value_text(one, t, sizeof t));
            return bad(r, where, what);
        }
    }
    return 0;
}

static int rows(struct reader *r, struct pd_bin v, const char *where, struct pd_profile_fit *f)
{
    struct pd_iter it;
    struct pd_bin one;
    char what[100];
    if (!pd_iter_open(&it, v, PD_T_ARRAY) || it.left < 1 || it.left > PD_PROFILE_ROWS) {
        snprintf(what, sizeof what, "rows: a list of 1 to %d rows is expected", PD_PROFILE_ROWS);
        return bad(r, where, what);
    }
    f->n = (uint32_t)it.left;
    if (!(f->row = pd_arena_alloc(&r->p->mem, (size_t)f->n * f->cols, sizeof *f->row, r->e)))
        return PD_ENOMEM;
    for (uint32_t i = 0; i < f->n; i++) {
        double *row = f->row + (size_t)i * f->cols;
        int rc = pd_iter_next(&it, &one) ? numbers(r, one, where, "rows", f->cols, row) : bad(r, where, "rows: cut off");
        if (rc)
            return rc;
        if (!(row[f->cols - 1] > 0)) {
            snprintf(what, sizeof what, "rows: row %u took no time", i + 1);
            return bad(r, where, what);
        }
    }
    return 0;
}

/* theta, p95 and rows, of `map`. */
static int fit(struct reader *r, struct pd_bin map, const char *where, int k, uint32_t cols, struct pd_profile_fit *f)
{
    struct pd_bin v;
    f->cols = cols;
    f->p95 = 1;
    int rc = find(map, "theta", &v) ? numbers(r, v, where, "theta", (uint32_t)k, f->theta) : bad(r, where, "theta is missing");
    if (rc == 0 && f->theta[0] + f->theta[1] + f->theta[2] <= 0)
        rc = bad(r, where, "theta: all coefficients are 0: nothing costs nothing");
    if (rc == 0 && find(map, "p95", &v) && (!pd_get_float(v, &f->p95) || !(f->p95 > 0 && f->p95 <= 1e6)))
        rc = bad(r, where, "p95 is no ratio above 0");
    if (rc == 0)
        rc = find(map, "rows", &v) ? rows(r, v, where, f) : bad(r, where, "rows is missing");
    f->k = rc == 0 ? k : 0;
    return rc;
}

static void means(const struct pd_profile_class *c, enum pd_profile_term term, struct pd_profile_fit *f)
{
    double x[PD_FIT_MOST];
    for (uint32_t i = 0; i < f->n; i++) {
        pd_profile_x(c, term, f->row + (size_t)i * f->cols, x);
        for (int j = 0; j < f->k; j++)
            f->typical[j] += x[j] / f->n;
    }
    for (int j = 0; j < f->k; j++)
        f->typical[j] = f->typical[j] > 0 ? f->typical[j] : 1;
}

static int class_(struct reader *r, struct pd_bin map, uint32_t i, struct pd_profile_class *c)
{
    struct pd_bin v;
    char where[64];
    int64_t n = 0;
    snprintf(where, sizeof where, "class %u: ", i + 1);
    if (pd_value_type(map) != PD_T_MAP)
        return bad(r, where, "no object");
    int rc = text(r, map, where, "model", true, &c->model);
    rc = rc ? rc : text(r, map, where, "cpu", true, &c->cpu);
    rc = rc ? rc : text(r, map, where, "weights", false, &c->weights);
    rc = rc ? rc : text(r, map, where, "kv_dtype", false, &c->kv_dtype);
    if (rc == 0 && (!find(map, "threads", &v) || !pd_get_int(v, &n) || n < 1 || n > 4096))
        rc = bad(r, where, "threads is missing, or no number from 1 to 4096");
    c->threads = (int)n;
    if (rc == 0 && find(map, "kv_token_bytes", &v) && (!pd_get_float(v, &c->kv_token_bytes) || !(c->kv_token_bytes > 0 && c->kv_token_bytes <= 1e9)))
        rc = bad(r, where, "kv_token_bytes is no number above 0");
    for (int t = 0; rc == 0 && t < PD_PT_TERMS; t++) {
        if (!find(map, pd_profile_term_names[t], &v))
            continue;
        snprintf(where, sizeof where, "class %u: %s: ", i + 1, pd_profile_term_names[t]);
        rc = pd_value_type(v) == PD_T_MAP ? fit(r, v, where, coefs[t], columns[t], &c->fit[t]) : bad(r, where, "no object");
        if (rc == 0 && t == PD_PT_MIXED && !(c->fit[PD_PT_PREFILL].k && c->fit[PD_PT_DECODE].k))
            rc = bad(r, where, "needs prefill and decode beside it");
        if (rc == 0)
            means(c, (enum pd_profile_term)t, &c->fit[t]);
    }
    return rc;
}

static int path(struct reader *r, struct pd_bin map, uint32_t i, struct pd_profile_path *t)
{
    char where[64];
    snprintf(where, sizeof where, "path %u: ", i + 1);
    if (pd_value_type(map) != PD_T_MAP)
        return bad(r, where, "no object");
    int rc = text(r, map, where, "scheme", true, &t->scheme);
    rc = rc ? rc : text(r, map, where, "class", false, &t->class_);
    rc = rc ? rc : fit(r, map, where, 2, 2, &t->fit);
    if (rc == 0)
        means(NULL, PD_PT_PACK, &t->fit);
    return rc;
}

/* The list under `key`; *n 0 when there is none. */
static int list(struct reader *r, struct pd_bin map, const char *key, uint32_t most, struct pd_iter *it, uint32_t *n)
{
    struct pd_bin v;
    char what[100];
    *n = 0;
    if (!find(map, key, &v))
        return 0;
    if (!pd_iter_open(it, v, PD_T_ARRAY) || it->left > most) {
        snprintf(what, sizeof what, "%s is no list of at most %u", key, most);
        return bad(r, "", what);
    }
    *n = (uint32_t)it->left;
    return 0;
}

static int whole(struct reader *r, struct pd_bin map)
{
    struct pd_profile *p = r->p;
    struct pd_str kind;
    struct pd_bin v;
    struct pd_iter it = { 0 };
    int64_t version = 0;
    if (!find(map, "pd", &v) || !pd_get_str(v, &kind) || !pd_str_eq(kind, "profile") || !find(map, "v", &v) || !pd_get_int(v, &version) || version != 1)
        return bad(r, "", "no profile that this build reads (\"pd\": \"profile\", \"v\": 1; pd-bench calibrate makes one)");
    int rc = list(r, map, "classes", PD_PROFILE_CLASSES, &it, &p->n_classes);
    if (rc == 0 && !(p->class_ = pd_arena_alloc(&p->mem, p->n_classes + 1, sizeof *p->class_, r->e)))
        rc = PD_ENOMEM;
    for (uint32_t i = 0; rc == 0 && i < p->n_classes; i++)
        rc = pd_iter_next(&it, &v) ? class_(r, v, i, &p->class_[i]) : bad(r, "", "classes: cut off");
    rc = rc ? rc : list(r, map, "paths", PD_PROFILE_PATHS, &it, &p->n_paths);
    if (rc == 0 && !(p->path = pd_arena_alloc(&p->mem, p->n_paths + 1, sizeof *p->path, r->e)))
        rc = PD_ENOMEM;
    for (uint32_t i = 0; rc == 0 && i < p->n_paths; i++)
        rc = pd_iter_next(&it, &v) ? path(r, v, i, &p->path[i]) : bad(r, "", "paths: cut off");
    if (rc == 0 && !p->n_classes && !p->n_paths)
        rc = bad(r, "", "it has neither classes nor paths");
    return rc;
}

int pd_profile_parse(const char *text_, size_t n, const char *name, struct pd_profile *p, struct pd_err *e)
{
    struct reader r = { p, name, e };
    struct pd_buf b = { 0 };
    *p = (struct pd_profile){ 0 };
    int rc = pd_json_to_msgpack(text_, n, &b, e);
    if (rc)
        rc = pd_err_prefix(e, "%s", name) == PD_ENOMEM ? PD_ENOMEM : (e ? e->code = PD_ECORRUPT : PD_ECORRUPT);
    rc = rc ? rc : whole(&r, (struct pd_bin){ b.p, b.n });
    pd_buf_free(&b);
    if (rc)
        pd_profile_free(p);
    return rc;
}

int pd_profile_read(const char *file, struct pd_profile *p, struct pd_err *e)
{
    struct pd_buf b = { 0 };
    int rc = pd_infile_read(file, MAX_FILE, "profile", &b, e);
    rc = rc ? rc : pd_profile_parse((const char *)b.p, b.n, file, p, e);
    pd_buf_free(&b);
    return rc;
}

void pd_profile_free(struct pd_profile *p)
{
    pd_arena_free(&p->mem);
    *p = (struct pd_profile){ 0 };
}

static bool same(struct pd_str a, struct pd_str b) { return a.n == b.n && !memcmp(a.p, b.p, a.n); }

const struct pd_profile_class *pd_profile_class(const struct pd_profile *p, struct pd_str model, const char *cpu, int threads)
{
    for (uint32_t i = 0; i < p->n_classes; i++) {
        const struct pd_profile_class *c = &p->class_[i];
        if (model.p && same(c->model, model) && (!cpu || pd_str_eq(c->cpu, cpu)) && (!threads || c->threads == threads))
            return c;
    }
    return NULL;
}

const struct pd_profile_path *pd_profile_path(const struct pd_profile *p, const char *scheme, const char *of)
{
    for (uint32_t i = 0; i < p->n_paths; i++)
        if (pd_str_eq(p->path[i].scheme, scheme) && (!of || !p->path[i].class_.p || pd_str_eq(p->path[i].class_, of)))
            return &p->path[i];
    return NULL;
}

static void prefill_x(double n, double context, double *x)
{
    x[0] = 1;
    x[1] = n;
    x[2] = n * (context + n / 2);
}

double pd_profile_cost(const struct pd_profile_fit *f, const double *x)
{
    double y = 0;
    for (int i = 0; i < f->k; i++)
        y += f->theta[i] * x[i];
    return y;
}

void pd_profile_x(const struct pd_profile_class *c, enum pd_profile_term term, const double *row, double x[PD_FIT_MOST])
{
    double p[PD_FIT_MOST];
    x[0] = 1;
    x[1] = row[0];
    x[2] = 0;
    if (term == PD_PT_PREFILL)
        prefill_x(row[0], row[1], x);
    else if (term == PD_PT_DECODE)
        x[2] = row[1];
    else if (term == PD_PT_MIXED) {
        prefill_x(row[0], row[1], p);
        x[1] = pd_profile_cost(&c->fit[PD_PT_PREFILL], p);
        x[2] = pd_profile_cost(&c->fit[PD_PT_DECODE], (double[PD_FIT_MOST]){ 1, row[2], row[3] });
    }
}

void pd_profile_open(const struct pd_profile_fit *f, const double edge[PD_BANDS - 1], struct pd_term *t) { pd_term_open(t, f->k, f->theta, f->typical, edge); }

void pd_profile_teach(const struct pd_profile_class *c, enum pd_profile_term term, const struct pd_profile_fit *f, const double edge[PD_BANDS - 1],
                      int64_t now_us, struct pd_term *t)
{
    double x[PD_FIT_MOST];
    pd_profile_open(f, edge, t);
    for (uint32_t i = 0; i < f->n; i++) {
        pd_profile_x(c, c ? term : PD_PT_PACK, f->row + (size_t)i * f->cols, x);
        pd_term_learn(t, x, f->row[(size_t)i * f->cols + f->cols - 1], now_us);
    }
}
