/* What a router learns of its cluster from what runs took, and what it expects therefore: the costs in the rows and paths of a route record. Pure: the time is told.
 *
 * By class of workers (the same model, numerics, kernels and threads) and by path (from a domain to another):
 *   queue          until a prompt is begun: the prefills ahead of it, a step of the batch that runs, and what it takes to hand it over
 *   prefill        tokens that were computed, after what was cached
 *   decode         a token in a batch: its sequences, and the KV tokens that it reads
 *   interference   what a decode batch added to a prefill beside it: steps of the prefill x the decode step
 *   transfer       bytes, alone on the path: those on their way share it
 *   sync           the rest between the prefill's end and the first token
 * and by length of the prompt and the limit that was set: how many tokens come out.
 * It begins with a profile (profile.h) or with a guess, which is marked cold until there is enough of the cluster's own; what is old is marked stale. */
#ifndef PD_ROUTE_LEARN_H
#define PD_ROUTE_LEARN_H
#include "../wire/record_route.h"
#include "estimate.h"
#include "profile.h"

enum { PD_LEARN_CLASSES = 64, PD_LEARN_PATHS = 256, PD_LEARN_LENGTHS = 8, PD_LEARN_LIMITS = 16, PD_LEARN_KEEPS = 128 };
#define PD_LEARN_STALE_US 300000000

struct pd_learn_class { uint64_t key; struct pd_term queue, prefill, decode, interference; bool told /* what the profile lacks of it */; };
/* What is before a prompt at a worker: prompts and their tokens, and the batch that decodes. */
struct pd_ahead { uint32_t runs; uint64_t tokens; uint32_t seqs; uint64_t kv_tokens; };
struct pd_learn_path { uint64_t key; struct pd_term transfer, sync; uint32_t active; int64_t used_us; };
struct pd_lengths { uint32_t ring[PD_LEARN_KEEPS], sorted[PD_LEARN_KEEPS], n; };
struct pd_learn {               /* zero-initialise; the first class that does not fit any more shares the last one's place, a path has none then */
    const struct pd_profile *profile;   /* or NULL; the caller's */
    struct pd_learn_class *class_; uint32_t n_classes;
    struct pd_learn_path *path; uint32_t n_paths;
    struct pd_band sum[2][2];           /* of local and remote ways, ttft and completion: (what it was - P50) / (P95 - P50) */
    struct pd_lengths *length[PD_LEARN_LENGTHS][PD_LEARN_LIMITS];       /* made at first use */
};
void pd_learn_free(struct pd_learn *l);

/* Their places; made at first use. PD_ENOMEM: also of a path past PD_LEARN_PATHS, of which nothing is learnt here. kind: of the profile's path to begin with; NULL:
 * "local" within a domain, else "cross". */
int pd_learn_class_of(struct pd_learn *l, const struct pd_worker_rec *w, uint32_t *out, struct pd_err *e);
/* What the profile lacks of w's class and what serves instead, in words; "": nothing, there is no profile, or it was told before. */
const char *pd_learn_lacks(struct pd_learn *l, const struct pd_worker_rec *w, char *out, size_t cap);
int pd_learn_path_of(struct pd_learn *l, struct pd_str from, struct pd_str to, const char *kind, uint32_t *out, struct pd_err *e);

/* What is expected. tokens: to compute, after `context`. */
struct pd_spread pd_learn_prefill(const struct pd_learn *l, uint32_t cls, uint64_t tokens, uint64_t context, int64_t now_us);
struct pd_spread pd_learn_queue(const struct pd_learn *l, uint32_t cls, struct pd_ahead a, int64_t now_us);
struct pd_spread pd_learn_tpot(const struct pd_learn *l, uint32_t cls, uint32_t seqs, uint64_t kv_tokens, int64_t now_us);
struct pd_spread pd_learn_interference(const struct pd_learn *l, uint32_t cls, uint64_t tokens, uint32_t seqs, uint64_t kv_tokens, int64_t now_us);
int64_t pd_learn_itl(const struct pd_learn *l, uint32_t cls, uint64_t kv_tokens);      /* one more sequence of so many tokens, to each other one */
/* latency, kib_ns and sync of *x, for about so many bytes. */
void pd_learn_ways(const struct pd_learn *l, uint32_t path, uint64_t bytes, int64_t now_us, struct pd_route_path *x);
void pd_learn_length(const struct pd_learn *l, uint32_t prompt_tokens, uint32_t max_tokens, uint32_t *p50, uint32_t *p95);

/* By what the P95 - P50 of a sum is to be multiplied, permille: 95 % are to stay below. 0: it is not known yet. */
enum { PD_LEARN_TTFT, PD_LEARN_COMPLETION };
uint32_t pd_learn_sum(const struct pd_learn *l, bool remote, int of);

/* What it was. What is no measurement (0, less) is ignored. */
void pd_learned_queue(struct pd_learn *l, uint32_t cls, struct pd_ahead a, int64_t us, int64_t now_us);
void pd_learned_prefill(struct pd_learn *l, uint32_t cls, uint64_t tokens, uint64_t context, int64_t us, int64_t now_us);
void pd_learned_tpot(struct pd_learn *l, uint32_t cls, uint32_t seqs, uint64_t kv_tokens, int64_t us, int64_t now_us);
void pd_learned_interference(struct pd_learn *l, uint32_t cls, uint64_t tokens, uint32_t seqs, uint64_t kv_tokens, int64_t us, int64_t now_us);
void pd_learned_transfer(struct pd_learn *l, uint32_t path, uint64_t bytes, uint32_t shared, int64_t us, int64_t sync_us, int64_t now_us);
void pd_learned_sum(struct pd_learn *l, bool remote, int of, struct pd_spread told, uint32_t permille /* it was told with */, int64_t us);
/* A run that was told to end after max_tokens says nothing of how long one with another limit would be: they are kept apart, by powers of two. */
void pd_learned_length(struct pd_learn *l, uint32_t prompt_tokens, uint32_t max_tokens, uint32_t out);
#endif
