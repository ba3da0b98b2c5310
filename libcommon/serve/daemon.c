#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/un.h>
#include <unistd.h>
#include "../base/cli.h"
#include "../base/clock.h"
#include "../base/log.h"
#include "../base/opt.h"
#include "../base/stop.h"
#include "../wire/endpoint.h"
#include "../wire/pack.h"
#include "../wire/unix.h"
#include "../wire/value.h"
#include "daemon.h"
#include "http.h"
#include "listener.h"

enum { BEAT_US = 1000000, MAX_COUNTS = 64 };

struct pd_daemon {
    struct pd_loop *l;
    struct pd_daemon_opts o;
    struct pd_daemon_hooks h;
    struct pd_metrics *m;
    struct pd_conns conns;
    struct pd_conn_meter meter;
    struct pd_dispatch dispatch;
    struct pd_entry *entry;             /* the caller's and ours */
    struct pd_listener **listener;
    int n_listener;
    struct pd_http *http;
    struct pd_timer *beat;
    char at[4200];                      /* for others to dial */
    struct pd_post check;
    bool checking, stopped;
    enum pd_daemon_state state;
    int64_t since;
    struct pd_metric *accepted, *refused, *paused, *g_conns, *g_state[4], *g_fds, *g_rss, *g_cpu, *g_up;
};

/* ---- options ---- */

struct pd_daemon_cli pd_daemon_cli;
struct poptOption pd_daemon_options[] = {
    { "listen", '\0', POPT_ARG_ARGV, &pd_daemon_cli.listen, 0, "be a daemon on this socket: unix:PATH, tcp-listen:[HOST]:PORT; may be repeated", "ENDPOINT" },
    { "advertise", '\0', POPT_ARG_STRING, &pd_daemon_cli.advertise, 0, "how others reach this daemon, where that is not its first --listen: tcp:HOST:PORT, unix:PATH", "ENDPOINT" },
    { "metrics", '\0', POPT_ARG_STRING, &pd_daemon_cli.metrics, 0, "answer GET /metrics and /healthz: http:127.0.0.1:PORT or unix:PATH", "ENDPOINT" },
    { "ready-fd", '\0', POPT_ARG_STRING, &pd_daemon_cli.ready_fd, 0, "write READY=1 to this descriptor when ready, STOPPING=1 at the end", "N" },
    { "max-connections", '\0', POPT_ARG_STRING, &pd_daemon_cli.max_conns, 0, "connections served at once (default 4096)", "N" },
    POPT_TABLEEND
};

int pd_daemon_from_cli(struct pd_daemon_opts *o, struct pd_err *e)
{
    const struct pd_daemon_cli *c = &pd_daemon_cli;
    int64_t v;
    o->listen = (const char *const *)c->listen;
    o->metrics = c->metrics;
    o->advertise = c->advertise;
    const struct pd_net *net = pd_net_cli(e);
    if (!net)
        return e->code;
    o->net = *net;
    o->insecure = pd_cli.insecure;
    o->ready_fd = -1;
    if (c->ready_fd) {
        if (pd_parse_int(c->ready_fd, 0, 1 << 20, &v, e) < 0)
            return pd_err_prefix(e, "--ready-fd");
        if (fcntl((int)v, F_GETFD) < 0)
            return pd_fail(e, PD_EUSAGE, "--ready-fd: descriptor %d is not open (example: --ready-fd 3 3>ready)", (int)v);
        o->ready_fd = (int)v;
    }
    if (c->max_conns) {
        if (pd_parse_int(c->max_conns, 1, 1000000, &v, e) < 0)
            return pd_err_prefix(e, "--max-connections");
        o->max_conns = (uint32_t)v;
    }
    return 0;
}

int pd_daemon_address(const char *s, char *out, size_t cap, struct pd_err *e)
{
    char here[4096];
    struct sockaddr_un a;
    int n;
    const char *where = !strncmp(s, "tcp-listen:", 11) ? s + 11 : !strncmp(s, "tcp:", 4) ? s + 4 : NULL;
    if (where) {
        char name[300], reached[PD_TCP_NAME];
        if ((n = pd_tcp_check(where, s[3] == '-', e)) < 0)
            return n;
        snprintf(name, sizeof name, *where == ':' ? "0.0.0.0%s" : "%s", where);
        if (strlen(name) < sizeof reached)
            pd_tcp_reachable(name, reached);
        n = snprintf(out, cap, "tcp:%s", strlen(name) < sizeof reached ? reached : name);
        return n < 0 || (size_t)n >= cap ? pd_fail(e, PD_EUSAGE, "%s: the host's name is too long", s) : 0;
    }
    if (strncmp(s, "unix:", 5) || !s[5])
        return pd_fail(e, PD_EUSAGE, "'%s' is no endpoint of a daemon (examples: unix:/run/pd/d0, tcp:hostB:7000)", s);
    if (s[5] == '/')
        n = snprintf(out, cap, "%s", s);
    else if (!getcwd(here, sizeof here))
        return pd_fail_sys(e, "%s: the current folder has no name", s);
    else
        n = snprintf(out, cap, "unix:%s/%s", here, s + 5);
    if (n < 0 || (size_t)n >= cap)
        return pd_fail(e, PD_EUSAGE, "%s: the path is too long", s);
    return pd_unix_address(out + 5, &a, e);     /* a relative name that can be listened on may be too long for who dials it from elsewhere */
}

/* ---- states ---- */

static const char *const state_name[] = { "starting", "ready", "draining", "gone" };
const char *pd_daemon_state_name(enum pd_daemon_state s) { return state_name[s]; }
enum pd_daemon_state pd_daemon_state(const struct pd_daemon *d) { return d->state; }
const struct pd_daemon_opts *pd_daemon_get_opts(const struct pd_daemon *d) { return &d->o; }
const char *pd_daemon_at(const struct pd_daemon *d) { return d->at; }
struct pd_conns *pd_daemon_conns(struct pd_daemon *d) { return &d->conns; }
struct pd_loop *pd_daemon_loop(struct pd_daemon *d) { return d->l; }
struct pd_metrics *pd_daemon_metrics(struct pd_daemon *d) { return d->m; }

static void tell_supervisor(struct pd_daemon *d, const char *what)
{
    if (d->o.ready_fd >= 0 && write(d->o.ready_fd, what, strlen(what)) < 0 && errno != EPIPE)       /* who was to know has gone: none of our trouble */
        pd_warn("--ready-fd %d: %s", d->o.ready_fd, strerror(errno));
}

static void enter(struct pd_daemon *d, enum pd_daemon_state s)
{
    d->state = s;
    d->dispatch.draining = s != PD_READY;
    for (int i = 0; i < 4; i++)
        pd_metric_set(d->g_state[i], i == (int)s);
}

/* Draining: is all done? Who looks on does not keep us (who asked has his answer, or would ask for ever), nor does who has not said what it wants. */
static bool busy(struct pd_daemon *d)
{
    for (const struct pd_conn *c = d->conns.first; c; c = pd_conn_next(c))
        if (!pd_conn_handler(c)->looks_on && pd_conn_handler(c) != &pd_dispatch_cb)
            return true;
    return d->h.busy && d->h.busy(d->h.ctx);
}

static uint32_t owed(const struct pd_daemon *d)
{
    uint32_t n = 0;
    for (const struct pd_conn *c = d->conns.first; c; c = pd_conn_next(c))
        n += pd_conn_handler(c)->looks_on ? 0 : pd_conn_owed(c);
    return n;
}

static void on_check(void *ctx)
{
    struct pd_daemon *d = ctx;
    d->checking = false;
    if (d->state != PD_DRAINING || busy(d))
        return;
    enter(d, PD_GONE);
    pd_loop_quit(d->l);
}

void pd_daemon_poke(struct pd_daemon *d)
{
    if (d->state != PD_DRAINING || d->checking)
        return;
    d->checking = true;
    d->check = (struct pd_post){ .fn = on_check, .ctx = d };
    pd_loop_defer(d->l, &d->check);
}

static void on_left(void *ctx)
{
    struct pd_daemon *d = ctx;
    for (int i = 0; i < d->n_listener; i++)
        pd_listener_left(d->listener[i]);
    pd_daemon_poke(d);
}

void pd_daemon_drain(struct pd_daemon *d)
{
    if (d->state >= PD_DRAINING)
        return;
    enter(d, PD_DRAINING);
    tell_supervisor(d, "STOPPING=1\n");
    if (d->h.drain)
        d->h.drain(d->h.ctx);
    for (struct pd_conn *c = d->conns.first; c; c = pd_conn_next(c))
        pd_conn_drain(c);
    pd_daemon_poke(d);
}

static void on_stop(void *ctx, int level)
{
    struct pd_daemon *d = ctx;
    if (level > 1) {
        d->stopped = true;
        pd_loop_quit(d->l);
    } else if (d->state < PD_DRAINING) {
        pd_warn("draining; a second signal ends it at once");
        pd_daemon_drain(d);
    }
}

static void on_beat(void *ctx)
{
    struct pd_daemon *d = ctx;
    struct pd_err e;
    if (d->h.beat)
        d->h.beat(d->h.ctx);
    if (d->state < PD_GONE && pd_timer_in(d->beat, d->o.beat_us, &e) < 0)
        pd_error("heartbeat: %s", e.msg);
}

int pd_daemon_ready(struct pd_daemon *d, struct pd_err *e)
{
    char where[1024] = "";
    size_t n = 0;
    if (d->state != PD_STARTING)
        return 0;
    enter(d, PD_READY);
    for (int i = 0; d->o.listen[i] && n < sizeof where; i++)
        n += (size_t)snprintf(where + n, sizeof where - n, "%s%s", i ? " " : "", pd_listener_name(d->listener[i]));
    if (d->http && n < sizeof where)
        snprintf(where + n, sizeof where - n, "; metrics %s", pd_http_where(d->http));
    pd_warn("ready: %s", where);
    tell_supervisor(d, "READY=1\n");
    return pd_timer_in(d->beat, d->o.beat_us, e);
}

/* ---- status and cancel ---- */

struct counts { int n; struct { char key[40]; int64_t v; } c[MAX_COUNTS]; };

static void put_count(void *to, const char *key, int64_t value)
{
    struct counts *s = to;
    if (s->n == MAX_COUNTS)
        return;
    snprintf(s->c[s->n].key, sizeof s->c[0].key, "%s", key);
    s->c[s->n++].v = value;
}

static int64_t open_files(void);
static int64_t resident_bytes(void);

static int status_record(struct pd_daemon *d, struct pd_buf *b, struct pd_err *e)
{
    struct counts s = { 0 };
    struct pd_packer k;
    put_count(&s, "pid", getpid());
    put_count(&s, "up_us", pd_mono_us() - d->since);
    put_count(&s, "connections", d->conns.n);
    put_count(&s, "answers_owed", owed(d));
    put_count(&s, "accepted", pd_metric_value(d->accepted));
    put_count(&s, "refused", pd_metric_value(d->refused));
    put_count(&s, "records_in", pd_metric_value(d->meter.records_in));
    put_count(&s, "records_out", pd_metric_value(d->meter.records_out));
    put_count(&s, "fds", open_files());
    put_count(&s, "rss_bytes", resident_bytes());
    if (d->h.ledger)
        d->h.ledger(d->h.ctx, put_count, &s);
    pd_pack_init(&k, b, e);
    msgpack_pack_map(&k.pk, 6);
    pd_pack_text(&k, "pd");
    pd_pack_text(&k, "status");
    pd_pack_text(&k, "v");
    msgpack_pack_int(&k.pk, 1);
    pd_pack_text(&k, "state");
    pd_pack_text(&k, state_name[d->state]);
    pd_pack_text(&k, "worker");
    pd_pack_text(&k, d->o.worker ? d->o.worker : "");
    pd_pack_text(&k, "role");
    pd_pack_text(&k, d->o.role ? d->o.role : "");
    pd_pack_text(&k, "ledger");
    msgpack_pack_map(&k.pk, (size_t)s.n);
    for (int i = 0; i < s.n; i++) {
        pd_pack_text(&k, s.c[i].key);
        msgpack_pack_int64(&k.pk, s.c[i].v);
    }
    return k.rc;
}

static int cancel_answer(struct pd_daemon *d, const struct pd_rec *rec, struct pd_buf *b, struct pd_err *e)
{
    const char *state = "unknown";
    struct pd_packer k;
    struct pd_bin run;
    int rc = d->h.cancel ? d->h.cancel(d->h.ctx, rec, &state, e) : pd_fail(e, PD_EFAIL, "nothing can be cancelled here");
    if (rc < 0)
        return rc;
    bool named = pd_map_find(rec->p, rec->n, "run", &run) == 1;
    pd_pack_init(&k, b, e);
    msgpack_pack_map(&k.pk, 3 + named);
    pd_pack_text(&k, "pd");
    pd_pack_text(&k, "status");
    pd_pack_text(&k, "v");
    msgpack_pack_int(&k.pk, 1);
    if (named) {
        pd_pack_text(&k, "run");
        pd_pack_raw(&k, run.p, run.n);
    }
    pd_pack_text(&k, "state");
    pd_pack_text(&k, state);
    return k.rc;
}

static void on_query(void *ctx, struct pd_conn *c, const struct pd_rec *rec)
{
    struct pd_daemon *d = ctx;
    struct pd_str kind = pd_rec_kind(rec);
    struct pd_buf b = { 0 };
    struct pd_err e = { 0 };
    struct pd_bin v;
    bool follow = false;
    if (pd_str_eq(kind, "status") && pd_map_find(rec->p, rec->n, "follow", &v) == 1 && pd_get_bool(v, &follow) && follow) {
        if (!d->h.follow)
            pd_fail(&e, PD_EFAIL, "status: there is nothing to follow here; this is no worker");
        if (!d->h.follow || d->h.follow(d->h.ctx, c, rec, &e) < 0)
            pd_conn_put_error(c, NULL, &e, "abort");
        return;
    }
    if (pd_str_eq(kind, "status") && pd_map_find(rec->p, rec->n, "verify", &v) == 1) {
        struct pd_str run = { NULL, 0 };
        int rc = !d->h.verify ? pd_fail(&e, PD_EFAIL, "status: there is no KV to verify here; this is no worker")
            : !pd_get_str(v, &run) || !pd_run_valid(run.p, run.n) ? pd_fail(&e, PD_EUSAGE, "status: verify is no run id")
            : d->h.verify(d->h.ctx, c, run, &e);
        if (rc < 0)
            pd_conn_put_error(c, NULL, &e, "abort");
        return;
    }
    bool orders = pd_str_eq(kind, "status") && (pd_map_find(rec->p, rec->n, "release", &v) == 1 || pd_map_find(rec->p, rec->n, "holds", &v) == 1);
    int rc = orders ? d->h.order ? d->h.order(d->h.ctx, rec, &b, &e) : pd_fail(&e, PD_EFAIL, "status: nothing is on hold here; this is no router")
        : pd_str_eq(kind, "status") ? status_record(d, &b, &e) : pd_str_eq(kind, "cancel") ? cancel_answer(d, rec, &b, &e)
        : pd_fail(&e, PD_EFAIL, "this connection asks status or cancels; a record of kind '%.*s' belongs on another", (int)(kind.n < 40 ? kind.n : 40), kind.p);
    if (rc < 0 || (rc = pd_conn_put(c, b.p, b.n, &e)) == PD_EFAIL)
        pd_conn_put_error(c, NULL, &e, "abort");
    pd_buf_free(&b);
}

static void leave_be(void *ctx, struct pd_conn *c) { (void)ctx; (void)c; }
static const struct pd_conn_cb query_cb = { .record = on_query, .drain = leave_be, .looks_on = true };

/* ---- metrics of the process ---- */

static int64_t number_in(const char *file, int field)
{
    char text[400], *s = text;
    FILE *f = fopen(file, "re");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    if (f)
        fclose(f);
    text[n] = 0;
    while (field-- > 0 && (s = strchr(s, ' ')))
        s++;
    return s ? atoll(s) : 0;
}

static int64_t resident_bytes(void) { return number_in("/proc/self/statm", 1) * sysconf(_SC_PAGESIZE); }

static int64_t open_files(void)
{
    int64_t n = -3;             /* . and .. and the folder's own */
    DIR *dir = opendir("/proc/self/fd");
    while (dir && readdir(dir))
        n++;
    if (dir)
        closedir(dir);
    return n < 0 ? 0 : n;
}

static void look_up(void *ctx)
{
    struct pd_daemon *d = ctx;
    struct rusage u;
    pd_metric_set(d->g_conns, d->conns.n);
    pd_metric_set(d->g_fds, open_files());
    pd_metric_set(d->g_rss, resident_bytes());
    pd_metric_set(d->g_up, pd_mono_us() - d->since);
    if (!getrusage(RUSAGE_SELF, &u))
        pd_metric_set(d->g_cpu, (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * (int64_t)1000000 + u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static int own_metrics(struct pd_daemon *d, struct pd_err *e)
{
    const struct { struct pd_metric_about about; struct pd_metric **to; const char *value; } t[] = {
        { { "pd_accepted_total", "Connections accepted.", PD_COUNTER, 0, .label = { NULL } }, &d->accepted, NULL },
        { { "pd_refused_total", "Connections turned away: of another user, past --max-connections, or for want of memory.", PD_COUNTER, 0,
            .label = { NULL } }, &d->refused, NULL },
        { { "pd_accept_paused_total", "Times that descriptors had run out.", PD_COUNTER, 0, .label = { NULL } }, &d->paused, NULL },
        { { "pd_connections", "Connections open now.", PD_GAUGE, 0, .label = { NULL } }, &d->g_conns, NULL },
        { { "pd_records_total", "Records, by direction.", PD_COUNTER, 0, .label = { "direction" } }, &d->meter.records_in, "in" },
        { { "pd_records_total", "Records, by direction.", PD_COUNTER, 0, .label = { "direction" } }, &d->meter.records_out, "out" },
        { { "pd_bytes_total", "Bytes on record sockets, by direction.", PD_COUNTER, 0, .label = { "direction" } }, &d->meter.bytes_in, "in" },
        { { "pd_bytes_total", "Bytes on record sockets, by direction.", PD_COUNTER, 0, .label = { "direction" } }, &d->meter.bytes_out, "out" },
        { { "pd_slow_reader_total", "Times that a connection's queue was full because its peer did not read.", PD_COUNTER, 0, .label = { NULL } },
            &d->meter.full, NULL },
        { { "pd_state", "1 for the state that the process is in.", PD_GAUGE, 0, .label = { "state" } }, &d->g_state[0], "starting" },
        { { "pd_state", "1 for the state that the process is in.", PD_GAUGE, 0, .label = { "state" } }, &d->g_state[1], "ready" },
        { { "pd_state", "1 for the state that the process is in.", PD_GAUGE, 0, .label = { "state" } }, &d->g_state[2], "draining" },
        { { "pd_state", "1 for the state that the process is in.", PD_GAUGE, 0, .label = { "state" } }, &d->g_state[3], "gone" },
        { { "pd_up_seconds", "Since the process began to serve.", PD_GAUGE, 6, .label = { NULL } }, &d->g_up, NULL },
        { { "process_open_fds", "Open descriptors.", PD_GAUGE, 0, .label = { NULL } }, &d->g_fds, NULL },
        { { "process_resident_memory_bytes", "Memory in use.", PD_GAUGE, 0, .label = { NULL } }, &d->g_rss, NULL },
        { { "process_cpu_seconds_total", "Processor time, of user and system.", PD_COUNTER, 6, .label = { NULL } }, &d->g_cpu, NULL } };
    int rc = 0;
    for (size_t i = 0; !rc && i < sizeof t / sizeof *t; i++)
        rc = pd_metric_get(d->m, &t[i].about, (const char *const[PD_METRIC_LABELS]){ t[i].value }, t[i].to, e);
    return rc ? rc : pd_metrics_before(d->m, look_up, d, e);
}

static bool healthy(void *ctx, const char **say)
{
    const struct pd_daemon *d = ctx;
    *say = state_name[d->state];
    return d->state == PD_READY;
}

/* ---- birth and death ---- */

static int listen_all(struct pd_daemon *d, struct pd_err *e)
{
    struct pd_listener_opts lo = { .max_conns = d->o.max_conns, .dispatch = &d->dispatch, .accepted = d->accepted, .refused = d->refused, .paused = d->paused,
        .conn = { .max_record = d->o.max_record, .max_fds = d->o.max_fds, .set = &d->conns, .meter = &d->meter, .net = &d->o.net } };
    int n = 0;
    while (d->o.listen && d->o.listen[n])
        n++;
    if (!n)
        return pd_fail(e, PD_EUSAGE, "--listen: no socket is named (example: --listen unix:/run/pd/d0)");
    if (!(d->listener = pd_calloc((size_t)n, sizeof *d->listener, "listening sockets", e)))
        return PD_ENOMEM;
    for (; d->n_listener < n; d->n_listener++) {
        lo.at = d->o.listen[d->n_listener];
        int rc = pd_listener_new(d->l, &lo, &d->listener[d->n_listener], e);
        if (rc < 0)
            return pd_err_prefix(e, "--listen"), rc;
    }
    int rc = pd_daemon_address(d->o.advertise ? d->o.advertise : pd_listener_name(d->listener[0]), d->at, sizeof d->at, e);
    if (rc < 0)
        d->at[0] = 0;
    return rc < 0 && d->o.advertise ? (pd_err_prefix(e, "--advertise"), rc) : 0;
}

int pd_daemon_new(const struct pd_daemon_opts *o, const struct pd_daemon_hooks *hooks, struct pd_daemon **out, struct pd_err *e)
{
    struct pd_daemon *d = pd_calloc(1, sizeof *d, "a daemon", e);
    int rc = PD_ENOMEM;
    if (!d)
        return rc;
    d->o = *o;
    d->h = hooks ? *hooks : (struct pd_daemon_hooks){ 0 };
    d->since = pd_mono_us();
    d->conns.left = on_left;
    d->conns.ctx = d;
    if (!d->o.beat_us)
        d->o.beat_us = BEAT_US;
    if (!(d->entry = pd_calloc((size_t)o->n_entry + 2, sizeof *d->entry, "a table", e)))
        goto out;
    d->entry[0] = (struct pd_entry){ "status", &query_cb, d, true };
    d->entry[1] = (struct pd_entry){ "cancel", &query_cb, d, true };
    for (int i = 0; i < o->n_entry; i++)
        d->entry[i + 2] = o->entry[i];
    d->dispatch = (struct pd_dispatch){ d->entry, o->n_entry + 2, true };
    if ((rc = pd_loop_new(&d->l, e)) < 0 || (rc = pd_metrics_new(&d->m, e)) < 0 || (rc = own_metrics(d, e)) < 0 ||
        (rc = pd_timer_new(d->l, on_beat, d, &d->beat, e)) < 0 || (rc = pd_loop_on_stop(d->l, on_stop, d, e)) < 0 || (rc = listen_all(d, e)) < 0)
        goto out;
    if (o->metrics) {
        struct pd_http_opts ho = { o->metrics, o->insecure, d->m, healthy, d };
        if ((rc = pd_http_new(d->l, &ho, &d->http, e)) < 0)
            pd_err_prefix(e, "--metrics");
    }
out:
    if (rc < 0) {
        d->o.ready_fd = -1;         /* the caller's, when nothing came of it */
        pd_daemon_free(d);
    } else {
        enter(d, PD_STARTING);
        *out = d;
    }
    return rc;
}

int pd_daemon_run(struct pd_daemon *d, struct pd_err *e)
{
    int rc = pd_loop_run(d->l, e);
    if (rc == 0 && d->stopped) {
        rc = pd_fail(e, PD_ECANCEL, "stopped by a second signal with %u answers owed", owed(d));
    }
    enter(d, PD_GONE);
    return rc;
}

void pd_daemon_free(struct pd_daemon *d)
{
    if (!d)
        return;
    d->conns.left = NULL;
    if (d->checking)
        pd_loop_undefer(d->l, &d->check);
    while (d->conns.first)
        pd_conn_free(d->conns.first);
    for (int i = 0; i < d->n_listener; i++)
        pd_listener_free(d->listener[i]);
    pd_free(d->listener);
    pd_http_free(d->http);
    pd_timer_free(d->beat);
    pd_metrics_free(d->m);
    pd_loop_free(d->l);
    pd_free(d->entry);
    if (d->o.ready_fd >= 0)
        close(d->o.ready_fd);
    pd_free(d);
}

int pd_cancel_names(const struct pd_rec *rec, struct pd_str *run, struct pd_bin *token, struct pd_err *e)
{
    struct pd_bin v;
    if (pd_map_find(rec->p, rec->n, "run", &v) != 1 || !pd_get_str(v, run))
        return pd_fail(e, PD_EFAIL, "cancel: run is missing");
    if (pd_map_find(rec->p, rec->n, "cancel_token", &v) != 1 || !pd_get_bin(v, token) || token->n != 16)
        return pd_fail(e, PD_EFAIL, "cancel: cancel_token (16 bytes, as the request gave it) is missing");
    return 0;
}

int pd_cancel_may(struct pd_bin token, const uint8_t own[16], bool has, const char *run, struct pd_err *e)
{
    unsigned differ = !has;
    for (size_t i = 0; i < 16; i++)
        differ |= (unsigned)(own[i] ^ token.p[i]);
    return differ ? pd_fail(e, PD_EFAIL, "cancel: the token is not that of run %s", run) : 0;
}
