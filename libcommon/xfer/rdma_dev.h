/* RDMA devices, and reliable queue pairs on them.
 *
 * A device is opened with its first user and closed with its last: the one that PD_RDMA_DEVICE names, else the first with an active port and a usable address
 * (RoCE v2 over IPv4, else over IPv6; InfiniBand). Queue pairs that give share one protection domain, in which the slabs of their pools are registered, once,
 * for local reading only. One that takes has a domain of its own: what it lets its peer write to, no other peer can.
 * Everything here may be called from any thread; a queue pair belongs to one. */
#ifndef PD_XFER_RDMA_DEV_H
#define PD_XFER_RDMA_DEV_H
#include <infiniband/verbs.h>
#include "../kv/pool.h"
#include "../wire/transfer.h"

enum { PD_RDMA_DEPTH = 1024 /* writes of one queue pair that can be under way */, PD_RDMA_RECVS = 512 /* immediates that can wait */ };

bool pd_rdma_here(void);        /* there is a device at all */
struct pd_rdma_dev;
struct pd_rdma_qp {
    struct pd_rdma_dev *dev;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;   /* its fd does not block */
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    bool own_pd;
    uint32_t max_msg;                   /* bytes of one write */
    struct pd_rdma_at at;               /* what the peer has to know */
};
/* PD_EINCOMPAT: there is no device, or none that can be used; *e says why. giving: writes; else is written to, and immediates are waited for. */
int pd_rdma_qp_open(bool giving, struct pd_rdma_qp **out, struct pd_err *e);
int pd_rdma_qp_connect(struct pd_rdma_qp *q, const struct pd_rdma_at *peer, struct pd_err *e);
int pd_rdma_qp_recv(struct pd_rdma_qp *q, int n, struct pd_err *e);     /* n immediates more can come */
/* Completions that are there, at most n. After 0 the channel's fd is readable when more come. < 0: PD_EFAIL. */
int pd_rdma_qp_poll(struct pd_rdma_qp *q, struct ibv_wc *wc, int n, struct pd_err *e);
void pd_rdma_qp_stop(struct pd_rdma_qp *q);     /* nothing of it reads or writes memory any more */
void pd_rdma_qp_close(struct pd_rdma_qp *q);    /* its regions are gone by then */
const char *pd_rdma_gid_text(const uint8_t gid[16], char out[64]);      /* "10.9.1.2" of an IPv4 one */
/* A peer that did not answer is not tried again for PD_RDMA_SHUN_US: what goes on over the next connection takes another way. ago: how long since, or < 0. */
#define PD_RDMA_SHUN_US 5000000
void pd_rdma_shun(const uint8_t gid[16]);
int64_t pd_rdma_shunned(const uint8_t gid[16]);

/* Can memory for that pool be registered, a slab of it? Else *e says why: the limit of locked memory, which does not hold for everybody, so that it is tried. */
int pd_rdma_try(struct pd_rdma_qp *q, bool giving, const struct pd_pool *pool, struct pd_err *e);
/* Memory of a pool from which queue pairs that give write: registered slab by slab, for as long as one of them uses it. */
struct pd_rdma_source;
int pd_rdma_source_open(struct pd_rdma_qp *q, const struct pd_pool *pool, struct pd_rdma_source **out, struct pd_err *e);
int pd_rdma_source_key(struct pd_rdma_source *s, uint32_t slab, uint32_t *lkey, struct pd_err *e);      /* registers it where it is new */
void pd_rdma_source_close(struct pd_rdma_source *s);
/* A range into which the peer of a queue pair that takes may write. */
struct ibv_mr *pd_rdma_region(struct pd_rdma_qp *q, void *at, size_t n, struct pd_err *e);
#endif
