#include "../wire/frame.h"
#include "../wire/pack.h"
#include "describe.h"

enum { HELD_BLOCKS = 8 };       /* of a range: what a decode worker holds already is left out by whole ranges */

void pd_describe(const struct pd_runtime *rt, const struct pd_intake *in, struct pd_kvdesc *d)
{
    memcpy(d->run, in->req.run, sizeof d->run);
    memcpy(d->fp_sha, rt->fp.sha, sizeof d->fp_sha);
    d->fp_fields = (struct pd_bin){ rt->fp.map.p, rt->fp.map.n };
    d->n_tokens = in->n_tokens;
    d->token_ids = in->tokens;
    pd_layout_from_pool(rt->pool, &d->layout);
    d->request = in->req;
    d->worker = (struct pd_str){ rt->worker, strlen(rt->worker) };
    d->domain = (struct pd_str){ rt->domain, strlen(rt->domain) };
    d->epoch = rt->epoch;
}

void pd_describe_first(struct pd_first *f, const struct pd_sampled *t, struct pd_arena *mem)
{
    f->token = t->token;
    f->logprob = t->logprob;
    if (t->n_top && (f->top = pd_arena_dup(mem, t->top, t->n_top * sizeof *t->top, NULL)))
        f->n_top = t->n_top;
}

int pd_describe_plan(const struct pd_runtime *rt, struct pd_kvdesc *d, struct pd_plan *plan, struct pd_err *e)
{
    uint32_t most = rt->chunk / d->layout.block_size;
    if (rt->serving && most > HELD_BLOCKS)
        most = HELD_BLOCKS;
    int rc = pd_plan_make(&d->layout, d->n_tokens, 0, plan, e);
    if (most < 1)
        most = 1;
    if (!rc && most < plan->chunk_blocks)
        rc = pd_plan_make(&d->layout, d->n_tokens, most, plan, e);
    if (rc < 0)
        return rc;
    strcpy(d->payload.codec, "none");
    d->payload.bytes = plan->bytes;
    d->payload.chunk_bytes = plan->chunk_bytes;
    d->payload.n_chunks = plan->n_chunks;
    d->payload.chunk_blocks = plan->chunk_blocks;
    return 0;
}

int pd_describe_check(const struct pd_kvdesc *d, size_t max_record, struct pd_err *e)
{
    struct pd_buf b = { 0 };
    struct pd_kvdesc offer = *d;
    const struct pd_request *q = &d->request;
    size_t max = max_record ? max_record : PD_MAX_RECORD_DEFAULT, more = 256 + (size_t)q->n * (64 + (size_t)q->top_logprobs * 32);
    offer.offer = true;
    int rc = pd_kvdesc_encode(&offer, &b, e);
    if (rc < 0 && rc != PD_ENOMEM) {
        e->code = rc = PD_EFAIL;
        pd_err_prefix(e, "request: its descriptor cannot be written");
    } else if (rc == 0 && b.n + more > max)
        rc = pd_fail(e, PD_EFAIL, "request: its descriptor of %zu bytes would be larger than a record of %zu (see --max-record)", b.n + more, max);
    pd_buf_free(&b);
    return rc;
}

int pd_describe_times(struct pd_kvdesc *d, const struct pd_run *run, int64_t t_accept, struct pd_buf *t, struct pd_err *e)
{
    struct { const char *k; int64_t v; } f[] = {
        { "accept_us", run->t_submit - t_accept }, { "queue_us", run->t_start - run->t_submit }, { "prefill_us", run->t_first - run->t_start },
        { "total_us", run->t_first - t_accept }, { "cached_tokens", run->n_cached },
    };
    struct pd_packer k;
    pd_pack_init(&k, t, e);
    msgpack_pack_map(&k.pk, sizeof f / sizeof *f);
    for (size_t i = 0; i < sizeof f / sizeof *f; i++) {
        pd_pack_text(&k, f[i].k);
        msgpack_pack_int64(&k.pk, f[i].v < 0 ? 0 : f[i].v);
    }
    d->t = (struct pd_bin){ t->p, t->n };
    return k.rc;
}
