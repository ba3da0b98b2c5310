/* The giving end: offered > sending > sent > verified > released, under a lease of the caller's ledger. */
#include <stdio.h>
#include "../base/log.h"
#include "proto_in.h"

/* The ledger shuts us out: it was revoked, or has expired. What is half written is finished from a copy; the peer is told, and acknowledges. */
static bool fence(void *ctx, const uint8_t id[PD_LEASE_ID_LEN])
{
    struct pd_move *m = ctx;
    struct pd_xfer *x = m->x;
    struct pd_lease_info i;
    struct pd_err e = { 0 };
    m->reading = false;
    m->fencing = m->tr->busy && m->tr->busy(m->path, m);        /* then pd_x_give_drained says when */
    if (m->state == M_OVER || m->state == M_CANCELLING)
        return !m->fencing;
    const char *cause = pd_lease_info(x->o.leases, id, &i) && i.cause ? i.cause : "its lease has ended";
    m->state = M_CANCELLING;
    m->since = x->now;
    if (m->tr->fence && m->tr->fence(m->path, m, &x->out, &e))
        pd_x_fatal(x, PD_ENOMEM, "%s", e.msg);
    else
        pd_x_put_cancel(m, cause);
    return !m->fencing;
}

void pd_x_give_end(struct pd_move *m)
{
    struct pd_err e = { 0 };
    if (m->tr && m->tr->fence && m->tr->fence(m->path, m, &m->x->out, &e))
        pd_x_fatal(m->x, PD_ENOMEM, "%s", e.msg);
    m->draining = (m->reading || m->fencing) && m->tr && m->tr->busy && m->tr->busy(m->path, m);
    if (!m->draining)
        pd_x_give_drained(m);
}

void pd_x_give_drained(struct pd_move *m)
{
    m->draining = false;
    if (m->fencing)
        pd_lease_fenced(m->x->o.leases, m->lease, m, m->x->now);
    if (m->reading)
        pd_lease_unread(m->x->o.leases, m->lease, m);
    m->fencing = m->reading = false;
}

static int choose(struct pd_xfer *x, const char *via, struct pd_move *m, struct pd_err *e)
{
    const char *why;
    for (int wait = 0; wait < 2; wait++)        /* what can carry something now, before what cannot yet */
        for (uint32_t i = 0; i < x->n_via; i++)
            if (!x->dead[i].code && (!via || !strcmp(via, x->via[i]->scheme)) && (wait || !x->via[i]->up || x->via[i]->up(x->path[i], &why) > 0)) {
                m->tr = x->via[i];
                m->path = x->path[i];
                return 0;
            }
    return pd_fail(e, PD_EINCOMPAT, "no transport %s here: %s", via ? via : "is left", x->via_text);
}

static struct pd_sending sending(const struct pd_move *m)
{
    return (struct pd_sending){ .pool = m->x->o.pool, .plan = &m->plan, .blocks = m->blocks, .desc = &m->head, .owner = m, .coding = &m->x->coding };
}

static struct pd_reader reader(struct pd_move *m, bool waits)
{
    return (struct pd_reader){ .pid = m->x->o.peer_pid, .start = m->x->o.peer_start, .fence = fence, .ctx = m, .waits = waits };
}

static int describe(struct pd_move *m, const struct pd_lease_info *lease, struct pd_err *e)
{
    struct pd_kvdesc *d = &m->head;
    struct pd_payload *y = &d->payload;
    struct pd_sending s = sending(m);
    struct pd_buf map = { 0 };
    *y = (struct pd_payload){ .bytes = m->plan.bytes, .chunk_bytes = m->plan.chunk_bytes, .n_chunks = m->plan.n_chunks, .chunk_blocks = m->plan.chunk_blocks,
                             .codec = "none" };
    int rc = m->tr->offer(m->path, &s, y, &m->arena, e);
    if (!rc && m->tr == &pd_inline && pd_hello_can(&m->x->theirs, "zstd")) {
        struct pd_coding *c = &m->x->coding;
        strcpy(y->codec, pd_codec_name(m->x->o.codec, d->layout.dtype));
        c->rule.mode = m->x->o.codec;
        if (*y->codec == 'z' && !c->codec)
            rc = pd_codec_new(&c->codec, e);
    }
    if (rc || !m->tr->borrows)
        return rc;
    struct pd_lease_rec r = { .owner = m->x->mine.worker.p ? m->x->mine.worker : (struct pd_str){ "", 0 }, .ttl_us = lease->ttl_us, .renew_us = m->renew_us };
    memcpy(r.id, m->lease, sizeof r.id);
    rc = pd_lease_rec_encode(&r, &map, e);
    if (!rc && !(d->lease.p = pd_arena_dup(&m->arena, map.p, d->lease.n = map.n, e)))
        rc = PD_ENOMEM;
    pd_buf_free(&map);
    return rc;
}

int pd_give(struct pd_xfer *x, const struct pd_give *g, int64_t now, struct pd_move **out, struct pd_err *e)
{
    struct pd_lease_info lease;
    const struct pd_kvdesc *d = g->desc;
    x->now = now;
    if (x->state != X_OPEN || !x->o.giving)
        return pd_fail(e, PD_EFAIL, "run %s: the connection is not open for giving", d->run);
    if (!pd_lease_info(x->o.leases, g->lease, &lease) || lease.state == PD_LEASE_CANCELLING)
        return pd_fail(e, PD_ETIME, "run %s: its lease has ended", d->run);
    if (pd_x_find(x, d->run, NULL))
        return pd_fail(e, PD_EFAIL, "run %s: it is being given on this connection already", d->run);
    if (pd_x_gone(x, d->run, d->gen))
        return pd_fail(e, PD_ETIME, "run %s: this generation was given on this connection before, and is retired", d->run);
    struct pd_move *m = pd_x_new(x, d->run, d->gen, e);
    if (!m)
        return PD_ENOMEM;
    memcpy(m->lease, g->lease, sizeof m->lease);
    m->deadline = g->deadline;
    m->ttl_us = lease.ttl_us;
    m->renew_us = lease.ttl_us / 6 ? lease.ttl_us / 6 : 1;
    m->renew_at = now + m->renew_us;
    memcpy(m->head.run, d->run, sizeof d->run);
    memcpy(m->head.gen, d->gen, sizeof d->gen);
    m->head.layout = d->layout;
    struct pd_kvdesc offer = *d;
    struct pd_reader who = reader(m, true);
    int rc = pd_plan_make(&d->layout, d->n_tokens, g->chunk_blocks, &m->plan, e);
    if (!rc && (lease.n_blocks < m->plan.n_blocks || memcmp(lease.gen, d->gen, PD_GEN_LEN)))
        rc = pd_fail(e, PD_EFAIL, "run %s: its lease covers %u blocks of %s, its tokens take %u", d->run, lease.n_blocks,
                     memcmp(lease.gen, d->gen, PD_GEN_LEN) ? "another generation" : "it", m->plan.n_blocks);
    size_t words = (m->plan.n_chunks + (size_t)63) / 64;
    if (!rc && (!(m->blocks = pd_calloc(m->plan.n_blocks, sizeof *m->blocks, "block table", e)) || !(m->ready = pd_calloc(words, 8, "chunk bitmap", e)) ||
                !(m->skip = pd_calloc(words, 8, "chunk bitmap", e))))
        rc = PD_ENOMEM;
    if (!rc)
        memcpy(m->blocks, g->blocks, m->plan.n_blocks * sizeof *m->blocks);
    while (!rc && !(rc = choose(x, g->via, m, e)) && (rc = describe(m, &lease, e)) == PD_EINCOMPAT) {
        for (uint32_t i = 0; i < x->n_via; i++)         /* it cannot carry this pool: the next best */
            if (x->via[i] == m->tr)
                x->dead[i] = *e;
        if (!g->via)
            pd_warn("%s; from here on KV goes another way on this connection", e->msg);
        rc = g->via ? rc : 0;
    }
    rc = rc ? rc : pd_lease_read(x->o.leases, m->lease, m->gen, &who, now, e);
    m->reading = !rc;
    offer.offer = true;
    offer.first = NULL;
    offer.n_first = 0;
    offer.t = (struct pd_bin){ NULL, 0 };
    offer.payload = m->head.payload;
    offer.lease = m->head.lease;
    rc = rc ? rc : pd_kvdesc_encode(&offer, pd_out_buf(&x->out), e);
    if (rc) {
        pd_x_give_end(m);
        pd_x_drop(m);
        return rc;
    }
    *out = m;
    return 0;
}

void pd_give_ready(struct pd_move *m, uint32_t chunk0, uint32_t n)
{
    for (uint32_t i = chunk0; i < m->plan.n_chunks && i - chunk0 < n; i++)
        SET_BIT(m->ready, i);
}

int pd_give_finish(struct pd_move *m, const struct pd_kvdesc *kv, struct pd_err *e)
{
    struct pd_kvdesc d = *kv;
    if (m->state == M_OVER || m->state == M_CANCELLING)
        return pd_fail(e, PD_ECANCEL, "run %s: it is %s", m->run, pd_move_state(m));
    if (m->kv.n)
        return pd_fail(e, PD_EFAIL, "run %s: finished twice", m->run);
    d.offer = false;
    d.payload = m->head.payload;
    d.lease = m->head.lease;
    int rc = pd_kvdesc_encode(&d, &m->kv, e);
    if (rc)
        return rc;
    pd_give_ready(m, 0, m->plan.n_chunks);
    pd_lease_publish(m->x->o.leases, m->lease, NULL);   /* the caller may have */
    m->since = m->x->now;
    return 0;
}

void pd_give_until(struct pd_move *m, int64_t deadline) { m->deadline = deadline; }
const struct pd_plan *pd_give_plan(const struct pd_move *m) { return &m->plan; }
uint64_t pd_give_wire(const struct pd_move *m) { return m->wire; }

bool pd_give_in_place(const struct pd_move *m, int32_t *pid, uint64_t *start)
{
    *pid = m->x->o.peer_pid;
    *start = m->x->o.peer_start;
    return m->in_place;
}

/* ---- what the peer says ---- */

/* What it let us write into is not written into. */
static void decline(struct pd_xfer *x, const struct pd_accept *r)
{
    for (uint32_t i = 0; i < x->n_via && r->n_target; i++)
        if (x->via[i]->decline)
            x->via[i]->decline(x->path[i], r);
}

/* It cannot be written into its place by the way that was offered: its bytes go by another one that both have said to have. */
static int take_other_way(struct pd_move *m, const char *scheme)
{
    struct pd_xfer *x = m->x;
    for (uint32_t i = 0; i < x->n_via && m->tr->aim; i++)
        if (!strcmp(x->via[i]->scheme, scheme) && !x->via[i]->borrows && x->via[i] != m->tr) {
            m->tr = x->via[i];
            m->path = x->path[i];
            return 0;
        }
    return pd_x_fatal(x, PD_ECORRUPT, "accept for run %s: offered by %s, it is to go by '%.11s', which is not in use here", m->run, m->tr->scheme, scheme);
}

int pd_x_give_accept(struct pd_xfer *x, const void *rec, size_t n)
{
    struct pd_arena a = { 0 };
    struct pd_accept r;
    struct pd_err e = { 0 };
    int rc = pd_accept_decode(rec, n, &a, &r, &e);
    if (rc) {
        rc = pd_x_malformed(x, rc, &e);
        goto out;
    }
    struct pd_move *m = pd_x_named(x, "accept", r.run, r.gen, &rc);
    if (m && m->state == M_CANCELLING)
        x->n.late++;
    if (!m || m->state == M_CANCELLING) {
        if (!rc)
            decline(x, &r);
        goto out;
    }
    if (m->state != M_OFFERED)
        rc = pd_x_illegal(m, "accept");
    else if (r.have.p && r.have.n != (m->plan.n_chunks + (size_t)7) / 8)
        rc = pd_x_fatal(x, PD_ECORRUPT, "accept for run %s: `have` of %zu bytes is not one bit for each of %u chunks", m->run, r.have.n, m->plan.n_chunks);
    else if (strcmp(r.mode, "copy") && (strcmp(r.mode, "in_place") || !m->tr->borrows))
        rc = pd_x_fatal(x, PD_ECORRUPT, "accept for run %s: mode '%.11s' is not one that %s has", m->run, r.mode, m->tr->scheme);
    rc = rc || !r.via[0] ? rc : take_other_way(m, r.via);
    if (rc)
        goto out;
    struct pd_reader who = reader(m, false);
    if (pd_lease_read(x->o.leases, m->lease, m->gen, &who, x->now, &e)) {       /* it ran out, and the sweep has not come by yet */
        pd_x_fail(m, &e, "ended");
        decline(x, &r);
        goto out;
    }
    if (m->tr->aim && (r.n_target || (r.tag && m->tr->stream))) {
        struct pd_sending s = sending(m);
        if (m->tr->aim(m->path, &s, &r, &e)) {
            rc = pd_x_fatal(x, e.code, "%s", e.msg);
            goto out;
        }
    }
    m->in_place = !strcmp(r.mode, "in_place");
    m->n_left = m->plan.n_chunks;
    uint64_t layer_bytes = m->plan.n_blocks ? m->plan.bytes / m->plan.n_blocks / m->plan.layers : 0;
    m->bytes = 0;
    for (uint32_t i = 0; i < m->plan.n_chunks; i++) {
        if (r.have.p && r.have.p[i / 8] >> (i % 8) & 1) {
            SET_BIT(m->skip, i);
            m->n_left--;
        } else {
            uint32_t block0 = i / m->plan.layers * m->plan.chunk_blocks, blocks = m->plan.n_blocks - block0;
            m->bytes += layer_bytes * (blocks < m->plan.chunk_blocks ? blocks : m->plan.chunk_blocks);
        }
    }
    m->state = M_MOVING;
    m->since = x->now;
    pd_x_event(m, PD_XE_ACCEPTED, NULL);
    m->bytes = 0;
out:
    pd_arena_free(&a);
    return rc;
}

int pd_x_give_verified(struct pd_xfer *x, const void *rec, size_t n)
{
    struct pd_arena a = { 0 };
    struct pd_verified r;
    struct pd_err e = { 0 };
    int rc = pd_verified_decode(rec, n, &a, &r, &e);
    if (rc)
        rc = pd_x_malformed(x, rc, &e);
    else {
        struct pd_move *m = pd_x_named(x, "verified", r.run, r.gen, &rc);
        if (m && (m->state == M_CANCELLING || m->state == M_VERIFIED))      /* crossed, or said again */
            x->n.late++;
        else if (m && m->state != M_CLOSED)
            rc = pd_x_illegal(m, "verified");
        else if (m) {
            m->state = M_VERIFIED;
            m->since = x->now;
            pd_x_event(m, PD_XE_VERIFIED, NULL);
        }
    }
    pd_arena_free(&a);
    return rc;
}

/* Of a hand-over that another connection carried: by its lease, or by its run and generation. Released twice is released. */
static void release_by_name(struct pd_xfer *x, const struct pd_release *r)
{
    struct pd_lease_info i;
    uint32_t at = 0;
    while (pd_leases_each(x->o.leases, &at, &i))
        if (!memcmp(i.gen, r->gen, PD_GEN_LEN) && !strcmp(i.run, r->run) && (!r->has_lease || !memcmp(i.id, r->lease, sizeof i.id))) {
            pd_lease_let_go(x->o.leases, i.id, x->now, NULL);
            return;
        }
}

int pd_x_give_release(struct pd_xfer *x, const void *rec, size_t n)
{
    struct pd_arena a = { 0 };
    struct pd_release r;
    struct pd_err e = { 0 };
    int rc = pd_release_decode(rec, n, &a, &r, &e);
    if (rc) {
        rc = pd_x_malformed(x, rc, &e);
        goto out;
    }
    struct pd_move *m = pd_x_find(x, r.run, r.gen);
    if (m && m->state == M_CANCELLING) {        /* crossed: it will acknowledge the cancel */
        x->n.late++;
        goto out;
    }
    bool before = m && m->state == M_OFFERED;   /* it has it from the connection before this one: this offer is of no use */
    if (m && m->state != M_VERIFIED && !before) {
        rc = pd_x_illegal(m, "release");
        goto out;
    }
    if (!m) {
        x->n.late++;
        release_by_name(x, &r);
    } else if (r.has_lease && memcmp(r.lease, m->lease, sizeof r.lease)) {
        rc = pd_x_fatal(x, PD_ECORRUPT, "release for run %s names another lease", m->run);
        goto out;
    }
    if ((rc = pd_x_put_status(x, r.run, r.gen, "released", NULL, m ? m->bytes : 0)) || !m)
        goto out;
    m->reading = false;
    pd_lease_release(x->o.leases, m->lease, m, x->now, NULL);
    pd_x_event(m, PD_XE_RELEASED, NULL);
out:
    pd_arena_free(&a);
    return rc;
}

int pd_x_give_renew(struct pd_move *m, const struct pd_status *s)
{
    struct pd_xfer *x = m->x;
    struct pd_err e;
    if (m->state == M_CANCELLING) {
        x->n.late++;
        return 0;
    }
    if (s->has_lease && memcmp(s->lease, m->lease, sizeof m->lease))
        return pd_x_fatal(x, PD_ECORRUPT, "status reading for run %s names another lease", m->run);
    if (pd_lease_renew(x->o.leases, m->lease, m->gen, 0, x->now, &e))
        pd_x_fail(m, &e, "ended");
    return x->state == X_CLOSED ? x->why.code : 0;
}

/* ---- sending ---- */

/* The next chunk that is ready and wanted, from m->at on; n_chunks: none. */
static uint32_t next_chunk(const struct pd_move *m)
{
    uint32_t words = (m->plan.n_chunks + 63) / 64;
    for (uint32_t w = m->at / 64; w < words; w++) {
        uint64_t can = m->ready[w] & ~m->skip[w];
        if (can)
            return w * 64 + (uint32_t)__builtin_ctzll(can);
    }
    return m->plan.n_chunks;
}

static uint64_t chunk_len(const struct pd_move *m, uint32_t i)
{
    uint32_t block0 = i / m->plan.layers * m->plan.chunk_blocks, blocks = m->plan.n_blocks - block0;
    return m->plan.bytes / m->plan.n_blocks / m->plan.layers * (blocks < m->plan.chunk_blocks ? blocks : m->plan.chunk_blocks);
}

/* All is sent: say so, and close the run. */
static int close_run(struct pd_move *m)
{
    struct pd_xfer *x = m->x;
    struct pd_err e = { 0 };
    int rc = 0;
    if (!m->tr->sums) {
        struct pd_done d = { .chunk0 = 0, .chunks = m->plan.n_chunks };
        memcpy(d.run, m->run, sizeof d.run);
        memcpy(d.gen, m->gen, sizeof d.gen);
        rc = pd_done_encode(&d, pd_out_buf(&x->out), &e);
    }
    rc = rc ? rc : pd_buf_add(pd_out_buf(&x->out), m->kv.p, m->kv.n, &e);
    if ((rc = pd_x_put(x, rc, &e)))
        return rc;
    m->state = M_CLOSED;
    m->since = x->now;
    return 1;
}

static int pull_one(struct pd_move *m)
{
    struct pd_xfer *x = m->x;
    struct pd_sending s = sending(m);
    struct pd_err e = { 0 };
    uint32_t i = next_chunk(m), n = 1, sent = 0;
    if (i == m->plan.n_chunks && m->at) {
        m->at = 0;
        i = next_chunk(m);
    }
    if (i == m->plan.n_chunks)
        return !m->n_left && m->kv.n ? close_run(m) : 0;
    while (i + n < m->plan.n_chunks && BIT(m->ready, i + n) && !(BIT(m->skip, i + n)))
        n++;
    int rc = m->tr->send(m->path, &s, i, n, &x->out, &sent, &e);
    if (rc) {
        if (rc == PD_ENOMEM || m->tr->progress)         /* a queue pair that fails is the connection's */
            return pd_x_put(x, rc, &e);
        pd_x_fail(m, &e, "failed");
        return 1;
    }
    for (uint32_t k = i; k < i + sent; k++) {
        SET_BIT(m->skip, k);
        m->bytes += chunk_len(m, k);
        m->wire += m->tr->borrows ? 0 : m->tr == &pd_inline ? x->coding.bytes : chunk_len(m, k);
        x->pulled += chunk_len(m, k);
        x->n.bytes_out += m->tr->stream ? chunk_len(m, k) : 0;
    }
    m->n_left -= sent;
    m->at = i + sent < m->plan.n_chunks ? i + sent : 0;
    m->since = x->now;
    rc = pd_x_put(x, 0, NULL);
    return rc ? rc : sent > 0;
}

int pd_x_give_pull(struct pd_xfer *x)
{
    struct pd_move *from = x->turn ? x->turn : x->moves, *m = from;
    if (!m)
        return 0;
    do {        /* in turn, so that a long one does not hold up the short ones */
        if (m->state == M_MOVING) {
            int rc = pull_one(m);
            if (rc) {
                x->turn = m->next;
                return rc;
            }
        }
        m = m->next ? m->next : x->moves;
    } while (m != from);
    return 0;
}

/* ---- time ---- */

/* Nothing is there to be sent, by our own doing: the peer is not late. */
static bool ours(const struct pd_move *m)
{
    if (m->state != M_MOVING || m->x->out.owner == m)
        return false;
    if (!m->n_left)
        return !m->kv.n;
    for (uint32_t w = 0; w < (m->plan.n_chunks + 63) / 64; w++)
        if (m->ready[w] & ~m->skip[w])
            return false;
    return true;
}

void pd_x_give_tick(struct pd_move *m)
{
    struct pd_xfer *x = m->x;
    struct pd_err e;
    int64_t idle = x->now - m->since;
    if (m->state == M_OFFERED && idle >= x->o.accept_us) {
        pd_fail(&e, PD_ETIME, "run %s: the offer was not answered within %lld ms", m->run, (long long)(x->o.accept_us / 1000));
        pd_x_fail(m, &e, "ended");
        return;
    }
    if ((m->state == M_MOVING || m->state == M_CLOSED) && idle >= x->o.stall_us && !ours(m)) {
        pd_fail(&e, PD_ETIME, "run %s: nothing moved for %lld ms while it was %s", m->run, (long long)(x->o.stall_us / 1000), pd_move_state(m));
        pd_x_fail(m, &e, "ended");
        return;
    }
    if (ours(m))
        m->since = x->now;
    /* What lies in our memory and goes as bytes is ours to keep; a reader of our memory renews for itself. */
    if (!m->tr->borrows && m->state < M_VERIFIED && x->now >= m->renew_at) {
        m->renew_at = x->now + m->renew_us;
        if (pd_lease_renew(x->o.leases, m->lease, m->gen, 0, x->now, &e))
            pd_x_fail(m, &e, "ended");
    }
}

int64_t pd_x_give_next(const struct pd_move *m)
{
    const struct pd_xfer *x = m->x;
    int64_t t = m->state == M_OFFERED ? m->since + x->o.accept_us : m->state < M_VERIFIED ? m->since + x->o.stall_us : INT64_MAX;
    if (!m->tr->borrows && m->state < M_VERIFIED && m->renew_at < t)
        t = m->renew_at;
    return t;
}
