#include <fcntl.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>
#include "cli.h"
#include "log.h"
#include "mem.h"
#include "stop.h"

struct pd_cli pd_cli;
static poptContext context;

struct poptOption pd_cli_common[] = {
    { "input", 'i', POPT_ARG_STRING, &pd_cli.in, 0, "where records come from: - (default), a file, unix:PATH, unix-listen:PATH, tcp:HOST:PORT, tcp-listen:[HOST]:PORT", "ENDPOINT" },
    { "output", 'o', POPT_ARG_ARGV, &pd_cli.outs, 0, "where records go: the same", "ENDPOINT" },
    { "format", '\0', POPT_ARG_STRING, &pd_cli.format, 0, "form of the output: msgpack or json, a line a record (default: msgpack; pd-trace cat: json)", "FORMAT" },
    { "connect-timeout", '\0', POPT_ARG_STRING, &pd_cli.connect_timeout, 0, "how long to retry a socket that is not there yet (default 5s)", "TIME" },
    { "key-file", '\0', POPT_ARG_STRING, &pd_cli.key_file, 0, "TCP is TLS 1.3 with these pre-shared keys: lines `id hex64`, mode 0600; the first is used to connect, all are accepted", "FILE" },
    { "insecure", '\0', POPT_ARG_NONE, &pd_cli.insecure, 0, "TCP (and a daemon's --metrics) in the clear also beyond this host", NULL },
    { "max-record", '\0', POPT_ARG_STRING, &pd_cli.max_record, 0, "largest record accepted (default 16MiB)", "SIZE" },
    { "verbose", 'v', POPT_ARG_NONE, NULL, 'v', "tell the life of each run", NULL },
    { "quiet", 'q', POPT_ARG_NONE, &pd_cli.quiet, 0, "no warnings, no progress", NULL },
    { "version", '\0', POPT_ARG_NONE, &pd_cli.version, 0, "print version, CPU path and libraries", NULL },
    POPT_TABLEEND
};

/* A closed standard descriptor would be given to the next file opened: then "-" reads the model, and messages are written into KV memory. It gets a
 * descriptor that can only do what is never asked of it, so that its use fails as that of a closed one does. */
static void guard_standard_fds(void)
{
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) < 0)
            return;
}

/* Connections, and slabs of KV of one's own and of peers, are a descriptor each. */
static void allow_descriptors(void)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) || r.rlim_cur >= r.rlim_max)
        return;
    r.rlim_cur = r.rlim_max;
    setrlimit(RLIMIT_NOFILE, &r);
}

int pd_cli_parse(const char *program, const struct poptOption *table, const char *args_help, int argc, const char **argv, void (*version)(void), const char ***args)
{
    static const char *none[] = { NULL };
    int rc;
    guard_standard_fds();
    allow_descriptors();
    pd_log_init(program, 0, false);
    pd_stop_init();
    if (!(context = poptGetContext(program, argc, argv, table, 0))) {
        pd_error("out of memory");
        return 8;
    }
    poptSetOtherOptionHelp(context, args_help);
    while ((rc = poptGetNextOpt(context)) > 0)
        if (rc == 'v')
            pd_cli.verbose++;
    if (rc < -1) {
        pd_error("%s: %s (try %s --help)", poptBadOption(context, POPT_BADOPTION_NOALIAS), poptStrerror(rc), program);
        return 2;
    }
    pd_log_init(program, pd_cli.verbose, pd_cli.quiet);
    for (char **o = pd_cli.outs; o && *o; o++)
        pd_cli.out = *o;
    if (pd_cli.version) {
        printf("%s %s\n", program, PD_VERSION);
        if (version)
            version();
        return fflush(stdout) ? 1 : 0;
    }
    if (pd_cli.format && strcmp(pd_cli.format, "json") && strcmp(pd_cli.format, "msgpack")) {
        pd_error("--format: '%s' is unknown (example: --format json)", pd_cli.format);
        return 2;
    }
    *args = poptGetArgs(context);
    if (!*args)
        *args = none;
    return -1;
}

void pd_cli_end(void)
{
    if (context)
        poptFreeContext(context);
    context = NULL;
}

int64_t pd_cli_connect_us(struct pd_err *e)
{
    int64_t us = 5000000;
    if (pd_cli.connect_timeout && pd_parse_duration(pd_cli.connect_timeout, &us, e) < 0) {
        pd_err_prefix(e, "--connect-timeout");
        return -1;
    }
    return us;
}

int64_t pd_cli_max_record(struct pd_err *e)
{
    int64_t n = 16 << 20;
    if (pd_cli.max_record && (pd_parse_size(pd_cli.max_record, &n, e) < 0 || n < 4096 || n > (1ll << 32))) {
        if (!e->code || n < 4096 || n > (1ll << 32))
            pd_fail(e, PD_EUSAGE, "'%s' is not a size from 4KiB to 4GiB (example: --max-record 64MiB)", pd_cli.max_record);
        pd_err_prefix(e, "--max-record");
        return -1;
    }
    return n;
}

int pd_cli_main(const char *program, const struct poptOption *table, const char *args_help, int argc, char **argv, void (*version)(void), pd_work_fn *work)
{
    const char **args;
    struct pd_err e = { 0 };
    int status = 0, rc = pd_cli_parse(program, table, args_help, argc, (const char **)argv, version, &args);
    if (rc < 0) {
        rc = work(args, &status, &e);
        if (rc < 0) {
            pd_error("%s", e.msg);
            status = rc == PD_EUSAGE ? 2 : pd_exit_worse(status, rc);
        }
    } else
        status = rc;
    pd_cli_end();
    return status;
}
