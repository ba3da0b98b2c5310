#include "kvring.h"

int pd_kvring_open(struct pd_kvring *r, uint32_t records, size_t max_bytes, struct pd_err *e)
{
    *r = (struct pd_kvring){ .cap = records, .max_bytes = max_bytes };
    r->slot = pd_calloc(records, sizeof *r->slot, "ring of KV events", e);
    return r->slot ? 0 : PD_ENOMEM;
}

static void drop_oldest(struct pd_kvring *r)
{
    struct pd_kvring_slot *s = &r->slot[r->head];
    r->bytes -= s->n;
    pd_free(s->p);
    *s = (struct pd_kvring_slot){ NULL, 0 };
    r->head = (r->head + 1) % r->cap;
    r->n--;
}

void pd_kvring_close(struct pd_kvring *r)
{
    while (r->n)
        drop_oldest(r);
    pd_free(r->slot);
    r->slot = NULL;
}

void pd_kvring_add(struct pd_kvring *r, struct pd_kvevent *v)
{
    struct pd_buf b = { 0 };
    v->seq = ++r->last;
    if (pd_kvevent_encode(v, &b, NULL) < 0) {
        pd_buf_free(&b);
        while (r->n)
            drop_oldest(r);
        return;
    }
    while (r->n && (r->n == r->cap || r->bytes + b.n > r->max_bytes))
        drop_oldest(r);
    r->slot[(r->head + r->n++) % r->cap] = (struct pd_kvring_slot){ b.p, b.n };
    r->bytes += b.n;
}

const struct pd_kvring_slot *pd_kvring_at(const struct pd_kvring *r, uint64_t seq)
{
    uint64_t first = r->last - r->n + 1;
    return seq >= first && seq <= r->last ? &r->slot[(r->head + (seq - first)) % r->cap] : NULL;
}
