/* A daemon's socket, Unix or TCP: accepts, checks who it is (a Unix peer's uid; a TCP peer's key, by the connection), makes connections that the dispatcher takes.
 *
 * When descriptors run out it stops accepting, says so once, and goes on when a connection has closed or after a moment; who waits meanwhile is served then.
 * Past max_conns a peer is told why and closed.
 */
#ifndef PD_SERVE_LISTENER_H
#define PD_SERVE_LISTENER_H
#include "dispatch.h"

struct pd_listener_opts {
    const char *at;             /* "unix:PATH", "tcp-listen:[HOST]:PORT" (or "tcp:") */
    uint32_t max_conns;         /* of the set, over all its listeners; 0: 4096 */
    struct pd_conn_opts conn;   /* set is needed; conn.set->left is not used here: see pd_listener_left. conn.net: of TCP */
    struct pd_dispatch *dispatch;
    struct pd_metric *accepted, *refused, *paused;      /* counters; NULL: not counted */
};
struct pd_listener;
/* The socket is there from here on, with mode 0600; a stale one is replaced, a live one refused (PD_EUSAGE), as is TCP beyond
 * this host without keys or `insecure`. */
int pd_listener_new(struct pd_loop *l, const struct pd_listener_opts *o, struct pd_listener **out, struct pd_err *e);
const char *pd_listener_name(const struct pd_listener *s);      /* "unix:PATH" as it was given, "tcp:127.0.0.1:7000" with the port that was chosen */
void pd_listener_left(struct pd_listener *s);   /* a connection has closed: descriptors are there again */
bool pd_listener_paused(const struct pd_listener *s);
void pd_listener_free(struct pd_listener *s);   /* removes the name. NULL: nothing */
#endif
