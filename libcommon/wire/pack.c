#include <math.h>
#include "pack.h"

static int add_bytes(void *data, const char *p, size_t n)
{
    struct pd_packer *k = data;
    if (!k->rc)
        k->rc = pd_buf_add(k->b, p, n, k->e);
    return k->rc ? -1 : 0;
}

void pd_pack_init(struct pd_packer *k, struct pd_buf *b, struct pd_err *e)
{
    *k = (struct pd_packer){ .b = b, .e = e };
    msgpack_packer_init(&k->pk, k, add_bytes);
}

void pd_pack_str(struct pd_packer *k, struct pd_str s)
{
    if (s.n > UINT32_MAX && !k->rc)
        k->rc = pd_fail(k->e, PD_EFAIL, "a string of %zu bytes is too long for a record", s.n);
    msgpack_pack_str(&k->pk, s.n);
    msgpack_pack_str_body(&k->pk, s.p, s.n);
}

void pd_pack_text(struct pd_packer *k, const char *s)
{
    pd_pack_str(k, (struct pd_str){ s, strlen(s) });
}

void pd_pack_bin(struct pd_packer *k, const void *p, size_t n)
{
    if (n > UINT32_MAX && !k->rc)
        k->rc = pd_fail(k->e, PD_EFAIL, "bin of %zu bytes is too long for a record", n);
    msgpack_pack_bin(&k->pk, n);
    msgpack_pack_bin_body(&k->pk, p, n);
}

void pd_pack_raw(struct pd_packer *k, const void *p, size_t n)
{
    add_bytes(k, p, n);
}

void pd_pack_float(struct pd_packer *k, const char *name, double v)
{
    if (!isfinite(v) && !k->rc)
        k->rc = pd_fail(k->e, PD_EFAIL, "%s is not a finite number; a record cannot hold it", name);
    msgpack_pack_double(&k->pk, v);
}
