/* The transfer protocol: whole hand-overs by each way, every record in every state of both ends, and all that can go wrong between them. */
#include <dirent.h>
#include <inttypes.h>
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

static void handed_over(void **state)
{
    static const struct { const char *via; bool in_place; } way[] = { { "inline", false }, { "shm", false }, { "shm", true }, { NULL, true } };
    for (size_t i = 0; i < sizeof way / sizeof *way; i++) {
        struct xf w;
        struct pd_err e = { 0 };
        int fds = fds_open();
        xf_open(&w, NULL, NULL);
        w.take.in_place = way[i].in_place;
        xf_pump(&w);
        assert_true(pd_xfer_open(w.g) && pd_xfer_open(w.t));
        assert_string_equal(pd_xfer_via(w.g), "shm, inline");
        assert_string_equal(pd_xfer_via(w.t), "shm, inline");
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
    FAILS_WITH(pd_xfer_new(&(struct pd_xfer_opts){ .pool = w.pool, .fp_fields = w.f.d.fp_fields, .via = "shm,rdma" }, 0, &x, &e), PD_EUSAGE, "'rdma' is no transport");
    FAILS_WITH(pd_xfer_new(&(struct pd_xfer_opts){ .pool = w.pool, .fp_fields = w.f.d.fp_fields, .via = "" }, 0, &x, &e), PD_EUSAGE, "--via is empty");
    xf_close(&w);
}

/* A hello with one thing changed. */
static void strange_hellos(void **state)
{
    for (int i = 0; i < 8; i++) {
        static const char *const words[] = { "version of the transfer protocol differs", "role differs", "another host", "layout hash", "belongs on a socket of its own", "second hello",
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

enum rec { R_HELLO, R_OFFER, R_ACCEPT, R_CHUNK, R_DONE, R_KV, R_VERIFIED, R_RELEASE, R_READING, R_RELEASED, R_CANCELLED, R_CANCEL, R_ERROR, R_REQUEST, R_UNKNOWN, R_STATUS, R_NONSENSE, N_RECS };
static const char *const rec_name[N_RECS] = { "hello", "offer", "accept", "chunk", "done", "kv", "verified", "release", "reading", "released", "cancelled", "cancel", "error",
                                              "request", "unknown", "status", "nonsense" };

static void make_rec(struct xf *w, enum rec r, bool borrows, struct pd_buf *b)
{
    struct pd_err e = { 0 };
    struct pd_kvdesc d = w->f.d;
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
enum { T_INLINE, T_SHM, GIVE };

/* Bring a pair into a state of `end`; the other end's records are held back. false: the end has no such state. */
static bool bring(struct xf *w, int end, int s)
{
    struct pd_err e = { 0 };
    bool shm = end == T_SHM;
    if ((end != T_SHM && s == S_WAITING) || (end == GIVE && s == S_RELEASING) || (end == T_INLINE && (s == S_VERIFIED || s == S_CLOSED)))
        return false;
    xf_open(w, NULL, NULL);
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
    assert_int_equal(xf_give(w, shm ? "shm" : "inline", &e), 0);
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
        while (end == T_SHM && xf_feed_one(w, true)) {}
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
static const char *const want[3][N_STATES] = {
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
        [S_OFFERED]     = "FF.FFFFF.FFCMF.AF",
        [S_MOVING]      = "FFFFFFFF.FFCMF.AF",
        [S_CLOSED]      = "FFFFFF.F.FFCMF.AF",
        [S_VERIFIED]    = "FFFFFFLR.FFCMF.AF",
        [S_CANCELLING]  = "FFLFFFLLL.CCCF.AF",
        [S_OVER]        = "FFLFFFLATLLALF.AF",
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
    c = rc ? (rc == PD_ECORRUPT && answer == PD_K_ERROR ? 'F' : answer == PD_K_ERROR ? '?' : 'E') : CAME(PD_XE_FAILED) ? 'M' : CAME(PD_XE_CANCELLED) ? 'C' : CAME(PD_XE_RELEASED) ? 'R' :
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
    for (int end = 0; end < 3; end++)
        check_cells(end);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(handed_over), cmocka_unit_test(hundreds_at_once), cmocka_unit_test(ends_that_do_not_fit), cmocka_unit_test(strange_hellos),
        cmocka_unit_test(every_record_in_every_state),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
