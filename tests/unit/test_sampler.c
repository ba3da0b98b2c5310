/* The sampler against a naive restatement of its documented order, and the text of a choice over token boundaries. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>
#include "../../libcommon/base/utf8.h"
#include "../../libcommon/engine/runtime.h"
#include "../../libcommon/engine/sampler.h"
#include "../../libcommon/engine/text.h"

static struct pd_runtime rt;
static struct pd_sampler *smp;
static int V;

static int setup(void **state)
{
    (void)state;
    struct pd_err e;
    struct pd_runtime_opts o = { .model = "testdata/tiny/llama-f32.gguf", .role = "test", .threads = 1, .kv_mem = 8 << 20 };
    if (pd_runtime_open(&o, &rt, &e) < 0 || pd_sampler_new(rt.k, rt.model->tok, rt.model->cfg.n_vocab, &smp, &e) < 0)
        return -1;
    V = rt.model->cfg.n_vocab;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    pd_sampler_free(smp);
    pd_runtime_close(&rt);
    return 0;
}

static void make_logits(float *l, uint32_t seed)
{
    uint64_t x = seed * 7919u + 3;
    for (int i = 0; i < V; i++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        l[i] = (float)((double)(x >> 40) / (1 << 24) * 12 - 6);
    }
}

static const double *cmp_p;
static int by_p(const void *a, const void *b)
{
    int x = *(const int *)a, y = *(const int *)b;
    return cmp_p[x] != cmp_p[y] ? (cmp_p[x] < cmp_p[y] ? 1 : -1) : x - y;
}

/* The set that may be drawn from, by the order in pd-decode(1), in double; returns its size and each token's probability. */
static int allowed(const struct pd_request *r, const float *l, double *p)
{
    double max = -INFINITY, sum = 0;
    int *idx = malloc((size_t)V * sizeof *idx), n = 0;
    for (int i = 0; i < V; i++)
        max = l[i] / r->temperature > max ? l[i] / r->temperature : max;
    for (int i = 0; i < V; i++)
        p[i] = exp(l[i] / r->temperature - max);
    for (int i = 0; i < V; i++)
        if (p[i] >= r->min_p)
            idx[n++] = i;
    cmp_p = p;
    qsort(idx, (size_t)n, sizeof *idx, by_p);
    if (r->top_k > 0 && n > r->top_k)
        n = r->top_k;
    for (int i = 0; i < n; i++)
        sum += p[idx[i]];
    double acc = 0;
    int m = 0;
    while (m < n) {
        acc += p[idx[m++]] / sum;
        if (r->top_p < 1 && acc >= r->top_p - 1e-9)
            break;
    }
    double *q = calloc((size_t)V, sizeof *q), total = 0;
    for (int i = 0; i < m; i++)
        total += p[idx[i]];
    for (int i = 0; i < m; i++)
        q[idx[i]] = p[idx[i]] / total;
    memcpy(p, q, (size_t)V * sizeof *p);
    free(q);
    free(idx);
    return m;
}

/* 20,000 draws: nothing outside the set, and frequencies as the probabilities say (chi-square over what is expected at least 10 times). */
static void test_distribution(void **state)
{
    (void)state;
    static const struct { float t, top_p, min_p; int top_k; } v[] = { { 1, 1, 0, 0 }, { 0.7f, 0.9f, 0, 0 }, { 1.3f, 1, 0, 10 }, { 1, 1, 0.1f, 0 }, { 1, 0.8f, 0, 20 }, { 0.5f, 0.95f, 0.05f, 50 } };
    float *l = malloc((size_t)V * sizeof *l), *work = malloc((size_t)V * sizeof *work);
    double *p = malloc((size_t)V * sizeof *p);
    int *count = calloc((size_t)V, sizeof *count);
    for (size_t k = 0; k < sizeof v / sizeof *v; k++) {
        struct pd_request r = { .n = 1, .temperature = v[k].t, .top_p = v[k].top_p, .min_p = v[k].min_p, .top_k = v[k].top_k, .repetition_penalty = 1 };
        int32_t prompt[1] = { 1 };
        make_logits(l, (uint32_t)k);
        memset(count, 0, (size_t)V * sizeof *count);
        enum { N = 20000 };
        for (int i = 0; i < N; i++) {
            struct pd_sampled s;
            r.seed = i;
            memcpy(work, l, (size_t)V * sizeof *l);
            pd_sample(smp, &r, 0, prompt, 1, 1, work, &s);
            count[s.token]++;
        }
        int m = allowed(&r, l, p), df = 0;
        double chi = 0;
        for (int i = 0; i < V; i++) {
            if (p[i] <= 0 && count[i])
                fail_msg("case %zu: token %d was drawn outside the set of %d", k, i, m);
            if (p[i] * N >= 10) {
                double d = count[i] - p[i] * N;
                chi += d * d / (p[i] * N);
                df++;
            }
        }
        assert_true(df > 1);
        if (chi > df + 5 * sqrt(2.0 * df))
            fail_msg("case %zu: chi-square %.1f with %d degrees", k, chi, df);
    }
    free(l);
    free(work);
    free(p);
    free(count);
}

/* The colder the draw the more it is the largest logit, down to temperatures whose inverse overflows. */
static void test_cold(void **state)
{
    (void)state;
    static const float cold[] = { 0, 1e-45f, 1e-40f, 1e-38f, 1e-30f, 1e-7f, 1e-5f, 1e-4f };
    float *l = malloc((size_t)V * sizeof *l);
    for (size_t k = 0; k < sizeof cold / sizeof *cold; k++)
        for (int way = 0; way < 4; way++) {
            struct pd_request r = { .n = 1, .temperature = cold[k], .top_p = way == 1 ? 0.9f : 1, .top_k = way == 2 ? 5 : 0, .min_p = way == 3 ? 0.1f : 0, .repetition_penalty = 1, .seed = way };
            int32_t prompt[1] = { 1 };
            struct pd_sampled s;
            make_logits(l, 3);
            l[17] = 6.5f;
            pd_sample(smp, &r, 0, prompt, 1, 1, l, &s);
            if (s.token != 17)
                fail_msg("temperature %g, way %d: token %d", (double)cold[k], way, s.token);
        }
    free(l);
}

static void test_uniform(void **state)
{
    (void)state;
    double sum = 0;
    int bins[16] = { 0 };
    for (int i = 0; i < 160000; i++) {
        double u = pd_sample_uniform(i % 400, i / 400 % 4, (uint32_t)(i / 1600));
        assert_true(u >= 0 && u < 1);
        sum += u;
        bins[(int)(u * 16)]++;
    }
    assert_true(fabs(sum / 160000 - 0.5) < 0.005);
    for (int i = 0; i < 16; i++)
        assert_in_range(bins[i], 9500, 10500);
    assert_true(pd_sample_uniform(1, 0, 0) == pd_sample_uniform(1, 0, 0));
    assert_true(pd_sample_uniform(1, 0, 0) != pd_sample_uniform(1, 1, 0) && pd_sample_uniform(1, 0, 0) != pd_sample_uniform(1, 0, 1));
}

static void test_penalties(void **state)
{
    (void)state;
    float *l = malloc((size_t)V * sizeof *l), *raw = malloc((size_t)V * sizeof *l);
    struct pd_sampled s;
    struct pd_request r = { .n = 1, .temperature = 0, .top_p = 1, .repetition_penalty = 1, .logprobs = 1, .top_logprobs = 3 };
    int32_t seq[] = { 5, 6, 7, 7, 7, 8 };       /* prompt 5 6, output 7 7 7 8 */
    make_logits(raw, 9);
    raw[7] = 10;
    raw[8] = 9.6f;
    raw[5] = 9.5f;
    raw[20] = 9;
    memcpy(l, raw, (size_t)V * sizeof *l);
    pd_sample(smp, &r, 0, seq, 6, 2, l, &s);
    assert_int_equal(s.token, 7);
    assert_int_equal(s.n_top, 3);
    assert_int_equal(s.top[0].token, 7);
    assert_int_equal(s.top[1].token, 8);
    double z = 0;
    for (int i = 0; i < V; i++)
        z += exp(raw[i] - 10.0);
    assert_true(fabs(s.logprob + log(z)) < 1e-5);
    r.frequency_penalty = 0.3f;     /* 7: -0.9, 8: -0.3 -> 9.1, 9.3; 5 is the prompt's: 9.5 */
    memcpy(l, raw, (size_t)V * sizeof *l);
    pd_sample(smp, &r, 0, seq, 6, 2, l, &s);
    assert_int_equal(s.token, 5);
    r.frequency_penalty = 0;
    r.repetition_penalty = 1.2f;    /* prompt too: 20 wins */
    memcpy(l, raw, (size_t)V * sizeof *l);
    pd_sample(smp, &r, 0, seq, 6, 2, l, &s);
    assert_int_equal(s.token, 20);
    assert_true(fabs(s.logprob - (raw[20] - 10 - log(z))) < 1e-5);  /* the model's own logprob */
    r.repetition_penalty = 1;
    r.presence_penalty = 0.5f;      /* 7: 9.5, 8: 9.1, 5: 9.5 -> the lowest id among equals */
    memcpy(l, raw, (size_t)V * sizeof *l);
    pd_sample(smp, &r, 0, seq, 6, 2, l, &s);
    assert_int_equal(s.token, 5);
    int eos = pd_tokenizer_eos(rt.model->tok);
    r.presence_penalty = 0;
    raw[eos] = 50;
    memcpy(l, raw, (size_t)V * sizeof *l);
    pd_sample(smp, &r, 0, seq, 6, 2, l, &s);
    assert_int_equal(s.token, eos);
    r.min_tokens = 5;               /* this is the fifth: banned */
    memcpy(l, raw, (size_t)V * sizeof *l);
    pd_sample(smp, &r, 0, seq, 6, 2, l, &s);
    assert_int_equal(s.token, 7);
    r.min_tokens = 4;
    memcpy(l, raw, (size_t)V * sizeof *l);
    pd_sample(smp, &r, 0, seq, 6, 2, l, &s);
    assert_int_equal(s.token, eos);
    free(l);
    free(raw);
}

/* Feeds bytes through single-byte tokens of the vocabulary and gives back what may be shown after each. */
static void feed(struct pd_text *t, const struct pd_request *r, const char *bytes, size_t n, bool may_stop)
{
    struct pd_err e;
    for (size_t i = 0; i < n && !t->stopped; i++) {
        for (int id = 0; id < V; id++) {
            struct pd_buf b = { 0 };
            pd_detokenize(rt.model->tok, id, false, false, &b, &e);
            bool hit = b.n == 1 && b.p[0] == (uint8_t)bytes[i];
            pd_buf_free(&b);
            if (hit) {
                assert_int_equal(pd_text_add(t, rt.model->tok, r, id, may_stop, &e), 0);
                goto next;
            }
        }
        fail_msg("no token for byte %02x", (uint8_t)bytes[i]);
next:;
    }
}

static void test_text(void **state)
{
    (void)state;
    struct pd_err e;
    struct pd_str stops[] = { { "END", 3 }, { "\n\n", 2 } };
    struct pd_request r = { .stop = stops, .n_stop = 2 };
    struct pd_text t = { 0 };
    feed(&t, &r, "one EN", 6, true);
    assert_int_equal(t.text.n, 4);          /* "EN" may become END */
    feed(&t, &r, "E", 1, true);
    assert_int_equal(t.text.n, 6);          /* it did not; the last E may again */
    feed(&t, &r, "ND two", 6, true);
    assert_true(t.stopped);
    assert_int_equal(t.text.n, 6);
    assert_memory_equal(t.text.p, "one EN", 6);
    pd_text_free(&t);
    memset(&t, 0, sizeof t);
    feed(&t, &r, "a\xc3", 2, true);
    assert_int_equal(t.text.n, 1);          /* half a character is held */
    feed(&t, &r, "\xa9", 1, true);
    assert_int_equal(t.text.n, 3);
    feed(&t, &r, "\xff", 1, true);
    assert_int_equal(pd_text_end(&t, &e), 0);
    assert_int_equal(t.text.n, 6);
    assert_memory_equal(t.text.p, "a\xc3\xa9\xef\xbf\xbd", 6);
    pd_text_free(&t);
    memset(&t, 0, sizeof t);
    feed(&t, &r, "END", 3, false);          /* before min_tokens */
    feed(&t, &r, "x", 1, true);
    assert_false(t.stopped);
    assert_int_equal(t.text.n, 4);
    pd_text_free(&t);
    memset(&t, 0, sizeof t);
    stops[1] = (struct pd_str){ "q", 1 };   /* shorter than the other: what was let pass is not found again by the longer one's look back */
    feed(&t, &r, "aq", 2, false);
    feed(&t, &r, "bc", 2, true);
    assert_false(t.stopped);
    feed(&t, &r, "q", 1, true);
    assert_true(t.stopped);
    assert_int_equal(t.text.n, 4);
    assert_memory_equal(t.text.p, "aqbc", 4);
    pd_text_free(&t);
}

/* Tokens that are no whole characters, one by one. */
static void test_echo(void **state)
{
    (void)state;
    struct pd_err e;
    for (int32_t id = 0; id < V; id++) {
        struct pd_text t = { 0 };
        int32_t two[] = { id, id };
        assert_int_equal(pd_text_echo(&t, rt.model->tok, two, 2, &e), 0);
        assert_int_equal(pd_utf8_invalid((const char *)t.text.p, t.text.n), -1);
        assert_int_equal(t.raw.n, 0);
        pd_text_free(&t);
    }
}

/* Nothing is left to choose from. */
static void test_banned(void **state)
{
    (void)state;
    float *l = malloc((size_t)V * sizeof *l);
    int32_t *all = malloc((size_t)V * sizeof *all), seq[] = { 5, 6, 7 };
    for (int i = 0; i < V; i++)
        all[i] = i;
    static const struct { float temperature, top_p, min_p; int32_t top_k; } v[] = { { 0, 1, 0, 0 }, { 1, 1, 0, 0 }, { 1, 1, 0, 5 }, { 1, 0.5f, 0, 0 }, { 1, 1, 0.1f, 0 } };
    for (size_t i = 0; i < sizeof v / sizeof *v; i++) {
        struct pd_request r = { .n = 1, .temperature = v[i].temperature, .top_p = v[i].top_p, .min_p = v[i].min_p, .top_k = v[i].top_k, .repetition_penalty = 1, .logprobs = 1,
                                .min_tokens = 9, .stop_token_ids = all, .n_stop_token_ids = (uint32_t)V };
        struct pd_sampled s;
        make_logits(l, 3);
        pd_sample(smp, &r, 0, seq, 3, 2, l, &s);
        assert_int_equal(s.token, -1);
        r.n_stop_token_ids--;       /* one is left */
        make_logits(l, 3);
        pd_sample(smp, &r, 0, seq, 3, 2, l, &s);
        assert_int_equal(s.token, V - 1);
    }
    free(all);
    free(l);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_uniform), cmocka_unit_test(test_distribution), cmocka_unit_test(test_cold),
                                        cmocka_unit_test(test_penalties), cmocka_unit_test(test_text), cmocka_unit_test(test_echo), cmocka_unit_test(test_banned) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
