#include <math.h>
#include "forward.h"

#define ATTN_TILE 32            /* query rows of a prefill attention task */
#define FFN_ROWS 256            /* rows whose gate and up are in a thread's scratch at once */

struct pd_fwd {
    const struct pd_model *m;
    const struct pd_config *c;
    struct pd_threads *t;
    const struct pd_kernels *k;
    const struct pd_pool *pool;
    uint32_t max_rows, max_logits;
    int qkv_dim, q_dim, kv_dim;
    float *x, *h, *qkv, *att, *picked;  /* [rows, n_embd] [rows or logits, n_embd] [rows, q+2kv] [rows, q] [max_logits, n_embd] */
    float *logits;                      /* [max_logits, n_vocab] */
    float *rope;                        /* [n_rope, n_rot/2, 2] cos, sin by position */
    uint32_t n_rope;
    uint8_t *act, *mid;                 /* prepared rows of the matrix at hand; of the feed-forward block's second matrix */
    uint8_t *scratch;                   /* [threads, scratch_bytes] */
    size_t scratch_bytes;
    float *parts;                       /* attention partials of decoding spans */
    size_t n_parts;                     /* floats */
    struct attn_task *tasks;
    size_t cap_tasks;
};

struct attn_task { uint32_t span; int kv_head, n_heads; int row0, row1; int seg /* < 0: whole rows of one head */, n_segs; size_t part; };

static void *scratch_of(const struct pd_fwd *f, int tid) { return f->scratch + (size_t)tid * f->scratch_bytes; }

/* Rows of a task in work that goes row by row: few rows are shared out too, many go in pieces of `most`. */
static int rows_a_task(const struct pd_fwd *f, int rows, int most)
{
    int even = (rows + pd_threads_count(f->t) - 1) / pd_threads_count(f->t);
    return even < most ? even : most;
}

/* Groups of outputs of a task. Few rows: one task a thread, which then goes through memory without a break. */
static int groups_a_task(const struct pd_fwd *f, int n_groups, int rows)
{
    int tasks = pd_threads_count(f->t) * (rows > 64 ? 8 : 1), per = (n_groups + tasks - 1) / tasks;
    return per < 1 ? 1 : per;
}

/* --- matrices ------------------------------------------------------------------------------------------------------------------------------------- */

struct prep_job { const struct pd_fwd *f; const struct pd_pmat *w; const float *x, *norm; size_t ldx; int n; size_t stride; int per; uint8_t *act; float *tmp; size_t ldt; };

static void prep_rows(const struct prep_job *j, int r0, int r1)
{
    for (int r = r0; r < r1; r++) {
        const float *x = j->x + (size_t)r * j->ldx;
        if (j->norm) {
            float *h = j->tmp + (size_t)r * j->ldt;
            j->f->k->rmsnorm(h, x, j->norm, j->w->n_in, j->f->c->rms_eps);
            x = h;
        }
        j->f->k->prep(j->w->pack, x, j->w->n_in, j->w->n_in_pad, j->act + (size_t)r * j->stride);
    }
}

static void prep_task(void *ctx, int task, int tid)
{
    (void)tid;
    const struct prep_job *j = ctx;
    int r0 = task * j->per, r1 = r0 + j->per;
    prep_rows(j, r0, r1 < j->n ? r1 : j->n);
}

/* Rows of x, normed first when `norm` is given, into the form that w wants: to `act`. */
static void prep(struct pd_fwd *f, const struct pd_pmat *w, const float *x, size_t ldx, const float *norm, int rows, uint8_t *act)
{
    struct prep_job j = { f, w, x, norm, ldx, rows, f->k->act_stride(w->pack, w->n_in_pad), rows_a_task(f, rows, 16), act, f->h, (size_t)f->c->n_embd };
    if (rows <= 4)
        prep_rows(&j, 0, rows);
    else
        pd_threads_run(f->t, (rows + j.per - 1) / j.per, prep_task, &j);
}

struct gemm_job { const struct pd_fwd *f; const struct pd_pmat *w; int rows; float *y; size_t ldy; int add, per; const uint8_t *act; size_t stride; int row_tile; int g_tasks; };

static void gemm_task(void *ctx, int task, int tid)
{
    const struct gemm_job *j = ctx;
    int gt = task % j->g_tasks, rt = task / j->g_tasks;
    int g0 = gt * j->per, g1 = g0 + j->per, r0 = rt * j->row_tile, r1 = r0 + j->row_tile;
    if (g1 > j->w->n_groups)
        g1 = j->w->n_groups;
    if (r1 > j->rows)
        r1 = j->rows;
    j->f->k->gemm(j->w, j->act + (size_t)r0 * j->stride, r1 - r0, j->y + (size_t)r0 * j->ldy, j->ldy, j->add, g0, g1, scratch_of(j->f, tid));
}

/* y (+)= act . W^T over prepared rows. */
static void gemm(struct pd_fwd *f, const struct pd_pmat *w, const uint8_t *act, int rows, float *y, size_t ldy, int add)
{
    int threads = pd_threads_count(f->t), per = groups_a_task(f, w->n_groups, rows);
    int g_tasks = (w->n_groups + per - 1) / per;
    int row_tile = rows;
    if (threads > 4 && g_tasks < threads * 2 && rows >= 128)
        row_tile = 64;
    struct gemm_job j = { f, w, rows, y, ldy, add, per, act, f->k->act_stride(w->pack, w->n_in_pad), row_tile, g_tasks };
    pd_threads_run(f->t, g_tasks * ((rows + row_tile - 1) / row_tile), gemm_task, &j);
}

/* The form in which a kind of weights wants its activations: rows prepared for one serve every kind of the same form. */
static int act_form(enum pd_pack p) { return p == PD_PK_BF16 ? 1 : p == PD_PK_U8 || p == PD_PK_U4 ? 2 : 0; }

/* Fused matrices may come in parts (q|k|v of different kinds): outputs follow one another in a row. */
static void gemm_parts(struct pd_fwd *f, const struct pd_pmat *w, int n, const float *x, const float *norm, int rows, float *y, size_t ldy)
{
    size_t at = 0;
    for (int i = 0; i < n; i++) {
        if (i == 0 || act_form(w[i].pack) != act_form(w[i - 1].pack))
            prep(f, &w[i], x, (size_t)f->c->n_embd, norm, rows, f->act);
        gemm(f, &w[i], f->act, rows, y + at, ldy, 0);
        at += (size_t)w[i].n_out;
    }
}

/* --- attention ------------------------------------------------------------------------------------------------------------------------------------ */

/* The table of cosines and sines grows with the positions in use: a model's context may be far longer than any request. */
static int grow_rope(struct pd_fwd *f, uint32_t end, struct pd_err *e)
{
    if (end <= f->n_rope)
        return 0;
    uint32_t n = f->n_rope ? f->n_rope : 1024, ctx = (uint32_t)f->c->n_ctx;
    while (n < end)
        n *= 2;
    n = n < ctx ? n : ctx;
    size_t per = (size_t)f->c->rope.n_rot;
    float *t = pd_alloc_aligned((size_t)n * per * sizeof *t, "rope table", e);
    if (!t)
        return PD_ENOMEM;
    if (f->n_rope)
        memcpy(t, f->rope, (size_t)f->n_rope * per * sizeof *t);
    pd_rope_table(&f->c->rope, (int)f->n_rope, (int)(n - f->n_rope), t + (size_t)f->n_rope * per);
    pd_free(f->rope);
    f->rope = t;
    f->n_rope = n;
    return 0;
}

struct rope_job { struct pd_fwd *f; const struct pd_span *spans; uint32_t n_spans; int layer, per, rows; };

static void rope_and_store(const struct rope_job *j, const struct pd_span *s, uint32_t i)
{
    struct pd_fwd *f = j->f;
    const struct pd_config *c = f->c;
    const struct pd_pool_geom *g = pd_pool_geom(f->pool);
    uint32_t pos = s->pos0 + i;
    float *row = f->qkv + (size_t)(s->row0 + i) * (size_t)f->qkv_dim;
    const float *cs = f->rope + (size_t)pos * (size_t)c->rope.n_rot;
    f->k->rope(row, c->n_heads + c->n_kv_heads, c->head_dim, c->rope.n_rot, cs, c->rope.pairs);     /* q and k lie side by side */
    size_t es = pd_dtype_size(g->dtype), head = (size_t)g->block_size * (size_t)c->head_dim * es;
    uint8_t *base = s->blk[pos / (uint32_t)g->block_size] + (size_t)(pos % (uint32_t)g->block_size) * (size_t)c->head_dim * es;
    for (int v = 0; v < 2; v++) {
        uint8_t *dst = base + pd_pool_off(f->pool, j->layer, v);
        const float *src = row + f->q_dim + v * f->kv_dim;
        for (int h = 0; h < c->n_kv_heads; h++)
            f->k->kv_write(dst + (size_t)h * head, g->dtype, src + (size_t)h * (size_t)c->head_dim, c->head_dim);
    }
}

static void rope_task(void *ctx, int task, int tid)
{
    (void)tid;
    const struct rope_job *j = ctx;
    uint32_t r0 = (uint32_t)(task * j->per), r1 = r0 + (uint32_t)j->per;
    for (uint32_t s = 0; s < j->n_spans; s++) {
        const struct pd_span *sp = &j->spans[s];
        uint32_t a = sp->row0 > r0 ? sp->row0 : r0, b = sp->row0 + sp->n < r1 ? sp->row0 + sp->n : r1;
        for (uint32_t r = a; r < b; r++)
            rope_and_store(j, sp, r - sp->row0);
    }
}

struct attn_job { struct pd_fwd *f; const struct pd_span *spans; int layer; };

static void attn_args(const struct attn_job *j, const struct attn_task *k, struct pd_attn *a)
{
    struct pd_fwd *f = j->f;
    const struct pd_config *c = f->c;
    const struct pd_pool_geom *g = pd_pool_geom(f->pool);
    const struct pd_span *s = &j->spans[k->span];
    int group = c->n_heads / c->n_kv_heads;
    size_t head = (size_t)g->block_size * (size_t)c->head_dim * pd_dtype_size(g->dtype);
    *a = (struct pd_attn){
        .blk = (const uint8_t *const *)s->blk,
        .k_off = pd_pool_off(f->pool, j->layer, 0) + (size_t)k->kv_head * head, .v_off = pd_pool_off(f->pool, j->layer, 1) + (size_t)k->kv_head * head,
        .block_size = g->block_size, .head_dim = c->head_dim, .kv_dtype = g->dtype,
        .q = f->qkv + (size_t)s->row0 * (size_t)f->qkv_dim + (size_t)(k->kv_head * group * c->head_dim), .q_stride = (size_t)f->qkv_dim,
        .out = f->att + (size_t)s->row0 * (size_t)f->q_dim + (size_t)(k->kv_head * group * c->head_dim), .out_stride = (size_t)f->q_dim,
        .n_rows = (int)s->n, .n_group = group, .pos0 = (int)s->pos0, .scale = 1.0f / sqrtf((float)c->head_dim),
    };
}

static size_t part_floats(const struct pd_fwd *f) { return (size_t)(f->c->n_heads / f->c->n_kv_heads) * (size_t)(2 + f->c->head_dim); }

static void attn_task(void *ctx, int task, int tid)
{
    const struct attn_job *j = ctx;
    const struct attn_task *k = &j->f->tasks[task];
    struct pd_attn a;
    attn_args(j, k, &a);
    if (k->seg < 0)
        j->f->k->attn(&a, k->row0, k->row1, scratch_of(j->f, tid));
    else
        j->f->k->attn_seg(&a, k->n_heads, k->seg, j->f->parts + k->part, part_floats(j->f) * (size_t)k->n_segs, scratch_of(j->f, tid));
}

static int add_task(struct pd_fwd *f, size_t *n, struct attn_task t, struct pd_err *e)
{
    if (*n == f->cap_tasks) {
        size_t cap = f->cap_tasks ? f->cap_tasks * 2 : 256;
        void *p = pd_realloc(f->tasks, cap, sizeof *f->tasks, "attention tasks", e);
        if (!p)
            return PD_ENOMEM;
        f->tasks = p;
        f->cap_tasks = cap;
    }
    f->tasks[(*n)++] = t;
    return 0;
}

static int segments(const struct pd_span *s) { return (int)((s->pos0 + s->n + PD_ATTN_SEG - 1) / PD_ATTN_SEG); }

/* Tasks are the same for every layer: tiles of rows for prompts; fixed segments of positions for single rows, so that long contexts spread over threads, all
 * heads in one task where enough tasks remain (they lie together). */
static int plan_attention(struct pd_fwd *f, const struct pd_span *spans, uint32_t n_spans, size_t *n_tasks, struct pd_err *e)
{
    const int n_kv = f->c->n_kv_heads;
    size_t n = 0, floats = 0, per_part = part_floats(f), all = 0, want = 4 * (size_t)pd_threads_count(f->t);
    int rc;
    for (uint32_t i = 0; i < n_spans; i++)
        all += (size_t)segments(&spans[i]);
    const int heads = all >= want ? n_kv : all * (size_t)n_kv > want ? (int)(all * (size_t)n_kv / want) : 1;
    for (uint32_t i = 0; i < n_spans; i++) {
        const int segs = segments(&spans[i]), rows = (int)spans[i].n;
        if (rows == 1 && segs > 1) {
            for (int s = 0; s < segs; s++)
                for (int h = 0; h < n_kv; h += heads)
                    if ((rc = add_task(f, &n, (struct attn_task){ i, h, h + heads < n_kv ? heads : n_kv - h, 0, 1, s, segs,
                                                                  floats + (size_t)(h * segs + s) * per_part }, e)) < 0)
                        return rc;
            floats += (size_t)(n_kv * segs) * per_part;
            continue;
        }
        for (int h = 0; h < n_kv; h++)
            for (int r = 0; r < rows; r += ATTN_TILE)
                if ((rc = add_task(f, &n, (struct attn_task){ i, h, 1, r, r + ATTN_TILE < rows ? r + ATTN_TILE : rows, -1, 0, 0 }, e)) < 0)
                    return rc;
    }
    if (floats > f->n_parts) {
        pd_free(f->parts);
        f->n_parts = 0;
        if (!(f->parts = pd_alloc_aligned((floats + floats / 2) * sizeof(float), "attention partials", e)))
            return PD_ENOMEM;
        f->n_parts = floats + floats / 2;
    }
    *n_tasks = n;
    return 0;
}

static void attention(struct pd_fwd *f, const struct pd_span *spans, int layer, size_t n_tasks)
{
    struct attn_job j = { f, spans, layer };
    pd_threads_run(f->t, (int)n_tasks, attn_task, &j);
    for (size_t i = 0; i < n_tasks; i++) {
        struct attn_task k = f->tasks[i];
        for (int h = 0; k.seg == 0 && h < k.n_heads; h++, k.kv_head++, k.part += (size_t)k.n_segs * part_floats(f)) {
            struct pd_attn a;
            attn_args(&j, &k, &a);
            f->k->attn_merge(&a, f->parts + k.part, k.n_segs);
        }
    }
}

/* --- the feed-forward block ----------------------------------------------------------------------------------------------------------------------- */

struct ffn_job { struct pd_fwd *f; const struct pd_layer_weights *w; const uint8_t *gate_act, *up_act; int rows, per, n_groups; };

/* One group of 32 outputs: y [n][32] of rows r0 .. r0+n-1. */
static void group_product(const struct pd_fwd *f, const struct pd_pmat *w, const uint8_t *act, int group, int r0, int n, float *y, void *scratch)
{
    struct pd_pmat one = *w;
    one.data += (size_t)group * w->group_bytes;
    one.n_out = w->n_out - group * 32 < 32 ? w->n_out - group * 32 : 32;
    one.n_groups = 1;
    f->k->gemm(&one, act + (size_t)r0 * f->k->act_stride(w->pack, w->n_in_pad), n, y, 32, 0, 0, 1, scratch);
}

/* Groups of the block's inner width, through all rows: gate and up stay in the thread's caches, and memory sees only what `down` wants of them. */
static void ffn_task(void *ctx, int task, int tid)
{
    const struct ffn_job *j = ctx;
    const struct pd_kernels *k = j->f->k;
    const struct pd_pmat *down = &j->w->down;
    const size_t part = k->act_part(down->pack), stride = k->act_stride(down->pack, down->n_in_pad);
    float *gate = scratch_of(j->f, tid), *up = gate + FFN_ROWS * 32, *rest = up + FFN_ROWS * 32;
    for (int g = task * j->per; g < (task + 1) * j->per && g < j->n_groups; g++) {
        const int width = down->n_in - g * 32 < 32 ? down->n_in - g * 32 : 32;
        for (int r0 = 0, n; r0 < j->rows; r0 += n) {
            n = j->rows - r0 < FFN_ROWS ? j->rows - r0 : FFN_ROWS;
            group_product(j->f, &j->w->gate, j->gate_act, g, r0, n, gate, rest);
            group_product(j->f, &j->w->up, j->up_act, g, r0, n, up, rest);
            for (int r = 0; r < n; r++) {
                float *h = gate + r * 32;
                k->silu_mul(h, h, up + r * 32, width);
                k->prep(down->pack, h, width, 32, j->f->mid + (size_t)(r0 + r) * stride + (size_t)g * part);
            }
        }
    }
}

static void feed_forward(struct pd_fwd *f, const struct pd_layer_weights *w, int rows)
{
    const size_t d = (size_t)f->c->n_embd;
    struct ffn_job j = { f, w, f->act, f->act, rows, groups_a_task(f, w->gate.n_groups, rows), w->gate.n_groups };
    prep(f, &w->gate, f->x, d, w->ffn_norm, rows, f->act);
    if (act_form(w->gate.pack) != act_form(w->up.pack)) {
        uint8_t *beside = f->act + (size_t)rows * f->k->act_stride(w->gate.pack, w->gate.n_in_pad);
        prep(f, &w->up, f->x, d, w->ffn_norm, rows, beside);
        j.up_act = beside;
    }
    pd_threads_run(f->t, (j.n_groups + j.per - 1) / j.per, ffn_task, &j);
    gemm(f, &w->down, f->mid, rows, f->x, d, 1);
}

/* --- the pass ------------------------------------------------------------------------------------------------------------------------------------- */

int pd_forward(struct pd_fwd *f, struct pd_span *spans, uint32_t n_spans, bool (*layer_done)(void *ctx, int layer), void *ctx, float **logits, struct pd_err *e)
{
    const struct pd_config *c = f->c;
    uint32_t rows = 0, n_logits = 0, end = 0;
    for (uint32_t i = 0; i < n_spans; i++) {
        spans[i].row0 = rows;
        rows += spans[i].n;
        n_logits += spans[i].want_logits == 2 ? spans[i].n : spans[i].want_logits == 1;
        end = spans[i].pos0 + spans[i].n > end ? spans[i].pos0 + spans[i].n : end;
    }
    if (end > (uint32_t)c->n_ctx)
        return pd_fail(e, PD_EFAIL, "position %u is past the model's context of %d tokens", end - 1, c->n_ctx);
    if (rows > f->max_rows || n_logits > f->max_logits)
        return pd_fail(e, PD_EFAIL, "a step of %u rows (%u logits) exceeds the engine's %u (%u)", rows, n_logits, f->max_rows, f->max_logits);
    size_t n_attn;
    int R = (int)rows, rc = grow_rope(f, end, e);
    if (rc < 0 || (rc = plan_attention(f, spans, n_spans, &n_attn, e)) < 0)
        return rc;

    for (uint32_t i = 0; i < n_spans; i++)
        for (uint32_t r = 0; r < spans[i].n; r++)
            pd_model_embed(f->m, spans[i].tokens[r], f->x + (size_t)(spans[i].row0 + r) * (size_t)c->n_embd);

    for (int l = 0; l < c->n_layers; l++) {
        const struct pd_layer_weights *w = &f->m->layer[l];

        gemm_parts(f, w->qkv, w->n_qkv, f->x, w->attn_norm, R, f->qkv, (size_t)f->qkv_dim);
        struct rope_job rj = { f, spans, n_spans, l, rows_a_task(f, R, 8), R };
        if (R <= 4)
            for (int t = 0; t * rj.per < R; t++)
                rope_task(&rj, t, 0);
        else
            pd_threads_run(f->t, (R + rj.per - 1) / rj.per, rope_task, &rj);
        if (layer_done && !layer_done(ctx, l))
            return 1;
        attention(f, spans, l, n_attn);
        prep(f, &w->o, f->att, (size_t)f->q_dim, NULL, R, f->act);
        gemm(f, &w->o, f->act, R, f->x, (size_t)c->n_embd, 1);

        feed_forward(f, w, R);
    }

    /* Only the rows that are asked for go through the head. */
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_spans; i++) {
        uint32_t from = spans[i].want_logits == 2 ? 0 : spans[i].want_logits == 1 ? spans[i].n - 1 : spans[i].n;
        for (uint32_t r = from; r < spans[i].n; r++, n++)
            memcpy(f->picked + (size_t)n * (size_t)c->n_embd, f->x + (size_t)(spans[i].row0 + r) * (size_t)c->n_embd, sizeof(float) * (size_t)c->n_embd);
    }
    if (n) {
        prep(f, &f->m->head, f->picked, (size_t)c->n_embd, f->m->out_norm, (int)n, f->act);
        gemm(f, &f->m->head, f->act, (int)n, f->logits, (size_t)c->n_vocab, 0);
    }
    *logits = f->logits;
    return 0;
}

static void widest(const struct pd_fwd *f, const struct pd_pmat *w, size_t *act, size_t *scratch)
{
    size_t a = f->k->act_stride(w->pack, w->n_in_pad), s = f->k->gemm_scratch(w);
    if (a > *act)
        *act = a;
    if (s > *scratch)
        *scratch = s;
}

int pd_fwd_new(const struct pd_model *m, struct pd_threads *t, const struct pd_kernels *k, const struct pd_pool *pool, uint32_t max_rows, uint32_t max_logits,
               struct pd_fwd **out, struct pd_err *e)
{
    const struct pd_config *c = &m->cfg;
    struct pd_fwd *f = pd_calloc(1, sizeof *f, "forward pass", e);
    if (!f)
        return PD_ENOMEM;
    *f = (struct pd_fwd){ .m = m, .c = c, .t = t, .k = k, .pool = pool, .max_rows = max_rows, .max_logits = max_logits };
    f->q_dim = c->n_heads * c->head_dim;
    f->kv_dim = c->n_kv_heads * c->head_dim;
    f->qkv_dim = f->q_dim + 2 * f->kv_dim;
    size_t act = 0, mid = 0, scratch = 0, attn = k->attn_scratch(c->head_dim, c->n_heads / c->n_kv_heads, c->n_kv_heads);
    for (int l = 0; l < c->n_layers; l++) {
        const struct pd_layer_weights *w = &m->layer[l];
        for (int i = 0; i < w->n_qkv; i++)
            widest(f, &w->qkv[i], &act, &scratch);
        widest(f, &w->gate, &act, &scratch);
        widest(f, &w->up, &act, &scratch);
        if (act_form(w->gate.pack) != act_form(w->up.pack)) {       /* side by side */
            size_t both = k->act_stride(w->gate.pack, w->gate.n_in_pad) + k->act_stride(w->up.pack, w->up.n_in_pad);
            act = both > act ? both : act;
        }
        widest(f, &w->o, &act, &scratch);
        widest(f, &w->down, &mid, &scratch);
    }
    widest(f, &m->head, &act, &scratch);
    scratch += 2 * FFN_ROWS * 32 * sizeof(float);
    f->scratch_bytes = ((scratch > attn ? scratch : attn) + 127) & ~(size_t)63;
    size_t n = max_rows, d = (size_t)c->n_embd;
    size_t h = n > max_logits ? n : max_logits;
    if (!(f->x = pd_alloc_aligned(n * d * 4, "activations", e)) || !(f->h = pd_alloc_aligned(h * d * 4, "activations", e)) ||
        !(f->qkv = pd_alloc_aligned(n * (size_t)f->qkv_dim * 4, "activations", e)) || !(f->att = pd_alloc_aligned(n * (size_t)f->q_dim * 4, "activations", e)) ||
        !(f->picked = pd_alloc_aligned((size_t)max_logits * d * 4, "activations", e)) || !(f->act = pd_alloc_aligned(h * act, "activations", e)) ||
        !(f->mid = pd_alloc_aligned(n * mid, "activations", e)) ||
        !(f->logits = pd_alloc_aligned((size_t)max_logits * (size_t)c->n_vocab * 4, "logits", e)) ||
        !(f->scratch = pd_alloc_aligned((size_t)pd_threads_count(t) * f->scratch_bytes, "scratch", e)))
        goto out;
    *out = f;
    return 0;
out:
    pd_fwd_free(f);
    return PD_ENOMEM;
}

void pd_fwd_free(struct pd_fwd *f)
{
    if (!f)
        return;
    void *all[] = { f->x, f->h, f->qkv, f->att, f->picked, f->act, f->mid, f->logits, f->scratch, f->rope, f->parts, f->tasks };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        pd_free(all[i]);
    pd_free(f);
}
