#include "spm.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "../base/utf8.h"

static const char SPACE[] = "\xe2\x96\x81";     /* U+2581 */
#define SPACE_LEN 3

struct scored { float score; int32_t id; };

static int by_score(const void *a, const void *b)
{
    const struct scored *x = a, *y = b;
    return x->score > y->score ? -1 : x->score < y->score ? 1 : (x->id > y->id) - (x->id < y->id);
}

/* "<0xAB>" -> 0xAB, else -1 */
static int byte_of(struct pd_str p)
{
    static const char digits[] = "0123456789ABCDEF";
    if (p.n != 6 || memcmp(p.p, "<0x", 3) || p.p[5] != '>' || !p.p[3] || !p.p[4])
        return -1;
    const char *hi = strchr(digits, p.p[3]), *lo = strchr(digits, p.p[4]);
    return hi && lo ? (int)(hi - digits) * 16 + (int)(lo - digits) : -1;
}

int pd_spm_init(struct pd_spm *s, const struct pd_vocab *v, const float *scores, struct pd_err *e)
{
    *s = (struct pd_spm){ .vocab = v };
    memset(s->byte_id, 0xff, sizeof s->byte_id);
    int r = PD_ENOMEM;
    size_t n = 0;
    struct scored *order = pd_calloc((size_t)v->n, sizeof *order, "scores", e);
    if (!order || !(s->rank = pd_calloc((size_t)v->n, sizeof *s->rank, "scores", e)))
        goto out;
    for (int32_t id = 0; id < v->n; id++) {
        s->rank[id] = PD_NO_RANK;
        if (isnan(scores[id])) {
            r = pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.scores[%d] is not a number", id);
            goto out;
        }
        if (v->type[id] == PD_PIECE_NORMAL)
            order[n++] = (struct scored){ scores[id], id };
        if (v->type[id] == PD_PIECE_BYTE) {
            int byte = byte_of(pd_vocab_piece(v, id));
            char show[64];
            if (byte < 0) {
                struct pd_str p = pd_vocab_piece(v, id);
                r = pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.tokens[%d]: %s is marked a byte token but is not of the form <0xAB>", id, pd_piece_show(p.p, p.n, show));
                goto out;
            }
            s->byte_id[byte] = id;
        }
    }
    qsort(order, n, sizeof *order, by_score);
    for (size_t i = 0; i < n; i++)
        s->rank[order[i].id] = i && order[i].score == order[i - 1].score ? s->rank[order[i - 1].id] : (uint32_t)i;
    r = 0;
out:
    pd_free(order);
    if (r)
        pd_spm_free(s);
    return r;
}

void pd_spm_free(struct pd_spm *s)
{
    pd_free(s->rank);
    s->rank = NULL;
}

void pd_spm_call_free(struct pd_spm_call *c)
{
    pd_merger_free(&c->m);
    pd_buf_free(&c->norm);
}

struct pair_ctx { const struct pd_spm *s; const char *text; };

static inline void pair(const void *ctx, struct pd_sym *a, const struct pd_sym *next)
{
    const struct pair_ctx *p = ctx;
    a->rank = PD_NO_RANK;
    int32_t id = pd_vocab_find(p->s->vocab, p->text + a->off, (size_t)a->len + next->len);
    if (id >= 0) {
        a->rank = p->s->rank[id];
        a->made = id;
    }
}

static int put(struct pd_buf *ids, int32_t id, struct pd_err *e)
{
    return pd_buf_add(ids, &id, sizeof id, e);
}

static int put_bytes(const struct pd_spm *s, const char *p, size_t n, struct pd_buf *ids, struct pd_err *e)
{
    int r = 0;
    for (size_t i = 0; i < n && !r; i++) {
        int32_t id = s->byte_id[(uint8_t)p[i]];
        if (id < 0)
            return pd_fail(e, PD_EFAIL, "the vocabulary has neither a token for the character '%.*s' nor for its byte 0x%02x; take that character out",
                           (int)n, p, (uint8_t)p[i]);
        r = put(ids, id, e);
    }
    return r;
}

int pd_spm_encode(const struct pd_spm *s, struct pd_spm_call *c, const char *text, size_t at, size_t end, bool prefix, struct pd_buf *ids, struct pd_err *e)
{
    c->norm.n = 0;
    size_t spaces = prefix;
    for (size_t i = at; i < end; i++)
        spaces += text[i] == ' ';
    size_t chars = 0;
    int r = pd_buf_reserve(&c->norm, end - at + spaces * (SPACE_LEN - 1) + SPACE_LEN, e);
    if (r)
        return r;
    char *o = (char *)c->norm.p;
    if (prefix) {
        memcpy(o, SPACE, SPACE_LEN);
        o += SPACE_LEN;
    }
    for (size_t i = at; i < end; i++) {
        if (text[i] == ' ') {
            memcpy(o, SPACE, SPACE_LEN);
            o += SPACE_LEN;
        } else {
            *o++ = text[i];
        }
        chars += ((uint8_t)text[i] & 0xc0) != 0x80;
    }
    c->norm.n = (size_t)(o - (char *)c->norm.p);
    chars += prefix;
    if (!chars)
        return 0;

    if ((r = pd_merger_room(&c->m, chars, e)))
        return r;
    const char *norm = (const char *)c->norm.p;
    struct pd_sym *sym = c->m.sym;
    size_t n = 0;
    for (size_t i = 0; i < c->norm.n; ) {
        uint32_t cp;
        int len = pd_utf8_next(norm + i, c->norm.n - i, &cp);
        int32_t id = pd_vocab_find(s->vocab, norm + i, (size_t)len);
        sym[n++] = (struct pd_sym){ .id = id >= 0 && s->rank[id] != PD_NO_RANK ? id : -1, .off = (uint32_t)i, .len = (uint32_t)len };
        i += (size_t)len;
    }
    struct pair_ctx ctx = { s, norm };
    if ((r = pd_merge(&c->m, n, pair, &ctx, e)))
        return r;
    for (int32_t i = 0; i >= 0; i = sym[i].next)
        if ((r = sym[i].id >= 0 ? put(ids, sym[i].id, e) : put_bytes(s, norm + sym[i].off, sym[i].len, ids, e)))
            return r;
    return 0;
}

int pd_spm_decode(const struct pd_spm *s, int32_t id, struct pd_buf *out, struct pd_err *e)
{
    struct pd_str p = pd_vocab_piece(s->vocab, id);
    if (s->vocab->type[id] == PD_PIECE_BYTE) {
        uint8_t byte = (uint8_t)byte_of(p);
        return pd_buf_add(out, &byte, 1, e);
    }
    int r = pd_buf_reserve(out, p.n, e);
    if (r)
        return r;
    for (size_t i = 0; i < p.n; ) {
        if (p.n - i >= SPACE_LEN && !memcmp(p.p + i, SPACE, SPACE_LEN)) {
            out->p[out->n++] = ' ';
            i += SPACE_LEN;
        } else {
            out->p[out->n++] = (uint8_t)p.p[i++];
        }
    }
    return 0;
}
