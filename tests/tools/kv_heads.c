/* kv_heads DUMP RUN PARTS BLOCK_SIZE hnd|nhd OUT: splits the heads of a dump's run among PARTS ranks, each into blocks of that size and order, writes them to OUT
 * (rank by rank; of each, layer by layer, K then V), merges them again and compares. */
#include <stdio.h>
#include <stdlib.h>
#include "../../libcommon/kv/convert.h"
#include "../../libcommon/kv/inspect.h"
#include "../../libcommon/model/dtype.h"

struct ask { uint32_t parts, block_size; bool nhd; FILE *out; };

static uint8_t **table(uint8_t *mem, size_t bytes, uint32_t n)
{
    uint8_t **t = calloc(n, sizeof *t);
    for (uint32_t i = 0; t && i < n; i++)
        t[i] = mem + i * bytes;
    return t;
}

static int on_run(void *ctx, struct pd_kv_run *r, struct pd_err *e)
{
    const struct ask *a = ctx;
    const struct pd_kv_layout *y = &r->d.layout;
    const struct pd_kernels *k = pd_kv_kernels();
    struct pd_kv_form whole = pd_form_of(y, pd_layout_elem_size(y)), part = whole;
    uint32_t heads = y->kv_heads / a->parts, n = (r->d.n_tokens + a->block_size - 1) / a->block_size;
    size_t bytes, whole_bytes;
    int rc;
    if (!heads || y->kv_heads % a->parts)
        return pd_fail(e, PD_EUSAGE, "%u heads do not go into %u parts", y->kv_heads, a->parts);
    part.block_size = a->block_size;
    part.heads = heads;
    part.nhd = a->nhd;
    whole.nhd = false;
    if ((rc = pd_form_bytes(&part, &bytes, e)) || (rc = pd_form_bytes(&whole, &whole_bytes, e)))
        return rc;
    uint8_t *mem = malloc(bytes * n), *again = malloc(whole_bytes * r->n_blocks), **to = table(mem, bytes, n), **back = table(again, whole_bytes, r->n_blocks);
    uint8_t **from = calloc(r->n_blocks, sizeof *from);
    for (uint32_t rank = 0; !rc && rank < a->parts; rank++)
        for (uint32_t l = 0; !rc && l < y->layers; l++)
            for (int v = 0; !rc && v < 2; v++) {
                for (uint32_t i = 0; i < r->n_blocks; i++)
                    from[i] = pd_pool_base(r->pool, r->blocks[i]) + pd_pool_off(r->pool, (int)l, v);
                memset(mem, 0, bytes * n);
                memset(again, 0, whole_bytes * r->n_blocks);
                rc = pd_convert(k, &(struct pd_kv_view){ part, to, n, 0, 0 }, &(struct pd_kv_view){ whole, from, r->n_blocks, 0, rank * heads }, r->d.n_tokens, heads, e);
                for (uint32_t j = 0; !rc && j < a->parts; j++)      /* the other ranks' heads straight, this one's back from its part */
                    rc = pd_convert(k, &(struct pd_kv_view){ whole, back, r->n_blocks, 0, j * heads },
                                    j == rank ? &(struct pd_kv_view){ part, to, n, 0, 0 } : &(struct pd_kv_view){ whole, from, r->n_blocks, 0, j * heads }, r->d.n_tokens,
                                    heads, e);
                for (uint32_t i = 0; !rc && i < r->n_blocks; i++)
                    if (memcmp(back[i], from[i], whole_bytes))
                        rc = pd_fail(e, PD_ECORRUPT, "layer %u, block %u: merged it is not what was split", l, i);
                if (!rc && fwrite(mem, bytes, n, a->out) != n)
                    rc = pd_fail_sys(e, "write");
            }
    free(mem);
    free(again);
    free(to);
    free(back);
    free(from);
    return rc;
}

int main(int argc, char **argv)
{
    struct pd_err e = { 0 };
    if (argc != 7)
        return 2;
    struct ask a = { (uint32_t)atoi(argv[3]), (uint32_t)atoi(argv[4]), !strcmp(argv[5], "nhd"), fopen(argv[6], "we") };
    if (!a.parts || !a.block_size || !a.out)
        return 2;
    int rc = pd_kv_each_run(argv[1], -1, &(struct pd_kv_walk){ .mode = PD_DUMP_DATA, .run = argv[2], .run_fn = on_run, .ctx = &a }, &e);
    if (fclose(a.out))
        return 1;
    if (rc)
        fprintf(stderr, "kv_heads: %s\n", e.msg);
    return pd_exit_status(rc);
}
