/* Option helpers over popt: units, and the one way in which usage errors are told ("pd-x: --chunk: bad value '0' (example: --chunk 512)", status 2). */
#ifndef PD_BASE_OPT_H
#define PD_BASE_OPT_H
#include <stdbool.h>
#include <stdint.h>
#include "err.h"
int pd_parse_size(const char *s, int64_t *bytes, struct pd_err *e);        /* 4096, 64KiB, 1MiB, 2GiB (KB, MB, GB: powers of ten) */
int pd_parse_duration(const char *s, int64_t *us, struct pd_err *e);       /* 250us, 250ms, 2s, 5m; a bare number is refused with an example */
int pd_parse_int(const char *s, int64_t lo, int64_t hi, int64_t *v, struct pd_err *e);
#endif
