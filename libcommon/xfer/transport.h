/* How payload gets from the memory of one end into that of the other: one table of functions a scheme (inline, shm; tcp, rdma, cuda, nixl have their place
 * here).
 *
 * The protocol (proto.h) decides what is sent and when, owns runs, leases, deadlines; a transport knows only how. A table's functions are called by the one
 * thread that owns the connection and never block. `void *path` is the transport's state of one connection, made by greet or open.
 * Giving end: reg, offer, aim, send, fence. Taking end: ready, poll, land, landed, placed, withdraw. Both: the others. NULL where there is nothing to do. */
#ifndef PD_XFER_TRANSPORT_H
#define PD_XFER_TRANSPORT_H
#include "../kv/codec.h"
#include "../kv/handover.h"
#include "../kv/lease.h"
#include "../wire/transfer.h"
#include "out.h"

enum { PD_XFER_STREAMS = 4, PD_XFER_STREAMS_MAX = 16 };         /* of tcp, beside the connection */
struct pd_xfer_opts;
struct pd_tls;
/* A chunk of a hand-over has come whole, into its place; or cannot (err). */
struct pd_placed { const void *owner; uint32_t index; uint64_t xxh3; struct pd_err err; };
/* How a connection codes what it sends as chunk records; made when the first payload says zstd. */
struct pd_coding { struct pd_codec *codec; struct pd_codec_rule rule; uint64_t bytes /* of the chunk that is being written */; int64_t since; };

/* One hand-over, as the giving end's transport sees it. */
struct pd_sending {
    const struct pd_pool *pool;
    const struct pd_plan *plan;
    const uint32_t *blocks;             /* [plan->n_blocks] */
    const struct pd_kvdesc *desc;       /* run, gen, layout are set */
    const void *owner;                  /* names it to pd_out */
    struct pd_coding *coding;
};

struct pd_transport {
    const char *scheme;
    bool borrows;                       /* the taker reads the giver's memory: the offer names a lease, and the taker renews it */
    bool sums;                          /* payload does not come in chunk records: `done` says which chunks are there, with their checksums */
    /* Before the hello goes: say in it how this end is reached. What it allocates for that lives in the arena. *path NULL: it cannot be used, and hello says why. */
    int (*greet)(const struct pd_xfer_opts *o, struct pd_hello *mine, struct pd_arena *a, void **path, struct pd_err *e);
    /* Whether the two ends can use it: 0, or PD_EINCOMPAT with the reason. */
    int (*usable)(const struct pd_hello *mine, const struct pd_hello *theirs, const struct pd_xfer_opts *o, struct pd_err *e);
    int (*open)(const struct pd_xfer_opts *o, const struct pd_hello *theirs, void **path, struct pd_err *e);
    int (*stream)(void *path, int fd, struct pd_tls *tls, struct pd_err *e);   /* one that the peer has dialled, which is the path's from here on */
    int (*up)(void *path, const char **why);   /* it can carry something: 1 now, 0 soon perhaps, < 0 no more: why. NULL: always */
    int (*fd)(void *path);              /* readable when progress has something to do, after it was called */
    /* Look what has come to its end. 2: something, and there is more, of which `fd` says nothing; 1: something; 0: nothing. < 0: the path is broken, and with it
     * the connection. */
    int (*progress)(void *path, struct pd_err *e);
    /* Giving: something still reads the blocks of that hand-over. Taking: the peer may still write there. */
    bool (*busy)(void *path, const void *owner);
    void (*shut)(void *path);           /* the connection is over: nothing of it touches memory from here on */
    /* Giving. reg: memory that is new since the last call becomes known to the peer (sock: a raw socket of its own). 0: all is known; 1: go on when it can be
     * written. */
    int (*reg)(void *path, int sock, const struct pd_pool *pool, const struct pd_leases *leases, struct pd_err *e);
    /* Fill the offer's payload: scheme, where, runs; what it points to lives in the arena. */
    int (*offer)(void *path, const struct pd_sending *s, struct pd_payload *y, struct pd_arena *a, struct pd_err *e);
    /* The accept says where it is to be written. */
    int (*aim)(void *path, const struct pd_sending *s, const struct pd_accept *r, struct pd_err *e);
    void (*decline)(void *path, const struct pd_accept *r);     /* it came too late: nothing will be written there */
    /* Send up to n neighbouring chunks from `index`; *sent of them went (or are queued). */
    int (*send)(void *path, const struct pd_sending *s, uint32_t index, uint32_t n, struct pd_out *out, uint32_t *sent, struct pd_err *e);
    /* No more of it: afterwards nothing reads its blocks, and what was under way ends as it must. PD_ENOMEM: the connection is to be closed. */
    int (*fence)(void *path, const void *owner, struct pd_out *out, struct pd_err *e);
    /* Taking. poll: read what came on the raw socket. 1: memory was mapped; 0: nothing for now; PD_ECANCEL: closed. */
    int (*poll)(void *path, int sock, struct pd_err *e);
    /* Is the memory that an offer names at hand? 0, and *from, blocks[n_blocks] for pd_import_opts; 1: not yet. */
    int (*ready)(void *path, const struct pd_payload *y, uint32_t n_blocks, struct pd_slabs **from, uint32_t *blocks, struct pd_err *e);
    /* Let the peer write what is missing of an import; fills target, rkeys and tag. withdraw: it cannot any more, from here on. */
    int (*land)(void *path, const void *owner, const struct pd_pool *pool, struct pd_import *im, struct pd_accept *r, struct pd_arena *a, struct pd_err *e);
    void (*withdraw)(void *path, const void *owner);
    uint32_t (*landed)(void *path);     /* number of the last group that is there, of those that `done` names; they count from 1 to PD_XFER_SEQ_MAX, and again */
    bool (*placed)(void *path, struct pd_placed *out);  /* payload that came over streams: the next chunk that is there, to be checked at once */
    struct pd_view *(*view)(void *path);        /* the control page of the leases that it borrows under (../kv/control.h); the path's, NULL: none came */
    void (*close)(void *path);
};
#define PD_XFER_SEQ_MAX 0x7fffffffu
extern const struct pd_transport pd_inline, pd_shm, pd_tcp, pd_rdma;
enum { PD_TRANSPORTS = 4 };
extern const struct pd_transport *const pd_transports[PD_TRANSPORTS];
int pd_transport_number(const char *scheme);             /* its place there */
const struct pd_transport *pd_transport_find(struct pd_str scheme);     /* NULL: none is called so */
int pd_via_check(const char *via, struct pd_err *e);    /* a list for --via: PD_EUSAGE names what is no transport */
/* What is used where nobody says --via, best first: shm over a Unix socket, rdma (where there is a device) and tcp over TCP, inline. Static text. */
const char *pd_via_default(bool unix_socket, bool tcp);
#endif
