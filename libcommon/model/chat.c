#include "chat.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../base/utf8.h"
#include "template.h"

#define ANY "\x01"              /* PD_TEMPLATE_ANY */
#define TEMPLATE_MAX (1 << 20)

/* What is rendered so far, and which runs of it are the template's own. */
struct page { struct pd_buf *text; struct pd_buf runs; struct pd_err *e; };

typedef int render_fn(const struct pd_chat *c, const struct pd_message *m, uint32_t n, struct page *p);
static render_fn render_chatml, render_llama2, render_llama3;

#define HEADER(role) "<|start_header_id|>" role "<|end_header_id|>\n\n"
#define CHATML_TURN "{{'<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n'}}"
#define CHATML_GEN "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
#define LLAMA2(strip, bos, eos) \
    "{% if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0].content %}" \
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}" \
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('" ALTERNATE "') }}{% endif %}" \
    "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message.content %}" \
    "{% else %}{% set content = message.content %}{% endif %}{% if message.role == 'user' %}" \
    "{{ " bos " + '[INST] ' + content" strip " + ' [/INST]' }}{% elif message.role == 'assistant' %}{{ ' ' + content" strip " + ' ' + " eos " }}{% endif %}{% endfor %}"
#define ALTERNATE "Conversation roles must alternate user/assistant/user/assistant/..."
#define LLAMA3 \
    "{% set loop_messages = messages %}{% for message in loop_messages %}" \
    "{% set content = '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' %}" \
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"

/* The forms that are rendered, each with a template that has it; other spellings of the same are recognised by their canonical form. The first of a
 * family is what its name stands for. */
enum { BOS_TOKEN = 1 /* the template prints bos_token, llama2 eos_token too */, DEFAULT_SYSTEM = 2 };
static const struct form { const char *family; render_fn *render; unsigned flags; const char *source; } forms[] = {
    { "chatml", render_chatml, 0, "{% for message in messages %}" CHATML_TURN "{% endfor %}" CHATML_GEN },
    { "chatml", render_chatml, DEFAULT_SYSTEM, "{% for message in messages %}{% if loop.first and messages[0].role != 'system' %}"
      "{{ '<|im_start|>system\n" ANY "<|im_end|>\n' }}{% endif %}" CHATML_TURN "{% endfor %}" CHATML_GEN },
    { "chatml", render_chatml, BOS_TOKEN, "{{ bos_token }}{% for message in messages %}" CHATML_TURN "{% endfor %}" CHATML_GEN },
    { "llama2", render_llama2, BOS_TOKEN, LLAMA2(".strip()", "bos_token", "eos_token") },
    { "llama2", render_llama2, BOS_TOKEN, LLAMA2(" | trim", "bos_token", "eos_token") },
    { "llama2", render_llama2, 0, LLAMA2(".strip()", "'<s>'", "'</s>'") },
    { "llama3", render_llama3, BOS_TOKEN, LLAMA3 "{% if add_generation_prompt %}{{ '" HEADER("assistant") "' }}{% endif %}" },
    { "llama3", render_llama3, BOS_TOKEN, LLAMA3 "{{ '" HEADER("assistant") "' }}" },
};
#define N_FORMS ((int)(sizeof forms / sizeof *forms))
/* May stand before any of them: it only matters to a caller who does not say whether a generation prompt is wanted. */
static const char gen_default[] = "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}";
#define REMEDY "supported are chatml, llama2 and llama3; give --chat-template NAME, or --chat-template FILE with a template of such a form"

/* What a template that is not rendered most likely is, by the first of these marks in it: so that the refusal can say a name. */
static const struct { const char *mark, *name; } relatives[] = {
    { "Cutting Knowledge Date", "the format of Llama 3.1 to 3.3, which prints the date and tools" }, { "<|start_header_id|>", "a variant of llama3" },
    { "<think>", "a format of a reasoning model" }, { "<|im_start|>", "a variant of chatml" }, { "<<SYS>>", "a variant of llama2" }, { "[INST]", "Mistral's format" },
    { "<start_of_turn>", "Gemma's format" }, { "<|assistant|>", "the format of Zephyr or Phi" }, { "<\uff5cAssistant\uff5c>", "DeepSeek's format" },
};

static int add(struct page *p, const char *s, size_t n, bool own)
{
    struct pd_text_run *last = p->runs.n ? (struct pd_text_run *)(p->runs.p + p->runs.n) - 1 : NULL, run = { n, own };
    int r = pd_buf_add(p->text, s, n, p->e);
    if (r || !n)
        return r;
    if (last && last->parse_special == own) {
        last->n += n;
        return 0;
    }
    return pd_buf_add(&p->runs, &run, sizeof run, p->e);
}

static int own(struct page *p, const char *s) { return add(p, s, strlen(s), true); }
static int own_str(struct page *p, struct pd_str s) { return add(p, s.p, s.n, true); }
static int theirs(struct page *p, struct pd_str s) { return add(p, s.p, s.n, false); }

/* Python's rstrip of what was added since `mark`. */
static void rstrip(struct page *p, size_t mark)
{
    struct pd_str s = pd_python_rstrip((struct pd_str){ (const char *)p->text->p + mark, p->text->n - mark });
    size_t cut = p->text->n - mark - s.n;
    p->text->n -= cut;
    while (cut) {
        struct pd_text_run *last = (struct pd_text_run *)(p->runs.p + p->runs.n) - 1;
        size_t take = last->n < cut ? last->n : cut;
        last->n -= take;
        cut -= take;
        if (!last->n)
            p->runs.n -= sizeof *last;
    }
}

static int render_chatml(const struct pd_chat *c, const struct pd_message *m, uint32_t n, struct page *p)
{
    int r;
    if ((r = own_str(p, c->bos)))
        return r;
    for (uint32_t i = 0; i < n; i++) {
        if (i == 0 && (forms[c->form].flags & DEFAULT_SYSTEM) && !pd_str_eq(m[0].role, "system") &&
            ((r = own(p, "<|im_start|>system\n")) || (r = own_str(p, c->system)) || (r = own(p, "<|im_end|>\n"))))
            return r;
        if ((r = own(p, "<|im_start|>")) || (r = theirs(p, m[i].role)) || (r = own(p, "\n")) || (r = theirs(p, m[i].content)) || (r = own(p, "<|im_end|>\n")))
            return r;
    }
    return own(p, "<|im_start|>assistant\n");
}

static int render_llama2(const struct pd_chat *c, const struct pd_message *m, uint32_t n, struct page *p)
{
    int r;
    if (!n)
        return pd_fail(p->e, PD_EFAIL, "the llama2 chat template needs at least one message");
    const struct pd_message *system = pd_str_eq(m[0].role, "system") ? m : NULL;
    for (uint32_t i = !!system, k = 0; i < n; i++, k++) {
        bool user = pd_str_eq(m[i].role, "user");
        if (user != (k % 2 == 0))
            return pd_fail(p->e, PD_EFAIL, "messages[%u]: " ALTERNATE, i);
        if (!user && !pd_str_eq(m[i].role, "assistant"))
            continue;           /* the template prints nothing for it */
        if ((r = user ? own_str(p, c->bos) : 0) || (r = own(p, user ? "[INST] " : " ")))
            return r;
        size_t mark = p->text->n;
        struct pd_str content = m[i].content;
        if (k == 0 && system) {
            if ((r = own(p, "<<SYS>>\n")) || (r = theirs(p, system->content)) || (r = own(p, "\n<</SYS>>\n\n")))
                return r;
        } else {
            content = pd_python_lstrip(content);
        }
        if ((r = theirs(p, content)))
            return r;
        rstrip(p, mark);
        if (user ? (r = own(p, " [/INST]")) : (r = own(p, " ")) || (r = own_str(p, c->eos)))
            return r;
    }
    return 0;
}

static int render_llama3(const struct pd_chat *c, const struct pd_message *m, uint32_t n, struct page *p)
{
    int r;
    for (uint32_t i = 0; i < n; i++) {
        struct pd_str content = pd_python_rstrip(pd_python_lstrip(m[i].content));
        if ((r = i ? 0 : own_str(p, c->bos)) || (r = own(p, "<|start_header_id|>")) || (r = theirs(p, m[i].role)) || (r = own(p, "<|end_header_id|>\n\n")) ||
            (r = theirs(p, content)) || (r = own(p, "<|eot_id|>")))
            return r;
    }
    return own(p, HEADER("assistant"));
}

static int render(const struct pd_chat *c, const struct pd_message *m, uint32_t n, struct page *p)
{
    if (!c->known)
        return pd_fail(p->e, PD_EINCOMPAT, "%s; " REMEDY, c->why);
    for (uint32_t i = 0; i < n; i++) {
        if (!m[i].role.p || !m[i].content.p)
            return pd_fail(p->e, PD_EFAIL, "messages[%u] has no %s", i, m[i].role.p ? "content" : "role");
        long bad = pd_utf8_invalid(m[i].role.p, m[i].role.n);
        if (bad >= 0)
            return pd_fail(p->e, PD_EFAIL, "messages[%u].role is not valid UTF-8 at byte offset %ld", i, bad);
        if ((bad = pd_utf8_invalid(m[i].content.p, m[i].content.n)) >= 0)
            return pd_fail(p->e, PD_EFAIL, "messages[%u].content is not valid UTF-8 at byte offset %ld", i, bad);
    }
    size_t start = p->text->n;
    int r = forms[c->form].render(c, m, n, p);
    if (r)
        p->text->n = start;
    return r;
}

int pd_chat_render(const struct pd_chat *c, const struct pd_message *m, uint32_t n, struct pd_buf *text, struct pd_err *e)
{
    struct page p = { text, { 0 }, e };
    int r = render(c, m, n, &p);
    pd_buf_free(&p.runs);
    return r;
}

int pd_chat_tokenize(const struct pd_chat *c, const struct pd_tokenizer *t, const struct pd_message *m, uint32_t n, struct pd_buf *ids, struct pd_err *e)
{
    struct pd_buf text = { 0 };
    struct page p = { &text, { 0 }, e };
    int r = render(c, m, n, &p);
    if (!r)
        r = pd_tokenize_runs(t, (const char *)text.p, (const struct pd_text_run *)p.runs.p, p.runs.n / sizeof(struct pd_text_run), false, ids, e);
    pd_buf_free(&p.runs);
    pd_buf_free(&text);
    return r;
}

static void unknown(struct pd_chat *c, const char *syntax)
{
    const char *name = "of none of the known forms";
    for (size_t i = 0; i < sizeof relatives / sizeof *relatives; i++)
        if (memmem(c->source.p, c->source.n, relatives[i].mark, strlen(relatives[i].mark))) {
            name = relatives[i].name;
            break;
        }
    snprintf(c->why, sizeof c->why, "the chat template (%zu bytes) is %s%s%.100s%s", c->source.n, name, syntax ? " (" : "", syntax ? syntax : "", syntax ? ")" : "");
}

/* 0: matched, with the form and the default system text; 1: no form matches, see `why`; < 0: out of memory and the like. */
static int recognise(struct pd_chat *c, struct pd_err *e)
{
    struct pd_template t = { 0 }, want = { 0 };
    struct pd_err parse = { 0 };
    int r = pd_template_parse(c->source.p, c->source.n, &t, &parse);
    if (r == PD_EINCOMPAT) {
        unknown(c, parse.msg);
        return 1;
    }
    if (r)
        return pd_fail(e, r, "%s", parse.msg);
    size_t from = 0;
    if ((r = pd_template_parse(gen_default, sizeof gen_default - 1, &want, e)))
        goto out;
    if (pd_template_match(&t, 0, &want, NULL) > 0)
        from = want.n;
    for (int i = 0; i < N_FORMS; i++) {
        struct pd_str any = { 0 };
        pd_template_free(&want);
        if ((r = pd_template_parse(forms[i].source, strlen(forms[i].source), &want, e)))
            goto out;
        if (t.n - from == want.n && pd_template_match(&t, from, &want, &any) >= 0) {
            c->form = i;
            if (any.p && !(c->system.p = pd_arena_dup(&c->mem, any.p, any.n, e)))
                r = PD_ENOMEM;
            c->system.n = any.n;
            goto out;
        }
    }
    unknown(c, NULL);
    r = 1;
out:
    pd_template_free(&want);
    pd_template_free(&t);
    return r;
}

/* The texts of bos_token and eos_token, which a template prints. */
static int special_text(const struct pd_gguf *g, const char *key, struct pd_chat *c, struct pd_str *out, struct pd_err *e)
{
    struct pd_str *piece = NULL;
    size_t n = 0;
    int64_t id = -1;
    int r = pd_gguf_get_strs(g, "tokenizer.ggml.tokens", &piece, &n, e);
    if (r >= 0)
        r = pd_gguf_get_int(g, key, 0, (int64_t)n - 1, &id, e);
    if (r < 0)
        goto out;
    if (id < 0) {
        snprintf(c->why, sizeof c->why, "the %s chat template prints a token that the model does not name (%s)", c->family, key);
        r = 1;
        goto out;
    }
    out->n = piece[id].n;
    r = (out->p = pd_arena_dup(&c->mem, piece[id].p, piece[id].n, e)) ? 0 : PD_ENOMEM;
out:
    pd_free(piece);
    return r;
}

/* 0: all there; 1: something lacks, see `why`. */
static int model_texts(const struct pd_gguf *g, struct pd_chat *c, struct pd_err *e)
{
    const struct form *f = &forms[c->form];
    int r = 0;
    snprintf(c->family, sizeof c->family, "%s", f->family);
    if (f->flags & BOS_TOKEN)
        r = special_text(g, "tokenizer.ggml.bos_token_id", c, &c->bos, e);
    if (!r && (f->flags & BOS_TOKEN) && f->render == render_llama2)
        r = special_text(g, "tokenizer.ggml.eos_token_id", c, &c->eos, e);
    if (!(f->flags & BOS_TOKEN) && f->render == render_llama2) {
        c->bos = (struct pd_str){ "<s>", 3 };
        c->eos = (struct pd_str){ "</s>", 4 };
    }
    return r;
}

static int read_file(const char *path, struct pd_chat *c, struct pd_err *e)
{
    struct pd_buf b = { 0 };
    ssize_t k = 1;
    int r = 0, fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
    if (fd < 0)
        return errno == ENOENT ? pd_fail(e, PD_EUSAGE, "--chat-template: '%s' is neither a known form nor a file; " REMEDY, path)
                               : pd_fail_sys(e, "--chat-template: cannot open '%s'", path);
    while (!r && k > 0 && b.n <= TEMPLATE_MAX) {
        if ((r = pd_buf_reserve(&b, 4096, e)))
            break;
        k = read(fd, b.p + b.n, 4096);
        if (k < 0)
            r = pd_fail_sys(e, "--chat-template: cannot read '%s'", path);
        else
            b.n += (size_t)k;
    }
    if (!r && b.n > TEMPLATE_MAX)
        r = pd_fail(e, PD_EUSAGE, "--chat-template: '%s' is longer than %d bytes", path, TEMPLATE_MAX);
    if (!r) {
        c->source.n = b.n;
        if (!(c->source.p = pd_arena_dup(&c->mem, b.n ? b.p : (uint8_t *)"", b.n, e)))
            r = PD_ENOMEM;
    }
    pd_buf_free(&b);
    close(fd);
    return r;
}

static int find_source(const struct pd_gguf *g, const char *override, struct pd_chat *c, struct pd_err *e)
{
    for (int i = 0; override && i < N_FORMS; i++)
        if (!strcmp(override, forms[i].family)) {
            c->source = (struct pd_str){ forms[i].source, strlen(forms[i].source) };
            return 0;
        }
    if (override)
        return read_file(override, c, e);
    struct pd_str s = { 0 };
    int r = pd_gguf_get_str(g, "tokenizer.chat_template", &s, e);
    if (r <= 0)
        return r;
    c->source.n = s.n;
    return (c->source.p = pd_arena_dup(&c->mem, s.p, s.n, e)) ? 0 : PD_ENOMEM;
}

int pd_chat_from_gguf(const struct pd_gguf *g, const char *override, struct pd_chat *c, struct pd_err *e)
{
    *c = (struct pd_chat){ .form = -1 };
    int r = find_source(g, override, c, e);
    if (r < 0)
        goto out;
    if (!c->source.p) {
        snprintf(c->why, sizeof c->why, "the model has no chat template");
        return 0;
    }
    if ((r = pd_sha256(c->source.p, c->source.n, c->digest, e)) || (r = recognise(c, e)) || (r = model_texts(g, c, e)))
        goto out;
    c->known = true;
out:
    if (r > 0 && override)
        r = pd_fail(e, PD_EINCOMPAT, "--chat-template '%.200s': %s; " REMEDY, override, c->why);
    if (r < 0)
        pd_chat_free(c);
    return r < 0 ? r : 0;
}

void pd_chat_free(struct pd_chat *c)
{
    pd_arena_free(&c->mem);
    *c = (struct pd_chat){ .form = -1 };
}
