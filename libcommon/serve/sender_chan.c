#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>
#include "../base/fault.h"
#include "../base/log.h"
#include "sender_chan.h"

enum { PIECES = 256, PING_US = 1000000, RAW_AGAIN_US = 50000, RAW_US = 2000000, END_MS = 200 };

enum pd_ep_kind pd_ep_kind_of(const char *spec, const char **rest)
{
    static const struct { const char *scheme; enum pd_ep_kind kind; } all[] = {
        { "unix:", PD_EP_UNIX }, { "unix-listen:", PD_EP_UNIX_LISTEN }, { "tcp:", PD_EP_TCP }, { "tcp-listen:", PD_EP_TCP_LISTEN } };
    const char *unused;
    rest = rest ? rest : &unused;
    *rest = spec;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strncmp(spec, all[i].scheme, strlen(all[i].scheme))) {
            *rest = spec + strlen(all[i].scheme);
            return all[i].kind;
        }
    return strcmp(spec, "-") ? PD_EP_PATH : PD_EP_STDIO;
}

void pd_chan_init(struct pd_chan *c) { *c = (struct pd_chan){ .fd = -1, .raw = -1 }; }

void pd_chan_of(struct pd_chan *c, const struct pd_endpoint *ep, const char *spec)
{
    const char *rest;
    enum pd_ep_kind k = pd_ep_kind_of(spec, &rest);
    c->tls = ep->tls;
    c->fd = ep->tls ? ep->sock : ep->fd;
    c->socket = k == PD_EP_UNIX || k == PD_EP_TCP;
    c->unix_socket = k == PD_EP_UNIX;
    c->tcp = c->dialled = k == PD_EP_TCP;
    if (k == PD_EP_UNIX)
        snprintf(c->path, sizeof c->path, "%s", rest);
}

int pd_chan_xfer(struct pd_chan *c, struct pd_xfer_opts *o, const struct pd_net *net, int64_t now, struct pd_err *e)
{
    o->unix_socket = c->unix_socket;
    o->tcp = c->tcp;
    o->net = net;
    int rc = pd_xfer_new(o, now, &c->x, e);
    if (!rc && c->dialled)
        pd_xfer_dialled(c->x, c->fd);
    return rc;
}

int pd_chan_reader(struct pd_chan *c, const char *name, size_t max_record, struct pd_err *e)
{
    struct pd_rstream_opts o = { .max_record = max_record, .name = name, .tls = c->tls };
    return pd_rstream_new(c->tls ? -1 : c->fd, &o, &c->rs, e);
}

int pd_chan_next(struct pd_chan *c, struct pd_rec *rec, bool *bad, int64_t now, struct pd_err *e)
{
    int rc = pd_rstream_next(c->rs, 0, rec, bad, e);
    if (rc == 1)
        c->heard = now;
    c->eof |= rc == 0 || (rc < 0 && !*bad && rc != PD_ENOMEM);
    return rc;
}

int pd_chan_writev(struct pd_chan *c, const struct iovec *v, int n, size_t *wrote, struct pd_err *e)
{
    struct msghdr m = { .msg_iov = (struct iovec *)v, .msg_iovlen = (size_t)n };
    *wrote = 0;
    c->blocked = false;
    ssize_t k = pd_fault("write") ? (errno = ENOSPC, -1) : c->tls ? pd_tls_writev(c->tls, v, n) : c->socket ? sendmsg(c->fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL) : writev(c->fd, v, n);
    if (k >= 0) {
        *wrote = (size_t)k;
        return 0;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
        c->blocked = errno != EINTR;
        return 1;
    }
    if (c->tls && errno == EPROTO) {
        if (e)
            *e = *pd_tls_why(c->tls);
        return pd_tls_why(c->tls)->code;
    }
    return pd_fail_sys(e, errno == EPIPE || errno == ECONNRESET ? "the reader went away" : "cannot write");
}

int pd_chan_flush(struct pd_chan *c, int64_t now, struct pd_err *e)
{
    struct iovec v[PIECES];
    for (size_t wrote, all = 0; all < PD_CHAN_TURN; all += wrote) {
        int n = pd_xfer_iov(c->x, v, PIECES, now, e);
        if (n < 0)
            return n;
        if (!n)
            return pd_chan_drained(c) ? 0 : 1;
        int rc = pd_chan_writev(c, v, n, &wrote, e);
        if (rc)
            return rc;
        pd_xfer_wrote(c->x, wrote, now);
    }
    return 1;
}

void pd_chan_unblock(struct pd_chan *c)
{
    struct stat st;
    char name[40];
    if (c->socket || fstat(c->fd, &st) || !S_ISFIFO(st.st_mode))
        return;
    snprintf(name, sizeof name, "/proc/self/fd/%d", c->fd);
    int fd = open(name, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return;             /* somebody else's pipe: its writes block, and what else there is to do waits for them */
    if (c->own)
        close(c->fd);
    c->fd = fd;
    c->own = true;
}

/* ---- descriptors ---- */

static bool shm_in_use(const struct pd_chan *c)
{
    const char *via = pd_xfer_via(c->x), *shm = strstr(via, "shm"), *not = strchr(via, '(');
    return shm && (!not || shm < not);
}

static void raw_over(struct pd_chan *c, const char *why)
{
    pd_info("descriptors: %s; KV goes in the stream", why);
    if (c->raw >= 0)
        close(c->raw);
    c->raw = -1;
    c->raw_dead = true;
    snprintf(c->raw_why, sizeof c->raw_why, "%.199s", why);
}

static int dial(struct pd_chan *c, struct pd_err *e)
{
    struct pd_hello h = { .has_attach = true };
    struct sockaddr_un a;
    struct pd_buf b = { 0 };
    int rc = pd_unix_address(c->path, &a, e), fd = -1;
    memcpy(h.attach, pd_xfer_conn(c->x, true), sizeof h.attach);
    rc = rc ? rc : pd_hello_encode(&h, &b, e);
    if (!rc && (fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) < 0)
        rc = pd_fail_sys(e, "a socket");
    if (!rc && connect(fd, (struct sockaddr *)&a, sizeof a))
        rc = errno == EAGAIN || errno == EINTR ? 1 : pd_fail_sys(e, "%s: cannot connect", c->path);
    rc = rc ? rc : pd_unix_check_peer(fd, c->path, e);
    if (!rc && send(fd, b.p, b.n, MSG_NOSIGNAL) != (ssize_t)b.n)
        rc = pd_fail_sys(e, "%s: cannot write", c->path);
    pd_buf_free(&b);
    if (rc && fd >= 0)
        close(fd);
    if (!rc)
        c->raw = fd;
    return rc;
}

static void pass(struct pd_chan *c, int64_t now)
{
    struct pd_err e = { 0 };
    int rc = pd_xfer_fds(c->x, c->raw, now, &e);
    c->raw_ready = false;
    c->raw_waits = rc == 1;
    if (rc < 0)
        raw_over(c, e.msg);
}

void pd_chan_take_raw(struct pd_chan *c, int fd, int64_t now)
{
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    c->raw = fd;
    c->raw_ready = true;
    pd_chan_raw(c, now);
}

void pd_chan_raw(struct pd_chan *c, int64_t now)
{
    struct pd_err e = { 0 };
    if (c->x)
        pd_xfer_poll(c->x, now);
    if (!c->x || !pd_xfer_open(c->x) || c->raw_dead)
        return;
    if (c->raw < 0 && c->path[0] && shm_in_use(c) && now >= c->raw_again) {
        int rc = dial(c, &e);
        if (rc == 1)
            c->raw_again = now + RAW_AGAIN_US;
        else if (rc < 0)
            raw_over(c, e.msg);
    }
    if (c->raw >= 0 && (c->giving || c->raw_ready))
        pass(c, now);
}

bool pd_chan_raw_awaited(struct pd_chan *c, int64_t now)
{
    if (!shm_in_use(c) || c->raw >= 0 || c->raw_dead)
        return false;
    if (!c->raw_until)
        c->raw_until = now + RAW_US;
    if (now >= c->raw_until)
        raw_over(c, "the peer did not bring a socket for them");
    return !c->raw_dead;
}

const char *pd_chan_via(const struct pd_chan *c) { return !strncmp(pd_xfer_via(c->x), "shm", 3) && c->raw < 0 ? "inline" : NULL; }

/* ---- life ---- */

void pd_chan_plain(struct pd_chan *c)
{
    pd_xfer_free(c->x);
    c->x = NULL;
    if (c->raw >= 0)
        close(c->raw);
    c->raw = -1;
    c->blocked = false;
}

bool pd_chan_alive(struct pd_chan *c, int64_t silence_us, int64_t now)
{
    if (now - c->heard >= PING_US && now - c->pinged >= PING_US) {
        struct pd_status s = { .bytes = 0 };
        struct pd_buf b = { 0 };
        if (!pd_status_encode(&s, &b, NULL))
            pd_xfer_say(c->x, b.p, b.n, NULL);
        pd_buf_free(&b);
        c->pinged = now;
    }
    return now - c->heard < silence_us;
}

bool pd_chan_drained(struct pd_chan *c)
{
    bool all = !c->tls || pd_tls_flush(c->tls) != 1;
    c->blocked |= !all;
    return all;
}

void pd_chan_close(struct pd_chan *c)
{
    pd_xfer_free(c->x);
    pd_rstream_free(c->rs);
    if (c->own && c->tls) {             /* say that it ends; who does not read it misses nothing else */
        struct pollfd p = { .fd = c->fd, .events = POLLOUT };
        if (pd_tls_end(c->tls) == 1 && poll(&p, 1, END_MS) > 0)
            pd_tls_flush(c->tls);
        pd_tls_free(c->tls);
    }
    if (c->raw >= 0)
        close(c->raw);
    if (c->own && c->fd >= 0)
        close(c->fd);
    pd_chan_init(c);
}
