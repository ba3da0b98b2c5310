#include <stdio.h>
#include <stdlib.h>
#include "convert.h"

static const struct { const char *name, *cap; unsigned bit; } fields[] = {
    { "block_size", "convert_block_size", PD_CONV_BLOCK_SIZE }, { "order", "convert_order", PD_CONV_ORDER } };
enum { N_FIELDS = sizeof fields / sizeof *fields };

unsigned pd_conv_field(const char *name, size_t n)
{
    for (size_t i = 0; i < N_FIELDS; i++)
        if (n == strlen(fields[i].name) && !memcmp(name, fields[i].name, n))
            return fields[i].bit;
    return 0;
}

int pd_conv_parse(const char *list, unsigned *mask, struct pd_err *e)
{
    *mask = 0;
    for (const char *s = list; ; s++) {
        size_t n = strcspn(s, ",");
        unsigned bit = pd_conv_field(s, n);
        if (!bit)
            return pd_fail(e, PD_EUSAGE, "--allow-convert: '%.*s' cannot be converted%s (example: --allow-convert block_size,order)", (int)(n < 40 ? n : 40), s,
                           n == 2 && !memcmp(s, "tp", 2) ? ": no worker of this build is split by heads" : "");
        *mask |= bit;
        if (!*(s += n))
            return 0;
    }
}

const char *pd_conv_text(unsigned mask, char out[PD_CONV_MAX])
{
    out[0] = 0;
    for (size_t i = 0; i < N_FIELDS; i++)
        if (mask & fields[i].bit)
            snprintf(out + strlen(out), PD_CONV_MAX - strlen(out), "%s%s", *out ? "," : "", fields[i].name);
    return out;
}

uint32_t pd_conv_caps(unsigned mask, struct pd_str *out)
{
    uint32_t n = 0;
    for (size_t i = 0; i < N_FIELDS; i++)
        if (mask & fields[i].bit)
            out[n++] = (struct pd_str){ fields[i].cap, strlen(fields[i].cap) };
    return n;
}

unsigned pd_conv_of_caps(const struct pd_str *caps, uint32_t n)
{
    unsigned mask = 0;
    for (uint32_t i = 0; i < n; i++)
        for (size_t k = 0; k < N_FIELDS; k++)
            mask |= pd_str_eq(caps[i], fields[k].cap) ? fields[k].bit : 0;
    return mask;
}

const struct pd_kernels *pd_kv_kernels(void)
{
    const struct pd_kernels *k = pd_kernels_cpu(getenv("PD_CPU"), NULL);
    return k ? k : pd_kernels_cpu(NULL, NULL);
}

struct pd_kv_form pd_form_of(const struct pd_kv_layout *l, size_t el)
{
    return (struct pd_kv_form){ l->block_size, l->kv_heads, l->head_dim, el, !strcmp(l->order, "NHD") };
}

int pd_form_bytes(const struct pd_kv_form *f, size_t *bytes, struct pd_err *e)
{
    size_t n = f->el;
    if (!n || !f->block_size || !f->heads || !f->head_dim || !pd_mul_size(n, f->head_dim, &n) || !pd_mul_size(n, f->heads, &n) ||
        !pd_mul_size(n, f->block_size, &n) || n > (size_t)1 << 46)
        return pd_fail(e, PD_ECORRUPT, "KV of %u heads of %u numbers of %zu bytes in blocks of %u tokens makes no sense", f->heads, f->head_dim, f->el, f->block_size);
    *bytes = n;
    return 0;
}

/* Bytes between neighbouring tokens of a head, and between neighbouring heads of a token. */
static size_t token_step(const struct pd_kv_form *f, size_t row) { return f->nhd ? row * f->heads : row; }
static size_t head_step(const struct pd_kv_form *f, size_t row) { return f->nhd ? row : row * f->block_size; }

static int check(const struct pd_kv_view *v, const char *side, uint32_t n_tokens, uint32_t n_heads, struct pd_err *e)
{
    size_t bytes;
    int rc = pd_form_bytes(&v->form, &bytes, e);
    if (rc)
        return pd_err_prefix(e, "%s", side);
    if ((uint64_t)v->token0 + n_tokens > (uint64_t)v->n_blocks * v->form.block_size)
        return pd_fail(e, PD_ECORRUPT, "%s: tokens %u to %llu of %u blocks of %u", side, v->token0, (unsigned long long)v->token0 + n_tokens - 1, v->n_blocks,
                       v->form.block_size);
    if ((uint64_t)v->head0 + n_heads > v->form.heads)
        return pd_fail(e, PD_ECORRUPT, "%s: heads %u to %llu of %u", side, v->head0, (unsigned long long)v->head0 + n_heads - 1, v->form.heads);
    return 0;
}

/* One piece of the run that lies within one block of each. Both sides have the heads of a token, or the tokens of a head, beside each other: as few and as long
 * rows as that allows. */
static void piece(const struct pd_kernels *k, uint8_t *d, const struct pd_kv_form *df, const uint8_t *s, const struct pd_kv_form *sf, size_t row, uint32_t tokens,
                  uint32_t heads)
{
    if (df->nhd && sf->nhd) {
        k->rows(d, token_step(df, row), s, token_step(sf, row), row * heads, tokens);
        return;
    }
    if (!df->nhd && !sf->nhd) {
        k->rows(d, head_step(df, row), s, head_step(sf, row), row * tokens, heads);
        return;
    }
    for (uint32_t h = 0; h < heads; h++)
        k->rows(d + h * head_step(df, row), token_step(df, row), s + h * head_step(sf, row), token_step(sf, row), row, tokens);
}

int pd_convert(const struct pd_kernels *k, const struct pd_kv_view *to, const struct pd_kv_view *from, uint32_t n_tokens, uint32_t n_heads, struct pd_err *e)
{
    const struct pd_kv_form *df = &to->form, *sf = &from->form;
    int rc = check(to, "to", n_tokens, n_heads, e);
    rc = rc ? rc : check(from, "from", n_tokens, n_heads, e);
    if (rc)
        return rc;
    if (df->el != sf->el || df->head_dim != sf->head_dim)
        return pd_fail(e, PD_EINCOMPAT, "heads of %u numbers of %zu bytes do not become heads of %u of %zu without a change", sf->head_dim, sf->el, df->head_dim, df->el);
    size_t row = df->head_dim * df->el;
    for (uint32_t t = 0, n; t < n_tokens; t += n) {
        uint64_t dt = (uint64_t)to->token0 + t, st = (uint64_t)from->token0 + t;
        uint32_t di = (uint32_t)(dt % df->block_size), si = (uint32_t)(st % sf->block_size);
        n = n_tokens - t;
        n = n < df->block_size - di ? n : df->block_size - di;
        n = n < sf->block_size - si ? n : sf->block_size - si;
        piece(k, to->block[dt / df->block_size] + di * token_step(df, row) + to->head0 * head_step(df, row), df,
              from->block[st / sf->block_size] + si * token_step(sf, row) + from->head0 * head_step(sf, row), sf, row, n, n_heads);
    }
    return 0;
}
