#include "fields.h"
#include "routing.h"

#define MAX_WAITED 1000000000000000     /* thirty years */
#define A(m) PD_FIELD(struct pd_place, m)
static const struct pd_field place_field[] = { { "worker", PD_F_STR, PD_FF_REQ, A(worker) }, { "at", PD_F_STR, PD_FF_REQ, A(at) } };
static const struct pd_table p_table = { "p", place_field, 2, -1 }, d_table = { "d", place_field, 2, -1 };

static void enc_p(const void *rec, struct pd_packer *k) { pd_fields_encode(&p_table, &((const struct pd_routing *)rec)->p, false, 0, 0, k); }
static void enc_d(const void *rec, struct pd_packer *k) { pd_fields_encode(&d_table, &((const struct pd_routing *)rec)->d, false, 0, 0, k); }
static int dec_p(void *rec, struct pd_bin v, struct pd_unpack *u) { return pd_fields_decode(&p_table, v, &((struct pd_routing *)rec)->p, u); }
static int dec_d(void *rec, struct pd_bin v, struct pd_unpack *u) { return pd_fields_decode(&d_table, v, &((struct pd_routing *)rec)->d, u); }

static void enc_resume(const void *rec, struct pd_packer *k)
{
    const struct pd_routing *r = rec;
    pd_pack_bin(k, r->resume, (size_t)r->n_resume * 4);
}

static int dec_resume(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_routing *r = rec;
    struct pd_bin b;
    int32_t *ids;
    if (!pd_get_bin(v, &b))
        return pd_fail(u->e, u->code, "resume must be bin of int32");
    int rc = pd_unpack_ids("resume", v, &ids, &r->n_resume, u);
    r->resume = rc ? NULL : ids;
    return rc;
}

#define R(m) PD_FIELD(struct pd_routing, m)
#define HAS(m) .aux = offsetof(struct pd_routing, m)
static const struct pd_field field[] = {
    { "op", PD_F_BYTES, PD_FF_REQ, R(op) }, { "policy", PD_F_STR, PD_FF_REQ, R(policy) }, { "mode", PD_F_CHARS, PD_FF_REQ, R(mode) },
    { "p", PD_F_CUSTOM, PD_FF_HAS | PD_FF_NULL, R(p), HAS(has_p), .enc = enc_p, .dec = dec_p }, { "d", PD_F_CUSTOM, PD_FF_REQ, R(d), .enc = enc_d, .dec = dec_d },
    { "early", PD_F_BOOL, PD_FF_ALWAYS, R(early) }, { "again", PD_F_BOOL, 0, R(again) }, { "waited_us", PD_F_I64, PD_FF_NZ, R(waited_us) },
    { "fallback", PD_F_STR, PD_FF_NULL | PD_FF_MEND, R(fallback) },
    { "resume", PD_F_CUSTOM, PD_FF_HAS, R(resume), HAS(has_resume), .enc = enc_resume, .dec = dec_resume } };
static const struct pd_table table = { "route", field, sizeof field / sizeof *field, offsetof(struct pd_routing, extra) };

static int check(const struct pd_routing *r, struct pd_err *e)
{
    bool remote = !strcmp(r->mode, "remote");
    if (!remote && strcmp(r->mode, "local") && strcmp(r->mode, "aggregated"))
        return pd_fail(e, PD_EFAIL, "route: mode '%s' is not known here (aggregated, remote and local are)", r->mode);
    if (r->waited_us < 0 || r->waited_us > MAX_WAITED)
        return pd_fail(e, PD_EFAIL, "route: waited_us is %lld: 0 to %lld", (long long)r->waited_us, (long long)MAX_WAITED);
    if (remote != r->has_p)
        return pd_fail(e, PD_EFAIL, "route: mode is %s and p is %s", r->mode, r->has_p ? "given" : "missing");
    return 0;
}

int pd_routing_encode(const struct pd_routing *r, struct pd_buf *b, struct pd_err *e)
{
    struct pd_packer k;
    size_t from = b->n;
    int rc = check(r, e);
    if (rc)
        return rc;
    pd_pack_init(&k, b, e);
    pd_fields_encode(&table, r, false, 0, 0, &k);
    return pd_record_close(&k, from);
}

int pd_routing_decode(struct pd_bin map, struct pd_arena *a, struct pd_routing *r, struct pd_err *e)
{
    struct pd_unpack u = { a, e, PD_EFAIL };
    *r = (struct pd_routing){ 0 };
    if (!map.p)
        return pd_fail(e, PD_EFAIL, "route: there is none");
    int rc = pd_fields_decode(&table, map, r, &u);
    return rc ? rc : check(r, e);
}
