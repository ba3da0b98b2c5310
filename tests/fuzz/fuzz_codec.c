/* Bytes as a coded chunk: refused, or as many as were offered. And as numbers: coded and decoded they are what they were. */
#include <stdlib.h>
#include <sys/uio.h>
#include "../../libcommon/base/mem.h"
#include "../../libcommon/kv/codec.h"

static struct pd_codec *c, *d;

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    struct pd_err e;
    const uint8_t *out, *back;
    size_t m;
    if (!c && (pd_codec_new(&c, &e) || pd_codec_new(&d, &e)))
        abort();
    if (n < 2)
        return 0;
    size_t raw = (size_t)(p[0] | (p[1] & 15) << 8) * 2;
    int rc = pd_codec_decode(d, p + 2, n - 2, raw, &back, &e);
    if (rc && rc != PD_ECORRUPT)
        abort();
    volatile uint8_t last = rc ? 0 : back[raw - 1];
    (void)last;
    n &= ~(size_t)1;
    uint16_t *x = malloc(n);
    memcpy(x, p, n);
    size_t cut = n / 3 & ~(size_t)1;
    if (pd_codec_encode(c, (struct iovec[]){ { x, cut }, { (uint8_t *)x + cut, n - cut } }, 2, n, &out, &m, &e))
        abort();
    if (m && (pd_codec_decode(d, out, m, n, &back, &e) || memcmp(back, x, n)))
        abort();
    free(x);
    return 0;
}
