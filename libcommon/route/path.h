/* The paths of KV between workers, as they are now: by the topology and by what was seen of them. For each pair: may it be used (rule of domains, breaker, hold),
 * and what does moving bytes on it cost. Pure: told of transfers and of the time.
 *
 * Costs are learnt for each pair of domains, and for each class, which serves until a pair has enough behind it; both begin with what the topology's line says,
 * else a profile of that class, else the class's guess. Breakers are kept for each pair of workers and class, so a path that a new topology moves elsewhere
 * begins anew. The least recently used are forgotten past `most` pairs, and past PD_PATHS_LEARNT learnt costs.
 */
#ifndef PD_ROUTE_PATH_H
#define PD_ROUTE_PATH_H
#include "breaker.h"
#include "estimate.h"
#include "ledger.h"
#include "profile.h"
#include "topology.h"

enum { PD_PATHS_LEARNT = 256 };
struct pd_paths_opts {
    struct pd_domain_rule rule;
    struct pd_breaker_opts breaker;
    uint64_t seed;                      /* of the breakers' chance */
    int64_t stale_us;                   /* 0: 10 min: how long what was learnt is good for */
    uint32_t most;                      /* 0: 4096 pairs */
    const struct pd_ledger *ledger;     /* who is on hold; or NULL */
    const struct pd_profile *profile; const char *scheme;       /* what to begin with: of this scheme ("shm", "tcp"); or NULL */
};
struct pd_paths;
int pd_paths_new(const struct pd_paths_opts *o, struct pd_paths **out, struct pd_err *e);
void pd_paths_free(struct pd_paths *x);         /* NULL: nothing */
/* From now on; the caller's, as long as it is the one. NULL: none. What was learnt of domains that are in both stays. */
void pd_paths_set_topology(struct pd_paths *x, const struct pd_topology *t);

/* A worker as an end of paths; `at` stays the caller's. Good until the topology changes (pd_path_end_good); one that is kept longer is an end in no domain. */
struct pd_path_end { const char *at /* NULL: it is asked no more whether it is on hold */; uint64_t key, label; struct pd_spot spot; uint32_t turn; };
static inline bool pd_path_end_good(const struct pd_path_end *e, uint32_t turn) { return e->turn == turn; }
uint32_t pd_paths_turn(const struct pd_paths *x);      /* from 1; another one with each topology */
const struct pd_topology *pd_paths_topology(const struct pd_paths *x);
struct pd_path_end pd_path_end_of(const struct pd_paths *x, const char *at, struct pd_str worker, struct pd_str domain);

bool pd_paths_prefer(const struct pd_paths *x);         /* the rule is to prefer */
/* It is as all between domains that are far from each other: no line, no transfer, no rule tells it from others. */
bool pd_paths_plain(const struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d);
enum pd_near pd_paths_near(const struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d);

enum pd_path_x { PD_PATH_MAY, PD_PATH_HOLD, PD_PATH_DOMAIN, PD_PATH_BREAKER };
struct pd_path_view {
    enum pd_near near;
    const struct pd_way *way;
    bool placed;                        /* the topology knows both ends */
    enum pd_path_x x;
    bool second;                        /* the rule prefers others */
    struct pd_cost latency, kib_ns, sync;       /* us, ns a KiB, us: latency + KiB * kib_ns is what a transfer takes; then `sync`, until it is in use */
    double penalty_us;                  /* the topology's cost, and what failures have cost here: their share times the time they took */
    int64_t age_us;                     /* since a transfer was last seen here; -1: never */
    double health;                      /* from 0 to 1: the share of transfers that went well, and no slower than was to be expected */
    uint32_t active;                    /* transfers between the two domains now */
    const struct pd_breaker *breaker;   /* NULL: closed, as it never was anything else */
    const struct pd_ledger_hold *hold;
    int around;                         /* of PD_PATH_DOMAIN: the domain that is required, -1: of that class there is none around d */
};
/* KV of `bytes` from p to d. */
void pd_paths_view(struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, uint64_t bytes, int64_t now_us, struct pd_path_view *v);
/* Why it may not be used: "breaker open 3.2s", "domain required rackA", "hold: integrity: ..."; "" when it may. And how it is: NULL (closed), "open", "half_open",
 * "hold". */
const char *pd_path_text(const struct pd_paths *x, const struct pd_path_view *v, int64_t now_us, char *out, size_t cap);
const char *pd_path_state(const struct pd_path_view *v, int64_t now_us);

/* A transfer goes, and ends. bytes, us: of one that went well, how much in which time, 0: not known, or told by pd_paths_took; of one that did not, us is the time
 * lost. */
struct pd_path_ticket { uint32_t turn; uint8_t near; };
struct pd_path_ticket pd_paths_begin(struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, int64_t now_us);
/* true: its breaker opened or closed. */
bool pd_paths_end(struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, struct pd_path_ticket t, enum pd_went went, const char *cause,
                  uint64_t bytes, int64_t us, int64_t now_us);
void pd_paths_took(struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, struct pd_path_ticket t, uint64_t bytes, int64_t us, int64_t now_us);
void pd_paths_sync(struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, int64_t us, int64_t now_us);
void pd_paths_trip(struct pd_paths *x, const struct pd_path_end *p, const struct pd_path_end *d, const char *cause, int64_t now_us);
/* This worker began a new life: its open breakers probe. */
void pd_paths_renew(struct pd_paths *x, const struct pd_path_end *w, int64_t now_us);
/* The worker that listened there is gone for good: nothing is kept of its pairs. */
void pd_paths_forget(struct pd_paths *x, const char *at);
uint32_t pd_paths_breakers(const struct pd_paths *x);  /* that are not closed */
/* Pairs that are not as others between their domains, as keys of ends: those on hold first, then those with a breaker that is not closed, then those with failures
 * now and then. One may come twice. false: no more of them. */
typedef bool pd_path_each(void *ctx, uint64_t p, uint64_t d);
void pd_paths_special(const struct pd_paths *x, pd_path_each *each, void *ctx);
#endif
