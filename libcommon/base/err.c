#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "err.h"

int pd_fail(struct pd_err *e, int code, const char *fmt, ...)
{
    if (e) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(e->msg, sizeof e->msg, fmt, ap);
        va_end(ap);
        e->code = code;
        e->sys = 0;
    }
    return code;
}

static int code_of_errno(int sys)
{
    switch (sys) {
    case ENOMEM: case ENOSPC: case EDQUOT: case EFBIG: case EMFILE: case ENFILE: return PD_ENOMEM;
    case EPIPE: case ECONNRESET: return PD_ECANCEL;
    case ETIMEDOUT: return PD_ETIME;
    default: return PD_EFAIL;
    }
}

int pd_fail_sys(struct pd_err *e, const char *fmt, ...)
{
    int sys = errno, code = code_of_errno(sys);
    if (e) {
        va_list ap;
        va_start(ap, fmt);
        int n = vsnprintf(e->msg, sizeof e->msg, fmt, ap);
        va_end(ap);
        if (n >= 0 && (size_t)n < sizeof e->msg)
            snprintf(e->msg + n, sizeof e->msg - (size_t)n, ": %s", strerror(sys));
        e->code = code;
        e->sys = sys;
    }
    return code;
}

int pd_err_prefix(struct pd_err *e, const char *fmt, ...)
{
    if (!e)
        return PD_EFAIL;
    char old[sizeof e->msg];
    memcpy(old, e->msg, sizeof old);
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(e->msg, sizeof e->msg, fmt, ap);
    va_end(ap);
    if (n >= 0 && (size_t)n < sizeof e->msg)
        snprintf(e->msg + n, sizeof e->msg - (size_t)n, ": %.*s", (int)(sizeof e->msg - (size_t)n - 3), old);
    return e->code;
}

int pd_exit_status(int code)
{
    return code >= 0 ? 0 : code < -8 ? 1 : -code;
}

const char *pd_code_name(int code)
{
    static const char *const name[] = { "ok", "failed", "usage", "incompatible", "integrity", "timeout", "cancelled", "no_worker", "exhausted" };
    return name[pd_exit_status(code)];
}

int pd_exit_worse(int so_far, int code)
{
    int s = pd_exit_status(code);
    if (s == 2)
        s = 1;      /* a bad request inside a stream is a failed request, not a usage error */
    if (s == 0)
        return so_far;
    if (so_far == 0 || so_far == 1)
        return s;
    return s == 1 || s > so_far ? so_far : s;
}
