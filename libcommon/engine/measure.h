/* Measuring the engine: the rows of `pd-bench engine`, and logits for those who compare.
 *
 * Names follow llama-bench: ppN is the prefill of N random tokens (in steps of the chunk, logits of the last token alone), tgN the decode of N tokens one
 * after the other, `@dD` the same at depth D, `@bB` for B sequences at once (tokens of all), `@tT` on T threads, `@busy` beside a process that does nothing but
 * spin (on a machine with more cores than threads it finds a core of its own, and tells little). Each is run once for warmth, then `reps` times; the value is
 * the median. Beside it stands the share of the ceiling of these threads, measured in the same run: for prefill of the multiply-adds that the weights' kind can
 * issue; for decode of these or of the memory reading rate, whichever share is greater. After a row of several sequences, or with the competitor, comes its
 * ratio to the row of one sequence, or without (`tg64@b8/tg64`), if that was run before. */
#ifndef PD_ENGINE_MEASURE_H
#define PD_ENGINE_MEASURE_H
#include "runtime.h"

struct pd_row {
    char name[80], unit[16];
    double value, goal, of_roof;        /* of_roof: share of the ceiling, 0: none */
    const char *roof;                   /* which: "read", "ops" */
    int n, threads;                     /* threads: 0: all of the runtime */
    bool has_goal;
};
typedef int pd_row_fn(void *ctx, const struct pd_row *r, struct pd_err *e);

double pd_median(double *v, int n);     /* sorts v; n > 0 */

/* Rows of the ceilings, all threads: roof_read (GB/s) and roof_ops (GOP/s); kept for of_roof of later rows. */
struct pd_roof { double read, ops; };
int pd_measure_roof(struct pd_runtime *rt, struct pd_roof *roof, pd_row_fn *row, void *ctx, struct pd_err *e);
/* tests: "pp128,pp512,tg64@d4096", PD_EUSAGE names a bad one; NULL: those of PD_BENCH_TESTS that the model's context has room for. roof may be NULL. */
#define PD_BENCH_TESTS "pp128,pp512,pp2048,pp512@d4096,tg64,tg64@d4096,tg64@b8,tg64@b32,pp512@t1,tg64@t1,pp512@busy,tg64@busy"
int pd_measure_engine(struct pd_runtime *rt, const struct pd_roof *roof, const char *tests, int reps, pd_row_fn *row, void *ctx, struct pd_err *e);
/* Load time (closed and opened again: warm) and, after a full step, memory beyond weights and pool. rt is open before and after. */
typedef int pd_open_fn(struct pd_runtime *rt, struct pd_err *e);
int pd_measure_load(struct pd_runtime *rt, pd_open_fn *reopen, pd_row_fn *row, void *ctx, struct pd_err *e);
/* Inline hand-over between two processes over a pipe, hashed at both ends, against cat of the same bytes through the same pipe: GB/s and the ratio. */
int pd_measure_handover(const struct pd_pool_geom *g, uint64_t bytes, int reps, pd_row_fn *row, void *ctx, struct pd_err *e);

/* A step: prefill of n tokens after `context` (in steps of the chunk), or one decode step of `batch` sequences with `kv` tokens in all, or both in one step (n at
 * most a chunk). The time of one, median of reps after one for warmth; what takes less than 4 ms is made several times a repetition. */
struct pd_work { uint32_t n, context, batch, kv; };
int pd_measure_work(struct pd_runtime *rt, const struct pd_work *w, int reps, double *us, struct pd_err *e);
/* KV of n_tokens: packed (its chunks' heads made, every byte hashed, nothing copied) and unpacked (verified, copied into blocks of another pool). */
int pd_measure_pack(const struct pd_pool_geom *g, uint32_t n_tokens, int reps, double *bytes, double *pack_us, double *unpack_us, struct pd_err *e);

/* Each line of ids_path is a window of decimal token ids. Writes [windows x tokens][n_vocab] little-endian float32 to out_path. */
int pd_measure_logits(struct pd_runtime *rt, const char *ids_path, const char *out_path, struct pd_err *e);
#endif
