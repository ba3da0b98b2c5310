/* Bytes as the KV events of four workers, four bytes an event, in any order and with any number: the index holds what a plain list of the rules (wire/kvevent.h)
 * holds, after each one. What is left of the bytes is a record, read and fed as it is. */
#include <stdlib.h>
#include "../../libcommon/route/feed.h"
#include "../../libcommon/wire/value.h"

enum { FEEDS = 4, BLOCKS = 64, MOST = 40, SIZE = 16 };
/* What a subscriber should hold. seq: of the last change; next: the part that is due. */
struct model { bool known, held[BLOCKS]; uint8_t life; uint64_t seq; uint32_t next; };

static void must(bool ok)
{
    if (!ok)
        abort();
}

static void name(uint32_t i, uint8_t out[16])
{
    memset(out, 0, 16);
    out[0] = (uint8_t)(1 + i);
    out[11] = (uint8_t)(i * 37);
}

static void forget(struct model *m)
{
    m->known = false;
    m->next = 0;
    memset(m->held, 0, sizeof m->held);
}

static uint32_t count(const struct model *m)
{
    uint32_t n = 0;
    for (int i = 0; i < BLOCKS; i++)
        n += m->held[i];
    return n;
}

/* What is to be made of the event; false: nothing is known after it. */
static bool expect(struct model *m, uint8_t life, uint64_t seq, int op, uint32_t first, uint32_t n, uint32_t part, uint32_t parts, bool joined)
{
    bool same = joined && m->life == life;
    if (op == 3) {
        if (part == 0) {
            forget(m);
            m->life = life;
            m->seq = seq;
        } else if (part != m->next || seq != m->seq || m->life != life)
            return false;
        m->next = part + 1 < parts ? part + 1 : 0;
        m->known = !m->next;
    } else if (same && m->known && seq <= m->seq)
        return true;
    else if (seq == 1 && !same) {
        forget(m);
        m->life = life;
        m->known = true;
        m->seq = 1;
    } else if (same && m->known && seq == m->seq + 1)
        m->seq++;
    else
        return false;
    for (uint32_t i = first; i < first + n; i++)
        m->held[i % BLOCKS] = op != 1;
    if (op == 2)
        memset(m->held, 0, sizeof m->held);
    return op == 1 || op == 2 || count(m) <= MOST;
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    static const char *const op_name[] = { "stored", "removed", "cleared", "snapshot" };
    static const int32_t ids[BLOCKS * SIZE];
    static struct pd_index *x;          /* each input leaves it empty */
    struct pd_feed f[FEEDS];
    struct model m[FEEDS];
    struct pd_err e;
    size_t events = n / 4 < 400 ? n / 4 : 400;
    memset(m, 0, sizeof m);
    must(x || pd_index_new(&(struct pd_index_opts){ .max_bytes = 1 << 20, .seed = 5 }, &x, &e) == 0);
    for (int i = 0; i < FEEDS; i++)
        pd_feed_open(&f[i], x, SIZE, MOST);
    for (size_t k = 0; k < events; k++, p += 4, n -= 4) {
        int w = p[0] & 3, op = p[0] >> 2 & 3;
        uint8_t hashes[BLOCKS][16], parents[BLOCKS][16] = { { 0 } };
        uint32_t first = p[1] % BLOCKS, count_ = 1 + p[2] % 16;
        struct pd_kvevent v = { .life = { (uint8_t)('a' + (p[0] >> 4 & 1)) }, .part = 0, .parts = 1, .block_size = p[0] >> 5 == 7 ? SIZE + 1 : SIZE };
        v.seq = p[3] & 128 ? (p[3] & 15) + 1u : m[w].seq + ((p[3] & 7) == 7 ? 2 : (p[3] & 7) == 6 ? 0 : 1);       /* mostly the next one */
        strcpy(v.op, op_name[op]);
        count_ = op == 2 ? 0 : count_;
        for (uint32_t i = 0; i < count_; i++)
            name((first + i) % BLOCKS, hashes[i]);
        v.hashes = (struct pd_bin){ count_ ? hashes[0] : NULL, 16 * count_ };
        if (op == 0 || op == 3)
            v.token_ids = (struct pd_bin){ (const uint8_t *)ids, sizeof(int32_t) * v.block_size * count_ };
        if (op == 3) {
            v.parents = (struct pd_bin){ parents[0], 16 * count_ };
            v.parts = 1 + (p[3] >> 4 & 3);
            v.part = (p[3] >> 3 & 3) % v.parts;
        }
        bool joined = f[w].joined;
        int rc = pd_feed_event(&f[w], &v, &e);
        if (v.block_size != SIZE || !expect(&m[w], v.life[0], v.seq, op, first, count_, v.part, v.parts, joined)) {
            must(rc != PD_FED);
            forget(&m[w]);
        } else
            must(rc == PD_FED);
        must(f[w].known == m[w].known && f[w].next_part == m[w].next);
        for (uint32_t i = 0; i < BLOCKS; i++) {
            uint8_t h[16];
            uint32_t hits;
            name(i, h);
            const struct pd_hit *hit = pd_index_match(x, (const uint8_t (*)[16])h, 1, &hits);
            bool here = false;
            for (uint32_t j = 0; j < hits; j++)
                here |= f[w].joined && hit[j].slot == f[w].slot;
            must(here == m[w].held[i]);
        }
        if (k % 8 == 7)
            pd_index_sweep(x);
    }
    struct pd_arena mem = { 0 };
    struct pd_kvevent v;
    if (n && pd_value_len(p, n) == n && pd_kvevent_decode(p, n, &mem, &v, &e) == 0)
        pd_feed_event(&f[0], &v, &e);
    pd_arena_free(&mem);
    for (int i = 0; i < FEEDS; i++)
        pd_feed_close(&f[i]);
    while (pd_index_sweep(x))
        ;
    struct pd_index_stats s = pd_index_stats(x);
    must(!s.blocks && !s.copies && !s.slots);
    return 0;
}
