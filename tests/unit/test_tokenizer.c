/* Tokenizers: ids against those of an independent implementation (testdata/tok), exact round trips, what is refused and how, hostile vocabularies. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include <jansson.h>
#include "../../libcommon/model/bpe.h"
#include "../../libcommon/model/special.h"
#include "../../libcommon/model/tokenizer.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOW 20         /* clocks mean little here */
#else
#define SLOW 1
#endif

/* Of this process, so that a busy machine does not matter. */
static int64_t cpu_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static struct pd_tokenizer *load(const char *path)
{
    struct pd_gguf *g;
    struct pd_tokenizer *t;
    struct pd_err e;
    if (pd_gguf_open(path, &g, &e) || pd_tokenizer_from_gguf(g, &t, &e))
        fail_msg("%s: %s", path, e.msg);
    pd_gguf_close(g);           /* a tokenizer must not lean on the file */
    return t;
}

static void decode(const struct pd_tokenizer *t, const struct pd_buf *ids, struct pd_buf *out)
{
    const int32_t *id = (const int32_t *)ids->p;
    struct pd_err e;
    out->n = 0;
    for (size_t i = 0; i < ids->n / 4; i++)
        assert_int_equal(pd_detokenize(t, id[i], true, i == 0 || pd_tokenizer_is_control(t, id[i - 1]), out, &e), 0);
}

static void check_text(const struct pd_tokenizer *t, const char *s, size_t n, bool special, json_t *want, const char *where, int line)
{
    struct pd_buf ids = { 0 }, back = { 0 };
    struct pd_err e;
    if (pd_tokenize(t, s, n, false, special, &ids, &e))
        fail_msg("%s:%d: %s", where, line, e.msg);
    if (ids.n / 4 != json_array_size(want))
        fail_msg("%s:%d: %zu ids, wanted %zu", where, line, ids.n / 4, json_array_size(want));
    for (size_t i = 0; i < ids.n / 4; i++)
        if (((int32_t *)ids.p)[i] != json_integer_value(json_array_get(want, i)))
            fail_msg("%s:%d: id %zu is %d", where, line, i, ((int32_t *)ids.p)[i]);
    decode(t, &ids, &back);
    if (back.n != n || memcmp(back.p, s, n))
        fail_msg("%s:%d: does not round-trip", where, line);
    pd_buf_free(&ids);
    pd_buf_free(&back);
}

static int check_golden(const struct pd_tokenizer *t, const char *path)
{
    FILE *f = fopen(path, "r");
    char *line = NULL, text[8192];
    size_t cap = 0;
    int n = 0;
    assert_non_null(f);
    while (getline(&line, &cap, f) > 0) {
        json_t *o = json_loads(line, 0, NULL), *ids = json_object_get(o, "ids"), *special = json_object_get(o, "special");
        const char *hex = json_string_value(json_object_get(o, "hex"));
        size_t len = strlen(hex) / 2;
        unsigned byte;
        assert_true(len <= sizeof text);
        for (size_t i = 0; i < len; i++) {
            assert_int_equal(sscanf(hex + 2 * i, "%2x", &byte), 1);
            text[i] = (char)byte;
        }
        n++;
        check_text(t, text, len, false, ids, path, n);
        check_text(t, text, len, true, special ? special : ids, path, n);
        json_decref(o);
    }
    free(line);
    fclose(f);
    return n;
}

static void golden(void **state)
{
    static const char *const names[] = { "gpt-2", "smollm", "qwen2", "llama-bpe", "spm", "spm-noprefix" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[128];
        snprintf(path, sizeof path, "testdata/tok/tok-%s.gguf", names[i]);
        struct pd_tokenizer *t = load(path);
        snprintf(path, sizeof path, "testdata/tok/tok-%s.jsonl", names[i]);
        assert_true(check_golden(t, path) > 100);
        pd_tokenizer_free(t);
    }
}

static void golden_smollm2(void **state)
{
    const char *model = getenv("PD_MODEL");
    if (!model || !*model) {
        printf("# skip: no model\n");
        skip();
    }
    int64_t start = cpu_us();
    struct pd_tokenizer *t = load(model);
    int64_t us = cpu_us() - start;
    assert_true(us < 250000 * SLOW);
    assert_int_equal(pd_tokenizer_vocab(t), 49152);
    assert_int_equal(pd_tokenizer_bos(t), 1);
    assert_int_equal(pd_tokenizer_eos(t), 2);
    assert_true(pd_tokenizer_is_eog(t, 2) && pd_tokenizer_is_eog(t, 0) && !pd_tokenizer_is_eog(t, 1));
    assert_false(pd_tokenizer_add_bos(t));
    assert_int_equal(pd_tokenizer_find(t, "<|im_end|>", 10), 2);
    assert_int_equal(pd_tokenizer_find(t, "<|im_end|", 9), -1);
    assert_true(check_golden(t, "testdata/tok/smollm2.jsonl") > 200);
    pd_tokenizer_free(t);
}

static size_t count(const struct pd_tokenizer *t, const char *s, size_t n, bool special)
{
    struct pd_buf ids = { 0 };
    struct pd_err e;
    if (pd_tokenize(t, s, n, false, special, &ids, &e))
        fail_msg("%s", e.msg);
    size_t k = ids.n / 4;
    pd_buf_free(&ids);
    return k;
}

static void refused_text(void **state)
{
    static const struct { const char *s; size_t n; long at; } bad[] = {
        { "\xff", 1, 0 }, { "abc\xc3", 4, 3 }, { "ab\xc0\x80", 4, 2 }, { "\xe2\x82", 2, 0 }, { "x\xed\xa0\x80y", 5, 1 }, { "\xf4\x90\x80\x80", 4, 0 },
        { "ok \xe2\x82\xac \x80", 8, 7 }, { "a\0\xfe", 3, 2 },
    };
    const char *paths[] = { "testdata/tok/tok-smollm.gguf", "testdata/tok/tok-spm.gguf" };
    for (int k = 0; k < 2; k++) {
        struct pd_tokenizer *t = load(paths[k]);
        struct pd_buf ids = { 0 };
        int32_t before = 7;
        assert_int_equal(pd_buf_add(&ids, &before, sizeof before, NULL), 0);
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
            struct pd_err e = { 0 };
            char want[64];
            snprintf(want, sizeof want, "at byte offset %ld ", bad[i].at);
            assert_int_equal(pd_tokenize(t, bad[i].s, bad[i].n, true, true, &ids, &e), PD_EFAIL);
            assert_non_null(strstr(e.msg, want));
            assert_int_equal(ids.n, 4);         /* nothing half done */
        }
        assert_int_equal(pd_tokenize(t, "", 0, false, true, &ids, NULL), 0);
        assert_int_equal(pd_tokenize(t, NULL, 0, false, true, &ids, NULL), 0);
        assert_int_equal(ids.n, 4);
        for (int id = -1; id <= pd_tokenizer_vocab(t); id += pd_tokenizer_vocab(t) + 1)
            assert_int_equal(pd_detokenize(t, id, true, false, &ids, NULL), PD_EFAIL);
        pd_buf_free(&ids);
        pd_tokenizer_free(t);
    }
}

static void flags_and_specials(void **state)
{
    struct pd_tokenizer *t = load("testdata/tok/tok-spm.gguf");
    struct pd_buf ids = { 0 }, out = { 0 };
    const int32_t *id;
    assert_int_equal(pd_tokenize(t, "<s>", 3, true, false, &ids, NULL), 0);
    id = (const int32_t *)ids.p;
    assert_int_equal(id[0], 1);         /* the model adds BOS, and the text does not become one */
    for (size_t i = 1; i < ids.n / 4; i++)
        assert_true(id[i] > 2);
    ids.n = 0;
    assert_int_equal(pd_tokenize(t, "<s>", 3, true, true, &ids, NULL), 0);
    id = (const int32_t *)ids.p;
    assert_int_equal(ids.n, 8);
    assert_true(id[0] == 1 && id[1] == 1);
    assert_int_equal(pd_detokenize(t, 1, false, false, &out, NULL), 0);
    assert_int_equal(out.n, 0);
    assert_int_equal(pd_detokenize(t, 1, true, false, &out, NULL), 0);
    assert_memory_equal(out.p, "<s>", out.n);
    out.n = 0;
    assert_int_equal(pd_detokenize(t, 3 + 0xe9, false, true, &out, NULL), 0);
    assert_true(out.n == 1 && out.p[0] == 0xe9);
    pd_tokenizer_free(t);

    /* Runs: the same text, control tokens only where the run may hold them, ordinary text as if there were no runs. */
    t = load("testdata/tok/tok-smollm.gguf");
    static const char text[] = "<|im_end|>the <|im_end|> other<|im_end|>";
    struct pd_text_run run[] = { { 13, true }, { 14, false }, { 13, true } };
    int end = pd_tokenizer_find(t, "<|im_end|>", 10), n = 0;
    ids.n = 0;
    assert_int_equal(pd_tokenize_runs(t, text, run, 3, false, &ids, NULL), 0);
    for (size_t i = 0; i < ids.n / 4; i++)
        n += ((int32_t *)ids.p)[i] == end;
    assert_int_equal(n, 2);
    assert_int_equal(((int32_t *)ids.p)[0], end);
    struct pd_text_run whole = { 12, true }, cut[] = { { 5, true }, { 3, false }, { 4, true } };
    struct pd_buf a = { 0 }, b = { 0 };
    assert_int_equal(pd_tokenize_runs(t, "hello others", &whole, 1, false, &a, NULL), 0);
    assert_int_equal(pd_tokenize_runs(t, "hello others", cut, 3, false, &b, NULL), 0);
    assert_true(a.n == b.n && !memcmp(a.p, b.p, a.n));
    pd_buf_free(&a);
    pd_buf_free(&b);
    pd_buf_free(&ids);
    pd_buf_free(&out);
    pd_tokenizer_free(t);
}

/* One long word is a real attack on a merge loop that is quadratic. */
static void long_words(void **state)
{
    enum { N = 1000000 };
    char *s = malloc(N);
    static const char *const names[] = { "gpt-2", "smollm", "qwen2", "llama-bpe", "spm", "spm-noprefix" };
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        char path[128];
        snprintf(path, sizeof path, "testdata/tok/tok-%s.gguf", names[k]);
        struct pd_tokenizer *t = load(path);
        for (int kind = 0; kind < 7; kind++) {
            uint32_t x = 1;
            for (int i = 0; i < N; i++) {
                x = x * 1664525 + 1013904223;
                s[i] = kind == 0 ? 'a' : kind == 1 ? (char)('a' + (x >> 16) % 26) : kind == 2 ? ' ' : kind == 3 ? '\n' : kind == 4 ? "<|im_start|"[i % 11] :
                       kind == 5 ? '\0' : "\xc3\xa9"[i % 2];
            }
            int64_t start = cpu_us();
            size_t n = count(t, s, N, kind == 4);
            int64_t us = cpu_us() - start;
            assert_true(n > 0 && n <= N + 1);
            if (us > 1000000ll * SLOW)
                fail_msg("%s: text %d took %lld us", names[k], kind, (long long)us);
        }
        pd_tokenizer_free(t);
    }
    free(s);
}

/* Where no memory may be made executable PCRE2 interprets: the same ids, and no limit of its own on the text. */
static void without_jit(void **state)
{
    enum { N = 12000000 };
    static const char *const pres[] = { "gpt-2", "smollm", "qwen2", "llama-bpe" };
    const struct pd_str piece[] = { { "\xc4\xa0", 2 }, { "a", 1 }, { "\xc4\xa0\xc4\xa0", 4 }, { "\xc4\x8a", 2 } }, merge[] = { { "\xc4\xa0 \xc4\xa0", 5 } };
    char *s = malloc(N);
    struct pd_vocab v;
    struct pd_err e;
    assert_int_equal(pd_vocab_init(&v, piece, 4, NULL, &e), 0);
    for (int k = 0; k < 4; k++) {
        struct pd_bpe b;
        bool bos;
        assert_int_equal(pd_bpe_init(&b, &v, (struct pd_str){ pres[k], strlen(pres[k]) }, merge, 1, &bos, &e), 0);
        assert_true(b.jit);
        for (size_t n = 100, most = k == 2 ? N : N / 40; n <= most; n = n == 100 ? most : most + 1) {
            struct pd_buf ids[2] = { { 0 }, { 0 } };
            memset(s, ' ', n);
            s[n - 1] = s[n / 2] = 'a';
            s[3] = s[7] = '\n';
            for (int jit = 0; jit < 2; jit++) {
                struct pd_bpe_call c = { 0 };
                b.jit = jit;
                if (pd_bpe_encode(&b, &c, s, 0, n, &ids[jit], &e))
                    fail_msg("%s, %zu bytes, %s: %s", pres[k], n, jit ? "JIT" : "interpreted", e.msg);
                pd_bpe_call_free(&c);
            }
            assert_int_equal(ids[0].n, ids[1].n);
            assert_true(ids[0].n > n && !memcmp(ids[0].p, ids[1].p, ids[0].n));
            pd_buf_free(&ids[0]);
            pd_buf_free(&ids[1]);
        }
        pd_bpe_free(&b);
    }
    pd_vocab_free(&v);
    free(s);
}

static void *tokenize_often(void *arg)
{
    static const char text[] = "Several threads share this: 123 \xe2\x82\xac <|im_end|> and    spaces.";
    struct pd_buf first = { 0 }, ids = { 0 };
    long bad = pd_tokenize(arg, text, sizeof text - 1, false, true, &first, NULL);
    for (int i = 0; i < 300 && !bad; i++) {
        ids.n = 0;
        bad = pd_tokenize(arg, text, sizeof text - 1, false, true, &ids, NULL) || ids.n != first.n || memcmp(ids.p, first.p, ids.n);
    }
    pd_buf_free(&first);
    pd_buf_free(&ids);
    return (void *)bad;
}

static void threads(void **state)
{
    struct pd_tokenizer *t = load("testdata/tok/tok-smollm.gguf");
    pthread_t th[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&th[i], NULL, tokenize_often, t), 0);
    for (int i = 0; i < 4; i++) {
        void *bad;
        pthread_join(th[i], &bad);
        assert_null(bad);
    }
    pd_tokenizer_free(t);
}

static void byte_alphabet(void **state)
{
    struct pd_tokenizer *t = load("testdata/tok/tok-gpt-2.gguf");
    uint8_t seen[256] = { 0 };
    struct pd_buf out = { 0 };
    for (int id = 0; id < 256; id++) {          /* the vocabulary begins with the alphabet */
        out.n = 0;
        assert_int_equal(pd_detokenize(t, id, false, false, &out, NULL), 0);
        assert_int_equal(out.n, 1);
        assert_int_equal(seen[out.p[0]]++, 0);
    }
    struct { const char *piece, *bytes; } cases[] = { { "\xc4\xa0the", " the" }, { "\xc4\x8a", "\n" }, { "\xc5\x83", "\xad" }, { "a b", "a b" }, { "\xe2\x82\xac", "\xe2\x82\xac" }, { "", "" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        out.n = 0;
        assert_int_equal(pd_bpe_decode((struct pd_str){ cases[i].piece, strlen(cases[i].piece) }, &out, NULL), 0);
        assert_int_equal(out.n, strlen(cases[i].bytes));
        if (out.n)
            assert_memory_equal(out.p, cases[i].bytes, out.n);
    }
    pd_buf_free(&out);
    pd_tokenizer_free(t);
}

/* The automaton against the plain definition: at each place the longest piece, then on from its end. */
static void special_scan(void **state)
{
    uint32_t x = 12345;
    for (int round = 0; round < 400; round++) {
        struct pd_str piece[12];
        char store[12][8], text[64];
        int32_t types[12];
        size_t n = 0;
        for (int i = 0; i < 12; i++) {
            size_t len = 1 + (x = x * 1664525 + 1013904223) / (UINT32_MAX / 6 + 1), dup = 0;
            for (size_t k = 0; k < len; k++)
                store[n][k] = (char)('a' + ((x = x * 1664525 + 1013904223) >> 20) % 2);
            for (size_t k = 0; k < n; k++)
                dup |= piece[k].n == len && !memcmp(piece[k].p, store[n], len);
            if (dup)
                continue;
            piece[n] = (struct pd_str){ store[n], len };
            types[n++] = i % 3 ? PD_PIECE_CONTROL : PD_PIECE_NORMAL;
        }
        for (int i = 0; i < 64; i++)
            text[i] = (char)('a' + ((x = x * 1664525 + 1013904223) >> 20) % 2);
        struct pd_vocab v;
        struct pd_special s;
        struct pd_buf hits = { 0 };
        assert_int_equal(pd_vocab_init(&v, piece, n, types, NULL), 0);
        assert_int_equal(pd_special_init(&s, &v, 1u << PD_PIECE_CONTROL, NULL), 0);
        assert_int_equal(pd_special_scan(&s, &v, text, sizeof text, 100, &hits, NULL), 0);
        const struct pd_special_hit *h = (const void *)hits.p, *end = h + hits.n / sizeof *h;
        for (size_t at = 0; at < sizeof text; ) {
            int32_t best = -1;
            for (size_t k = 0; k < n; k++)
                if (types[k] == PD_PIECE_CONTROL && piece[k].n <= sizeof text - at && !memcmp(piece[k].p, text + at, piece[k].n) && (best < 0 || piece[k].n > piece[best].n))
                    best = (int32_t)k;
            if (best < 0) {
                at++;
                continue;
            }
            assert_true(h < end);
            assert_int_equal(h->pos, 100 + at);
            assert_int_equal(h->id, best);
            h++;
            at += piece[best].n;
        }
        assert_ptr_equal(h, end);
        pd_buf_free(&hits);
        pd_special_free(&s);
        pd_vocab_free(&v);
    }
}

/* --- files made here: a GGUF with whatever metadata a case wants */

struct file { struct pd_buf kv; uint64_t n; };

static void put(struct file *f, const void *p, size_t n) { assert_int_equal(pd_buf_add(&f->kv, p, n, NULL), 0); }
static void put_u32(struct file *f, uint32_t v) { put(f, &v, 4); }
static void put_u64(struct file *f, uint64_t v) { put(f, &v, 8); }
static void put_str(struct file *f, const char *s) { put_u64(f, strlen(s)); put(f, s, strlen(s)); }
static void key(struct file *f, const char *name, uint32_t type) { f->n++; put_str(f, name); put_u32(f, type); }
static void kv_str(struct file *f, const char *k, const char *v) { key(f, k, PD_GT_STR); put_str(f, v); }
static void kv_u32(struct file *f, const char *k, uint32_t v) { key(f, k, PD_GT_U32); put_u32(f, v); }
static void kv_bool(struct file *f, const char *k, uint8_t v) { key(f, k, PD_GT_BOOL); put(f, &v, 1); }
static void kv_nums(struct file *f, const char *k, uint32_t type, const void *v, size_t n) { key(f, k, PD_GT_ARR); put_u32(f, type); put_u64(f, n); put(f, v, 4 * n); }
static void kv_strs(struct file *f, const char *k, const char *const *v)
{
    uint64_t n = 0;
    while (v[n])
        n++;
    key(f, k, PD_GT_ARR);
    put_u32(f, PD_GT_STR);
    put_u64(f, n);
    for (uint64_t i = 0; i < n; i++)
        put_str(f, v[i]);
}

static int open_file(struct file *f, struct pd_tokenizer **t, struct pd_err *e)
{
    uint8_t head[24] = "GGUF\x03";
    uint64_t zero = 0;
    char path[64];
    struct pd_gguf *g;
    int fd = memfd_create("gguf", 0);
    memcpy(head + 8, &zero, 8);
    memcpy(head + 16, &f->n, 8);
    assert_int_equal(write(fd, head, 24), 24);
    assert_int_equal(write(fd, f->kv.p, f->kv.n), (ssize_t)f->kv.n);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    memset(e, 0, sizeof *e);
    int r = pd_gguf_open(path, &g, e);
    if (!r) {
        r = pd_tokenizer_from_gguf(g, t, e);
        pd_gguf_close(g);
    }
    close(fd);
    pd_buf_free(&f->kv);
    f->n = 0;
    return r;
}

/* A BPE file in which one thing can be wrong. NULL members take the good value; "" leaves the key out. */
struct bpe_case { const char *why, *model, *pre, *tokens[8], *merges[6]; int32_t types[8]; int n_types; uint32_t bos; int code; };

static int open_bpe(const struct bpe_case *c, struct pd_tokenizer **t, struct pd_err *e)
{
    static const char *const tokens[] = { "a", "b", "ab", "aba", "<x>", NULL }, *const merges[] = { "a b", "ab a", NULL };
    static const int32_t types[] = { 1, 1, 1, 1, 3 };
    struct file f = { 0 };
    if (!c->model || *c->model)
        kv_str(&f, "tokenizer.ggml.model", c->model ? c->model : "gpt2");
    if (!c->pre || *c->pre)
        kv_str(&f, "tokenizer.ggml.pre", c->pre ? c->pre : "gpt-2");
    kv_strs(&f, "tokenizer.ggml.tokens", c->tokens[0] ? c->tokens : tokens);
    kv_strs(&f, "tokenizer.ggml.merges", c->merges[0] ? c->merges : merges);
    if (c->n_types >= 0)
        kv_nums(&f, "tokenizer.ggml.token_type", PD_GT_I32, c->n_types ? c->types : types, c->n_types ? (size_t)c->n_types : 5);
    kv_u32(&f, "tokenizer.ggml.bos_token_id", c->bos);
    return open_file(&f, t, e);
}

static void hostile_bpe(void **state)
{
    static const struct bpe_case cases[] = {
        { .why = NULL },
        { .why = NULL, .tokens = { "a", "b", "ab", "aba", "", "", "<x>" }, .n_types = -1 },                     /* empty pieces are only never found */
        { .why = NULL, .merges = { "a b" } },
        { .why = "tokenizer.ggml.model", .model = "", .code = PD_EINCOMPAT },
        { .why = "\"bert\"; supported: gpt2", .model = "bert", .code = PD_EINCOMPAT },
        { .why = "tokenizer.ggml.pre is absent; supported: gpt-2, smollm", .pre = "", .code = PD_EINCOMPAT },
        { .why = "\"tekken\"", .pre = "tekken", .code = PD_EINCOMPAT },
        { .why = "\"a\" stands at 0 and again at 2", .tokens = { "a", "b", "a", "ab", "<x>" }, .code = PD_ECORRUPT },
        { .why = "token_type has 4 entries for 5", .n_types = 4, .types = { 1, 1, 1, 1 }, .code = PD_ECORRUPT },
        { .why = "token_type[2] is 9", .n_types = 5, .types = { 1, 1, 9, 1, 1 }, .code = PD_ECORRUPT },
        { .why = "token_type[0] is -1", .n_types = 5, .types = { -1, 1, 1, 1, 1 }, .code = PD_ECORRUPT },
        { .why = "lacks (the left one)", .merges = { "z b" }, .code = PD_ECORRUPT },
        { .why = "lacks (the right one)", .merges = { "a z" }, .code = PD_ECORRUPT },
        { .why = "lacks (the two together)", .merges = { "b a" }, .code = PD_ECORRUPT },
        { .why = "not two pieces", .merges = { "ab" }, .code = PD_ECORRUPT },
        { .why = "not two pieces", .merges = { " " }, .code = PD_ECORRUPT },
        { .why = "not two pieces", .merges = { "a " }, .code = PD_ECORRUPT },
        { .why = "not two pieces", .merges = { " a" }, .code = PD_ECORRUPT },
        { .why = "not two pieces", .merges = { "a b a" }, .code = PD_ECORRUPT },
        { .why = "there already at 0", .merges = { "a b", "a b" }, .code = PD_ECORRUPT },
        { .why = "not an ordinary one", .tokens = { "a", "b", "ab" }, .merges = { "a b" }, .n_types = 3, .types = { 1, 1, 3 }, .code = PD_ECORRUPT },
        { .why = "bos_token_id", .bos = 5 },
        { .why = "bos_token_id", .bos = UINT32_MAX },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct pd_tokenizer *t = NULL;
        struct pd_err e;
        int r = open_bpe(&cases[i], &t, &e);
        if (!cases[i].why) {
            if (r)
                fail_msg("case %zu: %s", i, e.msg);
            assert_int_equal(count(t, "abaab", 5, false), cases[i].merges[0] ? 3 : 2);
            pd_tokenizer_free(t);
            continue;
        }
        assert_null(t);
        if (!r || !strstr(e.msg, cases[i].why) || (cases[i].code && r != cases[i].code))
            fail_msg("case %zu: %d, '%s', wanted '%s'", i, r, r ? e.msg : "", cases[i].why);
    }
    /* What the vocabulary cannot spell is refused, with its place in the whole text. */
    struct pd_tokenizer *t;
    struct pd_err e;
    struct pd_buf ids = { 0 };
    assert_int_equal(open_bpe(&cases[0], &t, &e), 0);
    assert_int_equal(pd_tokenize(t, "ab<x>abc", 8, false, true, &ids, &e), PD_EFAIL);
    assert_non_null(strstr(e.msg, "byte 0x63 at offset 7 "));
    assert_int_equal(ids.n, 0);
    pd_buf_free(&ids);
    pd_tokenizer_free(t);
}

static void hostile_spm(void **state)
{
    /* break_it: 0 nothing, then one fault each */
    static const char *const why[] = { NULL, "scores has 0", "scores has 5", "not a number", "token_type has 0", "lacks U+2581", "form <0xAB>", "user-defined piece with U+2581",
                                       "is set but there is no tokenizer.ggml.bos", "remove_extra_whitespaces", NULL };
    for (size_t k = 0; k < sizeof why / sizeof *why; k++) {
        const char *tokens[] = { "<unk>", "<s>", "\xe2\x96\x81", "a", "\xe2\x96\x81" "a", "<0x62>", NULL };
        float scores[] = { 0, 0, -1, -2, -3, 0 };
        int32_t types[] = { 2, 3, 1, 1, 1, 6 };
        struct file f = { 0 };
        struct pd_tokenizer *t = NULL;
        struct pd_err e;
        if (k == 3)
            scores[2] = (float)strtod("nan", NULL);
        if (k == 5)
            tokens[2] = "c", tokens[4] = "d";
        if (k == 6)
            tokens[5] = "<0x6z>";
        if (k == 7)
            types[4] = PD_PIECE_USER;
        if (k == 10)
            scores[2] = -(float)strtod("inf", NULL), scores[4] = (float)strtod("inf", NULL);
        kv_str(&f, "tokenizer.ggml.model", "llama");
        kv_strs(&f, "tokenizer.ggml.tokens", tokens);
        if (k != 1)
            kv_nums(&f, "tokenizer.ggml.scores", PD_GT_F32, scores, k == 2 ? 5 : 6);
        if (k != 4)
            kv_nums(&f, "tokenizer.ggml.token_type", PD_GT_I32, types, 6);
        if (k == 8)
            kv_bool(&f, "tokenizer.ggml.add_bos_token", 1);
        if (k == 9)
            kv_bool(&f, "tokenizer.ggml.remove_extra_whitespaces", 1);
        int r = open_file(&f, &t, &e);
        if (why[k]) {
            if (!r || !strstr(e.msg, why[k]))
                fail_msg("case %zu: %d '%s'", k, r, r ? e.msg : "");
            continue;
        }
        if (k == 10 && r) {         /* the reader of files may refuse what is not finite */
            assert_non_null(strstr(e.msg, "tokenizer.ggml.scores"));
            continue;
        }
        struct pd_buf ids = { 0 };
        if (r)
            fail_msg("case %zu: %s", k, e.msg);
        assert_int_equal(pd_tokenize(t, "a ab", 4, false, false, &ids, &e), 0);
        const int32_t want[] = { 4, 4, 5 };
        assert_int_equal(ids.n, sizeof want);
        assert_memory_equal(ids.p, want, sizeof want);
        assert_int_equal(pd_tokenize(t, "ac", 2, false, false, &ids, &e), PD_EFAIL);
        assert_non_null(strstr(e.msg, "0x63"));
        pd_buf_free(&ids);
        pd_tokenizer_free(t);
    }
}

/* Chat markers and the model's own special ids are control tokens, whatever type the file gives them. */
static void marked_otherwise(void **state)
{
    static const struct bpe_case c = { .tokens = { "a", "<|im_end|>", "<|im_start|>", "<tool>", "<bos>" }, .merges = { NULL }, .types = { 1, 4, 1, 4, 4 }, .n_types = 5, .bos = 4 };
    static const char *const none[] = { NULL };
    struct file f = { 0 };
    struct pd_tokenizer *t;
    struct pd_err e;
    kv_str(&f, "tokenizer.ggml.model", "gpt2");
    kv_str(&f, "tokenizer.ggml.pre", "smollm");
    kv_strs(&f, "tokenizer.ggml.tokens", c.tokens);
    kv_strs(&f, "tokenizer.ggml.merges", none);
    kv_nums(&f, "tokenizer.ggml.token_type", PD_GT_I32, c.types, 5);
    kv_u32(&f, "tokenizer.ggml.bos_token_id", 4);
    if (open_file(&f, &t, &e))
        fail_msg("%s", e.msg);
    struct pd_buf ids = { 0 };
    assert_int_equal(pd_tokenize(t, "a<tool>a", 8, false, false, &ids, &e), 0);
    const int32_t want[] = { 0, 3, 0 };
    assert_int_equal(ids.n, sizeof want);
    assert_memory_equal(ids.p, want, sizeof want);
    const char *look[] = { "a<|im_end|>", "a<|im_start|>", "a<bos>" };
    const int32_t id[] = { 1, 2, 4 };
    for (int i = 0; i < 3; i++) {
        ids.n = 0;
        assert_int_equal(pd_tokenize(t, look[i], strlen(look[i]), false, false, &ids, &e), PD_EFAIL);     /* "<" has no token here: so it was read as text */
        assert_int_equal(pd_tokenize(t, look[i], strlen(look[i]), false, true, &ids, &e), 0);
        assert_int_equal(ids.n, 8);
        assert_int_equal(((int32_t *)ids.p)[1], id[i]);
    }
    assert_true(pd_tokenizer_is_eog(t, 1) && !pd_tokenizer_is_eog(t, 2));
    pd_buf_free(&ids);
    pd_tokenizer_free(t);
}

static void digests(void **state)
{
    static const struct bpe_case cases[] = {
        { .why = NULL }, { .pre = "smollm" }, { .merges = { "a b" } }, { .tokens = { "a", "b", "ab", "aba", "<y>" } }, { .types = { 1, 1, 1, 1, 4 }, .n_types = 5 }, { .bos = 4 },
    };
    uint8_t seen[6][PD_SHA_LEN];
    struct pd_tokenizer *t;
    struct pd_err e;
    for (int i = 0; i < 6; i++) {
        assert_int_equal(open_bpe(&cases[i], &t, &e), 0);
        memcpy(seen[i], pd_tokenizer_digest(t), PD_SHA_LEN);
        for (int k = 0; k < i; k++)
            assert_memory_not_equal(seen[i], seen[k], PD_SHA_LEN);
        pd_tokenizer_free(t);
    }
    assert_int_equal(open_bpe(&cases[0], &t, &e), 0);
    assert_memory_equal(seen[0], pd_tokenizer_digest(t), PD_SHA_LEN);
    pd_tokenizer_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden), cmocka_unit_test(golden_smollm2), cmocka_unit_test(refused_text), cmocka_unit_test(flags_and_specials), cmocka_unit_test(long_words), cmocka_unit_test(without_jit),
        cmocka_unit_test(threads), cmocka_unit_test(byte_alphabet), cmocka_unit_test(special_scan), cmocka_unit_test(hostile_bpe), cmocka_unit_test(hostile_spm),
        cmocka_unit_test(marked_otherwise), cmocka_unit_test(digests),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
