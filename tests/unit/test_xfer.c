/* The transfer protocol: whole hand-overs by each way, every record in every state of both ends, and all that can go wrong between them. */
#include <dirent.h>
#include <inttypes.h>
#include <sys/mman.h>
#include "xfer_fixture.h"

static int fds_open(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

static const struct pd_xfer_opts by_tcp;

static void handed_over(void **state)
{
    static const struct { const char *via; bool in_place; } way[] = { { "inline", false }, { "shm", false }, { "shm", true }, { NULL, true }, { "tcp", false } };
    for (size_t i = 0; i < sizeof way / sizeof *way; i++) {
        struct xf w;
        struct pd_err e = { 0 };
        int fds = fds_open();
        bool tcp = i == 4;
        xf_open(&w, tcp ? &by_tcp : NULL, NULL);
        w.take.in_place = way[i].in_place;
        xf_pump(&w);
        assert_true(pd_xfer_open(w.g) && pd_xfer_open(w.t));
        assert_string_equal(pd_xfer_via(w.g), tcp ? "tcp, inline" : "shm, inline");
        assert_string_equal(pd_xfer_via(w.t), tcp ? "tcp, inline" : "shm, inline");
        if (xf_give(&w, way[i].via, &e))
            fail_msg("%s", e.msg);
        xf_pump(&w);
        assert_int_equal(w.got[0][PD_XE_ACCEPTED], 1);
        assert_int_equal(w.got[1][PD_XE_TAKEN], 0);
        for (uint32_t c = 0; c < w.f.plan.n_chunks; c += 2) {          /* layers leave as they are computed, in any order */
            pd_give_ready(w.gm, w.f.plan.n_chunks - 1 - c, 1);
            xf_pump(&w);
        }
        assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
        FAILS_WITH(pd_give_finish(w.gm, &w.f.d, &e), PD_EFAIL, "finished twice");
        xf_pump(&w);
        if (w.last[1].err.code)
            fail_msg("%s", w.last[1].err.msg);
        assert_int_equal(w.got[1][PD_XE_TAKEN], 1);
        assert_int_equal(w.got[0][PD_XE_VERIFIED], 1);
        assert_true(xf_same(&w));
        if (way[i].in_place) {
            assert_int_equal(w.got[0][PD_XE_RELEASED], 0);
            assert_true(pd_take_in_place(w.tm));
            assert_true(pd_take_valid(w.tm, w.now));
            assert_int_equal(pd_pool_stats(w.pool).borrowed, 12);       /* the last block is not full: copied */
            assert_int_equal(pd_pool_stats(w.pool).used, 1);
            assert_int_equal(pd_move_desc(w.tm)->n_first, 1);
            assert_int_equal(pd_move_desc(w.tm)->first[0].token, 11);
            xf_drop_blocks(&w);
            pd_take_release(w.tm, w.now);
            xf_pump(&w);
        } else
            assert_int_equal(pd_pool_stats(w.pool).used, 13);
        assert_int_equal(w.got[0][PD_XE_RELEASED], 1);
        assert_int_equal(w.got[1][PD_XE_RELEASED], 1);
        assert_int_equal(pd_leases_counts(w.leases).released, 1);
        assert_int_equal(pd_xfer_counts(w.g).late + pd_xfer_counts(w.t).late, 0);
        assert_int_equal(pd_xfer_counts(w.g).moves + pd_xfer_counts(w.t).moves, 0);
        assert_int_equal(pd_xfer_next(w.g), INT64_MAX);
        assert_int_equal(pd_xfer_next(w.t), INT64_MAX);
        FAILS_WITH(xf_give(&w, NULL, &e), PD_ETIME, "retired");
        xf_close(&w);
        assert_int_equal(fds_open(), fds);
    }
}

/* Chunk records go coded where the giver is told to and the taker can decode: fewer bytes on the wire, the same in the pool; by shm nothing is coded. */
static void coded_on_the_way(void **state)
{
    uint64_t sent[4];
    for (int way = 0; way < 4; way++) {         /* plain; zstd; auto; zstd, but by shm */
        const struct pd_xfer_opts g = { .epoch = 3, .codec = way == 0 ? PD_CODEC_NONE : way == 2 ? PD_CODEC_AUTO : PD_CODEC_ZSTD };
        struct xf w;
        struct pd_err e = { 0 };
        xf_open(&w, &g, NULL);
        for (uint32_t b = 0; b + 1 < w.f.plan.n_blocks; b++)        /* not the last one, whose tail is zero */
            for (int l = 0; l < xf_geom.layers; l++)
                for (int v = 0; v < 2; v++)
                    memset(pd_pool_base(w.f.pool, w.f.blocks[b]) + pd_pool_off(w.f.pool, l, v), 0x3c, pd_pool_layer_bytes(w.f.pool));
        xf_pump(&w);
        assert_int_equal(xf_give(&w, way == 3 ? "shm" : "inline", &e), 0);
        pd_give_ready(w.gm, 0, w.f.plan.n_chunks);
        assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
        xf_pump(&w);
        if (w.last[1].err.code)
            fail_msg("%s", w.last[1].err.msg);
        assert_int_equal(w.got[1][PD_XE_TAKEN], 1);
        assert_int_equal(w.got[0][PD_XE_RELEASED], 1);
        assert_true(xf_same(&w));
        sent[way] = pd_xfer_counts(w.g).bytes_out;
        xf_close(&w);
    }
    assert_true(sent[1] + 2000 /* of 9,984 of payload */ < sent[0]);
    assert_true(sent[2] < sent[0]);
}

static void hundreds_at_once(void **state)
{
    struct xf w;
    struct pd_err e;
    xf_open(&w, NULL, NULL);
    w.take.in_place = false;
    xf_pump(&w);
    for (int round = 0; round < 300; round++) {
        assert_int_equal(pd_run_new(w.f.d.run, &e), 0);
        memcpy(w.f.d.request.run, w.f.d.run, sizeof w.f.d.run);
        xf_regen(&w);
        assert_int_equal(xf_give(&w, round & 1 ? "inline" : "shm", &e), 0);
        assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
        if (round % 37 == 0)
            xf_pump(&w);
    }
    xf_pump(&w);
    assert_int_equal(w.got[1][PD_XE_TAKEN], 300);
    assert_int_equal(w.got[0][PD_XE_RELEASED], 300);
    assert_true(xf_same(&w));
    xf_close(&w);
}

/* ---- hello ---- */

static void ends_that_do_not_fit(void **state)
{
    msgpack_sbuffer other, soft;
    fix_fp(&other, "rope_theta", 500000, "pd 0.1");
    fix_fp(&soft, "rope_theta", 10000, "pd 0.2");
    const struct pd_bin fp = { (uint8_t *)other.data, other.size }, advisory = { (uint8_t *)soft.data, soft.size };
    const struct { struct pd_xfer_opts g, t; int code; const char *words; } c[] = {
        { { .epoch = 3 }, { .epoch = 4 }, PD_EINCOMPAT, "epoch differs (prefill 3, decode 4)" },
        { { .epoch = 3 }, { .epoch = 3, .fp_fields = fp }, PD_EINCOMPAT, "rope_theta differs (prefill 10000, decode 500000)" },
        { { .via = "shm" }, { .via = "inline" }, PD_EINCOMPAT, "no way to move KV between the two: inline: the other side does not offer it" },
        { { .via = "inline" }, { .via = "shm,inline" }, 0, "inline (shm: the other side does not offer it)" },
        { { .via = "inline,shm" }, { .via = "shm,inline" }, 0, "shm, inline" },
        { { .epoch = 3 }, { .epoch = 3, .fp_fields = advisory }, 0, "shm, inline" },
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct xf w;
        xf_open(&w, &c[i].g, &c[i].t);
        xf_pump(&w);
        for (int end = 0; end < 2; end++) {
            assert_int_equal(w.got[end][PD_XE_CLOSED], c[i].code != 0);
            assert_int_equal(w.got[end][PD_XE_READY], c[i].code == 0);
            if (c[i].code && (w.last[end].err.code != c[i].code || !strstr(w.last[end].err.msg, c[i].words)))
                fail_msg("%zu.%d: %s", i, end, w.last[end].err.msg);
            if (!c[i].code)
                assert_string_equal(pd_xfer_via(end ? w.t : w.g), c[i].words);
        }
        if (i == 5 && !strstr(w.last[1].err.msg, "software differs"))
            fail_msg("advisory: %s", w.last[1].err.msg);
        xf_close(&w);
    }
    msgpack_sbuffer_destroy(&other);
    msgpack_sbuffer_destroy(&soft);
    struct xf w;
    struct pd_err e;
    struct pd_xfer *x;
    xf_open(&w, NULL, NULL);
    FAILS_WITH(pd_xfer_new(&(struct pd_xfer_opts){ .pool = w.pool, .fp_fields = w.f.d.fp_fields, .via = "shm,pigeon" }, 0, &x, &e), PD_EUSAGE,
               "'pigeon' is no transport");
    FAILS_WITH(pd_xfer_new(&(struct pd_xfer_opts){ .pool = w.pool, .fp_fields = w.f.d.fp_fields, .via = "" }, 0, &x, &e), PD_EUSAGE, "--via is empty");
    xf_close(&w);
}

/* A hello with one thing changed. */
static void strange_hellos(void **state)
{
    for (int i = 0; i < 8; i++) {
        static const char *const words[] = { "version of the transfer protocol differs", "role differs", "another host", "layout hash",
                                            "belongs on a socket of its own", "second hello",
                                             "before hello", "no hello came" };
        struct xf w;
        struct pd_err e = { 0 };
        struct pd_arena a = { 0 };
        struct pd_hello h;
        struct pd_buf b = { 0 };
        struct pd_str via[2] = { { "shm", 3 }, { "rfc1149", 7 } };
        xf_open(&w, NULL, NULL);
        xf_flush(&w, false);
        assert_int_equal(pd_hello_decode(w.to_t.p, w.to_t.n, &a, &h, &e), 0);
        switch (i) {
        case 0: h.version = h.version_min = 2; break;
        case 1: strcpy(h.role, "decode"); break;
        case 2: h.boot[0] ^= 1; h.via = via; h.n_via = 2; break;
        case 3: h.layout.kv_heads++; break;
        case 4: h = (struct pd_hello){ .has_attach = true }; break;
        default: break;
        }
        assert_int_equal(pd_hello_encode(&h, &b, &e), 0);
        if (i == 6) {
            b.n = 0;
            assert_int_equal(pd_status_encode(&(struct pd_status){ .state = "x" }, &b, &e), 0);
        }
        int rc;
        if (i == 7) {
            pd_xfer_tick(w.t, w.now + 1999999);
            assert_int_equal(pd_xfer_next(w.t), w.now + 2000000);
            pd_xfer_tick(w.t, w.now + 2000000);
            rc = pd_xfer_feed(w.t, b.p, b.n, w.now, &e);
        } else {
            rc = pd_xfer_feed(w.t, b.p, b.n, w.now, &e);
            if (i == 5)
                rc = pd_xfer_feed(w.t, b.p, b.n, w.now, &e);
        }
        int want = i == 7 ? PD_ETIME : i < 3 ? PD_EINCOMPAT : PD_ECORRUPT;
        if (rc != want || !strstr(e.msg, i == 2 ? "not on one host" : words[i]))
            fail_msg("%d: %d %s", i, rc, e.msg);
        xf_flush(&w, true);         /* its last word is why */
        xf_events(&w);
        assert_int_equal(w.got[1][PD_XE_CLOSED], 1);
        pd_arena_free(&a);
        pd_buf_free(&b);
        xf_close(&w);
    }
}

/* ---- every record in every state ---- */

enum rec { R_HELLO, R_OFFER, R_ACCEPT, R_CHUNK, R_DONE, R_KV, R_VERIFIED, R_RELEASE, R_READING, R_RELEASED, R_CANCELLED, R_CANCEL, R_ERROR, R_REQUEST,
          R_UNKNOWN, R_STATUS, R_NONSENSE, N_RECS };
static const char *const rec_name[N_RECS] = { "hello", "offer", "accept", "chunk", "done", "kv", "verified", "release", "reading", "released", "cancelled",
                                             "cancel", "error",
                                              "request", "unknown", "status", "nonsense" };

static void make_rec(struct xf *w, enum rec r, bool borrows, struct pd_buf *b)
{
    struct pd_err e = { 0 };
    struct pd_kvdesc d = w->f.d;
    if (w->tcp)
        strcpy(d.payload.scheme, "tcp");
    struct pd_chunk c;
    struct pd_buf lease = { 0 };
    struct pd_payload_run runs[32];
    int rc = 0;
#define NAMED(T) T x = { .run = "" }; memcpy(x.run, d.run, sizeof d.run); memcpy(x.gen, d.gen, sizeof d.gen)
    if (borrows) {
        struct pd_lease_rec l = { .owner = { "p0", 2 }, .ttl_us = PD_LEASE_TTL_US, .renew_us = PD_LEASE_TTL_US / 6 };
        memcpy(l.id, w->lease, 16);
        pd_lease_rec_encode(&l, &lease, &e);
        d.lease = (struct pd_bin){ lease.p, lease.n };
        strcpy(d.payload.scheme, "shm");
        d.payload.runs = runs;
        d.payload.n_runs = pd_slab_runs(w->f.pool, w->f.blocks, w->f.plan.n_blocks, runs);
    }
    switch (r) {
    case R_HELLO: {
        struct pd_xfer *x;
        struct iovec v;
        struct pd_xfer_opts o = { .giving = true, .unix_socket = true, .epoch = 3, .pool = w->f.pool, .leases = w->leases, .fp_fields = d.fp_fields };
        assert_int_equal(pd_xfer_new(&o, w->now, &x, &e), 0);
        assert_int_equal(pd_xfer_iov(x, &v, 1, w->now, &e), 1);
        rc = pd_buf_add(b, v.iov_base, v.iov_len, &e);
        pd_xfer_free(x);
        break;
    }
    case R_OFFER: d.offer = true; d.first = NULL; d.n_first = 0; rc = pd_kvdesc_encode(&d, b, &e); break;
    case R_KV: rc = pd_kvdesc_encode(&d, b, &e); break;
    case R_CHUNK:
        fix_chunk(&w->f, 4, &c);
        rc = pd_chunk_encode_head(&c, b, &e);
        rc = rc ? rc : pd_buf_add(b, c.data.p, c.data.n, &e);
        free((void *)(uintptr_t)c.data.p);
        break;
    case R_ACCEPT: { NAMED(struct pd_accept); strcpy(x.mode, "copy"); rc = pd_accept_encode(&x, b, &e); break; }
    case R_DONE: {
        NAMED(struct pd_done);
        uint8_t sums[15 * 8] = { 0 };
        x.chunks = w->f.plan.n_chunks;
        if (borrows)
            x.sums = (struct pd_bin){ sums, sizeof sums };
        rc = pd_done_encode(&x, b, &e);
        break;
    }
    case R_VERIFIED: { NAMED(struct pd_verified); strcpy(x.mode, "copy"); rc = pd_verified_encode(&x, b, &e); break; }
    case R_RELEASE: { NAMED(struct pd_release); rc = pd_release_encode(&x, b, &e); break; }
    case R_READING: case R_RELEASED: case R_CANCELLED: {
        NAMED(struct pd_status);
        x.has_gen = true;
        strcpy(x.state, rec_name[r]);
        rc = pd_status_encode(&x, b, &e);
        break;
    }
    case R_STATUS: rc = pd_status_encode(&(struct pd_status){ .bytes = 0 }, b, &e); break;
    case R_CANCEL: { NAMED(struct pd_cancel); x.has_gen = true; rc = pd_cancel_encode(&x, b, &e); break; }
    case R_ERROR: {
        NAMED(struct pd_error_rec);
        x.has_gen = true;
        strcpy(x.class_, "integrity");
        x.code = 4;
        x.message = (struct pd_str){ "broken", 6 };
        rc = pd_error_encode(&x, b, &e);
        break;
    }
    case R_REQUEST: rc = pd_request_encode(&d.request, b, &e); break;
    case R_UNKNOWN: rc = pd_buf_add(b, "\x81\xa2pd\xa6" "future", 11, &e); break;
    default: rc = pd_buf_add(b, "\x82\xa2pd\xa6" "accept\xa3run\x01", 16, &e); break;
    }
    if (rc)
        fail_msg("%s: %s", rec_name[r], e.msg);
    pd_buf_free(&lease);
}

/* The states, of the taking end by inline and by shm, and of the giving end. */
enum { S_GREETING, S_OPEN, S_OFFERED, S_WAITING, S_MOVING, S_CLOSED, S_VERIFIED, S_RELEASING, S_CANCELLING, S_OVER, N_STATES };
static const char *const st_name[N_STATES] = { "greeting", "open", "offered", "waiting", "moving", "closed", "verified", "releasing", "cancelling", "over" };
enum { T_INLINE, T_SHM, GIVE, T_TCP, N_ENDS };
static const struct pd_xfer_opts by_tcp = { .epoch = 3, .tcp = true, .streams = 2 };

/* Bring a pair into a state of `end`; the other end's records are held back. false: the end has no such state. */
static bool bring(struct xf *w, int end, int s)
{
    struct pd_err e = { 0 };
    bool shm = end == T_SHM;
    if ((end != T_SHM && s == S_WAITING) || (end == GIVE && s == S_RELEASING) || (end == T_INLINE && s == S_CLOSED) || ((end == T_INLINE || end == T_TCP) && s == S_VERIFIED))
        return false;
    xf_open(w, end == T_TCP ? &by_tcp : NULL, NULL);
    w->manual = true;
    w->no_fds = s == S_WAITING;
    w->take.in_place = true;
    if (s == S_GREETING) {
        if (end == GIVE)
            xf_flush(w, false);
        else
            xf_flush(w, true);
        return true;
    }
    xf_pump(w);
    if (s == S_OPEN) {
        memset(w->lease, 7, 16);
        return true;
    }
    assert_int_equal(xf_give(w, shm ? "shm" : end == T_TCP ? "tcp" : "inline", &e), 0);
    if (end != GIVE || s > S_OFFERED)
        xf_pump(w);         /* the offer is there */
    if (s == S_OFFERED || s == S_WAITING) {
        if (end == GIVE) {
            xf_flush(w, false);
            w->to_t.n = 0;
        }
        return true;
    }
    assert_int_equal(pd_take(w->tm, &w->take, w->now, &e), 0);
    xf_pump(w);
    if (s == S_MOVING)
        return true;
    if (s == S_CANCELLING) {
        pd_move_cancel(end == GIVE ? w->gm : w->tm, "asked", w->now);
        xf_flush(w, end != GIVE);
        w->to_t.n = w->to_g.n = 0;
        return true;
    }
    assert_int_equal(pd_give_finish(w->gm, &w->f.d, &e), 0);
    if (s == S_CLOSED) {        /* shm: kv came, nothing verified; giving: all sent, and no answer fed */
        xf_flush(w, false);
        while ((end == T_SHM || end == T_TCP) && xf_feed_one(w, true)) {}
        w->to_t.n = 0;
        return true;
    }
    if (end == GIVE && s == S_VERIFIED) {
        while (w->got[0][PD_XE_VERIFIED] == 0) {
            xf_flush(w, false);
            xf_flush(w, true);
            if (w->got[1][PD_XE_TAKEN])
                xf_feed_one(w, false);
            else
                xf_feed_one(w, true);
            xf_events(w);
        }
        w->to_g.n = 0;
        return true;
    }
    if (s == S_RELEASING || (end != GIVE && s == S_VERIFIED)) {
        while (w->got[1][PD_XE_TAKEN] == 0) {
            xf_flush(w, false);
            xf_feed_one(w, true);
            pd_xfer_work(w->t, 1 << 20, w->now);
            xf_net(w);
            xf_events(w);
        }
        if (s == S_RELEASING && end == T_SHM) {
            xf_drop_blocks(w);
            pd_take_release(w->tm, w->now);
        }
        xf_flush(w, true);
        w->to_g.n = 0;
        return true;
    }
    xf_pump(w);
    if (shm) {
        xf_drop_blocks(w);
        pd_take_release(w->tm, w->now);
        xf_pump(w);
    }
    return true;
}

/* What comes of it. '.' goes on; 'L' late, counted and dropped; 'F' the connection ends (integrity); 'E' it ends by the peer's word; 'M' this move fails and
 * the connection lives; 'C' the move is cancelled; 'R' it ends released; 'A' answered, nothing else changed; 'T' answered with an error: its time is over. */
static const char *const want[N_ENDS][N_STATES] = {
    /*                   hello offer accept chunk done kv verified release reading released cancelled cancel error request unknown status nonsense */
    [T_INLINE] = {
        [S_GREETING]    = ".FFFFFFFFFFFLFFFF",
        [S_OPEN]        = "F.FFFFFFFFFALF.AF",
        [S_OFFERED]     = "FFFFFFFFFFFCMF.AF",
        [S_MOVING]      = "FFF.MMFFFFFCMF.AF",
        [S_RELEASING]   = "FFFFFFFFFRFRRF.AF",
        [S_CANCELLING]  = "FFFLLLFFF.CCCF.AF",
        [S_OVER]        = "FTFLLLFFFLLALF.AF",
    },
    [T_SHM] = {
        [S_GREETING]    = ".FFFFFFFFFFFLFFFF",
        [S_OPEN]        = "F.FFFFFFFFFALF.AF",
        [S_OFFERED]     = "FFFFFFFFFFFCMF.AF",
        [S_WAITING]     = "FFFFFFFFFFFCMF.AF",
        [S_MOVING]      = "FFFF.MFFFFFCMF.AF",
        [S_CLOSED]      = "FFFFFFFFFFFCMF.AF",
        [S_VERIFIED]    = "FFFFFFFFFFFCMF.AF",
        [S_RELEASING]   = "FFFFFFFFFRFRRF.AF",
        [S_CANCELLING]  = "FFFLLLFFF.CCCF.AF",
        [S_OVER]        = "FTFLLLFFFLLALF.AF",
    },
    [GIVE] = {
        [S_GREETING]    = ".FFFFFFFFFFFLFFFF",
        [S_OPEN]        = "FFFFFFFATFFALF.AF",
        [S_OFFERED]     = "FF.FFFFR.FFCMF.AF",
        [S_MOVING]      = "FFFFFFFF.FFCMF.AF",
        [S_CLOSED]      = "FFFFFF.F.FFCMF.AF",
        [S_VERIFIED]    = "FFFFFFLR.FFCMF.AF",
        [S_CANCELLING]  = "FFLFFFLLL.CCCF.AF",
        [S_OVER]        = "FFLFFFLATLLALF.AF",
    },
    [T_TCP] = {         /* chunks come over streams of their own, and may be behind what is said */
        [S_GREETING]    = ".FFFFFFFFFFFLFFFF",
        [S_OPEN]        = "F.FFFFFFFFFALF.AF",
        [S_OFFERED]     = "FFFFFFFFFFFCMF.AF",
        [S_MOVING]      = "FFFF.MFFFFFCMF.AF",
        [S_CLOSED]      = "FFFFFFFFFFFCMF.AF",
        [S_RELEASING]   = "FFFFFFFFFRFRRF.AF",
        [S_CANCELLING]  = "FFFLLLFFF.CCCF.AF",
        [S_OVER]        = "FTFLLLFFFLLALF.AF",
    },
};

static char outcome(int end, int s, int r)
{
    struct xf w;
    struct pd_buf b = { 0 }, *out;
    struct pd_err e = { 0 };
    char c;
    if (!bring(&w, end, s))
        return ' ';
    struct pd_xfer *x = end == GIVE ? w.g : w.t;
    int who = end != GIVE;
    if (r == R_HELLO && end == GIVE && s == S_GREETING) {
        assert_int_equal(pd_buf_add(&b, w.to_g.p, w.to_g.n, &e), 0);
        xf_flush(&w, true);
        pd_buf_free(&b);
        b = w.to_g;
        w.to_g = (struct pd_buf){ 0 };
    } else
        make_rec(&w, r, end == T_SHM, &b);
    xf_flush(&w, true);
    xf_flush(&w, false);
    w.to_g.n = w.to_t.n = 0;
    uint32_t before[16];
    memcpy(before, w.got[who], sizeof before);
    uint64_t late = pd_xfer_counts(x).late;
    int rc = pd_xfer_feed(x, b.p, b.n, w.now, &e);
    if (rc && (e.code != rc || !e.msg[0]))
        fail_msg("%d %s %s: %d without words", end, st_name[s], rec_name[r], rc);
    xf_flush(&w, end != GIVE);
    out = end == GIVE ? &w.to_t : &w.to_g;
    enum pd_kind answer = out->n ? pd_kind_of(out->p, out->n) : PD_K_UNKNOWN;
    xf_events(&w);
#define CAME(k) (w.got[who][k] > before[k])
    c = rc ? (rc == PD_ECORRUPT &&
              answer == PD_K_ERROR ? 'F' : answer == PD_K_ERROR ? '?' : 'E') : CAME(PD_XE_FAILED) ? 'M' : CAME(PD_XE_CANCELLED) ? 'C' : CAME(PD_XE_RELEASED) ? 'R' :
        answer == PD_K_ERROR ? 'T' : answer == PD_K_STATUS ? 'A' : pd_xfer_counts(x).late > late ? 'L' : '.';
    if (rc && !CAME(PD_XE_CLOSED))
        fail_msg("%d %s %s: closed without a word", end, st_name[s], rec_name[r]);
    pd_buf_free(&b);
    xf_close(&w);
    return c;
}

static void check_cells(int end)
{
    for (int s = 0; s < N_STATES; s++) {
        char is[N_RECS + 1] = "";
        for (int r = 0; r < N_RECS; r++)
            is[r] = outcome(end, s, r);
        if (strcmp(want[end][s] ? want[end][s] : "                 ", is))
            fail_msg("end %d, %s: \"%s\", wanted \"%s\"", end, st_name[s], is, want[end][s] ? want[end][s] : "");
    }
}

static void every_record_in_every_state(void **state)
{
    for (int end = 0; end < N_ENDS; end++)
        check_cells(end);
}

/* ---- cancel, expiry, loss: in each state, from either side ---- */

enum cut { CANCEL_GIVER, CANCEL_TAKER, CANCEL_BOTH, EXPIRE, REVOKE, LOSE, FREE, N_CUTS };

static void cut_in_each_state(void **state)
{
    for (int end = 0; end < N_ENDS; end++)
        for (int s = S_OFFERED; s < N_STATES; s++)
            for (int cut = 0; cut < N_CUTS; cut++) {
                struct xf w;
                struct pd_lease_counts n;
                bool known = true;
                if (s == S_CANCELLING || !bring(&w, end, s))
                    continue;
                w.no_fds = false;
                switch (cut) {
                case CANCEL_BOTH:
                case CANCEL_GIVER:
                    if (w.gm)
                        pd_move_cancel(w.gm, "asked", w.now);
                    if (cut == CANCEL_GIVER)
                        break;
                    if (w.tm)
                        pd_move_cancel(w.tm, "asked", w.now);
                    break;
                case CANCEL_TAKER:
                    if ((known = w.tm && strcmp(pd_move_state(w.tm), "releasing")))        /* nothing to stop where it does not know of it, or has its copy */
                        pd_move_cancel(w.tm, "asked", w.now);
                    break;
                case EXPIRE:
                    w.now += PD_LEASE_TTL_US + 1;
                    pd_xfer_tick(w.t, w.now);
                    pd_leases_sweep(w.leases, w.now);
                    pd_xfer_tick(w.g, w.now);
                    break;
                case REVOKE: pd_leases_revoke_all(w.leases, "asked", w.now); break;
                case LOSE:
                    pd_xfer_lost(w.g, "reset", w.now);
                    pd_xfer_lost(w.t, "reset", w.now);
                    break;
                default: xf_close(&w); continue;       /* freed as it stands */
                }
                xf_drop_blocks(&w);
                xf_pump(&w);
                w.now += 1000000;       /* what was held back is never acknowledged */
                for (int k = 0; k < 3; k++) {
                    pd_xfer_tick(w.g, w.now);
                    pd_xfer_tick(w.t, w.now);
                    xf_pump(&w);
                }
                n = pd_leases_counts(w.leases);
                if (n.live && cut != LOSE && known)
                    fail_msg("end %d, %s, cut %d: %u leases live", end, st_name[s], cut, n.live);
                if ((cut == LOSE || known) && pd_xfer_counts(w.g).moves + pd_xfer_counts(w.t).moves)
                    fail_msg("end %d, %s, cut %d: %u and %u moves are left", end, st_name[s], cut, pd_xfer_counts(w.g).moves, pd_xfer_counts(w.t).moves);
                if (cut < LOSE && cut != EXPIRE && (!pd_xfer_open(w.g) || !pd_xfer_open(w.t)))
                    fail_msg("end %d, %s, cut %d: %s / %s", end, st_name[s], cut, w.last[0].err.msg, w.last[1].err.msg);
                xf_close(&w);
            }
}

/* A lease that ends in the middle of a chunk: the record that was begun is finished from a copy, its blocks are free at once, and what comes late is dropped. */
static void revoked_in_the_middle_of_a_chunk(void **state)
{
    struct xf w;
    struct pd_err e;
    struct iovec v[8];
    xf_open(&w, NULL, NULL);
    xf_pump(&w);
    assert_int_equal(xf_give(&w, "inline", &e), 0);
    xf_pump(&w);
    assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
    int n = pd_xfer_iov(w.g, v, 8, w.now, &e);
    assert_true(n > 1);
    size_t bytes = v[0].iov_len + 5;
    assert_int_equal(pd_buf_add(&w.to_t, v[0].iov_base, v[0].iov_len, &e), 0);
    assert_int_equal(pd_buf_add(&w.to_t, v[1].iov_base, 5, &e), 0);
    pd_xfer_wrote(w.g, bytes, w.now);
    assert_int_equal(pd_lease_revoke(w.leases, w.lease, "asked", w.now, &e), 0);
    assert_int_equal(pd_leases_counts(w.leases).live, 0);
    for (uint32_t i = 0; i < w.f.plan.n_blocks; i++)          /* reused at once */
        memset(pd_pool_base(w.f.pool, w.f.blocks[i]), 0x55, 64);
    xf_pump(&w);
    assert_true(pd_xfer_open(w.g) && pd_xfer_open(w.t));
    assert_int_equal(w.got[0][PD_XE_CANCELLED], 1);
    assert_int_equal(w.got[1][PD_XE_CANCELLED] + w.got[1][PD_XE_FAILED], 1);
    assert_int_equal(w.got[1][PD_XE_TAKEN], 0);
    xf_close(&w);
}

/* In place: the owner takes its blocks back while they are read. The control page says so before anything else does. */
static void fenced_in_place(void **state)
{
    struct xf w;
    struct pd_err e;
    xf_open(&w, NULL, NULL);
    w.take.in_place = true;
    xf_pump(&w);
    assert_int_equal(xf_give(&w, "shm", &e), 0);
    assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
    xf_pump(&w);
    assert_int_equal(w.got[1][PD_XE_TAKEN], 1);
    assert_true(pd_take_valid(w.tm, w.now));
    assert_int_equal(pd_leases_counts(w.leases).live, 1);
    w.now += 4000000;
    pd_xfer_tick(w.t, w.now);
    assert_int_equal(w.to_g.n, 0);
    w.now += 2000000;                   /* a sixth of the lease: renewed */
    pd_xfer_tick(w.t, w.now);
    xf_pump(&w);
    struct pd_lease_info i;
    assert_true(pd_lease_info(w.leases, w.lease, &i));
    assert_int_equal(i.expires_us, w.now + PD_LEASE_TTL_US);
    assert_int_equal(pd_lease_revoke(w.leases, w.lease, "out of blocks", w.now, &e), 0);
    assert_false(pd_take_valid(w.tm, w.now));       /* before any record came */
    xf_drop_blocks(&w);
    xf_pump(&w);
    assert_int_equal(w.got[1][PD_XE_CANCELLED], 1);
    assert_non_null(strstr(w.last[1].err.msg, "out of blocks"));
    assert_int_equal(w.got[0][PD_XE_CANCELLED], 1);
    xf_close(&w);
}

/* A reader that stands still does not renew: the sweep ends its lease, and what it says afterwards is answered. */
static void a_reader_that_stood_still(void **state)
{
    struct xf w;
    struct pd_err e;
    xf_open(&w, NULL, NULL);
    w.take.in_place = true;
    xf_pump(&w);
    assert_int_equal(xf_give(&w, "shm", &e), 0);
    assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
    xf_pump(&w);
    w.now += PD_LEASE_TTL_US;
    assert_int_equal(pd_leases_sweep(w.leases, w.now), 1);
    pd_xfer_tick(w.g, w.now + 1000000);         /* it does not acknowledge either */
    xf_flush(&w, false);
    w.to_t.n = 0;                               /* nor has it read that */
    xf_events(&w);
    assert_int_equal(w.got[0][PD_XE_CANCELLED], 1);
    assert_false(pd_take_valid(w.tm, w.now));
    xf_drop_blocks(&w);
    struct pd_buf b = { 0 };
    make_rec(&w, R_READING, true, &b);
    assert_int_equal(pd_xfer_feed(w.g, b.p, b.n, w.now, &e), 0);
    pd_buf_free(&b);
    xf_pump(&w);
    assert_int_equal(w.got[1][PD_XE_FAILED], 1);
    assert_int_equal(w.last[1].err.code, PD_ETIME);
    xf_close(&w);
}

/* A lease that asks to be renewed each microsecond is renewed, and leaves the loop its time. */
static void a_lease_in_a_hurry(void **state)
{
    struct xf w;
    struct pd_err e = { 0 };
    struct pd_arena a = { 0 };
    struct pd_kvdesc d;
    struct pd_buf b = { 0 }, lease = { 0 };
    xf_open(&w, NULL, NULL);
    xf_pump(&w);
    memset(w.lease, 7, 16);
    make_rec(&w, R_OFFER, true, &b);
    assert_int_equal(pd_kvdesc_decode(b.p, b.n, &a, &d, &e), 0);
    assert_int_equal(pd_lease_rec_encode(&(struct pd_lease_rec){ .owner = { "", 0 }, .ttl_us = 30000000, .renew_us = 1 }, &lease, &e), 0);
    d.lease = (struct pd_bin){ lease.p, lease.n };
    b.n = 0;
    assert_int_equal(pd_kvdesc_encode(&d, &b, &e), 0);
    assert_int_equal(pd_xfer_feed(w.t, b.p, b.n, w.now, &e), 0);
    for (int i = 0; i < 3; i++) {
        assert_true(pd_xfer_next(w.t) >= w.now + 10000);
        w.now += 10000;
        pd_xfer_tick(w.t, w.now);
    }
    assert_int_equal(pd_xfer_counts(w.t).moves, 1);
    pd_buf_free(&b);
    pd_buf_free(&lease);
    pd_arena_free(&a);
    xf_close(&w);
}

/* Offers that are whole, yet lie or are stale: each is refused by name, and the connection lives. */
/* A record and, beside it, a descriptor (-1: none); both go. */
static void send_with(int sock, struct pd_buf *b, int fd)
{
    union { struct cmsghdr align; char room[CMSG_SPACE(sizeof(int))]; } c = { .room = { 0 } };
    struct iovec v = { b->p, b->n };
    struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = c.room, .msg_controllen = sizeof c.room };
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    *h = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int)) };
    memcpy(CMSG_DATA(h), &fd, sizeof fd);
    if (fd < 0)
        m.msg_controllen = 0;
    assert_int_equal(sendmsg(sock, &m, 0), (ssize_t)b->n);
    if (fd >= 0)
        close(fd);
    pd_buf_free(b);
}

static void offers_that_lie(void **state)
{
    static const char *const words[] = { "epoch differs (prefill 4, decode 3)", "another life", "not the one that the prefill side said hello with",
                                        "layout_hash differs", "payload by 'rdma'",
                                         "there is none", "runs[0]", "name 12 blocks, the tokens take 13", "retired", "make no sense", "chunk_blocks", "bytes" };
    static const int code[] = { PD_EINCOMPAT, PD_ETIME, PD_EINCOMPAT, PD_EINCOMPAT, PD_EINCOMPAT, PD_ECORRUPT, PD_ECORRUPT, PD_ECORRUPT, PD_ETIME, PD_ECORRUPT,
                               PD_ECORRUPT, PD_ECORRUPT };
    for (int i = 0; i < 12; i++) {
        struct xf w;
        struct pd_err e = { 0 };
        struct pd_arena a = { 0 };
        struct pd_kvdesc d;
        struct pd_buf b = { 0 }, lease = { 0 };
        msgpack_sbuffer other;
        xf_open(&w, NULL, NULL);
        xf_pump(&w);
        memset(w.lease, 7, 16);
        make_rec(&w, R_OFFER, true, &b);
        if (pd_kvdesc_decode(b.p, b.n, &a, &d, &e))
            fail_msg("%s", e.msg);
        fix_fp(&other, "rope_theta", 7, "x");
        switch (i) {
        case 0: d.epoch = 4; break;
        case 1: d.gen[0] ^= 1; break;
        case 2: d.fp_fields = (struct pd_bin){ (uint8_t *)other.data, other.size }; pd_sha256(other.data, other.size, d.fp_sha, &e); break;
        case 3: d.layout.kv_heads = 4; d.layout.layout_hash = pd_layout_hash(&d.layout); break;
        case 4: strcpy(d.payload.scheme, "rdma"); break;
        case 5: d.lease = (struct pd_bin){ NULL, 0 }; break;
        case 6: d.payload.runs[0].base += 1; break;
        case 7: d.payload.runs[d.payload.n_runs - 1].len -= pd_pool_layer_bytes(w.pool); break;
        case 8:         /* a newer one came, then this */
            assert_int_equal(pd_xfer_feed(w.t, b.p, b.n, w.now, &e), 0);
            xf_events(&w);
            d.gen[15]--;
            break;
        case 9:
            assert_int_equal(pd_lease_rec_encode(&(struct pd_lease_rec){ .owner = { "", 0 }, .ttl_us = 5, .renew_us = 6 }, &lease, &e), 0);
            d.lease = (struct pd_bin){ lease.p, lease.n };
            break;
        case 10: d.payload.chunk_blocks = 0; break;
        default: d.payload.bytes++; break;
        }
        b.n = 0;
        assert_int_equal(pd_kvdesc_encode(&d, &b, &e), 0);
        assert_int_equal(pd_xfer_feed(w.t, b.p, b.n, w.now, &e), 0);
        xf_events(&w);
        xf_flush(&w, true);
        const struct pd_buf *out = &w.to_g;         /* the last record is the refusal */
        const uint8_t *p = out->p;
        for (size_t left = out->n, len; left; p += len, left -= len) {
            struct pd_frame_scan s = { 0 };
            assert_int_equal(pd_frame_next(&s, p, left, left, &len, &e), 1);
            if (left == len)
                break;
        }
        struct pd_error_rec r;
        struct pd_arena ra = { 0 };
        if (pd_error_decode(p, (size_t)(out->p + out->n - p), &ra, &r, &e))
            fail_msg("%d: %s", i, e.msg);
        char text[500];
        snprintf(text, sizeof text, "%.*s", (int)r.message.n, r.message.p);
        if (r.code != -code[i] || !strstr(text, words[i]))
            fail_msg("%d: %d %s", i, r.code, text);
        assert_true(pd_xfer_open(w.t));
        if (i != 8)
            assert_int_equal(w.got[1][PD_XE_FAILED], 1);
        w.to_g.n = 0;
        pd_arena_free(&a);
        pd_arena_free(&ra);
        pd_buf_free(&b);
        pd_buf_free(&lease);
        msgpack_sbuffer_destroy(&other);
        xf_close(&w);
    }
}

/* One generation is being cancelled here, and the next is offered, twice: that is one hand-over, and a record out of place. */
static void offered_twice_beside_a_cancel(void **state)
{
    struct xf w;
    struct pd_err e = { 0 };
    struct pd_arena a = { 0 };
    struct pd_kvdesc d;
    struct pd_buf b = { 0 };
    xf_open(&w, NULL, NULL);
    w.manual = true;
    xf_pump(&w);
    memset(w.lease, 7, 16);
    make_rec(&w, R_OFFER, true, &b);
    assert_int_equal(pd_xfer_feed(w.t, b.p, b.n, w.now, &e), 0);
    xf_events(&w);
    pd_move_cancel(w.tm, "not wanted", w.now);
    assert_int_equal(pd_kvdesc_decode(b.p, b.n, &a, &d, &e), 0);
    d.gen[15]++;
    b.n = 0;
    assert_int_equal(pd_kvdesc_encode(&d, &b, &e), 0);
    assert_int_equal(pd_xfer_feed(w.t, b.p, b.n, w.now, &e), 0);
    xf_events(&w);
    assert_int_equal(w.got[1][PD_XE_OFFERED], 2);
    FAILS_WITH(pd_xfer_feed(w.t, b.p, b.n, w.now, &e), PD_ECORRUPT, "a second offer");
    xf_events(&w);
    assert_int_equal(w.got[1][PD_XE_OFFERED], 2);
    pd_arena_free(&a);
    pd_buf_free(&b);
    xf_close(&w);
}

/* The name by which sockets are attached to a connection says nothing of another's, nor does what generations say. */
static void names_that_nobody_guesses(void **state)
{
    struct xf w;
    xf_open(&w, NULL, NULL);
    const uint8_t *a = pd_xfer_conn(w.g, false), *b = pd_xfer_conn(w.t, false);
    assert_memory_not_equal(a, b, 8);
    assert_memory_not_equal(a + 8, b + 8, 8);
    assert_memory_not_equal(a, pd_xfer_own(w.g)->life, 8);
    assert_memory_equal(pd_xfer_own(w.g)->life, pd_xfer_own(w.t)->life, 8);
    xf_close(&w);
}

/* The word that ends one hand-over names another run, generation or lease: nothing of this one ends by it, its own word ends it, or its lease's time. */
static void released_by_another_name(void **state)
{
    for (int i = 0; i < 3; i++) {
        struct xf w;
        struct pd_err e = { 0 };
        struct pd_buf b = { 0 };
        struct pd_release r = { .has_lease = true };
        xf_open(&w, NULL, NULL);
        w.take.in_place = true;
        xf_pump(&w);
        assert_int_equal(xf_give(&w, "shm", &e), 0);
        assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
        xf_pump(&w);
        assert_int_equal(w.got[0][PD_XE_VERIFIED], 1);
        memcpy(r.run, w.f.d.run, sizeof r.run);
        memcpy(r.gen, w.f.d.gen, sizeof r.gen);
        memcpy(r.lease, w.lease, sizeof r.lease);
        if (i == 0)
            assert_int_equal(pd_run_new(r.run, &e), 0);
        else if (i == 1)
            r.gen[15] ^= 1;
        else
            r.lease[0] ^= 1;
        assert_int_equal(pd_release_encode(&r, &b, &e), 0);
        int rc = pd_xfer_feed(w.g, b.p, b.n, w.now, &e);
        xf_events(&w);
        assert_int_equal(w.got[0][PD_XE_RELEASED], 0);
        assert_int_equal(pd_leases_counts(w.leases).live, 1);
        if (i == 2)
            assert_int_equal(rc, PD_ECORRUPT);
        else {
            assert_int_equal(rc, 0);
            assert_true(pd_xfer_open(w.g));
            pd_take_release(w.tm, w.now);
            xf_pump(&w);
            assert_int_equal(w.got[0][PD_XE_RELEASED], 1);
        }
        w.now += PD_LEASE_TTL_US;
        pd_leases_sweep(w.leases, w.now);
        assert_int_equal(pd_leases_counts(w.leases).live, 0);
        pd_buf_free(&b);
        xf_close(&w);
    }
}

/* Both ends have the same name, as where one is copied from the other's setup: they are told apart by what they do. */
static void ends_of_one_name(void **state)
{
    struct xf w;
    struct pd_err e = { 0 };
    struct pd_arena a = { 0 };
    struct pd_hello h;
    struct pd_buf b = { 0 };
    xf_open(&w, NULL, NULL);
    xf_flush(&w, false);
    assert_int_equal(pd_hello_decode(w.to_t.p, w.to_t.n, &a, &h, &e), 0);
    h.worker = pd_xfer_own(w.t)->worker;
    assert_int_equal(pd_hello_encode(&h, &b, &e), 0);
    pd_buf_free(&w.to_t);
    w.to_t = b;
    xf_pump(&w);
    assert_true(pd_xfer_open(w.g) && pd_xfer_open(w.t));
    assert_memory_equal(pd_xfer_peer(w.t)->worker.p, pd_xfer_own(w.t)->worker.p, pd_xfer_own(w.t)->worker.n);
    assert_int_equal(xf_give(&w, NULL, &e), 0);
    assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
    xf_pump(&w);
    assert_true(xf_same(&w));
    pd_arena_free(&a);
    xf_close(&w);
}

/* Slabs that come all at once are mapped a few at a time. */
static void many_slabs_at_once(void **state)
{
    struct xf w;
    struct pd_err e = { 0 };
    char c;
    xf_open(&w, NULL, NULL);
    w.no_fds = true;
    xf_pump(&w);
    for (uint32_t i = 0; i < 20; i++) {
        struct pd_slab_rec r = { .what = "slab", .index = i, .bytes = pd_pool_slab_bytes(w.f.pool) };
        struct pd_buf b = { 0 };
        int fd = memfd_create("slab", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        assert_int_equal(ftruncate(fd, (off_t)r.bytes) | fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
        assert_int_equal(pd_slab_encode(&r, &b, &e), 0);
        send_with(w.sock[0], &b, fd);
    }
    int calls = 0;
    for (; recv(w.sock[1], &c, 1, MSG_PEEK | MSG_DONTWAIT) == 1; calls++)
        assert_int_equal(pd_xfer_fds(w.t, w.sock[1], w.now, &e), 0);
    assert_int_equal(calls, 3);
    xf_close(&w);
}

/* Slabs that cannot be mapped safely: shm is over, offers that wait for it are refused, inline goes on. */
static void slabs_that_are_not_safe(void **state)
{
    for (int i = 0; i < 4; i++) {
        static const char *const words[] = { "not sealed against shrinking", "bytes, not", "without its descriptor", "neither slab nor control" };
        struct xf w;
        struct pd_err e = { 0 };
        struct pd_buf b = { 0 };
        xf_open(&w, NULL, NULL);
        w.no_fds = true;
        xf_pump(&w);
        assert_int_equal(xf_give(&w, "shm", &e), 0);
        xf_pump(&w);
        assert_int_equal(w.got[1][PD_XE_OFFERED], 0);
        int fd = memfd_create("bad", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        assert_int_equal(ftruncate(fd, i == 1 ? 4096 : (off_t)pd_pool_slab_bytes(w.f.pool)), 0);
        if (i)
            assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
        struct pd_slab_rec r = { .what = "slab" };
        if (i == 3)
            strcpy(r.what, "glacier");
        assert_int_equal(pd_slab_encode(&r, &b, &e), 0);
        if (i == 2) {
            close(fd);
            fd = -1;
        }
        send_with(w.sock[0], &b, fd);
        int rc = pd_xfer_fds(w.t, w.sock[1], w.now, &e);
        if (rc != (i ? PD_ECORRUPT : PD_EINCOMPAT) || !strstr(e.msg, words[i]))
            fail_msg("%d: %d %s", i, rc, e.msg);
        xf_pump(&w);
        assert_int_equal(w.got[1][PD_XE_FAILED], 1);
        assert_int_equal(w.got[0][PD_XE_FAILED], 1);
        assert_non_null(strstr(w.last[0].err.msg, words[i]));
        assert_int_equal(pd_xfer_fds(w.t, w.sock[1], w.now, &e), rc);
        pd_leases_revoke_all(w.leases, "again", w.now);
        xf_regen(&w);
        assert_int_equal(xf_give(&w, "inline", &e), 0);
        assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
        xf_pump(&w);
        assert_true(xf_same(&w));
        xf_close(&w);
    }
}

/* ---- time ---- */

static void limits(void **state)
{
    for (int i = 0; i < 6; i++) {
        static const char *const words[] = { "was not answered within 5000 ms", "did not come within 5000 ms", "nothing came for 30000 ms",
                                            "its deadline passed", "nothing moved for 30000 ms",
                                             "does not acknowledge its release" };
        static const int at[] = { GIVE, T_SHM, T_INLINE, T_INLINE, GIVE, T_INLINE }, st[] = { S_OFFERED, S_WAITING, S_MOVING, S_OFFERED, S_CLOSED,
                                                                                S_RELEASING };
        static const int64_t us[] = { 5000000, 5000000, 30000000, 777, 30000000, 5000000 };
        struct xf w;
        struct pd_err e;
        assert_true(bring(&w, at[i], st[i]));
        w.no_fds = true;
        int who = at[i] != GIVE;
        struct pd_xfer *x = who ? w.t : w.g;
        if (i == 3)
            assert_int_equal(pd_take(w.tm, &(struct pd_take){ .deadline = w.now + 777 }, w.now, &e), 0);
        pd_xfer_tick(x, w.now + us[i] - 1);
        xf_events(&w);
        if (w.got[who][PD_XE_FAILED] || w.got[who][PD_XE_UNACKED])
            fail_msg("%d: too early: %s", i, w.last[who].err.msg);
        assert_true(pd_xfer_next(x) <= w.now + us[i]);
        pd_xfer_tick(x, w.now + us[i]);
        xf_events(&w);
        if (!w.got[who][i == 5 ? PD_XE_UNACKED : PD_XE_FAILED] || w.last[who].err.code != PD_ETIME || !strstr(w.last[who].err.msg, words[i]))
            fail_msg("%d: %s", i, w.last[who].err.msg);
        assert_true(pd_xfer_open(x));
        w.to_g.n = w.to_t.n = 0;
        xf_close(&w);
    }
}

/* A prefill that takes long is no stall, and its lease is kept meanwhile. */
static void a_slow_prefill(void **state)
{
    for (int shm = 0; shm < 2; shm++) {
        struct xf w;
        struct pd_err e;
        xf_open(&w, NULL, &(struct pd_xfer_opts){ .epoch = 3, .stall_us = INT64_MAX / 8 });
        w.take.in_place = true;
        xf_pump(&w);
        assert_int_equal(xf_give(&w, shm ? "shm" : "inline", &e), 0);
        xf_pump(&w);
        for (int s = 0; s < 300; s++) {
            int64_t gn = pd_xfer_next(w.g), tn = pd_xfer_next(w.t), next = gn < tn ? gn : tn;
            assert_true(next > w.now);
            w.now += 1000000;
            pd_xfer_tick(w.g, w.now);
            pd_xfer_tick(w.t, w.now);
            xf_pump(&w);
            assert_int_equal(pd_leases_sweep(w.leases, w.now), 0);
        }
        assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
        xf_pump(&w);
        assert_true(xf_same(&w));
        xf_close(&w);
    }
}

/* ---- held, resumed, committed ---- */

static void what_is_held_is_not_sent(void **state)
{
    for (int shm = 0; shm < 3; shm++) {
        struct xf w;
        struct pd_err e;
        uint32_t held[8];
        xf_open(&w, NULL, NULL);
        xf_pump(&w);
        assert_int_equal(pd_pool_take(w.pool, 8, held, &e), 0);        /* 8 blocks: two whole ranges of 3 */
        for (int i = 0; i < 8; i++)
            for (int l = 0; l < 3; l++)
                for (int v = 0; v < 2; v++)
                    memcpy(pd_pool_base(w.pool, held[i]) + pd_pool_off(w.pool, l, v), pd_pool_base(w.f.pool, w.f.blocks[i]) + pd_pool_off(w.f.pool, l, v),
                           pd_pool_layer_bytes(w.pool));
        w.take = (struct pd_take){ .held = held, .n_held = 8, .in_place = shm == 2 };
        assert_int_equal(xf_give(&w, shm ? "shm" : "inline", &e), 0);
        assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
        xf_pump(&w);
        assert_true(xf_same(&w));
        for (int i = 0; i < 6; i++)
            assert_int_equal(w.blocks[i], held[i]);
        assert_int_not_equal(w.blocks[6], held[6]);
        if (shm < 2)
            assert_int_equal(w.got[0][PD_XE_RELEASED], 1);
        for (int i = 0; i < 8; i++)
            pd_pool_put(w.pool, held[i]);
        if (!shm)
            assert_int_equal(pd_xfer_counts(w.t).bytes_in, 7 * 3 * 2 * pd_pool_layer_bytes(w.pool));
        xf_close(&w);
    }
}

/* The link dies when some chunks are through; over the next one, also by another way, only the rest goes. */
static void resumed(void **state)
{
    static const char *const by[] = { "inline", "shm", "tcp" };
    for (int way = 0; way < 9; way++) {
        const char *first = by[way % 3], *then = by[way / 3];
        struct xf w;
        struct pd_err e;
        xf_open(&w, *first == 't' ? &by_tcp : NULL, NULL);
        xf_pump(&w);
        assert_int_equal(xf_give(&w, first, &e), 0);
        xf_pump(&w);
        pd_give_ready(w.gm, 0, 7);
        xf_pump(&w);
        pd_xfer_lost(w.t, "reset", w.now);
        pd_xfer_lost(w.g, "reset", w.now);
        xf_pump(&w);
        assert_int_equal(w.got[1][PD_XE_FAILED], 1);
        assert_int_equal(w.got[0][PD_XE_FAILED], 1);
        assert_non_null(w.parked);
        assert_int_equal(pd_import_missing(w.parked), 8);
        assert_int_equal(pd_leases_counts(w.leases).live, 1);
        xf_close_ends(&w);
        xf_open_ends(&w, *then == 't' ? &by_tcp : NULL, NULL);
        w.take.resume = w.parked;
        w.parked = NULL;
        xf_pump(&w);
        struct pd_give g = { .desc = &w.f.d, .blocks = w.f.blocks, .chunk_blocks = XF_CHUNK, .via = then };
        memcpy(g.lease, w.lease, 16);
        assert_int_equal(pd_give(w.g, &g, w.now, &w.gm, &e), 0);
        assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
        xf_pump(&w);
        w.take.resume = NULL;
        if (!xf_same(&w))
            fail_msg("%s, then %s: %s", first, then, w.last[1].err.msg);
        assert_int_equal(pd_leases_counts(w.leases).released, 1);
        xf_close(&w);
    }
}

/* The run that is read in place is offered over another connection. */
static void offered_anew(struct xf *w, const char *via)
{
    struct pd_err e;
    struct pd_give g = { .desc = &w->f.d, .blocks = w->f.blocks, .chunk_blocks = XF_CHUNK, .via = via };
    xf_close_ends(w);
    xf_open_ends(w, NULL, NULL);
    memcpy(g.lease, w->lease, 16);
    xf_pump(w);
    assert_int_equal(pd_give(w->g, &g, w->now, &w->gm, &e), 0);
    assert_int_equal(pd_give_finish(w->gm, &w->f.d, &e), 0);
}

static void in_place(struct xf *w)
{
    struct pd_err e;
    xf_open(w, NULL, NULL);
    w->take.in_place = true;
    xf_pump(w);
    assert_int_equal(xf_give(w, "shm", &e), 0);
    assert_int_equal(pd_give_finish(w->gm, &w->f.d, &e), 0);
    xf_pump(w);
    assert_true(xf_same(w) && pd_take_until(w->tm) == w->now + PD_LEASE_TTL_US);
}

/* The connection dies while it is read in place: what is known of the lease remains, and the next connection renews and ends it, with nothing sent. */
static void read_in_place_over_two_connections(void **state)
{
    for (int what = 0; what < 5; what++) {
        struct xf w;
        struct pd_xfer_event ev;
        struct pd_lease_info i;
        in_place(&w);
        struct pd_view *page = pd_take_view(w.tm);
        int64_t until = w.now + PD_LEASE_TTL_US;
        w.now += PD_LEASE_TTL_US / 6 - 1;               /* not renewed */
        if (what == 4) {                                /* its end came before the connection's */
            pd_lease_revoke(w.leases, w.lease, "needed", w.now, NULL);
            xf_pump(&w);
            assert_int_equal(w.got[1][PD_XE_CANCELLED], 1);
            assert_int_equal(pd_view_valid(page, pd_lease_slot(w.lease), w.f.d.gen), 0);
            pd_view_put(page);
            xf_close(&w);
            continue;
        }
        pd_xfer_lost(w.t, "reset", w.now);
        pd_xfer_lost(w.g, "reset", w.now);
        assert_true(pd_xfer_event(w.t, &ev) && ev.kind == PD_XE_FAILED && pd_take_until(ev.move) == until && !pd_take_park(ev.move));
        xf_events(&w);
        w.take.again = true;
        w.now += PD_LEASE_TTL_US / 2;
        offered_anew(&w, what == 1 ? "inline" : "shm");
        assert_true(pd_view_valid(page, pd_lease_slot(w.lease), w.f.d.gen) && xf_same(&w));
        uint32_t taken = w.got[1][PD_XE_TAKEN];
        w.manual = what == 2;
        xf_pump(&w);
        if (what == 1)                                  /* bytes are of no use to it */
            assert_true(w.got[0][PD_XE_FAILED] == 2 && strstr(w.last[0].err.msg, "cannot go by inline") && w.got[1][PD_XE_TAKEN] == taken);
        else if (what == 2) {                           /* or it is done with it: that is the answer to an offer */
            pd_take_release(w.tm, w.now);
            assert_true(pd_xfer_releasing(w.t, w.f.d.run, w.f.d.gen));
            xf_pump(&w);
            assert_true(w.got[0][PD_XE_RELEASED] == 1 && w.got[1][PD_XE_RELEASED] == 1 && pd_leases_counts(w.leases).released == 1);
        } else {
            assert_true(w.got[1][PD_XE_TAKEN] == taken + 1 && w.got[0][PD_XE_VERIFIED] == 2 && !pd_take_blocks(w.tm, &w.n_blocks));
            pd_xfer_tick(w.t, w.now);                   /* renewed at once */
            xf_pump(&w);
            assert_true(pd_lease_info(w.leases, w.lease, &i) && i.expires_us == w.now + PD_LEASE_TTL_US && i.readers == 1);
            assert_true(pd_take_valid(w.tm, w.now) && pd_xfer_counts(w.t).bytes_in == 0);
            w.n_blocks = w.f.plan.n_blocks;
            assert_true(xf_same(&w));
            if (what == 3) {
                pd_lease_revoke(w.leases, w.lease, "needed", w.now, NULL);
                xf_pump(&w);
                assert_int_equal(w.got[1][PD_XE_CANCELLED], 1);
            } else {
                pd_take_release(w.tm, w.now);
                xf_pump(&w);
                assert_true(w.got[0][PD_XE_RELEASED] == 1 && w.got[1][PD_XE_RELEASED] == 1 && pd_leases_counts(w.leases).released == 1);
            }
        }
        pd_view_put(page);
        xf_close(&w);
    }
}

/* A giver that says what cannot be of such an offer. */
static void words_out_of_place_while_it_is_offered_anew(void **state)
{
    static const enum rec say[] = { R_DONE, R_CHUNK, R_VERIFIED, R_OFFER };
    for (size_t i = 0; i < sizeof say / sizeof *say; i++) {
        struct xf w;
        struct pd_buf b = { 0 };
        struct pd_err e;
        in_place(&w);
        pd_xfer_lost(w.t, "reset", w.now);
        pd_xfer_lost(w.g, "reset", w.now);
        xf_events(&w);
        w.take.again = true;
        xf_close_ends(&w);
        xf_open_ends(&w, NULL, NULL);
        xf_pump(&w);
        make_rec(&w, R_OFFER, true, &b);
        assert_int_equal(pd_xfer_feed(w.t, b.p, b.n, w.now, &e), 0);
        xf_events(&w);
        b.n = 0;
        make_rec(&w, say[i], true, &b);
        assert_true(pd_xfer_feed(w.t, b.p, b.n, w.now, &e) < 0 && !pd_xfer_open(w.t));
        pd_buf_free(&b);
        xf_close(&w);
    }
}

static void another_run_does_not_resume(void **state)
{
    struct xf w;
    struct pd_err e;
    xf_open(&w, NULL, NULL);
    xf_pump(&w);
    assert_int_equal(xf_give(&w, "inline", &e), 0);
    xf_pump(&w);
    pd_xfer_lost(w.t, "reset", w.now);
    xf_events(&w);
    pd_leases_revoke_all(w.leases, "again", w.now);
    xf_regen(&w);
    xf_close_ends(&w);
    xf_open_ends(&w, NULL, NULL);
    w.take.resume = w.parked;
    w.parked = NULL;
    xf_pump(&w);
    assert_int_equal(xf_give(&w, "inline", &e), 0);
    xf_pump(&w);
    w.take.resume = NULL;
    assert_int_equal(w.got[1][PD_XE_FAILED], 2);
    assert_non_null(strstr(w.last[1].err.msg, "gen of this offer is not that of the one before"));
    xf_close(&w);
}

/* The giver does not know, and has offered it anew when it hears of it. */
static void committed_while_it_is_offered_anew(void **state)
{
    struct xf w;
    struct pd_err e;
    xf_open(&w, NULL, NULL);
    xf_pump(&w);
    assert_int_equal(xf_give(&w, "inline", &e), 0);
    xf_pump(&w);
    pd_xfer_lost(w.t, "reset", w.now);
    pd_xfer_lost(w.g, "reset", w.now);
    xf_events(&w);
    xf_close_ends(&w);
    xf_open_ends(&w, NULL, NULL);
    xf_pump(&w);
    struct pd_give g = { .desc = &w.f.d, .blocks = w.f.blocks, .chunk_blocks = XF_CHUNK };
    memcpy(g.lease, w.lease, 16);
    assert_int_equal(pd_give(w.g, &g, w.now, &w.gm, &e), 0);
    assert_int_equal(pd_xfer_commit(w.t, w.f.d.run, w.f.d.gen, NULL, w.now, &e), 0);
    uint32_t offered = w.got[1][PD_XE_OFFERED];
    xf_pump(&w);
    assert_int_equal(w.got[0][PD_XE_RELEASED], 1);
    assert_int_equal(pd_leases_counts(w.leases).released, 1);
    assert_int_equal(w.got[1][PD_XE_OFFERED], offered);         /* it is retired there */
    assert_true(pd_xfer_open(w.g) && pd_xfer_open(w.t));
    pd_import_free(w.parked);
    w.parked = NULL;
    xf_close(&w);
}

/* One more than a connection takes: told to both ends, by name, and the others are not touched. */
static void an_offer_too_many(void **state)
{
    struct xf w;
    struct pd_err e;
    struct pd_buf b = { 0 };
    xf_open(&w, NULL, NULL);
    w.manual = true;
    xf_pump(&w);
    struct pd_kvdesc d = w.f.d;
    d.offer = true;
    d.first = NULL;
    d.n_first = 0;
    for (int more = 0; more < 3; more++) {
        for (int i = 0; i < (more ? 1 : PD_XFER_MOVES); i++) {
            assert_int_equal(pd_run_new(d.run, &e), 0);
            assert_int_equal(pd_gen_new(d.gen, &e), 0);
            memcpy(d.request.run, d.run, sizeof d.run);
            b.n = 0;
            assert_int_equal(pd_kvdesc_encode(&d, &b, &e), 0);
            assert_int_equal(pd_xfer_feed(w.t, b.p, b.n, w.now, &e), 0);
        }
        struct pd_xfer_event ev;
        uint32_t n = 0;
        for (; pd_xfer_event(w.t, &ev); n++)
            if (more && (ev.kind != PD_XE_FAILED || ev.err.code != PD_ENOMEM || strcmp(pd_move_desc(ev.move)->run, d.run) || !strstr(ev.err.msg, "are open on this connection")))
                fail_msg("%d: %d %s", more, ev.kind, ev.err.msg);
        assert_int_equal(n, more ? 1 : PD_XFER_MOVES);
        assert_int_equal(pd_xfer_counts(w.t).moves, PD_XFER_MOVES);
    }
    assert_true(pd_xfer_open(w.t));
    pd_buf_free(&b);
    xf_close(&w);
}

/* ---- anything, in any order ---- */

static void random_walks(void **state)
{
    for (uint64_t seed0 = 1; seed0 <= 400; seed0++) {
        struct xf w;
        struct pd_err e;
        uint64_t seed = seed0;
        uint32_t taken = 0;
        xf_open(&w, NULL, NULL);
        w.take.in_place = seed0 & 1;
        xf_pump(&w);
        for (int step = 0; step < 60; step++) {
            uint64_t r = fix_random(&seed);
            if (!pd_xfer_open(w.g) || !pd_xfer_open(w.t))
                fail_msg("seed %" PRIu64 ": %s / %s", seed0, w.last[0].err.msg, w.last[1].err.msg);
            switch (r % 13) {
            case 0: case 1:
                if (!w.gm) {
                    xf_regen(&w);
                    if (xf_give(&w, r >> 8 & 1 ? "shm" : "inline", &e))
                        w.gm = NULL;
                }
                break;
            case 2: if (w.gm) pd_give_ready(w.gm, (uint32_t)(r >> 8) % 15, (uint32_t)(r >> 16) % 6); break;
            case 3: if (w.gm) pd_give_finish(w.gm, &w.f.d, &e); break;
            case 4: if (r >> 8 & 1) pd_leases_revoke_all(w.leases, "asked", w.now); break;
            case 5: if (w.gm && !(r >> 8 & 3)) pd_move_cancel(w.gm, "asked", w.now); break;
            case 6: if (w.tm && !(r >> 8 & 3)) pd_move_cancel(w.tm, "asked", w.now); break;
            case 7: if (w.tm) { xf_drop_blocks(&w); pd_take_release(w.tm, w.now); } break;
            case 8:
                w.now += (int64_t)(r >> 8) % 3000000;
                pd_xfer_tick(w.g, w.now);
                pd_leases_sweep(w.leases, w.now);
                pd_xfer_tick(w.t, w.now);
                break;
            case 9: for (uint64_t k = r >> 8 & 15; k--;) xf_feed_one(&w, true); break;
            case 10: for (uint64_t k = r >> 8 & 15; k--;) xf_feed_one(&w, false); break;
            case 11: pd_xfer_work(w.t, r >> 8 & 4095, w.now); break;
            default: xf_flush(&w, r >> 8 & 1); break;
            }
            xf_fds(&w);
            xf_events(&w);
            /* what was taken is right, whatever went on around it: its lease may have ended since, but nobody wrote there */
            if (w.got[1][PD_XE_TAKEN] > taken) {
                taken = w.got[1][PD_XE_TAKEN];
                assert_true(!w.blocks || xf_same(&w));
            }
        }
        xf_drop_blocks(&w);
        if (w.tm)
            pd_take_release(w.tm, w.now);
        xf_pump(&w);
        for (int k = 0; k < 40; k++) {
            w.now += 1000000;
            pd_xfer_tick(w.g, w.now);
            pd_leases_sweep(w.leases, w.now);
            pd_xfer_tick(w.t, w.now);
            if (w.tm)
                pd_take_release(w.tm, w.now);
            xf_drop_blocks(&w);
            xf_pump(&w);
        }
        assert_int_equal(pd_xfer_counts(w.t).moves, 0);
        xf_close(&w);
    }
}

/* `test_xfer seeds DIR`: what each end of a hand-over says, as seeds of tests/fuzz/fuzz_xfer (its first byte first). */
static int write_seeds(const char *dir)
{
    static const struct { const char *name, *via; bool in_place, cancel; } k[] = { { "inline", "inline", false, false }, { "shm", "shm", false, false },
                                                                                { "place", "shm", true, false },
                                                                                 { "cancel", "inline", false, true }, { "again", "shm", true, false } };
    for (int i = 0; i < 5; i++) {
        static const uint8_t gen[16] = { 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 9 };
        struct xf w;
        struct pd_err e;
        xf_open(&w, NULL, NULL);
        w.logging = true;
        w.take.in_place = k[i].in_place;
        for (uint32_t b = 0; b < w.f.plan.n_blocks && k[i].via[0] == 's'; b++)       /* what shm reads there are zeros */
            for (int l = 0; l < xf_geom.layers; l++)
                for (int v = 0; v < 2; v++)
                    memset(pd_pool_base(w.f.pool, w.f.blocks[b]) + pd_pool_off(w.f.pool, l, v), 0, pd_pool_layer_bytes(w.f.pool));
        xf_pump(&w);
        if (i)          /* by the taker's fuzzing end the offer's life is its hello's; the giver's own is fixed there */
            memcpy(w.f.d.gen + 8, gen + 8, 8);
        strcpy(w.f.d.run, "01ARZ3NDEKTSV4RRFFQ69G5FAV");
        w.take.again = i == 4;  /* as if it were read here already */
        if (xf_give(&w, k[i].via, &e))
            return 1;
        xf_pump(&w);
        if (k[i].cancel)
            pd_move_cancel(w.tm, "asked", w.now);
        else
            pd_give_finish(w.gm, &w.f.d, &e);
        xf_pump(&w);
        if (w.tm)
            pd_take_release(w.tm, w.now);
        xf_pump(&w);
        for (int end = 0; end < 2; end++) {
            char path[300];
            struct pd_buf *b = &w.log[end];
            snprintf(path, sizeof path, "%s/%s-%s", dir, end ? "giver" : "taker", k[i].name);
            if (end)    /* what the taker said goes to a giver, whose generation is fixed */
                for (size_t at = 0; at + 16 <= b->n; at++)
                    if (!memcmp(b->p + at, w.f.d.gen, 16))
                        memcpy(b->p + at, gen, 16);
            FILE *f = fopen(path, "wb");
            if (!f)
                return 1;
            fputc((end ? 1 : 0) | (k[i].in_place ? 2 : 0) | (i == 4 ? 128 : 0), f);
            fwrite(b->p, 1, b->n, f);
            fclose(f);
            pd_buf_free(b);
        }
        xf_drop_blocks(&w);
        xf_close(&w);
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "seeds"))
        return write_seeds(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(handed_over), cmocka_unit_test(coded_on_the_way), cmocka_unit_test(hundreds_at_once), cmocka_unit_test(ends_that_do_not_fit), cmocka_unit_test(strange_hellos),
        cmocka_unit_test(every_record_in_every_state), cmocka_unit_test(cut_in_each_state), cmocka_unit_test(revoked_in_the_middle_of_a_chunk),
        cmocka_unit_test(fenced_in_place), cmocka_unit_test(a_reader_that_stood_still), cmocka_unit_test(a_lease_in_a_hurry), cmocka_unit_test(offers_that_lie),
        cmocka_unit_test(offered_twice_beside_a_cancel), cmocka_unit_test(names_that_nobody_guesses), cmocka_unit_test(many_slabs_at_once), cmocka_unit_test(released_by_another_name), cmocka_unit_test(ends_of_one_name),
        cmocka_unit_test(slabs_that_are_not_safe), cmocka_unit_test(limits), cmocka_unit_test(a_slow_prefill), cmocka_unit_test(what_is_held_is_not_sent),
        cmocka_unit_test(resumed), cmocka_unit_test(read_in_place_over_two_connections),
        cmocka_unit_test(words_out_of_place_while_it_is_offered_anew), cmocka_unit_test(another_run_does_not_resume), 
        cmocka_unit_test(committed_while_it_is_offered_anew), cmocka_unit_test(an_offer_too_many), cmocka_unit_test(random_walks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
