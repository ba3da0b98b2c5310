/* The canonical form of a chat template (Jinja source), made so that two spellings of one template compare equal: white space inside tags, the kind
 * of quotes, x.name beside x['name'], trim markers, comments, text beside printed literals, and how printed strings are joined all vanish. Two
 * templates of equal form render alike, under the settings that transformers uses (trim_blocks, lstrip_blocks; every value a string).
 * It is for recognising templates, not for running them: syntax that no recognised template uses is refused. */
#ifndef PD_MODEL_TEMPLATE_H
#define PD_MODEL_TEMPLATE_H
#include "../base/mem.h"

/* TEXT is printed as it is, STRING stands inside a tag, WORD is a name, number or operator there. */
enum pd_part_kind { PD_PART_TEXT, PD_PART_STRING, PD_PART_WORD, PD_PART_TAG, PD_PART_TAG_END, PD_PART_PRINT, PD_PART_PRINT_END };
struct pd_part { enum pd_part_kind kind; struct pd_str s; };
struct pd_template { struct pd_part *part; size_t n, cap; struct pd_arena mem; };

int pd_template_parse(const char *source, size_t n, struct pd_template *t, struct pd_err *e);
void pd_template_free(struct pd_template *t);

/* Does `t`, from part `from` on, begin with all of `want`? One TEXT or STRING of `want` may hold PD_TEMPLATE_ANY, which stands for any text there,
 * then given in *any. The number of parts compared, or -1. */
#define PD_TEMPLATE_ANY '\x01'
long pd_template_match(const struct pd_template *t, size_t from, const struct pd_template *want, struct pd_str *any);

/* The white space that Python's str.strip and re's \s know. */
bool pd_python_space(uint32_t cp);
/* s without such white space at its start / at its end */
struct pd_str pd_python_lstrip(struct pd_str s);
struct pd_str pd_python_rstrip(struct pd_str s);
#endif
