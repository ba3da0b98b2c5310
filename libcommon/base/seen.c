#include "hash.h"
#include "mem.h"
#include "seen.h"

/* Open addressing; 0 is an empty slot. */
static uint64_t key_of(const char *run)
{
    uint64_t h = pd_xxh3(run, strlen(run), 0);
    return h ? h : 1;
}

static size_t place(const uint64_t *slot, size_t cap, uint64_t key)
{
    size_t i = key & (cap - 1);
    while (slot[i] && slot[i] != key)
        i = (i + 1) & (cap - 1);
    return i;
}

bool pd_seen_has(const struct pd_seen *s, const char *run)
{
    return s->cap && s->slot[place(s->slot, s->cap, key_of(run))];
}

static int grow(struct pd_seen *s, struct pd_err *e)
{
    size_t cap = s->cap ? s->cap * 2 : 64;
    uint64_t *slot = pd_calloc(cap, sizeof *slot, "the runs of a stream", e);
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

int pd_seen_add(struct pd_seen *s, const char *run, struct pd_err *e)
{
    int rc = s->n + s->n / 4 >= s->cap ? grow(s, e) : 0;    /* at most four fifths full */
    if (rc < 0)
        return rc;
    uint64_t key = key_of(run), *at = &s->slot[place(s->slot, s->cap, key)];
    if (*at)
        return 1;
    *at = key;
    s->n++;
    return 0;
}

void pd_seen_free(struct pd_seen *s)
{
    pd_free(s->slot);
    *s = (struct pd_seen){ 0 };
}
