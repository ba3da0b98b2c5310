#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>
#include "clock.h"
#include "hash.h"
#include "id.h"

static const char crockford[32] = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";

/* One life: a child after fork is another one, or both would hand out the same names. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    pid_t pid;
    uint64_t ms;
    uint8_t rand[10];       /* of the last run id */
    uint8_t life[8];
    uint64_t counter;
} me;

int pd_random(void *p, size_t n, struct pd_err *e)
{
    for (size_t got = 0; got < n;) {
        ssize_t k = getrandom((uint8_t *)p + got, n - got, 0);
        if (k < 0 && errno != EINTR)
            return pd_fail_sys(e, "cannot draw random bytes for an id");
        got += k > 0 ? (size_t)k : 0;
    }
    return 0;
}

static int be_alive(struct pd_err *e)
{
    if (me.pid == getpid())
        return 0;
    int rc = pd_random(me.life, sizeof me.life, e);
    if (rc)
        return rc;
    me.pid = getpid();
    me.ms = me.counter = 0;
    return 0;
}

/* false when all 80 bits were ones */
static bool increment(uint8_t v[10])
{
    for (int i = 9; i >= 0; i--)
        if (++v[i])
            return true;
    return false;
}

int pd_run_new(char run[PD_RUN_LEN + 1], struct pd_err *e)
{
    pthread_mutex_lock(&lock);
    int rc = be_alive(e);
    uint64_t now = (uint64_t)pd_wall_us() / 1000;
    if (!rc) {
        if (now > me.ms) {
            rc = pd_random(me.rand, sizeof me.rand, e);
            if (!rc)
                me.ms = now;
        } else if (!increment(me.rand))     /* same millisecond, or the clock went back */
            me.ms++;
    }
    uint64_t ms = me.ms;
    uint8_t r[10];
    memcpy(r, me.rand, sizeof r);
    pthread_mutex_unlock(&lock);
    if (rc)
        return rc;
    for (int i = 9; i >= 0; i--, ms >>= 5)
        run[i] = crockford[ms & 31];
    for (int half = 0; half < 2; half++) {
        uint64_t v = 0;
        for (int i = 0; i < 5; i++)
            v = v << 8 | r[half * 5 + i];
        for (int i = 7; i >= 0; i--, v >>= 5)
            run[10 + half * 8 + i] = crockford[v & 31];
    }
    run[PD_RUN_LEN] = 0;
    return 0;
}

bool pd_run_valid(const char *s, size_t n)
{
    if (n != PD_RUN_LEN || s[0] < '0' || s[0] > '7')    /* 48 bits of time leave 3 bits for the first character */
        return false;
    for (size_t i = 0; i < n; i++)
        if (!memchr(crockford, s[i], sizeof crockford))
            return false;
    return true;
}

int pd_gen_new(uint8_t gen[PD_GEN_LEN], struct pd_err *e)
{
    pthread_mutex_lock(&lock);
    int rc = be_alive(e);
    if (!rc) {
        memcpy(gen, me.life, 8);
        pd_put_be64(gen + 8, ++me.counter);
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

void pd_hex(const uint8_t *p, size_t n, char *out)
{
    static const char digit[16] = "0123456789abcdef";
    for (size_t i = 0; i < n; i++) {
        out[2 * i] = digit[p[i] >> 4];
        out[2 * i + 1] = digit[p[i] & 15];
    }
    out[2 * n] = 0;
}
