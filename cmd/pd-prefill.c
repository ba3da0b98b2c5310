/* pd-prefill: requests in, KV out; with --listen a daemon. */
#include "../libcommon/base/opt.h"
#include "../libcommon/engine/options.h"
#include "../libcommon/engine/prefiller.h"
#include "../libcommon/model/dtype.h"
#include "../libcommon/serve/giver.h"
#include "../libcommon/serve/register.h"
#include "../libcommon/wire/endpoint.h"
#include "../libcommon/xfer/transport.h"

static char *kv, *codec, *via, *lease, *streams;
static struct poptOption options[] = {
    { "kv", '\0', POPT_ARG_STRING, &kv, 0, "how the KV travels: inline (default: in the stream)", "SCHEME" },
    { "codec", '\0', POPT_ARG_STRING, &codec, 0, "KV in the stream: none (default), zstd, or auto (zstd where the reader is slower than the coding)", "NAME" },
    { "via", '\0', POPT_ARG_STRING, &via, 0, "as a daemon: how KV may go, best first (default shm,inline; over TCP tcp,inline)", "SCHEMES" },
    { "streams", '\0', POPT_ARG_STRING, &streams, 0, "as a daemon: streams of data to a decode worker by tcp (default 4)", "N" },
    { "lease", '\0', POPT_ARG_STRING, &lease, 0, "as a daemon: how long published KV is kept for a decode worker (default 30s)", "TIME" },
    PD_DAEMON_OPTIONS,
    PD_REGISTER_OPTIONS,
    PD_ENGINE_OPTIONS,
    PD_CLI_COMMON
};

static int describe(struct pd_err *e)
{
    struct pd_runtime rt = { 0 };
    int rc = pd_engine_open("prefill", &rt, e);
    struct pd_register_opts o = { .rt = &rt, .role = "prefill", .max_runs = 4 * rt.max_seqs, .via = via };
    rc = rc ? rc : pd_register_print(&o, (const char *const *)pd_daemon_cli.listen, e);
    pd_runtime_close(&rt);
    return rc;
}

static int serve(struct pd_err *e)
{
    struct pd_runtime rt = { 0 };
    struct pd_trace *trace = NULL;
    struct pd_daemon_opts o = { .role = "prefill" };
    int64_t max = pd_cli_max_record(e), lease_us = 0, n_streams = 0;
    int rc = max < 0 ? e->code : pd_daemon_from_cli(&o, e);
    if (rc < 0)
        return rc;
    if (pd_cli.in || pd_cli.out || pd_cli.format || kv || codec || pd_engine_cli.lines)
        return pd_fail(e, PD_EUSAGE, "--listen: -i, -o, --format, --kv, --codec and --lines are for filters (KV goes where each request's route says)");
    if (lease && (pd_parse_duration(lease, &lease_us, e) < 0 || lease_us < 100000))
        return pd_fail(e, PD_EUSAGE, "--lease: '%s' is not a time of 100ms or more (example: --lease 30s)", lease);
    if (via && (rc = pd_via_check(via, e)) < 0)
        return rc;
    if (streams && pd_parse_int(streams, 1, PD_XFER_STREAMS_MAX, &n_streams, e) < 0)
        return pd_err_prefix(e, "--streams");
    o.max_record = (size_t)max;
    if ((rc = pd_engine_open("prefill", &rt, e)) == 0 && (rc = pd_engine_trace("prefill", &rt, &trace, e)) == 0) {
        struct pd_giver_opts g = { .seed = pd_engine_cli.seed, .lease_us = lease_us, .via = via, .streams = (uint32_t)n_streams, .trace = trace,
                                    .routers = (const char *const *)pd_register_cli.routers };
        rc = pd_giver_serve(&rt, &g, &o, e);
    }
    pd_trace_close(trace);
    pd_runtime_close(&rt);
    return rc;
}

static int run(const char **args, int *status, struct pd_err *e)
{
    struct pd_runtime rt = { 0 };
    struct pd_endpoint in = { .fd = -1 }, out = { .fd = -1 };
    struct pd_rstream *rs = NULL;
    struct pd_wstream *ws = NULL;
    struct pd_dump_w *dump = NULL;
    struct pd_trace *trace = NULL;
    const char *to = pd_cli.out ? pd_cli.out : "-", *from = pd_cli.in ? pd_cli.in : "-";
    const struct pd_net *net = pd_net_cli(e);
    int rc = net ? 0 : e->code;
    if (rc < 0)
        return rc;
    if (args[0])
        return pd_fail(e, PD_EUSAGE, "'%s': no argument is expected (input comes from -i)", args[0]);
    pd_engine_cli.serving = pd_daemon_cli.listen || pd_register_cli.describe;
    if (pd_register_cli.describe)
        return describe(e);
    if (pd_daemon_cli.listen)
        return serve(e);
    if (via || lease || streams || pd_register_cli.routers || pd_daemon_cli.metrics || pd_daemon_cli.advertise || pd_daemon_cli.ready_fd || pd_daemon_cli.max_conns)
        return pd_fail(e, PD_EUSAGE, "--via, --streams, --lease, --register, --advertise, --metrics, --ready-fd and --max-connections are for daemons "
                                     "(add --listen unix:PATH)");
    if (kv && strcmp(kv, "inline"))
        return pd_fail(e, PD_EUSAGE, "--kv: '%s' is no way of a stream: inline is"
                                     " (-o FILE.h5 makes a dump; shm, tcp and rdma: pd-kvsend, or --listen and --via)", kv);
    struct pd_prefill_opts o = { .max_record = (size_t)pd_cli_max_record(e) };
    if (codec && !pd_codec_parse(codec, &o.codec))
        return pd_fail(e, PD_EUSAGE, "--codec: '%s' is unknown (" PD_CODEC_LIST ")", codec);
    if (codec && pd_endpoint_is_h5(to))
        return pd_fail(e, PD_EUSAGE, "--codec: it is for KV in a stream; a dump has its own");
    if ((rc = pd_engine_open("prefill", &rt, e)) < 0 || (rc = pd_engine_trace("prefill", &rt, &trace, e)) < 0)
        goto out;
    if (o.codec == PD_CODEC_ZSTD && !pd_codec_fits(pd_kv_dtype_name(pd_pool_geom(rt.pool)->dtype))) {
        rc = pd_fail(e, PD_EUSAGE, "--codec zstd: it is for KV of f16 or bf16, and this model's is f32 (use --kv-dtype bf16, or --codec auto)");
        goto out;
    }
    if (pd_endpoint_is_h5(to))
        rc = pd_dump_create(to, &dump, e);
    else if ((rc = pd_endpoint_open_out(to, net, &out, e)) == 0 && (rc = pd_engine_check_tty(out.fd, false, e)) == 0)
        rc = pd_wstream_of(&out, pd_cli.format && !strcmp(pd_cli.format, "json") ? PD_FMT_JSON : PD_FMT_MSGPACK, to, &ws, e);
    if (rc < 0 || (rc = pd_endpoint_open_in(from, net, &in, e)) < 0 || (rc = pd_engine_reader(&in, from, &rs, e)) < 0)
        goto out;
    o.seed = pd_engine_cli.seed;
    rc = pd_prefill_run(&rt, &o, rs, ws, dump, trace, status, e);
    if (rc == 0 && dump && *status && !pd_dump_runs(dump)) {    /* every request failed: there is nothing to keep */
        pd_dump_abort(dump);
        dump = NULL;
    } else if (rc == 0 && dump) {
        rc = pd_dump_commit(dump, e);
        dump = NULL;
    }
out:
    if (rc < 0)
        pd_dump_abort(dump);
    rc = pd_wstream_end(ws, &out, rc, e);
    pd_rstream_free(rs);
    pd_endpoint_abort(&in);
    pd_trace_close(trace);
    pd_runtime_close(&rt);
    return rc;
}

int main(int argc, char **argv)
{
    return pd_cli_main("pd-prefill", options, "-m MODEL < requests > kv", argc, argv, pd_engine_version, run);
}
