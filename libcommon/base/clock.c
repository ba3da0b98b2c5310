#include <time.h>
#include "clock.h"

static int64_t ns_of(clockid_t id)
{
    struct timespec t;
    clock_gettime(id, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t pd_mono_us(void) { return ns_of(CLOCK_MONOTONIC) / 1000; }
int64_t pd_mono_ns(void) { return ns_of(CLOCK_MONOTONIC); }
int64_t pd_wall_us(void) { return ns_of(CLOCK_REALTIME) / 1000; }
