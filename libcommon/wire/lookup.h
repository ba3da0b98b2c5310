/* Asking for the addresses of a host's name, which may take as long as the resolver likes, beside a loop that must not wait: each on a thread of its own.
 *
 * What it asked can be freed at any time: the thread then finishes alone and nobody is told. At most PD_LOOKUPS are under way in a process. */
#ifndef PD_WIRE_LOOKUP_H
#define PD_WIRE_LOOKUP_H
#include "tcp.h"

enum { PD_LOOKUPS = 64 };
struct pd_lookup;
int pd_lookup_new(const char *where, struct pd_lookup **out, struct pd_err *e);         /* HOST:PORT. PD_ENOWORKER: too many are under way */
int pd_lookup_fd(const struct pd_lookup *u);    /* readable when there is an answer */
const char *pd_lookup_where(const struct pd_lookup *u);
/* The answer, as pd_tcp_resolve gives it; only once the descriptor is readable. */
int pd_lookup_take(struct pd_lookup *u, struct pd_tcp_addr out[PD_TCP_ADDRS], int *n, struct pd_err *e);
void pd_lookup_free(struct pd_lookup *u);       /* NULL: nothing */
#endif
