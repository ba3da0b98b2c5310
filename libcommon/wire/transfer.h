/* The records of the transfer protocol (04-kv: HELLO to CANCEL) that are not already in record.h: one struct and one encode/decode pair a kind, under the
 * rules of that header. What a decoder fills points into its arena. */
#ifndef PD_WIRE_TRANSFER_H
#define PD_WIRE_TRANSFER_H
#include "record.h"

#define PD_XFER_VERSION 1

/* Where a queue pair of RDMA is reached: the map `rdma` of a hello. qp 0: there is none, and `why` says why: in these words where there is no device at all, so
 * that nothing is amiss. */
#define PD_RDMA_NONE "rdma: there is no RDMA device here"
struct pd_rdma_at { uint8_t gid[16]; uint32_t lid, qp, psn, mtu /* bytes */; struct pd_str why; };

/* `hello`: the first record of both ends. With `attach` it carries nothing else: this socket brings descriptors to the connection of that name.
 * fp_fields as in a kv. layout: of the pool's blocks. */
struct pd_hello {
    uint8_t attach[16]; bool has_attach;
    uint8_t conn[16];                   /* names this end's connection */
    uint32_t version, version_min;      /* newest and oldest protocol spoken */
    char role[12];                      /* "prefill" (gives KV) or "decode" (takes it), on this connection */
    struct pd_str worker, domain;
    uint8_t boot[16]; bool has_boot;    /* the host's boot id; netns: its network namespace (inode), 0 unknown */
    uint64_t netns, epoch;
    uint8_t life[8];                    /* the first half of each generation this process gives */
    uint8_t fp_sha[PD_SHA_LEN]; struct pd_bin fp_fields;
    struct pd_kv_layout layout;
    struct pd_str *via; uint32_t n_via;         /* schemes, best first */
    struct pd_str *caps; uint32_t n_caps;       /* "in_place", "resume", "held" */
    uint64_t slab_bytes; uint32_t slab_blocks;  /* shape of the pool's slabs; 0: none to share */
    struct pd_rdma_at rdma; bool has_rdma;
};

/* `accept`: send it. have: one bit a chunk, lowest first, of those not to be sent (held already or verified before); NULL: none.
 * tag, target, rkeys (rdma): where to write the last blocks of the run. Each run of target: base, the address of layer 0's K of its first block; stride, between
 * the parts, K and V of each layer; count, how many parts; len, bytes of each. rkeys: 4 bytes each, big-endian: one of a target whose parts touch (stride ==
 * len), else one a part. tag: the immediate with which the giver says that it writes there no more.
 * via: the scheme by which its payload is to come instead of that of the offer; "": as offered. Said to a giver with the cap `any_way` only. */
struct pd_accept {
    char run[PD_RUN_LEN + 1]; uint8_t gen[PD_GEN_LEN]; char mode[12] /* "copy", "in_place" */; struct pd_bin have; uint32_t held /* blocks */;
    struct pd_payload_run *target; uint32_t n_target, tag; struct pd_bin rkeys; char via[12];
};
/* `done`: chunks chunk0 .. chunk0 + chunks - 1 are complete: sent, or lying where the offer says with these checksums (8 bytes each, big-endian). seq (rdma):
 * they are there when the immediate of that number has come. */
struct pd_done { char run[PD_RUN_LEN + 1]; uint8_t gen[PD_GEN_LEN]; uint32_t chunk0, chunks; struct pd_bin sums; uint32_t seq; };
/* `verified`: each chunk was checked by its consumer. `release`: it reads no more of the owner's memory. */
struct pd_verified { char run[PD_RUN_LEN + 1]; uint8_t gen[PD_GEN_LEN]; char mode[12]; uint64_t bytes; int64_t verify_us; };
struct pd_release { char run[PD_RUN_LEN + 1]; uint8_t gen[PD_GEN_LEN]; uint8_t lease[16]; bool has_lease; };
/* `status`: with a run, where it stands: "reading" (renews its lease), "released", "cancelled" or "verified" (acknowledge). Without one: of a whole process. */
struct pd_status {
    char run[PD_RUN_LEN + 1]; uint8_t gen[PD_GEN_LEN]; bool has_gen;
    char state[16];
    uint8_t lease[16]; bool has_lease;
    uint64_t bytes;
    struct pd_str worker, cause;
    struct pd_bin ledger;               /* raw map, absent NULL */
    struct pd_extra extra;
};
struct pd_cancel { char run[PD_RUN_LEN + 1]; uint8_t gen[PD_GEN_LEN]; bool has_gen; uint8_t cancel_token[16]; bool has_token; struct pd_str cause; };
/* `slab`: goes with one descriptor (SCM_RIGHTS): slab `index` of the pool, or its control page. */
struct pd_slab_rec { char what[12] /* "slab", "control" */; uint32_t index; uint64_t bytes; };

/* `carry`: between two filters (both list the cap `relay`): a record of the stream that is no KV, as it is, numbered from 1 in the order of the stream. Kept by
 * its sender until acknowledged, by a carry without rec that says up to which one all were handed on; so none is lost or doubled by a dropped connection.
 * With `end`: the stream ends there, in good order. */
struct pd_carry { uint64_t seq; struct pd_bin rec /* raw record, or absent */; bool end; };

int pd_hello_encode(const struct pd_hello *r, struct pd_buf *b, struct pd_err *e);
int pd_accept_encode(const struct pd_accept *r, struct pd_buf *b, struct pd_err *e);
int pd_done_encode(const struct pd_done *r, struct pd_buf *b, struct pd_err *e);
int pd_verified_encode(const struct pd_verified *r, struct pd_buf *b, struct pd_err *e);
int pd_release_encode(const struct pd_release *r, struct pd_buf *b, struct pd_err *e);
int pd_status_encode(const struct pd_status *r, struct pd_buf *b, struct pd_err *e);
int pd_cancel_encode(const struct pd_cancel *r, struct pd_buf *b, struct pd_err *e);
int pd_slab_encode(const struct pd_slab_rec *r, struct pd_buf *b, struct pd_err *e);
int pd_carry_encode(const struct pd_carry *r, struct pd_buf *b, struct pd_err *e);

int pd_hello_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_hello *r, struct pd_err *e);
int pd_accept_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_accept *r, struct pd_err *e);
int pd_done_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_done *r, struct pd_err *e);
int pd_verified_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_verified *r, struct pd_err *e);
int pd_release_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_release *r, struct pd_err *e);
int pd_status_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_status *r, struct pd_err *e);
int pd_cancel_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_cancel *r, struct pd_err *e);
int pd_slab_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_slab_rec *r, struct pd_err *e);
int pd_carry_decode(const void *rec, size_t n, struct pd_carry *r, struct pd_err *e);      /* rec points into the record */

/* The map `lease` of a kv descriptor {id, owner, ttl_us, renew_us}. */
struct pd_lease_rec { uint8_t id[16]; struct pd_str owner; int64_t ttl_us, renew_us; };
int pd_lease_rec_encode(const struct pd_lease_rec *r, struct pd_buf *b, struct pd_err *e);
int pd_lease_rec_decode(struct pd_bin map, struct pd_arena *a, struct pd_lease_rec *r, struct pd_err *e);
#endif
