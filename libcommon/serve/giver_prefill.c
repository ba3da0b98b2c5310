#include "../base/clock.h"
#include "../base/log.h"
#include "giver_in.h"

/* The loop is woken when a quarter of a run's KV has become final, within these bounds: each time that the loops of both workers wake, compute threads stand
 * aside; and what remains to be computed after the last layer's KV is to hide the last of it. */
enum { TELL_LEAST = 1 << 20, TELL_MOST = 4 << 20 };

static uint64_t tell_bytes(const struct pd_plan *p)
{
    uint64_t n = p->bytes / 4;
    return n < TELL_LEAST ? TELL_LEAST : n > TELL_MOST ? TELL_MOST : n;
}

void pd_gv_step(struct pd_giver *g, const struct pd_gv_run *r, enum pd_state_id state, uint64_t bytes, const char *cause, const uint8_t *lease)
{
    struct pd_step s = { .run = r->s.d.name, .where = "remote", .gen = atomic_load(&r->described) ? r->desc.gen : NULL, .op = r->s.d.route.op, .lease = lease };
    pd_run_step(g->w->o.trace, &s, state, bytes, cause);
}

static int describe(struct pd_giver *g, struct pd_gv_run *r, struct pd_err *e)
{
    struct pd_kvdesc *d = &r->desc;
    int rc = pd_gen_new(d->gen, e);
    if (rc)
        return rc;
    pd_describe(g->w->rt, &r->in, d);
    d->request.route = d->request.cancel_token = (struct pd_bin){ NULL, 0 };
    rc = pd_describe_plan(g->w->rt, d, &r->plan, e);
    rc = rc ? rc : pd_describe_check(d, g->w->max_record, e);
    if (rc)
        return rc;
    struct pd_arena *a = &r->in.mem;
    if (!(r->first = pd_arena_alloc(a, (size_t)r->in.req.n, sizeof *r->first, e)) || !(r->blocks = pd_arena_alloc(a, r->plan.n_blocks, sizeof *r->blocks, e)) ||
        !(r->done = pd_arena_alloc(a, r->plan.layers, sizeof *r->done, e)) || !(r->told = pd_arena_alloc(a, r->plan.layers, sizeof *r->told, e)))
        return PD_ENOMEM;
    atomic_store(&r->described, true);
    return 0;
}

static void finish(struct pd_giver *g, struct pd_gv_run *r)
{
    atomic_store(&r->finished, true);
    pd_desk_touch(g->w->desk, &r->s.d);
}

void pd_gv_take(void *ctx)
{
    struct pd_gv_run *r = ctx;
    struct pd_giver *g = r->g;
    struct pd_err e;
    atomic_store(&r->s.at_batch, true);
    if (atomic_load(&r->s.d.cancelled))
        return;
    int rc = pd_intake_tokens(g->w->rt, &r->in, &e);
    rc = rc ? rc : describe(g, r, &e);
    if (!rc && r->plan.n_blocks > g->most)
        rc = pd_fail(&e, PD_ENOMEM, "prompt of %u tokens needs %u KV blocks, and a worker that decodes too gives %u at the most, half of its pool: give --kv-mem more",
                     r->in.n_tokens, r->plan.n_blocks, g->most);
    struct pd_job j = { .req = &r->in.req, .prompt = r->in.tokens, .n_prompt = r->in.n_tokens, .user = r, .cb = &g->cb, .prefill_only = true,
                        .spent_us = pd_mono_us() - r->in.t_accept, .waited_us = r->s.d.route.waited_us };
    rc = rc ? rc : pd_batch_submit(g->w->batch, &j, &r->run, &e);
    if (rc < 0) {
        r->why = e;
        finish(g, r);
    }
}

void pd_gv_drop(void *ctx)
{
    struct pd_gv_run *r = ctx;
    struct pd_giver *g = r->g;
    if (r->run)
        pd_run_drop(g->w->batch, r->run);
    r->run = NULL;
    pd_desk_over(g->w->desk, &r->s.d);
}

void pd_gv_uncount(struct pd_giver *g, struct pd_gv_run *r)
{
    if (atomic_exchange(&r->counted, false))
        atomic_fetch_sub(&g->held, r->plan.n_blocks);
}

static bool has_room(void *ctx, struct pd_run *run)
{
    struct pd_giver *g = ctx;
    const struct pd_gv_run *r = run->user;
    return atomic_load(&g->held) + r->plan.n_blocks <= g->most;
}

static void on_started(void *ctx, struct pd_run *run)
{
    struct pd_giver *g = ctx;
    struct pd_gv_run *r = run->user;
    atomic_fetch_add(&g->held, r->plan.n_blocks);
    atomic_store(&r->counted, true);
    if (!atomic_load(&r->s.d.cancelled))          /* it has ended in the trace then */
        pd_gv_step(g, r, PD_ST_PREFILL_STARTED, 0, NULL, NULL);
    memcpy(r->blocks, pd_seq_blocks(&run->seq[0]), r->plan.n_blocks * sizeof *r->blocks);
    atomic_store(&r->started, true);
    pd_desk_touch(g->w->desk, &r->s.d);
    pd_desk_flush(g->w->desk);     /* its lease and offer are on their way while it is computed */
}

static void on_layer(void *ctx, struct pd_run *run, int layer, uint32_t n)
{
    struct pd_giver *g = ctx;
    struct pd_gv_run *r = run->user;
    uint32_t range = r->plan.chunk_blocks * r->desc.layout.block_size, done = n == r->desc.n_tokens ? r->plan.n_ranges : n / range;
    uint32_t new = done - atomic_load(&r->done[layer]);
    if (new) {
        atomic_store(&r->done[layer], done);
        if ((uint32_t)layer + 1 == r->plan.layers && done == r->plan.n_ranges)
            atomic_store(&r->t_final, pd_mono_us());
        r->untold += new * r->plan.chunk_bytes;
        pd_desk_touch(g->w->desk, &r->s.d);
    }
    if (r->untold >= tell_bytes(&r->plan) || (r->untold && (uint32_t)layer + 1 == r->plan.layers)) {
        r->untold = 0;
        pd_desk_flush(g->w->desk);
    }
}

static bool unwanted(void *ctx, struct pd_run *run)
{
    (void)ctx;
    return atomic_load(&((struct pd_gv_run *)run->user)->s.d.cancelled);
}

static bool on_token(void *ctx, struct pd_seq *s, uint32_t pos, const struct pd_sampled *t)
{
    struct pd_gv_run *r = s->run->user;
    (void)ctx;
    (void)pos;
    pd_describe_first(&r->first[s->choice], t, &r->in.mem);
    return false;
}

static void on_finished(void *ctx, struct pd_seq *s, const char *reason, const struct pd_err *why)
{
    struct pd_giver *g = ctx;
    struct pd_gv_run *r = s->run->user;
    struct pd_err e;
    (void)reason;
    if (why && !r->why.code)
        r->why = *why;
    if (s->run->n_open)
        return;
    r->run = s->run;
    struct pd_kvdesc unused = { .offer = false };       /* the loop may be reading the run's own */
    if (!r->why.code && pd_describe_times(&unused, s->run, r->in.t_accept, &r->t, &e) < 0)
        r->why = e;
    if (!r->why.code && !atomic_load(&r->s.d.cancelled))
        pd_gv_step(g, r, PD_ST_PREFILL_COMPLETED, 0, NULL, NULL);
    finish(g, r);
}

void pd_gv_callbacks(struct pd_giver *g)
{
    g->cb = (struct pd_batch_cb){ .ctx = g, .layer_done = on_layer, .token = on_token, .finished = on_finished, .started = on_started, .room = has_room,
                                  .unwanted = unwanted };
}
