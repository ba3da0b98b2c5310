#include <stdlib.h>
#include <time.h>
#include "../base/log.h"
#include "../base/stop.h"
#include "../wire/json.h"
#include "check.h"
#include "report.h"

void pd_report_json(FILE *out, const char *key, struct pd_str v)
{
    fprintf(out, "\"%s\":\"", key);
    for (size_t i = 0; i < v.n; i++) {
        unsigned char c = (unsigned char)v.p[i];
        if (c == '"' || c == '\\')
            fprintf(out, "\\%c", c);
        else if (c < 0x20)
            fprintf(out, "\\u%04x", c);
        else
            putc(c, out);
    }
    putc('"', out);
}

void pd_report_plain(FILE *out, struct pd_str s)
{
    for (size_t i = 0; i < s.n; i++)
        putc((unsigned char)s.p[i] < 0x20 || s.p[i] == 0x7f ? '?' : s.p[i], out);
}

const char *pd_report_time(int64_t at_us, char out[32])
{
    time_t s = (time_t)(at_us / 1000000);
    struct tm tm;
    char day[24];
    if (at_us < 0 || !gmtime_r(&s, &tm) || tm.tm_year > 8000 || !strftime(day, sizeof day, "%Y-%m-%dT%H:%M:%S", &tm))
        snprintf(out, 32, "?");
    else
        snprintf(out, 32, "%s.%06dZ", day, (int)(at_us % 1000000));
    return out;
}

int pd_report_end(const struct pd_report_opts *o, const struct pd_log *l, int *status, struct pd_err *e)
{
    struct pd_log_stats st = pd_log_stats(l);
    if (st.torn) {
        pd_warn("%llu place%s where a record was torn: %llu bytes are lost", (unsigned long long)st.torn, st.torn == 1 ? "" : "s",
            (unsigned long long)st.torn_bytes);
        if (o->strict && !*status)
            *status = 9;
    }
    return fflush(o->out) || ferror(o->out) ? pd_fail_sys(e, "standard output") : 0;
}

/* ---- check ---- */

struct report { const struct pd_report_opts *o; const struct pd_log *log; uint64_t lost; };

static void put_ref(const struct report *r, const char *key, const struct pd_ref *f)
{
    char at[32];
    FILE *out = r->o->out;
    const char *file = pd_log_name(r->log, f->file), *worker = f->worker ? f->worker : "";
    if (!f->state)
        return;
    pd_report_time(f->at_us, at);
    if (!r->o->json) {
        fprintf(out, "    %-22s %s  %s  %s:%llu\n", pd_state[f->state].name, at, worker, file, (unsigned long long)f->offset);
        return;
    }
    fprintf(out, ",\"%s\":{\"state\":\"%s\",\"t_us\":%lld,", key, pd_state[f->state].name, (long long)f->at_us);
    pd_report_json(out, "worker", (struct pd_str){ worker, strlen(worker) });
    putc(',', out);
    pd_report_json(out, "file", (struct pd_str){ file, strlen(file) });
    fprintf(out, ",\"offset\":%llu}", (unsigned long long)f->offset);
}

static int found(void *ctx, const struct pd_finding *f, struct pd_err *e)
{
    struct report *r = ctx;
    FILE *out = r->o->out;
    r->lost += f->lost;
    if (f->lost && r->o->quiet)
        return 0;
    if (r->o->json) {
        fprintf(out, "{\"run\":\"%s\",\"rule\":\"%s\",\"verdict\":\"%s\",", f->run, f->rule, f->lost ? "lost" : "violation");
        pd_report_json(out, "text", (struct pd_str){ f->text, strlen(f->text) });
    } else
        fprintf(out, "%s  %s%s: %s\n", f->run[0] ? f->run : "-", f->lost ? "lost: " : "", f->rule, f->text);
    put_ref(r, "first", &f->first);
    put_ref(r, "second", &f->second);
    if (r->o->json)
        fputs("}\n", out);
    return ferror(out) ? pd_fail_sys(e, "standard output") : 0;
}

static void put_sum(const struct pd_report_opts *o, const struct pd_check_sum *s, const struct pd_log_stats *st)
{
    const struct { const char *name; uint64_t n; } part[] = {
        { "events", s->events }, { "runs", s->runs },
        { "completed", s->completed }, { "failed", s->failed }, { "cancelled", s->cancelled }, { "blocked", s->blocked }, { "lost", s->lost },
        { "handed_over", s->handed_over }, { "begun_elsewhere", s->elsewhere }, { "leases", s->leases }, { "leases_ended", s->leases_ended },
        { "processes", s->processes }, { "processes_lost", s->processes_lost }, { "torn", st->torn }, { "unknown", s->unknown },
        { "violations", s->violations } };
    if (o->json)
        fputs("{\"summary\":{", o->out);
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        if (o->json)
            fprintf(o->out, "%s\"%s\":%llu", i ? "," : "", part[i].name, (unsigned long long)part[i].n);
        else if (part[i].n || !strcmp(part[i].name, "violations") || !strcmp(part[i].name, "runs"))
            fprintf(o->out, "%s%s %llu", i ? ", " : "", part[i].name, (unsigned long long)part[i].n);
    fputs(o->json ? "}}\n" : "\n", o->out);
}

int pd_report_check(const struct pd_report_opts *o, int *status, struct pd_err *e)
{
    struct pd_log *l = NULL;
    struct pd_check *c = NULL;
    struct pd_log_rec rec;
    struct pd_check_sum sum;
    struct report r = { .o = o };
    int rc = pd_log_open(o->paths, &o->log, &l, e);
    r.log = l;
    if (!rc)
        rc = pd_check_new(&(struct pd_check_opts){ .bound_us = o->bound_us, .found = found, .ctx = &r }, &c, e);
    while (!rc && (rc = pd_log_next(l, &rec, e)) == 1)
        rc = pd_check_record(c, &rec, e);
    if (!rc) {
        struct pd_log_stats st = pd_log_stats(l);
        if ((rc = pd_check_end(c, st.torn, &sum, e)) == 0) {
            if (!o->quiet || sum.violations)
                put_sum(o, &sum, &st);
            if (sum.violations)
                *status = 4;
            else if (o->strict && (r.lost || sum.processes_lost))
                *status = 9;
            rc = pd_report_end(o, l, status, e);
        }
    }
    pd_check_free(c);
    pd_log_free(l);
    return rc;
}

/* ---- follow ---- */

static int print_event(const struct pd_report_opts *o, const struct pd_log_rec *r, FILE *out, struct pd_err *e)
{
    char at[32];
    const struct pd_event *v = &r->ev;
    if (o->json) {
        struct pd_buf b = { 0 };
        int rc = pd_msgpack_to_json(r->p, r->n, &b, e);
        if (!rc)
            fprintf(out, "%.*s\n", (int)b.n, (char *)b.p);
        pd_buf_free(&b);
        return rc;
    }
    if (r->kind != PD_K_EVENT) {
        fprintf(out, "%-27s %-26s %s\n", "", "-", pd_kind_name(r->kind));
        return 0;
    }
    fprintf(out, "%s %-26s %-21s %.*s", pd_report_time(r->at_us, at), v->run[0] ? v->run : "-", v->state, (int)v->worker.n, v->worker.p ? v->worker.p : "");
    if (v->where[0])
        fprintf(out, " %s", v->where);
    if (v->bytes)
        fprintf(out, " %llu bytes", (unsigned long long)v->bytes);
    if (v->tokens)
        fprintf(out, " %u tokens", v->tokens);
    if (v->cause.n) {
        fputs(": ", out);
        pd_report_plain(out, v->cause);
    }
    putc('\n', out);
    return 0;
}

int pd_report_follow(const struct pd_report_opts *o, int *status, struct pd_err *e)
{
    struct pd_log_opts lo = o->log;
    struct pd_log *l = NULL;
    struct pd_log_rec rec;
    enum { MOST = 1000 };
    int keep = o->last < 0 ? 0 : o->last > MOST ? MOST : o->last;
    char *line[MOST] = { 0 };
    uint64_t n = 0;
    bool live = false;
    size_t len = o->run ? strlen(o->run) : 0;
    lo.follow = true;
    int rc = pd_log_open(o->paths, &lo, &l, e);
    while (!rc && !pd_stop_level()) {
        while ((rc = pd_log_next(l, &rec, e)) == 1) {
            if (len && (rec.kind != PD_K_EVENT || strncmp(rec.ev.run, o->run, len)))
                continue;
            if (live)
                rc = print_event(o, &rec, o->out, e);
            else if (keep) {            /* what is there already: its last lines, once all is read */
                char *text = NULL;
                size_t size;
                FILE *f = open_memstream(&text, &size);
                if (!f) {
                    rc = pd_fail(e, PD_ENOMEM, "out of memory for a line");
                    break;
                }
                rc = print_event(o, &rec, f, e);
                fclose(f);
                free(line[n % (uint64_t)keep]);
                line[n++ % (uint64_t)keep] = text;
            }
            if (rc < 0)
                break;
        }
        if (rc < 0)
            break;
        for (uint64_t i = n > (uint64_t)keep ? n - (uint64_t)keep : 0; !live && i < n; i++)
            fputs(line[i % (uint64_t)keep], o->out);
        live = true;
        if (fflush(o->out) || ferror(o->out)) {
            rc = pd_fail_sys(e, "standard output");
            break;
        }
        if (pd_log_over(l))
            break;
        nanosleep(&(struct timespec){ .tv_nsec = 50000000 }, NULL);
    }
    for (int i = 0; i < keep; i++)
        free(line[i]);
    if (rc == PD_ECANCEL && pd_stop_level())
        rc = 0;
    if (!rc && l)
        rc = pd_report_end(o, l, status, e);
    pd_log_free(l);
    return rc;
}
