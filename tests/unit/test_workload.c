/* sim: workloads against the closed forms of what they are drawn from (fixed seeds: nothing here can flake), logs of requests as others write them, and
 * quantiles with their intervals. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <cmocka.h>
#include <stdlib.h>
#include "../../libcommon/sim/gen.h"

static struct pd_traffic one = { .name = "r", .weight = 1, .isl = { PD_LENS_FIXED, 64, 64 }, .osl = { PD_LENS_FIXED, 8, 8 }, .groups = 4, .share = 0.5 };
static struct pd_workload_opts base(void)
{
    return (struct pd_workload_opts){ .seed = 7, .count = 20000, .rate = 50, .burstiness = 1, .time_scale = 1, .length_scale = 1, .vocab_lo = 32, .vocab_hi = 256,
                                      .traffic = &one, .n_traffic = 1 };
}

struct moments { double mean, var, skew; size_t n; };

static struct moments gaps_of(const struct pd_workload_opts *o, double *gaps)
{
    struct pd_workload *w;
    struct pd_arrival a;
    struct pd_err e;
    struct moments m = { 0 };
    int64_t last = 0;
    assert_int_equal(pd_workload_new(o, &w, &e), 0);
    while (pd_workload_next(w, &a, &e) == 1) {
        assert_true(a.at_us >= last);
        gaps[m.n] = (double)(a.at_us - last) / 1e6;
        m.mean += gaps[m.n++];
        last = a.at_us;
    }
    m.mean /= (double)m.n;
    for (size_t i = 0; i < m.n; i++) {
        m.var += pow(gaps[i] - m.mean, 2) / (double)m.n;
        m.skew += pow(gaps[i] - m.mean, 3) / (double)m.n;
    }
    m.skew /= pow(m.var, 1.5);
    pd_workload_free(w);
    return m;
}

static int by_value(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b); }

static void arrivals(void **state)
{
    double *gaps = malloc(20000 * sizeof *gaps);
    struct pd_workload_opts o = base();
    struct moments m = gaps_of(&o, gaps);
    /* Poisson: exponential gaps of mean 1/50: Kolmogorov's distance over 20,000 of them lies below 1.63 / sqrt(n) in 99 of 100 draws. */
    qsort(gaps, m.n, sizeof *gaps, by_value);
    double worst = 0;
    for (size_t i = 0; i < m.n; i++) {
        double f = 1 - exp(-gaps[i] * 50);
        worst = fmax(worst, fmax(fabs(f - (double)i / (double)m.n), fabs(f - (double)(i + 1) / (double)m.n)));
    }
    assert_int_equal(m.n, 20000);
    assert_true(worst < 1.63 / sqrt(20000));
    /* Gamma of shape b: mean 1/50, variance mean^2 / b, skewness 2 / sqrt(b). Standard errors of 20,000: the bounds are above three of them. */
    static const double shapes[] = { 0.25, 1, 4 };
    for (int i = 0; i < 3; i++) {
        o.arrive = PD_ARRIVE_GAMMA;
        o.burstiness = shapes[i];
        m = gaps_of(&o, gaps);
        assert_true(fabs(m.mean * 50 - 1) < 3.2 / sqrt(shapes[i] * 20000));
        assert_true(fabs(m.var * 2500 * shapes[i] - 1) < 3.2 * sqrt((2 + 6 / shapes[i]) / 20000));
        assert_true(fabs(m.skew / (2 / sqrt(shapes[i])) - 1) < 0.2);
    }
    /* On and off: silence in each off window, the mean rate over all; within the windows that of Poisson: variance = mean of counts. */
    o = base();
    o.arrive = PD_ARRIVE_ONOFF;
    o.on_us = 1000000;
    o.off_us = 3000000;
    struct pd_workload *w;
    struct pd_arrival a;
    struct pd_err e;
    double count[101] = { 0 }, mean = 0, var = 0;
    assert_int_equal(pd_workload_new(&o, &w, &e), 0);
    while (pd_workload_next(w, &a, &e) == 1) {
        assert_true(a.at_us % 4000000 <= 1000000);
        if (a.at_us / 4000000 < 100)
            count[a.at_us / 4000000]++;
    }
    assert_true(fabs(20000 / ((double)a.at_us / 1e6) / 50 - 1) < 0.03);
    for (int i = 0; i < 100; i++)
        mean += count[i] / 100;
    for (int i = 0; i < 100; i++)
        var += pow(count[i] - mean, 2) / 99;
    assert_true(fabs(mean / 200 - 1) < 0.03 && var / mean > 0.6 && var / mean < 1.5);
    pd_workload_free(w);
    /* Even, and an end by time. */
    o = base();
    o.arrive = PD_ARRIVE_EVEN;
    o.duration_us = 1000000;
    m = gaps_of(&o, gaps);
    assert_true(m.n == 51 && fabs(gaps[50] - 0.02) < 1e-9 && gaps[0] == 0);
    free(gaps);
}

static void lengths(void **state)
{
    struct pd_lens l;
    struct pd_err e;
    assert_int_equal(pd_lens_parse("512", &l, &e), 0);
    assert_true(l.kind == PD_LENS_FIXED && l.a == 512);
    assert_int_equal(pd_lens_parse("64-256", &l, &e), 0);
    assert_true(l.kind == PD_LENS_UNIFORM && l.a == 64 && l.b == 256);
    assert_int_equal(pd_lens_parse("lognormal:200:0.8", &l, &e), 0);
    assert_true(l.kind == PD_LENS_LOGNORMAL && l.a == 200 && l.b == 0.8);
    static const char *const bad[] = { "", "0", "-5", "5-4", "1.5", "9-", "1e9", "lognormal", "lognormal:200", "lognormal:0:1", "lognormal:2:0", "lognormal:2:9", "7x", "3:4", "3:4-5", "lognormal:3-4", "lognormal:", "nan" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (pd_lens_parse(bad[i], &l, &e) != PD_EUSAGE)
            fail_msg("%s", bad[i]);
    struct pd_traffic t = { .name = "x", .weight = 1, .isl = { PD_LENS_UNIFORM, 10, 19 }, .osl = { PD_LENS_LOGNORMAL, 200, 0.8 }, .groups = 1 };
    struct pd_workload_opts o = base();
    struct pd_workload *w;
    struct pd_arrival a;
    double sum = 0, ln = 0, ln2 = 0;
    int hist[10] = { 0 };
    o.traffic = &t;
    assert_int_equal(pd_workload_new(&o, &w, &e), 0);
    while (pd_workload_next(w, &a, &e) == 1) {
        assert_in_range(a.isl, 10, 19);
        hist[a.isl - 10]++;
        sum += a.isl;
        ln += log(a.osl) / 20000;
        ln2 += log(a.osl) * log(a.osl) / 20000;
    }
    pd_workload_free(w);
    double chi2 = 0;
    for (int i = 0; i < 10; i++)
        chi2 += pow(hist[i] - 2000, 2) / 2000;
    assert_true(chi2 < 21.7);           /* 9 degrees of freedom, 99 % */
    assert_true(fabs(sum / 20000 - 14.5) < 0.07);
    assert_true(fabs(ln - log(200)) < 0.02 && fabs(sqrt(ln2 - ln * ln) / 0.8 - 1) < 0.02);
}

static void encode_all(const struct pd_workload_opts *o, struct pd_buf *out)
{
    struct pd_workload *w;
    struct pd_arrival a;
    struct pd_err e;
    out->n = 0;
    assert_int_equal(pd_workload_new(o, &w, &e), 0);
    while (pd_workload_next(w, &a, &e) == 1)
        assert_int_equal(pd_workload_request(w, &a, 0, out, &e), 0);
    pd_workload_free(w);
}

static void same_seed_same_bytes(void **state)
{
    struct pd_buf a = { 0 }, b = { 0 };
    struct pd_workload_opts o = base();
    o.count = 200;
    encode_all(&o, &a);
    encode_all(&o, &b);
    assert_int_equal(a.n, b.n);
    assert_memory_equal(a.p, b.p, a.n);
    o.seed = 8;
    encode_all(&o, &b);
    assert_true(a.n != b.n || memcmp(a.p, b.p, a.n));
    /* Another rate has the same prompts. */
    struct pd_workload *w, *x;
    struct pd_arrival p, q;
    struct pd_workload_opts fast = base(), slow = base();
    struct pd_err e;
    int32_t ids[2][64];
    slow.rate = 1;
    assert_int_equal(pd_workload_new(&fast, &w, &e) | pd_workload_new(&slow, &x, &e), 0);
    for (int i = 0; i < 50; i++) {
        assert_true(pd_workload_next(w, &p, &e) == 1 && pd_workload_next(x, &q, &e) == 1);
        assert_true(p.at_us < q.at_us);
        pd_workload_tokens(w, &p, ids[0]);
        pd_workload_tokens(x, &q, ids[1]);
        assert_memory_equal(ids[0], ids[1], sizeof ids[0]);
        for (int k = 0; k < 64; k++)
            assert_in_range(ids[0][k], 32, 255);
    }
    pd_workload_free(w);
    pd_workload_free(x);
    pd_buf_free(&a);
    pd_buf_free(&b);
}

/* What prompts have in common is what was asked for, by their tokens, and reusable tells it. */
static void prefixes(void **state)
{
    static const enum pd_sharing kinds[] = { PD_SHARE_COLD, PD_SHARE_PARTIAL, PD_SHARE_FULL };
    for (int k = 0; k < 3; k++) {
        struct pd_traffic t = one;
        struct pd_workload_opts o = base();
        struct pd_workload *w;
        struct pd_arrival a[64];
        struct pd_err e;
        static int32_t ids[64][128];
        t.prefix = kinds[k];
        t.isl = (struct pd_lens){ PD_LENS_UNIFORM, 40, 128 };
        t.share = 0.75;
        o.traffic = &t;
        assert_int_equal(pd_workload_new(&o, &w, &e), 0);
        for (int i = 0; i < 64; i++) {
            uint32_t longest = 0;
            assert_int_equal(pd_workload_next(w, &a[i], &e), 1);
            pd_workload_tokens(w, &a[i], ids[i]);
            for (int j = 0; j < i; j++) {
                uint32_t n = 0;
                while (n < a[i].isl && n < a[j].isl && ids[i][n] == ids[j][n])
                    n++;
                longest = n > longest ? n : longest;
            }
            /* by chance a token or two more are equal: 1 of 224 each */
            assert_in_range(longest, a[i].reusable, a[i].reusable + 3);
            if (t.prefix == PD_SHARE_COLD)
                assert_int_equal(a[i].reusable, 0);
            else
                assert_true(a[i].group < 4 && a[i].shared == (t.prefix == PD_SHARE_FULL ? a[i].isl : (uint32_t)(a[i].isl * 0.75)));
            if (i > 40 && t.prefix == PD_SHARE_PARTIAL)
                assert_true(a[i].reusable > a[i].isl / 4);
        }
        pd_workload_free(w);
    }
}

static void mixes(void **state)
{
    struct pd_traffic t[2] = { one, one };
    struct pd_workload_opts o = base();
    struct pd_workload *w;
    struct pd_arrival a;
    struct pd_err e = { 0 };
    int chat = 0;
    assert_int_equal(pd_traffic_parse("name=chat,weight=3,isl=16,osl=4,ttft=500ms,tpot=50ms", &t[0], &e), 0);
    assert_int_equal(pd_traffic_parse("name=doc,isl=512", &t[1], &e), 0);
    assert_true(t[0].ttft_ms == 500 && t[0].tpot_ms == 50 && t[1].osl.a == 8 && t[1].weight == 1);
    o.traffic = t;
    o.n_traffic = 2;
    assert_int_equal(pd_workload_new(&o, &w, &e), 0);
    while (pd_workload_next(w, &a, &e) == 1) {
        chat += a.traffic == t;
        assert_int_equal(a.isl, a.traffic == t ? 16 : 512);
    }
    pd_workload_free(w);
    assert_true(abs(chat - 15000) < 3.3 * sqrt(20000 * 0.75 * 0.25));
    static const struct { const char *text, *says; } bad[] = { { "isl", "no '='" }, { "isl=x", "isl: 'x'" }, { "speed=3", "speed: no such key" }, { "weight=-1", "weight" },
        { "ttft=5", "ttft" }, { "prefix=warm", "prefix: 'warm'" }, { "share=2", "share" }, { "groups=0", "groups" }, { "name=", "name" } };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (pd_traffic_parse(bad[i].text, &t[0], &e) != PD_EUSAGE || !strstr(e.msg, bad[i].says))
            fail_msg("%s: %s", bad[i].text, e.msg);
}

static void parse(const char *text, struct pd_reqlog *l)
{
    struct pd_err e = { 0 };
    if (pd_reqlog_parse(text, strlen(text), "log", l, &e))
        fail_msg("%s", e.msg);
}

static const char mooncake[] =
    "{\"timestamp\": 27482, \"input_length\": 1100, \"output_length\": 52, \"hash_ids\": [46, 47, 48]}\n"
    "\n{\"timestamp\": 30482, \"input_length\": 600, \"output_length\": 26, \"hash_ids\": [46, 49]}\n"
    "{\"timestamp\": 30482, \"input_length\": 1024, \"output_length\": 2, \"hash_ids\": [46, 47]}\n"
    "{\"timestamp\": 33482, \"input_length\": 5, \"output_length\": 0, \"hash_ids\": [50]}\n"
    "{\"timestamp\": 33482, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": [51]}";

static void logs(void **state)
{
    struct pd_reqlog l;
    parse(mooncake, &l);
    assert_string_equal(l.kind, "mooncake");
    assert_true(l.n == 4 && l.dropped == 1 && l.timed && l.block_tokens == 512 && l.n_blocks == 8);
    assert_true(l.row[1].at_us == 3000000 && l.row[1].isl == 600 && l.row[1].osl == 26 && l.row[1].n_blocks == 2 && l.block[l.row[1].block + 1] == 49);
    pd_reqlog_spread(&l);
    assert_true(l.row[1].at_us == 3000000 && l.row[2].at_us == 4500000 && l.row[3].at_us == 6000000);
    pd_reqlog_free(&l);
    parse("{\"chat_id\":1,\"parent_chat_id\":-1,\"timestamp\":61.5,\"input_length\":33,\"output_length\":7,\"type\":\"text\",\"turn\":1,\"hash_ids\":[1,2,3]}\n"
          "{\"chat_id\":2,\"parent_chat_id\":1,\"timestamp\":62,\"input_length\":40,\"output_length\":7,\"type\":\"text\",\"turn\":2,\"hash_ids\":[1,2]}\n", &l);
    assert_true(!strcmp(l.kind, "bailian") && l.block_tokens == 16 && l.row[1].at_us == 500000 && l.row[1].n_blocks == 2);
    pd_reqlog_free(&l);
    parse("TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 23:59:59.5000000,4808,10\r\n2023-11-17 00:00:00.2500000,110,27\r\n", &l);
    assert_true(!strcmp(l.kind, "azure") && l.n == 2 && l.row[1].at_us == 750000 && l.row[0].isl == 4808 && l.row[0].osl == 10 && !l.block_tokens);
    pd_reqlog_free(&l);
    parse("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-02-28 00:00:00,1,1\n2024-03-01 00:00:00,1,1\n", &l);      /* a leap year */
    assert_true(l.row[1].at_us == 2 * 86400000000);
    pd_reqlog_free(&l);
    parse("\xef\xbb\xbfTimestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,\"Conversation log, API\"\n45,GPT-4,1087,0,1087,API log\n"
          "45,\"GPT-4\",30,9,39,API log\n", &l);
    assert_true(!strcmp(l.kind, "burstgpt") && l.n == 2 && l.dropped == 1 && l.row[1].at_us == 40000000 && l.row[1].isl == 30 && l.row[1].osl == 9);
    pd_reqlog_free(&l);
    parse("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n1500,200,1700,7.5\n", &l);
    assert_true(!strcmp(l.kind, "lengths") && !l.timed && l.row[0].isl == 1500 && l.row[0].osl == 200);
    pd_reqlog_free(&l);
    parse("TIMESTAMP,ContextTokens,GeneratedTokens\n2100-02-28 00:00:00,1,1\n2100-03-01 00:00:00,1,1\n", &l);      /* and none */
    assert_true(l.row[1].at_us == 86400000000);
    pd_reqlog_free(&l);
    /* Our own: what gen wrote has its times and lengths, and blocks that are equal where the tokens up to their end are. */
    struct pd_workload_opts o = base();
    struct pd_traffic t = one;
    struct pd_buf b = { 0 };
    struct pd_err e = { 0 };
    t.prefix = PD_SHARE_PARTIAL;
    t.groups = 1;
    o.traffic = &t;
    o.count = 3;
    encode_all(&o, &b);
    assert_int_equal(pd_reqlog_parse(b.p, b.n, "log", &l, &e), 0);
    assert_true(!strcmp(l.kind, "requests") && l.n == 3 && l.timed && l.row[2].isl == 64 && l.row[2].osl == 8 && l.row[2].n_blocks == 4);
    const uint64_t *x = l.block + l.row[0].block, *y = l.block + l.row[1].block;
    assert_true(x[0] == y[0] && x[1] == y[1] && x[2] != y[2] && x[3] != y[3]);
    pd_reqlog_free(&l);
    /* A block is what it is by all before it. */
#define NINES "9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9],\"max_tokens\":1}\n"
    parse("{\"token_ids\":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1," NINES "{\"token_ids\":[2,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1," NINES, &l);
    assert_true(!l.timed && l.n_blocks == 4 && l.block[1] != l.block[3]);
    pd_reqlog_free(&l);
    assert_int_equal(pd_reqlog_parse(b.p, b.n - 1, "log", &l, &e), PD_ECORRUPT);
    assert_non_null(strstr(e.msg, "log: record 3: it is cut off"));
    pd_buf_free(&b);
}

/* A log's prefixes become tokens: equal blocks are equal runs, others are not; scaled, in whole tokens a block. */
static void replays(void **state)
{
    struct pd_reqlog l;
    struct pd_traffic t = one;
    struct pd_workload_opts o = base();
    struct pd_workload *w;
    struct pd_arrival a[4];
    struct pd_err e = { 0 };
    static int32_t ids[4][64];
    parse(mooncake, &l);
    t.isl.kind = t.osl.kind = PD_LENS_LOG;
    t.prefix = PD_SHARE_LOG;
    o.traffic = &t;
    o.log = &l;
    o.arrive = PD_ARRIVE_LOG;
    o.time_scale = 0.5;
    o.length_scale = 0.03125;           /* 16 tokens a block */
    assert_int_equal(pd_workload_new(&o, &w, &e), 0);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pd_workload_next(w, &a[i], &e), 1);
        assert_true(a[i].isl <= 64);
        pd_workload_tokens(w, &a[i], ids[i]);
    }
    assert_int_equal(pd_workload_next(w, &a[3], &e), 0);
    pd_workload_free(w);
    assert_true(a[0].isl == 34 && a[1].isl == 19 && a[2].isl == 32 && a[3].isl == 1 && a[0].osl == 2 && a[3].osl == 1);
    assert_true(a[1].at_us == 1500000 && a[3].at_us == 3000000);
    assert_memory_equal(ids[0], ids[1], 16 * 4);
    assert_memory_equal(ids[0], ids[2], 32 * 4);
    assert_true(ids[0][16] != ids[1][16] || ids[0][17] != ids[1][17]);
    assert_true(a[0].reusable == 0 && a[1].reusable == 16 && a[2].reusable == 32 && a[3].reusable == 0);
    /* A block that was there before counts only behind others that were. */
    struct pd_reqlog gap;
    parse("{\"timestamp\":1,\"input_length\":1024,\"output_length\":1,\"hash_ids\":[1,2]}\n{\"timestamp\":2,\"input_length\":1024,\"output_length\":1,\"hash_ids\":[3,2]}\n", &gap);
    o.log = &gap;
    assert_int_equal(pd_workload_new(&o, &w, &e), 0);
    assert_true(pd_workload_next(w, &a[0], &e) == 1 && pd_workload_next(w, &a[1], &e) == 1 && a[1].reusable == 0);
    pd_workload_free(w);
    pd_reqlog_free(&gap);
    o.log = &l;
    /* Into a context that is too small: the prompt is cut from its end, and counted. */
    o.length_scale = 1;
    o.context = 100;
    assert_int_equal(pd_workload_new(&o, &w, &e), 0);
    assert_int_equal(pd_workload_next(w, &a[0], &e), 1);
    assert_true(a[0].cut && a[0].isl == 50 && a[0].osl == 50);
    pd_workload_free(w);
    /* Arrivals of its own make its rows come round again. */
    o = base();
    o.traffic = &t;
    o.log = &l;
    o.count = 6;
    assert_int_equal(pd_workload_new(&o, &w, &e), 0);
    for (int i = 0; i < 6; i++)
        assert_int_equal(pd_workload_next(w, &a[i & 3], &e), 1);
    assert_true(a[1].isl == 600 && a[1].index == 5);
    pd_workload_free(w);
    pd_reqlog_free(&l);
}

static void bad_logs(void **state)
{
    static const struct { const char *text, *says; } bad[] = {
        { "", "log: it is empty" }, { " \n\n", "it is empty" }, { "hello\n", "log: line 1: no head of a log" },
        { "TIMESTAMP,ContextTokens\n", "line 1: no head" },
        { "TIMESTAMP,ContextTokens,GeneratedTokens\n", "there is no request in it" },
        { "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,12\n", "line 2: GeneratedTokens: ''" },
        { "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,12,-4\n", "line 2: GeneratedTokens: -4 is no number of tokens" },
        { "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1e99,4\n", "ContextTokens: 1e+99" },
        { "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,12,4\n", "line 2: TIMESTAMP: 'yesterday' is no time" },
        { "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-16 18:17:03,12,4\n", "is no time" },
        { "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,12,4\n\n2023-11-16 18:17:02,12,4\n", "line 4: its time is before" },
        { "num_prefill_tokens,num_decode_tokens\n1.5,2\n", "num_prefill_tokens: 1.5" },
        { "{\"timestamp\":1,\"input_length\":513,\"output_length\":4,\"hash_ids\":[1,2,3]}\n", "line 1: 3 hash_ids are more blocks of 512 than input_length 513 has" },
        { "{\"timestamp\":1,\"input_length\":5,\"output_length\":4}\n{\"timestamp\":1,\"output_length\":4}\n", "line 2: input_length is missing" },
        { "{\"timestamp\":\"x\",\"input_length\":5,\"output_length\":4}\n", "timestamp is missing, or no number" },
        { "{\"timestamp\":1e300,\"input_length\":5,\"output_length\":4}\n", "timestamp is no time" },
        { "{\"timestamp\":1,\"input_length\":5,\"output_length\":4,\"hash_ids\":[1.5]}\n", "an id is no whole number" },
        { "{\"timestamp\":1,\"input_length\":5,\"output_length\":4,\"hash_ids\":7}\n", "hash_ids is no list" },
        { "{\"timestamp\":1,\n", "log: line 1: bad JSON" },
        { "{\"prompt\":\"hello\"}\n", "line 1: a request without token_ids" },
        { "{\"prompt\":7}\n", "log: line 1" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct pd_reqlog l;
        struct pd_err e = { 0 };
        if (pd_reqlog_parse(bad[i].text, strlen(bad[i].text), "log", &l, &e) != PD_ECORRUPT || !strstr(e.msg, bad[i].says) || l.row || l.block)
            fail_msg("%s: %s (not: %s)", bad[i].text, e.msg, bad[i].says);
    }
    struct pd_reqlog l;
    struct pd_err e;
    assert_int_equal(pd_reqlog_read("/nowhere/log", &l, &e), PD_EFAIL);
}

static void bad_options(void **state)
{
    struct pd_traffic t = one;
    struct pd_workload *w;
    struct pd_err e;
    struct pd_workload_opts o;
    struct pd_reqlog l;
    parse("num_prefill_tokens,num_decode_tokens\n1500,200\n", &l);
#define REFUSED(change) do { o = base(); t = one; o.traffic = &t; change; assert_int_equal(pd_workload_new(&o, &w, &e), PD_EUSAGE); } while (0)
    REFUSED(o.rate = 0);
    REFUSED(o.arrive = PD_ARRIVE_LOG);
    REFUSED(o.arrive = PD_ARRIVE_LOG; o.log = &l);
    REFUSED(o.arrive = PD_ARRIVE_GAMMA; o.burstiness = 0);
    REFUSED(o.arrive = PD_ARRIVE_ONOFF);
    REFUSED(o.vocab_hi = 33);
    REFUSED(o.context = 1);
    REFUSED(o.n_traffic = 0);
    REFUSED(t.isl.kind = PD_LENS_LOG);
    REFUSED(o.log = &l; t.isl.kind = PD_LENS_LOG; t.prefix = PD_SHARE_LOG);
    REFUSED(o.length_scale = 0);
    pd_reqlog_free(&l);
}

static void quantiles(void **state)
{
    /* n, p, ranks of the point and the interval: from exact sums of binomials in rational numbers (Python: fractions, math.comb), by the words of sample.h. */
    static const struct { uint64_t n; double p; uint64_t at, lo, hi; } known[] = {
        { 1, 0.5, 1, 0, 2 }, { 5, 0.5, 3, 0, 6 }, { 6, 0.5, 3, 1, 6 }, { 20, 0.5, 10, 6, 15 }, { 20, 0.9, 18, 15, 21 }, { 100, 0.5, 50, 40, 61 },
        { 100, 0.95, 95, 90, 100 }, { 100, 0.99, 99, 97, 101 }, { 300, 0.99, 297, 293, 301 }, { 300, 0.95, 285, 277, 293 }, { 1000, 0.5, 500, 469, 532 },
        { 1000, 0.999, 999, 997, 1001 }, { 1000, 0.9, 900, 881, 919 }, { 1000, 0.99, 990, 983, 997 } };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint64_t at, lo, hi;
        pd_quantile_ranks(known[i].n, known[i].p, &at, &lo, &hi);
        if (at != known[i].at || lo != known[i].lo || hi != known[i].hi)
            fail_msg("n %d p %g: %d %d %d", (int)known[i].n, known[i].p, (int)at, (int)lo, (int)hi);
    }
    struct pd_sample s = { 0 };
    struct pd_err e;
    for (int i = 0; i < 1000; i++)
        assert_int_equal(pd_sample_add(&s, (double)(i * 7 % 1000 + 1), &e), 0);       /* 1 to 1000, out of order */
    struct pd_quantile q = pd_sample_quantile(&s, 0.99);
    assert_true(q.value == 990 && q.lo == 983 && q.hi == 997 && !q.lo_open && !q.hi_open);
    q = pd_sample_quantile(&s, 0.999);
    assert_true(q.value == 999 && q.lo == 997 && q.hi == 1000 && q.hi_open);
    assert_true(pd_sample_mean(&s) == 500.5);
    pd_sample_free(&s);
    q = pd_sample_quantile(&s, 0.5);
    assert_true(q.value == 0 && pd_sample_mean(&s) == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(arrivals), cmocka_unit_test(lengths), cmocka_unit_test(same_seed_same_bytes), cmocka_unit_test(prefixes),
        cmocka_unit_test(mixes), cmocka_unit_test(logs), cmocka_unit_test(replays), cmocka_unit_test(bad_logs), cmocka_unit_test(bad_options), cmocka_unit_test(quantiles) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
