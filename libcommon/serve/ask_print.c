/* What was asked, on -o and in the form that --format says: for commands. */
#include <unistd.h>
#include "../base/cli.h"
#include "../wire/endpoint.h"
#include "../wire/frame.h"
#include "../wire/stream.h"
#include "../wire/value.h"
#include "ask.h"

static bool wants(const char *format) { return pd_cli.format && !strcmp(pd_cli.format, format); }

/* Records to -o: msgpack as they are, or JSON Lines. */
int pd_print_records(const uint8_t *p, size_t n, struct pd_err *e)
{
    struct pd_endpoint out = { .fd = -1 };
    struct pd_wstream *ws = NULL;
    const char *to = pd_cli.out ? pd_cli.out : "-";
    const struct pd_net *net = pd_net_cli(e);
    int rc = net ? pd_endpoint_open_out(to, net, &out, e) : e->code;
    if (rc == 0 && !wants("json") && isatty(out.fd))
        rc = pd_fail(e, PD_EUSAGE, "-o: records are binary and the output is a terminal (use --format json, -o FILE, or a pipe)");
    rc = rc ? rc : pd_wstream_of(&out, wants("json") ? PD_FMT_JSON : PD_FMT_MSGPACK, to, &ws, e);
    for (size_t at = 0, len = 0; rc == 0 && at < n; at += len) {
        struct pd_frame_scan scan = { 0 };
        rc = pd_frame_next(&scan, p + at, n - at, SIZE_MAX / 2, &len, e);
        rc = rc == 1 ? pd_wstream_put(ws, p + at, len, e) : pd_fail(e, PD_ECORRUPT, "what was answered is no record");
    }
    return pd_wstream_end(ws, &out, rc, e);
}

int pd_print_text(const struct pd_buf *b, struct pd_err *e)
{
    struct pd_endpoint out = { .fd = -1 };
    struct pd_wstream *ws = NULL;
    const char *to = pd_cli.out ? pd_cli.out : "-";
    const struct pd_net *net = pd_net_cli(e);
    int rc = net ? pd_endpoint_open_out(to, net, &out, e) : e->code;
    rc = rc ? rc : pd_wstream_of(&out, PD_FMT_MSGPACK, to, &ws, e);
    rc = rc ? rc : pd_wstream_raw(ws, b->p, b->n, e);
    return pd_wstream_end(ws, &out, rc, e);
}

int pd_print_status(const char *at, struct pd_err *e)
{
    struct pd_buf rec = { 0 }, text = { 0 };
    const struct pd_net *net = pd_net_cli(e);
    int rc = !net ? e->code : wants("msgpack") ? pd_ask_workers(at, net, &rec, e) : pd_ask_status(at, net, &rec, e);
    if (rc == PD_EUSAGE)
        pd_err_prefix(e, "--status");
    if (rc == 0 && pd_cli.format)
        rc = pd_print_records(rec.p, rec.n, e);
    else if (rc == 0 && (rc = pd_status_text(rec.p, rec.n, &text, e)) == 0)
        rc = pd_print_text(&text, e);
    pd_buf_free(&rec);
    pd_buf_free(&text);
    return rc;
}

static struct pd_str text_of(struct pd_bin map, const char *key)
{
    struct pd_bin v;
    struct pd_str s;
    return pd_map_find(map.p, map.n, key, &v) == 1 && pd_get_str(v, &s) ? s : (struct pd_str){ "-", 1 };
}

int pd_print_holds(const char *at, const char *release, const char *reason, struct pd_err *e)
{
    struct pd_buf rec = { 0 }, text = { 0 };
    struct pd_bin list, v;
    struct pd_iter it;
    int64_t n = 0;
    const struct pd_net *net = pd_net_cli(e);
    int rc = !net ? e->code : pd_ask_holds(at, release, reason, net, &rec, e);
    if (rc == PD_EUSAGE)
        pd_err_prefix(e, "--router");
    if (rc == 0 && release && pd_map_find(rec.p, rec.n, "released", &v) == 1 && pd_get_int(v, &n))
        rc = pd_buf_printf(&text, e, "released %lld\n", (long long)n);
    if (rc == 0 && pd_map_find(rec.p, rec.n, "holds", &list) == 1 && pd_iter_open(&it, list, PD_T_ARRAY))
        while (rc == 0 && pd_iter_next(&it, &v)) {
            struct pd_str p = text_of(v, "p"), d = text_of(v, "d"), why = text_of(v, "cause");
            rc = pd_buf_printf(&text, e, "%.*s,%.*s  %.*s\n", (int)p.n, p.p, (int)d.n, d.p, (int)why.n, why.p);
        }
    if (rc == 0)
        rc = pd_cli.format ? pd_print_records(rec.p, rec.n, e) : pd_print_text(&text, e);
    pd_buf_free(&rec);
    pd_buf_free(&text);
    return rc;
}
