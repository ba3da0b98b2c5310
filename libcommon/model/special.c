#include "special.h"

static uint64_t edge_slot(const struct pd_special *s, uint64_t key)
{
    uint64_t h = key * 0x9e3779b97f4a7c15u;
    uint64_t i = (h ^ h >> 32) & s->mask;
    while (s->edge[i].key && s->edge[i].key != key)
        i = (i + 1) & s->mask;
    return i;
}

static int32_t child(const struct pd_special *s, int32_t from, uint8_t byte)    /* -1: none */
{
    uint64_t key = ((uint64_t)from << 8 | byte) + 1, i = edge_slot(s, key);
    return s->edge[i].key == key ? s->edge[i].to : -1;
}

static int32_t step(const struct pd_special *s, int32_t at, uint8_t byte)
{
    while (at) {
        int32_t to = child(s, at, byte);
        if (to >= 0)
            return to;
        at = s->fail[at];
    }
    return s->root[byte];
}

static bool wanted(const struct pd_vocab *v, int32_t id, unsigned types)
{
    return (types >> v->type[id] & 1) && v->off[id + 1] > v->off[id];
}

int pd_special_init(struct pd_special *s, const struct pd_vocab *v, unsigned types, struct pd_err *e)
{
    *s = (struct pd_special){ 0 };
    size_t nodes = 1, slots = 2;
    for (int32_t id = 0; id < v->n; id++)
        if (wanted(v, id, types))
            nodes += v->off[id + 1] - v->off[id];       /* at most the vocabulary's bytes, which are in memory */
    if (nodes == 1)
        return 0;
    if (nodes > INT32_MAX / 2)
        return pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.tokens: the special tokens are %zu bytes long together", nodes);
    while (slots < 2 * nodes)
        slots *= 2;

    int r = PD_ENOMEM;
    int32_t *parent = NULL, *depth = NULL, *order = NULL;
    uint8_t *byte = NULL;
    if (!(s->fail = pd_calloc(nodes, sizeof *s->fail, "special tokens", e)) || !(s->id = pd_calloc(nodes, sizeof *s->id, "special tokens", e)) ||
        !(s->edge = pd_calloc(slots, sizeof *s->edge, "special tokens", e)) || !(parent = pd_calloc(nodes, sizeof *parent, "special tokens", e)) ||
        !(depth = pd_calloc(nodes + 2, sizeof *depth, "special tokens", e)) || !(order = pd_calloc(nodes, sizeof *order, "special tokens", e)) ||
        !(byte = pd_calloc(nodes, 1, "special tokens", e)))
        goto out;
    s->mask = slots - 1;
    s->n = 1;
    s->id[0] = -1;
    for (int32_t id = 0; id < v->n; id++) {
        if (!wanted(v, id, types))
            continue;
        struct pd_str p = pd_vocab_piece(v, id);
        int32_t at = 0;
        for (size_t i = p.n; i-- > 0; ) {
            uint64_t key = ((uint64_t)at << 8 | (uint8_t)p.p[i]) + 1, k = edge_slot(s, key);
            if (!s->edge[k].key) {
                int32_t to = (int32_t)s->n++;
                s->edge[k] = (struct pd_special_edge){ key, to };
                s->id[to] = -1;
                parent[to] = at;
                byte[to] = (uint8_t)p.p[i];
                if (!at)
                    s->root[byte[to]] = to;
            }
            at = s->edge[k].to;
        }
        s->id[at] = id;
    }

    /* Shallow nodes first (a counting sort by depth): a node's fail link is shallower than the node, so it is ready when needed. A node is made
     * after its parent, which gives the depths in one pass. */
    int32_t *level = NULL;
    if (!(level = pd_calloc((size_t)s->n + 2, sizeof *level, "special tokens", e)))
        goto out;
    for (uint32_t i = 1; i < s->n; i++) {
        depth[i] = depth[parent[i]] + 1;
        level[depth[i] + 1]++;
    }
    for (uint32_t d = 1; d < s->n + 2; d++)
        level[d] += level[d - 1];
    for (uint32_t i = 1; i < s->n; i++)
        order[level[depth[i]]++] = (int32_t)i;
    pd_free(level);
    for (uint32_t k = 0; k + 1 < s->n; k++) {
        int32_t i = order[k];
        s->fail[i] = parent[i] ? step(s, s->fail[parent[i]], byte[i]) : 0;
        if (s->id[i] < 0)
            s->id[i] = s->id[s->fail[i]];
    }
    r = 0;
out:
    pd_free(parent);
    pd_free(depth);
    pd_free(order);
    pd_free(byte);
    if (r)
        pd_special_free(s);
    return r;
}

void pd_special_free(struct pd_special *s)
{
    pd_free(s->fail);
    pd_free(s->id);
    pd_free(s->edge);
    *s = (struct pd_special){ 0 };
}

int pd_special_scan(const struct pd_special *s, const struct pd_vocab *v, const char *text, size_t n, size_t base, struct pd_buf *hits, struct pd_err *e)
{
    if (s->n <= 1)
        return 0;
    size_t first = hits->n;
    int32_t at = 0;
    for (size_t i = n; i-- > 0; ) {
        at = step(s, at, (uint8_t)text[i]);
        if (s->id[at] >= 0) {
            struct pd_special_hit h = { i, s->id[at] };
            int r = pd_buf_add(hits, &h, sizeof h, e);
            if (r)
                return r;
        }
    }
    /* They came from the end and may overlap: turn them round and keep those that begin where the one before has ended. */
    struct pd_special_hit *h = (void *)(hits->p + first);
    size_t k = (hits->n - first) / sizeof *h, kept = 0, end = 0;
    for (size_t i = 0; i < k / 2; i++) {
        struct pd_special_hit t = h[i];
        h[i] = h[k - 1 - i];
        h[k - 1 - i] = t;
    }
    for (size_t i = 0; i < k; i++) {
        if (h[i].pos < end)
            continue;
        end = h[i].pos + pd_vocab_piece(v, h[i].id).n;
        h[kept++] = (struct pd_special_hit){ base + h[i].pos, h[i].id };
    }
    hits->n = first + kept * sizeof *h;
    return 0;
}
