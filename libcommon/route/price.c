#include "price.h"
#include "cost.h"

uint32_t pd_kv_token_bytes(const struct pd_kv_layout *l)
{
    uint64_t size = !strcmp(l->dtype, "f32") ? 4 : 2, n = 2 * size * l->layers * (uint64_t)l->kv_heads * l->head_dim;
    return n < UINT32_MAX ? (uint32_t)n : UINT32_MAX;
}

struct pd_ahead pd_ahead_of(const struct pd_route_row *w) { return (struct pd_ahead){ w->queue_runs, w->queue_tokens, w->seqs, w->kv_tokens }; }

static bool class_of(struct pd_learn *l, struct pd_member *m, uint32_t *cls)
{
    if (m->learn != l && pd_learn_class_of(l, &m->said, &m->cls, NULL) == 0)
        m->learn = l;
    *cls = m->cls;
    return m->learn == l;
}

/* A report that is late says less of a queue: what may have come since is not known. */
static void widen(struct pd_spread *s, const struct pd_member *m, int64_t age_us)
{
    if (m->said.beat_us > 0 && age_us > 3 * m->said.beat_us) {
        s->p95 = pd_us_of((double)s->p95 + (double)age_us);
        s->marks |= PD_SPREAD_STALE;
    }
}

/* What it told of its cache is old: it may hold nothing of the prompt by now. */
static void doubt(const struct pd_learn *l, uint32_t cls, const struct pd_need *q, const struct pd_member *m, struct pd_route_row *w)
{
    if (m->held.how != PD_HELD_EVENTS || !w->hit_blocks || m->said.beat_us <= 0 || w->index_age_us <= 3 * m->said.beat_us)
        return;
    struct pd_spread miss = pd_learn_prefill(l, cls, q->prompt_tokens, 0, q->now_us);
    w->prefill.p95 = miss.p95 > w->prefill.p95 ? miss.p95 : w->prefill.p95;
    w->prefill.marks |= PD_SPREAD_STALE;
}

/* The last one: most workers lack the same of a prompt. */
struct memo { bool any; uint32_t cls, tokens; struct pd_spread prefill; };

static void price_p(struct pd_learn *l, const struct pd_decision *o, struct pd_member *m, struct memo *last, struct pd_route_row *w)
{
    int64_t now = o->need.now_us;
    uint32_t cls;
    if (!class_of(l, m, &cls)) {
        w->prefill.marks |= PD_SPREAD_COLD;
        return;
    }
    w->queue = pd_learn_queue(l, cls, pd_ahead_of(w), now);
    if (!last->any || last->cls != cls || last->tokens != w->miss_tokens)
        *last = (struct memo){ true, cls, w->miss_tokens, pd_learn_prefill(l, cls, w->miss_tokens, o->need.prompt_tokens - w->miss_tokens, now) };
    w->prefill = last->prefill;
    doubt(l, cls, &o->need, m, w);
    widen(&w->queue, m, w->load_age_us);
}

static void price_d(struct pd_learn *l, const struct pd_decision *o, struct pd_member *m, struct memo *last, struct pd_route_row *w)
{
    const struct pd_route_input *in = &o->rec.input;
    int64_t now = o->need.now_us;
    uint64_t kv = w->kv_tokens, mine = (uint64_t)in->n_tokens + in->out_p50 / 2;
    uint32_t cls;
    price_p(l, o, m, last, w);
    if (!class_of(l, m, &cls)) {
        w->tpot.marks |= PD_SPREAD_COLD;
        return;
    }
    w->interference = pd_learn_interference(l, cls, w->miss_tokens, w->seqs, kv, now);
    w->tpot = pd_learn_tpot(l, cls, w->seqs + in->n, kv + mine * in->n, now);
    w->itl_us = pd_learn_itl(l, cls, mine);
    uint32_t over = w->seqs_most && w->seqs + in->n > w->seqs_most ? w->seqs + in->n - w->seqs_most : 0;
    if (over) {                 /* sequences of a full batch end one after the other */
        double each = (double)w->tpot.p50 * in->out_p50 / w->seqs_most;
        w->slot = (struct pd_spread){ pd_us_of(3 * each * over), pd_us_of(each * over), w->tpot.marks };
    }
}

void pd_price_ways(struct pd_learn *l, struct pd_decision *o)
{
    struct pd_route_rec *r = &o->rec;
    bool from[PD_ROUTE_DOMAINS] = { 0 }, to[PD_ROUTE_DOMAINS] = { 0 };
    uint64_t bytes = (uint64_t)r->input.n_tokens * r->input.kv_bytes;
    for (uint32_t i = 0; i < r->n_p; i++)
        from[r->p[i].domain] |= !r->p[i].x;
    for (uint32_t i = 0; i < r->n_d; i++)
        to[r->d[i].domain] |= !r->d[i].x;
    for (uint32_t i = 0; i < r->n_domains; i++)
        for (uint32_t k = 0; k < r->n_domains && r->n_paths < PD_ROUTE_PATHS; k++) {
            uint32_t path;
            if (!from[i] || !to[k] || pd_learn_path_of(l, r->domains[i], r->domains[k], NULL, &path, NULL) < 0)
                continue;
            struct pd_route_path *x = &o->paths[r->n_paths++];
            *x = (struct pd_route_path){ .p = -1, .d = -1, .from = (int32_t)i, .to = (int32_t)k };
            pd_learn_ways(l, path, bytes, o->need.now_us, x);
        }
}

void pd_price(struct pd_learn *l, struct pd_decision *o)
{
    struct pd_route_rec *r = &o->rec;
    struct memo last = { .any = false };
    pd_learn_length(l, r->input.n_tokens, r->input.max_tokens, &r->input.out_p50, &r->input.out_p95);
    r->input.local_ttft = pd_learn_sum(l, false, PD_LEARN_TTFT);
    r->input.local_completion = pd_learn_sum(l, false, PD_LEARN_COMPLETION);
    r->input.remote_ttft = pd_learn_sum(l, true, PD_LEARN_TTFT);
    r->input.remote_completion = pd_learn_sum(l, true, PD_LEARN_COMPLETION);
    for (uint32_t i = 0; i < o->n_d && !r->input.kv_bytes; i++)
        r->input.kv_bytes = o->d_row[i].x ? 0 : pd_kv_token_bytes(&o->d_row[i].m->said.layout);
    for (uint32_t i = 0; i < o->n_p; i++)
        if (!r->p[i].x)
            price_p(l, o, o->p_row[i].m, &last, &r->p[i]);
    for (uint32_t i = 0; i < o->n_d; i++)
        if (!r->d[i].x)
            price_d(l, o, o->d_row[i].m, &last, &r->d[i]);
}
