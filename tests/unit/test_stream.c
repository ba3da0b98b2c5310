/* Streams: what is written comes out in whatever pieces it arrives, and every way of ending badly is told. */
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/wire/json.h"
#include "../../libcommon/wire/frame.h"
#include "../../libcommon/wire/stream.h"
#include "samples.h"

/* Feeds bytes into a pipe in pieces of 1..most bytes from a thread. */
struct feed { int fd; const uint8_t *p; size_t n, most; unsigned seed; };

static void *feeder(void *arg)
{
    struct feed *f = arg;
    for (size_t at = 0; at < f->n;) {
        size_t k = 1 + (size_t)rand_r(&f->seed) % f->most;
        k = k < f->n - at ? k : f->n - at;
        ssize_t w = write(f->fd, f->p + at, k);
        if (w < 0)
            break;
        at += (size_t)w;
    }
    close(f->fd);
    return NULL;
}

static struct pd_rstream *reader_of(const void *p, size_t n, size_t most, struct feed *f, pthread_t *t, const struct pd_rstream_opts *o)
{
    int fd[2];
    struct pd_rstream *s;
    struct pd_rstream_opts opts = o ? *o : (struct pd_rstream_opts){ 0 };
    opts.own_fd = true;
    assert_int_equal(pipe(fd), 0);
    *f = (struct feed){ fd[1], p, n, most, 11 };
    assert_int_equal(pthread_create(t, NULL, feeder, f), 0);
    assert_int_equal(pd_rstream_new(fd[0], &opts, &s, NULL), 0);
    return s;
}

static void all_samples(struct pd_buf *b, bool json, size_t end[N_SAMPLES])
{
    for (int i = 0; i < N_SAMPLES; i++) {
        struct pd_buf one = { 0 };
        struct pd_err e;
        assert_int_equal(sample_encode(i, &one, &e), 0);
        if (json) {
            assert_int_equal(pd_msgpack_to_json(one.p, one.n, b, &e), 0);
            pd_buf_add(b, i % 2 ? "\r\n\n" : "\n", i % 2 ? 3 : 1, &e);
        } else
            pd_buf_add(b, one.p, one.n, &e);
        end[i] = b->n;
        pd_buf_free(&one);
    }
}

static void records_come_out_in_any_pieces(void **state)
{
    static const size_t most[] = { 1, 3, 100, 5000, 100000 };
    for (int json = 0; json < 2; json++)
        for (size_t m = 0; m < 5; m++) {
            struct pd_buf b = { 0 };
            size_t end[N_SAMPLES];
            struct feed f;
            pthread_t t;
            struct pd_rec rec;
            struct pd_err e = { 0 };
            bool bad;
            all_samples(&b, json, end);
            struct pd_rstream *s = reader_of(b.p, b.n, most[m], &f, &t, NULL);
            for (int i = 0; i < N_SAMPLES; i++) {
                struct pd_buf want = { 0 };
                if (pd_rstream_next(s, -1, &rec, &bad, &e) != 1)
                    fail_msg("%s: %s", sample_name[i], e.msg);
                sample_encode(i, &want, &e);
                assert_int_equal(rec.n, want.n);
                assert_memory_equal(rec.p, want.p, rec.n);
                assert_int_equal(rec.kind, pd_kind_of(want.p, want.n));
                if (!json)
                    assert_int_equal(rec.offset, i ? end[i - 1] : 0);
                pd_buf_free(&want);
            }
            assert_int_equal(pd_rstream_next(s, -1, &rec, &bad, &e), 0);
            assert_int_equal(pd_rstream_next(s, -1, &rec, &bad, &e), 0);
            assert_int_equal(pd_rstream_is_json(s), json);
            pthread_join(t, NULL);
            pd_rstream_free(s);
            pd_buf_free(&b);
        }
}

/* All samples, ended after n bytes: returns the records that came, and the final code and message. */
static int read_cut(const uint8_t *p, size_t n, int *rc, struct pd_err *e)
{
    struct feed f;
    pthread_t t;
    struct pd_rec rec;
    bool bad;
    int got = 0;
    struct pd_rstream *s = reader_of(p, n, 1 << 20, &f, &t, NULL);
    while ((*rc = pd_rstream_next(s, -1, &rec, &bad, e)) == 1)
        got++;
    if (*rc < 0) {      /* final: it stays so */
        struct pd_err again;
        assert_int_equal(pd_rstream_next(s, -1, &rec, &bad, &again), *rc);
        assert_string_equal(again.msg, e->msg);
    }
    pthread_join(t, NULL);
    pd_rstream_free(s);
    return got;
}

static void a_cut_names_offset_and_run(void **state)
{
    for (int json = 0; json < 2; json++) {
        struct pd_buf b = { 0 };
        size_t end[N_SAMPLES];
        all_samples(&b, json, end);
        for (size_t n = 0; n <= b.n; n += n < 3000 ? 1 : 7) {
            int whole = 0, rc;
            struct pd_err e = { 0 };
            while (whole < N_SAMPLES && end[whole] <= n)
                whole++;
            size_t from = whole ? end[whole - 1] : 0;
            int got = read_cut(b.p, n, &rc, &e);
            char at[60];
            snprintf(at, sizeof at, "begins at byte %zu", from);
            if (rc == 0) {      /* at a border, or in JSON just before the newline */
                assert_true(got == whole || (json && got == whole + 1));
                assert_true(n == from || json);
            } else if (rc != PD_ECORRUPT || got != whole || !strstr(e.msg, at) ||
                       (memmem(b.p + from, n - from, RUN_A, strlen(RUN_A)) && !strstr(e.msg, "(run " RUN_A ")")))
                fail_msg("cut at %zu (record %d, byte %zu): %d records, %d '%s'", n, whole, n - from, got, rc, e.msg);
        }
        pd_buf_free(&b);
    }
}

static void reading_never_blocks_when_asked(void **state)
{
    int fd[2];
    struct pd_rstream *s;
    struct pd_rec rec;
    struct pd_err e;
    bool bad;
    struct pd_buf b = { 0 };
    assert_int_equal(pipe(fd), 0);
    struct pd_rstream_opts o = { .own_fd = true };
    assert_int_equal(pd_rstream_new(fd[0], &o, &s, &e), 0);
    sample_encode(5, &b, &e);
    assert_int_equal(pd_rstream_next(s, 0, &rec, &bad, &e), 2);
    assert_int_equal(write(fd[1], b.p, 20), 20);
    assert_int_equal(pd_rstream_next(s, 0, &rec, &bad, &e), 2);
    int64_t t0 = pd_mono_us();
    assert_int_equal(pd_rstream_next(s, 50, &rec, &bad, &e), 2);
    int64_t took = pd_mono_us() - t0;
    assert_true(took >= 45000 && took < 2000000);
    assert_int_equal(write(fd[1], b.p + 20, b.n - 20), (ssize_t)b.n - 20);
    assert_int_equal(pd_rstream_next(s, 0, &rec, &bad, &e), 1);
    assert_int_equal(pd_rstream_next(s, 0, &rec, &bad, &e), 2);
    close(fd[1]);
    assert_int_equal(pd_rstream_next(s, 0, &rec, &bad, &e), 0);
    pd_rstream_free(s);
    pd_buf_free(&b);
}

/* Feed text, give back the codes as letters: r record, b bad line, E final error, . end; and the last message. */
static void outcomes(const char *text, size_t n, const struct pd_rstream_opts *o, char *codes, struct pd_err *e, char prompts[8][64])
{
    struct feed f;
    pthread_t t;
    struct pd_rec rec;
    bool bad;
    int got = 0;
    struct pd_rstream *s = reader_of(text, n, 7, &f, &t, o);
    for (;;) {
        int rc = pd_rstream_next(s, -1, &rec, &bad, e);
        *codes++ = rc == 1 ? 'r' : rc == 0 ? '.' : bad ? 'b' : 'E';
        if (rc == 1 && prompts) {
            struct pd_arena a = { 0 };
            struct pd_request r;
            if (pd_request_decode(rec.p, rec.n, &a, &r, e))
                fail_msg("%s", e->msg);
            snprintf(prompts[got++], 64, "%.*s", (int)r.prompt.n, r.prompt.p);
            pd_arena_free(&a);
        }
        if (rc == 0 || (rc < 0 && !bad))
            break;
    }
    *codes = 0;
    pthread_join(t, NULL);
    pd_rstream_free(s);
}

static void bad_lines_are_skipped(void **state)
{
    char codes[32], prompts[8][64];
    struct pd_err e;
    static const char text[] = " \n{\"prompt\":\"a\"}\nnot json\n\n{\"prompt\":\"b\xff\"}\n[1]\n{\"prompt\":\"c\"}";
    outcomes(text, sizeof text - 1, NULL, codes, &e, prompts);
    assert_string_equal(codes, "rbbbr.");
    assert_string_equal(prompts[0], "a");
    assert_string_equal(prompts[1], "c");
    struct pd_rstream_opts small = { .max_record = 40, .name = "in.jsonl" };
    static const char longish[] = "{\"prompt\":\"a\"}\n{\"prompt\":\"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb\"}\n{\"prompt\":\"c\"}\n"
        "{\"prompt\":\"ddddddddddddddddddddddddddddddddddddddddddd\"}\n";
    outcomes(longish, sizeof longish - 1, &small, codes, &e, prompts);
    assert_string_equal(codes, "rbrb.");
    assert_string_equal(prompts[1], "c");
    outcomes("{\"prompt\":\"a\"}\n{\"run\":\"" RUN_A "\",\"prom", 50, NULL, codes, &e, NULL);
    assert_string_equal(codes, "rE");
    assert_non_null(strstr(e.msg, "begins at byte 15"));
    assert_non_null(strstr(e.msg, RUN_A));
}

static void prompts_by_the_line(void **state)
{
    char codes[32], prompts[8][64];
    struct pd_err e;
    struct pd_rstream_opts lines = { .lines = true, .name = "-" };
    static const char text[] = "\n  Hello \r\n\ncaf\xc3\xa9\nbad \xff\n{not json}\nlast";
    outcomes(text, sizeof text - 1, &lines, codes, &e, prompts);
    assert_string_equal(codes, "rrbrr.");
    assert_string_equal(e.msg, "stdin: line at byte 18: invalid UTF-8 at byte 4");
    assert_string_equal(prompts[0], "  Hello ");
    assert_string_equal(prompts[1], "caf\xc3\xa9");
    assert_string_equal(prompts[2], "{not json}");
    assert_string_equal(prompts[3], "last");
    outcomes("\xde\x87\xde\xa8\n", 5, &lines, codes, &e, prompts);      /* Thaana letters, whose first byte a map could have too */
    assert_string_equal(codes, "r.");
    assert_string_equal(prompts[0], "\xde\x87\xde\xa8");
    outcomes("\x81\xa6prompt\xa1x", 10, &lines, codes, &e, prompts);
    assert_string_equal(codes, "r.");
    outcomes("\n\n", 2, &lines, codes, &e, NULL);
    assert_string_equal(codes, ".");
    outcomes("Hello\n", 6, NULL, codes, &e, NULL);
    assert_string_equal(codes, "E");
    assert_non_null(strstr(e.msg, "--lines"));
    outcomes("", 0, NULL, codes, &e, NULL);
    assert_string_equal(codes, ".");
}

static void msgpack_errors_are_final(void **state)
{
    char codes[32];
    struct pd_err e;
    outcomes("\x81\xa1" "a\x01\x07", 5, NULL, codes, &e, NULL);
    assert_string_equal(codes, "rE");
    assert_non_null(strstr(e.msg, "record at byte 4"));
    outcomes("\x82\xa1" "a\x01\xa1" "a\x01\x80", 8, NULL, codes, &e, NULL);
    assert_string_equal(codes, "E");
    assert_non_null(strstr(e.msg, "twice"));
    outcomes("\x81\xa1" "a\xc6\xff\xff\xff\xff" "abc", 11, NULL, codes, &e, NULL);
    assert_string_equal(codes, "E");
    assert_non_null(strstr(e.msg, "--max-record"));
}

static void large_records_are_read_once(void **state)
{
    size_t n = PD_MAX_RECORD_DEFAULT;
    uint8_t *p = calloc(2, n);
    memcpy(p, "\x81\xa1" "d\xc6", 4);
    uint32_t len = (uint32_t)n - 8;
    for (int i = 0; i < 4; i++)
        p[4 + i] = (uint8_t)(len >> (24 - 8 * i));
    memcpy(p + n, p, n);
    struct feed f;
    pthread_t t;
    struct pd_rec rec;
    struct pd_err e;
    bool bad;
    struct pd_rstream *s = reader_of(p, 2 * n, 3000, &f, &t, NULL);
    assert_int_equal(pd_rstream_next(s, -1, &rec, &bad, &e), 1);
    assert_int_equal(rec.n, n);
    assert_int_equal(pd_rstream_next(s, -1, &rec, &bad, &e), 1);
    assert_int_equal(pd_rstream_next(s, -1, &rec, &bad, &e), 0);
    pthread_join(t, NULL);
    pd_rstream_free(s);
    free(p);
    /* 16 MiB of one-byte elements that dribble in: the scan goes on where it stood, or this would take minutes */
    uint8_t *q = malloc(n);
    memset(q, 0xc0, n);
    memcpy(q, "\x81\xa1" "d\xdd", 4);
    for (int i = 0; i < 4; i++)
        q[4 + i] = (uint8_t)(len >> (24 - 8 * i));
    int64_t t0 = pd_mono_us();
    s = reader_of(q, n, 2000, &f, &t, NULL);
    assert_int_equal(pd_rstream_next(s, -1, &rec, &bad, &e), 1);
    assert_int_equal(rec.n, n);
    assert_true(pd_mono_us() - t0 < 20000000);
    pthread_join(t, NULL);
    pd_rstream_free(s);
    free(q);
}

static void the_writer_writes_all_and_tells(void **state)
{
    char path[] = "/tmp/pd-test-XXXXXX";
    int fd = mkstemp(path);
    struct pd_wstream *w;
    struct pd_err e = { 0 };
    unlink(path);
    for (int json = 0; json < 2; json++) {
        assert_int_equal(ftruncate(fd, 0), 0);
        lseek(fd, 0, SEEK_SET);
        assert_int_equal(pd_wstream_new(fd, json ? PD_FMT_JSON : PD_FMT_MSGPACK, false, "out", &w, &e), 0);
        struct pd_buf b = { 0 }, want = { 0 }, text = { 0 };
        sample_encode(4, &b, &e);
        assert_int_equal(pd_wstream_put(w, b.p, b.n, &e), 0);
        struct iovec v[200];
        for (int i = 0; i < 200; i++)       /* the same record again, in 200 pieces, some empty */
            v[i] = (struct iovec){ b.p + (size_t)i * b.n / 200, (size_t)(i + 1) * b.n / 200 - (size_t)i * b.n / 200 };
        assert_int_equal(pd_wstream_putv(w, v, 200, &e), 0);
        pd_buf_add(&want, b.p, b.n, &e);
        pd_buf_add(&want, b.p, b.n, &e);
        if (json) {
            for (int i = 0; i < 2; i++) {
                pd_msgpack_to_json(b.p, b.n, &text, &e);
                pd_buf_add(&text, "\n", 1, &e);
            }
            pd_buf_free(&want);
            want = text;
        }
        char *big = calloc(1, 300000);
        memset(big, 'x', 300000);
        assert_int_equal(pd_wstream_raw(w, big, 300000, &e), 0);
        pd_buf_add(&want, big, 300000, &e);
        free(big);
        assert_int_equal(pd_wstream_flush(w, &e), 0);
        assert_int_equal(pd_wstream_bytes(w), want.n);
        assert_int_equal(pd_wstream_close(w, &e), 0);
        uint8_t *got = malloc(want.n + 1);
        assert_int_equal(pread(fd, got, want.n + 1, 0), (ssize_t)want.n);
        assert_memory_equal(got, want.p, want.n);
        free(got);
        pd_buf_free(&b);
        pd_buf_free(&want);
    }
    close(fd);
    int full = open("/dev/full", O_WRONLY);
    assert_int_equal(pd_wstream_new(full, PD_FMT_MSGPACK, true, "full", &w, &e), 0);
    assert_int_equal(pd_wstream_put(w, "\x80", 1, &e), 0);
    assert_int_equal(pd_wstream_close(w, &e), PD_ENOMEM);
    assert_non_null(strstr(e.msg, "full: cannot write"));
    int p[2];
    assert_int_equal(pipe(p), 0);
    close(p[0]);
    assert_int_equal(pd_wstream_new(p[1], PD_FMT_MSGPACK, true, "-", &w, &e), 0);
    assert_int_equal(pd_wstream_put(w, "\x80", 1, &e), 0);
    assert_int_equal(pd_wstream_flush(w, &e), PD_ECANCEL);
    assert_non_null(strstr(e.msg, "stdout: the reader went away"));
    assert_int_equal(pd_wstream_put(w, "\x80", 1, &e), 0);
    assert_int_equal(pd_wstream_close(w, &e), PD_ECANCEL);
}

/* A pipe that takes little at a time and does not block: everything arrives, in order. */
static void a_slow_reader_slows_the_writer(void **state)
{
    int p[2];
    struct pd_wstream *w;
    struct pd_err e;
    enum { N = 1000000 };
    uint8_t *src = malloc(N), *dst = malloc(N);
    for (int i = 0; i < N; i++)
        src[i] = (uint8_t)(i * 31 >> 3);
    assert_int_equal(pipe2(p, O_NONBLOCK), 0);
    if (!fork()) {
        close(p[0]);
        struct iovec v[3] = { { src, 10 }, { src + 10, N - 20 }, { src + N - 10, 10 } };
        int rc = pd_wstream_new(p[1], PD_FMT_MSGPACK, true, "slow", &w, &e) || pd_wstream_putv(w, v, 3, &e) || pd_wstream_close(w, &e);
        _exit(rc);
    }
    close(p[1]);
    fcntl(p[0], F_SETFL, 0);
    size_t at = 0;
    for (ssize_t k; (k = read(p[0], dst + at, 777)) > 0; at += (size_t)k) {}
    assert_int_equal(at, N);
    assert_memory_equal(src, dst, N);
    close(p[0]);
    free(src);
    free(dst);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(records_come_out_in_any_pieces), cmocka_unit_test(a_cut_names_offset_and_run), cmocka_unit_test(reading_never_blocks_when_asked),
        cmocka_unit_test(bad_lines_are_skipped), cmocka_unit_test(prompts_by_the_line), cmocka_unit_test(msgpack_errors_are_final),
        cmocka_unit_test(large_records_are_read_once), cmocka_unit_test(the_writer_writes_all_and_tells), cmocka_unit_test(a_slow_reader_slows_the_writer) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
