#include "workload.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "../base/opt.h"
#include "../wire/pack.h"
#include "../wire/record.h"

const char *const pd_arrive_names[] = { "poisson", "gamma", "onoff", "even", "trace", NULL };
const char *const pd_sharing_names[] = { "cold", "partial", "full", "trace", NULL };
static const double MOST_US = 9e15;

int pd_word_find(const char *const *names, const char *s)
{
    for (int i = 0; names[i]; i++)
        if (!strcmp(names[i], s))
            return i;
    return -1;
}

/* ---- chance: one stream of splitmix64 a purpose [Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014] ---- */

enum purpose { P_ARRIVAL = 1, P_CLASS, P_LENGTH, P_GROUP, P_OWN, P_SHARED, P_BLOCK };
static const uint64_t GOLDEN = 0x9e3779b97f4a7c15u;

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}
static uint64_t key_of(uint64_t seed, enum purpose p, uint64_t id) { return mix(mix(mix(seed + GOLDEN) + p) + id * GOLDEN); }
static double uniform(uint64_t *s) { return ((double)(mix(*s += GOLDEN) >> 11) + 0.5) / 9007199254740992.0; }       /* in (0, 1) */
static double normal(uint64_t *s)
{
    double r = sqrt(-2 * log(uniform(s)));
    return r * cos(2 * M_PI * uniform(s));
}
/* Shape k, mean 1 [Marsaglia, Tsang: A Simple Method for Generating Gamma Variables, 2000]. */
static double gamma_of(double k, uint64_t *s)
{
    double up = k < 1 ? pow(uniform(s), 1 / k) : 1, d = (k < 1 ? k + 1 : k) - 1. / 3, c = 1 / sqrt(9 * d);
    for (;;) {
        double x = normal(s), v = 1 + c * x;
        if (v <= 0)
            continue;
        v = v * v * v;
        if (log(uniform(s)) < 0.5 * x * x + d - d * v + d * log(v))
            return d * v * up / k;
    }
}

/* ---- what is asked for ---- */

int pd_lens_parse(const char *s, struct pd_lens *out, struct pd_err *e)
{
    char *end;
    double a, b;
    if (!strcmp(s, "trace")) {
        *out = (struct pd_lens){ .kind = PD_LENS_LOG };
        return 0;
    }
    bool lognormal = !strncmp(s, "lognormal:", 10);
    const char *at = lognormal ? s + 10 : s;
    a = *at >= '0' && *at <= '9' ? strtod(at, &end) : 0;
    if (!(a >= 1 && a <= PD_REQLOG_TOKENS))
        goto bad;
    *out = (struct pd_lens){ PD_LENS_FIXED, floor(a), floor(a) };
    if (!lognormal && !*end)
        return a == floor(a) ? 0 : pd_fail(e, PD_EUSAGE, "'%s': tokens are whole (example: 512)", s);
    if (*end != (lognormal ? ':' : '-') || end[1] < '0' || end[1] > '9')
        goto bad;
    b = strtod(end + 1, &end);
    if (*end || (lognormal ? !(b > 0 && b <= 5) : b < a || b > PD_REQLOG_TOKENS || b != floor(b) || a != floor(a)))
        goto bad;
    *out = (struct pd_lens){ lognormal ? PD_LENS_LOGNORMAL : PD_LENS_UNIFORM, a, b };
    return 0;
bad:
    return pd_fail(e, PD_EUSAGE, "'%s' is no length (examples: 512, 64-256, lognormal:200:0.8 for median and sigma, trace)", s);
}

static int a_number(const char *s, double lo, double hi, double *out, struct pd_err *e)
{
    char *end;
    double v = strtod(s, &end);
    if (end == s || *end || !(v >= lo && v <= hi))
        return pd_fail(e, PD_EUSAGE, "'%s' is no number from %g to %g", s, lo, hi);
    *out = v;
    return 0;
}

static int traffic_key(const char *key, const char *v, struct pd_traffic *t, struct pd_err *e)
{
    double n = 0;
    int64_t us = 0;
    int i, rc;
    if (!strcmp(key, "name")) {
        if (!*v || strlen(v) >= sizeof t->name)
            return pd_fail(e, PD_EUSAGE, "'%.60s' is no name of 1 to %zu bytes", v, sizeof t->name - 1);
        strcpy(t->name, v);
        return 0;
    }
    if (!strcmp(key, "weight"))
        return a_number(v, 1e-6, 1e6, &t->weight, e);
    if (!strcmp(key, "share"))
        return a_number(v, 0, 1, &t->share, e);
    if (!strcmp(key, "groups")) {
        if ((rc = a_number(v, 1, 1e6, &n, e)) == 0)
            t->groups = (uint32_t)n;
        return rc;
    }
    if (!strcmp(key, "isl") || !strcmp(key, "osl"))
        return pd_lens_parse(v, *key == 'i' ? &t->isl : &t->osl, e);
    if (!strcmp(key, "prefix")) {
        if ((i = pd_word_find(pd_sharing_names, v)) < 0)
            return pd_fail(e, PD_EUSAGE, "'%s' is not cold, partial, full or trace", v);
        t->prefix = (enum pd_sharing)i;
        return 0;
    }
    if (!strcmp(key, "ttft") || !strcmp(key, "tpot")) {
        if ((rc = pd_parse_duration(v, &us, e)) < 0 || us <= 0)
            return rc < 0 ? rc : pd_fail(e, PD_EUSAGE, "'%s' is no time above 0 (example: 500ms)", v);
        *(key[1] == 't' ? &t->ttft_ms : &t->tpot_ms) = (double)us / 1e3;
        return 0;
    }
    return pd_fail(e, PD_EUSAGE, "no such key (name, weight, isl, osl, prefix, groups, share, ttft, tpot)");
}

int pd_traffic_parse(const char *s, struct pd_traffic *t, struct pd_err *e)
{
    for (size_t n; *s; s += n + (s[n] == ',')) {
        char one[128], *eq;
        n = strcspn(s, ",");
        snprintf(one, sizeof one, "%.*s", (int)(n < sizeof one ? n : sizeof one - 1), s);
        if (!(eq = strchr(one, '=')))
            return pd_fail(e, PD_EUSAGE, "'%s' has no '=' (example: name=chat,isl=64-256,osl=32)", one);
        *eq = 0;
        int rc = traffic_key(one, eq + 1, t, e);
        if (rc)
            return pd_err_prefix(e, "%s", one);
    }
    return 0;
}

/* ---- the stream ---- */

struct pd_workload {
    const struct pd_workload_opts *o;
    uint64_t n, log_at;                 /* requests and rows so far */
    uint64_t chance;                    /* of arrivals */
    double at;                          /* us; of onoff: of the time that is on */
    uint32_t block_tokens;              /* of the log, scaled */
    double weights;
    uint32_t **seen; uint32_t *n_seen;  /* by class and group: the longest that was shared */
    uint64_t *block_seen; size_t mask, n_blocks;        /* a hash set of block ids + 1 */
    int32_t *ids; size_t cap;
};

static bool uses_log(const struct pd_traffic *t) { return t->isl.kind == PD_LENS_LOG || t->osl.kind == PD_LENS_LOG; }

static int check(const struct pd_workload_opts *o, struct pd_err *e)
{
    if (o->arrive == PD_ARRIVE_LOG && !(o->log && o->log->timed))
        return pd_fail(e, PD_EUSAGE, o->log ? "the trace has no times (give --rate)" : "arrivals as a trace has them need a trace");
    if (o->arrive != PD_ARRIVE_LOG && !(o->rate > 0 && o->rate <= 1e6))
        return pd_fail(e, PD_EUSAGE, "a rate of %g requests a second is not above 0 and at most 1e6", o->rate);
    if (o->arrive == PD_ARRIVE_GAMMA && !(o->burstiness >= 0.01 && o->burstiness <= 1e4))
        return pd_fail(e, PD_EUSAGE, "a burstiness of %g is not from 0.01 to 10000 (1 is Poisson, less is burstier)", o->burstiness);
    if (o->arrive == PD_ARRIVE_ONOFF && (o->on_us < 1 || o->off_us < 0))
        return pd_fail(e, PD_EUSAGE, "bursts need times to be on and off");
    if (!(o->time_scale > 0) || !(o->length_scale > 0) || o->time_scale > 1e6 || o->length_scale > 1e3)
        return pd_fail(e, PD_EUSAGE, "the scale of times and lengths is above 0, at most 1e6 and 1000");
    if (o->vocab_hi <= o->vocab_lo || o->vocab_hi - o->vocab_lo < 2 || o->vocab_hi > INT32_MAX)
        return pd_fail(e, PD_EUSAGE, "a vocabulary from %u to %u has no two ids", o->vocab_lo, o->vocab_hi);
    if (o->context == 1 || !o->n_traffic)
        return pd_fail(e, PD_EUSAGE, o->n_traffic ? "a context of 1 has no room for a prompt and an answer" : "no class of traffic");
    for (uint32_t i = 0; i < o->n_traffic; i++) {
        const struct pd_traffic *t = &o->traffic[i];
        if (!o->log && (uses_log(t) || t->prefix == PD_SHARE_LOG))
            return pd_fail(e, PD_EUSAGE, "class %s: lengths or prefixes of a trace need a trace", t->name);
        if (t->prefix == PD_SHARE_LOG && (!o->log->block_tokens || !uses_log(t)))
            return pd_fail(e, PD_EUSAGE, o->log->block_tokens ? "class %s: prefixes of a trace go with its lengths" : "class %s: the trace tells nothing of prefixes", t->name);
    }
    return 0;
}

int pd_workload_new(const struct pd_workload_opts *o, struct pd_workload **out, struct pd_err *e)
{
    struct pd_workload *w = NULL;
    int rc = check(o, e);
    if (rc)
        return rc;
    if (!(w = pd_calloc(1, sizeof *w, "workload", e)))
        return PD_ENOMEM;
    w->o = o;
    w->chance = key_of(o->seed, P_ARRIVAL, 0);
    if (o->log && o->log->block_tokens)
        w->block_tokens = (uint32_t)fmax(1, round(o->log->block_tokens * o->length_scale));
    if (!(w->seen = pd_calloc(o->n_traffic, sizeof *w->seen, "workload", e)))
        goto fail;
    for (uint32_t i = 0; i < o->n_traffic; i++) {
        w->weights += o->traffic[i].weight;
        if (!(w->seen[i] = pd_calloc(o->traffic[i].groups + 1, sizeof **w->seen, "workload", e)))
            goto fail;
    }
    if (w->block_tokens) {
        for (w->mask = 1023; w->mask < 2 * o->log->n_blocks; w->mask = w->mask * 2 + 1)
            ;
        if (!(w->block_seen = pd_calloc(w->mask + 1, sizeof *w->block_seen, "workload", e)))
            goto fail;
    }
    *out = w;
    return 0;
fail:
    pd_workload_free(w);
    return PD_ENOMEM;
}

void pd_workload_free(struct pd_workload *w)
{
    if (!w)
        return;
    for (uint32_t i = 0; w->seen && i < w->o->n_traffic; i++)
        pd_free(w->seen[i]);
    pd_free(w->seen);
    pd_free(w->block_seen);
    pd_free(w->ids);
    pd_free(w);
}

static double next_time(struct pd_workload *w)
{
    const struct pd_workload_opts *o = w->o;
    double gap = 1e6 / o->rate, cycle = (double)(o->on_us + o->off_us);
    switch (o->arrive) {
    case PD_ARRIVE_LOG: return (double)o->log->row[w->n].at_us * o->time_scale;
    case PD_ARRIVE_EVEN: return (double)w->n * gap;
    case PD_ARRIVE_GAMMA: return w->at += gap * gamma_of(o->burstiness, &w->chance);
    case PD_ARRIVE_ONOFF:
        w->at += gap * (double)o->on_us / cycle * -log(uniform(&w->chance));
        return floor(w->at / (double)o->on_us) * cycle + fmod(w->at, (double)o->on_us);
    default: return w->at += gap * -log(uniform(&w->chance));
    }
}

static double length(const struct pd_lens *l, uint64_t *s)
{
    double v = l->kind == PD_LENS_UNIFORM ? l->a + floor(uniform(s) * (l->b - l->a + 1)) : l->kind == PD_LENS_LOGNORMAL ? round(l->a * exp(l->b * normal(s))) : l->a;
    return v < 1 ? 1 : v > PD_REQLOG_TOKENS ? PD_REQLOG_TOKENS : v;
}

static bool see_block(struct pd_workload *w, uint64_t id)
{
    size_t at = mix(id) & w->mask;
    while (w->block_seen[at] && w->block_seen[at] != id + 1)
        at = (at + 1) & w->mask;
    bool was = w->block_seen[at];
    w->block_seen[at] = id + 1;
    return was;
}

static void reuse_blocks(struct pd_workload *w, struct pd_arrival *a)
{
    uint32_t n = (a->isl + w->block_tokens - 1) / w->block_tokens, all = n < a->row->n_blocks ? n : a->row->n_blocks;
    bool leading = true;
    for (uint32_t i = 0; i < all; i++) {
        bool was = see_block(w, w->o->log->block[a->row->block + i]);
        leading &= was;
        if (leading)
            a->reusable = (i + 1) * w->block_tokens;
    }
    a->reusable = a->reusable < a->isl ? a->reusable : a->isl;
}

int pd_workload_next(struct pd_workload *w, struct pd_arrival *a, struct pd_err *e)
{
    const struct pd_workload_opts *o = w->o;
    if (w->n >= o->count || (o->arrive == PD_ARRIVE_LOG && w->n >= o->log->n))
        return 0;
    double at = next_time(w);
    if (!(at < MOST_US))
        return pd_fail(e, PD_EUSAGE, "request %llu would arrive after 285 years", (unsigned long long)w->n);
    if (o->duration_us && at > (double)o->duration_us)
        return 0;
    *a = (struct pd_arrival){ .index = w->n, .at_us = llround(at), .traffic = o->traffic };
    uint64_t s = key_of(o->seed, P_CLASS, w->n);
    double pick = uniform(&s) * w->weights;
    uint32_t c = 0;
    while (c + 1 < o->n_traffic && (pick -= o->traffic[c].weight) >= 0)
        c++;
    const struct pd_traffic *t = a->traffic = &o->traffic[c];
    s = key_of(o->seed, P_LENGTH, w->n);
    double isl = length(&t->isl, &s), osl = length(&t->osl, &s), scale = w->block_tokens ? (double)w->block_tokens / o->log->block_tokens : o->length_scale;
    if (uses_log(t)) {
        const struct pd_reqlog_row *r = &o->log->row[o->arrive == PD_ARRIVE_LOG ? w->n : w->log_at++ % o->log->n];
        isl = t->isl.kind == PD_LENS_LOG ? fmax(1, round(r->isl * scale)) : isl;
        osl = t->osl.kind == PD_LENS_LOG ? fmax(1, round(r->osl * scale)) : osl;
        a->row = t->prefix == PD_SHARE_LOG ? r : NULL;
    }
    if (o->context && isl + osl > o->context) {
        a->cut = true;
        osl = fmin(osl, o->context / 2);            /* of the prompt first: its beginning is what others share */
        isl = fmin(isl, o->context - osl);
    }
    a->isl = (uint32_t)fmin(isl, PD_REQLOG_TOKENS);
    a->osl = (uint32_t)fmin(osl, PD_REQLOG_TOKENS);
    if (a->row)
        reuse_blocks(w, a);
    else if (t->prefix == PD_SHARE_PARTIAL || t->prefix == PD_SHARE_FULL) {
        s = key_of(o->seed, P_GROUP, w->n);
        uint32_t g = (uint32_t)(uniform(&s) * t->groups);
        a->group = (uint64_t)c << 32 | g;
        a->shared = t->prefix == PD_SHARE_FULL ? a->isl : (uint32_t)floor(a->isl * t->share);
        a->reusable = a->shared < w->seen[c][g] ? a->shared : w->seen[c][g];
        w->seen[c][g] = a->shared > w->seen[c][g] ? a->shared : w->seen[c][g];
    }
    w->n++;
    return 1;
}

static void fill(const struct pd_workload *w, int32_t *ids, uint32_t from, uint32_t n, uint64_t key)
{
    uint64_t span = w->o->vocab_hi - w->o->vocab_lo;
    for (uint32_t i = from; i < from + n; i++)
        ids[i - from] = (int32_t)(w->o->vocab_lo + ((mix(key + (i + 1) * GOLDEN) >> 32) * span >> 32));
}

void pd_workload_tokens(const struct pd_workload *w, const struct pd_arrival *a, int32_t *ids)
{
    uint64_t seed = w->o->seed;
    uint32_t at = 0;
    if (a->row)
        for (uint32_t i = 0; at < a->isl && i < a->row->n_blocks; i++, at += w->block_tokens) {
            uint32_t left = a->isl - at;
            fill(w, ids + at, 0, left < w->block_tokens ? left : w->block_tokens, key_of(seed, P_BLOCK, w->o->log->block[a->row->block + i]));
        }
    at = a->row ? at : a->shared;
    if (!a->row)
        fill(w, ids, 0, a->shared, key_of(seed, P_SHARED, a->group));
    if (at < a->isl)
        fill(w, ids + at, at, a->isl - at, key_of(seed, P_OWN, a->index));
}

static void pack_slo(const struct pd_traffic *t, struct pd_packer *k)
{
    msgpack_pack_map(&k->pk, (size_t)(t->ttft_ms > 0) + (t->tpot_ms > 0));
    if (t->ttft_ms > 0) {
        pd_pack_text(k, "ttft_ms");
        pd_pack_float(k, "ttft_ms", t->ttft_ms);
    }
    if (t->tpot_ms > 0) {
        pd_pack_text(k, "tpot_ms");
        pd_pack_float(k, "tpot_ms", t->tpot_ms);
    }
}

int pd_workload_request(struct pd_workload *w, const struct pd_arrival *a, int64_t start_us, struct pd_buf *rec, struct pd_err *e)
{
    struct pd_buf slo = { 0 }, extra = { 0 }, id = { 0 };
    struct pd_packer k;
    char text[64];
    if (a->isl > w->cap) {
        int32_t *more = pd_realloc(w->ids, a->isl, sizeof *w->ids, "prompt", e);
        if (!more)
            return PD_ENOMEM;
        w->ids = more;
        w->cap = a->isl;
    }
    pd_workload_tokens(w, a, w->ids);
    snprintf(text, sizeof text, "%s-%llu", a->traffic->name, (unsigned long long)a->index);
    pd_pack_init(&k, &id, e);
    pd_pack_text(&k, text);
    int rc = k.rc;
    pd_pack_init(&k, &slo, e);
    pack_slo(a->traffic, &k);
    rc = rc ? rc : k.rc;
    pd_pack_init(&k, &extra, e);
    pd_pack_text(&k, "class");
    pd_pack_text(&k, a->traffic->name);
    pd_pack_text(&k, "reusable_tokens");
    msgpack_pack_uint32(&k.pk, a->reusable);
    if (start_us) {
        pd_pack_text(&k, "start_us");
        msgpack_pack_int64(&k.pk, start_us);
    }
    rc = rc ? rc : k.rc;
    struct pd_request q = { .id = { id.p, id.n }, .token_ids = w->ids, .n_token_ids = a->isl, .has_token_ids = true, .max_tokens = (int32_t)a->osl, .ignore_eos = true,
                            .arrival_us = a->at_us, .has = PD_RQ_MAX_TOKENS | PD_RQ_ARRIVAL | PD_RQ_TEMPERATURE,
                            .extra = { extra.p, extra.n, start_us ? 3 : 2 } };
    if (a->traffic->ttft_ms > 0 || a->traffic->tpot_ms > 0)
        q.slo = (struct pd_bin){ slo.p, slo.n };
    rc = rc ? rc : pd_request_encode(&q, rec, e);
    pd_buf_free(&slo);
    pd_buf_free(&extra);
    pd_buf_free(&id);
    return rc;
}
