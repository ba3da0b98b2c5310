/* Reading back: what a worker holds of a run, hashed again from the memory that it uses (a `status` record with `verify`: wire/pd-wire.5).
 *
 * The blocks are referenced first, by whoever knows them: between two steps where the batch has them, so that nobody writes them at that moment; a last block
 * that is not full, which decoding goes on filling, is hashed there and then, as if zeros followed its prompt. All others are hashed on the loop, a slice a
 * turn: the batch goes on meanwhile. Sums are of one layer of one block each, seeded as a chunk of just that: with the run's generation, or zeros where it has
 * none. The loop's, but for pd_readback_blocks. */
#ifndef PD_SERVE_READBACK_H
#define PD_SERVE_READBACK_H
#include "../kv/handover.h"
#include "../engine/runtime.h"
#include "desk.h"

enum { PD_READBACK_PAST = 16 };
struct pd_readback;
struct pd_readbacks {           /* zero-initialise, then rt and l */
    const struct pd_runtime *rt;
    struct pd_loop *l;
    struct pd_readback *first;
    uint32_t n;
    /* Runs that are over, whose KV came from elsewhere: what the prefix cache still has of them can be read back. A ring. */
    struct { struct pd_kvdesc desc; struct pd_arena mem; } past[PD_READBACK_PAST];
    int oldest;
};
struct pd_readback {
    struct pd_readbacks *all;
    struct pd_readback *next, **prev;
    struct pd_conn *c;          /* NULL: gone */
    struct pd_call call;        /* for who has to ask the thread */
    struct pd_post post;
    char run[PD_RUN_LEN + 1];
    /* the asker's */
    void *user;
    void (*done)(struct pd_readback *b);        /* the blocks are read: whether their lease still is, `lease`; and `user` may go. Or NULL */
    const char *state, *lease;
    uint8_t gen[PD_GEN_LEN]; bool has_gen;
    uint32_t n_tokens;          /* of the prompt */
    uint64_t tokens_sum;        /* XXH3-64 of its ids */
    /* what is held: whole blocks, and perhaps the last one */
    uint32_t *blocks, n_blocks, at;
    struct pd_buf sums;         /* big-endian, block by block, layer by layer */
    struct pd_err why;
};

/* The connection is its own from here on; pd_readback_go follows, at once or from the thread. */
int pd_readback_new(struct pd_readbacks *all, struct pd_conn *c, const char *run, struct pd_readback **out, struct pd_err *e);
/* References of the blocks that hold the first n_kv of its n_tokens tokens. Any thread. */
void pd_readback_blocks(struct pd_readback *b, const uint32_t *blocks, uint32_t n_kv);
void pd_readback_go(struct pd_readback *b);             /* any thread */
void pd_readback_keep(struct pd_readbacks *all, const struct pd_kvdesc *d, struct pd_arena *mem);       /* a run ends: takes mem over, where d lies */
int pd_readback_past(struct pd_readbacks *all, struct pd_conn *c, struct pd_str run, struct pd_err *e); /* of a run that is not in hand. PD_EFAIL: unknown */
void pd_readbacks_free(struct pd_readbacks *all);       /* after the loop's end: without `done` */
#endif
