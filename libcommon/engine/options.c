#include <hdf5.h>
#include <jansson.h>
#include <msgpack.h>
#include <openssl/crypto.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <xxhash.h>
#include <zstd.h>
#include "options.h"

struct pd_engine_cli pd_engine_cli;

struct poptOption pd_engine_options[] = {
    { "model", 'm', POPT_ARG_STRING, &pd_engine_cli.model, 0, "model file (GGUF)", "FILE" },
    { "trace", '\0', POPT_ARG_STRING, &pd_engine_cli.trace, 0, "append the life of each run to FILE", "FILE" },
    { "trace-max", '\0', POPT_ARG_STRING, &pd_engine_cli.trace_max, 0, "begin a new trace before it grows past SIZE; the old one becomes FILE.1 (default: never)", "SIZE" },
    { "threads", 't', POPT_ARG_INT, &pd_engine_cli.threads, 0, "compute threads (default: the physical cores of the affinity mask)", "N" },
    { "chunk", '\0', POPT_ARG_INT, &pd_engine_cli.chunk, 0, "prompt tokens a step at the most (default 512)", "N" },
    { "max-seqs", '\0', POPT_ARG_INT, &pd_engine_cli.max_seqs, 0, "sequences that run at once (default 64)", "N" },
    { "kv-dtype", '\0', POPT_ARG_STRING, &pd_engine_cli.kv_dtype, 0, "type of the KV cache: f16, bf16, f32 (default f16; f32 for an F32 model)", "TYPE" },
    { "kv-mem", '\0', POPT_ARG_STRING, &pd_engine_cli.kv_mem, 0, "size of the KV pool (default: the smaller of an eighth of memory and 16 contexts)", "SIZE" },
    { "block-size", '\0', POPT_ARG_INT, &pd_engine_cli.block_size, 0, "tokens a KV block (default 16)", "N" },
    { "prefix-cache", '\0', POPT_ARG_STRING, &pd_engine_cli.prefix_cache, 0, "daemons: keep the KV of what was computed for prompts that begin alike: on, off, lru-tail, lru (default on)",
      "HOW" },
    { "chat-template", '\0', POPT_ARG_STRING, &pd_engine_cli.chat_template, 0, "chat format: chatml, llama2, llama3, or a file (default: the model's own)", "NAME" },
    { "seed", '\0', POPT_ARG_STRING, &pd_engine_cli.seed_text, 0, "seed of requests that bring none, 0 to 2^63-1 (default 0)", "N" },
    { "domain", '\0', POPT_ARG_STRING, &pd_engine_cli.domain, 0, "the transfer domain that this process is in (default local)", "NAME" },
    { "epoch", '\0', POPT_ARG_STRING, &pd_engine_cli.epoch, 0, "the deployment, counted: KV of another one is not used (default 0)", "N" },
    { "lines", '\0', POPT_ARG_NONE, &pd_engine_cli.lines, 0, "input that is neither JSON nor records is one prompt a line", NULL },
    POPT_TABLEEND
};

static int in_range(const char *option, int v, int lo, int hi, int example, struct pd_err *e)
{
    if (v == 0 || (v >= lo && v <= hi))
        return 0;
    return pd_fail(e, PD_EUSAGE, "%s: %d is out of range %d to %d (example: %s %d)", option, v, lo, hi, option, example);
}

int pd_engine_open(const char *role, struct pd_runtime *rt, struct pd_err *e)
{
    const struct pd_engine_cli *c = &pd_engine_cli;
    int64_t mem = 0, epoch = 0;
    int rc;
    memset(rt, 0, sizeof *rt);
    if (!c->model)
        return pd_fail(e, PD_EUSAGE, "-m: a model file is needed (example: -m model.gguf)");
    if ((rc = in_range("--chunk", c->chunk, 1, 65536, 512, e)) < 0 || (rc = in_range("--max-seqs", c->max_seqs, 1, 4096, 64, e)) < 0 ||
        (rc = in_range("--block-size", c->block_size, 1, 1024, 16, e)) < 0)
        return rc;
    if (c->threads < 0 || c->threads > 1024)
        return pd_fail(e, PD_EUSAGE, "-t: %d threads are out of range 1 to 1024 (example: -t 8)", c->threads);
    if (c->seed_text && (rc = pd_parse_int(c->seed_text, 0, INT64_MAX, &pd_engine_cli.seed, e)) < 0)
        return pd_err_prefix(e, "--seed"), rc;
    if (c->kv_mem && (pd_parse_size(c->kv_mem, &mem, e) < 0 || mem <= 0))
        return pd_fail(e, PD_EUSAGE, "--kv-mem: '%s' is not a size (example: --kv-mem 512MiB)", c->kv_mem);
    if (c->epoch && (rc = pd_parse_int(c->epoch, 0, INT64_MAX, &epoch, e)) < 0)
        return pd_err_prefix(e, "--epoch"), rc;
    enum pd_evict evict = PD_EVICT_LRU_TAIL;
    const char *pc = c->prefix_cache;
    if (pc && !c->serving)
        return pd_fail(e, PD_EUSAGE, "--prefix-cache: it is for daemons (add --listen unix:PATH)");
    if (pc && strcmp(pc, "on") && strcmp(pc, "off") && !pd_evict_parse(pc, &evict))
        return pd_fail(e, PD_EUSAGE, "--prefix-cache: '%s' is unknown (on, off, lru-tail or lru)", pc);
    struct pd_runtime_opts o = { .model = c->model, .chat_template = c->chat_template, .role = role, .threads = c->threads, .kv_dtype = c->kv_dtype,
                                 .block_size = c->block_size, .kv_mem = mem, .chunk = c->chunk, .max_seqs = c->max_seqs, .domain = c->domain,
                                 .epoch = (uint64_t)epoch, .serving = c->serving, .prefix_cache = c->serving && !(pc && !strcmp(pc, "off")), .evict = evict };
    return pd_runtime_open(&o, rt, e);
}

int pd_engine_trace(const char *role, const struct pd_runtime *rt, struct pd_trace **t, struct pd_err *e)
{
    const struct pd_engine_cli *c = &pd_engine_cli;
    int64_t max = 0;
    int rc;
    if (c->trace_max && (pd_parse_size(c->trace_max, &max, e) < 0 || max < 4096))
        return pd_fail(e, PD_EUSAGE, "--trace-max: '%s' is not a size of 4KiB or more (example: --trace-max 64MiB)", c->trace_max);
    if ((rc = pd_trace_open(c->trace, rt->worker, role, t, e)) < 0)
        return rc;
    pd_trace_limit(*t, (uint64_t)max);
    return pd_trace_about(*t, rt->model->revision, rt->domain, e);
}

int pd_engine_reader(const struct pd_endpoint *from, const char *name, struct pd_rstream **in, struct pd_err *e)
{
    int64_t max = pd_cli_max_record(e);
    if (max < 0)
        return e->code;
    struct pd_rstream_opts o = { .lines = pd_engine_cli.lines, .max_record = (size_t)max, .name = name };
    return pd_rstream_of(from, &o, in, e);
}

int pd_engine_check_tty(int fd, bool text, struct pd_err *e)
{
    if (text || (pd_cli.format && !strcmp(pd_cli.format, "json")) || !isatty(fd))
        return 0;
    return pd_fail(e, PD_EUSAGE, "-o: records are binary and the output is a terminal (use --format json, -o FILE, or a pipe)");
}

void pd_engine_version(void)
{
    const char *why = NULL;
    const struct pd_kernels *k = pd_kernels_cpu(getenv("PD_CPU"), &why);
    unsigned maj, min, rel;
    char pcre[64] = "";
    H5get_libversion(&maj, &min, &rel);
    pcre2_config(PCRE2_CONFIG_VERSION, pcre);
    pcre[strcspn(pcre, " ")] = '\0';
    printf("cpu path: %s%s%s\n", k ? k->name : "none: ", k ? "" : why, "");
    printf("libraries: msgpack %s, hdf5 %u.%u.%u, zstd %s, xxhash %d.%d.%d, jansson %s, pcre2 %s, %s\n", msgpack_version(), maj, min, rel, ZSTD_versionString(),
           (int)(XXH_versionNumber() / 10000), (int)(XXH_versionNumber() / 100 % 100), (int)(XXH_versionNumber() % 100), jansson_version_str(), pcre,
           OpenSSL_version(OPENSSL_VERSION));
}
