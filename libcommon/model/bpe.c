#include "bpe.h"
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>
#include "../base/utf8.h"

/* White_Space as Unicode has it. PCRE2's own \s also takes U+180E, which left that property in Unicode 6.3. */
#define WS "\\x{09}-\\x{0d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define SPACE "[" WS "]"
#define OTHER "[^" WS "\\p{L}\\p{N}]"
#define NO_TEXT_NEXT "(?![^" WS "])"

#define GPT2_SHORT "'(?:[sdmt]|ll|ve|re)"
#define GPT2 GPT2_SHORT "| ?\\p{L}+| ?\\p{N}+| ?" OTHER "+|" SPACE "+" NO_TEXT_NEXT "|" SPACE "+"
/* Every number character is cut out first and the rest goes through gpt-2's pattern piece by piece, so a digit ends a piece as the end of text does. */
#define SMOLLM "\\p{N}|" GPT2_SHORT "| ?\\p{L}+| ?" OTHER "+|" SPACE "+(?![^" WS "\\p{N}])|" SPACE "+"
#define MODERN(digits) "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" digits "| ?" OTHER "+[\\r\\n]*|" \
                       SPACE "*[\\r\\n]+|" SPACE "+" NO_TEXT_NEXT "|" SPACE "+"

static const struct pre { const char *name, *pattern; bool whole_words, bos; } pres[] = {
    { "gpt-2", GPT2, false, false },
    { "smollm", SMOLLM, false, false },
    { "llama-bpe", MODERN("{1,3}"), true, true },
    { "llama3", MODERN("{1,3}"), true, true },
    { "llama-v3", MODERN("{1,3}"), true, true },
    { "qwen2", MODERN(""), false, false },
};

/* The byte alphabet of GPT-2: printable bytes of Latin-1 stand for themselves, the other 68 are U+0100, U+0101, ... in order. */
static uint32_t byte_char(int byte)
{
    static const struct { uint8_t lo, hi; } own[] = { { 33, 126 }, { 161, 172 }, { 174, 255 } };
    int before = 0;
    for (int i = 0; i < 3; i++) {
        if (byte < own[i].lo)
            break;
        if (byte <= own[i].hi)
            return (uint32_t)byte;
        before += own[i].hi - own[i].lo + 1;
    }
    return 256 + (uint32_t)(byte - before);
}

static int char_byte(uint32_t c)        /* -1: not in the alphabet */
{
    if (c < 256)
        return byte_char((int)c) == c ? (int)c : -1;
    if (c < 256 + 33)
        return (int)c - 256;                    /* 0..32 */
    if (c < 256 + 33 + 34)
        return (int)(c - 256 - 33) + 127;       /* 127..160 */
    return c == 256 + 67 ? 173 : -1;
}

int pd_bpe_decode(struct pd_str piece, struct pd_buf *out, struct pd_err *e)
{
    int r = pd_buf_reserve(out, piece.n, e);
    if (r)
        return r;
    size_t start = out->n;
    for (size_t i = 0; i < piece.n; ) {
        uint32_t c;
        i += (size_t)pd_utf8_next(piece.p + i, piece.n - i, &c);
        int byte = char_byte(c);
        if (byte < 0) {
            out->n = start;
            return pd_buf_add(out, piece.p, piece.n, e);
        }
        out->p[out->n++] = (uint8_t)byte;
    }
    return 0;
}

static void *pcre_malloc(size_t n, void *unused)
{
    return pd_calloc(n, 1, "regular expression", NULL);
}

static void pcre_free(void *p, void *unused)
{
    pd_free(p);
}

static int compile(struct pd_bpe *b, const char *pattern, struct pd_err *e)
{
    int code;
    PCRE2_SIZE at;
    if (!(b->memory = pcre2_general_context_create(pcre_malloc, pcre_free, NULL)))
        return pd_fail(e, PD_ENOMEM, "no memory for the pre-tokenizer");
    pcre2_compile_context *cc = pcre2_compile_context_create(b->memory);
    if (!cc)
        return pd_fail(e, PD_ENOMEM, "no memory for the pre-tokenizer");
    b->pattern = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_ANCHORED, &code, &at, cc);
    pcre2_compile_context_free(cc);
    if (!b->pattern) {
        if (code == PCRE2_ERROR_HEAP_FAILED)
            return pd_fail(e, PD_ENOMEM, "no memory for the pre-tokenizer");
        char why[128];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
        return pd_fail(e, PD_EFAIL, "the pre-tokenizer does not compile at %zu: %s; PCRE2 must be built with Unicode", (size_t)at, why);
    }
    /* The patterns take time in proportion to the text, so long text is no reason to give up. */
    if (!(b->limits = pcre2_match_context_create(b->memory)))
        return pd_fail(e, PD_ENOMEM, "no memory for the pre-tokenizer");
    pcre2_set_match_limit(b->limits, UINT32_MAX);
    pcre2_set_depth_limit(b->limits, UINT32_MAX);
    pcre2_set_heap_limit(b->limits, UINT32_MAX);
    b->jit = pcre2_jit_compile(b->pattern, PCRE2_JIT_COMPLETE) == 0;   /* without it (no executable memory, say) the interpreter gives the same matches */
    return 0;
}

static struct pd_bpe_pair *pair_slot(const struct pd_bpe *b, uint64_t key)
{
    uint64_t h = key * 0x9e3779b97f4a7c15u, i = (h >> 29 ^ h >> 43) & b->mask;
    while (b->pair[i].rank != PD_NO_RANK && b->pair[i].key != key)
        i = (i + 1) & b->mask;
    return &b->pair[i];
}

static int load_merges(struct pd_bpe *b, const struct pd_str *merge, size_t n, struct pd_err *e)
{
    size_t slots = 2;
    char show[64];
    struct pd_buf both = { 0 };
    int r = 0;
    if (n > INT32_MAX / 4)
        return pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.merges: %zu entries", n);
    while (slots < 2 * n)
        slots *= 2;
    if (!(b->pair = pd_calloc(slots, sizeof *b->pair, "merges", e)))
        return PD_ENOMEM;
    memset(b->pair, 0xff, slots * sizeof *b->pair);
    b->mask = slots - 1;
    for (size_t i = 0; i < n; i++) {
        struct pd_str m = merge[i];
        const char *gap = m.n > 2 ? memchr(m.p + 1, ' ', m.n - 2) : NULL;
        size_t left = gap ? (size_t)(gap - m.p) : 0, right = m.n - left - 1;
        if (!gap || memchr(gap + 1, ' ', right)) {
            r = pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.merges[%zu]: %s is not two pieces with one space between", i, pd_piece_show(m.p, m.n, show));
            goto out;
        }
        both.n = 0;
        if ((r = pd_buf_add(&both, m.p, left, e)) || (r = pd_buf_add(&both, gap + 1, right, e)))
            goto out;
        int32_t a = pd_vocab_find(b->vocab, m.p, left), c = pd_vocab_find(b->vocab, gap + 1, right);
        int32_t made = pd_vocab_find(b->vocab, (const char *)both.p, both.n);
        if (a < 0 || c < 0 || made < 0) {
            r = pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.merges[%zu]: %s names a piece that tokenizer.ggml.tokens lacks (%s); convert the model anew", i,
                        pd_piece_show(m.p, m.n, show), a < 0 ? "the left one" : c < 0 ? "the right one" : "the two together");
            goto out;
        }
        /* Text must never become a control token by merging. */
        if (b->vocab->type[a] != PD_PIECE_NORMAL || b->vocab->type[c] != PD_PIECE_NORMAL || b->vocab->type[made] != PD_PIECE_NORMAL) {
            r = pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.merges[%zu]: %s is about a piece that is not an ordinary one (token_type)", i, pd_piece_show(m.p, m.n, show));
            goto out;
        }
        uint64_t key = (uint64_t)(uint32_t)a << 32 | (uint32_t)c;
        struct pd_bpe_pair *slot = pair_slot(b, key);
        if (slot->rank != PD_NO_RANK) {
            r = pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.merges[%zu]: %s is there already at %u", i, pd_piece_show(m.p, m.n, show), slot->rank);
            goto out;
        }
        *slot = (struct pd_bpe_pair){ key, (uint32_t)i, made };
    }
out:
    pd_buf_free(&both);
    return r;
}

int pd_bpe_init(struct pd_bpe *b, const struct pd_vocab *v, struct pd_str pre, const struct pd_str *merges, size_t n_merges, bool *bos_default, struct pd_err *e)
{
    *b = (struct pd_bpe){ .vocab = v };
    const struct pre *p = NULL;
    for (size_t i = 0; i < sizeof pres / sizeof *pres; i++)
        if (pd_str_eq(pre, pres[i].name))
            p = &pres[i];
    if (!p) {
        char list[128] = "", show[64];
        for (size_t i = 0; i < sizeof pres / sizeof *pres; i++)
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? ", " : "", pres[i].name);
        return pd_fail(e, PD_EINCOMPAT, "tokenizer.ggml.pre is %s; supported: %s", pre.p ? pd_piece_show(pre.p, pre.n, show) : "absent", list);
    }
    b->whole_words = p->whole_words;
    *bos_default = p->bos;
    for (int i = 0; i < 256; i++) {
        char c[4];
        int32_t id = pd_vocab_find(v, c, (size_t)pd_utf8_put(byte_char(i), c));
        b->byte_id[i] = id >= 0 && v->type[id] == PD_PIECE_NORMAL ? id : -1;
    }
    int r = compile(b, p->pattern, e);
    if (!r)
        r = load_merges(b, merges, n_merges, e);
    if (r)
        pd_bpe_free(b);
    return r;
}

void pd_bpe_free(struct pd_bpe *b)
{
    pcre2_code_free(b->pattern);
    pcre2_match_context_free(b->limits);
    pcre2_general_context_free(b->memory);
    pd_free(b->pair);
    *b = (struct pd_bpe){ 0 };
}

void pd_bpe_call_free(struct pd_bpe_call *c)
{
    pd_merger_free(&c->m);
    pcre2_match_data_free(c->match);
    pd_buf_free(&c->word);
}

static inline void pair(const void *ctx, struct pd_sym *a, const struct pd_sym *next)
{
    const struct pd_bpe_pair *p = pair_slot(ctx, (uint64_t)(uint32_t)a->id << 32 | (uint32_t)next->id);
    a->rank = p->rank;
    a->made = p->made;
}

/* Most words are a few bytes long: looking through all pairs for the best is then quicker than a heap, and gives the same. */
static size_t merge_short(const struct pd_bpe *b, struct pd_sym *s, size_t n)
{
    for (size_t i = 0; i + 1 < n; i++)
        pair(b, &s[i], &s[i + 1]);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (s[i].rank < s[best].rank)
                best = i;
        if (s[best].rank == PD_NO_RANK)
            break;
        s[best].id = s[best].made;
        memmove(&s[best + 1], &s[best + 2], (n - best - 2) * sizeof *s);
        n--;
        if (best + 1 < n)
            pair(b, &s[best], &s[best + 1]);
        if (best)
            pair(b, &s[best - 1], &s[best]);
    }
    return n;
}

static int put(struct pd_buf *ids, int32_t id, struct pd_err *e)
{
    return pd_buf_add(ids, &id, sizeof id, e);
}

static int encode_word(const struct pd_bpe *b, struct pd_bpe_call *c, const char *text, size_t at, size_t end, struct pd_buf *ids, struct pd_err *e)
{
    enum { SHORT = 40 };
    size_t n = end - at;
    int r = pd_merger_room(&c->m, n, e);
    if (r)
        return r;
    struct pd_sym *s = c->m.sym;
    for (size_t i = 0; i < n; i++) {
        uint8_t byte = (uint8_t)text[at + i];
        s[i] = (struct pd_sym){ .id = b->byte_id[byte] };
        if (s[i].id < 0)
            return pd_fail(e, PD_EFAIL, "byte 0x%02x at offset %zu of the text has no token in this model's vocabulary; take that character out", byte, at + i);
    }
    if (b->whole_words && n <= b->vocab->max_len) {
        c->word.n = 0;
        for (size_t i = 0; i < n; i++) {
            struct pd_str p = pd_vocab_piece(b->vocab, s[i].id);
            if ((r = pd_buf_add(&c->word, p.p, p.n, e)))
                return r;
        }
        int32_t id = pd_vocab_find(b->vocab, (const char *)c->word.p, c->word.n);
        if (id >= 0 && b->vocab->type[id] == PD_PIECE_NORMAL)
            return put(ids, id, e);
    }
    if (n <= SHORT) {
        n = merge_short(b, s, n);
        if ((r = pd_buf_reserve(ids, n * sizeof s->id, e)))
            return r;
        for (size_t i = 0; i < n; i++)
            memcpy(ids->p + ids->n + i * sizeof s->id, &s[i].id, sizeof s->id);
        ids->n += n * sizeof s->id;
        return 0;
    }
    if ((r = pd_merge(&c->m, n, pair, b, e)))
        return r;
    for (int32_t i = 0; i >= 0; i = s[i].next)
        if ((r = put(ids, s[i].id, e)))
            return r;
    return 0;
}

static int next_word(const struct pd_bpe *b, struct pd_bpe_call *c, const char *text, size_t at, size_t end, size_t *word_end, struct pd_err *e)
{
    int r = b->jit ? pcre2_jit_match(b->pattern, (PCRE2_SPTR)text + at, end - at, 0, PCRE2_NO_UTF_CHECK, c->match, b->limits)
                   : pcre2_match(b->pattern, (PCRE2_SPTR)text + at, end - at, 0, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, c->match, b->limits);
    if (r == PCRE2_ERROR_JIT_STACKLIMIT)
        r = pcre2_match(b->pattern, (PCRE2_SPTR)text + at, end - at, 0, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, c->match, b->limits);
    PCRE2_SIZE *o = pcre2_get_ovector_pointer(c->match);
    if (r < 0 || o[1] == 0) {
        char why[128] = "it took no character";
        if (r < 0)
            pcre2_get_error_message(r, (PCRE2_UCHAR *)why, sizeof why);
        return pd_fail(e, r == PCRE2_ERROR_NOMEMORY ? PD_ENOMEM : PD_EFAIL, "the pre-tokenizer failed at byte %zu of the text: %s", at, why);
    }
    *word_end = at + o[1];
    return 0;
}

int pd_bpe_encode(const struct pd_bpe *b, struct pd_bpe_call *c, const char *text, size_t at, size_t end, struct pd_buf *ids, struct pd_err *e)
{
    if (!c->match && !(c->match = pcre2_match_data_create(1, b->memory)))
        return pd_fail(e, PD_ENOMEM, "no memory for the pre-tokenizer");
    while (at < end) {
        size_t word_end = at;
        int r = next_word(b, c, text, at, end, &word_end, e);
        if (!r)
            r = encode_word(b, c, text, at, word_end, ids, e);
        if (r)
            return r;
        at = word_end;
    }
    return 0;
}
