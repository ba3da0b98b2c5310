/* What the router learns from its runs (../route/learn.h): what was expected of each when it was sent, what it took, and the `outcome` record of the two. */
#ifndef PD_SERVE_ROUTER_LEARN_H
#define PD_SERVE_ROUTER_LEARN_H
#include "../route/price.h"

/* Of a run's last decision that was carried out. */
struct pd_rt_told {
    bool any;
    enum pd_mode mode;
    uint32_t attempt;
    char policy[24], p[80], d[80];      /* names */
    int64_t sent_us;                    /* mono */
    uint32_t p_class, d_class, path; bool has_p_class, has_d_class, has_path;
    uint64_t tokens, context, kv_tokens; uint32_t seqs, shared;         /* to compute, after; D's batch; transfers beside it */
    struct pd_ahead ahead;              /* of whoever computes the prompt */
    struct pd_spread queue, prefill, interference, transfer, sync, tpot, ttft, completion;
    uint32_t ttft_permille, completion_permille;        /* that these two sums were told with */
    struct pd_spread way;               /* from its KV's publication to its first token */
    int64_t published_us, late_us;      /* mono; late: when it is looked whether it is to be waited for, 0: never */
    uint32_t late_attempt;              /* the decision not to; 0: there was none */
    bool on_path; int64_t on_path_until;        /* its KV counts as being on its way */
};
/* What the workers said of it; -1: nothing. */
struct pd_rt_took {
    int64_t p_queue_us, p_prefill_us, p_total_us, p_cached /* tokens */, queue_us, prefill_us, ttft_us, kv_us;
    double tpot_ms;
    uint64_t kv_bytes;
    uint32_t prompt, cached, transferred, recomputed, completion;
    char mode[12], finish[12];
    struct pd_buf fallback;
};
enum { PD_RT_TERMS = 8 };
struct pd_rt_learning {
    struct pd_learn l;
    struct pd_profile profile;
    struct pd_metric *m_told[PD_RT_TERMS], *m_below[PD_RT_TERMS], *m_outcomes, *m_differs[2];
};

struct pd_router;
struct pd_rt_run;
struct pd_rt_worker;
struct pd_rec;
int pd_rt_learn_new(struct pd_router *r, const char *profile /* or NULL */, struct pd_err *e);
void pd_rt_learn_free(struct pd_router *r);
void pd_rt_learn_said(struct pd_router *r, const struct pd_rt_worker *w);       /* its `worker` record was taken */
void pd_rt_learn_sent(struct pd_router *r, struct pd_rt_run *run, int64_t now);        /* by r->decision */
void pd_rt_learn_published(struct pd_router *r, struct pd_rt_run *run, const struct pd_rec *kv, int64_t now);
void pd_rt_learn_arrived(struct pd_router *r, struct pd_rt_run *run);          /* its KV is no more on its way */
void pd_rt_learn_result(struct pd_rt_run *run, const void *rec, size_t n);
void pd_rt_learn_end(struct pd_router *r, struct pd_rt_run *run, const char *finish);  /* the outcome goes into the trace; the run is freed next */
void pd_rt_learn_run_free(struct pd_rt_run *run);
#endif
