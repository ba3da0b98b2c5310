/* Records that are no KV, carried beside a transfer: numbered, kept until they are handed on, acknowledged by number. */
#include "../base/log.h"
#include "../wire/frame.h"
#include "sender_in.h"

bool send_carry_in(struct send_src *c, const struct pd_rec *rec, struct pd_err *e)
{
    struct pd_carry y;
    struct send_kept *k;
    if (pd_carry_decode(rec->p, rec->n, &y, e))
        return false;
    if (y.seq <= c->seq)
        return true;            /* said again over a new connection */
    if (!c->seq)
        c->seq = y.seq - 1;     /* of a sender whose receiver before us has the first ones */
    if (y.seq != c->seq + 1) {
        pd_fail(e, PD_ECORRUPT, "carry: number %llu after %llu", (unsigned long long)y.seq, (unsigned long long)c->seq);
        return false;
    }
    if (c->end_seen) {
        pd_fail(e, PD_ECORRUPT, "carry: number %llu after the end", (unsigned long long)y.seq);
        return false;
    }
    /* A sender keeps each until we have handed it on, and takes in no more than this meanwhile. */
    bool full = c->carried_bytes > SEND_HIGH + sizeof *k + c->s->o.max_record;
    if (full || (!y.end && !y.rec.n)) {
        pd_fail(e, PD_ECORRUPT, full ? "carry: its sender does not wait: %zu bytes of records are here that no receiver has taken" : "carry: no record in it", c->carried_bytes);
        return false;
    }
    if (!(k = pd_calloc(1, sizeof *k + y.rec.n, "a record on its way", e)))
        return false;
    c->carried_bytes += sizeof *k + y.rec.n;
    c->end_seen = y.end;
    *k = (struct send_kept){ .seq = ++c->seq, .end = y.end, .n = y.rec.n };
    if (y.rec.n)
        memcpy(k->rec, y.rec.p, y.rec.n);
    *c->carried_end = k;
    c->carried_end = &k->next;
    return true;
}

/* A carried record is framed like any other, and its kind may be anything. */
static void hand_on(struct send_src *c, const struct send_kept *k)
{
    struct pd_frame_scan scan = { 0 };
    struct pd_err e = { 0 };
    size_t len = 0;
    if (k->end)
        c->end_came = true;
    else if (pd_frame_next(&scan, k->rec, k->n, k->n, &len, &e) == 1 && len == k->n && pd_frame_check(k->rec, k->n, &e) == 0)
        send_put(c->s, k->rec, k->n);
    else {
        pd_err_prefix(&e, "a carried record");
        e.code = PD_ECORRUPT;
        send_bad(c->s, NULL, &e);
    }
}

bool send_carry_out(struct send_src *c)
{
    struct pd_carry y = { .seq = c->acked };
    struct pd_buf b = { 0 };
    struct send_kept *k;
    while ((k = c->carried) && send_room(c->s)) {
        hand_on(c, k);
        c->acked = k->seq;
        c->carried_bytes -= sizeof *k + k->n;
        if (!(c->carried = k->next))
            c->carried_end = &c->carried;
        pd_free(k);
    }
    if (y.seq == c->acked)
        return false;
    y.seq = c->acked;
    if (c->c.x && !pd_carry_encode(&y, &b, NULL))
        pd_xfer_say(c->c.x, b.p, b.n, NULL);
    pd_buf_free(&b);
    return true;
}
