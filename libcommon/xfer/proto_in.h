/* Inside the protocol: the connection (proto.c) and its two ends (give.c, take.c). */
#ifndef PD_XFER_PROTO_IN_H
#define PD_XFER_PROTO_IN_H
#include "../base/seen.h"
#include "proto.h"

enum move_state {
    M_OFFERED,          /* give: no answer yet.            take: the caller has to answer */
    M_WAITING,          /* take: the offer's slabs are not mapped yet */
    M_MOVING,           /* give: accepted, chunks leave.   take: accepted, chunks come */
    M_CLOSED,           /* give: all is sent, kv too.      take: kv came, the rest is being verified */
    M_VERIFIED,         /* give: the peer verified it.     take: verified; in place it is being read */
    M_RELEASING,        /* take: released, not acknowledged */
    M_CANCELLING,       /* cancelled here, not acknowledged */
    M_OVER
};
enum { QUEUE = 4 };     /* events of one move that can wait: OFFERED/ACCEPTED, TAKEN/VERIFIED, a last one */

struct pd_move {
    struct pd_xfer *x;
    struct pd_move *next;
    enum move_state state;
    char run[PD_RUN_LEN + 1];
    uint8_t gen[PD_GEN_LEN], lease[PD_LEASE_ID_LEN];
    bool has_lease;                     /* on the wire (take); give always has one */
    bool in_place;                      /* the taker reads it where the giver has it */
    const struct pd_transport *tr;
    void *path;
    void *user;
    int64_t since, deadline;            /* last progress; absolute, 0: none */
    struct pd_xfer_event q[QUEUE];
    uint32_t n_q;
    uint64_t bytes;                     /* of payload that went or came */
    uint64_t wire;                      /* give: what of it went over a connection, as it is coded there */
    /* give */
    struct pd_plan plan;
    uint32_t *blocks;
    struct pd_kvdesc head;              /* run, gen, layout, payload, lease: what chunks need */
    struct pd_arena arena;              /* give: payload runs, lease map. take: the descriptor */
    uint64_t *ready, *skip;             /* a bit a chunk: complete; sent or not wanted */
    uint32_t n_left, at;                /* chunks to be sent; where to look next */
    struct pd_buf kv;                   /* the closing record, once finished */
    bool reading;                       /* the ledger counts us as a reader */
    bool fencing;                       /* the ledger waits for pd_lease_fenced */
    int64_t renew_at, renew_us, ttl_us;
    /* It is over, and memory is in use yet: its last event waits. Giving: until no write of it is under way; taking: until the peer writes there no more, at
     * most until then. */
    bool draining;
    int64_t drain_until;
    /* take */
    struct pd_kvdesc desc;
    struct pd_import *im;
    struct pd_slabs *from;
    uint32_t *from_blocks;              /* while waiting and offered */
    uint64_t *sums, *named, *told;      /* shm, rdma: [n_chunks]; a bit a chunk: its sum came; and it is there, to be verified */
    uint32_t n_told;                    /* chunks whose sum came and that are not verified */
    struct waiting { uint32_t seq, chunk0, chunks; } *waits; uint32_t n_waits, cap_waits, n_awaited;  /* of those: n_awaited that have not landed yet */
    bool targeted;                      /* the peer may write into its blocks */
    bool all_done, verified, lost;
    bool again;                         /* read here since a connection before this one: it has no import */
    bool told_again;                    /* it is the release of one that another connection carried */
    int64_t lease_until;                /* by our clock */
};

struct pd_xfer {
    struct pd_xfer_opts o;
    enum { X_GREETING, X_OPEN, X_CLOSED } state;
    struct pd_err why;                  /* closed */
    bool closed_told, ready_told;
    struct pd_err advisory;
    int64_t opened, now, ready_by;      /* ready_by: streams that are on their way are waited for until then */
    struct pd_hello mine, theirs;
    struct pd_arena my_arena, their_arena;
    const struct pd_transport *via[4];
    void *path[4];
    void *greeted[4];                   /* by the order of mine.via: made before hello, not in use (yet) */
    struct pd_err dead[4];              /* its path failed: why */
    struct pd_err unused[PD_TRANSPORTS];        /* by number: allowed here, and not in use: why */
    uint32_t n_via;
    bool streams;                       /* one of them is tcp */
    struct { int fd; struct pd_tls *tls; } early[PD_XFER_STREAMS_MAX]; uint32_t n_early;    /* streams that came before the peer's hello */
    int all;                            /* an epoll of their descriptors, where there are several; or -1 */
    char via_text[256];
    struct pd_out out;
    struct pd_coding coding;
    bool unpolled;                      /* a transport has more to look at than it took in one go */
    uint64_t pulled;                    /* payload bytes hashed in this call of pd_xfer_iov */
    struct pd_move *moves, **moves_end, *turn;  /* all, the oldest first, so that their events come in that order; whose chunk is next */
    struct pd_seen gone;                /* run and gen of moves that are over */
    struct pd_xfer_counts n;
    struct pd_move *dying;              /* its last event was given */
    struct pd_move spare;               /* taking: of an offer for which there is no other, so that its refusal is told here too; x NULL: free */
};

#define BIT(w, i) ((w)[(i) / 64] >> ((i) % 64) & 1)
#define SET_BIT(w, i) ((w)[(i) / 64] |= (uint64_t)1 << ((i) % 64))

/* proto.c. Each entry from outside sets x->now; inside it is the time. */
/* the connection ends; returns code, x->why has the words */
int pd_x_fatal(struct pd_xfer *x, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
struct pd_move *pd_x_find(struct pd_xfer *x, const char *run, const uint8_t *gen /* NULL: any */);
struct pd_move *pd_x_new(struct pd_xfer *x, const char *run, const uint8_t *gen, struct pd_err *e);
struct pd_move *pd_x_spare(struct pd_xfer *x, const char *run, const uint8_t *gen);     /* the one kept for refusals; NULL: it is on its way */
void pd_x_drop(struct pd_move *m);               /* one that nobody has heard of */
int pd_x_retire(struct pd_xfer *x, const char *run, const uint8_t *gen);          /* from now on gone */
bool pd_x_gone(const struct pd_xfer *x, const char *run, const uint8_t *gen);
/* The move that a record names. NULL: late (*rc 0, counted), or of no move that is known (*rc < 0: the connection has ended). */
struct pd_move *pd_x_named(struct pd_xfer *x, const char *what, const char *run, const uint8_t *gen, int *rc);
int pd_x_illegal(struct pd_move *m, const char *what);                          /* a record that its state does not allow: fatal */
int pd_x_malformed(struct pd_xfer *x, int rc, const struct pd_err *e);          /* a record that does not decode: fatal */
void pd_x_event(struct pd_move *m, enum pd_xfer_event_kind k, const struct pd_err *err);        /* the last ones end the move */
void pd_x_fail(struct pd_move *m, const struct pd_err *why, const char *action /* told to the peer; NULL: it is not told */);
/* One record out; a failure ends the connection. put: after an encoder gave rc, *e. */
int pd_x_put(struct pd_xfer *x, int rc, const struct pd_err *e);
int pd_x_put_error(struct pd_xfer *x, const char *run, const uint8_t *gen, const struct pd_err *why, const char *action);
int pd_x_put_status(struct pd_xfer *x, const char *run, const uint8_t *gen, const char *state, const uint8_t *lease, uint64_t bytes);
int pd_x_put_cancel(struct pd_move *m, const char *cause);

/* hello.c */
int pd_x_hello_make(struct pd_xfer *x, struct pd_err *e);       /* our own, less the fingerprint's: x->o is set */
int pd_x_hello(struct pd_xfer *x, const void *rec, size_t n);   /* theirs: the ways are chosen and open */
void pd_x_hello_forget(struct pd_xfer *x);      /* what transports have said in ours and is not used */
void pd_x_tell_via(struct pd_xfer *x, char open, const char *text);     /* one more word in via_text; '(': in brackets */

/* give.c */
int pd_x_give_accept(struct pd_xfer *x, const void *rec, size_t n);
int pd_x_give_verified(struct pd_xfer *x, const void *rec, size_t n);
int pd_x_give_release(struct pd_xfer *x, const void *rec, size_t n);
int pd_x_give_renew(struct pd_move *m, const struct pd_status *s);
void pd_x_give_end(struct pd_move *m);          /* nothing of it reads the pool any more, or it is draining */
void pd_x_give_drained(struct pd_move *m);      /* nothing does */
int pd_x_give_pull(struct pd_xfer *x);          /* queue the next chunk or kv. 1: something was queued; 0: nothing is ready */
void pd_x_give_tick(struct pd_move *m);
int64_t pd_x_give_next(const struct pd_move *m);

/* take.c */
int pd_x_take_offer(struct pd_xfer *x, const void *rec, size_t n);
int pd_x_take_chunk(struct pd_xfer *x, const void *rec, size_t n);
int pd_x_take_done(struct pd_xfer *x, const void *rec, size_t n);
int pd_x_take_kv(struct pd_xfer *x, const void *rec, size_t n);
void pd_x_take_end(struct pd_move *m);          /* drops what came */
void pd_x_take_landed(struct pd_xfer *x, uint32_t via);         /* more has landed by that transport */
bool pd_x_take_placed(struct pd_xfer *x, uint32_t via);         /* chunks that have come over its streams: true when there was one */
void pd_x_take_mapped(struct pd_xfer *x, const struct pd_err *none);    /* new memory came; none: why no more will */
void pd_x_take_tick(struct pd_move *m);
int64_t pd_x_take_next(const struct pd_move *m);
#endif
