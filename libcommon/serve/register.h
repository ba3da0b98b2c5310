/* A worker's own registration: the `worker` record (pd-wire.5), and who gets it.
 *
 * The record is made from the runtime and the load of the moment. It goes at once, at each heartbeat and at each change of state to
 *   - whoever asked with a `status` record whose `follow` is true (the daemon's hook: pd_register_follow), until he closes. With `events: true` he also gets the
 *     changes of the runtime's prefix index as kvevent records, as they happen: from `life` and `seq` of his question on, where the index's ring still has
 *     them, else after a snapshot. Who reads slowly gets them slowly, and a snapshot when he fell too far behind. Another `status` with `events` on the same
 *     connection begins anew: so one who met a gap asks for a snapshot;
 *   - each router named by --register, which is dialled, and dialled again with a back-off when it is away: 50 ms, doubled up to 2 s, a fifth of it at random,
 *     so that the workers of one router do not come back in step. A router asks for events by such a `status` on that connection.
 * Nobody who only follows keeps a draining daemon. A follower that does not read is skipped until it does: each record says all.
 *
 * A workers file is such records one after the other, as --describe prints them, in either form.
 */
#ifndef PD_SERVE_REGISTER_H
#define PD_SERVE_REGISTER_H
#include "../engine/runtime.h"
#include "daemon.h"

/* --register --describe, for an option table. */
struct pd_register_cli { char **routers; int describe; };
extern struct pd_register_cli pd_register_cli;
extern struct poptOption pd_register_options[];
#define PD_REGISTER_OPTIONS { NULL, '\0', POPT_ARG_INCLUDE_TABLE, pd_register_options, 0, "As a worker:", NULL }

struct pd_register_opts {
    const struct pd_runtime *rt;
    const char *role;                   /* "prefill" "decode" "both" */
    const char *prefer;                 /* of "both", its side where each worker has one: "prefill" "decode"; NULL: decode */
    uint32_t max_runs;
    const char *via;                    /* NULL: pd_via_default */
    const char *const *routers;         /* endpoints "unix:PATH", NULL-ended, or NULL */
    /* Fills the counts of the moment, on the loop's thread; NULL: all 0. */
    void (*load)(void *ctx, struct pd_load *l);
    void *ctx;
};

/* The record of a runtime that serves nothing (yet): no load, no life. listen: an endpoint, or NULL. Appends. */
int pd_register_describe(const struct pd_register_opts *o, const char *listen, struct pd_buf *b, struct pd_err *e);
/* --describe, the whole of it: the record to -o, in the form of --format. */
int pd_register_print(const struct pd_register_opts *o, const char *const *listen, struct pd_err *e);

struct pd_register;
/* *o is copied, its pointers are not. PD_EUSAGE: an endpoint that is none. Dialling begins when the loop runs. */
int pd_register_new(struct pd_daemon *d, const struct pd_register_opts *o, struct pd_register **out, struct pd_err *e);
/* A record to all, now: from the daemon's `beat` and `drain` hooks. r may be NULL. */
void pd_register_beat(struct pd_register *r);
int pd_register_follow(struct pd_register *r, struct pd_conn *c, const struct pd_rec *rec, struct pd_err *e);
uint32_t pd_register_routers(const struct pd_register *r);      /* of those dialled, how many are there now */
void pd_register_free(struct pd_register *r);   /* after the loop, before the daemon: its connections close, which says `gone`. NULL: nothing */

/* A workers file: all `worker` records of it; of those with one name and life the last counts. The records live in the arena. PD_EFAIL: it cannot be opened, a
 * record is of another kind, or there is none; PD_ECORRUPT: a bad one. Messages name the file and the record's number. */
int pd_workers_read(const char *path, struct pd_arena *a, struct pd_worker_rec **w, uint32_t *n, struct pd_err *e);
#endif
