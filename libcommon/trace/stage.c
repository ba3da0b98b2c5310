#include "stage.h"

#define B(x) PD_BIT(PD_ST_##x)
#define END (B(COMPLETED) | B(CANCELLED) | B(FAILED) | B(BLOCKED))
const struct pd_stage pd_stage[PD_N_TIMES] = {
    [PD_SG_ROUTE] = { "route", B(ACCEPTED), B(ROUTE_SELECTED), "accepted to route_selected" },
    [PD_SG_QUEUE] = { "queue", B(ACCEPTED) | B(ROUTE_SELECTED), B(PREFILL_STARTED), "accepted, or route_selected, to prefill_started" },
    [PD_SG_PREFILL] = { "prefill", B(PREFILL_STARTED), B(PREFILL_COMPLETED), "prefill_started to prefill_completed" },
    [PD_SG_PUBLISH] = { "publish", B(PREFILL_COMPLETED), B(KV_PUBLISHED), "prefill_completed to kv_published" },
    [PD_SG_TRANSFER] = { "transfer", B(KV_TRANSFER_STARTED), B(KV_TRANSFER_COMPLETED), "kv_transfer_started to kv_transfer_completed" },
    [PD_SG_WAIT] = { "wait", B(KV_TRANSFER_COMPLETED), B(DECODE_STARTED), "kv_transfer_completed to decode_started" },
    [PD_SG_FIRST] = { "first", B(DECODE_STARTED), B(STREAMING), "decode_started to streaming" },
    [PD_SG_STREAM] = { "stream", B(STREAMING), END, "streaming to the end" },
    [PD_SG_TTFT] = { "ttft", B(ACCEPTED), B(STREAMING), "accepted to streaming" },
    [PD_SG_E2E] = { "e2e", B(ACCEPTED), END, "accepted to the end" },
};
/* What a new attempt begins anew. */
static const uint32_t again = 1u << PD_SG_ROUTE | 1u << PD_SG_QUEUE | 1u << PD_SG_PREFILL | 1u << PD_SG_PUBLISH | 1u << PD_SG_TRANSFER | 1u << PD_SG_WAIT |
    1u << PD_SG_FIRST;

static int cut(struct pd_stages *s, uint32_t which, const struct pd_log_rec *r, pd_stage_fn *fn, void *ctx, struct pd_err *e)
{
    int rc = 0;
    for (int i = 0; i < PD_N_TIMES && !rc; i++)
        if (s->open & which & 1u << i)
            rc = fn(ctx, (enum pd_stage_id)i, PD_STAGE_CUT, s->from_us[i], r->at_us, r, e);
    s->open &= ~which;
    return rc;
}

int pd_stages_event(struct pd_stages *s, const struct pd_log_rec *r, pd_stage_fn *fn, void *ctx, struct pd_err *e)
{
    enum pd_state_class class = pd_state[r->state].class;
    uint32_t bit = PD_BIT(r->state);
    bool new_attempt = class == PD_SC_SIDE && r->state != PD_ST_FIRST_TOKEN_EARLY;
    enum pd_rank rank = pd_rank_of(r->ev.role);
    int rc = 0;
    if (class == PD_SC_LEASE || class == PD_SC_PROC || class == PD_SC_NOTE || s->end)
        return 0;
    if (rank > s->top)
        s->top = rank;
    if (class == PD_SC_END && rank < s->top)
        return 0;               /* a worker's part of it */
    for (int i = 0; i < PD_N_TIMES && !rc; i++)
        if (pd_stage[i].to & bit && s->open >> i & 1) {
            s->open &= ~(1u << i);
            s->done |= 1u << i;
            rc = fn(ctx, (enum pd_stage_id)i, PD_STAGE_CLOSE, s->from_us[i], r->at_us, r, e);
        }
    if (!rc && new_attempt) {
        rc = cut(s, again, r, fn, ctx, e);
        s->done &= ~again;
        s->fell_back |= r->state == PD_ST_FALLBACK;
        if (!rc && r->state != PD_ST_MIGRATED && pd_stage[PD_SG_QUEUE].from) {
            s->from_us[PD_SG_QUEUE] = r->at_us;
            s->open |= 1u << PD_SG_QUEUE;
            rc = fn(ctx, PD_SG_QUEUE, PD_STAGE_OPEN, r->at_us, r->at_us, r, e);
        }
    }
    for (int i = 0; i < PD_N_TIMES && !rc; i++) {
        bool reopen = i == PD_SG_QUEUE && r->state == PD_ST_ROUTE_SELECTED;     /* waiting counts from the choice of a worker */
        if (!(pd_stage[i].from & bit) || s->done >> i & 1 || (s->open >> i & 1 && !reopen))
            continue;
        s->from_us[i] = r->at_us;
        if (!(s->open >> i & 1) || reopen)
            rc = fn(ctx, (enum pd_stage_id)i, PD_STAGE_OPEN, r->at_us, r->at_us, r, e);
        s->open |= 1u << i;
    }
    s->moved |= r->state == PD_ST_KV_TRANSFER_STARTED || r->state == PD_ST_KV_PUBLISHED ||
                (r->state == PD_ST_ROUTE_SELECTED && !strcmp(r->ev.where, "remote"));     /* of a log of the router alone */
    if (r->state == PD_ST_STREAMING) {
        s->tokens[rank] += r->ev.tokens;
        s->choices[rank] += r->ev.tokens && !r->ev.pos;
        s->first_us = s->first_us ? s->first_us : r->at_us;
        s->last_us = r->at_us;
    }
    s->last = r->state;
    if (class == PD_SC_END) {
        s->end = r->state;
        if (r->ev.tokens)
            s->tokens[rank] = r->ev.tokens;
        rc = rc ? rc : cut(s, ~0u, r, fn, ctx, e);
    }
    return rc;
}

static int teller(const struct pd_stages *s)
{
    int i = PD_N_RANKS - 1;
    while (i && !s->tokens[i])
        i--;
    return i;
}

uint32_t pd_stages_tokens(const struct pd_stages *s) { return s->tokens[teller(s)]; }

double pd_stages_tpot_us(const struct pd_stages *s)
{
    int i = teller(s);
    uint32_t first = s->choices[i] ? s->choices[i] : 1;
    return s->tokens[i] > first && s->last_us > s->first_us ? (double)(s->last_us - s->first_us) / (s->tokens[i] - first) : -1;
}

const char *pd_stages_mode(const struct pd_stages *s) { return s->fell_back ? "local" : s->moved ? "remote" : "aggregated"; }
