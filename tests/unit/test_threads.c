/* The pool: every task once, regions back to back and nested in time with sleeping workers, and a count from the affinity mask. */
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../libcommon/base/threads.h"

enum { MAX = 5000 };
struct job { int ran[MAX]; int tids; _Atomic int seen[64]; };

static void mark(void *ctx, int task, int tid)
{
    struct job *j = ctx;
    j->ran[task]++;                             /* plain on purpose: two runs of one task would be a race that tsan reports */
    atomic_fetch_add(&j->seen[tid], 1);
}

static void every_task_once(void **st)
{
    static struct job j;
    for (int n = 1; n <= 4; n++) {
        struct pd_threads *p;
        assert_int_equal(pd_threads_new(n, &p, NULL), 0);
        assert_int_equal(pd_threads_count(p), n);
        static const int sizes[] = { 0, 1, 2, 3, 17, 1000, MAX };
        for (int round = 0; round < 60; round++)
            for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
                memset(&j, 0, sizeof j);
                pd_threads_run(p, sizes[s], mark, &j);
                int sum = 0;
                for (int i = 0; i < MAX; i++)
                    assert_int_equal(j.ran[i], i < sizes[s]);
                for (int t = 0; t < 64; t++) {
                    sum += j.seen[t];
                    assert_true(t < n || !j.seen[t]);
                }
                assert_int_equal(sum, sizes[s]);
            }
        pd_threads_free(p);
    }
}

/* Workers asleep between regions, and a caller that must wait for a slow task. */
static void slow(void *ctx, int task, int tid)
{
    struct timespec t = { 0, 200000 * (1 + task % 3) };
    nanosleep(&t, NULL);
    mark(ctx, task, tid);
}
static void sleepers(void **st)
{
    static struct job j;
    struct pd_threads *p;
    assert_int_equal(pd_threads_new(3, &p, NULL), 0);
    for (int round = 0; round < 30; round++) {
        memset(&j, 0, sizeof j);
        pd_threads_run(p, 7, slow, &j);
        for (int i = 0; i < 7; i++)
            assert_int_equal(j.ran[i], 1);
        struct timespec t = { 0, 1000000 };
        nanosleep(&t, NULL);
    }
    int others = 0;
    memset(&j, 0, sizeof j);
    pd_threads_run(p, 60, slow, &j);
    for (int t = 1; t < 3; t++)
        others += j.seen[t];
    assert_true(others > 0);                    /* the workers do take part */
    pd_threads_free(p);
}

/* What a region wrote is seen by the next, whichever thread runs it: a chain of dependent regions gives the exact sum. */
static uint64_t cells[256];
static void step(void *ctx, int task, int tid) { cells[task] = cells[(task * 37 + 11) % 128 + 128] + 1; }
static void copy(void *ctx, int task, int tid) { cells[task + 128] = cells[task]; }
static void regions_follow(void **st)
{
    struct pd_threads *p;
    assert_int_equal(pd_threads_new(4, &p, NULL), 0);
    memset(cells, 0, sizeof cells);
    for (int i = 0; i < 3000; i++) {
        pd_threads_run(p, 128, step, NULL);
        pd_threads_run(p, 128, copy, NULL);
    }
    for (int i = 0; i < 128; i++)
        assert_int_equal(cells[i], 3000);
    pd_threads_free(p);
}

static void counts(void **st)
{
    cpu_set_t mine, one;
    assert_int_equal(sched_getaffinity(0, sizeof mine, &mine), 0);
    int n = pd_threads_default();
    assert_true(n >= 1 && n <= CPU_COUNT(&mine));
    int cpu = 0;
    while (!CPU_ISSET(cpu, &mine))
        cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(pd_threads_default(), 1);
    sched_setaffinity(0, sizeof mine, &mine);
    struct pd_threads *p = NULL;
    struct pd_err e;
    assert_int_equal(pd_threads_new(0, &p, &e), PD_EUSAGE);
    assert_int_equal(pd_threads_new(100000, &p, &e), PD_EUSAGE);
    assert_non_null(strstr(e.msg, "100000"));
    assert_null(p);
    pd_threads_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(every_task_once), cmocka_unit_test(sleepers), cmocka_unit_test(regions_follow), cmocka_unit_test(counts) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
