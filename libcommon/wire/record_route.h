/* `route`: one decision of a router with all that it was made from, and `outcome`: what came of it (pd-wire.5). Plain data: no clock, no pointer to anything
 * alive. ../route/choose.h makes the second half of a route out of the first, always the same one; so a record can be replayed.
 *
 * Costs are microseconds, P50 and P95 of what was expected. Whoever fills a record keeps its arrays for as long as the record; decoded ones are the arena's.
 * Encoded it is below 64 KiB: of rows past PD_ROUTE_ROWS (both sides together) only their number is told, by why they were excluded; those that were scored stay.
 */
#ifndef PD_WIRE_RECORD_ROUTE_H
#define PD_WIRE_RECORD_ROUTE_H
#include "record.h"

enum pd_mode { PD_MODE_AGGREGATED, PD_MODE_REMOTE, PD_MODE_LOCAL };
extern const char *const pd_mode_names[];       /* as in route and result; NULL-ended */

/* Why a worker may not have the run. From PD_X_RUNS on: it has no room for now. */
enum pd_excluded { PD_X_NO, PD_X_UNKNOWN, PD_X_STATE, PD_X_UNREACHABLE, PD_X_SILENT, PD_X_EPOCH, PD_X_TRIED, PD_X_ADAPTER, PD_X_CONTEXT, PD_X_FINGERPRINT,
                   PD_X_NUMERICS, PD_X_STALE, PD_X_MAINTENANCE, PD_X_HOLD, PD_X_DOMAIN, PD_X_PATH, PD_X_RUNS, PD_X_BEHIND, PD_X_BLOCKS, PD_X_FALLBACKS, PD_X_KINDS };
extern const char *const pd_excluded_names[];   /* NULL-ended */

enum pd_outcome {
    PD_CHOSEN,
    PD_WAIT_ROOM,       /* somebody may, and is full: it comes when a run ends */
    PD_WAIT_WORKER,     /* nobody may now */
    PD_NO_PREFILL,      /* fixed: somebody could decode, and no prefill worker is there, or each has failed this run */
    PD_NEVER,           /* no worker that is here could ever: an adapter or a context that none has */
    PD_STAY             /* late: its KV is waited for */
};
extern const char *const pd_outcome_names[];    /* NULL-ended */

enum pd_degraded { PD_DG_NO_TOKEN_IDS = 1,      /* the router cannot tell the prompt's blocks, and guesses its length */
                   PD_DG_NO_INDEX = 2,          /* nothing is known of who holds what */
                   PD_DG_APPROXIMATE = 4,       /* it is guessed from earlier decisions, for at least one worker */
                   PD_DG_NO_TOPOLOGY = 8,       /* paths are as a guess has it */
                   PD_DG_COLD = 16, PD_DG_STALE = 32,   /* a cost of the choice has too little behind it, or is old (pd_choose sets these two) */
                   PD_DG_IN_DOUBT = 64,         /* what a worker told of it makes no sense: at least one counts as holding nothing */
                   PD_DG_ALL = 127 };
extern const char *const pd_degraded_names[];   /* by bit */

enum { PD_ROUTE_ROWS = 128, PD_ROUTE_MOST = 1024 /* a side, in memory */, PD_ROUTE_BEST = 8, PD_ROUTE_PAIRS = PD_ROUTE_BEST * (PD_ROUTE_BEST + 1) + 1 /* a shadow's */,
       PD_ROUTE_PATHS = 128, PD_ROUTE_FITS = 256, PD_ROUTE_DOMAINS = 64 };
#define PD_US_MOST PD_SPREAD_MOST

/* A worker that might prefill, or decode. A cost that is all 0 is left out of the record. */
struct pd_route_row {
    struct pd_str worker, at;
    uint64_t epoch;
    uint32_t domain, kin;               /* of `domains`; which fingerprint with what it converts: workers of one kin fit the same others */
    uint32_t hit_blocks, miss_blocks, miss_tokens;      /* of the prompt: KV that it holds, and lacks */
    struct pd_str tier;                 /* where it holds it; absent: with the rest */
    struct pd_str index;                /* how that is known: "events", "guess", "doubt"; absent: not at all */
    uint32_t runs, foreign_runs, runs_most, seqs, seqs_most, queue_runs;        /* own and others' runs there; sequences that decode, prompts not yet begun */
    uint64_t queue_tokens, kv_tokens, blocks, blocks_most, given;       /* prompt tokens ahead; KV that its batch reads; blocks taken, of; runs ever given */
    int64_t load_age_us, index_age_us;
    struct pd_spread queue, prefill;      /* until the prompt is begun; its tokens that are not held */
    struct pd_spread interference, slot, tpot;    /* to decode: what its batch adds to a prefill there; until there is room in the batch; a token */
    int64_t itl_us;                     /* this sequence in the batch adds so much to each token of each other one */
    uint64_t cost;                      /* blocks: what policies that go by load compare (pd_choose) */
    uint64_t x, x_kv;                   /* enum pd_excluded: from everything; from what needs KV from elsewhere (no room for staged KV) */
    struct pd_str excluded;             /* x, else x_kv, in words */
    struct pd_bin apart;                /* of P: a bit for each row of D, the lowest first, to which no KV may go (a breaker, a hold) and of which no path tells */
    bool keep, drawn;                   /* not recorded: pd_choose went by it, so it stays in the record; `random` might have drawn it */
};
static inline bool pd_route_apart(const struct pd_route_row *p, int32_t d) { return (size_t)d / 8 < p->apart.n && p->apart.p[d / 8] >> d % 8 & 1; }
extern const struct pd_str pd_route_apart_words;
/* What KV of p's kin to d's kin needs; pairs of kins that are not listed fit as they are. */
struct pd_route_fit { uint32_t p, d, converts /* PD_CONV_* (../kv/convert.h) */; struct pd_str why; /* they do not fit */ };
/* How KV goes. The most particular one holds for a pair: of p and d, of their domains, of any. */
struct pd_route_path {
    int32_t p, d;                       /* rows; -1: all */
    int32_t from, to;                   /* domains; -1: all */
    struct pd_str kind;                 /* "local" "nvlink" "pcie" "rack" "cross"; absent: not known */
    struct pd_spread latency;             /* before the first byte */
    struct pd_spread kib_ns;              /* nanoseconds (not us) a KiB, alone on the path */
    struct pd_spread sync;                /* publish to offer, handshake, verify, into the block table */
    uint32_t overlap_permille;          /* of the prefill's time, in which KV is on its way already */
    uint32_t active;                    /* transfers on it now, which share it */
    int64_t penalty_us, age_us;
    struct pd_str breaker;              /* "open", "half_open", "hold"; absent: closed */
    uint64_t x;                         /* enum pd_excluded; 0: may be used */
    struct pd_str excluded;             /* in words: "breaker open 3.2s", "domain required rackA" */
};
#define PD_SCORE_NONE (-1)
/* One way to do it, scored: d alone, or p and d. */
struct pd_route_pair {
    int32_t p, d, path;                 /* rows; p -1: d alone; path -1: the guess */
    uint64_t bytes;                     /* of KV that d does not hold */
    struct pd_spread transfer, ttft, completion;  /* of all bytes; sums, of what is exposed */
    int64_t overlap_us;
    int64_t itl_us, queue_us, link_us, capacity_us;     /* what it costs others */
    int64_t score;                      /* the policy's: us, or what it compares; the least wins. PD_SCORE_NONE: it does not look at this way */
    uint64_t x; struct pd_str excluded; /* not possible: the path's */
    double share;                       /* not recorded: how probable it was to be chosen */
};
/* pairs: of those scored; p, d: rows. */
struct pd_route_chosen { bool any; enum pd_mode mode; int32_t p, d, pair; char converted[24]; /* what d converts: "block_size,order" */ };
struct pd_route_input {
    uint32_t n_tokens; bool exact;      /* exact: counted, not guessed from the length of the text */
    uint32_t max_tokens, n;
    uint32_t out_p50, out_p95;          /* tokens expected a choice */
    uint32_t local_ttft, local_completion, remote_ttft, remote_completion;      /* by what the P95 - P50 of these sums is to be multiplied, permille; 0: as it is */
    uint32_t block_size, kv_bytes;      /* tokens a block; bytes of KV a token */
    struct pd_str adapter;
    int64_t deadline_us;                /* left of it; 0: none */
    struct pd_bin slo;                  /* raw map */
    uint8_t digest[16]; bool has_digest;        /* of its last whole block: the chain's hash */
    bool local, moves, d_given, early;  /* one worker does it; a stream goes on elsewhere; another p for a run that has its d; first token before verified KV */
};
struct pd_route_versions { uint64_t index, topology, registry; };
/* Its KV is on its way for longer than it should be: is it computed where it is decoded instead (../route/late.h)? way: what was expected of it. */
struct pd_route_late { bool any; int64_t since_us; struct pd_spread way; int64_t rest_us, local_us /* P95 of what is left, and of computing it (pd_choose) */; };
struct pd_route_shadow { char policy[24]; struct pd_route_chosen chosen; int64_t score; };       /* policy "": none */

struct pd_route_rec {
    /* what it was, and is for */
    char run[PD_RUN_LEN + 1];
    uint8_t op[16];
    int64_t t_us, waited_us;            /* wall clock; since the run was accepted */
    uint32_t attempt, resumed;          /* which decision of the run, from 1; tokens that were out already */
    struct pd_str cause, fallback;      /* why it is decided again; why it is not as first meant */
    /* what the choice goes by */
    char policy[24];                    /* "threshold:512" */
    uint64_t seed;                      /* of this decision */
    double temperature, risk;           /* risk: the quantile that is compared, 0.5 to 0.999 */
    double externality;                 /* what others are made to wait counts so much */
    struct pd_route_versions versions;
    struct pd_route_input input;
    uint64_t epoch;                     /* of those that may have it */
    struct pd_str *domains; uint32_t n_domains;
    struct pd_route_fit *fits; uint32_t n_fits;
    struct pd_route_row *p, *d; uint32_t n_p, n_d;
    struct pd_route_path *paths; uint32_t n_paths;
    uint32_t left_p[PD_X_KINDS], left_d[PD_X_KINDS];    /* workers that are no rows, by why */
    uint32_t lots_p, lots_d;            /* of them, those that `random` might have drawn: P that reach the chosen D, and D */
    uint32_t degraded;                  /* PD_DG_* */
    struct pd_route_late late;
    struct pd_route_shadow shadow;      /* another policy, without effect: its name is given, the rest is chosen */
    /* what pd_choose makes of it */
    enum pd_outcome outcome;
    struct pd_route_pair pair[PD_ROUTE_PAIRS]; uint32_t n_pairs;
    struct pd_route_chosen chosen;
    double propensity;                  /* how probable this choice was */
    char reason[400];                   /* in words; without a choice: pd_outcome_names */
    bool quiet;                         /* not recorded: no words are wanted for a choice, and it will not be encoded */
    struct pd_spread ttft, completion;    /* the estimate */
    struct pd_extra extra;
};
/* The words of rows have to be there (excluded); rows that do not stay are counted in left_*. */
int pd_route_encode(const struct pd_route_rec *r, struct pd_buf *b, struct pd_err *e);
/* Encoding what was decoded gives the same bytes. *r is large. */
int pd_route_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_route_rec *r, struct pd_err *e);

/* What a run took, by the last decision that was carried out. A number that nobody could know is absent (`has`). */
enum { PD_OC_QUEUE = 1, PD_OC_PREFILL = 2, PD_OC_TRANSFER = 4, PD_OC_SYNC = 8, PD_OC_TTFT = 16, PD_OC_TPOT = 32, PD_OC_COMPLETION = 64, PD_OC_KV = 128, PD_OC_P_CACHED = 256 };
struct pd_outcome_rec {
    char run[PD_RUN_LEN + 1];
    uint8_t op[16];                     /* of that decision */
    int64_t t_us;                       /* wall clock */
    uint32_t attempt, migrations;
    char policy[24], mode[12], finish_reason[12];       /* mode: as it was done */
    struct pd_str fallback, cause;      /* "prefill_failed: ..."; of its failure */
    struct pd_str p, d;                 /* workers */
    uint32_t prompt_tokens, cached_tokens, transferred_tokens, recomputed_tokens, completion_tokens;
    uint32_t cached_expected, p_cached_tokens;  /* of the prompt: what whoever computed it was to hold, by the decision; what p held */
    uint64_t kv_bytes;
    int64_t waited_us;                  /* at the router, before the decision */
    uint32_t has;                       /* PD_OC_*; us from here on */
    int64_t queue_us, prefill_us, transfer_us, sync_us, kv_us;  /* at whoever prefilled; KV on its way beyond the prefill; the rest of ttft; checking and copying it */
    int64_t ttft_us, tpot_us, completion_us;    /* since the decision: the terms of an estimate; tpot: mean of a token after the first */
    struct pd_extra extra;
};
int pd_outcome_encode(const struct pd_outcome_rec *o, struct pd_buf *b, struct pd_err *e);
int pd_outcome_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_outcome_rec *o, struct pd_err *e);
#endif
