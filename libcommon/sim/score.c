#include "score.h"
#include <math.h>
#include <stdio.h>
#include "../trace/keyed.h"
#include "../wire/value.h"

const char *const pd_score_basis_names[] = { "scheduled", "sent", "seen", "reported" };
static const char *const bad_ends[] = { "error", "blocked", "shed", "cancelled" };

/* One request, by its id: what its result said, and what is known of it from elsewhere. Times us, NAN: not known. */
struct entry {
    struct pd_node node;
    bool asked, answered, failed, noted, closed;        /* noted: by pd-bench load; closed: its loop was */
    double sched, sent, first, second, done;
    double start, arrival;              /* of the request: when its stream began (mono), and when in it */
    double seen_first, seen_second, seen_done;          /* stamped here, mono */
    double ttft_ms, tpot_ms, e2e_ms, kv_ms;     /* the result's; < 0: none */
    double slo_ttft, slo_tpot;          /* 0: none */
    uint64_t n_tokens, prompt, cached, transferred, recomputed, kv_bytes, reusable;
    char reason[12], mode[12], fallback[48];
    int class_;                         /* -1: none */
};
/* Tokens of a run that has no result yet. */
struct live { struct pd_node node; double first, second, last, t_last; };

struct pd_score {
    struct pd_score_opts o;
    struct pd_keyed entries, runs;
    struct pd_sample gaps_noted, gaps_seen, gaps_told;
    char class_[PD_SCORE_CLASSES][32]; uint32_t n_classes;
};

int pd_score_new(const struct pd_score_opts *o, struct pd_score **out, struct pd_err *e)
{
    struct pd_score *s = pd_calloc(1, sizeof *s, "score", e);
    if (!s)
        return PD_ENOMEM;
    s->o = *o;
    *out = s;
    return 0;
}

static void free_table(struct pd_keyed *t)
{
    for (struct pd_node *n = t->first, *next; n; n = next) {
        next = n->next;
        pd_free(n);
    }
    pd_keyed_free(t);
}

void pd_score_free(struct pd_score *s)
{
    if (!s)
        return;
    free_table(&s->entries);
    free_table(&s->runs);
    pd_sample_free(&s->gaps_noted);
    pd_sample_free(&s->gaps_seen);
    pd_sample_free(&s->gaps_told);
    pd_free(s);
}

/* ---- what comes in ---- */

/* By the caller's id, which requests and results share; of what has none, by its run. */
static struct entry *entry_of(struct pd_score *s, struct pd_bin id, const char *run, struct pd_err *e)
{
    uint8_t key[27];
    size_t n = id.n ? 1 + id.n : strlen(run);
    if (id.n > 26) {
        key[0] = 'h';
        pd_put_be64(key + 1, pd_xxh3(id.p, id.n, 1));
        pd_put_be64(key + 9, pd_xxh3(id.p, id.n, 2));
        n = 17;
    } else if (id.n) {
        key[0] = 'i';
        memcpy(key + 1, id.p, id.n);
    } else
        memcpy(key, run, n);
    struct entry *t = pd_keyed_find(&s->entries, key, n);
    if (t)
        return t;
    if (!(t = pd_calloc(1, sizeof *t, "score", e)))
        return NULL;
    t->sched = t->sent = t->first = t->second = t->done = t->start = t->arrival = t->seen_first = t->seen_second = t->seen_done = NAN;
    t->ttft_ms = t->tpot_ms = t->e2e_ms = t->kv_ms = -1;
    t->class_ = -1;
    if (pd_keyed_add(&s->entries, t, key, n, e)) {
        pd_free(t);
        return NULL;
    }
    return t;
}

static void read_slo(struct pd_bin slo, struct entry *t)
{
    struct pd_bin v;
    double ms;
    if (slo.p && pd_map_find(slo.p, slo.n, "ttft_ms", &v) == 1 && pd_get_float(v, &ms) && ms > 0)
        t->slo_ttft = ms;
    if (slo.p && pd_map_find(slo.p, slo.n, "tpot_ms", &v) == 1 && pd_get_float(v, &ms) && ms > 0)
        t->slo_tpot = ms;
}

/* class, slo, reusable_tokens: of a request, or of its result where load has copied them. */
static void about(struct pd_score *s, const uint8_t *rec, size_t n, struct entry *t)
{
    struct pd_bin v;
    struct pd_str name;
    int64_t i;
    if (pd_map_find(rec, n, "slo", &v) == 1)
        read_slo(v, t);
    if (pd_map_find(rec, n, "reusable_tokens", &v) == 1 && pd_get_int(v, &i) && i > 0)
        t->reusable = (uint64_t)i;
    if (pd_map_find(rec, n, "class", &v) != 1 || !pd_get_str(v, &name) || !name.n || name.n >= sizeof s->class_[0])
        return;
    uint32_t c = 0;
    while (c < s->n_classes && !pd_str_eq(name, s->class_[c]))
        c++;
    if (c == PD_SCORE_CLASSES)
        return;
    if (c == s->n_classes) {
        memcpy(s->class_[c], name.p, name.n);
        s->n_classes++;
    }
    t->class_ = (int)c;
}

int pd_score_request(struct pd_score *s, const struct pd_rec *rec, struct pd_err *e)
{
    struct pd_arena mem = { 0 };
    struct pd_request q;
    struct pd_bin v;
    int64_t start;
    struct entry *t = NULL;
    int rc = pd_request_decode(rec->p, rec->n, &mem, &q, e);
    if (rc == 0 && !q.id.n && !*q.run)
        rc = pd_fail(e, PD_ECORRUPT, "a request has neither id nor run: its result cannot be told from others");
    if (rc == 0 && !(t = entry_of(s, q.id, q.run, e)))
        rc = PD_ENOMEM;
    if (rc == 0) {
        t->asked = true;
        t->arrival = q.has & PD_RQ_ARRIVAL ? (double)q.arrival_us : NAN;
        if (pd_map_find(rec->p, rec->n, "start_us", &v) == 1 && pd_get_int(v, &start))
            t->start = (double)start;
        about(s, rec->p, rec->n, t);
    }
    pd_arena_free(&mem);
    return rc;
}

static int token(struct pd_score *s, const struct pd_rec *rec, int64_t mono_us, struct pd_err *e)
{
    struct pd_arena mem = { 0 };
    struct pd_token k;
    int rc = pd_token_decode(rec->p, rec->n, &mem, &k, e);
    struct live *l = rc == 0 ? pd_keyed_find(&s->runs, k.run, PD_RUN_LEN) : NULL;
    if (rc == 0 && k.choice == 0 && !l) {
        if (!(l = pd_calloc(1, sizeof *l, "score", e)) || pd_keyed_add(&s->runs, l, k.run, PD_RUN_LEN, e)) {
            pd_free(l);
            rc = PD_ENOMEM;
        } else {
            l->first = l->last = (double)mono_us;
            l->second = NAN;
            l->t_last = (double)k.t_us;
        }
    } else if (rc == 0 && k.choice == 0) {
        l->second = isnan(l->second) ? (double)mono_us : l->second;
        rc = pd_sample_add(&s->gaps_seen, ((double)mono_us - l->last) / 1e3, e);
        rc = rc ? rc : pd_sample_add(&s->gaps_told, fmax(0, ((double)k.t_us - l->t_last) / 1e3), e);
        l->last = (double)mono_us;
        l->t_last = (double)k.t_us;
    }
    pd_arena_free(&mem);
    return rc;
}

static double a_time(const struct pd_rec *rec, const char *key)
{
    struct pd_bin v;
    int64_t us;
    return pd_map_find(rec->p, rec->n, key, &v) == 1 && pd_get_int(v, &us) && us >= 0 ? (double)us : NAN;
}

static int gaps(struct pd_score *s, const struct pd_rec *rec, struct entry *t, struct pd_err *e)
{
    struct pd_bin v, one;
    struct pd_iter it;
    int64_t us;
    bool first = true;
    if (pd_map_find(rec->p, rec->n, "gaps_us", &v) != 1)
        return 0;
    if (!pd_iter_open(&it, v, PD_T_ARRAY))
        return pd_fail(e, PD_ECORRUPT, "result: gaps_us is no list");
    while (pd_iter_next(&it, &one)) {
        if (!pd_get_int(one, &us) || us < 0)
            return pd_fail(e, PD_ECORRUPT, "result: gaps_us: an entry is no time");
        int rc = pd_sample_add(&s->gaps_noted, (double)us / 1e3, e);
        if (rc)
            return rc;
        if (first)
            t->second = t->first + (double)us;
        first = false;
    }
    return 0;
}

static int result(struct pd_score *s, const struct pd_rec *rec, int64_t mono_us, struct pd_err *e)
{
    struct pd_arena mem = { 0 };
    struct pd_result r;
    struct entry *t = NULL;
    int rc = pd_result_decode(rec->p, rec->n, &mem, &r, e);
    if (rc == 0 && !(t = entry_of(s, r.id, r.run, e)))
        rc = PD_ENOMEM;
    if (rc)
        goto out;
    if (t->answered && r.choice) {      /* another choice of the request: its tokens count, its times are the first's */
        t->n_tokens += r.completion_tokens;
        goto out;
    }
    if (t->answered) {
        char text[64];
        rc = pd_fail(e, PD_ECORRUPT, "result: there are two of id %s: they cannot be told apart", pd_id_text(r.id, text, sizeof text));
        goto out;
    }
    t->answered = true;
    for (size_t i = 0; i < sizeof bad_ends / sizeof *bad_ends; i++)
        t->failed |= !strcmp(r.finish_reason, bad_ends[i]);
    t->sched = a_time(rec, "sched_us");
    t->sent = a_time(rec, "sent_us");
    t->first = a_time(rec, "first_us");
    t->done = a_time(rec, "done_us");
    t->noted = !isnan(t->done);
    t->closed = t->noted && isnan(t->sched);
    about(s, rec->p, rec->n, t);
    t->n_tokens = r.completion_tokens;
    t->prompt = r.prompt_tokens;
    t->cached = r.cached_tokens;
    t->transferred = r.transferred_tokens;
    t->recomputed = r.recomputed_tokens;
    t->kv_bytes = r.kv_bytes;
    t->ttft_ms = r.ttft_ms;
    t->tpot_ms = r.tpot_ms;
    t->e2e_ms = r.e2e_ms;
    t->kv_ms = r.kv_ms;
    memcpy(t->reason, r.finish_reason, sizeof t->reason);
    memcpy(t->mode, r.mode, sizeof t->mode);
    if (r.fallback.p)                   /* the word before the details */
        snprintf(t->fallback, sizeof t->fallback, "%.*s", (int)(strcspn(r.fallback.p, ":") < r.fallback.n ? strcspn(r.fallback.p, ":") : r.fallback.n), r.fallback.p);
    struct live *l = pd_keyed_find(&s->runs, r.run, PD_RUN_LEN);
    t->seen_done = (double)mono_us;
    if (l) {
        t->seen_first = l->first;
        t->seen_second = l->second;
        pd_keyed_remove(&s->runs, l);
        pd_free(l);
    }
    rc = t->failed ? 0 : gaps(s, rec, t, e);
out:
    pd_arena_free(&mem);
    return rc;
}

int pd_score_record(struct pd_score *s, const struct pd_rec *rec, int64_t mono_us, struct pd_err *e)
{
    return rec->kind == PD_K_TOKEN ? token(s, rec, mono_us, e) : rec->kind == PD_K_RESULT ? result(s, rec, mono_us, e) : 0;
}

/* ---- what is made of it ---- */

struct pd_ratio pd_ratio_of(uint64_t k, uint64_t n)
{
    const double z = 1.959963984540054;
    double p = n ? (double)k / (double)n : 0, d = (double)n + z * z, mid = ((double)k + z * z / 2) / d,
           half = n ? z * sqrt((double)k * (1 - p) + z * z / 4) / d : 0;
    return n ? (struct pd_ratio){ p, k ? fmax(0, mid - half) : 0, k < n ? fmin(1, mid + half) : 1 } : (struct pd_ratio){ 0, 0, 0 };
}

static void count(struct pd_words *w, const char *word)
{
    uint32_t i = 0;
    while (i < w->n && strcmp(w->of[i].word, word))
        i++;
    if (i == PD_SCORE_WORDS)
        i--, strcpy(w->of[i].word, "other");
    else if (i == w->n)
        snprintf(w->of[w->n++].word, sizeof w->of[i].word, "%s", word);
    w->of[i].n++;
}

static enum pd_score_basis basis_of(const struct pd_score *s)
{
    bool sched = true, sent = true, seen = s->o.live, any = false;
    for (const struct pd_node *n = s->entries.first; n; n = n->next) {
        const struct entry *t = (const struct entry *)n;
        if (!t->answered)
            continue;
        any = true;
        sched &= t->noted && !t->closed;
        sent &= t->noted && t->closed;
        seen &= !isnan(t->start) && !isnan(t->arrival);
    }
    return any && sched ? PD_SB_SCHEDULED : any && sent ? PD_SB_SENT : any && seen ? PD_SB_SEEN : PD_SB_REPORTED;
}

/* When it was to begin, when its tokens came and when it ended, us by one clock, as the basis has it. */
struct times { double from, first, second, done; };
static struct times times_of(const struct entry *t, enum pd_score_basis b)
{
    switch (b) {
    case PD_SB_SCHEDULED: return (struct times){ t->sched, t->first, t->second, t->done };
    case PD_SB_SENT: return (struct times){ t->sent, t->first, t->second, t->done };
    case PD_SB_SEEN: return (struct times){ t->start + t->arrival, t->seen_first, t->seen_second, t->seen_done };
    default: return (struct times){ 0, t->ttft_ms < 0 ? NAN : t->ttft_ms * 1e3, NAN, t->e2e_ms < 0 ? NAN : t->e2e_ms * 1e3 };
    }
}

static int add(struct pd_report *r, enum pd_score_figure f, double us, struct pd_err *e) { return isnan(us) ? 0 : pd_sample_add(&r->figure[f], us / 1e3, e); }

static int one(struct pd_report *r, const struct entry *t, const struct pd_score_opts *o, struct pd_err *e)
{
    struct times at = times_of(t, r->basis);
    double ttft = at.first - at.from, tpot = t->n_tokens > 1 ? (at.done - at.first) / (double)(t->n_tokens - 1) : NAN;
    double slo_ttft = t->slo_ttft > 0 || t->slo_tpot > 0 ? t->slo_ttft : o->ttft_ms, slo_tpot = t->slo_ttft > 0 || t->slo_tpot > 0 ? t->slo_tpot : o->tpot_ms;
    bool ended = t->answered && !t->failed, slo = slo_ttft > 0 || slo_tpot > 0;
    /* What its SLO names and nobody knows was not met; a TPOT that cannot be, of one token, was. */
    bool met = ended && (slo_ttft <= 0 || ttft <= slo_ttft * 1e3) && (slo_tpot <= 0 || t->n_tokens <= 1 || tpot <= slo_tpot * 1e3);
    struct pd_class_score *c = t->class_ < 0 ? NULL : &r->class_[t->class_];
    int rc = 0;
    r->n++;
    r->missing += !t->answered;
    r->failed += t->answered && t->failed;
    r->ended += ended;
    r->with_slo += slo;
    r->met += slo && met;
    if (t->answered)
        count(&r->reasons, t->reason);
    if (c) {
        c->n++;
        c->ended += ended;
        c->met += slo && met;
    }
    r->reusable_tokens += t->reusable;
    if (!ended)
        return 0;
    count(&r->modes, t->mode);
    if (*t->fallback)
        count(&r->fallbacks, t->fallback);
    r->prompt_tokens += t->prompt;
    r->output_tokens += t->n_tokens;
    r->cached_tokens += t->cached;
    r->transferred_tokens += t->transferred;
    r->recomputed_tokens += t->recomputed;
    r->kv_bytes += t->kv_bytes;
    r->kv_ms += t->kv_ms > 0 ? t->kv_ms : 0;
    r->hit_mean += t->prompt ? (double)t->cached / (double)t->prompt : 0;
    r->tokens_unseen += r->basis != PD_SB_REPORTED && isnan(at.first);
    if ((rc = add(r, PD_FG_TTFT, ttft, e)) || (rc = add(r, PD_FG_SECOND, at.second - at.from, e)) || (rc = add(r, PD_FG_TPOT, tpot, e)) ||
        (rc = add(r, PD_FG_E2E, at.done - at.from, e)) || (rc = add(r, PD_FG_KV, t->kv_ms > 0 ? t->kv_ms * 1e3 : NAN, e)))
        return rc;
    if (r->basis == PD_SB_SCHEDULED)
        rc = add(r, PD_FG_LAG, t->sent - t->sched, e);
    if (c && rc == 0 && !isnan(ttft))
        rc = pd_sample_add(&c->ttft, ttft / 1e3, e);
    if (c && rc == 0 && !isnan(tpot))
        rc = pd_sample_add(&c->tpot, tpot / 1e3, e);
    return rc;
}

int pd_score_report(struct pd_score *s, struct pd_report *r, struct pd_err *e)
{
    double from = INFINITY, last = -INFINITY, to = -INFINITY;
    uint64_t arrived = 0;
    int rc = 0;
    *r = (struct pd_report){ .basis = basis_of(s) };
    r->n_classes = s->n_classes;
    for (uint32_t c = 0; c < s->n_classes; c++)
        memcpy(r->class_[c].name, s->class_[c], sizeof r->class_[c].name);
    for (struct pd_node *n = s->entries.first; rc == 0 && n; n = n->next) {
        const struct entry *t = (const struct entry *)n;
        struct times at = times_of(t, r->basis);
        rc = one(r, t, &s->o, e);
        if (r->basis != PD_SB_REPORTED && !isnan(at.from)) {
            arrived++;
            from = fmin(from, at.from);
            last = fmax(last, at.from);
            to = isnan(at.done) ? to : fmax(to, at.done);
        }
    }
    r->offered = arrived > 1 && last > from && r->basis != PD_SB_SENT ? (double)(arrived - 1) / ((last - from) / 1e6) : 0;
    r->span_s = to > from ? (to - from) / 1e6 : 0;
    r->hit_mean = r->ended ? r->hit_mean / (double)r->ended : 0;
    /* The gaps are all of one kind; they are moved, not copied. */
    struct pd_sample *g = r->basis == PD_SB_SEEN ? &s->gaps_seen : r->basis == PD_SB_REPORTED ? &s->gaps_told : &s->gaps_noted;
    r->figure[PD_FG_ITL] = *g;
    *g = (struct pd_sample){ 0 };
    if (rc)
        pd_report_free(r);
    return rc;
}

void pd_report_free(struct pd_report *r)
{
    for (int f = 0; f < PD_FG_N; f++)
        pd_sample_free(&r->figure[f]);
    for (uint32_t c = 0; c < r->n_classes; c++) {
        pd_sample_free(&r->class_[c].ttft);
        pd_sample_free(&r->class_[c].tpot);
    }
    *r = (struct pd_report){ 0 };
}
