/* The event writer: --trace FILE. One write(2) on an O_APPEND descriptor a record, no lock, so that processes may share a file; a failing trace warns once and
 * never fails a run. All calls may come from any thread, and do nothing on a NULL trace.
 *
 * For pd-trace check to prove a log whole, a process follows four rules (state.h has the tables):
 *   - the trace is open as long as the process has runs: opening writes `starting`, closing `gone`. Without `gone` the process counts as having died there;
 *   - an event that another process can see the effect of is written before that effect leaves (kv_published before the `kv`), so that a merged log is in
 * order;
 *   - a run that was accepted ends by an end state, whatever becomes of it, except that prefill may leave it at kv_published for another to take up;
 *   - an event that was caused by another's step carries that step's op as `parent`.
 */
#ifndef PD_TRACE_EVENT_H
#define PD_TRACE_EVENT_H
#include "../wire/record.h"
#include "state.h"
struct pd_trace;
int pd_trace_open(const char *path, const char *worker, const char *role, struct pd_trace **out, struct pd_err *e);    /* path NULL: *out NULL */
/* What every event of this process carries besides: the model's revision and the domain (copied). Before the first run. */
int pd_trace_about(struct pd_trace *t, const char *model_revision, const char *domain, struct pd_err *e);
/* Rotation, for a file with one writer: a record that would make the file larger than max_bytes goes into a new one, and the old one becomes FILE.1 (the FILE.1
 * before it is gone). 0: none. */
void pd_trace_limit(struct pd_trace *t, uint64_t max_bytes);
/* Fills worker, role, times and what pd_trace_about said, where the event has none. */
void pd_trace_emit(struct pd_trace *t, const struct pd_event *ev);
/* The common case: a step of a run or of a lease. Pointers may be NULL: left out. */
struct pd_step {
    const char *run, *where;
    const uint8_t *gen, *op, *parent;           /* [16] each. op: this step; parent: the op that caused it */
    const uint8_t *lease;                       /* [16], in all events of a lease */
    uint32_t choice, pos, tokens;               /* streaming: what went out; completed: tokens of all choices */
};
void pd_trace_step(struct pd_trace *t, const struct pd_step *s, enum pd_state_id state, uint64_t bytes, const char *cause);
/* The same with figures, each a key of its own in the record. */
struct pd_figure { const char *name; int64_t value; };
void pd_trace_figures(struct pd_trace *t, const struct pd_step *s, enum pd_state_id state, uint64_t bytes, const char *cause, const struct pd_figure *f, int n);
/* A record of another kind (a route), whole: one msgpack map. */
void pd_trace_record(struct pd_trace *t, const void *rec, size_t n);
/* Of the process: PD_ST_READY, PD_ST_DRAINING. */
void pd_trace_process(struct pd_trace *t, enum pd_state_id state);
void pd_trace_close(struct pd_trace *t);
#endif
