#include "hash.h"
#include "mem.h"
#include "seen.h"

/* Open addressing; 0 is an empty slot. When the young set is full it becomes the old one, and the old one is forgotten. */
static uint64_t hash_of(const void *key, size_t n)
{
    uint64_t h = pd_xxh3(key, n, 0);
    return h ? h : 1;
}

static size_t place(const uint64_t *slot, size_t cap, uint64_t h)
{
    size_t i = h & (cap - 1);
    while (slot[i] && slot[i] != h)
        i = (i + 1) & (cap - 1);
    return i;
}

static bool holds(const struct pd_seen_set *s, uint64_t h) { return s->cap && s->slot[place(s->slot, s->cap, h)]; }

bool pd_seen_has(const struct pd_seen *s, const void *key, size_t n)
{
    uint64_t h = hash_of(key, n);
    return holds(&s->young, h) || holds(&s->old, h);
}

static int grow(struct pd_seen_set *s, struct pd_err *e)
{
    size_t cap = s->cap ? s->cap * 2 : 64;
    uint64_t *slot = pd_calloc(cap, sizeof *slot, "what a stream brought", e);
    if (!slot)
        return PD_ENOMEM;
    for (size_t i = 0; i < s->cap; i++)
        if (s->slot[i])
            slot[place(slot, cap, s->slot[i])] = s->slot[i];
    pd_free(s->slot);
    s->slot = slot;
    s->cap = cap;
    return 0;
}

int pd_seen_add(struct pd_seen *s, const void *key, size_t n, struct pd_err *e)
{
    if (pd_seen_has(s, key, n))
        return 1;
    if (s->young.n == PD_SEEN_LAST) {
        pd_free(s->old.slot);
        s->old = s->young;
        s->young = (struct pd_seen_set){ 0 };
    }
    int rc = s->young.n + s->young.n / 4 >= s->young.cap ? grow(&s->young, e) : 0;     /* at most four fifths full */
    if (rc < 0)
        return rc;
    uint64_t h = hash_of(key, n);
    s->young.slot[place(s->young.slot, s->young.cap, h)] = h;
    s->young.n++;
    return 0;
}

void pd_seen_free(struct pd_seen *s)
{
    pd_free(s->young.slot);
    pd_free(s->old.slot);
    *s = (struct pd_seen){ 0 };
}
