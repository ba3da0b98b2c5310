/* The text of one choice as its tokens come: whole UTF-8 characters only, stop strings found over token boundaries, and nothing let out that might still
 * turn out to be the beginning of a stop string. Bytes that are not UTF-8 come out as U+FFFD. */
#ifndef PD_ENGINE_TEXT_H
#define PD_ENGINE_TEXT_H
#include "../model/tokenizer.h"
#include "../wire/record.h"
struct pd_text {
    struct pd_buf raw;          /* bytes of all tokens so far; cut before a stop string when one was found */
    size_t scanned;             /* raw bytes already checked for stop strings */
    size_t cleaned;             /* raw bytes already in text */
    struct pd_buf text;         /* valid UTF-8, what may be shown */
    bool stopped;
};
/* Adds a token's bytes; t->stopped when a stop string is complete (never with may_stop false: before min_tokens). */
int pd_text_add(struct pd_text *t, const struct pd_tokenizer *tok, const struct pd_request *r, int32_t token, bool may_stop, struct pd_err *e);
/* Before the first token: the text begins with that of the prompt. No stop string is looked for in it. */
int pd_text_echo(struct pd_text *t, const struct pd_tokenizer *tok, const int32_t *tokens, uint32_t n, struct pd_err *e);
int pd_text_end(struct pd_text *t, struct pd_err *e);   /* nothing more comes: lets the rest out */
void pd_text_free(struct pd_text *t);
#endif
