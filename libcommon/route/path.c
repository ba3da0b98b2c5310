#include <stdio.h>
#include "../base/hash.h"
#include "../trace/keyed.h"
#include "path.h"

static const double EWMA = 0.1, LEAST_RATE = 1e-3, UNEASY = 0.05 /* share of failures from which on a pair is told apart */;
static const double edge[PD_BANDS - 1] = { 64 << 10, 1 << 20, 16 << 20 };       /* bytes */
enum { LOOK = 64 };             /* pairs looked at for one that can be forgotten */

struct pair {                   /* of workers, by class of path */
    struct pd_node node;
    uint64_t p, d;
    struct pd_breaker breaker;
    uint32_t active;
    double health, failing, lost_us;    /* shares, and the time that a failure took; moving means */
    int64_t last_us;
};
struct learnt { struct pd_node node; struct pd_term move, sync; uint32_t active; };        /* from a domain to another */

struct pd_paths {
    struct pd_paths_opts o;
    const struct pd_topology *topology;
    struct pd_keyed pairs, learnt;
    struct learnt of_class[PD_NEAR_N];
    uint32_t turn, tripped, uneasy;     /* pairs whose breaker is not closed; those, and the ones that fail now and then */
};

/* ---- what is learnt ---- */

/* Sync begins as wide as a guess is: 1 ms. */
static void open_terms(struct learnt *t, const double start[2])
{
    static const double typical[] = { 1, 1 << 20 }, sync_typical[] = { 1, 1 }, sync_start[] = { 1000 };
    pd_term_open(&t->move, 2, start, typical, edge);
    pd_term_open(&t->sync, 1, sync_start, sync_typical, edge);
}

static void start_of_way(const struct pd_way *w, double start[2])
{
    start[0] = w->latency_us;
    start[1] = 1 / (w->bytes_per_us > LEAST_RATE ? w->bytes_per_us : LEAST_RATE);
}

static void open_classes(struct pd_paths *x)
{
    for (int i = 0; i < PD_NEAR_N; i++) {
        double start[2];
        const struct pd_profile_path *known = x->o.profile && x->o.scheme ? pd_profile_path(x->o.profile, x->o.scheme, pd_near_names[i]) : NULL;
        if (x->of_class[i].move.all.n)          /* it knows better by now */
            continue;
        start_of_way(x->topology ? pd_topology_class(x->topology, (enum pd_near)i) : pd_way_of_class((enum pd_near)i), start);
        if (known && known->fit.k == 2 && (!x->topology || pd_topology_class(x->topology, (enum pd_near)i)->assumed & PD_WAY_BANDWIDTH))
            memcpy(start, known->fit.theta, sizeof start);
        open_terms(&x->of_class[i], start);
    }
}

static void domains_key(const struct pd_path_end *p, const struct pd_path_end *d, uint8_t key[16])
{
    pd_put_be64(key, p->label);
    pd_put_be64(key + 8, d->label);
}

static struct learnt *learnt_of(const struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d)
{
    uint8_t key[16];
    domains_key(p, d, key);
    return pd_keyed_find(&x->learnt, key, sizeof key);
}

/* NULL: there is no memory for it, and the class alone learns. */
static struct learnt *learn_of(struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, const struct pd_way *w)
{
    struct learnt *t = learnt_of(x, p, d);
    uint8_t key[16];
    double start[2];
    if (t) {
        pd_keyed_to_end(&x->learnt, t);
        return t;
    }
    if (x->learnt.n >= PD_PATHS_LEARNT) {
        for (t = (struct learnt *)x->learnt.first; t && t->active; t = (struct learnt *)t->node.next)
            ;
        if (!t)
            return NULL;
        pd_keyed_remove(&x->learnt, t);
    } else if (!(t = pd_calloc(1, sizeof *t, "what is learnt of a path", NULL)))
        return NULL;
    start_of_way(w, start);
    if (!w->line)               /* no line of its own: as its class has been found to be */
        memcpy(start, x->of_class[w->near].move.fit.theta, sizeof start);
    open_terms(t, start);
    domains_key(p, d, key);
    if (pd_keyed_add(&x->learnt, t, key, sizeof key, NULL) < 0) {
        pd_free(t);
        return NULL;
    }
    return t;
}

/* ---- ends and pairs ---- */

struct pd_path_end pd_path_end_of(const struct pd_paths *x, const char *at, struct pd_str worker, struct pd_str domain)
{
    struct pd_path_end e = { .at = at, .key = pd_xxh3(at, strlen(at), 0), .spot = { .domain = -1 }, .turn = x->turn };
    if (x->topology)
        e.spot = pd_topology_spot(x->topology, at, worker, domain);
    if (e.spot.domain >= 0)
        domain.n = strlen(domain.p = pd_topology_name(x->topology, e.spot.domain));
    e.label = domain.p ? pd_xxh3(domain.p, domain.n, 2 + (e.spot.domain >= 0)) : 0;
    return e;
}

static const struct pd_way *way_of(const struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d)
{
    if (x->topology)
        return pd_topology_way(x->topology, p->turn == x->turn ? p->spot.domain : -1, d->turn == x->turn ? d->spot.domain : -1);
    return pd_way_of_class(p->label && p->label == d->label ? PD_NEAR_LOCAL : PD_NEAR_CROSS);
}

bool pd_paths_plain(const struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d)
{
    const struct pd_way *w = way_of(x, p, d);
    return w->near == PD_NEAR_CROSS && !w->line && (x->o.rule.how == PD_DOMAIN_ANY || x->o.rule.near == PD_NEAR_CROSS) && !learnt_of(x, p, d);
}

enum pd_near pd_paths_near(const struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d) { return way_of(x, p, d)->near; }

static void pair_key(uint64_t p, uint64_t d, enum pd_near near, uint8_t key[17])
{
    pd_put_be64(key, p);
    pd_put_be64(key + 8, d);
    key[16] = (uint8_t)near;
}

static struct pair *pair_of(const struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, enum pd_near near)
{
    uint8_t key[17];
    pair_key(p->key, d->key, near, key);
    return pd_keyed_find(&x->pairs, key, sizeof key);
}

static bool tripped(const struct pair *r) { return r->breaker.state != PD_BREAKER_CLOSED; }
static bool uneasy(const struct pair *r) { return tripped(r) || r->failing > UNEASY; }
static bool forgettable(const struct pair *r) { return !r->active && r->breaker.state == PD_BREAKER_CLOSED; }

static struct pair *pair_keep(struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, enum pd_near near)
{
    uint8_t key[17];
    struct pair *r = pair_of(x, p, d, near);
    if (r) {
        pd_keyed_to_end(&x->pairs, r);
        return r;
    }
    if (x->pairs.n >= x->o.most) {
        struct pd_node *n = x->pairs.first;
        for (int i = 0; i < LOOK && n && !forgettable((struct pair *)n); i++)
            n = n->next;
        if (!n || !forgettable((struct pair *)n))
            return NULL;
        x->uneasy -= uneasy((struct pair *)n);
        pd_keyed_remove(&x->pairs, n);
        pd_free(n);
    }
    if (!(r = pd_calloc(1, sizeof *r, "a path", NULL)))
        return NULL;
    *r = (struct pair){ .p = p->key, .d = d->key, .health = 1, .breaker.seed = x->o.seed ^ p->key ^ d->key * 3 };
    pair_key(p->key, d->key, near, key);
    if (pd_keyed_add(&x->pairs, r, key, sizeof key, NULL) < 0) {
        pd_free(r);
        return NULL;
    }
    return r;
}

/* ---- how it is ---- */

static bool warm(const struct pd_term *t) { return t->all.n >= 20; }

/* What moving n bytes costs: the line of these two domains, or what their class is by now, times what actual over predicted has been. */
static void move_cost(const struct pd_paths *x, const struct learnt *own, const struct pd_way *w, double n, int64_t now_us, struct pd_path_view *v)
{
    const struct learnt *all = &x->of_class[w->near];
    bool mine = own && (warm(&own->move) || !warm(&all->move));
    const struct pd_term *t = mine ? &own->move : &all->move;
    double base[2] = { t->fit.theta[0], t->fit.theta[1] }, predicted = base[0] + base[1] * n;
    struct pd_cost c = pd_term_cost(t, (const double[]){ 1, n }, now_us, x->o.stale_us);
    double q50 = predicted > LEAST_RATE ? c.p50 / predicted : 1, q95 = predicted > LEAST_RATE ? c.p95 / predicted : 1;
    if (!mine && w->line)
        start_of_way(w, base);
    v->latency = (struct pd_cost){ base[0] * q50, base[0] * q95, c.cold, c.stale };
    v->kib_ns = (struct pd_cost){ base[1] * q50 * 1024000, base[1] * q95 * 1024000, c.cold, c.stale };
    if (c.cold && w->line && !(w->assumed & (PD_WAY_LATENCY | PD_WAY_BANDWIDTH | PD_WAY_JITTER))) {     /* an operator who says all three is believed */
        v->latency.p95 = v->latency.p50 + w->jitter_us;
        v->kib_ns.p95 = v->kib_ns.p50;
    }
}

void pd_paths_view(struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, uint64_t bytes, int64_t now_us, struct pd_path_view *v)
{
    const struct pd_way *w = way_of(x, p, d);
    const struct pair *r = pair_of(x, p, d, w->near);
    const struct learnt *own = learnt_of(x, p, d);
    const struct pd_term *sync = own && warm(&own->sync) ? &own->sync : &x->of_class[w->near].sync;
    *v = (struct pd_path_view){ .near = w->near, .way = w, .placed = p->spot.domain >= 0 && d->spot.domain >= 0, .age_us = -1, .health = 1, .around = -1 };
    move_cost(x, own, w, bytes ? (double)bytes : 1, now_us, v);
    v->sync = pd_term_cost(sync, (const double[]){ 1, 0 }, now_us, x->o.stale_us);
    v->penalty_us = w->cost_us;
    v->active = own ? own->active : 0;
    if (r) {
        v->penalty_us += r->failing * r->lost_us;
        v->age_us = r->last_us ? now_us - r->last_us : -1;
        v->health = r->health;
        v->breaker = &r->breaker;
    }
    v->hold = x->o.ledger && p->at && d->at ? pd_ledger_held(x->o.ledger, p->at, d->at) : NULL;
    bool far = x->o.rule.how != PD_DOMAIN_ANY && w->near > x->o.rule.near;
    v->second = far && x->o.rule.how == PD_DOMAIN_PREFER;
    if (far && x->topology)
        v->around = pd_topology_around(x->topology, d->spot.domain, x->o.rule.near);
    v->x = v->hold ? PD_PATH_HOLD : far && !v->second ? PD_PATH_DOMAIN : r && !pd_breaker_may(&r->breaker, now_us) ? PD_PATH_BREAKER : PD_PATH_MAY;
}

const char *pd_path_text(const struct pd_paths *x, const struct pd_path_view *v, int64_t now_us, char *out, size_t cap)
{
    switch (v->x) {
    case PD_PATH_MAY: snprintf(out, cap, "%s", ""); break;
    case PD_PATH_HOLD: snprintf(out, cap, "hold: %s", v->hold->cause); break;
    case PD_PATH_DOMAIN:
        if (v->around >= 0)
            snprintf(out, cap, "domain required %s", pd_topology_name(x->topology, v->around));
        else
            snprintf(out, cap, "domain required %s, and the decode worker is in none", pd_near_names[x->o.rule.near]);
        break;
    case PD_PATH_BREAKER: pd_breaker_text(v->breaker, now_us, out, cap); break;
    }
    return out;
}

const char *pd_path_state(const struct pd_path_view *v, int64_t now_us)
{
    enum pd_breaker_state s = v->breaker ? pd_breaker_at(v->breaker, now_us) : PD_BREAKER_CLOSED;
    return v->hold ? "hold" : s == PD_BREAKER_OPEN ? "open" : s == PD_BREAKER_HALF ? "half_open" : NULL;
}

/* ---- what happens on it ---- */

struct pd_path_ticket pd_paths_begin(struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, int64_t now_us)
{
    const struct pd_way *w = way_of(x, p, d);
    struct pair *r = pair_keep(x, p, d, w->near);
    struct learnt *own = learn_of(x, p, d, w);
    if (own)
        own->active++;
    if (r)
        r->active++;
    return (struct pd_path_ticket){ r ? pd_breaker_begin(&r->breaker, now_us) : 0, (uint8_t)w->near };
}

static void mean(double *m, double v) { *m += EWMA * (v - *m); }

void pd_paths_took(struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, struct pd_path_ticket t, uint64_t bytes, int64_t us, int64_t now_us)
{
    struct pair *r = pair_of(x, p, d, (enum pd_near)t.near);
    struct learnt *own = learnt_of(x, p, d);
    const double in[] = { 1, (double)bytes };
    struct pd_path_view v;
    pd_paths_view(x, p, d, bytes, now_us, &v);
    double most = v.latency.p95 + v.kib_ns.p95 * in[1] / 1024000;
    if (r)
        mean(&r->health, (double)us <= most ? 1 : most / (double)us);
    if (own)
        pd_term_learn(&own->move, in, (double)us, now_us);
    pd_term_learn(&x->of_class[t.near].move, in, (double)us, now_us);
}

bool pd_paths_end(struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, struct pd_path_ticket t, enum pd_went went, const char *cause,
                  uint64_t bytes, int64_t us, int64_t now_us)
{
    struct pair *r = pair_of(x, p, d, (enum pd_near)t.near);
    struct learnt *own = learnt_of(x, p, d);
    if (own)
        own->active -= own->active > 0;
    if (!r)
        return false;
    bool was = tripped(r), was_uneasy = uneasy(r);
    r->active -= r->active > 0;
    if (went == PD_WENT_WELL) {
        r->last_us = now_us;
        mean(&r->failing, 0);
        if (bytes && us > 0)
            pd_paths_took(x, p, d, t, bytes, us, now_us);
        else
            mean(&r->health, 1);
    } else if (went == PD_WENT_WRONG) {
        r->last_us = now_us;
        mean(&r->health, 0);
        mean(&r->failing, 1);
        if (us > 0)
            r->lost_us = r->lost_us > 0 ? r->lost_us + 3 * EWMA * ((double)us - r->lost_us) : (double)us;
    }
    bool turned = pd_breaker_end(&r->breaker, &x->o.breaker, t.turn, went, cause, now_us);
    x->tripped += (uint32_t)tripped(r) - was;
    x->uneasy += (uint32_t)uneasy(r) - was_uneasy;
    return turned;
}

void pd_paths_sync(struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, int64_t us, int64_t now_us)
{
    const struct pd_way *w = way_of(x, p, d);
    struct learnt *own = learn_of(x, p, d, w);
    const double one[] = { 1, 0 };
    if (own)
        pd_term_learn(&own->sync, one, (double)us, now_us);
    pd_term_learn(&x->of_class[w->near].sync, one, (double)us, now_us);
}

void pd_paths_trip(struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, const char *cause, int64_t now_us)
{
    struct pair *r = pair_keep(x, p, d, way_of(x, p, d)->near);
    if (r) {
        x->tripped += !tripped(r);
        x->uneasy += !uneasy(r);
        pd_breaker_trip(&r->breaker, &x->o.breaker, cause, now_us);
    }
}

void pd_paths_renew(struct pd_paths *x, const struct pd_path_end *w, int64_t now_us)
{
    for (struct pd_node *n = x->pairs.first; n; n = n->next) {
        struct pair *r = (struct pair *)n;
        if (r->p == w->key || r->d == w->key)
            pd_breaker_renew(&r->breaker, now_us);
    }
}

void pd_paths_forget(struct pd_paths *x, const char *at)
{
    uint64_t key = pd_xxh3(at, strlen(at), 0);
    for (struct pd_node *n = x->pairs.first, *next; n; n = next) {
        struct pair *r = (struct pair *)n;
        next = n->next;
        if (r->p != key && r->d != key)
            continue;
        x->tripped -= tripped(r);
        x->uneasy -= uneasy(r);
        pd_keyed_remove(&x->pairs, n);
        pd_free(n);
    }
}

void pd_paths_special(const struct pd_paths *x, pd_path_each *each, void *ctx)
{
    for (const struct pd_ledger_hold *h = x->o.ledger ? pd_ledger_first_hold(x->o.ledger) : NULL; h; h = (void *)h->node.next)
        if (!each(ctx, pd_xxh3(h->p, strlen(h->p), 0), pd_xxh3(h->d, strlen(h->d), 0)))
            return;
    for (int open = 1; open >= 0; open--)
        for (const struct pd_node *i = (open ? x->tripped : x->uneasy) ? x->pairs.first : NULL; i; i = i->next) {
            const struct pair *r = (const struct pair *)i;
            if (uneasy(r) && tripped(r) == open && !each(ctx, r->p, r->d))
                return;
        }
}

bool pd_paths_prefer(const struct pd_paths *x) { return x->o.rule.how == PD_DOMAIN_PREFER; }
uint32_t pd_paths_breakers(const struct pd_paths *x) { return x->tripped; }
uint32_t pd_paths_turn(const struct pd_paths *x) { return x->turn; }
const struct pd_topology *pd_paths_topology(const struct pd_paths *x) { return x->topology; }

/* ---- birth and death ---- */

void pd_paths_set_topology(struct pd_paths *x, const struct pd_topology *t)
{
    x->topology = t;
    x->turn++;
    open_classes(x);
}

int pd_paths_new(const struct pd_paths_opts *o, struct pd_paths **out, struct pd_err *e)
{
    struct pd_paths *x = pd_calloc(1, sizeof *x, "paths", e);
    if (!x)
        return PD_ENOMEM;
    x->o = *o;
    x->o.most = o->most ? o->most : 4096;
    x->turn = 1;
    x->o.stale_us = o->stale_us ? o->stale_us : 600000000;
    open_classes(x);
    *out = x;
    return 0;
}

static void free_all(struct pd_keyed *t)
{
    while (t->first) {
        struct pd_node *n = t->first;
        pd_keyed_remove(t, n);
        pd_free(n);
    }
    pd_keyed_free(t);
}

void pd_paths_free(struct pd_paths *x)
{
    if (!x)
        return;
    free_all(&x->pairs);
    free_all(&x->learnt);
    pd_free(x);
}
