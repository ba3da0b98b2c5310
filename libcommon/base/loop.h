/* The event loop of a daemon: one thread that owns all state and never blocks, over libevent.
 *
 * Everything here is called by the thread that runs the loop, pd_loop_post excepted. Callbacks run one at a time and to their end; whatever takes longer than
 * about a millisecond belongs to a compute thread, which hands its completion back with pd_loop_post. A callback may free its own watch or timer, and any
 * other. Objects made on a loop are freed before it. Absolute times are pd_mono_us().
 */
#ifndef PD_BASE_LOOP_H
#define PD_BASE_LOOP_H
#include <stdatomic.h>
#include <stdint.h>
#include "err.h"

struct pd_loop;
int pd_loop_new(struct pd_loop **out, struct pd_err *e);
void pd_loop_free(struct pd_loop *l);           /* what was posted and has not run is dropped: its owner still has it */
int pd_loop_run(struct pd_loop *l, struct pd_err *e);   /* until pd_loop_quit; < 0: the loop itself failed */
void pd_loop_quit(struct pd_loop *l);           /* after the callback that runs now */
struct event_base;
struct event_base *pd_loop_base(struct pd_loop *l);     /* for libevent's own HTTP server */

/* ---- descriptors ---- */

/* PD_READ, PD_WRITE: would not block (also at end of file). PD_HUP: nobody is at the other end any more, or the socket has failed; a peer that has only shut
 * down its writing is no HUP. It needs no interest, and is reported as long as it holds: the callback is to free the watch. What such a peer wrote before can
 * still be read. */
enum { PD_READ = 1, PD_WRITE = 2, PD_HUP = 4 };
struct pd_watch;
typedef void pd_watch_fn(void *ctx, unsigned ready);
/* without interest; fd stays the caller's */
int pd_watch_new(struct pd_loop *l, int fd, pd_watch_fn *fn, void *ctx, struct pd_watch **out, struct pd_err *e);
int pd_watch_set(struct pd_watch *w, unsigned interest, struct pd_err *e);      /* of PD_READ, PD_WRITE; level-triggered */
void pd_watch_free(struct pd_watch *w);         /* before fd is closed. NULL: nothing */

/* ---- timers ---- */

struct pd_timer;
typedef void pd_timer_fn(void *ctx);
int pd_timer_new(struct pd_loop *l, pd_timer_fn *fn, void *ctx, struct pd_timer **out, struct pd_err *e);       /* at rest */
int pd_timer_at(struct pd_timer *t, int64_t mono_us, struct pd_err *e);         /* once, not before; replaces what was set. Past: at the next turn */
int pd_timer_in(struct pd_timer *t, int64_t us, struct pd_err *e);
void pd_timer_stop(struct pd_timer *t);
void pd_timer_free(struct pd_timer *t);         /* NULL: nothing */

/* ---- signals ---- */

/* fn(ctx, level) in the loop's thread whenever the level of base/stop has risen (1 drain, 2 stop), at once when it has before. One a process. */
typedef void pd_stop_fn(void *ctx, int level);
int pd_loop_on_stop(struct pd_loop *l, pd_stop_fn *fn, void *ctx, struct pd_err *e);

/* ---- work handed over ---- */

/* A piece of work for the loop's thread; part of what it is about, so that handing it over allocates nothing and cannot fail. Set fn and ctx, zero the rest. */
struct pd_post { void (*fn)(void *ctx); void *ctx; _Atomic(struct pd_post *) next; };
/* From any thread; each thread's posts run in the order it made them. p is the loop's until its fn is called, and may be posted again from there. Everything
 * the caller wrote before is seen by fn. */
void pd_loop_post(struct pd_loop *l, struct pd_post *p);
/* From the loop's thread: p runs after the callbacks that are due now, before the loop sleeps: to gather what they did (one write for many records). */
void pd_loop_defer(struct pd_loop *l, struct pd_post *p);
void pd_loop_undefer(struct pd_loop *l, struct pd_post *p);     /* from outside its callbacks: what p is part of is freed */
#endif
