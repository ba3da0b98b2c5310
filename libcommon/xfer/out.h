/* What waits to be written on a connection: records, and at most one chunk whose bytes lie in pool memory and are written from there.
 *
 * Order is the order of the calls. A chunk's pieces can be taken off the pool (pd_out_fence): what is left of them is copied, so that the record ends as it
 * began while its blocks are free. Zero-initialise. */
#ifndef PD_XFER_OUT_H
#define PD_XFER_OUT_H
#include "../base/mem.h"
struct iovec;
struct pd_out {
    struct pd_buf cur, next;            /* before, and after, the chunk's pieces */
    size_t at;                          /* of cur: written */
    struct iovec *iov; int n_iov, cap_iov, at_iov;
    const void *owner;                  /* of the chunk */
    uint64_t bytes;                     /* written in all */
};
struct pd_buf *pd_out_buf(struct pd_out *o);                    /* append one record here */
bool pd_out_has_chunk(const struct pd_out *o);
/* After the chunk's head was appended: room for n pieces, then pd_out_chunk says how many there are. Not while another chunk waits. */
struct iovec *pd_out_pieces(struct pd_out *o, int n, struct pd_err *e);
void pd_out_chunk(struct pd_out *o, const void *owner, int n);
size_t pd_out_waiting(const struct pd_out *o);                  /* bytes of records, the chunk's pieces not counted */
int pd_out_iov(struct pd_out *o, struct iovec *v, int max);     /* what to write now; 0: nothing */
void pd_out_wrote(struct pd_out *o, size_t n);
int pd_out_fence(struct pd_out *o, const void *owner, struct pd_err *e);        /* PD_ENOMEM: the connection cannot go on */
void pd_out_free(struct pd_out *o);
#endif
