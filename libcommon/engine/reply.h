/* What every engine command answers alike: a request taken in, or refused with its `error` and one `result` a choice. */
#ifndef PD_ENGINE_REPLY_H
#define PD_ENGINE_REPLY_H
#include "../trace/event.h"
#include "../wire/stream.h"
#include "runtime.h"

struct pd_intake {              /* one request, ready to run; free the arena to free it */
    struct pd_arena mem;
    struct pd_request req;
    int32_t *tokens; uint32_t n_tokens;         /* the arena's */
    int64_t t_accept;                           /* mono us */
};
#define PD_RUN_TWICE "request: run %s came already in this stream (leave run out: one is made)"
/* Decodes, resolves, tokenises. On failure in->req holds what could be read (id, run), for the refusal. */
int pd_intake_take(const struct pd_runtime *rt, const uint8_t *rec, size_t n, int64_t seed, struct pd_intake *in, struct pd_err *e);
/* Its two halves, for a daemon: what is quick, and what takes time by the prompt's length. */
int pd_intake_read(const uint8_t *rec, size_t n, int64_t seed, struct pd_intake *in, struct pd_err *e);
int pd_intake_tokens(const struct pd_runtime *rt, struct pd_intake *in, struct pd_err *e);
void pd_intake_free(struct pd_intake *in);

/* The `error` record of a failed request. */
int pd_refusal_error(const struct pd_request *r, const struct pd_err *why, const char *action, struct pd_buf *b, struct pd_err *e);
/* The records of a failed request, one after the other in b (framed by msgpack itself): `error`, then a `result` a choice, made from `as` (mode, workers, gen,
 * prompt_tokens, fallback). */
int pd_refusal_encode(const struct pd_request *r, const struct pd_err *why, const char *action, const struct pd_result *as, struct pd_buf *b, struct pd_err *e);
/* Writes the records that lie one after the other in p[0..n). */
int pd_put_records(struct pd_wstream *w, const uint8_t *p, size_t n, struct pd_err *e);
/* A step of a run's life: into the trace, and to a person under -v. */
void pd_run_step(struct pd_trace *t, const struct pd_step *s, enum pd_state_id state, uint64_t bytes, const char *cause);
/* The op of a step: a hash of (run, step, inputs), so that the same step has the same op wherever it runs. */
void pd_op_make(uint8_t op[16], const char *run, const char *step, const void *inputs, size_t n);
/* Tells a person that a signal has come, and what a second one does. */
void pd_run_draining(uint32_t runs);
/* The progress line: work of more than two seconds. left: rows still to run at the most. */
void pd_run_progress(const char *what, int64_t t0, uint64_t done, uint64_t left, uint32_t runs);
/* Tells a person: "run 01J... (id a): message". */
void pd_refusal_log(const struct pd_request *r, const struct pd_err *why);
#endif
