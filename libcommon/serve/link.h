/* A transfer connection on the loop: a pd_xfer (xfer/proto.h) over a pd_conn, with the raw socket that its descriptors go over, its timers, and a little of
 * its verification at a time.
 *
 * The end that gives KV dials (pd_links_dial), the end that takes it is dialled: pd_links_cb is the handler of connections that begin with `hello`. When both
 * ends have said hello and shm is among what they can use, the giver dials a second socket that names the first (`attach`); the dispatcher hands it over with
 * no byte after it read.
 * Payload is written from where it lies, and never queued: it is pulled when the socket takes it.
 * Owned by the loop's thread. Events come from the loop's own turn, never from inside a function of this header; so the owner may call anything from there.
 */
#ifndef PD_SERVE_LINK_H
#define PD_SERVE_LINK_H
#include "../xfer/proto.h"
#include "conn.h"

struct pd_link;
struct pd_links_opts {
    struct pd_loop *l;
    struct pd_xfer_opts xfer;           /* of each; the peer's process is filled in here */
    size_t max_record;                  /* 0: 16 MiB */
    const struct pd_conn_meter *meter;
    const struct pd_net *net;           /* of TCP; or NULL */
    /* The last one is PD_XE_CLOSED; the link is gone some time after it. */
    void (*event)(void *ctx, struct pd_link *k, const struct pd_xfer_event *ev);
    void *ctx;
};
struct pd_links { struct pd_links_opts o; struct pd_link *first; uint32_t n; };         /* set o, zero the rest */
extern const struct pd_conn_cb pd_links_cb;     /* ctx: a struct pd_links */

/* PD_ENOWORKER: nobody is there; try again by a timer. at: "unix:PATH", "tcp:HOST:PORT" (it opens in the background, and may
 * close before it is ready). */
int pd_links_dial(struct pd_links *s, const char *at, void *user, struct pd_link **out, struct pd_err *e);
void pd_links_close(struct pd_links *s);        /* each one that has nothing on its way; the others when they have not */
void pd_links_soon(struct pd_links *s);         /* leases have ended: what that brought is told */
void pd_links_free(struct pd_links *s);         /* from outside the loop, without events */

struct pd_xfer *pd_link_xfer(struct pd_link *k);
void *pd_link_get(const struct pd_link *k);
void pd_link_set(struct pd_link *k, void *user);
void pd_link_soon(struct pd_link *k);           /* its xfer was called: what is to be written, told and waited for comes with the next turn */
/* Which way a KV should go: NULL, the best; "inline" when descriptors cannot pass for now (wait: at all). */
const char *pd_link_via(const struct pd_link *k, bool wait);
struct pd_link *pd_link_next(const struct pd_link *k);
#endif
