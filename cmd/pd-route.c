/* pd-route: requests of many clients in, each given to workers, tokens and results back. Also asks: the ledger of any daemon, which workers fit together. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "../libcommon/base/cli.h"
#include "../libcommon/base/log.h"
#include "../libcommon/route/matrix.h"
#include "../libcommon/serve/ask.h"
#include "../libcommon/serve/register.h"
#include "../libcommon/serve/router_filter.h"
#include "../libcommon/wire/endpoint.h"
#include "../libcommon/wire/frame.h"
#include "../libcommon/wire/stream.h"

static char **workers, *workers_file, *policy, *risk, *temperature, *shadow, *profile, *seed, *max_runs, *attempts, *wait_, *suspect, *gone, *key_ttl, *index_bytes, *model, *chat_template, *trace, *trace_max, *status_of;
static char *topology, *domain, *ledger, *fallback_max, *fallback_rate, *release, *reason, *router;
static int stream, early, check, holds;
static struct poptOption ask_options[] = {
    { "status", '\0', POPT_ARG_STRING, &status_of, 0, "print the ledger of the daemon on this socket and exit (--format msgpack: its `worker` records)",
        "ENDPOINT" },
    { "check", '\0', POPT_ARG_NONE, &check, 0, "print which prefill worker can give KV to which decode worker and exit; 3 when one has no partner", NULL },
    { "holds", '\0', POPT_ARG_NONE, &holds, 0, "print the pairs of workers that --router has on hold, as KV failed a check, and exit", NULL },
    { "release", '\0', POPT_ARG_STRING, &release, 0, "let KV go between them again: endpoints or names of a prefill and a decode worker, or all; with --reason", "P,D" },
    { "reason", '\0', POPT_ARG_STRING, &reason, 0, "of --release, for the record", "TEXT" },
    { "router", '\0', POPT_ARG_STRING, &router, 0, "of --holds and --release: which", "ENDPOINT" },
    { "workers", 'w', POPT_ARG_STRING, &workers_file, 0, "a file of `worker` records (--describe prints them): of --check, or to route by between two commands", "FILE" },
    POPT_TABLEEND
};
static struct poptOption path_options[] = {
    { "topology", '\0', POPT_ARG_STRING, &topology, 0, "where workers are and what paths are worth: pd-topology(5); read again when it changes. With --check: is it good?", "FILE" },
    { "domain", '\0', POPT_ARG_STRING, &domain, 0, "how near the two workers of a run have to be: any, or require: or prefer: with local, nvlink, pcie, rack or cross (any)", "RULE" },
    { "ledger", '\0', POPT_ARG_STRING, &ledger, 0, "keep here what prefill workers have for others, and pairs on hold, over a restart (default: in memory)", "FILE" },
    { "fallback-max", '\0', POPT_ARG_STRING, &fallback_max, 0, "prompts whose KV did not come that a decode worker computes at a time: tokens, or a share of those it has room for (10%)", "N|N%" },
    { "fallback-rate", '\0', POPT_ARG_STRING, &fallback_rate, 0, "such prompts a second, over all workers (default: no limit)", "N" },
    POPT_TABLEEND
};
static struct poptOption options[] = {
    { "worker", '\0', POPT_ARG_ARGV, &workers, 0, "a worker to use: unix:PATH; may be repeated. Others dial in (their --register)", "ENDPOINT" },
    { "policy", '\0', POPT_ARG_STRING, &policy, 0, "aggregated, fixed, conditional, threshold:N, dynamo, llmd or random "
        "(default: fixed when there are prefill workers, else aggregated)", "POLICY" },
    { "risk", '\0', POPT_ARG_STRING, &risk, 0, "of conditional: the quantile that is compared, 0.5 to 0.999 (default 0.95)", "Q" },
    { "temperature", '\0', POPT_ARG_STRING, &temperature, 0, "draw among good ways instead of taking the best: 0.1 gives one that is 10 % worse e times less (default 0)", "T" },
    { "shadow", '\0', POPT_ARG_STRING, &shadow, 0, "a second policy, looked at without effect and recorded", "POLICY" },
    { "profile", '\0', POPT_ARG_STRING, &profile, 0, "begin with these costs instead of a guess (pd-bench calibrate writes them)", "FILE" },
    { "stream", '\0', POPT_ARG_NONE, &stream, 0, "send token records to clients that do not say (default: results alone)", NULL },
    { "early-first-token", '\0', POPT_ARG_NONE, &early, 0, "let the first token out before its KV is verified (default: hold it)", NULL },
    { "seed", '\0', POPT_ARG_STRING, &seed, 0, "of requests that bring none (default 0)", "N" },
    { "max-runs", '\0', POPT_ARG_STRING, &max_runs, 0, "runs in hand at once; who brings one more is not read meanwhile (default 4096)", "N" },
    { "attempts", '\0', POPT_ARG_STRING, &attempts, 0, "decode workers that a run may lose before its first token goes out (default 4)", "N" },
    { "wait", '\0', POPT_ARG_STRING, &wait_, 0, "how long a run waits when nobody may have it, then it is blocked (default 10s)", "TIME" },
    { "suspect-after", '\0', POPT_ARG_STRING, &suspect, 0, "a worker that is silent for so long gets nothing new (default 3s)", "TIME" },
    { "gone-after", '\0', POPT_ARG_STRING, &gone, 0, "a worker that is silent for so long counts as gone (default 10s)", "TIME" },
    { "idempotency-ttl", '\0', POPT_ARG_STRING, &key_ttl, 0, "how long what became of an idempotency_key is kept (default 10m)", "TIME" },
    { "model", 'm', POPT_ARG_STRING, &model, 0, "tokenise text with this model's tokenizer, so that it is known who holds its beginning (its weights are not read)", "FILE" },
    { "chat-template", '\0', POPT_ARG_STRING, &chat_template, 0, "of messages, with -m: chatml, llama2, llama3, or a file (default: the model's own)", "NAME" },
    { "index-bytes", '\0', POPT_ARG_STRING, &index_bytes, 0, "memory of the index of what workers hold (default 256MiB)", "SIZE" },
    { "trace", '\0', POPT_ARG_STRING, &trace, 0, "append events and routes to FILE", "FILE" },
    { "trace-max", '\0', POPT_ARG_STRING, &trace_max, 0, "begin a new trace file past this size; the old one becomes FILE.1 (default: never)", "SIZE" },
    { NULL, '\0', POPT_ARG_INCLUDE_TABLE, path_options, 0, "Paths and fallbacks:", NULL },
    { NULL, '\0', POPT_ARG_INCLUDE_TABLE, ask_options, 0, "To ask:", NULL },
    PD_DAEMON_OPTIONS,
    PD_CLI_COMMON
};

/* The workers that --check is about: of the file, and of the daemons named, routers or workers. */
static int gather(struct pd_arena *mem, struct pd_worker_rec **w, uint32_t *n, struct pd_err *e)
{
    struct pd_worker_rec *all = NULL, *of_file = NULL;
    struct pd_buf recs = { 0 };
    uint32_t n_file = 0, cap = 0;
    const struct pd_net *net = pd_net_cli(e);
    int rc = net ? 0 : e->code;
    if (rc == 0 && workers_file)
        rc = pd_workers_read(workers_file, mem, &of_file, &n_file, e);
    for (int i = 0; rc == 0 && workers && workers[i]; i++)
        if ((rc = pd_ask_workers(workers[i], net, &recs, e)) == PD_EUSAGE)
            pd_err_prefix(e, "--worker");
    for (size_t at = 0, len = 0; rc == 0 && at < recs.n; at += len, cap++) {
        struct pd_frame_scan scan = { 0 };
        rc = pd_frame_next(&scan, recs.p + at, recs.n - at, SIZE_MAX / 2, &len, e) == 1 ? 0 : PD_ECORRUPT;
    }
    if (rc == 0 && !(all = pd_arena_alloc(mem, cap + n_file + 1, sizeof *all, e)))
        rc = PD_ENOMEM;
    if (rc == 0 && n_file)
        memcpy(all, of_file, n_file * sizeof *all);
    *n = n_file;
    for (size_t at = 0, len = 0; rc == 0 && at < recs.n; at += len) {
        struct pd_frame_scan scan = { 0 };
        pd_frame_next(&scan, recs.p + at, recs.n - at, SIZE_MAX / 2, &len, e);
        rc = pd_worker_rec_decode(recs.p + at, len, mem, &all[*n], e);
        *n += rc == 0;
    }
    pd_buf_free(&recs);
    *w = all;
    return rc;
}

static int check_topology(struct pd_err *e)
{
    struct pd_topology *t = NULL;
    struct pd_buf text = { 0 }, filled = { 0 };
    int rc = pd_topology_load(topology, &t, e);
    rc = rc ? rc : pd_topology_filled(t, &filled, e);
    rc = rc ? rc : pd_buf_printf(&text, e, "%s: good, %u domains%s%.*s\n", topology, pd_topology_domains(t), filled.n ? "; " : "", (int)filled.n, filled.n ? (char *)filled.p : "");
    rc = rc ? rc : pd_print_text(&text, e);
    pd_topology_free(t);
    pd_buf_free(&text);
    pd_buf_free(&filled);
    return rc;
}

static int print_matrix(struct pd_err *e)
{
    struct pd_arena mem = { 0 };
    struct pd_worker_rec *w = NULL;
    struct pd_matrix m = { 0 };
    struct pd_buf out = { 0 };
    uint32_t n = 0;
    if (topology && (workers || workers_file))
        return pd_fail(e, PD_EUSAGE, "--check: one at a time: --topology, or workers");
    if (topology)
        return check_topology(e);
    if (!workers && !workers_file)
        return pd_fail(e, PD_EUSAGE, "--check: of which workers? (add -w FILE, or --worker unix:PATH of workers or of their router; or --topology FILE)");
    int rc = gather(&mem, &w, &n, e);
    rc = rc ? rc : pd_matrix_make(w, n, &m, e);
    if (rc == 0 && pd_cli.format)
        rc = (rc = pd_matrix_records(&m, &out, e)) ? rc : pd_print_records(out.p, out.n, e);
    else if (rc == 0)
        rc = (rc = pd_matrix_text(&m, &out, e)) ? rc : pd_print_text(&out, e);
    rc = rc ? rc : pd_matrix_needed(&m, e);
    pd_matrix_free(&m);
    pd_buf_free(&out);
    pd_arena_free(&mem);
    return rc;
}

static int a_number(const char *name, const char *text, int64_t lo, int64_t hi, int64_t *v, struct pd_err *e)
{
    return text && pd_parse_int(text, lo, hi, v, e) < 0 ? pd_err_prefix(e, "%s", name) : 0;
}

static int a_time(const char *name, const char *text, int64_t *us, struct pd_err *e)
{
    if (text && pd_parse_duration(text, us, e) < 0)
        return pd_err_prefix(e, "%s", name);
    return text && *us < 1000 ? pd_fail(e, PD_EUSAGE, "%s: '%s' is too short (1ms or more)", name, text) : 0;
}

static int a_fraction(const char *name, const char *text, double lo, double hi, double *v, struct pd_err *e)
{
    char *end = NULL;
    double x = text ? strtod(text, &end) : *v;
    if (text && (end == text || *end || !(x >= lo && x <= hi)))
        return pd_fail(e, PD_EUSAGE, "%s: '%s' is not a number from %g to %g", name, text, lo, hi);
    *v = x;
    return 0;
}

static int rules(struct pd_router_opts *o, struct pd_err *e)
{
    struct pd_policy_spec spec = { 0 };
    int rc = policy ? pd_policy_parse(policy, &spec, e) : 0;
    if (rc)
        return pd_err_prefix(e, "--policy");
    o->policy = spec.kind;
    o->policy_n = policy && strchr(policy, ':') ? spec.n : 0;
    o->rules = pd_rules_usual;
    o->profile = profile;
    if ((rc = a_fraction("--risk", risk, 0.5, 0.999, &o->rules.risk, e)) || (rc = a_fraction("--temperature", temperature, 0, 1000, &o->rules.temperature, e)))
        return rc;
    if (shadow && (pd_policy_parse(shadow, &spec, e) < 0 || snprintf(o->rules.shadow, sizeof o->rules.shadow, "%s", shadow) >= (int)sizeof o->rules.shadow))
        return pd_err_prefix(e, "--shadow");
    return 0;
}

/* --domain and those of fallbacks. */
static int path_opts(struct pd_router_opts *o, struct pd_err *e)
{
    o->topology = topology;
    o->ledger = ledger;
    if (domain && pd_domain_rule_parse(domain, &o->domain, e) < 0)
        return pd_err_prefix(e, "--domain");
    if (o->domain.how != PD_DOMAIN_ANY && !topology)
        return pd_fail(e, PD_EUSAGE, "--domain: '%s' goes by a topology (add --topology FILE; pd-topology(5))", domain);
    if (fallback_max && pd_limit_parse_max(fallback_max, &o->fallback, e) < 0)
        return pd_err_prefix(e, "--fallback-max");
    return fallback_rate && pd_limit_parse_rate(fallback_rate, &o->fallback, e) < 0 ? pd_err_prefix(e, "--fallback-rate") : 0;
}

static int serve(struct pd_err *e)
{
    struct pd_router_opts o = { .worker = (const char *const *)workers, .policy_given = policy != NULL, .stream = stream, .early = early };
    struct pd_daemon_opts d = { .role = "route" };
    struct pd_trace *t = NULL;
    char name[80], host[64] = "host";
    int64_t runs = 0, tries = 0, rotate = 0, index = 0, max = pd_cli_max_record(e);
    int rc = max < 0 ? e->code : pd_daemon_from_cli(&d, e);
    if (rc || (rc = rules(&o, e)) || (rc = a_number("--seed", seed, 0, INT64_MAX, &o.seed, e)) || (rc = a_number("--max-runs", max_runs, 1, 1000000, &runs, e)) ||
        (rc = a_number("--attempts", attempts, 1, 100, &tries, e)) || (rc = a_time("--wait", wait_, &o.wait_us, e)) ||
        (rc = a_time("--suspect-after", suspect, &o.suspect_us, e)) || (rc = a_time("--gone-after", gone, &o.gone_us, e)) ||
        (rc = a_time("--idempotency-ttl", key_ttl, &o.key_ttl_us, e)) || (rc = path_opts(&o, e)))
        return rc;
    if (trace_max && (pd_parse_size(trace_max, &rotate, e) < 0 || rotate < 4096))
        return pd_fail(e, PD_EUSAGE, "--trace-max: '%s' is not a size of 4KiB or more (example: --trace-max 64MiB)", trace_max);
    if (index_bytes && (pd_parse_size(index_bytes, &index, e) < 0 || index < 1 << 20))
        return pd_fail(e, PD_EUSAGE, "--index-bytes: '%s' is not a size of 1MiB or more (example: --index-bytes 256MiB)", index_bytes);
    o.index_bytes = (size_t)index;
    if (chat_template && !model)
        return pd_fail(e, PD_EUSAGE, "--chat-template: without -m no text is tokenised here (add -m MODEL)");
    o.max_runs = (uint32_t)runs;
    o.attempts = (int)tries;
    o.max_record = d.max_record = (size_t)max;
    gethostname(host, sizeof host - 1);
    snprintf(name, sizeof name, "route@%.63s:%d", host, (int)getpid());
    d.worker = name;
    struct pd_model *m = NULL;
    if (model && (rc = pd_model_open(model, &(struct pd_model_opts){ .chat_template = chat_template, .no_weights = true, .no_digest = true }, &m, e)) < 0)
        return rc;
    o.model = m;
    if ((rc = pd_trace_open(trace, name, "route", &t, e)) < 0) {
        pd_model_free(m);
        return rc;
    }
    pd_trace_limit(t, (uint64_t)rotate);
    o.trace = t;
    rc = pd_router_serve(&o, &d, e);
    pd_trace_close(t);
    pd_model_free(m);
    return rc;
}

static int filter(int *status, struct pd_err *e)
{
    struct pd_router_opts o = { 0 };
    struct pd_endpoint in = { .fd = -1 }, out = { .fd = -1 };
    struct pd_rstream *rs = NULL;
    struct pd_wstream *ws = NULL;
    struct pd_trace *t = NULL;
    const char *from = pd_cli.in ? pd_cli.in : "-", *to = pd_cli.out ? pd_cli.out : "-";
    const struct pd_net *net = pd_net_cli(e);
    int64_t max = pd_cli_max_record(e);
    bool json = pd_cli.format && !strcmp(pd_cli.format, "json");
    if (workers || stream || early || max_runs || attempts || wait_ || suspect || gone || key_ttl || index_bytes || ledger || fallback_max || fallback_rate || model ||
        chat_template || trace_max || pd_daemon_cli.metrics || pd_daemon_cli.advertise || pd_daemon_cli.ready_fd || pd_daemon_cli.max_conns)
        return pd_fail(e, PD_EUSAGE, "-w between two commands: options of the daemon need --listen (these are not: --policy, --risk, --temperature, --shadow, --profile, "
                                     "--seed, --topology, --domain, --trace)");
    int rc = !net || max < 0 ? e->code : 0;
    if (rc || (rc = rules(&o, e)) || (rc = a_number("--seed", seed, 0, INT64_MAX, &o.seed, e)) || (rc = path_opts(&o, e)) || (rc = pd_trace_open(trace, "route", "route", &t, e)))
        return rc;
    o.policy_given = policy != NULL;
    o.trace = t;
    if ((rc = pd_endpoint_open_out(to, net, &out, e)) == 0 && !json && isatty(out.fd))
        rc = pd_fail(e, PD_EUSAGE, "-o: records are binary and the output is a terminal (use --format json, -o FILE, or a pipe)");
    rc = rc ? rc : pd_wstream_of(&out, json ? PD_FMT_JSON : PD_FMT_MSGPACK, to, &ws, e);
    rc = rc ? rc : pd_endpoint_open_in(from, net, &in, e);
    rc = rc ? rc : pd_rstream_of(&in, &(struct pd_rstream_opts){ .max_record = (size_t)max, .name = from }, &rs, e);
    rc = rc ? rc : pd_router_filter(&o, workers_file, rs, ws, status, e);
    rc = pd_wstream_end(ws, &out, rc, e);
    pd_rstream_free(rs);
    pd_endpoint_abort(&in);
    pd_trace_close(t);
    return rc;
}

static int run(const char **args, int *status, struct pd_err *e)
{
    if (args[0])
        return pd_fail(e, PD_EUSAGE, "'%s': no argument is expected", args[0]);
    bool between = workers_file && !check && !status_of && !pd_daemon_cli.listen;
    if (pd_cli.in && !between)
        return pd_fail(e, PD_EUSAGE, "-i: nothing is read (clients come to --listen unix:PATH)");
    if (pd_cli.format && strcmp(pd_cli.format, "json") && strcmp(pd_cli.format, "msgpack"))
        return pd_fail(e, PD_EUSAGE, "--format: '%s' is unknown (json or msgpack)", pd_cli.format);
    if ((status_of != NULL) + (check != 0) + (holds || release) + (pd_daemon_cli.listen != NULL) > 1)
        return pd_fail(e, PD_EUSAGE, "--status, --check, --holds or --release, and --listen exclude each other");
    if ((holds || release) != (router != NULL))
        return pd_fail(e, PD_EUSAGE, router ? "--router: it is asked for --holds or --release" : "--holds, --release: of which router? (add --router unix:R)");
    if ((release != NULL) != (reason != NULL))
        return pd_fail(e, PD_EUSAGE, "--release and --reason go together (example: --release unix:P0,unix:D0 --reason 'cable changed' --router unix:R)");
    if (router)
        return pd_print_holds(router, release, reason, e);
    if (status_of)
        return pd_print_status(status_of, e);
    if (check)
        return print_matrix(e);
    if (between)
        return filter(status, e);
    if (!pd_daemon_cli.listen)
        return pd_fail(e, PD_EUSAGE, "nothing to do (example: pd-route --listen unix:R --worker unix:P0 --worker unix:D0)");
    if (pd_cli.out || pd_cli.format || workers_file)
        return pd_fail(e, PD_EUSAGE, "--listen: -o, --format and -w are for --status and --check (each client has the form that it writes)");
    return serve(e);
}

int main(int argc, char **argv)
{
    return pd_cli_main("pd-route", options, "--listen unix:R --worker unix:P0 --worker unix:D0", argc, argv, NULL, run);
}
