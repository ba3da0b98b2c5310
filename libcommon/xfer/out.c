#include <sys/uio.h>
#include "out.h"

bool pd_out_has_chunk(const struct pd_out *o) { return o->at_iov < o->n_iov; }
struct pd_buf *pd_out_buf(struct pd_out *o) { return pd_out_has_chunk(o) ? &o->next : &o->cur; }
size_t pd_out_waiting(const struct pd_out *o) { return o->cur.n - o->at + o->next.n; }

struct iovec *pd_out_pieces(struct pd_out *o, int n, struct pd_err *e)
{
    if (n > o->cap_iov) {
        struct iovec *v = pd_realloc(o->iov, (size_t)n, sizeof *v, "pieces of a chunk", e);
        if (!v)
            return NULL;
        o->iov = v;
        o->cap_iov = n;
    }
    return o->iov;
}

void pd_out_chunk(struct pd_out *o, const void *owner, int n)
{
    o->owner = owner;
    o->n_iov = n;
    o->at_iov = 0;
}

int pd_out_iov(struct pd_out *o, struct iovec *v, int max)
{
    int n = 0;
    if (o->at < o->cur.n && n < max)
        v[n++] = (struct iovec){ o->cur.p + o->at, o->cur.n - o->at };
    for (int i = o->at_iov; i < o->n_iov && n < max; i++)
        v[n++] = o->iov[i];
    if (o->next.n && n < max && n == (o->at < o->cur.n) + o->n_iov - o->at_iov)
        v[n++] = (struct iovec){ o->next.p, o->next.n };
    return n;
}

void pd_out_wrote(struct pd_out *o, size_t n)
{
    o->bytes += n;
    size_t k = o->cur.n - o->at < n ? o->cur.n - o->at : n;
    o->at += k;
    n -= k;
    while (n && o->at_iov < o->n_iov) {
        struct iovec *v = &o->iov[o->at_iov];
        k = v->iov_len < n ? v->iov_len : n;
        v->iov_base = (char *)v->iov_base + k;
        v->iov_len -= k;
        n -= k;
        if (!v->iov_len)
            o->at_iov++;
    }
    if (o->at < o->cur.n || pd_out_has_chunk(o))
        return;
    struct pd_buf done = o->cur;        /* its turn comes again with the next chunk */
    o->cur = o->next;
    o->at = n;                          /* what was written of it */
    done.n = 0;
    o->next = done;
    o->n_iov = o->at_iov = 0;
    o->owner = NULL;
    if (o->at == o->cur.n)
        o->at = o->cur.n = 0;
}

int pd_out_fence(struct pd_out *o, const void *owner, struct pd_err *e)
{
    if (!pd_out_has_chunk(o) || o->owner != owner)
        return 0;
    for (int i = o->at_iov; i < o->n_iov; i++)
        if (pd_buf_add(&o->cur, o->iov[i].iov_base, o->iov[i].iov_len, e))
            return PD_ENOMEM;
    if (pd_buf_add(&o->cur, o->next.p, o->next.n, e))
        return PD_ENOMEM;
    o->next.n = 0;
    o->n_iov = o->at_iov = 0;
    o->owner = NULL;
    return 0;
}

void pd_out_free(struct pd_out *o)
{
    pd_buf_free(&o->cur);
    pd_buf_free(&o->next);
    pd_free(o->iov);
    *o = (struct pd_out){ .at = 0 };
}
