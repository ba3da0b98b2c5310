#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "dump.h"
#include "dump_format.h"

#define END_WAIT_MS 2000        /* after its stream ended or was closed the child has nothing to do but exit */

struct pd_dump_r {
    pid_t pid;
    int err_fd;
    char *path;
};

/* Above the numbers that the child wants, so that no dup2 there closes another's source. */
static int high(int fd)
{
    int h = fcntl(fd, F_DUPFD_CLOEXEC, 10);
    close(fd);
    return h;
}

static int high_pipe(int fd[2], struct pd_err *e)
{
    if (pipe2(fd, O_CLOEXEC))
        return pd_fail_sys(e, "pipe");
    fd[0] = high(fd[0]);
    fd[1] = high(fd[1]);
    if (fd[0] >= 0 && fd[1] >= 0)
        return 0;
    int rc = pd_fail_sys(e, "pipe");
    if (fd[0] >= 0)
        close(fd[0]);
    if (fd[1] >= 0)
        close(fd[1]);
    fd[0] = fd[1] = -1;
    return rc;
}

static int spawn(struct pd_dump_r *r, int file, int out, int err, char *const argv[], struct pd_err *e)
{
    posix_spawn_file_actions_t fa;
    posix_spawnattr_t at;
    sigset_t none, dfl;
    char asan[] = "ASAN_OPTIONS=detect_leaks=0:handle_segv=0";      /* of V=asan: a crash is a crash there too */
    char *env[] = { "HDF5_PLUGIN_PRELOAD=::", asan, NULL, NULL };
#ifdef PD_FAULT
    char fault[128];
    snprintf(fault, sizeof fault, "PD_FAULT=%s", getenv("PD_CHILD_FAULT") ? getenv("PD_CHILD_FAULT") : "");
    env[2] = fault;
#endif
    posix_spawn_file_actions_init(&fa);
    posix_spawnattr_init(&at);
    sigemptyset(&none);
    sigemptyset(&dfl);
    for (int s = 1; s < 32; s++)
        if (s != SIGKILL && s != SIGSTOP)
            sigaddset(&dfl, s);
    posix_spawnattr_setsigmask(&at, &none);
    posix_spawnattr_setsigdefault(&at, &dfl);
    posix_spawnattr_setflags(&at, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawn_file_actions_addopen(&fa, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&fa, out, 1);
    if (!getenv("PD_DUMP_DEBUG"))       /* libc and libhdf5 have things to say about hostile files that are no use to a person */
        posix_spawn_file_actions_addopen(&fa, 2, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&fa, file, 3);
    posix_spawn_file_actions_adddup2(&fa, err, 4);
    int rc = posix_spawn(&r->pid, "/proc/self/exe", &fa, &at, argv, env);
    posix_spawn_file_actions_destroy(&fa);
    posix_spawnattr_destroy(&at);
    if (!rc)
        return 0;
    errno = rc;
    return pd_fail_sys(e, "%s: cannot start the reader", r->path);
}

int pd_dump_spawn(int file_fd, const char *path, const char *run, enum pd_dump_mode mode, struct pd_dump_r **out, int *fd, struct pd_err *e)
{
    int data[2] = { -1, -1 }, err[2] = { -1, -1 }, file = -1, rc = PD_ENOMEM;
    struct stat st;
    char m[4], cpu[16];
    struct pd_dump_r *r = pd_calloc(1, sizeof *r, "dump reader", e);
    if (!r)
        return PD_ENOMEM;
    r->err_fd = -1;
    pd_dump_child_link();
    if (!(r->path = pd_strndup(path, strlen(path), e)))
        goto bad;
    if ((file = fcntl(file_fd, F_DUPFD_CLOEXEC, 10)) < 0 || fstat(file, &st)) {
        rc = pd_fail_sys(e, "%s", path);
        goto bad;
    }
    if ((rc = high_pipe(data, e)) || (rc = high_pipe(err, e)))
        goto bad;
    fcntl(data[1], F_SETPIPE_SZ, 1 << 20);
    snprintf(m, sizeof m, "%d", (int)mode);
    snprintf(cpu, sizeof cpu, "%lld", 20 + (long long)(st.st_size >> 24));      /* 16 MiB of packed data a second is slow */
    char *argv[] = { PD_DUMP_READER, m, (char *)(uintptr_t)(run ? run : ""), cpu, NULL };
    if ((rc = spawn(r, file, data[1], err[1], argv, e)))
        goto bad;
    close(file);
    close(data[1]);
    close(err[1]);
    r->err_fd = err[0];
    *fd = data[0];
    *out = r;
    return 0;
bad:
    for (int i = 0; i < 2; i++) {
        if (data[i] >= 0)
            close(data[i]);
        if (err[i] >= 0)
            close(err[i]);
    }
    if (file >= 0)
        close(file);
    pd_free(r->path);
    pd_free(r);
    return rc;
}

static int dump_read(const char *path, const char *run, enum pd_dump_mode mode, struct pd_dump_r **out, int *fd, struct pd_err *e)
{
    struct pd_h5_super s;
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);   /* a FIFO is refused, not waited for */
    if (file < 0)
        return pd_fail_sys(e, "%s", path);
    int rc = pd_h5_super_read(file, path, &s, e);
    if (!rc && s.size < s.eof)
        rc = pd_fail(e, PD_ECORRUPT, "%s: cut: %" PRIu64 " of %" PRIu64 " bytes are there (pd-trace kv salvage may save a part)", path, s.size, s.eof);
    if (!rc && run && !pd_run_valid(run, strlen(run)))
        rc = pd_fail(e, PD_EUSAGE, "'%.64s' is no run id", run);
    if (!rc)
        rc = pd_dump_spawn(file, path, run, mode, out, fd, e);
    close(file);
    return rc;
}

int pd_dump_read(const char *path, const char *run, struct pd_dump_r **out, int *fd, struct pd_err *e) { return dump_read(path, run, PD_DUMP_DATA, out, fd, e); }
int pd_dump_serve(const char *path, struct pd_dump_r **out, int *fd, struct pd_err *e) { return dump_read(path, NULL, PD_DUMP_SERVE, out, fd, e); }

/* Waits for the child, but not for ever: one that was left blocked on a pipe nobody reads is ended. */
static int reap(pid_t pid, int *status, bool *killed)
{
    int pfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (pfd >= 0) {
        struct pollfd p = { pfd, POLLIN, 0 };
        int n;
        do
            n = poll(&p, 1, END_WAIT_MS);
        while (n < 0 && errno == EINTR);
        *killed = n == 0;
        if (*killed)
            kill(pid, SIGKILL);
        close(pfd);
    }
    while (waitpid(pid, status, 0) < 0)
        if (errno != EINTR)
            return -1;
    return 0;
}

static int verdict(struct pd_dump_r *r, int status, bool killed, struct pd_err *e)
{
    char msg[600];
    ssize_t n = read(r->err_fd, msg, sizeof msg - 1);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return 0;
    if (WIFEXITED(status) && n > 1 && msg[0] >= 1 && msg[0] <= 8) {
        msg[n] = 0;
        return pd_fail(e, -msg[0], "%s: %.400s", r->path, msg + 1);
    }
    if (WIFSIGNALED(status)) {
        int s = WTERMSIG(status);
        if (s == SIGPIPE || killed)
            return pd_fail(e, PD_ECANCEL, "%s: reading was broken off", r->path);
        return pd_fail(e, PD_ECORRUPT, "%s: corrupt: libhdf5 %s on it", r->path, s == SIGALRM || s == SIGXCPU ? "hangs" : strsignal(s));
    }
    return pd_fail(e, PD_ECORRUPT, "%s: corrupt: the reader ended with status %d", r->path, WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

int pd_dump_read_end(struct pd_dump_r *r, struct pd_err *e)
{
    int status = 0, rc;
    bool killed = false;
    if (!r)
        return 0;
    rc = reap(r->pid, &status, &killed) ? pd_fail(e, PD_EFAIL, "%s: the reader is gone (somebody else waited for it)", r->path) : verdict(r, status, killed, e);
    close(r->err_fd);
    pd_free(r->path);
    pd_free(r);
    return rc;
}
