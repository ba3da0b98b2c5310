/* Messages to a person on stderr: one line each, "pd-decode: run 01J...: text".
 * The program name is set once by main (pd_log_init). Thread safe: one write(2) a line. */
#ifndef PD_BASE_LOG_H
#define PD_BASE_LOG_H

#include <stdbool.h>
#include "err.h"

void pd_log_init(const char *program, int verbose, bool quiet);
int pd_log_verbose(void);
void pd_error(const char *fmt, ...) __attribute__((format(printf, 1, 2)));     /* always shown */
void pd_warn(const char *fmt, ...) __attribute__((format(printf, 1, 2)));      /* not with -q */
void pd_info(const char *fmt, ...) __attribute__((format(printf, 1, 2)));      /* with -v */

/* Progress line on a terminal, for work over two seconds: "\r<text>", nothing when stderr is not a terminal or with -q.
 * pd_progress_end erases the line. Rate limited inside; cheap to call at every step. */
void pd_progress(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void pd_progress_end(void);

#endif
