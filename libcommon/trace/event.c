#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/fault.h"
#include "../base/log.h"
#include "event.h"

struct pd_trace {
    int fd;
    char *path, *worker;
    char role[12];
    atomic_bool warned;
};

int pd_trace_open(const char *path, const char *worker, const char *role, struct pd_trace **out, struct pd_err *e)
{
    *out = NULL;
    if (!path)
        return 0;
    struct pd_trace *t = pd_calloc(1, sizeof *t, "a trace", e);
    if (!t)
        return PD_ENOMEM;
    t->fd = -1;
    int rc = PD_ENOMEM;
    t->path = pd_strndup(path, strlen(path), e);
    t->worker = t->path ? pd_strndup(worker ? worker : "", worker ? strlen(worker) : 0, e) : NULL;
    if (!t->worker)
        goto out;
    snprintf(t->role, sizeof t->role, "%s", role ? role : "");
    t->fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (t->fd < 0) {
        rc = pd_fail_sys(e, "cannot open the trace %s", path);
        goto out;
    }
    *out = t;
    return 0;
out:
    pd_trace_close(t);
    return rc;
}

static void warn_once(struct pd_trace *t, const char *why)
{
    if (!atomic_exchange(&t->warned, true))
        pd_warn("trace %s: %s; events are lost from here on", t->path, why);
}

void pd_trace_emit(struct pd_trace *t, const struct pd_event *ev)
{
    if (!t)
        return;
    struct pd_event v = *ev;
    struct pd_buf b = { 0 };
    struct pd_err e;
    if (!v.worker.p && t->worker[0])
        v.worker = (struct pd_str){ t->worker, strlen(t->worker) };
    if (!v.role[0])
        memcpy(v.role, t->role, sizeof v.role);
    if (!v.t_us)
        v.t_us = pd_wall_us();
    if (!v.mono_us)
        v.mono_us = pd_mono_us();
    if (pd_event_encode(&v, &b, &e))
        warn_once(t, e.msg);
    else {
        /* One call a record: with O_APPEND several processes' records stand whole beside each other. */
        ssize_t n;
        do
            n = pd_fault("write") ? (errno = ENOSPC, -1) : write(t->fd, b.p, b.n);
        while (n < 0 && errno == EINTR);
        if (n != (ssize_t)b.n)
            warn_once(t, n < 0 ? strerror(errno) : "a record was written in part");
    }
    pd_buf_free(&b);
}

void pd_trace_state(struct pd_trace *t, const char *run, const char *state, const char *where, const uint8_t *gen, uint64_t bytes, const char *cause)
{
    if (!t)
        return;
    struct pd_event v = { .bytes = bytes };
    if (run)
        snprintf(v.run, sizeof v.run, "%s", run);
    snprintf(v.state, sizeof v.state, "%s", state);
    if (where)
        snprintf(v.where, sizeof v.where, "%s", where);
    if (gen) {
        memcpy(v.gen, gen, PD_GEN_LEN);
        v.has_gen = true;
    }
    if (cause)
        v.cause = (struct pd_str){ cause, strlen(cause) };
    pd_trace_emit(t, &v);
}

void pd_trace_close(struct pd_trace *t)
{
    if (!t)
        return;
    if (t->fd >= 0)
        close(t->fd);
    pd_free(t->path);
    pd_free(t->worker);
    pd_free(t);
}
