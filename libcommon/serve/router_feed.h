/* What the router knows of the KV that its workers hold: route/index, fed by each worker's `kvevent` records, and by the router's own decisions where a worker
 * sends none. The loop's.
 *
 * Events come over the connection that a worker tells of itself on: its registration, or the `status` that follows it (upstream.h). They are asked for once the
 * worker has told what its blocks are: from the last change known of that life on, else with a snapshot. What does not follow, cannot be, or is of blocks of
 * another size makes all of that worker's blocks unknown (PD_HELD_DOUBT): it is warned of and counted, and a snapshot is asked for, again with a back-off while
 * none comes or none is good. A worker whose connection is lost keeps what it holds, and its age grows; when it counts as gone, or is another process, its
 * blocks leave.
 *
 * A worker that has sent no event is presumed to hold what was sent to it in the last PD_RT_GUESS_US, or twice that (PD_HELD_GUESS). */
#ifndef PD_SERVE_ROUTER_FEED_H
#define PD_SERVE_ROUTER_FEED_H
#include "../route/feed.h"
#include "../route/registry.h"

#define PD_RT_GUESS_US 300000000
enum { PD_RT_CLASSES = 8 };     /* fingerprints for which one run's blocks are hashed */

struct pd_router;
struct pd_rt_run;
struct pd_rt_worker;
enum pd_rt_from { PD_RT_NOWHERE, PD_RT_REGISTRATION, PD_RT_FOLLOWED };

struct pd_rt_feed {             /* of a worker */
    struct pd_feed f;
    bool open;                  /* it has told what its blocks are: */
    uint64_t seed; uint32_t block_size;
    enum pd_rt_from from;       /* where events were asked for */
    bool heard;                 /* some have come in this life */
    int64_t heard_us;           /* the last word from there: what is known was right then */
    int64_t ask_us, backoff_us; /* when a snapshot is asked for once more; 0: it is not due */
    struct { bool joined; uint16_t slot; } guess[2];    /* what was sent there: lately, and before that */
    int64_t turned_us;
};

struct pd_rt_index {            /* the router's */
    struct pd_index *x;
    struct pd_rt_worker **of;   /* [PD_INDEX_SLOTS], by slot */
    uint64_t version;           /* counts changes of any kind */
    uint64_t turn;
    struct pd_metric *m_events, *m_gaps, *m_refused, *m_snapshots, *m_orphans, *m_blocks, *m_copies, *m_bytes, *m_forgotten, *m_left_out, *m_workers[3], *m_hit,
        *m_asked;
};

/* The blocks of a run's prompt by one fingerprint. */
struct pd_rt_hashes { uint64_t seed, turn; uint32_t block_size, n; uint8_t (*h)[16]; };

int pd_rt_feed_new(struct pd_router *r, size_t bytes, struct pd_err *e);
void pd_rt_feed_free(struct pd_router *r);
void pd_rt_feed_said(struct pd_router *r, struct pd_rt_worker *w, enum pd_rt_from from, bool fresh);   /* its `worker` record was taken; fresh: of another process */
void pd_rt_feed_event(struct pd_router *r, struct pd_rt_worker *w, enum pd_rt_from from, const struct pd_rec *rec);
void pd_rt_feed_silent(struct pd_rt_worker *w, enum pd_rt_from from);  /* that connection has ended */
void pd_rt_feed_gone(struct pd_router *r, struct pd_rt_worker *w);     /* its blocks leave */
void pd_rt_feed_beat(struct pd_router *r, int64_t now);

/* Sets `held` of every member: how much of the prompt each holds. Before a decision. */
void pd_rt_hits(struct pd_router *r, struct pd_rt_run *run, int64_t now);
void pd_rt_feed_sent(struct pd_router *r, struct pd_rt_run *run, struct pd_rt_worker *w, int64_t now);         /* w will hold the run's prompt */
void pd_rt_hashes_free(struct pd_router *r, struct pd_rt_run *run);
void pd_rt_feed_ledger(const struct pd_router *r, void (*put)(void *to, const char *key, int64_t value), void *to);
#endif
