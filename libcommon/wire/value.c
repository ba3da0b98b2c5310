#include <math.h>
#include <msgpack.h>
#include <stdio.h>
#include "../base/utf8.h"
#include "fields.h"
#include "value.h"

enum pd_type pd_value_type(struct pd_bin v)
{
    struct pd_head h;
    return pd_head_read(v.p, v.n, &h) ? h.type : PD_T_BAD;
}

const char *pd_type_name(enum pd_type t)
{
    static const char *const name[] = { "null", "a bool", "an integer", "a float", "a string", "bin", "a list", "a map", "an extension type", "a malformed value" };
    return name[t];
}

size_t pd_value_len(const uint8_t *p, size_t n)
{
    uint64_t pending = 1;
    size_t at = 0;
    while (pending) {
        struct pd_head h;
        size_t k;
        while (pending && at < n && (k = pd_plain_bytes[p[at]])) {
            if (k > n - at)
                return 0;
            at += k;
            pending--;
        }
        if (!pending)
            break;
        if (!pd_head_read(p + at, n - at, &h) || h.type == PD_T_BAD || h.hdr > n - at || h.len > n - at - h.hdr)
            return 0;
        at += h.hdr + (size_t)h.len;
        pending += h.count - 1;
        if (pending > n - at)
            return 0;
    }
    return at;
}

bool pd_iter_open(struct pd_iter *it, struct pd_bin v, enum pd_type type)
{
    struct pd_head h;
    *it = (struct pd_iter){ 0 };
    if (!pd_head_read(v.p, v.n, &h) || h.type != type)
        return false;
    *it = (struct pd_iter){ v.p + h.hdr, v.n - h.hdr, type == PD_T_MAP ? h.count / 2 : h.count };
    return true;
}

static bool take(struct pd_iter *it, struct pd_bin *v)
{
    size_t len = pd_value_len(it->p, it->n);
    if (!len)
        return false;
    *v = (struct pd_bin){ it->p, len };
    it->p += len;
    it->n -= len;
    return true;
}

bool pd_iter_next(struct pd_iter *it, struct pd_bin *v)
{
    if (!it->left || !take(it, v))
        return false;
    it->left--;
    return true;
}

bool pd_iter_pair(struct pd_iter *it, struct pd_str *key, struct pd_bin *v)
{
    struct pd_bin k;
    if (!it->left || !take(it, &k) || !take(it, v))
        return false;
    if (!pd_get_str(k, key))
        *key = (struct pd_str){ 0 };
    it->left--;
    return true;
}

/* One value without children, read by msgpack-c. Nothing is allocated for these, but without a zone at hand the library would make (and leave) one. */
static bool unpack(struct pd_bin v, msgpack_object *o)
{
    struct pd_head h;
    size_t off = 0;
    msgpack_zone unused = { .chunk_size = 0 };
    if (!pd_head_read(v.p, v.n, &h) || h.count || h.type == PD_T_BAD || h.type == PD_T_ARRAY || h.type == PD_T_MAP || h.len > v.n - h.hdr)
        return false;
    msgpack_unpack_return rc = msgpack_unpack((const char *)v.p, v.n, &off, &unused, o);
    return rc == MSGPACK_UNPACK_SUCCESS || rc == MSGPACK_UNPACK_EXTRA_BYTES;
}

bool pd_get_int(struct pd_bin v, int64_t *out)
{
    msgpack_object o;
    if (v.n && v.p[0] < 0x80)           /* token ids: one of a thousand in a row */
        return *out = v.p[0], true;
    if (v.n >= 3 && v.p[0] == 0xcd)
        return *out = v.p[1] << 8 | v.p[2], true;
    if (!unpack(v, &o))
        return false;
    if (o.type == MSGPACK_OBJECT_NEGATIVE_INTEGER)
        *out = o.via.i64;
    else if (o.type == MSGPACK_OBJECT_POSITIVE_INTEGER && o.via.u64 <= INT64_MAX)
        *out = (int64_t)o.via.u64;
    else
        return false;
    return true;
}

bool pd_get_float(struct pd_bin v, double *out)
{
    msgpack_object o;
    if (!unpack(v, &o))
        return false;
    switch (o.type) {
    case MSGPACK_OBJECT_FLOAT32: case MSGPACK_OBJECT_FLOAT64: *out = o.via.f64; return true;
    case MSGPACK_OBJECT_POSITIVE_INTEGER: *out = (double)o.via.u64; return true;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER: *out = (double)o.via.i64; return true;
    default: return false;
    }
}

bool pd_get_bool(struct pd_bin v, bool *out)
{
    msgpack_object o;
    if (!unpack(v, &o) || o.type != MSGPACK_OBJECT_BOOLEAN)
        return false;
    *out = o.via.boolean;
    return true;
}

/* An empty one has no pointer in msgpack-c; here no pointer means absent. */
bool pd_get_str(struct pd_bin v, struct pd_str *out)
{
    msgpack_object o;
    if (!unpack(v, &o) || o.type != MSGPACK_OBJECT_STR)
        return false;
    *out = (struct pd_str){ o.via.str.size ? o.via.str.ptr : "", o.via.str.size };
    return true;
}

bool pd_get_bin(struct pd_bin v, struct pd_bin *out)
{
    msgpack_object o;
    if (!unpack(v, &o) || o.type != MSGPACK_OBJECT_BIN)
        return false;
    *out = (struct pd_bin){ (const uint8_t *)(o.via.bin.size ? o.via.bin.ptr : ""), o.via.bin.size };
    return true;
}

/* The place in the record is told by the callers' prefixes, one a level ("route: costs: ..."). */
static int canon(struct pd_bin v, int depth, int code, struct pd_packer *k, struct pd_err *e)
{
    struct pd_iter it;
    struct pd_str s;
    struct pd_bin b;
    int64_t i;
    double f;
    bool t;
    int rc;
    enum pd_type type = pd_value_type(v);
    if ((type == PD_T_ARRAY || type == PD_T_MAP) && depth <= 0)
        return pd_fail(e, code, "more than %d levels deep", PD_MAX_DEPTH);
    switch (type) {
    case PD_T_NIL:
        msgpack_pack_nil(&k->pk);
        return 0;
    case PD_T_BOOL:
        if (!pd_get_bool(v, &t))
            break;
        t ? msgpack_pack_true(&k->pk) : msgpack_pack_false(&k->pk);
        return 0;
    case PD_T_INT:
        if (!pd_get_int(v, &i))
            return pd_fail(e, code, "an integer is past 2^63-1 (larger ones travel as bin)");
        msgpack_pack_int64(&k->pk, i);
        return 0;
    case PD_T_FLOAT:
        if (!pd_get_float(v, &f))
            break;
        if (!isfinite(f))
            return pd_fail(e, code, "a float is not finite");
        msgpack_pack_double(&k->pk, f);
        return 0;
    case PD_T_STR:
        if (!pd_get_str(v, &s))
            break;
        if (pd_utf8_invalid(s.p, s.n) >= 0)
            return pd_fail(e, code, "invalid UTF-8 at byte %ld of a string", pd_utf8_invalid(s.p, s.n));
        pd_pack_str(k, s);
        return 0;
    case PD_T_BIN:
        if (!pd_get_bin(v, &b))
            break;
        pd_pack_bin(k, b.p, b.n);
        return 0;
    case PD_T_ARRAY:
        if (!pd_iter_open(&it, v, PD_T_ARRAY))
            break;
        msgpack_pack_array(&k->pk, it.left);
        while (pd_iter_next(&it, &b))
            if ((rc = canon(b, depth - 1, code, k, e)))
                return rc;
        if (it.left)
            break;
        return 0;
    case PD_T_MAP:
        if ((rc = pd_map_check(v, code, e)))
            return rc;
        pd_iter_open(&it, v, PD_T_MAP);
        msgpack_pack_map(&k->pk, it.left);
        while (pd_iter_pair(&it, &s, &b)) {
            if (memchr(s.p, 0, s.n) || pd_utf8_invalid(s.p, s.n) >= 0)
                return pd_fail(e, code, "a map's key holds NUL or invalid UTF-8");
            pd_pack_str(k, s);
            if ((rc = canon(b, depth - 1, code, k, e))) {
                pd_err_prefix(e, "%.*s", (int)(s.n < 40 ? s.n : 40), s.p);
                return rc;
            }
        }
        return 0;
    case PD_T_EXT:
        return pd_fail(e, code, "extension types are not carried");
    case PD_T_BAD:
        break;
    }
    return pd_fail(e, code, "a malformed value");
}

int pd_value_canon(struct pd_bin v, int depth, int code, struct pd_buf *out, struct pd_err *e)
{
    struct pd_packer k;
    size_t old = out->n;
    pd_pack_init(&k, out, e);
    int rc = canon(v, depth, code, &k, e);
    rc = rc ? rc : k.rc;
    if (rc)
        out->n = old;
    return rc;
}

const char *pd_value_text(struct pd_bin v, char *out, size_t cap)
{
    int64_t i;
    double f;
    bool t;
    struct pd_str s;
    if (pd_get_int(v, &i))
        snprintf(out, cap, "%lld", (long long)i);
    else if (pd_get_bool(v, &t))
        snprintf(out, cap, "%s", t ? "true" : "false");
    else if (pd_get_float(v, &f))
        snprintf(out, cap, "%.9g", f);
    else if (pd_get_str(v, &s))
        snprintf(out, cap, s.n > 40 ? "\"%.*s...\"" : "\"%.*s\"", (int)(s.n > 40 ? pd_utf8_complete(s.p, 40) : s.n), s.p);
    else
        snprintf(out, cap, "%s", pd_type_name(pd_value_type(v)));
    return out;
}
