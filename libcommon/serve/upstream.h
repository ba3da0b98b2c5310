/* A worker's connections, seen from the router: one plain stream that requests go out on and records come back on, and a query that it tells of itself on
 * (`status` with follow), unless it registers by itself. Both are dialled again when they are lost, with a back-off that doubles from 50 ms to 2 s, and jitter.
 *
 * The request connection is dialled while the worker is wanted (pd_upstream_want: it says that it is ready), and `up` tells that it stands. `down` tells that it
 * does not any more: what was sent on it and not answered never will be. why is NULL when the worker closed in good order, as one does that drains.
 */
#ifndef PD_SERVE_UPSTREAM_H
#define PD_SERVE_UPSTREAM_H
#include "conn.h"

struct pd_upstream;
struct pd_upstream_cb {         /* on the loop's thread; none may free the upstream */
    void (*said)(void *ctx, struct pd_upstream *u, const struct pd_rec *rec);           /* its `worker` record */
    void (*event)(void *ctx, struct pd_upstream *u, const struct pd_rec *rec);          /* a `kvevent` there, when they were asked for (pd_upstream_tell) */
    void (*silent)(void *ctx, struct pd_upstream *u);           /* that connection has ended */
    void (*record)(void *ctx, struct pd_upstream *u, const struct pd_rec *rec);         /* on the request connection */
    void (*up)(void *ctx, struct pd_upstream *u);
    void (*room)(void *ctx, struct pd_upstream *u);             /* it was full, and is no longer; may be NULL */
    void (*down)(void *ctx, struct pd_upstream *u, const struct pd_err *why);
};
struct pd_upstream_opts { const char *at /* "unix:PATH", "tcp:HOST:PORT" */; const struct pd_net *net; bool follow; size_t max_record; const struct pd_upstream_cb *cb; void *ctx, *user; };
int pd_upstream_new(struct pd_loop *l, const struct pd_upstream_opts *o, struct pd_upstream **out, struct pd_err *e);
void *pd_upstream_user(const struct pd_upstream *u);
void pd_upstream_want(struct pd_upstream *u, bool wanted);      /* false: it is not dialled again; what stands stays */
bool pd_upstream_up(const struct pd_upstream *u);
bool pd_upstream_full(const struct pd_upstream *u);             /* it has much to read yet: nothing new for it. What is in hand may still be put */
int pd_upstream_put(struct pd_upstream *u, const void *rec, size_t n, struct pd_err *e);
/* The `status` that follows a worker; with events, from life [PD_LIFE_LEN] and seq on, or (NULL) with a snapshot. Appends. */
int pd_follow_encode(bool events, const uint8_t *life, uint64_t seq, struct pd_buf *b, struct pd_err *e);
int pd_upstream_tell(struct pd_upstream *u, const void *rec, size_t n, struct pd_err *e);       /* on the connection that it tells of itself on */
/* Close what stands (`down` follows); dialled again as after any loss. */
void pd_upstream_drop(struct pd_upstream *u, const struct pd_err *why);
const char *pd_upstream_trouble(const struct pd_upstream *u);   /* why it could not be dialled the last time; "" */
bool pd_upstream_idle(const struct pd_upstream *u);             /* no connection stands or is being closed: it may be freed from within the loop */
void pd_upstream_free(struct pd_upstream *u);                   /* without `down` */
#endif
