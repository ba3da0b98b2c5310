/* Leases: each step in each state, the ledger's counts, expiry in order, fences before frees, dead readers, the control page in another process. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include "../../libcommon/base/proc.h"
#include "../../libcommon/kv/lease.h"
#include "kv_fixture.h"

#define RUN "01ARZ3NDEKTSV4RRFFQ69G5FAV"
static const struct pd_pool_geom geom = { .layers = 2, .kv_heads = 1, .head_dim = 8, .block_size = 4, .dtype = PD_F16 };
struct world { struct pd_pool *pool; struct pd_leases *l; uint32_t told[8]; uint8_t gen[PD_GEN_LEN]; };
static const struct pd_reader me = { .ctx = (void *)1 };

static void told(void *ctx, enum pd_lease_step step, const struct pd_lease_info *i)
{
    struct world *w = ctx;
    w->told[step]++;
    assert_string_equal(i->run, RUN);
}

static void open_world(struct world *w, uint32_t max)
{
    struct pd_err e;
    memset(w, 0, sizeof *w);
    assert_int_equal(pd_pool_new(&geom, 4 << 20, &w->pool, &e), 0);
    assert_int_equal(pd_leases_new(&(struct pd_leases_opts){ .pool = w->pool, .max = max, .told = told, .ctx = w }, &w->l, &e), 0);
    assert_int_equal(pd_gen_new(w->gen, &e), 0);
}

static void close_world(struct world *w)
{
    struct pd_lease_counts n = pd_leases_counts(w->l);
    assert_int_equal(n.granted, n.released + n.expired + n.revoked + n.live);
    assert_int_equal(n.live, 0);
    assert_int_equal(n.live_blocks + n.unread_blocks + n.unread + n.cancelling, 0);
    assert_int_equal(pd_pool_stats(w->pool).used, 0);
    pd_leases_free(w->l);
    pd_pool_free(w->pool);
}

static void grant(struct world *w, uint32_t n, int64_t ttl, int64_t now, uint8_t id[16])
{
    uint32_t blocks[64];
    struct pd_err e;
    assert_int_equal(pd_pool_take(w->pool, n, blocks, &e), 0);
    assert_int_equal(pd_lease_grant(w->l, RUN, w->gen, blocks, n, ttl, now, id, &e), 0);
    for (uint32_t i = 0; i < n; i++)
        pd_pool_put(w->pool, blocks[i]);        /* the lease holds its own */
}

/* What a call gives in each state: rows are states, columns calls. */
enum call { FILL, PUBLISH, READ, RENEW, RELEASE, REVOKE, N_CALLS };
enum stage { RESERVED, FILLING, PUBLISHED, READING, CANCELLING, RELEASED, EXPIRED, REVOKED, FORGED, OTHER_LIFE, N_STAGES };
static bool never(void *ctx, const uint8_t *id) { return false; }

static void bring(struct world *w, enum stage s, uint8_t id[16])
{
    struct pd_err e;
    struct pd_reader r = { .ctx = w, .fence = s == CANCELLING ? never : NULL };
    grant(w, 3, 1000, 0, id);
    if (s >= FILLING && s <= REVOKED)
        assert_int_equal(pd_lease_fill(w->l, id, &e), 0);
    if (s >= PUBLISHED && s <= REVOKED)
        assert_int_equal(pd_lease_publish(w->l, id, &e), 0);
    if (s >= READING && s <= REVOKED)
        assert_int_equal(pd_lease_read(w->l, id, w->gen, &r, 0, &e), 0);
    if (s == CANCELLING)
        assert_int_equal(pd_lease_revoke(w->l, id, "asked", 1, &e), 2);
    if (s == RELEASED)
        assert_int_equal(pd_lease_release(w->l, id, w, 1, &e), 0);
    if (s == EXPIRED)
        assert_int_equal(pd_leases_sweep(w->l, 1000), 1);
    if (s == REVOKED)
        assert_int_equal(pd_lease_revoke(w->l, id, "asked", 1, &e), 0);
}

static void each_call_in_each_state(void **state)
{
    static const int want[N_STAGES][N_CALLS] = {
        /*                fill      publish   read      renew     release  revoke */
        [RESERVED]   = { 0,        PD_EFAIL, PD_EFAIL, 0,        0,       0 },
        [FILLING]    = { PD_EFAIL, 0,        0,        0,        0,       0 },
        [PUBLISHED]  = { PD_EFAIL, PD_EFAIL, 0,        0,        0,       0 },
        [READING]    = { PD_EFAIL, PD_EFAIL, 0,        0,        0,       0 },
        [CANCELLING] = { PD_ETIME, PD_ETIME, PD_ETIME, PD_ETIME, 1,       2 },
        [RELEASED]   = { PD_ETIME, PD_ETIME, PD_ETIME, PD_ETIME, 1,       1 },
        [EXPIRED]    = { PD_ETIME, PD_ETIME, PD_ETIME, PD_ETIME, 1,       1 },
        [REVOKED]    = { PD_ETIME, PD_ETIME, PD_ETIME, PD_ETIME, 1,       1 },
        [FORGED]     = { PD_ECORRUPT, PD_ECORRUPT, PD_ECORRUPT, PD_ECORRUPT, PD_ECORRUPT, PD_ECORRUPT },
        [OTHER_LIFE] = { PD_ETIME, PD_ETIME, PD_ETIME, PD_ETIME, PD_ETIME, PD_ETIME },
    };
    for (int s = 0; s < N_STAGES; s++)
        for (int c = 0; c < N_CALLS; c++) {
            struct world w;
            struct pd_err e = { 0 };
            uint8_t id[16], real[16];
            int rc = 0;
            open_world(&w, 8);
            bring(&w, s, real);
            memcpy(id, real, 16);
            if (s == FORGED)
                id[15]++;
            if (s == OTHER_LIFE)
                id[0] ^= 1;
            switch (c) {
            case FILL: rc = pd_lease_fill(w.l, id, &e); break;
            case PUBLISH: rc = pd_lease_publish(w.l, id, &e); break;
            case READ: rc = pd_lease_read(w.l, id, w.gen, &me, 2, &e); break;
            case RENEW: rc = pd_lease_renew(w.l, id, w.gen, 0, 2, &e); break;
            case RELEASE: rc = pd_lease_release(w.l, id, NULL, 2, &e); break;
            default: rc = pd_lease_revoke(w.l, id, "again", 2, &e); break;
            }
            if (rc != want[s][c])
                fail_msg("stage %d call %d: %d (%s), not %d", s, c, rc, e.msg, want[s][c]);
            if (rc < 0 && (e.code != rc || !e.msg[0]))
                fail_msg("stage %d call %d: no words", s, c);
            if (s == CANCELLING) {      /* nothing is free before the fence is done */
                assert_int_equal(pd_pool_stats(w.pool).used, 3);
                pd_lease_fenced(w.l, real, &me, 3);
                assert_int_equal(pd_pool_stats(w.pool).used, 3);
                pd_lease_fenced(w.l, real, &w, 3);
            }
            pd_lease_revoke(w.l, real, "end", 4, &e);
            close_world(&w);
        }
}

/* Its reader says that it is done, where the ledger knows nothing of it: the lease lasts as long as somebody is taken to read. */
/* Published, and nobody has read it yet: whoever wants blocks meanwhile gets none of its, however little is left. */
static void a_full_pool_takes_nothing_of_a_lease(void **state)
{
    struct world w;
    struct pd_err e;
    uint8_t id[16];
    struct pd_lease_info i;
    open_world(&w, 8);
    uint32_t max = pd_pool_stats(w.pool).max, *b = calloc(max, sizeof *b), n = max - 3;
    grant(&w, 3, 1000, 0, id);
    assert_int_equal(pd_lease_fill(w.l, id, &e) | pd_lease_publish(w.l, id, &e), 0);
    assert_true(pd_lease_info(w.l, id, &i) && i.n_blocks == 3);
    for (uint32_t k = 0; k < 3; k++)
        memset(pd_pool_base(w.pool, i.blocks[k]), 0x51 + (int)k, pd_pool_layer_bytes(w.pool));
    assert_int_equal(pd_pool_take(w.pool, n, b, &e), 0);
    FAILS_WITH(pd_pool_take(w.pool, 1, b + n, &e), PD_ENOMEM, "1 blocks of 4 tokens wanted, 0 free");
    for (uint32_t k = 0; k < n; k++) {
        assert_true(b[k] != i.blocks[0] && b[k] != i.blocks[1] && b[k] != i.blocks[2]);
        memset(pd_pool_base(w.pool, b[k]), 0xff, pd_pool_layer_bytes(w.pool));
    }
    for (uint32_t k = 0; k < 3; k++)
        assert_int_equal(pd_pool_base(w.pool, i.blocks[k])[pd_pool_layer_bytes(w.pool) - 1], 0x51 + (int)k);
    assert_int_equal(pd_leases_sweep(w.l, 1000), 1);            /* its time ends it, and then they can be had */
    assert_int_equal(pd_pool_take(w.pool, 3, b + n, &e), 0);
    for (uint32_t k = 0; k < max; k++)
        pd_pool_put(w.pool, b[k]);
    free(b);
    close_world(&w);
}

static void let_go(void **state)
{
    for (int how = 0; how < 5; how++) {
        struct world w;
        struct pd_err e;
        uint8_t id[16];
        struct pd_reader a = { .ctx = &w }, b = { .ctx = &e }, waits = { .ctx = id, .waits = true };
        open_world(&w, 8);
        grant(&w, 3, 1000, 0, id);
        assert_int_equal(pd_lease_fill(w.l, id, &e), 0);
        assert_int_equal(pd_lease_read(w.l, id, w.gen, &waits, 0, &e), 0);      /* counts for nothing */
        if (how) {
            assert_int_equal(pd_lease_read(w.l, id, w.gen, &a, 0, &e), 0);
            assert_int_equal(pd_lease_read(w.l, id, w.gen, &b, 0, &e), 0);
        }
        assert_int_equal(pd_lease_let_go(w.l, id, 1, &e), 0);
        if (how) {
            assert_int_equal(pd_lease_let_go(w.l, id, 1, &e), 0);
            assert_int_equal(pd_lease_renew(w.l, id, w.gen, 0, 1, &e), 0);
            assert_int_equal(pd_leases_counts(w.l).live, 1);
        }
        if (how == 1 || how == 2) {
            pd_lease_unread(w.l, id, &w);
            assert_int_equal(pd_leases_counts(w.l).live, 1);
            if (how == 1)
                pd_lease_unread(w.l, id, &e);
            else
                pd_lease_revoke(w.l, id, "asked", 2, &e);
        } else if (how == 3)
            assert_int_equal(pd_leases_sweep(w.l, 2000), 1);
        else if (how == 4) {
            pd_lease_release(w.l, id, &e, 2, &e);
            pd_lease_unread(w.l, id, &w);
        }
        struct pd_lease_counts n = pd_leases_counts(w.l);
        assert_true(!n.live && n.released == (how != 2 && how != 3) && n.revoked == (how == 2) && n.expired == (how == 3));
        assert_int_equal(pd_lease_let_go(w.l, id, 3, &e), 1);
        id[15]++;
        assert_int_equal(pd_lease_let_go(w.l, id, 3, &e), PD_ECORRUPT);
        close_world(&w);
    }
}

static void a_stale_generation_reads_nothing(void **state)
{
    struct world w;
    struct pd_err e;
    uint8_t id[16], id2[16], old[16];
    open_world(&w, 4);
    grant(&w, 2, 1000, 0, id);
    assert_int_equal(pd_lease_fill(w.l, id, &e), 0);
    memcpy(old, w.gen, 16);
    old[15] ^= 1;
    FAILS_WITH(pd_lease_read(w.l, id, old, &me, 1, &e), PD_ETIME, "another generation");
    FAILS_WITH(pd_lease_renew(w.l, id, old, 0, 1, &e), PD_ETIME, "another generation");
    FAILS_WITH(pd_lease_read(w.l, id, w.gen, &me, 1000, &e), PD_ETIME, "expired 0 us ago");
    assert_int_equal(pd_lease_release(w.l, id, NULL, 1, &e), 0);
    grant(&w, 2, 1000, 0, id2);         /* the same slot: the old id stays ended */
    assert_int_equal(pd_lease_slot(id), pd_lease_slot(id2));
    assert_memory_not_equal(id, id2, 16);
    FAILS_WITH(pd_lease_fill(w.l, id, &e), PD_ETIME, "has ended");
    assert_int_equal(pd_lease_release(w.l, id, NULL, 1, &e), 1);
    assert_int_equal(pd_leases_counts(w.l).live, 1);
    assert_int_equal(pd_leases_revoke_all(w.l, "drain", 2), 1);
    close_world(&w);
}

static void readers_count(void **state)
{
    struct world w;
    struct pd_err e;
    struct pd_lease_info i;
    uint8_t id[16];
    open_world(&w, 4);
    grant(&w, 5, 1000, 0, id);
    assert_int_equal(pd_leases_counts(w.l).unread, 1);
    assert_int_equal(pd_leases_counts(w.l).unread_blocks, 5);
    assert_int_equal(pd_lease_fill(w.l, id, &e), 0);
    for (uintptr_t k = 1; k <= PD_LEASE_READERS; k++)
        assert_int_equal(pd_lease_read(w.l, id, w.gen, &(struct pd_reader){ .ctx = (void *)k }, 1, &e), 0);
    FAILS_WITH(pd_lease_read(w.l, id, w.gen, &me, 1, &e), PD_ENOMEM, "readers already");
    assert_int_equal(pd_leases_counts(w.l).unread, 0);
    assert_int_equal(pd_lease_publish(w.l, id, &e), 0);
    assert_true(pd_lease_info(w.l, id, &i));
    assert_int_equal(i.state, PD_LEASE_READING);
    assert_int_equal(i.readers, PD_LEASE_READERS);
    for (uintptr_t k = 1; k < PD_LEASE_READERS; k++)
        assert_int_equal(pd_lease_release(w.l, id, (void *)k, 2, &e), 0);
    assert_int_equal(pd_leases_counts(w.l).live, 1);
    pd_lease_unread(w.l, id, (void *)PD_LEASE_READERS);         /* its connection went: the lease lives */
    assert_true(pd_lease_info(w.l, id, &i));
    assert_int_equal(i.state, PD_LEASE_PUBLISHED);
    assert_int_equal(pd_lease_release(w.l, id, NULL, 3, &e), 0);
    assert_int_equal(w.told[PD_LEASE_STEP_READ], PD_LEASE_READERS);
    assert_int_equal(w.told[PD_LEASE_STEP_RELEASED], 1);
    close_world(&w);
}

/* 20,000 random steps beside a plain list. */
static void expiry_is_in_order(void **state)
{
    enum { MAX = 200 };
    struct world w;
    struct pd_err e;
    struct { uint8_t id[16]; int64_t until; bool live; } mine[MAX] = { 0 };
    uint64_t seed = 5, expired = 0;
    int64_t now = 0;
    open_world(&w, MAX);
    for (int step = 0; step < 20000; step++) {
        uint64_t r = fix_random(&seed);
        int k = (int)(r % MAX);
        now += (int64_t)(r >> 20 & 15);
        uint32_t due = 0;
        int64_t next = INT64_MAX;
        for (int i = 0; i < MAX; i++)
            if (mine[i].live && mine[i].until <= now)
                mine[i].live = false, due++;
        assert_int_equal(pd_leases_sweep(w.l, now), due);
        expired += due;
        for (int i = 0; i < MAX; i++)
            if (mine[i].live && mine[i].until < next)
                next = mine[i].until;
        assert_int_equal(pd_leases_next(w.l), next);
        int64_t ttl = 1 + (int64_t)(r >> 32 & 1023);
        if (!mine[k].live) {
            grant(&w, 1 + (uint32_t)(r >> 50 & 3), ttl, now, mine[k].id);
            mine[k].live = true;
            mine[k].until = now + ttl;
        } else if (r >> 40 & 1) {
            struct pd_lease_info i;
            assert_true(pd_lease_info(w.l, mine[k].id, &i));
            assert_int_equal(pd_lease_renew(w.l, mine[k].id, w.gen, 0, now, &e), 0);
            if (now + i.ttl_us > mine[k].until)
                mine[k].until = now + i.ttl_us;
        } else {
            assert_int_equal(r >> 41 & 1 ? pd_lease_release(w.l, mine[k].id, NULL, now, &e) : pd_lease_revoke(w.l, mine[k].id, "asked", now, &e), 0);
            mine[k].live = false;
        }
    }
    assert_in_range(expired, 1000, 20000);
    pd_leases_sweep(w.l, INT64_MAX);
    assert_int_equal(pd_leases_next(w.l), INT64_MAX);
    close_world(&w);
}

static void there_is_an_end_of_leases(void **state)
{
    struct world w;
    struct pd_err e;
    uint8_t id[16];
    uint32_t b, at = 0, n = 0;
    struct pd_lease_info i;
    open_world(&w, 2);
    grant(&w, 1, 0, 0, id);
    grant(&w, 1, 0, 0, id);
    assert_int_equal(pd_pool_take(w.pool, 1, &b, &e), 0);
    FAILS_WITH(pd_lease_grant(w.l, RUN, w.gen, &b, 1, 0, 0, id, &e), PD_ENOMEM, "no lease left: 2 are given");
    pd_pool_put(w.pool, b);
    while (pd_leases_each(w.l, &at, &i)) {
        assert_int_equal(i.ttl_us, PD_LEASE_TTL_US);
        n++;
    }
    assert_int_equal(n, 2);
    assert_int_equal(pd_leases_sweep(w.l, PD_LEASE_TTL_US - 1), 0);
    assert_int_equal(pd_leases_sweep(w.l, PD_LEASE_TTL_US), 2);
    assert_int_equal(w.told[PD_LEASE_STEP_EXPIRED], 2);
    close_world(&w);
}

/* A reader in another process: sees the word change, cannot write to the page; when it is killed the reconciler finds it. */
static void a_reader_in_another_process(void **state)
{
    struct world w;
    struct pd_err e;
    uint8_t id[16];
    int up[2], down[2], st;
    char c;
    open_world(&w, 600);
    grant(&w, 4, 1000, 0, id);
    assert_int_equal(pd_lease_fill(w.l, id, &e), 0);
    assert_int_equal(pipe(up) | pipe(down), 0);
    pid_t pid = fork();
    if (!pid) {
        struct pd_control page;
        int fd = pd_leases_control_fd(w.l);
        if (pd_control_map(fd, &page, &e) || page.slots < 600 || !pd_control_valid(&page, pd_lease_slot(id), w.gen))
            _exit(1);
        if (pd_control_valid(&page, page.slots, w.gen) || mmap(NULL, page.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED || !ftruncate(fd, 0))
            _exit(2);
        if (write(up[1], "r", 1) != 1 || read(down[0], &c, 1) != 1)
            _exit(3);
        if (pd_control_valid(&page, pd_lease_slot(id), w.gen))
            _exit(4);
        if (write(up[1], "f", 1) != 1)
            _exit(5);
        for (;;)
            pause();
    }
    assert_int_equal(read(up[0], &c, 1), 1);
    struct pd_reader r = { .pid = pid, .start = pd_proc_start(pid), .ctx = &w };
    assert_true(r.start > 0);
    assert_int_equal(pd_lease_read(w.l, id, w.gen, &r, 1, &e), 0);
    assert_int_equal(pd_leases_reconcile(w.l, NULL, 2), 0);
    assert_int_equal(pd_lease_revoke(w.l, id, "asked", 3, &e), 0);
    assert_int_equal(write(down[1], "x", 1), 1);
    assert_int_equal(read(up[0], &c, 1), 1);
    assert_int_equal(c, 'f');

    grant(&w, 4, 1000, 0, id);
    assert_int_equal(pd_lease_fill(w.l, id, &e), 0);
    assert_int_equal(pd_lease_read(w.l, id, w.gen, &r, 1, &e), 0);
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, &st, 0), pid);
    assert_true(WIFSIGNALED(st));
    assert_int_equal(pd_leases_reconcile(w.l, NULL, 2), 1);
    assert_int_equal(pd_leases_counts(w.l).reaped, 1);
    assert_int_equal(w.told[PD_LEASE_STEP_REAPED], 1);
    for (int i = 0; i < 2; i++) {
        close(up[i]);
        close(down[i]);
    }
    close_world(&w);
}

/* A dead reader's fence never answers: the reconciler answers for it. */
/* Offered and not begun: shut out like a reader, and not counted as one. */
static uint32_t fences;
static bool count_fence(void *ctx, const uint8_t *id) { fences++; return true; }
static void a_reader_that_waits(void **state)
{
    struct world w;
    struct pd_err e;
    struct pd_lease_info i;
    uint8_t id[16];
    struct pd_reader r = { .ctx = &w, .fence = count_fence, .waits = true };
    open_world(&w, 4);
    for (int begins = 0; begins < 2; begins++) {
        fences = 0;
        grant(&w, 4, 1000, 0, id);
        assert_int_equal(pd_lease_fill(w.l, id, &e), 0);
        assert_int_equal(pd_lease_publish(w.l, id, &e), 0);
        r.waits = true;
        assert_int_equal(pd_lease_read(w.l, id, w.gen, &r, 1, &e), 0);
        assert_int_equal(pd_leases_counts(w.l).unread, 1);
        assert_true(pd_lease_info(w.l, id, &i));
        assert_int_equal(i.state, PD_LEASE_PUBLISHED);
        assert_int_equal(i.readers, 0);
        r.waits = false;
        if (begins) {
            assert_int_equal(pd_lease_read(w.l, id, w.gen, &r, 1, &e), 0);
            assert_true(pd_lease_info(w.l, id, &i));
            assert_int_equal(i.state, PD_LEASE_READING);
            assert_int_equal(i.readers, 1);
            assert_int_equal(pd_leases_counts(w.l).unread, 0);
        }
        assert_int_equal(pd_lease_revoke(w.l, id, "asked", 2, &e), 0);
        assert_int_equal(fences, 1);
    }
    assert_int_equal(w.told[PD_LEASE_STEP_READ], 1);
    close_world(&w);
}

static bool dead(pid_t pid, uint64_t start) { return false; }
static void a_fence_of_the_dead(void **state)
{
    struct world w;
    struct pd_err e;
    uint8_t id[16];
    open_world(&w, 4);
    grant(&w, 4, 1000, 0, id);
    assert_int_equal(pd_lease_fill(w.l, id, &e), 0);
    assert_int_equal(pd_lease_read(w.l, id, w.gen, &(struct pd_reader){ .pid = 7, .start = 7, .ctx = &w, .fence = never }, 1, &e), 0);
    assert_int_equal(pd_leases_sweep(w.l, 1000), 1);
    assert_int_equal(pd_leases_counts(w.l).cancelling, 1);
    assert_int_equal(pd_pool_stats(w.pool).used, 4);
    assert_int_equal(pd_leases_reconcile(w.l, dead, 1001), 1);
    assert_int_equal(pd_leases_counts(w.l).expired, 1);
    close_world(&w);
}

/* A fence that shuts its connection, which is done with the lease by that: it says so from inside, and then that it is done. */
static struct world *asked;
static bool at_once(void *ctx, const uint8_t *id)
{
    pd_lease_fenced(asked->l, id, ctx, 1);
    return true;
}

static void a_fence_that_is_done_from_inside(void **state)
{
    struct world w;
    struct pd_err e;
    uint8_t id[16], next[16];
    struct pd_reader first = { .ctx = (void *)1, .fence = at_once }, second = { .ctx = (void *)2, .fence = never };
    open_world(&w, 0);
    asked = &w;
    for (int two = 0; two < 2; two++) {
        grant(&w, 3, 1000, 0, id);
        assert_int_equal(pd_lease_fill(w.l, id, &e), 0);
        assert_int_equal(pd_lease_read(w.l, id, w.gen, &first, 0, &e), 0);
        if (two)
            assert_int_equal(pd_lease_read(w.l, id, w.gen, &second, 0, &e), 0);
        assert_int_equal(pd_lease_revoke(w.l, id, "asked", 1, &e), two ? 2 : 0);
        assert_int_equal(pd_pool_stats(w.pool).used, two ? 3 : 0);      /* the other one still reads */
        if (two)
            pd_lease_fenced(w.l, id, (void *)2, 1);
        assert_int_equal(pd_leases_counts(w.l).revoked, 1 + two);
        assert_int_equal(w.told[PD_LEASE_STEP_REVOKED], 1 + two);
    }
    grant(&w, 1, 1000, 0, id);          /* the free slot is there once */
    grant(&w, 1, 1000, 0, next);
    assert_int_not_equal(pd_lease_slot(id), pd_lease_slot(next));
    assert_int_equal(pd_leases_sweep(w.l, 1000), 2);
    close_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_call_in_each_state), cmocka_unit_test(let_go), cmocka_unit_test(a_full_pool_takes_nothing_of_a_lease), cmocka_unit_test(a_stale_generation_reads_nothing), cmocka_unit_test(readers_count), cmocka_unit_test(expiry_is_in_order),
        cmocka_unit_test(there_is_an_end_of_leases), cmocka_unit_test(a_reader_in_another_process), cmocka_unit_test(a_fence_of_the_dead), cmocka_unit_test(a_reader_that_waits),
        cmocka_unit_test(a_fence_that_is_done_from_inside),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
