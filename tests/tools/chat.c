/* Render chats from the shell, for tests: a line of JSON in, {"template": TEXT or null (the model's own), "messages": [{"role", "content"}]}; a line of
 * JSON out: {"text": ...}, {"error": ...} when the template refuses, or {"refused": ...} when the template is not one that we render.
 *   chat [-i] MODEL        -i: {"ids": [...]} in place of the text */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "../../libcommon/model/chat.h"

static struct pd_str text_of(json_t *v) { return (struct pd_str){ json_string_value(v), json_string_length(v) }; }

static void answer(const char *key, json_t *value)
{
    json_t *o = json_pack("{s:o}", key, value);
    char *s = o ? json_dumps(o, JSON_COMPACT) : NULL;
    puts(s ? s : "{\"invalid\":\"what was said is not UTF-8\"}");
    free(s);
    json_decref(o);
}

/* The template goes through a file, as with --chat-template FILE. */
static int open_chat(const struct pd_gguf *g, json_t *template, struct pd_chat *c, struct pd_err *e)
{
    char path[64];
    int fd = -1;
    if (json_is_string(template)) {
        fd = memfd_create("template", 0);
        if (fd < 0 || write(fd, json_string_value(template), json_string_length(template)) != (ssize_t)json_string_length(template))
            return pd_fail_sys(e, "memfd");
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    int r = pd_chat_from_gguf(g, fd < 0 ? NULL : path, c, e);
    if (fd >= 0)
        close(fd);
    if (!r && !c->known)
        r = pd_fail(e, PD_EINCOMPAT, "%s", c->why);
    return r;
}

static void one(const struct pd_gguf *g, const struct pd_tokenizer *t, json_t *o, bool want_ids)
{
    struct pd_err e = { 0 };
    struct pd_chat c;
    json_t *list = json_object_get(o, "messages");
    size_t n = json_array_size(list);
    struct pd_message *m = calloc(n + 1, sizeof *m);
    struct pd_buf out = { 0 };
    for (size_t i = 0; i < n; i++) {
        m[i].role = text_of(json_object_get(json_array_get(list, i), "role"));
        m[i].content = text_of(json_object_get(json_array_get(list, i), "content"));
    }
    if (open_chat(g, json_object_get(o, "template"), &c, &e)) {
        answer("refused", json_string(e.msg));
    } else if (want_ids ? pd_chat_tokenize(&c, t, m, (uint32_t)n, &out, &e) : pd_chat_render(&c, m, (uint32_t)n, &out, &e)) {
        answer("error", json_string(e.msg));
    } else if (want_ids) {
        json_t *ids = json_array();
        for (size_t i = 0; i < out.n / 4; i++)
            json_array_append_new(ids, json_integer(((int32_t *)out.p)[i]));
        answer("ids", ids);
    } else {
        answer("text", json_stringn(out.p ? (const char *)out.p : "", out.n));
    }
    pd_chat_free(&c);
    pd_buf_free(&out);
    free(m);
}

int main(int argc, char **argv)
{
    bool want_ids = argc == 3 && !strcmp(argv[1], "-i");
    struct pd_err e;
    struct pd_gguf *g;
    struct pd_tokenizer *t;
    char *line = NULL;
    size_t cap = 0;
    if (argc != 2 + want_ids) {
        fprintf(stderr, "usage: chat [-i] MODEL < lines of JSON\n");
        return 2;
    }
    if (pd_gguf_open(argv[1 + want_ids], &g, &e) || pd_tokenizer_from_gguf(g, &t, &e)) {
        fprintf(stderr, "chat: %s\n", e.msg);
        return 1;
    }
    for (ssize_t n; (n = getline(&line, &cap, stdin)) > 0; ) {
        json_error_t je;
        json_t *o = json_loadb(line, (size_t)n, JSON_ALLOW_NUL, &je);
        if (!o) {
            fprintf(stderr, "chat: %s\n", je.text);
            return 1;
        }
        one(g, t, o, want_ids);
        json_decref(o);
    }
    free(line);
    pd_tokenizer_free(t);
    pd_gguf_close(g);
    return 0;
}
