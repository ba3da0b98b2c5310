/* Metrics: the registry, and its text held against the rules of the exposition format by a reader of our own. */
#include <ctype.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "../../libcommon/base/metrics.h"
#include "../../libcommon/base/utf8.h"

static struct pd_err e;

/* Reads one metric name at s; its length. */
static size_t name_at(const char *s, bool colon)
{
    size_t n = 0;
    if (isdigit((unsigned char)*s))
        return 0;
    while (isalnum((unsigned char)s[n]) || s[n] == '_' || (colon && s[n] == ':'))
        n++;
    return n;
}

/* The text obeys the format: every line ends in a newline; HELP, then TYPE, then the family's samples and no others; each sample parses, is unique and has a number;
 * a histogram's buckets rise, end with +Inf and agree with _count. Returns the number of samples. */
static int read_text(const char *t, size_t n)
{
    char family[100] = "", type[20] = "", seen[400][300];
    int samples = 0;
    double last = -1;
    bool inf = false;
    assert_true(n == 0 || t[n - 1] == '\n');
    assert_true(pd_utf8_invalid(t, n) < 0);
    for (const char *s = t, *nl; s < t + n; s = nl + 1) {
        nl = memchr(s, '\n', (size_t)(t + n - s));
        char line[600];
        assert_true(nl - s < (long)sizeof line);
        memcpy(line, s, (size_t)(nl - s));
        line[nl - s] = 0;
        if (!strncmp(line, "# HELP ", 7)) {
            size_t k = name_at(line + 7, true);
            assert_true(k > 0 && line[7 + k] == ' ');
            snprintf(family, sizeof family, "%.*s", (int)k, line + 7);
            for (const char *c = line + 7; (c = strchr(c, '\\')); c += 2)
                assert_true(c[1] == '\\' || c[1] == 'n');
            type[0] = 0;
            continue;
        }
        if (!strncmp(line, "# TYPE ", 7)) {
            char who[100];
            assert_int_equal(sscanf(line + 7, "%99s %19s", who, type), 2);
            assert_string_equal(who, family);
            last = -1;
            continue;
        }
        size_t k = name_at(line, true), f = strlen(family), at;
        assert_true(k >= f && !strncmp(line, family, f) && type[0]);
        const char *suffix = line + f;
        bool bucket = !strncmp(suffix, "_bucket", 7);
        if (!strcmp(type, "histogram"))
            assert_true(bucket || !strncmp(suffix, "_sum", 4) || !strncmp(suffix, "_count", 6));
        else
            assert_int_equal(k, f);
        at = k;
        if (line[at] == '{') {
            do {
                size_t l = name_at(line + ++at, false);
                assert_true(l > 0);
                bool le = l == 2 && !strncmp(line + at, "le", 2);
                at += l;
                assert_true(line[at] == '=' && line[at + 1] == '"');
                for (at += 2; line[at] != '"'; at++) {
                    assert_true(line[at]);
                    if (line[at] == '\\') {
                        at++;
                        assert_true(line[at] == '\\' || line[at] == '"' || line[at] == 'n');
                    }
                }
                if (le)
                    inf = !strncmp(line + at - 4, "+Inf", 4);
                at++;
            } while (line[at] == ',');
            assert_true(line[at] == '}');
            at++;
        }
        assert_true(line[at] == ' ');
        char *end;
        double v = strtod(line + at + 1, &end);
        assert_true(end > line + at + 1 && !*end);
        if (bucket) {
            assert_true(v >= last);
            last = v;
        } else if (!strncmp(suffix, "_count", 6)) {
            assert_true(inf && v == last);
            last = -1;
            inf = false;
        }
        line[at] = 0;
        for (int i = 0; i < samples; i++)
            assert_string_not_equal(seen[i], line);
        assert_true(samples < 400);
        snprintf(seen[samples++], sizeof seen[0], "%.299s", line);
    }
    return samples;
}

static const struct pd_metric_about requests = { "pd_requests_total", "Requests by end.", PD_COUNTER, 0, .label = { "role", "finish_reason" } };
static const struct pd_metric_about ttft = { "pd_ttft_seconds", "Time to first token,\nback\\slash \"quoted\".", PD_HISTOGRAM, 6, .label = { "model" }, .bounds = (const int64_t[]){ 1000, 2500, 1000000 }, .n_bounds = 3 };
static const struct pd_metric_about blocks = { .name = "pd_blocks", .type = PD_GAUGE };

static void the_text_is_what_was_counted(void **state)
{
    struct pd_metrics *m;
    struct pd_metric *a, *b, *h, *g;
    struct pd_buf out = { 0 };
    assert_int_equal(pd_metrics_new(&m, &e), 0);
    assert_int_equal(pd_metrics_text(m, &out, &e), 0);
    assert_int_equal(out.n, 0);
    assert_int_equal(pd_metric_get(m, &requests, (const char *[4]){ "decode", "stop" }, &a, &e), 0);
    assert_int_equal(pd_metric_get(m, &requests, (const char *[4]){ "decode", "a\"b\\c\nd\xff" }, &b, &e), 0);
    assert_ptr_not_equal(a, b);
    struct pd_metric *again;
    assert_int_equal(pd_metric_get(m, &requests, (const char *[4]){ "decode", "stop" }, &again, &e), 0);
    assert_ptr_equal(a, again);
    assert_int_equal(pd_metric_get(m, &ttft, (const char *[4]){ "tiny" }, &h, &e), 0);
    assert_int_equal(pd_metric_get(m, &blocks, NULL, &g, &e), 0);
    pd_metric_add(a, 3);
    pd_metric_add(a, 4);
    pd_metric_set(g, -12);
    static const int64_t seen[] = { 0, 1000, 1001, 2500, 999999, 1000001, 7000000 };
    for (int i = 0; i < 7; i++)
        pd_metric_observe(h, seen[i]);
    assert_int_equal(pd_metric_value(a), 7);
    assert_int_equal(pd_metric_value(h), 7);
    assert_int_equal(pd_metrics_text(m, &out, &e), 0);
    pd_buf_add(&out, "", 1, &e);
    assert_string_equal((char *)out.p,
        "# HELP pd_requests_total Requests by end.\n# TYPE pd_requests_total counter\n"
        "pd_requests_total{role=\"decode\",finish_reason=\"stop\"} 7\n"
        "pd_requests_total{role=\"decode\",finish_reason=\"a\\\"b\\\\c\\nd\xef\xbf\xbd\"} 0\n"
        "# HELP pd_ttft_seconds Time to first token,\\nback\\\\slash \"quoted\".\n# TYPE pd_ttft_seconds histogram\n"
        "pd_ttft_seconds_bucket{model=\"tiny\",le=\"0.001\"} 2\npd_ttft_seconds_bucket{model=\"tiny\",le=\"0.0025\"} 4\n"
        "pd_ttft_seconds_bucket{model=\"tiny\",le=\"1\"} 5\npd_ttft_seconds_bucket{model=\"tiny\",le=\"+Inf\"} 7\n"
        "pd_ttft_seconds_sum{model=\"tiny\"} 9.004501\npd_ttft_seconds_count{model=\"tiny\"} 7\n"
        "# HELP pd_blocks \n# TYPE pd_blocks gauge\npd_blocks -12\n");
    assert_int_equal(read_text((char *)out.p, out.n - 1), 9);
    pd_metric_drop(m, b);
    pd_metric_drop(m, a);
    pd_metric_drop(m, NULL);
    out.n = 0;
    assert_int_equal(pd_metrics_text(m, &out, &e), 0);
    assert_null(memmem(out.p, out.n, "pd_requests", 11));        /* a family without series is not told */
    assert_int_equal(pd_metric_get(m, &requests, (const char *[4]){ "x" }, &a, &e), 0);        /* and can have some again */
    pd_metric_add(NULL, 1);
    pd_metric_observe(NULL, 1);
    pd_metric_set(NULL, 1);
    assert_int_equal(pd_metric_value(NULL), 0);
    pd_metrics_free(m);
    pd_buf_free(&out);
}

static void numbers_are_exact(void **state)
{
    static const struct { int64_t v; int scale; const char *text; } t[] = {
        { 0, 9, "0" }, { 1, 9, "0.000000001" }, { -1, 6, "-0.000001" }, { 1500000, 6, "1.5" }, { -1500000, 6, "-1.5" }, { 1000, 3, "1" }, { 12, 0, "12" },
        { INT64_MAX, 6, "9223372036854.775807" }, { INT64_MIN, 9, "-9223372036.854775808" }, { INT64_MIN, 0, "-9223372036854775808" } };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        struct pd_metrics *m;
        struct pd_metric *g;
        struct pd_buf out = { 0 };
        struct pd_metric_about a = { .name = "x", .type = PD_GAUGE, .scale = t[i].scale };
        char want[80];
        assert_int_equal(pd_metrics_new(&m, &e), 0);
        assert_int_equal(pd_metric_get(m, &a, NULL, &g, &e), 0);
        pd_metric_set(g, t[i].v);
        assert_int_equal(pd_metrics_text(m, &out, &e), 0);
        pd_buf_add(&out, "", 1, &e);
        snprintf(want, sizeof want, "gauge\nx %s\n", t[i].text);
        if (!strstr((char *)out.p, want))
            fail_msg("%s: %s", want, (char *)out.p);
        pd_metrics_free(m);
        pd_buf_free(&out);
    }
}

static void bad_families_are_refused_by_name(void **state)
{
    static const int64_t down[] = { 2, 1 };
    static const struct { struct pd_metric_about a; const char *why; } t[] = {
        { { .name = "", .type = PD_COUNTER }, "begins with no digit" }, { { .name = "1a", .type = PD_COUNTER }, "metric '1a'" }, { { .name = "a-b", .type = PD_COUNTER }, "a-b" },
        { { .name = "pd_\xc3\xa4", .type = PD_COUNTER }, "letters" }, { { .name = "ok", .type = PD_COUNTER, .label = { "a:b" } }, "a:b" }, { { .name = "ok", .type = PD_COUNTER, .label = { "__a" } }, "__a" },
        { { .name = "ok", .type = PD_HISTOGRAM, .label = { "le" } }, "'le'" }, { { .name = "ok", .type = PD_COUNTER, .label = { "a", "a" } }, "twice" }, { { .name = "ok", .type = PD_COUNTER, .scale = 10 }, "scale" },
        { { .name = "ok", .type = PD_HISTOGRAM, .bounds = down, .n_bounds = 2 }, "do not rise" }, { { .name = "ok", .type = PD_GAUGE, .bounds = down, .n_bounds = 1 }, "bounds" },
        { { .name = "pd_requests_total", .type = PD_GAUGE }, "another type" }, { { .name = "pd_requests_total", .type = PD_COUNTER, .label = { "role" } }, "another type" },
        { { .name = "pd_ttft_seconds_sum", .type = PD_GAUGE }, "called like" }, { { .name = "pd_requests", .type = PD_GAUGE }, "called like" },
        { { .name = "pd_ttft", .type = PD_HISTOGRAM }, NULL }, { { .name = "pd", .type = PD_HISTOGRAM }, NULL },
        { { .name = "pd_blocks_count", .type = PD_GAUGE }, NULL } };
    struct pd_metrics *m;
    struct pd_metric *s;
    assert_int_equal(pd_metrics_new(&m, &e), 0);
    assert_int_equal(pd_metric_get(m, &requests, NULL, &s, &e), 0);
    assert_int_equal(pd_metric_get(m, &ttft, NULL, &s, &e), 0);
    assert_int_equal(pd_metric_get(m, &blocks, NULL, &s, &e), 0);
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        int rc = pd_metric_get(m, &t[i].a, NULL, &s, &e);
        if (t[i].why ? rc != PD_EUSAGE || !strstr(e.msg, t[i].why) : rc != 0)
            fail_msg("%zu %s: %d %s", i, t[i].a.name, rc, e.msg);
    }
    struct pd_metric_about runs = { .name = "pd_runs", .type = PD_GAUGE, .label = { "run" } };
    int rc = 0, i;
    for (i = 0; !rc; i++) {
        char v[20];
        snprintf(v, sizeof v, "%d", i);
        rc = pd_metric_get(m, &runs, (const char *[4]){ v }, &s, &e);
    }
    assert_int_equal(i, PD_METRIC_SERIES + 1);
    assert_int_equal(rc, PD_ENOMEM);
    pd_metrics_free(m);
}

enum { THREADS = 4, ADDS = 100000 };
static struct pd_metric *shared[2];
static void *adder(void *arg)
{
    for (int i = 0; i < ADDS; i++) {
        pd_metric_add(shared[0], 1);
        pd_metric_observe(shared[1], i % 3000);
    }
    return NULL;
}
static int looked;
static void look(void *ctx) { looked++; }

static void threads_lose_no_count(void **state)
{
    struct pd_metrics *m;
    struct pd_buf out = { 0 };
    pthread_t t[THREADS];
    assert_int_equal(pd_metrics_new(&m, &e), 0);
    assert_int_equal(pd_metrics_before(m, look, NULL, &e), 0);
    assert_int_equal(pd_metric_get(m, &requests, NULL, &shared[0], &e), 0);
    assert_int_equal(pd_metric_get(m, &ttft, NULL, &shared[1], &e), 0);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&t[i], NULL, adder, NULL), 0);
    for (int i = 0; i < 200; i++) {     /* read while they count: buckets and count agree each time */
        out.n = 0;
        assert_int_equal(pd_metrics_text(m, &out, &e), 0);
        assert_int_equal(read_text((char *)out.p, out.n), 7);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(t[i], NULL);
    assert_int_equal(pd_metric_value(shared[0]), THREADS * ADDS);
    assert_int_equal(pd_metric_value(shared[1]), THREADS * ADDS);
    assert_int_equal(looked, 200);
    pd_metrics_free(m);
    pd_buf_free(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(the_text_is_what_was_counted), cmocka_unit_test(numbers_are_exact), cmocka_unit_test(bad_families_are_refused_by_name),
                                        cmocka_unit_test(threads_lose_no_count) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
