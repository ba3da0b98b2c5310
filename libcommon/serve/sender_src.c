#include <stdio.h>
#include <unistd.h>
#include "../base/log.h"
#include "../wire/frame.h"
#include "sender_in.h"

enum { WORK = 1 << 20 /* payload in mapped memory that is verified in one go */, AGAIN_US = 20000, MAX_OPEN = 1024 /* runs on their way */ };

/* ---- opening ---- */

struct send_src *send_src_new(struct send *s, struct pd_chan *c, struct pd_err *e)
{
    struct send_src *n = pd_calloc(1, sizeof *n, "a sender", e), **at = &s->srcs;
    if (!n)
        return NULL;
    n->s = s;
    n->number = ++s->n_srcs;
    n->c = *c;
    pd_chan_init(c);
    n->ep.fd = -1;
    n->carried_end = &n->carried;
    while (*at)
        at = &(*at)->next;
    *at = n;
    return n;
}

int send_src_open(struct send *s, const char *spec, struct pd_err *e)
{
    struct pd_endpoint ep = { .fd = -1 };
    struct pd_dump_r *dump = NULL;
    struct pd_chan c;
    int rc;
    pd_chan_init(&c);
    if (pd_endpoint_is_h5(spec) || (pd_ep_kind_of(spec, NULL) == PD_EP_PATH && pd_dump_is(spec))) {
        if ((rc = pd_dump_serve(spec, &dump, &c.fd, e)))
            return rc;
        c.own = true;
    } else {
        if ((rc = pd_endpoint_open_in(spec, s->o.net, &ep, e)))
            return rc;
        pd_chan_of(&c, &ep, spec);
    }
    struct send_src *n = (rc = pd_chan_reader(&c, spec, s->o.max_record, e)) ? NULL : send_src_new(s, &c, e);
    if (!n) {
        pd_chan_close(&c);
        pd_endpoint_abort(&ep);
        if (dump)
            pd_dump_read_end(dump, NULL);
        return e->code;
    }
    n->ep = ep;
    n->dump = dump;
    n->dialled = pd_ep_dials(spec);
    return 0;
}

/* ---- a plain stream ---- */

/* One line a run, not one a chunk; -k counts them alone. */
static void stray(struct send_src *c, const char *run, const struct pd_err *e)
{
    c->dropped++;
    if (c->s->o.keep_going || (run[0] && !strcmp(c->told_run, run)))
        return;
    snprintf(c->told_run, sizeof c->told_run, "%s", run);
    send_bad(c->s, NULL, e);
}

static void plain_offer(struct send_src *c, const struct pd_rec *rec)
{
    struct pd_err e;
    struct send *s = c->s;
    uint32_t open = 0;
    for (const struct send_run *o = s->runs; o; o = o->next)
        open += o->src == c && o->state != SR_CLOSED && !(o->state == SR_SPOILT && o->kv_came);
    if (open >= MAX_OPEN) {
        pd_fail(&e, PD_ENOMEM, "an offer is refused: %d runs of its sender are on their way already, and none of them ends", MAX_OPEN);
        if (strcmp(c->told_run, "offers"))      /* a run's KV, not a stray chunk: told with -k too */
            send_bad(s, NULL, &e);
        snprintf(c->told_run, sizeof c->told_run, "offers");
        return;
    }
    struct send_run *r = send_run_new(c, rec->p, rec->n, &e), *twin;
    if (!r) {
        if (e.code == PD_ENOMEM)
            send_fatal(s, &e);
        else
            send_bad(s, NULL, &e);      /* its kv record, which has all that a recompute needs, may be better */
        return;
    }
    if ((twin = send_run_find(s, r->desc.run, r->desc.gen)) != r) {
        pd_fail(&e, PD_ECORRUPT, "run %s: its offer came twice; the second is dropped", r->desc.run);
        stray(c, r->desc.run, &e);
        r->state = SR_SPOILT;
        r->kv_came = true;
        for (uint32_t i = 0; i < r->n_out; i++)
            r->out[i].state = SO_DONE;
    } else if (!r->desc.payload.scheme[0]) {
        send_put(s, rec->p, rec->n);    /* nothing to be moved: what closes it goes by itself */
        r->state = SR_CLOSED;
        for (uint32_t i = 0; i < r->n_out; i++)
            r->out[i].state = SO_DONE;
    } else
        c->waits = r;
}

static struct send_run *run_of(struct send_src *c, const char *run, const uint8_t *gen)
{
    struct send_run *r = send_run_find(c->s, run, gen);
    return r && r->src == c && r->state != SR_CLOSED ? r : NULL;
}

static void plain_chunk(struct send_src *c, const struct pd_rec *rec)
{
    struct pd_err e;
    struct pd_chunk k;
    int rc = pd_chunk_decode(rec->p, rec->n, &k, &e);
    struct send_run *r = rc ? NULL : run_of(c, k.run, k.gen);
    if (!r && !rc)
        r = run_of(c, k.run, NULL);     /* of another generation: it says so itself */
    if (!r) {
        if (!rc)
            pd_fail(&e, PD_ECORRUPT, "chunk %u of run %s, which is not being received; dropped", k.index, k.run);
        stray(c, rc ? "" : k.run, &e);
        return;
    }
    if (r->state == SR_SPOILT)
        return;
    if (pd_import_chunk(r->im, &k, &e)) {
        send_run_spoil(r, &e);
        return;
    }
    for (uint32_t i = 0; r->pass && i < r->n_out; i++) {
        send_dst_pin(r->out[i].d, c, rec->p, rec->n);
        r->out[i].sent += k.raw_len;
        r->out[i].wire += k.data.n;
        if (!r->out[i].first_us)
            r->out[i].first_us = c->s->now;
    }
}

static void plain_kv(struct send_src *c, const struct pd_rec *rec)
{
    struct send *s = c->s;
    struct pd_arena mem = { 0 };
    struct pd_kvdesc kv;
    struct pd_err e;
    if (pd_kvdesc_decode(rec->p, rec->n, &mem, &kv, &e)) {      /* the tokens themselves are in doubt: it goes no further */
        struct pd_error_rec er = { .code = pd_exit_status(e.code), .action = "discarded" };
        struct pd_buf b = { 0 };
        struct pd_bin v;
        struct pd_str run = { NULL, 0 };
        if (pd_map_find(rec->p, rec->n, "run", &v) == 1 && v.n > PD_RUN_LEN && pd_run_valid((const char *)v.p + v.n - PD_RUN_LEN, PD_RUN_LEN))
            run = (struct pd_str){ (const char *)v.p + v.n - PD_RUN_LEN, PD_RUN_LEN };
        if (run.p)
            memcpy(er.run, run.p, run.n);
        snprintf(er.class_, sizeof er.class_, "%s", pd_code_name(e.code));
        er.message = (struct pd_str){ e.msg, strlen(e.msg) };
        struct send_run *r = run.p ? run_of(c, er.run, NULL) : NULL;
        send_bad(s, er.run, &e);
        if (r) {
            send_run_spoil(r, NULL);
            r->kv_came = true;
        }
        if (!pd_error_encode(&er, &b, NULL))
            send_put(s, b.p, b.n);
        pd_buf_free(&b);
        pd_arena_free(&mem);
        return;
    }
    struct send_run *r = run_of(c, kv.run, kv.gen);
    if (r && r->state == SR_OPEN && pd_import_finish(r->im, &kv, &e))
        send_run_spoil(r, &e);
    if (!r || r->state == SR_SPOILT || r->pass) {       /* as it is: whoever decodes sees what is missing */
        send_put(s, rec->p, rec->n);
        if (r && r->state == SR_SPOILT)
            r->kv_came = true;
        else if (r) {
            r->state = SR_CLOSED;
            r->closed_us = s->now;
            for (uint32_t i = 0; i < r->n_out; i++)
                r->out[i].state = SO_DONE;
        }
    } else if (send_run_close(r, rec->p, rec->n, &e))
        send_fatal(s, &e);
    pd_arena_free(&mem);
}

/* A run that failed where it came from has no KV to wait for. */
static void plain_error(struct send_src *c, const struct pd_rec *rec)
{
    struct pd_arena mem = { 0 };
    struct pd_error_rec er;
    struct pd_err e;
    bool known = pd_error_decode(rec->p, rec->n, &mem, &er, &e) == 0;
    struct send_run *r = known && er.run[0] ? run_of(c, er.run, er.has_gen ? er.gen : NULL) : NULL;
    int code = known && er.code >= 1 && er.code <= 8 ? -er.code : PD_EFAIL;
    if (r)
        send_run_spoil(r, NULL);
    if (r && !c->dump)          /* a dump's damaged run is followed by its kv record */
        r->kv_came = true;
    if (c->dump) {
        pd_fail(&e, code, "%.*s", known ? (int)er.message.n : 0, known ? er.message.p : "");
        send_bad(c->s, NULL, &e);
    } else
        *c->s->status = pd_exit_worse(*c->s->status, code);
    if (!c->dump)
        send_put(c->s, rec->p, rec->n);
    pd_arena_free(&mem);
}

static void plain_record(struct send_src *c, const struct pd_rec *rec)
{
    switch (rec->kind) {
    case PD_K_OFFER: plain_offer(c, rec); break;
    case PD_K_CHUNK: plain_chunk(c, rec); break;
    case PD_K_KV: plain_kv(c, rec); break;
    case PD_K_ERROR: plain_error(c, rec); break;
    default: send_put(c->s, rec->p, rec->n); break;
    }
}

/* ---- the transfer protocol ---- */

static void ended_runs(struct send_src *c, const char *why, int code)
{
    for (struct send_run *r = c->s->runs; r; r = r->next)
        if (r->src == c) {
            struct pd_err e;
            if (r->state == SR_NEW || r->state == SR_OPEN) {
                pd_fail(&e, code, "run %s: %s: its KV is discarded", r->desc.run, why);
                send_run_spoil(r, &e);
            }
            r->src = NULL;
            r->m = NULL;
        }
}

void send_src_end(struct send_src *c)
{
    if (c->s->stopping)
        ended_runs(c, "interrupted", PD_ECANCEL);
    else
        ended_runs(c, "the stream ended before the run's kv record", PD_ECORRUPT);
    c->state = SS_ENDED;
    for (uint32_t i = 0; i < c->s->n_dst; i++)
        send_dst_unpin(&c->s->dst[i], c);
    if (c->dropped && c->s->o.keep_going)
        pd_warn("%llu chunks of no run that is being received were dropped", (unsigned long long)c->dropped);
    if (c->probe)
        pd_info("a probe: %llu transfers of %llu bytes, verified and dropped", (unsigned long long)c->probe_runs, (unsigned long long)c->probe_bytes);
    if (c->dump) {
        struct pd_err e = { 0 };
        if (pd_dump_read_end(c->dump, &e))
            send_bad(c->s, NULL, &e);
        c->dump = NULL;
    }
    pd_chan_close(&c->c);
    pd_endpoint_abort(&c->ep);
}

static int take(struct send_src *c, const struct pd_hello *h, const struct pd_rec *rec, struct pd_err *e)
{
    struct send *s = c->s;
    int rc = 0;
    if (strcmp(h->role, "prefill"))
        return pd_fail(e, PD_EINCOMPAT, "hello: role %.11s came to the end that takes KV", h->role);
    if (!(c->st = send_store_of(s, &h->layout, e)))
        return e->code;
    c->fp.n = 0;
    if ((rc = pd_buf_add(&c->fp, h->fp_fields.p, h->fp_fields.n, e)))
        return rc;
    memcpy(c->life, h->life, sizeof c->life);
    snprintf(c->peer, sizeof c->peer, "%.*s", h->worker.n < 119 ? (int)h->worker.n : 119, h->worker.p ? h->worker.p : "");
    c->relay = pd_hello_can(h, "relay");
    c->probe = pd_hello_can(h, "probe");
    struct pd_xfer_opts o = { .relay = true, .via = s->o.via, .worker = s->o.worker, .epoch = h->epoch,
        .fp_fields = { c->fp.p, c->fp.n }, .pool = c->st->pool, .accept_us = SEND_PATIENT_US, .stall_us = SEND_PATIENT_US };
    if ((rc = pd_chan_xfer(&c->c, &o, s->o.net, s->now, e)))
        return rc;
    c->c.heard = c->c.pinged = s->now;
    c->state = SS_TAKING;
    pd_xfer_feed(c->c.x, rec->p, rec->n, s->now, NULL);         /* a refusal is an event */
    return 0;
}

/* The same sender, whose connection is gone; whether we have noticed or not. */
static bool is_again(const struct send_src *o, const struct pd_hello *h)
{
    return (o->state == SS_LOST || o->state == SS_TAKING) && o->relay && !o->probe && !memcmp(o->life, h->life, sizeof h->life) && pd_str_eq(h->worker, o->peer);
}

static void lost(struct send_src *c, const char *why);

/* Lost, and what was dialled is not the one that is waited for: again in a while. */
static void hang_up(struct send_src *c)
{
    pd_chan_close(&c->c);
    pd_endpoint_abort(&c->ep);
    c->again = c->s->now + AGAIN_US;
}

/* The transfer protocol begins, or goes on for a sender that was lost: then its connection is given to that one, and c is over. */
static void on_hello(struct send_src *c, const struct pd_rec *rec)
{
    struct pd_arena mem = { 0 };
    struct pd_hello h;
    struct pd_err e = { 0 };
    struct send_src *to = c;
    int rc = pd_hello_decode(rec->p, rec->n, &mem, &h, &e);
    for (struct send_src *o = c->s->srcs; !rc && c->state != SS_LOST && o; o = o->next)
        if (o != c && !h.has_attach && is_again(o, &h))
            to = o;
    if (to != c && to->state == SS_TAKING)
        lost(to, "it came again");
    if (to != c && to->state != SS_LOST)
        to = c;                 /* it had ended just then */
    if (to != c) {
        pd_chan_close(&to->c);
        to->c = c->c;
        pd_chan_init(&c->c);
        c->state = SS_ENDED;
    } else if (!rc && c->state == SS_LOST && !is_again(c, &h) && !memcmp(c->life, h.life, sizeof h.life)) {
        pd_arena_free(&mem);    /* where another receiver of its was expected */
        hang_up(c);
        return;
    } else if (!rc && c->state == SS_LOST && !is_again(c, &h))
        rc = pd_fail(&e, PD_ECORRUPT, "another sender answers where one was lost");
    if (!rc)
        rc = h.has_attach ? pd_fail(&e, PD_ECORRUPT, "hello: `attach` in a stream of records") : take(to, &h, rec, &e);
    pd_arena_free(&mem);
    if (rc) {
        pd_err_prefix(&e, "a sender is refused");
        send_bad(to->s, NULL, &e);
        send_src_end(to);
    }
}

/* A second hello, which says that the first one was not answered in time: what comes now is plain. True: that is what it was. */
static bool taken_back(struct send_src *c, const struct pd_rec *rec)
{
    struct pd_arena mem = { 0 };
    struct pd_hello h;
    bool plain = pd_hello_decode(rec->p, rec->n, &mem, &h, NULL) == 0 && !h.has_attach && pd_hello_can(&h, "plain");
    pd_arena_free(&mem);
    if (!plain || c->state != SS_TAKING || c->seq || c->probe || pd_xfer_counts(c->c.x).moves)
        return plain && c->state == SS_PLAIN;
    pd_info("a sender did not wait for our hello: its KV comes in a plain stream");
    pd_chan_plain(&c->c);
    c->s->degraded = true;
    c->relay = false;
    c->state = SS_PLAIN;
    return true;
}

static void on_offer(struct send_src *c, struct pd_move *m)
{
    struct send *s = c->s;
    struct pd_err e = { 0 };
    const struct pd_kvdesc *d = pd_move_desc(m);
    uint8_t key[PD_RUN_LEN + PD_GEN_LEN];
    memcpy(key, d->run, PD_RUN_LEN);
    memcpy(key + PD_RUN_LEN, d->gen, PD_GEN_LEN);
    struct send_run *r = send_run_find(s, d->run, d->gen);
    if (pd_seen_has(&c->taken, key, sizeof key) || (r && (r->src != c || r->m || !r->im))) {
        pd_take_refuse(m, PD_EFAIL, "it was taken already", s->now);
        return;
    }
    if (!r) {
        struct pd_buf b = { 0 };
        int rc = pd_kvdesc_encode(d, &b, &e);
        r = rc ? NULL : send_run_new(c, b.p, b.n, &e);
        pd_buf_free(&b);
    }
    if (!r) {
        pd_take_refuse(m, e.code, e.msg, s->now);
        send_bad(s, NULL, &e);
        return;
    }
    r->m = m;
    r->state = SR_NEW;          /* also of one that goes on: what came of it is in r->im */
    pd_move_set(m, r);
}

static void on_taken(struct send_src *c, struct send_run *r, struct pd_move *m)
{
    struct pd_buf kv = { 0 };
    struct pd_err e;
    uint8_t key[PD_RUN_LEN + PD_GEN_LEN];
    if (r->state == SR_SPOILT)
        return;
    memcpy(key, r->desc.run, PD_RUN_LEN);
    memcpy(key + PD_RUN_LEN, r->desc.gen, PD_GEN_LEN);
    r->blocks = pd_take_blocks(m, &r->n_blocks);
    int rc = r->blocks ? 0 : pd_fail(&e, PD_ENOMEM, "run %s: its block table", r->desc.run);
    rc = rc ? rc : pd_kvdesc_encode(pd_move_desc(m), &kv, &e);
    rc = rc ? rc : send_run_close(r, kv.p, kv.n, &e);
    rc = rc ? rc : pd_seen_add(&c->taken, key, sizeof key, &e);
    pd_buf_free(&kv);
    if (rc < 0)
        send_fatal(c->s, &e);
    if (c->probe) {
        c->probe_runs++;
        c->probe_bytes += r->plan.bytes;
    }
}

static void on_unacked(struct send_src *c, const struct pd_move *m)
{
    struct pd_err e;
    void *p = pd_realloc(c->unacked, c->n_unacked + 1, sizeof *c->unacked, "what was not acknowledged", &e);
    if (!p) {
        send_fatal(c->s, &e);
        return;
    }
    c->unacked = p;
    memset(&c->unacked[c->n_unacked], 0, sizeof *c->unacked);
    memcpy(c->unacked[c->n_unacked].run, pd_move_run(m), PD_RUN_LEN);
    memcpy(c->unacked[c->n_unacked].gen, pd_move_gen(m), PD_GEN_LEN);
    if ((c->unacked[c->n_unacked].has_lease = pd_move_lease(m) != NULL))
        memcpy(c->unacked[c->n_unacked].lease, pd_move_lease(m), PD_LEASE_ID_LEN);
    c->n_unacked++;
}

static void on_event(struct send_src *c, const struct pd_xfer_event *ev)
{
    struct send_run *r = ev->move ? pd_move_get(ev->move) : NULL;
    switch (ev->kind) {
    case PD_XE_READY:
        pd_info("a sender is there: KV comes by %s", pd_xfer_via(c->c.x));
        for (uint32_t i = 0; i < c->n_unacked; i++)
            pd_xfer_commit(c->c.x, c->unacked[i].run, c->unacked[i].gen, c->unacked[i].has_lease ? c->unacked[i].lease : NULL, c->s->now, NULL);
        c->n_unacked = 0;
        break;
    case PD_XE_OFFERED: on_offer(c, ev->move); break;
    case PD_XE_TAKEN: on_taken(c, r, ev->move); break;
    case PD_XE_UNACKED:
        on_unacked(c, ev->move);
        if (r)                  /* else it was told once more */
            r->m = NULL;
        break;
    case PD_XE_RELEASED:
        if (r)
            r->m = NULL;
        break;
    case PD_XE_FAILED: case PD_XE_CANCELLED:
        if (!r)
            break;
        if (!pd_xfer_open(c->c.x) && c->relay && ev->kind == PD_XE_FAILED && r->state != SR_SPOILT) {
            struct pd_import *im = pd_take_park(ev->move);      /* goes on when its sender comes again */
            r->im = im ? im : r->im;            /* it may have been parked before, and not taken up since */
            r->m = NULL;
            if (r->im)
                r->state = SR_NEW;
            else if (r->state == SR_NEW) {
                r->state = SR_SPOILT;           /* it had not begun: it is offered again, whole */
                for (uint32_t i = 0; i < r->n_out; i++)
                    r->out[i].state = SO_DONE;
            } else
                send_run_spoil(r, &ev->err);
            break;
        }
        r->m = NULL;
        if (ev->kind == PD_XE_CANCELLED)
            send_run_spoil(r, NULL);            /* its sender has said why, there */
        else
            send_run_spoil(r, &ev->err);
        break;
    default: break;
    }
}

static void lost(struct send_src *c, const char *why)
{
    struct send *s = c->s;
    struct pd_xfer_event ev;
    bool open = pd_xfer_counts(c->c.x).moves > 0;
    pd_xfer_lost(c->c.x, why, s->now);
    while (pd_xfer_event(c->c.x, &ev))
        on_event(c, &ev);
    if (c->end_came || c->probe || (!c->relay && !open)) {
        send_src_end(c);
        return;
    }
    if (!c->relay) {
        ended_runs(c, why, PD_ECANCEL);
        send_src_end(c);
        return;
    }
    s->degraded = true;
    pd_warn("the connection of a sender was lost (%s); waiting %lld ms for it to come again", why, (long long)(s->o.resume_us / 1000));
    pd_chan_close(&c->c);
    pd_endpoint_abort(&c->ep);
    c->state = SS_LOST;
    c->until = s->now + s->o.resume_us;
    /* Acknowledged or not: what was handed on is known here by its number. */
}

static bool wait_again(struct send_src *c)
{
    struct send *s = c->s;
    struct pd_err e;
    if (s->now >= c->until) {
        pd_fail(&e, PD_ETIME, "a sender did not come again within %lld ms (see --resume)", (long long)(s->o.resume_us / 1000));
        send_bad(s, NULL, &e);
        ended_runs(c, "its sender was lost", PD_ETIME);
        send_src_end(c);
        return true;
    }
    if (c->c.fd >= 0 || !c->dialled || s->now < c->again)
        return false;
    if (!c->dial && pd_redial_new(s->o.in, false, s->o.net, &c->dial, &e))
        return false;
    if (pd_redial_done(&c->dial, &c->ep, &e))
        return false;
    pd_chan_of(&c->c, &c->ep, s->o.in);
    if (pd_chan_reader(&c->c, s->o.in, s->o.max_record + 64, &e))
        send_fatal(s, &e);
    return true;
}

static bool work_taking(struct send_src *c)
{
    struct send *s = c->s;
    struct pd_xfer_event ev;
    struct pd_err e = { 0 };
    uint64_t before = pd_xfer_counts(c->c.x).bytes_out;
    pd_xfer_tick(c->c.x, s->now);
    pd_chan_raw(&c->c, s->now);
    bool moved = pd_xfer_work(c->c.x, WORK, s->now);
    while (pd_xfer_event(c->c.x, &ev)) {
        moved = true;
        if (ev.kind != PD_XE_CLOSED) {
            on_event(c, &ev);
            continue;
        }
        pd_chan_flush(&c->c, s->now, NULL);     /* its last words */
        if (ev.err.code != PD_ECANCEL)
            send_bad(s, NULL, &ev.err);
        lost(c, ev.err.msg);
        return true;
    }
    moved |= send_carry_out(c);
    int rc = pd_chan_flush(&c->c, s->now, &e);
    if (rc < 0 || (c->c.eof && pd_rstream_empty(c->c.rs))) {
        lost(c, rc < 0 ? e.msg : "it was closed");
        return true;
    }
    if (c->end_came && rc == 0 && !pd_xfer_counts(c->c.x).moves) {
        send_src_end(c);
        return true;
    }
    if (!pd_chan_alive(&c->c, SEND_SILENCE_US, s->now)) {
        lost(c, "it says nothing any more");
        return true;
    }
    return moved | (pd_xfer_counts(c->c.x).bytes_out != before);
}

/* ---- its turn ---- */

static bool pinned(const struct send_src *c)
{
    for (uint32_t i = 0; i < c->s->n_dst; i++)
        if (send_dst_pinned(&c->s->dst[i], c))
            return true;
    return false;
}

static bool may_read(const struct send_src *c)
{
    return c->state == SS_TAKING || c->state == SS_LOST || (c->state == SS_PLAIN && !c->waits && !pinned(c) && send_room(c->s));
}

static void broken(struct send_src *c, struct pd_err *e)
{
    struct send *s = c->s;
    if (c->state == SS_TAKING) {
        pd_xfer_lost(c->c.x, e->msg, s->now);
        return;
    }
    if (c->state == SS_LOST) {
        hang_up(c);
        return;
    }
    send_bad(s, NULL, e);
    ended_runs(c, "the stream broke", PD_ECORRUPT);
    send_src_end(c);
}

bool send_src_again(const struct send *s, const struct pd_hello *h)
{
    for (const struct send_src *o = s->srcs; o; o = o->next)
        if (is_again(o, h))
            return true;
    return false;
}

void send_src_record(struct send_src *c, const struct pd_rec *rec)
{
    struct pd_err e = { 0 };
    if (rec->kind == PD_K_HELLO && c->c.socket && taken_back(c, rec))
        return;
    if (rec->kind == PD_K_HELLO && c->c.socket && c->state != SS_TAKING)
        on_hello(c, rec);
    else if (c->state == SS_PLAIN)
        plain_record(c, rec);
    else if (c->state == SS_TAKING && rec->kind != PD_K_CARRY)
        pd_xfer_feed(c->c.x, rec->p, rec->n, c->s->now, NULL);
    else if (c->state == SS_TAKING && !send_carry_in(c, rec, &e))
        broken(c, &e);
    /* lost: whoever that is, he does not go on where the other one stopped */
}

/* A turn's share of records, until there is none or they have to wait: a peer that never stops writing is not to keep us from hanging up. */
static bool records(struct send_src *c)
{
    struct send *s = c->s;
    struct pd_rec rec;
    struct pd_err e = { 0 };
    bool moved = false, bad;
    size_t bytes = 0;
    for (int n = 0; n < SEND_TURN && bytes < SEND_TURN_BYTES && c->state != SS_ENDED && c->c.rs && !c->c.eof && may_read(c) && !s->fatal.code; n++) {
        int rc = pd_chan_next(&c->c, &rec, &bad, s->now, &e);
        if (rc == 2)
            break;
        moved = true;
        if (rc < 0 && bad) {
            send_bad(s, NULL, &e);
            continue;
        }
        if (rc < 0) {
            if (rc == PD_ENOMEM)
                send_fatal(s, &e);
            else
                broken(c, &e);
            break;
        }
        if (rc == 0) {
            if (c->state == SS_PLAIN)
                send_src_end(c);
            else if (c->state == SS_LOST)
                hang_up(c);
            break;
        }
        bytes += rec.n;
        send_src_record(c, &rec);
    }
    return moved;
}

bool send_src_work(struct send_src *c)
{
    bool moved = records(c);
    if (c->state == SS_TAKING)
        moved |= work_taking(c);
    else if (c->state == SS_LOST)
        moved |= send_carry_out(c) | wait_again(c);
    return moved;
}

bool send_src_wants(const struct send_src *c) { return c->c.fd >= 0 && !c->c.eof && may_read(c); }

void send_src_free(struct send_src *c)
{
    for (struct send_kept *k = c->carried, *next; k; k = next) {
        next = k->next;
        pd_free(k);
    }
    for (struct send_run *r = c->s->runs; r; r = r->next)
        if (r->src == c) {
            r->src = NULL;
            r->m = NULL;
        }
    if (c->dump)
        pd_dump_read_end(c->dump, NULL);
    pd_chan_close(&c->c);
    pd_redial_free(c->dial);
    pd_endpoint_abort(&c->ep);
    pd_buf_free(&c->fp);
    pd_seen_free(&c->taken);
    pd_free(c->unacked);
    pd_free(c);
}
