#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../base/fault.h"
#include "../base/hash.h"
#include "control.h"
#include "slab.h"

enum { BYTES_MAX = 16 << 20 };

int pd_control_new(uint32_t slots, struct pd_control *c, struct pd_err *e)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = ((size_t)slots * sizeof(uint64_t) + page - 1) / page * page;
    int rc;
    *c = (struct pd_control){ .fd = -1 };
    int fd = memfd_create("pd-control", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return pd_fail_sys(e, "control page: memfd_create");
    if (ftruncate(fd, (off_t)bytes) || fallocate(fd, 0, 0, (off_t)bytes)) {
        rc = pd_fail_sys(e, "control page of %zu bytes", bytes);
        goto bad;
    }
    void *m = pd_fault("mmap") ? (errno = ENOMEM, MAP_FAILED) : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (m == MAP_FAILED) {
        rc = pd_fail_sys(e, "control page: map %zu bytes", bytes);
        goto bad;
    }
    *c = (struct pd_control){ .word = m, .slots = slots, .bytes = bytes, .fd = fd };
    if ((rc = pd_slab_seal(fd, e)))
        pd_control_close(c);
    return rc;
bad:
    close(fd);
    return rc;
}

int pd_control_map(int fd, struct pd_control *c, struct pd_err *e)
{
    size_t bytes = 0;
    const uint8_t *map = NULL;
    struct stat st;
    *c = (struct pd_control){ .fd = -1 };
    if (!fstat(fd, &st) && st.st_size > BYTES_MAX)
        return pd_fail(e, PD_ECORRUPT, "control page of %lld bytes: at most %d make sense", (long long)st.st_size, BYTES_MAX);
    int rc = pd_slab_map(fd, "control page", 0, &map, &bytes, e);
    if (!rc)
        *c = (struct pd_control){ .word = (_Atomic uint64_t *)(uintptr_t)map, .slots = (uint32_t)(bytes / sizeof(uint64_t)), .bytes = bytes, .fd = -1 };
    return rc;
}

void pd_control_close(struct pd_control *c)
{
    if (c->word)
        munmap((void *)c->word, c->bytes);
    if (c->word && c->fd >= 0)
        close(c->fd);
    *c = (struct pd_control){ .fd = -1 };
}

/* Sequentially consistent: whatever is written into the blocks afterwards is seen later than this word. */
void pd_control_set(struct pd_control *c, uint32_t slot, const uint8_t gen[PD_GEN_LEN])
{
    atomic_store(&c->word[slot], gen ? pd_get_be64(gen + 8) : 0);
    atomic_thread_fence(memory_order_seq_cst);
}

bool pd_control_valid(const struct pd_control *c, uint32_t slot, const uint8_t gen[PD_GEN_LEN])
{
    atomic_thread_fence(memory_order_seq_cst);
    return slot < c->slots && pd_get_be64(gen + 8) && atomic_load(&c->word[slot]) == pd_get_be64(gen + 8);
}

struct pd_view { struct pd_control page; _Atomic uint32_t n; };

int pd_view_new(int fd, struct pd_view **out, struct pd_err *e)
{
    struct pd_view *v = pd_calloc(1, sizeof *v, "a view of a control page", e);
    if (!v)
        return PD_ENOMEM;
    int rc = pd_control_map(fd, &v->page, e);
    if (rc) {
        pd_free(v);
        return rc;
    }
    v->n = 1;
    *out = v;
    return 0;
}

struct pd_view *pd_view_ref(struct pd_view *v)
{
    atomic_fetch_add(&v->n, 1);
    return v;
}

void pd_view_put(struct pd_view *v)
{
    if (!v || atomic_fetch_sub(&v->n, 1) != 1)
        return;
    pd_control_close(&v->page);
    pd_free(v);
}

bool pd_view_valid(const struct pd_view *v, uint32_t slot, const uint8_t gen[PD_GEN_LEN]) { return pd_control_valid(&v->page, slot, gen); }
