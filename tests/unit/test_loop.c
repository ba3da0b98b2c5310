/* The event loop: readiness, hang-ups, timers, signals, work posted by threads. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/base/loop.h"
#include "../../libcommon/base/stop.h"
#include "files.h"

static struct pd_loop *loop;
static struct pd_err e;

static int begin(void **state) { return pd_loop_new(&loop, &e); }
static int end(void **state)
{
    pd_loop_free(loop);
    return 0;
}

static void quit(void *ctx) { pd_loop_quit(ctx); }

/* Run for a while. */
static void run_for(int64_t us)
{
    struct pd_timer *t;
    assert_int_equal(pd_timer_new(loop, quit, loop, &t, &e), 0);
    assert_int_equal(pd_timer_in(t, us, &e), 0);
    assert_int_equal(pd_loop_run(loop, &e), 0);
    pd_timer_free(t);
}

/* ---- descriptors ---- */

struct seen { int fd, read, write, hup; struct pd_watch *w; bool consume, free_at_hup; };

static void on_ready(void *ctx, unsigned ready)
{
    struct seen *s = ctx;
    char c[64];
    s->read += ready & PD_READ ? 1 : 0;
    s->write += ready & PD_WRITE ? 1 : 0;
    s->hup += ready & PD_HUP ? 1 : 0;
    if (ready & PD_READ && s->consume && read(s->fd, c, sizeof c) <= 0)
        pd_watch_set(s->w, 0, &e);
    if (ready & PD_WRITE)
        pd_watch_set(s->w, PD_READ, &e);
    if (ready & PD_HUP && s->free_at_hup) {
        pd_watch_free(s->w);
        s->w = NULL;
    }
}

static void readiness_is_told_as_asked(void **state)
{
    int sv[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv), 0);
    struct seen s = { .fd = sv[0], .consume = true, .free_at_hup = true };
    assert_int_equal(pd_watch_new(loop, sv[0], on_ready, &s, &s.w, &e), 0);
    assert_int_equal(write(sv[1], "x", 1), 1);
    run_for(5000);
    assert_int_equal(s.read, 0);        /* no interest yet */
    assert_int_equal(pd_watch_set(s.w, PD_READ | PD_WRITE, &e), 0);
    run_for(5000);
    assert_int_equal(s.read, 1);
    assert_int_equal(s.write, 1);       /* once: the callback takes the interest back */
    shutdown(sv[1], SHUT_WR);           /* the end of its writing alone is readable, and no hang-up */
    run_for(5000);
    assert_int_equal(s.read, 2);
    assert_int_equal(s.hup, 0);
    close(sv[1]);                       /* without any interest: told all the same */
    run_for(5000);
    assert_int_equal(s.hup, 1);
    assert_null(s.w);
    close(sv[0]);
    assert_int_not_equal(pd_watch_new(loop, 9999, on_ready, &s, &s.w, &e), 0);
    assert_non_null(strstr(e.msg, "descriptor 9999"));
}

enum { MANY = 100 };
static struct seen many[MANY];
static void free_all(void *ctx, unsigned ready)
{
    struct seen *s = ctx;
    s->hup += ready & PD_HUP ? 1 : 0;
    for (int i = 0; i < MANY; i++) {
        pd_watch_free(many[i].w);
        many[i].w = NULL;
    }
}

static void a_callback_may_free_any_watch(void **state)
{
    int sv[MANY][2], told = 0;
    for (int i = 0; i < MANY; i++) {
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, sv[i]), 0);
        many[i] = (struct seen){ .fd = sv[i][0] };
        assert_int_equal(pd_watch_new(loop, sv[i][0], free_all, &many[i], &many[i].w, &e), 0);
    }
    for (int i = 0; i < MANY; i++)
        close(sv[i][1]);
    run_for(10000);
    for (int i = 0; i < MANY; i++) {
        told += many[i].hup;
        close(sv[i][0]);
    }
    assert_int_equal(told, 1);          /* the first one took all others with it */
}

/* ---- timers ---- */

static int64_t fired[4];
static void note(void *ctx) { *(int64_t *)ctx = pd_mono_us(); }

static void timers_are_never_early(void **state)
{
    struct pd_timer *t[4];
    int64_t t0 = pd_mono_us(), at[4] = { t0 + 30000, t0 + 1500, t0 - 5, t0 + 20000 };
    memset(fired, 0, sizeof fired);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pd_timer_new(loop, note, &fired[i], &t[i], &e), 0);
        assert_int_equal(pd_timer_at(t[i], at[i], &e), 0);
    }
    pd_timer_stop(t[3]);
    assert_int_equal(pd_timer_in(t[1], 10000, &e), 0);          /* replaces */
    run_for(60000);
    for (int i = 0; i < 3; i++)
        assert_true(fired[i] >= at[i]);
    assert_true(fired[1] >= t0 + 10000);
    assert_int_equal(fired[3], 0);
    assert_true(fired[2] < fired[1] && fired[1] < fired[0]);
    for (int i = 0; i < 4; i++)
        pd_timer_free(t[i]);
}

/* ---- posts ---- */

enum { THREADS = 4, POSTS = 20000 };
struct work { struct pd_post p; int thread, n; };
static int next_of[THREADS], arrived, wrong;
static void take(void *ctx)
{
    struct work *w = ctx;
    if (next_of[w->thread]++ != w->n)
        wrong++;
    if (++arrived == THREADS * POSTS)
        pd_loop_quit(loop);
}
static void *poster(void *arg)
{
    struct work *w = arg;
    for (int i = 0; i < POSTS; i++)
        pd_loop_post(loop, &w[i].p);
    return NULL;
}

static void posts_of_threads_arrive_in_order(void **state)
{
    pthread_t t[THREADS];
    struct work *w = calloc(THREADS * POSTS, sizeof *w);
    for (int i = 0; i < THREADS * POSTS; i++)
        w[i] = (struct work){ { .fn = take, .ctx = &w[i] }, i / POSTS, i % POSTS };
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&t[i], NULL, poster, w + (size_t)i * POSTS), 0);
    assert_int_equal(pd_loop_run(loop, &e), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(t[i], NULL);
    assert_int_equal(arrived, THREADS * POSTS);
    assert_int_equal(wrong, 0);
    free(w);
}

static struct pd_post again;
static int turns;
static void once_more(void *ctx)
{
    if (++turns < 1000)
        ctx ? pd_loop_defer(loop, &again) : pd_loop_post(loop, &again);
    else
        pd_loop_quit(loop);
}

static void work_may_be_handed_over_again(void **state)
{
    for (int defer = 0; defer < 2; defer++) {
        again = (struct pd_post){ .fn = once_more, .ctx = defer ? &again : NULL };
        turns = 0;
        once_more(again.ctx);
        assert_int_equal(pd_loop_run(loop, &e), 0);
        assert_int_equal(turns, 1000);
    }
}

/* ---- signals ---- */

static int levels;
static void on_stop(void *ctx, int level)
{
    levels = levels * 10 + level;
    if (level == 2)
        pd_loop_quit(loop);
}
static void kill_me(void *ctx) { kill(getpid(), SIGTERM); }

static void signals_are_levels(void **state)
{
    struct pd_timer *t[2];
    pd_stop_init();
    assert_int_equal(pd_loop_on_stop(loop, on_stop, NULL, &e), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pd_timer_new(loop, kill_me, NULL, &t[i], &e), 0);
        assert_int_equal(pd_timer_in(t[i], 1000 + 10000 * i, &e), 0);
    }
    assert_int_equal(pd_loop_run(loop, &e), 0);
    assert_int_equal(levels, 12);
    for (int i = 0; i < 2; i++)
        pd_timer_free(t[i]);
    struct pd_loop *late;               /* one that is made after the signals hears of them too */
    assert_int_equal(pd_loop_new(&late, &e), 0);
    levels = 0;
    pd_loop_free(loop);
    loop = late;
    assert_int_equal(pd_loop_on_stop(loop, on_stop, NULL, &e), 0);
    run_for(5000);
    assert_int_equal(levels, 2);
}

static void descriptors_come_back(void **state)
{
    struct pd_loop *l;
    int n = open_fds();
    for (int i = 0; i < 50; i++) {
        assert_int_equal(pd_loop_new(&l, &e), 0);
        pd_loop_quit(l);                /* before it runs: it ends at once */
        assert_int_equal(pd_loop_run(l, &e), 0);
        pd_loop_free(l);
    }
    assert_int_equal(open_fds(), n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(readiness_is_told_as_asked, begin, end), cmocka_unit_test_setup_teardown(a_callback_may_free_any_watch, begin, end),
        cmocka_unit_test_setup_teardown(timers_are_never_early, begin, end), cmocka_unit_test_setup_teardown(posts_of_threads_arrive_in_order, begin, end),
        cmocka_unit_test_setup_teardown(work_may_be_handed_over_again, begin, end), cmocka_unit_test_setup_teardown(signals_are_levels, begin, end),
        cmocka_unit_test(descriptors_come_back) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
