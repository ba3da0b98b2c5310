/* From a tensor as stored to the kernels' form (kernels.h), once, at load. A matrix may be made of several tensors with the same inputs (q, k, v), one
 * below the other. Scales stay halves where the stored ones are (Q8_0, Q4_x, Q5_x); a K type's scale is a product and becomes a float: both exact,
 * so packing loses nothing. A scale (or a float weight) that is not finite is refused by tensor name and place. The tensors are read from the file
 * (pd_gguf_read), never mapped. */
#ifndef PD_MODEL_PACK_H
#define PD_MODEL_PACK_H
#include "../base/threads.h"
#include "gguf.h"
#define PD_PACK_SRC 3
/* One matrix to pack: m->data is given, the rest of *m comes from pd_pack_shape. */
struct pd_pack_job { struct pd_pmat *m; const struct pd_gguf_tensor *src[PD_PACK_SRC]; int n_src; };
/* Whether b's rows may follow a's in one matrix: the same packed form, and a ends on a group. */
bool pd_pack_joins(const struct pd_gguf_tensor *a, const struct pd_gguf_tensor *b);
/* Everything of job->m but data. Tensors [n_in, n_out], n_in a multiple of 16, each but the last a multiple of 32 rows. */
int pd_pack_shape(const struct pd_pack_job *job, struct pd_err *e);
/* Packs all of them as one parallel region. threads NULL: the calling thread alone. */
int pd_pack_run(const struct pd_gguf *g, const struct pd_pack_job *jobs, int n_jobs, struct pd_threads *threads, struct pd_err *e);
/* Row `o` of a packed matrix as floats, the bits that dequantising the stored row gives: out [n_in]. */
void pd_pack_row(const struct pd_pmat *m, int o, float *out);
#endif
