/* Any bytes as a record: a decoder refuses them, or what it took is encoded, decoded and encoded to the same bytes, and survives JSON. */
#include <stdlib.h>
#include <string.h>
#include "../../libcommon/wire/json.h"
#include "../unit/samples.h"

static void same(const struct pd_buf *a, const struct pd_buf *b)
{
    if (a->n != b->n || memcmp(a->p, b->p, a->n))
        abort();
}

/* A route inside a request holds to the same. */
static void route(const struct pd_request *q)
{
    struct pd_arena a = { 0 };
    struct pd_buf one = { 0 }, two = { 0 };
    struct pd_routing r;
    struct pd_err e = { 0 };
    if (q->route.p && !pd_routing_decode(q->route, &a, &r, &e)) {
        if (pd_routing_encode(&r, &one, &e) || pd_routing_decode((struct pd_bin){ one.p, one.n }, &a, &r, &e) || pd_routing_encode(&r, &two, &e))
            abort();
        same(&one, &two);
    }
    pd_buf_free(&one);
    pd_buf_free(&two);
    pd_arena_free(&a);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct pd_buf in = { 0 }, one = { 0 }, two = { 0 }, json = { 0 }, back = { 0 };
    struct pd_err e = { 0 };
    pd_buf_add(&in, data, n, NULL);
    /* A mutated descriptor would always fail at its sum: put it right. */
    if (n > 14 && !memcmp(in.p + n - 14, "\xa3sum\xc4\x08", 6))
        pd_put_be64(in.p + n - 8, pd_xxh3(in.p, n - 14, 0));
    if (!n || reencode(in.p, n, &one, &e))
        goto out;
    if (reencode(one.p, one.n, &two, &e))
        abort();
    same(&one, &two);
    if (pd_msgpack_to_json(one.p, one.n, &json, &e) || pd_json_to_msgpack((char *)json.p, json.n, &back, &e))
        abort();
    same(&one, &back);
    struct pd_arena a = { 0 };
    struct pd_request r;
    if (pd_kind_of(one.p, one.n) == PD_K_REQUEST && !pd_request_decode(one.p, one.n, &a, &r, &e)) {
        route(&r);
        pd_request_resolve(&r, 0, &e);
    }
    pd_arena_free(&a);
out:
    pd_buf_free(&in);
    pd_buf_free(&one);
    pd_buf_free(&two);
    pd_buf_free(&json);
    pd_buf_free(&back);
    return 0;
}
