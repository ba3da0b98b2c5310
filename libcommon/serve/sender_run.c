#include "../base/clock.h"
#include <stdio.h>
#include "../base/log.h"
#include "../kv/convert.h"
#include "../model/dtype.h"
#include "../wire/frame.h"
#include "sender_in.h"

enum { CHUNK_HEAD = 1024 /* bytes of a chunk record besides its data, as pd_plan_make counts them */ };

/* ---- where KV lies ---- */

struct send_store *send_store_of(struct send *s, const struct pd_kv_layout *l, struct pd_err *e)
{
    struct pd_pool_geom g = { .layers = (int)l->layers, .kv_heads = (int)l->kv_heads, .head_dim = (int)l->head_dim, .block_size = (int)l->block_size };
    if (pd_layout_check(l, e))
        return NULL;
    for (struct send_store *st = s->stores; st; st = st->next)
        if (st->layout.layout_hash == l->layout_hash)
            return st;
    struct send_store *st = pd_calloc(1, sizeof *st, "KV pool", e);
    if (!st)
        return NULL;
    st->layout = *l;
    pd_kv_dtype_parse(l->dtype, &g.dtype);
    if (pd_pool_new(&g, s->o.kv_mem, &st->pool, e)) {
        pd_free(st);
        return NULL;
    }
    st->next = s->stores;
    s->stores = st;
    return st;
}

/* ---- a run ---- */

struct send_run *send_run_new(struct send_src *c, const void *offer, size_t n, struct pd_err *e)
{
    struct send *s = c->s;
    uint32_t n_out = c->probe ? 0 : s->n_dst;
    struct send_run *r = pd_calloc(1, sizeof *r + n_out * sizeof *r->out, "run", e);
    if (!r)
        return NULL;
    r->s = s;
    r->src = c;
    r->from = c->number;
    r->drop = c->probe;
    r->n_out = n_out;
    r->came_us = s->now;
    for (uint32_t i = 0; i < n_out; i++)
        r->out[i] = (struct send_out){ .r = r, .d = &s->dst[i] };
    int rc = pd_kvdesc_decode(offer, n, &r->mem, &r->desc, e);
    rc = rc ? rc : pd_buf_add(&r->offer, offer, n, e);
    if (!rc && !(r->st = send_store_of(s, &r->desc.layout, e)))
        rc = pd_err_prefix(e, "run %s", r->desc.run);
    if (rc) {
        pd_arena_free(&r->mem);
        pd_buf_free(&r->offer);
        pd_free(r);
        return NULL;
    }
    *s->runs_end = r;
    s->runs_end = &r->next;
    if (++s->n_runs > s->most_runs)
        s->most_runs = s->n_runs;
    return r;
}

struct send_run *send_run_find(struct send *s, const char *run, const uint8_t *gen)
{
    for (struct send_run *r = s->runs; r; r = r->next)
        if (!strcmp(r->desc.run, run) && (!gen || !memcmp(r->desc.gen, gen, PD_GEN_LEN)))
            return r;
    return NULL;
}

void send_run_free(struct send_run *r)
{
    for (uint32_t i = 0; i < r->n_out; i++)
        send_dst_unpin(r->out[i].d, r);
    r->s->n_runs--;
    if (r->src && r->src->waits == r)
        r->src->waits = NULL;
    for (uint32_t i = 0; i < r->n_blocks; i++)
        pd_pool_put(r->st->pool, r->blocks[i]);
    pd_free(r->blocks);
    pd_import_free(r->im);
    pd_buf_free(&r->offer);
    pd_arena_free(&r->mem);
    pd_arena_free(&r->kv_mem);
    pd_free(r);
}

static const struct pd_import *import_of(const struct send_run *r) { return r->m ? pd_take_import(r->m) : r->im; }

const uint32_t *send_run_blocks(const struct send_run *r)
{
    const struct pd_import *im = r->blocks ? NULL : import_of(r);
    return r->blocks ? r->blocks : im ? pd_import_blocks(im) : NULL;
}

bool send_run_has(const struct send_run *r, const struct send_out *o, uint32_t chunk)
{
    const struct pd_import *im = r->blocks ? NULL : import_of(r);
    uint32_t layer = chunk % o->plan.layers, block0 = chunk / o->plan.layers * o->plan.chunk_blocks, end = block0 + o->plan.chunk_blocks;
    if (r->blocks)
        return true;
    if (!im)
        return false;
    end = end < r->plan.n_blocks ? end : r->plan.n_blocks;
    for (uint32_t q = block0 / r->plan.chunk_blocks; q * r->plan.chunk_blocks < end; q++)
        if (!pd_import_has(im, q * r->plan.layers + layer))
            return false;
    return true;
}

int send_desc_out(const struct send_run *r, const struct send_out *o, const struct pd_kvdesc *d, struct pd_buf *b, struct pd_err *e)
{
    struct pd_kvdesc out = *d;
    out.lease = (struct pd_bin){ NULL, 0 };
    out.payload = (struct pd_payload){ .scheme = "inline", .bytes = o->plan.bytes, .chunk_bytes = o->plan.chunk_bytes, .n_chunks = o->plan.n_chunks,
                                       .chunk_blocks = o->plan.chunk_blocks };
    snprintf(out.payload.codec, sizeof out.payload.codec, "%s", o->d->codec ? pd_codec_name(o->d->rule.mode, r->desc.layout.dtype) : "none");
    return pd_kvdesc_encode(&out, b, e);
}

/* ---- its life ---- */

/* Chunks can go on as they come when each receiver reads a plain stream and nobody asked for chunks of another size. */
static bool can_pass(const struct send_run *r)
{
    if (r->m || r->src->state == SS_TAKING || r->s->o.chunk_bytes || r->s->o.coded)
        return false;
    for (uint32_t i = 0; i < r->n_out; i++)
        if (r->out[i].d->state != SD_PLAIN)
            return false;
    return true;
}

static uint32_t chunk_blocks_out(const struct send_run *r)
{
    uint64_t most = PD_MAX_RECORD_DEFAULT - CHUNK_HEAD, want = r->s->o.chunk_bytes, per = 2 * (uint64_t)pd_pool_layer_bytes(r->st->pool), n;
    n = (want < most ? want : most) / per;
    return !want ? r->plan.chunk_blocks : n < 1 ? 1 : n > r->plan.n_blocks ? r->plan.n_blocks : (uint32_t)n;
}

/* What keeps a run's rest from coming: its sender is not read before another run of it has begun; and that may be the one that asks. */
static bool rest_comes(const struct send_run *o, const struct send_run *asks)
{
    return o->state == SR_CLOSED || o->m || (o->src && o->src != asks->src && !o->src->waits);
}

/* Whole, but on a plain stream it goes out after one of the same sender that may not become so. */
static bool stands_behind(const struct send_run *o, const struct send_run *asks)
{
    for (const struct send_run *p = o->s->runs; p; p = p->next)
        for (uint32_t i = 0; p != o && p->from == o->from && p->state == SR_OPEN && !rest_comes(p, asks) && i < o->n_out && i < p->n_out; i++)
            if (p->out[i].told && p->out[i].state != SO_DONE && o->out[i].state != SO_DONE)
                return true;
    return false;
}

/* Is something of this pool going to be free by itself? Not by runs that wait for what comes after the one in hand, nor by those that have nothing here yet;
 * but by one whose sender was lost, and comes again or is given up. */
static bool will_be_room(const struct send *s, const struct send_run *r)
{
    for (const struct send_run *o = s->runs; o; o = o->next) {
        bool held = o->m || o->blocks;
        for (uint32_t i = 0; i < o->n_out; i++)
            held |= o->out[i].m != NULL;
        if (o == r || o->st != r->st || o->pass)
            continue;
        if (o->state == SR_SPOILT ? held : o->state == SR_NEW ? o->im != NULL : o->state == SR_OPEN ? rest_comes(o, r) : !stands_behind(o, r))
            return true;
    }
    return false;
}

static void refuse(struct send_run *r, const struct pd_err *why)
{
    if (r->m)
        pd_take_refuse(r->m, why->code, why->msg, r->s->now);
    send_run_spoil(r, why);
}

bool send_run_first(const struct send_run *r, uint32_t out)
{
    bool older = true;
    for (const struct send_run *o = r->s->runs; o; o = o->next) {
        if (o == r)
            older = false;
        else if (o->from == r->from && out < o->n_out && o->state != SR_SPOILT && o->out[out].state != SO_DONE &&
                 (o->out[out].told || (older && r->state != SR_CLOSED)))
            return false;
    }
    return true;
}

/* In order, too: a small one that overtakes a large one would keep the room that the large one waits for. */
static bool behind_one_that_waits(const struct send_run *r)
{
    for (const struct send_run *o = r->s->runs; o != r; o = o->next)
        if (o->from == r->from && o->state == SR_NEW && !o->im)
            return true;
    return false;
}

bool send_run_begin(struct send_run *r)
{
    struct send *s = r->s;
    struct pd_err e = { 0 };
    bool ready = true;
    if (r->state != SR_NEW || !r->src || (r->src->state != SS_PLAIN && !r->m))
        return false;
    for (uint32_t i = 0; i < r->n_out; i++)
        ready &= send_dst_ready(r->out[i].d, r);
    if (!ready || behind_one_that_waits(r))
        return false;
    r->pass = can_pass(r);
    int rc = pd_plan_make(&r->desc.layout, r->desc.n_tokens, r->desc.payload.chunk_blocks, &r->plan, &e);
    struct pd_pool_stats st = pd_pool_stats(r->st->pool);
    if (!rc && !r->pass && !r->im && r->plan.n_blocks > st.max - st.used) {
        if (r->plan.n_blocks <= st.max && will_be_room(s, r))
            return false;
        rc = pd_fail(&e, PD_ENOMEM, "run %s: its KV of %llu bytes has no room in the %lld bytes that are kept (see --kv-mem)", r->desc.run,
                     (unsigned long long)r->plan.bytes, (long long)s->o.kv_mem);
    }
    if (rc) {
        refuse(r, &e);
        return true;
    }
    if (r->m) {
        struct pd_take t = { .resume = r->im };
        r->im = NULL;
        r->state = SR_OPEN;             /* a failure is told by the move's last event */
        pd_take(r->m, &t, s->now, &e);
        if (r->state != SR_OPEN)
            return true;
    } else {
        struct pd_import_opts o = { .look = r->pass, .convert = r->pass ? PD_CONV_ORDER : 0 };
        if ((rc = pd_import_begin_with(r->st->pool, &r->desc, &o, &r->im, &e))) {
            send_run_spoil(r, &e);
            return true;
        }
        r->state = SR_OPEN;
    }
    if (r->src->waits == r)
        r->src->waits = NULL;
    for (uint32_t i = 0; i < r->n_out; i++) {
        struct send_out *o = &r->out[i];
        if (o->state != SO_NEW)
            continue;
        if (r->pass) {
            send_dst_put(o->d, r->offer.p, r->offer.n);
            o->state = SO_GOING;
        } else if (pd_plan_make(&r->desc.layout, r->desc.n_tokens, chunk_blocks_out(r), &o->plan, &e)) {
            send_run_spoil(r, &e);
            return true;
        } else
            send_out_begin(o);
    }
    pd_buf_free(&r->offer);
    return true;
}

void send_run_spoil(struct send_run *r, const struct pd_err *why)
{
    if (r->state == SR_SPOILT)
        return;
    if (why)
        send_bad(r->s, r->desc.run, why);
    r->state = SR_SPOILT;
    if (r->src && r->src->waits == r)
        r->src->waits = NULL;
    for (uint32_t i = 0; i < r->n_out; i++)
        send_out_spoil(&r->out[i]);
    pd_import_free(r->im);
    r->im = NULL;
}

int send_run_close(struct send_run *r, const void *kv, size_t n, struct pd_err *e)
{
    int rc = pd_kvdesc_decode(kv, n, &r->kv_mem, &r->kv, e);
    if (rc)
        return rc;
    r->closed_us = r->s->now;
    r->state = SR_CLOSED;
    return 0;
}

/* Nothing of it is wanted any more. A spoilt one of a plain stream is kept until its kv record came, so that the rest of its chunks is known. */
static bool over(const struct send_run *r)
{
    if (r->m || (r->state != SR_CLOSED && r->state != SR_SPOILT))
        return false;
    if (r->state == SR_SPOILT && r->src && r->src->state == SS_PLAIN && !r->kv_came)
        return false;
    for (uint32_t i = 0; i < r->n_out; i++)
        if (r->out[i].state != SO_DONE || r->out[i].m)
            return false;
    return true;
}

/* What became of it at a receiver. Times count from when it could have gone there; exposed: after the last of it had come here. */
static void tell(const struct send_run *r, const struct send_out *o)
{
    struct send *s = r->s;
    int64_t from = o->offered_us ? o->offered_us : r->came_us, end = o->verified_us ? o->verified_us : s->now, came = r->closed_us ? r->closed_us : s->now;
    bool whole = r->state == SR_CLOSED && o->tries != UINT32_MAX;
    struct pd_step step = { .run = r->desc.run, .gen = r->desc.gen, .op = r->desc.op, .lease = o->m || o->released ? o->lease : NULL };
    struct pd_figure f[] = {
        { "offered_bytes", (int64_t)r->plan.bytes }, { "skipped_bytes", (int64_t)o->skipped }, { "sent_bytes", (int64_t)o->sent },
        { "wire_bytes", (int64_t)o->wire }, { "queue_us", (o->accepted_us ? o->accepted_us : from) - r->came_us },
        { "queue_runs", s->most_runs }, { "first_byte_us", (o->first_us ? o->first_us : end) - from }, { "complete_us", end - from },
        { "exposed_us", end > came ? end - came : 0 }, { "retries", o->tries && o->tries != UINT32_MAX ? o->tries - 1 : 0 }, { "release_us", s->now - end },
        { "whole", whole } };
    pd_trace_figures(s->o.trace, &step, PD_ST_KV_MOVED, o->sent, whole ? o->scheme[0] ? o->scheme : "stream" : "without its KV", f, sizeof f / sizeof *f);
    if (whole)
        pd_info("run %s: %llu bytes by %s in %lld us, of which %lld after the last had come", r->desc.run, (unsigned long long)o->sent,
                o->scheme[0] ? o->scheme : "stream", (long long)(end - from), (long long)f[8].value);
}

bool send_runs_pump(struct send *s)
{
    bool moved = false;
    for (struct send_run **at = &s->runs, *r; (r = *at);) {
        moved |= send_run_begin(r);
        for (uint32_t i = 0; i < r->n_out && (r->state == SR_OPEN || r->state == SR_CLOSED); i++)
            if (r->out[i].state == SO_GOING)
                moved |= send_out_pump(&r->out[i]);
        if (!over(r)) {
            at = &r->next;
            continue;
        }
        if (r->state == SR_CLOSED) {
            s->runs_passed++;
            s->bytes_passed += r->plan.bytes;
        }
        for (uint32_t i = 0; r->plan.bytes && i < r->n_out; i++)
            tell(r, &r->out[i]);
        *at = r->next;
        if (s->runs_end == &r->next)
            s->runs_end = at;
        send_run_free(r);
        moved = true;
    }
    return moved;
}
