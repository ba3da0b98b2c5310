/* RDMA devices of a test's own, in place of libibverbs: one device, whose reliable queue pairs write within this process. Writes are done at once, if the key that
 * they name lets them; what completes is told as a device does (notification once, after it was asked for). The test says what is to fail. */
#ifndef FAKE_VERBS_H
#define FAKE_VERBS_H
#include <errno.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { FV_CQ = 4096 };
struct fv_mr { struct ibv_mr v; int access; struct fv_mr *next; };
struct fv_channel { struct ibv_comp_channel v; struct ibv_cq *cq; };
struct fv_cq { struct ibv_cq v; struct ibv_wc wc[FV_CQ]; uint32_t head, n; bool armed; };
struct fv_qp { struct ibv_qp v; struct fv_qp *next; uint32_t dest; int recvs; bool broken; };

static struct {
    size_t memlock;             /* bytes that can be registered; 0: no limit */
    size_t locked; uint32_t regions, most_regions;
    bool flood;                 /* completions without end: of immediates, counted on */
    uint32_t flooded, polls;
    struct fv_mr *mrs;
    struct fv_qp *qps;
    uint32_t key, qpn;
} fv;

static struct ibv_device *fv_all[2] = { (struct ibv_device *)&fv, NULL };

struct ibv_device **ibv_get_device_list(int *n) { *n = 1; return fv_all; }
void ibv_free_device_list(struct ibv_device **l) { (void)l; }
const char *ibv_get_device_name(struct ibv_device *d) { (void)d; return "fake_0"; }

static void fv_push(struct fv_cq *q, struct ibv_wc wc)
{
    if (q->n == FV_CQ)
        abort();
    q->wc[(q->head + q->n++) % FV_CQ] = wc;
    if (q->armed && eventfd_write(q->v.channel->fd, 1))
        abort();
    q->armed = false;
}

static int fv_poll(struct ibv_cq *v, int n, struct ibv_wc *wc)
{
    struct fv_cq *q = (struct fv_cq *)v;
    int k = 0;
    fv.polls++;
    for (; fv.flood && k < n; k++)
        wc[k] = (struct ibv_wc){ .status = IBV_WC_SUCCESS, .imm_data = htonl(++fv.flooded) };
    for (; k < n && q->n; k++, q->n--, q->head = (q->head + 1) % FV_CQ)
        wc[k] = q->wc[q->head];
    return k;
}

static int fv_notify(struct ibv_cq *v, int solicited)
{
    (void)solicited;
    ((struct fv_cq *)v)->armed = true;
    return 0;
}

static struct fv_qp *fv_find(uint32_t qpn)
{
    struct fv_qp *q = fv.qps;
    while (q && q->v.qp_num != qpn)
        q = q->next;
    return q;
}

static bool fv_may(const struct fv_qp *to, uint32_t rkey, uint64_t at, size_t n)
{
    for (const struct fv_mr *m = fv.mrs; m; m = m->next)
        if (m->v.rkey == rkey)
            return m->v.pd == to->v.pd && m->access & IBV_ACCESS_REMOTE_WRITE && at >= (uintptr_t)m->v.addr && n <= m->v.length &&
                   at - (uintptr_t)m->v.addr <= m->v.length - n;
    return false;
}

static int fv_send(struct ibv_qp *v, struct ibv_send_wr *w, struct ibv_send_wr **bad)
{
    struct fv_qp *q = (struct fv_qp *)v, *to = fv_find(q->dest);
    (void)bad;
    for (; w; w = w->next) {
        enum ibv_wc_status s = q->broken ? IBV_WC_WR_FLUSH_ERR : !to || to->broken ? IBV_WC_RETRY_EXC_ERR : IBV_WC_SUCCESS;
        for (int i = 0; !s && i < w->num_sge; i++)
            if (!fv_may(to, w->wr.rdma.rkey, w->wr.rdma.remote_addr, w->sg_list[i].length))
                s = IBV_WC_REM_ACCESS_ERR;
            else
                memcpy((void *)(uintptr_t)w->wr.rdma.remote_addr, (void *)(uintptr_t)w->sg_list[i].addr, w->sg_list[i].length);
        if (!s && w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
            if (to->recvs-- < 1)
                s = IBV_WC_RNR_RETRY_EXC_ERR;
            else
                fv_push((struct fv_cq *)to->v.recv_cq, (struct ibv_wc){ .status = IBV_WC_SUCCESS, .opcode = IBV_WC_RECV_RDMA_WITH_IMM, .imm_data = w->imm_data });
        }
        if (s == IBV_WC_REM_ACCESS_ERR) {
            to->broken = true;
            fv_push((struct fv_cq *)to->v.recv_cq, (struct ibv_wc){ .status = IBV_WC_WR_FLUSH_ERR });
        }
        q->broken |= s != 0;
        if (s || w->send_flags & IBV_SEND_SIGNALED)
            fv_push((struct fv_cq *)q->v.send_cq, (struct ibv_wc){ .status = s });
    }
    return 0;
}

static int fv_recv(struct ibv_qp *v, struct ibv_recv_wr *w, struct ibv_recv_wr **bad)
{
    (void)bad;
    for (; w; w = w->next)
        ((struct fv_qp *)v)->recvs++;
    return 0;
}

struct ibv_context *ibv_open_device(struct ibv_device *d)
{
    struct ibv_context *c = calloc(1, sizeof *c);
    *c = (struct ibv_context){ .device = d, .ops = { .poll_cq = fv_poll, .req_notify_cq = fv_notify, .post_send = fv_send, .post_recv = fv_recv } };
    return c;
}

int ibv_close_device(struct ibv_context *c) { free(c); return 0; }
int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *a) { (void)c; *a = (struct ibv_device_attr){ .max_qp_wr = 4096 }; return 0; }

int (ibv_query_port)(struct ibv_context *c, uint8_t port, struct _compat_ibv_port_attr *a)
{
    (void)c;
    *(struct ibv_port_attr *)a = (struct ibv_port_attr){ .state = IBV_PORT_ACTIVE, .active_mtu = IBV_MTU_4096, .gid_tbl_len = 1, .max_msg_sz = 1u << 30,
                                                         .link_layer = IBV_LINK_LAYER_ETHERNET };
    return port == 1 ? 0 : EINVAL;
}

int _ibv_query_gid_ex(struct ibv_context *c, uint32_t port, uint32_t i, struct ibv_gid_entry *g, uint32_t flags, size_t n)
{
    (void)c;
    (void)flags;
    memset(g, 0, n);
    *g = (struct ibv_gid_entry){ .gid_type = IBV_GID_TYPE_ROCE_V2, .gid.raw = { [10] = 0xff, [11] = 0xff, 10, 0, 0, 1 } };
    return port == 1 && !i ? 0 : EINVAL;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *c)
{
    struct ibv_pd *p = calloc(1, sizeof *p);
    p->context = c;
    return p;
}

int ibv_dealloc_pd(struct ibv_pd *p) { free(p); return 0; }

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c)
{
    struct fv_channel *ch = calloc(1, sizeof *ch);
    ch->v = (struct ibv_comp_channel){ .context = c, .fd = eventfd(0, EFD_CLOEXEC) };
    return &ch->v;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *c) { close(c->fd); free(c); return 0; }

struct ibv_cq *ibv_create_cq(struct ibv_context *c, int n, void *ctx, struct ibv_comp_channel *ch, int vector)
{
    struct fv_cq *q = calloc(1, sizeof *q);
    (void)vector;
    q->v = (struct ibv_cq){ .context = c, .channel = ch, .cq_context = ctx, .cqe = n };
    ((struct fv_channel *)ch)->cq = &q->v;
    return &q->v;
}

int ibv_destroy_cq(struct ibv_cq *q) { free(q); return 0; }

int ibv_get_cq_event(struct ibv_comp_channel *c, struct ibv_cq **cq, void **ctx)
{
    eventfd_t n;
    *cq = ((struct fv_channel *)c)->cq;
    *ctx = NULL;
    return eventfd_read(c->fd, &n);
}

void ibv_ack_cq_events(struct ibv_cq *q, unsigned n) { (void)q; (void)n; }

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a)
{
    struct fv_qp *q = calloc(1, sizeof *q);
    q->v = (struct ibv_qp){ .context = pd->context, .pd = pd, .send_cq = a->send_cq, .recv_cq = a->recv_cq, .qp_num = ++fv.qpn };
    q->next = fv.qps;
    fv.qps = q;
    return &q->v;
}

int ibv_modify_qp(struct ibv_qp *q, struct ibv_qp_attr *a, int mask)
{
    if (mask & IBV_QP_DEST_QPN)
        ((struct fv_qp *)q)->dest = a->dest_qp_num;
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *v)
{
    struct fv_qp **at = &fv.qps, *q = (struct fv_qp *)v;
    while (*at != q)
        at = &(*at)->next;
    *at = q->next;
    free(q);
    return 0;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *at, size_t n, uint64_t iova, unsigned access)
{
    (void)iova;
    if (fv.memlock && fv.locked + n > fv.memlock) {
        errno = ENOMEM;
        return NULL;
    }
    struct fv_mr *m = calloc(1, sizeof *m);
    fv.key++;
    m->v = (struct ibv_mr){ .context = pd->context, .pd = pd, .addr = at, .length = n, .lkey = fv.key, .rkey = fv.key };
    m->access = (int)access;
    m->next = fv.mrs;
    fv.mrs = m;
    fv.locked += n;
    fv.regions++;
    fv.most_regions = fv.regions > fv.most_regions ? fv.regions : fv.most_regions;
    return &m->v;
}

struct ibv_mr *(ibv_reg_mr)(struct ibv_pd *pd, void *at, size_t n, int access) { return ibv_reg_mr_iova2(pd, at, n, (uintptr_t)at, (unsigned)access); }

int ibv_dereg_mr(struct ibv_mr *v)
{
    struct fv_mr **at = &fv.mrs, *m = (struct fv_mr *)v;
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    fv.locked -= v->length;
    fv.regions--;
    free(m);
    return 0;
}
#endif
