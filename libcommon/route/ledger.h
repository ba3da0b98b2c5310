/* What runs were given to workers, and of those to prefill workers what has not been read yet: prompt tokens, blocks and bytes of KV, by worker and by link; and
 * which pairs are on hold.
 * Kept in a file, so that a router that was restarted knows what its former life left at the workers, and can have it dropped.
 *
 * An item is given when a run is given to its workers (p and d are the same when one does it all), published when its KV is complete at the prefill worker, taken
 * when the decode worker has read it or does without, and ends with the run at those workers. Only what is not taken counts in sums.
 * A pair is held from the moment its KV failed a check until a person releases it; the reason given is kept as the last word on it.
 *
 * The file (0600: it has the tokens by which runs are cancelled) is a stream of `ledger` records (pd-wire.5), each appended in one write. Opening it reads it,
 * and writes it anew with what still holds; so it is done when it has grown past PD_LEDGER_SLACK and four times that. A record that a killed writer tore is
 * dropped, whatever follows it is found again. After a write that failed the file is written anew, once a second until that is done, by the next word or by
 * pd_ledger_beat; until then what it was about holds in memory alone.
 * Owned by one thread; the file by one router: it is locked.
 */
#ifndef PD_ROUTE_LEDGER_H
#define PD_ROUTE_LEDGER_H
#include "../base/id.h"
#include "../base/mem.h"
#include "../trace/keyed.h"

enum { PD_LEDGER_SLACK = 1 << 20, PD_LEDGER_ITEMS = 1 << 18, PD_LEDGER_HOLDS = 4096, PD_LEDGER_TEXT = 300, PD_CANCEL_TOKEN = 16 };
struct pd_ledger_sum { uint32_t runs; uint64_t tokens, blocks, bytes; };
struct pd_ledger_item {                 /* of the ledger; its strings too */
    struct pd_node node;                /* by run and attempt */
    char run[PD_RUN_LEN + 1];
    uint8_t attempt;                    /* its low byte */
    uint8_t token[PD_CANCEL_TOKEN];     /* of a `cancel` to the workers */
    const char *p, *d;                  /* where they listen */
    uint64_t tokens, blocks, bytes;     /* bytes: of KV, once it is published */
    int64_t t_us;                       /* wall: when it was given */
    bool published, taken, left /* by a former life */, found; uint8_t user;    /* found, user: the caller's */
};
struct pd_ledger_hold { struct pd_node node; const char *p, *d; char *cause; int64_t t_us; };

struct pd_ledger;
struct pd_ledger_read { uint32_t left /* items of the former life */, holds; uint64_t torn /* bytes */; };
/* path NULL: in memory alone. PD_EUSAGE: others may read the file, another router has it, or it is no ledger at all. */
int pd_ledger_open(const char *path, struct pd_ledger **out, struct pd_ledger_read *was, struct pd_err *e);
void pd_ledger_free(struct pd_ledger *l);       /* what is in the file stays there. NULL: nothing */
/* Bytes of a file, added to what is there. *torn: those that were no record. PD_ENOMEM. */
int pd_ledger_read(struct pd_ledger *l, const uint8_t *p, size_t n, uint64_t *torn, struct pd_err *e);

/* what: run, attempt, token, p, d, tokens, blocks, t_us; copied. One that is there already is replaced. */
int pd_ledger_give(struct pd_ledger *l, const struct pd_ledger_item *what, struct pd_err *e);
struct pd_ledger_item *pd_ledger_find(const struct pd_ledger *l, const char *run, uint8_t attempt);    /* NULL: it has ended */
void pd_ledger_publish(struct pd_ledger *l, struct pd_ledger_item *i, uint64_t bytes);
void pd_ledger_take(struct pd_ledger *l, struct pd_ledger_item *i);
void pd_ledger_end(struct pd_ledger *l, struct pd_ledger_item *i);
struct pd_ledger_item *pd_ledger_first(const struct pd_ledger *l);      /* in the order in which they were given: (void *)i->node.next */
struct pd_ledger_sum pd_ledger_of(const struct pd_ledger *l, const char *p);
struct pd_ledger_sum pd_ledger_of_link(const struct pd_ledger *l, const char *p, const char *d);
struct pd_ledger_sum pd_ledger_all(const struct pd_ledger *l);
uint32_t pd_ledger_left(const struct pd_ledger *l);     /* items of the former life that are still there */

int pd_ledger_hold(struct pd_ledger *l, const char *p, const char *d, const char *cause, int64_t t_us, struct pd_err *e);
const struct pd_ledger_hold *pd_ledger_held(const struct pd_ledger *l, const char *p, const char *d);  /* NULL: it is not */
const struct pd_ledger_hold *pd_ledger_first_hold(const struct pd_ledger *l);
/* 1: it was held. p or d NULL: any. */
int pd_ledger_release(struct pd_ledger *l, const char *p, const char *d, const char *reason, int64_t t_us);
void pd_ledger_beat(struct pd_ledger *l, int64_t now_us);      /* now and then: what could not be written is tried again */
const char *pd_ledger_trouble(const struct pd_ledger *l);       /* why the last write failed; NULL: it did not */
#endif
