#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "runtime.h"

static int kv_dtype_of(const char *name, const struct pd_model *m, enum pd_dtype *t, struct pd_err *e)
{
    if (!name)
        *t = m->numerics == PD_PK_F32 ? PD_F32 : PD_F16;
    else if (!pd_kv_dtype_parse(name, t))
        return pd_fail(e, PD_EUSAGE, "--kv-dtype: '%s' is unknown (f16, bf16 or f32)", name);
    return 0;
}

static int64_t default_kv_mem(const struct pd_config *c, const struct pd_pool_geom *g)
{
    int64_t token = 2ll * c->n_layers * c->n_kv_heads * c->head_dim * (int64_t)pd_dtype_size(g->dtype);
    int64_t contexts = 16 * token * c->n_ctx, memory = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE) / 8;
    return contexts < memory ? contexts : memory;
}

int pd_runtime_open(const struct pd_runtime_opts *o, struct pd_runtime *rt, struct pd_err *e)
{
    memset(rt, 0, sizeof *rt);
    rt->chunk = o->chunk ? (uint32_t)o->chunk : 512;
    rt->max_seqs = o->max_seqs ? (uint32_t)o->max_seqs : 64;
    rt->epoch = o->epoch;
    rt->serving = o->serving;
    if ((size_t)snprintf(rt->domain, sizeof rt->domain, "%s", o->domain ? o->domain : PD_DOMAIN) >= sizeof rt->domain || !rt->domain[0])
        return pd_fail(e, PD_EUSAGE, "--domain: '%s' is empty or longer than %zu bytes (example: --domain rack-1)", o->domain, sizeof rt->domain - 1);
    const char *why = NULL;
    int rc;
    if (!(rt->k = pd_kernels_cpu(getenv("PD_CPU"), &why)))
        return pd_fail(e, PD_EUSAGE, "PD_CPU=%s: %s", getenv("PD_CPU") ? getenv("PD_CPU") : "", why);
    if ((rc = pd_threads_new(o->threads ? o->threads : pd_threads_default(), &rt->threads, e)) < 0)
        goto out;
    struct pd_model_opts mo = { .threads = rt->threads, .chat_template = o->chat_template };
    if ((rc = pd_model_open(o->model, &mo, &rt->model, e)) < 0)
        goto out;
    const struct pd_config *c = &rt->model->cfg;
    struct pd_pool_geom g = { c->n_layers, c->n_kv_heads, c->head_dim, o->block_size ? o->block_size : 16, PD_F16 };
    if ((rc = kv_dtype_of(o->kv_dtype, rt->model, &g.dtype, e)) < 0 || (rc = pd_pool_new(&g, o->kv_mem ? o->kv_mem : default_kv_mem(c, &g), &rt->pool, e)) < 0)
        goto out;
    rt->numerics = rt->model->numerics == PD_PK_U8 || rt->model->numerics == PD_PK_U4 ? rt->k->cls_int : rt->model->numerics == PD_PK_BF16 ? rt->k->cls_bf16 : rt->k->cls_float;
    struct pd_fp_params fp = { .kv_dtype = g.dtype, .block_size = g.block_size, .numerics = rt->numerics, .software = "pd " PD_VERSION };
    if ((rc = pd_fp_make(rt->model, &fp, &rt->fp, e)) < 0)
        goto out;
    struct pd_prefix_opts po = { .must_seed = rt->fp.must_seed, .evict = o->evict };
    if (o->prefix_cache && (rc = pd_prefix_new(rt->pool, &po, &rt->prefix, e)) < 0)
        goto out;
    char host[64] = "localhost";
    gethostname(host, sizeof host - 1);
    snprintf(rt->worker, sizeof rt->worker, "%s@%.63s:%d", o->role, host, (int)getpid());
    return 0;
out:
    pd_runtime_close(rt);
    return rc;
}

void pd_runtime_close(struct pd_runtime *rt)
{
    pd_fp_free(&rt->fp);
    pd_prefix_free(rt->prefix);
    pd_pool_free(rt->pool);
    pd_model_free(rt->model);
    pd_threads_free(rt->threads);
    memset(rt, 0, sizeof *rt);
}

int pd_check_adapter(const struct pd_request *r, struct pd_err *e)
{
    if (!r->adapter.p || !r->adapter.n)
        return 0;
    return pd_fail(e, PD_EINCOMPAT, "adapter '%.*s' is not loaded: this build runs no adapters", (int)(r->adapter.n > 80 ? 80 : r->adapter.n), r->adapter.p);
}

int pd_prompt_tokens(const struct pd_runtime *rt, const struct pd_request *r, struct pd_buf *ids, struct pd_err *e)
{
    int rc = pd_check_adapter(r, e);
    return rc < 0 ? rc : pd_prompt_ids(rt->model, r, ids, e);
}

int pd_prompt_ids(const struct pd_model *m, const struct pd_request *r, struct pd_buf *ids, struct pd_err *e)
{
    if (r->has_token_ids)
        return pd_buf_add(ids, r->token_ids, (size_t)r->n_token_ids * sizeof(int32_t), e);
    if (r->n_messages)
        return pd_chat_tokenize(&m->chat, m->tok, r->messages, r->n_messages, ids, e);
    return pd_tokenize(m->tok, r->prompt.p, r->prompt.n, true, false, ids, e);
}
