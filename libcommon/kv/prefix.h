/* Block hashes: XXH3-128 chain over (parent, tokens, adapter, multimodal, salt), seeded by the `must` fields of the fingerprint. Only full blocks. */
#ifndef PD_KV_PREFIX_H
#define PD_KV_PREFIX_H
#include "../base/mem.h"
/* out [n_tokens / block_size][16], big-endian. parent of the first is zero. */
void pd_block_hashes(uint64_t must_seed, const int32_t *tokens, uint32_t n_tokens, uint32_t block_size, struct pd_str adapter, struct pd_str salt, uint8_t (*out)[16]);
#endif
