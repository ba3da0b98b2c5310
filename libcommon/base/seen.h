/* The run ids that a stream has brought already, so that each is answered once: an id that comes again is a replay.
 * Sixteen bytes a run at the most; it holds a 64-bit hash of each, so one id in 2^64 / (ids held) is taken for another. Zero-initialise. */
#ifndef PD_BASE_SEEN_H
#define PD_BASE_SEEN_H
#include "id.h"
struct pd_seen { uint64_t *slot; size_t cap, n; };
int pd_seen_add(struct pd_seen *s, const char *run, struct pd_err *e);      /* 1: it was there already, 0: added */
bool pd_seen_has(const struct pd_seen *s, const char *run);
void pd_seen_free(struct pd_seen *s);
#endif
