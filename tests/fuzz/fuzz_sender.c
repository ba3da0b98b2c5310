/* A stream through pd-kvsend: plain, passed on or by way of the pool, and what a peer of the transfer protocol may send to its socket. Mutations change bytes, or
 * lose, double and exchange records; then most of the time every descriptor gets the sum of what it holds. Whatever comes: it ends, and what goes out is records. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include "../../libcommon/base/hash.h"
#include "../../libcommon/serve/sender.h"
#include "../../libcommon/wire/frame.h"
#include "../../libcommon/wire/stream.h"

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max);

enum { MAX_RECORDS = 64 };

static size_t split(const uint8_t *p, size_t n, struct pd_bin *rec)
{
    size_t k = 0;
    for (size_t at = 0, len; at < n && k < MAX_RECORDS; at += len) {
        struct pd_frame_scan scan = { 0 };
        if (pd_frame_next(&scan, p + at, n - at, 1 << 20, &len, NULL) != 1)
            break;
        rec[k++] = (struct pd_bin){ p + at, len };
    }
    return k;
}

static void seal(uint8_t *p, size_t n)
{
    static const uint8_t key[] = { 0xa3, 's', 'u', 'm', 0xc4, 8 };
    if (n > sizeof key + 8 && !memcmp(p + n - 8 - sizeof key, key, sizeof key))
        pd_put_be64(p + n - 8, pd_xxh3(p, n - 8 - sizeof key, 0));
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    struct pd_bin rec[MAX_RECORDS];
    uint8_t *old = malloc(max + 1);
    size_t k, n = 0;
    srand(seed);
    memcpy(old, data, size);
    k = split(old, size, rec);
    if (k > 1 && rand() % 2) {
        size_t a = (size_t)rand() % k, b = (size_t)rand() % k;
        struct pd_bin t = rec[a];
        switch (rand() % 3) {
        case 0: rec[a].n = 0; break;
        case 1: rec[a] = rec[b]; break;
        default: rec[a] = rec[b]; rec[b] = t;
        }
        for (size_t i = 0; i < k && n + rec[i].n <= max; n += rec[i++].n)
            memcpy(data + n, rec[i].p, rec[i].n);
        size = n;
    } else
        size = LLVMFuzzerMutate(data, size, max);
    if (rand() % 4) {
        k = split(data, size, rec);
        for (size_t i = 0; i < k; i++)
            seal((uint8_t *)(uintptr_t)rec[i].p, rec[i].n);
    }
    free(old);
    return size;
}

static int memory_file(const uint8_t *p, size_t n)
{
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (fd < 0 || write(fd, p, n) != (ssize_t)n || lseek(fd, 0, SEEK_SET))
        abort();
    return fd;
}

struct peer { struct sockaddr_un at; const uint8_t *p; size_t n; };

/* Says all it has, then listens to the end. */
static void *speak(void *arg)
{
    struct peer *p = arg;
    char heard[4096];
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    for (int i = 0; connect(fd, (struct sockaddr *)&p->at, sizeof p->at); i++) {
        if (i == 5000)
            abort();
        usleep(200);
    }
    for (size_t at = 0; at < p->n;) {
        ssize_t k = send(fd, p->p + at, p->n - at, MSG_NOSIGNAL);
        if (k <= 0)
            break;
        at += (size_t)k;
    }
    shutdown(fd, SHUT_WR);
    while (read(fd, heard, sizeof heard) > 0) {}
    close(fd);
    return NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int quiet = -1;
    static char listen_at[sizeof(struct sockaddr_un) + 20], file[40];
    struct peer peer = { .at = { .sun_family = AF_UNIX }, .p = data, .n = size };
    struct pd_net net = { .connect_us = 1000 };
    pthread_t t;
    bool socket_ = size > 8 && memmem(data, size < 40 ? size : 40, "hello", 5);
    if (quiet < 0)
        quiet = dup(STDERR_FILENO);
    int null = memory_file(data, 0), in = memory_file(data, size), out = memory_file(data, 0), status = 0;
    struct pd_sender_opts o = { .in = file, .net = &net, .resume_us = 1, .max_record = 1 << 20, .kv_mem = 64 << 10, .chunk_bytes = size & 1 ? 64 : 0,
                                .json = size & 2, .keep_going = size & 4, .via = size & 8 ? "inline" : NULL, .coded = size & 16, .codec = PD_CODEC_ZSTD };
    snprintf(file, sizeof file, "/proc/self/fd/%d", in);
    if (socket_) {
        snprintf(peer.at.sun_path, sizeof peer.at.sun_path, "/tmp/fuzz-sender-%d", (int)getpid());
        snprintf(listen_at, sizeof listen_at, "unix-listen:%s", peer.at.sun_path);
        o.in = listen_at;
    }
    dup2(null, STDERR_FILENO);
    dup2(out, STDOUT_FILENO);
    if (socket_ && pthread_create(&t, NULL, speak, &peer))
        abort();
    struct pd_err e = { 0 };
    int rc = pd_sender_run(&o, &status, &e);
    if (socket_)
        pthread_join(t, NULL);
    dup2(quiet, STDERR_FILENO);
    if (rc > 0 || status < 0 || status > 9 || (rc < 0 && !e.msg[0]))
        abort();
    struct pd_rstream *rs = NULL;
    struct pd_rec rec;
    lseek(out, 0, SEEK_SET);
    if (pd_rstream_new(out, NULL, &rs, &e) < 0)
        abort();
    while ((rc = pd_rstream_next(rs, -1, &rec, NULL, &e)) == 1) {}
    if (rc < 0)
        abort();
    pd_rstream_free(rs);
    close(null);
    close(in);
    close(out);
    return 0;
}
