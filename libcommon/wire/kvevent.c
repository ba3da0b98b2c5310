#include <inttypes.h>
#include "fields.h"
#include "kvevent.h"

#define K(m) PD_FIELD(struct pd_kvevent, m)
static const struct pd_field kvevent_field[] = {
    { "life", PD_F_BYTES, PD_FF_REQ, K(life) }, { "seq", PD_F_U64, PD_FF_REQ, K(seq) }, { "op", PD_F_CHARS, PD_FF_REQ, K(op) },
    { "hashes", PD_F_BIN, 0, K(hashes) }, { "parent", PD_F_BYTES, PD_FF_HAS, K(parent), .aux = offsetof(struct pd_kvevent, has_parent) },
    { "parents", PD_F_BIN, 0, K(parents) }, { "token_ids", PD_F_BIN, 0, K(token_ids) }, { "block_size", PD_F_U32, PD_FF_NZ, K(block_size) },
    { "tier", PD_F_CHARS, 0, K(tier) }, { "part", PD_F_U32, PD_FF_NZ, K(part) }, { "parts", PD_F_U32, PD_FF_NZ, K(parts) } };
static const struct pd_table kvevent_table = { "kvevent", kvevent_field, sizeof kvevent_field / sizeof *kvevent_field, offsetof(struct pd_kvevent, extra) };

/* Counts that belong together do, so that a reader may go by the number of hashes. */
static int check(const struct pd_kvevent *r, int code, struct pd_err *e)
{
    bool stored = !strcmp(r->op, "stored"), snapshot = !strcmp(r->op, "snapshot"), removed = !strcmp(r->op, "removed");
    uint64_t n = r->hashes.n / 16;
    if (!stored && !snapshot && !removed && strcmp(r->op, "cleared"))
        return pd_fail(e, code, "kvevent: op is '%.11s' (stored, removed, cleared or snapshot)", r->op);
    if (r->hashes.n % 16 || (n == 0 && (stored || removed)) || (n && !stored && !removed && !snapshot))
        return pd_fail(e, code, "kvevent %s: hashes of %zu bytes (16 a block)", r->op, r->hashes.n);
    if ((stored || snapshot) && n && (r->block_size < 1 || r->block_size > 65536 || r->token_ids.n != n * r->block_size * sizeof(int32_t)))
        return pd_fail(e, code, "kvevent %s: token_ids of %zu bytes for %" PRIu64 " blocks of %u tokens (4 a token)", r->op, r->token_ids.n, n, r->block_size);
    if (snapshot && (r->parents.n != r->hashes.n || r->part >= r->parts))
        return pd_fail(e, code, "kvevent snapshot: part %u of %u with %zu hashes and %zu parents", r->part, r->parts, r->hashes.n / 16, r->parents.n / 16);
    return 0;
}

int pd_kvevent_encode(const struct pd_kvevent *r, struct pd_buf *b, struct pd_err *e)
{
    int rc = check(r, PD_EFAIL, e);
    return rc ? rc : pd_table_encode(&kvevent_table, r, b, e);
}

int pd_kvevent_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_kvevent *r, struct pd_err *e)
{
    memset(r, 0, sizeof *r);
    int rc = pd_table_decode(&kvevent_table, rec, n, a, r, e);
    return rc ? rc : check(r, PD_ECORRUPT, e);
}
