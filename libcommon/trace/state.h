/* The life of a run, of a lease and of a process, as tables: what an event's `state` may be and what may follow what. The writer (event.h) takes its names
 * from here, the checker (check.h) its rules: a state that is added here is known to both.
 *
 *   accepted > route_selected > [ prefill_started > prefill_completed > kv_published > kv_transfer_started > kv_transfer_completed > ] decode_started >
 *   streaming > completed; from any: cancelled, failed, blocked; side steps fallback, retry, migrated, first_token_early.
 *
 * KV may be sent while it is computed: kv_transfer_started may come as soon as prefill_started has. A run that ends at prefill streams after
 * kv_published. Where nothing is moved (where: local, aggregated) there are prefill_started and prefill_completed, then decode_started.
 * A side step begins a new attempt: what it `clears` may come again.
 */
#ifndef PD_TRACE_STATE_H
#define PD_TRACE_STATE_H
#include <stdbool.h>
#include <stdint.h>
#include "../base/mem.h"

enum pd_state_id {
    PD_ST_UNKNOWN,
    PD_ST_ACCEPTED, PD_ST_ROUTE_SELECTED, PD_ST_PREFILL_STARTED, PD_ST_PREFILL_COMPLETED, PD_ST_KV_PUBLISHED, PD_ST_KV_TRANSFER_STARTED,
        PD_ST_KV_TRANSFER_COMPLETED,
    PD_ST_DECODE_STARTED, PD_ST_STREAMING,
    PD_ST_COMPLETED, PD_ST_CANCELLED, PD_ST_FAILED, PD_ST_BLOCKED,
    PD_ST_FALLBACK, PD_ST_RETRY, PD_ST_MIGRATED, PD_ST_FIRST_TOKEN_EARLY,
    PD_ST_LEASE_GRANTED, PD_ST_LEASE_READ, PD_ST_LEASE_RENEWED, PD_ST_LEASE_RELEASED, PD_ST_LEASE_EXPIRED, PD_ST_LEASE_REVOKED, PD_ST_REAPED,
        PD_ST_CANCEL_ACKED,
    PD_ST_KV_MOVED,
    PD_ST_STARTING, PD_ST_READY, PD_ST_DRAINING, PD_ST_ROTATED, PD_ST_GONE,
    PD_N_STATES
};
#define PD_BIT(id) (1u << (id))

enum pd_state_class {
    PD_SC_STEP,     /* of a run */
    PD_SC_END,      /* of a run, its last */
    PD_SC_SIDE,     /* of a run, between attempts */
    PD_SC_LEASE,    /* of a lease: carries `lease`, or for want of it `gen`, the same in all events of one lease */
    PD_SC_NOTE,     /* of a run, without effect on its state */
    PD_SC_PROC      /* of the process that writes: no run */
};
struct pd_state {
    const char *name;
    enum pd_state_class class;
    uint32_t after;             /* PD_BIT of states: one of them must have come in this attempt; 0: none needed */
    uint32_t or_ever;           /* or one of these in any attempt: KV that was published can be moved again */
    uint32_t barred;            /* none of them may have come in this attempt */
    uint32_t if_seen, then;     /* when if_seen came, one of `then` must have too */
    uint32_t clears;            /* a side step: what may come again */
    bool both;                  /* each end may tell it (the two ends of a transfer, router and worker): once a worker */
};
extern const struct pd_state pd_state[PD_N_STATES];
enum pd_state_id pd_state_find(struct pd_str name);     /* PD_ST_UNKNOWN: of a later version, to be passed over */

/* By an event's `role` (front; route; any other is a worker's), who stands nearer to the client: what they tell of an end or of tokens counts before what
 * others do. */
enum pd_rank { PD_R_WORKER, PD_R_ROUTER, PD_R_FRONT, PD_N_RANKS };
enum pd_rank pd_rank_of(const char *role);

/* May `id` follow what came (PD_BIT of states: in this attempt, in any)? 0 yes; else the bit mask of states that are missing (*barred false: one of them
 * is needed) or in the way (*barred true). With PD_ST_FIRST_TOKEN_EARLY in `seen`, streaming bars nothing but a second attempt. */
uint32_t pd_state_clash(enum pd_state_id id, uint32_t seen, uint32_t ever, bool *barred);
/* What must be assumed to have come before `id`, when the log begins with it. */
uint32_t pd_state_implied(enum pd_state_id id);
#endif
