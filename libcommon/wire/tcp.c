#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "../base/opt.h"
#include "tcp.h"

/* A host that says nothing for so long is gone. */
enum { IDLE_S = 10, EVERY_S = 5, TIMES = 4, UNACKED_MS = 30000 };

static const char *scheme(bool listening) { return listening ? "tcp-listen" : "tcp"; }

static int split(const char *where, bool listening, char host[256], char port[8], struct pd_err *e)
{
    const char *example = listening ? "127.0.0.1:7000, [::1]:7000, :7000" : "hostB:7000, 10.0.0.2:7000, [::1]:7000";
    const char *colon = strrchr(where, ':'), *from = where, *to = colon;
    int64_t v;
    if (!colon)
        return pd_fail(e, PD_EUSAGE, "%s:%s: the port is missing (examples: %s)", scheme(listening), where, example);
    if (*where == '[') {
        from = where + 1;
        if (!(to = memchr(from, ']', (size_t)(colon - from))) || to + 1 != colon)
            return pd_fail(e, PD_EUSAGE, "%s:%s: an IPv6 address stands in brackets before the port (examples: %s)", scheme(listening), where, example);
    } else if (memchr(where, ':', (size_t)(colon - where)))
        return pd_fail(e, PD_EUSAGE, "%s:%s: an IPv6 address stands in brackets before the port (examples: %s)", scheme(listening), where, example);
    if ((from == to && (!listening || *where == '[')) || to - from > 255)
        return pd_fail(e, PD_EUSAGE, "%s:%s: %s (examples: %s)", scheme(listening), where, from == to ? "the host is missing" : "the host's name is too long", example);
    if (pd_parse_int(colon + 1, !listening, 65535, &v, NULL) < 0)
        return pd_fail(e, PD_EUSAGE, "%s:%s: '%s' is no port (%d to 65535; examples: %s)", scheme(listening), where, colon + 1, !listening, example);
    memcpy(host, from, (size_t)(to - from));
    host[to - from] = 0;
    snprintf(port, 8, "%d", (int)v);
    return 0;
}

int pd_tcp_check(const char *where, bool listening, struct pd_err *e)
{
    char host[256], port[8];
    return split(where, listening, host, port, e);
}

static int resolve(const char *where, bool listening, int flags, struct pd_tcp_addr out[PD_TCP_ADDRS], int *n, struct pd_err *e)
{
    char host[256], port[8];
    struct addrinfo hint = { .ai_socktype = SOCK_STREAM, .ai_flags = flags | AI_NUMERICSERV | (listening ? AI_PASSIVE : 0) }, *all = NULL;
    int rc = split(where, listening, host, port, e);
    if (rc)
        return rc;
    *n = 0;
    rc = getaddrinfo(host[0] ? host : NULL, port, &hint, &all);
    if (rc == EAI_NONAME && flags & AI_NUMERICHOST)
        return 1;
    if (rc)
        return pd_fail(e, rc == EAI_MEMORY ? PD_ENOMEM : rc == EAI_SYSTEM ? PD_EFAIL : PD_ENOWORKER, "%s:%s: the host '%s' is not found: %s", scheme(listening), where, host,
                       rc == EAI_SYSTEM ? strerror(errno) : gai_strerror(rc));
    for (const struct addrinfo *a = all; a && *n < PD_TCP_ADDRS; a = a->ai_next)
        if ((a->ai_family == AF_INET || a->ai_family == AF_INET6) && a->ai_addrlen <= sizeof out->a) {
            memcpy(&out[*n].a, a->ai_addr, a->ai_addrlen);
            out[(*n)++].n = a->ai_addrlen;
        }
    freeaddrinfo(all);
    return *n ? 0 : pd_fail(e, PD_ENOWORKER, "%s:%s: the host '%s' has no address", scheme(listening), where, host);
}

int pd_tcp_resolve(const char *where, bool listening, struct pd_tcp_addr out[PD_TCP_ADDRS], int *n, struct pd_err *e)
{
    return resolve(where, listening, 0, out, n, e);
}

int pd_tcp_numeric(const char *where, struct pd_tcp_addr out[PD_TCP_ADDRS], int *n, struct pd_err *e)
{
    return resolve(where, false, AI_NUMERICHOST, out, n, e);
}

bool pd_tcp_is_loopback(const struct pd_tcp_addr *a)
{
    if (a->a.ss_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)&a->a)->sin_addr.s_addr) >> 24 == 127;
    const struct in6_addr *six = &((const struct sockaddr_in6 *)&a->a)->sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(six) || (IN6_IS_ADDR_V4MAPPED(six) && six->s6_addr[12] == 127);
}

int pd_tcp_may(const struct pd_tcp_addr *a, int n, const struct pd_net *net, const char *where, bool listening, struct pd_err *e)
{
    for (int i = 0; i < n && !(net && (net->keys || net->insecure)); i++)
        if (!pd_tcp_is_loopback(&a[i]))
            return pd_fail(e, PD_EUSAGE, "%s:%s is not loopback: whoever reaches it could read and write KV (give --key-file FILE for TLS, or --insecure)", scheme(listening), where);
    return 0;
}

void pd_tcp_name(const struct pd_tcp_addr *a, char out[PD_TCP_NAME])
{
    char host[64] = "?", port[8] = "?";
    getnameinfo((const struct sockaddr *)&a->a, a->n, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
    snprintf(out, PD_TCP_NAME, strchr(host, ':') ? "[%s]:%s" : "%s:%s", host, port);
}

void pd_tcp_local(int fd, char out[PD_TCP_NAME])
{
    struct pd_tcp_addr a = { .n = sizeof a.a };
    if (getsockname(fd, (struct sockaddr *)&a.a, &a.n))
        a.n = 0;
    pd_tcp_name(&a, out);
}

static void set(int fd, int level, int what, int v) { setsockopt(fd, level, what, &v, sizeof v); }     /* one that the kernel refuses is lived without */

void pd_tcp_tune(int fd)
{
    set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set(fd, IPPROTO_TCP, TCP_KEEPIDLE, IDLE_S);
    set(fd, IPPROTO_TCP, TCP_KEEPINTVL, EVERY_S);
    set(fd, IPPROTO_TCP, TCP_KEEPCNT, TIMES);
    set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, UNACKED_MS);
}

bool pd_is_tcp(int fd)
{
    int domain = 0;
    socklen_t n = sizeof domain;
    return !getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &n) && (domain == AF_INET || domain == AF_INET6);
}

int pd_tcp_listen(const char *where, int backlog, const struct pd_net *net, int *fd, char told[PD_TCP_NAME], struct pd_err *e)
{
    struct pd_tcp_addr a[PD_TCP_ADDRS];
    int n, rc = pd_tcp_resolve(where, true, a, &n, e), why = 0;
    rc = rc ? rc : pd_tcp_may(a, n, net, where, true, e);
    if (rc)
        return rc == PD_ENOWORKER ? (e ? e->code = PD_EUSAGE : 0, PD_EUSAGE) : rc;
    /* All addresses: one socket for both families where the kernel has IPv6. */
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < n; i++) {
            bool first = (a[i].a.ss_family == AF_INET6) == (*where == ':' || *where == '[');
            if (first == (pass == 1))
                continue;
            int s = socket(a[i].a.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
            if (s >= 0) {
                set(s, SOL_SOCKET, SO_REUSEADDR, 1);
                if (a[i].a.ss_family == AF_INET6)
                    set(s, IPPROTO_IPV6, IPV6_V6ONLY, 0);
                if (!bind(s, (struct sockaddr *)&a[i].a, a[i].n) && !listen(s, backlog)) {
                    pd_tcp_local(s, told);
                    *fd = s;
                    return 0;
                }
            }
            why = errno;
            if (s >= 0)
                close(s);
        }
    errno = why;
    if (why == EADDRINUSE)
        return pd_fail(e, PD_EUSAGE, "tcp-listen:%s: another process listens there; choose another port", where);
    if (why == EADDRNOTAVAIL || why == EACCES)
        return pd_fail(e, PD_EUSAGE, "tcp-listen:%s: cannot listen there: %s", where, strerror(why));
    return pd_fail_sys(e, "tcp-listen:%s: cannot listen", where);
}

int pd_tcp_dial(const struct pd_tcp_addr *a, int *fd, struct pd_err *e)
{
    char name[PD_TCP_NAME];
    int s = socket(a->a.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    pd_tcp_name(a, name);
    if (s < 0)
        return pd_fail_sys(e, "tcp:%s: cannot make a socket", name);
    pd_tcp_tune(s);
    if (connect(s, (const struct sockaddr *)&a->a, a->n) && errno != EINPROGRESS) {
        int why = errno;
        close(s);
        return pd_fail(e, PD_ENOWORKER, "tcp:%s: cannot connect: %s", name, strerror(why));
    }
    *fd = s;
    return 0;
}

int pd_tcp_stands(int fd, const char *name, struct pd_err *e)
{
    struct sockaddr_storage here, there;
    socklen_t n = sizeof here, m = sizeof there, k = sizeof(int);
    int why = 0;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &why, &k))
        why = errno;
    if (why)
        return pd_fail(e, PD_ENOWORKER, "tcp:%s: cannot connect: %s", name, strerror(why));
    /* Where nobody listens on a port of the range that is given to callers, a call may reach itself. */
    if (!getsockname(fd, (struct sockaddr *)&here, &n) && !getpeername(fd, (struct sockaddr *)&there, &m) && n == m && !memcmp(&here, &there, n))
        return pd_fail(e, PD_ENOWORKER, "tcp:%s: cannot connect: nobody listens there", name);
    return 0;
}

void pd_tcp_reachable(const char *told, char out[PD_TCP_NAME])
{
    struct ifaddrs *all = NULL;
    const char *port = strrchr(told, ':');
    snprintf(out, PD_TCP_NAME, "%s", told);
    if (!port || (strncmp(told, "0.0.0.0:", 8) && strncmp(told, "[::]:", 5)))
        return;
    snprintf(out, PD_TCP_NAME, "127.0.0.1%s", port);
    if (getifaddrs(&all))
        return;
    for (int six = 0; six < 2; six++)
        for (const struct ifaddrs *i = all; i; i = i->ifa_next) {
            struct pd_tcp_addr a = { 0 };
            if (!i->ifa_addr || !(i->ifa_flags & IFF_UP) || i->ifa_flags & IFF_LOOPBACK || i->ifa_addr->sa_family != (six ? AF_INET6 : AF_INET))
                continue;
            a.n = six ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
            memcpy(&a.a, i->ifa_addr, a.n);
            if (six && (told[0] != '[' || IN6_IS_ADDR_LINKLOCAL(&((struct sockaddr_in6 *)&a.a)->sin6_addr)))
                continue;
            char name[PD_TCP_NAME];
            pd_tcp_name(&a, name);
            snprintf(out, PD_TCP_NAME, "%.*s%s", (int)(strrchr(name, ':') - name), name, port);
            freeifaddrs(all);
            return;
        }
    freeifaddrs(all);
}
