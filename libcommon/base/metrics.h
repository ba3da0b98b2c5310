/* A registry of metrics, and its text for Prometheus (text exposition format 0.0.4).
 *
 * A family (name, help, type, names of labels) has series, one for each set of label values. Values are 64-bit integers in a unit of the program's own, most
 * often microseconds; the family's `scale` says how many decimal places that is below the unit that is told (6: us told as seconds), and the text is exact.
 * A series is found once, when what it counts begins, and kept: an update is one or two relaxed atomic additions, from any thread. Families, series and
 * the text are the loop thread's. Functions that update take NULL for a series and do nothing, so that a program without metrics needs no second way.
 */
#ifndef PD_BASE_METRICS_H
#define PD_BASE_METRICS_H
#include "mem.h"

#define PD_METRIC_LABELS 4      /* of one family at the most */
#define PD_METRIC_BOUNDS 24
#define PD_METRIC_SERIES 1024   /* of one family: more come from a label that should be none (a run, a path) */

enum pd_metric_type { PD_COUNTER, PD_GAUGE, PD_HISTOGRAM };
struct pd_metric_about {
    const char *name, *help;            /* [a-zA-Z_:][a-zA-Z0-9_:]*; any text */
    enum pd_metric_type type;
    int scale;                          /* decimal places, 0..9 */
    const char *label[PD_METRIC_LABELS];        /* [a-zA-Z_][a-zA-Z0-9_]*, no leading "__", not "le" of a histogram; the first NULL ends them */
    const int64_t *bounds; int n_bounds;        /* histogram: upper bounds, rising; one more bucket takes the rest */
};
struct pd_metrics;
struct pd_metric;
int pd_metrics_new(struct pd_metrics **out, struct pd_err *e);
void pd_metrics_free(struct pd_metrics *m);     /* with all series */

/* The series of these label values (one for each label; a NULL is ""), made at its first use with value 0. *about is copied at the family's first use and
 * must say the same at each later one: PD_EUSAGE when it does not, or has a bad name. PD_ENOMEM past PD_METRIC_SERIES. */
int pd_metric_get(struct pd_metrics *m, const struct pd_metric_about *about, const char *const values[PD_METRIC_LABELS], struct pd_metric **out,
                  struct pd_err *e);
void pd_metric_drop(struct pd_metrics *m, struct pd_metric *s);         /* what it counted is gone (a worker); nobody may hold it any more. NULL: nothing */

void pd_metric_add(struct pd_metric *s, int64_t n);     /* counter (n >= 0), gauge */
void pd_metric_set(struct pd_metric *s, int64_t v);     /* gauge; a counter that is kept elsewhere */
void pd_metric_observe(struct pd_metric *s, int64_t v); /* histogram */
int64_t pd_metric_value(const struct pd_metric *s);     /* histogram: how many were observed */

/* Called before each text, to set what is cheaper to look up than to keep. Up to 8 of them. */
int pd_metrics_before(struct pd_metrics *m, void (*fn)(void *ctx), void *ctx, struct pd_err *e);
/* Append the text: families in the order of their making, series likewise. Label values that are no UTF-8 are mended. */
int pd_metrics_text(struct pd_metrics *m, struct pd_buf *out, struct pd_err *e);
#define PD_METRICS_TYPE "text/plain; version=0.0.4; charset=utf-8"

/* Bounds for latencies in us: 100 us to 60 s, about three a decade. */
extern const int64_t pd_latency_bounds[];
extern const int pd_n_latency_bounds;
#endif
