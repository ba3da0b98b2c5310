/* Is a process still the one it was? Its number comes again, so it is known by number and start time (both from /proc, this host only). */
#ifndef PD_BASE_PROC_H
#define PD_BASE_PROC_H
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
uint64_t pd_proc_start(pid_t pid);                  /* clock ticks since boot; 0: no such process, or a zombie */
bool pd_proc_alive(pid_t pid, uint64_t start);
void pd_proc_boot_id(uint8_t id[16]);               /* /proc/sys/kernel/random/boot_id; zero where there is none */
uint64_t pd_proc_netns(void);                       /* inode of this process's network namespace; 0 unknown */
#endif
