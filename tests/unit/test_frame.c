/* Framing of hostile bytes: lying counts and lengths, depth, keys, every cut; and raw values. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "../../libcommon/wire/frame.h"
#include "../../libcommon/wire/value.h"
#include "samples.h"

static int frame(const void *p, size_t n, size_t max, size_t *len, struct pd_err *e)
{
    struct pd_frame_scan s = { 0 };
    return pd_frame_next(&s, p, n, max, len, e);
}

static void refused(const char *p, size_t n, const char *why)
{
    struct pd_err e = { 0 };
    size_t len;
    if (frame(p, n, PD_MAX_RECORD_DEFAULT, &len, &e) != PD_ECORRUPT || !strstr(e.msg, why))
        fail_msg("not refused with '%s' but '%s'", why, e.msg);
}

static void counts_and_lengths_that_lie(void **state)
{
    refused("\xdf\xff\xff\xff\xff", 5, "larger than 16777216");
    refused("\xdf\xff\xff\xff\xff" "abc", 8, "larger");
    refused("\x81\xa1" "a\xc6\xff\xff\xff\xff", 8, "offset 3");
    refused("\x81\xa1" "a\xdb\xff\xff\xff\xff", 8, "larger");
    refused("\x81\xa1" "a\xc9\xff\xff\xff\xff\x01", 9, "larger");
    refused("\x81\xa1" "a\xdd\xff\xff\xff\xff", 8, "larger");
    refused("\x81\xc6\xff\xff\xff\xff", 6, "larger");
    refused("\x81\xa1" "a\xc1", 4, "0xc1");
    refused("\x93\x01\x02\x03", 4, "must be a map");
    refused("x", 1, "must be a map");
    /* a list in a list, each within the limit of 100, that cannot both be there */
    struct pd_err e;
    size_t len;
    assert_int_equal(frame("\x81\xa1" "a\xdc\0\x3c\xdc\0\x20", 9, 100, &len, &e), 0);
    assert_int_equal(frame("\x81\xa1" "a\xdc\0\x3c\xdc\0\x3c", 9, 100, &len, &e), PD_ECORRUPT);
}

static void limit_is_exact(void **state)
{
    struct pd_err e;
    size_t len;
    uint8_t rec[2000] = { 0x81, 0xa1, 'a', 0xc5, 0x03, 0xe8 };      /* bin of 1000: 1006 in all */
    assert_int_equal(frame(rec, 1006, 1006, &len, &e), 1);
    assert_int_equal(len, 1006);
    assert_int_equal(frame(rec, 1006, 1005, &len, &e), PD_ECORRUPT);
    assert_int_equal(frame(rec, 6, 1006, &len, &e), 0);
    assert_int_equal(len, 1006);        /* known from the head */
}

static void nested(struct pd_buf *b, int depth, bool list)
{
    b->n = 0;
    for (int i = 0; i < depth; i++)
        pd_buf_add(b, i && list ? "\x91" : "\x81\xa1" "k", i && list ? 1 : 3, NULL);
    pd_buf_add(b, "\xc0", 1, NULL);
}

static void depth_is_bounded(void **state)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    size_t len;
    for (int list = 0; list < 2; list++) {
        nested(&b, PD_MAX_DEPTH, list);
        assert_int_equal(frame(b.p, b.n, 1 << 20, &len, &e), 1);
        assert_int_equal(len, b.n);
        nested(&b, PD_MAX_DEPTH + 1, list);
        assert_int_equal(frame(b.p, b.n, 1 << 20, &len, &e), PD_ECORRUPT);
        assert_non_null(strstr(e.msg, "16 levels"));
    }
    pd_buf_free(&b);
}

static void keys_are_distinct_strings(void **state)
{
    struct pd_err e;
    assert_int_equal(pd_frame_check((const uint8_t *)"\x82\xa1" "a\x01\xa1" "b\x02", 7, &e), 0);
    assert_int_equal(pd_frame_check((const uint8_t *)"\x82\xa1" "a\x01\xa1" "a\x02", 7, &e), PD_ECORRUPT);
    assert_non_null(strstr(e.msg, "'a' comes twice"));
    assert_int_equal(pd_frame_check((const uint8_t *)"\x82\xa1" "a\x01\xd9\x01" "a\x02", 8, &e), PD_ECORRUPT);      /* another head, the same key */
    assert_int_equal(pd_frame_check((const uint8_t *)"\x81\x05\x02", 3, &e), PD_ECORRUPT);
    assert_int_equal(pd_frame_check((const uint8_t *)"\x81\xc4\x01" "a\x02", 5, &e), PD_ECORRUPT);
    assert_int_equal(pd_frame_check((const uint8_t *)"\x80", 1, &e), 0);
    assert_int_equal(pd_frame_check((const uint8_t *)"\x81\xa0\x01", 3, &e), 0);
    assert_int_equal(pd_frame_check((const uint8_t *)"\x82\xa0\x01\xa0\x01", 5, &e), PD_ECORRUPT);
    assert_int_equal(pd_frame_check((const uint8_t *)"\x82\xa1" "a\x01", 4, &e), PD_ECORRUPT);
    for (int n = 1000; n <= 1100; n += 24) {        /* many keys: the table's path; 1024 are the most */
        struct pd_buf b = { 0 };
        pd_buf_printf(&b, NULL, "%c%c%c", 0xde, n >> 8, n & 255);
        for (int i = 0; i < n; i++)
            pd_buf_printf(&b, NULL, "\xa4%04d\x01", i);
        assert_int_equal(pd_frame_check(b.p, b.n, &e), n <= 1024 ? 0 : PD_ECORRUPT);
        memcpy(b.p + b.n - 5, "0007", 4);
        assert_int_equal(pd_frame_check(b.p, b.n, &e), PD_ECORRUPT);
        pd_buf_free(&b);
    }
}

/* Each sample, fed in every way of being cut once, and byte by byte with one scan. */
static void every_cut_asks_for_more(void **state)
{
    for (int i = 0; i < N_SAMPLES; i++) {
        struct pd_buf b = { 0 };
        struct pd_frame_scan grow = { 0 };
        struct pd_err e = { 0 };
        assert_int_equal(sample_encode(i, &b, &e), 0);
        for (size_t n = 0; n < b.n; n++) {
            uint8_t *cut = malloc(n ? n : 1);       /* of just this size, so that a sanitizer sees one byte too many */
            memcpy(cut, b.p, n);
            struct pd_frame_scan fresh = { 0 };
            size_t len = 0, len2 = 0;
            assert_int_equal(pd_frame_next(&fresh, cut, n, 1 << 20, &len, &e), 0);
            assert_true(len > n && len <= b.n);
            assert_int_equal(pd_frame_next(&grow, cut, n, 1 << 20, &len2, &e), 0);
            assert_int_equal(len2, len);
            struct pd_buf out = { 0 };
            if (pd_kind_of(cut, n) != PD_K_UNKNOWN && reencode(cut, n, &out, &e) == 0)
                fail_msg("%s cut to %zu bytes was taken", sample_name[i], n);
            struct pd_bin v;
            pd_map_find(cut, n, "no such key", &v);
            pd_buf_free(&out);
            free(cut);
        }
        size_t len;
        assert_int_equal(pd_frame_next(&grow, b.p, b.n, 1 << 20, &len, &e), 1);
        assert_int_equal(len, b.n);
        pd_buf_free(&b);
    }
}

/* Any one byte changed: framed or refused, decoded or refused, never out of bounds; and the descriptor notices every one of them. */
static void every_flipped_byte_is_survived(void **state)
{
    for (int i = 0; i < N_SAMPLES; i++) {
        struct pd_buf b = { 0 };
        struct pd_err e = { 0 };
        assert_int_equal(sample_encode(i, &b, &e), 0);
        uint8_t *p = malloc(b.n);
        for (size_t at = 0; at < b.n; at++)
            for (int bit = 0; bit < 8; bit++) {
                memcpy(p, b.p, b.n);
                p[at] ^= (uint8_t)(1 << bit);
                struct pd_buf out = { 0 };
                int rc = reencode(p, b.n, &out, &e);
                if (!rc && ((!strncmp(sample_name[i], "kv", 2) && strncmp(sample_name[i], "kvevent", 7)) || !strcmp(sample_name[i], "offer")))
                    fail_msg("%s: bit %d of byte %zu was changed and not noticed", sample_name[i], bit, at);
                pd_buf_free(&out);
            }
        free(p);
        pd_buf_free(&b);
    }
}

static void random_bytes_never_crash(void **state)
{
    srandom(42);
    for (int i = 0; i < 200000; i++) {
        size_t n = 1 + (size_t)random() % 40, len;
        uint8_t *p = malloc(n);
        struct pd_err e;
        struct pd_bin v;
        for (size_t k = 0; k < n; k++)
            p[k] = (uint8_t)(random() % 3 ? random() : 0x80 + random() % 4);
        p[0] = (uint8_t)(0x80 + random() % 16);
        int rc = frame(p, n, 1 << 20, &len, &e);
        if (rc == 1) {
            assert_true(len <= n);
            assert_int_equal(pd_value_len(p, len), len);
            pd_frame_check(p, len, &e);
        }
        pd_map_find(p, n, "a", &v);
        free(p);
    }
}

static void values_are_read_by_type(void **state)
{
    int64_t i;
    double f;
    struct pd_str s;
    struct pd_bin v;
    char text[96];
    assert_true(pd_get_int(BIN("\xcf\x7f\xff\xff\xff\xff\xff\xff\xff"), &i) && i == INT64_MAX);
    assert_false(pd_get_int(BIN("\xcf\x80\0\0\0\0\0\0\0"), &i));
    assert_true(pd_get_int(BIN("\xd3\x80\0\0\0\0\0\0\0"), &i) && i == INT64_MIN);
    assert_false(pd_get_int(BIN("\xca\x3f\x80\0\0"), &i));
    assert_true(pd_get_float(BIN("\xca\x3f\x80\0\0"), &f) && f == 1);
    assert_true(pd_get_float(BIN("\x07"), &f) && f == 7);
    assert_false(pd_get_str(BIN("\xa3" "ab"), &s));
    assert_false(pd_get_bin(BIN("\xa1" "a"), &v));
    assert_int_equal(pd_map_find("\x81\xa1" "a\x93\x01\x02\x03", 7, "a", &v), 1);
    assert_int_equal(v.n, 4);
    assert_int_equal(pd_map_find("\x81\xa1" "a\x01", 4, "b", &v), 0);
    assert_int_equal(pd_map_find("\x81\xa0\x01", 3, "", &v), 1);      /* an empty key is a key, an empty string is there */
    assert_true(pd_get_str(BIN("\xa0"), &s) && s.p && !s.n);
    assert_true(pd_get_bin(BIN("\xc4\0"), &v) && v.p && !v.n);
    assert_int_equal(pd_map_find("\x81\xa1" "a", 3, "b", &v), PD_ECORRUPT);
    assert_int_equal(pd_map_find("\x01", 1, "b", &v), PD_ECORRUPT);
    assert_string_equal(pd_value_text(BIN("\xa3" "abc"), text, sizeof text), "\"abc\"");
    assert_string_equal(pd_value_text(BIN("\x80"), text, sizeof text), "a map");
    assert_string_equal(pd_id_text(BIN("\xa3" "a-1"), text, sizeof text), "a-1");
    assert_string_equal(pd_id_text(BIN("\x11"), text, sizeof text), "17");
    assert_string_equal(pd_id_text((struct pd_bin){ 0 }, text, sizeof text), "-");
}

static void canonical_form(void **state)
{
    struct pd_buf b = { 0 };
    struct pd_err e;
    /* wide heads, a float32, a nested map: all to their smallest */
    struct pd_bin v = BIN("\xde\0\x02\xd9\x01" "a\xd3\0\0\0\0\0\0\0\x05\xda\0\x01" "b\xdc\0\x02\xca\x3f\0\0\0\xc6\0\0\0\x01x");
    assert_int_equal(pd_value_canon(v, 16, PD_EFAIL, &b, &e), 0);
    assert_int_equal(b.n, 1 + 2 + 1 + 2 + 1 + 9 + 3);
    assert_memory_equal(b.p, "\x82\xa1" "a\x05\xa1" "b\x92\xcb\x3f\xe0\0\0\0\0\0\0\xc4\x01x", b.n);
    struct { struct pd_bin v; const char *why; } bad[] = {
        { BIN("\xd4\x01\x02"), "extension" }, { BIN("\xca\x7f\x80\0\0"), "finite" }, { BIN("\xcb\x7f\xf8\0\0\0\0\0\0"), "finite" },
        { BIN("\xcf\xff\xff\xff\xff\xff\xff\xff\xff"), "2^63" }, { BIN("\xa1\xff"), "UTF-8" }, { BIN("\x81\x01\x02"), "no string" },
        { BIN("\x82\xa1" "a\x01\xa1" "a\x01"), "twice" }, { BIN("\x81\xa2" "a\0\x01"), "NUL" }, { BIN("\x91\x91\x91\x91\xc0"), "levels" }, { BIN("\x92\x01"), "malformed" } };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        size_t before = b.n;
        assert_int_equal(pd_value_canon(bad[i].v, 3, PD_EFAIL, &b, &e), PD_EFAIL);
        if (!strstr(e.msg, bad[i].why))
            fail_msg("'%s' does not say %s", e.msg, bad[i].why);
        assert_int_equal(b.n, before);
    }
    pd_buf_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_and_lengths_that_lie), cmocka_unit_test(limit_is_exact), cmocka_unit_test(depth_is_bounded), cmocka_unit_test(keys_are_distinct_strings),
        cmocka_unit_test(every_cut_asks_for_more), cmocka_unit_test(every_flipped_byte_is_survived), cmocka_unit_test(random_bytes_never_crash),
        cmocka_unit_test(values_are_read_by_type), cmocka_unit_test(canonical_form) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
