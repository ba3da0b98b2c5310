/* Inside a worker: what its sides share, and what each has to be to it. worker.c has the daemon, the desk, the batch and the thread's turns; a side has its
 * runs. Who calls what: the worker its sides by struct pd_side, a side the worker's desk and batch; the two sides do not know each other. */
#ifndef PD_SERVE_WORKER_IN_H
#define PD_SERVE_WORKER_IN_H
#include "../engine/batch.h"
#include "desk.h"
#include "readback.h"
#include "register.h"
#include "worker.h"

struct pd_side;
struct pd_side_run {            /* a side's run begins with it */
    struct pd_desk_run d;
    const struct pd_side *side; /* NULL: not admitted */
    uint32_t n_ids;             /* of its prompt, as far as it brought ids and is to be computed here: for heartbeats, while the thread has the request */
    _Atomic bool at_batch;      /* the thread has it, or had */
};

typedef void pd_ledger_fn(void *to, const char *key, int64_t value);
struct pd_side {                /* calls as in struct pd_desk_ops; the loop's */
    void *ctx;
    int (*admit)(void *ctx, struct pd_desk_run *r, struct pd_err *e);
    bool (*again)(void *ctx, struct pd_desk_run *r, struct pd_client *from, const struct pd_intake *in, const struct pd_routing *route);
    void (*refuse)(void *ctx, const struct pd_request *q, const struct pd_err *why, const char *action, struct pd_buf *b);
    void (*news)(void *ctx, struct pd_desk_run *r);     /* or NULL */
    void (*cancel)(void *ctx, struct pd_desk_run *r);
    void (*freed)(void *ctx, struct pd_desk_run *r);
    int (*verify)(void *ctx, struct pd_conn *c, struct pd_desk_run *r, struct pd_err *e);
    void (*ledger)(void *ctx, pd_ledger_fn *put, void *to);
    void (*cut)(void *ctx, struct pd_desk_run *r, const struct pd_err *why);    /* the process ends by force: its end for the trace */
};

enum pd_wk_end { PD_WK_COMPLETED, PD_WK_PUBLISHED, PD_WK_FAILED, PD_WK_CANCELLED, PD_WK_REFUSED, PD_WK_ENDS };
struct pd_worker {
    struct pd_runtime *rt;
    struct pd_worker_opts o;
    size_t max_record;
    struct pd_daemon *d;
    struct pd_desk *desk;
    struct pd_register *reg;
    struct pd_readbacks readbacks;
    struct pd_runner *runner;   /* NULL: role prefill */
    struct pd_giver *giver;     /* NULL: role decode */
    struct pd_post stuck;
    struct pd_call c_stuck;
    /* the thread's */
    struct pd_batch *batch;
    _Atomic bool is_stuck;
    _Atomic int stuck_turns;    /* in a row: nothing could run for want of blocks */
    _Atomic uint64_t prompt_left, kv_tokens;    /* of the batch after the last step; and how many sequences are without KV, or are not there to be given */
    _Atomic uint32_t waiting, to_answer;
    /* counted by both */
    struct pd_metric *m_seqs, *m_blocks[3], *m_rows[2], *m_cached, *m_steps, *m_preempted, *m_ends[PD_WK_ENDS];
};
/* The next of a side's runs in hand after r; NULL: the first. */
struct pd_desk_run *pd_worker_next(const struct pd_worker *w, const struct pd_side *side, const struct pd_desk_run *r);
#endif
