#include "../base/hash.h"
#include "../kv/convert.h"
#include "registry.h"

enum { FACTOR = 2, SLACK = 8, BEATS = 3 };      /* reported and own runs may differ that much, that long */

/* ---- fingerprints ---- */

static void forget_pairs(struct pd_registry *r, int fp)
{
    for (int i = 0; i < PD_MAX_FPS; i++) {
        struct pd_fp_pair *of[] = { &r->pair[fp][i], &r->pair[i][fp] };
        for (int k = 0; k < 2; k++) {
            pd_free(of[k]->why[0]);
            pd_free(of[k]->why[1]);
            *of[k] = (struct pd_fp_pair){ 0 };
        }
    }
}

void pd_registry_hold_fp(struct pd_registry *r, int fp)
{
    if (fp >= 0)
        r->fp[fp].users++;
}

void pd_registry_let_fp(struct pd_registry *r, int fp)
{
    if (fp < 0 || --r->fp[fp].users)
        return;
    pd_buf_free(&r->fp[fp].map);
    forget_pairs(r, fp);
}

static int keep_fp(struct pd_registry *r, const uint8_t sha[PD_SHA_LEN], struct pd_bin fields, int *out, struct pd_err *e)
{
    int room = -1;
    for (int i = 0; i < PD_MAX_FPS; i++)
        if (r->fp[i].users && !memcmp(r->fp[i].sha, sha, PD_SHA_LEN)) {
            r->fp[i].users++;
            *out = i;
            return 0;
        } else if (!r->fp[i].users && room < 0)
            room = i;
    if (room < 0)
        return pd_fail(e, PD_ENOMEM, "workers with more than %d different fingerprints are registered", PD_MAX_FPS);
    struct pd_fp_kept *f = &r->fp[room];
    f->map.n = 0;
    if (pd_buf_add(&f->map, fields.p, fields.n, e) < 0)
        return PD_ENOMEM;
    memcpy(f->sha, sha, PD_SHA_LEN);
    f->users = 1;
    *out = room;
    return 0;
}

enum pd_fp_verdict pd_registry_pair(struct pd_registry *r, int p, int d, unsigned admit, unsigned *converts, const char **why)
{
    *why = NULL;
    if (converts)
        *converts = 0;
    if (p < 0 || d < 0)
        return PD_FP_DIFFERS;
    struct pd_fp_pair *x = &r->pair[p][d];
    struct pd_bin a = { r->fp[p].map.p, r->fp[p].map.n }, b = { r->fp[d].map.p, r->fp[d].map.n };
    for (int i = 0; i < 2 && !x->verdict[i]; i++) {
        struct pd_err e = { 0 };
        unsigned needs = 0;
        x->verdict[i] = (uint8_t)(1 + pd_fp_compare_with(a, b, i ? PD_CONV_ALL : 0, &needs, &e));
        x->needs = (uint8_t)needs;
        if (x->verdict[i] != 1 + PD_FP_SAME)
            x->why[i] = pd_strndup(e.msg, strlen(e.msg), NULL);
    }
    bool bridged = x->needs && !(x->needs & ~admit);
    if (converts && bridged)
        *converts = x->needs;
    *why = x->why[bridged];
    return (enum pd_fp_verdict)(x->verdict[bridged] - 1);
}

/* ---- members ---- */

struct pd_member *pd_registry_find(const struct pd_registry *r, struct pd_str at)
{
    struct pd_member *m = r->first;
    while (m && !pd_str_eq(at, m->at))
        m = m->next;
    return m;
}

int pd_registry_add(struct pd_registry *r, const char *at, struct pd_member **out, struct pd_err *e)
{
    if ((*out = pd_registry_find(r, (struct pd_str){ at, strlen(at) })))
        return 0;
    struct pd_member *m = pd_calloc(1, sizeof *m, "a worker", e), **last = &r->first;
    if (!m || !(m->at = pd_strndup(at, strlen(at), e))) {
        pd_free(m);
        return PD_ENOMEM;
    }
    m->fp = -1;
    m->n_at = strlen(at);
    while (*last)
        last = &(*last)->next;
    *last = m;
    r->n++;
    r->version++;
    *out = m;
    return 0;
}

static void member_free(struct pd_registry *r, struct pd_member *m)
{
    pd_registry_let_fp(r, m->fp);
    pd_arena_free(&m->mem);
    pd_free(m->at);
    pd_free(m);
}

void pd_registry_remove(struct pd_registry *r, struct pd_member *m)
{
    struct pd_member **q = &r->first;
    while (*q && *q != m)
        q = &(*q)->next;
    if (!*q)
        return;
    *q = m->next;
    r->n--;
    r->version++;
    member_free(r, m);
}

void pd_registry_free(struct pd_registry *r)
{
    while (r->first) {
        struct pd_member *m = r->first;
        r->first = m->next;
        member_free(r, m);
    }
    for (int i = 0; i < PD_MAX_FPS; i++) {
        pd_buf_free(&r->fp[i].map);
        forget_pairs(r, i);
    }
    r->n = 0;
}

static uint64_t beyond(uint64_t reported, uint64_t own) { return reported > own ? reported - own : 0; }
static uint64_t less(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void reconcile(struct pd_member *m, bool fresh)
{
    const struct pd_load *l = &m->said.load;
    uint32_t bs = m->said.capacity.block_size ? m->said.capacity.block_size : 1;
    struct pd_share more = { (uint32_t)beyond(l->runs, m->own.runs), beyond(l->prefill_tokens_ahead, m->own.prefill_tokens),
                             beyond(l->kv_tokens / bs, m->own.blocks) };
    m->foreign = fresh ? more : (struct pd_share){ (uint32_t)less(more.runs, m->reported_more.runs),
                                                   less(more.prefill_tokens, m->reported_more.prefill_tokens), less(more.blocks, m->reported_more.blocks) };
    m->reported_more = more;
    uint64_t lo = less(l->runs, m->own.runs), hi = l->runs > m->own.runs ? l->runs : m->own.runs;
    m->n_disagree = hi > FACTOR * lo + SLACK ? m->n_disagree + 1 : 0;
    m->disagrees = m->n_disagree >= BEATS;
}

int pd_registry_said(struct pd_registry *r, struct pd_member *m, const void *rec, size_t n, int64_t now_us, bool *fresh, struct pd_err *e)
{
    struct pd_arena mem = { 0 };
    struct pd_worker_rec w;
    int fp = -1, rc = pd_worker_rec_decode(rec, n, &mem, &w, e);
    if (rc || (rc = keep_fp(r, w.fp_sha, w.fp_fields, &fp, e))) {
        pd_arena_free(&mem);
        return rc;
    }
    *fresh = !m->known || w.worker.n != m->said.worker.n || memcmp(w.worker.p, m->said.worker.p, w.worker.n) || w.has_life != m->said.has_life ||
        memcmp(w.life, m->said.life, sizeof w.life);
    pd_registry_let_fp(r, m->fp);
    pd_arena_free(&m->mem);
    m->mem = mem;
    m->said = w;
    m->fp = fp;
    m->known = true;
    m->conv = pd_conv_of_caps(w.caps, w.n_caps);
    m->learn = NULL;
    m->ready = !strcmp(w.state, "ready");
    m->can_give = pd_worker_can_give(&w);
    m->said_us = now_us;
    m->end.at = NULL;
    r->version++;
    m->since[1] = m->since[0];
    m->since[0] = 0;
    m->runs_then = m->own.runs;
    reconcile(m, *fresh);
    return 0;
}

void pd_member_take(struct pd_member *m, struct pd_share s)
{
    m->own.runs += s.runs;
    m->own.prefill_tokens += s.prefill_tokens;
    m->own.blocks += s.blocks;
    m->given += s.runs;
    m->since[0] += s.prefill_tokens;
}

void pd_member_give_back(struct pd_member *m, struct pd_share s)
{
    m->own.runs -= s.runs;
    m->own.prefill_tokens -= s.prefill_tokens;
    m->own.blocks -= s.blocks;
}

bool pd_worker_can_give(const struct pd_worker_rec *w)
{
    bool can = !strcmp(w->role, "prefill");
    for (uint32_t i = 0; i < w->n_caps && !can; i++)
        can = pd_str_eq(w->caps[i], PD_CAP_GIVES);
    return can;
}

const char *pd_member_name(const struct pd_member *m) { return m->known ? m->said.worker.p : m->at; }
