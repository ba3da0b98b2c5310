#include "fault.h"

#ifdef PD_FAULT
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Calls that can fail, then the states of a run or a lease (trace/state.h, by which a test holds them equal). */
static const char *const point_name[] = { "malloc", "read", "write", "fsync", "mmap", "tmpfile", "flip", "flip_held", "rdma_reg",
    "accepted", "route_selected", "prefill_started", "prefill_completed", "kv_published", "kv_transfer_started", "kv_transfer_completed", "decode_started",
    "streaming", "completed", "cancelled", "failed", "blocked", "fallback", "retry", "migrated", "first_token_early", "lease_granted", "lease_read",
    "lease_renewed", "lease_released", "lease_expired", "lease_revoked", "reaped", "cancel_acked", "kv_moved", "starting", "ready", "draining", "rotated", "gone" };
enum { N_POINTS = sizeof point_name / sizeof *point_name, N_COUNTED = 6, N_CALLS = 9 };
static const struct action { const char *name; int signal; } action[] = { { "fail", 0 }, { "stop", SIGSTOP }, { "kill", SIGKILL } };
enum { N_ACTIONS = sizeof action / sizeof *action };
static long at[N_ACTIONS][N_POINTS];
static atomic_long passes[N_POINTS];
static pthread_once_t parsed = PTHREAD_ONCE_INIT;

static int point_index(const char *s, size_t n)
{
    for (int i = 0; i < N_POINTS; i++)
        if (strlen(point_name[i]) == n && !memcmp(point_name[i], s, n))
            return i;
    return -1;
}

/* A drill with a misspelt point would pass without having drilled anything: that ends the process. Only this build has it. */
static void refuse(const char *spec)
{
    dprintf(2, "PD_FAULT: '%s' is not point:fail:N, point:stop:N or point:kill:N (points: malloc read write fsync mmap tmpfile flip flip_held rdma_reg; for "
            "stop and kill the states of a run too; example: malloc:fail:17)\n", spec);
    _exit(2);
}

static void parse(void)
{
    const char *all = getenv("PD_FAULT"), *s = all;
    while (s && *s) {
        const char *colon = strchr(s, ':');
        int i = colon ? point_index(s, (size_t)(colon - s)) : -1, a = 0;
        char *end;
        while (i >= 0 && a < N_ACTIONS && (strncmp(colon + 1, action[a].name, 4) || colon[5] != ':'))
            a++;
        if (i < 0 || a == N_ACTIONS || (!action[a].signal && i >= N_CALLS))
            refuse(all);
        long n = strtol(colon + 6, &end, 10);
        if (end == colon + 6 || n < 1 || (*end && *end != ','))
            refuse(all);
        at[a][i] = n;
        s = *end ? end + 1 : end;
    }
}

/* How often each point was passed, for a drill that wants to fail every one of them: a line of PD_FAULT_COUNT's file. */
__attribute__((destructor)) static void tell_counts(void)
{
    const char *path = getenv("PD_FAULT_COUNT");
    FILE *f = path ? fopen(path, "ae") : NULL;
    if (!f)
        return;
    for (int i = 0; i < N_COUNTED; i++)
        fprintf(f, "%s %ld%c", point_name[i], atomic_load(&passes[i]), i + 1 < N_COUNTED ? ' ' : '\n');
    fclose(f);
}

bool pd_fault(const char *point)
{
    pthread_once(&parsed, parse);
    int i = point_index(point, strlen(point));
    if (i < 0)
        return false;
    long n = atomic_fetch_add(&passes[i], 1) + 1;
    for (int a = 1; a < N_ACTIONS; a++)
        if (n == at[a][i])
            raise(action[a].signal);
    return n == at[0][i];
}
#else
typedef int pd_fault_is_not_compiled_in;    /* ISO C wants something in every file */
#endif
