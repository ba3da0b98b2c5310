/* route/ledger: what is counted, what a restart finds, files that were torn or are somebody else's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/route/ledger.h"

static char dir[] = "/tmp/pd-ledger-XXXXXX", path[64];
static struct pd_ledger_read was;

static struct pd_ledger *open_it(const char *at)
{
    struct pd_ledger *l = NULL;
    struct pd_err e = { 0 };
    int rc = pd_ledger_open(at, &l, &was, &e);
    if (rc)
        print_error("%s\n", e.msg);
    assert_int_equal(rc, 0);
    return l;
}

static struct pd_ledger_item item(int run, const char *p, const char *d)
{
    struct pd_ledger_item i = { .attempt = 1, .p = p, .d = d, .tokens = 100, .blocks = 7, .t_us = 1000 + run };
    snprintf(i.run, sizeof i.run, "01JZZZZZZZZZZZZZZZZZZ%05u", (unsigned)run % 100000);
    memset(i.token, run, sizeof i.token);
    return i;
}

static struct pd_ledger_item *give(struct pd_ledger *l, int run, const char *p, const char *d)
{
    struct pd_ledger_item i = item(run, p, d);
    struct pd_err e;
    assert_int_equal(pd_ledger_give(l, &i, &e), 0);
    struct pd_ledger_item *k = pd_ledger_find(l, i.run, 1);
    assert_non_null(k);
    return k;
}

static void counts(void **state)
{
    struct pd_ledger *l = open_it(NULL);
    struct pd_ledger_item *a = give(l, 1, "unix:p0", "unix:d0"), *b = give(l, 2, "unix:p0", "unix:d1"), *c = give(l, 3, "unix:p1", "unix:d0");
    struct pd_ledger_sum s = pd_ledger_of(l, "unix:p0");
    assert_true(s.runs == 2 && s.tokens == 200 && s.blocks == 14 && s.bytes == 0);
    pd_ledger_publish(l, a, 5000);
    s = pd_ledger_of_link(l, "unix:p0", "unix:d0");
    assert_true(s.runs == 1 && s.bytes == 5000 && a->published);
    assert_int_equal(pd_ledger_of_link(l, "unix:p1", "unix:d1").runs, 0);
    assert_int_equal(pd_ledger_of(l, "unix:d0").runs, 0);
    assert_true(pd_ledger_first(l) == a && !a->left);
    assert_int_equal(give(l, 1, "unix:p1", "unix:d0")->bytes, 0);       /* given again: the last word holds */
    assert_true(pd_ledger_of(l, "unix:p0").runs == 1 && pd_ledger_of(l, "unix:p1").runs == 2 && pd_ledger_all(l).runs == 3 && pd_ledger_all(l).bytes == 0);
    pd_ledger_take(l, b);       /* it is known, and counts no more */
    pd_ledger_take(l, b);
    assert_true(pd_ledger_of(l, "unix:p0").runs == 0 && pd_ledger_all(l).runs == 2 && pd_ledger_find(l, b->run, 1) == b);
    pd_ledger_end(l, b);
    pd_ledger_end(l, c);
    pd_ledger_end(l, pd_ledger_find(l, item(1, "", "").run, 1));
    s = pd_ledger_all(l);
    assert_true(!s.runs && !s.tokens && !s.blocks && !s.bytes && !pd_ledger_first(l));
    assert_null(pd_ledger_find(l, item(1, "", "").run, 1));
    pd_ledger_free(l);
}

static void a_restart_knows(void **state)
{
    struct pd_err e;
    struct stat st;
    struct pd_ledger *l = open_it(path);
    give(l, 1, "unix:p0", "unix:d0");
    pd_ledger_publish(l, give(l, 2, "unix:p0", "unix:d1"), 4096);
    pd_ledger_take(l, give(l, 4, "unix:d1", "unix:d1"));
    pd_ledger_end(l, give(l, 3, "unix:p0", "unix:d1"));
    assert_int_equal(pd_ledger_hold(l, "unix:p0", "unix:d0", "integrity: block 3", 77, &e), 0);
    assert_int_equal(pd_ledger_hold(l, "unix:p0", "unix:d1", "integrity: block 4", 78, &e), 0);
    assert_int_equal(pd_ledger_release(l, "unix:p0", "unix:d1", "cable changed", 79), 1);
    assert_int_equal(pd_ledger_release(l, "unix:p0", "unix:d1", "cable changed", 79), 0);
    assert_null(pd_ledger_trouble(l));
    assert_true(!stat(path, &st) && (st.st_mode & 0777) == 0600);
    pd_ledger_free(l);          /* as if killed: nothing is written at the end */
    for (int life = 0; life < 3; life++) {
        l = open_it(path);
        assert_true(was.left == 3 && was.holds == 1 && was.torn == 0 && pd_ledger_all(l).runs == 2 && pd_ledger_all(l).blocks == 14);
        const struct pd_ledger_item *a = pd_ledger_first(l), *b = (void *)a->node.next;
        assert_true(a->left && !a->published && a->t_us == 1001 && a->tokens == 100 && a->blocks == 7 && a->token[5] == 1 && !strcmp(a->p, "unix:p0"));
        assert_true(b->left && b->published && b->bytes == 4096 && !strcmp(b->d, "unix:d1"));
        const struct pd_ledger_hold *h = pd_ledger_held(l, "unix:p0", "unix:d0");
        assert_true(h && h == pd_ledger_first_hold(l) && !strcmp(h->cause, "integrity: block 3") && h->t_us == 77);
        assert_null(pd_ledger_held(l, "unix:p0", "unix:d1"));
        assert_null(pd_ledger_held(l, "unix:d0", "unix:p0"));
        pd_ledger_free(l);
    }
    l = open_it(path);
    while (pd_ledger_first(l))
        pd_ledger_end(l, pd_ledger_first(l));
    assert_int_equal(pd_ledger_release(l, NULL, NULL, "all", 80), 1);
    pd_ledger_free(l);
    l = open_it(path);
    assert_true(!was.left && !was.holds && !was.torn);
    assert_true(!stat(path, &st) && !st.st_size);
    pd_ledger_free(l);
}

static size_t read_all(uint8_t *out, size_t cap)
{
    int fd = open(path, O_RDONLY);
    ssize_t n = read(fd, out, cap);
    close(fd);
    return (size_t)n;
}

static void write_all(const uint8_t *p, size_t n)
{
    int fd = open(path, O_WRONLY | O_TRUNC | O_CREAT, 0600);
    assert_true(write(fd, p, n) == (ssize_t)n);
    close(fd);
}

static void torn_anywhere(void **state)
{
    static uint8_t whole[4096], part[4200];
    struct pd_ledger *l = open_it(path);
    give(l, 1, "unix:p0", "unix:d0");
    give(l, 2, "unix:p0", "unix:d0");
    pd_ledger_free(l);
    size_t n = read_all(whole, sizeof whole);
    assert_true(n > 200 && n % 2 == 0);
    for (size_t cut = n / 2; cut < n; cut++) {  /* in the second one */
        write_all(whole, cut);
        l = open_it(path);
        assert_true(was.left == 1 && was.torn == cut - n / 2);
        give(l, 5, "unix:p0", "unix:d0");       /* what comes after is not lost for it */
        pd_ledger_free(l);
        l = open_it(path);
        assert_true(was.left == 2 && was.torn == 0);
        pd_ledger_free(l);
    }
    for (size_t cut = 1; cut < n / 2; cut++) {  /* the first one, with the second behind it */
        memcpy(part, whole, cut);
        memcpy(part + cut, whole + n / 2, n / 2);
        write_all(part, cut + n / 2);
        l = open_it(path);
        assert_true(was.left == 1 && was.torn == cut && pd_ledger_first(l)->t_us == 1002);
        pd_ledger_free(l);
    }
    unlink(path);
}

static void grows_no_further(void **state)
{
    struct stat st;
    struct pd_ledger *l = open_it(path);
    give(l, 99999, "unix:p0", "unix:d0");
    for (int i = 0; i < 20000; i++)
        pd_ledger_end(l, give(l, i, "unix:p0", "unix:d0"));
    assert_true(!stat(path, &st) && st.st_size < PD_LEDGER_SLACK + 4096);
    pd_ledger_free(l);
    l = open_it(path);
    assert_true(was.left == 1 && pd_ledger_of(l, "unix:p0").runs == 1);
    pd_ledger_free(l);
    unlink(path);
}

/* A client that comes back brings its run's name: what a former life left of it is replaced, and is not left any more. */
static void given_anew(void **state)
{
    struct pd_ledger *l = open_it(path);
    for (int i = 1; i <= 3; i++)
        give(l, i, "unix:p0", "unix:d0");
    assert_int_equal(pd_ledger_left(l), 0);
    pd_ledger_free(l);
    l = open_it(path);
    assert_true(was.left == 3 && pd_ledger_left(l) == 3);
    assert_false(give(l, 2, "unix:p1", "unix:d0")->left);
    assert_int_equal(pd_ledger_left(l), 2);
    pd_ledger_end(l, pd_ledger_find(l, item(2, "", "").run, 1));
    assert_int_equal(pd_ledger_left(l), 2);
    pd_ledger_end(l, pd_ledger_first(l));
    pd_ledger_end(l, pd_ledger_first(l));
    assert_int_equal(pd_ledger_left(l), 0);
    pd_ledger_free(l);
    unlink(path);
}

/* The last word before a quiet time could not be written: it is, as soon as that is possible, without another one. */
static void no_room_for_a_while(void **state)
{
    struct rlimit had, none;
    struct pd_ledger *l = open_it(path);
    give(l, 1, "unix:p0", "unix:d0");
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &had), 0);
    none = (struct rlimit){ 0, had.rlim_max };
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &none), 0);
    give(l, 2, "unix:p0", "unix:d0");
    int64_t now = pd_mono_us();
    pd_ledger_beat(l, now + 1500000);   /* still none */
    bool in_trouble = pd_ledger_trouble(l) != NULL;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &had), 0);
    assert_true(in_trouble);
    pd_ledger_beat(l, now + 1600000);   /* once a second */
    assert_non_null(pd_ledger_trouble(l));
    pd_ledger_beat(l, now + 3000000);
    assert_null(pd_ledger_trouble(l));
    pd_ledger_free(l);
    l = open_it(path);
    assert_int_equal(was.left, 2);
    pd_ledger_free(l);
    unlink(path);
}

static void refused(const char *at, const char *why)
{
    struct pd_ledger *l = NULL;
    struct pd_err e = { 0 };
    int rc = pd_ledger_open(at, &l, &was, &e);
    if (rc >= 0 || !strstr(e.msg, why))
        print_error("%d %s\n", rc, e.msg);
    assert_true(rc < 0 && strstr(e.msg, why));
}

static void whose_file(void **state)
{
    char other[96];
    struct pd_ledger *l = open_it(path);
    refused(path, "another router has this ledger");
    for (int i = 0; i < 20000; i++)     /* written anew meanwhile */
        pd_ledger_end(l, give(l, i, "unix:p0", "unix:d0"));
    refused(path, "another router has this ledger");
    pd_ledger_free(l);
    chmod(path, 0640);
    refused(path, "chmod 600");
    chmod(path, 0600);
    write_all((const uint8_t *)"my notes\n", 9);
    refused(path, "this is no ledger");
    uint8_t notes[16];
    assert_true(read_all(notes, sizeof notes) == 9 && !memcmp(notes, "my notes\n", 9));
    refused(dir, "cannot open this ledger");
    snprintf(other, sizeof other, "%s/none/ledger", dir);
    refused(other, "cannot open this ledger");
    unlink(path);
}

static void hostile(void **state)
{
    struct pd_ledger *l = open_it(NULL);
    struct pd_err e;
    uint64_t torn;
    static const char give_without_token[] = "\x86\xa2pd\xa6ledger\xa1v\x01\xa2""do\xa4give\xa3run\xba""01JZZZZZZZZZZZZZZZZZZ00001\xa7""attempt\x01\xa1p\xa1x";
    assert_int_equal(pd_ledger_read(l, (const uint8_t *)give_without_token, sizeof give_without_token - 1, &torn, &e), 0);
    assert_true(torn == sizeof give_without_token - 1 && !pd_ledger_first(l));
    pd_ledger_free(l);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(counts), cmocka_unit_test(a_restart_knows), cmocka_unit_test(torn_anywhere), cmocka_unit_test(grows_no_further),
                                        cmocka_unit_test(given_anew), cmocka_unit_test(no_room_for_a_while),
                                        cmocka_unit_test(whose_file), cmocka_unit_test(hostile) };
    if (!mkdtemp(dir))
        return 1;
    snprintf(path, sizeof path, "%s/ledger", dir);
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    rmdir(dir);
    return rc;
}
