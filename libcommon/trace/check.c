#include <stdarg.h>
#include <stdio.h>
#include "../base/seen.h"
#include "check.h"
#include "keyed.h"

#define B(x) PD_BIT(PD_ST_##x)
#define OUT (B(STREAMING) | B(FIRST_TOKEN_EARLY))
enum { N_RUN = PD_ST_FIRST_TOKEN_EARLY + 1, PARTS = 8, STALE = 4, ENDED = 8192 /* ended runs and leases held whole */, MAX_CHOICES = 128 };

struct proc {                   /* one life of a writer */
    struct pd_node node;        /* by a hash of its name; a later life takes its place */
    struct proc *older;
    enum pd_rank rank;
    bool gone, headless, lost_life;     /* headless: its first record says that the log was rotated; lost_life: another life began without gone */
    struct pd_ref last;
    char name[80];
};

struct choice { uint32_t next; struct pd_ref last; };
/* What one rank delivered of a run. */
struct view { struct choice *choice; uint32_t n; bool any, moved /* migrated since */; struct pd_finding *clash; bool clash_absent; };

struct run {
    struct pd_node node;
    uint32_t seen, ever;        /* in this attempt, in those before it */
    struct proc *part[PARTS], *stale[STALE];
    uint8_t n_parts, n_stale;
    enum pd_rank top, out_by;      /* of those that took part; of those that streamed */
    bool ended, elsewhere, headless;
    uint8_t op[16]; bool has_op;        /* of the attempt, as its router chose it; zeros between two */
    uint32_t other;             /* of seen: told by who still worked on another attempt, or went over to this one */
    struct pd_ref first, last, cancel, out, at[N_RUN];
    struct proc *ended_by;
    enum pd_state_id end;
    uint32_t told;              /* completed's tokens */
    struct view view[PD_N_RANKS];
};

struct lease {
    struct pd_node node;
    char run[PD_RUN_LEN + 1];
    struct proc *grantor;
    bool live, reaped;
    struct pd_ref grant, end;
};

struct pd_check {
    struct pd_check_opts o;
    struct pd_check_sum sum;
    struct pd_keyed procs, runs, leases, old_runs, old_leases;
    struct proc *lives;         /* former ones */
    struct pd_seen past_runs, past_leases;
    struct pd_finding *deferred;        /* that something is missing: whether it was lost is known at the end */
    size_t n_deferred, cap_deferred;
};

/* ---- findings ---- */

static struct pd_finding finding(const char *rule, const char *run, const struct pd_ref *a, const struct pd_ref *b, const char *fmt,
    ...) __attribute__((format(printf, 5, 6)));
static struct pd_finding finding(const char *rule, const char *run, const struct pd_ref *a, const struct pd_ref *b, const char *fmt, ...)
{
    struct pd_finding f = { .rule = rule };
    va_list ap;
    snprintf(f.run, sizeof f.run, "%s", run);
    if (a)
        f.first = *a;
    if (b)
        f.second = *b;
    va_start(ap, fmt);
    vsnprintf(f.text, sizeof f.text, fmt, ap);
    va_end(ap);
    return f;
}

static int tell(struct pd_check *c, const struct pd_finding *f, struct pd_err *e)
{
    c->sum.violations += !f->lost;
    return c->o.found ? c->o.found(c->o.ctx, f, e) : 0;
}

static int defer(struct pd_check *c, const struct pd_finding *f, struct pd_err *e)
{
    if (c->n_deferred == c->cap_deferred) {
        size_t cap = c->cap_deferred ? c->cap_deferred * 2 : 16;
        struct pd_finding *p = pd_realloc(c->deferred, cap, sizeof *p, "findings", e);
        if (!p)
            return PD_ENOMEM;
        c->deferred = p;
        c->cap_deferred = cap;
    }
    c->deferred[c->n_deferred++] = *f;
    return 0;
}

static const char *state_name(enum pd_state_id id) { return pd_state[id].name; }

/* ---- processes ---- */

static int process_of(struct pd_check *c, const struct pd_log_rec *r, struct proc **out, struct pd_err *e)
{
    struct pd_str name = r->ev.worker;
    uint8_t key[8];
    pd_put_be64(key, pd_xxh3(name.p ? name.p : "", name.n, 0));
    struct proc *p = pd_keyed_find(&c->procs, key, sizeof key);
    if (p && r->state == PD_ST_STARTING) {      /* another life under the same name */
        pd_keyed_remove(&c->procs, p);
        p->lost_life = !p->gone;
        p->older = c->lives;
        c->lives = p;
        p = NULL;
    }
    if (!p) {
        if (!(p = pd_calloc(1, sizeof *p, "a process", e)))
            return PD_ENOMEM;
        int rc = pd_keyed_add(&c->procs, p, key, sizeof key, e);
        if (rc) {
            pd_free(p);
            return rc;
        }
        p->headless = r->state == PD_ST_ROTATED;
        snprintf(p->name, sizeof p->name, "%.*s", (int)(name.n < sizeof p->name ? name.n : sizeof p->name - 1), name.p ? name.p : "");
        c->sum.processes++;
    }
    if (r->ev.role[0])
        p->rank = pd_rank_of(r->ev.role);
    p->gone = r->state == PD_ST_GONE;
    *out = p;
    return 0;
}

/* ---- runs ---- */

static void run_free(struct run *r)
{
    for (int i = 0; i < PD_N_RANKS; i++) {
        pd_free(r->view[i].choice);
        pd_free(r->view[i].clash);
    }
    pd_free(r);
}

static void take_part(struct run *r, struct proc *p)
{
    if (p->rank > r->top)
        r->top = p->rank;
    r->headless |= p->headless;
    for (int i = 0; i < r->n_parts; i++)
        if (r->part[i] == p)
            return;
    if (r->n_parts < PARTS)
        r->part[r->n_parts++] = p;
    else if (p->rank > r->part[PARTS - 1]->rank)        /* who answers for its end is among them */
        r->part[PARTS - 1] = p;
}

static bool is_stale(const struct run *r, const struct proc *p)
{
    for (int i = 0; i < r->n_stale; i++)
        if (r->stale[i] == p)
            return true;
    return false;
}

/* A router's log alone: what the workers did is not here, and not missed. */
static bool workers_elsewhere(const struct run *r)
{
    for (int i = 0; i < r->n_parts; i++)
        if (r->part[i]->rank == PD_R_WORKER)
            return false;
    return r->n_parts > 0;
}

/* An attempt that its router has given up: of another op, nor caused by this one. Workers hear of that a little later. */
static bool of_another(const struct run *r, const struct proc *p, const struct pd_event *ev)
{
    if (!r->has_op || p->rank != PD_R_WORKER || (!ev->has_op && !ev->has_parent))
        return false;
    return !(ev->has_op && !memcmp(ev->op, r->op, sizeof r->op)) && !(ev->has_parent && !memcmp(ev->parent, r->op, sizeof r->op));
}

/* A side step by one process: what another did for the attempt before may still come in, and means nothing. */
static void begin_attempt(struct run *r, uint32_t clears, const struct proc *by, struct proc *const part[], int n)
{
    for (int i = 0; i < n; i++)
        if (part[i] != by && part[i]->rank == PD_R_WORKER && !is_stale(r, part[i]) && r->n_stale < STALE)
            r->stale[r->n_stale++] = part[i];
    r->ever |= r->seen & clears;
    r->seen &= ~clears;
    r->other &= ~clears;
}

static const char *run_name(const struct run *r) { return (const char *)r->node.key; }

/* The clash of a view is kept until it is known whose view counts. */
static int clash(struct view *v, const struct pd_finding *f, bool absent, struct pd_err *e)
{
    if (v->clash)
        return 0;
    if (!(v->clash = pd_calloc(1, sizeof *f, "a finding", e)))
        return PD_ENOMEM;
    *v->clash = *f;
    v->clash_absent = absent;
    return 0;
}

static int deliver(struct run *r, const struct pd_event *ev, enum pd_rank rank, const struct pd_ref *ref, struct pd_err *e)
{
    struct view *v = &r->view[rank];
    uint32_t tokens = ev->tokens ? ev->tokens : 1;
    if (ev->choice >= MAX_CHOICES || ev->pos > UINT32_MAX - tokens || (!ev->tokens && !ev->pos && v->any && v->moved))
        return 0;
    if (ev->choice >= v->n) {
        struct choice *p = pd_realloc(v->choice, ev->choice + 1, sizeof *p, "choices", e);
        if (!p)
            return PD_ENOMEM;
        memset(p + v->n, 0, (ev->choice + 1 - v->n) * sizeof *p);
        v->choice = p;
        v->n = ev->choice + 1;
    }
    struct choice *c = &v->choice[ev->choice];
    bool free_start = (v->moved && rank == PD_R_WORKER) || (r->elsewhere && !c->last.state);
    int rc = 0;
    if (ev->pos != c->next && !free_start) {
        bool gap = ev->pos > c->next;
        const struct pd_ref *before = c->last.state ? &c->last : &r->last;
        struct pd_finding f = !ev->pos ? finding("first_token", run_name(r), before, ref, "choice %u: the first token went out twice (%u tokens had)",
            ev->choice, c->next)
                                       : finding("position", run_name(r), before, ref, "choice %u: position %u went out %s %u tokens", ev->choice, ev->pos,
                                                 gap ? "after only" : "again, after", c->next);
        rc = clash(v, &f, gap, e);
    }
    if (ev->pos + tokens > c->next)
        c->next = ev->pos + tokens;
    c->last = *ref;
    v->any = true;
    return rc;
}

/* Positions and their count, by the view that counts. */
static int judge_delivery(struct pd_check *c, struct run *r, struct pd_err *e)
{
    const struct view *v = NULL;
    for (int i = PD_N_RANKS - 1; i >= 0 && !v; i--)
        if (r->view[i].any)
            v = &r->view[i];
    if (!v)
        return 0;
    if (v->clash)
        return v->clash_absent ? defer(c, v->clash, e) : tell(c, v->clash, e);
    uint64_t n = 0;
    for (uint32_t i = 0; i < v->n; i++)
        n += v->choice[i].next;
    if (r->end != PD_ST_COMPLETED || !r->told || n == r->told || r->elsewhere)
        return 0;
    struct pd_finding f = finding("token_count", run_name(r), &v->choice[v->n - 1].last, &r->at[PD_ST_COMPLETED],
        "completed with %u tokens, but %llu went out", r->told,
                                  (unsigned long long)n);
    return n < r->told ? defer(c, &f, e) : tell(c, &f, e);
}

static int end_run(struct pd_check *c, struct run *r, const struct pd_log_rec *rec, struct proc *by, struct pd_err *e)
{
    r->ended = true;
    r->end = rec->state;
    r->ended_by = by;
    r->told = rec->ev.tokens;
    *(rec->state == PD_ST_COMPLETED ? &c->sum.completed : rec->state == PD_ST_FAILED ? &c->sum.failed : rec->state == PD_ST_CANCELLED
        ? &c->sum.cancelled : &c->sum.blocked) += 1;
    int rc = judge_delivery(c, r, e);
    if (rc)
        return rc;
    pd_keyed_remove(&c->runs, r);
    if ((rc = pd_keyed_add(&c->old_runs, r, r->node.key, PD_RUN_LEN, e))) {
        run_free(r);
        return rc;
    }
    while (c->old_runs.n > ENDED) {
        struct run *old = (struct run *)c->old_runs.first;
        pd_keyed_remove(&c->old_runs, old);
        rc = pd_seen_add(&c->past_runs, old->node.key, PD_RUN_LEN, e);
        run_free(old);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static enum pd_state_id highest(uint32_t mask, const struct run *r)
{
    enum pd_state_id best = PD_ST_UNKNOWN;
    for (int i = 1; i < N_RUN; i++)
        if (mask >> i & 1 && (best == PD_ST_UNKNOWN || r->at[i].at_us >= r->at[best].at_us))
            best = (enum pd_state_id)i;
    return best;
}

static const char *names_of(uint32_t mask, char *out, size_t cap)
{
    size_t n = 0;
    out[0] = 0;
    for (int i = 1; i < N_RUN && n < cap; i++)
        if (mask >> i & 1)
            n += (size_t)snprintf(out + n, cap - n, "%s%s", n ? " or " : "", state_name((enum pd_state_id)i));
    return out;
}

static int out_of_order(struct pd_check *c, struct run *r, enum pd_state_id id, uint32_t mask, bool barred, const struct pd_ref *ref, struct pd_err *e)
{
    char names[160];
    struct pd_finding f;
    if (!barred) {
        f = finding("order", run_name(r), &r->last, ref, "%s without %s before it in this attempt", state_name(id), names_of(mask, names, sizeof names));
        r->seen |= pd_state_implied(id);        /* said once */
        return defer(c, &f, e);
    }
    enum pd_state_id by = highest(mask, r);
    f = by == id ? finding("order", run_name(r), &r->at[by], ref, "%s came twice in one attempt", state_name(id))
                 : finding("order", run_name(r), &r->at[by], ref, "%s after %s", state_name(id), state_name(by));
    return tell(c, &f, e);
}

static int on_side(struct pd_check *c, struct run *r, const struct pd_log_rec *rec, struct proc *p, const struct pd_ref *ref, struct pd_err *e)
{
    enum pd_state_id id = rec->state;
    const struct pd_state *s = &pd_state[id];
    bool barred;
    if (s->both && r->seen & PD_BIT(id) && r->at[id].worker != p->name)
        return 0;               /* how the other end saw it */
    /* What a worker streams to a router has not reached the client yet. */
    uint32_t seen = r->top > r->out_by && r->out.state != PD_ST_FIRST_TOKEN_EARLY ? r->seen & ~OUT : r->seen, mask;
    int rc = 0;
    if (id == PD_ST_FIRST_TOKEN_EARLY && p->rank > PD_R_WORKER)
        seen &= ~B(DECODE_STARTED);     /* its worker has begun by now, and the router has not seen anything of it */
    /* An early first token does not keep its decode worker from computing the prompt when the KV does not come: the stream stays where it is. */
    bool in_its_place = id == PD_ST_FALLBACK && p->rank == PD_R_WORKER && r->seen & B(FIRST_TOKEN_EARLY) && !(r->seen & B(DECODE_STARTED));
    if (in_its_place)
        seen &= ~OUT;
    if (!in_its_place && s->barred & OUT && id != PD_ST_FIRST_TOKEN_EARLY && r->out.state && (r->out_by >= r->top || r->out.state == PD_ST_FIRST_TOKEN_EARLY)) {
        struct pd_finding f = finding("boundary", run_name(r), &r->out, ref, "%s after the first token went out: only migrated, or an end, may follow",
            state_name(id));
        rc = tell(c, &f, e);
    } else if ((mask = pd_state_clash(id, id == PD_ST_MIGRATED ? r->seen : seen, r->ever, &barred)))
        rc = !barred && workers_elsewhere(r) ? 0 : out_of_order(c, r, id, mask, barred, ref, e);
    if (rc)
        return rc;
    if (s->clears)
        begin_attempt(r, s->clears, p, r->part, r->n_parts);
    if (id == PD_ST_MIGRATED)
        for (int i = 0; i < PD_N_RANKS; i++)
            r->view[i].moved = true;
    else if (id != PD_ST_FIRST_TOKEN_EARLY && !(r->out.state && r->out_by >= r->top)) {
        r->seen &= ~OUT;                /* a worker's tokens that nobody got */
        pd_free(r->view[PD_R_WORKER].choice);
        pd_free(r->view[PD_R_WORKER].clash);
        r->view[PD_R_WORKER] = (struct view){ 0 };
        r->out = (struct pd_ref){ 0 };
    }
    if (id == PD_ST_FALLBACK || id == PD_ST_FIRST_TOKEN_EARLY)
        r->seen |= PD_BIT(id);
    if (id == PD_ST_FIRST_TOKEN_EARLY && !r->out.state)
        r->out = *ref;
    r->at[id] = *ref;
    return 0;
}

static int on_step(struct pd_check *c, struct run *r, const struct pd_log_rec *rec, struct proc *p, const struct pd_ref *ref, struct pd_err *e)
{
    enum pd_state_id id = rec->state;
    bool barred, again = r->seen & PD_BIT(id), other = of_another(r, p, &rec->ev);
    bool begins = id == PD_ST_PREFILL_STARTED || id == PD_ST_KV_TRANSFER_STARTED || id == PD_ST_DECODE_STARTED;
    int rc = 0;
    if (is_stale(r, p)) {       /* work for an attempt that was given up, unless it begins anew, or joins what the other end of a transfer has begun */
        if (!begins || (again && !pd_state[id].both) || (!again && pd_state_clash(id, r->seen, r->ever, &barred))) {
            r->ever |= PD_BIT(id);      /* he may go over to the present one with it */
            return 0;
        }
        for (int i = 0; i < r->n_stale; i++)
            if (r->stale[i] == p)
                r->stale[i--] = r->stale[--r->n_stale];
    }
    if (other && id == PD_ST_STREAMING)
        return 0;
    if (id == PD_ST_STREAMING) {
        if (!r->out.state || p->rank > r->out_by) {
            r->out_by = p->rank;
            r->out = *ref;
        }
        if ((rc = deliver(r, &rec->ev, p->rank, ref, e)))
            return rc;
    }
    uint32_t mask = again ? PD_BIT(id) : pd_state_clash(id, r->seen, r->ever, &barred);
    if (mask && other && (again || barred))
        return 0;               /* of what was given up, and comes late */
    if (mask && (again || barred) && !(mask & ~r->other)) {     /* that stands in the way of nothing */
        r->ever |= r->seen & r->other;
        r->seen &= ~r->other;
        r->other = 0;
        again = false;
        mask = pd_state_clash(id, r->seen, r->ever, &barred);
    }
    /* Whoever goes on with what he was given in an attempt before has done there what is missing here. */
    if (mask && !again && !barred && (workers_elsewhere(r) || r->ever & mask))
        mask = 0;
    if (again && (id == PD_ST_STREAMING || (pd_state[id].both && r->at[id].worker != p->name)))
        return 0;               /* more of the stream, or how the other end saw it */
    const uint32_t prefill = B(PREFILL_STARTED) | B(PREFILL_COMPLETED) | B(KV_PUBLISHED) | B(KV_TRANSFER_STARTED);
    bool another = r->at[PD_ST_RETRY].state || r->at[PD_ST_FALLBACK].state, late = mask && another && prefill & PD_BIT(id);
    if (late && ((!again && !barred) || id == PD_ST_KV_TRANSFER_STARTED || r->at[again ? id : highest(mask, r)].worker != p->name))
        return 0;               /* the prefill worker of the attempt before, or who took its KV, has not heard yet */
    if (id == PD_ST_ACCEPTED && mask && r->n_parts > 1)
        return 0;               /* a worker takes in what a router accepted */
    if (mask && (rc = out_of_order(c, r, id, mask, again || barred, ref, e)))
        return rc;
    if (mask && (again || barred))
        return 0;
    r->seen |= PD_BIT(id);
    r->other = other ? r->other | PD_BIT(id) : r->other & ~PD_BIT(id);
    r->at[id] = *ref;
    return 0;
}

/* A transfer, or the read of a lease, of a run that was cancelled. */
static int after_cancel(struct pd_check *c, const struct run *r, const struct pd_ref *ref, struct pd_err *e)
{
    if (!r->cancel.state || ref->at_us <= r->cancel.at_us + c->o.bound_us)
        return 0;
    struct pd_finding f = finding("transfer_after_cancel", run_name(r), &r->cancel, ref, "%s %.3f s after the cancel, more than %.3f s", state_name(ref->state),
                                  (double)(ref->at_us - r->cancel.at_us) / 1e6, (double)c->o.bound_us / 1e6);
    return tell(c, &f, e);
}

static int after_end(struct pd_check *c, struct run *r, const struct pd_log_rec *rec, struct proc *p, const struct pd_ref *ref, struct pd_err *e)
{
    enum pd_state_id id = rec->state;
    bool transfer = id == PD_ST_KV_TRANSFER_STARTED || id == PD_ST_KV_TRANSFER_COMPLETED;
    if (pd_state[id].class == PD_SC_END ? p != r->ended_by : p != r->ended_by && ref->at_us <= r->at[r->end].at_us + c->o.bound_us)
        return 0;
    if (r->elsewhere && p != r->ended_by)
        return 0;               /* that was one worker's part of it, in the log of a router that is not here */
    if (transfer && r->cancel.state)
        return after_cancel(c, r, ref, e);
    if (is_stale(r, p))
        return 0;               /* it was stopped, and has not heard that its attempt was given up */
    struct pd_finding f = finding("after_end", run_name(r), &r->at[r->end], ref, "%s after the run had ended (%s)", state_name(id), state_name(r->end));
    return tell(c, &f, e);
}

static int on_run(struct pd_check *c, const struct pd_log_rec *rec, struct proc *p, const struct pd_ref *ref, struct pd_err *e)
{
    enum pd_state_id id = rec->state;
    enum pd_state_class class = pd_state[id].class;
    const char *name = rec->ev.run;
    struct run *r = pd_keyed_find(&c->runs, name, PD_RUN_LEN);
    int rc;
    if (!r)
        r = pd_keyed_find(&c->old_runs, name, PD_RUN_LEN);
    if ((!r && class == PD_SC_NOTE) || id == PD_ST_KV_MOVED)
        return 0;
    if (!r && pd_seen_has(&c->past_runs, name, PD_RUN_LEN)) {
        struct pd_finding f = finding("after_end", name, NULL, ref, "%s after the run had ended (its end is no longer held)", state_name(id));
        return class == PD_SC_END ? 0 : tell(c, &f, e);
    }
    if (!r) {
        if (!(r = pd_calloc(1, sizeof *r, "a run", e)))
            return PD_ENOMEM;
        if ((rc = pd_keyed_add(&c->runs, r, name, PD_RUN_LEN, e))) {
            run_free(r);
            return rc;
        }
        c->sum.runs++;
        take_part(r, p);
        r->first = *ref;
        if (id != PD_ST_ACCEPTED && (rec->ev.has_parent || class != PD_SC_STEP || r->headless)) {
            r->elsewhere = true;
            r->seen = pd_state_implied(id);
            c->sum.elsewhere += class == PD_SC_STEP || rec->ev.has_parent || r->headless;
        }
    }
    if ((id == PD_ST_CANCELLED || id == PD_ST_CANCEL_ACKED) && !r->cancel.state)
        r->cancel = *ref;
    if (r->ended)
        return class == PD_SC_NOTE ? 0 : after_end(c, r, rec, p, ref, e);
    take_part(r, p);
    if ((id == PD_ST_KV_TRANSFER_STARTED || id == PD_ST_KV_TRANSFER_COMPLETED) && (rc = after_cancel(c, r, ref, e)))
        return rc;
    rc = 0;
    if (id == PD_ST_ROUTE_SELECTED && p->rank > PD_R_WORKER && (r->has_op = rec->ev.has_op))
        memcpy(r->op, rec->ev.op, sizeof r->op);
    if (class == PD_SC_SIDE && of_another(r, p, &rec->ev))
        return 0;
    if ((id == PD_ST_RETRY || id == PD_ST_MIGRATED) && p->rank > PD_R_WORKER && r->has_op)
        memset(r->op, 0, sizeof r->op);
    if (class == PD_SC_STEP)
        rc = on_step(c, r, rec, p, ref, e);
    else if (class == PD_SC_SIDE)
        rc = on_side(c, r, rec, p, ref, e);
    else if (class == PD_SC_END && p->rank >= r->top) {         /* else: a worker's part of it ended */
        bool barred;
        uint32_t mask = pd_state_clash(id, r->seen, r->ever, &barred);
        if (mask && (barred || !workers_elsewhere(r)) && (rc = out_of_order(c, r, id, mask, barred, ref, e)))
            return rc;
        r->at[id] = r->last = *ref;
        return end_run(c, r, rec, p, e);
    }
    r->last = *ref;
    return rc;
}

/* ---- leases ---- */

static int retire_lease(struct pd_check *c, struct lease *l, const struct pd_ref *ref, struct pd_err *e)
{
    l->live = false;
    l->end = *ref;
    c->sum.leases_ended++;
    pd_keyed_remove(&c->leases, l);
    int rc = pd_keyed_add(&c->old_leases, l, l->node.key, 16, e);
    if (rc) {
        pd_free(l);
        return rc;
    }
    while (c->old_leases.n > ENDED) {
        struct lease *old = (struct lease *)c->old_leases.first;
        pd_keyed_remove(&c->old_leases, old);
        rc = pd_seen_add(&c->past_leases, old->node.key, 16, e);
        pd_free(old);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int on_lease(struct pd_check *c, const struct pd_log_rec *rec, struct proc *p, const struct pd_ref *ref, struct pd_err *e)
{
    enum pd_state_id id = rec->state;
    const char *run = rec->ev.run;
    const uint8_t *key = rec->ev.has_lease ? rec->ev.lease : rec->ev.gen;
    struct pd_finding f;
    char hex[33];
    int rc;
    if (!rec->ev.has_lease && !rec->ev.has_gen)
        return 0;
    pd_hex(key, 16, hex);
    if (id == PD_ST_LEASE_READ && run[0]) {
        struct run *r = pd_keyed_find(&c->runs, run, PD_RUN_LEN);
        r = r ? r : pd_keyed_find(&c->old_runs, run, PD_RUN_LEN);
        if (r && (rc = after_cancel(c, r, ref, e)))
            return rc;
    }
    struct lease *l = pd_keyed_find(&c->leases, key, 16);
    if (!l)
        l = pd_keyed_find(&c->old_leases, key, 16);
    bool past = !l && pd_seen_has(&c->past_leases, key, 16), ends = id == PD_ST_LEASE_RELEASED || id == PD_ST_LEASE_EXPIRED || id == PD_ST_LEASE_REVOKED;
    if (id == PD_ST_LEASE_GRANTED) {
        if (l || past) {
            f = finding("lease_grant", run, l ? l->live ? &l->grant : &l->end : NULL, ref, "lease %s is granted twice", hex);
            return tell(c, &f, e);
        }
        if (!(l = pd_calloc(1, sizeof *l, "a lease", e)))
            return PD_ENOMEM;
        *l = (struct lease){ .grantor = p, .live = true, .grant = *ref };
        memcpy(l->run, run, sizeof l->run);
        if ((rc = pd_keyed_add(&c->leases, l, key, 16, e))) {
            pd_free(l);
            return rc;
        }
        c->sum.leases++;
        return 0;
    }
    if (past || (l && !l->live)) {
        if (id == PD_ST_REAPED && (past || !l->reaped)) {
            if (l)
                l->reaped = true;
            return 0;
        }
        if (!ends && id != PD_ST_REAPED && l && p->name != l->end.worker && ref->at_us <= l->end.at_us + c->o.bound_us)
            return 0;
        f = ends || id == PD_ST_REAPED ? finding("lease_end", run, l ? &l->end : NULL, ref, "lease %s ends twice", hex)
                                       : finding("lease_use", run, l ? &l->end : NULL, ref, "%s of lease %s after its end", state_name(id), hex);
        return tell(c, &f, e);
    }
    if (!l) {
        f = finding("lease_grant", run, NULL, ref, "%s of lease %s, which nobody granted", state_name(id), hex);
        return p->headless ? 0 : defer(c, &f, e);
    }
    if (!ends && id != PD_ST_REAPED)
        return 0;
    l->reaped = id == PD_ST_REAPED;
    return retire_lease(c, l, ref, e);
}

/* ---- the whole ---- */

int pd_check_new(const struct pd_check_opts *o, struct pd_check **out, struct pd_err *e)
{
    struct pd_check *c = pd_calloc(1, sizeof *c, "a check", e);
    if (!c)
        return PD_ENOMEM;
    c->o = *o;
    if (c->o.bound_us <= 0)
        c->o.bound_us = PD_CHECK_BOUND_US;
    *out = c;
    return 0;
}

int pd_check_record(struct pd_check *c, const struct pd_log_rec *rec, struct pd_err *e)
{
    struct proc *p;
    if (rec->kind != PD_K_EVENT)
        return 0;
    c->sum.events++;
    if (rec->state == PD_ST_UNKNOWN) {
        c->sum.unknown++;
        return 0;
    }
    int rc = process_of(c, rec, &p, e);
    if (rc)
        return rc;
    struct pd_ref ref = { .state = rec->state, .file = rec->file, .offset = rec->offset, .at_us = rec->at_us, .worker = p->name };
    p->last = ref;
    switch (pd_state[rec->state].class) {
    case PD_SC_PROC: return 0;
    case PD_SC_LEASE: return on_lease(c, rec, p, &ref, e);
    default: return rec->ev.run[0] ? on_run(c, rec, p, &ref, e) : 0;
    }
}

/* A run without an end: who should have written it? */
static int open_run(struct pd_check *c, struct run *r, struct pd_err *e)
{
    struct proc *holder = NULL, *dead = NULL;
    struct pd_finding f;
    int rc = judge_delivery(c, r, e);
    if (rc)
        return rc;
    for (int i = 0; i < r->n_parts; i++) {
        if (!r->part[i]->gone && !dead)
            dead = r->part[i];
        if (r->part[i]->rank == r->top)
            holder = r->part[i];
    }
    if (r->top > PD_R_WORKER)           /* no holder: a process that says now that it is another role */
        dead = !holder || holder->gone ? NULL : holder;
    if (dead) {
        f = finding("run_open", run_name(r), &r->first, &dead->last, "lost at %s: the log of %s ends without gone", state_name(r->last.state), dead->name);
        f.lost = true;
        c->sum.lost++;
        return tell(c, &f, e);
    }
    if (r->top == PD_R_WORKER && r->n_parts == 1 && r->seen & B(KV_PUBLISHED) && !(r->seen & (B(DECODE_STARTED) | B(STREAMING)))) {
        c->sum.handed_over++;
        return 0;
    }
    f = finding("run_open", run_name(r), &r->first, &r->last, "the run never ended: %s was the last of it, and %s has closed its log",
        state_name(r->last.state),
                holder ? holder->name : "?");
    return defer(c, &f, e);
}

int pd_check_end(struct pd_check *c, uint64_t torn, struct pd_check_sum *sum, struct pd_err *e)
{
    int rc = 0;
    for (struct pd_node *p = c->runs.first; p && !rc; p = p->next)
        rc = open_run(c, (struct run *)p, e);
    for (struct pd_node *p = c->leases.first; p && !rc; p = p->next) {
        struct lease *l = (struct lease *)p;
        char hex[33];
        pd_hex(l->node.key, 16, hex);
        struct pd_finding f = finding("lease_open", l->run, &l->grant, &l->grantor->last, l->grantor->gone
            ? "lease %s was granted and never ended, and %s has closed its log" :
                                      "lease %s: the log of %s ends without gone", hex, l->grantor->name);
        f.lost = !l->grantor->gone;
        rc = f.lost ? tell(c, &f, e) : defer(c, &f, e);
    }
    for (struct pd_node *p = c->procs.first; p; p = p->next)
        c->sum.processes_lost += !((struct proc *)p)->gone;
    for (struct proc *p = c->lives; p; p = p->older)
        c->sum.processes_lost += p->lost_life;
    for (size_t i = 0; i < c->n_deferred && !rc; i++) {
        c->deferred[i].lost = torn > 0;         /* it may have been there */
        rc = tell(c, &c->deferred[i], e);
    }
    if (sum)
        *sum = c->sum;
    return rc;
}

void pd_check_free(struct pd_check *c)
{
    if (!c)
        return;
    struct pd_keyed *of_runs[] = { &c->runs, &c->old_runs }, *plain[] = { &c->leases, &c->old_leases, &c->procs };
    for (size_t i = 0; i < 2; i++) {
        for (struct pd_node *p = of_runs[i]->first, *next; p; p = next) {
            next = p->next;
            run_free((struct run *)p);
        }
        pd_keyed_free(of_runs[i]);
    }
    for (size_t i = 0; i < 3; i++) {
        for (struct pd_node *p = plain[i]->first, *next; p; p = next) {
            next = p->next;
            pd_free(p);
        }
        pd_keyed_free(plain[i]);
    }
    for (struct proc *p = c->lives, *next; p; p = next) {
        next = p->older;
        pd_free(p);
    }
    pd_seen_free(&c->past_runs);
    pd_seen_free(&c->past_leases);
    pd_free(c->deferred);
    pd_free(c);
}
