/* Every allocation, read and write of wire/ refused once (make V=fault): an error of its own class, never a crash, never a wrong record. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../libcommon/trace/event.h"
#include "../../libcommon/wire/endpoint.h"
#include "../../libcommon/wire/json.h"
#include "../../libcommon/wire/stream.h"
#include "drill.h"
#include "samples.h"

#ifdef PD_FAULT

/* Encode, print as JSON, read back, decode, encode: the first failure's code, or 1 for a wrong result. */
static int records(struct pd_err *e)
{
    int rc = 0;
    for (int i = 0; !rc && i < N_SAMPLES; i++) {
        struct pd_buf b = { 0 }, j = { 0 }, back = { 0 }, again = { 0 };
        rc = sample_encode(i, &b, e);
        rc = rc ? rc : pd_msgpack_to_json(b.p, b.n, &j, e);
        rc = rc ? rc : pd_json_to_msgpack((char *)j.p, j.n, &back, e);
        rc = rc ? rc : reencode(back.p, back.n, &again, e);
        if (!rc && (again.n != b.n || memcmp(again.p, b.p, b.n)))
            rc = 1;
        pd_buf_free(&b);
        pd_buf_free(&j);
        pd_buf_free(&back);
        pd_buf_free(&again);
    }
    return rc;
}

/* Strings of every length about the sizes at which a reader's buffer grows: the character that falls on the failure may be a quote or a backslash. */
static int strings(struct pd_err *e)
{
    int rc = 0;
    char line[160];
    for (int n = 1; !rc && n < 70; n++) {
        struct pd_buf b = { 0 };
        int len = snprintf(line, sizeof line, "{\"%.*s\":\"\\n%.*s\\u00e9\"}", n, "kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk",
                           n, "vvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvv");
        rc = pd_json_to_msgpack(line, (size_t)len, &b, e);
        pd_buf_free(&b);
    }
    return rc;
}

/* A file written through an endpoint and read through another, in both formats; 50: it failed and left something behind. */
static int files(struct pd_err *e)
{
    char dir[] = "/tmp/pd-test-XXXXXX", path[64];
    struct pd_endpoint ep = { .fd = -1 };
    struct pd_buf b = { 0 };
    int rc = 0;
    if (!mkdtemp(dir))
        return 60;
    snprintf(path, sizeof path, "%s/f", dir);
    for (int json = 0; !rc && json < 2; json++) {
        struct pd_wstream *w = NULL;
        struct pd_rstream *s = NULL;
        struct pd_rec rec;
        bool bad;
        int n = 0;
        b.n = 0;
        rc = sample_encode(3, &b, e);
        rc = rc ? rc : pd_endpoint_open_out(path, NULL, &ep, e);
        rc = rc ? rc : pd_wstream_new(ep.fd, json ? PD_FMT_JSON : PD_FMT_MSGPACK, false, path, &w, e);
        rc = rc ? rc : pd_wstream_put(w, b.p, b.n, e);
        struct pd_err late;
        int late_rc = pd_wstream_close(w, &late);
        if (!rc && late_rc)
            rc = late_rc, *e = late;
        if (rc)
            pd_endpoint_abort(&ep);
        else
            rc = pd_endpoint_commit(&ep, e);
        if (rc)
            break;
        rc = pd_endpoint_open_in(path, NULL, &ep, e);
        rc = rc ? rc : pd_rstream_new(ep.fd, NULL, &s, e);
        while (!rc && (rc = pd_rstream_next(s, -1, &rec, &bad, e)) == 1) {
            rc = rec.n == b.n && !memcmp(rec.p, b.p, b.n) ? 0 : 1;
            n++;
        }
        if (!rc && n != 1)
            rc = 1;
        pd_rstream_free(s);
        pd_endpoint_abort(&ep);
        unlink(path);
    }
    pd_buf_free(&b);
    unlink(path);
    return rmdir(dir) ? 50 : rc;
}

static int traced(struct pd_err *e)
{
    struct pd_trace *t;
    int rc = pd_trace_open("/dev/null", "w", "prefill", &t, e);
    if (rc)
        return rc;
    for (int i = 0; i < 3; i++)
        pd_trace_step(t, &(struct pd_step){ .run = RUN_A, .where = "local" }, PD_ST_ACCEPTED, 0, NULL);
    pd_trace_close(t);
    return 0;
}

static void every_allocation_can_fail(void **state)
{
    assert_in_range(drill("malloc", records, 8), 100, 20000);
    assert_in_range(drill("malloc", strings, 8), 300, 20000);
    assert_in_range(drill("malloc", files, 8), 10, 20000);
}

static void system_calls_can_fail(void **state)
{
    assert_in_range(drill("read", files, 1), 2, 20);
    assert_int_equal(drill("write", files, 8), 2);
    assert_int_equal(drill("fsync", files, 1), 2);
}

/* A file system that has no unnamed files: the temporary has a name, and goes all the same. */
static void named_temporaries_go_too(void **state)
{
    assert_int_equal(drill("tmpfile", files, 0), 0);
    assert_int_equal(drill("tmpfile:fail:1,write", files, 8), 2);
    assert_int_equal(drill("tmpfile:fail:1,fsync", files, 1), 2);
    assert_in_range(drill("tmpfile:fail:1,malloc", files, 8), 10, 20000);
}

/* A failing trace never fails the run: only the opening may. */
static void a_trace_can_fail(void **state)
{
    assert_int_equal(drill("write", traced, 0), 0);
    assert_int_equal(drill("malloc", traced, 8), 4);
}
#else
static void faults(void **state)
{
    print_message("# skip: needs make V=fault\n");
    skip();
}
#endif

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
#ifdef PD_FAULT
        cmocka_unit_test(every_allocation_can_fail), cmocka_unit_test(system_calls_can_fail), cmocka_unit_test(named_temporaries_go_too),
        cmocka_unit_test(a_trace_can_fail)
#else
        cmocka_unit_test(faults)
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
