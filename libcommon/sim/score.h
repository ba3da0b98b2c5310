/* What a load was answered with, in figures: results, token records and errors in, one report out.
 *
 * Where times come from, the best that all results have, told by the formula's words beside each figure:
 *   scheduled   what pd-bench load noted: latencies count from when the request was to arrive
 *   sent        the same of a closed loop: from when it was sent
 *   seen        a paced stream scored as it comes (requests with start_us): token and result records are stamped here; from when the request was to arrive
 *   reported    what the decoder's results say: from when it accepted the request, which hides all waiting before that; no rates
 * Failed requests, and those of the request file that nobody answered, are in every denominator. TPOT of one token is absent. */
#ifndef PD_SIM_SCORE_H
#define PD_SIM_SCORE_H
#include "../base/cli.h"
#include "../wire/stream.h"
#include "sample.h"

enum pd_score_basis { PD_SB_SCHEDULED, PD_SB_SENT, PD_SB_SEEN, PD_SB_REPORTED };
extern const char *const pd_score_basis_names[];
enum pd_score_figure { PD_FG_TTFT, PD_FG_SECOND, PD_FG_ITL, PD_FG_TPOT, PD_FG_E2E, PD_FG_LAG, PD_FG_KV, PD_FG_N };
enum { PD_SCORE_CLASSES = 64, PD_SCORE_WORDS = 32 };

struct pd_word_count { char word[48]; uint64_t n; };
struct pd_words { struct pd_word_count of[PD_SCORE_WORDS]; uint32_t n; };     /* past PD_SCORE_WORDS the last counts the rest */
struct pd_class_score { char name[32]; uint64_t n, ended, met; struct pd_sample ttft, tpot; };

struct pd_score_opts {
    double ttft_ms, tpot_ms;            /* SLO of requests that bring none; 0: none */
    bool live;                          /* records are stamped as they come */
};
struct pd_report {                      /* all ms, 1/s, bytes, tokens */
    enum pd_score_basis basis;
    struct pd_sample figure[PD_FG_N];   /* of requests that ended well; n 0: not known */
    uint64_t n, ended, failed, missing; /* n = ended + failed + missing */
    struct pd_words reasons, modes, fallbacks;          /* of all results; modes and fallbacks of those that ended well */
    uint64_t with_slo, met;             /* of n; met: ended, with every time that its SLO names */
    double offered, span_s;             /* 0: not known. span: from the first arrival to the last end */
    uint64_t prompt_tokens, output_tokens, cached_tokens, transferred_tokens, recomputed_tokens, reusable_tokens, kv_bytes;
    double kv_ms, hit_mean;             /* sum; mean over requests of cached / prompt */
    uint64_t tokens_unseen;             /* ended, streamed to nobody here: no first token */
    struct pd_class_score class_[PD_SCORE_CLASSES]; uint32_t n_classes;
};

struct pd_score;
int pd_score_new(const struct pd_score_opts *o, struct pd_score **out, struct pd_err *e);
void pd_score_free(struct pd_score *s);
/* A result, token or error record; others are passed over. mono_us: when it came. PD_ECORRUPT: it is a bad one. */
int pd_score_record(struct pd_score *s, const struct pd_rec *rec, int64_t mono_us, struct pd_err *e);
int pd_score_request(struct pd_score *s, const struct pd_rec *rec, struct pd_err *e);
/* r is zeroed first; free with pd_report_free. */
int pd_score_report(struct pd_score *s, struct pd_report *r, struct pd_err *e);
void pd_report_free(struct pd_report *r);

/* "first-scheduled": how a figure was worked out. */
const char *pd_figure_formula(const struct pd_report *r, enum pd_score_figure f);
extern const char *const pd_figure_names[PD_FG_N];
/* Share of k in n with its 95 % interval [Wilson: Probable Inference, 1927]; n 0: all 0. */
struct pd_ratio { double value, lo, hi; };
struct pd_ratio pd_ratio_of(uint64_t k, uint64_t n);

int pd_report_text(struct pd_report *r, struct pd_buf *out, struct pd_err *e);
int pd_report_record(struct pd_report *r, struct pd_buf *out, struct pd_err *e);       /* a `score` record (pd-wire.5) */

extern struct poptOption pd_score_options[];
int pd_score_verb(struct pd_err *e);
#endif
