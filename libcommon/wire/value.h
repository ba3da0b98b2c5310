/* Values inside a framed record: heads, iteration, canonical copies. For the parts of wire/ (and whoever walks raw msgpack, such as a lease or a fingerprint).
 *
 * Containers are walked here, by heads and skips, without allocation; single values are unpacked by msgpack-c. So a record of 16 million one-byte
 * elements costs no object tree (24 bytes an element in the library). All of it is safe on unframed bytes too: bounds are checked at each step.
 */
#ifndef PD_WIRE_VALUE_H
#define PD_WIRE_VALUE_H
#include <stdbool.h>
#include "../base/mem.h"

#define PD_MAX_KEYS 1024    /* of one map; what needs more is a list */

enum pd_type { PD_T_NIL, PD_T_BOOL, PD_T_INT, PD_T_FLOAT, PD_T_STR, PD_T_BIN, PD_T_ARRAY, PD_T_MAP, PD_T_EXT, PD_T_BAD };

/* The first byte and what follows it: `hdr` bytes of head, then `len` bytes of data, then `count` values (a map's are keys and values). */
struct pd_head { enum pd_type type; uint8_t hdr; uint64_t len, count; };
/* false: fewer than hdr bytes (h->hdr says how many are needed). PD_T_BAD for the byte that msgpack never uses. */
bool pd_head_read(const uint8_t *p, size_t n, struct pd_head *h);
/* All bytes of a value whose first byte tells them and that has no values inside; 0: of any other. Lists of numbers are walked by it. */
extern const uint8_t pd_plain_bytes[256];
enum pd_type pd_value_type(struct pd_bin v);
const char *pd_type_name(enum pd_type t);       /* "a string" */
/* Bytes of the one value at p; 0: malformed or cut. */
size_t pd_value_len(const uint8_t *p, size_t n);

struct pd_iter { const uint8_t *p; size_t n; uint64_t left; };
bool pd_iter_open(struct pd_iter *it, struct pd_bin v, enum pd_type type);      /* PD_T_ARRAY or PD_T_MAP; false: v is something else. left: elements or pairs */
bool pd_iter_next(struct pd_iter *it, struct pd_bin *v);                        /* false: end (left 0) or malformed (left > 0) */
bool pd_iter_pair(struct pd_iter *it, struct pd_str *key, struct pd_bin *v);    /* key.p NULL when the key is no string */

/* Single values; false: another type or out of range. */
bool pd_get_int(struct pd_bin v, int64_t *out);         /* above 2^63-1: false */
bool pd_get_float(struct pd_bin v, double *out);        /* any number */
bool pd_get_bool(struct pd_bin v, bool *out);
bool pd_get_str(struct pd_bin v, struct pd_str *out);   /* bytes as they are: UTF-8 is not checked */
bool pd_get_bin(struct pd_bin v, struct pd_bin *out);

/* v is a map whose keys are distinct strings (at most 1024); else `code`. */
int pd_map_check(struct pd_bin v, int code, struct pd_err *e);
/* Append v in its canonical form: smallest heads, floats as float64. Refused (with `code`), since JSON could not carry them: extension types, non-finite
 * floats, integers past 2^63-1, strings that are not UTF-8, map keys that are no strings, hold NUL or recur, depth past `depth`. */
int pd_value_canon(struct pd_bin v, int depth, int code, struct pd_buf *out, struct pd_err *e);
/* A short text of a value for messages: 17, 1.5, "abc", a map. */
const char *pd_value_text(struct pd_bin v, char *out, size_t cap);
#endif
