/* The taking end: offered > receiving > being verified > verified > releasing > over.
 * Nothing of a run is used before its kv came and each chunk was verified. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include "../base/log.h"
#include "proto_in.h"

enum { RENEW_LEAST_US = 10000 };

/* Nothing of it is in use any more, unless its peer may still write into it: then its last event, and what it holds, wait for the peer to say that it does
 * not (drain_until at the latest), as taking its region away under a write would break the connection. */
void pd_x_take_end(struct pd_move *m)
{
    struct pd_xfer *x = m->x;
    if (m->targeted && !m->drain_until)
        m->drain_until = m->state == M_CANCELLING ? m->since + x->o.cancel_us : x->now + x->o.cancel_us;
    m->draining = m->targeted && x->state == X_OPEN && x->now < m->drain_until && m->tr->busy && m->tr->busy(m->path, m);
    if (m->draining)
        return;
    if (m->targeted)
        m->tr->withdraw(m->path, m);
    m->targeted = false;
    if (!m->verified && !(m->lost && (m->state == M_MOVING || m->state == M_CLOSED))) {        /* what a lost connection leaves can go on over the next */
        pd_import_free(m->im);
        m->im = NULL;
    }
}

struct pd_import *pd_take_park(struct pd_move *m)
{
    struct pd_import *im = m->lost && !m->verified && m->im && !pd_import_in_place(m->im) ? m->im : NULL;
    if (im)
        m->im = NULL;
    return im;
}

const struct pd_import *pd_take_import(const struct pd_move *m) { return m->im; }
const struct pd_kvdesc *pd_move_desc(const struct pd_move *m) { return &m->desc; }
size_t pd_move_memory(const struct pd_move *m) { return m->arena.used + (m->from_blocks ? m->desc.n_tokens / m->desc.layout.block_size * sizeof *m->from_blocks : 0); }
uint32_t pd_take_held(const struct pd_move *m) { return m->im ? pd_import_held(m->im) : 0; }
bool pd_take_in_place(const struct pd_move *m) { return m->in_place; }

static int fail_now(struct pd_move *m, int code, const char *action, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
static int fail_now(struct pd_move *m, int code, const char *action, const char *fmt, ...)
{
    struct pd_err why = { .code = code };
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why.msg, sizeof why.msg, fmt, ap);
    va_end(ap);
    pd_x_fail(m, &why, action);
    return m->x->state == X_CLOSED ? m->x->why.code : 0;
}

/* ---- offer ---- */

/* Newer of two generations of one life: the counter in the second half. */
static bool newer(const uint8_t *a, const uint8_t *b) { return memcmp(a + 8, b + 8, 8) > 0; }

/* As it asks, but not in every turn of the loop: whatever it asks. */
static int64_t renew_every(const struct pd_lease_rec *l)
{
    int64_t least = l->ttl_us / 3 < RENEW_LEAST_US ? l->ttl_us / 3 + 1 : RENEW_LEAST_US;
    return l->renew_us > least ? l->renew_us : least;
}

static int check_offer(struct pd_xfer *x, struct pd_move *m, struct pd_err *e)
{
    const struct pd_kvdesc *d = &m->desc;
    struct pd_lease_rec lease;
    int rc;
    if (!d->offer)
        return pd_fail(e, PD_ECORRUPT, "run %s: not an offer", m->run);
    if (d->epoch != x->mine.epoch)
        return pd_fail(e, PD_EINCOMPAT, "run %s: epoch differs (prefill %" PRIu64 ", decode %" PRIu64 ")", m->run, d->epoch, x->mine.epoch);
    if (memcmp(d->gen, x->theirs.life, sizeof x->theirs.life) && !pd_hello_can(&x->theirs, "relay"))
        return pd_fail(e, PD_ETIME, "run %s: its generation is of another life of the prefill worker", m->run);
    if (memcmp(d->fp_sha, x->theirs.fp_sha, sizeof d->fp_sha))
        return pd_fail(e, PD_EINCOMPAT, "run %s: its fingerprint is not the one that the prefill side said hello with", m->run);
    if (d->layout.layout_hash != x->theirs.layout.layout_hash)       /* hello has held that against ours */
        return pd_fail(e, PD_EINCOMPAT, "run %s: layout_hash differs (prefill %016" PRIx64 ", decode %016" PRIx64 ")", m->run, d->layout.layout_hash,
                       x->theirs.layout.layout_hash);
    for (uint32_t i = 0; i < x->n_via; i++)
        if (!strcmp(x->via[i]->scheme, d->payload.scheme)) {
            if (x->dead[i].code) {
                *e = x->dead[i];
                return e->code;
            }
            m->tr = x->via[i];
            m->path = x->path[i];
        }
    if (!m->tr)
        return pd_fail(e, PD_EINCOMPAT, "run %s: payload by '%.11s', which is not in use here: %s", m->run, d->payload.scheme, x->via_text);
    if (!m->tr->borrows)
        return d->lease.p ? pd_fail(e, PD_ECORRUPT, "run %s: a lease with a payload that owns its bytes", m->run) : 0;
    if ((rc = pd_lease_rec_decode(d->lease, &m->arena, &lease, e)))
        return pd_err_prefix(e, "run %s", m->run), rc;
    if (lease.ttl_us > INT64_MAX / 4)
        return pd_fail(e, PD_ECORRUPT, "run %s: a lease of %lld us", m->run, (long long)lease.ttl_us);
    memcpy(m->lease, lease.id, sizeof m->lease);
    m->has_lease = true;
    m->ttl_us = lease.ttl_us;
    m->renew_us = renew_every(&lease);
    m->lease_until = x->now + lease.ttl_us;
    m->renew_at = x->now + m->renew_us;
    return 0;
}

/* Is its memory at hand? 0 yes, 1 not yet. */
static int find_memory(struct pd_move *m, struct pd_err *e)
{
    struct pd_plan plan;
    int rc = pd_plan_make(&m->desc.layout, m->desc.n_tokens, m->desc.payload.chunk_blocks, &plan, e);
    if (rc || !m->tr->ready)
        return rc;
    struct pd_pool_stats s = pd_pool_stats(m->x->o.pool);
    if (plan.n_blocks > PD_SLABS_MAX * (uint64_t)m->x->theirs.slab_blocks)
        return pd_fail(e, PD_EINCOMPAT, "run %s: %u blocks are more than the peer's slabs can hold (%u here)", m->run, plan.n_blocks, s.max);
    if (!m->from_blocks && !(m->from_blocks = pd_calloc(plan.n_blocks, sizeof *m->from_blocks, "the peer's block table", e)))
        return PD_ENOMEM;
    return m->tr->ready(m->path, &m->desc.payload, plan.n_blocks, &m->from, m->from_blocks, e);
}

static void offer_on(struct pd_move *m)
{
    struct pd_err e = { 0 };
    int rc = find_memory(m, &e);
    if (rc < 0)
        pd_x_fail(m, &e, "refused");
    else if (rc)
        m->state = M_WAITING;
    else {
        m->state = M_OFFERED;
        pd_x_event(m, PD_XE_OFFERED, NULL);
    }
}

/* The hand-over of that run, but for what is only a release. One that is being cancelled stays a while beside the one that came after it. */
static struct pd_move *under_way(struct pd_xfer *x, const char *run)
{
    struct pd_move *found = NULL;
    for (struct pd_move *m = x->moves; m; m = m->next)
        if (m->state != M_OVER && !m->told_again && !strcmp(m->run, run) && (!found || found->state == M_CANCELLING))
            found = m;
    return found;
}

int pd_x_take_offer(struct pd_xfer *x, const void *rec, size_t n)
{
    struct pd_arena a = { 0 };
    struct pd_kvdesc d;
    struct pd_err e = { 0 };
    int rc = pd_kvdesc_decode(rec, n, &a, &d, &e);
    if (rc) {
        rc = pd_x_malformed(x, rc, &e);
        goto out;
    }
    struct pd_move *old = pd_x_find(x, d.run, d.gen);
    if (old && old->told_again) {       /* its giver is about to hear that it is not needed */
        x->n.late++;
        goto out;
    }
    old = under_way(x, d.run);
    if (old && !memcmp(old->gen, d.gen, PD_GEN_LEN)) {
        rc = pd_x_illegal(old, "a second offer");
        goto out;
    }
    bool stale = pd_x_gone(x, d.run, d.gen) || (old && old->state != M_CANCELLING && !newer(d.gen, old->gen));
    if (stale) {
        x->n.late++;
        pd_fail(&e, PD_ETIME, "run %s: this generation is retired", d.run);
        rc = pd_x_put_error(x, d.run, d.gen, &e, "refused");
        goto out;
    }
    if (old && old->state < M_VERIFIED) {       /* one run, one KV on its way: the newer counts */
        rc = fail_now(old, PD_ECANCEL, "superseded", "run %s: a newer generation was offered", d.run);
        if (rc)
            goto out;
    } else if (old && old->state != M_CANCELLING) {
        pd_fail(&e, PD_EFAIL, "run %s: it was taken already", d.run);
        rc = pd_x_put_error(x, d.run, d.gen, &e, "refused");
        goto out;
    }
    struct pd_move *m = pd_x_new(x, d.run, d.gen, &e);
    bool refused = !m;
    if (!m && !(m = pd_x_spare(x, d.run, d.gen))) {
        rc = pd_x_fatal(x, PD_ENOMEM, "%s", e.msg);
        goto out;
    }
    m->arena = a;
    a = (struct pd_arena){ 0 };
    m->desc = d;
    if (refused || check_offer(x, m, &e))
        pd_x_fail(m, &e, "refused");
    else
        offer_on(m);
out:
    pd_arena_free(&a);
    return rc ? rc : x->state == X_CLOSED ? x->why.code : 0;
}

void pd_x_take_mapped(struct pd_xfer *x, const struct pd_err *none)
{
    for (struct pd_move *m = x->moves; m; m = m->next)
        if (m->state == M_WAITING && none)
            pd_x_fail(m, none, "refused");
        else if (m->state == M_WAITING)
            offer_on(m);
}

void pd_take_refuse(struct pd_move *m, int code, const char *why, int64_t now)
{
    m->x->now = now;
    if (m->state == M_OFFERED || m->state == M_WAITING)
        fail_now(m, code, "refused", "%s", why);
}

/* ---- accept ---- */

/* Too many blocks are held by others (own: those held for this one already) for it to have the rest; it would fit alone. */
static bool lacks_room(const struct pd_pool *p, const struct pd_kvdesc *d, uint32_t own)
{
    struct pd_pool_stats s = pd_pool_stats(p);
    uint32_t bs = (uint32_t)pd_pool_geom(p)->block_size, want = d->n_tokens / bs + (d->n_tokens % bs > 0), others = s.used > own ? s.used - own : 0;
    return want <= s.max && want > s.max - others;
}

static int put_accept(struct pd_move *m, struct pd_accept *r, struct pd_err *e)
{
    struct pd_xfer *x = m->x;
    strcpy(r->mode, m->in_place ? "in_place" : "copy");
    memcpy(r->run, m->run, sizeof r->run);
    memcpy(r->gen, m->gen, sizeof r->gen);
    m->state = M_MOVING;
    m->since = x->now;
    int rc = pd_accept_encode(r, pd_out_buf(&x->out), e);
    if ((rc = pd_x_put(x, rc, e)))
        *e = x->why;
    return rc;
}

/* Let the peer write what is missing; where that cannot be (no memory can be registered, the blocks lie too scattered) it comes by the next best way. */
static int land(struct pd_move *m, struct pd_accept *r, struct pd_arena *a, struct pd_err *e)
{
    struct pd_xfer *x = m->x;
    int rc = m->tr->land(m->path, m, x->o.pool, m->im, r, a, e);
    const struct pd_transport *from = m->tr;
    uint32_t i = 0;
    m->targeted = !rc;
    while (i < x->n_via && x->via[i] != from)
        i++;
    for (i++; rc && pd_hello_can(&x->theirs, "any_way") && i < x->n_via; i++) {
        const struct pd_transport *t = x->via[i];
        const char *why;
        struct pd_err other;
        if (t->borrows || x->dead[i].code || (t->up && t->up(x->path[i], &why) <= 0))
            continue;
        r->target = NULL;
        r->rkeys = (struct pd_bin){ NULL, 0 };
        r->n_target = r->tag = 0;
        if (t->land && t->land(x->path[i], m, x->o.pool, m->im, r, a, &other))
            continue;
        pd_import_lands(m->im, t->land != NULL);
        m->targeted = t->land != NULL;
        m->tr = t;
        m->path = x->path[i];
        strcpy(r->via, t->scheme);
        (x->n.detours++ ? pd_info : pd_warn)("run %s: %s; its KV comes by %s", m->run, e->msg, t->scheme);
        rc = e->code = 0;
    }
    return rc;
}

/* All of it is here. Its lease may be short of its end: it is renewed at once. */
static int take_again(struct pd_move *m, struct pd_err *e)
{
    struct pd_accept r = { .held = 0 };
    struct pd_buf have = { 0 };
    struct pd_plan plan;
    int rc = m->tr->view ? pd_plan_make(&m->desc.layout, m->desc.n_tokens, m->desc.payload.chunk_blocks, &plan, e) :
             pd_fail(e, PD_EINCOMPAT, "run %s: it is read in place here, and cannot go by %s any more", m->run, m->tr->scheme);
    rc = rc ? rc : pd_buf_reserve(&have, (plan.n_chunks + (size_t)7) / 8, e);
    if (rc) {
        pd_x_fail(m, e, "refused");
        return rc;
    }
    memset(have.p, 0, have.n = (plan.n_chunks + (size_t)7) / 8);
    for (uint32_t i = 0; i < plan.n_chunks; i++)
        have.p[i / 8] |= (uint8_t)(1 << (i % 8));
    r.have = (struct pd_bin){ have.p, have.n };
    m->again = m->in_place = true;
    m->renew_at = m->x->now;
    rc = put_accept(m, &r, e);
    pd_buf_free(&have);
    return rc;
}

int pd_take(struct pd_move *m, const struct pd_take *t, int64_t now, struct pd_err *e)
{
    struct pd_xfer *x = m->x;
    struct pd_accept r = { .held = 0 };
    struct pd_err why = { 0 };
    struct pd_buf have = { 0 };
    struct pd_import_opts o = { .held = t->held, .n_held = t->n_held, .from = m->from, .from_blocks = m->from_blocks, .lend = t->in_place,
                                .landing = m->tr && m->tr->land ? m->tr->scheme : NULL, .convert = x->o.convert };
    struct pd_arena a = { 0 };
    int rc;
    x->now = now;
    if (m->state != M_OFFERED) {
        pd_import_free(t->resume);
        return pd_fail(e, PD_EFAIL, "run %s: it is %s, there is nothing to accept", m->run, pd_move_state(m));
    }
    m->deadline = t->deadline;
    if (t->again) {
        rc = take_again(m, &why);
        goto out;
    }
    if (t->resume) {
        m->im = t->resume;
        rc = pd_import_resume(m->im, &m->desc, &o, &why);
    } else
        rc = pd_import_begin_with(x->o.pool, &m->desc, &o, &m->im, &why);
    if (rc == PD_ENOMEM && t->may_wait && !t->resume && lacks_room(x->o.pool, &m->desc, t->n_held))
        return 1;
    r.held = rc ? 0 : pd_import_held(m->im);
    uint32_t n_chunks = rc ? 0 : pd_import_plan(m->im)->n_chunks;
    size_t words = (n_chunks + (size_t)63) / 64;
    if (!rc && m->tr->sums && (!(m->sums = pd_calloc(n_chunks, sizeof *m->sums, "checksums", &why)) ||
                                  !(m->told = pd_calloc(words, 8, "chunk bitmap", &why)) || !(m->named = pd_calloc(words, 8, "chunk bitmap", &why))))
        rc = PD_ENOMEM;
    if (!rc && m->tr->land && pd_import_missing(m->im))
        rc = land(m, &r, &a, &why);
    if (!rc && pd_import_missing(m->im) < n_chunks) {
        rc = pd_buf_reserve(&have, (n_chunks + (size_t)7) / 8, &why);
        if (!rc)
            memset(have.p, 0, have.n = (n_chunks + (size_t)7) / 8);
        for (uint32_t i = 0; !rc && i < n_chunks; i++)
            if (pd_import_has(m->im, i))
                have.p[i / 8] |= (uint8_t)(1 << (i % 8));
        r.have = (struct pd_bin){ have.p, have.n };
    }
    if (rc) {
        pd_x_fail(m, &why, "refused");
        goto out;
    }
    m->in_place = pd_import_in_place(m->im);
    rc = put_accept(m, &r, &why);
out:
    pd_buf_free(&have);
    pd_arena_free(&a);
    if (rc && e)
        *e = why;
    return rc;
}

/* ---- what comes ---- */

/* The move of a record that belongs to one being received; NULL with *rc as pd_x_named. */
static struct pd_move *receiving(struct pd_xfer *x, const char *what, const char *run, const uint8_t *gen, int *rc)
{
    struct pd_move *m = pd_x_named(x, what, run, gen, rc);
    if (m && m->state == M_CANCELLING) {
        x->n.late++;
        return NULL;
    }
    if (m && m->state != M_MOVING) {
        *rc = pd_x_illegal(m, what);
        return NULL;
    }
    if (m)
        m->since = x->now;
    return m;
}

int pd_x_take_chunk(struct pd_xfer *x, const void *rec, size_t n)
{
    struct pd_chunk c;
    struct pd_err e = { 0 };
    int rc = pd_chunk_decode(rec, n, &c, &e);
    if (rc)
        return pd_x_malformed(x, rc, &e);
    struct pd_move *m = receiving(x, "a chunk", c.run, c.gen, &rc);
    if (!m)
        return rc;
    if (m->tr->sums || m->tr->placed || m->all_done)
        return pd_x_illegal(m, m->all_done ? "a chunk after done" : "a chunk where none is sent");
    x->n.bytes_in += c.data.n;
    if ((rc = pd_import_chunk(m->im, &c, &e))) {
        pd_x_fail(m, &e, "discarded");
        return x->state == X_CLOSED ? x->why.code : 0;
    }
    m->bytes += c.raw_len;
    return 0;
}

/* Group `seq` is there, when `last` was the last to land: within half a turn of the counter. */
static bool reached(uint32_t last, uint32_t seq) { return ((uint64_t)last + PD_XFER_SEQ_MAX - seq) % PD_XFER_SEQ_MAX < PD_XFER_SEQ_MAX / 2; }

/* Sums of chunks that are there, or will be when their group has landed. */
static int told(struct pd_move *m, const struct pd_done *d)
{
    struct pd_err e;
    bool there = !m->tr->landed || reached(m->tr->landed(m->path), d->seq);
    for (uint32_t i = 0; i < d->chunks; i++) {
        uint32_t k = d->chunk0 + i;
        if (BIT(m->named, k) || pd_import_has(m->im, k))
            return fail_now(m, PD_ECORRUPT, "discarded", "run %s: chunk %u came twice", m->run, k);
        SET_BIT(m->named, k);
        if (there)
            SET_BIT(m->told, k);
        m->n_told++;
        m->sums[k] = pd_get_be64(d->sums.p + 8 * i);
    }
    if (there)
        return 0;
    if (m->n_waits == m->cap_waits) {
        struct waiting *w = pd_realloc(m->waits, 2 * (size_t)m->cap_waits + 16, sizeof *w, "groups that have not landed", &e);
        if (!w)
            return fail_now(m, PD_ENOMEM, "discarded", "run %s: %s", m->run, e.msg);
        m->waits = w;
        m->cap_waits = 2 * m->cap_waits + 16;
    }
    m->waits[m->n_waits++] = (struct waiting){ d->seq, d->chunk0, d->chunks };
    m->n_awaited += d->chunks;
    return 0;
}

void pd_x_take_landed(struct pd_xfer *x, uint32_t via)
{
    uint32_t last = x->via[via]->landed(x->path[via]);
    for (struct pd_move *m = x->moves; m; m = m->next) {
        uint32_t n = 0;
        if (m->tr != x->via[via] || m->state == M_OVER)
            continue;
        if (m->state == M_MOVING || m->state == M_CLOSED)
            m->since = x->now;
        while (n < m->n_waits && reached(last, m->waits[n].seq)) {
            for (uint32_t i = 0; i < m->waits[n].chunks; i++)
                SET_BIT(m->told, m->waits[n].chunk0 + i);
            m->n_awaited -= m->waits[n].chunks;
            m->at = m->waits[n].chunk0 / 64 < m->at ? m->waits[n].chunk0 / 64 : m->at;
            n++;
        }
        m->n_waits -= n;
        if (n)
            memmove(m->waits, m->waits + n, m->n_waits * sizeof *m->waits);
    }
}

int pd_x_take_done(struct pd_xfer *x, const void *rec, size_t n)
{
    struct pd_arena a = { 0 };
    struct pd_done d;
    struct pd_err e = { 0 };
    int rc = pd_done_decode(rec, n, &a, &d, &e);
    if (rc) {
        rc = pd_x_malformed(x, rc, &e);
        goto out;
    }
    struct pd_move *m = receiving(x, "done", d.run, d.gen, &rc);
    if (!m)
        goto out;
    if (m->again) {
        rc = pd_x_illegal(m, "done where none is sent");
        goto out;
    }
    uint32_t n_chunks = pd_import_plan(m->im)->n_chunks;
    if (d.chunk0 > n_chunks || d.chunks > n_chunks - d.chunk0 || !d.chunks)
        rc = fail_now(m, PD_ECORRUPT, "discarded", "run %s: done for chunks %u to %" PRIu64 " of %u", m->run, d.chunk0, (uint64_t)d.chunk0 + d.chunks - 1,
                      n_chunks);
    else if (!m->tr->sums) {
        if (d.chunk0 || d.chunks != n_chunks || d.sums.p || m->all_done)
            rc = m->all_done ? pd_x_illegal(m, "a second done") :
                 fail_now(m, PD_ECORRUPT, "discarded", "run %s: done names chunks %u to %u, with%s sums; %u were offered as records", m->run, d.chunk0,
                          d.chunk0 + d.chunks - 1, d.sums.p ? "" : "out", n_chunks);
        else if (pd_import_missing(m->im) && !m->tr->placed)      /* streams of their own may be behind */
            rc = fail_now(m, PD_ECORRUPT, "discarded", "run %s: done, and %u of %u chunks are missing", m->run, pd_import_missing(m->im), n_chunks);
        else
            m->all_done = true;
    } else if (d.sums.n != 8 * (size_t)d.chunks)
        rc = fail_now(m, PD_ECORRUPT, "discarded", "run %s: %zu bytes of checksums for %u chunks", m->run, d.sums.n, d.chunks);
    else if (m->tr->landed && (!d.seq || d.seq > PD_XFER_SEQ_MAX))
        rc = fail_now(m, PD_ECORRUPT, "discarded", "run %s: done of chunk %u says group %u", m->run, d.chunk0, d.seq);
    else
        rc = told(m, &d);
out:
    pd_arena_free(&a);
    return rc;
}

/* kv came and every chunk is verified: it is ours. */
static int verified(struct pd_move *m)
{
    struct pd_xfer *x = m->x;
    struct pd_err e = { 0 };
    if (m->in_place && !pd_take_valid(m, x->now))
        return fail_now(m, PD_ETIME, "discarded", "run %s: its lease ended while it was being verified", m->run);
    if (m->targeted)
        m->tr->withdraw(m->path, m);        /* before anybody uses it */
    m->targeted = false;
    if (!m->again && pd_import_finish(m->im, &m->desc, &e))
        return fail_now(m, e.code, "discarded", "%s", e.msg);
    m->verified = true;
    m->bytes = m->again ? 0 : pd_import_bytes(m->im);
    struct pd_verified v = { .bytes = m->bytes, .verify_us = m->again ? 0 : pd_import_us(m->im) };
    memcpy(v.run, m->run, sizeof v.run);
    memcpy(v.gen, m->gen, sizeof v.gen);
    strcpy(v.mode, m->in_place ? "in_place" : "copy");
    int rc = pd_x_put(x, pd_verified_encode(&v, pd_out_buf(&x->out), &e), &e);
    if (rc)
        return rc;
    m->state = M_VERIFIED;
    m->since = x->now;
    pd_x_event(m, PD_XE_TAKEN, NULL);
    if (!m->in_place)
        pd_take_release(m, x->now);
    return x->state == X_CLOSED ? x->why.code : 0;
}

static int maybe_verified(struct pd_move *m) { return m->state == M_CLOSED && (m->again || !pd_import_missing(m->im)) ? verified(m) : 0; }

bool pd_x_take_placed(struct pd_xfer *x, uint32_t via)
{
    struct pd_placed p;
    bool any = false;
    for (; x->state == X_OPEN && x->via[via]->placed(x->path[via], &p); any = true) {
        struct pd_move *m = x->moves;
        while (m && m != p.owner)
            m = m->next;
        if (!m || (m->state != M_MOVING && m->state != M_CLOSED))
            continue;
        uint64_t had = pd_import_bytes(m->im);
        if (p.err.code || pd_import_sum(m->im, p.index, p.xxh3, &p.err)) {
            pd_x_fail(m, &p.err, "discarded");
            continue;
        }
        m->bytes = pd_import_bytes(m->im);
        x->n.bytes_in += m->bytes - had;
        x->pulled += m->bytes - had;
        maybe_verified(m);
    }
    return any;
}

int pd_x_take_kv(struct pd_xfer *x, const void *rec, size_t n)
{
    struct pd_arena a = { 0 };
    struct pd_kvdesc d;
    struct pd_err e = { 0 };
    int rc = pd_kvdesc_decode(rec, n, &a, &d, &e);
    if (rc) {
        rc = pd_x_malformed(x, rc, &e);
        goto out;
    }
    struct pd_move *m = receiving(x, "kv", d.run, d.gen, &rc);
    if (!m)
        goto out;
    if (!m->tr->sums && !m->all_done) {
        rc = fail_now(m, PD_ECORRUPT, "discarded", "run %s: kv before done", m->run);
        goto out;
    }
    if (!m->again && m->tr->sums && m->n_told + (pd_import_plan(m->im)->n_chunks - pd_import_missing(m->im)) < pd_import_plan(m->im)->n_chunks) {
        rc = fail_now(m, PD_ECORRUPT, "discarded", "run %s: kv, and not all of %u chunks are done", m->run, pd_import_plan(m->im)->n_chunks);
        goto out;
    }
    if (!m->again && pd_import_repeats(m->im, &d, &e)) {
        rc = fail_now(m, e.code, "discarded", "%s", e.msg);
        goto out;
    }
    pd_arena_free(&m->arena);
    m->arena = a;
    a = (struct pd_arena){ 0 };
    m->desc = d;
    m->state = M_CLOSED;
    rc = maybe_verified(m);
out:
    pd_arena_free(&a);
    return rc;
}

/* A little of what lies in mapped memory. true: there is more of it. */
static bool work(struct pd_move *m, size_t *bytes)
{
    uint32_t n_chunks = pd_import_plan(m->im)->n_chunks, words = (n_chunks + 63) / 64;
    for (; m->at < words; m->at++)
        while (m->told[m->at]) {
            uint32_t k = m->at * 64 + (uint32_t)__builtin_ctzll(m->told[m->at]);
            struct pd_err e = { 0 };
            if (!*bytes)
                return true;
            if (pd_import_sum(m->im, k, m->sums[k], &e)) {
                pd_x_fail(m, &e, "discarded");
                return false;
            }
            m->told[m->at] &= m->told[m->at] - 1;
            m->n_told--;
            m->since = m->x->now;
            uint64_t len = pd_import_plan(m->im)->chunk_bytes;
            *bytes -= len < *bytes ? (size_t)len : *bytes;
        }
    m->at = 0;
    maybe_verified(m);
    return false;
}

bool pd_xfer_work(struct pd_xfer *x, size_t bytes, int64_t now)
{
    bool more = false;
    x->now = now;
    bytes = bytes ? bytes : 1;
    for (struct pd_move *m = x->moves; m && x->state == X_OPEN && !x->o.giving; m = m->next)
        if ((m->state == M_MOVING || m->state == M_CLOSED) && m->n_told)
            more |= work(m, &bytes);
    return more;
}

/* ---- use ---- */

uint32_t *pd_take_blocks(struct pd_move *m, uint32_t *n)
{
    return m->im && m->verified && m->state != M_CANCELLING ? pd_import_take(m->im, n) : NULL;
}

bool pd_take_valid(const struct pd_move *m, int64_t now)
{
    if (m->state < M_MOVING || m->state > M_RELEASING)
        return false;
    struct pd_view *v = m->in_place ? m->tr->view(m->path) : NULL;
    return !m->in_place || (now < m->lease_until && v && pd_view_valid(v, pd_lease_slot(m->lease), m->gen));
}

unsigned pd_take_converts(const struct pd_move *m) { return m->im ? pd_import_converts(m->im) : 0; }

struct pd_view *pd_take_view(const struct pd_move *m) { return pd_view_ref(m->tr->view(m->path)); }
int64_t pd_take_until(const struct pd_move *m)
{
    return m->in_place && (m->verified || m->again) && (m->lost || m->state != M_OVER) ? m->lease_until : 0;
}

static int put_release(struct pd_xfer *x, const char *run, const uint8_t *gen, const uint8_t *lease)
{
    struct pd_err e = { 0 };
    struct pd_release r = { .has_lease = lease != NULL };
    memcpy(r.run, run, PD_RUN_LEN);
    memcpy(r.gen, gen, sizeof r.gen);
    if (lease)
        memcpy(r.lease, lease, sizeof r.lease);
    return pd_x_put(x, pd_release_encode(&r, pd_out_buf(&x->out), &e), &e);
}

void pd_take_release(struct pd_move *m, int64_t now)
{
    m->x->now = now;
    if (m->state != M_VERIFIED && m->state != M_OFFERED)
        return;
    m->state = M_RELEASING;
    m->since = now;
    put_release(m->x, m->run, m->gen, m->has_lease ? m->lease : NULL);
}

int pd_xfer_commit(struct pd_xfer *x, const char *run, const uint8_t gen[PD_GEN_LEN], const uint8_t *lease, int64_t now, struct pd_err *e)
{
    x->now = now;
    if (x->state != X_OPEN || x->o.giving)
        return pd_fail(e, PD_EFAIL, "run %s: the connection is not open for taking", run);
    struct pd_move *m = pd_x_new(x, run, gen, e);
    if (!m)
        return PD_ENOMEM;
    m->told_again = true;
    if ((m->has_lease = lease != NULL))
        memcpy(m->lease, lease, sizeof m->lease);
    m->state = M_RELEASING;
    put_release(x, run, gen, lease);    /* where that fails the connection ends, and the move with it */
    return 0;
}

bool pd_xfer_releasing(struct pd_xfer *x, const char *run, const uint8_t gen[PD_GEN_LEN])
{
    const struct pd_move *m = pd_x_find(x, run, gen);
    return m && !x->o.giving && m->state == M_RELEASING;
}

/* ---- time ---- */

/* There is something to verify: the peer is not late. */
static bool in_hand(const struct pd_move *m) { return m->n_told > m->n_awaited; }

static bool holds_lease(const struct pd_move *m) { return m->has_lease && m->state <= M_VERIFIED; }

void pd_x_take_tick(struct pd_move *m)
{
    struct pd_xfer *x = m->x;
    int64_t idle = x->now - m->since;
    if (m->state == M_WAITING && idle >= x->o.accept_us)
        fail_now(m, PD_ETIME, "refused", "run %s: the slabs that it names did not come within %lld ms", m->run, (long long)(x->o.accept_us / 1000));
    else if ((m->state == M_MOVING || m->state == M_CLOSED) && idle >= x->o.stall_us && !in_hand(m))
        fail_now(m, PD_ETIME, "discarded", "run %s: nothing came for %lld ms while it was %s", m->run, (long long)(x->o.stall_us / 1000), pd_move_state(m));
    else if (m->state == M_RELEASING && idle >= x->o.accept_us) {
        struct pd_err e;
        pd_fail(&e, PD_ETIME, "run %s: the prefill side does not acknowledge its release", m->run);
        pd_x_event(m, PD_XE_UNACKED, &e);
    } else if (holds_lease(m) && x->now >= m->lease_until)
        fail_now(m, PD_ETIME, "discarded", "run %s: its lease has run out", m->run);
    else if (holds_lease(m) && x->now >= m->renew_at) {
        m->renew_at = x->now + m->renew_us;
        if (!pd_x_put_status(x, m->run, m->gen, "reading", m->lease, 0) && x->now + m->ttl_us > m->lease_until)
            m->lease_until = x->now + m->ttl_us;
    }
}

int64_t pd_x_take_next(const struct pd_move *m)
{
    const struct pd_xfer *x = m->x;
    int64_t t = m->state == M_WAITING || m->state == M_RELEASING ? m->since + x->o.accept_us :
                (m->state == M_MOVING || m->state == M_CLOSED) && !in_hand(m) ? m->since + x->o.stall_us : INT64_MAX;
    if (holds_lease(m) && m->renew_at < t)
        t = m->renew_at;
    if (holds_lease(m) && m->lease_until < t)
        t = m->lease_until;
    return t;
}
