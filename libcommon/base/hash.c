#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#define XXH_STATIC_LINKING_ONLY     /* the streaming state on the stack */
#include <xxhash.h>
#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>        /* the library's SSE2 code, AVX2 or AVX-512, by the processor; without it SSE2 alone */
#endif
#include "fault.h"
#include "hash.h"
#include "id.h"
#include "mem.h"

#define READ_BYTES (1u << 20)
#define SETTLED_NS 2000000000ll     /* a file younger than this may change again within the same time stamp */

int pd_sha256(const void *p, size_t n, uint8_t out[PD_SHA_LEN], struct pd_err *e)
{
    if (!EVP_Digest(p, n, out, NULL, EVP_sha256(), NULL))
        return pd_fail(e, PD_EFAIL, "SHA-256 of %zu bytes failed in libcrypto", n);
    return 0;
}

uint64_t pd_xxh3(const void *p, size_t n, uint64_t seed)
{
    return XXH3_64bits_withSeed(p, n, seed);
}

_Static_assert(sizeof(XXH3_state_t) <= sizeof(struct pd_xxh3_sum) && _Alignof(XXH3_state_t) <= 64, "the state of libxxhash has grown");

void pd_xxh3_begin(struct pd_xxh3_sum *s, uint64_t seed)
{
    XXH3_INITSTATE((XXH3_state_t *)s);
    XXH3_64bits_reset_withSeed((XXH3_state_t *)s, seed);
}

void pd_xxh3_add(struct pd_xxh3_sum *s, const void *p, size_t n) { XXH3_64bits_update((XXH3_state_t *)s, p, n); }
uint64_t pd_xxh3_end(const struct pd_xxh3_sum *s) { return XXH3_64bits_digest((const XXH3_state_t *)s); }

uint64_t pd_xxh3v(const struct iovec *v, int n, uint64_t seed)
{
    if (n == 1)
        return XXH3_64bits_withSeed(v->iov_base, v->iov_len, seed);
    XXH3_state_t s;
    XXH3_INITSTATE(&s);
    XXH3_64bits_reset_withSeed(&s, seed);
    for (int i = 0; i < n; i++)
        XXH3_64bits_update(&s, v[i].iov_base, v[i].iov_len);
    return XXH3_64bits_digest(&s);
}

void pd_put_be64(uint8_t out[8], uint64_t v)
{
    v = __builtin_bswap64(v);
    memcpy(out, &v, 8);
}

uint64_t pd_get_be64(const uint8_t in[8])
{
    uint64_t v;
    memcpy(&v, in, 8);
    return __builtin_bswap64(v);
}

static char cache_path[PATH_MAX - 256];

/* mkdir -p, new directories 0700 */
static int make_dirs(char *path, struct pd_err *e)
{
    for (char *s = path + 1;; s++) {
        char c = *s;
        if (c && c != '/')
            continue;
        *s = 0;
        int bad = mkdir(path, 0700) && errno != EEXIST;
        if (bad)
            pd_fail_sys(e, "cannot make the cache directory %s (set PD_CACHE to one that can be written)", path);
        *s = c;
        if (bad)
            return PD_EFAIL;
        if (!c)
            return 0;
    }
}

const char *pd_cache_dir(struct pd_err *e)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static bool made;
    const char *pd = getenv("PD_CACHE"), *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME"), *dir = NULL;
    int n;
    pthread_mutex_lock(&lock);
    if (made) {
        dir = cache_path;
        goto out;
    }
    if (pd && *pd)
        n = snprintf(cache_path, sizeof cache_path, "%s", pd);
    else if (xdg && *xdg)
        n = snprintf(cache_path, sizeof cache_path, "%s/pd", xdg);
    else if (home && *home)
        n = snprintf(cache_path, sizeof cache_path, "%s/.cache/pd", home);
    else {
        pd_fail(e, PD_EFAIL, "no cache directory: none of PD_CACHE, XDG_CACHE_HOME and HOME is set");
        goto out;
    }
    if (n < 0 || (size_t)n >= sizeof cache_path)
        pd_fail(e, PD_EFAIL, "the cache directory's name is longer than %zu bytes", sizeof cache_path - 1);
    else if (!make_dirs(cache_path, e)) {
        made = true;
        dir = cache_path;
    }
out:
    pthread_mutex_unlock(&lock);
    return dir;
}

static int64_t ns_of(struct timespec t) { return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec; }

/* The name under which a file's digest is kept; false: no usable cache (a directory that others can write is none). */
static bool digest_path(const struct stat *st, uint64_t from, char out[PATH_MAX])
{
    const char *cache = pd_cache_dir(NULL);
    char dir[PATH_MAX - 200];
    struct stat d;
    if (!cache || (size_t)snprintf(dir, sizeof dir, "%s/digests", cache) >= sizeof dir)
        return false;
    if ((mkdir(dir, 0700) && errno != EEXIST) || lstat(dir, &d) || !S_ISDIR(d.st_mode) || d.st_uid != geteuid() || d.st_mode & 022)
        return false;
    snprintf(out, PATH_MAX, "%s/%llx-%llx-%llx-%llx-%llx-%llx", dir, (unsigned long long)st->st_dev, (unsigned long long)st->st_ino,
             (unsigned long long)st->st_size, (unsigned long long)ns_of(st->st_mtim), (unsigned long long)ns_of(st->st_ctim), (unsigned long long)from);
    return true;
}

static int hex_value(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

static bool digest_load(const char *path, uint8_t out[PD_SHA_LEN])
{
    char text[2 * PD_SHA_LEN + 2];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, text, sizeof text);
    close(fd);
    if (n != 2 * PD_SHA_LEN + 1 || text[n - 1] != '\n')
        return false;
    uint8_t v[PD_SHA_LEN];
    for (int i = 0; i < PD_SHA_LEN; i++) {
        int hi = hex_value(text[2 * i]), lo = hex_value(text[2 * i + 1]);
        if (hi < 0 || lo < 0)
            return false;
        v[i] = (uint8_t)(hi << 4 | lo);
    }
    memcpy(out, v, sizeof v);
    return true;
}

static void digest_store(const char *path, const uint8_t sha[PD_SHA_LEN])
{
    char text[2 * PD_SHA_LEN + 2], tmp[PATH_MAX + 16];
    snprintf(tmp, sizeof tmp, "%s.XXXXXX", path);
    int fd = mkostemp(tmp, O_CLOEXEC);
    if (fd < 0)
        return;
    pd_hex(sha, PD_SHA_LEN, text);
    text[2 * PD_SHA_LEN] = '\n';
    bool ok = write(fd, text, 2 * PD_SHA_LEN + 1) == 2 * PD_SHA_LEN + 1;
    ok = !close(fd) && ok;
    if (!ok || rename(tmp, path))
        unlink(tmp);
}

static int digest_compute(int fd, const char *path, uint64_t from, uint64_t size, uint8_t out[PD_SHA_LEN], struct pd_err *e)
{
    int rc = PD_EFAIL;
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    uint8_t *buf = pd_alloc_aligned(READ_BYTES, "reading a file for its digest", e);
    if (!buf) {
        rc = PD_ENOMEM;
        goto out;
    }
    if (!ctx || !EVP_DigestInit_ex(ctx, EVP_sha256(), NULL)) {
        rc = pd_fail(e, PD_EFAIL, "SHA-256 cannot be set up in libcrypto");
        goto out;
    }
    while (from < size) {
        size_t want = size - from < READ_BYTES ? (size_t)(size - from) : READ_BYTES;
        ssize_t n = pd_fault("read") ? (errno = EIO, -1) : pread(fd, buf, want, (off_t)from);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            rc = pd_fail_sys(e, "cannot read %s at byte %llu", path, (unsigned long long)from);
            goto out;
        }
        if (n == 0) {
            rc = pd_fail(e, PD_ECORRUPT, "%s became shorter while it was read (%llu of %llu bytes)", path, (unsigned long long)from, (unsigned long long)size);
            goto out;
        }
        if (!EVP_DigestUpdate(ctx, buf, (size_t)n)) {
            rc = pd_fail(e, PD_EFAIL, "SHA-256 of %s failed in libcrypto", path);
            goto out;
        }
        from += (uint64_t)n;
    }
    rc = EVP_DigestFinal_ex(ctx, out, NULL) ? 0 : pd_fail(e, PD_EFAIL, "SHA-256 of %s failed in libcrypto", path);
out:
    pd_free(buf);
    EVP_MD_CTX_free(ctx);
    return rc;
}

int pd_file_digest(int fd, const char *path, uint64_t from, uint8_t out[PD_SHA_LEN], struct pd_err *e)
{
    struct stat st, after;
    char kept[PATH_MAX];
    if (fstat(fd, &st))
        return pd_fail_sys(e, "cannot stat %s", path);
    if (!S_ISREG(st.st_mode))
        return pd_fail(e, PD_EFAIL, "%s is not a regular file", path);
    if (from > (uint64_t)st.st_size)
        return pd_fail(e, PD_ECORRUPT, "%s has %llu bytes, but its data would begin at %llu", path, (unsigned long long)st.st_size, (unsigned long long)from);
    bool cache = digest_path(&st, from, kept);
    if (cache && digest_load(kept, out))
        return 0;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    int rc = digest_compute(fd, path, from, (uint64_t)st.st_size, out, e);
    if (rc || !cache)
        return rc;
    bool settled = ns_of(now) - ns_of(st.st_mtim) > SETTLED_NS && ns_of(now) - ns_of(st.st_ctim) > SETTLED_NS;
    bool same = !fstat(fd, &after) && after.st_size == st.st_size && ns_of(after.st_mtim) == ns_of(st.st_mtim) && ns_of(after.st_ctim) == ns_of(st.st_ctim);
    if (settled && same)
        digest_store(kept, out);
    return 0;
}
