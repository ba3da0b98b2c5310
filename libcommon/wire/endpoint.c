#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include "../base/cli.h"
#include "../base/clock.h"
#include "../base/log.h"
#include "../base/stop.h"
#include "endpoint.h"
#include "json.h"
#include "record.h"
#include "unix.h"

#define PIPE_BYTES (1 << 20)
#define RETRY_US 20000
#define SHAKE_US 5000000        /* for a handshake, whoever is at the other side */

enum scheme { STDIO, PATH, UNIX, UNIX_LISTEN, TCP, TCP_LISTEN };

/* Schemes that the design names but this build does not have: a path could hardly mean them. */
static const char *const later[] = { "rdma:", "rdma-listen:", "shm:", "nixl:", "cuda:", "http:", "https:" };

static int parse(const char *spec, enum scheme *scheme, const char **rest, struct pd_err *e)
{
    *rest = spec;
    if (!*spec)
        return pd_fail(e, PD_EUSAGE, "an endpoint is empty (example: -, a path, unix:/run/pd/p.sock)");
    for (size_t i = 0; i < sizeof later / sizeof *later; i++)
        if (!strncmp(spec, later[i], strlen(later[i])))
            return pd_fail(e, PD_EUSAGE, "%s: %.*s endpoints are not supported by this build yet (use -, a path, unix:PATH, tcp:HOST:PORT)", spec,
                           (int)strlen(later[i]) - 1, spec);
    if (!strcmp(spec, "-"))
        *scheme = STDIO;
    else if (!strncmp(spec, "unix:", 5))
        *scheme = UNIX, *rest = spec + 5;
    else if (!strncmp(spec, "unix-listen:", 12))
        *scheme = UNIX_LISTEN, *rest = spec + 12;
    else if (!strncmp(spec, "tcp:", 4))
        *scheme = TCP, *rest = spec + 4;
    else if (!strncmp(spec, "tcp-listen:", 11))
        *scheme = TCP_LISTEN, *rest = spec + 11;
    else
        *scheme = PATH;
    return **rest || *scheme >= TCP ? 0 : pd_fail(e, PD_EUSAGE, "%s: the socket's path is missing (example: unix:/run/pd/p.sock)", spec);
}

bool pd_endpoint_is_h5(const char *spec)
{
    enum scheme scheme;
    const char *path;
    size_t n = strlen(spec);
    return !parse(spec, &scheme, &path, NULL) && scheme == PATH && n > 3 && !strcmp(spec + n - 3, ".h5");
}

static void enlarge_pipe(int fd)
{
    struct stat st;
    if (!fstat(fd, &st) && S_ISFIFO(st.st_mode) && fcntl(fd, F_GETPIPE_SZ) < PIPE_BYTES)
        fcntl(fd, F_SETPIPE_SZ, PIPE_BYTES);    /* refused past the user's limit: then it stays as it is */
}

/* ---- Unix sockets ---- */

static int connect_unix(const char *path, int64_t timeout_us, struct pd_endpoint *ep, struct pd_err *e)
{
    struct sockaddr_un a;
    int64_t until = pd_mono_us() + timeout_us;
    int rc = pd_unix_address(path, &a, e);
    while (!rc) {
        if (pd_stop_level())        /* the signal may have come before we began to wait */
            return pd_fail(e, PD_ECANCEL, "unix:%s: interrupted while connecting", path);
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0)
            return pd_fail_sys(e, "unix:%s: cannot make a socket", path);
        if (!connect(fd, (struct sockaddr *)&a, sizeof a)) {
            rc = pd_unix_check_peer(fd, path, e);
            if (rc)
                close(fd);
            else
                ep->fd = fd, ep->own = true;
            return rc;
        }
        int why = errno;
        close(fd);
        errno = why;
        if (why == EINTR)
            return pd_fail(e, PD_ECANCEL, "unix:%s: interrupted while connecting", path);
        if (why != ENOENT && why != ECONNREFUSED && why != EAGAIN)
            return pd_fail_sys(e, "unix:%s: cannot connect", path);
        if (pd_mono_us() >= until)
            return pd_fail(e, PD_ETIME, "unix:%s: cannot connect within %lld ms (is the other side running?): %s", path, (long long)(timeout_us / 1000),
                           strerror(why));
        struct timespec t = { 0, RETRY_US * 1000 };
        if (nanosleep(&t, NULL))
            return pd_fail(e, PD_ECANCEL, "unix:%s: interrupted while connecting", path);
    }
    return rc;
}

static int listen_unix(const char *path, struct pd_endpoint *ep, struct pd_err *e)
{
    struct pd_unix_name name;
    int l = -1, rc = pd_unix_listen(path, 1, &l, &name, e);
    if (rc)
        return rc;
    while (ep->fd < 0) {
        struct pd_err why;
        struct pollfd peer = { .fd = l, .events = POLLIN };
        if (pd_stop_level()) {
            rc = pd_fail(e, PD_ECANCEL, "%s: interrupted while waiting for a peer", path);
            goto out;
        }
        if (poll(&peer, 1, 500) <= 0)
            continue;
        int fd = accept4(l, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0 && errno == EINTR)
            rc = pd_fail(e, PD_ECANCEL, "%s: interrupted while waiting for a peer", path);
        else if (fd < 0 && errno != ECONNABORTED)
            rc = pd_fail_sys(e, "%s: cannot accept a peer", path);
        if (rc)
            goto out;
        if (fd >= 0 && pd_unix_check_peer(fd, path, &why)) {
            pd_warn("%s", why.msg);
            close(fd);
        } else if (fd >= 0)
            ep->fd = fd, ep->own = true;
    }
out:
    /* One peer is served: the name goes as soon as it came, and a second one finds nothing rather than a queue without end. */
    pd_unix_unlink(path, &name);
    close(l);
    return rc;
}

/* ---- TCP ---- */

static int interrupted(const char *where, const char *what, struct pd_err *e) { return pd_fail(e, PD_ECANCEL, "tcp:%s: interrupted while %s", where, what); }

/* A connected socket as an endpoint. fd is taken, also on failure. */
static int take_tcp(int fd, const char *where, bool client, const struct pd_net *net, struct pd_endpoint *ep, struct pd_err *e)
{
    char name[PD_TCP_NAME + 8];
    struct pd_tls *t = NULL;
    int rc = 0;
    snprintf(name, sizeof name, "tcp:%s", where);
    pd_tcp_tune(fd);
    if (net && net->keys && (rc = pd_tls_new(net->keys, fd, client, name, &t, e)) == 0)
        rc = pd_tls_shake_wait(t, pd_mono_us() + SHAKE_US, e);
    else if (!rc && fcntl(fd, F_SETFL, 0))
        rc = pd_fail_sys(e, "%s: cannot use the connection", name);
    if (rc) {
        pd_tls_free(t);
        close(fd);
    } else
        *ep = (struct pd_endpoint){ .fd = t ? -1 : fd, .own = true, .tls = t, .sock = fd, .tcp = true };
    return rc;
}

/* Until it stands or has failed. */
static int wait_connected(int fd, const char *where, int64_t until, struct pd_err *e)
{
    char name[PD_TCP_NAME + 200];
    snprintf(name, sizeof name, "%.250s", where);
    for (;;) {
        struct pollfd p = { .fd = fd, .events = POLLOUT };
        int64_t left = until - pd_mono_us();
        if (pd_stop_level())
            return interrupted(where, "connecting", e);
        int ready = poll(&p, 1, left <= 0 ? 0 : left < 500000 ? (int)(left / 1000) + 1 : 500);
        if (ready > 0)
            return pd_tcp_stands(fd, name, e);
        if (ready == 0 && left <= 0)
            return pd_fail(e, PD_ENOWORKER, "tcp:%s: no answer", where);
    }
}

static int connect_tcp(const char *where, const struct pd_net *net, struct pd_endpoint *ep, struct pd_err *e)
{
    int64_t patience = net ? net->connect_us : 0, until = pd_mono_us() + patience;
    struct pd_err why = { 0 };
    for (;;) {
        struct pd_tcp_addr a[PD_TCP_ADDRS];
        int n = 0, rc = pd_tcp_resolve(where, false, a, &n, &why);
        if (!rc && (rc = pd_tcp_may(a, n, net, where, false, e)))
            return rc;
        for (int i = 0; i < n && (!i || rc == PD_ENOWORKER); i++) {
            int fd = -1;
            int64_t now = pd_mono_us();
            if ((rc = pd_tcp_dial(&a[i], &fd, &why)) == 0 && (rc = wait_connected(fd, where, until > now + 200000 ? until : now + 200000, &why)) == 0)
                return take_tcp(fd, where, true, net, ep, e);
            if (fd >= 0)
                close(fd);
        }
        if (rc != PD_ENOWORKER) {
            if (e)
                *e = why;
            return rc;
        }
        if (pd_mono_us() >= until)
            return pd_fail(e, PD_ETIME, "%s; not within %lld ms (is the other side running?)", why.msg, (long long)(patience / 1000));
        if (pd_stop_level() || nanosleep(&(struct timespec){ 0, RETRY_US * 1000 }, NULL))
            return interrupted(where, "connecting", e);
    }
}

static int listen_tcp(const char *where, const struct pd_net *net, struct pd_endpoint *ep, struct pd_err *e)
{
    char told[PD_TCP_NAME];
    int l = -1, rc = pd_tcp_listen(where, 4, net, &l, told, e);
    if (rc)
        return rc;
    if (!strcmp(where + strlen(where) - 2, ":0"))
        pd_warn("listening on tcp:%s", told);
    while (ep->fd < 0 && !ep->tls) {
        struct pd_err why;
        struct pollfd peer = { .fd = l, .events = POLLIN };
        if (pd_stop_level()) {
            rc = interrupted(told, "waiting for a peer", e);
            break;
        }
        if (poll(&peer, 1, 500) <= 0)
            continue;
        int fd = accept4(l, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && errno != EINTR && errno != ECONNABORTED && errno != EAGAIN && errno != EWOULDBLOCK) {
            rc = pd_fail_sys(e, "tcp:%s: cannot accept a peer", told);
            break;
        }
        /* One that cannot prove a key does not end the wait for one that can. */
        if (fd >= 0 && take_tcp(fd, told, false, net, ep, &why))
            pd_warn("%s; waiting for another peer", why.msg);
    }
    close(l);
    return rc;
}

/* ---- paths ---- */

/* What is no plain path is opened here: 1. Else 0, with the path and what is there (a mode; 0: nothing). */
static int open_special(const char *spec, int stdio, const struct pd_net *net, const char **path, mode_t *there, struct pd_endpoint *ep, struct pd_err *e)
{
    enum scheme scheme;
    struct stat st = { 0 };
    *ep = (struct pd_endpoint){ .fd = -1 };
    int rc = parse(spec, &scheme, path, e);
    if (rc)
        return rc;
    *there = scheme == PATH && !stat(*path, &st) ? st.st_mode : 0;
    if (scheme == UNIX || S_ISSOCK(*there))
        rc = connect_unix(*path, net ? net->connect_us : 0, ep, e);
    else if (scheme == UNIX_LISTEN)
        rc = listen_unix(*path, ep, e);
    else if (scheme == TCP)
        rc = connect_tcp(*path, net, ep, e);
    else if (scheme == TCP_LISTEN)
        rc = listen_tcp(*path, net, ep, e);
    else if (scheme == STDIO)
        enlarge_pipe(ep->fd = stdio);
    else
        return S_ISDIR(*there) ? pd_fail(e, PD_EUSAGE, "%s is a directory; name a file in it", *path) : 0;
    return rc ? rc : 1;
}

static int open_path(const char *path, int flags, struct pd_endpoint *ep, struct pd_err *e)
{
    ep->fd = pd_stop_level() ? (errno = EINTR, -1) : open(path, flags | O_CLOEXEC);     /* a FIFO's other side may never come */
    if (ep->fd < 0)
        return errno == EINTR ? pd_fail(e, PD_ECANCEL, "%s: interrupted", path) : pd_fail_sys(e, "cannot open %s%s", path, flags == O_RDONLY ? "" : " for writing");
    ep->own = true;
    enlarge_pipe(ep->fd);
    return 0;
}

int pd_endpoint_open_in(const char *spec, const struct pd_net *net, struct pd_endpoint *ep, struct pd_err *e)
{
    const char *path;
    mode_t there;
    int rc = open_special(spec, STDIN_FILENO, net, &path, &there, ep, e);
    if (rc)
        return rc < 0 ? rc : 0;
    return open_path(path, O_RDONLY, ep, e);
}

int pd_endpoint_open_out(const char *spec, const struct pd_net *net, struct pd_endpoint *ep, struct pd_err *e)
{
    const char *path;
    mode_t there;
    int rc = open_special(spec, STDOUT_FILENO, net, &path, &there, ep, e);
    if (rc)
        return rc < 0 ? rc : 0;
    if (there && !S_ISREG(there))
        return open_path(path, O_WRONLY, ep, e);
    rc = pd_outfile_open(path, &ep->file, e);
    ep->fd = ep->file.fd;
    return rc;
}

bool pd_reader_said(const char *p, size_t n, const char *name, struct pd_err *e)
{
    struct pd_buf rec = { 0 };
    struct pd_arena a = { 0 };
    struct pd_error_rec r;
    const char *nl = n && p[0] == '{' ? memchr(p, '\n', n) : NULL;
    bool told = n > 2 && p[0] == 0x15 && p[1] == 3;
    if (told)
        pd_fail(e, PD_ECANCEL, "%s: the reader speaks TLS (give --key-file)", name);
    else if (nl && !pd_json_to_msgpack(p, (size_t)(nl - p), &rec, NULL) && !pd_error_decode(rec.p, rec.n, &a, &r, NULL) && r.message.p) {
        pd_fail(e, PD_ECANCEL, "%s: the reader went away: %.*s", name, (int)(r.message.n < 300 ? r.message.n : 300), r.message.p);
        told = true;
    }
    pd_arena_free(&a);
    pd_buf_free(&rec);
    return told;
}

/* Say that it ends, and wait until the reader says that it has read so far. */
static int end_tcp(struct pd_endpoint *ep, struct pd_err *e)
{
    char said[1500];
    int rc = ep->tls ? pd_tls_end(ep->tls) : shutdown(ep->sock, SHUT_WR);
    for (;;) {
        struct pollfd p = { .fd = ep->sock, .events = rc == 1 ? POLLIN | POLLOUT : POLLIN };
        if (pd_stop_level() > 1)
            return pd_fail(e, PD_ECANCEL, "stopped by a signal before the reader had all");
        if (rc < 0 || (poll(&p, 1, 500) < 0 && errno != EINTR))
            break;
        if (rc == 1) {
            rc = pd_tls_flush(ep->tls);
            continue;
        }
        ssize_t n = ep->tls ? pd_tls_read(ep->tls, said, sizeof said) : recv(ep->sock, said, sizeof said, MSG_DONTWAIT);
        if (n == 0)
            return 0;
        if (n > 0 && !ep->tls && pd_reader_said(said, (size_t)n, "the output", e))
            return PD_ECANCEL;
        if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
            break;
    }
    return pd_fail(e, PD_ECANCEL, "the reader went away before it had read all%s", ep->tls ? "" : " (if it wants a key: --key-file)");
}

int pd_endpoint_commit(struct pd_endpoint *ep, struct pd_err *e)
{
    int rc = ep->file.path ? pd_outfile_commit(&ep->file, e) : ep->tcp ? end_tcp(ep, e) : 0;
    if (ep->own && !ep->tls && close(ep->fd) && errno != EINTR)
        rc = pd_fail_sys(e, "cannot close the output");
    ep->own &= ep->tls != NULL;
    pd_endpoint_abort(ep);      /* what is left to free */
    return rc;
}

void pd_endpoint_abort(struct pd_endpoint *ep)
{
    pd_outfile_abort(&ep->file);
    if (ep->own)
        close(ep->tls ? ep->sock : ep->fd);
    pd_tls_free(ep->tls);
    *ep = (struct pd_endpoint){ .fd = -1 };
}

const struct pd_net *pd_net_cli(struct pd_err *e)
{
    static struct pd_net net;
    static struct pd_keys *keys;
    net.insecure = pd_cli.insecure;
    if ((net.connect_us = pd_cli_connect_us(e)) < 0)
        return NULL;
    if (pd_cli.key_file && !keys && pd_keys_load(pd_cli.key_file, &keys, e) < 0) {
        pd_err_prefix(e, "--key-file");
        return NULL;
    }
    net.keys = keys;
    return &net;
}
