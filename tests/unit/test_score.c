/* sim/score: hand-made streams with known figures, from each basis of times; what must not be hidden is not. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <cmocka.h>
#include "../../libcommon/sim/score.h"
#include "../../libcommon/wire/json.h"

static struct pd_report r;

static void start(struct pd_score **s, const struct pd_score_opts *o)
{
    struct pd_err e;
    assert_int_equal(pd_score_new(o, s, &e), 0);
}

/* A record as JSON, that came at mono_us; a request goes where requests go. */
static int try_put(struct pd_score *s, int64_t mono_us, const char *json, struct pd_err *e)
{
    struct pd_buf b = { 0 };
    if (pd_json_to_msgpack(json, strlen(json), &b, e))
        fail_msg("%s: %s", json, e->msg);
    struct pd_rec rec = { pd_kind_of(b.p, b.n), b.p, b.n, 0 };
    int rc = rec.kind == PD_K_REQUEST ? pd_score_request(s, &rec, e) : pd_score_record(s, &rec, mono_us, e);
    pd_buf_free(&b);
    return rc;
}
static void put(struct pd_score *s, int64_t mono_us, const char *json)
{
    struct pd_err e = { 0 };
    if (try_put(s, mono_us, json, &e))
        fail_msg("%s: %s", json, e.msg);
}
static void report(struct pd_score *s)
{
    struct pd_err e;
    assert_int_equal(pd_score_report(s, &r, &e), 0);
}

#define RUN(n) "01ARZ3NDEKTSV4RRFFQ69G5FA" #n
#define RESULT(n, more) RESULTC(n, 0, more)
#define RESULTC(n, choice, more) "{\"pd\":\"result\",\"v\":1,\"run\":\"" RUN(n) "\",\"id\":\"r" #n "\",\"choice\":" #choice ",\"text\":\"\",\"tokens\":[],\"transferred_tokens\":0,\"recomputed_tokens\":0," more "}"
#define ENDED "\"finish_reason\":\"length\",\"mode\":\"remote\",\"cached_tokens\":16,\"prompt_tokens\":64,"
#define TOKEN(n, pos, t) "{\"pd\":\"token\",\"v\":1,\"run\":\"" RUN(n) "\",\"choice\":0,\"pos\":" #pos ",\"token\":5,\"text\":\"x\",\"t_us\":" #t "}"
#define NEAR(x, y) assert_true(fabs((x) - (y)) < 1e-9)

static double p(enum pd_score_figure f, double q) { return pd_sample_quantile(&r.figure[f], q).value; }
static bool says(const char *what)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    assert_int_equal(pd_report_text(&r, &b, &e) | pd_buf_add(&b, "", 1, &e), 0);
    bool yes = strstr((char *)b.p, what);
    pd_buf_free(&b);
    return yes;
}

static void scheduled(void **state)
{
    struct pd_score *s;
    start(&s, &(struct pd_score_opts){ .ttft_ms = 100, .tpot_ms = 30 });
    put(s, 0, RESULT(0, ENDED "\"completion_tokens\":3,\"ttft_ms\":1.0,\"e2e_ms\":2.0,\"kv_bytes\":3000000,\"kv_ms\":2.0,\"sched_us\":0,\"sent_us\":1000,\"first_us\":101000,"
                        "\"done_us\":141000,\"gaps_us\":[15000,25000],\"class\":\"chat\",\"reusable_tokens\":48"));
    put(s, 0, RESULT(1, "\"finish_reason\":\"stop\",\"mode\":\"local\",\"fallback\":\"kv_failed: by a test\",\"prompt_tokens\":16,\"cached_tokens\":0,\"completion_tokens\":1,"
                        "\"sched_us\":100000,\"sent_us\":100000,\"first_us\":150000,\"done_us\":150500,\"class\":\"doc\""));
    put(s, 0, RESULT(2, "\"finish_reason\":\"error\",\"mode\":\"local\",\"prompt_tokens\":9,\"cached_tokens\":0,\"completion_tokens\":0,\"sched_us\":200000,\"sent_us\":200000,\"done_us\":210000,"
                        "\"class\":\"chat\""));
    put(s, 0, "{\"id\":\"r3\",\"token_ids\":[1,2],\"class\":\"chat\",\"arrival_us\":250000}");     /* nobody answered it */
    put(s, 0, "{\"id\":\"r0\",\"token_ids\":[1,2],\"arrival_us\":0}");
    report(s);
    assert_true(r.basis == PD_SB_SCHEDULED && r.n == 4 && r.ended == 2 && r.failed == 1 && r.missing == 1);
    assert_int_equal(r.figure[PD_FG_TTFT].n, 2);
    NEAR(p(PD_FG_TTFT, 0.5), 50);
    NEAR(p(PD_FG_TTFT, 0.99), 101);
    NEAR(pd_sample_mean(&r.figure[PD_FG_TTFT]), 75.5);
    assert_true(r.figure[PD_FG_TPOT].n == 1 && r.figure[PD_FG_SECOND].n == 1 && r.figure[PD_FG_ITL].n == 2);
    NEAR(p(PD_FG_TPOT, 0.5), 20);
    NEAR(p(PD_FG_SECOND, 0.5), 116);
    NEAR(p(PD_FG_ITL, 0.5), 15);
    NEAR(p(PD_FG_ITL, 0.99), 25);
    NEAR(p(PD_FG_E2E, 0.99), 141);
    NEAR(p(PD_FG_LAG, 0.99), 1);
    NEAR(p(PD_FG_KV, 0.5), 2);
    /* r0 is 1 ms late, r1 has no TPOT to miss, r2 failed, r3 never came: 1 of 4. */
    assert_true(r.with_slo == 4 && r.met == 1);
    NEAR(r.offered, 10);
    NEAR(r.span_s, 0.21);
    assert_true(r.prompt_tokens == 80 && r.output_tokens == 4 && r.cached_tokens == 16 && r.reusable_tokens == 48 && r.kv_bytes == 3000000);
    NEAR(r.hit_mean, 0.125);
    assert_true(r.n_classes == 2 && r.class_[0].n == 3 && r.class_[0].ended == 1 && r.class_[0].met == 0 && r.class_[1].met == 1);
    assert_true(r.fallbacks.n == 1 && !strcmp(r.fallbacks.of[0].word, "kv_failed"));
    assert_true(says("ttft{first-scheduled}") && says("slo{met/requests with one}  1 of 4: 25.00 %") && says("goodput{met/span}  4.762/s") &&
                says("remote prefill 50.00 %, fallback 50.00 % (kv_failed 1)") && says("output 19.05") && says("1.5 GB/s") && says("20.00 % of tokens, 12.50 % mean") &&
                says("unanswered 1") && says("send lag is large"));
    pd_report_free(&r);
    pd_score_free(s);
}

static void closed(void **state)
{
    struct pd_score *s;
    start(&s, &(struct pd_score_opts){ 0 });
    put(s, 0, RESULT(0, ENDED "\"completion_tokens\":2,\"sent_us\":1000,\"first_us\":3000,\"done_us\":5000,\"gaps_us\":[1500]"));
    report(s);
    assert_int_equal(r.basis, PD_SB_SENT);
    NEAR(p(PD_FG_TTFT, 0.5), 2);
    NEAR(p(PD_FG_E2E, 0.5), 4);
    assert_true(r.figure[PD_FG_LAG].n == 0 && r.offered == 0 && !r.with_slo && says("ttft{first-sent}") && says("a closed loop"));
    pd_report_free(&r);
    pd_score_free(s);
}

/* Stamped here: the stream began at 5 s of the monotonic clock. */
static void seen(void **state)
{
    struct pd_score *s;
    start(&s, &(struct pd_score_opts){ .live = true });
    put(s, 5040000, TOKEN(0, 0, 10));
    put(s, 5050000, TOKEN(0, 1, 7010));
    put(s, 5052000, RESULT(0, ENDED "\"completion_tokens\":2,\"ttft_ms\":1.0,\"e2e_ms\":2.0"));
    put(s, 5300000, RESULT(1, ENDED "\"completion_tokens\":2,\"ttft_ms\":1.0,\"e2e_ms\":2.0"));
    put(s, 0, "{\"id\":\"r0\",\"token_ids\":[1],\"arrival_us\":10000,\"start_us\":5000000,\"slo\":{\"ttft_ms\":30.0}}");
    put(s, 0, "{\"id\":\"r1\",\"token_ids\":[1],\"arrival_us\":200000,\"start_us\":5000000,\"slo\":{\"ttft_ms\":30.0}}");
    report(s);
    assert_int_equal(r.basis, PD_SB_SEEN);
    assert_true(r.figure[PD_FG_TTFT].n == 1 && r.figure[PD_FG_ITL].n == 1 && r.tokens_unseen == 1);
    NEAR(p(PD_FG_TTFT, 0.5), 30);
    NEAR(p(PD_FG_SECOND, 0.5), 40);
    NEAR(p(PD_FG_ITL, 0.5), 10);
    NEAR(p(PD_FG_TPOT, 0.5), 12);
    NEAR(p(PD_FG_E2E, 0.5), 42);
    assert_true(r.met == 1 && r.with_slo == 2);         /* whose first token nobody saw has not met it */
    NEAR(r.span_s, 0.29);
    assert_true(says("ttft{first_seen-scheduled}") && says("of 1 requests no token record was seen"));
    pd_report_free(&r);
    pd_score_free(s);
}

static void reported(void **state)
{
    struct pd_score *s;
    start(&s, &(struct pd_score_opts){ .tpot_ms = 4 });         /* from a file: not live, and no schedule */
    put(s, 77, TOKEN(0, 0, 10));
    put(s, 77, TOKEN(0, 1, 7010));
    put(s, 77, RESULT(0, ENDED "\"completion_tokens\":3,\"ttft_ms\":12.0,\"tpot_ms\":3.5,\"e2e_ms\":19.0"));
    put(s, 77, RESULT(1, "\"finish_reason\":\"cancelled\",\"mode\":\"remote\",\"cached_tokens\":0,\"prompt_tokens\":4,\"completion_tokens\":2,\"ttft_ms\":1.0,\"e2e_ms\":2.0"));
    put(s, 0, "{\"id\":\"r0\",\"token_ids\":[1],\"arrival_us\":10000,\"start_us\":5000000}");
    put(s, 0, "{\"id\":\"r1\",\"token_ids\":[1],\"arrival_us\":10000,\"start_us\":5000000}");
    report(s);
    assert_true(r.basis == PD_SB_REPORTED && r.n == 2 && r.failed == 1 && r.span_s == 0 && r.offered == 0);
    assert_int_equal(r.figure[PD_FG_TTFT].n, 1);
    NEAR(p(PD_FG_TTFT, 0.5), 12);
    NEAR(p(PD_FG_TPOT, 0.5), 3.5);
    NEAR(p(PD_FG_E2E, 0.5), 19);
    NEAR(p(PD_FG_ITL, 0.5), 7);
    assert_true(r.met == 1 && r.with_slo == 2 && says("ttft{first-accepted}") && !says("goodput") && says("rates are not known"));
    pd_report_free(&r);
    pd_score_free(s);
    /* One result without a schedule among others that have one: the weaker basis for all. */
    start(&s, &(struct pd_score_opts){ 0 });
    put(s, 0, RESULT(0, ENDED "\"completion_tokens\":2,\"ttft_ms\":1.0,\"e2e_ms\":2.0,\"sched_us\":0,\"sent_us\":0,\"first_us\":9000,\"done_us\":9000"));
    put(s, 0, RESULT(1, ENDED "\"completion_tokens\":2,\"ttft_ms\":3.0,\"e2e_ms\":4.0"));
    report(s);
    assert_true(r.basis == PD_SB_REPORTED && p(PD_FG_TTFT, 0.99) == 3);
    pd_report_free(&r);
    pd_score_free(s);
}

static void refuses(void **state)
{
    struct pd_score *s;
    struct pd_err e = { 0 };
    start(&s, &(struct pd_score_opts){ 0 });
    put(s, 0, RESULT(0, ENDED "\"completion_tokens\":2"));
    assert_int_equal(try_put(s, 0, RESULT(0, ENDED "\"completion_tokens\":2"), &e), PD_ECORRUPT);
    assert_non_null(strstr(e.msg, "two of id"));
    put(s, 0, RESULTC(0, 1, ENDED "\"completion_tokens\":2"));
    assert_int_equal(try_put(s, 0, "{\"token_ids\":[1]}", &e), PD_ECORRUPT);
    assert_int_equal(try_put(s, 0, RESULT(1, ENDED "\"completion_tokens\":2,\"gaps_us\":7"), &e), PD_ECORRUPT);
    assert_int_equal(try_put(s, 0, RESULT(2, ENDED "\"completion_tokens\":2,\"gaps_us\":[-1]"), &e), PD_ECORRUPT);
    assert_int_equal(try_put(s, 0, "{\"pd\":\"result\",\"v\":1}", &e), PD_ECORRUPT);
    put(s, 0, "{\"pd\":\"weather\",\"v\":1}");
    report(s);
    assert_int_equal(r.output_tokens, 2 * 4);           /* two choices, and two that were added before their gaps were looked at */
    pd_report_free(&r);
    /* Ids of any length and kind are told apart. */
    put(s, 0, "{\"id\":17,\"token_ids\":[1]}");
    put(s, 0, "{\"id\":\"17\",\"token_ids\":[1]}");
    put(s, 0, "{\"id\":\"a-very-long-identifier-that-no-key-holds-1\",\"token_ids\":[1]}");
    put(s, 0, "{\"id\":\"a-very-long-identifier-that-no-key-holds-2\",\"token_ids\":[1]}");
    report(s);
    assert_int_equal(r.missing, 4);
    pd_report_free(&r);
    pd_score_free(s);
}

static void ratios(void **state)
{
    /* Roots of (p - k/n)^2 = z^2 p (1 - p) / n, by Python. */
    struct pd_ratio q = pd_ratio_of(50, 100);
    assert_true(q.value == 0.5 && fabs(q.lo - 0.4038315303659956) < 1e-12 && fabs(q.hi - 0.5961684696340043) < 1e-12);
    q = pd_ratio_of(9, 10);
    assert_true(fabs(q.lo - 0.5958499732047615) < 1e-12 && fabs(q.hi - 0.9821237869049271) < 1e-12);
    q = pd_ratio_of(0, 10);
    assert_true(q.lo == 0 && fabs(q.hi - 0.2775327998628892) < 1e-12);
    q = pd_ratio_of(10, 10);
    assert_true(q.hi == 1 && fabs(q.lo - 0.7224672001371107) < 1e-12);
    q = pd_ratio_of(0, 0);
    assert_true(q.value == 0 && q.lo == 0 && q.hi == 0);
}

static void record(void **state)
{
    struct pd_score *s;
    struct pd_err e = { 0 };
    struct pd_buf b = { 0 }, text = { 0 };
    start(&s, &(struct pd_score_opts){ .ttft_ms = 10 });
    put(s, 0, RESULT(0, ENDED "\"completion_tokens\":2,\"ttft_ms\":1.0,\"e2e_ms\":2.0"));
    report(s);
    assert_int_equal(pd_report_record(&r, &b, &e), 0);
    assert_int_equal(pd_msgpack_to_json(b.p, b.n, &text, &e) | pd_buf_add(&text, "", 1, &e), 0);
    assert_non_null(strstr((char *)text.p, "\"ttft\":{\"formula\":\"first-accepted\",\"unit\":\"ms\",\"n\":1,\"mean\":1.0,\"p50\":[1.0,null,null]"));
    assert_non_null(strstr((char *)text.p, "\"met\":1,\"attainment\":[1.0,"));
    pd_buf_free(&b);
    pd_buf_free(&text);
    pd_report_free(&r);
    pd_score_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(scheduled), cmocka_unit_test(closed), cmocka_unit_test(seen), cmocka_unit_test(reported), cmocka_unit_test(refuses),
        cmocka_unit_test(ratios), cmocka_unit_test(record) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
