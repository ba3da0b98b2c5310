#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../base/fault.h"
#include "../base/mem.h"
#include "h5fd.h"

struct info { int fd; bool write; int *sys; };
struct file {
    H5FD_t pub;                 /* first: libhdf5's part */
    struct info in;
    haddr_t eoa, eof;           /* allocated by libhdf5; of the file */
};

static H5FD_t *fd_open(const char *name, unsigned flags, hid_t fapl, haddr_t maxaddr)
{
    const struct info *in = H5Pget_driver_info(fapl);
    struct stat st;
    if (!in || fstat(in->fd, &st) || ((flags & H5F_ACC_TRUNC) && ftruncate(in->fd, 0)))
        return NULL;
    struct file *f = pd_calloc(1, sizeof *f, "HDF5 file", NULL);
    if (!f) {
        *in->sys = ENOMEM;
        return NULL;
    }
    f->in = *in;
    f->eof = flags & H5F_ACC_TRUNC ? 0 : (haddr_t)st.st_size;
    return &f->pub;
}

static herr_t fd_close(H5FD_t *p)
{
    pd_free(p);
    return 0;
}

static int fd_cmp(const H5FD_t *a, const H5FD_t *b)
{
    int x = ((const struct file *)a)->in.fd, y = ((const struct file *)b)->in.fd;
    return x < y ? -1 : x > y;
}

static herr_t fd_query(const H5FD_t *p, unsigned long *flags)
{
    *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE | H5FD_FEAT_AGGREGATE_SMALLDATA | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
    return 0;
}

static haddr_t fd_get_eoa(const H5FD_t *p, H5FD_mem_t type) { return ((const struct file *)p)->eoa; }
static haddr_t fd_get_eof(const H5FD_t *p, H5FD_mem_t type) { return ((const struct file *)p)->eof; }

static herr_t fd_set_eoa(H5FD_t *p, H5FD_mem_t type, haddr_t addr)
{
    ((struct file *)p)->eoa = addr;
    return 0;
}

/* What lies past the end of the file reads as zero, as the other drivers have it. */
static herr_t fd_read(H5FD_t *p, H5FD_mem_t type, hid_t dxpl, haddr_t addr, size_t size, void *buf)
{
    struct file *f = (struct file *)p;
    uint8_t *to = buf;
    if (addr > f->eoa || size > f->eoa - addr || addr > INT64_MAX)
        return -1;
    while (size) {
        ssize_t n = pd_fault("read") ? (errno = EIO, -1) : pread(f->in.fd, to, size, (off_t)addr);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            *f->in.sys = errno;
            return -1;
        }
        if (!n) {
            memset(to, 0, size);
            break;
        }
        to += n;
        addr += (haddr_t)n;
        size -= (size_t)n;
    }
    return 0;
}

static herr_t fd_write(H5FD_t *p, H5FD_mem_t type, hid_t dxpl, haddr_t addr, size_t size, const void *buf)
{
    struct file *f = (struct file *)p;
    const uint8_t *from = buf;
    if (!f->in.write || addr > INT64_MAX)
        return -1;
    if (!*f->in.sys && pd_fault("write"))
        *f->in.sys = ENOSPC;
    while (size && !*f->in.sys) {
        ssize_t n = pwrite(f->in.fd, from, size, (off_t)addr);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            *f->in.sys = n < 0 ? errno : ENOSPC;
            break;
        }
        from += n;
        addr += (haddr_t)n;
        size -= (size_t)n;
    }
    addr += size;
    if (addr > f->eof)
        f->eof = addr;
    return 0;
}

/* At the end the file is as long as what libhdf5 allocated: the superblock says that length, and a shorter file is known to be cut. */
static herr_t fd_truncate(H5FD_t *p, hid_t dxpl, hbool_t closing)
{
    struct file *f = (struct file *)p;
    if (!f->in.write)
        return 0;
    if (f->eoa != f->eof && !*f->in.sys && ftruncate(f->in.fd, (off_t)f->eoa))
        *f->in.sys = errno;
    f->eof = f->eoa;
    return 0;
}

static herr_t fd_flush(H5FD_t *p, hid_t dxpl, hbool_t closing) { return 0; }

static const H5FD_class_t driver = {
    .name = "pd descriptor", .maxaddr = INT64_MAX, .fc_degree = H5F_CLOSE_STRONG, .fapl_size = sizeof(struct info), .open = fd_open, .close = fd_close, .cmp = fd_cmp,
    .query = fd_query, .get_eoa = fd_get_eoa, .set_eoa = fd_set_eoa, .get_eof = fd_get_eof, .read = fd_read, .write = fd_write, .flush = fd_flush,
    .truncate = fd_truncate, .fl_map = H5FD_FLMAP_DICHOTOMY,
};

bool pd_h5fd_set(hid_t fapl, int fd, bool write, int *sys)
{
    static hid_t id = -1;       /* one registration a process; libhdf5 itself is used by one thread at a time */
    const struct info in = { fd, write, sys };
    if (id < 0)
        id = H5FDregister(&driver);
    return id >= 0 && H5Pset_driver(fapl, id, &in) >= 0;
}
