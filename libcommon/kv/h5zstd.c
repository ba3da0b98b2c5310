#include <stdlib.h>
#include <string.h>
#include <zstd.h>
#include "h5zstd.h"

#define MAX_PLAIN ((unsigned long long)1 << 31)         /* of a frame that anybody's file may hold */

/* The library's contract (H5Zpublic.h): *buf is malloc's and may be replaced; 0 is failure. free and malloc are therefore meant here. */
static size_t filter(unsigned flags, size_t n_cd, const unsigned cd[], size_t nbytes, size_t *buf_size, void **buf)
{
    size_t cap, got;
    if (flags & H5Z_FLAG_REVERSE) {
        unsigned long long plain = ZSTD_getFrameContentSize(*buf, nbytes);
        if (plain == ZSTD_CONTENTSIZE_ERROR || plain == ZSTD_CONTENTSIZE_UNKNOWN || plain > MAX_PLAIN || !plain)
            return 0;
        cap = (size_t)plain;
    } else {
        cap = ZSTD_compressBound(nbytes);
    }
    void *out = malloc(cap);
    if (!out)
        return 0;
    if (flags & H5Z_FLAG_REVERSE)
        got = ZSTD_decompress(out, cap, *buf, nbytes);
    else
        got = ZSTD_compress(out, cap, *buf, nbytes, n_cd ? (int)cd[0] : PD_H5Z_LEVEL);
    if (ZSTD_isError(got)) {
        free(out);
        return 0;
    }
    free(*buf);
    *buf = out;
    *buf_size = cap;
    return got;
}

const H5Z_class2_t pd_h5z_class = {
    .version = H5Z_CLASS_T_VERS, .id = PD_H5Z_ZSTD, .encoder_present = 1, .decoder_present = 1, .name = "zstd", .filter = filter,
};
