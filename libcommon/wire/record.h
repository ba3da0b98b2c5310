/* The records that pass between commands: one struct and one encode/decode pair a kind (pd-wire.5).
 *
 * A decoded struct points into its arena, never into the input buffer, so it outlives the stream's buffer; free the arena to free it all.
 * Encoders append one msgpack map to a pd_buf: key "pd" (the kind) first, then "v" (1). Decoders take keys in any order, keep what they do
 * not know in `extra` (raw msgpack key/value pairs) where the struct has one, and check every type, range and length: input is hostile.
 * A decode error names the field and the value. Identifiers and hashes of more than 53 bits are bin.
 */
#ifndef PD_WIRE_RECORD_H
#define PD_WIRE_RECORD_H

#include "../base/hash.h"
#include "../base/id.h"
#include "../base/mem.h"

enum pd_kind { PD_K_UNKNOWN, PD_K_REQUEST, PD_K_OFFER, PD_K_KV, PD_K_CHUNK, PD_K_TOKEN, PD_K_RESULT, PD_K_ERROR, PD_K_EVENT, PD_K_WORKER, PD_K_ROUTE,
               PD_K_HELLO, PD_K_ACCEPT, PD_K_DONE, PD_K_VERIFIED, PD_K_RELEASE, PD_K_STATUS, PD_K_CANCEL, PD_K_SLAB /* from PD_K_HELLO on: transfer.h */,
               PD_K_KVEVENT /* kvevent.h */, PD_K_CARRY /* transfer.h */, PD_K_OUTCOME /* record_route.h, as PD_K_ROUTE */ };
const char *pd_kind_name(enum pd_kind k);
/* Of a framed map, by its key `pd`: PD_K_REQUEST without one, PD_K_UNKNOWN for a name that this build does not know (pass it through). */
enum pd_kind pd_kind_of(const void *rec, size_t n);

/* Raw msgpack key/value pairs that follow one another, kept as they came. */
struct pd_extra { const uint8_t *p; size_t n; uint32_t pairs; };

/* A cost that is expected: a list of p50, p95 and, if any, marks. */
enum { PD_SPREAD_COLD = 1, PD_SPREAD_STALE = 2, PD_SPREAD_ALL = 3 };
#define PD_SPREAD_MOST 4000000000000  /* 46 days in us */
struct pd_spread { int64_t p95, p50; uint32_t marks; };

struct pd_message { struct pd_str role, content; struct pd_extra extra; };
struct pd_logit_bias { int32_t token; float bias; };

/* `request`. Absent numbers hold the defaults after pd_request_resolve; before it `has` tells which came. */
struct pd_request {
    char run[PD_RUN_LEN + 1];           /* "" until the first command that reads it makes one */
    struct pd_bin id;                   /* the caller's own, as raw msgpack (string or integer); absent: p NULL */
    struct pd_str prompt;
    struct pd_message *messages; uint32_t n_messages;
    int32_t *token_ids; uint32_t n_token_ids; bool has_token_ids;
    uint32_t has;                       /* PD_RQ_* of the fields below that were given */
    int32_t max_tokens, min_tokens, top_k, n, logprobs /* bool or count -> 0/1 */, top_logprobs, priority;
    float temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty;
    int64_t seed, deadline_ms, arrival_us;
    struct pd_str *stop; uint32_t n_stop;
    int32_t *stop_token_ids; uint32_t n_stop_token_ids;
    struct pd_logit_bias *logit_bias; uint32_t n_logit_bias;
    bool ignore_eos, echo;
    struct pd_str adapter, cache_salt, idempotency_key;
    struct pd_bin cancel_token;
    struct pd_bin timeouts_ms, slo, route;      /* raw msgpack maps, carried */
    struct pd_extra extra;
};
enum { PD_RQ_MAX_TOKENS = 1, PD_RQ_MIN_TOKENS = 2, PD_RQ_TOP_K = 4, PD_RQ_N = 8, PD_RQ_LOGPROBS = 16, PD_RQ_TOP_LOGPROBS = 32, PD_RQ_PRIORITY = 64,
       PD_RQ_TEMPERATURE = 128, PD_RQ_TOP_P = 256, PD_RQ_MIN_P = 512, PD_RQ_PRESENCE = 1024, PD_RQ_FREQUENCY = 2048, PD_RQ_REPETITION = 4096,
       PD_RQ_SEED = 8192, PD_RQ_DEADLINE = 16384, PD_RQ_ARRIVAL = 32768 };
/* Fill defaults (max_tokens 256, temperature 1, top_p 1, top_k 0, min_p 0, penalties neutral, n 1, seed = default_seed), make `run` if absent,
 * and refuse absurd values by name (PD_EFAIL): top_p outside (0,1], temperature < 0 or not finite, n < 1 or > 128, max_tokens < 1, ... */
int pd_request_resolve(struct pd_request *r, int64_t default_seed, struct pd_err *e);
/* Its priority, 100 at the most either way. */
static inline int64_t pd_request_steps(const struct pd_request *r)
{
    return !(r->has & PD_RQ_PRIORITY) ? 0 : r->priority > 100 ? 100 : r->priority < -100 ? -100 : r->priority;
}
/* timeouts_ms, in us; 0: none. queue: from acceptance until its prompt is begun; prefill: from there to the first token; transfer: of its KV; first_token: from
 * acceptance. PD_EFAIL names a value that is no time. */
struct pd_timeouts { int64_t queue, prefill, transfer, first_token; };
int pd_timeouts_read(const struct pd_request *r, struct pd_timeouts *t, struct pd_err *e);

struct pd_top { int32_t token; float logprob; };
struct pd_first { int32_t token; float logprob; struct pd_top *top; uint32_t n_top; };    /* one a choice */

struct pd_kv_layout {
    uint64_t layout_hash;               /* 64 bits over the layout fields */
    uint32_t block_size, layers, kv_heads, head_dim;
    char dtype[8], order[8];            /* "f16" "f32" "bf16"; "HND" */
};

/* Where the parts of neighbouring blocks lie in memory that the peer has mapped: `count` parts (layer 0's K, its V, layer 1's K, ...) of `len` bytes each,
 * the first at `base`, each `stride` bytes after the one before. */
struct pd_payload_run { uint64_t base, stride; uint32_t count; uint64_t len; };

struct pd_payload {                     /* scheme "" : no payload (null) */
    char scheme[12];                    /* "inline", "shm", "h5" */
    struct pd_str where;
    uint64_t bytes, chunk_bytes;        /* all payload bytes, decoded; the largest chunk */
    uint32_t n_chunks, chunk_blocks;    /* blocks a chunk (the last range may have fewer); one layer each */
    char codec[8];                      /* "none" */
    struct pd_payload_run *runs; uint32_t n_runs;       /* shm only */
};

/* `offer` and `kv`: the KV descriptor (../kv). An offer is the same less first, totals and times.
 * fp_fields is the fingerprint's canonical msgpack map, raw; fp_sha is the SHA-256 over it. */
struct pd_kvdesc {
    bool offer;
    char run[PD_RUN_LEN + 1];
    uint8_t op[16], gen[PD_GEN_LEN];
    uint64_t epoch;
    uint8_t fp_sha[PD_SHA_LEN]; struct pd_bin fp_fields;
    uint32_t n_tokens; const int32_t *token_ids;        /* prompt ids; KV exists for all n_tokens of them */
    struct pd_kv_layout layout;
    struct pd_bin lease;                /* raw map, absent = null */
    struct pd_payload payload;
    struct pd_first *first; uint32_t n_first;
    struct pd_request request;          /* resolved; its prompt text is carried, its token_ids are not repeated (encoder omits them) */
    struct pd_bin t;                    /* raw map of stage durations in us, absent = null */
    struct pd_str domain, worker;
    struct pd_extra extra;
};

/* `chunk`: one layer of a range of blocks. data: K of the blocks in order, then V; each block [kv_heads, block_size, head_dim], little-endian. */
struct pd_chunk {
    char run[PD_RUN_LEN + 1];
    uint8_t gen[PD_GEN_LEN];
    uint32_t index, layer0, layers, block0, blocks;
    char codec[8];
    uint64_t raw_len, xxh3;
    struct pd_bin data;                 /* points into the stream's buffer: the one exception, so that a megabyte is not copied */
};

struct pd_token {
    char run[PD_RUN_LEN + 1];
    uint32_t choice; int32_t pos, token;        /* pos: 0 is the first generated token */
    struct pd_str text;
    bool has_logprob; float logprob; struct pd_top *top; uint32_t n_top;
    int64_t t_us;                       /* since the stream's start */
};

struct pd_result {
    char run[PD_RUN_LEN + 1];
    struct pd_bin id;
    uint32_t choice;
    struct pd_str text; const int32_t *tokens; uint32_t n_tokens;
    const float *logprobs;              /* [n_tokens] or NULL */
    uint32_t n_logprobs;                /* the decoder's count, which it has held against n_tokens */
    uint32_t prompt_tokens, completion_tokens, cached_tokens, transferred_tokens, recomputed_tokens;
    char finish_reason[12], mode[12];
    struct pd_str fallback;             /* absent = null */
    char converted[24];                 /* "block_size,order": what its KV was converted in; "": nothing */
    double ttft_ms, tpot_ms, e2e_ms, kv_ms;      /* < 0: null, there is none */
    uint64_t kv_bytes;
    uint8_t fingerprint[PD_SHA_LEN]; bool has_fingerprint;
    uint8_t gen[PD_GEN_LEN]; bool has_gen;
    struct pd_str prefill_worker, decode_worker;
    struct pd_bin t;                    /* raw map of stage durations in us, absent: not told */
    struct pd_extra extra;
};

struct pd_error_rec { char run[PD_RUN_LEN + 1]; uint8_t op[16], gen[PD_GEN_LEN]; bool has_op, has_gen; struct pd_bin id; char class_[16]; int code; struct pd_str message; char action[16];
                      int64_t retry_after_ms /* 0: not told */; };

/* `event`: one step of a run's or a lease's life, or of the process's that writes (../trace/state.h). Empty strings and zero ids are left out.
 * `streaming` carries which tokens went out: `tokens` of them from position `pos` on of one choice; `completed` carries the tokens of all choices. */
struct pd_event {
    char run[PD_RUN_LEN + 1];
    uint8_t op[16], parent[16]; bool has_op, has_parent;
    char state[24], role[12], where[12];
    struct pd_str worker, domain, model_revision, cause;
    uint8_t gen[PD_GEN_LEN], lease[16]; bool has_gen, has_lease;
    uint64_t bytes;
    uint32_t choice, pos, tokens;
    int64_t t_us, mono_us;
};

/* `worker`: who a worker is, what it can hold and how busy it is: its registration, sent again at each heartbeat (../serve/register.h).
 * fp_fields and layout as in a kv or hello. Counts of the load are those of one moment. */
struct pd_parallel { uint32_t tp, pp, ep; };
struct pd_capacity {
    uint32_t blocks, block_size;        /* the most KV blocks the pool may grow to, and the tokens of one */
    uint32_t max_seqs, max_runs;        /* sequences in a batch, runs taken in at once */
    uint32_t context;                   /* tokens the model can see */
};
struct pd_load {
    uint32_t runs, waiting, seqs;       /* runs in hand; of them those with nothing in the batch yet; sequences in the batch */
    uint32_t blocks_used, blocks_leased;
    uint64_t prefill_tokens_ahead;      /* prompt tokens taken in and not yet computed */
    uint64_t kv_tokens;                 /* tokens whose KV running sequences read at each step */
};
#define PD_CAP_GIVES "gives"
struct pd_worker_rec {
    struct pd_str worker;               /* role@host:pid, as in results and events */
    char role[12], state[12];           /* "prefill" "decode" "both"; "starting" "ready" "draining" "gone" */
    char prefer[12];                    /* of role both, "prefill" or "decode": its side where each worker has one. "": decode */
    struct pd_str model_revision, numerics, domain;
    uint8_t fp_sha[PD_SHA_LEN]; struct pd_bin fp_fields;
    struct pd_kv_layout layout;
    struct pd_parallel parallel;
    struct pd_str *adapters; uint32_t n_adapters;
    struct pd_capacity capacity;
    struct pd_load load;
    struct pd_str *via; uint32_t n_via;         /* transfer schemes, best first */
    struct pd_str *caps; uint32_t n_caps;       /* "in_place", "resume", "held"; "gives": other workers get KV from it */
    uint64_t epoch;
    struct pd_str listen;               /* "unix:/absolute/path"; absent: it listens nowhere (--describe) */
    uint8_t life[8]; bool has_life;     /* the first half of each generation this process gives */
    uint8_t boot[16]; bool has_boot;    /* the host's boot id; netns: its network namespace (inode), 0 unknown */
    uint64_t netns;
    uint32_t pid, threads;              /* 0: not known; threads: that it computes with */
    struct pd_str cpu;                  /* the path of its kernels: "avx2"; absent: not known */
    int64_t beat_us;                    /* how often this record comes; 0: once */
    uint64_t seq;                       /* of this life's records on any connection, from 1 */
    struct pd_extra extra;
};

/* Encoders append; on failure the buffer keeps its old length. pd_kvdesc_encode ends with `sum`, XXH3-64 (bin, big-endian) over all bytes of the
 * record before that key. pd_chunk_encode_head writes everything up to and including the header of `data` (the last key): the caller sends the bytes after it. */
int pd_request_encode(const struct pd_request *r, struct pd_buf *b, struct pd_err *e);
int pd_kvdesc_encode(const struct pd_kvdesc *d, struct pd_buf *b, struct pd_err *e);
int pd_chunk_encode_head(const struct pd_chunk *c, struct pd_buf *b, struct pd_err *e);
int pd_token_encode(const struct pd_token *t, struct pd_buf *b, struct pd_err *e);
int pd_result_encode(const struct pd_result *r, struct pd_buf *b, struct pd_err *e);
int pd_error_encode(const struct pd_error_rec *r, struct pd_buf *b, struct pd_err *e);
int pd_event_encode(const struct pd_event *v, struct pd_buf *b, struct pd_err *e);
int pd_worker_rec_encode(const struct pd_worker_rec *w, struct pd_buf *b, struct pd_err *e);

/* Decoders take one framed record (frame.h). pd_kvdesc_decode checks `sum` first: PD_ECORRUPT. */
int pd_request_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_request *r, struct pd_err *e);
int pd_kvdesc_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_kvdesc *d, struct pd_err *e);
int pd_chunk_decode(const void *rec, size_t n, struct pd_chunk *c, struct pd_err *e);
int pd_token_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_token *t, struct pd_err *e);
int pd_result_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_result *r, struct pd_err *e);
int pd_error_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_error_rec *r, struct pd_err *e);
int pd_event_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_event *v, struct pd_err *e);
int pd_worker_rec_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_worker_rec *w, struct pd_err *e);

/* The value of a string key in a raw msgpack map, by skip-scan (no allocation). 1 found (*out: the value's raw bytes), 0 absent, < 0 malformed. */
int pd_map_find(const void *map, size_t n, const char *key, struct pd_bin *out);
/* A short text of a raw `id` for messages ("a", 17, or "-" when absent). */
const char *pd_id_text(struct pd_bin id, char *out, size_t cap);

#endif
