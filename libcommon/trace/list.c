/* pd-trace ls and stats: every run of a log, one by one and together. A run of which there is no event is listed by its outcome, or as decided. Runs that ended are let go after the next LINGER ends, so that what other processes write
 * about the same end is not taken for another run. */
#include <inttypes.h>
#include "../base/log.h"
#include "../base/seen.h"
#include "../wire/record_route.h"
#include "keyed.h"
#include "report.h"
#include "stage.h"

enum { LINGER = 1024, MAX_REASONS = 64 };

struct listed {
    struct pd_node node;
    struct pd_stages stages;
    int64_t begin_us, ttft_us, e2e_us;
    char first[64], last[64];   /* workers */
    char *cause;
    /* as a router told it; its events, where they are here, tell it better */
    char mode[12], finish_reason[12];
    uint32_t tokens;
};

/* Durations in us, in buckets of 1/128 of their size: quantiles to within 0.4 %, whatever their number. */
enum { SUB = 128, BUCKETS = 64 * SUB };
struct tally { uint64_t n, min, max, bucket[BUCKETS]; };

static unsigned bucket_of(uint64_t v)
{
    int shift = v < 2 * SUB ? 0 : 63 - __builtin_clzll(v) - 7;
    return (unsigned)(shift * SUB + (int)(v >> shift));
}

static uint64_t middle_of(unsigned b)
{
    unsigned shift = b < 2 * SUB ? 0 : b / SUB - 1;
    uint64_t low = (uint64_t)(b - shift * SUB) << shift;
    return low + (shift ? ((uint64_t)1 << shift) / 2 : 0);
}

static void tally_add(struct tally *t, int64_t us)
{
    uint64_t v = us < 0 ? 0 : (uint64_t)us;
    t->min = !t->n || v < t->min ? v : t->min;
    t->max = v > t->max ? v : t->max;
    t->n++;
    t->bucket[bucket_of(v)]++;
}

/* The smallest that q of all do not pass. */
static double tally_quantile(const struct tally *t, double q)
{
    uint64_t want = (uint64_t)(q * (double)t->n + 0.999999), sum = 0;
    for (unsigned i = 0; i < BUCKETS; i++)
        if ((sum += t->bucket[i]) >= want && sum) {
            uint64_t v = middle_of(i);
            return (double)(v < t->min ? t->min : v > t->max ? t->max : v);
        }
    return 0;
}

enum { T_TPOT = PD_N_TIMES, T_ROUTED /* ttft, tpot, completion of outcomes */, N_TALLIES = T_ROUTED + 3 };
struct list {
    const struct pd_report_opts *o;
    struct pd_keyed live, ended;
    struct pd_seen past;
    struct tally *tally;        /* [N_TALLIES], of stats */
    uint64_t n[PD_N_STATES], runs, open, tokens, elsewhere;
    uint64_t decided[4] /* by mode; nobody */, degraded[8], outcomes, unreadable;
    struct { char name[32]; uint64_t n; } reason[MAX_REASONS];
    unsigned n_reasons;
};

static void listed_free(struct listed *r)
{
    pd_free(r->cause);
    pd_free(r);
}

static void put_ms(FILE *out, const char *key, int64_t us, bool json)
{
    if (json)
        us < 0 ? fprintf(out, ",\"%s\":null", key) : fprintf(out, ",\"%s\":%.3f", key, (double)us / 1e3);
    else
        us < 0 ? fprintf(out, "  %s -", key) : fprintf(out, "  %s %.3f ms", key, (double)us / 1e3);
}

/* The state that a run ended in, by its finish reason. */
static enum pd_state_id end_of(const char *finish)
{
    static const struct { const char *finish; enum pd_state_id end; } of[] = { { "stop", PD_ST_COMPLETED }, { "length", PD_ST_COMPLETED },
        { "cancelled", PD_ST_CANCELLED }, { "blocked", PD_ST_BLOCKED }, { "shed", PD_ST_BLOCKED } };
    for (size_t i = 0; i < sizeof of / sizeof *of; i++)
        if (!strcmp(finish, of[i].finish))
            return of[i].end;
    return PD_ST_FAILED;
}

static int put_run(struct list *l, struct listed *r, struct pd_err *e)
{
    FILE *out = l->o->out;
    bool json = l->o->json, two = strcmp(r->first, r->last) != 0, told = r->finish_reason[0] && !r->stages.end, events = r->stages.last != 0;
    char at[32];
    const char *state = pd_state[r->stages.end ? r->stages.end : told ? end_of(r->finish_reason) : events ? r->stages.last : PD_ST_ROUTE_SELECTED].name;
    const char *mode = r->mode[0] && (told || !r->stages.fell_back) ? r->mode : pd_stages_mode(&r->stages);
    uint32_t tokens = told ? r->tokens : pd_stages_tokens(&r->stages);
    pd_report_time(r->begin_us, at);
    if (json) {
        fprintf(out, "{\"run\":\"%s\",\"state\":\"%s\",\"ended\":%s,\"mode\":\"%s\",\"t_us\":%" PRId64 ",\"tokens\":%u", (char *)r->node.key, state,
            r->stages.end || told ? "true" : "false", mode, r->begin_us, tokens);
    } else
        fprintf(out, "%s  %s  %-10s %-9s %5u tokens", (char *)r->node.key, at, mode, state, tokens);
    put_ms(out, json ? "ttft_ms" : "ttft", r->ttft_us, json);
    put_ms(out, json ? "e2e_ms" : "e2e", r->e2e_us, json);
    struct pd_str first = { r->first, strlen(r->first) }, last = { r->last, strlen(r->last) }, cause = { r->cause, r->cause ? strlen(r->cause) : 0 };
    if (json) {
        putc(',', out);
        pd_report_json(out, "first_worker", first);
        putc(',', out);
        pd_report_json(out, "last_worker", last);
        if (r->cause) {
            putc(',', out);
            pd_report_json(out, "cause", cause);
        }
        fputs("}\n", out);
    } else
        fprintf(out, "  %s%s%s%s%s\n", r->first, two ? " > " : "", two ? r->last : "", r->cause ? ": " : "", r->cause ? r->cause : "");
    return ferror(out) ? pd_fail_sys(e, "standard output") : 0;
}

static int on_stage(void *ctx, enum pd_stage_id id, enum pd_stage_what what, int64_t from, int64_t to, const struct pd_log_rec *rec, struct pd_err *e)
{
    struct { struct list *l; struct listed *r; } *x = ctx;
    (void)rec;
    (void)e;
    if (what != PD_STAGE_CLOSE)
        return 0;
    if (x->l->tally)
        tally_add(&x->l->tally[id], to - from);
    if (id == PD_SG_TTFT)
        x->r->ttft_us = to - from;
    if (id == PD_SG_E2E)
        x->r->e2e_us = to - from;
    return 0;
}

static int finish(struct list *l, struct listed *r, struct pd_err *e)
{
    double tpot = pd_stages_tpot_us(&r->stages);
    l->n[r->stages.end]++;
    l->tokens += pd_stages_tokens(&r->stages);
    if (!l->tally)
        return put_run(l, r, e);
    if (tpot >= 0)
        tally_add(&l->tally[T_TPOT], (int64_t)tpot);
    return 0;
}

/* The kind of a reason: what stands before its colon ("integrity: chunk 5 ..."). */
static void count_reason(struct list *l, struct pd_str cause)
{
    char name[32] = "no reason given";
    const char *colon = cause.n ? memchr(cause.p, ':', cause.n) : NULL;
    size_t n = colon ? (size_t)(colon - cause.p) : cause.n;
    if (n)
        snprintf(name, sizeof name, "%.*s", (int)(n < sizeof name ? n : sizeof name - 1), cause.p);
    unsigned i = 0;
    while (i < l->n_reasons && strcmp(l->reason[i].name, name))
        i++;
    if (i == MAX_REASONS)
        i--, strcpy(l->reason[i].name, "others");
    else if (i == l->n_reasons)
        memcpy(l->reason[l->n_reasons++].name, name, sizeof name);
    l->reason[i].n++;
}

/* To those that ended; who ended long ago is only known to have been there. */
static int retire(struct list *l, struct listed *r, struct pd_err *e)
{
    pd_keyed_remove(&l->live, r);
    int rc = pd_keyed_add(&l->ended, r, r->node.key, PD_RUN_LEN, e);
    if (rc) {
        listed_free(r);
        return rc;
    }
    while (l->ended.n > LINGER) {
        struct listed *old = (struct listed *)l->ended.first;
        pd_keyed_remove(&l->ended, old);
        rc = pd_seen_add(&l->past, old->node.key, PD_RUN_LEN, e);
        listed_free(old);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* The run as it lives; *r NULL: it has ended. *fresh: it was not there before. */
static int find_run(struct list *l, const char *run, struct listed **r, bool *fresh, struct pd_err *e)
{
    *fresh = false;
    if ((*r = pd_keyed_find(&l->live, run, PD_RUN_LEN)) || pd_keyed_find(&l->ended, run, PD_RUN_LEN) || pd_seen_has(&l->past, run, PD_RUN_LEN))
        return 0;
    if (!(*r = pd_calloc(1, sizeof **r, "a run", e)))
        return PD_ENOMEM;
    int rc = pd_keyed_add(&l->live, *r, run, PD_RUN_LEN, e);
    if (rc) {
        listed_free(*r);
        return rc;
    }
    (*r)->ttft_us = (*r)->e2e_us = -1;
    *fresh = true;
    l->runs++;
    return 0;
}

/* A record's text must not steer a terminal. */
static void plain(char *p)
{
    for (; *p; p++)
        *p = (unsigned char)*p < 0x20 || *p == 0x7f ? ' ' : *p;
}

static int set_cause(struct listed *r, struct pd_str cause, struct pd_err *e)
{
    pd_free(r->cause);
    if (!(r->cause = pd_strndup(cause.p, cause.n < 200 ? cause.n : 200, e)))
        return PD_ENOMEM;
    plain(r->cause);
    return 0;
}

static void set_worker(char out[64], struct pd_str name)
{
    snprintf(out, 64, "%.*s", (int)(name.n < 63 ? name.n : 63), name.p ? name.p : "");
    plain(out);
}

/* Of records that may hold anything. */
static int64_t sane(int64_t us) { return us < 0 ? 0 : us > PD_US_MOST ? PD_US_MOST : us; }
static int64_t before(int64_t t_us, int64_t us) { return t_us > us ? t_us - us : 0; }

static int take_route(struct list *l, const struct pd_log_rec *rec, struct pd_err *e)
{
    struct pd_arena a = { 0 };
    struct pd_route_rec *d = pd_arena_alloc(&a, 1, sizeof *d, e);
    struct listed *r = NULL;
    bool fresh;
    int rc = d ? pd_route_decode(rec->p, rec->n, &a, d, e) : PD_ENOMEM;
    if (rc && rc != PD_ENOMEM) {
        l->unreadable++;
        rc = 0;
    } else if (!rc) {
        l->decided[d->chosen.any ? (int)d->chosen.mode : 3]++;
        for (int i = 0; PD_DG_ALL >> i; i++)
            l->degraded[i] += d->degraded >> i & 1;
        rc = l->tally ? 0 : find_run(l, d->run, &r, &fresh, e);
    }
    if (!rc && r) {
        if (fresh)
            r->begin_us = before(d->t_us, sane(d->waited_us));
        snprintf(r->mode, sizeof r->mode, "%s", d->chosen.any ? pd_mode_names[d->chosen.mode] : "-");
        if (d->chosen.any && !r->stages.last) {
            set_worker(r->last, d->d[d->chosen.d].worker);
            set_worker(r->first, d->chosen.p >= 0 ? d->p[d->chosen.p].worker : d->d[d->chosen.d].worker);
        }
    }
    pd_arena_free(&a);
    return rc;
}

static int take_outcome(struct list *l, const struct pd_log_rec *rec, struct pd_err *e)
{
    struct pd_arena a = { 0 };
    struct pd_outcome_rec o;
    struct listed *r = NULL;
    bool fresh;
    int rc = pd_outcome_decode(rec->p, rec->n, &a, &o, e);
    if (rc && rc != PD_ENOMEM) {
        l->unreadable++;
        rc = 0;
    } else if (!rc) {
        const int64_t us[] = { o.ttft_us, o.tpot_us, o.completion_us };
        l->outcomes++;
        for (int i = 0; i < 3 && l->tally; i++)
            if (o.has & (uint32_t)PD_OC_TTFT << i)
                tally_add(&l->tally[T_ROUTED + i], us[i]);
        rc = l->tally ? 0 : find_run(l, o.run, &r, &fresh, e);
    }
    if (!rc && r) {
        snprintf(r->mode, sizeof r->mode, "%s", o.mode);
        plain(r->mode);
        snprintf(r->finish_reason, sizeof r->finish_reason, "%s", o.finish_reason[0] ? o.finish_reason : "error");
        r->tokens = o.completion_tokens;
        if (!r->stages.last) {          /* nobody else tells of it */
            r->ttft_us = o.has & PD_OC_TTFT ? sane(o.waited_us) + sane(o.ttft_us) : -1;
            r->e2e_us = o.has & PD_OC_COMPLETION ? sane(o.waited_us) + sane(o.completion_us) : -1;
            if (fresh)
                r->begin_us = before(o.t_us, r->e2e_us >= 0 ? r->e2e_us : 0);
            set_worker(r->last, o.d);
            set_worker(r->first, o.p.n ? o.p : o.d);
            struct pd_str why = o.cause.n ? o.cause : o.fallback;
            rc = why.n ? set_cause(r, why, e) : 0;
            rc = rc ? rc : put_run(l, r, e);
            rc = rc ? rc : retire(l, r, e);
        }
    }
    pd_arena_free(&a);
    return rc;
}

static int take(struct list *l, const struct pd_log_rec *rec, struct pd_err *e)
{
    enum pd_state_class class = pd_state[rec->state].class;
    struct listed *r;
    bool fresh;
    if (rec->kind == PD_K_ROUTE || rec->kind == PD_K_OUTCOME)
        return rec->kind == PD_K_ROUTE ? take_route(l, rec, e) : take_outcome(l, rec, e);
    if (rec->kind != PD_K_EVENT || !rec->state || !rec->ev.run[0] || (class != PD_SC_STEP && class != PD_SC_SIDE && class != PD_SC_END))
        return 0;
    int rc = find_run(l, rec->ev.run, &r, &fresh, e);
    if (rc || !r)
        return rc;
    if (fresh) {
        r->begin_us = rec->at_us;
        l->elsewhere += rec->state != PD_ST_ACCEPTED && class != PD_SC_END;
    }
    if (rec->ev.worker.n) {
        set_worker(r->last, rec->ev.worker);
        if (!r->first[0])
            memcpy(r->first, r->last, sizeof r->first);
    }
    if (rec->ev.cause.n && (class == PD_SC_END || class == PD_SC_SIDE) && (rc = set_cause(r, rec->ev.cause, e)))
        return rc;
    if (class == PD_SC_SIDE) {
        l->n[rec->state]++;
        if (rec->state == PD_ST_FALLBACK)
            count_reason(l, rec->ev.cause);
    }
    struct { struct list *l; struct listed *r; } x = { l, r };
    if ((rc = pd_stages_event(&r->stages, rec, on_stage, &x, e)) || !r->stages.end)
        return rc;
    rc = finish(l, r, e);
    return rc ? rc : retire(l, r, e);
}

static void put_row(const struct list *l, const char *name, const struct tally *t, const char *what)
{
    double p50 = tally_quantile(t, 0.5), p90 = tally_quantile(t, 0.9), p99 = tally_quantile(t, 0.99);
    if (l->o->json)
        fprintf(l->o->out, "{\"name\":\"%s\",\"unit\":\"ms\",\"n\":%" PRIu64 ",\"min\":%.3f,\"p50\":%.3f,\"p90\":%.3f,\"p99\":%.3f,\"max\":%.3f}\n", name,
            t->n, (double)t->min / 1e3,
                p50 / 1e3, p90 / 1e3, p99 / 1e3, (double)t->max / 1e3);
    else
        fprintf(l->o->out, "%-9s %9" PRIu64 " %11.3f %11.3f %11.3f %11.3f  %s\n", name, t->n, p50 / 1e3, p90 / 1e3, p99 / 1e3, (double)t->max / 1e3, what);
}

static void put_count(const struct list *l, const char *name, uint64_t n, bool always)
{
    if (l->o->json)
        fprintf(l->o->out, "{\"name\":\"%s\",\"unit\":\"count\",\"value\":%" PRIu64 "}\n", name, n);
    else if (n || always)
        fprintf(l->o->out, "%-20s %" PRIu64 "\n", name, n);
}

static void put_stats(struct list *l)
{
    put_count(l, "runs", l->runs, true);
    for (int i = PD_ST_COMPLETED; i <= PD_ST_FIRST_TOKEN_EARLY; i++)
        put_count(l, pd_state[i].name, l->n[i], false);
    put_count(l, "open", l->open, false);
    put_count(l, "begun_elsewhere", l->elsewhere, false);
    put_count(l, "tokens", l->tokens, true);
    for (unsigned i = 0; i < l->n_reasons; i++)
        if (l->o->json) {
            fputs("{\"name\":\"fallback_reason\",\"unit\":\"count\",", l->o->out);
            pd_report_json(l->o->out, "reason", (struct pd_str){ l->reason[i].name, strlen(l->reason[i].name) });
            fprintf(l->o->out, ",\"value\":%" PRIu64 "}\n", l->reason[i].n);
        } else
            fprintf(l->o->out, "  fallback: %-30s %" PRIu64 "\n", l->reason[i].name, l->reason[i].n);
    for (int i = 0; i < 4; i++)
        put_count(l, (const char *[]){ "decided_aggregated", "decided_remote", "decided_local", "decided_nobody" }[i], l->decided[i], false);
    for (int i = 0; PD_DG_ALL >> i; i++) {
        char name[40];
        snprintf(name, sizeof name, "degraded_%s", pd_degraded_names[i]);
        put_count(l, name, l->degraded[i], false);
    }
    put_count(l, "outcomes", l->outcomes, false);
    put_count(l, "unreadable", l->unreadable, false);
    if (!l->o->json)
        fprintf(l->o->out, "\n%-9s %9s %11s %11s %11s %11s\n", "ms", "n", "P50", "P90", "P99", "max");
    for (int i = 0; i < PD_N_TIMES; i++)
        if (l->tally[i].n)
            put_row(l, pd_stage[i].name, &l->tally[i], pd_stage[i].what);
    if (l->tally[T_TPOT].n)
        put_row(l, "tpot", &l->tally[T_TPOT], "a token after the first");
    for (int i = 0; i < 3; i++)
        if (l->tally[T_ROUTED + i].n)
            put_row(l, (const char *[]){ "r_ttft", "r_tpot", "r_e2e" }[i], &l->tally[T_ROUTED + i],
                    (const char *[]){ "a router's outcomes: decided to first token", "a token after the first", "decided to last token" }[i]);
}

static int walk(const struct pd_report_opts *o, bool stats, int *status, struct pd_err *e)
{
    struct list l = { .o = o };
    struct pd_log *log = NULL;
    struct pd_log_rec rec;
    int rc = 0;
    if (stats && !(l.tally = pd_calloc(N_TALLIES, sizeof *l.tally, "statistics", e)))
        return PD_ENOMEM;
    rc = pd_log_open(o->paths, &o->log, &log, e);
    while (!rc && (rc = pd_log_next(log, &rec, e)) == 1)
        rc = take(&l, &rec, e);
    for (struct pd_node *p = l.live.first; p && !rc; p = p->next) {
        struct listed *r = (struct listed *)p;
        l.open++;
        l.tokens += pd_stages_tokens(&r->stages);
        if (!stats)
            rc = put_run(&l, r, e);
    }
    if (!rc && stats)
        put_stats(&l);
    if (!rc && l.unreadable) {
        pd_warn("%" PRIu64 " route or outcome record%s cannot be read", l.unreadable, l.unreadable == 1 ? "" : "s");
        if (o->strict)
            *status = 9;
    }
    if (!rc)
        rc = pd_report_end(o, log, status, e);
    struct pd_keyed *both[] = { &l.live, &l.ended };
    for (int i = 0; i < 2; i++) {
        for (struct pd_node *p = both[i]->first, *next; p; p = next) {
            next = p->next;
            listed_free((struct listed *)p);
        }
        pd_keyed_free(both[i]);
    }
    pd_seen_free(&l.past);
    pd_free(l.tally);
    pd_log_free(log);
    return rc;
}

int pd_report_ls(const struct pd_report_opts *o, int *status, struct pd_err *e) { return walk(o, false, status, e); }
int pd_report_stats(const struct pd_report_opts *o, int *status, struct pd_err *e) { return walk(o, true, status, e); }
