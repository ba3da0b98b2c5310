/* Text as a profile: what is accepted gives finite costs for its own rows and estimators that can be asked; what is refused says why and holds nothing. */
#include <math.h>
#include <stdlib.h>
#include "../../libcommon/route/profile.h"

static void asked(const struct pd_profile_class *c, enum pd_profile_term term, const struct pd_profile_fit *f)
{
    static const double edge[PD_BANDS - 1] = { 128, 512, 2048 };
    static struct pd_term t;
    double x[PD_FIT_MOST];
    pd_profile_x(c, term, f->row, x);
    if (!f->n || f->n > PD_PROFILE_ROWS || !isfinite(pd_profile_cost(f, x)))
        abort();
    if (f->n < 64) {
        pd_profile_teach(c, term, f, edge, 1, &t);
        struct pd_cost cost = pd_term_cost(&t, x, 1, 1);
        if (!(cost.p50 > 0) || !(cost.p95 >= cost.p50))
            abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    struct pd_profile pr;
    struct pd_err e = { 0 };
    int rc = pd_profile_parse((const char *)p, n, "p", &pr, &e);
    if (rc && (rc != PD_ECORRUPT || !e.msg[0] || pr.mem.head))
        abort();
    for (uint32_t i = 0; i < pr.n_classes; i++)
        for (int t = 0; t < PD_PT_TERMS; t++)
            if (pr.class_[i].fit[t].k)
                asked(&pr.class_[i], (enum pd_profile_term)t, &pr.class_[i].fit[t]);
    for (uint32_t i = 0; i < pr.n_paths; i++)
        asked(NULL, PD_PT_PACK, &pr.path[i].fit);
    if (!rc)
        pd_profile_free(&pr);
    return 0;
}
