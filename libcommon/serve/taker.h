/* The KV that a decode worker expects from prefill workers: who dials in, offers, what was taken, and what did not come.
 *
 * A run that is expected (pd_taker_expect) takes the offer of its name and op, from whichever prefill worker brings it; one that came first waits for its
 * run, PD_TAKER_EARLY_US at the most, and if it ends meanwhile, its run, when it comes, is computed here at once; of all connections together PD_TAKER_EARLY
 * wait, and no more. An offer of a run that is here and not expected is refused. What was offered waits until the pool has room for it beside what is being
 * decoded, in order of arrival.
 * Each expectation ends by one call: `taken` or `failed`, unless pd_taker_forget ends it.
 *
 * Blocks that the prefix cache holds of an offer's tokens are not sent: they stand in the block table with a reference, in whole chunks.
 * A connection that is lost leaves what was verified parked, with its blocks: when the prefill worker offers the same generation again within
 * PD_TAKER_WORD_US only the rest is sent. What is read in place is read on without it (pin.h). A release that nobody has acknowledged is told over the next
 * connection to the same life of that prefill worker (pd_xfer_commit); what it offers again because it has not heard of it is released at once.
 * The loop's. */
#ifndef PD_SERVE_TAKER_H
#define PD_SERVE_TAKER_H
#include "../engine/runtime.h"
#include "../trace/keyed.h"
#include "link.h"
#include "pin.h"

#define PD_TAKER_EARLY_US 5000000
#define PD_TAKER_EARLY 1024
#define PD_TAKER_WORD_US 1000000        /* for the router's word, after a prefill worker went away before its kv came */

struct pd_expect {              /* part of a run */
    struct pd_node node;        /* by the run's name */
    uint8_t op[16];
    struct pd_prefix_key key;   /* of its prompt, for what is here of it; lives as long as it is expected */
    bool expected;
    struct pd_move *move;       /* its offer, or NULL */
    struct pd_link *link;
    bool accepted;
    int64_t give_up, transfer_us;       /* no offer by then (mono us); how long a transfer may take, 0: as long as something comes */
    int64_t t_offer, deadline;  /* of the transfer: mono us; 0: none yet */
    uint8_t gen[PD_GEN_LEN];    /* whose transfer has begun; */
    struct pd_import *parked;   /* what is here of it, after its connection was lost */
    const char *kind;           /* its offer is over, why: it is computed here at give_up, unless it is offered again, or the router names another worker */
    struct pd_err why;
    struct pd_expect *next_room;        /* waiting for room */
    bool wants_room;
};
struct pd_kv_in {               /* what was taken */
    struct pd_kvdesc desc;      /* in mem */
    struct pd_arena mem;
    uint32_t *blocks, n_blocks;         /* a reference of each */
    uint64_t bytes;             /* that came */
    uint32_t held_tokens;       /* those whose KV was here already */
    int64_t us;                 /* from the offer on */
    unsigned converted;         /* PD_CONV_* */
    struct pd_pin *pin;         /* some blocks lie in the prefill worker's memory, under its lease (pin.h); NULL: all are our own */
};
void pd_kv_in_put(struct pd_pool *p, struct pd_kv_in *kv);      /* the blocks that are still its own; any thread */
void pd_kv_in_free(struct pd_pool *p, struct pd_kv_in *kv);     /* once nothing reads the blocks: the lease is released */

struct pd_taker_ops {
    void *ctx;
    bool (*known)(void *ctx, const char *run);          /* in hand, expected or not */
    void (*started)(void *ctx, struct pd_expect *x, const struct pd_kvdesc *offer);
    void (*taken)(void *ctx, struct pd_expect *x, struct pd_kv_in *kv);         /* *kv is the callee's */
    void (*failed)(void *ctx, struct pd_expect *x, const char *kind, const struct pd_err *why);
    uint32_t (*reserve)(void *ctx);                     /* blocks that what is being decoded may want next */
};
/* in_place: what comes by shm is read where the prefill worker has it, as long as the run lasts. */
struct pd_taker_opts { struct pd_runtime *rt; const char *via; size_t max_record; bool in_place; };
struct pd_taker;
int pd_taker_new(const struct pd_taker_opts *o, const struct pd_taker_ops *ops, struct pd_taker **out, struct pd_err *e);
int pd_taker_on(struct pd_taker *t, struct pd_loop *l, struct pd_metrics *m, struct pd_err *e);         /* before its first connection */
void pd_taker_free(struct pd_taker *t);         /* NULL: nothing */
struct pd_links *pd_taker_links(struct pd_taker *t);    /* for the entry "hello" */
int pd_taker_expect(struct pd_taker *t, struct pd_expect *x, const char *run, struct pd_err *e);        /* op, give_up, transfer_us are set */
void pd_taker_forget(struct pd_taker *t, struct pd_expect *x, const char *cause);       /* no more: a move is cancelled. Static text */
void pd_taker_room(struct pd_taker *t);         /* blocks may have come back, give_up has changed */
bool pd_taker_give_up_one(struct pd_taker *t);          /* the youngest that holds blocks: `failed`, out_of_blocks. false: none holds any */
void pd_taker_close(struct pd_taker *t);        /* drain: the connections, as soon as nothing is on its way */
struct pd_taker_counts {
    uint32_t links, expected, waiting /* for room */, moving, early, pinned /* read in place now */;
    uint64_t taken[PD_TRANSPORTS], bytes, failed, held_blocks /* that were not sent */, resumed, committed /* releases told over another connection */;
};
struct pd_taker_counts pd_taker_counts(const struct pd_taker *t);
#endif
