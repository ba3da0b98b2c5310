#include <inttypes.h>
#include <sys/socket.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../wire/endpoint.h"
#include "../wire/pack.h"
#include "../wire/stream.h"
#include "../wire/value.h"
#include "ask.h"

/* What a `status` asks for besides. */
struct asked { bool follow, holds; const char *verify, *release, *reason; };

static void pack_asked(struct pd_packer *k, const struct asked *q)
{
    const struct { const char *key, *v; } text[] = { { "verify", q->verify }, { "release", q->release }, { "reason", q->reason } };
    uint32_t n = 2 + q->follow + q->holds;
    for (int i = 0; i < 3; i++)
        n += text[i].v != NULL;
    msgpack_pack_map(&k->pk, n);
    pd_pack_text(k, "pd");
    pd_pack_text(k, "status");
    pd_pack_text(k, "v");
    msgpack_pack_int(&k->pk, 1);
    for (int i = 0; i < 2; i++)
        if (i ? q->holds : q->follow) {
            pd_pack_text(k, i ? "holds" : "follow");
            msgpack_pack_true(&k->pk);
        }
    for (int i = 0; i < 3; i++)
        if (text[i].v) {
            pd_pack_text(k, text[i].key);
            pd_pack_text(k, text[i].v);
        }
}

static int request(const char *at, const struct asked *q, const struct pd_net *net, struct pd_endpoint *ep, struct pd_rstream **rs, struct pd_err *e)
{
    struct pd_buf b = { 0 };
    struct pd_packer k;
    struct pd_wstream *ws = NULL;
    if ((strncmp(at, "unix:", 5) || !at[5]) && strncmp(at, "tcp:", 4))
        return pd_fail(e, PD_EUSAGE, "'%s' is no endpoint of a daemon (examples: unix:/run/pd/d0, tcp:hostB:7000)", at);
    int rc = pd_endpoint_open_in(at, net, ep, e);
    if (rc < 0)
        return rc;
    pd_pack_init(&k, &b, e);
    pack_asked(&k, q);
    struct pd_rstream_opts ro = { .name = at };
    rc = k.rc ? k.rc : pd_wstream_of(ep, PD_FMT_MSGPACK, at, &ws, e);
    rc = rc ? rc : pd_wstream_put(ws, b.p, b.n, e);
    int closed = ws ? pd_wstream_close(ws, rc ? NULL : e) : 0;
    rc = rc ? rc : closed;
    if (rc == 0 && ep->tls)
        pd_tls_end(ep->tls);
    else if (rc == 0 && shutdown(ep->fd, SHUT_WR))
        rc = pd_fail_sys(e, "%s: cannot ask", at);
    rc = rc ? rc : pd_rstream_of(ep, &ro, rs, e);
    pd_buf_free(&b);
    return rc;
}

/* The next record; 0: the end. */
static int answer(struct pd_rstream *rs, const char *at, int64_t until, struct pd_rec *rec, struct pd_err *e)
{
    bool bad;
    for (;;) {
        int64_t left = until - pd_mono_us();
        if (left <= 0)
            return pd_fail(e, PD_ETIME, "%s: no answer in time; is it stopped?", at);
        int rc = pd_rstream_next(rs, (int)(left / 1000) + 1, rec, &bad, e);
        if (rc == 2)
            continue;
        if (rc == 1 && rec->kind == PD_K_ERROR) {
            struct pd_arena mem = { 0 };
            struct pd_error_rec er;
            if (pd_error_decode(rec->p, rec->n, &mem, &er, e) == 0)
                pd_fail(e, PD_EFAIL, "%s: %.400s", at, er.message.p ? er.message.p : "it refuses");
            pd_arena_free(&mem);
            return PD_EFAIL;
        }
        return rc;
    }
}

static int ask_one(const char *at, const struct asked *q, const struct pd_net *net, struct pd_buf *out, struct pd_err *e)
{
    struct pd_endpoint ep = { .fd = -1 };
    struct pd_rstream *rs = NULL;
    struct pd_rec rec;
    int rc = request(at, q, net, &ep, &rs, e);
    if (rc == 0 && (rc = answer(rs, at, pd_mono_us() + net->connect_us, &rec, e)) == 1)
        rc = rec.kind == PD_K_STATUS ? pd_buf_add(out, rec.p, rec.n, e) : pd_fail(e, PD_EFAIL, "%s: it does not answer with its status", at);
    else if (rc == 0)
        rc = pd_fail(e, PD_EFAIL, "%s: it closed without an answer (is it a daemon: pd-prefill, pd-decode or pd-route --listen?)", at);
    pd_rstream_free(rs);
    pd_endpoint_abort(&ep);
    return rc;
}

int pd_ask_status(const char *at, const struct pd_net *net, struct pd_buf *out, struct pd_err *e) { return ask_one(at, &(struct asked){ 0 }, net, out, e); }

int pd_ask_verify(const char *at, const char *run, const struct pd_net *net, struct pd_buf *out, struct pd_err *e)
{
    return ask_one(at, &(struct asked){ .verify = run }, net, out, e);
}

int pd_ask_holds(const char *at, const char *release, const char *reason, const struct pd_net *net, struct pd_buf *out, struct pd_err *e)
{
    return ask_one(at, &(struct asked){ .holds = true, .release = release, .reason = reason }, net, out, e);
}

int pd_ask_workers(const char *at, const struct pd_net *net, struct pd_buf *out, struct pd_err *e)
{
    struct pd_endpoint ep = { .fd = -1 };
    struct pd_rstream *rs = NULL;
    struct pd_buf status = { 0 };
    struct pd_bin v;
    struct pd_str role = { NULL, 0 };
    struct pd_rec rec;
    int64_t until = pd_mono_us() + net->connect_us;
    uint32_t n = 0;
    int rc = pd_ask_status(at, net, &status, e);
    if (rc == 0 && pd_map_find(status.p, status.n, "role", &v) == 1)
        pd_get_str(v, &role);
    bool all = pd_str_eq(role, "route");        /* a worker tells of itself for ever, a router is done when it has told of all */
    rc = rc ? rc : request(at, &(struct asked){ .follow = true }, net, &ep, &rs, e);
    while (rc == 0 && (all || !n)) {
        if ((rc = answer(rs, at, until, &rec, e)) <= 0)
            break;
        rc = rec.kind == PD_K_WORKER ? pd_buf_add(out, rec.p, rec.n, e) : 0;
        n += rec.kind == PD_K_WORKER;
    }
    if (rc == 0 && !n)
        rc = all ? pd_fail(e, PD_ENOWORKER, "%s: it knows no worker", at) : pd_fail(e, PD_EFAIL, "%s: it is no worker", at);
    pd_buf_free(&status);
    pd_rstream_free(rs);
    pd_endpoint_abort(&ep);
    return rc;
}

static struct pd_str text_in(const uint8_t *rec, size_t n, const char *key)
{
    struct pd_bin v;
    struct pd_str s;
    return pd_map_find(rec, n, key, &v) == 1 && pd_get_str(v, &s) && s.n ? s : (struct pd_str){ "-", 1 };
}

int pd_status_text(const uint8_t *rec, size_t n, struct pd_buf *out, struct pd_err *e)
{
    struct pd_bin map, v;
    struct pd_iter it;
    struct pd_str key, worker = text_in(rec, n, "worker"), role = text_in(rec, n, "role"), state = text_in(rec, n, "state");
    int64_t x;
    int rc = pd_buf_printf(out, e, "%.*s  %.*s  %.*s\n", (int)worker.n, worker.p, (int)role.n, role.p, (int)state.n, state.p);
    if (rc || pd_map_find(rec, n, "ledger", &map) != 1 || !pd_iter_open(&it, map, PD_T_MAP))
        return rc;
    while (rc == 0 && pd_iter_pair(&it, &key, &v))
        if (key.p && pd_get_int(v, &x))
            rc = pd_buf_printf(out, e, "%-24.*s %" PRId64 "\n", (int)(key.n < 60 ? key.n : 60), key.p, x);
    return rc;
}
