/* Identities: run ids (ULID, https://github.com/ulid/spec: 48 bits of milliseconds, 80 random bits, Crockford base 32, 26 characters)
 * and KV generations (16 bytes: 64 random bits of this process's life, then a big-endian counter). Thread safe. */
#ifndef PD_BASE_ID_H
#define PD_BASE_ID_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "err.h"
#define PD_RUN_LEN 26
#define PD_GEN_LEN 16
int pd_run_new(char run[PD_RUN_LEN + 1], struct pd_err *e);     /* monotonic within a process */
bool pd_run_valid(const char *s, size_t n);
int pd_gen_new(uint8_t gen[PD_GEN_LEN], struct pd_err *e);
int pd_random(void *p, size_t n, struct pd_err *e);     /* what nobody can guess */
void pd_hex(const uint8_t *p, size_t n, char *out /* 2n+1 */);
#endif
