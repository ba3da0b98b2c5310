#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
#include "stop.h"

static atomic_int level;        /* lock-free; a handler may run in any thread, and the publisher asks too */
static atomic_int wake = -1;

static void on_signal(int sig)
{
    (void)sig;
    int was = atomic_load(&level), fd = atomic_load(&wake), saved = errno;
    while (was < 2 && !atomic_compare_exchange_weak(&level, &was, was + 1)) {}
    if (fd >= 0 && write(fd, &(uint64_t){ 1 }, sizeof(uint64_t)) < 0) {}        /* full: it is readable already */
    errno = saved;
}

void pd_stop_init(void)
{
    struct sigaction sa;
    memset(&sa, 0, sizeof sa);
    sigemptyset(&sa.sa_mask);
    sa.sa_handler = on_signal;      /* no SA_RESTART: a blocked poll returns, so that the loop sees it */
    sigaction(SIGTERM, &sa, NULL);
    sigaction(SIGINT, &sa, NULL);
    sa.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &sa, NULL);
    sigaction(SIGXFSZ, &sa, NULL);      /* EFBIG, likewise */
}

void pd_stop_wake(int eventfd) { atomic_store(&wake, eventfd); }
int pd_stop_level(void) { return atomic_load(&level); }
