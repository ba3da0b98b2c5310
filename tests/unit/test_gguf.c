/* GGUF: what a good file gives, and that every kind of bad one is refused with the field and the offset, in little memory. */
#include <fcntl.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <cmocka.h>
#include "gguf_build.h"

/* A small good file: a key of each type, two tensors. */
static void build(struct gb *b)
{
    static const uint16_t u16 = 65535;
    static const int16_t i16 = -2;
    static const int64_t i64 = -5;
    static const uint64_t u64 = UINT64_MAX;
    static const double f64 = 0.25;
    static const int32_t ints[] = { 1, -2, 3 };
    static const float floats[] = { 0.5f, -1 };
    gb_begin(b);
    gb_kv_str(b, "general.architecture", "llama");
    gb_kv_u32(b, "u32", 4000000000u);
    gb_kv_f32(b, "f32", 1.5f);
    gb_kv_bool(b, "yes", 1);
    gb_key(b, "u8", PD_GT_U8); gb_raw(b, "\xff", 1);
    gb_key(b, "i8", PD_GT_I8); gb_raw(b, "\xff", 1);
    gb_key(b, "u16", PD_GT_U16); gb_raw(b, &u16, 2);
    gb_key(b, "i16", PD_GT_I16); gb_raw(b, &i16, 2);
    gb_key(b, "i64", PD_GT_I64); gb_raw(b, &i64, 8);
    gb_key(b, "u64", PD_GT_U64); gb_raw(b, &u64, 8);
    gb_key(b, "f64", PD_GT_F64); gb_raw(b, &f64, 8);
    gb_key(b, "strs", PD_GT_ARR); gb_u32(b, PD_GT_STR); gb_u64(b, 3); gb_str(b, "a"); gb_str(b, ""); gb_str(b, "ccc");
    gb_key(b, "ints", PD_GT_ARR); gb_u32(b, PD_GT_I32); gb_u64(b, 3); gb_raw(b, ints, sizeof ints);
    gb_key(b, "floats", PD_GT_ARR); gb_u32(b, PD_GT_F32); gb_u64(b, 2); gb_raw(b, floats, sizeof floats);
    gb_key(b, "none", PD_GT_ARR); gb_u32(b, PD_GT_STR); gb_u64(b, 0);
    gb_tensor(b, "matrix", PD_F32, 32, 2);
    gb_tensor(b, "quant", PD_Q8_0, 64, 16);
    gb_end(b);
}

static int open_bytes(const void *p, size_t n, struct pd_gguf **g, struct pd_err *e)
{
    char path[64];
    int fd;
    gb_file(p, n, &fd, path);
    memset(e, 0, sizeof *e);
    int rc = pd_gguf_open(path, g, e);
    close(fd);          /* its own descriptor stays */
    return rc;
}

static void a_good_file_gives_what_it_holds(void **state)
{
    struct gb b = { 0 };
    struct pd_gguf *g;
    struct pd_err e;
    for (int version = 2; version <= 3; version++) {
        build(&b);
        gb_set32(&b, 4, (uint32_t)version);
        assert_int_equal(open_bytes(b.p, b.n, &g, &e), 0);
        assert_int_equal(g->n_kv, 15);
        assert_int_equal(g->n_tensors, 2);
        assert_int_equal(g->data_off % 32, 0);
        int64_t i = 7;
        assert_int_equal(pd_gguf_get_int(g, "u32", 0, UINT32_MAX, &i, &e), 1);
        assert_true(i == 4000000000);
        assert_int_equal(pd_gguf_get_int(g, "u8", 0, 255, &i, &e), 1);
        assert_int_equal(i, 255);
        assert_int_equal(pd_gguf_get_int(g, "i8", -1, 0, &i, &e), 1);
        assert_int_equal(i, -1);
        assert_int_equal(pd_gguf_get_int(g, "u16", 0, 65535, &i, &e), 1);
        assert_int_equal(i, 65535);
        assert_int_equal(pd_gguf_get_int(g, "i16", -2, 65535, &i, &e), 1);
        assert_int_equal(i, -2);
        assert_int_equal(pd_gguf_get_int(g, "i64", -5, 0, &i, &e), 1);
        assert_int_equal(i, -5);
        i = 7;
        assert_int_equal(pd_gguf_get_int(g, "absent", 0, 1, &i, &e), 0);
        assert_int_equal(i, 7);
        assert_true(pd_gguf_get_int(g, "u64", 0, 1000, &i, &e) < 0);
        assert_non_null(strstr(e.msg, "'u64'"));
        assert_true(pd_gguf_get_int(g, "f32", 0, 1000, &i, &e) < 0);
        assert_non_null(strstr(e.msg, "of type f32, expected an integer"));
        assert_true(pd_gguf_get_int(g, "ints", 0, 1000, &i, &e) < 0);
        assert_non_null(strstr(e.msg, "an array of i32"));
        assert_int_equal(i, 7);
        double d;
        assert_int_equal(pd_gguf_get_f64(g, "f32", &d, &e), 1);
        assert_true(d == 1.5);
        assert_int_equal(pd_gguf_get_f64(g, "f64", &d, &e), 1);
        assert_true(d == 0.25);
        assert_int_equal(pd_gguf_get_f64(g, "u8", &d, &e), 1);
        assert_true(d == 255);
        assert_true(pd_gguf_get_f64(g, "yes", &d, &e) < 0);
        bool y = false;
        assert_int_equal(pd_gguf_get_bool(g, "yes", &y, &e), 1);
        assert_true(y);
        assert_true(pd_gguf_get_bool(g, "u8", &y, &e) < 0);
        struct pd_str s, *strs;
        assert_int_equal(pd_gguf_get_str(g, "general.architecture", &s, &e), 1);
        assert_true(pd_str_eq(s, "llama"));
        assert_true(pd_gguf_get_str(g, "strs", &s, &e) < 0);
        size_t n;
        assert_int_equal(pd_gguf_get_strs(g, "strs", &strs, &n, &e), 1);
        assert_int_equal(n, 3);
        assert_true(pd_str_eq(strs[0], "a") && strs[1].n == 0 && pd_str_eq(strs[2], "ccc"));
        pd_free(strs);
        assert_int_equal(pd_gguf_get_strs(g, "none", &strs, &n, &e), 1);
        assert_int_equal(n, 0);
        pd_free(strs);
        assert_true(pd_gguf_get_strs(g, "ints", &strs, &n, &e) < 0);
        int32_t *iv;
        float *fv;
        assert_int_equal(pd_gguf_get_i32s(g, "ints", &iv, &n, &e), 1);
        assert_true(n == 3 && iv[1] == -2);
        pd_free(iv);
        assert_int_equal(pd_gguf_get_f32s(g, "floats", &fv, &n, &e), 1);
        assert_true(n == 2 && fv[0] == 0.5f);
        pd_free(fv);
        assert_true(pd_gguf_get_f32s(g, "strs", &fv, &n, &e) < 0);
        assert_int_equal(pd_gguf_get_f32s(g, "absent", &fv, &n, &e), 0);
        const struct pd_gguf_tensor *t = pd_gguf_tensor(g, "quant");
        assert_non_null(t);
        assert_true(t->ne[0] == 64 && t->ne[1] == 16 && t->ne[2] == 1 && t->n_dims == 2 && t->bytes == 64 / 32 * 34 * 16);
        assert_true(t->at + t->bytes == g->size && t->entry > 24 && t->entry < g->data_off);
        assert_null(pd_gguf_tensor(g, "quan"));
        pd_gguf_close(g);
    }
    free(b.p);
}

/* --- bad files: each is the good one with one thing changed --- */

static size_t place(const struct gb *b, const char *bytes) { return (size_t)((uint8_t *)memmem(b->p, b->n, bytes, strlen(bytes)) - b->p); }

static void magic(struct gb *b) { memcpy(b->p, "GGML", 4); }
static void version1(struct gb *b) { gb_set32(b, 4, 1); }
static void version4(struct gb *b) { gb_set32(b, 4, 4); }
static void big_endian(struct gb *b) { gb_set32(b, 4, 0x03000000); }
static void many_tensors(struct gb *b) { gb_set64(b, 8, UINT64_MAX); }                  /* CVE-2024-21836 */
static void negative_tensors(struct gb *b) { gb_set64(b, 8, (uint64_t)INT64_MIN); }
static void a_tensor_too_many(struct gb *b) { gb_set64(b, 8, 3); }
static void many_keys(struct gb *b) { gb_set64(b, 16, 1ull << 60); }                    /* CVE-2024-23605 */
static void a_key_too_many(struct gb *b) { gb_set64(b, 16, 16); }
static void long_key(struct gb *b) { gb_set64(b, 24, 1ull << 62); }
static void key_to_the_end(struct gb *b) { gb_set64(b, 24, 60000); }
static void long_string(struct gb *b) { gb_set64(b, place(b, "llama") - 8, UINT64_MAX); }       /* CVE-2024-23496 */
static void string_past_end(struct gb *b) { gb_set64(b, place(b, "llama") - 8, 5000000); }
static void bad_value_type(struct gb *b) { gb_set32(b, place(b, "llama") - 12, 13); }
static void nested_array(struct gb *b) { gb_set32(b, place(b, "strs") + 8, PD_GT_ARR); }
static void bad_element_type(struct gb *b) { gb_set32(b, place(b, "strs") + 8, 99); }           /* CVE-2024-21825 */
static void long_array(struct gb *b) { gb_set64(b, place(b, "ints") + 12, 1ull << 62); }
static void array_size_wraps(struct gb *b) { gb_set64(b, place(b, "ints") + 12, (1ull << 62) + 3); }    /* x 4 bytes = 12 */
static void array_past_end(struct gb *b) { gb_set64(b, place(b, "floats") + 14, 1300); }
static void long_array_string(struct gb *b) { gb_set64(b, place(b, "strs") + 20, (uint64_t)-9); }
static void duplicate_key(struct gb *b) { memcpy(b->p + place(b, "u64"), "i64", 3); }
static void long_name(struct gb *b) { gb_set64(b, gb_at(b, 0, 0), 64); }
static void huge_name(struct gb *b) { gb_set64(b, gb_at(b, 0, 0), 0x80000000u); }       /* CVE-2025-49847 was such a cast */
static void no_dims(struct gb *b) { gb_set32(b, gb_at(b, 0, 1), 0); }
static void nine_dims(struct gb *b) { gb_set32(b, gb_at(b, 0, 1), 9); }
static void zero_dim(struct gb *b) { gb_set64(b, gb_at(b, 0, 2), 0); }
static void zero_dim1(struct gb *b) { gb_set64(b, gb_at(b, 1, 2) + 8, 0); }
static void negative_dim(struct gb *b) { gb_set64(b, gb_at(b, 0, 2), (uint64_t)-32); }
static void dims_wrap(struct gb *b) { gb_set64(b, gb_at(b, 0, 2), 1ull << 33); gb_set64(b, gb_at(b, 0, 2) + 8, (1ull << 31) + 1); }    /* CVE-2024-21802 */
static void dims_wrap_to_zero(struct gb *b) { gb_set64(b, gb_at(b, 0, 2), 1ull << 32); gb_set64(b, gb_at(b, 0, 2) + 8, 1ull << 32); }
static void bytes_wrap(struct gb *b) { gb_set64(b, gb_at(b, 0, 2), 1ull << 62); gb_set64(b, gb_at(b, 0, 2) + 8, 1); }                  /* x 4 bytes = 2^64 */
static void quant_bytes_wrap(struct gb *b) { gb_set64(b, gb_at(b, 1, 2), 1ull << 32); gb_set64(b, gb_at(b, 1, 2) + 8, 0x78787878); }   /* CVE-2026-33298 */
static void dims_past_file(struct gb *b) { gb_set64(b, gb_at(b, 1, 2) + 8, 17); }       /* CVE-2026-7482: a read behind the file */
static void dims_32_bit(struct gb *b) { gb_set64(b, gb_at(b, 1, 2) + 8, (1ull << 32) + 16); }   /* CVE-2026-53923: right when cut to 32 bits */
static void broken_block(struct gb *b) { gb_set64(b, gb_at(b, 1, 2), 48); }
static void unknown_type(struct gb *b) { gb_set32(b, gb_at(b, 1, 3), 99); }
static void unsupported_type(struct gb *b) { gb_set32(b, gb_at(b, 1, 3), 10); }
static void removed_type(struct gb *b) { gb_set32(b, gb_at(b, 1, 3), 4); }
static void offset_past_end(struct gb *b) { gb_set64(b, gb_at(b, 1, 4), 1ull << 40); }
static void offset_wraps(struct gb *b) { gb_set64(b, gb_at(b, 1, 4), (uint64_t)-32); }  /* CVE-2025-53630, CVE-2026-27940: sums that wrap */
static void offset_odd(struct gb *b) { gb_set64(b, gb_at(b, 1, 4), 257); }
static void overlap(struct gb *b) { gb_set64(b, gb_at(b, 1, 4), 224); gb_set64(b, gb_at(b, 1, 2) + 8, 8); }
static void overlap_whole(struct gb *b) { gb_set64(b, gb_at(b, 1, 4), 0); }
static void duplicate_tensor(struct gb *b)
{
    gb_begin(b);
    gb_tensor(b, "same", PD_F32, 32, 0);
    gb_tensor(b, "same", PD_F32, 32, 0);
    gb_end(b);
}
static void with_alignment(struct gb *b, uint32_t type, const void *v, size_t n)
{
    gb_begin(b);
    gb_key(b, "general.alignment", type);
    gb_raw(b, v, n);
    gb_tensor(b, "t", PD_F32, 32, 0);
    gb_end(b);
}
static void alignment_zero(struct gb *b) { with_alignment(b, PD_GT_U32, "\0\0\0", 4); }
static void alignment_12(struct gb *b) { with_alignment(b, PD_GT_U32, "\x0c\0\0", 4); }
static void alignment_huge(struct gb *b) { with_alignment(b, PD_GT_U32, "\0\0\0\x80", 4); }
static void alignment_string(struct gb *b) { with_alignment(b, PD_GT_STR, "\1\0\0\0\0\0\0\0" "8", 9); }
static void alignment_past_end(struct gb *b) { with_alignment(b, PD_GT_U32, "\0\x80\0", 4); }

static const struct { const char *name; void (*spoil)(struct gb *b); int code; const char *says; } bad[] = {
    { "magic", magic, PD_ECORRUPT, "'GGML', not 'GGUF'" },
    { "version 1", version1, PD_EINCOMPAT, "version 1 at byte 4" },
    { "version 4", version4, PD_EINCOMPAT, "version 4 at byte 4" },
    { "big endian", big_endian, PD_EINCOMPAT, "big-endian" },
    { "n_tensors 2^64-1", many_tensors, PD_ECORRUPT, "n_tensors at byte 8 is 18446744073709551615" },
    { "n_tensors negative", negative_tensors, PD_ECORRUPT, "n_tensors at byte 8" },
    { "one tensor too many", a_tensor_too_many, PD_ECORRUPT, "at byte" },
    { "n_kv 2^60", many_keys, PD_ECORRUPT, "n_kv at byte 16" },
    { "one key too many", a_key_too_many, PD_ECORRUPT, "at byte" },
    { "key of 2^62", long_key, PD_ECORRUPT, "a key at byte 24" },
    { "key to the end", key_to_the_end, PD_ECORRUPT, "a key at byte 32 needs 60000 bytes" },
    { "string of 2^64-1", long_string, PD_ECORRUPT, "'general.architecture'" },
    { "string past the end", string_past_end, PD_ECORRUPT, "'general.architecture' at byte 64 needs 5000000 bytes" },
    { "value type 13", bad_value_type, PD_ECORRUPT, "the type of 'general.architecture' at byte 52 is 13" },
    { "array of arrays", nested_array, PD_ECORRUPT, "the element type of 'strs'" },
    { "element type 99", bad_element_type, PD_ECORRUPT, "is 99" },
    { "array of 2^62", long_array, PD_ECORRUPT, "the count of 'ints'" },
    { "array whose size wraps", array_size_wraps, PD_ECORRUPT, "the count of 'ints'" },
    { "array past the end", array_past_end, PD_ECORRUPT, "'floats'" },
    { "string of 2^64-9 in an array", long_array_string, PD_ECORRUPT, "an element of 'strs'" },
    { "duplicate key", duplicate_key, PD_ECORRUPT, "'i64'" },
    { "name of 64", long_name, PD_ECORRUPT, "a tensor's name" },
    { "name of 2^31", huge_name, PD_ECORRUPT, "a tensor's name" },
    { "no dimension", no_dims, PD_ECORRUPT, "'matrix'" },
    { "nine dimensions", nine_dims, PD_ECORRUPT, "has 9 dimensions" },
    { "dimension 0", zero_dim, PD_ECORRUPT, "are empty" },
    { "second dimension 0", zero_dim1, PD_ECORRUPT, "are empty" },
    { "negative dimension", negative_dim, PD_ECORRUPT, "'matrix'" },
    { "product wraps", dims_wrap, PD_ECORRUPT, "more than 2^63 elements" },
    { "product wraps to zero", dims_wrap_to_zero, PD_ECORRUPT, "more than 2^63 elements" },
    { "bytes wrap", bytes_wrap, PD_ECORRUPT, "overflow the size" },
    { "quantised bytes wrap", quant_bytes_wrap, PD_ECORRUPT, "'quant'" },
    { "data past the file", dims_past_file, PD_ECORRUPT, "'quant'" },
    { "dimension right in 32 bits", dims_32_bit, PD_ECORRUPT, "'quant'" },
    { "row of half a block", broken_block, PD_ECORRUPT, "block of 32" },
    { "type 99", unknown_type, PD_EINCOMPAT, "type 99 (unknown)" },
    { "type Q2_K", unsupported_type, PD_EINCOMPAT, "type 10 (Q2_K)" },
    { "a removed type", removed_type, PD_EINCOMPAT, "type 4" },
    { "offset past the end", offset_past_end, PD_ECORRUPT, "offset 1099511627776" },
    { "offset that wraps", offset_wraps, PD_ECORRUPT, "'quant'" },
    { "offset not aligned", offset_odd, PD_ECORRUPT, "no multiple of the alignment" },
    { "overlap", overlap, PD_ECORRUPT, "'matrix' and 'quant' overlap" },
    { "one over the other", overlap_whole, PD_ECORRUPT, "overlap" },
    { "duplicate tensor", duplicate_tensor, PD_ECORRUPT, "'same' at byte" },
    { "alignment 0", alignment_zero, PD_ECORRUPT, "'general.alignment'" },
    { "alignment 12", alignment_12, PD_ECORRUPT, "multiple of 8" },
    { "alignment 2^31", alignment_huge, PD_ECORRUPT, "'general.alignment'" },
    { "alignment a string", alignment_string, PD_ECORRUPT, "of type string" },
    { "alignment past the end", alignment_past_end, PD_ECORRUPT, "would begin at byte 32768" },
};

static void bad_files_are_refused_by_field(void **state)
{
    struct gb b = { 0 };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct pd_gguf *g = NULL;
        struct pd_err e;
        build(&b);
        bad[i].spoil(&b);
        int rc = open_bytes(b.p, b.n, &g, &e);
        if (rc != bad[i].code || e.code != rc || g || !strstr(e.msg, bad[i].says))
            fail_msg("%s: got %d, '%s'; expected %d with '%s'", bad[i].name, rc, e.msg, bad[i].code, bad[i].says);
    }
    free(b.p);
}

static void a_file_cut_anywhere_is_refused(void **state)
{
    struct gb b = { 0 };
    build(&b);
    for (size_t n = 0; n < b.n; n++) {
        struct pd_gguf *g;
        struct pd_err e;
        assert_int_equal(open_bytes(b.p, n, &g, &e), PD_ECORRUPT);
        assert_true(e.msg[0]);
    }
    free(b.p);
}

/* No value of any byte may crash; what is accepted stays inside the file. */
static void any_byte_may_be_anything(void **state)
{
    static const uint8_t values[] = { 0, 1, 9, 0x7f, 0x80, 0xff };
    struct gb b = { 0 };
    build(&b);
    size_t header = b.n - b.data_bytes;
    for (size_t at = 0; at < header; at++)
        for (size_t v = 0; v < sizeof values; v++) {
            struct pd_gguf *g;
            struct pd_err e;
            uint8_t old = b.p[at];
            b.p[at] = values[v];
            int rc = open_bytes(b.p, b.n, &g, &e);
            if (rc)
                assert_true(rc < 0 && e.code == rc && e.msg[0]);
            else
                for (size_t i = 0; i < g->n_tensors; i++)
                    assert_true(g->tensor[i].at >= g->data_off && g->tensor[i].at <= g->size && g->tensor[i].bytes <= g->size - g->tensor[i].at);
            if (!rc)
                pd_gguf_close(g);
            b.p[at] = old;
        }
    free(b.p);
}

static void gaps_and_any_order_are_accepted(void **state)
{
    struct gb b = { 0 };
    struct pd_gguf *g;
    struct pd_err e;
    gb_begin(&b);
    gb_key(&b, "general.alignment", PD_GT_U32);
    gb_u32(&b, 8);
    gb_tensor(&b, "a", PD_F32, 8, 0);
    gb_tensor(&b, "b", PD_F32, 8, 0);
    gb_end(&b);
    b.data_bytes = 104;
    uint8_t room[104] = { 0 };
    gb_raw(&b, room, 40);
    gb_set64(&b, b.at_ti[0] + 9 + 4 + 8 + 4, 72);
    gb_set64(&b, b.at_ti[1] + 9 + 4 + 8 + 4, 8);
    assert_int_equal(open_bytes(b.p, b.n, &g, &e), 0);
    assert_int_equal(pd_gguf_tensor(g, "a")->at - pd_gguf_tensor(g, "b")->at, 64);
    pd_gguf_close(g);
    gb_begin(&b);       /* keys alone */
    gb_kv_u32(&b, "k", 1);
    gb_set64(&b, 16, 1);
    assert_int_equal(open_bytes(b.p, b.n, &g, &e), 0);
    pd_gguf_close(g);
    free(b.p);
}

static void what_is_no_model_file_is_named(void **state)
{
    struct pd_gguf *g;
    struct pd_err e = { 0 };
    assert_int_equal(pd_gguf_open("/nonexistent/model.gguf", &g, &e), PD_EFAIL);
    assert_non_null(strstr(e.msg, "/nonexistent/model.gguf: No such file"));
    assert_int_equal(pd_gguf_open("/", &g, &e), PD_EFAIL);
    assert_non_null(strstr(e.msg, "not a regular file"));
    assert_int_equal(mkfifo("build/test_gguf.fifo", 0600), 0);
    assert_int_equal(pd_gguf_open("build/test_gguf.fifo", &g, &e), PD_EFAIL);       /* and does not wait for a writer */
    unlink("build/test_gguf.fifo");
    assert_non_null(strstr(e.msg, "not a regular file"));
}

/* Text from the file cannot steer a terminal through a message. */
static void names_are_shown_plainly(void **state)
{
    struct gb b = { 0 };
    struct pd_gguf *g;
    struct pd_err e;
    gb_begin(&b);
    gb_tensor(&b, "\x1b[31m\n", PD_F32, 32, 0);
    gb_tensor(&b, "\x1b[31m\n", PD_F32, 32, 0);
    gb_end(&b);
    assert_int_equal(open_bytes(b.p, b.n, &g, &e), PD_ECORRUPT);
    assert_non_null(strstr(e.msg, "'?[31m?'"));
    free(b.p);
}

static long max_rss_kib(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_maxrss;
}

/* Large files (sparse) whose counts are possible by their size. */
static void large_liars_are_refused_in_little_memory(void **state)
{
    struct pd_gguf *g;
    struct pd_err e;
    long before = max_rss_kib();
    for (int which = 0; which < 6; which++) {
        struct gb b = { 0 };
        char path[64];
        int fd;
        gb_begin(&b);
        gb_set64(&b, 16, 1);
        if (which == 0)
            gb_set64(&b, 8, 30000000);
        if (which == 1)
            gb_set64(&b, 16, 70000000);
        if (which == 2) {
            gb_str(&b, "k"); gb_u32(&b, PD_GT_STR); gb_u64(&b, 900000000);
        }
        if (which == 3) {
            gb_str(&b, "k"); gb_u32(&b, PD_GT_ARR); gb_u32(&b, PD_GT_STR); gb_u64(&b, 100000000);
        }
        if (which == 4) {
            gb_str(&b, "k"); gb_u32(&b, PD_GT_ARR); gb_u32(&b, PD_GT_STR); gb_u64(&b, PD_GGUF_MAX_ARRAY); gb_u64(&b, 60000000);
        }
        if (which == 5) {       /* as many tensors as are allowed, all of them named "" */
            gb_set64(&b, 8, PD_GGUF_MAX_ENTRIES);
            gb_set64(&b, 16, 0);
        }
        gb_file(b.p, b.n, &fd, path);
        assert_int_equal(ftruncate(fd, 1 << 30), 0);
        assert_int_equal(pd_gguf_open(path, &g, &e), PD_ECORRUPT);
        close(fd);
        free(b.p);
    }
    assert_true(max_rss_kib() - before < 64 << 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(large_liars_are_refused_in_little_memory), cmocka_unit_test(a_good_file_gives_what_it_holds), cmocka_unit_test(bad_files_are_refused_by_field),
        cmocka_unit_test(a_file_cut_anywhere_is_refused), cmocka_unit_test(any_byte_may_be_anything), cmocka_unit_test(gaps_and_any_order_are_accepted),
        cmocka_unit_test(what_is_no_model_file_is_named), cmocka_unit_test(names_are_shown_plainly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
