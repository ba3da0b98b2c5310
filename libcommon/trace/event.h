/* The event writer: --trace FILE. One write(2) on an O_APPEND descriptor a record, no lock; a failing trace warns once and never fails a run. */
#ifndef PD_TRACE_EVENT_H
#define PD_TRACE_EVENT_H
#include "../wire/record.h"
struct pd_trace;
int pd_trace_open(const char *path, const char *worker, const char *role, struct pd_trace **out, struct pd_err *e);    /* path NULL: *out NULL, and all calls below do nothing */
/* Fills worker, role, times; op/parent chain per run are the caller's (zero = left out). */
void pd_trace_emit(struct pd_trace *t, const struct pd_event *ev);
/* The common case: a step of a run, with a cause or NULL. */
struct pd_step { const char *run, *where; const uint8_t *gen, *op, *parent; };  /* NULL: left out. op: this step; parent: the op that caused it */
void pd_trace_step(struct pd_trace *t, const struct pd_step *s, const char *state, uint64_t bytes, const char *cause);
/* What every event of this process carries besides: the model's revision and the domain (copied). */
int pd_trace_about(struct pd_trace *t, const char *model_revision, const char *domain, struct pd_err *e);
void pd_trace_close(struct pd_trace *t);
#endif
