/* Is a path fit to be used? One breaker a path (from a prefill worker to a decode worker by its class of path), told of each transfer how it went, and of the
 * time. Pure; the same words in the same order give the same state, its chance included (`seed`).
 *
 *     closed --`failures` more failures than successes, or a trip--> open --its time is over--> half-open --`successes` probes in a row--> closed
 *                                                                     ^------------a probe fails: twice as long, to `most_us`---|
 * Half-open lets one transfer through at a time. A breaker that opens again within `calm_us` of closing goes on with the longer time, so a path that comes and
 * goes is tried less and less. Times are spread by `jitter`, so that the breakers of many paths that failed at once do not all probe at once.
 */
#ifndef PD_ROUTE_BREAKER_H
#define PD_ROUTE_BREAKER_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum pd_breaker_state { PD_BREAKER_CLOSED, PD_BREAKER_OPEN, PD_BREAKER_HALF };
extern const char *const pd_breaker_names[];    /* "closed", "open", "half-open" */
struct pd_breaker_opts { uint32_t failures, successes; int64_t open_us, most_us, calm_us; double jitter; };     /* 0: 3, 2, 1 s, 60 s, 30 s, 0.2 */
struct pd_breaker {                     /* zero-initialise: closed; seed to taste */
    enum pd_breaker_state state;
    uint32_t failures, good, opened /* times in a row */, turn /* of open and closed */;
    bool probing;
    int64_t last_us /* failure */, until_us, closed_us;
    uint64_t seed;
    char cause[64];
};

enum pd_breaker_state pd_breaker_at(const struct pd_breaker *b, int64_t now_us);
bool pd_breaker_may(const struct pd_breaker *b, int64_t now_us);        /* may a transfer go? */
/* One goes. The ticket is given back once, with how it went; one that began before the breaker turned says nothing about what holds now. */
uint32_t pd_breaker_begin(struct pd_breaker *b, int64_t now_us);
enum pd_went { PD_WENT_WELL, PD_WENT_WRONG, PD_WENT_NOWHERE /* cancelled, or failed for another reason than the path */ };
/* true: it opened or closed by that. cause: of PD_WENT_WRONG. */
bool pd_breaker_end(struct pd_breaker *b, const struct pd_breaker_opts *o, uint32_t ticket, enum pd_went went, const char *cause, int64_t now_us);
void pd_breaker_trip(struct pd_breaker *b, const struct pd_breaker_opts *o, const char *cause, int64_t now_us);   /* opens at once */
/* The other end began a new life: an open breaker probes now. */
void pd_breaker_renew(struct pd_breaker *b, int64_t now_us);
/* "breaker open 3.2s", "breaker half-open"; "" when closed. */
const char *pd_breaker_text(const struct pd_breaker *b, int64_t now_us, char *out, size_t cap);
#endif
