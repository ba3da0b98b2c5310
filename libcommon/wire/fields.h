/* Records by table (internal to wire/): a kind is a list of its fields with type, place in its struct and presence rule; one encoder and one decoder walk it. */
#ifndef PD_WIRE_FIELDS_H
#define PD_WIRE_FIELDS_H
#include "frame.h"
#include "pack.h"
#include "record.h"
#include "value.h"

/* What a decoder needs at hand. `code`: PD_EFAIL for a request (a bad one fails alone), PD_ECORRUPT for what programs write. */
struct pd_unpack { struct pd_arena *a; struct pd_err *e; int code; };

enum pd_field_type {
    PD_F_RUN,       /* char[27] */
    PD_F_STR,       /* struct pd_str, UTF-8 */
    PD_F_CHARS,     /* char[size], short text */
    PD_F_BYTES,     /* uint8_t[size] <-> bin of just that size */
    PD_F_BIN,       /* struct pd_bin <-> bin */
    PD_F_HASH,      /* uint64_t <-> bin of 8 bytes, big-endian */
    PD_F_ID,        /* struct pd_bin, raw string or integer */
    PD_F_MAP,       /* struct pd_bin, raw map */
    PD_F_U32, PD_F_I32, PD_F_I64, PD_F_U64,
    PD_F_FLOAT,     /* float */
    PD_F_DOUBLE,
    PD_F_MS,        /* double, negative: null */
    PD_F_BOOL,
    PD_F_SPREAD,      /* struct pd_spread, left out when all 0 */
    PD_F_I32S,      /* int32_t *, list of whole numbers >= 0; count (uint32_t) at aux */
    PD_F_INDEX,     /* int32_t, >= 0; negative: left out (whoever decodes sets it to -1 before) */
    PD_F_CUSTOM
};
enum {
    PD_FF_REQ = 1,      /* must be there */
    PD_FF_NULL = 2,     /* written as null when absent, not left out */
    PD_FF_COUNT = 4,    /* present when the uint32_t at aux > 0 */
    PD_FF_HAS = 8,      /* present when the bool at aux */
    PD_FF_BIT = 16,     /* present when `bit` in the uint32_t at aux */
    PD_FF_NZ = 32,      /* a number that is left out when 0 */
    PD_FF_ALWAYS = 64,  /* a custom field that is always written */
    PD_FF_MEND = 128    /* words for people: bytes that are no UTF-8 become U+FFFD (elsewhere they are refused), as an error must always be told */
};
struct pd_field {
    const char *name;
    uint8_t type, flags;
    uint16_t off, size, aux;
    uint32_t bit;
    void (*enc)(const void *rec, struct pd_packer *k);                    /* PD_F_CUSTOM: the value */
    int (*dec)(void *rec, struct pd_bin v, struct pd_unpack *u);        /* NULL: written only, or skipped */
};
#define PD_FIELD(T, m) .off = offsetof(T, m), .size = sizeof(((T *)0)->m)

struct pd_table { const char *kind; const struct pd_field *f; int n; int extra; /* offset of struct pd_extra, or -1 */ };

/* Append a map: pd and v first when `top`, then the present fields in the table's order (those in the mask `leave_out` by index excepted), then extra,
 * then room in the count for `more` pairs that the caller packs. */
void pd_fields_encode(const struct pd_table *t, const void *rec, bool top, uint64_t leave_out, uint32_t more, struct pd_packer *k);
/* Fill *rec (zeroed by the caller) from a map. Messages begin with t->kind. */
int pd_fields_decode(const struct pd_table *t, struct pd_bin map, void *rec, struct pd_unpack *u);
/* A whole top-level record: framed, keys distinct, `pd` is t->kind (or absent, when a request), `v` is 1. */
int pd_record_open(const char *kind, const void *rec, size_t n, bool kind_optional, struct pd_unpack *u);
/* After packing: the record obeys the frame's rules, else the buffer is cut back to `from`. Returns k->rc. */
int pd_record_close(struct pd_packer *k, size_t from);

/* A whole top-level record of a table, both ways. a may be NULL where a kind has nothing to keep (its bin then points into rec). */
int pd_table_encode(const struct pd_table *t, const void *rec, struct pd_buf *b, struct pd_err *e);
int pd_table_decode(const struct pd_table *t, const void *rec, size_t n, struct pd_arena *a, void *out, struct pd_err *e);

/* Shared by several kinds. */
int pd_unpack_str(const char *name, struct pd_bin v, struct pd_str *out, struct pd_unpack *u);
int pd_unpack_int(const char *name, struct pd_bin v, int64_t lo, int64_t hi, int64_t *out, struct pd_unpack *u);
int pd_unpack_float(const char *name, struct pd_bin v, float *out, struct pd_unpack *u);
int pd_unpack_ids(const char *name, struct pd_bin v, int32_t **out, uint32_t *n, struct pd_unpack *u);   /* a list of whole numbers >= 0, or bin of int32 LE */
int pd_unpack_raw(const char *name, struct pd_bin v, struct pd_bin *out, struct pd_unpack *u);           /* canonical copy */
int pd_unpack_strs(const char *name, struct pd_bin v, struct pd_str **out, uint32_t *n, struct pd_unpack *u);   /* a list of at most 64 strings */
void pd_pack_strs(const struct pd_str *s, uint32_t n, struct pd_packer *k);
void pd_pack_runs(const char *name, const struct pd_payload_run *runs, uint32_t n, struct pd_packer *k);      /* a list of [base, stride, count, len] */
int pd_unpack_runs(const char *name, struct pd_bin v, struct pd_payload_run **runs, uint32_t *n, struct pd_unpack *u);
void pd_pack_top(struct pd_packer *k, const struct pd_top *top, uint32_t n);
extern const struct pd_table pd_layout_table, pd_fp_table;  /* of struct pd_kv_layout; of {sha, fields} in struct pd_fp_rec */
struct pd_fp_rec { uint8_t sha[PD_SHA_LEN]; struct pd_bin fields; };
int pd_unpack_fp(struct pd_bin v, struct pd_fp_rec *fp, struct pd_unpack *u);    /* canonical, and its SHA right */
int pd_unpack_top(struct pd_bin v, struct pd_top **top, uint32_t *n, struct pd_unpack *u);

/* A request inside another record has no pd, v and run, and may lack its prompt (its tokens are the record's own). */
void pd_request_pack_inside(const struct pd_request *r, struct pd_packer *k);
int pd_request_unpack_inside(struct pd_bin v, struct pd_request *r, struct pd_unpack *u);
#endif
