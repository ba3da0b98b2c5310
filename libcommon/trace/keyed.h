/* Things that are found by a key of at most 27 bytes, and walked in order of arrival: the runs, leases and processes of a log. What is kept begins with a
 * struct pd_node; it is the caller's, the table holds pointers. Zero-initialise. */
#ifndef PD_TRACE_KEYED_H
#define PD_TRACE_KEYED_H
#include "../base/mem.h"
struct pd_node { struct pd_node *chain, *prev, *next; uint8_t key[27], n_key; };
struct pd_keyed { struct pd_node **slot; size_t cap, n; struct pd_node *first, *last; };
void *pd_keyed_find(const struct pd_keyed *t, const void *key, size_t n);
int pd_keyed_add(struct pd_keyed *t, void *node, const void *key, size_t n, struct pd_err *e);      /* the key must not be there */
void pd_keyed_remove(struct pd_keyed *t, void *node);
void pd_keyed_to_end(struct pd_keyed *t, void *node);          /* it arrives anew */
void pd_keyed_free(struct pd_keyed *t);         /* the slots alone */
#endif
