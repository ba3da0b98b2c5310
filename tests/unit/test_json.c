/* The JSON bridge: lossless where it accepts, a clear refusal where JSON or msgpack cannot follow. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "../../libcommon/wire/json.h"
#include "samples.h"

static void to_msgpack(const char *json, struct pd_bin want)
{
    struct pd_buf b = { 0 };
    struct pd_err e = { 0 };
    if (pd_json_to_msgpack(json, strlen(json), &b, &e))
        fail_msg("%s: %s", json, e.msg);
    if (b.n != want.n || memcmp(b.p, want.p, b.n))
        fail_msg("%s: other bytes", json);
    pd_buf_free(&b);
}

static void to_json(struct pd_bin rec, const char *want)
{
    struct pd_buf b = { 0 }, back = { 0 };
    struct pd_err e = { 0 };
    if (pd_msgpack_to_json(rec.p, rec.n, &b, &e))
        fail_msg("%s: %s", want, e.msg);
    if (b.n != strlen(want) || memcmp(b.p, want, b.n))
        fail_msg("'%.*s' is not '%s'", (int)b.n, b.p, want);
    if (pd_json_to_msgpack((char *)b.p, b.n, &back, &e))
        fail_msg("%s does not come back: %s", want, e.msg);
    assert_int_equal(back.n, rec.n);
    assert_memory_equal(back.p, rec.p, rec.n);
    pd_buf_free(&b);
    pd_buf_free(&back);
}

static void no_msgpack(const char *json, size_t n, const char *why)
{
    struct pd_buf b = { 0 };
    struct pd_err e = { 0 };
    pd_buf_add(&b, "keep", 4, NULL);
    int rc = pd_json_to_msgpack(json, n, &b, &e);
    if (rc != PD_EFAIL || !strstr(e.msg, why))
        fail_msg("%.60s: not refused with '%s' but %d '%s'", json, why, rc, e.msg);
    assert_int_equal(b.n, 4);
    pd_buf_free(&b);
}

static void no_json(struct pd_bin rec, const char *why)
{
    struct pd_buf b = { 0 };
    struct pd_err e = { 0 };
    int rc = pd_msgpack_to_json(rec.p, rec.n, &b, &e);
    if (!rc || !strstr(e.msg, why))
        fail_msg("not refused with '%s' but '%s'", why, e.msg);
    assert_int_equal(b.n, 0);
    pd_buf_free(&b);
}

static void values_both_ways(void **state)
{
    to_json(BIN("\x80"), "{}");
    to_json(BIN("\x83\xa1" "a\xc0\xa1" "b\xc2\xa1" "c\xc3"), "{\"a\":null,\"b\":false,\"c\":true}");
    to_json(BIN("\x81\xa1" "i\x94\x7f\xe0\xcf\x7f\xff\xff\xff\xff\xff\xff\xff\xd3\x80\0\0\0\0\0\0\0"), "{\"i\":[127,-32,9223372036854775807,-9223372036854775808]}");
    to_json(BIN("\x81\xa1" "s\xaa" "a\0\"\\\n\x7f\xf0\x9f\x98\x80"), "{\"s\":\"a\\u0000\\\"\\\\\\n\x7f\xf0\x9f\x98\x80\"}");
    to_json(BIN("\x81\xa1" "b\xc4\x00"), "{\"b\":{\"$b64\":\"\"}}");
    to_json(BIN("\x81\xa1" "b\x93\xc4\x01\xff\xc4\x02\xff\xfe\xc4\x03\0\x10\x83"), "{\"b\":[{\"$b64\":\"/w==\"},{\"$b64\":\"//4=\"},{\"$b64\":\"ABCD\"}]}");
    to_msgpack(" {\"a\" : \"\\ud83d\\ude00\\u0041\"} ", BIN("\x81\xa1" "a\xa5\xf0\x9f\x98\x80" "A"));
    to_msgpack("{\"a\":1e2}", BIN("\x81\xa1" "a\xcb\x40\x59\0\0\0\0\0\0"));
    /* a float32 of another program: the value stays, as a float64 */
    struct pd_buf b = { 0 };
    assert_int_equal(pd_msgpack_to_json("\x81\xa1" "f\xca\x3f\0\0\0", 8, &b, NULL), 0);
    assert_memory_equal(b.p, "{\"f\":0.5}", b.n);
    pd_buf_free(&b);
}

static void the_dollar_rule(void **state)
{
    to_json(BIN("\x81\xa4$b64\x01"), "{\"$$b64\":1}");
    to_json(BIN("\x81\xa5$$b64\xa1x"), "{\"$$$b64\":\"x\"}");
    to_json(BIN("\x81\xa1" "a\x81\xa4$b64\xa4" "AAAA"), "{\"a\":{\"$$b64\":\"AAAA\"}}");
    to_json(BIN("\x82\xa4$b64\x01\xa1" "b\x02"), "{\"$b64\":1,\"b\":2}");     /* not the only key: as it is */
    to_json(BIN("\x81\xa3" "b64\x01"), "{\"b64\":1}");
    to_json(BIN("\x81\xa5$b64x\x01"), "{\"$b64x\":1}");
    to_json(BIN("\x81\xa4x$b6\x01"), "{\"x$b6\":1}");
    no_msgpack("{\"a\":{\"$b64\":1}}", 16, "$b64 must be");
    no_msgpack("{\"$b64\":\"AAAA\"}", 15, "not bin");
    no_msgpack("{\"a\":{\"$b64\":\"AAA\"}}", 20, "groups of 4");
    no_msgpack("{\"a\":{\"$b64\":\"AA=A\"}}", 21, "no base64");
    no_msgpack("{\"a\":{\"$b64\":\"A===\"}}", 21, "no base64");
    no_msgpack("{\"a\":{\"$b64\":\"====\"}}", 21, "no base64");
    no_msgpack("{\"a\":{\"$b64\":\"AB==\"}}", 21, "belong to no byte");
    no_msgpack("{\"a\":{\"$b64\":\"AA\\nA\"}}", 22, "no base64");
}

static void floats_come_back_bit_for_bit(void **state)
{
    srandom(3);
    for (int i = 0; i < 200000; i++) {
        union { double f; uint64_t u; float f32[2]; } x, y;
        x.u = (uint64_t)random() << 42 ^ (uint64_t)random() << 21 ^ (uint64_t)random();
        if (i % 3 == 1)
            x.f = (double)x.f32[0];
        if (i % 3 == 2)
            x.f = (double)(random() % 2000 - 1000) / (1 << random() % 8);
        if (i == 2)
            x.f = -0.0;
        if (!isfinite(x.f))
            continue;
        uint8_t rec[12] = { 0x81, 0xa1, 'f', 0xcb };
        pd_put_be64(rec + 4, x.u);
        struct pd_buf j = { 0 }, b = { 0 };
        assert_int_equal(pd_msgpack_to_json(rec, 12, &j, NULL), 0);
        assert_int_equal(pd_json_to_msgpack((char *)j.p, j.n, &b, NULL), 0);
        y.u = b.n == 12 ? pd_get_be64(b.p + 4) : ~x.u;
        if (b.n != 12 || b.p[3] != 0xcb || y.u != x.u)
            fail_msg("%.17g came back as %.17g from %.*s", x.f, y.f, (int)j.n, j.p);
        pd_buf_free(&j);
        pd_buf_free(&b);
    }
}

static void bad_json_is_told(void **state)
{
    no_msgpack("{\"a\":\"\xff\"}", 9, "invalid UTF-8 at byte 6");
    no_msgpack("{\"a\":1,\"a\":2}", 13, "duplicate");
    no_msgpack("{\"a\":{\"b\":1,\"b\":2}}", 19, "duplicate");
    no_msgpack("{\"a\":1", 6, "bad JSON at byte 6");
    no_msgpack("{\"a\":1} x", 9, "bad JSON");
    no_msgpack("[1]", 3, "must be a JSON object");
    no_msgpack("3", 1, "must be a JSON object");
    no_msgpack("", 0, "bad JSON");
    no_msgpack("{\"a\":9223372036854775808}", 25, "big integer");
    no_msgpack("{\"a\":1e999}", 11, "bad JSON");
    no_msgpack("{\"a\":NaN}", 9, "bad JSON");
    no_msgpack("{\"a\":\"\\ud800\"}", 14, "bad JSON");
    no_msgpack("{\"a\":\"\\udc00\\ud800\"}", 20, "bad JSON");
    no_msgpack("{\"a\\u0000b\":1}", 14, "NUL");
    no_msgpack("{\"a\":01}", 8, "bad JSON");
    char deep[200] = "";
    for (int depth = 16; depth <= 17; depth++) {
        strcpy(deep, "{\"a\":");
        memset(deep + 5, '[', (size_t)depth - 1);
        memset(deep + 5 + depth - 1, ']', (size_t)depth - 1);
        strcpy(deep + 5 + 2 * (depth - 1), "}");
        struct pd_buf b = { 0 };
        struct pd_err e;
        int rc = pd_json_to_msgpack(deep, strlen(deep), &b, &e);
        assert_int_equal(rc, depth == 16 ? 0 : PD_EFAIL);
        pd_buf_free(&b);
    }
    char *very = malloc(2000000);
    memcpy(very, "{\"a\":", 5);
    memset(very + 5, '[', 1999995);
    no_msgpack(very, 2000000, "bad JSON");
    free(very);
}

static void what_json_cannot_carry(void **state)
{
    no_json(BIN("\x81\xa1" "a\xcf\x80\0\0\0\0\0\0\0"), "2^63");
    no_json(BIN("\x81\xa1" "a\xcb\x7f\xf0\0\0\0\0\0\0"), "finite");
    no_json(BIN("\x81\xa1" "a\xcb\x7f\xf8\0\0\0\0\0\0"), "finite");
    no_json(BIN("\x81\xa1" "a\xa1\xff"), "UTF-8");
    no_json(BIN("\x81\xa1" "a\x81\x01\x02"), "no string");
    no_json(BIN("\x81\xa1" "a\x82\xa1" "x\x02\xa1" "x\x02"), "twice");
    no_json(BIN("\x81\xa1" "a\xd4\x01\x01"), "extension");
    no_json(BIN("\x81\xa1\0\x01"), "NUL");
    no_json(BIN("\x81\xa1" "a"), "not one msgpack map");
    no_json(BIN("\x81\xa1" "a\x01\x01"), "not one msgpack map");
    no_json(BIN("\x01"), "not one msgpack map");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_both_ways), cmocka_unit_test(the_dollar_rule), cmocka_unit_test(floats_come_back_bit_for_bit), cmocka_unit_test(bad_json_is_told),
        cmocka_unit_test(what_json_cannot_carry) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
