/* Bytes as a log of requests: what is accepted is in order and in range, and can be replayed; what is refused says where and holds nothing. */
#include <stdlib.h>
#include "../../libcommon/sim/workload.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    struct pd_reqlog l;
    struct pd_err e = { 0 };
    int rc = pd_reqlog_parse(p, n, "log", &l, &e);
    if (rc && (rc == PD_EFAIL || rc == PD_EUSAGE || !e.msg[0] || l.row || l.block))
        abort();
    if (rc)
        return 0;
    pd_reqlog_spread(&l);
    for (size_t i = 0; i < l.n; i++) {
        const struct pd_reqlog_row *r = &l.row[i];
        if (!r->isl || !r->osl || r->isl > PD_REQLOG_TOKENS || r->osl > PD_REQLOG_TOKENS || r->at_us < 0 || (i && r->at_us < l.row[i - 1].at_us) ||
            r->block + r->n_blocks > l.n_blocks)
            abort();
    }
    struct pd_traffic t = { .name = "f", .weight = 1, .isl = { PD_LENS_LOG, 1, 1 }, .osl = { PD_LENS_LOG, 1, 1 }, .prefix = l.block_tokens ? PD_SHARE_LOG : PD_SHARE_COLD };
    struct pd_workload_opts o = { .count = 64, .arrive = l.timed ? PD_ARRIVE_LOG : PD_ARRIVE_POISSON, .rate = 1, .time_scale = 1, .length_scale = 0.1, .context = 300,
                                  .vocab_lo = 1, .vocab_hi = 9, .traffic = &t, .n_traffic = 1, .log = &l };
    struct pd_workload *w;
    struct pd_arrival a;
    int32_t ids[300];
    if (pd_workload_new(&o, &w, &e))
        abort();
    while ((rc = pd_workload_next(w, &a, &e)) == 1) {
        if (a.isl < 1 || a.osl < 1 || a.isl + a.osl > 300 || a.reusable > a.isl)
            abort();
        pd_workload_tokens(w, &a, ids);
    }
    if (rc && rc != PD_EUSAGE)
        abort();
    pd_workload_free(w);
    pd_reqlog_free(&l);
    return 0;
}
