/* What a stream has brought already (run ids, generations), so that each is answered once: one that comes again is a replay.
 * It remembers at least the last PD_SEEN_LAST keys in at most 16 bytes each, as a 64-bit hash: one key in 2^64 / (keys held) is taken for another.
 * Zero-initialise. */
#ifndef PD_BASE_SEEN_H
#define PD_BASE_SEEN_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "err.h"
#define PD_SEEN_LAST 65536
struct pd_seen { struct pd_seen_set { uint64_t *slot; size_t cap, n; } young, old; };
int pd_seen_add(struct pd_seen *s, const void *key, size_t n, struct pd_err *e);        /* 1: it was there already, 0: added */
bool pd_seen_has(const struct pd_seen *s, const void *key, size_t n);
void pd_seen_free(struct pd_seen *s);
#endif
