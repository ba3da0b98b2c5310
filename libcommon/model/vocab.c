#include "vocab.h"
#include <stdio.h>

#define VOCAB_MAX (1 << 24)     /* far above any real vocabulary; keeps ids, sizes and 24-bit arithmetic safe */

const char *pd_piece_show(const char *p, size_t n, char out[64])
{
    size_t o = 0;
    out[o++] = '"';
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)p[i];
        if (o > 52) {
            o += (size_t)sprintf(out + o, "...");
            break;
        }
        if (c < 0x20 || c == 0x7f || c == '"' || c == '\\')
            o += (size_t)sprintf(out + o, "\\x%02x", c);
        else
            out[o++] = (char)c;
    }
    out[o++] = '"';
    out[o] = 0;
    return out;
}

int32_t pd_vocab_find(const struct pd_vocab *v, const char *p, size_t n)
{
    if (!n || n > v->max_len)
        return -1;
    uint64_t h = pd_xxh3(p, n, 0);
    for (uint64_t i = h & v->mask; ; i = (i + 1) & v->mask) {
        const struct pd_vocab_slot *s = &v->slot[i];
        if (s->id < 0)
            return -1;
        if (s->tag == (uint32_t)(h >> 32) && v->off[s->id + 1] - v->off[s->id] == n && !memcmp(v->text + v->off[s->id], p, n))
            return s->id;
    }
}

static int insert(struct pd_vocab *v, int32_t id, struct pd_err *e)
{
    struct pd_str piece = pd_vocab_piece(v, id);
    uint64_t h = pd_xxh3(piece.p, piece.n, 0), i = h & v->mask;
    for (; v->slot[i].id >= 0; i = (i + 1) & v->mask) {
        int32_t other = v->slot[i].id;
        struct pd_str o = pd_vocab_piece(v, other);
        if (v->slot[i].tag == (uint32_t)(h >> 32) && o.n == piece.n && !memcmp(o.p, piece.p, o.n)) {
            char show[64];
            return pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.tokens: %s stands at %d and again at %d; a vocabulary must not repeat a piece, convert the model anew",
                           pd_piece_show(piece.p, piece.n, show), other, id);
        }
    }
    v->slot[i] = (struct pd_vocab_slot){ (uint32_t)(h >> 32), id };
    return 0;
}

int pd_vocab_init(struct pd_vocab *v, const struct pd_str *piece, size_t n, const int32_t *types, struct pd_err *e)
{
    *v = (struct pd_vocab){ 0 };
    if (n < 1 || n > VOCAB_MAX)
        return pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.tokens: %zu pieces (1 to %d are possible)", n, VOCAB_MAX);
    size_t bytes = 0, slots = 2;
    for (size_t i = 0; i < n; i++) {
        if (!pd_add_size(bytes, piece[i].n, &bytes))
            return pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.tokens: the sizes of its pieces overflow");
        if (types && (types[i] < 0 || types[i] > PD_PIECE_BYTE))
            return pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.token_type[%zu] is %d (0 to 6 are known)", i, types[i]);
    }
    while (slots < 2 * n)
        slots *= 2;

    int r = PD_ENOMEM;
    if (!(v->off = pd_calloc(n + 1, sizeof *v->off, "vocabulary offsets", e)) || !(v->text = pd_calloc(bytes, 1, "vocabulary text", e)) ||
        !(v->type = pd_calloc(n, 1, "vocabulary types", e)) || !(v->slot = pd_calloc(slots, sizeof *v->slot, "vocabulary index", e)))
        goto out;
    v->n = (int32_t)n;
    v->mask = slots - 1;
    memset(v->slot, 0xff, slots * sizeof *v->slot);
    for (size_t i = 0; i < n; i++) {
        v->off[i + 1] = v->off[i] + piece[i].n;
        if (piece[i].n)
            memcpy(v->text + v->off[i], piece[i].p, piece[i].n);
        v->type[i] = types && types[i] ? (uint8_t)types[i] : PD_PIECE_NORMAL;
        if (piece[i].n > v->max_len)
            v->max_len = piece[i].n;
    }
    for (int32_t id = 0; id < v->n; id++)
        if (v->off[id + 1] > v->off[id] && (r = insert(v, id, e)))
            goto out;
    return 0;
out:
    pd_vocab_free(v);
    return r;
}

void pd_vocab_free(struct pd_vocab *v)
{
    pd_free(v->off);
    pd_free(v->text);
    pd_free(v->type);
    pd_free(v->slot);
    *v = (struct pd_vocab){ 0 };
}
