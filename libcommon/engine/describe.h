/* What a prefilled run says of itself: the KV descriptor, the plan of its chunks, and what its stages took. For whoever publishes KV, into a stream or as a
 * daemon. */
#ifndef PD_ENGINE_DESCRIBE_H
#define PD_ENGINE_DESCRIBE_H
#include "../kv/handover.h"
#include "batch.h"
#include "reply.h"

/* All that is known before the run begins, payload, gen and op excepted; points into in and rt. */
void pd_describe(const struct pd_runtime *rt, const struct pd_intake *in, struct pd_kvdesc *d);
/* The plan, with ranges no longer than a step's tokens, so that layers leave as they are computed (in daemons of a few blocks, so that what decode holds
 * already need not be sent); and the payload's numbers. */
int pd_describe_plan(const struct pd_runtime *rt, struct pd_kvdesc *d, struct pd_plan *plan, struct pd_err *e);
/* Can the descriptor be written at all? The request inside it may be nested too deep for one more level, or leave no room (max_record 0: 16 MiB): PD_EFAIL. It
 * fails alone, before anything of it is sent. */
int pd_describe_check(const struct pd_kvdesc *d, size_t max_record, struct pd_err *e);
/* A choice's first token, as `first` of the descriptor has it; top in mem (without memory it has none). */
void pd_describe_first(struct pd_first *f, const struct pd_sampled *t, struct pd_arena *mem);
/* Stage durations in us, into t (freed by the caller) and d->t: from acceptance to the first step, to the first token; and the prompt's tokens that were here already. */
int pd_describe_times(struct pd_kvdesc *d, const struct pd_run *run, int64_t t_accept, struct pd_buf *t, struct pd_err *e);
#endif
