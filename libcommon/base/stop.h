/* SIGTERM and SIGINT: the first asks to drain, the second to stop. SIGPIPE is ignored: EPIPE is an error message, not a silent death. */
#ifndef PD_BASE_STOP_H
#define PD_BASE_STOP_H
void pd_stop_init(void);
int pd_stop_level(void);        /* 0 go on, 1 drain, 2 stop now */
/* An eventfd that each signal adds 1 to, so that an event loop wakes up; -1: none. The caller's, not closed here. */
void pd_stop_wake(int eventfd);
#endif
