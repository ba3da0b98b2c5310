#include <math.h>
#include <stdlib.h>
#include "sampler.h"

#define TOP_MAX 128
#define COLDEST 1e-5f           /* below this a draw is the largest logit, and dividing by it would overflow */

struct cand { float p; int32_t id; };

struct pd_sampler {
    const struct pd_kernels *k;
    const struct pd_tokenizer *tok;
    int n_vocab;
    float *p, *raw;             /* [n_vocab] */
    struct cand *c;             /* [n_vocab] */
    int32_t *count;             /* [n_vocab], zero between calls */
    int32_t *eog; int n_eog;    /* tokens that end generation */
    struct pd_top top[TOP_MAX];
};

int pd_sampler_new(const struct pd_kernels *k, const struct pd_tokenizer *tok, int n_vocab, struct pd_sampler **out, struct pd_err *e)
{
    struct pd_sampler *s = pd_calloc(1, sizeof *s, "sampler", e);
    if (!s)
        return PD_ENOMEM;
    s->k = k;
    s->tok = tok;
    s->n_vocab = n_vocab;
    for (int i = 0; i < n_vocab; i++)
        s->n_eog += pd_tokenizer_is_eog(tok, i);
    if (!(s->p = pd_calloc((size_t)n_vocab, sizeof *s->p, "sampler", e)) || !(s->raw = pd_calloc((size_t)n_vocab, sizeof *s->raw, "sampler", e)) ||
        !(s->eog = pd_calloc((size_t)s->n_eog, sizeof *s->eog, "sampler", e)) || !(s->c = pd_calloc((size_t)n_vocab, sizeof *s->c, "sampler", e)) ||
        !(s->count = pd_calloc((size_t)n_vocab, sizeof *s->count, "sampler", e))) {
        pd_sampler_free(s);
        return PD_ENOMEM;
    }
    s->n_eog = 0;
    for (int i = 0; i < n_vocab; i++)
        if (pd_tokenizer_is_eog(tok, i))
            s->eog[s->n_eog++] = i;
    *out = s;
    return 0;
}

void pd_sampler_free(struct pd_sampler *s)
{
    if (!s)
        return;
    pd_free(s->p);
    pd_free(s->raw);
    pd_free(s->eog);
    pd_free(s->c);
    pd_free(s->count);
    pd_free(s);
}

/* The finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014). */
static uint64_t mix64(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

double pd_sample_uniform(int64_t seed, int choice, uint32_t pos)
{
    const uint64_t golden = 0x9e3779b97f4a7c15ull;
    uint64_t h = mix64((uint64_t)seed + golden);
    h = mix64(h + golden * ((uint64_t)(uint32_t)choice + 1));
    h = mix64(h + golden * ((uint64_t)pos + 1));
    return (double)(h >> 11) * 0x1p-53;
}

bool pd_is_stop_token(const struct pd_tokenizer *tok, const struct pd_request *r, int32_t token)
{
    for (uint32_t i = 0; i < r->n_stop_token_ids; i++)
        if (r->stop_token_ids[i] == token)
            return true;
    return !r->ignore_eos && pd_tokenizer_is_eog(tok, token);
}

static void penalise(struct pd_sampler *s, const struct pd_request *r, const int32_t *tokens, uint32_t n_tokens, uint32_t n_prompt, float *l)
{
    if (r->repetition_penalty != 1.0f) {
        for (uint32_t i = 0; i < n_tokens; i++) {
            int32_t t = tokens[i];
            if (t < 0 || t >= s->n_vocab || s->count[t]++)
                continue;
            l[t] = l[t] > 0 ? l[t] / r->repetition_penalty : l[t] * r->repetition_penalty;
        }
        for (uint32_t i = 0; i < n_tokens; i++)
            if (tokens[i] >= 0 && tokens[i] < s->n_vocab)
                s->count[tokens[i]] = 0;
    }
    if (r->presence_penalty != 0 || r->frequency_penalty != 0) {
        for (uint32_t i = n_prompt; i < n_tokens; i++)
            s->count[tokens[i]]++;
        for (uint32_t i = n_prompt; i < n_tokens; i++) {
            int32_t t = tokens[i];
            if (s->count[t]) {
                l[t] -= r->presence_penalty + r->frequency_penalty * (float)s->count[t];
                s->count[t] = 0;
            }
        }
    }
}

static int by_p_then_id(const void *a, const void *b)
{
    const struct cand *x = a, *y = b;
    if (x->p != y->p)
        return x->p < y->p ? 1 : -1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static bool better(struct cand a, struct cand b) { return a.p != b.p ? a.p > b.p : a.id < b.id; }

/* The n best of logits in order, by a small sorted window: one compare an element once the window is full. */
static uint32_t best_of(const float *l, int n_vocab, uint32_t n, struct pd_top *out)
{
    uint32_t have = 0;
    for (int i = 0; i < n_vocab; i++) {
        if (have == n && !(l[i] > out[n - 1].logprob))
            continue;
        uint32_t j = have < n ? have++ : n - 1;
        for (; j > 0 && l[i] > out[j - 1].logprob; j--)
            out[j] = out[j - 1];
        out[j] = (struct pd_top){ i, l[i] };
    }
    return have;
}

/* Quick-select: the first k of c[0..n) become the k best, in any order. */
static void select_best(struct cand *c, size_t n, size_t k)
{
    size_t lo = 0, hi = n;
    while (hi - lo > 1) {
        struct cand pivot = c[lo + (hi - lo) / 2];
        size_t i = lo, j = hi - 1;
        for (;;) {
            while (better(c[i], pivot)) i++;
            while (better(pivot, c[j])) j--;
            if (i >= j)
                break;
            struct cand t = c[i]; c[i] = c[j]; c[j] = t;
            i++;
            j--;
        }
        if (k <= j + 1 && j + 1 < hi)
            hi = j + 1;
        else if (j + 1 > lo && k > j + 1)
            lo = j + 1;
        else
            return;
    }
}

static int32_t argmax(const float *l, int n, float max)
{
    for (int i = 0; i < n; i++)
        if (l[i] == max)
            return i;
    return 0;
}

/* Candidates in c[0..n), unnormalised weights p relative to the largest (1). The largest logit is finite. */
static int32_t draw(struct pd_sampler *s, const struct pd_request *r, const float *l, double u)
{
    int V = s->n_vocab;
    float inv_t = 1.0f / r->temperature, sum;
    for (int i = 0; i < V; i++)
        s->p[i] = l[i] * inv_t;
    float max = s->k->max(s->p, V);
    s->k->exp_sub(s->p, s->p, V, max, &sum);
    bool all = r->top_k <= 0 && r->top_p >= 1.0f && r->min_p <= 0;
    double total = 0;
    if (all) {
        for (int i = 0; i < V; i++)
            total += s->p[i];
        double at = u * total, acc = 0;
        int32_t last = 0;
        for (int i = 0; i < V; i++) {
            if (s->p[i] <= 0)
                continue;
            acc += s->p[i];
            last = i;
            if (at < acc)
                return i;
        }
        return last;
    }
    /* What is below the floor cannot be chosen: min_p is relative to the best (1), and with top_p the tail under (1-top_p)/V of the mass cannot be in the nucleus. */
    float floor_p = r->min_p > 0 ? r->min_p : 0;
    if (r->top_k <= 0 && r->top_p < 1.0f && r->min_p <= 0)
        floor_p = (1.0f - r->top_p) / (float)V * sum * 0.5f;
    size_t n = 0;
    for (int i = 0; i < V; i++)
        if (s->p[i] >= floor_p && s->p[i] > 0)
            s->c[n++] = (struct cand){ s->p[i], i };
    if (!n)     /* no weight is a number: not reached with finite logits */
        return argmax(l, V, s->k->max(l, V));
    if (r->top_k > 0 && (size_t)r->top_k < n) {
        select_best(s->c, n, (size_t)r->top_k);
        n = (size_t)r->top_k;
    }
    qsort(s->c, n, sizeof *s->c, by_p_then_id);
    double mass = 0;
    if (r->top_k > 0 || r->min_p > 0) {
        for (size_t i = 0; i < n; i++)
            mass += s->c[i].p;
    } else {
        for (int i = 0; i < V; i++)
            mass += s->p[i];
    }
    if (r->top_p < 1.0f) {
        double acc = 0, want = (double)r->top_p * mass;
        size_t m = 0;
        while (m < n) {
            acc += s->c[m++].p;
            if (acc >= want)
                break;
        }
        n = m;
    }
    for (size_t i = 0; i < n; i++)
        total += s->c[i].p;
    double at = u * total, acc = 0;
    for (size_t i = 0; i < n; i++) {
        acc += s->c[i].p;
        if (at < acc)
            return s->c[i].id;
    }
    return s->c[n - 1].id;
}

/* An end before min_tokens, or under ignore_eos, cannot be chosen. */
static void ban_ends(struct pd_sampler *s, const struct pd_request *r, uint32_t pos, float *l)
{
    bool early = (int64_t)pos < r->min_tokens;
    if (!early && !r->ignore_eos)
        return;
    for (int i = 0; i < s->n_eog; i++)
        l[s->eog[i]] = -INFINITY;
    for (uint32_t i = 0; early && i < r->n_stop_token_ids; i++)
        if (r->stop_token_ids[i] >= 0 && r->stop_token_ids[i] < s->n_vocab)
            l[r->stop_token_ids[i]] = -INFINITY;
}

void pd_sample(struct pd_sampler *s, const struct pd_request *r, int choice, const int32_t *tokens, uint32_t n_tokens, uint32_t n_prompt, float *logits,
               struct pd_sampled *out)
{
    int V = s->n_vocab;
    uint32_t pos = n_tokens - n_prompt;
    float lse = 0;
    memset(out, 0, sizeof *out);
    out->has_logprob = r->logprobs || r->top_logprobs > 0;
    if (out->has_logprob) {
        float sum, top = s->k->max(logits, V);
        s->k->exp_sub(s->p, logits, V, top, &sum);
        lse = top + logf(sum);
        memcpy(s->raw, logits, sizeof *s->raw * (size_t)V);
        if (r->top_logprobs > 0) {
            out->n_top = best_of(logits, V, (uint32_t)(r->top_logprobs > TOP_MAX ? TOP_MAX : r->top_logprobs), s->top);
            for (uint32_t i = 0; i < out->n_top; i++)
                s->top[i].logprob -= lse;
            out->top = s->top;
        }
    }
    for (uint32_t i = 0; i < r->n_logit_bias; i++)
        if (r->logit_bias[i].token >= 0 && r->logit_bias[i].token < V)
            logits[r->logit_bias[i].token] += r->logit_bias[i].bias;
    penalise(s, r, tokens, n_tokens, n_prompt, logits);
    ban_ends(s, r, pos, logits);
    float max = s->k->max(logits, V);
    if (!isfinite(max))
        out->token = -1;
    else if (r->temperature < COLDEST)
        out->token = argmax(logits, V, max);
    else
        out->token = draw(s, r, logits, pd_sample_uniform(r->seed, choice, pos));
    if (out->has_logprob && out->token >= 0)
        out->logprob = s->raw[out->token] - lse;
}
