/* GGUF v2/v3, memory-mapped read-only (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The file is hostile: every count is held against
 * the bytes left before anything is allocated, sizes are overflow-checked, keys and tensor names are distinct, tensors lie inside the file without
 * overlap. Refusals name the field and the file offset. */
#ifndef PD_MODEL_GGUF_H
#define PD_MODEL_GGUF_H
#include "dtype.h"
enum pd_gguf_type { PD_GT_U8, PD_GT_I8, PD_GT_U16, PD_GT_I16, PD_GT_U32, PD_GT_I32, PD_GT_F32, PD_GT_BOOL, PD_GT_STR, PD_GT_ARR, PD_GT_U64, PD_GT_I64, PD_GT_F64 };
struct pd_gguf_kv { struct pd_str key; uint32_t type, elem_type; uint64_t count; const uint8_t *data; uint64_t offset; };   /* data: value bytes in the map; unaligned */
struct pd_gguf_tensor { struct pd_str name; uint32_t type; int n_dims; uint64_t ne[4], bytes; const uint8_t *data; };      /* ne[0] fastest; unused dims 1 */
struct pd_gguf {
    int fd; const uint8_t *map; size_t size; uint32_t version; uint64_t data_off;
    struct pd_gguf_kv *kv; size_t n_kv; struct pd_gguf_tensor *tensor; size_t n_tensors;
    char *path;
};
int pd_gguf_open(const char *path, struct pd_gguf **out, struct pd_err *e);
void pd_gguf_close(struct pd_gguf *g);
const struct pd_gguf_kv *pd_gguf_find(const struct pd_gguf *g, const char *key);
const struct pd_gguf_tensor *pd_gguf_tensor(const struct pd_gguf *g, const char *name);
/* Typed getters: 1 found, 0 absent (*v untouched), < 0 wrong type or out of [lo, hi] (message names the key). Integers of any width are taken. */
int pd_gguf_get_int(const struct pd_gguf *g, const char *key, int64_t lo, int64_t hi, int64_t *v, struct pd_err *e);
int pd_gguf_get_f64(const struct pd_gguf *g, const char *key, double *v, struct pd_err *e);        /* finite */
int pd_gguf_get_bool(const struct pd_gguf *g, const char *key, bool *v, struct pd_err *e);
int pd_gguf_get_str(const struct pd_gguf *g, const char *key, struct pd_str *v, struct pd_err *e);
/* All strings of an array: *v [n] allocated with pd_calloc (caller frees), pointing into the map. */
int pd_gguf_get_strs(const struct pd_gguf *g, const char *key, struct pd_str **v, size_t *n, struct pd_err *e);
int pd_gguf_get_i32s(const struct pd_gguf *g, const char *key, int32_t **v, size_t *n, struct pd_err *e);
int pd_gguf_get_f32s(const struct pd_gguf *g, const char *key, float **v, size_t *n, struct pd_err *e);
#endif
