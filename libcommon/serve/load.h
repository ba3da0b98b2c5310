/* `pd-bench load`: a client that sends requests to a router or a worker at their times and notes when what of the answers came.
 *
 * Open loop: a request is sent at its arrival_us after the stream's start, whether those before it were answered or not, over one connection. What is noted
 * counts from the scheduled time, so a server, or a client, that falls behind cannot hide it. Closed loop: so many at once, each sent when one before it has
 * ended; then there is no scheduled time.
 * Results go out as they came, each with what was noted, in us since the stream's start (pd-wire.5, "Results of a load"): sched_us, sent_us, first_us, done_us,
 * gaps_us, and class, slo and reusable_tokens of its request. A request that nobody answered gets an error and a result of its own: nothing is left out of the
 * denominator. One token record is one token; those that were read at once have gaps of 0. */
#ifndef PD_SERVE_LOAD_H
#define PD_SERVE_LOAD_H
#include "../base/cli.h"
#include "../wire/stream.h"

struct pd_load_opts {
    const char *at;                     /* "unix:PATH", "tcp:HOST:PORT"; NULL: a null server of our own, a child that answers at once: the client's own floor */
    const struct pd_net *net;
    size_t max_record;
    uint32_t concurrency;               /* 0: open loop */
    bool no_stream;                     /* results alone: neither first token nor gaps are seen */
    int64_t idle_us;                    /* nothing came, and nothing is to be sent, for so long: the rest is given up */
};
/* All requests of `in` first, then the load. *status: the worst of what failed (base/err.h). */
int pd_load_run(const struct pd_load_opts *o, struct pd_rstream *in, struct pd_wstream *results, int *status, struct pd_err *e);

extern struct poptOption pd_load_options[];
int pd_load_verb(int *status, struct pd_err *e);
#endif
