#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include "unix.h"

int pd_unix_address(const char *path, struct sockaddr_un *a, struct pd_err *e)
{
    *a = (struct sockaddr_un){ .sun_family = AF_UNIX };
    if (strlen(path) >= sizeof a->sun_path)
        return pd_fail(e, PD_EUSAGE, "%s: a socket's path has at most %zu bytes", path, sizeof a->sun_path - 1);
    strcpy(a->sun_path, path);
    return 0;
}

int pd_unix_check_peer(int fd, const char *path, struct pd_err *e)
{
    struct ucred c;
    socklen_t n = sizeof c;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &c, &n))
        return pd_fail_sys(e, "%s: cannot tell who the peer is", path);
    if (c.uid != geteuid() && c.uid != 0)
        return pd_fail(e, PD_EFAIL, "%s: the peer runs as uid %u, not as %u; refused", path, (unsigned)c.uid, (unsigned)geteuid());
    return 0;
}

/* A socket that nobody answers on is left over from a killed process and is replaced; anything else at the path is somebody's. */
static int clear_stale(const char *path, const struct sockaddr_un *a, struct pd_err *e)
{
    struct stat st;
    if (lstat(path, &st))
        return errno == ENOENT ? 0 : pd_fail_sys(e, "%s", path);
    if (!S_ISSOCK(st.st_mode))
        return pd_fail(e, PD_EUSAGE, "%s exists and is no socket; choose another path", path);
    /* A datagram socket is told of a live listener (EPROTOTYPE) without being taken for a peer. */
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return pd_fail_sys(e, "%s: cannot make a socket", path);
    int refused = connect(fd, (const struct sockaddr *)a, sizeof *a) && errno == ECONNREFUSED;
    close(fd);
    if (!refused)
        return pd_fail(e, PD_EUSAGE, "%s: another process listens there; choose another path", path);
    return unlink(path) && errno != ENOENT ? pd_fail_sys(e, "%s: cannot remove the old socket", path) : 0;
}

/* Two processes that both find an old socket must not remove each other's new one. A lock on the folder leaves nothing behind. Who cannot have it goes on
 * without: it is somebody else's folder, or its holder was stopped. */
static int lock_folder(const char *path)
{
    char dir[sizeof ((struct sockaddr_un *)0)->sun_path + 1];
    const char *slash = strrchr(path, '/');
    snprintf(dir, sizeof dir, "%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (int i = 0; fd >= 0 && i < 50 && flock(fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK; i++)
        nanosleep(&(struct timespec){ 0, 20000000 }, NULL);
    return fd;
}

int pd_unix_listen(const char *path, int backlog, int *fd, struct pd_unix_name *name, struct pd_err *e)
{
    struct sockaddr_un a;
    struct stat st;
    bool named = false;
    int rc = pd_unix_address(path, &a, e);
    if (rc)
        return rc;
    int l = -1, lock = lock_folder(path);
    if ((rc = clear_stale(path, &a, e)))
        goto out;
    l = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    /* The name gets the socket's own mode (less the umask), so that it is never open to others, not even for a moment. */
    if (l < 0 || fchmod(l, 0600) || bind(l, (struct sockaddr *)&a, sizeof a)) {
        rc = pd_fail_sys(e, "%s: cannot listen", path);
        goto out;
    }
    named = true;
    if (listen(l, backlog) || lstat(path, &st))
        rc = pd_fail_sys(e, "%s: cannot listen", path);
    else {
        *name = (struct pd_unix_name){ st.st_dev, st.st_ino };
        *fd = l;
    }
out:
    if (rc && named)
        unlink(path);
    if (rc && l >= 0)
        close(l);
    if (lock >= 0)
        close(lock);
    return rc;
}

void pd_unix_unlink(const char *path, const struct pd_unix_name *name)
{
    struct stat st;
    if (!lstat(path, &st) && S_ISSOCK(st.st_mode) && st.st_dev == name->dev && st.st_ino == name->ino)
        unlink(path);
}
