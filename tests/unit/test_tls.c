/* TLS with pre-shared keys, both ends in one process; the key file; TCP endpoints with and without it. */
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
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
#include <errno.h>
#include <cmocka.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/base/log.h"
#include "../../libcommon/base/mem.h"
#include "../../libcommon/wire/endpoint.h"
#include "../../libcommon/wire/stream.h"

#define K1 "k1 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n"
#define K2 "k2 ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221100\n"
#define K1_OTHER "k1 ffff02030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n"

static struct pd_keys *keys_of(const char *text)
{
    struct pd_err e;
    struct pd_keys *k = NULL;
    if (pd_keys_parse(text, strlen(text), "keys", &k, &e))
        fail_msg("%s", e.msg);
    return k;
}

/* ---- the key file ---- */

static void key_files(void **state)
{
    static const char hex64[] = "000102030405060708090a0b0c0d0e0f101112131415161718191A1B1C1D1E1F";
    static const struct { const char *text; int n; const char *why; } t[] = {
        { K1 K2, 2, NULL }, { "# a comment\n\n  \t\n" K2 "\r\n" K1, 2, NULL }, { "  a-b_c.9@x\t%s  \r\n", 1, NULL }, { "k1 %s", 1, NULL },
        { "", 0, "there is no key in it" }, { "# nothing\n", 0, "there is no key in it" }, { "k1\n", 0, "line 1 is no key" }, { "\nk1 12\n", 0, "line 2 is no key" },
        { "k1 %sz\n", 0, "line 1 is no key" }, { "k1 %s 1\n", 0, "line 1 is no key" }, { "k1 %sff\n", 0, "line 1 is no key" }, { "k\x01 %s\n", 0, "line 1 is no key" },
        { "k\xc3\xa4 %s\n", 0, "line 1 is no key" }, { K1 "k1 %s\n", 0, "line 2: the id 'k1' is there twice" }, { "%s\n", 0, "line 1 is no key" },
        { "k1 g00102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n", 0, "line 1 is no key" } };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char text[400];
        struct pd_keys *k = NULL;
        struct pd_err e = { 0 };
        const char *mark = strstr(t[i].text, "%s");
        snprintf(text, sizeof text, "%.*s%s%s", mark ? (int)(mark - t[i].text) : 999, t[i].text, mark ? hex64 : "", mark ? mark + 2 : "");
        int rc = pd_keys_parse(text, strlen(text), "keys", &k, &e);
        if (t[i].why ? rc != PD_EUSAGE || !strstr(e.msg, t[i].why) || strstr(e.msg, "0a0b0c") : rc || pd_keys_count(k) != t[i].n)
            fail_msg("%zu: %d %s", i, rc, e.msg);
        pd_keys_free(k);
    }
    char longest[200];
    struct pd_keys *k = NULL;
    struct pd_err e;
    for (int n = PD_KEY_ID_MAX; n <= PD_KEY_ID_MAX + 1; n++) {
        memset(longest, 'i', (size_t)n);
        snprintf(longest + n, sizeof longest - (size_t)n, " %s\n", hex64);
        assert_int_equal(pd_keys_parse(longest, strlen(longest), "keys", &k, &e), n > PD_KEY_ID_MAX ? PD_EUSAGE : 0);
        if (n == PD_KEY_ID_MAX)
            assert_int_equal(strlen(pd_keys_id(k, 0)), n);
        pd_keys_free(k);
        k = NULL;
    }
}

static void key_files_are_private(void **state)
{
    char path[] = "/tmp/pd-keys-XXXXXX";
    int fd = mkstemp(path);
    struct pd_keys *k = NULL;
    struct pd_err e;
    assert_int_equal(write(fd, K1, strlen(K1)), strlen(K1));
    close(fd);
    static const int bad[] = { 0640, 0604, 0620, 0660, 0644, 0610 };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        chmod(path, (mode_t)bad[i]);
        assert_int_equal(pd_keys_load(path, &k, &e), PD_EUSAGE);
        assert_non_null(strstr(e.msg, "chmod 600"));
    }
    chmod(path, 0600);
    assert_int_equal(pd_keys_load(path, &k, &e), 0);
    assert_string_equal(pd_keys_id(k, 0), "k1");
    pd_keys_free(k);
    if (geteuid() == 0) {
        assert_int_equal(chown(path, 65534, 65534), 0);
        assert_int_equal(pd_keys_load(path, &k, &e), PD_EUSAGE);
    }
    unlink(path);
    assert_int_equal(pd_keys_load(path, &k, &e), PD_EUSAGE);
    assert_non_null(strstr(e.msg, "No such file"));
    assert_int_equal(pd_keys_load("/tmp", &k, &e), PD_EUSAGE);
    assert_int_equal(pd_keys_load("/dev/zero", &k, &e), PD_EUSAGE);
}

/* ---- two ends ---- */

struct ends { struct pd_keys *ck, *sk; int fd[2]; struct pd_tls *c, *s; };

static void open_ends(struct ends *w, const char *client, const char *server)
{
    struct pd_err e;
    memset(w, 0, sizeof *w);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, w->fd), 0);
    w->ck = keys_of(client);
    w->sk = keys_of(server);
    assert_int_equal(pd_tls_new(w->ck, w->fd[0], true, "C", &w->c, &e), 0);
    assert_int_equal(pd_tls_new(w->sk, w->fd[1], false, "S", &w->s, &e), 0);
}

static void close_ends(struct ends *w)
{
    pd_tls_free(w->c);
    pd_tls_free(w->s);
    close(w->fd[0]);
    close(w->fd[1]);
    pd_keys_free(w->ck);
    pd_keys_free(w->sk);
}

/* Both until they stand or one fails. */
static void shake(struct ends *w, int *c, int *s)
{
    for (int i = 0; i < 20; i++) {
        *c = pd_tls_shake(w->c);
        *s = pd_tls_shake(w->s);
    }
}

static void good_keys(void **state)
{
    static const struct { const char *c, *s, *id; } t[] = { { K1, K1, "k1" }, { K2, K1 K2, "k2" }, { K1 K2, K2 K1, "k1" } };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        struct ends w;
        int c, s;
        char got[20];
        open_ends(&w, t[i].c, t[i].s);
        errno = 0;
        assert_int_equal(pd_tls_read(w.s, got, sizeof got), -1);
        assert_int_equal(errno, EAGAIN);
        assert_string_equal(pd_tls_peer(w.s), "");
        shake(&w, &c, &s);
        if (c != 1 || s != 1)
            fail_msg("%s / %s", pd_tls_why(w.c)->msg, pd_tls_why(w.s)->msg);
        assert_string_equal(pd_tls_peer(w.s), t[i].id);
        assert_string_equal(pd_tls_peer(w.c), t[i].id);
        assert_int_equal(pd_tls_writev(w.c, &(struct iovec){ "hello", 5 }, 1), 5);
        assert_int_equal(pd_tls_read(w.s, got, sizeof got), 5);
        assert_memory_equal(got, "hello", 5);
        assert_int_equal(pd_tls_end(w.c), 0);           /* its own direction alone */
        assert_int_equal(pd_tls_read(w.s, got, sizeof got), 0);
        assert_int_equal(pd_tls_writev(w.s, &(struct iovec){ "bye", 3 }, 1), 3);
        assert_int_equal(pd_tls_read(w.c, got, sizeof got), 3);
        close_ends(&w);
    }
}

static void bad_keys(void **state)
{
    static const struct { const char *c, *s, *at_c, *at_s; } t[] = {
        { K1_OTHER, K1, "has another key by the id 'k1'", "has another key by the id 'k1'" },
        { K1, K2, "does not know the key with the id 'k1'", "the id 'k1', which is not in this key file" },              /* unknown, or old */
        { K1 K2, K2, "does not know the key with the id 'k1'", "the id 'k1', which is not in this key file" } };    /* the first is used, and that alone */
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        struct ends w;
        int c, s;
        open_ends(&w, t[i].c, t[i].s);
        shake(&w, &c, &s);
        if (c != -1 || s != -1 || !strstr(pd_tls_why(w.c)->msg, t[i].at_c) || !strstr(pd_tls_why(w.s)->msg, t[i].at_s))
            fail_msg("%zu: %d %d '%s' '%s'", i, c, s, pd_tls_why(w.c)->msg, pd_tls_why(w.s)->msg);
        char got[10];
        assert_int_equal(pd_tls_read(w.s, got, sizeof got), -1);
        assert_int_equal(errno, EPROTO);
        assert_int_equal(pd_tls_writev(w.c, &(struct iovec){ "x", 1 }, 1), -1);
        close_ends(&w);
    }
}

static void one_end_speaks_no_tls(void **state)
{
    for (int client = 0; client < 2; client++) {
        struct ends w;
        char got[600];
        open_ends(&w, K1, K1);
        struct pd_tls *t = client ? w.c : w.s;
        int other = w.fd[client];       /* the end of the one that is plain: the other's socket */
        assert_int_equal(pd_tls_shake(t), 0);
        assert_int_equal(send(other, "\x81\xa2pd\xa5hello", 10, 0), 10);
        assert_int_equal(pd_tls_shake(t), -1);
        assert_non_null(strstr(pd_tls_why(t)->msg, "speaks no TLS (start it with --key-file too)"));
        ssize_t n = recv(other, got, sizeof got, 0);
        if (!client) {
            assert_true(n > 20);
            assert_non_null(memmem(got, (size_t)n, "give --key-file", 15));
        }
        close_ends(&w);
    }
    /* And as a stream of records: a plain reader is told what it sees. */
    int p[2];
    static const struct { const char *bytes; const char *why; } t[] = { { "\x16\x03\x01\x02", "speaks TLS and this one does not" }, { "\x15\x03\x03\x00", "asks for TLS" } };
    for (size_t i = 0; i < 2; i++) {
        struct pd_rstream *rs;
        struct pd_rec rec;
        struct pd_err e;
        assert_int_equal(pipe(p), 0);
        assert_int_equal(write(p[1], t[i].bytes, 4), 4);
        assert_int_equal(pd_rstream_new(p[0], NULL, &rs, &e), 0);
        assert_int_equal(pd_rstream_next(rs, 0, &rec, NULL, &e), PD_EFAIL);
        if (!strstr(e.msg, t[i].why) || !strstr(e.msg, "--key-file"))
            fail_msg("%s", e.msg);
        pd_rstream_free(rs);
        close(p[0]);
        close(p[1]);
    }
}

/* All that a client wrote in a whole conversation, played again to a new server: nothing of it is taken, and no byte comes out. */
static void a_replayed_handshake(void **state)
{
    struct ends w;
    struct pd_err e;
    int c = 0, s = 0, mid[2], far[2];
    uint8_t tape[4096], got[100];
    size_t n = 0;
    open_ends(&w, K1, K1);
    /* the client's bytes pass through us */
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, mid), 0);
    struct pd_tls *srv;
    assert_int_equal(pd_tls_new(w.sk, mid[1], false, "S", &srv, &e), 0);
    for (int i = 0; i < 20; i++) {
        c = pd_tls_shake(w.c);
        if (c == 1 && i == 10)
            assert_int_equal(pd_tls_writev(w.c, &(struct iovec){ "secret", 6 }, 1), 6);
        ssize_t k = recv(w.fd[1], tape + n, sizeof tape - n, MSG_DONTWAIT);
        if (k > 0) {
            assert_int_equal(send(mid[0], tape + n, (size_t)k, 0), k);
            n += (size_t)k;
        }
        s = pd_tls_shake(srv);
        k = recv(mid[0], got, sizeof got, MSG_DONTWAIT);
        while (k > 0) {
            assert_int_equal(send(w.fd[1], got, (size_t)k, 0), k);
            k = recv(mid[0], got, sizeof got, MSG_DONTWAIT);
        }
    }
    assert_int_equal(c, 1);
    assert_int_equal(s, 1);
    assert_int_equal(pd_tls_read(srv, got, sizeof got), 6);
    pd_tls_free(srv);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, far), 0);
    assert_int_equal(pd_tls_new(w.sk, far[1], false, "S", &srv, &e), 0);
    assert_int_equal(send(far[0], tape, n, 0), n);
    for (int i = 0; i < 5; i++)
        assert_int_equal(pd_tls_shake(srv), -1);
    assert_int_equal(pd_tls_read(srv, got, sizeof got), -1);
    assert_non_null(strstr(pd_tls_why(srv)->msg, "handshake failed"));
    pd_tls_free(srv);
    for (int i = 0; i < 2; i++) {
        close(mid[i]);
        close(far[i]);
    }
    close_ends(&w);
}

static void bytes_come_as_they_went(void **state)
{
    enum { N = 3000000 };
    struct ends w;
    int c, s;
    uint8_t *a = malloc(N), *b = malloc(N);
    size_t out = 0, in = 0;
    bool stuck = false;
    for (size_t i = 0; i < N; i++)
        a[i] = (uint8_t)(i * 2654435761u >> 13);
    open_ends(&w, K1, K1);
    shake(&w, &c, &s);
    assert_true(c == 1 && s == 1);
    unsigned seed = 7;
    while (in < N) {
        for (int i = 0; i < 8 && out < N; i++) {        /* in odd pieces, until the socket and the room behind it are full */
            struct iovec v[3];
            size_t all = 0;
            for (int k = 0; k < 3; k++) {
                size_t len = (seed = seed * 1103515245 + 12345) / 65536 % 40000;
                len = len > N - out - all ? N - out - all : len;
                v[k] = (struct iovec){ a + out + all, len };
                all += len;
            }
            ssize_t k = pd_tls_writev(w.c, v, 3);
            if (k < 0) {
                assert_int_equal(errno, EAGAIN);
                assert_true(pd_tls_unsent(w.c));
                stuck = true;
                break;
            }
            out += (size_t)k;
        }
        for (int i = 0; i < 3; i++) {
            ssize_t k = pd_tls_read(w.s, b + in, N - in < 20011 ? N - in : 20011);
            if (k < 0) {
                assert_int_equal(errno, EAGAIN);
                break;
            }
            in += (size_t)k;
        }
        pd_tls_flush(w.c);
    }
    assert_true(stuck);
    assert_memory_equal(a, b, N);
    assert_false(pd_tls_unsent(w.c));
    /* one bit of a sealed record on its way */
    uint8_t raw[200];
    assert_int_equal(pd_tls_writev(w.c, &(struct iovec){ "0123456789", 10 }, 1), 10);
    ssize_t n = recv(w.fd[1], raw, sizeof raw, 0);
    raw[n - 3] ^= 1;
    assert_int_equal(send(w.fd[0], raw, (size_t)n, 0), n);
    assert_int_equal(pd_tls_read(w.s, b, 10), -1);
    assert_int_equal(errno, EPROTO);
    assert_int_equal(pd_tls_why(w.s)->code, PD_ECORRUPT);
    close_ends(&w);
    free(a);
    free(b);
}

static void a_peer_that_is_killed_has_not_ended(void **state)
{
    struct ends w;
    int c, s;
    char got[10];
    open_ends(&w, K1, K1);
    shake(&w, &c, &s);
    assert_int_equal(pd_tls_writev(w.c, &(struct iovec){ "x", 1 }, 1), 1);
    shutdown(w.fd[0], SHUT_RDWR);
    assert_int_equal(pd_tls_read(w.s, got, 10), 1);
    assert_int_equal(pd_tls_read(w.s, got, 10), -1);
    assert_int_equal(errno, ECONNRESET);
    assert_int_equal(pd_tls_why(w.s)->code, PD_ECANCEL);
    close_ends(&w);
}

/* ---- TCP ---- */

static void addresses(void **state)
{
    static const struct { const char *where; bool listening; const char *why; } t[] = {
        { "127.0.0.1:7", false, NULL }, { "[::1]:7", false, NULL }, { "localhost:7", false, NULL }, { ":7", true, NULL }, { ":0", true, NULL }, { "[::]:0", true, NULL },
        { "127.0.0.1", false, "port is missing" }, { "::1:7", false, "brackets" }, { "[::1]7", false, "brackets" }, { "[::1:7", false, "brackets" }, { ":7", false, "host is missing" },
        { "[]:7", true, "host is missing" }, { "a:0", false, "is no port" }, { "a:65536", false, "is no port" }, { "a:x", false, "is no port" }, { "a:", false, "is no port" },
        { "a: 7", false, "is no port" }, { "", false, "port is missing" }, { "no-such-host.invalid:7", false, "is not found" } };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        struct pd_tcp_addr a[PD_TCP_ADDRS];
        struct pd_err e = { 0 };
        int n = 0, rc = pd_tcp_resolve(t[i].where, t[i].listening, a, &n, &e);
        if (t[i].why ? !rc || !strstr(e.msg, t[i].why) : rc || n < 1)
            fail_msg("%s: %d %s", t[i].where, rc, e.msg);
    }
}

static void who_may_be_talked_to(void **state)
{
    struct pd_keys *k = keys_of(K1);
    static const struct { const char *where; bool ours; } t[] = { { "127.0.0.1:7", true }, { "127.9.9.9:7", true }, { "[::1]:7", true }, { "[::ffff:127.0.0.1]:7", true }, { "10.0.0.1:7", false },
        { "0.0.0.0:7", false }, { "[::]:7", false }, { "128.0.0.1:7", false }, { "[fe80::1]:7", false }, { "[::ffff:10.0.0.1]:7", false } };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        struct pd_tcp_addr a[PD_TCP_ADDRS];
        struct pd_err e;
        int n;
        assert_int_equal(pd_tcp_resolve(t[i].where, true, a, &n, &e), 0);
        assert_int_equal(pd_tcp_may(a, n, NULL, t[i].where, true, &e), t[i].ours ? 0 : PD_EUSAGE);
        if (!t[i].ours)
            assert_true(strstr(e.msg, "--key-file") && strstr(e.msg, "--insecure"));
        assert_int_equal(pd_tcp_may(a, n, &(struct pd_net){ .insecure = true }, t[i].where, true, &e), 0);
        assert_int_equal(pd_tcp_may(a, n, &(struct pd_net){ .keys = k }, t[i].where, true, &e), 0);
    }
    pd_keys_free(k);
}

struct writer { char spec[100]; struct pd_net net; int rc; struct pd_err e; bool cut; };

static void *write_records(void *arg)
{
    struct writer *w = arg;
    struct pd_endpoint ep = { .fd = -1 };
    struct pd_wstream *ws = NULL;
    static const uint8_t rec[] = { 0x81, 0xa2, 'p', 'd', 0xa6, 's', 't', 'a', 't', 'u', 's' };
    w->rc = pd_endpoint_open_out(w->spec, &w->net, &ep, &w->e);
    w->rc = w->rc ? w->rc : pd_wstream_of(&ep, PD_FMT_MSGPACK, w->spec, &ws, &w->e);
    for (int i = 0; !w->rc && i < 100000; i++)
        w->rc = pd_wstream_put(ws, rec, sizeof rec, &w->e);
    int rc = ws ? pd_wstream_close(ws, w->rc ? NULL : &w->e) : 0;
    w->rc = w->rc ? w->rc : rc;
    if (!w->rc && !w->cut)
        w->rc = pd_endpoint_commit(&ep, &w->e);
    else
        pd_endpoint_abort(&ep);
    return NULL;
}

/* The port that the listener tells of on stderr. */
struct catcher { int keep, p[2]; };
static void catch(struct catcher *c) { c->keep = dup(2); assert_int_equal(pipe(c->p), 0); dup2(c->p[1], 2); close(c->p[1]); }
static void caught(struct catcher *c, char *out, size_t cap)
{
    ssize_t n = read(c->p[0], out, cap - 1);
    out[n > 0 ? n : 0] = 0;
}
static void release(struct catcher *c) { dup2(c->keep, 2); close(c->keep); close(c->p[0]); }

struct reader { const char *spec; struct pd_net net; int rc; struct pd_err e; int n; };

static void *read_records(void *arg)
{
    struct reader *r = arg;
    struct pd_endpoint ep = { .fd = -1 };
    struct pd_rstream *rs = NULL;
    struct pd_rstream_opts o = { .name = "R" };
    struct pd_rec rec;
    r->rc = pd_endpoint_open_in(r->spec, &r->net, &ep, &r->e);
    r->rc = r->rc ? r->rc : pd_rstream_of(&ep, &o, &rs, &r->e);
    while (!r->rc) {
        int got = pd_rstream_next(rs, -1, &rec, NULL, &r->e);
        if (got == 0)
            break;
        r->n += got == 1;
        r->rc = got < 0 ? got : 0;
    }
    pd_rstream_free(rs);
    pd_endpoint_abort(&ep);
    return NULL;
}

static void endpoints(void **state)
{
    struct pd_keys *good = keys_of(K1), *bad = keys_of(K1_OTHER);
    static const char *const host[] = { "127.0.0.1", "[::1]", "localhost" };
    int have6 = socket(AF_INET6, SOCK_STREAM, 0);
    struct sockaddr_in6 six = { .sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT };
    bool no6 = have6 < 0 || bind(have6, (struct sockaddr *)&six, sizeof six);
    close(have6);
    for (int h = 0; h < 3; h++)
        for (int mode = 0; mode < 3; mode++) {      /* plain, TLS, TLS that is cut */
            if (h == 1 && no6)
                continue;
            char listen[100], told[400];
            struct catcher c;
            struct pd_net net = { .connect_us = 5000000, .keys = mode ? good : NULL };
            struct reader r = { .spec = listen, .net = net };
            struct writer w = { .net = net, .cut = mode == 2 };
            pthread_t t, u;
            snprintf(listen, sizeof listen, "tcp-listen:%s:0", host[h]);
            catch(&c);
            assert_int_equal(pthread_create(&t, NULL, read_records, &r), 0);
            caught(&c, told, sizeof told);
            const char *port = strrchr(told, ':');
            assert_non_null(port);
            int n = atoi(port + 1);
            assert_true(n > 0);
            snprintf(w.spec, sizeof w.spec, "tcp:%s:%d", host[h], n);
            if (mode == 1) {        /* one with a wrong key, and one without, do not end the wait */
                struct writer v = { .net = { .keys = bad } };
                strcpy(v.spec, w.spec);
                write_records(&v);
                assert_int_equal(v.rc, PD_EFAIL);
                assert_non_null(strstr(v.e.msg, "has another key"));
                caught(&c, told, sizeof told);
                assert_non_null(strstr(told, "another key by the id 'k1'"));
                v.net.keys = NULL;
                write_records(&v);
                assert_int_equal(v.rc, PD_ECANCEL);
                if (!strstr(v.e.msg, "--key-file"))
                    fail_msg("%s", v.e.msg);
                caught(&c, told, sizeof told);
                assert_non_null(strstr(told, "speaks no TLS"));
            }
            assert_int_equal(pthread_create(&u, NULL, write_records, &w), 0);
            pthread_join(u, NULL);
            pthread_join(t, NULL);
            release(&c);
            if (w.rc)
                fail_msg("%s", w.e.msg);
            if (mode == 2)
                assert_int_equal(r.rc, PD_ECANCEL);     /* not a clean end */
            else if (r.rc)
                fail_msg("%s", r.e.msg);
            assert_int_equal(r.n, 100000);
        }
    pd_keys_free(good);
    pd_keys_free(bad);
}

static void endpoints_that_cannot_be(void **state)
{
    struct pd_keys *good = keys_of(K1);
    struct pd_endpoint ep;
    struct pd_err e;
    static const struct { const char *spec; int rc; const char *why; } t[] = {
        { "tcp:10.1.2.3:9", PD_EUSAGE, "--key-file" }, { "tcp-listen::0", PD_EUSAGE, "--insecure" }, { "tcp-listen:0.0.0.0:0", PD_EUSAGE, "--key-file" }, { "tcp:", PD_EUSAGE, "port is missing" },
        { "tcp:x", PD_EUSAGE, "port is missing" }, { "tcp-listen:", PD_EUSAGE, "port is missing" }, { "tcp:no-such-host.invalid:9", PD_ETIME, "is not found" },
        { "tcp-listen:192.0.2.1:9", PD_EUSAGE, "--key-file" } };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        int rc = pd_endpoint_open_out(t[i].spec, NULL, &ep, &e);
        if (rc != t[i].rc || !strstr(e.msg, t[i].why))
            fail_msg("%s: %d %s", t[i].spec, rc, e.msg);
        assert_int_equal(ep.fd, -1);
    }
    int l;
    char told[PD_TCP_NAME], spec[PD_TCP_NAME + 20];
    assert_int_equal(pd_tcp_listen("127.0.0.1:0", 1, NULL, &l, told, &e), 0);
    snprintf(spec, sizeof spec, "tcp-listen:%s", told);
    assert_int_equal(pd_endpoint_open_in(spec, NULL, &ep, &e), PD_EUSAGE);
    assert_non_null(strstr(e.msg, "another process listens there"));
    close(l);
    snprintf(spec, sizeof spec, "tcp:%s", told);
    int64_t t0 = pd_mono_us();
    assert_int_equal(pd_endpoint_open_in(spec, &(struct pd_net){ .connect_us = 300000 }, &ep, &e), PD_ETIME);
    assert_true(pd_mono_us() - t0 >= 300000);
    assert_non_null(strstr(e.msg, "refused"));
    assert_int_equal(pd_tcp_listen("192.0.2.1:0", 1, &(struct pd_net){ .insecure = true }, &l, told, &e), PD_EUSAGE);
    /* options of a socket that is in use */
    assert_int_equal(pd_tcp_listen("127.0.0.1:0", 1, NULL, &l, told, &e), 0);
    snprintf(spec, sizeof spec, "tcp:%s", told);
    assert_int_equal(pd_endpoint_open_in(spec, NULL, &ep, &e), 0);
    int v = 0;
    socklen_t n = sizeof v;
    assert_int_equal(getsockopt(ep.fd, IPPROTO_TCP, TCP_NODELAY, &v, &n), 0);
    assert_true(v);
    assert_int_equal(getsockopt(ep.fd, SOL_SOCKET, SO_KEEPALIVE, &v, &n), 0);
    assert_true(v);
    pd_endpoint_abort(&ep);
    close(l);
    pd_tcp_reachable("127.0.0.1:5", told);
    assert_string_equal(told, "127.0.0.1:5");
    pd_tcp_reachable("[::]:5", told);
    assert_null(strstr(told, "[::]"));
    assert_non_null(strstr(told, ":5"));
    pd_keys_free(good);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    pd_log_init("pd-test", 0, false);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(key_files), cmocka_unit_test(key_files_are_private), cmocka_unit_test(good_keys), cmocka_unit_test(bad_keys),
        cmocka_unit_test(one_end_speaks_no_tls), cmocka_unit_test(a_replayed_handshake), cmocka_unit_test(bytes_come_as_they_went),
        cmocka_unit_test(a_peer_that_is_killed_has_not_ended), cmocka_unit_test(addresses), cmocka_unit_test(who_may_be_talked_to), cmocka_unit_test(endpoints),
        cmocka_unit_test(endpoints_that_cannot_be) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
