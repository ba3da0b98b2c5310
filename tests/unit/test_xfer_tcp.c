/* KV over streams of its own: both ways of dialling, with and without keys, what a stream may not say, and what is under way when a hand-over ends. */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/mman.h>
#define FIX_POOL_BYTES (48 << 20)
#include "xfer_fixture.h"
#include "files.h"

#define K1 "k1 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n"

static void handed_over(void **state)
{
    struct pd_err e;
    struct pd_keys *k = NULL;
    assert_int_equal(pd_keys_parse(K1, strlen(K1), "keys", &k, &e), 0);
    for (int sealed = 0; sealed < 2; sealed++)
        for (int t_dials = 0; t_dials < 2; t_dials++)
            for (uint32_t streams = 1; streams <= PD_XFER_STREAMS_MAX; streams *= 4) {
                struct xf w;
                xf_keys = sealed ? k : NULL;
                xf_open(&w, &(struct pd_xfer_opts){ .epoch = 3, .tcp = true, .streams = streams }, &(struct pd_xfer_opts){ .epoch = 3, .dialled = t_dials, .streams = streams });
                xf_pump(&w);
                assert_string_equal(pd_xfer_via(w.g), "tcp, inline");
                for (int round = 0; round < 3; round++) {
                    assert_int_equal(pd_run_new(w.f.d.run, &e), 0);
                    memcpy(w.f.d.request.run, w.f.d.run, sizeof w.f.d.run);
                    xf_regen(&w);
                    xf_drop_blocks(&w);
                    assert_int_equal(xf_give(&w, NULL, &e), 0);
                    assert_string_equal(pd_move_scheme(w.gm), "tcp");
                    if (round == 1)
                        for (uint32_t c = 0; c < w.f.plan.n_chunks; c += 2) {
                            pd_give_ready(w.gm, w.f.plan.n_chunks - 1 - c, 1);
                            xf_pump(&w);
                        }
                    assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
                    xf_pump(&w);
                    if (!xf_same(&w) || w.got[0][PD_XE_RELEASED] != (uint32_t)round + 1)
                        fail_msg("sealed %d, taker dials %d, %u streams, round %d: %s / %s; %s, %s", sealed, t_dials, streams, round, w.last[0].err.msg, w.last[1].err.msg,
                                 w.gm ? pd_move_state(w.gm) : "-", w.tm ? pd_move_state(w.tm) : "-");
                }
                assert_int_equal(w.got[0][PD_XE_RELEASED], 3);
                assert_int_equal(pd_xfer_counts(w.t).bytes_in, 3 * w.f.plan.bytes);
                assert_int_equal(pd_xfer_counts(w.g).late + pd_xfer_counts(w.t).late, 0);
                xf_close(&w);
            }
    xf_keys = NULL;
    pd_keys_free(k);
}

/* Hundreds of hand-overs use the streams that stand: no connection each. */
static void hundreds_at_once(void **state)
{
    enum { STREAMS = 3, RUNS = 300 };
    struct xf w;
    struct pd_err e;
    xf_open(&w, &(struct pd_xfer_opts){ .epoch = 3, .tcp = true, .streams = STREAMS }, NULL);
    xf_pump(&w);
    int fds = 0;
    for (int round = 0; round < RUNS; round++) {
        assert_int_equal(pd_run_new(w.f.d.run, &e), 0);
        memcpy(w.f.d.request.run, w.f.d.run, sizeof w.f.d.run);
        xf_regen(&w);
        assert_int_equal(xf_give(&w, "tcp", &e), 0);
        assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
        if (round % 37 == 0)
            xf_pump(&w);
        if (!round)
            fds = open_fds();           /* all streams stand */
        assert_int_equal(open_fds(), fds);
    }
    xf_pump(&w);
    assert_int_equal(w.got[1][PD_XE_TAKEN], RUNS);
    assert_int_equal(w.got[0][PD_XE_RELEASED], RUNS);
    assert_int_equal(pd_xfer_counts(w.t).bytes_in, RUNS * w.f.plan.bytes);
    assert_int_equal(w.n_coming, 0);
    assert_true(accept(w.listener, NULL, NULL) < 0 && errno == EAGAIN);
    assert_int_equal(open_fds(), fds);
    assert_true(xf_same(&w));
    xf_close(&w);
}

static void records_alone(struct xf *w, int rounds)
{
    for (int i = 0; i < rounds; i++) {
        xf_flush(w, false);
        xf_flush(w, true);
        xf_feed_one(w, true);
        xf_feed_one(w, false);
        xf_events(w);
    }
}

/* Hellos are quicker than a handshake: the first offer waits for the first stream. */
static void the_first_goes_by_tcp(void **state)
{
    struct pd_err e;
    struct pd_keys *k = NULL;
    assert_int_equal(pd_keys_parse(K1, strlen(K1), "keys", &k, &e), 0);
    for (int sealed = 0; sealed < 2; sealed++)
        for (int t_dials = 0; t_dials < 2; t_dials++) {
            struct xf w;
            xf_keys = sealed ? k : NULL;
            xf_open(&w, &(struct pd_xfer_opts){ .epoch = 3, .tcp = true }, &(struct pd_xfer_opts){ .epoch = 3, .dialled = t_dials });
            records_alone(&w, 6);
            assert_true(pd_xfer_open(w.g));
            assert_int_equal(w.got[1][PD_XE_READY], 1);         /* the taker has nothing to wait for */
            assert_int_equal(w.got[0][PD_XE_READY], 0);
            assert_int_equal(pd_xfer_next(w.g), w.now + 2000000);
            xf_pump(&w);
            assert_int_equal(w.got[0][PD_XE_READY], 1);
            assert_int_equal(pd_xfer_next(w.g), INT64_MAX);
            assert_int_equal(xf_give(&w, NULL, &e), 0);
            assert_string_equal(pd_move_scheme(w.gm), "tcp");
            assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
            xf_pump(&w);
            assert_true(xf_same(&w));
            xf_close(&w);
        }
    xf_keys = NULL;
    pd_keys_free(k);
}

/* What takes a stream's connection may not be the taker: nothing goes there before the taker has said that it has it. */
static void not_before_it_is_answered(void **state)
{
    struct pd_err e;
    struct pd_keys *k = NULL;
    assert_int_equal(pd_keys_parse(K1, strlen(K1), "keys", &k, &e), 0);
    for (int sealed = 0; sealed < 2; sealed++)
        for (int answered = 0; answered < 2; answered++) {
            struct xf w;
            xf_keys = sealed ? k : NULL;
            xf_open(&w, &(struct pd_xfer_opts){ .epoch = 3, .tcp = true, .streams = 2 }, NULL);
            w.hold = true;
            for (int i = 0; i < 200; i++) {
                xf_news(&w);
                xf_step(&w);
            }
            assert_true(pd_xfer_open(w.g));
            assert_int_equal(w.got[0][PD_XE_READY], 0);
            if (answered) {
                w.hold = false;
                xf_pump(&w);
            } else {
                pd_xfer_tick(w.g, w.now += 2000000);
                xf_events(&w);
                assert_string_equal(pd_xfer_via(w.g), "tcp, inline (tcp: no stream of data stood within 2000 ms)");
            }
            assert_int_equal(w.got[0][PD_XE_READY], 1);
            assert_int_equal(xf_give(&w, NULL, &e), 0);
            assert_string_equal(pd_move_scheme(w.gm), answered ? "tcp" : "inline");
            assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
            if (answered)
                xf_pump(&w);
            else
                records_alone(&w, 200);
            assert_true(xf_same(&w));
            xf_close(&w);
        }
    xf_keys = NULL;
    pd_keys_free(k);
}

/* What answers is not the taker, or answers and goes. */
static void what_answers_is_not_the_taker(void **state)
{
    static const char *const said[] = { "HTTP/1.1 400", "pdu", "pdup and more" };
    for (int i = 0; i < 3; i++) {
        struct xf w;
        struct pd_err e;
        xf_open(&w, &(struct pd_xfer_opts){ .epoch = 3, .tcp = true, .streams = 1 }, NULL);
        records_alone(&w, 6);
        int fd = -1;
        while ((fd = accept(w.listener, NULL, NULL)) < 0)
            xf_news(&w);
        assert_int_equal(send(fd, said[i], strlen(said[i]), 0), strlen(said[i]));
        close(fd);
        for (int k = 0; k < 200 && !w.got[0][PD_XE_READY]; k++) {
            xf_news(&w);
            pd_xfer_poll(w.g, w.now);
            xf_events(&w);
        }
        assert_int_equal(w.got[0][PD_XE_READY], 1);
        for (int k = 0; k < 20; k++) {
            xf_news(&w);
            pd_xfer_poll(w.g, w.now);
        }
        assert_true(pd_xfer_open(w.g));
        assert_int_equal(xf_give(&w, NULL, &e), 0);
        assert_string_equal(pd_move_scheme(w.gm), "inline");
        assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
        records_alone(&w, 200);
        assert_true(xf_same(&w));
        xf_close(&w);
    }
}

/* Those that the taker dials may never come: it is not waited for ever. */
static void streams_that_do_not_come(void **state)
{
    struct xf w;
    struct pd_err e;
    xf_open(&w, &(struct pd_xfer_opts){ .epoch = 3, .tcp = true }, &(struct pd_xfer_opts){ .epoch = 3, .dialled = true });
    records_alone(&w, 6);
    pd_xfer_tick(w.g, w.now += 1999999);
    xf_events(&w);
    assert_int_equal(w.got[0][PD_XE_READY], 0);
    pd_xfer_tick(w.g, w.now += 1);
    xf_events(&w);
    assert_int_equal(w.got[0][PD_XE_READY], 1);
    assert_string_equal(pd_xfer_via(w.g), "tcp, inline (tcp: no stream of data stood within 2000 ms)");
    assert_int_equal(xf_give(&w, NULL, &e), 0);
    assert_string_equal(pd_move_scheme(w.gm), "inline");
    assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
    records_alone(&w, 200);
    assert_true(xf_same(&w));
    xf_close(&w);
}

/* Where none stands, KV goes in the records. */
static void without_streams(void **state)
{
    struct xf w;
    struct pd_err e;
    xf_open(&w, &(struct pd_xfer_opts){ .epoch = 3, .tcp = true }, NULL);
    close(w.listener);
    w.listener = -1;
    records_alone(&w, 6);
    assert_true(pd_xfer_open(w.g));
    assert_int_equal(w.got[0][PD_XE_READY], 0);
    for (int i = 0; i < 1000 && !w.got[0][PD_XE_READY]; i++) {  /* all are refused */
        xf_news(&w);
        pd_xfer_poll(w.g, w.now);
        xf_events(&w);
    }
    if (!strstr(pd_xfer_via(w.g), "tcp, inline (tcp: no stream of data stands: tcp:127.0.0.1:") || !strstr(pd_xfer_via(w.g), ": cannot connect: Connection refused)"))
        fail_msg("%s", pd_xfer_via(w.g));
    assert_int_equal(xf_give(&w, NULL, &e), 0);
    assert_string_equal(pd_move_scheme(w.gm), "inline");
    assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
    records_alone(&w, 200);
    assert_true(xf_same(&w));
    xf_regen(&w);
    assert_int_equal(xf_give(&w, "tcp", &e), 0);        /* who insists loses the connection */
    assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
    records_alone(&w, 20);
    assert_int_equal(w.got[0][PD_XE_CLOSED], 1);
    assert_non_null(strstr(w.last[0].err.msg, "no stream of data stands any more"));
    xf_close(&w);
    xf_open(&w, &(struct pd_xfer_opts){ .epoch = 3, .via = "tcp" }, &(struct pd_xfer_opts){ .epoch = 3, .via = "tcp,shm" });
    xf_pump(&w);
    assert_int_equal(w.got[0][PD_XE_CLOSED], 1);
    if (!strstr(w.last[1].err.msg, "tcp: the connection itself is none over TCP"))
        fail_msg("%s", w.last[1].err.msg);
    xf_close(&w);
}

/* ---- by hand: a stream whose giver says what we like ---- */

struct by_hand { struct xf w; int fd; };

static void begin_by_hand(struct by_hand *h)
{
    struct pd_err e;
    struct pd_hello a = { .has_attach = true };
    struct pd_buf b = { 0 };
    struct sockaddr_in at;
    socklen_t n = sizeof at;
    xf_open(&h->w, &(struct pd_xfer_opts){ .epoch = 3, .tcp = true, .streams = 1 }, NULL);
    xf_pump(&h->w);
    assert_int_equal(xf_give(&h->w, "tcp", &e), 0);
    xf_pump(&h->w);
    assert_string_equal(pd_move_state(h->w.tm), "receiving");
    memcpy(a.attach, pd_xfer_conn(h->w.t, false), 16);
    assert_int_equal(pd_hello_encode(&a, &b, &e), 0);
    assert_int_equal(getsockname(h->w.listener, (struct sockaddr *)&at, &n), 0);
    h->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(setsockopt(h->fd, IPPROTO_TCP, TCP_NODELAY, &(int){ 1 }, sizeof(int)), 0);        /* a chunk goes in two writes */
    assert_int_equal(connect(h->fd, (struct sockaddr *)&at, n), 0);
    assert_int_equal(send(h->fd, b.p, b.n, 0), b.n);
    pd_buf_free(&b);
    xf_pump(&h->w);
    assert_int_equal(h->w.n_coming, 0);
}

static void say(int fd, const char *magic, uint32_t tag, uint32_t index, uint32_t len, uint64_t sum, const void *p, size_t n)
{
    uint8_t head[24];
    uint32_t v[3] = { htonl(tag), htonl(index), htonl(len) };
    memcpy(head, magic, 4);
    memcpy(head + 4, v, 12);
    pd_put_be64(head + 16, sum);
    assert_int_equal(send(fd, head, 24, MSG_NOSIGNAL), 24);
    if (n)
        assert_int_equal(send(fd, p, n, MSG_NOSIGNAL), n);
}

static void what_a_stream_may_not_say(void **state)
{
    /* 'F' the connection ends, 'M' the run fails and it lives, 'L' late: dropped. */
    static const struct { const char *what, *magic; uint32_t tag, index, len_off; bool bad_sum; char want; const char *words; } t[] = {
        { "another magic", "pdcx", 1, 4, 0, false, 'F', "is no chunk" }, { "no length", "pdch", 1, 4, 1, false, 'F', "no length that a chunk has" },
        { "too long", "pdch", 1, 4, 2, false, 'F', "no length that a chunk has" }, { "another length", "pdch", 1, 4, 3, false, 'M', "the offer implies" },
        { "a chunk too far", "pdch", 1, 15, 0, false, 'M', "beyond the 15" }, { "an unknown tag", "pdch", 77, 4, 0, false, 'L', "" },
        { "tag 0", "pdch", 0, 4, 0, false, 'L', "" }, { "another sum", "pdch", 1, 4, 0, true, 'M', "checksum" }, { "another place", "pdch", 1, 7, 0, false, 'M', "checksum" },
        { "as it should be", "pdch", 1, 4, 0, false, '.', "" } };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        struct by_hand h;
        struct pd_chunk c;
        begin_by_hand(&h);
        fix_chunk(&h.w.f, 4, &c);
        uint32_t len = t[i].len_off == 1 ? 0 : t[i].len_off == 2 ? 1u << 30 : t[i].len_off == 3 ? (uint32_t)c.data.n - 8 : (uint32_t)c.data.n;
        say(h.fd, t[i].magic, t[i].tag, t[i].index, len, c.xxh3 ^ t[i].bad_sum, c.data.p, t[i].len_off == 3 ? c.data.n - 8 : c.data.n);
        xf_pump(&h.w);
        bool open = pd_xfer_open(h.w.t);
        if (open != (t[i].want != 'F') || h.w.got[1][PD_XE_FAILED] != (t[i].want == 'F' || t[i].want == 'M') || !strstr(h.w.last[1].err.msg, t[i].words) ||
            ((t[i].want == 'F' || t[i].want == 'M') && h.w.last[1].err.code != PD_ECORRUPT))
            fail_msg("%s: open %d, failed %u, %d '%s'", t[i].what, open, h.w.got[1][PD_XE_FAILED], h.w.last[1].err.code, h.w.last[1].err.msg);
        if (t[i].want == '.' || t[i].want == 'L') {     /* the rest goes on as ever; what came right is not sent again by hand */
            struct pd_err e;
            assert_int_equal(pd_import_missing(pd_take_import(h.w.tm)), t[i].want == '.' ? 14 : 15);
            if (t[i].want == 'L') {
                assert_int_equal(pd_give_finish(h.w.gm, &h.w.f.d, &e), 0);
                xf_pump(&h.w);
                assert_true(xf_same(&h.w));
            }
        }
        free((void *)(uintptr_t)c.data.p);
        close(h.fd);
        xf_close(&h.w);
    }
}

/* Nor may the taker say anything: read byte by byte for ever, it would cost the giver its time. */
static void what_a_stream_may_not_answer(void **state)
{
    struct xf w;
    struct pd_err e;
    xf_world(&w);
    w.tapped = true;
    xf_open_ends(&w, &(struct pd_xfer_opts){ .epoch = 3, .tcp = true }, NULL);
    xf_pump(&w);
    assert_int_equal(xf_give(&w, "tcp", &e), 0);
    xf_pump(&w);
    assert_true(pd_xfer_open(w.g) && w.n_taps);
    assert_int_equal(send(w.tap[0].a, "x", 1, 0), 1);
    xf_pump(&w);
    assert_false(pd_xfer_open(w.g));
    assert_int_equal(w.last[0].err.code, PD_ECORRUPT);
    assert_non_null(strstr(w.last[0].err.msg, "where it has nothing to say"));
    xf_close(&w);
}

static void a_chunk_on_two_streams_at_once(void **state)
{
    struct by_hand h;
    struct pd_hello a = { .has_attach = true };
    struct pd_buf b = { 0 };
    struct sockaddr_in at;
    socklen_t n = sizeof at;
    struct pd_chunk c;
    begin_by_hand(&h);
    fix_chunk(&h.w.f, 4, &c);
    memcpy(a.attach, pd_xfer_conn(h.w.t, false), 16);
    assert_int_equal(pd_hello_encode(&a, &b, NULL), 0);
    assert_int_equal(getsockname(h.w.listener, (struct sockaddr *)&at, &n), 0);
    int other = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(other, (struct sockaddr *)&at, n), 0);
    assert_int_equal(send(other, b.p, b.n, 0), b.n);
    pd_buf_free(&b);
    say(h.fd, "pdch", 1, 4, (uint32_t)c.data.n, c.xxh3, c.data.p, c.data.n / 2);
    xf_pump(&h.w);
    say(other, "pdch", 1, 4, (uint32_t)c.data.n, c.xxh3, c.data.p, c.data.n);
    xf_pump(&h.w);
    assert_int_equal(h.w.got[1][PD_XE_FAILED], 1);
    assert_true(pd_xfer_open(h.w.t));
    assert_non_null(strstr(h.w.last[1].err.msg, "on two streams at once"));
    close(other);
    free((void *)(uintptr_t)c.data.p);
    close(h.fd);
    xf_close(&h.w);
}

/* The taker drops a run in the middle of its chunk: the rest of the bytes goes nowhere, and the stream serves the next run. */
static void dropped_in_the_middle(void **state)
{
    struct by_hand h;
    struct pd_chunk c;
    struct pd_err e;
    begin_by_hand(&h);
    fix_chunk(&h.w.f, 4, &c);
    say(h.fd, "pdch", 1, 4, (uint32_t)c.data.n, c.xxh3, c.data.p, c.data.n / 2);
    xf_pump(&h.w);
    pd_move_cancel(h.w.tm, "asked", h.w.now);
    xf_pump(&h.w);
    assert_int_equal(h.w.got[1][PD_XE_CANCELLED], 1);
    assert_int_equal(pd_pool_stats(h.w.pool).used, 0);
    uint32_t again[13];
    assert_int_equal(pd_pool_take(h.w.pool, 13, again, &e), 0);        /* its blocks, for somebody else */
    assert_int_equal(send(h.fd, c.data.p + c.data.n / 2, c.data.n - c.data.n / 2, 0), c.data.n - c.data.n / 2);
    xf_pump(&h.w);
    for (int i = 0; i < 13; i++)
        for (int l = 0; l < 3; l++)
            for (int v = 0; v < 2; v++) {
                const uint8_t *p = pd_pool_base(h.w.pool, again[i]) + pd_pool_off(h.w.pool, l, v);
                assert_true(!p[0] && !memcmp(p, p + 1, pd_pool_layer_bytes(h.w.pool) - 1));
            }
    for (int i = 0; i < 13; i++)
        pd_pool_put(h.w.pool, again[i]);
    assert_true(pd_xfer_open(h.w.t));
    xf_regen(&h.w);
    assert_int_equal(xf_give(&h.w, "tcp", &e), 0);
    assert_int_equal(pd_give_finish(h.w.gm, &h.w.f.d, &e), 0);
    xf_pump(&h.w);
    assert_true(xf_same(&h.w));
    free((void *)(uintptr_t)c.data.p);
    close(h.fd);
    xf_close(&h.w);
}

/* The giver's lease ends while its chunks stand in full sockets: its blocks are free at once, the streams end their chunks from a copy and go on. */
static void revoked_while_sockets_are_full(void **state)
{
    static const struct pd_pool_geom big = { .layers = 4, .kv_heads = 8, .head_dim = 128, .block_size = 16, .dtype = PD_F16 };
    for (int sealed = 0; sealed < 2; sealed++) {
        struct xf w;
        struct pd_err e;
        struct pd_keys *k = NULL;
        assert_int_equal(pd_keys_parse(K1, strlen(K1), "keys", &k, &e), 0);
        xf_keys = sealed ? k : NULL;
        memset(&w, 0, sizeof w);
        w.now = 1000000;
        fix_make(&w.f, &big, 128 * 16, 16, 11);                /* 32 MiB, in chunks of 1 MiB */
        assert_int_equal(pd_pool_new(&big, 64 << 20, &w.pool, &e), 0);
        assert_int_equal(pd_leases_new(&(struct pd_leases_opts){ .pool = w.f.pool }, &w.leases, &e), 0);
        xf_open_ends(&w, &(struct pd_xfer_opts){ .epoch = 3, .tcp = true, .streams = 2 }, NULL);
        xf_pump(&w);
        struct pd_give g = { .desc = &w.f.d, .blocks = w.f.blocks, .chunk_blocks = 16 };
        assert_int_equal(pd_lease_grant(w.leases, w.f.d.run, w.f.d.gen, w.f.blocks, w.f.plan.n_blocks, 0, w.now, w.lease, &e), 0);
        assert_int_equal(pd_lease_fill(w.leases, w.lease, &e), 0);
        memcpy(g.lease, w.lease, 16);
        assert_int_equal(pd_give(w.g, &g, w.now, &w.gm, &e), 0);
        xf_pump(&w);
        assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
        for (int i = 0; i < 200; i++) {         /* nobody reads */
            xf_flush(&w, false);
            pd_xfer_poll(w.g, w.now);
        }
        assert_true(pd_xfer_counts(w.g).bytes_out < w.f.plan.bytes);
        assert_int_equal(pd_lease_revoke(w.leases, w.lease, "asked", w.now, &e), 0);
        assert_int_equal(pd_leases_counts(w.leases).live, 0);
        /* the memory is somebody else's at once: whoever still read it would have an error */
        uint8_t *first = pd_pool_base(w.f.pool, 0) + pd_pool_off(w.f.pool, 0, 0);
        size_t all = (size_t)pd_pool_slab_blocks(w.f.pool) * pd_pool_layer_bytes(w.f.pool) * 8;
        assert_int_equal((uintptr_t)first % 4096, 0);
        assert_int_equal(mprotect(first, all, PROT_NONE), 0);
        xf_pump(&w);
        assert_int_equal(mprotect(first, all, PROT_READ | PROT_WRITE), 0);
        if (!pd_xfer_open(w.g) || !pd_xfer_open(w.t))
            fail_msg("%s / %s", w.last[0].err.msg, w.last[1].err.msg);
        assert_int_equal(w.got[0][PD_XE_CANCELLED], 1);
        assert_int_equal(w.got[1][PD_XE_CANCELLED] + w.got[1][PD_XE_FAILED], 1);
        if (w.last[1].err.code == PD_ECORRUPT)
            fail_msg("%s", w.last[1].err.msg);
        assert_int_equal(w.got[1][PD_XE_TAKEN], 0);
        xf_regen(&w);
        assert_int_equal(pd_lease_grant(w.leases, w.f.d.run, w.f.d.gen, w.f.blocks, w.f.plan.n_blocks, 0, w.now, w.lease, &e), 0);
        assert_int_equal(pd_lease_fill(w.leases, w.lease, &e), 0);
        memcpy(g.lease, w.lease, 16);
        assert_int_equal(pd_give(w.g, &g, w.now, &w.gm, &e), 0);
        assert_int_equal(pd_give_finish(w.gm, &w.f.d, &e), 0);
        xf_pump(&w);
        assert_true(xf_same(&w));
        xf_close(&w);
        xf_keys = NULL;
        pd_keys_free(k);
    }
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(handed_over), cmocka_unit_test(hundreds_at_once), cmocka_unit_test(the_first_goes_by_tcp), cmocka_unit_test(not_before_it_is_answered), cmocka_unit_test(what_answers_is_not_the_taker), cmocka_unit_test(streams_that_do_not_come), cmocka_unit_test(without_streams), cmocka_unit_test(what_a_stream_may_not_say), cmocka_unit_test(what_a_stream_may_not_answer), cmocka_unit_test(a_chunk_on_two_streams_at_once),
        cmocka_unit_test(dropped_in_the_middle), cmocka_unit_test(revoked_while_sockets_are_full) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
