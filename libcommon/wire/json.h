/* The JSON Lines bridge: one JSON object <-> one msgpack map, lossless for every record that our writers write (jansson).
 * bin is {"$b64":"..."}; a user map whose only key is "$b64" gets one more "$", undone on the way back. 64-bit integers, finite float64 (a float
 * keeps its ".0"; non-finite refused), strings that may hold NUL. A duplicate key, invalid UTF-8 (with its byte offset) and depth > 16 are refused. */
#ifndef PD_WIRE_JSON_H
#define PD_WIRE_JSON_H
#include "../base/mem.h"
int pd_json_to_msgpack(const char *line, size_t n, struct pd_buf *out, struct pd_err *e);
int pd_msgpack_to_json(const void *rec, size_t n, struct pd_buf *out, struct pd_err *e);   /* no newline added */
#endif
