#include "feed.h"

void pd_feed_open(struct pd_feed *f, struct pd_index *x, uint32_t block_size, uint32_t most)
{
    *f = (struct pd_feed){ .x = x, .block_size = block_size, .most = most };
}

void pd_feed_lost(struct pd_feed *f)
{
    if (f->joined)
        pd_index_leave(f->x, f->slot);
    f->joined = f->known = false;
    f->next_part = 0;
}

void pd_feed_close(struct pd_feed *f) { pd_feed_lost(f); }

static int anew(struct pd_feed *f, const struct pd_kvevent *v, struct pd_err *e)
{
    pd_feed_lost(f);
    memcpy(f->life, v->life, PD_LIFE_LEN);
    f->seq = v->seq;
    int rc = pd_index_join(f->x, &f->slot, e);
    f->joined = !rc;
    return rc;
}

typedef const uint8_t (*hashes_t)[16];

/* Blocks go in whatever their parent: evicted head first (kv/prefix.h, `lru`), a chain has holes for a while. From another worker it is loss; it is counted. */
static int put(struct pd_feed *f, hashes_t h, uint32_t n, const uint8_t *parent, struct pd_err *e)
{
    static const uint8_t none[16];
    if (parent && memcmp(parent, none, 16) && !pd_index_has(f->x, f->slot, parent))
        f->orphans++;
    int rc = pd_index_stored(f->x, f->slot, h, n, e);
    if (rc == 0 && f->most && pd_index_held(f->x, f->slot) > f->most)
        rc = pd_fail(e, PD_ECORRUPT, "KV events of more than %u blocks, from a worker that registered so many", f->most);
    return rc;
}

static int snapshot(struct pd_feed *f, const struct pd_kvevent *v, struct pd_err *e)
{
    hashes_t h = (hashes_t)v->hashes.p, parents = (hashes_t)v->parents.p;
    uint32_t n = pd_kvevent_blocks(v);
    int rc = 0;
    if (v->part == 0)
        rc = anew(f, v, e);
    else if (v->part != f->next_part || v->seq != f->seq || memcmp(v->life, f->life, PD_LIFE_LEN))
        rc = pd_fail(e, PD_ECORRUPT, "part %u of a snapshot comes where part %u is due", v->part, f->next_part);
    for (uint32_t i = 0; i < n && !rc; i++)
        rc = put(f, h + i, 1, parents[i], e);
    if (rc < 0)
        return rc;
    f->next_part = v->part + 1 < v->parts ? v->part + 1 : 0;
    if ((f->known = !f->next_part))
        f->snapshots++;
    return PD_FED;
}

static int change(struct pd_feed *f, const struct pd_kvevent *v, struct pd_err *e)
{
    hashes_t h = (hashes_t)v->hashes.p;
    uint32_t n = pd_kvevent_blocks(v);
    if (!strcmp(v->op, "removed")) {
        pd_index_removed(f->x, f->slot, h, n);
        return 0;
    }
    if (!strcmp(v->op, "cleared")) {
        pd_index_leave(f->x, f->slot);
        f->joined = false;
        int rc = pd_index_join(f->x, &f->slot, e);
        f->joined = !rc;
        return rc;
    }
    return put(f, h, n, v->has_parent ? v->parent : NULL, e);
}

int pd_feed_event(struct pd_feed *f, const struct pd_kvevent *v, struct pd_err *e)
{
    bool snap = !strcmp(v->op, "snapshot"), same = f->joined && !memcmp(v->life, f->life, PD_LIFE_LEN);
    int rc = 0;
    if (v->block_size && v->block_size != f->block_size) {
        rc = pd_fail(e, PD_ECORRUPT, "KV events of blocks of %u tokens, from a worker that registered blocks of %u", v->block_size, f->block_size);
    } else if (snap) {
        rc = snapshot(f, v, e);
    } else if (same && f->known && v->seq <= f->seq) {
        f->repeated++;
        return PD_FED;
    } else if (v->seq == 1 && !same) {
        rc = anew(f, v, e);
        f->known = !rc;
        rc = rc ? rc : change(f, v, e);
    } else if (same && f->known && v->seq == f->seq + 1) {
        f->seq++;
        rc = change(f, v, e);
    } else {
        bool knew = f->known;
        pd_fail(e, PD_ETIME, "change %llu comes after change %llu%s", (unsigned long long)v->seq, (unsigned long long)(knew ? f->seq : 0),
                knew && !same ? " of another life" : "");
        pd_feed_lost(f);
        f->gaps++;
        return PD_FED_GAP;
    }
    if (rc < 0) {
        pd_feed_lost(f);
        return rc;
    }
    f->applied++;
    return PD_FED;
}
