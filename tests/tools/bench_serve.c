/* What the router adds to a request: `bench_serve route BIN DIR [RATE [N [RUNS]]]` starts a pd-route with two fake workers that compute nothing, sends it N
 * requests of 512 tokens at RATE a second over several connections (10000 at 1000, 5 times over), and prints JSON rows of the best run on standard output.
 *
 * The fakes move real KV for each request, OFFER to RELEASE by shm, through the same code as real workers (serve/link, xfer/proto): 32 blocks of a small
 * model (2 layers, 2 KV heads of 16, f16), hashed by the giver, verified by the taker where they lie. The prefill worker offers when it has the request; the
 * decode worker answers with one result when it has taken the KV.
 * Added is all that happens outside of the fakes, waiting for a core included: from before the client's write until both workers have read the request, and
 * from before the decode worker's put of the result until the client has read it. Each side stamps a shared page by the request's number. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/base/log.h"
#include "../../libcommon/base/stop.h"
#include "../../libcommon/serve/daemon.h"
#include "../../libcommon/serve/link.h"
#include "../../libcommon/wire/value.h"

enum { TOKENS = 512, BLOCKS = TOKENS / 16, CLIENTS = 8, WARM = 1000, IN_FLIGHT = 256, MOST = 1 << 20 };
static const struct pd_pool_geom geom = { .layers = 2, .kv_heads = 2, .head_dim = 16, .block_size = 16, .dtype = PD_F16 };
static const uint8_t fp[] = "\x83\xa4" "arch\xa5" "bench\xa8numerics\xa1x\xa8software\xa1y";

/* By request; ns, 0: not yet. Shared by all processes but the router. */
struct stamp { int64_t sent, d_in, p_in, out, back; };
static struct stamp *stamps;

static void must(int rc, const struct pd_err *e)
{
    if (rc < 0) {
        fprintf(stderr, "bench_serve: %s\n", e->msg);
        exit(1);
    }
}

static void need(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "bench_serve: %s\n", what);
        exit(1);
    }
}

/* ---- the fakes ---- */

/* What they need of a request is found without decoding it: they are to cost as little as can be. */
struct run { int64_t i; char name[PD_RUN_LEN + 1]; uint8_t op[16]; char d[200]; struct pd_conn *c; struct run *next; };

static struct fake {
    bool giving;
    char name[64], at[200];
    struct pd_daemon *d;
    struct pd_loop *l;
    struct pd_pool *pool;
    struct pd_leases *leases;
    struct pd_links links;
    struct pd_link *to_d;
    bool ready;
    struct pd_conn *follower;
    struct run *runs;                   /* D: the KV has not come; P: the link is not there yet */
    struct { struct pd_move *m; struct pd_link *k; } early[IN_FLIGHT];      /* D: offers that came before their request */
    int n_early;
    uint64_t seq;
} F;

static struct pd_str str(const char *s) { return (struct pd_str){ s, strlen(s) }; }

static void run_free(struct run *r)
{
    for (struct run **p = &F.runs; *p; p = &(*p)->next)
        if (*p == r) {
            *p = r->next;
            break;
        }
    pd_free(r);
}

static struct run *find(const char *name)
{
    for (struct run *r = F.runs; r; r = r->next)
        if (!strcmp(r->name, name))
            return r;
    return NULL;
}

static void say_who(void)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    struct pd_worker_rec w = { .worker = str(F.name), .state = "ready", .model_revision = str("bench@000000000000"), .numerics = str("x"), .domain = str("local"),
        .fp_fields = { fp, sizeof fp - 1 }, .parallel = { 1, 1, 1 }, .capacity = { .blocks = 65536, .block_size = 16, .max_seqs = 4096, .max_runs = 4096, .context = 1 << 20 },
        .via = &(struct pd_str){ "shm", 3 }, .n_via = 1, .caps = pd_xfer_caps, .n_caps = PD_XFER_CAPS, .listen = str(F.at), .life = { 1 }, .has_life = true,
        .pid = (uint32_t)getpid(), .beat_us = 1000000, .seq = ++F.seq };
    strcpy(w.role, F.giving ? "prefill" : "decode");
    w.life[1] = F.giving;
    must(pd_sha256(fp, sizeof fp - 1, w.fp_sha, &e), &e);
    pd_layout_from_pool(F.pool, &w.layout);
    must(pd_worker_rec_encode(&w, &b, &e), &e);
    must(pd_conn_put(F.follower, b.p, b.n, &e), &e);
    pd_buf_free(&b);
}

static void on_beat(void *ctx)
{
    (void)ctx;
    if (F.follower)
        say_who();
    if (F.giving)
        pd_leases_sweep(F.leases, pd_mono_us());
}

static void follower_gone(void *ctx, struct pd_conn *c, const struct pd_err *why)
{
    (void)ctx; (void)why;
    if (F.follower == c)
        F.follower = NULL;
}
static const struct pd_conn_cb follow_cb = { .gone = follower_gone, .looks_on = true };
static int on_follow(void *ctx, struct pd_conn *c, const struct pd_rec *rec, struct pd_err *e)
{
    (void)ctx; (void)rec; (void)e;
    pd_conn_handle(c, &follow_cb, NULL);
    F.follower = c;
    say_who();
    return 0;
}

/* P: offer the run's blocks, all there already, and tell the router. */
static void give(struct run *r)
{
    static const int32_t ids[TOKENS];   /* nobody looks */
    struct pd_kvdesc d = { .fp_fields = { fp, sizeof fp - 1 }, .n_tokens = TOKENS, .token_ids = ids, .worker = str(F.name), .request = { .id = { (const uint8_t *)"\x01", 1 }, .has = PD_RQ_MAX_TOKENS, .max_tokens = 2 } };
    struct pd_first first = { .token = 7 };
    uint32_t blocks[BLOCKS];
    uint8_t lease[PD_LEASE_ID_LEN];
    struct pd_give g = { .desc = &d, .blocks = blocks, .via = "shm" };
    struct pd_buf b = { 0 };
    struct pd_move *m;
    struct pd_err e;
    int64_t now = pd_mono_us();
    memcpy(d.run, r->name, sizeof d.run);
    memcpy(d.op, r->op, sizeof d.op);
    must(pd_sha256(fp, sizeof fp - 1, d.fp_sha, &e), &e);
    pd_layout_from_pool(F.pool, &d.layout);
    must(pd_gen_new(d.gen, &e), &e);
    must(pd_pool_take_raw(F.pool, BLOCKS, blocks, &e), &e);
    must(pd_lease_grant(F.leases, d.run, d.gen, blocks, BLOCKS, 0, now, lease, &e), &e);
    for (int i = 0; i < BLOCKS; i++)
        pd_pool_put(F.pool, blocks[i]);         /* the lease's now */
    must(pd_lease_fill(F.leases, lease, &e), &e);
    memcpy(g.lease, lease, sizeof g.lease);
    must(pd_give(pd_link_xfer(F.to_d), &g, now, &m, &e), &e);
    pd_move_set(m, NULL);
    d.first = &first;
    d.n_first = 1;
    must(pd_give_finish(m, &d, &e), &e);
    pd_link_soon(F.to_d);
    d.payload = (struct pd_payload){ 0 };
    must(pd_kvdesc_encode(&d, &b, &e), &e);
    must(pd_conn_put(r->c, b.p, b.n, &e), &e);
    pd_conn_owe(r->c, -1);
    pd_buf_free(&b);
    run_free(r);
}

static void take(struct pd_link *k, struct pd_move *m)
{
    struct pd_err e;
    must(pd_take(m, &(struct pd_take){ .in_place = true }, pd_mono_us(), &e), &e);
    pd_link_soon(k);
}

static void answer(struct run *r, const struct pd_kvdesc *kv)
{
    int32_t token = kv->first[0].token;
    uint8_t id[9] = { 0xd3 };
    struct pd_result s = { .id = { id, sizeof id }, .text = str(""), .tokens = &token, .n_tokens = 1, .prompt_tokens = kv->n_tokens, .completion_tokens = 1, .transferred_tokens = kv->n_tokens,
        .finish_reason = "length", .mode = "remote", .ttft_ms = 0, .tpot_ms = -1, .e2e_ms = 0, .kv_ms = 0, .kv_bytes = 1, .prefill_worker = kv->worker, .decode_worker = str(F.name) };
    struct pd_buf b = { 0 };
    struct pd_err e;
    memcpy(s.run, r->name, sizeof s.run);
    pd_put_be64(id + 1, (uint64_t)r->i);
    must(pd_result_encode(&s, &b, &e), &e);
    stamps[r->i].out = pd_mono_ns();
    must(pd_conn_put(r->c, b.p, b.n, &e), &e);
    pd_conn_owe(r->c, -1);
    pd_buf_free(&b);
    run_free(r);
}

static void on_event(void *ctx, struct pd_link *k, const struct pd_xfer_event *ev)
{
    struct run *r;
    (void)ctx;
    if (ev->kind == PD_XE_FAILED || ev->kind == PD_XE_CANCELLED || ev->kind == PD_XE_UNACKED)
        must(-1, &ev->err);
    if (ev->kind == PD_XE_CLOSED && F.giving)
        exit(0);                /* D is done */
    if (ev->kind == PD_XE_READY && F.giving) {
        F.ready = true;
        while (F.runs)
            give(F.runs);
    } else if (ev->kind == PD_XE_OFFERED) {
        if (find(pd_move_run(ev->move)))
            take(k, ev->move);
        else {
            need(F.n_early < IN_FLIGHT, "too many offers before their requests");
            F.early[F.n_early].m = ev->move;
            F.early[F.n_early++].k = k;
        }
    } else if (ev->kind == PD_XE_TAKEN) {
        uint32_t n, *blocks = pd_take_blocks(ev->move, &n);
        need(n == BLOCKS && (r = find(pd_move_run(ev->move))) != NULL, "KV of nobody");
        answer(r, pd_move_desc(ev->move));
        for (uint32_t i = 0; i < n; i++)
            pd_pool_put(F.pool, blocks[i]);
        pd_free(blocks);
        if (pd_take_in_place(ev->move))
            pd_take_release(ev->move, pd_mono_us());
        pd_link_soon(k);
    }
}

static void on_request(void *ctx, struct pd_conn *c, const struct pd_rec *rec)
{
    int64_t now = pd_mono_ns();
    struct pd_err e;
    struct run *r = pd_calloc(1, sizeof *r, "a run", &e);
    (void)ctx;
    need(r != NULL, "out of memory");
    if (F.giving && rec->kind == PD_K_CANCEL) {         /* D was faster with its result than we with our kv */
        pd_free(r);
        return;
    }
    if (rec->kind != PD_K_REQUEST) {
        fprintf(stderr, "bench_serve: the router sent a %s\n", pd_kind_name(rec->kind));
        exit(1);
    }
    struct pd_bin v, route, x;
    struct pd_str run, mode, at;
    need(pd_map_find(rec->p, rec->n, "id", &v) == 1 && pd_get_int(v, &r->i) && r->i >= 0 && r->i < MOST, "a request without its number");
    need(pd_map_find(rec->p, rec->n, "run", &v) == 1 && pd_get_str(v, &run) && run.n == PD_RUN_LEN, "a request without its run");
    memcpy(r->name, run.p, PD_RUN_LEN);
    need(pd_map_find(rec->p, rec->n, "route", &route) == 1 && pd_map_find(route.p, route.n, "op", &v) == 1 && pd_get_bin(v, &x) && x.n == 16, "a request without a route");
    memcpy(r->op, x.p, 16);
    need(pd_map_find(route.p, route.n, "mode", &v) == 1 && pd_get_str(v, &mode) && pd_map_find(route.p, route.n, "d", &x) == 1 &&
         pd_map_find(x.p, x.n, "at", &v) == 1 && pd_get_str(v, &at) && at.n > 5 && at.n < sizeof r->d, "a route without its end");
    snprintf(r->d, sizeof r->d, "%.*s", (int)at.n, at.p);
    if (!pd_str_eq(mode, "remote")) {
        fprintf(stderr, "bench_serve: the router changed its plan for request %lld: %.*s\n", (long long)r->i, (int)mode.n, mode.p);
        exit(1);
    }
    r->c = c;
    pd_conn_owe(c, 1);
    r->next = F.runs;
    F.runs = r;
    struct stamp *s = &stamps[r->i];
    if (!F.giving) {
        s->d_in = now;
        for (int i = 0; i < F.n_early; i++)
            if (!strcmp(pd_move_run(F.early[i].m), r->name)) {
                struct pd_move *m = F.early[i].m;
                struct pd_link *k = F.early[i].k;
                F.early[i] = F.early[--F.n_early];
                take(k, m);
                break;
            }
        return;
    }
    s->p_in = now;
    if (!F.to_d)
        must(pd_links_dial(&F.links, r->d, NULL, &F.to_d, &e), &e);
    if (F.ready)
        give(r);
}

static const struct pd_conn_cb plain_cb = { .record = on_request };

static void fake(bool giving, const char *dir)
{
    struct pd_err e;
    char address[220];
    const char *listen[] = { address, NULL };
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    pd_log_init(giving ? "fake-p" : "fake-d", 0, false);
    pd_stop_init();
    F.giving = giving;
    snprintf(F.name, sizeof F.name, "%s@bench:%d", giving ? "prefill" : "decode", (int)getpid());
    snprintf(address, sizeof address, "unix:%s/%s", dir, giving ? "p0" : "d0");
    must(pd_daemon_address(address, F.at, sizeof F.at, &e), &e);
    must(pd_pool_new(&geom, 256 << 20, &F.pool, &e), &e);
    if (giving) {               /* all of its memory is there, and known to the peer from the first offer on */
        uint32_t *all = pd_calloc(IN_FLIGHT * BLOCKS, sizeof *all, "blocks", &e);
        must(pd_pool_take(F.pool, IN_FLIGHT * BLOCKS, all, &e), &e);
        for (int i = 0; i < IN_FLIGHT * BLOCKS; i++)
            pd_pool_put(F.pool, all[i]);
        pd_free(all);
        must(pd_leases_new(&(struct pd_leases_opts){ .pool = F.pool }, &F.leases, &e), &e);
    }
    const struct pd_entry entry[] = { { NULL, &plain_cb, NULL, false }, { "hello", &pd_links_cb, &F.links, false } };
    const struct pd_daemon_hooks hooks = { .beat = on_beat, .follow = on_follow };
    const struct pd_daemon_opts o = { .role = giving ? "prefill" : "decode", .worker = F.name, .listen = listen, .ready_fd = -1, .entry = entry, .n_entry = 2 };
    must(pd_daemon_new(&o, &hooks, &F.d, &e), &e);
    F.l = pd_daemon_loop(F.d);
    F.links.o = (struct pd_links_opts){ .l = F.l, .event = on_event,
        .xfer = { .giving = giving, .unix_socket = true, .via = "shm", .worker = F.name, .domain = "local", .fp_fields = { fp, sizeof fp - 1 }, .pool = F.pool, .leases = F.leases } };
    must(pd_daemon_ready(F.d, &e), &e);
    must(pd_daemon_run(F.d, &e), &e);
    exit(0);
}

/* ---- the client ---- */

struct client { int fd; struct pd_rstream *in; };
static struct client client[CLIENTS];

static struct pd_buf record_of(int64_t i, const int32_t *ids, struct pd_err *e)
{
    struct pd_buf b = { 0 }, id = { 0 };
    uint8_t n[9] = { 0xd3 };
    pd_put_be64(n + 1, (uint64_t)i);
    must(pd_buf_add(&id, n, sizeof n, e), e);
    struct pd_request q = { .id = { id.p, id.n }, .token_ids = (int32_t *)ids, .n_token_ids = TOKENS, .has_token_ids = true, .has = PD_RQ_MAX_TOKENS, .max_tokens = 2 };
    must(pd_request_encode(&q, &b, e), e);
    pd_buf_free(&id);
    return b;
}

static void dial_all(const char *path)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    struct pd_err e;
    need((size_t)snprintf(a.sun_path, sizeof a.sun_path, "%s", path) < sizeof a.sun_path, "DIR is too long");
    for (int i = 0; i < CLIENTS; i++) {
        client[i].fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        int tries = 200;
        while (connect(client[i].fd, (struct sockaddr *)&a, sizeof a) && --tries)
            usleep(20000);
        need(tries > 0, "the router does not listen");
        must(pd_rstream_new(-1, &(struct pd_rstream_opts){ .name = "router" }, &client[i].in, &e), &e);
    }
}

/* What has come on one connection; how many results. */
static int drink(struct client *c)
{
    struct pd_rec rec;
    struct pd_err e;
    struct pd_bin v;
    uint8_t *p;
    size_t n;
    bool bad;
    int got = 0, rc;
    must(pd_rstream_room(c->in, &p, &n, &e), &e);
    ssize_t m = recv(c->fd, p, n, MSG_DONTWAIT);
    if (m < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    int64_t now = pd_mono_ns(), i = -1;
    need(m > 0, "the router closed a client's connection");
    pd_rstream_fed(c->in, (size_t)m);
    while ((rc = pd_rstream_next(c->in, 0, &rec, &bad, &e)) == 1) {
        struct pd_str how = { "", 0 };
        if (rec.kind == PD_K_TOKEN)
            continue;
        need(rec.kind == PD_K_RESULT && pd_map_find(rec.p, rec.n, "id", &v) == 1 && pd_get_int(v, &i) && i >= 0 && i < MOST, "an answer that is no result");
        need(pd_map_find(rec.p, rec.n, "finish_reason", &v) == 1 && pd_get_str(v, &how) && pd_str_eq(how, "length"), "a request failed");
        stamps[i].back = now;
        got++;
    }
    must(rc == 2 ? 0 : -1, &e);
    return got;
}

static int by_value(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b); }

/* Of the requests of the last load, P50 and P99 of one leg, us. */
static void leg(const char *name, int64_t n, double *us, int64_t (*of)(const struct stamp *s))
{
    for (int64_t i = 0; i < n; i++)
        us[i] = (double)of(&stamps[i]) / 1e3;
    qsort(us, (size_t)n, sizeof *us, by_value);
    fprintf(stderr, "  %-28s P50 %6.0f P99 %6.0f us\n", name, us[n / 2], us[n * 99 / 100]);
}
static int64_t of_d(const struct stamp *s) { return s->d_in - s->sent; }
static int64_t of_p(const struct stamp *s) { return s->p_in - s->d_in; }
static int64_t of_kv(const struct stamp *s) { return s->out - (s->d_in > s->p_in ? s->d_in : s->p_in); }
static int64_t of_back(const struct stamp *s) { return s->back - s->out; }

/* n requests at a steady rate; what each has been added, us, in out[]. Returns the rate that came of it. */
static double load(int64_t n, double rate, double *out)
{
    struct pd_err e;
    struct pollfd fds[CLIENTS];
    static int32_t ids[TOKENS];
    int64_t sent = 0, back = 0, t0 = pd_mono_ns() + 1000000, late = t0 + (int64_t)((double)n / rate * 1e9) + 20000000000;
    memset(stamps, 0, (size_t)n * sizeof *stamps);
    for (int i = 0; i < CLIENTS; i++)
        fds[i] = (struct pollfd){ .fd = client[i].fd, .events = POLLIN };
    for (int i = 0; i < TOKENS; i++)
        ids[i] = rand() % 30000;
    struct pd_buf next = record_of(0, ids, &e);
    while (back < n) {
        int64_t now = pd_mono_ns(), due = sent < n ? t0 + (int64_t)((double)sent / rate * 1e9) : INT64_MAX;
        need(now < late, "not all requests were answered");
        if (due <= now) {
            need(sent - back < IN_FLIGHT, "the set does not keep up");
            stamps[sent].sent = pd_mono_ns();
            need(send(client[sent % CLIENTS].fd, next.p, next.n, MSG_NOSIGNAL) == (ssize_t)next.n, "cannot write to the router");
            pd_buf_free(&next);
            ids[sent % TOKENS] = (int32_t)(sent % 30000);       /* each prompt is another */
            next = record_of(++sent, ids, &e);
            continue;
        }
        struct timespec wait = { 0, due == INT64_MAX ? 100000000 : due - now };
        if (ppoll(fds, CLIENTS, &wait, NULL) > 0)
            for (int i = 0; i < CLIENTS; i++)
                if (fds[i].revents)
                    back += drink(&client[i]);
    }
    pd_buf_free(&next);
    int64_t end = 0;
    for (int64_t i = 0; i < n; i++) {
        const struct stamp *s = &stamps[i];
        need(s->sent && s->d_in && s->p_in && s->out && s->back, "a stamp is missing");
        out[i] = (double)((s->d_in > s->p_in ? s->d_in : s->p_in) - s->sent + s->back - s->out) / 1e3;
        end = s->back > end ? s->back : end;
    }
    return (double)n / ((double)(end - t0) / 1e9);
}

static void row(const char *name, double value, const char *unit, double goal, int64_t n)
{
    char g[40] = "null";
    if (goal > 0)
        snprintf(g, sizeof g, "%g", goal);
    printf("{\"name\":\"%s\",\"value\":%.6g,\"unit\":\"%s\",\"goal\":%s,\"pass\":%s,\"n\":%lld}\n", name, value, unit, g, goal > 0 ? value < goal ? "true" : "false" : "null", (long long)n);
}

int main(int argc, char **argv)
{
    char bin[500], listen[310], p0[310], d0[310], route[300];
    if (argc < 4 || strcmp(argv[1], "route")) {
        fprintf(stderr, "usage: bench_serve route BIN DIR [RATE [N [RUNS]]]\n");
        return 2;
    }
    double rate = argc > 4 ? atof(argv[4]) : 1000;
    int64_t n = argc > 5 ? atoll(argv[5]) : 10000;
    int runs = argc > 6 ? atoi(argv[6]) : 5, status;
    need(rate > 0 && n > 0 && n <= MOST && runs > 0, "RATE, N and RUNS must be above 0, N at most 1048576");
    const char *dir = argv[3];
    snprintf(bin, sizeof bin, "%s/pd-route", argv[2]);
    snprintf(route, sizeof route, "%s/route", dir);
    snprintf(listen, sizeof listen, "unix:%s", route);
    snprintf(p0, sizeof p0, "unix:%s/p0", dir);
    snprintf(d0, sizeof d0, "unix:%s/d0", dir);
    stamps = mmap(NULL, MOST * sizeof *stamps, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    double *us = calloc((size_t)n + WARM, sizeof *us), best[4] = { 0 }, got = 0;
    need(stamps != MAP_FAILED && us, "out of memory");
    pid_t pid[3] = { fork(), 0, 0 };
    if (!pid[0])
        fake(false, dir);
    if (!(pid[1] = fork()))
        fake(true, dir);
    if (!(pid[2] = fork())) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execl(bin, "pd-route", "--listen", listen, "--worker", p0, "--worker", d0, "--policy", "fixed", "-q", NULL);
        fprintf(stderr, "bench_serve: %s: %s\n", bin, strerror(errno));
        _exit(127);
    }
    dial_all(route);
    load(WARM, rate / 4, us);
    for (int k = 0; k < runs; k++) {
        double r = load(n, rate, us);
        qsort(us, (size_t)n, sizeof *us, by_value);
        double at[4] = { us[n / 2], us[n * 99 / 100], us[n * 999 / 1000], us[n - 1] };
        fprintf(stderr, "run %d: %.0f requests/s, added P50 %.0f P99 %.0f P99.9 %.0f max %.0f us\n", k + 1, r, at[0], at[1], at[2], at[3]);
        if (getenv("PD_LEGS")) {
            leg("client to decode worker", n, us, of_d);
            leg("then to prefill worker", n, us, of_p);
            leg("KV, between the fakes", n, us, of_kv);
            leg("decode worker to client", n, us, of_back);
        }
        if (!k || at[1] < best[1]) {
            memcpy(best, at, sizeof best);
            got = r;
        }
    }
    row("route.added_us.p50", best[0], "us", 0, n);
    row("route.added_us.p99", best[1], "us", 300, n);
    row("route.added_us.p999", best[2], "us", 0, n);
    row("route.rate", got, "1/s", 0, n);
    free(us);
    kill(pid[2], SIGTERM);
    need(waitpid(pid[2], &status, 0) == pid[2] && WIFEXITED(status) && !WEXITSTATUS(status), "the router did not end well");
    kill(pid[0], SIGTERM);
    kill(pid[1], SIGTERM);
    while (wait(NULL) > 0) {}
    return 0;
}
