#include <stdio.h>
#include "../base/hash.h"
#include "../base/proc.h"
#include "lease.h"

#define MAX_DEFAULT 4096
#define NOWHERE UINT32_MAX
#define ASKING (1u << 31)                /* the readers are being asked: a fence that is done at once must not end the lease under the one who asks */
_Static_assert(PD_LEASE_READERS < 31, "a bit a reader, and ASKING");

struct lease {
    uint32_t serial;                    /* of the lease that is, or was last, in this slot; 0: none yet */
    uint32_t at;                        /* place in the heap, NOWHERE when not live (or cancelling) */
    uint32_t next_free;
    enum pd_lease_state state;          /* FREE, or live; while cancelling, `end` says what it will be */
    enum pd_lease_state end;            /* how the last one ended */
    uint8_t gen[PD_GEN_LEN];
    char run[PD_RUN_LEN + 1];
    uint32_t *blocks, n_blocks;
    int64_t granted, expires, ttl;
    struct pd_reader reader[PD_LEASE_READERS];
    uint32_t n_readers, unfenced;       /* unfenced: a bit a reader, whose fence is pending, and ASKING */
    bool was_read, reaped, let_go;
    const char *cause;
};

struct pd_leases {
    struct pd_pool *pool;
    pd_lease_told_fn *told;
    void *ctx;
    uint8_t life[8];
    struct pd_control control;
    uint32_t max, used /* slots ever used */, free /* list */, n_heap;
    struct lease *slot;                 /* [max] */
    uint32_t *heap;                     /* [max] slots by expiry */
    struct pd_lease_counts n;
};

static const char *const state_name[] = { "free", "reserved", "filling", "published", "reading", "cancelling", "released", "expired", "revoked" };
static const char *const step_name[] = { "lease_granted", "lease_read", "lease_renewed", "lease_released", "lease_expired", "lease_revoked", "reaped" };
const char *pd_lease_state_name(enum pd_lease_state s) { return state_name[s]; }
const char *pd_lease_step_name(enum pd_lease_step s) { return step_name[s]; }

static void put_be32(uint8_t *p, uint32_t v) { for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> (24 - 8 * i)); }
static uint32_t get_be32(const uint8_t *p) { return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3]; }
uint32_t pd_lease_slot(const uint8_t id[PD_LEASE_ID_LEN]) { return get_be32(id + 8); }

static void id_of(const struct pd_leases *l, const struct lease *s, uint8_t id[PD_LEASE_ID_LEN])
{
    memcpy(id, l->life, 8);
    put_be32(id + 8, (uint32_t)(s - l->slot));
    put_be32(id + 12, s->serial);
}

static bool live(const struct lease *s) { return s->state >= PD_LEASE_RESERVED && s->state <= PD_LEASE_READING; }

static uint32_t active(const struct lease *s)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n_readers; i++)
        n += !s->reader[i].waits;
    return n;
}

static void info_of(const struct pd_leases *l, const struct lease *s, struct pd_lease_info *i)
{
    *i = (struct pd_lease_info){ .state = s->state, .readers = active(s), .n_blocks = s->n_blocks, .blocks = s->blocks, .granted_us = s->granted,
                                .expires_us = s->expires,
                                 .ttl_us = s->ttl, .was_read = s->was_read, .cause = s->cause };
    id_of(l, s, i->id);
    memcpy(i->gen, s->gen, sizeof i->gen);
    memcpy(i->run, s->run, sizeof i->run);
}

static void tell(struct pd_leases *l, const struct lease *s, enum pd_lease_step step)
{
    struct pd_lease_info i;
    if (!l->told)
        return;
    info_of(l, s, &i);
    l->told(l->ctx, step, &i);
}

/* ---- the heap: slots by expiry ---- */

static void put_at(struct pd_leases *l, uint32_t at, uint32_t slot)
{
    l->heap[at] = slot;
    l->slot[slot].at = at;
}

/* Bring the slot at `at` to where its expiry belongs. */
static void settle(struct pd_leases *l, uint32_t at)
{
    uint32_t slot = l->heap[at];
    int64_t when = l->slot[slot].expires;
    while (at && l->slot[l->heap[(at - 1) / 2]].expires > when) {
        put_at(l, at, l->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (;;) {
        uint32_t c = 2 * at + 1;
        if (c + 1 < l->n_heap && l->slot[l->heap[c + 1]].expires < l->slot[l->heap[c]].expires)
            c++;
        if (c >= l->n_heap || l->slot[l->heap[c]].expires >= when)
            break;
        put_at(l, at, l->heap[c]);
        at = c;
    }
    put_at(l, at, slot);
}

static void heap_add(struct pd_leases *l, uint32_t slot)
{
    put_at(l, l->n_heap++, slot);
    settle(l, l->n_heap - 1);
}

static void heap_del(struct pd_leases *l, struct lease *s)
{
    uint32_t at = s->at;
    if (at == NOWHERE)
        return;
    s->at = NOWHERE;
    if (at != --l->n_heap) {
        put_at(l, at, l->heap[l->n_heap]);
        settle(l, at);
    }
}

/* ---- the ledger ---- */

int pd_leases_new(const struct pd_leases_opts *o, struct pd_leases **out, struct pd_err *e)
{
    uint8_t gen[PD_GEN_LEN];
    int rc = pd_gen_new(gen, e);        /* for the life in its first half */
    if (rc)
        return rc;
    struct pd_leases *l = pd_calloc(1, sizeof *l, "leases", e);
    if (!l)
        return PD_ENOMEM;
    *l = (struct pd_leases){ .pool = o->pool, .told = o->told, .ctx = o->ctx, .max = o->max ? o->max : MAX_DEFAULT, .free = NOWHERE, .control.fd = -1 };
    memcpy(l->life, gen, 8);
    rc = PD_ENOMEM;
    if (!(l->slot = pd_calloc(l->max, sizeof *l->slot, "lease slots", e)) || !(l->heap = pd_calloc(l->max, sizeof *l->heap, "lease heap", e)) ||
        (rc = pd_control_new(l->max, &l->control, e))) {
        pd_leases_free(l);
        return rc;
    }
    *out = l;
    return 0;
}

static void drop_blocks(struct pd_leases *l, struct lease *s)
{
    for (uint32_t i = 0; i < s->n_blocks; i++)
        pd_pool_put(l->pool, s->blocks[i]);
    pd_free(s->blocks);
    s->blocks = NULL;
    s->n_blocks = 0;
}

void pd_leases_free(struct pd_leases *l)
{
    if (!l)
        return;
    for (uint32_t i = 0; i < l->used; i++) {
        if (l->slot[i].state != PD_LEASE_FREE)
            pd_control_set(&l->control, i, NULL);
        drop_blocks(l, &l->slot[i]);
    }
    pd_control_close(&l->control);
    pd_free(l->slot);
    pd_free(l->heap);
    pd_free(l);
}

int pd_leases_control_fd(const struct pd_leases *l) { return l->control.fd; }

/* The slot of an id. 0: *s is live or cancelling; 1: that lease has ended; < 0. */
static int find(const struct pd_leases *l, const uint8_t *id, struct lease **s, struct pd_err *e)
{
    char hex[2 * PD_LEASE_ID_LEN + 1];
    uint32_t slot = pd_lease_slot(id), serial = get_be32(id + 12);
    pd_hex(id, PD_LEASE_ID_LEN, hex);
    if (memcmp(id, l->life, 8))
        return pd_fail(e, PD_ETIME, "lease %s is of another life of this worker: what it covered is gone", hex);
    if (slot >= l->used || !serial || serial > l->slot[slot].serial)
        return pd_fail(e, PD_ECORRUPT, "lease %s was never given", hex);
    *s = &l->slot[slot];
    return serial != (*s)->serial || (*s)->state == PD_LEASE_FREE;
}

static int find_live(const struct pd_leases *l, const uint8_t *id, const uint8_t *gen, struct lease **s, struct pd_err *e)
{
    char hex[2 * PD_LEASE_ID_LEN + 1];
    int rc = find(l, id, s, e);
    if (rc < 0)
        return rc;
    pd_hex(id, PD_LEASE_ID_LEN, hex);
    if (rc || !live(*s))
        return pd_fail(e, PD_ETIME, "lease %s has ended (%s)", hex,
                       rc && get_be32(id + 12) != (*s)->serial ? "long ago" : state_name[rc ? (*s)->end : (*s)->state]);
    if (gen && memcmp(gen, (*s)->gen, PD_GEN_LEN))
        return pd_fail(e, PD_ETIME, "lease %s is of another generation", hex);
    return 0;
}

int pd_lease_grant(struct pd_leases *l, const char *run, const uint8_t gen[PD_GEN_LEN], const uint32_t *blocks, uint32_t n, int64_t ttl_us, int64_t now,
                   uint8_t id[PD_LEASE_ID_LEN], struct pd_err *e)
{
    uint32_t slot = l->free != NOWHERE ? l->free : l->used;
    if (slot >= l->max)
        return pd_fail(e, PD_ENOMEM, "run %s: no lease left: %u are given (consumers do not release, or more run at once than --leases)", run, l->n.live);
    struct lease *s = &l->slot[slot];
    uint32_t *own = pd_calloc(n, sizeof *own, "blocks of a lease", e);
    if (!own)
        return PD_ENOMEM;
    if (slot == l->used)
        l->used++;
    else
        l->free = s->next_free;
    uint32_t serial = s->serial + 1 ? s->serial + 1 : 1;
    *s = (struct lease){ .serial = serial, .state = PD_LEASE_RESERVED, .blocks = own, .n_blocks = n, .granted = now,
                        .ttl = ttl_us > 0 ? ttl_us : PD_LEASE_TTL_US };
    s->expires = now + s->ttl;
    memcpy(s->gen, gen, sizeof s->gen);
    snprintf(s->run, sizeof s->run, "%s", run);
    for (uint32_t i = 0; i < n; i++)
        pd_pool_ref(l->pool, own[i] = blocks[i]);
    heap_add(l, slot);
    pd_control_set(&l->control, slot, gen);
    l->n.granted++;
    l->n.live++;
    l->n.unread++;
    l->n.live_blocks += n;
    l->n.unread_blocks += n;
    id_of(l, s, id);
    tell(l, s, PD_LEASE_STEP_GRANTED);
    return 0;
}

static int go_on(struct pd_leases *l, const uint8_t *id, enum pd_lease_state from, enum pd_lease_state to, struct pd_err *e)
{
    struct lease *s;
    int rc = find_live(l, id, NULL, &s, e);
    if (rc)
        return rc;
    if (s->state != from)
        return pd_fail(e, PD_EFAIL, "run %s: its lease is %s, not %s", s->run, state_name[s->state], state_name[from]);
    s->state = to == PD_LEASE_PUBLISHED && active(s) ? PD_LEASE_READING : to;
    return 0;
}

int pd_lease_fill(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], struct pd_err *e) { return go_on(l, id, PD_LEASE_RESERVED, PD_LEASE_FILLING, e); }
int pd_lease_publish(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], struct pd_err *e) { return go_on(l, id, PD_LEASE_FILLING, PD_LEASE_PUBLISHED, e); }

int pd_lease_read(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], const uint8_t gen[PD_GEN_LEN], const struct pd_reader *who, int64_t now,
                  struct pd_err *e)
{
    struct lease *s;
    int rc = find_live(l, id, gen, &s, e);
    if (rc)
        return rc;
    if (now >= s->expires)
        return pd_fail(e, PD_ETIME, "run %s: its lease expired %lld us ago", s->run, (long long)(now - s->expires));
    if (s->state == PD_LEASE_RESERVED)
        return pd_fail(e, PD_EFAIL, "run %s: its lease is reserved: there is nothing to read yet", s->run);
    uint32_t at = 0;
    while (at < s->n_readers && !(s->reader[at].waits && s->reader[at].ctx == who->ctx))
        at++;
    if (at == PD_LEASE_READERS)
        return pd_fail(e, PD_ENOMEM, "run %s: its lease has %d readers already", s->run, PD_LEASE_READERS);
    s->reader[at] = *who;
    if (at == s->n_readers)
        s->n_readers++;
    if (who->waits)
        return 0;
    if (s->state == PD_LEASE_PUBLISHED)
        s->state = PD_LEASE_READING;
    if (!s->was_read) {
        s->was_read = true;
        l->n.unread--;
        l->n.unread_blocks -= s->n_blocks;
    }
    tell(l, s, PD_LEASE_STEP_READ);
    return 0;
}

static bool drop_reader(struct lease *s, const void *ctx)
{
    for (uint32_t i = 0; i < s->n_readers; i++)
        if (!ctx || s->reader[i].ctx == ctx) {
            s->reader[i] = s->reader[--s->n_readers];
            if (!active(s) && s->state == PD_LEASE_READING)
                s->state = PD_LEASE_PUBLISHED;
            return true;
        }
    return false;
}

/* The blocks go, the slot is free: only after every fence. */
static void over(struct pd_leases *l, struct lease *s)
{
    static const enum pd_lease_step step[] = { [PD_LEASE_RELEASED] = PD_LEASE_STEP_RELEASED, [PD_LEASE_EXPIRED] = PD_LEASE_STEP_EXPIRED,
                                              [PD_LEASE_REVOKED] = PD_LEASE_STEP_REVOKED };
    bool reaped = s->reaped;
    l->n.cancelling--;
    s->state = s->end;
    l->n.live--;
    l->n.live_blocks -= s->n_blocks;
    if (!s->was_read) {
        l->n.unread--;
        l->n.unread_blocks -= s->n_blocks;
    }
    *(s->end == PD_LEASE_RELEASED ? &l->n.released : s->end == PD_LEASE_EXPIRED ? &l->n.expired : &l->n.revoked) += 1;
    tell(l, s, step[s->end]);
    if (reaped) {
        l->n.reaped++;
        tell(l, s, PD_LEASE_STEP_REAPED);
    }
    drop_blocks(l, s);
    s->state = PD_LEASE_FREE;
    s->next_free = l->free;
    l->free = (uint32_t)(s - l->slot);
}

/* Fence first. true: over; false: a reader's fence is pending. */
static bool finish(struct pd_leases *l, struct lease *s, enum pd_lease_state how, const char *cause)
{
    uint8_t id[PD_LEASE_ID_LEN];
    heap_del(l, s);
    s->end = how;
    s->cause = cause;
    pd_control_set(&l->control, (uint32_t)(s - l->slot), NULL);
    id_of(l, s, id);
    s->unfenced = ASKING;
    s->state = PD_LEASE_CANCELLING;
    l->n.cancelling++;
    for (uint32_t i = 0; i < s->n_readers; i++)
        if (s->reader[i].fence && !s->reader[i].fence(s->reader[i].ctx, id))
            s->unfenced |= 1u << i;
    s->unfenced &= ~ASKING;
    if (s->unfenced)
        return false;
    over(l, s);
    return true;
}

void pd_lease_unread(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], const void *ctx)
{
    struct lease *s;
    if (find(l, id, &s, NULL) != 0 || !live(s))
        return;
    drop_reader(s, ctx);
    if (s->let_go && !active(s))
        finish(l, s, PD_LEASE_RELEASED, NULL);
}

int pd_lease_renew(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], const uint8_t gen[PD_GEN_LEN], int64_t ttl_us, int64_t now, struct pd_err *e)
{
    struct lease *s;
    int rc = find_live(l, id, gen, &s, e);
    if (rc)
        return rc;
    if (now >= s->expires)      /* the sweep is on its way: too late is too late */
        return pd_fail(e, PD_ETIME, "run %s: its lease expired %lld us ago", s->run, (long long)(now - s->expires));
    int64_t until = now + (ttl_us > 0 && ttl_us < s->ttl ? ttl_us : s->ttl);
    if (until > s->expires) {
        s->expires = until;
        settle(l, s->at);
    }
    tell(l, s, PD_LEASE_STEP_RENEWED);
    return 0;
}

int pd_lease_release(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], const void *ctx, int64_t now, struct pd_err *e)
{
    struct lease *s;
    int rc = find(l, id, &s, e);
    if (rc)
        return rc;
    if (!live(s))
        return 1;
    drop_reader(s, ctx);
    if (!s->n_readers)
        finish(l, s, PD_LEASE_RELEASED, NULL);
    return 0;
}

int pd_lease_let_go(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], int64_t now, struct pd_err *e)
{
    struct lease *s;
    int rc = find(l, id, &s, e);
    if (rc)
        return rc;
    if (!live(s))
        return 1;
    s->let_go = true;
    if (!active(s))
        finish(l, s, PD_LEASE_RELEASED, NULL);
    return 0;
}

int pd_lease_revoke(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], const char *cause, int64_t now, struct pd_err *e)
{
    struct lease *s;
    int rc = find(l, id, &s, e);
    if (rc)
        return rc;
    if (!live(s))
        return 2;
    return finish(l, s, PD_LEASE_REVOKED, cause) ? 0 : 2;
}

void pd_lease_fenced(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], const void *ctx, int64_t now)
{
    struct lease *s;
    if (find(l, id, &s, NULL) != 0 || s->state != PD_LEASE_CANCELLING)
        return;
    for (uint32_t i = 0; i < s->n_readers; i++)
        if (s->reader[i].ctx == ctx)
            s->unfenced &= ~(1u << i);
    if (!s->unfenced)
        over(l, s);
}

int64_t pd_leases_next(const struct pd_leases *l) { return l->n_heap ? l->slot[l->heap[0]].expires : INT64_MAX; }

uint32_t pd_leases_sweep(struct pd_leases *l, int64_t now)
{
    uint32_t n = 0;
    for (; l->n_heap && l->slot[l->heap[0]].expires <= now; n++)
        finish(l, &l->slot[l->heap[0]], PD_LEASE_EXPIRED, "not renewed in time");
    return n;
}

uint32_t pd_leases_reconcile(struct pd_leases *l, bool (*alive)(pid_t pid, uint64_t start), int64_t now)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < l->used; i++) {
        struct lease *s = &l->slot[i];
        bool died = false;
        if (!live(s) && s->state != PD_LEASE_CANCELLING)
            continue;
        for (uint32_t r = s->n_readers; r-- > 0;) {
            if (!s->reader[r].pid || (alive ? alive : pd_proc_alive)(s->reader[r].pid, s->reader[r].start))
                continue;
            died = true;
            if (s->state == PD_LEASE_CANCELLING)        /* a dead reader's fence is done */
                s->unfenced &= ~(1u << r);
            else if (s->n_readers > 1)
                drop_reader(s, s->reader[r].ctx);
            else {
                s->reaped = true;
                finish(l, s, PD_LEASE_REVOKED, "its reader died");
                n++;
                break;
            }
        }
        if (died && s->state == PD_LEASE_CANCELLING && !s->unfenced) {
            if (!s->reaped)
                n++;
            s->reaped = true;
            over(l, s);
        }
    }
    return n;
}

uint32_t pd_leases_revoke_all(struct pd_leases *l, const char *cause, int64_t now)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < l->used; i++)
        if (live(&l->slot[i])) {
            finish(l, &l->slot[i], PD_LEASE_REVOKED, cause);
            n++;
        }
    return n;
}

struct pd_lease_counts pd_leases_counts(const struct pd_leases *l) { return l->n; }

bool pd_lease_info(const struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], struct pd_lease_info *out)
{
    struct lease *s;
    if (find(l, id, &s, NULL) != 0)
        return false;
    info_of(l, s, out);
    return true;
}

bool pd_leases_each(const struct pd_leases *l, uint32_t *at, struct pd_lease_info *out)
{
    for (; *at < l->used; ++*at)
        if (l->slot[*at].state != PD_LEASE_FREE) {
            info_of(l, &l->slot[(*at)++], out);
            return true;
        }
    return false;
}
