#include <stdio.h>
#include "../base/hash.h"
#include "breaker.h"

const char *const pd_breaker_names[] = { "closed", "open", "half-open" };

static struct pd_breaker_opts with_defaults(const struct pd_breaker_opts *o)
{
    struct pd_breaker_opts d = o ? *o : (struct pd_breaker_opts){ 0 };
    d.failures = d.failures ? d.failures : 3;
    d.successes = d.successes ? d.successes : 2;
    d.open_us = d.open_us ? d.open_us : 1000000;
    d.most_us = d.most_us ? d.most_us : 60000000;
    d.calm_us = d.calm_us ? d.calm_us : 30000000;
    d.jitter = d.jitter > 0 ? d.jitter : 0.2;
    return d;
}

/* From -1 to 1. */
static double chance(uint64_t *seed)
{
    ++*seed;
    return (double)(pd_xxh3(seed, sizeof *seed, 0) >> 11) / 4503599627370496.0 - 1;
}

enum pd_breaker_state pd_breaker_at(const struct pd_breaker *b, int64_t now_us)
{
    return b->state == PD_BREAKER_OPEN && now_us >= b->until_us ? PD_BREAKER_HALF : b->state;
}

bool pd_breaker_may(const struct pd_breaker *b, int64_t now_us)
{
    enum pd_breaker_state s = pd_breaker_at(b, now_us);
    return s == PD_BREAKER_CLOSED || (s == PD_BREAKER_HALF && !b->probing);
}

uint32_t pd_breaker_begin(struct pd_breaker *b, int64_t now_us)
{
    if (pd_breaker_at(b, now_us) == PD_BREAKER_HALF) {
        if (b->state == PD_BREAKER_OPEN) {
            b->state = PD_BREAKER_HALF;
            b->turn++;
        }
        b->probing = true;
    }
    return b->turn;
}

static void open_it(struct pd_breaker *b, const struct pd_breaker_opts *o, const char *cause, int64_t now)
{
    bool flaps = b->state == PD_BREAKER_HALF || (b->closed_us && now - b->closed_us < o->calm_us);
    double us = (double)o->open_us;
    b->opened = flaps ? b->opened + 1 : 1;
    for (uint32_t i = 1; i < b->opened && us < (double)o->most_us; i++)
        us *= 2;
    us = us < (double)o->most_us ? us : (double)o->most_us;
    b->state = PD_BREAKER_OPEN;
    b->turn++;
    b->until_us = now + (int64_t)(us * (1 + o->jitter * chance(&b->seed)));
    b->failures = b->good = 0;
    b->probing = false;
    snprintf(b->cause, sizeof b->cause, "%s", cause ? cause : "");
}

bool pd_breaker_end(struct pd_breaker *b, const struct pd_breaker_opts *opts, uint32_t ticket, enum pd_went went, const char *cause, int64_t now_us)
{
    struct pd_breaker_opts o = with_defaults(opts);
    if (ticket != b->turn)
        return false;
    if (b->state == PD_BREAKER_HALF) {
        b->probing = false;
        if (went == PD_WENT_WRONG) {
            open_it(b, &o, cause, now_us);
            return true;
        }
        b->good += went == PD_WENT_WELL;
        if (b->good < o.successes)
            return false;
        b->state = PD_BREAKER_CLOSED;
        b->turn++;
        b->closed_us = now_us;
        b->failures = b->good = 0;
        return true;
    }
    if (went == PD_WENT_WELL)
        b->failures -= b->failures > 0;
    if (went != PD_WENT_WRONG)
        return false;
    b->failures = now_us - b->last_us > o.calm_us ? 1 : b->failures + 1;
    b->last_us = now_us;
    if (b->failures < o.failures)
        return false;
    open_it(b, &o, cause, now_us);
    return true;
}

void pd_breaker_trip(struct pd_breaker *b, const struct pd_breaker_opts *opts, const char *cause, int64_t now_us)
{
    struct pd_breaker_opts o = with_defaults(opts);
    if (b->state != PD_BREAKER_OPEN)
        open_it(b, &o, cause, now_us);
}

void pd_breaker_renew(struct pd_breaker *b, int64_t now_us)
{
    if (b->state == PD_BREAKER_OPEN && b->until_us > now_us)
        b->until_us = now_us;
}

const char *pd_breaker_text(const struct pd_breaker *b, int64_t now_us, char *out, size_t cap)
{
    enum pd_breaker_state s = pd_breaker_at(b, now_us);
    if (s == PD_BREAKER_OPEN)
        snprintf(out, cap, "breaker open %.1fs", (double)(b->until_us - now_us) / 1e6);
    else
        snprintf(out, cap, "%s", s == PD_BREAKER_HALF ? "breaker half-open" : "");
    return out;
}
