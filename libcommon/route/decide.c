#include <inttypes.h>
#include <stdio.h>
#include "../kv/convert.h"
#include "../wire/pack.h"
#include "decide_in.h"
#include "price.h"

const struct pd_rules pd_rules_usual = { .risk = 0.95, .externality = 1 };

enum { STALE_BEATS = 10 };      /* a report that is older tells nothing of a load */

static uint32_t block_size(const struct pd_member *m) { return m->said.capacity.block_size ? m->said.capacity.block_size : 1; }

struct pd_share pd_share_of(const struct pd_need *need, const struct pd_member *m, bool prefills, bool decodes)
{
    uint64_t prompt = need->prompt_tokens, out = (uint64_t)need->max_tokens * need->n, bs = block_size(m);
    return (struct pd_share){ 1, prefills ? prompt : 0, (prompt + (decodes ? out : 0) + bs - 1) / bs };
}

/* ---- who may ---- */

uint64_t pd_room_to_give(const struct pd_member *m) { return m->said.capacity.blocks / (pd_member_can_decode(m) ? 2 : 1); }

static enum pd_excluded never(const struct pd_need *q, const struct pd_member *m, bool giving)
{
    bool has = !q->adapter.n;
    for (uint32_t i = 0; i < m->said.n_adapters && !has; i++)
        has = m->said.adapters[i].n == q->adapter.n && !memcmp(m->said.adapters[i].p, q->adapter.p, q->adapter.n);
    if (!has)
        return PD_X_ADAPTER;
    if (giving && q->exact && m->said.capacity.blocks && pd_share_of(q, m, true, false).blocks > pd_room_to_give(m))
        return PD_X_CONTEXT;
    return q->exact && m->said.capacity.context && q->prompt_tokens >= m->said.capacity.context ? PD_X_CONTEXT : PD_X_NO;
}

/* Is it there at all? */
static enum pd_excluded absent(const struct pd_need *q, const struct pd_member *m)
{
    if (!m->known)
        return PD_X_UNKNOWN;
    if (!m->ready)
        return PD_X_STATE;
    if (!m->reachable)
        return PD_X_UNREACHABLE;
    int64_t age = q->now_us - m->said_us;
    if (!q->suspect_us)
        return PD_X_NO;
    return age > q->suspect_us ? PD_X_SILENT : m->said.beat_us > 0 && age > STALE_BEATS * m->said.beat_us ? PD_X_STALE : PD_X_NO;
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

static enum pd_excluded full(const struct pd_member *m)
{
    return (uint64_t)m->own.runs + m->foreign.runs >= most_runs(m) ? PD_X_RUNS : m->behind ? PD_X_BEHIND : PD_X_NO;
}

/* No room for the KV: of a decode worker that from elsewhere and what comes after it, of a prefill worker what it computes and what nobody has read yet. One that
 * is idle takes anything. */
static enum pd_excluded short_of_blocks(const struct pd_need *q, const struct pd_member *m, bool decodes)
{
    uint64_t busy = decodes ? (uint64_t)m->own.runs + m->foreign.runs : m->own.blocks + m->foreign.blocks;
    if (!busy || !m->said.capacity.blocks)
        return PD_X_NO;
    struct pd_share s = pd_share_of(q, m, false, decodes);
    return m->own.blocks + m->foreign.blocks + s.blocks > m->said.capacity.blocks ? PD_X_BLOCKS : PD_X_NO;
}

static uint64_t tokens_of(const struct pd_member *m) { return (uint64_t)m->said.capacity.blocks * block_size(m); }

/* As many prompts whose KV did not come as it may compute at a time. */
static bool too_many(const struct pd_need *q, const struct pd_member *m)
{
    return q->limit && !pd_limit_fits(q->limit, m->fallbacks, tokens_of(m), q->prompt_tokens);
}

/* Workers of one side, with what keeps each away that does not depend on the other side. split: each has one side, that of its role or the one it prefers. */
static void list(struct pd_registry *r, struct pd_decision *o, bool giving, bool split)
{
    const struct pd_need *q = &o->need;
    struct pd_candidate *row = giving ? o->p_row : o->d_row;
    uint32_t *n = giving ? &o->n_p : &o->n_d;
    for (struct pd_member *m = r->first; m; m = m->next) {
        bool here = giving ? (split ? pd_member_gives(m) : pd_member_can_give(m)) : split ? pd_member_decodes(m) : pd_member_can_decode(m);
        if (m->known ? !here : giving)
            continue;
        enum pd_excluded x = absent(q, m);
        if (*n == PD_MAX_CANDIDATES || (x && r->n > PD_MAX_CANDIDATES)) {       /* who is not there takes no row from one that is */
            o->left_out++;
            (giving ? o->rec.left_p : o->rec.left_d)[x]++;
            continue;
        }
        struct pd_candidate *c = &row[(*n)++];
        *c = (struct pd_candidate){ .m = m, .x = x };
        if (!c->x && q->paths && pd_decide_end(o, m)->spot.maintenance)
            c->x = PD_X_MAINTENANCE;
        if (!c->x)
            c->x = never(q, m, giving);
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

static void narrow(struct pd_decision *o, struct pd_candidate *row, uint32_t n, bool decodes, bool any_epoch)
{
    for (uint32_t i = 0; i < n; i++) {
        struct pd_candidate *c = &row[i];
        if (c->x)
            continue;
        if (!any_epoch && c->m->said.epoch != o->epoch)
            c->x = PD_X_EPOCH;
        else if (was_tried(&o->need, c->m) && c->m != o->need.d)
            c->x = PD_X_TRIED;
        else if (c->m != o->need.d) {
            c->x = full(c->m);
            c->x_kv = !c->x && decodes ? short_of_blocks(&o->need, c->m, true) : PD_X_NO;
            c->x = !c->x && !decodes ? short_of_blocks(&o->need, c->m, false) : c->x;
            c->x = !c->x && decodes && too_many(&o->need, c->m) ? PD_X_FALLBACKS : c->x;
        }
    }
}

/* ---- which fit together ---- */

/* Kinds of a side: what may be asked once for all workers alike. */
enum { MAX_KINS = 64 };
struct kins { uint32_t kin[MAX_KINS]; const struct pd_member *of[MAX_KINS]; int n; };

static uint32_t kin_of(const struct pd_member *m, bool decodes)
{
    return (uint32_t)(m->fp < 0 ? PD_MAX_FPS : m->fp) + (decodes ? 256 * (m->conv & 0xff) : 0);
}

static void gather(const struct pd_candidate *row, uint32_t n, bool decodes, struct kins *k)
{
    k->n = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (row[i].x)
            continue;
        uint32_t kin = kin_of(row[i].m, decodes);
        int at = 0;
        while (at < k->n && k->kin[at] != kin)
            at++;
        if (at == k->n && at < MAX_KINS) {
            k->kin[at] = kin;
            k->of[k->n++] = row[i].m;
        }
    }
}

/* What their KV needs or why it cannot go, kin by kin; a prefill worker whose KV fits nobody is excluded. */
static void compare(struct pd_registry *r, struct pd_decision *o)
{
    struct kins p, d;
    struct pd_route_rec *rec = &o->rec;
    gather(o->p_row, o->n_p, false, &p);
    gather(o->d_row, o->n_d, true, &d);
    for (int i = 0; i < p.n; i++) {
        const char *first = NULL;
        bool fits = false;
        for (int k = 0; k < d.n; k++) {
            const char *why;
            unsigned converts;
            enum pd_fp_verdict v = pd_registry_pair(r, p.of[i]->fp, d.of[k]->fp, d.of[k]->conv, &converts, &why);
            why = v == PD_FP_DIFFERS ? why ? why : "it cannot be compared" : NULL;
            fits |= !why;
            first = first ? first : why;
            if ((why || converts) && rec->n_fits < PD_ROUTE_FITS)
                o->fits[rec->n_fits++] = (struct pd_route_fit){ p.kin[i], d.kin[k], why ? 0 : converts, { why, why ? strlen(why) : 0 } };
        }
        for (uint32_t k = 0; k < o->n_p && !fits && first; k++)
            if (!o->p_row[k].x && kin_of(o->p_row[k].m, false) == p.kin[i]) {
                o->p_row[k].x = PD_X_FINGERPRINT;
                o->p_row[k].detail = first;
            }
    }
}

/* ---- rows ---- */

static uint32_t domain_of(struct pd_decision *o, struct pd_str name)
{
    struct pd_route_rec *rec = &o->rec;
    uint32_t i = 0;
    while (i < rec->n_domains && (o->domains[i].n != name.n || memcmp(o->domains[i].p, name.p, name.n)))
        i++;
    if (i < rec->n_domains)
        return i;
    if (i >= PD_DECIDE_OTHERS) {
        if (rec->n_domains == PD_ROUTE_DOMAINS)
            return PD_DECIDE_OTHERS;
        i = PD_DECIDE_OTHERS;
        name = (struct pd_str){ "others", 6 };
    }
    o->domains[rec->n_domains++] = name;
    return i;
}

static struct pd_str held_name(enum pd_held_how how)
{
    static const char *const name[] = { NULL, "guess", "events", "doubt" };
    return (struct pd_str){ name[how], how ? strlen(name[how]) : 0 };
}

/* How what those hold is known who may have it. */
static uint32_t degraded(const struct pd_decision *o)
{
    bool any = false, known = false;
    uint32_t bits = 0;
    for (int side = 0; side < 2; side++) {
        const struct pd_candidate *c = side ? o->d_row : o->p_row;
        for (uint32_t i = 0, n = side ? o->n_d : o->n_p; i < n; i++) {
            if (c[i].x)
                continue;
            any = true;
            known |= c[i].m->held.how != PD_HELD_NONE;
            bits |= c[i].m->held.how == PD_HELD_GUESS ? PD_DG_APPROXIMATE : c[i].m->held.how == PD_HELD_DOUBT ? PD_DG_IN_DOUBT : 0;
        }
    }
    return !o->need.exact ? PD_DG_NO_TOKEN_IDS : any && !known ? PD_DG_NO_INDEX : bits;
}

/* Of one that decodes, its report tells what is computed already, and this router what has come since. */
static void batch(const struct pd_member *m, const struct pd_need *q, struct pd_route_row *w)
{
    const struct pd_load *l = &m->said.load;
    int64_t more = (int64_t)m->own.runs - m->runs_then, seqs = (int64_t)l->seqs + more, waiting = (int64_t)l->waiting + more;
    uint64_t ahead = l->prefill_tokens_ahead + m->since[0] + m->since[1];
    w->queue_tokens = (ahead < m->own.prefill_tokens ? ahead : m->own.prefill_tokens) + m->foreign.prefill_tokens;
    w->queue_runs = !w->queue_tokens ? 0 : waiting < 1 ? 1 : (uint32_t)waiting;
    w->seqs = seqs < 0 ? 0 : w->seqs_most && seqs > w->seqs_most ? w->seqs_most : (uint32_t)seqs;
    w->kv_tokens = l->seqs ? l->kv_tokens / l->seqs * w->seqs : (uint64_t)w->seqs * q->prompt_tokens;
}

/* Where m is, as an index of `domains`. */
static uint32_t place_of(struct pd_decision *o, struct pd_member *m)
{
    const struct pd_need *q = &o->need;
    int at = q->paths && pd_paths_topology(q->paths) ? pd_decide_end(o, m)->spot.domain : -1;
    if (at >= 0 && o->domain_at[at])
        return o->domain_at[at] - 1u;
    uint32_t i = domain_of(o, pd_decide_domain(o, m));
    if (at >= 0)
        o->domain_at[at] = (uint16_t)(i + 1);
    return i;
}

static void row(struct pd_decision *o, const struct pd_candidate *c, bool decodes, struct pd_route_row *w)
{
    const struct pd_member *m = c->m;
    const struct pd_need *q = &o->need;
    uint32_t bs = block_size(m), blocks = (uint32_t)(((uint64_t)q->prompt_tokens + bs - 1) / bs);
    *w = (struct pd_route_row){ .worker = m->known ? m->said.worker : (struct pd_str){ m->at, m->n_at }, .at = { m->at, m->n_at }, .runs = m->own.runs, .foreign_runs = m->foreign.runs,
        .given = m->given, .x = c->x, .x_kv = c->x_kv };
    if (!m->known)
        return;
    w->epoch = m->said.epoch;
    w->domain = place_of(o, c->m);
    w->kin = kin_of(m, decodes);
    w->load_age_us = q->now_us > m->said_us ? q->now_us - m->said_us : 0;
    w->runs_most = most_runs(m);
    w->seqs_most = m->said.capacity.max_seqs;
    w->queue_tokens = m->own.prefill_tokens + m->foreign.prefill_tokens;
    w->queue_runs = m->own.runs + m->foreign.runs;
    if (pd_member_can_decode(m))
        batch(m, q, w);
    w->blocks = m->own.blocks + m->foreign.blocks;
    w->blocks_most = m->said.capacity.blocks;
    w->hit_blocks = m->held.blocks < blocks ? m->held.blocks : blocks;
    w->miss_blocks = blocks - w->hit_blocks;
    w->miss_tokens = (uint64_t)w->hit_blocks * bs < q->prompt_tokens ? q->prompt_tokens - w->hit_blocks * bs : 0;
    w->index = held_name(m->held.how);
    w->index_age_us = m->held.age_us;
}

static void rows(struct pd_decision *o)
{
    for (uint32_t i = 0; i < o->n_p; i++)
        row(o, &o->p_row[i], false, &o->p_rows[i]);
    for (uint32_t i = 0; i < o->n_d; i++)
        row(o, &o->d_row[i], true, &o->d_rows[i]);
    o->rec.n_p = o->n_p;
    o->rec.n_d = o->n_d;
}

/* All but what the choice makes of it. */
static void begin(struct pd_decision *o, const struct pd_need *q)
{
    const struct pd_rules *rules = q->rules ? q->rules : &pd_rules_usual;
    struct pd_route_rec *rec = &o->rec;
    o->need = *q;
    o->mode = PD_MODE_LOCAL;
    o->p = o->d = NULL;
    o->epoch = 0;
    o->n_p = o->n_d = o->left_out = 0;
    memset(o->domain_at, 0, sizeof o->domain_at);
    memset(rec, 0, offsetof(struct pd_route_rec, pair));
    rec->p = o->p_rows;
    rec->d = o->d_rows;
    rec->fits = o->fits;
    rec->paths = o->paths;
    rec->domains = o->domains;
    snprintf(rec->policy, sizeof rec->policy, q->policy_n ? "%s:%u" : "%s", pd_policy_names[q->policy], q->policy_n);
    snprintf(rec->shadow.policy, sizeof rec->shadow.policy, "%s", rules->shadow);
    rec->seed = q->seed;
    rec->quiet = q->quiet;
    rec->temperature = rules->temperature;
    rec->risk = rules->risk;
    rec->externality = rules->externality;
    rec->input = (struct pd_route_input){ .n_tokens = q->prompt_tokens, .exact = q->exact, .max_tokens = q->max_tokens, .n = q->n, .adapter = q->adapter,
        .deadline_us = q->deadline_us, .slo = q->slo, .local = q->local, .moves = q->like >= 0, .d_given = q->d != NULL, .early = q->early };
    rec->versions.index = q->index;
    if (q->late)
        rec->late = *q->late;
    if ((rec->input.has_digest = q->digest != NULL))
        memcpy(rec->input.digest, q->digest, sizeof rec->input.digest);
}

static void choose(struct pd_decision *o, bool heed)
{
    struct pd_err e;
    pd_decide_paths(o, heed);
    if (o->need.learn && !o->need.paths)
        pd_price_ways(o->need.learn, o);
    if (pd_choose(&o->rec, &e) < 0) {           /* a policy without a name: nobody made one */
        o->rec.chosen = (struct pd_route_chosen){ .any = false, .p = -1, .d = -1 };
        o->rec.outcome = PD_WAIT_WORKER;
    }
}

/* Can anybody give KV to anybody, by this record? */
static bool gives(const struct pd_route_rec *r)
{
    for (uint32_t i = 0; i < r->n_pairs; i++)
        if (r->pair[i].p >= 0 && !r->pair[i].x)
            return true;
    return false;
}

void pd_decide(struct pd_registry *r, const struct pd_need *need, struct pd_decision *o)
{
    struct pd_route_rec *rec = &o->rec;
    bool moves = need->like >= 0, alone = need->local || moves, split = need->policy == PD_POLICY_FIXED && !alone;
    begin(o, need);
    if (!alone)
        list(r, o, true, split);
    list(r, o, false, split);
    bool any = (!alone && need->policy != PD_POLICY_AGGREGATED && newest(o, true, &o->epoch)) || newest(o, false, &o->epoch);
    if (any || moves) {
        narrow(o, o->p_row, o->n_p, false, false);
        narrow(o, o->d_row, o->n_d, true, moves);
        compare(r, o);
    }
    rec->epoch = o->epoch;
    rec->versions.registry = r->version;
    for (uint32_t i = 0; i < o->n_d && !rec->input.block_size; i++)
        rec->input.block_size = o->d_row[i].x ? 0 : block_size(o->d_row[i].m);
    rows(o);
    rec->degraded = degraded(o);
    if (need->learn)
        pd_price(need->learn, o);
    bool prefers = need->paths && pd_paths_prefer(need->paths) && !alone;
    choose(o, prefers);
    if (prefers && !gives(rec))         /* then all paths are looked at: who is chosen here with near ones to be had is better than any that is far */
        choose(o, false);
    o->outcome = rec->outcome;
    o->mode = rec->chosen.any ? rec->chosen.mode : alone ? PD_MODE_LOCAL : need->policy == PD_POLICY_AGGREGATED ? PD_MODE_AGGREGATED : PD_MODE_REMOTE;
    o->p = rec->chosen.p < 0 ? NULL : o->p_row[rec->chosen.p].m;
    o->d = rec->chosen.d < 0 ? NULL : o->d_row[rec->chosen.d].m;
    int32_t fit = o->p ? pd_route_fit_of(rec, o->p_rows[rec->chosen.p].kin, o->d_rows[rec->chosen.d].kin) : -1;
    o->converts = fit < 0 ? 0 : o->fits[fit].converts;
}

/* ---- in words and as a record ---- */

const char *pd_excluded_text(const struct pd_decision *o, const struct pd_candidate *c, char *out, size_t cap)
{
    const struct pd_member *m = c->m;
    switch (c->x ? c->x : c->x_kv) {
    case PD_X_UNKNOWN: snprintf(out, cap, "has not registered"); break;
    case PD_X_STATE: snprintf(out, cap, "%s", m->said.state); break;
    case PD_X_UNREACHABLE: snprintf(out, cap, "not reachable"); break;
    case PD_X_SILENT: snprintf(out, cap, "no heartbeat for %.1f s", (double)(o->need.now_us - m->said_us) / 1e6); break;
    case PD_X_EPOCH: snprintf(out, cap, "epoch %" PRIu64 ", new runs go to %" PRIu64, m->said.epoch, o->epoch); break;
    case PD_X_TRIED: snprintf(out, cap, o->need.d ? "the run decodes elsewhere" : "failed this run already"); break;
    case PD_X_ADAPTER: snprintf(out, cap, "does not have adapter '%.*s'", (int)(o->need.adapter.n < 40 ? o->need.adapter.n : 40), o->need.adapter.p); break;
    case PD_X_CONTEXT:
        if (m->said.capacity.context && o->need.prompt_tokens >= m->said.capacity.context)
            snprintf(out, cap, "capacity: a prompt of %u tokens, a context of %u", o->need.prompt_tokens, m->said.capacity.context);
        else
            snprintf(out, cap, "capacity: a prompt of %" PRIu64 " blocks, room to compute %" PRIu64, pd_share_of(&o->need, m, true, false).blocks, pd_room_to_give(m));
        break;
    case PD_X_STALE: snprintf(out, cap, "stale load %.1fs", (double)(o->need.now_us - m->said_us) / 1e6); break;
    case PD_X_FINGERPRINT: snprintf(out, cap, "fingerprint: %s", c->detail ? c->detail : "it cannot be compared"); break;
    case PD_X_NUMERICS: snprintf(out, cap, "numerics %.40s, the run began with %.40s", m->said.numerics.p, o->need.numerics); break;
    case PD_X_RUNS: snprintf(out, cap, "capacity: %" PRIu64 " runs of %u", (uint64_t)m->own.runs + m->foreign.runs, most_runs(m)); break;
    case PD_X_BEHIND: snprintf(out, cap, "capacity: it has much to read yet"); break;
    case PD_X_MAINTENANCE: snprintf(out, cap, "maintenance"); break;
    case PD_X_HOLD:
    case PD_X_DOMAIN:
    case PD_X_PATH: snprintf(out, cap, "%s", c->detail ? c->detail : pd_excluded_names[c->x]); break;
    case PD_X_FALLBACKS:
        snprintf(out, cap, "fallbacks: %" PRIu64 " tokens of %" PRIu64 " are computed", m->fallbacks.tokens, pd_limit_most(o->need.limit, tokens_of(m)));
        break;
    case PD_X_BLOCKS:
        snprintf(out, cap, "capacity: %" PRIu64 " blocks of %u are taken", m->own.blocks + m->foreign.blocks, m->said.capacity.blocks);
        break;
    default: snprintf(out, cap, "%s", c->x ? pd_excluded_names[c->x] : ""); break;
    }
    return out;
}

/* Is this a reason that nobody has it? Room for KV matters only to who needs it. */
static bool told(const struct pd_decision *o, int side, uint32_t i)
{
    const struct pd_candidate *c = side ? &o->d_row[i] : &o->p_row[i];
    return side ? c->x || (c->x_kv && o->need.policy == PD_POLICY_FIXED && !o->need.local) : c->x && o->need.policy != PD_POLICY_AGGREGATED;
}

int pd_decision_text(const struct pd_decision *o, struct pd_buf *out, struct pd_err *e)
{
    char why[300];
    bool any = false;
    for (int side = 0; side < 2; side++) {
        const struct pd_candidate *at = side ? o->d_row : o->p_row;
        for (uint32_t i = 0, n = side ? o->n_d : o->n_p; i < n && i < 16; i++)
            if (told(o, side, i)) {
                int rc = pd_buf_printf(out, e, "%s%s: %s", any ? "; " : "", pd_member_name(at[i].m), pd_excluded_text(o, &at[i], why, sizeof why));
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
            const struct pd_candidate *at = side ? o->d_row : o->p_row;
            for (uint32_t i = 0, all = side ? o->n_d : o->n_p; i < all && i < PD_ROUTE_ROWS; i++) {
                if (!told(o, side, i))
                    continue;
                n += !pass;
                if (!pass)
                    continue;
                msgpack_pack_map(&k->pk, 3);
                pd_pack_text(k, "worker");
                pd_pack_text(k, pd_member_name(at[i].m));
                pd_pack_text(k, "role");
                pd_pack_text(k, at[i].m->known ? at[i].m->said.role : "unknown");
                pd_pack_text(k, "reason");
                pd_pack_text(k, pd_excluded_text(o, &at[i], why, sizeof why));
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

static int put_words(const struct pd_decision *o, const struct pd_candidate *c, struct pd_route_row *w, uint32_t n, struct pd_arena *a, struct pd_err *e)
{
    char why[300];
    for (uint32_t i = 0; i < n; i++) {
        w[i].excluded = (struct pd_str){ NULL, 0 };
        if (!w[i].x && !w[i].x_kv)
            continue;
        pd_excluded_text(o, &c[i], why, sizeof why);
        if (!(w[i].excluded.p = pd_arena_dup(a, why, strlen(why), e)))
            return PD_ENOMEM;
        w[i].excluded.n = strlen(why);
    }
    return 0;
}

int pd_decision_encode(struct pd_decision *o, const struct pd_route_note *note, struct pd_buf *out, struct pd_err *e)
{
    struct pd_route_rec *r = &o->rec;
    struct pd_arena words = { 0 };
    snprintf(r->run, sizeof r->run, "%s", note->run);
    memcpy(r->op, note->op, sizeof r->op);
    r->t_us = note->t_us;
    r->waited_us = note->waited_us > 0 ? note->waited_us : 0;
    r->attempt = note->attempt;
    r->resumed = note->resumed;
    r->cause = (struct pd_str){ note->cause, note->cause ? strlen(note->cause) : 0 };
    r->fallback = (struct pd_str){ note->fallback, note->fallback ? strlen(note->fallback) : 0 };
    int rc = put_words(o, o->p_row, o->p_rows, o->n_p, &words, e);
    rc = rc ? rc : put_words(o, o->d_row, o->d_rows, o->n_d, &words, e);
    rc = rc ? rc : pd_route_encode(r, out, e);
    pd_arena_free(&words);
    return rc;
}
