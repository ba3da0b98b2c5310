/* pd-trace cat: any stream of records (msgpack, JSON Lines) copied record by record in the form that the writer has. Lossless both ways; kinds and keys
 * that are not known pass unchanged. */
#ifndef PD_TRACE_SHOW_H
#define PD_TRACE_SHOW_H
#include "../wire/stream.h"
#include "log.h"
/* Reads fd (not closed) to its end. A bad line or record of JSON is told on stderr and counted in *bad; a stream that cannot be framed ends it with
 * PD_ECORRUPT,
 * after all records before that place were written. The caller flushes w. */
int pd_trace_cat(const struct pd_endpoint *in, const char *name, size_t max_record, struct pd_wstream *w, uint64_t *bad, struct pd_err *e);
/* pd-trace merge: the records of several logs as one stream, in order (log.h). Other kinds pass unchanged. *torn: places where records were lost. */
int pd_trace_merge(const char *const *paths, const struct pd_log_opts *o, struct pd_wstream *w, uint64_t *torn, struct pd_err *e);
#endif
