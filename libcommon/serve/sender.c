#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../base/stop.h"
#include "../wire/frame.h"
#include "sender_in.h"

enum { GUESTS_MAX = 64, GUEST_US = 5000000, REST_US = 100000 };

/* ---- what befalls ---- */

void send_fatal(struct send *s, const struct pd_err *e)
{
    if (!s->fatal.code)
        s->fatal = *e;
}

void send_bad(struct send *s, const char *run, const struct pd_err *e)
{
    bool named = !run || strstr(e->msg, run);
    pd_error("%s%s%s%s", named ? "" : "run ", named ? "" : run, named ? "" : ": ", e->msg);
    *s->status = pd_exit_worse(*s->status, e->code);
}

bool send_room(const struct send *s)
{
    for (uint32_t i = 0; i < s->n_dst; i++)
        if (!send_dst_room(&s->dst[i]))
            return false;
    return true;
}

void send_put(struct send *s, const void *rec, size_t n)
{
    for (uint32_t i = 0; i < s->n_dst; i++)
        send_dst_put(&s->dst[i], rec, n);
}

/* ---- who comes ---- */

static int listen_at(struct send *s, const char *spec, bool in, struct pd_err *e)
{
    struct send_listener *l = pd_calloc(1, sizeof *l, "a listener", e);
    if (!l)
        return PD_ENOMEM;
    const char *at;
    char told[PD_TCP_NAME];
    bool tcp = pd_ep_kind_of(spec, &at) == PD_EP_TCP_LISTEN;
    *l = (struct send_listener){ .next = s->listeners, .spec = spec, .path = tcp ? NULL : at, .in = in, .fd = -1, .left = in ? s->o.peers : 0 };
    s->listeners = l;
    int rc = tcp ? pd_tcp_listen(at, 64, s->o.net, &l->fd, told, e) : pd_unix_listen(at, 64, &l->fd, &l->name, e);
    size_t n = strlen(spec);
    if (!rc && tcp && n > 2 && !strcmp(spec + n - 2, ":0"))
        pd_warn("listening on tcp:%s", told);
    return rc;
}

static void listener_close(struct send_listener *l)
{
    if (l->fd < 0)
        return;
    if (l->path)
        pd_unix_unlink(l->path, &l->name);
    close(l->fd);
    l->fd = -1;
}

/* A receiver that waits for its peer, at this listener. Which of those whose connection is gone comes again is known by what he says to our hello: any of
 * them is tried, by no order that two who are mistaken for each other could fall in with; he hangs up and dials again. */
static struct send_dst *waiting_dst(struct send *s, const struct send_listener *l)
{
    struct send_dst *down = NULL;
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n_dst; i++)
        if (s->dst[i].l == l && s->dst[i].state == SD_WAIT)
            return &s->dst[i];
        else if (s->dst[i].l == l && s->dst[i].state == SD_DOWN && s->dst[i].c.fd < 0 && s->now % ++n == 0)
            down = &s->dst[i];
    return down;
}

/* For one that may have more to say: the oldest of those who have proven no key; else of all. */
static void oldest_goes(struct send *s)
{
    struct send_guest **oldest = NULL;
    for (struct send_guest **at = &s->guests; *at; at = &(*at)->next)
        if (!oldest || !(*at)->shaken || (*oldest)->shaken)
            oldest = at;                /* the newest is the first */
    struct send_guest *g = *oldest;
    *oldest = g->next;
    pd_chan_close(&g->c);
    pd_free(g);
}

static struct send_guest *guest_new(struct send *s, struct send_listener *l, int fd)
{
    struct pd_err e;
    struct send_guest *g = pd_calloc(1, sizeof *g, "a peer", &e);
    uint32_t n = 0;
    for (struct send_guest *o = s->guests; o; o = o->next)
        n++;
    if (g)
        pd_chan_init(&g->c);
    bool keys = !l->path && s->o.net->keys;
    if (!g || (l->path && pd_unix_check_peer(fd, l->path, &e)) || (keys && pd_tls_new(s->o.net->keys, fd, false, l->spec, &g->c.tls, &e))) {
        if (g)
            pd_warn("%s", e.msg);
        close(fd);
        pd_free(g);
        return NULL;
    }
    if (n >= GUESTS_MAX + l->left)      /* those that are expected have said nothing until their first KV */
        oldest_goes(s);
    g->l = l;
    g->since = s->now;
    g->c.fd = fd;
    g->c.own = g->c.socket = true;
    g->c.unix_socket = l->path != NULL;
    g->c.tcp = !l->path;
    g->shaken = !keys;
    if (!l->path)
        pd_tcp_tune(fd);
    g->next = s->guests;
    s->guests = g;
    return g;
}

static void accept_some(struct send *s, struct send_listener *l)
{
    int fd = accept4(l->fd, NULL, NULL, SOCK_CLOEXEC | (l->path || !s->o.net->keys ? 0 : SOCK_NONBLOCK));
    l->ready = false;
    if (fd >= 0)
        guest_new(s, l, fd);
    else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
        l->rest_until = s->now + REST_US;       /* it would be ready again at once */
}

/* Descriptors, or a stream of data, for a connection that is here. */
static bool attach(struct send *s, struct send_guest *g, const struct pd_hello *h)
{
    struct pd_chan *to = NULL;
    for (struct send_src *c = s->srcs; c; c = c->next)
        if (c->c.x && c->c.raw < 0 && !memcmp(pd_xfer_conn(c->c.x, false), h->attach, sizeof h->attach))
            to = &c->c;
    for (uint32_t i = 0; i < s->n_dst; i++)
        if (s->dst[i].c.x && s->dst[i].c.raw < 0 && !memcmp(pd_xfer_conn(s->dst[i].c.x, false), h->attach, sizeof h->attach))
            to = &s->dst[i].c;
    if (!to)
        return false;
    if (g->c.tcp) {         /* a stream of data */
        struct pd_err e;
        if (pd_xfer_stream(to->x, g->c.fd, g->c.tls, s->now, &e) < 0)
            pd_warn("%s: %s", g->l->spec, e.msg);
        g->c.tls = NULL;
        g->c.fd = -1;
    } else
        pd_chan_take_raw(to, g->c.fd, s->now);
    g->c.own = false;
    return true;
}

/* "How are you?" is for daemons, and who asks that is nobody's peer. */
static bool is_query(const struct pd_rec *rec)
{
    struct pd_arena mem = { 0 };
    struct pd_status q;
    bool is = rec->kind == PD_K_STATUS && pd_status_decode(rec->p, rec->n, &mem, &q, NULL) == 0 && !q.state[0] && !q.run[0];
    pd_arena_free(&mem);
    return is;
}

static void answer_query(struct send_guest *g)
{
    static const char text[] = "a pd-kvsend listens there, which has no ledger; --status is for pd-prefill, pd-decode and pd-route (--probe measures the way to this one)";
    struct pd_error_rec r = { .code = pd_exit_status(PD_EFAIL), .message = { text, sizeof text - 1 } };
    struct pd_buf b = { 0 };
    size_t wrote;
    snprintf(r.class_, sizeof r.class_, "%s", pd_code_name(PD_EFAIL));
    snprintf(r.action, sizeof r.action, "closed");
    if (pd_error_encode(&r, &b, NULL) == 0)
        pd_chan_writev(&g->c, &(struct iovec){ b.p, b.n }, 1, &wrote, &(struct pd_err){ 0 });    /* into an empty buffer: whole */
    pd_buf_free(&b);
}

/* What a guest is for is told by its first record, which is read without a byte after it (descriptors may follow); at an output it is told by there being a
 * place, too: a receiver of a plain stream says nothing. */
static bool guest_work(struct send *s, struct send_guest *g)
{
    struct pd_rec rec;
    struct pd_err e = { 0 };
    bool bad;
    if (!g->shaken) {           /* who cannot prove a key takes nobody's place */
        int rc = g->c.readable || pd_tls_pending(g->c.tls) ? pd_tls_shake(g->c.tls) : 0;
        g->c.readable = false;
        if (rc < 0)
            pd_warn("%s; waiting for another peer", pd_tls_why(g->c.tls)->msg);
        g->shaken = rc == 1;
        if (rc != 1)
            return rc < 0 || s->now - g->since > GUEST_US;
        g->c.readable = true;
    }
    struct send_dst *d = g->l->in ? NULL : waiting_dst(s, g->l);
    if (d) {
        if (pd_chan_reader(&g->c, g->l->spec, s->o.max_record + 64, &e))
            send_fatal(s, &e);
        else
            send_dst_peer(d, &g->c);
        return true;
    }
    if (!g->c.readable)         /* a sender may be silent until its first KV is computed */
        return !(g->l->in && g->l->left && !g->answered) && s->now - g->since > GUEST_US;
    g->c.readable = false;
    if (g->answered)            /* it has gone, by itself: what it had not read of ours is not lost to a reset */
        return true;
    if (!g->c.rs) {
        if (pd_chan_reader(&g->c, g->l->spec, s->o.max_record + 64, &e)) {
            send_fatal(s, &e);
            return true;
        }
        pd_rstream_exact(g->c.rs, true);
    }
    int rc = pd_chan_next(&g->c, &rec, &bad, s->now, &e);
    if (rc == 2)
        return false;
    if (rc == 1 && g->l->in && is_query(&rec)) {
        answer_query(g);
        g->answered = true;
        return false;
    }
    struct pd_arena mem = { 0 };
    struct pd_hello h = { .version = 0 };
    bool hello = rc == 1 && rec.kind == PD_K_HELLO && pd_hello_decode(rec.p, rec.n, &mem, &h, &e) == 0;
    bool again = hello && !h.has_attach && send_src_again(s, &h);
    if (hello && h.has_attach)
        attach(s, g, &h);
    else if (g->l->in && (again || g->l->left)) {
        g->l->left -= !again;
        pd_rstream_exact(g->c.rs, false);
        struct send_src *c = send_src_new(s, &g->c, &e);
        if (!c)
            send_fatal(s, &e);
        else if (rc == 1)
            send_src_record(c, &rec);
        else {
            if (rc < 0)
                send_bad(s, NULL, &e);
            send_src_end(c);
        }
    }
    pd_arena_free(&mem);
    return true;
}

static bool guests_work(struct send *s)
{
    bool moved = false;
    for (struct send_guest **at = &s->guests, *g; (g = *at);) {
        if (!guest_work(s, g)) {
            at = &g->next;
            continue;
        }
        *at = g->next;
        pd_chan_close(&g->c);
        pd_free(g);
        moved = true;
    }
    return moved;
}

/* Who may still come: peers that have not been here, and those of a transfer, which may have to come again or bring descriptors. */
static void listeners_close(struct send *s)
{
    for (struct send_listener *l = s->listeners; l; l = l->next) {
        bool needed = l->left > 0;
        for (const struct send_src *c = s->srcs; l->in && c; c = c->next)
            needed |= c->state == SS_LOST || (c->state != SS_ENDED && c->c.socket);    /* a hello may come at any time */
        for (uint32_t i = 0; i < s->n_dst; i++)
            needed |= s->dst[i].l == l && (s->dst[i].state == SD_PLAIN ? s->dst[i].may_ask : s->dst[i].state != SD_OVER);
        if (!needed)
            listener_close(l);
    }
}

/* ---- the loop ---- */

static bool inputs_over(const struct send *s)
{
    for (const struct send_src *c = s->srcs; c; c = c->next)
        if (c->state != SS_ENDED)
            return false;
    for (const struct send_listener *l = s->listeners; l; l = l->next)
        if (l->in && l->left)
            return false;
    return true;
}

static bool turn(struct send *s)
{
    bool moved = guests_work(s);
    for (struct send_src *c = s->srcs; c && !s->fatal.code; c = c->next)
        moved |= send_src_work(c);
    moved |= send_runs_pump(s);
    for (uint32_t i = 0; i < s->n_dst && !s->fatal.code; i++)
        moved |= send_dst_work(&s->dst[i]);
    return moved;
}

static void want(struct send *s, uint32_t *n, int fd, short what, bool *ready)
{
    if (fd < 0 || !what)
        return;
    s->polls[*n] = (struct pollfd){ .fd = fd, .events = what };
    s->flags[(*n)++] = ready;
}

/* Room for all descriptors that there are: of each peer its own, one for descriptors, one of data beside it. */
static bool polls_fit(struct send *s)
{
    struct pd_err e;
    uint32_t n = 1 + 3 * s->n_dst;
    for (const struct send_listener *l = s->listeners; l; l = l->next)
        n++;
    for (const struct send_guest *g = s->guests; g; g = g->next)
        n++;
    for (const struct send_src *c = s->srcs; c; c = c->next)
        n += 3;
    if (n <= s->cap_polls)
        return true;
    n += n / 2;
    struct pollfd *p = pd_realloc(s->polls, n, sizeof *p, "descriptors to wait for", &e);
    s->polls = p ? p : s->polls;
    bool **f = p ? pd_realloc(s->flags, n, sizeof *f, "descriptors to wait for", &e) : NULL;
    s->flags = f ? f : s->flags;
    if (f)
        s->cap_polls = n;
    else
        send_fatal(s, &e);
    return f != NULL;
}

/* next: s->now after a turn that moved something: only looks. A busy loop that did not would hear neither answers nor who else comes. */
static void sleep_until_something(struct send *s, int64_t next)
{
    uint32_t n = 0;
    if (!polls_fit(s))
        return;
    want(s, &n, s->wake, POLLIN, NULL);
    for (struct send_listener *l = s->listeners; l; l = l->next)
        if (s->now >= l->rest_until)
            want(s, &n, l->fd, POLLIN, &l->ready);
        else
            next = l->rest_until < next ? l->rest_until : next;
    for (struct send_guest *g = s->guests; g; g = g->next)
        want(s, &n, g->c.fd, POLLIN, &g->c.readable);
    for (struct send_src *c = s->srcs; c; c = c->next) {
        int64_t t = c->c.x ? pd_xfer_next(c->c.x) : c->state == SS_LOST ? c->dialled && c->c.fd < 0 ? s->now + 20000 : c->until : INT64_MAX;
        if (c->c.x && s->now + 1000000 < t)
            t = s->now + 1000000;
        next = t < next ? t : next;
        want(s, &n, c->c.fd, (short)((send_src_wants(c) ? POLLIN : 0) | (c->c.x && c->c.blocked ? POLLOUT : 0)), &c->c.readable);
        want(s, &n, c->c.raw, POLLIN, &c->c.raw_ready);
        want(s, &n, c->c.x ? pd_xfer_fd(c->c.x) : -1, POLLIN, NULL);
    }
    for (uint32_t i = 0; i < s->n_dst; i++) {
        struct send_dst *d = &s->dst[i];
        int64_t t = send_dst_next(d);
        next = t < next ? t : next;
        want(s, &n, d->c.fd, (short)((d->c.rs && !d->c.eof ? POLLIN : 0) | (d->c.blocked ? POLLOUT : 0)), &d->c.readable);
        want(s, &n, d->c.raw, d->c.raw_waits ? POLLOUT : 0, &d->c.raw_ready);
        want(s, &n, d->c.x ? pd_xfer_fd(d->c.x) : -1, POLLIN, NULL);
    }
    int64_t ms = next == INT64_MAX ? -1 : next <= s->now ? 0 : (next - s->now + 999) / 1000;
    if (poll(s->polls, n, ms > 60000 ? 60000 : (int)ms) <= 0)
        return;
    for (uint32_t i = 0; i < n; i++)
        if (s->polls[i].revents && s->flags[i])
            *s->flags[i] = true;
}

/* The first signal: nothing new is taken in, and what is whole goes out. The second: stop. */
static void on_stop(struct send *s)
{
    struct pd_err e;
    if (pd_stop_level() < 1 || s->stopping)
        return;
    s->stopping = true;
    pd_fail(&e, PD_ECANCEL, "interrupted%s", s->runs ? ": what has come whole goes out" : "");
    send_bad(s, NULL, &e);
    for (struct send_src *c = s->srcs; c; c = c->next)
        if (c->state != SS_ENDED)
            send_src_end(c);
    for (struct send_listener *l = s->listeners; l; l = l->next)
        l->left = 0;
    for (uint32_t i = 0; i < s->n_dst; i++)
        if (s->dst[i].state == SD_WAIT)
            s->dst[i].state = SD_OVER;
}

static void loop(struct send *s)
{
    while (!s->fatal.code) {
        s->now = pd_mono_us();
        if (pd_stop_level() > 1) {
            pd_fail(&s->fatal, PD_ECANCEL, "interrupted");
            return;
        }
        on_stop(s);
        for (struct send_listener *l = s->listeners; l; l = l->next)
            if (l->ready)
                accept_some(s, l);
        bool moved = turn(s);
        listeners_close(s);
        if (inputs_over(s) && !s->runs) {
            bool all = true;
            for (uint32_t i = 0; i < s->n_dst; i++)
                all &= send_dst_finish(&s->dst[i]);
            if (all && !turn(s))
                return;
            moved |= all;
        }
        if (!s->fatal.code)
            sleep_until_something(s, moved ? s->now : s->guests ? s->now + GUEST_US : INT64_MAX);
    }
}

/* ---- open, run, close ---- */

static int64_t default_mem(void)
{
    int64_t eighth = (int64_t)sysconf(_SC_PHYS_PAGES) / 8 * sysconf(_SC_PAGESIZE);
    return eighth > 0 && eighth < (int64_t)1 << 30 ? eighth : (int64_t)1 << 30;
}

/* Names first, so that others may come while we dial; then receivers, then the sender. */
static int open_all(struct send *s, const char *in, const char *const *out, struct pd_err *e)
{
    int rc = 0;
    uint32_t n = 0;
    if (pd_ep_listens(in) && (rc = listen_at(s, in, true, e)))
        return rc;
    for (uint32_t i = 0; out[i]; i++)
        n += pd_ep_listens(out[i]) ? s->o.peers : 1;
    if (!(s->dst = pd_calloc(n, sizeof *s->dst, "receivers", e)))
        return PD_ENOMEM;
    for (uint32_t i = 0; !rc && out[i]; i++) {
        bool listens = pd_ep_listens(out[i]);
        rc = listens ? listen_at(s, out[i], false, e) : 0;
        for (uint32_t k = 0; k < (listens ? s->o.peers : 1); k++) {
            struct send_dst *d = &s->dst[s->n_dst++];
            *d = (struct send_dst){ .s = s, .spec = out[i], .via = s->o.out_via ? s->o.out_via[i] : s->o.via, .l = listens ? s->listeners : NULL, .state = SD_WAIT, .ep = { .fd = -1 } };
            d->kept_end = &d->kept;
            pd_chan_init(&d->c);
        }
    }
    for (uint32_t i = 0; !rc && i < s->n_dst; i++)
        rc = send_dst_open(&s->dst[i], e);
    if (!rc && !pd_ep_listens(in))
        rc = send_src_open(s, in, e);
    return rc;
}

static void close_all(struct send *s)
{
    while (s->srcs) {
        struct send_src *c = s->srcs;
        s->srcs = c->next;
        send_src_free(c);
    }
    for (uint32_t i = 0; i < s->n_dst; i++)
        pd_chan_close(&s->dst[i].c);
    for (struct send_run *r = s->runs, *next; r; r = next) {
        next = r->next;
        send_run_free(r);
    }
    for (uint32_t i = 0; i < s->n_dst; i++)
        send_dst_free(&s->dst[i]);
    pd_free(s->dst);
    while (s->guests) {
        struct send_guest *g = s->guests;
        s->guests = g->next;
        pd_chan_close(&g->c);
        pd_free(g);
    }
    while (s->listeners) {
        struct send_listener *l = s->listeners;
        s->listeners = l->next;
        listener_close(l);
        pd_free(l);
    }
    while (s->stores) {
        struct send_store *st = s->stores;
        s->stores = st->next;
        pd_pool_free(st->pool);
        pd_free(st);
    }
    pd_free(s->polls);
    pd_free(s->flags);
    pd_stop_wake(-1);
    if (s->wake >= 0)
        close(s->wake);
}

int pd_sender_run(const struct pd_sender_opts *o, int *status, struct pd_err *e)
{
    static const char *const to_stdout[] = { "-", NULL };
    struct send s = { .o = *o, .status = status, .now = pd_mono_us() };
    s.runs_end = &s.runs;
    s.o.peers = o->peers ? o->peers : 1;
    s.o.resume_us = o->resume_us ? o->resume_us : o->net->connect_us;
    s.o.kv_mem = o->kv_mem ? o->kv_mem : default_mem();
    if ((s.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0)
        return pd_fail_sys(e, "an eventfd");
    pd_stop_wake(s.wake);
    s.o.in = o->in ? o->in : "-";
    int rc = open_all(&s, s.o.in, o->out && o->out[0] ? o->out : to_stdout, e);
    if (!rc) {
        loop(&s);
        for (uint32_t i = 0; !s.fatal.code && i < s.n_dst; i++)
            send_dst_commit(&s.dst[i], &s.fatal);
        rc = s.fatal.code;
        if (rc && e)
            *e = s.fatal;
    }
    if (!rc && !*status && s.o.strict && s.degraded)
        *status = 9;
    pd_info("%llu runs, %llu bytes of KV", (unsigned long long)s.runs_passed, (unsigned long long)s.bytes_passed);
    close_all(&s);
    return rc;
}
