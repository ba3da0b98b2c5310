#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#include "../base/fault.h"
#include "../base/log.h"
#include "../model/dtype.h"
#include "pool.h"
#include "slab.h"

#define SLAB_BYTES ((size_t)64 << 20)
#define LARGE_BLOCK ((size_t)8 << 20)   /* larger ones have a slab each */

struct slab {
    uint8_t *map;
    int fd;
    uint32_t *refs;             /* [slab_blocks] */
    uint64_t *free_bits;        /* one bit a block: set when free */
    uint8_t *dirty;             /* [slab_blocks] 1: used before, to be zeroed when taken */
    uint8_t *kept;              /* [slab_blocks] 1: one of its references is the prefix index's */
    uint32_t n_free;
    uint32_t n_borrowed;        /* of a foreign slab: blocks with references */
    bool foreign, disowned;
};

struct pd_pool {
    struct pd_pool_geom g;
    size_t layer_bytes, slab_bytes;
    uint32_t slab_blocks, max_blocks, max_slabs, n_slabs, first_free /* no slab before it has a free block */;
    uint32_t n_free, total;     /* of the slabs made */
    uint32_t n_borrowed, n_idle /* kept, and held by nobody else */;
    pd_pool_lack_fn *lack;
    void *lack_ctx;
    int64_t max_bytes;
    pthread_mutex_t lock;       /* all of the above that changes, and the slabs' counts */
    struct slab *slab;          /* [max_slabs], then PD_POOL_FOREIGN of other processes; never moved, since other threads read it */
};

static void lock(const struct pd_pool *p) { pthread_mutex_lock((pthread_mutex_t *)(uintptr_t)&p->lock); }
static void unlock(const struct pd_pool *p) { pthread_mutex_unlock((pthread_mutex_t *)(uintptr_t)&p->lock); }

static int check_geom(const struct pd_pool_geom *g, size_t *layer_bytes, size_t *block_bytes, struct pd_err *e)
{
    size_t el = pd_dtype_size(g->dtype), n = el;
    if (g->layers < 1 || g->kv_heads < 1 || g->head_dim < 1 || g->block_size < 1 || !el)
        return pd_fail(e, PD_EFAIL, "KV pool: impossible shape: %d layers, %d KV heads of %d, blocks of %d tokens, dtype %d",
                       g->layers, g->kv_heads, g->head_dim, g->block_size, (int)g->dtype);
    if (!pd_mul_size(n, (size_t)g->kv_heads, &n) || !pd_mul_size(n, (size_t)g->head_dim, &n) || !pd_mul_size(n, (size_t)g->block_size, &n))
        return pd_fail(e, PD_ENOMEM, "KV pool: a block of %d tokens of %d heads of %d overflows", g->block_size, g->kv_heads, g->head_dim);
    *layer_bytes = n;
    if (!pd_mul_size(n, 2, &n) || !pd_mul_size(n, (size_t)g->layers, &n) || n > (size_t)1 << 46)
        return pd_fail(e, PD_ENOMEM, "KV pool: a block of %d layers of %zu bytes is too large", g->layers, *layer_bytes);
    *block_bytes = n;
    return 0;
}

/* How many blocks a slab has. Slabs are of one size, so that one offset (layer, k or v) serves every block, and of several blocks wherever that is not much
 * memory at once: each is a descriptor, here and at who maps it, and only within a slab do neighbours become one run. No more of them than a peer maps.
 * They share the blocks evenly, so that little of the last one's is never given: under 1/32 of the memory. */
static size_t share(size_t max_blocks, size_t block_bytes)
{
    size_t most = block_bytes > LARGE_BLOCK ? 1 : SLAB_BYTES / block_bytes;
    while ((max_blocks + most - 1) / most > PD_SLABS_MAX)
        most *= 2;
    size_t full = (max_blocks + most - 1) / most;
    if (full > 1 && 32 * (full * most - max_blocks) <= max_blocks)
        return most;            /* pools of different sizes have slabs of one size then, and can be read in place by each other */
    for (size_t n = (max_blocks + most - 1) / most;; n++) {
        size_t per = (max_blocks + n - 1) / n, slabs = (max_blocks + per - 1) / per;
        if (32 * (slabs * per - max_blocks) <= max_blocks)
            return per;
    }
}

int pd_pool_new(const struct pd_pool_geom *g, int64_t max_bytes, struct pd_pool **out, struct pd_err *e)
{
    size_t layer_bytes = 0, block_bytes = 0;
    int rc = check_geom(g, &layer_bytes, &block_bytes, e);
    if (rc)
        return rc;
    if (max_bytes < 1 || (size_t)max_bytes < block_bytes)
        return pd_fail(e, PD_ENOMEM, "KV pool of %lld bytes holds no block of %zu bytes (give --kv-mem at least that)", (long long)max_bytes, block_bytes);

    size_t max_blocks = (size_t)max_bytes / block_bytes;
    if (max_blocks > UINT32_MAX / 2)
        max_blocks = UINT32_MAX / 2;
    size_t per_slab = share(max_blocks, block_bytes), n_slabs = (max_blocks + per_slab - 1) / per_slab;

    struct pd_pool *p = pd_calloc(1, sizeof *p, "KV pool", e);
    if (!p)
        return PD_ENOMEM;
    p->g = *g;
    p->layer_bytes = layer_bytes;
    p->slab_blocks = (uint32_t)per_slab;
    p->slab_bytes = per_slab * block_bytes;
    p->max_slabs = (uint32_t)n_slabs;
    p->max_blocks = (uint32_t)max_blocks;
    p->max_bytes = max_bytes;
    p->slab = pd_calloc(n_slabs + PD_POOL_FOREIGN, sizeof *p->slab, "KV pool slabs", e);
    if (!p->slab) {
        pd_free(p);
        return PD_ENOMEM;
    }
    pthread_mutex_init(&p->lock, NULL);
    *out = p;
    return 0;
}

static void slab_free(const struct pd_pool *p, struct slab *s)
{
    if (s->map)
        munmap(s->map, p->slab_bytes);
    if (s->fd >= 0)
        close(s->fd);
    pd_free(s->refs);
    pd_free(s->free_bits);
    pd_free(s->dirty);
    pd_free(s->kept);
    memset(s, 0, sizeof *s);
}

void pd_pool_free(struct pd_pool *p)
{
    if (!p)
        return;
    for (uint32_t i = 0; i < p->max_slabs + PD_POOL_FOREIGN; i++)
        if (p->slab[i].map)
            slab_free(p, &p->slab[i]);
    pd_free(p->slab);
    pthread_mutex_destroy(&p->lock);
    pd_free(p);
}

/* The memory of slab number `index`, not yet the pool's. */
static int slab_make(const struct pd_pool *p, uint32_t index, struct slab *s, struct pd_err *e)
{
    uint32_t n = p->slab_blocks, words = (n + 63) / 64;
    int rc = PD_ENOMEM;
    *s = (struct slab){ .fd = -1 };
    if (!(s->refs = pd_calloc(n, sizeof *s->refs, "KV block references", e)) || !(s->free_bits = pd_calloc(words, 8, "KV block bits", e)) ||
        !(s->dirty = pd_calloc(n, 1, "KV block states", e)) || !(s->kept = pd_calloc(n, 1, "KV block states", e)))
        goto bad;
    struct pd_err why;
    if ((rc = pd_slab_make(p->slab_bytes, &s->fd, &s->map, &why)) < 0) {
        pd_fail(e, rc, "KV pool: slab %u (%zu bytes in use already; lower --kv-mem): %s", index + 1, p->slab_bytes * index, why.msg);
        if (e)
            e->sys = why.sys;
        goto bad;
    }
    uint32_t give = p->max_blocks - index * n < n ? p->max_blocks - index * n : n;
    for (uint32_t i = 0; i < give; i++)
        s->free_bits[i / 64] |= (uint64_t)1 << (i % 64);
    s->n_free = give;
    return 0;
bad:
    slab_free(p, s);
    return rc;
}

static void slab_join(struct pd_pool *p, const struct slab *s)
{
    p->slab[p->n_slabs] = *s;
    p->n_free += s->n_free;
    p->total += s->n_free;
    if (p->first_free > p->n_slabs)
        p->first_free = p->n_slabs;
    p->n_slabs++;
}

static int slab_add(struct pd_pool *p, struct pd_err *e)
{
    struct slab s;
    int rc = slab_make(p, p->n_slabs, &s, e);
    if (rc == 0)
        slab_join(p, &s);
    return rc;
}

void pd_pool_ahead(struct pd_pool *p)
{
    struct slab s;
    lock(p);
    uint32_t n = p->n_slabs;
    bool want = n < p->max_slabs && 2 * (uint64_t)p->n_free < p->slab_blocks;
    unlock(p);
    if (!want || slab_make(p, n, &s, NULL) < 0)         /* who takes blocks will be told */
        return;
    lock(p);
    bool first = p->n_slabs == n;
    if (first)
        slab_join(p, &s);
    unlock(p);
    if (!first)
        slab_free(p, &s);
}

const struct pd_pool_geom *pd_pool_geom(const struct pd_pool *p) { return &p->g; }
size_t pd_pool_layer_bytes(const struct pd_pool *p) { return p->layer_bytes; }
size_t pd_pool_off(const struct pd_pool *p, int layer, int v) { return ((size_t)layer * 2 + (v != 0)) * p->slab_blocks * p->layer_bytes; }
uint8_t *pd_pool_base(const struct pd_pool *p, uint32_t block) { return p->slab[block / p->slab_blocks].map + (size_t)(block % p->slab_blocks) * p->layer_bytes; }
int pd_pool_slab_fd(const struct pd_pool *p, uint32_t slab) { return slab < p->n_slabs ? p->slab[slab].fd : -1; }

static void zero_block(const struct pd_pool *p, uint32_t block)
{
    uint8_t *base = pd_pool_base(p, block);
    for (int l = 0; l < p->g.layers; l++)
        for (int v = 0; v < 2; v++)
            memset(base + pd_pool_off(p, l, v), 0, p->layer_bytes);
}

/* Whose block it is is settled before, so this needs no lock. */
static uint8_t *dirty(const struct pd_pool *p, uint32_t block) { return &p->slab[block / p->slab_blocks].dirty[block % p->slab_blocks]; }

static void take_clean(struct pd_pool *p, uint32_t block)
{
    if (*dirty(p, block))
        zero_block(p, block);
    *dirty(p, block) = 1;
}

/* The lowest free block; the caller knows that there is one. */
static uint32_t take_one(struct pd_pool *p)
{
    while (!p->slab[p->first_free].n_free)
        p->first_free++;
    struct slab *s = &p->slab[p->first_free];
    uint32_t w = 0;
    while (!s->free_bits[w])
        w++;
    uint32_t i = w * 64 + (uint32_t)__builtin_ctzll(s->free_bits[w]), block = p->first_free * p->slab_blocks + i;
    s->free_bits[w] &= s->free_bits[w] - 1;
    s->refs[i] = 1;
    s->n_free--;
    p->n_free--;
    return block;
}

/* Once. *lack: how many blocks more there ought to be. */
static int try_take(struct pd_pool *p, uint32_t n, uint32_t *out, uint32_t *lack, struct pd_err *e)
{
    int rc = 0;
    lock(p);
    uint32_t gettable = p->n_free + (p->max_blocks - p->total);
    *lack = n > gettable ? n - gettable : 0;
    if (*lack)
        rc = pd_fail(e, PD_ENOMEM, "KV pool: %u blocks of %d tokens wanted, %u free of %u (%lld bytes; raise --kv-mem or send fewer at once)",
                       n, p->g.block_size, gettable, p->max_blocks, (long long)p->max_bytes);
    while (rc == 0 && p->n_free < n)
        rc = slab_add(p, e);
    if (rc && !*lack)
        *lack = n - p->n_free;
    for (uint32_t i = 0; rc == 0 && i < n; i++)
        out[i] = take_one(p);
    unlock(p);
    return rc;
}

static int take(struct pd_pool *p, uint32_t n, uint32_t *out, struct pd_err *e)
{
    uint32_t lack;
    int rc;
    do
        rc = try_take(p, n, out, &lack, e);
    while (rc && p->lack && p->lack(p->lack_ctx, lack));    /* without the lock; another thread may be faster, so again while something comes */
    return rc;
}

int pd_pool_take(struct pd_pool *p, uint32_t n, uint32_t *out, struct pd_err *e)
{
    int rc = take(p, n, out, e);
    for (uint32_t i = 0; rc == 0 && i < n; i++)
        take_clean(p, out[i]);
    return rc;
}

int pd_pool_take_raw(struct pd_pool *p, uint32_t n, uint32_t *out, struct pd_err *e)
{
    int rc = take(p, n, out, e);
    for (uint32_t i = 0; rc == 0 && i < n; i++)
        *dirty(p, out[i]) = 1;
    return rc;
}

static int adopt(struct pd_pool *p, const uint8_t *map, uint32_t *slab, struct pd_err *e)
{
    uint32_t i = 0;
    while (i < PD_POOL_FOREIGN && p->slab[p->max_slabs + i].map)
        i++;
    if (i == PD_POOL_FOREIGN || (uint64_t)(p->max_slabs + i + 1) * p->slab_blocks > UINT32_MAX)
        return pd_fail(e, PD_ENOMEM, "KV pool: no room for another process's slab (%u are mapped; copy instead)", i);
    struct slab *s = &p->slab[p->max_slabs + i];
    memset(s, 0, sizeof *s);
    s->fd = -1;
    if (!(s->refs = pd_calloc(p->slab_blocks, sizeof *s->refs, "references of another process's blocks", e)))
        return PD_ENOMEM;
    s->foreign = true;
    s->map = (uint8_t *)(uintptr_t)map;     /* mapped read-only: a write is a fault, and a bug here */
    *slab = p->max_slabs + i;
    return 0;
}

int pd_pool_adopt(struct pd_pool *p, const uint8_t *map, uint32_t *slab, struct pd_err *e)
{
    lock(p);
    int rc = adopt(p, map, slab, e);
    unlock(p);
    return rc;
}

bool pd_pool_is_foreign(const struct pd_pool *p, uint32_t block) { return block / p->slab_blocks >= p->max_slabs; }
uint32_t pd_pool_slab_blocks(const struct pd_pool *p) { return p->slab_blocks; }
size_t pd_pool_slab_bytes(const struct pd_pool *p) { return p->slab_bytes; }

uint32_t pd_pool_slabs(const struct pd_pool *p)
{
    lock(p);
    uint32_t n = p->n_slabs;
    unlock(p);
    return n;
}

static struct slab *foreign(struct pd_pool *p, uint32_t slab)
{
    return slab >= p->max_slabs && slab < p->max_slabs + PD_POOL_FOREIGN && p->slab[slab].map ? &p->slab[slab] : NULL;
}

int pd_pool_borrow(struct pd_pool *p, uint32_t block, struct pd_err *e)
{
    int rc = 0;
    lock(p);
    struct slab *s = foreign(p, block / p->slab_blocks);
    if (!s || s->disowned)
        rc = pd_fail(e, PD_EFAIL, "KV pool: block %u is not one of another process's that is mapped", block);
    else if (!s->refs[block % p->slab_blocks]++) {
        s->n_borrowed++;
        p->n_borrowed++;
    }
    unlock(p);
    return rc;
}

void pd_pool_disown(struct pd_pool *p, uint32_t slab)
{
    lock(p);
    struct slab *s = foreign(p, slab);
    if (s && !s->n_borrowed)
        slab_free(p, s);
    else if (s)
        s->disowned = true;
    unlock(p);
}

/* NULL for a block that nobody holds: a mistake of the caller, told and survived. */
static struct slab *held(struct pd_pool *p, uint32_t block, const char *what)
{
    uint32_t s = block / p->slab_blocks;
    if ((s < p->n_slabs || foreign(p, s)) && p->slab[s].refs[block % p->slab_blocks])
        return &p->slab[s];
    pd_error("KV pool: %s of block %u, which is not held", what, block);
    return NULL;
}

static void ref(struct pd_pool *p, struct slab *s, uint32_t i)
{
    if (s->refs[i]++ == 1 && !s->foreign && s->kept[i])
        p->n_idle--;
}

void pd_pool_ref(struct pd_pool *p, uint32_t block)
{
    lock(p);
    struct slab *s = held(p, block, "reference");
    if (s)
        ref(p, s, block % p->slab_blocks);
    unlock(p);
}

static void put(struct pd_pool *p, uint32_t block)
{
    struct slab *s = held(p, block, "release");
    uint32_t i = block % p->slab_blocks;
    if (!s)
        return;
    if (--s->refs[i]) {
        p->n_idle += s->refs[i] == 1 && !s->foreign && s->kept[i];
        return;
    }
    if (s->foreign) {
        p->n_borrowed--;
        if (!--s->n_borrowed && s->disowned)
            slab_free(p, s);
        return;
    }
    s->free_bits[i / 64] |= (uint64_t)1 << (i % 64);
    s->n_free++;
    p->n_free++;
    if (block / p->slab_blocks < p->first_free)
        p->first_free = block / p->slab_blocks;
}

void pd_pool_put(struct pd_pool *p, uint32_t block)
{
    lock(p);
    put(p, block);
    unlock(p);
}

void pd_pool_on_lack(struct pd_pool *p, pd_pool_lack_fn *fn, void *ctx)
{
    p->lack = fn;
    p->lack_ctx = ctx;
}

bool pd_pool_keep(struct pd_pool *p, uint32_t block)
{
    uint32_t i = block % p->slab_blocks;
    lock(p);
    struct slab *s = held(p, block, "keeping");
    bool ok = s && !s->foreign && !s->kept[i];
    if (ok) {
        s->kept[i] = 1;
        s->refs[i]++;           /* its holder has one: it is not idle */
    }
    unlock(p);
    return ok;
}

bool pd_pool_unkeep(struct pd_pool *p, uint32_t block)
{
    uint32_t i = block % p->slab_blocks;
    lock(p);
    struct slab *s = held(p, block, "release");
    bool idle = s && s->kept[i] && s->refs[i] == 1;
    if (s && s->kept[i]) {
        s->kept[i] = 0;
        p->n_idle -= idle;
        put(p, block);
    }
    unlock(p);
    return idle;
}

bool pd_pool_idle(const struct pd_pool *p, uint32_t block)
{
    const struct slab *s = &p->slab[block / p->slab_blocks];
    lock(p);
    bool idle = s->kept && s->kept[block % p->slab_blocks] && s->refs[block % p->slab_blocks] == 1;
    unlock(p);
    return idle;
}

struct pd_pool_stats pd_pool_stats(const struct pd_pool *p)
{
    struct pd_pool_stats s;
    memset(&s, 0, sizeof s);
    lock(p);
    s.total = p->total;
    s.max = p->max_blocks;
    s.free = p->n_free;
    s.cached = p->n_idle;
    s.used = s.total - s.free - s.cached;
    s.borrowed = p->n_borrowed;
    s.slab_bytes = (uint64_t)p->n_slabs * p->slab_bytes;
    unlock(p);
    return s;
}
