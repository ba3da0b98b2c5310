/* rdma: the giver writes into the taker's blocks (libibverbs, reliable connection). Records go over the connection as ever; the queue pair's data is in hello.
 *
 * The taker makes the blocks that it has taken for a run writable, just them, and says in `accept` where they are. The giver writes up to GROUP chunks, and with
 * the last write goes an immediate: the group's number, counted through the connection, 1 and up. A `done` says which chunks a number stands for, and their
 * checksums; the taker checks them when both have come, for only the immediate proves that the bytes are there.
 * Fence. A run ends at the giver with an immediate of no bytes that carries the run's tag and MARK: writes do not overtake each other, so what was under way
 * has then landed, and taking the region away breaks nothing. Where the mark does not come in time, the region is taken away all the same: a later write is
 * refused by the device ("remote access error") and the connection ends. Blocks are free only after either. At the giver, blocks are free when no write that
 * reads them is under way. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include "rdma_dev.h"
#include "proto.h"

enum { GROUP = 4, GROUPS = 256 /* under way */, MAX_REGIONS = 16384 /* of a run: they are registered in one go; more comes another way */, POLLS = 16 /* of 32 completions in one go: others wait for their turn */ };
#define WINDOW ((uint64_t)16 << 20)     /* bytes under way: what a cancel has to wait for, at most */
#define MARK 0x80000000u

struct aim {                            /* giving: where the taker wants one run */
    struct aim *next;
    const void *owner;
    uint32_t tag, first, n_runs;        /* first: block of the run that the first target holds */
    struct pd_payload_run *runs;
    uint32_t *rkey0;                    /* [n_runs] index of its first key */
    uint32_t *rkeys;
    bool over;                          /* to be marked, then forgotten */
};
struct target {                         /* taking: what one run's giver may write to */
    struct target *next;
    const void *owner;
    uint32_t tag, n_mr;
    struct ibv_mr **mr;
    bool marked;                        /* the giver writes there no more */
};
struct path {
    bool giving;
    struct pd_rdma_qp *q;
    struct pd_err dead;
    uint8_t gid[16];                    /* the peer's */
    char peer[64];                      /* in words */
    /* giving */
    struct pd_rdma_source *source;
    struct aim *aims;
    struct group { const void *owner; uint32_t writes; uint64_t bytes; } group[GROUPS];
    uint32_t head, n_groups;            /* the oldest under way; how many */
    uint32_t seq, n_writes;             /* of the last group; under way */
    uint64_t bytes;                     /* under way */
    struct ibv_send_wr wr[PD_RDMA_DEPTH];
    struct ibv_sge sge[PD_RDMA_DEPTH];
    uint32_t n_wr;                      /* being put together */
    uint64_t wr_bytes;
    /* taking */
    struct target *targets;
    uint32_t landed, tag;               /* of groups: the last that is there; the last given */
};

static void close_path(void *path);

/* ---- hello ---- */

/* A queue pair is made before it is known whether the peer wants one: its data has to be in the first record. What would fail with the first KV is tried now: both
 * ends agree on another way then. */
static int greet(const struct pd_xfer_opts *o, struct pd_hello *mine, struct pd_arena *a, void **path, struct pd_err *e)
{
    struct pd_err why = { 0 };
    struct path *p = pd_calloc(1, sizeof *p, "rdma path", e);
    if (!p)
        return PD_ENOMEM;
    p->giving = o->giving;
    int rc = pd_rdma_qp_open(o->giving, &p->q, &why);
    rc = rc ? rc : pd_rdma_try(p->q, o->giving, o->pool, &why);
    mine->has_rdma = true;
    if (!rc) {
        mine->rdma = p->q->at;
        *path = p;
        return 0;
    }
    close_path(p);
    size_t n = strlen(why.msg);
    mine->rdma = (struct pd_rdma_at){ .why = { pd_arena_dup(a, why.msg, n, e), n } };
    return mine->rdma.why.p ? 0 : PD_ENOMEM;
}

static int usable(const struct pd_hello *mine, const struct pd_hello *theirs, const struct pd_xfer_opts *o, struct pd_err *e)
{
    if (!mine->has_rdma || !mine->rdma.qp)
        return pd_fail(e, PD_EINCOMPAT, "%s", mine->rdma.why.p ? mine->rdma.why.p : "rdma: it was not asked for");
    if (!theirs->has_rdma || !theirs->rdma.qp)
        return pd_fail(e, PD_EINCOMPAT, "rdma: the other side has none: %.*s", theirs->rdma.why.p ? (int)(theirs->rdma.why.n < 100 ? theirs->rdma.why.n : 100) : 1,
                       theirs->rdma.why.p ? theirs->rdma.why.p : "?");
    int64_t ago = pd_rdma_shunned(theirs->rdma.gid);
    char peer[64];
    if (ago >= 0)
        return pd_fail(e, PD_EINCOMPAT, "rdma: %s did not answer %.1f s ago", pd_rdma_gid_text(theirs->rdma.gid, peer), (double)ago / 1e6);
    if (mine->layout.layout_hash != theirs->layout.layout_hash)
        return pd_fail(e, PD_EINCOMPAT, "rdma: what has to be converted cannot be written straight into its place");
    return 0;
}

static int open_path(const struct pd_xfer_opts *o, const struct pd_hello *theirs, void **path, struct pd_err *e)
{
    struct path *p = *path;
    memcpy(p->gid, theirs->rdma.gid, sizeof p->gid);
    pd_rdma_gid_text(theirs->rdma.gid, p->peer);
    return pd_rdma_qp_connect(p->q, &theirs->rdma, e);
}

static int path_fd(void *path) { return ((struct path *)path)->q->channel->fd; }

static void free_aim(struct aim *a)
{
    pd_free(a->runs);
    pd_free(a->rkey0);
    pd_free(a->rkeys);
    pd_free(a);
}

static void free_target(struct target *t)
{
    for (uint32_t i = 0; i < t->n_mr; i++)
        ibv_dereg_mr(t->mr[i]);
    pd_free(t->mr);
    pd_free(t);
}

static void shut(void *path)
{
    struct path *p = path;
    pd_rdma_qp_stop(p->q);
    p->n_groups = p->n_writes = 0;
    p->bytes = 0;
    for (struct target *t = p->targets; t; t = t->next)
        t->marked = true;
}

static void close_path(void *path)
{
    struct path *p = path;
    if (!p)
        return;
    if (p->q)
        shut(p);
    for (struct aim *a = p->aims, *next; a; a = next) {
        next = a->next;
        free_aim(a);
    }
    for (struct target *t = p->targets, *next; t; t = next) {
        next = t->next;
        free_target(t);
    }
    pd_rdma_source_close(p->source);
    pd_rdma_qp_close(p->q);
    pd_free(p);
}

static int die(struct path *p, int code, const char *why)
{
    if (!p->dead.code)
        pd_fail(&p->dead, code, "rdma: %s", why);
    return code;
}

/* ---- giving ---- */

static int offer(void *path, const struct pd_sending *s, struct pd_payload *y, struct pd_arena *a, struct pd_err *e)
{
    struct path *p = path;
    uint32_t per = pd_pool_slab_blocks(s->pool), key;
    int rc = p->source ? 0 : pd_rdma_source_open(p->q, s->pool, &p->source, e);
    if (s->plan->chunk_blocks > PD_RDMA_DEPTH / 4)
        return pd_fail(e, PD_EINCOMPAT, "rdma: a chunk of %u blocks can be more pieces than the queue holds (at most %d blocks)", s->plan->chunk_blocks,
                       PD_RDMA_DEPTH / 4);
    for (uint32_t i = 0; !rc && i < s->plan->n_blocks; i++)
        rc = pd_rdma_source_key(p->source, s->blocks[i] / per, &key, e);
    strcpy(y->scheme, "rdma");
    return rc;
}

static struct aim *aim_of(const struct path *p, const void *owner)
{
    struct aim *a = p->aims;
    while (a && (a->owner != owner || a->over))
        a = a->next;
    return a;
}

/* What the taker says is looked at for its shape alone: the memory is its own. */
static int take_aim(void *path, const struct pd_sending *s, const struct pd_accept *r, struct pd_err *e)
{
    struct path *p = path;
    uint64_t blocks = 0, keys = 0;
    size_t layer = pd_pool_layer_bytes(s->pool);
    for (uint32_t i = 0; i < r->n_target; i++) {
        const struct pd_payload_run *t = &r->target[i];
        if (t->count != 2 * s->plan->layers || !t->len || t->len % layer || t->len / layer > s->plan->n_blocks)
            return pd_fail(e, PD_ECORRUPT, "accept for run %s: target %u is not of whole blocks of %u layers", s->desc->run, i, s->plan->layers);
        blocks += t->len / layer;
        keys += t->stride == t->len ? 1 : t->count;
    }
    if (blocks > s->plan->n_blocks || !r->tag || r->tag >= MARK || r->rkeys.n != 4 * keys)
        return pd_fail(e, PD_ECORRUPT, "accept for run %s: targets of %llu blocks with %zu bytes of keys and tag %u, for %u blocks", s->desc->run,
                       (unsigned long long)blocks, r->rkeys.n, r->tag, s->plan->n_blocks);
    struct aim *a = pd_calloc(1, sizeof *a, "rdma target", e);
    if (!a)
        return PD_ENOMEM;
    *a = (struct aim){ .owner = s->owner, .tag = r->tag, .first = s->plan->n_blocks - (uint32_t)blocks, .n_runs = r->n_target,
                       .runs = pd_calloc(r->n_target, sizeof *a->runs, "rdma target", e), .rkey0 = pd_calloc(r->n_target, sizeof *a->rkey0, "rdma target", e),
                       .rkeys = pd_calloc(keys, sizeof *a->rkeys, "rdma keys", e) };
    if (!a->runs || !a->rkey0 || !a->rkeys) {
        free_aim(a);
        return PD_ENOMEM;
    }
    for (uint32_t i = 0, k = 0; i < r->n_target; i++) {
        a->runs[i] = r->target[i];
        a->rkey0[i] = k;
        k += r->target[i].stride == r->target[i].len ? 1 : r->target[i].count;
    }
    for (uint32_t i = 0; i < keys; i++)
        a->rkeys[i] = (uint32_t)r->rkeys.p[4 * i] << 24 | (uint32_t)r->rkeys.p[4 * i + 1] << 16 | (uint32_t)r->rkeys.p[4 * i + 2] << 8 | r->rkeys.p[4 * i + 3];
    a->next = p->aims;
    p->aims = a;
    return 0;
}

static int mark(struct path *p, struct pd_err *e);

static void decline(void *path, const struct pd_accept *r)
{
    struct path *p = path;
    struct aim *a = r->tag && r->tag < MARK ? pd_calloc(1, sizeof *a, "rdma target", NULL) : NULL;
    if (!a)
        return;         /* its taker waits for a second then */
    *a = (struct aim){ .tag = r->tag, .over = true, .next = p->aims };
    p->aims = a;
    mark(p, NULL);
}

/* One piece more; it joins the one before where both go on. */
static int add_write(struct path *p, uint8_t *from, uint32_t lkey, uint64_t to, uint32_t rkey, size_t n, struct pd_err *e)
{
    while (n) {
        struct ibv_send_wr *w = p->n_wr ? &p->wr[p->n_wr - 1] : NULL;
        struct ibv_sge *g = p->n_wr ? &p->sge[p->n_wr - 1] : NULL;
        size_t k = n;
        if (w && g->addr + g->length == (uintptr_t)from && w->wr.rdma.remote_addr + g->length == to && g->lkey == lkey && w->wr.rdma.rkey == rkey &&
            g->length < p->q->max_msg) {
            k = k < p->q->max_msg - g->length ? k : p->q->max_msg - g->length;
            g->length += (uint32_t)k;
        } else {
            if (p->n_wr == PD_RDMA_DEPTH - p->n_writes)
                return pd_fail(e, PD_EFAIL, "rdma: a chunk in more than %u pieces", p->n_wr);
            k = k < p->q->max_msg ? k : p->q->max_msg;
            p->sge[p->n_wr] = (struct ibv_sge){ (uintptr_t)from, (uint32_t)k, lkey };
            p->wr[p->n_wr] = (struct ibv_send_wr){ .opcode = IBV_WR_RDMA_WRITE, .sg_list = &p->sge[p->n_wr], .num_sge = 1,
                                                   .wr.rdma = { .remote_addr = to, .rkey = rkey } };
            p->n_wr++;
        }
        p->wr_bytes += k;
        from += k;
        to += k;
        n -= k;
    }
    return 0;
}

static int add_chunk(struct path *p, const struct aim *a, const struct pd_sending *s, const struct pd_chunk *c, struct pd_err *e)
{
    size_t n = pd_pool_layer_bytes(s->pool);
    uint32_t per = pd_pool_slab_blocks(s->pool);
    for (uint32_t v = 0; v < 2; v++) {
        uint32_t run = 0, at = a->first, part = 2 * c->layer0 + v;
        for (uint32_t i = c->block0; i < c->block0 + c->blocks; i++) {
            uint32_t lkey;
            while (run < a->n_runs && i >= at + a->runs[run].len / n)
                at += (uint32_t)(a->runs[run++].len / n);
            if (run == a->n_runs || i < at)
                return pd_fail(e, PD_ECORRUPT, "run %s: its taker wants chunk %u, and says no place for block %u", s->desc->run, c->index, i);
            const struct pd_payload_run *t = &a->runs[run];
            int rc = pd_rdma_source_key(p->source, s->blocks[i] / per, &lkey, e);
            rc = rc ? rc : add_write(p, pd_pool_base(s->pool, s->blocks[i]) + pd_pool_off(s->pool, (int)c->layer0, (int)v), lkey,
                                     t->base + part * t->stride + (i - at) * n, a->rkeys[a->rkey0[run] + (t->stride == t->len ? 0 : part)], n, e);
            if (rc)
                return rc;
        }
    }
    return 0;
}

/* Post what was put together; its last one carries the immediate and says when it is done. */
static int post(struct path *p, const void *owner, uint32_t imm, struct pd_err *e)
{
    struct ibv_send_wr *bad, *last = &p->wr[p->n_wr - 1];
    for (uint32_t i = 0; i + 1 < p->n_wr; i++)
        p->wr[i].next = &p->wr[i + 1];
    last->opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    last->imm_data = htonl(imm);
    last->send_flags = IBV_SEND_SIGNALED;
    int rc = ibv_post_send(p->q->qp, p->wr, &bad);
    if (rc)
        return die(p, pd_fail(e, PD_ECANCEL, "rdma: a write cannot be posted: %s", strerror(rc)), e ? e->msg + 6 : "a write cannot be posted");
    p->group[(p->head + p->n_groups++) % GROUPS] = (struct group){ owner, p->n_wr, p->wr_bytes };
    p->n_writes += p->n_wr;
    p->bytes += p->wr_bytes;
    p->n_wr = 0;
    p->wr_bytes = 0;
    return 0;
}

static bool room(const struct path *p, uint32_t writes) { return p->n_groups < GROUPS && p->n_writes + p->n_wr + writes <= PD_RDMA_DEPTH; }

/* Say of runs that are over that nothing more is written there. */
static int mark(struct path *p, struct pd_err *e)
{
    for (struct aim **at = &p->aims; *at;) {
        struct aim *a = *at;
        if (a->over && p->q->qp && !p->dead.code) {
            if (!room(p, 1))
                return 0;
            p->wr[0] = (struct ibv_send_wr){ .num_sge = 0 };
            p->n_wr = 1;
            int rc = post(p, NULL, MARK | a->tag, e);
            if (rc)
                return rc;
        }
        if (a->over) {
            *at = a->next;
            free_aim(a);
        } else
            at = &a->next;
    }
    return 0;
}

static int send_group(void *path, const struct pd_sending *s, uint32_t index, uint32_t n, struct pd_out *out, uint32_t *sent, struct pd_err *e)
{
    struct path *p = path;
    const struct aim *a = aim_of(p, s->owner);
    uint32_t most = 2 * s->plan->chunk_blocks + 2 + (uint32_t)(s->plan->chunk_bytes / p->q->max_msg);
    uint8_t sums[GROUP * 8];
    int rc = 0, pieces;
    *sent = 0;
    if (p->dead.code || !p->q->qp) {
        *e = p->dead;
        return e->code ? e->code : pd_fail(e, PD_ECANCEL, "rdma: the queue pair is gone");
    }
    if (!a)
        return pd_fail(e, PD_EFAIL, "run %s: nobody said where to write it", s->desc->run);
    struct iovec *iov = pd_calloc(2 * (size_t)s->plan->chunk_blocks, sizeof *iov, "pieces of a chunk", e);
    if (!iov)
        return PD_ENOMEM;
    uint32_t k = 0;
    for (; !rc && k < n && k < GROUP && p->bytes + p->wr_bytes < WINDOW && room(p, most); k++) {
        struct pd_chunk c;
        rc = pd_export_chunk(s->pool, s->blocks, s->plan, s->desc, index + k, &c, iov, &pieces, e);
        rc = rc ? rc : add_chunk(p, a, s, &c, e);
        pd_put_be64(sums + 8 * k, c.xxh3);
    }
    pd_free(iov);
    if (rc || !k) {
        p->n_wr = 0;
        p->wr_bytes = 0;
        return rc;
    }
    p->seq = p->seq + 1 < MARK ? p->seq + 1 : 1;
    struct pd_done d = { .chunk0 = index, .chunks = k, .sums = { sums, 8 * (size_t)k }, .seq = p->seq };
    memcpy(d.run, s->desc->run, sizeof d.run);
    memcpy(d.gen, s->desc->gen, sizeof d.gen);
    if ((rc = post(p, s->owner, p->seq, e)) || (rc = pd_done_encode(&d, pd_out_buf(out), e)))
        return rc;
    *sent = k;
    return 0;
}

static int fence(void *path, const void *owner, struct pd_out *out, struct pd_err *e)
{
    struct path *p = path;
    struct aim *a = aim_of(p, owner);
    if (a)
        a->over = true;
    mark(p, NULL);
    return 0;
}

/* ---- taking ---- */

static int add_region(struct path *p, struct target *t, uint8_t *at, size_t n, uint8_t *key, struct pd_err *e)
{
    if (!(t->mr[t->n_mr] = pd_rdma_region(p->q, at, n, e)))
        return e->code;
    uint32_t k = t->mr[t->n_mr++]->rkey;
    for (int i = 0; i < 4; i++)
        key[i] = (uint8_t)(k >> (24 - 8 * i));
    return 0;
}

/* The blocks from the first one on of which something is missing: each run of neighbours is a target, a region for its part of each layer's K and V; one for
 * all where it fills its slab. */
static int land(void *path, const void *owner, const struct pd_pool *pool, struct pd_import *im, struct pd_accept *r, struct pd_arena *a, struct pd_err *e)
{
    struct path *p = path;
    const struct pd_plan *plan = pd_import_plan(im);
    const uint32_t *b = pd_import_blocks(im), per = pd_pool_slab_blocks(pool), parts = 2 * plan->layers;
    size_t layer = pd_pool_layer_bytes(pool), stride = per * layer;
    uint32_t chunk = 0, n_runs = 0, n_mr = 0;
    while (chunk < plan->n_chunks && pd_import_has(im, chunk))
        chunk++;
    uint32_t first = chunk / plan->layers * plan->chunk_blocks;
    struct target *t = pd_calloc(1, sizeof *t, "rdma target", e);
    if (!t)
        return PD_ENOMEM;
    for (int pass = 0; pass < 2; pass++) {      /* count, then make */
        n_runs = n_mr = 0;
        for (uint32_t i = first, n; i < plan->n_blocks; i += n) {
            for (n = 1; i + n < plan->n_blocks && b[i + n] == b[i] + n && (b[i] + n) % per; n++) {}
            uint32_t regions = n == per ? 1 : parts;
            uint8_t *base = pd_pool_base(pool, b[i]) + pd_pool_off(pool, 0, 0);
            for (uint32_t k = 0; pass && k < regions; k++)
                if (add_region(p, t, base + k * stride, regions == 1 ? parts * stride : n * layer, (uint8_t *)(uintptr_t)r->rkeys.p + 4 * (n_mr + k), e))
                    goto out;
            if (pass)
                r->target[n_runs] = (struct pd_payload_run){ .base = (uintptr_t)base, .stride = stride, .count = parts, .len = n * layer };
            n_mr += regions;
            n_runs++;
        }
        if (pass)
            break;
        if (n_mr > MAX_REGIONS) {
            pd_fail(e, PD_ENOMEM, "rdma: the blocks lie too scattered: %u regions, at most %d", n_mr, MAX_REGIONS);
            goto out;
        }
        if (!(t->mr = pd_calloc(n_mr, sizeof *t->mr, "rdma regions", e)) || !(r->target = pd_arena_alloc(a, n_runs, sizeof *r->target, e)) ||
            !(r->rkeys.p = pd_arena_alloc(a, n_mr, 4, e)))
            goto out;
    }
    r->n_target = n_runs;
    r->rkeys.n = 4 * (size_t)n_mr;
    r->tag = t->tag = p->tag = p->tag + 1 < MARK ? p->tag + 1 : 1;
    t->owner = owner;
    t->next = p->targets;
    p->targets = t;
    return 0;
out:
    free_target(t);
    return e->code;
}

static void withdraw(void *path, const void *owner)
{
    struct path *p = path;
    for (struct target **at = &p->targets; *at;)
        if ((*at)->owner == owner) {
            struct target *t = *at;
            *at = t->next;
            free_target(t);
        } else
            at = &(*at)->next;
}

static uint32_t landed(void *path) { return ((struct path *)path)->landed; }

/* ---- both ---- */

static bool busy(void *path, const void *owner)
{
    struct path *p = path;
    for (uint32_t i = 0; i < p->n_groups; i++)
        if (p->group[(p->head + i) % GROUPS].owner == owner)
            return true;
    for (const struct target *t = p->targets; t; t = t->next)
        if (t->owner == owner && !t->marked)
            return true;
    return false;
}

/* What is told of a completion that failed. Taking: what the device says when its peer wrote where it may not, or is gone. */
static int broken(struct path *p, const struct ibv_wc *w)
{
    char text[200];
    bool denied = w->status == IBV_WC_REM_ACCESS_ERR, gone = w->status == IBV_WC_RETRY_EXC_ERR || w->status == IBV_WC_RNR_RETRY_EXC_ERR;
    if (!p->giving)
        return die(p, PD_ECANCEL, "the queue pair has failed: the prefill side wrote where it may not, or has gone");
    if (!denied)
        pd_rdma_shun(p->gid);
    snprintf(text, sizeof text, denied ? "%s lets nobody write there (any more): %s" : gone ? "%s does not answer: %s" : "writing to %s: %s", p->peer,
             ibv_wc_status_str(w->status));
    return die(p, PD_ECANCEL, text);   /* the others of the connection go on over the next */
}

static int took_immediate(struct path *p, uint32_t imm)
{
    char text[100];
    if (imm & MARK) {
        for (struct target *t = p->targets; t; t = t->next)
            t->marked |= t->tag == (imm & ~MARK);
        return 0;
    }
    uint32_t next = p->landed + 1 < MARK ? p->landed + 1 : 1;
    if (imm != next) {
        snprintf(text, sizeof text, "the prefill side counts wrong: group %u came where %u was next", imm, next);
        return die(p, PD_ECORRUPT, text);
    }
    p->landed = imm;
    return 0;
}

static int progress(void *path, struct pd_err *e)
{
    struct path *p = path;
    struct ibv_wc wc[32];
    int n = 0, any = 0, polls = 0;
    while (!p->dead.code && polls++ < POLLS && (n = pd_rdma_qp_poll(p->q, wc, 32, &p->dead)) > 0) {
        any = 1;
        for (int i = 0; i < n && !p->dead.code; i++) {
            if (wc[i].status != IBV_WC_SUCCESS)
                broken(p, &wc[i]);
            else if (p->giving) {
                const struct group *g = &p->group[p->head];
                p->n_writes -= g->writes;
                p->bytes -= g->bytes;
                p->head = (p->head + 1) % GROUPS;
                p->n_groups--;
            } else
                took_immediate(p, ntohl(wc[i].imm_data));
        }
        if (!p->giving && !p->dead.code)
            pd_rdma_qp_recv(p->q, n, &p->dead);
    }
    if (p->giving && !p->dead.code)
        mark(p, &p->dead);
    if (p->dead.code && e)
        *e = p->dead;
    return p->dead.code ? p->dead.code : polls > POLLS && n > 0 ? 2 : any;
}

const struct pd_transport pd_rdma = { .scheme = "rdma", .sums = true, .greet = greet, .usable = usable, .open = open_path, .fd = path_fd, .progress = progress,
                                      .busy = busy, .shut = shut, .close = close_path, .offer = offer, .aim = take_aim, .decline = decline, .send = send_group, .fence = fence,
                                      .land = land, .withdraw = withdraw, .landed = landed };
