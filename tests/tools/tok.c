/* Tokenise from the shell, for tests: one text a line in hex on stdin, one line out: the ids, a tab, the bytes that they decode to in hex;
 * or "error: ..." for a text that is refused. On stderr with -t: the processor time of loading and tokenising.
 *   tok [-s] [-b] [-t] MODEL       -s: find special tokens in the text; -b: begin as the model's own flags say */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include "../../libcommon/model/tokenizer.h"

/* Of this process, so that a busy machine does not matter. */
static int64_t cpu_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static int hex_digit(int c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

static int decode_all(const struct pd_tokenizer *t, const struct pd_buf *ids, bool special, struct pd_buf *back, struct pd_err *e)
{
    back->n = 0;
    for (size_t i = 0; i < ids->n / 4; i++) {
        const int32_t *id = (const int32_t *)ids->p + i;
        int r = pd_detokenize(t, *id, special, i == 0 || pd_tokenizer_is_control(t, id[-1]), back, e);
        if (r)
            return r;
    }
    return 0;
}

int main(int argc, char **argv)
{
    bool special = false, bos = false, times = false;
    for (int c; (c = getopt(argc, argv, "sbt")) != -1; ) {
        special |= c == 's';
        bos |= c == 'b';
        times |= c == 't';
        if (c == '?')
            return 2;
    }
    struct pd_err e = { 0 };
    struct pd_gguf *g = NULL;
    struct pd_tokenizer *t = NULL;
    if (argc - optind != 1) {
        fprintf(stderr, "usage: tok [-s] [-b] [-t] MODEL < lines of hex\n");
        return 2;
    }
    if (pd_gguf_open(argv[optind], &g, &e)) {
        fprintf(stderr, "tok: %s\n", e.msg);
        return 1;
    }
    int64_t t0 = cpu_us();
    if (pd_tokenizer_from_gguf(g, &t, &e)) {
        fprintf(stderr, "tok: %s\n", e.msg);
        pd_gguf_close(g);
        return 1;
    }
    if (times)
        fprintf(stderr, "load_us %lld\n", (long long)(cpu_us() - t0));

    struct pd_buf ids = { 0 }, back = { 0 };
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    while ((n = getline(&line, &cap, stdin)) >= 0) {
        size_t len = 0;
        for (ssize_t i = 0; i + 1 < n && hex_digit(line[i]) >= 0; i += 2)
            line[len++] = (char)(hex_digit(line[i]) * 16 + hex_digit(line[i + 1]));
        ids.n = 0;
        int64_t start = cpu_us();
        int r = pd_tokenize(t, line, len, bos, special, &ids, &e);
        int64_t mid = cpu_us();
        if (r || (r = decode_all(t, &ids, special, &back, &e))) {
            printf("error: %s\n", e.msg);
            continue;
        }
        if (times)
            fprintf(stderr, "bytes %zu tokens %zu encode_us %lld decode_us %lld\n", len, ids.n / 4, (long long)(mid - start), (long long)(cpu_us() - mid));
        for (size_t i = 0; i < ids.n / 4; i++)
            printf("%s%d", i ? " " : "", ((int32_t *)ids.p)[i]);
        putchar('\t');
        for (size_t i = 0; i < back.n; i++)
            printf("%02x", back.p[i]);
        putchar('\n');
    }
    free(line);
    pd_buf_free(&ids);
    pd_buf_free(&back);
    pd_tokenizer_free(t);
    pd_gguf_close(g);
    return 0;
}
