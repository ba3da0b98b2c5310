/* pd-bench: measures. Verbs: engine (the rows of make bench-engine), logits (for comparing engines), gen (a workload), load (a client that sends
 * it and notes when the answers came), score (the figures of that), calibrate (a profile of
 * this machine for the router). */
#include <stdio.h>
#include "../libcommon/engine/measure.h"
#include "../libcommon/engine/options.h"
#include "../libcommon/serve/calibrate.h"
#include "../libcommon/serve/load.h"
#include "../libcommon/sim/gen.h"
#include "../libcommon/sim/score.h"

static char *tests, *ids;
static int reps = 5, all;
static struct poptOption options[] = {
    { "tests", '\0', POPT_ARG_STRING, &tests, 0, "engine: what to run (default " PD_BENCH_TESTS ", and the load, memory and hand-over rows)", "LIST" },
    { "reps", '\0', POPT_ARG_INT, &reps, 0, "engine: timed repetitions of each (default 5; the median counts)", "N" },
    { "all", '\0', POPT_ARG_NONE, &all, 0, "engine: with --tests, the load, memory and hand-over rows too", NULL },
    { "ids", '\0', POPT_ARG_STRING, &ids, 0, "logits: windows of token ids, one a line", "FILE" },
    PD_ENGINE_OPTIONS,
    PD_CLI_COMMON
};

struct print { FILE *to; bool json; const struct pd_runtime *rt; int threads; };

static int print_row(void *ctx, const struct pd_row *r, struct pd_err *e)
{
    struct print *p = ctx;
    bool smaller_is_better = !strcmp(r->unit, "ms") || !strcmp(r->unit, "MiB"), pass = smaller_is_better ? r->value <= r->goal : r->value >= r->goal;
    if (p->json) {
        fprintf(p->to, "{\"name\":\"%s\",\"value\":%.6g,\"unit\":\"%s\",\"goal\":", r->name, r->value, r->unit);
        r->has_goal ? fprintf(p->to, "%.6g,\"pass\":%s", r->goal, pass ? "true" : "false") : fprintf(p->to, "null,\"pass\":null");
        if (r->of_roof > 0)
            fprintf(p->to, ",\"of_roofline\":%.4g,\"roofline\":\"%s\"", r->of_roof, r->roof);
        fprintf(p->to, ",\"n\":%d,\"threads\":%d,\"cpu\":\"%s\",\"weights\":\"%s\"}\n", r->n, r->threads ? r->threads : p->threads, p->rt->k->name, p->rt->model->quant);
    } else {
        char goal[32] = "";
        if (r->has_goal)
            snprintf(goal, sizeof goal, "%s %.4g", smaller_is_better ? "<=" : ">=", r->goal);
        if (r->of_roof > 0)
            snprintf(goal, sizeof goal, "%.1f %%", 100 * r->of_roof);
        fprintf(p->to, "%-30s %12.2f %-10s %10s %-12s n=%d\n", r->name, r->value, r->unit, goal,
                r->has_goal ? pass ? "ok" : "MISSED" : r->of_roof > 0 ? *r->roof == 'r' ? "of roof_read" : "of roof_ops" : "", r->n);
    }
    return fflush(p->to) ? pd_fail_sys(e, "output") : 0;
}

static int open_bench(struct pd_runtime *rt, struct pd_err *e) { return pd_engine_open("bench", rt, e); }

static int engine(int *status, struct pd_err *e)
{
    struct pd_runtime rt = { 0 };
    if (reps < 1 || reps > 64)
        return pd_fail(e, PD_EUSAGE, "--reps: %d is out of range 1 to 64 (example: --reps 5)", reps);
    int rc = open_bench(&rt, e);
    if (rc < 0)
        return rc;
    struct print p = { stdout, pd_cli.format && !strcmp(pd_cli.format, "json"), &rt, pd_threads_count(rt.threads) };
    struct pd_pool_geom g = *pd_pool_geom(rt.pool);
    if (!p.json)
        printf("%s, %s, %d threads, cpu path %s, chunk %u\n", rt.model->revision, rt.model->quant, p.threads, rt.k->name, rt.chunk);
    struct pd_roof roof;
    bool rows = !tests || all;
    if (rows && (rc = pd_measure_roof(&rt, &roof, print_row, &p, e)) == 0)
        rc = pd_measure_load(&rt, open_bench, print_row, &p, e);
    if (rc == 0)
        rc = pd_measure_engine(&rt, rows ? &roof : NULL, tests, reps, print_row, &p, e);
    if (rc == 0 && rows)
        rc = pd_measure_handover(&g, 256 << 20, reps, print_row, &p, e);
    pd_runtime_close(&rt);
    return rc;
}

static int logits(int *status, struct pd_err *e)
{
    struct pd_runtime rt = { 0 };
    if (!ids || !pd_cli.out)
        return pd_fail(e, PD_EUSAGE, "%s: is needed (example: pd-bench logits -m MODEL --ids ids.txt -o logits.f32)", ids ? "-o" : "--ids");
    int rc = open_bench(&rt, e);
    if (rc == 0)
        rc = pd_measure_logits(&rt, ids, pd_cli.out, e);
    pd_runtime_close(&rt);
    return rc;
}

static struct poptOption gen_options[] = { { NULL, '\0', POPT_ARG_INCLUDE_TABLE, pd_gen_options, 0, "The workload:", NULL }, PD_CLI_COMMON };
static struct poptOption load_options[] = { { NULL, '\0', POPT_ARG_INCLUDE_TABLE, pd_load_options, 0, "The load:", NULL }, PD_CLI_COMMON };
static struct poptOption score_options[] = { { NULL, '\0', POPT_ARG_INCLUDE_TABLE, pd_score_options, 0, "The score:", NULL }, PD_CLI_COMMON };
static struct poptOption calibrate_options[] = { { NULL, '\0', POPT_ARG_INCLUDE_TABLE, pd_calibrate_options, 0, "Calibration:", NULL }, PD_ENGINE_OPTIONS, PD_CLI_COMMON };
static int calibrate(int *status, struct pd_err *e) { return pd_calibrate_verb(e); }
static int gen(int *status, struct pd_err *e) { return pd_gen_run(e); }
static int score(int *status, struct pd_err *e) { return pd_score_verb(e); }

static const struct verb { const char *name, *args; const struct poptOption *options; int (*run)(int *status, struct pd_err *e); } verbs[] = {
    { "engine", "engine -m MODEL", options, engine },
    { "logits", "logits -m MODEL --ids FILE -o FILE", options, logits },
    { "gen", "gen -o FILE", gen_options, gen },
    { "load", "load -i REQUESTS -o unix:ROUTER | --self-test", load_options, pd_load_verb },
    { "score", "score -i RESULTS", score_options, score },
    { "calibrate", "calibrate -m MODEL -o PROFILE", calibrate_options, calibrate },
};
enum { VERBS = sizeof verbs / sizeof *verbs };
static const struct verb *verb;

static int run(const char **args, int *status, struct pd_err *e)
{
    for (int i = 0; !verb && args[0] && i < VERBS; i++)
        if (!strcmp(args[0], verbs[i].name) && verbs[i].options != options)
            return pd_fail(e, PD_EUSAGE, "'%s': the verb comes first (pd-bench %s)", args[0], verbs[i].args);
        else if (!strcmp(args[0], verbs[i].name))
            verb = &verbs[i];
    if (verb && !args[1])
        return verb->run(status, e);
    return pd_fail(e, PD_EUSAGE, "'%s' is no verb (engine, logits, gen, load, score, calibrate)", args[0] ? args[1] ? args[1] : args[0] : "");
}

/* Each verb has its own options; engine's and logits' may stand before it, too. */
int main(int argc, char **argv)
{
    for (int i = 0; argc > 1 && i < VERBS; i++)
        if (!strcmp(argv[1], verbs[i].name))
            verb = &verbs[i];
    return pd_cli_main("pd-bench", verb ? verb->options : options, verb ? verb->args : "engine|logits|gen|load|score|calibrate; pd-bench VERB --help", argc, argv,
                       pd_engine_version, run);
}
