#include "../wire/value.h"
#include "dispatch.h"

struct pd_str pd_rec_kind(const struct pd_rec *rec)
{
    struct pd_bin v;
    struct pd_str s;
    return pd_map_find(rec->p, rec->n, "pd", &v) == 1 && pd_get_str(v, &s) ? s : (struct pd_str){ "request", 7 };
}

static void first_record(void *ctx, struct pd_conn *c, const struct pd_rec *rec)
{
    const struct pd_dispatch *d = ctx;
    const struct pd_entry *other = NULL, *found = NULL;
    struct pd_str kind = pd_rec_kind(rec);
    struct pd_err e;
    for (int i = 0; i < d->n && !found; i++)
        if (!d->entry[i].kind)
            other = &d->entry[i];
        else if (pd_str_eq(kind, d->entry[i].kind))
            found = &d->entry[i];
    found = found ? found : other;
    pd_conn_exact(c, false);
    if (!found) {
        pd_fail(&e, PD_EFAIL, "a connection that begins with a record of kind '%.*s' is not served here", (int)(kind.n < 40 ? kind.n : 40), kind.p);
        pd_conn_refuse(c, &e);
    } else if (d->draining && !found->draining) {
        pd_fail(&e, PD_ENOWORKER, "this process drains and takes no new work; use another");
        pd_conn_put_error(c, NULL, &e, "reroute");
        pd_conn_finish(c);
    } else {
        pd_conn_handle(c, found->cb, found->ctx);
        if (pd_conn_open(c) && found->cb->record)
            found->cb->record(found->ctx, c, rec);
    }
}

/* Nothing has come that could be lost: what has not said what it wants by now is not waited for. */
static void drain(void *ctx, struct pd_conn *c)
{
    (void)ctx;
    pd_conn_end_input(c);
}

const struct pd_conn_cb pd_dispatch_cb = { .record = first_record, .drain = drain };
