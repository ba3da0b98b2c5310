/* What a call of the thread has to say reaches its client before the turn that follows it ends. */
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../libcommon/serve/desk.h"

static char dir[] = "/tmp/pd-test-XXXXXX", where[60];
static struct pd_err e;

struct run { struct pd_desk_run d; struct pd_call c; };
static struct {
    struct pd_desk *desk;
    struct pd_daemon *d;
    struct pd_post over;
    struct run *r;              /* the thread's */
    bool busy, early;           /* early: the first record was there during the turn */
    pthread_mutex_t lock;
    pthread_cond_t came;
    bool here;
    char got[4096];             /* the client's */
} T = { .lock = PTHREAD_MUTEX_INITIALIZER, .came = PTHREAD_COND_INITIALIZER };

static void take(void *ctx)
{
    T.r = ctx;
    T.busy = true;
    pd_desk_add(T.desk, &T.r->d, (const uint8_t *)"\x81\xa2pd\xa5token", 10);
}

static int admit(void *ctx, struct pd_desk_run *d, struct pd_err *err)
{
    struct run *r = (struct run *)d;
    pd_desk_call(T.desk, d, &r->c, take, r);
    return 0;
}

static bool is_busy(void *ctx) { return T.busy; }
static void after(void *ctx) {}

/* A long step: until the client has what the call said, or 10 s. */
static bool turn(void *ctx)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 10;
    pthread_mutex_lock(&T.lock);
    while (!T.here && pthread_cond_timedwait(&T.came, &T.lock, &until) == 0) {}
    T.early = T.here;
    pthread_mutex_unlock(&T.lock);
    pd_desk_add(T.desk, &T.r->d, (const uint8_t *)"\x81\xa2pd\xa6result", 11);
    pd_desk_over(T.desk, &T.r->d);
    T.busy = false;
    return true;
}

static void refuse(void *ctx, const struct pd_request *q, const struct pd_err *why, const char *action, struct pd_buf *b) { fprintf(stderr, "refused: %s\n", why->msg); }
static void cancel(void *ctx, struct pd_desk_run *r) {}
static bool daemon_busy(void *ctx) { return pd_desk_runs(T.desk) > 0; }
static void drain(void *ctx) { pd_daemon_drain(T.d); }

static void *client(void *unused)
{
    static const char request[] = "{\"token_ids\":[1,2,3],\"max_tokens\":2}\n";
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    strcpy(a.sun_path, where + 5);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    size_t n = 0;
    if (connect(fd, (struct sockaddr *)&a, sizeof a) || send(fd, request, sizeof request - 1, MSG_NOSIGNAL) < 0)
        perror("client");
    while (!strstr(T.got, "result")) {
        struct pollfd p = { fd, POLLIN, 0 };
        ssize_t k = poll(&p, 1, 20000) == 1 ? recv(fd, T.got + n, sizeof T.got - 1 - n, 0) : 0;
        if (k <= 0)
            break;
        n += (size_t)k;
        if (strstr(T.got, "token")) {
            pthread_mutex_lock(&T.lock);
            T.here = true;
            pthread_cond_signal(&T.came);
            pthread_mutex_unlock(&T.lock);
        }
    }
    close(fd);
    pd_loop_post(pd_daemon_loop(T.d), &T.over);
    return NULL;
}

static void a_call_s_records_do_not_wait_for_the_turn(void **state)
{
    const struct pd_desk_opts ko = { .max_runs = 4 };
    const struct pd_desk_ops ops = { .run_size = sizeof (struct run), .admit = admit, .refuse = refuse, .cancel = cancel, .busy = is_busy, .turn = turn, .after = after };
    const struct pd_daemon_hooks hooks = { .busy = daemon_busy };
    const char *listen_[] = { where, NULL };
    pthread_t thread;
    snprintf(where, sizeof where, "unix:%s/desk", dir);
    assert_int_equal(pd_desk_new(&ko, &ops, &T.desk, &e), 0);
    const struct pd_entry entry = { NULL, &pd_desk_cb, T.desk, false };
    const struct pd_daemon_opts o = { .role = "decode", .worker = "decode@test:1", .listen = listen_, .ready_fd = -1, .entry = &entry, .n_entry = 1 };
    T.over = (struct pd_post){ .fn = drain };
    assert_int_equal(pd_daemon_new(&o, &hooks, &T.d, &e), 0);
    pd_desk_on(T.desk, T.d);
    assert_int_equal(pd_desk_start(T.desk, &e), 0);
    assert_int_equal(pd_daemon_ready(T.d, &e), 0);
    assert_int_equal(pthread_create(&thread, NULL, client, NULL), 0);
    assert_int_equal(pd_daemon_run(T.d, &e), 0);
    pthread_join(thread, NULL);
    pd_desk_free(T.desk);
    pd_daemon_free(T.d);
    char *token = strstr(T.got, "token"), *result = strstr(T.got, "result");
    if (!token || !result || result < token)
        fail_msg("the client got: %s", T.got);
    assert_true(T.early);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    if (!mkdtemp(dir))
        return 1;
    const struct CMUnitTest tests[] = { cmocka_unit_test(a_call_s_records_do_not_wait_for_the_turn) };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    rmdir(dir);
    return rc;
}
