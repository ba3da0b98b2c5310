/* A request, workers and paths whose costs can be added up by hand: what the tests of decisions begin with. */
#ifndef ROUTE_SCENE_H
#define ROUTE_SCENE_H
#include <stdio.h>
#include <string.h>
#include "../../libcommon/route/choose.h"

#define MS 1000
#define S(text) { text, sizeof text - 1 }
static inline struct pd_spread about(int64_t us) { return (struct pd_spread){ us + us / 4, us, 0 }; }

static struct pd_route_rec r;
static struct pd_route_row p[3], d[3];
static struct pd_route_path path[4];
static struct pd_route_fit fit[2];
static struct pd_str domain[2] = { S("rackA"), S("rackB") };

/* A prompt of 2,000 tokens whose prefill takes a second, two P and two D, all idle, that hold nothing; KV of 2,000 tokens goes over in 60 ms; 20 ms a token. */
static inline void scene(const char *policy)
{
    static const struct pd_str names[] = { S("p0"), S("p1"), S("p2"), S("d0"), S("d1"), S("d2") };
    memset(&r, 0, sizeof r);
    r = (struct pd_route_rec){ .run = "01M8PAW1CACQM7WS4V0NE4983X", .seed = 7, .risk = 0.95, .externality = 1, .p = p, .d = d, .n_p = 2, .n_d = 2, .paths = path,
                               .n_paths = 1, .fits = fit, .domains = domain, .n_domains = 2,
                               .input = { .n_tokens = 2000, .exact = true, .max_tokens = 64, .n = 1, .out_p50 = 32, .out_p95 = 64, .block_size = 16, .kv_bytes = 1024 } };
    snprintf(r.policy, sizeof r.policy, "%s", policy);
    for (int i = 0; i < 3; i++) {
        p[i] = (struct pd_route_row){ .worker = names[i], .at = names[i], .miss_blocks = 125, .miss_tokens = 2000, .prefill = about(1000 * MS), .runs_most = 8 };
        d[i] = (struct pd_route_row){ .worker = names[3 + i], .at = names[3 + i], .miss_blocks = 125, .miss_tokens = 2000, .prefill = about(1000 * MS), .tpot = about(20 * MS),
                                      .itl_us = 100, .seqs_most = 8, .blocks_most = 1000, .runs_most = 8 };
    }
    path[0] = (struct pd_route_path){ -1, -1, -1, -1, .latency = about(10 * MS), .kib_ns = about(25000), .sync = about(5 * MS) };        /* 2,000 KiB: 50 ms */
}

static inline void holds(struct pd_route_row *w, uint32_t blocks)
{
    w->hit_blocks = blocks;
    w->miss_blocks = 125 - blocks;
    w->miss_tokens = 2000 - 16 * blocks;
    w->prefill = about(1000 * MS * (int64_t)w->miss_tokens / 2000);
}

static inline void busy(struct pd_route_row *w, uint32_t seqs)
{
    w->seqs = seqs;
    w->interference = about(20 * MS * (int64_t)seqs);
    w->tpot = about(20 * MS + MS * (int64_t)seqs);
    w->blocks = 50 * seqs;
}

static inline void queued(struct pd_route_row *w, uint32_t runs)
{
    w->queue_runs = runs;
    w->queue_tokens = 2000 * runs;
    w->queue = about(1000 * MS * (int64_t)runs);
}
#endif
