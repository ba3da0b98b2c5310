#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "taker.h"

enum { LOOK_US = 20000,         /* for room, while something waits for it */
       EARLY_BYTES = 64 << 20,  /* of descriptors of offers that wait for their runs */
       DEAD = 1024,             /* offers that ended before their run came: remembered at most */
       UNACKED_US = 60000000, UNACKED_MOST = 1024 };

/* An offer whose run has not been heard of. m NULL: it has ended, for this reason. */
struct early {
    struct early *next;
    struct pd_move *m;
    struct pd_link *k;
    int64_t since;
    size_t bytes;               /* of its descriptor, while m */
    char run[PD_RUN_LEN + 1];
    uint8_t op[16];
    const char *kind;
    struct pd_err why;
};

/* What was verified and is in use, and the prefill worker may not know. */
struct unacked { struct unacked *next; char run[PD_RUN_LEN + 1]; uint8_t gen[PD_GEN_LEN], lease[PD_LEASE_ID_LEN]; bool has_lease; int64_t since; };

struct pd_taker {
    struct pd_pins pins;
    struct pd_loop *l;
    struct pd_taker_opts o;
    struct pd_taker_ops ops;
    struct pd_links links;
    struct pd_keyed expected;
    struct pd_expect *room, **last_room;
    struct early *early;
    uint32_t n_dead;
    size_t early_bytes;
    struct unacked *unacked, **last_unacked; uint32_t n_unacked;
    struct pd_timer *timer;
    struct pd_taker_counts n;
    struct pd_metric *m_taken[PD_TRANSPORTS], *m_bytes, *m_us, *m_held, *m_resumed;
    struct pd_metrics *metrics;
};

void pd_kv_in_put(struct pd_pool *p, struct pd_kv_in *kv)
{
    for (uint32_t i = 0; i < kv->n_blocks; i++)
        pd_pool_put(p, kv->blocks[i]);
    kv->n_blocks = 0;
}

void pd_kv_in_free(struct pd_pool *p, struct pd_kv_in *kv)
{
    pd_kv_in_put(p, kv);
    if (kv->pin)
        pd_pin_free(kv->pin);
    pd_free(kv->blocks);
    pd_arena_free(&kv->mem);
    *kv = (struct pd_kv_in){ .blocks = NULL };
}

static void set_timer(struct pd_taker *t)
{
    int64_t next = INT64_MAX, now = pd_mono_us();
    struct pd_err e;
    for (struct pd_expect *x = (void *)t->expected.first; x; x = (void *)x->node.next)
        if (!x->move && x->give_up < next)
            next = x->give_up;
    for (struct early *y = t->early; y; y = y->next)
        if (y->since + PD_TAKER_EARLY_US < next)
            next = y->since + PD_TAKER_EARLY_US;
    if (t->unacked && t->unacked->since + UNACKED_US < next)
        next = t->unacked->since + UNACKED_US;
    if (t->room && now + LOOK_US < next)
        next = now + LOOK_US;
    if (next == INT64_MAX)
        pd_timer_stop(t->timer);
    else if (pd_timer_at(t->timer, next, &e) < 0)
        pd_error("timer of expected KV: %s", e.msg);
}

/* ---- one expectation ---- */

static void leave_room(struct pd_taker *t, struct pd_expect *x)
{
    if (!x->wants_room)
        return;
    struct pd_expect **q = &t->room;
    while (*q != x)
        q = &(*q)->next_room;
    if (!(*q = x->next_room))
        t->last_room = q;
    x->wants_room = false;
    t->n.waiting--;
}

static void unpark(struct pd_expect *x)
{
    pd_import_free(x->parked);
    x->parked = NULL;
}

static void end(struct pd_taker *t, struct pd_expect *x)
{
    leave_room(t, x);
    unpark(x);
    if (x->move) {
        pd_move_set(x->move, NULL);
        t->n.moving -= x->accepted;
    }
    x->move = NULL;
    x->accepted = x->expected = false;
    memset(x->gen, 0, sizeof x->gen);
    pd_keyed_remove(&t->expected, x);
}

static void fail(struct pd_taker *t, struct pd_expect *x, const char *kind, const struct pd_err *why)
{
    static const struct pd_metric_about about = { .name = "pd_not_taken_total", .help = "KV that was expected and is computed here, by reason.",
                                                  .type = PD_COUNTER, .label = { "reason" } };
    struct pd_metric *m;
    if (!pd_metric_get(t->metrics, &about, (const char *const[PD_METRIC_LABELS]){ kind }, &m, NULL))
        pd_metric_add(m, 1);
    t->n.failed++;
    end(t, x);
    t->ops.failed(t->ops.ctx, x, kind, why);
}

static const char *kind_of(const struct pd_xfer_event *ev, const struct pd_expect *x)
{
    if (x && x->wants_room)
        return "out_of_blocks"; /* whoever lost patience */
    switch (ev->err.code) {
    case PD_EINCOMPAT: return "fingerprint_mismatch";
    case PD_ECORRUPT: return "integrity";
    case PD_ENOMEM: return "out_of_blocks";
    case PD_ETIME: return strstr(ev->err.msg, "lease") ? "lease_ended" : "transfer_timeout";
    default: return ev->kind == PD_XE_CANCELLED ? "lease_ended" : "kv_failed";
    }
}

static const char GONE[] = "prefill_worker_gone";

/* Its offer is over. The connection is lost (GONE): its prefill worker may come back and go on, or the router, which knows more, have another; else it is
 * computed here. */
static void offer_over(struct pd_expect *x, const char *kind, const struct pd_err *why)
{
    x->kind = kind;
    x->why = *why;
    x->give_up = pd_mono_us() + (kind == GONE ? PD_TAKER_WORD_US : 0);
}

static void connection_lost(struct pd_taker *t, struct pd_expect *x, const struct pd_err *why)
{
    leave_room(t, x);
    if (x->accepted)
        x->parked = pd_take_park(x->move);
    t->n.moving -= x->accepted;
    x->move = NULL;
    x->accepted = false;
    offer_over(x, GONE, why);
}

static uint32_t blocks_of(const struct pd_taker *t, const struct pd_kvdesc *d)
{
    uint32_t bs = (uint32_t)pd_pool_geom(t->o.rt->pool)->block_size;
    return (uint32_t)(((uint64_t)d->n_tokens + bs - 1) / bs);
}

/* The blocks that are here of what is offered, with a reference of each; NULL: none. KV of another numerics class, or version, is not mixed with ours. */
static uint32_t *held_of(const struct pd_taker *t, const struct pd_expect *x, const struct pd_kvdesc *d, uint32_t *n)
{
    uint32_t most = d->n_tokens / (uint32_t)pd_pool_geom(t->o.rt->pool)->block_size, *held;
    *n = 0;
    if (!t->o.rt->prefix || !most || memcmp(d->fp_sha, t->o.rt->fp.sha, sizeof d->fp_sha) || !(held = pd_calloc(most, sizeof *held, "blocks held", NULL)))
        return NULL;
    *n = pd_prefix_take(t->o.rt->prefix, &x->key, d->token_ids, d->n_tokens, held, most);
    return held;
}

static bool goes_on(const struct pd_expect *x, const struct pd_kvdesc *d) { return x->parked && !memcmp(x->gen, d->gen, sizeof x->gen); }

static void resumed(struct pd_taker *t)
{
    t->n.resumed++;
    pd_metric_add(t->m_resumed, 1);
}

/* false: others hold too many blocks, though there was room a moment ago: the thread has taken some meanwhile. */
static bool take_offer(struct pd_taker *t, struct pd_expect *x)
{
    int64_t now = pd_mono_us();
    const struct pd_kvdesc *d = pd_move_desc(x->move);
    bool begins = memcmp(x->gen, d->gen, sizeof x->gen) != 0, resumes = goes_on(x, d);
    struct pd_take how = { .in_place = t->o.in_place, .may_wait = true, .deadline = !begins ? x->deadline : x->transfer_us ? now + x->transfer_us : 0 };
    uint32_t *held = NULL;
    if (resumes)
        how.resume = x->parked;
    else
        how.held = held = held_of(t, x, d, &how.n_held);
    bool waits = pd_take(x->move, &how, now, NULL) == 1;        /* a failure is an event */
    for (uint32_t i = 0; i < how.n_held; i++)
        pd_pool_put(t->o.rt->pool, held[i]);
    pd_free(held);
    if (waits)
        return false;
    leave_room(t, x);
    if (resumes) {
        x->parked = NULL;
        resumed(t);
    }
    if (begins) {
        memcpy(x->gen, d->gen, sizeof x->gen);
        x->deadline = how.deadline;
        t->ops.started(t->ops.ctx, x, d);
    }
    x->accepted = true;
    t->n.moving++;
    pd_link_soon(x->link);
    return true;
}

/* Oldest first; none overtakes. */
void pd_taker_room(struct pd_taker *t)
{
    while (t->room) {
        struct pd_expect *x = t->room;
        struct pd_pool_stats s = pd_pool_stats(t->o.rt->pool);
        uint32_t want = blocks_of(t, pd_move_desc(x->move)), reserve = s.used ? t->ops.reserve(t->ops.ctx) : 0;
        if ((uint64_t)want + reserve > s.max - s.used && want <= s.max && s.used)
            break;
        if (!take_offer(t, x))      /* more than the whole pool: refused with the numbers */
            break;
    }
    set_timer(t);
}

static void offered(struct pd_taker *t, struct pd_expect *x, struct pd_move *m, struct pd_link *k)
{
    pd_move_set(m, x);
    x->move = m;
    x->link = k;
    if (goes_on(x, pd_move_desc(m))) {  /* it has its blocks */
        take_offer(t, x);
        return;
    }
    unpark(x);
    x->t_offer = pd_mono_us();
    x->wants_room = true;
    x->next_room = NULL;
    *t->last_room = x;
    t->last_room = &x->next_room;
    t->n.waiting++;
    pd_taker_room(t);
}

/* ---- offers that came before their run ---- */

static void refuse(struct pd_link *k, struct pd_move *m, int code, const char *why)
{
    pd_take_refuse(m, code, why, pd_mono_us());
    pd_link_soon(k);
}

static void drop_early(struct pd_taker *t, struct early **q)
{
    struct early *y = *q;
    *q = y->next;
    *(y->m ? &t->n.early : &t->n_dead) -= 1;
    t->early_bytes -= y->bytes;
    pd_free(y);
}

/* Its run may still come, and shall not wait for what has been. */
static void bury(struct pd_taker *t, struct early **q, const char *kind, const struct pd_err *why)
{
    struct early *y = *q;
    if (t->n_dead == DEAD) {
        drop_early(t, q);
        return;
    }
    t->n.early--;
    t->n_dead++;
    t->early_bytes -= y->bytes;
    y->bytes = 0;
    y->m = NULL;
    y->since = pd_mono_us();
    y->kind = kind;
    y->why = *why;
}

static void early_over(struct pd_taker *t, const struct pd_move *m, const char *kind, const struct pd_err *why)
{
    for (struct early **q = &t->early; *q; q = &(*q)->next)
        if ((*q)->m == m) {
            bury(t, q, kind, why);
            return;
        }
}

static void keep_early(struct pd_taker *t, struct pd_move *m, struct pd_link *k)
{
    const struct pd_kvdesc *d = pd_move_desc(m);
    size_t bytes = pd_move_memory(m);
    if (t->n.early >= PD_TAKER_EARLY || bytes > EARLY_BYTES - t->early_bytes) {
        char why[120];
        snprintf(why, sizeof why, "nobody has asked for this run here, and %u offers wait for theirs already", t->n.early);
        refuse(k, m, PD_ENOMEM, why);
        return;
    }
    struct early *y = pd_calloc(1, sizeof *y, "an offer", NULL);
    if (!y) {
        refuse(k, m, PD_ENOMEM, "out of memory");
        return;
    }
    *y = (struct early){ .next = t->early, .m = m, .k = k, .since = pd_mono_us(), .bytes = bytes };
    t->early_bytes += bytes;
    snprintf(y->run, sizeof y->run, "%s", d->run);
    memcpy(y->op, d->op, sizeof y->op);
    t->early = y;
    t->n.early++;
    set_timer(t);
}

/* ---- events ---- */

/* It was taken, and is not needed any more: its prefill worker, which lost the connection, has not heard of that. */
static bool is_released(struct pd_taker *t, const struct pd_kvdesc *d)
{
    for (struct pd_link *k = t->links.first; k; k = pd_link_next(k))
        if (pd_xfer_releasing(pd_link_xfer(k), d->run, d->gen))
            return true;
    for (struct unacked *u = t->unacked; u; u = u->next)
        if (!strcmp(u->run, d->run) && !memcmp(u->gen, d->gen, sizeof u->gen))
            return true;
    return false;
}

static void on_offer(struct pd_taker *t, struct pd_link *k, struct pd_move *m)
{
    const struct pd_kvdesc *d = pd_move_desc(m);
    struct pd_expect *x = pd_keyed_find(&t->expected, d->run, PD_RUN_LEN);
    if (pd_pins_offered(&t->pins, k, m))
        return;
    if (!x && is_released(t, d)) {
        pd_take_release(m, pd_mono_us());
        pd_link_soon(k);
    } else if (x && memcmp(x->op, d->op, sizeof x->op))
        refuse(k, m, PD_ECANCEL, "another op of this run is expected");
    else if (x && x->move)
        refuse(k, m, PD_ECANCEL, "this run is being taken from elsewhere");
    else if (x)
        offered(t, x, m, k);
    else if (t->ops.known(t->ops.ctx, d->run))
        refuse(k, m, PD_ECANCEL, "this run is served already");
    else
        keep_early(t, m, k);
}

static void on_taken(struct pd_taker *t, struct pd_expect *x, const struct pd_xfer_event *ev)
{
    uint32_t held = pd_take_held(ev->move), bs = (uint32_t)pd_pool_geom(t->o.rt->pool)->block_size;
    struct pd_kv_in kv = { .bytes = ev->bytes, .held_tokens = held * bs, .converted = pd_take_converts(ev->move), .us = pd_mono_us() - x->t_offer };
    struct pd_buf b = { 0 };
    struct pd_err e;
    int rc = pd_kvdesc_encode(pd_move_desc(ev->move), &b, &e);
    rc = rc ? rc : pd_kvdesc_decode(b.p, b.n, &kv.mem, &kv.desc, &e);
    pd_buf_free(&b);
    int by = pd_transport_number(pd_move_scheme(ev->move));
    if (!rc && !(kv.blocks = pd_take_blocks(ev->move, &kv.n_blocks)))
        rc = pd_fail(&e, PD_EFAIL, "its blocks were taken already");
    if (!rc && pd_take_in_place(ev->move))
        rc = pd_pin_new(&t->pins, x->link, ev->move, &kv.pin, &e);
    if (rc < 0) {
        if (!kv.pin)
            pd_take_release(ev->move, pd_mono_us());
        pd_kv_in_free(t->o.rt->pool, &kv);
        fail(t, x, rc == PD_ENOMEM ? "out_of_blocks" : "kv_failed", &e);
        return;
    }
    t->n.taken[by]++;
    t->n.bytes += ev->bytes;
    pd_metric_add(t->m_taken[by], 1);
    t->n.held_blocks += held;
    pd_metric_add(t->m_held, held);
    pd_metric_add(t->m_bytes, (int64_t)ev->bytes);
    pd_metric_observe(t->m_us, kv.us);
    end(t, x);
    t->ops.taken(t->ops.ctx, x, &kv);
}

/* It ended before we heard of its offer, or while that waited for its run: the run, if it is here, need not wait for it. */
static void never_came(struct pd_taker *t, const struct pd_xfer_event *ev, const char *kind)
{
    const struct pd_kvdesc *d = pd_move_desc(ev->move);
    struct pd_expect *x = pd_keyed_find(&t->expected, d->run, PD_RUN_LEN);
    early_over(t, ev->move, kind, &ev->err);
    if (x && !x->move && kind != GONE && !memcmp(x->op, d->op, sizeof x->op))
        fail(t, x, kind, &ev->err);
}

static void drop_unacked(struct pd_taker *t, struct unacked **q)
{
    struct unacked *u = *q;
    if (!(*q = u->next))
        t->last_unacked = q;
    t->n_unacked--;
    pd_free(u);
}

/* A prefill worker is there again: it is told what it may not know. What it does not acknowledge there is kept anew. */
static void commit(struct pd_taker *t, struct pd_link *k)
{
    const struct pd_hello *peer = pd_xfer_peer(pd_link_xfer(k));
    for (struct unacked **q = &t->unacked; pd_xfer_open(pd_link_xfer(k)) && *q;) {
        struct unacked *u = *q;
        if (memcmp(u->gen, peer->life, sizeof peer->life)) {
            q = &u->next;
            continue;
        }
        if (pd_xfer_commit(pd_link_xfer(k), u->run, u->gen, u->has_lease ? u->lease : NULL, pd_mono_us(), NULL) < 0)
            break;
        t->n.committed++;
        drop_unacked(t, q);
    }
    pd_link_soon(k);
}

static void keep_unacked(struct pd_taker *t, const char *run, const uint8_t *gen, const uint8_t *lease, const struct pd_link *not /* was told there */)
{
    struct unacked *u = pd_calloc(1, sizeof *u, "a release", NULL);
    if (!u)                     /* its lease runs out there */
        return;
    *u = (struct unacked){ .has_lease = lease != NULL, .since = pd_mono_us() };
    memcpy(u->run, run, sizeof u->run);
    memcpy(u->gen, gen, sizeof u->gen);
    if (lease)
        memcpy(u->lease, lease, sizeof u->lease);
    *t->last_unacked = u;
    t->last_unacked = &u->next;
    if (++t->n_unacked > UNACKED_MOST)
        drop_unacked(t, &t->unacked);
    for (struct pd_link *k = t->links.first; k; k = pd_link_next(k))   /* it may have come back before its old connection was seen to end */
        if (k != not)
            commit(t, k);
}

static void on_unpinned(void *ctx, const char *run, const uint8_t *gen, const uint8_t *lease)
{
    keep_unacked(ctx, run, gen, lease, NULL);
    set_timer(ctx);
}

static void on_event(void *ctx, struct pd_link *k, const struct pd_xfer_event *ev)
{
    struct pd_taker *t = ctx;
    struct pd_expect *x = ev->move ? pd_move_get(ev->move) : NULL;
    const struct pd_hello *peer = pd_xfer_peer(pd_link_xfer(k));
    if (ev->move && ev->last && pd_pins_ended(&t->pins, ev))
        return;
    switch (ev->kind) {
    case PD_XE_READY:
        if (ev->err.code)
            pd_warn("%.*s: %s: output may differ in the last bits", (int)peer->worker.n, peer->worker.p ? peer->worker.p : "", ev->err.msg);
        commit(t, k);
        break;
    case PD_XE_OFFERED: on_offer(t, k, ev->move); break;
    case PD_XE_TAKEN:
        if (x)
            on_taken(t, x, ev);
        else if (pd_pins_taken(&t->pins, ev->move))
            resumed(t);
        break;
    case PD_XE_FAILED: case PD_XE_CANCELLED: {
        bool lost = !pd_xfer_open(pd_link_xfer(k));
        const char *kind = lost ? GONE : kind_of(ev, x);
        if (x && lost)
            connection_lost(t, x, &ev->err);
        else if (x)
            fail(t, x, kind, &ev->err);
        else
            never_came(t, ev, kind);
        break;
    }
    case PD_XE_UNACKED: keep_unacked(t, pd_move_run(ev->move), pd_move_gen(ev->move), pd_move_lease(ev->move), k); break;
    case PD_XE_RELEASED:
        if (t->unacked)         /* there is room for one more */
            commit(t, k);
        break;
    case PD_XE_CLOSED:
        if (ev->err.code != PD_ECANCEL)
            pd_error("a transfer connection ends: %s", ev->err.msg);
        break;
    default: break;
    }
    set_timer(t);
}

static void on_timer(void *ctx)
{
    struct pd_taker *t = ctx;
    int64_t now = pd_mono_us();
    struct pd_err e;
    for (struct early **q = &t->early; *q;) {
        struct early *y = *q;
        if (now < y->since + PD_TAKER_EARLY_US) {
            q = &y->next;
        } else if (!y->m) {
            drop_early(t, q);
        } else {
            pd_fail(&e, PD_ETIME, "nobody asked for this run here");
            refuse(y->k, y->m, e.code, e.msg);
            bury(t, q, "kv_failed", &e);
        }
    }
    while (t->unacked && now >= t->unacked->since + UNACKED_US)
        drop_unacked(t, &t->unacked);
    for (struct pd_expect *x = (void *)t->expected.first, *next; x; x = next) {
        next = (void *)x->node.next;
        if (x->move || now < x->give_up)
            continue;
        pd_fail(&e, PD_ETIME, "no KV was offered in time");
        if (x->why.code)
            e = x->why;
        fail(t, x, x->why.code ? x->kind : "prefill_timeout", &e);
    }
    pd_taker_room(t);
}

/* ---- from outside ---- */

int pd_taker_expect(struct pd_taker *t, struct pd_expect *x, const char *run, struct pd_err *e)
{
    int rc = pd_keyed_add(&t->expected, x, run, PD_RUN_LEN, e);
    if (rc < 0)
        return rc;
    x->expected = true;
    for (struct early **q = &t->early; *q;) {
        struct early y = **q;
        if (strcmp(y.run, run)) {
            q = &(*q)->next;
            continue;
        }
        drop_early(t, q);
        bool same = !memcmp(y.op, x->op, sizeof x->op);
        if (y.m && (x->move || !same))
            refuse(y.k, y.m, PD_ECANCEL, "another op of this run is expected");
        else if (y.m)
            offered(t, x, y.m, y.k);
        else if (same && !x->move)
            offer_over(x, y.kind, &y.why);
    }
    set_timer(t);
    return 0;
}

void pd_taker_forget(struct pd_taker *t, struct pd_expect *x, const char *cause)
{
    struct pd_move *m = x->move;
    if (!x->expected)
        return;
    end(t, x);
    if (m) {
        pd_move_cancel(m, cause, pd_mono_us());
        pd_link_soon(x->link);
    }
    set_timer(t);
}

bool pd_taker_give_up_one(struct pd_taker *t)
{
    struct pd_expect *x = (void *)t->expected.last;
    struct pd_err e;
    while (x && !x->accepted && !x->parked)
        x = (void *)x->node.prev;
    if (!x)
        return false;
    if (x->move) {
        pd_move_cancel(x->move, "its blocks are needed", pd_mono_us());
        pd_link_soon(x->link);
    }
    pd_fail(&e, PD_ENOMEM, "its blocks were needed by runs that decode already (raise --kv-mem)");
    fail(t, x, "out_of_blocks", &e);
    return true;
}

void pd_taker_close(struct pd_taker *t) { pd_links_close(&t->links); }
struct pd_links *pd_taker_links(struct pd_taker *t) { return &t->links; }

struct pd_taker_counts pd_taker_counts(const struct pd_taker *t)
{
    struct pd_taker_counts n = t->n;
    n.links = t->links.n;
    n.pinned = t->pins.n;
    n.expected = (uint32_t)t->expected.n;
    return n;
}

int pd_taker_new(const struct pd_taker_opts *o, const struct pd_taker_ops *ops, struct pd_taker **out, struct pd_err *e)
{
    struct pd_taker *t = pd_calloc(1, sizeof *t, "what expects KV", e);
    if (!t)
        return PD_ENOMEM;
    t->o = *o;
    t->ops = *ops;
    t->last_room = &t->room;
    t->last_unacked = &t->unacked;
    pd_pins_init(&t->pins, on_unpinned, t);
    *out = t;
    return 0;
}

int pd_taker_on(struct pd_taker *t, struct pd_loop *l, struct pd_metrics *m, struct pd_err *e)
{
    const struct pd_metric_about taken = { .name = "pd_taken_total", .help = "KV taken and verified.", .type = PD_COUNTER, .label = { "scheme" } },
        bytes = { .name = "pd_taken_bytes_total", .help = "Bytes of KV taken.", .type = PD_COUNTER },
        held = { .name = "pd_held_blocks_total", .help = "Blocks of offered KV that were here already, and were not sent.", .type = PD_COUNTER },
        resumed = { .name = "pd_resumed_total", .help = "Transfers that went on over another connection.", .type = PD_COUNTER },
        us = { .name = "pd_transfer_seconds", .help = "From the offer of KV to its verification.", .type = PD_HISTOGRAM, .scale = 6,
               .bounds = pd_latency_bounds, .n_bounds = pd_n_latency_bounds };
    t->l = l;
    t->metrics = m;
    const struct pd_taker_opts *o = &t->o;
    t->links.o = (struct pd_links_opts){ .l = l, .max_record = o->max_record, .event = on_event, .ctx = t,
        .xfer = { .via = o->via, .worker = o->rt->worker, .domain = o->rt->domain, .epoch = o->rt->epoch,
                  .fp_fields = { o->rt->fp.map.p, o->rt->fp.map.n }, .pool = o->rt->pool, .convert = o->rt->convert } };
    int rc = pd_timer_new(l, on_timer, t, &t->timer, e);
    for (int i = 0; !rc && i < PD_TRANSPORTS; i++)
        rc = pd_metric_get(m, &taken, (const char *const[PD_METRIC_LABELS]){ pd_transports[i]->scheme }, &t->m_taken[i], e);
    rc = rc ? rc : pd_metric_get(m, &bytes, (const char *const[PD_METRIC_LABELS]){ NULL }, &t->m_bytes, e);
    rc = rc ? rc : pd_metric_get(m, &held, (const char *const[PD_METRIC_LABELS]){ NULL }, &t->m_held, e);
    rc = rc ? rc : pd_metric_get(m, &resumed, (const char *const[PD_METRIC_LABELS]){ NULL }, &t->m_resumed, e);
    return rc ? rc : pd_metric_get(m, &us, (const char *const[PD_METRIC_LABELS]){ NULL }, &t->m_us, e);
}

void pd_taker_free(struct pd_taker *t)
{
    if (!t)
        return;
    pd_links_free(&t->links);
    while (t->early)
        drop_early(t, &t->early);
    while (t->unacked)
        drop_unacked(t, &t->unacked);
    pd_keyed_free(&t->expected);
    pd_timer_free(t->timer);
    pd_pins_free(&t->pins);
    pd_free(t);
}
