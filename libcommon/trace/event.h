/* The event writer: --trace FILE. One write(2) on an O_APPEND descriptor a record, no lock; a failing trace warns once and never fails a run. */
#ifndef PD_TRACE_EVENT_H
#define PD_TRACE_EVENT_H
#include "../wire/record.h"
struct pd_trace;
int pd_trace_open(const char *path, const char *worker, const char *role, struct pd_trace **out, struct pd_err *e);    /* path NULL: *out NULL, and all calls below do nothing */
/* Fills worker, role, times; op/parent chain per run are the caller's (zero = left out). */
void pd_trace_emit(struct pd_trace *t, const struct pd_event *ev);
/* The common case: a run's state, with a cause or NULL. */
void pd_trace_state(struct pd_trace *t, const char *run, const char *state, const char *where, const uint8_t *gen, uint64_t bytes, const char *cause);
void pd_trace_close(struct pd_trace *t);
#endif
