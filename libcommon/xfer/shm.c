/* shm: the consumer maps the producer's slabs, once each, and an offer is then only block numbers.
 *
 * Slabs and the control page go as descriptors (SCM_RIGHTS), each with one `slab` record, over a raw socket of their own: buffered readers lose descriptors.
 * The checksums travel in `done`. Nothing is cleaned up by name: a slab goes with its last mapping. */
#include <errno.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include "../base/fault.h"
#include "../wire/frame.h"
#include "proto.h"

enum { MAX_FDS = 32, MAX_PACKET = 4096, SUMS = 8 /* chunks hashed in one go */, PACKETS = 8 /* read in one go: to map a slab takes a while, and others wait for their turn */ };

struct path {
    bool giving;
    /* giving */
    bool sent_control;
    uint32_t sent_slabs;
    /* taking */
    struct pd_slabs *slabs;
    struct pd_view *control;
    int fds[MAX_FDS], n_fds;            /* came, and wait for their record */
    uint8_t in[MAX_PACKET];
    size_t n_in;
};

static int usable(const struct pd_hello *mine, const struct pd_hello *theirs, const struct pd_xfer_opts *o, struct pd_err *e)
{
    const struct pd_hello *giver = !strcmp(mine->role, "prefill") ? mine : theirs;
    if (!o->unix_socket)
        return pd_fail(e, PD_EINCOMPAT, "shm: descriptors pass over a Unix socket only");
    if (!mine->has_boot || !theirs->has_boot || memcmp(mine->boot, theirs->boot, sizeof mine->boot))
        return pd_fail(e, PD_EINCOMPAT, "shm: the two ends are not on one host");
    if (!giver->slab_bytes)
        return pd_fail(e, PD_EINCOMPAT, "shm: the prefill side has no slabs to share");
    return 0;
}

static void close_path(void *path);

static int open_path(const struct pd_xfer_opts *o, const struct pd_hello *theirs, void **path, struct pd_err *e)
{
    struct path *p = pd_calloc(1, sizeof *p, "shm path", e);
    if (!p)
        return PD_ENOMEM;
    p->giving = o->giving;
    if (!o->giving) {
        const struct pd_kv_layout *l = &theirs->layout;
        struct pd_slab_shape shape = { theirs->slab_bytes, theirs->slab_blocks, l->layers, pd_layout_elem_size(l) };
        int rc = 0;
        if (!pd_mul_size(shape.layer_bytes, l->block_size, &shape.layer_bytes) || !pd_mul_size(shape.layer_bytes, l->kv_heads, &shape.layer_bytes) ||
            !pd_mul_size(shape.layer_bytes, l->head_dim, &shape.layer_bytes))
            rc = pd_fail(e, PD_ECORRUPT, "shm: the peer's layout overflows");
        rc = rc ? rc : pd_slabs_new(&shape, &p->slabs, e);
        if (rc) {
            close_path(p);
            return rc;
        }
    }
    *path = p;
    return 0;
}

static void close_path(void *path)
{
    struct path *p = path;
    if (!p)
        return;
    for (int i = 0; i < p->n_fds; i++)
        close(p->fds[i]);
    pd_slabs_free(p->slabs);
    pd_view_put(p->control);
    pd_free(p);
}

/* ---- giving ---- */

static int send_fd(int sock, const char *what, uint32_t index, uint64_t bytes, int fd, struct pd_err *e)
{
    struct pd_slab_rec r = { .index = index, .bytes = bytes };
    struct pd_buf b = { 0 };
    union { struct cmsghdr align; char room[CMSG_SPACE(sizeof(int))]; } c = { .room = { 0 } };
    strcpy(r.what, what);
    int rc = pd_slab_encode(&r, &b, e);
    if (rc)
        return rc;
    struct iovec v = { b.p, b.n };
    struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = c.room, .msg_controllen = sizeof c.room };
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(h), &fd, sizeof fd);
    ssize_t n;
    do
        n = pd_fault("write") ? (errno = EPIPE, -1) : sendmsg(sock, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    /* A record of 60 bytes goes whole or not at all into a Unix socket; if ever not, its rest cannot follow without the descriptor's place being unclear. */
    if (n < 0)
        rc = errno == EAGAIN || errno == EWOULDBLOCK ? 1 : pd_fail_sys(e, "shm: pass a descriptor");
    else if ((size_t)n != b.n)
        rc = pd_fail(e, PD_EFAIL, "shm: %zd of %zu bytes beside a descriptor went", n, b.n);
    pd_buf_free(&b);
    return rc;
}

static int reg(void *path, int sock, const struct pd_pool *pool, const struct pd_leases *leases, struct pd_err *e)
{
    struct path *p = path;
    int rc;
    if (!p->sent_control) {
        struct stat st;
        int fd = pd_leases_control_fd(leases);
        if (fstat(fd, &st))
            return pd_fail_sys(e, "shm: the control page");
        if ((rc = send_fd(sock, "control", 0, (uint64_t)st.st_size, fd, e)))
            return rc;
        p->sent_control = true;
    }
    for (; p->sent_slabs < pd_pool_slabs(pool); p->sent_slabs++)
        if ((rc = send_fd(sock, "slab", p->sent_slabs, pd_pool_slab_bytes(pool), pd_pool_slab_fd(pool, p->sent_slabs), e)))
            return rc;
    return 0;
}

static int offer(void *path, const struct pd_sending *s, struct pd_payload *y, struct pd_arena *a, struct pd_err *e)
{
    strcpy(y->scheme, "shm");
    if (!(y->runs = pd_arena_alloc(a, s->plan->n_blocks, sizeof *y->runs, e)))
        return PD_ENOMEM;
    y->n_runs = pd_slab_runs(s->pool, s->blocks, s->plan->n_blocks, y->runs);
    return 0;
}

/* Nothing moves: the consumer is told that they are complete, and what they must hash to. */
static int send_sums(void *path, const struct pd_sending *s, uint32_t index, uint32_t n, struct pd_out *out, uint32_t *sent, struct pd_err *e)
{
    struct pd_chunk c;
    uint8_t sums[SUMS * 8];
    int pieces = 0;
    *sent = 0;
    n = n < SUMS ? n : SUMS;
    if (pd_out_has_chunk(out))          /* its pieces are in use */
        return 0;
    struct iovec *iov = pd_out_pieces(out, (int)(2 * s->plan->chunk_blocks), e);
    if (!iov)
        return PD_ENOMEM;
    for (uint32_t i = 0; i < n; i++) {
        int rc = pd_export_chunk(s->pool, s->blocks, s->plan, s->desc, index + i, &c, iov, &pieces, e);
        if (rc)
            return rc;
        pd_put_be64(sums + 8 * i, c.xxh3);
    }
    struct pd_done d = { .chunk0 = index, .chunks = n, .sums = { sums, 8 * (size_t)n } };
    memcpy(d.run, s->desc->run, sizeof d.run);
    memcpy(d.gen, s->desc->gen, sizeof d.gen);
    int rc = pd_done_encode(&d, pd_out_buf(out), e);
    if (!rc)
        *sent = n;
    return rc;
}

/* ---- taking ---- */

static int take_packet(struct path *p, size_t n, struct pd_err *e)
{
    struct pd_arena a = { 0 };
    struct pd_slab_rec r;
    enum pd_kind k = pd_kind_of(p->in, n);
    int rc = k == PD_K_SLAB ? pd_slab_decode(p->in, n, &a, &r, e) : pd_fail(e, PD_ECORRUPT, "shm: a record of kind %s where slabs come", pd_kind_name(k));
    pd_arena_free(&a);
    if (rc)
        return rc;
    if (!p->n_fds)
        return pd_fail(e, PD_ECORRUPT, "shm: %s %u came without its descriptor", r.what, r.index);
    int fd = p->fds[0];
    memmove(p->fds, p->fds + 1, (size_t)--p->n_fds * sizeof *p->fds);
    if (!strcmp(r.what, "slab"))
        rc = pd_slabs_add(p->slabs, r.index, fd, e);
    else if (strcmp(r.what, "control"))
        rc = pd_fail(e, PD_ECORRUPT, "shm: '%.11s' is neither slab nor control", r.what);
    else
        rc = p->control ? pd_fail(e, PD_ECORRUPT, "shm: a second control page") : pd_view_new(fd, &p->control, e);
    close(fd);
    return rc;
}

static int poll_fds(void *path, int sock, struct pd_err *e)
{
    struct path *p = path;
    bool mapped = false;
    for (int i = 0; i < PACKETS; i++) {         /* what is left wakes us again */
        union { struct cmsghdr align; char room[CMSG_SPACE(MAX_FDS * sizeof(int))]; } c;
        struct iovec v = { p->in + p->n_in, sizeof p->in - p->n_in };
        struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = c.room, .msg_controllen = sizeof c.room };
        ssize_t n;
        do
            n = pd_fault("read") ? (errno = EIO, -1) : recvmsg(sock, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        while (n < 0 && errno == EINTR);
        if (n < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? mapped : pd_fail_sys(e, "shm: receive a descriptor");
        int rc = 0;
        for (struct cmsghdr *h = CMSG_FIRSTHDR(&m); h; h = CMSG_NXTHDR(&m, h)) {
            if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
                continue;
            for (size_t k = 0; k < (h->cmsg_len - CMSG_LEN(0)) / sizeof(int); k++) {
                int fd;
                memcpy(&fd, CMSG_DATA(h) + k * sizeof fd, sizeof fd);
                if (p->n_fds < MAX_FDS)
                    p->fds[p->n_fds++] = fd;
                else {
                    close(fd);
                    rc = pd_fail(e, PD_ECORRUPT, "shm: more than %d descriptors came without their records", MAX_FDS);
                }
            }
        }
        if (!rc && m.msg_flags & MSG_CTRUNC)
            rc = pd_fail(e, PD_ENOMEM, "shm: a descriptor was lost: this process has too many open (raise its limit)");
        if (!rc && !n)
            return pd_fail(e, PD_ECANCEL, "shm: the peer closed the descriptors' socket");
        p->n_in += (size_t)(n > 0 ? n : 0);
        while (!rc && p->n_in) {
            struct pd_frame_scan scan = { 0 };
            size_t len;
            int framed = pd_frame_next(&scan, p->in, p->n_in, sizeof p->in, &len, e);
            if (framed == 0)
                break;
            rc = framed < 0 ? framed : take_packet(p, len, e);
            mapped |= !rc;
            if (!rc)
                memmove(p->in, p->in + len, p->n_in -= len);
        }
        if (rc)
            return rc;
    }
    return mapped;
}

static int ready(void *path, const struct pd_payload *y, uint32_t n_blocks, struct pd_slabs **from, uint32_t *blocks, struct pd_err *e)
{
    struct path *p = path;
    int rc = pd_slabs_blocks(p->slabs, y->runs, y->n_runs, n_blocks, blocks, e);
    *from = p->slabs;
    return rc ? rc : !p->control;
}

static struct pd_view *view(void *path) { return ((struct path *)path)->control; }

const struct pd_transport pd_shm = { .scheme = "shm", .borrows = true, .sums = true, .usable = usable, .open = open_path, .reg = reg, .offer = offer, .send = send_sums,
                                    .poll = poll_fds,
                                     .ready = ready, .view = view, .close = close_path };
