/* The workers that a router knows: what each said last (its `worker` record), how long ago, whether it can be reached, and what was given to it and has not
 * come back. Pure: no sockets and no clock; whoever has the connections (../serve/upstream.h) tells it, decide.h reads it.
 *
 * The ledger. `own` is what this router has in flight at a worker, kept by pd_member_take and pd_member_give_back, so it is never behind. A heartbeat is set
 * against it: what a worker reports beyond it is somebody else's work (`foreign`, the smaller of its last two reports, since each is a little old), and counts
 * too; what it reports short of it is not believed. Where the two differ by more than a factor for three heartbeats, `disagrees` says so.
 *
 * Fingerprints are kept once a value, and each pair of values is compared once, by the function that the consumer of KV calls too (../kv/fingerprint.h).
 */
#ifndef PD_ROUTE_REGISTRY_H
#define PD_ROUTE_REGISTRY_H
#include "../kv/fingerprint.h"
#include "../wire/record.h"
#include "limit.h"
#include "path.h"

struct pd_share { uint32_t runs; uint64_t prefill_tokens, blocks; };    /* of a worker's load: in flight */

/* How it is known what a worker holds of the prompt in hand: not; from what was sent there; from its own events; it has sent some that make no sense, and is
 * taken to hold nothing until a snapshot comes. */
enum pd_held_how { PD_HELD_NONE, PD_HELD_GUESS, PD_HELD_EVENTS, PD_HELD_DOUBT };
struct pd_held { uint32_t blocks; /* full ones, from its beginning */ enum pd_held_how how; int64_t age_us; /* of the worker's last word on it */ };

struct pd_member {
    struct pd_member *next;
    char *at; size_t n_at;              /* where it listens, "unix:/path": its key */
    bool known;                         /* said is there */
    struct pd_arena mem;
    struct pd_worker_rec said;          /* the arena's */
    int64_t said_us;                    /* when, mono */
    bool reachable;                     /* the connection for requests stands */
    bool behind;                        /* it has not read yet what it was sent there */
    uint32_t life;                      /* counts its connections: who failed in one may be tried in the next */
    int fp;                             /* which fingerprint; -1: none yet */
    unsigned conv;                      /* PD_CONV_* that it says it converts */
    const void *learn; uint32_t cls;    /* its class there (learn.h) */
    bool ready, can_give;               /* as it says */
    struct pd_share own, foreign, reported_more;
    uint64_t since[2];                  /* prompt tokens given since its last report, and between that and the one before: it may not have counted them */
    uint32_t runs_then;                 /* own.runs at its last report */
    uint64_t given;                     /* runs, in all */
    struct pd_held held;                /* set before each decision */
    struct pd_path_end end;             /* where it is, of paths; made when it is asked for */
    struct pd_limit_load fallbacks;     /* prompts that it computes because their KV did not come */
    int n_disagree;
    bool disagrees;
    void *user;
};

struct pd_fp_kept { uint8_t sha[PD_SHA_LEN]; struct pd_buf map; uint32_t users; };
/* Of two fingerprints, as they are and as with conversions: 0: not compared yet; else 1 + enum pd_fp_verdict. needs: PD_CONV_* that the second takes. */
struct pd_fp_pair { uint8_t verdict[2], needs; char *why[2]; };
#define PD_MAX_FPS 64
struct pd_registry {                    /* zero-initialise */
    struct pd_member *first; uint32_t n;        /* in the order in which they were added */
    uint64_t version;                   /* changes so far */
    struct pd_fp_kept fp[PD_MAX_FPS];
    struct pd_fp_pair pair[PD_MAX_FPS][PD_MAX_FPS];     /* [prefill][decode] */
};

/* The worker that listens there; made when there is none. */
int pd_registry_add(struct pd_registry *r, const char *at, struct pd_member **out, struct pd_err *e);
struct pd_member *pd_registry_find(const struct pd_registry *r, struct pd_str at);
void pd_registry_remove(struct pd_registry *r, struct pd_member *m);
void pd_registry_free(struct pd_registry *r);
/* Its `worker` record. A bad one changes nothing: PD_ECORRUPT; PD_ENOMEM past PD_MAX_FPS fingerprints. *fresh: it is another process than before. */
int pd_registry_said(struct pd_registry *r, struct pd_member *m, const void *rec, size_t n, int64_t now_us, bool *fresh, struct pd_err *e);

void pd_member_take(struct pd_member *m, struct pd_share s);
void pd_member_give_back(struct pd_member *m, struct pd_share s);
const char *pd_member_name(const struct pd_member *m);          /* as it calls itself, else where it listens */
bool pd_worker_can_give(const struct pd_worker_rec *w);         /* KV, to others; */
static inline bool pd_worker_can_decode(const struct pd_worker_rec *w) { return strcmp(w->role, "prefill") != 0; }      /* decode it, and run whole requests */
static inline bool pd_member_can_give(const struct pd_member *m) { return m->known && m->can_give; }
static inline bool pd_member_can_decode(const struct pd_member *m) { return m->known && pd_worker_can_decode(&m->said); }
/* In a split where each worker has one side: of role both, the one that it prefers. */
static inline bool pd_member_gives(const struct pd_member *m) { return pd_member_can_give(m) && (!pd_member_can_decode(m) || !strcmp(m->said.prefer, "prefill")); }
static inline bool pd_member_decodes(const struct pd_member *m) { return m->known && !pd_member_gives(m); }

/* May KV go from p to d? *why (the registry's): the field that differs and both values, or NULL. admit: PD_CONV_* (../kv/convert.h) that d converts; *converts
 * (may be NULL): those that it has to. */
enum pd_fp_verdict pd_registry_pair(struct pd_registry *r, int p, int d, unsigned admit, unsigned *converts, const char **why);
/* A fingerprint is kept for somebody else than a member: a run that may have to go on elsewhere. */
void pd_registry_hold_fp(struct pd_registry *r, int fp);
void pd_registry_let_fp(struct pd_registry *r, int fp);
#endif
