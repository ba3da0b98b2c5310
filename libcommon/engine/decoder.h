/* The decoder: KV descriptors (or bare requests) in, tokens and results out.
 *
 * A run with KV is imported chunk by chunk, verified, and decoded from there; its first token is held until every chunk is verified. What fails a check is not
 * used: the run is recomputed locally from its tokens (on_mismatch fail: it is refused instead). A bare request is prefilled here (aggregated).
 * Results come in order of completion; text comes in order of input. */
#ifndef PD_ENGINE_DECODER_H
#define PD_ENGINE_DECODER_H
#include "reply.h"
#include "../kv/handover.h"

struct pd_decode_opts {
    int64_t seed;
    bool keep_going, fail_on_mismatch, strict;
    bool from_dump;             /* the input is a dump's reader: its `error` records say which KV is damaged */
    bool text;                  /* write the generated text alone */
    bool stream;                /* token records too */
};
int pd_decode_run(struct pd_runtime *rt, const struct pd_decode_opts *o, struct pd_rstream *in, struct pd_wstream *out, struct pd_trace *trace, int *status,
                  struct pd_err *e);
#endif
