/* The hello of a connection: what this end says of itself, and what is made of what the other one says: the ways that KV may take, best first. */
#include <inttypes.h>
#include <stdio.h>
#include <sys/epoll.h>
#include "../base/log.h"
#include "../kv/convert.h"
#include "../kv/fingerprint.h"
#include "proto_in.h"

static int parse_via(struct pd_xfer *x, const char *via, struct pd_err *e)
{
    struct pd_hello *h = &x->mine;
    if (!(h->via = pd_arena_alloc(&x->my_arena, 4, sizeof *h->via, e)))
        return PD_ENOMEM;
    for (const char *s = via; *s; s += *s == ',') {
        struct pd_str one = { s, strcspn(s, ",") };
        if (!pd_transport_find(one))
            return pd_fail(e, PD_EUSAGE, "--via: '%.*s' is no transport (example: --via shm,tcp,inline)", (int)one.n, s);
        if (h->n_via == 4)
            return pd_fail(e, PD_EUSAGE, "--via: more than 4 transports");
        h->via[h->n_via++] = one;
        s += one.n;
    }
    return h->n_via ? 0 : pd_fail(e, PD_EUSAGE, "--via is empty (example: --via shm,tcp,inline)");
}

/* What each of them has to say in the hello. */
static int greet(struct pd_xfer *x, struct pd_err *e)
{
    struct pd_hello *h = &x->mine;
    int rc = 0;
    for (uint32_t i = 0; i < h->n_via && !rc; i++) {
        const struct pd_transport *t = pd_transport_find(h->via[i]);
        if (t->greet)
            rc = t->greet(&x->o, h, &x->my_arena, &x->greeted[i], e);
    }
    return rc;
}

void pd_x_hello_forget(struct pd_xfer *x)
{
    for (uint32_t i = 0; i < 4; i++)
        if (x->greeted[i]) {
            pd_transport_find(x->mine.via[i])->close(x->greeted[i]);
            x->greeted[i] = NULL;
        }
}

struct pd_str pd_xfer_caps[PD_XFER_CAPS] = { { "in_place", 8 }, { "resume", 6 }, { "held", 4 }, { "zstd", 4 }, { "any_way", 7 } };

bool pd_hello_can(const struct pd_hello *h, const char *cap)
{
    for (uint32_t i = 0; i < h->n_caps; i++)
        if (pd_str_eq(h->caps[i], cap))
            return true;
    return false;
}

static int set_caps(struct pd_xfer *x, struct pd_err *e)
{
    struct pd_hello *h = &x->mine;
    if (!(h->caps = pd_arena_alloc(&x->my_arena, PD_XFER_CAPS + 2 + PD_CONV_CAPS, sizeof *h->caps, e)))
        return PD_ENOMEM;
    memcpy(h->caps, pd_xfer_caps, sizeof pd_xfer_caps);
    h->n_caps = PD_XFER_CAPS;
    if (!x->o.giving)
        h->n_caps += pd_conv_caps(x->o.convert, h->caps + h->n_caps);
    if (x->o.relay)
        h->caps[h->n_caps++] = (struct pd_str){ "relay", 5 };
    if (x->o.probe)
        h->caps[h->n_caps++] = (struct pd_str){ "probe", 5 };
    return 0;
}

int pd_x_hello_make(struct pd_xfer *x, struct pd_err *e)
{
    const char *via = x->o.via ? x->o.via : pd_via_default(!x->o.tcp, x->o.tcp);
    int rc = set_caps(x, e);
    rc = rc ? rc : parse_via(x, via, e);
    return rc ? rc : greet(x, e);
}

/* ---- theirs ---- */

static bool lists(const struct pd_hello *h, struct pd_str scheme)
{
    for (uint32_t i = 0; i < h->n_via; i++)
        if (h->via[i].n == scheme.n && !memcmp(h->via[i].p, scheme.p, scheme.n))
            return true;
    return false;
}

void pd_x_tell_via(struct pd_xfer *x, char open, const char *text)
{
    size_t n = strlen(x->via_text);
    snprintf(x->via_text + n, sizeof x->via_text - n, "%s%s", !n ? "" : open == '(' ? " (" : ", ", text);
    if (open == '(') {
        n = strlen(x->via_text);
        snprintf(x->via_text + n, sizeof x->via_text - n, ")");
    }
}

/* The taker's order, of what both allow and can use. */
static int choose_via(struct pd_xfer *x)
{
    const struct pd_hello *taker = x->o.giving ? &x->theirs : &x->mine, *other = x->o.giving ? &x->mine : &x->theirs;
    char why_not[256] = "";
    for (uint32_t i = 0; i < taker->n_via; i++) {
        const struct pd_transport *t = pd_transport_find(taker->via[i]);
        struct pd_err e = { 0 };
        void *path = NULL;
        uint32_t mine = 0;
        bool twice = false;
        for (uint32_t k = 0; k < x->n_via; k++)
            twice |= x->via[k] == t;
        if (!t || twice || x->n_via == 4)
            continue;
        while (mine < x->mine.n_via && !pd_str_eq(x->mine.via[mine], t->scheme))
            mine++;
        if (mine < x->mine.n_via)
            path = x->greeted[mine];
        if (!lists(other, taker->via[i]))
            pd_fail(&e, PD_EINCOMPAT, "%s: the other side does not offer it", t->scheme);
        else if (!t->usable(&x->mine, &x->theirs, &x->o, &e) && t->open && t->open(&x->o, &x->theirs, &path, &e) == PD_ENOMEM)
            return pd_x_fatal(x, PD_ENOMEM, "%s", e.msg);
        if (e.code) {
            x->unused[pd_transport_number(t->scheme)] = e;
            snprintf(why_not + strlen(why_not), sizeof why_not - strlen(why_not), "%s%.120s", *why_not ? "; " : "", e.msg);
            continue;
        }
        if (mine < x->mine.n_via)
            x->greeted[mine] = NULL;
        x->path[x->n_via] = path;
        x->via[x->n_via++] = t;
        x->streams |= t->stream != NULL;
        pd_x_tell_via(x, ',', t->scheme);
    }
    pd_x_hello_forget(x);
    if (!x->n_via)
        return pd_x_fatal(x, PD_EINCOMPAT, "there is no way to move KV between the two: %s", *why_not ? why_not : "no transport is known to both");
    if (*why_not)
        pd_x_tell_via(x, '(', why_not);
    const struct pd_rdma_at *q = &x->mine.rdma;
    if (x->mine.has_rdma && !q->qp && !pd_str_eq(q->why, PD_RDMA_NONE) && x->via[0] != &pd_shm && lists(&x->theirs, (struct pd_str){ "rdma", 4 }))
        pd_warn("%.*s; KV goes by %s", (int)q->why.n, q->why.p, x->via[0]->scheme);
    return 0;
}

const char *pd_xfer_unused(const struct pd_xfer *x, const char *scheme)
{
    for (uint32_t i = 0; i < x->n_via; i++)
        if (!strcmp(x->via[i]->scheme, scheme) && x->dead[i].code)
            return x->dead[i].msg;
    int n = pd_transport_number(scheme);
    return n >= 0 && x->unused[n].code ? x->unused[n].msg : NULL;
}

/* Several of them are one to whoever waits. */
static int gather_fds(struct pd_xfer *x)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < x->n_via; i++)
        n += x->via[i]->fd != NULL;
    if (n < 2)
        return 0;
    if ((x->all = epoll_create1(EPOLL_CLOEXEC)) < 0)
        return pd_x_fatal(x, PD_ENOMEM, "no descriptor is left for a transfer");
    for (uint32_t i = 0; i < x->n_via; i++)
        if (x->via[i]->fd && epoll_ctl(x->all, EPOLL_CTL_ADD, x->via[i]->fd(x->path[i]), &(struct epoll_event){ .events = EPOLLIN }))
            return pd_x_fatal(x, PD_ENOMEM, "a transfer's descriptors cannot be waited for");
    return 0;
}

int pd_x_hello(struct pd_xfer *x, const void *rec, size_t n)
{
    struct pd_hello *h = &x->theirs, *mine = &x->mine;
    const struct pd_hello *p = x->o.giving ? mine : h, *d = x->o.giving ? h : mine;
    struct pd_err e = { 0 };
    int rc = pd_hello_decode(rec, n, &x->their_arena, h, &e);
    if (rc)
        return pd_x_malformed(x, rc, &e);
    if (h->has_attach)
        return pd_x_fatal(x, PD_ECORRUPT, "hello: `attach` belongs on a socket of its own");
    if (h->version < mine->version_min || h->version_min > mine->version || h->version_min > h->version)
        return pd_x_fatal(x, PD_EINCOMPAT, "version of the transfer protocol differs (here %u to %u, there %u to %u)", mine->version_min, mine->version,
                          h->version_min, h->version);
    if (strcmp(h->role, x->o.giving ? "decode" : "prefill"))
        return pd_x_fatal(x, PD_EINCOMPAT, "role differs from what this connection is for (here %s, there %.11s)", mine->role, h->role);
    if (p->epoch != d->epoch)
        return pd_x_fatal(x, PD_EINCOMPAT, "epoch differs (prefill %" PRIu64 ", decode %" PRIu64 ")", p->epoch, d->epoch);
    unsigned admit = pd_conv_of_caps(d->caps, d->n_caps);
    if (pd_fp_compare_with(p->fp_fields, d->fp_fields, admit, NULL, &e) == PD_FP_DIFFERS)
        return pd_x_fatal(x, e.code ? e.code : PD_EINCOMPAT, "%s", e.msg);
    x->advisory = e;
    if ((rc = pd_layout_check(&h->layout, &e)))
        return pd_x_fatal(x, rc, "%s", e.msg);
    struct pd_kv_layout bridged = h->layout;
    if (admit & PD_CONV_BLOCK_SIZE)
        bridged.block_size = mine->layout.block_size;
    if (admit & PD_CONV_ORDER)
        memcpy(bridged.order, mine->layout.order, sizeof bridged.order);
    if (pd_layout_hash(&bridged) != mine->layout.layout_hash)
        return pd_x_fatal(x, PD_EINCOMPAT, "layout_hash differs (prefill %016" PRIx64 ", decode %016" PRIx64 ")", p->layout.layout_hash, d->layout.layout_hash);
    if ((rc = choose_via(x)) || (rc = gather_fds(x)))
        return rc;
    x->state = X_OPEN;
    x->ready_by = x->now + x->o.hello_us;
    while (x->n_early) {
        x->n_early--;
        pd_xfer_stream(x, x->early[x->n_early].fd, x->early[x->n_early].tls, x->now, NULL);
    }
    return 0;
}
