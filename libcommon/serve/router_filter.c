#include "router_filter.h"
#include "../base/clock.h"
#include "../base/log.h"
#include "../base/seen.h"
#include "../base/stop.h"
#include "../engine/reply.h"
#include "../wire/pack.h"
#include "register.h"
#include "router_in.h"

struct filter {
    const struct pd_router_opts *o;
    enum pd_policy policy;
    struct pd_registry reg;
    struct pd_learn learn;
    struct pd_profile profile;
    struct pd_topology *topology;
    struct pd_paths *paths;             /* NULL: there is no topology to go by */
    struct pd_decision decision;
    struct pd_seen seen;
    struct pd_wstream *out;
    int status;
};

/* A worker that --describe printed is as good as there. */
static int add_worker(struct filter *f, struct pd_worker_rec *w, struct pd_err *e)
{
    struct pd_buf b = { 0 };
    struct pd_member *m;
    bool fresh;
    strcpy(w->state, "ready");
    int rc = pd_worker_rec_encode(w, &b, e);
    if (rc == 0 && (rc = pd_registry_add(&f->reg, w->listen.p ? w->listen.p : w->worker.p, &m, e)) == 0 &&
        (rc = pd_registry_said(&f->reg, m, b.p, b.n, pd_mono_us(), &fresh, e)) == 0) {
        char why[400];
        m->reachable = true;
        if (pd_learn_lacks(&f->learn, &m->said, why, sizeof why)[0])
            pd_warn("worker %s: %s", pd_member_name(m), why);
    }
    if (rc == 0 && !f->o->policy_given && pd_member_gives(m))
        f->policy = PD_POLICY_FIXED;
    pd_buf_free(&b);
    return rc;
}

static int read_workers(struct filter *f, const char *path, struct pd_err *e)
{
    struct pd_arena mem = { 0 };
    struct pd_worker_rec *w = NULL;
    uint32_t n = 0;
    int rc = pd_workers_read(path, &mem, &w, &n, e);
    for (uint32_t i = 0; rc == 0 && i < n; i++)
        rc = add_worker(f, &w[i], e);
    pd_arena_free(&mem);
    return rc;
}

static int read_topology(struct filter *f, struct pd_err *e)
{
    struct pd_paths_opts po = { .rule = f->o->domain, .seed = (uint64_t)f->o->seed };
    int rc = f->o->topology ? pd_topology_load(f->o->topology, &f->topology, e) : 0;
    if (rc || !f->topology || (rc = pd_paths_new(&po, &f->paths, e)))
        return rc;
    pd_paths_set_topology(f->paths, f->topology);
    return 0;
}

static struct pd_str text(const char *s) { return (struct pd_str){ s, s ? strlen(s) : 0 }; }
static struct pd_place place(const struct pd_member *m) { return (struct pd_place){ text(pd_member_name(m)), text(m->at) }; }

/* Nobody may have it: an error and a result a choice, with the list. */
static int refuse(struct filter *f, const struct pd_request *q, const struct pd_err *why, const char *finish, struct pd_err *e)
{
    struct pd_buf b = { 0 }, list = { 0 };
    struct pd_packer k;
    struct pd_result as = { .mode = "aggregated", .ttft_ms = -1, .tpot_ms = -1, .e2e_ms = -1, .kv_ms = -1, .id = q->id, .text = { "", 0 } };
    pd_refusal_log(q, why);
    f->status = pd_exit_worse(f->status, why->code);
    int rc = pd_refusal_error(q, why, "abort", &b, e);
    if (rc == 0 && f->decision.outcome != PD_CHOSEN) {
        pd_pack_init(&k, &list, e);
        pd_pack_text(&k, "excluded");
        if ((rc = k.rc ? k.rc : pd_decision_excluded(&f->decision, &list, e)) == 0)
            as.extra = (struct pd_extra){ list.p, list.n, 1 };
    }
    memcpy(as.run, q->run, sizeof as.run);
    snprintf(as.finish_reason, sizeof as.finish_reason, "%s", finish);
    for (int32_t i = 0; rc == 0 && i < (q->n < 1 ? 1 : q->n); i++) {
        as.choice = (uint32_t)i;
        rc = pd_result_encode(&as, &b, e);
    }
    rc = rc ? rc : pd_put_records(f->out, b.p, b.n, e);
    pd_buf_free(&b);
    pd_buf_free(&list);
    return rc;
}

static int note(struct filter *f, const char *run, const uint8_t op[16], struct pd_err *e)
{
    struct pd_route_note n = { .run = run, .op = op, .attempt = 1, .t_us = pd_wall_us() };
    struct pd_buf b = { 0 };
    if (!f->o->trace)
        return 0;
    int rc = pd_decision_encode(&f->decision, &n, &b, e);
    if (rc == 0)
        pd_trace_record(f->o->trace, b.p, b.n);
    pd_buf_free(&b);
    return rc;
}

static int pass_on(struct filter *f, struct pd_request *q, struct pd_err *e)
{
    struct pd_decision *o = &f->decision;
    struct pd_buf route = { 0 }, rec = { 0 };
    struct pd_routing x = { .policy = text(o->rec.policy), .d = place(o->d), .has_p = o->p != NULL };
    uint64_t h[2] = { pd_xxh3(x.d.at.p, x.d.at.n, 0), pd_xxh3(q->run, PD_RUN_LEN, 0) };
    if (o->p)
        x.p = place(o->p);
    snprintf(x.mode, sizeof x.mode, "%s", pd_mode_names[o->mode]);
    pd_op_make(x.op, q->run, o->p ? "prefill" : "decode", h, sizeof h);
    int rc = note(f, q->run, x.op, e);
    rc = rc ? rc : pd_routing_encode(&x, &route, e);
    q->route = (struct pd_bin){ route.p, route.n };
    rc = rc ? rc : pd_request_encode(q, &rec, e);
    rc = rc ? rc : pd_wstream_put(f->out, rec.p, rec.n, e);
    for (int side = 0; rc == 0 && side < 2; side++)
        if (side ? o->d : o->p)
            (side ? o->d : o->p)->given++;
    pd_buf_free(&route);
    pd_buf_free(&rec);
    return rc;
}

/* < 0: the stream is at an end; a bad request is answered. */
static int take(struct filter *f, const struct pd_rec *rec, struct pd_err *e)
{
    struct pd_intake in = { 0 };
    struct pd_request *q = &in.req;
    struct pd_err why;
    static const uint8_t no_op[16];
    int rc = pd_intake_read(rec->p, rec->n, f->o->seed, &in, &why);
    f->decision.outcome = PD_CHOSEN;
    if (rc == 0 && (rc = pd_seen_add(&f->seen, q->run, PD_RUN_LEN, &why)) > 0) {
        rc = pd_fail(&why, PD_EFAIL, PD_RUN_TWICE, q->run);
        pd_run_new(q->run, NULL);
    }
    if (rc < 0) {
        rc = refuse(f, q, &why, "error", e);
        goto out;
    }
    struct pd_need need = { .policy = f->policy, .policy_n = f->o->policy_n, .rules = &f->o->rules, .learn = &f->learn, .paths = f->paths, .now_us = pd_mono_us(),
        .seed = pd_xxh3(q->run, PD_RUN_LEN, (uint64_t)f->o->seed), .exact = q->has_token_ids, .prompt_tokens = q->has_token_ids ? q->n_token_ids : pd_rt_guess_tokens(q),
        .max_tokens = (uint32_t)q->max_tokens, .n = (uint32_t)q->n, .adapter = q->adapter, .slo = q->slo, .like = -1,
        .deadline_us = q->has & PD_RQ_DEADLINE && q->deadline_ms > 0 && q->deadline_ms < PD_US_MOST / 1000 ? q->deadline_ms * 1000 : 0 };
    pd_decide(&f->reg, &need, &f->decision);
    if (f->decision.outcome == PD_CHOSEN)
        rc = pass_on(f, q, e);
    else {
        struct pd_buf line = { 0 };
        if (pd_decision_text(&f->decision, &line, &why) == 0 && pd_buf_add(&line, "", 1, &why) == 0)
            pd_fail(&why, PD_ENOWORKER, "no worker: %.400s", (char *)line.p);
        pd_buf_free(&line);
        rc = note(f, q->run, no_op, e);
        rc = rc ? rc : refuse(f, q, &why, "blocked", e);
    }
out:
    pd_intake_free(&in);
    return rc;
}

int pd_router_filter(const struct pd_router_opts *o, const char *workers, struct pd_rstream *in, struct pd_wstream *out, int *status, struct pd_err *e)
{
    struct filter *f = pd_calloc(1, sizeof *f, "a router", e);
    struct pd_rec rec;
    if (!f)
        return PD_ENOMEM;
    f->o = o;
    f->policy = o->policy;
    f->out = out;
    f->learn.profile = o->profile ? &f->profile : NULL;
    int rc = o->profile ? pd_profile_read(o->profile, &f->profile, e) : 0;
    rc = rc ? rc : read_workers(f, workers, e);
    rc = rc ? rc : read_topology(f, e);
    while (rc == 0 && !pd_stop_level()) {
        bool bad = false;
        int got = pd_rstream_next(in, 0, &rec, &bad, e);
        if (got == 2) {         /* whoever waits for what went in gets it */
            if ((rc = pd_wstream_flush(out, e)) < 0)
                break;
            got = pd_rstream_next(in, -1, &rec, &bad, e);
        }
        if (got == 0)
            break;
        if (got == 2)
            continue;
        if (got < 0 && !bad)
            rc = got;
        else if (got < 0) {
            struct pd_request none = { .n = 1 };
            struct pd_err why = *e;
            pd_run_new(none.run, NULL);
            f->decision.outcome = PD_CHOSEN;
            rc = refuse(f, &none, &why, "error", e);
        } else
            rc = rec.kind == PD_K_REQUEST ? take(f, &rec, e) : pd_wstream_put(out, rec.p, rec.n, e);
    }
    *status = f->status;
    pd_registry_free(&f->reg);
    pd_paths_free(f->paths);
    pd_topology_free(f->topology);
    pd_learn_free(&f->learn);
    pd_profile_free(&f->profile);
    pd_seen_free(&f->seen);
    pd_free(f);
    return rc;
}
