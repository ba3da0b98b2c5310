/* pd-decode: KV descriptors (or bare requests) in, tokens and results out; with --listen a daemon. */
#include "../libcommon/engine/decoder.h"
#include "../libcommon/engine/options.h"
#include "../libcommon/kv/convert.h"
#include "../libcommon/kv/dump.h"
#include "../libcommon/serve/worker_options.h"
#include "../libcommon/wire/endpoint.h"

static char *on_mismatch;
static unsigned convert;
static int text, stream, keep_going, strict;
static struct poptOption options[] = {
    { "text", '\0', POPT_ARG_NONE, &text, 0, "write the generated text alone, in order of input", NULL },
    { "stream", '\0', POPT_ARG_NONE, &stream, 0, "write token records too", NULL },
    { "on-mismatch", '\0', POPT_ARG_STRING, &on_mismatch, 0, "KV that fails a check: recompute (default) or fail", "WHAT" },
    { "allow-convert", '\0', POPT_ARG_STRING, &pd_worker_cli.convert, 0, "take KV that differs in these, and convert it: block_size, order", "FIELDS" },
    { "keep-going", 'k', POPT_ARG_NONE, &keep_going, 0, "count and drop stray chunks instead of failing on them", NULL },
    { "strict", '\0', POPT_ARG_NONE, &strict, 0, "exit 9 when a run was recovered from a fault", NULL },
    PD_DAEMON_OPTIONS,
    PD_WORKER_OPTIONS,
    PD_ENGINE_OPTIONS,
    PD_CLI_COMMON
};

static int serve(struct pd_err *e)
{
    if (pd_cli.in || pd_cli.out || pd_cli.format || text || on_mismatch || keep_going || strict || pd_engine_cli.lines)
        return pd_fail(e, PD_EUSAGE, "--listen: -i, -o, --format, --text, --lines, --on-mismatch, -k and --strict are for filters (each client has the form that it writes)");
    return pd_worker_cli_serve("decode", stream, e);
}

static int run(const char **args, int *status, struct pd_err *e)
{
    struct pd_runtime rt = { 0 };
    struct pd_endpoint in = { .fd = -1 }, out = { .fd = -1 };
    struct pd_rstream *rs = NULL;
    struct pd_wstream *ws = NULL;
    struct pd_dump_r *dump = NULL;
    struct pd_trace *trace = NULL;
    const char *to = pd_cli.out ? pd_cli.out : "-", *from = pd_cli.in ? pd_cli.in : "-";
    const struct pd_net *net = pd_net_cli(e);
    int rc = net ? 0 : e->code;
    if (rc < 0)
        return rc;
    if (args[0])
        return pd_fail(e, PD_EUSAGE, "'%s': no argument is expected (input comes from -i)", args[0]);
    if (on_mismatch && strcmp(on_mismatch, "recompute") && strcmp(on_mismatch, "fail"))
        return pd_fail(e, PD_EUSAGE, "--on-mismatch: '%s' is unknown (recompute or fail)", on_mismatch);
    if (pd_worker_cli.convert && (rc = pd_conv_parse(pd_worker_cli.convert, &convert, e)) < 0)
        return rc;
    pd_engine_cli.serving = pd_daemon_cli.listen || pd_register_cli.describe;
    if (pd_register_cli.describe)
        return pd_worker_cli_describe("decode", e);
    if (pd_daemon_cli.listen)
        return serve(e);
    if ((rc = pd_worker_cli_none(e)) < 0)
        return rc;
    if (text && stream)
        return pd_fail(e, PD_EUSAGE, "--text and --stream exclude each other (text is written as it comes anyway)");
    if (text && pd_cli.format)
        return pd_fail(e, PD_EUSAGE, "--text and --format exclude each other");
    if (pd_endpoint_is_h5(to))
        return pd_fail(e, PD_EUSAGE, "-o: decode writes tokens and results, not KV dumps (pd-prefill -o %s does)", to);
    if ((rc = pd_engine_open("decode", &rt, e)) < 0 || (rt.convert = convert, rc = pd_engine_trace("decode", &rt, &trace, e)) < 0)
        goto out;
    if ((rc = pd_endpoint_open_out(to, net, &out, e)) < 0 || (rc = pd_engine_check_tty(out.fd, text, e)) < 0 ||
        (rc = pd_wstream_of(&out, pd_cli.format && !strcmp(pd_cli.format, "json") ? PD_FMT_JSON : PD_FMT_MSGPACK, to, &ws, e)) < 0)
        goto out;
    if (pd_endpoint_is_h5(from) || (strcmp(from, "-") && !strchr(from, ':') && pd_dump_is(from)))
        rc = pd_dump_serve(from, &dump, &in.fd, e);
    else
        rc = pd_endpoint_open_in(from, net, &in, e);
    if (rc < 0 || (rc = pd_engine_reader(&in, from, &rs, e)) < 0)
        goto out;
    struct pd_decode_opts o = { .seed = pd_engine_cli.seed, .keep_going = keep_going, .strict = strict, .text = text, .stream = stream, .from_dump = dump != NULL,
                                .fail_on_mismatch = on_mismatch && !strcmp(on_mismatch, "fail") };
    rc = pd_decode_run(&rt, &o, rs, ws, trace, status, e);
    if (dump) {
        int rc2 = pd_dump_read_end(dump, rc == 0 ? e : NULL);
        dump = NULL;
        rc = rc == 0 ? rc2 : rc;
    }
out:
    rc = pd_wstream_end(ws, &out, rc, e);
    pd_rstream_free(rs);
    if (dump)
        pd_dump_read_end(dump, NULL);
    pd_endpoint_abort(&in);
    pd_trace_close(trace);
    pd_runtime_close(&rt);
    return rc;
}

int main(int argc, char **argv)
{
    return pd_cli_main("pd-decode", options, "-m MODEL < kv > results", argc, argv, pd_engine_version, run);
}
