#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/random.h>
#include <unistd.h>
#include "../base/cli.h"
#include "../base/clock.h"
#include "../base/log.h"
#include "../base/proc.h"
#include "../kv/convert.h"
#include "../kv/handover.h"
#include "../wire/endpoint.h"
#include "../wire/value.h"
#include "../xfer/proto.h"
#include "register.h"

enum { FIRST_US = 50000, LAST_US = 2000000, GOOD_US = 5000000, MOST_ROUTERS = 16, MOST_VIA = 4, MOST_CAPS = PD_XFER_CAPS + PD_CONV_CAPS + 1, EVENT_BYTES = 64 << 10 };

struct pd_register_cli pd_register_cli;
struct poptOption pd_register_options[] = {
    { "register", '\0', POPT_ARG_ARGV, &pd_register_cli.routers, 0, "as a daemon: dial this router and register there; may be repeated", "ENDPOINT" },
    { "describe", '\0', POPT_ARG_NONE, &pd_register_cli.describe, 0, "print this worker's record and exit", NULL },
    POPT_TABLEEND
};

struct events { bool wanted; struct pd_kvcursor at; };  /* of the prefix index, over one connection */
struct follower { struct pd_conn *c; struct events ev; struct follower *next, **prev; };
struct router { struct pd_register *r; const char *path; struct pd_conn_opts opts; struct pd_conn *c; struct pd_timer *again; int64_t wait_us; struct events ev;
    bool stood, told, refused; };       /* told: that it is away; refused: what it says */

struct pd_register {
    struct pd_daemon *d;
    struct pd_register_opts o;
    struct pd_worker_rec rec;           /* what does not change, and the counters */
    struct pd_str via[MOST_VIA], caps[MOST_CAPS];
    struct follower *followers;
    struct router router[MOST_ROUTERS];
    int n_routers;
    struct pd_buf b;                    /* the record at hand */
    struct pd_buf ev;                   /* kvevents at hand */
    struct pd_post changed;             /* the prefix index did; posted: it is on its way */
    _Atomic bool posted;
};

/* ---- the record ---- */

static struct pd_str str(const char *s) { return (struct pd_str){ s, strlen(s) }; }

static void fill(const struct pd_register_opts *o, struct pd_str via[MOST_VIA], struct pd_str caps[MOST_CAPS], struct pd_worker_rec *w)
{
    const struct pd_runtime *rt = o->rt;
    memcpy(caps, pd_xfer_caps, sizeof pd_xfer_caps);
    *w = (struct pd_worker_rec){ .worker = str(rt->worker), .model_revision = str(rt->model->revision), .numerics = str(rt->numerics), .domain = str(rt->domain),
        .fp_fields = { rt->fp.map.p, rt->fp.map.n }, .parallel = { 1, 1, 1 }, .via = via, .caps = caps, .n_caps = PD_XFER_CAPS + pd_conv_caps(rt->convert, caps + PD_XFER_CAPS), .epoch = rt->epoch,
        .capacity = { .blocks = pd_pool_stats(rt->pool).max, .block_size = (uint32_t)pd_pool_geom(rt->pool)->block_size, .max_seqs = rt->max_seqs, .max_runs = o->max_runs,
                      .context = (uint32_t)rt->model->cfg.n_ctx }, .threads = (uint32_t)pd_threads_count(rt->threads), .cpu = str(rt->k->name) };
    snprintf(w->role, sizeof w->role, "%s", o->role);
    if (!strcmp(o->role, "both"))
        snprintf(w->prefer, sizeof w->prefer, "%s", o->prefer ? o->prefer : "decode");
    if (strcmp(o->role, "decode"))
        caps[w->n_caps++] = str(PD_CAP_GIVES);
    memcpy(w->fp_sha, rt->fp.sha, sizeof w->fp_sha);
    pd_layout_from_pool(rt->pool, &w->layout);
    for (const char *s = o->via ? o->via : pd_via_default(true, true); *s && w->n_via < MOST_VIA; s += *s == ',') {
        via[w->n_via++] = (struct pd_str){ s, strcspn(s, ",") };
        s += strcspn(s, ",");
    }
    pd_proc_boot_id(w->boot);
    for (int i = 0; i < 16; i++)
        w->has_boot |= w->boot[i] != 0;
    w->netns = pd_proc_netns();
}

int pd_register_describe(const struct pd_register_opts *o, const char *listen, struct pd_buf *b, struct pd_err *e)
{
    struct pd_worker_rec w;
    struct pd_str via[MOST_VIA], caps[MOST_CAPS];
    char address[4200];
    int rc;
    fill(o, via, caps, &w);
    strcpy(w.state, "starting");
    if (listen) {
        if ((rc = pd_daemon_address(listen, address, sizeof address, e)) < 0)
            return pd_err_prefix(e, "--listen"), rc;
        w.listen = str(address);
    }
    return pd_worker_rec_encode(&w, b, e);
}

int pd_register_print(const struct pd_register_opts *o, const char *const *listen, struct pd_err *e)
{
    struct pd_endpoint out = { .fd = -1 };
    struct pd_wstream *ws = NULL;
    struct pd_buf b = { 0 };
    const char *to = pd_cli.out ? pd_cli.out : "-";
    const struct pd_net *net = pd_net_cli(e);
    bool json = pd_cli.format && !strcmp(pd_cli.format, "json");
    int rc = !net ? e->code : pd_register_describe(o, listen ? listen[0] : NULL, &b, e);
    rc = rc ? rc : pd_endpoint_open_out(to, net, &out, e);
    if (rc == 0 && !json && isatty(out.fd))
        rc = pd_fail(e, PD_EUSAGE, "--describe: records are binary and the output is a terminal (use --format json, -o FILE, or a pipe)");
    rc = rc ? rc : pd_wstream_of(&out, json ? PD_FMT_JSON : PD_FMT_MSGPACK, to, &ws, e);
    rc = rc ? rc : pd_wstream_put(ws, b.p, b.n, e);
    pd_buf_free(&b);
    return pd_wstream_end(ws, &out, rc, e);
}

/* The record of now, in r->b. */
static int make(struct pd_register *r, struct pd_err *e)
{
    struct pd_worker_rec *w = &r->rec;
    snprintf(w->state, sizeof w->state, "%s", pd_daemon_state_name(pd_daemon_state(r->d)));
    w->load = (struct pd_load){ 0 };
    if (r->o.load)
        r->o.load(r->o.ctx, &w->load);
    w->seq++;
    r->b.n = 0;
    return pd_worker_rec_encode(w, &r->b, e);
}

static void put(struct pd_register *r, struct pd_conn *c)
{
    struct pd_err e;
    if (!pd_conn_full(c) && pd_conn_put(c, r->b.p, r->b.n, &e) == PD_EFAIL)
        pd_conn_put_error(c, NULL, &e, "abort");
}

void pd_register_beat(struct pd_register *r)
{
    struct pd_err e;
    if (!r || (!r->followers && !pd_register_routers(r)))
        return;
    if (make(r, &e) < 0) {
        pd_error("heartbeat: %s", e.msg);
        return;
    }
    for (struct follower *f = r->followers, *next; f; f = next) {
        next = f->next;
        put(r, f->c);
    }
    for (int i = 0; i < r->n_routers; i++)
        if (r->router[i].stood)
            put(r, r->router[i].c);
}

/* ---- changes of the prefix index ---- */

/* What of them there is room for. */
static void feed(struct pd_register *r, struct pd_conn *c, struct events *ev)
{
    struct pd_err e;
    int more = ev->wanted;
    while (more == 1 && pd_conn_open(c) && !pd_conn_full(c)) {
        r->ev.n = 0;
        more = pd_prefix_events(r->o.rt->prefix, &ev->at, EVENT_BYTES, &r->ev, &e);
        for (size_t at = 0, n = 0; more >= 0 && at < r->ev.n; at += n) {
            n = pd_value_len(r->ev.p + at, r->ev.n - at);
            if (pd_conn_put(c, r->ev.p + at, n, &e) < 0)
                break;          /* closed, or about to be */
        }
    }
    if (more < 0)
        pd_conn_close(c, &e);
}

static void end_events(struct events *ev)
{
    pd_kvcursor_close(&ev->at);
    *ev = (struct events){ 0 };
}

/* A `status` that asks for events, the first or once more: from what it names on, else from a snapshot on. */
static void begin_events(struct pd_register *r, struct events *ev, const struct pd_rec *rec)
{
    struct pd_bin v, life = { NULL, 0 };
    int64_t seq = 0;
    bool wanted = false;
    if (!r->o.rt->prefix || pd_map_find(rec->p, rec->n, "events", &v) != 1 || !pd_get_bool(v, &wanted))
        return;
    end_events(ev);
    bool known = pd_map_find(rec->p, rec->n, "life", &v) == 1 && pd_get_bin(v, &life) && life.n == PD_LIFE_LEN && pd_map_find(rec->p, rec->n, "seq", &v) == 1 &&
                 pd_get_int(v, &seq) && seq >= 0;
    pd_kvcursor_open(&ev->at, r->o.rt->prefix, known ? life.p : NULL, (uint64_t)seq);
    ev->wanted = wanted;
}

static void on_changed(void *ctx)
{
    struct pd_register *r = ctx;
    atomic_store(&r->posted, false);
    for (struct follower *f = r->followers, *next; f; f = next) {
        next = f->next;
        feed(r, f->c, &f->ev);
    }
    for (int i = 0; i < r->n_routers; i++)
        if (r->router[i].c)
            feed(r, r->router[i].c, &r->router[i].ev);
}

/* On the thread that changed it. */
static void tell_change(void *ctx)
{
    struct pd_register *r = ctx;
    if (!atomic_exchange(&r->posted, true))
        pd_loop_post(pd_daemon_loop(r->d), &r->changed);
}

/* ---- who follows ---- */

static void on_follow_room(void *ctx, struct pd_conn *c) { feed(ctx, c, &((struct follower *)pd_conn_get(c))->ev); }

static void on_follow_record(void *ctx, struct pd_conn *c, const struct pd_rec *rec)
{
    struct pd_register *r = ctx;
    struct pd_str kind = pd_rec_kind(rec);
    struct pd_err e;
    int rc = pd_str_eq(kind, "status") ? make(r, &e)
        : pd_fail(&e, PD_EFAIL, "this connection follows; a record of kind '%.*s' belongs on another", (int)(kind.n < 40 ? kind.n : 40), kind.p);
    if (rc < 0) {
        pd_conn_put_error(c, NULL, &e, "abort");
        return;
    }
    struct events *ev = &((struct follower *)pd_conn_get(c))->ev;
    put(r, c);
    begin_events(r, ev, rec);
    feed(r, c, ev);
}

static void on_follow_gone(void *ctx, struct pd_conn *c, const struct pd_err *why)
{
    struct follower *f = pd_conn_get(c);
    (void)ctx;
    (void)why;
    *f->prev = f->next;
    if (f->next)
        f->next->prev = f->prev;
    end_events(&f->ev);
    pd_free(f);
}

static void leave_be(void *ctx, struct pd_conn *c) { (void)ctx; (void)c; }
static const struct pd_conn_cb follow_cb = { .record = on_follow_record, .room = on_follow_room, .drain = leave_be, .gone = on_follow_gone, .looks_on = true };

int pd_register_follow(struct pd_register *r, struct pd_conn *c, const struct pd_rec *rec, struct pd_err *e)
{
    struct follower *f;
    int rc = make(r, e);
    if (rc < 0)
        return rc;
    if (!(f = pd_calloc(1, sizeof *f, "a follower", e)))
        return PD_ENOMEM;
    *f = (struct follower){ .c = c, .next = r->followers, .prev = &r->followers };
    begin_events(r, &f->ev, rec);
    if (f->next)
        f->next->prev = &f->next;
    r->followers = f;
    pd_conn_set(c, f);
    pd_conn_handle(c, &follow_cb, r);
    pd_conn_owe(c, 1);          /* for ever: also one that has ended its writing goes on reading */
    put(r, c);
    feed(r, c, &f->ev);
    return 0;
}

/* ---- routers ---- */

static void dial_later(struct router *t)
{
    uint32_t x = 0;
    struct pd_err e;
    int64_t wait = t->wait_us;
    if (getrandom(&x, sizeof x, GRND_NONBLOCK) == sizeof x)
        wait += (int64_t)(x % (uint32_t)(t->wait_us / 5));
    t->wait_us = t->wait_us * 2 < LAST_US ? t->wait_us * 2 : LAST_US;
    if (pd_timer_in(t->again, wait, &e) < 0)
        pd_error("--register %s: no more is tried: %s", t->path, e.msg);
}

static void on_router_record(void *ctx, struct pd_conn *c, const struct pd_rec *rec)
{
    struct router *t = ctx;
    struct pd_arena a = { 0 };
    struct pd_error_rec er;
    struct pd_err e;
    if (rec->kind == PD_K_STATUS) {
        begin_events(t->r, &t->ev, rec);
        feed(t->r, c, &t->ev);
    }
    if (rec->kind == PD_K_ERROR && !t->refused && (t->refused = pd_error_decode(rec->p, rec->n, &a, &er, &e) == 0))
        pd_warn("--register %s: the router says: %.*s", t->path, (int)(er.message.n < 400 ? er.message.n : 400), er.message.p);
    pd_arena_free(&a);
}

static void on_router_room(void *ctx, struct pd_conn *c) { feed(((struct router *)ctx)->r, c, &((struct router *)ctx)->ev); }

static void on_router_gone(void *ctx, struct pd_conn *c, const struct pd_err *why)
{
    struct router *t = ctx;
    end_events(&t->ev);
    bool stood = t->stood;
    t->stood = false;
    if (stood && pd_mono_us() - pd_conn_since(c) > GOOD_US) {
        t->wait_us = FIRST_US;
        t->refused = false;
    }
    t->c = NULL;
    if (!t->told && !t->refused)
        pd_warn(stood ? "--register %s: the router is gone (%s); it is dialled until it is back" : "--register %s: %s; it is dialled until it is there", t->path,
                why ? why->msg : "closed");
    t->told = true;
    dial_later(t);
}

static void on_router_stands(void *ctx, struct pd_conn *c)
{
    struct router *t = ctx;
    struct pd_err e;
    t->stood = true;
    if (t->told && !t->refused) {
        pd_warn("--register %s: the router is there", t->path);
        t->told = false;
    }
    if (make(t->r, &e) < 0)
        pd_conn_close(c, &e);
    else
        put(t->r, c);
}

/* Not even a half-closed router is left by itself. */
static const struct pd_conn_cb router_cb = { .stands = on_router_stands, .record = on_router_record, .room = on_router_room, .drain = leave_be, .gone = on_router_gone, .looks_on = true };

static void dial(void *ctx)
{
    struct router *t = ctx;
    struct pd_err e;
    if (pd_conn_dial(pd_daemon_loop(t->r->d), t->path, &t->opts, &router_cb, t, &t->c, &e) < 0) {
        t->c = NULL;
        if (!t->told)
            pd_warn("--register: %s; it is dialled until it is there", e.msg);
        t->told = true;
        dial_later(t);
        return;
    }
    if (!pd_conn_opening(t->c))
        on_router_stands(t, t->c);
}

uint32_t pd_register_routers(const struct pd_register *r)
{
    uint32_t n = 0;
    for (int i = 0; i < r->n_routers; i++)
        n += r->router[i].stood;
    return n;
}

int pd_register_new(struct pd_daemon *d, const struct pd_register_opts *o, struct pd_register **out, struct pd_err *e)
{
    struct pd_register *r = pd_calloc(1, sizeof *r, "a registration", e);
    const struct pd_daemon_opts *dopts = pd_daemon_get_opts(d);
    uint8_t gen[PD_GEN_LEN];
    char address[4200];
    int rc;
    if (!r)
        return PD_ENOMEM;
    r->d = d;
    r->o = *o;
    fill(o, r->via, r->caps, &r->rec);
    r->rec.listen = str(pd_daemon_at(d));
    r->rec.pid = (uint32_t)getpid();
    r->rec.beat_us = dopts->beat_us;
    if (!*pd_daemon_at(d) && (rc = pd_daemon_address(dopts->listen[0], address, sizeof address, e)) < 0)
        pd_err_prefix(e, "--listen");
    else
        rc = pd_gen_new(gen, e);
    if (rc < 0)
        goto out;
    memcpy(r->rec.life, gen, sizeof r->rec.life);
    r->rec.has_life = true;
    for (; o->routers && o->routers[r->n_routers]; r->n_routers++) {
        const char *s = o->routers[r->n_routers];
        struct router *t = &r->router[r->n_routers];
        if (r->n_routers == MOST_ROUTERS) {
            rc = pd_fail(e, PD_EUSAGE, "--register: more than %d routers", MOST_ROUTERS);
            goto out;
        }
        if ((rc = pd_conn_can_dial(s, e)) < 0) {
            pd_err_prefix(e, "--register");
            goto out;
        }
        *t = (struct router){ .r = r, .path = s, .wait_us = FIRST_US, .opts = { .name = s, .set = pd_daemon_conns(d), .net = &dopts->net } };
        if ((rc = pd_timer_new(pd_daemon_loop(d), dial, t, &t->again, e)) < 0 || (rc = pd_timer_in(t->again, 0, e)) < 0)
            goto out;
    }
    r->changed = (struct pd_post){ .fn = on_changed, .ctx = r };
    if (o->rt->prefix)
        pd_prefix_on_change(o->rt->prefix, tell_change, r);
out:
    if (rc < 0)
        pd_register_free(r);
    else
        *out = r;
    return rc;
}

void pd_register_free(struct pd_register *r)
{
    if (!r)
        return;
    if (r->o.rt->prefix)
        pd_prefix_on_change(r->o.rt->prefix, NULL, NULL);
    for (struct follower *f = r->followers, *next; f; f = next) {
        next = f->next;
        pd_conn_free(f->c);
        end_events(&f->ev);
        pd_free(f);
    }
    for (int i = 0; i < MOST_ROUTERS; i++) {
        pd_conn_free(r->router[i].c);
        end_events(&r->router[i].ev);
        pd_timer_free(r->router[i].again);
    }
    pd_buf_free(&r->b);
    pd_buf_free(&r->ev);
    pd_free(r);
}

/* ---- a workers file ---- */

static bool same(const struct pd_worker_rec *a, const struct pd_worker_rec *b)
{
    return a->worker.n == b->worker.n && !memcmp(a->worker.p, b->worker.p, a->worker.n) && a->has_life == b->has_life && !memcmp(a->life, b->life, sizeof a->life);
}

int pd_workers_read(const char *path, struct pd_arena *a, struct pd_worker_rec **out, uint32_t *n_out, struct pd_err *e)
{
    struct pd_buf all = { 0 };
    struct pd_rstream *s = NULL;
    struct pd_rec rec;
    struct pd_worker_rec w;
    bool bad;
    uint32_t n = 0;
    int rc, fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return pd_fail_sys(e, "%s: cannot open this workers file", path);
    const struct pd_rstream_opts o = { .own_fd = true, .name = path };
    if ((rc = pd_rstream_new(fd, &o, &s, e)) < 0) {
        close(fd);
        return rc;
    }
    for (uint64_t k = 1; (rc = pd_rstream_next(s, -1, &rec, &bad, e)) != 0; k++) {
        if (rc == 2) {
            k--;
            continue;
        }
        if (rc == 1 && rec.kind != PD_K_WORKER) {
            struct pd_str kind = pd_rec_kind(&rec);
            rc = pd_fail(e, PD_EFAIL, "it is of kind '%.*s' (a workers file has what --describe prints)", (int)(kind.n < 40 ? kind.n : 40), kind.p);
        }
        if (rc == 1)
            rc = pd_worker_rec_decode(rec.p, rec.n, a, &w, e);
        if (rc < 0) {
            pd_err_prefix(e, "%s: record %llu", path, (unsigned long long)k);
            goto out;
        }
        struct pd_worker_rec *have = (struct pd_worker_rec *)(void *)all.p;
        uint32_t i = 0;
        while (i < n && !same(&have[i], &w))
            i++;
        if (i < n)
            have[i] = w;
        else if ((rc = pd_buf_add(&all, &w, sizeof w, e)) < 0)
            goto out;
        else
            n++;
    }
    if (!n) {
        rc = pd_fail(e, PD_EFAIL, "%s: there is no worker in it (pd-decode -m MODEL --describe >>%s adds one)", path, path);
        goto out;
    }
    if (!(*out = pd_arena_alloc(a, n, sizeof **out, e))) {
        rc = PD_ENOMEM;
        goto out;
    }
    memcpy(*out, all.p, n * sizeof w);
    *n_out = n;
out:
    pd_rstream_free(s);
    pd_buf_free(&all);
    return rc;
}
