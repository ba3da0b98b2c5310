/* GGUF files put together in memory for the tests, right or deliberately wrong: every field can be overridden afterwards by its place. */
#ifndef TEST_GGUF_BUILD_H
#define TEST_GGUF_BUILD_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "../../libcommon/model/gguf.h"

struct gb { uint8_t *p; size_t n, cap; uint64_t n_kv, n_tensors, data_bytes; size_t at_ti[256]; };

static inline void gb_raw(struct gb *b, const void *p, size_t n)
{
    if (b->n + n > b->cap)
        b->p = realloc(b->p, b->cap = (b->n + n) * 2);
    memcpy(b->p + b->n, p, n);
    b->n += n;
}
static inline void gb_u32(struct gb *b, uint32_t v) { gb_raw(b, &v, 4); }
static inline void gb_u64(struct gb *b, uint64_t v) { gb_raw(b, &v, 8); }
static inline void gb_str(struct gb *b, const char *s) { gb_u64(b, strlen(s)); gb_raw(b, s, strlen(s)); }
/* Begins anew; header with counts 0, set by gb_end. */
static inline void gb_begin(struct gb *b)
{
    b->n = 0;
    b->n_kv = b->n_tensors = b->data_bytes = 0;
    gb_raw(b, "GGUF", 4);
    gb_u32(b, 3);
    gb_u64(b, 0);
    gb_u64(b, 0);
}
static inline void gb_key(struct gb *b, const char *key, uint32_t type) { gb_str(b, key); gb_u32(b, type); b->n_kv++; }
static inline void gb_kv_u32(struct gb *b, const char *key, uint32_t v) { gb_key(b, key, PD_GT_U32); gb_u32(b, v); }
static inline void gb_kv_f32(struct gb *b, const char *key, float v) { gb_key(b, key, PD_GT_F32); gb_raw(b, &v, 4); }
static inline void gb_kv_bool(struct gb *b, const char *key, uint8_t v) { gb_key(b, key, PD_GT_BOOL); gb_raw(b, &v, 1); }
static inline void gb_kv_str(struct gb *b, const char *key, const char *v) { gb_key(b, key, PD_GT_STR); gb_str(b, v); }
/* Entry of a 1- or 2-dimensional tensor (ne1 0: one) laid after those before it. */
static inline void gb_tensor(struct gb *b, const char *name, uint32_t type, uint64_t ne0, uint64_t ne1)
{
    const struct pd_dtype_traits *ty = pd_dtype_traits(type);
    uint64_t bytes = ty ? ne0 / (uint64_t)ty->block * (uint64_t)ty->block_bytes * (ne1 ? ne1 : 1) : 0;
    b->at_ti[b->n_tensors++ % 256] = b->n;
    gb_str(b, name);
    gb_u32(b, ne1 ? 2 : 1);
    gb_u64(b, ne0);
    if (ne1)
        gb_u64(b, ne1);
    gb_u32(b, type);
    gb_u64(b, b->data_bytes);
    b->data_bytes += (bytes + 31) / 32 * 32;
}
/* Place of a field of tensor i (by order of adding): name length 0, n_dims 1, ne[0] 2, type 3 and offset 4 (of a 2-dimensional one). */
static inline size_t gb_at(const struct gb *b, int i, int field)
{
    uint64_t len;
    memcpy(&len, b->p + b->at_ti[i], 8);
    size_t name_end = b->at_ti[i] + 8 + len;
    return field == 0 ? b->at_ti[i] : field == 1 ? name_end : field == 2 ? name_end + 4 : field == 3 ? name_end + 20 : name_end + 24;
}
static inline void gb_set32(struct gb *b, size_t at, uint32_t v) { memcpy(b->p + at, &v, 4); }
static inline void gb_set64(struct gb *b, size_t at, uint64_t v) { memcpy(b->p + at, &v, 8); }
/* Counts, padding and the data: byte i of it is fill(i) (NULL: 0). */
static inline void gb_end(struct gb *b)
{
    static const uint8_t zero[32];
    gb_set64(b, 8, b->n_tensors);
    gb_set64(b, 16, b->n_kv);
    gb_raw(b, zero, (32 - b->n % 32) % 32);
    for (uint64_t i = 0; i < b->data_bytes; i += 32)
        gb_raw(b, zero, 32);
}
/* The file, as a path that lives as long as *fd is open. */
static inline const char *gb_file(const void *p, size_t n, int *fd, char path[64])
{
    *fd = memfd_create("gguf", 0);
    if (*fd < 0 || write(*fd, p, n) != (ssize_t)n)
        abort();
    snprintf(path, 64, "/proc/self/fd/%d", *fd);
    return path;
}
#endif
