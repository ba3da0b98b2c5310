#include "state.h"

#define B(x) PD_BIT(PD_ST_##x)
/* From prefill to the step before streaming, and what bars a step that comes too late. */
#define MOVED   (B(KV_TRANSFER_COMPLETED) | B(DECODE_STARTED) | B(STREAMING))
#define WORK    (B(PREFILL_STARTED) | B(PREFILL_COMPLETED) | B(KV_PUBLISHED) | B(KV_TRANSFER_STARTED) | B(KV_TRANSFER_COMPLETED) | B(DECODE_STARTED))
#define OUT     (B(STREAMING) | B(FIRST_TOKEN_EARLY))

const struct pd_state pd_state[PD_N_STATES] = {
    [PD_ST_UNKNOWN] = { .name = "", .class = PD_SC_NOTE },
    [PD_ST_ACCEPTED] = { .name = "accepted", .class = PD_SC_STEP, .barred = B(ROUTE_SELECTED) | WORK | OUT, .both = true },
    [PD_ST_ROUTE_SELECTED] = { .name = "route_selected", .class = PD_SC_STEP, .after = B(ACCEPTED), .barred = WORK | OUT },
    [PD_ST_PREFILL_STARTED] = { .name = "prefill_started", .class = PD_SC_STEP, .after = B(ACCEPTED) | B(ROUTE_SELECTED), .barred = WORK | B(STREAMING) },
    [PD_ST_PREFILL_COMPLETED] = { .name = "prefill_completed", .class = PD_SC_STEP, .after = B(PREFILL_STARTED), .barred = B(KV_PUBLISHED) | MOVED },
    [PD_ST_KV_PUBLISHED] = { .name = "kv_published", .class = PD_SC_STEP, .after = B(PREFILL_COMPLETED), .barred = MOVED },
    [PD_ST_KV_TRANSFER_STARTED] = { .name = "kv_transfer_started", .class = PD_SC_STEP, .after = B(PREFILL_STARTED), .or_ever = B(KV_PUBLISHED) | B(PREFILL_STARTED),
        .barred = MOVED, .both = true },
    [PD_ST_KV_TRANSFER_COMPLETED] = { .name = "kv_transfer_completed", .class = PD_SC_STEP, .after = B(KV_TRANSFER_STARTED), .barred = B(DECODE_STARTED) |
        B(STREAMING), .both = true },
    [PD_ST_DECODE_STARTED] = { .name = "decode_started", .class = PD_SC_STEP, .after = B(KV_TRANSFER_COMPLETED) | B(PREFILL_COMPLETED), .barred = B(STREAMING),
                               .if_seen = B(KV_TRANSFER_STARTED), .then = B(KV_TRANSFER_COMPLETED) },
    [PD_ST_STREAMING] = { .name = "streaming", .class = PD_SC_STEP, .after = B(DECODE_STARTED) | B(KV_PUBLISHED) | B(FIRST_TOKEN_EARLY),
                          .if_seen = B(KV_TRANSFER_STARTED), .then = B(DECODE_STARTED) | B(FIRST_TOKEN_EARLY), .both = true },
    [PD_ST_COMPLETED] = { .name = "completed", .class = PD_SC_END, .after = B(STREAMING), .or_ever = B(STREAMING), .both = true },
    [PD_ST_CANCELLED] = { .name = "cancelled", .class = PD_SC_END, .both = true },
    [PD_ST_FAILED] = { .name = "failed", .class = PD_SC_END, .both = true },
    [PD_ST_BLOCKED] = { .name = "blocked", .class = PD_SC_END, .both = true },
    /* Before the first token reaches the client; retry and fallback are told apart by who computes next. */
    [PD_ST_FALLBACK] = { .name = "fallback", .class = PD_SC_SIDE, .after = B(ACCEPTED), .barred = OUT | B(FALLBACK), .clears = WORK, .both = true },
    [PD_ST_RETRY] = { .name = "retry", .class = PD_SC_SIDE, .after = B(ACCEPTED), .barred = OUT, .clears = B(ROUTE_SELECTED) | WORK | B(FALLBACK) },
    [PD_ST_MIGRATED] = { .name = "migrated", .class = PD_SC_SIDE, .after = OUT | B(DECODE_STARTED), .clears = B(ROUTE_SELECTED) | WORK | OUT | B(FALLBACK) },
    [PD_ST_FIRST_TOKEN_EARLY] = { .name = "first_token_early", .class = PD_SC_SIDE, .after = B(PREFILL_COMPLETED) | B(KV_TRANSFER_STARTED),
        .barred = B(DECODE_STARTED) | OUT },
    [PD_ST_LEASE_GRANTED] = { .name = "lease_granted", .class = PD_SC_LEASE },
    [PD_ST_LEASE_READ] = { .name = "lease_read", .class = PD_SC_LEASE },
    [PD_ST_LEASE_RENEWED] = { .name = "lease_renewed", .class = PD_SC_LEASE },
    [PD_ST_LEASE_RELEASED] = { .name = "lease_released", .class = PD_SC_LEASE },
    [PD_ST_LEASE_EXPIRED] = { .name = "lease_expired", .class = PD_SC_LEASE },
    [PD_ST_LEASE_REVOKED] = { .name = "lease_revoked", .class = PD_SC_LEASE },
    [PD_ST_REAPED] = { .name = "reaped", .class = PD_SC_LEASE },
    [PD_ST_CANCEL_ACKED] = { .name = "cancel_acked", .class = PD_SC_NOTE },
    [PD_ST_KV_MOVED] = { .name = "kv_moved", .class = PD_SC_NOTE },     /* of a filter in between: it takes no part in the run */
    [PD_ST_STARTING] = { .name = "starting", .class = PD_SC_PROC },
    [PD_ST_READY] = { .name = "ready", .class = PD_SC_PROC },
    [PD_ST_DRAINING] = { .name = "draining", .class = PD_SC_PROC },
    [PD_ST_ROTATED] = { .name = "rotated", .class = PD_SC_PROC },       /* the first of a new file: what came before is in another */
    [PD_ST_GONE] = { .name = "gone", .class = PD_SC_PROC },
};

enum pd_state_id pd_state_find(struct pd_str name)
{
    for (int i = 1; i < PD_N_STATES; i++)
        if (pd_str_eq(name, pd_state[i].name))
            return (enum pd_state_id)i;
    return PD_ST_UNKNOWN;
}

enum pd_rank pd_rank_of(const char *role)
{
    return !strcmp(role, "front") ? PD_R_FRONT : !strcmp(role, "route") || !strcmp(role, "router") ? PD_R_ROUTER : PD_R_WORKER;
}

uint32_t pd_state_clash(enum pd_state_id id, uint32_t seen, uint32_t ever, bool *barred)
{
    const struct pd_state *s = &pd_state[id];
    uint32_t bars = s->barred;
    if (s->class == PD_SC_STEP && seen & B(FIRST_TOKEN_EARLY))
        bars &= ~OUT;
    *barred = (seen & bars) != 0;
    if (*barred)
        return seen & bars;
    if (s->after && !(seen & s->after) && !(ever & s->or_ever))
        return s->after;
    return seen & s->if_seen && !(seen & s->then) ? s->then : 0;
}

uint32_t pd_state_implied(enum pd_state_id id)
{
    switch (pd_state[id].class) {
    case PD_SC_STEP:
        if (id == PD_ST_KV_TRANSFER_STARTED)
            return B(ACCEPTED) | B(ROUTE_SELECTED) | B(PREFILL_STARTED);        /* the rest of prefill may still come */
        return (PD_BIT(id) - 1) & ~1u & ~pd_state[id].barred & (id == PD_ST_STREAMING ? ~(B(KV_TRANSFER_STARTED) | B(KV_TRANSFER_COMPLETED)) : ~0u);
    case PD_SC_END: return B(ACCEPTED) | B(DECODE_STARTED) | B(STREAMING);
    case PD_SC_SIDE: return B(ACCEPTED) | (id == PD_ST_MIGRATED ? OUT : WORK & ~pd_state[id].barred);
    default: return 0;
    }
}
