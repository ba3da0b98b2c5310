/* The side of a worker that answers: requests in, tokens and results out; and KV from prefill workers.
 *
 * A request without a route, or with one that says aggregated or local, is run whole here. One that is routed remote waits for the KV of its run and op, which
 * a prefill worker dials in with (hello) and offers; it is taken, verified, and decoded from there, and no token of it leaves before that. What goes wrong with
 * the KV ends in computing it here at once, and the result says so in `fallback`: a kind, ": ", words.
 *   prefill_timeout       nobody offered it within timeouts_ms.prefill (60 s)
 *   prefill_worker_gone   the connection to the prefill worker ended: at once when its KV was complete, else unless the router names another within a second
 *   transfer_timeout      timeouts_ms.transfer has passed, or nothing came for a while
 *   lease_ended           the lease ran out, or the prefill worker withdrew it
 *   integrity             checksum, layout, other tokens than the request's
 *   fingerprint_mismatch  it is of another model
 *   out_of_blocks         its blocks were needed by what decodes already
 *   kv_failed             anything else
 * With in_place the lease lasts as long as the run, and is looked at before each token: a step that was read after its end is dropped, and the run's KV computed
 * again here (lease_ended; the mode stays remote).
 * The event `fallback` is told by this worker for the above, and when a run that waits for KV is told to do without; by the router when a run is local from
 * the start.
 *
 * A routed run in hand may come again, over the same connection, with another route: local, it is computed here now (nothing happens if that is so already);
 * remote with the same op, it goes on waiting for that; with another op, for the new one.
 * A route with `resume` (n 1): generation goes on after these tokens, whose text is rebuilt; token records begin after them, the result has all. Of `logprobs`
 * the first ones are 0: who resumes has them.
 *
 * A client gets `token` records when the request says stream: true, or it says nothing and `stream` is set, and one `result` a choice. A client that is gone, a
 * `cancel` on the run's own connection, or one with its cancel_token ends the run between two steps of the batch (in a step that is its alone, between two layers), and its transfer: its blocks are free then.
 * A run ends by completed, failed or cancelled in the trace.
 */
#ifndef PD_SERVE_RUNNER_H
#define PD_SERVE_RUNNER_H
#include "worker_in.h"

struct pd_runner;
int pd_runner_new(struct pd_worker *w, struct pd_runner **out, struct pd_err *e);
int pd_runner_on(struct pd_runner *r, struct pd_err *e);        /* the daemon is there */
void pd_runner_end(struct pd_runner *r, const struct pd_err *why /* or NULL */);        /* the thread is joined and the batch freed; why: cut short */
void pd_runner_free(struct pd_runner *r);       /* after the desk. NULL: nothing */
const struct pd_side *pd_runner_side(const struct pd_runner *r);
size_t pd_runner_run_size(void);
struct pd_links *pd_runner_links(struct pd_runner *r);          /* for the entry "hello" */
int pd_runner_verify_past(struct pd_runner *r, struct pd_conn *c, struct pd_str run, struct pd_err *e);         /* of a run that is over */
bool pd_runner_give_up_one(struct pd_runner *r);        /* KV that is on its way; see pd_taker_give_up_one */
void pd_runner_room(struct pd_runner *r);       /* blocks may have come back */
uint32_t pd_runner_links_n(const struct pd_runner *r), pd_runner_moves(const struct pd_runner *r);
void pd_runner_close(struct pd_runner *r);              /* drain: the connections, as soon as nothing is on its way */
/* ---- the thread's ---- */
void pd_runner_failed(struct pd_runner *r, const struct pd_err *why);   /* the engine's own failure */
void pd_runner_after(struct pd_runner *r);              /* each turn */
#endif
