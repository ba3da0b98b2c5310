/* UTF-8 as in RFC 3629: no overlong forms, no surrogates, nothing past U+10FFFF. */
#ifndef PD_BASE_UTF8_H
#define PD_BASE_UTF8_H
#include <stddef.h>
#include <stdint.h>
/* Offset of the first byte that is not valid, or -1. */
long pd_utf8_invalid(const char *s, size_t n);
/* Length of the longest prefix that does not end inside a character (for streaming text); invalid bytes count as complete. */
size_t pd_utf8_complete(const char *s, size_t n);
/* Decode one character at s[0..n), n >= 1: its length, *cp set; 1 and U+FFFD for an invalid byte. */
int pd_utf8_next(const char *s, size_t n, uint32_t *cp);
int pd_utf8_put(uint32_t cp, char out[4]);
#endif
