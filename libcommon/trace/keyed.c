#include "../base/hash.h"
#include "keyed.h"

static struct pd_node **slot_of(const struct pd_keyed *t, const void *key, size_t n) { return &t->slot[pd_xxh3(key, n, 0) & (t->cap - 1)]; }

void *pd_keyed_find(const struct pd_keyed *t, const void *key, size_t n)
{
    if (!t->cap)
        return NULL;
    for (struct pd_node *p = *slot_of(t, key, n); p; p = p->chain)
        if (p->n_key == n && !memcmp(p->key, key, n))
            return p;
    return NULL;
}

static int grow(struct pd_keyed *t, struct pd_err *e)
{
    struct pd_keyed wide = { .cap = t->cap ? t->cap * 2 : 64 };
    if (!(wide.slot = pd_calloc(wide.cap, sizeof *wide.slot, "a table", e)))
        return PD_ENOMEM;
    for (struct pd_node *p = t->first; p; p = p->next) {
        struct pd_node **s = slot_of(&wide, p->key, p->n_key);
        p->chain = *s;
        *s = p;
    }
    pd_free(t->slot);
    t->slot = wide.slot;
    t->cap = wide.cap;
    return 0;
}

static void link_last(struct pd_keyed *t, struct pd_node *p)
{
    p->prev = t->last;
    p->next = NULL;
    *(t->last ? &t->last->next : &t->first) = p;
    t->last = p;
}

static void unlink_node(struct pd_keyed *t, struct pd_node *p)
{
    *(p->prev ? &p->prev->next : &t->first) = p->next;
    *(p->next ? &p->next->prev : &t->last) = p->prev;
}

int pd_keyed_add(struct pd_keyed *t, void *node, const void *key, size_t n, struct pd_err *e)
{
    struct pd_node *p = node;
    if (n > sizeof p->key)
        return pd_fail(e, PD_EFAIL, "a key of %zu bytes", n);
    if (t->n == t->cap && grow(t, e))
        return PD_ENOMEM;
    memcpy(p->key, key, n);
    p->n_key = (uint8_t)n;
    struct pd_node **s = slot_of(t, key, n);
    p->chain = *s;
    *s = p;
    link_last(t, p);
    t->n++;
    return 0;
}

void pd_keyed_remove(struct pd_keyed *t, void *node)
{
    struct pd_node *p = node, **s = slot_of(t, p->key, p->n_key);
    while (*s != p)
        s = &(*s)->chain;
    *s = p->chain;
    unlink_node(t, p);
    t->n--;
}

void pd_keyed_to_end(struct pd_keyed *t, void *node)
{
    unlink_node(t, node);
    link_last(t, node);
}

void pd_keyed_free(struct pd_keyed *t)
{
    pd_free(t->slot);
    *t = (struct pd_keyed){ 0 };
}
