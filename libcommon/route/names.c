#include "names.h"
#include <stdio.h>

int pd_name_of(struct pd_names *t, struct pd_str s, uint32_t *out, struct pd_err *e)
{
    static const struct pd_str others = { "others", 6 };
    if (t->n >= PD_NAMES_MOST)
        s = others;
    uint64_t h = pd_xxh3(s.p ? s.p : "", s.n, 0);
    for (uint32_t i = 0; i < t->n; i++)
        if (t->hash[i] == h) {
            *out = i;
            return 0;
        }
    char **name = pd_realloc(t->name, t->n + 1, sizeof *name, "names", e);
    if (!name)
        return PD_ENOMEM;
    t->name = name;
    uint64_t *hash = pd_realloc(t->hash, t->n + 1, sizeof *hash, "names", e);
    if (!hash)
        return PD_ENOMEM;
    t->hash = hash;
    if (!(t->name[t->n] = pd_strndup(s.p ? s.p : "", s.n, e)))
        return PD_ENOMEM;
    t->hash[t->n] = h;
    *out = t->n++;
    return 0;
}

static int of_two(struct pd_names *t, struct pd_str a, struct pd_str b, uint32_t *out, struct pd_err *e)
{
    char both[200];
    int n = snprintf(both, sizeof both, "%.*s > %.*s", (int)(a.n < 90 ? a.n : 90), a.p ? a.p : "", (int)(b.n < 90 ? b.n : 90), b.p ? b.p : "");
    return pd_name_of(t, (struct pd_str){ both, (size_t)n }, out, e);
}

int pd_name_of_way(struct pd_names *t, const struct pd_route_rec *r, const struct pd_route_pair *o, uint32_t *out, struct pd_err *e)
{
    return o->p < 0 ? pd_name_of(t, r->d[o->d].worker, out, e) : of_two(t, r->p[o->p].worker, r->d[o->d].worker, out, e);
}

int pd_name_of_path(struct pd_names *t, const struct pd_route_rec *r, const struct pd_route_pair *o, uint32_t *out, struct pd_err *e)
{
    static const struct pd_str unknown = { "unknown", 7 };
    const struct pd_route_path *x = o->path < 0 ? NULL : &r->paths[o->path];
    if (x && (x->p >= 0 || x->d >= 0))
        return pd_name_of_way(t, r, o, out, e);
    if (x && x->from >= 0 && x->to >= 0)
        return of_two(t, r->domains[x->from], r->domains[x->to], out, e);
    return pd_name_of(t, x && x->kind.n ? x->kind : unknown, out, e);
}

void pd_names_free(struct pd_names *t)
{
    for (uint32_t i = 0; i < t->n; i++)
        pd_free(t->name[i]);
    pd_free(t->name);
    pd_free(t->hash);
    *t = (struct pd_names){ 0 };
}
