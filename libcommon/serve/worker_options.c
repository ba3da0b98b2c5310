#include "../base/opt.h"
#include "../engine/options.h"
#include "../kv/convert.h"
#include "../xfer/transport.h"
#include "worker_options.h"

struct pd_worker_cli pd_worker_cli;
struct poptOption pd_worker_options[] = {
    { "role", '\0', POPT_ARG_STRING, &pd_worker_cli.role, 0, "prefill, decode (default: that of the command) or both: what a router may use it for", "ROLE" },
    { "prefer", '\0', POPT_ARG_STRING, &pd_worker_cli.prefer, 0, "with --role both: its side where each worker has one (default: that of the command)", "SIDE" },
    { "via", '\0', POPT_ARG_STRING, &pd_worker_cli.via, 0, "how KV may go and come, best first (default shm, inline; over TCP rdma if there is a device, tcp, inline)", "SCHEMES" },
    { "streams", '\0', POPT_ARG_STRING, &pd_worker_cli.streams, 0, "streams of data to a decode worker by tcp (default 4)", "N" },
    { "lease", '\0', POPT_ARG_STRING, &pd_worker_cli.lease, 0, "how long published KV is kept for a decode worker (default 30s)", "TIME" },
    { "in-place", '\0', POPT_ARG_NONE, &pd_worker_cli.in_place, 0, "read KV that comes by shm where the prefill worker has it", NULL },
    POPT_TABLEEND
};

/* What the options say. */
struct asked { const char *role, *prefer; int64_t lease_us, streams; unsigned convert; };

static bool is_side(const char *s) { return !strcmp(s, "prefill") || !strcmp(s, "decode"); }

static int read_options(const char *side, struct asked *a, struct pd_err *e)
{
    const struct pd_worker_cli *c = &pd_worker_cli;
    int rc;
    *a = (struct asked){ .role = c->role ? c->role : side };
    bool both = !strcmp(a->role, "both"), gives = both || !strcmp(a->role, "prefill");
    if (!both && strcmp(a->role, side))
        return pd_fail(e, PD_EUSAGE, "--role: '%s' is no role of this command (%s or both)", a->role, side);
    if (c->prefer && !both)
        return pd_fail(e, PD_EUSAGE, "--prefer: a worker of role %s has one side (add --role both)", a->role);
    if (c->prefer && !is_side(c->prefer))
        return pd_fail(e, PD_EUSAGE, "--prefer: '%s' is no side of a worker (prefill or decode)", c->prefer);
    a->prefer = both ? c->prefer ? c->prefer : side : NULL;
    if ((c->lease || c->streams) && !gives)
        return pd_fail(e, PD_EUSAGE, "--%s: it is for workers that give KV (--role both)", c->lease ? "lease" : "streams");
    if ((c->in_place || c->convert) && gives && !both)
        return pd_fail(e, PD_EUSAGE, "--%s: it is for workers that take KV (--role both)", c->in_place ? "in-place" : "allow-convert");
    if (c->lease && (pd_parse_duration(c->lease, &a->lease_us, e) < 0 || a->lease_us < 100000))
        return pd_fail(e, PD_EUSAGE, "--lease: '%s' is not a time of 100ms or more (example: --lease 30s)", c->lease);
    if (c->via && (rc = pd_via_check(c->via, e)) < 0)
        return rc;
    if (c->streams && pd_parse_int(c->streams, 1, PD_XFER_STREAMS_MAX, &a->streams, e) < 0)
        return pd_err_prefix(e, "--streams");
    return c->convert ? pd_conv_parse(c->convert, &a->convert, e) : 0;
}

int pd_worker_cli_describe(const char *side, struct pd_err *e)
{
    struct pd_runtime rt = { 0 };
    struct asked a;
    int rc = read_options(side, &a, e);
    if (rc < 0)
        return rc;
    rc = pd_engine_open(a.role, &rt, e);
    rt.convert = a.convert;
    const struct pd_register_opts o = { .rt = &rt, .role = a.role, .prefer = a.prefer, .max_runs = 4 * rt.max_seqs, .via = pd_worker_cli.via };
    rc = rc ? rc : pd_register_print(&o, (const char *const *)pd_daemon_cli.listen, e);
    pd_runtime_close(&rt);
    return rc;
}

int pd_worker_cli_serve(const char *side, bool stream, struct pd_err *e)
{
    struct pd_runtime rt = { 0 };
    struct pd_trace *trace = NULL;
    struct asked a;
    struct pd_daemon_opts o = { .role = side };
    int64_t max = pd_cli_max_record(e);
    int rc = max < 0 ? e->code : pd_daemon_from_cli(&o, e);
    rc = rc ? rc : read_options(side, &a, e);
    if (rc < 0)
        return rc;
    o.role = a.role;
    o.max_record = (size_t)max;
    if ((rc = pd_engine_open(a.role, &rt, e)) == 0 && (rt.convert = a.convert, rc = pd_engine_trace(a.role, &rt, &trace, e)) == 0) {
        const struct pd_worker_opts w = { .prefer = a.prefer, .seed = pd_engine_cli.seed, .stream = stream, .via = pd_worker_cli.via, .in_place = pd_worker_cli.in_place,
                                          .lease_us = a.lease_us, .streams = (uint32_t)a.streams, .trace = trace,
                                          .routers = (const char *const *)pd_register_cli.routers };
        rc = pd_worker_serve(&rt, &w, &o, e);
    }
    pd_trace_close(trace);
    pd_runtime_close(&rt);
    return rc;
}

int pd_worker_cli_none(struct pd_err *e)
{
    const struct pd_worker_cli *c = &pd_worker_cli;
    const struct pd_daemon_cli *d = &pd_daemon_cli;
    if (c->role || c->prefer || c->via || c->streams || c->lease || c->in_place || pd_register_cli.routers || d->metrics || d->advertise || d->ready_fd || d->max_conns)
        return pd_fail(e, PD_EUSAGE, "--role, --prefer, --via, --streams, --lease, --in-place, --register, --advertise, --metrics, --ready-fd and --max-connections "
                                     "are for daemons (add --listen unix:PATH)");
    return 0;
}
