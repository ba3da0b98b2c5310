#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/fault.h"
#include "../base/log.h"
#include "../wire/pack.h"
#include "../wire/value.h"
#include "event.h"

enum { ROOM = 8192 };
struct pd_trace {
    int fd;
    char *path, *worker, *revision, *domain;
    char role[12];
    uint64_t max_bytes;
    atomic_bool warned, rotating;
    struct pd_buf room; atomic_bool used;       /* where an event is put together: none is lost for want of memory; a thread that finds it used takes its own */
};

static void trace_free(struct pd_trace *t)
{
    if (t->fd >= 0)
        close(t->fd);
    pd_free(t->path);
    pd_free(t->worker);
    pd_free(t->revision);
    pd_free(t->domain);
    pd_buf_free(&t->room);
    pd_free(t);
}

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
    if (!t->worker || pd_buf_reserve(&t->room, ROOM, e) < 0)
        goto out;
    snprintf(t->role, sizeof t->role, "%s", role ? role : "");
    t->fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (t->fd < 0) {
        rc = pd_fail_sys(e, "cannot open the trace %s", path);
        goto out;
    }
    pd_trace_process(t, PD_ST_STARTING);
    *out = t;
    return 0;
out:
    trace_free(t);
    return rc;
}

void pd_trace_limit(struct pd_trace *t, uint64_t max_bytes)
{
    if (t)
        t->max_bytes = max_bytes;
}

static void warn_once(struct pd_trace *t, const char *why)
{
    if (!atomic_exchange(&t->warned, true))
        pd_warn("trace %s: %s; events are lost from here on", t->path, why);
}

/* Another thread may be writing meanwhile: its record goes into the one file or the other, whole, as the descriptor is replaced in one step. */
static bool rotate(struct pd_trace *t, size_t more)
{
    struct stat st;
    if (fstat(t->fd, &st) || !S_ISREG(st.st_mode) || !st.st_size || (uint64_t)st.st_size + more <= t->max_bytes || atomic_exchange(&t->rotating, true))
        return false;
    struct pd_buf old = { 0 };
    struct pd_err e;
    int fd = -1;
    bool done = true;
    if (pd_buf_printf(&old, &e, "%s.1", t->path) || rename(t->path, (char *)old.p) || (fd = open(t->path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC,
        0600)) < 0 ||
        dup3(fd, t->fd, O_CLOEXEC) < 0) {
        pd_warn("trace %s: cannot begin a new file: %s; this one goes on past --trace-max", t->path, old.p ? strerror(errno) : e.msg);
        t->max_bytes = 0;
        done = false;
    }
    if (fd >= 0)
        close(fd);
    pd_buf_free(&old);
    atomic_store(&t->rotating, false);
    return done;
}

void pd_trace_record(struct pd_trace *t, const void *rec, size_t len)
{
    if (!t)
        return;
    if (t->max_bytes && rotate(t, len))
        pd_trace_process(t, PD_ST_ROTATED);
    /* One call a record: with O_APPEND several processes' records stand whole beside each other. */
    ssize_t n;
    do
        n = pd_fault("write") ? (errno = ENOSPC, -1) : write(t->fd, rec, len);
    while (n < 0 && errno == EINTR);
    if (n != (ssize_t)len)
        warn_once(t, n < 0 ? strerror(errno) : "a record was written in part");
}

/* An event and what else there is to say about it: keys that readers who do not know them skip. */
static int encode(const struct pd_event *v, const struct pd_figure *f, int n, struct pd_buf *b, struct pd_err *e)
{
    struct pd_buf plain = { 0 };
    struct pd_packer k;
    struct pd_iter it;
    if (!n)
        return pd_event_encode(v, b, e);
    int rc = pd_event_encode(v, &plain, e);
    if (!rc && pd_iter_open(&it, (struct pd_bin){ plain.p, plain.n }, PD_T_MAP)) {
        pd_pack_init(&k, b, e);
        msgpack_pack_map(&k.pk, it.left + (size_t)n);
        pd_pack_raw(&k, it.p, it.n);
        for (int i = 0; i < n; i++) {
            pd_pack_text(&k, f[i].name);
            msgpack_pack_int64(&k.pk, f[i].value);
        }
        rc = k.rc;
    }
    pd_buf_free(&plain);
    return rc;
}

static void emit(struct pd_trace *t, const struct pd_event *ev, const struct pd_figure *f, int n)
{
    if (!t)
        return;
    struct pd_event v = *ev;
    struct pd_buf own = { 0 }, *b = atomic_exchange(&t->used, true) ? &own : &t->room;
    struct pd_err e;
    if (!v.worker.p && t->worker[0])
        v.worker = (struct pd_str){ t->worker, strlen(t->worker) };
    if (!v.model_revision.p && t->revision)
        v.model_revision = (struct pd_str){ t->revision, strlen(t->revision) };
    if (!v.domain.p && t->domain)
        v.domain = (struct pd_str){ t->domain, strlen(t->domain) };
    if (!v.role[0])
        memcpy(v.role, t->role, sizeof v.role);
    if (!v.t_us)
        v.t_us = pd_wall_us();
    if (!v.mono_us)
        v.mono_us = pd_mono_us();
    b->n = 0;
    if (encode(&v, f, n, b, &e))
        warn_once(t, e.msg);
    else
        pd_trace_record(t, b->p, b->n);
    if (b == &own)
        pd_buf_free(b);
    else
        atomic_store(&t->used, false);
}

void pd_trace_emit(struct pd_trace *t, const struct pd_event *ev) { emit(t, ev, NULL, 0); }

static void copy16(uint8_t to[16], bool *has, const uint8_t *from)
{
    *has = from != NULL;
    if (from)
        memcpy(to, from, 16);
}

static void emit_step(struct pd_trace *t, const struct pd_step *s, enum pd_state_id state, uint64_t bytes, const char *cause, const struct pd_figure *f, int n)
{
    struct pd_event v = { .bytes = bytes, .choice = s->choice, .pos = s->pos, .tokens = s->tokens };
    if (s->run)
        snprintf(v.run, sizeof v.run, "%s", s->run);
    snprintf(v.state, sizeof v.state, "%s", pd_state[state].name);
    if (s->where)
        snprintf(v.where, sizeof v.where, "%s", s->where);
    copy16(v.gen, &v.has_gen, s->gen);
    copy16(v.op, &v.has_op, s->op);
    copy16(v.parent, &v.has_parent, s->parent);
    copy16(v.lease, &v.has_lease, s->lease);
    if (cause)
        v.cause = (struct pd_str){ cause, strlen(cause) };
    emit(t, &v, f, n);
}

void pd_trace_figures(struct pd_trace *t, const struct pd_step *s, enum pd_state_id state, uint64_t bytes, const char *cause, const struct pd_figure *f, int n)
{
    if (t)
        emit_step(t, s, state, bytes, cause, f, n);
}

void pd_trace_step(struct pd_trace *t, const struct pd_step *s, enum pd_state_id state, uint64_t bytes, const char *cause)
{
    if (t)
        emit_step(t, s, state, bytes, cause, NULL, 0);
    pd_fault(pd_state[state].name);     /* where drills stop or kill a process */
}

void pd_trace_process(struct pd_trace *t, enum pd_state_id state)
{
    pd_trace_step(t, &(struct pd_step){ 0 }, state, 0, NULL);
}

static int copy_text(char **to, const char *from, struct pd_err *e)
{
    pd_free(*to);
    *to = from ? pd_strndup(from, strlen(from), e) : NULL;
    return from && !*to ? PD_ENOMEM : 0;
}

int pd_trace_about(struct pd_trace *t, const char *model_revision, const char *domain, struct pd_err *e)
{
    if (!t)
        return 0;
    int rc = copy_text(&t->revision, model_revision, e);
    return rc < 0 ? rc : copy_text(&t->domain, domain, e);
}

void pd_trace_close(struct pd_trace *t)
{
    if (!t)
        return;
    pd_trace_process(t, PD_ST_GONE);
    trace_free(t);
}
