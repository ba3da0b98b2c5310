/* Endpoints: names, temporary files, Unix sockets; and the event writer. */
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../libcommon/base/log.h"
#include "../../libcommon/trace/event.h"
#include "../../libcommon/wire/endpoint.h"
#include "../../libcommon/wire/stream.h"
#include "files.h"

static char dir[] = "/tmp/pd-test-XXXXXX";

static const char *in_dir(const char *name)
{
    static char path[64][200];
    static int turn;
    turn = (turn + 1) % 64;
    snprintf(path[turn], sizeof path[turn], "%s/%s", dir, name);
    return path[turn];
}

static void put(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    fputs(text, f);
    fclose(f);
}

static const char *names(void) { return names_in(dir); }

static void names_are_refused_with_a_reason(void **state)
{
    static const struct { const char *spec; int rc; const char *why; } t[] = {
        { "", PD_EUSAGE, "empty" }, { "tcp:host", PD_EUSAGE, "port is missing" }, { "tcp-listen::1", PD_EUSAGE, "--key-file" },
        { "rdma:host:1", PD_EUSAGE, "rdma" }, { "shm:x", PD_EUSAGE, "shm" }, { "http:x:1", PD_EUSAGE, "http" }, { "unix:", PD_EUSAGE, "path is missing" },
        { "unix-listen:", PD_EUSAGE, "path is missing" }, { "/tmp", PD_EUSAGE, "is a directory" }, { "/no/such/file", PD_EFAIL, "No such file" } };
    struct pd_endpoint ep;
    struct pd_err e;
    for (size_t i = 0; i < sizeof t / sizeof *t; i++)
        for (int out = 0; out < 2; out++) {
            int rc = out ? pd_endpoint_open_out(t[i].spec, NULL, &ep, &e) : pd_endpoint_open_in(t[i].spec, NULL, &ep, &e);
            if (rc != t[i].rc || !strstr(e.msg, t[i].why))
                fail_msg("%s: %d '%s'", t[i].spec, rc, e.msg);
            assert_int_equal(ep.fd, -1);
        }
    char longpath[300] = "unix:/";
    memset(longpath + 6, 'a', 200);
    longpath[206] = 0;
    assert_int_equal(pd_endpoint_open_in(longpath, NULL, &ep, &e), PD_EUSAGE);
    assert_true(pd_endpoint_is_h5("a.h5"));
    assert_true(pd_endpoint_is_h5("/x/a.b.h5"));
    assert_false(pd_endpoint_is_h5(".h5"));
    assert_false(pd_endpoint_is_h5("a.h5x"));
    assert_false(pd_endpoint_is_h5("unix:a.h5"));
    assert_false(pd_endpoint_is_h5("-"));
}

static void a_file_appears_whole_or_not_at_all(void **state)
{
    struct pd_endpoint ep;
    struct pd_err e;
    const char *path = in_dir("out");
    assert_int_equal(pd_endpoint_open_out(path, NULL, &ep, &e), 0);
    assert_int_equal(write(ep.fd, "new", 3), 3);
    assert_int_equal(access(path, F_OK), -1);
    pd_endpoint_abort(&ep);
    assert_string_equal(names(), "");
    assert_int_equal(pd_endpoint_open_out(path, NULL, &ep, &e), 0);
    assert_int_equal(write(ep.fd, "newer", 5), 5);
    assert_int_equal(pd_endpoint_commit(&ep, &e), 0);
    assert_int_equal(ep.fd, -1);
    pd_endpoint_abort(&ep);     /* after a commit: nothing */
    assert_string_equal(names(), "out ");
    holds(path, "newer");
    assert_int_equal(pd_endpoint_open_in(path, NULL, &ep, &e), 0);
    char got[6] = "";
    assert_int_equal(read(ep.fd, got, 5), 5);
    assert_string_equal(got, "newer");
    pd_endpoint_abort(&ep);
    /* the rename fails: the temporary goes too */
    assert_int_equal(pd_endpoint_open_out(in_dir("d"), NULL, &ep, &e), 0);
    assert_int_equal(mkdir(in_dir("d"), 0700), 0);
    assert_int_equal(pd_endpoint_commit(&ep, &e), PD_EFAIL);
    assert_int_equal(rmdir(in_dir("d")), 0);
    unlink(path);
    assert_string_equal(names(), "");
}

static void devices_are_written_as_they_are(void **state)
{
    struct pd_endpoint ep;
    struct pd_err e;
    struct stat st;
    assert_int_equal(pd_endpoint_open_out("/dev/null", NULL, &ep, &e), 0);
    assert_null(ep.file.path);
    assert_int_equal(pd_endpoint_commit(&ep, &e), 0);
    assert_int_equal(stat("/dev/null", &st), 0);
    assert_true(S_ISCHR(st.st_mode));
    const char *fifo = in_dir("fifo");
    assert_int_equal(mkfifo(fifo, 0600), 0);
    int r = open(fifo, O_RDONLY | O_NONBLOCK);
    assert_int_equal(pd_endpoint_open_out(fifo, NULL, &ep, &e), 0);
    assert_int_equal(fcntl(ep.fd, F_GETPIPE_SZ), 1 << 20);
    assert_int_equal(write(ep.fd, "x", 1), 1);
    assert_int_equal(pd_endpoint_commit(&ep, &e), 0);
    char c;
    assert_int_equal(read(r, &c, 1), 1);
    close(r);
    unlink(fifo);
}

struct peer { const char *spec; int rc; struct pd_err e; char got[20]; };

static void *connect_and_read(void *arg)
{
    struct peer *p = arg;
    struct pd_endpoint ep;
    p->rc = pd_endpoint_open_in(p->spec, &(struct pd_net){ .connect_us = 5000000 }, &ep, &p->e);
    if (!p->rc) {
        ssize_t n = 0, k;
        while ((k = read(ep.fd, p->got + n, sizeof p->got - 1 - (size_t)n)) > 0)
            n += k;
        p->got[n] = 0;
        pd_endpoint_abort(&ep);
    }
    return NULL;
}

static void a_socket_serves_one_peer(void **state)
{
    struct pd_endpoint ep;
    struct pd_err e;
    char in[200], out[200];
    snprintf(in, sizeof in, "unix:%s/s", dir);
    snprintf(out, sizeof out, "unix-listen:%s/s", dir);
    assert_int_equal(pd_endpoint_open_in(in, &(struct pd_net){ .connect_us = 60000 }, &ep, &e), PD_ETIME);       /* nobody there */
    assert_non_null(strstr(e.msg, "within 60 ms"));
    for (int round = 0; round < 2; round++) {
        struct peer p = { .spec = in };
        pthread_t t;
        if (round) {        /* a socket that a killed process left */
            struct sockaddr_un a = { .sun_family = AF_UNIX };
            snprintf(a.sun_path, sizeof a.sun_path, "%s/s", dir);
            int dead = socket(AF_UNIX, SOCK_STREAM, 0);
            assert_int_equal(bind(dead, (struct sockaddr *)&a, sizeof a), 0);
            close(dead);
        }
        assert_int_equal(pthread_create(&t, NULL, connect_and_read, &p), 0);
        assert_int_equal(pd_endpoint_open_out(out, NULL, &ep, &e), 0);
        assert_int_equal(access(in_dir("s"), F_OK), -1);
        assert_int_equal(write(ep.fd, "hello", 5), 5);
        assert_int_equal(pd_endpoint_commit(&ep, &e), 0);
        pthread_join(t, NULL);
        assert_int_equal(p.rc, 0);
        assert_string_equal(p.got, "hello");
    }
    put(in_dir("s"), "mine");
    assert_int_equal(pd_endpoint_open_in(out, NULL, &ep, &e), PD_EUSAGE);
    assert_non_null(strstr(e.msg, "no socket"));
    holds(in_dir("s"), "mine");
    unlink(in_dir("s"));
}

static void a_socket_is_private_and_not_stolen(void **state)
{
    struct stat st;
    struct pd_endpoint ep;
    struct pd_err e;
    char out[200];
    snprintf(out, sizeof out, "unix-listen:%s/p", dir);
    umask(0);
    pid_t pid = fork();
    if (!pid) {
        int rc = pd_endpoint_open_in(out, NULL, &ep, &e);
        _exit(rc ? 1 : 0);
    }
    for (int i = 0; i < 500 && stat(in_dir("p"), &st); i++)
        usleep(10000);
    assert_int_equal(st.st_mode & 0777, 0600);
    umask(022);
    usleep(50000);
    if (geteuid() == 0) {       /* another user, who may even enter the directory, is turned away, and the listener goes on waiting */
        chmod(dir, 0755);
        chmod(in_dir("p"), 0666);
        pid_t other = fork();
        if (!other) {
            if (setuid(65534))
                _exit(9);
            char spec[200];
            snprintf(spec, sizeof spec, "unix:%s/p", dir);
            int rc = pd_endpoint_open_in(spec, NULL, &ep, &e);
            char c;
            _exit(rc == 0 && read(ep.fd, &c, 1) == 0 ? 0 : 1);     /* connected to root, who hangs up */
        }
        int status;
        waitpid(other, &status, 0);
        assert_int_equal(status, 0);
        assert_int_equal(waitpid(pid, &status, WNOHANG), 0);
    }
    /* a second listener: the first one is alive, and this probe does not count as its peer's end */
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    unlink(in_dir("p"));
    int live = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    snprintf(a.sun_path, sizeof a.sun_path, "%s/p", dir);
    assert_int_equal(bind(live, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(live, 1), 0);
    assert_int_equal(pd_endpoint_open_out(out, NULL, &ep, &e), PD_EUSAGE);
    assert_non_null(strstr(e.msg, "another process listens"));
    close(live);
    unlink(in_dir("p"));
}

static void events_are_whole_records(void **state)
{
    struct pd_trace *t;
    struct pd_err e;
    const char *path = in_dir("trace");
    assert_int_equal(pd_trace_open(NULL, "w", "prefill", &t, &e), 0);
    assert_null(t);
    pd_trace_step(t, &(struct pd_step){ .run = "x" }, PD_ST_ACCEPTED, 0, NULL);
    pd_trace_close(t);
    assert_int_equal(pd_trace_open("/no/such/dir/t", "w", "prefill", &t, &e), PD_EFAIL);
    for (int i = 0; i < 4; i++)     /* four writers at once */
        if (!fork()) {
            char worker[8];
            snprintf(worker, sizeof worker, "p%d", i);
            if (pd_trace_open(path, worker, "prefill", &t, &e))
                _exit(1);
            uint8_t gen[PD_GEN_LEN] = { 1 };
            for (int k = 0; k < 500; k++)
                pd_trace_step(t, &(struct pd_step){ .run = "01ARZ3NDEKTSV4RRFFQ69G5FAV", .where = "remote", .gen = k % 2 ? gen : NULL }, PD_ST_KV_PUBLISHED, (uint64_t)k, k % 3 ? "why" : NULL);
            pd_trace_close(t);
            _exit(0);
        }
    for (int i = 0; i < 4; i++) {
        int status;
        assert_true(wait(&status) > 0);
        assert_int_equal(status, 0);
    }
    struct pd_rstream *s;
    struct pd_rec rec;
    bool bad;
    int n = 0, n_life = 0, rc, next[4] = { 0 };
    struct pd_rstream_opts o = { .own_fd = true };
    assert_int_equal(pd_rstream_new(open(path, O_RDONLY), &o, &s, &e), 0);
    while ((rc = pd_rstream_next(s, -1, &rec, &bad, &e)) == 1) {
        struct pd_arena a = { 0 };
        struct pd_event ev;
        if (pd_event_decode(rec.p, rec.n, &a, &ev, &e))
            fail_msg("%s", e.msg);
        int w = ev.worker.p[1] - '0';
        assert_in_range(w, 0, 3);
        if (!ev.run[0]) {
            assert_string_equal(ev.state, next[w] ? "gone" : "starting");
            assert_in_range(next[w], 0, next[w] ? 500 : 0);
            n_life++;
            pd_arena_free(&a);
            continue;
        }
        assert_int_equal(ev.bytes, next[w]);
        assert_int_equal(ev.has_gen, next[w] % 2);
        next[w]++;
        assert_string_equal(ev.role, "prefill");
        assert_string_equal(ev.state, "kv_published");
        assert_true(ev.t_us > 1000000000000000 && ev.mono_us > 0);
        pd_arena_free(&a);
        n++;
    }
    assert_int_equal(rc, 0);
    assert_int_equal(n, 2000);
    assert_int_equal(n_life, 8);
    pd_rstream_free(s);
    unlink(path);
    /* a full disk: told once, and the run goes on */
    int p[2], keep = dup(2);
    assert_int_equal(pipe(p), 0);
    dup2(p[1], 2);
    assert_int_equal(pd_trace_open("/dev/full", "w", "decode", &t, &e), 0);
    for (int i = 0; i < 3; i++)
        pd_trace_step(t, &(struct pd_step){ 0 }, PD_ST_ACCEPTED, 0, NULL);
    pd_trace_close(t);
    dup2(keep, 2);
    close(keep);
    close(p[1]);
    char got[500] = "";
    assert_true(read(p[0], got, sizeof got - 1) > 0);
    close(p[0]);
    assert_string_equal(got, "pd-test: trace /dev/full: No space left on device; events are lost from here on\n");
}

/* Past the limit a record begins a new file; the two that are left hold whole records, the last ones written. */
static void a_trace_rotates(void **state)
{
    struct pd_trace *t;
    struct pd_err e;
    char path[200], old[210];
    snprintf(path, sizeof path, "%s", in_dir("rotated"));
    snprintf(old, sizeof old, "%s.1", path);
    assert_int_equal(pd_trace_open(path, "w", "prefill", &t, &e), 0);
    pd_trace_limit(t, 4096);
    for (uint32_t k = 1; k <= 200; k++)
        pd_trace_step(t, &(struct pd_step){ .run = "01ARZ3NDEKTSV4RRFFQ69G5FAV" }, PD_ST_KV_PUBLISHED, k, NULL);
    pd_trace_close(t);
    uint64_t last = 0, n = 0;
    for (int i = 0; i < 2; i++) {
        struct pd_rstream *s;
        struct pd_rec rec;
        struct pd_rstream_opts o = { .own_fd = true };
        struct stat st;
        assert_int_equal(stat(i ? path : old, &st), 0);
        assert_in_range(st.st_size, 1, 4096);
        assert_int_equal(pd_rstream_new(open(i ? path : old, O_RDONLY), &o, &s, &e), 0);
        while (pd_rstream_next(s, -1, &rec, NULL, &e) == 1) {
            struct pd_arena a = { 0 };
            struct pd_event ev;
            assert_int_equal(pd_event_decode(rec.p, rec.n, &a, &ev, &e), 0);
            assert_true(!ev.run[0] || !last || ev.bytes == last + 1);
            last = ev.run[0] ? ev.bytes : last;
            n++;
            pd_arena_free(&a);
        }
        pd_rstream_free(s);
        unlink(i ? path : old);
    }
    assert_int_equal(last, 200);
    assert_true(n > 20);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    pd_log_init("pd-test", 0, false);
    if (!mkdtemp(dir))
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_refused_with_a_reason), cmocka_unit_test(a_file_appears_whole_or_not_at_all), cmocka_unit_test(devices_are_written_as_they_are),
        cmocka_unit_test(a_socket_serves_one_peer), cmocka_unit_test(a_socket_is_private_and_not_stolen), cmocka_unit_test(events_are_whole_records),
        cmocka_unit_test(a_trace_rotates) };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return rmdir(dir) || failed;
}
