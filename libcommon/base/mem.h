/* Checked sizes, allocation that fails as an error, growable bytes, arenas.
 *
 * All memory of the library comes through these, so that `make V=fault` can make the n-th one fail.
 */
#ifndef PD_BASE_MEM_H
#define PD_BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "err.h"

/* *out = a*b or a+b; false (and *out untouched) on overflow. */
static inline bool pd_mul_size(size_t a, size_t b, size_t *out) { size_t r; if (__builtin_mul_overflow(a, b, &r)) return false; *out = r; return true; }
static inline bool pd_add_size(size_t a, size_t b, size_t *out) { size_t r; if (__builtin_add_overflow(a, b, &r)) return false; *out = r; return true; }

/* Zeroed memory of n elements of `size` bytes; NULL with *e filled (PD_ENOMEM; `what` names the thing). n or size 0 gives a 1-byte block.
 * pd_free frees what any of these gave. pd_alloc_aligned: 64-byte alignment, not zeroed. */
void *pd_calloc(size_t n, size_t size, const char *what, struct pd_err *e);
void *pd_alloc_aligned(size_t bytes, const char *what, struct pd_err *e);
void *pd_realloc(void *p, size_t n, size_t size, const char *what, struct pd_err *e);   /* p stays valid on failure */
char *pd_strndup(const char *s, size_t n, struct pd_err *e);    /* adds a NUL */
void pd_free(void *p);

/* Growable bytes. Zero-initialise; free with pd_buf_free. */
struct pd_buf { uint8_t *p; size_t n, cap; };
int pd_buf_reserve(struct pd_buf *b, size_t more, struct pd_err *e);    /* room for `more` bytes past n */
int pd_buf_add(struct pd_buf *b, const void *p, size_t n, struct pd_err *e);
int pd_buf_printf(struct pd_buf *b, struct pd_err *e, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
void pd_buf_free(struct pd_buf *b);

/* Arena: many small pieces freed at once. Zero-initialise. Pieces are 16-byte aligned and zeroed. */
struct pd_arena { struct pd_arena_chunk *head; size_t used; };
void *pd_arena_alloc(struct pd_arena *a, size_t n, size_t size, struct pd_err *e);
void *pd_arena_dup(struct pd_arena *a, const void *p, size_t n, struct pd_err *e);      /* adds one NUL byte after */
void pd_arena_free(struct pd_arena *a);

/* Strings and bytes inside a record: not owned, length explicit, may hold NUL. A NUL byte follows a pd_str that came from an arena. p == NULL: absent. */
struct pd_str { const char *p; size_t n; };
struct pd_bin { const uint8_t *p; size_t n; };
static inline bool pd_str_eq(struct pd_str a, const char *b) { return a.p && a.n == strlen(b) && !memcmp(a.p, b, a.n); }

#endif
