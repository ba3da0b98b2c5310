/* Text as a JSON record, and bytes as a msgpack one: whatever is accepted comes back the same, json(msgpack(x)) == x in canonical form. */
#include <stdlib.h>
#include <string.h>
#include "../../libcommon/wire/frame.h"
#include "../../libcommon/wire/json.h"
#include "../../libcommon/wire/value.h"

static void there_and_back(const struct pd_buf *rec)
{
    struct pd_buf json = { 0 }, again = { 0 };
    struct pd_err e = { 0 };
    if (pd_msgpack_to_json(rec->p, rec->n, &json, &e) || pd_json_to_msgpack((char *)json.p, json.n, &again, &e))
        abort();
    if (again.n != rec->n || memcmp(again.p, rec->p, rec->n))
        abort();
    if (memchr(json.p, '\n', json.n))
        abort();
    pd_buf_free(&json);
    pd_buf_free(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    struct pd_buf rec = { 0 }, json = { 0 };
    struct pd_err e = { 0 };
    struct pd_frame_scan s = { 0 };
    size_t len;
    if (!pd_json_to_msgpack((const char *)p, n, &rec, &e)) {
        if (pd_frame_next(&s, rec.p, rec.n, rec.n, &len, &e) != 1 || len != rec.n || pd_frame_check(rec.p, rec.n, &e))
            abort();
        there_and_back(&rec);
    }
    /* As msgpack: JSON accepts it just when the canonical form exists and its top is a map. */
    rec.n = 0;
    struct pd_bin v = { p, n };
    bool map = n && pd_value_type(v) == PD_T_MAP && pd_value_len(p, n) == n;
    bool can = map && !pd_value_canon(v, PD_MAX_DEPTH, PD_EFAIL, &rec, &e);
    if (can != (map && !pd_msgpack_to_json(p, n, &json, &e)))
        abort();
    if (can)
        there_and_back(&rec);
    pd_buf_free(&rec);
    pd_buf_free(&json);
    return 0;
}
