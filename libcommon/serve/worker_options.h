/* Options of the commands that are workers as daemons, and what they ask for: one popt table. A command has a side of its own, "prefill" or "decode": its role
 * unless --role says both, and then the side that it prefers unless --prefer says another. */
#ifndef PD_SERVE_WORKER_OPTIONS_H
#define PD_SERVE_WORKER_OPTIONS_H
#include "../base/cli.h"
#include "register.h"
#include "worker.h"

struct pd_worker_cli { char *role, *prefer, *via, *streams, *lease, *convert; int in_place; };
extern struct pd_worker_cli pd_worker_cli;
extern struct poptOption pd_worker_options[];
#define PD_WORKER_OPTIONS { NULL, '\0', POPT_ARG_INCLUDE_TABLE, pd_worker_options, 0, "As a worker (a daemon):", NULL }, PD_REGISTER_OPTIONS

/* --describe and --listen, the whole of them. PD_EUSAGE names the option. */
int pd_worker_cli_describe(const char *side, struct pd_err *e);
int pd_worker_cli_serve(const char *side, bool stream, struct pd_err *e);
/* A filter: PD_EUSAGE when an option was given that is for daemons. */
int pd_worker_cli_none(struct pd_err *e);
#endif
