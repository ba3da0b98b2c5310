/* pd-trace replay: each decision of a log made again from what its record tells: by its own policy, which must give the same bytes, or by another one. */
#include <inttypes.h>
#include <math.h>
#include "../wire/value.h"
#include "choose.h"
#include "history.h"

static const double RARE = 1e-6;          /* of a way that was as rare, one run would drown all others */

struct replay {
    const struct pd_review_opts *o;
    struct pd_history *h;
    struct pd_route_rec *was, *now;
    struct pd_buf out;
    uint64_t read, changed, to[2][4] /* was, now; by enum pd_mode, then nobody */, better, worse, blind;
    double gain_us, ttft_us, better_us, worse_us;
    /* of runs that came as they were decided: all, and those that the other policy would have sent the same way; by 1 over the chance of that choice */
    uint64_t done, alike, drawn;
    double took_us, weight, weighted_us;
};

static double ms(double us) { return us / 1e3; }

/* ---- the same again ---- */

struct difference { char key[160]; struct pd_bin was, now; };

static bool same(struct pd_bin a, struct pd_bin b) { return a.n == b.n && !memcmp(a.p, b.p, a.n); }

/* The first value that is not the same; at: the end of d->key as far as it is known. What is in the one map alone has no other value. */
static bool differs(struct pd_bin a, struct pd_bin b, struct difference *d, size_t at)
{
    enum pd_type t = pd_value_type(a);
    struct pd_iter ia, ib;
    struct pd_str key;
    struct pd_bin x, y;
    if (same(a, b))
        return false;
    d->was = a;
    d->now = b;
    if (t != pd_value_type(b) || at + 1 >= sizeof d->key)
        return true;
    if (t == PD_T_ARRAY && pd_iter_open(&ia, a, t) && pd_iter_open(&ib, b, t)) {
        for (unsigned i = 0;; i++) {
            bool in_a = pd_iter_next(&ia, &x), in_b = pd_iter_next(&ib, &y);
            if (!in_a && !in_b)
                return true;
            int n = snprintf(d->key + at, sizeof d->key - at, "[%u]", i);
            if (in_a && in_b && differs(x, y, d, at + (size_t)n))
                return true;
            if (in_a != in_b) {
                d->was = in_a ? x : (struct pd_bin){ NULL, 0 };
                d->now = in_b ? y : (struct pd_bin){ NULL, 0 };
                return true;
            }
        }
    }
    for (int side = 0; t == PD_T_MAP && side < 2; side++) {
        struct pd_bin from = side ? b : a, other = side ? a : b;
        if (!pd_iter_open(&ia, from, t))
            return true;
        while (pd_iter_pair(&ia, &key, &x)) {
            char name[64];
            snprintf(name, sizeof name, "%.*s", (int)(key.n < 60 ? key.n : 60), key.p ? key.p : "?");
            int n = snprintf(d->key + at, sizeof d->key - at, "%s%s", at ? "." : "", name);
            if (pd_map_find(other.p, other.n, name, &y) != 1) {
                d->was = side ? (struct pd_bin){ NULL, 0 } : x;
                d->now = side ? x : (struct pd_bin){ NULL, 0 };
                return true;
            }
            if (!side && differs(x, y, d, at + (size_t)n))
                return true;
        }
    }
    d->key[at] = 0;             /* the order of keys, or the form of a number */
    return true;
}

static void put_difference(struct replay *p, const struct difference *d)
{
    FILE *out = p->o->log.out;
    char was[96] = "absent", now[96] = "absent";
    struct pd_str key = { d->key[0] ? d->key : "(its form)", strlen(d->key[0] ? d->key : "(its form)") };
    if (d->was.p)
        pd_value_text(d->was, was, sizeof was);
    if (d->now.p)
        pd_value_text(d->now, now, sizeof now);
    if (p->o->log.json) {
        fprintf(out, "{\"run\":\"%s\",\"decision\":%u,", p->was->run, p->was->attempt);
        pd_report_json(out, "key", key);
        putc(',', out);
        pd_report_json(out, "was", (struct pd_str){ was, strlen(was) });
        putc(',', out);
        pd_report_json(out, "now", (struct pd_str){ now, strlen(now) });
        fputs("}\n", out);
        return;
    }
    fprintf(out, "%s  decision %u: ", p->was->run, p->was->attempt);
    pd_report_plain(out, key);
    fputs(" was ", out);
    pd_report_plain(out, (struct pd_str){ was, strlen(was) });
    fputs(", is ", out);
    pd_report_plain(out, (struct pd_str){ now, strlen(now) });
    putc('\n', out);
}

static void same_again(struct replay *p, struct pd_bin raw)
{
    struct difference d = { .key = "" };
    if (!differs(raw, (struct pd_bin){ p->out.p, p->out.n }, &d, 0))
        return;
    p->changed++;
    put_difference(p, &d);
}

/* ---- by another policy ---- */

static int mode_of(const struct pd_route_rec *r) { return r->chosen.any ? (int)r->chosen.mode : 3; }
static const char *mode_name(int m) { return m < 3 ? pd_mode_names[m] : "nobody"; }

static struct pd_str worker_of(const struct pd_route_rec *r, bool p)
{
    static const struct pd_str none = { NULL, 0 };
    return !r->chosen.any ? none : p ? r->chosen.p < 0 ? none : r->p[r->chosen.p].worker : r->d[r->chosen.d].worker;
}

static bool one_worker(const struct pd_route_rec *a, const struct pd_route_rec *b, bool p)
{
    struct pd_str x = worker_of(a, p), y = worker_of(b, p);
    return x.n == y.n && (!x.n || !memcmp(x.p, y.p, x.n));
}

static void put_choice(FILE *out, const struct pd_route_rec *r)
{
    fputs(mode_name(mode_of(r)), out);
    for (int p = 1; p >= 0; p--) {
        struct pd_str w = worker_of(r, p);
        if (w.n) {
            fputs(p || r->chosen.p < 0 ? " " : " > ", out);
            pd_report_plain(out, w);
        }
    }
}

static void json_choice(FILE *out, const char *name, const struct pd_route_rec *r)
{
    fprintf(out, ",\"%s\":{\"mode\":\"%s\"", name, mode_name(mode_of(r)));
    for (int p = 1; p >= 0; p--) {
        struct pd_str w = worker_of(r, p);
        putc(',', out);
        if (w.n)
            pd_report_json(out, p ? "p" : "d", w);
        else
            fprintf(out, "\"%s\":null", p ? "p" : "d");
    }
    fprintf(out, ",\"ttft_ms\":%.3f,\"completion_ms\":%.3f}", ms((double)r->ttft.p50), ms((double)r->completion.p50));
}

static void another(struct replay *p)
{
    const struct pd_route_rec *a = p->was, *b = p->now;
    FILE *out = p->o->log.out;
    bool told = a->chosen.any && b->chosen.any && a->completion.p50 > 0 && b->completion.p50 > 0;
    double gain = told ? (double)(a->completion.p50 - b->completion.p50) : 0;
    p->to[0][mode_of(a)]++;
    p->to[1][mode_of(b)]++;
    if (a->chosen.any == b->chosen.any && one_worker(a, b, true) && one_worker(a, b, false))
        return;
    p->changed++;
    p->blind += !told;
    p->gain_us += gain;
    p->ttft_us += told ? (double)(a->ttft.p50 - b->ttft.p50) : 0;
    p->better += gain > 0;
    p->worse += gain < 0;
    *(gain > 0 ? &p->better_us : &p->worse_us) += fabs(gain);
    if (p->o->log.json) {
        fprintf(out, "{\"run\":\"%s\",\"decision\":%u", a->run, a->attempt);
        json_choice(out, "was", a);
        json_choice(out, "now", b);
        if (told)
            fprintf(out, ",\"gain_ms\":%.3f}\n", ms(gain));
        else
            fputs(",\"gain_ms\":null}\n", out);
        return;
    }
    fprintf(out, "%s  decision %u: ", a->run, a->attempt);
    put_choice(out, a);
    fputs(" -> ", out);
    put_choice(out, b);
    if (told)
        fprintf(out, "; TTFT %.1f -> %.1f ms, completion %.1f -> %.1f ms: %s %.1f\n", ms((double)a->ttft.p50), ms((double)b->ttft.p50), ms((double)a->completion.p50),
                ms((double)b->completion.p50), gain < 0 ? "loses" : "gains", ms(fabs(gain)));
    else
        fputs("; without an estimate\n", out);
}

/* Where choices were drawn, what the other policy would have done was done for some runs: the mean of what these took, each counting as many times as it was
 * unlikely, is that of the other policy [self-normalised inverse propensity: Swaminathan, Joachims, NIPS 2015]. */
static int tried(void *ctx, const struct pd_route_rec *r, const struct pd_outcome_rec *o, struct pd_err *e)
{
    struct replay *p = ctx;
    if (!pd_way_done(r, o) || !(o->has & PD_OC_COMPLETION) || r->propensity < RARE)
        return 0;
    *p->now = *r;
    snprintf(p->now->policy, sizeof p->now->policy, "%s", p->o->policy);
    int rc = pd_choose(p->now, e);
    if (rc)
        return pd_history_bad(p->h, rc, e);
    double took = (double)pd_us_of((double)o->completion_us);
    p->done++;
    p->drawn += r->propensity < 1;
    p->took_us += took;
    if (!p->now->chosen.any || !one_worker(r, p->now, true) || !one_worker(r, p->now, false))
        return 0;
    p->alike++;
    p->weight += 1 / r->propensity;
    p->weighted_us += took / r->propensity;
    return 0;
}

/* ---- the whole log ---- */

static int again(void *ctx, struct pd_bin raw, struct pd_err *e)
{
    struct replay *p = ctx;
    struct pd_arena a = { 0 };
    p->out.n = 0;
    int rc = pd_route_replay(raw.p, raw.n, p->o->policy, &a, p->was, p->now, &p->out, e);
    if (rc)
        rc = pd_history_bad(p->h, rc, e);
    else {
        p->read++;
        if (p->o->policy)
            another(p);
        else
            same_again(p, raw);
    }
    pd_arena_free(&a);
    return rc ? rc : ferror(p->o->log.out) ? pd_fail_sys(e, "standard output") : 0;
}

static void put_sum(const struct replay *p)
{
    FILE *out = p->o->log.out;
    const char *policy = p->o->policy;
    if (!policy && p->o->log.json)
        fprintf(out, "{\"summary\":{\"decisions\":%" PRIu64 ",\"identical\":%" PRIu64 ",\"different\":%" PRIu64 ",\"unreadable\":%" PRIu64 "}}\n", p->read + p->h->sum.bad,
                p->read - p->changed, p->changed, p->h->sum.bad);
    else if (!policy)
        fprintf(out, "%" PRIu64 " decisions: %" PRIu64 " identical, %" PRIu64 " different, %" PRIu64 " unreadable\n", p->read + p->h->sum.bad, p->read - p->changed, p->changed,
                p->h->sum.bad);
    if (!policy)
        return;
    if (p->o->log.json) {
        fputs("{\"summary\":{", out);
        pd_report_json(out, "policy", (struct pd_str){ policy, strlen(policy) });
        fprintf(out, ",\"decisions\":%" PRIu64 ",\"changed\":%" PRIu64 ",\"unreadable\":%" PRIu64, p->read + p->h->sum.bad, p->changed, p->h->sum.bad);
        for (int k = 0; k < 2; k++) {
            fprintf(out, ",\"%s\":{", k ? "now" : "was");
            for (int m = 0; m < 4; m++)
                fprintf(out, "%s\"%s\":%" PRIu64, m ? "," : "", mode_name(m), p->to[k][m]);
            putc('}', out);
        }
        if (p->drawn && p->alike)
            fprintf(out, ",\"tried\":{\"runs\":%" PRIu64 ",\"alike\":%" PRIu64 ",\"took_ms\":%.3f,\"would_take_ms\":%.3f}", p->done, p->alike, ms(p->took_us / (double)p->done),
                    ms(p->weighted_us / p->weight));
        fprintf(out, ",\"better\":%" PRIu64 ",\"better_ms\":%.3f,\"worse\":%" PRIu64 ",\"worse_ms\":%.3f,\"without_estimate\":%" PRIu64 ",\"gain_ms\":%.3f,\"ttft_gain_ms\":%.3f}}\n",
                p->better, ms(p->better_us), p->worse, ms(p->worse_us), p->blind, ms(p->gain_us), ms(p->ttft_us));
        return;
    }
    fprintf(out, "%" PRIu64 " decisions by %s: %" PRIu64 " changed, %" PRIu64 " unreadable\n", p->read + p->h->sum.bad, policy, p->changed, p->h->sum.bad);
    for (int m = 0; m < 4; m++)
        if (p->to[0][m] || p->to[1][m])
            fprintf(out, "  %-10s %9" PRIu64 " -> %" PRIu64 "\n", mode_name(m), p->to[0][m], p->to[1][m]);
    if (p->changed)
        fprintf(out, "estimated at P50: completion %+.1f ms in all (%" PRIu64 " gain %.1f, %" PRIu64 " lose %.1f), TTFT %+.1f; without an estimate: %" PRIu64 "\n"
                "each decision is taken by itself: what other choices before it would have left of queues and caches is not in it\n",
                ms(p->gain_us), p->better, ms(p->better_us), p->worse, ms(p->worse_us), ms(p->ttft_us), p->blind);
    if (p->drawn && p->alike)
        fprintf(out, "measured: %" PRIu64 " of %" PRIu64 " runs were drawn to go where %s would have sent them; weighted by their chance they took %.1f ms in the mean, all %.1f\n",
                p->alike, p->done, policy, ms(p->weighted_us / p->weight), ms(p->took_us / (double)p->done));
}

int pd_review_replay(const struct pd_review_opts *o, int *status, struct pd_err *e)
{
    struct pd_history h = { .decided = again, .ended = o->policy ? tried : NULL };
    struct replay p = { .o = o, .h = &h };
    struct pd_policy_spec spec;
    struct pd_log *log = NULL;
    h.ctx = &p;
    int rc = o->policy ? pd_policy_parse(o->policy, &spec, e) : 0;
    if (rc)
        return pd_err_prefix(e, "--policy");
    p.was = pd_calloc(1, sizeof *p.was, "a route record", e);
    p.now = p.was ? pd_calloc(1, sizeof *p.now, "a route record", e) : NULL;
    rc = p.now ? pd_history_walk(&o->log, &h, &log, e) : PD_ENOMEM;
    if (!rc && h.sum.decisions && (!o->log.quiet || p.changed))
        put_sum(&p);
    if (!rc && o->identical && p.changed)
        *status = 4;
    if (!rc)
        rc = pd_history_end(&o->log, &h, log, status, e);
    if (!rc && !p.read)
        rc = pd_fail(e, PD_ECORRUPT, "none of %" PRIu64 " route records can be read, the first: %s", h.sum.bad, h.sum.first_bad);
    pd_buf_free(&p.out);
    pd_free(p.was);
    pd_free(p.now);
    pd_log_free(log);
    return rc;
}
