/* The life of a daemon, the same for all: options, sockets, states, readiness, drain, status, metrics.
 *
 *     starting --pd_daemon_ready--> ready --SIGTERM, pd_daemon_drain--> draining --nothing owed, nothing busy--> gone
 *
 * starting: the sockets are there and queries are answered; work is refused. ready: said once on stderr ("ready: unix:D0"), and to --ready-fd as READY=1.
 * draining: (STOPPING=1) each connection's handler hears `drain`; new work is refused with the action `reroute`, queries are still answered. pd_daemon_run
 * returns 0 once no connection owes an answer or has one unwritten and no hook is busy. A second signal ends it at once: PD_ECANCEL. The table of entries
 * decides what a connection is for (dispatch.h); `status` and `cancel` are answered here, with the hooks' help.
 *
 * How a worker plugs in (worker.c; what it does with runs is its sides', runner.c and giver.c): one compute thread drives the engine's batch under the loop.
 *   - The loop owns clients, runs and what is sent; the thread owns the batch (engine/batch.h, and engine/decoding.h over it), the pool
 *     and the sequences, and no socket. Between them: an inbox (submit, look for cancelled runs, stop) under a mutex, with a condition that the thread sleeps
 *     on while the batch is idle; and an outbox of records (pd_dc_sink), handed over with one pd_loop_post after each step, not one a token.
 *   - A request: the plain entry's `record` decodes it (pd_intake_read, quick); tokenising takes time by the prompt's length, so it is the thread's, between
 *     two steps (pd_intake_tokens). pd_conn_owe(c, 1) when a run is taken in, pd_conn_owe(c, -1) after its last record is put: so half-closed clients get all
 *     answers, and a drain waits for them. With as many runs in hand as are taken, pd_conn_hold(c) the connection that brought the last one, and
 *     pd_conn_unhold when one ends.
 *   - Records that come while pd_conn_full(c) stay with their run and go on at `room`. So a slow client costs its own runs' records and a queue of bounded
 *     size, and stops nobody else. A run counts as in hand until all of it was put.
 *   - Cancel: `gone` of a client, the `cancel` hook: a flag in the run (atomic) and a word in the inbox; the thread drops the run between two steps (a step of such runs alone is given up between two layers) and hands
 *     over its end, which is what lets the loop free it: no run is freed before its thread has said that it is over.
 *   - Drain: `busy` is "runs in hand > 0", pd_daemon_poke when one ends. At the end: stop in the inbox, join the thread, then free.
 *   - Load for heartbeats and metrics: the thread sets gauges (atomic); the loop reads them.
 */
#ifndef PD_SERVE_DAEMON_H
#define PD_SERVE_DAEMON_H
#include <popt.h>
#include "dispatch.h"

enum pd_daemon_state { PD_STARTING, PD_READY, PD_DRAINING, PD_GONE };

/* All may be NULL; called on the loop's thread. */
struct pd_daemon_hooks {
    void *ctx;
    void (*drain)(void *ctx);           /* take nothing new; once */
    bool (*busy)(void *ctx);            /* draining: is there work left besides what connections owe? pd_daemon_poke when that may have changed */
    void (*beat)(void *ctx);            /* each heartbeat, from ready on, also while draining */
    void (*ledger)(void *ctx, void (*put)(void *to, const char *key, int64_t value), void *to);      /* counts for `status` */
    /* A `cancel` record on a query connection. *state: what to answer ("cancelled", "unknown"); < 0: an error record. */
    int (*cancel)(void *ctx, const struct pd_rec *rec, const char **state, struct pd_err *e);
    /* A `status` record with follow: true: the connection is the hook's from here on (pd_conn_handle; register.h is one). < 0: an error record. */
    int (*follow)(void *ctx, struct pd_conn *c, const struct pd_rec *rec, struct pd_err *e);
    /* A `status` record with release or holds, of a router: the answer into *out. < 0: an error record. */
    int (*order)(void *ctx, const struct pd_rec *rec, struct pd_buf *out, struct pd_err *e);
    /* A `status` record with verify: run. The connection is the hook's too (readback.h is one). < 0: an error record. */
    int (*verify)(void *ctx, struct pd_conn *c, struct pd_str run, struct pd_err *e);
};
/* For that hook: what a `cancel` names, pointing into the record; and whether its token is the run's own (has: it was given one), found out in the same time
 * whatever differs. */
int pd_cancel_names(const struct pd_rec *rec, struct pd_str *run, struct pd_bin *token, struct pd_err *e);
int pd_cancel_may(struct pd_bin token, const uint8_t own[16], bool has, const char *run, struct pd_err *e);

struct pd_daemon_opts {
    const char *role, *worker;          /* "decode", "decode@host:pid": for status, metrics, /healthz */
    const char *const *listen;          /* endpoints "unix:PATH", "tcp-listen:[HOST]:PORT", NULL-ended; at least one */
    const char *advertise;              /* how others reach it, where that is not the first of them; or NULL */
    struct pd_net net;                  /* keys of TCP, and who may be talked to */
    const char *metrics;                /* NULL: none. "http:127.0.0.1:9100" (port 0: any; it is told), "unix:PATH" */
    bool insecure;                      /* metrics may be asked for from other machines */
    int ready_fd;                       /* < 0: none. Owned: closed at the end */
    uint32_t max_conns;                 /* 0: 4096 */
    size_t max_record;                  /* 0: 16 MiB */
    int64_t beat_us;                    /* 0: 1 s */
    const struct pd_entry *entry; int n_entry;  /* besides status and cancel */
    int max_fds;                        /* descriptors that a peer may send ahead; 0: none */
};

/* --listen --advertise --metrics --ready-fd --max-connections, for an option table. */
struct pd_daemon_cli { char **listen; char *advertise, *metrics, *ready_fd, *max_conns; };
extern struct pd_daemon_cli pd_daemon_cli;
extern struct poptOption pd_daemon_options[];
#define PD_DAEMON_OPTIONS { NULL, '\0', POPT_ARG_INCLUDE_TABLE, pd_daemon_options, 0, "As a daemon:", NULL }
int pd_daemon_from_cli(struct pd_daemon_opts *o, struct pd_err *e);     /* fills what the options say; PD_EUSAGE names the option */

struct pd_daemon;
/* For others to dial, of an endpoint to listen on or to dial: "unix:PATH" with PATH made absolute, "tcp:HOST:PORT". PD_EUSAGE: it is
 * neither, or too long for a socket. */
int pd_daemon_address(const char *at, char *out, size_t cap, struct pd_err *e);
const char *pd_daemon_at(const struct pd_daemon *d);    /* the same of this daemon: what it advertises, else its first socket, with the port that was chosen; "": it has
 * none that others could dial */
/* Raises the soft limit of open files to the hard one. hooks is copied. The sockets exist after this; PD_EUSAGE: a path that cannot be, or another daemon is
 * there. */
int pd_daemon_new(const struct pd_daemon_opts *o, const struct pd_daemon_hooks *hooks, struct pd_daemon **out, struct pd_err *e);
struct pd_loop *pd_daemon_loop(struct pd_daemon *d);
struct pd_metrics *pd_daemon_metrics(struct pd_daemon *d);
struct pd_conns *pd_daemon_conns(struct pd_daemon *d);
const struct pd_daemon_opts *pd_daemon_get_opts(const struct pd_daemon *d);
enum pd_daemon_state pd_daemon_state(const struct pd_daemon *d);
const char *pd_daemon_state_name(enum pd_daemon_state s);
int pd_daemon_ready(struct pd_daemon *d, struct pd_err *e);
void pd_daemon_drain(struct pd_daemon *d);      /* as the first signal does */
void pd_daemon_poke(struct pd_daemon *d);       /* a hook may no longer be busy */
int pd_daemon_run(struct pd_daemon *d, struct pd_err *e);
void pd_daemon_free(struct pd_daemon *d);       /* connections without `gone`; names of sockets are removed. NULL: nothing */
#endif
