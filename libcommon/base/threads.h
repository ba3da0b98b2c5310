/* A pool of compute threads that runs one parallel region at a time.
 *
 * pd_threads_run hands out tasks 0..n-1, to each thread a run of neighbours (and from one that is late the others take over; the calling thread takes part), and
 * returns when all are done. Waiting threads
 * spin briefly and then sleep on a futex, because several pd processes share a machine. A pool belongs to one calling thread.
 */
#ifndef PD_BASE_THREADS_H
#define PD_BASE_THREADS_H
#include "err.h"
struct pd_threads;
typedef void pd_task_fn(void *ctx, int task, int tid);          /* tid: 0 (the caller) .. n_threads-1 */
int pd_threads_default(void);                                   /* physical cores in the process's affinity mask */
int pd_threads_new(int n, struct pd_threads **out, struct pd_err *e);   /* n >= 1; n == 1 makes no thread */
int pd_threads_count(const struct pd_threads *t);
void pd_threads_run(struct pd_threads *t, int n_tasks, pd_task_fn *fn, void *ctx);
void pd_threads_free(struct pd_threads *t);
#endif
