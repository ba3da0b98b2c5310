/* A connection of a daemon: a non-blocking socket (Unix, TCP, TCP with TLS) whose bytes become records, and whose records become bytes, on the loop's thread.
 *
 * Reading: the first byte tells msgpack from JSON Lines (wire/stream), and what is put goes out in the same form. Descriptors that the peer sends wait in
 * a queue.
 * Writing: what is put is queued and written at the end of the loop's turn. The queue has a high mark. Above it the connection is full: it reads no more
 * itself (who does not read his answers can make no more requests), whoever feeds it stops, and goes on at `room`, below the low mark. A handler that does
 * not stop loses the connection at eight times the mark. Bytes that lie elsewhere (KV) are pulled when the queue is empty, and never copied.
 *
 * Ends: the end of the peer's writing is `ended`: no more requests, while answers still go out; the connection closes by itself once none is owed
 * (pd_conn_owe). The peer is gone when a write fails or the socket reports a hang-up or reset; records that it sent before are still given out, unless the
 * reading is held. `gone` is the last callback, comes once, never from inside a pd_conn function, and the connection is freed after it.
 *
 * Over TCP a killed peer looks like one that ended its writing, until something is written to it; TLS tells the two apart. A connection over TCP opens in the
 * background: what is put waits, nothing is read, and it is gone (PD_ENOWORKER; after a bad handshake PD_EFAIL) when it has not come to stand in five seconds.
 */
#ifndef PD_SERVE_CONN_H
#define PD_SERVE_CONN_H
#include "../base/loop.h"
#include "../base/metrics.h"
#include "../wire/stream.h"
#include "../wire/tls.h"

struct iovec;
struct pd_conn;
struct pd_conn_cb {     /* any may be NULL */
    int (*opened)(void *ctx, struct pd_conn *c, struct pd_err *e);              /* before the first record; < 0: refused with it, and no `gone` follows */
    void (*record)(void *ctx, struct pd_conn *c, const struct pd_rec *rec);     /* valid during the call */
    void (*stands)(void *ctx, struct pd_conn *c);                               /* dialled, and it stands now: only when pd_conn_dial left it opening */
    void (*bad)(void *ctx, struct pd_conn *c, const struct pd_err *why);        /* a line that is no record, to be skipped. NULL: an `error` record is put */
    void (*ended)(void *ctx, struct pd_conn *c);
    void (*room)(void *ctx, struct pd_conn *c);                                 /* it was full, and is no longer */
    /* pieces to be written now, whole records in the end; 0: none; < 0: close */
    int (*pull)(void *ctx, struct pd_conn *c, struct iovec *v, int max, struct pd_err *e);
    void (*pulled)(void *ctx, struct pd_conn *c, size_t n);                     /* bytes of them went */
    void (*drain)(void *ctx, struct pd_conn *c);                                /* the daemon drains. NULL: as if the peer had ended its writing */
    void (*gone)(void *ctx, struct pd_conn *c, const struct pd_err *why);       /* NULL: closed in good order */
    bool looks_on;      /* a draining daemon does not wait for it */
};

/* All connections of a daemon; zero-initialise. left: called after each that is freed. */
struct pd_conns { struct pd_conn *first; uint32_t n; void (*left)(void *ctx); void *ctx; };
struct pd_conn_meter { struct pd_metric *bytes_in, *bytes_out, *records_in, *records_out, *full; };     /* shared; each may be NULL */
struct pd_conn_opts {
    size_t max_record;          /* 0: 16 MiB */
    size_t high;                /* mark of the output queue, bytes; 0: 1 MiB. The low mark is a quarter */
    int max_fds;                /* that may wait to be taken, at most 64; 0: a peer that sends some is refused */
    /* This end asks and the other answers: it is read also while it is full, or two full ends would wait for each other for ever; and the mark closes it never:
     * who feeds it has a bound of his own. */
    bool asks;
    const char *name;           /* for messages: "unix:D0" */
    struct pd_conns *set;       /* or NULL */
    const struct pd_conn_meter *meter;
    const struct pd_net *net;   /* TCP: keys, and who may be talked to; or NULL */
};
/* Owns fd from here on (closed on failure too), a connected socket. ctx goes to every callback. *o: its pointers live as long as the connection. */
int pd_conn_new(struct pd_loop *l, int fd, const struct pd_conn_opts *o, const struct pd_conn_cb *cb, void *ctx, struct pd_conn **out, struct pd_err *e);
/* The same to where somebody listens. "unix:PATH": it must run as we do or as root. "tcp:HOST:PORT": the connection is left opening; a HOST that is a name is
 * looked up meanwhile, and what is wrong with it comes with `gone`. PD_ENOWORKER when nobody is there or its queue is full; try again by a timer. */
int pd_conn_dial(struct pd_loop *l, const char *at, const struct pd_conn_opts *o, const struct pd_conn_cb *cb, void *ctx, struct pd_conn **out,
                 struct pd_err *e);
int pd_conn_can_dial(const char *at, struct pd_err *e);         /* PD_EUSAGE: it is no such address, or too long for a socket. Nobody is asked */
/* Another handler from here on (dispatch); calls its `opened`. */
void pd_conn_handle(struct pd_conn *c, const struct pd_conn_cb *cb, void *ctx);
void pd_conn_set(struct pd_conn *c, void *user);
void *pd_conn_get(const struct pd_conn *c);

/* ---- writing ---- */
/* One msgpack record, converted for a JSON peer. PD_EFAIL: this record cannot be written as JSON. PD_ECANCEL: the peer is gone, or pd_conn_finish was
 * called. PD_ENOMEM: no memory, or far past the mark; the connection closes. n_fd descriptors may go with it, owned from here on whatever comes of it. */
int pd_conn_put(struct pd_conn *c, const void *rec, size_t n, struct pd_err *e);
int pd_conn_put_fds(struct pd_conn *c, const void *rec, size_t n, const int *fd, int n_fd, struct pd_err *e);
/* An `error` record with the class of why->code. run and action may be NULL. */
int pd_conn_put_error(struct pd_conn *c, const char *run, const struct pd_err *why, const char *action);
bool pd_conn_full(const struct pd_conn *c);
void pd_conn_want(struct pd_conn *c);           /* there is something to pull */
/* An answer is owed (n > 0), or was put (n < 0). */
void pd_conn_owe(struct pd_conn *c, int n);

/* ---- reading ---- */
void pd_conn_hold(struct pd_conn *c);           /* read no more, until each hold is taken back: what its records feed is full */
void pd_conn_unhold(struct pd_conn *c);
int pd_conn_take_fd(struct pd_conn *c);         /* the oldest that came with records up to now, or -1 */
/* The socket as it is (and what seals it: *tls, NULL on a plain one), with no byte read past the record in hand: only from the `record` callback of the first record, or of `opened` before it, of a
 * connection that the dispatcher made, and in msgpack. The connection is freed without `gone`. < 0: not possible any more. */
int pd_conn_detach(struct pd_conn *c, struct pd_tls **tls, struct pd_err *e);

/* ---- ends ---- */
void pd_conn_end_input(struct pd_conn *c);      /* as if the peer had ended its writing */
void pd_conn_finish(struct pd_conn *c);         /* nothing more will be put: close once all is written */
void pd_conn_refuse(struct pd_conn *c, const struct pd_err *why);       /* tell the peer why, and finish */
void pd_conn_close(struct pd_conn *c, const struct pd_err *why /* or NULL */);  /* now; what waits is lost. `gone` follows */
void pd_conn_free(struct pd_conn *c);           /* at the end of the program, from outside the loop: without any callback */

/* ---- facts ---- */
bool pd_conn_is_json(const struct pd_conn *c);
bool pd_conn_ended(const struct pd_conn *c);    /* no more records will come */
bool pd_conn_open(const struct pd_conn *c);     /* what is put can still reach the peer */
bool pd_conn_opening(const struct pd_conn *c);  /* it does not stand yet */
int pd_conn_fd(const struct pd_conn *c);        /* to ask about it */
bool pd_conn_is_tcp(const struct pd_conn *c);
int pd_conn_pid(const struct pd_conn *c);       /* of the peer when it connected; 0: unknown */
int64_t pd_conn_since(const struct pd_conn *c); /* mono us */
uint32_t pd_conn_owed(const struct pd_conn *c);
const struct pd_conn_cb *pd_conn_handler(const struct pd_conn *c);
struct pd_conn *pd_conn_next(const struct pd_conn *c);  /* in its set */
/* For the dispatcher: the first record is read with no byte after it. */
void pd_conn_exact(struct pd_conn *c, bool exact);
void pd_conn_drain(struct pd_conn *c);          /* calls the handler's drain */
#endif
