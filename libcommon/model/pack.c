#include <stdatomic.h>
#include <inttypes.h>
#include "pack.h"

#define GROUP 32                        /* outputs side by side */
#define TASK_BYTES (512u << 10)         /* packed bytes a task, about */

static uint16_t load16(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return v; }
static uint32_t load32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static uint64_t load64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }
static void store16(uint8_t *p, uint16_t v) { memcpy(p, &v, 2); }
static void store32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }

/* --- what may not be packed --- */

static bool all_finite(const uint8_t *p, size_t n, const struct pd_dtype_traits *ty)
{
    unsigned bad = 0;
    if (ty->id == PD_F32) {
        for (size_t i = 0; i < n; i++)
            bad |= (load32(p + 4 * i) & 0x7f800000) == 0x7f800000;
    } else if (ty->id == PD_BF16) {
        for (size_t i = 0; i < n; i++)
            bad |= (load16(p + 2 * i) & 0x7f80) == 0x7f80;
    } else if (ty->id == PD_F16) {
        for (size_t i = 0; i < n; i++)
            bad |= (load16(p + 2 * i) & 0x7c00) == 0x7c00;
    } else {
        /* The halves of a block: scale first, then the minimum if there is one; Q6_K has its scale last. */
        size_t first = ty->id == PD_Q6_K ? 208 : 0, second = ty->form.has_min ? 2 : first;
        for (const uint8_t *end = p + n / (size_t)ty->block * (size_t)ty->block_bytes; p < end; p += ty->block_bytes)
            bad |= (load16(p + first) & 0x7c00) == 0x7c00 || (load16(p + second) & 0x7c00) == 0x7c00;
    }
    return !bad;
}

/* --- one group: up to 32 rows, `stride` bytes apart, into m->group_bytes at dst --- */

/* 32-bit elements (a float, a pair of bf16): each k of all 32 rows side by side. Sixteen k at a time, so that what is written stays near. */
static void pack_words(uint8_t *dst, const uint8_t *src, size_t stride, int rows, int n)
{
    for (int k0 = 0; k0 < n; k0 += 16) {
        int k1 = k0 + 16 < n ? k0 + 16 : n;
        for (int r = 0; r < rows; r++)
            for (int k = k0; k < k1; k++)
                store32(dst + ((size_t)k * GROUP + (size_t)r) * 4, load32(src + (size_t)r * stride + 4 * (size_t)k));
    }
}

static void pack_halves(uint8_t *dst, const uint8_t *src, size_t stride, int rows, int n)
{
    for (int k0 = 0; k0 < n; k0 += 16) {
        int k1 = k0 + 16 < n ? k0 + 16 : n;
        for (int r = 0; r < rows; r++)
            for (int k = k0; k < k1; k++)
                store16(dst + ((size_t)k * GROUP + (size_t)r) * 2, load16(src + (size_t)r * stride + 2 * (size_t)k));
    }
}

/* Q4_0, Q4_1. Stored byte j holds weights j and j + 16; packed byte i of an octet holds 8t + i and 8t + 4 + i. `halves`: 1 or 2 before the nibbles. */
static void pack_q4(uint8_t *dst, const uint8_t *src, size_t stride, int rows, int n_blocks, int halves)
{
    const uint64_t nib = 0x0f0f0f0f0f0f0f0full;
    size_t block = 16 + 2 * (size_t)halves, sub_bytes = 512 + 64 * (size_t)halves;
    for (int b = 0; b < n_blocks; b++, dst += sub_bytes, src += block)
        for (int r = 0; r < rows; r++) {
            const uint8_t *p = src + (size_t)r * stride;
            uint8_t *q = dst + 4 * r;
            uint64_t x = load64(p + 2 * halves), y = load64(p + 2 * halves + 8);
            uint64_t a = x & nib, c = x >> 4 & nib, b1 = y & nib, d = y >> 4 & nib;
            store32(q, (uint32_t)(a | a >> 28));
            store32(q + 128, (uint32_t)(b1 | b1 >> 28));
            store32(q + 256, (uint32_t)(c | c >> 28));
            store32(q + 384, (uint32_t)(d | d >> 28));
            store16(dst + 512 + 2 * r, load16(p));
            if (halves == 2)
                store16(dst + 576 + 2 * r, load16(p + 2));
        }
}

static void pack_q8_0(uint8_t *dst, const uint8_t *src, size_t stride, int rows, int n_blocks)
{
    for (int b = 0; b < n_blocks; b++, dst += 1024 + 64, src += 34)
        for (int r = 0; r < rows; r++) {
            const uint8_t *p = src + (size_t)r * stride;
            for (int t = 0; t < 8; t++)
                store32(dst + 128 * t + 4 * r, load32(p + 2 + 4 * t) ^ 0x80808080);     /* int8 + 128 */
            store16(dst + 1024 + 2 * r, load16(p));
        }
}

/* Any quantised type through its integer form. */
static void pack_unpacked(const struct pd_pmat *m, const struct pd_dtype_traits *ty, uint8_t *dst, const uint8_t *src, size_t stride, int rows)
{
    uint8_t u[256];
    float scale[16], min[16];
    int quads = m->sub / 4, subs = ty->block / m->sub;
    size_t plane = GROUP * 4, elem = m->scale_f32 ? 4 : 2;
    size_t ints = plane * (size_t)(m->pack == PD_PK_U4 ? quads / 2 : quads), sub_bytes = ints + GROUP * elem * (m->has_min ? 2 : 1);
    for (int b = 0; b < m->n_in / ty->block; b++, src += ty->block_bytes, dst += sub_bytes * (size_t)subs)
        for (int r = 0; r < rows; r++) {
            const uint8_t *p = src + (size_t)r * stride;
            ty->unpack(p, u, scale, min);
            for (int s = 0; s < subs; s++) {
                uint8_t *q = dst + sub_bytes * (size_t)s, *d = q + ints + elem * (size_t)r;
                const uint8_t *v = u + s * m->sub;
                if (m->pack == PD_PK_U4)
                    for (int t = 0; t < quads / 2; t++)
                        store32(q + plane * (size_t)t + 4 * r, load32(v + 8 * t) | load32(v + 8 * t + 4) << 4);
                else
                    for (int t = 0; t < quads; t++)
                        store32(q + plane * (size_t)t + 4 * r, load32(v + 4 * t));
                if (m->scale_f32) {
                    memcpy(d, &scale[s], 4);
                    if (m->has_min)
                        memcpy(d + GROUP * elem, &min[s], 4);
                } else {            /* halves are stored first in these types, and are copied, not converted */
                    memcpy(d, p, 2);
                    if (m->has_min)
                        memcpy(d + GROUP * elem, p + 2, 2);
                }
            }
        }
}

static size_t row_bytes(const struct pd_gguf_tensor *t)
{
    const struct pd_dtype_traits *ty = pd_dtype_traits(t->type);
    return (size_t)t->ne[0] / (size_t)ty->block * (size_t)ty->block_bytes;
}

/* Group g of a matrix from its rows as they are stored. */
static void pack_group(const struct pd_pmat *m, int g, const struct pd_gguf_tensor *t, const uint8_t *src, int rows)
{
    size_t stride = row_bytes(t);
    uint8_t *dst = m->data + (size_t)g * m->group_bytes;
    if (rows < GROUP || m->n_in < m->n_in_pad)
        memset(dst, 0, m->group_bytes);
    switch (t->type) {
    case PD_F32: pack_words(dst, src, stride, rows, m->n_in); break;
    case PD_BF16: pack_words(dst, src, stride, rows, m->n_in / 2); break;
    case PD_F16: pack_halves(dst, src, stride, rows, m->n_in); break;
    case PD_Q4_0: pack_q4(dst, src, stride, rows, m->n_in / 32, 1); break;
    case PD_Q4_1: pack_q4(dst, src, stride, rows, m->n_in / 32, 2); break;
    case PD_Q8_0: pack_q8_0(dst, src, stride, rows, m->n_in / 32); break;
    default: pack_unpacked(m, pd_dtype_traits(t->type), dst, src, stride, rows);
    }
}

static float load_f32(const uint8_t *p) { float f; memcpy(&f, p, 4); return f; }

void pd_pack_row(const struct pd_pmat *m, int o, float *out)
{
    const uint8_t *p = m->data + (size_t)(o / GROUP) * m->group_bytes;
    size_t lane = (size_t)(o % GROUP), elem = m->scale_f32 ? 4 : 2, sub = (size_t)m->sub;
    if (m->pack == PD_PK_F32 || m->pack == PD_PK_F16 || m->pack == PD_PK_BF16) {
        for (size_t k = 0; k < (size_t)m->n_in; k++)
            out[k] = m->pack == PD_PK_F32 ? load_f32(p + (k * GROUP + lane) * 4) : m->pack == PD_PK_F16 ? pd_half_to_float(load16(p + (k * GROUP + lane) * 2))
                                          : pd_bf16_to_float(load16(p + (k / 2 * GROUP + lane) * 4 + k % 2 * 2));
        return;
    }
    size_t ints = sub * GROUP / (m->pack == PD_PK_U4 ? 2 : 1), step = ints + GROUP * elem * (m->has_min ? 2 : 1);
    for (size_t k = 0; k < (size_t)m->n_in; k += sub, p += step) {
        const uint8_t *d = p + ints + lane * elem, *min = d + GROUP * elem;
        float scale = m->scale_f32 ? load_f32(d) : pd_half_to_float(load16(d)), base = !m->has_min ? 0 : m->scale_f32 ? load_f32(min) : pd_half_to_float(load16(min));
        for (size_t r = 0; r < sub; r++) {
            int u = m->pack == PD_PK_U4 ? p[r / 8 * 128 + lane * 4 + r % 4] >> (r % 8 / 4 * 4) & 15 : p[r / 4 * 128 + lane * 4 + r % 4];
            out[k + r] = scale * (float)(u - m->off);
            if (m->has_min)
                out[k + r] += base;         /* adding 0 would lose the sign of a zero */
        }
    }
}

/* --- shapes --- */

bool pd_pack_joins(const struct pd_gguf_tensor *a, const struct pd_gguf_tensor *b)
{
    return a->type == b->type && a->ne[0] == b->ne[0] && a->ne[1] % GROUP == 0;        /* no two types share a form */
}

int pd_pack_shape(const struct pd_pack_job *job, struct pd_err *e)
{
    const struct pd_gguf_tensor *t = job->src[0];
    const struct pd_dtype_traits *ty = pd_dtype_traits(t->type);
    struct pd_pmat *m = job->m;
    uint64_t n_out = 0;
    for (int i = 0; i < job->n_src; i++) {
        const struct pd_gguf_tensor *s = job->src[i];
        if (s->ne[0] % 16 || s->ne[0] > 1 << 24 || s->ne[1] > 1 << 24 || s->ne[2] != 1 || s->ne[3] != 1 || (i && !pd_pack_joins(job->src[i - 1], s)))
            return pd_fail(e, PD_EINCOMPAT, "tensor '%s' (%" PRIu64 " x %" PRIu64 ") cannot be packed: rows must be a multiple of 16 elements", pd_gguf_show(s->name).s, s->ne[0], s->ne[1]);
        n_out += s->ne[1];
    }
    *m = (struct pd_pmat){ .n_out = (int)n_out, .n_in = (int)t->ne[0], .n_in_pad = ((int)t->ne[0] + 31) / 32 * 32, .n_groups = (int)((n_out + GROUP - 1) / GROUP),
                           .sub = ty->form.sub, .off = ty->form.off, .scale_f32 = ty->quantised && !ty->form.scale_f16, .has_min = ty->form.has_min };
    size_t k = (size_t)m->n_in_pad;
    if (!ty->quantised) {
        m->pack = ty->id == PD_F32 ? PD_PK_F32 : ty->id == PD_F16 ? PD_PK_F16 : PD_PK_BF16;
        m->group_bytes = GROUP * k * pd_dtype_size(ty->id);
    } else {
        m->pack = ty->form.four_bit ? PD_PK_U4 : PD_PK_U8;
        m->group_bytes = GROUP * k / (ty->form.four_bit ? 2 : 1) + k / (size_t)m->sub * GROUP * (m->scale_f32 ? 4 : 2) * (m->has_min ? 2 : 1);
    }
    return 0;
}

/* --- all of them, in parallel --- */

struct task { const struct pd_pack_job *job; int g0, g1; };
struct work { const struct pd_gguf *g; struct task *task; uint8_t *buf; size_t buf_bytes; atomic_bool failed; struct pd_err err; };   /* buf [threads]; err: of the first that failed */

static int not_finite(const struct work *w, const struct pd_gguf_tensor *t, uint64_t at, const uint8_t *p, size_t n, struct pd_err *e)
{
    const struct pd_dtype_traits *ty = pd_dtype_traits(t->type);
    size_t i = 0;
    while (i + (size_t)ty->block < n && all_finite(p + i / (size_t)ty->block * (size_t)ty->block_bytes, (size_t)ty->block, ty))
        i += (size_t)ty->block;
    return pd_fail(e, PD_ECORRUPT, "%s: tensor '%s' holds a %s that is not finite at byte %" PRIu64 ": the file is damaged or was converted wrongly", w->g->path, pd_gguf_show(t->name).s,
                   ty->quantised ? "scale" : "weight", at + i / (size_t)ty->block * (size_t)ty->block_bytes);
}

/* Groups [g0, g1), those of one tensor at a time. */
static int pack_groups(const struct work *w, const struct task *t, uint8_t *buf, struct pd_err *e)
{
    for (int g = t->g0; g < t->g1; ) {
        uint64_t row = (uint64_t)g * GROUP;
        int s = 0, rc;
        while (row >= t->job->src[s]->ne[1])
            row -= t->job->src[s++]->ne[1];
        const struct pd_gguf_tensor *src = t->job->src[s];
        uint64_t rows = src->ne[1] - row, most = (uint64_t)(t->g1 - g) * GROUP;
        size_t stride = row_bytes(src);
        rows = rows < most ? rows : most;
        if ((rc = pd_gguf_read(w->g, src->at + row * stride, buf, rows * stride, e)))
            return rc;
        if (!all_finite(buf, rows * src->ne[0], pd_dtype_traits(src->type)))
            return not_finite(w, src, src->at + row * stride, buf, rows * src->ne[0], e);
        for (uint64_t r = 0; r < rows; r += GROUP, g++)
            pack_group(t->job->m, g, src, buf + r * stride, (int)(rows - r < GROUP ? rows - r : GROUP));
    }
    return 0;
}

static void run_task(void *ctx, int i, int tid)
{
    struct work *w = ctx;
    struct pd_err e;
    if (!atomic_load(&w->failed) && pack_groups(w, &w->task[i], w->buf + (size_t)tid * w->buf_bytes, &e) && !atomic_exchange(&w->failed, true))
        w->err = e;
}

static int groups_a_task(const struct pd_pack_job *j) { return j->m->group_bytes >= TASK_BYTES ? 1 : (int)(TASK_BYTES / j->m->group_bytes); }

int pd_pack_run(const struct pd_gguf *g, const struct pd_pack_job *jobs, int n_jobs, struct pd_threads *threads, struct pd_err *e)
{
    struct work w = { .g = g };
    size_t n_threads = threads ? (size_t)pd_threads_count(threads) : 1;
    int n = 0, rc = PD_ENOMEM;
    for (int j = 0; j < n_jobs; j++) {
        size_t bytes = (size_t)groups_a_task(&jobs[j]) * GROUP * row_bytes(jobs[j].src[0]);     /* joined tensors have rows of one length */
        w.buf_bytes = bytes > w.buf_bytes ? bytes : w.buf_bytes;
        n += (jobs[j].m->n_groups + groups_a_task(&jobs[j]) - 1) / groups_a_task(&jobs[j]);
    }
    w.buf_bytes = (w.buf_bytes + 63) / 64 * 64;
    if (!(w.task = pd_calloc((size_t)n, sizeof *w.task, "packing tasks", e)) || !(w.buf = pd_alloc_aligned(n_threads * w.buf_bytes, "weights as they are read", e)))
        goto out;
    n = 0;
    for (int j = 0; j < n_jobs; j++) {
        int all = jobs[j].m->n_groups, step = groups_a_task(&jobs[j]);
        for (int i = 0; i < all; i += step)
            w.task[n++] = (struct task){ &jobs[j], i, i + step < all ? i + step : all };
    }
    if (threads)
        pd_threads_run(threads, n, run_task, &w);
    else
        for (int i = 0; i < n; i++)
            run_task(&w, i, 0);
    rc = 0;
    if (atomic_load(&w.failed)) {
        rc = w.err.code;
        if (e)
            *e = w.err;
    }
out:
    pd_free(w.task);
    pd_free(w.buf);
    return rc;
}
