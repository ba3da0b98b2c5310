/* What is done when the workers of a run fail it: another prefill worker, no KV, another decode worker, or the stream goes on elsewhere. */
#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../route/late.h"
#include "router_in.h"

static void remember(struct pd_rt_run *run, const struct pd_rt_worker *w)
{
    if (run->n_tried == PD_RT_TRIED)
        memmove(run->tried, run->tried + 1, sizeof *run->tried * (size_t)--run->n_tried);
    run->tried[run->n_tried++] = (struct pd_tried){ w->m, w->m->life };
}

/* Nothing has gone out: all of it is done again. */
static void start_over(struct pd_router *r, struct pd_rt_run *run)
{
    for (uint32_t i = 0; i < run->n; i++) {
        struct pd_rt_choice *c = &run->choice[i];
        c->sent = c->total = 0;
        c->done = c->no_text = false;
        c->tokens.n = c->text.n = c->logprobs.n = c->carry.n = 0;
    }
    run->n_done = 0;
    run->failed = run->cancelled = false;
    run->held.n = 0;
    run->t_first = 0;
    pd_rt_key_restart(r, run);
}

/* Its decode worker will not end it. */
void pd_rt_d_lost(struct pd_router *r, struct pd_rt_run *run, const char *why, bool counts)
{
    struct pd_rt_worker *w = run->d;
    struct pd_err e;
    if (run->cancelling) {
        pd_rt_release_p(run, run->cancel_cause);
        pd_rt_release_d(run);
        pd_rt_end_cancelled(r, run);
        return;
    }
    remember(run, w);
    run->failures += counts;
    if (!run->delivered && run->p)
        run->old_p = run->p;    /* what it computes or has is of use, if it is chosen again */
    if (run->delivered && run->p && run->p_done)       /* who goes on computes the prompt: KV that was published and not taken is held for nobody */
        pd_rt_send_cancel(run->p, run, "its decode worker is lost");
    pd_rt_release_p(run, run->delivered ? "its decode worker is lost" : NULL);
    pd_rt_release_d(run);
    pd_rt_learn_arrived(r, run);
    pd_rt_lent_went(r, run, PD_WENT_NOWHERE, NULL, pd_mono_us());
    if (!run->old_p)            /* else what that one has is still to be dropped by a successor, should we die */
        pd_rt_lent_over(r, run);
    if (run->delivered && run->n > 1 && !pd_rt_only_early(run))
        pd_fail(&e, PD_EFAIL, "%.300s; %u choices were streaming, and only a request with n = 1 can go on elsewhere", why, run->n);
    else if (run->delivered && run->migrations == PD_RT_MAX_MIGRATIONS)
        pd_fail(&e, PD_EFAIL, "%.300s; the run has been moved %d times already", why, PD_RT_MAX_MIGRATIONS);
    else if (!run->delivered && run->failures >= (uint32_t)r->o.attempts)
        pd_fail(&e, PD_EFAIL, "%.300s; it was the last of %d attempts", why, r->o.attempts);
    else {
        pd_warn("run %s: %s; %s", run->name, why, run->delivered ? "another worker goes on with it" : "it begins again elsewhere");
        if (run->delivered) {
            char text[360];
            run->migrations++;
            if (run->like < 0) {
                run->like = w->m->fp;
                pd_registry_hold_fp(&r->reg, run->like);
                snprintf(run->numerics, sizeof run->numerics, "%s", w->m->said.numerics.p ? w->m->said.numerics.p : "");
            }
            snprintf(text, sizeof text, "migrated: %.300s", why);
            pd_rt_set_text(&run->fallback, text);
            pd_metric_add(r->m_migrated, 1);
            for (uint32_t i = 0; i < run->n; i++)       /* what the first one brought is told before */
                if (run->choice[i].sent > run->choice[i].told) {
                    pd_rt_step_tokens(r, run, PD_ST_STREAMING, i, run->choice[i].told, run->choice[i].sent - run->choice[i].told, NULL);
                    run->choice[i].told = run->choice[i].sent;
                }
            pd_rt_step(r, run, PD_ST_MIGRATED, why);
        } else {
            start_over(r, run);
            pd_metric_add(r->m_retry[1], 1);
            pd_rt_step(r, run, PD_ST_RETRY, why);
        }
        pd_rt_enqueue(r, run);
        pd_rt_dispatch(r);
        return;
    }
    pd_rt_fail(r, run, &e);
}

/* Its decode worker, which waits for KV, is told what is to be done instead. */
static bool tell_d(struct pd_router *r, struct pd_rt_run *run)
{
    struct pd_routing x = pd_rt_routing(r, run);
    struct pd_err e;
    x.again = true;
    int rc = pd_rt_compose(r, run, &x, &e);
    if (rc == 0)
        pd_rt_send(r, run->d);
    x.again = false;            /* to a prefill worker it is new */
    if (rc == 0 && run->mode == PD_MODE_REMOTE && run->p && (rc = pd_rt_compose(r, run, &x, &e)) == 0)
        pd_rt_send(r, run->p);
    if (rc < 0)
        pd_rt_fail(r, run, &e);
    return rc == 0;
}

/* Its decode worker computes as much for others as it may: it drops the run, which waits for its turn there or elsewhere. */
static void leave_d(struct pd_router *r, struct pd_rt_run *run, const char *kind, const char *why)
{
    struct pd_rt_worker *w = run->d;
    pd_warn("run %s: %s; it waits until its prompt may be computed", run->name, why);
    pd_rt_send_cancel(w, run, "it is done elsewhere");
    run->fall.skip_of = w;      /* what it answers to that is about what was before */
    run->fall.skip += run->n - run->n_done;
    pd_rt_lent_went(r, run, PD_WENT_NOWHERE, NULL, pd_mono_us());
    pd_rt_lent_over(r, run);
    pd_rt_release_d(run);
    start_over(r, run);
    pd_rt_step(r, run, PD_ST_RETRY, why);
    pd_rt_falls_back(r, run, kind, why);
    pd_rt_enqueue(r, run);
    pd_rt_dispatch(r);
}

/* May its decode worker compute the prompt now? false: it has left it, and waits. A first token that is out stays where it came from: it is counted, not asked. */
static bool may_alone(struct pd_router *r, struct pd_rt_run *run, const char *kind, const char *why)
{
    int64_t now = pd_mono_us();
    if (run->delivered)
        pd_rt_fall_begin(r, run, run->d, now);
    else if (!pd_rt_fall_at(r, run, run->d, now)) {
        leave_d(r, run, kind, why);
        return false;
    }
    return true;
}

/* That it is computed where it is decoded is a decision too: for the record, and as what it was expected to take. */
static void note_alone(struct pd_router *r, struct pd_rt_run *run, int64_t now)
{
    pd_rt_hits(r, run, now);
    struct pd_need q = pd_rt_need_of(r, run, now);
    q.d = run->d->m;
    q.limit = NULL;             /* it was asked about already */
    pd_decide(&r->reg, &q, &r->decision);
    if (r->decision.outcome != PD_CHOSEN)       /* it drains, and computes it all the same */
        return;
    run->attempt++;
    pd_rt_learn_sent(r, run, now);
    pd_rt_note_route(r, run, "its decode worker computes the prompt", now);
}

/* Its decode worker computes the prompt. */
static void d_alone(struct pd_router *r, struct pd_rt_run *run, const char *kind, const char *why)
{
    struct pd_share was = run->d_share;
    if (!may_alone(r, run, kind, why))
        return;
    pd_warn("run %s: %s; %s computes its prompt", run->name, why, pd_rt_name_of(run->d));
    pd_rt_falls_back(r, run, kind, why);
    run->mode = PD_MODE_LOCAL;
    run->early = false;
    pd_metric_add(r->m_modes[PD_MODE_LOCAL], 1);
    run->d_share.prefill_tokens = run->need.prompt_tokens;
    run->d->m->own.prefill_tokens += run->d_share.prefill_tokens - was.prefill_tokens;
    note_alone(r, run, pd_mono_us());
    tell_d(r, run);
}

/* No KV will come from its prefill worker. another: a second one may be asked. */
void pd_rt_p_lost(struct pd_router *r, struct pd_rt_run *run, const char *kind, const char *why, bool another)
{
    int64_t now = pd_mono_us();
    remember(run, run->p);
    pd_rt_release_p(run, NULL);
    if (run->sign || run->cancelling || !run->d)        /* it does without already */
        return;
    if (another && run->p_tries < 2) {
        pd_rt_hits(r, run, now);
        struct pd_need q = pd_rt_need_of(r, run, now);
        q.d = run->d->m;
        pd_decide(&r->reg, &q, &r->decision);
        if (r->decision.outcome == PD_CHOSEN && r->decision.p) {        /* else D alone is the best of what is left */
            pd_warn("run %s: %s; %s computes its prompt", run->name, why, pd_member_name(r->decision.p));
            run->p = r->decision.p->user;
            run->p_done = false;
            run->p_tries++;
            run->attempt++;
            run->p_share = pd_share_of(&run->need, run->p->m, true, false);
            pd_member_take(run->p->m, run->p_share);
            pd_rt_lend(r, run, now);
            pd_rt_learn_sent(r, run, now);
            pd_metric_add(r->m_retry[0], 1);
            pd_rt_step(r, run, PD_ST_RETRY, why);
            pd_rt_step(r, run, PD_ST_ROUTE_SELECTED, NULL);
            pd_rt_note_route(r, run, "another prefill worker", now);
            tell_d(r, run);
            return;
        }
    }
    d_alone(r, run, kind, why);
}

/* Its decode worker computes the prompt unless it has the KV by now, which is known there alone. */
static void compute(struct pd_router *r, struct pd_rt_run *run, const char *kind, const char *why)
{
    enum pd_mode was = run->mode;
    char text[360];
    run->fall.unsure = true;
    run->fall.times++;
    snprintf(text, sizeof text, "%s: %.300s", kind, why);
    pd_rt_set_text(&run->fallback, text);
    run->mode = PD_MODE_LOCAL;
    if (!tell_d(r, run))
        return;
    run->mode = was;
    run->fallback.n = 0;
}

/* Its prefill worker is gone, or has failed, after it had published. Whether the KV is at its decode worker is known there alone: one that still waits is to
 * compute, one that does not passes this over. It counts as a fallback until its first token, when it is known; past their limit it begins again, KV or not. */
void pd_rt_p_lost_late(struct pd_router *r, struct pd_rt_run *run, const char *kind, const char *why)
{
    pd_member_give_back(run->p->m, run->p_share);
    run->p_share = (struct pd_share){ 0 };
    run->p = NULL;
    if (run->sign || run->n_done || run->cancelling || !run->d || run->told.late_attempt || !may_alone(r, run, kind, why))
        return;
    compute(r, run, kind, why);
}

/* Its KV is late: its decode worker computes the prompt, if that is over sooner than the rest of the way may be, and before anything went out. */
void pd_rt_kv_late(struct pd_router *r, struct pd_rt_run *run, int64_t now)
{
    struct pd_rt_told *t = &run->told;
    struct pd_route_late late = { .any = true, .since_us = now - t->published_us, .way = t->way };
    char why[160], text[200];
    t->late_us = 0;
    if (!run->p || !run->p_done || run->sign || run->n_done || run->delivered || run->cancelling || !run->d || run->fall.times)
        return;
    pd_rt_hits(r, run, now);
    struct pd_need q = pd_rt_need_of(r, run, now);
    q.local = true;
    q.d = run->d->m;
    q.late = &late;
    pd_decide(&r->reg, &q, &r->decision);
    enum pd_outcome got = r->decision.outcome;
    const struct pd_route_late *l = &r->decision.rec.late;
    int64_t until = got == PD_STAY ? pd_late_until(l) : -1;
    if (got != PD_CHOSEN || !pd_rt_fall_at(r, run, run->d, now)) {      /* it is looked again when it would be, and not all the time, as things change */
        t->late_us = t->published_us + (until > late.since_us + late.since_us / 4 ? until : late.since_us + late.since_us / 4 + 1);
        return;
    }
    snprintf(why, sizeof why, "its KV is on its way for %.1f ms, the rest may take %.1f (P95), computing it %.1f", (double)l->since_us / 1e3, (double)l->rest_us / 1e3,
             (double)l->local_us / 1e3);
    pd_warn("run %s: %s; %s computes its prompt", run->name, why, pd_rt_name_of(run->d));
    t->late_attempt = ++run->attempt;
    pd_metric_add(r->m_retry[2], 1);
    snprintf(text, sizeof text, "transfer_slow: %s", why);
    pd_rt_set_text(&run->fallback, text);
    pd_rt_note_route(r, run, why, now);
    compute(r, run, "transfer_slow", why);
}

void pd_rt_down(struct pd_router *r, struct pd_rt_worker *w, const struct pd_err *why)
{
    char text[400];
    bool outer = pd_rt_begin_walk(r), drains = w->draining || (!why && w->m->known && strcmp(w->m->said.state, "ready"));
    for (struct pd_node *p = r->runs.first, *next; p; p = next) {
        struct pd_rt_run *run = (struct pd_rt_run *)p;
        next = p->next;
        if (run->old_p == w) {
            run->old_p = NULL;
            if (!run->d)
                pd_rt_lent_over(r, run);
        }
        if (run->fall.skip_of == w)
            run->fall.skip = 0;
        if (run->d == w) {
            snprintf(text, sizeof text, "decode worker %.100s is gone (%.200s)", pd_rt_name_of(w), why ? why->msg : "it closed the connection");
            pd_rt_d_lost(r, run, text, !drains);
        } else if (run->p == w) {
            snprintf(text, sizeof text, "prefill worker %.100s is gone (%.200s)", pd_rt_name_of(w), why ? why->msg : "it closed the connection");
            run->p_done ? pd_rt_p_lost_late(r, run, "prefill_worker_gone", text) : pd_rt_p_lost(r, run, "prefill_worker_gone", text, true);
        }
    }
    pd_rt_end_walk(r, outer);
}
