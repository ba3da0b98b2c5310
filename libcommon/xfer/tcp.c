/* tcp: payload over streams of its own beside the connection, straight into the taker's blocks; with keys each is TLS (wire/tls).
 *
 * Whoever dialled the connection dials the streams, to the same place; each begins with a `hello` that has nothing but `attach`, the connection's name. A taker
 * who was dialled answers that with "pdup": before, nothing is sent there, as what stands may be somebody between, who passes nothing on. The taker answers an offer with a tag (accept); chunks follow on whichever stream is free: a head of HEAD bytes, big-endian
 *     "pdch"  tag u32  index u32  length u32  XXH3-64
 * and the bytes. The taker reads them where they will be used, and checks them when the last one has come; the closing records go over the connection.
 * A chunk of a tag that is over is read and dropped: after withdraw nothing of the peer's reaches the blocks. A stream that ends between two chunks is one less;
 * one that ends inside a chunk, or says what cannot be, ends the connection: what was verified goes on over the next one (resume). */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include "../base/fault.h"
#include "../base/log.h"
#include "../wire/frame.h"
#include "../wire/tcp.h"
#include "proto.h"

enum { HEAD = 24, PIECES = 256, WASTE = 64 << 10, A_TURN = 1 << 20 /* bytes that one stream moves before another has its turn */ };
static const char magic[4] = "pdch", here[4] = "pdup";

struct stream {
    int fd;
    struct pd_tls *tls;
    enum { S_CONNECTING, S_SHAKING, S_ATTACHING, S_ANNOUNCED /* giving: not answered yet */, S_UP, S_OVER } state;
    unsigned events;                    /* asked of epoll */
    uint8_t head[HEAD];
    size_t at_head;                     /* of it: went, or came */
    bool has;                           /* a chunk is under way */
    const void *owner;                  /* of it. NULL: taking, dropped; giving, its rest is a copy */
    uint32_t tag, index;
    uint64_t left, xxh3;
    struct iovec *iov; int n_iov, cap_iov, at_iov;
    struct pd_buf rest;                 /* giving: the copy; S_ATTACHING: the first record */
};
struct run { struct run *next; const void *owner; uint32_t tag; struct pd_import *im; };

struct path {
    bool giving;
    struct pd_err dead;
    char over[160];                     /* why the last stream that ended did */
    int ep;
    char at[PD_TCP_NAME];               /* where they are dialled */
    const struct pd_net *net;
    uint32_t n, n_up, n_over, next, tag;        /* streams; those that stand; that did; where to look for a free one; taking: the last tag given */
    struct stream s[PD_XFER_STREAMS_MAX];
    struct run *runs;
    struct pd_placed placed;            /* taking: a chunk that has come, to be checked while it is in the cache */
    bool has_placed;
    uint64_t late;
    uint8_t *waste;
};

static int die(struct path *p, int code, const char *why)
{
    if (!p->dead.code)
        pd_fail(&p->dead, code, "tcp: %s", why);
    return p->dead.code;
}

static int usable(const struct pd_hello *mine, const struct pd_hello *theirs, const struct pd_xfer_opts *o, struct pd_err *e)
{
    if (!o->tcp)
        return pd_fail(e, PD_EINCOMPAT, "tcp: the connection itself is none over TCP");
    if (mine->layout.layout_hash != theirs->layout.layout_hash)
        return pd_fail(e, PD_EINCOMPAT, "tcp: what has to be converted cannot be read straight into its place");
    return 0;
}

/* ---- streams ---- */

static int want(struct path *p, struct stream *s, unsigned events)
{
    struct epoll_event ev = { .events = events, .data.u32 = (uint32_t)(s - p->s) };
    if (s->events == events)
        return 0;
    if (epoll_ctl(p->ep, s->events ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, s->fd, &ev))
        return die(p, PD_EFAIL, strerror(errno));
    s->events = events;
    return 0;
}

static int add(struct path *p, int fd, struct pd_tls *tls, int state)
{
    struct stream *s = &p->s[p->n];
    *s = (struct stream){ .fd = fd, .tls = tls, .state = state };
    p->n++;
    p->n_up += state == S_UP;
    return want(p, s, state == S_CONNECTING ? EPOLLOUT : EPOLLIN);
}

/* One less. What went or came on it went or came whole; that one ends which nothing needs is no news. */
static void end_stream(struct path *p, struct stream *s, const char *why)
{
    if (p->runs || s->state != S_UP)
        pd_info("a stream of data: %s", why);
    snprintf(p->over, sizeof p->over, "%s", why);
    epoll_ctl(p->ep, EPOLL_CTL_DEL, s->fd, NULL);
    p->n_up -= s->state == S_UP;
    p->n_over++;
    s->state = S_OVER;
}

static void shut(void *path)
{
    struct path *p = path;
    for (uint32_t i = 0; i < p->n; i++) {
        struct stream *s = &p->s[i];
        pd_tls_free(s->tls);
        close(s->fd);
        pd_free(s->iov);
        pd_buf_free(&s->rest);
    }
    p->n = p->n_up = p->n_over = 0;
    p->has_placed = false;
    for (struct run *r = p->runs, *next; r; r = next) {
        next = r->next;
        pd_free(r);
    }
    p->runs = NULL;
}

static void close_path(void *path)
{
    struct path *p = path;
    if (!p)
        return;
    shut(p);
    if (p->ep >= 0)
        close(p->ep);
    pd_free(p->waste);
    pd_free(p);
}

/* All are on their way at once; that one is refused is seen when it is looked at. */
static int dial(struct path *p, const struct pd_xfer_opts *o, const struct pd_hello *theirs, struct pd_err *e)
{
    struct pd_hello h = { .has_attach = true };
    memcpy(h.attach, theirs->conn, sizeof h.attach);
    pd_tcp_name(&o->peer, p->at);
    for (uint32_t i = 0; i < (o->streams ? o->streams : PD_XFER_STREAMS); i++) {
        int fd, rc = pd_tcp_dial(&o->peer, &fd, e);
        rc = rc ? rc : add(p, fd, NULL, S_CONNECTING);
        if (!rc)
            rc = pd_hello_encode(&h, &p->s[i].rest, e);
        if (rc)
            return rc;
    }
    return 0;
}

static int open_path(const struct pd_xfer_opts *o, const struct pd_hello *theirs, void **path, struct pd_err *e)
{
    struct path *p = pd_calloc(1, sizeof *p, "tcp path", e);
    if (!p)
        return PD_ENOMEM;
    p->giving = o->giving;
    p->net = o->net;
    int rc = (p->ep = epoll_create1(EPOLL_CLOEXEC)) < 0 ? pd_fail_sys(e, "tcp: no descriptor") : 0;
    if (!rc && !p->giving && !(p->waste = pd_calloc(1, WASTE, "what is dropped", e)))
        rc = PD_ENOMEM;
    if (!rc && o->dialled)
        rc = dial(p, o, theirs, e);
    if (rc) {
        close_path(p);
        return rc;
    }
    *path = p;
    return 0;
}

static int path_fd(void *path) { return ((struct path *)path)->ep; }

static int up(void *path, const char **why)
{
    struct path *p = path;
    *why = p->over;
    return p->n_up ? 1 : p->n && p->n == p->n_over ? -1 : 0;
}

/* ---- bytes ---- */

static int failed(struct path *p, struct stream *s, const char *what)
{
    char text[300];
    if (s->state == S_OVER)
        return 0;
    if ((s->state != S_UP || (!s->has && !s->at_head)) && (errno == EPIPE || errno == ECONNRESET || s->state != S_UP)) {
        end_stream(p, s, s->tls && errno == EPROTO ? pd_tls_why(s->tls)->msg : strerror(errno));
        return 0;
    }
    if (s->tls && (errno == EPROTO || errno == ECONNRESET) && pd_tls_why(s->tls)->code)
        return die(p, pd_tls_why(s->tls)->code, pd_tls_why(s->tls)->msg);
    snprintf(text, sizeof text, "a stream of data %s: %s", what, strerror(errno));
    return die(p, PD_ECANCEL, text);
}

/* As writev: bytes, or -1: not now (it is waited for), or dead. */
static ssize_t put(struct path *p, struct stream *s, const struct iovec *v, int n)
{
    struct msghdr m = { .msg_iov = (struct iovec *)v, .msg_iovlen = (size_t)n };
    ssize_t k = pd_fault("write") ? (errno = EPIPE, -1) : s->tls ? pd_tls_writev(s->tls, v, n) : sendmsg(s->fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (k >= 0)
        return k;
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)
        want(p, s, EPOLLIN | EPOLLOUT);
    else
        failed(p, s, "cannot be written");
    return -1;
}

static ssize_t get(struct path *p, struct stream *s, struct iovec *v, int n)
{
    struct msghdr m = { .msg_iov = v, .msg_iovlen = (size_t)n };
    ssize_t k = pd_fault("read") ? (errno = EIO, -1) : s->tls ? pd_tls_read(s->tls, v->iov_base, v->iov_len) : recvmsg(s->fd, &m, MSG_DONTWAIT);
    if (k > 0)
        return k;
    if (k == 0 && (s->state != S_UP || (!s->has && !s->at_head)))
        end_stream(p, s, "the peer closed it");
    else if (k == 0)
        die(p, PD_ECANCEL, "the peer closed a stream of data inside a chunk");
    else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
        failed(p, s, "cannot be read");
    return -1;
}

static int take_stream(void *path, int fd, struct pd_tls *tls, struct pd_err *e)
{
    struct path *p = path;
    int rc = p->dead.code ? p->dead.code : p->n == PD_XFER_STREAMS_MAX ? pd_fail(e, PD_ECORRUPT, "tcp: more than %d streams", PD_XFER_STREAMS_MAX) : 0;
    if (rc) {
        pd_tls_free(tls);
        close(fd);
        return rc;
    }
    pd_tcp_tune(fd);
    rc = add(p, fd, tls, S_UP);
    if (!rc && !p->giving)          /* into an empty socket: whole, or it has gone already */
        put(p, &p->s[p->n - 1], &(struct iovec){ (char *)here, sizeof here }, 1);
    return rc ? rc : want(p, &p->s[p->n - 1], tls && pd_tls_pending(tls) ? EPOLLIN | EPOLLOUT : EPOLLIN);      /* what came behind its first record */
}

/* n bytes of the pieces went or came. */
static void advance(struct stream *s, size_t n)
{
    s->left -= n;
    while (n) {
        struct iovec *v = &s->iov[s->at_iov];
        size_t k = v->iov_len < n ? v->iov_len : n;
        v->iov_base = (char *)v->iov_base + k;
        v->iov_len -= k;
        n -= k;
        s->at_iov += !v->iov_len;
    }
}

static struct iovec *room_for(struct stream *s, int n, struct pd_err *e)
{
    if (n > s->cap_iov) {
        struct iovec *v = pd_realloc(s->iov, (size_t)n, sizeof *v, "pieces of a chunk", e);
        if (!v)
            return NULL;
        s->iov = v;
        s->cap_iov = n;
    }
    return s->iov;
}

/* ---- giving ---- */

static int offer(void *path, const struct pd_sending *s, struct pd_payload *y, struct pd_arena *a, struct pd_err *e)
{
    strcpy(y->scheme, "tcp");
    return 0;
}

static int take_aim(void *path, const struct pd_sending *s, const struct pd_accept *r, struct pd_err *e)
{
    struct path *p = path;
    struct run *run = pd_calloc(1, sizeof *run, "a run's tag", e);
    if (!run)
        return PD_ENOMEM;
    *run = (struct run){ .next = p->runs, .owner = s->owner, .tag = r->tag };
    p->runs = run;
    return 0;
}

static void put32(uint8_t *p, uint32_t v) { for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> (24 - 8 * i)); }
static uint32_t get32(const uint8_t *p) { return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3]; }

/* What can be written of the stream's chunk. */
static void write_some(struct path *p, struct stream *s)
{
    for (size_t moved = 0; s->has && !p->dead.code && moved < A_TURN;) {
        struct iovec v[PIECES];
        int n = 0;
        if (s->at_head < HEAD)
            v[n++] = (struct iovec){ s->head + s->at_head, HEAD - s->at_head };
        for (int i = s->at_iov; i < s->n_iov && n < PIECES; i++)
            v[n++] = s->iov[i];
        ssize_t k = put(p, s, v, n);
        if (k < 0)
            return;
        moved += (size_t)k;
        size_t head = HEAD - s->at_head < (size_t)k ? HEAD - s->at_head : (size_t)k;
        s->at_head += head;
        advance(s, (size_t)k - head);
        if (!s->left && s->at_head == HEAD) {
            s->has = false;
            s->rest.n = s->at_head = 0;
        }
    }
    want(p, s, EPOLLIN | EPOLLOUT);     /* one that has nothing is heard of once, so that it gets more */
}

static int send_one(void *path, const struct pd_sending *s, uint32_t index, uint32_t n, struct pd_out *out, uint32_t *sent, struct pd_err *e)
{
    struct path *p = path;
    struct pd_chunk c;
    struct stream *t = NULL;
    struct run *run = p->runs;
    *sent = 0;
    for (uint32_t i = 0; i < p->n && !t; i++) {
        struct stream *s2 = &p->s[(p->next + i) % p->n];
        if (s2->state == S_UP && !s2->has)
            t = s2;
    }
    if (!t && p->n && p->n == p->n_over)
        return pd_fail(e, PD_ECANCEL, "tcp: no stream of data stands any more");
    if (!t || p->dead.code)
        return 0;       /* progress tells of what is dead */
    while (run && run->owner != s->owner)
        run = run->next;
    if (!run)
        return pd_fail(e, PD_ECORRUPT, "run %s: it was accepted without a tag for its chunks", s->desc->run);
    if (!room_for(t, (int)(2 * s->plan->chunk_blocks), e))
        return PD_ENOMEM;
    int rc = pd_export_chunk(s->pool, s->blocks, s->plan, s->desc, index, &c, t->iov, &t->n_iov, e);
    if (rc)
        return rc;
    memcpy(t->head, magic, 4);
    put32(t->head + 4, run->tag);
    put32(t->head + 8, index);
    put32(t->head + 12, (uint32_t)c.raw_len);
    pd_put_be64(t->head + 16, c.xxh3);
    t->at_head = 0;
    t->at_iov = 0;
    t->left = c.raw_len;
    t->owner = s->owner;
    t->has = true;
    p->next = (uint32_t)(t - p->s + 1) % p->n;
    write_some(p, t);
    *sent = 1;
    return 0;
}

/* What is under way of it ends as it began, from a copy. */
static int fence(void *path, const void *owner, struct pd_out *out, struct pd_err *e)
{
    struct path *p = path;
    for (struct run **at = &p->runs; *at;)
        if ((*at)->owner == owner) {
            struct run *r = *at;
            *at = r->next;
            pd_free(r);
        } else
            at = &(*at)->next;
    for (uint32_t i = 0; i < p->n; i++) {
        struct stream *s = &p->s[i];
        if (!s->has || s->owner != owner)
            continue;
        s->owner = NULL;
        s->rest.n = 0;
        for (int k = s->at_iov; k < s->n_iov; k++)
            if (pd_buf_add(&s->rest, s->iov[k].iov_base, s->iov[k].iov_len, e))
                return PD_ENOMEM;
        s->iov[0] = (struct iovec){ s->rest.p, s->rest.n };
        s->at_iov = 0;
        s->n_iov = s->rest.n > 0;
    }
    return 0;
}

/* ---- taking ---- */

static int land(void *path, const void *owner, const struct pd_pool *pool, struct pd_import *im, struct pd_accept *r, struct pd_arena *a, struct pd_err *e)
{
    struct path *p = path;
    struct run *run = pd_calloc(1, sizeof *run, "a run's tag", e);
    if (!run)
        return PD_ENOMEM;
    if (!++p->tag)
        p->tag = 1;
    *run = (struct run){ .next = p->runs, .owner = owner, .tag = r->tag = p->tag, .im = im };
    p->runs = run;
    return 0;
}

static void withdraw(void *path, const void *owner)
{
    struct path *p = path;
    for (struct run **at = &p->runs; *at;)
        if ((*at)->owner == owner) {
            struct run *r = *at;
            *at = r->next;
            pd_free(r);
        } else
            at = &(*at)->next;
    for (uint32_t i = 0; i < p->n; i++)
        if (p->s[i].has && p->s[i].owner == owner)
            p->s[i].owner = NULL;
    if (p->has_placed && p->placed.owner == owner)
        p->has_placed = false;
}

/* Where the chunk of this head goes. */
static int begin_chunk(struct path *p, struct stream *s)
{
    struct pd_err e = { 0 };
    struct run *r = p->runs;
    if (memcmp(s->head, magic, 4))
        return die(p, PD_ECORRUPT, "what came on a stream of data is no chunk");
    s->tag = get32(s->head + 4);
    s->index = get32(s->head + 8);
    s->left = get32(s->head + 12);
    s->xxh3 = pd_get_be64(s->head + 16);
    if (s->left > PD_MAX_RECORD_DEFAULT || !s->left)
        return die(p, PD_ECORRUPT, "a chunk on a stream of data is of no length that a chunk has");
    while (r && r->tag != s->tag)
        r = r->next;
    s->has = true;
    s->owner = NULL;
    p->late += !r;
    if (!r)
        return 0;
    int rc = 0;
    for (uint32_t i = 0; i < p->n; i++)         /* two that write to one place would spoil it after it was checked */
        if (&p->s[i] != s && p->s[i].has && p->s[i].owner && p->s[i].tag == s->tag && p->s[i].index == s->index)
            rc = pd_fail(&e, PD_ECORRUPT, "chunk %u comes on two streams at once", s->index);
    int n = (int)(2 * pd_import_plan(r->im)->chunk_blocks);
    if (!rc && !room_for(s, n, &e))
        return die(p, PD_ENOMEM, e.msg);
    rc = rc ? rc : pd_import_place(r->im, s->index, s->left, s->iov, &s->n_iov, &e);
    s->at_iov = 0;
    if (!rc) {
        s->owner = r->owner;
        return 0;
    }
    p->placed = (struct pd_placed){ .owner = r->owner, .index = s->index, .err = e };    /* its run fails; the bytes are dropped */
    p->has_placed = true;
    return 0;
}

static void read_some(struct path *p, struct stream *s, bool *any)
{
    for (size_t moved = 0; !p->dead.code && !p->has_placed && moved < A_TURN;) {
        struct iovec v[PIECES];
        int n = 0;
        if (!s->has)
            v[n++] = (struct iovec){ s->head + s->at_head, HEAD - s->at_head };
        else if (!s->owner)
            v[n++] = (struct iovec){ p->waste, s->left < WASTE ? s->left : WASTE };
        else
            for (int i = s->at_iov; i < s->n_iov && n < PIECES; i++)
                v[n++] = s->iov[i];
        ssize_t k = get(p, s, v, n);
        if (k < 0) {
            if (s->state == S_UP)
                want(p, s, EPOLLIN);
            return;
        }
        *any = true;
        moved += (size_t)k;
        if (!s->has) {
            if ((s->at_head += (size_t)k) == HEAD) {
                s->at_head = 0;
                begin_chunk(p, s);
            }
            continue;
        }
        if (s->owner)
            advance(s, (size_t)k);
        else
            s->left -= (uint64_t)k;
        if (s->left)
            continue;
        s->has = false;
        if (s->owner) {
            p->placed = (struct pd_placed){ .owner = s->owner, .index = s->index, .xxh3 = s->xxh3 };
            p->has_placed = true;
        }
        s->owner = NULL;
    }
    /* What TLS holds already is no news to epoll: a socket that can be written is. */
    want(p, s, s->tls && pd_tls_pending(s->tls) ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

static bool placed(void *path, struct pd_placed *out)
{
    struct path *p = path;
    if (!p->has_placed)
        return false;
    *out = p->placed;
    p->has_placed = false;
    return true;
}

/* ---- both ---- */

/* On its way to stand. */
static void come_up(struct path *p, struct stream *s)
{
    struct pd_err e = { 0 };
    if (s->state == S_CONNECTING) {
        if (pd_tcp_stands(s->fd, p->at, &e) < 0) {
            end_stream(p, s, e.msg);
            return;
        }
        if (p->net && p->net->keys && pd_tls_new(p->net->keys, s->fd, true, "a stream of data", &s->tls, &e)) {
            die(p, e.code, e.msg);
            return;
        }
        s->state = s->tls ? S_SHAKING : S_ATTACHING;
    }
    if (s->state == S_SHAKING) {
        int rc = pd_tls_shake(s->tls);
        if (rc < 0)
            failed(p, s, "");
        else if (!rc)
            want(p, s, pd_tls_wants(s->tls) & POLLOUT ? EPOLLIN | EPOLLOUT : EPOLLIN);
        if (rc <= 0)
            return;
        s->state = S_ATTACHING;
    }
    while (s->at_head < s->rest.n && s->state == S_ATTACHING) {
        ssize_t k = put(p, s, &(struct iovec){ s->rest.p + s->at_head, s->rest.n - s->at_head }, 1);
        if (k < 0)
            return;
        s->at_head += (size_t)k;
    }
    if (s->state == S_OVER)
        return;
    if (s->state == S_ATTACHING) {
        s->at_head = s->rest.n = 0;
        s->state = p->giving ? S_ANNOUNCED : S_UP;
        p->n_up += s->state == S_UP;
    }
    while (s->state == S_ANNOUNCED) {
        ssize_t k = get(p, s, &(struct iovec){ s->head + s->at_head, sizeof here - s->at_head }, 1);
        if (k < 0 || s->state == S_OVER)
            break;
        if ((s->at_head += (size_t)k) < sizeof here)
            continue;
        s->at_head = 0;
        uint8_t more;
        if (memcmp(s->head, here, sizeof here) || get(p, s, &(struct iovec){ &more, 1 }, 1) > 0) {
            end_stream(p, s, "what answers there is not the taker");
            return;
        }
        if (s->state == S_OVER)
            return;
        s->state = S_UP;
        p->n_up++;
    }
    if (s->state == S_OVER)
        return;
    want(p, s, s->tls && pd_tls_unsent(s->tls) ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

static int progress(void *path, struct pd_err *e)
{
    struct path *p = path;
    struct epoll_event ev[PD_XFER_STREAMS_MAX];
    bool any = false;
    int n = p->dead.code ? 0 : epoll_wait(p->ep, ev, PD_XFER_STREAMS_MAX, 0);
    for (int i = 0; i < n && !p->dead.code && !p->has_placed; i++) {
        struct stream *s = &p->s[ev[i].data.u32];
        if (s->state == S_OVER)
            continue;
        if (s->state != S_UP) {
            come_up(p, s);
            any |= s->state == S_UP;
        } else if (!p->giving)
            read_some(p, s, &any);
        else {
            char c;
            if (ev[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR) && get(p, s, &(struct iovec){ &c, 1 }, 1) > 0)   /* it has ended, else: */
                die(p, PD_ECORRUPT, "the decode side wrote on a stream of data, where it has nothing to say");
            if (ev[i].events & EPOLLOUT && !p->dead.code && s->state == S_UP) {
                if (s->tls && pd_tls_flush(s->tls) < 0)
                    failed(p, s, "cannot be written");
                if (s->has)
                    write_some(p, s);
                else if (!s->tls || !pd_tls_unsent(s->tls))
                    want(p, s, EPOLLIN);
                any = true;
            }
        }
    }
    if (p->dead.code && e)
        *e = p->dead;
    return p->dead.code ? p->dead.code : any || p->has_placed;
}

const struct pd_transport pd_tcp = { .scheme = "tcp", .usable = usable, .open = open_path, .fd = path_fd, .up = up, .stream = take_stream, .progress = progress, .shut = shut,
                                     .offer = offer, .aim = take_aim, .send = send_one, .fence = fence, .land = land, .withdraw = withdraw, .placed = placed, .close = close_path };
