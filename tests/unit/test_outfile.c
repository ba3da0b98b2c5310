/* Output files: whole or not at all, whatever was there before and however the writing ends. */
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../libcommon/base/outfile.h"
#include "files.h"

static char dir[] = "/tmp/pd-test-XXXXXX";

static const char *names(void) { return names_in(dir); }

static unsigned mode(const char *path)
{
    struct stat st;
    assert_int_equal(lstat(path, &st), 0);
    return st.st_mode;
}

static void begin(struct pd_outfile *f, const char *path, const char *text)
{
    struct pd_err e;
    if (pd_outfile_open(path, f, &e))
        fail_msg("%s", e.msg);
    assert_int_equal(write(f->fd, text, strlen(text)), strlen(text));
}

static void write_it(const char *path, const char *text)
{
    struct pd_outfile f;
    struct pd_err e;
    begin(&f, path, text);
    if (pd_outfile_commit(&f, &e))
        fail_msg("%s", e.msg);
    assert_int_equal(f.fd, -1);
    assert_null(f.path);
    pd_outfile_abort(&f);       /* nothing */
}

static void nothing_before_the_commit(void **state)
{
    struct pd_outfile f;
    begin(&f, "a", "new");
    assert_string_equal(names(), "");
    pd_outfile_abort(&f);
    assert_string_equal(names(), "");
    umask(0);
    write_it("a", "new");
    umask(022);
    assert_string_equal(names(), "a ");
    holds("a", "new");
    assert_int_equal(mode("a"), S_IFREG | 0600);
    char path[100];
    snprintf(path, sizeof path, "%s/a", dir);
    begin(&f, path, "newer");
    holds("a", "new");
    pd_outfile_abort(&f);
    holds("a", "new");
    write_it(path, "newer");
    holds("a", "newer");
    assert_string_equal(names(), "a ");
    unlink("a");
}

static void modes_stay_and_links_are_followed(void **state)
{
    struct pd_outfile f;
    struct pd_err e;
    write_it("a", "one");
    assert_int_equal(chmod("a", 0640), 0);
    assert_int_equal(mkdir("sub", 0700), 0);
    assert_int_equal(symlink("../a", "sub/link"), 0);
    write_it("sub/link", "two");
    assert_true(S_ISLNK(mode("sub/link")));
    holds("a", "two");
    assert_int_equal(mode("a"), S_IFREG | 0640);
    assert_string_equal(names(), "a sub ");
    assert_int_equal(symlink("nowhere", "dangling"), 0);
    assert_int_equal(pd_outfile_open("dangling", &f, &e), PD_EFAIL);
    assert_non_null(strstr(e.msg, "a link to a file that is not there"));
    assert_int_equal(f.fd, -1);
    unlink("dangling");
    unlink("sub/link");
    rmdir("sub");
    unlink("a");
}

static void other_targets_are_refused(void **state)
{
    static const struct { const char *path; int rc; const char *why; } t[] = {
        { "/dev/null", PD_EUSAGE, "no regular file" }, { "/tmp", PD_EUSAGE, "a directory" }, { "no/such/x", PD_EFAIL, "No such file" } };
    struct pd_outfile f;
    struct pd_err e;
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        assert_int_equal(pd_outfile_open(t[i].path, &f, &e), t[i].rc);
        if (!strstr(e.msg, t[i].why) || !strstr(e.msg, t[i].path))
            fail_msg("%s: '%s'", t[i].path, e.msg);
        assert_int_equal(f.fd, -1);
        pd_outfile_abort(&f);
    }
}

static void a_failed_commit_leaves_nothing(void **state)
{
    struct pd_outfile f;
    struct pd_err e;
    begin(&f, "d", "x");
    assert_int_equal(mkdir("d", 0700), 0);      /* takes the name meanwhile */
    assert_int_equal(pd_outfile_commit(&f, &e), PD_EFAIL);
    assert_non_null(strstr(e.msg, "rename"));
    assert_string_equal(names(), "d ");
    rmdir("d");
}

/* Names that a killed process left are passed over. */
static void old_temporaries_do_not_matter(void **state)
{
    char name[60];
    snprintf(name, sizeof name, "a.tmp.%ld.0", (long)getpid());
    close(open(name, O_CREAT | O_WRONLY, 0600));
    write_it("a", "x");
    holds("a", "x");
    assert_int_equal(unlink(name), 0);
    assert_string_equal(names(), "a ");
    unlink("a");
}

static void a_killed_writer_leaves_nothing(void **state)
{
    int status, fd = open(".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) {
        print_message("# skip: no unnamed files on this file system\n");
        skip();
    }
    close(fd);
    pid_t pid = fork();
    if (!pid) {
        struct pd_outfile f;
        begin(&f, "a", "half");
        raise(SIGKILL);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status));
    assert_string_equal(names(), "");
}

int main(void)
{
    char *tree = getcwd(NULL, 0);
    if (!mkdtemp(dir) || chdir(dir))
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_before_the_commit), cmocka_unit_test(modes_stay_and_links_are_followed), cmocka_unit_test(other_targets_are_refused),
        cmocka_unit_test(a_failed_commit_leaves_nothing), cmocka_unit_test(old_temporaries_do_not_matter), cmocka_unit_test(a_killed_writer_leaves_nothing) };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    failed |= chdir(tree) | rmdir(dir);
    free(tree);
    return failed;
}
