/* The last changes of a prefix index, as encoded `kvevent` records, so that a subscriber that was away for a moment goes on without a snapshot.
 * Bounded in records and bytes: the oldest go first. A change that could not be kept (memory) empties it, so that nobody misses one unknowingly.
 * No lock: it lies under that of its index (prefix.h), which is also what subscribers read through. */
#ifndef PD_KV_KVRING_H
#define PD_KV_KVRING_H
#include "../wire/kvevent.h"
struct pd_kvring {
    struct pd_kvring_slot { uint8_t *p; size_t n; } *slot;
    uint32_t cap, head, n;
    size_t bytes, max_bytes;
    uint64_t last;              /* change made; 0: none yet */
};
int pd_kvring_open(struct pd_kvring *r, uint32_t records, size_t max_bytes, struct pd_err *e);
void pd_kvring_close(struct pd_kvring *r);
/* The next change; sets v->seq. */
void pd_kvring_add(struct pd_kvring *r, struct pd_kvevent *v);
/* Change `seq`, or NULL: it is gone, or not there yet. */
const struct pd_kvring_slot *pd_kvring_at(const struct pd_kvring *r, uint64_t seq);
#endif
