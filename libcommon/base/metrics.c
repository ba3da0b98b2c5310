#include <ctype.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include "metrics.h"
#include "utf8.h"

struct pd_metric {
    struct pd_metric *next;
    struct family *family;
    char *value[PD_METRIC_LABELS];
    _Atomic int64_t v;                  /* histogram: the sum */
    _Atomic int64_t bucket[];           /* [n_bounds + 1] of a histogram, not cumulative */
};

struct family {
    struct family *next;
    char *name, *help, *label[PD_METRIC_LABELS];
    enum pd_metric_type type;
    int scale, n_labels, n_bounds, n_series;
    int64_t bounds[PD_METRIC_BOUNDS];
    struct pd_metric *first, **last;
};

struct pd_metrics {
    struct family *first, **last;
    struct { void (*fn)(void *ctx); void *ctx; } before[8];
    int n_before;
};

const int64_t pd_latency_bounds[] = { 100, 250, 500, 1000, 2500, 5000, 10000, 25000, 50000, 100000, 250000, 500000, 1000000, 2500000, 5000000, 10000000,
                                     30000000, 60000000 };
const int pd_n_latency_bounds = sizeof pd_latency_bounds / sizeof *pd_latency_bounds;

int pd_metrics_new(struct pd_metrics **out, struct pd_err *e)
{
    struct pd_metrics *m = pd_calloc(1, sizeof *m, "a registry of metrics", e);
    if (!m)
        return PD_ENOMEM;
    m->last = &m->first;
    *out = m;
    return 0;
}

static void series_free(struct pd_metric *s)
{
    for (int i = 0; i < PD_METRIC_LABELS; i++)
        pd_free(s->value[i]);
    pd_free(s);
}

static void family_free(struct family *f)
{
    for (struct pd_metric *s = f->first, *next; s; s = next) {
        next = s->next;
        series_free(s);
    }
    for (int i = 0; i < PD_METRIC_LABELS; i++)
        pd_free(f->label[i]);
    pd_free(f->name);
    pd_free(f->help);
    pd_free(f);
}

void pd_metrics_free(struct pd_metrics *m)
{
    if (!m)
        return;
    for (struct family *f = m->first, *next; f; f = next) {
        next = f->next;
        family_free(f);
    }
    pd_free(m);
}

/* ---- families ---- */

static bool good_name(const char *s, bool colon)
{
    if (!s || !*s || isdigit((unsigned char)*s))
        return false;
    for (; *s; s++)
        if (!(*s >= 'a' && *s <= 'z') && !(*s >= 'A' && *s <= 'Z') && !(*s >= '0' && *s <= '9') && *s != '_' && !(colon && *s == ':'))
            return false;
    return true;
}

static int check(const struct pd_metric_about *a, struct pd_err *e)
{
    const char *name = a->name ? a->name : "";
    if (!good_name(a->name, true))
        return pd_fail(e, PD_EUSAGE, "metric '%s': a name is made of letters, digits, _ and :, and begins with no digit", name);
    for (int i = 0; i < PD_METRIC_LABELS && a->label[i]; i++) {
        if (!good_name(a->label[i], false) || !strncmp(a->label[i], "__", 2) || (a->type == PD_HISTOGRAM && !strcmp(a->label[i], "le")))
            return pd_fail(e, PD_EUSAGE, "metric %s: the label '%s' has a name that is not allowed", name, a->label[i]);
        for (int j = 0; j < i; j++)
            if (!strcmp(a->label[i], a->label[j]))
                return pd_fail(e, PD_EUSAGE, "metric %s: the label '%s' comes twice", name, a->label[i]);
    }
    if (a->scale < 0 || a->scale > 9)
        return pd_fail(e, PD_EUSAGE, "metric %s: scale %d is not 0 to 9", name, a->scale);
    if (a->n_bounds < 0 || a->n_bounds > PD_METRIC_BOUNDS || (a->n_bounds && a->type != PD_HISTOGRAM))
        return pd_fail(e, PD_EUSAGE, "metric %s: %d bounds (a histogram has at most %d)", name, a->n_bounds, PD_METRIC_BOUNDS);
    for (int i = 1; i < a->n_bounds; i++)
        if (a->bounds[i] <= a->bounds[i - 1])
            return pd_fail(e, PD_EUSAGE, "metric %s: its bounds do not rise", name);
    return 0;
}

static bool same(const struct family *f, const struct pd_metric_about *a)
{
    if (f->type != a->type || f->scale != a->scale || f->n_bounds != a->n_bounds)
        return false;
    for (int i = 0; i < f->n_bounds; i++)
        if (f->bounds[i] != a->bounds[i])
            return false;
    for (int i = 0; i < PD_METRIC_LABELS; i++) {
        if (!f->label[i] || !a->label[i])
            return !f->label[i] && !a->label[i];
        if (strcmp(f->label[i], a->label[i]))
            return false;
    }
    return true;
}

/* The names of a histogram's lines are its own too: none of them may be another family's. And a counter is known without its _total to who reads OpenMetrics. */
static bool collides(const char *a, enum pd_metric_type type, const char *b)
{
    static const char *const suffix[] = { "_total", "_bucket", "_sum", "_count" };
    size_t n = strlen(a);
    for (int i = 0; i < (type == PD_HISTOGRAM ? 4 : 1); i++)
        if (!strncmp(a, b, n) && !strcmp(b + n, suffix[i]))
            return true;
    return false;
}

static int family_get(struct pd_metrics *m, const struct pd_metric_about *a, struct family **out, struct pd_err *e)
{
    struct family *f;
    int rc = check(a, e);
    if (rc)
        return rc;
    for (f = m->first; f; f = f->next) {
        if (!strcmp(f->name, a->name)) {
            *out = f;
            return same(f, a) ? 0 : pd_fail(e, PD_EUSAGE, "metric %s: there is one of this name with another type, scale, bounds or labels", a->name);
        }
        if (collides(a->name, a->type, f->name) || collides(f->name, f->type, a->name))
            return pd_fail(e, PD_EUSAGE, "metric %s: its lines would be called like those of %s", a->name, f->name);
    }
    if (!(f = pd_calloc(1, sizeof *f, "a metric", e)))
        return PD_ENOMEM;
    f->type = a->type;
    f->scale = a->scale;
    f->n_bounds = a->n_bounds;
    if (a->n_bounds)
        memcpy(f->bounds, a->bounds, (size_t)a->n_bounds * sizeof *a->bounds);
    f->last = &f->first;
    const char *help = a->help ? a->help : "";
    bool ok = (f->name = pd_strndup(a->name, strlen(a->name), e)) && (f->help = pd_strndup(help, strlen(help), e));
    for (; ok && f->n_labels < PD_METRIC_LABELS && a->label[f->n_labels]; f->n_labels += ok)
        ok = (f->label[f->n_labels] = pd_strndup(a->label[f->n_labels], strlen(a->label[f->n_labels]), e));
    if (!ok) {
        family_free(f);
        return PD_ENOMEM;
    }
    *m->last = f;
    m->last = &f->next;
    *out = f;
    return 0;
}

/* ---- series ---- */

int pd_metric_get(struct pd_metrics *m, const struct pd_metric_about *about, const char *const values[PD_METRIC_LABELS], struct pd_metric **out,
                  struct pd_err *e)
{
    struct family *f = NULL;
    struct pd_metric *s;
    int rc = family_get(m, about, &f, e), i;
    if (rc)
        return rc;
    for (s = f->first; s; s = s->next) {
        for (i = 0; i < f->n_labels && !strcmp(s->value[i], values && values[i] ? values[i] : ""); i++) {}
        if (i == f->n_labels) {
            *out = s;
            return 0;
        }
    }
    if (f->n_series == PD_METRIC_SERIES)
        return pd_fail(e, PD_ENOMEM, "metric %s has %d series; no more are made", f->name, PD_METRIC_SERIES);
    size_t buckets = f->type == PD_HISTOGRAM ? (size_t)f->n_bounds + 1 : 0;
    if (!(s = pd_calloc(1, sizeof *s + buckets * sizeof s->bucket[0], "a metric", e)))
        return PD_ENOMEM;
    for (i = 0; i < f->n_labels; i++) {
        const char *v = values && values[i] ? values[i] : "";
        if (!(s->value[i] = pd_strndup(v, strlen(v), e))) {
            series_free(s);
            return PD_ENOMEM;
        }
    }
    s->family = f;
    *f->last = s;
    f->last = &s->next;
    f->n_series++;
    *out = s;
    return 0;
}

void pd_metric_drop(struct pd_metrics *m, struct pd_metric *s)
{
    (void)m;
    if (!s)
        return;
    for (struct pd_metric **q = &s->family->first; *q; q = &(*q)->next)
        if (*q == s) {
            *q = s->next;
            if (!*q)
                s->family->last = q;
            s->family->n_series--;
            series_free(s);
            return;
        }
}

void pd_metric_add(struct pd_metric *s, int64_t n)
{
    if (s)
        atomic_fetch_add_explicit(&s->v, n, memory_order_relaxed);
}

void pd_metric_set(struct pd_metric *s, int64_t v)
{
    if (s)
        atomic_store_explicit(&s->v, v, memory_order_relaxed);
}

void pd_metric_observe(struct pd_metric *s, int64_t v)
{
    if (!s)
        return;
    int i = 0;
    while (i < s->family->n_bounds && v > s->family->bounds[i])
        i++;
    atomic_fetch_add_explicit(&s->bucket[i], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&s->v, v, memory_order_relaxed);
}

int64_t pd_metric_value(const struct pd_metric *s)
{
    int64_t n = 0;
    if (!s)
        return 0;
    if (s->family->type != PD_HISTOGRAM)
        return atomic_load_explicit(&s->v, memory_order_relaxed);
    for (int i = 0; i <= s->family->n_bounds; i++)
        n += atomic_load_explicit(&s->bucket[i], memory_order_relaxed);
    return n;
}

/* ---- text ---- */

int pd_metrics_before(struct pd_metrics *m, void (*fn)(void *ctx), void *ctx, struct pd_err *e)
{
    if (m->n_before == (int)(sizeof m->before / sizeof *m->before))
        return pd_fail(e, PD_ENOMEM, "more than %d functions look up metrics", m->n_before);
    m->before[m->n_before].fn = fn;
    m->before[m->n_before++].ctx = ctx;
    return 0;
}

/* v / 10^scale, exactly and without needless zeros. */
static void decimal(int64_t v, int scale, char out[32])
{
    uint64_t u = v < 0 ? 0 - (uint64_t)v : (uint64_t)v, unit = 1;
    for (int i = 0; i < scale; i++)
        unit *= 10;
    int n = snprintf(out, 32, "%s%" PRIu64, v < 0 ? "-" : "", u / unit);
    if (u % unit) {
        n += snprintf(out + n, 32 - (size_t)n, ".%0*" PRIu64, scale, u % unit);
        while (out[n - 1] == '0')
            out[--n] = 0;
    }
}

/* In a label's value \ " and newline are escaped, in a help text \ and newline. */
static int escaped(const char *s, bool quote, struct pd_buf *out, struct pd_err *e)
{
    int rc = 0;
    size_t n = strlen(s), k;
    for (size_t i = 0; !rc && i < n; i += k) {
        uint32_t cp;
        char u[4];
        k = (size_t)pd_utf8_next(s + i, n - i, &cp);
        if (cp == '\\')
            rc = pd_buf_add(out, "\\\\", 2, e);
        else if (cp == '\n')
            rc = pd_buf_add(out, "\\n", 2, e);
        else if (cp == '"' && quote)
            rc = pd_buf_add(out, "\\\"", 2, e);
        else
            rc = pd_buf_add(out, u, (size_t)pd_utf8_put(cp, u), e);
    }
    return rc;
}

static int line(const struct family *f, const struct pd_metric *s, const char *suffix, const char *le, int64_t v, int scale, struct pd_buf *out,
                struct pd_err *e)
{
    char text[32];
    bool any = f->n_labels || le;
    int rc = pd_buf_printf(out, e, "%s%s%s", f->name, suffix, any ? "{" : "");
    for (int i = 0; !rc && i < f->n_labels; i++) {
        rc = pd_buf_printf(out, e, "%s%s=\"", i ? "," : "", f->label[i]);
        rc = rc ? rc : escaped(s->value[i], true, out, e);
        rc = rc ? rc : pd_buf_add(out, "\"", 1, e);
    }
    if (!rc && le)
        rc = pd_buf_printf(out, e, "%sle=\"%s\"", f->n_labels ? "," : "", le);
    decimal(v, scale, text);
    return rc ? rc : pd_buf_printf(out, e, "%s %s\n", any ? "}" : "", text);
}

static int histogram(const struct family *f, const struct pd_metric *s, struct pd_buf *out, struct pd_err *e)
{
    int64_t sum = atomic_load_explicit(&s->v, memory_order_relaxed), n = 0;
    int rc = 0;
    for (int i = 0; !rc && i <= f->n_bounds; i++) {     /* read once, so that the count is that of the last bucket */
        char le[32] = "+Inf";
        if (i < f->n_bounds)
            decimal(f->bounds[i], f->scale, le);
        n += atomic_load_explicit(&s->bucket[i], memory_order_relaxed);
        rc = line(f, s, "_bucket", le, n, 0, out, e);
    }
    rc = rc ? rc : line(f, s, "_sum", NULL, sum, f->scale, out, e);
    return rc ? rc : line(f, s, "_count", NULL, n, 0, out, e);
}

int pd_metrics_text(struct pd_metrics *m, struct pd_buf *out, struct pd_err *e)
{
    static const char *const type[] = { "counter", "gauge", "histogram" };
    size_t from = out->n;
    int rc = 0;
    for (int i = 0; i < m->n_before; i++)
        m->before[i].fn(m->before[i].ctx);
    for (const struct family *f = m->first; !rc && f; f = f->next) {
        if (!f->first)
            continue;
        rc = pd_buf_printf(out, e, "# HELP %s ", f->name);
        rc = rc ? rc : escaped(f->help, false, out, e);
        rc = rc ? rc : pd_buf_printf(out, e, "\n# TYPE %s %s\n", f->name, type[f->type]);
        for (const struct pd_metric *s = f->first; !rc && s; s = s->next)
            rc = f->type == PD_HISTOGRAM ? histogram(f, s, out, e) : line(f, s, "", NULL, atomic_load_explicit(&s->v, memory_order_relaxed), f->scale, out, e);
    }
    if (rc)
        out->n = from;
    return rc;
}
