/* One worker's KV events, applied to the index: in their order, without gaps, or not at all (wire/kvevent.h).
 *
 * A feed knows nothing until it has a whole snapshot, or the first change of a life (seq 1: there was nothing before it). What does not follow is a gap: the
 * worker's blocks are forgotten and the caller asks for a snapshot. Pure; the index's rules. */
#ifndef PD_ROUTE_FEED_H
#define PD_ROUTE_FEED_H
#include "../wire/kvevent.h"
#include "index.h"

struct pd_feed {                /* pd_feed_open */
    struct pd_index *x;
    uint32_t block_size, most;  /* of the worker's registration: events of another size are refused, and of more blocks than it has (0: not known) */
    uint16_t slot;
    bool joined, known;         /* known: the index holds what the worker held after change `seq` of `life` */
    uint8_t life[PD_LIFE_LEN];
    uint64_t seq;
    uint32_t next_part;         /* of a snapshot under way; 0: none */
    uint64_t applied, repeated, gaps, snapshots, orphans /* chains whose parent the worker does not hold */;
};
enum pd_fed { PD_FED,           /* applied, or one that it had already */
              PD_FED_GAP };     /* ask for a snapshot; *e says why */
void pd_feed_open(struct pd_feed *f, struct pd_index *x, uint32_t block_size, uint32_t most);
void pd_feed_close(struct pd_feed *f);  /* its blocks leave the index */
void pd_feed_lost(struct pd_feed *f);   /* nothing is known: its process is another, or has been away */
/* PD_FED, PD_FED_GAP; PD_ECORRUPT: an event that cannot be (block size, parts out of order, more blocks than there are); PD_ENOMEM. After an
 * error and after a gap nothing is known. */
int pd_feed_event(struct pd_feed *f, const struct pd_kvevent *v, struct pd_err *e);
#endif
