/* Inside a connection, shared by its files: conn.c (records in and out, its end) and conn_open.c (until it stands: dialled, a key proved). */
#ifndef PD_SERVE_CONN_IN_H
#define PD_SERVE_CONN_IN_H
#include "../wire/lookup.h"
#include "../wire/tcp.h"
#include "conn.h"

enum { PD_CONN_CMSG_FDS = 16, PD_CONN_MAX_FDS = 64 };

/* Descriptors that go with the byte at `at` of all that is written. */
struct pd_with_fds { struct pd_with_fds *next; uint64_t at; int n, fd[PD_CONN_CMSG_FDS]; };

/* Where it is dialled: each address in turn, once a name was looked up. */
struct pd_dial { struct pd_lookup *lookup; struct pd_tcp_addr a[PD_TCP_ADDRS]; int n, at; };

struct pd_conn {
    struct pd_loop *l;
    int fd;
    struct pd_tls *tls;         /* or NULL */
    struct pd_watch *w;
    struct pd_timer *linger;    /* and, before that, for it to stand */
    struct pd_dial *dial;          /* while it is being connected */
    bool opening, dialled, tcp;
    struct pd_conn_opts o;
    const struct pd_conn_cb *cb;
    void *ctx, *user;
    struct pd_rstream *in;
    struct pd_buf out;
    size_t at;                  /* of out: written */
    uint64_t base;              /* of out.p[0] among all bytes written */
    struct pd_with_fds *send, **send_last;
    int got[PD_CONN_MAX_FDS], n_got;
    uint32_t holds, owed;
    bool full, blocked;         /* above the mark, until below the low one; the socket takes no more for now */
    bool garbage;               /* what came is no stream of records */
    bool eof, ended, ended_told;        /* the peer's end; no more is read */
    bool finishing;             /* nothing more is put */
    bool dry;                   /* the last pull gave nothing */
    bool hup, lingering;
    size_t late;                /* read since it reads no more: what was on its way is taken, and no more than can be */
    bool dying, no_gone, buried;        /* buried: its last turn has begun */
    bool queued, busy;          /* busy: inside input(), which must not be entered again */
    bool first;                 /* no record has been given out yet, or the first one is in hand */
    struct pd_err why;
    struct pd_post turn;
    int pid;
    int64_t since;
    struct pd_conn *next, **prev;
};

/* ---- conn.c ---- */
int pd_conn_make(struct pd_loop *l, const struct pd_conn_opts *o, const struct pd_conn_cb *cb, void *ctx, struct pd_conn **out, struct pd_err *e);
void pd_conn_release(struct pd_conn *c);        /* at once, without a word */
void pd_conn_die(struct pd_conn *c, const struct pd_err *why);
void pd_conn_join(struct pd_conn *c);           /* its set, if any */
int pd_conn_watch(struct pd_conn *c, struct pd_err *e);
void pd_conn_soon(struct pd_conn *c);           /* it has a turn of the loop */
static inline const char *pd_conn_name(const struct pd_conn *c) { return c->o.name ? c->o.name : "peer"; }

/* ---- conn_open.c ---- */
static inline bool pd_conn_sealed(const struct pd_conn *c) { return c->tcp && c->o.net && c->o.net->keys; }
int pd_conn_begin_tls(struct pd_conn *c, bool client, struct pd_err *e);
void pd_conn_open_on(struct pd_conn *c);        /* its socket has news while it does not stand yet */
#endif
