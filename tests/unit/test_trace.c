/* Logs of events: what the reader makes of torn, mixed and rotated files; that every rule of the checker is broken by its own log, and by nothing else. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../libcommon/base/clock.h"
#include "../../libcommon/trace/check.h"
#include "../../libcommon/wire/json.h"

static char dir[] = "/tmp/pd-test-XXXXXX";

static const char *in_dir(const char *name)
{
    static char path[8][200];
    static int turn;
    turn = (turn + 1) % 8;
    snprintf(path[turn], sizeof path[turn], "%s/%s", dir, name);
    return path[turn];
}

static void put(const char *path, const void *p, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, n, f), n);
    fclose(f);
}

/* ---- a log from text ----
 * Events parted by ';': "WORKER STATE [key=value]...", a millisecond apart. The worker's name gives its role: p0 prefill, d0 decode, r route, f front.
 * Keys: run (a letter, default A; "-" none), pos, n (tokens), choice, lease, gen, parent (any value), t (so many ms later), mono (ms of skew of the wall
 * clock). */
struct maker { int64_t us, skew; };

static void run_id(char out[PD_RUN_LEN + 1], int i) { snprintf(out, PD_RUN_LEN + 1, "01ARZ3NDEKTSV4RRFFQ%07d", i); }

static void make_one(struct maker *m, char *text, struct pd_buf *b)
{
    struct pd_event v = { 0 };
    struct pd_err e;
    char *save, *worker = strtok_r(text, " ", &save), *state = strtok_r(NULL, " ", &save), *arg;
    int run = 'A';
    if (!worker)
        return;
    m->us += 1000;
    v.worker = (struct pd_str){ worker, strlen(worker) };
    snprintf(v.state, sizeof v.state, "%s", state);
    strcpy(v.role, worker[0] == 'p' ? "prefill" : worker[0] == 'd' ? "decode" : worker[0] == 'r' ? "route" : "front");
    while ((arg = strtok_r(NULL, " ", &save))) {
        char *eq = strchr(arg, '=');
        assert_non_null(eq);
        *eq++ = 0;
        long n = strtol(eq, NULL, 10);
        if (!strcmp(arg, "run"))
            run = eq[0];
        else if (!strcmp(arg, "pos"))
            v.pos = (uint32_t)n;
        else if (!strcmp(arg, "n"))
            v.tokens = (uint32_t)n;
        else if (!strcmp(arg, "choice"))
            v.choice = (uint32_t)n;
        else if (!strcmp(arg, "lease"))
            v.has_lease = true, v.lease[0] = (uint8_t)n;
        else if (!strcmp(arg, "gen"))
            v.has_gen = true, v.gen[0] = (uint8_t)n;
        else if (!strcmp(arg, "parent"))
            v.has_parent = true, v.parent[0] = (uint8_t)n;
        else if (!strcmp(arg, "t"))
            m->us += n * 1000;
        else if (!strcmp(arg, "skew"))
            m->skew = n * 1000;
        else
            fail_msg("%s is no key", arg);
    }
    enum pd_state_id id = pd_state_find((struct pd_str){ v.state, strlen(v.state) });
    if (run != '-' && pd_state[id].class != PD_SC_PROC)
        run_id(v.run, run);
    v.mono_us = m->us;
    v.t_us = 1700000000000000 + m->us + m->skew;
    if (pd_event_encode(&v, b, &e))
        fail_msg("%s", e.msg);
}

static void make(struct maker *m, const char *text, struct pd_buf *b)
{
    char *copy = strdup(text), *save, *one;
    char *events[400];
    int n = 0;
    for (one = strtok_r(copy, ";\n", &save); one; one = strtok_r(NULL, ";\n", &save))
        events[n++] = one;
    for (int i = 0; i < n; i++)
        make_one(m, events[i], b);
    free(copy);
}

/* ---- what the checker finds ---- */

struct found { char rules[400]; struct pd_finding last; };

static int found(void *ctx, const struct pd_finding *f, struct pd_err *e)
{
    struct found *x = ctx;
    size_t n = strlen(x->rules);
    snprintf(x->rules + n, sizeof x->rules - n, "%s%s%s", n ? " " : "", f->lost ? "lost:" : "", f->rule);
    x->last = *f;
    x->last.first.worker = x->last.second.worker = NULL;        /* the checker's */
    return 0;
}

static struct pd_check_sum check_files(const char *const *paths, struct found *x)
{
    struct pd_log *l;
    struct pd_check *c;
    struct pd_log_rec r;
    struct pd_err e;
    struct pd_check_sum sum;
    memset(x, 0, sizeof *x);
    if (pd_log_open(paths, &(struct pd_log_opts){ 0 }, &l, &e))
        fail_msg("%s", e.msg);
    assert_int_equal(pd_check_new(&(struct pd_check_opts){ .found = found, .ctx = x }, &c, &e), 0);
    int rc;
    while ((rc = pd_log_next(l, &r, &e)) == 1)
        assert_int_equal(pd_check_record(c, &r, &e), 0);
    if (rc)
        fail_msg("%s", e.msg);
    assert_int_equal(pd_check_end(c, pd_log_stats(l).torn, &sum, &e), 0);
    pd_check_free(c);
    pd_log_free(l);
    return sum;
}

static struct pd_check_sum check_text(const char *text, struct found *x)
{
    struct maker m = { 0 };
    struct pd_buf b = { 0 };
    const char *path = in_dir("log");
    make(&m, text, &b);
    put(path, b.p, b.n);
    pd_buf_free(&b);
    struct pd_check_sum sum = check_files((const char *const[]){ path, NULL }, x);
    unlink(path);
    return sum;
}

#define UP "p0 starting; d0 starting;"
#define DOWN "p0 gone; d0 gone;"
#define PRE "p0 accepted; p0 prefill_started; p0 prefill_completed;"
#define MOVE "p0 kv_transfer_started; p0 kv_published; d0 kv_transfer_started parent=1; d0 kv_transfer_completed;"
#define REMOTE "p0 accepted; p0 prefill_started; p0 kv_transfer_started; d0 kv_transfer_started parent=1; p0 prefill_completed; p0 kv_published; d0 kv_transfer_completed; d0 decode_started;"
#define TOKENS "d0 streaming n=1; d0 streaming pos=1 n=4; d0 completed n=5;"
#define ROUTED "r starting; r accepted; r route_selected;"
#define P_WORK(p) p " prefill_started parent=1; " p " prefill_completed; " p " kv_published;"
#define D_WORK(d) d " kv_transfer_started; " d " kv_transfer_completed; " d " decode_started;"

static const struct { const char *name, *log, *want; } cases[] = {
    /* what is right */
    { "remote, sent while computed", UP REMOTE TOKENS DOWN, "" },
    { "remote, one after the other", UP PRE MOVE "d0 decode_started;" TOKENS DOWN, "" },
    { "aggregated", "d0 starting; d0 accepted; d0 prefill_started; d0 prefill_completed; d0 decode_started;" TOKENS "d0 gone", "" },
    { "ends at prefill", UP PRE "p0 kv_published; d0 streaming n=1 parent=1; d0 completed n=1;" DOWN, "" },
    { "two choices", UP REMOTE "d0 streaming n=1; d0 streaming choice=1 n=1; d0 streaming pos=1 n=2; d0 streaming choice=1 pos=1 n=1; d0 completed n=5;" DOWN, "" },
    { "falls back", UP PRE "p0 kv_published; p0 kv_transfer_started; d0 kv_transfer_started parent=1; d0 fallback; d0 prefill_started; d0 prefill_completed; d0 decode_started;" TOKENS DOWN, "" },
    { "refused", "d0 starting; d0 failed; d0 gone", "" },
    { "failed in the middle", UP PRE "p0 failed;" DOWN, "" },
    { "prefill alone", "p0 starting;" PRE "p0 kv_transfer_started; p0 kv_published; p0 gone", "" },
    { "decode alone", "d0 starting; d0 kv_transfer_started parent=1; d0 kv_transfer_completed parent=1; d0 decode_started;" TOKENS "d0 gone", "" },
    { "routed", ROUTED UP P_WORK("p0") D_WORK("d0") "d0 streaming n=3; r streaming n=3; d0 completed n=3; r completed n=3;" DOWN "r gone", "" },
    { "routed, the worker takes it in too", ROUTED UP "p0 accepted parent=1;" P_WORK("p0") D_WORK("d0") "d0 streaming n=1; r streaming n=1; r completed n=1; d0 completed n=1;" DOWN "r gone", "" },
    { "retry on another, the first comes in late",
        ROUTED UP "p1 starting; p0 prefill_started parent=1; r retry; r route_selected; p1 prefill_started parent=1; p0 prefill_completed;"
      "p1 prefill_completed; p1 kv_published; p0 kv_published;" D_WORK("d0") "d0 streaming n=1; r streaming n=1; r completed n=1;" DOWN "p1 gone; r gone", "" },
    { "a worker fails and the router falls back",
        ROUTED UP "p0 prefill_started parent=1; p0 failed; r fallback; d0 prefill_started; d0 prefill_completed; d0 decode_started; d0 streaming n=2;"
      "r streaming n=2; r completed n=2;" DOWN "r gone", "" },
    { "retry while a worker's token was on its way",
        ROUTED UP "p0 prefill_started parent=1; p0 prefill_completed; p0 kv_published;" D_WORK("d0") "d0 streaming n=1; r retry; r route_selected;"
      P_WORK("p0") D_WORK("d1") "d1 streaming n=2; r streaming n=2; r completed n=2; d1 gone;" DOWN "r gone", "" },
    { "migrated", ROUTED UP "d1 starting;" P_WORK("p0") D_WORK("d0") "d0 streaming n=6; r streaming n=4; r migrated; d1 prefill_started; d1 prefill_completed; d1 decode_started;"
      "d1 streaming pos=4 n=3; r streaming pos=4 n=3; r completed n=7; d1 gone;" DOWN "r gone", "" },
    { "decode dies before it streams, the KV is moved again", ROUTED UP "d1 starting;" P_WORK("p0") D_WORK("d0") "r retry; r route_selected;" D_WORK("d1")
      "d1 streaming n=2; r streaming n=2; r completed n=2; d1 gone;" DOWN "r gone", "" },
    { "migrated with the KV", ROUTED UP "d1 starting;" P_WORK("p0") D_WORK("d0") "r streaming n=1; r migrated;" D_WORK("d1") "r streaming pos=1 n=2; r completed n=3; d1 gone;" DOWN "r gone", "" },
    { "first token early", ROUTED UP "p0 prefill_started parent=1; p0 prefill_completed; r first_token_early; r streaming n=1; p0 kv_published;" D_WORK("d0") "d0 streaming n=3;"
      "r streaming pos=1 n=2; r completed n=3;" DOWN "r gone", "" },
    { "first token early, the KV does not come", ROUTED UP "p0 prefill_started parent=1; p0 prefill_completed; p0 kv_published; d0 kv_transfer_started; r first_token_early;"
      "r streaming n=1; p0 gone; d0 fallback; d0 prefill_started; d0 prefill_completed; d0 decode_started; d0 streaming n=3; r streaming pos=1 n=2; r completed n=3; d0 gone;"
      "r gone", "" },
    { "cancelled, a transfer just ends", UP PRE "p0 kv_published; d0 kv_transfer_started parent=1; p0 cancelled; d0 kv_transfer_completed t=200;" DOWN, "" },
    { "leases", UP "p0 lease_granted lease=1 gen=1; d0 lease_read lease=1; p0 lease_renewed lease=1; p0 lease_released lease=1; p0 lease_granted gen=7; p0 lease_expired gen=7;"
      "p0 lease_granted lease=2; p0 lease_revoked lease=2; p0 reaped lease=2;" DOWN, "" },
    { "a state of a later version", UP PRE "p0 pondered;" "p0 kv_published;" DOWN, "" },
    { "the log was rotated", "p0 rotated; p0 prefill_completed; p0 kv_published; p0 lease_released lease=4; p0 gone", "" },
    /* every rule by itself */
    { "no accepted", UP "p0 prefill_started; p0 prefill_completed; p0 kv_published;" DOWN, "order" },
    { "a state skipped", UP "p0 accepted; p0 prefill_started; p0 kv_published;" DOWN, "order" },
    { "a state twice", UP "p0 accepted; p0 prefill_started; p0 prefill_started; p0 prefill_completed; p0 kv_published;" DOWN, "order" },
    { "backwards", UP PRE "p0 kv_published; p0 prefill_completed;" DOWN, "order" },
    { "decode before the KV was there", UP PRE "p0 kv_transfer_started; p0 kv_published; d0 kv_transfer_started; d0 decode_started;" TOKENS DOWN, "order" },
    { "completed without a token", UP PRE MOVE "d0 decode_started; d0 completed;" DOWN, "order" },
    { "two fallbacks", UP PRE "p0 kv_published; d0 fallback; d0 prefill_started; d0 fallback; d0 prefill_started; d0 prefill_completed; d0 decode_started;" TOKENS DOWN, "order" },
    { "migrated before anything ran", UP "p0 accepted; p0 prefill_started; p0 migrated; p0 failed;" DOWN, "order" },
    { "retry after the first token", UP REMOTE "d0 streaming n=1; d0 retry; d0 failed;" DOWN, "boundary" },
    { "fallback after an early first token", ROUTED UP "p0 prefill_started parent=1; p0 prefill_completed; r first_token_early; r streaming n=1; r fallback; r failed;" DOWN "r gone", "boundary" },
    { "fallback when more than the early token may be out", ROUTED UP "p0 prefill_started parent=1; p0 prefill_completed; p0 kv_published; r first_token_early; r streaming n=1;"
      D_WORK("d0") "d0 streaming n=3; r streaming pos=1 n=2; d0 fallback; r failed;" DOWN "r gone", "boundary" },
    { "two fallbacks after an early first token", ROUTED UP "p0 prefill_started parent=1; p0 prefill_completed; p0 kv_published; r first_token_early; r streaming n=1;"
      "d0 fallback; d0 prefill_started; d0 fallback; d0 prefill_started; d0 prefill_completed; d0 decode_started; d0 streaming n=3; r streaming pos=1 n=2; r completed n=3;"
      DOWN "r gone", "order" },
    { "goes on after its end", UP REMOTE TOKENS "d0 streaming pos=5 n=1;" DOWN, "after_end" },
    { "ends twice", UP REMOTE TOKENS "d0 failed;" DOWN, "after_end" },
    { "another goes on long after the end", UP PRE "p0 kv_published; d0 kv_transfer_started parent=1; p0 failed; d0 kv_transfer_completed t=2000;" DOWN,
        "after_end" },
    { "the first token twice", UP REMOTE "d0 streaming n=1; d0 streaming n=1; d0 streaming pos=1 n=4; d0 completed n=5;" DOWN, "first_token" },
    { "the first token twice, untold", UP REMOTE "d0 streaming; d0 streaming; d0 completed;" DOWN, "first_token" },
    { "a gap", UP REMOTE "d0 streaming n=1; d0 streaming pos=2 n=3; d0 completed n=5;" DOWN, "position" },
    { "a repeat", UP REMOTE "d0 streaming n=2; d0 streaming pos=1 n=4; d0 completed n=5;" DOWN, "position" },
    { "a gap where it counts: at the router",
        ROUTED UP P_WORK("p0") D_WORK("d0") "d0 streaming n=3; r streaming n=1; r streaming pos=2 n=1; r completed n=3;" DOWN "r gone", "position" },
    { "a repeat at the router after migrated",
        ROUTED UP P_WORK("p0") D_WORK("d0") "r streaming n=3; r migrated; d1 prefill_started; d1 prefill_completed; d1 decode_started;"
      "r streaming pos=2 n=1; r completed n=3; d1 gone;" DOWN "r gone", "position" },
    { "a wrong count", UP REMOTE "d0 streaming n=1; d0 streaming pos=1 n=4; d0 completed n=6;" DOWN, "token_count" },
    { "no end", UP REMOTE "d0 streaming n=1;" DOWN, "run_open" },
    { "no end at the router", ROUTED UP P_WORK("p0") DOWN "r gone", "run_open" },
    { "a transfer after the cancel", UP PRE "p0 kv_published; p0 cancelled; d0 kv_transfer_started t=1500;" DOWN, "transfer_after_cancel" },
    { "a read after the cancel", UP PRE "p0 lease_granted lease=1; p0 kv_published; p0 cancelled; d0 lease_read lease=1 t=1500; p0 lease_revoked lease=1;" DOWN, "transfer_after_cancel" },
    { "granted twice", UP "p0 lease_granted lease=1; p0 lease_granted lease=1; p0 lease_released lease=1;" DOWN, "lease_grant" },
    { "ended without a grant", UP "p0 lease_released lease=1;" DOWN, "lease_grant" },
    { "read after its end", UP "p0 lease_granted gen=1; p0 lease_expired gen=1; p0 lease_read gen=1;" DOWN, "lease_use" },
    { "read by another long after its end", UP "p0 lease_granted gen=1; p0 lease_expired gen=1; d0 lease_read gen=1 t=1100;" DOWN, "lease_use" },
    { "released and expired", UP "p0 lease_granted lease=1; p0 lease_released lease=1; p0 lease_expired lease=1;" DOWN, "lease_end" },
    { "never ended", UP "p0 lease_granted lease=1;" DOWN, "lease_open" },
    /* what is lost, not wrong */
    { "the router comes after eight workers, and died", "p0 starting; p0 accepted; p0 gone; p1 starting; p1 accepted; p1 gone; p2 starting; p2 accepted; p2 gone; p3 starting; p3 accepted; p3 gone; p4 starting; p4 accepted; p4 gone; p5 starting; p5 accepted; p5 gone; p6 starting; p6 accepted; p6 gone; p7 starting; p7 accepted; p7 gone;"
      "r starting; r accepted;", "lost:run_open" },
    { "the router comes after eight workers, and closed its log", "p0 starting; p0 accepted; p0 gone; p1 starting; p1 accepted; p1 gone; p2 starting; p2 accepted; p2 gone; p3 starting; p3 accepted; p3 gone; p4 starting; p4 accepted; p4 gone; p5 starting; p5 accepted; p5 gone; p6 starting; p6 accepted; p6 gone; p7 starting; p7 accepted; p7 gone;"
      "r starting; r accepted; r gone", "run_open" },
    { "decode died", UP REMOTE "d0 streaming n=1; p0 gone", "lost:run_open" },
    { "prefill died", UP "p0 accepted; p0 prefill_started; d0 gone", "lost:run_open" },
    { "the router died, workers live", ROUTED UP P_WORK("p0") DOWN, "lost:run_open" },
    { "a worker died, the router does not end the run", ROUTED UP P_WORK("p0") "d0 gone; r gone", "run_open" },
    { "the grantor died", UP "p0 lease_granted lease=1; d0 gone", "lost:lease_open" },
    { "the grantor died and was reaped", UP "p0 lease_granted lease=1; d0 reaped lease=1; d0 gone", "" },
    { "another life, same name", UP "p0 accepted; p0 prefill_started; p0 starting;" DOWN, "lost:run_open" },
};

static void every_rule_by_itself(void **state)
{
    int wrong = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct found x;
        check_text(cases[i].log, &x);
        if (strcmp(x.rules, cases[i].want)) {
            print_error("%s: '%s', not '%s' (%s)\n", cases[i].name, x.rules, cases[i].want, x.last.text);
            wrong++;
        }
    }
    assert_int_equal(wrong, 0);
}

/* The finding names the run and the two records. */
static void a_clash_is_shown(void **state)
{
    struct found x;
    struct pd_check_sum s = check_text(UP "p0 accepted run=B; p0 prefill_started run=B; p0 prefill_started run=B;" "p0 failed run=B;" DOWN, &x);
    char run[PD_RUN_LEN + 1];
    run_id(run, 'B');
    assert_string_equal(x.last.run, run);
    assert_int_equal(x.last.first.state, PD_ST_PREFILL_STARTED);
    assert_int_equal(x.last.second.state, PD_ST_PREFILL_STARTED);
    assert_true(x.last.first.offset > 0 && x.last.second.offset > x.last.first.offset);
    assert_int_equal(x.last.second.at_us - x.last.first.at_us, 1000);
    assert_int_equal(s.violations, 1);
    assert_int_equal(s.failed, 1);
}

/* Each record of a good log cut at each of its bytes, with the others behind it: that one is lost and counted, every other is read, and the check blames
 * nobody. */
static void what_is_torn_is_not_held_against_it(void **state)
{
    struct maker m = { 0 };
    struct pd_buf b = { 0 };
    struct found x;
    const char *path = in_dir("torn"), *const paths[] = { path, NULL };
    struct pd_err e;
    size_t begin[64], n = 0;
    make(&m, UP REMOTE TOKENS DOWN, &b);
    for (size_t at = 0; at < b.n; n++) {        /* where its records begin */
        begin[n] = at;
        at += 3;
        uint8_t *next = memmem(b.p + at, b.n - at, "\xa2pd", 3);
        at = next ? (size_t)(next - b.p) - 1 : b.n;
    }
    begin[n] = b.n;
    uint64_t whole = 0, violations = 0;
    for (size_t i = 0; i < n; i++)
        for (size_t cut = begin[i]; cut < begin[i + 1]; cut++) {        /* record i is cut short there; the others follow */
            struct pd_buf t = { 0 };
            struct pd_log *l;
            struct pd_log_rec r;
            assert_int_equal(pd_buf_add(&t, b.p, cut, &e) | pd_buf_add(&t, b.p + begin[i + 1], b.n - begin[i + 1], &e), 0);
            put(path, t.p, t.n);
            assert_int_equal(pd_log_open(paths, &(struct pd_log_opts){ 0 }, &l, &e), 0);
            uint64_t got = 0;
            int rc;
            while ((rc = pd_log_next(l, &r, &e)) == 1)
                got++;
            assert_int_equal(rc, 0);
            struct pd_log_stats st = pd_log_stats(l);
            pd_log_free(l);
            if (got != n - 1 || st.torn != (cut > begin[i]) || st.torn_bytes != cut - begin[i])
                fail_msg("record %zu cut to %zu bytes: %llu records, torn %llu, bytes %llu", i, cut - begin[i], (unsigned long long)got,
                    (unsigned long long)st.torn,
                         (unsigned long long)st.torn_bytes);
            if (cut > begin[i] && cut % 8 == 0) {
                violations += check_files(paths, &x).violations;        /* nothing is wrong with what is there */
                if (violations)
                    fail_msg("record %zu cut to %zu bytes: %s: %s", i, cut - begin[i], x.rules, x.last.text);
            }
            whole++;
            pd_buf_free(&t);
        }
    assert_true(whole > 1000);
    assert_int_equal(violations, 0);
    pd_buf_free(&b);
    unlink(path);
}

/* ---- order ---- */

static void read_states(const char *const *paths, char *out, size_t cap)
{
    struct pd_log *l;
    struct pd_log_rec r;
    struct pd_err e;
    size_t n = 0;
    out[0] = 0;
    if (pd_log_open(paths, &(struct pd_log_opts){ 0 }, &l, &e))
        fail_msg("%s", e.msg);
    while (pd_log_next(l, &r, &e) == 1)
        n += (size_t)snprintf(out + n, cap - n, "%s%.*s:%s", n ? " " : "", (int)r.ev.worker.n, r.ev.worker.p, r.ev.state);
    pd_log_free(l);
}

static void files_merge_by_time(void **state)
{
    struct maker m = { 0 };
    struct pd_buf p = { 0 }, d = { 0 };
    char got[600];
    const char *pp = in_dir("p"), *dd = in_dir("d");
    /* the wall clock steps back by an hour between accepted and prefill_started */
    make(&m, "p0 starting", &p);
    make(&m, "d0 starting", &d);
    make(&m, "p0 accepted; p0 prefill_started skew=-3600000", &p);
    make(&m, "d0 kv_transfer_started", &d);
    make(&m, "p0 kv_published", &p);
    make(&m, "d0 kv_transfer_completed", &d);
    make(&m, "d1 decode_started", &d);      /* began after the step, on the same clock */
    make(&m, "p0 gone", &p);
    make(&m, "d1 gone", &d);
    put(pp, p.p, p.n);
    put(dd, d.p, d.n);
    const char *want = "p0:starting d0:starting p0:accepted p0:prefill_started d0:kv_transfer_started p0:kv_published d0:kv_transfer_completed d1:decode_started p0:gone d1:gone";
    read_states((const char *const[]){ pp, dd, NULL }, got, sizeof got);
    assert_string_equal(got, want);
    read_states((const char *const[]){ dd, pp, dd, NULL }, got, sizeof got);    /* twice: read once */
    assert_string_equal(got, want);
    /* FILE.1 comes first, and is found */
    const char *rot = in_dir("p.1");
    rename(dd, rot);
    read_states((const char *const[]){ pp, NULL }, got, sizeof got);
    assert_string_equal(got, want);
    /* JSON Lines, with a bad line */
    struct pd_buf j = { 0 };
    struct pd_err e;
    m = (struct maker){ 0 };
    p.n = 0;
    make(&m, "p0 starting", &p);
    assert_int_equal(pd_msgpack_to_json(p.p, p.n, &j, &e) | pd_buf_add(&j, "\n{\"pd\":\"eve\n", 12, &e) | pd_msgpack_to_json(p.p, p.n, &j, &e), 0);
    put(pp, j.p, j.n);
    unlink(rot);
    read_states((const char *const[]){ pp, NULL }, got, sizeof got);
    assert_string_equal(got, "p0:starting p0:starting");
    /* what is no log */
    struct pd_log *l;
    struct pd_log_rec r;
    put(pp, "hello, world\n", 13);
    assert_int_equal(pd_log_open((const char *const[]){ pp, NULL }, &(struct pd_log_opts){ 0 }, &l, &e), 0);
    assert_int_equal(pd_log_next(l, &r, &e), PD_ECORRUPT);
    assert_non_null(strstr(e.msg, "there is no record in it"));
    pd_log_free(l);
    put(pp, "", 0);
    assert_int_equal(pd_log_open((const char *const[]){ pp, NULL }, &(struct pd_log_opts){ 0 }, &l, &e), 0);
    assert_int_equal(pd_log_next(l, &r, &e), 0);
    pd_log_free(l);
    unlink(pp);
    pd_buf_free(&p); pd_buf_free(&d); pd_buf_free(&j);
}

/* A log that grows, is torn at its end for a moment, and is replaced. */
static void a_log_is_followed(void **state)
{
    struct maker m = { 0 };
    struct pd_buf b = { 0 };
    struct pd_log *l;
    struct pd_log_rec r;
    struct pd_err e;
    const char *path = in_dir("f"), *old = in_dir("f.1");
    make(&m, "p0 starting", &b);
    put(path, b.p, b.n);
    assert_int_equal(pd_log_open((const char *const[]){ path, NULL }, &(struct pd_log_opts){ .follow = true }, &l, &e), 0);
    assert_int_equal(pd_log_next(l, &r, &e), 1);
    assert_int_equal(pd_log_next(l, &r, &e), 0);
    size_t first = b.n;
    make(&m, "p0 accepted", &b);
    put(path, b.p, b.n - 5);        /* the same file, longer */
    assert_int_equal(pd_log_next(l, &r, &e), 0);
    put(path, b.p, b.n);
    assert_int_equal(pd_log_next(l, &r, &e), 1);
    assert_int_equal(r.state, PD_ST_ACCEPTED);
    assert_int_equal(r.offset, first);
    rename(path, old);
    b.n = 0;
    make(&m, "p0 rotated", &b);
    put(path, b.p, b.n);
    assert_int_equal(pd_log_next(l, &r, &e), 1);
    assert_int_equal(r.state, PD_ST_ROTATED);
    assert_int_equal(pd_log_next(l, &r, &e), 0);
    assert_false(pd_log_over(l));
    assert_int_equal(pd_log_stats(l).torn, 0);
    pd_log_free(l);
    unlink(path);
    unlink(old);
    pd_buf_free(&b);
}

/* Memory does not grow with the log: state is that of live runs. LONG=1: 1.2 million events. */
static void large_logs_are_streamed(void **state)
{
    int runs = getenv("LONG") ? 100000 : 20000;
    const char *path = in_dir("large"), *const paths[] = { path, NULL };
    FILE *f = fopen(path, "wb");
    struct maker m = { 0 };
    struct pd_buf b = { 0 };
    struct pd_err e;
    struct found x;
    make(&m, UP, &b);
    fwrite(b.p, 1, b.n, f);
    b.n = 0;
    make(&m, REMOTE TOKENS "p0 lease_released gen=1;", &b);
    b.n = 0;
    static const char *const step[] = { "accepted", "prefill_started", "kv_transfer_started", "prefill_completed", "kv_published", "kv_transfer_completed",
        "decode_started", "streaming",
                                        "completed", "lease_granted", "lease_released", "cancel_acked" };
    for (int i = 0; i < runs; i++) {
        b.n = 0;
        for (size_t k = 0; k < sizeof step / sizeof *step; k++) {
            struct pd_event v = { .has_lease = k == 9 || k == 10, .t_us = 1700000000000000 + i * 100 + (int64_t)k, .mono_us = i * 100 + (int64_t)k,
                .worker = { k < 5 ? "p0" : "d0", 2 } };
            run_id(v.run, i);
            memcpy(v.lease, &i, sizeof i);
            strcpy(v.state, step[k]);
            strcpy(v.role, k < 5 ? "prefill" : "decode");
            v.tokens = k == 7 || k == 8 ? 1 : 0;
            assert_int_equal(pd_event_encode(&v, &b, &e), 0);
        }
        fwrite(b.p, 1, b.n, f);
    }
    b.n = 0;
    m.us = (int64_t)runs * 100 + 1000;
    make(&m, DOWN, &b);
    fwrite(b.p, 1, b.n, f);
    fclose(f);
    int64_t t0 = pd_mono_us();
    struct pd_check_sum s = check_files(paths, &x);
    double took = (double)(pd_mono_us() - t0) / 1e6;
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    print_message("# %llu events in %.1f s, %ld MiB at the most\n", (unsigned long long)s.events, took, u.ru_maxrss / 1024);
    assert_string_equal(x.rules, "");
    assert_int_equal(s.completed, runs);
    assert_int_equal(s.leases_ended, runs);
#ifndef __SANITIZE_ADDRESS__
    assert_in_range(u.ru_maxrss / 1024, 1, 64);
#endif
    unlink(path);
    pd_buf_free(&b);
}

int main(void)
{
    if (!mkdtemp(dir))
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_rule_by_itself), cmocka_unit_test(a_clash_is_shown), cmocka_unit_test(what_is_torn_is_not_held_against_it),
            cmocka_unit_test(files_merge_by_time),
        cmocka_unit_test(a_log_is_followed), cmocka_unit_test(large_logs_are_streamed) };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    rmdir(dir);
    return failed;
}
