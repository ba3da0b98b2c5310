/* What we ourselves parse of a dump file: the superblock, a packed chunk, and the filter that other programs load. libhdf5's own parsing is not fuzzed here:
 * it is kept in a child, and tests/unit/test_dump.c mutates whole files. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "../../libcommon/kv/dump_format.h"
#include "../../libcommon/kv/h5zstd.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static uint8_t out[4096], tmp[4096];
    struct pd_h5_super s;
    struct pd_err e;
    if (fd < 0)
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (!ftruncate(fd, 0) && pwrite(fd, data, size, 0) == (ssize_t)size)
        pd_h5_super_read(fd, "fuzz", &s, &e);
    for (size_t n = 2; n <= sizeof out; n *= 8)
        if (!pd_h5z_decode(data, size, 2, tmp, out, n, &e) && n % 2)
            __builtin_trap();
    void *buf = malloc(size + 1);
    if (buf) {
        size_t cap = size + 1, got;
        memcpy(buf, data, size);
        /* The filter allocates what a frame's header asks for; the limit of 2 GiB is its own, keep the fuzzer under its. */
        if (size < 6 || !(data[4] & 0x80))
            got = pd_h5z_class.filter(H5Z_FLAG_REVERSE, 0, NULL, size, &cap, &buf);
        else
            got = 0;
        if (got > cap)
            __builtin_trap();
        free(buf);
    }
    return 0;
}
