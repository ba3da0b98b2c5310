/* Bytes as what a load was answered with, and as its requests: whatever is taken makes a report whose parts add up and that can be written both ways. */
#include <math.h>
#include <stdlib.h>
#include "../../libcommon/sim/score.h"
#include "../../libcommon/wire/frame.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    static struct pd_report r;
    struct pd_score *s;
    struct pd_err e = { 0 };
    struct pd_buf b = { 0 };
    size_t at = 0, len;
    int64_t t = 0;
    if (pd_score_new(&(struct pd_score_opts){ .ttft_ms = 100, .live = n & 1 }, &s, &e))
        abort();
    for (struct pd_frame_scan scan = { 0 }; at < n && pd_frame_next(&scan, p + at, n - at, 1 << 20, &len, &e) == 1 && !pd_frame_check(p + at, len, &e);
         at += len, scan = (struct pd_frame_scan){ 0 }) {
        struct pd_rec rec = { pd_kind_of(p + at, len), p + at, len, at };
        int rc = rec.kind == PD_K_REQUEST ? pd_score_request(s, &rec, &e) : pd_score_record(s, &rec, t += 1000, &e);
        if (rc && !e.msg[0])
            abort();
    }
    if (pd_score_report(s, &r, &e))
        abort();
    if (r.n != r.ended + r.failed + r.missing || r.met > r.with_slo || r.with_slo > r.n)
        abort();
    if (pd_report_text(&r, &b, &e) || !b.n)
        abort();
    b.n = 0;
    int rc = pd_report_record(&r, &b, &e);
    size_t whole = 0;
    struct pd_frame_scan scan = { 0 };
    if (rc ? rc != PD_EFAIL : pd_frame_next(&scan, b.p, b.n, 1 << 20, &whole, &e) != 1 || whole != b.n)
        abort();
    pd_buf_free(&b);
    pd_report_free(&r);
    pd_score_free(s);
    return 0;
}
