/* pd-prefill: requests in, KV out; with --listen a daemon. */
#include "../libcommon/engine/options.h"
#include "../libcommon/engine/prefiller.h"
#include "../libcommon/model/dtype.h"
#include "../libcommon/serve/worker_options.h"
#include "../libcommon/wire/endpoint.h"

static char *kv, *codec;
static struct poptOption options[] = {
    { "kv", '\0', POPT_ARG_STRING, &kv, 0, "how the KV travels: inline (default: in the stream)", "SCHEME" },
    { "codec", '\0', POPT_ARG_STRING, &codec, 0, "KV in the stream: none (default), zstd, or auto (zstd where the reader is slower than the coding)", "NAME" },
    { "allow-convert", '\0', POPT_ARG_STRING, &pd_worker_cli.convert, 0, "with --role both: take KV that differs in these, and convert it: block_size, order", "FIELDS" },
    PD_DAEMON_OPTIONS,
    PD_WORKER_OPTIONS,
    PD_ENGINE_OPTIONS,
    PD_CLI_COMMON
};

static int serve(struct pd_err *e)
{
    if (pd_cli.in || pd_cli.out || pd_cli.format || kv || codec || pd_engine_cli.lines)
        return pd_fail(e, PD_EUSAGE, "--listen: -i, -o, --format, --kv, --codec and --lines are for filters (KV goes where each request's route says)");
    return pd_worker_cli_serve("prefill", false, e);
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
        return pd_worker_cli_describe("prefill", e);
    if (pd_daemon_cli.listen)
        return serve(e);
    if ((rc = pd_worker_cli_none(e)) < 0)
        return rc;
    if (pd_worker_cli.convert)
        return pd_fail(e, PD_EUSAGE, "--allow-convert: it is for workers that take KV (--listen, --role both)");
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
