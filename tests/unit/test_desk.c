/* A worker's desk: clients, runs, one thread. Its owner here does no computing: a run goes on until the test lets it, tells a token each time, and ends. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../libcommon/serve/desk.h"
#include "../../libcommon/wire/json.h"
#include "files.h"

struct run {
    struct pd_desk_run d;
    struct pd_call c_take, c_end, c_more;
    bool in, taken, ended;              /* in: it was admitted; taken, ended: the thread's */
    int pos;
};

static char path[] = "/tmp/pd-test-XXXXXX/D";
static struct pd_err e;
static struct pd_daemon *D;
static struct pd_desk *K;
static int admitted, freed, cancels, agains, idles;
static enum pd_why last_why;
static bool refuse_all, join;           /* join: what `again` says */
static struct pd_client *again_from;
static _Atomic int taken, ended;
static _Atomic bool at_once;            /* a run ends when it is taken */
static _Atomic bool slow, works, heard_it, early;       /* slow: who is taken has a turn to be made for it (works), which lasts until the client has what was said before */
static struct run *worked;
static void end_run(void *ctx);

/* ---- the owner ---- */

static void tell(struct run *r)
{
    struct pd_token t = { .pos = r->pos, .token = r->pos, .text = { "word ", 5 } };
    struct pd_buf b = { 0 };
    r->pos++;
    memcpy(t.run, r->d.name, sizeof t.run);
    assert_int_equal(pd_token_encode(&t, &b, NULL), 0);
    pd_desk_add(K, &r->d, b.p, b.n);
    pd_buf_free(&b);
}

static void end_run(void *ctx)
{
    struct run *r = ctx;
    if (r->ended)
        return;
    r->ended = true;
    ended++;
    tell(r);
    pd_desk_over(K, &r->d);
}

static void take(void *ctx)
{
    struct run *r = ctx;
    r->taken = true;
    taken++;
    tell(r);
    worked = r;
    works = slow;
    if (at_once && !works)
        end_run(r);
}

static void more(void *ctx)
{
    for (int i = 0; i < 20000; i++)
        tell(ctx);
}

static int admit(void *ctx, struct pd_desk_run *d, struct pd_err *err)
{
    struct run *r = (struct run *)d;
    if (refuse_all)
        return pd_fail(err, PD_ENOMEM, "not today");
    admitted++;
    r->in = true;
    d->kept = d->in.req.max_tokens == 99;
    pd_desk_call(K, d, &r->c_take, take, r);
    return 0;
}

static bool again(void *ctx, struct pd_desk_run *d, struct pd_client *from, const struct pd_intake *in, const struct pd_routing *route)
{
    agains++;
    again_from = from;
    return join;
}

static void refuse(void *ctx, const struct pd_request *q, const struct pd_err *why, const char *action, struct pd_buf *b)
{
    pd_refusal_error(q, why, action, b, NULL);
}

static void on_cancel(void *ctx, struct pd_desk_run *d)
{
    struct run *r = (struct run *)d;
    cancels++;
    last_why = (enum pd_why)atomic_load(&d->cancelled);
    d->kept = false;
    pd_desk_call(K, d, &r->c_end, end_run, r);
}
static void on_freed(void *ctx, struct pd_desk_run *d)
{
    if (!((struct run *)d)->in)
        return;
    assert_true(((struct run *)d)->ended);      /* never before the thread has said so */
    freed++;
}
static void on_idle(void *ctx) { idles++; }
static bool busy(void *ctx) { return works; }
static bool turn(void *ctx)
{
    for (int i = 0; i < 10000 && !heard_it; i++)
        usleep(1000);
    early = heard_it;
    works = false;
    end_run(worked);
    return true;
}
static void after(void *ctx) { }

static void quit(void *ctx) { pd_loop_quit(ctx); }
static void run_for(int64_t us)
{
    struct pd_loop *l = pd_daemon_loop(D);
    struct pd_timer *t;
    assert_int_equal(pd_timer_new(l, quit, l, &t, &e), 0);
    assert_int_equal(pd_timer_in(t, us, &e), 0);
    assert_int_equal(pd_loop_run(l, &e), 0);
    pd_timer_free(t);
}
#define UNTIL(c) for (int i_ = 0; !(c) && i_ < 3000; i_++) run_for(1000); assert_true(c)
#define PUMP run_for(15000)

static struct pd_entry entry;
static struct pd_runtime rt = { .max_seqs = 2 };
static int fds_before;

static int begin_with(uint32_t max_runs)
{
    static const char *listen[2];
    static char at[64];
    static const struct pd_desk_ops ops = { .run_size = sizeof (struct run), .admit = admit, .again = again, .refuse = refuse,
                                            .cancel = on_cancel, .freed = on_freed,
                                            .idle = on_idle, .busy = busy, .turn = turn, .after = after };
    memcpy(path + 13, "XXXXXX", 6);
    path[19] = 0;
    if (!mkdtemp(path))
        return -1;
    path[19] = '/';
    snprintf(at, sizeof at, "unix:%s", path);
    listen[0] = at;
    admitted = freed = cancels = agains = idles = 0;
    taken = ended = 0;
    refuse_all = false;
    join = true;
    at_once = true;
    again_from = NULL;
    fds_before = open_fds();
    struct pd_desk_opts ko = { .rt = &rt, .stream = true, .max_runs = max_runs };
    if (pd_desk_new(&ko, &ops, &K, &e))
        return -1;
    entry = (struct pd_entry){ NULL, &pd_desk_cb, K, false };
    struct pd_daemon_opts o = { .role = "decode", .worker = "decode@test", .listen = listen, .ready_fd = -1, .entry = &entry, .n_entry = 1 };
    if (pd_daemon_new(&o, &(struct pd_daemon_hooks){ .ctx = NULL }, &D, &e))
        return -1;
    pd_desk_on(K, D);
    return pd_desk_start(K, &e) || pd_daemon_ready(D, &e);
}
static int begin(void **state) { return begin_with(0); }
static int begin_three(void **state) { return begin_with(3); }

static int end(void **state)
{
    pd_desk_stop(K);
    for (struct run *r = (void *)pd_desk_first(K); r; r = (void *)r->d.node.next)
        r->ended = true;        /* what the test left */
    pd_desk_free(K);
    pd_daemon_free(D);
    assert_int_equal(freed, admitted);
    assert_int_equal(open_fds(), fds_before);
    path[19] = 0;
    rmdir(path);
    path[19] = '/';
    return 0;
}

/* ---- clients ---- */

static char heard[4 << 20];

static int dial(void)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
    assert_int_equal(connect(s, (struct sockaddr *)&a, sizeof a), 0);
    return s;
}

static void say(int s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void say(int s, const char *fmt, ...)
{
    char line[2000];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(line, sizeof line - 1, fmt, ap);
    va_end(ap);
    line[n++] = '\n';
    assert_int_equal(write(s, line, (size_t)n), n);
}

/* All that has come. */
static const char *hear(int s)
{
    size_t n = 0;
    run_for(2000);
    for (ssize_t k; n < sizeof heard - 1 && (k = recv(s, heard + n, sizeof heard - 1 - n, MSG_DONTWAIT)) > 0;)
        n += (size_t)k;
    heard[n] = 0;
    return heard;
}

static int count(const char *text, const char *what)
{
    int n = 0;
    for (; (text = strstr(text, what)); text += strlen(what))
        n++;
    return n;
}

static const char RUN[] = "01ARZ3NDEKTSV4RRFFQ69G5FA0", OTHER[] = "01ARZ3NDEKTSV4RRFFQ69G5FA1", THIRD[] = "01ARZ3NDEKTSV4RRFFQ69G5FA2";
#define TOKEN "AAECAwQFBgcICQoLDA0ODw=="
static void ask(int s, const char *run) { say(s, "{\"run\":\"%s\",\"prompt\":\"x\",\"cancel_token\":{\"$b64\":\"" TOKEN "\"}}", run); }
static void ask_routed(int s, const char *run, const char *more_)
{
    say(s, "{\"run\":\"%s\",\"prompt\":\"x\",\"route\":{\"op\":{\"$b64\":\"" TOKEN "\"},\"policy\":\"test\",\"mode\":\"aggregated\",\"p\":null,"
           "\"d\":{\"worker\":\"d\",\"at\":\"unix:/d\"},\"early\":false,\"fallback\":null%s}}", run, more_);
}
static struct run *find(const char *run) { return (struct run *)pd_desk_find(K, run, strlen(run)); }
static void let_end(const char *run)
{
    struct run *r = find(run);
    assert_non_null(r);
    pd_desk_call(K, &r->d, &r->c_end, end_run, r);
}

/* ---- tests ---- */

static void a_request_becomes_a_run(void **state)
{
    int s = dial();
    for (int i = 0; i < 3; i++)
        ask(s, i == 0 ? RUN : i == 1 ? OTHER : THIRD);
    UNTIL(freed == 3);
    hear(s);
    assert_int_equal(count(heard, "\"pos\":0"), 3);
    assert_int_equal(count(heard, "\"pos\":1"), 3);
    assert_true(strstr(heard, RUN) && strstr(heard, OTHER) && strstr(heard, THIRD));
    assert_true(pd_desk_runs(K) == 0 && idles >= 1 && taken == 3 && ended == 3 && !cancels);
    shutdown(s, SHUT_WR);       /* what was owed is paid: it closes */
    char c;
    ssize_t n = -1;
    UNTIL((n = recv(s, &c, 1, MSG_DONTWAIT)) == 0);
    close(s);
}

/* What a call has to say reaches its client before the turn that follows it ends. */
static void a_call_s_records_do_not_wait_for_the_turn(void **state)
{
    int s = dial();
    slow = true;
    heard_it = early = false;
    ask(s, RUN);
    for (int i = 0; i < 5000 && !heard_it; i++)
        heard_it = strstr(hear(s), "\"pos\":0") != NULL;
    UNTIL(freed == 1);
    slow = false;
    assert_true(early);
    assert_int_equal(count(hear(s), "\"pos\":1"), 1);
    close(s);
}

static void what_is_no_run(void **state)
{
    static const struct { const char *line, *words; } no[] = {
        { "{\"pd\":\"route\"}", "a record of kind 'route' is not served here" }, { "{\"prompt\":5}", "prompt" }, { "{\"prompt\":\"x\",\"n\":0}", "n" },
        { "{\"run\":\"x\",\"prompt\":\"x\"}", "run" }, { "{\"prompt\":\"x\",\"route\":{\"op\":1}}", "route" }, { "{", "line" } };
    int s = dial();
    for (size_t i = 0; i < sizeof no / sizeof *no; i++) {
        say(s, "%s", no[i].line);
        PUMP;
        hear(s);
        if (count(heard, "\"pd\":\"error\"") != 1 || !strstr(heard, no[i].words))
            fail_msg("%s: %s", no[i].line, heard);
    }
    refuse_all = true;
    ask(s, RUN);
    PUMP;
    assert_true(strstr(hear(s), "not today") && !find(RUN));
    refuse_all = false;
    assert_true(admitted == 0 && pd_desk_runs(K) == 0);
    close(s);
}

static void the_same_run_twice(void **state)
{
    int s = dial(), other = dial();
    at_once = false;
    ask(s, RUN);
    UNTIL(taken == 1);
    ask(other, RUN);            /* in hand */
    PUMP;
    assert_true(strstr(hear(other), "came already") && !strstr(heard, "\"run\":\"01ARZ3NDEKTSV4RRFFQ69G5FA0"));  /* the answer to the other keeps the name */
    let_end(RUN);
    UNTIL(freed == 1);
    ask(s, RUN);                /* over */
    PUMP;
    hear(s);
    assert_int_equal(count(heard, "\"pos\":1"), 1);
    assert_int_equal(count(heard, "came already"), 1);
    assert_int_equal(admitted, 1);
    close(s);
    close(other);
}

static void cancelled(void **state)
{
    struct pd_buf b = { 0 };
    const char *what = NULL;
    int s = dial(), other = dial();
    at_once = false;
    ask(s, RUN);
    ask(s, OTHER);
    UNTIL(taken == 2);
    say(other, "{\"prompt\":\"x\",\"run\":\"%s\"}", THIRD);
    say(other, "{\"pd\":\"cancel\",\"run\":\"%s\"}", RUN);     /* not its client */
    UNTIL(taken == 3);
    PUMP;
    assert_int_equal(cancels, 0);
    say(s, "{\"pd\":\"cancel\",\"run\":\"%s\"}", RUN);
    say(s, "{\"pd\":\"cancel\",\"run\":\"%s\"}", RUN);
    say(s, "{\"pd\":\"cancel\"}");
    UNTIL(freed == 1);
    assert_true(cancels == 1 && last_why == PD_WHY_RECORD && !find(RUN) && find(OTHER));
    say(s, "{\"pd\":\"cancel\",\"run\":\"%s\"}", RUN);         /* too late: nothing */
    PUMP;
    assert_int_equal(cancels, 1);
    /* by its token, from anywhere */
    static const struct { const char *rec; int rc, said; } ask_[] = {
        { "{\"pd\":\"cancel\",\"run\":\"01ARZ3NDEKTSV4RRFFQ69G5FA1\",\"cancel_token\":{\"$b64\":\"AAECAwQFBgcICQoLDA0ODg==\"}}", PD_EFAIL, 0 },
        { "{\"pd\":\"cancel\",\"run\":\"01ARZ3NDEKTSV4RRFFQ69G5FA1\"}", PD_EFAIL, 0 },
        { "{\"pd\":\"cancel\",\"run\":\"01ARZ3NDEKTSV4RRFFQ69G5FA2\",\"cancel_token\":{\"$b64\":\"" TOKEN "\"}}", PD_EFAIL, 0 },  /* it was given none */
        { "{\"pd\":\"cancel\",\"run\":\"01ARZ3NDEKTSV4RRFFQ69G5FA9\",\"cancel_token\":{\"$b64\":\"" TOKEN "\"}}", 0, 0 },
        { "{\"pd\":\"cancel\",\"run\":\"01ARZ3NDEKTSV4RRFFQ69G5FA1\",\"cancel_token\":{\"$b64\":\"" TOKEN "\"}}", 0, 1 } };
    for (size_t i = 0; i < sizeof ask_ / sizeof *ask_; i++) {
        b.n = 0;
        what = NULL;
        assert_int_equal(pd_json_to_msgpack(ask_[i].rec, strlen(ask_[i].rec), &b, &e), 0);
        struct pd_rec rec = { .kind = PD_K_CANCEL, .p = b.p, .n = b.n };
        int rc = pd_desk_on_cancel(K, &rec, &what, &e);
        if ((rc < 0) != (ask_[i].rc < 0) || (what != NULL) != ask_[i].said)
            fail_msg("%zu: %d %s", i, rc, what ? what : "");
    }
    UNTIL(freed == 2);
    assert_true(cancels == 2 && find(THIRD));
    let_end(THIRD);
    UNTIL(freed == 3);
    pd_buf_free(&b);
    close(s);
    close(other);
}

static void the_client_is_gone(void **state)
{
    int s = dial();
    at_once = false;
    ask(s, RUN);
    say(s, "{\"run\":\"%s\",\"prompt\":\"x\",\"max_tokens\":99}", OTHER);
    UNTIL(taken == 2);
    let_end(OTHER);
    PUMP;
    assert_true(find(OTHER) && find(OTHER)->d.over);   /* over, and kept by its owner */
    close(s);
    UNTIL(freed == 2);
    assert_true(cancels == 2 && last_why == PD_WHY_GONE);
}

static void no_more_than_it_takes(void **state)        /* three */
{
    int s = dial(), other = dial();
    char name[PD_RUN_LEN + 1];
    at_once = false;
    for (int i = 0; i < 5; i++) {
        snprintf(name, sizeof name, "01ARZ3NDEKTSV4RRFFQ69G5FB%d", i);
        ask(s, name);
    }
    UNTIL(taken == 3);
    PUMP;
    assert_true(admitted == 3 && pd_desk_runs(K) == 3 && pd_desk_max(K) == 3);          /* the others wait in its socket */
    ask_routed(other, THIRD, "");                       /* a router is read all the same */
    UNTIL(taken == 4);
    for (int i = 0; i < 2; i++) {
        snprintf(name, sizeof name, "01ARZ3NDEKTSV4RRFFQ69G5FB%d", i);
        let_end(name);
    }
    UNTIL(taken == 5);
    PUMP;
    assert_true(admitted == 5 && freed == 2);
    let_end(THIRD);
    UNTIL(taken == 6);
    close(s);
    close(other);
    UNTIL(freed == 6);
}

static void a_router_asks_again(void **state)
{
    int s = dial(), other = dial();
    at_once = false;
    ask_routed(s, RUN, "");
    UNTIL(taken == 1);
    ask_routed(s, RUN, "");             /* joined */
    ask_routed(s, OTHER, ",\"again\":true");    /* of one that is not here: passed over */
    PUMP;
    assert_true(agains == 1 && admitted == 1 && !find(OTHER));
    assert_int_equal(count(hear(s), "error"), 0);
    ask_routed(other, RUN, "");         /* its answers go there from here on */
    UNTIL(agains == 2);
    struct run *r = find(RUN);
    assert_ptr_not_equal(again_from, r->d.client);
    pd_desk_move(K, &r->d, again_from);
    close(s);                           /* whose it no longer is */
    PUMP;
    assert_int_equal(cancels, 0);
    let_end(RUN);
    UNTIL(freed == 1);
    assert_int_equal(count(hear(other), "\"pos\":1"), 1);
    /* it is on its way out, and the new one stands beside it under the name */
    ask_routed(other, RUN, "");
    UNTIL(taken == 2);
    struct run *old = find(RUN);
    join = false;
    ask_routed(other, RUN, "");
    UNTIL(taken == 3);
    assert_true(find(RUN) && find(RUN) != old && pd_desk_runs(K) == 2);
    pd_desk_call(K, &old->d, &old->c_end, end_run, old);
    let_end(RUN);
    UNTIL(freed == 3);
    assert_int_equal(count(hear(other), "\"pos\":1"), 2);
    close(other);
}

/* It costs its own run alone; all it was owed comes when it reads, once and in order. */
static void a_client_that_does_not_read(void **state)
{
    int s = dial(), other = dial();
    at_once = false;
    ask(s, RUN);
    UNTIL(taken == 1);
    struct run *r = find(RUN);
    pd_desk_call(K, &r->d, &r->c_more, more, r);
    let_end(RUN);
    UNTIL(ended == 1);
    PUMP;
    assert_true(find(RUN) && find(RUN)->d.over && !freed);      /* until all of it is put */
    at_once = true;
    ask(other, OTHER);
    UNTIL(freed == 1);
    assert_int_equal(count(hear(other), "\"pos\":1"), 1);
    int got = 0;
    static char line[1 << 16];
    size_t have = 0;
    for (int i = 0; i < 20000 && got < 20002; i++) {
        ssize_t n = recv(s, line + have, sizeof line - 1 - have, MSG_DONTWAIT);
        if (n <= 0) {
            run_for(500);
            continue;
        }
        have += (size_t)n;
        line[have] = 0;
        char *at = line, *nl;
        for (; (nl = strchr(at, '\n')); at = nl + 1, got++) {
            char want[40];
            *nl = 0;
            snprintf(want, sizeof want, "\"pos\":%d,", got);
            if (!strstr(at, want))
                fail_msg("%d: %s", got, at);
        }
        have -= (size_t)(at - line);
        memmove(line, at, have);
    }
    assert_int_equal(got, 20002);
    UNTIL(freed == 2);
    close(s);
    close(other);
}

int main(void)
{
#define TEST(f, b) cmocka_unit_test_setup_teardown(f, b, end)
    const struct CMUnitTest tests[] = {
        TEST(a_request_becomes_a_run, begin), TEST(a_call_s_records_do_not_wait_for_the_turn, begin),
        TEST(what_is_no_run, begin), TEST(the_same_run_twice, begin), TEST(cancelled, begin), TEST(the_client_is_gone, begin),
        TEST(no_more_than_it_takes, begin_three), TEST(a_router_asks_again, begin), TEST(a_client_that_does_not_read, begin),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
