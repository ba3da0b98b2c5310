#include "calibrate.h"
#include <fcntl.h>
#include <math.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "../base/log.h"
#include "../base/stop.h"
#include "../engine/measure.h"
#include "../engine/options.h"
#include "../route/fit.h"
#include "../route/profile.h"
#include "probe.h"
#include "sender.h"

static char *note;
static int reps, quick, no_paths;
struct poptOption pd_calibrate_options[] = {
    { "reps", '\0', POPT_ARG_INT, &reps, 0, "timed repetitions of each step (default 3; the median counts)", "N" },
    { "quick", '\0', POPT_ARG_NONE, &quick, 0, "few and short steps: seconds, for a test", NULL },
    { "no-paths", '\0', POPT_ARG_NONE, &no_paths, 0, "leave the transports out", NULL },
    { "note", '\0', POPT_ARG_STRING, &note, 0, "conditions to be written beside the figures (a commit, what else ran)", "TEXT" },
    POPT_TABLEEND
};

/* Rows [n][cols] of one cost, the last column us, and what was fitted to them. */
struct rows { double *v; uint32_t n, cols; size_t cap; double theta[PD_FIT_MOST], worst, p95; bool fitted; };
enum { PATHS = 3 };
static const double FAR = 0.2;          /* of a row from its fit */
struct measured {
    struct pd_runtime rt;
    struct rows term[PD_PT_TERMS];
    struct { const char *scheme; struct rows rows; } path[PATHS];
};

static int add_row(struct rows *r, uint32_t cols, const double *v, struct pd_err *e)
{
    if (((size_t)r->n + 1) * cols > r->cap) {
        size_t cap = r->cap ? 2 * r->cap : 64 * cols;
        double *more = pd_realloc(r->v, cap, sizeof *more, "rows", e);
        if (!more)
            return PD_ENOMEM;
        r->v = more;
        r->cap = cap;
    }
    memcpy(r->v + (size_t)r->n * cols, v, cols * sizeof *v);
    r->cols = cols;
    r->n++;
    return 0;
}

/* ---- paths ---- */

static void take_kv(const char *in, const struct pd_net *net, size_t max_record)
{
    struct pd_sender_opts o = { .in = in, .via = "shm,tcp,inline", .net = net, .max_record = max_record, .worker = "calibrate" };
    struct pd_err e;
    int status = 0, null = open("/dev/null", O_WRONLY);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(null, STDOUT_FILENO);
    if (pd_log_verbose() == 0)
        dup2(null, STDERR_FILENO);
    _exit(pd_sender_run(&o, &status, &e) < 0 || status);
}

/* A port that nobody listens on. */
static int free_port(struct pd_err *e)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t n = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), rc = fd < 0 ? -1 : bind(fd, (struct sockaddr *)&a, n) || getsockname(fd, (struct sockaddr *)&a, &n);
    if (rc)
        pd_fail_sys(e, "a port for the measurement of tcp");
    if (fd >= 0)
        close(fd);
    return rc ? -1 : ntohs(a.sin_port);
}

static int one_path(struct measured *m, const char *dial, const char *listen, const char *via, const struct pd_net *net, struct pd_err *e)
{
    static struct pd_probe p;
    struct pd_probe_opts o = { .at = dial, .via = via, .worker = "calibrate", .net = net, .max_record = 64 << 20, .max_bytes = quick ? 1 << 20 : 64 << 20 };
    pid_t child = fork();
    if (child == 0)
        take_kv(listen, net, o.max_record);
    int rc = child < 0 ? pd_fail_sys(e, "fork") : pd_probe_run(&o, &p, e);
    if (child > 0 && rc)
        kill(child, SIGKILL);
    if (child > 0)
        waitpid(child, NULL, 0);
    for (uint32_t i = 0; rc == 0 && i < p.n_rows; i++)
        for (int k = 0; k < PATHS && p.row[i].p50_us > 0; k++) {
            /* inline is measured over the Unix socket alone, where nothing better is a reason for it */
            bool here = !strcmp(p.row[i].scheme, m->path[k].scheme) && (strcmp(p.row[i].scheme, "inline") || *dial == 'u');
            if (here && rc == 0)
                rc = add_row(&m->path[k].rows, 2, (double[]){ (double)p.row[i].bytes, (double)p.row[i].p50_us }, e);
        }
    return rc;
}

static int paths(struct measured *m, struct pd_err *e)
{
    char dir[] = "/tmp/pd-calibrate-XXXXXX", dial[64], listen[64];
    const struct pd_net *net = pd_net_cli(e);
    if (!net)
        return e->code;
    if (!mkdtemp(dir))
        return pd_fail_sys(e, "%s", dir);
    snprintf(dial, sizeof dial, "unix:%s/s", dir);
    snprintf(listen, sizeof listen, "unix-listen:%s/s", dir);
    int rc = one_path(m, dial, listen, "shm,inline", net, e), port = rc == 0 ? free_port(e) : -1;
    rc = rc == 0 && port < 0 ? e->code : rc;
    unlink(dial + 5);
    rmdir(dir);
    snprintf(dial, sizeof dial, "tcp:127.0.0.1:%d", port);
    snprintf(listen, sizeof listen, "tcp-listen:127.0.0.1:%d", port);
    rc = rc ? rc : one_path(m, dial, listen, "tcp,inline", net, e);
    return rc < 0 ? pd_err_prefix(e, "paths (--no-paths leaves them out)") : rc;
}

/* ---- the engine ---- */

/* Is there room for it in the model's context, and in half the pool? */
static bool fits(const struct measured *m, const struct pd_work *w)
{
    uint64_t depth = w->batch ? w->kv / w->batch + 1 : 0, ctx = (uint64_t)m->rt.model->cfg.n_ctx, bs = (uint64_t)pd_pool_geom(m->rt.pool)->block_size;
    uint64_t one = w->n + w->context > depth ? w->n + w->context : depth, blocks = (one + bs - 1) / bs * (w->batch + (w->n > 0));
    return one <= ctx && blocks <= pd_pool_stats(m->rt.pool).max / 2;
}

static int step(struct measured *m, enum pd_profile_term term, const struct pd_work *w, struct pd_err *e)
{
    double us;
    if (pd_stop_level())
        return pd_fail(e, PD_ECANCEL, "interrupted");
    if (!fits(m, w))
        return 0;
    pd_progress("%s: n %u, context %u, batch %u, kv %u", pd_profile_term_names[term], w->n, w->context, w->batch, w->kv);
    int rc = pd_measure_work(&m->rt, w, reps, &us, e);
    if (rc)
        return rc;
    if (term == PD_PT_DECODE)
        return add_row(&m->term[term], 3, (double[]){ w->batch, w->kv, us }, e);
    if (term == PD_PT_PREFILL)
        return add_row(&m->term[term], 3, (double[]){ w->n, w->context, us }, e);
    return add_row(&m->term[term], 5, (double[]){ w->n, w->context, w->batch, w->kv, us }, e);
}

/* Lengths before and depths are parts of the context, of 8192 tokens at the most. */
static int engine(struct measured *m, struct pd_err *e)
{
    static const uint32_t ns[] = { 1024, 512, 256, 128, 64, 16 }, batches[] = { 1, 2, 4, 8, 16, 32 }, chunks[] = { 16, 64, 256 }, mixes[] = { 2, 8, 24 };
    enum { MOST_KV = 32768, MOST_CONTEXT = 8192 };
    uint32_t ctx = m->rt.model->cfg.n_ctx < MOST_CONTEXT ? (uint32_t)m->rt.model->cfg.n_ctx : MOST_CONTEXT;
    const uint32_t contexts[] = { 0, ctx / 4, ctx / 8, ctx / 2 }, depths[] = { ctx / 32, ctx / 8, ctx / 256, ctx / 2 };
    double warm;
    int rc = pd_measure_work(&m->rt, &(struct pd_work){ .n = ctx < 128 ? ctx : 128 }, reps, &warm, e);
    for (int i = quick ? 3 : 0; rc == 0 && i < 6; i++)
        for (int c = 0; rc == 0 && c < (quick ? 2 : 4); c++)
            rc = step(m, PD_PT_PREFILL, &(struct pd_work){ .n = ns[i], .context = contexts[c] }, e);
    for (int b = 0; rc == 0 && b < (quick ? 4 : 6); b++)
        for (int d = 0; rc == 0 && d < (quick ? 2 : 4); d++)
            if (depths[d] && batches[b] * depths[d] <= MOST_KV)
                rc = step(m, PD_PT_DECODE, &(struct pd_work){ .batch = batches[b], .kv = batches[b] * depths[d] }, e);
    for (int n = 0; rc == 0 && n < (quick ? 2 : 3); n++)
        for (int c = 0; rc == 0 && c < 2; c++)
            for (int b = 0; rc == 0 && b < (quick ? 2 : 3); b++)
                for (int d = 0; rc == 0 && d < (quick ? 1 : 2); d++)
                    if (chunks[n] <= m->rt.chunk && mixes[b] * depths[d] <= MOST_KV)
                        rc = step(m, PD_PT_MIXED, &(struct pd_work){ chunks[n], contexts[c], mixes[b], mixes[b] * depths[d] }, e);
    for (uint32_t tokens = 64; rc == 0 && tokens <= (quick ? 1024u : 8192u); tokens *= quick ? 4 : 2) {
        double bytes, us[2];
        pd_progress("pack: %u tokens", tokens);
        rc = pd_measure_pack(pd_pool_geom(m->rt.pool), tokens, reps, &bytes, &us[0], &us[1], e);
        rc = rc ? rc : add_row(&m->term[PD_PT_PACK], 2, (double[]){ bytes, us[0] }, e);
        rc = rc ? rc : add_row(&m->term[PD_PT_UNPACK], 2, (double[]){ bytes, us[1] }, e);
    }
    pd_progress_end();
    return rc;
}

/* ---- fits ---- */

static int fit(struct rows *r, int k, const struct pd_profile_class *c, enum pd_profile_term term, struct pd_err *e)
{
    if (r->n < (uint32_t)k)
        return 0;               /* a small context has no room for more: it is left out */
    double *x = pd_calloc((size_t)r->n * (size_t)k, sizeof *x, "fit", e), *y = pd_calloc(r->n, sizeof *y, "fit", e), q[PD_FIT_MOST];
    int rc = x && y ? 0 : PD_ENOMEM;
    for (uint32_t i = 0; rc == 0 && i < r->n; i++) {
        pd_profile_x(c, term, r->v + (size_t)i * r->cols, q);
        memcpy(x + (size_t)i * (size_t)k, q, (size_t)k * sizeof *q);
        y[i] = r->v[(size_t)i * r->cols + r->cols - 1];
    }
    rc = rc ? rc : pd_fit_rows(k, r->n, x, y, r->theta, &r->worst, &r->p95, e);
    r->fitted = rc == 0;
    pd_free(x);
    pd_free(y);
    return rc;
}

static int fits_of_all(struct measured *m, struct pd_err *e)
{
    static const int coefs[] = { 3, 3, 3, 2, 2 };
    struct pd_profile_class c = { 0 };          /* for mixed: the two others */
    int rc = 0;
    for (int t = 0; rc == 0 && t < PD_PT_TERMS; t++) {
        if (t == PD_PT_MIXED && !(m->term[PD_PT_PREFILL].fitted && m->term[PD_PT_DECODE].fitted))
            continue;
        rc = fit(&m->term[t], coefs[t], &c, (enum pd_profile_term)t, e);
        c.fit[t].k = coefs[t];
        memcpy(c.fit[t].theta, m->term[t].theta, sizeof c.fit[t].theta);
    }
    for (int k = 0; rc == 0 && k < PATHS; k++)
        rc = fit(&m->path[k].rows, 2, &c, PD_PT_PACK, e);
    return rc;
}

/* Whatever else the machine does only adds time: steps that are far from their fit are measured once more, and the lesser time counts. */
static int look_again(struct measured *m, struct pd_err *e)
{
    struct pd_profile_class c = { 0 };
    double x[PD_FIT_MOST], us;
    int rc = 0;
    for (int t = PD_PT_PREFILL; t <= PD_PT_MIXED; t++) {
        struct rows *r = &m->term[t];
        c.fit[t].k = 3;
        memcpy(c.fit[t].theta, r->theta, sizeof c.fit[t].theta);
        for (uint32_t i = 0; rc == 0 && r->fitted && i < r->n; i++) {
            double *v = r->v + (size_t)i * r->cols, *took = v + r->cols - 1;
            pd_profile_x(&c, (enum pd_profile_term)t, v, x);
            if (fabs(*took / pd_profile_cost(&c.fit[t], x) - 1) <= FAR || pd_stop_level())
                continue;
            struct pd_work w = t == PD_PT_DECODE ? (struct pd_work){ .batch = (uint32_t)v[0], .kv = (uint32_t)v[1] } :
                               (struct pd_work){ (uint32_t)v[0], (uint32_t)v[1], t == PD_PT_MIXED ? (uint32_t)v[2] : 0, t == PD_PT_MIXED ? (uint32_t)v[3] : 0 };
            pd_progress("%s: n %u, context %u, batch %u, kv %u, again", pd_profile_term_names[t], w.n, w.context, w.batch, w.kv);
            if ((rc = pd_measure_work(&m->rt, &w, reps, &us, e)) == 0 && us < *took)
                *took = us;
        }
    }
    pd_progress_end();
    return rc ? rc : fits_of_all(m, e);
}

/* ---- the file ---- */

static int put_cost(const struct rows *r, int k, const char *indent, struct pd_buf *b, struct pd_err *e)
{
    int rc = pd_buf_printf(b, e, "\"theta\": [%.9g, %.9g%s", r->theta[0], r->theta[1], k == 2 ? "]" : "");
    if (rc == 0 && k == 3)
        rc = pd_buf_printf(b, e, ", %.9g]", r->theta[2]);
    rc = rc ? rc : pd_buf_printf(b, e, ", \"p95\": %.6g, \"worst\": %.6g,\n%s \"rows\": [", r->p95, r->worst, indent);
    for (uint32_t i = 0; rc == 0 && i < r->n; i++)
        for (uint32_t c = 0; rc == 0 && c < r->cols; c++)
            rc = pd_buf_printf(b, e, "%s%.9g%s", c ? ", " : i ? ", [" : "[", r->v[(size_t)i * r->cols + c], c + 1 == r->cols ? "]" : "");
    return rc ? rc : pd_buf_printf(b, e, "]");
}

/* A JSON string, of text that may hold anything. */
static int put_text(const char *key, const char *s, struct pd_buf *b, struct pd_err *e)
{
    int rc = pd_buf_printf(b, e, "\"%s\": \"", key);
    for (; rc == 0 && *s; s++)
        rc = *s == '"' || *s == '\\' ? pd_buf_printf(b, e, "\\%c", *s) : (uint8_t)*s < 0x20 ? pd_buf_printf(b, e, "\\u%04x", *s) : pd_buf_add(b, s, 1, e);
    return rc ? rc : pd_buf_printf(b, e, "\"");
}

static int write_profile(const struct measured *m, struct pd_buf *b, struct pd_err *e)
{
    const struct pd_pool_geom *g = pd_pool_geom(m->rt.pool);
    char host[64] = "host", when[32];
    time_t now = time(NULL);
    struct tm tm;
    gethostname(host, sizeof host - 1);
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &tm));
    int rc = pd_buf_printf(b, e, "{\"pd\": \"profile\", \"v\": 1,\n \"made\": {\"by\": \"pd-bench calibrate %s\", \"at\": \"%s\", \"reps\": %d, \"quick\": %s, ", PD_VERSION, when, reps,
                           quick ? "true" : "false");
    rc = rc ? rc : put_text("host", host, b, e);
    if (rc == 0 && note)
        rc = (rc = pd_buf_printf(b, e, ", ")) ? rc : put_text("note", note, b, e);
    rc = rc ? rc : pd_buf_printf(b, e, "},\n \"classes\": [\n  {");
    rc = rc ? rc : put_text("model", m->rt.model->revision, b, e);
    rc = rc ? rc : pd_buf_printf(b, e, ", \"cpu\": \"%s\", \"threads\": %d, \"weights\": \"%s\", \"kv_dtype\": \"%s\", \"block_size\": %d, \"chunk\": %u, \"kv_token_bytes\": %llu",
                                 m->rt.k->name, pd_threads_count(m->rt.threads), m->rt.model->quant, pd_kv_dtype_name(g->dtype), g->block_size, m->rt.chunk,
                                 2ull * (unsigned)g->layers * (unsigned)g->kv_heads * (unsigned)g->head_dim * pd_dtype_size(g->dtype));
    for (int t = 0; rc == 0 && t < PD_PT_TERMS; t++) {
        if (!m->term[t].fitted)
            continue;
        rc = pd_buf_printf(b, e, ",\n   \"%s\": {", pd_profile_term_names[t]);
        rc = rc ? rc : put_cost(&m->term[t], t < PD_PT_PACK ? 3 : 2, "   ", b, e);
        rc = rc ? rc : pd_buf_printf(b, e, "}");
    }
    rc = rc ? rc : pd_buf_printf(b, e, "}],\n \"paths\": [");
    for (int k = 0, n = 0; rc == 0 && k < PATHS; k++) {
        if (!m->path[k].rows.fitted)
            continue;
        rc = pd_buf_printf(b, e, "%s\n  {\"scheme\": \"%s\", \"class\": \"local\", ", n++ ? "," : "", m->path[k].scheme);
        rc = rc ? rc : put_cost(&m->path[k].rows, 2, "  ", b, e);
        rc = rc ? rc : pd_buf_printf(b, e, "}");
    }
    return rc ? rc : pd_buf_printf(b, e, "]}\n");
}

static void tell_one(const char *name, const struct rows *r, int k)
{
    if (r->fitted)
        printf("%-8s n=%-3u theta %.6g %.6g", name, r->n, r->theta[0], r->theta[1]);
    if (r->fitted && k == 3)
        printf(" %.6g", r->theta[2]);
    if (r->fitted)
        printf("   of its rows 95 %% below %.3f x fitted, worst off by %.1f %%\n", r->p95, 100 * r->worst);
    else
        printf("%-8s not measured (%u rows)\n", name, r->n);
}

static int save(const struct measured *m, struct pd_err *e)
{
    struct pd_buf b = { 0 };
    struct pd_profile check;
    struct pd_endpoint out = { .fd = -1 };
    struct pd_wstream *w = NULL;
    const char *to = pd_cli.out ? pd_cli.out : "-";
    int rc = write_profile(m, &b, e);
    if (rc == 0 && (rc = pd_profile_parse((char *)b.p, b.n, "what was measured", &check, e)) == 0)
        pd_profile_free(&check);
    rc = rc ? rc : pd_endpoint_open_out(to, pd_net_cli(e), &out, e);
    rc = rc ? rc : pd_wstream_of(&out, PD_FMT_JSON, to, &w, e);
    rc = rc ? rc : pd_wstream_raw(w, b.p, b.n, e);
    rc = pd_wstream_end(w, &out, rc, e);
    pd_buf_free(&b);
    if (rc || !pd_cli.out || !strcmp(to, "-"))
        return rc;
    for (int t = 0; t < PD_PT_TERMS; t++)
        tell_one(pd_profile_term_names[t], &m->term[t], t < PD_PT_PACK ? 3 : 2);
    for (int k = 0; k < PATHS && !no_paths; k++)
        tell_one(m->path[k].scheme, &m->path[k].rows, 2);
    return fflush(stdout) ? pd_fail_sys(e, "output") : 0;
}

int pd_calibrate_verb(struct pd_err *e)
{
    struct measured m = { .path = { { .scheme = "shm" }, { .scheme = "tcp" }, { .scheme = "inline" } } };
    if (reps < 0 || reps > 32)
        return pd_fail(e, PD_EUSAGE, "--reps: %d is out of range 1 to 32 (example: --reps 5)", reps);
    if (!pd_engine_cli.model)
        return pd_fail(e, PD_EUSAGE, "-m: a model file is needed (example: pd-bench calibrate -m model.gguf -o profile.json)");
    reps = reps ? reps : 3;
    int rc = no_paths ? 0 : paths(&m, e);       /* before there are threads: it forks */
    rc = rc ? rc : pd_engine_open("bench", &m.rt, e);
    rc = rc ? rc : engine(&m, e);
    rc = rc ? rc : fits_of_all(&m, e);
    rc = rc ? rc : look_again(&m, e);
    rc = rc ? rc : save(&m, e);
    for (int t = 0; t < PD_PT_TERMS; t++)
        pd_free(m.term[t].v);
    for (int k = 0; k < PATHS; k++)
        pd_free(m.path[k].rows.v);
    pd_runtime_close(&m.rt);
    return rc;
}
