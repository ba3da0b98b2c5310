/* pd-trace drift: how far what each term of a decision took was from what was expected, window by window; which of them left its band first, and what that
 * points to.
 *
 * A term is in its band as long as no fewer of its runs lie within P95 than chance explains (one window in a hundred is allowed to fall below), and the median of
 * its relative errors is below WIDE. Differences that are small (SMALL, or so little of the time to the first token) are not held against it. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include "history.h"
#include "names.h"

enum { T_CACHE, T_WAY /* + enum pd_way_term */, TERMS = T_WAY + PD_WT_N, WINDOWS = 10 /* by default */, WINDOWS_MOST = 1000, FEW = 10 /* runs, too few to judge */,
       GROUPS = 24 /* named in words, a term */ };
#define LATE ((int64_t)1 << 60)         /* us; no clock says more */
static const double WIDE = 0.25, SMALL_SHARE = 0.02, Z = 2.33;

/* By what a term's runs are told apart: where the prompt was computed, the path, where it decodes. */
enum by { BY_NONE, BY_PREFILL, BY_PATH, BY_DECODE };
static const struct term { const char *name; double small /* us; cache: tokens */; enum by by; const char *points; } terms[TERMS] = {
    [T_CACHE] = { "cache", 1, BY_DECODE, "the cache: the index of who holds what is behind (events that were lost or come late, evictions)" },
    [T_WAY + PD_WT_QUEUE] = { "queue", 1000, BY_PREFILL, "the queue: load reports that are late or wrong, or work that others give to the workers" },
    [T_WAY + PD_WT_PREFILL] = { "prefill", 1000, BY_PREFILL, "the engine: prefill is not what was measured (another clock or batch, a busy host), or the prefill worker's own cache" },
    [T_WAY + PD_WT_TRANSFER] = { "transfer", 1000, BY_PATH, "the network: a path is slower than it was, or more share it" },
    [T_WAY + PD_WT_SYNC] = { "sync", 1000, BY_PATH, "the network or the hand-over: offers, checks and room in the decode batch take longer" },
    [T_WAY + PD_WT_TPOT] = { "tpot", 100, BY_DECODE, "the engine: decode is not what was measured, or its batch is another than was reported" },
    [T_WAY + PD_WT_TTFT] = { "ttft", 1000, BY_PREFILL, "waiting that no term accounts for" },
    [T_WAY + PD_WT_COMPLETION] = { "completion", 1000, BY_DECODE, "the length of outputs: more or fewer tokens than were expected" } };
/* What is looked at first: causes before their sums. */
static const int order[TERMS] = { T_CACHE, T_WAY + PD_WT_QUEUE, T_WAY + PD_WT_PREFILL, T_WAY + PD_WT_TRANSFER, T_WAY + PD_WT_SYNC, T_WAY + PD_WT_TPOT, T_WAY + PD_WT_TTFT,
                                  T_WAY + PD_WT_COMPLETION };

struct sample { int64_t t_us; unsigned has; float p50[TERMS], p95[TERMS], took[TERMS]; uint32_t who[BY_DECODE + 1]; };
struct figure { uint64_t n, within /* P95 */, near /* or so little past it that it is not held against it */; double error, ratio /* medians */, apart, least; bool judged, out; };

struct drift {
    const struct pd_review_opts *o;
    struct pd_names names;
    struct sample *s;
    size_t n, cap;
    uint64_t otherwise;
    float *room;                /* [2 n] */
    int64_t window_us;
    uint32_t windows;
    double ttft_us;             /* median of what it took */
};

/* ---- what came of each decision ---- */

static int ended(void *ctx, const struct pd_route_rec *r, const struct pd_outcome_rec *o, struct pd_err *e)
{
    struct drift *x = ctx;
    struct pd_spread want[PD_WT_N];
    int64_t took[PD_WT_N];
    if (!pd_way_done(r, o)) {
        x->otherwise++;
        return 0;
    }
    if (x->n == x->cap) {
        size_t cap = x->cap ? 2 * x->cap : 1024;
        struct sample *s = pd_realloc(x->s, cap, sizeof *s, "what runs took", e);
        if (!s)
            return PD_ENOMEM;
        x->s = s;
        x->cap = cap;
    }
    const struct pd_route_pair *way = &r->pair[r->chosen.pair];
    const struct pd_route_row *d = &r->d[way->d];
    struct sample *s = &x->s[x->n];
    *s = (struct sample){ .t_us = r->t_us < 0 ? 0 : r->t_us > LATE ? LATE : r->t_us, .has = (pd_way_expected(r, way, want) & pd_way_took(o, took)) << T_WAY };
    for (int i = 0; i < PD_WT_N; i++) {
        s->p50[T_WAY + i] = (float)want[i].p50;
        s->p95[T_WAY + i] = (float)want[i].p95;
        s->took[T_WAY + i] = (float)took[i];
    }
    if (r->input.exact && o->cached_tokens <= o->prompt_tokens) {       /* tokens that D lacks; one block more or less is none */
        s->has |= 1 << T_CACHE;
        s->p50[T_CACHE] = (float)d->miss_tokens;
        s->p95[T_CACHE] = (float)d->miss_tokens + (float)r->input.block_size;
        s->took[T_CACHE] = (float)(o->prompt_tokens - o->cached_tokens);
    }
    int rc = pd_name_of(&x->names, way->p < 0 ? d->worker : r->p[way->p].worker, &s->who[BY_PREFILL], e);
    rc = rc ? rc : pd_name_of(&x->names, d->worker, &s->who[BY_DECODE], e);
    rc = rc || way->p < 0 ? rc : pd_name_of_path(&x->names, r, way, &s->who[BY_PATH], e);
    x->n += rc == 0;
    return rc;
}

/* ---- figures ---- */

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static int by_time(const void *a, const void *b)
{
    const struct sample *x = a, *y = b;
    return (x->t_us > y->t_us) - (x->t_us < y->t_us);
}

static double median(float *v, size_t n)
{
    if (!n)
        return 0;
    qsort(v, n, sizeof *v, by_value);
    return n % 2 ? (double)v[n / 2] : ((double)v[n / 2 - 1] + (double)v[n / 2]) / 2;
}

/* How much off is nothing to speak of. */
static double slack(const struct drift *x, int term)
{
    double share = term >= T_WAY && term < T_WAY + PD_WT_TTFT ? SMALL_SHARE * x->ttft_us : 0;
    return share > terms[term].small ? share : terms[term].small;
}

/* Of the samples [from, to); who: of terms[term].by, -1: all. */
static struct figure figure(const struct drift *x, size_t from, size_t to, int term, int64_t who)
{
    struct figure f = { 0 };
    float *error = x->room, *ratio = x->room + x->n;
    double small = slack(x, term), apart;
    size_t ratios = 0;
    for (size_t i = from; i < to; i++) {
        const struct sample *s = &x->s[i];
        if (!(s->has >> term & 1) || (who >= 0 && s->who[terms[term].by] != (uint32_t)who))
            continue;
        double took = (double)s->took[term], want = (double)s->p50[term];
        error[f.n++] = (float)(fabs(took - want) / (took > terms[term].small ? took : terms[term].small));
        if (want > 0)
            ratio[ratios++] = (float)(took / want);
        f.within += s->took[term] <= s->p95[term];
        f.near += took <= (double)s->p95[term] + small;
    }
    f.error = median(error, f.n);
    f.ratio = ratios ? median(ratio, ratios) : 0;
    size_t k = 0;
    for (size_t i = from; i < to; i++)
        if (x->s[i].has >> term & 1 && (who < 0 || x->s[i].who[terms[term].by] == (uint32_t)who))
            error[k++] = fabsf(x->s[i].took[term] - x->s[i].p50[term]);
    f.apart = apart = median(error, k);
    f.least = 0.95 * (double)f.n - Z * sqrt(0.95 * 0.05 * (double)f.n);
    f.judged = f.n >= FEW;
    f.out = f.judged && ((double)f.near < f.least || (f.error > WIDE && apart > small));
    return f;
}

static double share(const struct figure *f) { return f->n ? 100 * (double)f->within / (double)f->n : 0; }
static size_t begins(const struct drift *x, uint32_t w)         /* the first sample of window w */
{
    size_t lo = 0, hi = x->n;
    int64_t at = x->s[0].t_us + (int64_t)w * x->window_us;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        *(x->s[mid].t_us < at ? &lo : &hi) = x->s[mid].t_us < at ? mid + 1 : mid;
    }
    return lo;
}

static struct figure of_window(const struct drift *x, uint32_t w, int term, int64_t who)
{
    return figure(x, begins(x, w), w + 1 == x->windows ? x->n : begins(x, w + 1), term, who);
}

/* 1, 2 or 5 times a power of ten, not below us. */
static int64_t round_up(int64_t us)
{
    static const int step[] = { 1, 2, 5 };
    for (int64_t ten = 1000;; ten *= 10)
        for (int i = 0; i < 3; i++)
            if (ten * step[i] >= us)
                return ten * step[i];
}

static int cut(struct drift *x, struct pd_err *e)
{
    double span;
    size_t n = 0;
    qsort(x->s, x->n, sizeof *x->s, by_time);
    span = (double)x->s[x->n - 1].t_us - (double)x->s[0].t_us;
    if (span > (double)PD_US_MOST)
        return pd_fail(e, PD_ECORRUPT, "the decisions of this log are %.0f days apart: its clock was set, or it is of several routers; cut it", span / 86400e6);
    x->window_us = x->o->window_us ? x->o->window_us : round_up((int64_t)span / WINDOWS + 1);
    if (span / (double)x->window_us >= WINDOWS_MOST)
        return pd_fail(e, PD_EUSAGE, "--window: %.3f s of log make %.0f windows of %.3f s; at most %d (example: --window 1m)", span / 1e6, span / (double)x->window_us,
                       (double)x->window_us / 1e6, WINDOWS_MOST);
    x->windows = (uint32_t)((int64_t)span / x->window_us) + 1;
    if (!(x->room = pd_calloc(2 * x->n, sizeof *x->room, "figures", e)))
        return PD_ENOMEM;
    for (size_t i = 0; i < x->n; i++)
        if (x->s[i].has >> (T_WAY + PD_WT_TTFT) & 1)
            x->room[n++] = x->s[i].took[T_WAY + PD_WT_TTFT];
    x->ttft_us = median(x->room, n);
    return 0;
}

/* ---- the report ---- */

static void put_figures(FILE *out, const struct figure *f)
{
    char ratio[16] = "-";
    if (f->ratio > 0)
        snprintf(ratio, sizeof ratio, "%.2f", f->ratio);
    fprintf(out, "%9" PRIu64 " %8.1f %% %8s %8.1f %%", f->n, 100 * f->error, ratio, share(f));
}

static void json_figures(FILE *out, const struct figure *f)
{
    fprintf(out, "\"n\":%" PRIu64 ",\"error\":%.6f,\"ratio\":%.6f,\"covered\":%.6f,\"judged\":%s,\"out\":%s", f->n, f->error, f->ratio, share(f) / 100, f->judged ? "true" : "false",
            f->out ? "true" : "false");
}

static void put_row(struct drift *x, int term, int64_t who)
{
    FILE *out = x->o->log.out;
    struct figure all = figure(x, 0, x->n, term, who);
    char name[64];
    if (!all.n)
        return;
    snprintf(name, sizeof name, who < 0 ? "%s" : "  %s", who < 0 ? terms[term].name : x->names.name[who]);
    if (x->o->log.json) {
        fprintf(out, "{\"term\":\"%s\",", terms[term].name);
        if (who >= 0) {
            pd_report_json(out, terms[term].by == BY_PATH ? "path" : "worker", (struct pd_str){ x->names.name[who], strlen(x->names.name[who]) });
            putc(',', out);
        }
        json_figures(out, &all);
        fputs(",\"windows\":[", out);
        for (uint32_t w = 0; w < x->windows; w++) {
            struct figure f = of_window(x, w, term, who);
            fprintf(out, "%s{\"t_us\":%" PRId64 ",", w ? "," : "", x->s[0].t_us + (int64_t)w * x->window_us);
            json_figures(out, &f);
            putc('}', out);
        }
        fputs("]}\n", out);
        return;
    }
    for (char *p = name; *p; p++)
        *p = (unsigned char)*p < 0x20 || *p == 0x7f ? '?' : *p;
    fprintf(out, "%-24.24s", name);
    put_figures(out, &all);
    fputs("  ", out);
    for (uint32_t w = 0; w < x->windows; w++) {
        struct figure f = of_window(x, w, term, who);
        putc(!f.n ? ' ' : !f.judged ? '-' : f.out ? '!' : '.', out);
    }
    putc('\n', out);
}

/* Each worker or path of a term, when there are several. */
static void put_groups(struct drift *x, int term)
{
    uint32_t told = 0, all = 0;
    for (int pass = 0; pass < 2 && terms[term].by; pass++)
        for (uint32_t k = 0; k < x->names.n; k++) {
            bool any = false;
            for (size_t i = 0; i < x->n && !any; i++)
                any = x->s[i].has >> term & 1 && x->s[i].who[terms[term].by] == k;
            all += any && !pass;
            if (any && pass && all > 1 && (x->o->log.json || told++ < GROUPS))
                put_row(x, term, k);
        }
}

/* Whose runs are furthest from their band; -1: they are not told apart. */
static int64_t worst(const struct drift *x, uint32_t w, int term)
{
    int64_t at = -1;
    double most = 0;
    int groups = 0;
    for (uint32_t k = 0; k < x->names.n && terms[term].by; k++) {
        struct figure f = of_window(x, w, term, k);
        double off = f.n ? 1 - (double)f.near / (double)f.n + f.error / 100 : 0;
        groups += f.n > 0;
        if (f.n && off > most) {
            most = off;
            at = k;
        }
    }
    return groups > 1 ? at : -1;
}

static void put_first(struct drift *x)
{
    FILE *out = x->o->log.out;
    char at[32];
    uint32_t w = 0, k = 0;
    bool any_judged = false;
    struct figure f = { 0 };
    for (; w < x->windows && !f.out; w++)
        for (k = 0; k < TERMS && !f.out; k++) {
            f = of_window(x, w, order[k], -1);
            any_judged |= f.judged;
        }
    if (!f.out) {
        if (x->o->log.json)
            fputs("{\"first\":null}\n", out);
        else
            fputs(any_judged ? "every term stayed in its band\n" : "no window has runs enough to judge (a wider --window, or a longer log)\n", out);
        return;
    }
    int term = order[k - 1];
    int64_t who = worst(x, w - 1, term), t_us = x->s[0].t_us + (int64_t)(w - 1) * x->window_us;
    if (x->o->log.json) {
        fprintf(out, "{\"first\":\"%s\",\"t_us\":%" PRId64 ",\"window\":%u,", terms[term].name, t_us, w - 1);
        json_figures(out, &f);
        fputs(",\"worst\":", out);
        if (who >= 0) {
            putc('{', out);
            pd_report_json(out, "name", (struct pd_str){ x->names.name[who], strlen(x->names.name[who]) });
            putc('}', out);
        } else
            fputs("null", out);
        fprintf(out, ",\"points\":\"%s\"}\n", terms[term].points);
        return;
    }
    fprintf(out, "%s left its band first, in the window from %s: %.1f %% of %" PRIu64 " runs within P95", terms[term].name, pd_report_time(t_us, at), share(&f), f.n);
    if ((double)f.near < f.least)
        fprintf(out, " (chance explains %.1f %%)", 100 * f.least / (double)f.n);
    fprintf(out, ", median error %.1f %%", 100 * f.error);
    if (f.ratio > 0)
        fprintf(out, ", it took %.2f times what was expected", f.ratio);
    if (who >= 0) {
        struct figure g = of_window(x, w - 1, term, who);
        fputs("; worst ", out);
        pd_report_plain(out, (struct pd_str){ x->names.name[who], strlen(x->names.name[who]) });
        fprintf(out, " (%.1f %% of %" PRIu64 ")", share(&g), g.n);
    }
    fprintf(out, "\nthis points to %s\n", terms[term].points);
}

static void put_all(struct drift *x, const struct pd_history_sum *sum)
{
    FILE *out = x->o->log.out;
    char from[32], to[32];
    if (!x->o->log.json) {
        fprintf(out, "%zu runs, decided from %s to %s, in %u window%s of %.3f s; left out: %" PRIu64 " that came otherwise than decided, %" PRIu64 " without an outcome\n", x->n,
                pd_report_time(x->s[0].t_us, from), pd_report_time(x->s[x->n - 1].t_us, to), x->windows, x->windows == 1 ? "" : "s", (double)x->window_us / 1e6, x->otherwise, sum->open);
        fprintf(out, "%-24s%9s %10s %8s %10s  windows\n", "", "n", "error", "took/P50", "in P95");
    }
    for (int i = 0; i < TERMS; i++) {
        put_row(x, order[i], -1);
        put_groups(x, order[i]);
    }
    put_first(x);
}

int pd_review_drift(const struct pd_review_opts *o, int *status, struct pd_err *e)
{
    struct drift x = { .o = o };
    struct pd_history h = { .ended = ended, .ctx = &x };
    struct pd_log *log = NULL;
    int rc = pd_history_walk(&o->log, &h, &log, e);
    if (!rc && x.n)
        rc = cut(&x, e);
    if (!rc && x.n)
        put_all(&x, &h.sum);
    if (!rc)
        rc = pd_history_end(&o->log, &h, log, status, e);
    if (!rc && !x.n)
        rc = pd_fail(e, PD_EFAIL, "none of %" PRIu64 " runs came as it was decided: nothing can be held against its estimate (pd-trace why RUN tells of one)", h.sum.joined);
    pd_names_free(&x.names);
    pd_free(x.s);
    pd_free(x.room);
    pd_log_free(log);
    return rc;
}
