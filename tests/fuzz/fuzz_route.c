/* Bytes as a route record, and as an outcome: what is read can be chosen by and told again, and what is told then comes back by itself, byte by byte. */
#include <stdlib.h>
#include <string.h>
#include "../../libcommon/route/choose.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    struct pd_arena a = { 0 };
    struct pd_buf one = { 0 }, two = { 0 };
    struct pd_err e = { 0 };
    struct pd_outcome_rec o;
    if (pd_route_replay(p, n, NULL, &a, NULL, NULL, &one, &e) == 0) {
        if (pd_route_replay(one.p, one.n, NULL, &a, NULL, NULL, &two, &e) || one.n != two.n || memcmp(one.p, two.p, one.n))
            abort();
    } else if (!e.msg[0])
        abort();
    one.n = two.n = 0;
    if (pd_outcome_decode(p, n, &a, &o, &e) == 0 && (pd_outcome_encode(&o, &one, &e) || pd_outcome_decode(one.p, one.n, &a, &o, &e)))
        abort();
    pd_arena_free(&a);
    pd_buf_free(&one);
    pd_buf_free(&two);
    return 0;
}
