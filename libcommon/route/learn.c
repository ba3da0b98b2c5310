#include "learn.h"
#include <stdio.h>
#include "../base/hash.h"
#include "cost.h"

/* Guesses of a machine that nobody has measured, us: what matters is their order of magnitude, as the first steps correct them. */
static const double guess_prefill[] = { 2000, 500, 0.02 }, typical_prefill[] = { 1, 512, 200000 }, guess_decode[] = { 10000, 1000, 1 }, typical_decode[] = { 1, 4, 4096 },
    guess_queue[] = { 2000, 1, 0.5 }, typical_queue[] = { 1, 500000, 20000 },
    guess_beside[] = { 0, 1 }, typical_beside[] = { 1, 50000 }, guess_transfer[] = { 1000, 0.001 }, typical_transfer[] = { 1, 4e6 }, guess_sync[] = { 5000 }, one[] = { 1 };
static const double prefill_edge[] = { 128, 512, 2048 }, decode_edge[] = { 1.5, 4.5, 16.5 }, queue_edge[] = { 0.5, 100000, 1000000 }, beside_edge[] = { 20000, 100000, 500000 }, bytes_edge[] = { 262144, 4194304, 67108864 },
    no_edge[] = { 1e300, 1e300, 1e300 };
enum { SUM_LEAST = 100, SUM_MOST = 10000 };       /* permille */
enum { STEP_TOKENS = 256, LENGTH_WARM = 20 };   /* of a prefill between decode steps, about */

void pd_learn_free(struct pd_learn *l)
{
    pd_free(l->class_);
    pd_free(l->path);
    for (int i = 0; i < PD_LEARN_LENGTHS * PD_LEARN_LIMITS; i++)
        pd_free((&l->length[0][0])[i]);
    *l = (struct pd_learn){ 0 };
}

/* ---- places ---- */

/* A profile's rows are another machine's day, or this one's of yesterday: its coefficients are where it starts, and the band is its own. */
static void open_term(struct pd_term *t, const struct pd_profile_class *c, enum pd_profile_term term, int k, const double *guess, const double *typical,
                      const double *edge, int64_t now_us)
{
    if (c && c->fit[term].k == k)
        pd_profile_teach(c, term, &c->fit[term], edge, now_us, t);
    else
        pd_term_open(t, k, guess, typical, edge);
}

/* What a worker does not say is as any. */
static const struct pd_profile_class *measured(const struct pd_learn *l, const struct pd_worker_rec *w)
{
    char cpu[32];
    if (!l->profile || w->cpu.n >= sizeof cpu)
        return NULL;
    snprintf(cpu, sizeof cpu, "%.*s", (int)w->cpu.n, w->cpu.p ? w->cpu.p : "");
    return pd_profile_class(l->profile, w->model_revision, w->cpu.n ? cpu : NULL, (int)w->threads);
}

int pd_learn_class_of(struct pd_learn *l, const struct pd_worker_rec *w, uint32_t *out, struct pd_err *e)
{
    uint64_t key = pd_xxh3(w->numerics.p ? w->numerics.p : "", w->numerics.n, pd_xxh3(w->fp_sha, sizeof w->fp_sha, w->threads));
    key = w->cpu.n ? pd_xxh3(w->cpu.p, w->cpu.n, key) : key;
    uint32_t i = 0;
    while (i < l->n_classes && l->class_[i].key != key)
        i++;
    *out = i < PD_LEARN_CLASSES ? i : PD_LEARN_CLASSES - 1;
    if (i < l->n_classes || i == PD_LEARN_CLASSES)
        return 0;
    struct pd_learn_class *more = pd_realloc(l->class_, i + 1, sizeof *more, "what was learnt", e);
    if (!more)
        return PD_ENOMEM;
    l->class_ = more;
    l->n_classes++;
    struct pd_learn_class *c = &more[i];
    const struct pd_profile_class *p = measured(l, w);
    *c = (struct pd_learn_class){ .key = key };
    open_term(&c->prefill, p, PD_PT_PREFILL, 3, guess_prefill, typical_prefill, prefill_edge, 0);
    open_term(&c->decode, p, PD_PT_DECODE, 3, guess_decode, typical_decode, decode_edge, 0);
    pd_term_open(&c->queue, 3, guess_queue, typical_queue, queue_edge);
    pd_term_open(&c->interference, 2, guess_beside, typical_beside, beside_edge);
    return 0;
}

const char *pd_learn_lacks(struct pd_learn *l, const struct pd_worker_rec *w, char *out, size_t cap)
{
    const struct pd_profile_class *p = measured(l, w);
    char threads[32] = "";
    uint32_t at;
    out[0] = 0;
    if (!l->profile || (p && p->fit[PD_PT_PREFILL].k && p->fit[PD_PT_DECODE].k) || pd_learn_class_of(l, w, &at, NULL) || l->class_[at].told)
        return out;
    l->class_[at].told = true;
    if (w->threads)
        snprintf(threads, sizeof threads, ", %u threads", w->threads);
    snprintf(out, cap, "the profile has no %sclass of %.*s%s%.*s%s: %s begins with a guess that learns (pd-bench calibrate measures one there)",
             !p ? "" : p->fit[PD_PT_DECODE].k ? "prefill in its " : p->fit[PD_PT_PREFILL].k ? "decode in its " : "prefill and decode in its ",
             (int)(w->model_revision.n < 80 ? w->model_revision.n : 80), w->model_revision.p ? w->model_revision.p : "", w->cpu.n ? ", " : "",
             (int)(w->cpu.n < 31 ? w->cpu.n : 31), w->cpu.p ? w->cpu.p : "", threads, !p ? "what work costs there" : "it");
    return out;
}

int pd_learn_path_of(struct pd_learn *l, struct pd_str from, struct pd_str to, const char *kind, uint32_t *out, struct pd_err *e)
{
    uint64_t key = pd_xxh3(from.p ? from.p : "", from.n, pd_xxh3(to.p ? to.p : "", to.n, 0));
    uint32_t i = 0;
    while (i < l->n_paths && l->path[i].key != key)
        i++;
    *out = i;
    if (i < l->n_paths)
        return 0;
    if (i == PD_LEARN_PATHS)    /* what one of two paths took is no word on the other: its class tells */
        return pd_fail(e, PD_ENOMEM, "more than %d paths: no more are learnt one by one", PD_LEARN_PATHS);
    struct pd_learn_path *more = pd_realloc(l->path, i + 1, sizeof *more, "what was learnt", e);
    if (!more)
        return PD_ENOMEM;
    l->path = more;
    l->n_paths++;
    struct pd_learn_path *x = &more[i];
    const struct pd_profile_path *p = NULL;
    kind = kind ? kind : from.n == to.n && (!from.n || !memcmp(from.p, to.p, from.n)) ? "local" : "cross";
    for (uint32_t k = 0; l->profile && k < l->profile->n_paths && !p; k++)      /* the first that fits: what scheme a pair agrees on is not known before */
        p = !l->profile->path[k].class_.p || pd_str_eq(l->profile->path[k].class_, kind) ? &l->profile->path[k] : NULL;
    *x = (struct pd_learn_path){ .key = key };
    if (p && p->fit.k == 2)
        pd_profile_teach(NULL, PD_PT_TERMS, &p->fit, bytes_edge, 0, &x->transfer);
    else
        pd_term_open(&x->transfer, 2, guess_transfer, typical_transfer, bytes_edge);
    pd_term_open(&x->sync, 1, guess_sync, one, no_edge);
    return 0;
}

/* ---- quantities ---- */

static struct pd_spread spread(struct pd_cost c)
{
    return (struct pd_spread){ pd_us_of(c.p95 > c.p50 ? c.p95 : c.p50), pd_us_of(c.p50), (c.cold ? PD_SPREAD_COLD : 0) | (c.stale ? PD_SPREAD_STALE : 0) };
}

static struct pd_spread expect(const struct pd_term *t, const double *x, int64_t now_us) { return spread(pd_term_cost(t, x, now_us, PD_LEARN_STALE_US)); }

static void of_prefill(double n, double context, double x[3])
{
    x[0] = 1;
    x[1] = n;
    x[2] = n * (context + n / 2);
}

static void of_decode(double seqs, double kv, double x[3])
{
    x[0] = 1;
    x[1] = seqs;
    x[2] = kv;
}

static double step_us(const struct pd_learn_class *c, uint32_t seqs, uint64_t kv)
{
    double x[3];
    of_decode(seqs, (double)kv, x);
    return c->decode.fit.theta[0] * x[0] + c->decode.fit.theta[1] * x[1] + c->decode.fit.theta[2] * x[2];
}

static void of_beside(const struct pd_learn_class *c, uint64_t tokens, uint32_t seqs, uint64_t kv, double x[2])
{
    x[0] = 1;
    x[1] = (double)((tokens + STEP_TOKENS - 1) / STEP_TOKENS) * step_us(c, seqs, kv);
}

/* Prompts one after the other, as if all were of one length. */
static void of_queue(const struct pd_learn_class *c, struct pd_ahead a, double x[3])
{
    const double *f = c->prefill.fit.theta;
    double n = a.runs ? a.runs : 1, each = (double)a.tokens / n;
    x[0] = 1;
    x[1] = a.tokens ? n * (f[0] + each * (f[1] + f[2] * each / 2)) : 0;
    x[2] = a.seqs ? step_us(c, a.seqs, a.kv_tokens) : 0;
}

/* ---- what is expected ---- */

struct pd_spread pd_learn_prefill(const struct pd_learn *l, uint32_t cls, uint64_t tokens, uint64_t context, int64_t now_us)
{
    double x[3];
    of_prefill(tokens ? (double)tokens : 1, (double)context, x);        /* the last token is always computed */
    return expect(&l->class_[cls].prefill, x, now_us);
}

struct pd_spread pd_learn_queue(const struct pd_learn *l, uint32_t cls, struct pd_ahead a, int64_t now_us)
{
    double x[3];
    of_queue(&l->class_[cls], a, x);
    return expect(&l->class_[cls].queue, x, now_us);
}

struct pd_spread pd_learn_tpot(const struct pd_learn *l, uint32_t cls, uint32_t seqs, uint64_t kv_tokens, int64_t now_us)
{
    double x[3];
    of_decode(seqs, (double)kv_tokens, x);
    return expect(&l->class_[cls].decode, x, now_us);
}

struct pd_spread pd_learn_interference(const struct pd_learn *l, uint32_t cls, uint64_t tokens, uint32_t seqs, uint64_t kv_tokens, int64_t now_us)
{
    double x[2];
    if (!seqs)
        return (struct pd_spread){ 0, 0, 0 };
    of_beside(&l->class_[cls], tokens, seqs, kv_tokens, x);
    return expect(&l->class_[cls].interference, x, now_us);
}

int64_t pd_learn_itl(const struct pd_learn *l, uint32_t cls, uint64_t kv_tokens)
{
    const struct pd_fit *f = &l->class_[cls].decode.fit;
    return pd_us_of(f->theta[1] + f->theta[2] * (double)kv_tokens);
}

void pd_learn_ways(const struct pd_learn *l, uint32_t path, uint64_t bytes, int64_t now_us, struct pd_route_path *x)
{
    const struct pd_learn_path *p = &l->path[path];
    const double q[] = { 1, (double)(bytes ? bytes : 1) };
    struct pd_cost c = pd_term_cost(&p->transfer, q, now_us, PD_LEARN_STALE_US);
    double fit = p->transfer.fit.theta[0] + p->transfer.fit.theta[1] * q[1], lo = fit > 0 ? c.p50 / fit : 1, hi = fit > 0 ? c.p95 / fit : 1;
    uint32_t marks = spread(c).marks;
    x->latency = (struct pd_spread){ pd_us_of(p->transfer.fit.theta[0] * hi), pd_us_of(p->transfer.fit.theta[0] * lo), marks };
    x->kib_ns = (struct pd_spread){ pd_us_of(p->transfer.fit.theta[1] * hi * 1024e3), pd_us_of(p->transfer.fit.theta[1] * lo * 1024e3), marks };
    x->sync = expect(&p->sync, one, now_us);
    x->active = p->active;
    x->age_us = p->used_us && now_us > p->used_us ? now_us - p->used_us : 0;
}

uint32_t pd_learn_sum(const struct pd_learn *l, bool remote, int of)
{
    const struct pd_band *b = &l->sum[remote][of];
    double v = 1000.0 * b->q95;
    return !pd_band_warm(b) ? 0 : v < SUM_LEAST ? SUM_LEAST : v > SUM_MOST ? SUM_MOST : (uint32_t)(v + 0.5);
}

static int length_of(uint32_t prompt_tokens)
{
    int b = 0;
    for (prompt_tokens /= 64; prompt_tokens && b < PD_LEARN_LENGTHS - 1; prompt_tokens /= 4)
        b++;
    return b;
}

static int limit_of(uint32_t max_tokens)
{
    int b = 0;
    for (max_tokens /= 2; max_tokens && b < PD_LEARN_LIMITS - 1; max_tokens /= 2)
        b++;
    return b;
}

/* Before there are enough: half of what it may, and all of it. */
void pd_learn_length(const struct pd_learn *l, uint32_t prompt_tokens, uint32_t max_tokens, uint32_t *p50, uint32_t *p95)
{
    const struct pd_lengths *o = l->length[length_of(prompt_tokens)][limit_of(max_tokens)];
    uint32_t n = !o ? 0 : o->n < PD_LEARN_KEEPS ? o->n : PD_LEARN_KEEPS;
    *p50 = (max_tokens + 1) / 2;
    *p95 = max_tokens;
    if (n >= LENGTH_WARM) {
        *p50 = o->sorted[n / 2];
        *p95 = o->sorted[n * 95 / 100];
    }
    *p50 = *p50 > max_tokens ? max_tokens : *p50;
    *p95 = *p95 > max_tokens ? max_tokens : *p95;
}

/* ---- what it was ---- */

void pd_learned_queue(struct pd_learn *l, uint32_t cls, struct pd_ahead a, int64_t us, int64_t now_us)
{
    double x[3];
    of_queue(&l->class_[cls], a, x);
    pd_term_learn(&l->class_[cls].queue, x, us > 0 ? (double)us : 1, now_us);
}

void pd_learned_prefill(struct pd_learn *l, uint32_t cls, uint64_t tokens, uint64_t context, int64_t us, int64_t now_us)
{
    double x[3];
    of_prefill(tokens ? (double)tokens : 1, (double)context, x);
    pd_term_learn(&l->class_[cls].prefill, x, (double)us, now_us);
}

void pd_learned_tpot(struct pd_learn *l, uint32_t cls, uint32_t seqs, uint64_t kv_tokens, int64_t us, int64_t now_us)
{
    double x[3];
    of_decode(seqs, (double)kv_tokens, x);
    pd_term_learn(&l->class_[cls].decode, x, (double)us, now_us);
}

void pd_learned_interference(struct pd_learn *l, uint32_t cls, uint64_t tokens, uint32_t seqs, uint64_t kv_tokens, int64_t us, int64_t now_us)
{
    double x[2];
    if (!seqs)
        return;
    of_beside(&l->class_[cls], tokens, seqs, kv_tokens, x);
    pd_term_learn(&l->class_[cls].interference, x, us > 0 ? (double)us : 1, now_us);
}

void pd_learned_transfer(struct pd_learn *l, uint32_t path, uint64_t bytes, uint32_t shared, int64_t us, int64_t sync_us, int64_t now_us)
{
    struct pd_learn_path *p = &l->path[path];
    const double x[] = { 1, (double)bytes * (1 + (double)shared) };
    p->used_us = now_us;
    if (bytes && us > 0)
        pd_term_learn(&p->transfer, x, (double)us, now_us);
    pd_term_learn(&p->sync, one, sync_us > 0 ? (double)sync_us : 1, now_us);
}

void pd_learned_sum(struct pd_learn *l, bool remote, int of, struct pd_spread told, uint32_t permille, int64_t us)
{
    double wide = (double)(told.p95 - told.p50) * 1000 / (permille ? permille : 1000);
    if (us >= 0 && wide >= 1 && !(told.marks & PD_SPREAD_COLD))
        pd_band_learn(&l->sum[remote][of], (float)((double)(us - told.p50) / wide));
}

static uint32_t place(const struct pd_lengths *o, uint32_t n, uint32_t v)
{
    uint32_t i = 0;
    while (i < n && o->sorted[i] < v)
        i++;
    return i;
}

void pd_learned_length(struct pd_learn *l, uint32_t prompt_tokens, uint32_t max_tokens, uint32_t out)
{
    struct pd_lengths **at = &l->length[length_of(prompt_tokens)][limit_of(max_tokens)], *o = *at ? *at : pd_calloc(1, sizeof *o, "lengths", NULL);
    if (!(*at = o))
        return;
    uint32_t n = o->n < PD_LEARN_KEEPS ? o->n : PD_LEARN_KEEPS, to;
    if (n == PD_LEARN_KEEPS) {
        to = place(o, n, o->ring[o->n % PD_LEARN_KEEPS]);
        memmove(o->sorted + to, o->sorted + to + 1, (--n - to) * sizeof *o->sorted);
    }
    to = place(o, n, out);
    memmove(o->sorted + to + 1, o->sorted + to, (n - to) * sizeof *o->sorted);
    o->sorted[to] = out;
    o->ring[o->n++ % PD_LEARN_KEEPS] = out;
}
