/* KV in another form: blocks of another size, HND or NHD, a part of the heads (split or merged for tensor parallelism). Values stay as they are, bit by bit.
 *
 * A form says how one layer's K (or V) of one block lies: HND [heads, block_size, head_dim], NHD [block_size, heads, head_dim]. The work is done by the
 * kernels' `rows`; blocks of any two forms meet token by token, so a piece of a run can be converted as it comes. */
#ifndef PD_KV_CONVERT_H
#define PD_KV_CONVERT_H
#include "../../kernels/kernels.h"
#include "../wire/record.h"

/* What may be converted on the way into a pool (04-kv: admitted one by one, --allow-convert). */
enum { PD_CONV_BLOCK_SIZE = 1, PD_CONV_ORDER = 2, PD_CONV_ALL = 3 };
#define PD_CONV_MAX 24          /* bytes of the longest list, with its NUL */
int pd_conv_parse(const char *list, unsigned *mask, struct pd_err *e);         /* "block_size,order"; PD_EUSAGE names what is unknown */
const char *pd_conv_text(unsigned mask, char out[PD_CONV_MAX]);                /* "" for 0 */
unsigned pd_conv_field(const char *name, size_t n);                             /* of a fingerprint's field; 0: it cannot be converted */

/* The same as capabilities of a hello or a registration: convert_block_size, convert_order. How many; what they name. */
enum { PD_CONV_CAPS = 2 };
uint32_t pd_conv_caps(unsigned mask, struct pd_str *out);
unsigned pd_conv_of_caps(const struct pd_str *caps, uint32_t n);

struct pd_kv_form { uint32_t block_size, heads, head_dim; size_t el; bool nhd; };
/* Of a layout that was checked (pd_layout_check). */
struct pd_kv_form pd_form_of(const struct pd_kv_layout *l, size_t el);
int pd_form_bytes(const struct pd_kv_form *f, size_t *bytes, struct pd_err *e);        /* of K (or V) of one layer of one block; PD_ECORRUPT: it makes no sense */

/* A table of blocks, each at the bytes of one layer's K (or V), and where in them the part begins that is meant: token0 counts from the table's first block. */
struct pd_kv_view { struct pd_kv_form form; uint8_t *const *block; uint32_t n_blocks, token0, head0; };
/* n_tokens of n_heads heads from one table into another. PD_EINCOMPAT: numbers of another kind; PD_ECORRUPT: more than one of the tables has. */
int pd_convert(const struct pd_kernels *k, const struct pd_kv_view *to, const struct pd_kv_view *from, uint32_t n_tokens, uint32_t n_heads, struct pd_err *e);

/* The CPU's kernels, or those that PD_CPU names, if they run here. */
const struct pd_kernels *pd_kv_kernels(void);
#endif
