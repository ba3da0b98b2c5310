/* A log of requests that somebody served: when each came, how long its prompt and its answer were, which blocks its prompt shared with others.
 *
 *   mooncake    JSON Lines: timestamp (ms), input_length, output_length, hash_ids (blocks of 512 tokens; an equal id is an equal block)
 *   bailian     the same with chat_id; timestamp in s, blocks of 16
 *   azure       CSV: TIMESTAMP (date and time of day), ContextTokens, GeneratedTokens
 *   burstgpt    CSV: Timestamp (s), Request tokens, Response tokens
 *   lengths     CSV: num_prefill_tokens, num_decode_tokens: without times
 *   requests    our own records, msgpack or JSON Lines: arrival_us, token_ids, max_tokens; blocks of 16, told apart by all tokens up to their end
 * Which one is told by the first bytes. Rows stand in order of time. What has no prompt or no answer was not served (BurstGPT writes failures so) and is
 * counted, not kept. The file is somebody's: a bad row is refused with its line. */
#ifndef PD_SIM_REQLOG_H
#define PD_SIM_REQLOG_H
#include "../base/mem.h"

enum { PD_REQLOG_TOKENS = 1 << 24 };    /* of a prompt or an answer at the most */
struct pd_reqlog_row { int64_t at_us /* since the first */; uint32_t isl, osl, n_blocks; size_t block; /* its first in `block` */ };
struct pd_reqlog {                      /* zero-initialise; free with pd_reqlog_free */
    const char *kind;
    struct pd_reqlog_row *row; size_t n;
    uint64_t *block; size_t n_blocks;
    uint32_t block_tokens;              /* 0: it tells nothing of prefixes */
    bool timed;
    uint64_t dropped;                   /* rows without prompt or answer */
};
/* PD_ECORRUPT: "NAME: line 17: ..."; then nothing is held. */
int pd_reqlog_parse(const void *p, size_t n, const char *name, struct pd_reqlog *out, struct pd_err *e);
int pd_reqlog_read(const char *path, struct pd_reqlog *out, struct pd_err *e);
/* Rows of one time stamp are spread evenly until the next one (the last of them over as long as those before): what was logged in whole seconds, or in the
 * ticks of a sampler, did not come in bursts. */
void pd_reqlog_spread(struct pd_reqlog *l);
void pd_reqlog_free(struct pd_reqlog *l);
#endif
