#include "template.h"
#include "../base/utf8.h"

#define SOURCE_MAX ((size_t)1 << 20)

bool pd_python_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 ||
           c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

struct pd_str pd_python_lstrip(struct pd_str s)
{
    uint32_t c;
    for (int len; s.n && (len = pd_utf8_next(s.p, s.n, &c), pd_python_space(c)); s.n -= (size_t)len)
        s.p += len;
    return s;
}

struct pd_str pd_python_rstrip(struct pd_str s)
{
    while (s.n) {
        size_t i = s.n - 1;
        uint32_t c;
        while (i && s.n - i < 4 && ((uint8_t)s.p[i] & 0xc0) == 0x80)
            i--;
        pd_utf8_next(s.p + i, s.n - i, &c);
        if (!pd_python_space(c))
            break;
        s.n = i;
    }
    return s;
}

/* The source being read: after Jinja's own treatment of line ends. */
struct source { struct pd_template *t; const char *p; size_t n, at; bool line_starts; struct pd_err *e; };

static int add(struct pd_template *t, enum pd_part_kind kind, struct pd_str s, struct pd_err *e)
{
    if (t->n == t->cap) {
        size_t cap = t->cap ? 2 * t->cap : 64;
        struct pd_part *p = pd_realloc(t->part, cap, sizeof *p, "chat template", e);
        if (!p)
            return PD_ENOMEM;
        t->part = p;
        t->cap = cap;
    }
    t->part[t->n++] = (struct pd_part){ kind, s };
    return 0;
}

static int join(struct pd_template *t, struct pd_str *a, struct pd_str b, struct pd_err *e)
{
    char *p = pd_arena_alloc(&t->mem, a->n + b.n + 1, 1, e);
    if (!p)
        return PD_ENOMEM;
    memcpy(p, a->p, a->n);
    memcpy(p + a->n, b.p, b.n);
    *a = (struct pd_str){ p, a->n + b.n };
    return 0;
}

static int add_text(struct pd_template *t, struct pd_str s, struct pd_err *e)
{
    if (!s.n)
        return 0;
    if (t->n && t->part[t->n - 1].kind == PD_PART_TEXT)
        return join(t, &t->part[t->n - 1].s, s, e);
    return add(t, PD_PART_TEXT, s, e);
}

static int refuse(const struct source *s, const char *what)
{
    return pd_fail(s->e, PD_EINCOMPAT, "chat template: %s at byte %zu", what, s->at);
}

static bool word_char(char c, bool first)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (!first && c >= '0' && c <= '9');
}

static bool is(const struct pd_part *p, const char *word) { return p->kind == PD_PART_WORD && pd_str_eq(p->s, word); }

static int read_string(struct source *s)
{
    char quote = s->p[s->at++];
    size_t n = 0;
    char *out = pd_arena_alloc(&s->t->mem, s->n - s->at + 1, 1, s->e);
    if (!out)
        return PD_ENOMEM;
    for (; s->at < s->n && s->p[s->at] != quote; s->at++) {
        char c = s->p[s->at];
        if (c == '\\') {
            static const char from[] = "nrt\\'\"", to[] = "\n\r\t\\'\"";
            c = ++s->at < s->n ? s->p[s->at] : 0;
            const char *k = c ? strchr(from, c) : NULL;
            if (!k)
                return refuse(s, "an escape that is not \\n, \\r, \\t, \\\\ or a quote");
            c = to[k - from];
        }
        out[n++] = c;
    }
    if (s->at == s->n)
        return refuse(s, "a string without an end");
    s->at++;
    return add(s->t, PD_PART_STRING, (struct pd_str){ out, n }, s->e);
}

static int read_word(struct source *s)
{
    static const char *const same[][2] = { { "True", "true" }, { "False", "false" }, { "None", "none" } };
    static const char two[][3] = { "==", "!=", "<=", ">=" };
    const char *p = s->p + s->at;
    size_t n = 0, left = s->n - s->at;
    if (word_char(*p, true)) {
        while (n < left && word_char(p[n], false))
            n++;
    } else if (*p >= '0' && *p <= '9') {
        while (n < left && p[n] >= '0' && p[n] <= '9')
            n++;
    } else {
        for (size_t i = 0; i < sizeof two / sizeof *two; i++)
            if (left >= 2 && !memcmp(p, two[i], 2))
                n = 2;
        if (!n && strchr("+-*/%~<>()[].,:|=", *p))
            n = 1;
        if (!n || !*p)
            return refuse(s, "a character that no supported template has in a tag");
    }
    struct pd_str w = { p, n };
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (pd_str_eq(w, same[i][0]))
            w = (struct pd_str){ same[i][1], strlen(same[i][1]) };
    s->at += n;
    return add(s->t, PD_PART_WORD, w, s->e);
}

/* A tag's inside, up to its end mark. '-' before the mark also takes the white space after it; a newline after a block goes too (trim_blocks). */
static int read_inside(struct source *s, bool block)
{
    const char *end = block ? "%}" : "}}";
    for (;;) {
        while (s->at < s->n && (uint8_t)s->p[s->at] < 0x80 && pd_python_space((uint8_t)s->p[s->at]))
            s->at++;
        size_t left = s->n - s->at;
        const char *p = s->p + s->at;
        if (left < 2)
            return refuse(s, "a tag without an end");
        bool minus = left >= 3 && *p == '-' && !memcmp(p + 1, end, 2), plus = left >= 3 && block && *p == '+' && !memcmp(p + 1, end, 2);
        if (minus || plus || !memcmp(p, end, 2)) {
            size_t from = s->at;
            s->at += 2 + (minus || plus);
            if (minus)
                s->at = (size_t)(pd_python_lstrip((struct pd_str){ s->p + s->at, s->n - s->at }).p - s->p);
            else if (block && !plus && s->at < s->n && s->p[s->at] == '\n')
                s->at++;
            s->line_starts = s->at > from && s->p[s->at - 1] == '\n';
            return 0;
        }
        int r = *p == '\'' || *p == '"' ? read_string(s) : read_word(s);
        if (r)
            return r;
    }
}

static int skip_comment(struct source *s)
{
    const char *end = memmem(s->p + s->at, s->n - s->at, "#}", 2);
    if (!end)
        return refuse(s, "a comment without an end");
    bool minus = end > s->p + s->at && end[-1] == '-', plus = end > s->p + s->at && end[-1] == '+';
    s->at = (size_t)(end - s->p) + 2;
    if (minus)
        s->at = (size_t)(pd_python_lstrip((struct pd_str){ s->p + s->at, s->n - s->at }).p - s->p);
    else if (!plus && s->at < s->n && s->p[s->at] == '\n')
        s->at++;
    s->line_starts = s->p[s->at - 1] == '\n';
    return 0;
}

/* x.name -> x['name'], but not a method call. Parts from `from` on, in place. */
static int subscripts(struct pd_template *t, size_t from, struct pd_err *e)
{
    size_t end = t->n;
    bool any = false;
    for (size_t i = from; i + 1 < end; i++)
        any |= is(&t->part[i], ".");
    if (!any)
        return 0;
    for (size_t i = from; i < end; i++) {
        struct pd_part p = t->part[i], name = i + 1 < end ? t->part[i + 1] : (struct pd_part){ 0 };
        bool item = is(&p, ".") && i + 1 < end && name.kind == PD_PART_WORD && word_char(name.s.p[0], true) && !(i + 2 < end && is(&t->part[i + 2], "("));
        int r = item ? add(t, PD_PART_WORD, (struct pd_str){ "[", 1 }, e) : add(t, p.kind, p.s, e);
        if (!r && item && !(r = add(t, PD_PART_STRING, name.s, e)) && !(r = add(t, PD_PART_WORD, (struct pd_str){ "]", 1 }, e)))
            i++;
        if (r)
            return r;
    }
    memmove(&t->part[from], &t->part[end], (t->n - end) * sizeof *t->part);
    t->n -= end - from;
    return 0;
}

/* 'a' + 'b' -> 'ab' where nothing beside them binds tighter than '+'. */
static int join_strings(struct pd_template *t, size_t from, struct pd_err *e)
{
    size_t o = from;
    for (size_t i = from; i < t->n; i++) {
        bool free_left = o < from + 2 || is(&t->part[o - 2], "+") || is(&t->part[o - 2], "=");
        bool free_right = i + 2 >= t->n || is(&t->part[i + 2], "+");
        if (o > from && t->part[o - 1].kind == PD_PART_STRING && is(&t->part[i], "+") && i + 1 < t->n && t->part[i + 1].kind == PD_PART_STRING && free_left && free_right) {
            int r = join(t, &t->part[o - 1].s, t->part[++i].s, e);
            if (r)
                return r;
            continue;
        }
        t->part[o++] = t->part[i];
    }
    t->n = o;
    return 0;
}

/* May a printed expression be cut at its outer '+' signs? Only if nothing else in it binds looser or as loose. */
static bool sum_of_strings(const struct pd_part *p, size_t n)
{
    static const char *const keyword[] = { "if", "else", "and", "or", "not", "in", "is" };
    int depth = 0;
    for (size_t i = 0; i < n; i++) {
        depth -= is(&p[i], ")") || is(&p[i], "]");
        if (depth < 0)
            return false;
        if (!depth && p[i].kind == PD_PART_WORD) {
            if (!word_char(p[i].s.p[0], true) && !strchr("+|.[]()", p[i].s.p[0]))
                return false;
            for (size_t k = 0; k < sizeof keyword / sizeof *keyword; k++)
                if (is(&p[i], keyword[k]))
                    return false;
        }
        depth += is(&p[i], "(") || is(&p[i], "[");
    }
    return depth == 0;
}

/* {{ a + 'b' }} -> {{ a }}b. The parts from `from` on are the expression. */
static int add_print(struct pd_template *t, size_t from, struct pd_err *e)
{
    size_t n = t->n - from;
    struct pd_part *p = pd_calloc(n, sizeof *p, "chat template", e);
    if (!p)
        return PD_ENOMEM;
    if (n)
        memcpy(p, t->part + from, n * sizeof *p);
    t->n = from;
    bool sum = sum_of_strings(p, n);
    int r = 0;
    for (size_t i = 0, end; i < n && !r; i = end + 1) {
        int depth = 0;
        for (end = i; end < n && !(sum && !depth && is(&p[end], "+")); end++)
            depth += is(&p[end], "(") + is(&p[end], "[") - is(&p[end], ")") - is(&p[end], "]");
        if (end == i) {         /* 'a' + + 'b', or nothing at all */
            r = pd_fail(e, PD_EINCOMPAT, "chat template: a '+' without something to add");
        } else if (end == i + 1 && p[i].kind == PD_PART_STRING) {
            r = add_text(t, p[i].s, e);
        } else {
            r = add(t, PD_PART_PRINT, (struct pd_str){ "", 0 }, e);
            for (size_t k = i; k < end && !r; k++)
                r = add(t, p[k].kind, p[k].s, e);
            if (!r)
                r = add(t, PD_PART_PRINT_END, (struct pd_str){ "", 0 }, e);
        }
        if (end + 1 == n)       /* a '+' at the very end */
            r = r ? r : pd_fail(e, PD_EINCOMPAT, "chat template: a '+' without something to add");
    }
    pd_free(p);
    return r;
}

static int read_tag(struct source *s, bool block)
{
    struct pd_template *t = s->t;
    int r;
    if (block && (r = add(t, PD_PART_TAG, (struct pd_str){ "", 0 }, s->e)))
        return r;
    size_t from = t->n;
    if ((r = read_inside(s, block)) || (r = subscripts(t, from, s->e)) || (r = join_strings(t, from, s->e)))
        return r;
    if (t->n == from)
        return refuse(s, "an empty tag");
    if (!block)
        return add_print(t, from, s->e);
    if (is(&t->part[from], "raw"))
        return refuse(s, "a raw block");
    return add(t, PD_PART_TAG_END, (struct pd_str){ "", 0 }, s->e);
}

/* Text up to the next tag, less the white space that the tag takes from before it. */
static int read_text(struct source *s, char *kind)
{
    size_t start = s->at, i = start;
    while (i + 1 < s->n && !(s->p[i] == '{' && strchr("{%#", s->p[i + 1]) && s->p[i + 1]))
        i++;
    struct pd_str text = { s->p + start, (i + 1 < s->n ? i : s->n) - start };
    *kind = i + 1 < s->n ? s->p[i + 1] : 0;
    if (!*kind) {
        s->at = s->n;
        return add_text(s->t, text, s->e);
    }
    s->at = i + 2;
    char sign = s->at < s->n ? s->p[s->at] : 0;
    if (sign == '-' || sign == '+')
        s->at++;
    if (sign == '-') {
        text = pd_python_rstrip(text);
    } else if (sign != '+' && *kind != '{') {
        const char *nl = text.n ? memrchr(text.p, '\n', text.n) : NULL;
        struct pd_str line = nl ? (struct pd_str){ nl + 1, text.n - (size_t)(nl + 1 - text.p) } : text;
        if ((nl || s->line_starts) && !pd_python_rstrip(line).n)        /* lstrip_blocks: only white space on the line so far */
            text.n -= line.n;
    }
    return add_text(s->t, text, s->e);
}

int pd_template_parse(const char *source, size_t n, struct pd_template *t, struct pd_err *e)
{
    *t = (struct pd_template){ 0 };
    if (n > SOURCE_MAX)
        return pd_fail(e, PD_EINCOMPAT, "chat template of %zu bytes (at most %zu are read)", n, SOURCE_MAX);
    long bad = pd_utf8_invalid(source, n);
    if (bad >= 0)
        return pd_fail(e, PD_EINCOMPAT, "chat template: not valid UTF-8 at byte %ld", bad);
    int r = PD_ENOMEM;
    char *p = pd_arena_alloc(&t->mem, n + 1, 1, e);
    if (!p)
        goto out;
    /* Jinja makes every line end a newline, and drops one at the very end. */
    size_t len = 0;
    for (size_t i = 0; i < n; i++)
        if (!(source[i] == '\n' && i && source[i - 1] == '\r'))
            p[len++] = source[i] == '\r' ? '\n' : source[i];
    if (len && p[len - 1] == '\n')
        len--;
    struct source s = { t, p, len, 0, true, e };
    r = 0;
    while (s.at < s.n && !r) {
        char kind;
        if (!(r = read_text(&s, &kind)) && kind)
            r = kind == '#' ? skip_comment(&s) : read_tag(&s, kind == '%');
    }
out:
    if (r)
        pd_template_free(t);
    return r;
}

void pd_template_free(struct pd_template *t)
{
    pd_free(t->part);
    pd_arena_free(&t->mem);
    *t = (struct pd_template){ 0 };
}

static bool same(struct pd_str a, struct pd_str b) { return a.n == b.n && !memcmp(a.p, b.p, a.n); }

long pd_template_match(const struct pd_template *t, size_t from, const struct pd_template *want, struct pd_str *any)
{
    if (from > t->n || t->n - from < want->n)
        return -1;
    for (size_t i = 0; i < want->n; i++) {
        const struct pd_part *a = &t->part[from + i], *w = &want->part[i];
        const char *hole = w->s.n ? memchr(w->s.p, PD_TEMPLATE_ANY, w->s.n) : NULL;
        if (a->kind != w->kind)
            return -1;
        if (!hole) {
            if (!same(a->s, w->s))
                return -1;
            continue;
        }
        size_t head = (size_t)(hole - w->s.p), tail = w->s.n - head - 1;
        if (a->s.n < head + tail || memcmp(a->s.p, w->s.p, head) || memcmp(a->s.p + a->s.n - tail, hole + 1, tail))
            return -1;
        *any = (struct pd_str){ a->s.p + head, a->s.n - head - tail };
    }
    return (long)want->n;
}
