#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "giver_in.h"

enum { REACH_US = 2000000 /* to reach a decode worker */, AGAIN_US = 20000, AGAIN_MOST_US = 500000,
       LOST_MOST = 4 /* connections that one KV may lose */, GRACE_US = 1000000 /* past timeouts_ms.transfer: the decode worker, who counts too, is to speak first */ };

/* ---- one hand-over ---- */

void pd_gv_ready(struct pd_gv_run *r)
{
    for (uint32_t l = 0; r->move && l < r->plan.layers; l++)
        for (uint32_t done = atomic_load(&r->done[l]); r->told[l] < done; r->told[l]++)
            pd_give_ready(r->move, r->told[l] * r->plan.layers + l, 1);
}

/* An earlier attempt at this run is still ending on that connection. */
static bool name_is_busy(const struct pd_giver *g, const struct pd_gv_run *r)
{
    for (struct pd_gv_run *o = pd_gv_next(g, NULL); o; o = pd_gv_next(g, o))
        if (o != r && o->move && o->link == r->peer->link && !strcmp(o->s.d.name, r->s.d.name))
            return true;
    return false;
}

void pd_gv_try(struct pd_giver *g, struct pd_gv_run *r)
{
    struct pd_err e;
    if (!r->leased || r->move || (r->settled && !r->away) || r->failed || r->no_d.code || !r->peer->open || atomic_load(&r->s.d.cancelled) || name_is_busy(g, r))
        return;
    struct pd_kvdesc d = pd_gv_desc(r);
    struct pd_give give = { .desc = &d, .blocks = r->blocks, .chunk_blocks = r->plan.chunk_blocks, .via = pd_link_via(r->peer->link, r->in_place) };
    memcpy(give.lease, r->lease, sizeof give.lease);
    if (!r->n_lost) {
        r->t_offer = pd_mono_us();
        r->had = r->plan.bytes;
        r->until = 0;
        r->sent = r->wire = 0;
        pd_gv_step(g, r, PD_ST_KV_TRANSFER_STARTED, 0, NULL, r->lease);
    }
    int rc = pd_give(pd_link_xfer(r->peer->link), &give, pd_mono_us(), &r->move, &e);
    if (rc < 0) {
        r->move = NULL;
        pd_gv_not_given(g, r, &e, "retry");
        return;
    }
    r->link = r->peer->link;
    pd_move_set(r->move, r);
    pd_metric_add(g->m_moves, 1);
    memset(r->told, 0, r->plan.layers * sizeof *r->told);
    pd_gv_ready(r);
    if (r->published)
        pd_gv_close(g, r);
    pd_link_soon(r->link);
}

/* Its last event. */
static void move_over(struct pd_giver *g, struct pd_gv_run *r, struct pd_link *k, const struct pd_xfer_event *ev)
{
    bool lost = !pd_xfer_open(pd_link_xfer(k)), moved_on = r->moved_on;
    struct pd_err why = ev->err;
    bool goes_on = lost && r->leased && (why.code == PD_ECANCEL || why.code == PD_ENOMEM) && !r->failed && !atomic_load(&r->s.d.cancelled) &&
                   r->n_lost < LOST_MOST && (!r->settled || r->in_place);
    r->move = NULL;
    r->link = NULL;
    r->moved_on = false;
    pd_metric_add(g->m_moves, -1);
    if (ev->kind == PD_XE_CANCELLED)
        pd_gv_step(g, r, PD_ST_CANCEL_ACKED, 0, ev->err.msg, r->lease);
    if (moved_on)
        pd_gv_try(g, r);
    else if (ev->kind == PD_XE_RELEASED || (r->settled && !goes_on))
        pd_gv_end_lease(g, r, "the decode worker has it");
    else if (goes_on) {         /* it is connected to anew, and what it has not got, or reads, is offered again */
        r->n_lost++;
        r->away = r->settled;
        r->sent += ev->bytes;
        r->wire += pd_give_wire(ev->move);
    } else if (lost) {
        pd_err_prefix(&why, "its KV did not reach the decode worker");
        pd_gv_not_given(g, r, &why, "retry");
    } else {
        if (!atomic_load(&r->s.d.cancelled) && (!r->kv_told || ev->kind == PD_XE_FAILED)) {
            pd_err_prefix(&why, "its KV is not wanted");
            pd_gv_not_given(g, r, &why, "recompute");
        }
        pd_gv_end_lease(g, r, "the decode worker does not want it");
    }
    struct pd_gv_run *heir = (struct pd_gv_run *)pd_desk_find(g->w->desk, r->s.d.name, PD_RUN_LEN);
    if (heir && heir != r)
        pd_gv_try(g, heir);
    pd_gv_settle(g, r);
}

void pd_gv_close(struct pd_giver *g, struct pd_gv_run *r)
{
    struct pd_kvdesc d = pd_gv_desc(r);
    struct pd_err e;
    if (pd_give_finish(r->move, &d, &e) < 0) {
        if (e.code != PD_ECANCEL)       /* else its last event is coming */
            pd_gv_not_given(g, r, &e, "retry");
        return;
    }
    pd_link_soon(r->peer->link);
    if (!r->kv_told)
        pd_gv_put_kv(g, r);
}

/* ---- decode workers ---- */

static bool waits(const struct pd_gv_run *r, const struct pd_gv_peer *p)
{
    return r->peer == p && !r->move && (!r->settled || r->away) && !r->failed && !r->no_d.code && !atomic_load(&r->s.d.cancelled) && !(r->published && !r->leased);
}

static void fail_waiting(struct pd_gv_peer *p, const struct pd_err *why)
{
    for (struct pd_gv_run *r = pd_gv_next(p->g, NULL), *next; r; r = next) {
        next = pd_gv_next(p->g, r);
        if (waits(r, p))
            pd_gv_not_given(p->g, r, why, "retry");
    }
}

void pd_gv_peer_drop(struct pd_gv_peer *p)
{
    if (p->n_runs || p->link)
        return;
    struct pd_gv_peer **q = &p->g->peers;
    while (*q != p)
        q = &(*q)->next;
    *q = p->next;
    pd_timer_free(p->again);
    pd_free(p);
}

static bool anyone_waits(const struct pd_gv_peer *p)
{
    for (struct pd_gv_run *r = pd_gv_next(p->g, NULL); r; r = pd_gv_next(p->g, r))
        if (waits(r, p))
            return true;
    return false;
}

/* It did not work out, for now. */
static void failed_to_reach(struct pd_gv_peer *p, const struct pd_err *why)
{
    int64_t now = pd_mono_us();
    struct pd_err e = *why;
    if (!p->failing_since) {
        p->failing_since = now;
        p->again_us = AGAIN_US;
    }
    bool final = why->code == PD_EINCOMPAT || why->code == PD_ECORRUPT || now - p->failing_since >= REACH_US;
    if (!final && anyone_waits(p) && !pd_timer_in(p->again, p->again_us, &e)) {
        p->again_us = p->again_us * 2 < AGAIN_MOST_US ? p->again_us * 2 : AGAIN_MOST_US;
        return;
    }
    p->failing_since = 0;
    struct pd_err told = { .code = why->code == PD_ECANCEL ? PD_ENOWORKER : why->code };
    snprintf(told.msg, sizeof told.msg, "the decode worker at %.120s cannot be given its KV: %.300s", p->at, e.msg);
    p->n_runs++;                /* whatever ends with this */
    fail_waiting(p, &told);
    p->n_runs--;
    if (why->code != PD_EINCOMPAT && why->code != PD_ECORRUPT && anyone_waits(p) && !pd_timer_in(p->again, AGAIN_MOST_US, &e))
        return;                 /* for what it reads in place, as long as that is leased */
    pd_gv_peer_drop(p);
}

void pd_gv_reach(struct pd_gv_peer *p)
{
    struct pd_err e;
    if (p->link)
        return;
    pd_timer_stop(p->again);
    if (pd_links_dial(&p->g->links, p->at, p, &p->link, &e) < 0) {
        p->link = NULL;
        failed_to_reach(p, &e);
    }
}

static void on_again(void *ctx) { pd_gv_reach(ctx); }

int pd_gv_peer_of(struct pd_giver *g, struct pd_str at, struct pd_gv_peer **out, struct pd_err *e)
{
    if (at.n <= 5 || (memcmp(at.p, "unix:", 5) && memcmp(at.p, "tcp:", 4)) || at.n >= sizeof ((struct pd_gv_peer *)0)->at)
        return pd_fail(e, PD_EFAIL, "route: d is at '%.*s', where KV cannot be given (an address is unix:PATH or tcp:HOST:PORT)", (int)(at.n < 60 ? at.n : 60),
                       at.p);
    for (struct pd_gv_peer *p = g->peers; p; p = p->next)
        if (pd_str_eq(at, p->at)) {
            *out = p;
            return 0;
        }
    struct pd_gv_peer *p = pd_calloc(1, sizeof *p, "a decode worker", e);
    if (!p)
        return PD_ENOMEM;
    p->g = g;
    memcpy(p->at, at.p, at.n);
    int rc = pd_timer_new(pd_daemon_loop(g->w->d), on_again, p, &p->again, e);
    if (rc < 0) {
        pd_free(p);
        return rc;
    }
    p->next = g->peers;
    g->peers = p;
    *out = p;
    return 0;
}

static void for_all_of(struct pd_gv_peer *p, void (*fn)(struct pd_giver *, struct pd_gv_run *))
{
    for (struct pd_gv_run *r = pd_gv_next(p->g, NULL), *next; r; r = next) {
        next = pd_gv_next(p->g, r);
        if (r->peer == p)
            fn(p->g, r);
    }
}

/* What its way to the decode worker took. Exposed: after the last of it was computed, which is what computing did not hide. */
static void given(struct pd_giver *g, const struct pd_gv_run *r, const struct pd_xfer_event *ev)
{
    int64_t now = pd_mono_us(), final = atomic_load(&r->t_final), from = final > r->t_offer ? final : r->t_offer;
    uint64_t sent = r->sent + ev->bytes, came = r->plan.bytes - r->had;
    const struct pd_step s = { .run = r->s.d.name, .where = "remote", .gen = r->desc.gen, .op = r->s.d.route.op, .lease = r->lease };
    const struct pd_figure f[] = {
        { "offered_bytes", (int64_t)r->plan.bytes }, { "skipped_bytes", (int64_t)r->had }, { "sent_bytes", (int64_t)sent },
        { "wire_bytes", (int64_t)(r->wire + pd_give_wire(ev->move)) }, { "complete_us", now - r->t_offer }, { "exposed_us", now - from }, { "retries", r->n_lost }, { "whole", 1 } };
    const char *scheme = pd_move_scheme(ev->move);
    pd_metric_add(g->m_given[pd_transport_number(scheme)], 1);
    pd_metric_add(g->m_given_bytes, (int64_t)came);
    pd_metric_add(g->m_skipped, (int64_t)r->had);
    pd_metric_observe(g->m_exposed, now - from);
    pd_trace_figures(g->w->o.trace, &s, PD_ST_KV_MOVED, sent, scheme, f, sizeof f / sizeof *f);
}

void pd_gv_on_link(void *ctx, struct pd_link *k, const struct pd_xfer_event *ev)
{
    struct pd_giver *g = ctx;
    struct pd_gv_peer *p = pd_link_get(k);
    struct pd_gv_run *r = ev->move ? pd_move_get(ev->move) : NULL;
    if (ev->move && !r)         /* of an attempt that was given up */
        return;
    switch (ev->kind) {
    case PD_XE_READY:
        if (ev->err.code)
            pd_warn("%s: %s: output may differ in the last bits", p->at, ev->err.msg);
        pd_info("%s: connected, by %s", p->at, pd_xfer_via(pd_link_xfer(k)));
        p->open = true;
        p->failing_since = 0;
        for_all_of(p, pd_gv_try);
        break;
    case PD_XE_ACCEPTED:
        r->in_place = pd_give_in_place(ev->move, &r->reader, &r->reader_start);
        if (r->transfer_us && !r->until)
            r->until = pd_mono_us() + r->transfer_us + GRACE_US;
        pd_give_until(ev->move, r->until);      /* its peer may say nothing any more, with its connection standing */
        if (r->plan.bytes - ev->bytes < r->had)         /* after a lost connection it has what came by that, too */
            r->had = r->plan.bytes - ev->bytes;
        break;
    case PD_XE_VERIFIED:
        if (!r->taken)
            given(g, r, ev);
        r->taken = true;
        r->settled = !r->moved_on;
        r->away = false;
        r->n_lost = r->n_lost > 0;
        break;
    case PD_XE_RELEASED: case PD_XE_FAILED: case PD_XE_CANCELLED:
        move_over(g, r, k, ev);
        break;
    case PD_XE_CLOSED:
        p->link = NULL;
        p->open = false;
        if (anyone_waits(p))
            failed_to_reach(p, &ev->err);
        else
            pd_gv_peer_drop(p);
        break;
    default:
        break;
    }
}
