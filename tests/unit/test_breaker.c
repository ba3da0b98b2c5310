/* route/breaker, dwell, limit: what is let through when, of transfers, preferences and fallbacks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <string.h>
#include "../../libcommon/route/breaker.h"
#include "../../libcommon/route/dwell.h"
#include "../../libcommon/route/limit.h"

enum { S = 1000000 };
static const struct pd_breaker_opts exact = { .jitter = 1e-12 };
static bool end(struct pd_breaker *b, uint32_t t, enum pd_went w, int64_t now) { return pd_breaker_end(b, &exact, t, w, "timeout", now); }
static bool go(struct pd_breaker *b, enum pd_went w, int64_t now) { return end(b, pd_breaker_begin(b, now), w, now); }

static void opens_and_closes(void **state)
{
    struct pd_breaker b = { .seed = 1 };
    char text[40];
    assert_true(pd_breaker_may(&b, 0));
    assert_string_equal(pd_breaker_text(&b, 0, text, sizeof text), "");
    assert_false(go(&b, PD_WENT_WRONG, 10 * S));
    assert_false(go(&b, PD_WENT_WRONG, 10 * S));
    assert_true(go(&b, PD_WENT_WRONG, 10 * S));
    assert_false(pd_breaker_may(&b, 10 * S + 999000));
    assert_string_equal(b.cause, "timeout");
    assert_string_equal(pd_breaker_text(&b, 10 * S + 300000, text, sizeof text), "breaker open 0.7s");
    assert_true(pd_breaker_may(&b, 11 * S));    /* one probe at a time, two that go well */
    uint32_t t = pd_breaker_begin(&b, 11 * S);
    assert_false(pd_breaker_may(&b, 11 * S));
    assert_string_equal(pd_breaker_text(&b, 11 * S, text, sizeof text), "breaker half-open");
    assert_false(end(&b, t, PD_WENT_WELL, 11 * S));
    assert_true(pd_breaker_may(&b, 11 * S));
    assert_true(go(&b, PD_WENT_WELL, 12 * S));
    assert_int_equal(pd_breaker_at(&b, 12 * S), PD_BREAKER_CLOSED);
    assert_true(pd_breaker_may(&b, 12 * S));
}

static void back_off(void **state)
{
    struct pd_breaker b = { .seed = 1 };
    int64_t now = 10 * S;
    for (int i = 0; i < 3; i++)
        go(&b, PD_WENT_WRONG, now);
    for (int64_t us = S; us < 64 * S; us *= 2) {        /* 1, 2, 4 .. 32 s, then 60 */
        assert_false(pd_breaker_may(&b, now + us - 1000));
        now += us;
        assert_true(pd_breaker_may(&b, now));
        assert_true(go(&b, PD_WENT_WRONG, now));
    }
    assert_false(pd_breaker_may(&b, now + 59 * S));
    assert_true(pd_breaker_may(&b, now + 60 * S));
    now += 60 * S;
    go(&b, PD_WENT_WELL, now);
    assert_true(go(&b, PD_WENT_WELL, now));
    for (int i = 0; i < 3; i++) /* it comes and goes: as long as before */
        go(&b, PD_WENT_WRONG, now + 5 * S);
    assert_false(pd_breaker_may(&b, now + 64 * S));
    now += 65 * S;
    go(&b, PD_WENT_WELL, now);
    go(&b, PD_WENT_WELL, now);
    for (int i = 0; i < 3; i++) /* it was calm for long enough */
        go(&b, PD_WENT_WRONG, now + 31 * S);
    assert_true(pd_breaker_may(&b, now + 32 * S));
}

static void what_counts(void **state)
{
    struct pd_breaker b = { .seed = 1 };
    for (int i = 0; i < 100; i++) {     /* one in two fails now and then: it stays closed */
        assert_false(go(&b, PD_WENT_WRONG, S));
        assert_false(go(&b, PD_WENT_WELL, S));
    }
    assert_false(go(&b, PD_WENT_NOWHERE, S));
    go(&b, PD_WENT_WRONG, S);
    go(&b, PD_WENT_WRONG, S);
    assert_false(go(&b, PD_WENT_WRONG, 40 * S));        /* those before are long over */
    uint32_t old = pd_breaker_begin(&b, 40 * S), probe;
    pd_breaker_trip(&b, &exact, "integrity", 40 * S);
    assert_false(pd_breaker_may(&b, 40 * S));
    assert_false(end(&b, old, PD_WENT_WELL, 40 * S));   /* it began before: it proves nothing */
    assert_int_equal(pd_breaker_at(&b, 40 * S), PD_BREAKER_OPEN);
    probe = pd_breaker_begin(&b, 41 * S);
    assert_false(end(&b, old, PD_WENT_WRONG, 41 * S));
    assert_false(pd_breaker_may(&b, 41 * S));
    assert_false(end(&b, probe, PD_WENT_NOWHERE, 41 * S));      /* cancelled: another one may try */
    assert_true(pd_breaker_may(&b, 41 * S));
    assert_true(go(&b, PD_WENT_WRONG, 41 * S));
    pd_breaker_trip(&b, &exact, "again", 41 * S);       /* open as it is: no longer for it, nor shorter */
    assert_false(pd_breaker_may(&b, 43 * S - 1000));
    assert_true(pd_breaker_may(&b, 43 * S));
    go(&b, PD_WENT_WRONG, 43 * S);
    assert_false(pd_breaker_may(&b, 44 * S));
    pd_breaker_renew(&b, 44 * S);
    assert_true(pd_breaker_may(&b, 44 * S));
}

static void spread_and_seeded(void **state)
{
    int64_t until[64], least = INT64_MAX, most = 0;
    for (int i = 0; i < 64; i++) {
        struct pd_breaker a = { .seed = (uint64_t)i }, b = { .seed = (uint64_t)i };
        pd_breaker_trip(&a, NULL, "x", 5 * S);
        pd_breaker_trip(&b, NULL, "x", 5 * S);
        until[i] = a.until_us - 5 * S;
        assert_int_equal(a.until_us, b.until_us);
        least = until[i] < least ? until[i] : least;
        most = until[i] > most ? until[i] : most;
    }
    assert_true(least >= 800000 && least < 850000 && most <= 1200000 && most > 1150000);
}

static void a_preference_stays(void **state)
{
    struct pd_dwell w = { 0 };
    double cost[3] = { 100, 95, 300 };
    bool may[3] = { true, false, true }, held = true;
    assert_int_equal(pd_dwell_pick(&w, NULL, cost, may, 3, 0, &held), 0);
    assert_false(held);
    may[1] = true;
    assert_int_equal(pd_dwell_pick(&w, NULL, cost, may, 3, 10 * S, &held), 0);  /* 5 % better is not enough */
    assert_true(held);
    cost[1] = 80;
    assert_int_equal(pd_dwell_pick(&w, NULL, cost, may, 3, 10 * S, &held), 1);
    assert_false(held);
    cost[0] = 10;
    assert_int_equal(pd_dwell_pick(&w, NULL, cost, may, 3, 11 * S, &held), 1);  /* it has just changed */
    assert_true(held);
    assert_int_equal(pd_dwell_pick(&w, NULL, cost, may, 3, 12 * S, NULL), 0);
    may[0] = false;
    assert_int_equal(pd_dwell_pick(&w, NULL, cost, may, 3, 12 * S + 1, NULL), 1);       /* it cannot be had: at once */
    may[1] = may[2] = false;
    assert_int_equal(pd_dwell_pick(&w, NULL, cost, may, 3, 13 * S, &held), -1);
}

static struct pd_limit_case ask(int64_t now, bool fits) { return (struct pd_limit_case){ .now_us = now, .workers = 2, .fits = fits }; }

static void shares(void **state)
{
    struct pd_limit l = { 0 };
    struct pd_limit_load w = { 0 };
    int64_t after;
    const char *why;
    assert_int_equal(pd_limit_most(&l, 8192), 819);
    assert_true(pd_limit_fits(&l, w, 8192, 5000));      /* one, however long */
    pd_limit_begin(&l, &w, 500, 0);
    assert_true(pd_limit_fits(&l, w, 8192, 319));
    assert_false(pd_limit_fits(&l, w, 8192, 320));
    struct pd_limit_case c = ask(S, true);
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_GO);
    c.fits = false;
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_WAIT);      /* nothing is known of how long they take */
    c.waited_us = 10 * S;
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_SHED);
    assert_int_equal(after, 100000);
    pd_limit_end(&l, &w, 500, 500 * 2000);      /* 2 ms a token */
    assert_true(w.runs == 0 && w.tokens == 0 && l.all.tokens == 0);
    pd_limit_begin(&l, &w, 4000, 0);
    c = ask(S, false);
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_WAIT);      /* 4 s, by two workers */
    c.tokens_ahead = 8000;
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_SHED);
    assert_int_equal(after, 12 * S);
    assert_non_null(strstr(why, "as much for others as they may"));
    c.tokens_ahead = 0;
    c.deadline_us = 6 * S;
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_WAIT);
    c.need_us = S;
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_SHED);
    c = ask(S, true);
    c.need_us = 2 * S;
    c.deadline_us = 3 * S;
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_SHED);      /* never past its deadline */
    assert_non_null(strstr(why, "past its deadline"));
    c = ask(S, true);
    c.had_one = true;
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_SHED);      /* one a run */
}

static void rates(void **state)
{
    struct pd_limit l = { .o = { .rate = 2 } };
    struct pd_limit_load w[2] = { { 0 } };
    struct pd_limit_case c = ask(100 * S, true);
    int64_t after;
    const char *why;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_GO);
        pd_limit_begin(&l, &w[i], 1, c.now_us);
    }
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_WAIT);
    c.runs_ahead = 3;
    c.waited_us = 7900000;
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_WAIT);
    c.waited_us = 8100000;
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_SHED);
    assert_true(after > 1990000 && after < 2010000);    /* its turn is the fourth */
    c.runs_ahead = 0;
    c.waited_us = 9600000;
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_SHED);
    assert_true(after > 490000 && after < 510000 && strstr(why, "rate"));
    c.now_us += 400000;
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_WAIT);
    c.now_us += 100000;
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_GO);
    c.now_us -= 50 * S;         /* a step back fills nothing */
    pd_limit_begin(&l, &w[0], 1, c.now_us);
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_SHED);
    c.now_us += 50 * S + 500000;
    c.waited_us = 0;
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_GO);
    c.now_us += 1000 * (int64_t)S;
    c.waited_us = 0;
    pd_limit_begin(&l, &w[0], 1, c.now_us);     /* it holds a second's worth, not more */
    pd_limit_begin(&l, &w[0], 1, c.now_us);
    assert_int_equal(pd_limit_judge(&l, &c, &after, &why), PD_LIMIT_WAIT);
}

static void words(void **state)
{
    struct pd_limit_opts o = { 0 };
    struct pd_err e;
    assert_int_equal(pd_limit_parse_max("12.5%", &o, &e), 0);
    assert_true(o.share == 0.125 && !o.tokens);
    assert_int_equal(pd_limit_parse_max("4096", &o, &e), 0);
    assert_int_equal(o.tokens, 4096);
    static const char *const bad[] = { "", "0", "0%", "101%", "-5", "5 %", "%", ".%", "1e3%", "nan%", "1.2.3%" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(pd_limit_parse_max(bad[i], &o, &e), PD_EUSAGE);
        assert_non_null(strstr(e.msg, "examples: 10%, 4096"));
    }
    assert_int_equal(pd_limit_parse_rate("2.5", &o, &e), 0);
    assert_true(o.rate == 2.5);
    assert_int_equal(pd_limit_parse_rate("0", &o, &e), PD_EUSAGE);
    assert_int_equal(pd_limit_parse_rate("2/s", &o, &e), PD_EUSAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(opens_and_closes), cmocka_unit_test(back_off), cmocka_unit_test(what_counts), cmocka_unit_test(spread_and_seeded),
                                        cmocka_unit_test(a_preference_stays), cmocka_unit_test(shares), cmocka_unit_test(rates), cmocka_unit_test(words) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
