/* Any bytes as a log: every byte is either a record's or counted as lost, in order; and whatever was read can be checked and listed. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "../../libcommon/base/log.h"
#include "../../libcommon/trace/check.h"
#include "../../libcommon/trace/report.h"

static int found(void *ctx, const struct pd_finding *f, struct pd_err *e)
{
    if (!f->rule || !f->text[0])
        abort();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    static FILE *null;
    char path[64];
    int fd = memfd_create("log", MFD_CLOEXEC), status = 0;
    struct pd_log *l;
    struct pd_check *c;
    struct pd_log_rec r;
    struct pd_err e;
    uint64_t at = 0, in_records = 0;
    if (!null) {
        null = fopen("/dev/null", "w");
        pd_log_init("fuzz", 0, true);
    }
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (write(fd, p, n) != (ssize_t)n)
        abort();
    const char *const paths[] = { path, NULL };
    if (pd_log_open(paths, &(struct pd_log_opts){ .max_record = 1 << 16 }, &l, &e) || pd_check_new(&(struct pd_check_opts){ .found = found }, &c, &e))
        abort();
    int rc;
    bool json = false;
    while ((rc = pd_log_next(l, &r, &e)) == 1) {
        if (r.offset < at || r.offset > n)
            abort();
        json |= p[r.offset] == '{' || p[r.offset] == ' ' || p[r.offset] == '\t' || p[r.offset] == '\r';
        if (!json && memcmp(p + r.offset, r.p, r.n))
            abort();
        at = r.offset + (json ? 1 : r.n);
        in_records += r.n;
        if (pd_check_record(c, &r, &e))
            abort();
    }
    struct pd_log_stats st = pd_log_stats(l);
    uint64_t blank = 0;
    while (blank < n && (p[blank] == ' ' || p[blank] == '\n' || p[blank] == '\t' || p[blank] == '\r'))
        blank++;
    if (rc == 0 && !json && !(blank < n && p[blank] == '{') && in_records + st.torn_bytes + blank != n)
        abort();
    if (pd_check_end(c, st.torn, NULL, &e))
        abort();
    pd_check_free(c);
    pd_log_free(l);
    struct pd_report_opts o = { .paths = paths, .out = null, .json = n & 1, .log.max_record = 1 << 16, .run = "0", .quiet = true };
    if (n % 8 == 0)
        pd_report_ls(&o, &status, &e);
    if (n % 32 == 1)
        pd_report_stats(&o, &status, &e);
    if (n % 8 == 2)
        pd_report_show(&o, &status, &e);
    close(fd);
    return 0;
}
