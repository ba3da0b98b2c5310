/* route/fit and route/profile: coefficients that are known are found again; a profile is read as it stands, and what is none is refused by name. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <cmocka.h>
#include <stdlib.h>
#include "../../libcommon/route/fit.h"
#include "../../libcommon/route/profile.h"

static const double edge[PD_BANDS - 1] = { 128, 512, 2048 };

static void fits(void **state)
{
    double x[64][3], y[64], theta[3], worst, p95;
    struct pd_err e;
    uint32_t n = 0;
    for (double t = 16; t <= 4096; t *= 2)
        for (double c = 0; c <= 4096; c += 1024, n++) {
            x[n][0] = 1;
            x[n][1] = t;
            x[n][2] = t * (c + t / 2);
            y[n] = 800 + 160 * t + 0.01 * t * (c + t / 2);
        }
    assert_int_equal(pd_fit_rows(3, n, x[0], y, theta, &worst, &p95, &e), 0);
    assert_true(fabs(theta[0] / 800 - 1) < 1e-6 && fabs(theta[1] / 160 - 1) < 1e-6 && fabs(theta[2] / 0.01 - 1) < 1e-6);
    assert_true(worst < 1e-6 && fabs(p95 - 1) < 1e-6);
    /* A coefficient that the rows would make negative is 0, and the others are the best without it: y = 3 x - 1 over x 1, 2 by relative errors. */
    double v[2] = { 2, 5 }, w[4] = { 1, 1, 1, 2 };
    assert_int_equal(pd_fit_rows(2, 2, w, v, theta, &worst, NULL, &e), 0);
    double best = (1 / 2. + 2 / 5.) / (1 / 4. + 4 / 25.);       /* of sum (t x / y - 1)^2: t = sum (x / y) / sum (x / y)^2 */
    assert_true(theta[0] == 0 && fabs(theta[1] - best) < 1e-12);
    assert_true(fabs(worst - fmax(fabs(2 / best - 1), fabs(5 / (2 * best) - 1))) < 1e-12);
    /* p95: the 19th of 20 ratios, the fit being the best constant c of sum (c / y - 1)^2. */
    double one[20], z[20], s1 = 0, s2 = 0;
    for (int i = 0; i < 20; i++) {
        one[i] = 1;
        z[i] = 100 + i;
        s1 += 1 / z[i];
        s2 += 1 / (z[i] * z[i]);
    }
    assert_int_equal(pd_fit_rows(1, 20, one, z, theta, NULL, &p95, &e), 0);
    assert_true(fabs(theta[0] - s1 / s2) < 1e-9 && fabs(p95 - 118 / (s1 / s2)) < 1e-9);
    /* Rows that tell two quantities not apart: one of them takes it all. */
    double same[4] = { 1, 7, 1, 7 };
    assert_int_equal(pd_fit_rows(2, 2, same, (double[]){ 14, 14 }, theta, NULL, NULL, &e), 0);
    assert_true(fabs(theta[0] + 7 * theta[1] - 14) < 1e-9);
}

static void fits_refuse(void **state)
{
    double theta[3];
    struct pd_err e;
    assert_int_equal(pd_fit_rows(2, 1, (double[]){ 1, 2 }, (double[]){ 0 }, theta, NULL, NULL, &e), PD_EFAIL);
    assert_int_equal(pd_fit_rows(2, 1, (double[]){ 1, -2 }, (double[]){ 1 }, theta, NULL, NULL, &e), PD_EFAIL);
    assert_int_equal(pd_fit_rows(2, 1, (double[]){ 1, NAN }, (double[]){ 1 }, theta, NULL, NULL, &e), PD_EFAIL);
    assert_int_equal(pd_fit_rows(4, 1, (double[]){ 1, 1, 1, 1 }, (double[]){ 1 }, theta, NULL, NULL, &e), PD_EFAIL);
    assert_int_equal(pd_fit_rows(1, 1, (double[]){ 0 }, (double[]){ 1 }, theta, NULL, NULL, &e), PD_EFAIL);
}

#define HEAD "{\"pd\":\"profile\",\"v\":1,\"made\":{\"by\":\"hand\"},"
#define PREFILL "\"prefill\":{\"theta\":[800,160,0.01],\"p95\":1.1,\"rows\":[[16,0,3362],[512,1024,90000]]}"
#define DECODE "\"decode\":{\"theta\":[2000,50,0.5],\"rows\":[[1,100,2100],[8,8000,6400]]}"
#define MIXED "\"mixed\":{\"theta\":[0,0.9,0.8],\"rows\":[[16,0,8,8000,7000]]}"
#define CLASS "{\"model\":\"tiny@0123456789ab\",\"cpu\":\"avx2\",\"threads\":2,\"kv_dtype\":\"f16\",\"kv_token_bytes\":23040,"
#define PATHS "\"paths\":[{\"scheme\":\"shm\",\"class\":\"local\",\"theta\":[100,0.0001],\"rows\":[[4096,100],[1048576,210]]}," \
              "{\"scheme\":\"tcp\",\"theta\":[200,0.001],\"rows\":[[4096,200]]}]}"
static const char good[] = HEAD "\"classes\":[" CLASS PREFILL "," DECODE "," MIXED "},{\"model\":\"tiny@0123456789ab\",\"cpu\":\"avx2\",\"threads\":1," PREFILL "}]," PATHS;

static void reads(void **state)
{
    struct pd_profile p;
    struct pd_err e;
    struct pd_str model = { "tiny@0123456789ab", 17 };
    assert_int_equal(pd_profile_parse(good, sizeof good - 1, "p.json", &p, &e), 0);
    assert_int_equal(p.n_classes, 2);
    const struct pd_profile_class *c = pd_profile_class(&p, model, "avx2", 2);
    assert_ptr_equal(c, &p.class_[0]);
    assert_ptr_equal(pd_profile_class(&p, model, NULL, 1), &p.class_[1]);
    assert_ptr_equal(pd_profile_class(&p, model, NULL, 0), c);
    assert_null(pd_profile_class(&p, model, "avx512", 0));
    assert_null(pd_profile_class(&p, model, "avx2", 3));
    assert_null(pd_profile_class(&p, (struct pd_str){ "tiny@", 5 }, NULL, 0));
    assert_true(c->kv_token_bytes == 23040 && pd_str_eq(c->kv_dtype, "f16") && !c->weights.p && !c->fit[PD_PT_PACK].k);
    const struct pd_profile_fit *f = &c->fit[PD_PT_PREFILL];
    assert_true(f->k == 3 && f->n == 2 && f->p95 == 1.1 && f->theta[1] == 160 && f->row[3] == 512 && f->row[5] == 90000);
    assert_true(f->typical[0] == 1 && f->typical[1] == 264 && f->typical[2] == (16 * 8 + 512. * (1024 + 256)) / 2);
    double x[3];
    pd_profile_x(c, PD_PT_MIXED, c->fit[PD_PT_MIXED].row, x);
    assert_true(x[0] == 1 && x[1] == 800 + 160 * 16 + 0.01 * 128 && x[2] == 2000 + 50 * 8 + 0.5 * 8000);
    assert_true(fabs(pd_profile_cost(&c->fit[PD_PT_MIXED], x) - (0.9 * x[1] + 0.8 * x[2])) < 1e-9);
    assert_ptr_equal(pd_profile_path(&p, "shm", "local"), &p.path[0]);
    assert_null(pd_profile_path(&p, "shm", "rack"));
    assert_ptr_equal(pd_profile_path(&p, "tcp", "rack"), &p.path[1]);
    assert_null(pd_profile_path(&p, "rdma", NULL));
    /* An estimator opened from it tells what the coefficients say, and says that it is cold. */
    struct pd_term t;
    pd_profile_open(f, edge, &t);
    struct pd_cost cost = pd_term_cost(&t, (double[]){ 1, 100, 5000 }, 1, 1000000);
    assert_true(cost.cold && fabs(cost.p50 - (800 + 160 * 100 + 0.01 * 5000)) < 1e-9);
    pd_profile_teach(c, PD_PT_PREFILL, f, edge, 1, &t);
    assert_int_equal(pd_term_steps(&t), 2);
    pd_profile_teach(NULL, PD_PT_PACK, &p.path[0].fit, edge, 1, &t);
    cost = pd_term_cost(&t, (double[]){ 1, 1048576 }, 1, 1000000);
    assert_true(fabs(cost.p50 / 210 - 1) < 0.05);
    pd_profile_free(&p);
}

static void refuses(void **state)
{
    static const struct { const char *text, *says; } bad[] = {
        { "", "p.json" }, { "[]", "p.json" }, { "{}", "no profile that this build reads" }, { "{\"pd\":\"profile\",\"v\":2}", "no profile that this build reads" },
        { HEAD "\"classes\":[]}", "neither classes nor paths" },
        { HEAD "\"classes\":{}}", "classes is no list" },
        { HEAD "\"classes\":[7]}", "class 1: no object" },
        { HEAD "\"classes\":[{\"cpu\":\"avx2\",\"threads\":2}]}", "class 1: model is missing" },
        { HEAD "\"classes\":[{\"model\":\"\",\"cpu\":\"avx2\",\"threads\":2}]}", "class 1: model: \"\" is no name" },
        { HEAD "\"classes\":[{\"model\":\"m\",\"cpu\":\"avx2\",\"threads\":0}]}", "threads" },
        { HEAD "\"classes\":[" CLASS "\"prefill\":{\"theta\":[1,2],\"rows\":[[1,1,1]]}}]}", "class 1: prefill: theta: a list of 3 numbers" },
        { HEAD "\"classes\":[" CLASS "\"prefill\":{\"theta\":[1,2,-3],\"rows\":[[1,1,1]]}}]}", "class 1: prefill: theta: -3 is no number from 0" },
        { HEAD "\"classes\":[" CLASS "\"prefill\":{\"theta\":[1,2,\"3\"],\"rows\":[[1,1,1]]}}]}", "theta: \"3\" is no number" },
        { HEAD "\"classes\":[" CLASS "\"prefill\":{\"theta\":[0,0,0],\"rows\":[[1,1,1]]}}]}", "all coefficients are 0" },
        { HEAD "\"classes\":[" CLASS "\"prefill\":{\"theta\":[1,0,0]}}]}", "prefill: rows is missing" },
        { HEAD "\"classes\":[" CLASS "\"prefill\":{\"theta\":[1,0,0],\"rows\":[]}}]}", "a list of 1 to 4096 rows" },
        { HEAD "\"classes\":[" CLASS "\"prefill\":{\"theta\":[1,0,0],\"rows\":[[1,1,0]]}}]}", "row 1 took no time" },
        { HEAD "\"classes\":[" CLASS "\"prefill\":{\"theta\":[1,0,0],\"p95\":0,\"rows\":[[1,1,1]]}}]}", "p95 is no ratio" },
        { HEAD "\"classes\":[" CLASS MIXED "}]}", "mixed: needs prefill and decode" },
        { HEAD "\"paths\":[{\"theta\":[1,1],\"rows\":[[1,1]]}]}", "path 1: scheme is missing" },
        { HEAD "\"paths\":[{\"scheme\":\"tcp\",\"theta\":[1,1],\"rows\":[[1e16,1]]}]}", "path 1: rows: 1e+16 is no number" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct pd_profile p;
        struct pd_err e = { 0 };
        int rc = pd_profile_parse(bad[i].text, strlen(bad[i].text), "p.json", &p, &e);
        if (rc != PD_ECORRUPT || !strstr(e.msg, bad[i].says) || strncmp(e.msg, "p.json", 6) || p.mem.head)
            fail_msg("%s: %d %s (not: %s)", bad[i].text, rc, e.msg, bad[i].says);
    }
    /* Cut anywhere, it is refused. */
    for (size_t n = 0; n < sizeof good - 1; n++) {
        struct pd_profile p;
        struct pd_err e;
        char *cut = malloc(n + 1);
        memcpy(cut, good, n);
        assert_int_equal(pd_profile_parse(cut, n, "p.json", &p, &e), PD_ECORRUPT);
        free(cut);
    }
    struct pd_profile p;
    struct pd_err e;
    assert_int_equal(pd_profile_read("/nowhere/p.json", &p, &e), PD_EFAIL);
    assert_int_equal(pd_profile_read("/", &p, &e), PD_EFAIL);
    assert_int_equal(pd_profile_read("/dev/zero", &p, &e), PD_ECORRUPT);
    assert_non_null(strstr(e.msg, "more than 4194304 bytes are no profile"));
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(fits), cmocka_unit_test(fits_refuse), cmocka_unit_test(reads), cmocka_unit_test(refuses) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
