/* One connection of pd-kvsend: bytes in as records, bytes out from a pd_xfer or a pd_out, and the raw socket of descriptors. Never blocks, but in a write to
 * what cannot say that it would (a file, a terminal). */
#ifndef PD_SERVE_SENDER_CHAN_H
#define PD_SERVE_SENDER_CHAN_H
#include "../wire/endpoint.h"
#include "../wire/stream.h"
#include "../wire/unix.h"
#include "../xfer/proto.h"

enum pd_ep_kind { PD_EP_STDIO, PD_EP_PATH, PD_EP_UNIX, PD_EP_TCP, PD_EP_UNIX_LISTEN, PD_EP_TCP_LISTEN };
/* Of one that pd_endpoint_open_* would take; what follows the scheme (*rest, when wanted) is checked when it is opened. */
enum pd_ep_kind pd_ep_kind_of(const char *spec, const char **rest);
static inline bool pd_ep_listens(const char *spec) { return pd_ep_kind_of(spec, NULL) >= PD_EP_UNIX_LISTEN; }
static inline bool pd_ep_dials(const char *spec) { enum pd_ep_kind k = pd_ep_kind_of(spec, NULL); return k == PD_EP_UNIX || k == PD_EP_TCP; }

struct pd_chan {
    int fd;                             /* -1: none */
    struct pd_tls *tls;                 /* over it, or NULL */
    bool own /* fd and tls are closed with it */, socket;
    struct pd_rstream *rs;              /* NULL: write only */
    bool readable, eof;                 /* poll said so; the last byte was read */
    struct pd_xfer *x;                  /* NULL: a plain stream */
    bool unix_socket, giving;
    bool tcp, dialled;                  /* dialled: over TCP, by us: its streams of data are ours to dial */
    char path[108];                     /* of a Unix socket that we dialled, else "" */
    int raw;                            /* descriptors; -1: none */
    bool raw_dead, raw_ready, raw_waits;
    char raw_why[200];                  /* dead: why */
    int64_t raw_again, raw_until;
    bool blocked;                       /* a write would block */
    int64_t heard, pinged;              /* when something came; when we asked for a sign of life */
};
void pd_chan_init(struct pd_chan *c);
/* An open endpoint, which stays the owner of its descriptor. */
void pd_chan_of(struct pd_chan *c, const struct pd_endpoint *ep, const char *spec);
int pd_chan_reader(struct pd_chan *c, const char *name, size_t max_record, struct pd_err *e);
/* A transfer on it, from o with what the connection itself says. */
int pd_chan_xfer(struct pd_chan *c, struct pd_xfer_opts *o, const struct pd_net *net, int64_t now, struct pd_err *e);
/* As pd_rstream_next without waiting. Sets eof at the end, whatever brought it. */
int pd_chan_next(struct pd_chan *c, struct pd_rec *rec, bool *bad, int64_t now, struct pd_err *e);
enum { PD_CHAN_TURN = 4 << 20 };        /* bytes that are written to one peer before others have their turn */
/* Write what x has. 0: all of it; 1: the rest when it can be, or when its turn comes again; < 0: the peer is gone. */
int pd_chan_flush(struct pd_chan *c, int64_t now, struct pd_err *e);
int pd_chan_writev(struct pd_chan *c, const struct iovec *v, int n, size_t *wrote, struct pd_err *e);       /* 0, 1 or < 0 as above */
/* A pipe of ours is opened anew, non-blocking, so that others who hold it see no change. */
void pd_chan_unblock(struct pd_chan *c);
/* Look for completions of rdma; and the raw socket: dial it when we dialled the peer and shm is in use; pass or take what there is. */
void pd_chan_raw(struct pd_chan *c, int64_t now);
void pd_chan_take_raw(struct pd_chan *c, int fd, int64_t now);
bool pd_chan_raw_awaited(struct pd_chan *c, int64_t now);      /* it is to come, and nothing should be given before */
const char *pd_chan_via(const struct pd_chan *c);       /* for pd_give: NULL the best, or "inline" while descriptors cannot pass */
/* Ask for a sign of life when nothing came for a while; false: nothing came for silence_us. */
bool pd_chan_alive(struct pd_chan *c, int64_t silence_us, int64_t now);
void pd_chan_plain(struct pd_chan *c);          /* the transfer is off before it began: records go on */
bool pd_chan_drained(struct pd_chan *c);        /* nothing that was written waits in TLS */
void pd_chan_close(struct pd_chan *c);
#endif
