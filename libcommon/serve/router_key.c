/* Idempotency keys: what a run with one has brought, for who asks again. */
#include "../base/clock.h"
#include "router_in.h"

enum { MAX_BYTES = 64 << 20 };  /* of all that is kept; past it the oldest that has ended goes first */

static void key_of(struct pd_str key, uint8_t out[16])
{
    uint64_t h = pd_xxh3(key.p, key.n, 0);
    pd_put_be64(out, h);
    pd_put_be64(out + 8, pd_xxh3(key.p, key.n, h));
}

struct pd_rt_key *pd_rt_key_find(struct pd_router *r, struct pd_str key)
{
    uint8_t h[16];
    key_of(key, h);
    struct pd_rt_key *k = pd_keyed_find(&r->keys, h, sizeof h);
    return k && k->n_key == key.n && !memcmp(k->key, key.p, key.n) ? k : NULL;
}

static void drop(struct pd_router *r, struct pd_rt_key *k)
{
    if (k->run)
        k->run->key = NULL;
    r->key_bytes -= k->n_key + k->tokens.n + k->results.n;
    pd_keyed_remove(&r->keys, k);
    pd_buf_free(&k->tokens);
    pd_buf_free(&k->results);
    pd_free(k->key);
    pd_free(k);
}

int pd_rt_key_new(struct pd_router *r, struct pd_str key, struct pd_rt_run *run, struct pd_err *e)
{
    uint8_t h[16];
    key_of(key, h);
    struct pd_rt_key *k = pd_keyed_find(&r->keys, h, sizeof h);
    if (k)                      /* another key of the same hash: it is the older one */
        drop(r, k);
    if (!(k = pd_calloc(1, sizeof *k, "an idempotency key", e)) || !(k->key = pd_strndup(key.p, key.n, e)) ||
        pd_keyed_add(&r->keys, k, h, sizeof h, e) < 0) {
        if (k)
            pd_free(k->key);
        pd_free(k);
        return PD_ENOMEM;
    }
    k->n_key = key.n;
    r->key_bytes += key.n;
    k->run = run;
    k->body_hash = run->body_hash;
    memcpy(k->name, run->name, sizeof k->name);
    run->key = k;
    return 0;
}

void pd_rt_key_log(struct pd_router *r, struct pd_rt_run *run, const void *rec, size_t n, bool token)
{
    struct pd_rt_key *k = run->key, *old;
    if (!k)
        return;
    if (pd_buf_add(token ? &k->tokens : &k->results, rec, n, NULL) < 0) {
        drop(r, k);             /* it cannot be answered again as it was */
        return;
    }
    r->key_bytes += n;
    for (struct pd_node *p = r->keys.first, *next; p && r->key_bytes > MAX_BYTES; p = next) {
        next = p->next;
        old = (struct pd_rt_key *)p;
        if (!old->run)
            drop(r, old);
    }
}

void pd_rt_key_restart(struct pd_router *r, struct pd_rt_run *run)
{
    if (!run->key)
        return;
    r->key_bytes -= run->key->tokens.n + run->key->results.n;
    run->key->tokens.n = run->key->results.n = 0;
}

void pd_rt_key_end(struct pd_router *r, struct pd_rt_run *run, bool keep)
{
    struct pd_rt_key *k = run->key;
    if (!k)
        return;
    k->run = NULL;
    run->key = NULL;
    k->expires_us = pd_mono_us() + r->o.key_ttl_us;
    if (keep)
        pd_keyed_to_end(&r->keys, k);
    else
        drop(r, k);
}

void pd_rt_key_sweep(struct pd_router *r, int64_t now)
{
    for (struct pd_node *p = r->keys.first, *next; p; p = next) {
        struct pd_rt_key *k = (struct pd_rt_key *)p;
        next = p->next;
        if (!k->run && k->expires_us <= now)
            drop(r, k);
        else if (!k->run)
            break;              /* those after it ended later */
    }
}

void pd_rt_keys_free(struct pd_router *r)
{
    while (r->keys.first)
        drop(r, (struct pd_rt_key *)r->keys.first);
    pd_keyed_free(&r->keys);
}
