/* Workers files, and addresses that a daemon gives to others. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../libcommon/serve/register.h"
#include "../../libcommon/wire/json.h"
#include "samples.h"

static char path[] = "/tmp/pd-test-XXXXXX";

static void save(const struct pd_buf *b)
{
    FILE *f = fopen(path, "wb");
    if (b->n)
        fwrite(b->p, 1, b->n, f);
    fclose(f);
}

static void workers_files_are_read(void **state)
{
    struct pd_worker_rec w = sample_worker(), *got = NULL;
    struct pd_buf b = { 0 }, j = { 0 };
    struct pd_arena a = { 0 };
    struct pd_err e = { 0 };
    uint32_t n = 0;
    assert_int_equal(pd_worker_rec_encode(&w, &b, &e), 0);
    w.worker = STR("prefill@host:16");
    strcpy(w.role, "prefill");
    assert_int_equal(pd_worker_rec_encode(&w, &b, &e), 0);
    w.load.runs = 77;           /* the same again, later */
    assert_int_equal(pd_worker_rec_encode(&w, &b, &e), 0);
    w.life[0]++;                /* the same name in another life */
    assert_int_equal(pd_worker_rec_encode(&w, &b, &e), 0);
    save(&b);
    assert_int_equal(pd_workers_read(path, &a, &got, &n, &e), 0);
    assert_int_equal(n, 3);
    assert_true(pd_str_eq(got[0].worker, "decode@host:17") && got[1].load.runs == 77 && got[2].life[0] == got[1].life[0] + 1);
    w = sample_worker();
    b.n = 0;
    assert_int_equal(pd_worker_rec_encode(&w, &b, &e), 0);
    assert_int_equal(pd_msgpack_to_json(b.p, b.n, &j, &e), 0);
    assert_int_equal(pd_buf_add(&j, "\n", 1, &e), 0);
    save(&j);
    assert_int_equal(pd_workers_read(path, &a, &got, &n, &e), 0);
    assert_true(n == 1 && pd_str_eq(got[0].listen, "unix:/run/pd/d0"));
    pd_arena_free(&a);
    pd_buf_free(&b);
    pd_buf_free(&j);
}

static void refused(const struct pd_buf *b, int code, const char *why)
{
    struct pd_worker_rec *got;
    struct pd_arena a = { 0 };
    struct pd_err e = { 0 };
    uint32_t n;
    save(b);
    int rc = pd_workers_read(path, &a, &got, &n, &e);
    if (rc != code || !strstr(e.msg, why) || !strstr(e.msg, path))
        fail_msg("not refused with '%s' but %d '%s'", why, rc, e.msg);
    pd_arena_free(&a);
}

static void bad_workers_files_are_told(void **state)
{
    struct pd_worker_rec w = sample_worker(), *got;
    struct pd_request q = small_request();
    struct pd_buf b = { 0 };
    struct pd_arena a = { 0 };
    struct pd_err e = { 0 };
    uint32_t n;
    refused(&b, PD_EFAIL, "no worker in it");
    assert_int_equal(pd_worker_rec_encode(&w, &b, &e), 0);
    assert_int_equal(pd_request_encode(&q, &b, &e), 0);
    refused(&b, PD_EFAIL, "record 2: it is of kind 'request'");
    b.n = 0;
    assert_int_equal(pd_worker_rec_encode(&w, &b, &e), 0);
    b.n -= 3;
    refused(&b, PD_ECORRUPT, "record 1");
    b.n = 0;
    strcpy(w.role, "cook");
    assert_int_equal(pd_worker_rec_encode(&w, &b, &e), 0);
    refused(&b, PD_ECORRUPT, "record 1: worker: role 'cook'");
    assert_true(pd_workers_read("/tmp/pd-test-none", &a, &got, &n, &e) < 0 && strstr(e.msg, "/tmp/pd-test-none"));
    pd_arena_free(&a);
    pd_buf_free(&b);
}

static void addresses_are_absolute(void **state)
{
    char out[5000], here[4000], want[5000], small[20];
    struct pd_err e = { 0 };
    assert_int_equal(pd_daemon_address("unix:/run/pd/d0", out, sizeof out, &e), 0);
    assert_string_equal(out, "unix:/run/pd/d0");
    assert_int_equal(pd_daemon_address("unix:d0", out, sizeof out, &e), 0);
    snprintf(want, sizeof want, "unix:%s/d0", getcwd(here, sizeof here));
    assert_string_equal(out, want);
    assert_int_equal(pd_daemon_address("unix:", out, sizeof out, &e), PD_EUSAGE);
    assert_int_equal(pd_daemon_address("tcp:a:1", out, sizeof out, &e), 0);
    assert_string_equal(out, "tcp:a:1");
    assert_int_equal(pd_daemon_address("tcp-listen:127.0.0.1:7", out, sizeof out, &e), 0);
    assert_string_equal(out, "tcp:127.0.0.1:7");
    assert_int_equal(pd_daemon_address("tcp:a", out, sizeof out, &e), PD_EUSAGE);
    snprintf(want, sizeof want, "unix:/%0*d", 106, 0);
    assert_int_equal(pd_daemon_address(want, out, sizeof out, &e), 0);
    snprintf(want, sizeof want, "unix:/%0*d", 107, 0);
    assert_int_equal(pd_daemon_address(want, out, sizeof out, &e), PD_EUSAGE);
    assert_non_null(strstr(e.msg, "at most 107 bytes"));
    assert_int_equal(pd_daemon_address("unix:/a/much/too/long/name", small, sizeof small, &e), PD_EUSAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(workers_files_are_read), cmocka_unit_test(bad_workers_files_are_told), cmocka_unit_test(addresses_are_absolute) };
    int fd = mkstemp(path);
    close(fd);
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return rc;
}
