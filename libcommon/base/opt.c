#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "opt.h"

/* Digits, then a unit of the table; a NULL unit name ends it. */
struct unit { const char *name; int64_t factor; };

static bool scaled(const char *s, const struct unit *u, int64_t *out)
{
    int64_t v = 0;
    const char *p = s;
    for (; *p >= '0' && *p <= '9'; p++)
        if (__builtin_mul_overflow(v, 10, &v) || __builtin_add_overflow(v, *p - '0', &v))
            return false;
    if (p == s)
        return false;
    for (; u->name; u++)
        if (!strcmp(p, u->name))
            return !__builtin_mul_overflow(v, u->factor, out);
    return false;
}

int pd_parse_size(const char *s, int64_t *bytes, struct pd_err *e)
{
    static const struct unit unit[] = {
        { "", 1 }, { "B", 1 }, { "KiB", 1 << 10 }, { "MiB", 1 << 20 }, { "GiB", 1 << 30 }, { "TiB", 1ll << 40 },
        { "KB", 1000 }, { "MB", 1000000 }, { "GB", 1000000000 }, { "TB", 1000000000000ll }, { NULL, 0 } };
    return scaled(s, unit, bytes) ? 0 : pd_fail(e, PD_EUSAGE, "bad size '%s' (example: 64MiB)", s);
}

int pd_parse_duration(const char *s, int64_t *us, struct pd_err *e)
{
    static const struct unit unit[] = { { "us", 1 }, { "ms", 1000 }, { "s", 1000000 }, { "m", 60000000 }, { "h", 3600000000ll }, { NULL, 0 } };
    return scaled(s, unit, us) ? 0 : pd_fail(e, PD_EUSAGE, "bad duration '%s' (example: 250ms)", s);
}

int pd_parse_int(const char *s, int64_t lo, int64_t hi, int64_t *v, struct pd_err *e)
{
    char *end;
    errno = 0;
    long long n = strtoll(s, &end, 10);
    bool digits = (*s >= '0' && *s <= '9') || (*s == '-' && s[1] >= '0' && s[1] <= '9');    /* strtoll would skip spaces and take '+' */
    if (!digits || *end || errno)
        return pd_fail(e, PD_EUSAGE, "bad value '%s' (a whole number from %lld to %lld)", s, (long long)lo, (long long)hi);
    if (n < lo || n > hi)
        return pd_fail(e, PD_EUSAGE, "bad value '%s' (must be from %lld to %lld)", s, (long long)lo, (long long)hi);
    *v = n;
    return 0;
}
