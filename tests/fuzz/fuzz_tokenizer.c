/* The first byte says what the others are. 0 to 5: a text for one of the vocabularies in testdata/tok (run in the tree's root); 6: a model file, whose
 * tokenizer and chat format are taken; 7: a chat template. Beyond memory errors: a text that is taken comes back byte for byte, and one that is
 * valid UTF-8 is taken by a vocabulary that has every byte. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "../../libcommon/base/utf8.h"
#include "../../libcommon/model/chat.h"
#include "../../libcommon/model/template.h"

static const char *const names[] = { "gpt-2", "smollm", "qwen2", "llama-bpe", "spm", "spm-noprefix" };
static struct pd_tokenizer *tok[6];

static void load_all(void)
{
    for (int i = 0; i < 6; i++) {
        char path[64];
        struct pd_gguf *g;
        struct pd_err e;
        snprintf(path, sizeof path, "testdata/tok/tok-%s.gguf", names[i]);
        if (pd_gguf_open(path, &g, &e) || pd_tokenizer_from_gguf(g, &tok[i], &e)) {
            fprintf(stderr, "%s\n", e.msg);
            exit(1);
        }
        pd_gguf_close(g);
    }
}

static void decode(const struct pd_tokenizer *t, const struct pd_buf *ids, struct pd_buf *out)
{
    const int32_t *id = (const int32_t *)ids->p;
    for (size_t i = 0; i < ids->n / 4; i++)
        if (pd_detokenize(t, id[i], true, i == 0 || pd_tokenizer_is_control(t, id[i - 1]), out, NULL))
            __builtin_trap();
}

/* SentencePiece cannot tell U+2581 from a space: both count as one here. */
static void same_space(struct pd_buf *b)
{
    size_t o = 0;
    for (size_t i = 0; i < b->n; i++) {
        bool mark = b->n - i >= 3 && !memcmp(b->p + i, "\xe2\x96\x81", 3);
        b->p[o++] = mark ? ' ' : b->p[i];
        i += mark ? 2 : 0;
    }
    b->n = o;
}

static int try_text(const struct pd_tokenizer *t, const char *s, size_t n, bool special, size_t cut)
{
    struct pd_buf ids = { 0 }, text = { 0 }, back = { 0 };
    struct pd_text_run run[2] = { { cut, special }, { n - cut, !special } };
    int r = cut ? pd_tokenize_runs(t, s, run, 2, false, &ids, NULL) : pd_tokenize(t, s, n, false, special, &ids, NULL);
    if (!r) {
        decode(t, &ids, &back);
        pd_buf_add(&text, s, n, NULL);
        if (pd_tokenizer_kind(t) == PD_TOK_SPM) {
            same_space(&text);
            same_space(&back);
        }
        if (back.n != text.n || (back.n && memcmp(back.p, text.p, back.n)))
            __builtin_trap();
    }
    pd_buf_free(&ids);
    pd_buf_free(&text);
    pd_buf_free(&back);
    return r;
}

static void try_chat(const struct pd_chat *c, const struct pd_tokenizer *t, const char *s, size_t n)
{
    struct pd_buf out = { 0 };
    struct pd_str half = { s, n / 2 }, rest = { s + n / 2, n - n / 2 };
    struct pd_message m[] = { { .role = { "system", 6 }, .content = half }, { .role = { "user", 4 }, .content = rest }, { .role = half, .content = rest } };
    for (uint32_t k = 0; k <= 3; k++) {
        pd_chat_render(c, m, k, &out, NULL);
        if (t && !pd_chat_tokenize(c, t, m, k, &out, NULL) && out.n > (1u << 30))
            __builtin_trap();
        out.n = 0;
    }
    pd_buf_free(&out);
}

static void model_file(const uint8_t *data, size_t size)
{
    static const char text[] = "the a ab aba <s>[INST] 12\n\n  <|im_end|>\tx\xc3\xa9\xe2\x82\xac \xf0\x9f\x98\x80 \0 b";
    struct pd_gguf *g;
    struct pd_tokenizer *t = NULL;
    struct pd_chat c;
    char path[64];
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (write(fd, data, size) != (ssize_t)size)
        abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (!pd_gguf_open(path, &g, NULL)) {
        if (!pd_tokenizer_from_gguf(g, &t, NULL))
            for (int i = 0; i < 4; i++)
                try_text(t, text, sizeof text - 1, i & 1, i & 2 ? 9 : 0);
        if (!pd_chat_from_gguf(g, NULL, &c, NULL)) {
            try_chat(&c, t, text, sizeof text - 1);
            pd_chat_free(&c);
        }
        pd_tokenizer_free(t);
        pd_gguf_close(g);
    }
    close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!tok[0])
        load_all();
    if (!size)
        return 0;
    int what = *data++ % 8;
    const char *s = (const char *)data;
    size--;
    if (what == 6) {
        model_file(data, size);
    } else if (what == 7) {
        struct pd_template a, b;
        struct pd_str any;
        if (!pd_template_parse(s, size, &a, NULL)) {
            if (pd_template_parse(s, size, &b, NULL) || a.n != b.n || (!memchr(s, PD_TEMPLATE_ANY, size) && pd_template_match(&a, 0, &b, &any) != (long)a.n))
                __builtin_trap();
            pd_template_free(&a);
            pd_template_free(&b);
        }
    } else {
        bool valid = pd_utf8_invalid(s, size) < 0;
        size_t cut = size ? (uint8_t)s[0] % size : 0;
        while (cut && ((uint8_t)s[cut] & 0xc0) == 0x80)
            cut--;
        for (int i = 0; i < 4; i++)
            if ((try_text(tok[what], s, size, i & 1, i & 2 ? cut : 0) == 0) != valid)
                __builtin_trap();
    }
    return 0;
}
