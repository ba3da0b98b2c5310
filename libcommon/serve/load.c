#include "load.h"
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../base/stop.h"
#include "../engine/reply.h"
#include "../sim/gen.h"
#include "../trace/keyed.h"
#include "../wire/endpoint.h"
#include "../wire/pack.h"
#include "../wire/value.h"
#include "conn.h"

struct job {                            /* a request */
    struct pd_node node;                /* by run */
    struct job *next;                   /* in order of arrival */
    char run[PD_RUN_LEN + 1];
    uint32_t n, left;                   /* its results; those that have not come */
    bool out;                           /* it was sent and has not ended */
    int64_t sched_us, sent_us, first_us, last_us;       /* since the start; -1: not yet */
    struct pd_buf rec, id, about;       /* as it is sent; its id; pairs for its results, n_about of them */
    uint32_t n_about;
    int64_t *gap; uint32_t n_gaps, cap_gaps;
};

struct load {
    const struct pd_load_opts *o;
    struct pd_loop *loop;
    struct pd_conn *conn;
    struct pd_conn_opts conn_opts;
    struct pd_timer *due, *idle;
    struct pd_keyed jobs;
    struct job *first, *last, *next;    /* next: to be sent */
    uint64_t n_jobs, n_open, n_sent;
    int64_t start, dial_until, heard;   /* mono us; start 0: not yet */
    bool streaming, finishing;
    struct pd_wstream *results;
    struct pd_sample lag_ms;
    int *status, rc;
    struct pd_err *e;
};

static int64_t now_us(const struct load *l) { return pd_mono_us() - l->start; }

static void quit(struct load *l, int rc)
{
    l->rc = l->rc ? l->rc : rc;
    pd_loop_quit(l->loop);
}

/* ---- requests ---- */

static int keep_pair(struct job *j, const uint8_t *rec, size_t n, const char *key, struct pd_err *e)
{
    struct pd_bin v;
    struct pd_packer k;
    if (pd_map_find(rec, n, key, &v) != 1)
        return 0;
    pd_pack_init(&k, &j->about, e);
    pd_pack_text(&k, key);
    pd_pack_raw(&k, v.p, v.n);
    j->n_about++;
    return k.rc;
}

/* A request as it will be sent: with a run of ours, and asking for its tokens. */
static int take(struct load *l, const struct pd_rec *rec, struct pd_err *e)
{
    struct pd_arena mem = { 0 };
    struct pd_request q;
    struct pd_packer k;
    struct pd_buf extra = { 0 };
    struct pd_bin v;
    struct job *j = pd_calloc(1, sizeof *j, "request", e);
    if (!j)
        return PD_ENOMEM;
    int rc = pd_request_decode(rec->p, rec->n, &mem, &q, e);
    if (rc)
        goto out;
    rc = pd_run_new(j->run, e);
    memcpy(q.run, j->run, sizeof q.run);
    j->n = j->left = q.has & PD_RQ_N && q.n > 0 ? (uint32_t)q.n : 1;
    j->sched_us = q.has & PD_RQ_ARRIVAL && q.arrival_us > 0 ? q.arrival_us : 0;
    j->sent_us = j->first_us = j->last_us = -1;
    if (l->last && j->sched_us < l->last->sched_us)
        rc = pd_fail(e, PD_EFAIL, "request %llu: its arrival_us is before that of the one above", (unsigned long long)l->n_jobs + 1);
    rc = rc ? rc : pd_buf_add(&j->id, q.id.p, q.id.n, e);
    static const char *const about[] = { "class", "slo", "reusable_tokens" };
    for (int i = 0; rc == 0 && i < 3; i++)
        rc = keep_pair(j, rec->p, rec->n, about[i], e);
    if (!l->o->no_stream && pd_map_find(rec->p, rec->n, "stream", &v) != 1) {
        rc = rc ? rc : pd_buf_add(&extra, q.extra.p, q.extra.n, e);
        pd_pack_init(&k, &extra, e);
        pd_pack_text(&k, "stream");
        msgpack_pack_true(&k.pk);
        rc = rc ? rc : k.rc;
        q.extra = (struct pd_extra){ extra.p, extra.n, q.extra.pairs + 1 };
    }
    rc = rc ? rc : pd_request_encode(&q, &j->rec, e);
    rc = rc ? rc : pd_keyed_add(&l->jobs, j, j->run, PD_RUN_LEN, e);
out:
    pd_buf_free(&extra);
    pd_arena_free(&mem);
    if (rc) {
        pd_buf_free(&j->rec);
        pd_buf_free(&j->id);
        pd_buf_free(&j->about);
        pd_free(j);
        return rc;
    }
    *(l->last ? &l->last->next : &l->first) = j;
    l->last = j;
    l->n_jobs++;
    return 0;
}

static int take_all(struct load *l, struct pd_rstream *in, struct pd_err *e)
{
    struct pd_rec rec;
    bool bad = false;
    int rc;
    while ((rc = pd_rstream_next(in, -1, &rec, &bad, e)) > 0) {
        if (rc == 2 && pd_stop_level())
            return pd_fail(e, PD_ECANCEL, "interrupted while requests were read");
        if (rc == 1 && rec.kind == PD_K_REQUEST && (rc = take(l, &rec, e)) < 0)
            return rc;
    }
    return rc == 0 && !l->n_jobs ? pd_fail(e, PD_EFAIL, "there is no request in the input (pd-bench gen makes some)") : rc;
}

/* ---- results ---- */

static void number(struct pd_packer *k, const char *key, int64_t v)
{
    pd_pack_text(k, key);
    msgpack_pack_int64(&k->pk, v);
}

/* The record with what was noted of its request, at its end. */
static int put_noted(struct load *l, const struct job *j, const uint8_t *rec, size_t n, int64_t done_us)
{
    struct pd_buf b = { 0 };
    struct pd_packer k;
    struct pd_head h;
    bool open = !l->o->concurrency;
    if (!pd_head_read(rec, n, &h) || h.type != PD_T_MAP)
        return pd_fail(l->e, PD_ECORRUPT, "a result is no map");
    pd_pack_init(&k, &b, l->e);
    msgpack_pack_map(&k.pk, h.count / 2 + open + (j->sent_us >= 0) + (j->first_us >= 0) + 1 + (j->n_gaps > 0) + j->n_about);
    pd_pack_raw(&k, rec + h.hdr, n - h.hdr);
    if (open)
        number(&k, "sched_us", j->sched_us);
    if (j->sent_us >= 0)
        number(&k, "sent_us", j->sent_us);
    if (j->first_us >= 0)
        number(&k, "first_us", j->first_us);
    number(&k, "done_us", done_us);
    if (j->n_gaps) {
        pd_pack_text(&k, "gaps_us");
        msgpack_pack_array(&k.pk, j->n_gaps);
        for (uint32_t i = 0; i < j->n_gaps; i++)
            msgpack_pack_int64(&k.pk, j->gap[i]);
    }
    pd_pack_raw(&k, j->about.p, j->about.n);
    int rc = k.rc ? k.rc : pd_wstream_put(l->results, b.p, b.n, l->e);
    pd_buf_free(&b);
    return rc;
}

static void ended(struct load *l, struct job *j)
{
    if (j->out)
        l->n_open--;
    j->out = false;
    pd_free(j->gap);
    j->gap = NULL;
    j->n_gaps = j->cap_gaps = 0;
}

/* Nobody will answer it: an error and its results, of our own. */
static int give_up(struct load *l, struct job *j, const struct pd_err *why)
{
    struct pd_request q = { .id = { j->id.p, j->id.n }, .n = (int32_t)j->left };
    struct pd_result as = { .mode = "local" };
    struct pd_buf b = { 0 };
    memcpy(q.run, j->run, sizeof q.run);
    *l->status = pd_exit_worse(*l->status, why->code);
    int rc = pd_refusal_encode(&q, why, "gave up", &as, &b, l->e);
    for (size_t at = 0, n; rc == 0 && at < b.n && (n = pd_value_len(b.p + at, b.n - at)); at += n)
        rc = pd_kind_of(b.p + at, n) == PD_K_RESULT ? put_noted(l, j, b.p + at, n, now_us(l)) : pd_wstream_put(l->results, b.p + at, n, l->e);
    pd_buf_free(&b);
    j->left = 0;
    ended(l, j);
    return rc;
}

/* From j on, in order. */
static void give_up_from(struct load *l, struct job *j, const struct pd_err *why)
{
    uint64_t n = 0;
    int rc = 0;
    for (; rc == 0 && j; j = j->next)
        if (j->left) {
            rc = give_up(l, j, why);
            n++;
        }
    if (n)
        pd_warn("%s; %llu of %llu requests are given up", why->msg, (unsigned long long)n, (unsigned long long)l->n_jobs);
    l->next = NULL;
    if (rc)
        quit(l, rc);
}

static void give_up_all(struct load *l, const struct pd_err *why)
{
    give_up_from(l, l->first, why);
    quit(l, 0);
}

static void token(struct load *l, struct job *j)
{
    int64_t t = now_us(l);
    if (j->first_us < 0) {
        j->first_us = j->last_us = t;
        return;
    }
    if (j->n_gaps == j->cap_gaps) {
        uint32_t cap = j->cap_gaps ? 2 * j->cap_gaps : 64;
        int64_t *more = pd_realloc(j->gap, cap, sizeof *more, "gaps", l->e);
        if (!more) {
            quit(l, PD_ENOMEM);
            return;
        }
        j->gap = more;
        j->cap_gaps = cap;
    }
    j->gap[j->n_gaps++] = t - j->last_us;
    j->last_us = t;
}

/* ---- the connection ---- */

static void pump(struct load *l);

static struct job *job_of(struct load *l, const struct pd_rec *rec)
{
    struct pd_bin v;
    struct pd_str run;
    return pd_map_find(rec->p, rec->n, "run", &v) == 1 && pd_get_str(v, &run) && run.n == PD_RUN_LEN ? pd_keyed_find(&l->jobs, run.p, run.n) : NULL;
}

static void on_record(void *ctx, struct pd_conn *c, const struct pd_rec *rec)
{
    struct load *l = ctx;
    struct job *j = job_of(l, rec);
    struct pd_bin v;
    struct pd_str s;
    int64_t code;
    l->heard = pd_mono_us();
    if (rec->kind == PD_K_TOKEN && j && j->out && j->n == 1)
        token(l, j);
    else if (rec->kind == PD_K_ERROR) {
        if (pd_map_find(rec->p, rec->n, "code", &v) == 1 && pd_get_int(v, &code) && code > 0 && code < 9)
            *l->status = pd_exit_worse(*l->status, -(int)code);
        if (!j && pd_map_find(rec->p, rec->n, "message", &v) == 1 && pd_get_str(v, &s))       /* of no request: it is about all of them */
            pd_warn("%s says: %.*s", l->conn_opts.name, (int)(s.n < 300 ? s.n : 300), s.p);
        if (pd_wstream_put(l->results, rec->p, rec->n, l->e))
            quit(l, l->e->code);
    } else if (rec->kind == PD_K_RESULT && j && j->left) {
        int rc = put_noted(l, j, rec->p, rec->n, now_us(l));
        if (pd_map_find(rec->p, rec->n, "finish_reason", &v) == 1 && pd_get_str(v, &s) && (pd_str_eq(s, "blocked") || pd_str_eq(s, "shed")))
            *l->status = pd_exit_worse(*l->status, PD_ENOWORKER);
        if (--j->left == 0)
            ended(l, j);
        if (rc)
            quit(l, rc);
        else
            pump(l);
    }
}

static void begin(struct load *l)
{
    l->start = l->heard = pd_mono_us();
    pump(l);
}

static void on_stands(void *ctx, struct pd_conn *c) { begin(ctx); }
static void on_room(void *ctx, struct pd_conn *c) { pump(ctx); }

static void on_gone(void *ctx, struct pd_conn *c, const struct pd_err *why)
{
    struct load *l = ctx;
    struct pd_err e;
    l->conn = NULL;
    if (!l->start && why && why->code == PD_ENOWORKER && pd_mono_us() < l->dial_until) {        /* not there yet */
        if (pd_timer_in(l->due, 50000, l->e))
            quit(l, l->e->code);
        return;
    }
    if (l->finishing) {
        quit(l, 0);
        return;
    }
    if (!why)
        pd_fail(&e, PD_ENOWORKER, "%s closed the connection", l->conn_opts.name);
    if (!l->start) {
        *l->e = why ? *why : e;
        quit(l, l->e->code);
    } else
        give_up_all(l, why ? why : &e);
}

static const struct pd_conn_cb callbacks = { .record = on_record, .stands = on_stands, .room = on_room, .gone = on_gone };

static void dial(struct load *l)
{
    int rc = pd_conn_dial(l->loop, l->o->at, &l->conn_opts, &callbacks, l, &l->conn, l->e);
    if (rc == PD_ENOWORKER && pd_mono_us() < l->dial_until)
        rc = pd_timer_in(l->due, 50000, l->e);
    if (rc)
        quit(l, rc);
    else if (l->conn && !pd_conn_opening(l->conn))
        begin(l);
}

/* ---- time ---- */

static int send_one(struct load *l, struct job *j)
{
    int rc = pd_conn_put(l->conn, j->rec.p, j->rec.n, l->e);
    j->sent_us = now_us(l);
    j->out = true;
    l->n_open++;
    l->n_sent++;
    pd_buf_free(&j->rec);
    rc = rc ? rc : l->o->concurrency ? 0 : pd_sample_add(&l->lag_ms, (double)(j->sent_us - j->sched_us) / 1e3, l->e);
    return rc;
}

/* Sends what is due, as long as the peer takes it. */
static void pump(struct load *l)
{
    int rc = 0;
    while (rc == 0 && l->conn && l->next && !pd_conn_full(l->conn) && (l->o->concurrency ? l->n_open < l->o->concurrency : l->next->sched_us <= now_us(l))) {
        struct job *j = l->next;
        l->next = j->next;
        rc = send_one(l, j);
    }
    if (rc == PD_ECANCEL)
        return;                         /* `gone` follows */
    if (rc == 0 && l->conn && l->next && !l->o->concurrency && !pd_conn_full(l->conn))
        rc = pd_timer_at(l->due, l->start + l->next->sched_us, l->e);
    if (rc)
        quit(l, rc);
    if (!rc && l->conn && !l->next && !l->n_open && !l->finishing) {
        l->finishing = true;
        pd_conn_close(l->conn, NULL);
    }
}

static void on_due(void *ctx)
{
    struct load *l = ctx;
    if (l->start)
        pump(l);
    else
        dial(l);
}

static void on_idle(void *ctx)
{
    struct load *l = ctx;
    struct pd_err e;
    int64_t since = l->heard, next = l->next && l->start ? l->start + l->next->sched_us : 0;
    since = l->next && !l->o->concurrency && next > since ? next : since;
    if (l->start && pd_mono_us() - since >= l->o->idle_us) {
        pd_fail(&e, PD_ETIME, "%s: nothing came for %.1f s", l->conn_opts.name, (double)l->o->idle_us / 1e6);
        give_up_all(l, &e);
    } else if (pd_timer_in(l->idle, 100000, l->e))
        quit(l, l->e->code);
}

static void on_stop(void *ctx, int level)
{
    struct load *l = ctx;
    struct pd_err e;
    pd_fail(&e, PD_ECANCEL, "interrupted");
    if (level > 1 || !l->start) {
        *l->status = pd_exit_worse(*l->status, PD_ECANCEL);
        give_up_all(l, &e);
        return;
    }
    give_up_from(l, l->next, &e);
    pd_warn("a signal: nothing more is sent, %llu answers are awaited; a second one stops at once", (unsigned long long)l->n_open);
    pump(l);
}

/* ---- the null server ---- */

/* Answers each request at once: its tokens, and a result. */
static int answer(const struct pd_rec *rec, struct pd_wstream *out, struct pd_err *e)
{
    static int32_t zeros[65536];
    struct pd_arena mem = { 0 };
    struct pd_request q;
    struct pd_buf b = { 0 };
    struct pd_bin v;
    bool stream = false;
    int rc = pd_request_decode(rec->p, rec->n, &mem, &q, e);
    if (rc == 0 && pd_map_find(rec->p, rec->n, "stream", &v) == 1)
        pd_get_bool(v, &stream);
    uint32_t n = rc == 0 && q.has & PD_RQ_MAX_TOKENS && q.max_tokens > 0 && q.max_tokens < 65536 ? (uint32_t)q.max_tokens : 1;
    for (uint32_t i = 0; rc == 0 && stream && i < n; i++) {
        struct pd_token t = { .pos = (int32_t)i, .text = { "", 0 } };
        memcpy(t.run, q.run, sizeof t.run);
        b.n = 0;
        rc = pd_token_encode(&t, &b, e);
        rc = rc ? rc : pd_wstream_put(out, b.p, b.n, e);
    }
    struct pd_result r = { .id = q.id, .text = { "", 0 }, .tokens = zeros, .n_tokens = n, .prompt_tokens = q.n_token_ids, .completion_tokens = n, .finish_reason = "length",
                           .mode = "local", .tpot_ms = -1, .kv_ms = -1 };
    memcpy(r.run, q.run, sizeof r.run);
    b.n = 0;
    rc = rc ? rc : pd_result_encode(&r, &b, e);
    rc = rc ? rc : pd_wstream_put(out, b.p, b.n, e);
    rc = rc ? rc : pd_wstream_flush(out, e);
    pd_buf_free(&b);
    pd_arena_free(&mem);
    return rc;
}

static void null_server(int fd)
{
    struct pd_rstream *in = NULL;
    struct pd_wstream *out = NULL;
    struct pd_rec rec;
    struct pd_err e;
    bool bad;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGINT, SIG_IGN);            /* it ends when its client closes */
    struct pd_rstream_opts ro = { .name = "null server" };
    int rc = pd_rstream_new(fd, &ro, &in, &e);
    rc = rc ? rc : pd_wstream_new(fd, PD_FMT_MSGPACK, false, "null server", &out, &e);
    while (rc == 0 && (rc = pd_rstream_next(in, -1, &rec, &bad, &e)) > 0)
        rc = rc == 1 ? answer(&rec, out, &e) : 0;
    _exit(rc < 0 && rc != PD_ECANCEL);
}

static int start_null(struct load *l, pid_t *pid, struct pd_err *e)
{
    int s[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, s) < 0)
        return pd_fail_sys(e, "socketpair");
    if ((*pid = fork()) == 0) {
        close(s[0]);
        null_server(s[1]);
    }
    close(s[1]);
    if (*pid < 0) {
        close(s[0]);
        return pd_fail_sys(e, "fork");
    }
    return pd_conn_new(l->loop, s[0], &l->conn_opts, &callbacks, l, &l->conn, e);
}

/* ---- all of it ---- */

static void free_all(struct load *l)
{
    for (struct job *j = l->first, *next; j; j = next) {
        next = j->next;
        pd_buf_free(&j->rec);
        pd_buf_free(&j->id);
        pd_buf_free(&j->about);
        pd_free(j->gap);
        pd_free(j);
    }
    pd_keyed_free(&l->jobs);
    if (l->conn)
        pd_conn_free(l->conn);
    pd_timer_free(l->due);
    pd_timer_free(l->idle);
    pd_loop_free(l->loop);
    pd_sample_free(&l->lag_ms);
}

int pd_load_run(const struct pd_load_opts *o, struct pd_rstream *in, struct pd_wstream *results, int *status, struct pd_err *e)
{
    struct load l = { .o = o, .results = results, .status = status, .e = e,
                      .conn_opts = { .max_record = o->max_record, .asks = true, .name = o->at ? o->at : "the null server", .net = o->net } };
    pid_t child = 0;
    int rc = take_all(&l, in, e);
    rc = rc ? rc : pd_loop_new(&l.loop, e);
    rc = rc ? rc : pd_timer_new(l.loop, on_due, &l, &l.due, e);
    rc = rc ? rc : pd_timer_new(l.loop, on_idle, &l, &l.idle, e);
    rc = rc ? rc : pd_timer_in(l.idle, 100000, e);
    rc = rc ? rc : pd_loop_on_stop(l.loop, on_stop, &l, e);
    l.next = l.first;
    l.dial_until = pd_mono_us() + (o->net ? o->net->connect_us : 0);
    if (rc == 0 && !o->at)
        rc = start_null(&l, &child, e);
    if (rc == 0) {
        if (o->at)
            dial(&l);
        else
            begin(&l);
        int looped = l.rc ? l.rc : pd_loop_run(l.loop, e);
        rc = l.rc ? l.rc : looped;
    }
    if (rc == 0 && l.lag_ms.n)
        pd_pace_tell(&l.lag_ms, l.n_sent, (double)l.last->sched_us / 1e6);
    free_all(&l);
    if (child > 0)
        waitpid(child, NULL, 0);
    return rc;
}

/* ---- the verb ---- */

static char *concurrency, *idle;
static int no_stream, self_test;
struct poptOption pd_load_options[] = {
    { "concurrency", '\0', POPT_ARG_STRING, &concurrency, 0, "closed loop: N requests at once, each sent when one has ended (default: open loop, each at its arrival_us)", "N" },
    { "no-stream", '\0', POPT_ARG_NONE, &no_stream, 0, "ask for results alone: less work for all, and no first token or gap is seen", NULL },
    { "idle", '\0', POPT_ARG_STRING, &idle, 0, "give the rest up when nothing came for so long (default 60s)", "TIME" },
    { "self-test", '\0', POPT_ARG_NONE, &self_test, 0, "in place of -o: against a server that answers at once; what is measured is the client's own floor", NULL },
    POPT_TABLEEND
};

int pd_load_verb(int *status, struct pd_err *e)
{
    struct pd_load_opts o = { .at = self_test ? NULL : pd_cli.out, .no_stream = no_stream, .idle_us = 60000000, .net = pd_net_cli(e) };
    struct pd_endpoint in = { .fd = -1 };
    struct pd_rstream *rs = NULL;
    struct pd_wstream *ws = NULL;
    const char *from = pd_cli.in ? pd_cli.in : "-";
    int64_t n = 0, max = pd_cli_max_record(e);
    bool json = pd_cli.format && !strcmp(pd_cli.format, "json");
    if (!o.net || max < 0)
        return e->code;
    if (!self_test == !pd_cli.out)
        return pd_fail(e, PD_EUSAGE, pd_cli.out ? "--self-test: it goes to a server of its own, without -o" : "-o: where is the router or worker? (example: -o unix:router; or --self-test)");
    if (pd_cli.out && pd_conn_can_dial(pd_cli.out, e))
        return pd_err_prefix(e, "-o"), PD_EUSAGE;
    if (concurrency && pd_parse_int(concurrency, 1, 1000000, &n, e) < 0)
        return pd_err_prefix(e, "--concurrency");
    if (idle && (pd_parse_duration(idle, &o.idle_us, e) < 0 || o.idle_us < 1000))
        return pd_fail(e, PD_EUSAGE, "--idle: '%s' is no time of 1ms or more (example: --idle 60s)", idle);
    if (!json && isatty(STDOUT_FILENO))
        return pd_fail(e, PD_EUSAGE, "results are binary and standard output is a terminal (use --format json, or a pipe into pd-bench score)");
    o.concurrency = (uint32_t)n;
    o.max_record = (size_t)max;
    struct pd_rstream_opts ro = { .max_record = (size_t)max, .name = from };
    int rc = pd_endpoint_open_in(from, o.net, &in, e);
    rc = rc ? rc : pd_rstream_of(&in, &ro, &rs, e);
    rc = rc ? rc : pd_wstream_new(STDOUT_FILENO, json ? PD_FMT_JSON : PD_FMT_MSGPACK, false, "-", &ws, e);
    rc = rc ? rc : pd_load_run(&o, rs, ws, status, e);
    int closed = ws ? pd_wstream_close(ws, rc ? NULL : e) : 0;
    pd_rstream_free(rs);
    pd_endpoint_abort(&in);
    return rc ? rc : closed;
}
