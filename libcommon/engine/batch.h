/* The batch scheduler: continuous batching with chunked prefill over one model and one block pool.
 *
 * One thread owns it and calls pd_batch_step while pd_batch_busy. A step takes one row of every decoding sequence and up to `chunk` prompt rows, oldest
 * first, runs the forward pass, samples, and reports through the callbacks. When blocks run out the youngest sequence is preempted: its blocks are put back
 * and it is recomputed later from its tokens, to the same bits.
 *
 * With priority_us set (daemons) a request's priority makes it that much older a step, 100 steps at the most: so it is begun, computed and given blocks before
 * those of lower priority that came before it by less, and preempted after them; and who waits grows older like all, so that nobody starves.
 *
 * A run is one request: one prompt, n choices. Its choices share the prompt's full blocks; the last, partial one is copied.
 *
 * With a prefix index (kv/prefix) a sequence starts after the part of its tokens that is there, at least its last one being computed; and what it computed is
 * left there in whole blocks: the prompt when it is done, the rest when the sequence ends or is preempted. The cache gives way before anybody is preempted. KV
 * depends on nothing but the tokens before, so the bits are those of a run without.
 *
 * Runs of several owners may share a batch: each brings the callbacks of its own. One that is prefilled alone keeps its blocks for others to read, and cannot be
 * preempted; so it begins only when all of them can be had at once, when its owner agrees (room), and while nobody older lacks blocks.
 * A step can take seconds, of a large model; one whose runs nobody wants any more (unwanted), or whose time is over, all of them, is given up between two layers.
 * Invariant: when no run is left, every block taken here is back in the pool, or the index's.
 */
#ifndef PD_ENGINE_BATCH_H
#define PD_ENGINE_BATCH_H
#include "../kv/prefix.h"
#include "forward.h"
#include "runtime.h"
#include "sampler.h"

struct pd_seq {                 /* one choice of a run */
    struct pd_run *run;
    int choice;
    struct pd_buf tokens;       /* int32: prompt, then generated */
    uint32_t n_kv;              /* tokens whose KV is in the blocks */
    struct pd_buf blocks, base; /* uint32 block numbers; uint8_t* base pointers */
    bool done, started;
    bool foreign;               /* some of its blocks lie in another process's memory */
    struct pd_seq *next;        /* in the batch's list, oldest first */
};

struct pd_run {
    const struct pd_batch_cb *cb;       /* whom it is reported to */
    const struct pd_request *req;       /* resolved; the caller's, alive until pd_run_drop */
    void *user;
    uint32_t n_prompt, n_seqs, n_open;  /* n_open: choices not finished */
    uint32_t n_cached;          /* tokens of the prompt that were not computed when it started, as they were cached */
    bool keep_out;              /* its KV does not enter the cache */
    bool prefill_only;          /* finish after the first token of every choice; blocks stay until pd_run_drop */
    struct pd_seq *seq;         /* [n_seqs] */
    uint32_t preempted;         /* times */
    int64_t t_submit, t_start, t_first;         /* mono us; 0: not yet */
    int64_t age;                /* the batch's order: smaller first */
    struct pd_timeouts timeouts;        /* mono us at which queue and first_token end; prefill as it came */
    int64_t deadline;           /* mono us, 0: none; past it every choice ends with PD_ETIME */
};

struct pd_batch_cb {
    void *ctx;
    /* Layer `layer` holds final K and V of the run's prompt tokens [0, n). Called in layer order within a step; prefill_only runs alone. May be NULL. */
    void (*layer_done)(void *ctx, struct pd_run *r, int layer, uint32_t n);
    /* One generated token, appended already. pos 0 is the first. Return true to end this choice now (a stop string). */
    bool (*token)(void *ctx, struct pd_seq *s, uint32_t pos, const struct pd_sampled *t);
    /* A choice is finished: "stop", "length" or "error" (*e says why). After the last one of a run, pd_run_drop must be called (from here is fine). */
    void (*finished)(void *ctx, struct pd_seq *s, const char *reason, const struct pd_err *e);
    /* The run's first rows are about to be computed. Not called for one that ends at its imported first tokens. May be NULL. */
    void (*started)(void *ctx, struct pd_run *r);
    /* Is what was read of the run's blocks in another process's memory still its KV? Asked after a step has read them, before any token of it counts. false: the
     * step is dropped, and the sequence computed again from its tokens. May be NULL. */
    bool (*valid)(void *ctx, struct pd_run *r);
    /* Will the run be dropped (pd_run_drop) as soon as the step is over? Asked between its layers, of every span: a step of which nobody wants anything is given
     * up, and its unwanted runs are not computed further. May be NULL. */
    bool (*unwanted)(void *ctx, struct pd_run *r);
    /* May a prefill_only run, which is about to start, have its blocks now? They stay its own until nobody reads them any more. NULL: yes. */
    bool (*room)(void *ctx, struct pd_run *r);
};

#define PD_PRIORITY_US 10000000  /* daemons: a step of priority is worth ten seconds of waiting */
struct pd_batch_opts {
    uint32_t chunk, max_seqs;
    struct pd_prefix *prefix;   /* over the same pool, or NULL */
    int64_t priority_us;        /* 0: by arrival alone */
    bool timeouts;              /* the requests' timeouts_ms count: past one of them every choice ends with PD_ETIME, which names the stage */
};
struct pd_batch_opts pd_batch_opts_of(const struct pd_runtime *rt);
struct pd_batch;
/* cb: of the jobs that bring none; NULL when all bring theirs. */
int pd_batch_new(const struct pd_model *m, struct pd_threads *t, const struct pd_kernels *k, struct pd_pool *pool, const struct pd_batch_opts *o,
                 const struct pd_batch_cb *cb, struct pd_batch **out, struct pd_err *e);
void pd_batch_free(struct pd_batch *b);

struct pd_job {
    const struct pd_request *req;
    const int32_t *prompt; uint32_t n_prompt;
    void *user;
    const struct pd_batch_cb *cb;       /* as long as the run lives; NULL: the batch's */
    bool prefill_only;
    bool keep_out;              /* KV that is not what would be computed here (imported, of another numerics class): nobody else gets it */
    int64_t spent_us;           /* since acceptance, for the deadline */
    int64_t waited_us;          /* before that, at a router: it is so much older */
    /* Imported KV of the whole prompt: the block table (one reference each, taken over, also on failure) and the first token of each choice, which is
     * reported through `token` (and maybe `finished`) before submit returns. Without first tokens the prompt's last one is run again for its logits. */
    const uint32_t *blocks; uint32_t n_blocks;
    const struct pd_first *first; uint32_t n_first;
    /* Going on from tokens generated before (one choice): they are recomputed as prompt rows, and positions continue. */
    const int32_t *resume; uint32_t n_resume;
};
/* Takes the run in; the first step may be any time later. Refused (PD_EFAIL with both numbers) when prompt and room for a token exceed the context, or (PD_ENOMEM) the whole pool. */
int pd_batch_submit(struct pd_batch *b, const struct pd_job *j, struct pd_run **out, struct pd_err *e);
bool pd_batch_busy(const struct pd_batch *b);
/* Rows run, or given up; 0: nothing could run for want of blocks, so the caller waits for whoever holds some (an import, an export), or ends the oldest with an error
 * when nobody does. < 0: the engine's own failure (memory): every run has ended with it. */
int pd_batch_step(struct pd_batch *b, struct pd_err *e);
void pd_batch_fail_oldest(struct pd_batch *b);           /* with the pool's own reason; of those that decode, where some do */
void pd_run_drop(struct pd_batch *b, struct pd_run *r);         /* puts the blocks back and frees the run, wherever it is (also a running one: cancel) */

static inline const int32_t *pd_seq_tokens(const struct pd_seq *s) { return (const int32_t *)(const void *)s->tokens.p; }
static inline uint32_t pd_seq_n(const struct pd_seq *s) { return (uint32_t)(s->tokens.n / sizeof(int32_t)); }
static inline const uint32_t *pd_seq_blocks(const struct pd_seq *s) { return (const uint32_t *)(const void *)s->blocks.p; }
static inline uint32_t pd_seq_n_blocks(const struct pd_seq *s) { return (uint32_t)(s->blocks.n / sizeof(uint32_t)); }
struct pd_batch_stats { uint64_t steps, prompt_rows, decode_rows, cached_rows, preemptions, rows_left, prompt_left, kv_tokens; uint32_t runs, seqs, waiting, to_give; };
/* cached_rows: not computed, as they were cached. rows_left: at most, of the runs in hand. prompt_left: rows of prompts (and of what was
 * preempted) not computed yet; kv_tokens: that decoding sequences read at a step; waiting: sequences of which nothing is computed; to_give: those of prefill_only runs. */
struct pd_batch_stats pd_batch_stats(const struct pd_batch *b);
#endif
