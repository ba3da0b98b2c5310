#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "../base/mem.h"
#include "lookup.h"

enum { STACK = 512 << 10 };

struct pd_lookup {
    _Atomic int holders;                /* who asked, and the thread */
    int fd;
    struct pd_tcp_addr a[PD_TCP_ADDRS];
    int n, rc;
    struct pd_err why;
    char where[];
};

static _Atomic int under_way;

static void let_go(struct pd_lookup *u)
{
    if (atomic_fetch_sub(&u->holders, 1) > 1)
        return;
    close(u->fd);
    pd_free(u);
}

static void *ask(void *arg)
{
    struct pd_lookup *u = arg;
    u->rc = pd_tcp_resolve(u->where, false, u->a, &u->n, &u->why);
    while (write(u->fd, &(uint64_t){ 1 }, sizeof(uint64_t)) < 0 && errno == EINTR) {}
    let_go(u);
    atomic_fetch_sub(&under_way, 1);
    return NULL;
}

/* Signals are for the loop's thread. */
static int start(struct pd_lookup *u)
{
    pthread_attr_t how;
    pthread_t t;
    sigset_t all, was;
    int rc = pthread_attr_init(&how);
    if (rc)
        return rc;
    pthread_attr_setdetachstate(&how, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&how, STACK);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &was);
    rc = pthread_create(&t, &how, ask, u);
    pthread_sigmask(SIG_SETMASK, &was, NULL);
    pthread_attr_destroy(&how);
    return rc;
}

int pd_lookup_new(const char *where, struct pd_lookup **out, struct pd_err *e)
{
    size_t n = strlen(where);
    if (atomic_fetch_add(&under_way, 1) >= PD_LOOKUPS) {
        atomic_fetch_sub(&under_way, 1);
        return pd_fail(e, PD_ENOWORKER, "tcp:%s: %d names are being looked up already, and the resolver does not answer", where, PD_LOOKUPS);
    }
    int rc = 0, why;
    struct pd_lookup *u = pd_calloc(1, sizeof *u + n + 1, "a lookup", e);
    if (!u)
        rc = PD_ENOMEM;
    else {
        atomic_init(&u->holders, 2);
        memcpy(u->where, where, n);
        if ((u->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0)
            rc = pd_fail_sys(e, "tcp:%s: cannot look up the host", where);
        else if ((why = start(u)) != 0) {
            close(u->fd);
            rc = pd_fail(e, PD_ENOMEM, "tcp:%s: cannot look up the host: no thread: %s", where, strerror(why));
        }
    }
    if (rc) {
        pd_free(u);
        atomic_fetch_sub(&under_way, 1);
    } else
        *out = u;
    return rc;
}

int pd_lookup_fd(const struct pd_lookup *u) { return u->fd; }
const char *pd_lookup_where(const struct pd_lookup *u) { return u->where; }

int pd_lookup_take(struct pd_lookup *u, struct pd_tcp_addr out[PD_TCP_ADDRS], int *n, struct pd_err *e)
{
    uint64_t one;
    if (read(u->fd, &one, sizeof one) != sizeof one)    /* and what the thread wrote before it is seen from here on */
        return pd_fail(e, PD_ENOWORKER, "tcp:%s: there is no answer yet", u->where);
    if (u->rc) {
        if (e)
            *e = u->why;
        return u->rc;
    }
    memcpy(out, u->a, sizeof u->a);
    *n = u->n;
    return 0;
}

void pd_lookup_free(struct pd_lookup *u)
{
    if (u)
        let_go(u);
}
