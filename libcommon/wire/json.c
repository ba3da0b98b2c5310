#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include "../base/utf8.h"
#include "fields.h"
#include "json.h"

static const char digit64[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/* "$b64", "$$b64", ...: the number of dollars, or 0. Only a map's only key has this meaning. */
static size_t dollars(const char *key, size_t n)
{
    return n >= 4 && !memcmp(key + n - 3, "b64", 3) && strspn(key, "$") == n - 3 ? n - 3 : 0;
}

/* ---- msgpack to JSON: written as it is walked, without a tree ---- */

static int put(struct pd_buf *b, const char *s, struct pd_err *e) { return pd_buf_add(b, s, strlen(s), e); }

static int put_base64(struct pd_bin v, struct pd_buf *out, struct pd_err *e)
{
    int rc = pd_buf_reserve(out, v.n / 3 * 4 + 4, e);
    if (rc)
        return rc;
    uint8_t *o = out->p + out->n;
    for (size_t i = 0; i < v.n; i += 3) {
        size_t k = v.n - i < 3 ? v.n - i : 3;
        uint32_t w = (uint32_t)v.p[i] << 16 | (k > 1 ? (uint32_t)v.p[i + 1] << 8 : 0) | (k > 2 ? v.p[i + 2] : 0);
        *o++ = (uint8_t)digit64[w >> 18];
        *o++ = (uint8_t)digit64[w >> 12 & 63];
        *o++ = k > 1 ? (uint8_t)digit64[w >> 6 & 63] : '=';
        *o++ = k > 2 ? (uint8_t)digit64[w & 63] : '=';
    }
    out->n = (size_t)(o - out->p);
    return 0;
}

static int put_string(struct pd_str s, size_t more_dollars, struct pd_buf *out, struct pd_err *e)
{
    long bad = pd_utf8_invalid(s.p, s.n);
    if (bad >= 0)
        return pd_fail(e, PD_EFAIL, "a string holds invalid UTF-8 at its byte %ld; JSON cannot carry it", bad);
    int rc = pd_buf_reserve(out, s.n + 3, e);
    out->n += rc ? 0 : 1;
    if (!rc)
        out->p[out->n - 1] = '"';
    while (!rc && more_dollars--)
        rc = put(out, "$", e);
    for (size_t i = 0; !rc && i < s.n;) {
        size_t from = i;
        while (i < s.n && (uint8_t)s.p[i] >= 0x20 && s.p[i] != '"' && s.p[i] != '\\')
            i++;
        rc = pd_buf_add(out, s.p + from, i - from, e);
        if (rc || i == s.n)
            break;
        char c = s.p[i++];
        const char *known = strchr("\"\"\\\\\nn\tt\rr", c);
        if (c && known)
            rc = pd_buf_printf(out, e, "\\%c", known[1]);
        else
            rc = pd_buf_printf(out, e, "\\u%04x", c);
    }
    return rc ? rc : put(out, "\"", e);
}

/* The shortest decimal that reads back as the same float64; it keeps a point or an exponent, so that it stays a float. */
static int put_double(double v, struct pd_buf *out, struct pd_err *e)
{
    char text[40];
    if (!isfinite(v))
        return pd_fail(e, PD_EFAIL, "a float is not finite; JSON cannot carry it");
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, v);
        if (strtod(text, NULL) == v)
            break;
    }
    char *comma = strchr(text, ',');    /* some locales */
    if (comma)
        *comma = '.';
    int rc = put(out, text, e);
    return rc || strpbrk(text, ".e") ? rc : put(out, ".0", e);
}

static int to_json(struct pd_bin v, int depth, struct pd_buf *out, struct pd_err *e)
{
    struct pd_iter it;
    struct pd_str s;
    struct pd_bin b;
    int64_t i;
    double f;
    bool t;
    int rc = 0;
    enum pd_type type = pd_value_type(v);
    if ((type == PD_T_ARRAY || type == PD_T_MAP) && depth <= 0)
        return pd_fail(e, PD_EFAIL, "the record is more than %d levels deep", PD_MAX_DEPTH);
    switch (type) {
    case PD_T_NIL: return put(out, "null", e);
    case PD_T_BOOL: return pd_get_bool(v, &t) ? put(out, t ? "true" : "false", e) : PD_ECORRUPT;
    case PD_T_INT:
        if (!pd_get_int(v, &i))
            return pd_fail(e, PD_EFAIL, "an integer is past 2^63-1; JSON cannot carry it");
        return pd_buf_printf(out, e, "%lld", (long long)i);
    case PD_T_FLOAT: return pd_get_float(v, &f) ? put_double(f, out, e) : pd_fail(e, PD_ECORRUPT, "a cut float");
    case PD_T_STR: return pd_get_str(v, &s) ? put_string(s, 0, out, e) : pd_fail(e, PD_ECORRUPT, "a cut string");
    case PD_T_BIN:
        if (!pd_get_bin(v, &b))
            return pd_fail(e, PD_ECORRUPT, "cut bin");
        rc = put(out, "{\"$b64\":\"", e);
        rc = rc ? rc : put_base64(b, out, e);
        return rc ? rc : put(out, "\"}", e);
    case PD_T_ARRAY:
        pd_iter_open(&it, v, PD_T_ARRAY);
        rc = put(out, "[", e);
        for (bool first = true; !rc && pd_iter_next(&it, &b); first = false) {
            rc = first ? 0 : put(out, ",", e);
            rc = rc ? rc : to_json(b, depth - 1, out, e);
        }
        if (!rc && it.left)
            return pd_fail(e, PD_ECORRUPT, "a list ends early");
        return rc ? rc : put(out, "]", e);
    case PD_T_MAP:
        if ((rc = pd_map_check(v, PD_EFAIL, e)))
            return rc;
        pd_iter_open(&it, v, PD_T_MAP);
        bool only = it.left == 1;
        rc = put(out, "{", e);
        for (bool first = true; !rc && pd_iter_pair(&it, &s, &b); first = false) {
            if (memchr(s.p, 0, s.n))
                return pd_fail(e, PD_EFAIL, "a map's key holds NUL; JSON cannot carry it");
            rc = first ? 0 : put(out, ",", e);
            rc = rc ? rc : put_string(s, only && dollars(s.p, s.n) ? 1 : 0, out, e);
            rc = rc ? rc : put(out, ":", e);
            rc = rc ? rc : to_json(b, depth - 1, out, e);
        }
        return rc ? rc : put(out, "}", e);
    case PD_T_EXT: return pd_fail(e, PD_EFAIL, "an extension type; JSON cannot carry it");
    case PD_T_BAD: break;
    }
    return pd_fail(e, PD_ECORRUPT, "a malformed value");
}

int pd_msgpack_to_json(const void *rec, size_t n, struct pd_buf *out, struct pd_err *e)
{
    struct pd_bin v = { rec, n };
    size_t old = out->n;
    if (pd_value_type(v) != PD_T_MAP || pd_value_len(rec, n) != n)
        return pd_fail(e, PD_ECORRUPT, "%zu bytes are not one msgpack map", n);
    int rc = to_json(v, PD_MAX_DEPTH, out, e);
    if (rc)
        out->n = old;
    return rc;
}

/* ---- JSON to msgpack ---- */

/* An allocation that fails while jansson reads is reported as bad syntax, or as success with a character lost; and where that was a closing quote it writes past
 * its text. So after the first failure it sees no more input, and for what it has read it gets memory out of a reserve, set aside before. All other memory
 * stays that of malloc, so others in the process may use it as before. */
static _Thread_local struct { bool failed; uint8_t *p; size_t n, used; } reserve;

static void *watched_malloc(size_t n)
{
    void *p = pd_calloc(1, n, "JSON", NULL);
    if (p || !reserve.p)
        return p;
    reserve.failed = true;
    n = (n + 15) & ~(size_t)15;
    if (n > reserve.n - reserve.used)
        return NULL;
    p = reserve.p + reserve.used;
    reserve.used += n;
    return p;
}

static void watched_free(void *p)
{
    if (!reserve.p || (uint8_t *)p < reserve.p || (uint8_t *)p >= reserve.p + reserve.n)
        pd_free(p);
}

static void watch_memory(void) { json_set_alloc_funcs(watched_malloc, watched_free); }

struct json_in { const char *at; size_t left; };

static size_t more_json(void *buffer, size_t n, void *data)
{
    struct json_in *in = data;
    n = reserve.failed ? 0 : n < in->left ? n : in->left;
    memcpy(buffer, in->at, n);
    in->at += n;
    in->left -= n;
    return n;
}

static int from_base64(const char *s, size_t n, struct pd_packer *k)
{
    int8_t value[256];
    memset(value, -1, sizeof value);
    for (int i = 0; i < 64; i++)
        value[(uint8_t)digit64[i]] = (int8_t)i;
    size_t pad = n && s[n - 1] == '=' ? 1 + (n > 1 && s[n - 2] == '=') : 0;
    if (n % 4)
        return pd_fail(k->e, PD_EFAIL, "$b64: %zu characters are no whole groups of 4", n);
    size_t bytes = n / 4 * 3 - pad;
    msgpack_pack_bin(&k->pk, bytes);
    if (k->rc || (k->rc = pd_buf_reserve(k->b, bytes, k->e)))
        return k->rc;
    uint8_t *o = k->b->p + k->b->n;
    size_t made = 0;
    for (size_t i = 0; i < n; i += 4) {
        uint32_t w = 0;
        size_t real = i + 4 == n ? 4 - pad : 4;
        for (size_t c = 0; c < 4; c++) {
            int x = c < real ? value[(uint8_t)s[i + c]] : 0;
            if (x < 0)
                return pd_fail(k->e, PD_EFAIL, "$b64: byte 0x%02x at %zu is no base64", (uint8_t)s[i + c], i + c);
            w = w << 6 | (uint32_t)x;
        }
        for (size_t c = 0; c < 3 && made < bytes; c++)
            o[made++] = (uint8_t)(w >> (16 - 8 * c));
        if (real < 4 && w & (real == 3 ? 0xff : 0xffff))
            return pd_fail(k->e, PD_EFAIL, "$b64: the last group has bits that belong to no byte");
    }
    k->b->n += bytes;
    return 0;
}

static int from_json(const json_t *j, int depth, struct pd_packer *k)
{
    int rc = 0;
    switch (json_typeof(j)) {
    case JSON_NULL: msgpack_pack_nil(&k->pk); break;
    case JSON_TRUE: msgpack_pack_true(&k->pk); break;
    case JSON_FALSE: msgpack_pack_false(&k->pk); break;
    case JSON_INTEGER: msgpack_pack_int64(&k->pk, json_integer_value(j)); break;
    case JSON_REAL: msgpack_pack_double(&k->pk, json_real_value(j)); break;
    case JSON_STRING: pd_pack_str(k, (struct pd_str){ json_string_value(j), json_string_length(j) }); break;
    case JSON_ARRAY:
        if (depth <= 0)
            break;
        msgpack_pack_array(&k->pk, json_array_size(j));
        for (size_t i = 0; !rc && i < json_array_size(j); i++)
            rc = from_json(json_array_get(j, i), depth - 1, k);
        return rc ? rc : k->rc;
    case JSON_OBJECT: {
        size_t n = json_object_size(j);
        void *it = json_object_iter((json_t *)j);
        const char *key = it ? json_object_iter_key(it) : "";
        size_t bucks = n == 1 ? dollars(key, strlen(key)) : 0;
        if (bucks == 1) {
            const json_t *v = json_object_iter_value(it);
            return json_is_string(v) ? from_base64(json_string_value(v), json_string_length(v), k) :
                   pd_fail(k->e, PD_EFAIL, "$b64 must be a base64 string (a map with that only key is written with \"$$b64\")");
        }
        if (depth <= 0)
            break;
        if (n > PD_MAX_KEYS)
            return pd_fail(k->e, PD_EFAIL, "a map has %zu keys, more than %d", n, PD_MAX_KEYS);
        msgpack_pack_map(&k->pk, n);
        for (; !rc && it; it = json_object_iter_next((json_t *)j, it)) {
            key = json_object_iter_key(it) + (bucks ? 1 : 0);
            pd_pack_text(k, key);
            rc = from_json(json_object_iter_value(it), depth - 1, k);
        }
        return rc ? rc : k->rc;
    }
    }
    if (depth <= 0 && (json_is_array(j) || json_is_object(j)))
        return pd_fail(k->e, PD_EFAIL, "more than %d levels deep", PD_MAX_DEPTH);
    return k->rc;
}

int pd_json_to_msgpack(const char *line, size_t n, struct pd_buf *out, struct pd_err *e)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_memory);
    long bad = pd_utf8_invalid(line, n);
    if (bad >= 0)
        return pd_fail(e, PD_EFAIL, "invalid UTF-8 at byte %ld", bad);
    /* jansson's text doubles as it grows: at most 4 n after a failure, and some lists for the 1 KiB that it has in hand */
    reserve.failed = false;
    reserve.used = 0;
    reserve.n = 4 * n + (64 << 10);
    if (!(reserve.p = pd_realloc(NULL, reserve.n, 1, "a JSON line", e)))
        return PD_ENOMEM;
    json_error_t je = { .position = 0 };
    json_t *j = json_load_callback(more_json, &(struct json_in){ line, n }, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY, &je);
    const bool failed = reserve.failed || (!j && json_error_code(&je) == json_error_out_of_memory);
    if (failed) {
        json_decref(j);
        j = NULL;
    }
    pd_free(reserve.p);
    reserve.p = NULL;
    if (failed)
        return pd_fail(e, PD_ENOMEM, "out of memory for a JSON line of %zu bytes", n);
    if (!j)
        return pd_fail(e, PD_EFAIL, "bad JSON at byte %d: %s", je.position, je.text);
    struct pd_packer k;
    size_t old = out->n;
    pd_pack_init(&k, out, e);
    int rc = json_is_object(j) ? from_json(j, PD_MAX_DEPTH, &k) : pd_fail(e, PD_EFAIL, "a record must be a JSON object");
    if (!rc && out->n > old && pd_value_type((struct pd_bin){ out->p + old, out->n - old }) != PD_T_MAP)
        rc = pd_fail(e, PD_EFAIL, "a record must be a JSON object, not bin");
    json_decref(j);
    if (rc)
        out->n = old;
    return rc;
}
