/* Drills of a build with fault points (make V=fault, V=asan), for a test that has included cmocka. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif
#include "../../libcommon/base/err.h"

#ifdef PD_FAULT
/* Run `what` in a child with the N-th pass through `point` failing, N from 1 until nothing fails any more: every earlier one has `want` as its result. */
static int drill(const char *point, int (*what)(struct pd_err *), int want)
{
    for (int n = 1; n < 20000; n++) {
        int status;
        pid_t pid = fork();
        if (!pid) {
            char spec[60];
            struct pd_err e = { 0 };
            snprintf(spec, sizeof spec, "%s:fail:%d", point, n);
            setenv("PD_FAULT", spec, 1);
            int null = open("/dev/null", O_WRONLY);
            dup2(null, 2);
            int rc = what(&e);
#ifdef __SANITIZE_ADDRESS__
            if (__lsan_do_recoverable_leak_check())
                _exit(80);
#endif
            _exit(rc < 0 && !e.msg[0] ? 70 : rc < 0 ? -rc : rc > 0 ? 90 + rc : 0);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (!WIFEXITED(status))
            fail_msg("%s:fail:%d: killed by signal %d", point, n, WTERMSIG(status));
        if (WEXITSTATUS(status) == 0)
            return n - 1;
        if (WEXITSTATUS(status) != want)
            fail_msg("%s:fail:%d: status %d, not %d", point, n, WEXITSTATUS(status), want);
    }
    fail_msg("%s: no end", point);
    return 0;
}
#endif
