/* kv/dump: what is written comes back as the same bits, through the one way in; damage is refused by name and never crashes or hangs the reader. */
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include "../../libcommon/base/log.h"
#include "../../libcommon/kv/inspect.h"
#include "../../libcommon/wire/stream.h"
#include "kv_fixture.h"
#include "files.h"

static const struct pd_pool_geom f16 = { .layers = 3, .kv_heads = 2, .head_dim = 8, .block_size = 16, .dtype = PD_F16 };
static char dir[] = "/tmp/pd-test-dump-XXXXXX";

static const char *path_of(const char *name)
{
    static char p[4][256];
    static int i;
    char *out = p[i++ % 4];
    snprintf(out, 256, "%s/%s", dir, name);
    return out;
}

static void write_dump(const char *path, struct fix *f, int n)
{
    struct pd_dump_w *w = NULL;
    struct pd_err e = { 0 };
    if (pd_dump_create(path, &w, &e))
        fail_msg("%s", e.msg);
    for (int i = 0; i < n; i++)
        if (pd_dump_add(w, &f[i].d, f[i].pool, f[i].blocks, (const uint8_t (*)[16])f[i].hashes, f[i].n_hashes, NULL, 0, &e))
            fail_msg("%s", e.msg);
    if (pd_dump_commit(w, &e))
        fail_msg("%s", e.msg);
}

/* A consumer as pd-decode is one: offers, chunks, kv into a pool. */
struct got { struct pd_kvdesc d; struct pd_arena arena; uint32_t *blocks, n_blocks; };

static int consume(const char *path, const char *run, struct pd_pool *pool, struct got *got, int max, int *n, struct pd_err *e)
{
    struct pd_dump_r *r = NULL;
    struct pd_rstream *s = NULL;
    struct pd_import *im = NULL;
    struct pd_chunk c;
    struct pd_rec rec;
    bool bad;
    int fd, rc = pd_dump_read(path, run, &r, &fd, e);
    *n = 0;
    if (rc)
        return rc;
    assert_int_equal(pd_rstream_new(fd, &(struct pd_rstream_opts){ .own_fd = true, .name = path }, &s, e), 0);
    while (!rc && (rc = pd_rstream_next(s, -1, &rec, &bad, e)) == 1) {
        struct got *g = &got[*n];
        assert_true(*n < max);
        if (rec.kind == PD_K_OFFER) {
            rc = pd_kvdesc_decode(rec.p, rec.n, &g->arena, &g->d, e);
            rc = rc ? rc : pd_import_begin(pool, &g->d, &im, e);
        } else if (rec.kind == PD_K_CHUNK) {
            rc = pd_chunk_decode(rec.p, rec.n, &c, e);
            rc = rc ? rc : pd_import_chunk(im, &c, e);
        } else {
            assert_int_equal(rec.kind, PD_K_KV);
            memset(&g->d, 0, sizeof g->d);
            rc = pd_kvdesc_decode(rec.p, rec.n, &g->arena, &g->d, e);
            rc = rc ? rc : pd_import_finish(im, &g->d, e);
            if (!rc) {
                g->blocks = pd_import_take(im, &g->n_blocks);
                pd_import_free(im);
                im = NULL;
                ++*n;
            }
        }
    }
    pd_import_free(im);
    pd_rstream_free(s);
    struct pd_err child = { 0 };
    int end = pd_dump_read_end(r, &child);
    if (end && end != PD_ECANCEL) {
        *e = child;
        rc = end;
    }
    return rc;
}

static void round_trip(const struct pd_pool_geom *g, uint32_t n_tokens)
{
    struct fix f;
    struct got got = { .blocks = NULL };
    struct pd_err e = { 0 };
    struct pd_pool *to = NULL;
    int n;
    const char *p = path_of("a.h5");
    fix_make(&f, g, n_tokens, 0, n_tokens);
    write_dump(p, &f, 1);
    assert_true(pd_dump_is(p));
    assert_int_equal(pd_pool_new(g, 64 << 20, &to, &e), 0);
    if (consume(p, NULL, to, &got, 1, &n, &e))
        fail_msg("%s", e.msg);
    assert_int_equal(n, 1);
    assert_int_equal(got.n_blocks, f.plan.n_blocks);
    assert_true(fix_same(f.pool, f.blocks, to, got.blocks, got.n_blocks));
    assert_string_equal(got.d.run, f.d.run);
    assert_memory_equal(got.d.gen, f.d.gen, 16);
    assert_memory_equal(got.d.op, f.d.op, 16);
    assert_int_equal(got.d.epoch, 3);
    assert_int_equal(got.d.n_tokens, n_tokens);
    assert_memory_equal(got.d.token_ids, f.ids, n_tokens * sizeof *f.ids);
    assert_int_equal(got.d.n_first, 1);
    assert_int_equal(got.d.first[0].token, 11);
    assert_int_equal(got.d.first[0].n_top, 2);
    assert_true(got.d.first[0].top[1].logprob == -2.5f);
    assert_true(pd_str_eq(got.d.worker, "p0"));
    assert_true(pd_str_eq(got.d.request.prompt, "Once upon"));
    pd_arena_free(&got.arena);
    pd_free(got.blocks);
    pd_pool_free(to);
    fix_free(&f);
}

static void kv_comes_back_in_every_bit(void **state)
{
    static const uint32_t tokens[] = { 1, 15, 16, 17, 100 };
    struct pd_pool_geom g = f16;
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        g.dtype = PD_F16;
        round_trip(&g, tokens[i]);
        g.dtype = PD_BF16;
        round_trip(&g, tokens[i]);
        g.dtype = PD_F32;
        round_trip(&g, tokens[i]);
    }
    g = (struct pd_pool_geom){ .layers = 30, .kv_heads = 3, .head_dim = 64, .block_size = 16, .dtype = PD_F16 };
    round_trip(&g, 500);
    g = (struct pd_pool_geom){ .layers = 1, .kv_heads = 1, .head_dim = 2, .block_size = 1, .dtype = PD_F16 };
    round_trip(&g, 40000);      /* tokens, hashes and checksums past what fits an object header; a descriptor past 64 KiB */
}

static void many_runs_in_their_order(void **state)
{
    struct fix f[12];
    struct got got[12];
    struct pd_err e = { 0 };
    struct pd_pool *to = NULL;
    int n;
    const char *p = path_of("many.h5");
    for (int i = 0; i < 12; i++)
        fix_make(&f[i], &f16, 5 + 20 * (uint32_t)i, 0, 100 + (uint64_t)i);
    for (int i = 0; i < 6; i++) {       /* ids that do not sort as they came */
        struct fix t = f[i];
        f[i] = f[11 - i];
        f[11 - i] = t;
    }
    write_dump(p, f, 12);
    memset(got, 0, sizeof got);
    assert_int_equal(pd_pool_new(&f16, 64 << 20, &to, &e), 0);
    if (consume(p, NULL, to, got, 12, &n, &e))
        fail_msg("%s", e.msg);
    assert_int_equal(n, 12);
    for (int i = 0; i < 12; i++) {
        assert_string_equal(got[i].d.run, f[i].d.run);
        assert_true(fix_same(f[i].pool, f[i].blocks, to, got[i].blocks, got[i].n_blocks));
        pd_arena_free(&got[i].arena);
        pd_free(got[i].blocks);
    }
    struct got one = { .blocks = NULL };
    if (consume(p, f[7].d.run, to, &one, 1, &n, &e))
        fail_msg("%s", e.msg);
    assert_int_equal(n, 1);
    assert_string_equal(one.d.run, f[7].d.run);
    pd_arena_free(&one.arena);
    pd_free(one.blocks);
    FAILS_WITH(consume(p, "01ARZ3NDEKTSV4RRFFQ69G5FAV", to, &one, 1, &n, &e), PD_EFAIL, "has no run 01ARZ3NDEKTSV4RRFFQ69G5FAV");
    FAILS_WITH(consume(p, "../x", to, &one, 1, &n, &e), PD_EUSAGE, "no run id");
    pd_pool_free(to);
    for (int i = 0; i < 12; i++)
        fix_free(&f[i]);
}

/* A name in the folder of output. */
static const char *in_out(const char *name)
{
    static char path[4][300];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/out/%s", dir, name);
    return path[turn];
}

static void nothing_half_written_stays(void **state)
{
    struct fix f;
    struct pd_dump_w *w = NULL;
    struct pd_err e = { 0 };
    struct stat st;
    assert_int_equal(mkdir(in_out(""), 0700), 0);
    char out[300];
    snprintf(out, sizeof out, "%s", in_out("x.h5"));
    fix_make(&f, &f16, 50, 0, 1);
    assert_int_equal(pd_dump_create(out, &w, &e), 0);
    assert_int_equal(pd_dump_add(w, &f.d, f.pool, f.blocks, NULL, 0, NULL, 0, &e), 0);
    FAILS_WITH(pd_dump_add(w, &f.d, f.pool, f.blocks, NULL, 0, NULL, 0, &e), PD_EFAIL, "is in the file already");
    pd_dump_abort(w);
    assert_string_equal(names_in(in_out("")), "");
    write_dump(out, &f, 1);
    assert_string_equal(names_in(in_out("")), "x.h5 ");
    assert_int_equal(stat(out, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(chmod(out, 0644), 0);
    assert_int_equal(symlink("x.h5", in_out("link.h5")), 0);
    write_dump(in_out("link.h5"), &f, 1);   /* over an old one: the link stays, and so does the mode */
    assert_int_equal(stat(out, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0644);
    assert_string_equal(names_in(in_out("")), "link.h5 x.h5 ");
    unlink(in_out("link.h5"));
    FAILS_WITH(pd_dump_create("/dev/null", &w, &e), PD_EUSAGE, "regular file");
    FAILS_WITH(pd_dump_create("/nonexistent/x.h5", &w, &e), PD_EFAIL, "/nonexistent");
    fix_free(&f);
}

/* A limit on file size stands in for a full disk: the write fails with EFBIG, and all that was opened must still close. */
static void a_full_disk_is_an_error(void **state)
{
    char out[300];
    snprintf(out, sizeof out, "%s", in_out("full.h5"));
    struct pd_pool_geom g = { .layers = 30, .kv_heads = 3, .head_dim = 64, .block_size = 16, .dtype = PD_F16 };
    struct fix f;
    fix_make(&f, &g, 300, 0, 1);
    for (rlim_t limit = 1000; limit < 9000000; limit = limit * 5 / 2) {
        fflush(NULL);
        pid_t pid = fork();
        if (!pid) {
            struct pd_dump_w *w = NULL;
            struct pd_err e = { 0 };
            signal(SIGXFSZ, SIG_IGN);
            signal(SIGSEGV, SIG_DFL);       /* cmocka's handler would jump into the next test */
            setrlimit(RLIMIT_FSIZE, &(struct rlimit){ limit, limit });
            int rc = pd_dump_create(out, &w, &e);
            if (!rc)
                rc = pd_dump_add(w, &f.d, f.pool, f.blocks, NULL, 0, NULL, 0, &e);
            if (!rc)
                rc = pd_dump_commit(w, &e);
            else
                pd_dump_abort(w);
            exit(rc ? strstr(e.msg, "File too large") ? 7 : 8 : 0);     /* exit, not _exit: libhdf5's exit handler must survive too */
        }
        int status;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), limit < 4000000 ? 7 : WEXITSTATUS(status));
        if (WEXITSTATUS(status))
            assert_string_equal(names_in(in_out("")), "x.h5 ");
        else
            unlink(out);
    }
    fix_free(&f);
}

static uint8_t *slurp(const char *path, size_t *n)
{
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    uint8_t *p = malloc((size_t)st.st_size);
    FILE *f = fopen(path, "rb");
    *n = fread(p, 1, (size_t)st.st_size, f);
    fclose(f);
    return p;
}

static void spit(const char *path, const uint8_t *p, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_int_equal(fwrite(p, 1, n, f), n);
    fclose(f);
}

static void not_a_dump_is_told(void **state)
{
    struct pd_err e = { 0 };
    struct pd_dump_r *r = NULL;
    int fd;
    uint8_t junk[100] = { 0 };
    const char *p = path_of("junk.h5");
    FAILS_WITH(pd_dump_read(path_of("absent.h5"), NULL, &r, &fd, &e), PD_EFAIL, "No such file");
    FAILS_WITH(pd_dump_read("/dev/null", NULL, &r, &fd, &e), PD_EFAIL, "regular file");
    spit(p, junk, 0);
    FAILS_WITH(pd_dump_read(p, NULL, &r, &fd, &e), PD_ECORRUPT, "not an HDF5 file");
    spit(p, junk, sizeof junk);
    FAILS_WITH(pd_dump_read(p, NULL, &r, &fd, &e), PD_ECORRUPT, "not an HDF5 file");
    memcpy(junk, "\x89HDF\r\n\x1a\n", 8);
    spit(p, junk, sizeof junk);
    assert_true(pd_dump_is(p));
    FAILS_WITH(pd_dump_read(p, NULL, &r, &fd, &e), PD_ECORRUPT, "superblock version 0");
    assert_false(pd_dump_is("Makefile"));
    assert_false(pd_dump_is(path_of("absent.h5")));
}

/* Every chunk of the file: one byte flipped in its packed bytes is found and named. */
static void a_flipped_byte_is_found(void **state)
{
    struct fix f;
    struct got got = { .blocks = NULL };
    struct pd_err e = { 0 };
    struct pd_pool *to = NULL;
    size_t n_bytes;
    uint64_t seed = 5;
    int n, refused = 0, harmless = 0;
    const char *p = path_of("flip.h5");
    fix_make(&f, &f16, 60, 0, 77);
    write_dump(p, &f, 1);
    uint8_t *b = slurp(p, &n_bytes);
    assert_int_equal(pd_pool_new(&f16, 64 << 20, &to, &e), 0);
    /* Past the metadata block lies nothing but chunks. */
    assert_true(n_bytes > (1 << 20) + 5000);
    for (int i = 0; i < 60; i++) {
        size_t at = (1 << 20) + fix_random(&seed) % (n_bytes - (1 << 20));
        uint8_t bit = (uint8_t)(1 << fix_random(&seed) % 8);
        b[at] ^= bit;
        spit(p, b, n_bytes);
        b[at] ^= bit;
        memset(&got, 0, sizeof got);
        int rc = consume(p, NULL, to, &got, 1, &n, &e);
        if (rc) {
            assert_int_equal(rc, PD_ECORRUPT);
            refused++;
        } else {                /* a byte that no object uses: then nothing may have changed */
            assert_true(fix_same(f.pool, f.blocks, to, got.blocks, got.n_blocks));
            for (uint32_t k = 0; k < got.n_blocks; k++)
                pd_pool_put(to, got.blocks[k]);
            pd_free(got.blocks);
            harmless++;
        }
        pd_arena_free(&got.arena);
        assert_int_equal(pd_pool_stats(to).used, 0);
    }
    print_message("# %d flips refused, %d in bytes that nothing uses\n", refused, harmless);
    assert_true(refused >= 50);
    free(b);
    pd_pool_free(to);
    fix_free(&f);
}

/* Mutations of every kind anywhere in the file: refused as corrupt, or read as the same KV; never a crash, a hang, or another number. */
static void mutations_never_lie(void **state)
{
    struct fix f;
    struct pd_err e = { 0 };
    struct pd_pool *to = NULL;
    size_t n_bytes;
    uint64_t seed = 2026;
    int n, refused = 0, same = 0, rounds = getenv("LONG") && !strcmp(getenv("LONG"), "1") ? 2500 : 300;
    int64_t worst = 0;
    const char *p = path_of("mut.h5");
    fix_make(&f, &f16, 60, 0, 78);
    write_dump(p, &f, 1);
    uint8_t *b = slurp(p, &n_bytes), *m = malloc(n_bytes);
    size_t used = 1 << 20;      /* of the metadata block most is empty: mutate where something is */
    while (used && !b[used - 1])
        used--;
    assert_int_equal(pd_pool_new(&f16, 64 << 20, &to, &e), 0);
    for (int i = 0; i < rounds; i++) {
        memcpy(m, b, n_bytes);
        int times = 1 + (int)(fix_random(&seed) % 4);
        for (int k = 0; k < times; k++) {
            size_t at = fix_random(&seed) % 4 ? fix_random(&seed) % used : (1 << 20) + fix_random(&seed) % (n_bytes - (1 << 20));
            switch (fix_random(&seed) % 4) {
            case 0: m[at] ^= (uint8_t)(1 << fix_random(&seed) % 8); break;
            case 1: m[at] = (uint8_t)fix_random(&seed); break;
            case 2: m[at] = fix_random(&seed) % 2 ? 0xff : 0; break;
            default: memset(m + at, (int)(fix_random(&seed) % 256), at + 8 < n_bytes ? 8 : 1);
            }
        }
        spit(p, m, n_bytes);
        struct got got = { .blocks = NULL };
        struct timespec t0, t1;
        clock_gettime(CLOCK_MONOTONIC, &t0);
        int rc = consume(p, NULL, to, &got, 1, &n, &e);
        clock_gettime(CLOCK_MONOTONIC, &t1);
        int64_t ms = (t1.tv_sec - t0.tv_sec) * 1000 + (t1.tv_nsec - t0.tv_nsec) / 1000000;
        worst = ms > worst ? ms : worst;
        if (rc && (rc != PD_ECORRUPT || strstr(e.msg, "ended with status")))        /* the latter: a sanitizer ended the child */
            fail_msg("mutation %d: code %d, %s", i, rc, e.msg);
        if (!rc && n == 1) {
            assert_true(fix_same(f.pool, f.blocks, to, got.blocks, got.n_blocks));
            assert_memory_equal(got.d.token_ids, f.ids, 60 * sizeof *f.ids);
            for (uint32_t k = 0; k < got.n_blocks; k++)
                pd_pool_put(to, got.blocks[k]);
            same++;
        } else {
            refused++;
        }
        pd_free(got.blocks);
        pd_arena_free(&got.arena);
        assert_int_equal(pd_pool_stats(to).used, 0);
    }
    print_message("# %d mutations: %d refused, %d without effect, the slowest took %lld ms\n", rounds, refused, same, (long long)worst);
    assert_true(refused > rounds / 3);
    free(b);
    free(m);
    pd_pool_free(to);
    fix_free(&f);
}

/* Files that libhdf5 itself made, well formed and hostile: a link that leads elsewhere, data in another file, other types and shapes. */
static hid_t run_group;

static void set_of(const char *name, hid_t type, int rank, const hsize_t *dims, hid_t cpl)
{
    hid_t space = H5Screate_simple(rank, dims, NULL), d;
    H5Ldelete(run_group, name, H5P_DEFAULT);
    d = H5Dcreate2(run_group, name, type, space, H5P_DEFAULT, cpl, H5P_DEFAULT);
    assert_true(d >= 0);
    H5Sclose(space);
    H5Dclose(d);
}

static void soft_link(void) { H5Ldelete(run_group, "tokens", H5P_DEFAULT); H5Lcreate_soft("layers/000/k_xxh3", run_group, "tokens", H5P_DEFAULT, H5P_DEFAULT); }
static void external_link(void) { H5Ldelete(run_group, "tokens", H5P_DEFAULT); H5Lcreate_external("/etc/passwd", "/", run_group, "tokens", H5P_DEFAULT, H5P_DEFAULT); }
static void external_data(void)
{
    hid_t cpl = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_external(cpl, "/etc/passwd", 0, 240);
    set_of("tokens", H5T_STD_I32LE, 1, (hsize_t[]){ 60 }, cpl);
    H5Pclose(cpl);
}
static void other_type(void) { set_of("tokens", H5T_STD_I64LE, 1, (hsize_t[]){ 60 }, H5P_DEFAULT); }
static void other_order(void) { set_of("tokens", H5T_STD_I32BE, 1, (hsize_t[]){ 60 }, H5P_DEFAULT); }
static void other_length(void) { set_of("tokens", H5T_STD_I32LE, 1, (hsize_t[]){ 61 }, H5P_DEFAULT); }
static void huge(void) { set_of("tokens", H5T_STD_I32LE, 1, (hsize_t[]){ 1ull << 40 }, H5P_DEFAULT); }
static void other_rank(void) { set_of("tokens", H5T_STD_I32LE, 2, (hsize_t[]){ 60, 1 }, H5P_DEFAULT); }
static void other_tokens(void) { set_of("tokens", H5T_STD_I32LE, 1, (hsize_t[]){ 60 }, H5P_DEFAULT); }
static void other_hashes(void) { set_of("block_hashes", H5T_STD_U8LE, 2, (hsize_t[]){ 3, 16 }, H5P_DEFAULT); }
static void a_group(void) { H5Ldelete(run_group, "tokens", H5P_DEFAULT); H5Gclose(H5Gcreate2(run_group, "tokens", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT)); }
static void no_layer(void) { H5Ldelete(run_group, "layers/001", H5P_DEFAULT); }
static void no_sums(void) { H5Ldelete(run_group, "layers/001/v_xxh3", H5P_DEFAULT); }
static void zero_sums(void) { set_of("layers/001/v_xxh3", H5T_STD_U64LE, 1, (hsize_t[]){ 4 }, H5P_DEFAULT); }
static void k_for_v(void)
{
    H5Lmove(run_group, "layers/001/k", run_group, "layers/001/x", H5P_DEFAULT, H5P_DEFAULT);
    H5Lmove(run_group, "layers/001/v", run_group, "layers/001/k", H5P_DEFAULT, H5P_DEFAULT);
    H5Lmove(run_group, "layers/001/x", run_group, "layers/001/v", H5P_DEFAULT, H5P_DEFAULT);
    H5Lmove(run_group, "layers/001/k_xxh3", run_group, "layers/001/x", H5P_DEFAULT, H5P_DEFAULT);
    H5Lmove(run_group, "layers/001/v_xxh3", run_group, "layers/001/k_xxh3", H5P_DEFAULT, H5P_DEFAULT);
    H5Lmove(run_group, "layers/001/x", run_group, "layers/001/v_xxh3", H5P_DEFAULT, H5P_DEFAULT);
}
static void layers_exchanged(void)
{
    H5Lmove(run_group, "layers/001", run_group, "layers/x", H5P_DEFAULT, H5P_DEFAULT);
    H5Lmove(run_group, "layers/002", run_group, "layers/001", H5P_DEFAULT, H5P_DEFAULT);
    H5Lmove(run_group, "layers/x", run_group, "layers/002", H5P_DEFAULT, H5P_DEFAULT);
}
static void unfiltered(void)
{
    hid_t t = pd_dump_type("f16");
    set_of("layers/002/k", t, 3, (hsize_t[]){ 60, 2, 8 }, H5P_DEFAULT);
    H5Tclose(t);
}
static void deflated(void)
{
    hid_t t = pd_dump_type("f16"), cpl = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_chunk(cpl, 3, (hsize_t[]){ 16, 2, 8 });
    H5Pset_deflate(cpl, 1);
    set_of("layers/002/k", t, 3, (hsize_t[]){ 60, 2, 8 }, cpl);
    H5Pclose(cpl);
    H5Tclose(t);
}
static void replace_attr(const char *name, hid_t type, const void *v)
{
    hid_t s = H5Screate(H5S_SCALAR), a;
    H5Adelete(run_group, name);
    a = H5Acreate2(run_group, name, type, s, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(a, type, v);
    H5Aclose(a);
    H5Sclose(s);
}
static void no_descriptor(void) { H5Adelete(run_group, "descriptor"); }
static void numeric_descriptor(void) { replace_attr("descriptor", H5T_NATIVE_INT, &(int){ 5 }); }
static void loose_descriptor(void)
{
    hid_t t = H5Tcopy(H5T_C_S1);
    const char *text = "{}";
    H5Tset_size(t, H5T_VARIABLE);
    replace_attr("descriptor", t, &text);
    H5Tclose(t);
}
static void junk_descriptor(void)
{
    hid_t t = H5Tcopy(H5T_C_S1);
    H5Tset_size(t, 5);
    replace_attr("descriptor", t, "[[[[[");
    H5Tclose(t);
}
static void other_n_tokens(void) { replace_attr("n_tokens", H5T_NATIVE_INT, &(int){ 59 }); }
static void other_gen(void)
{
    hid_t t = H5Tcopy(H5T_C_S1);
    H5Tset_size(t, 32);
    replace_attr("gen", t, "00000000000000000000000000000000");
    H5Tclose(t);
}

static void hostile_structure_is_named(void **state)
{
    static const struct { const char *what; void (*change)(void); const char *text; } cases[] = {
        { "a soft link", soft_link, "tokens is missing" }, { "an external link", external_link, "tokens is missing" }, { "data in another file", external_data, "tokens is missing" },
        { "a group", a_group, "tokens is missing" }, { "another type", other_type, "another type or shape" }, { "another byte order", other_order, "another type or shape" },
        { "another length", other_length, "another type or shape" }, { "a terabyte", huge, "another type or shape" }, { "another rank", other_rank, "another type or shape" },
        { "other tokens", other_tokens, "differs from the descriptor" }, { "other hashes", other_hashes, "block hash 0" }, { "a layer less", no_layer, "layers/001 is missing" },
        { "no checksums", no_sums, "v_xxh3" }, { "zero checksums", zero_sums, "layer 1 block 0 V: checksum" }, { "K for V", k_for_v, "layer 1 block 0 K: checksum" },
        { "layers exchanged", layers_exchanged, "layer 1 block 0 K: checksum" }, { "no filters", unfiltered, "layers/002/k" }, { "another filter", deflated, "layers/002/k" },
        { "no descriptor", no_descriptor, "descriptor is missing" }, { "a number for it", numeric_descriptor, "descriptor is missing or no text" },
        { "a text of any length", loose_descriptor, "descriptor is missing or no text" }, { "junk for it", junk_descriptor, "descriptor" },
        { "another n_tokens", other_n_tokens, "n_tokens is 59" }, { "another generation", other_gen, "attribute gen" },
    };
    struct fix f;
    struct pd_err e = { 0 };
    struct pd_pool *to = NULL;
    struct got got;
    int n;
    const char *victim = path_of("hostile.h5");
    fix_make(&f, &f16, 60, 0, 80);
    assert_int_equal(pd_pool_new(&f16, 64 << 20, &to, &e), 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char name[64];
        write_dump(victim, &f, 1);
        H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
        hid_t file = H5Fopen(victim, H5F_ACC_RDWR, H5P_DEFAULT);
        snprintf(name, sizeof name, "/runs/%s", f.d.run);
        run_group = H5Gopen2(file, name, H5P_DEFAULT);
        assert_true(run_group >= 0);
        cases[i].change();
        H5Gclose(run_group);
        assert_true(H5Fclose(file) >= 0);
        memset(&got, 0, sizeof got);
        int rc = consume(victim, NULL, to, &got, 1, &n, &e);
        if (rc != PD_ECORRUPT || !strstr(e.msg, cases[i].text))
            fail_msg("%s: code %d, '%s' lacks '%s'", cases[i].what, rc, e.msg, cases[i].text);
        pd_arena_free(&got.arena);
        assert_int_equal(pd_pool_stats(to).used, 0);
    }
    pd_pool_free(to);
    fix_free(&f);
}

static pid_t child_of_mine(void)
{
    char path[64];
    int pid = 0;
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    FILE *f = fopen(path, "r");
    assert_int_equal(f ? fscanf(f, "%d", &pid) : 0, 1);
    fclose(f);
    return pid;
}

/* The child is ended as a hostile file would end it, or its consumer goes away: told for what it is, at once, and no zombie stays. */
static void the_reader_dies_alone(void **state)
{
    static const struct { int signal, code; const char *text; } ends[] = {
        { SIGSEGV, PD_ECORRUPT, "corrupt: libhdf5 Segmentation fault" }, { SIGABRT, PD_ECORRUPT, "corrupt: libhdf5 Aborted" }, { SIGALRM, PD_ECORRUPT, "corrupt: libhdf5 hangs" },
        { SIGXCPU, PD_ECORRUPT, "corrupt: libhdf5 hangs" }, { SIGKILL, PD_ECORRUPT, "corrupt: libhdf5 Killed" }, { 0, PD_ECANCEL, "broken off" }, { -1, PD_ECANCEL, "broken off" },
    };
    struct pd_pool_geom g = { .layers = 30, .kv_heads = 3, .head_dim = 64, .block_size = 16, .dtype = PD_F16 };
    struct fix f;
    struct pd_err e = { 0 };
    const char *p = path_of("big.h5");
    fix_make(&f, &g, 500, 0, 81);
    write_dump(p, &f, 1);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        struct pd_dump_r *r = NULL;
        uint8_t first[16];
        int fd;
        assert_int_equal(pd_dump_read(p, NULL, &r, &fd, &e), 0);
        assert_int_equal(read(fd, first, sizeof first), sizeof first);
        if (ends[i].signal > 0)
            kill(child_of_mine(), ends[i].signal);
        else if (!ends[i].signal)
            close(fd);          /* -1: neither read on nor closed */
        time_t t0 = time(NULL);
        FAILS_WITH(pd_dump_read_end(r, &e), ends[i].code, ends[i].text);
        assert_true(time(NULL) - t0 <= 4);
        if (ends[i].signal)
            close(fd);
        assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    }
    fix_free(&f);
}

struct saved { struct fix *f; uint32_t tokens; };

static int check_saved(void *ctx, struct pd_kv_run *r, struct pd_err *e)
{
    struct saved *s = ctx;
    s->tokens = r->d.n_tokens;
    assert_memory_equal(r->d.token_ids, s->f->ids, r->d.n_tokens * sizeof *s->f->ids);
    for (uint32_t l = 0; l < r->d.layout.layers; l++)
        for (int v = 0; v < 2; v++)
            for (uint32_t t = 0; t < r->d.n_tokens; t++)
                for (uint32_t h = 0; h < r->d.layout.kv_heads; h++) {
                    struct pd_kv_run orig = { .d = s->f->d, .pool = s->f->pool, .blocks = s->f->blocks };
                    float a[64], b[64];
                    pd_kv_row(r, l, v, t, h, a);
                    pd_kv_row(&orig, l, v, t, h, b);
                    if (memcmp(a, b, r->d.layout.head_dim * sizeof *a))
                        fail_msg("layer %u token %u differs", l, t);
                }
    return 0;
}

/* Cut at 50 places: reading refuses and says so; salvage gives a prefix of the right numbers, the longer the later the cut, or refuses. */
static void a_cut_file_is_refused_or_salvaged(void **state)
{
    struct fix f;
    struct pd_err e = { 0 };
    struct pd_dump_r *r = NULL;
    size_t n_bytes;
    int fd, saved = 0, refused = 0;
    uint32_t before = 0;
    FILE *null = fopen("/dev/null", "w");
    const char *p = path_of("cut.h5"), *s = path_of("saved.h5");
    struct pd_pool_geom g = { .layers = 4, .kv_heads = 4, .head_dim = 64, .block_size = 16, .dtype = PD_F16 };
    fix_make(&f, &g, 1000, 0, 79);
    write_dump(p, &f, 1);
    uint8_t *b = slurp(p, &n_bytes);
    for (int i = 1; i <= 50; i++) {
        size_t n = n_bytes * (size_t)i / 51;
        spit(p, b, n);
        FAILS_WITH(pd_dump_read(p, NULL, &r, &fd, &e), PD_ECORRUPT, "cut");
        unlink(s);
        struct pd_kv_opts o = { .out = null, .quiet = true };
        int rc = pd_kv_salvage(p, s, &o, &e);
        if (rc) {
            assert_int_equal(rc, PD_ECORRUPT);
            assert_int_equal(access(s, F_OK), -1);
            refused++;
            continue;
        }
        struct saved got = { &f, 0 };
        if (pd_kv_each_run(s, -1, &(struct pd_kv_walk){ .mode = PD_DUMP_DATA, .run_fn = check_saved, .ctx = &got }, &e))
            fail_msg("%s", e.msg);
        assert_true(got.tokens >= before && got.tokens > 0 && got.tokens < 1000);
        before = got.tokens;
        saved++;
    }
    print_message("# %d cuts: %d refused, %d salvaged, the last with %u of 1000 tokens\n", 50, refused, saved, before);
    assert_true(before > 940);
    /* of the data's part nearly every cut leaves something */
    assert_true(saved >= (int)(50 * (n_bytes - (1 << 20)) / n_bytes) - 2);
    free(b);
    fclose(null);
    fix_free(&f);
}

static int remove_dir(void **state)
{
    char cmd[300];
    snprintf(cmd, sizeof cmd, "rm -rf %s", dir);
    return system(cmd);
}

static int make_dir(void **state)
{
    return mkdtemp(dir) ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kv_comes_back_in_every_bit), cmocka_unit_test(many_runs_in_their_order), cmocka_unit_test(nothing_half_written_stays),
        cmocka_unit_test(a_full_disk_is_an_error), cmocka_unit_test(not_a_dump_is_told), cmocka_unit_test(a_flipped_byte_is_found),
        cmocka_unit_test(hostile_structure_is_named), cmocka_unit_test(the_reader_dies_alone),
        cmocka_unit_test(mutations_never_lie), cmocka_unit_test(a_cut_file_is_refused_or_salvaged),
    };
    signal(SIGPIPE, SIG_IGN);
    pd_log_init("test_dump", 0, true);
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
