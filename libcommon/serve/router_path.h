/* Inside the router: where KV goes. Paths and their breakers, what prefill workers were given and nobody has read yet, pairs on hold, limits of fallbacks. */
#ifndef PD_SERVE_ROUTER_PATH_H
#define PD_SERVE_ROUTER_PATH_H
#include <sys/stat.h>
#include "../route/limit.h"
#include "../route/path.h"
#include "../trace/state.h"

struct pd_router;
struct pd_rt_run;
struct pd_rt_worker;
struct pd_conn;
struct pd_rec;
struct pd_metric;

struct pd_rt_paths {            /* of a router */
    struct pd_paths *paths;
    struct pd_topology *topology; struct stat seen; bool is_seen;      /* which file it is of, or which one was no good */
    struct pd_ledger *ledger; bool kept /* in a file */, in_trouble;
    bool has_left; uint32_t n_found;    /* a former life left items that are still there; how many of them their workers had yet */
    struct pd_rt_query *queries;
    struct pd_limit limit;
    uint64_t tokens_ahead; uint32_t runs_ahead;     /* of fallbacks that wait, in the round of routing under way */
    bool alike_ahead, fits_ahead;       /* one of them is kept from no worker by what it is itself; there is room for the first such */
    struct pd_metric *m_turns, *m_holds, *m_shed;
};
struct pd_rt_lent {             /* of a run: what its prefill worker has for its decode worker */
    bool given, on_path;
    uint8_t attempt;
    struct pd_path_end p, d;
    struct pd_path_ticket ticket;
    int64_t since_us;
};
struct pd_rt_fall {             /* of a run: it is computed where it is decoded */
    bool fell;
    uint8_t times;              /* so far: at most one */
    struct pd_rt_worker *at;    /* which counts it; or NULL */
    bool booked, unsure;        /* of this attempt it was counted; it may have its KV after all, so how long it takes says nothing */
    uint64_t tokens; int64_t since_us;
    struct pd_rt_worker *skip_of; uint32_t skip;        /* results of a worker that was told to drop it: they answer what was before */
};

int pd_rt_paths_new(struct pd_router *r, struct pd_err *e);
void pd_rt_paths_free(struct pd_router *r);
void pd_rt_paths_beat(struct pd_router *r, int64_t now);
void pd_rt_paths_said(struct pd_router *r, struct pd_rt_worker *w, bool fresh);
void pd_rt_paths_ledger(const struct pd_router *r, void (*put)(void *to, const char *key, int64_t value), void *to);
/* `status` with release or holds. */
int pd_rt_paths_order(void *ctx, const struct pd_rec *rec, struct pd_buf *out, struct pd_err *e);

/* A run was given to its workers; its KV is complete at one (rec: the descriptor); the other one has it, or does without; it is over there. */
void pd_rt_lend(struct pd_router *r, struct pd_rt_run *run, int64_t now);
void pd_rt_lent_published(struct pd_router *r, struct pd_rt_run *run, const struct pd_rec *rec);
void pd_rt_lent_read(struct pd_router *r, struct pd_rt_run *run);
void pd_rt_lent_over(struct pd_router *r, struct pd_rt_run *run);
/* Its path: by the result of its decode worker, or by what was heard otherwise. */
void pd_rt_lent_result(struct pd_router *r, struct pd_rt_run *run, const struct pd_rec *rec);
void pd_rt_lent_took(struct pd_router *r, const struct pd_rt_run *run, uint64_t bytes, int64_t us, int64_t now);      /* as it was measured */
void pd_rt_lent_went(struct pd_router *r, struct pd_rt_run *run, enum pd_went went, const char *cause, int64_t now);

/* It falls back, and w would compute it: may it now? true: it counts as begun. */
bool pd_rt_fall_at(struct pd_router *r, struct pd_rt_run *run, struct pd_rt_worker *w, int64_t now);
void pd_rt_fall_begin(struct pd_router *r, struct pd_rt_run *run, struct pd_rt_worker *w, int64_t now);         /* it does, asked or not */
void pd_rt_fall_over(struct pd_router *r, struct pd_rt_run *run, bool computed);      /* it is computed, or will not be there */
/* What was decided of it, which fell, and whether that is done: *retry_after_us, *why as in limit.h. */
enum pd_limited pd_rt_fall_judge(struct pd_router *r, struct pd_rt_run *run, int64_t now, int64_t *retry_after_us, const char **why);
/* One before it waits, in the round of routing under way: nothing is decided of it, and it waits too, or is shed. */
enum pd_limited pd_rt_fall_behind(struct pd_router *r, struct pd_rt_run *run, int64_t now, int64_t *retry_after_us, const char **why);
#endif
