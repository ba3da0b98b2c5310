/* The choice by a route record alone: each policy on rows whose answer was worked out by hand, and records that come back byte by byte. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#include "../../libcommon/wire/json.h"
#include "../../libcommon/route/late.h"
#include "route_scene.h"

static struct pd_err e;

static void choose(void)
{
    if (pd_choose(&r, &e))
        fail_msg("%s", e.msg);
}

static const char *way(void)
{
    static char text[40];
    choose();
    if (!r.chosen.any)
        return pd_outcome_names[r.outcome];
    snprintf(text, sizeof text, "%s %s%s%s", pd_mode_names[r.chosen.mode], r.chosen.p < 0 ? "" : r.p[r.chosen.p].worker.p, r.chosen.p < 0 ? "" : ">", r.d[r.chosen.d].worker.p);
    return text;
}

static void conditional_goes_by_what_it_costs(void **state)
{
    scene("conditional");
    d[1].given = 1;
    assert_string_equal(way(), "local d0");             /* all idle: moving KV takes 65 ms for nothing */
    assert_true(r.ttft.p50 == 1000 * MS && r.completion.p50 == 1620 * MS && !r.degraded && r.propensity == 1);
    assert_int_equal(r.completion.p95, 1620 * MS + llround(sqrt(250e3 * 250e3 + 155e3 * 155e3)));
    busy(&d[0], 4);
    busy(&d[1], 4);
    assert_string_equal(way(), "remote p0>d0");         /* D's batch would wait for the prompt, and it for the batch */
    const struct pd_route_pair *o = &r.pair[r.chosen.pair];
    assert_true(o->bytes == 2000 * 1024 && o->transfer.p50 == 60 * MS && o->ttft.p50 == 1065 * MS && o->completion.p50 == 1065 * MS + 31 * 24 * MS);
    assert_true(o->itl_us == 4 * 32 * 100 && o->score == o->completion.p95 + o->itl_us);
    assert_non_null(strstr(r.reason, "remote, p0 to d0: "));
    assert_non_null(strstr(r.reason, "best local "));
    holds(&d[1], 120);          /* it holds nearly all of it */
    assert_string_equal(way(), "local d1");
    scene("conditional");
    busy(&d[0], 4);
    busy(&d[1], 4);
    queued(&p[0], 3);
    assert_string_equal(way(), "remote p1>d0");
    queued(&p[1], 8);
    queued(&p[0], 8);
    assert_string_equal(way(), "local d0");             /* whoever computes it elsewhere has a queue */
    scene("conditional");
    busy(&d[0], 2);
    busy(&d[1], 2);
    assert_string_equal(way(), "remote p0>d0");
    path[0].kib_ns = about(3000000);    /* 6 s */
    assert_string_equal(way(), "local d0");
    path[0].overlap_permille = 1000;    /* of which a second is under way while the prompt is computed */
    choose();
    assert_true(r.n_pairs == 6 && r.pair[2].p == 0 && r.pair[2].overlap_us == 1000 * MS && r.pair[2].ttft.p50 == 1000 * MS + 6010 * MS - 1000 * MS + 5 * MS);
    path[0].kib_ns = about(25000);
    path[0].penalty_us = 10000 * MS;
    assert_string_equal(way(), "local d0");
    path[0].penalty_us = 0;
    path[0].active = 100;               /* a hundred share it, and would wait */
    assert_string_equal(way(), "local d0");
    choose();
    assert_int_equal(r.pair[2].transfer.p50, 10 * MS + 101 * 50 * MS);
    assert_int_equal(r.pair[2].link_us, 100 * r.pair[2].transfer.p50);
}

static void uncertainty_counts(void **state)
{
    scene("conditional");
    busy(&d[0], 1);
    d[1].x = PD_X_STATE;
    d[1].excluded = (struct pd_str)S("draining");
    r.externality = 0;
    d[0].interference = about(200 * MS);
    assert_string_equal(way(), "remote p0>d0");
    path[0].sync = (struct pd_spread){ 900 * MS, 5 * MS, PD_SPREAD_STALE };     /* the same P50, and nobody knows */
    assert_string_equal(way(), "local d0");
    assert_int_equal(r.degraded, 0);
    r.risk = 0.5;
    assert_string_equal(way(), "remote p0>d0");
    assert_int_equal(r.degraded, PD_DG_STALE);
    assert_true(r.pair[r.chosen.pair].score == r.completion.p50);
    assert_true(fabs(pd_risk_scale(0.95) - 1) < 1e-8 && pd_risk_scale(0.5) == 0 && fabs(pd_risk_scale(0.99) - 2.3263478740 / 1.6448536270) < 1e-7);
}

static void sums_are_as_wide_as_is_told(void **state)
{
    scene("conditional");
    choose();
    struct pd_spread local = r.completion, remote = r.pair[2].ttft, through = r.pair[2].completion, move = r.pair[2].transfer;
    r.input.local_completion = 2000;
    r.input.remote_ttft = 500;
    r.input.remote_completion = 3000;
    choose();
    assert_true(r.pair[2].p == 0 && r.pair[0].p < 0 && labs(r.pair[0].completion.p95 - local.p95 - (local.p95 - local.p50)) <= 1 && r.pair[0].completion.p50 == local.p50);
    assert_true(labs(2 * (r.pair[2].ttft.p95 - remote.p50) - (remote.p95 - remote.p50)) <= 2 && r.pair[2].transfer.p95 == move.p95);
    assert_true(labs(r.pair[2].completion.p95 - through.p50 - 3 * (through.p95 - through.p50)) <= 3);
}

static void blocks_that_run_short_count(void **state)
{
    scene("conditional");
    d[0].blocks = 900;          /* and 129 more are needed, of 1,000 */
    assert_string_equal(way(), "local d1");
    assert_true(r.pair[0].d == 0 && r.pair[1].capacity_us == 0);
    assert_int_equal(r.pair[0].capacity_us, llround((1.029 - 0.8) / 0.2 * 1000 * MS));
}

static void load_policies_go_by_blocks(void **state)
{
    scene("aggregated");
    d[0].blocks = 10;
    assert_string_equal(way(), "aggregated d1");
    holds(&d[0], 11);
    assert_string_equal(way(), "aggregated d0");        /* 114 + 10 against 125 */
    assert_true(d[0].cost == 124 && d[1].cost == 125 && r.n_pairs == 2);
    scene("fixed");
    p[0].prefill.marks = PD_SPREAD_COLD;
    choose();
    assert_int_equal(r.degraded, PD_DG_COLD);           /* what it goes by is a guess, and is said to be */
    p[0].prefill.marks = 0;
    queued(&p[0], 1);
    d[0].blocks = 1;
    assert_string_equal(way(), "remote p1>d1");
    assert_true(p[0].cost == 250 && p[1].cost == 125 && d[0].cost == 1 && r.pair[r.chosen.pair].score == 125 + 8);    /* and 65 ms on the way, of 8 ms a block */
    r.n_p = 0;
    assert_string_equal(way(), "no_prefill_worker");
    r.input.local = true;
    assert_string_equal(way(), "local d1");
}

static void rules_are_as_published(void **state)
{
    scene("threshold:1000");
    assert_string_equal(way(), "remote p0>d0");
    holds(&d[1], 62);           /* it lacks 1,008, and is the least loaded */
    assert_string_equal(way(), "remote p0>d1");
    holds(&d[1], 63);
    assert_string_equal(way(), "local d1");             /* 992 */
    scene("dynamo");
    r.input.n_tokens = 4000;
    p[0].miss_tokens = p[1].miss_tokens = d[0].miss_tokens = d[1].miss_tokens = 4000;
    assert_string_equal(way(), "remote p0>d0");
    d[1].hit_blocks = 50;
    d[1].miss_blocks = 75;
    d[1].miss_tokens = 2048;
    assert_string_equal(way(), "remote p0>d1");
    d[1].miss_tokens = 2047;
    assert_string_equal(way(), "local d1");             /* below 2,048 and below 0.7 */
    r.input.n_tokens = 2900;
    assert_string_equal(way(), "remote p0>d1");         /* 0.706 */
    scene("llmd");
    assert_string_equal(way(), "remote p0>d0");
    holds(&d[1], 60);
    d[1].queue_runs = 10;       /* the longest queue: 1000 less, and 2 x 480 more */
    assert_string_equal(way(), "remote p0>d0");
    holds(&d[1], 64);
    assert_string_equal(way(), "remote p0>d1");
    d[1].miss_tokens = 15;
    assert_string_equal(way(), "local d1");
    r.n_p = 0;
    d[1].miss_tokens = 2000;
    assert_string_equal(way(), "local d1");             /* the rule says remote; nobody is there */
    assert_non_null(strstr(r.reason, "which is not possible"));
    struct pd_policy_spec s;
    const char *bad[] = { "threshold:", "threshold:0", "threshold:-3", "threshold:1x", "fixed:3", "conditionall", "", "aggregated:" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(pd_policy_parse(bad[i], &s, &e), PD_EUSAGE);
    assert_true(pd_policy_parse("dynamo:9", &s, &e) == 0 && s.kind == PD_POLICY_DYNAMO && s.n == 9);
}

static void what_stands_in_the_way(void **state)
{
    scene("fixed");
    r.n_paths = 2;
    p[0].domain = 1;
    path[1] = (struct pd_route_path){ -1, -1, 1, 0, .x = PD_X_DOMAIN, .excluded = S("domain required rackA") };
    assert_string_equal(way(), "remote p1>d0");
    assert_true(!p[0].keep);
    path[1] = (struct pd_route_path){ 1, 0, -1, -1, .x = PD_X_PATH, .excluded = S("breaker open 3.2s") };
    assert_string_equal(way(), "remote p0>d0");         /* the most particular path: p1 to d0 alone is closed */
    d[0].x_kv = PD_X_BLOCKS;
    assert_string_equal(way(), "remote p0>d1");
    p[0].kin = 3;
    r.n_fits = 1;
    fit[0] = (struct pd_route_fit){ .p = 3, .d = 0, .why = S("block_size differs") };
    assert_string_equal(way(), "remote p1>d1");
    fit[0] = (struct pd_route_fit){ .p = 3, .d = 0, .converts = 1 };
    p[1].x = PD_X_TRIED;
    assert_string_equal(way(), "remote p0>d1");
    assert_string_equal(r.chosen.converted, "block_size");
    p[0].at = d[1].at;          /* one worker makes no pair with itself */
    assert_string_equal(way(), "wait_room");
    d[0].x_kv = 0;
    assert_string_equal(way(), "remote p0>d0");
    d[0].x = PD_X_RUNS;
    p[0].x = PD_X_SILENT;
    p[1].x = PD_X_EPOCH;
    assert_string_equal(way(), "no_prefill_worker");
    d[0].x = d[1].x = PD_X_CONTEXT;
    assert_string_equal(way(), "never");
    d[1].x = PD_X_STATE;
    assert_string_equal(way(), "wait_worker");
}

/* Nine prefill workers, of which the eight best reach nobody: the ninth is found. */
static void those_that_reach_nobody_are_passed_over(void **state)
{
    static struct pd_route_row many[9];
    static struct pd_route_path shut[9];
    static char name[9][8];
    scene("fixed");
    r.p = many;
    r.n_p = 9;
    r.n_d = 1;
    for (int i = 0; i < 9; i++) {
        snprintf(name[i], sizeof name[i], "p%d", i);
        many[i] = p[0];
        many[i].worker = many[i].at = (struct pd_str){ name[i], strlen(name[i]) };
        many[i].queue_tokens = (uint64_t)i;
        shut[i] = (struct pd_route_path){ i, 0, -1, -1, .x = PD_X_PATH, .excluded = S("hold") };
    }
    r.paths = shut;
    r.n_paths = 8;
    assert_string_equal(way(), "remote p8>d0");
    r.n_paths = 9;
    r.p[8].given = 0;
    assert_string_equal(way(), "wait_worker");
}

/* Rows past the two of each side. */
enum { CROWD = 300 };
static struct pd_route_row crowd[2][CROWD];
static char crowd_name[2][CROWD][8];
static void crowds(uint32_t n_p, uint32_t n_d)
{
    for (int side = 0; side < 2; side++)
        for (int i = 0; i < CROWD; i++) {
            snprintf(crowd_name[side][i], sizeof crowd_name[side][i], "%c%d", side ? 'd' : 'p', i);
            crowd[side][i] = side ? d[0] : p[0];
            crowd[side][i].worker = crowd[side][i].at = (struct pd_str){ crowd_name[side][i], strlen(crowd_name[side][i]) };
        }
    r.p = crowd[0];
    r.d = crowd[1];
    r.n_p = n_p;
    r.n_d = n_d;
}

/* The way, which has to come of the record too, whatever rows are left out of it. */
static const char *way_again(void)
{
    static struct pd_route_rec now;
    static char first[40];
    struct pd_buf one = { 0 }, two = { 0 };
    struct pd_arena a = { 0 };
    snprintf(first, sizeof first, "%s", way());
    for (int side = 0; side < 2; side++)
        for (uint32_t i = 0; i < (side ? r.n_d : r.n_p); i++)
            crowd[side][i].excluded = crowd[side][i].x || crowd[side][i].x_kv ? (struct pd_str)S("for a reason") : (struct pd_str){ NULL, 0 };
    assert_int_equal(pd_route_encode(&r, &one, &e), 0);
    if (pd_route_replay(one.p, one.n, NULL, &a, NULL, &now, &two, &e))
        fail_msg("%s", e.msg);
    assert_true(one.n == two.n && !memcmp(one.p, two.p, one.n));
    pd_buf_free(&one);
    pd_buf_free(&two);
    pd_arena_free(&a);
    return first;
}

/* Any number of D that nobody reaches, idle as they are, do not hide the one that somebody does: by domain, by kin, by a path of their own, by having no other P
 * than themselves. */
static void those_that_nobody_reaches_hide_no_other(void **state)
{
    static const char *const policies[] = { "fixed", "conditional" };
    static struct pd_route_path shut[20];
    for (int i = 0; i < 2; i++)
        for (int how = 0; how < 4; how++)
            for (uint32_t many = 20; many <= 280; many += 260) {
                scene(policies[i]);
                crowds(many, many);
                r.paths = shut;
                shut[0] = path[0];
                for (uint32_t k = 0; k < many; k++) {
                    busy(&crowd[1][k], 4);
                    crowd[0][k].domain = crowd[1][k].domain = how != 1;
                    crowd[1][k].kin = how == 1;
                    crowd[0][k].x = how == 3 ? PD_X_NO : PD_X_STATE;
                }
                crowd[0][many - 2].x = PD_X_NO;
                crowd[0][many - 2].domain = crowd[1][many - 1].domain = crowd[1][many - 1].kin = 0;
                crowd[1][many - 1].seqs = 5;
                crowd[1][many - 1].blocks = 300;
                if (how == 0 || how == 3)
                    shut[r.n_paths++] = (struct pd_route_path){ -1, -1, 0, 1, .x = PD_X_DOMAIN, .excluded = S("domain required rackB") };
                if (how == 1) {
                    r.n_fits = 1;
                    fit[0] = (struct pd_route_fit){ .p = 0, .d = 1, .why = S("block_size differs") };
                }
                for (int k = 0; how == 2 && k < 19; k++)
                    shut[r.n_paths++] = (struct pd_route_path){ (int32_t)many - 2, k, -1, -1, .x = PD_X_PATH, .excluded = S("breaker open 3.2s") };
                if (how == 2) {         /* as many as there are paths of single pairs */
                    r.n_d = 20;
                    crowd[1][19] = crowd[1][many - 1];
                }
                for (uint32_t k = 0; how == 3 && k < many; k++) {       /* nine racks of one worker of both roles, each of which may have its own KV alone */
                    crowd[0][k].x = k < 9 || k == many - 2 ? PD_X_NO : PD_X_STATE;
                    crowd[0][k].at = k < 9 ? crowd[1][k].at : crowd[0][k].at;
                    crowd[1][k].x = k < 9 || k == many - 1 ? PD_X_NO : PD_X_STATE;
                    crowd[0][k].queue = about(20000 * MS * (k < 9));
                    crowd[0][k].queue_tokens = k < 9 ? 90000 : 0;
                }
                if (how == 3)
                    shut[r.n_paths++] = (struct pd_route_path){ -1, -1, 1, 1, .x = PD_X_DOMAIN, .excluded = S("domain required rackC") };
                way_again();
                char want[40];
                snprintf(want, sizeof want, "remote p%u>d%u", many - 2, many - 1);
                assert_string_equal(way_again(), want);
            }
}

/* The near one among many that are as good but for the way, on either side. */
static void the_near_one_is_found(void **state)
{
    static const char *const policies[] = { "fixed", "conditional" };
    for (int i = 0; i < 2; i++)
        for (int side = 0; side < 2; side++)
            for (uint32_t many = 30; many <= 300; many += 270) {
                scene(policies[i]);
                crowds(side ? 2 : many, side ? many : 2);
                for (uint32_t k = 0; k < CROWD; k++) {
                    busy(&crowd[1][k], 4);
                    crowd[!side][k].domain = 1;
                }
                crowd[side][many - 1].domain = 1;
                path[1] = (struct pd_route_path){ -1, -1, 1, 1, .latency = about(1 * MS), .kib_ns = about(2500), .sync = about(5 * MS) };
                r.n_paths = 2;
                char want[40];
                snprintf(want, sizeof want, side ? "remote p0>d%u" : "remote p%u>d0", many - 1);
                assert_string_equal(way_again(), want);
                path[1] = path[0];
                path[1].from = path[1].to = 1;
                path[0].penalty_us = 300 * MS;          /* an operator's word, or failures */
                assert_string_equal(way_again(), want);
            }
}

/* A record may lack who gives to a D that is none of the best: what the way to it adds is no matter of what the giver computes. */
static void who_gives_need_not_be_there(void **state)
{
    scene("fixed");
    crowds(280, 280);
    for (uint32_t k = 0; k < 280; k++) {
        crowd[1][k].domain = k < 40;
        crowd[1][k].blocks = k < 40 ? 0 : 20;
    }
    crowd[0][279].domain = 1;
    crowd[0][279].prefill = about(10 * MS);     /* near to the idle ones, fast, and with a long queue */
    crowd[0][279].queue_tokens = 90000;
    r.n_paths = 3;
    path[0] = (struct pd_route_path){ -1, -1, 0, 0, .penalty_us = 0 };
    path[1] = (struct pd_route_path){ -1, -1, 1, 1, .penalty_us = 100 * MS };
    path[2] = (struct pd_route_path){ -1, -1, 0, 1, .penalty_us = 110 * MS };
    assert_string_equal(way_again(), "remote p0>d0");
}

/* The propensities of `random` are those by which it draws, also among more than are looked at together. */
static void chance_is_told_as_it_is(void **state)
{
    int n = 0, first = 0;
    double told = 0;
    scene("random");
    crowds(20, 30);
    for (int i = 0; i < 20000; i++) {
        r.seed = (uint64_t)i * 977 + 5;
        choose();
        bool it = r.chosen.p < 0 && r.chosen.d == 0;
        n += r.chosen.p < 0;
        first += it;
        told = it ? r.propensity : told;
        assert_true(fabs(r.propensity - (r.chosen.p < 0 ? 8.0 / 30 : 64.0 / 600) / 72) < 1e-12);
    }
    assert_true(abs(n - 20000 / 9) < 250 && fabs(first - 20000 * told) < 5 * sqrt(20000 * told));
    crowds(250, 280);
    way_again();
}

/* The chances of all ways add up to one, and each comes as often as it says, whoever reaches whom: many that reach nobody, some or all; by paths of their own, by
 * domains, by kins; a worker of both sides; also of a record that had no room for all. */
static void chances_add_up(void **state)
{
    enum { DRAWS = 20000, WAYS = 41 * 13 };
    static struct pd_route_path paths[100];
    for (int how = 0; how < 6; how++) {
        uint32_t n_p = how == 5 ? 200 : 40, n_d = 12, n[WAYS] = { 0 };
        double told[WAYS] = { 0 }, sum = 0;
        scene("random");
        crowds(n_p, n_d);
        r.paths = paths;
        r.n_paths = 0;
        for (uint32_t i = 0; how < 3 && i < 30 * (1 + (uint32_t)how); i++)      /* to d0, d1, d2: the first thirty P */
            paths[r.n_paths++] = (struct pd_route_path){ (int32_t)(i % 30), (int32_t)(i / 30), -1, -1, .x = PD_X_PATH, .excluded = S("open") };
        for (uint32_t i = 0; i < n_p; i++) {
            r.p[i].domain = how == 3 && i > 3;
            r.p[i].kin = how >= 4 && i > 20;
        }
        if (how == 3)           /* those of the second domain reach nobody */
            paths[r.n_paths++] = (struct pd_route_path){ -1, -1, 1, -1, .x = PD_X_DOMAIN, .excluded = S("domain") };
        fit[0] = (struct pd_route_fit){ .p = 1, .why = S("rope_theta differs") };
        r.n_fits = how >= 4;
        r.d[3].x_kv = PD_X_BLOCKS;
        r.p[39].at = r.d[5].at;
        for (int i = 0; i < DRAWS; i++) {
            r.seed = (uint64_t)i * 977 + 5;
            choose();
            uint32_t at = (uint32_t)(r.chosen.p + 1) * 13 + (uint32_t)r.chosen.d;
            assert_true(at < WAYS && (!told[at] || fabs(told[at] - r.propensity) < 1e-15));
            n[at]++;
            sum += told[at] ? 0 : r.propensity;
            told[at] = r.propensity;
            if (i % 1000 == 0)
                way_again();
        }
        assert_true(fabs(sum - 1) < 1e-9);
        for (uint32_t i = 0; i < WAYS; i++)
            assert_true(fabs(n[i] - DRAWS * told[i]) <= 6 * sqrt(DRAWS * told[i]));
    }
}

/* KV that is late is given up when the rest of its way may take longer than computing all of it, as its way's tail says; not before its P95, and by no guess. The
 * decision comes of its record alone. */
static void late_kv_is_given_up(void **state)
{
    static const struct { int64_t since, p50, p95; uint32_t marks; bool over; } v[] = {
        { 74, 60, 75, 0, false }, { 3000, 60, 75, 0, false }, { 4000, 60, 75, 0, true }, { 4000, 60, 75, PD_SPREAD_COLD, false }, { 4000, 60, 75, PD_SPREAD_STALE, true },
        { 239, 60, 240, 0, false }, { 243, 60, 240, 0, true }, { 4000, 60, 60, 0, true }, { 3000, 60, 60, 0, false }, { 4000, 60, 5000, 0, false } };
    for (size_t i = 0; i < sizeof v / sizeof *v; i++)
        for (int cold = 0; cold < 2; cold++) {
            scene("conditional");
            r.n_p = 0;
            r.n_d = 1;
            r.input.local = r.input.d_given = true;
            d[0].prefill.marks = cold ? PD_SPREAD_COLD : 0;
            r.late = (struct pd_route_late){ .any = true, .since_us = v[i].since * MS, .way = { v[i].p95 * MS, v[i].p50 * MS, v[i].marks } };
            assert_string_equal(way(), v[i].over && !cold ? "local d0" : "stay");
            assert_int_equal(r.late.local_us, 1250 * MS);
            if (v[i].over && !cold) {
                static struct pd_route_rec now;
                struct pd_buf one = { 0 }, two = { 0 };
                struct pd_arena a = { 0 };
                assert_non_null(strstr(r.reason, "its KV has been on its way for"));
                assert_int_equal(pd_route_encode(&r, &one, &e), 0);
                assert_int_equal(pd_route_replay(one.p, one.n, NULL, &a, NULL, &now, &two, &e), 0);
                assert_true(one.n == two.n && !memcmp(one.p, two.p, one.n) && now.late.rest_us > 1250 * MS && now.late.since_us == v[i].since * MS);
                pd_buf_free(&one);
                pd_buf_free(&two);
                pd_arena_free(&a);
            }
            int64_t until = pd_late_until(&r.late);
            if (v[i].marks & PD_SPREAD_COLD)
                assert_int_equal(until, -1);
            else if (!cold)
                for (int k = -2; k <= 2; k += 4) {
                    r.late.since_us = until + k;
                    assert_string_equal(way(), k > 0 ? "local d0" : "stay");
                }
        }
}

static void ties_are_stable(void **state)
{
    const char *of[] = { "aggregated", "fixed", "conditional", "threshold", "llmd", "dynamo" };
    for (int i = 0; i < 6; i++) {
        scene(of[i]);
        char first[40];
        snprintf(first, sizeof first, "%s", way());
        assert_non_null(strstr(first, "d0"));
        for (int k = 0; k < 5; k++)
            assert_string_equal(way(), first);
        d[0].given = 3;         /* who had fewer goes first */
        assert_non_null(strstr(way(), "d1"));
    }
}

static void chance_is_seeded(void **state)
{
    scene("conditional");
    r.temperature = 0.2;
    busy(&d[1], 2);
    int n[PD_ROUTE_PAIRS] = { 0 };
    double share[PD_ROUTE_PAIRS], sum = 0;
    for (int i = 0; i < 4000; i++) {
        r.seed = (uint64_t)i;
        choose();
        n[r.chosen.pair]++;
        if (!i)
            for (uint32_t k = 0; k < r.n_pairs; k++)
                sum += share[k] = r.pair[k].share;
        assert_true(r.propensity == share[r.chosen.pair]);
    }
    assert_true(fabs(sum - 1) < 1e-12 && share[0] < 0.9);
    double least = (double)r.pair[0].score, want = exp(-((double)r.pair[2].score - least) / (0.2 * least));
    for (uint32_t k = 1; k < r.n_pairs; k++)
        assert_true(r.pair[k].score >= least);
    assert_true(fabs(share[2] / share[0] - want) < 1e-6);
    for (uint32_t k = 0; k < r.n_pairs; k++)
        assert_true(fabs(n[k] - 4000 * share[k]) < 5 * sqrt(4000 * share[k]) + 1);
    scene("random");
    memset(n, 0, sizeof n);
    for (int i = 0; i < 6000; i++) {
        r.seed = (uint64_t)i * 977;
        choose();
        assert_true(r.n_pairs == 6 && fabs(r.propensity - 1.0 / 6) < 1e-12);
        n[r.chosen.p < 0 ? r.chosen.d : 2 + 2 * r.chosen.p + r.chosen.d]++;
    }
    for (int k = 0; k < 6; k++)
        assert_true(abs(n[k] - 1000) < 150);
}

static void a_shadow_changes_nothing(void **state)
{
    scene("conditional");
    busy(&d[0], 4);
    busy(&d[1], 4);
    d[1].blocks = 900;
    snprintf(r.shadow.policy, sizeof r.shadow.policy, "aggregated");
    assert_string_equal(way(), "remote p0>d0");
    assert_true(r.shadow.chosen.any && r.shadow.chosen.mode == PD_MODE_AGGREGATED && r.shadow.chosen.d == 0 && r.shadow.score == 325);
    assert_true(r.pair[r.shadow.chosen.pair].p == -1 && r.pair[r.shadow.chosen.pair].d == 0);
    snprintf(r.policy, sizeof r.policy, "fixed");       /* which looks at no such way: it is put beside */
    assert_string_equal(way(), "remote p0>d0");
    assert_true(r.n_pairs == 5 && r.shadow.chosen.pair == 4 && r.pair[4].score == PD_SCORE_NONE && r.pair[4].ttft.p50 == 1080 * MS);
}

/* ---- at random ---- */

static uint64_t state;
static uint64_t any(uint64_t n)
{
    state = state * 6364136223846793005 + 1442695040888963407;
    return (state >> 33) % n;
}
static struct pd_spread any_spread(int64_t most)
{
    int64_t a = (int64_t)any((uint64_t)most);
    return any(3) ? (struct pd_spread){ a + (int64_t)any((uint64_t)most), a, any(5) ? 0 : (uint32_t)any(4) } : (struct pd_spread){ 0, 0, 0 };
}

enum { MANY = 400 };
static struct pd_route_row rows[2][MANY];
static struct pd_route_path paths[40];
static uint8_t bits[MANY][MANY / 8];
static struct pd_route_fit fits[20];
static char names[2][MANY][120];
static struct pd_str domains[6] = { S("a"), S("b"), S("c"), S("d"), S("e"), S("f") };

static uint32_t any_rows(int side)
{
    uint32_t n = (uint32_t)any(any(20) ? 12 : MANY);
    for (uint32_t i = 0; i < n; i++) {
        struct pd_route_row *w = &rows[side][i];
        snprintf(names[side][i], sizeof names[side][i], "%s@host-%llu:%u%.*s", side ? "decode" : "prefill", (unsigned long long)any(1000), i, (int)any(70),
                 "......................................................................");
        *w = (struct pd_route_row){ .worker = { names[side][i], strlen(names[side][i]) }, .epoch = any(3), .domain = (uint32_t)any(6), .kin = (uint32_t)any(3),
            .hit_blocks = (uint32_t)any(200), .miss_blocks = (uint32_t)any(2000), .miss_tokens = (uint32_t)any(32000), .runs = (uint32_t)any(9), .runs_most = (uint32_t)any(64),
            .seqs = (uint32_t)any(9), .seqs_most = 8, .queue_runs = (uint32_t)any(7), .queue_tokens = any(100000), .kv_tokens = any(100000), .blocks = any(4000),
            .blocks_most = any(5000), .given = any(4), .load_age_us = (int64_t)any(900000), .queue = any_spread(900000), .prefill = any_spread(5000000),
            .interference = any_spread(300000), .slot = any_spread(100), .tpot = any_spread(60000), .itl_us = (int64_t)any(900) };
        w->at = w->worker;
        w->x = any(3) ? 0 : any(PD_X_KINDS);
        w->x_kv = w->x || any(9) ? 0 : PD_X_BLOCKS;
        if (w->x || w->x_kv)
            w->excluded = (struct pd_str)S("for a reason");
    }
    return n;
}

static void any_record(uint64_t seed)
{
    static const char *const policies[] = { "aggregated", "fixed", "conditional", "threshold:500", "dynamo", "llmd:64", "random" };
    static const double risks[] = { 0.5, 0.9, 0.95, 0.99 };
    state = seed;
    memset(&r, 0, sizeof r);
    r = (struct pd_route_rec){ .run = "01M8PAW1CACQM7WS4V0NE4983X", .seed = any(1u << 31) * any(1u << 31), .risk = risks[any(4)], .externality = (double)any(3), .t_us = (int64_t)any(1u << 31),
        .temperature = any(3) ? 0 : 0.1 * (double)any(30), .attempt = 1, .p = rows[0], .d = rows[1], .paths = paths, .fits = fits, .domains = domains, .n_domains = 6,
        .epoch = any(3), .versions = { any(99), any(99), any(99) }, .degraded = (uint32_t)any(16),
        .input = { .n_tokens = (uint32_t)any(32000), .exact = any(2), .max_tokens = (uint32_t)any(999) + 1, .n = (uint32_t)any(3) + 1, .out_p50 = (uint32_t)any(300),
                   .out_p95 = (uint32_t)any(900), .block_size = (uint32_t)any(2) * 16, .kv_bytes = (uint32_t)any(100000), .early = any(5) == 0, .local = any(9) == 0 } };
    r.input.local_ttft = any(3) ? 0 : (uint32_t)any(5000);
    r.input.remote_completion = any(3) ? 0 : (uint32_t)any(5000);
    snprintf(r.policy, sizeof r.policy, "%s", policies[any(7)]);
    if (!any(3))
        snprintf(r.shadow.policy, sizeof r.shadow.policy, "%s", policies[any(7)]);
    r.n_p = any_rows(0);
    r.n_d = any_rows(1);
    r.n_paths = (uint32_t)any(41);
    for (uint32_t i = 0; i < r.n_paths; i++) {
        struct pd_route_path x = { r.n_p ? (int32_t)any(r.n_p + 1) - 1 : -1, r.n_d ? (int32_t)any(r.n_d + 1) - 1 : -1, (int32_t)any(7) - 1, (int32_t)any(7) - 1, .latency = any_spread(9000),
            .kib_ns = any_spread(90000), .sync = any_spread(9000), .overlap_permille = (uint32_t)any(1001), .active = (uint32_t)any(4), .penalty_us = (int64_t)any(3000) };
        if (!any(4)) {
            x.x = any(2) ? PD_X_PATH : PD_X_DOMAIN;
            x.excluded = (struct pd_str)S("breaker open 3.2s");
        }
        paths[i] = x;
    }
    for (uint32_t i = 0; i < r.n_p; i++) {
        size_t most = any(3) ? 0 : (r.n_d + 7) / 8;
        for (size_t k = 0; k < most; k++)
            bits[i][k] = (uint8_t)any(256) & (uint8_t)(k + 1 == most && r.n_d % 8 ? (1 << r.n_d % 8) - 1 : 255);
        r.p[i].apart = (struct pd_bin){ bits[i], most };
    }
    r.n_fits = (uint32_t)any(4);
    for (uint32_t i = 0; i < r.n_fits; i++)
        fits[i] = any(2) ? (struct pd_route_fit){ (uint32_t)any(3), (uint32_t)any(3), .why = S("rope_theta differs") } : (struct pd_route_fit){ (uint32_t)any(3), (uint32_t)any(3), .converts = 1 };
}

static void a_record_gives_the_same_choice_and_bytes(void **st)
{
    struct pd_buf one = { 0 }, two = { 0 };
    static struct pd_route_rec was, now;
    uint32_t n[3] = { 0 }, thinned = 0, shadows = 0;
    size_t most = 0;
    for (uint64_t i = 0; i < 4000; i++) {
        struct pd_arena a = { 0 };
        any_record(i * 7919 + 1);
        choose();
        one.n = two.n = 0;
        assert_int_equal(pd_route_encode(&r, &one, &e), 0);
        if (pd_route_replay(one.p, one.n, NULL, &a, &was, &now, &two, &e))
            fail_msg("%llu: %s", (unsigned long long)i, e.msg);
        if (one.n != two.n || memcmp(one.p, two.p, one.n)) {
            struct pd_buf j = { 0 };
            pd_msgpack_to_json(one.p, one.n, &j, &e);
            pd_buf_printf(&j, &e, "\n\n");
            pd_msgpack_to_json(two.p, two.n, &j, &e);
            fail_msg("%llu differs: %.*s", (unsigned long long)i, (int)j.n, (char *)j.p);
        }
        if (r.chosen.any) {     /* and of the same workers as before anything was left out */
            const struct pd_route_row *x = &r.d[r.chosen.d], *y = &now.d[now.chosen.d];
            assert_true(x->worker.n == y->worker.n && !memcmp(x->worker.p, y->worker.p, x->worker.n));
            double sum = 0;
            for (uint32_t k = 0; k < r.n_pairs; k++)
                sum += r.pair[k].share;
            assert_true(fabs(sum - 1) < 1e-9 && r.propensity > 0);
            n[r.chosen.mode]++;
        } else
            assert_true(was.outcome == r.outcome && r.outcome != PD_CHOSEN);
        thinned += r.n_p + r.n_d > now.n_p + now.n_d;
        shadows += now.shadow.chosen.any;
        assert_true(now.n_p + now.n_d <= PD_ROUTE_ROWS);
        most = one.n > most ? one.n : most;
        pd_arena_free(&a);
    }
    assert_true(most < 65536 && n[0] > 100 && n[1] > 100 && n[2] > 100 && thinned > 50 && shadows > 100);
    pd_buf_free(&one);
    pd_buf_free(&two);
}

static void what_makes_no_sense_is_refused(void **st)
{
    struct pd_buf b = { 0 };
    static struct pd_route_rec got;
    for (uint64_t i = 0; i < 300; i++) {
        struct pd_arena a = { 0 };
        any_record(i + 5);
        choose();
        b.n = 0;
        assert_int_equal(pd_route_encode(&r, &b, &e), 0);
        b.p[any(b.n)] ^= (uint8_t)(1 + any(255));
        if (pd_route_decode(b.p, b.n, &a, &got, &e) == 0) {     /* what is taken can be chosen by and told again */
            struct pd_buf again = { 0 };
            pd_choose(&got, &e);
            pd_route_encode(&got, &again, &e);
            pd_buf_free(&again);
        }
        pd_arena_free(&a);
    }
    pd_buf_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conditional_goes_by_what_it_costs), cmocka_unit_test(uncertainty_counts), cmocka_unit_test(sums_are_as_wide_as_is_told), cmocka_unit_test(blocks_that_run_short_count),
        cmocka_unit_test(load_policies_go_by_blocks), cmocka_unit_test(rules_are_as_published), cmocka_unit_test(what_stands_in_the_way),
        cmocka_unit_test(those_that_reach_nobody_are_passed_over), cmocka_unit_test(those_that_nobody_reaches_hide_no_other),
        cmocka_unit_test(the_near_one_is_found), cmocka_unit_test(who_gives_need_not_be_there),
        cmocka_unit_test(chance_is_told_as_it_is), cmocka_unit_test(chances_add_up), cmocka_unit_test(late_kv_is_given_up), cmocka_unit_test(ties_are_stable), cmocka_unit_test(chance_is_seeded),
        cmocka_unit_test(a_shadow_changes_nothing), cmocka_unit_test(a_record_gives_the_same_choice_and_bytes), cmocka_unit_test(what_makes_no_sense_is_refused) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
