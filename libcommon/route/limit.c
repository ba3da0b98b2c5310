#include <stdlib.h>
#include <string.h>
#include "../base/opt.h"
#include "limit.h"

static const int64_t RETRY_LEAST = 100000, RETRY_MOST = 60000000;

/* Digits with at most one point among them, then `end`. */
static bool number(const char *s, const char *end, double *v)
{
    size_t n = strspn(s, "0123456789."), dots = 0;
    for (size_t i = 0; i < n; i++)
        dots += s[i] == '.';
    if (!n || n > 15 || dots > 1 || (n == 1 && dots) || strcmp(s + n, end))
        return false;
    *v = strtod(s, NULL);
    return true;
}

int pd_limit_parse_max(const char *text, struct pd_limit_opts *o, struct pd_err *e)
{
    double percent;
    int64_t tokens;
    if (number(text, "%", &percent) && percent > 0 && percent <= 100) {
        o->share = percent / 100;
        o->tokens = 0;
        return 0;
    }
    if (pd_parse_int(text, 1, INT64_MAX / 2, &tokens, NULL) < 0)
        return pd_fail(e, PD_EUSAGE, "'%.40s' is no limit (a share of the tokens that a worker has room for, or a number of tokens; examples: 10%%, 4096)", text);
    o->tokens = (uint64_t)tokens;
    return 0;
}

int pd_limit_parse_rate(const char *text, struct pd_limit_opts *o, struct pd_err *e)
{
    return number(text, "", &o->rate) && o->rate >= 0.001 && o->rate <= 1e6 ? 0 : pd_fail(e, PD_EUSAGE, "'%.40s' is no rate (fallbacks a second, 0.001 or more; example: 2.5)", text);
}

uint64_t pd_limit_most(const struct pd_limit *l, uint64_t budget_tokens)
{
    return l->o.tokens ? l->o.tokens : (uint64_t)((double)budget_tokens * (l->o.share > 0 ? l->o.share : 0.1));
}

bool pd_limit_fits(const struct pd_limit *l, struct pd_limit_load w, uint64_t budget_tokens, uint64_t tokens)
{
    return !w.runs || w.tokens + tokens <= pd_limit_most(l, budget_tokens);
}

static double burst(const struct pd_limit *l) { return l->o.rate > 1 ? l->o.rate : 1; }

static void fill(struct pd_limit *l, int64_t now)
{
    if (!l->begun)
        l->bucket = burst(l);
    else if (now > l->filled_us)
        l->bucket += (double)(now - l->filled_us) / 1e6 * l->o.rate;
    l->bucket = l->bucket < burst(l) ? l->bucket : burst(l);
    l->filled_us = l->begun && now < l->filled_us ? l->filled_us : now;
    l->begun = true;
}

void pd_limit_begin(struct pd_limit *l, struct pd_limit_load *w, uint64_t tokens, int64_t now_us)
{
    if (l->o.rate > 0) {
        fill(l, now_us);
        l->bucket -= 1;         /* below 0 for one that was not asked about: it is paid back */
    }
    w->runs++;
    w->tokens += tokens;
    l->all.runs++;
    l->all.tokens += tokens;
}

void pd_limit_end(struct pd_limit *l, struct pd_limit_load *w, uint64_t tokens, int64_t took_us)
{
    w->runs--;
    w->tokens -= tokens;
    l->all.runs--;
    l->all.tokens -= tokens;
    if (took_us > 0 && tokens) {
        double us = (double)took_us / (double)tokens;
        l->us_per_token = l->us_per_token > 0 ? 0.8 * l->us_per_token + 0.2 * us : us;
    }
}

/* Until there is room for it, as far as can be told. */
static int64_t until_room(const struct pd_limit *l, const struct pd_limit_case *c)
{
    double us = l->us_per_token * (double)(l->all.tokens + c->tokens_ahead) / (c->workers ? c->workers : 1);
    return us < 1e12 ? (int64_t)us : (int64_t)1e12;
}

enum pd_limited pd_limit_judge(struct pd_limit *l, const struct pd_limit_case *c, int64_t *retry_after_us, const char **why)
{
    int64_t wait_us = l->o.wait_us ? l->o.wait_us : 10000000, by_rate = 0, by_room = c->fits ? 0 : until_room(l, c);
    if (l->o.rate > 0) {
        fill(l, c->now_us);
        double lacks = 1 + c->runs_ahead - l->bucket;
        by_rate = lacks > 0 ? (int64_t)(lacks / l->o.rate * 1e6) + 1 : 0;
    }
    int64_t wait = by_rate > by_room ? by_rate : by_room, retry = wait > RETRY_LEAST ? wait : RETRY_LEAST;
    *retry_after_us = retry < RETRY_MOST ? retry : RETRY_MOST;
    *why = by_rate > by_room ? "the rate of fallbacks is reached" : "the workers compute as much for others as they may";
    if (c->had_one) {
        *why = "the run has fallen back before";
        return PD_LIMIT_SHED;
    }
    if (c->deadline_us && c->now_us + wait + c->need_us >= c->deadline_us) {
        *why = wait ? *why : "it would end past its deadline";
        return PD_LIMIT_SHED;
    }
    if (c->fits && !by_rate)
        return PD_LIMIT_GO;
    return c->waited_us + wait >= wait_us ? PD_LIMIT_SHED : PD_LIMIT_WAIT;
}
