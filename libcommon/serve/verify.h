/* The independent look at KV: what a daemon reads back of a run (readback.h), held against its publisher's record. Blocking, for commands. */
#ifndef PD_SERVE_VERIFY_H
#define PD_SERVE_VERIFY_H
#include <stdio.h>
#include "../wire/tcp.h"

struct pd_verify_opts {
    const char *at, *run;       /* the daemon, the run */
    const char *with;           /* the record: another daemon, a stream with its chunks, a dump. NULL: nothing is compared */
    const struct pd_net *net;
    size_t max_record;
    FILE *out;
    bool json, quiet;
};
/* 0: equal in all that both have. PD_ECORRUPT: a sum differs; PD_EINCOMPAT: another fingerprint, layout, generation or prompt; PD_ETIME: the lease is over, by
 * which the memory may be read; PD_EFAIL: the run is unknown there, or nothing of it is there. What was found goes to out. */
int pd_verify(const struct pd_verify_opts *o, struct pd_err *e);
#endif
