/* What every engine command needs, made once: threads, kernels, model, block pool, fingerprint, and who we are. */
#ifndef PD_ENGINE_RUNTIME_H
#define PD_ENGINE_RUNTIME_H
#include "../kv/fingerprint.h"
#include "../kv/prefix.h"

#define PD_DOMAIN "local"       /* the transfer domain of who names none */

struct pd_runtime_opts {
    const char *model, *chat_template, *role;   /* role: "prefill", "decode" */
    int threads;                /* 0: the physical cores of the affinity mask */
    const char *kv_dtype;       /* NULL: f16 (f32 for F32 models); "f16" "bf16" "f32" */
    int block_size;             /* 0: 16 */
    int64_t kv_mem;             /* bytes, 0: the smaller of an eighth of memory and 16 full contexts */
    int chunk, max_seqs;        /* 0: 512 and 64 */
    const char *domain;         /* NULL: PD_DOMAIN */
    uint64_t epoch;             /* the deployment: KV does not pass from one to another */
    bool serving;               /* a daemon: priorities and timeouts of stages count */
    bool prefix_cache;          /* daemons */
    enum pd_evict evict;
};
struct pd_runtime {
    struct pd_threads *threads;
    const struct pd_kernels *k;
    struct pd_model *model;
    struct pd_pool *pool;
    struct pd_prefix *prefix;   /* or NULL */
    struct pd_fp fp;
    const char *numerics;       /* the numerics class: equal strings, equal bits */
    uint32_t chunk, max_seqs;
    bool serving;
    unsigned convert;           /* PD_CONV_* (../kv/convert.h): KV of another layout that this process takes and converts; the command's to set after open */
    char worker[96];            /* "prefill@host:pid" */
    char domain[64];
    uint64_t epoch;
};
int pd_runtime_open(const struct pd_runtime_opts *o, struct pd_runtime *rt, struct pd_err *e);
void pd_runtime_close(struct pd_runtime *rt);

int pd_check_adapter(const struct pd_request *r, struct pd_err *e);     /* PD_EINCOMPAT when the request names one: none is loaded, and none is dropped */
int pd_prompt_ids(const struct pd_model *m, const struct pd_request *r, struct pd_buf *ids, struct pd_err *e);          /* of its tokenizer alone */
/* The prompt's token ids (appended to ids, a pd_buf of int32) from whichever of prompt, messages, token_ids the request has. Refuses what this build cannot honour, by name (adapter). */
int pd_prompt_tokens(const struct pd_runtime *rt, const struct pd_request *r, struct pd_buf *ids, struct pd_err *e);
#endif
