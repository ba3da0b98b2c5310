/* Payload made smaller for a slow link (pd-kv.5).
 *
 * Codec `zstd` of f16 and bf16: each number is turned left by one bit and cut into its upper and its lower byte. The lower bytes, mantissa and sign, are noise
 * and travel as they are; then comes one zstd frame over the upper bytes, the exponents. zstd is asked for entropy coding alone: matches are hardly sought
 * (a far negative level), and literals are compressed all the same (by themselves such levels leave them plain, and nothing is gained).
 * A payload's codec says what its chunks may be: `none` each plain, `zstd` each either of the two, as its own record says. Checksums are over decoded bytes.
 *
 * It pays only where the link is slower than the coding: pd_codec_rule. Never where bytes are not copied by a processor in the first place (shm, RDMA). */
#ifndef PD_KV_CODEC_H
#define PD_KV_CODEC_H
#include "../wire/record.h"
struct iovec;

enum pd_codec_mode { PD_CODEC_NONE, PD_CODEC_ZSTD, PD_CODEC_AUTO };
#define PD_CODEC_LIST "none, zstd or auto"
bool pd_codec_parse(const char *name, enum pd_codec_mode *m);
bool pd_codec_fits(const char *kv_dtype);       /* f16, bf16 */
/* What a payload of this type says as its codec under this mode. */
const char *pd_codec_name(enum pd_codec_mode m, const char *kv_dtype);

/* Contexts and room of one thread. */
struct pd_codec;
int pd_codec_new(struct pd_codec **out, struct pd_err *e);
void pd_codec_free(struct pd_codec *c);
/* raw_len bytes that lie in pieces. *out (the codec's, until its next call) gets *n bytes; *n 0: they would not be fewer than raw_len, send them as they are. */
int pd_codec_encode(struct pd_codec *c, const struct iovec *piece, int n_pieces, size_t raw_len, const uint8_t **out, size_t *n, struct pd_err *e);
/* Back: exactly raw_len bytes in *out (the codec's, until its next call), or PD_ECORRUPT. raw_len is what the offer implies, never what the bytes say. */
int pd_codec_decode(struct pd_codec *c, const void *in, size_t n, size_t raw_len, const uint8_t **out, struct pd_err *e);
/* A chunk as pd_export_chunk filled it, with its pieces. When the rule says so and it pays: its codec and data become the coded ones, *n_pieces 1. The rule
 * learns from it. */
struct pd_codec_rule;
int pd_codec_chunk(struct pd_codec *c, struct pd_codec_rule *r, struct pd_chunk *k, struct iovec *piece, int *n_pieces, struct pd_err *e);

/* The break-even rule, one a link, for one sender. auto: the first chunks are coded to learn speed and ratio; then a chunk is coded where
 *     n * min(coding, decoding speed) > link speed  and  ratio > 1.
 * The link's speed is what its writes took, over the last megabytes. Decoding is twice as fast as coding, so coding counts unless the peer told of its own. */
struct pd_codec_rule {
    enum pd_codec_mode mode;
    uint32_t n;                         /* threads that code; 0: one */
    double decode;                      /* bytes/s of the peer, decoded; 0: not known */
    uint64_t raw, packed; int64_t code_us;      /* coded so far, lately counting more */
    uint64_t wire; int64_t wire_us;             /* written so far, lately counting more */
    uint32_t coded, plain;              /* chunks */
};
bool pd_codec_choose(const struct pd_codec_rule *r);            /* code the next chunk? */
void pd_codec_wrote(struct pd_codec_rule *r, uint64_t bytes, int64_t us);      /* the link took so many, in this time */
/* "zstd: 1.45 of 1, coding 2.1 GB/s, link 0.1 GB/s", for a person and the trace. */
void pd_codec_tell(const struct pd_codec_rule *r, char *out, size_t cap);
#endif
