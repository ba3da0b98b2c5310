#include <stdarg.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include "../base/proc.h"
#include "proto_in.h"

enum { WAITING_MAX = 64 << 20 /* bytes of records for a peer that does not read */, ROOM = 64 << 10 /* the next chunk is made when less than this waits */,
       PULL = 4 << 20 /* payload that is hashed in one go, about */ };

static int64_t limit(int64_t us, int64_t otherwise) { return us > 0 ? us : otherwise; }

/* ---- moves ---- */

struct pd_move *pd_x_find(struct pd_xfer *x, const char *run, const uint8_t *gen)
{
    for (struct pd_move *m = x->moves; m; m = m->next)
        if (m->state != M_OVER && !strcmp(m->run, run) && (!gen || !memcmp(m->gen, gen, PD_GEN_LEN)))
            return m;
    return NULL;
}

static void name_of(uint8_t key[PD_RUN_LEN + PD_GEN_LEN], const char *run, const uint8_t *gen)
{
    memcpy(key, run, PD_RUN_LEN);
    memcpy(key + PD_RUN_LEN, gen, PD_GEN_LEN);
}

bool pd_x_gone(const struct pd_xfer *x, const char *run, const uint8_t *gen)
{
    uint8_t key[PD_RUN_LEN + PD_GEN_LEN];
    name_of(key, run, gen);
    return pd_seen_has(&x->gone, key, sizeof key);
}

int pd_x_retire(struct pd_xfer *x, const char *run, const uint8_t *gen)
{
    uint8_t key[PD_RUN_LEN + PD_GEN_LEN];
    name_of(key, run, gen);
    return pd_seen_add(&x->gone, key, sizeof key, NULL) < 0 ? pd_x_fatal(x, PD_ENOMEM, "out of memory at the end of run %s", run) : 0;
}

static struct pd_move *begin(struct pd_xfer *x, struct pd_move *m, const char *run, const uint8_t *gen)
{
    m->x = x;
    memcpy(m->run, run, PD_RUN_LEN);
    memcpy(m->gen, gen, PD_GEN_LEN);
    m->since = x->now;
    m->next = NULL;
    *x->moves_end = m;
    x->moves_end = &m->next;
    x->n.moves++;
    return m;
}

struct pd_move *pd_x_spare(struct pd_xfer *x, const char *run, const uint8_t *gen) { return x->spare.x ? NULL : begin(x, &x->spare, run, gen); }

struct pd_move *pd_x_new(struct pd_xfer *x, const char *run, const uint8_t *gen, struct pd_err *e)
{
    if (x->n.moves >= PD_XFER_MOVES) {
        pd_fail(e, PD_ENOMEM, "run %s: %d hand-overs are open on this connection already", run, PD_XFER_MOVES);
        return NULL;
    }
    struct pd_move *m = pd_calloc(1, sizeof *m, "hand-over", e);
    return m ? begin(x, m, run, gen) : NULL;
}

static void move_free(struct pd_move *m)
{
    if (!m)
        return;
    pd_free(m->blocks);
    pd_free(m->ready);
    pd_free(m->skip);
    pd_free(m->from_blocks);
    pd_free(m->sums);
    pd_free(m->named);
    pd_free(m->told);
    pd_free(m->waits);
    pd_import_free(m->im);
    pd_buf_free(&m->kv);
    pd_arena_free(&m->arena);
    if (m == &m->x->spare)
        *m = (struct pd_move){ .x = NULL };
    else
        pd_free(m);
}

static void unlink_move(struct pd_xfer *x, struct pd_move *m)
{
    struct pd_move **at = &x->moves;
    while (*at != m)
        at = &(*at)->next;
    if (!(*at = m->next))
        x->moves_end = at;
    if (x->turn == m)
        x->turn = m->next;
    x->n.moves--;
}

void pd_x_drop(struct pd_move *m)
{
    unlink_move(m->x, m);
    move_free(m);
}

static bool is_last(enum pd_xfer_event_kind k) { return k >= PD_XE_RELEASED; }

void pd_x_event(struct pd_move *m, enum pd_xfer_event_kind k, const struct pd_err *err)
{
    struct pd_xfer *x = m->x;
    struct pd_xfer_event ev = { .kind = k, .last = is_last(k), .move = m, .bytes = m->bytes };
    if (m->state == M_OVER)
        return;
    if (err)
        ev.err = *err;
    if (ev.last) {
        if (x->o.giving)
            pd_x_give_end(m);
        else
            pd_x_take_end(m);
        m->state = M_OVER;      /* it may be draining: pd_xfer_event holds its last event back */
        pd_x_retire(x, m->run, m->gen);
    }
    if (m->n_q == QUEUE)        /* cannot be: one offer or accept, one verified, one last */
        m->n_q--;
    m->q[m->n_q++] = ev;
}

void pd_x_fail(struct pd_move *m, const struct pd_err *why, const char *action)
{
    if (m->state == M_OVER)
        return;
    if (action)
        pd_x_put_error(m->x, m->run, m->gen, why, action);
    pd_x_event(m, PD_XE_FAILED, why);
}

/* ---- records out ---- */

int pd_x_put(struct pd_xfer *x, int rc, const struct pd_err *e)
{
    if (x->state == X_CLOSED)
        return x->why.code;
    if (rc)
        return pd_x_fatal(x, rc, "%s", e->msg);
    if (pd_out_waiting(&x->out) > WAITING_MAX)
        return pd_x_fatal(x, PD_ENOMEM, "the peer does not read: %zu bytes wait for it", pd_out_waiting(&x->out));
    return 0;
}

int pd_x_put_error(struct pd_xfer *x, const char *run, const uint8_t *gen, const struct pd_err *why, const char *action)
{
    struct pd_err e;
    struct pd_error_rec r = { .code = pd_exit_status(why->code), .message = { why->msg, strlen(why->msg) } };
    if (run) {
        memcpy(r.run, run, sizeof r.run);
        memcpy(r.gen, gen, sizeof r.gen);
        r.has_gen = true;
    }
    snprintf(r.class_, sizeof r.class_, "%s", pd_code_name(why->code));
    snprintf(r.action, sizeof r.action, "%s", action);
    return pd_x_put(x, pd_error_encode(&r, pd_out_buf(&x->out), &e), &e);
}

int pd_x_put_status(struct pd_xfer *x, const char *run, const uint8_t *gen, const char *state, const uint8_t *lease, uint64_t bytes)
{
    struct pd_err e;
    struct pd_status s = { .bytes = bytes };
    if (run)
        memcpy(s.run, run, sizeof s.run);
    if ((s.has_gen = gen != NULL))
        memcpy(s.gen, gen, sizeof s.gen);
    if ((s.has_lease = lease != NULL))
        memcpy(s.lease, lease, sizeof s.lease);
    if (x->o.worker)
        s.worker = (struct pd_str){ x->o.worker, strlen(x->o.worker) };
    snprintf(s.state, sizeof s.state, "%s", state);
    return pd_x_put(x, pd_status_encode(&s, pd_out_buf(&x->out), &e), &e);
}

int pd_x_put_cancel(struct pd_move *m, const char *cause)
{
    struct pd_err e;
    struct pd_cancel c = { .has_gen = true, .cause = { cause, cause ? strlen(cause) : 0 } };
    memcpy(c.run, m->run, sizeof c.run);
    memcpy(c.gen, m->gen, sizeof c.gen);
    return pd_x_put(m->x, pd_cancel_encode(&c, pd_out_buf(&m->x->out), &e), &e);
}

/* ---- the end of a connection ---- */

static void end_moves(struct pd_xfer *x)
{
    for (struct pd_move *m = x->moves; m; m = m->next) {
        if (m->state == M_OVER)
            continue;
        m->lost = true;
        if (m->state == M_CANCELLING)
            pd_x_event(m, PD_XE_CANCELLED, &x->why);
        else
            pd_x_event(m, m->state == M_RELEASING ? PD_XE_UNACKED : PD_XE_FAILED, &x->why);
    }
}

static void close_it(struct pd_xfer *x, bool tell)
{
    struct pd_err why = x->why;
    if (tell)
        pd_x_put_error(x, NULL, NULL, &why, "closed");
    x->state = X_CLOSED;
    for (uint32_t i = 0; i < x->n_via; i++)
        if (x->via[i]->shut)
            x->via[i]->shut(x->path[i]);
    end_moves(x);
}

int pd_x_fatal(struct pd_xfer *x, int code, const char *fmt, ...)
{
    va_list ap;
    if (x->state == X_CLOSED || x->why.code)
        return x->why.code;
    va_start(ap, fmt);
    vsnprintf(x->why.msg, sizeof x->why.msg, fmt, ap);
    va_end(ap);
    x->why.code = code;
    close_it(x, true);
    return code;
}

void pd_xfer_lost(struct pd_xfer *x, const char *why, int64_t now)
{
    x->now = now;
    if (x->state == X_CLOSED)
        return;
    pd_fail(&x->why, PD_ECANCEL, "%s", why);
    close_it(x, false);
}

static int closed(const struct pd_xfer *x, struct pd_err *e)
{
    if (x->state == X_CLOSED && e)
        *e = x->why;
    return x->state == X_CLOSED ? x->why.code : 0;
}

/* ---- open ---- */

int pd_xfer_new(const struct pd_xfer_opts *o, int64_t now, struct pd_xfer **out, struct pd_err *e)
{
    struct pd_xfer *x = pd_calloc(1, sizeof *x, "transfer connection", e);
    if (!x)
        return PD_ENOMEM;
    x->o = *o;
    x->o.hello_us = limit(o->hello_us, 2000000);
    x->o.accept_us = limit(o->accept_us, 5000000);
    x->o.stall_us = limit(o->stall_us, 30000000);
    x->o.cancel_us = limit(o->cancel_us, 1000000);
    x->all = -1;
    x->moves_end = &x->moves;
    x->opened = x->now = now;
    struct pd_hello *h = &x->mine;
    *h = (struct pd_hello){ .version = PD_XFER_VERSION, .version_min = PD_XFER_VERSION, .epoch = o->epoch, .fp_fields = o->fp_fields,
                            .netns = pd_proc_netns() };
    strcpy(h->role, o->giving ? "prefill" : "decode");
    if (o->worker)
        h->worker = (struct pd_str){ o->worker, strlen(o->worker) };
    if (o->domain)
        h->domain = (struct pd_str){ o->domain, strlen(o->domain) };
    pd_proc_boot_id(h->boot);
    for (int i = 0; i < 16; i++)
        h->has_boot |= h->boot[i] != 0;
    pd_layout_from_pool(o->pool, &h->layout);
    if (o->giving) {
        struct pd_slab_shape s;
        pd_slab_shape_of(o->pool, &s);
        h->slab_bytes = s.slab_bytes;
        h->slab_blocks = s.slab_blocks;
    }
    uint8_t gen[PD_GEN_LEN];
    int rc = pd_gen_new(gen, e);
    memcpy(h->life, gen, sizeof h->life);
    rc = rc ? rc : pd_random(h->conn, sizeof h->conn, e);       /* who knows it attaches streams: not to be guessed by who knows this life */
    rc = rc ? rc : pd_sha256(o->fp_fields.p, o->fp_fields.n, h->fp_sha, e);
    rc = rc ? rc : pd_x_hello_make(x, e);
    rc = rc ? rc : pd_hello_encode(h, pd_out_buf(&x->out), e);
    if (rc) {
        pd_xfer_free(x);
        return rc;
    }
    *out = x;
    return 0;
}

static void drained(struct pd_move *m)
{
    if (m->x->o.giving)
        pd_x_give_drained(m);
    else {
        m->drain_until = m->x->now;
        pd_x_take_end(m);
    }
}

void pd_xfer_free(struct pd_xfer *x)
{
    if (!x)
        return;
    pd_xfer_lost(x, "closed here", x->now);
    pd_x_hello_forget(x);
    if (x->all >= 0)
        close(x->all);
    for (; x->n_early; x->n_early--) {
        pd_tls_free(x->early[x->n_early - 1].tls);
        close(x->early[x->n_early - 1].fd);
    }
    for (struct pd_move *m = x->moves, *next; m; m = next) {
        next = m->next;
        if (m->draining || m->fencing)
            drained(m);
        move_free(m);
    }
    move_free(x->dying);
    for (uint32_t i = 0; i < x->n_via; i++)
        if (x->via[i]->close)
            x->via[i]->close(x->path[i]);
    pd_out_free(&x->out);
    pd_codec_free(x->coding.codec);
    pd_seen_free(&x->gone);
    pd_arena_free(&x->my_arena);
    pd_arena_free(&x->their_arena);
    pd_free(x);
}

/* ---- records of both ends ---- */

int pd_x_malformed(struct pd_xfer *x, int rc, const struct pd_err *e) { return pd_x_fatal(x, rc == PD_ENOMEM ? rc : PD_ECORRUPT, "%s", e->msg); }

struct pd_move *pd_x_named(struct pd_xfer *x, const char *what, const char *run, const uint8_t *gen, int *rc)
{
    struct pd_move *m = pd_x_find(x, run, gen);
    *rc = 0;
    if (m)
        return m;
    if (gen && !pd_x_gone(x, run, gen))
        *rc = pd_x_fatal(x, PD_ECORRUPT, "%s for run %s, of which this connection knows %s", what, run,
                         pd_x_find(x, run, NULL) ? "another generation" : "nothing");
    else
        x->n.late++;
    return NULL;
}

static const char *const state_name[2][M_OVER + 1] = {
    { "offered", "waiting for its memory", "receiving", "being verified", "verified", "releasing", "cancelling", "over" },
    { "offered", "?", "sending", "sent", "verified", "?", "cancelling", "over" } };

const char *pd_move_state(const struct pd_move *m) { return state_name[m->x->o.giving][m->state]; }

int pd_x_illegal(struct pd_move *m, const char *what) { return pd_x_fatal(m->x, PD_ECORRUPT, "%s for run %s, which is %s", what, m->run, pd_move_state(m)); }

static int status(struct pd_xfer *x, const void *rec, size_t n)
{
    struct pd_arena a = { 0 };
    struct pd_status s;
    struct pd_err e = { 0 };
    struct pd_move *m;
    int rc = pd_status_decode(rec, n, &a, &s, &e);
    if (rc)
        rc = pd_x_malformed(x, rc, &e);
    else if (!s.run[0])
        rc = s.state[0] ? 0 : pd_x_put_status(x, NULL, NULL, "open", NULL, 0);
    else if (!s.has_gen)
        rc = pd_x_fatal(x, PD_ECORRUPT, "status for run %s without its generation", s.run);
    else if (!strcmp(s.state, "reading") && !x->o.giving)
        rc = pd_x_fatal(x, PD_ECORRUPT, "status reading for run %s came to the end that takes KV", s.run);
    else if (!strcmp(s.state, "reading")) {
        if ((m = pd_x_find(x, s.run, s.gen)))
            rc = pd_x_give_renew(m, &s);
        else {      /* its lease is gone: it must not go on reading */
            x->n.late++;
            pd_fail(&e, PD_ETIME, "the lease of run %s has ended", s.run);
            rc = pd_x_put_error(x, s.run, s.gen, &e, "ended");
        }
    } else {
        bool released = !strcmp(s.state, "released"), cancelled = !strcmp(s.state, "cancelled") || !strcmp(s.state, "verified");
        m = released || cancelled ? pd_x_named(x, "status", s.run, s.gen, &rc) : NULL;
        if (m && m->state == M_CANCELLING) {
            pd_fail(&e, PD_ECANCEL, "cancelled: %s", released ? "released already" : s.state);
            if (!released)
                pd_x_event(m, PD_XE_CANCELLED, &e);
        } else if (m && released && m->state == M_RELEASING)
            pd_x_event(m, PD_XE_RELEASED, NULL);
        else if (m)
            rc = pd_x_illegal(m, released ? "status released" : "status cancelled");
    }
    pd_arena_free(&a);
    return rc;
}

static int cancel(struct pd_xfer *x, const void *rec, size_t n)
{
    struct pd_arena a = { 0 };
    struct pd_cancel c;
    struct pd_err e = { 0 };
    int rc = pd_cancel_decode(rec, n, &a, &c, &e);
    if (rc) {
        rc = pd_x_malformed(x, rc, &e);
        goto out;
    }
    struct pd_move *m = pd_x_find(x, c.run, c.has_gen ? c.gen : NULL);
    if (!m) {       /* it has ended, or never came here: both are cancelled */
        x->n.late++;
        rc = pd_x_put_status(x, c.run, c.has_gen ? c.gen : NULL, "cancelled", NULL, 0);
        goto out;
    }
    bool used = !x->o.giving && m->state == M_RELEASING;        /* its copy is its own */
    pd_fail(&e, PD_ECANCEL, "cancelled by the peer%s%.*s", c.cause.n ? ": " : "", (int)(c.cause.n < 300 ? c.cause.n : 300), c.cause.p ? c.cause.p : "");
    rc = pd_x_put_status(x, m->run, m->gen, used ? "verified" : "cancelled", NULL, m->bytes);
    if (rc)
        goto out;
    if (used)
        pd_x_event(m, PD_XE_RELEASED, NULL);
    else {
        uint8_t lease[PD_LEASE_ID_LEN];
        bool revoke = x->o.giving && m->state != M_CANCELLING;
        memcpy(lease, m->lease, sizeof lease);
        pd_x_event(m, PD_XE_CANCELLED, &e);
        if (revoke)
            pd_lease_revoke(x->o.leases, lease, "cancelled by the consumer", x->now, NULL);
    }
out:
    pd_arena_free(&a);
    return rc;
}

static int error(struct pd_xfer *x, const void *rec, size_t n)
{
    struct pd_arena a = { 0 };
    struct pd_error_rec r;
    struct pd_err e = { 0 };
    int rc = pd_error_decode(rec, n, &a, &r, &e);
    if (rc)
        rc = pd_x_malformed(x, rc, &e);
    else {
        int code = r.code >= 1 && r.code <= 8 ? -r.code : PD_EFAIL;
        pd_fail(&e, code, "the %s side says: %.*s", x->o.giving ? "decode" : "prefill", (int)(r.message.n < 400 ? r.message.n : 400), r.message.p);
        struct pd_move *m = r.run[0] ? pd_x_find(x, r.run, r.has_gen ? r.gen : NULL) : NULL;
        if (!r.run[0]) {
            x->why = e;
            close_it(x, false);
            rc = code;
        } else if (!m)
            x->n.late++;
        else if (m->state == M_CANCELLING)
            pd_x_event(m, PD_XE_CANCELLED, &e);
        else if (m->state == M_RELEASING)       /* the giver knows nothing of it any more; the copy is good */
            pd_x_event(m, PD_XE_RELEASED, NULL);
        else
            pd_x_fail(m, &e, NULL);
    }
    pd_arena_free(&a);
    return rc;
}

int pd_xfer_feed(struct pd_xfer *x, const void *rec, size_t n, int64_t now, struct pd_err *e)
{
    enum pd_kind k = pd_kind_of(rec, n);
    bool giving = x->o.giving;
    int rc = closed(x, e);
    x->now = now;
    if (rc)
        return rc;
    if (x->state == X_GREETING && k != PD_K_HELLO && k != PD_K_ERROR)
        rc = pd_x_fatal(x, PD_ECORRUPT, "a record of kind %s before hello", pd_kind_name(k));
    else
        switch (k) {
        case PD_K_HELLO: rc = x->state == X_GREETING ? pd_x_hello(x, rec, n) : pd_x_fatal(x, PD_ECORRUPT, "a second hello"); break;
        case PD_K_STATUS: rc = status(x, rec, n); break;
        case PD_K_CANCEL: rc = cancel(x, rec, n); break;
        case PD_K_ERROR: rc = error(x, rec, n); break;
        case PD_K_UNKNOWN: break;       /* of a later version: not for us */
        case PD_K_ACCEPT: case PD_K_VERIFIED: case PD_K_RELEASE:
            if (!giving)
                rc = pd_x_fatal(x, PD_ECORRUPT, "%s came to the end that takes KV", pd_kind_name(k));
            else
                rc = k == PD_K_ACCEPT ? pd_x_give_accept(x, rec, n) : k == PD_K_VERIFIED ? pd_x_give_verified(x, rec, n) : pd_x_give_release(x, rec, n);
            break;
        case PD_K_OFFER: case PD_K_CHUNK: case PD_K_DONE: case PD_K_KV:
            if (giving)
                rc = pd_x_fatal(x, PD_ECORRUPT, "%s came to the end that gives KV", pd_kind_name(k));
            else
                rc = k == PD_K_OFFER ? pd_x_take_offer(x, rec, n) : k == PD_K_CHUNK ? pd_x_take_chunk(x, rec, n) :
                     k == PD_K_DONE ? pd_x_take_done(x, rec, n) : pd_x_take_kv(x, rec, n);
            break;
        default: rc = pd_x_fatal(x, PD_ECORRUPT, "a record of kind %s does not belong in a transfer", pd_kind_name(k)); break;
        }
    return rc || x->state == X_CLOSED ? closed(x, e) : 0;
}

/* ---- time ---- */

void pd_xfer_tick(struct pd_xfer *x, int64_t now)
{
    x->now = now;
    if (x->state == X_CLOSED)
        return;
    if (x->state == X_GREETING) {
        if (now - x->opened >= x->o.hello_us)
            pd_x_fatal(x, PD_ETIME, "no hello came within %lld ms", (long long)(x->o.hello_us / 1000));
        return;
    }
    if (x->unpolled)
        pd_xfer_poll(x, now);
    for (struct pd_move *m = x->moves; m && x->state != X_CLOSED; m = m->next) {
        struct pd_err e;
        if (m->state == M_OVER)
            continue;
        if (m->state == M_CANCELLING) {
            if (now - m->since >= x->o.cancel_us) {
                pd_fail(&e, PD_ECANCEL, "cancelled; the peer has not acknowledged it");
                pd_x_event(m, PD_XE_CANCELLED, &e);
            }
        } else if (m->deadline && now >= m->deadline && m->state < M_VERIFIED) {
            pd_fail(&e, PD_ETIME, "run %s: its deadline passed while it was %s", m->run, pd_move_state(m));
            pd_x_fail(m, &e, "deadline");
        } else if (x->o.giving)
            pd_x_give_tick(m);
        else
            pd_x_take_tick(m);
    }
}

int64_t pd_xfer_next(const struct pd_xfer *x)
{
    int64_t next = x->state == X_GREETING ? x->opened + x->o.hello_us : x->state == X_OPEN && x->o.giving && !x->ready_told ? x->ready_by : INT64_MAX;
    if (x->unpolled && x->state == X_OPEN)
        return x->now;
    for (const struct pd_move *m = x->moves; m && x->state == X_OPEN; m = m->next) {
        int64_t t = INT64_MAX;
        if (m->state == M_CANCELLING)
            t = m->since + x->o.cancel_us;
        else if (m->state != M_OVER)
            t = x->o.giving ? pd_x_give_next(m) : pd_x_take_next(m);
        if (m->deadline && m->state < M_VERIFIED && m->deadline < t)
            t = m->deadline;
        if (m->draining && m->drain_until)
            t = m->drain_until;
        if (t < next)
            next = t;
    }
    return next;
}

/* ---- out ---- */

int pd_xfer_iov(struct pd_xfer *x, struct iovec *v, int max, int64_t now, struct pd_err *e)
{
    x->now = now;
    x->pulled = 0;
    while (x->state == X_OPEN && x->o.giving && !pd_out_has_chunk(&x->out) && pd_out_waiting(&x->out) < ROOM && x->pulled < PULL)
        if (pd_x_give_pull(x) <= 0)
            break;
    if (pd_out_has_chunk(&x->out) && !x->coding.since)
        x->coding.since = now;
    int n = pd_out_iov(&x->out, v, max);
    return n ? n : closed(x, e);
}

void pd_xfer_wrote(struct pd_xfer *x, size_t n, int64_t now)
{
    x->now = now;
    bool chunk = pd_out_has_chunk(&x->out);
    if (n && x->out.owner)
        for (struct pd_move *m = x->moves; m; m = m->next)
            if (m == x->out.owner)
                m->since = now;
    pd_out_wrote(&x->out, n);
    x->n.bytes_out += n;
    if (chunk && !pd_out_has_chunk(&x->out) && x->coding.since) {
        pd_codec_wrote(&x->coding.rule, x->coding.bytes, now - x->coding.since);
        x->coding.since = 0;
    }
}

/* An offer goes by what stands when it is made: the giver is not ready while the streams of its best way are still on theirs. */
static bool settled(struct pd_xfer *x)
{
    const char *why = NULL;
    char text[200];
    int up = x->o.giving && x->via[0]->up ? x->via[0]->up(x->path[0], &why) : 1;
    if (up == 0 && x->now < x->ready_by)
        return false;
    if (up == 0)
        snprintf(text, sizeof text, "%s: no stream of data stood within %lld ms", x->via[0]->scheme, (long long)(x->o.hello_us / 1000));
    else if (up < 0)
        snprintf(text, sizeof text, "%s: no stream of data stands: %s", x->via[0]->scheme, why);
    if (up <= 0) {
        pd_fail(&x->unused[pd_transport_number(x->via[0]->scheme)], PD_ETIME, "%s", text);
        pd_x_tell_via(x, '(', text);
    }
    return true;
}

bool pd_xfer_event(struct pd_xfer *x, struct pd_xfer_event *ev)
{
    move_free(x->dying);
    x->dying = NULL;
    if (x->state == X_OPEN && !x->ready_told && settled(x)) {
        x->ready_told = true;
        *ev = (struct pd_xfer_event){ .kind = PD_XE_READY, .err = x->advisory };
        return true;
    }
    for (struct pd_move *m = x->moves; m; m = m->next) {
        if ((m->draining || m->fencing) && (!m->tr->busy(m->path, m) || (m->drain_until && x->now >= m->drain_until)))
            drained(m);
        if (m->n_q && !(m->draining && m->q[0].last)) {
            *ev = m->q[0];
            memmove(m->q, m->q + 1, --m->n_q * sizeof *m->q);
            if (ev->last) {
                unlink_move(x, m);
                x->dying = m;
            }
            return true;
        }
    }
    if (x->state == X_CLOSED && !x->closed_told) {
        x->closed_told = true;
        *ev = (struct pd_xfer_event){ .kind = PD_XE_CLOSED, .last = true, .err = x->why };
        return true;
    }
    return false;
}

int pd_xfer_fds(struct pd_xfer *x, int sock, int64_t now, struct pd_err *e)
{
    int rc = closed(x, e);
    x->now = now;
    if (rc)
        return rc;
    for (uint32_t i = 0; i < x->n_via; i++) {
        const struct pd_transport *t = x->via[i];
        if (!(x->o.giving ? t->reg != NULL : t->poll != NULL))
            continue;
        if (x->dead[i].code) {
            *e = x->dead[i];
            return e->code;
        }
        struct pd_err why = { 0 };
        rc = x->o.giving ? t->reg(x->path[i], sock, x->o.pool, x->o.leases, &why) : t->poll(x->path[i], sock, &why);
        if (rc < 0) {
            x->dead[i] = why;
            if (e)
                *e = why;
        }
        if (!x->o.giving && rc)
            pd_x_take_mapped(x, rc < 0 ? &why : NULL);
        return rc < 0 || x->o.giving ? rc : 0;
    }
    return pd_fail(e, PD_EINCOMPAT, "no transport of this connection passes descriptors");
}

int pd_xfer_fd(const struct pd_xfer *x)
{
    for (uint32_t i = 0; i < x->n_via && x->state == X_OPEN; i++)
        if (x->via[i]->fd)
            return x->all >= 0 ? x->all : x->via[i]->fd(x->path[i]);
    return -1;
}

void pd_xfer_dialled(struct pd_xfer *x, int fd)
{
    struct pd_tcp_addr *a = &x->o.peer;
    a->n = sizeof a->a;
    x->o.dialled = x->o.tcp && !getpeername(fd, (struct sockaddr *)&a->a, &a->n);
}

int pd_xfer_stream(struct pd_xfer *x, int fd, struct pd_tls *tls, int64_t now, struct pd_err *e)
{
    x->now = now;
    if (x->state == X_GREETING && x->n_early < PD_XFER_STREAMS_MAX) {
        x->early[x->n_early].fd = fd;
        x->early[x->n_early++].tls = tls;
        return 0;
    }
    for (uint32_t i = 0; i < x->n_via && x->state == X_OPEN; i++)
        if (x->via[i]->stream)
            return x->via[i]->stream(x->path[i], fd, tls, e);
    pd_tls_free(tls);
    close(fd);
    return pd_fail(e, PD_EINCOMPAT, "no transport of this connection has streams of its own");
}

static void poll_once(struct pd_xfer *x, int64_t now, bool *more)
{
    for (uint32_t i = 0; i < x->n_via && x->state == X_OPEN; i++) {
        struct pd_err e = { 0 };
        int rc = x->via[i]->progress ? x->via[i]->progress(x->path[i], &e) : 0;
        if (rc < 0) {
            pd_x_fatal(x, rc, "%s", e.msg);
            return;
        }
        x->unpolled |= rc == 2;
        for (struct pd_move *m = x->moves; rc && m; m = m->next)
            if (m->tr == x->via[i] && (x->o.giving ? m->state < M_VERIFIED : m->state == M_MOVING || m->state == M_CLOSED))
                m->since = now;
        if (rc && !x->o.giving && x->via[i]->landed)
            pd_x_take_landed(x, i);
        else if (rc && !x->o.giving)
            *more |= pd_x_take_placed(x, i);
    }
}

void pd_xfer_poll(struct pd_xfer *x, int64_t now)
{
    bool more = true;
    x->now = now;
    x->pulled = 0;
    x->unpolled = false;
    while (more && x->state == X_OPEN && x->pulled < PULL) {
        more = false;
        poll_once(x, now, &more);
    }
    while (x->state == X_OPEN && x->o.giving && x->pulled < PULL && x->streams && pd_x_give_pull(x) > 0) {}
}

/* ---- small questions ---- */

bool pd_xfer_open(const struct pd_xfer *x) { return x->state == X_OPEN; }
const struct pd_hello *pd_xfer_peer(const struct pd_xfer *x) { return &x->theirs; }
const uint8_t *pd_xfer_conn(const struct pd_xfer *x, bool peers) { return peers ? x->theirs.conn : x->mine.conn; }
const char *pd_xfer_via(const struct pd_xfer *x) { return x->via_text; }
const char *pd_xfer_scheme(const struct pd_xfer *x, uint32_t i) { return i < x->n_via ? x->via[i]->scheme : NULL; }
const struct pd_hello *pd_xfer_own(const struct pd_xfer *x) { return &x->mine; }
struct pd_xfer_counts pd_xfer_counts(const struct pd_xfer *x) { return x->n; }
const char *pd_move_run(const struct pd_move *m) { return m->run; }
const uint8_t *pd_move_gen(const struct pd_move *m) { return m->gen; }
const uint8_t *pd_move_lease(const struct pd_move *m) { return m->x->o.giving || m->has_lease ? m->lease : NULL; }
const char *pd_move_scheme(const struct pd_move *m) { return m->tr ? m->tr->scheme : ""; }
int pd_xfer_say(struct pd_xfer *x, const void *rec, size_t n, struct pd_err *e)
{
    struct pd_err why = { 0 };
    int rc = pd_x_put(x, x->state == X_OPEN ? pd_buf_add(pd_out_buf(&x->out), rec, n, &why) : 0, &why);
    return rc ? closed(x, e) : 0;
}

void pd_move_set(struct pd_move *m, void *user) { m->user = user; }
void *pd_move_get(const struct pd_move *m) { return m->user; }

void pd_move_cancel(struct pd_move *m, const char *cause, int64_t now)
{
    struct pd_xfer *x = m->x;
    x->now = now;
    if (m->state == M_OVER || m->state == M_CANCELLING || x->state == X_CLOSED)
        return;
    if (x->o.giving) {
        if (pd_lease_revoke(x->o.leases, m->lease, cause, now, NULL) >= 0 && m->state == M_CANCELLING)  /* its fence has told the peer */
            return;
        pd_x_give_end(m);
    } else if (m->state == M_RELEASING)
        return;         /* nothing is left to stop */
    else if (!m->targeted)      /* what the peer still writes into is kept until it has acknowledged */
        pd_x_take_end(m);
    m->state = M_CANCELLING;
    m->since = now;
    pd_x_put_cancel(m, cause);
}
