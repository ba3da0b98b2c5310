#include <signal.h>
#include <string.h>
#include "stop.h"

static volatile sig_atomic_t level;

static void on_signal(int sig)
{
    (void)sig;
    if (level < 2)
        level++;
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

int pd_stop_level(void) { return level; }
