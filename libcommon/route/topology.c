/* Domains are numbered in the order of a walk through their tree, so those inside one are a range, and a `path` line paints a rectangle of the matrix; from the
 * outermost to the innermost, each over what was there. */
#include <stdio.h>
#include <stdlib.h>
#include "../base/hash.h"
#include "topology_in.h"

const char *const pd_near_names[] = { "local", "nvlink", "pcie", "rack", "cross", NULL };

/* Guesses, to begin with: transfers that were measured replace them (path.h). */
static const struct pd_way of_class[PD_NEAR_N] = {
    { PD_NEAR_LOCAL, 50, 4000, 50, 0, PD_WAY_ALL, 0 }, { PD_NEAR_NVLINK, 30, 100000, 30, 0, PD_WAY_ALL, 0 }, { PD_NEAR_PCIE, 50, 12000, 50, 0, PD_WAY_ALL, 0 },
    { PD_NEAR_RACK, 200, 2500, 200, 0, PD_WAY_ALL, 0 }, { PD_NEAR_CROSS, 1000, 1000, 1000, 0, PD_WAY_ALL, 0 } };

const struct pd_way *pd_way_of_class(enum pd_near near) { return &of_class[near]; }

bool pd_near_find(const char *name, enum pd_near *out)
{
    for (int i = 0; pd_near_names[i]; i++)
        if (!strcmp(name, pd_near_names[i])) {
            *out = (enum pd_near)i;
            return true;
        }
    return false;
}

/* ---- asking ---- */

uint32_t pd_topology_domains(const struct pd_topology *t) { return t->n; }
uint64_t pd_topology_version(const struct pd_topology *t) { return t->version; }
const char *pd_topology_name(const struct pd_topology *t, int domain) { return domain < 0 ? "none" : t->domain[domain].name; }

static int by_name(const void *key, const void *at)
{
    const struct pd_str *k = key;
    const char *name = ((const struct pd_topo_key *)at)->name;
    size_t n = strlen(name), least = k->n < n ? k->n : n;
    int c = memcmp(k->p, name, least);
    return c ? c : k->n < n ? -1 : k->n > n;
}

static const struct pd_topo_key *find(const struct pd_topo_key *keys, uint32_t n, struct pd_str s)
{
    return n && s.p ? bsearch(&s, keys, n, sizeof *keys, by_name) : NULL;
}

int pd_topology_domain(const struct pd_topology *t, const char *name, size_t n)
{
    const struct pd_topo_key *k = find(t->by_name, t->n, (struct pd_str){ name, n });
    return k ? (int)k->domain : -1;
}

struct pd_spot pd_topology_spot(const struct pd_topology *t, const char *at, struct pd_str worker, struct pd_str domain)
{
    const struct pd_topo_key *k = find(t->worker, t->n_workers, (struct pd_str){ at, strlen(at) });
    k = k ? k : find(t->worker, t->n_workers, worker);
    struct pd_spot s = { .domain = k ? (int)k->domain : domain.p ? pd_topology_domain(t, domain.p, domain.n) : -1, .by_file = k != NULL };
    s.maintenance = (k && k->maintenance) || (s.domain >= 0 && t->domain[s.domain].maintenance);
    return s;
}

const struct pd_way *pd_topology_way(const struct pd_topology *t, int from, int to)
{
    return &t->way[from < 0 || to < 0 ? PD_NEAR_CROSS : t->matrix[(size_t)from * t->n + (size_t)to]];
}

const struct pd_way *pd_topology_class(const struct pd_topology *t, enum pd_near near) { return &t->way[near]; }

int pd_topology_around(const struct pd_topology *t, int at, enum pd_near near)
{
    int found = -1;
    for (; at >= 0 && t->domain[at].near <= near; at = t->domain[at].parent)
        found = at;
    return found;
}

int pd_topology_filled(const struct pd_topology *t, struct pd_buf *out, struct pd_err *e)
{
    static const char *const field[] = { "latency", "bandwidth", "jitter", "cost" };
    uint64_t pairs = 0, open = 0;
    uint32_t a = 0, b = 0, lacks[4] = { 0 };
    int rc = 0;
    for (uint32_t i = 0; i < t->n; i++)
        for (uint32_t k = i + 1; k < t->n; k++) {
            if (k < t->domain[i].end)   /* one lies in the other */
                continue;
            pairs++;
            if (t->matrix[(size_t)i * t->n + k] < PD_NEAR_N && !open++) {
                a = i;
                b = k;
            }
        }
    if (open)
        rc = pd_buf_printf(out, e, "%llu of %llu pairs of domains have no path line and are as their class (%s and %s first)", (unsigned long long)open,
                           (unsigned long long)pairs, t->domain[a].name, t->domain[b].name);
    for (uint32_t w = PD_NEAR_N; w < t->n_ways; w++)
        for (int f = 0; f < 4; f++)
            lacks[f] += t->way[w].assumed >> f & 1;
    for (int f = 0; rc == 0 && f < 3; f++)      /* cost 0 is no hole */
        if (lacks[f])
            rc = pd_buf_printf(out, e, "%s%u of %u path lines say no %s: their class's", out->n ? "; " : "", lacks[f], t->n_ways - PD_NEAR_N, field[f]);
    return rc;
}

/* ---- making ---- */

/* Tree order: children behind their parent, in the order of the file. */
static int number(struct pd_topo_parse *q, int at, int depth, int parent, struct pd_err *e)
{
    struct pd_topology *t = q->t;
    for (uint32_t i = 0; i < q->n_said; i++) {
        struct pd_topo_said *s = &q->said[i];
        if (s->parent != at)
            continue;
        if (depth == PD_TOPO_DEPTH)
            return pd_topo_bad(q, s->line, e, "domain '%s' lies in more than %d others (leave some out)", s->name, PD_TOPO_DEPTH - 1);
        int me = s->id = (int)t->n++;
        struct pd_topo_domain *d = &t->domain[me];
        d->name = s->name;
        d->near = s->near;
        d->parent = parent;
        d->depth = (uint8_t)depth;
        d->maintenance = s->maintenance || (parent >= 0 && t->domain[parent].maintenance);
        if (parent >= 0 && s->near > t->domain[parent].near)
            return pd_topo_bad(q, s->line, e, "domain '%s' is %s inside, and lies in '%s', which is %s: what lies inside is nearer (make it %s or nearer)", s->name,
                               pd_near_names[s->near], t->domain[parent].name, pd_near_names[t->domain[parent].near], pd_near_names[t->domain[parent].near]);
        int rc = number(q, (int)i, depth + 1, me, e);
        if (rc < 0)
            return rc;
        t->domain[me].end = t->n;
    }
    return 0;
}

static enum pd_near class_of(const struct pd_topology *t, int a, int b)
{
    while (a >= 0 && !(b >= a && (uint32_t)b < t->domain[a].end))
        a = t->domain[a].parent;
    return a < 0 ? PD_NEAR_CROSS : t->domain[a].near;
}

/* What a line leaves open. */
static int fill(struct pd_topo_parse *q, struct pd_topo_rect *r, struct pd_err *e)
{
    struct pd_way *w = &q->t->way[r->way];
    enum pd_near inner = class_of(q->t, r->a, r->b);
    const char *a = q->t->domain[r->a].name, *b = q->t->domain[r->b].name;
    if (!r->has_near)
        w->near = inner;
    else if (w->near > inner)
        return pd_topo_bad(q, w->line, e, "the path of '%s' and '%s' is %s, and both lie in a domain that is %s inside (say %s or nearer, or move one of them)", a, b,
                           pd_near_names[w->near], pd_near_names[inner], pd_near_names[inner]);
    const struct pd_way *c = &q->t->way[w->near];
    w->latency_us = w->assumed & PD_WAY_LATENCY ? c->latency_us : w->latency_us;
    w->bytes_per_us = w->assumed & PD_WAY_BANDWIDTH ? c->bytes_per_us : w->bytes_per_us;
    w->jitter_us = w->assumed & PD_WAY_JITTER ? c->jitter_us : w->jitter_us;
    w->cost_us = w->assumed & PD_WAY_COST ? c->cost_us : w->cost_us;
    return 0;
}

static int outermost_first(const void *a, const void *b)
{
    const struct pd_topo_rect *x = a, *y = b;
    return x->depth != y->depth ? x->depth - y->depth : x->way != y->way ? x->way - y->way : x->a - y->a;
}

static void paint(struct pd_topology *t, const struct pd_topo_rect *rects, const struct pd_topo_rect *r, uint16_t *last, uint16_t *clash)
{
    uint16_t mine = (uint16_t)(r - rects + 1);
    for (uint32_t i = (uint32_t)r->a; i < t->domain[r->a].end; i++)
        for (uint32_t k = (uint32_t)r->b; k < t->domain[r->b].end; k++) {
            size_t at = (size_t)i * t->n + k;
            const struct pd_topo_rect *was = last[at] ? &rects[last[at] - 1] : NULL;
            bool inside = !was || (t->domain[r->a].depth >= t->domain[was->a].depth && t->domain[r->b].depth >= t->domain[was->b].depth);
            clash[at] = inside ? 0 : last[at];
            last[at] = mine;
            t->matrix[at] = (uint16_t)r->way;
        }
}

/* Every pair has one innermost line, or none. */
static int make_matrix(struct pd_topo_parse *q, struct pd_err *e)
{
    struct pd_topology *t = q->t;
    size_t cells = (size_t)t->n * t->n;
    uint16_t *last = pd_calloc(cells, sizeof *last, "a matrix of paths", e), *clash = pd_calloc(cells, sizeof *clash, "a matrix of paths", e);
    int rc = PD_ENOMEM;
    if (!last || !clash || !(t->matrix = pd_calloc(cells, sizeof *t->matrix, "a matrix of paths", e)))
        goto out;
    for (uint32_t i = 0; i < t->n; i++)
        for (uint32_t k = 0; k < t->n; k++)
            t->matrix[(size_t)i * t->n + k] = (uint16_t)class_of(t, (int)i, (int)k);
    for (uint32_t i = 0; i < q->n_rects; i++)
        q->rect[i].depth = t->domain[q->rect[i].a].depth + t->domain[q->rect[i].b].depth;
    if (q->n_rects)
        qsort(q->rect, q->n_rects, sizeof *q->rect, outermost_first);
    for (uint32_t i = 0; i < q->n_rects; i++)
        if ((rc = fill(q, &q->rect[i], e)) < 0)
            goto out;
    for (uint32_t i = 0; i < q->n_rects; i++)
        paint(t, q->rect, &q->rect[i], last, clash);
    rc = 0;
    for (size_t at = 0; at < cells && rc == 0; at++)
        if (clash[at]) {
            const char *a = t->domain[at / t->n].name, *b = t->domain[at % t->n].name;
            int one = t->way[q->rect[last[at] - 1].way].line, other = t->way[q->rect[clash[at] - 1].way].line;
            rc = pd_topo_bad(q, one > other ? one : other, e, "between '%s' and '%s' this line and line %d hold, and neither is the inner one (say `path %s %s` too)", a, b,
                             one > other ? other : one, a, b);
        }
out:
    pd_free(last);
    pd_free(clash);
    return rc;
}

static int by_key(const void *a, const void *b) { return strcmp(((const struct pd_topo_key *)a)->name, ((const struct pd_topo_key *)b)->name); }

int pd_topology_parse(const char *text, size_t n, const char *name, struct pd_topology **out, struct pd_err *e)
{
    struct pd_topology *t = pd_calloc(1, sizeof *t, "a topology", e);
    struct pd_topo_parse q = { .t = t, .text = text, .n_text = n, .file = name };
    int rc = PD_ENOMEM;
    if (!t || !(t->way = pd_calloc(PD_NEAR_N, sizeof *t->way, "paths", e)))
        goto out;
    memcpy(t->way, of_class, sizeof of_class);
    t->n_ways = PD_NEAR_N;
    t->version = pd_xxh3(text, n, 0);
    if ((rc = pd_topo_read_domains(&q, e)) < 0)
        goto out;
    if (!(t->domain = pd_arena_alloc(&t->mem, q.n_said + 1, sizeof *t->domain, e)) || !(t->by_name = pd_arena_alloc(&t->mem, q.n_said + 1, sizeof *t->by_name, e))) {
        rc = PD_ENOMEM;
        goto out;
    }
    if ((rc = number(&q, -1, 0, -1, e)) < 0)
        goto out;
    for (uint32_t i = 0; i < q.n_said; i++)
        if (q.said[i].id < 0) {         /* never reached from outside: it lies in itself */
            rc = pd_topo_bad(&q, q.said[i].line, e, "domain '%s' lies in itself, by way of '%s' (one of them has to lie elsewhere)", q.said[i].name,
                             q.said[q.said[i].parent].name);
            goto out;
        }
    for (uint32_t i = 0; i < t->n; i++)
        t->by_name[i] = (struct pd_topo_key){ t->domain[i].name, (uint16_t)i, false, 0 };
    qsort(t->by_name, t->n, sizeof *t->by_name, by_key);
    if ((rc = pd_topo_read_rest(&q, e)) < 0 || (rc = make_matrix(&q, e)) < 0)
        goto out;
    if (t->n_workers)
        qsort(t->worker, t->n_workers, sizeof *t->worker, by_key);
    for (uint32_t i = 1; i < t->n_workers && rc == 0; i++)
        if (!strcmp(t->worker[i].name, t->worker[i - 1].name)) {
            int one = t->worker[i].line, other = t->worker[i - 1].line;
            rc = pd_topo_bad(&q, one > other ? one : other, e, "worker '%s' has a place by line %d already (keep one of them)", t->worker[i].name, one > other ? other : one);
        }
out:
    pd_free(q.said);
    pd_free(q.rect);
    if (rc < 0)
        pd_topology_free(t);
    else
        *out = t;
    return rc;
}

void pd_topology_free(struct pd_topology *t)
{
    if (!t)
        return;
    pd_arena_free(&t->mem);
    pd_free(t->way);
    pd_free(t->worker);
    pd_free(t->matrix);
    pd_free(t);
}

int pd_domain_rule_parse(const char *text, struct pd_domain_rule *out, struct pd_err *e)
{
    const char *colon = strchr(text, ':');
    size_t how = colon ? (size_t)(colon - text) : strlen(text);
    *out = (struct pd_domain_rule){ .how = PD_DOMAIN_ANY, .near = PD_NEAR_CROSS };
    if (!strcmp(text, "any"))
        return 0;
    out->how = how == 7 && !strncmp(text, "require", 7) ? PD_DOMAIN_REQUIRE : how == 6 && !strncmp(text, "prefer", 6) ? PD_DOMAIN_PREFER : PD_DOMAIN_ANY;
    if (out->how == PD_DOMAIN_ANY || !colon || !pd_near_find(colon + 1, &out->near))
        return pd_fail(e, PD_EUSAGE, "'%.80s' is no rule (any, or require: or prefer: with local, nvlink, pcie, rack or cross; example: require:rack)", text);
    return 0;
}
