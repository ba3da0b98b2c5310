/* What a connection to a daemon is for: its first record decides, by a table.
 *
 * hello opens the transfer protocol, worker a registration, status and cancel a query, anything else is a plain stream: one entry a kind, and one without
 * a name for the rest. From its first record on a connection belongs to its entry's handler.
 */
#ifndef PD_SERVE_DISPATCH_H
#define PD_SERVE_DISPATCH_H
#include "conn.h"

struct pd_entry {
    const char *kind;           /* of the first record; NULL: any other, a request among them */
    const struct pd_conn_cb *cb; void *ctx;
    bool draining;              /* served also while the daemon drains; others are refused then, to be tried elsewhere */
};
struct pd_dispatch { const struct pd_entry *entry; int n; bool draining; };
extern const struct pd_conn_cb pd_dispatch_cb;  /* ctx: a struct pd_dispatch, which outlives the connections */
/* To be called once after pd_conn_new with pd_dispatch_cb. */
static inline void pd_dispatch_begin(struct pd_conn *c) { pd_conn_exact(c, true); }
/* The kind of a record by its name, "request" without one; static storage is not used: it points into the record. */
struct pd_str pd_rec_kind(const struct pd_rec *rec);
#endif
