/* A stream that is fed in pieces of any size gives what it gives whole: the same records, the same bad lines, the same end. As a connection feeds it. */
#include <stdlib.h>
#include <string.h>
#include "../../libcommon/wire/stream.h"

enum { MOST = 1 << 16 };

/* The outcomes as bytes: a letter each, and the records. */
static void read_all(const uint8_t *p, size_t n, size_t piece, bool exact, struct pd_buf *out)
{
    struct pd_rstream_opts o = { .max_record = 4096, .name = "fuzz" };
    struct pd_rstream *s;
    struct pd_rec rec;
    struct pd_err e = { 0 };
    bool bad;
    size_t at = 0;
    if (pd_rstream_new(-1, &o, &s, &e))
        abort();
    pd_rstream_exact(s, exact);
    for (;;) {
        int rc = pd_rstream_next(s, 0, &rec, &bad, &e);
        if (rc == 2) {
            uint8_t *to;
            size_t room;
            if (pd_rstream_room(s, &to, &room, &e) || !room)
                abort();
            room = room < piece ? room : piece;
            room = room < n - at ? room : n - at;
            memcpy(to, p + at, room);
            at += room;
            pd_rstream_fed(s, room);
            continue;
        }
        pd_buf_add(out, rc == 1 ? "r" : rc == 0 ? "." : bad ? "b" : "E", 1, &e);
        if (rc == 1) {
            pd_buf_add(out, rec.p, rec.n, &e);
            if (exact && !pd_rstream_is_json(s) && !pd_rstream_empty(s))
                abort();        /* it asked for more than the record */
        }
        if (rc == 0 || (rc < 0 && !bad))
            break;
    }
    pd_rstream_free(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    struct pd_buf whole = { 0 }, pieces = { 0 };
    if (n < 1 || n > MOST)
        return 0;
    read_all(p + 1, n - 1, SIZE_MAX, false, &whole);
    read_all(p + 1, n - 1, (size_t)(p[0] & 63) + 1, p[0] & 64, &pieces);
    if (whole.n != pieces.n || memcmp(whole.p, pieces.p, whole.n))
        abort();
    pd_buf_free(&whole);
    pd_buf_free(&pieces);
    return 0;
}
