/* inline: payload as chunk records between the protocol's own. Written from pool memory, hashed on the way out. */
#include <sys/uio.h>
#include "rdma_dev.h"
#include "transport.h"

static int usable(const struct pd_hello *mine, const struct pd_hello *theirs, const struct pd_xfer_opts *o, struct pd_err *e) { return 0; }

static int offer(void *path, const struct pd_sending *s, struct pd_payload *y, struct pd_arena *a, struct pd_err *e)
{
    strcpy(y->scheme, "inline");
    return 0;
}

/* One: its bytes leave before the next one is hashed, so that they are still in the cache, and whatever else is to be said comes between. */
static int send_one(void *path, const struct pd_sending *s, uint32_t index, uint32_t n, struct pd_out *out, uint32_t *sent, struct pd_err *e)
{
    struct pd_chunk c;
    int pieces = 0;
    *sent = 0;
    if (pd_out_has_chunk(out))
        return 0;
    struct iovec *iov = pd_out_pieces(out, (int)(2 * s->plan->chunk_blocks), e);
    if (!iov)
        return PD_ENOMEM;
    int rc = pd_export_chunk(s->pool, s->blocks, s->plan, s->desc, index, &c, iov, &pieces, e);
    if (!rc && *s->desc->payload.codec == 'z')
        rc = pd_codec_chunk(s->coding->codec, &s->coding->rule, &c, iov, &pieces, e);
    rc = rc ? rc : pd_chunk_encode_head(&c, pd_out_buf(out), e);
    if (rc)
        return rc;
    pd_out_chunk(out, s->owner, pieces);
    s->coding->bytes = c.data.n;
    *sent = 1;
    return 0;
}

static int fence(void *path, const void *owner, struct pd_out *out, struct pd_err *e) { return pd_out_fence(out, owner, e); }

const struct pd_transport pd_inline = { .scheme = "inline", .usable = usable, .offer = offer, .send = send_one, .fence = fence };

const struct pd_transport *const pd_transports[PD_TRANSPORTS] = { &pd_inline, &pd_shm, &pd_tcp, &pd_rdma };

const struct pd_transport *pd_transport_find(struct pd_str scheme)
{
    for (int i = 0; i < PD_TRANSPORTS; i++)
        if (pd_str_eq(scheme, pd_transports[i]->scheme))
            return pd_transports[i];
    return NULL;
}

int pd_transport_number(const char *scheme)
{
    int i = PD_TRANSPORTS - 1;
    while (i && strcmp(scheme, pd_transports[i]->scheme))
        i--;
    return i;
}

int pd_via_check(const char *via, struct pd_err *e)
{
    for (const char *s = via; *s; s += *s == ',') {
        struct pd_str one = { s, strcspn(s, ",") };
        if (!pd_transport_find(one))
            return pd_fail(e, PD_EUSAGE, "--via: '%.*s' is no transport (example: --via shm,tcp,inline)", (int)one.n, s);
        s += one.n;
    }
    return *via ? 0 : pd_fail(e, PD_EUSAGE, "--via is empty (example: --via shm,tcp,inline)");
}

const char *pd_via_default(bool unix_socket, bool tcp)
{
    bool rdma = tcp && pd_rdma_here();
    return !tcp ? "shm,inline" : unix_socket ? rdma ? "shm,rdma,tcp,inline" : "shm,tcp,inline" : rdma ? "rdma,tcp,inline" : "tcp,inline";
}
