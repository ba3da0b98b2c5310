#define XXH_STATIC_LINKING_ONLY        /* the state's size: one on the stack instead of an allocation a block */
#include <xxhash.h>
#include "prefix.h"

static void le32(uint8_t out[4], uint32_t v)
{
    for (int i = 0; i < 4; i++)
        out[i] = (uint8_t)(v >> 8 * i);
}

/* A length before each part, so that (adapter "ab", salt "c") and ("a", "bc") differ. The empty one in the middle is the place of multimodal digests. */
static void part(XXH3_state_t *st, const void *p, size_t n)
{
    uint8_t len[4];
    le32(len, (uint32_t)n);
    XXH3_128bits_update(st, len, 4);
    if (n)
        XXH3_128bits_update(st, p, n);
}

void pd_block_hashes(uint64_t must_seed, const int32_t *tokens, uint32_t n_tokens, uint32_t block_size, struct pd_str adapter, struct pd_str salt, uint8_t (*out)[16])
{
    XXH3_state_t st;
    uint8_t parent[16] = { 0 }, id[4];
    for (uint32_t b = 0; block_size && b < n_tokens / block_size; b++) {
        XXH3_INITSTATE(&st);
        XXH3_128bits_reset_withSeed(&st, must_seed);
        XXH3_128bits_update(&st, parent, 16);
        le32(id, block_size);
        XXH3_128bits_update(&st, id, 4);
        for (uint32_t i = 0; i < block_size; i++) {
            le32(id, (uint32_t)tokens[(size_t)b * block_size + i]);
            XXH3_128bits_update(&st, id, 4);
        }
        part(&st, adapter.p, adapter.p ? adapter.n : 0);
        part(&st, NULL, 0);
        part(&st, salt.p, salt.p ? salt.n : 0);
        XXH128_canonical_t c;
        XXH128_canonicalFromHash(&c, XXH3_128bits_digest(&st));
        memcpy(out[b], c.digest, 16);
        memcpy(parent, c.digest, 16);
    }
}
