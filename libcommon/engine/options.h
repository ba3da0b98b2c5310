/* Options of the commands that run the engine: one popt table, and the runtime they ask for. */
#ifndef PD_ENGINE_OPTIONS_H
#define PD_ENGINE_OPTIONS_H
#include "../base/cli.h"
#include "../trace/event.h"
#include "../wire/stream.h"
#include "runtime.h"

struct pd_engine_cli {
    char *model, *trace, *trace_max, *kv_dtype, *kv_mem, *chat_template, *prefix_cache;
    int threads, chunk, max_seqs, block_size, lines;
    char *seed_text, *domain, *epoch;
    int64_t seed;               /* once pd_engine_open is done */
    bool serving;               /* it is for a daemon: set before pd_engine_open */
};
extern struct pd_engine_cli pd_engine_cli;
extern struct poptOption pd_engine_options[];
#define PD_ENGINE_OPTIONS { NULL, '\0', POPT_ARG_INCLUDE_TABLE, pd_engine_options, 0, "The engine:", NULL }

int pd_engine_open(const char *role, struct pd_runtime *rt, struct pd_err *e);         /* checks the options, then opens; PD_EUSAGE names the option */
int pd_engine_trace(const char *role, const struct pd_runtime *rt, struct pd_trace **t, struct pd_err *e);     /* --trace, --trace-max; *t NULL without */
int pd_engine_reader(const struct pd_endpoint *from, const char *name, struct pd_rstream **in, struct pd_err *e);
/* Records to a terminal would be garbage: refused with the remedy. */
int pd_engine_check_tty(int fd, bool text, struct pd_err *e);
void pd_engine_version(void);   /* CPU path and libraries, for --version */
#endif
