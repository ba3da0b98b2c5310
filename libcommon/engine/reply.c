#include <stdio.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../base/utf8.h"
#include "../wire/frame.h"
#include "../wire/value.h"
#include "reply.h"

/* An id that no record may carry (of another type, of broken text) cannot name the refusal either. */
static bool id_is_plain(struct pd_bin id)
{
    struct pd_str s;
    int64_t i;
    return pd_get_int(id, &i) || (pd_get_str(id, &s) && pd_utf8_invalid(s.p, s.n) < 0);
}

int pd_intake_read(const uint8_t *rec, size_t n, int64_t seed, struct pd_intake *in, struct pd_err *e)
{
    memset(in, 0, sizeof *in);
    in->t_accept = pd_mono_us();
    int rc = pd_request_decode(rec, n, &in->mem, &in->req, e), rc2;
    if (rc < 0) {       /* keep what names it */
        struct pd_bin id, v;
        struct pd_str run;
        if (!in->req.run[0] && pd_map_find(rec, n, "run", &v) == 1 && pd_get_str(v, &run) && pd_run_valid(run.p, run.n))
            memcpy(in->req.run, run.p, PD_RUN_LEN);
        if (!in->req.id.p && pd_map_find(rec, n, "id", &id) == 1 && id.n <= 256 && id_is_plain(id) && (in->req.id.p = pd_arena_dup(&in->mem, id.p, id.n, NULL)))
            in->req.id.n = id.n;
        if (!in->req.run[0])
            pd_run_new(in->req.run, NULL);
        if (in->req.n < 1 || in->req.n > 128)
            in->req.n = 1;
        return rc;
    }
    if ((rc = pd_request_resolve(&in->req, seed, e)) < 0) {
        if (!in->req.run[0] && (rc2 = pd_run_new(in->req.run, NULL)) < 0)
            return rc2;
        if (in->req.n < 1 || in->req.n > 128)
            in->req.n = 1;
    }
    return rc;
}

int pd_intake_tokens(const struct pd_runtime *rt, struct pd_intake *in, struct pd_err *e)
{
    struct pd_buf ids = { 0 };
    int rc = pd_prompt_tokens(rt, &in->req, &ids, e);
    if (rc < 0)
        goto out;
    in->n_tokens = (uint32_t)(ids.n / sizeof(int32_t));
    if (!(in->tokens = pd_arena_dup(&in->mem, ids.p ? ids.p : (const uint8_t *)"", ids.n, e)))
        rc = PD_ENOMEM;
out:
    pd_buf_free(&ids);
    return rc;
}

int pd_intake_take(const struct pd_runtime *rt, const uint8_t *rec, size_t n, int64_t seed, struct pd_intake *in, struct pd_err *e)
{
    int rc = pd_intake_read(rec, n, seed, in, e);
    return rc < 0 ? rc : pd_intake_tokens(rt, in, e);
}

void pd_intake_free(struct pd_intake *in) { pd_arena_free(&in->mem); }

int pd_refusal_error(const struct pd_request *r, const struct pd_err *why, const char *action, struct pd_buf *b, struct pd_err *e)
{
    struct pd_error_rec er = { .id = r->id, .code = pd_exit_status(why->code), .message = { why->msg, strlen(why->msg) } };
    memcpy(er.run, r->run, sizeof er.run);
    snprintf(er.class_, sizeof er.class_, "%s", pd_code_name(why->code));
    snprintf(er.action, sizeof er.action, "%s", action);
    return pd_error_encode(&er, b, e);
}

int pd_refusal_encode(const struct pd_request *r, const struct pd_err *why, const char *action, const struct pd_result *as, struct pd_buf *b, struct pd_err *e)
{
    int rc = pd_refusal_error(r, why, action, b, e);
    for (int32_t i = 0; rc == 0 && i < (r->n < 1 ? 1 : r->n); i++) {
        struct pd_result res = *as;
        res.id = r->id;
        res.choice = (uint32_t)i;
        res.text = (struct pd_str){ "", 0 };
        res.ttft_ms = res.tpot_ms = res.e2e_ms = res.kv_ms = -1;
        memcpy(res.run, r->run, sizeof res.run);
        strcpy(res.finish_reason, "error");
        rc = pd_result_encode(&res, b, e);
    }
    return rc;
}

void pd_run_step(struct pd_trace *t, const struct pd_step *s, enum pd_state_id state, uint64_t bytes, const char *cause)
{
    pd_trace_step(t, s, state, bytes, cause);
    if (!pd_log_verbose())
        return;
    char size[40] = "";
    if (bytes)
        snprintf(size, sizeof size, ", %llu bytes", (unsigned long long)bytes);
    pd_info("run %s: %s (%s)%s%s%s", s->run, pd_state[state].name, s->where, size, cause ? ": " : "", cause ? cause : "");
}

void pd_run_draining(uint32_t runs)
{
    pd_warn("a signal: %u run%s in hand will be finished; a second one stops at once", runs, runs == 1 ? "" : "s");
}

void pd_run_progress(const char *what, int64_t t0, uint64_t done, uint64_t left, uint32_t runs)
{
    double s = (double)(pd_mono_us() - t0) / 1e6;
    if (s > 2 && done)
        pd_progress("%s: %llu tokens, %.0f tokens/s, %u runs in hand, at most %.0f s to go", what, (unsigned long long)done, (double)done / s, runs,
                    (double)left * s / (double)done);
}

void pd_op_make(uint8_t op[16], const char *run, const char *step, const void *inputs, size_t n)
{
    uint64_t seed = pd_xxh3(run, strlen(run), 0);
    pd_put_be64(op, pd_xxh3(step, strlen(step), seed));
    pd_put_be64(op + 8, pd_xxh3(inputs, n, seed));
}

void pd_refusal_log(const struct pd_request *r, const struct pd_err *why)
{
    char id[80];
    pd_error("run %s (id %s): %s", r->run[0] ? r->run : "?", pd_id_text(r->id, id, sizeof id), why->msg);
}

int pd_put_records(struct pd_wstream *w, const uint8_t *p, size_t n, struct pd_err *e)
{
    for (size_t at = 0, len; at < n; at += len) {
        struct pd_frame_scan scan = { 0 };
        int rc = pd_frame_next(&scan, p + at, n - at, SIZE_MAX / 2, &len, e);
        if (rc != 1)
            return rc < 0 ? rc : pd_fail(e, PD_EFAIL, "an encoder of ours made half a record");
        if ((rc = pd_wstream_put(w, p + at, len, e)) < 0)
            return rc;
    }
    return 0;
}
