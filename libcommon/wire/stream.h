/* Record streams over a file descriptor: a reader that frames, a writer that buffers.
 *
 * Reader: the first non-space byte decides: '{' JSON Lines, a msgpack map byte msgpack, anything else one prompt a line when `lines` is set and an
 * error without. All come out as msgpack records. Reading is incremental: pd_rstream_next with timeout 0 never blocks, so that an engine can
 * look for work between two steps. The fd itself may be blocking (poll is asked first). With fd -1 the stream is fed: the caller reads, into the room that
 * it is given, and pd_rstream_next gives out what came (pd_rstream_room).
 * Writer: msgpack, JSON Lines or nothing but what the caller writes raw. Blocking writes; SIGPIPE must be ignored by main: EPIPE becomes PD_ECANCEL.
 */
#ifndef PD_WIRE_STREAM_H
#define PD_WIRE_STREAM_H
#include "record.h"
struct iovec;
struct pd_endpoint;
struct pd_tls;

struct pd_rec {
    enum pd_kind kind;
    const uint8_t *p; size_t n;         /* the record's msgpack bytes, valid until the next call on the stream */
    uint64_t offset;                    /* of the record's first byte in the stream (JSON Lines: of its line) */
};
/* name: for messages; "-" is called stdin (of a writer: stdout). */
struct pd_rstream_opts { bool lines; size_t max_record; bool own_fd; const char *name; struct pd_tls *tls /* in place of fd; stays the caller's */;
                        bool tells_end /* a socket's writer is told when its end was read */; };
struct pd_rstream;
int pd_rstream_new(int fd, const struct pd_rstream_opts *o, struct pd_rstream **out, struct pd_err *e);
int pd_rstream_of(const struct pd_endpoint *in, const struct pd_rstream_opts *o, struct pd_rstream **out, struct pd_err *e);    /* of one that stays open */
/* 1 a record, 0 end of stream, 2 nothing within timeout_ms (-1 waits for ever; interrupted by a signal counts as 2),
 * PD_ECORRUPT for a stream that cannot be framed (message with the byte offset; a truncated last record names its run when it has one) and PD_EFAIL
 * with *bad set for one bad line or record of JSON that may be skipped: the next call goes on after it. */
int pd_rstream_next(struct pd_rstream *s, int timeout_ms, struct pd_rec *rec, bool *bad, struct pd_err *e);
bool pd_rstream_is_json(const struct pd_rstream *s);
/* A fed stream: where the next bytes go (*n of them at the most), when pd_rstream_next has said 2; then how many came, 0: the end. An idle stream keeps
 * little memory. */
int pd_rstream_room(struct pd_rstream *s, uint8_t **p, size_t *n, struct pd_err *e);
void pd_rstream_fed(struct pd_rstream *s, size_t n);
/* Ask for no byte past the end of a msgpack record, at the price of some more reads: for a socket that may be handed on after it. */
void pd_rstream_exact(struct pd_rstream *s, bool exact);
bool pd_rstream_empty(const struct pd_rstream *s);      /* no byte of a record that is not complete waits */
void pd_rstream_free(struct pd_rstream *s);

enum pd_format { PD_FMT_MSGPACK, PD_FMT_JSON };
struct pd_wstream;
int pd_wstream_new(int fd, enum pd_format f, bool own_fd, const char *name, struct pd_wstream **out, struct pd_err *e);
int pd_wstream_of(const struct pd_endpoint *to, enum pd_format f, const char *name, struct pd_wstream **out, struct pd_err *e);
int pd_wstream_put(struct pd_wstream *w, const void *rec, size_t n, struct pd_err *e);          /* one record; converted when JSON */
/* one msgpack record in pieces, written without copying; flushes first. JSON: gathered and converted */
int pd_wstream_putv(struct pd_wstream *w, const struct iovec *v, int n, struct pd_err *e);
int pd_wstream_raw(struct pd_wstream *w, const void *p, size_t n, struct pd_err *e);            /* text as it is */
int pd_wstream_flush(struct pd_wstream *w, struct pd_err *e);
/* A write failed (or a second signal ended it): nothing more goes out. False after a put that failed: that record alone cannot be written as JSON. */
bool pd_wstream_failed(const struct pd_wstream *w);
uint64_t pd_wstream_bytes(const struct pd_wstream *w);
int pd_wstream_close(struct pd_wstream *w, struct pd_err *e);   /* flush, close (own_fd), free; reports a late ENOSPC */
/* The end of an output: rc 0: w is closed and what it wrote committed; else what there is of it goes. Either may be empty. rc, or what went wrong here. */
int pd_wstream_end(struct pd_wstream *w, struct pd_endpoint *out, int rc, struct pd_err *e);
#endif
