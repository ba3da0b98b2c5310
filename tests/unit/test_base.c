/* base: sizes, buffers, arenas, ids, hashes, digests' cache, units, UTF-8. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/base/hash.h"
#include "../../libcommon/base/id.h"
#include "../../libcommon/base/log.h"
#include "../../libcommon/base/mem.h"
#include "../../libcommon/base/opt.h"
#include "../../libcommon/base/seen.h"
#include "../../libcommon/base/utf8.h"

static void sizes_that_overflow_are_errors(void **state)
{
    struct pd_err e = { 0 };
    size_t out = 5;
    assert_false(pd_mul_size(SIZE_MAX / 2, 3, &out));
    assert_false(pd_add_size(SIZE_MAX, 1, &out));
    assert_int_equal(out, 5);
    assert_null(pd_calloc(SIZE_MAX / 2, 3, "a lie", &e));
    assert_int_equal(e.code, PD_ENOMEM);
    assert_non_null(strstr(e.msg, "a lie"));
    void *keep = pd_calloc(4, 4, "x", &e);
    assert_null(pd_realloc(keep, SIZE_MAX / 2, 3, "x", &e));
    pd_free(keep);
    struct pd_arena a = { 0 };
    assert_null(pd_arena_alloc(&a, SIZE_MAX / 2, 3, &e));
    assert_null(pd_arena_alloc(&a, SIZE_MAX - 3, 1, &e));
    assert_null(pd_arena_dup(&a, "", SIZE_MAX, &e));
    pd_arena_free(&a);
    struct pd_buf b = { 0 };
    assert_int_equal(pd_buf_add(&b, "abc", 3, &e), 0);
    assert_int_equal(pd_buf_reserve(&b, SIZE_MAX - 1, &e), PD_ENOMEM);
    assert_int_equal(b.n, 3);
    pd_buf_free(&b);
    assert_null(pd_strndup("x", SIZE_MAX, &e));
}

static void a_run_is_seen_once(void **state)
{
    struct pd_seen s = { 0 };
    struct pd_err e;
    enum { N = 1000 };
    static char run[N][PD_RUN_LEN + 1];
    for (int i = 0; i < N; i++) {
        assert_int_equal(pd_run_new(run[i], &e), 0);
        assert_false(pd_seen_has(&s, run[i], PD_RUN_LEN));
        assert_int_equal(pd_seen_add(&s, run[i], PD_RUN_LEN, &e), 0);
    }
    for (int i = 0; i < N; i++) {
        assert_true(pd_seen_has(&s, run[i], PD_RUN_LEN));
        assert_int_equal(pd_seen_add(&s, run[i], PD_RUN_LEN, &e), 1);
    }
    assert_int_equal(s.young.n, N);
    for (int i = 0; i < 2 * PD_SEEN_LAST; i++)          /* it forgets, but not the last ones */
        assert_int_equal(pd_seen_add(&s, &i, sizeof i, &e), 0);
    for (int i = PD_SEEN_LAST; i < 2 * PD_SEEN_LAST; i++)
        assert_true(pd_seen_has(&s, &i, sizeof i));
    assert_false(pd_seen_has(&s, run[0], PD_RUN_LEN));
    pd_seen_free(&s);
    assert_false(pd_seen_has(&s, run[0], PD_RUN_LEN));
}

static void empty_allocations_are_real(void **state)
{
    struct pd_err e;
    void *a = pd_calloc(0, 8, "x", &e), *b = pd_alloc_aligned(0, "x", &e), *c = pd_realloc(NULL, 0, 0, "x", &e);
    assert_non_null(a);
    assert_non_null(b);
    assert_non_null(c);
    assert_int_equal((uintptr_t)b % 64, 0);
    pd_free(a);
    pd_free(b);
    pd_free(c);
}

static void buffer_grows_and_prints(void **state)
{
    struct pd_buf b = { 0 };
    for (int i = 0; i < 1000; i++)
        assert_int_equal(pd_buf_printf(&b, NULL, "%03d", i), 0);
    assert_int_equal(b.n, 3000);
    assert_memory_equal(b.p + 2997, "999", 3);
    assert_memory_equal(b.p + 300, "100", 3);
    pd_buf_free(&b);
    assert_null(b.p);
}

static void arena_pieces_are_aligned_zeroed_and_apart(void **state)
{
    struct pd_arena a = { 0 };
    uint8_t *piece[400];
    size_t size[400];
    srandom(7);
    for (int i = 0; i < 400; i++) {
        size[i] = (size_t)random() % (i % 50 == 0 ? 100000 : 300);
        piece[i] = pd_arena_alloc(&a, size[i], 1, NULL);
        assert_non_null(piece[i]);
        assert_int_equal((uintptr_t)piece[i] % 16, 0);
        for (size_t k = 0; k < size[i]; k++)
            assert_int_equal(piece[i][k], 0);
        memset(piece[i], i, size[i]);
    }
    for (int i = 0; i < 400; i++)
        for (size_t k = 0; k < size[i]; k++)
            assert_int_equal(piece[i][k], (uint8_t)i);
    char *s = pd_arena_dup(&a, "a\0b", 3, NULL);
    assert_memory_equal(s, "a\0b\0", 4);
    assert_true(a.used >= 1000);
    pd_arena_free(&a);
    assert_null(a.head);
}

static void run_ids_sort_by_making(void **state)
{
    char last[PD_RUN_LEN + 1] = "", run[PD_RUN_LEN + 1];
    for (int i = 0; i < 5000; i++) {
        assert_int_equal(pd_run_new(run, NULL), 0);
        assert_true(pd_run_valid(run, strlen(run)));
        assert_true(strcmp(last, run) < 0);
        strcpy(last, run);
    }
    /* the first ten characters are the milliseconds */
    static const char digits[] = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";
    int64_t ms = 0;
    for (int i = 0; i < 10; i++)
        ms = ms * 32 + (strchr(digits, run[i]) - digits);
    int64_t off = ms - pd_wall_us() / 1000;
    assert_true(off > -5000 && off < 5000);
    assert_false(pd_run_valid("01ARZ3NDEKTSV4RRFFQ69G5FA", 25));
    assert_true(pd_run_valid("01ARZ3NDEKTSV4RRFFQ69G5FAV", 26));
    assert_false(pd_run_valid("81ARZ3NDEKTSV4RRFFQ69G5FAV", 26));
    assert_false(pd_run_valid("01ARZ3NDEKTSV4RRFFQ69G5FAU", 26));
    assert_false(pd_run_valid("01arz3ndektsv4rrffq69g5fav", 26));
}

static void generations_count_within_a_life(void **state)
{
    uint8_t a[PD_GEN_LEN], b[PD_GEN_LEN], child[PD_GEN_LEN];
    int p[2], status;
    assert_int_equal(pd_gen_new(a, NULL), 0);
    assert_int_equal(pd_gen_new(b, NULL), 0);
    assert_memory_equal(a, b, 8);
    assert_int_equal(pd_get_be64(b + 8), pd_get_be64(a + 8) + 1);
    assert_int_equal(pipe(p), 0);
    pid_t pid = fork();
    if (!pid) {
        pd_gen_new(child, NULL);
        _exit(write(p[1], child, sizeof child) != sizeof child);
    }
    assert_int_equal(read(p[0], child, sizeof child), sizeof child);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_memory_not_equal(child, a, 8);       /* a child is another life */
    close(p[0]);
    close(p[1]);
    char hex[2 * PD_GEN_LEN + 1];
    pd_hex((const uint8_t *)"\x00\xff\x1a", 3, hex);
    assert_string_equal(hex, "00ff1a");
}

static void hashes_match_published_values(void **state)
{
    uint8_t sha[PD_SHA_LEN];
    char hex[2 * PD_SHA_LEN + 1];
    assert_int_equal(pd_sha256("abc", 3, sha, NULL), 0);
    pd_hex(sha, sizeof sha, hex);
    assert_string_equal(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    assert_true(pd_xxh3("", 0, 0) == 0x2d06800538d394c2ull);
    char text[5000];
    for (size_t i = 0; i < sizeof text; i++)
        text[i] = (char)(i * 31 + 7);
    for (int n = 1; n <= 4; n++) {
        struct iovec v[4] = { { text, 1000 }, { text + 1000, 3 }, { text + 1003, 0 }, { text + 1003, 3997 } };
        size_t all = n == 1 ? 1000 : n < 4 ? 1003 : 5000;
        assert_true(pd_xxh3v(v, n, 99) == pd_xxh3(text, all, 99));
    }
    uint8_t be[8];
    pd_put_be64(be, 0x0102030405060708ull);
    assert_memory_equal(be, "\1\2\3\4\5\6\7\10", 8);
    assert_true(pd_get_be64(be) == 0x0102030405060708ull);
}

static int count_digests(void)
{
    char cmd[600];
    snprintf(cmd, sizeof cmd, "ls %s/digests 2>/dev/null | wc -l", pd_cache_dir(NULL));
    FILE *f = popen(cmd, "r");
    int n = -1;
    assert_int_equal(fscanf(f, "%d", &n), 1);
    pclose(f);
    return n;
}

static void digest_is_cached_only_when_settled(void **state)
{
    char path[600];
    uint8_t one[PD_SHA_LEN], two[PD_SHA_LEN], want[PD_SHA_LEN];
    struct pd_err e = { 0 };
    snprintf(path, sizeof path, "%s/file", pd_cache_dir(NULL));
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_int_equal(write(fd, "headerabc", 9), 9);
    assert_int_equal(pd_file_digest(fd, path, 6, one, &e), 0);
    pd_sha256("abc", 3, want, NULL);
    assert_memory_equal(one, want, sizeof want);
    assert_int_equal(count_digests(), 0);       /* just written: the next write could leave the same time stamp */
    sleep(3);
    assert_int_equal(pd_file_digest(fd, path, 6, one, &e), 0);
    assert_int_equal(count_digests(), 1);
    assert_int_equal(pd_file_digest(fd, path, 6, two, &e), 0);
    assert_memory_equal(two, want, sizeof want);
    assert_int_equal(pd_file_digest(fd, path, 7, two, &e), 0);      /* another range is another key */
    assert_memory_not_equal(two, want, sizeof want);
    assert_int_equal(count_digests(), 2);
    /* the kept value is used: a changed one comes back (and a damaged one does not) */
    char cmd[1300];
    snprintf(cmd, sizeof cmd, "for f in %s/digests/*-6; do printf '%%064d\\n' 0 > $f; done", pd_cache_dir(NULL));
    assert_int_equal(system(cmd), 0);
    assert_int_equal(pd_file_digest(fd, path, 6, two, &e), 0);
    uint8_t zero[PD_SHA_LEN] = { 0 };
    assert_memory_equal(two, zero, sizeof zero);
    snprintf(cmd, sizeof cmd, "for f in %s/digests/*-6; do printf '%%063d\\n' 0 > $f; done", pd_cache_dir(NULL));
    assert_int_equal(system(cmd), 0);
    assert_int_equal(pd_file_digest(fd, path, 6, two, &e), 0);
    assert_memory_equal(two, want, sizeof want);
    /* new content is a new key */
    assert_int_equal(pwrite(fd, "X", 1, 8), 1);
    assert_int_equal(pd_file_digest(fd, path, 6, two, &e), 0);
    assert_memory_not_equal(two, want, sizeof want);
    assert_int_equal(pd_file_digest(fd, path, 10, two, &e), PD_ECORRUPT);
    close(fd);
}

static void units_are_read_and_bad_values_refused(void **state)
{
    struct pd_err e;
    int64_t v = 0;
    assert_int_equal(pd_parse_size("64KiB", &v, &e), 0);
    assert_int_equal(v, 65536);
    assert_int_equal(pd_parse_size("4096", &v, &e), 0);
    assert_int_equal(v, 4096);
    assert_int_equal(pd_parse_size("2GB", &v, &e), 0);
    assert_int_equal(v, 2000000000);
    static const char *const bad_size[] = { "", "-1", "KiB", "1.5MiB", "64kib", "64 KiB", "9999999999999999999", "9000000000GiB", "64KiBx" };
    for (size_t i = 0; i < sizeof bad_size / sizeof *bad_size; i++) {
        assert_int_equal(pd_parse_size(bad_size[i], &v, &e), PD_EUSAGE);
        assert_non_null(strstr(e.msg, "example"));
    }
    assert_int_equal(pd_parse_duration("250ms", &v, &e), 0);
    assert_int_equal(v, 250000);
    assert_int_equal(pd_parse_duration("5m", &v, &e), 0);
    assert_int_equal(v, 300000000);
    assert_int_equal(pd_parse_duration("250", &v, &e), PD_EUSAGE);
    assert_non_null(strstr(e.msg, "250ms"));
    assert_int_equal(pd_parse_int("-7", -10, 10, &v, &e), 0);
    assert_int_equal(v, -7);
    static const char *const bad_int[] = { "", " 1", "+1", "1x", "11", "-11", "99999999999999999999", "0x1" };
    for (size_t i = 0; i < sizeof bad_int / sizeof *bad_int; i++)
        assert_int_equal(pd_parse_int(bad_int[i], -10, 10, &v, &e), PD_EUSAGE);
}

static void utf8_agrees_with_rfc_3629(void **state)
{
    struct { const char *s; long bad; } t[] = {
        { "plain ascii, long enough for a word", -1 }, { "caf\xc3\xa9", -1 }, { "\xe2\x82\xac", -1 }, { "\xf0\x9f\x98\x80", -1 }, { "\xf4\x8f\xbf\xbf", -1 },
        { "abcdefgh\xff", 8 }, { "a\xc0\x80", 1 }, { "a\xc1\xbf", 1 }, { "\xe0\x9f\xbf", 0 }, { "\xed\xa0\x80", 0 }, { "\xf0\x8f\xbf\xbf", 0 }, { "\xf4\x90\x80\x80", 0 },
        { "\xf5\x80\x80\x80", 0 }, { "ok\xe2\x82", 2 }, { "\x80", 0 }, { "\xc3(", 0 } };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++)
        assert_int_equal(pd_utf8_invalid(t[i].s, strlen(t[i].s)), t[i].bad);
    assert_int_equal(pd_utf8_invalid("a\0b", 3), -1);
    assert_int_equal(pd_utf8_complete("ok\xf0\x9f\x98", 5), 2);
    assert_int_equal(pd_utf8_complete("ok\xf0\x9f\x98\x80", 6), 6);
    assert_int_equal(pd_utf8_complete("ok\xc3", 3), 2);
    assert_int_equal(pd_utf8_complete("ok\xe0\x80", 4), 4);     /* cannot become valid: complete, if wrong */
    assert_int_equal(pd_utf8_complete("\x80\x80\x80\x80", 4), 4);
    assert_int_equal(pd_utf8_complete("", 0), 0);
    for (uint32_t cp = 0; cp <= 0x10ffff; cp++) {
        if (cp >= 0xd800 && cp <= 0xdfff)
            continue;
        char c[4];
        uint32_t back;
        int n = pd_utf8_put(cp, c);
        if (pd_utf8_next(c, (size_t)n, &back) != n || back != cp || pd_utf8_invalid(c, (size_t)n) != -1)
            fail_msg("U+%04X does not come back", cp);
        for (int cut = 1; cut < n; cut++)
            if (pd_utf8_complete(c, (size_t)cut) != 0)
                fail_msg("U+%04X cut at %d counts as complete", cp, cut);
    }
}

static void messages_are_single_tame_lines(void **state)
{
    int p[2], keep = dup(2);
    assert_int_equal(pipe(p), 0);
    dup2(p[1], 2);
    pd_log_init("/usr/bin/pd-x", 0, false);
    pd_error("bad\x1b[2J name '%s'", "a\nb");
    pd_info("not shown");
    pd_progress("not on a pipe");
    pd_log_init("pd-x", 1, true);
    pd_warn("quiet");
    pd_info("quiet");
    dup2(keep, 2);
    close(keep);
    close(p[1]);
    char got[200] = "";
    ssize_t n = read(p[0], got, sizeof got - 1);
    close(p[0]);
    assert_true(n > 0);
    assert_string_equal(got, "pd-x: bad?[2J name 'a b'\n");
}

int main(void)
{
    char dir[] = "/tmp/pd-test-XXXXXX";
    if (!mkdtemp(dir))
        return 1;
    char cache[64];
    snprintf(cache, sizeof cache, "%s/a/b", dir);
    setenv("PD_CACHE", cache, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_that_overflow_are_errors), cmocka_unit_test(a_run_is_seen_once), cmocka_unit_test(empty_allocations_are_real), cmocka_unit_test(buffer_grows_and_prints),
        cmocka_unit_test(arena_pieces_are_aligned_zeroed_and_apart), cmocka_unit_test(run_ids_sort_by_making), cmocka_unit_test(generations_count_within_a_life),
        cmocka_unit_test(hashes_match_published_values), cmocka_unit_test(digest_is_cached_only_when_settled), cmocka_unit_test(units_are_read_and_bad_values_refused),
        cmocka_unit_test(utf8_agrees_with_rfc_3629), cmocka_unit_test(messages_are_single_tame_lines) };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    char cmd[64];
    snprintf(cmd, sizeof cmd, "rm -rf %s", dir);
    return system(cmd) || failed;
}
