/* pd-trace: shows records (cat), logs of events (ls, show, check, merge, stats, follow), the decisions of routers (why, replay, drift, regret), KV dumps (kv), and
 * what a daemon holds of a run (verify). */
#include <fcntl.h>
#include <stdlib.h>
#include <strings.h>
#include <unistd.h>
#include "../libcommon/base/cli.h"
#include "../libcommon/base/id.h"
#include "../libcommon/base/log.h"
#include "../libcommon/engine/options.h"
#include "../libcommon/kv/inspect.h"
#include "../libcommon/route/history.h"
#include "../libcommon/serve/verify.h"
#include "../libcommon/trace/report.h"
#include "../libcommon/trace/show.h"
#include "../libcommon/wire/endpoint.h"

static char *run_id, *with, *tokens, *layers, *bound, *order, *policy, *window, *above;
enum { LAST = 10 };
static int strict, last = LAST, block_size, identical;
static struct poptOption options[] = {
    { "run", '\0', POPT_ARG_STRING, &run_id, 0, "cat of a dump, follow, kv: only this run; verify: this one", "RUN" },
    { "with", '\0', POPT_ARG_STRING, &with, 0, "verify: against what: the prefill worker, a stream with its KV, a dump", "unix:P|FILE" },
    { "strict", '\0', POPT_ARG_NONE, &strict, 0, "logs: exit 9 when records were torn or lost", NULL },
    { "bound", '\0', POPT_ARG_STRING, &bound, 0, "check: how long after a cancel or an end others may still act (default 1s)", "TIME" },
    { "policy", '\0', POPT_ARG_STRING, &policy, 0, "replay: what another policy would have decided (aggregated, fixed, conditional, threshold:N, dynamo, llmd, random)", "POLICY" },
    { "expect-identical", '\0', POPT_ARG_NONE, &identical, 0, "replay: exit 4 when a decision does not come out as it was, byte by byte", NULL },
    { "window", '\0', POPT_ARG_STRING, &window, 0, "drift: judge so much of the log at a time (default a tenth of it)", "TIME" },
    { "above", '\0', POPT_ARG_STRING, &above, 0, "regret: a choice is misjudged when it was worse by more than both (default 10ms,20%)", "TIME,PERCENT" },
    { "last", '\0', POPT_ARG_INT, &last, 0, "follow: how many events of what is there to show first (default 10)", "N" },
    { "tokens", '\0', POPT_ARG_STRING, &tokens, 0, "kv slice: tokens FROM to TO-1 (either may be left out)", "FROM:TO" },
    { "block-size", '\0', POPT_ARG_INT, &block_size, 0, "kv convert: into blocks of N tokens", "N" },
    { "order", '\0', POPT_ARG_STRING, &order, 0, "kv convert: into blocks of heads of tokens (hnd) or of tokens of heads (nhd)", "hnd|nhd" },
    { "layers", '\0', POPT_ARG_STRING, &layers, 0, "kv slice: layers FROM to TO-1", "FROM:TO" },
    PD_CLI_COMMON
};

static int cat_one(const char *path, const struct pd_net *net, size_t max, struct pd_wstream *w, uint64_t *bad, struct pd_err *e)
{
    struct pd_endpoint in = { .fd = -1 };
    struct pd_dump_r *dump = NULL;
    int rc;
    if (!strcmp(path, "-") || strchr(path, ':') || !pd_dump_is(path)) {
        if ((rc = pd_endpoint_open_in(path, net, &in, e)))
            return rc;
        rc = pd_trace_cat(&in, path, max, w, bad, e);
        pd_endpoint_abort(&in);
        return rc;
    }
    if ((rc = pd_dump_read(path, run_id, &dump, &in.fd, e)))
        return rc;
    rc = pd_trace_cat(&in, path, max, w, bad, e);
    close(in.fd);
    int end = pd_dump_read_end(dump, rc ? NULL : e);
    return rc ? rc : end;
}

static const char **inputs(const char **files)
{
    static const char *from[2];
    from[0] = pd_cli.in ? pd_cli.in : "-";
    return files[0] ? files : from;
}

/* cat and merge: records to one stream. */
static int copy(bool merge, const char **files, int *status, struct pd_err *e)
{
    struct pd_endpoint out = { .fd = -1 };
    struct pd_wstream *w = NULL;
    const char *to = pd_cli.out ? pd_cli.out : "-";
    const struct pd_net *net = pd_net_cli(e);
    int64_t max = pd_cli_max_record(e);
    uint64_t bad = 0, torn = 0;
    if (!net || max < 0)
        return e->code;
    int rc = pd_endpoint_open_out(to, net, &out, e);
    if (!rc)
        rc = pd_wstream_of(&out, strcmp(pd_cli.format ? pd_cli.format : merge ? "msgpack" : "json", "json") ? PD_FMT_MSGPACK : PD_FMT_JSON, to, &w, e);
    if (merge && !rc)
        rc = pd_trace_merge(inputs(files), &(struct pd_log_opts){ .max_record = (size_t)max, .net = net }, w, &torn, e);
    for (const char **f = inputs(files); !merge && !rc && *f; f++)
        rc = cat_one(*f, net, (size_t)max, w, &bad, e);
    int closed = w ? pd_wstream_close(w, rc ? NULL : e) : 0;
    rc = rc ? rc : closed;
    if (rc && rc != PD_ECORRUPT)
        pd_endpoint_abort(&out);
    else if (pd_endpoint_commit(&out, rc ? NULL : e) && !rc)
        rc = e->code;
    if (bad)
        *status = 1;
    else if (torn && strict)
        *status = 9;
    return rc;
}

static int range(const char *name, const char *text, int64_t *a, int64_t *b, struct pd_err *e)
{
    char from[24] = "";
    const char *colon = text ? strchr(text, ':') : NULL;
    if (!text)
        return 0;
    if (!colon || (size_t)(colon - text) >= sizeof from)
        return pd_fail(e, PD_EUSAGE, "%s: '%s' is no range (example: %s 0:64)", name, text, name);
    memcpy(from, text, (size_t)(colon - text));
    if ((from[0] && pd_parse_int(from, 0, UINT32_MAX, a, e)) || (colon[1] && pd_parse_int(colon + 1, 1, UINT32_MAX, b, e)))
        return pd_err_prefix(e, "%s", name);
    return 0;
}

typedef int verb_fn(const char *path, const struct pd_kv_opts *o, struct pd_err *e);
static const struct { const char *name; verb_fn *fn; } verbs[] = {
    { "ls", pd_kv_ls }, { "quickcheck", pd_kv_quickcheck }, { "verify", pd_kv_verify }, { "stat", pd_kv_stat },
};
static const struct { const char *name, *suffix; int (*fn)(const char *path, const char *to, const struct pd_kv_opts *o, struct pd_err *e); } makers[] = {
    { "slice", ".h5", pd_kv_slice }, { "convert", ".h5", pd_kv_convert }, { "salvage", ".h5", pd_kv_salvage }, { "png", ".png", pd_kv_png },
};

/* Each file by itself: one that is broken does not hide what the others hold. */
static int each(verb_fn *fn, const char **files, const struct pd_kv_opts *o, int *status)
{
    for (; *files; files++) {
        struct pd_err e = { 0 };
        int rc = fn(*files, o, &e);
        if (rc) {
            fflush(o->out);
            pd_error("%s", e.msg);
            if (rc == PD_EUSAGE)
                return rc;
            *status = pd_exit_worse(*status, rc);
        }
    }
    return 0;
}

static int kv(const char **args, int *status, struct pd_err *e)
{
    struct pd_kv_opts o = { .out = stdout, .json = pd_cli.format && !strcmp(pd_cli.format, "json"), .quiet = pd_cli.quiet, .verbose = pd_cli.verbose > 0,
                            .run = run_id, .t0 = -1, .t1 = -1, .l0 = -1, .l1 = -1 };
    const char *verb = args[0] ? args[0] : "", **files = args[0] ? args + 1 : args;
    bool differ = false;
    int rc = range("--tokens", tokens, &o.t0, &o.t1, e), n = 0;
    if (rc || (rc = range("--layers", layers, &o.l0, &o.l1, e)))
        return rc;
    if (block_size && (block_size < 1 || block_size > 65536))
        return pd_fail(e, PD_EUSAGE, "--block-size: %d is out of range 1 to 65536 (example: --block-size 32)", block_size);
    if (order && strcasecmp(order, "hnd") && strcasecmp(order, "nhd"))
        return pd_fail(e, PD_EUSAGE, "--order: '%s' is unknown (hnd or nhd)", order);
    o.block_size = (uint32_t)block_size;
    o.order = !order ? NULL : strcasecmp(order, "nhd") ? "HND" : "NHD";
    while (files[n])
        n++;
    for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++)
        if (!strcmp(verb, verbs[i].name)) {
            if (!n)
                return pd_fail(e, PD_EUSAGE, "kv %s: no file is named (example: pd-trace kv %s run.h5)", verb, verb);
            if ((rc = each(verbs[i].fn, files, &o, status)))
                *status = 2;
            return fflush(stdout) || ferror(stdout) ? pd_fail_sys(e, "standard output") : 0;
        }
    for (size_t i = 0; i < sizeof makers / sizeof *makers; i++)
        if (!strcmp(verb, makers[i].name)) {
            if (n != 1 || !pd_cli.out)
                return pd_fail(e, PD_EUSAGE, "kv %s: wants one file and -o (example: pd-trace kv %s run.h5 -o part%s)", verb, verb, makers[i].suffix);
            return makers[i].fn(files[0], pd_cli.out, &o, e);
        }
    if (!strcmp(verb, "diff")) {
        if (n != 2)
            return pd_fail(e, PD_EUSAGE, "kv diff: wants two files (example: pd-trace kv diff a.h5 b.h5)");
        rc = pd_kv_diff(files[0], files[1], &o, &differ, e);
        if (differ)
            *status = 1;
        return rc ? rc : fflush(stdout) || ferror(stdout) ? pd_fail_sys(e, "standard output") : 0;
    }
    return pd_fail(e, PD_EUSAGE, "kv: '%s' is no verb (ls, quickcheck, verify, stat, diff, slice, convert, salvage, png)", verb);
}

/* Verbs on logs: of events, or of decisions. one: of one run, which comes first. */
static const struct log_verb {
    const char *name;
    int (*report)(const struct pd_report_opts *o, int *status, struct pd_err *e);
    int (*review)(const struct pd_review_opts *o, int *status, struct pd_err *e);
    bool one;
} reports[] = {
    { "ls", .report = pd_report_ls }, { "show", .report = pd_report_show, .one = true }, { "check", .report = pd_report_check }, { "stats", .report = pd_report_stats },
    { "follow", .report = pd_report_follow }, { "why", .review = pd_review_why, .one = true }, { "replay", .review = pd_review_replay },
    { "drift", .review = pd_review_drift }, { "regret", .review = pd_review_regret } };

/* "10ms,20%" */
static int parse_above(struct pd_review_opts *o, struct pd_err *e)
{
    char time[32], *end = NULL;
    const char *comma = above ? strchr(above, ',') : NULL;
    o->least_us = -1;
    o->least_share = -1;
    if (!above)
        return 0;
    if (comma && (size_t)(comma - above) < sizeof time) {
        snprintf(time, sizeof time, "%.*s", (int)(comma - above), above);
        o->least_share = comma[1] >= '0' && comma[1] <= '9' ? strtod(comma + 1, &end) / 100 : -1;
    }
    if (!end || strcmp(end, "%") || o->least_share > 1000 || pd_parse_duration(time, &o->least_us, e) < 0 || o->least_us < 0)
        return pd_fail(e, PD_EUSAGE, "--above: '%.40s' is not a time and a share (example: --above 10ms,20%%)", above);
    return 0;
}

static int report(const struct log_verb *v, const char **args, int *status, struct pd_err *e)
{
    const struct pd_net *net = pd_net_cli(e);
    int64_t max = pd_cli_max_record(e);
    struct pd_review_opts review = { .policy = policy, .identical = identical };
    struct pd_report_opts o = { .out = stdout, .json = pd_cli.format && !strcmp(pd_cli.format, "json"), .quiet = pd_cli.quiet, .strict = strict,
                                .run = run_id, .last = last,
                                .log = { .max_record = (size_t)max, .net = net } };
    if (!net || max < 0)
        return e->code;
    if (bound && (pd_parse_duration(bound, &o.bound_us, e) < 0 || o.bound_us <= 0))
        return pd_fail(e, PD_EUSAGE, "--bound: '%s' is not a time (example: --bound 500ms)", bound);
    if (window && (pd_parse_duration(window, &review.window_us, e) < 0 || review.window_us <= 0))
        return pd_fail(e, PD_EUSAGE, "--window: '%s' is not a time (example: --window 1m)", window);
    if (parse_above(&review, e))
        return e->code;
    if (last < 0 || last > 1000)
        return pd_fail(e, PD_EUSAGE, "--last: %d is out of range 0 to 1000 (example: --last 10)", last);
    if (pd_cli.out)
        return pd_fail(e, PD_EUSAGE, "-o: %s writes to standard output; -o is for cat, merge and kv", v->name);
    if (policy && identical)
        return pd_fail(e, PD_EUSAGE, "--expect-identical: another policy decides otherwise; give it or --policy");
    if (v->one && (!args[0] || strspn(args[0], "0123456789ABCDEFGHJKMNPQRSTVWXYZ") != strlen(args[0]) || strlen(args[0]) > 26 || !args[0][0]))
        return pd_fail(e, PD_EUSAGE, "%s: '%s' is no run id, nor the beginning of one (example: pd-trace %s 01JDV3K5 %s.trace)", v->name, args[0] ? args[0] : "", v->name,
                       v->review ? "router" : "d0");
    if (v->one)
        o.run = *args++;
    o.paths = inputs(args);
    review.log = o;
    return v->report ? v->report(&o, status, e) : v->review(&review, status, e);
}

static int verify(const char **args, struct pd_err *e)
{
    const struct pd_net *net = pd_net_cli(e);
    int64_t max = pd_cli_max_record(e);
    struct pd_verify_opts o = { .at = args[0], .run = run_id, .with = with, .net = net, .max_record = (size_t)max, .out = stdout, .quiet = pd_cli.quiet,
                                .json = pd_cli.format && !strcmp(pd_cli.format, "json") };
    if (!net || max < 0)
        return e->code;
    if (!args[0] || args[1] || !run_id)
        return pd_fail(e, PD_EUSAGE, "verify: wants one daemon and --run (example: pd-trace verify unix:D0 --run 01JDV3K5Q2N8XW4T6Y7Z9ABCDE --with run.h5)");
    if (!pd_run_valid(run_id, strlen(run_id)))
        return pd_fail(e, PD_EUSAGE, "--run: '%.64s' is no run id", run_id);
    if (pd_cli.out || pd_cli.in)
        return pd_fail(e, PD_EUSAGE, "-%c: verify asks a daemon and writes to standard output", pd_cli.out ? 'o' : 'i');
    return pd_verify(&o, e);
}

/* An option that the verb would not look at is a misunderstanding. */
static int misplaced(const char *verb, const char *sub, struct pd_err *e)
{
    const struct { bool given; const char *name, *verbs; } of[] = {
        { run_id, "--run", "cat, follow, kv, verify" }, { with, "--with", "verify" }, { bound, "--bound", "check" }, { last != LAST, "--last", "follow" },
        { strict, "--strict", "ls, show, check, merge, stats, follow, why, replay, drift, regret" },
        { policy, "--policy", "replay" }, { identical, "--expect-identical", "replay" }, { window, "--window", "drift" }, { above, "--above", "regret" }, { tokens, "--tokens", "kv slice" }, { layers, "--layers", "kv slice" },
        { block_size, "--block-size", "kv convert" }, { order, "--order", "kv convert" },
    };
    char both[32], word[40], list[96];
    snprintf(both, sizeof both, "%.10s%s%.16s", verb, sub ? " " : "", sub ? sub : "");
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        snprintf(list, sizeof list, "%s,", of[i].verbs);
        snprintf(word, sizeof word, "%s,", strncmp(of[i].verbs, "kv ", 3) ? verb : both);
        const char *at = strstr(list, word);
        if (of[i].given && !(at && (at == list || at[-1] == ' ')))
            return pd_fail(e, PD_EUSAGE, "%s: %s has no use for it (it is for %s)", of[i].name, both, of[i].verbs);
    }
    return 0;
}

static bool known(const char *verb)
{
    bool yes = !strcmp(verb, "cat") || !strcmp(verb, "merge") || !strcmp(verb, "kv") || !strcmp(verb, "verify");
    for (size_t i = 0; i < sizeof reports / sizeof *reports; i++)
        yes |= !strcmp(verb, reports[i].name);
    return yes;
}

static int work(const char **args, int *status, struct pd_err *e)
{
    const char *verb = args[0] ? args[0] : "";
    if (!*verb)
        return pd_fail(e, PD_EUSAGE, "which verb? (cat, ls, show, check, merge, stats, follow, why, replay, drift, regret, kv, verify; example: pd-trace cat stream.mp)");
    if (known(verb) && misplaced(verb, strcmp(verb, "kv") ? NULL : args[1], e))
        return e->code;
    if (!strcmp(verb, "cat") || !strcmp(verb, "merge"))
        return copy(!strcmp(verb, "merge"), args + 1, status, e);
    if (!strcmp(verb, "kv"))
        return kv(args + 1, status, e);
    if (!strcmp(verb, "verify"))
        return verify(args + 1, e);
    for (size_t i = 0; i < sizeof reports / sizeof *reports; i++)
        if (!strcmp(verb, reports[i].name))
            return report(&reports[i], args + 1, status, e);
    return pd_fail(e, PD_EUSAGE, "'%s' is no verb (cat, ls, show, check, merge, stats, follow, why, replay, drift, regret, kv, verify; example: pd-trace cat stream.mp)", verb);
}

int main(int argc, char **argv)
{
    return pd_cli_main("pd-trace", options, "cat|ls|check|merge|stats|follow|replay|drift|regret [FILE...] | show|why RUN [FILE...] | "
                       "kv ls|quickcheck|verify|stat|diff|slice|convert|salvage|png FILE... | verify unix:D --run RUN", argc, argv, pd_engine_version, work);
}
