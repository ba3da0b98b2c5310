#include <errno.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../kv/fingerprint.h"
#include "../kv/prefix.h"
#include "../wire/json.h"
#include "sender_in.h"

enum { PIECES = 256 };

/* ---- opening ---- */

int send_dst_open(struct send_dst *d, struct pd_err *e)
{
    struct send *s = d->s;
    int rc;
    pd_chan_init(&d->c);
    d->c.giving = true;
    d->ep.fd = -1;
    d->kept_end = &d->kept;
    snprintf(d->name, sizeof d->name, "%.100s/%u", s->o.worker ? s->o.worker : "kvsend", (unsigned)(d - s->dst));
    d->rule.mode = s->o.codec;
    if (s->o.coded && s->o.codec != PD_CODEC_NONE && (rc = pd_codec_new(&d->codec, e)))
        return rc;
    if (pd_endpoint_is_h5(d->spec)) {
        if (s->o.json)
            return pd_fail(e, PD_EUSAGE, "--format json: %s is a dump file, which has a form of its own", d->spec);
        if ((rc = pd_dump_create(d->spec, &d->dump, e)) == 0)
            d->state = SD_DUMP;
        return rc;
    }
    if (pd_ep_listens(d->spec)) {
        d->state = SD_WAIT;
        return 0;
    }
    if ((rc = pd_endpoint_open_out(d->spec, s->o.net, &d->ep, e)))
        return rc;
    if (d->ep.fd >= 0 && isatty(d->ep.fd) && !s->o.json)
        return pd_fail(e, PD_EUSAGE, "-o: records are binary and the output is a terminal (use --format json, -o FILE, or a pipe)");
    pd_chan_of(&d->c, &d->ep, d->spec);
    d->state = SD_PLAIN;
    if (d->c.socket) {
        d->may_ask = !s->o.json;
        return pd_chan_reader(&d->c, d->spec, s->o.max_record + 64, e);
    }
    pd_chan_unblock(&d->c);
    return 0;
}

void send_dst_peer(struct send_dst *d, struct pd_chan *c)
{
    struct pd_err e;
    d->c = *c;
    d->c.giving = true;
    pd_chan_init(c);
    if (d->state == SD_WAIT) {
        d->state = SD_PLAIN;
        d->may_ask = !d->s->o.json;
    } else if (d->state == SD_DOWN && send_give_xfer(d, &e))
        send_fatal(d->s, &e);
}

void send_dst_acked(struct send_dst *d, uint64_t seq)
{
    struct send_kept *k;
    while ((k = d->kept) && k->seq <= seq) {
        d->kept = k->next;
        d->kept_bytes -= sizeof *k + k->n;
        if (!d->kept)
            d->kept_end = &d->kept;
        d->acked = k->seq;
        pd_free(k);
    }
}

bool send_dst_ready(struct send_dst *d, const struct send_run *r)
{
    if (d->state == SD_PLAIN && d->may_ask)
        send_give_ask(d, r);
    return d->state != SD_WAIT && d->state != SD_ASKING;
}

/* ---- records ---- */

bool send_dst_room(const struct send_dst *d)
{
    switch (d->state) {
    case SD_PLAIN: return pd_out_waiting(&d->out) < SEND_HIGH;
    case SD_GIVING: case SD_DOWN: return d->kept_bytes < SEND_HIGH;
    case SD_DUMP: case SD_OVER: return true;
    default: return false;
    }
}

void send_dst_say(struct send_dst *d, const struct send_kept *k)
{
    struct pd_carry y = { .seq = k->seq, .rec = { k->end ? NULL : k->rec, k->n }, .end = k->end };
    struct pd_buf b = { 0 };
    struct pd_err e;
    int rc = pd_carry_encode(&y, &b, &e);
    rc = rc ? rc : pd_xfer_say(d->c.x, b.p, b.n, &e);
    pd_buf_free(&b);
    if (rc == PD_ENOMEM)
        send_fatal(d->s, &e);
}

/* Kept until the peer has handed it on: a dropped connection loses none. */
static void carry(struct send_dst *d, const void *rec, size_t n, bool end)
{
    struct pd_err e;
    struct send_kept *k;
    if (!d->relay && d->state == SD_GIVING) {
        d->lost += !end;
        return;
    }
    if (!(k = pd_calloc(1, sizeof *k + n, "a record on its way", &e))) {
        send_fatal(d->s, &e);
        return;
    }
    *k = (struct send_kept){ .seq = ++d->seq, .end = end, .n = n };
    if (n)
        memcpy(k->rec, rec, n);
    *d->kept_end = k;
    d->kept_end = &k->next;
    d->kept_bytes += sizeof *k + n;
    if (d->state == SD_GIVING)
        send_dst_say(d, k);
}

static void put_json(struct send_dst *d, const void *rec, size_t n)
{
    struct pd_err e;
    d->json.n = 0;
    int rc = pd_msgpack_to_json(rec, n, &d->json, &e);
    if (rc && rc != PD_ENOMEM) {        /* this one cannot be written so; the others can */
        send_bad(d->s, NULL, &e);
        return;
    }
    rc = rc ? rc : pd_buf_add(&d->json, "\n", 1, &e);
    rc = rc ? rc : pd_buf_add(pd_out_buf(&d->out), d->json.p, d->json.n, &e);
    if (rc)
        send_fatal(d->s, &e);
}

void send_dst_put(struct send_dst *d, const void *rec, size_t n)
{
    struct pd_err e;
    if (d->state == SD_OVER)
        return;
    if (d->state == SD_DUMP)
        d->lost++;
    else if (d->state == SD_GIVING || d->state == SD_DOWN || d->state == SD_ASKING)
        carry(d, rec, n, false);
    else if (d->s->o.json)
        put_json(d, rec, n);
    else if (pd_buf_add(pd_out_buf(&d->out), rec, n, &e))
        send_fatal(d->s, &e);
}

void send_dst_pin(struct send_dst *d, const struct send_src *owner, const uint8_t *rec, size_t n)
{
    struct pd_err e;
    if (d->state != SD_PLAIN || d->s->o.json || pd_out_has_chunk(&d->out)) {
        send_dst_put(d, rec, n);
        return;
    }
    struct iovec *v = pd_out_pieces(&d->out, 1, &e);
    if (!v) {
        send_fatal(d->s, &e);
        return;
    }
    *v = (struct iovec){ (void *)(uintptr_t)rec, n };
    pd_out_chunk(&d->out, owner, 1);
}

bool send_dst_pinned(const struct send_dst *d, const struct send_src *owner) { return pd_out_has_chunk(&d->out) && d->out.owner == owner; }

void send_dst_unpin(struct send_dst *d, const void *owner)
{
    struct pd_err e;
    if (pd_out_fence(&d->out, owner, &e))
        send_fatal(d->s, &e);
}

/* ---- runs, plain ---- */

void send_out_desc(struct send_out *o, const struct pd_kvdesc *desc)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    if (send_desc_out(o->r, o, desc, &b, &e))
        send_fatal(o->d->s, &e);
    else
        send_dst_put(o->d, b.p, b.n);
    pd_buf_free(&b);
}

/* The next chunk that is here: straight from the pool, or gathered for JSON. */
static bool pump_plain(struct send_out *o)
{
    struct send_dst *d = o->d;
    struct send_run *r = o->r;
    const struct pd_pool *pool = r->st->pool;
    struct pd_chunk c;
    struct pd_err e;
    int n, rc;
    if (!send_dst_room(d) || pd_out_has_chunk(&d->out))
        return false;
    if (!o->told && (!send_run_first(r, (uint32_t)(d - d->s->dst)) || (r->state == SR_OPEN && !send_run_has(r, o, 0))))
        return false;
    if (!o->told) {
        send_out_desc(o, &r->desc);
        o->told = true;
        return true;
    }
    if (o->at == o->plan.n_chunks) {
        if (r->state != SR_CLOSED)
            return false;
        send_out_desc(o, &r->kv);
        o->state = SO_DONE;
        return true;
    }
    if (!send_run_has(r, o, o->at))
        return false;
    struct iovec *v = pd_out_pieces(&d->out, (int)(2 * o->plan.chunk_blocks), &e);
    rc = v ? pd_export_chunk(pool, send_run_blocks(r), &o->plan, &r->desc, o->at, &c, v, &n, &e) : PD_ENOMEM;
    if (!rc && d->codec)
        rc = pd_codec_chunk(d->codec, &d->rule, &c, v, &n, &e);
    if (!rc && d->s->o.json) {
        struct pd_buf b = { 0 };
        rc = pd_chunk_encode_head(&c, &b, &e);
        for (int i = 0; !rc && i < n; i++)
            rc = pd_buf_add(&b, v[i].iov_base, v[i].iov_len, &e);
        if (!rc)
            put_json(d, b.p, b.n);
        pd_buf_free(&b);
    } else if (!rc && (rc = pd_chunk_encode_head(&c, pd_out_buf(&d->out), &e)) == 0) {
        pd_out_chunk(&d->out, r, n);
        d->chunk_us = pd_mono_us();
        d->chunk_bytes = c.data.n;
    }
    if (rc)
        send_fatal(d->s, &e);
    if (!o->first_us)
        o->first_us = d->s->now;
    o->sent += c.raw_len;
    o->wire += c.data.n;
    o->at++;
    return true;
}

static bool pump_dump(struct send_out *o)
{
    struct send_run *r = o->r;
    struct send_dst *d = o->d;
    uint32_t bs = r->desc.layout.block_size, full = r->desc.n_tokens / bs;
    uint64_t seed;
    struct pd_err e = { 0 };
    struct pd_arena mem = { 0 };
    uint8_t (*hashes)[16] = NULL;
    if (r->state != SR_CLOSED)
        return false;
    if (full && pd_fp_must_seed(r->desc.fp_fields, &seed, &e) == 0 && (hashes = pd_arena_alloc(&mem, full, 16, &e)))
        pd_block_hashes(seed, r->kv.token_ids, r->kv.n_tokens, bs, r->kv.request.adapter, r->kv.request.cache_salt, hashes);
    struct pd_kvdesc k = r->kv;
    k.lease = (struct pd_bin){ NULL, 0 };
    int rc = pd_dump_add(d->dump, &k, r->st->pool, send_run_blocks(r), (const uint8_t (*)[16])hashes, hashes ? full : 0, NULL, 0, &e);
    pd_arena_free(&mem);
    if (rc)
        send_fatal(d->s, &e);
    o->sent = o->wire = r->plan.bytes;
    o->state = SO_DONE;
    return true;
}

void send_out_begin(struct send_out *o)
{
    o->state = SO_GOING;
}

bool send_out_pump(struct send_out *o)
{
    if (o->r->pass)
        return false;
    switch (o->d->state) {
    case SD_PLAIN: return pump_plain(o);
    case SD_DUMP: return pump_dump(o);
    case SD_GIVING: case SD_DOWN: return send_give_pump(o);
    case SD_OVER: o->state = SO_DONE; return true;
    default: return false;
    }
}

void send_out_spoil(struct send_out *o)
{
    if (o->d->state == SD_PLAIN)
        send_dst_unpin(o->d, o->r);
    send_give_unlease(o, "its KV is damaged");    /* fences a move, whose last event comes */
    o->state = SO_DONE;
}

/* ---- its turn ---- */

/* A turn's share. */
static bool read_records(struct send_dst *d)
{
    struct pd_rec rec;
    struct pd_err e = { 0 };
    bool bad;
    int rc = 1, n = 0;
    if (!d->c.readable)
        return false;
    for (; n < SEND_TURN && (rc = pd_chan_next(&d->c, &rec, &bad, d->s->now, &e)) == 1; n++) {
        struct pd_carry y;
        if (!d->c.x)
            continue;           /* a plain receiver has nothing to say to us */
        if (rec.kind == PD_K_CARRY && pd_carry_decode(rec.p, rec.n, &y, &e) == 0)
            send_dst_acked(d, y.seq);
        else
            pd_xfer_feed(d->c.x, rec.p, rec.n, d->s->now, &e);
    }
    d->c.readable = rc == 1 || (rc < 0 && bad);       /* there may be more */
    if (rc == PD_ENOMEM)
        send_fatal(d->s, &e);
    return n > 0 || d->c.readable || d->c.eof;
}

static bool write_plain(struct send_dst *d)
{
    struct iovec v[PIECES];
    struct pd_err e;
    size_t wrote;
    int n = pd_out_iov(&d->out, v, PIECES);
    if (!n || d->c.fd < 0)
        return false;
    int rc = pd_chan_writev(&d->c, v, n, &wrote, &e);
    if (rc < 0) {
        pd_err_prefix(&e, "%s", strcmp(d->spec, "-") ? d->spec : "stdout");
        send_fatal(d->s, &e);
    }
    pd_out_wrote(&d->out, wrote);
    if (d->chunk_bytes && !pd_out_has_chunk(&d->out)) {         /* what the link took, for the rule */
        pd_codec_wrote(&d->rule, d->chunk_bytes, pd_mono_us() - d->chunk_us);
        d->chunk_bytes = 0;
    }
    return wrote > 0;
}

bool send_dst_work(struct send_dst *d)
{
    bool moved = d->c.rs ? read_records(d) : false;
    struct pd_err e;
    if (d->s->fatal.code)
        return true;
    switch (d->state) {
    case SD_PLAIN:
        if (d->c.socket && d->c.eof) {
            pd_fail(&e, PD_ECANCEL, "%s: the reader went away", d->spec);
            send_fatal(d->s, &e);
            return true;
        }
        return moved | write_plain(d);
    case SD_ASKING:     /* what was put before the hello goes first */
        if (write_plain(d))
            return true;
        if (pd_out_iov(&d->out, &(struct iovec){ 0 }, 1))
            return moved;
        if (!d->c.x && send_give_xfer(d, &e))
            send_fatal(d->s, &e);
        return moved | (d->c.x ? send_give_work(d) : true);
    case SD_GIVING:
        send_give_renew(d);
        return moved | send_give_work(d);
    case SD_DOWN:
        send_give_renew(d);
        return moved | send_give_redial(d) | (d->c.x ? send_give_work(d) : false);
    default: return moved;
    }
}

int64_t send_dst_next(const struct send_dst *d)
{
    int64_t t = d->c.x ? pd_xfer_next(d->c.x) : INT64_MAX, now = d->s->now;
    if (d->state == SD_DOWN && !d->c.x)
        t = d->l || d->until < d->again ? d->until : d->again;
    if (d->state == SD_DOWN && d->renew_at < t)
        t = d->renew_at;
    if (d->c.x && now + 1000000 < t)
        t = now + 1000000;      /* signs of life, leases */
    if (d->c.raw < 0 && d->c.raw_again > now && d->c.raw_again < t)
        t = d->c.raw_again;
    return t;
}

/* ---- the end ---- */

bool send_dst_finish(struct send_dst *d)
{
    switch (d->state) {
    case SD_PLAIN: return !pd_out_iov(&d->out, &(struct iovec){ 0 }, 1) && pd_chan_drained(&d->c);
    case SD_GIVING: case SD_DOWN:
        if (d->relay && !d->end_sent) {
            d->end_sent = true;
            carry(d, NULL, 0, true);
        }
        return d->state == SD_GIVING && !d->kept && !pd_xfer_counts(d->c.x).moves;
    case SD_DUMP: case SD_OVER: return true;
    default: return false;
    }
}

int send_dst_commit(struct send_dst *d, struct pd_err *e)
{
    struct pd_err why;
    int rc = 0;
    if (d->lost) {
        pd_fail(&why, PD_EFAIL, "%s: %llu records that are no KV have no place there", d->spec, (unsigned long long)d->lost);
        send_bad(d->s, NULL, &why);
    }
    if (d->dump) {
        if (pd_dump_runs(d->dump) || !*d->s->status)
            rc = pd_dump_commit(d->dump, e);
        else
            pd_dump_abort(d->dump);     /* every run failed: there is nothing to keep */
        d->dump = NULL;
    }
    if (!rc && (d->ep.fd >= 0 || d->ep.tls))
        rc = pd_endpoint_commit(&d->ep, e);
    return rc;
}

void send_dst_free(struct send_dst *d)
{
    pd_dump_abort(d->dump);
    pd_redial_free(d->dial);
    while (d->kept)
        send_dst_acked(d, UINT64_MAX);
    pd_out_free(&d->out);
    pd_buf_free(&d->json);
    pd_codec_free(d->codec);
    pd_chan_close(&d->c);
    pd_leases_free(d->leases);
    pd_buf_free(&d->fp);
    pd_endpoint_abort(&d->ep);
}
