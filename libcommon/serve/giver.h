/* The side of a worker that gives: routed requests in, KV to the decode workers that their routes name.
 *
 * A request needs a `route` with d (wire/routing). The worker dials d.at and says hello, one connection a decode worker, kept and dialled anew when it is gone;
 * prefills, all runs in one batch; and gives the KV of run and op as its layers finish, under a lease. Its client, the router, gets for each request one of
 *   kv      published: the descriptor without payload, with the first tokens and the times of the stages;
 *   error   it failed, or was cancelled (class cancelled);
 * and after a `kv` an `error` may still come: the decode worker could not be reached or went away, and has no KV of ours.
 *
 * A connection that is lost is made anew, and what was on its way is offered again over it: the decode worker says which chunks it has verified, and only the
 * others go. What it reads in place stays leased meanwhile, and is offered again too, so that the new connection renews and releases it.
 * Blocks: the lease holds them from the run's first step until the decode worker has released it, or it has expired (lease_us) or was revoked. What a decode
 * worker that died had not read stays leased, so that the same run can go to another: the same run and op with another d moves it there without a second
 * prefill. When new runs find no blocks such leases are revoked first; else they wait.
 * A run in hand that comes again with its op is joined: who asked last gets the answer.
 * Cancel, by a `cancel` record on the run's own connection or with its token, or because the client is gone: the run leaves the batch before its next step (one
 * that is its alone is given up between two layers), its lease is revoked, and the decode worker is told.
 * Drain: no new runs; those in hand are prefilled and given, and all leases end.
 */
#ifndef PD_SERVE_GIVER_H
#define PD_SERVE_GIVER_H
#include "worker_in.h"

struct pd_giver;
int pd_giver_new(struct pd_worker *w, uint32_t most /* blocks that are held for others at once */, struct pd_giver **out, struct pd_err *e);
int pd_giver_on(struct pd_giver *g, struct pd_err *e);          /* the daemon is there */
void pd_giver_drop_all(struct pd_giver *g);     /* the thread is joined: its runs leave the batch */
void pd_giver_end(struct pd_giver *g);          /* then: leases and connections end */
void pd_giver_free(struct pd_giver *g);         /* after the desk. NULL: nothing */
const struct pd_side *pd_giver_side(const struct pd_giver *g);
size_t pd_giver_run_size(void);
void pd_giver_beat(struct pd_giver *g);         /* leases are looked at */
/* Blocks are wanted. false: there were none. */
bool pd_giver_give_up(struct pd_giver *g);      /* leases whose KV nobody reads; */
bool pd_giver_revoke_one(struct pd_giver *g);   /* the youngest of all */
uint32_t pd_giver_links_n(const struct pd_giver *g), pd_giver_moves(const struct pd_giver *g), pd_giver_blocks(const struct pd_giver *g) /* under a lease */;
#endif
