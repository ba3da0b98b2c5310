#include <float.h>
#include <math.h>
#include "../base/utf8.h"
#include "fields.h"

void pd_pack_top(struct pd_packer *k, const struct pd_top *top, uint32_t n)
{
    msgpack_pack_array(&k->pk, n);
    for (uint32_t i = 0; i < n; i++) {
        msgpack_pack_map(&k->pk, 2);
        pd_pack_text(k, "token");
        msgpack_pack_int32(&k->pk, top[i].token);
        pd_pack_text(k, "logprob");
        pd_pack_float(k, "top.logprob", top[i].logprob);
    }
}

void pd_pack_strs(const struct pd_str *s, uint32_t n, struct pd_packer *k)
{
    msgpack_pack_array(&k->pk, n);
    for (uint32_t i = 0; i < n; i++)
        pd_pack_str(k, s[i]);
}

static const void *at(const void *rec, size_t off) { return (const char *)rec + off; }
#define AT(T, off) (*(const T *)at(rec, off))

static bool present(const struct pd_field *f, const void *rec)
{
    if (f->flags & PD_FF_COUNT)
        return AT(uint32_t, f->aux) > 0;
    if (f->flags & PD_FF_HAS)
        return AT(bool, f->aux);
    if (f->flags & PD_FF_BIT)
        return AT(uint32_t, f->aux) & f->bit;
    if (f->flags & (PD_FF_REQ | PD_FF_ALWAYS) && f->type != PD_F_RUN)
        return true;
    switch (f->type) {
    case PD_F_RUN: case PD_F_CHARS: return AT(char, f->off) != 0;
    case PD_F_STR: case PD_F_BIN: case PD_F_ID: case PD_F_MAP: case PD_F_CUSTOM: return AT(void *, f->off) != NULL;     /* the pointer comes first in pd_str and pd_bin */
    case PD_F_BOOL: return AT(bool, f->off);
    case PD_F_MS: return AT(double, f->off) >= 0;
    case PD_F_INDEX: return AT(int32_t, f->off) >= 0;
    case PD_F_SPREAD: return AT(struct pd_spread, f->off).p95 || AT(struct pd_spread, f->off).marks;
    case PD_F_U32: case PD_F_I32: return !(f->flags & PD_FF_NZ) || AT(uint32_t, f->off);
    case PD_F_U64: case PD_F_I64: return !(f->flags & PD_FF_NZ) || AT(uint64_t, f->off);
    default: return true;
    }
}

static void pack_text_checked(const char *name, struct pd_str s, struct pd_packer *k)
{
    long bad = pd_utf8_invalid(s.p, s.n);
    if (bad >= 0 && !k->rc)
        k->rc = pd_fail(k->e, PD_EFAIL, "%s: invalid UTF-8 at byte %ld", name, bad);
    pd_pack_str(k, s);
}

static void pack_mended(struct pd_str s, struct pd_packer *k)
{
    struct pd_buf b = { 0 };
    uint32_t cp;
    char c[4];
    for (size_t i = 0; i < s.n && !k->rc;) {
        i += (size_t)pd_utf8_next(s.p + i, s.n - i, &cp);
        k->rc = pd_buf_add(&b, c, (size_t)pd_utf8_put(cp, c), k->e);
    }
    pd_pack_str(k, (struct pd_str){ (char *)b.p, b.n });
    pd_buf_free(&b);
}

static void pack_field(const struct pd_field *f, const void *rec, struct pd_packer *k)
{
    msgpack_packer *pk = &k->pk;
    switch ((enum pd_field_type)f->type) {
    case PD_F_RUN: pd_pack_text(k, at(rec, f->off)); break;
    case PD_F_CHARS: pack_text_checked(f->name, (struct pd_str){ at(rec, f->off), strnlen(at(rec, f->off), f->size) }, k); break;
    case PD_F_STR: {
        struct pd_str s = AT(struct pd_str, f->off);
        if (f->flags & PD_FF_MEND && pd_utf8_invalid(s.p, s.n) >= 0)
            pack_mended(s, k);
        else
            pack_text_checked(f->name, s.p ? s : (struct pd_str){ "", 0 }, k);
        break;
    }
    case PD_F_BYTES: pd_pack_bin(k, at(rec, f->off), f->size); break;
    case PD_F_BIN: pd_pack_bin(k, AT(struct pd_bin, f->off).p, AT(struct pd_bin, f->off).n); break;
    case PD_F_HASH: {
        uint8_t be[8];
        pd_put_be64(be, AT(uint64_t, f->off));
        pd_pack_bin(k, be, 8);
        break;
    }
    case PD_F_ID: case PD_F_MAP: pd_pack_raw(k, AT(struct pd_bin, f->off).p, AT(struct pd_bin, f->off).n); break;
    case PD_F_U32: msgpack_pack_uint32(pk, AT(uint32_t, f->off)); break;
    case PD_F_I32: case PD_F_INDEX: msgpack_pack_int32(pk, AT(int32_t, f->off)); break;
    case PD_F_I64: msgpack_pack_int64(pk, AT(int64_t, f->off)); break;
    case PD_F_U64:
        if (AT(uint64_t, f->off) > INT64_MAX && !k->rc)
            k->rc = pd_fail(k->e, PD_EFAIL, "%s is past 2^63-1; a record cannot hold it", f->name);
        msgpack_pack_uint64(pk, AT(uint64_t, f->off));
        break;
    case PD_F_FLOAT: pd_pack_float(k, f->name, AT(float, f->off)); break;
    case PD_F_DOUBLE: case PD_F_MS: pd_pack_float(k, f->name, AT(double, f->off)); break;
    case PD_F_SPREAD: {
        struct pd_spread s = AT(struct pd_spread, f->off);
        msgpack_pack_array(pk, 2 + (s.marks != 0));
        msgpack_pack_int64(pk, s.p50);
        msgpack_pack_int64(pk, s.p95);
        if (s.marks)
            msgpack_pack_uint32(pk, s.marks);
        break;
    }
    case PD_F_BOOL: AT(bool, f->off) ? msgpack_pack_true(pk) : msgpack_pack_false(pk); break;
    case PD_F_I32S: {
        const int32_t *v = AT(int32_t *, f->off);
        uint32_t n = AT(uint32_t, f->aux);
        msgpack_pack_array(pk, n);
        for (uint32_t i = 0; i < n; i++)
            msgpack_pack_int32(pk, v[i]);
        break;
    }
    case PD_F_CUSTOM: f->enc(rec, k); break;
    }
}

void pd_fields_encode(const struct pd_table *t, const void *rec, bool top, uint64_t leave_out, uint32_t more, struct pd_packer *k)
{
    const struct pd_extra *extra = t->extra >= 0 ? at(rec, (size_t)t->extra) : NULL;
    uint32_t pairs = (top ? 2 : 0) + more + (extra ? extra->pairs : 0);
    uint64_t in = 0;
    for (int i = 0; i < t->n; i++)
        if (!(leave_out >> i & 1) && (present(&t->f[i], rec) || t->f[i].flags & PD_FF_NULL)) {
            in |= 1ull << i;
            pairs++;
        } else if (!(leave_out >> i & 1) && t->f[i].flags & PD_FF_REQ && !k->rc)
            k->rc = pd_fail(k->e, PD_EFAIL, "%s: %s is missing", t->kind, t->f[i].name);
    msgpack_pack_map(&k->pk, pairs);
    if (top) {
        pd_pack_text(k, "pd");
        pd_pack_text(k, t->kind);
        pd_pack_text(k, "v");
        msgpack_pack_int(&k->pk, 1);
    }
    for (int i = 0; i < t->n; i++)
        if (in >> i & 1) {
            pd_pack_text(k, t->f[i].name);
            if (present(&t->f[i], rec))
                pack_field(&t->f[i], rec, k);
            else
                msgpack_pack_nil(&k->pk);
        }
    if (extra && extra->pairs)
        pd_pack_raw(k, extra->p, extra->n);
}

int pd_record_close(struct pd_packer *k, size_t from)
{
    struct pd_frame_scan s = { 0 };
    size_t len, n = k->b->n - from;
    if (!k->rc) {
        const uint8_t *p = k->b->p + from;
        int framed = pd_frame_next(&s, p, n, SIZE_MAX / 4, &len, k->e);
        if (framed < 0)
            k->rc = framed;
        else if (framed != 1 || len != n)
            k->rc = pd_fail(k->e, PD_EFAIL, "a raw value of the record is malformed");
        else
            k->rc = pd_frame_check(p, n, k->e);
    }
    if (k->rc)
        k->b->n = from;
    return k->rc;
}

/* ---- unpacking ---- */

static int wrong(const char *name, const char *want, struct pd_bin v, struct pd_unpack *u)
{
    char text[96];
    return pd_fail(u->e, u->code, "%s must be %s, not %s", name, want, pd_value_text(v, text, sizeof text));
}

int pd_unpack_str(const char *name, struct pd_bin v, struct pd_str *out, struct pd_unpack *u)
{
    struct pd_str s;
    if (!pd_get_str(v, &s))
        return wrong(name, "a string", v, u);
    long bad = pd_utf8_invalid(s.p, s.n);
    if (bad >= 0)
        return pd_fail(u->e, u->code, "%s: invalid UTF-8 at byte %ld", name, bad);
    char *p = pd_arena_dup(u->a, s.p, s.n, u->e);
    if (!p)
        return PD_ENOMEM;
    *out = (struct pd_str){ p, s.n };
    return 0;
}

int pd_unpack_int(const char *name, struct pd_bin v, int64_t lo, int64_t hi, int64_t *out, struct pd_unpack *u)
{
    char want[96];
    int64_t i;
    if (!pd_get_int(v, &i) || i < lo || i > hi) {
        snprintf(want, sizeof want, "a whole number from %lld to %lld", (long long)lo, (long long)hi);
        return wrong(name, want, v, u);
    }
    *out = i;
    return 0;
}

int pd_unpack_strs(const char *name, struct pd_bin v, struct pd_str **out, uint32_t *n, struct pd_unpack *u)
{
    struct pd_iter it;
    struct pd_bin x;
    int rc;
    if (!pd_iter_open(&it, v, PD_T_ARRAY) || it.left > 64)
        return pd_fail(u->e, u->code, "%s must be a list of at most 64 strings", name);
    if (!(*out = pd_arena_alloc(u->a, (size_t)it.left, sizeof **out, u->e)))
        return PD_ENOMEM;
    for (*n = 0; pd_iter_next(&it, &x); ++*n)
        if ((rc = pd_unpack_str(name, x, &(*out)[*n], u)))
            return rc;
    return 0;
}

static int unpack_double(const char *name, struct pd_bin v, double *out, struct pd_unpack *u)
{
    double d;
    if (!pd_get_float(v, &d) || !isfinite(d))
        return wrong(name, "a finite number", v, u);
    *out = d;
    return 0;
}

int pd_unpack_float(const char *name, struct pd_bin v, float *out, struct pd_unpack *u)
{
    double d = 0;
    int rc = unpack_double(name, v, &d, u);
    if (rc)
        return rc;
    if (!isfinite((float)d))
        return wrong(name, "a number that fits a float32", v, u);
    *out = (float)d;
    return 0;
}

int pd_unpack_ids(const char *name, struct pd_bin v, int32_t **out, uint32_t *n, struct pd_unpack *u)
{
    struct pd_iter it;
    struct pd_bin x;
    bool bin = pd_get_bin(v, &x);
    if (!bin && !pd_iter_open(&it, v, PD_T_ARRAY))
        return wrong(name, "a list of whole numbers (or bin of int32)", v, u);
    if (bin && x.n % 4)
        return pd_fail(u->e, u->code, "%s: bin of %zu bytes is no row of int32", name, x.n);
    uint64_t count = bin ? x.n / 4 : it.left;
    int32_t *p = pd_arena_alloc(u->a, (size_t)count, sizeof *p, u->e);
    if (!p)
        return PD_ENOMEM;
    if (bin && x.n)
        memcpy(p, x.p, x.n);
    for (uint64_t i = 0; i < count; i++) {
        int64_t id = bin ? p[i] : -1;
        if (!bin && (!pd_iter_next(&it, &x) || !pd_get_int(x, &id)))
            return pd_fail(u->e, u->code, "%s[%llu] is no whole number", name, (unsigned long long)i);
        if (id < 0 || id > INT32_MAX)
            return pd_fail(u->e, u->code, "%s[%llu] = %lld is no token id (0 to %d)", name, (unsigned long long)i, (long long)id, INT32_MAX);
        p[i] = (int32_t)id;
    }
    *out = p;
    *n = (uint32_t)count;
    return 0;
}

int pd_unpack_raw(const char *name, struct pd_bin v, struct pd_bin *out, struct pd_unpack *u)
{
    struct pd_buf b = { 0 };
    int rc = pd_value_canon(v, PD_MAX_DEPTH - 1, u->code, &b, u->e);
    if (rc)
        pd_err_prefix(u->e, "%s", name);
    else {
        *out = (struct pd_bin){ pd_arena_dup(u->a, b.p, b.n, u->e), b.n };
        rc = out->p ? 0 : PD_ENOMEM;
    }
    pd_buf_free(&b);
    return rc;
}

int pd_unpack_top(struct pd_bin v, struct pd_top **top, uint32_t *n, struct pd_unpack *u)
{
    struct pd_iter it, pair;
    struct pd_bin x;
    struct pd_str key;
    if (!pd_iter_open(&it, v, PD_T_ARRAY))
        return wrong("top", "a list", v, u);
    struct pd_top *t = pd_arena_alloc(u->a, (size_t)it.left, sizeof *t, u->e);
    if (!t)
        return PD_ENOMEM;
    uint32_t i = 0;
    for (; pd_iter_next(&it, &x); i++) {
        int seen = 0, rc = pd_map_check(x, u->code, u->e);
        if (rc)
            return pd_err_prefix(u->e, "top[%u]", i), rc;
        pd_iter_open(&pair, x, PD_T_MAP);
        while (pd_iter_pair(&pair, &key, &x)) {
            int64_t id;
            rc = 0;
            if (pd_str_eq(key, "token")) {
                seen |= 1;
                rc = pd_unpack_int("top.token", x, 0, INT32_MAX, &id, u);
                t[i].token = rc ? 0 : (int32_t)id;
            } else if (pd_str_eq(key, "logprob")) {
                seen |= 2;
                rc = pd_unpack_float("top.logprob", x, &t[i].logprob, u);
            }
            if (rc)
                return rc;
        }
        if (seen != 3)
            return pd_fail(u->e, u->code, "top[%u] must have token and logprob", i);
    }
    *top = t;
    *n = i;
    return 0;
}

static int unpack_spread(const char *name, struct pd_bin v, struct pd_spread *out, struct pd_unpack *u)
{
    struct pd_iter it;
    struct pd_bin x;
    int64_t n[3] = { 0 };
    if (!pd_iter_open(&it, v, PD_T_ARRAY) || it.left < 2 || it.left > 3)
        return wrong(name, "a list of two or three whole numbers", v, u);
    for (int i = 0; pd_iter_next(&it, &x); i++)
        if (!pd_get_int(x, &n[i]))
            return wrong(name, "a list of whole numbers", x, u);
    if (n[0] < 0 || n[0] > n[1] || n[1] > PD_SPREAD_MOST || n[2] < 0 || n[2] > PD_SPREAD_ALL)
        return pd_fail(u->e, u->code, "%s: P50 %lld, P95 %lld, marks %lld make no sense", name, (long long)n[0], (long long)n[1], (long long)n[2]);
    *out = (struct pd_spread){ n[1], n[0], (uint32_t)n[2] };
    return 0;
}

#define PUT(T, off) (*(T *)((char *)rec + (off)))

static int unpack_field(const struct pd_field *f, struct pd_bin v, void *rec, struct pd_unpack *u)
{
    struct pd_str s;
    struct pd_bin b;
    int64_t i = 0;
    int rc = 0;
    switch ((enum pd_field_type)f->type) {
    case PD_F_RUN:
        if (!pd_get_str(v, &s) || !pd_run_valid(s.p, s.n))
            return wrong(f->name, "a ULID of 26 characters", v, u);
        memcpy(&PUT(char, f->off), s.p, s.n);
        return 0;
    case PD_F_CHARS:
        if (!pd_get_str(v, &s) || s.n >= f->size || memchr(s.p, 0, s.n) || pd_utf8_invalid(s.p, s.n) >= 0)
            return wrong(f->name, "a short string", v, u);
        memcpy(&PUT(char, f->off), s.p, s.n);
        return 0;
    case PD_F_STR: return pd_unpack_str(f->name, v, &PUT(struct pd_str, f->off), u);
    case PD_F_BYTES:
    case PD_F_HASH:
        if (!pd_get_bin(v, &b))
            return wrong(f->name, "bin", v, u);
        if (b.n != (f->type == PD_F_HASH ? 8 : f->size))
            return pd_fail(u->e, u->code, "%s must be bin of %d bytes, not of %zu", f->name, f->type == PD_F_HASH ? 8 : f->size, b.n);
        if (f->type == PD_F_HASH)
            PUT(uint64_t, f->off) = pd_get_be64(b.p);
        else
            memcpy(&PUT(uint8_t, f->off), b.p, b.n);
        return 0;
    case PD_F_BIN:
        if (!pd_get_bin(v, &b))
            return wrong(f->name, "bin", v, u);
        if (!u->a) {        /* a chunk's data stays where it is */
            PUT(struct pd_bin, f->off) = b;
            return 0;
        }
        b.p = pd_arena_dup(u->a, b.p, b.n, u->e);
        PUT(struct pd_bin, f->off) = b;
        return b.p ? 0 : PD_ENOMEM;
    case PD_F_ID:
        if (!pd_get_str(v, &s) && !pd_get_int(v, &i))
            return wrong(f->name, "a string or an integer", v, u);
        return pd_unpack_raw(f->name, v, &PUT(struct pd_bin, f->off), u);
    case PD_F_MAP:
        if (pd_value_type(v) != PD_T_MAP)
            return wrong(f->name, "a map", v, u);
        return pd_unpack_raw(f->name, v, &PUT(struct pd_bin, f->off), u);
    case PD_F_U32:
        if (!(rc = pd_unpack_int(f->name, v, 0, UINT32_MAX, &i, u)))
            PUT(uint32_t, f->off) = (uint32_t)i;
        return rc;
    case PD_F_I32: case PD_F_INDEX:
        if (!(rc = pd_unpack_int(f->name, v, f->type == PD_F_INDEX ? 0 : INT32_MIN, INT32_MAX, &i, u)))
            PUT(int32_t, f->off) = (int32_t)i;
        return rc;
    case PD_F_I64: return pd_unpack_int(f->name, v, INT64_MIN, INT64_MAX, &PUT(int64_t, f->off), u);
    case PD_F_U64:
        if (!(rc = pd_unpack_int(f->name, v, 0, INT64_MAX, &i, u)))
            PUT(uint64_t, f->off) = (uint64_t)i;
        return rc;
    case PD_F_FLOAT: return pd_unpack_float(f->name, v, &PUT(float, f->off), u);
    case PD_F_DOUBLE: case PD_F_MS: return unpack_double(f->name, v, &PUT(double, f->off), u);
    case PD_F_SPREAD: return unpack_spread(f->name, v, &PUT(struct pd_spread, f->off), u);
    case PD_F_BOOL: return pd_get_bool(v, &PUT(bool, f->off)) ? 0 : wrong(f->name, "true or false", v, u);
    case PD_F_I32S: return pd_unpack_ids(f->name, v, &PUT(int32_t *, f->off), &PUT(uint32_t, f->aux), u);
    case PD_F_CUSTOM: return f->dec ? f->dec(rec, v, u) : 0;
    }
    return 0;
}

static int keep_extra(struct pd_extra *x, struct pd_buf *all, struct pd_str key, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_packer k;
    if (memchr(key.p, 0, key.n) || pd_utf8_invalid(key.p, key.n) >= 0)
        return pd_fail(u->e, u->code, "a key holds NUL or invalid UTF-8");
    pd_pack_init(&k, all, u->e);
    pd_pack_str(&k, key);
    int rc = k.rc ? k.rc : pd_value_canon(v, PD_MAX_DEPTH - 1, u->code, all, u->e);
    if (rc)
        return pd_err_prefix(u->e, "%.*s", (int)(key.n < 40 ? key.n : 40), key.p), rc;
    x->pairs++;
    return 0;
}

int pd_fields_decode(const struct pd_table *t, struct pd_bin map, void *rec, struct pd_unpack *u)
{
    struct pd_extra *extra = t->extra >= 0 ? &PUT(struct pd_extra, t->extra) : NULL;
    struct pd_buf unknown = { 0 };
    struct pd_iter it;
    struct pd_str key;
    struct pd_bin v;
    uint64_t seen = 0;
    int rc = pd_map_check(map, u->code, u->e);
    if (rc)
        goto out;
    pd_iter_open(&it, map, PD_T_MAP);
    while (pd_iter_pair(&it, &key, &v)) {
        int i = 0;
        while (i < t->n && !pd_str_eq(key, t->f[i].name))
            i++;
        if (i < t->n) {
            const struct pd_field *f = &t->f[i];
            if (pd_value_type(v) == PD_T_NIL && !(f->flags & PD_FF_REQ)) {
                if (f->type == PD_F_MS)
                    PUT(double, f->off) = -1;
                continue;
            }
            seen |= 1ull << i;
            if ((rc = unpack_field(f, v, rec, u)))
                goto out;
            if (f->flags & PD_FF_HAS)
                PUT(bool, f->aux) = true;
            if (f->flags & PD_FF_BIT)
                PUT(uint32_t, f->aux) |= f->bit;
        } else if (extra && !pd_str_eq(key, "pd") && !pd_str_eq(key, "v") && !pd_str_eq(key, "sum")) {
            if ((rc = keep_extra(extra, &unknown, key, v, u)))
                goto out;
        }
    }
    for (int i = 0; i < t->n; i++)
        if (t->f[i].flags & PD_FF_REQ && !(seen >> i & 1)) {
            rc = pd_fail(u->e, u->code, "%s is missing", t->f[i].name);
            goto out;
        }
    if (unknown.n) {
        extra->n = unknown.n;
        extra->p = pd_arena_dup(u->a, unknown.p, unknown.n, u->e);
        rc = extra->p ? 0 : PD_ENOMEM;
    }
out:
    pd_buf_free(&unknown);
    if (rc && rc != PD_ENOMEM)
        pd_err_prefix(u->e, "%s", t->kind);
    return rc;
}

int pd_record_open(const char *kind, const void *rec, size_t n, bool kind_optional, struct pd_unpack *u)
{
    struct pd_frame_scan s = { 0 };
    struct pd_bin v;
    struct pd_str name;
    size_t len;
    int64_t version;
    int rc = pd_frame_next(&s, rec, n, n, &len, u->e);
    if (rc == 1 && len == n)
        rc = pd_frame_check(rec, n, u->e);
    else if (rc >= 0)
        rc = pd_fail(u->e, PD_ECORRUPT, "%s: %zu bytes hold no whole record", kind, n);
    if (rc)
        return rc;
    if (pd_map_find(rec, n, "pd", &v) == 1) {
        if (!pd_get_str(v, &name) || !pd_str_eq(name, kind))
            return wrong("pd", kind, v, u);
    } else if (!kind_optional)
        return pd_fail(u->e, u->code, "%s: pd (the record's kind) is missing", kind);
    if (pd_map_find(rec, n, "v", &v) == 1 && (!pd_get_int(v, &version) || version != 1)) {
        char text[96];
        return pd_fail(u->e, u->code, "%s: v %s is not known here (1 is)", kind, pd_value_text(v, text, sizeof text));
    }
    return 0;
}

int pd_table_encode(const struct pd_table *t, const void *rec, struct pd_buf *b, struct pd_err *e)
{
    struct pd_packer k;
    size_t from = b->n;
    pd_pack_init(&k, b, e);
    pd_fields_encode(t, rec, true, 0, 0, &k);
    return pd_record_close(&k, from);
}

int pd_table_decode(const struct pd_table *t, const void *rec, size_t n, struct pd_arena *a, void *out, struct pd_err *e)
{
    struct pd_unpack u = { a, e, PD_ECORRUPT };
    int rc = pd_record_open(t->kind, rec, n, false, &u);
    return rc ? rc : pd_fields_decode(t, (struct pd_bin){ rec, n }, out, &u);
}
