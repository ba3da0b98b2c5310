/* The verbs of pd-trace that read logs: each reads the files to their end and writes text or JSON Lines to `out`. */
#ifndef PD_TRACE_REPORT_H
#define PD_TRACE_REPORT_H
#include <stdio.h>
#include "log.h"

struct pd_report_opts {
    const char *const *paths;           /* NULL-terminated; none: standard input */
    struct pd_log_opts log;
    FILE *out;
    bool json, quiet, strict;           /* strict: what was torn or lost makes the status 9 */
    const char *run;                    /* show: a run id or the beginning of one; follow: NULL or likewise */
    int64_t bound_us;                   /* check: 0: PD_CHECK_BOUND_US */
    int last;                           /* follow: events shown of what is there already */
};
/* 0, or the error's code. *status: 4 (check: a rule is broken), 9. */
int pd_report_ls(const struct pd_report_opts *o, int *status, struct pd_err *e);        /* a line a run, its id first, in order of their end */
int pd_report_show(const struct pd_report_opts *o, int *status, struct pd_err *e);      /* one run's stages as bars */
int pd_report_check(const struct pd_report_opts *o, int *status, struct pd_err *e);
int pd_report_stats(const struct pd_report_opts *o, int *status, struct pd_err *e);
int pd_report_follow(const struct pd_report_opts *o, int *status, struct pd_err *e);    /* until a signal, which is how it ends: 0 */

/* For the verbs' own files. Tells of what was torn; the status under strict. */
int pd_report_end(const struct pd_report_opts *o, const struct pd_log *l, int *status, struct pd_err *e);
void pd_report_json(FILE *out, const char *key, struct pd_str value);   /* "key":"value" */
void pd_report_plain(FILE *out, struct pd_str s);        /* a record's text must not steer a terminal: control characters become ? */
const char *pd_report_time(int64_t at_us, char out[32]);        /* 2026-11-30T17:58:35.123456Z */
#endif
