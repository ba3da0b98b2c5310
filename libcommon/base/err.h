/* pd_err: what went wrong, for a person and for an exit status.
 *
 * Every function that can fail returns int, 0 or a negative PD_E code, and fills a
 * struct pd_err passed last (NULL is allowed: the caller does not care for the text).
 * The message names the thing, the value and what to do. A code is the negative of
 * the exit status that it leads to (pd-errors: 1 failed, 2 usage, 3 incompatible,
 * 4 integrity, 5 time, 6 cancelled or reader gone, 7 no worker, 8 out of something).
 */
#ifndef PD_BASE_ERR_H
#define PD_BASE_ERR_H

enum pd_code {
    PD_OK = 0,
    PD_EFAIL = -1,      /* the request failed and none of the others fits */
    PD_EUSAGE = -2,     /* bad option or bad argument */
    PD_EINCOMPAT = -3,  /* fingerprint or feature differs; the message names the field */
    PD_ECORRUPT = -4,   /* checksum, truncated, malformed */
    PD_ETIME = -5,      /* timed out, lease expired */
    PD_ECANCEL = -6,    /* cancelled, interrupted, reader gone (EPIPE) */
    PD_ENOWORKER = -7,
    PD_ENOMEM = -8      /* out of memory, blocks, descriptors or disk */
};

struct pd_err {
    int code;           /* enum pd_code */
    int sys;            /* errno at the time, or 0 */
    char msg[512];      /* one line, no newline */
};

/* Fill *e (may be NULL) and return code, so that `return pd_fail(e, ...)` reads well. */
int pd_fail(struct pd_err *e, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* The same with ": strerror(errno)" appended; the code is chosen from errno:
 * ENOMEM ENOSPC EDQUOT EMFILE ENFILE -> PD_ENOMEM, EPIPE -> PD_ECANCEL, ETIMEDOUT -> PD_ETIME, else PD_EFAIL. */
int pd_fail_sys(struct pd_err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Put "prefix: " before the message already in *e; returns e->code. */
int pd_err_prefix(struct pd_err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* The exit status of a code (0..8), and the failure class's name ("integrity", ...). */
int pd_exit_status(int code);
const char *pd_code_name(int code);

/* With several failures the smallest status of 3..8 wins, then 1, then 0. Start with 0. */
int pd_exit_worse(int so_far, int code);

#endif
