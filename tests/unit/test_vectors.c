/* The golden vectors (testdata/vectors): our encoders make these bytes, our decoders bring them back, and JSON carries them both ways.
 * tests/cmd/20-vectors.t holds the same files against Python's msgpack. `test_vectors write` makes them anew after a change of the format. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "../../libcommon/wire/json.h"
#include "samples.h"

static void slurp(const char *name, const char *ext, struct pd_buf *b)
{
    char path[200];
    snprintf(path, sizeof path, "testdata/vectors/%s.%s", name, ext);
    FILE *f = fopen(path, "rb");
    if (!f)
        fail_msg("%s is missing", path);
    pd_buf_reserve(b, 1 << 16, NULL);
    b->n = fread(b->p, 1, b->cap, f);
    fclose(f);
}

static int write_one(const char *name, const char *ext, const struct pd_buf *b, bool newline)
{
    char path[200];
    snprintf(path, sizeof path, "testdata/vectors/%s.%s", name, ext);
    FILE *f = fopen(path, "wb");
    if (!f)
        return 1;
    fwrite(b->p, 1, b->n, f);
    if (newline)
        fputc('\n', f);
    return fclose(f);
}

static int write_all(void)
{
    for (int i = 0; i < N_SAMPLES; i++) {
        struct pd_buf b = { 0 }, j = { 0 };
        struct pd_err e;
        if (sample_encode(i, &b, &e) || pd_msgpack_to_json(b.p, b.n, &j, &e)) {
            fprintf(stderr, "%s: %s\n", sample_name[i], e.msg);
            return 1;
        }
        if (write_one(sample_name[i], "msgpack", &b, false) || write_one(sample_name[i], "json", &j, true))
            return 1;
        pd_buf_free(&b);
        pd_buf_free(&j);
    }
    return 0;
}

static void same(const char *name, const char *what, const struct pd_buf *a, const struct pd_buf *b)
{
    if (a->n != b->n || memcmp(a->p, b->p, a->n))
        fail_msg("%s: %s differs (%zu and %zu bytes)", name, what, a->n, b->n);
}

static void vectors_hold(void **state)
{
    for (int i = 0; i < N_SAMPLES; i++) {
        struct pd_buf golden = { 0 }, json = { 0 }, made = { 0 }, again = { 0 }, text = { 0 }, back = { 0 };
        struct pd_err e = { 0 };
        slurp(sample_name[i], "msgpack", &golden);
        slurp(sample_name[i], "json", &json);
        if (sample_encode(i, &made, &e))
            fail_msg("%s: %s", sample_name[i], e.msg);
        same(sample_name[i], "what the encoder makes", &golden, &made);
        if (reencode(golden.p, golden.n, &again, &e))
            fail_msg("%s: %s", sample_name[i], e.msg);
        same(sample_name[i], "decoded and encoded", &golden, &again);
        if (pd_msgpack_to_json(golden.p, golden.n, &text, &e) || pd_buf_add(&text, "\n", 1, &e))
            fail_msg("%s: %s", sample_name[i], e.msg);
        same(sample_name[i], "its JSON", &json, &text);
        if (pd_json_to_msgpack((char *)json.p, json.n, &back, &e))
            fail_msg("%s: %s", sample_name[i], e.msg);
        same(sample_name[i], "msgpack from its JSON", &golden, &back);
        pd_buf_free(&golden); pd_buf_free(&json); pd_buf_free(&made); pd_buf_free(&again); pd_buf_free(&text); pd_buf_free(&back);
    }
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "write"))
        return write_all();
    const struct CMUnitTest tests[] = { cmocka_unit_test(vectors_hold) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
