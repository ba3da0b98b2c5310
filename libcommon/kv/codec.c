#include <stdio.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <zstd.h>
#include "../base/clock.h"
#include "../model/dtype.h"
#include "codec.h"
#include "convert.h"

/* Debian's zstd.h hides the name of this parameter, the library takes it: 1002, `ZSTD_c_literalCompressionMode`; 1 is ZSTD_ps_enable. */
#define LITERALS ((ZSTD_cParameter)ZSTD_c_experimentalParam5)
enum { LITERALS_ON = 1, LEVEL = -1000 };
enum { TRIAL = 2 /* chunks */, WINDOW = 32 << 20 /* bytes that a speed is taken over, about */, SEEN = 256 << 10 /* bytes written until it is believed */ };

struct pd_codec {
    const struct pd_kernels *k;
    ZSTD_CCtx *enc;
    ZSTD_DCtx *dec;
    uint8_t *out, *hi;
    size_t out_cap, hi_cap;
};

static const char *const mode_name[] = { "none", "zstd", "auto" };

bool pd_codec_parse(const char *name, enum pd_codec_mode *m)
{
    for (size_t i = 0; i < sizeof mode_name / sizeof *mode_name; i++)
        if (!strcmp(name, mode_name[i])) {
            *m = (enum pd_codec_mode)i;
            return true;
        }
    return false;
}

bool pd_codec_fits(const char *kv_dtype)
{
    enum pd_dtype t;
    return pd_kv_dtype_parse(kv_dtype, &t) && t != PD_F32;
}

const char *pd_codec_name(enum pd_codec_mode m, const char *kv_dtype) { return m != PD_CODEC_NONE && pd_codec_fits(kv_dtype) ? "zstd" : "none"; }

int pd_codec_new(struct pd_codec **out, struct pd_err *e)
{
    struct pd_codec *c = pd_calloc(1, sizeof *c, "codec", e);
    if (!c)
        return PD_ENOMEM;
    c->k = pd_kv_kernels();
    *out = c;
    return 0;
}

void pd_codec_free(struct pd_codec *c)
{
    if (!c)
        return;
    ZSTD_freeCCtx(c->enc);
    ZSTD_freeDCtx(c->dec);
    pd_free(c->out);
    pd_free(c->hi);
    pd_free(c);
}

/* Room that keeps nothing of what it held. */
static int room(uint8_t **p, size_t *cap, size_t want, struct pd_err *e)
{
    if (want <= *cap)
        return 0;
    pd_free(*p);
    *cap = 0;
    if (!(*p = pd_alloc_aligned(want, "codec room", e)))
        return PD_ENOMEM;
    *cap = want;
    return 0;
}

int pd_codec_encode(struct pd_codec *c, const struct iovec *piece, int n_pieces, size_t raw_len, const uint8_t **out, size_t *n, struct pd_err *e)
{
    size_t half = raw_len / 2, at = 0, cap;
    *n = 0;
    if (raw_len % 2 || !pd_add_size(half, ZSTD_compressBound(half), &cap) || ZSTD_isError(ZSTD_compressBound(half)))
        return pd_fail(e, PD_EFAIL, "codec: %zu bytes are no row of 16-bit numbers", raw_len);
    if (room(&c->hi, &c->hi_cap, half, e) || room(&c->out, &c->out_cap, cap, e))
        return PD_ENOMEM;
    if (!c->enc) {
        if (!(c->enc = ZSTD_createCCtx()))
            return pd_fail(e, PD_ENOMEM, "out of memory for zstd");
        ZSTD_CCtx_setParameter(c->enc, ZSTD_c_compressionLevel, LEVEL);
        ZSTD_CCtx_setParameter(c->enc, LITERALS, LITERALS_ON);         /* refused by a zstd that lacks it: slower levels of gain, right bytes */
    }
    for (int i = 0; i < n_pieces; i++) {
        size_t m = piece[i].iov_len / 2;
        if (piece[i].iov_len % 2 || m > half - at)
            return pd_fail(e, PD_EFAIL, "codec: pieces of more than %zu bytes, or of odd length", raw_len);
        c->k->split16(c->hi + at, c->out + at, piece[i].iov_base, m);
        at += m;
    }
    if (at != half)
        return pd_fail(e, PD_EFAIL, "codec: pieces of %zu bytes where %zu belong", 2 * at, raw_len);
    size_t got = ZSTD_compress2(c->enc, c->out + half, cap - half, c->hi, half);
    if (ZSTD_isError(got))
        return pd_fail(e, PD_ENOMEM, "zstd: %s", ZSTD_getErrorName(got));
    *out = c->out;
    *n = half + got < raw_len ? half + got : 0;
    return 0;
}

int pd_codec_decode(struct pd_codec *c, const void *in, size_t n, size_t raw_len, const uint8_t **out, struct pd_err *e)
{
    const uint8_t *lo = in;
    size_t half = raw_len / 2;
    if (raw_len % 2 || n <= half || n >= raw_len)
        return pd_fail(e, PD_ECORRUPT, "%zu bytes are no zstd coding of %zu", n, raw_len);
    /* One frame, of the length that it must have, and nothing after it: what it decodes to is bounded before anything is decoded. */
    if (ZSTD_getFrameContentSize(lo + half, n - half) != half || ZSTD_findFrameCompressedSize(lo + half, n - half) != n - half)
        return pd_fail(e, PD_ECORRUPT, "its exponents are no single zstd frame of %zu bytes", half);
    if (room(&c->hi, &c->hi_cap, half, e) || room(&c->out, &c->out_cap, raw_len, e))
        return PD_ENOMEM;
    if (!c->dec && !(c->dec = ZSTD_createDCtx()))
        return pd_fail(e, PD_ENOMEM, "out of memory for zstd");
    size_t got = ZSTD_decompressDCtx(c->dec, c->hi, half, lo + half, n - half);
    if (ZSTD_isError(got) || got != half)
        return pd_fail(e, PD_ECORRUPT, "zstd: %s", ZSTD_isError(got) ? ZSTD_getErrorName(got) : "short frame");
    c->k->merge16((uint16_t *)(void *)c->out, c->hi, lo, half);
    *out = c->out;
    return 0;
}

/* ---- the rule ---- */

static double coding(const struct pd_codec_rule *r)
{
    double a = r->code_us > 0 ? (double)r->raw / (double)r->code_us * 1e6 : 0;
    return (r->n ? r->n : 1) * (r->decode > 0 && r->decode < a ? r->decode : a);
}

static double link_speed(const struct pd_codec_rule *r) { return (double)r->wire / (double)(r->wire_us > 0 ? r->wire_us : 1) * 1e6; }

bool pd_codec_choose(const struct pd_codec_rule *r)
{
    if (r->mode != PD_CODEC_AUTO)
        return r->mode == PD_CODEC_ZSTD;
    if (r->coded < TRIAL)
        return true;
    return r->wire >= SEEN && r->raw > r->packed && coding(r) > link_speed(r);
}

void pd_codec_wrote(struct pd_codec_rule *r, uint64_t bytes, int64_t us)
{
    r->wire += bytes;
    r->wire_us += us > 0 ? us : 0;
    if (r->wire > WINDOW) {
        r->wire /= 2;
        r->wire_us /= 2;
    }
}

static void learn(struct pd_codec_rule *r, uint64_t raw, uint64_t packed, int64_t us)
{
    r->raw += raw;
    r->packed += packed;
    r->code_us += us > 0 ? us : 1;
    if (r->raw > WINDOW) {
        r->raw /= 2;
        r->packed /= 2;
        r->code_us /= 2;
    }
}

int pd_codec_chunk(struct pd_codec *c, struct pd_codec_rule *r, struct pd_chunk *k, struct iovec *piece, int *n_pieces, struct pd_err *e)
{
    const uint8_t *out;
    size_t n;
    if (!pd_codec_choose(r)) {
        r->plain++;
        return 0;
    }
    int64_t t0 = pd_mono_us();
    int rc = pd_codec_encode(c, piece, *n_pieces, k->raw_len, &out, &n, e);
    if (rc)
        return rc;
    learn(r, k->raw_len, n ? n : k->raw_len, pd_mono_us() - t0);
    r->coded++;
    if (!n)
        return 0;
    strcpy(k->codec, "zstd");
    k->data = (struct pd_bin){ out, n };
    piece[0] = (struct iovec){ (void *)(uintptr_t)out, n };
    *n_pieces = 1;
    return 0;
}

void pd_codec_tell(const struct pd_codec_rule *r, char *out, size_t cap)
{
    snprintf(out, cap, "%u chunks coded, %u plain: ratio %.2f, coding %.2f GB/s, link %.2f GB/s", r->coded, r->plain,
             r->packed ? (double)r->raw / (double)r->packed : 1, coding(r) * 1e-9, r->wire ? link_speed(r) * 1e-9 : 0);
}
