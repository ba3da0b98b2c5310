/* A daemon's life, from outside: a child process serves, the test is its clients, its supervisor and its scraper. */
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/base/log.h"
#include "../../libcommon/base/stop.h"
#include "../../libcommon/serve/daemon.h"
#include "files.h"

static char dir[] = "/tmp/pd-test-XXXXXX";
static struct pd_err e;

static const char *in_dir(const char *name)
{
    static char path[16][200];
    static int turn;
    turn = (turn + 1) % 16;
    snprintf(path[turn], sizeof path[turn], "%s/%s", dir, name);
    return path[turn];
}

/* ---- the child: {"n":N,"ms":M,"size":S} is answered with N records of S bytes, after M ms that a thread works on it ---- */

struct job { struct pd_post post; struct pd_conn *c; int64_t n, ms, size, sent; struct job *next; };
static struct { struct pd_daemon *d; struct job *jobs; int in_hand, cancelled, gone, beats; pthread_t thread; int pipe[2]; } S;

static int64_t number(const struct pd_rec *r, const char *key, int64_t absent)
{
    struct pd_bin v;
    int64_t n = absent;
    if (pd_map_find(r->p, r->n, key, &v) == 1 && v.n == 1 && v.p[0] < 0x80)
        n = v.p[0];
    else if (pd_map_find(r->p, r->n, key, &v) == 1 && v.n == 3 && v.p[0] == 0xcd)
        n = v.p[1] << 8 | v.p[2];
    return n;
}

static void job_free(struct job *j)
{
    for (struct job **q = &S.jobs; *q; q = &(*q)->next)
        if (*q == j) {
            *q = j->next;
            break;
        }
    S.in_hand--;
    free(j);
    pd_daemon_poke(S.d);
}

static void answer(struct job *j)
{
    static uint8_t rec[1 << 16];
    size_t n = (size_t)j->size < 8 ? 8 : (size_t)j->size;
    memcpy(rec, "\x81\xa1" "a\xc5", 4);
    rec[4] = (uint8_t)((n - 6) >> 8);
    rec[5] = (uint8_t)(n - 6);
    for (; j->sent < j->n && !pd_conn_full(j->c); j->sent++)
        if (pd_conn_put(j->c, rec, n, &e) < 0)
            return;
    if (j->sent < j->n)
        return;                         /* the rest at `room` */
    struct pd_conn *c = j->c;
    job_free(j);
    pd_conn_owe(c, -1);
}

static void worked(void *ctx)
{
    struct job *j = ctx;
    if (j->c) {
        j->ms = -1;
        answer(j);
    } else
        job_free(j);                    /* its client went meanwhile */
}

static void *work(void *arg)
{
    struct job *j;
    (void)arg;
    while (read(S.pipe[0], &j, sizeof j) == sizeof j && j) {
        usleep((useconds_t)j->ms * 1000);
        pd_loop_post(pd_daemon_loop(S.d), &j->post);
    }
    return NULL;
}

static void on_request(void *ctx, struct pd_conn *c, const struct pd_rec *r)
{
    struct job *j = calloc(1, sizeof *j);
    *j = (struct job){ .post = { .fn = worked, .ctx = j }, .c = c, .n = number(r, "n", 1), .ms = number(r, "ms", 0), .size = number(r, "size", 8), .next = S.jobs };
    S.jobs = j;
    S.in_hand++;
    pd_conn_owe(c, 1);
    if (j->ms) {
        if (write(S.pipe[1], &j, sizeof j) < 0)
            _exit(99);
    } else {
        j->ms = -1;
        answer(j);
    }
}

static void on_room(void *ctx, struct pd_conn *c)
{
    for (struct job *j = S.jobs, *next; j && !pd_conn_full(c); j = next) {
        next = j->next;
        if (j->c == c && j->ms < 0)
            answer(j);
    }
}

static void on_gone(void *ctx, struct pd_conn *c, const struct pd_err *why)
{
    S.gone += why != NULL;
    for (struct job *j = S.jobs, *next; j; j = next) {
        next = j->next;
        if (j->c == c && j->ms < 0)
            job_free(j);
        else if (j->c == c)
            j->c = NULL;
    }
}
static const struct pd_conn_cb plain = { .record = on_request, .room = on_room, .gone = on_gone };
static const struct pd_entry entries[] = { { NULL, &plain, NULL, false } };

static bool is_busy(void *ctx) { return S.in_hand > 0; }
static void on_beat(void *ctx) { S.beats++; }
static int on_cancel(void *ctx, const struct pd_rec *r, const char **state, struct pd_err *err)
{
    S.cancelled++;
    *state = "cancelled";
    return number(r, "bad", 0) ? pd_fail(err, PD_EFAIL, "no token, no cancel") : 0;
}
static void ledger(void *ctx, void (*put)(void *to, const char *key, int64_t v), void *to)
{
    put(to, "in_hand", S.in_hand);
    put(to, "gone", S.gone);
    put(to, "beats", S.beats);
    put(to, "heap", (int64_t)mallinfo2().uordblks);     /* in use, whatever the allocator holds besides (ASan: 0) */
}

static struct { pid_t pid; int ready, err; char where[200]; } D;

/* Serves until told to end; exits as a command does. */
static void child(struct pd_daemon_opts *o, int limit)
{
    struct pd_daemon_hooks h = { .busy = is_busy, .beat = on_beat, .ledger = ledger, .cancel = on_cancel };
    int rc;
    pd_log_init("served", 0, false);
    pd_stop_init();
    if (limit)
        setrlimit(RLIMIT_NOFILE, &(struct rlimit){ (rlim_t)limit, (rlim_t)limit });
    o->entry = entries;
    o->n_entry = 1;
    o->role = "both";
    o->worker = "both@test:1";
    o->beat_us = 10000;
    if (pipe(S.pipe) || (rc = pd_daemon_new(o, &h, &S.d, &e)) < 0 || (rc = pd_daemon_ready(S.d, &e)) < 0 || pthread_create(&S.thread, NULL, work, NULL)) {
        pd_error("%s", e.msg);
        exit(pd_exit_status(e.code));
    }
    if ((rc = pd_daemon_run(S.d, &e)) < 0)
        pd_error("%s", e.msg);
    if (write(S.pipe[1], &(struct job *){ NULL }, sizeof(struct job *)) < 0) {}
    pthread_join(S.thread, NULL);
    pd_daemon_free(S.d);
    for (struct job *j = S.jobs, *next; j; j = next) {
        next = j->next;
        free(j);
    }
    exit(pd_exit_status(rc));
}

static void start(const char *path, const char *metrics, uint32_t max_conns, int limit)
{
    static const char *listen_[2];
    int ready[2], err[2];
    char got[20] = "";
    assert_int_equal(pipe2(ready, O_CLOEXEC), 0);
    assert_int_equal(pipe2(err, O_CLOEXEC), 0);
    snprintf(D.where, sizeof D.where, "unix:%s", path);
    listen_[0] = D.where;
    D.pid = fork();
    if (!D.pid) {
        struct pd_daemon_opts o = { .listen = listen_, .metrics = metrics, .ready_fd = ready[1], .max_conns = max_conns, .max_record = 1 << 20 };
        close(ready[0]);
        dup2(err[1], 2);
        close(err[0]);
        close(err[1]);
        child(&o, limit);
    }
    close(ready[1]);
    close(err[1]);
    D.ready = ready[0];
    D.err = err[0];
    if (read(D.ready, got, sizeof got - 1) != 8 || strcmp(got, "READY=1\n"))
        fail_msg("not ready: %s", got);
}

/* What it said on stderr, once it is over; its exit status. */
static int end(char said[4000])
{
    int status = 0;
    size_t n = 0;
    waitpid(D.pid, &status, 0);
    for (ssize_t k; n < 3999 && (k = read(D.err, said + n, 3999 - n)) > 0; n += (size_t)k) {}
    said[n] = 0;
    close(D.err);
    close(D.ready);
    D.pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

static void stop_well(void)
{
    char said[4000];
    kill(D.pid, SIGTERM);
    int rc = end(said);
    if (rc)
        fail_msg("exit %d: %s", rc, said);
}

/* ---- clients ---- */

static int dial(void)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    memcpy(a.sun_path, D.where + 5, strlen(D.where + 5));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a)) {
        close(fd);
        return -1;
    }
    return fd;
}

static int ask(const char *text)
{
    int fd = dial();
    assert_true(fd >= 0);
    assert_int_equal(send(fd, text, strlen(text), MSG_NOSIGNAL), (ssize_t)strlen(text));
    return fd;
}

/* Everything up to the end, within 10 s; "" on time-out. */
static char heard[1 << 20];
static size_t hear_all(int fd)
{
    size_t n = 0;
    for (;;) {
        struct pollfd p = { fd, POLLIN, 0 };
        if (poll(&p, 1, 10000) <= 0)
            fail_msg("nothing for 10 s, after %zu bytes: %.200s", n, heard);
        ssize_t k = recv(fd, heard + n, sizeof heard - 1 - n, 0);
        if (k <= 0)
            break;
        n += (size_t)k;
    }
    heard[n] = 0;
    close(fd);
    return n;
}

static void hear_line(int fd)
{
    size_t n = 0;
    for (char c; n < sizeof heard - 1 && recv(fd, &c, 1, 0) == 1 && c != '\n'; heard[n++] = c) {}
    heard[n] = 0;
}

static void ask_once(const char *text)
{
    int fd = ask(text);
    shutdown(fd, SHUT_WR);
    hear_all(fd);
}

static long counted(const char *key)
{
    char k[60], *at;
    ask_once("{\"pd\":\"status\"}\n");
    snprintf(k, sizeof k, "\"%s\":", key);
    at = strstr(heard, k);
    if (!at)
        fail_msg("no %s in %s", key, heard);
    return atol(at + strlen(k));
}

static void until_counted(const char *key, long want)
{
    long n = -1;
    for (int i = 0; i < 500 && n != want; i++) {
        n = counted(key);
        if (n != want)
            usleep(10000);
    }
    if (n != want)
        fail_msg("%s is %ld, not %ld: %s", key, n, want, heard);
}

/* ---- tests ---- */

static void a_life_from_ready_to_gone(void **state)
{
    struct stat st;
    char got[20] = "", said[4000];
    const char *path = in_dir("a");
    umask(0);
    start(path, NULL, 0, 0);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    ask_once("{\"pd\":\"status\",\"v\":1}\n{\"pd\":\"cancel\",\"run\":\"R\"}\n{\"pd\":\"cancel\",\"bad\":1}\n{\"pd\":\"else\"}\n");
    assert_non_null(strstr(heard, "{\"pd\":\"status\",\"v\":1,\"state\":\"ready\",\"worker\":\"both@test:1\",\"role\":\"both\",\"ledger\":{"));
    assert_non_null(strstr(heard, "\"run\":\"R\",\"state\":\"cancelled\"}\n"));
    assert_non_null(strstr(heard, "no token, no cancel"));
    assert_non_null(strstr(heard, "kind 'else' belongs on another"));
    ask_once("{\"n\":3}\n{\"n\":2,\"ms\":20}\n");
    int lines = 0;
    for (char *c = heard; (c = strchr(c, '\n')); c++)
        lines++;
    assert_int_equal(lines, 5);
    usleep(50000);
    assert_true(counted("beats") > 1);
    kill(D.pid, SIGTERM);
    assert_int_equal(read(D.ready, got, sizeof got), 11);
    assert_memory_equal(got, "STOPPING=1\n", 11);
    assert_int_equal(read(D.ready, got, sizeof got), 0);
    assert_int_equal(end(said), 0);
    assert_non_null(strstr(said, "served: ready: unix:"));
    assert_non_null(strstr(said, "served: draining"));
    assert_int_equal(access(path, F_OK), -1);
}

static void a_dead_socket_is_replaced_and_a_live_one_is_not(void **state)
{
    const char *path = in_dir("b");
    char said[4000];
    start(path, NULL, 0, 0);
    kill(D.pid, SIGKILL);
    assert_int_equal(end(said), 100 + SIGKILL);
    assert_int_equal(access(path, F_OK), 0);
    start(path, NULL, 0, 0);
    const char *listen_[] = { D.where, NULL };
    struct pd_daemon_opts o = { .listen = listen_, .ready_fd = -1 };
    struct pd_daemon *d;
    assert_int_equal(pd_daemon_new(&o, NULL, &d, &e), PD_EUSAGE);
    assert_non_null(strstr(e.msg, "another process listens there"));
    kill(D.pid, SIGSTOP);               /* one that stands still is alive */
    assert_int_equal(pd_daemon_new(&o, NULL, &d, &e), PD_EUSAGE);
    kill(D.pid, SIGCONT);
    ask_once("{\"n\":1}\n");
    assert_true(*heard);
    /* its name was taken away and given to another: it removes only its own */
    unlink(path);
    FILE *f = fopen(path, "w");
    fclose(f);
    stop_well();
    assert_int_equal(unlink(path), 0);
    static const struct { const char *spec, *why; } bad[] = { { "tcp:1", "port is missing" }, { "tcp-listen::1", "--key-file" }, { "rdma:x", "no endpoint to listen on" }, { "unix:", "no endpoint" }, { "/x", "no endpoint" },
        { "unix:/no/such/dir/x", "cannot listen" }, { "unix:/tmp", "is no socket" } };
    int n = open_fds();
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        listen_[0] = bad[i].spec;
        if (!pd_daemon_new(&o, NULL, &d, &e) || !strstr(e.msg, bad[i].why))
            fail_msg("%s: %s", bad[i].spec, e.msg);
    }
    listen_[0] = NULL;
    assert_int_equal(pd_daemon_new(&o, NULL, &d, &e), PD_EUSAGE);
    assert_int_equal(open_fds(), n);
}

static void a_thousand_connections_leave_nothing(void **state)
{
    enum { N = 1000 };
    static int fd[N];
    start(in_dir("c"), NULL, 0, 0);
    counted("fds");
    long before = counted("fds"), heap = 0;
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < N; i++)
            fd[i] = ask(i % 3 ? "{\"n\":2}\n" : i % 2 ? "{\"n\":1,\"ms\":1}\n" : "\x81\xa1n\x01");
        for (int i = 0; i < N; i++) {
            if (i % 5 == 0)
                close(fd[i]);           /* without listening */
            else {
                shutdown(fd[i], SHUT_WR);
                assert_true(hear_all(fd[i]) > 0);
            }
        }
        until_counted("connections", 1);
        until_counted("in_hand", 0);
        assert_int_equal(counted("fds"), before);
        if (!round)
            heap = counted("heap");
    }
    assert_true(labs(counted("heap") - heap) < 1 << 16);
    assert_int_equal(counted("accepted") >= 3 * N, 1);
    stop_well();
}

static void floods_of_garbage_harm_nobody(void **state)
{
    static char junk[1 << 16];
    start(in_dir("d"), NULL, 0, 0);
    srand(1);
    int good = ask("{\"n\":1}\n");
    hear_line(good);
    for (int round = 0; round < 60; round++) {
        int fd = dial();
        for (size_t i = 0; i < sizeof junk; i++)
            junk[i] = (char)rand();
        static const char *const begin[] = { "", "{", "{\"pd\":\"status\"}\n", "\xdf\xff\xff\xff\xff", "\x81\xa1" "a\xc6\xff\xff\xff\xff", "{}\n" };
        const char *b = begin[round % 6];
        if (send(fd, b, round % 6 == 3 ? 5 : strlen(b), MSG_NOSIGNAL) < 0) {}
        for (int i = 0; i < 8 && send(fd, junk, sizeof junk, MSG_NOSIGNAL | MSG_DONTWAIT) > 0; i++) {}
        if (round % 2)
            close(fd);
        else {
            shutdown(fd, SHUT_WR);
            hear_all(fd);
        }
    }
    assert_int_equal(send(good, "{\"n\":1}\n", 8, MSG_NOSIGNAL), 8);
    hear_line(good);
    assert_true(*heard);
    close(good);
    until_counted("connections", 1);
    stop_well();
}

static void without_descriptors_it_waits_and_tells_once(void **state)
{
    enum { N = 100 };
    int fd[N];
    char said[4000], *at;
    start(in_dir("e"), NULL, 0, 50);
    for (int i = 0; i < N; i++)
        fd[i] = ask("{\"n\":1}\n");     /* they wait in the socket's queue */
    usleep(300000);
    for (int i = 0; i < N; i++) {       /* each close makes room for another */
        hear_line(fd[i]);
        if (!*heard)
            fail_msg("no answer to %d", i);
        close(fd[i]);
    }
    until_counted("connections", 1);
    kill(D.pid, SIGTERM);
    assert_int_equal(end(said), 0);
    at = strstr(said, "no connection can be accepted");
    assert_non_null(at);
    assert_null(strstr(at + 1, "no connection can be accepted"));
}

static void past_the_most_connections_one_is_told(void **state)
{
    int fd[4];
    start(in_dir("f"), NULL, 4, 0);
    for (int i = 0; i < 4; i++) {
        fd[i] = ask("{\"n\":1}\n");
        hear_line(fd[i]);
    }
    int more = dial();
    hear_all(more);
    assert_non_null(strstr(heard, "\"class\":\"exhausted\""));
    assert_non_null(strstr(heard, "--max-connections"));
    for (int i = 0; i < 4; i++)
        close(fd[i]);
    usleep(50000);
    until_counted("connections", 1);
    stop_well();
}

static void a_drain_finishes_what_is_owed(void **state)
{
    char said[4000];
    start(in_dir("g"), NULL, 0, 0);
    int slow = ask("{\"n\":3,\"ms\":500}\n"), idle = ask("{\"n\":1}\n"), silent = dial();
    hear_line(idle);
    until_counted("in_hand", 1);
    kill(D.pid, SIGTERM);
    hear_all(idle);                     /* nothing is owed to it */
    assert_string_equal(heard, "");
    hear_all(silent);
    assert_int_equal(counted("in_hand"), 1);
    assert_non_null(strstr(heard, "\"state\":\"draining\""));
    ask_once("{\"n\":1}\n");
    assert_non_null(strstr(heard, "\"action\":\"reroute\""));
    hear_all(slow);
    assert_int_equal(end(said), 0);
    int lines = 0;
    for (char *c = heard; (c = strchr(c, '\n')); c++)
        lines++;
    assert_int_equal(lines, 3);
}

static void a_second_signal_stops(void **state)
{
    char said[4000];
    start(in_dir("h"), NULL, 0, 0);
    int slow = ask("{\"n\":1,\"ms\":900}\n");
    until_counted("in_hand", 1);
    kill(D.pid, SIGTERM);
    usleep(100000);
    kill(D.pid, SIGTERM);
    assert_int_equal(end(said), 6);
    assert_non_null(strstr(said, "second signal with 1 answers owed"));
    close(slow);
}

static void slow_readers_stop_nobody(void **state)
{
    start(in_dir("i"), NULL, 0, 0);
    long rss = counted("rss_bytes");
    int slow[8];
    for (int i = 0; i < 8; i++)
        slow[i] = ask("{\"n\":60000,\"size\":8000}\n");         /* half a gigabyte each, that nobody reads */
    for (int i = 0; i < 50; i++) {
        ask_once("{\"n\":2}\n");
        assert_true(*heard);
    }
    assert_int_equal(counted("in_hand"), 8);
    assert_true(counted("rss_bytes") - rss < 64 << 20);
    size_t n = 0;
    while (n < 8 << 20) {               /* who reads gets more */
        ssize_t k = recv(slow[0], heard, sizeof heard, 0);
        assert_true(k > 0);
        n += (size_t)k;
    }
    for (int i = 0; i < 8; i++)
        close(slow[i]);
    until_counted("in_hand", 0);
    assert_int_equal(counted("gone"), 8);
    stop_well();
}

static void killed_clients_are_gone(void **state)
{
    enum { N = 20 };
    pid_t p[N];
    start(in_dir("j"), NULL, 0, 0);
    for (int i = 0; i < N; i++)
        if (!(p[i] = fork())) {
            ask(i % 2 ? "{\"n\":1,\"ms\":20}\n{\"n\":60000,\"size\":8000}\n" : "{\"n\":60000,\"size\":8000}\n");
            pause();
        }
    until_counted("connections", N + 1);
    for (int i = 0; i < N; i++) {
        kill(p[i], SIGKILL);
        waitpid(p[i], NULL, 0);
    }
    until_counted("connections", 1);
    until_counted("in_hand", 0);
    assert_int_equal(counted("gone"), N);
    stop_well();
}

/* ---- HTTP ---- */

static void http(const char *where, const char *request)
{
    int fd;
    if (!strncmp(where, "unix:", 5)) {
        struct sockaddr_un a = { .sun_family = AF_UNIX };
        memcpy(a.sun_path, where + 5, strlen(where + 5));
        fd = socket(AF_UNIX, SOCK_STREAM, 0);
        assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    } else {
        struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(strrchr(where, ':') + 1)), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
        fd = socket(AF_INET, SOCK_STREAM, 0);
        assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    }
    send(fd, request, strlen(request), MSG_NOSIGNAL);
    hear_all(fd);
}
#define GET(path) "GET " path " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

static void metrics_are_told(void **state)
{
    char said[4000], where[200], big[20000], *at;
    for (int tcp = 0; tcp < 2; tcp++) {
        snprintf(where, sizeof where, "unix:%s", in_dir("k.metrics"));
        start(in_dir("k"), tcp ? "http:127.0.0.1:0" : where, 0, 0);
        size_t n = 0;
        if (tcp) {                      /* the port is in the line that says ready */
            ssize_t k = read(D.err, said, sizeof said - 1);
            said[k < 0 ? 0 : k] = 0;
            at = strstr(said, "metrics http:");
            assert_non_null(at);
            snprintf(where, sizeof where, "%.*s", (int)strcspn(at + 8, "\n"), at + 8);
        }
        ask_once("{\"n\":2}\n");
        http(where, GET("/metrics"));
        assert_memory_equal(heard, "HTTP/1.1 200", 12);
        assert_non_null(strstr(heard, "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
        assert_non_null(strstr(heard, "\npd_accepted_total 1\n"));
        assert_non_null(strstr(heard, "\npd_records_total{direction=\"out\"} 2\n"));
        assert_non_null(strstr(heard, "\npd_state{state=\"ready\"} 1\n"));
        http(where, GET("/healthz"));
        assert_memory_equal(heard, "HTTP/1.1 200", 12);
        assert_non_null(strstr(heard, "\r\n\r\nready\n"));
        http(where, GET("/"));
        assert_memory_equal(heard, "HTTP/1.1 404", 12);
        http(where, "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc");
        assert_null(strstr(heard, "pd_accepted_total"));
        n = (size_t)snprintf(big, sizeof big, "GET /metrics HTTP/1.1\r\nX: ");
        memset(big + n, 'x', 15000);
        strcpy(big + n + 15000, "\r\n\r\n");
        http(where, big);
        assert_null(strstr(heard, "pd_accepted_total"));
        int slow = ask("{\"ms\":400}\n");
        until_counted("in_hand", 1);
        kill(D.pid, SIGTERM);
        usleep(50000);
        http(where, GET("/healthz"));
        assert_memory_equal(heard, "HTTP/1.1 503", 12);
        assert_non_null(strstr(heard, "draining"));
        hear_all(slow);
        assert_int_equal(end(said), 0);
        if (!tcp)
            assert_int_equal(access(where + 5, F_OK), -1);
    }
    static const struct { const char *spec, *why; } bad[] = { { "http:0.0.0.0:0", "not loopback" }, { "http:[::]:0", "not loopback" }, { "http:127.0.0.1", "no place for HTTP" },
        { "http:x:1", "no address" }, { "http:127.0.0.1:70000", "no place" }, { "127.0.0.1:1", "no place" }, { "unix:", "missing" }, { "unix:/tmp", "no socket" } };
    int n = open_fds();
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char path[200];
        snprintf(path, sizeof path, "unix:%s", in_dir("l"));
        const char *listen_[] = { path, NULL };
        struct pd_daemon_opts o = { .listen = listen_, .ready_fd = -1, .metrics = bad[i].spec };
        struct pd_daemon *d;
        if (pd_daemon_new(&o, NULL, &d, &e) != PD_EUSAGE || !strstr(e.msg, bad[i].why) || strncmp(e.msg, "--metrics", 9))
            fail_msg("%s: %s", bad[i].spec, e.msg);
        assert_int_equal(access(path + 5, F_OK), -1);
    }
    assert_int_equal(open_fds(), n);
}

static int clean(void **state)
{
    if (D.pid > 0) {                    /* a test failed half way */
        kill(D.pid, SIGKILL);
        waitpid(D.pid, NULL, 0);
        D.pid = 0;
    }
    return 0;
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    if (!mkdtemp(dir))
        return 1;
#define T(f) cmocka_unit_test_teardown(f, clean)
    const struct CMUnitTest tests[] = {
        T(a_life_from_ready_to_gone), T(a_dead_socket_is_replaced_and_a_live_one_is_not), T(a_thousand_connections_leave_nothing), T(floods_of_garbage_harm_nobody),
        T(without_descriptors_it_waits_and_tells_once), T(past_the_most_connections_one_is_told), T(a_drain_finishes_what_is_owed), T(a_second_signal_stops),
        T(slow_readers_stop_nobody), T(killed_clients_are_gone), T(metrics_are_told) };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    rmdir(dir);
    return rc;
}
