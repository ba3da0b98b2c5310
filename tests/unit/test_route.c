/* The router's pure part: workers that are known, who may have a run and why the others may not, the choice, which pairs fit. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#include "../../libcommon/kv/convert.h"
#include "../../libcommon/route/matrix.h"
#include "../../libcommon/route/decide.h"
#include "../../libcommon/wire/json.h"
#include "../../libcommon/wire/pack.h"

static struct pd_registry reg;
static struct pd_decision dec;
static struct pd_err e;

/* A fingerprint of these fields alone. */
static void fields(struct pd_buf *b, int64_t theta, int64_t block, const char *numerics)
{
    struct pd_packer k;
    pd_pack_init(&k, b, &e);
    msgpack_pack_map(&k.pk, 4);
    pd_pack_text(&k, "arch");
    pd_pack_text(&k, "llama");
    pd_pack_text(&k, "rope_theta");
    msgpack_pack_int64(&k.pk, theta);
    pd_pack_text(&k, "block_size");
    msgpack_pack_int64(&k.pk, block);
    pd_pack_text(&k, "numerics");
    pd_pack_text(&k, numerics);
    assert_int_equal(k.rc, 0);
}

struct who { const char *at, *role, *state; uint64_t epoch; int64_t theta, block; const char *numerics; struct pd_load load; struct pd_capacity cap; unsigned convert;
    const char *prefer /* and it gives */; };
#define READY(a, r) { .at = a, .role = r, .state = "ready", .theta = 10000, .block = 16, .numerics = "x", .cap = { 1000, 16, 8, 64, 4096 } }

static void record(const struct who *w, struct pd_buf *out)
{
    struct pd_buf fp = { 0 };
    fields(&fp, w->theta, w->block, w->numerics);
    struct pd_str caps[PD_CONV_CAPS + 1];
    struct pd_worker_rec r = { .caps = caps, .n_caps = pd_conv_caps(w->convert, caps), .worker = { w->at, strlen(w->at) }, .model_revision = { "m@0", 3 }, .numerics = { w->numerics, strlen(w->numerics) },
        .domain = { "local", 5 },
        .fp_fields = { fp.p, fp.n }, .parallel = { 1, 1, 1 }, .capacity = w->cap, .load = w->load, .epoch = w->epoch, .layout = { .block_size = 16,
            .dtype = "f16",
        .order = "HND" } };
    snprintf(r.role, sizeof r.role, "%s", w->role);
    if (w->prefer) {
        snprintf(r.prefer, sizeof r.prefer, "%s", w->prefer);
        caps[r.n_caps++] = (struct pd_str){ PD_CAP_GIVES, strlen(PD_CAP_GIVES) };
    }
    snprintf(r.state, sizeof r.state, "%s", w->state);
    assert_int_equal(pd_sha256(fp.p, fp.n, r.fp_sha, &e), 0);
    if (pd_worker_rec_encode(&r, out, &e))
        fail_msg("%s", e.msg);
    pd_buf_free(&fp);
}

static struct pd_member *say(struct who w, int64_t now)
{
    struct pd_buf b = { 0 };
    struct pd_member *m;
    bool fresh;
    record(&w, &b);
    assert_int_equal(pd_registry_add(&reg, w.at, &m, &e), 0);
    if (pd_registry_said(&reg, m, b.p, b.n, now, &fresh, &e))
        fail_msg("%s", e.msg);
    m->reachable = true;
    pd_buf_free(&b);
    return m;
}

static int clean(void **state)
{
    pd_registry_free(&reg);
    return 0;
}

static struct pd_need need(enum pd_policy p) { return (struct pd_need){ .policy = p, .now_us = 1000, .suspect_us = 3000000, .prompt_tokens = 100,
    .exact = true, .max_tokens = 50, .n = 1, .like = -1 }; }

static const char *why(const struct pd_member *m)
{
    static char text[300];
    for (uint32_t i = 0; i < dec.n_p; i++)
        if (dec.p_row[i].m == m)
            return pd_excluded_text(&dec, &dec.p_row[i], text, sizeof text);
    for (uint32_t i = 0; i < dec.n_d; i++)
        if (dec.d_row[i].m == m)
            return pd_excluded_text(&dec, &dec.d_row[i], text, sizeof text);
    return "not listed";
}

static void the_least_loaded_is_chosen(void **state)
{
    struct pd_member *a = say((struct who)READY("unix:/a", "both"), 1), *b = say((struct who)READY("unix:/b", "decode"), 1), *last = NULL;
    struct pd_need q = need(PD_POLICY_AGGREGATED);
    int n[2] = { 0 };
    for (int i = 0; i < 10; i++) {      /* idle ones take turns */
        pd_decide(&reg, &q, &dec);
        assert_int_equal(dec.outcome, PD_CHOSEN);
        assert_int_equal(dec.mode, PD_MODE_AGGREGATED);
        assert_true(dec.d != last && !dec.p);
        last = dec.d;
        n[dec.d == b]++;
        struct pd_share s = pd_share_of(&q, dec.d, true, true);
        pd_member_take(dec.d, s);
        pd_member_give_back(dec.d, s);
    }
    assert_true(n[0] == 5 && n[1] == 5 && !a->own.runs && !a->own.blocks && !a->own.prefill_tokens);
    struct pd_share s = pd_share_of(&q, a, true, true);
    assert_true(s.runs == 1 && s.prefill_tokens == 100 && s.blocks == 10);
    for (int i = 0; i < 3; i++)
        pd_member_take(a, s);
    for (int i = 0; i < 3; i++) {
        pd_decide(&reg, &q, &dec);
        assert_ptr_equal(dec.d, b);
        pd_member_take(b, s);
    }
    struct who busy = READY("unix:/b", "decode");
    busy.load = (struct pd_load){ .runs = 3, .prefill_tokens_ahead = 5000 };        /* of which 300 are ours */
    say(busy, 2);
    assert_int_equal(b->foreign.prefill_tokens, 0);     /* once may be late news */
    say(busy, 3);
    assert_int_equal(b->foreign.prefill_tokens, 4700);
    pd_decide(&reg, &q, &dec);
    assert_ptr_equal(dec.d, a);
    busy.load = (struct pd_load){ 0 };  /* what it does not report is not believed: it has three of ours */
    say(busy, 4);
    assert_true(b->own.runs == 3 && b->own.prefill_tokens == 300 && !b->disagrees);
    busy.load.runs = 500;
    for (int i = 0; i < 3; i++)
        say(busy, 5 + i);
    assert_true(b->disagrees);
}

static void a_worker_of_both_roles_has_the_side_that_it_prefers(void **state)
{
    struct who w[] = { READY("unix:/a", "both"), READY("unix:/b", "both"), READY("unix:/old", "both") };
    w[0].prefer = "prefill";
    w[1].prefer = "decode";             /* the third one cannot give */
    struct pd_member *a = say(w[0], 1), *b = say(w[1], 1), *old = say(w[2], 1);
    struct pd_need pair = need(PD_POLICY_FIXED), whole = need(PD_POLICY_AGGREGATED);
    assert_true(pd_member_can_give(a) && pd_member_can_give(b) && !pd_member_can_give(old) && pd_member_can_decode(a));
    assert_true(pd_member_gives(a) && !pd_member_decodes(a) && !pd_member_gives(b) && pd_member_decodes(b) && pd_member_decodes(old));
    pd_decide(&reg, &pair, &dec);
    assert_true(dec.outcome == PD_CHOSEN && dec.p == a && dec.d == b && dec.n_p == 1 && dec.n_d == 2);
    pd_decide(&reg, &whole, &dec);
    assert_true(dec.outcome == PD_CHOSEN && dec.n_d == 3);
    b->behind = old->behind = true;
    pd_decide(&reg, &whole, &dec);      /* whatever it prefers */
    assert_true(dec.outcome == PD_CHOSEN && dec.d == a);
    pair.local = true;                  /* as a fallback too */
    pd_decide(&reg, &pair, &dec);
    assert_true(dec.outcome == PD_CHOSEN && dec.d == a && dec.mode == PD_MODE_LOCAL);
}

static void who_has_much_to_read_gets_nothing_new(void **state)
{
    struct pd_member *p = say((struct who)READY("unix:/p", "prefill"), 1), *a = say((struct who)READY("unix:/a", "both"), 1),
        *b = say((struct who)READY("unix:/b", "both"), 1);
    struct pd_need one = need(PD_POLICY_AGGREGATED), pair = need(PD_POLICY_FIXED);
    a->behind = true;
    pd_decide(&reg, &one, &dec);
    assert_int_equal(dec.outcome, PD_CHOSEN);
    assert_ptr_equal(dec.d, b);
    assert_string_equal(why(a), "capacity: it has much to read yet");
    b->behind = true;
    pd_decide(&reg, &one, &dec);
    assert_int_equal(dec.outcome, PD_WAIT_ROOM);
    pd_decide(&reg, &pair, &dec);
    assert_int_equal(dec.outcome, PD_WAIT_ROOM);
    a->behind = b->behind = false;
    p->behind = true;
    pd_decide(&reg, &pair, &dec);
    assert_int_equal(dec.outcome, PD_WAIT_ROOM);
    pair.d = a;                         /* who decodes already is told at any time */
    p->behind = false;
    a->behind = true;
    pd_decide(&reg, &pair, &dec);
    assert_int_equal(dec.outcome, PD_CHOSEN);
}

static void each_exclusion_is_named(void **state)
{
    struct who w[] = { READY("unix:/draining", "both"), READY("unix:/away", "both"), READY("unix:/silent", "both"), READY("unix:/old", "both"),
        READY("unix:/full", "both"),
                       READY("unix:/failed", "both"), READY("unix:/good", "both") };
    struct pd_member *m[7], *unknown;
    w[0].state = "draining";
    w[4].cap.max_runs = 3;
    for (int i = 0; i < 7; i++) {
        w[i].epoch = i == 3 ? 1 : 2;
        m[i] = say(w[i], i == 2 ? -4000000 : 500);
    }
    assert_int_equal(pd_registry_add(&reg, "unix:/unknown", &unknown, &e), 0);
    m[1]->reachable = false;
    m[4]->own.runs = 2;
    struct pd_tried tried[] = { { m[5], m[5]->life } };
    struct pd_need q = need(PD_POLICY_AGGREGATED);
    q.tried = tried;
    q.n_tried = 1;
    pd_decide(&reg, &q, &dec);
    assert_ptr_equal(dec.d, m[6]);
    assert_string_equal(why(m[0]), "draining");
    assert_string_equal(why(m[1]), "not reachable");
    assert_string_equal(why(m[2]), "no heartbeat for 4.0 s");
    assert_string_equal(why(m[3]), "epoch 1, new runs go to 2");
    assert_string_equal(why(m[4]), "capacity: 2 runs of 2");
    assert_string_equal(why(m[5]), "failed this run already");
    assert_string_equal(why(m[6]), "");
    assert_string_equal(why(unknown), "has not registered");
    m[5]->life++;               /* it has come back */
    m[6]->reachable = false;
    pd_decide(&reg, &q, &dec);
    assert_ptr_equal(dec.d, m[5]);
    m[5]->reachable = false;
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_WAIT_ROOM);        /* the full one is there */
    m[4]->reachable = false;
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_CHOSEN);           /* nobody newer: the old epoch */
    assert_ptr_equal(dec.d, m[3]);
    m[3]->reachable = false;
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_WAIT_WORKER);
    struct pd_buf line = { 0 }, list = { 0 }, rec = { 0 }, json = { 0 };
    assert_int_equal(pd_decision_text(&dec, &line, &e), 0);
    assert_int_equal(pd_buf_add(&line, "", 1, &e), 0);
    assert_non_null(strstr((char *)line.p, "unix:/draining: draining; "));
    assert_non_null(strstr((char *)line.p, "unix:/unknown: has not registered"));
    assert_int_equal(pd_decision_excluded(&dec, &list, &e), 0);
    assert_int_equal(list.p[0], 0x98);  /* eight of them */
    static const uint8_t op[16];
    struct pd_route_note note = { .run = "01M8PAW1CACQM7WS4V0NE4983X", .op = op };
    assert_int_equal(pd_decision_encode(&dec, &note, &rec, &e), 0);
    assert_int_equal(pd_msgpack_to_json(rec.p, rec.n, &json, &e), 0);
    assert_int_equal(pd_buf_add(&json, "", 1, &e), 0);
    assert_non_null(strstr((char *)json.p, "\"chosen\":null,\"reason\":\"wait_worker\""));
    pd_buf_free(&line);
    pd_buf_free(&list);
    pd_buf_free(&rec);
    pd_buf_free(&json);
}

static void what_nobody_has_is_never(void **state)
{
    say((struct who)READY("unix:/a", "both"), 1);
    struct pd_need q = need(PD_POLICY_AGGREGATED);
    q.adapter = (struct pd_str){ "lora", 4 };
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_NEVER);
    q = need(PD_POLICY_AGGREGATED);
    q.prompt_tokens = 4096;
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_NEVER);
    q.exact = false;            /* a guess excludes nobody */
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_CHOSEN);
}

static void pairs_agree(void **state)
{
    struct who other = READY("unix:/p-other", "prefill");
    other.theta = 5000;
    struct pd_member *bad = say(other, 1), *d = say((struct who)READY("unix:/d", "decode"), 1);
    struct pd_need q = need(PD_POLICY_FIXED);
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_WAIT_WORKER);      /* it is there, and does not fit: no reason to do without */
    assert_string_equal(why(bad), "fingerprint: rope_theta differs (prefill 5000, decode 10000)");
    struct who soft = READY("unix:/p-soft", "prefill");
    soft.numerics = "y";
    struct pd_member *p = say(soft, 1);
    pd_decide(&reg, &q, &dec);
    assert_true(dec.outcome == PD_CHOSEN && dec.mode == PD_MODE_REMOTE && dec.p == p && dec.d == d);
    p->reachable = bad->reachable = false;
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_NO_PREFILL);
    p->reachable = true;        /* the one that fits has failed this run: it is done without, as if it were not there */
    struct pd_tried tried[] = { { p, p->life } };
    q.tried = tried;
    q.n_tried = 1;
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_NO_PREFILL);
    assert_string_equal(why(p), "failed this run already");
    p->life++;                  /* it is back: another may be tried */
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_CHOSEN);
    d->said.capacity.max_runs = 1;
    pd_member_take(d, pd_share_of(&q, d, false, true));
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_WAIT_ROOM);
    p->life--;
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_WAIT_WORKER);
    pd_member_give_back(d, pd_share_of(&q, d, false, true));
    q.local = true;
    pd_decide(&reg, &q, &dec);
    assert_true(dec.outcome == PD_CHOSEN && dec.mode == PD_MODE_LOCAL && !dec.p && dec.d == d);
    q = need(PD_POLICY_FIXED);
    q.like = d->fp;             /* a stream goes on only where KV and numerics are the same */
    q.numerics = "x";
    struct who twin = READY("unix:/d2", "both");
    twin.numerics = "y";
    struct pd_member *d2 = say(twin, 1);
    d->reachable = false;
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_WAIT_WORKER);
    assert_string_equal(why(d2), "numerics y, the run began with x");
    q.numerics = "y";
    pd_decide(&reg, &q, &dec);
    assert_ptr_equal(dec.d, d2);
}

static void no_kv_crosses_epochs(void **state)
{
    struct who w[] = { READY("unix:/p1", "prefill"), READY("unix:/d1", "decode"), READY("unix:/p2", "prefill"), READY("unix:/d2", "decode") };
    struct pd_member *m[4];
    for (int i = 0; i < 4; i++) {
        w[i].epoch = i < 2 ? 1 : 2;
        m[i] = i < 3 ? say(w[i], 1) : NULL;
    }
    struct pd_need q = need(PD_POLICY_FIXED);
    pd_decide(&reg, &q, &dec);
    assert_true(dec.p == m[0] && dec.d == m[1]);        /* 2 is not complete */
    m[3] = say(w[3], 1);
    pd_decide(&reg, &q, &dec);
    assert_true(dec.p == m[2] && dec.d == m[3] && dec.epoch == 2);
    q.d = m[3];                 /* another prefill worker for a run that decodes there: none of its epoch */
    struct pd_tried tried[] = { { m[2], m[2]->life } };
    q.tried = tried;
    q.n_tried = 1;
    pd_decide(&reg, &q, &dec);
    assert_int_not_equal(dec.outcome, PD_CHOSEN);
}

static void room_for_the_output_counts(void **state)
{
    struct who w = READY("unix:/d", "decode");
    w.cap.blocks = 20;
    say((struct who)READY("unix:/p", "prefill"), 1);
    struct pd_member *d = say(w, 1);
    struct pd_need q = need(PD_POLICY_FIXED);
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_CHOSEN);
    pd_member_take(d, pd_share_of(&q, d, false, true));         /* 10 blocks */
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_CHOSEN);
    pd_member_take(d, pd_share_of(&q, d, false, true));
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_WAIT_ROOM);
    assert_string_equal(why(d), "capacity: 20 blocks of 20 are taken");
}

/* A decode worker that converts takes KV of other blocks; one that does not is refused by the same field; what nobody converts stays refused. */
static void conversions_are_admitted_by_the_taker(void **state)
{
    struct who p = READY("unix:/p", "prefill"), d = READY("unix:/d", "decode"), c = READY("unix:/c", "decode");
    struct pd_need q = need(PD_POLICY_FIXED);
    struct pd_buf b = { 0 };
    struct pd_route_note note = { .run = "x", .op = (const uint8_t[16]){ 0 } };
    p.block = 32;
    c.convert = PD_CONV_BLOCK_SIZE;
    struct pd_member *mp = say(p, 1);
    say(d, 1);
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_WAIT_WORKER);
    assert_string_equal(why(mp), "fingerprint: block_size differs (prefill 32, decode 16)");
    struct pd_member *mc = say(c, 1);
    for (int i = 0; i < 5; i++) {
        pd_decide(&reg, &q, &dec);
        assert_int_equal(dec.outcome, PD_CHOSEN);
        assert_true(dec.d == mc && dec.p == mp && dec.converts == PD_CONV_BLOCK_SIZE);
    }
    assert_int_equal(pd_decision_encode(&dec, &note, &b, &e), 0);
    assert_non_null(memmem(b.p, b.n, "converted\xaa" "block_size", 20));
    p.block = 16;               /* alike: nothing to convert */
    say(p, 2);
    pd_decide(&reg, &q, &dec);
    assert_true(dec.outcome == PD_CHOSEN && !dec.converts);
    b.n = 0;
    assert_int_equal(pd_decision_encode(&dec, &note, &b, &e), 0);
    assert_null(memmem(b.p, b.n, "converted", 9));
    p.block = 32;
    p.theta = 5000;             /* and another model: no conversion makes it the same */
    say(p, 3);
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_WAIT_WORKER);
    assert_non_null(strstr(why(mp), "rope_theta differs (prefill 5000, decode 10000)"));
    pd_buf_free(&b);
}

static void fingerprints_are_let_go(void **state)
{
    struct who w = READY("unix:/a", "both");
    for (int i = 0; i < 3 * PD_MAX_FPS; i++) {  /* a worker that is started anew with another model each time */
        w.theta = 10000 + i;
        say(w, i);
    }
    int used = 0;
    for (int i = 0; i < PD_MAX_FPS; i++)
        used += reg.fp[i].users > 0;
    assert_int_equal(used, 1);
    struct pd_buf b = { 0 };
    struct pd_member *m;
    bool fresh;
    char at[40];
    int rc = 0, n = 1;
    for (; rc == 0 && n < 2 * PD_MAX_FPS; n++) {
        snprintf(at, sizeof at, "unix:/w%d", n);
        w.at = at;
        w.theta = n;
        b.n = 0;
        record(&w, &b);
        assert_int_equal(pd_registry_add(&reg, at, &m, &e), 0);
        rc = pd_registry_said(&reg, m, b.p, b.n, 1, &fresh, &e);
    }
    assert_int_equal(rc, PD_ENOMEM);
    assert_int_equal(n, PD_MAX_FPS + 1);
    b.p[b.n / 2] ^= 1;
    pd_registry_said(&reg, reg.first, b.p, b.n, 1, &fresh, &e);
    b.n -= 3;                   /* cut: refused, and what is known stays */
    assert_true(pd_registry_said(&reg, reg.first, b.p, b.n, 1, &fresh, &e) < 0);
    assert_true(reg.first->known);
    pd_buf_free(&b);
}

static void the_matrix_names_what_differs(void **state)
{
    struct who w[] = { READY("p", "prefill"), READY("p-block", "prefill"), READY("p-old", "prefill"), READY("d", "decode"), READY("d-other", "both") };
    struct pd_worker_rec r[5];
    struct pd_buf b[5] = { { 0 } }, text = { 0 };
    struct pd_arena mem = { 0 };
    struct pd_matrix m;
    w[1].block = 32;
    w[2].epoch = 1;
    w[4].theta = 7;
    for (int i = 0; i < 5; i++) {
        record(&w[i], &b[i]);
        assert_int_equal(pd_worker_rec_decode(b[i].p, b[i].n, &mem, &r[i], &e), 0);
    }
    assert_int_equal(pd_matrix_make(r, 5, &m, &e), 0);
    assert_true(m.n_p == 3 && m.n_d == 2);
    assert_true(m.m[0] == PD_M_OK && m.m[1] == PD_M_REFUSED && m.m[2] == PD_M_CONVERTIBLE && m.m[3] == PD_M_REFUSED && m.m[4] == PD_M_APART);
    assert_int_equal(pd_matrix_needed(&m, &e), PD_EINCOMPAT);
    assert_non_null(strstr(e.msg, "p-block can exchange KV with no worker"));
    assert_int_equal(pd_matrix_text(&m, &text, &e), 0);
    assert_int_equal(pd_buf_add(&text, "", 1, &e), 0);
    assert_non_null(strstr((char *)text.p, "p-block -> [1] d: block_size differs (prefill 32, decode 16)\n"));
    assert_non_null(strstr((char *)text.p, "p -> [2] d-other: rope_theta differs (prefill 10000, decode 7)\n"));
    pd_matrix_free(&m);
    assert_int_equal(pd_matrix_make(r + 3, 2, &m, &e), 0);
    assert_int_equal(pd_matrix_needed(&m, &e), 0);
    pd_matrix_free(&m);
    struct who any = READY("any", "both");
    any.prefer = "decode";
    b[3].n = 0;
    record(&any, &b[3]);
    assert_int_equal(pd_worker_rec_decode(b[3].p, b[3].n, &mem, &r[3], &e), 0);
    assert_int_equal(pd_matrix_make(r + 3, 2, &m, &e), 0);      /* it gives too, and never to itself */
    assert_true(m.n_p == 1 && m.n_d == 2 && m.m[0] == PD_M_SELF && m.m[1] == PD_M_REFUSED);
    assert_int_equal(pd_matrix_needed(&m, &e), PD_EINCOMPAT);
    pd_matrix_free(&m);
    for (int i = 0; i < 5; i++)
        pd_buf_free(&b[i]);
    pd_buf_free(&text);
    pd_arena_free(&mem);
}

/* Blocks that it would not compute again count as much as blocks that wait there. */
static void held_blocks_count(void **state)
{
    struct pd_member *a = say((struct who)READY("unix:/a", "both"), 1), *b = say((struct who)READY("unix:/b", "both"), 1);
    struct pd_need q = need(PD_POLICY_AGGREGATED);      /* 7 blocks */
    b->held = (struct pd_held){ 3, PD_HELD_EVENTS, 5 };
    pd_member_take(b, (struct pd_share){ 1, 0, 2 });
    pd_decide(&reg, &q, &dec);
    assert_ptr_equal(dec.d, b);
    assert_true(dec.d_rows[0].cost == 7 && dec.d_rows[1].cost == 4 + 2);
    pd_member_take(b, (struct pd_share){ 1, 0, 2 });
    pd_decide(&reg, &q, &dec);
    assert_ptr_equal(dec.d, a);
    a->held.how = PD_HELD_DOUBT;
    pd_decide(&reg, &q, &dec);
    struct pd_buf out = { 0 }, json = { 0 };
    struct pd_route_note note = { .run = "r", .op = (const uint8_t *)"0123456789abcdef" };
    assert_int_equal(pd_decision_encode(&dec, &note, &out, &e) | pd_msgpack_to_json(out.p, out.n, &json, &e), 0);
    assert_int_equal(pd_buf_add(&json, "", 1, &e), 0);
    assert_non_null(strstr((char *)json.p, "\"hit_blocks\":3,\"miss_blocks\":4,\"miss_tokens\":52,\"index\":\"events\","));
    assert_true(dec.d_rows[1].index_age_us == 5);
    assert_non_null(strstr((char *)json.p, "\"degraded\":[\"index_in_doubt\"]"));
    b->held.how = PD_HELD_GUESS;
    a->held.how = PD_HELD_EVENTS;
    pd_decide(&reg, &q, &dec);
    out.n = json.n = 0;
    assert_int_equal(pd_decision_encode(&dec, &note, &out, &e) | pd_msgpack_to_json(out.p, out.n, &json, &e), 0);
    assert_int_equal(pd_buf_add(&json, "", 1, &e), 0);
    assert_non_null(strstr((char *)json.p, "\"degraded\":[\"approximate\"]"));
    pd_buf_free(&out);
    pd_buf_free(&json);
    q.policy = PD_POLICY_FIXED;                         /* who decodes what another has prefilled computes none of it */
    say((struct who)READY("unix:/p", "prefill"), 1)->held.blocks = 100;
    pd_decide(&reg, &q, &dec);
    assert_true(dec.p_rows[0].cost == 0 && dec.d_rows[0].cost == 0 && dec.d_rows[1].cost == 4);
}

/* ---- paths ---- */

static const char racks[] = "domain rackA rack\ndomain rackB rack\nworker unix:/p0 in rackA\nworker unix:/p1 in rackB\nworker unix:/d0 in rackA\nworker unix:/d1 in rackA\n";
static struct pd_topology *topology;
static struct pd_paths *paths;

static void use_paths(const char *text, struct pd_paths_opts o)
{
    pd_paths_free(paths);
    pd_topology_free(topology);
    paths = NULL;
    topology = NULL;
    o.breaker.jitter = 1e-12;
    if (pd_topology_parse(text, strlen(text), "topo", &topology, &e) || pd_paths_new(&o, &paths, &e))
        fail_msg("%s", e.msg);
    pd_paths_set_topology(paths, topology);
    for (struct pd_member *m = reg.first; m; m = m->next)       /* a router has one pd_paths as long as it has workers */
        m->end.at = NULL;
}

static int clean_paths(void **state)
{
    pd_paths_free(paths);
    pd_topology_free(topology);
    paths = NULL;
    topology = NULL;
    return clean(state);
}

static enum pd_outcome decide(enum pd_policy p, int64_t now)
{
    struct pd_need q = need(p);
    struct pd_buf rec = { 0 }, again = { 0 };
    struct pd_arena mem = { 0 };
    struct pd_route_rec *r = pd_arena_alloc(&mem, 1, sizeof *r, &e);
    q.paths = paths;
    q.now_us = now;
    pd_decide(&reg, &q, &dec);
    const uint8_t op[16] = { 1 };
    struct pd_route_note note = { .run = "01JZZZZZZZZZZZZZZZZZZ00001", .op = op, .attempt = 1 };
    assert_int_equal(pd_decision_encode(&dec, &note, &rec, &e), 0);
    if (pd_route_replay(rec.p, rec.n, NULL, &mem, NULL, r, &again, &e))         /* as every decision, it can be made again of its record */
        fail_msg("%s", e.msg);
    assert_true(again.n == rec.n && !memcmp(again.p, rec.p, rec.n));
    pd_buf_free(&rec);
    pd_buf_free(&again);
    pd_arena_free(&mem);
    return dec.outcome;
}

static struct pd_path_end end_of(const struct pd_member *m) { return pd_path_end_of(paths, m->at, m->said.worker, m->said.domain); }

static void transfers_fail(const struct pd_member *p, const struct pd_member *d, int times, int64_t now)
{
    struct pd_path_end a = end_of(p), b = end_of(d);
    while (times--)
        pd_paths_end(paths, &a, &b, pd_paths_begin(paths, &a, &b, now), PD_WENT_WRONG, "transfer_timeout", 0, 0, now);
}

static void a_domain_is_required(void **state)
{
    struct pd_member *p0 = say((struct who)READY("unix:/p0", "prefill"), 1), *p1 = say((struct who)READY("unix:/p1", "prefill"), 1),
        *d0 = say((struct who)READY("unix:/d0", "decode"), 1);
    p0->given = 100;            /* p1 would be taken */
    use_paths(racks, (struct pd_paths_opts){ 0 });
    assert_int_equal(decide(PD_POLICY_FIXED, 1000), PD_CHOSEN);
    assert_true(dec.p == p1 && dec.rec.n_paths == 2 && pd_str_eq(dec.rec.paths[0].kind, "rack") && pd_str_eq(dec.rec.paths[1].kind, "cross"));
    assert_true(pd_str_eq(dec.domains[dec.p_rows[1].domain], "rackB") && !(dec.rec.degraded & PD_DG_NO_TOPOLOGY) && dec.rec.versions.topology);
    use_paths(racks, (struct pd_paths_opts){ .rule = { PD_DOMAIN_REQUIRE, PD_NEAR_RACK } });
    assert_int_equal(decide(PD_POLICY_FIXED, 1000), PD_CHOSEN);
    assert_ptr_equal(dec.p, p0);
    assert_string_equal(why(p1), "domain required rackA");
    p0->reachable = false;      /* not even when it is the only one; nor is it as if there were none */
    assert_int_equal(decide(PD_POLICY_FIXED, 1000), PD_WAIT_WORKER);
    assert_int_equal(decide(PD_POLICY_CONDITIONAL, 1000), PD_CHOSEN);
    assert_true(dec.d == d0 && !dec.p);
    use_paths(racks, (struct pd_paths_opts){ .rule = { PD_DOMAIN_PREFER, PD_NEAR_RACK } });
    assert_int_equal(decide(PD_POLICY_FIXED, 1000), PD_CHOSEN);
    assert_ptr_equal(dec.p, p1);
    p0->reachable = true;
    assert_int_equal(decide(PD_POLICY_FIXED, 1000), PD_CHOSEN);
    assert_ptr_equal(dec.p, p0);
    assert_string_equal(why(p1), "domain preferred rackA");
    pd_paths_set_topology(paths, NULL);
    decide(PD_POLICY_FIXED, 1000);
    assert_true(dec.rec.degraded & PD_DG_NO_TOPOLOGY);
}

/* More domains than a record has room for: those that are left out are in none, so nobody is taken for near who is not. */
static void too_many_domains(void **state)
{
    struct pd_buf text = { 0 };
    for (int i = 0; i < 80; i++) {
        char at[24];
        snprintf(at, sizeof at, "unix:/p%d", i);
        say((struct who)READY(at, "prefill"), 1)->given = i == 70 ? 100 : 0;
        assert_int_equal(pd_buf_printf(&text, &e, "domain r%d rack\nworker %s in r%d\n", i, at, i), 0);
    }
    assert_int_equal(pd_buf_printf(&text, &e, "worker unix:/d in r70\n%c", 0), 0);
    say((struct who)READY("unix:/d", "decode"), 1);
    use_paths((char *)text.p, (struct pd_paths_opts){ 0 });
    assert_int_equal(decide(PD_POLICY_FIXED, 1000), PD_CHOSEN);
    assert_true(dec.rec.n_domains == PD_ROUTE_DOMAINS && dec.rec.n_paths <= PD_ROUTE_PATHS);
    use_paths((char *)text.p, (struct pd_paths_opts){ .rule = { PD_DOMAIN_REQUIRE, PD_NEAR_RACK } });
    assert_true(decide(PD_POLICY_FIXED, 1000) != PD_CHOSEN || !strcmp(dec.p->at, "unix:/p70"));
    pd_registry_remove(&reg, pd_registry_find(&reg, (struct pd_str){ "unix:/p3", 8 }));
    for (int i = 10; i < 69; i++) {     /* with fewer of them it is found */
        char at[24];
        snprintf(at, sizeof at, "unix:/p%d", i);
        pd_registry_remove(&reg, pd_registry_find(&reg, (struct pd_str){ at, strlen(at) }));
    }
    assert_int_equal(decide(PD_POLICY_FIXED, 1000), PD_CHOSEN);
    assert_string_equal(dec.p->at, "unix:/p70");
    pd_buf_free(&text);
}

static void a_breaker_keeps_a_pair_apart(void **state)
{
    struct pd_member *p0 = say((struct who)READY("unix:/p0", "prefill"), 1), *p1 = say((struct who)READY("unix:/p1", "prefill"), 1),
        *d0 = say((struct who)READY("unix:/d0", "decode"), 1), *d1 = say((struct who)READY("unix:/d1", "decode"), 1);
    use_paths(racks, (struct pd_paths_opts){ 0 });
    p1->reachable = false;
    d1->given = 100;
    transfers_fail(p0, d0, 3, 1000);
    assert_int_equal(decide(PD_POLICY_FIXED, 1000), PD_CHOSEN);         /* to the other one */
    assert_ptr_equal(dec.d, d1);
    bool told = false;
    for (uint32_t i = 0; i < dec.rec.n_paths; i++)
        told |= dec.rec.paths[i].p == 0 && dec.rec.paths[i].d == 0 && pd_str_eq(dec.rec.paths[i].excluded, "breaker open 1.0s") &&
            pd_str_eq(dec.rec.paths[i].breaker, "open");
    assert_true(told);
    d1->reachable = false;
    assert_int_equal(decide(PD_POLICY_FIXED, 1000), PD_NO_PREFILL);     /* as if there were none: it may be computed where it is decoded */
    assert_string_equal(why(p0), "breaker open 1.0s");
    p1->reachable = true;
    assert_int_equal(decide(PD_POLICY_FIXED, 1000), PD_CHOSEN);
    assert_ptr_equal(dec.p, p1);
    p1->reachable = false;
    assert_int_equal(decide(PD_POLICY_FIXED, 1001001), PD_CHOSEN);      /* a probe */
    struct pd_path_end a = end_of(p0), b = end_of(d0);
    struct pd_path_ticket t = pd_paths_begin(paths, &a, &b, 1001001);
    assert_int_equal(decide(PD_POLICY_FIXED, 1001001), PD_NO_PREFILL);  /* one at a time */
    pd_paths_end(paths, &a, &b, t, PD_WENT_WELL, NULL, 0, 0, 1001001);
    assert_int_equal(decide(PD_POLICY_FIXED, 1001001), PD_CHOSEN);
}

static void who_is_maintained_gets_nothing(void **state)
{
    struct pd_member *p0 = say((struct who)READY("unix:/p0", "prefill"), 1), *d0 = say((struct who)READY("unix:/d0", "decode"), 1),
        *d1 = say((struct who)READY("unix:/d1", "decode"), 1);
    use_paths("domain rackA rack maintenance\nworker unix:/d0 in rackA\n", (struct pd_paths_opts){ 0 });
    assert_int_equal(decide(PD_POLICY_FIXED, 1000), PD_CHOSEN);
    assert_true(dec.p == p0 && dec.d == d1 && !strcmp(why(d0), "maintenance"));
    use_paths("domain rackA rack\nworker unix:/d0 in rackA\nworker unix:/p0 in rackA maintenance\n", (struct pd_paths_opts){ 0 });
    assert_int_equal(decide(PD_POLICY_FIXED, 1000), PD_NO_PREFILL);
    assert_string_equal(why(p0), "maintenance");
}

static void limits_of_room_and_fallbacks(void **state)
{
    struct pd_member *p0 = say((struct who)READY("unix:/p0", "prefill"), 1), *d0 = say((struct who)READY("unix:/d0", "decode"), 1),
        *d1 = say((struct who)READY("unix:/d1", "decode"), 1);
    struct pd_limit limit = { .o.share = 0.01 };        /* 160 tokens of 16000 */
    p0->own.blocks = 995;       /* handed out, and nobody has read it: 7 more are too much */
    assert_int_equal(decide(PD_POLICY_FIXED, 1000), PD_WAIT_ROOM);
    assert_string_equal(why(p0), "capacity: 995 blocks of 1000 are taken");
    p0->own.blocks = 993;
    assert_int_equal(decide(PD_POLICY_FIXED, 1000), PD_CHOSEN);
    struct pd_need q = need(PD_POLICY_FIXED);
    q.local = true;
    q.limit = &limit;
    pd_limit_begin(&limit, &d0->fallbacks, 100, 0);
    for (int i = 0; i < 4; i++) {
        pd_decide(&reg, &q, &dec);
        assert_true(dec.outcome == PD_CHOSEN && dec.d == d1);
        d1->given++;
    }
    assert_string_equal(why(d0), "fallbacks: 100 tokens of 160 are computed");
    pd_limit_begin(&limit, &d1->fallbacks, 61, 0);
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_WAIT_ROOM);
    q.limit = NULL;
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_CHOSEN);
}

/* Holds and open breakers are honoured however many there are, also behind pairs that only fail now and then and those of workers that are no more. */
static void no_hold_is_lost_among_many(void **state)
{
    enum { HELD = 150 };
    struct pd_member *p[HELD], *d = NULL, *good = NULL;
    struct pd_ledger *l = NULL;
    struct pd_ledger_read was;
    assert_int_equal(pd_ledger_open(NULL, &l, &was, &e), 0);
    char at[24];
    for (int i = 0; i < HELD; i++) {
        snprintf(at, sizeof at, "unix:/q%d", i);
        p[i] = say((struct who)READY(at, "prefill"), 1);
    }
    d = say((struct who)READY("unix:/d0", "decode"), 1);
    for (int how = 0; how < 3; how++) {
        use_paths(racks, (struct pd_paths_opts){ .ledger = l });
        for (int i = 0; how < 2 && i < 200; i++) {      /* of workers that are no more */
            snprintf(at, sizeof at, "unix:/gone%d", i);
            if (how == 1)
                assert_int_equal(pd_ledger_hold(l, at, "unix:/d0", "integrity: block 3", 0, &e), 0);
            struct pd_path_end a = pd_path_end_of(paths, at, (struct pd_str){ NULL, 0 }, (struct pd_str){ NULL, 0 }), b = end_of(d);
            for (int k = 0; k < 3; k++)
                pd_paths_end(paths, &a, &b, pd_paths_begin(paths, &a, &b, 1000), PD_WENT_WRONG, "transfer_timeout", 0, 0, 1000);
        }
        for (int i = 0; i < HELD; i++)
            transfers_fail(p[i], d, how == 1 ? 1 : 3, 1000);
        for (int i = 0; how == 1 && i < HELD; i++)
            assert_int_equal(pd_ledger_hold(l, p[i]->at, "unix:/d0", "integrity: block 3", 0, &e), 0);
        assert_int_not_equal(decide(PD_POLICY_FIXED, 1000), PD_CHOSEN);
        assert_true(decide(PD_POLICY_CONDITIONAL, 1000) == PD_CHOSEN && !dec.p);
        if (how == 2) {
            good = say((struct who)READY("unix:/good", "prefill"), 1);
            good->given = 1000000;
            assert_int_equal(decide(PD_POLICY_FIXED, 1000), PD_CHOSEN);
            assert_ptr_equal(dec.p, good);
        }
        for (int i = 0; how == 1 && i < HELD; i++)
            pd_ledger_release(l, p[i]->at, "unix:/d0", "fixed", 0);
    }
    pd_paths_free(paths);
    paths = NULL;
    pd_ledger_free(l);
}

/* Of pairs that a record has no room for as paths each is told all the same: who may not give to one decode worker gives to the others, and one look is enough. */
static void no_pair_is_lost_among_many(void **state)
{
    enum { MANY = 300 };
    struct pd_member *p[MANY], *d[3];
    struct pd_ledger *l = NULL;
    struct pd_ledger_read was;
    char at[24];
    assert_int_equal(pd_ledger_open(NULL, &l, &was, &e), 0);
    for (int i = 0; i < MANY; i++) {
        snprintf(at, sizeof at, "unix:/q%d", i);
        p[i] = say((struct who)READY(at, "prefill"), 1);
    }
    for (int i = 0; i < 3; i++) {
        snprintf(at, sizeof at, "unix:/d%d", i);
        d[i] = say((struct who)READY(at, "decode"), 1);
        d[i]->given = i ? 100 : 0;      /* all would go to the first one */
    }
    use_paths(racks, (struct pd_paths_opts){ .ledger = l });
    for (int i = 0; i < MANY; i++)
        if (i % 2)
            transfers_fail(p[i], d[0], 3, 1000);
        else
            assert_int_equal(pd_ledger_hold(l, p[i]->at, d[0]->at, "integrity: block 3", 0, &e), 0);
    for (int policy = PD_POLICY_FIXED; policy <= PD_POLICY_RANDOM; policy++)
        for (int i = 0; i < 200; i++) {
            struct pd_need q = need((enum pd_policy)policy);
            q.paths = paths;
            q.seed = (uint64_t)i * 977;
            pd_decide(&reg, &q, &dec);
            assert_true(dec.outcome == PD_CHOSEN && !(dec.p && dec.d == d[0]) && (policy != PD_POLICY_FIXED || dec.p));
            for (uint32_t k = 0; k < dec.n_p; k++)
                assert_int_equal(dec.p_row[k].x, PD_X_NO);
            if (policy == PD_POLICY_RANDOM)
                assert_true(fabs(dec.rec.propensity - (dec.d == d[0] ? 1.0 : !dec.p ? 1.0 / 9 : 8.0 / MANY / 9) / 3) < 1e-12);
        }
    assert_int_equal(decide(PD_POLICY_CONDITIONAL, 1000), PD_CHOSEN);
    for (uint32_t k = 0; k < dec.n_p; k++) {
        int32_t way = pd_route_path_of(&dec.rec, (int32_t)k, 0);
        assert_true(pd_route_apart(&dec.p_rows[k], 0) || (way >= 0 && dec.paths[way].x));
    }
    assert_int_equal(decide(PD_POLICY_RANDOM, 1000), PD_CHOSEN);
    d[1]->reachable = d[2]->reachable = false;
    assert_int_equal(decide(PD_POLICY_FIXED, 1000), PD_NO_PREFILL);
    assert_string_equal(why(p[MANY - 1]), "kept apart by a breaker or a hold");
    pd_paths_free(paths);
    paths = NULL;
    pd_ledger_free(l);
}

/* Preferred is preferred: what is chosen among near ones stays, also when that is no remote way. */
static void far_ones_are_not_asked_while_near_ones_are_there(void **state)
{
    struct pd_member *p0 = say((struct who)READY("unix:/p0", "prefill"), 1), *d0 = say((struct who)READY("unix:/d0", "decode"), 1);
    say((struct who)READY("unix:/p1", "prefill"), 1);
    p0->own = (struct pd_share){ 3, 30000, 300 };       /* the near one has a queue, the far one none */
    use_paths(racks, (struct pd_paths_opts){ .rule = { PD_DOMAIN_PREFER, PD_NEAR_RACK } });
    static struct pd_learn learnt;
    struct pd_need q = need(PD_POLICY_CONDITIONAL);
    q.paths = paths;
    q.learn = &learnt;
    d0->said.load.seqs = 6;
    q.prompt_tokens = 3000;
    pd_decide(&reg, &q, &dec);
    assert_true(dec.outcome == PD_CHOSEN && (!dec.p || dec.p == p0));
    p0->reachable = false;
    pd_decide(&reg, &q, &dec);
    assert_true(dec.outcome == PD_CHOSEN && dec.p && !strcmp(dec.p->at, "unix:/p1"));
    pd_learn_free(&learnt);
}

/* A prompt that a prefill worker can never hold does not go there, to be aborted each time. */
static void no_prompt_goes_where_it_cannot_be(void **state)
{
    struct who small = READY("unix:/p0", "prefill"), both = READY("unix:/b0", "both");
    small.cap.blocks = 150;     /* 2,400 tokens */
    both.cap.blocks = 300;
    both.prefer = "prefill";
    struct pd_member *p0 = say(small, 1), *b0, *p1;
    say((struct who)READY("unix:/d0", "decode"), 1);
    struct pd_need q = need(PD_POLICY_FIXED);
    q.prompt_tokens = 2400;
    pd_decide(&reg, &q, &dec);
    assert_ptr_equal(dec.p, p0);
    q.prompt_tokens = 2401;
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_NO_PREFILL);       /* at once: no wait makes it larger */
    assert_string_equal(why(p0), "capacity: a prompt of 151 blocks, room to compute 150");
    b0 = say(both, 1);
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_NO_PREFILL);
    assert_string_equal(why(b0), "capacity: a prompt of 151 blocks, room to compute 150");
    p1 = say((struct who)READY("unix:/p1", "prefill"), 1);
    p1->given = 1000;
    p1->said.capacity.context = 2400;
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_NO_PREFILL);
    assert_string_equal(why(p1), "capacity: a prompt of 2401 tokens, a context of 2400");
    p1->said.capacity.context = 4096;
    pd_decide(&reg, &q, &dec);
    assert_ptr_equal(dec.p, p1);
    q.adapter = (struct pd_str){ "lora", 4 };
    struct pd_str has[] = { q.adapter };
    reg.first->next->said.adapters = has;
    reg.first->next->said.n_adapters = 1;
    pd_decide(&reg, &q, &dec);
    assert_true(dec.outcome == PD_NO_PREFILL && strstr(why(p1), "adapter 'lora'"));
    reg.first->next->said.n_adapters = 0;
}

/* Workers that are gone take no rows from those that are there; one that has not been heard of for ten heartbeats has no load that could be gone by. */
static void the_absent_take_no_rows(void **state)
{
    char at[24];
    for (int i = 0; i < PD_MAX_CANDIDATES + 50; i++) {
        snprintf(at, sizeof at, "unix:/x%d", i);
        say((struct who)READY(at, "decode"), 1)->reachable = false;
    }
    struct pd_member *m = say((struct who)READY("unix:/there", "decode"), 1);
    assert_int_equal(decide(PD_POLICY_AGGREGATED, 1000), PD_CHOSEN);
    assert_true(dec.d == m && dec.left_out == PD_MAX_CANDIDATES + 50 && dec.rec.left_d[PD_X_UNREACHABLE] == PD_MAX_CANDIDATES + 50);
    m->reachable = false;
    assert_int_equal(decide(PD_POLICY_AGGREGATED, 1000), PD_WAIT_WORKER);
    pd_registry_free(&reg);
    m = say((struct who)READY("unix:/there", "decode"), 1);
    m->said.beat_us = 1000000;
    struct pd_need q = need(PD_POLICY_AGGREGATED);
    q.suspect_us = 60000000;
    q.now_us = 10000001;
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_CHOSEN);
    q.now_us = 10100001;
    pd_decide(&reg, &q, &dec);
    assert_int_equal(dec.outcome, PD_WAIT_WORKER);
    assert_string_equal(why(m), "stale load 10.1s");
}

/* What a worker told of its cache long ago may be gone: the prompt may have to be computed whole. */
static void an_old_index_is_wide(void **state)
{
    static struct pd_learn learnt;
    struct pd_member *m = say((struct who)READY("unix:/a", "both"), 1);
    struct pd_need q = need(PD_POLICY_CONDITIONAL);
    q.learn = &learnt;
    q.prompt_tokens = 1600;
    m->said.beat_us = 1000000;
    m->held = (struct pd_held){ 90, PD_HELD_EVENTS, 3000000 };
    pd_decide(&reg, &q, &dec);
    struct pd_spread fresh = dec.d_rows[0].prefill;
    assert_true(dec.d_rows[0].hit_blocks == 90 && !(fresh.marks & PD_SPREAD_STALE));
    m->held.age_us++;
    pd_decide(&reg, &q, &dec);
    struct pd_spread old = dec.d_rows[0].prefill;
    assert_true(old.p50 == fresh.p50 && old.marks & PD_SPREAD_STALE && dec.rec.degraded & PD_DG_STALE);
    assert_int_equal(old.p95, pd_learn_prefill(&learnt, 0, 1600, 0, 1000).p95);
    m->held.how = PD_HELD_GUESS;        /* a guess has its own mark */
    pd_decide(&reg, &q, &dec);
    assert_true(dec.d_rows[0].prefill.p95 == fresh.p95 && !(dec.rec.degraded & PD_DG_STALE));
    pd_learn_free(&learnt);
}

int main(void)
{
#define T(f) cmocka_unit_test_teardown(f, clean)
    const struct CMUnitTest tests[] = { T(the_least_loaded_is_chosen), T(held_blocks_count), T(a_worker_of_both_roles_has_the_side_that_it_prefers), T(who_has_much_to_read_gets_nothing_new), T(each_exclusion_is_named), T(what_nobody_has_is_never), T(pairs_agree),
        T(no_kv_crosses_epochs),
        T(room_for_the_output_counts), T(conversions_are_admitted_by_the_taker), T(fingerprints_are_let_go), T(the_matrix_names_what_differs),
#define P(f) cmocka_unit_test_teardown(f, clean_paths)
        P(a_domain_is_required), P(too_many_domains), P(a_breaker_keeps_a_pair_apart), P(who_is_maintained_gets_nothing), P(limits_of_room_and_fallbacks), P(no_hold_is_lost_among_many), P(no_pair_is_lost_among_many),
        P(far_ones_are_not_asked_while_near_ones_are_there), P(no_prompt_goes_where_it_cannot_be), P(the_absent_take_no_rows),
        T(an_old_index_is_wide) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
