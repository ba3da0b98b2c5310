/* The log reader: trace files, read as one.
 *
 * Each file is read as a stream, in memory bounded by its largest record. A killed writer can tear a record anywhere: the reader goes on at the next map
 * that begins with `pd`, and counts what was lost. A torn record that swallowed the beginning of the next is told from a whole one, since no string of a
 * record (UTF-8) can hold the bytes that a record begins with. JSON Lines (pd-trace cat) are read too; a bad line is lost alone.
 *
 * Order: within a file as it stands, since a writer appends as things happen; between files by time, that of a process being its monotonic clock set
 * against its wall clock once, so that a step of the wall clock moves nothing. Processes whose clocks agree (one boot of one host) are set together.
 *
 * A file that was rotated (FILE.1) is read with it. A file named twice is read once.
 */
#ifndef PD_TRACE_LOG_H
#define PD_TRACE_LOG_H
#include "../wire/record.h"
#include "state.h"

struct pd_net;
struct pd_log_opts {
    size_t max_record;          /* 0: PD_MAX_RECORD_DEFAULT */
    const struct pd_net *net;   /* for sockets; may be NULL */
    bool follow;                /* the end of a file is not its end: it is read on as it grows, is replaced or cut */
};
struct pd_log_rec {
    enum pd_kind kind;
    const uint8_t *p; size_t n;         /* msgpack; valid until the next call, as are ev's strings */
    struct pd_event ev;                 /* of an event */
    enum pd_state_id state;
    int64_t at_us;                      /* when, as wall time; of another kind: that of the record before it in its file */
    uint32_t file; uint64_t offset;     /* where: pd_log_name(file), byte (of JSON Lines: of its line) */
};
struct pd_log_stats { uint64_t records, torn, torn_bytes; };

struct pd_log;
/* paths: NULL-terminated; none: standard input. Endpoints (endpoint.h) work too. */
int pd_log_open(const char *const *paths, const struct pd_log_opts *o, struct pd_log **out, struct pd_err *e);
/* 1 a record; 0 the end (follow: nothing for now); PD_ECORRUPT for a file that holds bytes but no record. A signal: PD_ECANCEL. */
int pd_log_next(struct pd_log *l, struct pd_log_rec *r, struct pd_err *e);
const char *pd_log_name(const struct pd_log *l, uint32_t file);
struct pd_log_stats pd_log_stats(const struct pd_log *l);
bool pd_log_over(const struct pd_log *l);       /* follow: nothing can come any more (pipes and sockets that ended) */
void pd_log_free(struct pd_log *l);
#endif
