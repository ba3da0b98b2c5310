/* What pd-trace says of decisions, on records whose numbers can be checked by hand: why in words, the same decision again, what another policy would have done. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../libcommon/base/log.h"
#include "../../libcommon/route/history.h"
#include "route_scene.h"

static struct pd_err e;
static char file[] = "/tmp/pd-test-XXXXXX";
static struct pd_buf log_bytes;
static struct pd_outcome_rec o;

/* ---- a log ---- */

static void name_run(int i)
{
    snprintf(r.run, sizeof r.run, "01M8PAW1CACQM7WS4V%08d", i);
    memset(r.op, i, sizeof r.op);
    r.t_us = 1796000000000000 + 1000000 * (int64_t)i;
    r.attempt = 1;
}

static void decide(int i)
{
    name_run(i);
    if (pd_choose(&r, &e) || pd_route_encode(&r, &log_bytes, &e))
        fail_msg("%s", e.msg);
}

/* What was decided last took just its P50, and its output the tokens that were expected. */
static void just_so(void)
{
    struct pd_spread want[PD_WT_N];
    unsigned has = pd_way_expected(&r, &r.pair[r.chosen.pair], want);
    int64_t *const us[PD_WT_N] = { &o.queue_us, &o.prefill_us, &o.transfer_us, &o.sync_us, &o.ttft_us, &o.tpot_us, &o.completion_us };
    static const uint32_t bit[PD_WT_N] = { PD_OC_QUEUE, PD_OC_PREFILL, PD_OC_TRANSFER, PD_OC_SYNC, PD_OC_TTFT, PD_OC_TPOT, PD_OC_COMPLETION };
    o = (struct pd_outcome_rec){ .t_us = r.t_us + r.completion.p50, .attempt = r.attempt, .finish_reason = "stop", .prompt_tokens = r.input.n_tokens,
                                 .completion_tokens = r.input.out_p50, .d = r.d[r.chosen.d].worker };
    if (r.chosen.p >= 0)
        o.p = r.p[r.chosen.p].worker;
    memcpy(o.run, r.run, sizeof o.run);
    memcpy(o.op, r.op, sizeof o.op);
    memcpy(o.policy, r.policy, sizeof o.policy);
    snprintf(o.mode, sizeof o.mode, "%s", pd_mode_names[r.chosen.mode]);
    for (int i = 0; i < PD_WT_N; i++)
        if (has >> i & 1) {
            *us[i] = want[i].p50;
            o.has |= bit[i];
        }
}

static void ends(void)
{
    if (pd_outcome_encode(&o, &log_bytes, &e))
        fail_msg("%s", e.msg);
}

static void fresh(const char *policy)
{
    log_bytes.n = 0;
    scene(policy);
}

/* ---- a verb on it ---- */

typedef int verb(const struct pd_review_opts *o, int *status, struct pd_err *e);
static char *said;
static int status;

static int review(verb *fn, struct pd_review_opts opts)
{
    const char *const paths[] = { file, NULL };
    size_t n;
    FILE *f = fopen(file, "wb");
    assert_int_equal(fwrite(log_bytes.p, 1, log_bytes.n, f), log_bytes.n);
    fclose(f);
    free(said);
    status = 0;
    opts.log.paths = paths;
    opts.log.out = open_memstream(&said, &n);
    int rc = fn(&opts, &status, &e);
    fclose(opts.log.out);
    return rc;
}

static void says(const char *want)
{
    if (!strstr(said, want))
        fail_msg("'%s' is not in:\n%s", want, said);
}

/* D is busy and holds a fifth; what p0 sends takes 40 ms longer than it ought to. */
static void a_run(void)
{
    fresh("conditional");
    busy(&d[0], 4);
    busy(&d[1], 4);
    holds(&d[0], 25);
    p[1].x = PD_X_STATE;
    p[1].excluded = (struct pd_str)S("draining");
    domain[0] = (struct pd_str)S("rack\x1b[31mA");      /* must not reach a terminal */
    path[0].from = path[0].to = 0;
    path[0].kind = (struct pd_str)S("rack");
    path[0].age_us = 2500000;
    path[0].sync.marks = PD_SPREAD_STALE;
    r.input.exact = false;
    r.input.slo = (struct pd_bin){ (const uint8_t *)"\x81\xa7ttft_ms\xcd\x03\xe8", 12 };
    r.degraded = PD_DG_NO_TOKEN_IDS;
    r.waited_us = 1200;
    strcpy(r.shadow.policy, "dynamo");
    decide(7);
    just_so();
    o.transfer_us += 40 * MS;
    o.ttft_us += 40 * MS;
    o.completion_us += 40 * MS;
    o.transferred_tokens = 1600;
    ends();
}

static void why_in_words(void **state)
{
    a_run();
    assert_int_equal(review(pd_review_why, (struct pd_review_opts){ .log.run = "01M8" }), 0);
    assert_string_equal(said,
        "run 01M8PAW1CACQM7WS4V00000007, decision 1 of 1, 2026-11-30T00:53:27.000000Z, 1.2 ms after it was accepted\n"
        "asked      2000 tokens of prompt (guessed), at most 64 out (32 expected, P95 64), SLO {\"ttft_ms\":1000}\n"
        "policy     conditional, P95, others count 1 x; epoch 0; index 0, topology 0, registry 0\n"
        "prefill    1 of 2 could: p0; not p1 (draining)\n"
        "decode     2 of 2 could: d0 (holds 25 of 125 blocks), d1\n"
        "path       1.6 MiB of KV, rack rack?[31mA > rack?[31mA, 0 transfers on it, measured 2.5 s ago\n"
        "ms                                             local, d0         remote, p0 > d0\n"
        "                                         P50        P95          P50        P95\n"
        "prefill                                800.0     1000.0       1000.0     1250.0\n"
        "interference                            80.0      100.0          0.0        0.0\n"
        "transfer                                 0.0        0.0         50.0       60.3\n"
        "sync                                     0.0        0.0          5.0        6.2*\n"
        "= TTFT                                 880.0     1081.0       1055.0     1305.2*\n"
        "decode                                 744.0      930.0        744.0      930.0\n"
        "= completion                          1624.0     1897.9       1799.0     2110.8*\n"
        "others wait                                      3212.8                    12.8\n"
        "= price                                          5110.7                  2123.6\n"
        "* measured a while ago\n"
        "chosen     remote, p0 to d0: 2123.6 ms (1799.0 at P50, others wait 12.8: queue 0.0, prefill 1000.0, transfer 50.0 less 0.0, decode 744.0); best local 5110.7 ms\n"
        "apart      local is 2987.1 ms dearer by its price (58.4 %); for the choice: others wait 3200.0, interference 80.0; against it: prefill 200.0, transfer 50.0, sync 5.0\n"
        "degraded   no_token_ids stale\n"
        "shadow     dynamo would have taken remote, p0 > d0, the same\n"
        "outcome    stop after 32 tokens, remote, p0 > d0; of the prompt 0 tokens were held, 1600 came, 0 were computed again\n"
        "ms                                       P50        P95         took\n"
        "queue                                    0.0        0.0          0.0  within P95\n"
        "prefill                               1000.0     1250.0       1000.0  within P95\n"
        "transfer                                50.0       60.3         90.0  29.7 beyond P95\n"
        "sync                                     5.0        6.2          5.0  within P95\n"
        "ttft                                  1055.0     1305.2       1095.0  within P95\n"
        "tpot                                    24.0       30.0         24.0  within P95\n"
        "completion                            1799.0     2110.8       1839.0  within P95\n");
    domain[0] = (struct pd_str)S("rackA");
}

static void why_with_long_names(void **state)
{
    fresh("conditional");
    p[0].worker = (struct pd_str)S("prefill@host-1:12345");
    decide(1);
    review(pd_review_why, (struct pd_review_opts){ .log.run = r.run });
    says("\npath       2.0 MiB of KV, 0 transfers on it, measured 0.0 s ago\n"
         "local      d0\nremote     prefill@host-1:12345 > d0\nms                                                 local                  remote\n");
}

static void why_as_json(void **state)
{
    a_run();
    assert_int_equal(review(pd_review_why, (struct pd_review_opts){ .log = { .run = r.run, .json = true } }), 0);
    says("{\"run\":\"01M8PAW1CACQM7WS4V00000007\",\"decision\":1,\"of\":1,\"t_us\":1796000007000000,\"waited_ms\":1.200,\"policy\":\"conditional\",\"risk\":0.95,");
    says("\"prefill\":[{\"worker\":\"p0\",\"hit_blocks\":0,\"miss_blocks\":125,\"could\":true,\"excluded\":null},"
         "{\"worker\":\"p1\",\"hit_blocks\":0,\"miss_blocks\":125,\"could\":false,\"excluded\":\"draining\"}]");
    says("{\"mode\":\"remote\",\"p\":\"p0\",\"d\":\"d0\",\"bytes\":1638400,\"terms\":[{\"name\":\"queue\",");
    says("{\"name\":\"completion\",\"p50_ms\":1624.000,\"p95_ms\":1897.854,\"cold\":false,\"stale\":false}");
    says("\"chosen\":{\"mode\":\"remote\",\"p\":\"p0\",\"d\":\"d0\"}");
    says("\"apart_ms\":2987.0");
    says("\"degraded\":[\"no_token_ids\",\"stale\"],\"shadow\":{\"policy\":\"dynamo\",\"mode\":\"remote\"");
    says("\"as_decided\":true");
    says("{\"name\":\"transfer\",\"took_ms\":90.000,\"p50_ms\":50.000,\"p95_ms\":60.308,\"within\":false}");
    domain[0] = (struct pd_str)S("rackA");
}

static void why_there_is_no_other_way(void **state)
{
    fresh("aggregated");
    decide(1);
    assert_int_equal(review(pd_review_why, (struct pd_review_opts){ .log.run = r.run }), 0);
    says("remote     not possible: the policy aggregated looks at no such way\n");
    says("outcome    there is none of this run here");
    says("aggregated, d0\n");
    fresh("conditional");
    path[0].x = PD_X_PATH;
    path[0].excluded = (struct pd_str)S("breaker open 3.2s");
    decide(1);
    review(pd_review_why, (struct pd_review_opts){ .log.run = r.run });
    says("remote     not possible: breaker open 3.2s\n");
    fresh("fixed");
    d[0].x = d[1].x = PD_X_RUNS;
    d[0].excluded = d[1].excluded = (struct pd_str)S("capacity: 8 runs of 8");
    decide(1);
    review(pd_review_why, (struct pd_review_opts){ .log.run = r.run });
    says("decode     0 of 2 could: d0 (capacity: 8 runs of 8); d1 (capacity: 8 runs of 8)\n"
         "local      not possible: the policy fixed looks at no such way\n"
         "remote     not possible: no decode worker could\n"
         "nobody     wait_room\n");
    fresh("conditional");
    fit[0] = (struct pd_route_fit){ .why = S("rope_theta differs (prefill 10000, decode 500000)") };
    r.n_fits = 1;
    decide(1);
    review(pd_review_why, (struct pd_review_opts){ .log.run = r.run });
    says("remote     not possible: rope_theta differs (prefill 10000, decode 500000)\n");
    fresh("conditional");
    r.input.local = true;
    r.n_p = 0;
    r.cause = (struct pd_str)S("prefill worker p0 is gone");
    r.fallback = (struct pd_str)S("prefill_worker_gone");
    decide(1);
    review(pd_review_why, (struct pd_review_opts){ .log.run = r.run });
    says("again      prefill worker p0 is gone; fallback prefill_worker_gone\n");
    says("remote     not possible: one worker does all of a fallback\n");
    assert_null(strstr(said, "0 of 0 could"));
}

static void why_a_run_was_decided_twice(void **state)
{
    fresh("fixed");
    decide(1);
    r.p[r.chosen.p].x = PD_X_TRIED;
    r.p[r.chosen.p].excluded = (struct pd_str)S("failed this run already");
    memset(&r.op, 9, sizeof r.op);
    r.attempt = 2;
    assert_int_equal(pd_choose(&r, &e) || pd_route_encode(&r, &log_bytes, &e), 0);
    just_so();
    o.fallback = (struct pd_str)S("integrity: chunk 5");
    strcpy(o.mode, "local");
    ends();
    assert_int_equal(review(pd_review_why, (struct pd_review_opts){ .log.run = r.run }), 0);
    says("decision 1 of 2");
    says("decision 2 of 2");
    says("not p0 (failed this run already)");
    const char *second = strstr(said, "decision 2 of 2"), *outcome = strstr(said, "outcome    stop after 32 tokens, local, p1 > d0; fell back: integrity: chunk 5;");
    assert_true(second && outcome > second);
    says("it did not come as it was decided");
    says("completion                                 -          -       1685.0\n");
}

static void why_not(void **state)
{
    fresh("fixed");
    decide(1);
    decide(2);
    assert_int_equal(review(pd_review_why, (struct pd_review_opts){ .log.run = "01M8PAW" }), PD_EUSAGE);
    assert_non_null(strstr(e.msg, "several runs, as of 01M8PAW1CACQM7WS4V00000001 and 01M8PAW1CACQM7WS4V00000002"));
    assert_int_equal(review(pd_review_why, (struct pd_review_opts){ .log.run = "02" }), PD_EFAIL);
    assert_non_null(strstr(e.msg, "no record of run 02"));
    just_so();
    log_bytes.n = 0;
    ends();
    assert_int_equal(review(pd_review_why, (struct pd_review_opts){ .log.run = "01" }), PD_EFAIL);
    assert_non_null(strstr(e.msg, "run 01M8PAW1CACQM7WS4V00000002 has an outcome here and no route record: name the trace of the router"));
}

/* As it was decided, and then tampered with. */
static void lies(int i, void (*change)(void))
{
    name_run(i);
    assert_int_equal(pd_choose(&r, &e), 0);
    change();
    assert_int_equal(pd_route_encode(&r, &log_bytes, &e), 0);
}
static void lie_score(void) { r.pair[1].score += 7; }
static void lie_choice(void) { r.chosen = (struct pd_route_chosen){ .any = true, .mode = PD_MODE_LOCAL, .p = -1, .d = 1, .pair = 1 }; }
static void lie_degraded(void) { r.degraded |= PD_DG_COLD; }

static void replayed(void **state)
{
    fresh("conditional");
    for (int i = 1; i <= 3; i++) {
        decide(i);
        just_so();
        ends();
    }
    assert_int_equal(review(pd_review_replay, (struct pd_review_opts){ .identical = true }), 0);
    assert_int_equal(status, 0);
    assert_string_equal(said, "3 decisions: 3 identical, 0 different, 0 unreadable\n");
    lies(4, lie_score);
    lies(5, lie_choice);
    lies(6, lie_degraded);
    assert_int_equal(review(pd_review_replay, (struct pd_review_opts){ 0 }), 0);
    assert_int_equal(status, 0);
    assert_string_equal(said, "01M8PAW1CACQM7WS4V00000004  decision 1: pairs[1].score was 1914158, is 1914151\n"
                        "01M8PAW1CACQM7WS4V00000005  decision 1: chosen.d was \"d1\", is \"d0\"\n"
                        "01M8PAW1CACQM7WS4V00000006  decision 1: degraded[0] was \"cold\", is absent\n"
                        "6 decisions: 3 identical, 3 different, 0 unreadable\n");
    assert_int_equal(review(pd_review_replay, (struct pd_review_opts){ .identical = true, .log.json = true }), 0);
    assert_int_equal(status, 4);
    says("{\"run\":\"01M8PAW1CACQM7WS4V00000004\",\"decision\":1,\"key\":\"pairs[1].score\",\"was\":\"1914158\",\"now\":\"1914151\"}\n");
    says("{\"summary\":{\"decisions\":6,\"identical\":3,\"different\":3,\"unreadable\":0}}\n");
}

/* What cannot be read is counted, and no reason to stop before --strict says so. */
static void replayed_as_far_as_it_can_be(void **state)
{
    fresh("conditional");
    decide(1);
    size_t one = log_bytes.n;
    assert_int_equal(pd_buf_add(&log_bytes, log_bytes.p, one, &e), 0);
    memcpy((uint8_t *)memmem(log_bytes.p, one, "conditional", 11), "conditionol", 11);
    assert_int_equal(pd_buf_add(&log_bytes, log_bytes.p, one / 2, &e), 0);      /* torn */
    assert_int_equal(review(pd_review_replay, (struct pd_review_opts){ .identical = true }), 0);
    assert_int_equal(status, 0);
    assert_string_equal(said, "2 decisions: 1 identical, 0 different, 1 unreadable\n");
    assert_int_equal(review(pd_review_replay, (struct pd_review_opts){ .identical = true, .log.strict = true }), 0);
    assert_int_equal(status, 9);
    log_bytes.n = one;
    assert_int_equal(review(pd_review_replay, (struct pd_review_opts){ .identical = true }), PD_ECORRUPT);
    assert_non_null(strstr(e.msg, "none of 1 route records can be read, the first: 'conditionol' is not known"));
    just_so();
    log_bytes.n = 0;
    ends();
    assert_int_equal(review(pd_review_replay, (struct pd_review_opts){ .identical = true }), PD_EFAIL);
    assert_non_null(strstr(e.msg, "no route record here: name the trace of a router"));
}

static void what_another_policy_would_have_done(void **state)
{
    fresh("conditional");
    decide(1);                          /* local d0, by any policy that has a choice */
    busy(&d[0], 4);
    busy(&d[1], 2);
    decide(2);                          /* remote p0 > d1 */
    d[0].x = d[1].x = PD_X_RUNS;
    d[0].excluded = d[1].excluded = (struct pd_str)S("capacity");
    decide(3);
    assert_int_equal(review(pd_review_replay, (struct pd_review_opts){ .policy = "aggregated" }), 0);
    assert_string_equal(said,
        "01M8PAW1CACQM7WS4V00000002  decision 1: remote p0 > d1 -> aggregated d1; TTFT 1065.0 -> 1040.0 ms, completion 1747.0 -> 1722.0 ms: gains 25.0\n"
        "3 decisions by aggregated: 1 changed, 0 unreadable\n"
        "  aggregated         0 -> 2\n"
        "  remote             1 -> 0\n"
        "  local              1 -> 0\n"
        "  nobody             1 -> 1\n"
        "estimated at P50: completion +25.0 ms in all (1 gain 25.0, 0 lose 0.0), TTFT +25.0; without an estimate: 0\n"
        "each decision is taken by itself: what other choices before it would have left of queues and caches is not in it\n");
    assert_int_equal(review(pd_review_replay, (struct pd_review_opts){ .policy = "fixed", .log.json = true }), 0);
    says("{\"run\":\"01M8PAW1CACQM7WS4V00000001\",\"decision\":1,\"was\":{\"mode\":\"local\",\"p\":null,\"d\":\"d0\",\"ttft_ms\":1000.000,\"completion_ms\":1620.000},"
         "\"now\":{\"mode\":\"remote\",\"p\":\"p0\",\"d\":\"d0\",\"ttft_ms\":1065.000,\"completion_ms\":1685.000},\"gain_ms\":-65.000}\n");
    says("\"better\":0,\"better_ms\":0.000,\"worse\":1,\"worse_ms\":65.000,\"without_estimate\":0,\"gain_ms\":-65.000,\"ttft_gain_ms\":-65.000}}\n");
    assert_int_equal(review(pd_review_replay, (struct pd_review_opts){ .policy = "conditional" }), 0);
    assert_string_equal(said, "3 decisions by conditional: 0 changed, 0 unreadable\n  remote             1 -> 1\n  local              1 -> 1\n  nobody             1 -> 1\n");
    assert_int_equal(review(pd_review_replay, (struct pd_review_opts){ .policy = "thresold" }), PD_EUSAGE);
    assert_non_null(strstr(e.msg, "--policy: 'thresold' is not known"));
}

/* Of runs that were drawn, those that the other policy would have sent the same way stand for it. */
static void what_was_tried(void **state)
{
    fresh("random");
    int same = 0, n = 0;
    double all = 0, weighted = 0, weight = 0;
    for (int i = 0; i < 40; i++) {
        scene("random");
        r.seed = (uint64_t)i;
        r.n_p = i % 2 ? 2 : 0;
        decide(i);
        just_so();
        o.completion_us = (1000 + 10 * i) * MS;
        ends();
        n++;
        all += 1000 + 10 * i;
        assert_true(r.propensity == 1.0 / (i % 2 ? 6 : 2));
        if (r.chosen.p < 0 && r.chosen.d == 0) {        /* as aggregated would */
            same++;
            weighted += (1000 + 10 * i) / r.propensity;
            weight += 1 / r.propensity;
        }
    }
    assert_true(same > 5 && same < 30);
    decide(40);                         /* whose end is not here */
    char want[200];
    snprintf(want, sizeof want, "measured: %d of %d runs were drawn to go where aggregated would have sent them; weighted by their chance they took %.1f ms in the mean, all %.1f\n",
             same, n, weighted / weight, all / n);
    assert_int_equal(review(pd_review_replay, (struct pd_review_opts){ .policy = "aggregated" }), 0);
    says(want);
    fresh("conditional");
    decide(1);
    just_so();
    ends();
    assert_int_equal(review(pd_review_replay, (struct pd_review_opts){ .policy = "aggregated" }), 0);
    assert_null(strstr(said, "measured"));      /* nothing was drawn */
}

/* ls and stats of a router's log that has no events in it. */
static int list(const struct pd_review_opts *opts, int *st, struct pd_err *err) { return pd_report_ls(&opts->log, st, err); }
static int stats(const struct pd_review_opts *opts, int *st, struct pd_err *err) { return pd_report_stats(&opts->log, st, err); }

static void listed_by_outcome(void **state)
{
    fresh("fixed");
    decide(1);
    r.waited_us = 2 * MS;
    decide(2);
    just_so();
    o.waited_us = 2 * MS;
    ends();
    decide(3);
    just_so();
    strcpy(o.finish_reason, "error");
    o.has = 0;
    o.p.n = 0;
    o.cause = (struct pd_str)S("no\x1b[m KV");
    o.completion_tokens = 0;
    ends();
    assert_int_equal(review(list, (struct pd_review_opts){ 0 }), 0);
    assert_string_equal(said,
        "01M8PAW1CACQM7WS4V00000002  2026-11-30T00:53:21.998000Z  remote     completed    32 tokens  ttft 1067.000 ms  e2e 1687.000 ms  p0 > d0\n"
        "01M8PAW1CACQM7WS4V00000003  2026-11-30T00:53:22.998000Z  remote     failed        0 tokens  ttft -  e2e -  d0: no [m KV\n"
        "01M8PAW1CACQM7WS4V00000001  2026-11-30T00:53:21.000000Z  remote     route_selected     0 tokens  ttft -  e2e -  p0 > d0\n");
    assert_int_equal(review(stats, (struct pd_review_opts){ .log.json = true }), 0);
    says("{\"name\":\"decided_remote\",\"unit\":\"count\",\"value\":3}\n");
    says("{\"name\":\"outcomes\",\"unit\":\"count\",\"value\":2}\n");
    says("{\"name\":\"r_ttft\",\"unit\":\"ms\",\"n\":1,\"min\":1065.000,");
}

/* Runs a second apart that take what was expected, but for what `off` does to them. D holds a quarter, and is too busy to compute the rest. */
static void runs(int from, int to, void (*off)(int i))
{
    for (int i = from; i < to; i++) {
        scene("conditional");
        busy(&d[0], 4);
        busy(&d[1], 4);
        holds(&d[0], 25);
        queued(&p[0], 0);
        queued(&p[1], 0);
        p[0].queue = p[1].queue = about(100 * MS);
        p[i % 2].given = 1;             /* the other one is next */
        decide(i);
        just_so();
        o.cached_tokens = 400;
        off(i);
        ends();
    }
}

static void on_time(int i) { (void)i; }
static void queue_of_p0(int i)          /* twice what it was thought to be, at one of the two; that is not the first that is named */
{
    if (i % 2) {
        o.queue_us += 100 * MS;
        o.ttft_us += 100 * MS;
        o.completion_us += 100 * MS;
    }
}
static void nobody_holds_it(int i)
{
    (void)i;
    o.cached_tokens = 0;
    o.transfer_us += 10 * MS;
    o.completion_us += 10 * MS;
}
static void a_little_late(int i)        /* beyond P95, and nothing to speak of */
{
    o.queue_us += 26 * MS;
    o.sync_us += i % 2 * MS;
}
static void in_half_the_time(int i)
{
    (void)i;
    o.prefill_us /= 2;
    o.ttft_us -= o.prefill_us;
    o.completion_us -= o.prefill_us;
}
static void falls_back(int i)
{
    (void)i;
    o.fallback = (struct pd_str)S("integrity: chunk 5");
}

static void drifted(void **state)
{
    fresh("conditional");
    runs(0, 60, on_time);
    runs(60, 100, queue_of_p0);
    runs(100, 103, falls_back);
    decide(103);
    assert_int_equal(review(pd_review_drift, (struct pd_review_opts){ 0 }), 0);
    says("100 runs, decided from 2026-11-30T00:53:20.000000Z to 2026-11-30T00:54:59.000000Z, in 10 windows of 10.000 s; left out: 3 that came otherwise than decided, 1 without "
         "an outcome\n"
         "                                n      error took/P50     in P95  windows\n"
         "cache                         100      0.0 %     1.00    100.0 %  ..........\n"
         "queue                         100      0.0 %     1.00     80.0 %  ......!!!!\n"
         "  p1                           50      0.0 %     1.00    100.0 %  ----------\n"
         "  p0                           50      0.0 %     1.00     60.0 %  ----------\n"
         "prefill                       100      0.0 %     1.00    100.0 %  ..........\n");
    says("transfer                      100      0.0 %     1.00    100.0 %  ..........\n"           /* one path: no line for it alone */
         "sync                          100      0.0 %     1.00    100.0 %  ..........\n"
         "tpot                          100      0.0 %     1.00    100.0 %  ..........\n"
         "ttft                          100      0.0 %     1.00    100.0 %  ..........\n");
    says("queue left its band first, in the window from 2026-11-30T00:54:20.000000Z: 50.0 % of 10 runs within P95 (chance explains 78.9 %), median error 25.0 %, "
         "it took 1.50 times what was expected; worst p0 (0.0 % of 5)\n"
         "this points to the queue: ");
    assert_int_equal(review(pd_review_drift, (struct pd_review_opts){ .window_us = 50000000, .log.json = true }), 0);
    says("{\"term\":\"queue\",\"worker\":\"p0\",\"n\":50,\"error\":0.000000,\"ratio\":1.000000,\"covered\":0.600000,\"judged\":true,\"out\":true,\"windows\":[{");
    says("{\"term\":\"queue\",\"n\":100,\"error\":0.000000,\"ratio\":1.000000,\"covered\":0.800000,\"judged\":true,\"out\":true,\"windows\":["
         "{\"t_us\":1796000000000000,\"n\":50,\"error\":0.000000,\"ratio\":1.000000,\"covered\":1.000000,\"judged\":true,\"out\":false},"
         "{\"t_us\":1796000050000000,\"n\":50,\"error\":0.000000,\"ratio\":1.000000,\"covered\":0.600000,\"judged\":true,\"out\":true}]}\n");
    says("{\"first\":\"queue\",\"t_us\":1796000050000000,\"window\":1,");
    says("\"worst\":{\"name\":\"p0\"},\"points\":\"the queue: ");
    assert_int_equal(review(pd_review_drift, (struct pd_review_opts){ .window_us = 50000 }), PD_EUSAGE);
    assert_non_null(strstr(e.msg, "--window: 99.000 s of log make 1980 windows of 0.050 s; at most 1000"));
}

/* The outcome is of the decision that has its op; of none, it is nobody's. */
static void joined_by_op(void **state)
{
    fresh("fixed");
    decide(1);
    just_so();
    o.tpot_us = 60 * MS;
    memset(&r.op, 9, sizeof r.op);
    r.attempt = 2;
    busy(&d[0], 5);
    d[1].x = PD_X_TRIED;
    d[1].excluded = (struct pd_str)S("failed this run already");
    assert_int_equal(pd_choose(&r, &e) || pd_route_encode(&r, &log_bytes, &e), 0);
    ends();
    decide(2);
    just_so();
    memset(o.op, 77, sizeof o.op);
    ends();
    assert_int_equal(review(pd_review_drift, (struct pd_review_opts){ .log.json = true }), 0);
    says("{\"term\":\"tpot\",\"n\":1,\"error\":0.666667,\"ratio\":3.000000,");         /* 20 ms were expected; of the second decision, 25 */
}

/* What the terms are, by hand. */
static void terms_of_a_way(void **state)
{
    struct pd_spread want[PD_WT_N];
    scene("conditional");
    busy(&d[0], 4);
    d[0].slot = about(4 * MS);
    queued(&d[0], 1);
    queued(&p[0], 2);
    path[0].overlap_permille = 30;      /* of a second, 30 ms of the transfer's 60 */
    path[0].penalty_us = 7 * MS;
    assert_int_equal(pd_choose(&r, &e), 0);
    const struct pd_route_pair *alone = NULL, *far = NULL;
    for (uint32_t i = 0; i < r.n_pairs; i++)
        if (r.pair[i].d == 0 && r.pair[i].p <= 0)
            *(r.pair[i].p < 0 ? &alone : &far) = &r.pair[i];
    assert_int_equal(pd_way_expected(&r, alone, want), 1 << PD_WT_QUEUE | 1 << PD_WT_PREFILL | 1 << PD_WT_TTFT | 1 << PD_WT_TPOT | 1 << PD_WT_COMPLETION);
    assert_true(want[PD_WT_QUEUE].p50 == 1004 * MS && want[PD_WT_PREFILL].p50 == 1080 * MS && want[PD_WT_TTFT].p50 == 2084 * MS && want[PD_WT_TPOT].p50 == 24 * MS);
    assert_int_equal(pd_way_expected(&r, far, want), (1 << PD_WT_N) - 1);
    assert_true(want[PD_WT_QUEUE].p50 == 2000 * MS && want[PD_WT_PREFILL].p50 == 1000 * MS && want[PD_WT_TRANSFER].p50 == 30 * MS && want[PD_WT_SYNC].p50 == 9 * MS);
    assert_true(want[PD_WT_TRANSFER].p95 == far->transfer.p95 - 30 * MS && far->transfer.p95 > 70 * MS);
    o = (struct pd_outcome_rec){ .has = PD_OC_QUEUE | PD_OC_TPOT | PD_OC_SYNC, .queue_us = 5, .tpot_us = -1, .ttft_us = 9, .sync_us = PD_US_MOST + 1 };
    int64_t took[PD_WT_N];
    assert_int_equal(pd_way_took(&o, took), 1 << PD_WT_QUEUE);
    assert_true(took[PD_WT_QUEUE] == 5 && took[PD_WT_TPOT] == 0 && took[PD_WT_TTFT] == 0);
}

static void drifted_elsewhere(void **state)
{
    fresh("conditional");
    runs(0, 50, on_time);
    runs(50, 100, nobody_holds_it);     /* what is held is where it begins, and more has to be moved for it */
    assert_int_equal(review(pd_review_drift, (struct pd_review_opts){ 0 }), 0);
    says("cache                         100     10.0 %     1.12     50.0 %  .....!!!!!\n");
    says("cache left its band first, in the window from 2026-11-30T00:54:10.000000Z: 0.0 % of 10 runs within P95");
    says("this points to the cache: ");
    fresh("conditional");
    runs(0, 100, a_little_late);
    assert_int_equal(review(pd_review_drift, (struct pd_review_opts){ 0 }), 0);
    says("queue                         100     20.6 %     1.26      0.0 %  ..........\n");
    says("every term stayed in its band\n");
    fresh("conditional");
    runs(0, 100, in_half_the_time);     /* all within P95 */
    assert_int_equal(review(pd_review_drift, (struct pd_review_opts){ 0 }), 0);
    says("prefill                       100    100.0 %     0.50    100.0 %  !!!!!!!!!!\n");
    says("prefill left its band first, in the window from 2026-11-30T00:53:20.000000Z: 100.0 % of 10 runs within P95, median error 100.0 %, it took 0.50 times what was expected; "
         "worst ");
    fresh("conditional");
    runs(0, 9, on_time);
    assert_int_equal(review(pd_review_drift, (struct pd_review_opts){ 0 }), 0);
    says("no window has runs enough to judge");
    fresh("conditional");
    runs(0, 3, falls_back);
    assert_int_equal(review(pd_review_drift, (struct pd_review_opts){ 0 }), PD_EFAIL);
    assert_non_null(strstr(e.msg, "none of 3 runs came as it was decided"));
    log_bytes.n = 0;
    decide(1);
    assert_int_equal(review(pd_review_drift, (struct pd_review_opts){ 0 }), PD_EFAIL);
    assert_non_null(strstr(e.msg, "of 1 decision none has its outcome here"));
}

/* ---- regret ---- */

/* Eleven that are done locally and ten that go elsewhere: local prefill takes 1.1 times, moving 20 ms longer than was thought. */
static void both_ways(void)
{
    fresh("conditional");
    for (int i = 0; i < 22; i++) {
        scene("conditional");
        if (i % 2) {
            busy(&d[0], 4);
            busy(&d[1], 4);
        }
        decide(i);
        just_so();
        if (i % 2)
            o.transfer_us += 20 * MS;
        else
            o.prefill_us += 100 * MS;
        o.ttft_us += i % 2 ? 20 * MS : 100 * MS;
        o.completion_us += i % 2 ? 20 * MS : 100 * MS;
        if (i == 4)                     /* nobody knows why */
            o.completion_us += 600 * MS;
        if (i == 21)
            strcpy(o.finish_reason, "cancelled");
        ends();
    }
}

static void regretted(void **state)
{
    both_ways();
    assert_int_equal(review(pd_review_regret, (struct pd_review_opts){ .least_us = -1, .least_share = -1 }), 0);
    says("22 runs ended as far as this log tells, 21 of them can be judged; not: 1 came otherwise than decided, 0 do not tell what they took, 0 had no other way\n");
    says("local           11       +0.0 ms       x 1.100             -             -       x 1.000\n"
         "remote          10       +0.0 ms       x 1.000      +20.0 ms       +0.0 ms       x 1.000\n"
         "regret     mean 36.4 ms, P50 15.0, P95 15.0, most 615.0; 2.02 % of what the runs took\n"          /* (10 x 15 + 615) / 21 */
         "misjudged  1 of 21 (4.8 %), by more than 10.0 ms and 20 % of what it took: 1 done locally, 0 remotely\n"
         "in all     the choice was 36.4 ms worse than the best other way, in the mean\n"
         "worst\n"
         "  01M8PAW1CACQM7WS4V00000004  local d0 took 2320.0 ms, others wait 0.0; remote p0 > d0 1705.0, 0.0: 615.0 worse, misjudged\n"
         "  01M8PAW1CACQM7WS4V00000000  local d0 took 1720.0 ms, others wait 0.0; remote p0 > d0 1705.0, 0.0: 15.0 worse\n");
    assert_null(strstr(said, "remote estimates are off"));
    says("not known  what the other way would have taken of a run: it was not done;");
    assert_int_equal(review(pd_review_regret, (struct pd_review_opts){ .log.json = true }), 0);       /* by more than nothing */
    says("{\"summary\":{\"runs\":22,\"judged\":21,\"otherwise\":1,\"untold\":0,\"no_other_way\":0,\"drawn\":0,\"mean_ms\":36.429,\"p50_ms\":15.000,\"p95_ms\":15.000,"
         "\"most_ms\":615.000,\"share\":0.020");
    says("\"misjudged\":11,\"misjudged_local\":11,\"misjudged_remote\":0,");
    says("{\"run\":\"01M8PAW1CACQM7WS4V00000004\",\"mode\":\"local\",\"way\":\"d0\",\"took_ms\":2320.000,\"others_ms\":0.000,\"other_mode\":\"remote\",\"other\":\"p0 > d0\","
         "\"other_ms\":1705.000,\"other_others_ms\":0.000,\"regret_ms\":615.000,\"misjudged\":true}\n");
}

static void what_cannot_be_regretted(void **state)
{
    fresh("aggregated");
    r.n_d = 1;
    decide(1);
    just_so();
    ends();
    r.externality = 0;
    decide(2);
    just_so();
    o.has = 0;
    ends();
    assert_int_equal(review(pd_review_regret, (struct pd_review_opts){ .least_us = -1, .least_share = -1 }), 0);
    says("2 runs ended as far as this log tells, 0 of them can be judged; not: 0 came otherwise than decided, 1 do not tell what they took, 1 had no other way\n");
    says("not known  how far local estimates are off: 1 runs were done so, 10 are needed\n");
    fresh("aggregated");
    decide(1);
    just_so();
    o.has = 0;
    ends();
    assert_int_equal(review(pd_review_regret, (struct pd_review_opts){ 0 }), PD_EFAIL);
    assert_non_null(strstr(e.msg, "none of 1 runs came as it was decided and tells what it took"));
}

int main(void)
{
    int fd = mkstemp(file);
    pd_log_init("test", 0, true);
    const struct CMUnitTest tests[] = { cmocka_unit_test(why_in_words), cmocka_unit_test(why_with_long_names), cmocka_unit_test(why_as_json), cmocka_unit_test(why_there_is_no_other_way),
                                        cmocka_unit_test(why_a_run_was_decided_twice), cmocka_unit_test(why_not), cmocka_unit_test(replayed),
                                        cmocka_unit_test(replayed_as_far_as_it_can_be), cmocka_unit_test(what_another_policy_would_have_done), cmocka_unit_test(what_was_tried), cmocka_unit_test(listed_by_outcome),
                                        cmocka_unit_test(terms_of_a_way), cmocka_unit_test(joined_by_op), cmocka_unit_test(drifted), cmocka_unit_test(drifted_elsewhere), cmocka_unit_test(regretted),
                                        cmocka_unit_test(what_cannot_be_regretted) };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    close(fd);
    unlink(file);
    free(said);
    pd_buf_free(&log_bytes);
    return rc;
}
