/* The transfer protocol, HELLO to CANCEL (04-kv; pd-kv.5): one object a connection, the same at both ends.
 *
 * It is fed records and asked for bytes; it opens, reads and writes no socket (but for descriptors of shm: pd_xfer_fds), knows no clock and never blocks. The
 * caller, one thread, does:
 *     readable:  frame, pd_xfer_feed each record; a result < 0 says that the connection is over: write what waits, then close
 *     writable:  pd_xfer_iov, writev, pd_xfer_wrote
 *     always:    pd_xfer_work a little (verifies shm and rdma payload), pd_xfer_poll when pd_xfer_fd says so, pd_xfer_event until there is none, sleep until pd_xfer_next, pd_xfer_tick
 *     end of file or error of the socket: pd_xfer_lost
 * One end gives (role prefill), the other takes (decode). Each hand-over is a `pd_move`, known to the caller from pd_give or from its first event. An event
 * with `last` set is its last: the move is freed at the next call of pd_xfer_event, and with it what it still owns.
 *
 * Giving: the KV is under a lease of the caller's ledger, which the caller granted, filled and publishes. The move reads under it, renews it while it sends,
 * takes the peer's renewals, and releases it when the peer has. Revoking or expiring the lease fences the move and tells the peer (cancel).
 * Taking: nothing is usable before PD_XE_TAKEN: every chunk verified, and the closing kv repeats the offer. An offer that is refused here without the caller
 * (it does not fit what the two said hello with, there is no memory) is a PD_XE_FAILED of a move that he has not heard of: pd_move_desc says whose it was. Failures that concern one run are told to the
 * peer (error record with run and gen) and end that move alone; a record that cannot be (illegal in its state, malformed, of an unknown run) ends the
 * connection with an error record without a run, and every move with it. Late records of a move that is over are counted and dropped. */
#ifndef PD_XFER_PROTO_H
#define PD_XFER_PROTO_H
#include "../wire/tcp.h"
#include "transport.h"

#define PD_XFER_MOVES 1024      /* open at once on one connection */
enum { PD_XFER_CAPS = 5 };
extern struct pd_str pd_xfer_caps[PD_XFER_CAPS];        /* what hello says that this end can do; of one that takes, what it converts besides (pd_conv_caps) */

struct pd_xfer_opts {
    bool giving;                        /* role prefill; else decode */
    bool relay;                         /* a filter that hands on what others made: generations of any life pass (cap `relay`) */
    bool probe;                         /* giving: what is given is a measurement and is dropped where it was verified (cap `probe`) */
    bool unix_socket;                   /* descriptors can pass */
    bool tcp;                           /* the connection is one over TCP: streams of data may stand beside it */
    bool dialled; struct pd_tcp_addr peer;      /* we dialled it, there (pd_xfer_dialled): the streams are ours to dial */
    const struct pd_net *net;           /* their keys; or NULL */
    uint32_t streams;                   /* how many; 0: PD_XFER_STREAMS */
    const char *via;                    /* schemes that may be used, best first; NULL: pd_via_default */
    const char *worker, *domain;        /* may be NULL */
    uint64_t epoch;
    struct pd_bin fp_fields;            /* own fingerprint map; alive as long as the connection */
    unsigned convert;                   /* taking: PD_CONV_* (../kv/convert.h) of what the giver's layout may differ in */
    enum pd_codec_mode codec;           /* giving: how chunk records go (inline), to a taker that can decode them */
    struct pd_pool *pool;               /* giving: payload is read from it; taking: written to it */
    struct pd_leases *leases;           /* giving: the ledger */
    int32_t peer_pid; uint64_t peer_start;      /* of a peer on this host (SO_PEERCRED, pd_proc_start), for the reconciler; or 0 */
    /* Limits, us; 0: the default. hello 2 s: until the peer's hello, and then, giving by tcp, until a stream of data stands; accept 5 s: until an offer is answered, or its slabs are mapped; stall 30 s: without
     * progress; cancel 1 s: until a cancel is acknowledged. */
    int64_t hello_us, accept_us, stall_us, cancel_us;
};

enum pd_xfer_event_kind {
    PD_XE_READY,        /* hellos agree, and what is given next goes by the best way that there is (pd_xfer_via); err holds advisory differences, or nothing (code 0) */
    PD_XE_CLOSED,       /* the connection is over; err says why. Every move has had its last event */
    PD_XE_OFFERED,      /* taking: answer with pd_take or pd_take_refuse */
    PD_XE_ACCEPTED,     /* giving: the peer wants it; bytes: what will be sent */
    PD_XE_TAKEN,        /* taking: verified, kv in pd_move_desc, blocks by pd_take_blocks. bytes: payload that came */
    PD_XE_VERIFIED,     /* giving: the peer has verified it */
    PD_XE_RELEASED,     /* giving: the lease is released, last. taking: the giver knows, last */
    PD_XE_UNACKED,      /* taking, last: verified and used, but the connection died before the giver said that it knows: pd_xfer_commit on the next one */
    PD_XE_FAILED,       /* last. err: class and words. Taking, connection lost: pd_take_park keeps what was verified */
    PD_XE_CANCELLED     /* last. Cancelled by either end, or the lease ended: err says by what; bytes: what had gone */
};
struct pd_move;
struct pd_xfer;
struct pd_xfer_event { enum pd_xfer_event_kind kind; bool last; struct pd_move *move /* NULL: of the connection */; struct pd_err err; uint64_t bytes; };

int pd_xfer_new(const struct pd_xfer_opts *o, int64_t now, struct pd_xfer **out, struct pd_err *e);     /* its hello waits to be written */
void pd_xfer_free(struct pd_xfer *x);           /* as lost, without events */
void pd_xfer_dialled(struct pd_xfer *x, int fd);        /* where the connection goes, once it stands and before anything is fed */
/* A stream that the peer has dialled (its first record was a hello whose `attach` is pd_xfer_conn(x, false)). Owned from here on, whatever comes of it. */
int pd_xfer_stream(struct pd_xfer *x, int fd, struct pd_tls *tls, int64_t now, struct pd_err *e);
int pd_xfer_feed(struct pd_xfer *x, const void *rec, size_t n, int64_t now, struct pd_err *e);          /* one framed record (wire/stream) */
void pd_xfer_lost(struct pd_xfer *x, const char *why, int64_t now);
void pd_xfer_tick(struct pd_xfer *x, int64_t now);
int64_t pd_xfer_next(const struct pd_xfer *x);  /* when tick has something to do; INT64_MAX: never */
bool pd_xfer_event(struct pd_xfer *x, struct pd_xfer_event *ev);
/* What to write now: at most max pieces, 0: nothing. Valid until the next call of anything else. < 0: the connection is over. */
int pd_xfer_iov(struct pd_xfer *x, struct iovec *v, int max, int64_t now, struct pd_err *e);
void pd_xfer_wrote(struct pd_xfer *x, size_t n, int64_t now);
/* The raw socket for descriptors (both directions of use, see pd-kv.5): giving, after READY and after each pd_give: 0 all passed, 1 go on when writable.
 * Taking, when readable: 0. < 0: shm is over on this connection (moves that wait for it fail); close the raw socket. */
int pd_xfer_fds(struct pd_xfer *x, int sock, int64_t now, struct pd_err *e);
/* Payload that goes beside the connection (rdma, tcp): a descriptor to be watched for reading besides the connection's own, or -1; it may be another one after
 * READY, and is gone when the connection is over. When it is readable, and once after READY and after each pd_take: pd_xfer_poll. */
int pd_xfer_fd(const struct pd_xfer *x);
void pd_xfer_poll(struct pd_xfer *x, int64_t now);
/* Verify up to about `bytes` of payload that lies in mapped memory. true: there is more. */
bool pd_xfer_work(struct pd_xfer *x, size_t bytes, int64_t now);

bool pd_xfer_open(const struct pd_xfer *x);     /* READY came, and it is not closed */
const struct pd_hello *pd_xfer_peer(const struct pd_xfer *x);   /* after READY */
const uint8_t *pd_xfer_conn(const struct pd_xfer *x, bool peers);       /* the 16 bytes that `attach` names */
const char *pd_xfer_via(const struct pd_xfer *x);       /* "shm, inline" or "inline (shm: the two ends are not on one host)" */
bool pd_hello_can(const struct pd_hello *h, const char *cap);
/* A whole record of another kind, between what the protocol says: of ends that both know it. */
int pd_xfer_say(struct pd_xfer *x, const void *rec, size_t n, struct pd_err *e);
const char *pd_xfer_scheme(const struct pd_xfer *x, uint32_t i);        /* the i-th best of those in use; NULL: no more */
const char *pd_xfer_unused(const struct pd_xfer *x, const char *scheme);        /* after READY: why it carries nothing, though this end allows it; NULL: it does, as far as is known */
const struct pd_hello *pd_xfer_own(const struct pd_xfer *x);    /* what this end said */
struct pd_xfer_counts { uint64_t late, bytes_out, bytes_in, detours /* taking: KV that came another way than offered */; uint32_t moves; };
struct pd_xfer_counts pd_xfer_counts(const struct pd_xfer *x);

/* ---- giving ---- */
/* Offer a KV. desc: all but payload and lease, which are filled in here; needed during the call only. blocks: those of the lease. via: a scheme, or NULL for
 * the best; deadline: absolute, 0 none. Nothing is sent before its chunk is ready. PD_EINCOMPAT: no such scheme here; PD_ETIME: the lease has ended. */
struct pd_give { const struct pd_kvdesc *desc; const uint32_t *blocks; uint32_t chunk_blocks /* 0: about 1 MiB */; uint8_t lease[PD_LEASE_ID_LEN]; const char *via; int64_t deadline; };
int pd_give(struct pd_xfer *x, const struct pd_give *g, int64_t now, struct pd_move **m, struct pd_err *e);
void pd_give_ready(struct pd_move *m, uint32_t chunk0, uint32_t n);     /* these chunks are complete in the pool */
/* All chunks are; kv: the offer's descriptor with `first` and `t`. Publishes the lease. */
int pd_give_finish(struct pd_move *m, const struct pd_kvdesc *kv, struct pd_err *e);
void pd_give_until(struct pd_move *m, int64_t deadline);        /* another deadline than pd_give said */
const struct pd_plan *pd_give_plan(const struct pd_move *m);
uint64_t pd_give_wire(const struct pd_move *m);                 /* bytes of payload that went over the connection, or beside it, coded as they went; shm: none */
bool pd_give_in_place(const struct pd_move *m, int32_t *pid, uint64_t *start);  /* the peer reads it where it lies; who that is, as pd_xfer_opts has it */

/* ---- taking ---- */
/* Accept. held: blocks of the pool that hold the beginning already. in_place: read full blocks where the giver has them, when that can be (shm, one shape).
 * resume: an import that pd_take_park gave; owned by the move from here on, also after a failure. again: it is here, verified, and read in place since a
 * connection before this one; nothing of it is sent, TAKEN brings no blocks, and from then on this connection renews its lease. Failures leave the move failed
 * and the peer told. may_wait: 1 when others hold too many of the pool's blocks now; nothing has happened then. */
struct pd_take { const uint32_t *held; uint32_t n_held; bool in_place, may_wait, again; struct pd_import *resume; int64_t deadline; };
int pd_take(struct pd_move *m, const struct pd_take *t, int64_t now, struct pd_err *e);
void pd_take_refuse(struct pd_move *m, int code, const char *why, int64_t now);
uint32_t *pd_take_blocks(struct pd_move *m, uint32_t *n);       /* after TAKEN, once: block table (pd_free) and a reference of each, now the caller's */
unsigned pd_take_converts(const struct pd_move *m);             /* PD_CONV_* that are converted in it */
bool pd_take_in_place(const struct pd_move *m);                 /* some of them are read where the giver has them: pd_take_valid before each token leaves */
/* Still the offered generation, under a lease that has not run out? What was read before the call is good. */
bool pd_take_valid(const struct pd_move *m, int64_t now);
struct pd_view *pd_take_view(const struct pd_move *m);          /* in place: the control page that says so, for who reads the KV; a reference of it */
/* In place: when its lease runs out, as far as is known here. 0: it has ended. At PD_XE_FAILED: the connection was lost, and nothing else; the KV may be read
 * until then, while its control word stands. */
int64_t pd_take_until(const struct pd_move *m);
/* In place: the last use is over, the references are dropped. Of an offer: it was taken before, and is not needed any more. */
void pd_take_release(struct pd_move *m, int64_t now);
const struct pd_import *pd_take_import(const struct pd_move *m);       /* after pd_take, until the move is over or its blocks were taken: what has come; or NULL */
struct pd_import *pd_take_park(struct pd_move *m);              /* at PD_XE_FAILED by loss: the part that was verified, or NULL; pd_import_free */
const struct pd_kvdesc *pd_move_desc(const struct pd_move *m);  /* taking: the offer, from TAKEN on the kv */
size_t pd_move_memory(const struct pd_move *m);                 /* taking: what its offer takes here, until it is answered */
uint32_t pd_take_held(const struct pd_move *m);                 /* of `held`, the blocks that are used and were not sent; until TAKEN is dealt with */
/* Tell the giver, on a new connection, what UNACKED left open. lease: of the offer; NULL where it named none. A move of its own, whose only event is RELEASED,
 * or UNACKED again. PD_ENOMEM: too many are open. */
int pd_xfer_commit(struct pd_xfer *x, const char *run, const uint8_t gen[PD_GEN_LEN], const uint8_t *lease, int64_t now, struct pd_err *e);
bool pd_xfer_releasing(struct pd_xfer *x, const char *run, const uint8_t gen[PD_GEN_LEN]);     /* said there, and not acknowledged */

/* ---- both ---- */
/* Stop it; cause: static text. Giving: revokes the lease. The move ends with CANCELLED when the peer has acknowledged, or after cancel_us. */
void pd_move_cancel(struct pd_move *m, const char *cause, int64_t now);
const char *pd_move_run(const struct pd_move *m);
const uint8_t *pd_move_gen(const struct pd_move *m);
const uint8_t *pd_move_lease(const struct pd_move *m);          /* NULL: it has none on the wire (inline) and is taken */
const char *pd_move_state(const struct pd_move *m);
const char *pd_move_scheme(const struct pd_move *m);
void pd_move_set(struct pd_move *m, void *user);
void *pd_move_get(const struct pd_move *m);
#endif
