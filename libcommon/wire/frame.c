#include <xxhash.h>
#include "frame.h"
#include "value.h"

static uint64_t be(const uint8_t *p, int bytes)
{
    uint64_t v = 0;
    for (int i = 0; i < bytes; i++)
        v = v << 8 | p[i];
    return v;
}

/* https://github.com/msgpack/msgpack/blob/master/spec.md */
bool pd_head_read(const uint8_t *p, size_t n, struct pd_head *h)
{
    static const struct { uint8_t type, len_bytes, fixed; } wide[32] = {    /* 0xc0 .. 0xdf: length field, or fixed data bytes */
        { PD_T_NIL, 0, 0 }, { PD_T_BAD, 0, 0 }, { PD_T_BOOL, 0, 0 }, { PD_T_BOOL, 0, 0 }, { PD_T_BIN, 1, 0 }, { PD_T_BIN, 2, 0 }, { PD_T_BIN, 4, 0 },
        { PD_T_EXT, 1, 0 }, { PD_T_EXT, 2, 0 }, { PD_T_EXT, 4, 0 }, { PD_T_FLOAT, 0, 4 }, { PD_T_FLOAT, 0, 8 },
        { PD_T_INT, 0, 1 }, { PD_T_INT, 0, 2 }, { PD_T_INT, 0, 4 }, { PD_T_INT, 0, 8 }, { PD_T_INT, 0, 1 }, { PD_T_INT, 0, 2 }, { PD_T_INT, 0, 4 }, { PD_T_INT, 0, 8 },
        { PD_T_EXT, 0, 2 }, { PD_T_EXT, 0, 3 }, { PD_T_EXT, 0, 5 }, { PD_T_EXT, 0, 9 }, { PD_T_EXT, 0, 17 },
        { PD_T_STR, 1, 0 }, { PD_T_STR, 2, 0 }, { PD_T_STR, 4, 0 }, { PD_T_ARRAY, 2, 0 }, { PD_T_ARRAY, 4, 0 }, { PD_T_MAP, 2, 0 }, { PD_T_MAP, 4, 0 } };
    *h = (struct pd_head){ .type = PD_T_INT, .hdr = 1 };
    if (!n)
        return false;
    uint8_t b = p[0];
    if (b < 0x80 || b >= 0xe0)
        return true;
    if (b < 0x90) {
        h->type = PD_T_MAP;
        h->count = 2u * (b & 15);
    } else if (b < 0xa0) {
        h->type = PD_T_ARRAY;
        h->count = b & 15;
    } else if (b < 0xc0) {
        h->type = PD_T_STR;
        h->len = b & 31;
    } else {
        int field = wide[b - 0xc0].len_bytes;
        h->type = wide[b - 0xc0].type;
        h->hdr = (uint8_t)(1 + field);
        h->len = wide[b - 0xc0].fixed;
        if (n < h->hdr)
            return false;
        uint64_t v = be(p + 1, field);
        if (h->type == PD_T_ARRAY)
            h->count = v;
        else if (h->type == PD_T_MAP)
            h->count = 2 * v;
        else if (field)
            h->len = v + (h->type == PD_T_EXT);     /* an extension's type byte */
    }
    return true;
}

#define X16(v) v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v
const uint8_t pd_plain_bytes[256] = {
    X16(1), X16(1), X16(1), X16(1), X16(1), X16(1), X16(1), X16(1),     /* 0x00 .. 0x7f: 0 .. 127 */
    X16(0), X16(0),                                                     /* small maps and lists */
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32,    /* 0xa0 .. 0xbf: short strings */
    1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 5, 9, 2, 3, 5, 9,                     /* 0xc0 .. 0xcf: nil, bools, floats, unsigned */
    2, 3, 5, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,                     /* 0xd0 .. 0xdf: signed */
    X16(1), X16(1) };                                                   /* 0xe0 .. 0xff: -32 .. -1 */

int pd_frame_next(struct pd_frame_scan *s, const uint8_t *p, size_t n, size_t max_record, size_t *len, struct pd_err *e)
{
    for (;;) {
        struct pd_head h = { .hdr = 1 };
        uint64_t owed = 0;      /* values still to come, one byte each at least; nothing below can overflow 64 bits */
        for (uint32_t d = 1; d <= s->depth; d++)
            owed += s->left[d];
        /* What lies between the first and the last of a list's values, or a map's, needs no more than its length. */
        for (uint64_t k; s->depth && s->left[s->depth] > 1 && s->at < n && (k = pd_plain_bytes[p[s->at]]) && k <= n - s->at && s->at <= max_record &&
             owed - 1 + k <= max_record - s->at; owed--, s->left[s->depth]--)
            s->at += (size_t)k;
        if (s->at && !s->depth) {
            *len = s->at;
            return s->at <= n;
        }
        if (s->at >= n || !pd_head_read(p + s->at, n - s->at, &h)) {
            *len = s->at + h.hdr + (size_t)(owed ? owed - 1 : 0);
            return 0;
        }
        if (h.type == PD_T_BAD)
            return pd_fail(e, PD_ECORRUPT, "byte 0x%02x at offset %zu is no msgpack", p[s->at], s->at);
        if (!s->depth && h.type != PD_T_MAP)
            return pd_fail(e, PD_ECORRUPT, "a record must be a map, but %s begins here (byte 0x%02x)", pd_type_name(h.type), p[0]);
        if (s->depth)
            owed--, s->left[s->depth]--;
        owed += h.hdr + h.len + h.count;
        if (s->at > max_record || owed > max_record - s->at)
            return pd_fail(e, PD_ECORRUPT, "%s at offset %zu would make the record larger than %zu bytes (see --max-record)", pd_type_name(h.type), s->at, max_record);
        if (h.count && s->depth == PD_MAX_DEPTH)
            return pd_fail(e, PD_ECORRUPT, "the record is more than %d levels deep at offset %zu", PD_MAX_DEPTH, s->at);
        s->at += h.hdr + (size_t)h.len;
        if (h.count)
            s->left[++s->depth] = h.count;
        while (s->depth && !s->left[s->depth])
            s->depth--;
    }
}

/* A map's keys are strings and distinct: a small open-addressed table of their hashes. */
int pd_map_check(struct pd_bin map, int code, struct pd_err *e)
{
    enum { SLOTS = 2 * PD_MAX_KEYS };
    struct pd_iter it;
    if (!pd_iter_open(&it, map, PD_T_MAP))
        return pd_fail(e, code, "a map is expected, but %s is here", pd_type_name(pd_value_type(map)));
    if (it.left > PD_MAX_KEYS)
        return pd_fail(e, code, "a map has %llu keys, more than %d", (unsigned long long)it.left, PD_MAX_KEYS);
    struct pd_str key, few[16], *slot = few, many[SLOTS];
    struct pd_bin v;
    size_t n = 0;
    bool table = it.left > sizeof few / sizeof *few;
    if (table) {
        memset(many, 0, sizeof many);
        slot = many;
    }
    while (pd_iter_pair(&it, &key, &v)) {
        size_t i = 0;
        if (!key.p)
            return pd_fail(e, code, "a map's key is no string");
        if (table)
            for (i = XXH3_64bits(key.p, key.n) % SLOTS; slot[i].p && !(slot[i].n == key.n && !memcmp(slot[i].p, key.p, key.n)); i = (i + 1) % SLOTS) {}
        else
            while (i < n && !(slot[i].n == key.n && !memcmp(slot[i].p, key.p, key.n)))
                i++;
        if (table ? slot[i].p != NULL : i < n)
            return pd_fail(e, code, "the key '%.*s' comes twice", (int)(key.n < 64 ? key.n : 64), key.p);
        slot[i] = key;
        n++;
    }
    return it.left ? pd_fail(e, code, "a map ends early") : 0;
}

int pd_frame_check(const uint8_t *p, size_t n, struct pd_err *e)
{
    struct pd_bin map = { p, n };
    return pd_map_check(map, PD_ECORRUPT, e);
}
