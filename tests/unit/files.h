/* What tests ask of files. After cmocka.h. */
#ifndef FILES_H
#define FILES_H
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>

/* Descriptors of this process. */
static inline int open_fds(void)
{
    int n = -3;         /* . and .. and the folder's own */
    DIR *d = opendir("/proc/self/fd");
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

/* The names in a folder, sorted, each with a space after it. */
static inline const char *names_in(const char *dir)
{
    static char got[1000];
    char cmd[400];
    snprintf(cmd, sizeof cmd, "ls -A '%s' | tr '\\n' ' '", dir);
    FILE *f = popen(cmd, "r");
    got[fread(got, 1, sizeof got - 1, f)] = 0;
    pclose(f);
    return got;
}

static inline void holds(const char *path, const char *want)
{
    char got[100] = "";
    FILE *f = fopen(path, "r");
    if (!f)
        fail_msg("%s is missing", path);
    got[fread(got, 1, sizeof got - 1, f)] = 0;
    fclose(f);
    assert_string_equal(got, want);
}

static inline void *read_whole(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        fail_msg("%s is missing", path);
    fseek(f, 0, SEEK_END);
    *n = (size_t)ftell(f);
    rewind(f);
    void *p = malloc(*n);
    assert_int_equal(fread(p, 1, *n, f), *n);
    fclose(f);
    return p;
}
#endif
