/* `pd-bench gen`: a workload from options, as `request` records to -o; with --pace each at its time. */
#ifndef PD_SIM_GEN_H
#define PD_SIM_GEN_H
#include "../base/cli.h"
#include "../wire/stream.h"
#include "sample.h"
#include "workload.h"

extern struct poptOption pd_gen_options[];
int pd_gen_run(struct pd_err *e);

/* All that is left of w into out. paced: each is written at start + at_us, and says in start_us when the stream began (mono us); lag_ms: how much later than
 * that it was written, each, until the reader took it. Ends early, without an error, when the process is told to stop. */
struct pd_pace { uint64_t n, cut, isl, osl, reusable; int64_t first_us, last_us; struct pd_sample lag_ms; };
int pd_pace_run(struct pd_workload *w, bool paced, struct pd_wstream *out, struct pd_pace *p, struct pd_err *e);
#define PD_LAG_LARGE_MS 10.0    /* send lag whose P99 is above it is told of */
/* One line on standard error: send lag, and a warning where it is large. */
void pd_pace_tell(struct pd_sample *lag_ms, uint64_t n, double seconds);
/* "ttft=500ms,tpot=50ms" */
int pd_slo_parse(const char *s, struct pd_traffic *t, struct pd_err *e);
#endif
