/* Which prefill worker can give KV to which decode worker, and what stands in the way: pd-route --check.
 *
 *   ok            nothing that matters differs; `advisory` fields that do are named
 *   converted     only fields differ that this decode worker converts (--allow-convert); each is named
 *   convertible   only fields differ that a conversion could bridge (block_size, order, tp), and the decode worker has no leave for it: refused
 *   refused       another field differs: each is named, with both values
 *   apart         of different epochs, which never exchange KV
 *   itself        one worker that does either
 */
#ifndef PD_ROUTE_MATRIX_H
#define PD_ROUTE_MATRIX_H
#include "../wire/record.h"

enum pd_match { PD_M_OK, PD_M_CONVERTED, PD_M_CONVERTIBLE, PD_M_REFUSED, PD_M_APART, PD_M_SELF };
extern const char *const pd_match_names[];
/* why: "rope_theta differs (prefill 10000, decode 500000); ...", appended; nothing when all agrees. PD_ECORRUPT: a fingerprint that is none. */
int pd_match(const struct pd_worker_rec *p, const struct pd_worker_rec *d, enum pd_match *out, struct pd_buf *why, struct pd_err *e);

/* All pairs. */
struct pd_matrix { const struct pd_worker_rec **p, **d; uint32_t n_p, n_d; enum pd_match *m; struct pd_buf *why; /* [n_p * n_d] */ };
int pd_matrix_make(const struct pd_worker_rec *w, uint32_t n, struct pd_matrix *m, struct pd_err *e);   /* points into w */
void pd_matrix_free(struct pd_matrix *m);
/* A worker that has no partner in its epoch: PD_EINCOMPAT, *e names it and what differs from one that it might have had. 0: none. */
int pd_matrix_needed(const struct pd_matrix *m, struct pd_err *e);
int pd_matrix_text(const struct pd_matrix *m, struct pd_buf *out, struct pd_err *e);
/* One record a pair, one after the other: {pd: "pair", v, p, d, match, why}. */
int pd_matrix_records(const struct pd_matrix *m, struct pd_buf *out, struct pd_err *e);
#endif
