/* pd-trace why: the decisions of a run in words: who could have had it and who not, the best way with KV from elsewhere beside the best without, what the
 * difference was made of, and what came of it. */
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include "../base/id.h"
#include "../wire/json.h"
#include "history.h"

enum { MOST_DECISIONS = 64 /* of a run, kept */, NAMED = 6 /* workers of a side, in words */, NAMES = 200, CELL = 23 /* letters of a column */ };

static double ms(int64_t us) { return (double)us / 1e3; }
static double out_tokens(const struct pd_route_rec *r) { return r->input.out_p50 ? r->input.out_p50 : 1; }
static struct pd_str str_of(const char *s) { return (struct pd_str){ s, strlen(s) }; }

/* ---- a way's costs, line by line ---- */

enum line_kind { PART, SUM, NUMBER, PRICE };       /* odd: sums; from NUMBER on: no spreads */
struct line { const char *name; struct pd_spread v; enum line_kind kind; };
enum { LINES = 16 };

static int lines_of(const struct pd_route_rec *r, const struct pd_route_pair *o, struct line out[LINES])
{
    static const struct pd_route_path guess;
    const struct pd_route_row *d = &r->d[o->d], *p = o->p < 0 ? d : &r->p[o->p];
    const struct pd_route_path *x = o->path >= 0 ? &r->paths[o->path] : &guess;
    struct pd_spread none = { 0, 0, 0 };
    bool far = o->p >= 0;
    int64_t over = -pd_us_of((double)o->overlap_us), others = pd_pair_others(r, o), price = pd_way_price(r, o);
    const struct line all[] = {
        { "queue", p->queue, PART }, { "prefill", p->prefill, PART }, { "interference", far ? none : d->interference, PART },
        { "transfer", o->transfer, PART }, { "  under way while it is computed", { over, over, 0 }, PART }, { "sync", x->sync, PART },
        { "path's penalty", { x->penalty_us, x->penalty_us, 0 }, PART }, { "room in the batch", d->slot, PART }, { "= TTFT", o->ttft, SUM },
        { "decode", pd_spread_times(d->tpot, out_tokens(r) - 1), PART }, { "= completion", o->completion, SUM }, { "others wait", { others, others, 0 }, NUMBER },
        { "= price", { price, price, 0 }, PRICE } };
    _Static_assert(sizeof all / sizeof *all <= LINES, "room");
    memcpy(out, all, sizeof all);
    return (int)(sizeof all / sizeof *all);
}

/* ---- names ---- */

static void put_way(FILE *out, const struct pd_route_rec *r, const struct pd_route_pair *o)
{
    if (o->p >= 0) {
        pd_report_plain(out, r->p[o->p].worker);
        fputs(" > ", out);
    }
    pd_report_plain(out, r->d[o->d].worker);
}

static const char *mode_of(const struct pd_route_rec *r, const struct pd_route_pair *o)
{
    return o->p >= 0 ? "remote" : r->chosen.any && r->chosen.mode != PD_MODE_REMOTE ? pd_mode_names[r->chosen.mode] : "local";
}

static char *way_text(const struct pd_route_rec *r, const struct pd_route_pair *o, char out[NAMES])
{
    FILE *f = fmemopen(out, NAMES, "w");
    out[0] = 0;
    if (f) {
        fprintf(f, "%s, ", mode_of(r, o));
        put_way(f, r, o);
        fclose(f);
        out[NAMES - 1] = 0;
    }
    return out;
}

/* Those that could, then those that could not and why. */
static void put_side(FILE *out, const char *name, const struct pd_route_row *w, uint32_t n, const uint32_t left[PD_X_KINDS], bool kv)
{
    uint32_t could = 0, more = 0;
    for (uint32_t i = 0; i < n; i++)
        could += !w[i].x;
    fprintf(out, "%-10s %u of %u could%s", name, could, n, could ? ":" : "");
    for (int pass = 0; pass < 2; pass++) {
        uint32_t told = 0;
        if (pass && could < n)
            fputs(could ? "; not" : ":", out);
        for (uint32_t i = 0; i < n; i++) {
            if ((w[i].x != 0) != pass)
                continue;
            if (told++ >= NAMED)
                continue;
            fputs(told > 1 ? pass ? "; " : ", " : " ", out);
            pd_report_plain(out, w[i].worker);
            if (pass) {
                fputs(" (", out);
                pd_report_plain(out, w[i].excluded);
                putc(')', out);
            } else if (w[i].hit_blocks || (kv && w[i].x_kv)) {
                fprintf(out, " (%s%u of %u blocks", w[i].hit_blocks ? "holds " : "", w[i].hit_blocks, w[i].hit_blocks + w[i].miss_blocks);
                if (kv && w[i].x_kv) {
                    fputs("; no KV from elsewhere: ", out);
                    pd_report_plain(out, w[i].excluded);
                }
                putc(')', out);
            }
        }
        if (told > NAMED)
            fprintf(out, " and %u more", told - NAMED);
    }
    for (int i = 0; i < PD_X_KINDS; i++)
        if (left[i])
            fprintf(out, "%s%u %s", more++ ? ", " : "; of those that are no rows ", left[i], i ? pd_excluded_names[i] : "could");
    putc('\n', out);
}

static bool any_could(const struct pd_route_row *w, uint32_t n, bool kv)
{
    for (uint32_t i = 0; i < n; i++)
        if (!w[i].x && !(kv && w[i].x_kv))
            return true;
    return false;
}

/* What keeps workers apart that both could: of the pair, of a path, of what their KV is. */
static struct pd_str between(const struct pd_route_rec *r, bool remote)
{
    for (uint32_t i = 0; i < r->n_pairs; i++)
        if (r->pair[i].x && (r->pair[i].p >= 0) == remote)
            return r->pair[i].excluded;
    for (uint32_t i = 0; remote && i < r->n_paths; i++)
        if (r->paths[i].x)
            return r->paths[i].excluded;
    for (uint32_t i = 0; remote && i < r->n_fits; i++)
        if (r->fits[i].why.p)
            return r->fits[i].why;
    return str_of("no two of them go together");
}

static void put_missing(FILE *out, const struct pd_route_rec *r, bool remote)
{
    fprintf(out, "%-10s not possible: ", remote ? "remote" : "local");
    if (remote && (r->input.local || r->input.moves))
        fputs(r->input.moves ? "a stream goes on where its KV is made again" : "one worker does all of a fallback", out);
    else if (!strcmp(r->policy, remote ? "aggregated" : "fixed"))
        fprintf(out, "the policy %s looks at no such way", r->policy);
    else if (!any_could(r->d, r->n_d, false))
        fputs("no decode worker could", out);
    else if (remote && !any_could(r->p, r->n_p, false))
        fputs("no prefill worker could", out);
    else if (remote && !any_could(r->d, r->n_d, true))
        fputs("no decode worker has room for KV from elsewhere", out);
    else
        pd_report_plain(out, between(r, remote));
    putc('\n', out);
}

/* ---- in words ---- */

static void put_asked(FILE *out, const struct pd_route_rec *r, const struct pd_buf *slo)
{
    const struct pd_route_input *q = &r->input;
    fprintf(out, "%-10s %u tokens of prompt%s, at most %u out", "asked", q->n_tokens, q->exact ? "" : " (guessed)", q->max_tokens);
    if (q->n > 1)
        fprintf(out, " x %u", q->n);
    if (q->out_p50)
        fprintf(out, " (%u expected, P95 %u)", q->out_p50, q->out_p95);
    if (q->adapter.n) {
        fputs(", adapter ", out);
        pd_report_plain(out, q->adapter);
    }
    if (q->deadline_us)
        fprintf(out, ", %.1f ms of its deadline left", ms(q->deadline_us));
    if (slo->n)
        fprintf(out, ", SLO %.*s", (int)slo->n, (char *)slo->p);
    if (r->resumed)
        fprintf(out, ", goes on after %u tokens", r->resumed);
    if (q->d_given)
        fputs(", its decode worker stays", out);
    if (q->early)
        fputs(", the first token may go out early", out);
    putc('\n', out);
    fprintf(out, "%-10s %s, P%g, others count %g x", "policy", r->policy, 100 * r->risk, r->externality);
    if (r->temperature > 0)
        fprintf(out, ", temperature %g (this way had a chance of %.3f)", r->temperature, r->propensity);
    fprintf(out, "; epoch %" PRIu64 "; index %" PRIu64 ", topology %" PRIu64 ", registry %" PRIu64 "\n", r->epoch, r->versions.index, r->versions.topology,
            r->versions.registry);
    if (r->cause.n || r->fallback.n) {
        fprintf(out, "%-10s ", "again");
        pd_report_plain(out, r->cause.n ? r->cause : r->fallback);
        if (r->cause.n && r->fallback.n) {
            fputs("; fallback ", out);
            pd_report_plain(out, r->fallback);
        }
        putc('\n', out);
    }
}

static void put_spread(FILE *out, const struct line *l, bool last)
{
    if (l->kind >= NUMBER)
        fprintf(out, "%12s %10.1f", "", ms(l->v.p95));
    else
        fprintf(out, "%12.1f %10.1f", ms(l->v.p50), ms(l->v.p95));
    fputs(l->v.marks ? "*" : last ? "" : " ", out);
}

static void put_path(FILE *out, const struct pd_route_rec *r, const struct pd_route_pair *o)
{
    const struct pd_route_path *x = o->path >= 0 ? &r->paths[o->path] : NULL;
    bool small = o->bytes < 1 << 20;
    fprintf(out, "%-10s %.1f %s of KV", "path", (double)o->bytes / (small ? 1 << 10 : 1 << 20), small ? "KiB" : "MiB");
    if (!x)
        fputs(", of which nothing is known", out);
    else {
        if (x->kind.n) {
            fputs(", ", out);
            pd_report_plain(out, x->kind);
        }
        if (x->from >= 0 && x->to >= 0) {
            fputs(x->kind.n ? " " : ", ", out);
            pd_report_plain(out, r->domains[x->from]);
            fputs(" > ", out);
            pd_report_plain(out, r->domains[x->to]);
        }
        fprintf(out, ", %u transfer%s on it, measured %.1f s ago", x->active, x->active == 1 ? "" : "s", (double)x->age_us / 1e6);
        if (x->breaker.n) {
            fputs(", breaker ", out);
            pd_report_plain(out, x->breaker);
        }
    }
    if (r->chosen.converted[0])
        fprintf(out, ", D converts %s", r->chosen.converted);
    putc('\n', out);
}

static void put_table(FILE *out, const struct pd_route_rec *r, const struct pd_route_pair *const way[2])
{
    struct line line[2][LINES];
    char text[2][NAMES];
    int n = 0, marks = 0;
    bool wide = false;
    for (int k = 0; k < 2; k++)
        wide |= way[k] && strlen(way_text(r, way[k], text[k])) > CELL;
    for (int k = 0; wide && k < 2; k++)         /* names that fit in no column */
        if (way[k]) {
            fprintf(out, "%-10s ", mode_of(r, way[k]));
            put_way(out, r, way[k]);
            putc('\n', out);
        }
    fprintf(out, "%-32s", "ms");
    for (int k = 0; k < 2; k++)
        if (way[k]) {
            n = lines_of(r, way[k], line[k]);
            fprintf(out, " %23s", wide ? mode_of(r, way[k]) : text[k]);
        }
    fprintf(out, "\n%-32s", "");
    for (int k = 0; k < 2; k++)
        if (way[k])
            fprintf(out, "%12s %10s%s", "P50", "P95", k == 0 && way[1] ? " " : "");
    putc('\n', out);
    for (int i = 0; i < n; i++) {
        bool any = false;
        for (int k = 0; k < 2; k++)
            any |= way[k] && (line[k][i].kind & 1 || line[k][i].v.p50 || line[k][i].v.p95);
        if (!any)
            continue;
        fprintf(out, "%-32s", line[way[0] ? 0 : 1][i].name);
        for (int k = 0; k < 2; k++)
            if (way[k]) {
                put_spread(out, &line[k][i], k || !way[1]);
                marks |= (int)line[k][i].v.marks;
            }
        putc('\n', out);
    }
    if (marks)
        fprintf(out, "* %s\n", marks == PD_SPREAD_COLD ? "too little was measured to go by" : marks == PD_SPREAD_STALE ? "measured a while ago" :
                "measured a while ago, or too little to go by");
}

/* What speaks for the one and what for the other, the largest first. */
static void put_difference(FILE *out, const struct pd_route_rec *r, const struct pd_route_pair *mine, const struct pd_route_pair *other)
{
    struct line a[LINES], b[LINES];
    int n = lines_of(r, mine, a), part[LINES], parts = 0;
    double by[LINES], apart = ms(pd_way_price(r, other) - pd_way_price(r, mine)), price = ms(pd_way_price(r, other));
    lines_of(r, other, b);
    for (int i = 0; i < n; i++) {
        by[i] = ms(b[i].v.p50 - a[i].v.p50);
        if (a[i].kind & 1 || fabs(by[i]) < 0.05)
            continue;
        int at = parts++;
        for (; at > 0 && fabs(by[part[at - 1]]) < fabs(by[i]); at--)
            part[at] = part[at - 1];
        part[at] = i;
    }
    fprintf(out, "%-10s %s is %.1f ms %s by its price", "apart", mode_of(r, other), fabs(apart), apart >= 0 ? "dearer" : "cheaper");
    if (price > 0)
        fprintf(out, " (%.1f %%)", 100 * fabs(apart) / price);
    for (int sign = 1; sign >= -1; sign -= 2) {
        int told = 0;
        for (int i = 0; i < parts && told < 3; i++)
            if (by[part[i]] * sign > 0) {
                const char *name = a[part[i]].name;
                fprintf(out, "%s%s %.1f", told++ ? ", " : sign > 0 ? "; for the choice: " : "; against it: ", name + strspn(name, " "), fabs(by[part[i]]));
            }
    }
    putc('\n', out);
}

static void put_shadow(FILE *out, const struct pd_route_rec *r)
{
    const struct pd_route_shadow *s = &r->shadow;
    if (!s->policy[0])
        return;
    fprintf(out, "%-10s %s would have taken ", "shadow", s->policy);
    if (!s->chosen.any) {
        fputs("none\n", out);
        return;
    }
    const struct pd_route_pair *o = &r->pair[s->chosen.pair];
    fprintf(out, "%s, ", pd_mode_names[s->chosen.mode]);
    put_way(out, r, o);
    if (r->chosen.any && s->chosen.pair == r->chosen.pair)
        fputs(", the same\n", out);
    else
        fprintf(out, ": TTFT %.1f, completion %.1f ms at P50\n", ms(o->ttft.p50), ms(o->completion.p50));
}

static void put_outcome(FILE *out, const struct pd_route_rec *r, const struct pd_outcome_rec *o)
{
    struct pd_spread want[PD_WT_N];
    int64_t took[PD_WT_N];
    bool done = r && pd_way_done(r, o);
    unsigned has = pd_way_took(o, took), known = done ? pd_way_expected(r, &r->pair[r->chosen.pair], want) : 0;
    fprintf(out, "%-10s %s after %u tokens, %s", "outcome", o->finish_reason, o->completion_tokens, o->mode);
    if (o->d.n) {
        fputs(", ", out);
        if (o->p.n) {
            pd_report_plain(out, o->p);
            fputs(" > ", out);
        }
        pd_report_plain(out, o->d);
    }
    if (o->migrations)
        fprintf(out, ", migrated %u time%s", o->migrations, o->migrations == 1 ? "" : "s");
    if (o->fallback.n) {
        fputs("; fell back: ", out);
        pd_report_plain(out, o->fallback);
    }
    if (o->cause.n) {
        fputs("; ", out);
        pd_report_plain(out, o->cause);
    }
    fprintf(out, "; of the prompt %u tokens were held, %u came, %u were computed again", o->cached_tokens, o->transferred_tokens, o->recomputed_tokens);
    if (o->has & PD_OC_P_CACHED)
        fprintf(out, "; where it was prefilled %u were held, %u expected", o->p_cached_tokens, o->cached_expected);
    putc('\n', out);
    if (!done && has)
        fputs("           it did not come as it was decided: what it took is not what was estimated\n", out);
    if (has)
        fprintf(out, "%-32s%12s %10s %12s\n", "ms", "P50", "P95", "took");
    for (int i = 0; i < PD_WT_N; i++) {
        if (!(has >> i & 1))
            continue;
        fprintf(out, "%-32s", pd_way_terms[i]);
        if (!(known >> i & 1)) {
            fprintf(out, "%12s %10s %12.1f\n", "-", "-", ms(took[i]));
            continue;
        }
        fprintf(out, "%12.1f %10.1f %12.1f  ", ms(want[i].p50), ms(want[i].p95), ms(took[i]));
        if (took[i] <= want[i].p95)
            fputs("within P95\n", out);
        else
            fprintf(out, "%.1f beyond P95\n", ms(took[i] - want[i].p95));
    }
}

/* slo: as JSON. */
static void put_words(FILE *out, const struct pd_route_rec *r, uint32_t of, const struct pd_buf *slo, const struct pd_outcome_rec *o)
{
    char at[32];
    const struct pd_route_pair *way[2] = { pd_way_best(r, false), pd_way_best(r, true) };
    fprintf(out, "run %s, decision %u of %u, %s, %.1f ms after it was accepted\n", r->run, r->attempt, of, pd_report_time(r->t_us, at), ms(r->waited_us));
    put_asked(out, r, slo);
    if (!r->input.local && !r->input.moves)
        put_side(out, "prefill", r->p, r->n_p, r->left_p, false);
    put_side(out, "decode", r->d, r->n_d, r->left_d, true);
    if (way[1])
        put_path(out, r, way[1]);
    if (way[0] || way[1])
        put_table(out, r, way);
    for (int k = 0; k < 2; k++)
        if (!way[k])
            put_missing(out, r, k);
    fprintf(out, "%-10s ", r->chosen.any ? "chosen" : "nobody");
    pd_report_plain(out, str_of(r->reason));
    putc('\n', out);
    if (r->chosen.any && way[0] && way[1])
        put_difference(out, r, way[r->chosen.mode == PD_MODE_REMOTE], way[r->chosen.mode != PD_MODE_REMOTE]);
    if (r->degraded) {
        fprintf(out, "%-10s", "degraded");
        for (int i = 0; PD_DG_ALL >> i; i++)
            if (r->degraded >> i & 1)
                fprintf(out, " %s", pd_degraded_names[i]);
        putc('\n', out);
    }
    put_shadow(out, r);
    if (o)
        put_outcome(out, r, o);
}

/* ---- as JSON ---- */

static void json_way(FILE *out, const struct pd_route_rec *r, const struct pd_route_pair *o)
{
    fprintf(out, "\"mode\":\"%s\",", mode_of(r, o));
    if (o->p >= 0)
        pd_report_json(out, "p", r->p[o->p].worker);
    else
        fputs("\"p\":null", out);
    putc(',', out);
    pd_report_json(out, "d", r->d[o->d].worker);
}

static void json_side(FILE *out, const char *name, const struct pd_route_row *w, uint32_t n)
{
    fprintf(out, ",\"%s\":[", name);
    for (uint32_t i = 0; i < n; i++) {
        fputs(i ? ",{" : "{", out);
        pd_report_json(out, "worker", w[i].worker);
        fprintf(out, ",\"hit_blocks\":%u,\"miss_blocks\":%u,\"could\":%s,", w[i].hit_blocks, w[i].miss_blocks, w[i].x ? "false" : "true");
        if (w[i].excluded.p)
            pd_report_json(out, "excluded", w[i].excluded);
        else
            fputs("\"excluded\":null", out);
        putc('}', out);
    }
    putc(']', out);
}

static void json_outcome(FILE *out, const struct pd_route_rec *r, const struct pd_outcome_rec *o)
{
    struct pd_spread want[PD_WT_N];
    int64_t took[PD_WT_N];
    bool done = pd_way_done(r, o), any = false;
    unsigned has = pd_way_took(o, took), known = done ? pd_way_expected(r, &r->pair[r->chosen.pair], want) : 0;
    const struct { const char *key; struct pd_str s; } text[] = { { "mode", str_of(o->mode) }, { "finish_reason", str_of(o->finish_reason) }, { "p", o->p }, { "d", o->d },
                                                                  { "fallback", o->fallback }, { "cause", o->cause } };
    fprintf(out, ",\"outcome\":{\"as_decided\":%s,\"completion_tokens\":%u,\"cached_tokens\":%u,\"transferred_tokens\":%u,\"recomputed_tokens\":%u,\"cached_expected\":%u,\"migrations\":%u",
            done ? "true" : "false", o->completion_tokens, o->cached_tokens, o->transferred_tokens, o->recomputed_tokens, o->cached_expected, o->migrations);
    if (o->has & PD_OC_P_CACHED)
        fprintf(out, ",\"p_cached_tokens\":%u", o->p_cached_tokens);
    for (size_t i = 0; i < sizeof text / sizeof *text; i++)
        if (text[i].s.n) {
            putc(',', out);
            pd_report_json(out, text[i].key, text[i].s);
        }
    fputs(",\"terms\":[", out);
    for (int i = 0; i < PD_WT_N; i++) {
        if (!(has >> i & 1))
            continue;
        fprintf(out, "%s{\"name\":\"%s\",\"took_ms\":%.3f", any ? "," : "", pd_way_terms[i], ms(took[i]));
        if (known >> i & 1)
            fprintf(out, ",\"p50_ms\":%.3f,\"p95_ms\":%.3f,\"within\":%s", ms(want[i].p50), ms(want[i].p95), took[i] <= want[i].p95 ? "true" : "false");
        putc('}', out);
        any = true;
    }
    fputs("]}", out);
}

static void put_json(FILE *out, const struct pd_route_rec *r, uint32_t of, const struct pd_outcome_rec *o)
{
    const struct pd_route_input *q = &r->input;
    const struct pd_route_pair *way[2] = { pd_way_best(r, false), pd_way_best(r, true) };
    struct line line[LINES];
    fprintf(out, "{\"run\":\"%s\",\"decision\":%u,\"of\":%u,\"t_us\":%" PRId64 ",\"waited_ms\":%.3f,", r->run, r->attempt, of, r->t_us, ms(r->waited_us));
    pd_report_json(out, "policy", str_of(r->policy));
    fprintf(out, ",\"risk\":%.9g,\"externality\":%.9g,\"temperature\":%.9g,\"propensity\":%.9g,\"epoch\":%" PRIu64 ",\"n_tokens\":%u,\"exact\":%s,\"max_tokens\":%u,\"n\":%u,"
            "\"out_p50\":%u,\"out_p95\":%u", r->risk, r->externality, r->temperature, r->propensity, r->epoch, q->n_tokens, q->exact ? "true" : "false", q->max_tokens, q->n,
            q->out_p50, q->out_p95);
    json_side(out, "prefill", r->p, r->n_p);
    json_side(out, "decode", r->d, r->n_d);
    fputs(",\"ways\":[", out);
    for (int k = 0, any = 0; k < 2; k++) {
        if (!way[k])
            continue;
        int n = lines_of(r, way[k], line);
        fputs(any++ ? ",{" : "{", out);
        json_way(out, r, way[k]);
        fprintf(out, ",\"bytes\":%" PRIu64 ",\"terms\":[", way[k]->bytes);
        for (int i = 0; i < n; i++)
            fprintf(out, "%s{\"name\":\"%s\",\"p50_ms\":%.3f,\"p95_ms\":%.3f,\"cold\":%s,\"stale\":%s}", i ? "," : "", line[i].name + strspn(line[i].name, " ="),
                    ms(line[i].v.p50), ms(line[i].v.p95), line[i].v.marks & PD_SPREAD_COLD ? "true" : "false", line[i].v.marks & PD_SPREAD_STALE ? "true" : "false");
        fputs("]}", out);
    }
    fputs("],\"chosen\":", out);
    if (r->chosen.any) {
        putc('{', out);
        json_way(out, r, &r->pair[r->chosen.pair]);
        putc('}', out);
    } else
        fputs("null", out);
    putc(',', out);
    pd_report_json(out, "reason", str_of(r->reason));
    if (r->chosen.any && way[0] && way[1])
        fprintf(out, ",\"apart_ms\":%.3f", ms(pd_way_price(r, way[r->chosen.mode != PD_MODE_REMOTE]) - pd_way_price(r, way[r->chosen.mode == PD_MODE_REMOTE])));
    fputs(",\"degraded\":[", out);
    for (int i = 0, any = 0; PD_DG_ALL >> i; i++)
        if (r->degraded >> i & 1)
            fprintf(out, "%s\"%s\"", any++ ? "," : "", pd_degraded_names[i]);
    putc(']', out);
    if (r->shadow.policy[0]) {
        fputs(",\"shadow\":{", out);
        pd_report_json(out, "policy", str_of(r->shadow.policy));
        if (r->shadow.chosen.any) {
            const struct pd_route_pair *s = &r->pair[r->shadow.chosen.pair];
            putc(',', out);
            json_way(out, r, s);
            fprintf(out, ",\"ttft_ms\":%.3f,\"completion_ms\":%.3f", ms(s->ttft.p50), ms(s->completion.p50));
        }
        putc('}', out);
    }
    if (o)
        json_outcome(out, r, o);
    fputs("}\n", out);
}

/* ---- one run of a log ---- */

struct found {
    const struct pd_report_opts *o;
    char run[PD_RUN_LEN + 1];
    struct pd_arena mem;
    struct pd_bin decision[MOST_DECISIONS], outcome;
    uint32_t n, all;
    uint64_t events;
};

static int take(struct found *f, const struct pd_log_rec *rec, struct pd_err *e)
{
    struct pd_bin raw = { rec->p, rec->n }, op;
    struct pd_str run = { rec->ev.run, strlen(rec->ev.run) };
    bool route = rec->kind == PD_K_ROUTE;
    if (rec->kind != PD_K_EVENT && !(route || rec->kind == PD_K_OUTCOME))
        return 0;
    if ((rec->kind == PD_K_EVENT ? run.n != PD_RUN_LEN : !pd_history_key(raw, &run, &op)) || strncmp(run.p, f->o->run, strlen(f->o->run)))
        return 0;
    if (f->run[0] && memcmp(f->run, run.p, PD_RUN_LEN))
        return pd_fail(e, PD_EUSAGE, "why: '%s' is the beginning of several runs, as of %s and %.26s: give more of it", f->o->run, f->run, run.p);
    memcpy(f->run, run.p, PD_RUN_LEN);
    f->events += rec->kind == PD_K_EVENT;
    if (rec->kind == PD_K_EVENT || (route && f->all++ >= MOST_DECISIONS))
        return 0;
    uint8_t *copy = pd_arena_dup(&f->mem, raw.p, raw.n, e);
    if (!copy)
        return PD_ENOMEM;
    *(route ? &f->decision[f->n++] : &f->outcome) = (struct pd_bin){ copy, raw.n };
    return 0;
}

static bool begins(struct pd_str s, const char *with) { return s.n >= strlen(with) && !memcmp(s.p, with, strlen(with)); }

static int tell(struct found *f, struct pd_route_rec *r, struct pd_err *e)
{
    FILE *out = f->o->out;
    struct pd_outcome_rec o;
    struct pd_buf slo = { 0 };
    bool ended = false;         /* without that any of it was carried out */
    int rc = f->outcome.n ? pd_outcome_decode(f->outcome.p, f->outcome.n, &f->mem, &o, e) : 0;
    for (uint32_t i = 0; i < f->n && !rc; i++) {
        slo.n = 0;
        if ((rc = pd_route_decode(f->decision[i].p, f->decision[i].n, &f->mem, r, e)) ||
            (r->input.slo.n && (rc = pd_msgpack_to_json(r->input.slo.p, r->input.slo.n, &slo, e))))
            break;
        ended = begins(r->cause, "blocked:") || begins(r->cause, "shed:");
        const struct pd_outcome_rec *of = f->outcome.n && !memcmp(o.op, r->op, sizeof o.op) && o.attempt == r->attempt ? &o : NULL;
        if (f->o->json)
            put_json(out, r, f->all, of);
        else {
            if (i)
                putc('\n', out);
            put_words(out, r, f->all, &slo, of);
        }
    }
    pd_buf_free(&slo);
    if (rc)
        return pd_err_prefix(e, "run %s", f->run);
    if (!f->o->json && !f->outcome.n && ended)
        fprintf(out, "%-10s none: with that the run ended\n", "outcome");
    else if (!f->o->json && !f->outcome.n)
        fprintf(out, "%-10s there is none of this run here: it runs, or its router was killed, or is of another log\n", "outcome");
    if (!f->o->json && f->all > f->n)
        fprintf(out, "%u more decisions of this run are left out\n", f->all - f->n);
    return 0;
}

int pd_review_why(const struct pd_review_opts *o, int *status, struct pd_err *e)
{
    struct found f = { .o = &o->log };
    struct pd_log *log = NULL;
    struct pd_log_rec rec;
    struct pd_route_rec *r = pd_calloc(1, sizeof *r, "a route record", e);
    int rc = r ? pd_log_open(o->log.paths, &o->log.log, &log, e) : PD_ENOMEM;
    while (!rc && (rc = pd_log_next(log, &rec, e)) == 1)
        rc = take(&f, &rec, e);
    if (!rc && f.n)
        rc = tell(&f, r, e);
    else if (!rc && f.run[0])
        rc = pd_fail(e, PD_EFAIL, "why: run %s has %s here and no route record: name the trace of the router that decided it (pd-route --trace FILE); without a router nothing is decided",
                     f.run, f.events ? "events" : "an outcome");
    else if (!rc)
        rc = pd_fail(e, PD_EFAIL, "why: no record of run %s is here (pd-trace ls lists the runs of a log)", o->log.run);
    if (!rc)
        rc = pd_report_end(&o->log, log, status, e);
    pd_arena_free(&f.mem);
    pd_free(r);
    pd_log_free(log);
    return rc;
}
