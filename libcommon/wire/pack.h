/* Packing msgpack into a pd_buf with msgpack-c (msgpack_pack_* on k->pk for what is not here). Calls need no check one by one: the first failure stays in
 * rc, with *e filled, and what comes after it is dropped. */
#ifndef PD_WIRE_PACK_H
#define PD_WIRE_PACK_H
#include <msgpack.h>
#include "../base/mem.h"
struct pd_packer { msgpack_packer pk; struct pd_buf *b; struct pd_err *e; int rc; };
void pd_pack_init(struct pd_packer *k, struct pd_buf *b, struct pd_err *e);
void pd_pack_str(struct pd_packer *k, struct pd_str s);
void pd_pack_text(struct pd_packer *k, const char *s);
void pd_pack_bin(struct pd_packer *k, const void *p, size_t n);
void pd_pack_raw(struct pd_packer *k, const void *p, size_t n);   /* msgpack already */
/* A float of a record is a float64 on the wire, so that JSON brings it back bit for bit; refused when not finite. */
void pd_pack_float(struct pd_packer *k, const char *name, double v);
#endif
