/* Workers' records and routes: what comes back, and what is refused by name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>
#include "../../libcommon/wire/json.h"
#include "samples.h"

static void routes_come_back(void **state)
{
    struct pd_routing in = sample_routing(), late = resumed_routing(), r;
    struct pd_arena a = { 0 };
    struct pd_buf b = { 0 };
    struct pd_err e = { 0 };
    assert_int_equal(pd_routing_encode(&in, &b, &e), 0);
    assert_int_equal(pd_routing_decode((struct pd_bin){ b.p, b.n }, &a, &r, &e), 0);
    memset(b.p, 0, b.n);        /* what was decoded does not lie there */
    assert_memory_equal(r.op, in.op, sizeof r.op);
    assert_string_equal(r.mode, "remote");
    assert_true(r.has_p && r.early && pd_str_eq(r.p.worker, "prefill@host:16") && pd_str_eq(r.p.at, "unix:/run/pd/p0") && pd_str_eq(r.d.at, "unix:/run/pd/d0"));
    assert_true(!r.fallback.p && !r.has_resume && r.extra.pairs == 1);
    b.n = 0;
    assert_int_equal(pd_routing_encode(&late, &b, &e), 0);
    assert_int_equal(pd_routing_decode((struct pd_bin){ b.p, b.n }, &a, &r, &e), 0);
    assert_true(!r.has_p && !r.early && pd_str_eq(r.fallback, "migrated") && r.has_resume && r.n_resume == 3);
    assert_memory_equal(r.resume, sample_ids, 12);
    assert_true(!r.waited_us && !memmem(b.p, b.n, "waited", 6));
    late.waited_us = 12345678;
    late.n_resume = 0;          /* migrated before a token was out: not the same as no resume */
    b.n = 0;
    assert_int_equal(pd_routing_encode(&late, &b, &e), 0);
    assert_int_equal(pd_routing_decode((struct pd_bin){ b.p, b.n }, &a, &r, &e), 0);
    assert_true(r.has_resume && !r.n_resume && r.waited_us == 12345678);
    pd_arena_free(&a);
    pd_buf_free(&b);
}

static void route_refused(const char *json, const char *why)
{
    struct pd_arena a = { 0 };
    struct pd_buf b = { 0 };
    struct pd_routing r;
    struct pd_err e = { 0 };
    if (pd_json_to_msgpack(json, strlen(json), &b, &e))
        fail_msg("%s: %s", json, e.msg);
    int rc = pd_routing_decode((struct pd_bin){ b.p, b.n }, &a, &r, &e);
    if (rc != PD_EFAIL || !strstr(e.msg, why))
        fail_msg("%s: not refused with '%s' but %d '%s'", json, why, rc, e.msg);
    pd_arena_free(&a);
    pd_buf_free(&b);
}

#define OP "\"op\":{\"$b64\":\"b3BvcG9wb3BvcG9wb3BvAA==\"},\"policy\":\"fixed\","
#define D "\"d\":{\"worker\":\"d\",\"at\":\"unix:/d\"}"

static void bad_routes_are_told(void **state)
{
    struct pd_arena a = { 0 };
    struct pd_routing r = sample_routing();
    struct pd_buf b = { 0 };
    struct pd_err e = { 0 };
    assert_int_equal(pd_routing_decode((struct pd_bin){ NULL, 0 }, &a, &r, &e), PD_EFAIL);
    route_refused("{\"reason\":\"local\"}", "route: op is missing");
    route_refused("{\"op\":{\"$b64\":\"AAAA\"}}", "op must be bin of 16 bytes, not of 3");
    route_refused("{" OP "\"mode\":\"local\"}", "route: d is missing");
    route_refused("{" OP "\"mode\":\"local\",\"d\":null}", "d");
    route_refused("{" OP "\"mode\":\"local\",\"d\":{\"worker\":\"d\"}}", "route: d: at is missing");
    route_refused("{" OP "\"mode\":\"far\"," D "}", "route: mode 'far' is not known");
    route_refused("{" OP "\"mode\":\"remote\",\"p\":null," D "}", "mode is remote and p is missing");
    route_refused("{" OP "\"mode\":\"local\",\"p\":{\"worker\":\"p\",\"at\":\"unix:/p\"}," D "}", "mode is local and p is given");
    route_refused("{" OP "\"mode\":\"local\"," D ",\"waited_us\":-1}", "waited_us is -1: 0 to");
    route_refused("{" OP "\"mode\":\"local\"," D ",\"waited_us\":9000000000000000000}", "waited_us is 9000000000000000000: 0 to");
    route_refused("{" OP "\"mode\":\"local\"," D ",\"resume\":[1,2]}", "resume must be bin of int32");
    route_refused("{" OP "\"mode\":\"local\"," D ",\"resume\":{\"$b64\":\"AAAA\"}}", "resume: bin of 3 bytes");
    route_refused("{" OP "\"mode\":\"local\"," D ",\"resume\":{\"$b64\":\"/////w==\"}}", "resume[0] = -1");
    r = sample_routing();
    r.has_p = false;
    assert_int_equal(pd_routing_encode(&r, &b, &e), PD_EFAIL);
    assert_int_equal(b.n, 0);
    pd_buf_free(&b);
}

static void workers_come_back(void **state)
{
    struct pd_worker_rec in = sample_worker(), w;
    struct pd_arena a = { 0 };
    struct pd_buf b = { 0 };
    struct pd_err e = { 0 };
    assert_int_equal(pd_worker_rec_encode(&in, &b, &e), 0);
    assert_int_equal(pd_kind_of(b.p, b.n), PD_K_WORKER);
    assert_int_equal(pd_worker_rec_decode(b.p, b.n, &a, &w, &e), 0);
    memset(b.p, 0, b.n);
    assert_true(pd_str_eq(w.worker, "decode@host:17") && !strcmp(w.role, "both") && !strcmp(w.state, "ready") && !strcmp(w.prefer, "prefill") && pd_str_eq(w.listen, "unix:/run/pd/d0"));
    assert_true(w.n_adapters == 2 && pd_str_eq(w.adapters[1], "fine@2") && w.n_via == 2 && pd_str_eq(w.via[0], "shm") && w.n_caps == 3);
    assert_memory_equal(&w.load, &in.load, sizeof w.load);
    assert_memory_equal(&w.capacity, &in.capacity, sizeof w.capacity);
    assert_memory_equal(&w.parallel, &in.parallel, sizeof w.parallel);
    assert_true(w.has_life && w.has_boot && w.pid == 17 && w.beat_us == 1000000 && w.seq == 42 && w.epoch == 3 && w.extra.pairs == 1);
    assert_memory_equal(w.fp_sha, in.fp_sha, sizeof w.fp_sha);
    in.listen = (struct pd_str){ NULL, 0 };     /* as --describe has it */
    in.has_life = in.has_boot = false;
    in.pid = 0;
    in.beat_us = 0;
    in.seq = 0;
    in.n_adapters = 0;
    *in.prefer = 0;
    b.n = 0;
    assert_int_equal(pd_worker_rec_encode(&in, &b, &e), 0);
    assert_int_equal(pd_worker_rec_decode(b.p, b.n, &a, &w, &e), 0);
    assert_true(!w.listen.p && !w.has_life && !w.has_boot && !w.pid && !w.beat_us && !w.seq && !w.n_adapters && !*w.prefer);
    pd_arena_free(&a);
    pd_buf_free(&b);
}

static void worker_refused(const struct pd_worker_rec *w, const char *why)
{
    struct pd_arena a = { 0 };
    struct pd_buf b = { 0 };
    struct pd_worker_rec r;
    struct pd_err e = { 0 };
    assert_int_equal(pd_worker_rec_encode(w, &b, &e), 0);
    int rc = pd_worker_rec_decode(b.p, b.n, &a, &r, &e);
    if (rc != PD_ECORRUPT || !strstr(e.msg, why))
        fail_msg("not refused with '%s' but %d '%s'", why, rc, e.msg);
    pd_arena_free(&a);
    pd_buf_free(&b);
}

static void bad_workers_are_told(void **state)
{
    struct pd_worker_rec w;
    struct pd_buf b = { 0 };
    struct pd_err e = { 0 };
#define BAD(change, why) (w = sample_worker(), change, worker_refused(&w, why))
    BAD(strcpy(w.role, "cook"), "role 'cook' is not known");
    BAD(strcpy(w.state, "asleep"), "state 'asleep' is not known");
    BAD(strcpy(w.prefer, "both"), "prefer 'both' is not known here (one of prefill, decode is)");
    BAD(w.worker.n = 0, "name is empty");
    BAD(w.fp_sha[3] ^= 1, "fingerprint.sha is not the SHA-256");
    BAD(w.capacity.block_size = 32, "block_size 32");
    BAD(w.capacity.block_size = w.layout.block_size = 0, "block_size 0");
    BAD(w.beat_us = -5, "beat_us -5");
#undef BAD
    w = sample_worker();
    w.fp_fields = (struct pd_bin){ NULL, 0 };
    assert_int_equal(pd_worker_rec_encode(&w, &b, &e), PD_EFAIL);
    assert_non_null(strstr(e.msg, "fingerprint.fields is missing"));
    pd_buf_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(routes_come_back), cmocka_unit_test(bad_routes_are_told), cmocka_unit_test(workers_come_back),
                                        cmocka_unit_test(bad_workers_are_told) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
