/* The stages of a run, each from one state to another, and the two times that count: for waterfalls and statistics. One tracker a run; events go in, in
 * order, stages come out. */
#ifndef PD_TRACE_STAGE_H
#define PD_TRACE_STAGE_H
#include "log.h"

enum pd_stage_id {
    PD_SG_ROUTE, PD_SG_QUEUE, PD_SG_PREFILL, PD_SG_PUBLISH, PD_SG_TRANSFER, PD_SG_WAIT, PD_SG_FIRST, PD_SG_STREAM,
    PD_SG_TTFT, PD_SG_E2E, PD_N_TIMES, PD_N_STAGES = PD_SG_TTFT
};
struct pd_stage { const char *name; uint32_t from, to; const char *what; };      /* PD_BIT of states */
extern const struct pd_stage pd_stage[PD_N_TIMES];

enum pd_stage_what { PD_STAGE_OPEN, PD_STAGE_CLOSE, PD_STAGE_CUT /* the attempt was given up, or the run ended first */ };
typedef int pd_stage_fn(void *ctx, enum pd_stage_id id, enum pd_stage_what what, int64_t from_us, int64_t to_us, const struct pd_log_rec *r, struct pd_err *e);

struct pd_stages {
    int64_t from_us[PD_N_TIMES];
    uint32_t open, done;        /* bits of pd_stage_id; done: once is enough */
    uint32_t tokens[PD_N_RANKS];        /* that went out, as each rank tells it */
    uint32_t choices[PD_N_RANKS];
    enum pd_rank top;           /* of those that took part */
    int64_t first_us, last_us;  /* when: the first and the last of them */
    enum pd_state_id last, end;
    bool moved, fell_back;      /* KV was moved; and then computed here after all */
};
int pd_stages_event(struct pd_stages *s, const struct pd_log_rec *r, pd_stage_fn *fn, void *ctx, struct pd_err *e);
uint32_t pd_stages_tokens(const struct pd_stages *s);   /* as the rank nearest to the client tells it */
double pd_stages_tpot_us(const struct pd_stages *s);    /* a token after the first of each choice; < 0: there is none */
const char *pd_stages_mode(const struct pd_stages *s);    /* remote, local (fell back), aggregated */
#endif
