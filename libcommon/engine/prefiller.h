/* The prefiller: requests in, KV out. Runs prompts in chunks through the batch, publishes each layer's KV as it becomes final, samples the first token of
 * every choice, and closes the run with its descriptor. */
#ifndef PD_ENGINE_PREFILLER_H
#define PD_ENGINE_PREFILLER_H
#include "../kv/codec.h"
#include "../kv/dump.h"
#include "reply.h"

struct pd_prefill_opts { int64_t seed; enum pd_codec_mode codec; /* of the stream's chunks */ size_t max_record; /* a descriptor past it is refused: decode would refuse the whole stream; 0: 16 MiB */ };
/* Until the input ends (or a signal drains). Exactly one of out and dump. *status: the exit status over all requests. < 0: a stream or engine error, which ended it. */
int pd_prefill_run(struct pd_runtime *rt, const struct pd_prefill_opts *o, struct pd_rstream *in, struct pd_wstream *out, struct pd_dump_w *dump,
                   struct pd_trace *trace, int *status, struct pd_err *e);
#endif
