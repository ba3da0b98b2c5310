/* Bytes as a log of decisions, and as one decision whose outcome follows: pd-trace tells of it, or says why not. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "../../libcommon/base/log.h"
#include "../../libcommon/route/history.h"

static FILE *null;

static void review(const void *p, size_t n, bool json)
{
    static int (*const fn[])(const struct pd_review_opts *o, int *status, struct pd_err *e) = { pd_review_why, pd_review_replay, pd_review_replay, pd_review_drift,
                                                                                              pd_review_regret };
    static const char *const policy[] = { NULL, NULL, "conditional", NULL, NULL };
    char path[64];
    int fd = memfd_create("log", MFD_CLOEXEC);
    if (write(fd, p, n) != (ssize_t)n)
        abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const char *const paths[] = { path, NULL };
    struct pd_report_opts log = { .paths = paths, .out = null, .json = json, .log.max_record = 1 << 16, .run = "0", .quiet = true };
    for (size_t i = 0; i < sizeof fn / sizeof *fn; i++) {
        struct pd_err e = { 0 };
        int status = 0, rc = fn[i](&(struct pd_review_opts){ .log = log, .policy = policy[i], .least_us = -1, .least_share = -1 }, &status, &e);
        if (rc && !e.msg[0])
            abort();
    }
    int status = 0;
    struct pd_err e;
    pd_report_ls(&log, &status, &e);
    pd_report_stats(&log, &status, &e);
    close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    struct pd_arena a = { 0 };
    struct pd_buf both = { 0 };
    struct pd_err e;
    struct pd_route_rec *r = pd_arena_alloc(&a, 1, sizeof *r, &e);
    if (!null) {
        null = fopen("/dev/null", "w");
        pd_log_init("fuzz", 0, true);
    }
    review(p, n, n & 1);
    if (r && pd_route_decode(p, n, &a, r, &e) == 0 && r->chosen.any) {
        const int64_t us = r->completion.p50;
        struct pd_outcome_rec o = { .t_us = r->t_us, .has = PD_OC_KV * 2 - 1, .finish_reason = "stop", .completion_tokens = r->input.out_p50, .prompt_tokens = r->input.n_tokens,
                                    .queue_us = us, .prefill_us = us / 2, .transfer_us = us / 3, .sync_us = 1, .ttft_us = us, .tpot_us = us / 5, .completion_us = 2 * us };
        memcpy(o.run, r->run, sizeof o.run);
        memcpy(o.op, r->op, sizeof o.op);
        memcpy(o.policy, r->policy, sizeof o.policy);
        snprintf(o.mode, sizeof o.mode, "%s", pd_mode_names[r->chosen.mode]);
        for (int i = 0; i < 12; i++)    /* enough to judge by */
            if (pd_buf_add(&both, p, n, &e) || pd_outcome_encode(&o, &both, &e))
                abort();
        review(both.p, both.n, !(n & 1));
    }
    pd_buf_free(&both);
    pd_arena_free(&a);
    return 0;
}
