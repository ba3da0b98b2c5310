/* A model file of any bytes: header, every key through every getter, hyperparameters, weights and one embedding row. */
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>
#include "../../libcommon/model/weights.h"

static void read_keys(const struct pd_gguf *g)
{
    char key[256];
    for (size_t i = 0; i < g->n_kv; i++) {
        struct pd_str k = g->kv[i].key, s = { 0 }, *strs = NULL;
        if (k.n >= sizeof key || memchr(k.p, 0, k.n))
            continue;
        memcpy(key, k.p, k.n);
        key[k.n] = 0;
        int64_t n;
        double d;
        bool b;
        size_t count;
        int32_t *ints = NULL;
        float *floats = NULL;
        if (pd_gguf_find(g, key) != &g->kv[i])
            __builtin_trap();
        pd_gguf_get_int(g, key, INT64_MIN, INT64_MAX, &n, NULL);
        pd_gguf_get_f64(g, key, &d, NULL);
        pd_gguf_get_bool(g, key, &b, NULL);
        if (pd_gguf_get_str(g, key, &s, NULL) > 0)
            pd_gguf_show(s);
        if (pd_gguf_get_strs(g, key, &strs, &count, NULL) > 0)
            for (size_t j = 0; j < count; j++)
                pd_gguf_show(strs[j]);
        pd_gguf_get_i32s(g, key, &ints, &count, NULL);
        pd_gguf_get_f32s(g, key, &floats, &count, NULL);
        pd_free(strs);
        pd_free(ints);
        pd_free(floats);
    }
}

static void run_model(struct pd_gguf *g)
{
    struct pd_err e;
    struct pd_model *m = pd_calloc(1, sizeof *m, "a model", &e);
    m->gguf = g;
    if (!pd_config_from_gguf(g, &m->cfg, &e) && !pd_weights_load(m, NULL, &e)) {
        float *row = pd_calloc((size_t)m->cfg.n_embd, sizeof *row, "a row", &e);
        float *cs = pd_calloc((size_t)m->cfg.rope.n_rot * 4, sizeof *cs, "a table", &e);
        pd_model_embed(m, m->cfg.n_vocab - 1, row);
        pd_rope_table(&m->cfg.rope, m->cfg.n_ctx - 1, 4, cs);
        pd_free(row);
        pd_free(cs);
    }
    pd_model_free(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct pd_gguf *g;
    struct pd_err e = { 0 };
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    char path[64];
    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        __builtin_trap();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int rc = pd_gguf_open(path, &g, &e);
    close(fd);
    if (rc) {
        if (rc != e.code || !e.msg[0])
            __builtin_trap();           /* a refusal without a reason */
        return 0;
    }
    read_keys(g);
    run_model(g);
    return 0;
}
