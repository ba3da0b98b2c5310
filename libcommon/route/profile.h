/* A profile: what work costs on a class of workers, and KV on a path, as it was measured (pd-profile.5; pd-bench calibrate writes one). Router and simulator
 * start from it instead of from nothing.
 *
 *   prefill (n tokens after `context`)          a + b n + c n (context + n / 2)           rows: n, context, us
 *   decode (batch, kv tokens in it)             d + e batch + f kv                        rows: batch, kv, us
 *   mixed (a decode batch with a chunk in it)   g + h prefill + i decode, of the two above, in us          rows: n, context, batch, kv, us
 *   pack, unpack, path (bytes)                  latency + bytes / bandwidth               rows: bytes, us
 * All in us. A class is a model revision with a CPU path and a number of threads. The file is somebody's: every value is checked, a bad one is named. */
#ifndef PD_ROUTE_PROFILE_H
#define PD_ROUTE_PROFILE_H
#include "../base/mem.h"
#include "estimate.h"

enum pd_profile_term { PD_PT_PREFILL, PD_PT_DECODE, PD_PT_MIXED, PD_PT_PACK, PD_PT_UNPACK, PD_PT_TERMS };
extern const char *const pd_profile_term_names[PD_PT_TERMS];
enum { PD_PROFILE_COLS = 5, PD_PROFILE_ROWS = 4096, PD_PROFILE_CLASSES = 256, PD_PROFILE_PATHS = 256 };

struct pd_profile_fit {
    int k;                              /* coefficients; 0: it was not measured */
    double theta[PD_FIT_MOST], typical[PD_FIT_MOST];    /* typical: the mean of each quantity over the rows, as pd_term_open wants it */
    double p95;                         /* actual / fitted that 95 % of the rows stay below */
    uint32_t n, cols; double *row;      /* [n][cols] as in the file; the last is us */
};
struct pd_profile_class {
    struct pd_str model, cpu;           /* "smollm2-135m@0123456789ab"; "avx2" */
    int threads;
    struct pd_str weights, kv_dtype;    /* conditions, absent when not told */
    double kv_token_bytes;              /* of KV, a token; 0: not told */
    struct pd_profile_fit fit[PD_PT_TERMS];
};
struct pd_profile_path { struct pd_str scheme, class_ /* "local", "rack", ...; absent: any */; struct pd_profile_fit fit; };
struct pd_profile {                     /* zero-initialise; free with pd_profile_free */
    struct pd_arena mem;
    struct pd_profile_class *class_; uint32_t n_classes;
    struct pd_profile_path *path; uint32_t n_paths;
};

/* text need not end in NUL. PD_ECORRUPT: "NAME: class 2: prefill: ..."; then nothing is held. */
int pd_profile_parse(const char *text, size_t n, const char *name, struct pd_profile *p, struct pd_err *e);
int pd_profile_read(const char *path, struct pd_profile *p, struct pd_err *e);
void pd_profile_free(struct pd_profile *p);

/* The first class of this model revision; cpu NULL, threads 0: any. NULL: it was not measured. */
const struct pd_profile_class *pd_profile_class(const struct pd_profile *p, struct pd_str model, const char *cpu, int threads);
/* The first path of this scheme; class_ NULL, or a path that names none: any. */
const struct pd_profile_path *pd_profile_path(const struct pd_profile *p, const char *scheme, const char *class_);

/* The quantities that a row of a term stands for; c: for mixed, whose quantities are the class's own prefill and decode. */
void pd_profile_x(const struct pd_profile_class *c, enum pd_profile_term term, const double *row, double x[PD_FIT_MOST]);
double pd_profile_cost(const struct pd_profile_fit *f, const double *x);        /* us */
/* An estimator that begins with the coefficients; it is cold until it has learnt steps of its own. */
void pd_profile_open(const struct pd_profile_fit *f, const double edge[PD_BANDS - 1], struct pd_term *t);
/* The same, taught the rows: not cold where there are enough of them, with the band of a machine that did nothing else. c as above, NULL for a path. */
void pd_profile_teach(const struct pd_profile_class *c, enum pd_profile_term term, const struct pd_profile_fit *f, const double edge[PD_BANDS - 1],
                      int64_t now_us, struct pd_term *t);
#endif
