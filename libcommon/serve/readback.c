#include "../base/clock.h"
#include "../base/hash.h"
#include "../wire/pack.h"
#include "readback.h"

enum { SLICE_US = 1000, AT_ONCE = 8, MAX_BYTES = 6 << 20, PAST_TOKENS = 65536 };

static uint32_t layers_of(const struct pd_readback *b) { return (uint32_t)pd_pool_geom(b->all->rt->pool)->layers; }

/* The sums of block i. used: tokens of it that count; what follows is taken for zeros. */
static void sum_block(struct pd_readback *b, uint32_t i, uint32_t used, uint8_t *scratch)
{
    const struct pd_pool *p = b->all->rt->pool;
    const struct pd_pool_geom *g = pd_pool_geom(p);
    size_t bytes = pd_pool_layer_bytes(p), row = bytes / ((size_t)g->kv_heads * (size_t)g->block_size);
    struct pd_kv_layout l;
    pd_layout_from_pool(p, &l);
    for (uint32_t layer = 0; layer < l.layers; layer++) {
        struct iovec v[2];
        for (int kv = 0; kv < 2; kv++) {
            v[kv] = (struct iovec){ pd_pool_base(p, b->blocks[i]) + pd_pool_off(p, (int)layer, kv), bytes };
            if (used == l.block_size)
                continue;
            uint8_t *to = scratch + (size_t)kv * bytes;
            memset(to, 0, bytes);
            for (size_t h = 0; h < l.kv_heads; h++)
                memcpy(to + h * l.block_size * row, (uint8_t *)v[kv].iov_base + h * l.block_size * row, used * row);
            v[kv].iov_base = to;
        }
        pd_put_be64(b->sums.p + ((size_t)i * l.layers + layer) * 8, pd_xxh3v(v, 2, pd_chunk_seed(b->gen, l.layout_hash, layer, i)));
    }
}

static void rid(struct pd_readback *b)
{
    for (uint32_t i = 0; i < b->n_blocks; i++)
        pd_pool_put(b->all->rt->pool, b->blocks[i]);
    *b->prev = b->next;
    if (b->next)
        b->next->prev = b->prev;
    b->all->n--;
    pd_free(b->blocks);
    pd_buf_free(&b->sums);
    pd_free(b);
}

static void pack_answer(struct pd_readback *b, struct pd_packer *k)
{
    const struct pd_runtime *rt = b->all->rt;
    struct pd_kv_layout l;
    uint8_t sum[8];
    pd_layout_from_pool(rt->pool, &l);
    msgpack_pack_map(&k->pk, 6);
    pd_pack_text(k, "pd");
    pd_pack_text(k, "status");
    pd_pack_text(k, "v");
    msgpack_pack_int(&k->pk, 1);
    pd_pack_text(k, "run");
    pd_pack_text(k, b->run);
    pd_pack_text(k, "state");
    pd_pack_text(k, b->state);
    pd_pack_text(k, "worker");
    pd_pack_text(k, rt->worker);
    pd_pack_text(k, "verify");
    msgpack_pack_map(&k->pk, 11);
    pd_pack_text(k, "fingerprint");
    pd_pack_raw(k, rt->fp.map.p, rt->fp.map.n);
    pd_pack_text(k, "gen");
    if (b->has_gen)
        pd_pack_bin(k, b->gen, PD_GEN_LEN);
    else
        msgpack_pack_nil(&k->pk);
    pd_pack_text(k, "epoch");
    msgpack_pack_uint64(&k->pk, rt->epoch);
    pd_pack_text(k, "layout_hash");
    pd_put_be64(sum, l.layout_hash);
    pd_pack_bin(k, sum, 8);
    pd_pack_text(k, "layers");
    msgpack_pack_uint32(&k->pk, l.layers);
    pd_pack_text(k, "block_size");
    msgpack_pack_uint32(&k->pk, l.block_size);
    pd_pack_text(k, "n_tokens");
    msgpack_pack_uint32(&k->pk, b->n_tokens);
    pd_pack_text(k, "tokens");
    pd_put_be64(sum, b->tokens_sum);
    pd_pack_bin(k, sum, 8);
    pd_pack_text(k, "blocks");
    msgpack_pack_uint32(&k->pk, b->n_blocks);
    pd_pack_text(k, "lease");
    pd_pack_text(k, b->lease);
    pd_pack_text(k, "sums");
    pd_pack_bin(k, b->sums.p ? b->sums.p : (const uint8_t *)"", b->sums.n);
}

static void answer(struct pd_readback *b)
{
    struct pd_buf out = { 0 };
    struct pd_packer k;
    struct pd_err e = b->why;
    int rc = e.code;
    if (!rc) {
        pd_pack_init(&k, &out, &e);
        pack_answer(b, &k);
        rc = k.rc;
    }
    if (rc < 0 || (rc = pd_conn_put(b->c, out.p, out.n, &e)) == PD_EFAIL)
        pd_conn_put_error(b->c, b->run, &e, "abort");
    pd_buf_free(&out);
    pd_conn_set(b->c, NULL);
    pd_conn_owe(b->c, -1);
}

/* A slice. */
static void on_post(void *ctx)
{
    struct pd_readback *b = ctx;
    int64_t until = pd_mono_us() + SLICE_US;
    uint32_t bs = (uint32_t)pd_pool_geom(b->all->rt->pool)->block_size;
    while (b->c && !b->why.code && b->at < b->n_blocks && pd_mono_us() < until) {
        if ((b->at + 1) * bs <= b->n_tokens)    /* else it was hashed when it was referenced */
            sum_block(b, b->at, bs, NULL);
        b->at++;
    }
    if (b->c && !b->why.code && b->at < b->n_blocks) {
        pd_loop_post(b->all->l, &b->post);
        return;
    }
    if (b->done)
        b->done(b);
    if (b->c)
        answer(b);
    rid(b);
}

void pd_readback_go(struct pd_readback *b) { pd_loop_post(b->all->l, &b->post); }

void pd_readback_blocks(struct pd_readback *b, const uint32_t *blocks, uint32_t n_kv)
{
    struct pd_pool *p = b->all->rt->pool;
    uint32_t bs = (uint32_t)pd_pool_geom(p)->block_size, tail = b->n_tokens % bs;
    bool whole = n_kv >= b->n_tokens;
    uint32_t n = whole ? (b->n_tokens + bs - 1) / bs : n_kv / bs;
    uint8_t *scratch = NULL;
    size_t bytes = (size_t)n * layers_of(b) * 8;
    if (!n)
        return;
    if (bytes > MAX_BYTES) {
        pd_fail(&b->why, PD_ENOMEM, "verify: %u blocks of %u layers are too many sums for one answer", n, layers_of(b));
        return;
    }
    if (!(b->blocks = pd_calloc(n, sizeof *b->blocks, "blocks to read back", &b->why)) || pd_buf_reserve(&b->sums, bytes, &b->why) < 0 ||
        (whole && tail && !(scratch = pd_calloc(2, pd_pool_layer_bytes(p), "a block to read back", &b->why))))
        return;
    b->sums.n = bytes;
    for (; b->n_blocks < n; b->n_blocks++) {
        b->blocks[b->n_blocks] = blocks[b->n_blocks];
        pd_pool_ref(p, blocks[b->n_blocks]);
    }
    if (scratch)
        sum_block(b, n - 1, tail, scratch);
    pd_free(scratch);
}

static void on_gone(void *ctx, struct pd_conn *c, const struct pd_err *why)
{
    struct pd_readback *b = pd_conn_get(c);
    (void)ctx;
    (void)why;
    if (b)
        b->c = NULL;
}

static void on_record(void *ctx, struct pd_conn *c, const struct pd_rec *rec)
{
    struct pd_err e;
    (void)ctx;
    (void)rec;
    pd_fail(&e, PD_EFAIL, "status: this connection has asked for a read-back; ask the next over another");
    pd_conn_put_error(c, NULL, &e, "abort");
}

static void leave_be(void *ctx, struct pd_conn *c) { (void)ctx; (void)c; }
static const struct pd_conn_cb cb = { .record = on_record, .drain = leave_be, .gone = on_gone, .looks_on = true };

int pd_readback_new(struct pd_readbacks *all, struct pd_conn *c, const char *run, struct pd_readback **out, struct pd_err *e)
{
    struct pd_readback *b;
    if (all->n >= AT_ONCE)
        return pd_fail(e, PD_ENOMEM, "verify: %u runs are being read back already; ask again", all->n);
    if (!(b = pd_calloc(1, sizeof *b, "a read-back", e)))
        return PD_ENOMEM;
    *b = (struct pd_readback){ .all = all, .c = c, .next = all->first, .prev = &all->first, .state = "waiting", .lease = "none" };
    b->post = (struct pd_post){ .fn = on_post, .ctx = b };
    snprintf(b->run, sizeof b->run, "%s", run);
    if (b->next)
        b->next->prev = &b->next;
    all->first = b;
    all->n++;
    pd_conn_set(c, b);
    pd_conn_handle(c, &cb, NULL);
    pd_conn_owe(c, 1);
    *out = b;
    return 0;
}

void pd_readback_keep(struct pd_readbacks *all, const struct pd_kvdesc *d, struct pd_arena *mem)
{
    if (d->n_tokens > PAST_TOKENS || !all->rt->prefix)
        return;
    pd_arena_free(&all->past[all->oldest].mem);
    all->past[all->oldest].desc = *d;
    all->past[all->oldest].mem = *mem;
    *mem = (struct pd_arena){ 0 };
    all->oldest = (all->oldest + 1) % PD_READBACK_PAST;
}

int pd_readback_past(struct pd_readbacks *all, struct pd_conn *c, struct pd_str run, struct pd_err *e)
{
    const struct pd_kvdesc *d = NULL;
    struct pd_readback *b;
    for (int i = 0; i < PD_READBACK_PAST; i++)
        if (all->past[i].desc.run[0] && pd_str_eq(run, all->past[i].desc.run))
            d = &all->past[i].desc;
    if (!d)
        return pd_fail(e, PD_EFAIL, "run %.*s is unknown here: not in hand, nor among the last %d that came with KV", (int)run.n, run.p, PD_READBACK_PAST);
    int rc = pd_readback_new(all, c, d->run, &b, e);
    if (rc < 0)
        return rc;
    const struct pd_prefix_key key = { d->request.adapter, d->request.cache_salt };
    uint32_t bs = (uint32_t)pd_pool_geom(all->rt->pool)->block_size, most = d->n_tokens / bs, n = 0;
    uint32_t *blocks = pd_calloc(most + 1, sizeof *blocks, "blocks to read back", &b->why);
    if (blocks)
        n = pd_prefix_take(all->rt->prefix, &key, d->token_ids, d->n_tokens, blocks, most);
    b->state = "over";
    b->lease = "released";
    b->n_tokens = d->n_tokens;
    b->tokens_sum = pd_xxh3(d->token_ids, (size_t)d->n_tokens * sizeof *d->token_ids, 0);
    memcpy(b->gen, d->gen, sizeof b->gen);
    b->has_gen = true;
    pd_readback_blocks(b, blocks, n * bs);
    for (uint32_t i = 0; i < n; i++)
        pd_pool_put(all->rt->pool, blocks[i]);
    pd_free(blocks);
    pd_readback_go(b);
    return 0;
}

void pd_readbacks_free(struct pd_readbacks *all)
{
    while (all->first)
        rid(all->first);
    for (int i = 0; i < PD_READBACK_PAST; i++)
        pd_arena_free(&all->past[i].mem);
}
