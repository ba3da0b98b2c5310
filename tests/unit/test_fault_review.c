/* Every allocation of what pd-trace says of decisions refused once, and every read (make V=fault): the error and nothing held, never a crash, never a wrong
 * answer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>
#include "drill.h"

#ifdef PD_FAULT
#include "../../libcommon/base/log.h"
#include "../../libcommon/route/history.h"
#include "route_scene.h"

static char file[] = "/tmp/pd-test-XXXXXX";

/* Twelve runs, each with its outcome; by a child, as faults are looked for once in a process, at its first allocation. */
static void make_log(void)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    int fd = mkstemp(file), status;
    pid_t pid = fork();
    if (pid) {
        close(fd);
        assert_true(waitpid(pid, &status, 0) == pid && status == 0);
        return;
    }
    for (int i = 0; i < 12; i++) {
        scene("conditional");
        snprintf(r.run, sizeof r.run, "01M8PAW1CACQM7WS4V%08d", i);
        r.t_us = 1796000000000000 + i * 1000000;
        r.input.slo = (struct pd_bin){ (const uint8_t *)"\x81\xa7ttft_ms\xcd\x03\xe8", 12 };
        strcpy(r.shadow.policy, "fixed");
        if (pd_choose(&r, &e) || pd_route_encode(&r, &b, &e))
            _exit(1);
        struct pd_outcome_rec o = { .t_us = r.t_us, .has = PD_OC_TTFT | PD_OC_COMPLETION, .ttft_us = r.ttft.p50, .completion_us = r.completion.p50 + 1000, .mode = "local",
                                    .policy = "conditional", .finish_reason = "stop", .completion_tokens = 32, .prompt_tokens = 2000, .d = S("d0") };
        memcpy(o.run, r.run, sizeof o.run);
        if (pd_outcome_encode(&o, &b, &e))
            _exit(1);
    }
    _exit(write(fd, b.p, b.n) != (ssize_t)b.n);
}

typedef int verb(const struct pd_review_opts *o, int *status, struct pd_err *e);
static int list(const struct pd_review_opts *o, int *status, struct pd_err *e) { return pd_report_ls(&o->log, status, e); }
static int stats(const struct pd_review_opts *o, int *status, struct pd_err *e) { return pd_report_stats(&o->log, status, e); }

static const struct { verb *fn; const char *policy, *says; bool json; } what[] = {
    { pd_review_why, NULL, "SLO {\"ttft_ms\":1000}", false }, { pd_review_why, NULL, "\"as_decided\":true", true }, { pd_review_replay, NULL, "12 decisions: 12 identical", false },
    { pd_review_replay, "fixed", "by fixed: 12 changed", false }, { pd_review_drift, NULL, "no window has runs enough to judge", false },
    { pd_review_regret, NULL, "12 of them can be judged", false }, { list, NULL, "completed    32 tokens", false }, { stats, NULL, "outcomes             12", false } };
enum { WHAT = sizeof what / sizeof *what };
static int turn;

static int review(struct pd_err *e)
{
    const char *const paths[] = { file, NULL };
    char *said = NULL;
    size_t n;
    int status = 0;
    struct pd_review_opts o = { .log = { .paths = paths, .out = open_memstream(&said, &n), .json = what[turn].json, .run = "01M8PAW1CACQM7WS4V00000003" },
                                .policy = what[turn].policy, .least_us = -1, .least_share = -1 };
    int rc = what[turn].fn(&o, &status, e);
    fclose(o.log.out);
    rc = rc ? rc : strstr(said, what[turn].says) && !status ? 0 : 1;
    free(said);
    return rc;
}

static void every_fault(void **state)
{
    pd_log_init("test", 0, true);
    make_log();
    for (turn = 0; turn < WHAT; turn++) {
        assert_in_range(drill("malloc", review, 8), 10, 20000);
        assert_in_range(drill("read", review, 1), 2, 100);
    }
    unlink(file);
}
#else
static void every_fault(void **state)
{
    print_message("# skip: needs make V=fault\n");
    skip();
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(every_fault) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
