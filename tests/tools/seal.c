/* Makes a changed stream consistent again: offer and kv records get the `sum` of what they now hold, chunks the checksum of their bytes in their place.
 * So a test can bring descriptors that lie, yet are whole.   seal < records > records */
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "../../libcommon/base/hash.h"
#include "../../libcommon/kv/handover.h"
#include "../../libcommon/wire/stream.h"

static uint64_t layout_hash;    /* of the last descriptor */

static void seal_chunk(uint8_t *p, const struct pd_rec *rec)
{
    struct pd_chunk c;
    struct pd_bin v;
    if (pd_chunk_decode(rec->p, rec->n, &c, NULL) == 0 && pd_map_find(rec->p, rec->n, "xxh3", &v) == 1)
        pd_put_be64(p + (v.p - rec->p) + 2, pd_xxh3(c.data.p, c.data.n, pd_chunk_seed(c.gen, layout_hash, c.layer0, c.block0)));
}

/* The layout's hash is that of its fields, and the sum that of the record. */
static void seal_desc(uint8_t *p, const struct pd_rec *rec)
{
    struct pd_bin layout, v;
    struct pd_arena a = { 0 };
    struct pd_kvdesc d;
    if (rec->n > 14)
        pd_put_be64(p + rec->n - 8, pd_xxh3(p, rec->n - 14, 0));
    if (pd_kvdesc_decode(p, rec->n, &a, &d, NULL) == 0) {
        layout_hash = pd_layout_hash(&d.layout);
        if (pd_map_find(p, rec->n, "layout", &layout) == 1 && pd_map_find(layout.p, layout.n, "layout_hash", &v) == 1)
            pd_put_be64(p + (v.p - p) + 2, layout_hash);
        pd_put_be64(p + rec->n - 8, pd_xxh3(p, rec->n - 14, 0));
    }
    pd_arena_free(&a);
}

int main(void)
{
    struct pd_err e;
    struct pd_rec rec;
    struct pd_rstream *in;
    struct pd_wstream *out;
    struct pd_buf b = { 0 };
    bool bad;
    int rc;
    if (pd_rstream_new(STDIN_FILENO, NULL, &in, &e) < 0 || pd_wstream_new(STDOUT_FILENO, PD_FMT_MSGPACK, false, "output", &out, &e) < 0)
        goto fail;
    while ((rc = pd_rstream_next(in, -1, &rec, &bad, &e)) == 1) {
        b.n = 0;
        if (pd_buf_add(&b, rec.p, rec.n, &e) < 0)
            goto fail;
        if (rec.kind == PD_K_OFFER || rec.kind == PD_K_KV)
            seal_desc(b.p, &rec);
        else if (rec.kind == PD_K_CHUNK)
            seal_chunk(b.p, &rec);
        if (pd_wstream_put(out, b.p, b.n, &e) < 0)
            goto fail;
    }
    if (rc < 0 || pd_wstream_close(out, &e) < 0)
        goto fail;
    pd_rstream_free(in);
    pd_buf_free(&b);
    return 0;
fail:
    fprintf(stderr, "seal: %s\n", e.msg);
    return 1;
}
