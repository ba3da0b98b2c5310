/* How fast the router's prefix index is, and what it is asked with; JSON rows on standard output, for scripts/bench-route.
 *   bench_index play TRACE WORKERS COPIES [BLOCKS]     events and lookups of a cluster, made out of a trace (JSON Lines with hash_ids, one for 512 tokens)
 *   bench_index hash                                   the hashes of a prompt of 32,768 tokens, in blocks of 16
 *
 * The trace is played COPIES times side by side, each with blocks of its own. A request looks up its chain and goes to the worker that holds most of it, among
 * equals (or when that one has been given many more than its share) to a random one; that worker stores what it lacks and evicts what it used longest ago,
 * chains from their tails, so that it holds at most BLOCKS (16384). Events are one record each, as workers send them: `stored` of a chain, `removed`. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/base/hash.h"
#include "../../libcommon/kv/prefix.h"
#include "../../libcommon/route/feed.h"
#include "../../libcommon/wire/value.h"

typedef uint8_t hash_t[16];
enum kind { LOOKUP, STORED, REMOVED };
struct op { enum kind kind; uint16_t worker; uint32_t n; size_t at; };
struct request { uint32_t *id, n; };
/* A worker's blocks, by last use. */
struct kept { uint64_t key; struct kept *newer, *older, *next; };
struct worker { struct kept *oldest, *newest, **bucket; uint32_t n; uint64_t given; };
enum { BUCKETS = 1 << 12, REBUILT = 2300000 /* blocks */, CAP = 32 << 20 /* bytes */ };

static struct op *ops;
static size_t n_ops, n_blocks;
static hash_t *blocks;
static struct pd_err e;

static void need(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "bench_index: %s\n", what);
        exit(1);
    }
}

static void *room(void *p, size_t n, size_t size)
{
    if ((n & (n - 1)) == 0)
        need((p = realloc(p, (n ? 2 * n : 1) * size)) != NULL, "out of memory");
    return p;
}

static void block(uint64_t key, hash_t out)
{
    pd_put_be64(out, pd_xxh3(&key, 8, 1));
    pd_put_be64(out + 8, pd_xxh3(&key, 8, 2));
}

static void op(enum kind kind, uint16_t worker)
{
    ops = room(ops, n_ops, sizeof *ops);
    ops[n_ops++] = (struct op){ kind, worker, 0, n_blocks };
}

static void add(uint64_t key)
{
    blocks = room(blocks, n_blocks, sizeof *blocks);
    block(key, blocks[n_blocks++]);
    ops[n_ops - 1].n++;
}

static struct request *read_trace(const char *path, size_t *n)
{
    struct request *r = NULL;
    char *line = NULL;
    size_t cap = 0;
    FILE *f = fopen(path, "r");
    need(f != NULL, "the trace cannot be read");
    for (*n = 0; getline(&line, &cap, f) > 0; ++*n) {
        json_t *o = json_loads(line, 0, NULL), *ids = json_object_get(o, "hash_ids");
        need(json_is_array(ids), "a line of the trace has no hash_ids");
        r = room(r, *n, sizeof *r);
        r[*n] = (struct request){ calloc(json_array_size(ids) + 1, sizeof *r->id), (uint32_t)json_array_size(ids) };
        for (uint32_t i = 0; i < r[*n].n; i++)
            r[*n].id[i] = (uint32_t)json_integer_value(json_array_get(ids, i));
        json_decref(o);
    }
    free(line);
    fclose(f);
    return r;
}

static void unlink_kept(struct worker *w, struct kept *k)
{
    *(k->older ? &k->older->newer : &w->oldest) = k->newer;
    *(k->newer ? &k->newer->older : &w->newest) = k->older;
}

static void use(struct worker *w, struct kept *k)
{
    k->older = w->newest;
    k->newer = NULL;
    *(w->newest ? &w->newest->newer : &w->oldest) = k;
    w->newest = k;
}

static struct kept **slot_of(struct worker *w, uint64_t key)
{
    struct kept **q;
    if (!w->bucket)
        need((w->bucket = calloc(BUCKETS, sizeof *w->bucket)) != NULL, "out of memory");
    for (q = &w->bucket[key * 0x9e3779b97f4a7c15u >> 52]; *q && (*q)->key != key; q = &(*q)->next)
        ;
    return q;
}

/* The cluster, with the index itself to say who holds what. */
static void make_ops(const struct request *r, size_t n, uint32_t n_workers, uint32_t copies, uint32_t most)
{
    struct worker *w = calloc(n_workers, sizeof *w);
    struct pd_index *x;
    uint64_t rng = 7, total = 0;
    hash_t *h = NULL;
    need(w && pd_index_new(&(struct pd_index_opts){ .max_bytes = (size_t)2 << 30 }, &x, &e) == 0, "out of memory");
    for (uint32_t i = 0; i < n_workers; i++) {
        uint16_t s;
        need(pd_index_join(x, &s, &e) == 0 && s == i, "slots are not given in order");
    }
    for (size_t i = 0; i < n * copies; i++) {
        const struct request *q = &r[i / copies];
        uint64_t copy = (i % copies) << 40;
        uint32_t hits;
        op(LOOKUP, 0);
        for (uint32_t b = 0; b < q->n; b++)
            add(copy | q->id[b]);
        h = blocks + ops[n_ops - 1].at;
        const struct pd_hit *hit = pd_index_match(x, (const hash_t *)h, q->n, &hits);
        rng = rng * 6364136223846793005u + 1442695040888963407u;
        uint32_t to = (uint32_t)((rng >> 33) % n_workers);
        if (hits && hit[0].blocks > 1 && w[hit[0].slot].given < 2 + 2 * total / n_workers)
            to = hit[0].slot;
        struct worker *at = &w[to];
        at->given++;
        total++;
        for (uint32_t b = q->n; b--;) {                 /* the tail is the oldest of a chain */
            struct kept **p = slot_of(at, copy | q->id[b]);
            if (*p)
                unlink_kept(at, *p);
            if (*p)
                use(at, *p);
        }
        op(STORED, (uint16_t)to);
        for (uint32_t b = 0; b < q->n; b++) {
            struct kept **p = slot_of(at, copy | q->id[b]);
            if (*p)
                continue;
            need((*p = calloc(1, sizeof **p)) != NULL, "out of memory");
            (*p)->key = copy | q->id[b];
            use(at, *p);
            at->n++;
            add(copy | q->id[b]);
        }
        struct op *last = &ops[n_ops - 1];
        need(pd_index_stored(x, (uint16_t)to, (const hash_t *)blocks + last->at, last->n, &e) == 0, e.msg);
        if (!last->n)
            n_ops--;
        if (at->n <= most)
            continue;
        op(REMOVED, (uint16_t)to);
        for (; at->n > most; at->n--) {
            struct kept *k = at->oldest, **p = slot_of(at, k->key);
            unlink_kept(at, k);
            add(k->key);
            *p = k->next;
            free(k);
        }
        last = &ops[n_ops - 1];
        pd_index_removed(x, (uint16_t)to, (const hash_t *)blocks + last->at, last->n);
    }
    pd_index_free(x);
    for (uint32_t i = 0; i < n_workers; i++) {
        for (struct kept *k = w[i].oldest, *next; k; k = next) {
            next = k->newer;
            free(k);
        }
        free(w[i].bucket);
    }
    free(w);
}

static int by_value(const void *a, const void *b) { return *(const int64_t *)a < *(const int64_t *)b ? -1 : *(const int64_t *)a > *(const int64_t *)b; }

static void row(const char *name, uint32_t workers, double value, const char *unit, size_t n)
{
    printf("{\"name\": \"%s.%u\", \"value\": %.6g, \"unit\": \"%s\", \"n\": %zu}\n", name, workers, value, unit, n);
}

static struct pd_index *cluster(uint32_t workers, size_t bytes)
{
    struct pd_index *x;
    uint16_t s;
    need(pd_index_new(&(struct pd_index_opts){ .max_bytes = bytes, .seed = 1 }, &x, &e) == 0, e.msg);
    for (uint32_t i = 0; i < workers; i++)
        need(pd_index_join(x, &s, &e) == 0, e.msg);
    return x;
}

static void apply(struct pd_index *x, const struct op *o)
{
    const hash_t *h = (const hash_t *)blocks + o->at;
    uint32_t hits;
    if (o->kind == LOOKUP)
        pd_index_match(x, h, o->n, &hits);
    else if (o->kind == STORED)
        need(pd_index_stored(x, o->worker, h, o->n, &e) == 0, e.msg);
    else
        pd_index_removed(x, o->worker, h, o->n);
}

/* All of it in its order, without a clock in between; and once more, with one around each lookup. */
static void mix(uint32_t workers)
{
    size_t lookups = 0, all = 0, k = 0;
    struct pd_index *x = cluster(workers, (size_t)2 << 30);
    int64_t t0 = pd_mono_ns();
    for (size_t i = 0; i < n_ops; i++)
        apply(x, &ops[i]);
    double s = (double)(pd_mono_ns() - t0) / 1e9;
    for (size_t i = 0; i < n_ops; i++) {
        lookups += ops[i].kind == LOOKUP;
        all += ops[i].n;
    }
    struct pd_index_stats st = pd_index_stats(x);
    row("index.ops", workers, (double)n_ops / s, "1/s", n_ops);
    row("index.blocks", workers, (double)all / s, "blocks/s", all);
    row("index.bytes_a_block", workers, (double)st.bytes / (double)st.blocks, "B", st.blocks);
    row("index.bytes_a_copy", workers, (double)st.bytes / (double)st.copies, "B", st.copies);
    pd_index_free(x);
    int64_t *t = malloc((lookups + 1) * sizeof *t);
    need(t != NULL, "out of memory");
    x = cluster(workers, (size_t)2 << 30);
    for (size_t i = 0; i < n_ops; i++) {
        int64_t a = pd_mono_ns();
        apply(x, &ops[i]);
        if (ops[i].kind == LOOKUP)
            t[k++] = pd_mono_ns() - a;
    }
    qsort(t, k, sizeof *t, by_value);
    row("index.lookup_p50", workers, (double)t[k / 2] / 1e3, "us", k);
    row("index.lookup_p99", workers, (double)t[k * 99 / 100] / 1e3, "us", k);
    row("index.lookup_p99.9", workers, (double)t[k * 999 / 1000] / 1e3, "us", k);
    pd_index_free(x);
    free(t);
}

/* From nothing, out of the events that stored so many blocks. */
static void rebuild(uint32_t workers)
{
    size_t in = 0;
    struct pd_index *x = cluster(workers, (size_t)2 << 30);
    int64_t t0 = pd_mono_ns();
    for (size_t i = 0; i < n_ops && in < REBUILT; i++)
        if (ops[i].kind == STORED) {
            apply(x, &ops[i]);
            in += ops[i].n;
        }
    double s = (double)(pd_mono_ns() - t0) / 1e9;
    if (in >= REBUILT)
        row("index.rebuild", workers, s, "s", in);
    pd_index_free(x);
}

/* The same as a router has it: each worker's events as records, with the token ids of blocks of 16, read and held in their order. */
static void rebuild_of_records(uint32_t workers)
{
    struct pd_feed *f = calloc(workers, sizeof *f);
    uint64_t *seq = calloc(workers, sizeof *seq);
    int32_t *ids = NULL;
    struct pd_buf all = { 0 };
    uint16_t *to = NULL;
    size_t n = 0, in = 0;
    need(f && seq, "out of memory");
    for (size_t i = 0; i < n_ops && in < REBUILT; i++) {
        const struct op *o = &ops[i];
        if (o->kind != STORED)
            continue;
        struct pd_kvevent v = { .life = "benched", .seq = ++seq[o->worker], .op = "stored", .block_size = 16, .tier = "host" };
        v.hashes = (struct pd_bin){ blocks[o->at], o->n * 16u };
        need((ids = realloc(ids, o->n * 64u)) != NULL, "out of memory");
        memset(ids, 7, o->n * 64u);
        v.token_ids = (struct pd_bin){ (const uint8_t *)ids, o->n * 64u };
        need(pd_kvevent_encode(&v, &all, &e) == 0, e.msg);
        to = room(to, n, sizeof *to);
        to[n++] = o->worker;
        in += o->n;
    }
    if (in < REBUILT)
        return;
    struct pd_index *x;
    need(pd_index_new(&(struct pd_index_opts){ .max_bytes = (size_t)2 << 30, .seed = 1 }, &x, &e) == 0, e.msg);
    for (uint32_t i = 0; i < workers; i++)
        pd_feed_open(&f[i], x, 16, 0);
    int64_t t0 = pd_mono_ns();
    size_t at = 0;
    for (size_t i = 0, len; i < n; i++, at += len) {
        struct pd_arena mem = { 0 };
        struct pd_kvevent v;
        len = pd_value_len(all.p + at, all.n - at);
        need(pd_kvevent_decode(all.p + at, len, &mem, &v, &e) == 0 && pd_feed_event(&f[to[i]], &v, &e) == PD_FED, e.msg);
        pd_arena_free(&mem);
    }
    row("index.rebuild_records", workers, (double)(pd_mono_ns() - t0) / 1e9, "s", in);
    pd_index_free(x);
    pd_buf_free(&all);
    free(ids);
    free(to);
    free(seq);
    free(f);
}

/* Under a bound that is too small for all. */
static void cap(uint32_t workers)
{
    struct pd_index *x = cluster(workers, CAP);
    size_t most = 0;
    for (size_t i = 0; i < n_ops; i++) {
        apply(x, &ops[i]);
        struct pd_index_stats st = pd_index_stats(x);
        most = st.bytes > most ? st.bytes : most;
    }
    struct pd_index_stats st = pd_index_stats(x);
    row("index.bytes_of_cap", workers, (double)most / CAP, "ratio", n_ops);
    row("index.forgotten", workers, (double)st.forgotten, "blocks", n_ops);
    pd_index_free(x);
}

static int play(int argc, char **argv)
{
    uint32_t workers = (uint32_t)atoi(argv[1]), copies = (uint32_t)atoi(argv[2]);
    size_t n, events = 0, lookups = 0, looked = 0, changed = 0;
    struct request *r = read_trace(argv[0], &n);
    need(workers > 0 && workers < PD_INDEX_SLOTS && copies > 0, "WORKERS and COPIES are numbers from 1 on");
    make_ops(r, n, workers, copies, argc > 3 ? (uint32_t)atoi(argv[3]) : 16384);
    mix(workers);
    rebuild(workers);
    rebuild_of_records(workers);
    cap(workers);
    for (size_t i = 0; i < n_ops; i++) {
        *(ops[i].kind == LOOKUP ? &lookups : &events) += 1;
        *(ops[i].kind == LOOKUP ? &looked : &changed) += ops[i].n;
    }
    fprintf(stderr, "bench_index: %zu lookups of %.1f blocks, %zu events of %.1f blocks\n", lookups, (double)looked / (double)lookups, events,
            (double)changed / (double)events);
    return 0;
}

/* What a router pays before it can ask the index at all. */
static int hash(void)
{
    enum { TOKENS = 32768, BLOCK = 16, TIMES = 501 };
    static int32_t ids[TOKENS];
    static hash_t h[TOKENS / BLOCK];
    int64_t t[TIMES];
    for (int i = 0; i < TOKENS; i++)
        ids[i] = i * 7919 % 128000;
    for (int i = 0; i < TIMES; i++) {
        ids[0] = i;
        int64_t a = pd_mono_ns();
        pd_block_hashes(42, ids, TOKENS, BLOCK, (struct pd_str){ NULL, 0 }, (struct pd_str){ NULL, 0 }, h);
        t[i] = pd_mono_ns() - a;
    }
    qsort(t, TIMES, sizeof *t, by_value);
    row("hash.p50", TOKENS / BLOCK, (double)t[TIMES / 2] / 1e3, "us", TIMES);
    row("hash.p99", TOKENS / BLOCK, (double)t[TIMES * 99 / 100] / 1e3, "us", TIMES);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc >= 5 && !strcmp(argv[1], "play"))
        return play(argc - 2, argv + 2);
    need(argc == 2 && !strcmp(argv[1], "hash"), "bench_index play TRACE WORKERS COPIES [BLOCKS], or bench_index hash");
    return hash();
}
