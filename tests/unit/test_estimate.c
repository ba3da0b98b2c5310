/* route/estimate: what is learnt of made-up machines whose costs are known. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include "../../libcommon/route/learn.h"

static uint64_t rng = 1;
static double uniform(void)
{
    rng = rng * 6364136223846793005u + 1442695040888963407u;
    return (double)(rng >> 11) / 9007199254740992.0;
}

/* Log-normal about 1: what the noise of a step looks like, with `tail` of a hundred steps held up. */
static double noise(double sigma, double tail)
{
    double n = exp(sigma * sqrt(-2 * log(uniform() + 1e-12)) * cos(6.283185307179586 * uniform()));
    return uniform() * 100 < tail ? n * (2 + 3 * uniform()) : n;
}

static const double edge[] = { 128, 512, 2048 };
static const double zero[3], typical[] = { 1, 1000, 1e6 };

/* prefill of n tokens after c, us */
static double machine(double n, double c, double speed) { return (800 + 160 * n + 0.01 * n * (c + n / 2)) * speed; }
static void inputs(double n, double c, double *x)
{
    x[0] = 1;
    x[1] = n;
    x[2] = n * (c + n / 2);
}
static double some_n(void) { return floor(exp(log(16) + uniform() * log(4096 / 16.0))); }

static double error_of(const struct pd_term *t, double speed)
{
    double worst = 0, x[3];
    for (double n = 16; n <= 4096; n *= 2)
        for (double c = 0; c <= 4096; c += 2048) {
            inputs(n, c, x);
            double r = pd_term_cost(t, x, 0, 1).p50 / machine(n, c, speed);
            worst = fmax(worst, fabs(r - 1));
        }
    return worst;
}

static void from_nothing(void **state)
{
    struct pd_term t;
    double x[3];
    pd_term_open(&t, 3, zero, typical, edge);
    inputs(100, 0, x);
    assert_true(pd_term_cost(&t, x, 0, 1).cold);
    for (int i = 0; i < 300; i++) {
        double n = some_n(), c = floor(uniform() * 4096);
        inputs(n, c, x);
        assert_true(pd_term_learn(&t, x, machine(n, c, 1) * noise(0.05, 1), 10));
    }
    assert_true(error_of(&t, 1) < 0.1);
    assert_false(pd_term_cost(&t, x, 10, 1).cold);
}

/* A guess that is wrong by a factor is left behind; a machine that changes its speed is followed. */
static void follows(void **state)
{
    struct pd_term t;
    double x[3], start[] = { 8000, 16, 0 };
    pd_term_open(&t, 3, start, typical, edge);
    for (int round = 0; round < 4; round++) {
        double speed = round & 1 ? 2.5 : 1;
        for (int i = 0; i < 1500; i++) {
            double n = some_n(), c = floor(uniform() * 4096);
            inputs(n, c, x);
            pd_term_learn(&t, x, machine(n, c, speed) * noise(0.1, 0), 10);
        }
        assert_true(error_of(&t, speed) < 0.15);
    }
}

/* P95 is what 95 % stay below, whatever the noise, also when it changes in between. */
static void covers(void **state)
{
    static const double sigma[] = { 0.02, 0.3, 0.1, 0.6 }, tail[] = { 0, 2, 10, 5 };
    struct pd_term t;
    pd_term_open(&t, 3, zero, typical, edge);
    uint64_t judged = 0, covered = 0;
    for (int round = 0; round < 4; round++) {
        uint64_t in = 0;
        for (int i = 0; i < 2000; i++) {
            double n = some_n(), c = floor(uniform() * 4096), x[3];
            inputs(n, c, x);
            double y = machine(n, c, 1) * noise(sigma[round], tail[round]);
            struct pd_cost p = pd_term_cost(&t, x, 10, 1);
            if (i >= 100) {
                in += y <= p.p95;
                judged++;
            }
            pd_term_learn(&t, x, y, 10);
        }
        assert_true(in >= 1900 * 0.93 && in <= 1900 * 0.97);
        covered += in;
    }
    assert_true(fabs((double)covered / (double)judged - 0.95) < 0.01);
    assert_true(fabs(pd_term_coverage(&t) - 0.95) < 0.01);
}

static void accidents_and_lies(void **state)
{
    struct pd_term t;
    double x[3];
    pd_term_open(&t, 3, zero, typical, edge);
    for (int i = 0; i < 500; i++) {
        double n = some_n();
        inputs(n, 0, x);
        pd_term_learn(&t, x, machine(n, 0, 1) * noise(0.03, 0), 10);
    }
    inputs(512, 0, x);
    assert_true(pd_term_learn(&t, x, machine(512, 0, 1000), 10));       /* one step that took a thousand times as long */
    assert_true(error_of(&t, 1) < 0.15);
    struct pd_term was = t;
    assert_false(pd_term_learn(&t, x, NAN, 11) || pd_term_learn(&t, x, INFINITY, 11) || pd_term_learn(&t, x, 0, 11) || pd_term_learn(&t, x, -5, 11));
    x[1] = NAN;
    assert_false(pd_term_learn(&t, x, 100, 11));
    x[1] = -1;
    assert_false(pd_term_learn(&t, x, 100, 11));
    assert_memory_equal(&t, &was, sizeof t);
    struct pd_cost old;
    inputs(512, 0, x);
    old = pd_term_cost(&t, x, 10, 100);
    assert_false(old.stale);
    struct pd_cost c = pd_term_cost(&t, x, 111, 100);
    assert_true(c.stale && c.p50 == old.p50 && c.p95 > 1.9 * old.p95);
}

/* A term of one quantity has no size: what lies behind x[0] is not looked at. */
static void one_quantity(void **state)
{
    struct pd_term t;
    const double start = 100, usual = 1, no_edge[PD_BANDS - 1] = { 1, 2, 3 };
    double x[2] = { 1, 0 };
    pd_term_open(&t, 1, &start, &usual, no_edge);
    for (int i = 0; i < 200; i++) {
        x[1] = i % 5;
        assert_true(pd_term_learn(&t, x, 50 * noise(0.05, 0), 10));
    }
    struct pd_cost a = pd_term_cost(&t, x, 10, 100);
    x[1] = 1e9;
    struct pd_cost b = pd_term_cost(&t, x, 10, 100);
    assert_true(a.p50 == b.p50 && a.p95 == b.p95 && !a.cold && fabs(a.p50 - 50) < 5);
    assert_int_equal(t.band[1].n + t.band[2].n + t.band[3].n, 0);
}

/* What a band needs before it is believed, and what stands in for it until then. */
static void cold_at_first(void **state)
{
    static const double start[] = { 100, 2, 0 };
    struct pd_term t;
    double x[3];
    pd_term_open(&t, 3, start, typical, edge);
    inputs(100, 0, x);
    struct pd_cost c = pd_term_cost(&t, x, 0, 1);
    assert_true(c.cold && c.p50 == 300 && c.p95 >= 2 * c.p50);          /* as it was told to begin, and wide */
    pd_term_open(&t, 3, zero, typical, edge);
    assert_true(pd_term_cost(&t, x, 0, 1).p50 > 0);                     /* nothing is free: a ratio to it would mean nothing */
    assert_true(pd_term_coverage(&t) == 1);
    for (int i = 0; i < 21; i++) {      /* the first has nothing that it could be compared with */
        assert_true(pd_term_steps(&t) == (uint64_t)(i > 1 ? i - 1 : 0) && pd_term_cost(&t, x, 0, 1).cold);
        pd_term_learn(&t, x, 1000 * noise(0.2, 0), 10);
    }
    assert_false(pd_term_cost(&t, x, 0, 1).cold);
    assert_true(t.all.q95 == t.all.sorted[19]);         /* of twenty, the greatest: the next one is below it in 20 of 21 cases */
    inputs(4000, 0, x);
    assert_false(pd_term_cost(&t, x, 0, 1).cold);       /* of a size that was never met: by all sizes */
    inputs(128, 0, x);
    pd_term_learn(&t, x, 1000, 10);
    assert_true(t.band[0].n == 21 && t.all.n == 21);    /* an edge is of the band below it */
}

/* Sizes that the formula does not fit have bands of their own, whose middle mends it; the P95 of each is judged apart. */
static void bands_mend_the_formula(void **state)
{
    struct pd_term t;
    double x[3];
    pd_term_open(&t, 3, zero, typical, edge);
    for (int i = 0; i < 4000; i++) {
        double n = some_n();
        inputs(n, 0, x);
        pd_term_learn(&t, x, machine(n, 0, n <= 128 ? 1 : n <= 512 ? 1.8 : 0.8) * noise(0.05, 0), 10);
    }
    for (double n = 40; n < 4000; n *= 2.2) {
        inputs(n, 0, x);
        assert_true(fabs(pd_term_cost(&t, x, 10, 1).p50 / machine(n, 0, n <= 128 ? 1 : n <= 512 ? 1.8 : 0.8) - 1) < 0.25);
    }
    t.band[3].covered = 0;              /* as if it had always been wrong */
    double judged = 0, covered = 0;
    for (int b = 0; b < PD_BANDS; b++) {
        judged += (double)t.band[b].judged;
        covered += (double)t.band[b].covered;
        assert_true(t.band[b].judged > 200);
    }
    assert_true(covered / judged < 0.9 && pd_term_coverage(&t) == covered / judged);
}

/* The fit alone, which bands would hide: it follows, it is no slave of the last steps, and no coefficient is negative. */
static double fit_of(const struct pd_term *t, double n)
{
    double x[3], y = 0;
    inputs(n, 0, x);
    for (int i = 0; i < 3; i++)
        y += t->fit.theta[i] * x[i];
    return y;
}

static void the_fit_itself(void **state)
{
    struct pd_term t;
    double x[3], worst = 0;
    pd_term_open(&t, 3, zero, typical, edge);
    for (int i = 0; i < 6000; i++) {
        double n = some_n();
        inputs(n, 0, x);
        pd_term_learn(&t, x, machine(n, 0, i < 3000 ? 1 : 2.5) * noise(0.3, 0), 10);
        for (double m = 100; i > 4500 && m < 4000; m *= 3)
            worst = fmax(worst, fabs(fit_of(&t, m) / machine(m, 0, 2.5 * exp(0.3 * 0.3 / 2)) - 1));
        for (int k = 0; k < 3; k++)
            assert_true(t.fit.theta[k] >= 0);
    }
    assert_true(worst > 0.02 && worst < 0.3);
    inputs(64, 0, x);
    for (int i = 0; i < 20000; i++)     /* always the same: what it tells nothing of is not forgotten */
        pd_term_learn(&t, x, 20000 * noise(0.1, 0), 10);
    double trace = t.fit.cov[0][0] + t.fit.cov[1][1] + t.fit.cov[2][2];
    assert_true(trace < 1.1e4 && fit_of(&t, 2048) > machine(2048, 0, 2.5) / 4 && fit_of(&t, 2048) < 4 * machine(2048, 0, 2.5));
    pd_term_open(&t, 3, zero, typical, edge);
    for (int i = 0; i < 500; i++) {     /* a machine that takes less for more */
        inputs(some_n(), 0, x);
        pd_term_learn(&t, x, 50000 / (1 + x[1] / 100), 10);
        assert_true(t.fit.theta[0] >= 0 && t.fit.theta[1] >= 0 && t.fit.theta[2] >= 0);
    }
}

/* The rank of P95 stays one, however long it was always right or always wrong. */
static void the_rank_stays_in_its_range(void **state)
{
    struct pd_term t;
    double x[3], y = 1000;
    pd_term_open(&t, 3, zero, typical, edge);
    inputs(64, 0, x);
    for (int i = 0; i < 3000; i++) {
        pd_term_learn(&t, x, 1000, 10);
        assert_true(t.band[0].miss >= 0 && t.band[0].miss <= 0.5);
    }
    assert_true(t.band[0].miss > 0.4 && fabs(pd_term_cost(&t, x, 10, 1).p95 / 1000 - 1) < 1e-3);
    for (int i = 0; i < 3000 && y < 1e12; i++) {
        pd_term_learn(&t, x, y *= 1.02, 10);
        assert_true(t.band[0].miss >= 0 && t.band[0].miss <= 0.5);
    }
    assert_true(t.band[0].miss < 0.01);
}

/* After a hundred steps nothing is left of a guess that was wrong a hundred times, also when some of them are accidents. */
static void guesses(void **state)
{
    for (int by = 0; by < 2; by++)
        for (int round = 0; round < 20; round++) {
            double wrong = by ? 100 : 0.01, start[] = { 2000 * wrong, 160 * wrong, 0.01 * wrong }, x[3];
            struct pd_term t;
            pd_term_open(&t, 3, start, typical, edge);
            for (int i = 0; i < 100; i++) {
                double n = some_n(), c = floor(uniform() * 4096);
                inputs(n, c, x);
                pd_term_learn(&t, x, machine(n, c, 1) * noise(0.1, 0) * (i % 20 == 3 ? 8 : 1), 10);
            }
            for (double n = 16; n <= 4096; n *= 4) {
                inputs(n, 1000, x);
                double got = t.fit.theta[0] * x[0] + t.fit.theta[1] * x[1] + t.fit.theta[2] * x[2];
                assert_true(got > machine(n, 1000, 1) / 10 && got < machine(n, 1000, 1) * 10);
            }
        }
}

static void sums(void **state)
{
    struct pd_sum s = { 0 };
    pd_sum_add(&s, (struct pd_cost){ 100, 130, false, false });
    pd_sum_add(&s, (struct pd_cost){ 10, 50, true, false });
    struct pd_cost c = pd_sum_cost(&s);
    assert_true(c.p50 == 110 && fabs(c.p95 - 160) < 1e-9 && c.cold && !c.stale);
    pd_sum_add(&s, (struct pd_cost){ 1, 1, false, true });
    pd_sum_add(&s, (struct pd_cost){ 1, 1, false, false });
    assert_true(pd_sum_cost(&s).cold && pd_sum_cost(&s).stale);
}

/* Runs that may make one token, however many, say nothing of what one that may make 2,000 will. */
static void limits_are_no_lengths(void **state)
{
    static struct pd_learn l;
    uint32_t p50, p95;
    for (int i = 0; i < 1000; i++)
        pd_learned_length(&l, 500, i % 10 ? 1 : 2000, i % 10 ? 1 : 300 + (uint32_t)i % 100);
    pd_learn_length(&l, 500, 2000, &p50, &p95);
    assert_true(p50 >= 300 && p50 <= 400 && p95 >= 300 && p95 <= 400);
    pd_learn_length(&l, 500, 1500, &p50, &p95);
    assert_true(p50 >= 300 && p95 <= 400);
    pd_learn_length(&l, 500, 1, &p50, &p95);
    assert_true(p50 == 1 && p95 == 1);
    pd_learn_length(&l, 500, 100, &p50, &p95);          /* nobody asked for that yet */
    assert_true(p50 == 50 && p95 == 100);
    pd_learn_length(&l, 500, UINT32_MAX, &p50, &p95);
    assert_int_equal(p95, UINT32_MAX);
    pd_learn_free(&l);
}

/* What a profile lacks of a class is told once a class, and that class begins with a guess; what a worker does not say is as any. */
static void what_was_not_measured_is_told(void **state)
{
    static struct pd_learn l;
    static struct pd_profile_class class_[2] = { { .model = { "m@1", 3 }, .cpu = { "avx2", 4 }, .threads = 4, .fit = { { .k = 3, .theta = { 7000, 0, 0 }, .typical = { 1, 1, 1 } },
                                                   { .k = 3, .theta = { 1, 1, 1 }, .typical = { 1, 1, 1 } } } },
                                                 { .model = { "m@2", 3 }, .cpu = { "avx2", 4 }, .threads = 4, .fit = { { .k = 3, .theta = { 7000, 0, 0 }, .typical = { 1, 1, 1 } } } } };
    static struct pd_profile profile = { .class_ = class_, .n_classes = 2 };
    static const struct { const char *model, *cpu; uint32_t threads; const char *told; bool known; } v[] = {
        { "m@1", "avx2", 4, "", true }, { "m@1", "avx2", 0, "", true }, { "m@1", NULL, 4, "", true }, { "m@1", "avx512", 4, "no class of m@1, avx512, 4 threads", false },
        { "m@1", "avx2", 8, "no class of m@1, avx2, 8 threads", false }, { "m@3", NULL, 0, "no class of m@3: ", false }, { "m@2", "avx2", 4, "no decode in its class of m@2, avx2, 4 threads", true } };
    char why[400];
    uint32_t at;
    l.profile = &profile;
    for (int twice = 0; twice < 2; twice++)
        for (size_t i = 0; i < sizeof v / sizeof *v; i++) {
            struct pd_worker_rec w = { .model_revision = { v[i].model, 3 }, .cpu = { v[i].cpu, v[i].cpu ? strlen(v[i].cpu) : 0 }, .threads = v[i].threads, .fp_sha = { (uint8_t)v[i].model[2] } };
            pd_learn_lacks(&l, &w, why, sizeof why);
            assert_true(v[i].told[0] && !twice ? strstr(why, v[i].told) != NULL : !why[0]);
            assert_int_equal(pd_learn_class_of(&l, &w, &at, NULL), 0);
            assert_true((pd_learn_prefill(&l, at, 100, 0, 0).p50 == 7000) == v[i].known);
        }
    assert_int_equal(l.n_classes, 7);
    l.profile = NULL;
    pd_learn_lacks(&l, &(struct pd_worker_rec){ .model_revision = { "m@9", 3 } }, why, sizeof why);
    assert_string_equal(why, "");
    pd_learn_free(&l);
}

/* As many paths as there is room for, each by itself, and none that is two; within a domain it begins with another cost than between two. */
static void each_path_is_one(void **state)
{
    static struct pd_learn l;
    static struct pd_profile_path path[2] = { { .class_ = { "cross", 5 }, .fit = { .k = 2, .theta = { 9000, 9 }, .typical = { 1, 1e6 } } },
                                              { .class_ = { "local", 5 }, .fit = { .k = 2, .theta = { 10, 0.01 }, .typical = { 1, 1e6 } } } };
    static struct pd_profile profile = { .path = path, .n_paths = 2 };
    struct pd_err err;
    struct pd_route_path x;
    uint32_t at, n = 0;
    l.profile = &profile;
    for (int i = 0; i < 20; i++)
        for (int k = 0; k < 20; k++) {
            char from[8], to[8];
            snprintf(from, sizeof from, "r%d", i);
            snprintf(to, sizeof to, "r%d", k);
            int rc = pd_learn_path_of(&l, (struct pd_str){ from, strlen(from) }, (struct pd_str){ to, strlen(to) }, NULL, &at, &err);
            if (n == PD_LEARN_PATHS) {
                assert_int_equal(rc, PD_ENOMEM);
                continue;
            }
            assert_true(rc == 0 && at == n++);
            pd_learn_ways(&l, at, 1000000, 0, &x);
            assert_int_equal(x.latency.p50, i == k ? 10 : 9000);
        }
    pd_learn_free(&l);
}

/* Parts of a sum that are large together, or wider in parts than as a whole: of what was told of it 95 % come true either way. */
static void sums_are_as_wide_as_they_are_found(void **state)
{
    for (int how = 0; how < 3; how++) {
        static struct pd_learn l;
        int over = 0, n = 0;
        for (int i = 0; i < 6000; i++) {
            struct pd_spread a = { 1400, 1000, 0 }, b = { 2800, 2000, 0 };
            double wide = sqrt(400.0 * 400 + 800.0 * 800) * (how == 2 ? 3 : 1), busy = noise(0.25, 0), x = how ? noise(0.25, 0) : busy, y = how ? noise(0.25, 0) : busy;
            uint32_t permille = pd_learn_sum(&l, how == 1, PD_LEARN_TTFT);
            struct pd_spread told = { a.p50 + b.p50 + (int64_t)(wide * (permille ? permille : 1000) / 1000), a.p50 + b.p50, 0 };
            int64_t took = (int64_t)(1000 * x + 2000 * y);
            n += i >= 1000;
            over += i >= 1000 && took > told.p95;
            pd_learned_sum(&l, how == 1, PD_LEARN_TTFT, told, permille, took);
        }
        if (n - over < 0.93 * n || n - over > 0.97 * n)
            fail_msg("%d: %d of %d", how, n - over, n);
        assert_int_equal(pd_learn_sum(&l, how != 1, PD_LEARN_TTFT), 0);
        assert_int_equal(pd_learn_sum(&l, how == 1, PD_LEARN_COMPLETION), 0);
        pd_learn_free(&l);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(from_nothing), cmocka_unit_test(follows), cmocka_unit_test(covers), cmocka_unit_test(accidents_and_lies), cmocka_unit_test(guesses),
        cmocka_unit_test(one_quantity), cmocka_unit_test(sums), cmocka_unit_test(cold_at_first), cmocka_unit_test(bands_mend_the_formula), cmocka_unit_test(the_fit_itself),
        cmocka_unit_test(the_rank_stays_in_its_range), cmocka_unit_test(limits_are_no_lengths), cmocka_unit_test(what_was_not_measured_is_told), cmocka_unit_test(each_path_is_one), cmocka_unit_test(sums_are_as_wide_as_they_are_found) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
