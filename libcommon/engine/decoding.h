/* Inside the decoder, shared by its three files: decoder.c (the loop of the filter, and what a daemon's loop is made of: serve/worker), receive.c (runs that
 * come with KV), answer.c (what goes out). Not installed for users: decoder.h is. */
#ifndef PD_ENGINE_DECODING_H
#define PD_ENGINE_DECODING_H
#include "../base/seen.h"
#include "batch.h"
#include "decoder.h"
#include "text.h"

struct pd_dc_choice {
    struct pd_text text;
    struct pd_buf tokens, logprobs;     /* int32, float */
    size_t printed, streamed;           /* bytes of text.text already written, in text mode and as token records */
    int64_t t_first, t_last;            /* mono us */
    bool done, closed;          /* closed: printed to its end */
};

struct pd_dc_run {
    struct pd_intake in;
    struct pd_kvdesc desc;      /* of a run that came with KV */
    bool begun, decoding, ended;        /* events written: prefill_started or decode_started; decode_started; the last one */
    char *failure;              /* the arena's: why a choice of it failed */
    bool remote, submitted;     /* submitted: decided, also when it needed no decoding; before that a remote run is on its way */
    bool told;                  /* its error went out */
    bool lost;                  /* some record of it could not be made, for want of memory */
    uint8_t op[16]; bool has_op;
    struct pd_import *import;
    struct pd_err bad;          /* why its KV is not used */
    char *fallback;             /* the arena's: the reason in the result */
    const char *mode;
    uint64_t kv_bytes;
    unsigned converted;         /* PD_CONV_*: of the KV that is used */
    uint32_t cached;            /* tokens of the prompt that were here already */
    int64_t kv_us, before_us;   /* verify and copy; what passed before the kv record came (the descriptor's stages) */
    int64_t queue_us, prefill_us;       /* of one that was computed here: until it was begun, from there to its first token; 0: not */
    struct pd_dc_choice *choice;      /* [req.n], the arena's */
    uint32_t n_done;
    const int32_t *resume; uint32_t n_resume;   /* tokens that it goes on after (pd_dc_resume); the arena's */
    uint8_t parent[16]; bool has_parent;        /* the op that caused it, when it came without KV */
    bool stream;                /* token records too */
    int64_t waited_us;          /* at a router, before it came here */
    struct pd_run *run;         /* while the batch has it */
    void *user;                 /* a daemon's */
    struct pd_dc_run *next;        /* in order of input */
};

/* Where the records of a run go, when not to `out`: a daemon has a client for each. */
struct pd_dc_sink {
    void *ctx;
    void (*put)(void *ctx, struct pd_dc_run *r, const uint8_t *p, size_t n);    /* records, one after the other */
    void (*over)(void *ctx, struct pd_dc_run *r);       /* its last record was put; it is about to be freed */
};

enum { PD_MAX_ON_WAY = 16384 };        /* runs whose KV is on its way: what prefill has in hand at the most */

struct pd_decoder {
    struct pd_runtime *rt;
    const struct pd_decode_opts *o;
    struct pd_batch *batch; bool own_batch;     /* set before pd_dc_open: the caller's, who frees it before pd_dc_close and may have runs of others in it */
    struct pd_batch_cb cb;
    struct pd_wstream *out;     /* or */
    const struct pd_dc_sink *sink;
    bool (*kv_valid)(void *ctx, struct pd_dc_run *r); void *kv_ctx;     /* of runs that read KV in place (batch.h), or NULL */
    bool (*unwanted)(const struct pd_dc_run *r);        /* it ends before the next step (batch.h), or NULL */
    struct pd_trace *trace;
    struct pd_dc_run *head, **tail;
    uint32_t n_active;          /* submitted, not finished */
    uint32_t n_on_way;
    struct pd_seen gens, requests;      /* generations whose kv came, and run ids of bare requests: one that comes again is a replay */
    char told[PD_RUN_LEN + 1];  /* the run whose stray records a line was last written about */
    uint64_t dropped_chunks;
    bool warned_advisory;
    int status;
    struct pd_err fatal;
    int64_t t0;
};

enum pd_dc_match { PD_BY_GEN,   /* of this generation, or one whose offer could not be read */
                   PD_BY_NAME };        /* failing that any of the run's id */

/* decoder.c */
/* A decoder whose rt, o, out or sink, trace and t0 are set, and the batch, where that is not. */
int pd_dc_open(struct pd_decoder *d, struct pd_err *e);
void pd_dc_close(struct pd_decoder *d);         /* frees all runs */
/* One step, when the batch is busy. Where nothing can run for want of blocks, somebody gives his up. may_wait: input may end an import; true: wait for it. */
bool pd_dc_turn(struct pd_decoder *d, bool may_wait);
bool pd_dc_step_batch(struct pd_decoder *d);    /* one step alone; false: nothing could run for want of blocks */
void pd_dc_fatal(struct pd_decoder *d, const struct pd_err *e);         /* the command ends with the first of these */
struct pd_dc_run *pd_dc_run_new(struct pd_decoder *d, struct pd_err *e);        /* at the end of the list */
void pd_dc_run_free(struct pd_decoder *d, struct pd_dc_run *r);
static inline bool pd_dc_on_way(const struct pd_dc_run *r) { return r->remote && !r->submitted; }
/* A run whose KV is on its way. Two may have one run id. gen may be NULL. */
struct pd_dc_run *pd_dc_find_on_way(struct pd_decoder *d, const char *run, const uint8_t *gen, enum pd_dc_match how);
/* To the batch, with imported KV or without (blocks NULL); refused when the batch does not take it. */
void pd_dc_submit(struct pd_decoder *d, struct pd_dc_run *r, uint32_t *blocks, uint32_t n_blocks);

/* receive.c */
void pd_dc_take_offer(struct pd_decoder *d, const struct pd_rec *rec);
void pd_dc_take_chunk(struct pd_decoder *d, const struct pd_rec *rec);
void pd_dc_take_kv(struct pd_decoder *d, const struct pd_rec *rec);
void pd_dc_reject_kv(struct pd_decoder *d, struct pd_dc_run *r, const struct pd_err *why);     /* the KV will not be used; the first reason counts */

bool pd_dc_same_field(const struct pd_decoder *d, const struct pd_dc_run *r, const char *name);         /* of the fingerprints, its KV's and ours */

/* A step of the run's life: into the trace, and to a person under -v. Its op is decode's, caused by prefill's. */
void pd_dc_step(struct pd_decoder *d, struct pd_dc_run *r, enum pd_state_id state, uint64_t bytes, const char *cause);
void pd_dc_step_tokens(struct pd_decoder *d, struct pd_dc_run *r, enum pd_state_id state, uint32_t choice, uint32_t pos, uint32_t tokens);
void pd_dc_step_end(struct pd_decoder *d, struct pd_dc_run *r, const struct pd_err *why);       /* failed, or cancelled; once */

/* answer.c */
static inline void pd_dc_set_parent(struct pd_dc_run *r, const uint8_t op[16]) { memcpy(r->parent, op, sizeof r->parent); r->has_parent = true; }
/* Before submission: the run goes on after these tokens, which its client has; its text is rebuilt, and none of it goes out again. One choice. 1: they were its
 * last ones, its result is put and it is gone. */
int pd_dc_resume(struct pd_decoder *d, struct pd_dc_run *r, const int32_t *tokens, uint32_t n, struct pd_err *e);
int pd_dc_make_choices(struct pd_dc_run *r, const struct pd_tokenizer *tok, struct pd_err *e);
/* One token of a choice reaches the run: kept, turned into text, streamed. True: a stop string ends the choice. */
bool pd_dc_deliver(struct pd_decoder *d, struct pd_dc_run *r, uint32_t choice, uint32_t pos, const struct pd_sampled *t);
void pd_dc_choice_done(struct pd_decoder *d, struct pd_dc_run *r, uint32_t choice, const char *reason);        /* the run may be gone after its last one */
/* why a run or a choice of it failed: to a person, the status, an `error` record */
void pd_dc_tell(struct pd_decoder *d, struct pd_dc_run *r, const struct pd_err *why);
void pd_dc_refuse(struct pd_decoder *d, struct pd_dc_run *r, const struct pd_err *why);        /* error and results; frees the run */
/* Ends a run in mid-course: PD_ECANCEL: results with what there is and finish_reason cancelled; else an error, and results that say so. Its blocks are free
 * afterwards; frees the run. */
void pd_dc_end(struct pd_decoder *d, struct pd_dc_run *r, const struct pd_err *why);
void pd_dc_print_text(struct pd_decoder *d);    /* text mode: what may be shown of the oldest run */
#endif
