/* How much may be computed where it is decoded because its KV did not come. Without a limit the loss of the prefill workers becomes the loss of the decode
 * workers: each takes in prompts at once, and the streams that run there stand still.
 *
 * A decode worker computes at most `share` of the tokens that it has room for, or `tokens`, at a time (one fallback is always let through, however long it is), and
 * all of them together begin at most `rate` a second (a token bucket that holds a second's worth). What is too much waits, as long as it may hope to be done by
 * its deadline and within `wait_us`; else it is shed at once, with the time after which it is worth asking again. Pure: the time is told.
 */
#ifndef PD_ROUTE_LIMIT_H
#define PD_ROUTE_LIMIT_H
#include <stdbool.h>
#include <stdint.h>
#include "../base/err.h"

struct pd_limit_opts {
    double share;               /* 0: 0.1 */
    uint64_t tokens;            /* 0: by share */
    double rate;                /* a second; 0: without limit */
    int64_t wait_us;            /* 0: 10 s */
};
int pd_limit_parse_max(const char *text, struct pd_limit_opts *o, struct pd_err *e);    /* "10%", "4096" (tokens) */
int pd_limit_parse_rate(const char *text, struct pd_limit_opts *o, struct pd_err *e);   /* "2.5" a second */

struct pd_limit_load { uint64_t tokens; uint32_t runs; };       /* fallbacks that one decode worker computes now */
struct pd_limit {               /* zero-initialise, then o */
    struct pd_limit_opts o;
    double bucket; int64_t filled_us; bool begun;
    double us_per_token;        /* of those that ended; 0: none did */
    struct pd_limit_load all;
};
uint64_t pd_limit_most(const struct pd_limit *l, uint64_t budget_tokens);
bool pd_limit_fits(const struct pd_limit *l, struct pd_limit_load w, uint64_t budget_tokens, uint64_t tokens);
void pd_limit_begin(struct pd_limit *l, struct pd_limit_load *w, uint64_t tokens, int64_t now_us);
void pd_limit_end(struct pd_limit *l, struct pd_limit_load *w, uint64_t tokens, int64_t took_us /* 0: not known, it did not come to its end */);

struct pd_limit_case {
    int64_t now_us, deadline_us /* 0: none */, waited_us, need_us /* what computing it is thought to take; 0: not known */;
    uint64_t tokens_ahead; uint32_t runs_ahead;         /* of those that wait before it */
    uint32_t workers;           /* that could have it */
    bool fits;                  /* at one of them */
    bool had_one;               /* this run has fallen back before */
};
enum pd_limited { PD_LIMIT_GO, PD_LIMIT_WAIT, PD_LIMIT_SHED };
/* *retry_after_us: of PD_LIMIT_SHED; why: static text, of WAIT and SHED. */
enum pd_limited pd_limit_judge(struct pd_limit *l, const struct pd_limit_case *c, int64_t *retry_after_us, const char **why);
#endif
