/* Every allocation, mapping, descriptor read and write of a hand-over refused once (make V=fault): the KV arrives right, or both ends say why not; nothing
 * stays behind. */
#include <signal.h>
#include <sys/wait.h>
#include "xfer_fixture.h"
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

#ifdef PD_FAULT
/* A world built by hand: the fixture asserts, and here everything may fail. 0: taken and right; < 0: refused; > 0: wrong. */
static int hand_over(const char *via, bool in_place, struct pd_err *e)
{
    struct xf w = { .now = 1, .may_cut = true };
    bool reused = false;
    int rc = pd_pool_new(&xf_geom, FIX_POOL_BYTES, &w.pool, e);
    struct pd_pool *from = NULL;
    uint32_t blocks[13], n = 0;
    int32_t ids[XF_TOKENS] = { 0 };
    msgpack_sbuffer fp;
    fix_fp(&fp, "rope_theta", 10000, "pd 0.1");
    struct pd_kvdesc d = { .epoch = 3, .fp_fields = { (uint8_t *)fp.data, fp.size }, .n_tokens = XF_TOKENS, .token_ids = ids };
    struct pd_first first = { 11, 0, NULL, 0 };
    d.first = &first;
    d.n_first = 1;
    d.request.prompt = (struct pd_str){ "x", 1 };
    rc = rc ? rc : pd_pool_new(&xf_geom, FIX_POOL_BYTES, &from, e);
    rc = rc ? rc : pd_pool_take(from, 13, blocks, e);
    if (!rc)
        n = 13;
    for (uint32_t i = 0; i < n; i++)        /* tokens only: the last block's tail is zero */
        for (int v = 0; v < 2; v++)
            for (int h = 0; h < 2; h++)
                memset(pd_pool_base(from, blocks[i]) + pd_pool_off(from, 1, v) + h * 64, (int)i + 1 + v, i == 12 ? 32 : 64);
    rc = rc ? rc : pd_run_new(d.run, e);
    rc = rc ? rc : pd_gen_new(d.gen, e);
    rc = rc ? rc : pd_sha256(fp.data, fp.size, d.fp_sha, e);
    rc = rc ? rc : pd_request_resolve(&d.request, 1, e);
    if (!rc)
        pd_layout_from_pool(from, &d.layout);
    rc = rc ? rc : pd_leases_new(&(struct pd_leases_opts){ .pool = from, .max = 16 }, &w.leases, e);
    struct pd_xfer_opts og = { .giving = true, .unix_socket = true, .epoch = 3, .pool = from, .leases = w.leases, .fp_fields = d.fp_fields },
                        ot = { .unix_socket = true, .epoch = 3, .pool = w.pool, .fp_fields = d.fp_fields };
    if (!strcmp(via, "tcp")) {
        char told[PD_TCP_NAME];
        struct pd_tcp_addr a[PD_TCP_ADDRS];
        int k;
        if (pd_tcp_listen("127.0.0.1:0", 16, NULL, &w.listener, told, e) || pd_tcp_resolve(told, false, a, &k, e))
            return 64;
        w.tcp = og.tcp = ot.tcp = og.dialled = true;
        og.unix_socket = ot.unix_socket = false;
        og.peer = a[0];
        og.streams = 2;
        og.via = ot.via = "tcp";
    }
    rc = rc ? rc : pd_xfer_new(&og, w.now, &w.g, e);
    rc = rc ? rc : pd_xfer_new(&ot, w.now, &w.t, e);
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, w.sock))
        rc = 60;
    w.take.in_place = in_place;
    if (!rc)
        xf_pump(&w);
    rc = rc ? rc : pd_lease_grant(w.leases, d.run, d.gen, blocks, n, 0, w.now, w.lease, e);
    rc = rc ? rc : pd_lease_fill(w.leases, w.lease, e);
    struct pd_give g = { .desc = &d, .blocks = blocks, .chunk_blocks = XF_CHUNK, .via = via };
    memcpy(g.lease, w.lease, 16);
    rc = rc ? rc : pd_give(w.g, &g, w.now, &w.gm, e);
    if (!rc)
        xf_pump(&w);
    rc = rc ? rc : w.gm ? pd_give_finish(w.gm, &d, e) : (*e = w.last[0].err, w.last[0].err.code);
    if (!rc)
        xf_pump(&w);
    if (!rc && !w.blocks) {
        *e = w.last[1].err.code ? w.last[1].err : w.last[0].err;
        rc = e->code ? e->code : 61;
    }
    if (!rc && !fix_same(from, blocks, w.pool, w.blocks, 13))
        rc = 62;
    if (w.g && w.t)
        xf_close_ends(&w);
    else {
        pd_xfer_free(w.g);
        pd_xfer_free(w.t);
        close(w.sock[0]);
        close(w.sock[1]);
        if (w.tcp)
            close(w.listener);
    }
    xf_drop_blocks(&w);
    pd_import_free(w.parked);
    if (w.leases) {
        pd_leases_revoke_all(w.leases, "end", w.now);
        reused = pd_leases_counts(w.leases).live != 0;
    }
    pd_leases_free(w.leases);
    for (uint32_t i = 0; i < n; i++)
        pd_pool_put(from, blocks[i]);
    if (reused || (from && pd_pool_stats(from).used) || (w.pool && (pd_pool_stats(w.pool).used || pd_pool_stats(w.pool).borrowed)))
        rc = 63;
    pd_pool_free(from);
    pd_pool_free(w.pool);
    msgpack_sbuffer_destroy(&fp);
    return rc;
}

static int by_inline(struct pd_err *e) { return hand_over("inline", false, e); }
static int by_shm(struct pd_err *e) { return hand_over("shm", false, e); }
static int by_tcp(struct pd_err *e) { return hand_over("tcp", false, e); }
static int in_place(struct pd_err *e) { return hand_over("shm", true, e); }

/* Each N in a child, until nothing fails any more. Some refusals are survived (a slab that is not mapped a second time: copied): 0 and right. */
static int drill(const char *point, int (*what)(struct pd_err *), int *survived)
{
    for (int n = 1; n < 5000; n++) {
        int status;
        char counts[] = "/tmp/pd-count-XXXXXX", line[200] = "";
        int fd = mkstemp(counts);
        pid_t pid = fork();
        if (!pid) {
            char spec[60];
            struct pd_err e = { 0 };
            snprintf(spec, sizeof spec, "%s:fail:%d", point, n);
            setenv("PD_FAULT", spec, 1);
            setenv("PD_FAULT_COUNT", counts, 1);
            int null = open("/dev/null", O_WRONLY);
            dup2(null, 2);
            alarm(20);
            int rc = what(&e);
#ifdef __SANITIZE_ADDRESS__
            if (__lsan_do_recoverable_leak_check())
                _exit(80);
#endif
            exit(rc < 0 && !e.msg[0] ? 70 : rc < 0 ? 1 : rc);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        ssize_t got = read(fd, line, sizeof line - 1);
        close(fd);
        unlink(counts);
        if (!WIFEXITED(status))
            fail_msg("%s:fail:%d: killed by signal %d", point, n, WTERMSIG(status));
        if (WEXITSTATUS(status) > 1)
            fail_msg("%s:fail:%d: status %d", point, n, WEXITSTATUS(status));
        const char *at = got > 0 ? strstr(line, point) : NULL;
        if (WEXITSTATUS(status) == 0 && at && atol(at + strlen(point)) < n)
            return n - 1;
        *survived += WEXITSTATUS(status) == 0;
    }
    fail_msg("%s: no end", point);
    return 0;
}

static void everything_can_fail_once(void **state)
{
    static int (*const what[])(struct pd_err *) = { by_inline, by_shm, in_place, by_tcp };
    for (int i = 0; i < 4; i++) {
        int survived = 0;
        assert_in_range(drill("malloc", what[i], &survived), 50, 4000);
        assert_in_range(drill("mmap", what[i], &survived), 3, 20);
    }
}

static void descriptors_can_fail(void **state)
{
    int survived = 0;
    assert_in_range(drill("read", by_tcp, &survived), 1, 400);
    assert_in_range(drill("write", by_tcp, &survived), 1, 400);
    assert_in_range(drill("read", by_shm, &survived), 1, 200);
    assert_in_range(drill("write", by_shm, &survived), 2, 200);
}
#else
static void faults(void **state)
{
    print_message("# skip: needs make V=fault\n");
    skip();
}
#endif

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
#ifdef PD_FAULT
        cmocka_unit_test(everything_can_fail_once), cmocka_unit_test(descriptors_can_fail)
#else
        cmocka_unit_test(faults)
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
