#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/id.h"
#include "../base/log.h"
#include "pack.h"
#include "weights.h"

/* What loading needs and drops: the file's tensors by role, and the matrices to pack. */
struct load {
    struct pd_model *m;
    const struct pd_gguf_tensor *global[PD_T_N_ROLES];
    const struct pd_gguf_tensor *(*layer)[PD_T_N_ROLES];
    struct pd_pack_job *job;
    int n_jobs;
};

/* --- the file's tensors against the family's table --- */

static int check_shape(const struct pd_model *m, const struct pd_family_tensor *ft, const struct pd_gguf_tensor *t, struct pd_err *e)
{
    uint64_t ne0 = pd_config_dim(&m->cfg, ft->ne0), ne1 = pd_config_dim(&m->cfg, ft->ne1);
    if (t->ne[0] != ne0 || t->ne[1] != ne1 || t->ne[2] != 1 || t->ne[3] != 1)
        return pd_fail(e, PD_ECORRUPT, "%s: tensor '%s' at byte %" PRIu64 " is %" PRIu64 " x %" PRIu64 ", the model's hyperparameters make it %" PRIu64 " x %" PRIu64, m->gguf->path,
                       pd_gguf_show(t->name).s, t->entry, t->ne[0], t->ne[1], ne0, ne1);
    if (ft->ne1 == PD_D_ONE && pd_dtype_traits(t->type)->quantised)
        return pd_fail(e, PD_EINCOMPAT, "%s: tensor '%s' at byte %" PRIu64 " has type %s; a vector must be F32, F16 or BF16", m->gguf->path, pd_gguf_show(t->name).s, t->entry, pd_ggml_type_name(t->type));
    return 0;
}

static int find_tensor(struct load *l, const struct pd_family_tensor *ft, int layer, uint8_t *seen, struct pd_err *e)
{
    const struct pd_gguf *g = l->m->gguf;
    char name[64];
    if (ft->layer)
        snprintf(name, sizeof name, "blk.%d.%s", layer, ft->name);
    else
        snprintf(name, sizeof name, "%s", ft->name);
    const struct pd_gguf_tensor *t = pd_gguf_tensor(g, name);
    if (!t && ft->optional)
        return 0;
    if (!t)
        return pd_fail(e, PD_ECORRUPT, "%s: tensor '%s' is missing: the file is not a whole model (a split one must be joined first)", g->path, name);
    seen[t - g->tensor] = 1;
    *(ft->layer ? &l->layer[layer][ft->role] : &l->global[ft->role]) = t;
    return check_shape(l->m, ft, t, e);
}

static int find_tensors(struct load *l, struct pd_err *e)
{
    const struct pd_gguf *g = l->m->gguf;
    const struct pd_family *f = l->m->cfg.family;
    int rc = 0;
    uint8_t *seen = pd_calloc(g->n_tensors, 1, "tensors seen", e);
    if (!seen)
        return PD_ENOMEM;
    for (int i = 0; i < f->n_tensors && !rc; i++)
        for (int j = 0; j < (f->tensor[i].layer ? l->m->cfg.n_layers : 1) && !rc; j++)
            rc = find_tensor(l, &f->tensor[i], j, seen, e);
    for (size_t i = 0; i < g->n_tensors && !rc; i++)
        if (!seen[i])
            rc = pd_fail(e, PD_EINCOMPAT, "%s: tensor '%s' at byte %" PRIu64 " is not part of a %s model of %d layers as it is supported here", g->path, pd_gguf_show(g->tensor[i].name).s,
                         g->tensor[i].entry, f->arch, l->m->cfg.n_layers);
    pd_free(seen);
    return rc;
}

/* --- what becomes of them --- */

/* A norm's weights as floats. */
static int load_vector(struct pd_model *m, const struct pd_gguf_tensor *t, float **out, struct pd_err *e)
{
    const struct pd_dtype_traits *ty = pd_dtype_traits(t->type);
    void *stored = pd_calloc(t->bytes, 1, "a norm's weights", e);
    int rc = PD_ENOMEM;
    if (!stored || !(*out = pd_arena_alloc(&m->arena, t->ne[0], sizeof **out, e)) || (rc = pd_gguf_read(m->gguf, t->at, stored, t->bytes, e)))
        goto out;
    ty->dequant(stored, *out, (int64_t)t->ne[0]);
    for (uint64_t i = 0; i < t->ne[0] && !rc; i++)
        if (!isfinite((*out)[i]))
            rc = pd_fail(e, PD_ECORRUPT, "%s: tensor '%s' holds a weight that is not finite at byte %" PRIu64 ": the file is damaged or was converted wrongly", m->gguf->path,
                         pd_gguf_show(t->name).s, t->at + i * (uint64_t)ty->block_bytes);
out:
    pd_free(stored);
    return rc;
}

/* Matrices of the roles first..first+n-1, one below the other wherever they join: *mats of them, fewer than n if fused. */
static int plan_fused(struct load *l, const struct pd_gguf_tensor *const *t, int n, struct pd_pmat **mats, int *n_mats, struct pd_err *e)
{
    if (!(*mats = pd_arena_alloc(&l->m->arena, (size_t)n, sizeof **mats, e)))
        return PD_ENOMEM;
    *n_mats = 0;
    for (int i = 0; i < n; i++) {
        if (i && pd_pack_joins(t[i - 1], t[i])) {
            struct pd_pack_job *j = &l->job[l->n_jobs - 1];
            j->src[j->n_src++] = t[i];
        } else {
            l->job[l->n_jobs++] = (struct pd_pack_job){ &(*mats)[(*n_mats)++], { t[i] }, 1 };
        }
    }
    return 0;
}

static int plan_layer(struct load *l, int i, struct pd_err *e)
{
    struct pd_layer_weights *w = &l->m->layer[i];
    const struct pd_gguf_tensor *const *t = l->layer[i];
    int rc;
    if ((rc = load_vector(l->m, t[PD_T_ATTN_NORM], &w->attn_norm, e)) || (rc = load_vector(l->m, t[PD_T_FFN_NORM], &w->ffn_norm, e)) ||
        (rc = plan_fused(l, &t[PD_T_Q], 3, &w->qkv, &w->n_qkv, e)))
        return rc;
    l->job[l->n_jobs++] = (struct pd_pack_job){ &w->o, { t[PD_T_O] }, 1 };
    l->job[l->n_jobs++] = (struct pd_pack_job){ &w->gate, { t[PD_T_GATE] }, 1 };
    l->job[l->n_jobs++] = (struct pd_pack_job){ &w->up, { t[PD_T_UP] }, 1 };
    l->job[l->n_jobs++] = (struct pd_pack_job){ &w->down, { t[PD_T_DOWN] }, 1 };
    return 0;
}

static int plan(struct load *l, struct pd_err *e)
{
    struct pd_model *m = l->m;
    int rc;
    if (!(m->layer = pd_arena_alloc(&m->arena, (size_t)m->cfg.n_layers, sizeof *m->layer, e)))
        return PD_ENOMEM;
    if ((rc = load_vector(m, l->global[PD_T_OUT_NORM], &m->out_norm, e)))
        return rc;
    for (int i = 0; i < m->cfg.n_layers; i++)
        if ((rc = plan_layer(l, i, e)))
            return rc;
    l->job[l->n_jobs++] = (struct pd_pack_job){ &m->head, { l->global[m->cfg.tied ? PD_T_EMBD : PD_T_OUTPUT] }, 1 };
    if (!m->cfg.tied)
        l->job[l->n_jobs++] = (struct pd_pack_job){ &m->embd_own, { l->global[PD_T_EMBD] }, 1 };
    m->embd = m->cfg.tied ? &m->head : &m->embd_own;
    return 0;
}

/* Room for every matrix in one piece, on huge pages where the system has them: it is read from end to end for each token. */
static int place(struct load *l, struct pd_err *e)
{
    struct pd_model *m = l->m;
    size_t total = 0, page = (size_t)sysconf(_SC_PAGESIZE), bytes;
    int rc;
    for (int i = 0; i < l->n_jobs; i++) {
        struct pd_pmat *w = l->job[i].m;
        if ((rc = pd_pack_shape(&l->job[i], e)))
            return pd_err_prefix(e, "%s", m->gguf->path), rc;
        if (!pd_mul_size((size_t)w->n_groups, w->group_bytes, &bytes) || !pd_add_size(total, (bytes + 63) / 64 * 64, &total))
            return pd_fail(e, PD_ENOMEM, "%s: the packed weights pass the address space", m->gguf->path);
    }
    if (!(m->packed = pd_alloc_aligned(total, "packed weights", e)))
        return PD_ENOMEM;
    uintptr_t first = ((uintptr_t)m->packed + page - 1) / page * page, last = ((uintptr_t)m->packed + total) / page * page;
    if (last > first)
        madvise((void *)first, last - first, MADV_HUGEPAGE);
    m->packed_bytes = total;
    total = 0;
    for (int i = 0; i < l->n_jobs; i++) {
        struct pd_pmat *w = l->job[i].m;
        if (w == &m->embd_own) {        /* the last */
            m->embd_bytes = m->packed_bytes - total;
            m->packed_bytes = total;
        }
        w->data = m->packed + total;
        total += ((size_t)w->n_groups * w->group_bytes + 63) / 64 * 64;
    }
    return 0;
}

/* The type most weights have, and the numerics: integer only if every matrix is; of the floats the one that rounds least decides. */
static void describe(struct load *l)
{
    uint64_t count[PD_BF16 + 1] = { 0 };
    uint32_t most = 0;
    bool seen[PD_PK_U4 + 1] = { false };
    for (int i = 0; i < l->n_jobs; i++) {
        if (l->job[i].m == &l->m->embd_own)
            continue;
        uint32_t type = l->job[i].src[0]->type;
        count[type] += (uint64_t)l->job[i].m->n_out * (uint64_t)l->job[i].m->n_in;
        seen[l->job[i].m->pack] = true;
    }
    for (uint32_t t = 0; t <= PD_BF16; t++)
        if (count[t] > count[most])
            most = t;
    snprintf(l->m->quant, sizeof l->m->quant, "%s", pd_ggml_type_name(most));
    l->m->numerics = seen[PD_PK_F32] ? PD_PK_F32 : seen[PD_PK_F16] ? PD_PK_F16 : seen[PD_PK_BF16] ? PD_PK_BF16 : PD_PK_U8;
}

int pd_weights_load(struct pd_model *m, struct pd_threads *threads, struct pd_err *e)
{
    struct load l = { .m = m };
    const struct pd_gguf *g = m->gguf;
    int rc = PD_ENOMEM;
    if (!(l.layer = pd_calloc((size_t)m->cfg.n_layers, sizeof *l.layer, "tensors by role", e)) ||
        !(l.job = pd_calloc((size_t)m->cfg.n_layers * 7 + 2, sizeof *l.job, "packing jobs", e)))
        goto out;
    if ((rc = find_tensors(&l, e)) || (rc = plan(&l, e)) || (rc = place(&l, e)))
        goto out;
    posix_fadvise(g->fd, (off_t)g->data_off, 0, POSIX_FADV_WILLNEED);       /* a cold file should be read ahead */
    rc = pd_pack_run(g, l.job, l.n_jobs, threads, e);
    describe(&l);
out:
    pd_free(l.layer);
    pd_free(l.job);
    return rc;
}

void pd_model_embed(const struct pd_model *m, int32_t token, float *out)
{
    if (token < 0 || token >= m->cfg.n_vocab) {
        for (int i = 0; i < m->cfg.n_embd; i++)
            out[i] = NAN;
        return;
    }
    pd_pack_row(m->embd, token, out);
}

/* --- the whole model --- */

static int open_text(struct pd_model *m, const struct pd_model_opts *o, struct pd_err *e)
{
    const struct pd_gguf_kv *tokens = pd_gguf_find(m->gguf, "tokenizer.ggml.tokens");
    int rc;
    if (tokens && tokens->count != (uint64_t)m->cfg.n_vocab)       /* before any memory is spent on them */
        return pd_fail(e, PD_ECORRUPT, "%s: 'tokenizer.ggml.tokens' at byte %" PRIu64 " has %" PRIu64 " tokens, token_embd.weight %d rows: the file is put together from different models",
                       m->gguf->path, tokens->offset, tokens->count, m->cfg.n_vocab);
    if ((rc = pd_tokenizer_from_gguf(m->gguf, &m->tok, e)))
        return rc;
    return pd_chat_from_gguf(m->gguf, o->chat_template, &m->chat, e);
}

static int make_revision(struct pd_model *m, const struct pd_model_opts *o, struct pd_err *e)
{
    char hex[2 * PD_SHA_LEN + 1] = "";
    if (!o->no_digest) {
        int rc = pd_file_digest(m->gguf->fd, m->gguf->path, m->gguf->data_off, m->digest, e);
        if (rc)
            return rc;
        pd_hex(m->digest, PD_SHA_LEN, hex);
    }
    snprintf(m->revision, sizeof m->revision, "%s%s%.12s", m->cfg.name, o->no_digest ? "" : "@", hex);
    return 0;
}

static double lap(int64_t *t) { int64_t now = pd_mono_us(); double ms = (double)(now - *t) / 1000; *t = now; return ms; }

int pd_model_open(const char *path, const struct pd_model_opts *o, struct pd_model **out, struct pd_err *e)
{
    int64_t start = pd_mono_us(), t = start;
    struct pd_model *m = pd_calloc(1, sizeof *m, "a model", e);
    int rc = PD_ENOMEM;
    *out = NULL;
    if (!m)
        return rc;
    if ((rc = pd_gguf_open(path, &m->gguf, e)) || (rc = pd_config_from_gguf(m->gguf, &m->cfg, e)))
        goto out;
    m->times.parse_ms = lap(&t);
    if ((rc = open_text(m, o, e)))
        goto out;
    m->times.text_ms = lap(&t);
    if (!o->no_weights && (rc = pd_weights_load(m, o->threads, e)))
        goto out;
    m->times.pack_ms = lap(&t);
    if ((rc = make_revision(m, o, e)) || (rc = pd_gguf_unchanged(m->gguf, e)))
        goto out;
    pd_gguf_close(m->gguf);
    m->gguf = NULL;
    m->times.digest_ms = lap(&t);
    m->load_ms = (double)(t - start) / 1000;
    pd_info("%s: %s, %zu MB packed; parse %.1f ms, text %.1f ms, pack %.1f ms, digest %.1f ms", m->revision, m->quant, m->packed_bytes / 1000000, m->times.parse_ms,
            m->times.text_ms, m->times.pack_ms, m->times.digest_ms);
    *out = m;
    return 0;
out:
    pd_model_free(m);
    return rc;
}

void pd_model_free(struct pd_model *m)
{
    if (!m)
        return;
    pd_chat_free(&m->chat);
    pd_tokenizer_free(m->tok);
    pd_config_free(&m->cfg);
    pd_free(m->packed);
    pd_arena_free(&m->arena);
    pd_gguf_close(m->gguf);
    pd_free(m);
}
