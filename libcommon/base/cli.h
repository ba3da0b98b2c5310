/* What all commands share: the popt table of common options, usage errors in one form, --version, the exit.
 *
 * A main reads: pd_cli_begin, a table of its own options that ends with PD_CLI_COMMON, pd_cli_parse, its work, pd_cli_end. */
#ifndef PD_BASE_CLI_H
#define PD_BASE_CLI_H
#include <popt.h>
#include "opt.h"

struct pd_cli {
    char *in, *out /* the last of outs, or NULL */, *format, *connect_timeout, *max_record, *key_file;
    char **outs;                        /* each -o, NULL-ended; NULL: none */
    int verbose, quiet, version, insecure;
};
extern struct pd_cli pd_cli;
extern struct poptOption pd_cli_common[];       /* -i -o --format -v -q --connect-timeout --key-file --insecure --max-record --version */
#define PD_CLI_COMMON { NULL, '\0', POPT_ARG_INCLUDE_TABLE, pd_cli_common, 0, "Options of every command:", NULL }, POPT_AUTOHELP POPT_TABLEEND

/* Parses everything; *args: what is left (owned by the context). Prints the error and the way to help, and returns 2, on a bad option; returns -1 to go on,
 * or an exit status to leave with (0 after --version). `version` prints the command's own lines after the first. `about`: after the usage line in --help. */
int pd_cli_parse(const char *program, const struct poptOption *table, const char *args_help, int argc, const char **argv, void (*version)(void), const char ***args);
void pd_cli_end(void);
/* A whole main: parse, work, tell an error in one line, exit status. work may add to *status (failed requests); its own failure is worse. */
typedef int pd_work_fn(const char **args, int *status, struct pd_err *e);
int pd_cli_main(const char *program, const struct poptOption *table, const char *args_help, int argc, char **argv, void (*version)(void), pd_work_fn *work);
int64_t pd_cli_connect_us(struct pd_err *e);    /* < 0: *e */
int64_t pd_cli_max_record(struct pd_err *e);
#endif
