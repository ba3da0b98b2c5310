/* What a person or a script asks of a daemon: its ledger, the workers it knows or is. Blocking, for commands. */
#ifndef PD_SERVE_ASK_H
#define PD_SERVE_ASK_H
#include "../wire/record.h"
#include "../wire/tcp.h"

/* The answer to `status`, as raw msgpack. at: "unix:PATH", "tcp:HOST:PORT". PD_ETIME: nobody is there, or no answer within net->connect_us. */
int pd_ask_status(const char *at, const struct pd_net *net, struct pd_buf *rec, struct pd_err *e);
/* What it reads back of a run (readback.h), as raw msgpack: a `status` with `verify`. PD_EFAIL: unknown there. */
int pd_ask_verify(const char *at, const char *run, const struct pd_net *net, struct pd_buf *rec, struct pd_err *e);
/* The pairs that a router has on hold, as raw msgpack: a `status` with `holds`; after the release of one, "P,D" by endpoint or name, or "all" (NULL: none). */
int pd_ask_holds(const char *at, const char *release, const char *reason, const struct pd_net *net, struct pd_buf *rec, struct pd_err *e);
/* Its `worker` records, one after the other: a worker's own, a router's of all it knows. PD_EFAIL: it is neither. */
int pd_ask_workers(const char *at, const struct pd_net *net, struct pd_buf *recs, struct pd_err *e);
/* The status record for a person. */
int pd_status_text(const uint8_t *rec, size_t n, struct pd_buf *out, struct pd_err *e);

/* To -o, as the command line says: records (msgpack, or JSON Lines), text, and the whole of --status. */
int pd_print_records(const uint8_t *p, size_t n, struct pd_err *e);
int pd_print_text(const struct pd_buf *b, struct pd_err *e);
int pd_print_status(const char *at, struct pd_err *e);
int pd_print_holds(const char *at, const char *release, const char *reason, struct pd_err *e);
#endif
