/* Connections: bytes into records and back, ends of all kinds, slow readers, descriptors. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../libcommon/serve/dispatch.h"
#include "../../libcommon/wire/json.h"
#include "files.h"

static struct pd_loop *loop;
static struct pd_err e;
static int peer;                        /* the client's end */
static struct pd_conn *conn;

static void quit(void *ctx) { pd_loop_quit(ctx); }
static void run_for(int64_t us)
{
    struct pd_timer *t;
    assert_int_equal(pd_timer_new(loop, quit, loop, &t, &e), 0);
    assert_int_equal(pd_timer_in(t, us, &e), 0);
    assert_int_equal(pd_loop_run(loop, &e), 0);
    pd_timer_free(t);
}
#define PUMP run_for(3000)

/* What the callbacks saw, as letters: r record, b bad, e ended, m room, g gone, G gone with a reason. */
static char log_[70000];
static size_t at;
static char why[600];
static struct pd_buf kept;              /* the records' bytes */
static void (*on_rec)(struct pd_conn *c, const struct pd_rec *r);
static void note(char ch)
{
    if (at < sizeof log_ - 1)
        log_[at++] = ch;
    log_[at] = 0;
}
static void record(void *ctx, struct pd_conn *c, const struct pd_rec *r)
{
    note('r');
    pd_buf_add(&kept, r->p, r->n, &e);
    if (on_rec)
        on_rec(c, r);
}
static void ended(void *ctx, struct pd_conn *c) { note('e'); }
static void room(void *ctx, struct pd_conn *c) { note('m'); }
static void gone(void *ctx, struct pd_conn *c, const struct pd_err *w)
{
    note(w ? 'G' : 'g');
    snprintf(why, sizeof why, "%s", w ? w->msg : "");
    conn = NULL;
    pd_conn_want(c);                    /* too late, and harmless */
    pd_conn_owe(c, -1);
}
static const struct pd_conn_cb cb = { .record = record, .ended = ended, .room = room, .gone = gone };

static int fds_before;
static int begin_with(const struct pd_conn_opts *o)
{
    int sv[2];
    fds_before = open_fds();
    at = 0;
    log_[0] = why[0] = 0;
    kept.n = 0;
    on_rec = NULL;
    if (pd_loop_new(&loop, &e) || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv))
        return -1;
    peer = sv[0];
    return pd_conn_new(loop, sv[1], o, &cb, NULL, &conn, &e);
}
static int begin(void **state)
{
    struct pd_conn_opts o = { .max_fds = 4, .name = "unix:T", .high = 1 << 16 };
    return begin_with(&o);
}
static int end(void **state)
{
    pd_conn_free(conn);
    pd_loop_free(loop);
    conn = NULL;
    if (peer >= 0)
        close(peer);
    pd_buf_free(&kept);
    assert_int_equal(open_fds(), fds_before);
    return 0;
}

static void say(const void *p, size_t n) { assert_int_equal(write(peer, p, n), (ssize_t)n); }
static void say_text(const char *s) { say(s, strlen(s)); }
static char heard[1 << 17];
/* All that waits for the client; its length. *eof: the end came. */
static size_t hear(bool *eof)
{
    size_t n = 0;
    *eof = false;
    for (ssize_t k; n < sizeof heard - 1 && (k = recv(peer, heard + n, sizeof heard - 1 - n, MSG_DONTWAIT)) != -1; n += (size_t)k)
        if (!k) {
            *eof = true;
            break;
        }
    heard[n] = 0;
    return n;
}

static const uint8_t tiny[] = "\x81\xa1" "a\x07";       /* {"a":7} */
enum { TINY = 4 };

static void echo(struct pd_conn *c, const struct pd_rec *r) { assert_int_equal(pd_conn_put(c, r->p, r->n, &e), 0); }

static void answers_have_the_form_of_the_questions(void **state)
{
    bool eof;
    on_rec = echo;
    for (size_t i = 0; i < 2 * TINY; i++) {      /* a byte at a time */
        say(tiny + i % TINY, 1);
        PUMP;
    }
    assert_string_equal(log_, "rr");
    assert_int_equal(hear(&eof), 2 * TINY);
    assert_memory_equal(heard, tiny, TINY);
    assert_memory_equal(heard + TINY, tiny, TINY);
    assert_false(eof);
    assert_false(pd_conn_is_json(conn));
    assert_int_equal(pd_conn_pid(conn), getpid());
}

static void json_is_answered_in_json(void **state)
{
    bool eof;
    on_rec = echo;
    say_text("\n {\"a\":7}\n{\"b\":");
    PUMP;
    say_text("[1,2.0,\"x\"]}\nnot json\n{\"c\":null}");
    PUMP;
    assert_string_equal(log_, "rr");
    hear(&eof);
    assert_non_null(strstr(heard, "{\"a\":7}\n{\"b\":[1,2.0,\"x\"]}\n{\"pd\":\"error\",\"v\":1"));
    assert_non_null(strstr(heard, "line at byte"));
    shutdown(peer, SHUT_WR);            /* which also ends the last line */
    PUMP;
    hear(&eof);
    assert_string_equal(heard, "{\"c\":null}\n");
    assert_true(eof);
    assert_string_equal(log_, "rrreg");
    assert_null(conn);
}

static void a_record_that_json_cannot_carry_fails_alone(void **state)
{
    bool eof;
    say_text("{}\n");
    PUMP;
    assert_int_equal(pd_conn_put(conn, "\x81\xa1" "a\xa1\xff", 5, &e), PD_EFAIL);
    assert_int_equal(pd_conn_put(conn, tiny, TINY, &e), 0);
    PUMP;
    hear(&eof);
    assert_string_equal(heard, "{\"a\":7}\n");
}

static void answers_owed_keep_a_half_closed_client(void **state)
{
    bool eof;
    say(tiny, TINY);
    shutdown(peer, SHUT_WR);
    pd_conn_owe(conn, 2);
    PUMP;
    assert_string_equal(log_, "re");
    assert_true(pd_conn_ended(conn) && pd_conn_open(conn));
    assert_int_equal(pd_conn_put(conn, tiny, TINY, &e), 0);
    pd_conn_owe(conn, -1);
    PUMP;
    assert_int_equal(hear(&eof), TINY);
    assert_false(eof);
    assert_int_equal(pd_conn_put(conn, tiny, TINY, &e), 0);
    pd_conn_owe(conn, -1);
    assert_int_equal(pd_conn_put(conn, tiny, TINY, &e), PD_ECANCEL);    /* nothing after the last answer */
    PUMP;
    assert_int_equal(hear(&eof), TINY);
    assert_true(eof);
    assert_string_equal(log_, "reg");
}

static void a_client_that_vanishes_is_gone(void **state)
{
    say(tiny, TINY);
    say(tiny, TINY);
    pd_conn_owe(conn, 2);
    close(peer);                        /* what it said before is still given out */
    peer = -1;
    PUMP;
    assert_string_equal(log_, "rreG");
    assert_non_null(strstr(why, "unix:T: the peer went away"));
}

/* A peer that reads no more and never stops writing: others have their turns, and it is read only so far. */
static uint64_t said;
static int turns;
static void say_on(struct pd_conn *c, const struct pd_rec *r)
{
    static const uint8_t zero[3000];
    static const struct iovec v[2] = { { (void *)(uintptr_t)"\x81\xa1" "a\xc5\x0b\xb8", 6 }, { (void *)(uintptr_t)zero, sizeof zero } };
    kept.n = 0;
    if (!said)
        pd_conn_put(c, tiny, TINY, &e);
    for (struct msghdr m = { .msg_iov = (struct iovec *)(uintptr_t)v, .msg_iovlen = 2 }; said < 200 << 20;) {
        ssize_t k = sendmsg(peer, &m, MSG_DONTWAIT);
        if (k < 0)
            return;
        assert_int_equal(k, sizeof zero + 6);
        said += (size_t)k;
    }
}
static void another_turn(void *ctx)
{
    turns++;
    if (conn)
        pd_timer_in(*(struct pd_timer **)ctx, 0, &e);
}
static void a_writer_that_does_not_read_has_only_its_turns(void **state)
{
    struct pd_timer *t;
    said = 0;
    turns = 0;
    on_rec = say_on;
    assert_int_equal(pd_timer_new(loop, another_turn, &t, &t, &e), 0);
    assert_int_equal(pd_timer_in(t, 0, &e), 0);
    shutdown(peer, SHUT_RD);
    say(tiny, TINY);
    run_for(500000);
    pd_timer_free(t);
    assert_null(conn);
    assert_non_null(strstr(why, "the peer went away"));
    assert_in_range(said, 60 << 20, 100 << 20);
    assert_in_range(turns, 100, 1 << 30);
}

static void who_has_all_answers_leaves_in_good_order(void **state)
{
    say(tiny, TINY);
    close(peer);
    peer = -1;
    PUMP;
    assert_string_equal(log_, "reg");
}

static void a_half_closed_client_that_vanishes_is_gone(void **state)
{
    say(tiny, TINY);
    shutdown(peer, SHUT_WR);
    pd_conn_owe(conn, 1);
    PUMP;
    assert_string_equal(log_, "re");
    close(peer);
    peer = -1;
    PUMP;
    assert_string_equal(log_, "reG");
}

static void a_client_that_resets_is_gone(void **state)
{
    pd_conn_owe(conn, 1);
    assert_int_equal(pd_conn_put(conn, tiny, TINY, &e), 0);
    PUMP;
    close(peer);                        /* with our bytes unread: reset */
    peer = -1;
    PUMP;
    assert_string_equal(log_, "G");
}

static void held_reading_leaves_the_bytes_where_they_are(void **state)
{
    pd_conn_hold(conn);
    pd_conn_hold(conn);
    say(tiny, TINY);
    PUMP;
    pd_conn_unhold(conn);
    PUMP;
    assert_string_equal(log_, "");
    pd_conn_unhold(conn);
    PUMP;
    assert_string_equal(log_, "r");
    pd_conn_hold(conn);
    say(tiny, TINY);
    close(peer);
    peer = -1;
    PUMP;
    assert_string_equal(log_, "rG");    /* held: gone all the same, its record unread */
}

static void hold_it(struct pd_conn *c, const struct pd_rec *r) { pd_conn_hold(c); }
static void a_hold_stops_at_once(void **state)
{
    on_rec = hold_it;
    for (int i = 0; i < 5; i++)
        say(tiny, TINY);
    for (int i = 1; i <= 5; i++) {      /* they came in one read, and are given out one at a time */
        PUMP;
        assert_int_equal(at, i);
        pd_conn_unhold(conn);
    }
}

static void who_does_not_read_makes_no_requests(void **state)
{
    static char big[4096] = "\x81\xa1" "a\xda\x0f\xfa";        /* {"a": 4090 characters} */
    bool eof;
    memset(big + 6, 'x', sizeof big - 6);
    on_rec = echo;
    fcntl(peer, F_SETFL, O_NONBLOCK);
    size_t sent = 0;
    for (int idle = 0; idle < 3;) {
        ssize_t k = write(peer, big + sent % sizeof big, sizeof big - sent % sizeof big);
        if (k > 0)
            sent += (size_t)k, idle = 0;
        else {
            PUMP;
            idle++;
        }
        assert_true(sent < 16 << 20);   /* backpressure: it cannot go on for ever */
    }
    assert_true(pd_conn_full(conn));
    size_t stood = at, got = 0;
    for (int idle = 0; idle < 3;) {
        size_t k = hear(&eof);
        got += k;
        idle = k ? 0 : idle + 1;
        PUMP;
    }
    assert_false(pd_conn_full(conn));
    assert_non_null(strchr(log_, 'm'));
    assert_int_equal(got, sent / sizeof big * sizeof big);      /* every whole request has its answer */
    assert_true(at > stood);
}

static void a_feeder_that_does_not_stop_loses_the_connection(void **state)
{
    static uint8_t big[1 << 15] = "\x81\xa1" "a\xc5\x7f\xfa";
    int n = 0, rc;
    while (!(rc = pd_conn_put(conn, big, sizeof big, &e)))
        assert_true(++n < 100);
    assert_int_equal(rc, PD_ENOMEM);
    assert_int_equal(n, 16);            /* eight times the mark of 64 KiB */
    assert_int_equal(pd_conn_put(conn, big, sizeof big, &e), PD_ECANCEL);
    PUMP;
    assert_string_equal(log_, "G");
    assert_non_null(strstr(why, "reads too slowly"));
}

/* Both ends full, each waiting for the other to read: the end that asks goes on reading, so that the answers make room. */
static void who_asks_reads_on_while_full(void **state)
{
    static uint8_t big[1 << 15] = "\x81\xa1" "a\xc5\x7f\xfa";
    for (int i = 0; i < 100; i++)
        assert_int_equal(pd_conn_put(conn, big, sizeof big, &e), 0);
    PUMP;
    assert_true(pd_conn_full(conn));
    say(tiny, TINY);
    PUMP;
    assert_true(pd_conn_full(conn));
    assert_string_equal(log_, "r");
}
static int begin_asking(void **state)
{
    struct pd_conn_opts o = { .asks = true, .name = "unix:T", .high = 1 << 16 };
    return begin_with(&o);
}

static void garbage_is_told_as_text(void **state)
{
    bool eof;
    say_text("GET / HTTP/1.1\r\n\r\n");
    for (int i = 0; i < 50; i++)
        say_text("more more more");
    PUMP;
    hear(&eof);
    assert_non_null(strstr(heard, "{\"pd\":\"error\""));
    assert_non_null(strstr(heard, "begins no record"));
    assert_true(eof);
    assert_string_equal(log_, "");      /* it may still write; what it writes is thrown away */
    say_text("and more");
    PUMP;
    close(peer);
    peer = -1;
    PUMP;
    assert_string_equal(log_, "G");
    assert_non_null(strstr(why, "begins no record"));
}

/* What is left of it unread when the connection closes would be told to him as a reset. */
static void garbage_with_an_end_is_answered_by_an_end(void **state)
{
    for (int i = 0; i < 50; i++) {
        size_t n = 0;
        ssize_t k;
        say("\xc1\xc1\xc1\xc1\xc1\xc1\xc1\xc1", 8);
        pd_conn_exact(conn, true);      /* as the dispatcher has it before the first record */
        shutdown(peer, SHUT_WR);
        for (int t = 0; conn && t < 100; t++)
            PUMP;
        while ((k = recv(peer, heard + n, sizeof heard - n, MSG_DONTWAIT)) > 0)
            n += (size_t)k;
        assert_true(n > 0 && k == 0);
        int sv[2];
        close(peer);
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv), 0);
        peer = sv[0];
        assert_int_equal(pd_conn_new(loop, sv[1], &(struct pd_conn_opts){ .name = "unix:T" }, &cb, NULL, &conn, &e), 0);
    }
}

static void a_writer_without_end_is_waited_for_only_so_long(void **state)
{
    say("\xc1\xc1", 2);
    run_for(100000);
    assert_string_equal(log_, "");
    run_for(600000);
    assert_string_equal(log_, "G");
}

static void a_cut_record_is_told(void **state)
{
    bool eof;
    say(tiny, TINY);
    say(tiny, TINY - 1);
    shutdown(peer, SHUT_WR);
    PUMP;
    assert_string_equal(log_, "rG");
    size_t n = hear(&eof);
    assert_true(eof);
    assert_non_null(memmem(heard, n, "ends inside a record", 20));
    assert_true(((uint8_t *)heard)[0] >= 0x80);         /* msgpack, as it spoke */
}

static void large_records_pass_both_ways(void **state)
{
    enum { N = 3 << 20 };
    uint8_t *big = malloc(N), *back = malloc(N);
    size_t in = 0, out = 0;
    on_rec = echo;
    memset(big, 'x', N);
    memcpy(big, "\x81\xa1" "a\xdb", 4);
    for (int i = 0; i < 4; i++)
        big[4 + i] = (uint8_t)((N - 8) >> (24 - 8 * i));
    fcntl(peer, F_SETFL, O_NONBLOCK);
    while (out < N) {
        ssize_t k = in < N ? write(peer, big + in, N - in) : 0;
        in += k > 0 ? (size_t)k : 0;
        run_for(200);
        k = read(peer, back + out, N - out);
        out += k > 0 ? (size_t)k : 0;
    }
    assert_memory_equal(big, back, N);
    free(big);
    free(back);
}

/* ---- descriptors ---- */

static ssize_t send_fds(int sock, const void *p, size_t n, const int *fd, int n_fd)
{
    char room_[CMSG_SPACE(sizeof(int) * 32)] = { 0 };
    struct iovec v = { (void *)p, n };
    struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = room_, .msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)n_fd) };
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)n_fd);
    memcpy(CMSG_DATA(h), fd, sizeof(int) * (size_t)n_fd);
    return sendmsg(sock, &m, 0);
}

static int null_fd(void) { return open("/dev/null", O_RDONLY | O_CLOEXEC); }
static int took[8], n_took;
static void take_one(struct pd_conn *c, const struct pd_rec *r)
{
    took[n_took++] = pd_conn_take_fd(c);
}

static void descriptors_come_with_their_records(void **state)
{
    int fd[2] = { null_fd(), open("/dev/zero", O_RDONLY | O_CLOEXEC) };
    struct stat a, b;
    n_took = 0;
    on_rec = take_one;
    say(tiny, TINY);
    for (int i = 0; i < 2; i++)
        assert_int_equal(send_fds(peer, tiny, TINY, &fd[i], 1), TINY);
    PUMP;
    assert_string_equal(log_, "rrr");
    /* the first record had none of its own; those that came ahead are taken in order */
    int order[2] = { -1, -1 }, n = 0;
    for (int i = 0; i < 3; i++)
        if (took[i] >= 0)
            order[n++] = took[i];
    assert_int_equal(n, 2);
    for (int i = 0; i < 2; i++) {
        fstat(fd[i], &a);
        fstat(order[i], &b);
        assert_int_equal(a.st_rdev, b.st_rdev);
        assert_true(fcntl(order[i], F_GETFD) & FD_CLOEXEC);
        close(order[i]);
        close(fd[i]);
    }
}

/* More than a turn reads, and then nobody: each record is given out before the end is told. */
static void what_came_before_a_hang_up_is_read(void **state)
{
    enum { N = 20000 };
    static uint8_t many[N * TINY];
    for (size_t i = 0; i < N; i++)
        memcpy(many + i * TINY, tiny, TINY);
    say(many, sizeof many);
    close(peer);
    peer = -1;
    for (int i = 0; conn && i < 2000; i++)
        PUMP;
    assert_int_equal(strspn(log_, "r"), N);
    assert_null(conn);
}

static void a_flood_of_descriptors_is_refused(void **state)
{
    int fd = null_fd(), many[32];
    bool eof;
    for (int i = 0; i < 32; i++)
        many[i] = fd;
    for (int i = 0; i < 4; i++)
        assert_int_equal(send_fds(peer, tiny, TINY, &fd, 1), TINY);
    PUMP;
    assert_string_equal(log_, "rrrr");
    send_fds(peer, tiny, TINY, many, 32);
    PUMP;
    size_t n = hear(&eof);
    assert_non_null(memmem(heard, n, "more descriptors than 4", 23));
    assert_true(eof);
    close(fd);
}

static void descriptors_go_with_their_records(void **state)
{
    int fd[3] = { null_fd(), null_fd(), null_fd() };
    static uint8_t big[40000] = "\x81\xa1" "a\xc5\x9c\x3a";
    assert_int_equal(pd_conn_put(conn, big, sizeof big, &e), 0);
    assert_int_equal(pd_conn_put_fds(conn, tiny, TINY, fd, 2, &e), 0);
    assert_int_equal(pd_conn_put(conn, big, sizeof big, &e), 0);
    assert_int_equal(pd_conn_put_fds(conn, tiny, TINY, fd + 2, 1, &e), 0);
    PUMP;
    size_t at_ = 0;
    int n = 0;
    size_t where[4];
    for (;;) {
        char room_[CMSG_SPACE(sizeof(int) * 32)];
        struct iovec v = { heard, sizeof heard };
        struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = room_, .msg_controllen = sizeof room_ };
        ssize_t k = recvmsg(peer, &m, MSG_DONTWAIT);
        PUMP;
        if (k <= 0)
            break;
        at_ += (size_t)k;
        for (struct cmsghdr *h = CMSG_FIRSTHDR(&m); h; h = CMSG_NXTHDR(&m, h))
            for (size_t i = 0; i < (h->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
                int f;
                memcpy(&f, CMSG_DATA(h) + i * sizeof f, sizeof f);
                close(f);
                where[n++] = at_;
            }
    }
    assert_int_equal(at_, 2 * (sizeof big + TINY));
    assert_int_equal(n, 3);
    assert_true(where[0] >= sizeof big + TINY && where[1] == where[0]);
    assert_true(where[2] == at_);
    int over[17];
    for (int i = 0; i < 17; i++)
        over[i] = null_fd();
    assert_int_equal(pd_conn_put_fds(conn, tiny, TINY, over, 17, &e), PD_EFAIL);        /* closed: the descriptors are counted at the end */
    over[0] = null_fd();
    assert_int_equal(pd_conn_put_fds(conn, tiny, TINY, over, 1, &e), 0);        /* still waits at the end */
}

/* ---- pulled bytes ---- */

static uint8_t *store;
static size_t store_n, store_at;
static int pull(void *ctx, struct pd_conn *c, struct iovec *v, int max, struct pd_err *err)
{
    int n = 0;
    for (size_t i = store_at; i < store_n && n < max; i += 1000)
        v[n++] = (struct iovec){ store + i, store_n - i < 1000 ? store_n - i : 1000 };
    return n;
}
static void pulled(void *ctx, struct pd_conn *c, size_t n) { store_at += n; }
static const struct pd_conn_cb puller = { .record = record, .gone = gone, .pull = pull, .pulled = pulled };

static void bytes_are_pulled_as_the_peer_reads(void **state)
{
    bool eof;
    size_t got = 0;
    store_n = 5 << 20;
    store_at = 0;
    store = malloc(store_n);
    for (size_t i = 0; i < store_n; i++)
        store[i] = (uint8_t)(i * 31 >> 5);
    pd_conn_handle(conn, &puller, NULL);
    assert_int_equal(pd_conn_put(conn, tiny, TINY, &e), 0);     /* what was put goes first */
    PUMP;
    PUMP;
    size_t stood = store_at;
    assert_true(stood > 0 && stood < store_n);
    PUMP;
    assert_int_equal(store_at, stood);
    while (got < store_n + TINY) {
        size_t k = hear(&eof);
        for (size_t i = 0; i < k; i++)
            if ((uint8_t)heard[i] != (got + i < TINY ? tiny[got + i] : store[got + i - TINY]))
                fail_msg("byte %zu differs", got + i);
        got += k;
        run_for(200);
    }
    store_n = store_at = 0;
    free(store);
}

/* ---- dispatch ---- */

static int detached = -1;
static void raw_record(void *ctx, struct pd_conn *c, const struct pd_rec *r)
{
    note('h');
    if (detached == -1)
        detached = pd_conn_detach(c, &(struct pd_tls *){ NULL }, &e);
    conn = NULL;
}
static int no(void *ctx, struct pd_conn *c, struct pd_err *err) { return pd_fail(err, PD_ENOMEM, "no more workers"); }
static const struct pd_conn_cb raw_cb = { .record = raw_record, .gone = gone }, no_cb = { .opened = no, .record = record, .gone = gone };
static struct pd_entry table[] = { { "hello", &raw_cb, NULL, false }, { "worker", &no_cb, NULL, false }, { NULL, &cb, NULL, false } };

static void the_first_record_decides(void **state)
{
    static const struct { const char *say, *log, *hear; bool draining; int n; } t[] = {
        { "{\"prompt\":\"x\"}\n", "r", "", false, 3 }, { "{\"pd\":\"request\",\"prompt\":\"x\"}\n{\"pd\":\"hello\"}\n", "rr", "", false, 3 },
        { "{\"pd\":\"worker\"}\n{\"pd\":\"worker\"}\n", "", "no more workers", false, 3 }, { "{\"pd\":\"new\"}\n", "r", "", false, 3 },
        { "{\"prompt\":\"x\"}\n", "", "reroute", true, 3 }, { "{\"prompt\":\"x\"}\n", "", "kind 'request' is not served", false, 2 } };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        struct pd_dispatch d = { table, t[i].n, t[i].draining };
        bool eof;
        begin(NULL);
        pd_conn_handle(conn, &pd_dispatch_cb, &d);
        pd_dispatch_begin(conn);
        say_text(t[i].say);
        PUMP;
        hear(&eof);
        if (strcmp(log_, t[i].log) || (*t[i].hear ? !strstr(heard, t[i].hear) || !eof : *heard || eof))
            fail_msg("%zu: log %s, heard %s", i, log_, heard);
        end(NULL);
    }
}

static void a_socket_can_be_handed_on_whole(void **state)
{
    static const uint8_t hello[] = "\x83\xa2pd\xa5hello\xa1v\x01\xa1w\xc4\x03" "abc" "and more, which is not for us";
    struct pd_dispatch d = { table, 3, false };
    char rest[100];
    begin(NULL);
    int fd = null_fd();
    detached = -1;
    pd_conn_handle(conn, &pd_dispatch_cb, &d);
    pd_dispatch_begin(conn);
    say(hello, sizeof hello - 1);
    assert_int_equal(send_fds(peer, "!", 1, &fd, 1), 1);
    PUMP;
    assert_string_equal(log_, "h");
    if (detached < 0)
        fail_msg("%s", e.msg);
    char room_[CMSG_SPACE(sizeof(int) * 4)];
    struct iovec v = { rest, sizeof rest };
    struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = room_, .msg_controllen = sizeof room_ };
    ssize_t n = recvmsg(detached, &m, 0);
    assert_int_equal(n, 29 + 1);        /* and the descriptor came with it */
    assert_memory_equal(rest, "and more, which is not for us!", 30);
    assert_true(m.msg_controllen > 0);
    memcpy(&n, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof(int));
    close(*(int *)&n);
    close(detached);
    close(fd);
    detached = -1;
    end(NULL);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
#define T(f) cmocka_unit_test_setup_teardown(f, begin, end)
    const struct CMUnitTest tests[] = {
        T(answers_have_the_form_of_the_questions), T(json_is_answered_in_json), T(a_record_that_json_cannot_carry_fails_alone), T(answers_owed_keep_a_half_closed_client),
        T(a_client_that_vanishes_is_gone), T(a_writer_that_does_not_read_has_only_its_turns), T(who_has_all_answers_leaves_in_good_order), T(a_half_closed_client_that_vanishes_is_gone), T(a_client_that_resets_is_gone), T(held_reading_leaves_the_bytes_where_they_are),
        T(a_hold_stops_at_once), T(who_does_not_read_makes_no_requests), T(a_feeder_that_does_not_stop_loses_the_connection),
        cmocka_unit_test_setup_teardown(who_asks_reads_on_while_full, begin_asking, end), T(garbage_is_told_as_text), T(garbage_with_an_end_is_answered_by_an_end),
        T(a_writer_without_end_is_waited_for_only_so_long), T(a_cut_record_is_told), T(large_records_pass_both_ways), T(descriptors_come_with_their_records),
        T(a_flood_of_descriptors_is_refused), T(what_came_before_a_hang_up_is_read), T(descriptors_go_with_their_records), T(bytes_are_pulled_as_the_peer_reads), cmocka_unit_test(the_first_record_decides),
        cmocka_unit_test(a_socket_can_be_handed_on_whole) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
