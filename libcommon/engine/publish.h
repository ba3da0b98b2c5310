/* The publisher: a thread that writes what prefill gives it, so that sending overlaps computing.
 *
 * Jobs are done in order: a finished record's bytes, one chunk straight from pool memory (hashed and written from this thread, without a copy), or a whole
 * run into a dump file. The queue is bounded, so a slow reader slows prefill. Blocks named by a job stay valid until the run's end job came back through
 * pd_publish_ended: only then may they be dropped. After a write error everything queued is discarded and each call returns that error.
 */
#ifndef PD_ENGINE_PUBLISH_H
#define PD_ENGINE_PUBLISH_H
#include "../kv/codec.h"
#include "../kv/dump.h"
#include "../wire/stream.h"

struct pd_publish;
/* Exactly one of out and dump is given; both stay the caller's. */
int pd_publish_new(struct pd_wstream *out, struct pd_dump_w *dump, const struct pd_pool *pool, struct pd_publish **p, struct pd_err *e);
/* How chunks go whose descriptor says codec zstd; before the first of them. Coding happens in the publisher's thread. */
void pd_publish_codec(struct pd_publish *p, enum pd_codec_mode m);
int pd_publish_record(struct pd_publish *p, struct pd_buf *rec, struct pd_err *e);      /* one or several; takes the buffer over (rec is emptied) */
/* desc, plan and blocks: alive until the end job came back. */
int pd_publish_chunk(struct pd_publish *p, const struct pd_kvdesc *desc, const struct pd_plan *plan, const uint32_t *blocks, uint32_t index, struct pd_err *e);
int pd_publish_dump(struct pd_publish *p, const struct pd_kvdesc *desc, const uint32_t *blocks, const uint8_t (*hashes)[16], uint32_t n_hashes, struct pd_err *e);
int pd_publish_end(struct pd_publish *p, void *run, struct pd_err *e);
/* The next run whose jobs are all done, or NULL. With wait: blocks until there is one or the queue is empty. */
void *pd_publish_ended(struct pd_publish *p, bool wait);
int pd_publish_error(struct pd_publish *p, struct pd_err *e);   /* 0, or the error that stopped it */
int pd_publish_finish(struct pd_publish *p, struct pd_err *e);  /* waits until all is written (or failed), ends the thread, flushes */
void pd_publish_free(struct pd_publish *p);                     /* after finish, or to give up */
#endif
