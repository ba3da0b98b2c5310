/* The report for a person and as a record; the verb. */
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../base/stop.h"
#include "../wire/endpoint.h"
#include "../wire/pack.h"
#include "gen.h"
#include "score.h"

const char *const pd_figure_names[PD_FG_N] = { "ttft", "second_token", "itl", "tpot", "e2e", "send_lag", "kv" };
static const double quantiles[] = { 0.5, 0.9, 0.95, 0.99, 0.999 };
static const char *const quantile_names[] = { "p50", "p90", "p95", "p99", "p99.9" };
enum { QUANTILES = sizeof quantiles / sizeof *quantiles };

const char *pd_figure_formula(const struct pd_report *r, enum pd_score_figure f)
{
    static const char *const from[][4] = {      /* by basis */
        [PD_FG_TTFT] = { "first-scheduled", "first-sent", "first_seen-scheduled", "first-accepted" },
        [PD_FG_SECOND] = { "second-scheduled", "second-sent", "second_seen-scheduled", "second-accepted" },
        [PD_FG_ITL] = { "gap,pooled", "gap,pooled", "gap_seen,pooled", "gap_at_decode,pooled" },
        [PD_FG_TPOT] = { "(e2e-ttft)/(n-1)", "(e2e-ttft)/(n-1)", "(e2e-ttft)/(n-1)", "(e2e-ttft)/(n-1)" },
        [PD_FG_E2E] = { "result-scheduled", "result-sent", "result_seen-scheduled", "last-accepted" },
        [PD_FG_LAG] = { "sent-scheduled", "", "", "" },
        [PD_FG_KV] = { "result.kv_ms", "result.kv_ms", "result.kv_ms", "result.kv_ms" },
    };
    return from[f][r->basis];
}

static double per(double a, double b) { return b > 0 ? a / b : 0; }

/* ---- text ---- */

static int words(const struct pd_words *w, struct pd_buf *out, struct pd_err *e)
{
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < w->n; i++)
        rc = pd_buf_printf(out, e, "%s%s %llu", i ? ", " : "", w->of[i].word, (unsigned long long)w->of[i].n);
    return rc;
}

static int figure(struct pd_report *r, enum pd_score_figure f, struct pd_buf *out, struct pd_err *e)
{
    struct pd_sample *s = &r->figure[f];
    char name[64];
    snprintf(name, sizeof name, "%s{%s}", pd_figure_names[f], pd_figure_formula(r, f));
    if (!s->n)
        return 0;
    int rc = pd_buf_printf(out, e, "%-38s ms  n=%-7zu mean %.3f\n   ", name, s->n, pd_sample_mean(s));
    for (int i = 0; rc == 0 && i < QUANTILES; i++) {
        struct pd_quantile q = pd_sample_quantile(s, quantiles[i]);
        rc = pd_buf_printf(out, e, "  P%g %.3f [%s%.3f, %s%.3f]", quantiles[i] * 100, q.value, q.lo_open ? "<" : "", q.lo, q.hi_open ? ">" : "", q.hi);
    }
    return rc ? rc : pd_buf_add(out, "\n", 1, e);
}

static int class_lines(struct pd_report *r, struct pd_buf *out, struct pd_err *e)
{
    int rc = 0;
    for (uint32_t c = 0; rc == 0 && r->n_classes > 1 && c < r->n_classes; c++) {
        struct pd_class_score *k = &r->class_[c];
        rc = pd_buf_printf(out, e, "class %-16s n=%llu, ended %llu, met %llu; TTFT P50 %.3f P95 %.3f, TPOT P50 %.3f P95 %.3f ms\n", k->name, (unsigned long long)k->n,
                           (unsigned long long)k->ended, (unsigned long long)k->met, pd_sample_quantile(&k->ttft, 0.5).value, pd_sample_quantile(&k->ttft, 0.95).value,
                           pd_sample_quantile(&k->tpot, 0.5).value, pd_sample_quantile(&k->tpot, 0.95).value);
    }
    return rc;
}

/* What a figure does not say of itself. */
static int notes(struct pd_report *r, struct pd_buf *out, struct pd_err *e)
{
    double ttft = pd_sample_quantile(&r->figure[PD_FG_TTFT], 0.5).value, lag = pd_sample_quantile(&r->figure[PD_FG_LAG], 0.99).value;
    int rc = 0;
    if (r->basis == PD_SB_REPORTED)
        rc = pd_buf_printf(out, e, "note: times are the decoder's own, from when it accepted a request; waiting before that is not in them, and rates are not known "
                           "(pd-bench load, or gen --pace with --requests, count from the scheduled time)\n");
    if (rc == 0 && r->basis == PD_SB_SENT)
        rc = pd_buf_printf(out, e, "note: a closed loop: it sends less when it is answered slowly, so its latencies say nothing of an offered rate\n");
    if (rc == 0 && r->tokens_unseen)
        rc = pd_buf_printf(out, e, "note: of %llu requests no token record was seen: no TTFT, ITL and TPOT (ask for them: load without --no-stream, pd-decode --stream)\n",
                           (unsigned long long)r->tokens_unseen);
    if (rc == 0 && r->figure[PD_FG_LAG].n && r->figure[PD_FG_TTFT].n && lag > 0.01 * ttft)
        rc = pd_buf_printf(out, e, "note: the client's send lag is large: P99 %.3f ms is %.1f %% of the median TTFT (goal 1 %%); it is in TTFT and E2E\n", lag, 100 * per(lag, ttft));
    return rc;
}

int pd_report_text(struct pd_report *r, struct pd_buf *out, struct pd_err *e)
{
    struct pd_ratio met = pd_ratio_of(r->met, r->with_slo);
    int rc = pd_buf_printf(out, e, "requests %llu: ended %llu, failed %llu, unanswered %llu", (unsigned long long)r->n, (unsigned long long)r->ended,
                           (unsigned long long)r->failed, (unsigned long long)r->missing);
    if (rc == 0 && r->reasons.n)
        rc = (rc = pd_buf_printf(out, e, " (")) || (rc = words(&r->reasons, out, e)) ? rc : pd_buf_printf(out, e, ")");
    if (rc == 0 && r->offered > 0)
        rc = pd_buf_printf(out, e, "; offered %.4g/s", r->offered);
    if (rc == 0 && r->span_s > 0)
        rc = pd_buf_printf(out, e, "; ended %.4g/s over %.3f s", per((double)r->ended, r->span_s), r->span_s);
    rc = rc ? rc : pd_buf_add(out, "\n", 1, e);
    for (int f = 0; rc == 0 && f < PD_FG_N; f++)
        rc = figure(r, (enum pd_score_figure)f, out, e);
    if (rc == 0 && r->with_slo)
        rc = pd_buf_printf(out, e, "slo{met/requests with one}  %llu of %llu: %.2f %% [%.2f, %.2f]\n", (unsigned long long)r->met, (unsigned long long)r->with_slo,
                           100 * met.value, 100 * met.lo, 100 * met.hi);
    if (rc == 0 && r->with_slo && r->span_s > 0)
        rc = pd_buf_printf(out, e, "goodput{met/span}  %.4g/s at this load\n", per((double)r->met, r->span_s));
    if (rc == 0 && r->span_s > 0)
        rc = pd_buf_printf(out, e, "tokens/s{of ended/span}  input %.4g, output %.4g, total %.4g\n", per((double)r->prompt_tokens, r->span_s),
                           per((double)r->output_tokens, r->span_s), per((double)(r->prompt_tokens + r->output_tokens), r->span_s));
    if (rc == 0 && r->ended) {
        uint64_t remote = 0, fell = 0;
        for (uint32_t i = 0; i < r->modes.n; i++)
            remote += strcmp(r->modes.of[i].word, "remote") ? 0 : r->modes.of[i].n;
        for (uint32_t i = 0; i < r->fallbacks.n; i++)
            fell += r->fallbacks.of[i].n;
        rc = pd_buf_printf(out, e, "mode  ");
        rc = rc ? rc : words(&r->modes, out, e);
        rc = rc ? rc : pd_buf_printf(out, e, "; remote prefill %.2f %%, fallback %.2f %%%s", 100 * per((double)remote, (double)r->ended), 100 * per((double)fell, (double)r->ended),
                                     fell ? " (" : "");
        rc = rc ? rc : words(&r->fallbacks, out, e);
        rc = rc ? rc : pd_buf_printf(out, e, "%s\nprefix{cached/prompt}  %.2f %% of tokens, %.2f %% mean of requests", fell ? ")" : "",
                                     100 * per((double)r->cached_tokens, (double)r->prompt_tokens), 100 * r->hit_mean);
        if (rc == 0 && r->reusable_tokens)
            rc = pd_buf_printf(out, e, "; a cache without bound could have %.2f %%", 100 * per((double)r->reusable_tokens, (double)r->prompt_tokens));
        rc = rc ? rc : pd_buf_printf(out, e, "\n");
        if (rc == 0 && r->kv_bytes)
            rc = pd_buf_printf(out, e, "kv  %llu bytes of %llu tokens, %.4g GB/s{bytes/sum of kv}; %llu tokens computed again\n", (unsigned long long)r->kv_bytes,
                               (unsigned long long)r->transferred_tokens, per((double)r->kv_bytes / 1e6, r->kv_ms), (unsigned long long)r->recomputed_tokens);
    }
    rc = rc ? rc : class_lines(r, out, e);
    return rc ? rc : notes(r, out, e);
}

/* ---- the record ---- */

static void num(struct pd_packer *k, const char *key, double v)
{
    pd_pack_text(k, key);
    pd_pack_float(k, key, v);
}

static void whole(struct pd_packer *k, const char *key, uint64_t v)
{
    pd_pack_text(k, key);
    msgpack_pack_uint64(&k->pk, v);
}

/* [value, lo, hi]; an open end is null. */
static void pack_quantile(struct pd_packer *k, const char *key, struct pd_quantile q)
{
    pd_pack_text(k, key);
    msgpack_pack_array(&k->pk, 3);
    pd_pack_float(k, key, q.value);
    q.lo_open ? (void)msgpack_pack_nil(&k->pk) : pd_pack_float(k, key, q.lo);
    q.hi_open ? (void)msgpack_pack_nil(&k->pk) : pd_pack_float(k, key, q.hi);
}

static void pack_sample(struct pd_packer *k, const char *formula, struct pd_sample *s)
{
    msgpack_pack_map(&k->pk, 3 + (size_t)(formula != NULL) + QUANTILES);
    if (formula) {
        pd_pack_text(k, "formula");
        pd_pack_text(k, formula);
    }
    pd_pack_text(k, "unit");
    pd_pack_text(k, "ms");
    whole(k, "n", s->n);
    num(k, "mean", pd_sample_mean(s));
    for (int i = 0; i < QUANTILES; i++)
        pack_quantile(k, quantile_names[i], pd_sample_quantile(s, quantiles[i]));
}

static void pack_words(struct pd_packer *k, const char *key, const struct pd_words *w)
{
    pd_pack_text(k, key);
    msgpack_pack_map(&k->pk, w->n);
    for (uint32_t i = 0; i < w->n; i++)
        whole(k, w->of[i].word, w->of[i].n);
}

int pd_report_record(struct pd_report *r, struct pd_buf *out, struct pd_err *e)
{
    struct pd_packer k;
    size_t n_figures = 0;
    struct pd_ratio met = pd_ratio_of(r->met, r->with_slo);
    for (int f = 0; f < PD_FG_N; f++)
        n_figures += r->figure[f].n > 0;
    pd_pack_init(&k, out, e);
    msgpack_pack_map(&k.pk, 26);
    pd_pack_text(&k, "pd");
    pd_pack_text(&k, "score");
    whole(&k, "v", 1);
    pd_pack_text(&k, "basis");
    pd_pack_text(&k, pd_score_basis_names[r->basis]);
    whole(&k, "requests", r->n);
    whole(&k, "ended", r->ended);
    whole(&k, "failed", r->failed);
    whole(&k, "unanswered", r->missing);
    pack_words(&k, "finish_reason", &r->reasons);
    pack_words(&k, "mode", &r->modes);
    pack_words(&k, "fallback", &r->fallbacks);
    num(&k, "offered_s", r->offered);
    num(&k, "span_s", r->span_s);
    pd_pack_text(&k, "figures");
    msgpack_pack_map(&k.pk, n_figures);
    for (int f = 0; f < PD_FG_N; f++)
        if (r->figure[f].n) {
            pd_pack_text(&k, pd_figure_names[f]);
            pack_sample(&k, pd_figure_formula(r, (enum pd_score_figure)f), &r->figure[f]);
        }
    whole(&k, "with_slo", r->with_slo);
    whole(&k, "met", r->met);
    pd_pack_text(&k, "attainment");
    msgpack_pack_array(&k.pk, 3);
    pd_pack_float(&k, "attainment", met.value);
    pd_pack_float(&k, "attainment", met.lo);
    pd_pack_float(&k, "attainment", met.hi);
    num(&k, "goodput_s", per((double)r->met, r->span_s));
    whole(&k, "prompt_tokens", r->prompt_tokens);
    whole(&k, "output_tokens", r->output_tokens);
    whole(&k, "cached_tokens", r->cached_tokens);
    whole(&k, "reusable_tokens", r->reusable_tokens);
    whole(&k, "transferred_tokens", r->transferred_tokens);
    whole(&k, "recomputed_tokens", r->recomputed_tokens);
    whole(&k, "kv_bytes", r->kv_bytes);
    num(&k, "kv_ms", r->kv_ms);
    pd_pack_text(&k, "classes");
    msgpack_pack_array(&k.pk, r->n_classes);
    for (uint32_t c = 0; c < r->n_classes; c++) {
        struct pd_class_score *s = &r->class_[c];
        msgpack_pack_map(&k.pk, 6);
        pd_pack_text(&k, "class");
        pd_pack_text(&k, s->name);
        whole(&k, "requests", s->n);
        whole(&k, "ended", s->ended);
        whole(&k, "met", s->met);
        pd_pack_text(&k, "ttft");
        pack_sample(&k, NULL, &s->ttft);
        pd_pack_text(&k, "tpot");
        pack_sample(&k, NULL, &s->tpot);
    }
    return k.rc;
}

/* ---- the verb ---- */

static char *requests, *slo;
struct poptOption pd_score_options[] = {
    { "requests", '\0', POPT_ARG_STRING, &requests, 0, "the requests that were sent (gen -o): what they asked for, and which of them nobody answered; read when the results have ended", "FILE" },
    { "slo", '\0', POPT_ARG_STRING, &slo, 0, "ttft=500ms,tpot=50ms: of requests that bring none", "SLO" },
    POPT_TABLEEND
};

static int each(const char *from, const struct pd_net *net, size_t max, struct pd_score *s, bool of_requests, struct pd_err *e)
{
    struct pd_endpoint in = { .fd = -1 };
    struct pd_rstream *rs = NULL;
    struct pd_rec rec;
    struct pd_rstream_opts ro = { .max_record = max, .name = from };
    bool bad = false;
    int rc = pd_endpoint_open_in(from, net, &in, e);
    rc = rc ? rc : pd_rstream_of(&in, &ro, &rs, e);
    while (rc == 0 && (rc = pd_rstream_next(rs, -1, &rec, &bad, e)) > 0) {
        if (rc == 2 && pd_stop_level())         /* what has come so far counts */
            break;
        rc = rc == 2 ? 0 : of_requests ? rec.kind == PD_K_REQUEST ? pd_score_request(s, &rec, e) : 0 : pd_score_record(s, &rec, pd_mono_us(), e);
    }
    pd_rstream_free(rs);
    pd_endpoint_abort(&in);
    return rc < 0 ? pd_err_prefix(e, "%s", strcmp(from, "-") ? from : "stdin") : 0;
}

static int print(struct pd_report *r, struct pd_err *e)
{
    struct pd_buf b = { 0 };
    struct pd_wstream *w = NULL;
    struct pd_endpoint out = { .fd = -1 };
    const char *to = pd_cli.out ? pd_cli.out : "-";
    int rc = pd_endpoint_open_out(to, pd_net_cli(e), &out, e);
    rc = rc ? rc : pd_wstream_of(&out, pd_cli.format && !strcmp(pd_cli.format, "json") ? PD_FMT_JSON : PD_FMT_MSGPACK, to, &w, e);
    rc = rc ? rc : pd_cli.format ? pd_report_record(r, &b, e) : pd_report_text(r, &b, e);
    rc = rc ? rc : pd_cli.format ? pd_wstream_put(w, b.p, b.n, e) : pd_wstream_raw(w, b.p, b.n, e);
    rc = pd_wstream_end(w, &out, rc, e);
    pd_buf_free(&b);
    return rc;
}

int pd_score_verb(struct pd_err *e)
{
    static struct pd_report r;
    struct pd_traffic t = { .weight = 1 };
    struct pd_score *s = NULL;
    struct stat st;
    const struct pd_net *net = pd_net_cli(e);
    int64_t max = pd_cli_max_record(e);
    const char *from = pd_cli.in ? pd_cli.in : "-";
    if (!net || max < 0 || pd_slo_parse(slo, &t, e))
        return e->code;
    /* What lies in a file already does not come now. */
    bool file = !strcmp(from, "-") ? fstat(STDIN_FILENO, &st) == 0 && S_ISREG(st.st_mode) : stat(from, &st) == 0 && S_ISREG(st.st_mode);
    int rc = pd_score_new(&(struct pd_score_opts){ .ttft_ms = t.ttft_ms, .tpot_ms = t.tpot_ms, .live = !file }, &s, e);
    rc = rc ? rc : each(from, net, (size_t)max, s, false, e);
    rc = rc || !requests ? rc : each(requests, net, (size_t)max, s, true, e);
    rc = rc ? rc : pd_score_report(s, &r, e);
    if (rc == 0 && !r.n)
        rc = pd_fail(e, PD_EFAIL, "%s: there is no result in it (pd-decode, pd-route and pd-bench load write some)", strcmp(from, "-") ? from : "stdin");
    rc = rc ? rc : print(&r, e);
    pd_report_free(&r);
    pd_score_free(s);
    return rc;
}
