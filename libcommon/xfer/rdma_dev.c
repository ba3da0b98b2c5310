#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/fault.h"
#include "rdma_dev.h"

/* A dead link shows after (RETRIES + 1) timeouts of 4.096 us * 2^TIMEOUT: two seconds. 7 retries would be for ever on some providers. A peer that does not
 * take its immediates is waited for as often, half a second each time. */
enum { RETRIES = 6, TIMEOUT = 16, RNR_TIMER = 31, PORT_MAX = 8 };

struct pd_rdma_dev {
    struct pd_rdma_dev *next;
    char want[64];                      /* the name that it was asked for by, or "" */
    struct ibv_context *ctx;
    struct ibv_pd *pd;
    uint32_t users;
    uint8_t port;
    int gid_index;
    bool roce;
    struct ibv_port_attr attr;
    union ibv_gid gid;
    struct pd_rdma_source *sources;
    size_t tried;                       /* bytes that could be registered at once */
};
struct pd_rdma_source {
    struct pd_rdma_dev *dev;
    struct pd_rdma_source *next;
    const struct pd_pool *pool;
    uint32_t users, n_slabs;
    struct ibv_mr **mr;                 /* [n_slabs] */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct pd_rdma_dev *devices;      /* that are open */

/* ---- the device ---- */

static bool is_ipv4(const union ibv_gid *g)
{
    static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };
    return !memcmp(g->raw, mapped, sizeof mapped);
}

const char *pd_rdma_gid_text(const uint8_t gid[16], char out[64])
{
    union ibv_gid g;
    memcpy(g.raw, gid, 16);
    if (!inet_ntop(is_ipv4(&g) ? AF_INET : AF_INET6, is_ipv4(&g) ? gid + 12 : gid, out, 64))
        strcpy(out, "?");
    return out;
}

/* The best address of the device: index 0 is the link-local one on most, and leads nowhere. */
static int find_gid(struct pd_rdma_dev *d)
{
    int best = 0;
    for (int port = 1; port <= PORT_MAX && best < 3; port++) {
        struct ibv_port_attr a;
        if (ibv_query_port(d->ctx, (uint8_t)port, &a) || a.state != IBV_PORT_ACTIVE)
            continue;
        for (int i = 0; i < a.gid_tbl_len && best < 3; i++) {
            struct ibv_gid_entry g;
            if (ibv_query_gid_ex(d->ctx, (uint32_t)port, (uint32_t)i, &g, 0))
                continue;
            int good = g.gid_type == IBV_GID_TYPE_ROCE_V2 ? is_ipv4(&g.gid) ? 3 : 1 : g.gid_type == IBV_GID_TYPE_IB && a.link_layer == IBV_LINK_LAYER_INFINIBAND ? 2 : 0;
            if (good <= best)
                continue;
            best = good;
            d->port = (uint8_t)port;
            d->gid_index = i;
            d->gid = g.gid;
            d->attr = a;
            d->roce = a.link_layer == IBV_LINK_LAYER_ETHERNET;
        }
    }
    return best;
}

static void device_close(struct pd_rdma_dev *d)
{
    if (d->pd)
        ibv_dealloc_pd(d->pd);
    if (d->ctx)
        ibv_close_device(d->ctx);
    pd_free(d);
}

static int device_try(struct ibv_device *dev, struct pd_rdma_dev **out, struct pd_err *e)
{
    const char *name = ibv_get_device_name(dev);
    struct ibv_device_attr a;
    struct pd_rdma_dev *d = pd_calloc(1, sizeof *d, "RDMA device", e);
    int rc = 0;
    if (!d)
        return PD_ENOMEM;
    if (!(d->ctx = ibv_open_device(dev)))
        rc = pd_fail(e, PD_EINCOMPAT, "rdma: %s cannot be opened: %s", name, strerror(errno));
    else if (ibv_query_device(d->ctx, &a))
        rc = pd_fail(e, PD_EINCOMPAT, "rdma: %s does not answer: %s", name, strerror(errno));
    else if (a.max_qp_wr < PD_RDMA_DEPTH)
        rc = pd_fail(e, PD_EINCOMPAT, "rdma: %s has queues of %d, %d are needed", name, a.max_qp_wr, PD_RDMA_DEPTH);
    else if (!find_gid(d))
        rc = pd_fail(e, PD_EINCOMPAT, "rdma: %s has no active port with an address", name);
    else if (!(d->pd = ibv_alloc_pd(d->ctx)))
        rc = pd_fail(e, PD_EINCOMPAT, "rdma: %s gives no protection domain: %s", name, strerror(errno));
    if (rc)
        device_close(d);
    else
        *out = d;
    return rc;
}

bool pd_rdma_here(void)
{
    int n = 0;
    struct ibv_device **all = ibv_get_device_list(&n);
    if (all)
        ibv_free_device_list(all);
    return all && n > 0;
}

static int device_get(struct pd_rdma_dev **out, struct pd_err *e)      /* locked */
{
    const char *want = getenv("PD_RDMA_DEVICE");
    int n = 0, rc = 0, tried = 0;
    want = want ? want : "";
    for (struct pd_rdma_dev *d = devices; d; d = d->next)
        if (!strcmp(d->want, want)) {
            d->users++;
            *out = d;
            return 0;
        }
    struct ibv_device **all = ibv_get_device_list(&n);
    if (!all || !n)
        rc = pd_fail(e, PD_EINCOMPAT, PD_RDMA_NONE);
    for (int i = 0; all && i < n; i++) {
        if (*want && strcmp(want, ibv_get_device_name(all[i])))
            continue;
        tried++;
        if (!(rc = device_try(all[i], out, e)) || rc == PD_ENOMEM)
            break;
    }
    if (!rc && !tried)
        rc = pd_fail(e, PD_EINCOMPAT, "rdma: there is no device '%.40s' (PD_RDMA_DEVICE) here", want);
    if (all)
        ibv_free_device_list(all);
    if (rc)
        return rc;
    snprintf((*out)->want, sizeof (*out)->want, "%s", want);
    (*out)->users = 1;
    (*out)->next = devices;
    devices = *out;
    return 0;
}

static void device_put(struct pd_rdma_dev *d)       /* locked */
{
    struct pd_rdma_dev **at = &devices;
    if (--d->users)
        return;
    while (*at != d)
        at = &(*at)->next;
    *at = d->next;
    device_close(d);
}

/* ---- queue pairs ---- */

static uint32_t mtu_bytes(enum ibv_mtu m) { return 128u << m; }
static enum ibv_mtu mtu_of(uint32_t bytes)
{
    enum ibv_mtu m = IBV_MTU_256;
    while (m < IBV_MTU_4096 && mtu_bytes(m + 1) <= bytes)
        m++;
    return m;
}

static int make(struct pd_rdma_qp *q, bool giving, struct pd_err *e)
{
    struct pd_rdma_dev *d = q->dev;
    struct ibv_qp_init_attr a = { .qp_type = IBV_QPT_RC, .cap = { .max_send_wr = giving ? PD_RDMA_DEPTH : 1, .max_recv_wr = giving ? 1 : PD_RDMA_RECVS,
                                  .max_send_sge = 1, .max_recv_sge = 1 } };
    q->own_pd = !giving;
    if (!(q->pd = giving ? d->pd : ibv_alloc_pd(d->ctx)))
        return pd_fail(e, PD_EINCOMPAT, "rdma: no protection domain: %s", strerror(errno));
    if (!(q->channel = ibv_create_comp_channel(d->ctx)) || fcntl(q->channel->fd, F_SETFL, fcntl(q->channel->fd, F_GETFL) | O_NONBLOCK) ||
        !(q->cq = ibv_create_cq(d->ctx, PD_RDMA_DEPTH + PD_RDMA_RECVS, NULL, q->channel, 0)) || ibv_req_notify_cq(q->cq, 0))
        return pd_fail(e, PD_EINCOMPAT, "rdma: no completion queue: %s", strerror(errno));
    a.send_cq = a.recv_cq = q->cq;
    if (!(q->qp = ibv_create_qp(q->pd, &a)))
        return pd_fail(e, PD_EINCOMPAT, "rdma: no queue pair: %s%s", strerror(errno), errno == ENOMEM ? " (raise the locked-memory limit: ulimit -l)" : "");
    struct ibv_qp_attr t = { .qp_state = IBV_QPS_INIT, .port_num = d->port, .qp_access_flags = giving ? 0 : IBV_ACCESS_REMOTE_WRITE };
    if (ibv_modify_qp(q->qp, &t, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        return pd_fail(e, PD_EINCOMPAT, "rdma: the queue pair cannot begin: %s", strerror(errno));
    q->max_msg = d->attr.max_msg_sz;
    q->at = (struct pd_rdma_at){ .lid = d->attr.lid, .qp = q->qp->qp_num, .mtu = mtu_bytes(d->attr.active_mtu) };
    memcpy(q->at.gid, d->gid.raw, sizeof q->at.gid);
    if (getrandom(&q->at.psn, sizeof q->at.psn, 0) != sizeof q->at.psn)
        return pd_fail_sys(e, "rdma: no random numbers");
    q->at.psn &= 0xffffff;
    return giving ? 0 : pd_rdma_qp_recv(q, PD_RDMA_RECVS, e);
}

int pd_rdma_qp_open(bool giving, struct pd_rdma_qp **out, struct pd_err *e)
{
    struct pd_rdma_qp *q = pd_calloc(1, sizeof *q, "queue pair", e);
    if (!q)
        return PD_ENOMEM;
    pthread_mutex_lock(&lock);
    int rc = device_get(&q->dev, e);
    pthread_mutex_unlock(&lock);
    rc = rc ? rc : make(q, giving, e);
    if (rc)
        pd_rdma_qp_close(q);
    else
        *out = q;
    return rc;
}

int pd_rdma_qp_connect(struct pd_rdma_qp *q, const struct pd_rdma_at *peer, struct pd_err *e)
{
    const struct pd_rdma_dev *d = q->dev;
    struct ibv_qp_attr r = { .qp_state = IBV_QPS_RTR, .path_mtu = mtu_of(peer->mtu < q->at.mtu ? peer->mtu : q->at.mtu), .dest_qp_num = peer->qp,
                             .rq_psn = peer->psn & 0xffffff, .max_dest_rd_atomic = 1, .min_rnr_timer = RNR_TIMER,
                             .ah_attr = { .dlid = (uint16_t)peer->lid, .port_num = d->port, .is_global = d->roce, .grh = { .hop_limit = 64,
                                          .sgid_index = (uint8_t)d->gid_index } } };
    struct ibv_qp_attr s = { .qp_state = IBV_QPS_RTS, .timeout = TIMEOUT, .retry_cnt = RETRIES, .rnr_retry = RETRIES, .sq_psn = q->at.psn, .max_rd_atomic = 1 };
    char to[64];
    memcpy(r.ah_attr.grh.dgid.raw, peer->gid, sizeof peer->gid);
    if (ibv_modify_qp(q->qp, &r, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) ||
        ibv_modify_qp(q->qp, &s, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
        return pd_fail(e, PD_EINCOMPAT, "rdma: %s cannot be reached from %s: %s", pd_rdma_gid_text(peer->gid, to), ibv_get_device_name(d->ctx->device), strerror(errno));
    return 0;
}

int pd_rdma_qp_recv(struct pd_rdma_qp *q, int n, struct pd_err *e)
{
    struct ibv_recv_wr w = { .num_sge = 0 }, *bad;
    for (int i = 0; i < n; i++) {
        int rc = ibv_post_recv(q->qp, &w, &bad);
        if (rc)
            return pd_fail(e, PD_EFAIL, "rdma: a receive cannot be posted: %s", strerror(rc));
    }
    return 0;
}

int pd_rdma_qp_poll(struct pd_rdma_qp *q, struct ibv_wc *wc, int n, struct pd_err *e)
{
    struct ibv_cq *cq;
    void *ctx;
    if (!q->qp)
        return 0;
    int k = ibv_poll_cq(q->cq, n, wc);
    if (k)
        return k < 0 ? pd_fail(e, PD_EFAIL, "rdma: the completion queue does not answer") : k;
    while (!ibv_get_cq_event(q->channel, &cq, &ctx))
        ibv_ack_cq_events(q->cq, 1);
    if (ibv_req_notify_cq(q->cq, 0))
        return pd_fail(e, PD_EFAIL, "rdma: completions cannot be waited for");
    k = ibv_poll_cq(q->cq, n, wc);      /* what came before it was asked for */
    return k < 0 ? pd_fail(e, PD_EFAIL, "rdma: the completion queue does not answer") : k;
}

void pd_rdma_qp_stop(struct pd_rdma_qp *q)
{
    if (q->qp)
        ibv_destroy_qp(q->qp);
    q->qp = NULL;
}

void pd_rdma_qp_close(struct pd_rdma_qp *q)
{
    if (!q)
        return;
    pd_rdma_qp_stop(q);
    if (q->cq)
        ibv_destroy_cq(q->cq);
    if (q->channel)
        ibv_destroy_comp_channel(q->channel);
    if (q->own_pd && q->pd)
        ibv_dealloc_pd(q->pd);
    pthread_mutex_lock(&lock);
    if (q->dev)
        device_put(q->dev);
    pthread_mutex_unlock(&lock);
    pd_free(q);
}

/* ---- peers that did not answer ---- */

static struct { uint8_t gid[16]; int64_t at; } shunned[16];
static uint32_t n_shunned;

void pd_rdma_shun(const uint8_t gid[16])
{
    pthread_mutex_lock(&lock);
    memcpy(shunned[n_shunned % 16].gid, gid, 16);
    shunned[n_shunned++ % 16].at = pd_mono_us();
    pthread_mutex_unlock(&lock);
}

int64_t pd_rdma_shunned(const uint8_t gid[16])
{
    int64_t now = pd_mono_us(), ago = -1;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < 16; i++)
        if (shunned[i].at && !memcmp(shunned[i].gid, gid, 16) && now - shunned[i].at < PD_RDMA_SHUN_US)
            ago = now - shunned[i].at;
    pthread_mutex_unlock(&lock);
    return ago;
}

/* ---- memory ---- */

static struct ibv_mr *reg(struct ibv_pd *pd, void *at, size_t n, int access, struct pd_err *e)
{
    struct ibv_mr *mr = pd_fault("rdma_reg") ? (errno = ENOMEM, NULL) : ibv_reg_mr(pd, at, n, access);
    if (!mr)
        pd_fail(e, errno == ENOMEM ? PD_ENOMEM : PD_EFAIL, "rdma: %zu bytes cannot be registered: %s%s", n, strerror(errno),
                errno == ENOMEM ? " (raise the locked-memory limit: ulimit -l)" : "");
    return mr;
}

struct ibv_mr *pd_rdma_region(struct pd_rdma_qp *q, void *at, size_t n, struct pd_err *e)
{
    return reg(q->pd, at, n, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, e);
}

int pd_rdma_try(struct pd_rdma_qp *q, bool giving, const struct pd_pool *pool, struct pd_err *e)
{
    size_t n = pd_pool_slab_bytes(pool), page = (size_t)sysconf(_SC_PAGESIZE);
    struct rlimit l;
    int rc = 0;
    /* What a limit allows is not tried, and of the rest as much as shows that the limit does not hold for us: hello waits for this. */
    if (!getrlimit(RLIMIT_MEMLOCK, &l) && l.rlim_cur < n)
        n = ((size_t)l.rlim_cur / page + 1) * page < n ? ((size_t)l.rlim_cur / page + 1) * page : n;
    else
        n = n < page ? n : page;
    pthread_mutex_lock(&lock);
    bool known = n <= q->dev->tried;
    pthread_mutex_unlock(&lock);
    if (known)
        return 0;
    bool own = !pd_pool_slabs(pool);
    void *at = own ? mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : pd_pool_base(pool, 0);
    struct ibv_mr *mr = NULL;
    if (at == MAP_FAILED)
        return pd_fail(e, PD_ENOMEM, "rdma: no memory to try with: %s", strerror(errno));
    if ((mr = reg(q->pd, at, n, giving ? 0 : IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, e)))
        ibv_dereg_mr(mr);
    else
        rc = PD_EINCOMPAT;
    if (own)
        munmap(at, n);
    pthread_mutex_lock(&lock);
    if (!rc && n > q->dev->tried)
        q->dev->tried = n;
    pthread_mutex_unlock(&lock);
    return rc;
}

/* By pool and for its users' time only: another pool may lie at the same address later. */
int pd_rdma_source_open(struct pd_rdma_qp *q, const struct pd_pool *pool, struct pd_rdma_source **out, struct pd_err *e)
{
    struct pd_rdma_dev *d = q->dev;
    uint32_t n = pd_pool_stats(pool).max / pd_pool_slab_blocks(pool) + 1;
    pthread_mutex_lock(&lock);
    struct pd_rdma_source *s = d->sources;
    while (s && s->pool != pool)
        s = s->next;
    if (!s && (s = pd_calloc(1, sizeof *s, "registered pool", e))) {
        *s = (struct pd_rdma_source){ .dev = d, .pool = pool, .n_slabs = n, .mr = pd_calloc(n, sizeof *s->mr, "registered slabs", e), .next = d->sources };
        if (s->mr)
            d->sources = s;
        else {
            pd_free(s);
            s = NULL;
        }
    }
    if (s)
        s->users++;
    pthread_mutex_unlock(&lock);
    *out = s;
    return s ? 0 : PD_ENOMEM;
}

int pd_rdma_source_key(struct pd_rdma_source *s, uint32_t slab, uint32_t *lkey, struct pd_err *e)
{
    int rc = 0;
    if (slab >= s->n_slabs || slab >= pd_pool_slabs(s->pool))
        return pd_fail(e, PD_EINCOMPAT, "rdma: the KV lies in memory of another process");
    pthread_mutex_lock(&lock);
    if (!s->mr[slab] && !(s->mr[slab] = reg(s->dev->pd, pd_pool_base(s->pool, slab * pd_pool_slab_blocks(s->pool)), pd_pool_slab_bytes(s->pool), 0, e)))
        rc = PD_EINCOMPAT;
    else
        *lkey = s->mr[slab]->lkey;
    pthread_mutex_unlock(&lock);
    return rc;
}

void pd_rdma_source_close(struct pd_rdma_source *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&lock);
    if (!--s->users) {
        struct pd_rdma_source **at = &s->dev->sources;
        while (*at != s)
            at = &(*at)->next;
        *at = s->next;
        for (uint32_t i = 0; i < s->n_slabs; i++)
            if (s->mr[i])
                ibv_dereg_mr(s->mr[i]);
        pd_free(s->mr);
        pd_free(s);
    }
    pthread_mutex_unlock(&lock);
}
