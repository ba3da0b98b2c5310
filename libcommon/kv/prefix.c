#define XXH_STATIC_LINKING_ONLY        /* the state's size: one on the stack instead of an allocation a block */
#include <pthread.h>
#include <xxhash.h>
#include "../base/id.h"
#include "../wire/value.h"
#include "prefix.h"

#define NONE UINT32_MAX
#define EVENT_BLOCKS 1024       /* of one record at the most */
static const uint8_t no_hash[16];

/* ---- hashes ---- */

static void le32(uint8_t out[4], uint32_t v)
{
    for (int i = 0; i < 4; i++)
        out[i] = (uint8_t)(v >> 8 * i);
}

/* What a hash is of: kept in `flat`, where it is short, and hashed as one piece, which is three times as fast; else summed as it comes. */
struct piece { uint8_t *flat; size_t n; XXH3_state_t *st; };

static void put(struct piece *t, const void *p, size_t n)
{
    if (!t->flat)
        XXH3_128bits_update(t->st, p, n);
    else if (n)
        memcpy(t->flat + t->n, p, n);
    t->n += n;
}

static void put_le32(struct piece *t, uint32_t v)
{
    uint8_t id[4];
    le32(id, v);
    put(t, id, 4);
}

/* A length before each part, so that (adapter "ab", salt "c") and ("a", "bc") differ. The empty one in the middle is the place of multimodal digests. */
static void part(struct piece *t, struct pd_str s)
{
    size_t n = s.p ? s.n : 0;
    put_le32(t, (uint32_t)n);
    put(t, s.p, n);
}

static void block_hash(uint64_t seed, const uint8_t parent[16], const int32_t *tokens, uint32_t n, struct pd_str adapter, struct pd_str salt, uint8_t out[16])
{
    enum { FLAT = 512 };
    uint8_t flat[FLAT];
    XXH3_state_t st;
    XXH128_canonical_t c;
    const bool is_short = 16 + 4 + n * sizeof *tokens + 12 + (adapter.p ? adapter.n : 0) + (salt.p ? salt.n : 0) <= FLAT;
    struct piece t = { is_short ? flat : NULL, 0, &st };
    if (!is_short) {
        XXH3_INITSTATE(&st);
        XXH3_128bits_reset_withSeed(&st, seed);
    }
    put(&t, parent, 16);
    put_le32(&t, n);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    put(&t, tokens, n * sizeof *tokens);
#else
    for (uint32_t i = 0; i < n; i++)
        put_le32(&t, (uint32_t)tokens[i]);
#endif
    part(&t, adapter);
    part(&t, (struct pd_str){ NULL, 0 });
    part(&t, salt);
    XXH128_canonicalFromHash(&c, is_short ? XXH3_128bits_withSeed(flat, t.n, seed) : XXH3_128bits_digest(&st));
    memcpy(out, c.digest, 16);
}

void pd_block_hashes(uint64_t must_seed, const int32_t *tokens, uint32_t n_tokens, uint32_t block_size, struct pd_str adapter, struct pd_str salt,
                     uint8_t (*out)[16])
{
    for (uint32_t b = 0; block_size && b < n_tokens / block_size; b++)
        block_hash(must_seed, b ? out[b - 1] : no_hash, tokens + (size_t)b * block_size, block_size, adapter, salt, out[b]);
}

/* ---- the index ---- */

struct entry {
    uint8_t hash[16];
    uint32_t next;              /* in its bucket, or in the list of free entries */
    uint32_t parent, child, left, right;        /* the tree: first child, siblings */
    uint32_t older, newer;      /* of those with a block */
    uint32_t block;             /* NONE: evicted before its children (`lru`) */
    uint32_t stamp;             /* of the put that is at work */
    uint16_t adapter_n, salt_n;
    char *key;                  /* at a chain's beginning: adapter, then salt */
};

struct pd_prefix {
    struct pd_pool *pool;
    struct pd_prefix_opts o;
    uint32_t bs;
    pthread_mutex_t lock;       /* all below */
    struct entry *e;
    int32_t *tokens;            /* [cap][bs] */
    uint32_t cap, most, n_entries, n_blocks, free_list;
    uint32_t *bucket, mask;
    uint32_t oldest, newest, roots;
    uint32_t stamp;
    bool putting;               /* entries of this stamp are on the way: not evicted */
    uint8_t life[PD_LIFE_LEN];
    struct pd_kvring ring;
    struct pd_buf gone, fresh;  /* hashes of the event in the making */
    void (*changed)(void *ctx);
    void *changed_ctx;
    struct pd_prefix_stats st;
};

bool pd_evict_parse(const char *name, enum pd_evict *v)
{
    *v = strcmp(name, "lru") ? PD_EVICT_LRU_TAIL : PD_EVICT_LRU;
    return !strcmp(name, "lru") || !strcmp(name, "lru-tail");
}

static uint32_t give_way(void *ctx, uint32_t n) { return pd_prefix_evict(ctx, n); }

int pd_prefix_new(struct pd_pool *pool, const struct pd_prefix_opts *o, struct pd_prefix **out, struct pd_err *e)
{
    uint8_t gen[PD_GEN_LEN];
    struct pd_prefix *x = pd_calloc(1, sizeof *x, "prefix index", e);
    int rc = PD_ENOMEM;
    if (!x)
        return rc;
    *x = (struct pd_prefix){ .pool = pool, .o = *o, .bs = (uint32_t)pd_pool_geom(pool)->block_size, .free_list = NONE, .oldest = NONE, .newest = NONE,
                            .roots = NONE };
    x->most = pd_pool_stats(pool).max * (o->evict == PD_EVICT_LRU ? 2 : 1);
    pthread_mutex_init(&x->lock, NULL);
    if ((rc = pd_gen_new(gen, e)) < 0 ||
        (rc = pd_kvring_open(&x->ring, o->ring_records ? o->ring_records : 1024, o->ring_bytes ? o->ring_bytes : 512 << 10, e)) < 0) {
        pd_prefix_free(x);
        return rc;
    }
    memcpy(x->life, gen, sizeof x->life);
    pd_pool_on_lack(pool, give_way, x);
    *out = x;
    return 0;
}

/* The same for tests with few bits: that two contents have one hash is no longer rare. */
static void hash_of(const struct pd_prefix *x, const uint8_t parent[16], const int32_t *tokens, const struct pd_prefix_key *k, uint8_t out[16])
{
    block_hash(x->o.must_seed, parent, tokens, x->bs, k->adapter, k->salt, out);
    for (uint32_t bit = x->o.hash_bits; bit && bit < 128; bit++)
        out[bit / 8] &= (uint8_t)~(0x80 >> bit % 8);
}

static uint32_t slot_of(const struct pd_prefix *x, const uint8_t hash[16])
{
    uint32_t h;
    memcpy(&h, hash, sizeof h);
    return h & x->mask;
}

static struct pd_str str(struct pd_str s) { return s.p ? s : (struct pd_str){ "", 0 }; }

static bool key_is(const struct entry *e, const struct pd_prefix_key *k)
{
    struct pd_str a = str(k->adapter), s = str(k->salt);
    return a.n == e->adapter_n && s.n == e->salt_n && !memcmp(e->key, a.p, a.n) && !memcmp(e->key + a.n, s.p, s.n);
}

static uint32_t find(const struct pd_prefix *x, const uint8_t hash[16], uint32_t parent, const int32_t *tokens, const struct pd_prefix_key *k, bool *collides)
{
    *collides = false;
    for (uint32_t i = x->bucket ? x->bucket[slot_of(x, hash)] : NONE; i != NONE; i = x->e[i].next) {
        const struct entry *e = &x->e[i];
        if (memcmp(e->hash, hash, 16))
            continue;
        if (e->parent == parent && !memcmp(x->tokens + (size_t)i * x->bs, tokens, x->bs * sizeof *tokens) && (parent != NONE || key_is(e, k)))
            return i;
        *collides = true;
    }
    return NONE;
}

/* ---- order of age ---- */

static void age_remove(struct pd_prefix *x, uint32_t i)
{
    struct entry *e = &x->e[i];
    *(e->older == NONE ? &x->oldest : &x->e[e->older].newer) = e->newer;
    *(e->newer == NONE ? &x->newest : &x->e[e->newer].older) = e->older;
}

static void age_add(struct pd_prefix *x, uint32_t i)
{
    struct entry *e = &x->e[i];
    e->newer = NONE;
    e->older = x->newest;
    *(x->newest == NONE ? &x->oldest : &x->e[x->newest].newer) = i;
    x->newest = i;
}

static void touch(struct pd_prefix *x, uint32_t i)
{
    if (x->newest == i)
        return;
    age_remove(x, i);
    age_add(x, i);
}

/* A chain was met up to `last`: in `lru-tail` its head becomes the youngest. */
static void touch_chain(struct pd_prefix *x, uint32_t last)
{
    for (uint32_t i = last; i != NONE && x->o.evict == PD_EVICT_LRU_TAIL; i = x->e[i].parent)
        touch(x, i);
}

/* ---- events ---- */

static void tell(struct pd_prefix *x, struct pd_kvevent *v)
{
    memcpy(v->life, x->life, sizeof v->life);
    if (strcmp(v->op, "cleared"))
        strcpy(v->tier, "host");
    pd_kvring_add(&x->ring, v);
    if (x->changed)
        x->changed(x->changed_ctx);
}

static void tell_gone(struct pd_prefix *x)
{
    struct pd_kvevent v = { .op = "removed", .hashes = { x->gone.p, x->gone.n } };
    if (x->gone.n)
        tell(x, &v);
    x->gone.n = 0;
}

static void add_gone(struct pd_prefix *x, const uint8_t hash[16])
{
    if (x->gone.n >= EVENT_BLOCKS * 16)
        tell_gone(x);
    if (pd_buf_add(&x->gone, hash, 16, NULL) < 0) {     /* told by a number without its record: subscribers meet a gap */
        struct pd_kvevent lost = { .op = "lost" };
        tell(x, &lost);
    }
}

static void tell_fresh(struct pd_prefix *x, const uint8_t parent[16], const int32_t *tokens)
{
    struct pd_kvevent v = { .op = "stored", .hashes = { x->fresh.p, x->fresh.n }, .block_size = x->bs };
    v.token_ids = (struct pd_bin){ (const uint8_t *)tokens, x->fresh.n / 16 * x->bs * sizeof *tokens };
    v.has_parent = memcmp(parent, no_hash, 16) != 0;
    memcpy(v.parent, parent, 16);
    if (x->fresh.n)
        tell(x, &v);
    x->fresh.n = 0;
}

/* ---- entries ---- */

static int grow(struct pd_prefix *x)
{
    uint32_t cap = x->cap ? x->cap * 2 : 64, size = 64;
    if (cap > x->most || cap < x->cap)
        cap = x->most;
    while (size < cap)
        size *= 2;
    struct entry *e = pd_realloc(x->e, cap, sizeof *e, "prefix index", NULL);
    if (e)
        x->e = e;
    size_t n;
    int32_t *t = e && pd_mul_size(x->bs, sizeof *t, &n) ? pd_realloc(x->tokens, cap, n, "prefix index", NULL) : NULL;
    if (t)
        x->tokens = t;
    uint32_t *b = t ? pd_calloc(size, sizeof *b, "prefix index", NULL) : NULL;
    if (!b)
        return PD_ENOMEM;
    memset(b, 0xff, size * sizeof *b);
    pd_free(x->bucket);
    x->bucket = b;
    x->mask = size - 1;
    for (uint32_t i = 0; i < x->cap; i++) {     /* none is free, or there would be no need */
        uint32_t *s = &b[slot_of(x, x->e[i].hash)];
        x->e[i].next = *s;
        *s = i;
    }
    for (uint32_t i = cap; i-- > x->cap;) {
        x->e[i].next = x->free_list;
        x->free_list = i;
    }
    x->cap = cap;
    return 0;
}

static void let_go(struct pd_prefix *x, uint32_t i)
{
    struct entry *e = &x->e[i];
    age_remove(x, i);
    add_gone(x, e->hash);
    pd_pool_unkeep(x->pool, e->block);
    e->block = NONE;
    x->n_blocks--;
}

/* An entry without children leaves the tree and the table. */
static void unlink_entry(struct pd_prefix *x, uint32_t i)
{
    struct entry *e = &x->e[i];
    if (e->block != NONE)
        let_go(x, i);
    *(e->left != NONE ? &x->e[e->left].right : e->parent != NONE ? &x->e[e->parent].child : &x->roots) = e->right;
    if (e->right != NONE)
        x->e[e->right].left = e->left;
    uint32_t *s = &x->bucket[slot_of(x, e->hash)];
    while (*s != i)
        s = &x->e[*s].next;
    *s = e->next;
    pd_free(e->key);
    e->key = NULL;
    e->next = x->free_list;
    x->free_list = i;
    x->n_entries--;
}

/* With all that goes on from it; leaves first. */
static void unlink_tree(struct pd_prefix *x, uint32_t root)
{
    for (uint32_t i = root;;) {
        while (x->e[i].child != NONE)
            i = x->e[i].child;
        uint32_t parent = x->e[i].parent;
        bool last = i == root;
        unlink_entry(x, i);
        if (last)
            return;
        i = parent;
    }
}

static bool on_way(const struct pd_prefix *x, uint32_t i) { return x->putting && x->e[i].stamp == x->stamp; }

/* What is known of blocks that went is of use while something goes on from them. */
static void forget(struct pd_prefix *x, uint32_t i)
{
    while (i != NONE && x->e[i].block == NONE && x->e[i].child == NONE && !on_way(x, i)) {
        uint32_t up = x->e[i].parent;
        unlink_entry(x, i);
        i = up;
    }
}

/* A block that nobody else holds goes back to the pool. Its children: in `lru` they stay, and so does what is known of it; in `lru-tail` it has some only when
 * others hold them (who computed the same block a second time), and they leave the index with it. */
static void evict(struct pd_prefix *x, uint32_t i)
{
    struct entry *e = &x->e[i];
    x->st.evicted++;
    if (e->child != NONE && x->o.evict == PD_EVICT_LRU) {
        let_go(x, i);
        return;
    }
    uint32_t p = e->parent;
    unlink_tree(x, i);
    forget(x, p);
}

/* The oldest that may go. One that is held is in use now, and so becomes young: the next look does not pass it again. */
static bool evict_one(struct pd_prefix *x, bool leaf)
{
    uint32_t i = x->oldest, next;
    for (uint32_t n = x->n_blocks; n && i != NONE; n--, i = next) {
        struct entry *e = &x->e[i];
        next = e->newer;
        if (on_way(x, i))
            continue;
        if (!pd_pool_idle(x->pool, e->block))
            touch(x, i);
        else if (!leaf || e->child == NONE) {
            evict(x, i);
            return true;
        }
    }
    return false;
}

/* A new entry below parent, with a block that is kept already; NONE: no room. */
static uint32_t entry_new(struct pd_prefix *x, const uint8_t hash[16], uint32_t parent, const int32_t *tokens, const struct pd_prefix_key *k, uint32_t block)
{
    char *key = NULL;
    if (x->free_list == NONE && (x->cap < x->most ? grow(x) < 0 : !evict_one(x, true)))
        return NONE;
    if (parent == NONE) {
        struct pd_str a = str(k->adapter), s = str(k->salt);
        if (!(key = pd_calloc(1, a.n + s.n, "prefix key", NULL)))
            return NONE;
        memcpy(key, a.p, a.n);
        memcpy(key + a.n, s.p, s.n);
    }
    uint32_t i = x->free_list, *first = parent == NONE ? &x->roots : &x->e[parent].child, *slot = &x->bucket[slot_of(x, hash)];
    x->free_list = x->e[i].next;
    x->e[i] = (struct entry){ .next = *slot, .parent = parent, .child = NONE, .left = NONE, .right = *first, .block = block, .key = key };
    if (key) {
        x->e[i].adapter_n = (uint16_t)str(k->adapter).n;
        x->e[i].salt_n = (uint16_t)str(k->salt).n;
    }
    memcpy(x->e[i].hash, hash, 16);
    memcpy(x->tokens + (size_t)i * x->bs, tokens, x->bs * sizeof *tokens);
    if (*first != NONE)
        x->e[*first].left = i;
    *first = i;
    *slot = i;
    x->n_entries++;
    return i;
}

/* ---- verbs ---- */

static bool key_fits(const struct pd_prefix_key *k) { return str(k->adapter).n + str(k->salt).n <= PD_PREFIX_KEY; }

/* The chain of the tokens as far as it is here with blocks; out may be NULL (only counted). Under the lock. */
static uint32_t match(struct pd_prefix *x, const struct pd_prefix_key *k, const int32_t *tokens, uint32_t max, uint32_t *out)
{
    uint8_t hash[16] = { 0 };
    uint32_t at = NONE, n = 0;
    bool collides;
    for (; n < max; n++, tokens += x->bs) {
        hash_of(x, hash, tokens, k, hash);
        uint32_t i = find(x, hash, at, tokens, k, &collides);
        if (i == NONE || x->e[i].block == NONE)
            break;
        at = i;
        if (!out)
            continue;
        pd_pool_ref(x->pool, x->e[i].block);
        out[n] = x->e[i].block;
        if (x->o.evict == PD_EVICT_LRU)
            touch(x, i);
    }
    if (out)
        touch_chain(x, at);
    return n;
}

uint32_t pd_prefix_take(struct pd_prefix *x, const struct pd_prefix_key *k, const int32_t *tokens, uint32_t n_tokens, uint32_t *out, uint32_t max)
{
    uint32_t all = n_tokens / x->bs;
    pthread_mutex_lock(&x->lock);
    uint32_t n = key_fits(k) ? match(x, k, tokens, all < max ? all : max, out) : 0;
    x->st.queries++;
    x->st.hit_blocks += n;
    x->st.asked_blocks += all;
    pthread_mutex_unlock(&x->lock);
    return n;
}

uint32_t pd_prefix_peek(struct pd_prefix *x, const struct pd_prefix_key *k, const int32_t *tokens, uint32_t n_tokens)
{
    pthread_mutex_lock(&x->lock);
    uint32_t n = key_fits(k) ? match(x, k, tokens, n_tokens / x->bs, NULL) : 0;
    pthread_mutex_unlock(&x->lock);
    return n;
}

/* Room for one block more under max_blocks. */
static bool room(struct pd_prefix *x)
{
    bool ok = !x->o.max_blocks || x->n_blocks < x->o.max_blocks || evict_one(x, false);
    tell_gone(x);
    return ok;
}

/* The block becomes the index's too: of a new entry, or of one that lost its own. NONE: it does not. */
static uint32_t store(struct pd_prefix *x, uint32_t i, const uint8_t hash[16], uint32_t at, const int32_t *tokens, const struct pd_prefix_key *k, uint32_t block)
{
    if (!room(x) || pd_buf_reserve(&x->fresh, 16, NULL) < 0 || !pd_pool_keep(x->pool, block))
        return NONE;
    if (i != NONE)
        x->e[i].block = block;
    else if ((i = entry_new(x, hash, at, tokens, k, block)) == NONE)
        pd_pool_unkeep(x->pool, block);
    tell_gone(x);
    if (i == NONE)
        return NONE;
    x->n_blocks++;
    age_add(x, i);
    pd_buf_add(&x->fresh, hash, 16, NULL);
    return i;
}

uint32_t pd_prefix_put(struct pd_prefix *x, const struct pd_prefix_key *k, const int32_t *tokens, const uint32_t *blocks, uint32_t n_blocks)
{
    uint8_t hash[16] = { 0 }, parent[16], before[16] = { 0 };
    uint32_t at = NONE, n = 0, start = 0;
    bool collides;
    if (!key_fits(k))
        return 0;
    pthread_mutex_lock(&x->lock);
    x->stamp++;
    x->putting = true;
    for (uint32_t b = 0; b < n_blocks && !pd_pool_is_foreign(x->pool, blocks[b]); b++) {
        const int32_t *t = tokens + (size_t)b * x->bs;
        memcpy(parent, hash, 16);
        hash_of(x, parent, t, k, hash);
        uint32_t i = find(x, hash, at, t, k, &collides);
        bool here = i != NONE && x->e[i].block != NONE;
        if (here || x->fresh.n >= EVENT_BLOCKS * 16)
            tell_fresh(x, before, tokens + (size_t)start * x->bs);
        if (i != NONE)
            x->e[i].stamp = x->stamp;
        if (!here) {
            uint32_t known = i, fresh = (uint32_t)(x->fresh.n / 16);
            if ((known == NONE && collides) || (i = store(x, known, hash, at, t, k, blocks[b])) == NONE) {
                x->putting = false;
                forget(x, known);
                break;
            }
            if (!fresh) {
                start = b;
                memcpy(before, parent, 16);
            }
            n++;
        }
        x->e[i].stamp = x->stamp;
        if (x->o.evict == PD_EVICT_LRU)
            touch(x, i);
        at = i;
    }
    tell_fresh(x, before, tokens + (size_t)start * x->bs);
    touch_chain(x, at);
    x->putting = false;
    x->st.stored += n;
    pthread_mutex_unlock(&x->lock);
    return n;
}

uint32_t pd_prefix_evict(struct pd_prefix *x, uint32_t n)
{
    uint32_t gave = 0;
    pthread_mutex_lock(&x->lock);
    if (pd_pool_stats(x->pool).cached)
        for (; gave < n && evict_one(x, false); gave++)
            ;
    tell_gone(x);
    pthread_mutex_unlock(&x->lock);
    return gave;
}

void pd_prefix_clear(struct pd_prefix *x)
{
    struct pd_kvevent v = { .op = "cleared" };
    pthread_mutex_lock(&x->lock);
    while (x->roots != NONE) {
        unlink_tree(x, x->roots);
        x->gone.n = 0;          /* one word for all */
    }
    tell(x, &v);
    pthread_mutex_unlock(&x->lock);
}

void pd_prefix_free(struct pd_prefix *x)
{
    if (!x)
        return;
    pd_pool_on_lack(x->pool, NULL, NULL);
    while (x->roots != NONE) {
        unlink_tree(x, x->roots);
        x->gone.n = 0;
    }
    pd_kvring_close(&x->ring);
    pd_buf_free(&x->gone);
    pd_buf_free(&x->fresh);
    pd_free(x->e);
    pd_free(x->tokens);
    pd_free(x->bucket);
    pthread_mutex_destroy(&x->lock);
    pd_free(x);
}

struct pd_prefix_stats pd_prefix_stats(struct pd_prefix *x)
{
    pthread_mutex_lock(&x->lock);
    struct pd_prefix_stats s = x->st;
    s.blocks = x->n_blocks;
    s.entries = x->n_entries;
    s.bytes = x->cap * (sizeof *x->e + x->bs * sizeof *x->tokens) + (x->bucket ? ((size_t)x->mask + 1) * sizeof *x->bucket : 0) + x->ring.bytes +
              x->ring.cap * sizeof *x->ring.slot;
    pthread_mutex_unlock(&x->lock);
    return s;
}

/* ---- subscribers ---- */

const uint8_t *pd_prefix_life(const struct pd_prefix *x) { return x->life; }

void pd_prefix_on_change(struct pd_prefix *x, void (*fn)(void *ctx), void *ctx)
{
    pthread_mutex_lock(&x->lock);
    x->changed = fn;
    x->changed_ctx = ctx;
    pthread_mutex_unlock(&x->lock);
}

void pd_kvcursor_open(struct pd_kvcursor *c, const struct pd_prefix *x, const uint8_t *life, uint64_t seq)
{
    *c = (struct pd_kvcursor){ .seq = seq, .known = life && !memcmp(life, x->life, sizeof x->life) };
}

void pd_kvcursor_close(struct pd_kvcursor *c) { pd_buf_free(&c->snapshot); }

/* The next entry in the order parents, children, siblings; from NONE the first. */
static uint32_t walk(const struct pd_prefix *x, uint32_t i)
{
    if (i == NONE)
        return x->roots;
    if (x->e[i].child != NONE)
        return x->e[i].child;
    while (i != NONE && x->e[i].right == NONE)
        i = x->e[i].parent;
    return i == NONE ? NONE : x->e[i].right;
}

/* The index as it is, in records. */
static int snapshot(struct pd_prefix *x, struct pd_buf *out, struct pd_err *e)
{
    struct pd_buf part[3] = { { 0 }, { 0 }, { 0 } };    /* hashes, parents, tokens */
    struct pd_kvevent v = { .seq = x->ring.last, .op = "snapshot", .block_size = x->bs, .tier = "host" };
    int rc = 0;
    memcpy(v.life, x->life, sizeof v.life);
    v.parts = x->n_blocks ? (x->n_blocks + EVENT_BLOCKS - 1) / EVENT_BLOCKS : 1;
    uint32_t i = NONE, left = x->n_blocks;
    for (v.part = 0; rc == 0 && v.part < v.parts; v.part++) {
        for (int p = 0; p < 3; p++)
            part[p].n = 0;
        for (uint32_t n = left < EVENT_BLOCKS ? left : EVENT_BLOCKS; rc == 0 && n;) {
            i = walk(x, i);
            if (x->e[i].block == NONE)
                continue;
            uint32_t up = x->e[i].parent;
            if ((rc = pd_buf_add(&part[0], x->e[i].hash, 16, e)) == 0 &&
                (rc = pd_buf_add(&part[1], up == NONE ? no_hash : x->e[up].hash, 16, e)) == 0)
                rc = pd_buf_add(&part[2], x->tokens + (size_t)i * x->bs, x->bs * sizeof *x->tokens, e);
            n--;
            left--;
        }
        v.hashes = (struct pd_bin){ part[0].n ? part[0].p : NULL, part[0].n };
        v.parents = (struct pd_bin){ part[1].n ? part[1].p : NULL, part[1].n };
        v.token_ids = (struct pd_bin){ part[2].n ? part[2].p : NULL, part[2].n };
        rc = rc ? rc : pd_kvevent_encode(&v, out, e);
    }
    for (int p = 0; p < 3; p++)
        pd_buf_free(&part[p]);
    return rc;
}

/* Under the lock. */
static int next_event(struct pd_prefix *x, struct pd_kvcursor *c, struct pd_buf *out, struct pd_err *e)
{
    const struct pd_kvring_slot *s;
    int rc;
    if (c->snapshot.n) {
        size_t n = pd_value_len(c->snapshot.p + c->at, c->snapshot.n - c->at);
        if ((rc = pd_buf_add(out, c->snapshot.p + c->at, n, e)) < 0)
            return rc;
        if ((c->at += n) == c->snapshot.n)
            pd_buf_free(&c->snapshot);
        return 1;
    }
    if (c->known && c->seq == x->ring.last)
        return 0;
    if (c->known && (s = pd_kvring_at(&x->ring, c->seq + 1))) {
        if ((rc = pd_buf_add(out, s->p, s->n, e)) < 0)
            return rc;
        c->seq++;
        return 1;
    }
    if ((rc = snapshot(x, &c->snapshot, e)) < 0) {
        pd_buf_free(&c->snapshot);
        return rc;
    }
    c->at = 0;
    c->seq = x->ring.last;
    c->known = true;
    return 1;
}

int pd_prefix_events(struct pd_prefix *x, struct pd_kvcursor *c, size_t bytes, struct pd_buf *out, struct pd_err *e)
{
    size_t from = out->n;
    int rc = 1;
    pthread_mutex_lock(&x->lock);
    while (rc == 1 && out->n - from < bytes)
        rc = next_event(x, c, out, e);
    pthread_mutex_unlock(&x->lock);
    return rc;
}
