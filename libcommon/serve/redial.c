#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include "../base/mem.h"
#include "redial.h"

struct pd_redial {
    _Atomic int holders;                /* who asked, and the thread */
    _Atomic bool over;                  /* what follows is set */
    bool out, taken;
    struct pd_net net;
    struct pd_endpoint ep;
    int rc;
    struct pd_err why;
    char spec[];
};

static void let_go(struct pd_redial *r)
{
    if (atomic_fetch_sub(&r->holders, 1) > 1)
        return;
    if (!r->rc && !r->taken)
        pd_endpoint_abort(&r->ep);
    pd_free(r);
}

static void *attempt(void *arg)
{
    struct pd_redial *r = arg;
    r->rc = r->out ? pd_endpoint_open_out(r->spec, &r->net, &r->ep, &r->why) : pd_endpoint_open_in(r->spec, &r->net, &r->ep, &r->why);
    atomic_store(&r->over, true);
    let_go(r);
    return NULL;
}

int pd_redial_new(const char *spec, bool out, const struct pd_net *net, struct pd_redial **made, struct pd_err *e)
{
    pthread_attr_t how;
    pthread_t t;
    sigset_t all, was;
    struct pd_redial *r = pd_calloc(1, sizeof *r + strlen(spec) + 1, "a peer that is dialled", e);
    if (!r)
        return PD_ENOMEM;
    atomic_init(&r->holders, 2);
    r->out = out;
    r->net = *net;
    r->net.connect_us = 0;
    r->ep.fd = -1;
    memcpy(r->spec, spec, strlen(spec));
    int rc = pthread_attr_init(&how);
    if (!rc) {
        pthread_attr_setdetachstate(&how, PTHREAD_CREATE_DETACHED);
        sigfillset(&all);               /* signals are for the loop's thread */
        pthread_sigmask(SIG_SETMASK, &all, &was);
        rc = pthread_create(&t, &how, attempt, r);
        pthread_sigmask(SIG_SETMASK, &was, NULL);
        pthread_attr_destroy(&how);
    }
    if (rc) {
        pd_free(r);
        return pd_fail(e, PD_ENOMEM, "%s: no thread to dial in: %s", spec, strerror(rc));
    }
    *made = r;
    return 0;
}

int pd_redial_done(struct pd_redial **at, struct pd_endpoint *ep, struct pd_err *e)
{
    struct pd_redial *r = *at;
    if (!atomic_load(&r->over))
        return 1;
    int rc = r->rc;
    if (rc)
        *e = r->why;
    else
        *ep = r->ep;
    r->taken = !rc;
    *at = NULL;
    let_go(r);
    return rc;
}

void pd_redial_free(struct pd_redial *r)
{
    if (r)
        let_go(r);
}
