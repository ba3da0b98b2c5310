#include <math.h>
#include "../base/clock.h"
#include "batch.h"

struct pd_batch {
    const struct pd_model *m;
    const struct pd_kernels *k;
    struct pd_pool *pool;
    struct pd_batch_opts o;
    struct pd_batch_cb cb;
    struct pd_fwd *fwd;
    struct pd_sampler *sampler;
    struct pd_seq *head, **tail;        /* open sequences, oldest first */
    struct pd_span *span;               /* [max_seqs] of the step at hand */
    struct pd_seq **span_seq;
    uint32_t n_spans;
    struct pd_err no_room;      /* why the pool gave no block last */
    float *spare;                       /* [n_vocab]: sampling overwrites its logits */
    struct pd_batch_stats st;
};

int pd_batch_new(const struct pd_model *m, struct pd_threads *t, const struct pd_kernels *k, struct pd_pool *pool, const struct pd_batch_opts *o,
                 const struct pd_batch_cb *cb, struct pd_batch **out, struct pd_err *e)
{
    struct pd_batch *b = pd_calloc(1, sizeof *b, "batch", e);
    if (!b)
        return PD_ENOMEM;
    *b = (struct pd_batch){ .m = m, .k = k, .pool = pool, .o = *o, .tail = &b->head };
    if (cb)
        b->cb = *cb;
    int rc;
    if (!(b->span = pd_calloc(o->max_seqs, sizeof *b->span, "batch", e)) || !(b->span_seq = pd_calloc(o->max_seqs, sizeof *b->span_seq, "batch", e)) ||
        !(b->spare = pd_calloc((size_t)m->cfg.n_vocab, sizeof *b->spare, "logits", e))) {
        rc = PD_ENOMEM;
        goto out;
    }
    if ((rc = pd_fwd_new(m, t, k, pool, o->chunk + o->max_seqs, o->max_seqs, &b->fwd, e)) < 0 ||
        (rc = pd_sampler_new(k, m->tok, m->cfg.n_vocab, &b->sampler, e)) < 0)
        goto out;
    *out = b;
    return 0;
out:
    pd_batch_free(b);
    return rc;
}

void pd_batch_free(struct pd_batch *b)
{
    if (!b)
        return;
    while (b->head)
        pd_run_drop(b, b->head->run);
    pd_fwd_free(b->fwd);
    pd_sampler_free(b->sampler);
    pd_free(b->span);
    pd_free(b->span_seq);
    pd_free(b->spare);
    pd_free(b);
}

struct pd_batch_opts pd_batch_opts_of(const struct pd_runtime *rt)
{
    return (struct pd_batch_opts){ .chunk = rt->chunk, .max_seqs = rt->max_seqs, .prefix = rt->prefix, .priority_us = rt->serving ? PD_PRIORITY_US : 0,
                                   .timeouts = rt->serving };
}

bool pd_batch_busy(const struct pd_batch *b) { return b->head != NULL; }

struct pd_batch_stats pd_batch_stats(const struct pd_batch *b)
{
    struct pd_batch_stats st = b->st;
    for (const struct pd_seq *s = b->head; s; s = s->next) {
        uint32_t left = pd_seq_n(s) - s->n_kv;
        st.rows_left += s->run->n_prompt + (s->run->prefill_only ? 0 : (uint64_t)s->run->req->max_tokens) - s->n_kv;
        st.waiting += !s->n_kv;
        st.to_give += s->run->prefill_only;
        if (left <= 1 && s->n_kv)
            st.kv_tokens += s->n_kv;
        else if (s->n_kv || !s->choice || pd_seq_n(s) > s->run->n_prompt)       /* else it takes the first choice's */
            st.prompt_left += left;
    }
    return st;
}

/* --- sequences ------------------------------------------------------------------------------------------------------------------------------------ */

static int add_block(struct pd_batch *b, struct pd_seq *s, uint32_t block, struct pd_err *e)
{
    uint8_t *base = pd_pool_base(b->pool, block);
    int rc = pd_buf_reserve(&s->base, sizeof base, e);
    if (rc < 0 || (rc = pd_buf_add(&s->blocks, &block, sizeof block, e)) < 0)
        return rc;
    s->foreign |= pd_pool_is_foreign(b->pool, block);
    return pd_buf_add(&s->base, &base, sizeof base, e);
}

static struct pd_prefix_key key_of(const struct pd_seq *s) { return (struct pd_prefix_key){ s->run->req->adapter, s->run->req->cache_salt }; }

/* What s has computed in whole blocks is there for others from now on. */
static void leave_in_cache(struct pd_batch *b, struct pd_seq *s)
{
    uint32_t n = s->n_kv / (uint32_t)pd_pool_geom(b->pool)->block_size;
    if (n > pd_seq_n_blocks(s))
        n = pd_seq_n_blocks(s);
    if (!b->o.prefix || s->run->keep_out || !n)
        return;
    struct pd_prefix_key k = key_of(s);
    pd_prefix_put(b->o.prefix, &k, pd_seq_tokens(s), pd_seq_blocks(s), n);
}

static void drop_blocks(struct pd_batch *b, struct pd_seq *s)
{
    for (uint32_t i = 0; i < pd_seq_n_blocks(s); i++)
        pd_pool_put(b->pool, pd_seq_blocks(s)[i]);
    s->blocks.n = s->base.n = 0;
    s->n_kv = 0;
    s->foreign = false;
}

static void put_blocks(struct pd_batch *b, struct pd_seq *s)
{
    leave_in_cache(b, s);
    drop_blocks(b, s);
}

/* A sequence without blocks gets those of its tokens that are cached; the last token is computed in any case, for its logits. */
static void take_cached(struct pd_batch *b, struct pd_seq *s)
{
    uint32_t bs = (uint32_t)pd_pool_geom(b->pool)->block_size, most = (pd_seq_n(s) - 1) / bs;
    if (!b->o.prefix || s->run->keep_out || !most || pd_buf_reserve(&s->blocks, most * sizeof(uint32_t), NULL) < 0 ||
        pd_buf_reserve(&s->base, most * sizeof(uint8_t *), NULL) < 0)
        return;
    struct pd_prefix_key k = key_of(s);
    uint32_t *block = (uint32_t *)(void *)s->blocks.p, n = pd_prefix_take(b->o.prefix, &k, pd_seq_tokens(s), pd_seq_n(s), block, most);
    uint8_t **base = (uint8_t **)(void *)s->base.p;
    for (uint32_t i = 0; i < n; i++)
        base[i] = pd_pool_base(b->pool, block[i]);
    s->blocks.n = n * sizeof *block;
    s->base.n = n * sizeof *base;
    s->n_kv = n * bs;
}

static void list_add(struct pd_batch *b, struct pd_seq *s)
{
    struct pd_seq **at = b->tail;
    if (b->o.priority_us)
        for (at = &b->head; *at && (*at)->run->age <= s->run->age;)
            at = &(*at)->next;
    s->next = *at;
    *at = s;
    if (!s->next)
        b->tail = &s->next;
    b->st.seqs++;
}

static void list_remove(struct pd_batch *b, struct pd_seq *s)
{
    for (struct pd_seq **p = &b->head; *p; p = &(*p)->next)
        if (*p == s) {
            *p = s->next;
            if (!*p)
                b->tail = p;
            b->st.seqs--;
            return;
        }
}

static bool listed(const struct pd_batch *b, const struct pd_seq *s)
{
    for (const struct pd_seq *p = b->head; p; p = p->next)
        if (p == s)
            return true;
    return false;
}

void pd_run_drop(struct pd_batch *b, struct pd_run *r)
{
    for (uint32_t i = 0; i < r->n_seqs; i++) {
        struct pd_seq *s = &r->seq[i];
        if (listed(b, s))
            list_remove(b, s);
        put_blocks(b, s);
        pd_buf_free(&s->tokens);
        pd_buf_free(&s->blocks);
        pd_buf_free(&s->base);
        for (uint32_t j = 0; j < b->n_spans; j++)
            if (b->span_seq[j] == s)
                b->span_seq[j] = NULL;
    }
    pd_free(r->seq);
    pd_free(r);
    b->st.runs--;
}

/* The choice ends. A prefill-only run keeps its blocks: they are what it was for. */
static void finish(struct pd_batch *b, struct pd_seq *s, const char *reason, const struct pd_err *why)
{
    s->done = true;
    list_remove(b, s);
    if (!s->run->prefill_only)
        put_blocks(b, s);
    s->run->n_open--;
    s->run->cb->finished(s->run->cb->ctx, s, reason, why);
}

/* A choice fails; the first one before the others were forked from it takes them along. The run may be gone after this. */
static void fail_seq(struct pd_batch *b, struct pd_seq *s, const struct pd_err *why)
{
    struct pd_run *r = s->run;
    for (uint32_t i = 1; s->choice == 0 && i < r->n_seqs; i++)
        if (!r->seq[i].done && !r->seq[i].tokens.n)
            finish(b, &r->seq[i], "error", why);
    finish(b, s, "error", why);
}

/* A token joins its sequence and is reported; ends the choice where it must. The run may be gone after this. */
static void accept_token(struct pd_batch *b, struct pd_seq *s, const struct pd_sampled *t)
{
    struct pd_run *r = s->run;
    struct pd_err why;
    if (pd_buf_add(&s->tokens, &t->token, sizeof t->token, &why) < 0) {
        finish(b, s, "error", &why);
        return;
    }
    uint32_t pos = pd_seq_n(s) - r->n_prompt - 1;
    if (!r->t_first)
        r->t_first = pd_mono_us();
    bool stop = r->cb->token(r->cb->ctx, s, pos, t);
    if (stop || pd_is_stop_token(b->m->tok, r->req, t->token))
        finish(b, s, "stop", NULL);
    else if ((int64_t)pos + 1 >= r->req->max_tokens || pd_seq_n(s) >= (uint32_t)b->m->cfg.n_ctx)
        finish(b, s, "length", NULL);
    else if (r->prefill_only)
        finish(b, s, "prefilled", NULL);
}

/* Choices after the first start from the prompt's KV: full blocks shared, the partial one copied. */
static int fork_choice(struct pd_batch *b, struct pd_run *r, uint32_t choice, struct pd_err *e)
{
    struct pd_seq *from = &r->seq[0], *s = &r->seq[choice];
    uint32_t bs = (uint32_t)pd_pool_geom(b->pool)->block_size, full = r->n_prompt / bs;
    int rc = pd_buf_add(&s->tokens, from->tokens.p, r->n_prompt * sizeof(int32_t), e);
    if (rc < 0)
        return rc;
    if (r->prefill_only) {      /* never decoded here: the first choice's blocks are the run's */
        s->n_kv = r->n_prompt;
        return 0;
    }
    for (uint32_t i = 0; i < full; i++) {
        if ((rc = add_block(b, s, pd_seq_blocks(from)[i], e)) < 0)
            return rc;
        pd_pool_ref(b->pool, pd_seq_blocks(from)[i]);
    }
    s->n_kv = full * bs;
    uint32_t block;
    if (r->n_prompt > s->n_kv && pd_pool_take(b->pool, 1, &block, NULL) == 0) {
        if ((rc = add_block(b, s, block, e)) < 0) {
            pd_pool_put(b->pool, block);
            return rc;
        }
        const struct pd_pool_geom *g = pd_pool_geom(b->pool);
        for (int l = 0; l < g->layers; l++)
            for (int v = 0; v < 2; v++)
                memcpy(pd_pool_base(b->pool, block) + pd_pool_off(b->pool, l, v),
                       pd_pool_base(b->pool, pd_seq_blocks(from)[full]) + pd_pool_off(b->pool, l, v), pd_pool_layer_bytes(b->pool));
        s->n_kv = r->n_prompt;
    }   /* no block left: the tail is recomputed when there is one */
    return 0;
}

/* --- runs ----------------------------------------------------------------------------------------------------------------------------------------- */

static uint32_t blocks_for(const struct pd_batch *b, uint32_t tokens)
{
    uint32_t bs = (uint32_t)pd_pool_geom(b->pool)->block_size;
    return (tokens + bs - 1) / bs;
}

static int submit_check(const struct pd_batch *b, const struct pd_job *j, struct pd_err *e)
{
    uint32_t need = j->n_prompt + j->n_resume, ctx = (uint32_t)b->m->cfg.n_ctx, max = pd_pool_stats(b->pool).max;
    if (need == 0)
        return pd_fail(e, PD_EFAIL, "the prompt is empty: nothing to run");
    if (need + 1 > ctx)
        return pd_fail(e, PD_EFAIL, "prompt of %u tokens is too long: the model's context is %u tokens, one of which the first new token needs", need, ctx);
    if (blocks_for(b, need + 1) > max)
        return pd_fail(e, PD_ENOMEM, "prompt of %u tokens needs %u KV blocks, the whole pool has %u: give --kv-mem more", need, blocks_for(b, need + 1), max);
    for (uint32_t i = 0; i < j->n_prompt; i++)
        if (j->prompt[i] < 0 || j->prompt[i] >= b->m->cfg.n_vocab)
            return pd_fail(e, PD_EFAIL, "token_ids[%u] is %d: the vocabulary has ids 0 to %d", i, j->prompt[i], b->m->cfg.n_vocab - 1);
    return 0;
}

int pd_batch_submit(struct pd_batch *b, const struct pd_job *j, struct pd_run **out, struct pd_err *e)
{
    uint32_t given = 0;         /* blocks of the job that are the run's already */
    struct pd_run *r = NULL;
    int rc = submit_check(b, j, e);
    if (rc < 0)
        goto out;
    rc = PD_ENOMEM;
    if (!(r = pd_calloc(1, sizeof *r, "run", e)))
        goto out;
    *r = (struct pd_run){ .cb = j->cb ? j->cb : &b->cb, .req = j->req, .user = j->user, .n_prompt = j->n_prompt, .n_seqs = (uint32_t)j->req->n, .n_open = (uint32_t)j->req->n,
                          .prefill_only = j->prefill_only, .keep_out = j->keep_out, .t_submit = pd_mono_us() };
    if (b->o.priority_us)
        r->age = r->t_submit - j->spent_us - j->waited_us - pd_request_steps(j->req) * b->o.priority_us;
    if (b->o.timeouts && (rc = pd_timeouts_read(j->req, &r->timeouts, e)) < 0)
        goto out;
    rc = PD_ENOMEM;
    if (r->timeouts.queue)
        r->timeouts.queue += r->t_submit - j->spent_us;
    if (r->timeouts.first_token)
        r->timeouts.first_token += r->t_submit - j->spent_us;
    if (j->req->has & PD_RQ_DEADLINE)
        r->deadline = r->t_submit - j->spent_us + j->req->deadline_ms * 1000;
    if (!(r->seq = pd_calloc(r->n_seqs, sizeof *r->seq, "run", e))) {
        r->n_seqs = 0;
        goto out;
    }
    for (uint32_t i = 0; i < r->n_seqs; i++) {
        r->seq[i].run = r;
        r->seq[i].choice = (int)i;
    }
    struct pd_seq *s = &r->seq[0];
    if ((rc = pd_buf_add(&s->tokens, j->prompt, j->n_prompt * sizeof(int32_t), e)) < 0 ||
        (rc = pd_buf_add(&s->tokens, j->resume, j->n_resume * sizeof(int32_t), e)) < 0)
        goto out;
    for (; given < j->n_blocks; given++)
        if ((rc = add_block(b, s, j->blocks[given], e)) < 0)
            goto out;
    if (j->n_blocks)
        s->n_kv = j->n_first ? j->n_prompt : j->n_prompt - 1;
    leave_in_cache(b, s);
    for (uint32_t i = 1; j->n_first && i < r->n_seqs; i++)
        if ((rc = fork_choice(b, r, i, e)) < 0)
            goto out;
    b->st.runs++;
    *out = r;
    for (uint32_t i = 0; i < (j->n_first ? r->n_seqs : 1); i++)
        list_add(b, &r->seq[i]);
    if (j->n_first) {
        r->t_start = r->t_submit;
        uint32_t n = r->n_seqs < j->n_first ? r->n_seqs : j->n_first;
        for (uint32_t i = 0; i < n; i++) {      /* the run is gone after its last choice, never before */
            const struct pd_first *f = &j->first[i];
            struct pd_sampled t = { f->token, j->req->logprobs || j->req->top_logprobs > 0, f->logprob, f->top, f->n_top };
            accept_token(b, &r->seq[i], &t);
        }
    }
    return 0;
out:
    for (; given < j->n_blocks; given++)
        pd_pool_put(b->pool, j->blocks[given]);
    if (r) {
        b->st.runs++;
        pd_run_drop(b, r);
    }
    return rc;
}

/* --- the step ------------------------------------------------------------------------------------------------------------------------------------- */

/* The youngest sequence after s that holds blocks gives them back. */
static bool preempt_after(struct pd_batch *b, struct pd_seq *s)
{
    struct pd_seq *youngest = NULL;
    for (struct pd_seq *p = s->next; p; p = p->next)
        if (p->blocks.n && !p->run->prefill_only)
            youngest = p;
    if (!youngest)
        return false;
    put_blocks(b, youngest);
    youngest->run->preempted++;
    b->st.preemptions++;
    return true;
}

/* Blocks for `tokens` tokens of s, all or nothing. */
static int ensure_blocks(struct pd_batch *b, struct pd_seq *s, uint32_t tokens, struct pd_err *e)
{
    uint32_t want = blocks_for(b, tokens), have = pd_seq_n_blocks(s);
    for (; have < want; have++) {
        uint32_t block;
        int rc;
        while ((rc = pd_pool_take(b->pool, 1, &block, e)) < 0)
            if (!preempt_after(b, s))
                return rc;
        if ((rc = add_block(b, s, block, e)) < 0) {
            pd_pool_put(b->pool, block);
            return rc;
        }
    }
    return 0;
}

/* s is about to start, or to start again: after what of it is cached. Prefill-only runs cannot be preempted (their blocks are being sent), so they start only
 * when all blocks of the prompt can be had now: false, and it holds none. */
static bool start(struct pd_batch *b, struct pd_seq *s)
{
    const struct pd_batch_cb *cb = s->run->cb;
    if (s->run->prefill_only && cb->room && !cb->room(cb->ctx, s->run))
        return false;
    take_cached(b, s);
    struct pd_pool_stats st = pd_pool_stats(b->pool);
    if (!s->run->prefill_only || blocks_for(b, s->run->n_prompt) - pd_seq_n_blocks(s) <= st.max - st.used)
        return true;
    drop_blocks(b, s);
    return false;
}

/* The time that ran out for s, in *why. */
static bool is_late(const struct pd_seq *s, int64_t now, struct pd_err *why)
{
    const struct pd_run *r = s->run;
    const struct pd_timeouts *t = &r->timeouts;
    struct pd_timeouts asked;
    if (r->deadline && now >= r->deadline)
        return pd_fail(why, PD_ETIME, "the deadline of %lld ms has passed, %u tokens were made", (long long)r->req->deadline_ms, pd_seq_n(s) - r->n_prompt);
    if (r->t_first || !(t->queue | t->prefill | t->first_token) || pd_timeouts_read(r->req, &asked, NULL) < 0)
        return false;
    if (t->queue && !r->t_start && now >= t->queue)
        return pd_fail(why, PD_ETIME, "timed out in stage queue: %lld ms passed and its prompt was not begun (timeouts_ms.queue)", (long long)asked.queue / 1000);
    if (t->prefill && r->t_start && now >= r->t_start + t->prefill)
        return pd_fail(why, PD_ETIME, "timed out in stage prefill: after %lld ms %u of %u tokens of its prompt are computed (timeouts_ms.prefill)",
                       (long long)asked.prefill / 1000, s->n_kv, r->n_prompt);
    if (t->first_token && now >= t->first_token)
        return pd_fail(why, PD_ETIME, "timed out in stage first_token: %lld ms passed without one (timeouts_ms.first_token)", (long long)asked.first_token / 1000);
    return false;
}

/* Runs past their time end; nobody waits for them any more. */
static void end_late(struct pd_batch *b)
{
    int64_t now = pd_mono_us();
    struct pd_err why;
    for (struct pd_seq *s = b->head, *next; s; s = next) {
        next = s->next;
        if (is_late(s, now, &why))
            fail_seq(b, s, &why);
    }
}

static void plan_step(struct pd_batch *b)
{
    uint32_t budget = b->o.chunk;
    /* Somebody does, for blocks: prefill-only runs behind it do not begin, so that they leave in their order, a large one is not starved, and none of them
     * takes for long what an older one that is under way cannot go on without. */
    bool waits = false;
    b->n_spans = 0;
    for (struct pd_seq *s = b->head, *next; s && b->n_spans < b->o.max_seqs; s = next) {
        next = s->next;
        bool starts = !s->blocks.n, ready = (budget || pd_seq_n(s) - s->n_kv == 1) && !(starts && waits && s->run->prefill_only);
        if (!ready || (starts && !start(b, s))) {
            waits |= s->run->prefill_only;
            continue;
        }
        uint32_t cached = starts ? s->n_kv : 0, pending = pd_seq_n(s) - s->n_kv, rows = pending == 1 ? 1 : pending < budget ? pending : budget;
        uint32_t want = s->run->prefill_only ? pd_seq_n(s) : s->n_kv + rows;
        if (ensure_blocks(b, s, want, &b->no_room) < 0) {
            if (starts)         /* it waits without holding what it did not compute */
                drop_blocks(b, s);
            waits = true;
            continue;
        }
        next = s->next;
        b->st.cached_rows += cached;
        if (pending > 1)
            budget -= rows;
        if (!s->run->t_start) {
            s->run->n_cached = cached < s->run->n_prompt ? cached : s->run->n_prompt;
            s->run->t_start = pd_mono_us();
            if (s->run->cb->started)
                s->run->cb->started(s->run->cb->ctx, s->run);
        }
        b->span_seq[b->n_spans] = s;
        b->span[b->n_spans++] = (struct pd_span){ .tokens = pd_seq_tokens(s) + s->n_kv, .n = rows, .pos0 = s->n_kv, .blk = (uint8_t **)(void *)s->base.p,
                                                  .want_logits = rows == pending };
    }
}

static bool is_unwanted(const struct pd_seq *s) { return s->run->cb->unwanted && s->run->cb->unwanted(s->run->cb->ctx, s->run); }

static bool anybody_wants(const struct pd_batch *b)
{
    const int64_t now = pd_mono_us();
    struct pd_err why;
    for (uint32_t i = 0; i < b->n_spans; i++)
        if (!is_unwanted(b->span_seq[i]) && !is_late(b->span_seq[i], now, &why))
            return true;
    return false;
}

/* Between two layers. false: nobody wants the step. */
static bool on_layer(void *ctx, int layer)
{
    struct pd_batch *b = ctx;
    if (!anybody_wants(b))
        return false;
    for (uint32_t i = 0; i < b->n_spans; i++) {
        struct pd_run *r = b->span_seq[i]->run;
        uint32_t end = b->span[i].pos0 + b->span[i].n;
        if (r->prefill_only)
            r->cb->layer_done(r->cb->ctx, r, layer, end < r->n_prompt ? end : r->n_prompt);
    }
    return true;
}

/* What is late ends before the next step. What is unwanted leaves the list: it holds its blocks until it is dropped, and is computed no further. */
static int give_up_step(struct pd_batch *b)
{
    int rows = 0;
    for (uint32_t i = 0; i < b->n_spans; i++) {
        rows += (int)b->span[i].n;
        if (is_unwanted(b->span_seq[i]))
            list_remove(b, b->span_seq[i]);
    }
    b->n_spans = 0;
    return rows;
}

static void sample_and_accept(struct pd_batch *b, struct pd_seq *s, float *logits)
{
    struct pd_sampled t;
    struct pd_err why;
    pd_sample(b->sampler, s->run->req, s->choice, pd_seq_tokens(s), pd_seq_n(s), s->run->n_prompt, logits, &t);
    if (t.token >= 0) {
        accept_token(b, s, &t);
        return;
    }
    pd_fail(&why, PD_EFAIL, "no token is left to choose from: min_tokens, ignore_eos and stop_token_ids ban the whole vocabulary");
    finish(b, s, "error", &why);
}

/* x * 0 is 0 for every finite x and NaN for all others; 16 sums, so that the compiler may use lanes. */
static bool all_finite(const float *x, int n)
{
    float s[16] = { 0 }, sum = 0;
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++)
            s[j] += x[i + j] * 0.0f;
    for (; i < n; i++)
        sum += x[i] * 0.0f;
    for (int j = 0; j < 16; j++)
        sum += s[j];
    return sum == 0;
}

static void take_logits(struct pd_batch *b, struct pd_seq *s, float *logits)
{
    struct pd_run *r = s->run;
    int V = b->m->cfg.n_vocab;
    struct pd_err why;
    if (!all_finite(logits, V)) {
        pd_fail(&why, PD_ECORRUPT, "the model gave logits that are not finite at position %u: the model file is damaged or not a language model", pd_seq_n(s) - 1);
        r->keep_out = true;
        fail_seq(b, s, &why);
        return;
    }
    if (pd_seq_n(s) == r->n_prompt && s->choice == 0)
        leave_in_cache(b, s);
    if (pd_seq_n(s) == r->n_prompt && s->choice == 0 && r->n_seqs > 1) {
        for (uint32_t i = 1; i < r->n_seqs; i++) {
            int rc = fork_choice(b, r, i, &why);
            list_add(b, &r->seq[i]);
            if (rc < 0)
                finish(b, &r->seq[i], "error", &why);
        }
        for (uint32_t i = r->n_seqs; i-- > 1;) {
            if (r->seq[i].done)
                continue;
            memcpy(b->spare, logits, sizeof *logits * (size_t)V);
            sample_and_accept(b, &r->seq[i], b->spare);
        }
    }
    sample_and_accept(b, s, logits);
}

void pd_batch_fail_oldest(struct pd_batch *b)
{
    struct pd_err why = b->no_room;
    if (!why.code)
        pd_fail(&why, PD_ENOMEM, "no KV blocks left for this run: give --kv-mem more");
    struct pd_seq *s = b->head;
    while (s && s->run->prefill_only)   /* it holds nothing yet, and waits for those that do */
        s = s->next;
    s = s ? s : b->head;
    if (s)
        fail_seq(b, s, &why);
}

static bool still_valid(struct pd_batch *b, struct pd_seq *s)
{
    return !s->foreign || !s->run->cb->valid || s->run->cb->valid(s->run->cb->ctx, s->run);
}

int pd_batch_step(struct pd_batch *b, struct pd_err *e)
{
    float *logits;
    int rows = 0;
    end_late(b);
    plan_step(b);
    if (!b->n_spans)
        return 0;
    int rc = pd_forward(b->fwd, b->span, b->n_spans, on_layer, b, &logits, e);
    if (rc < 0) {
        struct pd_err why = *e;
        while (b->head)
            fail_seq(b, b->head, &why);
        b->n_spans = 0;
        return rc;
    }
    b->st.steps++;
    if (rc == 1)
        return give_up_step(b);
    for (uint32_t i = 0; i < b->n_spans; i++) {
        struct pd_seq *s = b->span_seq[i];
        rows += (int)b->span[i].n;
        if (s && !still_valid(b, s)) {
            drop_blocks(b, s);
            logits += b->span[i].want_logits ? b->m->cfg.n_vocab : 0;
            continue;
        }
        *(b->span[i].n == 1 && !(s && s->run->prefill_only) ? &b->st.decode_rows : &b->st.prompt_rows) += b->span[i].n;
        if (s)
            s->n_kv += b->span[i].n;
        if (b->span[i].want_logits) {
            if (s)
                take_logits(b, s, logits);
            logits += b->m->cfg.n_vocab;
        }
    }
    b->n_spans = 0;
    return rows;
}
