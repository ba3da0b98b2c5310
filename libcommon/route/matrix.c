#include "../kv/convert.h"
#include "../wire/pack.h"
#include "../wire/value.h"
#include "matrix.h"
#include "registry.h"

const char *const pd_match_names[] = { "ok", "converted", "convertible", "refused", "apart", "itself" };

static bool among(struct pd_str key, const char *const *names)
{
    for (; *names; names++)
        if (pd_str_eq(key, *names))
            return true;
    return false;
}

static const char *show(struct pd_bin v, char *out, size_t cap)
{
    struct pd_bin b;
    if (!v.p)
        return "has none";
    if (!pd_get_bin(v, &b))
        return pd_value_text(v, out, cap);
    pd_hex(b.p, b.n < 6 ? b.n : 6, out);
    return out;
}

static bool find(struct pd_bin map, struct pd_str key, struct pd_bin *v)
{
    struct pd_iter it;
    struct pd_str k;
    if (!pd_iter_open(&it, map, PD_T_MAP))
        return false;
    while (pd_iter_pair(&it, &k, v))
        if (k.p && k.n == key.n && !memcmp(k.p, key.p, k.n))
            return true;
    *v = (struct pd_bin){ NULL, 0 };
    return false;
}

int pd_match(const struct pd_worker_rec *p, const struct pd_worker_rec *d, enum pd_match *out, struct pd_buf *why, struct pd_err *e)
{
    static const char *const convertible[] = { "block_size", "order", "tp", NULL }, *const advisory[] = { "numerics", "software", NULL };
    int rc = 0;
    *out = PD_M_OK;
    for (int pass = 0; pass < 2; pass++) {      /* all of p's fields, then those that only d has */
        struct pd_iter it;
        struct pd_str key;
        struct pd_bin v, other;
        if (!pd_iter_open(&it, pass ? d->fp_fields : p->fp_fields, PD_T_MAP))
            return pd_fail(e, PD_ECORRUPT, "worker %s: its fingerprint has no fields", pass ? d->worker.p : p->worker.p);
        while (rc == 0 && pd_iter_pair(&it, &key, &v)) {
            char a[96], b[96];
            bool there = find(pass ? p->fp_fields : d->fp_fields, key, &other);
            if (there && (pass || (v.n == other.n && !memcmp(v.p, other.p, v.n))))
                continue;
            bool done = pd_conv_of_caps(d->caps, d->n_caps) & pd_conv_field(key.p, key.n);
            enum pd_match m = among(key, advisory) ? PD_M_OK : !among(key, convertible) ? PD_M_REFUSED : done ? PD_M_CONVERTED : PD_M_CONVERTIBLE;
            *out = m > *out ? m : *out;
            rc = pd_buf_printf(why, e, "%s%.*s differs (prefill %s, decode %s)", why->n ? "; " : "", (int)(key.n < 60 ? key.n : 60), key.p,
                               show(pass ? other : v, a, sizeof a), show(pass ? v : other, b, sizeof b));
        }
        if (rc)
            return rc;
    }
    if (p->epoch != d->epoch) {
        *out = PD_M_APART;
        rc = pd_buf_printf(why, e, "%sepoch differs (prefill %llu, decode %llu)", why->n ? "; " : "", (unsigned long long)p->epoch,
            (unsigned long long)d->epoch);
    }
    return rc;
}

int pd_matrix_make(const struct pd_worker_rec *w, uint32_t n, struct pd_matrix *m, struct pd_err *e)
{
    *m = (struct pd_matrix){ 0 };
    int rc = PD_ENOMEM;
    if (!(m->p = pd_calloc(n, sizeof *m->p, "workers", e)) || !(m->d = pd_calloc(n, sizeof *m->d, "workers", e)))
        goto out;
    for (uint32_t i = 0; i < n; i++) {
        if (pd_worker_can_give(&w[i]))
            m->p[m->n_p++] = &w[i];
        if (pd_worker_can_decode(&w[i]))
            m->d[m->n_d++] = &w[i];
    }
    if (!(m->m = pd_calloc((size_t)m->n_p * m->n_d, sizeof *m->m, "pairs", e)) || !(m->why = pd_calloc((size_t)m->n_p * m->n_d, sizeof *m->why, "pairs", e)))
        goto out;
    rc = 0;
    for (uint32_t i = 0; i < m->n_p * m->n_d && rc == 0; i++) {
        const struct pd_worker_rec *p = m->p[i / m->n_d], *d = m->d[i % m->n_d];
        m->m[i] = PD_M_SELF;
        rc = p == d ? 0 : pd_match(p, d, &m->m[i], &m->why[i], e);
        rc = rc ? rc : pd_buf_add(&m->why[i], "", 1, e);
    }
out:
    if (rc)
        pd_matrix_free(m);
    return rc;
}

void pd_matrix_free(struct pd_matrix *m)
{
    for (uint32_t i = 0; m->why && i < m->n_p * m->n_d; i++)
        pd_buf_free(&m->why[i]);
    pd_free(m->why);
    pd_free(m->m);
    pd_free(m->p);
    pd_free(m->d);
    *m = (struct pd_matrix){ 0 };
}

static const char *name(const struct pd_worker_rec *w) { return w->worker.p; }
static const char *why(const struct pd_matrix *m, uint32_t i) { return (const char *)m->why[i].p; }

int pd_matrix_needed(const struct pd_matrix *m, struct pd_err *e)
{
    for (int side = 0; side < 2; side++)
        for (uint32_t i = 0; i < (side ? m->n_d : m->n_p); i++) {
            int64_t bad = -1;
            bool ok = false;
            for (uint32_t k = 0; k < (side ? m->n_p : m->n_d) && !ok; k++) {
                uint32_t at = side ? k * m->n_d + i : i * m->n_d + k;
                ok = m->m[at] <= PD_M_CONVERTED;
                if (m->m[at] == PD_M_CONVERTIBLE || m->m[at] == PD_M_REFUSED)
                    bad = bad < 0 ? at : bad;
            }
            if (!ok && bad >= 0)
                return pd_fail(e, PD_EINCOMPAT, "%s can exchange KV with no worker of its epoch; with %s %.300s", name(side ? m->d[i] : m->p[i]),
                               name(side ? m->p[bad / m->n_d] : m->d[bad % m->n_d]), why(m, (uint32_t)bad));
        }
    return 0;
}

int pd_matrix_text(const struct pd_matrix *m, struct pd_buf *out, struct pd_err *e)
{
    size_t wide = strlen("prefill \\ decode");
    int rc = 0;
    for (uint32_t i = 0; i < m->n_p; i++)
        wide = m->p[i]->worker.n > wide ? m->p[i]->worker.n : wide;
    if (!m->n_p || !m->n_d)
        return pd_buf_printf(out, e, "%u workers, none of role %s: no KV is exchanged\n", m->n_p + m->n_d, m->n_p ? "decode or both" : "prefill");
    for (uint32_t k = 0; k < m->n_d && rc == 0; k++)
        rc = pd_buf_printf(out, e, "[%u] %s  epoch %llu  %s\n", k + 1, name(m->d[k]), (unsigned long long)m->d[k]->epoch, m->d[k]->model_revision.p);
    rc = rc ? rc : pd_buf_printf(out, e, "%-*s", (int)wide, "prefill \\ decode");
    for (uint32_t k = 0; k < m->n_d && rc == 0; k++)
        rc = pd_buf_printf(out, e, "  [%-9u]", k + 1);
    rc = rc ? rc : pd_buf_printf(out, e, "\n");
    for (uint32_t i = 0; i < m->n_p && rc == 0; i++) {
        rc = pd_buf_printf(out, e, "%-*s", (int)wide, name(m->p[i]));
        for (uint32_t k = 0; k < m->n_d && rc == 0; k++)
            rc = pd_buf_printf(out, e, "  %-11s", pd_match_names[m->m[i * m->n_d + k]]);
        while (rc == 0 && out->n && out->p[out->n - 1] == ' ')
            out->n--;
        rc = rc ? rc : pd_buf_printf(out, e, "\n");
    }
    for (uint32_t i = 0; i < m->n_p * m->n_d && rc == 0; i++)
        if (why(m, i)[0])
            rc = pd_buf_printf(out, e, "%s -> [%u] %s: %s%s\n", name(m->p[i / m->n_d]), i % m->n_d + 1, name(m->d[i % m->n_d]),
                               m->m[i] == PD_M_OK ? "ok, though " : "", why(m, i));
    return rc;
}

int pd_matrix_records(const struct pd_matrix *m, struct pd_buf *out, struct pd_err *e)
{
    struct pd_packer k;
    pd_pack_init(&k, out, e);
    for (uint32_t i = 0; i < m->n_p * m->n_d; i++) {
        if (m->m[i] == PD_M_SELF)
            continue;
        msgpack_pack_map(&k.pk, 6);
        pd_pack_text(&k, "pd");
        pd_pack_text(&k, "pair");
        pd_pack_text(&k, "v");
        msgpack_pack_int(&k.pk, 1);
        pd_pack_text(&k, "p");
        pd_pack_text(&k, name(m->p[i / m->n_d]));
        pd_pack_text(&k, "d");
        pd_pack_text(&k, name(m->d[i % m->n_d]));
        pd_pack_text(&k, "match");
        pd_pack_text(&k, pd_match_names[m->m[i]]);
        pd_pack_text(&k, "why");
        if (why(m, i)[0])
            pd_pack_text(&k, why(m, i));
        else
            msgpack_pack_nil(&k.pk);
    }
    return k.rc;
}
