/* Chat formats: a template family recognised from the model's own template, rendered byte for byte as Jinja2 renders that template (default system text
 * and generation prompt included) and tokenised piecewise: template text with special tokens parsed, message content without. */
#ifndef PD_MODEL_CHAT_H
#define PD_MODEL_CHAT_H
#include "tokenizer.h"
#include "../wire/record.h"
/* known: the format can be rendered; else `why` says what it is instead. digest: of the template text (zero: the model has none). */
struct pd_chat {
    char family[16]; uint8_t digest[PD_SHA_LEN]; bool known; struct pd_str source;
    int form;                               /* row of the table of forms in chat.c */
    struct pd_str bos, eos, system;         /* texts that the form needs from the model, and from the template: the default system message */
    char why[256];
    struct pd_arena mem;                    /* owns the texts */
};
/* A model without a template, or with one that is not recognised, is no error here (raw prompts need none) but in render and tokenize. A bad override is.
 * override: NULL (the model's own), a family name (chatml, llama2, llama3), or a path of a file that holds a template. */
int pd_chat_from_gguf(const struct pd_gguf *g, const char *override, struct pd_chat *c, struct pd_err *e);
void pd_chat_free(struct pd_chat *c);
int pd_chat_render(const struct pd_chat *c, const struct pd_message *m, uint32_t n, struct pd_buf *text, struct pd_err *e);  /* the whole text, for people and goldens; generation prompt included */
/* No BOS beyond what the template itself prints. Roles and contents can not become control tokens. A refusal by the template (roles that do not
 * alternate, say) is PD_EFAIL with the template's own words. */
int pd_chat_tokenize(const struct pd_chat *c, const struct pd_tokenizer *t, const struct pd_message *m, uint32_t n, struct pd_buf *ids, struct pd_err *e);
#endif
