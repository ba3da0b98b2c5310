#include <errno.h>
#include <event2/event.h>
#include <limits.h>
#include <stdbool.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "clock.h"
#include "log.h"
#include "loop.h"
#include "mem.h"
#include "stop.h"

/* libevent tells an end of the peer's writing, but a peer that is gone only together with reading or writing, which would be true all the time after its end
 * of file. So hang-ups have an epoll set of their own, in which no descriptor asks for anything and errors and hang-ups alone are reported; the set itself is
 * one descriptor of libevent's. */
struct pd_loop {
    struct event_base *base;
    int hup, wake, sig;                 /* epoll set; eventfds of posts and of signals */
    struct event *ev_hup, *ev_wake, *ev_sig, *ev_defer;
    _Atomic(struct pd_post *) posted;   /* a stack, newest first */
    struct pd_post *first, *last;       /* deferred */
    struct pd_watch *dead;              /* freed while hang-ups were told */
    bool telling, deferring, quit;
    pd_stop_fn *on_stop;
    void *stop_ctx;
    int level;
};

struct pd_watch {
    struct pd_loop *l;
    int fd;
    unsigned interest;
    struct event *ev;                   /* NULL while there is no interest */
    pd_watch_fn *fn;
    void *ctx;
    bool gone;
    struct pd_watch *next;
};

struct pd_timer {
    struct event *ev;
    int64_t due;
    pd_timer_fn *fn;
    void *ctx;
};

static void on_log(int severity, const char *msg)
{
    if (severity >= EVENT_LOG_ERR)
        pd_error("event loop: %s", msg);
    else if (severity == EVENT_LOG_WARN)
        pd_warn("event loop: %s", msg);
}

static void drain_eventfd(int fd)
{
    uint64_t n;
    while (read(fd, &n, sizeof n) < 0 && errno == EINTR) {}
}

/* ---- posts ---- */

static void on_wake(evutil_socket_t fd, short what, void *arg)
{
    struct pd_loop *l = arg;
    struct pd_post *p, *next, *order = NULL;
    (void)what;
    drain_eventfd(fd);
    for (p = atomic_exchange_explicit(&l->posted, NULL, memory_order_acquire); p; p = next) {
        next = atomic_load_explicit(&p->next, memory_order_relaxed);
        atomic_store_explicit(&p->next, order, memory_order_relaxed);
        order = p;
    }
    for (p = order; p; p = next) {
        next = atomic_load_explicit(&p->next, memory_order_relaxed);        /* it may be posted again, or freed, from its fn */
        p->fn(p->ctx);
    }
}

void pd_loop_post(struct pd_loop *l, struct pd_post *p)
{
    struct pd_post *head = atomic_load_explicit(&l->posted, memory_order_relaxed);
    do
        atomic_store_explicit(&p->next, head, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&l->posted, &head, p, memory_order_release, memory_order_relaxed));
    if (!head)          /* who finds some there knows that the loop has been woken for them */
        while (write(l->wake, &(uint64_t){ 1 }, sizeof(uint64_t)) < 0 && errno == EINTR) {}
}

static void on_defer(evutil_socket_t fd, short what, void *arg)
{
    struct pd_loop *l = arg;
    static const struct timeval now;
    struct pd_post *p = l->first, *next;
    (void)fd;
    (void)what;
    l->first = l->last = NULL;
    l->deferring = true;
    for (; p; p = next) {
        next = atomic_load_explicit(&p->next, memory_order_relaxed);
        p->fn(p->ctx);
    }
    l->deferring = false;
    if (l->first)       /* what these added is for the next turn, or two that feed each other would keep it from coming */
        event_add(l->ev_defer, &now);
}

void pd_loop_defer(struct pd_loop *l, struct pd_post *p)
{
    atomic_store_explicit(&p->next, NULL, memory_order_relaxed);
    if (l->last)
        atomic_store_explicit(&l->last->next, p, memory_order_relaxed);
    else {
        l->first = p;
        if (!l->deferring)
            event_active(l->ev_defer, EV_TIMEOUT, 0);
    }
    l->last = p;
}

void pd_loop_undefer(struct pd_loop *l, struct pd_post *p)
{
    struct pd_post *before = NULL, *q, *next;
    for (q = l->first; q; before = q, q = next) {
        next = atomic_load_explicit(&q->next, memory_order_relaxed);
        if (q != p)
            continue;
        if (before)
            atomic_store_explicit(&before->next, next, memory_order_relaxed);
        else
            l->first = next;
        if (l->last == p)
            l->last = before;
        return;
    }
}

/* ---- signals ---- */

static void on_signal(evutil_socket_t fd, short what, void *arg)
{
    struct pd_loop *l = arg;
    (void)what;
    drain_eventfd(fd);
    int now = pd_stop_level();
    if (now > l->level && l->on_stop) {
        l->level = now;
        l->on_stop(l->stop_ctx, now);
    }
}

int pd_loop_on_stop(struct pd_loop *l, pd_stop_fn *fn, void *ctx, struct pd_err *e)
{
    l->on_stop = fn;
    l->stop_ctx = ctx;
    if (event_add(l->ev_sig, NULL))
        return pd_fail(e, PD_ENOMEM, "event loop: cannot watch for signals");
    pd_stop_wake(l->sig);
    if (pd_stop_level() > l->level)
        event_active(l->ev_sig, EV_READ, 0);
    return 0;
}

/* ---- the loop ---- */

static void on_hup(evutil_socket_t fd, short what, void *arg)
{
    struct pd_loop *l = arg;
    struct epoll_event ev[64];
    (void)what;
    int n = epoll_wait(fd, ev, 64, 0);
    l->telling = true;
    for (int i = 0; i < n; i++) {
        struct pd_watch *w = ev[i].data.ptr;
        if (!w->gone)
            w->fn(w->ctx, PD_HUP);
    }
    l->telling = false;
    for (struct pd_watch *w; (w = l->dead);) {
        l->dead = w->next;
        pd_free(w);
    }
}

int pd_loop_new(struct pd_loop **out, struct pd_err *e)
{
    struct pd_loop *l = pd_calloc(1, sizeof *l, "an event loop", e);
    if (!l)
        return PD_ENOMEM;
    int rc = 0;
    event_set_log_callback(on_log);
    l->hup = epoll_create1(EPOLL_CLOEXEC);
    l->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    l->sig = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct event_config *c = event_config_new();
    if (l->hup < 0 || l->wake < 0 || l->sig < 0)
        rc = pd_fail_sys(e, "cannot make an event loop");
    else if (!c || event_config_set_flag(c,
                                         EVENT_BASE_FLAG_NOLOCK | EVENT_BASE_FLAG_IGNORE_ENV | EVENT_BASE_FLAG_NO_CACHE_TIME | EVENT_BASE_FLAG_PRECISE_TIMER) ||
             event_config_require_features(c, EV_FEATURE_O1) || !(l->base = event_base_new_with_config(c)) ||
             !(l->ev_hup = event_new(l->base, l->hup, EV_READ | EV_PERSIST, on_hup, l)) || !(l->ev_wake = event_new(l->base, l->wake, EV_READ | EV_PERSIST,
                 on_wake, l)) ||
             !(l->ev_sig = event_new(l->base, l->sig, EV_READ | EV_PERSIST, on_signal, l)) || !(l->ev_defer = event_new(l->base, -1, 0, on_defer, l)) ||
             event_add(l->ev_hup, NULL) || event_add(l->ev_wake, NULL))
        rc = pd_fail(e, PD_ENOMEM, "cannot make an event loop (libevent %s)", event_get_version());
    if (c)
        event_config_free(c);
    if (rc)
        pd_loop_free(l);
    else
        *out = l;
    return rc;
}

void pd_loop_free(struct pd_loop *l)
{
    if (!l)
        return;
    if (l->on_stop)
        pd_stop_wake(-1);
    struct event *ev[] = { l->ev_hup, l->ev_wake, l->ev_sig, l->ev_defer };
    for (size_t i = 0; i < sizeof ev / sizeof *ev; i++)
        if (ev[i])
            event_free(ev[i]);
    if (l->base)
        event_base_free(l->base);
    int fd[] = { l->hup, l->wake, l->sig };
    for (size_t i = 0; i < sizeof fd / sizeof *fd; i++)
        if (fd[i] >= 0)
            close(fd[i]);
    pd_free(l);
}

int pd_loop_run(struct pd_loop *l, struct pd_err *e)
{
    int rc = !l->quit && event_base_loop(l->base, EVLOOP_NO_EXIT_ON_EMPTY) < 0 ? pd_fail_sys(e, "the event loop failed") : 0;
    l->quit = false;
    return rc;
}

void pd_loop_quit(struct pd_loop *l)
{
    l->quit = true;     /* libevent forgets a break from before the loop */
    event_base_loopbreak(l->base);
}

struct event_base *pd_loop_base(struct pd_loop *l) { return l->base; }

/* ---- descriptors ---- */

static void on_ready(evutil_socket_t fd, short what, void *arg)
{
    struct pd_watch *w = arg;
    (void)fd;
    w->fn(w->ctx, (what & EV_READ ? PD_READ : 0) | (what & EV_WRITE ? PD_WRITE : 0));
}

int pd_watch_new(struct pd_loop *l, int fd, pd_watch_fn *fn, void *ctx, struct pd_watch **out, struct pd_err *e)
{
    struct pd_watch *w = pd_calloc(1, sizeof *w, "a watch", e);
    if (!w)
        return PD_ENOMEM;
    *w = (struct pd_watch){ .l = l, .fd = fd, .fn = fn, .ctx = ctx };
    struct epoll_event ev = { .data.ptr = w };
    if (epoll_ctl(l->hup, EPOLL_CTL_ADD, fd, &ev)) {
        int rc = pd_fail_sys(e, "event loop: cannot watch descriptor %d", fd);
        pd_free(w);
        return rc;
    }
    *out = w;
    return 0;
}

int pd_watch_set(struct pd_watch *w, unsigned interest, struct pd_err *e)
{
    short what = (short)((interest & PD_READ ? EV_READ : 0) | (interest & PD_WRITE ? EV_WRITE : 0));
    if (interest == w->interest)
        return 0;
    if (w->ev)
        event_free(w->ev);
    w->ev = NULL;
    w->interest = 0;
    if (!what)
        return 0;
    w->ev = event_new(w->l->base, w->fd, what | EV_PERSIST, on_ready, w);
    if (!w->ev || event_add(w->ev, NULL)) {
        int sys = errno;
        if (w->ev)
            event_free(w->ev);
        w->ev = NULL;
        errno = sys;
        return pd_fail(e, PD_ENOMEM, "event loop: cannot watch descriptor %d", w->fd);
    }
    w->interest = interest;
    return 0;
}

void pd_watch_free(struct pd_watch *w)
{
    if (!w)
        return;
    if (w->ev)
        event_free(w->ev);
    epoll_ctl(w->l->hup, EPOLL_CTL_DEL, w->fd, NULL);
    if (w->l->telling) {        /* it may come up later in the list that is being told */
        w->gone = true;
        w->next = w->l->dead;
        w->l->dead = w;
    } else
        pd_free(w);
}

/* ---- timers ---- */

static int arm(struct pd_timer *t, int64_t us, struct pd_err *e)
{
    us = us < 0 ? 0 : us;
    struct timeval tv = { us / 1000000 > INT_MAX ? INT_MAX : us / 1000000, us % 1000000 };
    return evtimer_add(t->ev, &tv) ? pd_fail(e, PD_ENOMEM, "event loop: cannot set a timer") : 0;
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
    struct pd_timer *t = arg;
    (void)fd;
    (void)what;
    int64_t left = t->due - pd_mono_us();
    if (left > 0 && !arm(t, left, NULL))        /* libevent's clock may be a little ahead of ours */
        return;
    t->fn(t->ctx);
}

int pd_timer_new(struct pd_loop *l, pd_timer_fn *fn, void *ctx, struct pd_timer **out, struct pd_err *e)
{
    struct pd_timer *t = pd_calloc(1, sizeof *t, "a timer", e);
    if (!t)
        return PD_ENOMEM;
    *t = (struct pd_timer){ .fn = fn, .ctx = ctx };
    if (!(t->ev = evtimer_new(l->base, on_timer, t))) {
        pd_free(t);
        return pd_fail(e, PD_ENOMEM, "out of memory for a timer");
    }
    *out = t;
    return 0;
}

int pd_timer_at(struct pd_timer *t, int64_t mono_us, struct pd_err *e)
{
    t->due = mono_us;
    return arm(t, mono_us - pd_mono_us(), e);
}

int pd_timer_in(struct pd_timer *t, int64_t us, struct pd_err *e)
{
    int64_t due;
    return pd_timer_at(t, __builtin_add_overflow(pd_mono_us(), us, &due) ? INT64_MAX : due, e);
}

void pd_timer_stop(struct pd_timer *t) { evtimer_del(t->ev); }

void pd_timer_free(struct pd_timer *t)
{
    if (t)
        event_free(t->ev);
    pd_free(t);
}
