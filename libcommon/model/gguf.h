/* GGUF v2/v3 (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The file is hostile: every count is held against the bytes left before anything
 * is allocated, sizes are overflow-checked, keys and tensor names are distinct, tensors lie inside the file without overlap. Refusals name the field and
 * the file offset.
 *
 * Nothing is mapped: a file that is cut short under a map kills with SIGBUS, and one written in place changes what was checked. The header is read once
 * into memory, as far as it reaches; keys, values and names point there and live until pd_gguf_close. Tensor data is read with pd_gguf_read, which says so when the
 * file ends early; pd_gguf_unchanged tells whether all of it came from one state of the file. */
#ifndef PD_MODEL_GGUF_H
#define PD_MODEL_GGUF_H
#include "dtype.h"
#define PD_GGUF_MAX_HEADER (32u << 20)          /* bytes before the tensor data; real ones stay below 20 MiB */
#define PD_GGUF_MAX_ENTRIES 65536               /* keys, and tensors */
#define PD_GGUF_MAX_ARRAY (1u << 21)            /* elements of an array: a vocabulary or its merges */
enum pd_gguf_type { PD_GT_U8, PD_GT_I8, PD_GT_U16, PD_GT_I16, PD_GT_U32, PD_GT_I32, PD_GT_F32, PD_GT_BOOL, PD_GT_STR, PD_GT_ARR, PD_GT_U64, PD_GT_I64, PD_GT_F64 };
struct pd_gguf_kv { struct pd_str key; uint32_t type, elem_type; uint64_t count; const uint8_t *data; uint64_t offset; };   /* data: value bytes in the header (of an array: its first element; of a string: its length); unaligned */
struct pd_gguf_tensor { struct pd_str name; uint32_t type; int n_dims; uint64_t ne[4], bytes, at, entry; };   /* ne[0] fastest; unused dims 1; places in the file of its data and of its entry */
struct pd_gguf {
    int fd; uint8_t *head; size_t n_head; uint64_t size; int64_t mtime_ns; uint32_t version; uint64_t data_off;    /* head [n_head]: what has been read of the header */
    struct pd_gguf_kv *kv; size_t n_kv; struct pd_gguf_tensor *tensor; size_t n_tensors;
    char *path;
    uint32_t *kv_slot, *tensor_slot; size_t kv_mask, tensor_mask; uint64_t seed;       /* hash tables: index + 1, 0 empty */
};
int pd_gguf_open(const char *path, struct pd_gguf **out, struct pd_err *e);
void pd_gguf_close(struct pd_gguf *g);
/* The n bytes at `at` of the file. Any thread may. PD_ECORRUPT when they are no longer there. */
int pd_gguf_read(const struct pd_gguf *g, uint64_t at, void *buf, size_t n, struct pd_err *e);
int pd_gguf_unchanged(const struct pd_gguf *g, struct pd_err *e);      /* PD_ECORRUPT when the file has another length or time of change than when it was opened */
const struct pd_gguf_kv *pd_gguf_find(const struct pd_gguf *g, const char *key);
const struct pd_gguf_tensor *pd_gguf_tensor(const struct pd_gguf *g, const char *name);
/* Typed getters: 1 found, 0 absent (*v untouched), < 0 wrong type or out of [lo, hi] (message names the key). Integers of any width are taken. */
int pd_gguf_get_int(const struct pd_gguf *g, const char *key, int64_t lo, int64_t hi, int64_t *v, struct pd_err *e);
int pd_gguf_get_f64(const struct pd_gguf *g, const char *key, double *v, struct pd_err *e);        /* finite */
int pd_gguf_get_bool(const struct pd_gguf *g, const char *key, bool *v, struct pd_err *e);
int pd_gguf_get_str(const struct pd_gguf *g, const char *key, struct pd_str *v, struct pd_err *e);
/* All elements of an array: *v [n] allocated with pd_calloc (caller frees, also when n is 0); strings point into the header. i32s takes 32-bit integers of either sign. */
int pd_gguf_get_strs(const struct pd_gguf *g, const char *key, struct pd_str **v, size_t *n, struct pd_err *e);
int pd_gguf_get_i32s(const struct pd_gguf *g, const char *key, int32_t **v, size_t *n, struct pd_err *e);
int pd_gguf_get_f32s(const struct pd_gguf *g, const char *key, float **v, size_t *n, struct pd_err *e);
/* A key, name or value for a message: cut at 64 bytes, anything but printable ASCII as '?'. */
struct pd_gguf_shown { char s[68]; };
struct pd_gguf_shown pd_gguf_show(struct pd_str v);
#endif
