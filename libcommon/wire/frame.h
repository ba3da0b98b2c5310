/* Framing: where does one msgpack record end, decided by a skip-scan of our own before msgpack-c sees it (the library allocates from headers,
 * so five hostile bytes would ask for gigabytes). Every count is held against the bytes left, depth against 16, size against max_record;
 * map keys must be strings without duplicates at the top level. */
#ifndef PD_WIRE_FRAME_H
#define PD_WIRE_FRAME_H
#include <stddef.h>
#include <stdint.h>
#include "../base/err.h"
#define PD_MAX_RECORD_DEFAULT (16u << 20)
#define PD_MAX_DEPTH 16
/* A scan that can be continued as bytes arrive without starting over (a 16 MiB record must not cost a quadratic scan). Zero-initialise for each record. */
struct pd_frame_scan { size_t at; uint32_t depth; uint64_t left[PD_MAX_DEPTH + 1]; };
/* 1: the record is p[0 .. *len); 0: more bytes needed (*len = a lower bound of the bytes needed in all); < 0: PD_ECORRUPT, message with the offset from p. */
int pd_frame_next(struct pd_frame_scan *s, const uint8_t *p, size_t n, size_t max_record, size_t *len, struct pd_err *e);
/* Checks one whole record that was framed: the top is a map whose keys are distinct strings. */
int pd_frame_check(const uint8_t *p, size_t n, struct pd_err *e);
#endif
