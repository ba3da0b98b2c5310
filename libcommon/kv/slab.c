#include <errno.h>
#include <stdio.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../base/fault.h"
#include "slab.h"

struct pd_slabs {
    struct pd_slab_shape shape;
    uint32_t n;
    struct one { const uint8_t *map; struct pd_pool *lent_to; uint32_t lent_as; } one[PD_SLABS_MAX];
};

#define HUGE ((size_t)2 << 20)
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* Maps at a multiple of a huge page, where a mapping can use those that the file has. MAP_FAILED and errno, or the mapping. */
static void *map_aligned(int fd, size_t bytes, int prot, int flags)
{
    if (pd_fault("mmap"))
        return errno = ENOMEM, MAP_FAILED;
    if (bytes < HUGE)
        return mmap(NULL, bytes, prot, MAP_SHARED | flags, fd, 0);
    uint8_t *all = mmap(NULL, bytes + HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED)
        return MAP_FAILED;
    uint8_t *at = all + (HUGE - (uintptr_t)all % HUGE) % HUGE, *end = at + (bytes + 4095) / 4096 * 4096;
    void *m = mmap(at, bytes, prot, MAP_SHARED | MAP_FIXED | flags, fd, 0);
    if (m == MAP_FAILED) {
        int was = errno;
        munmap(all, bytes + HUGE);
        return errno = was, MAP_FAILED;
    }
    if (at > all)
        munmap(all, (size_t)(at - all));
    if (end < all + bytes + HUGE)
        munmap(end, (size_t)(all + bytes + HUGE - end));
    return m;
}

/* Memory is asked for by fallocate, which says ENOSPC or ENOMEM where touching a mapping would fault. First one page of each huge page's span, which the kernel
 * then makes whole huge pages of (Linux 6.1; whatever the settings say about shared memory): ten times faster than page by page, and read 1.5 times faster
 * by attention. Where it does not, and for the rest, small pages. */
static int fill(int fd, uint8_t *m, size_t bytes)
{
    for (size_t at = 0; at + HUGE <= bytes; at += HUGE)
        if (fallocate(fd, 0, (off_t)at, 1))
            return -1;
    if (bytes >= HUGE)
        (void)madvise(m, bytes / HUGE * HUGE, MADV_COLLAPSE);
    if (fallocate(fd, 0, 0, (off_t)bytes))
        return -1;
    (void)madvise(m, bytes, MADV_POPULATE_WRITE);       /* Linux 5.14; else they are touched when used */
    return 0;
}

int pd_slab_make(size_t bytes, int *fd, uint8_t **map, struct pd_err *e)
{
    int rc = 0, f = memfd_create("pd-kv", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    void *m = MAP_FAILED;
    if (f < 0)
        return pd_fail_sys(e, "memfd_create");
    if (ftruncate(f, (off_t)bytes))
        rc = pd_fail_sys(e, "%zu bytes of shared memory", bytes);
    else if ((m = map_aligned(f, bytes, PROT_READ | PROT_WRITE, 0)) == MAP_FAILED)
        rc = pd_fail_sys(e, "map %zu bytes of shared memory", bytes);
    else if (fill(f, m, bytes))
        rc = pd_fail_sys(e, "%zu bytes of shared memory", bytes);
    else
        rc = pd_slab_seal(f, e);
    if (rc < 0) {
        if (m != MAP_FAILED)
            munmap(m, bytes);
        close(f);
        return rc;
    }
    *fd = f;
    *map = m;
    return 0;
}

int pd_slab_seal(int fd, struct pd_err *e)
{
    int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
#ifdef F_SEAL_FUTURE_WRITE
    if (!fcntl(fd, F_ADD_SEALS, seals | F_SEAL_FUTURE_WRITE))
        return 0;
#endif
    return fcntl(fd, F_ADD_SEALS, seals) ? pd_fail_sys(e, "cannot seal shared memory") : 0;
}

int pd_slab_map(int fd, const char *name, size_t want, const uint8_t **map, size_t *bytes, struct pd_err *e)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return pd_fail(e, PD_EINCOMPAT, "%s is not sealed against shrinking: it is not mapped, since its owner could cut it under its reader", name);
    if (fstat(fd, &st))
        return pd_fail_sys(e, "%s", name);
    if (st.st_size <= 0 || (want && (uint64_t)st.st_size != want))
        return pd_fail(e, PD_ECORRUPT, "%s has %lld bytes, not %zu", name, (long long)st.st_size, want);
    void *m = map_aligned(fd, (size_t)st.st_size, PROT_READ, MAP_POPULATE);
    if (m == MAP_FAILED)
        return pd_fail_sys(e, "map %s of %lld bytes", name, (long long)st.st_size);
    *map = m;
    *bytes = (size_t)st.st_size;
    return 0;
}

void pd_slab_shape_of(const struct pd_pool *p, struct pd_slab_shape *s)
{
    *s = (struct pd_slab_shape){ pd_pool_slab_bytes(p), pd_pool_slab_blocks(p), (uint32_t)pd_pool_geom(p)->layers, pd_pool_layer_bytes(p) };
}

int pd_slab_shape_check(const struct pd_slab_shape *s, struct pd_err *e)
{
    size_t n = s->layer_bytes;
    if (!n || !s->layers || !s->slab_blocks || !pd_mul_size(n, 2, &n) || !pd_mul_size(n, s->layers, &n) || !pd_mul_size(n, s->slab_blocks, &n) ||
        n != s->slab_bytes ||
        n > (size_t)1 << 46)
        return pd_fail(e, PD_ECORRUPT, "slabs of %llu bytes do not hold %u blocks of %u layers of 2 x %zu bytes", (unsigned long long)s->slab_bytes,
                       s->slab_blocks, s->layers,
                       s->layer_bytes);
    return 0;
}

int pd_slabs_new(const struct pd_slab_shape *shape, struct pd_slabs **out, struct pd_err *e)
{
    int rc = pd_slab_shape_check(shape, e);
    if (rc)
        return rc;
    struct pd_slabs *s = pd_calloc(1, sizeof *s, "slabs of a peer", e);
    if (!s)
        return PD_ENOMEM;
    s->shape = *shape;
    *out = s;
    return 0;
}

int pd_slabs_add(struct pd_slabs *s, uint32_t index, int fd, struct pd_err *e)
{
    char name[32];
    size_t bytes;
    snprintf(name, sizeof name, "slab %u of the peer", index);
    if (index >= PD_SLABS_MAX)
        return pd_fail(e, PD_ENOMEM, "%s: at most %d are mapped", name, PD_SLABS_MAX);
    if (s->one[index].map)
        return pd_fail(e, PD_ECORRUPT, "%s came before", name);
    int rc = pd_slab_map(fd, name, s->shape.slab_bytes, &s->one[index].map, &bytes, e);
    if (!rc)
        s->n++;
    return rc;
}

const struct pd_slab_shape *pd_slabs_shape(const struct pd_slabs *s) { return &s->shape; }
uint32_t pd_slabs_count(const struct pd_slabs *s) { return s->n; }

int pd_slabs_blocks(const struct pd_slabs *s, const struct pd_payload_run *runs, uint32_t n_runs, uint32_t n_blocks, uint32_t *blocks, struct pd_err *e)
{
    const struct pd_slab_shape *g = &s->shape;
    uint64_t stride = (uint64_t)g->slab_blocks * g->layer_bytes;
    uint32_t n = 0;
    bool wait = false;
    for (uint32_t i = 0; i < n_runs; i++) {
        const struct pd_payload_run *r = &runs[i];
        uint64_t slab = r->base / g->slab_bytes, first = r->base % g->slab_bytes / g->layer_bytes, many = r->len / g->layer_bytes;
        if (r->stride != stride || r->count != 2 * g->layers || r->base % g->slab_bytes % g->layer_bytes || !many || r->len % g->layer_bytes ||
            first >= g->slab_blocks || many > g->slab_blocks - first || many > n_blocks - n)
            return pd_fail(e, PD_ECORRUPT, "payload.runs[%u] (base %llu, stride %llu, count %u, len %llu) names no %u blocks in slabs of %llu bytes", i,
                           (unsigned long long)r->base, (unsigned long long)r->stride, r->count, (unsigned long long)r->len, n_blocks, (unsigned long long)g->slab_bytes);
        if (slab >= PD_SLABS_MAX)
            return pd_fail(e, PD_EINCOMPAT, "payload.runs[%u] lies in slab %llu of the peer; at most %d are mapped (let it have less --kv-mem, or give by another --via)",
                           i, (unsigned long long)slab, PD_SLABS_MAX);
        wait |= !s->one[slab].map;
        for (uint64_t k = 0; k < many; k++)
            blocks[n++] = (uint32_t)(slab * g->slab_blocks + first + k);
    }
    if (n != n_blocks)
        return pd_fail(e, PD_ECORRUPT, "payload.runs name %u blocks, the tokens take %u", n, n_blocks);
    return wait;
}

const uint8_t *pd_slabs_at(const struct pd_slabs *s, uint32_t block, int layer, int v)
{
    const struct pd_slab_shape *g = &s->shape;
    return s->one[block / g->slab_blocks].map + ((size_t)layer * 2 + (v != 0)) * g->slab_blocks * g->layer_bytes + (size_t)(block % g->slab_blocks) * g->layer_bytes;
}

int64_t pd_slabs_lend(struct pd_slabs *s, uint32_t slab, struct pd_pool *p, struct pd_err *e)
{
    struct pd_slab_shape mine;
    struct one *o = slab < PD_SLABS_MAX ? &s->one[slab] : NULL;
    pd_slab_shape_of(p, &mine);
    if (!o || !o->map || mine.slab_bytes != s->shape.slab_bytes || mine.slab_blocks != s->shape.slab_blocks || mine.layers != s->shape.layers ||
        mine.layer_bytes != s->shape.layer_bytes || (o->lent_to && o->lent_to != p))
        return pd_fail(e, PD_EFAIL, "slab %u of the peer is not of this pool's shape, or not mapped: its blocks are copied", slab);
    if (!o->lent_to) {
        int rc = pd_pool_adopt(p, o->map, &o->lent_as, e);
        if (rc)
            return rc;
        o->lent_to = p;
    }
    return o->lent_as;
}

void pd_slabs_free(struct pd_slabs *s)
{
    if (!s)
        return;
    for (uint32_t i = 0; i < PD_SLABS_MAX; i++)
        if (s->one[i].lent_to)
            pd_pool_disown(s->one[i].lent_to, s->one[i].lent_as);
        else if (s->one[i].map)
            munmap((void *)(uintptr_t)s->one[i].map, s->shape.slab_bytes);
    pd_free(s);
}

uint32_t pd_slab_runs(const struct pd_pool *p, const uint32_t *blocks, uint32_t n_blocks, struct pd_payload_run *runs)
{
    uint32_t per = pd_pool_slab_blocks(p), n = 0;
    size_t part = pd_pool_layer_bytes(p);
    for (uint32_t i = 0; i < n_blocks; i++) {
        if (n && blocks[i] == blocks[i - 1] + 1 && blocks[i] % per) {
            runs[n - 1].len += part;
            continue;
        }
        runs[n++] = (struct pd_payload_run){ (uint64_t)(blocks[i] / per) * pd_pool_slab_bytes(p) + (uint64_t)(blocks[i] % per) * part, (uint64_t)per * part,
                                             2 * (uint32_t)pd_pool_geom(p)->layers, part };
    }
    return n;
}
