/* A peer that says anything: its records, from hello on, to either end of the transfer protocol, with events answered as a daemon would and time passing.
 * First byte: 1 the giving end, 2 in place, 4 cancel after some records, 8 refuse, 16 the connection is lost at the end, 32 verify slowly, 128 what is offered is read in place already. What guards against
 * accident
 * (sums, boot id, the lease's name) is put right, so that mutations reach what lies behind. Afterwards no block is held, whatever came. */
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include "../../libcommon/base/proc.h"
#include "../../libcommon/wire/frame.h"
#include "../../libcommon/xfer/proto.h"

static const struct pd_pool_geom geom = { .layers = 3, .kv_heads = 2, .head_dim = 8, .block_size = 4, .dtype = PD_F16 };
enum { TOKENS = 50, BLOCKS = 13 };
/* fix_fp of the unit tests: the fingerprint that the seeds say hello with */
static const uint8_t fp[] = "\x86\xa6layers\x03\xaarope_theta\xcb\x40\xc3\x88\0\0\0\0\0\xaeweights_digest\xc4\x08\x01\x02\x03\x04\x05\x06\x07\x08\xa8kv_dtype\xa3" "f16\xa8numerics\xa2u8\xa8software\xa6pd 0.1";

static void repair(uint8_t *p, size_t n, const uint8_t lease[16])
{
    static const uint8_t sum[] = { 0xa3, 's', 'u', 'm', 0xc4, 8 }, boot[] = { 0xa4, 'b', 'o', 'o', 't', 0xc4, 16 }, named[] = { 0xa5, 'l', 'e', 'a', 's', 'e',
                                                                                0xc4, 16 };
    for (size_t i = 0; n > 40 && i + sizeof boot + 16 <= n && i < 300; i++)
        if (!memcmp(p + i, boot, sizeof boot))
            pd_proc_boot_id(p + i + sizeof boot);
    for (size_t i = 0; lease && n > 40 && i + sizeof named + 16 <= n && i < 300; i++)
        if (!memcmp(p + i, named, sizeof named))
            memcpy(p + i + sizeof named, lease, 16);
    if (n > sizeof sum + 8 && !memcmp(p + n - 8 - sizeof sum, sum, sizeof sum))
        pd_put_be64(p + n - 8, pd_xxh3(p, n - 8 - sizeof sum, 0));
}

static void check(bool ok)
{
    if (!ok)
        __builtin_trap();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct pd_pool *from, *to;
    static uint32_t blocks[BLOCKS];
    static int32_t ids[TOKENS];
    struct pd_leases *leases = NULL;
    struct pd_xfer *x = NULL;
    struct pd_move *m = NULL;
    struct pd_err e;
    int sock[2], n_fed = 0;
    int64_t now = 1;
    uint8_t lease[16] = { 0 };
    if (!from && (pd_pool_new(&geom, 1 << 20, &from, &e) || pd_pool_new(&geom, 1 << 20, &to, &e) || pd_pool_take(from, BLOCKS, blocks, &e)))
        return 0;
    if (!size || pd_leases_new(&(struct pd_leases_opts){ .pool = from, .max = 8 }, &leases, &e))
        return 0;
    bool giving = data[0] & 1;
    struct pd_xfer_opts o = { .giving = giving, .unix_socket = !(data[0] & 64), .tcp = data[0] & 64, .epoch = 3, .fp_fields = { fp, sizeof fp - 1 }, .pool = giving ? from : to,
                             .leases = leases };
    check(!pd_xfer_new(&o, now, &x, &e));
    check(!socketpair(AF_UNIX, SOCK_STREAM, 0, sock));
    const struct pd_transport *shm = pd_transport_find((struct pd_str){ "shm", 3 });
    void *path = NULL;
    if (!giving) {      /* the slabs that a giver would pass */
        check(!shm->open(&(struct pd_xfer_opts){ .giving = true, .unix_socket = true }, pd_xfer_peer(x), &path, &e));
        shm->reg(path, sock[0], from, leases, &e);
        /* the seeds' generation is valid in slot 0 */
        check(!pd_lease_grant(leases, "", (const uint8_t[16]){ [15] = 9 }, blocks, BLOCKS, 0, now, lease, &e));
    }
    struct pd_kvdesc d = { .run = "01ARZ3NDEKTSV4RRFFQ69G5FAV", .epoch = 3, .gen = { 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 9 }, .fp_fields = o.fp_fields,
                          .n_tokens = TOKENS, .token_ids = ids };
    pd_sha256(fp, sizeof fp - 1, d.fp_sha, &e);
    pd_layout_from_pool(from, &d.layout);
    d.request.prompt = (struct pd_str){ "x", 1 };
    check(!pd_request_resolve(&d.request, 0, &e));

    for (const uint8_t *p = data + 1, *end = data + size; p < end; n_fed++) {
        struct pd_frame_scan s = { 0 };
        struct pd_xfer_event ev;
        struct iovec v[8];
        size_t len;
        int n;
        if (pd_frame_next(&s, p, (size_t)(end - p), PD_MAX_RECORD_DEFAULT, &len, &e) != 1)
            break;
        uint8_t *rec = pd_calloc(len, 1, "record", &e);
        if (!rec)
            break;
        memcpy(rec, p, len);
        repair(rec, len, giving ? lease : NULL);
        int rc = pd_xfer_feed(x, rec, len, now, &e);
        check(!rc || (e.code == rc && e.msg[0]));
        pd_free(rec);
        p += len;
        if (!giving && pd_xfer_open(x))
            pd_xfer_fds(x, sock[1], now, &e);
        for (int k = data[0] & 32 ? 1 : 64; k-- && pd_xfer_work(x, 1 << 10, now);) {}
        while (pd_xfer_event(x, &ev)) {
            if (ev.kind == PD_XE_READY && giving && !pd_lease_grant(leases, d.run, d.gen, blocks, BLOCKS, 0, now, lease, &e) &&
                !pd_lease_fill(leases, lease, &e)) {
                struct pd_give g = { .desc = &d, .blocks = blocks, .chunk_blocks = 3 };
                memcpy(g.lease, lease, 16);
                if (!pd_give(x, &g, now, &m, &e))
                    pd_give_finish(m, &d, &e);
            } else if (ev.kind == PD_XE_OFFERED && data[0] & 8)
                pd_take_refuse(ev.move, PD_ENOMEM, "no", now);
            else if (ev.kind == PD_XE_OFFERED)
                pd_take(ev.move, &(struct pd_take){ .in_place = data[0] & 2, .again = data[0] & 128 }, now, &e);
            else if (ev.kind == PD_XE_TAKEN) {
                uint32_t k, *b = pd_take_blocks(ev.move, &k);
                check((b != NULL) == !(data[0] & 128));
                while (b && k--)
                    pd_pool_put(to, b[k]);
                pd_free(b);
                if (!(data[0] & 4))
                    pd_take_release(ev.move, now);
            }
            if (ev.move)
                m = ev.last ? NULL : ev.move;
        }
        if (m && data[0] & 4 && n_fed == 4)
            pd_move_cancel(m, "fuzz", now);
        while ((n = pd_xfer_iov(x, v, 8, now, &e)) > 0)
            for (int i = 0; i < n; i++)
                pd_xfer_wrote(x, v[i].iov_len, now);
        now += 50000;
        pd_xfer_tick(x, now);
        pd_leases_sweep(leases, now);
        check(pd_xfer_next(x) > now - 50000);
    }
    if (data[0] & 16)
        pd_xfer_lost(x, "reset", now);
    pd_xfer_free(x);
    if (path)
        shm->close(path);
    close(sock[0]);
    close(sock[1]);
    pd_leases_revoke_all(leases, "end", now);
    check(!pd_leases_counts(leases).live && pd_pool_stats(from).used == BLOCKS && !pd_pool_stats(to).used && !pd_pool_stats(to).borrowed);
    pd_leases_free(leases);
    return 0;
}
