/* A stream of bytes through the frame scan, whole and in two steps: the same verdict, and what was framed can be walked. */
#include <stdlib.h>
#include "../../libcommon/wire/frame.h"
#include "../../libcommon/wire/record.h"
#include "../../libcommon/wire/value.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    size_t max = n && p[n - 1] & 1 ? 1 << 20 : 64;
    while (n) {
        struct pd_frame_scan once = { 0 }, twice = { 0 };
        struct pd_err e;
        struct pd_bin v;
        size_t len = 0, len2 = 0, half = n / 2;
        int rc = pd_frame_next(&once, p, n, max, &len, &e);
        int rc2 = pd_frame_next(&twice, p, half, max, &len2, &e);
        if (rc2 == 0) {
            if (len2 <= half)
                abort();        /* it asked for what it had */
            rc2 = pd_frame_next(&twice, p, n, max, &len2, &e);
        }
        if (rc2 != rc || (rc == 1 && len2 != len))
            abort();
        if (rc != 1) {
            if (rc == 0 && len <= n)
                abort();
            pd_map_find(p, n, "run", &v);
            return 0;
        }
        if (len > n || len > max || pd_value_len(p, len) != len)
            abort();
        pd_frame_check(p, len, &e);
        pd_map_find(p, len, "run", &v);
        pd_kind_of(p, len);
        p += len;
        n -= len;
    }
    return 0;
}
