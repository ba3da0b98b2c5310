/* pd-kvsend: KV from one end to another: record streams, files, dumps, sockets; verified here before it goes on. */
#include <stdio.h>
#include <unistd.h>
#include "../libcommon/base/cli.h"
#include "../libcommon/serve/ask.h"
#include "../libcommon/serve/sender.h"
#include "../libcommon/xfer/transport.h"

static char *via, *peers, *kv_mem, *chunk, *resume, *trace, *status_of;
static int keep_going, strict;
static struct poptOption options[] = {
    { "via", '\0', POPT_ARG_STRING, &via, 0, "how KV may go between two that speak the transfer protocol, best first (default shm,inline)", "SCHEMES" },
    { "peers", '\0', POPT_ARG_STRING, &peers, 0, "how many peers a listening endpoint serves before it is done (default 1)", "N" },
    { "kv-mem", '\0', POPT_ARG_STRING, &kv_mem, 0, "memory for KV on its way (default an eighth of memory, 1GiB at most)", "SIZE" },
    { "chunk", '\0', POPT_ARG_STRING, &chunk, 0, "size of the chunks that go out (default: as they come)", "SIZE" },
    { "resume", '\0', POPT_ARG_STRING, &resume, 0, "how long a dropped transfer is tried to be gone on with (default: the connect timeout)", "TIME" },
    { "keep-going", 'k', POPT_ARG_NONE, &keep_going, 0, "count and drop stray chunks instead of failing on them", NULL },
    { "strict", '\0', POPT_ARG_NONE, &strict, 0, "exit 9 when a transfer had to begin again, or went a slower way than it could", NULL },
    { "status", '\0', POPT_ARG_STRING, &status_of, 0, "print the ledger of the daemon on this socket and exit (--format msgpack: its `worker` records)",
        "ENDPOINT" },
    { "trace", '\0', POPT_ARG_STRING, &trace, 0, "append what became of each transfer to FILE", "FILE" },
    PD_CLI_COMMON
};

static int a_size(const char *name, const char *text, int64_t min, int64_t *v, struct pd_err *e)
{
    if (text && (pd_parse_size(text, v, e) < 0 || *v < min))
        return pd_fail(e, PD_EUSAGE, "%s: '%s' is not a size of %lld bytes or more (example: %s 64MiB)", name, text, (long long)min, name);
    return 0;
}

static int run(const char **args, int *status, struct pd_err *e)
{
    struct pd_sender_opts o = { .in = pd_cli.in, .out = (const char *const *)pd_cli.outs, .via = via, .json = pd_cli.format && !strcmp(pd_cli.format, "json"),
                                .keep_going = keep_going, .strict = strict };
    struct pd_trace *t = NULL;
    char name[100], host[64] = "host";
    int64_t n = 0, max = pd_cli_max_record(e);
    if (args[0])
        return pd_fail(e, PD_EUSAGE, "'%s': no argument is expected (input comes from -i)", args[0]);
    if (status_of)
        return pd_print_status(status_of, e);
    if (max < 0 || !(o.net = pd_net_cli(e)) || (via && pd_via_check(via, e) < 0) || a_size("--kv-mem", kv_mem, 65536, &o.kv_mem, e) ||
        a_size("--chunk", chunk, 1, (int64_t *)&o.chunk_bytes, e))
        return e->code;
    if (peers && pd_parse_int(peers, 1, 256, &n, e) < 0)
        return pd_err_prefix(e, "--peers");
    if (resume && pd_parse_duration(resume, &o.resume_us, e) < 0)
        return pd_err_prefix(e, "--resume");
    o.peers = (uint32_t)n;
    o.max_record = (size_t)max;
    gethostname(host, sizeof host - 1);
    snprintf(name, sizeof name, "kvsend@%.63s:%d", host, (int)getpid());
    o.worker = name;
    int rc = pd_trace_open(trace, name, "kvsend", &t, e);
    o.trace = t;
    rc = rc ? rc : pd_sender_run(&o, status, e);
    pd_trace_close(t);
    return rc;
}

int main(int argc, char **argv)
{
    return pd_cli_main("pd-kvsend", options, "-i ENDPOINT -o ENDPOINT", argc, argv, NULL, run);
}
