#include "../base/log.h"
#include "../base/stop.h"
#include "show.h"

int pd_trace_cat(const struct pd_endpoint *in, const char *name, size_t max_record, struct pd_wstream *w, uint64_t *n_bad, struct pd_err *e)
{
    struct pd_rstream_opts o = { .max_record = max_record, .name = name };
    struct pd_rstream *s = NULL;
    struct pd_rec rec;
    bool bad = false;
    int rc = pd_rstream_of(in, &o, &s, e);
    while (!rc) {
        int got = pd_rstream_next(s, 0, &rec, &bad, e);
        if (got == 2) {                         /* nothing there: let what was read be seen before waiting */
            if ((rc = pd_wstream_flush(w, e)))
                break;
            got = pd_rstream_next(s, -1, &rec, &bad, e);
        }
        if (got == 0)
            break;
        if (got == 1)
            rc = pd_wstream_put(w, rec.p, rec.n, e);
        else if (got == 2)
            rc = pd_stop_level() ? pd_fail(e, PD_ECANCEL, "%s: interrupted", name) : 0;
        else if (bad) {
            pd_error("%s", e->msg);
            ++*n_bad;
        } else
            rc = got;
    }
    pd_rstream_free(s);
    return rc;
}

int pd_trace_merge(const char *const *paths, const struct pd_log_opts *o, struct pd_wstream *w, uint64_t *torn, struct pd_err *e)
{
    struct pd_log *l = NULL;
    struct pd_log_rec rec;
    int rc = pd_log_open(paths, o, &l, e);
    while (!rc && (rc = pd_log_next(l, &rec, e)) == 1)
        rc = pd_wstream_put(w, rec.p, rec.n, e);
    if (l && pd_log_stats(l).torn) {
        struct pd_log_stats st = pd_log_stats(l);
        pd_warn("%llu place%s where a record was torn: %llu bytes are lost", (unsigned long long)st.torn, st.torn == 1 ? "" : "s",
            (unsigned long long)st.torn_bytes);
        *torn += st.torn;
    }
    pd_log_free(l);
    return rc;
}
