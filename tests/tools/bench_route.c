/* How long a decision takes: `bench_route` prints JSON rows on standard output.
 *
 * 64 and 1,000 workers, half of them prefill and half decode, in four domains, with what was learnt of them, loads of all kinds and an index of what each holds of
 * a prompt of 32,768 tokens (2,048 blocks): half of them nothing, the others one of eight beginnings. `decide` is everything between a request whose blocks are hashed and the choice: index, rows, costs, ways; `hashed` is
 * that with the hashing before it, `hash` the hashing alone, turn by turn. Best of five rounds. */
#include <stdio.h>
#include <stdlib.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/base/hash.h"
#include "../../libcommon/kv/prefix.h"
#include "../../libcommon/route/decide.h"
#include "../../libcommon/route/index.h"
#include "../../libcommon/route/price.h"
#include "../../libcommon/wire/pack.h"

enum { TOKENS = 32768, BLOCK = 16, BLOCKS = TOKENS / BLOCK, MOST = 1000, TIMES = 1001, ROUNDS = 5 };
static struct pd_registry reg;
static struct pd_decision dec;
static struct pd_learn learnt;
static struct pd_member *member[MOST];
static uint16_t slot[MOST];
static struct pd_err e;

static void need(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "bench_route: %s: %s\n", what, e.msg);
        exit(1);
    }
}

static uint64_t state = 1;
static uint32_t any(uint32_t n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 33) % n);
}

static struct pd_str str(const char *s) { return (struct pd_str){ s, strlen(s) }; }

static void add(int i)
{
    struct pd_buf fp = { 0 }, b = { 0 };
    struct pd_packer k;
    char name[64], at[64], domain[16];
    bool fresh;
    snprintf(name, sizeof name, "%s@host-%d:4711", i & 1 ? "decode" : "prefill", i);
    snprintf(at, sizeof at, "tcp:10.0.%d.%d:7000", i / 250, i % 250);
    snprintf(domain, sizeof domain, "rack%d", i % 4);
    pd_pack_init(&k, &fp, &e);
    msgpack_pack_map(&k.pk, 1);
    pd_pack_text(&k, "arch");
    pd_pack_text(&k, "llama");
    struct pd_worker_rec r = { .worker = str(name), .model_revision = str("m@0123456789ab"), .numerics = str("x"), .domain = str(domain), .fp_fields = { fp.p, fp.n },
        .parallel = { 1, 1, 1 }, .capacity = { 20000, BLOCK, 64, 256, 65536 }, .listen = str(at), .beat_us = 500000, .threads = 8,
        .load = { .runs = any(20), .seqs = any(20), .waiting = any(3), .prefill_tokens_ahead = any(9000), .kv_tokens = any(100000) },
        .layout = { .block_size = BLOCK, .layers = 32, .kv_heads = 8, .head_dim = 128, .dtype = "f16", .order = "HND" } };
    snprintf(r.role, sizeof r.role, "%s", i & 1 ? "decode" : "prefill");
    strcpy(r.state, "ready");
    need(pd_sha256(fp.p, fp.n, r.fp_sha, &e) == 0 && pd_worker_rec_encode(&r, &b, &e) == 0 && pd_registry_add(&reg, at, &member[i], &e) == 0 &&
         pd_registry_said(&reg, member[i], b.p, b.n, 1000, &fresh, &e) == 0, "a worker");
    member[i]->reachable = true;
    member[i]->user = &slot[i];
    struct pd_need q = { .prompt_tokens = 100 + any(4000), .max_tokens = 200, .n = 1 };
    for (uint32_t runs = any(6); runs; runs--)
        pd_member_take(member[i], pd_share_of(&q, member[i], !(i & 1), i & 1));
    pd_buf_free(&fp);
    pd_buf_free(&b);
}

/* A class and the paths as they are after a while. */
static void teach(int n)
{
    uint32_t cls, path;
    need(pd_learn_class_of(&learnt, &member[0]->said, &cls, &e) == 0, "a class");
    for (int i = 0; i < 300; i++) {
        uint32_t tokens = 1 + any(8000), seqs = 1 + any(20), kv = any(90000);
        pd_learned_prefill(&learnt, cls, tokens, any(4000), 2000 + 100 * (int64_t)tokens + any(3000), 1000);
        pd_learned_tpot(&learnt, cls, seqs, kv, 15000 + 300 * (int64_t)seqs + any(2000), 1000);
        pd_learned_interference(&learnt, cls, tokens, seqs, kv, 20 * (int64_t)tokens + any(900), 1000);
        pd_learned_queue(&learnt, cls, (struct pd_ahead){ any(5), any(20000), seqs, kv }, 500 + any(900000), 1000);
    }
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++) {
            char from[16], to[16];
            snprintf(from, sizeof from, "rack%d", a);
            snprintf(to, sizeof to, "rack%d", b);
            need(pd_learn_path_of(&learnt, str(from), str(to), NULL, &path, &e) == 0, "a path");
            for (int i = 0; i < 60; i++)
                pd_learned_transfer(&learnt, path, 1000000 + any(400000000), any(3), 3000 + any(80000), 900 + any(900), 1000);
        }
    (void)n;
}

static int by_value(const void *a, const void *b) { return *(const int64_t *)a < *(const int64_t *)b ? -1 : *(const int64_t *)a > *(const int64_t *)b; }
static void row(const char *name, int n, double v, const char *unit, int count) { printf("{\"name\":\"%s.%d\",\"value\":%.6g,\"unit\":\"%s\",\"n\":%d}\n", name, n, v, unit, count); }

static void hits(struct pd_index *x, const uint8_t (*h)[16], int workers)
{
    uint32_t n = 0;
    const struct pd_hit *hit = pd_index_match(x, h, BLOCKS, &n);
    static uint32_t of[65536];
    for (uint32_t i = 0; i < n; i++)
        of[hit[i].slot] = hit[i].blocks;
    for (int i = 0; i < workers; i++) {
        member[i]->held = (struct pd_held){ of[slot[i]], PD_HELD_EVENTS, 1000 };
        of[slot[i]] = 0;
    }
}

static void measure(int workers)
{
    static int32_t ids[TOKENS];
    static uint8_t h[BLOCKS][16];
    static int64_t t[3][TIMES];
    double best[3][2] = { { 1e18, 1e18 }, { 1e18, 1e18 }, { 1e18, 1e18 } };
    struct pd_index *x;
    need(pd_index_new(&(struct pd_index_opts){ .seed = 5 }, &x, &e) == 0, "an index");
    for (int i = 0; i < workers; i++)
        add(i);
    teach(workers);
    for (int i = 0; i < TOKENS; i++)
        ids[i] = i * 7919 % 128000;
    pd_block_hashes(42, ids, TOKENS, BLOCK, (struct pd_str){ NULL, 0 }, (struct pd_str){ NULL, 0 }, h);
    for (int i = 0; i < workers; i++)
        need(pd_index_join(x, &slot[i], &e) == 0 && (any(2) || pd_index_stored(x, slot[i], (const uint8_t (*)[16])h, 1 + any(8) * (BLOCKS / 8), &e) == 0), "blocks");
    struct pd_need q = { .policy = PD_POLICY_CONDITIONAL, .learn = &learnt, .now_us = 2000, .suspect_us = 3000000, .prompt_tokens = TOKENS, .exact = true, .max_tokens = 256,
                         .n = 1, .like = -1, .quiet = true };
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < TIMES; i++) {
            q.seed = (uint64_t)i;
            int64_t a = pd_mono_ns();
            pd_block_hashes(42, ids, TOKENS, BLOCK, (struct pd_str){ NULL, 0 }, (struct pd_str){ NULL, 0 }, h);
            int64_t b = pd_mono_ns();
            hits(x, (const uint8_t (*)[16])h, workers);
            pd_decide(&reg, &q, &dec);
            int64_t c = pd_mono_ns();
            need(dec.outcome == PD_CHOSEN, "nobody was chosen");
            t[0][i] = b - a;
            t[2][i] = c - a;
        }
        for (int i = 0; i < TIMES; i++) {
            int64_t a = pd_mono_ns();
            hits(x, (const uint8_t (*)[16])h, workers);
            pd_decide(&reg, &q, &dec);
            t[1][i] = pd_mono_ns() - a;
        }
        for (int k = 0; k < 3; k++) {
            qsort(t[k], TIMES, sizeof **t, by_value);
            double v[] = { (double)t[k][TIMES / 2] / 1e3, (double)t[k][TIMES * 99 / 100] / 1e3 };
            for (int m = 0; m < 2; m++)
                best[k][m] = v[m] < best[k][m] ? v[m] : best[k][m];
        }
    }
    row("decide.p50", workers, best[1][0], "us", TIMES);
    row("decide.p99", workers, best[1][1], "us", TIMES);
    row("decide.hash", workers, best[0][0], "us", TIMES);
    row("decide.hashed", workers, best[2][0], "us", TIMES);
    row("decide.hashed_of_hash", workers, best[2][0] / best[0][0], "", TIMES);
    struct pd_buf b = { 0 };
    static const uint8_t op[16];
    q.quiet = false;
    pd_decide(&reg, &q, &dec);
    need(pd_decision_encode(&dec, &(struct pd_route_note){ .run = "01M8PAW1CACQM7WS4V0NE4983X", .op = op, .attempt = 1 }, &b, &e) == 0, "its record");
    row("decide.record", workers, (double)b.n, "bytes", 1);
    pd_buf_free(&b);
    pd_index_free(x);
    pd_registry_free(&reg);
    pd_learn_free(&learnt);
}

int main(void)
{
    measure(64);
    measure(MOST);
    return 0;
}
