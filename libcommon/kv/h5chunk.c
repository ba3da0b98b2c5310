#include <zstd.h>
#include "../base/mem.h"
#include "h5zstd.h"

/* Byte j of every element together: what HDF5's filter 2 does. */
static void shuffle(const uint8_t *in, uint8_t *out, size_t n, size_t el)
{
    size_t count = n / el;
    for (size_t j = 0; j < el; j++)
        for (size_t i = 0; i < count; i++)
            out[j * count + i] = in[i * el + j];
}

static void unshuffle(const uint8_t *in, uint8_t *out, size_t n, size_t el)
{
    size_t count = n / el;
    for (size_t j = 0; j < el; j++)
        for (size_t i = 0; i < count; i++)
            out[i * el + j] = in[j * count + i];
}

size_t pd_h5z_bound(size_t n) { return ZSTD_compressBound(n); }

int pd_h5z_encode(const void *in, size_t n, size_t el, void *tmp, void *out, size_t *len, struct pd_err *e)
{
    shuffle(in, tmp, n, el);
    size_t got = ZSTD_compress(out, ZSTD_compressBound(n), tmp, n, PD_H5Z_LEVEL);
    if (ZSTD_isError(got))
        return pd_fail(e, PD_ENOMEM, "zstd: %s", ZSTD_getErrorName(got));
    *len = got;
    return 0;
}

int pd_h5z_decode(const void *in, size_t len, size_t el, void *tmp, void *out, size_t n, struct pd_err *e)
{
    unsigned long long plain = ZSTD_getFrameContentSize(in, len);
    if (plain != n)
        return pd_fail(e, PD_ECORRUPT, "not a zstd frame of %zu bytes", n);
    size_t got = ZSTD_decompress(tmp, n, in, len);
    if (ZSTD_isError(got) || got != n)
        return pd_fail(e, PD_ECORRUPT, "zstd: %s", ZSTD_isError(got) ? ZSTD_getErrorName(got) : "short frame");
    unshuffle(tmp, out, n, el);
    return 0;
}
