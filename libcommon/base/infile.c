#include "infile.h"
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

enum { PIECE = 64 << 10 };

int pd_infile_read(const char *path, size_t most, const char *what, struct pd_buf *b, struct pd_err *e)
{
    size_t begin = b->n;
    ssize_t got = 1;
    int fd = open(path, O_RDONLY | O_CLOEXEC), rc = fd < 0 ? pd_fail_sys(e, "%s", path) : 0;
    while (rc == 0 && got) {
        if ((rc = pd_buf_reserve(b, PIECE, e)) < 0)
            break;
        got = read(fd, b->p + b->n, PIECE);
        if (got < 0 && errno != EINTR)
            rc = pd_fail_sys(e, "%s: cannot read", path);
        b->n += got > 0 ? (size_t)got : 0;
        if (rc == 0 && b->n - begin > most)
            rc = pd_fail(e, PD_ECORRUPT, "%s: more than %zu bytes are no %s", path, most, what);
    }
    if (fd >= 0)
        close(fd);
    return rc;
}
