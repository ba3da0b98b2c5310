/* A workload: requests with arrivals, lengths and shared prefixes, from a seed. The same options and seed give the same requests, byte for byte; what one part
 * draws does not move another (two rates of one seed have the same prompts).
 *
 * Arrivals, us from the stream's start; the rate is the mean over all of it.
 *   poisson   independent gaps
 *   gamma     gaps of shape `burstiness`: coefficient of variation 1 / sqrt(burstiness); below 1 burstier than Poisson, above it more even
 *   onoff     Poisson within windows of on_us, nothing within the off_us after each
 *   even      one every 1 / rate
 *   log       as a log has them, times time_scale
 * Traffic. Each request is of one class, drawn by weight. Its prompt and answer have lengths of the class's distributions; its prompt begins
 *   cold      with nothing that any other has
 *   partial   for `share` of its tokens like all of its group
 *   full      as all of its group: of two prompts one is the beginning of the other
 *   log       with the log's blocks: an equal block id is an equal run of tokens. Lengths are scaled in whole tokens a block
 * Token ids are uniform over [vocab_lo, vocab_hi), a function of seed, owner (request, group, block) and place. */
#ifndef PD_SIM_WORKLOAD_H
#define PD_SIM_WORKLOAD_H
#include "reqlog.h"

enum pd_arrive { PD_ARRIVE_POISSON, PD_ARRIVE_GAMMA, PD_ARRIVE_ONOFF, PD_ARRIVE_EVEN, PD_ARRIVE_LOG };
extern const char *const pd_arrive_names[];     /* by enum, NULL-ended; so the other two */
enum pd_sharing { PD_SHARE_COLD, PD_SHARE_PARTIAL, PD_SHARE_FULL, PD_SHARE_LOG };
extern const char *const pd_sharing_names[];
int pd_word_find(const char *const *names, const char *s);        /* < 0: none of them */

enum pd_lens_kind { PD_LENS_FIXED, PD_LENS_UNIFORM, PD_LENS_LOGNORMAL, PD_LENS_LOG };
struct pd_lens { enum pd_lens_kind kind; double a, b; };        /* a; a to b; median a, sigma of the logarithm b */
/* "512", "64-256", "lognormal:200:0.8", "trace". */
int pd_lens_parse(const char *s, struct pd_lens *out, struct pd_err *e);

struct pd_traffic {
    char name[32];
    double weight;
    struct pd_lens isl, osl;            /* one of the two from a log: both are the same row's */
    enum pd_sharing prefix;
    uint32_t groups; double share;
    double ttft_ms, tpot_ms;            /* its SLO; 0: none */
};
/* "name=chat,weight=4,isl=64-256,osl=32,prefix=partial,groups=8,share=0.5,ttft=500ms,tpot=50ms" over what *t says already. */
int pd_traffic_parse(const char *s, struct pd_traffic *t, struct pd_err *e);

struct pd_workload_opts {
    uint64_t seed, count;
    int64_t duration_us;                /* none arrives after it; 0: no end but count */
    enum pd_arrive arrive;
    double rate, burstiness;            /* 1/s */
    int64_t on_us, off_us;
    const struct pd_traffic *traffic; uint32_t n_traffic;
    const struct pd_reqlog *log;        /* or NULL */
    double time_scale, length_scale;    /* of the log; 1 */
    uint32_t context;                   /* prompt and answer fit in it: longer ones are cut, and counted. 0: any */
    uint32_t vocab_lo, vocab_hi;
};
struct pd_workload;
int pd_workload_new(const struct pd_workload_opts *o, struct pd_workload **out, struct pd_err *e);      /* *o and what it points to stay until it is freed */
void pd_workload_free(struct pd_workload *w);

struct pd_arrival {
    uint64_t index;
    int64_t at_us;
    const struct pd_traffic *traffic;
    uint32_t isl, osl;
    uint32_t shared; uint64_t group;    /* the first `shared` tokens are the group's */
    const struct pd_reqlog_row *row;    /* its blocks count; or NULL */
    uint32_t reusable;                  /* tokens at its beginning that an earlier request had: what a cache without bound could hit */
    bool cut;
};
int pd_workload_next(struct pd_workload *w, struct pd_arrival *a, struct pd_err *e);    /* 1; 0: that was all */
void pd_workload_tokens(const struct pd_workload *w, const struct pd_arrival *a, int32_t *ids /* [isl] */);
/* A `request` record: id, token_ids, max_tokens, ignore_eos, temperature 0, arrival_us, slo, and beside them class and reusable_tokens. start_us 0: none. */
int pd_workload_request(struct pd_workload *w, const struct pd_arrival *a, int64_t start_us, struct pd_buf *rec, struct pd_err *e);
#endif
