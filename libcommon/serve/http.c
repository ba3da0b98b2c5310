#include <arpa/inet.h>
#include <errno.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/http.h>
#include <event2/listener.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
#include "../base/log.h"
#include "../base/opt.h"
#include "../wire/unix.h"
#include "http.h"

enum { MAX_HEADER = 8192, TIMEOUT_S = 10, BACKLOG = 16, PAUSE_US = 100000 };

struct pd_http {
    struct pd_loop *l;
    struct pd_http_opts o;
    char *path, where[300];     /* path: of a Unix socket */
    struct pd_unix_name made;
    struct evhttp *http;
    struct evhttp_bound_socket *bound;
    struct pd_timer *again;
    bool told;
    struct pd_http *next;
};
static struct pd_http *all;     /* libevent gives its own object to the callback below; this finds ours */

/* Descriptors have run out: libevent would try again without a pause. */
static void on_accept_error(struct evconnlistener *lev, void *ctx)
{
    struct pd_http *h = all;
    int sys = EVUTIL_SOCKET_ERROR();
    while (h && h->http != ctx)
        h = h->next;
    if (!h)
        return;
    if (!h->told)
        pd_error("%s: no connection can be accepted for now (%s)", h->where, strerror(sys));
    h->told = true;
    evconnlistener_disable(lev);
    pd_timer_in(h->again, PAUSE_US, NULL);
}

static void on_again(void *ctx)
{
    struct pd_http *h = ctx;
    evconnlistener_enable(evhttp_bound_socket_get_listener(h->bound));
}

static void reply(struct evhttp_request *req, int status, const char *reason, const char *type, const void *body, size_t n)
{
    struct evkeyvalq *out = evhttp_request_get_output_headers(req);
    struct evbuffer *b = evbuffer_new();
    evhttp_add_header(out, "Content-Type", type);
    evhttp_add_header(out, "Cache-Control", "no-store");
    if (!b || evbuffer_add(b, body, n))
        evhttp_send_error(req, HTTP_INTERNAL, NULL);
    else
        evhttp_send_reply(req, status, reason, b);
    if (b)
        evbuffer_free(b);
}

static void on_request(struct evhttp_request *req, void *ctx)
{
    struct pd_http *h = ctx;
    struct pd_err e;
    const struct evhttp_uri *uri = evhttp_request_get_evhttp_uri(req);
    const char *path = uri ? evhttp_uri_get_path(uri) : NULL, *say = "ok";
    h->told = false;
    if (h->path) {
        struct bufferevent *bev = evhttp_connection_get_bufferevent(evhttp_request_get_connection(req));
        if (pd_unix_check_peer(bufferevent_getfd(bev), h->where, &e) < 0) {
            pd_warn("%s", e.msg);
            reply(req, 403, "Forbidden", "text/plain", "this user may not ask\n", 22);
            return;
        }
    }
    if (path && !strcmp(path, "/metrics")) {
        struct pd_buf text = { 0 };
        if (pd_metrics_text(h->o.metrics, &text, &e) < 0)
            reply(req, 500, "Out of memory", "text/plain", "out of memory\n", 14);
        else
            reply(req, 200, "OK", PD_METRICS_TYPE, text.p, text.n);
        pd_buf_free(&text);
    } else if (path && !strcmp(path, "/healthz")) {
        char body[64];
        bool ok = !h->o.healthy || h->o.healthy(h->o.ctx, &say);
        int n = snprintf(body, sizeof body, "%s\n", say);
        reply(req, ok ? 200 : 503, ok ? "OK" : "Unavailable", "text/plain", body, (size_t)n);
    } else
        reply(req, 404, "Not Found", "text/plain", "there are /metrics and /healthz\n", 32);
}

/* HOST:PORT, where an IPv6 address stands in brackets. */
static int split(const char *where, char host[256], int64_t *port, struct pd_err *e)
{
    const char *s = where + strlen("http:"), *colon = strrchr(s, ':');
    if (!colon || colon == s || (size_t)(colon - s) >= 256 || pd_parse_int(colon + 1, 0, 65535, port, e) < 0)
        return pd_fail(e, PD_EUSAGE, "'%s' is no place for HTTP (example: http:127.0.0.1:9100, unix:/run/pd/d0.metrics)", where);
    snprintf(host, 256, "%.*s", (int)(colon - s), s);
    size_t n = strlen(host);
    if (host[0] == '[' && host[n - 1] == ']') {
        memmove(host, host + 1, n - 2);
        host[n - 2] = 0;
    }
    if (!strcmp(host, "localhost"))
        strcpy(host, "127.0.0.1");
    return 0;
}

static bool is_loopback(const char *host)
{
    struct in_addr a;
    struct in6_addr b;
    return inet_pton(AF_INET, host, &a) == 1 ? ntohl(a.s_addr) >> 24 == 127 : inet_pton(AF_INET6, host, &b) == 1 && IN6_IS_ADDR_LOOPBACK(&b);
}

static int bind_tcp(struct pd_http *h, struct pd_err *e)
{
    char host[256];
    int64_t port;
    struct in6_addr any;
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    int rc = split(h->o.where, host, &port, e);
    if (rc)
        return rc;
    if (inet_pton(AF_INET, host, &any) != 1 && inet_pton(AF_INET6, host, &any) != 1)
        return pd_fail(e, PD_EUSAGE, "%s: '%s' is no address (example: http:127.0.0.1:9100)", h->o.where, host);
    if (!is_loopback(host) && !h->o.insecure)
        return pd_fail(e, PD_EUSAGE, "%s: %s is not loopback, and anyone who reaches it could ask; use 127.0.0.1 or unix:PATH, or say --insecure",
                       h->o.where, host);
    errno = 0;
    if (!(h->bound = evhttp_bind_socket_with_handle(h->http, host, (uint16_t)port)))
        return pd_fail_sys(e, "%s: cannot listen", h->o.where);
    int fd = evhttp_bound_socket_get_fd(h->bound);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    if (!getsockname(fd, (struct sockaddr *)&a, &n))
        port = ntohs(a.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&a)->sin6_port : ((struct sockaddr_in *)&a)->sin_port);
    snprintf(h->where, sizeof h->where, strchr(host, ':') ? "http:[%s]:%d" : "http:%s:%d", host, (int)port);
    return 0;
}

static int bind_unix(struct pd_http *h, struct pd_err *e)
{
    const char *path = h->o.where + strlen("unix:");
    int fd, rc;
    if (!*path)
        return pd_fail(e, PD_EUSAGE, "%s: the socket's path is missing (example: unix:/run/pd/d0.metrics)", h->o.where);
    if ((rc = pd_unix_listen(path, BACKLOG, &fd, &h->made, e)) < 0)
        return rc;
    if (!(h->path = pd_strndup(path, strlen(path), e)))
        rc = PD_ENOMEM;
    else if (fcntl(fd, F_SETFL, O_NONBLOCK) || !(h->bound = evhttp_accept_socket_with_handle(h->http, fd)))
        rc = pd_fail(e, PD_ENOMEM, "%s: cannot listen", h->o.where);
    if (rc < 0) {
        pd_unix_unlink(path, &h->made);
        close(fd);
    }
    snprintf(h->where, sizeof h->where, "unix:%s", path);
    return rc;
}

int pd_http_new(struct pd_loop *l, const struct pd_http_opts *o, struct pd_http **out, struct pd_err *e)
{
    struct pd_http *h = pd_calloc(1, sizeof *h, "an HTTP server", e);
    int rc = PD_ENOMEM;
    if (!h)
        return rc;
    h->l = l;
    h->o = *o;
    h->next = all;
    all = h;
    if ((rc = pd_timer_new(l, on_again, h, &h->again, e)) < 0)
        goto out;
    if (!(h->http = evhttp_new(pd_loop_base(l)))) {
        rc = pd_fail(e, PD_ENOMEM, "out of memory for an HTTP server");
        goto out;
    }
    evhttp_set_allowed_methods(h->http, EVHTTP_REQ_GET | EVHTTP_REQ_HEAD);
    evhttp_set_max_headers_size(h->http, MAX_HEADER);
    evhttp_set_max_body_size(h->http, 0);
    evhttp_set_timeout(h->http, TIMEOUT_S);
    evhttp_set_gencb(h->http, on_request, h);
    if (!strncmp(o->where, "http:", 5))
        rc = bind_tcp(h, e);
    else if (!strncmp(o->where, "unix:", 5))
        rc = bind_unix(h, e);
    else
        rc = pd_fail(e, PD_EUSAGE, "'%s' is no place for HTTP (example: http:127.0.0.1:9100, unix:/run/pd/d0.metrics)", o->where);
    if (rc == 0)
        evconnlistener_set_error_cb(evhttp_bound_socket_get_listener(h->bound), on_accept_error);
out:
    if (rc < 0)
        pd_http_free(h);
    else
        *out = h;
    return rc;
}

const char *pd_http_where(const struct pd_http *h) { return h->where; }

void pd_http_free(struct pd_http *h)
{
    if (!h)
        return;
    for (struct pd_http **q = &all; *q; q = &(*q)->next)
        if (*q == h) {
            *q = h->next;
            break;
        }
    if (h->path && h->bound)
        pd_unix_unlink(h->path, &h->made);
    if (h->http)
        evhttp_free(h->http);
    pd_timer_free(h->again);
    pd_free(h->path);
    pd_free(h);
}
