#include "index.h"

enum { INLINE = 4, FIRST = 16 /* places of a new table */ };

/* A block and who holds it: in `few`, or when cap is not 0 in the sorted array `many`. n 0: a free place. */
struct entry {
    uint64_t hi, lo;
    union { uint16_t few[INLINE]; uint16_t *many; };
    uint16_t n, cap;
    bool asked;         /* since the hand was here */
};
struct shard { struct entry *e; uint32_t cap, n, hand; };
enum slot_state { FREE, LIVE, LEFT, SWEPT /* by the round that is under way */ };

struct pd_index {
    struct pd_index_opts o;
    struct shard shard[PD_INDEX_SHARDS];
    size_t tables, sets;        /* bytes; at most 3/4 and 1/4 of max_bytes */
    uint64_t n, copies, forgotten, left_out, searches;
    uint8_t state[PD_INDEX_SLOTS];
    uint32_t held[PD_INDEX_SLOTS], next_slot, n_taken, n_left;
    int at;                     /* next shard of the round; SHARDS: none is under way */
    uint64_t turn, seen[PD_INDEX_SLOTS];        /* of the match that credited the slot last */
    uint32_t n_hits;
    struct pd_hit hit[PD_INDEX_SLOTS];
};

/* ---- places ---- */

struct key { uint64_t hi, lo, at; };

static uint64_t place_of(const struct pd_index *x, uint64_t hi, uint64_t lo)
{
    uint64_t v = (hi ^ x->o.seed) * 0x9e3779b97f4a7c15u ^ lo;
    v = (v ^ v >> 32) * 0xd6e8feb86659fd93u;
    return v ^ v >> 32;
}

static struct key key_of(const struct pd_index *x, const uint8_t hash[16])
{
    struct key k;
    memcpy(&k.hi, hash, 8);
    memcpy(&k.lo, hash + 8, 8);
    k.at = place_of(x, k.hi, k.lo);
    return k;
}

static struct shard *shard_of(const struct pd_index *x, const struct key *k) { return (struct shard *)&x->shard[k->at >> 56]; }

/* Where it is, or the free place where it would be. */
static struct entry *look(const struct shard *s, const struct key *k)
{
    uint32_t i = (uint32_t)k->at & (s->cap - 1);
    while (s->e[i].n && (s->e[i].lo != k->lo || s->e[i].hi != k->hi))
        i = (i + 1) & (s->cap - 1);
    return &s->e[i];
}

static struct entry *find(const struct pd_index *x, const uint8_t hash[16])
{
    struct key k = key_of(x, hash);
    struct entry *a = look(shard_of(x, &k), &k);
    return a->n ? a : NULL;
}

static int grow(struct pd_index *x, struct shard *s, struct pd_err *e)
{
    struct shard to = { .cap = 2 * s->cap, .n = s->n };
    if (!(to.e = pd_calloc(to.cap, sizeof *to.e, "the prefix index", e)))
        return PD_ENOMEM;
    for (uint32_t i = 0; i < s->cap; i++)
        if (s->e[i].n) {
            struct key k = { s->e[i].hi, s->e[i].lo, place_of(x, s->e[i].hi, s->e[i].lo) };
            *look(&to, &k) = s->e[i];
        }
    x->tables += s->cap * sizeof *s->e;
    pd_free(s->e);
    *s = to;
    return 0;
}

/* What follows in its cluster moves up, so that no search ends too early. */
static void take_out(struct pd_index *x, struct shard *s, struct entry *a)
{
    uint32_t mask = s->cap - 1, hole = (uint32_t)(a - s->e);
    if (a->cap) {
        x->sets -= a->cap * sizeof *a->many;
        pd_free(a->many);
    }
    for (uint32_t i = (hole + 1) & mask; s->e[i].n; i = (i + 1) & mask) {
        uint32_t home = (uint32_t)place_of(x, s->e[i].hi, s->e[i].lo) & mask;
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            s->e[hole] = s->e[i];
            hole = i;
        }
    }
    s->e[hole] = (struct entry){ 0 };
    s->n--;
    x->n--;
}

/* ---- who holds a block ---- */

static uint16_t *set_of(const struct entry *a) { return a->cap ? a->many : (uint16_t *)a->few; }

/* Where it is in the sorted set, or would be. */
static uint32_t rank(const struct entry *a, uint16_t slot)
{
    const uint16_t *v = set_of(a);
    uint32_t lo = 0, hi = a->n;
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        if (v[mid] < slot)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static bool holds(const struct entry *a, uint16_t slot)
{
    uint32_t i = rank(a, slot);
    return i < a->n && set_of(a)[i] == slot;
}

static int insert(struct pd_index *x, struct entry *a, uint16_t slot, struct pd_err *e)
{
    uint32_t i = rank(a, slot), room = a->cap ? a->cap : INLINE;
    if (a->n == room) {
        uint32_t cap = room * 2 > PD_INDEX_SLOTS ? PD_INDEX_SLOTS : room * 2;
        if (x->sets + (cap - a->cap) * sizeof *a->many > x->o.max_bytes / 4) {
            x->left_out++;
            return 0;
        }
        uint16_t *v = pd_realloc(a->cap ? a->many : NULL, cap, sizeof *v, "the prefix index", e);
        if (!v)
            return PD_ENOMEM;
        if (!a->cap)
            memcpy(v, a->few, sizeof a->few);
        x->sets += (cap - a->cap) * sizeof *v;
        a->many = v;
        a->cap = (uint16_t)cap;
    }
    uint16_t *v = set_of(a);
    memmove(v + i + 1, v + i, (a->n - i) * sizeof *v);
    v[i] = slot;
    a->n++;
    x->copies++;
    x->held[slot]++;
    return 0;
}

static void lose(struct pd_index *x, struct entry *a, uint32_t i)
{
    uint16_t *v = set_of(a);
    x->copies--;
    x->held[v[i]]--;
    memmove(v + i, v + i + 1, (a->n - i - 1) * sizeof *v);
    a->n--;
    if (a->cap && a->n == INLINE) {
        x->sets -= a->cap * sizeof *v;
        a->cap = 0;
        memcpy(a->few, v, sizeof a->few);
        pd_free(v);
    }
}

static void forget_one(struct pd_index *x, struct shard *s)
{
    for (; s->n; s->hand = (s->hand + 1) & (s->cap - 1)) {
        struct entry *a = &s->e[s->hand & (s->cap - 1)];
        if (!a->n)
            continue;
        if (a->asked) {
            a->asked = false;
            continue;
        }
        for (uint32_t i = 0; i < a->n; i++)
            x->held[set_of(a)[i]]--;
        x->copies -= a->n;
        x->forgotten++;
        take_out(x, s, a);
        return;
    }
}

static int store(struct pd_index *x, uint16_t slot, const uint8_t hash[16], struct pd_err *e)
{
    struct key k = key_of(x, hash);
    struct shard *s = shard_of(x, &k);
    struct entry *a = look(s, &k);
    if (a->n && holds(a, slot)) {
        a->asked = true;
        return 0;
    }
    if (4 * (s->n + !a->n) > 3 * s->cap) {
        if (x->tables + s->cap * sizeof *s->e > x->o.max_bytes / 4 * 3)
            forget_one(x, s);
        else if (grow(x, s, e) < 0)
            return PD_ENOMEM;
    }
    a = look(s, &k);
    bool fresh = !a->n;
    int rc = insert(x, a, slot, e);
    if (rc < 0)
        return rc;
    a->asked = !fresh;          /* a new one has to be asked for: else the hand, finding all asked, would take the next one whatever it is */
    if (fresh) {
        a->hi = k.hi;
        a->lo = k.lo;
        s->n++;
        x->n++;
    }
    return 0;
}

/* Memory is asked for the places of later blocks while earlier ones are worked on. */
static void ask_ahead(const struct pd_index *x, const uint8_t (*hashes)[16], uint32_t i, uint32_t n)
{
    enum { AHEAD = 6 };
    for (uint32_t j = i ? i + AHEAD : 0; j < n && j <= i + AHEAD; j++) {
        struct key k = key_of(x, hashes[j]);
        struct shard *s = shard_of(x, &k);
        __builtin_prefetch(&s->e[(uint32_t)k.at & (s->cap - 1)], 1);
    }
}

int pd_index_stored(struct pd_index *x, uint16_t slot, const uint8_t (*hashes)[16], uint32_t n, struct pd_err *e)
{
    int rc = 0;
    for (uint32_t i = 0; i < n && !rc; i++) {
        ask_ahead(x, hashes, i, n);
        rc = store(x, slot, hashes[i], e);
    }
    return rc;
}

void pd_index_removed(struct pd_index *x, uint16_t slot, const uint8_t (*hashes)[16], uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        struct key k = key_of(x, hashes[i]);
        struct shard *s = shard_of(x, &k);
        ask_ahead(x, hashes, i, n);
        struct entry *a = look(s, &k);
        if (!a->n || !holds(a, slot))
            continue;
        lose(x, a, rank(a, slot));
        if (!a->n)
            take_out(x, s, a);
    }
}

bool pd_index_has(const struct pd_index *x, uint16_t slot, const uint8_t hash[16])
{
    const struct entry *a = find(x, hash);
    return a && holds(a, slot);
}

uint32_t pd_index_held(const struct pd_index *x, uint16_t slot) { return x->held[slot]; }

/* ---- match ---- */

static struct entry *probe(struct pd_index *x, const uint8_t hash[16])
{
    struct entry *a = find(x, hash);
    x->searches++;
    if (a)
        a->asked = true;
    return a;
}

/* Everybody in a, who holds `blocks` of them, and was not credited with more. */
static void credit(struct pd_index *x, const struct entry *a, uint32_t blocks)
{
    const uint16_t *v = set_of(a);
    for (uint32_t i = 0; i < a->n; i++)
        if (x->seen[v[i]] != x->turn && x->state[v[i]] == LIVE) {
            x->seen[v[i]] = x->turn;
            x->hit[x->n_hits++] = (struct pd_hit){ blocks, v[i] };
        }
}

/* a holds the block `lo`, n_hi of them the block `hi` too, and those are credited. */
static void refine(struct pd_index *x, const uint8_t (*hashes)[16], uint32_t lo, const struct entry *a, uint32_t hi, uint32_t n_hi)
{
    if (a->n == n_hi)
        return;
    if (hi - lo == 1) {
        credit(x, a, hi);
        return;
    }
    uint32_t mid = lo + (hi - lo) / 2;
    const struct entry *m = probe(x, hashes[mid]);
    if (m)
        refine(x, hashes, mid, m, hi, n_hi);
    refine(x, hashes, lo, a, mid, m ? m->n : 0);
}

const struct pd_hit *pd_index_match(struct pd_index *x, const uint8_t (*hashes)[16], uint32_t n, uint32_t *n_hits)
{
    const struct entry *a = n ? probe(x, hashes[0]) : NULL;
    x->turn++;
    x->n_hits = 0;
    if (a)
        refine(x, hashes, 0, a, n, 0);
    *n_hits = x->n_hits;
    return x->hit;
}

/* ---- slots ---- */

int pd_index_join(struct pd_index *x, uint16_t *slot, struct pd_err *e)
{
    for (uint32_t i = 0; i < PD_INDEX_SLOTS; i++) {
        uint32_t at = (x->next_slot + i) % PD_INDEX_SLOTS;
        if (x->state[at] != FREE)
            continue;
        x->state[at] = LIVE;
        x->next_slot = at + 1;
        x->n_taken++;
        *slot = (uint16_t)at;
        return 0;
    }
    return pd_fail(e, PD_ENOMEM, "the prefix index knows %d workers already", PD_INDEX_SLOTS);
}

void pd_index_leave(struct pd_index *x, uint16_t slot)
{
    if (x->state[slot] != LIVE)
        return;
    x->state[slot] = x->held[slot] ? LEFT : FREE;
    x->n_left += x->held[slot] != 0;
    x->n_taken -= !x->held[slot];
}

static void sweep_shard(struct pd_index *x, struct shard *s)
{
    for (uint32_t i = 0; i < s->cap;) {
        struct entry *a = &s->e[i];
        bool was = a->n;
        for (uint32_t j = a->n; j--;)
            if (x->state[set_of(a)[j]] == SWEPT)
                lose(x, a, j);
        if (was && !a->n)
            take_out(x, s, a);  /* and look at what moved here */
        else
            i++;
    }
}

bool pd_index_sweep(struct pd_index *x)
{
    if (x->at == PD_INDEX_SHARDS) {
        if (!x->n_left)
            return false;
        for (uint32_t i = 0; i < PD_INDEX_SLOTS; i++)
            if (x->state[i] == LEFT)
                x->state[i] = SWEPT;
        x->n_left = 0;
        x->at = 0;
    }
    sweep_shard(x, &x->shard[x->at++]);
    if (x->at < PD_INDEX_SHARDS)
        return true;
    for (uint32_t i = 0; i < PD_INDEX_SLOTS; i++)
        if (x->state[i] == SWEPT) {
            x->state[i] = FREE;
            x->n_taken--;
        }
    return x->n_left > 0;
}

/* ---- the whole ---- */

struct pd_index_stats pd_index_stats(const struct pd_index *x)
{
    return (struct pd_index_stats){ x->n, x->copies, x->forgotten, x->left_out, x->searches, x->tables + x->sets, x->n_taken };
}

int pd_index_new(const struct pd_index_opts *o, struct pd_index **out, struct pd_err *e)
{
    if (o->max_bytes && o->max_bytes < 1 << 20)
        return pd_fail(e, PD_EUSAGE, "a prefix index of %zu bytes: it needs 1 MiB at least", o->max_bytes);
    struct pd_index *x = pd_calloc(1, sizeof *x, "the prefix index", e);
    if (!x)
        return PD_ENOMEM;
    x->o = *o;
    x->o.max_bytes = o->max_bytes ? o->max_bytes : 256 << 20;
    x->at = PD_INDEX_SHARDS;
    for (int i = 0; i < PD_INDEX_SHARDS; i++) {
        struct shard *s = &x->shard[i];
        if (!(s->e = pd_calloc(FIRST, sizeof *s->e, "the prefix index", e))) {
            pd_index_free(x);
            return PD_ENOMEM;
        }
        s->cap = FIRST;
        x->tables += FIRST * sizeof *s->e;
    }
    *out = x;
    return 0;
}

void pd_index_free(struct pd_index *x)
{
    if (!x)
        return;
    for (int i = 0; i < PD_INDEX_SHARDS; i++) {
        struct shard *s = &x->shard[i];
        for (uint32_t j = 0; j < s->cap; j++)
            if (s->e[j].cap)
                pd_free(s->e[j].many);
        pd_free(s->e);
    }
    pd_free(x);
}
