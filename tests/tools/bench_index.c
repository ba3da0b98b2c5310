/* How fast the router's prefix index is: `bench_index TRACE WORKERS COPIES [BLOCKS]` makes the events and lookups of a cluster out of a trace (JSON Lines with
 * hash_ids, one for 512 tokens), then plays them and prints JSON rows on standard output.
 *
 * The trace is played COPIES times side by side, each with blocks of its own. A request looks up its chain and goes to the worker that holds most of it, among
 * equals (or when that one has been given many more than its share) to a random one; that worker stores what it lacks and evicts what it used longest ago,
 * chains from their tails, so that it holds at most BLOCKS (16384). Events are one record each, as workers send them: `stored` of a chain, `removed`. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/base/hash.h"
#include "../../libcommon/route/index.h"

typedef uint8_t hash_t[16];
enum kind { LOOKUP, STORED, REMOVED };
struct op { enum kind kind; uint16_t worker; uint32_t n; size_t at; };
struct request { uint32_t *id, n; };
/* A worker's blocks, by last use. */
struct kept { uint64_t key; struct kept *newer, *older, *next; };
struct worker { struct kept *oldest, *newest, **bucket; uint32_t n; uint64_t given; };
enum { BUCKETS = 1 << 12 };

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

static struct pd_index *cluster(uint32_t workers)
{
    struct pd_index *x;
    uint16_t s;
    need(pd_index_new(&(struct pd_index_opts){ .max_bytes = (size_t)2 << 30, .seed = 1 }, &x, &e) == 0, e.msg);
    for (uint32_t i = 0; i < workers; i++)
        need(pd_index_join(x, &s, &e) == 0, e.msg);
    return x;
}

int main(int argc, char **argv)
{
    need(argc >= 4, "bench_index TRACE WORKERS COPIES [BLOCKS]");
    uint32_t workers = (uint32_t)atoi(argv[2]), copies = (uint32_t)atoi(argv[3]), hits;
    size_t n, lookups = 0, looked = 0, changed = 0, events = 0;
    struct request *r = read_trace(argv[1], &n);
    make_ops(r, n, workers, copies, argc > 4 ? (uint32_t)atoi(argv[4]) : 16384);

    /* All of it in its order, without a clock in between. */
    struct pd_index *x = cluster(workers);
    int64_t t0 = pd_mono_ns();
    for (size_t i = 0; i < n_ops; i++) {
        const struct op *o = &ops[i];
        const hash_t *h = (const hash_t *)blocks + o->at;
        if (o->kind == LOOKUP)
            pd_index_match(x, h, o->n, &hits);
        else if (o->kind == STORED)
            need(pd_index_stored(x, o->worker, h, o->n, &e) == 0, e.msg);
        else
            pd_index_removed(x, o->worker, h, o->n);
    }
    double s = (double)(pd_mono_ns() - t0) / 1e9;
    for (size_t i = 0; i < n_ops; i++) {
        *(ops[i].kind == LOOKUP ? &lookups : &events) += 1;
        *(ops[i].kind == LOOKUP ? &looked : &changed) += ops[i].n;
    }
    struct pd_index_stats st = pd_index_stats(x);
    row("index.ops", workers, (double)n_ops / s, "1/s", n_ops);
    row("index.blocks", workers, (double)(looked + changed) / s, "blocks/s", looked + changed);
    row("index.bytes_a_block", workers, (double)st.bytes / (double)st.blocks, "B", st.blocks);

    /* The lookups alone, on what is there at the end. */
    int64_t *t = malloc((lookups + 1) * sizeof *t);
    size_t k = 0;
    need(t != NULL, "out of memory");
    for (size_t i = 0; i < n_ops; i++)
        if (ops[i].kind == LOOKUP) {
            int64_t a = pd_mono_ns();
            pd_index_match(x, (const hash_t *)blocks + ops[i].at, ops[i].n, &hits);
            t[k++] = pd_mono_ns() - a;
        }
    qsort(t, k, sizeof *t, by_value);
    row("index.lookup_p50", workers, (double)t[k / 2] / 1e3, "us", k);
    row("index.lookup_p99", workers, (double)t[k * 99 / 100] / 1e3, "us", k);
    row("index.lookup_p99.9", workers, (double)t[k * 999 / 1000] / 1e3, "us", k);
    pd_index_free(x);

    /* From nothing: 2.3 million blocks in the events that stored them. */
    x = cluster(workers);
    size_t fed = 0, in = 0;
    t0 = pd_mono_ns();
    for (size_t i = 0; i < n_ops && in < 2300000; i++)
        if (ops[i].kind == STORED) {
            need(pd_index_stored(x, ops[i].worker, (const hash_t *)blocks + ops[i].at, ops[i].n, &e) == 0, e.msg);
            in += ops[i].n;
            fed++;
        }
    s = (double)(pd_mono_ns() - t0) / 1e9;
    if (in >= 2300000)
        row("index.rebuild", workers, s, "s", in);
    pd_index_free(x);
    fprintf(stderr, "bench_index: %zu lookups of %.1f blocks, %zu events of %.1f blocks, rebuilt from %zu events\n", lookups, (double)looked / (double)lookups, events,
            (double)changed / (double)events, fed);
    return 0;
}
