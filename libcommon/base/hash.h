/* Hashes: XXH3 (libxxhash) for checksums and block hashes, SHA-256 (OpenSSL) for identity. */
#ifndef PD_BASE_HASH_H
#define PD_BASE_HASH_H
#include <stddef.h>
#include <stdint.h>
#include "err.h"
#define PD_SHA_LEN 32
int pd_sha256(const void *p, size_t n, uint8_t out[PD_SHA_LEN], struct pd_err *e);
/* XXH3-64 with seed, and over several pieces (writer's iovecs) */
uint64_t pd_xxh3(const void *p, size_t n, uint64_t seed);
struct iovec;
uint64_t pd_xxh3v(const struct iovec *v, int n, uint64_t seed);
/* The same bit by bit, of bytes that are at hand for other reasons: begin, add each piece in its order, end. */
struct pd_xxh3_sum { _Alignas(64) uint8_t room[640]; };
void pd_xxh3_begin(struct pd_xxh3_sum *s, uint64_t seed);
void pd_xxh3_add(struct pd_xxh3_sum *s, const void *p, size_t n);
uint64_t pd_xxh3_end(const struct pd_xxh3_sum *s);
void pd_put_be64(uint8_t out[8], uint64_t v);
uint64_t pd_get_be64(const uint8_t in[8]);

/* Digest of a file's bytes [from, size), cached in pd_cache_dir()/digests keyed by device, inode, size, mtime_ns, ctime_ns and `from`;
 * not stored for a file changed in the last 2 s. A cache that cannot be read or written is no error: the digest is computed. */
int pd_file_digest(int fd, const char *path, uint64_t from, uint8_t out[PD_SHA_LEN], struct pd_err *e);
/* ${PD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/pd}, made 0700 when absent. Static storage. NULL with *e when it cannot be made. */
const char *pd_cache_dir(struct pd_err *e);
#endif
