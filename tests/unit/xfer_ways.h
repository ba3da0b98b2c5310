/* The ways that KV goes between two ends, for tests that do the same by each of them: two ends in one process (xfer_fixture.h), and what is on its way between
 * them as units (records, or pieces of a data stream) that can be damaged before they pass on. */
#ifndef XFER_WAYS_H
#define XFER_WAYS_H
#include <dirent.h>
#include "xfer_fixture.h"

enum way { INLINE, UNIX /* the same over a real socket */, SHM, PLACE, TCP, TLS, RDMA, WAYS };
static const char *const way_name[WAYS] = { "inline", "unix", "shm", "shm in place", "tcp", "tls", "rdma" };
static const char *const way_via[WAYS] = { "inline", "inline", "shm", "shm", "tcp", "tcp", "rdma" };
static struct pd_keys *way_keys;        /* of TLS */
static inline bool way_streams(enum way y) { return y == TCP || y == TLS; }
static inline bool way_sums(enum way y) { return y == SHM || y == PLACE || y == RDMA; }       /* `done` brings checksums, and payload lies in memory */

static inline int fds_of(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

static inline void way_ends(struct xf *w, enum way y)
{
    struct pd_xfer_opts o = { .epoch = 3, .tcp = way_streams(y), .streams = 1, .via = y == RDMA ? "rdma,inline" : NULL }, t = { .epoch = 3, .via = o.via };
    w->wired = y == UNIX;
    w->tapped = way_streams(y);
    w->no_fds = y == RDMA;
    w->patience_ms = y == RDMA ? 1500 : 0;
    w->take.in_place = y == PLACE;
    xf_keys = y == TLS ? way_keys : NULL;
    xf_device[0] = y == RDMA ? "rxe_a" : NULL;
    xf_device[1] = y == RDMA ? "rxe_b" : NULL;
    memset(w->got, 0, sizeof w->got);
    memset(w->last, 0, sizeof w->last);
    xf_open_ends(w, &o, &t);
    xf_pump(w);
    if (!w->got[0][PD_XE_READY] || (y > UNIX && strncmp(pd_xfer_via(w->g), way_via[y], strlen(way_via[y]))))
        fail_msg("%s: not ready by it: %s; %s", way_name[y], pd_xfer_via(w->g), w->last[0].err.msg);
}

static inline void way_open(struct xf *w, enum way y)
{
    xf_world(w);
    way_ends(w, y);
}

/* Offered anew: after a new connection (its lease may live on), or as another generation. */
static inline void way_give(struct xf *w, enum way y, bool regen)
{
    struct pd_err e = { 0 };
    struct pd_give g = { .desc = &w->f.d, .blocks = w->f.blocks, .chunk_blocks = XF_CHUNK, .via = way_via[y] };
    struct pd_lease_info i;
    if (regen) {
        pd_leases_revoke_all(w->leases, "again", w->now);
        xf_pump(w);
        xf_regen(w);
    }
    if (!regen && pd_lease_info(w->leases, w->lease, &i) && i.state != PD_LEASE_CANCELLING) {
        memcpy(g.lease, w->lease, 16);
        if (pd_give(w->g, &g, w->now, &w->gm, &e))
            fail_msg("%s: %s", way_name[y], e.msg);
    } else if (xf_give(w, way_via[y], &e))
        fail_msg("%s: %s", way_name[y], e.msg);
    assert_string_equal(pd_move_scheme(w->gm), way_via[y]);
}

static inline void way_finish(struct xf *w)
{
    struct pd_err e = { 0 };
    if (pd_give_finish(w->gm, &w->f.d, &e))
        fail_msg("%s", e.msg);
}

static inline void way_begin(struct xf *w, enum way y)
{
    way_open(w, y);
    way_give(w, y, false);
    xf_pump(w);
    assert_non_null(w->tm);
    assert_string_equal(pd_move_state(w->tm), "receiving");
}

/* What was taken is used no more. */
static inline void way_used(struct xf *w)
{
    xf_drop_blocks(w);
    if (w->tm)
        pd_take_release(w->tm, w->now);
    xf_pump(w);
}

/* The run is given once more and arrives as it is: over the same connection if it lives, else over a new one, going on with what was verified (resume) where the
 * lease lives too. */
static inline void way_again(struct xf *w, enum way y, const char *what)
{
    bool open = pd_xfer_open(w->g) && pd_xfer_open(w->t), resume = !open && w->parked;
    struct pd_lease_info i;
    memset(w->lose, 0, sizeof w->lose);
    memset(w->twice, 0, sizeof w->twice);
    w->dam = w->manual = false;
    way_used(w);
    if (!open) {
        pd_xfer_lost(w->g, "cut", w->now);
        pd_xfer_lost(w->t, "cut", w->now);
        xf_events(w);
        resume = w->parked != NULL && pd_lease_info(w->leases, w->lease, &i);
        xf_close_ends(w);
        if (!resume) {
            pd_import_free(w->parked);
            w->parked = NULL;
        }
        way_ends(w, y);
        w->take.resume = w->parked;
        w->parked = NULL;
    }
    uint32_t taken = w->got[1][PD_XE_TAKEN];
    way_give(w, y, !resume);
    xf_pump(w);
    w->take.resume = NULL;
    if (!w->gm)
        fail_msg("%s: %s: refused when it was tried again: %s; %s", way_name[y], what, w->last[1].err.msg, w->last[0].err.msg);
    way_finish(w);
    xf_pump(w);
    if (w->got[1][PD_XE_TAKEN] != taken + 1 || !xf_same(w))
        fail_msg("%s: %s: tried again it did not arrive: %s; %s", way_name[y], what, w->last[1].err.msg, w->last[0].err.msg);
    way_used(w);
    if (pd_xfer_counts(w->g).moves + pd_xfer_counts(w->t).moves)
        fail_msg("%s: %s: tried again it does not end: %s", way_name[y], what, w->gm ? pd_move_state(w->gm) : "");
}

/* ---- what is on its way ---- */

struct unit { uint8_t *p; size_t n; bool payload; };
struct load { struct unit u[300]; int n, n_payload, payload[300]; /* places in u */ };

static inline void load_add(struct load *l, const uint8_t *p, size_t n, bool payload)
{
    assert_true(l->n < 300);
    l->u[l->n] = (struct unit){ malloc(n), n, payload };
    memcpy(l->u[l->n].p, p, n);
    if (payload)
        l->payload[l->n_payload++] = l->n;
    l->n++;
}

static inline void load_free(struct load *l)
{
    for (int i = 0; i < l->n; i++)
        free(l->u[i].p);
    l->n = l->n_payload = 0;
}

/* All that the giving end has to say is said, and has not come to the taker. */
static inline void hold_back(struct xf *w)
{
    for (int idle = 0; idle < 3;) {
        bool any = xf_flush(w, false) | xf_net(w);
        xf_events(w);
        idle = any ? 0 : idle + 1;
        if (!any && w->tcp)
            xf_news(w);
    }
    for (int64_t until = pd_mono_us() + w->patience_ms * 100; pd_mono_us() < until;) {        /* writes land */
        pd_xfer_poll(w->g, w->now);
        pd_xfer_poll(w->t, w->now);
        xf_flush(w, false);
    }
}

/* It, in units: of a data stream chunks, or records of TLS; else records of the protocol. */
static inline void gather(struct xf *w, enum way y, struct load *l)
{
    struct pd_buf *b = way_streams(y) ? &w->dammed : &w->to_t;
    *l = (struct load){ .n = 0 };
    hold_back(w);
    for (size_t at = 0, n; at < b->n; at += n) {
        struct pd_frame_scan s = { 0 };
        const uint8_t *p = b->p + at;
        if (y == TCP)
            n = 24 + ((size_t)p[12] << 24 | (size_t)p[13] << 16 | (size_t)p[14] << 8 | p[15]);
        else if (y == TLS)
            n = 5 + ((size_t)p[3] << 8 | p[4]);
        else
            assert_int_equal(pd_frame_next(&s, p, b->n - at, PD_MAX_RECORD_DEFAULT, &n, NULL), 1);
        assert_true(n <= b->n - at);
        load_add(l, p, n, way_streams(y) || pd_kind_of(p, n) == (way_sums(y) ? PD_K_DONE : PD_K_CHUNK));
    }
    assert_true(l->n_payload > 1);
    b->n = 0;
}

/* It passes on, in this order. */
static inline void pass_on(struct xf *w, enum way y, struct load *l)
{
    for (int i = 0; i < l->n; i++)
        if (!way_streams(y))
            pd_buf_add(&w->to_t, l->u[i].p, l->u[i].n, NULL);
        else if (l->u[i].n)
            send(w->tap[0].b, l->u[i].p, l->u[i].n, MSG_NOSIGNAL);
    w->dam = false;
    load_free(l);
}

/* K or V of a chunk's first block, where it lies: at the giver's for shm; at the taker's for rdma, where it has landed. */
static inline uint8_t *in_memory(struct xf *w, enum way y, uint32_t chunk, int v)
{
    struct pd_pool *p = y == RDMA ? w->pool : w->f.pool;
    const uint32_t *b = y == RDMA ? pd_import_blocks(pd_take_import(w->tm)) : w->f.blocks;
    return pd_pool_base(p, b[chunk / 3 * XF_CHUNK]) + pd_pool_off(p, (int)(chunk % 3), v);
}

/* The payload's bytes within a unit of the first kind. */
static inline uint8_t *bytes_of(enum way y, const struct unit *u, size_t *n)
{
    struct pd_chunk c;
    if (way_streams(y)) {
        size_t head = y == TCP ? 24 : 5;
        *n = u->n - head;
        return u->p + head;
    }
    assert_int_equal(pd_chunk_decode(u->p, u->n, &c, NULL), 0);
    *n = c.data.n;
    return (uint8_t *)(uintptr_t)c.data.p;
}
#endif
