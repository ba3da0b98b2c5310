#include "history.h"
#include "../base/id.h"
#include "../base/log.h"
#include "../trace/keyed.h"
#include "../wire/value.h"

/* A run whose end is to come. */
struct waiting { struct pd_node node; struct decision *last; };
struct decision { struct decision *before; size_t n; uint8_t op[16]; int64_t attempt; uint8_t raw[]; };

struct walk {
    struct pd_history *h;
    struct pd_keyed runs;
    struct pd_route_rec *r;
    struct pd_outcome_rec out;
};

bool pd_history_key(struct pd_bin raw, struct pd_str *run, struct pd_bin *op)
{
    struct pd_bin v;
    return pd_map_find(raw.p, raw.n, "run", &v) == 1 && pd_get_str(v, run) && pd_run_valid(run->p, run->n) && pd_map_find(raw.p, raw.n, "op", &v) == 1 &&
           pd_get_bin(v, op) && op->n == 16;
}

int pd_history_bad(struct pd_history *h, int rc, struct pd_err *e)
{
    if (!rc || rc == PD_ENOMEM)
        return rc;
    if (!h->sum.bad++)
        snprintf(h->sum.first_bad, sizeof h->sum.first_bad, "%.399s", e->msg);
    return 0;
}

static void let_go(struct pd_keyed *runs, struct waiting *w)
{
    pd_keyed_remove(runs, w);
    for (struct decision *d = w->last, *before; d; d = before) {
        before = d->before;
        pd_free(d);
    }
    pd_free(w);
}

static int keep(struct walk *w, struct pd_bin raw, struct pd_str run, struct pd_bin op, struct pd_err *e)
{
    struct waiting *at = pd_keyed_find(&w->runs, run.p, PD_RUN_LEN);
    struct pd_bin v;
    size_t size;
    if (!at) {
        if (!(at = pd_calloc(1, sizeof *at, "a run", e)))
            return PD_ENOMEM;
        int rc = pd_keyed_add(&w->runs, at, run.p, PD_RUN_LEN, e);
        if (rc) {
            pd_free(at);
            return rc;
        }
    }
    struct decision *d = pd_add_size(sizeof *d, raw.n, &size) ? pd_calloc(1, size, "a decision", e) : NULL;
    if (!d)
        return PD_ENOMEM;
    w->h->sum.again += at->last != NULL;
    d->before = at->last;
    d->n = raw.n;
    memcpy(d->op, op.p, sizeof d->op);
    if (pd_map_find(raw.p, raw.n, "attempt", &v) == 1)
        pd_get_int(v, &d->attempt);
    memcpy(d->raw, raw.p, raw.n);
    at->last = d;
    return 0;
}

static int decided(struct walk *w, struct pd_bin raw, struct pd_err *e)
{
    struct pd_str run;
    struct pd_bin op;
    int rc = w->h->decided ? w->h->decided(w->h->ctx, raw, e) : 0;
    w->h->sum.decisions++;
    if (rc || !w->h->ended)
        return rc;
    return pd_history_key(raw, &run, &op) ? keep(w, raw, run, op, e) : pd_history_bad(w->h, pd_fail(e, PD_ECORRUPT, "route: run or op is missing"), e);
}

static int ended(struct walk *w, struct pd_bin raw, struct pd_err *e)
{
    struct pd_arena a = { 0 };
    struct pd_history_sum *s = &w->h->sum;
    int rc = pd_outcome_decode(raw.p, raw.n, &a, &w->out, e);
    s->outcomes++;
    struct waiting *at = rc ? NULL : pd_keyed_find(&w->runs, w->out.run, PD_RUN_LEN);
    struct decision *d = at ? at->last : NULL;
    while (d && (memcmp(d->op, w->out.op, sizeof d->op) || d->attempt != w->out.attempt))
        d = d->before;
    if (!rc && !d)
        s->alone++;
    if (d && (rc = pd_route_decode(d->raw, d->n, &a, w->r, e)) == 0) {
        s->joined++;
        rc = w->h->ended(w->h->ctx, w->r, &w->out, e);
    } else
        rc = pd_history_bad(w->h, rc, e);
    if (at)
        let_go(&w->runs, at);
    pd_arena_free(&a);
    return rc;
}

int pd_history_walk(const struct pd_report_opts *o, struct pd_history *h, struct pd_log **log, struct pd_err *e)
{
    struct walk w = { .h = h };
    struct pd_log_rec rec;
    *log = NULL;
    if (!(w.r = pd_calloc(1, sizeof *w.r, "a route record", e)))
        return PD_ENOMEM;
    int rc = pd_log_open(o->paths, &o->log, log, e);
    while (!rc && (rc = pd_log_next(*log, &rec, e)) == 1) {
        struct pd_bin raw = { rec.p, rec.n };
        rc = rec.kind == PD_K_ROUTE ? decided(&w, raw, e) : rec.kind == PD_K_OUTCOME && h->ended ? ended(&w, raw, e) : 0;
    }
    h->sum.open = w.runs.n;
    while (w.runs.first)
        let_go(&w.runs, (struct waiting *)w.runs.first);
    pd_keyed_free(&w.runs);
    pd_free(w.r);
    return rc;
}

int pd_history_end(const struct pd_report_opts *o, const struct pd_history *h, const struct pd_log *log, int *status, struct pd_err *e)
{
    if (h->sum.bad) {
        pd_warn("%llu route or outcome record%s cannot be read, the first: %s", (unsigned long long)h->sum.bad, h->sum.bad == 1 ? "" : "s", h->sum.first_bad);
        if (o->strict && !*status)
            *status = 9;
    }
    int rc = pd_report_end(o, log, status, e);
    if (!rc && !h->sum.decisions)
        return pd_fail(e, PD_EFAIL, "there is no route record here: name the trace of a router (made by pd-route --trace FILE)");
    if (!rc && !h->decided && !h->sum.joined)
        return pd_fail(e, PD_EFAIL, "of %llu decision%s none has its outcome here: name the whole trace of the router that made %s", (unsigned long long)h->sum.decisions,
                       h->sum.decisions == 1 ? "" : "s", h->sum.decisions == 1 ? "it" : "them");
    return rc;
}
