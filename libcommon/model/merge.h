/* The merge loop that both tokenizers share: symbols in a linked list, candidates in a heap, the best first and of equals the leftmost, until no two
 * neighbours make a piece. O(n log n) in the number of symbols. What a pair makes, and how good it is, comes from the caller (inlined). */
#ifndef PD_MODEL_MERGE_H
#define PD_MODEL_MERGE_H
#include "../base/mem.h"

#define PD_NO_RANK UINT32_MAX

struct pd_sym {
    int32_t id;             /* -1: no piece of its own (SentencePiece only) */
    int32_t prev, next;     /* -1: end */
    uint32_t rank;          /* of the pair (this, next); PD_NO_RANK: they do not merge */
    int32_t made;           /* what that pair makes */
    uint32_t off, len;      /* bytes of the text */
};

/* One call's memory, reused from word to word. */
struct pd_merger {
    struct pd_sym *sym; size_t sym_cap;
    uint64_t *heap; size_t heap_n, heap_cap;        /* rank << 32 | position: the smallest is the next to merge */
};

/* Sets a->rank and a->made for the pair (a, b). */
typedef void pd_pair_fn(const void *ctx, struct pd_sym *a, const struct pd_sym *b);

static inline void pd_heap_down(uint64_t *h, size_t n, size_t i, uint64_t x)
{
    for (size_t c; (c = 2 * i + 1) < n; i = c) {
        if (c + 1 < n && h[c + 1] < h[c])
            c++;
        if (h[c] >= x)
            break;
        h[i] = h[c];
    }
    h[i] = x;
}

static inline void pd_heap_push(struct pd_merger *m, uint64_t x)
{
    size_t i = m->heap_n++;
    for (size_t p; i && m->heap[p = (i - 1) / 2] > x; i = p)
        m->heap[i] = m->heap[p];
    m->heap[i] = x;
}

static inline int pd_merger_room(struct pd_merger *m, size_t n, struct pd_err *e)
{
    if (n <= m->sym_cap)
        return 0;
    size_t cap = m->sym_cap ? m->sym_cap : 64;
    while (cap < n)
        cap *= 2;
    struct pd_sym *s = pd_realloc(m->sym, cap, sizeof *s, "tokenizer symbols", e);
    if (!s)
        return PD_ENOMEM;
    m->sym = s;
    m->sym_cap = cap;
    return 0;
}

static inline void pd_merger_free(struct pd_merger *m)
{
    pd_free(m->sym);
    pd_free(m->heap);
}

/* m->sym[0..n) hold id, off and len; afterwards symbol 0 heads the list of what is left. */
static inline __attribute__((always_inline)) int pd_merge(struct pd_merger *m, size_t n, pd_pair_fn *pair, const void *ctx, struct pd_err *e)
{
    struct pd_sym *s = m->sym;
    /* A merge takes one candidate out and brings two at most, and there are n - 1 merges at most. */
    if (m->heap_cap < 2 * n) {
        uint64_t *h = pd_realloc(m->heap, 2 * m->sym_cap, sizeof *h, "tokenizer heap", e);
        if (!h)
            return PD_ENOMEM;
        m->heap = h;
        m->heap_cap = 2 * m->sym_cap;
    }
    m->heap_n = 0;
    for (size_t i = 0; i < n; i++) {
        s[i].prev = (int32_t)i - 1;
        s[i].next = i + 1 < n ? (int32_t)i + 1 : -1;
        s[i].rank = PD_NO_RANK;
        if (i + 1 < n)
            pair(ctx, &s[i], &s[i + 1]);
        if (s[i].rank != PD_NO_RANK)
            m->heap[m->heap_n++] = (uint64_t)s[i].rank << 32 | i;
    }
    for (size_t i = m->heap_n / 2; i-- > 0; )
        pd_heap_down(m->heap, m->heap_n, i, m->heap[i]);
    while (m->heap_n) {
        uint64_t top = m->heap[0], last = m->heap[--m->heap_n];
        if (m->heap_n)
            pd_heap_down(m->heap, m->heap_n, 0, last);
        struct pd_sym *a = &s[(uint32_t)top];
        if (a->rank != top >> 32)       /* the pair has changed since, or the symbol is gone: a better entry stands for what is there now */
            continue;
        struct pd_sym *b = &s[a->next];
        a->id = a->made;
        a->len += b->len;
        a->next = b->next;
        a->rank = b->rank = PD_NO_RANK;
        if (a->next >= 0) {
            s[a->next].prev = (int32_t)(a - s);
            pair(ctx, a, &s[a->next]);
            if (a->rank != PD_NO_RANK)
                pd_heap_push(m, (uint64_t)a->rank << 32 | (uint32_t)(a - s));
        }
        if (a->prev >= 0) {
            struct pd_sym *p = &s[a->prev];
            p->rank = PD_NO_RANK;
            pair(ctx, p, a);
            if (p->rank != PD_NO_RANK)
                pd_heap_push(m, (uint64_t)p->rank << 32 | (uint32_t)a->prev);
        }
    }
    return 0;
}
#endif
