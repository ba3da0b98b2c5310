#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include "fault.h"
#include "mem.h"

static int no_memory(size_t n, size_t size, const char *what, struct pd_err *e)
{
    return pd_fail(e, PD_ENOMEM, "out of memory for %s (%zu x %zu bytes)", what, n, size);
}

void *pd_calloc(size_t n, size_t size, const char *what, struct pd_err *e)
{
    void *p = NULL;
    if (!n || !size)
        n = size = 1;
    if (!pd_fault("malloc"))
        p = calloc(n, size);
    if (!p)
        no_memory(n, size, what, e);
    return p;
}

void *pd_alloc_aligned(size_t bytes, const char *what, struct pd_err *e)
{
    const size_t huge = (size_t)2 << 20;        /* weights stream a quarter faster from huge pages */
    const bool big = bytes >= 2 * huge;
    void *p = NULL;
    if (pd_fault("malloc") || posix_memalign(&p, big ? huge : 64, bytes ? bytes : 1)) {
        no_memory(1, bytes, what, e);
        return NULL;
    }
    if (big)
        (void)madvise(p, bytes / huge * huge, MADV_HUGEPAGE);
    return p;
}

void *pd_realloc(void *p, size_t n, size_t size, const char *what, struct pd_err *e)
{
    void *q = NULL;
    if (!n || !size)
        n = size = 1;
    if (!pd_fault("malloc"))
        q = reallocarray(p, n, size);
    if (!q)
        no_memory(n, size, what, e);
    return q;
}

char *pd_strndup(const char *s, size_t n, struct pd_err *e)
{
    size_t room;
    if (!pd_add_size(n, 1, &room)) {
        no_memory(1, n, "a string", e);
        return NULL;
    }
    char *p = pd_calloc(room, 1, "a string", e);
    if (p && n)
        memcpy(p, s, n);
    return p;
}

void pd_free(void *p)
{
    free(p);
}

int pd_buf_reserve(struct pd_buf *b, size_t more, struct pd_err *e)
{
    size_t need;
    if (!pd_add_size(b->n, more, &need))
        return no_memory(1, more, "a buffer", e);
    if (need <= b->cap)
        return 0;
    size_t cap = b->cap ? b->cap : 256;
    while (cap < need)
        if (!pd_mul_size(cap, 2, &cap))
            cap = need;
    uint8_t *p = pd_realloc(b->p, cap, 1, "a buffer", e);
    if (!p)
        return PD_ENOMEM;
    b->p = p;
    b->cap = cap;
    return 0;
}

int pd_buf_add(struct pd_buf *b, const void *p, size_t n, struct pd_err *e)
{
    int rc = pd_buf_reserve(b, n, e);
    if (rc)
        return rc;
    if (n)
        memcpy(b->p + b->n, p, n);
    b->n += n;
    return 0;
}

int pd_buf_printf(struct pd_buf *b, struct pd_err *e, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap), rc;
    va_end(ap);
    if (n < 0)
        rc = pd_fail(e, PD_EFAIL, "cannot format '%s'", fmt);
    else if (!(rc = pd_buf_reserve(b, (size_t)n + 1, e))) {     /* vsnprintf ends with a NUL, which is not counted in n */
        vsnprintf((char *)b->p + b->n, (size_t)n + 1, fmt, again);
        b->n += (size_t)n;
    }
    va_end(again);
    return rc;
}

void pd_buf_free(struct pd_buf *b)
{
    free(b->p);
    *b = (struct pd_buf){ 0 };
}

/* Chunks grow from 1 KiB to 64 KiB; a large piece gets a chunk of its own, put behind the head so that the head's rest stays in use. */
struct pd_arena_chunk { struct pd_arena_chunk *next; size_t at, cap; } __attribute__((aligned(16)));

static struct pd_arena_chunk *chunk_new(size_t cap, struct pd_err *e)
{
    size_t bytes;
    if (!pd_add_size(cap, sizeof(struct pd_arena_chunk), &bytes)) {
        no_memory(1, cap, "an arena", e);
        return NULL;
    }
    struct pd_arena_chunk *c = pd_calloc(1, bytes, "an arena", e);
    if (c)
        c->cap = cap;
    return c;
}

void *pd_arena_alloc(struct pd_arena *a, size_t n, size_t size, struct pd_err *e)
{
    size_t bytes;
    if (!pd_mul_size(n, size, &bytes) || bytes > SIZE_MAX - 16) {
        no_memory(n, size, "an arena", e);
        return NULL;
    }
    bytes = bytes ? (bytes + 15) & ~(size_t)15 : 16;
    struct pd_arena_chunk *c = a->head;
    if (!c || c->cap - c->at < bytes) {
        size_t cap = !a->head ? 1024 : a->head->cap < 65536 / 2 ? a->head->cap * 2 : 65536;
        bool own = bytes > cap / 2;
        c = chunk_new(own ? bytes : cap, e);
        if (!c)
            return NULL;
        if (own && a->head) {
            c->next = a->head->next;
            a->head->next = c;
        } else {
            c->next = a->head;
            a->head = c;
        }
    }
    void *p = (uint8_t *)(c + 1) + c->at;
    c->at += bytes;
    a->used += bytes;
    return p;
}

void *pd_arena_dup(struct pd_arena *a, const void *p, size_t n, struct pd_err *e)
{
    size_t room;
    if (!pd_add_size(n, 1, &room)) {
        no_memory(1, n, "an arena", e);
        return NULL;
    }
    void *q = pd_arena_alloc(a, room, 1, e);
    if (q && n)
        memcpy(q, p, n);
    return q;
}

void pd_arena_free(struct pd_arena *a)
{
    for (struct pd_arena_chunk *c = a->head, *next; c; c = next) {
        next = c->next;
        free(c);
    }
    *a = (struct pd_arena){ 0 };
}
