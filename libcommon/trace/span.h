/* The stages of a run, as spans between its states: for waterfalls and statistics. One tracker a run; events go in, in order, spans come out. */
#ifndef PD_TRACE_SPAN_H
#define PD_TRACE_SPAN_H
#include "log.h"

enum pd_span_id { PD_SP_ROUTE, PD_SP_QUEUE, PD_SP_PREFILL, PD_SP_PUBLISH, PD_SP_TRANSFER, PD_SP_WAIT, PD_SP_FIRST, PD_SP_STREAM, PD_SP_TTFT, PD_SP_E2E, PD_N_SPANS,
                  PD_N_STAGES = PD_SP_TTFT };
struct pd_span { const char *name; uint32_t from, to; const char *what; };      /* PD_BIT of states */
extern const struct pd_span pd_span[PD_N_SPANS];

enum pd_span_what { PD_SPAN_OPEN, PD_SPAN_CLOSE, PD_SPAN_CUT /* the attempt was given up, or the run ended first */ };
typedef int pd_span_fn(void *ctx, enum pd_span_id id, enum pd_span_what what, int64_t from_us, int64_t to_us, const struct pd_log_rec *r, struct pd_err *e);

struct pd_spans {
    int64_t from_us[PD_N_SPANS];
    uint32_t open, done;        /* bits of pd_span_id; done: once is enough */
    uint32_t tokens[PD_N_RANKS];        /* that went out, as each rank tells it */
    uint32_t choices[PD_N_RANKS];
    enum pd_rank top;           /* of those that took part */
    int64_t first_us, last_us;  /* when: the first and the last of them */
    enum pd_state_id last, end;
    bool moved, fell_back;      /* KV was moved; and then computed here after all */
};
int pd_spans_event(struct pd_spans *s, const struct pd_log_rec *r, pd_span_fn *fn, void *ctx, struct pd_err *e);
/* Time a token after the first, in us; < 0: there is none. */
uint32_t pd_spans_tokens(const struct pd_spans *s);
double pd_spans_tpot_us(const struct pd_spans *s);
const char *pd_spans_mode(const struct pd_spans *s);    /* remote, local (fell back), aggregated */
#endif
