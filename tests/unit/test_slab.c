/* Another process's slabs: what is safe to map, where blocks lie, lending them to a pool, and an owner that cuts or dies. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include "../../libcommon/kv/slab.h"
#include "kv_fixture.h"

static const struct pd_pool_geom geom = { .layers = 3, .kv_heads = 2, .head_dim = 8, .block_size = 4, .dtype = PD_F16 };

static int memfd(size_t bytes, int seals)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    if (seals)
        assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static void only_what_is_safe_is_mapped(void **state)
{
    const uint8_t *map;
    size_t bytes;
    struct pd_err e;
    int fd = memfd(8192, 0);
    FAILS_WITH(pd_slab_map(fd, "slab 0", 8192, &map, &bytes, &e), PD_EINCOMPAT, "not sealed against shrinking");
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    FAILS_WITH(pd_slab_map(fd, "slab 0", 4096, &map, &bytes, &e), PD_ECORRUPT, "has 8192 bytes, not 4096");
    assert_int_equal(pd_slab_map(fd, "slab 0", 8192, &map, &bytes, &e), 0);
    assert_int_equal(ftruncate(fd, 0), -1);
    munmap((void *)(uintptr_t)map, bytes);
    close(fd);
    fd = memfd(0, F_SEAL_SHRINK);       /* empty */
    FAILS_WITH(pd_slab_map(fd, "slab 0", 0, &map, &bytes, &e), PD_ECORRUPT, "has 0 bytes");
    close(fd);
    fd = open("/dev/zero", O_RDONLY);
    FAILS_WITH(pd_slab_map(fd, "slab 0", 0, &map, &bytes, &e), PD_EINCOMPAT, "not sealed");
    close(fd);
    FAILS_WITH(pd_slab_map(-1, "slab 0", 0, &map, &bytes, &e), PD_EINCOMPAT, "not sealed");
    fd = memfd(4096, 0);                /* cut before the seal: the size tells */
    assert_int_equal(ftruncate(fd, 100), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    FAILS_WITH(pd_slab_map(fd, "slab 0", 4096, &map, &bytes, &e), PD_ECORRUPT, "has 100 bytes");
    close(fd);
}

static void runs_name_blocks(void **state)
{
    struct pd_pool *p, *q;
    struct pd_slab_shape g;
    struct pd_slabs *s;
    struct pd_err e;
    uint32_t b[40], some[7], back[7];
    struct pd_payload_run runs[7], r;
    assert_int_equal(pd_pool_new(&geom, 1 << 20, &p, &e), 0);
    assert_int_equal(pd_pool_new(&geom, 1 << 20, &q, &e), 0);
    assert_int_equal(pd_pool_take(p, 40, b, &e), 0);
    for (uint32_t i = 0; i < 40; i++)
        memset(pd_pool_base(p, b[i]) + pd_pool_off(p, 2, 1), (int)i + 1, pd_pool_layer_bytes(p));
    pd_slab_shape_of(p, &g);
    assert_int_equal(pd_slab_shape_check(&g, &e), 0);
    assert_int_equal(pd_slabs_new(&g, &s, &e), 0);
    const uint32_t pick[7] = { 3, 4, 5, 9, 8, 0, 39 };
    for (int i = 0; i < 7; i++)
        some[i] = b[pick[i]];
    assert_int_equal(pd_slab_runs(p, some, 7, runs), 5);
    assert_int_equal(runs[0].len, 3 * pd_pool_layer_bytes(p));
    assert_int_equal(pd_slabs_blocks(s, runs, 5, 7, back, &e), 1);      /* not mapped yet */
    assert_int_equal(pd_slabs_add(s, 0, pd_pool_slab_fd(p, 0), &e), 0);
    FAILS_WITH(pd_slabs_add(s, 0, pd_pool_slab_fd(p, 0), &e), PD_ECORRUPT, "came before");
    FAILS_WITH(pd_slabs_add(s, PD_SLABS_MAX, pd_pool_slab_fd(p, 0), &e), PD_ENOMEM, "at most");
    assert_int_equal(pd_slabs_blocks(s, runs, 5, 7, back, &e), 0);
    for (int i = 0; i < 7; i++) {
        assert_int_equal(back[i], some[i]);
        assert_int_equal(pd_slabs_at(s, back[i], 2, 1)[0], pick[i] + 1);
    }
    FAILS_WITH(pd_slabs_blocks(s, runs, 5, 8, back, &e), PD_ECORRUPT, "name 7 blocks, the tokens take 8");
    FAILS_WITH(pd_slabs_blocks(s, runs, 5, 6, back, &e), PD_ECORRUPT, "names no 6 blocks");
    /* every field of a run off by one, and its extremes */
    for (int f = 0; f < 4; f++)
        for (int k = 0; k < 4; k++) {
            r = runs[0];
            uint64_t *u = f == 0 ? &r.base : f == 1 ? &r.stride : &r.len, to[4] = { f == 2 ? r.count : *u, 0, INT64_MAX, UINT64_MAX };
            uint64_t v = k == 0 ? to[0] + 1 : k == 1 && f ? 0 : to[k < 2 ? 2 : k];
            if (f == 2)
                r.count = (uint32_t)v;
            else
                *u = v;
            FAILS_WITH(pd_slabs_blocks(s, &r, 1, 3, back, &e), PD_ECORRUPT, "payload.runs[0]");
        }
    g.slab_blocks++;
    FAILS_WITH(pd_slab_shape_check(&g, &e), PD_ECORRUPT, "do not hold");

    /* in place: the blocks stand in another pool's tables, and outlive the connection */
    int64_t as = pd_slabs_lend(s, 0, q, &e);
    assert_true(as >= 0);
    assert_int_equal(pd_slabs_lend(s, 0, q, &e), as);
    assert_int_equal(pd_slabs_lend(s, 1, q, &e), PD_EFAIL);
    uint32_t mine = (uint32_t)as * pd_pool_slab_blocks(q) + some[3] % pd_pool_slab_blocks(p);
    assert_true(pd_pool_is_foreign(q, mine));
    assert_false(pd_pool_is_foreign(q, 0));
    assert_int_equal(pd_pool_borrow(q, mine, &e), 0);
    assert_int_equal(pd_pool_borrow(q, mine, &e), 0);
    pd_pool_ref(q, mine);
    assert_int_equal(pd_pool_stats(q).borrowed, 1);
    assert_int_equal(pd_pool_stats(q).used, 0);
    pd_slabs_free(s);
    pd_pool_free(p);
    assert_int_equal((pd_pool_base(q, mine) + pd_pool_off(q, 2, 1))[5], 10);
    FAILS_WITH(pd_pool_borrow(q, mine, &e), PD_EFAIL, "not one of another process's");
    for (int i = 0; i < 3; i++)
        pd_pool_put(q, mine);
    assert_int_equal(pd_pool_stats(q).borrowed, 0);
    FAILS_WITH(pd_pool_borrow(q, mine, &e), PD_EFAIL, "not one of another process's");
    pd_pool_free(q);
}

/* The owner tries to cut, to grow, and to be killed: its reader reads on. */
static void the_owner_dies(void **state)
{
    struct pd_pool *p;
    struct pd_err e;
    uint32_t b[4];
    const uint8_t *map;
    size_t bytes;
    int st;
    assert_int_equal(pd_pool_new(&geom, 1 << 20, &p, &e), 0);
    assert_int_equal(pd_pool_take(p, 4, b, &e), 0);
    memset(pd_pool_base(p, b[0]), 77, pd_pool_layer_bytes(p));
    int fd = pd_pool_slab_fd(p, 0);
    assert_int_equal(pd_slab_map(fd, "slab", pd_pool_slab_bytes(p), &map, &bytes, &e), 0);
    pid_t pid = fork();
    if (!pid) {
        if (!ftruncate(fd, 0) || !ftruncate(fd, 1 << 30) || mmap(NULL, 4096, PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED)
            _exit(1);
        raise(SIGKILL);
    }
    assert_int_equal(waitpid(pid, &st, 0), pid);
    assert_true(WIFSIGNALED(st));
    pd_pool_free(p);
    assert_int_equal(map[0], 77);
    assert_int_equal(map[bytes - 1], 0);
    assert_int_equal(mprotect((void *)(uintptr_t)map, bytes, PROT_READ | PROT_WRITE), -1);
    munmap((void *)(uintptr_t)map, bytes);
}

/* The part of an offer that says where 32 layers x 8,192 neighbouring blocks of a large model lie is under 64 KiB; no memory is needed to say it. */
static void where_many_blocks_lie(void **state)
{
    enum { BLOCKS = 8192 };
    const struct pd_pool_geom g = { .layers = 32, .kv_heads = 8, .head_dim = 128, .block_size = 16, .dtype = PD_F16 };
    static uint32_t b[BLOCKS], back[BLOCKS];
    static struct pd_payload_run runs[BLOCKS];
    struct pd_slab_shape shape;
    struct pd_slabs *s;
    struct pd_pool *p;
    struct pd_err e;
    struct fix f;
    size_t bytes[2];
    fix_make(&f, &geom, 50, 3, 1);
    assert_int_equal(pd_pool_new(&g, 20ll << 30, &p, &e), 0);
    for (uint32_t i = 0; i < BLOCKS; i++)
        b[i] = 100 + i;
    for (int with = 0; with < 2; with++) {
        struct pd_buf out = { 0 };
        f.d.offer = true;
        f.d.payload.runs = with ? runs : NULL;
        f.d.payload.n_runs = with ? pd_slab_runs(p, b, BLOCKS, runs) : 0;
        assert_int_equal(pd_kvdesc_encode(&f.d, &out, &e), 0);
        bytes[with] = out.n;
        pd_buf_free(&out);
    }
    assert_in_range(bytes[1] - bytes[0], 1, (64 << 10) - 1);
    pd_slab_shape_of(p, &shape);
    assert_int_equal(pd_slabs_new(&shape, &s, &e), 0);
    assert_int_equal(pd_slabs_blocks(s, runs, f.d.payload.n_runs, BLOCKS, back, &e), 1);
    assert_memory_equal(b, back, sizeof b);
    /* more slabs than a peer maps: no lie, but it cannot go this way */
    uint64_t at = runs[0].base;
    runs[0].base += PD_SLABS_MAX * shape.slab_bytes;
    FAILS_WITH(pd_slabs_blocks(s, runs, f.d.payload.n_runs, BLOCKS, back, &e), PD_EINCOMPAT, "at most 1024 are mapped");
    runs[0].base = at;
    f.d.payload.runs = NULL;
    f.d.payload.n_runs = 0;
    pd_slabs_free(s);
    pd_pool_free(p);
    fix_free(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(only_what_is_safe_is_mapped), cmocka_unit_test(runs_name_blocks), cmocka_unit_test(where_many_blocks_lie), cmocka_unit_test(the_owner_dies) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
