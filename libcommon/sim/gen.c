#include "gen.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../base/stop.h"
#include "../model/config.h"
#include "../wire/endpoint.h"

enum { VOCAB_LO = 32 /* special tokens of every family we read lie below */, VOCAB = 256, COUNT = 100, MAX_CLASSES = 64 };

static struct {
    char *model, *log, *seed, *count, *duration, *arrivals, *rate, *burstiness, *on, *off, *isl, *osl, *prefix, *groups, *share, *slo, *vocab, *context, *time_scale,
        *length_scale, **traffic;
    int pace, raw_times;
} opt;
struct poptOption pd_gen_options[] = {
    { "model", 'm', POPT_ARG_STRING, &opt.model, 0, "take vocabulary and context from this model (GGUF)", "FILE" },
    { "vocab", '\0', POPT_ARG_STRING, &opt.vocab, 0, "token ids are from 32 to N - 1 (default: the model's, or 256)", "N" },
    { "context", '\0', POPT_ARG_STRING, &opt.context, 0, "prompt and answer fit in N tokens: longer ones are cut (default: the model's, or any)", "N" },
    { "seed", '\0', POPT_ARG_STRING, &opt.seed, 0, "the same seed and options give the same bytes (default 0)", "N" },
    { "count", 'n', POPT_ARG_STRING, &opt.count, 0, "requests (default: 100, or all of the trace)", "N" },
    { "duration", '\0', POPT_ARG_STRING, &opt.duration, 0, "none arrives later than this", "TIME" },
    { "arrivals", '\0', POPT_ARG_STRING, &opt.arrivals, 0, "poisson, gamma, onoff, even, or trace (default: poisson; trace with --trace and without --rate)", "KIND" },
    { "rate", '\0', POPT_ARG_STRING, &opt.rate, 0, "requests a second, on average (default 1)", "R" },
    { "burstiness", '\0', POPT_ARG_STRING, &opt.burstiness, 0, "gamma: shape of the gaps, 1 is Poisson, less is burstier (implies --arrivals gamma)", "B" },
    { "on", '\0', POPT_ARG_STRING, &opt.on, 0, "onoff: length of a burst (implies --arrivals onoff)", "TIME" },
    { "off", '\0', POPT_ARG_STRING, &opt.off, 0, "onoff: silence after it (default: as long as --on)", "TIME" },
    { "isl", '\0', POPT_ARG_STRING, &opt.isl, 0, "prompt tokens: 512, 64-256, lognormal:200:0.8, trace (default 128, or trace)", "LENGTH" },
    { "osl", '\0', POPT_ARG_STRING, &opt.osl, 0, "answer tokens, the same (default 32, or trace)", "LENGTH" },
    { "prefix", '\0', POPT_ARG_STRING, &opt.prefix, 0, "cold, partial, full, trace: what prompts have in common (default: cold, or what the trace tells)", "KIND" },
    { "groups", '\0', POPT_ARG_STRING, &opt.groups, 0, "groups of prompts that begin alike (default 8)", "N" },
    { "share", '\0', POPT_ARG_STRING, &opt.share, 0, "partial: part of a prompt that is its group's (default 0.5)", "0..1" },
    { "slo", '\0', POPT_ARG_STRING, &opt.slo, 0, "ttft=500ms,tpot=50ms: what each request asks for", "SLO" },
    { "class", '\0', POPT_ARG_ARGV, &opt.traffic, 0, "a class of requests in the mix, may be repeated: name=chat,weight=4,isl=64-256,osl=32,prefix=partial,groups=8,"
      "share=0.5,ttft=500ms,tpot=50ms (what it leaves out is as the options say)", "CLASS" },
    { "trace", '\0', POPT_ARG_STRING, &opt.log, 0, "times, lengths and prefixes of a log: Mooncake or Bailian JSONL, Azure or BurstGPT CSV, our own requests", "FILE" },
    { "time-scale", '\0', POPT_ARG_STRING, &opt.time_scale, 0, "times of the trace are multiplied by it (default 1)", "F" },
    { "length-scale", '\0', POPT_ARG_STRING, &opt.length_scale, 0, "lengths of the trace are multiplied by it (default 1)", "F" },
    { "raw-times", '\0', POPT_ARG_NONE, &opt.raw_times, 0, "requests of one time stamp of the trace come at once (default: spread until the next stamp)", NULL },
    { "pace", '\0', POPT_ARG_NONE, &opt.pace, 0, "write each request at its time; the lag is told on standard error", NULL },
    POPT_TABLEEND
};

static int a_number(const char *name, const char *s, double lo, double hi, double *v, struct pd_err *e)
{
    char *end;
    if (!s)
        return 0;
    *v = strtod(s, &end);
    if (end == s || *end || !(*v >= lo && *v <= hi))
        return pd_fail(e, PD_EUSAGE, "%s: '%s' is no number from %g to %g (example: %s 2)", name, s, lo, hi, name);
    return 0;
}

static int a_count(const char *name, const char *s, int64_t lo, int64_t hi, int64_t *v, struct pd_err *e)
{
    return s && pd_parse_int(s, lo, hi, v, e) < 0 ? pd_err_prefix(e, "%s", name) : 0;
}

static int a_time(const char *name, const char *s, int64_t *us, struct pd_err *e)
{
    if (s && pd_parse_duration(s, us, e) < 0)
        return pd_err_prefix(e, "%s", name);
    return s && *us < 1 ? pd_fail(e, PD_EUSAGE, "%s: '%s' is no time above 0 (example: %s 2s)", name, s, name) : 0;
}

int pd_slo_parse(const char *s, struct pd_traffic *t, struct pd_err *e)
{
    for (const char *at = s; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strncmp(at, "ttft=", 5) && strncmp(at, "tpot=", 5))
            return pd_fail(e, PD_EUSAGE, "--slo: '%s' is not ttft=TIME,tpot=TIME (example: --slo ttft=500ms,tpot=50ms)", s);
    return s && pd_traffic_parse(s, t, e) ? pd_err_prefix(e, "--slo") : 0;
}

/* Vocabulary and context of the model's file. */
static int ask_model(struct pd_workload_opts *o, struct pd_err *e)
{
    struct pd_gguf *g = NULL;
    struct pd_config c = { 0 };
    int rc = pd_gguf_open(opt.model, &g, e);
    if (rc)
        return rc;
    if ((rc = pd_config_from_gguf(g, &c, e)) == 0) {
        o->vocab_hi = (uint32_t)c.n_vocab;
        o->context = (uint32_t)c.n_ctx;
        pd_config_free(&c);
    }
    pd_gguf_close(g);
    return rc;
}

static int classes(struct pd_traffic *t, uint32_t *n, const struct pd_reqlog *log, struct pd_err *e)
{
    struct pd_traffic base = { .name = "r", .weight = 1, .isl = { PD_LENS_FIXED, 128, 128 }, .osl = { PD_LENS_FIXED, 32, 32 }, .groups = 8, .share = 0.5 };
    char given[300];
    int rc = 0;
    if (log) {
        base.isl.kind = base.osl.kind = PD_LENS_LOG;
        base.prefix = log->block_tokens && !(opt.isl && opt.osl) ? PD_SHARE_LOG : PD_SHARE_COLD;
    }
    const char *of[][2] = { { "isl", opt.isl }, { "osl", opt.osl }, { "prefix", opt.prefix }, { "groups", opt.groups }, { "share", opt.share } };
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        if (!of[i][1])
            continue;
        snprintf(given, sizeof given, "%s=%s", of[i][0], of[i][1]);
        if ((rc = pd_traffic_parse(given, &base, e)) < 0) {
            snprintf(given, sizeof given, "--%.250s", e->msg);
            return pd_fail(e, rc, "%s", given);
        }
    }
    if ((rc = pd_slo_parse(opt.slo, &base, e)) < 0)
        return rc;
    t[0] = base;
    *n = 1;
    for (uint32_t i = 0; opt.traffic && opt.traffic[i]; i++, *n = i) {
        if (i == MAX_CLASSES)
            return pd_fail(e, PD_EUSAGE, "--class: more than %d", MAX_CLASSES);
        t[i] = base;
        snprintf(t[i].name, sizeof t[i].name, "c%u", i);
        if ((rc = pd_traffic_parse(opt.traffic[i], &t[i], e)) < 0)
            return pd_err_prefix(e, "--class");
    }
    return 0;
}

static int options(struct pd_workload_opts *o, struct pd_traffic *t, const struct pd_reqlog *log, struct pd_err *e)
{
    int64_t count = opt.log ? INT64_MAX : COUNT, seed = 0, vocab = 0, context = 0;
    int kind = opt.arrivals ? pd_word_find(pd_arrive_names, opt.arrivals) : opt.burstiness ? PD_ARRIVE_GAMMA : opt.on ? PD_ARRIVE_ONOFF :
               log && log->timed && !opt.rate ? PD_ARRIVE_LOG : PD_ARRIVE_POISSON;
    *o = (struct pd_workload_opts){ .rate = 1, .burstiness = 1, .time_scale = 1, .length_scale = 1, .vocab_lo = VOCAB_LO, .vocab_hi = VOCAB, .traffic = t, .log = log };
    int rc = kind < 0 ? pd_fail(e, PD_EUSAGE, "--arrivals: '%s' is not poisson, gamma, onoff, even or trace", opt.arrivals) : 0;
    o->arrive = (enum pd_arrive)kind;
    if (rc || (rc = a_count("--count", opt.count, 1, INT64_MAX, &count, e)) || (rc = a_count("--seed", opt.seed, 0, INT64_MAX, &seed, e)) ||
        (rc = a_time("--duration", opt.duration, &o->duration_us, e)) || (rc = a_number("--rate", opt.rate, 1e-6, 1e6, &o->rate, e)) ||
        (rc = a_number("--burstiness", opt.burstiness, 0.01, 1e4, &o->burstiness, e)) || (rc = a_time("--on", opt.on, &o->on_us, e)) ||
        (rc = a_number("--time-scale", opt.time_scale, 1e-6, 1e6, &o->time_scale, e)) || (rc = a_number("--length-scale", opt.length_scale, 1e-6, 1e3, &o->length_scale, e)))
        return rc;
    o->off_us = o->on_us;
    if ((rc = a_time("--off", opt.off, &o->off_us, e)) || (opt.model && (rc = ask_model(o, e))) ||
        (rc = a_count("--vocab", opt.vocab, VOCAB_LO + 2, INT32_MAX, &vocab, e)) || (rc = a_count("--context", opt.context, 2, PD_REQLOG_TOKENS, &context, e)))
        return rc;
    if (o->arrive == PD_ARRIVE_ONOFF && !opt.on)
        return pd_fail(e, PD_EUSAGE, "--arrivals onoff: how long is a burst? (example: --on 2s --off 8s)");
    if (opt.duration && !opt.count)
        count = INT64_MAX;
    if (log && !opt.count && o->arrive != PD_ARRIVE_LOG && !opt.duration)
        count = (int64_t)log->n;
    o->vocab_hi = vocab ? (uint32_t)vocab : o->vocab_hi;
    o->context = context ? (uint32_t)context : o->context;
    o->count = (uint64_t)count;
    o->seed = (uint64_t)seed;
    return classes(t, &o->n_traffic, log, e);
}

/* Until mono us, or until the process is told to stop: false. */
static bool sleep_until(int64_t at_us)
{
    struct timespec t = { at_us / 1000000, at_us % 1000000 * 1000 };
    while (!pd_stop_level())
        if (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) != EINTR)
            return !pd_stop_level();
    return false;
}

int pd_pace_run(struct pd_workload *w, bool paced, struct pd_wstream *out, struct pd_pace *p, struct pd_err *e)
{
    struct pd_buf rec = { 0 };
    struct pd_arrival a;
    int64_t start = paced ? pd_mono_us() : 0;
    int rc = 0;
    while (rc == 0 && !pd_stop_level() && (rc = pd_workload_next(w, &a, e)) == 1) {
        rec.n = 0;
        rc = pd_workload_request(w, &a, start, &rec, e);
        if (rc == 0 && paced && !sleep_until(start + a.at_us))
            break;
        rc = rc ? rc : pd_wstream_put(out, rec.p, rec.n, e);
        if (rc == 0 && paced) {
            rc = pd_wstream_flush(out, e);
            rc = rc ? rc : pd_sample_add(&p->lag_ms, (double)(pd_mono_us() - start - a.at_us) / 1e3, e);
        }
        p->first_us = p->n ? p->first_us : a.at_us;
        p->last_us = a.at_us;
        p->n++;
        p->cut += a.cut;
        p->isl += a.isl;
        p->osl += a.osl;
        p->reusable += a.reusable;
    }
    pd_buf_free(&rec);
    return rc < 0 ? rc : 0;
}

void pd_pace_tell(struct pd_sample *lag_ms, uint64_t n, double seconds)
{
    double p50 = pd_sample_quantile(lag_ms, 0.5).value, p99 = pd_sample_quantile(lag_ms, 0.99).value, most = lag_ms->n ? lag_ms->v[lag_ms->n - 1] : 0;
    char text[160];
    snprintf(text, sizeof text, "%llu requests in %.3f s; send lag P50 %.3f ms, P99 %.3f ms, at most %.3f ms", (unsigned long long)n, seconds, p50, p99, most);
    if (p99 > PD_LAG_LARGE_MS)
        pd_warn("%s: large: the reader or this machine did not keep up (latencies from the scheduled times have it in them)", text);
    else
        pd_warn("%s", text);
}

static void tell(struct pd_pace *p, const struct pd_reqlog *log)
{
    if (p->cut)
        pd_warn("%llu of %llu requests were longer than the context and were cut (--length-scale makes all of them shorter)", (unsigned long long)p->cut,
                (unsigned long long)p->n);
    if (log && log->dropped)
        pd_warn("%s: %llu rows without prompt or answer are left out", opt.log, (unsigned long long)log->dropped);
    if (p->n)
        pd_info("%llu requests over %.3f s; mean ISL %.1f, OSL %.1f; an earlier request had %.1f %% of the prompt tokens at their beginning", (unsigned long long)p->n,
                (double)p->last_us / 1e6, (double)p->isl / (double)p->n, (double)p->osl / (double)p->n, 100 * (double)p->reusable / (double)p->isl);
    if (p->lag_ms.n)
        pd_pace_tell(&p->lag_ms, p->n, (double)(p->last_us - p->first_us) / 1e6);
}

int pd_gen_run(struct pd_err *e)
{
    static struct pd_traffic traffic[MAX_CLASSES];
    struct pd_workload_opts o;
    struct pd_reqlog log = { 0 };
    struct pd_workload *w = NULL;
    struct pd_wstream *out = NULL;
    struct pd_endpoint ep = { .fd = -1 };
    struct pd_pace p = { 0 };
    const struct pd_net *net = pd_net_cli(e);
    const char *to = pd_cli.out ? pd_cli.out : "-";
    bool json = pd_cli.format && !strcmp(pd_cli.format, "json");
    int rc = net ? 0 : e->code;
    if (rc == 0 && opt.log && (rc = pd_reqlog_read(opt.log, &log, e)) == 0 && !opt.raw_times)
        pd_reqlog_spread(&log);
    rc = rc ? rc : options(&o, traffic, opt.log ? &log : NULL, e);
    rc = rc ? rc : pd_workload_new(&o, &w, e);
    rc = rc ? rc : pd_endpoint_open_out(to, net, &ep, e);
    if (rc == 0 && !json && isatty(ep.fd))
        rc = pd_fail(e, PD_EUSAGE, "-o: records are binary and the output is a terminal (use --format json, -o FILE, or a pipe)");
    rc = rc ? rc : pd_wstream_of(&ep, json ? PD_FMT_JSON : PD_FMT_MSGPACK, to, &out, e);
    rc = rc ? rc : pd_pace_run(w, opt.pace, out, &p, e);
    rc = pd_wstream_end(out, &ep, rc, e);
    if (rc == 0)
        tell(&p, opt.log ? &log : NULL);
    pd_workload_free(w);
    pd_reqlog_free(&log);
    pd_sample_free(&p.lag_ms);
    return rc;
}
