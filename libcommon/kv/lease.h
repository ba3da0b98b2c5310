/* Leases: the right of somebody else to read blocks of this pool for a while, and the ledger of all that were given.
 *
 * Life: reserved > filling > published > reading (n readers) > released | expired | revoked. A grant holds one reference of each block until the lease has
 * ended; the blocks are the grantor's own again only then. It lives ttl from the grant; a renewal extends it to max(old, now + ttl). Ending is fence first,
 * free second: the control page's word is cleared (readers in place), each reader's fence is called (transports), and only when all are done do the blocks go.
 * Until then the lease is `cancelling`.
 * An id is 8 bytes of the process's life, 4 of the slot, 4 of the slot's serial number (big-endian); the slot is the place in the control page too. An
 * ended lease is known by its id as ended: release is idempotent, and late use is PD_ETIME, never another lease's memory. An id of another life is PD_ETIME
 * too.
 *
 * No clock inside: `now` is the caller's monotonic time in us, and never goes back. Grant, renew and end cost O(log n) of the live leases (a heap by expiry).
 * Owned by one thread; the pool and the hooks' contexts outlive it. Invariant: granted == released + expired + revoked + live, and with live 0 no block is
 * held. */
#ifndef PD_KV_LEASE_H
#define PD_KV_LEASE_H
#include <sys/types.h>
#include "control.h"
#include "pool.h"

#define PD_LEASE_ID_LEN 16
#define PD_LEASE_TTL_US 30000000        /* default life; renew each sixth of it */
#define PD_LEASE_READERS 8              /* of one lease at once */

enum pd_lease_state { PD_LEASE_FREE, PD_LEASE_RESERVED, PD_LEASE_FILLING, PD_LEASE_PUBLISHED, PD_LEASE_READING, PD_LEASE_CANCELLING, PD_LEASE_RELEASED,
                     PD_LEASE_EXPIRED, PD_LEASE_REVOKED };
const char *pd_lease_state_name(enum pd_lease_state s);
struct pd_lease_info {
    uint8_t id[PD_LEASE_ID_LEN], gen[PD_GEN_LEN];
    char run[PD_RUN_LEN + 1];
    enum pd_lease_state state;
    uint32_t readers, n_blocks;
    const uint32_t *blocks;             /* the ledger's; until the lease has ended */
    int64_t granted_us, expires_us, ttl_us;
    bool was_read;                      /* a reader came */
    const char *cause;                  /* of an end, or NULL */
};
/* Steps of a lease, for the trace: 02-records' lease_granted .. reaped. Told inside the call that made them; the hook must not call the ledger. */
enum pd_lease_step { PD_LEASE_STEP_GRANTED, PD_LEASE_STEP_READ, PD_LEASE_STEP_RENEWED, PD_LEASE_STEP_RELEASED, PD_LEASE_STEP_EXPIRED, PD_LEASE_STEP_REVOKED,
                    PD_LEASE_STEP_REAPED };
const char *pd_lease_step_name(enum pd_lease_step s);   /* "lease_granted", ... */
typedef void pd_lease_told_fn(void *ctx, enum pd_lease_step step, const struct pd_lease_info *l);
/* Shut one reader out. true: nothing of it touches the blocks any more. false: it will call pd_lease_fenced. Must not call the ledger. */
typedef bool pd_lease_fence_fn(void *ctx, const uint8_t id[PD_LEASE_ID_LEN]);
/* pid 0: not on this host. fence NULL: only the control page. waits: it was offered and has not begun: it is shut out like a reader, and counts as none. */
struct pd_reader { int32_t pid; uint64_t start; pd_lease_fence_fn *fence; void *ctx; bool waits; };

struct pd_leases;
struct pd_leases_opts { struct pd_pool *pool; uint32_t max /* live at once; 0: 4096 */; pd_lease_told_fn *told; void *ctx; };
int pd_leases_new(const struct pd_leases_opts *o, struct pd_leases **out, struct pd_err *e);
void pd_leases_free(struct pd_leases *l);       /* what is left is revoked without a word to its readers */
int pd_leases_control_fd(const struct pd_leases *l);    /* the control page, to give to readers in place */

/* Grant n blocks that the caller holds to run/gen; ttl_us 0: the default. PD_ENOMEM: no slot, or no memory. */
int pd_lease_grant(struct pd_leases *l, const char *run, const uint8_t gen[PD_GEN_LEN], const uint32_t *blocks, uint32_t n, int64_t ttl_us, int64_t now,
                   uint8_t id[PD_LEASE_ID_LEN], struct pd_err *e);
/* reserved > filling > published. PD_EFAIL out of order, PD_ETIME when it has ended. */
int pd_lease_fill(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], struct pd_err *e);
int pd_lease_publish(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], struct pd_err *e);
/* One reader more, from filling on (layers leave as they are computed); with the ctx of one that waits: that one begins. PD_ETIME: ended, or gen is not the
 * lease's; PD_EFAIL: nothing to read yet; PD_ENOMEM: too many readers. */
int pd_lease_read(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], const uint8_t gen[PD_GEN_LEN], const struct pd_reader *who, int64_t now,
                  struct pd_err *e);
/* A reader went without having finished (its connection is gone, and nothing of it reads any more): the lease lives on, unless it was let go. By ctx. */
void pd_lease_unread(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], const void *ctx);
int pd_lease_renew(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], const uint8_t gen[PD_GEN_LEN],
                   int64_t ttl_us /* 0: as granted */, int64_t now, struct pd_err *e);
/* A reader (by ctx; NULL: any one) is done. With the last one, or without any, the lease has ended. 0; 1: it had ended before; < 0: PD_ETIME: not a lease of
 * this life, PD_ECORRUPT: an id never given. */
int pd_lease_release(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], const void *ctx, int64_t now, struct pd_err *e);
/* Somebody who read it is done, as he says where none of its readers is (they are connections, and his may be gone without that having been seen): as release
 * without a reader; with any, once none is left, be they done or gone. */
int pd_lease_let_go(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], int64_t now, struct pd_err *e);
/* End it whoever reads. 0: over, blocks free; 1: had ended before; 2: a fence is pending. < 0 as release. cause: static text. */
int pd_lease_revoke(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], const char *cause, int64_t now, struct pd_err *e);
void pd_lease_fenced(struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], const void *ctx, int64_t now);      /* that reader's pending fence is done */

int64_t pd_leases_next(const struct pd_leases *l);              /* when the next one expires; INT64_MAX: none */
uint32_t pd_leases_sweep(struct pd_leases *l, int64_t now);     /* expire what is due; how many */
/* Readers on this host that died are taken off; a lease whose last reader died is revoked ("reader died"). alive NULL: pd_proc_alive. How many were reaped. */
uint32_t pd_leases_reconcile(struct pd_leases *l, bool (*alive)(pid_t pid, uint64_t start), int64_t now);
uint32_t pd_leases_revoke_all(struct pd_leases *l, const char *cause, int64_t now);     /* at drain: a grantor ends every lease it gave */

struct pd_lease_counts { uint64_t granted, released, expired, revoked, reaped; uint32_t live, cancelling,
                         unread /* granted, and nobody read yet */; uint64_t live_blocks, unread_blocks; };
struct pd_lease_counts pd_leases_counts(const struct pd_leases *l);
bool pd_lease_info(const struct pd_leases *l, const uint8_t id[PD_LEASE_ID_LEN], struct pd_lease_info *out);  /* false: ended, or never given */
/* Walk the live ones: start with *at = 0. */
bool pd_leases_each(const struct pd_leases *l, uint32_t *at, struct pd_lease_info *out);
uint32_t pd_lease_slot(const uint8_t id[PD_LEASE_ID_LEN]);      /* of the control page */
#endif
