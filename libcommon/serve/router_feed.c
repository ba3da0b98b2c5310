#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../kv/prefix.h"
#include "router_in.h"

enum { ASK_US = 1000000, ASK_MAX_US = 64000000, SWEEP_US = 5000, CROWDED = PD_INDEX_SLOTS / 2 };

/* ---- asking ---- */

/* A connection that fails now ends, and is asked anew when it is back. */
static void ask(struct pd_router *r, struct pd_rt_worker *w)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    const struct pd_feed *f = &w->feed.f;
    if (pd_follow_encode(true, f->known ? f->life : NULL, f->seq, &b, &e) == 0) {
        if (w->feed.from == PD_RT_REGISTRATION && w->reg)
            pd_conn_put(w->reg, b.p, b.n, &e);
        else if (w->feed.from == PD_RT_FOLLOWED)
            pd_upstream_tell(w->u, b.p, b.n, &e);
    }
    pd_buf_free(&b);
}

/* A snapshot: at once the first time, then ever later, so that who sends none that is good costs little. Again until one has come. */
static void ask_when_due(struct pd_router *r, struct pd_rt_worker *w, int64_t now)
{
    struct pd_rt_feed *f = &w->feed;
    if (!f->ask_us || now < f->ask_us || f->from == PD_RT_NOWHERE)
        return;
    ask(r, w);
    f->backoff_us = !f->backoff_us ? ASK_US : f->backoff_us < ASK_MAX_US ? 2 * f->backoff_us : ASK_MAX_US;
    f->ask_us = now + f->backoff_us;
}

/* ---- what is presumed ---- */

static void forget_guesses(struct pd_router *r, struct pd_rt_feed *f)
{
    for (int i = 0; i < 2; i++)
        if (f->guess[i].joined)
            pd_index_leave(r->index.x, f->guess[i].slot);
    f->guess[0].joined = f->guess[1].joined = false;
}

/* What was sent long ago is no longer presumed. */
static void turn_guesses(struct pd_router *r, struct pd_rt_feed *f, int64_t now)
{
    if (now - f->turned_us < PD_RT_GUESS_US || !(f->guess[0].joined || f->guess[1].joined))
        return;
    if (f->guess[1].joined)
        pd_index_leave(r->index.x, f->guess[1].slot);
    f->guess[1] = f->guess[0];
    f->guess[0].joined = false;
    f->turned_us = now;
}

/* ---- workers ---- */

static void leave(struct pd_router *r, struct pd_rt_worker *w)
{
    struct pd_rt_feed *f = &w->feed;
    if (f->open)
        pd_feed_lost(&f->f);
    forget_guesses(r, f);
    f->heard = false;
    f->ask_us = f->backoff_us = 0;
    r->index.version++;
}

void pd_rt_feed_gone(struct pd_router *r, struct pd_rt_worker *w)
{
    leave(r, w);
    w->feed.open = false;
    w->feed.from = PD_RT_NOWHERE;
}

void pd_rt_feed_silent(struct pd_rt_worker *w, enum pd_rt_from from)
{
    if (w->feed.from == from)
        w->feed.from = PD_RT_NOWHERE;
}

void pd_rt_feed_said(struct pd_router *r, struct pd_rt_worker *w, enum pd_rt_from from, bool fresh)
{
    const struct pd_worker_rec *s = &w->m->said;
    struct pd_rt_feed *f = &w->feed;
    struct pd_err e;
    uint64_t seed;
    int64_t now = pd_mono_us();
    if (pd_fp_must_seed(s->fp_fields, &seed, &e) < 0 || !s->capacity.block_size) {
        leave(r, w);            /* nobody could say what its hashes are of */
        f->open = false;
        return;
    }
    if (!f->open || fresh || seed != f->seed || s->capacity.block_size != f->block_size) {
        leave(r, w);
        pd_feed_open(&f->f, r->index.x, s->capacity.block_size, s->capacity.blocks);
        f->open = true;
        f->seed = seed;
        f->block_size = s->capacity.block_size;
        if (f->from == from)
            ask(r, w);
    }
    if (f->from == PD_RT_NOWHERE) {
        f->from = from;
        f->ask_us = 0;
        ask(r, w);
    }
    if (f->from == from)
        f->heard_us = now;
}

static void doubt(struct pd_router *r, struct pd_rt_worker *w, const struct pd_err *why)
{
    struct pd_rt_feed *f = &w->feed;
    int64_t now = pd_mono_us();
    pd_feed_lost(&f->f);
    r->index.version++;
    if (!f->ask_us)
        f->ask_us = now + f->backoff_us;
    pd_warn("worker %s: what it holds is not known any more: %s; a snapshot is asked for%s", pd_member_name(w->m), why->msg, f->ask_us > now ? " in a while" : "");
    ask_when_due(r, w, now);
}

void pd_rt_feed_event(struct pd_router *r, struct pd_rt_worker *w, enum pd_rt_from from, const struct pd_rec *rec)
{
    struct pd_rt_index *x = &r->index;
    struct pd_rt_feed *f = &w->feed;
    struct pd_arena mem = { 0 };
    struct pd_kvevent v;
    struct pd_err e = { 0 };
    if (!f->open || f->from != from)
        return;                 /* of a connection before, or from who has not said what its blocks are */
    int64_t now = pd_mono_us();
    int rc = pd_kvevent_decode(rec->p, rec->n, &mem, &v, &e);
    bool waits = rc == 0 && f->heard && !f->f.known && !f->f.next_part && strcmp(v.op, "snapshot");
    f->heard_us = now;
    if (!f->heard)
        forget_guesses(r, f);
    f->heard = true;
    if (!waits) {               /* else it was on its way already when the snapshot was asked for */
        uint64_t orphans = f->f.orphans, snapshots = f->f.snapshots, repeated = f->f.repeated;
        rc = rc ? rc : pd_feed_event(&f->f, &v, &e);
        pd_metric_add(x->m_orphans, (int64_t)(f->f.orphans - orphans));
        if (rc == PD_FED && f->f.joined)
            x->of[f->f.slot] = w;
        if (rc == PD_FED && f->f.repeated == repeated) {
            x->version++;
            pd_metric_add(x->m_events, 1);
        }
        if (f->f.snapshots != snapshots) {
            pd_metric_add(x->m_snapshots, 1);
            f->ask_us = 0;
        }
        if (rc != PD_FED) {
            pd_metric_add(rc == PD_FED_GAP ? x->m_gaps : x->m_refused, 1);
            doubt(r, w, &e);
        }
    }
    if (pd_index_stats(x->x).slots > CROWDED)
        pd_index_sweep(x->x);
    pd_arena_free(&mem);
}

void pd_rt_feed_beat(struct pd_router *r, int64_t now)
{
    int64_t until = pd_mono_us() + SWEEP_US;
    while (pd_index_sweep(r->index.x) && pd_mono_us() < until)
        ;
    for (struct pd_rt_worker *w = r->workers; w; w = w->next) {
        turn_guesses(r, &w->feed, now);
        ask_when_due(r, w, now);
        if (w->feed.f.known && !w->feed.ask_us && w->feed.backoff_us)
            w->feed.backoff_us -= w->feed.backoff_us > ASK_US ? ASK_US : w->feed.backoff_us;    /* good again, for as long */
    }
}

/* ---- a prompt ---- */

static bool pair_of(const struct pd_rt_run *run, const char *name, struct pd_bin *v)
{
    const struct pd_rt_body *body = run->ids.b.n ? &run->ids : &run->body;
    struct pd_iter it = { body->b.p, body->b.n, body->pairs };
    struct pd_str key;
    while (pd_iter_pair(&it, &key, v))
        if (pd_str_eq(key, name))
            return true;
    return false;
}

/* The token ids of its body; NULL: it has none, or there is no memory. */
static int32_t *ids_of(const struct pd_rt_run *run, uint32_t *n)
{
    struct pd_iter it;
    struct pd_bin v;
    int64_t id;
    if (!pair_of(run, "token_ids", &v) || !pd_iter_open(&it, v, PD_T_ARRAY) || it.left > v.n)
        return NULL;
    int32_t *ids = pd_alloc_aligned(it.left * sizeof *ids, "token ids", NULL);
    for (*n = 0; ids && pd_iter_next(&it, &v) && pd_get_int(v, &id);)
        ids[(*n)++] = (int32_t)id;
    return ids;
}

/* Those by this fingerprint, made when it is the first time; NULL: not to be had. */
static struct pd_rt_hashes *hashes_of(struct pd_router *r, struct pd_rt_run *run, uint64_t seed, uint32_t block_size)
{
    struct pd_rt_hashes *k = NULL;
    struct pd_str salt = { NULL, 0 };
    struct pd_bin v;
    for (uint32_t i = 0; i < run->n_hashed; i++)
        if (run->hashed[i].seed == seed && run->hashed[i].block_size == block_size)
            return &run->hashed[i];
    if (run->n_hashed == PD_RT_CLASSES || (!run->hashed && !(run->hashed = pd_calloc(PD_RT_CLASSES, sizeof *run->hashed, "a run's blocks", NULL))))
        return NULL;
    if (pair_of(run, "cache_salt", &v))
        pd_get_str(v, &salt);
    k = &run->hashed[run->n_hashed++];
    *k = (struct pd_rt_hashes){ .seed = seed, .block_size = block_size };
    uint32_t n = 0;
    int32_t *ids = run->need.adapter.n + salt.n > PD_PREFIX_KEY ? NULL : ids_of(run, &n);       /* no worker caches what has so long a key */
    if (ids && n >= block_size && (k->h = pd_alloc_aligned((size_t)(n / block_size) * 16, "a run's blocks", NULL))) {
        k->n = n / block_size;
        pd_block_hashes(seed, ids, n, block_size, run->need.adapter, salt, k->h);
        r->body_bytes += (size_t)k->n * 16;
    }
    pd_free(ids);
    return k;
}

void pd_rt_hashes_free(struct pd_router *r, struct pd_rt_run *run)
{
    for (uint32_t i = 0; i < run->n_hashed; i++) {
        r->body_bytes -= (size_t)run->hashed[i].n * 16;
        pd_free(run->hashed[i].h);
    }
    pd_free(run->hashed);
    run->hashed = NULL;
    run->n_hashed = 0;
}

static enum pd_held_how how_of(const struct pd_rt_feed *f)
{
    return !f->open ? PD_HELD_NONE : !f->heard ? PD_HELD_GUESS : f->f.known ? PD_HELD_EVENTS : PD_HELD_DOUBT;
}

void pd_rt_hits(struct pd_router *r, struct pd_rt_run *run, int64_t now)
{
    struct pd_rt_index *x = &r->index;
    x->turn++;
    for (struct pd_rt_worker *w = r->workers; w; w = w->next) {
        const struct pd_rt_feed *f = &w->feed;
        w->m->held = (struct pd_held){ .how = run->need.exact ? how_of(f) : PD_HELD_NONE, .age_us = f->heard_us && now > f->heard_us ? now - f->heard_us : 0 };
    }
    run->need.index = x->version;
    run->need.digest = NULL;
    if (!run->need.exact)
        return;
    for (struct pd_rt_worker *w = r->workers; w; w = w->next) {
        struct pd_rt_hashes *k = w->feed.open ? hashes_of(r, run, w->feed.seed, w->feed.block_size) : NULL;
        uint32_t n;
        if (!k) {
            w->m->held.how = PD_HELD_NONE;
            continue;
        }
        if (k->turn == x->turn)
            continue;
        k->turn = x->turn;
        if (k->n && !run->need.digest)
            run->need.digest = k->h[k->n - 1];
        const struct pd_hit *hit = pd_index_match(x->x, (const uint8_t (*)[16])k->h, k->n, &n);
        for (uint32_t i = 0; i < n; i++) {
            struct pd_held *held = &x->of[hit[i].slot]->m->held;
            if (held->how != PD_HELD_DOUBT && held->blocks < hit[i].blocks)     /* a snapshot may be half in */
                held->blocks = hit[i].blocks;
        }
    }
}

void pd_rt_feed_sent(struct pd_router *r, struct pd_rt_run *run, struct pd_rt_worker *w, int64_t now)
{
    struct pd_rt_index *x = &r->index;
    struct pd_rt_feed *f = &w->feed;
    struct pd_rt_hashes *k = run->need.exact && f->open ? hashes_of(r, run, f->seed, f->block_size) : NULL;
    struct pd_err e;
    if (k && (!run->p || run->p == w)) {
        pd_metric_add(x->m_asked, k->n);
        pd_metric_add(x->m_hit, w->m->held.blocks);
    }
    if (!k || !k->n || f->heard)
        return;
    turn_guesses(r, f, now);
    if (!f->guess[0].joined) {
        if (pd_index_join(x->x, &f->guess[0].slot, &e) < 0)
            return;
        f->guess[0].joined = true;
        f->turned_us = now;
        x->of[f->guess[0].slot] = w;
    }
    pd_index_stored(x->x, f->guess[0].slot, (const uint8_t (*)[16])k->h, k->n, &e);     /* without memory less is presumed */
    x->version++;
}

/* ---- the whole ---- */

static void count(const struct pd_router *r, uint32_t by[4])
{
    for (const struct pd_rt_worker *w = r->workers; w; w = w->next)
        by[how_of(&w->feed)]++;
}

static void set_gauges(void *ctx)
{
    struct pd_router *r = ctx;
    struct pd_rt_index *x = &r->index;
    struct pd_index_stats s = pd_index_stats(x->x);
    uint32_t by[4] = { 0 };
    count(r, by);
    pd_metric_set(x->m_blocks, (int64_t)s.blocks);
    pd_metric_set(x->m_copies, (int64_t)s.copies);
    pd_metric_set(x->m_bytes, (int64_t)s.bytes);
    pd_metric_set(x->m_forgotten, (int64_t)s.forgotten);
    pd_metric_set(x->m_left_out, (int64_t)s.left_out);
    for (int i = 0; i < 3; i++)
        pd_metric_set(x->m_workers[i], by[i + 1]);
}

void pd_rt_feed_ledger(const struct pd_router *r, void (*put)(void *to, const char *key, int64_t value), void *to)
{
    const struct pd_rt_index *x = &r->index;
    struct pd_index_stats s = pd_index_stats(x->x);
    uint32_t by[4] = { 0 };
    count(r, by);
    put(to, "index_blocks", (int64_t)s.blocks);
    put(to, "index_copies", (int64_t)s.copies);
    put(to, "index_bytes", (int64_t)s.bytes);
    put(to, "index_forgotten", (int64_t)s.forgotten);
    put(to, "index_known", by[PD_HELD_EVENTS]);
    put(to, "index_guessed", by[PD_HELD_GUESS]);
    put(to, "index_in_doubt", by[PD_HELD_DOUBT]);
    put(to, "index_events", pd_metric_value(x->m_events));
    put(to, "index_gaps", pd_metric_value(x->m_gaps));
    put(to, "index_refused", pd_metric_value(x->m_refused));
    put(to, "index_snapshots", pd_metric_value(x->m_snapshots));
}

int pd_rt_feed_new(struct pd_router *r, size_t bytes, struct pd_err *e)
{
    struct pd_rt_index *x = &r->index;
#define COUNTER(n, h) { .name = n, .help = h, .type = PD_COUNTER }
#define GAUGE(n, h, ...) { .name = n, .help = h, .type = PD_GAUGE, __VA_ARGS__ }
    static const struct pd_metric_about workers = GAUGE("pd_index_workers", "Workers, by how it is known what they hold.", .label = { "how" });
    const struct { struct pd_metric_about about; struct pd_metric **to; const char *label; } t[] = {
        { COUNTER("pd_index_events_total", "Changes of workers' prefix caches that were applied."), &x->m_events, NULL },
        { COUNTER("pd_index_gaps_total", "Times that a worker's changes did not follow each other."), &x->m_gaps, NULL },
        { COUNTER("pd_index_refused_total", "Changes that could not be, as of blocks of another size."), &x->m_refused, NULL },
        { COUNTER("pd_index_snapshots_total", "Whole snapshots that came."), &x->m_snapshots, NULL },
        { COUNTER("pd_index_orphans_total", "Chains whose parent the worker did not hold."), &x->m_orphans, NULL },
        { GAUGE("pd_index_blocks", "Blocks in the prefix index."), &x->m_blocks, NULL }, { GAUGE("pd_index_copies", "Blocks times workers that hold them."), &x->m_copies, NULL },
        { GAUGE("pd_index_bytes", "Memory of the prefix index."), &x->m_bytes, NULL },
        { COUNTER("pd_index_forgotten_total", "Blocks that left the index for want of room."), &x->m_forgotten, NULL },
        { COUNTER("pd_index_left_out_total", "Holders of a block that were not noted for want of room."), &x->m_left_out, NULL },
        { workers, &x->m_workers[0], "guess" }, { workers, &x->m_workers[1], "events" }, { workers, &x->m_workers[2], "doubt" },
        { COUNTER("pd_route_hit_blocks_total", "Blocks of prompts that the worker they went to was taken to hold."), &x->m_hit, NULL },
        { COUNTER("pd_route_prompt_blocks_total", "Blocks of prompts with token ids."), &x->m_asked, NULL } };
#undef COUNTER
#undef GAUGE
    int rc = pd_index_new(&(struct pd_index_opts){ .max_bytes = bytes, .seed = (uint64_t)pd_mono_ns() ^ (uintptr_t)r }, &x->x, e);
    if (rc == 0 && !(x->of = pd_calloc(PD_INDEX_SLOTS, sizeof(struct pd_rt_worker *), "the prefix index", e)))
        rc = PD_ENOMEM;
    for (size_t i = 0; rc == 0 && i < sizeof t / sizeof *t; i++)
        rc = pd_metric_get(pd_daemon_metrics(r->d), &t[i].about, (const char *const[PD_METRIC_LABELS]){ t[i].label }, t[i].to, e);
    return rc ? rc : pd_metrics_before(pd_daemon_metrics(r->d), set_gauges, r, e);
}

void pd_rt_feed_free(struct pd_router *r)
{
    pd_index_free(r->index.x);
    pd_free(r->index.of);
}
