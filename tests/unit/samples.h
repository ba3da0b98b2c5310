/* One record of each kind with every field set, for the tests of wire/ and the golden vectors (testdata/vectors). */
#ifndef PD_TEST_SAMPLES_H
#define PD_TEST_SAMPLES_H
#include <stdio.h>
#include "../../libcommon/wire/kvevent.h"
#include "../../libcommon/wire/record_route.h"
#include "../../libcommon/wire/routing.h"
#include "../../libcommon/wire/transfer.h"

#define RUN_A "01ARZ3NDEKTSV4RRFFQ69G5FAV"
#define STR(s) ((struct pd_str){ s, sizeof(s) - 1 })
#define BIN(s) ((struct pd_bin){ (const uint8_t *)(s), sizeof(s) - 1 })

static struct pd_message sample_messages[] = { { { "system", 6 }, { "Be brief.", 9 }, { 0 } },
    { { "user", 4 }, { "caf\xc3\xa9 \xf0\x9f\x98\x80", 10 }, { (const uint8_t *)"\xa4name\xa3" "Ann", 9, 1 } } };
static struct pd_str sample_stop[] = { { "\n\n", 2 }, { "a\0b", 3 } };
static int32_t sample_stop_ids[] = { 2, 32000 }, sample_ids[] = { 1, 450, 7483, 310, 3444, 338 };
static struct pd_logit_bias sample_bias[] = { { 7, -100 }, { 50256, 0.1f } };
static struct pd_top sample_top[] = { { 3681, -0.0123f }, { 263, -4.75f } };
static struct pd_first sample_first[] = { { 3681, -0.0123f, sample_top, 2 }, { 263, -4.75f, NULL, 0 } };
static float sample_logprobs[] = { -0.0123f, -1e-7f, -88.5f };

static inline struct pd_request sample_request(void)
{
    return (struct pd_request){ .run = RUN_A, .id = BIN("\xa3" "a-1"), .messages = sample_messages, .n_messages = 2, .has = 65535, .max_tokens = 16, .min_tokens = 1,
        .top_k = 40, .n = 2, .logprobs = 1, .top_logprobs = 2, .priority = -1, .temperature = 0.7f, .top_p = 0.95f, .min_p = 0.05f, .presence_penalty = 0.5f,
        .frequency_penalty = -0.25f, .repetition_penalty = 1.1f, .seed = INT64_MAX, .deadline_ms = 30000, .arrival_us = 1234567, .stop = sample_stop, .n_stop = 2,
        .stop_token_ids = sample_stop_ids, .n_stop_token_ids = 2, .logit_bias = sample_bias, .n_logit_bias = 2, .ignore_eos = true, .echo = true,
        .adapter = STR("base"), .cache_salt = STR("tenant-7"), .idempotency_key = STR("k-9"), .cancel_token = BIN("0123456789abcdef"),
        .timeouts_ms = BIN("\x81\xa7prefill\xcd\x03\xe8"), .slo = BIN("\x82\xa7ttft_ms\xcc\xfa\xa7tpot_ms\xcb\x40\x39\0\0\0\0\0\0"),
        .route = BIN("\x81\xa6reason\xa5local"), .extra = { (const uint8_t *)"\xa4user\x81\xa4$b64\xc2", 12, 1 } };
}

/* Its prompt as text, and nothing else: what a person types. */
static inline struct pd_request small_request(void)
{
    return (struct pd_request){ .id = BIN("\x11"), .prompt = STR("The capital of France is"), .has = PD_RQ_MAX_TOKENS | PD_RQ_TEMPERATURE, .max_tokens = 16 };
}

static inline struct pd_kvdesc sample_kv(bool offer)
{
    struct pd_kvdesc d = { .offer = offer, .run = RUN_A, .op = "opopopopopopopo", .gen = { 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 9 }, .epoch = 3,
        .fp_fields = BIN("\x83\xa4" "arch\xa5llama\xaarope_theta\xcb\x40\xc3\x88\0\0\0\0\0\xa6layers\x1e"), .n_tokens = 6, .token_ids = sample_ids,
        .layout = { .layout_hash = 0xfedcba9876543210ull, .block_size = 16, .layers = 30, .kv_heads = 3, .head_dim = 64, .dtype = "f16", .order = "HND" },
        .payload = { .scheme = "inline", .bytes = 737280, .chunk_bytes = 24576, .n_chunks = 30, .chunk_blocks = 1, .codec = "none" },
        .first = sample_first, .n_first = 2, .request = sample_request(), .t = BIN("\x82\xa8queue_us\x0c\xaaprefill_us\xcd\x30\x39"),
        .domain = STR("rack-1"), .worker = STR("p0"), .extra = { (const uint8_t *)"\xa6" "future\x93\x01\xc0\xc3", 11, 1 } };
    pd_sha256(d.fp_fields.p, d.fp_fields.n, d.fp_sha, NULL);
    return d;
}

static inline struct pd_chunk sample_chunk(void)
{
    return (struct pd_chunk){ .run = RUN_A, .gen = { 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 9 }, .index = 5, .layer0 = 5, .layers = 1, .block0 = 0, .blocks = 1,
        .codec = "none", .raw_len = 10, .xxh3 = 0x0011223344556677ull, .data = BIN("0123\0\xff" "6789") };
}

static inline struct pd_token sample_token(void)
{
    return (struct pd_token){ .run = RUN_A, .choice = 1, .pos = 0, .token = 3681, .text = STR(" Paris"), .has_logprob = true, .logprob = -0.0123f, .top = sample_top,
        .n_top = 2, .t_us = 81234 };
}

static inline struct pd_result sample_result(void)
{
    struct pd_result r = { .run = RUN_A, .id = BIN("\xa3" "a-1"), .choice = 1, .text = STR(" Paris. \"\\\x01\x7f\0"), .tokens = sample_ids, .n_tokens = 3, .logprobs = sample_logprobs,
        .prompt_tokens = 6, .completion_tokens = 3, .cached_tokens = 0, .transferred_tokens = 6, .recomputed_tokens = 0, .finish_reason = "length", .mode = "remote",
        .ttft_ms = 81.234, .tpot_ms = 12, .e2e_ms = 105.5, .kv_ms = 0.3, .kv_bytes = 737280, .has_fingerprint = true, .has_gen = true,
        .gen = { 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 9 }, .prefill_worker = STR("p0"), .decode_worker = STR("d0") };
    for (int i = 0; i < PD_SHA_LEN; i++)
        r.fingerprint[i] = (uint8_t)(i * 7);
    return r;
}

static inline struct pd_error_rec sample_error(void)
{
    return (struct pd_error_rec){ .run = RUN_A, .id = BIN("\xcd\x01\x2c"), .class_ = "integrity", .code = 4, .message = STR("chunk 5: checksum differs"), .action = "recompute" };
}

static inline struct pd_event sample_event(void)
{
    return (struct pd_event){ .run = RUN_A, .op = "opopopopopopopo", .parent = "parentparentpar", .has_op = true, .has_parent = true, .state = "kv_published", .role = "prefill",
        .where = "remote", .worker = STR("p0"), .domain = STR("rack-1"), .model_revision = STR("SmolLM2@0123456789ab"),
        .gen = { 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 9 }, .has_gen = true, .bytes = 737280, .t_us = 1700000000000000, .mono_us = 1234567, .cause = STR("asked") };
}

static inline struct pd_event lease_event(void)
{
    return (struct pd_event){ .run = RUN_A, .state = "lease_granted", .role = "prefill", .worker = STR("p0"), .lease = "leaseleaselease", .has_lease = true, .has_gen = true,
        .gen = { 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 9 }, .bytes = 737280, .choice = 1, .pos = 7, .tokens = 3, .t_us = 1700000000000001, .mono_us = 1234568 };
}

#define GEN_A { 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 9 }
static struct pd_payload_run sample_runs[] = { { 0, 393216, 60, 12288 }, { 67108864 + 6144, 393216, 60, 6144 } };
static struct pd_str sample_via[] = { { "shm", 3 }, { "inline", 6 } }, sample_caps[] = { { "in_place", 8 }, { "resume", 6 }, { "held", 4 } };

static inline struct pd_hello sample_hello(void)
{
    struct pd_kvdesc d = sample_kv(true);
    struct pd_hello h = { .conn = "connconnconncon", .version = 1, .version_min = 1, .role = "prefill", .worker = STR("p0"), .domain = STR("rack-1"), .boot = "bootbootbootboo",
        .has_boot = true, .netns = 4026531840, .epoch = 3, .life = { 1, 2, 3, 4, 5, 6, 7, 8 }, .fp_fields = d.fp_fields, .layout = d.layout, .via = sample_via, .n_via = 2,
        .caps = sample_caps, .n_caps = 3, .slab_bytes = 67108864, .slab_blocks = 64 };
    memcpy(h.fp_sha, d.fp_sha, sizeof h.fp_sha);
    return h;
}

static inline struct pd_worker_rec sample_worker(void)
{
    struct pd_kvdesc d = sample_kv(true);
    static struct pd_str adapter[] = { { "base@1", 6 }, { "fine@2", 6 } };
    struct pd_worker_rec w = { .worker = STR("decode@host:17"), .role = "both", .state = "ready", .prefer = "prefill", .model_revision = STR("SmolLM2@0123456789ab"), .numerics = STR("cpu-f32-1"),
        .domain = STR("rack-1"), .fp_fields = d.fp_fields, .layout = d.layout, .parallel = { 1, 2, 3 }, .adapters = adapter, .n_adapters = 2,
        .capacity = { .blocks = 4096, .block_size = 16, .max_seqs = 64, .max_runs = 256, .context = 8192 },
        .load = { .runs = 5, .waiting = 2, .seqs = 7, .blocks_used = 93, .blocks_leased = 12, .prefill_tokens_ahead = 1ull << 40, .kv_tokens = 1481 },
        .via = sample_via, .n_via = 2, .caps = sample_caps, .n_caps = 3, .epoch = 3, .listen = STR("unix:/run/pd/d0"), .life = { 1, 2, 3, 4, 5, 6, 7, 8 }, .has_life = true,
        .boot = "bootbootbootboo", .has_boot = true, .netns = 4026531840, .pid = 17, .threads = 4, .cpu = STR("avx2"), .beat_us = 1000000, .seq = 42,
        .extra = { (const uint8_t *)"\xa6" "future\x93\x01\xc0\xc3", 11, 1 } };
    memcpy(w.fp_sha, d.fp_sha, sizeof w.fp_sha);
    return w;
}

static inline struct pd_routing sample_routing(void)
{
    return (struct pd_routing){ .op = "opopopopopopopo", .policy = STR("fixed"), .mode = "remote", .p = { STR("prefill@host:16"), STR("unix:/run/pd/p0") }, .has_p = true,
        .d = { STR("decode@host:17"), STR("unix:/run/pd/d0") }, .early = true, .extra = { (const uint8_t *)"\xa6" "future\x93\x01\xc0\xc3", 11, 1 } };
}

/* One that goes on elsewhere: what a client has already is in it. */
static inline struct pd_routing resumed_routing(void)
{
    return (struct pd_routing){ .op = "opopopopopopopo", .policy = STR("fixed"), .mode = "local", .d = { STR("decode@host:18"), STR("unix:/run/pd/d1") },
        .fallback = STR("migrated"), .resume = sample_ids, .n_resume = 3, .has_resume = true };
}

/* The small request as a router sends it. */
static inline int routed_encode(const struct pd_routing *r, struct pd_buf *b, struct pd_err *e)
{
    struct pd_request q = small_request();
    struct pd_buf map = { 0 };
    int rc = pd_routing_encode(r, &map, e);
    memcpy(q.run, RUN_A, sizeof q.run);
    q.route = (struct pd_bin){ map.p, map.n };
    rc = rc ? rc : pd_request_encode(&q, b, e);
    pd_buf_free(&map);
    return rc;
}

/* The records of transfer.h, by number: a sample of each. */
enum { N_TRANSFER = 17 };
static inline int transfer_encode(int i, struct pd_buf *b, struct pd_err *e)
{
    struct pd_hello h = sample_hello();
    struct pd_accept ac = { .run = RUN_A, .gen = GEN_A, .mode = "in_place", .have = BIN("\x05\x80\0\x01"), .held = 1 };
    struct pd_done dn = { .run = RUN_A, .gen = GEN_A, .chunk0 = 28, .chunks = 2, .sums = BIN("\0\x11\x22\x33\x44\x55\x66\x77\xff\xee\xdd\xcc\xbb\xaa\x99\x88") };
    struct pd_verified vf = { .run = RUN_A, .gen = GEN_A, .mode = "copy", .bytes = 737280, .verify_us = 57 };
    struct pd_release rl = { .run = RUN_A, .gen = GEN_A, .lease = "leaseleaseleasel", .has_lease = true };
    struct pd_status st = { .run = RUN_A, .gen = GEN_A, .has_gen = true, .state = "released", .lease = "leaseleaseleasel", .has_lease = true, .bytes = 737280, .worker = STR("p0"),
        .cause = STR("asked"), .ledger = BIN("\x81\xa4live\x02"), .extra = { (const uint8_t *)"\xa6" "future\x93\x01\xc0\xc3", 11, 1 } };
    struct pd_cancel cn = { .run = RUN_A, .gen = GEN_A, .has_gen = true, .cancel_token = "0123456789abcdef", .has_token = true, .cause = STR("client gone") };
    struct pd_slab_rec sl = { .what = "slab", .index = 1, .bytes = 67108864 };
    struct pd_carry cy = { .seq = 3, .rec = BIN("\x82\xa2pd\xa6" "future\xa1v\x02") }, last = { .seq = 4, .end = true };
    struct pd_error_rec er = { .run = RUN_A, .gen = GEN_A, .has_gen = true, .class_ = "timeout", .code = 5, .message = STR("generation retired"), .action = "refused" };
    struct pd_kvdesc d = sample_kv(true);
    struct pd_buf lease = { 0 };
    int rc;
    switch (i) {
    case 0: return pd_hello_encode(&h, b, e);
    case 1: return pd_hello_encode(&(struct pd_hello){ .attach = "connconnconncon", .has_attach = true }, b, e);
    case 2: return pd_accept_encode(&ac, b, e);
    case 3: return pd_done_encode(&dn, b, e);
    case 4: return pd_verified_encode(&vf, b, e);
    case 5: return pd_release_encode(&rl, b, e);
    case 6: return pd_status_encode(&st, b, e);
    case 7: return pd_cancel_encode(&cn, b, e);
    case 8: return pd_slab_encode(&sl, b, e);
    case 9: return pd_error_encode(&er, b, e);
    case 11: return pd_carry_encode(&cy, b, e);
    case 12: return pd_carry_encode(&last, b, e);
    case 13:
        h.has_rdma = true;
        h.rdma = (struct pd_rdma_at){ .gid = { [10] = 255, [11] = 255, [12] = 10, [13] = 9, [14] = 1, [15] = 2 }, .lid = 3, .qp = 17, .psn = 0xfedcba, .mtu = 4096 };
        return pd_hello_encode(&h, b, e);
    case 14:
        h.has_rdma = true;
        h.rdma = (struct pd_rdma_at){ .why = STR("rdma: there is no RDMA device here") };
        return pd_hello_encode(&h, b, e);
    case 15:
        strcpy(ac.mode, "copy");
        ac.target = sample_runs;
        ac.n_target = 2;
        ac.tag = 7;
        ac.rkeys = BIN("\1\2\3\4\5\6\7\x80");
        strcpy(ac.via, "inline");
        return pd_accept_encode(&ac, b, e);
    case 16: dn.seq = 9; return pd_done_encode(&dn, b, e);
    default:
        rc = pd_lease_rec_encode(&(struct pd_lease_rec){ .id = "leaseleaseleasel", .owner = STR("prefill@host:17"), .ttl_us = 30000000, .renew_us = 5000000 }, &lease, e);
        d.lease = (struct pd_bin){ lease.p, lease.n };
        strcpy(d.payload.scheme, "shm");
        d.payload.runs = sample_runs;
        d.payload.n_runs = 2;
        rc = rc ? rc : pd_kvdesc_encode(&d, b, e);
        pd_buf_free(&lease);
        return rc;
    }
}

/* One of each op. */
static inline int kvevent_sample_encode(int i, struct pd_buf *b, struct pd_err *e)
{
    static const struct pd_kvevent v[] = {
        { .seq = 7, .op = "stored", .hashes = BIN("0123456789abcdefABCDEFGHIJKLMNOP"), .parent = "parentparentpar", .has_parent = true,
          .token_ids = BIN("\1\0\0\0\2\0\0\0\3\0\0\0\0\x7d\0\0"), .block_size = 2, .tier = "host", .extra = { (const uint8_t *)"\xa6" "future\x93\x01\xc0\xc3", 11, 1 } },
        { .seq = 8, .op = "removed", .hashes = BIN("ABCDEFGHIJKLMNOP"), .tier = "host" },
        { .seq = 9, .op = "cleared" },
        { .seq = 7, .op = "snapshot", .hashes = BIN("0123456789abcdefABCDEFGHIJKLMNOP"), .parents = BIN("\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" "0123456789abcdef"),
          .token_ids = BIN("\1\0\0\0\2\0\0\0\3\0\0\0\0\x7d\0\0"), .block_size = 2, .tier = "host", .part = 1, .parts = 2 } };
    struct pd_kvevent r = v[i];
    memcpy(r.life, "\1\2\3\4\5\6\7\10", sizeof r.life);
    return pd_kvevent_encode(&r, b, e);
}

/* A decision with one of everything, and what came of it. */
static inline int route_sample_encode(struct pd_buf *b, struct pd_err *e)
{
    struct pd_str domains[] = { STR("rackA"), STR("rackB") };
    struct pd_route_fit fit = { .p = 3, .d = 4, .converts = 1 }, unfit = { .p = 5, .d = 4, .why = STR("rope_theta differs (prefill 10000, decode 500000)") };
    struct pd_route_fit fits[] = { fit, unfit };
    struct pd_route_row p[] = { { .worker = STR("p0"), .at = STR("unix:/run/pd/p0"), .epoch = 2, .kin = 3, .hit_blocks = 1, .miss_blocks = 2, .miss_tokens = 24, .tier = STR("host"),
                                  .index = STR("events"), .runs = 1, .runs_most = 31, .queue_runs = 1, .queue_tokens = 16, .given = 9, .load_age_us = 1000, .index_age_us = 20,
                                  .queue = { 900, 700, 0 }, .prefill = { 5000, 4000, PD_SPREAD_COLD }, .cost = 3, .keep = true, .apart = BIN("\1") },
                                { .worker = STR("p1"), .at = STR("tcp:10.0.0.1:7000"), .epoch = 2, .kin = 5, .x = PD_X_FINGERPRINT, .excluded = unfit.why } };
    struct pd_route_row d[] = { { .worker = STR("d0"), .at = STR("unix:/run/pd/d0"), .epoch = 2, .domain = 1, .kin = 4, .miss_blocks = 3, .miss_tokens = 40, .foreign_runs = 2, .runs_most = 31,
                                  .seqs = 2, .seqs_most = 8, .kv_tokens = 300, .blocks = 20, .blocks_most = 1024, .queue = { 0, 0, PD_SPREAD_ALL }, .prefill = { 9000, 7000, 0 },
                                  .interference = { 300, 200, 0 }, .slot = { 20, 10, 0 }, .tpot = { 90, 80, PD_SPREAD_STALE }, .itl_us = 5, .cost = 23, .x_kv = PD_X_NO, .keep = true } };
    struct pd_route_path paths[] = { { .p = -1, .d = -1, .from = 0, .to = 1, .kind = STR("rack"), .latency = { 60, 50, 0 }, .kib_ns = { 900, 800, 0 }, .sync = { 40, 30, 0 },
                                       .overlap_permille = 500, .active = 1, .penalty_us = 2, .age_us = 3000000, .breaker = STR("half_open") },
                                     { .p = 1, .d = 0, .from = -1, .to = -1, .x = PD_X_PATH, .excluded = STR("breaker open 3.2s") } };
    static struct pd_route_rec r;
    r = (struct pd_route_rec){ .run = RUN_A, .op = { 1, 2, 3 }, .t_us = 1796000000000000, .waited_us = 12, .attempt = 2, .resumed = 1, .cause = STR("p2 is gone"),
        .fallback = STR("prefill_worker_gone"), .policy = "threshold:512", .seed = 0x8000000000000001, .temperature = 0.5, .risk = 0.95, .externality = 1,
        .versions = { 7, 8, 9 }, .input = { .n_tokens = 40, .exact = true, .max_tokens = 64, .n = 1, .out_p50 = 32, .out_p95 = 64, .block_size = 16, .kv_bytes = 1024,
        .adapter = STR("lora"), .deadline_us = 2000000, .slo = BIN("\x81\xa7ttft_ms\xcd\x03\xe8"), .digest = { 4, 5 }, .has_digest = true, .early = true }, .epoch = 2,
        .domains = domains, .n_domains = 2, .fits = fits, .n_fits = 2, .p = p, .n_p = 2, .d = d, .n_d = 1, .paths = paths, .n_paths = 2, .left_d[PD_X_STATE] = 3, .lots_p = 2, .lots_d = 1,
        .degraded = PD_DG_APPROXIMATE | PD_DG_COLD, .outcome = PD_CHOSEN, .n_pairs = 2, .chosen = { true, PD_MODE_REMOTE, 0, 0, 1, "block_size" }, .propensity = 0.25,
        .reason = "remote, p0 to d0", .ttft = { 6000, 5000, PD_SPREAD_COLD }, .completion = { 8000, 7000, PD_SPREAD_ALL },
        .shadow = { .policy = "aggregated", .chosen = { true, PD_MODE_LOCAL, -1, 0, 0, "" }, .score = 23 } };
    r.pair[0] = (struct pd_route_pair){ .p = -1, .d = 0, .path = -1, .ttft = { 9100, 7200, 0 }, .completion = { 12000, 9700, 0 }, .itl_us = 14000, .capacity_us = 3, .score = PD_SCORE_NONE };
    r.pair[1] = (struct pd_route_pair){ .p = 0, .d = 0, .path = 0, .bytes = 40960, .transfer = { 96, 82, 0 }, .ttft = r.ttft, .completion = r.completion, .overlap_us = 82, .itl_us = 320,
                                        .queue_us = 4000, .link_us = 82, .score = 3 };
    return pd_route_encode(&r, b, e);
}

static inline struct pd_outcome_rec sample_outcome(void)
{
    return (struct pd_outcome_rec){ .run = RUN_A, .op = { 1, 2, 3 }, .t_us = 1796000000100000, .attempt = 2, .policy = "threshold:512", .mode = "remote", .finish_reason = "stop",
        .fallback = STR("prefill_worker_gone"), .p = STR("p0"), .d = STR("d0"), .prompt_tokens = 40, .cached_tokens = 16, .transferred_tokens = 24, .completion_tokens = 30, .cached_expected = 16, .p_cached_tokens = 32,
        .kv_bytes = 24576, .waited_us = 12, .has = PD_OC_P_CACHED | PD_OC_QUEUE | PD_OC_PREFILL | PD_OC_TRANSFER | PD_OC_TTFT | PD_OC_TPOT | PD_OC_COMPLETION, .queue_us = 650,
        .prefill_us = 4100, .transfer_us = 0, .ttft_us = 5100, .tpot_us = 81, .completion_us = 7449 };
}

enum { N_RECORD = 21, N_SAMPLES = N_RECORD + N_TRANSFER };
static const char *const sample_name[N_SAMPLES] = { "request", "request-small", "offer", "kv", "chunk", "token", "result", "result-failed", "error", "event", "kv-prefill-only", "event-lease",
    "worker", "request-routed", "request-resumed", "kvevent-stored", "kvevent-removed", "kvevent-cleared", "kvevent-snapshot",
    "route", "outcome",
    "hello", "hello-attach", "accept", "done", "verified", "release", "status", "cancel", "slab", "error-refused", "offer-shm", "carry", "carry-end",
    "hello-rdma", "hello-no-rdma", "accept-rdma", "done-rdma" };

/* The i-th sample, encoded. */
static inline int sample_encode(int i, struct pd_buf *b, struct pd_err *e)
{
    struct pd_request rq = sample_request(), small = small_request();
    struct pd_kvdesc offer = sample_kv(true), kv = sample_kv(false), bare = sample_kv(false);
    struct pd_chunk c = sample_chunk();
    struct pd_token t = sample_token();
    struct pd_result r = sample_result(), failed = { .run = RUN_A, .text = STR(""), .finish_reason = "error", .fallback = STR("checksum"), .ttft_ms = -1, .tpot_ms = -1, .e2e_ms = -1, .kv_ms = -1 };
    struct pd_error_rec er = sample_error();
    struct pd_event ev = sample_event(), lease = lease_event();
    struct pd_worker_rec wk = sample_worker();
    struct pd_outcome_rec oc = sample_outcome();
    struct pd_routing routed = sample_routing(), resumed = resumed_routing();
    bare.payload = (struct pd_payload){ 0 };
    bare.request = small_request();
    bare.domain = bare.worker = (struct pd_str){ 0 };
    bare.extra = (struct pd_extra){ 0 };
    bare.lease = BIN("\x81\xa6ttl_us\xce\x01\xc9\xc3\x80");
    int rc;
    if (i >= N_RECORD)
        return transfer_encode(i - N_RECORD, b, e);
    switch (i) {
    case 0: return pd_request_encode(&rq, b, e);
    case 1: return pd_request_encode(&small, b, e);
    case 2: return pd_kvdesc_encode(&offer, b, e);
    case 3: return pd_kvdesc_encode(&kv, b, e);
    case 4: return (rc = pd_chunk_encode_head(&c, b, e)) ? rc : pd_buf_add(b, c.data.p, c.data.n, e);
    case 5: return pd_token_encode(&t, b, e);
    case 6: return pd_result_encode(&r, b, e);
    case 7: return pd_result_encode(&failed, b, e);
    case 8: return pd_error_encode(&er, b, e);
    case 9: return pd_event_encode(&ev, b, e);
    case 11: return pd_event_encode(&lease, b, e);
    case 12: return pd_worker_rec_encode(&wk, b, e);
    case 13: return routed_encode(&routed, b, e);
    case 14: return routed_encode(&resumed, b, e);
    case 15: case 16: case 17: case 18: return kvevent_sample_encode(i - 15, b, e);
    case 19: return route_sample_encode(b, e);
    case 20: return pd_outcome_encode(&oc, b, e);
    default: return pd_kvdesc_encode(&bare, b, e);
    }
}

/* Decode any record by its kind and encode it again. 1: a kind without a decoder. */
static inline int reencode(const void *rec, size_t n, struct pd_buf *b, struct pd_err *e)
{
    struct pd_arena a = { 0 };
    struct pd_request rq;
    struct pd_kvdesc d;
    struct pd_chunk c;
    struct pd_token t;
    struct pd_result r;
    struct pd_error_rec er;
    struct pd_event ev;
    struct pd_worker_rec wk;
    struct pd_outcome_rec oc;
    struct pd_route_rec *route;
    union { struct pd_hello hello; struct pd_accept accept; struct pd_done done; struct pd_verified verified; struct pd_release release; struct pd_status status;
            struct pd_cancel cancel; struct pd_slab_rec slab; struct pd_kvevent kvevent; struct pd_carry carry; } x;
    int rc;
#define BOTH(name) rc = pd_##name##_decode(rec, n, &a, &x.name, e); rc = rc ? rc : pd_##name##_encode(&x.name, b, e); break
    switch (pd_kind_of(rec, n)) {
    case PD_K_HELLO: BOTH(hello);
    case PD_K_ACCEPT: BOTH(accept);
    case PD_K_DONE: BOTH(done);
    case PD_K_VERIFIED: BOTH(verified);
    case PD_K_RELEASE: BOTH(release);
    case PD_K_STATUS: BOTH(status);
    case PD_K_CANCEL: BOTH(cancel);
    case PD_K_SLAB: BOTH(slab);
    case PD_K_KVEVENT: BOTH(kvevent);
    case PD_K_CARRY: rc = pd_carry_decode(rec, n, &x.carry, e); rc = rc ? rc : pd_carry_encode(&x.carry, b, e); break;
    case PD_K_REQUEST: rc = pd_request_decode(rec, n, &a, &rq, e); rc = rc ? rc : pd_request_encode(&rq, b, e); break;
    case PD_K_OFFER: case PD_K_KV: rc = pd_kvdesc_decode(rec, n, &a, &d, e); rc = rc ? rc : pd_kvdesc_encode(&d, b, e); break;
    case PD_K_CHUNK:
        rc = pd_chunk_decode(rec, n, &c, e);
        rc = rc ? rc : pd_chunk_encode_head(&c, b, e);
        rc = rc ? rc : pd_buf_add(b, c.data.p, c.data.n, e);
        break;
    case PD_K_TOKEN: rc = pd_token_decode(rec, n, &a, &t, e); rc = rc ? rc : pd_token_encode(&t, b, e); break;
    case PD_K_RESULT: rc = pd_result_decode(rec, n, &a, &r, e); rc = rc ? rc : pd_result_encode(&r, b, e); break;
    case PD_K_ERROR: rc = pd_error_decode(rec, n, &a, &er, e); rc = rc ? rc : pd_error_encode(&er, b, e); break;
    case PD_K_EVENT: rc = pd_event_decode(rec, n, &a, &ev, e); rc = rc ? rc : pd_event_encode(&ev, b, e); break;
    case PD_K_WORKER: rc = pd_worker_rec_decode(rec, n, &a, &wk, e); rc = rc ? rc : pd_worker_rec_encode(&wk, b, e); break;
    case PD_K_OUTCOME: rc = pd_outcome_decode(rec, n, &a, &oc, e); rc = rc ? rc : pd_outcome_encode(&oc, b, e); break;
    case PD_K_ROUTE:
        rc = (route = pd_arena_alloc(&a, 1, sizeof *route, e)) ? pd_route_decode(rec, n, &a, route, e) : PD_ENOMEM;
        rc = rc ? rc : pd_route_encode(route, b, e);
        break;
    default: rc = 1;
    }
    pd_arena_free(&a);
    return rc;
}
#endif
