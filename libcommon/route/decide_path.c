/* The paths of a decision: between the domains of those that may have the run, and of the pairs that are not as their domains are. */
#include <stdio.h>
#include "decide_in.h"

enum { GUESS_BYTES = 1 << 20, SPECIAL = 32, EACH = PD_ROUTE_PATHS - SPECIAL - 1, SLOTS = 4 * PD_MAX_CANDIDATES };

static struct pd_spread spread(struct pd_cost c, double least)
{
    double most = (double)PD_US_MOST, a = c.p50 > least ? c.p50 : least, b = c.p95 > a ? c.p95 : a;
    return (struct pd_spread){ (int64_t)(b < most ? b : most), (int64_t)(a < most ? a : most), (c.cold ? PD_SPREAD_COLD : 0) | (c.stale ? PD_SPREAD_STALE : 0) };
}

const struct pd_path_end *pd_decide_end(const struct pd_decision *o, struct pd_member *m)
{
    if (!m->end.at || !pd_path_end_good(&m->end, pd_paths_turn(o->need.paths)))
        m->end = pd_path_end_of(o->need.paths, m->at, m->known ? m->said.worker : (struct pd_str){ NULL, 0 }, m->known ? m->said.domain : (struct pd_str){ NULL, 0 });
    return &m->end;
}

struct pd_str pd_decide_domain(const struct pd_decision *o, struct pd_member *m)
{
    const struct pd_topology *t = o->need.paths ? pd_paths_topology(o->need.paths) : NULL;
    int at = t ? pd_decide_end(o, m)->spot.domain : -1;
    const char *name = at < 0 ? NULL : pd_topology_name(t, at);
    return name ? (struct pd_str){ name, strlen(name) } : m->said.domain;
}

/* What runs took between the two domains counts for more than what is said of them; without a topology so does what a profile says. */
static void by_experience(struct pd_decision *o, struct pd_member *p, struct pd_member *d, const char *kind, uint64_t bytes, struct pd_route_path *x)
{
    struct pd_spread latency = x->latency, kib_ns = x->kib_ns;
    uint32_t at;
    if (!o->need.learn || pd_learn_path_of(o->need.learn, pd_decide_domain(o, p), pd_decide_domain(o, d), kind, &at, NULL) < 0)
        return;
    pd_learn_ways(o->need.learn, at, bytes, o->need.now_us, x);
    if (!(x->latency.marks & PD_SPREAD_COLD) || !pd_paths_topology(o->need.paths))
        return;
    x->latency = latency;
    x->kib_ns = kib_ns;
}

/* One more path of the record: that of a pair (from -1), or of its domains, whatever this pair has been through. heed: what the rule would rather not have is excluded. */
static struct pd_route_path *add(struct pd_decision *o, struct pd_member *p, struct pd_member *d, int32_t from, int32_t to, bool heed)
{
    struct pd_route_rec *r = &o->rec;
    struct pd_path_view v;
    uint64_t bytes = (uint64_t)r->input.n_tokens * r->input.kv_bytes;
    struct pd_path_end a = *pd_decide_end(o, p), b = *pd_decide_end(o, d);
    struct pd_route_path *x = &o->paths[r->n_paths];
    char *words = o->words[r->n_paths++];
    if (from >= 0) {
        a.key = b.key = 0;
        a.at = b.at = NULL;
        a.spot.domain = from == PD_DECIDE_OTHERS ? -1 : a.spot.domain;
        b.spot.domain = to == PD_DECIDE_OTHERS ? -1 : b.spot.domain;
    }
    pd_paths_view(o->need.paths, &a, &b, bytes ? bytes : GUESS_BYTES, o->need.now_us, &v);
    const char *kind = pd_near_names[v.near], *state = pd_path_state(&v, o->need.now_us);
    *x = (struct pd_route_path){ .p = -1, .d = -1, .from = from, .to = to, .kind = { kind, strlen(kind) }, .latency = spread(v.latency, 0), .kib_ns = spread(v.kib_ns, 0),
        .sync = spread(v.sync, 0), .active = v.active, .penalty_us = (int64_t)(v.penalty_us < (double)PD_US_MOST ? v.penalty_us : (double)PD_US_MOST),
        .age_us = v.age_us > 0 ? v.age_us : 0, .breaker = { state, state ? strlen(state) : 0 } };
    if (from != PD_DECIDE_OTHERS && to != PD_DECIDE_OTHERS)
        by_experience(o, p, d, kind, bytes, x);
    x->x = v.x == PD_PATH_HOLD ? PD_X_HOLD : v.x == PD_PATH_BREAKER ? PD_X_PATH : v.x == PD_PATH_DOMAIN || (v.second && heed) ? PD_X_DOMAIN : PD_X_NO;
    if (!x->x)
        return x;
    pd_path_text(o->need.paths, &v, o->need.now_us, words, sizeof o->words[0]);
    if (!words[0])
        snprintf(words, sizeof o->words[0], "domain preferred %s", v.around < 0 ? "elsewhere" : pd_topology_name(pd_paths_topology(o->need.paths), v.around));
    x->excluded = (struct pd_str){ words, strlen(words) };
    return x;
}

/* Somebody of each domain of a side; how many domains that are. */
static uint32_t some(const struct pd_candidate *c, const struct pd_route_row *w, uint32_t n, struct pd_member *of[PD_ROUTE_DOMAINS])
{
    uint32_t domains = 0;
    memset(of, 0, PD_ROUTE_DOMAINS * sizeof *of);
    for (uint32_t i = 0; i < n; i++)
        if (!c[i].x && c[i].m->known && !of[w[i].domain]) {
            of[w[i].domain] = c[i].m;
            domains++;
        }
    return domains;
}

/* Rows by the key of their ends. */
struct by_key { int16_t row[2][SLOTS]; };
struct special { struct pd_decision *o; bool heed, made; struct by_key at; };

static int32_t row_of(const struct pd_decision *o, const struct by_key *at, int side, uint64_t key)
{
    const struct pd_candidate *c = side ? o->d_row : o->p_row;
    for (uint64_t i = key % SLOTS; at->row[side][i] >= 0; i = (i + 1) % SLOTS)
        if (c[at->row[side][i]].m->end.key == key)
            return at->row[side][i];
    return -1;
}

static void find_by_key(const struct pd_decision *o, struct by_key *at)
{
    memset(at, -1, sizeof *at);
    for (int side = 0; side < 2; side++)
        for (uint32_t i = 0; i < (side ? o->n_d : o->n_p); i++) {
            const struct pd_candidate *c = side ? &o->d_row[i] : &o->p_row[i];
            uint64_t k = c->x ? 0 : pd_decide_end(o, c->m)->key % SLOTS;
            while (!c->x && at->row[side][k] >= 0)
                k = (k + 1) % SLOTS;
            if (!c->x)
                at->row[side][k] = (int16_t)i;
        }
}

/* One that there is no room for: that it may not be used is told in its row. false: from here on all may be. */
static bool put_apart(struct pd_decision *o, int32_t p, int32_t d)
{
    struct pd_route_row *w = &o->p_rows[p];
    struct pd_path_view v;
    pd_paths_view(o->need.paths, pd_decide_end(o, o->p_row[p].m), pd_decide_end(o, o->d_row[d].m), GUESS_BYTES, o->need.now_us, &v);
    if (v.x != PD_PATH_HOLD && v.x != PD_PATH_BREAKER)
        return v.hold || (v.breaker && v.breaker->state != PD_BREAKER_CLOSED);
    if (!w->apart.n)
        w->apart = (struct pd_bin){ memset(o->apart[p], 0, sizeof o->apart[p]), (o->n_d + 7) / 8 };
    o->apart[p][d / 8] |= (uint8_t)(1 << d % 8);
    return true;
}

/* Those of single workers, which go before those of domains: of who may have the run. */
static bool add_special(void *ctx, uint64_t p_key, uint64_t d_key)
{
    struct special *s = ctx;
    struct pd_decision *o = s->o;
    struct pd_route_rec *r = &o->rec;
    if (!s->made)
        find_by_key(o, &s->at);
    s->made = true;
    int32_t p = row_of(o, &s->at, 0, p_key), d = p < 0 ? -1 : row_of(o, &s->at, 1, d_key);
    for (uint32_t i = r->n_paths; d >= 0 && i-- > 0 && r->paths[i].p >= 0;)
        if (r->paths[i].p == p && r->paths[i].d == d)
            return true;
    if (d < 0)
        return true;
    if (r->n_paths == PD_ROUTE_PATHS)
        return put_apart(o, p, d);
    struct pd_route_path *x = add(o, o->p_row[p].m, o->d_row[d].m, -1, -1, s->heed);
    x->p = p;
    x->d = d;
    return true;
}

/* Can KV go from this row to anybody? *why: what is in the way first. Of one that has no path of its own its domain tells. */
static bool reaches(const struct pd_decision *o, uint32_t i, bool own, struct pd_member *const to[PD_ROUTE_DOMAINS], const struct pd_route_path **why)
{
    static const struct pd_route_path apart = { .x = PD_X_PATH };
    const struct pd_route_rec *r = &o->rec;
    uint32_t open = 0;
    *why = NULL;
    for (uint32_t k = 0; own && k < o->n_d; k++) {
        if (o->d_row[k].x || o->d_row[k].m == o->p_row[i].m)
            continue;
        int32_t at = pd_route_path_of(r, (int32_t)i, (int32_t)k);
        bool one = pd_route_apart(&o->p_rows[i], (int32_t)k);
        if (!one && (at < 0 || !r->paths[at].x))
            return true;
        *why = *why && (*why)->p >= 0 ? *why : one ? &apart : &r->paths[at];
    }
    for (uint32_t k = 0; !own && k < r->n_domains; k++)
        open += to[k] != NULL;
    for (uint32_t k = 0; !own && k < r->n_paths; k++) {
        const struct pd_route_path *x = &r->paths[k];
        if (x->from != (int32_t)o->p_rows[i].domain)
            continue;
        if (!x->x)
            return true;
        *why = *why ? *why : x;
        open--;
    }
    return !own && open;        /* there was no room for all */
}

/* A prefill worker from which no path may be used is none. */
static void strand(struct pd_decision *o, struct pd_member *const to[PD_ROUTE_DOMAINS])
{
    const struct pd_route_rec *r = &o->rec;
    for (uint32_t i = 0; i < o->n_p; i++) {
        const struct pd_route_path *why;
        bool own = o->p_rows[i].apart.n > 0;
        for (uint32_t k = 0; k < r->n_paths; k++)
            own |= r->paths[k].p == (int32_t)i;
        if (o->p_row[i].x || reaches(o, i, own, to, &why) || !why)
            continue;
        o->p_row[i].x = (enum pd_excluded)why->x;
        o->p_rows[i].x = why->x;
        o->p_row[i].stranded = true;
        o->p_row[i].detail = why->excluded.p ? why->excluded.p : pd_route_apart_words.p;
    }
}

static bool any_x(const struct pd_route_rec *r)
{
    for (uint32_t i = 0; i < r->n_paths; i++)
        if (r->paths[i].x)
            return true;
    for (uint32_t i = 0; i < r->n_p; i++)
        if (r->p[i].apart.n)
            return true;
    return false;
}

void pd_decide_paths(struct pd_decision *o, bool heed)
{
    struct pd_route_rec *r = &o->rec;
    const struct pd_topology *t = o->need.paths ? pd_paths_topology(o->need.paths) : NULL;
    struct pd_member *from[PD_ROUTE_DOMAINS], *to[PD_ROUTE_DOMAINS];
    r->n_paths = 0;
    for (uint32_t i = 0; i < o->n_p; i++) {
        o->p_rows[i].apart.n = 0;
        if (o->p_row[i].stranded) {
            o->p_row[i].x = PD_X_NO;
            o->p_rows[i].x = PD_X_NO;
            o->p_row[i].stranded = false;
        }
    }
    if (!o->need.paths || !o->n_p)
        return;
    r->degraded |= t ? 0 : PD_DG_NO_TOPOLOGY;
    r->versions.topology = t ? pd_topology_version(t) >> 11 : 0;       /* as an integer that every reader has */
    uint32_t n = some(o->p_row, o->p_rows, o->n_p, from);
    n *= some(o->d_row, o->d_rows, o->n_d, to);
    int32_t plain[2] = { -1, -1 };      /* a pair of domains of which nothing is known but that they are far from each other */
    int last = n > EACH ? PD_NEAR_N : 1;      /* the near ones first, should there not be room for all */
    for (int near = 0; near < last; near++)
        for (uint32_t i = 0; i < r->n_domains; i++)
            for (uint32_t k = 0; k < r->n_domains && r->n_paths < EACH; k++) {
                if (!from[i] || !to[k])
                    continue;
                const struct pd_path_end *a = pd_decide_end(o, from[i]), *b = pd_decide_end(o, to[k]);
                if (last > 1 && pd_paths_near(o->need.paths, a, b) != (enum pd_near)near)
                    continue;
                if (pd_paths_plain(o->need.paths, a, b)) {
                    plain[0] = (int32_t)i;
                    plain[1] = (int32_t)k;
                    continue;
                }
                add(o, from[i], to[k], (int32_t)i, (int32_t)k, heed);
            }
    if (plain[0] >= 0) {        /* one row for all of them */
        struct pd_route_path *x = add(o, from[plain[0]], to[plain[1]], plain[0], plain[1], heed);
        x->from = x->to = -1;
    }
    struct special s;           /* large */
    s.o = o;
    s.heed = heed;
    s.made = false;
    pd_paths_special(o->need.paths, add_special, &s);
    if (any_x(r))
        strand(o, to);
}
