/* A receiver that takes KV by the transfer protocol: asked, given to, lost and found again. */
#include <stdio.h>
#include "../base/log.h"
#include "sender_in.h"

enum { AGAIN_US = 20000, AGAIN_MAX_US = 250000, RENEW_US = 5000000, ROW_MAX = 8 /* drops in a row without a run that arrives */,
       MOVES_MAX = PD_XFER_MOVES / 2 /* under way: the peer, which reads SEND_TURN records in one go, may still hold as many that are over */ };

/* ---- the question ---- */

int send_give_xfer(struct send_dst *d, struct pd_err *e)
{
    struct send *s = d->s;
    struct pd_xfer_opts o = { .giving = true, .relay = true, .codec = s->o.coded ? s->o.codec : PD_CODEC_NONE,
        .via = d->via,
        .worker = d->name, .epoch = d->epoch,
        .fp_fields = { d->fp.p, d->fp.n }, .pool = d->st->pool, .leases = d->leases, .accept_us = SEND_PATIENT_US, .stall_us = SEND_PATIENT_US };
    d->c.heard = d->c.pinged = s->now;
    d->c.raw_dead = false;
    return pd_chan_xfer(&d->c, &o, s->o.net, s->now, e);
}

/* The question is taken back by a second hello, which says "plain" and nothing that counts besides: a peer that comes to read the first one late goes back to
 * plain records with it, and one that knows no hello skips both. What was not written of the first one goes before it. */
static int take_back(struct send_dst *d, struct pd_err *e)
{
    struct pd_str plain = { "plain", 5 };
    struct pd_hello h = *pd_xfer_own(d->c.x);
    size_t wrote = pd_xfer_counts(d->c.x).bytes_out;
    struct pd_buf b = { 0 };
    if (!wrote)
        return 0;
    int rc = pd_hello_encode(&h, &b, e);
    rc = rc || wrote >= b.n ? rc : pd_buf_add(pd_out_buf(&d->out), b.p + wrote, b.n - wrote, e);
    h.caps = &plain;
    h.n_caps = 1;
    rc = rc ? rc : pd_hello_encode(&h, pd_out_buf(&d->out), e);
    pd_buf_free(&b);
    return rc;
}

static void to_plain(struct send_dst *d)
{
    struct pd_err e;
    if (take_back(d, &e))
        send_fatal(d->s, &e);
    pd_xfer_free(d->c.x);
    d->c.x = NULL;
    pd_leases_free(d->leases);
    d->leases = NULL;
    d->may_ask = false;
    d->s->degraded = true;
    d->state = SD_PLAIN;
    for (const struct send_kept *k = d->kept; k; k = k->next)
        send_dst_put(d, k->rec, k->n);
    send_dst_acked(d, UINT64_MAX);
}

static void lease_told(void *ctx, enum pd_lease_step step, const struct pd_lease_info *l)
{
    struct send_dst *d = ctx;
    for (struct send_run *r = d->s->runs; step == PD_LEASE_STEP_RELEASED && r; r = r->next)
        for (uint32_t i = 0; i < r->n_out; i++)
            if (r->out[i].d == d && r->out[i].leased && !memcmp(r->out[i].lease, l->id, sizeof l->id))
                r->out[i].released = true;
}

/* "Do you speak the transfer protocol?" What it is about is known by now: the first KV. It is said when what was put before it has gone. */
void send_give_ask(struct send_dst *d, const struct send_run *r)
{
    struct pd_leases_opts lo = { .pool = r->st->pool, .told = lease_told, .ctx = d };
    struct pd_err e;
    d->st = r->st;
    d->epoch = r->desc.epoch;
    int rc = pd_buf_add(&d->fp, r->desc.fp_fields.p, r->desc.fp_fields.n, &e);
    rc = rc ? rc : pd_leases_new(&lo, &d->leases, &e);
    if (rc)
        send_fatal(d->s, &e);
    else
        d->state = SD_ASKING;
}

/* ---- runs, giving ---- */

static void kv_alone(struct send_out *o)
{
    struct send_run *r = o->r;
    send_out_desc(o, &r->kv);
    o->state = SO_DONE;
}

static int give(struct send_out *o, struct pd_err *e)
{
    struct send_dst *d = o->d;
    struct send_run *r = o->r;
    int rc = 0;
    if (r->desc.epoch != d->epoch || r->st != d->st || r->desc.fp_fields.n != d->fp.n || memcmp(r->desc.fp_fields.p, d->fp.p, d->fp.n))
        return pd_fail(e, PD_EINCOMPAT, "%s takes the KV of one model over a connection, and this is another one's: it goes without its KV", d->spec);
    if (!o->leased || !pd_lease_info(d->leases, o->lease, &(struct pd_lease_info){ 0 })) {      /* it may have lapsed while we were stopped */
        rc = pd_lease_grant(d->leases, r->desc.run, r->desc.gen, send_run_blocks(r), r->plan.n_blocks, 0, d->s->now, o->lease, e);
        o->leased = !rc;
        rc = rc ? rc : pd_lease_fill(d->leases, o->lease, e);
    }
    struct pd_give g = { .desc = &r->desc, .blocks = send_run_blocks(r), .chunk_blocks = o->plan.chunk_blocks, .via = pd_chan_via(&d->c) };
    memcpy(g.lease, o->lease, sizeof g.lease);
    if (rc || (rc = pd_give(d->c.x, &g, d->s->now, &o->m, e)))
        return rc;
    pd_move_set(o->m, o);
    snprintf(o->scheme, sizeof o->scheme, "%s", pd_move_scheme(o->m));
    o->at = 0;
    o->finished = false;
    o->tries++;
    if (!o->offered_us)
        o->offered_us = d->s->now;
    return 0;
}

void send_give_unlease(struct send_out *o, const char *cause)
{
    if (o->leased)
        pd_lease_revoke(o->d->leases, o->lease, cause, o->d->s->now, NULL);
    o->leased = false;
}

/* It goes without its KV: the peer would not have it, or cannot. */
static void give_up(struct send_out *o, const struct pd_err *why)
{
    send_bad(o->d->s, o->r->desc.run, why);
    send_give_unlease(o, "given up");
    o->released = false;
    o->tries = UINT32_MAX;      /* waits for the kv record alone */
}

bool send_give_pump(struct send_out *o)
{
    struct send_dst *d = o->d;
    struct send_run *r = o->r;
    struct pd_err e = { 0 };
    bool moved = false;
    if (o->tries == UINT32_MAX) {
        if (r->state != SR_CLOSED || o->m || !send_dst_room(d))
            return false;
        kv_alone(o);
        return true;
    }
    if (!o->m) {
        if (o->released) {      /* over the connection before */
            o->state = SO_DONE;
            return true;
        }
        if (d->state != SD_GIVING || pd_xfer_counts(d->c.x).moves >= MOVES_MAX || pd_chan_raw_awaited(&d->c, d->s->now))
            return false;
        if (give(o, &e)) {
            give_up(o, &e);
            return true;
        }
        moved = true;
    }
    uint32_t from = o->at;
    while (o->at < o->plan.n_chunks && send_run_has(r, o, o->at))
        o->at++;
    if (o->at > from) {
        pd_give_ready(o->m, from, o->at - from);
        if (!o->first_us)
            o->first_us = d->s->now;
        moved = true;
    }
    if (r->state == SR_CLOSED && !o->finished && o->at == o->plan.n_chunks) {
        o->finished = moved = true;
        if (pd_give_finish(o->m, &r->kv, &e) && e.code == PD_ENOMEM)
            send_fatal(d->s, &e);
    }
    return moved;
}

static void on_event(struct send_dst *d, const struct pd_xfer_event *ev)
{
    struct send_out *o = ev->move ? pd_move_get(ev->move) : NULL;
    struct send *s = d->s;
    struct pd_err e = ev->err;
    switch (ev->kind) {
    case PD_XE_READY:
        d->state = SD_GIVING;
        d->pause = 0;
        d->relay = pd_hello_can(pd_xfer_peer(d->c.x), "relay");
        pd_info("%s: KV goes by %s", d->spec, pd_xfer_via(d->c.x));
        for (const struct send_kept *k = d->kept; k && d->relay; k = k->next)
            send_dst_say(d, k);
        if (!d->relay) {                /* what was kept for it while it was away it would not hear */
            for (const struct send_kept *k = d->kept; k; k = k->next)
                d->lost += !k->end;
            send_dst_acked(d, UINT64_MAX);
        }
        return;
    case PD_XE_ACCEPTED:
        o->sent += ev->bytes;           /* of a second try: what the first one did not bring */
        o->skipped = o->plan.bytes - ev->bytes;
        if (!o->accepted_us)
            o->accepted_us = s->now;
        return;
    case PD_XE_VERIFIED:
        o->verified_us = s->now;
        return;
    case PD_XE_RELEASED: case PD_XE_FAILED: case PD_XE_CANCELLED:
        o->m = NULL;
        o->wire += pd_give_wire(ev->move);
        if (ev->kind == PD_XE_RELEASED || o->released) {
            o->leased = false;
            o->released = true;
            o->state = SO_DONE;
            d->drops_row = 0;
        } else if (o->state == SO_GOING && pd_xfer_open(d->c.x))
            give_up(o, &e);     /* a connection that is lost leaves it to the next one */
        return;
    default:
        return;
    }
}

/* ---- a connection that is gone ---- */

/* Of one that never came to be nothing is counted but the time: whoever accepts and hangs up (a forwarder whose own peer is away) is dialled ever more seldom. */
static void down(struct send_dst *d, const char *why)
{
    struct send *s = d->s;
    struct pd_xfer_event ev;
    struct pd_err e;
    bool again = pd_ep_dials(d->spec) || d->l, was = d->state == SD_GIVING;
    pd_xfer_lost(d->c.x, why, s->now);
    while (pd_xfer_event(d->c.x, &ev))
        on_event(d, &ev);
    d->drops += was;
    s->degraded = true;
    if (!again || (was && ++d->drops_row > ROW_MAX)) {
        pd_fail(&e, PD_ECANCEL, "%s: the connection was lost%s: %s", d->spec, again ? " time and again" : "", why);
        send_fatal(s, &e);
        return;
    }
    snprintf(d->why, sizeof d->why, "%s", why);
    if (was)
        pd_warn("%s: the connection was lost (%s); trying to go on for %lld ms", d->spec, why, (long long)(s->o.resume_us / 1000));
    pd_chan_close(&d->c);
    pd_endpoint_abort(&d->ep);
    d->c.giving = true;
    d->state = SD_DOWN;
    d->until = was ? s->now + s->o.resume_us : d->until;
    d->pause = was ? 0 : d->pause ? d->pause < AGAIN_MAX_US / 2 ? 2 * d->pause : AGAIN_MAX_US : AGAIN_US;
    d->again = s->now + d->pause;
}

bool send_give_redial(struct send_dst *d)
{
    struct send *s = d->s;
    struct pd_err e = { 0 };
    if (d->c.x)
        return false;           /* it was dialled: hello is on its way */
    if (s->now >= d->until) {
        pd_fail(&e, PD_ETIME, "%s: the connection was lost, and there was no other within %lld ms (see --resume); the last one: %s", d->spec,
                (long long)(s->o.resume_us / 1000), d->why);
        send_fatal(s, &e);
        return true;
    }
    if (d->l || s->now < d->again)
        return false;
    d->again = s->now + AGAIN_US;
    if (!d->dial && pd_redial_new(d->spec, true, s->o.net, &d->dial, &e))
        return false;
    if (pd_redial_done(&d->dial, &d->ep, &e))
        return false;
    pd_chan_of(&d->c, &d->ep, d->spec);
    if (pd_chan_reader(&d->c, d->spec, s->o.max_record + 64, &e) || send_give_xfer(d, &e))
        send_fatal(s, &e);
    return true;
}

/* ---- its turn ---- */

bool send_give_work(struct send_dst *d)
{
    struct send *s = d->s;
    struct pd_xfer_event ev;
    struct pd_err e = { 0 };
    uint64_t before = pd_xfer_counts(d->c.x).bytes_out;
    bool moved = false;
    pd_xfer_tick(d->c.x, s->now);
    pd_chan_raw(&d->c, s->now);
    while (pd_xfer_event(d->c.x, &ev)) {
        moved = true;
        if (ev.kind != PD_XE_CLOSED) {
            on_event(d, &ev);
            continue;
        }
        if (d->state == SD_ASKING && ev.err.code == PD_ETIME) {
            pd_warn("%s: the peer does not answer the hello of the transfer protocol; KV goes in a plain stream", d->spec);
            to_plain(d);
        } else if (d->state == SD_ASKING) {
            pd_err_prefix(&ev.err, "%s", d->spec);
            send_fatal(s, &ev.err);
        } else
            down(d, ev.err.msg);
        return true;
    }
    if (pd_chan_flush(&d->c, s->now, &e) < 0 || d->c.eof) {
        if (d->state == SD_ASKING) {
            pd_fail(&e, PD_ECANCEL, "%s: the reader went away", d->spec);
            send_fatal(s, &e);
        } else if (d->end_sent && !d->kept)
            d->state = SD_OVER; /* it had all, and closed first */
        else
            down(d, e.code ? e.msg : "the peer closed it");
        return true;
    }
    moved |= pd_xfer_counts(d->c.x).bytes_out != before;
    if (d->state == SD_GIVING && !pd_chan_alive(&d->c, SEND_SILENCE_US, s->now)) {
        down(d, "the peer says nothing any more");
        return true;
    }
    return moved;
}

/* Without a connection too: what the next one goes on with lies under them. */
void send_give_renew(struct send_dst *d)
{
    struct send *s = d->s;
    if (!d->leases || s->now < d->renew_at)
        return;
    d->renew_at = s->now + RENEW_US;
    for (struct send_run *r = s->runs; r; r = r->next)
        for (uint32_t i = 0; i < r->n_out; i++)
            if (r->out[i].d == d && r->out[i].leased)
                pd_lease_renew(d->leases, r->out[i].lease, r->desc.gen, 0, s->now, NULL);
    pd_leases_sweep(d->leases, s->now);
}
