/* The pool. Each thread has a run of neighbouring tasks of the region in progress: a 64-bit word holds where it ends and what comes next. Its owner takes from
 * the front, so that a thread goes through memory in order and what a task asked for ahead serves the next one; who has none left takes from the end of
 * another's. A task is claimed by a compare and swap on that word, so a worker that slept through whole regions can neither delay the caller nor take a task
 * that is not there; and while a claimed task is unfinished its region cannot end, so fn, ctx and n_tasks stay valid for it. */
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "mem.h"
#include "threads.h"

enum { SPIN_NS = 8000, LINE = 64 };

struct worker {
    struct pd_threads *pool;
    pthread_t thread;
    int tid;
};

struct lane { _Alignas(LINE) _Atomic uint64_t tasks; };         /* end << 32 | next */

struct pd_threads {
    _Alignas(LINE) _Atomic uint32_t region;     /* counts them: there is something to do */
    _Alignas(LINE) _Atomic uint32_t done;       /* tasks finished; the caller sleeps on it */
    _Atomic uint32_t caller_sleeps;
    _Alignas(LINE) _Atomic uint32_t bell;       /* the workers sleep on it */
    _Atomic uint32_t sleepers;
    _Atomic bool quit;
    pd_task_fn *fn;             /* written between regions only */
    void *ctx;
    uint32_t n_tasks;
    struct lane *lane;          /* [n] */
    int n;                      /* threads, the caller among them; before the first of them runs */
    struct worker *workers;     /* n - 1 */
    int started;                /* of them */
};

static void futex_wait(_Atomic uint32_t *word, uint32_t seen) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0); }
static void futex_wake(_Atomic uint32_t *word, int n) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0); }

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Spins while cond() holds, SPIN_NS at most; true when it ended. The clock is read now and then only. */
#define SPIN_WHILE(cond) ({ \
        bool over_ = false; \
        int64_t end_ = 0; \
        for (unsigned i_ = 1; !(over_ = !(cond)); i_++) { \
            relax(); \
            if (i_ % 16 == 0) { \
                int64_t t_ = now_ns(); \
                if (!end_) \
                    end_ = t_ + SPIN_NS; \
                else if (t_ > end_) \
                    break; \
            } \
        } \
        over_; })

/* One of the lane's tasks, from its front or its end. */
static bool take(struct lane *l, bool front, int *task)
{
    uint64_t t = atomic_load(&l->tasks);
    while ((uint32_t)t < t >> 32)
        if (atomic_compare_exchange_weak(&l->tasks, &t, front ? t + 1 : t - ((uint64_t)1 << 32))) {
            *task = front ? (int)(uint32_t)t : (int)(t >> 32) - 1;
            return true;
        }
    return false;
}

static bool claim(struct pd_threads *p, int tid, int *task)
{
    if (take(&p->lane[tid], true, task))
        return true;
    for (int i = 1; i < p->n; i++)
        if (take(&p->lane[(tid + i) % p->n], false, task))
            return true;
    return false;
}

/* Runs tasks until none is left to hand out. */
static void work(struct pd_threads *p, int tid)
{
    for (int task; claim(p, tid, &task);) {
        p->fn(p->ctx, task, tid);
        const uint32_t all = p->n_tasks;        /* before it counts as done: the next region may begin then */
        if (atomic_fetch_add(&p->done, 1) + 1 == all && atomic_load(&p->caller_sleeps))
            futex_wake(&p->done, 1);
    }
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct pd_threads *p = w->pool;
    for (;;) {
        const uint32_t seen = atomic_load(&p->region);
        work(p, w->tid);
        if (SPIN_WHILE(atomic_load(&p->region) == seen && !atomic_load(&p->quit))) {
            if (atomic_load(&p->quit))
                return NULL;
            continue;
        }
        uint32_t bell = atomic_load(&p->bell);
        atomic_fetch_add(&p->sleepers, 1);
        if (atomic_load(&p->region) == seen && !atomic_load(&p->quit))
            futex_wait(&p->bell, bell);
        atomic_fetch_sub(&p->sleepers, 1);
    }
}

static void ring(struct pd_threads *p, int n)
{
    if (!atomic_load(&p->sleepers))
        return;
    atomic_fetch_add(&p->bell, 1);
    futex_wake(&p->bell, n);
}

void pd_threads_run(struct pd_threads *p, int n_tasks, pd_task_fn *fn, void *ctx)
{
    if (p->n == 1 || n_tasks <= 1) {
        for (int i = 0; i < n_tasks; i++)
            fn(ctx, i, 0);
        return;
    }
    p->fn = fn;
    p->ctx = ctx;
    atomic_store(&p->done, 0);
    p->n_tasks = (uint32_t)n_tasks;
    for (int i = 0; i < p->n; i++) {
        const uint64_t from = (uint64_t)n_tasks * (uint64_t)i / (uint64_t)p->n, to = (uint64_t)n_tasks * ((uint64_t)i + 1) / (uint64_t)p->n;
        atomic_store(&p->lane[i].tasks, to << 32 | from);
    }
    atomic_fetch_add(&p->region, 1);
    ring(p, n_tasks - 1 < p->n - 1 ? n_tasks - 1 : p->n - 1);
    work(p, 0);
    uint32_t d;
    if (SPIN_WHILE(atomic_load(&p->done) != (uint32_t)n_tasks))
        return;
    atomic_store(&p->caller_sleeps, 1);
    while ((d = atomic_load(&p->done)) != (uint32_t)n_tasks)
        futex_wait(&p->done, d);
    atomic_store(&p->caller_sleeps, 0);
}

int pd_threads_count(const struct pd_threads *p) { return p->n; }

void pd_threads_free(struct pd_threads *p)
{
    if (!p)
        return;
    atomic_store(&p->quit, true);
    atomic_fetch_add(&p->bell, 1);
    futex_wake(&p->bell, p->n);
    for (int i = 0; i < p->started; i++)
        pthread_join(p->workers[i].thread, NULL);
    pd_free(p->workers);
    pd_free(p->lane);
    pd_free(p);
}

int pd_threads_new(int n, struct pd_threads **out, struct pd_err *e)
{
    if (n < 1 || n > 1024)
        return pd_fail(e, PD_EUSAGE, "threads: %d is out of range; use 1 to 1024", n);
    struct pd_threads *p = pd_alloc_aligned(sizeof *p, "thread pool", e);
    if (!p)
        return PD_ENOMEM;
    memset(p, 0, sizeof *p);
    p->n = n;
    p->workers = pd_calloc((size_t)n - 1, sizeof *p->workers, "thread pool", e);
    if (!p->workers || !(p->lane = pd_alloc_aligned((size_t)n * sizeof *p->lane, "thread pool", e))) {
        pd_free(p->workers);
        pd_free(p);
        return PD_ENOMEM;
    }
    memset(p->lane, 0, (size_t)n * sizeof *p->lane);
    /* signals belong to the thread that made the pool */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = 0;
    for (int i = 0; i < n - 1 && !rc; i++) {
        struct worker *w = &p->workers[i];
        w->pool = p;
        w->tid = i + 1;
        rc = pthread_create(&w->thread, NULL, worker_main, w);
        p->started += !rc;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc) {
        const int started = p->started;
        pd_threads_free(p);
        return pd_fail(e, PD_ENOMEM, "threads: cannot start thread %d of %d: %s; use fewer (-t)", started + 2, n, strerror(rc));
    }
    *out = p;
    return 0;
}

/* The first CPU that shares a core with `cpu`, or `cpu` itself where the kernel does not say. */
static int core_of(int cpu)
{
    char path[96];
    int first = cpu;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    FILE *f = fopen(path, "re");
    if (!f)
        return cpu;
    if (fscanf(f, "%d", &first) != 1 || first < 0)
        first = cpu;
    fclose(f);
    return first;
}

int pd_threads_default(void)
{
    enum { CPUS = 4096 };
    cpu_set_t set[CPUS / CPU_SETSIZE], cores[CPUS / CPU_SETSIZE];
    CPU_ZERO_S(sizeof set, set);
    CPU_ZERO_S(sizeof cores, cores);
    if (sched_getaffinity(0, sizeof set, set))
        return 1;
    for (int c = 0; c < CPUS; c++) {
        if (!CPU_ISSET_S(c, sizeof set, set))
            continue;
        int core = core_of(c);
        CPU_SET_S(core < CPUS ? core : c, sizeof cores, cores);
    }
    int n = CPU_COUNT_S(sizeof cores, cores);
    return n ? n : 1;
}
