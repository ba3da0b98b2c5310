/* Connections of daemons over TCP, plain and sealed: dialled and accepted in one loop. */
#include <arpa/inet.h>
#include <errno.h>
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
#include <dlfcn.h>
#include <netdb.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/base/log.h"
#include "../../libcommon/serve/listener.h"
#include "../../libcommon/wire/json.h"
#include "../../libcommon/wire/tcp.h"
#include "files.h"

#define K1 "k1 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n"
#define K2 "k2 ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221100\n"

/* The resolver, which can be slow. */
static int slow_ms;
int getaddrinfo(const char *host, const char *port, const struct addrinfo *hint, struct addrinfo **out)
{
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) = (int (*)(const char *, const char *, const struct addrinfo *, struct addrinfo **))dlsym(RTLD_NEXT, "getaddrinfo");
    bool asks = host && !(hint->ai_flags & AI_NUMERICHOST);
    if (asks && slow_ms)
        usleep((useconds_t)slow_ms * 1000);
    if (asks && !strcmp(host, "far.test"))
        return real("192.0.2.1", port, hint, out);
    return asks && !strcmp(host, "no.test") ? EAI_AGAIN : real(host, port, hint, out);
}

static struct pd_loop *loop;
static struct pd_err e;
static struct pd_keys *key[2];
static struct pd_conns set;
static struct pd_listener *listener;
static struct pd_conn *srv, *cli;
static const char *until_here;          /* quit when the log has this */

static void quit(void *ctx) { pd_loop_quit(ctx); }
static void run_for(int64_t us)
{
    struct pd_timer *t;
    assert_int_equal(pd_timer_new(loop, quit, loop, &t, &e), 0);
    assert_int_equal(pd_timer_in(t, us, &e), 0);
    assert_int_equal(pd_loop_run(loop, &e), 0);
    pd_timer_free(t);
}

/* What happened, as letters: the client's S stands, R record, E ended, G gone; the server's s opened, r record, e ended, g gone. */
static char log_[200], why[2][600];
static int why_code[2];
static size_t n_log;
static uint64_t got_bytes[2];
static void (*on_server)(struct pd_conn *c, const struct pd_rec *r);
static void note(int end, char ch)
{
    if (n_log < sizeof log_ - 1 && (ch != 'r' || !n_log || log_[n_log - 1] != (end ? 'r' : 'R')))
        log_[n_log++] = end ? ch : (char)(ch - 32);
    log_[n_log] = 0;
    if (until_here && strstr(log_, until_here))
        pd_loop_quit(loop);
}
static bool until(const char *what)
{
    until_here = what;
    if (!strstr(log_, what))
        run_for(7000000);
    until_here = NULL;
    return strstr(log_, what) != NULL;
}
static int end_of(void *ctx) { return ctx == &srv; }
static void stands(void *ctx, struct pd_conn *c) { note(end_of(ctx), 's'); }
static int opened(void *ctx, struct pd_conn *c, struct pd_err *err) { srv = c; note(1, 's'); return 0; }
static void record(void *ctx, struct pd_conn *c, const struct pd_rec *r)
{
    got_bytes[end_of(ctx)] += r->n;
    note(end_of(ctx), 'r');
    if (end_of(ctx) && on_server)
        on_server(c, r);
}
static void ended(void *ctx, struct pd_conn *c) { note(end_of(ctx), 'e'); }
static void gone(void *ctx, struct pd_conn *c, const struct pd_err *w)
{
    int s = end_of(ctx);
    snprintf(why[s], sizeof why[s], "%s", w ? w->msg : "");
    why_code[s] = w ? w->code : 0;
    *(s ? &srv : &cli) = NULL;
    note(s, 'g');
}
/* What the server pulls: bytes by their place, as records of 64 KiB. */
enum { PIECE = 65536, N_PIECES = 400 };
static uint8_t piece[PIECE];
static uint64_t pulled_at, to_pull;
static int pull(void *ctx, struct pd_conn *c, struct iovec *v, int max, struct pd_err *err)
{
    int n = 0;
    for (uint64_t at = pulled_at; n < max && at < to_pull; n++) {
        size_t off = at % PIECE;
        v[n] = (struct iovec){ piece + off, PIECE - off };
        at += PIECE - off;
    }
    return n;
}
static void pulled(void *ctx, struct pd_conn *c, size_t n) { pulled_at += n; }
static const struct pd_conn_cb client = { .stands = stands, .record = record, .ended = ended, .gone = gone },
    server = { .opened = opened, .record = record, .ended = ended, .pull = pull, .pulled = pulled, .gone = gone };
static const struct pd_entry entry = { NULL, &server, &srv, true };
static struct pd_dispatch dispatch = { &entry, 1, false };
static struct pd_net net[2];            /* client's, server's */
static int fds_before;

static int begin(struct pd_keys *of_client, struct pd_keys *of_server, const char *host)
{
    fds_before = open_fds();
    n_log = 0;
    log_[0] = why[0][0] = why[1][0] = 0;
    got_bytes[0] = got_bytes[1] = 0;
    on_server = NULL;
    pulled_at = to_pull = 0;
    net[0] = (struct pd_net){ .keys = of_client };
    net[1] = (struct pd_net){ .keys = of_server };
    set = (struct pd_conns){ 0 };
    char at[100];
    snprintf(at, sizeof at, "tcp-listen:%s:0", host);
    struct pd_listener_opts o = { .at = at, .dispatch = &dispatch, .conn = { .set = &set, .net = &net[1] } };
    assert_int_equal(pd_loop_new(&loop, &e), 0);
    int rc = pd_listener_new(loop, &o, &listener, &e);
    if (rc)
        pd_loop_free(loop);
    return rc;
}

static int dial(void)
{
    struct pd_conn_opts o = { .name = "C", .net = &net[0] };
    return pd_conn_dial(loop, pd_listener_name(listener), &o, &client, &cli, &cli, &e);
}

static void end(void)
{
    pd_conn_free(cli);
    while (set.first)
        pd_conn_free(set.first);
    pd_listener_free(listener);
    pd_loop_free(loop);
    cli = srv = NULL;
    assert_int_equal(open_fds(), fds_before);
}

static const uint8_t tiny[] = "\x81\xa1" "a\x07";       /* {"a":7} */
static void echo(struct pd_conn *c, const struct pd_rec *r)
{
    assert_int_equal(pd_conn_put(c, r->p, r->n, &e), 0);
}

static void records_pass(void **state)
{
    for (int sealed = 0; sealed < 2; sealed++) {
        assert_int_equal(begin(sealed ? key[0] : NULL, sealed ? key[0] : NULL, sealed ? "localhost" : "127.0.0.1"), 0);
        on_server = echo;
        assert_int_equal(dial(), 0);
        assert_true(pd_conn_opening(cli) && pd_conn_is_tcp(cli));
        for (int i = 0; i < 1000; i++)
            assert_int_equal(pd_conn_put(cli, tiny, 4, &e), 0);         /* before it stands */
        if (!until("R"))
            fail_msg("%s: %s / %s", log_, why[0], why[1]);
        for (int i = 0; i < 100 && got_bytes[0] < 4000; i++)
            run_for(3000);
        assert_int_equal(got_bytes[0], 4000);
        assert_memory_equal(log_, "S", 1);
        /* the client ends its writing: answers still go out, and then the server closes */
        pd_conn_owe(srv, 1);
        pd_conn_finish(cli);
        assert_true(until("e"));
        assert_non_null(srv);
        assert_int_equal(pd_conn_put(srv, tiny, 4, &e), 0);
        pd_conn_owe(srv, -1);
        assert_true(until("g"));
        assert_int_equal(why_code[1], 0);
        assert_true(until("G"));
        assert_int_equal(why_code[0], 0);
        end();
    }
}

/* Both ways at once, more than sockets hold, pulled and put. */
static void much_passes(void **state)
{
    for (int sealed = 0; sealed < 2; sealed++) {
        assert_int_equal(begin(sealed ? key[0] : NULL, sealed ? key[0] : NULL, "127.0.0.1"), 0);
        memcpy(piece, "\x81\xa1" "b\xc5\xff\xfa", 6);      /* {"b": bin} */
        memset(piece + 6, 'x', PIECE - 6);
        assert_int_equal(dial(), 0);
        assert_int_equal(pd_conn_put(cli, tiny, 4, &e), 0);
        assert_true(until("r"));
        to_pull = (uint64_t)PIECE * N_PIECES;
        pd_conn_want(srv);
        for (int i = 0; i < 2000 && (got_bytes[0] < to_pull || got_bytes[1] < 4 + (uint64_t)PIECE * 100); i++) {
            if (i < 100)
                assert_int_equal(pd_conn_put(cli, piece, PIECE, &e), 0);
            run_for(2000);
        }
        assert_int_equal(got_bytes[0], to_pull);
        assert_int_equal(got_bytes[1], 4 + (uint64_t)PIECE * 100);
        /* a reader that stands still stops the puller */
        uint64_t before = pulled_at;
        pd_conn_hold(cli);
        to_pull += (uint64_t)PIECE * N_PIECES;
        pd_conn_want(srv);
        run_for(300000);
        assert_true(pulled_at < to_pull - PIECE);
        assert_true(pulled_at > before);
        pd_conn_unhold(cli);
        for (int i = 0; i < 2000 && got_bytes[0] < to_pull; i++)
            run_for(2000);
        assert_int_equal(got_bytes[0], to_pull);
        end();
    }
}

static void nobody_is_there(void **state)
{
    assert_int_equal(begin(NULL, NULL, "127.0.0.1"), 0);
    char at[100];
    snprintf(at, sizeof at, "%s", pd_listener_name(listener));
    pd_listener_free(listener);
    listener = NULL;
    struct pd_conn_opts o = { .name = "C", .net = &net[0] };
    int rc = pd_conn_dial(loop, at, &o, &client, &cli, &cli, &e);
    if (!rc) {          /* loopback may refuse at once or later */
        assert_int_equal(pd_conn_put(cli, tiny, 4, &e), 0);
        assert_true(until("G"));
        assert_int_equal(why_code[0], PD_ENOWORKER);
        assert_string_equal(log_, "G");
    } else
        assert_int_equal(rc, PD_ENOWORKER);
    assert_int_equal(pd_conn_dial(loop, "tcp:10.1.2.3:4", &o, &client, &cli, &cli, &e), PD_EUSAGE);
    assert_non_null(strstr(e.msg, "--key-file"));
    assert_int_equal(pd_conn_dial(loop, "tcp:10.1.2.3", &o, &client, &cli, &cli, &e), PD_EUSAGE);
    assert_int_equal(pd_conn_dial(loop, "rdma:x", &o, &client, &cli, &cli, &e), PD_EUSAGE);
    cli = NULL;
    end();
    assert_int_equal(begin(NULL, NULL, "0.0.0.0"), PD_EUSAGE);
    assert_true(strstr(e.msg, "--key-file") && strstr(e.msg, "--insecure"));
    assert_int_equal(open_fds(), fds_before);
}

/* The loop has its turns while a name is looked up; what is wrong with it comes with `gone`; who is freed meanwhile is not told. */
static void names_are_looked_up_beside_the_loop(void **state)
{
    struct pd_conn_opts o = { .name = "C", .net = &net[0] };
    char at[100];
    assert_int_equal(begin(NULL, NULL, "127.0.0.1"), 0);
    snprintf(at, sizeof at, "tcp:localhost%s", strrchr(pd_listener_name(listener), ':'));
    slow_ms = 300;
    int64_t t0 = pd_mono_us();
    assert_int_equal(pd_conn_dial(loop, at, &o, &client, &cli, &cli, &e), 0);
    assert_true(pd_conn_opening(cli));
    assert_int_equal(pd_conn_put(cli, tiny, 4, &e), 0);
    run_for(1000);
    assert_true(pd_mono_us() - t0 < 200000);
    assert_string_equal(log_, "");
    assert_true(until("r"));
    assert_true(strchr(log_, 'S') && pd_mono_us() - t0 >= 300000);
    pd_conn_free(cli);
    cli = NULL;
    for (int i = 0; i < 2; i++) {
        n_log = 0;
        log_[0] = 0;
        assert_int_equal(pd_conn_dial(loop, i ? "tcp:far.test:9" : "tcp:no.test:9", &o, &client, &cli, &cli, &e), 0);
        assert_true(until("G"));
        assert_int_equal(why_code[0], i ? PD_EUSAGE : PD_ENOWORKER);
        assert_non_null(strstr(why[0], i ? "--key-file" : "'no.test' is not found"));
    }
    n_log = 0;
    assert_int_equal(pd_conn_dial(loop, at, &o, &client, &cli, &cli, &e), 0);
    pd_conn_free(cli);
    cli = NULL;
    usleep(500000);             /* the thread ends alone */
    run_for(10000);
    assert_int_equal(n_log, 0);
    slow_ms = 0;
    end();
    assert_int_equal(open_fds(), fds_before);
}

static void keys_that_do_not_fit(void **state)
{
    static const struct { int c, s; const char *why; } t[] = { { 1, 0, "does not know the key with the id 'k2'" }, { -1, 0, NULL }, { 0, -1, "speaks no TLS" } };
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(begin(t[i].c < 0 ? NULL : key[t[i].c], t[i].s < 0 ? NULL : key[t[i].s], "127.0.0.1"), 0);
        assert_int_equal(dial(), 0);
        assert_int_equal(pd_conn_put(cli, tiny, 4, &e), 0);
        assert_true(until("G"));
        assert_null(strchr(log_, 'r'));
        assert_null(strchr(log_, 's'));
        if (t[i].why && !strstr(why[0], t[i].why))
            fail_msg("%zu: %s", i, why[0]);
        if (!t[i].why)          /* a plain client stands, and is told as text */
            assert_non_null(strstr(log_, "SR"));
        else
            assert_null(strchr(log_, 'S'));
        run_for(5000);
        assert_int_equal(set.n, 0);
        end();
    }
}

/* Whoever connects and says nothing is let go. */
static void a_silent_one_is_let_go(void **state)
{
    assert_int_equal(begin(key[0], key[0], "127.0.0.1"), 0);
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(strrchr(pd_listener_name(listener), ':') + 1)), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    run_for(100000);
    assert_int_equal(set.n, 1);
    assert_null(srv);
    int64_t t0 = pd_mono_us();
    for (int i = 0; i < 100 && set.n; i++)
        run_for(100000);
    assert_int_equal(set.n, 0);
    assert_true(pd_mono_us() - t0 < 6000000);
    char c;
    assert_true(recv(fd, &c, 1, 0) <= 0);
    close(fd);
    end();
}

/* One that has not proved its key when the daemon drains goes at once, and leaves no timer behind that would find it freed. */
static void a_silent_one_does_not_outlast_a_drain(void **state)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    assert_int_equal(begin(key[0], key[0], "127.0.0.1"), 0);
    a.sin_port = htons((uint16_t)atoi(strrchr(pd_listener_name(listener), ':') + 1));
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    run_for(50000);
    assert_int_equal(set.n, 1);
    assert_true(pd_conn_opening(set.first));
    pd_conn_drain(set.first);
    run_for(100000);
    assert_int_equal(set.n, 0);
    close(fd);
    end();
}

static void a_killed_peer_is_told_from_one_that_ended(void **state)
{
    assert_int_equal(begin(key[0], key[0], "127.0.0.1"), 0);
    assert_int_equal(dial(), 0);
    assert_int_equal(pd_conn_put(cli, tiny, 4, &e), 0);
    assert_true(until("r"));
    pd_conn_free(cli);          /* as a killed process: without TLS's own end */
    cli = NULL;
    assert_true(until("g"));
    assert_null(strchr(log_, 'e'));
    assert_int_equal(why_code[1], PD_ECANCEL);
    end();
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    pd_log_init("pd-test", 0, true);
    if (pd_keys_parse(K1, strlen(K1), "keys", &key[0], &e) || pd_keys_parse(K2, strlen(K2), "keys", &key[1], &e))
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(records_pass), cmocka_unit_test(much_passes), cmocka_unit_test(nobody_is_there), cmocka_unit_test(names_are_looked_up_beside_the_loop),
        cmocka_unit_test(keys_that_do_not_fit),
        cmocka_unit_test(a_silent_one_is_let_go), cmocka_unit_test(a_silent_one_does_not_outlast_a_drain),
        cmocka_unit_test(a_killed_peer_is_told_from_one_that_ended) };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    pd_keys_free(key[0]);
    pd_keys_free(key[1]);
    return rc;
}
