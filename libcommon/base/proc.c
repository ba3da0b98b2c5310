#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "proc.h"

static size_t slurp(const char *path, char *out, size_t cap)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, out, cap - 1) : -1;
    if (fd >= 0)
        close(fd);
    out[n > 0 ? n : 0] = 0;
    return n > 0 ? (size_t)n : 0;
}

/* proc(5): field 3 is the state, field 22 the start; field 2, the name in brackets, may hold anything. */
uint64_t pd_proc_start(pid_t pid)
{
    char path[40], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    char *p = slurp(path, text, sizeof text) ? strrchr(text, ')') : NULL;
    if (!p || p[1] != ' ' || p[2] == 'Z' || p[2] == 'X')
        return 0;
    for (int field = 2; p && field < 22; field++)
        p = strchr(p + 1, ' ');
    return p ? strtoull(p + 1, NULL, 10) : 0;
}

bool pd_proc_alive(pid_t pid, uint64_t start) { return pid > 0 && start && pd_proc_start(pid) == start; }

void pd_proc_boot_id(uint8_t id[16])
{
    char text[64];
    memset(id, 0, 16);
    slurp("/proc/sys/kernel/random/boot_id", text, sizeof text);
    int n = 0;
    for (const char *p = text; *p && n < 32; p++) {
        int d = *p >= '0' && *p <= '9' ? *p - '0' : *p >= 'a' && *p <= 'f' ? *p - 'a' + 10 : -1;
        if (d >= 0) {
            id[n / 2] = (uint8_t)(id[n / 2] << 4 | d);
            n++;
        }
    }
}

uint64_t pd_proc_netns(void)
{
    struct stat st;
    return stat("/proc/self/ns/net", &st) ? 0 : (uint64_t)st.st_ino;
}
