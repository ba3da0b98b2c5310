#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include "fault.h"
#include "mem.h"
#include "outfile.h"

static char *dir_of(const char *path, struct pd_err *e)
{
    const char *slash = strrchr(path, '/');
    return slash ? pd_strndup(path, slash == path ? 1 : (size_t)(slash - path), e) : pd_strndup(".", 1, e);
}

/* Where /proc tells of an open file, for linkat: that is how an unnamed one gets a name. */
static const char *proc_name(int fd, char out[40])
{
    snprintf(out, 40, "/proc/self/fd/%d", fd);
    return out;
}

static int open_beside(struct pd_outfile *f, struct pd_err *e)
{
    char proc[40];
    if (!(f->dir = dir_of(f->path, e)))
        return PD_ENOMEM;
    f->fd = pd_fault("tmpfile") ? (errno = EOPNOTSUPP, -1) : open(f->dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (f->fd >= 0 && !access(proc_name(f->fd, proc), F_OK))
        return 0;
    if (f->fd >= 0) {       /* no /proc: it could never get its name */
        close(f->fd);
        f->fd = -1;
    } else if (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT && errno != EINVAL)
        return pd_fail_sys(e, "%s: cannot make a file beside it", f->path);
    size_t n = strlen(f->path) + 16;
    if (!(f->tmp = pd_calloc(n, 1, "a temporary name", e)))
        return PD_ENOMEM;
    snprintf(f->tmp, n, "%s.tmp.XXXXXX", f->path);
    if ((f->fd = mkostemp(f->tmp, O_CLOEXEC)) >= 0)
        return 0;
    int rc = pd_fail_sys(e, "%s: cannot make a file beside it", f->path);
    pd_free(f->tmp);
    f->tmp = NULL;
    return rc;
}

int pd_outfile_open(const char *path, struct pd_outfile *f, struct pd_err *e)
{
    struct stat st, link;
    char *real = NULL;
    bool there = !stat(path, &st);
    *f = (struct pd_outfile){ .fd = -1 };
    if (there && !S_ISREG(st.st_mode))
        return pd_fail(e, PD_EUSAGE, "%s is %s; name a regular file", path, S_ISDIR(st.st_mode) ? "a directory" : "no regular file");
    if (!lstat(path, &link) && S_ISLNK(link.st_mode) && !(real = realpath(path, NULL)))
        return pd_fail_sys(e, "%s is a link to a file that is not there", path);
    f->path = pd_strndup(real ? real : path, strlen(real ? real : path), e);
    free(real);
    int rc = f->path ? open_beside(f, e) : PD_ENOMEM;
    if (!rc && there && fchmod(f->fd, st.st_mode & 0777))
        rc = pd_fail_sys(e, "%s: cannot keep the mode of the old file", path);
    if (rc)
        pd_outfile_abort(f);
    return rc;
}

/* Give the unnamed file a name beside the target, so that one rename puts it in place. */
static int name_it(struct pd_outfile *f, struct pd_err *e)
{
    char proc[40];
    size_t n = strlen(f->path) + 40;
    char *tmp = pd_calloc(n, 1, "a temporary name", e);
    if (!tmp)
        return PD_ENOMEM;
    for (unsigned i = 0; i < 100; i++) {
        snprintf(tmp, n, "%s.tmp.%ld.%u", f->path, (long)getpid(), i);
        if (!linkat(AT_FDCWD, proc_name(f->fd, proc), AT_FDCWD, tmp, AT_SYMLINK_FOLLOW)) {
            f->tmp = tmp;
            return 0;
        }
        if (errno != EEXIST)
            break;
    }
    int rc = pd_fail_sys(e, "%s: cannot name the file beside it", f->path);
    pd_free(tmp);
    return rc;
}

/* The new name too outlives a loss of power; the bytes are down already, and some file systems refuse this. */
static void sync_dir(const char *dir)
{
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
}

int pd_outfile_commit(struct pd_outfile *f, struct pd_err *e)
{
    int rc = 0;
    if (pd_fault("fsync") ? (errno = EIO, -1) : fsync(f->fd))
        rc = pd_fail_sys(e, "cannot bring %s to the disk", f->path);
    if (!rc && !f->tmp)
        rc = name_it(f, e);
    if (close(f->fd) && errno != EINTR && !rc)      /* some file systems tell of a full disk only now */
        rc = pd_fail_sys(e, "cannot close %s", f->path);
    f->fd = -1;
    if (!rc && rename(f->tmp, f->path))
        rc = pd_fail_sys(e, "cannot rename %s to %s", f->tmp, f->path);
    if (!rc) {
        pd_free(f->tmp);
        f->tmp = NULL;
        sync_dir(f->dir);
    }
    pd_outfile_abort(f);        /* what is left to free; after a failure the temporary goes too */
    return rc;
}

void pd_outfile_abort(struct pd_outfile *f)
{
    if (f->path && f->fd >= 0)
        close(f->fd);
    if (f->tmp)
        unlink(f->tmp);
    pd_free(f->path);
    pd_free(f->dir);
    pd_free(f->tmp);
    *f = (struct pd_outfile){ .fd = -1 };
}
