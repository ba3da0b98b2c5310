#include <inttypes.h>
#include <stdio.h>
#include "../kv/convert.h"
#include "../wire/pack.h"
#include "policy.h"

enum { MAX_ROWS = 128 };
const char *const pd_policy_names[] = { "aggregated", "fixed", NULL };
const char *const pd_mode_names[] = { "aggregated", "remote", "local" };

bool pd_policy_find(const char *name, enum pd_policy *out)
{
    for (int i = 0; pd_policy_names[i]; i++)
        if (!strcmp(name, pd_policy_names[i])) {
            *out = (enum pd_policy)i;
            return true;
        }
    return false;
}

static uint32_t block_size(const struct pd_member *m) { return m->said.capacity.block_size ? m->said.capacity.block_size : 1; }

struct pd_share pd_share_of(const struct pd_need *need, const struct pd_member *m, bool prefills, bool decodes)
{
    uint64_t prompt = need->prompt_tokens, out = (uint64_t)need->max_tokens * need->n, bs = block_size(m);
    return (struct pd_share){ 1, prefills ? prompt : 0, (prompt + (decodes ? out : 0) + bs - 1) / bs };
}

/* ---- who may ---- */

static enum pd_excluded never(const struct pd_need *q, const struct pd_member *m)
{
    bool has = !q->adapter.n;
    for (uint32_t i = 0; i < m->said.n_adapters && !has; i++)
        has = m->said.adapters[i].n == q->adapter.n && !memcmp(m->said.adapters[i].p, q->adapter.p, q->adapter.n);
    if (!has)
        return PD_X_ADAPTER;
    return q->exact && m->said.capacity.context && q->prompt_tokens >= m->said.capacity.context ? PD_X_CONTEXT : PD_X_NO;
}

/* Is it there at all? */
static enum pd_excluded absent(const struct pd_need *q, const struct pd_member *m)
{
    if (!m->known)
        return PD_X_UNKNOWN;
    if (strcmp(m->said.state, "ready"))
        return PD_X_STATE;
    if (!m->reachable)
        return PD_X_UNREACHABLE;
    return q->suspect_us && q->now_us - m->said_us > q->suspect_us ? PD_X_SILENT : PD_X_NO;
}

static bool was_tried(const struct pd_need *q, const struct pd_member *m)
{
    for (int i = 0; i < q->n_tried; i++)
        if (q->tried[i].m == m && q->tried[i].life == m->life)
            return true;
    return false;
}

/* A worker that has as many runs as it takes in reads no more, not even a cancel: one less, then. */
static uint32_t most_runs(const struct pd_member *m) { return m->said.capacity.max_runs > 2 ? m->said.capacity.max_runs - 1 : 1; }

static enum pd_excluded full(const struct pd_need *q, const struct pd_member *m, bool takes_kv)
{
    uint64_t runs = (uint64_t)m->own.runs + m->foreign.runs;
    if (runs >= most_runs(m))
        return PD_X_RUNS;
    if (m->behind)
        return PD_X_BEHIND;
    if (!takes_kv || !runs || !m->said.capacity.blocks)
        return PD_X_NO;
    struct pd_share s = pd_share_of(q, m, false, true);
    return m->own.blocks + m->foreign.blocks + s.blocks > m->said.capacity.blocks ? PD_X_BLOCKS : PD_X_NO;
}

static uint64_t cost(const struct pd_member *m, bool prefills, bool decodes)
{
    uint64_t ahead = (m->own.prefill_tokens + m->foreign.prefill_tokens + block_size(m) - 1) / block_size(m);
    return (prefills ? ahead : 0) + (decodes ? m->own.blocks + m->foreign.blocks : 0);
}

/* Workers of one side, with what keeps each away that does not depend on the other side. split: each has one side, that of its role or the one it prefers. */
static void list(struct pd_registry *r, struct pd_decision *o, bool giving, bool split)
{
    const struct pd_need *q = &o->need;
    struct pd_candidate *row = giving ? o->p_row : o->d_row;
    uint32_t *n = giving ? &o->n_p : &o->n_d;
    for (struct pd_member *m = r->first; m; m = m->next) {
        if (m->known ? !(giving ? pd_member_gives(m) : split ? pd_member_decodes(m) : pd_member_can_decode(m)) : giving)
            continue;
        if (*n == PD_MAX_CANDIDATES) {
            o->left_out++;
            continue;
        }
        struct pd_candidate *c = &row[(*n)++];
        *c = (struct pd_candidate){ .m = m, .x = absent(q, m) };
        if (!c->x && !giving)
            c->x = never(q, m);
        if (!c->x && !giving && q->d && q->d != m)
            c->x = PD_X_TRIED;
        const char *why;
        if (!c->x && !giving && q->like >= 0) {
            enum pd_fp_verdict v = pd_registry_pair(r, q->like, m->fp, 0, NULL, &why);
            if (v == PD_FP_DIFFERS) {
                c->x = PD_X_FINGERPRINT;
                c->detail = why;
            } else if (!pd_str_eq(m->said.numerics, q->numerics))
                c->x = PD_X_NUMERICS;
        }
    }
}

/* The newest epoch with somebody for each side that is needed. */
static bool newest(const struct pd_decision *o, bool with_p, uint64_t *epoch)
{
    bool any = false;
    for (uint32_t i = 0; i < o->n_d; i++) {
        uint64_t at = o->d_row[i].m->said.epoch;
        bool pair = !with_p;
        if (o->d_row[i].x || (any && at <= *epoch))
            continue;
        for (uint32_t k = 0; k < o->n_p && !pair; k++)
            pair = !o->p_row[k].x && o->p_row[k].m->said.epoch == at;
        if (pair) {
            *epoch = at;
            any = true;
        }
    }
    return any;
}

static void narrow(struct pd_decision *o, struct pd_candidate *row, uint32_t n, bool prefills, bool decodes, bool takes_kv, bool any_epoch)
{
    for (uint32_t i = 0; i < n; i++) {
        struct pd_candidate *c = &row[i];
        if (c->x)
            continue;
        if (!any_epoch && c->m->said.epoch != o->epoch)
            c->x = PD_X_EPOCH;
        else if (was_tried(&o->need, c->m) && c->m != o->need.d)
            c->x = PD_X_TRIED;
        else if (c->m != o->need.d)
            c->x = full(&o->need, c->m, takes_kv);
        c->cost = cost(c->m, prefills, decodes);
    }
}

static bool better(uint64_t cost_a, uint64_t given_a, uint64_t cost_b, uint64_t given_b) { return cost_a < cost_b || (cost_a == cost_b && given_a < given_b); }

static bool has(const struct pd_candidate *row, uint32_t n, enum pd_excluded x)
{
    for (uint32_t i = 0; i < n; i++)
        if (row[i].x == x)
            return true;
    return false;
}

static bool any_full(const struct pd_candidate *row, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (row[i].x >= PD_X_RUNS)
            return true;
    return false;
}

/* Everybody who is there lacks what the request needs. */
static bool never_at_all(const struct pd_candidate *row, uint32_t n)
{
    bool any = false;
    for (uint32_t i = 0; i < n; i++) {
        if (row[i].x != PD_X_ADAPTER && row[i].x != PD_X_CONTEXT)
            return false;
        any = true;
    }
    return any;
}

/* ---- the policies ---- */

static void choose_one(struct pd_decision *o, enum pd_mode mode)
{
    bool moves = o->need.like >= 0;
    if (!moves && !newest(o, false, &o->epoch)) {
        o->outcome = never_at_all(o->d_row, o->n_d) ? PD_NEVER : PD_WAIT_WORKER;
        return;
    }
    narrow(o, o->d_row, o->n_d, true, true, false, moves);
    const struct pd_candidate *best = NULL;
    for (uint32_t i = 0; i < o->n_d; i++)
        if (!o->d_row[i].x && (!best || better(o->d_row[i].cost, o->d_row[i].m->given, best->cost, best->m->given)))
            best = &o->d_row[i];
    o->outcome = best ? PD_CHOSEN : any_full(o->d_row, o->n_d) ? PD_WAIT_ROOM : PD_WAIT_WORKER;
    o->mode = mode;
    o->d = best ? best->m : NULL;
}

static void choose_pair(struct pd_registry *r, struct pd_decision *o)
{
    if (!newest(o, true, &o->epoch)) {
        o->outcome = never_at_all(o->d_row, o->n_d) ? PD_NEVER : newest(o, false, &o->epoch) ? PD_NO_PREFILL : PD_WAIT_WORKER;
        return;
    }
    narrow(o, o->p_row, o->n_p, true, false, false, false);
    narrow(o, o->d_row, o->n_d, false, true, true, false);
    uint64_t best = 0, given = 0;
    for (uint32_t i = 0; i < o->n_p; i++) {
        struct pd_candidate *p = &o->p_row[i];
        const char *why = NULL, *first = NULL;
        bool fits = false;
        for (uint32_t k = 0; k < o->n_d && !p->x; k++) {
            struct pd_candidate *d = &o->d_row[k];
            if (d->x || d->m == p->m)
                continue;
            unsigned converts;
            if (pd_registry_pair(r, p->m->fp, d->m->fp, pd_conv_of_caps(d->m->said.caps, d->m->said.n_caps), &converts, &why) == PD_FP_DIFFERS) {
                first = first ? first : why ? why : "it cannot be compared";
                continue;
            }
            fits = true;
            uint64_t sum = p->cost + d->cost, g = p->m->given + d->m->given;
            if (!o->d || better(sum, g, best, given)) {
                o->p = p->m;
                o->d = d->m;
                o->converts = converts;
                best = sum;
                given = g;
            }
        }
        if (!p->x && !fits && first) {
            p->x = PD_X_FINGERPRINT;
            p->detail = first;
        }
    }
    bool p_left = has(o->p_row, o->n_p, PD_X_NO), d_left = has(o->d_row, o->n_d, PD_X_NO);
    o->mode = PD_MODE_REMOTE;
    o->outcome = o->d ? PD_CHOSEN
        : (any_full(o->p_row, o->n_p) && (d_left || any_full(o->d_row, o->n_d))) || (any_full(o->d_row, o->n_d) && p_left) ? PD_WAIT_ROOM
        : !p_left && d_left && has(o->p_row, o->n_p, PD_X_TRIED) ? PD_NO_PREFILL : PD_WAIT_WORKER;
}

void pd_decide(struct pd_registry *r, const struct pd_need *need, struct pd_decision *o)
{
    o->need = *need;
    o->outcome = PD_WAIT_WORKER;
    o->mode = PD_MODE_LOCAL;
    o->p = o->d = NULL;
    o->converts = 0;
    o->epoch = 0;
    o->n_p = o->n_d = o->left_out = 0;
    bool pair = need->policy == PD_POLICY_FIXED && !need->local && need->like < 0;
    if (pair)
        list(r, o, true, true);
    list(r, o, false, pair);
    if (pair)
        choose_pair(r, o);
    else
        choose_one(o, need->local || need->like >= 0 ? PD_MODE_LOCAL : PD_MODE_AGGREGATED);
}

/* ---- in words and as a record ---- */

const char *pd_excluded_text(const struct pd_decision *o, const struct pd_candidate *c, char *out, size_t cap)
{
    const struct pd_member *m = c->m;
    switch (c->x) {
    case PD_X_NO: snprintf(out, cap, "%s", ""); break;
    case PD_X_UNKNOWN: snprintf(out, cap, "has not registered"); break;
    case PD_X_STATE: snprintf(out, cap, "%s", m->said.state); break;
    case PD_X_UNREACHABLE: snprintf(out, cap, "not reachable"); break;
    case PD_X_SILENT: snprintf(out, cap, "no heartbeat for %.1f s", (double)(o->need.now_us - m->said_us) / 1e6); break;
    case PD_X_EPOCH: snprintf(out, cap, "epoch %" PRIu64 ", new runs go to %" PRIu64, m->said.epoch, o->epoch); break;
    case PD_X_TRIED: snprintf(out, cap, o->need.d ? "the run decodes elsewhere" : "failed this run already"); break;
    case PD_X_ADAPTER: snprintf(out, cap, "does not have adapter '%.*s'", (int)(o->need.adapter.n < 40 ? o->need.adapter.n : 40), o->need.adapter.p); break;
    case PD_X_CONTEXT: snprintf(out, cap, "capacity: a prompt of %u tokens, a context of %u", o->need.prompt_tokens, m->said.capacity.context); break;
    case PD_X_FINGERPRINT: snprintf(out, cap, "fingerprint: %s", c->detail ? c->detail : "it cannot be compared"); break;
    case PD_X_NUMERICS: snprintf(out, cap, "numerics %.40s, the run began with %.40s", m->said.numerics.p, o->need.numerics); break;
    case PD_X_RUNS: snprintf(out, cap, "capacity: %" PRIu64 " runs of %u", (uint64_t)m->own.runs + m->foreign.runs, most_runs(m)); break;
    case PD_X_BEHIND: snprintf(out, cap, "capacity: it has much to read yet"); break;
    case PD_X_BLOCKS:
        snprintf(out, cap, "capacity: %" PRIu64 " blocks of %u are taken", m->own.blocks + m->foreign.blocks, m->said.capacity.blocks);
        break;
    }
    return out;
}

int pd_decision_text(const struct pd_decision *o, struct pd_buf *out, struct pd_err *e)
{
    char why[300];
    bool any = false;
    for (int side = 0; side < 2; side++) {
        const struct pd_candidate *row = side ? o->d_row : o->p_row;
        for (uint32_t i = 0, n = side ? o->n_d : o->n_p; i < n && i < 16; i++)
            if (row[i].x) {
                int rc = pd_buf_printf(out, e, "%s%s: %s", any ? "; " : "", pd_member_name(row[i].m), pd_excluded_text(o, &row[i], why, sizeof why));
                if (rc < 0)
                    return rc;
                any = true;
            }
    }
    return any ? 0 : pd_buf_printf(out, e, "no worker is known");
}

static void pack_places(struct pd_packer *k, const struct pd_decision *o)
{
    char why[300];
    uint32_t n = 0;
    for (int pass = 0; pass < 2; pass++) {
        if (pass)
            msgpack_pack_array(&k->pk, n);
        for (int side = 0; side < 2; side++) {
            const struct pd_candidate *row = side ? o->d_row : o->p_row;
            for (uint32_t i = 0, rows = side ? o->n_d : o->n_p; i < rows && i < MAX_ROWS; i++) {
                if (!row[i].x)
                    continue;
                n += !pass;
                if (!pass)
                    continue;
                msgpack_pack_map(&k->pk, 3);
                pd_pack_text(k, "worker");
                pd_pack_text(k, pd_member_name(row[i].m));
                pd_pack_text(k, "role");
                pd_pack_text(k, row[i].m->known ? row[i].m->said.role : "unknown");
                pd_pack_text(k, "reason");
                pd_pack_text(k, pd_excluded_text(o, &row[i], why, sizeof why));
            }
        }
    }
}

int pd_decision_excluded(const struct pd_decision *o, struct pd_buf *out, struct pd_err *e)
{
    struct pd_packer k;
    pd_pack_init(&k, out, e);
    pack_places(&k, o);
    return k.rc;
}

static void pack_u64(struct pd_packer *k, const char *key, uint64_t v)
{
    pd_pack_text(k, key);
    msgpack_pack_uint64(&k->pk, v < INT64_MAX ? v : INT64_MAX);
}

static void pack_text(struct pd_packer *k, const char *key, const char *v)
{
    pd_pack_text(k, key);
    if (v)
        pd_pack_text(k, v);
    else
        msgpack_pack_nil(&k->pk);
}

static void pack_rows(struct pd_packer *k, const struct pd_decision *o, const struct pd_candidate *row, uint32_t n)
{
    char why[300];
    msgpack_pack_array(&k->pk, n < MAX_ROWS ? n : MAX_ROWS);
    for (uint32_t i = 0; i < n && i < MAX_ROWS; i++) {
        const struct pd_member *m = row[i].m;
        msgpack_pack_map(&k->pk, 10);
        pack_text(k, "worker", pd_member_name(m));
        pack_text(k, "at", m->at);
        pack_u64(k, "epoch", m->said.epoch);
        pack_u64(k, "load_age_us", m->known ? (uint64_t)(o->need.now_us - m->said_us) : 0);
        pack_u64(k, "runs", m->own.runs);
        pack_u64(k, "foreign_runs", m->foreign.runs);
        pack_u64(k, "prefill_tokens", m->own.prefill_tokens + m->foreign.prefill_tokens);
        pack_u64(k, "blocks", m->own.blocks + m->foreign.blocks);
        pack_u64(k, "cost", row[i].cost);
        pack_text(k, "excluded", row[i].x ? pd_excluded_text(o, &row[i], why, sizeof why) : NULL);
    }
}

int pd_decision_encode(const struct pd_decision *o, const struct pd_route_note *note, struct pd_buf *out, struct pd_err *e)
{
    static const char *const outcome[] = { "chosen", "wait_room", "wait_worker", "no_prefill_worker", "never" };
    struct pd_packer k;
    const struct pd_need *q = &o->need;
    bool chosen = o->outcome == PD_CHOSEN;
    size_t from = out->n;
    pd_pack_init(&k, out, e);
    msgpack_pack_map(&k.pk, 18);
    pack_text(&k, "pd", "route");
    pack_u64(&k, "v", 1);
    pack_text(&k, "run", note->run);
    pd_pack_text(&k, "op");
    pd_pack_bin(&k, note->op, 16);
    pd_pack_text(&k, "t_us");
    msgpack_pack_int64(&k.pk, note->t_us);
    pack_text(&k, "policy", pd_policy_names[q->policy]);
    pack_u64(&k, "attempt", note->attempt);
    pack_u64(&k, "resumed", note->resumed);
    pack_u64(&k, "waited_us", (uint64_t)(note->waited_us > 0 ? note->waited_us : 0));
    pd_pack_text(&k, "input");
    msgpack_pack_map(&k.pk, 4);
    pack_u64(&k, "n_tokens", q->prompt_tokens);
    pd_pack_text(&k, "exact");
    q->exact ? msgpack_pack_true(&k.pk) : msgpack_pack_false(&k.pk);
    pack_u64(&k, "max_tokens", q->max_tokens);
    pack_u64(&k, "n", q->n);
    pack_u64(&k, "epoch", o->epoch);
    pd_pack_text(&k, "p");
    pack_rows(&k, o, o->p_row, o->n_p);
    pd_pack_text(&k, "d");
    pack_rows(&k, o, o->d_row, o->n_d);
    pack_u64(&k, "left_out", o->left_out + (o->n_p > MAX_ROWS ? o->n_p - MAX_ROWS : 0) + (o->n_d > MAX_ROWS ? o->n_d - MAX_ROWS : 0));
    pd_pack_text(&k, "chosen");
    if (chosen) {
        char text[PD_CONV_MAX];
        msgpack_pack_map(&k.pk, 3 + (o->converts != 0));
        pack_text(&k, "mode", pd_mode_names[o->mode]);
        pack_text(&k, "p", o->p ? pd_member_name(o->p) : NULL);
        pack_text(&k, "d", pd_member_name(o->d));
        if (o->converts)
            pack_text(&k, "converted", pd_conv_text(o->converts, text));
    } else
        msgpack_pack_nil(&k.pk);
    pack_text(&k, "reason", note->reason ? note->reason : outcome[o->outcome]);
    pack_text(&k, "fallback", note->fallback);
    pd_pack_text(&k, "degraded");
    msgpack_pack_array(&k.pk, !q->exact);
    if (!q->exact)
        pd_pack_text(&k, "no_token_ids");
    if (k.rc)
        out->n = from;
    return k.rc;
}
