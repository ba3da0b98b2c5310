/* The small HTTP side of a daemon: GET /metrics (Prometheus text) and /healthz, through libevent's server. Loopback or a Unix socket only, unless told
 * otherwise. */
#ifndef PD_SERVE_HTTP_H
#define PD_SERVE_HTTP_H
#include "../base/loop.h"
#include "../base/metrics.h"

struct pd_http_opts {
    const char *where;          /* "http:HOST:PORT" (port 0: any), "unix:PATH" */
    bool insecure;              /* a host that is not loopback is allowed */
    struct pd_metrics *metrics;
    bool (*healthy)(void *ctx, const char **say);      /* say: one word for the body; false: 503 */
    void *ctx;
};
struct pd_http;
int pd_http_new(struct pd_loop *l, const struct pd_http_opts *o, struct pd_http **out, struct pd_err *e);
const char *pd_http_where(const struct pd_http *h);     /* with the port that it has */
void pd_http_free(struct pd_http *h);   /* NULL: nothing */
#endif
