/* Every allocation of what pd-bench reads and counts refused once (make V=fault): PD_ENOMEM, nothing held, never a crash, never a wrong figure. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>
#include "drill.h"
#include "../../libcommon/route/profile.h"
#include "../../libcommon/sim/score.h"
#include "../../libcommon/sim/workload.h"
#include "../../libcommon/wire/json.h"
#include "../../libcommon/wire/value.h"

#ifdef PD_FAULT
static const char log_text[] = "{\"timestamp\":1,\"input_length\":600,\"output_length\":5,\"hash_ids\":[1,2]}\n{\"timestamp\":2,\"input_length\":40,\"output_length\":5,\"hash_ids\":[1]}\n";
static const char csv_text[] = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,48,10\n2023-11-16 18:17:04,11,27\n";
static const char profile_text[] = "{\"pd\":\"profile\",\"v\":1,\"classes\":[{\"model\":\"m\",\"cpu\":\"avx2\",\"threads\":2,\"prefill\":{\"theta\":[1,2,3],\"rows\":[[1,2,3],[4,5,6]]}}],"
    "\"paths\":[{\"scheme\":\"shm\",\"theta\":[1,2],\"rows\":[[1,2]]}]}";

/* What was refused may hold nothing: 1 where it does. */
static int profile(struct pd_err *e)
{
    struct pd_profile p;
    int rc = pd_profile_parse(profile_text, sizeof profile_text - 1, "p", &p, e);
    if (rc)
        return p.mem.head ? 1 : rc;
    rc = p.n_classes == 1 && p.n_paths == 1 && p.class_[0].fit[PD_PT_PREFILL].n == 2 ? 0 : 1;
    pd_profile_free(&p);
    return rc;
}

/* Two logs; requests of the first, read as a log again, and counted as never answered. */
static int workload(struct pd_err *e)
{
    struct pd_reqlog l, again = { 0 };
    struct pd_traffic t = { .name = "f", .weight = 1, .isl.kind = PD_LENS_LOG, .osl.kind = PD_LENS_LOG, .prefix = PD_SHARE_LOG };
    struct pd_workload_opts o = { .count = 2, .arrive = PD_ARRIVE_LOG, .time_scale = 1, .length_scale = 1, .vocab_lo = 1, .vocab_hi = 9, .traffic = &t, .n_traffic = 1, .log = &l };
    struct pd_workload *w = NULL;
    struct pd_score *s = NULL;
    struct pd_arrival a;
    struct pd_buf b = { 0 }, text = { 0 };
    static struct pd_report r;
    int rc = pd_reqlog_parse(csv_text, sizeof csv_text - 1, "log", &l, e);
    if (rc)
        return l.row || l.block ? 1 : rc;
    pd_reqlog_free(&l);
    if ((rc = pd_reqlog_parse(log_text, sizeof log_text - 1, "log", &l, e)))
        return l.row || l.block ? 1 : rc;
    rc = pd_workload_new(&o, &w, e);
    while (rc == 0 && (rc = pd_workload_next(w, &a, e)) == 1)
        rc = pd_workload_request(w, &a, 0, &b, e);
    rc = rc ? rc : pd_reqlog_parse(b.p, b.n, "requests", &again, e);
    if (rc == 0 && (again.n != 2 || again.row[0].isl != 600 || again.block[0] != again.block[again.row[1].block]))
        rc = 1;
    rc = rc ? rc : pd_score_new(&(struct pd_score_opts){ .ttft_ms = 5 }, &s, e);
    for (size_t at = 0, n; rc == 0 && at < b.n && (n = pd_value_len(b.p + at, b.n - at)); at += n)
        rc = pd_score_request(s, &(struct pd_rec){ PD_K_REQUEST, b.p + at, n, 0 }, e);
    rc = rc ? rc : pd_score_report(s, &r, e);
    if (rc == 0 && r.missing != 2)
        rc = 1;
    rc = rc ? rc : pd_report_text(&r, &text, e);
    pd_report_free(&r);
    pd_buf_free(&text);
    pd_score_free(s);
    pd_reqlog_free(&again);
    pd_workload_free(w);
    pd_reqlog_free(&l);
    pd_buf_free(&b);
    return rc;
}

static int results(struct pd_err *e)
{
    static const char *const lines[] = {
        "{\"pd\":\"token\",\"v\":1,\"run\":\"01ARZ3NDEKTSV4RRFFQ69G5FA0\",\"choice\":0,\"pos\":0,\"token\":5,\"text\":\"x\",\"t_us\":7}",
        "{\"pd\":\"token\",\"v\":1,\"run\":\"01ARZ3NDEKTSV4RRFFQ69G5FA0\",\"choice\":0,\"pos\":1,\"token\":5,\"text\":\"x\",\"t_us\":9}",
        "{\"pd\":\"result\",\"v\":1,\"run\":\"01ARZ3NDEKTSV4RRFFQ69G5FA0\",\"id\":\"a\",\"choice\":0,\"text\":\"\",\"tokens\":[],\"transferred_tokens\":0,\"recomputed_tokens\":0,"
        "\"cached_tokens\":0,\"prompt_tokens\":4,\"completion_tokens\":2,\"finish_reason\":\"length\",\"mode\":\"local\",\"ttft_ms\":1.0,\"e2e_ms\":2.0,\"sched_us\":0,\"sent_us\":1,"
        "\"first_us\":3,\"done_us\":9,\"gaps_us\":[4],\"class\":\"c\"}" };
    static struct pd_report r;
    struct pd_score *s = NULL;
    struct pd_buf b = { 0 }, out = { 0 };
    int rc = pd_score_new(&(struct pd_score_opts){ .ttft_ms = 5 }, &s, e);
    for (size_t i = 0; rc == 0 && i < sizeof lines / sizeof *lines; i++) {
        b.n = 0;
        rc = pd_json_to_msgpack(lines[i], strlen(lines[i]), &b, e);
        rc = rc ? rc : pd_score_record(s, &(struct pd_rec){ pd_kind_of(b.p, b.n), b.p, b.n, 0 }, 5, e);
    }
    rc = rc ? rc : pd_score_report(s, &r, e);
    if (rc == 0 && (r.ended != 1 || r.figure[PD_FG_ITL].n != 1 || r.met != 1))
        rc = 1;
    rc = rc ? rc : pd_report_record(&r, &out, e);
    pd_report_free(&r);
    pd_score_free(s);
    pd_buf_free(&b);
    pd_buf_free(&out);
    return rc;
}

static void every_allocation_can_fail(void **state)
{
    assert_in_range(drill("malloc", profile, 8), 20, 20000);
    assert_in_range(drill("malloc", workload, 8), 40, 20000);
    assert_in_range(drill("malloc", results, 8), 30, 20000);
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
    const struct CMUnitTest tests[] = {
#ifdef PD_FAULT
        cmocka_unit_test(every_allocation_can_fail)
#else
        cmocka_unit_test(faults)
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
