/* Paths of KV, as the router sees transfers go over them; limits of fallbacks; the topology's file. */
#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "router_in.h"
#include "router_left.h"

/* ---- what was lent ---- */

static struct pd_path_end end_of(struct pd_router *r, struct pd_rt_worker *w)
{
    const struct pd_member *m = w->m;
    return pd_path_end_of(r->paths.paths, m->at, m->known ? m->said.worker : (struct pd_str){ NULL, 0 }, m->known ? m->said.domain : (struct pd_str){ NULL, 0 });
}

static struct pd_ledger_item *item_of(const struct pd_router *r, const struct pd_rt_run *run)
{
    return run->lent.given ? pd_ledger_find(r->paths.ledger, run->name, run->lent.attempt) : NULL;
}

void pd_rt_lent_over(struct pd_router *r, struct pd_rt_run *run)
{
    struct pd_ledger_item *i = item_of(r, run);
    if (i)
        pd_ledger_end(r->paths.ledger, i);
    run->lent.given = false;
}

void pd_rt_lend(struct pd_router *r, struct pd_rt_run *run, int64_t now)
{
    struct pd_rt_worker *p = run->p ? run->p : run->d;
    struct pd_ledger_item i = { .attempt = (uint8_t)run->attempt, .p = p->m->at, .d = run->d->m->at, .tokens = run->p ? run->p_share.prefill_tokens : 0,
                                .blocks = run->p ? run->p_share.blocks : 0, .t_us = pd_wall_us() };
    struct pd_err e;
    pd_rt_lent_went(r, run, PD_WENT_NOWHERE, NULL, now);
    pd_rt_lent_over(r, run);
    memcpy(i.run, run->name, sizeof i.run);
    memcpy(i.token, run->has_token ? run->token : run->own_token, sizeof i.token);
    run->lent = (struct pd_rt_lent){ .attempt = i.attempt, .since_us = now };
    if ((run->lent.given = pd_ledger_give(r->paths.ledger, &i, &e) == 0) == false)
        pd_warn("run %s: it is in no ledger: %s", run->name, e.msg);
    if (!run->p) {
        pd_rt_lent_read(r, run);
        return;
    }
    run->lent.p = end_of(r, run->p);
    run->lent.d = end_of(r, run->d);
    run->lent.ticket = pd_paths_begin(r->paths.paths, &run->lent.p, &run->lent.d, now);
    run->lent.on_path = true;
    run->lent.p.at = run->lent.d.at = NULL;     /* it may outlive what they point to */
}

void pd_rt_lent_published(struct pd_router *r, struct pd_rt_run *run, const struct pd_rec *rec)
{
    struct pd_ledger_item *i = item_of(r, run);
    struct pd_share part = run->p_share;
    struct pd_bin v;
    int64_t bytes = 0;
    part.blocks = 0;            /* they stay until somebody has read them */
    pd_member_give_back(run->p->m, part);
    run->p_share = (struct pd_share){ .blocks = run->p_share.blocks };
    if (i) {
        if (pd_map_find(rec->p, rec->n, "bytes", &v) != 1 || !pd_get_int(v, &bytes) || bytes < 0)
            bytes = 0;
        pd_ledger_publish(r->paths.ledger, i, (uint64_t)bytes);
    }
}

void pd_rt_lent_read(struct pd_router *r, struct pd_rt_run *run)
{
    struct pd_ledger_item *i = item_of(r, run);
    if (run->p && run->p_done) {
        pd_member_give_back(run->p->m, run->p_share);
        run->p_share = (struct pd_share){ 0 };
    }
    if (i)
        pd_ledger_take(r->paths.ledger, i);
}

void pd_rt_lent_went(struct pd_router *r, struct pd_rt_run *run, enum pd_went went, const char *cause, int64_t now)
{
    if (!run->lent.on_path)
        return;
    run->lent.on_path = false;
    if (!pd_paths_end(r->paths.paths, &run->lent.p, &run->lent.d, run->lent.ticket, went, cause, 0, went == PD_WENT_WRONG ? now - run->lent.since_us : 0, now))
        return;
    pd_metric_add(r->paths.m_turns, 1);
    went == PD_WENT_WRONG ? pd_warn("run %s: its path's breaker is open: %s", run->name, cause ? cause : "") : pd_info("run %s: its path's breaker is closed again", run->name);
}

/* The first word of a fallback, when it says that the path is no good; what else there is may happen on a good one. So may a transfer that took longer than its
 * client had patience for, if that was less than what was expected. */
static bool blames_path(const struct pd_rt_run *run, struct pd_str f)
{
    static const char *const kinds[] = { "transfer_timeout", "transfer_slow", "kv_failed", "lease_ended", "integrity", "fingerprint_mismatch", NULL };
    int i = 0;
    while (kinds[i] && (f.n < strlen(kinds[i]) || memcmp(f.p, kinds[i], strlen(kinds[i]))))
        i++;
    return kinds[i] && (i || !run->transfer_us || run->transfer_us >= run->told.transfer.p95 + run->told.sync.p95);
}

static const char *at_of(const struct pd_router *r, uint64_t key)
{
    for (const struct pd_rt_worker *w = r->workers; w; w = w->next)
        if (pd_xxh3(w->m->at, strlen(w->m->at), 0) == key)
            return w->m->at;
    return NULL;
}

/* KV that failed a check: this pair has no more traffic until a person has looked. */
static void hold(struct pd_router *r, struct pd_rt_run *run, struct pd_str f)
{
    char why[PD_LEDGER_TEXT + 1];
    struct pd_err e;
    const char *p = at_of(r, run->lent.p.key), *d = at_of(r, run->lent.d.key);
    if (!p || !d || pd_ledger_held(r->paths.ledger, p, d))
        return;
    snprintf(why, sizeof why, "%.*s (run %s)", (int)(f.n < 240 ? f.n : 240), f.p, run->name);
    if (pd_ledger_hold(r->paths.ledger, p, d, why, pd_wall_us(), &e) < 0) {
        pd_error("run %s: %s to %s cannot be put on hold: %s", run->name, p, d, e.msg);
        return;
    }
    pd_rt_trace_pair(r, "hold", p, d, "cause", why);
    pd_metric_add(r->paths.m_holds, 1);
    pd_error("KV from %s to %s is on hold until it is released (pd-route --release %s,%s --reason TEXT --router ENDPOINT): %s", p, d, p, d, why);
}

void pd_rt_lent_result(struct pd_router *r, struct pd_rt_run *run, const struct pd_rec *rec)
{
    struct pd_bin v;
    struct pd_str fallback = { NULL, 0 }, mode = { NULL, 0 };
    int64_t now = pd_mono_us();
    pd_rt_lent_read(r, run);
    if (pd_map_find(rec->p, rec->n, "fallback", &v) == 1)
        pd_get_str(v, &fallback);
    if (pd_map_find(rec->p, rec->n, "mode", &v) == 1)
        pd_get_str(v, &mode);
    if (run->mode == PD_MODE_REMOTE && fallback.p && !pd_str_eq(mode, "remote") && run->d && !run->fall.booked) {
        pd_rt_fall_begin(r, run, run->d, now);  /* it fell back by its own word, and has computed it: the next ones wait for that all the same */
        run->fall.unsure = true;
    }
    if (!run->lent.on_path)
        return;
    if (fallback.p && blames_path(run, fallback)) {
        char kind[64];
        size_t n = strcspn(fallback.p, ":");
        snprintf(kind, sizeof kind, "%.*s", (int)(n < fallback.n ? n : fallback.n), fallback.p);
        if (!strcmp(kind, "integrity"))
            hold(r, run, fallback);
        pd_rt_lent_went(r, run, PD_WENT_WRONG, kind, now);
    } else if (fallback.p || !pd_str_eq(mode, "remote"))
        pd_rt_lent_went(r, run, PD_WENT_NOWHERE, NULL, now);
    else
        pd_rt_lent_went(r, run, PD_WENT_WELL, NULL, now);
}

void pd_rt_lent_took(struct pd_router *r, const struct pd_rt_run *run, uint64_t bytes, int64_t us, int64_t now)
{
    if (bytes && us > 0 && run->lent.attempt)
        pd_paths_took(r->paths.paths, &run->lent.p, &run->lent.d, run->lent.ticket, bytes, us, now);
}

/* ---- fallbacks ---- */

static uint64_t budget_of(const struct pd_member *m) { return (uint64_t)m->said.capacity.blocks * (m->said.capacity.block_size ? m->said.capacity.block_size : 1); }

static struct pd_limit_case case_of(struct pd_router *r, const struct pd_rt_run *run, int64_t now)
{
    struct pd_limit_case c = { .now_us = now, .deadline_us = run->deadline_us, .waited_us = now - run->fall.since_us,
                               .need_us = (int64_t)(r->paths.limit.us_per_token * run->need.prompt_tokens), .tokens_ahead = r->paths.tokens_ahead, .runs_ahead = r->paths.runs_ahead,
                               .had_one = run->fall.times > 1 || (run->fall.times && !run->fall.fell) };
    for (const struct pd_rt_worker *w = r->workers; w; w = w->next)
        c.workers += w->m->reachable && pd_member_can_decode(w->m);
    return c;
}

void pd_rt_fall_begin(struct pd_router *r, struct pd_rt_run *run, struct pd_rt_worker *w, int64_t now)
{
    pd_rt_fall_over(r, run, false);
    run->fall.at = w;
    run->fall.unsure = false;
    run->fall.booked = true;
    run->fall.tokens = run->need.prompt_tokens;
    run->fall.since_us = now;
    pd_limit_begin(&r->paths.limit, &w->m->fallbacks, run->fall.tokens, now);
}

bool pd_rt_fall_at(struct pd_router *r, struct pd_rt_run *run, struct pd_rt_worker *w, int64_t now)
{
    struct pd_limit_case c = case_of(r, run, now);
    int64_t retry;
    const char *why;
    c.waited_us = 0;
    c.fits = pd_limit_fits(&r->paths.limit, w->m->fallbacks, budget_of(w->m), run->need.prompt_tokens);
    if (pd_limit_judge(&r->paths.limit, &c, &retry, &why) != PD_LIMIT_GO)
        return false;
    pd_rt_fall_begin(r, run, w, now);
    return true;
}

void pd_rt_fall_over(struct pd_router *r, struct pd_rt_run *run, bool computed)
{
    if (!run->fall.at)
        return;
    pd_limit_end(&r->paths.limit, &run->fall.at->m->fallbacks, run->fall.tokens, computed && !run->fall.unsure ? pd_mono_us() - run->fall.since_us : 0);
    run->fall.at = NULL;
}

static void waits_ahead(struct pd_router *r, const struct pd_rt_run *run)
{
    r->paths.tokens_ahead += run->need.prompt_tokens;
    r->paths.runs_ahead++;
}

enum pd_limited pd_rt_fall_judge(struct pd_router *r, struct pd_rt_run *run, int64_t now, int64_t *retry_after_us, const char **why)
{
    struct pd_limit_case c = case_of(r, run, now);
    bool limited = false, own = false;
    c.fits = r->decision.outcome == PD_CHOSEN;
    for (uint32_t i = 0; i < r->decision.n_d; i++) {
        enum pd_excluded x = r->decision.d_row[i].x;
        limited |= x == PD_X_FALLBACKS;
        own |= x == PD_X_CONTEXT || x == PD_X_ADAPTER || x == PD_X_TRIED;
    }
    if (!c.fits && !limited)    /* other things are in the way, which have their own limits */
        return PD_LIMIT_WAIT;
    enum pd_limited v = pd_limit_judge(&r->paths.limit, &c, retry_after_us, why);
    if (v == PD_LIMIT_GO)
        pd_rt_fall_begin(r, run, r->decision.d->user, now);
    else if (v == PD_LIMIT_WAIT) {
        if (!own && !r->paths.alike_ahead) {
            r->paths.alike_ahead = true;
            r->paths.fits_ahead = c.fits;
        }
        waits_ahead(r, run);
    }
    return v;
}

enum pd_limited pd_rt_fall_behind(struct pd_router *r, struct pd_rt_run *run, int64_t now, int64_t *retry_after_us, const char **why)
{
    struct pd_limit_case c = case_of(r, run, now);
    c.fits = r->paths.fits_ahead;
    enum pd_limited v = pd_limit_judge(&r->paths.limit, &c, retry_after_us, why);
    if (v != PD_LIMIT_SHED)
        waits_ahead(r, run);
    return v == PD_LIMIT_SHED ? v : PD_LIMIT_WAIT;
}

/* ---- the topology's file ---- */

static bool same_file(const struct stat *a, const struct stat *b)
{
    return a->st_ino == b->st_ino && a->st_dev == b->st_dev && a->st_size == b->st_size && a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static void use(struct pd_router *r, struct pd_topology *t)
{
    struct pd_buf filled = { 0 };
    struct pd_topology *old = r->paths.topology;
    r->paths.topology = t;
    pd_paths_set_topology(r->paths.paths, t);
    pd_topology_free(old);
    if (pd_topology_filled(t, &filled, NULL) == 0 && filled.n && pd_buf_add(&filled, "", 1, NULL) == 0)
        pd_warn("%s: %s", r->o.topology, (char *)filled.p);
    pd_info("%s: version %016llx, %u domains", r->o.topology, (unsigned long long)pd_topology_version(t), pd_topology_domains(t));
    pd_buf_free(&filled);
}

/* A file that is no good changes nothing, and is told once. */
static void look_at_file(struct pd_router *r)
{
    struct pd_topology *t = NULL;
    struct stat st;
    struct pd_err e;
    if (!r->o.topology || stat(r->o.topology, &st) || (r->paths.is_seen && same_file(&st, &r->paths.seen)))
        return;
    r->paths.seen = st;
    r->paths.is_seen = true;
    if (pd_topology_load(r->o.topology, &t, &e) < 0)
        pd_warn("%s; the topology stays as it was (version %016llx)", e.msg, (unsigned long long)pd_topology_version(r->paths.topology));
    else
        use(r, t);
}

/* ---- the whole ---- */

int pd_rt_paths_new(struct pd_router *r, struct pd_err *e)
{
    const struct pd_metric_about turns = { .name = "pd_breaker_turns_total", .help = "Times that a path's breaker opened or closed.", .type = PD_COUNTER },
        holds = { .name = "pd_holds_total", .help = "Pairs put on hold, as KV failed a check.", .type = PD_COUNTER },
        shed = { .name = "pd_shed_total", .help = "Runs that fell back and were shed.", .type = PD_COUNTER };
    struct pd_metrics *m = pd_daemon_metrics(r->d);
    struct pd_topology *t = NULL;
    struct pd_ledger_read was;
    int rc = pd_metric_get(m, &turns, (const char *const[PD_METRIC_LABELS]){ NULL }, &r->paths.m_turns, e);
    rc = rc ? rc : pd_metric_get(m, &holds, (const char *const[PD_METRIC_LABELS]){ NULL }, &r->paths.m_holds, e);
    rc = rc ? rc : pd_metric_get(m, &shed, (const char *const[PD_METRIC_LABELS]){ NULL }, &r->paths.m_shed, e);
    rc = rc ? rc : pd_ledger_open(r->o.ledger, &r->paths.ledger, &was, e);
    if (rc < 0)
        return rc;
    struct pd_paths_opts po = { .rule = r->o.domain, .breaker = r->o.breaker, .seed = (uint64_t)r->o.seed, .ledger = r->paths.ledger };
    if ((rc = pd_paths_new(&po, &r->paths.paths, e)) < 0)
        return rc;
    r->paths.kept = r->o.ledger != NULL;
    r->paths.has_left = was.left > 0;
    r->paths.limit.o = r->o.fallback;
    r->paths.limit.o.wait_us = r->o.wait_us;
    if (was.torn)
        pd_warn("%s: %llu bytes were no record, and are dropped", r->o.ledger, (unsigned long long)was.torn);
    if (was.left || was.holds)
        pd_warn("%s: %u runs of a former life are to be dropped at their workers, %u pairs are on hold", r->o.ledger, was.left, was.holds);
    if (!r->o.topology)
        return 0;
    if ((rc = pd_topology_load(r->o.topology, &t, e)) < 0)
        return rc;
    r->paths.is_seen = !stat(r->o.topology, &r->paths.seen);
    use(r, t);
    return 0;
}

void pd_rt_paths_free(struct pd_router *r)
{
    pd_rt_left_free(r);
    pd_paths_free(r->paths.paths);
    pd_topology_free(r->paths.topology);
    pd_ledger_free(r->paths.ledger);
}

void pd_rt_paths_beat(struct pd_router *r, int64_t now)
{
    pd_ledger_beat(r->paths.ledger, now);
    const char *trouble = pd_ledger_trouble(r->paths.ledger);
    look_at_file(r);
    if (!trouble != !r->paths.in_trouble) {
        r->paths.in_trouble = trouble != NULL;
        trouble ? pd_error("the ledger is not written: %s", trouble) : pd_info("the ledger is written again");
    }
    pd_rt_left_beat(r, now);
}

void pd_rt_paths_said(struct pd_router *r, struct pd_rt_worker *w, bool fresh)
{
    struct pd_path_end e = end_of(r, w);
    if (fresh)
        pd_paths_renew(r->paths.paths, &e, pd_mono_us());
}

void pd_rt_paths_ledger(const struct pd_router *r, void (*put)(void *to, const char *key, int64_t value), void *to)
{
    struct pd_ledger_sum all = pd_ledger_all(r->paths.ledger);
    uint32_t holds = 0;
    for (const struct pd_ledger_hold *h = pd_ledger_first_hold(r->paths.ledger); h; h = (void *)h->node.next)
        holds++;
    put(to, "kv_unread_runs", all.runs);
    put(to, "kv_unread_blocks", (int64_t)all.blocks);
    put(to, "kv_unread_bytes", (int64_t)all.bytes);
    put(to, "left_over", pd_ledger_left(r->paths.ledger));
    put(to, "holds", holds);
    put(to, "breakers_open", pd_paths_breakers(r->paths.paths));
    put(to, "domains", r->paths.topology ? pd_topology_domains(r->paths.topology) : 0);
    put(to, "fallbacks_now", r->paths.limit.all.runs);
    put(to, "shed", pd_metric_value(r->paths.m_shed));
}
