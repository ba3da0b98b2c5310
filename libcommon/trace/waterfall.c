/* pd-trace show: one run over all processes, a stage a line, with a bar on the run's time axis. */
#include "../base/log.h"
#include "report.h"
#include "stage.h"

enum { WIDTH = 48, MAX_ROWS = 4096 };

struct row {
    const char *name;
    char worker[64];
    int64_t from, to;
    bool open, cut, mark;       /* mark: a moment, not a stretch */
    int stage;              /* pd_stage_id, or -1 */
    char *note;
};

struct fall {
    const struct pd_report_opts *o;
    char run[PD_RUN_LEN + 1];
    struct row *row;
    uint32_t n, cap, dropped;
    struct pd_stages stages;
    int64_t begin, end, ttft, e2e;
    bool any;
    char revision[64];
};

static struct row *add_row(struct fall *f, const struct pd_log_rec *r, struct pd_err *e)
{
    if (f->n == f->cap) {
        uint32_t cap = f->cap ? f->cap * 2 : 32;
        struct row *p = pd_realloc(f->row, cap, sizeof *p, "a waterfall", e);
        if (!p)
            return NULL;
        f->row = p;
        f->cap = cap;
    }
    struct row *w = &f->row[f->n++];
    *w = (struct row){ .from = r->at_us, .to = r->at_us, .stage = -1 };
    snprintf(w->worker, sizeof w->worker, "%.*s", (int)(r->ev.worker.n < 63 ? r->ev.worker.n : 63), r->ev.worker.p ? r->ev.worker.p : "");
    return w;
}

static int on_stage(void *ctx, enum pd_stage_id id, enum pd_stage_what what, int64_t from, int64_t to, const struct pd_log_rec *r, struct pd_err *e)
{
    struct fall *f = ctx;
    if (id >= PD_N_STAGES) {
        if (what == PD_STAGE_CLOSE)
            *(id == PD_SG_TTFT ? &f->ttft : &f->e2e) = to - from;
        return 0;
    }
    struct row *w = NULL;
    for (uint32_t i = f->n; i-- && !w;)
        if (f->row[i].open && f->row[i].stage == (int)id)
            w = &f->row[i];
    if (id == PD_SG_ROUTE && what == PD_STAGE_OPEN)
        return 0;               /* a row once there was a router */
    if ((what == PD_STAGE_OPEN || (id == PD_SG_ROUTE && what == PD_STAGE_CLOSE)) && f->n == MAX_ROWS) {
        f->dropped++;
        return 0;
    }
    if ((what == PD_STAGE_OPEN || (id == PD_SG_ROUTE && what == PD_STAGE_CLOSE)) && !w) {
        if (!(w = add_row(f, r, e)))
            return PD_ENOMEM;
        w->name = pd_stage[id].name;
        w->stage = (int)id;
        w->open = true;
    }
    if (!w)
        return 0;
    if (id == PD_SG_PUBLISH && what == PD_STAGE_CUT && pd_state[r->state].class == PD_SC_END &&
        (f->stages.done >> PD_SG_FIRST & 1 || r->state == PD_ST_COMPLETED)) {
        memmove(w, w + 1, (size_t)(f->row + f->n - w - 1) * sizeof *w);     /* its KV stayed where it was computed */
        f->n--;
        return 0;
    }
    w->from = from;
    w->to = to;
    if (what != PD_STAGE_OPEN)
        w->open = false;
    w->cut = what == PD_STAGE_CUT;
    if (r->ev.worker.n)         /* who did it, rather than who asked */
        snprintf(w->worker, sizeof w->worker, "%.*s", (int)(r->ev.worker.n < 63 ? r->ev.worker.n : 63), r->ev.worker.p);
    return 0;
}

static int take(struct fall *f, const struct pd_log_rec *r, struct pd_err *e)
{
    enum pd_state_class class = pd_state[r->state].class;
    size_t len = strlen(f->o->run);
    if (r->kind != PD_K_EVENT || !r->ev.run[0] || strncmp(r->ev.run, f->o->run, len))
        return 0;
    if (f->any && strcmp(f->run, r->ev.run))
        return pd_fail(e, PD_EUSAGE, "show: '%s' is the beginning of several runs, as of %s and %s: give more of it", f->o->run, f->run, r->ev.run);
    if (!f->any) {
        memcpy(f->run, r->ev.run, sizeof f->run);
        f->begin = f->end = r->at_us;
        f->any = true;
    }
    f->begin = r->at_us < f->begin ? r->at_us : f->begin;
    f->end = r->at_us > f->end ? r->at_us : f->end;
    if (r->ev.model_revision.n && !f->revision[0])
        snprintf(f->revision, sizeof f->revision, "%.*s", (int)(r->ev.model_revision.n < 63 ? r->ev.model_revision.n : 63), r->ev.model_revision.p);
    if (class == PD_SC_SIDE || class == PD_SC_LEASE || class == PD_SC_NOTE || class == PD_SC_END) {
        if (f->n == MAX_ROWS)
            f->dropped++;
        else {
            struct row *w = add_row(f, r, e);
            if (!w)
                return PD_ENOMEM;
            w->name = r->state ? pd_state[r->state].name : "?";
            w->mark = true;
            if (r->ev.cause.n && !(w->note = pd_strndup(r->ev.cause.p, r->ev.cause.n < 300 ? r->ev.cause.n : 300, e)))
                return PD_ENOMEM;
            for (char *p = w->note; p && *p; p++)
                *p = (unsigned char)*p < 0x20 || *p == 0x7f ? ' ' : *p;
        }
    }
    return pd_stages_event(&f->stages, r, on_stage, f, e);
}

/* A row is made when its stage is known, which may be after others began. */
static void order(struct fall *f)
{
    for (uint32_t i = 1; i < f->n; i++) {
        struct row w = f->row[i];
        uint32_t k = i;
        for (; k && f->row[k - 1].from > w.from; k--)
            f->row[k] = f->row[k - 1];
        f->row[k] = w;
    }
}

static void put_bar(const struct fall *f, const struct row *w)
{
    char bar[WIDTH + 1];
    double span = f->end > f->begin ? (double)(f->end - f->begin) : 1;
    int a = (int)((double)(w->from - f->begin) / span * WIDTH), b = (int)((double)(w->to - f->begin) / span * WIDTH);
    a = a < 0 ? 0 : a >= WIDTH ? WIDTH - 1 : a;
    b = b <= a ? a + 1 : b > WIDTH ? WIDTH : b;
    memset(bar, ' ', WIDTH);
    bar[WIDTH] = 0;
    memset(bar + a, w->mark ? '|' : w->cut ? 'x' : w->open ? '~' : '=', w->mark ? 1 : (size_t)(b - a));
    fprintf(f->o->out, "%-14s %10.3f ", w->name, (double)(w->from - f->begin) / 1e3);
    if (w->mark)
        fprintf(f->o->out, "%10s", "");
    else
        fprintf(f->o->out, "%10.3f", (double)((w->open ? f->end : w->to) - w->from) / 1e3);
    fprintf(f->o->out, " [%s] %s%s%s%s\n", bar, w->worker, w->note ? ": " : "", w->note ? w->note : "", w->cut ? " (given up)" : w->open ? " (not ended)" : "");
}

static void put_text(struct fall *f)
{
    FILE *out = f->o->out;
    char at[32];
    double tpot = pd_stages_tpot_us(&f->stages);
    fprintf(out, "run %s  %s  %s  %s  %u tokens", f->run, pd_state[f->stages.end ? f->stages.end : f->stages.last].name, pd_stages_mode(&f->stages),
        pd_report_time(f->begin, at),
            pd_stages_tokens(&f->stages));
    if (f->ttft >= 0)
        fprintf(out, "  ttft %.3f ms", (double)f->ttft / 1e3);
    if (tpot >= 0)
        fprintf(out, "  tpot %.3f ms", tpot / 1e3);
    if (f->e2e >= 0)
        fprintf(out, "  e2e %.3f ms", (double)f->e2e / 1e3);
    fprintf(out, "%s%s\n%-14s %10s %10s\n", f->revision[0] ? "  " : "", f->revision, "stage", "at ms", "for ms");
    for (uint32_t i = 0; i < f->n; i++) {
        if (f->row[i].open)
            f->row[i].to = f->end;
        put_bar(f, &f->row[i]);
    }
    if (f->dropped)
        fprintf(out, "(%u more)\n", f->dropped);
}

static void put_json(struct fall *f)
{
    FILE *out = f->o->out;
    double tpot = pd_stages_tpot_us(&f->stages);
    fprintf(out, "{\"run\":\"%s\",\"state\":\"%s\",\"mode\":\"%s\",\"t_us\":%lld,\"tokens\":%u", f->run, pd_state[f->stages.end
        ? f->stages.end : f->stages.last].name,
            pd_stages_mode(&f->stages), (long long)f->begin, pd_stages_tokens(&f->stages));
    if (f->ttft >= 0)
        fprintf(out, ",\"ttft_ms\":%.3f", (double)f->ttft / 1e3);
    if (tpot >= 0)
        fprintf(out, ",\"tpot_ms\":%.3f", tpot / 1e3);
    if (f->e2e >= 0)
        fprintf(out, ",\"e2e_ms\":%.3f", (double)f->e2e / 1e3);
    fputs(",\"stages\":[", out);
    for (uint32_t i = 0; i < f->n; i++) {
        struct row *w = &f->row[i];
        fprintf(out, "%s{\"name\":\"%s\",\"at_ms\":%.3f,", i ? "," : "", w->name, (double)(w->from - f->begin) / 1e3);
        if (!w->mark && !w->open)
            fprintf(out, "\"ms\":%.3f,", (double)(w->to - w->from) / 1e3);
        if (w->cut)
            fputs("\"given_up\":true,", out);
        pd_report_json(out, "worker", (struct pd_str){ w->worker, strlen(w->worker) });
        if (w->note) {
            putc(',', out);
            pd_report_json(out, "cause", (struct pd_str){ w->note, strlen(w->note) });
        }
        putc('}', out);
    }
    fputs("]}\n", out);
}

int pd_report_show(const struct pd_report_opts *o, int *status, struct pd_err *e)
{
    struct fall f = { .o = o, .ttft = -1, .e2e = -1 };
    struct pd_log *l = NULL;
    struct pd_log_rec rec;
    int rc = pd_log_open(o->paths, &o->log, &l, e);
    while (!rc && (rc = pd_log_next(l, &rec, e)) == 1)
        rc = take(&f, &rec, e);
    if (!rc && !f.any)
        rc = pd_fail(e, PD_EFAIL, "show: no event of run %s is here (pd-trace ls lists the runs of a log)", o->run);
    if (!rc) {
        order(&f);
        (o->json ? put_json : put_text)(&f);
        rc = pd_report_end(o, l, status, e);
    }
    for (uint32_t i = 0; i < f.n; i++)
        pd_free(f.row[i].note);
    pd_free(f.row);
    pd_log_free(l);
    return rc;
}
