/* What runs took, against what was expected of them. */
#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "router_in.h"

enum { QUEUE, PREFILL, INTERFERENCE, TRANSFER, SYNC, TPOT, TTFT, COMPLETION };
static const char *const term_names[PD_RT_TERMS] = { "queue", "prefill", "interference", "transfer", "sync", "tpot", "ttft", "completion" };

/* ---- birth and death ---- */

int pd_rt_learn_new(struct pd_router *r, const char *profile, struct pd_err *e)
{
    const struct pd_metric_about told = { .name = "pd_estimates_total", .help = "Estimates that could be held against what it was, by term.", .type = PD_COUNTER, .label = { "term" } },
        below = { .name = "pd_estimates_covered_total", .help = "Of those, the ones whose P95 was not passed: 0.95 of them is right.", .type = PD_COUNTER, .label = { "term" } },
        shadow = { .name = "pd_shadow_total", .help = "Decisions that --shadow looked at too, by whether it would have done the same.", .type = PD_COUNTER, .label = { "same" } };
    struct pd_rt_learning *l = &r->learning;
    struct pd_metrics *m = pd_daemon_metrics(r->d);
    int rc = profile ? pd_profile_read(profile, &l->profile, e) : 0;
    l->l.profile = profile ? &l->profile : NULL;
    for (int i = 0; rc == 0 && i < PD_RT_TERMS; i++)
        if ((rc = pd_metric_get(m, &told, (const char *const[PD_METRIC_LABELS]){ term_names[i] }, &l->m_told[i], e)) == 0)
            rc = pd_metric_get(m, &below, (const char *const[PD_METRIC_LABELS]){ term_names[i] }, &l->m_below[i], e);
    for (int i = 0; rc == 0 && i < 2; i++)
        rc = pd_metric_get(m, &shadow, (const char *const[PD_METRIC_LABELS]){ i ? "no" : "yes" }, &l->m_differs[i], e);
    return rc;
}

void pd_rt_learn_said(struct pd_router *r, const struct pd_rt_worker *w)
{
    char why[400];
    if (pd_learn_lacks(&r->learning.l, &w->m->said, why, sizeof why)[0])
        pd_warn("worker %s: %s", pd_member_name(w->m), why);
}

void pd_rt_learn_free(struct pd_router *r)
{
    pd_learn_free(&r->learning.l);
    pd_profile_free(&r->learning.profile);
}

void pd_rt_learn_run_free(struct pd_rt_run *run) { pd_buf_free(&run->took.fallback); }

/* ---- what was expected ---- */

void pd_rt_learn_arrived(struct pd_router *r, struct pd_rt_run *run)
{
    struct pd_rt_told *t = &run->told;
    if (t->on_path && t->has_path && r->learning.l.path[t->path].active)
        r->learning.l.path[t->path].active--;
    t->on_path = false;
}

void pd_rt_learn_sent(struct pd_router *r, struct pd_rt_run *run, int64_t now)
{
    const struct pd_decision *o = &r->decision;
    const struct pd_route_rec *rec = &o->rec;
    struct pd_learn *l = &r->learning.l;
    struct pd_rt_told *t = &run->told;
    pd_rt_learn_arrived(r, run);
    *t = (struct pd_rt_told){ .any = rec->chosen.any, .mode = o->mode, .attempt = run->attempt, .sent_us = now };
    struct pd_buf fallback = run->took.fallback;
    fallback.n = 0;
    run->took = (struct pd_rt_took){ -1, -1, -1, -1, -1, -1, -1, -1, .tpot_ms = -1, .fallback = fallback };
    if (!t->any)
        return;
    const struct pd_route_pair *x = &rec->pair[rec->chosen.pair];
    const struct pd_route_row *d = &rec->d[x->d], *w = x->p < 0 ? d : &rec->p[x->p];
    snprintf(t->policy, sizeof t->policy, "%s", rec->policy);
    snprintf(t->d, sizeof t->d, "%s", pd_member_name(o->d));
    snprintf(t->p, sizeof t->p, "%s", o->p ? pd_member_name(o->p) : "");
    t->has_d_class = pd_learn_class_of(l, &o->d->said, &t->d_class, NULL) == 0;
    t->has_p_class = o->p && pd_learn_class_of(l, &o->p->said, &t->p_class, NULL) == 0;
    t->has_path = o->p && pd_learn_path_of(l, rec->domains[w->domain], rec->domains[d->domain], NULL, &t->path, NULL) == 0;
    t->tokens = w->miss_tokens;
    t->context = run->need.prompt_tokens > w->miss_tokens ? run->need.prompt_tokens - w->miss_tokens : 0;
    t->seqs = d->seqs;
    t->ahead = pd_ahead_of(w);
    t->kv_tokens = d->kv_tokens;
    t->shared = x->path < 0 ? 0 : rec->paths[x->path].active;
    t->queue = w->queue;
    t->prefill = w->prefill;
    t->interference = d->interference;
    t->transfer = x->transfer;
    t->sync = x->path < 0 ? (struct pd_spread){ 0, 0, 0 } : rec->paths[x->path].sync;
    t->way = pd_spread_sum((struct pd_spread[]){ pd_exposed(x), t->sync, d->slot }, 3);
    t->tpot = d->tpot;
    t->ttft = rec->ttft;
    t->completion = rec->completion;
    t->ttft_permille = o->p ? rec->input.remote_ttft : rec->input.local_ttft;
    t->completion_permille = o->p ? rec->input.remote_completion : rec->input.local_completion;
    if (rec->shadow.policy[0]) {
        const struct pd_route_chosen *s = &rec->shadow.chosen;
        pd_metric_add(r->learning.m_differs[!s->any || s->mode != rec->chosen.mode || s->p != rec->chosen.p || s->d != rec->chosen.d], 1);
    }
}

/* ---- what it was ---- */

static int64_t time_in(struct pd_bin map, const char *key)
{
    struct pd_bin v;
    int64_t us;
    return map.p && pd_map_find(map.p, map.n, key, &v) == 1 && pd_get_int(v, &us) && us >= 0 && us < PD_US_MOST ? us : -1;
}

void pd_rt_learn_published(struct pd_router *r, struct pd_rt_run *run, const struct pd_rec *kv, int64_t now)
{
    struct pd_bin t = { NULL, 0 };
    struct pd_rt_told *x = &run->told;
    pd_map_find(kv->p, kv->n, "t", &t);
    run->took.p_queue_us = time_in(t, "queue_us");
    run->took.p_prefill_us = time_in(t, "prefill_us");
    run->took.p_total_us = time_in(t, "total_us");
    run->took.p_cached = time_in(t, "cached_tokens");
    x->published_us = now;
    if (run->p && !run->sign && !(x->way.marks & PD_SPREAD_COLD))
        x->late_us = now + (x->way.p95 > PD_RT_LATE_US ? x->way.p95 : PD_RT_LATE_US) + 1;
    if (x->has_path && !run->sign) {
        r->learning.l.path[x->path].active++;
        x->on_path = true;
        x->on_path_until = now + x->transfer.p95 + x->sync.p95;
    }
}

static void u32_of(struct pd_bin v, uint32_t *out)
{
    int64_t n;
    if (pd_get_int(v, &n) && n >= 0 && n <= UINT32_MAX)
        *out = (uint32_t)n;
}

static void word_of(struct pd_bin v, char out[12])
{
    struct pd_str s;
    if (pd_get_str(v, &s) && s.n < 12 && !memchr(s.p, 0, s.n)) {
        memset(out, 0, 12);
        memcpy(out, s.p, s.n);
    }
}

static void ms_of(struct pd_bin v, int64_t *us)
{
    double ms;
    if (pd_get_float(v, &ms) && ms >= 0 && ms < (double)PD_US_MOST / 1e3)
        *us = (int64_t)(ms * 1e3);
}

void pd_rt_learn_result(struct pd_rt_run *run, const void *rec, size_t n)
{
    struct pd_rt_took *k = &run->took;
    struct pd_iter it;
    struct pd_str key, text;
    struct pd_bin v;
    int64_t bytes = 0;
    if (!pd_iter_open(&it, (struct pd_bin){ rec, n }, PD_T_MAP))
        return;
    while (pd_iter_pair(&it, &key, &v)) {
        if (!key.p)
            continue;
        if (pd_str_eq(key, "prompt_tokens")) u32_of(v, &k->prompt);
        else if (pd_str_eq(key, "cached_tokens")) u32_of(v, &k->cached);
        else if (pd_str_eq(key, "transferred_tokens")) u32_of(v, &k->transferred);
        else if (pd_str_eq(key, "recomputed_tokens")) u32_of(v, &k->recomputed);
        else if (pd_str_eq(key, "completion_tokens")) u32_of(v, &k->completion);
        else if (pd_str_eq(key, "finish_reason")) word_of(v, k->finish);
        else if (pd_str_eq(key, "mode")) word_of(v, k->mode);
        else if (pd_str_eq(key, "ttft_ms")) ms_of(v, &k->ttft_us);
        else if (pd_str_eq(key, "kv_ms")) ms_of(v, &k->kv_us);
        else if (pd_str_eq(key, "tpot_ms")) pd_get_float(v, &k->tpot_ms);
        else if (pd_str_eq(key, "kv_bytes") && pd_get_int(v, &bytes) && bytes >= 0) k->kv_bytes = (uint64_t)bytes;
        else if (pd_str_eq(key, "fallback") && pd_get_str(v, &text)) {
            k->fallback.n = 0;
            pd_buf_add(&k->fallback, text.p, text.n, NULL);
        } else if (pd_str_eq(key, "t")) {
            k->queue_us = time_in(v, "queue_us");
            k->prefill_us = time_in(v, "prefill_us");
        }
    }
}

static void judge(struct pd_rt_learning *l, int term, struct pd_spread told, int64_t us)
{
    if (us < 0 || told.marks & PD_SPREAD_COLD || !told.p95)
        return;
    pd_metric_add(l->m_told[term], 1);
    pd_metric_add(l->m_below[term], us <= told.p95);
}

static void set(struct pd_outcome_rec *o, uint32_t bit, int64_t *to, int64_t us)
{
    if (us < 0)
        return;
    o->has |= bit;
    *to = us;
}

/* Terms of what was done, as far as somebody measured them. */
static void fill(const struct pd_rt_run *run, struct pd_outcome_rec *o, int64_t now)
{
    const struct pd_rt_told *t = &run->told;
    const struct pd_rt_took *k = &run->took;
    bool remote = !strcmp(o->mode, "remote"), streamed = run->t_first > 0, again = run->migrations > 0;
    int64_t ttft = streamed ? run->t_first - t->sent_us : k->ttft_us;
    if (again || !t->any)
        return;
    int64_t before = remote && k->p_total_us >= 0 ? k->p_total_us - k->p_prefill_us : !remote && streamed && k->prefill_us >= 0 ? ttft - k->prefill_us : k->queue_us;
    set(o, PD_OC_QUEUE, &o->queue_us, before);
    set(o, PD_OC_PREFILL, &o->prefill_us, remote ? k->p_prefill_us : k->prefill_us);
    set(o, PD_OC_TTFT, &o->ttft_us, ttft);
    if (remote && k->p_cached >= 0) {
        o->has |= PD_OC_P_CACHED;
        o->p_cached_tokens = k->p_cached < o->prompt_tokens ? (uint32_t)k->p_cached : o->prompt_tokens;
    }
    if (remote && k->ttft_us >= 0 && k->p_total_us >= 0)
        set(o, PD_OC_TRANSFER, &o->transfer_us, k->ttft_us > k->p_total_us ? k->ttft_us - k->p_total_us : 0);
    if (remote && streamed && k->ttft_us >= 0 && ttft >= 0)
        set(o, PD_OC_SYNC, &o->sync_us, ttft > k->ttft_us ? ttft - k->ttft_us : 0);
    if (remote && k->kv_bytes)
        set(o, PD_OC_KV, &o->kv_us, k->kv_us);
    if (k->tpot_ms > 0 && k->tpot_ms < (double)PD_US_MOST / 1e3)
        set(o, PD_OC_TPOT, &o->tpot_us, (int64_t)(k->tpot_ms * 1e3));
    set(o, PD_OC_COMPLETION, &o->completion_us, now > t->sent_us ? now - t->sent_us : 0);
}

/* Only what was done as it was meant says something of what was expected. */
static void learn(struct pd_router *r, const struct pd_rt_run *run, const struct pd_outcome_rec *o, int64_t now)
{
    struct pd_rt_learning *l = &r->learning;
    const struct pd_rt_told *t = &run->told;
    bool remote = t->mode == PD_MODE_REMOTE, as_meant = !o->fallback.p && !strcmp(o->mode, pd_mode_names[t->mode]) && !o->migrations;
    bool whole = !strcmp(o->finish_reason, "stop") || !strcmp(o->finish_reason, "length");
    if (!t->any || !as_meant || !whole)
        return;
    uint32_t batch = t->seqs + run->n, cached = o->cached_tokens < o->prompt_tokens ? o->cached_tokens : o->prompt_tokens;
    bool guessed = remote && !(o->has & PD_OC_P_CACHED);        /* one that does not say what it held is taken at its word of before */
    cached = remote ? o->p_cached_tokens : cached;
    uint64_t tokens = guessed ? t->tokens : o->prompt_tokens - cached, context = guessed ? t->context : cached;
    int64_t prefill = o->has & PD_OC_PREFILL ? o->prefill_us : -1;
    judge(l, QUEUE, t->queue, o->has & PD_OC_QUEUE ? o->queue_us : -1);
    judge(l, TPOT, t->tpot, o->has & PD_OC_TPOT ? o->tpot_us : -1);
    if (o->has & PD_OC_QUEUE && (remote ? t->has_p_class : t->has_d_class))
        pd_learned_queue(&l->l, remote ? t->p_class : t->d_class, t->ahead, o->queue_us, now);
    judge(l, TTFT, t->ttft, o->has & PD_OC_TTFT ? o->ttft_us : -1);
    pd_learned_sum(&l->l, remote, PD_LEARN_TTFT, t->ttft, t->ttft_permille, o->has & PD_OC_TTFT ? o->ttft_us : -1);
    if (!strcmp(o->finish_reason, "length"))
        pd_learned_sum(&l->l, remote, PD_LEARN_COMPLETION, t->completion, t->completion_permille, o->has & PD_OC_COMPLETION ? o->completion_us : -1);
    if (remote) {
        judge(l, PREFILL, t->prefill, prefill);
        judge(l, TRANSFER, t->transfer, o->has & PD_OC_TRANSFER ? o->transfer_us : -1);
        judge(l, SYNC, t->sync, o->has & PD_OC_SYNC ? o->sync_us : -1);
        if (t->has_p_class && prefill > 0)
            pd_learned_prefill(&l->l, t->p_class, tokens, context, prefill, now);
        if (t->has_path && o->has & PD_OC_TRANSFER)
            pd_rt_lent_took(r, run, o->kv_bytes, o->transfer_us, now);
        if (t->has_path && o->has & PD_OC_TRANSFER)
            pd_learned_transfer(&l->l, t->path, o->kv_bytes, t->shared, o->transfer_us > 0 ? o->transfer_us : 1, o->has & PD_OC_SYNC ? o->sync_us : -1, now);
    } else if (t->has_d_class && prefill > 0) {
        if (!t->seqs) {
            judge(l, PREFILL, t->prefill, prefill);
            pd_learned_prefill(&l->l, t->d_class, tokens, context, prefill, now);
        } else {
            int64_t beside = prefill - pd_learn_prefill(&l->l, t->d_class, tokens, context, now).p50;
            judge(l, INTERFERENCE, t->interference, beside > 0 ? beside : 0);
            pd_learned_interference(&l->l, t->d_class, tokens, t->seqs, t->kv_tokens, beside, now);
        }
    }
    if (t->has_d_class && o->has & PD_OC_TPOT)
        pd_learned_tpot(&l->l, t->d_class, batch, t->kv_tokens + (o->prompt_tokens + o->completion_tokens / 2) * (uint64_t)run->n, o->tpot_us, now);
    pd_learned_length(&l->l, o->prompt_tokens, run->need.max_tokens, o->completion_tokens);
}

void pd_rt_learn_end(struct pd_router *r, struct pd_rt_run *run, const char *finish)
{
    const struct pd_rt_told *t = &run->told;
    const struct pd_rt_took *k = &run->took;
    int64_t now = pd_mono_us();
    const char *why = pd_rt_text_of(&run->fallback);
    pd_rt_learn_arrived(r, run);
    if (!t->any)                /* it was never sent */
        return;
    struct pd_outcome_rec o = { .t_us = pd_wall_us(), .attempt = t->attempt, .migrations = run->migrations, .p = { t->p[0] ? t->p : NULL, strlen(t->p) },
        .d = { t->d, strlen(t->d) }, .prompt_tokens = k->prompt ? k->prompt : run->need.prompt_tokens, .cached_tokens = k->cached, .cached_expected = (uint32_t)t->context, .transferred_tokens = k->transferred,
        .recomputed_tokens = k->recomputed, .completion_tokens = k->completion ? k->completion : run->choice[0].sent, .kv_bytes = k->kv_bytes,
        .waited_us = t->sent_us > run->t_accept ? t->sent_us - run->t_accept : 0 };
    if (t->late_attempt && !strcmp(k->mode, "local")) {
        o.attempt = t->late_attempt;
        o.p = (struct pd_str){ NULL, 0 };
    }
    memcpy(o.run, run->name, sizeof o.run);
    memcpy(o.op, run->op, sizeof o.op);
    snprintf(o.policy, sizeof o.policy, "%s", t->policy);
    snprintf(o.mode, sizeof o.mode, "%s", k->mode[0] ? k->mode : pd_mode_names[run->mode]);
    snprintf(o.finish_reason, sizeof o.finish_reason, "%s", k->finish[0] ? k->finish : finish);
    if (why || k->fallback.n)
        o.fallback = why ? (struct pd_str){ why, strlen(why) } : (struct pd_str){ (char *)k->fallback.p, k->fallback.n };
    if ((why = pd_rt_text_of(&run->why)))
        o.cause = (struct pd_str){ why, strlen(why) };
    fill(run, &o, now);
    if (o.has & PD_OC_COMPLETION && !strcmp(o.finish_reason, "length"))
        judge(&r->learning, COMPLETION, t->completion, o.completion_us);
    learn(r, run, &o, now);
    struct pd_buf b = { 0 };
    struct pd_err e;
    if (r->o.trace && pd_outcome_encode(&o, &b, &e) == 0)
        pd_trace_record(r->o.trace, b.p, b.n);
    pd_buf_free(&b);
}
