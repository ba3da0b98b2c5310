/* A whole stream through the decoder, on a tiny model: offers, chunks, closing descriptors and requests, in any state. Mutations change bytes, or lose,
 * double and exchange records; then most of the time every descriptor gets the sum of what it holds, so that what lies behind is reached.
 * Whatever comes: no block stays taken, and what goes out is records. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "../../libcommon/base/hash.h"
#include "../../libcommon/engine/decoder.h"
#include "../../libcommon/engine/runtime.h"
#include "../../libcommon/wire/frame.h"

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max);

enum { MAX_RECORDS = 64 };

/* The records that lie one after the other; what follows the last whole one is left out. */
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
    if (k > 1 && rand() % 3 == 0) {
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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct pd_runtime rt;
    static int quiet;
    struct pd_err e;
    if (!rt.model) {
        struct pd_runtime_opts o = { .model = "testdata/tiny/llama-q4_1.gguf", .role = "fuzz", .threads = 1, .block_size = 4, .kv_mem = 64 << 10, .chunk = 8, .max_seqs = 4 };
        if (pd_runtime_open(&o, &rt, &e) < 0)
            abort();
        rt.model->cfg.n_ctx = 24;       /* so that no request runs long */
        quiet = dup(STDERR_FILENO);
    }
    /* What the decoder tells a person would fill the log. */
    int null = memory_file(data, 0), in = memory_file(data, size), out = memory_file(data, 0), status = 0;
    dup2(null, STDERR_FILENO);
    struct pd_rstream *rs = NULL;
    struct pd_wstream *ws = NULL;
    struct pd_rstream_opts ro = { .max_record = 1 << 20, .lines = size & 1 };
    struct pd_decode_opts o = { .keep_going = size & 2, .fail_on_mismatch = size & 4, .text = size & 8, .stream = size & 16 };
    if (pd_rstream_new(in, &ro, &rs, &e) < 0 || pd_wstream_new(out, size & 32 ? PD_FMT_JSON : PD_FMT_MSGPACK, false, "out", &ws, &e) < 0)
        abort();
    int rc = pd_decode_run(&rt, &o, rs, ws, NULL, &status, &e);
    pd_wstream_close(ws, NULL);
    pd_rstream_free(rs);
    dup2(quiet, STDERR_FILENO);
    if (rc < 0 || status < 0 || status > 9 || pd_pool_stats(rt.pool).used)
        abort();
    if (!o.text) {              /* records, and nothing else */
        struct pd_rec rec;
        lseek(out, 0, SEEK_SET);
        if (pd_rstream_new(out, NULL, &rs, &e) < 0)
            abort();
        while ((rc = pd_rstream_next(rs, -1, &rec, NULL, &e)) == 1) {}
        if (rc < 0)
            abort();
        pd_rstream_free(rs);
    }
    close(null);
    close(in);
    close(out);
    return 0;
}
