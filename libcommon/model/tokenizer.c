#include "tokenizer.h"
#include <stdio.h>
#include "../base/utf8.h"
#include "bpe.h"
#include "special.h"
#include "spm.h"

#define TEXT_MAX ((size_t)1 << 29)      /* bytes of one text; symbols and heap positions are 32 bits wide */
#define N_EOG 16
#define MERGES_A_TOKEN 16       /* at most; Llama 4 has 2.2 */

enum { BOS, EOS, UNK, EOT, EOM, PAD, N_IDS };
static const char *const id_keys[N_IDS] = { "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.unknown_token_id",
                                            "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id", "tokenizer.ggml.padding_token_id" };

struct pd_tokenizer {
    enum pd_tok_kind kind;
    struct pd_vocab vocab;
    struct pd_bpe bpe;
    struct pd_spm spm;
    struct pd_special user, all;            /* always found; found with parse_special */
    int32_t id[N_IDS], eog[N_EOG];
    int n_eog;
    bool add_bos, add_eos, add_space_prefix;
    uint8_t digest[PD_SHA_LEN];
};

/* The markers of the chat formats that we render. Some converters mark them as user-defined or even ordinary pieces; they steer the model all the
 * same, so text from outside must not be able to spell them. Those that end a turn end generation. */
static const struct { const char *piece; bool ends; } markers[] = {
    { "<|im_start|>", false }, { "<|im_end|>", true }, { "<|endoftext|>", true }, { "<|begin_of_text|>", false }, { "<|end_of_text|>", true },
    { "<|start_header_id|>", false }, { "<|end_header_id|>", false }, { "<|eot_id|>", true }, { "<|eom_id|>", true }, { "</s>", true },
};

static void add_eog(struct pd_tokenizer *t, int32_t id)
{
    for (int i = 0; i < t->n_eog; i++)
        if (t->eog[i] == id)
            return;
    if (id >= 0 && t->n_eog < N_EOG)
        t->eog[t->n_eog++] = id;
}

static int read_ids(struct pd_tokenizer *t, const struct pd_gguf *g, struct pd_err *e)
{
    for (int i = 0; i < N_IDS; i++) {
        int64_t v = -1;
        int r = pd_gguf_get_int(g, id_keys[i], 0, t->vocab.n - 1, &v, e);
        if (r < 0)
            return r;
        t->id[i] = (int32_t)v;
        if (v >= 0 && i != UNK && t->vocab.type[v] == PD_PIECE_USER)
            t->vocab.type[v] = PD_PIECE_CONTROL;
    }
    add_eog(t, t->id[EOS]);
    add_eog(t, t->id[EOT]);
    add_eog(t, t->id[EOM]);
    for (size_t i = 0; i < sizeof markers / sizeof *markers; i++) {
        int32_t id = pd_vocab_find(&t->vocab, markers[i].piece, strlen(markers[i].piece));
        if (id < 0)
            continue;
        if (t->vocab.type[id] == PD_PIECE_USER || t->vocab.type[id] == PD_PIECE_NORMAL)
            t->vocab.type[id] = PD_PIECE_CONTROL;
        if (markers[i].ends && t->vocab.type[id] == PD_PIECE_CONTROL)
            add_eog(t, id);
    }
    return 0;
}

/* Absent flags are as the kind of tokenizer has it. */
static int read_flags(struct pd_tokenizer *t, const struct pd_gguf *g, bool bos_default, struct pd_err *e)
{
    int r, told;
    t->add_bos = bos_default && t->id[BOS] >= 0;
    t->add_space_prefix = t->kind == PD_TOK_SPM;
    if ((told = r = pd_gguf_get_bool(g, "tokenizer.ggml.add_bos_token", &t->add_bos, e)) < 0 ||
        (r = pd_gguf_get_bool(g, "tokenizer.ggml.add_eos_token", &t->add_eos, e)) < 0 ||
        (r = pd_gguf_get_bool(g, "tokenizer.ggml.add_space_prefix", &t->add_space_prefix, e)) < 0)
        return r;
    if (t->add_bos && t->id[BOS] < 0)
        return pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.add_bos_token is %s but there is no tokenizer.ggml.bos_token_id", told ? "set" : "implied");
    if (t->add_eos && t->id[EOS] < 0)
        return pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.add_eos_token is set but there is no tokenizer.ggml.eos_token_id");
    bool remove = false;
    if ((r = pd_gguf_get_bool(g, "tokenizer.ggml.remove_extra_whitespaces", &remove, e)) < 0)
        return r;
    if (remove && t->kind == PD_TOK_SPM)
        return pd_fail(e, PD_EINCOMPAT, "tokenizer.ggml.remove_extra_whitespaces is set, which is not supported (text would not round-trip)");
    if (t->kind == PD_TOK_BPE && t->add_space_prefix)
        return pd_fail(e, PD_EINCOMPAT, "tokenizer.ggml.add_space_prefix is set for a gpt2 tokenizer, which is not supported");
    return 0;
}

static int add_sized(struct pd_buf *b, const void *p, size_t n, struct pd_err *e)
{
    uint8_t len[8];
    pd_put_be64(len, n);
    int r = pd_buf_add(b, len, sizeof len, e);
    return r ? r : pd_buf_add(b, p, n, e);
}

/* The identity: everything that can change which ids a text has or which bytes an id has. */
static int make_digest(struct pd_tokenizer *t, struct pd_str pre, const float *scores, const struct pd_str *merges, size_t n_merges, struct pd_err *e)
{
    struct pd_buf b = { 0 };
    const struct pd_vocab *v = &t->vocab;
    uint8_t head[4] = { (uint8_t)t->kind, t->add_bos, t->add_eos, t->add_space_prefix };
    int r;
    if ((r = pd_buf_reserve(&b, v->off[v->n] + (size_t)v->n * 16 + n_merges * 24 + 256, e)) || (r = add_sized(&b, "pd tokenizer 1", 14, e)) ||
        (r = add_sized(&b, head, sizeof head, e)) || (r = add_sized(&b, pre.p, pre.p ? pre.n : 0, e)) || (r = add_sized(&b, t->id, sizeof t->id, e)) ||
        (r = add_sized(&b, v->type, (size_t)v->n, e)) || (r = add_sized(&b, scores, scores ? (size_t)v->n * sizeof *scores : 0, e)))
        goto out;
    for (int32_t i = 0; i < v->n; i++) {
        struct pd_str p = pd_vocab_piece(v, i);
        if ((r = add_sized(&b, p.p, p.n, e)))
            goto out;
    }
    for (size_t i = 0; i < n_merges; i++)
        if ((r = add_sized(&b, merges[i].p, merges[i].n, e)))
            goto out;
    r = pd_sha256(b.p, b.n, t->digest, e);
out:
    pd_buf_free(&b);
    return r;
}

static int load_spm(struct pd_tokenizer *t, const float *scores, size_t n_scores, struct pd_err *e)
{
    if (!scores || n_scores != (size_t)t->vocab.n)
        return pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.scores has %zu entries for %d tokens", n_scores, t->vocab.n);
    if (pd_vocab_find(&t->vocab, "\xe2\x96\x81", 3) < 0)
        return pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.tokens lacks U+2581, the piece that stands for a space");
    for (int32_t id = 0; id < t->vocab.n; id++) {
        struct pd_str p = pd_vocab_piece(&t->vocab, id);
        if (t->vocab.type[id] == PD_PIECE_USER && memmem(p.p, p.n, "\xe2\x96\x81", 3))
            return pd_fail(e, PD_EINCOMPAT, "tokenizer.ggml.tokens[%d] is a user-defined piece with U+2581 in it, which is not supported", id);
    }
    return pd_spm_init(&t->spm, &t->vocab, scores, e);
}

/* What is said about a key gets the file's name and the key's place before it; what the file's reader said has both. */
static void say_where(const struct pd_gguf *g, struct pd_err *e)
{
    char key[96];
    size_t n = e ? strspn(e->msg, "abcdefghijklmnopqrstuvwxyz_.") : sizeof key;
    if (!e || !strncmp(e->msg, g->path, strlen(g->path)))
        return;
    snprintf(key, sizeof key, "%.*s", (int)(n < sizeof key ? n : 0), e->msg);
    const struct pd_gguf_kv *kv = pd_gguf_find(g, key);
    if (kv)
        pd_err_prefix(e, "%s: byte %llu", g->path, (unsigned long long)kv->offset);
    else
        pd_err_prefix(e, "%s", g->path);
}

int pd_tokenizer_from_gguf(const struct pd_gguf *g, struct pd_tokenizer **out, struct pd_err *e)
{
    struct pd_str model = { 0 }, pre = { 0 }, *piece = NULL, *merges = NULL;
    size_t n = 0, n_types = 0, n_scores = 0, n_merges = 0;
    int32_t *types = NULL;
    float *scores = NULL;
    bool bos_default = true;
    int r;
    *out = NULL;
    struct pd_tokenizer *t = pd_calloc(1, sizeof *t, "tokenizer", e);
    if (!t)
        return PD_ENOMEM;
    if ((r = pd_gguf_get_str(g, "tokenizer.ggml.model", &model, e)) < 0)
        goto out;
    if (!pd_str_eq(model, "gpt2") && !pd_str_eq(model, "llama")) {
        char show[64];
        r = pd_fail(e, PD_EINCOMPAT, "tokenizer.ggml.model is %s; supported: gpt2 (byte-level BPE), llama (SentencePiece BPE)",
                    model.p ? pd_piece_show(model.p, model.n, show) : "absent");
        goto out;
    }
    t->kind = pd_str_eq(model, "gpt2") ? PD_TOK_BPE : PD_TOK_SPM;
    if ((r = pd_gguf_get_strs(g, "tokenizer.ggml.tokens", &piece, &n, e)) < 0 || (r = pd_gguf_get_i32s(g, "tokenizer.ggml.token_type", &types, &n_types, e)) < 0)
        goto out;
    if (types ? n_types != n : t->kind == PD_TOK_SPM) {
        r = pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.token_type has %zu entries for %zu tokens", n_types, n);
        goto out;
    }
    if ((r = pd_vocab_init(&t->vocab, piece, n, types, e)) || (r = read_ids(t, g, e)))
        goto out;
    if (t->kind == PD_TOK_BPE) {
        if ((r = pd_gguf_get_str(g, "tokenizer.ggml.pre", &pre, e)) < 0 || (r = pd_gguf_get_strs(g, "tokenizer.ggml.merges", &merges, &n_merges, e)) < 0)
            goto out;
        if (!r || n_merges / MERGES_A_TOKEN > n) {
            r = r ? pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.merges has %zu entries for %zu tokens: more than any vocabulary needs", n_merges, n)
                  : pd_fail(e, PD_ECORRUPT, "tokenizer.ggml.merges is missing: without merges every text falls into bytes; convert the model anew");
            goto out;
        }
        if ((r = pd_bpe_init(&t->bpe, &t->vocab, pre, merges, n_merges, &bos_default, e)))
            goto out;
    } else if ((r = pd_gguf_get_f32s(g, "tokenizer.ggml.scores", &scores, &n_scores, e)) < 0 || (r = load_spm(t, scores, n_scores, e))) {
        goto out;
    }
    if ((r = read_flags(t, g, bos_default, e)) || (r = pd_special_init(&t->user, &t->vocab, 1u << PD_PIECE_USER, e)) ||
        (r = pd_special_init(&t->all, &t->vocab, 1u << PD_PIECE_USER | 1u << PD_PIECE_CONTROL | 1u << PD_PIECE_UNKNOWN, e)) ||
        (r = make_digest(t, pre, scores, merges, n_merges, e)))
        goto out;
    *out = t;
    t = NULL;
out:
    pd_free(piece);
    pd_free(types);
    pd_free(merges);
    pd_free(scores);
    pd_tokenizer_free(t);
    if (r < 0)
        say_where(g, e);
    return r < 0 ? r : 0;
}

void pd_tokenizer_free(struct pd_tokenizer *t)
{
    if (!t)
        return;
    pd_special_free(&t->user);
    pd_special_free(&t->all);
    pd_bpe_free(&t->bpe);
    pd_spm_free(&t->spm);
    pd_vocab_free(&t->vocab);
    pd_free(t);
}

enum pd_tok_kind pd_tokenizer_kind(const struct pd_tokenizer *t) { return t->kind; }
int pd_tokenizer_vocab(const struct pd_tokenizer *t) { return t->vocab.n; }
int pd_tokenizer_bos(const struct pd_tokenizer *t) { return t->id[BOS]; }
int pd_tokenizer_eos(const struct pd_tokenizer *t) { return t->id[EOS]; }
bool pd_tokenizer_add_bos(const struct pd_tokenizer *t) { return t->add_bos; }
int pd_tokenizer_find(const struct pd_tokenizer *t, const char *piece, size_t n) { return pd_vocab_find(&t->vocab, piece, n); }
const uint8_t *pd_tokenizer_digest(const struct pd_tokenizer *t) { return t->digest; }

bool pd_tokenizer_is_eog(const struct pd_tokenizer *t, int id)
{
    for (int i = 0; i < t->n_eog; i++)
        if (t->eog[i] == id)
            return true;
    return false;
}

bool pd_tokenizer_is_control(const struct pd_tokenizer *t, int id)
{
    return id >= 0 && id < t->vocab.n && (t->vocab.type[id] == PD_PIECE_CONTROL || t->vocab.type[id] == PD_PIECE_UNKNOWN);
}

/* One call's scratch memory, whichever kind. */
struct call { struct pd_bpe_call bpe; struct pd_spm_call spm; struct pd_buf hits; };

static int put(struct pd_buf *ids, int32_t id, struct pd_err *e)
{
    return pd_buf_add(ids, &id, sizeof id, e);
}

static int encode_bpe(const struct pd_tokenizer *t, struct call *c, const char *s, size_t n, struct pd_buf *ids, struct pd_err *e)
{
    const struct pd_special_hit *hit = (const void *)c->hits.p;
    size_t at = 0;
    int r;
    for (size_t i = 0; i < c->hits.n / sizeof *hit; i++) {
        if ((r = pd_bpe_encode(&t->bpe, &c->bpe, s, at, hit[i].pos, ids, e)) || (r = put(ids, hit[i].id, e)))
            return r;
        at = hit[i].pos + pd_vocab_piece(&t->vocab, hit[i].id).n;
    }
    return pd_bpe_encode(&t->bpe, &c->bpe, s, at, n, ids, e);
}

/* The prefixed space goes before each stretch of text between control tokens. A user-defined token is part of such a stretch, as SentencePiece has
 * it, so a stretch that begins with one gets its space before that. */
static int encode_spm(const struct pd_tokenizer *t, struct call *c, const char *s, size_t n, struct pd_buf *ids, struct pd_err *e)
{
    const struct pd_special_hit *hit = (const void *)c->hits.p;
    size_t at = 0;
    bool prefix = t->add_space_prefix;
    int r;
    for (size_t i = 0; i < c->hits.n / sizeof *hit; i++) {
        bool user = t->vocab.type[hit[i].id] == PD_PIECE_USER;
        if ((user || hit[i].pos > at) && (r = pd_spm_encode(&t->spm, &c->spm, s, at, hit[i].pos, prefix, ids, e)))
            return r;
        if ((r = put(ids, hit[i].id, e)))
            return r;
        prefix = !user && t->add_space_prefix;
        at = hit[i].pos + pd_vocab_piece(&t->vocab, hit[i].id).n;
    }
    return n > at ? pd_spm_encode(&t->spm, &c->spm, s, at, n, prefix, ids, e) : 0;
}

int pd_tokenize_runs(const struct pd_tokenizer *t, const char *s, const struct pd_text_run *run, size_t n_runs, bool bos, struct pd_buf *ids, struct pd_err *e)
{
    struct call c = { 0 };
    size_t n = 0, start = ids->n;
    int r = 0;
    for (size_t i = 0; i < n_runs; i++)
        if (!pd_add_size(n, run[i].n, &n) || n > TEXT_MAX)
            return pd_fail(e, PD_EFAIL, "the text is longer than %zu bytes, the most that can be tokenised at once", TEXT_MAX);
    long bad = pd_utf8_invalid(s, n);
    if (bad >= 0)
        return pd_fail(e, PD_EFAIL, "the text is not valid UTF-8 at byte offset %ld (0x%02x)", bad, (uint8_t)s[bad]);

    for (size_t i = 0, at = 0; i < n_runs && !r; at += run[i++].n)
        r = pd_special_scan(run[i].parse_special ? &t->all : &t->user, &t->vocab, s + at, run[i].n, at, &c.hits, e);
    if (!r && bos && t->add_bos)
        r = put(ids, t->id[BOS], e);
    if (!r)
        r = t->kind == PD_TOK_BPE ? encode_bpe(t, &c, s, n, ids, e) : encode_spm(t, &c, s, n, ids, e);
    if (!r && bos && t->add_eos)
        r = put(ids, t->id[EOS], e);
    if (r)
        ids->n = start;
    pd_bpe_call_free(&c.bpe);
    pd_spm_call_free(&c.spm);
    pd_buf_free(&c.hits);
    return r;
}

int pd_tokenize(const struct pd_tokenizer *t, const char *s, size_t n, bool bos, bool parse_special, struct pd_buf *ids, struct pd_err *e)
{
    struct pd_text_run run = { n, parse_special };
    return pd_tokenize_runs(t, s, &run, 1, bos, ids, e);
}

int pd_detokenize(const struct pd_tokenizer *t, int32_t id, bool special, bool first, struct pd_buf *out, struct pd_err *e)
{
    if (id < 0 || id >= t->vocab.n)
        return pd_fail(e, PD_EFAIL, "token id %d is not in the vocabulary (0 to %d)", id, t->vocab.n - 1);
    struct pd_str p = pd_vocab_piece(&t->vocab, id);
    switch (t->vocab.type[id]) {
    case PD_PIECE_CONTROL:
    case PD_PIECE_UNKNOWN:
        return special ? pd_buf_add(out, p.p, p.n, e) : 0;
    case PD_PIECE_USER:
        return pd_buf_add(out, p.p, p.n, e);
    }
    if (t->kind == PD_TOK_BPE)
        return pd_bpe_decode(p, out, e);
    size_t start = out->n;
    int r = pd_spm_decode(&t->spm, id, out, e);
    if (!r && first && t->add_space_prefix && out->n > start && out->p[start] == ' ') {
        memmove(out->p + start, out->p + start + 1, out->n - start - 1);
        out->n--;
    }
    return r;
}
