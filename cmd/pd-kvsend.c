/* pd-kvsend: KV from one end to another: record streams, files, dumps, sockets; verified here before it goes on. */
#include <stdio.h>
#include <unistd.h>
#include "../libcommon/base/cli.h"
#include "../libcommon/serve/ask.h"
#include "../libcommon/serve/probe.h"
#include "../libcommon/serve/sender.h"
#include "../libcommon/xfer/transport.h"

static char *via, *peers, *kv_mem, *chunk, *resume, *trace, *codec, *status_of, *probe, *probe_max;
static int keep_going, strict;
enum { OUTS_MAX = 64 };
static struct poptOption options[] = {
    { "via", '\0', POPT_ARG_STRING, &via, 0, "how KV may go between two that speak the transfer protocol, best first (default: shm, rdma, tcp, inline, as far as there are)", "SCHEMES" },
    { "peers", '\0', POPT_ARG_STRING, &peers, 0, "how many peers a listening endpoint serves before it is done (default 1)", "N" },
    { "codec", '\0', POPT_ARG_STRING, &codec, 0, "how payload is coded as it goes out (not by shm, tcp, rdma): " PD_CODEC_LIST " (default: as it comes, or none)", "CODEC" },
    { "kv-mem", '\0', POPT_ARG_STRING, &kv_mem, 0, "memory for KV on its way (default an eighth of memory, 1GiB at most)", "SIZE" },
    { "chunk", '\0', POPT_ARG_STRING, &chunk, 0, "size of the chunks that go out (default: as they come)", "SIZE" },
    { "resume", '\0', POPT_ARG_STRING, &resume, 0, "how long a dropped transfer is tried to be gone on with (default: the connect timeout)", "TIME" },
    { "keep-going", 'k', POPT_ARG_NONE, &keep_going, 0, "count and drop stray chunks instead of failing on them", NULL },
    { "strict", '\0', POPT_ARG_NONE, &strict, 0, "exit 9 when a transfer had to begin again, or went a slower way than it could", NULL },
    { "probe", '\0', POPT_ARG_STRING, &probe, 0, "measure the way to the pd-kvsend that listens there, print it and exit (--format: a `path` record); 1 when a slower "
        "way is used than should be", "ENDPOINT" },
    { "probe-max", '\0', POPT_ARG_STRING, &probe_max, 0, "largest transfer of --probe (default 256MiB)", "SIZE" },
    { "status", '\0', POPT_ARG_STRING, &status_of, 0,
      "print the ledger of the daemon (pd-prefill, pd-decode, pd-route) on this socket and exit (--format msgpack: its `worker` records)",
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

/* rdma:HOST:PORT is a TCP connection for control, and KV by rdma alone; shm:PATH a Unix socket, and KV by shm alone. --via can say otherwise. */
static int translate(const char **spec, const char **way, char **made, struct pd_err *e)
{
    static const struct { const char *from, *to, *via; } all[] = { { "rdma:", "tcp:", "rdma" }, { "rdma-listen:", "tcp-listen:", "rdma" },
                                                                  { "shm:", "unix:", "shm" }, { "shm-listen:", "unix-listen:", "shm" } };
    struct pd_buf b = { 0 };
    for (size_t i = 0; *spec && i < sizeof all / sizeof *all; i++)
        if (!strncmp(*spec, all[i].from, strlen(all[i].from))) {
            if (pd_buf_printf(&b, e, "%s%s", all[i].to, *spec + strlen(all[i].from)) || pd_buf_add(&b, "", 1, e))
                return e->code;
            *spec = *made = (char *)b.p;
            if (!via)
                *way = all[i].via;
            return 0;
        }
    return 0;
}

/* All transports of this build, best first. */
static const char *every_way(void)
{
    static const char *const best[] = { "shm", "rdma", "tcp", "inline" };
    static char list[64];
    for (size_t i = 0; i < sizeof best / sizeof *best; i++)
        if (pd_transport_find((struct pd_str){ best[i], strlen(best[i]) }))
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", *list ? "," : "", best[i]);
    return list;
}

static int do_probe(const struct pd_sender_opts *s, const char *at, struct pd_err *e)
{
    static struct pd_probe p;
    struct pd_probe_opts o = { .at = at, .via = s->via, .worker = s->worker, .net = s->net, .max_record = s->max_record };
    struct pd_buf b = { 0 };
    if (s->in || pd_cli.outs)
        return pd_fail(e, PD_EUSAGE, "--probe: -i and -o are for KV (the table goes to stdout)");
    if (a_size("--probe-max", probe_max, 4096, (int64_t *)&o.max_bytes, e))
        return e->code;
    int rc = pd_probe_run(&o, &p, e);
    if (!rc && pd_cli.format)
        rc = (rc = pd_probe_record(&p, &b, e)) ? rc : pd_print_records(b.p, b.n, e);
    else if (!rc)
        rc = (rc = pd_probe_text(&p, &b, e)) ? rc : pd_print_text(&b, e);
    pd_buf_free(&b);
    if (!rc && p.slow.code) {
        *e = p.slow;
        rc = e->code;
    }
    return rc;
}

static int run(const char **args, int *status, struct pd_err *e)
{
    struct pd_sender_opts o = { .in = pd_cli.in, .out = (const char *const *)pd_cli.outs, .via = via, .json = pd_cli.format && !strcmp(pd_cli.format, "json"),
                                .keep_going = keep_going, .strict = strict };
    struct pd_trace *t = NULL;
    char name[100], host[64] = "host";
    const char *in = pd_cli.in, *at = probe, **out = (const char **)pd_cli.outs;
    const char *out_via[OUTS_MAX];
    char *made[OUTS_MAX + 2] = { NULL };
    int n_made = 0, rc;
    int64_t n = 0, max = pd_cli_max_record(e);
    if (args[0])
        return pd_fail(e, PD_EUSAGE, "'%s': no argument is expected (input comes from -i)", args[0]);
    if (status_of)
        return pd_print_status(status_of, e);
    if (max < 0 || !(o.net = pd_net_cli(e)) || (via && pd_via_check(via, e) < 0) || a_size("--kv-mem", kv_mem, 4096, &o.kv_mem, e) ||
        a_size("--chunk", chunk, 1, (int64_t *)&o.chunk_bytes, e))
        return e->code;
    if (codec && !pd_codec_parse(codec, &o.codec))
        return pd_fail(e, PD_EUSAGE, "--codec: '%s' is not " PD_CODEC_LIST, codec);
    o.coded = codec != NULL;
    if (peers && pd_parse_int(peers, 1, 256, &n, e) < 0)
        return pd_err_prefix(e, "--peers");
    if (resume && pd_parse_duration(resume, &o.resume_us, e) < 0)
        return pd_err_prefix(e, "--resume");
    o.peers = (uint32_t)n;
    o.max_record = (size_t)max;
    gethostname(host, sizeof host - 1);
    snprintf(name, sizeof name, "kvsend@%.63s:%d", host, (int)getpid());
    o.worker = name;
    o.via = via ? via : every_way();
    /* What is written straight into its place is not coded. */
    out_via[0] = !via && o.coded && o.codec != PD_CODEC_NONE ? "shm,inline" : o.via;
    for (int i = 1; i < OUTS_MAX; i++)
        out_via[i] = out_via[0];
    o.out_via = out_via;
    rc = translate(&in, &o.via, &made[n_made++], e);
    rc = rc ? rc : translate(&at, &o.via, &made[n_made++], e);
    for (int i = 0; !rc && out && out[i]; i++)      /* each end's way is its own */
        rc = i < OUTS_MAX ? translate(&out[i], &out_via[i], &made[n_made++], e) : pd_fail(e, PD_EUSAGE, "-o: more than %d receivers", OUTS_MAX);
    o.in = in;
    if (rc || probe) {
        rc = rc ? rc : do_probe(&o, at, e);
        goto out;
    }
    rc = pd_trace_open(trace, name, "kvsend", &t, e);
    o.trace = t;
    rc = rc ? rc : pd_sender_run(&o, status, e);
    pd_trace_close(t);
out:
    while (n_made)
        pd_free(made[--n_made]);
    return rc;
}

int main(int argc, char **argv)
{
    return pd_cli_main("pd-kvsend", options, "-i ENDPOINT -o ENDPOINT", argc, argv, NULL, run);
}
