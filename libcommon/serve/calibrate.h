/* `pd-bench calibrate`: measures what work costs on this machine and writes a profile (pd-profile.5, route/profile.h).
 *
 * Paths first, between this process and a child that takes KV as pd-kvsend does: shm and inline over a Unix socket, tcp over loopback. Then the engine: prefill
 * over (n, context), decode steps over (batch, kv), mixed steps, packing and unpacking, each the median of some repetitions, as far as the model's context and
 * the KV pool have room. Then the forms of route/profile.h are fitted to the rows. What is written is first read back as any profile is. */
#ifndef PD_SERVE_CALIBRATE_H
#define PD_SERVE_CALIBRATE_H
#include "../base/cli.h"

extern struct poptOption pd_calibrate_options[];        /* beside PD_ENGINE_OPTIONS */
int pd_calibrate_verb(struct pd_err *e);
#endif
