/* Chat formats: a template family recognised from the model's own template, rendered byte for byte as Jinja2 renders that template (default system text
 * and generation prompt included) and tokenised piecewise: template text with special tokens parsed, message content without. */
#ifndef PD_MODEL_CHAT_H
#define PD_MODEL_CHAT_H
#include "tokenizer.h"
#include "../wire/record.h"
struct pd_chat { char family[16]; uint8_t digest[PD_SHA_LEN]; bool known; struct pd_str source; };     /* digest: of the template text (zero: none) */
/* override: NULL (the model's own), a family name (chatml, llama2, llama3), or a path of a file that holds a template. */
int pd_chat_from_gguf(const struct pd_gguf *g, const char *override, struct pd_chat *c, struct pd_err *e);
int pd_chat_render(const struct pd_chat *c, const struct pd_message *m, uint32_t n, struct pd_buf *text, struct pd_err *e);  /* the whole text, for people and goldens */
int pd_chat_tokenize(const struct pd_chat *c, const struct pd_tokenizer *t, const struct pd_message *m, uint32_t n, struct pd_buf *ids, struct pd_err *e);
#endif
