/* The compatibility identity of KV: a canonical msgpack map (keys in a fixed order) and the SHA-256 over it (04-kv). Travels with each descriptor, so
 * that a refusal can name the field that differs, and both values. Router filter and consumer call the same pd_fp_compare. */
#ifndef PD_KV_FINGERPRINT_H
#define PD_KV_FINGERPRINT_H
#include "../model/weights.h"
struct pd_fp { uint8_t sha[PD_SHA_LEN]; struct pd_buf map; uint64_t must_seed; /* XXH3-64 over the `must` fields: seeds block hashes */ };
struct pd_fp_params { enum pd_dtype kv_dtype; int block_size; const char *numerics; const char *software; };
int pd_fp_make(const struct pd_model *m, const struct pd_fp_params *p, struct pd_fp *fp, struct pd_err *e);
void pd_fp_free(struct pd_fp *fp);
/* must_seed of a map that came with a descriptor. PD_ECORRUPT when its fields are not in the canonical order (must first, then numerics). */
int pd_fp_must_seed(struct pd_bin map, uint64_t *seed, struct pd_err *e);
enum pd_fp_verdict { PD_FP_SAME, PD_FP_ADVISORY, PD_FP_DIFFERS };
/* Compares two maps field by field. DIFFERS: a `must` (or convertible) field differs, is missing on one side, or is malformed: *e says "rope_theta differs (prefill 10000, decode 500000)".
 * ADVISORY: only advisory fields differ (numerics class, software): *e names them the same way. */
enum pd_fp_verdict pd_fp_compare(struct pd_bin prefill, struct pd_bin decode, struct pd_err *e);
/* The same; fields of which PD_CONV_* (convert.h) admits a conversion do not count, and *converts (may be NULL) says which of them differ. */
enum pd_fp_verdict pd_fp_compare_with(struct pd_bin prefill, struct pd_bin decode, unsigned admit, unsigned *converts, struct pd_err *e);
/* The map of the same model's KV in other blocks, appended to out. */
int pd_fp_relayout(struct pd_bin map, uint32_t block_size, const char *order, struct pd_buf *out, struct pd_err *e);
#endif
