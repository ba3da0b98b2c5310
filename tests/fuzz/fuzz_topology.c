/* Text as a topology: what is accepted has a path for each pair of domains, with values that can be counted with; what is refused is so with its line. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "../../libcommon/route/topology.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    struct pd_topology *t = NULL;
    struct pd_buf b = { 0 };
    struct pd_err e = { 0 };
    if (pd_topology_parse((const char *)p, n, "topology", &t, &e) < 0) {
        if (t || (e.code == PD_EUSAGE && strncmp(e.msg, "topology: line ", 15)))
            abort();
        return 0;
    }
    int domains = (int)pd_topology_domains(t), most = domains < 64 ? domains : 64;
    for (int i = -1; i < most; i++) {
        const char *name = pd_topology_name(t, i);
        struct pd_str s = { name, strlen(name) };
        struct pd_spot spot = pd_topology_spot(t, "unix:x", (struct pd_str){ "w", 1 }, s);
        if (pd_topology_domain(t, s.p, s.n) != i || spot.domain < -1 || spot.domain >= domains || (!spot.by_file && spot.domain != i))
            abort();
        for (int near = 0; near < PD_NEAR_N; near++) {
            int around = pd_topology_around(t, i, (enum pd_near)near);
            if (around >= 0 && (int)pd_topology_way(t, around, around)->line == 0 && pd_topology_way(t, around, around)->near > (enum pd_near)near)
                abort();
        }
        for (int k = -1; k < most; k++) {
            const struct pd_way *w = pd_topology_way(t, i, k);
            if (w->near >= PD_NEAR_N || !(w->bytes_per_us > 0) || !isfinite(w->bytes_per_us) || !(w->latency_us >= 0) || !(w->jitter_us >= 0) || !(w->cost_us >= 0))
                abort();
        }
    }
    if (pd_topology_filled(t, &b, &e) < 0)
        abort();
    pd_buf_free(&b);
    pd_topology_free(t);
    return 0;
}
