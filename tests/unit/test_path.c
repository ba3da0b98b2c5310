/* route/path: what a path is by the topology, and what transfers make of it. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdio.h>
#include "../../libcommon/route/path.h"

enum { S = 1000000, MIB = 1 << 20 };
static const char racks[] =
    "class rack latency 100us bandwidth 1GB/s\n"
    "domain rackA rack\ndomain hostA1 pcie in rackA\ndomain hostA2 pcie in rackA\ndomain rackB rack\ndomain hostB1 pcie in rackB\n"
    "path hostA1 hostA2 latency 10us bandwidth 500MB/s jitter 3ms cost 7ms\n";
static uint64_t rng = 7;
static double uniform(void) { return (double)((rng = rng * 6364136223846793005u + 1442695040888963407u) >> 11) / 9007199254740992.0; }

static struct pd_topology *topology(const char *text)
{
    struct pd_topology *t = NULL;
    struct pd_err e;
    assert_int_equal(pd_topology_parse(text, strlen(text), "topo", &t, &e), 0);
    return t;
}

static struct pd_paths *new(const struct pd_paths_opts *o, const struct pd_topology *t)
{
    struct pd_paths *x = NULL;
    struct pd_err e;
    assert_int_equal(pd_paths_new(o, &x, &e), 0);
    pd_paths_set_topology(x, t);
    return x;
}

static struct pd_path_end end_of(const struct pd_paths *x, const char *at, const char *domain)
{
    return pd_path_end_of(x, at, (struct pd_str){ at, strlen(at) }, (struct pd_str){ domain, strlen(domain) });
}

static bool go(struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, enum pd_went w, uint64_t bytes, int64_t us, int64_t now)
{
    return pd_paths_end(x, p, d, pd_paths_begin(x, p, d, now), w, "timeout", bytes, us, now);
}

static struct pd_path_view view(struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, uint64_t bytes, int64_t now)
{
    struct pd_path_view v;
    pd_paths_view(x, p, d, bytes, now, &v);
    return v;
}
struct pair { uint64_t p, d; };
struct pairs { struct pair at[8]; uint32_t n, most; };
static bool one_more(void *ctx, uint64_t p, uint64_t d)
{
    struct pairs *o = ctx;
    o->at[o->n++] = (struct pair){ p, d };
    return o->n < o->most;
}
static uint32_t special(const struct pd_paths *x, struct pairs *o, uint32_t most)
{
    *o = (struct pairs){ .most = most };
    pd_paths_special(x, one_more, o);
    return o->n;
}
static double p50_of(const struct pd_path_view *v, double bytes) { return v->latency.p50 + v->kib_ns.p50 * bytes / 1024 / 1000; }
static double p95_of(const struct pd_path_view *v, double bytes) { return v->latency.p95 + v->kib_ns.p95 * bytes / 1024 / 1000; }

static void without_a_file(void **state)
{
    struct pd_paths *x = new(&(struct pd_paths_opts){ 0 }, NULL);
    struct pd_path_end p = end_of(x, "unix:p", "local"), d = end_of(x, "unix:d", "local"), far = end_of(x, "unix:e", "rack-2"), none = end_of(x, "unix:f", "");
    struct pd_path_view v = view(x, &p, &d, MIB, 0);
    assert_true(v.near == PD_NEAR_LOCAL && !v.placed && v.x == PD_PATH_MAY && v.age_us == -1 && v.health == 1 && v.latency.cold && !v.active && !v.breaker);
    assert_true(p95_of(&v, MIB) == 4 * p50_of(&v, MIB));        /* wide, as nothing is known */
    assert_int_equal(view(x, &p, &far, MIB, 0).near, PD_NEAR_CROSS);
    assert_int_equal(view(x, &none, &d, MIB, 0).near, PD_NEAR_CROSS);
    none = pd_path_end_of(x, "unix:f", (struct pd_str){ NULL, 0 }, (struct pd_str){ NULL, 0 });
    assert_int_equal(view(x, &none, &none, MIB, 0).near, PD_NEAR_CROSS);        /* who says nothing is near to nobody */
    pd_paths_free(x);
}

static void by_the_file(void **state)
{
    struct pd_topology *t = topology(racks);
    struct pd_paths *x = new(&(struct pd_paths_opts){ 0 }, t);
    struct pd_path_end a1 = end_of(x, "unix:1", "hostA1"), a2 = end_of(x, "unix:2", "hostA2"), b1 = end_of(x, "unix:3", "hostB1"), lost = end_of(x, "unix:4", "local");
    struct pd_path_view v = view(x, &a1, &a2, MIB, 0);
    assert_true(v.near == PD_NEAR_RACK && v.placed && v.penalty_us == 7000 && v.latency.p50 == 10 && v.latency.p95 == 3010 && v.latency.cold);
    assert_true(fabs(p50_of(&v, 500000) - 1010) < 1 && fabs(p95_of(&v, 500000) - 4010) < 1);    /* who says all three is believed */
    v = view(x, &a1, &b1, MIB, 0);
    assert_true(v.near == PD_NEAR_CROSS && v.placed && v.penalty_us == 0);
    v = view(x, &a1, &lost, MIB, 0);
    assert_true(v.near == PD_NEAR_CROSS && !v.placed);
    pd_paths_free(x);
    pd_topology_free(t);
}

static void transfers_teach(void **state)
{
    struct pd_topology *t = topology(racks), *moved = topology("domain hostA1 pcie\ndomain hostB1 pcie\npath hostA1 hostB1 rack bandwidth 9GB/s\n");
    struct pd_paths *x = new(&(struct pd_paths_opts){ 0 }, t);
    struct pd_path_end a1 = end_of(x, "unix:1", "hostA1"), b1 = end_of(x, "unix:3", "hostB1"), b2 = end_of(x, "unix:5", "hostB1"), a2 = end_of(x, "unix:2", "hostA2");
    int64_t now = 5 * S, over = 0, n = 0;
    for (int i = 0; i < 400; i++) {     /* it is far slower than a cross path is thought to be */
        double bytes = exp(log(1e5) + uniform() * log(300)), us = (2000 + bytes / 100) * (0.9 + 0.2 * uniform());
        struct pd_path_view v = view(x, &a1, &b1, (uint64_t)bytes, now);
        if (i >= 100) {
            n++;
            over += us > p95_of(&v, bytes);
            assert_true(fabs(p50_of(&v, bytes) / (2000 + bytes / 100) - 1) < 0.15);
        }
        go(x, &a1, &b1, PD_WENT_WELL, (uint64_t)bytes, (int64_t)us, now += 1000);
    }
    assert_in_range(over, 0, n / 10);
    struct pd_path_view v = view(x, &a1, &b1, MIB, now);
    assert_true(!v.latency.cold && !v.latency.stale && v.age_us == 0 && v.health > 0.9);
    v = view(x, &a1, &b2, MIB, now);    /* another worker there: the same domains, another pair */
    assert_true(!v.latency.cold && fabs(p50_of(&v, MIB) / (2000 + MIB / 100) - 1) < 0.15 && v.age_us == -1);
    v = view(x, &a2, &b1, MIB, now);    /* other domains, the same class */
    assert_true(!v.latency.cold && fabs(p50_of(&v, MIB) / (2000 + MIB / 100) - 1) < 0.2);
    v = view(x, &a1, &a2, MIB, now);
    assert_true(v.latency.cold && fabs(p50_of(&v, 500000) - 1010) < 1);
    v = view(x, &a1, &b1, MIB, now + 601ll * S);
    assert_true(v.latency.stale && !view(x, &a1, &b1, MIB, now + 599ll * S).latency.stale);
    pd_paths_set_topology(x, moved);    /* what was seen counts for more than what is said */
    assert_int_equal(view(x, &a1, &b1, MIB, now).near, PD_NEAR_CROSS);  /* ends of before are nowhere */
    assert_true(!pd_path_end_good(&a1, pd_paths_turn(x)));
    a1 = end_of(x, "unix:1", "hostA1");
    b1 = end_of(x, "unix:3", "hostB1");
    v = view(x, &a1, &b1, MIB, now);
    assert_true(v.near == PD_NEAR_RACK && v.age_us == -1 && fabs(p50_of(&v, MIB) / (2000 + MIB / 100) - 1) < 0.15);
    for (int i = 0; i < 60; i++)
        pd_paths_sync(x, &a1, &b1, 4000, now);
    assert_true(fabs(view(x, &a1, &b1, MIB, now).sync.p50 / 4000 - 1) < 0.05);
    pd_paths_free(x);
    pd_topology_free(t);
    pd_topology_free(moved);
}

static void failures_count(void **state)
{
    struct pd_paths *x = new(&(struct pd_paths_opts){ .breaker = { .jitter = 1e-12 } }, NULL);
    struct pd_path_end p = end_of(x, "unix:p", "a"), d = end_of(x, "unix:d", "a"), e = end_of(x, "unix:e", "a"), far = end_of(x, "unix:f", "b");
    struct pairs pairs;
    char text[100];
    struct pd_path_ticket t = pd_paths_begin(x, &p, &d, S);
    assert_true(view(x, &p, &d, 1, S).active == 1 && view(x, &p, &e, 1, S).active == 1 && view(x, &far, &d, 1, S).active == 0);
    assert_false(pd_paths_end(x, &p, &d, t, PD_WENT_WRONG, "timeout", 0, 500000, S));
    struct pd_path_view v = view(x, &p, &d, 1, S);
    assert_true(fabs(v.health - 0.9) < 1e-9 && fabs(v.penalty_us - 50000) < 1e-6 && v.active == 0 && v.x == PD_PATH_MAY);
    go(x, &p, &d, PD_WENT_WRONG, 0, 0, S);
    assert_true(go(x, &p, &d, PD_WENT_WRONG, 0, 0, S));
    v = view(x, &p, &d, 1, S + 300000);
    assert_int_equal(v.x, PD_PATH_BREAKER);
    assert_string_equal(pd_path_text(x, &v, S + 300000, text, sizeof text), "breaker open 0.7s");
    assert_string_equal(pd_path_state(&v, S + 300000), "open");
    assert_int_equal(view(x, &p, &e, 1, S).x, PD_PATH_MAY);
    assert_int_equal(view(x, &d, &p, 1, S).x, PD_PATH_MAY);     /* the other way is another path */
    assert_true(special(x, &pairs, 8) == 1 && pairs.at[0].p == p.key && pairs.at[0].d == d.key);
    pd_paths_renew(x, &e, S);
    assert_int_equal(view(x, &p, &d, 1, S).x, PD_PATH_BREAKER);
    pd_paths_renew(x, &d, S);
    v = view(x, &p, &d, 1, S);
    assert_int_equal(v.x, PD_PATH_MAY);
    assert_string_equal(pd_path_state(&v, S), "half_open");
    go(x, &p, &d, PD_WENT_WELL, 0, 0, S);
    assert_true(go(x, &p, &d, PD_WENT_WELL, 0, 0, S));
    assert_null(pd_path_state((v = view(x, &p, &d, 1, S), &v), S));
    assert_true(special(x, &pairs, 8) == 1 && pd_paths_breakers(x) == 0);    /* it has failed too lately to be as others are */
    for (int i = 0; i < 20; i++)
        go(x, &p, &d, PD_WENT_WELL, 0, 0, S);
    assert_int_equal(special(x, &pairs, 8), 0);
    pd_paths_trip(x, &p, &e, "integrity", S);
    pd_paths_trip(x, &p, &e, "integrity", S);
    assert_int_equal(special(x, &pairs, 8), 1);
    assert_int_equal(view(x, &p, &e, 1, S).x, PD_PATH_BREAKER);
    for (int i = 0; i < 200; i++)
        go(x, &p, &d, PD_WENT_WELL, 0, 0, 2 * S);
    v = view(x, &p, &d, 1, 2 * S);
    assert_true(v.health > 0.99 && v.penalty_us < 1);
    pd_paths_free(x);
}

static void rules_and_holds(void **state)
{
    struct pd_topology *t = topology(racks);
    struct pd_ledger *l = NULL;
    struct pd_ledger_read was;
    struct pd_err e;
    char text[100];
    assert_int_equal(pd_ledger_open(NULL, &l, &was, &e), 0);
    struct pd_paths *x = new(&(struct pd_paths_opts){ .rule = { PD_DOMAIN_REQUIRE, PD_NEAR_RACK }, .ledger = l }, t);
    struct pd_path_end a1 = end_of(x, "unix:1", "hostA1"), a2 = end_of(x, "unix:2", "hostA2"), b1 = end_of(x, "unix:3", "hostB1"), lost = end_of(x, "unix:4", "local");
    struct pd_path_view v = view(x, &b1, &a1, 1, 0);
    assert_true(v.x == PD_PATH_DOMAIN && !v.second);
    assert_string_equal(pd_path_text(x, &v, 0, text, sizeof text), "domain required rackA");
    v = view(x, &a1, &lost, 1, 0);
    assert_string_equal(pd_path_text(x, &v, 0, text, sizeof text), "domain required rack, and the decode worker is in none");
    assert_int_equal(view(x, &a1, &a2, 1, 0).x, PD_PATH_MAY);
    assert_int_equal(pd_ledger_hold(l, "unix:1", "unix:2", "integrity: block 3", 0, &e), 0);
    v = view(x, &a1, &a2, 1, 0);
    assert_true(v.x == PD_PATH_HOLD && !strcmp(pd_path_state(&v, 0), "hold"));
    assert_string_equal(pd_path_text(x, &v, 0, text, sizeof text), "hold: integrity: block 3");
    assert_int_equal(view(x, &a2, &a1, 1, 0).x, PD_PATH_MAY);
    struct pairs pairs;
    pd_paths_trip(x, &a1, &a2, "integrity", 0);
    pd_paths_trip(x, &a2, &a1, "integrity", 0);
    assert_true(special(x, &pairs, 8) == 3 && pairs.at[0].p == a1.key && pairs.at[0].d == a2.key && pairs.at[1].d == a2.key && pairs.at[2].d == a1.key);
    assert_int_equal(special(x, &pairs, 1), 1);
    pd_paths_renew(x, &a1, 0);
    pd_ledger_release(l, "unix:1", "unix:2", "fixed", 0);
    assert_int_equal(view(x, &a1, &a2, 1, 0).x, PD_PATH_MAY);
    pd_paths_free(x);
    x = new(&(struct pd_paths_opts){ .rule = { PD_DOMAIN_PREFER, PD_NEAR_RACK } }, t);
    assert_true((v = view(x, &b1, &a1, 1, 0), v.x == PD_PATH_MAY && v.second));
    assert_true((v = view(x, &a2, &a1, 1, 0), v.x == PD_PATH_MAY && !v.second));
    pd_paths_free(x);
    pd_ledger_free(l);
    pd_topology_free(t);
}

static void memory_is_bounded(void **state)
{
    struct pd_paths *x = new(&(struct pd_paths_opts){ .most = 8, .breaker = { .failures = 1 } }, NULL);
    struct pd_path_end p = end_of(x, "unix:p", "a"), bad = end_of(x, "unix:bad", "a"), busy = end_of(x, "unix:busy", "a");
    struct pd_path_ticket t = pd_paths_begin(x, &p, &busy, S);
    go(x, &p, &bad, PD_WENT_WRONG, 0, 0, S);
    for (int i = 0; i < 1000; i++) {
        char at[32];
        snprintf(at, sizeof at, "unix:%d", i);
        struct pd_path_end d = end_of(x, at, at);
        go(x, &p, &d, PD_WENT_WELL, MIB, 2000, S);
    }
    assert_int_equal(view(x, &p, &bad, 1, S).x, PD_PATH_BREAKER);       /* neither what is open nor what is in use is forgotten */
    assert_true(view(x, &p, &busy, 1, S).active == 1 && pd_paths_end(x, &p, &busy, t, PD_WENT_WRONG, "timeout", 0, 0, S));
    assert_int_equal(view(x, &p, &busy, 1, S).active, 0);
    struct pd_path_end d = end_of(x, "unix:1", "1");
    assert_int_equal(view(x, &p, &d, 1, S).age_us, -1);
    pd_paths_free(x);
}

/* Who is gone leaves nothing behind; and of many that are not as others those that must not be used are told first. */
static void what_is_gone_is_forgotten(void **state)
{
    struct pd_ledger *l = NULL;
    struct pd_ledger_read was;
    struct pd_err err;
    struct pairs pairs;
    assert_int_equal(pd_ledger_open(NULL, &l, &was, &err), 0);
    struct pd_paths *x = new(&(struct pd_paths_opts){ .most = 8, .breaker = { .failures = 3 }, .ledger = l }, NULL);
    struct pd_path_end p = end_of(x, "unix:p", "a"), gone = end_of(x, "unix:gone", "a"), held = end_of(x, "unix:held", "a");
    for (int i = 0; i < 4; i++) {
        char at[32];
        snprintf(at, sizeof at, "unix:%d", i);
        struct pd_path_end d = end_of(x, at, "a");
        go(x, &p, &d, PD_WENT_WRONG, 0, 0, S);
    }
    for (int i = 0; i < 3; i++)
        go(x, &gone, &p, PD_WENT_WRONG, 0, 0, S);
    assert_int_equal(pd_ledger_hold(l, "unix:p", "unix:held", "integrity: block 3", 0, &err), 0);
    assert_true(special(x, &pairs, 8) == 6 && pairs.at[0].p == p.key && pairs.at[0].d == held.key && pairs.at[1].p == gone.key && pairs.at[1].d == p.key);
    assert_int_equal(pd_paths_breakers(x), 1);
    struct pd_path_ticket t = pd_paths_begin(x, &p, &gone, S);
    pd_paths_forget(x, "unix:gone");
    assert_true(special(x, &pairs, 8) == 5 && pd_paths_breakers(x) == 0);
    assert_false(pd_paths_end(x, &p, &gone, t, PD_WENT_WRONG, "timeout", 0, 0, S));     /* what was under way ends */
    for (int turn = 0; turn < 9; turn++) {      /* a worker that comes and goes under new names: there is room for a breaker each time */
        char at[32];
        snprintf(at, sizeof at, "unix:new%d", turn);
        struct pd_path_end d = end_of(x, at, "a");
        for (int i = 0; i < 3; i++)
            go(x, &p, &d, PD_WENT_WRONG, 0, 0, S);
        assert_int_equal(view(x, &p, &d, 1, S).x, PD_PATH_BREAKER);
        pd_paths_forget(x, at);
    }
    assert_int_equal(pd_paths_breakers(x), 0);
    pd_paths_free(x);
    pd_ledger_free(l);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(without_a_file), cmocka_unit_test(by_the_file), cmocka_unit_test(transfers_teach), cmocka_unit_test(failures_count),
                                        cmocka_unit_test(rules_and_holds), cmocka_unit_test(memory_is_bounded), cmocka_unit_test(what_is_gone_is_forgotten) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
