#include "choose_in.h"
#include "late.h"
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include "../base/hash.h"
#include "../kv/convert.h"

const char *const pd_policy_names[] = { "aggregated", "fixed", "conditional", "threshold", "dynamo", "llmd", "random", NULL };
static const uint32_t usual[] = { [PD_POLICY_THRESHOLD] = 1000, [PD_POLICY_DYNAMO] = 2048, [PD_POLICY_LLMD] = 16, [PD_POLICY_RANDOM] = 0 };
enum { UNIT = 1000 };

int pd_policy_parse(const char *text, struct pd_policy_spec *out, struct pd_err *e)
{
    size_t n = strcspn(text, ":");
    for (int i = 0; pd_policy_names[i]; i++) {
        if (strlen(pd_policy_names[i]) != n || strncmp(text, pd_policy_names[i], n))
            continue;
        *out = (struct pd_policy_spec){ (enum pd_policy)i, usual[i] };
        if (!text[n])
            return 0;
        char *end;
        unsigned long v = text[n + 1] >= '0' && text[n + 1] <= '9' ? strtoul(text + n + 1, &end, 10) : 0;
        if (!usual[i] || v < 1 || v > 1000000000 || *end)
            return pd_fail(e, PD_EUSAGE, usual[i] ? "'%.40s' is no policy: after the colon goes a number of tokens, 1 or more (example: threshold:512)"
                           : "'%.40s' is no policy: this one takes no number", text);
        out->n = (uint32_t)v;
        return 0;
    }
    return pd_fail(e, PD_EUSAGE, "'%.40s' is not known (aggregated, fixed, conditional, threshold:N, dynamo, llmd or random)", text);
}

/* ---- keys: what the best of a side are found by ---- */

struct ranked { int64_t key; uint64_t given; int32_t i, by; };

static uint32_t block_size(const struct pd_route_rec *r) { return r->input.block_size ? r->input.block_size : 1; }
static int64_t blocks_of(const struct pd_route_rec *r, uint64_t tokens) { return (small(tokens) + block_size(r) - 1) / block_size(r); }

static uint64_t draw(uint64_t seed, uint64_t i)
{
    uint64_t z = seed + (i + 1) * 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

/* Blocks. */
static int64_t load(const struct choice *c, int side, const struct pd_route_row *w)
{
    const struct pd_route_rec *r = c->r;
    int64_t ahead = blocks_of(r, w->queue_tokens), run = small(w->blocks), all = (int64_t)w->hit_blocks + w->miss_blocks, v;
    if (c->policy.kind == PD_POLICY_DYNAMO) {
        v = (side ? run : ahead) + all - w->hit_blocks;
        return v > 0 ? v : 0;
    }
    if (side == 0)
        return ahead + w->miss_blocks;
    return c->local ? run + ahead + w->miss_blocks : run;
}

/* llm-d's scorers: 2 x the share of the prompt that it holds, 1 x how short its queue is among all. */
static int64_t scored(const struct choice *c, int side, const struct pd_route_row *w)
{
    int64_t all = (int64_t)w->hit_blocks + w->miss_blocks, span = (int64_t)c->queue_hi[side] - c->queue_lo[side];
    int64_t prefix = all ? UNIT * (int64_t)w->hit_blocks / all : 0, queue = span ? UNIT * ((int64_t)c->queue_hi[side] - w->queue_runs) / span : UNIT;
    return 3 * UNIT - 2 * prefix - queue;
}

static int64_t priced(const struct choice *c, const struct pd_spread *s, int n, double others)
{
    int64_t v = pd_us_of(c->r->externality * others);
    for (int i = 0; i < n; i++)
        v += pd_spread_at(s[i], c->scale);
    return v;
}

/* What a row costs by itself. remote: of D, when KV comes from elsewhere. */
static int64_t key(const struct choice *c, int side, int32_t i, bool remote)
{
    const struct pd_route_row *w = row_of(c, side, i);
    double out = c->r->input.out_p50 ? c->r->input.out_p50 - 1.0 : 0;
    switch (c->policy.kind) {
    case PD_POLICY_RANDOM: return (int64_t)(pd_xxh3(w->at.p ? w->at.p : "", w->at.n, c->r->seed + (uint64_t)side) >> 1);
    case PD_POLICY_LLMD: return scored(c, side, w);
    case PD_POLICY_CONDITIONAL:
        if (side == 0)
            return priced(c, (struct pd_spread[]){ w->queue, w->prefill }, 2, ((double)w->queue_runs + w->seqs) * (double)w->prefill.p50);
        if (remote)             /* less is moved to who holds more */
            return priced(c, (struct pd_spread[]){ w->slot, pd_spread_times(w->tpot, out) }, 2, (double)w->seqs * (double)w->itl_us * out) + w->miss_tokens;
        return priced(c, (struct pd_spread[]){ w->slot, w->queue, w->prefill, w->interference, pd_spread_times(w->tpot, out) }, 5,
                      ((double)w->queue_runs + w->seqs) * (double)w->prefill.p50 + (double)w->seqs * (double)w->itl_us * out);
    default: return load(c, side, w);
    }
}

static bool before(const struct ranked *a, const struct ranked *b)
{
    return a->key != b->key ? a->key < b->key : a->given != b->given ? a->given < b->given : a->i < b->i;
}

static int insert(struct ranked *top, int n, int most, struct ranked x)
{
    int at = n < most ? n : most;
    if (n == most && !before(&x, &top[most - 1]))
        return n;
    at = n < most ? n : most - 1;
    for (; at > 0 && before(&x, &top[at - 1]); at--)
        top[at] = top[at - 1];
    top[at] = x;
    return n < most ? n + 1 : most;
}

static void take(struct choice *c, int side, int32_t i)
{
    for (int k = 0; k < c->n[side]; k++)
        if (c->best[side][k] == i)
            return;
    if (c->n[side] < PD_ROUTE_BEST) {
        c->best[side][c->n[side]++] = i;
        (side ? c->r->d : c->r->p)[i].keep = true;
    }
}

static void find_d(struct choice *c)
{
    struct ranked top[2][PD_ROUTE_BEST];
    int n[2] = { 0, 0 };
    bool both = c->policy.kind == PD_POLICY_CONDITIONAL && c->local && c->remote, far_too = c->remote && (both || !c->local);
    c->n[1] = 0;
    for (uint32_t i = 0; i < c->r->n_d; i++) {
        int32_t d = (int32_t)i, by = far_too && may(c, 1, d, true) ? pd_reach_giver(c, d) : -1;
        for (int k = 0; k < 2; k++)             /* conditional: the best alone, and the best with KV from elsewhere; else one order for both */
            if (k ? by >= 0 : may(c, 1, d, false) && c->local)
                n[k] = insert(top[k], n[k], PD_ROUTE_BEST, (struct ranked){ key(c, 1, d, k) + (k ? pd_reach_adds_to(c, by, d) : 0), c->r->d[i].given, d, by });
    }
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < n[k] && (k || !both || i < PD_ROUTE_BEST / 2); i++) {
            take(c, 1, top[k][i].i);
            if (k)                      /* a replay needs it too */
                c->r->p[top[k][i].by].keep = true;
        }
    for (int i = 0; i < n[0]; i++)
        take(c, 1, top[0][i].i);
}

/* The D that `random` drew: the first by its chance. */
static int32_t drawn_d(const struct choice *c) { return c->n[1] ? c->best[1][0] : -1; }

static bool gives_to(const struct choice *c, int32_t p, int32_t d)
{
    return d >= 0 && may(c, 0, p, true) && may(c, 1, d, true) && pd_reach_move(c, p, d, c->r->d[d].miss_tokens) >= 0;
}

static void find_p(struct choice *c)
{
    struct ranked top[PD_ROUTE_BEST];
    int n = 0;
    c->n[0] = 0;
    for (uint32_t i = 0; c->remote && i < c->r->n_p; i++) {
        int32_t p = (int32_t)i, to = !may(c, 0, p, true) ? -1 : c->policy.kind != PD_POLICY_RANDOM ? pd_reach_taker(c, p) : gives_to(c, p, drawn_d(c)) ? drawn_d(c) : -1;
        if (to >= 0)
            n = insert(top, n, PD_ROUTE_BEST, (struct ranked){ key(c, 0, p, true) + pd_reach_adds(c, p, to), c->r->p[i].given, p, to });
    }
    for (int i = 0; i < n; i++)
        take(c, 0, top[i].i);
}

/* ---- ways ---- */

static void add(struct choice *c, int32_t p, int32_t d)
{
    struct pd_route_rec *r = c->r;
    struct pd_route_pair *o = &r->pair[r->n_pairs];
    const struct pd_route_row *w = &r->d[d];
    if (p >= 0) {
        const struct pd_route_row *g = &r->p[p];
        int32_t fit = pd_route_fit_of(r, g->kin, w->kin);
        if (w->x_kv || (fit >= 0 && r->fits[fit].why.p) || same(g, w))
            return;
    }
    pd_pair_cost(r, p, d, p < 0 ? -1 : pd_reach_path(c, p, d), o);
    o->score = PD_SCORE_NONE;
    r->n_pairs++;
}

static void pair_up(struct choice *c)
{
    c->r->n_pairs = 0;
    for (int i = 0; c->local && i < c->n[1]; i++)
        add(c, -1, c->best[1][i]);
    for (int i = 0; i < c->n[0]; i++)
        for (int k = 0; k < c->n[1]; k++)
            add(c, c->best[0][i], c->best[1][k]);
}

/* The one D of a rule, and whether it computes the prompt itself. */
static int32_t the_d(const struct choice *c)
{
    struct ranked top;
    int n = 0;
    for (int k = 0; k < c->n[1]; k++)
        n = insert(&top, n, 1, (struct ranked){ key(c, 1, c->best[1][k], false), c->r->d[c->best[1][k]].given, c->best[1][k], -1 });
    return n ? top.i : -1;
}

static bool rule_says_local(const struct choice *c, const struct pd_route_row *d)
{
    uint64_t n = c->r->input.n_tokens, lacks = d->miss_tokens, at = c->policy.n;
    switch (c->policy.kind) {
    case PD_POLICY_THRESHOLD: return lacks <= at;
    case PD_POLICY_DYNAMO: return lacks < at && 10 * lacks < 7 * (n ? n : 1);
    default: return n < at || lacks < at;
    }
}

static bool is_rule(enum pd_policy k) { return k == PD_POLICY_THRESHOLD || k == PD_POLICY_DYNAMO || k == PD_POLICY_LLMD; }

static void score(struct choice *c)
{
    struct pd_route_rec *r = c->r;
    bool rule = is_rule(c->policy.kind) && c->local && c->remote, chance = c->policy.kind == PD_POLICY_RANDOM, here = false;
    int32_t d = rule ? the_d(c) : chance ? drawn_d(c) : -1;
    if (rule && d >= 0) {
        here = rule_says_local(c, &r->d[d]);
        for (bool any = false; !here; here = !any) {
            for (uint32_t i = 0; i < r->n_pairs; i++)
                any |= r->pair[i].d == d && r->pair[i].p >= 0 && !r->pair[i].x;
            if (any)
                break;
        }
    }
    for (uint32_t i = 0; i < r->n_pairs; i++) {
        struct pd_route_pair *o = &r->pair[i];
        if (o->x || (rule && (o->d != d || (o->p < 0) != here)) || (chance && o->d != d))
            continue;
        if (chance)
            o->score = 0;
        else if (c->policy.kind == PD_POLICY_CONDITIONAL)
            o->score = pd_spread_at(o->completion, c->scale) + pd_pair_others(r, o);
        else if (rule)
            o->score = o->p < 0 ? key(c, 1, o->d, false) : key(c, 0, o->p, true);
        else
            o->score = (o->p < 0 ? 0 : key(c, 0, o->p, true) + pd_reach_adds(c, o->p, o->d)) + key(c, 1, o->d, o->p >= 0);
    }
}

static struct ranked rank_of(const struct choice *c, const struct pd_route_pair *o, int32_t i)
{
    const struct pd_route_rec *r = c->r;
    return (struct ranked){ o->score, small(o->p < 0 ? 0 : r->p[o->p].given) + small(r->d[o->d].given), i, -1 };
}

static int32_t least(const struct choice *c)
{
    int32_t best = -1;
    for (uint32_t i = 0; i < c->r->n_pairs; i++) {
        const struct pd_route_pair *o = &c->r->pair[i], *b = best < 0 ? NULL : &c->r->pair[best];
        if (o->score == PD_SCORE_NONE)
            continue;
        struct ranked x = rank_of(c, o, (int32_t)i), y = b ? rank_of(c, b, best) : x;
        bool timed = c->policy.kind == PD_POLICY_CONDITIONAL;
        if (!b || o->score < b->score || (o->score == b->score && timed && o->completion.p50 < b->completion.p50) ||
            (o->score == b->score && (!timed || o->completion.p50 == b->completion.p50) && before(&x, &y)))
            best = (int32_t)i;
    }
    return best;
}

/* exp(-x), x >= 0, of sums and products alone: the same on every machine. */
static double weight(double x)
{
    int halved = 0;
    if (x > 40)
        return 0;
    for (; x > 1.0 / 64; halved++)
        x /= 2;
    double e = 1 - x + x * x / 2 - x * x * x / 6 + x * x * x * x / 24;
    for (; halved; halved--)
        e *= e;
    return e;
}

/* Of `random` the rows were drawn before the ways: how probable it was that this way's were, also among those that a record has no rows of any more. */
static double was_drawn(const struct choice *c, const struct pd_route_pair *o)
{
    struct pd_route_rec *r = c->r;
    uint64_t of[2] = { r->lots_p, r->lots_d };
    if (c->policy.kind != PD_POLICY_RANDOM)
        return 1;
    for (uint32_t i = 0; i < r->n_d; i++)
        of[1] += r->d[i].drawn = may(c, 1, (int32_t)i, false);
    for (uint32_t i = 0; o->p >= 0 && i < r->n_p; i++)
        of[0] += r->p[i].drawn = gives_to(c, (int32_t)i, o->d);
    return (o->p < 0 ? 1 : (double)c->n[0] / (double)of[0]) / (double)of[1];
}

/* Shares of all that have a score, and the one that is drawn. */
static int32_t draw_one(struct choice *c, int32_t best)
{
    struct pd_route_rec *r = c->r;
    bool any = c->policy.kind == PD_POLICY_RANDOM;
    double sum = 0, at = 0, unit = r->temperature * (double)(r->pair[best].score > 1 ? r->pair[best].score : 1);
    int32_t got = best;
    for (uint32_t i = 0; i < r->n_pairs; i++) {
        struct pd_route_pair *o = &r->pair[i];
        o->share = o->score == PD_SCORE_NONE ? 0 : any ? 1 : r->temperature > 0 ? weight((double)(o->score - r->pair[best].score) / unit) : (int32_t)i == best;
        sum += o->share;
    }
    double u = (double)(draw(r->seed, 0) >> 11) / 9007199254740992.0 * sum;
    bool found = !any && r->temperature <= 0;
    for (uint32_t i = 0; i < r->n_pairs; i++) {
        struct pd_route_pair *o = &r->pair[i];
        at += o->share;
        if (!found && o->share > 0 && u < at) {
            found = true;
            got = (int32_t)i;
        }
        o->share /= sum;
    }
    return got;
}

/* ---- nobody ---- */

static uint32_t count(const struct pd_route_rec *r, int side, bool (*of)(uint64_t x, bool d_given))
{
    uint32_t n = 0;
    const uint32_t *left = side ? r->left_d : r->left_p;
    for (uint32_t i = 0; i < (side ? r->n_d : r->n_p); i++)
        n += of(side ? r->d[i].x : r->p[i].x, r->input.d_given);
    for (uint32_t x = 0; x < PD_X_KINDS; x++)
        n += left[x] && of(x, r->input.d_given) ? left[x] : 0;
    return n;
}

static bool is_any(uint64_t x, bool d_given) { return true; }
static bool is_free(uint64_t x, bool d_given) { return !x; }
static bool is_full(uint64_t x, bool d_given) { return x >= PD_X_RUNS; }
static bool is_tried(uint64_t x, bool d_given) { return x == PD_X_TRIED; }
static bool is_never(uint64_t x, bool d_given) { return x == PD_X_ADAPTER || x == PD_X_CONTEXT; }
static bool is_absent(uint64_t x, bool d_given)
{
    return (x >= PD_X_UNKNOWN && x <= PD_X_EPOCH) || (x >= PD_X_STALE && x <= PD_X_HOLD) || x == PD_X_PATH;
}
static bool is_there(uint64_t x, bool d_given) { return !x || x == PD_X_EPOCH || x >= PD_X_RUNS || (x == PD_X_TRIED && !d_given); }

static bool kv_full(const struct pd_route_rec *r)
{
    for (uint32_t i = 0; i < r->n_d; i++)
        if (!r->d[i].x && r->d[i].x_kv)
            return true;
    return false;
}

static bool d_free(const struct pd_route_rec *r)
{
    for (uint32_t i = 0; i < r->n_d; i++)
        if (!r->d[i].x && !r->d[i].x_kv)
            return true;
    return r->left_d[PD_X_NO] > 0;
}

static enum pd_outcome nobody(const struct choice *c)
{
    const struct pd_route_rec *r = c->r;
    uint32_t d_any = count(r, 1, is_any), p_full = count(r, 0, is_full), d_full = count(r, 1, is_full) + kv_full(r);
    bool p_free = count(r, 0, is_free) > 0, never = d_any && count(r, 1, is_never) == d_any;
    if (c->local)
        return d_full ? PD_WAIT_ROOM : never ? PD_NEVER : PD_WAIT_WORKER;
    if (never)
        return PD_NEVER;
    if (count(r, 0, is_absent) + count(r, 0, is_never) == count(r, 0, is_any))
        return count(r, 1, is_there) ? PD_NO_PREFILL : PD_WAIT_WORKER;
    if ((p_full && (d_free(r) || d_full)) || (d_full && p_free))
        return PD_WAIT_ROOM;
    return !p_free && d_free(r) && count(r, 0, is_tried) ? PD_NO_PREFILL : PD_WAIT_WORKER;
}

/* ---- in words ---- */

static const char *name(struct pd_str s, char out[64])
{
    size_t n = s.n < 60 ? s.n : 60;
    while (n < s.n && n && (s.p[n] & 0xc0) == 0x80)     /* not through a character */
        n--;
    snprintf(out, 64, "%.*s", (int)n, s.p ? s.p : "");
    return out;
}

static double ms(int64_t us) { return (double)us / 1e3; }

/* The best of the other mode, by what is compared. */
static const struct pd_route_pair *other_way(const struct choice *c, const struct pd_route_pair *o)
{
    const struct pd_route_pair *best = NULL;
    for (uint32_t i = 0; i < c->r->n_pairs; i++) {
        const struct pd_route_pair *x = &c->r->pair[i];
        if (x->score != PD_SCORE_NONE && (x->p < 0) != (o->p < 0) && (!best || x->score < best->score))
            best = x;
    }
    return best;
}

static uint32_t ways(const struct pd_route_rec *r)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->n_pairs; i++)
        n += r->pair[i].score != PD_SCORE_NONE;
    return n;
}

static size_t put(char *out, size_t cap, size_t at, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
static size_t put(char *out, size_t cap, size_t at, const char *fmt, ...)
{
    va_list va;
    va_start(va, fmt);
    int n = vsnprintf(out + at, cap - at, fmt, va);
    va_end(va);
    return n < 0 ? at : at + (size_t)n < cap ? at + (size_t)n : cap - 1;
}

static void words(const struct choice *c, const struct pd_route_pair *o)
{
    struct pd_route_rec *r = c->r;
    const struct pd_route_row *d = &r->d[o->d], *p = o->p < 0 ? NULL : &r->p[o->p];
    char a[64], b[64];
    size_t cap = sizeof r->reason, at = 0;
    const struct pd_route_pair *x = other_way(c, o);
    at = put(r->reason, cap, at, p ? "remote, %s to %s: " : "%s%s: ", p ? name(p->worker, a) : r->chosen.mode == PD_MODE_LOCAL ? "local, " : "", name(d->worker, b));
    if (c->policy.kind == PD_POLICY_CONDITIONAL) {
        at = put(r->reason, cap, at, "%.1f ms (%.1f at P50, others wait %.1f: ", ms(o->score), ms(o->completion.p50), ms(pd_pair_others(r, o)));
        if (p)
            at = put(r->reason, cap, at, "queue %.1f, prefill %.1f, transfer %.1f less %.1f", ms(p->queue.p50), ms(p->prefill.p50), ms(o->transfer.p50), ms(o->overlap_us));
        else
            at = put(r->reason, cap, at, "queue %.1f, prefill %.1f, interference %.1f", ms(d->queue.p50), ms(d->prefill.p50), ms(d->interference.p50));
        at = put(r->reason, cap, at, ", decode %.1f)", ms(o->completion.p50 - o->ttft.p50));
        put(r->reason, cap, at, x ? "; best %s %.1f ms" : "; %s is not possible", x && x->p < 0 ? "local" : x ? "remote" : p ? "local" : "remote", x ? ms(x->score) : 0);
    } else if (is_rule(c->policy.kind) && c->local && c->remote) {
        bool here = rule_says_local(c, d);
        at = put(r->reason, cap, at, "it lacks %u of %u tokens, the rule (%u) says %s", d->miss_tokens, r->input.n_tokens, c->policy.n, here ? "local" : "remote");
        if (!here && !p)
            put(r->reason, cap, at, ", which is not possible");
    } else if (c->policy.kind == PD_POLICY_RANDOM)
        put(r->reason, cap, at, "one of %u ways of this worker's", ways(r));
    else
        put(r->reason, cap, at, "the least load, %" PRId64 " blocks", o->score);
}

/* ---- the whole ---- */

static void spread_of_queues(struct choice *c)
{
    for (int side = 0; side < 2; side++) {
        int32_t lo = -1, hi = -1;
        struct pd_route_row *row = side ? c->r->d : c->r->p;
        for (uint32_t i = 0; i < (side ? c->r->n_d : c->r->n_p); i++) {
            if (row[i].x)
                continue;
            lo = lo < 0 || row[i].queue_runs < row[lo].queue_runs ? (int32_t)i : lo;
            hi = hi < 0 || row[i].queue_runs > row[hi].queue_runs ? (int32_t)i : hi;
        }
        c->queue_lo[side] = lo < 0 ? 0 : row[lo].queue_runs;
        c->queue_hi[side] = hi < 0 ? 0 : row[hi].queue_runs;
        if (lo >= 0)            /* a replay needs them too */
            row[lo].keep = row[hi].keep = true;
    }
}

/* The way that is best, an index of r->pair; -1: none. */
static int32_t find_way(struct choice *c)
{
    if (c->remote) {
        pd_reach_survey(c);
        pd_reach_muster(c, 0);
        pd_reach_muster(c, 1);
    }
    find_d(c);
    find_p(c);
    pair_up(c);
    score(c);
    return least(c);
}

static void choose_by(struct choice *c, struct pd_route_chosen *out, int64_t *what)
{
    struct pd_route_rec *r = c->r;
    bool alone = r->input.local || r->input.moves;
    struct ground ground;       /* large, and filled as far as it is asked for */
    c->g = &ground;
    c->remote = !alone && c->policy.kind != PD_POLICY_AGGREGATED;
    c->local = alone || c->policy.kind != PD_POLICY_FIXED;
    if (c->policy.kind == PD_POLICY_LLMD)
        spread_of_queues(c);
    int32_t best = find_way(c), got = best < 0 ? -1 : draw_one(c, best);
    *out = (struct pd_route_chosen){ .any = got >= 0, .p = -1, .d = -1, .pair = got };
    *what = 0;
    if (got < 0)
        return;
    const struct pd_route_pair *o = &r->pair[got];
    out->mode = o->p >= 0 ? PD_MODE_REMOTE : !alone && c->policy.kind == PD_POLICY_AGGREGATED ? PD_MODE_AGGREGATED : PD_MODE_LOCAL;
    out->p = o->p;
    out->d = o->d;
    *what = o->score;
    int32_t fit = o->p < 0 ? -1 : pd_route_fit_of(r, r->p[o->p].kin, r->d[o->d].kin);
    if (fit >= 0 && r->fits[fit].converts) {
        char text[PD_CONV_MAX];
        snprintf(out->converted, sizeof out->converted, "%s", pd_conv_text(r->fits[fit].converts, text));
    }
}

/* What the shadow chose is a pair of the record too. */
static void keep_shadow(struct pd_route_rec *r, struct pd_route_chosen *s)
{
    uint32_t i = 0;
    while (i < r->n_pairs && (r->pair[i].p != s->p || r->pair[i].d != s->d))
        i++;
    if (i == r->n_pairs) {
        pd_pair_cost(r, s->p, s->d, s->p < 0 ? -1 : pd_route_path_of(r, s->p, s->d), &r->pair[r->n_pairs++]);
        r->pair[i].score = PD_SCORE_NONE;
        r->pair[i].share = 0;
    }
    s->pair = (int32_t)i;
}

/* Its KV may come yet: it is chosen, or nothing is. */
static void or_stay(struct pd_route_rec *r)
{
    size_t n = strlen(r->reason);
    if (pd_late_over(&r->late, r->ttft)) {
        if (!r->quiet)
            put(r->reason, sizeof r->reason, n, "; its KV has been on its way for %.1f ms, and the rest may take %.1f (P95), computing it %.1f", ms(r->late.since_us),
                ms(r->late.rest_us), ms(r->late.local_us));
        return;
    }
    r->chosen = (struct pd_route_chosen){ .any = false, .p = -1, .d = -1 };
    r->outcome = PD_STAY;
    r->propensity = 0;
    r->degraded &= ~(uint32_t)(PD_DG_COLD | PD_DG_STALE);
    r->ttft = r->completion = (struct pd_spread){ 0, 0, 0 };
    snprintf(r->reason, sizeof r->reason, "%s", pd_outcome_names[r->outcome]);
}

static void start(struct pd_route_rec *r)
{
    for (uint32_t i = 0; i < r->n_p; i++)
        r->p[i].keep = r->p[i].drawn = false;
    for (uint32_t i = 0; i < r->n_d; i++)
        r->d[i].keep = r->d[i].drawn = false;
    r->degraded &= ~(uint32_t)(PD_DG_COLD | PD_DG_STALE);
    r->outcome = PD_CHOSEN;
    r->propensity = 0;
    r->reason[0] = 0;
    r->ttft = r->completion = (struct pd_spread){ 0, 0, 0 };
}

int pd_choose(struct pd_route_rec *r, struct pd_err *e)
{
    struct choice c = { .r = r, .scale = pd_risk_scale(r->risk) }, shadow = c;
    int rc = pd_policy_parse(r->policy, &c.policy, e);
    if (rc || (r->shadow.policy[0] && (rc = pd_policy_parse(r->shadow.policy, &shadow.policy, e))))
        return rc;
    start(r);
    if (r->shadow.policy[0])
        choose_by(&shadow, &r->shadow.chosen, &r->shadow.score);
    int64_t least_score;
    choose_by(&c, &r->chosen, &least_score);
    for (uint32_t i = 0; i < r->n_p; i++)
        r->p[i].cost = (uint64_t)load(&c, 0, &r->p[i]);
    for (uint32_t i = 0; i < r->n_d; i++)
        r->d[i].cost = (uint64_t)load(&c, 1, &r->d[i]);
    if (r->chosen.any) {
        const struct pd_route_pair *o = &r->pair[r->chosen.pair];
        r->propensity = o->share * was_drawn(&c, o);
        r->ttft = o->ttft;
        r->completion = o->completion;
        if (c.policy.kind == PD_POLICY_CONDITIONAL || c.policy.kind == PD_POLICY_FIXED)         /* the others do not go by it */
            r->degraded |= (o->completion.marks & PD_SPREAD_COLD ? PD_DG_COLD : 0) | (o->completion.marks & PD_SPREAD_STALE ? PD_DG_STALE : 0);
        if (!r->quiet)
            words(&c, o);
        if (r->late.any)
            or_stay(r);
    } else {
        r->outcome = nobody(&c);
        snprintf(r->reason, sizeof r->reason, "%s", pd_outcome_names[r->outcome]);
    }
    if (r->shadow.policy[0] && r->shadow.chosen.any)
        keep_shadow(r, &r->shadow.chosen);
    return 0;
}

int pd_route_replay(const void *rec, size_t n, const char *policy, struct pd_arena *a, struct pd_route_rec *was, struct pd_route_rec *now, struct pd_buf *out,
    struct pd_err *e)
{
    struct pd_route_rec *r = now ? now : pd_arena_alloc(a, 1, sizeof *r, e);
    int rc = !r ? PD_ENOMEM : was ? pd_route_decode(rec, n, a, was, e) : 0;
    if (rc || (rc = pd_route_decode(rec, n, a, r, e)))
        return rc;
    if (policy && (size_t)snprintf(r->policy, sizeof r->policy, "%s", policy) >= sizeof r->policy)
        return pd_fail(e, PD_EUSAGE, "'%.40s' is no policy", policy);
    rc = pd_choose(r, e);
    return rc ? rc : pd_route_encode(r, out, e);
}
