/* One forward pass over a batch of spans: read top to bottom like a description of the model.
 *
 * A span is a run of consecutive tokens of one sequence; a step mixes decoding spans (one token) with chunks of prompts. Keys and values are written to
 * the sequences' blocks and read back from them, rounded once, so that local and imported KV agree in every bit.
 */
#ifndef PD_ENGINE_FORWARD_H
#define PD_ENGINE_FORWARD_H
#include "../kv/pool.h"
#include "../model/weights.h"

struct pd_span {
    const int32_t *tokens;      /* [n] */
    uint32_t n, pos0;           /* positions pos0 .. pos0+n-1; KV of 0 .. pos0-1 is in the blocks already */
    uint8_t **blk;              /* base pointers of the sequence's blocks, enough for pos0+n tokens */
    int want_logits;            /* 0 none, 1 of the last row, 2 of every row */
    uint32_t row0;              /* set by pd_forward: first row of this span */
};

struct pd_fwd;
/* max_rows: rows of one call at the most; max_logits: rows of logits (chosen freely up to max_rows). */
int pd_fwd_new(const struct pd_model *m, struct pd_threads *t, const struct pd_kernels *k, const struct pd_pool *pool, uint32_t max_rows, uint32_t max_logits,
               struct pd_fwd **out, struct pd_err *e);
void pd_fwd_free(struct pd_fwd *f);
/* Runs the spans. *logits: [rows that want them, in order][n_vocab], the fwd's memory. layer_done (may be NULL) is called from this thread as soon as a layer's
 * K and V of these spans are in the blocks; false from it: the pass is given up there, and 1 returned. */
int pd_forward(struct pd_fwd *f, struct pd_span *spans, uint32_t n_spans, bool (*layer_done)(void *ctx, int layer), void *ctx, float **logits, struct pd_err *e);
#endif
