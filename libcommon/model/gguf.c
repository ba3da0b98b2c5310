#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/fault.h"
#include "../base/hash.h"
#include "gguf.h"

/* The one reader of the header: `at` never passes `end`, and each step asks first. */
struct cursor { struct pd_gguf *g; size_t at, end; const char *path; struct pd_err *e; };

static const struct { const char *name; size_t size; } value_types[] = {
    [PD_GT_U8] = { "u8", 1 }, [PD_GT_I8] = { "i8", 1 }, [PD_GT_U16] = { "u16", 2 }, [PD_GT_I16] = { "i16", 2 }, [PD_GT_U32] = { "u32", 4 },
    [PD_GT_I32] = { "i32", 4 }, [PD_GT_F32] = { "f32", 4 }, [PD_GT_BOOL] = { "bool", 1 }, [PD_GT_STR] = { "string", 8 }, [PD_GT_ARR] = { "array", 12 },
    [PD_GT_U64] = { "u64", 8 }, [PD_GT_I64] = { "i64", 8 }, [PD_GT_F64] = { "f64", 8 },
};
#define N_VALUE_TYPES (sizeof value_types / sizeof *value_types)
#define MIN_KV 13           /* bytes: an empty key's length, the value's type, one byte */
#define MIN_TENSOR 32       /* an empty name's length, n_dims, one dimension, type, offset */
#define GAPS_MAX (1u << 20)             /* bytes between and after the tensors, beside padding */
#define READ_AHEAD (256u << 10)         /* bytes of header read beyond what is asked for */

struct pd_gguf_shown pd_gguf_show(struct pd_str v)
{
    struct pd_gguf_shown r;
    size_t n = v.n < 64 ? v.n : 64;
    for (size_t i = 0; i < n; i++)
        r.s[i] = v.p[i] >= 0x20 && v.p[i] < 0x7f ? v.p[i] : '?';
    memcpy(r.s + n, v.n > 64 ? "..." : "", v.n > 64 ? 4 : 1);
    return r;
}

static uint32_t load32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static uint64_t load64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }

int pd_gguf_read(const struct pd_gguf *g, uint64_t at, void *buf, size_t n, struct pd_err *e)
{
    uint8_t *to = buf;
    while (n) {
        ssize_t k = pd_fault("read") ? (errno = EIO, -1) : pread(g->fd, to, n, (off_t)at);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            return pd_fail_sys(e, "%s: cannot read at byte %" PRIu64, g->path, at);
        if (!k)
            return pd_fail(e, PD_ECORRUPT, "%s: the file ends at byte %" PRIu64 " now, it had %" PRIu64 " when it was opened: it was cut short meanwhile; put the whole file "
                           "there under another name, then rename it", g->path, at, g->size);
        to += k;
        at += (uint64_t)k;
        n -= (size_t)k;
    }
    return 0;
}

static int64_t ns_of(struct timespec t) { return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec; }

int pd_gguf_unchanged(const struct pd_gguf *g, struct pd_err *e)
{
    struct stat st;
    if (fstat(g->fd, &st))
        return pd_fail_sys(e, "cannot stat model %s", g->path);
    if ((uint64_t)st.st_size != g->size || ns_of(st.st_mtim) != g->mtime_ns)
        return pd_fail(e, PD_ECORRUPT, "%s: the file was written to while it was read (%" PRIu64 " bytes then, %lld now): what was loaded may be of two models; put the new file there "
                       "under another name, then rename it", g->path, g->size, (long long)st.st_size);
    return 0;
}

/* The header up to `need` in memory, some of what follows with it. */
static int fill(struct cursor *c, size_t need)
{
    struct pd_gguf *g = c->g;
    size_t upto = c->end - need > READ_AHEAD ? need + READ_AHEAD : c->end;
    if (need <= g->n_head)
        return 0;
    int rc = pd_gguf_read(g, g->n_head, g->head + g->n_head, upto - g->n_head, c->e);
    if (!rc)
        g->n_head = upto;
    return rc;
}

/* The next n bytes in *p. */
static int take(struct cursor *c, uint64_t n, const char *field, const uint8_t **p)
{
    if (n > c->end - c->at) {
        if (c->end < c->g->size)
            return pd_fail(c->e, PD_ECORRUPT, "%s: %s at byte %zu runs past %zu bytes of header, more than any model needs: the file is damaged", c->path, field, c->at, c->end);
        return pd_fail(c->e, PD_ECORRUPT, "%s: %s at byte %zu needs %" PRIu64 " bytes, %zu are left: the file is cut short or damaged, fetch it again",
                       c->path, field, c->at, n, c->end - c->at);
    }
    int rc = fill(c, c->at + n);
    *p = c->g->head + c->at;
    if (!rc)
        c->at += n;
    return rc;
}

static int take_u32(struct cursor *c, const char *field, uint32_t *v)
{
    const uint8_t *p;
    int rc = take(c, 4, field, &p);
    *v = rc ? 0 : load32(p);
    return rc;
}

static int take_u64(struct cursor *c, const char *field, uint64_t *v)
{
    const uint8_t *p;
    int rc = take(c, 8, field, &p);
    *v = rc ? 0 : load64(p);
    return rc;
}

static int take_str(struct cursor *c, const char *field, uint64_t max, struct pd_str *s)
{
    const uint8_t *p;
    uint64_t n;
    size_t at = c->at;
    int rc = take_u64(c, field, &n);
    if (rc)
        return rc;
    if (n > max)
        return pd_fail(c->e, PD_ECORRUPT, "%s: the length of %s at byte %zu is %" PRIu64 ", the most is %" PRIu64, c->path, field, at, n, max);
    rc = take(c, n, field, &p);
    *s = (struct pd_str){ (const char *)p, n };
    return rc;
}

/* A count is believed only as far as the file could hold that many. */
static int check_count(struct cursor *c, const char *field, size_t at, uint64_t n, uint64_t min_bytes, uint64_t max)
{
    if (n > (c->g->size - c->at) / min_bytes)
        return pd_fail(c->e, PD_ECORRUPT, "%s: %s at byte %zu is %" PRIu64 ", more than the %" PRIu64 " bytes after it can hold: the file is damaged", c->path, field, at, n, c->g->size - c->at);
    if (n > max)
        return pd_fail(c->e, PD_ECORRUPT, "%s: %s at byte %zu is %" PRIu64 ", the most is %" PRIu64, c->path, field, at, n, max);
    return 0;
}

/* --- hash tables over keys and tensor names --- */

static int table_new(size_t n, uint32_t **slots, size_t *mask, struct pd_err *e)
{
    size_t cap = 16;
    while (cap < 2 * n)
        cap *= 2;
    *mask = cap - 1;
    return (*slots = pd_calloc(cap, sizeof **slots, "a table of names", e)) ? 0 : PD_ENOMEM;
}

/* The slot that holds `name` or the empty one where it belongs. names: the pd_str that begins each element of `stride` bytes. */
static uint32_t *table_slot(uint32_t *slots, size_t mask, uint64_t seed, const void *names, size_t stride, struct pd_str name)
{
    for (size_t i = pd_xxh3(name.p, name.n, seed) & mask;; i = (i + 1) & mask) {
        if (!slots[i])
            return &slots[i];
        const struct pd_str *s = (const void *)((const uint8_t *)names + (slots[i] - 1) * stride);
        if (s->n == name.n && !memcmp(s->p, name.p, name.n))
            return &slots[i];
    }
}

/* --- metadata --- */

static int parse_value(struct cursor *c, struct pd_gguf_kv *kv, const char *key)
{
    const uint8_t *p;
    char field[96];
    int rc;
    snprintf(field, sizeof field, "the value of '%s'", key);
    size_t at = c->at;
    if ((rc = take_u32(c, field, &kv->type)))
        return rc;
    if (kv->type >= N_VALUE_TYPES)
        return pd_fail(c->e, PD_ECORRUPT, "%s: the type of '%s' at byte %zu is %u, GGUF has 0 to 12", c->path, key, at, kv->type);
    kv->offset = c->at;
    kv->count = 1;
    kv->elem_type = kv->type;
    if (kv->type == PD_GT_ARR) {
        if ((rc = take_u32(c, field, &kv->elem_type)) || (rc = take_u64(c, field, &kv->count)))
            return rc;
        if (kv->elem_type >= N_VALUE_TYPES || kv->elem_type == PD_GT_ARR)
            return pd_fail(c->e, PD_ECORRUPT, "%s: the element type of '%s' at byte %" PRIu64 " is %u; numbers, bools and strings are taken, arrays of arrays are not",
                           c->path, key, kv->offset, kv->elem_type);
        snprintf(field, sizeof field, "the count of '%s'", key);
        if ((rc = check_count(c, field, kv->offset + 4, kv->count, value_types[kv->elem_type].size, PD_GGUF_MAX_ARRAY)))
            return rc;
        snprintf(field, sizeof field, "an element of '%s'", key);
    }
    kv->data = c->g->head + c->at;
    if (kv->elem_type != PD_GT_STR)
        return take(c, kv->count * value_types[kv->elem_type].size, field, &p);     /* count <= 2^21 */
    struct pd_str s;
    for (uint64_t i = 0; i < kv->count; i++)
        if ((rc = take_str(c, field, PD_GGUF_MAX_HEADER, &s)))
            return rc;
    return 0;
}

static int parse_metadata(struct pd_gguf *g, struct cursor *c, uint64_t n_kv)
{
    int rc;
    if (!(g->kv = pd_calloc(n_kv, sizeof *g->kv, "the keys of a model", c->e)) || table_new(n_kv, &g->kv_slot, &g->kv_mask, c->e))
        return PD_ENOMEM;
    for (; g->n_kv < n_kv; g->n_kv++) {
        struct pd_gguf_kv *kv = &g->kv[g->n_kv];
        size_t at = c->at;
        if ((rc = take_str(c, "a key", 65535, &kv->key)))
            return rc;
        struct pd_gguf_shown key = pd_gguf_show(kv->key);
        uint32_t *slot = table_slot(g->kv_slot, g->kv_mask, g->seed, g->kv, sizeof *g->kv, kv->key);
        if (*slot)
            return pd_fail(c->e, PD_ECORRUPT, "%s: key '%s' at byte %zu occurs twice", c->path, key.s, at);
        *slot = (uint32_t)g->n_kv + 1;
        if ((rc = parse_value(c, kv, key.s)))
            return rc;
    }
    return 0;
}

/* --- tensors --- */

/* Bytes of the tensor, every product checked: a wrapped one passes each later test. */
static int tensor_bytes(struct cursor *c, struct pd_gguf_tensor *t, const char *name)
{
    uint64_t at = t->entry;
    const struct pd_dtype_traits *ty = pd_dtype_traits(t->type);
    if (!ty)
        return pd_fail(c->e, PD_EINCOMPAT, "%s: tensor '%s' at byte %" PRIu64 " has type %u (%s); supported are " PD_DTYPE_LIST, c->path, name, at, t->type, pd_ggml_type_name(t->type));
    uint64_t n = 1;
    for (int i = 0; i < 4; i++)
        if (t->ne[i] == 0 || t->ne[i] > INT64_MAX || __builtin_mul_overflow(n, t->ne[i], &n) || n > INT64_MAX)
            return pd_fail(c->e, PD_ECORRUPT, "%s: tensor '%s' at byte %" PRIu64 ": dimensions %" PRIu64 " x %" PRIu64 " x %" PRIu64 " x %" PRIu64 " are %s", c->path, name, at,
                           t->ne[0], t->ne[1], t->ne[2], t->ne[3], t->ne[i] ? "more than 2^63 elements" : "empty");
    if (t->ne[0] % (uint64_t)ty->block)
        return pd_fail(c->e, PD_ECORRUPT, "%s: tensor '%s' at byte %" PRIu64 ": rows of %" PRIu64 " elements are no multiple of %s's block of %d", c->path, name, at, t->ne[0], ty->name, ty->block);
    if (__builtin_mul_overflow(n / (uint64_t)ty->block, (uint64_t)ty->block_bytes, &t->bytes))
        return pd_fail(c->e, PD_ECORRUPT, "%s: tensor '%s' at byte %" PRIu64 ": %" PRIu64 " elements overflow the size", c->path, name, at, n);
    return 0;
}

/* Reads one tensor's entry; its offset (relative to the data, whose place is not known yet) goes to *rel. */
static int parse_tensor(struct cursor *c, struct pd_gguf_tensor *t, uint64_t *rel)
{
    uint32_t n_dims;
    t->entry = c->at;
    int rc = take_str(c, "a tensor's name", 63, &t->name);
    if (rc)
        return rc;
    struct pd_gguf_shown name = pd_gguf_show(t->name);
    if ((rc = take_u32(c, "a tensor's n_dims", &n_dims)))
        return rc;
    if (n_dims < 1 || n_dims > 4)
        return pd_fail(c->e, PD_ECORRUPT, "%s: tensor '%s' at byte %" PRIu64 " has %u dimensions, 1 to 4 are possible", c->path, name.s, t->entry, n_dims);
    t->n_dims = (int)n_dims;
    for (uint32_t i = 0; i < 4; i++) {
        t->ne[i] = 1;
        if (i < n_dims && (rc = take_u64(c, "a tensor's dimension", &t->ne[i])))
            return rc;
    }
    if ((rc = take_u32(c, "a tensor's type", &t->type)) || (rc = take_u64(c, "a tensor's offset", rel)))
        return rc;
    return tensor_bytes(c, t, name.s);
}

struct span { uint64_t begin, end; const struct pd_gguf_tensor *t; };

static int by_begin(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* Places the tensors behind the header: aligned, inside the file, no byte in two of them, and few in none (padding is allowed; what a length alone
 * promises, in a file with holes, would all be read for the digest of the weights). */
static int place_tensors(struct pd_gguf *g, struct cursor *c, uint64_t alignment, struct span *sp)
{
    uint64_t room = g->size - g->data_off, used = 0;
    for (size_t i = 0; i < g->n_tensors; i++) {
        struct pd_gguf_tensor *t = &g->tensor[i];
        struct pd_gguf_shown name = pd_gguf_show(t->name);
        uint64_t rel = sp[i].begin;
        if (rel % alignment)
            return pd_fail(c->e, PD_ECORRUPT, "%s: tensor '%s' at byte %" PRIu64 ": offset %" PRIu64 " is no multiple of the alignment %" PRIu64, c->path, name.s, t->entry, rel, alignment);
        if (rel > room || t->bytes > room - rel)
            return pd_fail(c->e, PD_ECORRUPT, "%s: tensor '%s' at byte %" PRIu64 ": %" PRIu64 " bytes at offset %" PRIu64 " (byte %" PRIu64 " of the file) pass the end at %" PRIu64
                           ": the file is cut short or damaged, fetch it again", c->path, name.s, t->entry, t->bytes, rel, rel > room ? UINT64_MAX : g->data_off + rel, g->size);
        t->at = g->data_off + rel;
        sp[i].end = rel + t->bytes;
        used += t->bytes < UINT64_MAX - used ? t->bytes : 0;       /* a sum that wraps overlaps, which is told below */
        sp[i].t = t;
    }
    qsort(sp, g->n_tensors, sizeof *sp, by_begin);
    for (size_t i = 1; i < g->n_tensors; i++)
        if (sp[i].begin < sp[i - 1].end)
            return pd_fail(c->e, PD_ECORRUPT, "%s: tensors '%s' and '%s' overlap at byte %" PRIu64, c->path, pd_gguf_show(sp[i - 1].t->name).s, pd_gguf_show(sp[i].t->name).s,
                           g->data_off + sp[i].begin);
    if (room - used > GAPS_MAX + alignment * g->n_tensors)
        return pd_fail(c->e, PD_ECORRUPT, "%s: %" PRIu64 " of the %" PRIu64 " bytes from byte %" PRIu64 " belong to no tensor: the file is damaged", c->path, room - used, room, g->data_off);
    return 0;
}

static int parse_tensors(struct pd_gguf *g, struct cursor *c, uint64_t n_tensors)
{
    struct span *sp = NULL;
    int64_t alignment = 32;
    int rc = PD_ENOMEM;
    if (!(g->tensor = pd_calloc(n_tensors, sizeof *g->tensor, "the tensors of a model", c->e)) || table_new(n_tensors, &g->tensor_slot, &g->tensor_mask, c->e) ||
        !(sp = pd_calloc(n_tensors, sizeof *sp, "the tensors of a model", c->e)))
        goto out;
    for (; g->n_tensors < n_tensors; g->n_tensors++) {
        struct pd_gguf_tensor *t = &g->tensor[g->n_tensors];
        if ((rc = parse_tensor(c, t, &sp[g->n_tensors].begin)))
            goto out;
        uint32_t *slot = table_slot(g->tensor_slot, g->tensor_mask, g->seed, g->tensor, sizeof *g->tensor, t->name);
        if (*slot) {
            rc = pd_fail(c->e, PD_ECORRUPT, "%s: tensor '%s' at byte %" PRIu64 " occurs twice", c->path, pd_gguf_show(t->name).s, t->entry);
            goto out;
        }
        *slot = (uint32_t)g->n_tensors + 1;
    }
    if ((rc = pd_gguf_get_int(g, "general.alignment", 8, 65536, &alignment, c->e)) < 0)
        goto out;
    rc = 0;
    if (alignment % 8) {
        rc = pd_fail(c->e, PD_ECORRUPT, "%s: general.alignment is %" PRId64 ", it must be a multiple of 8", c->path, alignment);
        goto out;
    }
    g->data_off = (c->at + (uint64_t)alignment - 1) / (uint64_t)alignment * (uint64_t)alignment;
    if (g->data_off > g->size) {
        if (n_tensors) {
            rc = pd_fail(c->e, PD_ECORRUPT, "%s: the tensor data would begin at byte %" PRIu64 ", the file ends at %" PRIu64 ": it is cut short, fetch it again", c->path, g->data_off, g->size);
            goto out;
        }
        g->data_off = g->size;          /* a file of keys alone need not pad */
    }
    rc = place_tensors(g, c, (uint64_t)alignment, sp);
out:
    pd_free(sp);
    return rc;
}

static int parse(struct pd_gguf *g, struct pd_err *e)
{
    size_t most = g->size < PD_GGUF_MAX_HEADER ? (size_t)g->size : PD_GGUF_MAX_HEADER;
    struct cursor c = { g, 0, most, g->path, e };
    uint64_t n_tensors, n_kv;
    const uint8_t *magic;
    int rc;
    if (!(g->head = pd_calloc(most, 1, "a model's header", e)))         /* pages that are not read into are not used */
        return PD_ENOMEM;
    if ((rc = take(&c, 4, "the magic", &magic)))
        return rc;
    if (memcmp(magic, "GGUF", 4))
        return pd_fail(e, PD_ECORRUPT, "%s: bytes 0 to 3 are '%s', not 'GGUF': give a GGUF file", g->path, pd_gguf_show((struct pd_str){ (const char *)magic, 4 }).s);
    if ((rc = take_u32(&c, "the version", &g->version)))
        return rc;
    if (g->version != 2 && g->version != 3)
        return pd_fail(e, PD_EINCOMPAT, g->version & 0xffff ? "%s: GGUF version %u at byte 4; 2 and 3 are supported: convert the model anew"
                                                            : "%s: GGUF version %u at byte 4 reads as a big-endian file; only little-endian ones are supported", g->path, g->version);
    if ((rc = take_u64(&c, "n_tensors", &n_tensors)) || (rc = take_u64(&c, "n_kv", &n_kv)) ||
        (rc = check_count(&c, "n_tensors", 8, n_tensors, MIN_TENSOR, PD_GGUF_MAX_ENTRIES)) || (rc = check_count(&c, "n_kv", 16, n_kv, MIN_KV, PD_GGUF_MAX_ENTRIES)))
        return rc;
    if ((rc = parse_metadata(g, &c, n_kv)))
        return rc;
    return parse_tensors(g, &c, n_tensors);
}

static int open_file(struct pd_gguf *g, struct pd_err *e)
{
    struct stat st;
    g->fd = open(g->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);      /* a FIFO must not block; it is refused below */
    if (g->fd < 0)
        return pd_fail_sys(e, "cannot open model %s", g->path);
    if (fstat(g->fd, &st))
        return pd_fail_sys(e, "cannot stat model %s", g->path);
    if (!S_ISREG(st.st_mode))
        return pd_fail(e, PD_EFAIL, "model %s is not a regular file; give the path of a GGUF file", g->path);
    if (st.st_size < 24)
        return pd_fail(e, PD_ECORRUPT, "%s: %lld bytes are too few for a GGUF file (24 at least)", g->path, (long long)st.st_size);
    g->size = (uint64_t)st.st_size;
    g->mtime_ns = ns_of(st.st_mtim);
    return 0;
}

int pd_gguf_open(const char *path, struct pd_gguf **out, struct pd_err *e)
{
    struct pd_gguf *g = pd_calloc(1, sizeof *g, "a model file", e);
    int rc = PD_ENOMEM;
    *out = NULL;
    if (!g)
        return rc;
    g->fd = -1;
    g->seed = (uint64_t)pd_mono_ns() ^ (uintptr_t)g;        /* names are chosen by a stranger: their collisions should not be */
    if (!(g->path = pd_strndup(path, strlen(path), e)) || (rc = open_file(g, e)) || (rc = parse(g, e))) {
        pd_gguf_close(g);
        return rc;
    }
    *out = g;
    return 0;
}

void pd_gguf_close(struct pd_gguf *g)
{
    if (!g)
        return;
    pd_free(g->head);
    if (g->fd >= 0)
        close(g->fd);
    pd_free(g->kv);
    pd_free(g->tensor);
    pd_free(g->kv_slot);
    pd_free(g->tensor_slot);
    pd_free(g->path);
    pd_free(g);
}

const struct pd_gguf_kv *pd_gguf_find(const struct pd_gguf *g, const char *key)
{
    uint32_t i = *table_slot(g->kv_slot, g->kv_mask, g->seed, g->kv, sizeof *g->kv, (struct pd_str){ key, strlen(key) });
    return i ? &g->kv[i - 1] : NULL;
}

const struct pd_gguf_tensor *pd_gguf_tensor(const struct pd_gguf *g, const char *name)
{
    uint32_t i = *table_slot(g->tensor_slot, g->tensor_mask, g->seed, g->tensor, sizeof *g->tensor, (struct pd_str){ name, strlen(name) });
    return i ? &g->tensor[i - 1] : NULL;
}

/* --- typed getters --- */

static int wrong_type(const struct pd_gguf *g, const struct pd_gguf_kv *kv, const char *want, struct pd_err *e)
{
    bool arr = kv->type == PD_GT_ARR;
    return pd_fail(e, PD_ECORRUPT, "%s: '%s' at byte %" PRIu64 " is %s%s, expected %s", g->path, pd_gguf_show(kv->key).s, kv->offset, arr ? "an array of " : "of type ",
                   value_types[kv->elem_type].name, want);
}

/* An integer of any width, as is; false when it is none or a u64 past INT64_MAX. */
static bool int_value(uint32_t type, const uint8_t *p, int64_t *v)
{
    switch (type) {
    case PD_GT_U8: *v = *p; return true;
    case PD_GT_I8: *v = (int8_t)*p; return true;
    case PD_GT_U16: *v = (uint16_t)(p[0] | p[1] << 8); return true;
    case PD_GT_I16: *v = (int16_t)(p[0] | p[1] << 8); return true;
    case PD_GT_U32: *v = load32(p); return true;
    case PD_GT_I32: *v = (int32_t)load32(p); return true;
    case PD_GT_U64: *v = load64(p) > INT64_MAX ? INT64_MAX : (int64_t)load64(p); return true;       /* past any range that is asked for */
    case PD_GT_I64: *v = (int64_t)load64(p); return true;
    default: return false;
    }
}

int pd_gguf_get_int(const struct pd_gguf *g, const char *key, int64_t lo, int64_t hi, int64_t *v, struct pd_err *e)
{
    const struct pd_gguf_kv *kv = pd_gguf_find(g, key);
    int64_t x;
    if (!kv)
        return 0;
    if (!int_value(kv->type, kv->data, &x))
        return wrong_type(g, kv, "an integer", e);
    if (x < lo || x > hi)
        return pd_fail(e, PD_ECORRUPT, "%s: '%s' at byte %" PRIu64 " is %" PRId64 ", possible are %" PRId64 " to %" PRId64, g->path, key, kv->offset, x, lo, hi);
    *v = x;
    return 1;
}

int pd_gguf_get_f64(const struct pd_gguf *g, const char *key, double *v, struct pd_err *e)
{
    const struct pd_gguf_kv *kv = pd_gguf_find(g, key);
    double d;
    int64_t i;
    if (!kv)
        return 0;
    if (kv->type == PD_GT_F32) {
        float f;
        memcpy(&f, kv->data, 4);
        d = f;
    } else if (kv->type == PD_GT_F64) {
        memcpy(&d, kv->data, 8);
    } else if (int_value(kv->type, kv->data, &i)) {
        d = (double)i;
    } else {
        return wrong_type(g, kv, "a number", e);
    }
    if (!isfinite(d))
        return pd_fail(e, PD_ECORRUPT, "%s: '%s' at byte %" PRIu64 " is not a finite number", g->path, key, kv->offset);
    *v = d;
    return 1;
}

int pd_gguf_get_bool(const struct pd_gguf *g, const char *key, bool *v, struct pd_err *e)
{
    const struct pd_gguf_kv *kv = pd_gguf_find(g, key);
    if (!kv)
        return 0;
    if (kv->type != PD_GT_BOOL)
        return wrong_type(g, kv, "a bool", e);
    if (*kv->data > 1)
        return pd_fail(e, PD_ECORRUPT, "%s: '%s' at byte %" PRIu64 " is %u, a bool is 0 or 1", g->path, key, kv->offset, *kv->data);
    *v = *kv->data;
    return 1;
}

int pd_gguf_get_str(const struct pd_gguf *g, const char *key, struct pd_str *v, struct pd_err *e)
{
    const struct pd_gguf_kv *kv = pd_gguf_find(g, key);
    if (!kv)
        return 0;
    if (kv->type != PD_GT_STR)
        return wrong_type(g, kv, "a string", e);
    *v = (struct pd_str){ (const char *)kv->data + 8, load64(kv->data) };       /* its length was checked by the parser */
    return 1;
}

/* The array of `key`; 0 absent. elem2: a second type that will do. */
static int find_array(const struct pd_gguf *g, const char *key, uint32_t elem, uint32_t elem2, const char *want, const struct pd_gguf_kv **out, struct pd_err *e)
{
    const struct pd_gguf_kv *kv = pd_gguf_find(g, key);
    if (!kv)
        return 0;
    if (kv->type != PD_GT_ARR || (kv->elem_type != elem && kv->elem_type != elem2))
        return wrong_type(g, kv, want, e);
    *out = kv;
    return 1;
}

int pd_gguf_get_strs(const struct pd_gguf *g, const char *key, struct pd_str **v, size_t *n, struct pd_err *e)
{
    const struct pd_gguf_kv *kv = NULL;
    int rc = find_array(g, key, PD_GT_STR, PD_GT_STR, "an array of strings", &kv, e);
    if (rc <= 0)
        return rc;
    struct pd_str *s = pd_calloc(kv->count, sizeof *s, key, e);
    if (!s)
        return PD_ENOMEM;
    const uint8_t *p = kv->data;
    for (uint64_t i = 0; i < kv->count; i++) {
        s[i] = (struct pd_str){ (const char *)p + 8, load64(p) };
        p += 8 + s[i].n;
    }
    *v = s;
    *n = kv->count;
    return 1;
}

/* A copy of 4-byte elements. */
static int copy_array(const struct pd_gguf_kv *kv, const char *key, void **v, size_t *n, struct pd_err *e)
{
    if (!(*v = pd_calloc(kv->count, 4, key, e)))
        return PD_ENOMEM;
    memcpy(*v, kv->data, kv->count * 4);
    *n = kv->count;
    return 1;
}

int pd_gguf_get_i32s(const struct pd_gguf *g, const char *key, int32_t **v, size_t *n, struct pd_err *e)
{
    const struct pd_gguf_kv *kv = NULL;
    void *p = NULL;
    int rc = find_array(g, key, PD_GT_I32, PD_GT_U32, "an array of 32-bit integers", &kv, e);
    if (rc > 0 && (rc = copy_array(kv, key, &p, n, e)) > 0)
        *v = p;
    return rc;
}

int pd_gguf_get_f32s(const struct pd_gguf *g, const char *key, float **v, size_t *n, struct pd_err *e)
{
    const struct pd_gguf_kv *kv = NULL;
    void *p = NULL;
    int rc = find_array(g, key, PD_GT_F32, PD_GT_F32, "an array of f32", &kv, e);
    if (rc > 0 && (rc = copy_array(kv, key, &p, n, e)) > 0)
        *v = p;
    return rc;
}
