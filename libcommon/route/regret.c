/* pd-trace regret: what each run took, held against what the best other way would have been expected to take.
 *
 * The other way was never done, so its cost is its estimate, each term corrected by how far that term was off in runs that were done that way (the median
 * difference of waiting and moving, the median ratio of prefill and of a token), for as many tokens as came. What others are made to wait, and a path's penalty,
 * count on both sides as they were estimated. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include "history.h"
#include "names.h"

enum { WORST = 10, ENOUGH = 10 /* runs of a kind, to correct by */, TERMS = PD_WT_TPOT + 1 /* all but the sums */ };
static const int part[] = { PD_WT_QUEUE, PD_WT_PREFILL, PD_WT_TRANSFER, PD_WT_SYNC, PD_WT_TPOT };
enum { PARTS = sizeof part / sizeof *part };

struct way { bool any; uint32_t name; double p50[TERMS], others /* us, with the path's penalty */; };
struct kept {
    char run[PD_RUN_LEN + 1];
    bool remote;
    unsigned has;               /* of took */
    double took[TERMS], completion, tokens;
    struct way done, other[2];  /* the best of each kind but the one that was done */
    double regret, gain;        /* us; gain: how much better it was than the other, below 0 worse */
    uint8_t best;
};
struct bias { uint64_t n; double of[TERMS]; bool any[TERMS]; };

struct regret {
    const struct pd_review_opts *o;
    struct pd_names names;
    struct kept *k;
    size_t n, cap;
    uint64_t otherwise, untold, alone, drawn;
    struct bias bias[2];        /* local, remote */
};

static bool ratio_of(int term) { return term == PD_WT_PREFILL || term == PD_WT_TPOT; }
static double ms(double us) { return us / 1e3; }

/* ---- what came of each decision ---- */

static int way_of(struct regret *x, const struct pd_route_rec *r, const struct pd_route_pair *o, struct way *w, struct pd_err *e)
{
    struct pd_spread want[PD_WT_N];
    pd_way_expected(r, o, want);
    *w = (struct way){ .any = true, .others = (double)pd_pair_others(r, o) + (o->path >= 0 ? (double)r->paths[o->path].penalty_us : 0) };
    for (int i = 0; i < TERMS; i++)
        w->p50[i] = i == PD_WT_TTFT ? 0 : (double)want[i].p50;
    return pd_name_of_way(&x->names, r, o, &w->name, e);
}

/* By P50, since that is what it is held against. */
static const struct pd_route_pair *best_but(const struct pd_route_rec *r, bool remote)
{
    const struct pd_route_pair *best = NULL;
    for (uint32_t i = 0; i < r->n_pairs; i++) {
        const struct pd_route_pair *o = &r->pair[i];
        if (o->x || (o->p >= 0) != remote || (int32_t)i == r->chosen.pair)
            continue;
        if (!best || o->completion.p50 + pd_pair_others(r, o) < best->completion.p50 + pd_pair_others(r, best))
            best = o;
    }
    return best;
}

static int ended(void *ctx, const struct pd_route_rec *r, const struct pd_outcome_rec *o, struct pd_err *e)
{
    struct regret *x = ctx;
    int64_t took[PD_WT_N];
    unsigned has = pd_way_took(o, took);
    if (!pd_way_done(r, o) || r->resumed) {
        x->otherwise++;
        return 0;
    }
    const struct pd_route_pair *other[2] = { best_but(r, false), best_but(r, true) };
    bool told = has >> PD_WT_COMPLETION & 1 && o->completion_tokens;
    x->untold += !told;
    x->alone += told && !other[0] && !other[1];
    x->drawn += r->propensity < 1;
    if (!told)
        return 0;
    if (x->n == x->cap) {
        size_t cap = x->cap ? 2 * x->cap : 256;
        struct kept *k = pd_realloc(x->k, cap, sizeof *k, "what runs took", e);
        if (!k)
            return PD_ENOMEM;
        x->k = k;
        x->cap = cap;
    }
    struct kept *k = &x->k[x->n];
    *k = (struct kept){ .remote = r->chosen.mode == PD_MODE_REMOTE, .has = has, .completion = (double)took[PD_WT_COMPLETION],
                        .tokens = ceil((double)o->completion_tokens / (r->input.n ? r->input.n : 1)) };
    memcpy(k->run, r->run, sizeof k->run);
    for (int i = 0; i < TERMS; i++)
        k->took[i] = (double)took[i];
    int rc = way_of(x, r, &r->pair[r->chosen.pair], &k->done, e);
    for (int i = 0; i < 2 && !rc; i++)
        rc = other[i] ? way_of(x, r, other[i], &k->other[i], e) : 0;
    x->n += rc == 0;
    return rc;
}

/* ---- by how much the terms are off ---- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(const double *sorted, size_t n, double q)
{
    size_t at = (size_t)ceil(q * (double)n);
    return n ? sorted[at ? at - 1 : 0] : 0;
}

static int measure(struct regret *x, struct pd_err *e)
{
    double *v = pd_calloc(x->n, sizeof *v, "figures", e);
    if (!v)
        return PD_ENOMEM;
    for (int remote = 0; remote < 2; remote++)
        for (int i = 0; i < PARTS; i++) {
            int term = part[i];
            struct bias *b = &x->bias[remote];
            size_t n = 0;
            b->n = 0;
            for (size_t j = 0; j < x->n; j++) {
                const struct kept *k = &x->k[j];
                b->n += k->remote == remote;
                if (k->remote == remote && k->has >> term & 1 && (!ratio_of(term) || k->done.p50[term] > 0))
                    v[n++] = ratio_of(term) ? k->took[term] / k->done.p50[term] : k->took[term] - k->done.p50[term];
            }
            qsort(v, n, sizeof *v, by_value);
            b->any[term] = n >= ENOUGH;
            b->of[term] = b->any[term] ? (quantile(v, n, 0.5) + v[n / 2]) / 2 : ratio_of(term);
        }
    pd_free(v);
    return 0;
}

static double corrected(const struct regret *x, bool remote, const struct way *w, double tokens)
{
    const struct bias *b = &x->bias[remote];
    double sum = 0;
    for (int i = 0; i < PARTS; i++) {
        int term = part[i];
        if (!remote && (term == PD_WT_TRANSFER || term == PD_WT_SYNC))
            continue;
        double v = ratio_of(term) ? w->p50[term] * b->of[term] : w->p50[term] + b->of[term];
        sum += (v > 0 ? v : 0) * (term == PD_WT_TPOT ? tokens - 1 : 1);
    }
    return sum;
}

static void judge(struct regret *x)
{
    for (size_t j = 0; j < x->n; j++) {
        struct kept *k = &x->k[j];
        double least = INFINITY;
        for (int i = 0; i < 2; i++) {
            double cost = k->other[i].any ? corrected(x, i, &k->other[i], k->tokens) + k->other[i].others : INFINITY;
            if (cost < least) {
                least = cost;
                k->best = (uint8_t)i;
            }
        }
        k->gain = isinf(least) ? 0 : least - (k->completion + k->done.others);
        k->regret = k->gain < 0 ? -k->gain : 0;
    }
}

/* ---- the report ---- */

struct sums { uint64_t judged, misjudged, wrong[2] /* local, remote: misjudged and done so */; double regret, gain, took, *sorted; };

static bool can_judge(const struct kept *k) { return k->other[0].any || k->other[1].any; }

static bool misjudged(const struct regret *x, const struct kept *k)
{
    double most = x->o->least_us < 0 ? PD_REGRET_US : (double)x->o->least_us, rel = (x->o->least_share < 0 ? PD_REGRET_SHARE : x->o->least_share) * k->completion;
    return can_judge(k) && k->regret > (most > rel ? most : rel);
}

static void add_up(const struct regret *x, struct sums *s)
{
    for (size_t j = 0; j < x->n; j++) {
        const struct kept *k = &x->k[j];
        if (!can_judge(k))
            continue;
        bool bad = misjudged(x, k);
        s->sorted[s->judged++] = k->regret;
        s->misjudged += bad;
        s->wrong[k->remote] += bad;
        s->regret += k->regret;
        s->gain += k->gain;
        s->took += k->completion;
    }
    qsort(s->sorted, s->judged, sizeof *s->sorted, by_value);
}

static void put_bias(const struct regret *x)
{
    FILE *out = x->o->log.out;
    fprintf(out, "what terms took beside their estimate, which corrects the ways that were not done:\n%-10s%8s", "", "runs");
    for (int i = 0; i < PARTS; i++)
        fprintf(out, "%14s", pd_way_terms[part[i]]);
    putc('\n', out);
    for (int remote = 0; remote < 2; remote++) {
        const struct bias *b = &x->bias[remote];
        fprintf(out, "%-10s%8" PRIu64, remote ? "remote" : "local", b->n);
        for (int i = 0; i < PARTS; i++) {
            int t = part[i];
            char text[24] = "-";
            if (b->any[t])
                snprintf(text, sizeof text, ratio_of(t) ? "x %.3f" : "%+.1f ms", ratio_of(t) ? b->of[t] : ms(b->of[t]));
            fprintf(out, "%14s", text);
        }
        putc('\n', out);
    }
}

static void put_name(const struct regret *x, uint32_t i) { pd_report_plain(x->o->log.out, (struct pd_str){ x->names.name[i], strlen(x->names.name[i]) }); }

static void put_one(const struct regret *x, const struct kept *k)
{
    FILE *out = x->o->log.out;
    const struct way *w = &k->other[k->best];
    double cost = corrected(x, k->best, w, k->tokens);
    if (x->o->log.json) {
        fprintf(out, "{\"run\":\"%s\",\"mode\":\"%s\",", k->run, k->remote ? "remote" : "local");
        pd_report_json(out, "way", (struct pd_str){ x->names.name[k->done.name], strlen(x->names.name[k->done.name]) });
        fprintf(out, ",\"took_ms\":%.3f,\"others_ms\":%.3f,\"other_mode\":\"%s\",", ms(k->completion), ms(k->done.others), k->best ? "remote" : "local");
        pd_report_json(out, "other", (struct pd_str){ x->names.name[w->name], strlen(x->names.name[w->name]) });
        fprintf(out, ",\"other_ms\":%.3f,\"other_others_ms\":%.3f,\"regret_ms\":%.3f,\"misjudged\":%s}\n", ms(cost), ms(w->others), ms(k->regret), misjudged(x, k) ? "true" : "false");
        return;
    }
    fprintf(out, "  %s  %s ", k->run, k->remote ? "remote" : "local");
    put_name(x, k->done.name);
    fprintf(out, " took %.1f ms, others wait %.1f; %s ", ms(k->completion), ms(k->done.others), k->best ? "remote" : "local");
    put_name(x, w->name);
    fprintf(out, " %.1f, %.1f: %.1f worse%s\n", ms(cost), ms(w->others), ms(k->regret), misjudged(x, k) ? ", misjudged" : "");
}

static int by_regret(const void *a, const void *b)
{
    const struct kept *x = a, *y = b;
    return x->regret != y->regret ? (x->regret < y->regret ? 1 : -1) : strcmp(x->run, y->run);
}

static void put_all(struct regret *x, const struct sums *s, const struct pd_history_sum *h)
{
    FILE *out = x->o->log.out;
    double n = s->judged ? (double)s->judged : 1, share = s->took > 0 ? 100 * s->regret / s->took : 0;
    double most = x->o->least_us < 0 ? PD_REGRET_US : (double)x->o->least_us, rel = x->o->least_share < 0 ? PD_REGRET_SHARE : x->o->least_share;
    qsort(x->k, x->n, sizeof *x->k, by_regret);
    if (x->o->log.json) {
        fprintf(out, "{\"summary\":{\"runs\":%" PRIu64 ",\"judged\":%" PRIu64 ",\"otherwise\":%" PRIu64 ",\"untold\":%" PRIu64 ",\"no_other_way\":%" PRIu64 ",\"drawn\":%" PRIu64
                ",\"mean_ms\":%.3f,\"p50_ms\":%.3f,\"p95_ms\":%.3f,\"most_ms\":%.3f,\"share\":%.6f,\"mean_gain_ms\":%.3f,\"misjudged\":%" PRIu64 ",\"misjudged_local\":%" PRIu64
                ",\"misjudged_remote\":%" PRIu64 ",\"above_ms\":%.3f,\"above_share\":%.6g}}\n", h->joined, s->judged, x->otherwise, x->untold, x->alone, x->drawn,
                ms(s->regret / n), ms(quantile(s->sorted, s->judged, 0.5)), ms(quantile(s->sorted, s->judged, 0.95)), ms(quantile(s->sorted, s->judged, 1)), share / 100,
                ms(s->gain / n), s->misjudged, s->wrong[0], s->wrong[1], ms(most), rel);
        for (size_t j = 0; j < x->n && (x->k[j].regret > 0 && (j < WORST || misjudged(x, &x->k[j]))); j++)
            put_one(x, &x->k[j]);
        return;
    }
    fprintf(out, "%" PRIu64 " runs ended as far as this log tells, %" PRIu64 " of them can be judged; not: %" PRIu64 " came otherwise than decided, %" PRIu64
            " do not tell what they took, %" PRIu64 " had no other way\n", h->joined, s->judged, x->otherwise, x->untold, x->alone);
    put_bias(x);
    fprintf(out, "regret     mean %.1f ms, P50 %.1f, P95 %.1f, most %.1f; %.2f %% of what the runs took\n", ms(s->regret / n), ms(quantile(s->sorted, s->judged, 0.5)),
            ms(quantile(s->sorted, s->judged, 0.95)), ms(quantile(s->sorted, s->judged, 1)), share);
    fprintf(out, "misjudged  %" PRIu64 " of %" PRIu64 " (%.1f %%), by more than %.1f ms and %g %% of what it took: %" PRIu64 " done locally, %" PRIu64 " remotely\n", s->misjudged,
            s->judged, 100 * (double)s->misjudged / n, ms(most), 100 * rel, s->wrong[0], s->wrong[1]);
    fprintf(out, "in all     the choice was %.1f ms %s than the best other way, in the mean\n", ms(fabs(s->gain) / n), s->gain < 0 ? "worse" : "better");
    if (x->n && x->k[0].regret > 0)
        fputs("worst\n", out);
    for (size_t j = 0; j < x->n && j < WORST && x->k[j].regret > 0; j++)
        put_one(x, &x->k[j]);
    for (int remote = 0; remote < 2; remote++)
        if (x->bias[remote].n < ENOUGH)
            fprintf(out, "not known  how far %s estimates are off: %" PRIu64 " runs were done so, %d are needed\n", remote ? "remote" : "local", x->bias[remote].n, ENOUGH);
    fprintf(out, "not known  what the other way would have taken of a run: it was not done; a run that chance made slow counts as regret, one that it made fast does not%s\n",
            x->drawn ? "" : ". No choice was drawn (--temperature 0), so that none was tried for its own sake");
}

int pd_review_regret(const struct pd_review_opts *o, int *status, struct pd_err *e)
{
    struct regret x = { .o = o };
    struct sums s = { 0 };
    struct pd_history h = { .ended = ended, .ctx = &x };
    struct pd_log *log = NULL;
    int rc = pd_history_walk(&o->log, &h, &log, e);
    if (!rc && x.n && (rc = measure(&x, e)) == 0 && !(s.sorted = pd_calloc(x.n, sizeof *s.sorted, "figures", e)))
        rc = PD_ENOMEM;
    if (!rc && x.n) {
        judge(&x);
        add_up(&x, &s);
        put_all(&x, &s, &h.sum);
    }
    if (!rc)
        rc = pd_history_end(&o->log, &h, log, status, e);
    if (!rc && !x.n)
        rc = pd_fail(e, PD_EFAIL, "none of %" PRIu64 " runs came as it was decided and tells what it took: there is nothing to judge (pd-trace why RUN tells of one)", h.sum.joined);
    pd_names_free(&x.names);
    pd_free(x.k);
    pd_free(s.sorted);
    pd_log_free(log);
    return rc;
}
