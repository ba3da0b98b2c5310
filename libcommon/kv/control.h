/* The control page: which generation each lease slot serves, in memory that the readers of another process see.
 *
 * A word a slot: the counter of the generation (the second half of its 16 bytes) while its lease is valid, else 0. Words of one process's life alone: a page
 * belongs to one owner and is mapped anew with each connection, so the first half need not be in it.
 * Owner: writes 0 before a block is reused. Reader: reads the blocks, then looks at the word, then lets a token leave; a word that has changed means that
 * what was read may be anything: drop the step (PD_ETIME). The memfd is sealed against shrinking, growing and new writable mappings: no reader can write
 * to it, and none dies of it. An owner that died leaves page and slabs as they were: nobody reuses those blocks, so they stay valid until the lease ends. */
#ifndef PD_KV_CONTROL_H
#define PD_KV_CONTROL_H
#include <stdatomic.h>
#include "../base/id.h"
#include "../base/mem.h"
struct pd_control { _Atomic uint64_t *word; uint32_t slots; size_t bytes; int fd; };    /* fd -1: a reader's view. Zero is one that is not open */
int pd_control_new(uint32_t slots, struct pd_control *c, struct pd_err *e);
/* A reader's view of a page that came from elsewhere; fd stays the caller's. PD_EINCOMPAT when it is not sealed against shrinking. */
int pd_control_map(int fd, struct pd_control *c, struct pd_err *e);
void pd_control_close(struct pd_control *c);
void pd_control_set(struct pd_control *c, uint32_t slot, const uint8_t gen[PD_GEN_LEN]);       /* NULL: nothing is valid there any more */
/* Everything read before the call was read while gen was valid. */
bool pd_control_valid(const struct pd_control *c, uint32_t slot, const uint8_t gen[PD_GEN_LEN]);

/* A reader's view with several holders (the connection that brought it, and whoever reads on after that is gone): unmapped with the last. Any thread. */
struct pd_view;
int pd_view_new(int fd, struct pd_view **out, struct pd_err *e);       /* as pd_control_map */
struct pd_view *pd_view_ref(struct pd_view *v);
void pd_view_put(struct pd_view *v);    /* NULL: nothing */
bool pd_view_valid(const struct pd_view *v, uint32_t slot, const uint8_t gen[PD_GEN_LEN]);
#endif
