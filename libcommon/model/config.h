/* The hyperparameters of a model, read and ranged from its file. A family or feature that is not supported is refused by name. */
#ifndef PD_MODEL_CONFIG_H
#define PD_MODEL_CONFIG_H
#include "family/family.h"
#include "gguf.h"
enum pd_rope_scaling { PD_ROPE_NONE, PD_ROPE_LINEAR, PD_ROPE_LLAMA3 };
struct pd_rope {
    int n_rot; double theta; bool pairs;        /* basis: true adjacent pairs (Llama GGUF), false halves */
    enum pd_rope_scaling scaling; double factor, low_freq_factor, high_freq_factor; int original_ctx;  /* LLAMA3 from rope_freqs.weight: these stay 0 */
    float *freq_factors;                        /* [n_rot/2] divisors (rope_freqs.weight, or worked out from the LLAMA3 keys) or NULL */
};
struct pd_config {
    char arch[16], name[64];
    int n_layers, n_embd, n_ff, n_heads, n_kv_heads, head_dim, n_vocab, n_ctx;
    float rms_eps; bool tied;
    struct pd_rope rope;
    const struct pd_family *family;
};
int pd_config_from_gguf(const struct pd_gguf *g, struct pd_config *c, struct pd_err *e);
void pd_config_free(struct pd_config *c);
/* cos/sin of positions [pos0, pos0+n): out [n][n_rot/2][2], computed in double, rounded once. */
void pd_rope_table(const struct pd_rope *r, int pos0, int n, float *out);
/* The length that a dimension of the family's table has in this model. */
uint64_t pd_config_dim(const struct pd_config *c, enum pd_tensor_dim d);
#endif
