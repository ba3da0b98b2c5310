/* Weight types: sizes, exact unpacking. One traits row a type ties it to block, dequantise and the integer form that packing wants. */
#ifndef PD_MODEL_DTYPE_H
#define PD_MODEL_DTYPE_H
#include <stdbool.h>
#include "../../kernels/kernels.h"
#include "../base/mem.h"

/* The integer form of 256 or 32 consecutive weights of a row: w = scale[s] * (u[i] - off) + min[s], s = i / sub. */
struct pd_qform { int sub, off; bool has_min, scale_f16 /* scales (and mins) are exact halves */, four_bit; };

struct pd_dtype_traits {
    enum pd_dtype id; const char *name;
    int block, block_bytes;             /* elements and bytes of a block as stored */
    bool quantised; struct pd_qform form;
    void (*dequant)(const void *blocks, float *out, int64_t n);                 /* n a multiple of block; the published formula, in float32 */
    void (*unpack)(const void *block, uint8_t *u, float *scale, float *min);    /* one block; quantised types only */
};
const struct pd_dtype_traits *pd_dtype_traits(uint32_t ggml_type);      /* NULL: not supported */
const char *pd_ggml_type_name(uint32_t ggml_type);                      /* also of unsupported ones, "unknown" past the list */
float pd_half_to_float(uint16_t h); uint16_t pd_float_to_half(float f); /* round to nearest even */
float pd_bf16_to_float(uint16_t h); uint16_t pd_float_to_bf16(float f);
size_t pd_dtype_size(enum pd_dtype t);                                  /* bytes of an element of F32, F16, BF16; else 0 */
/* The types that KV has: "f16", "bf16", "f32". name: NULL for others; parse: false, and *t untouched, for others. */
#define PD_KV_DTYPE_LIST "f16, bf16 or f32"
const char *pd_kv_dtype_name(enum pd_dtype t);
bool pd_kv_dtype_parse(const char *name, enum pd_dtype *t);
/* The types of the table above as text, for messages: "F32, F16, ...". */
#define PD_DTYPE_LIST "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K"
#endif
