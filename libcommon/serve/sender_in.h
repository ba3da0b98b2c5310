/* Inside pd-kvsend's object: runs (sender_run.c), senders (sender_src.c), receivers (sender_dst.c), the loop (sender.c). One thread owns it all. */
#ifndef PD_SERVE_SENDER_IN_H
#define PD_SERVE_SENDER_IN_H
#include "../base/seen.h"
#include "../kv/dump.h"
#include "redial.h"
#include "sender.h"
#include "sender_chan.h"

enum {
    SEND_HIGH = 1 << 20,        /* bytes that wait in front of a receiver before its senders wait too */
    SEND_TURN = 1024,           /* records that are read from one peer before others have their turn */
    SEND_TURN_BYTES = PD_CHAN_TURN      /* and bytes */
};
#define SEND_SILENCE_US 30000000        /* a peer that says nothing for so long is gone */
#define SEND_PATIENT_US ((int64_t)1 << 50)      /* no limit of the transfer's own: a slow peer that is alive is waited for */

struct send;
struct send_dst;

/* Pools, one a layout. */
struct send_store { struct send_store *next; struct pd_kv_layout layout; struct pd_pool *pool; };

/* A run at one receiver. */
enum send_out_state { SO_NEW, SO_GOING, SO_DONE };
struct send_out {
    struct send_run *r;
    struct send_dst *d;
    enum send_out_state state;
    struct pd_plan plan;                /* of what goes out */
    bool told;                          /* plain: its offer has gone */
    uint32_t at;                        /* chunks before it have gone (plain) or are told to be ready (giving) */
    /* giving */
    struct pd_move *m;                  /* NULL: none under way */
    uint8_t lease[PD_LEASE_ID_LEN];
    bool leased, released, finished;    /* released: the peer has verified it and said so */
    uint32_t tries;
    char scheme[12];
    uint64_t sent, skipped, wire;
    int64_t offered_us, accepted_us, first_us, verified_us;
};

enum send_run_state { SR_NEW /* its KV has nowhere to lie yet */, SR_OPEN, SR_CLOSED /* all came */, SR_SPOILT };
struct send_run {
    struct send_run *next;
    struct send *s;
    struct send_src *src;               /* NULL: it is gone */
    uint32_t from;                      /* the sender's number */
    enum send_run_state state;
    bool pass;                          /* chunks go on as they come, nothing is kept */
    bool kv_came;                       /* spoilt: nothing of it comes any more */
    bool drop;                          /* a probe's: verified, and no more */
    struct pd_arena mem;
    struct pd_kvdesc desc;              /* the offer as it came */
    struct pd_buf offer;                /* its bytes, until it has begun */
    struct send_store *st;
    struct pd_plan plan;                /* of what comes */
    struct pd_import *im;               /* ours; or the move's: */
    struct pd_move *m;
    uint32_t *blocks, n_blocks;         /* once all came */
    struct pd_arena kv_mem;
    struct pd_kvdesc kv;                /* the closing record */
    int64_t came_us, closed_us;
    uint32_t n_out;
    struct send_out out[];
};

/* What a carried record became, until it was handed on (taking) or acknowledged (giving). */
struct send_kept { struct send_kept *next; uint64_t seq; bool end; size_t n; uint8_t rec[]; };

enum send_src_state { SS_PLAIN, SS_TAKING, SS_LOST /* waits to be dialled again */, SS_ENDED };
struct send_src {
    struct send *s;
    struct send_src *next;
    struct pd_chan c;
    struct pd_endpoint ep;
    struct pd_dump_r *dump;
    enum send_src_state state;
    uint32_t number;
    bool probe, relay, dialled;
    bool end_seen, end_came;            /* its end is among what is carried; and was handed on */
    struct send_run *waits;             /* plain: nothing is read before this one has begun */
    uint8_t life[8]; char peer[120];    /* of a taking one: whoever dials again with both is the same peer */
    int64_t until, again;               /* lost */
    struct pd_redial *dial;             /* it is being dialled, or NULL */
    struct pd_buf fp;                   /* fingerprint of its hello */
    struct send_store *st;
    struct send_kept *carried, **carried_end;
    size_t carried_bytes;
    uint64_t seq, acked;                /* last one that came, that was handed on */
    struct pd_seen taken;               /* run and generation of what was taken whole */
    struct { char run[PD_RUN_LEN + 1]; uint8_t gen[PD_GEN_LEN], lease[PD_LEASE_ID_LEN]; bool has_lease; } *unacked; uint32_t n_unacked;
    uint64_t dropped;                   /* stray chunks */
    char told_run[PD_RUN_LEN + 1];
    uint64_t probe_bytes, probe_runs;
};

enum send_dst_state { SD_WAIT /* for its peer */, SD_PLAIN, SD_ASKING, SD_GIVING, SD_DOWN, SD_DUMP, SD_OVER };
struct send_dst {
    struct send *s;
    const char *spec, *via;
    enum send_dst_state state;
    struct pd_chan c;
    struct pd_endpoint ep;
    struct send_listener *l;
    bool may_ask, ending;
    struct pd_out out;                  /* plain */
    struct pd_buf json;
    struct pd_codec *codec;             /* NULL: none */
    struct pd_codec_rule rule;
    int64_t chunk_us; uint64_t chunk_bytes;     /* the chunk that is being written: since when */
    struct pd_dump_w *dump;
    uint64_t lost;                      /* records that it has no place for */
    /* giving */
    struct send_store *st;
    struct pd_leases *leases;
    struct pd_buf fp;
    uint64_t epoch;
    char name[120];                     /* ours, and which of our receivers it is: what we are known by when we dial again */
    struct send_kept *kept, **kept_end;
    size_t kept_bytes;
    uint64_t seq, acked;
    bool end_sent, relay;
    uint32_t drops, drops_row;          /* in all; since a run last arrived */
    int64_t until, again, pause;        /* down */
    char why[160];                      /* why the last one ended */
    struct pd_redial *dial;             /* it is being dialled, or NULL */
    int64_t renew_at;
    bool told_via;
};

/* Somebody who came, and has not said yet what for. */
struct send_guest { struct send_guest *next; struct pd_chan c; struct send_listener *l; int64_t since; bool shaken, answered; };
struct send_listener {
    struct send_listener *next;
    const char *spec, *path;            /* path: of a Unix socket; NULL: TCP */
    bool in;
    int fd;
    bool ready;
    int64_t rest_until;                 /* no descriptor was left */
    struct pd_unix_name name;
    uint32_t left;                      /* peers that may still come */
};

struct send {
    struct pd_sender_opts o;
    int *status;
    struct send_store *stores;
    struct send_run *runs, **runs_end;
    struct send_src *srcs; uint32_t n_srcs;
    struct send_dst *dst; uint32_t n_dst;
    struct send_listener *listeners;
    struct send_guest *guests;
    int64_t now;
    int wake;
    struct pollfd *polls; bool **flags; uint32_t cap_polls;     /* what is waited for, and what is set when it comes */
    bool stopping;                      /* the first signal: what is whole goes out, nothing new comes in */
    struct pd_err fatal;
    uint64_t runs_passed, bytes_passed;
    uint32_t n_runs, most_runs;         /* in hand */
    bool degraded;                      /* something went a slower way, or twice */
    bool opened;                        /* all receivers are there */
};

/* sender.c */
void send_fatal(struct send *s, const struct pd_err *e);
void send_bad(struct send *s, const char *run, const struct pd_err *e);         /* told, and counted in the status; of one run, or NULL */
bool send_room(const struct send *s);           /* each receiver can take a record more */
void send_put(struct send *s, const void *rec, size_t n);                       /* to all of them */

/* sender_run.c */
struct send_store *send_store_of(struct send *s, const struct pd_kv_layout *l, struct pd_err *e);
struct send_run *send_run_new(struct send_src *c, const void *offer, size_t n, struct pd_err *e);
struct send_run *send_run_find(struct send *s, const char *run, const uint8_t *gen /* NULL: any */);
/* The runs of one sender go out on a plain stream one after the other: whoever reads it needs room for one that is not whole. The oldest may begin before all of
 * it is here; one that is whole need not wait for it to begin. */
bool send_run_first(const struct send_run *r, uint32_t out);
bool send_run_begin(struct send_run *r);        /* if its time has come; true: something has changed */
bool send_run_has(const struct send_run *r, const struct send_out *o, uint32_t chunk);  /* of what goes out: all its bytes are here, verified */
const uint32_t *send_run_blocks(const struct send_run *r);
void send_run_spoil(struct send_run *r, const struct pd_err *why /* NULL: told already */);
int send_run_close(struct send_run *r, const void *kv, size_t n, struct pd_err *e);    /* the closing record, checked by the caller */
bool send_runs_pump(struct send *s);            /* what can go out goes; those that are over are freed */
void send_run_free(struct send_run *r);
/* As it goes out on a plain stream: payload inline, no lease. */
int send_desc_out(const struct send_run *r, const struct send_out *o, const struct pd_kvdesc *d, struct pd_buf *b, struct pd_err *e);

/* sender_src.c */
int send_src_open(struct send *s, const char *spec, struct pd_err *e);
struct send_src *send_src_new(struct send *s, struct pd_chan *c, struct pd_err *e);     /* takes the channel over */
bool send_src_work(struct send_src *c);
bool send_src_again(const struct send *s, const struct pd_hello *h);   /* a sender that was lost, come again */
void send_src_record(struct send_src *c, const struct pd_rec *rec);
bool send_src_wants(const struct send_src *c);
void send_src_end(struct send_src *c);
void send_src_free(struct send_src *c);

/* sender_carry.c */
bool send_carry_in(struct send_src *c, const struct pd_rec *rec, struct pd_err *e);    /* false: the sender breaks the rules, or there is no memory */
bool send_carry_out(struct send_src *c);

/* sender_dst.c */
int send_dst_open(struct send_dst *d, struct pd_err *e);
void send_dst_peer(struct send_dst *d, struct pd_chan *c);              /* a listening one's peer came; takes the channel over */
bool send_dst_room(const struct send_dst *d);
bool send_dst_ready(struct send_dst *d, const struct send_run *r);      /* it is known how this run's KV goes there; else that is being found out */
void send_dst_put(struct send_dst *d, const void *rec, size_t n);
void send_dst_pin(struct send_dst *d, const struct send_src *owner, const uint8_t *rec, size_t n);     /* a chunk record, written from where it lies */
bool send_dst_pinned(const struct send_dst *d, const struct send_src *owner);
void send_dst_unpin(struct send_dst *d, const void *owner);             /* what is left of its bytes is copied */
void send_out_begin(struct send_out *o);
bool send_out_pump(struct send_out *o);
void send_out_spoil(struct send_out *o);
bool send_dst_work(struct send_dst *d);
bool send_dst_finish(struct send_dst *d);                               /* nothing more comes: true when all has arrived */
int send_dst_commit(struct send_dst *d, struct pd_err *e);
void send_dst_free(struct send_dst *d);
int64_t send_dst_next(const struct send_dst *d);
void send_dst_acked(struct send_dst *d, uint64_t seq);                  /* the peer has handed on what was carried, as far as that */
void send_dst_say(struct send_dst *d, const struct send_kept *k);
void send_out_desc(struct send_out *o, const struct pd_kvdesc *desc);   /* a descriptor as a plain record */

/* sender_give.c */
void send_give_ask(struct send_dst *d, const struct send_run *r);       /* "do you speak the transfer protocol?" */
int send_give_xfer(struct send_dst *d, struct pd_err *e);               /* a transfer on its connection */
bool send_give_pump(struct send_out *o);
void send_give_unlease(struct send_out *o, const char *cause);
bool send_give_work(struct send_dst *d);
bool send_give_redial(struct send_dst *d);
void send_give_renew(struct send_dst *d);                               /* its leases */
#endif
