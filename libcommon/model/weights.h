/* A model ready to run: config, tokenizer, chat format and weights repacked once into the kernels' form (kernels.h), in parallel.
 * Immutable once opened, and the file is done with: whatever becomes of it touches no answer. The packed matrices are slices of one allocation; beside them only
 * norms and tables are kept, embedding rows are unpacked as they are needed. */
#ifndef PD_MODEL_WEIGHTS_H
#define PD_MODEL_WEIGHTS_H
#include "../base/hash.h"
#include "../base/threads.h"
#include "chat.h"
#include "config.h"
struct pd_layer_weights {
    float *attn_norm, *ffn_norm;        /* [n_embd] */
    struct pd_pmat *qkv; int n_qkv;     /* q, k, v: one fused matrix [q|k|v rows] where their types agree and the split falls on groups of 32; else 2 or 3 in order */
    struct pd_pmat o, gate, up, down;
};
struct pd_load_times { double parse_ms, text_ms, pack_ms, digest_ms; };    /* header; tokenizer and chat; weights; their digest (0: from the cache) */
struct pd_model {
    struct pd_gguf *gguf;               /* NULL once pd_model_open is done */
    struct pd_config cfg; struct pd_tokenizer *tok; struct pd_chat chat;
    struct pd_layer_weights *layer; float *out_norm; struct pd_pmat head, embd_own;
    const struct pd_pmat *embd;         /* &head if tied, else &embd_own */
    enum pd_pack numerics;              /* PD_PK_U8: all big matrices integer-dot; else the float kind that occurs */
    char quant[16];                     /* the type most of the weights have, "Q4_1" */
    uint8_t digest[PD_SHA_LEN]; char revision[96];      /* name@first 12 hex of the weights digest */
    size_t packed_bytes, embd_bytes; double load_ms;     /* packed_bytes: of the matrices that a token streams; embd_bytes: of embeddings of their own */
    struct pd_load_times times;
    uint8_t *packed; struct pd_arena arena;             /* owns what the pointers above point to */
};
struct pd_model_opts { struct pd_threads *threads; const char *chat_template; bool no_weights; /* tokenizer and config only */ bool no_digest; };
int pd_model_open(const char *path, const struct pd_model_opts *o, struct pd_model **out, struct pd_err *e);
void pd_model_free(struct pd_model *m);
/* The embedding of a token, 0 <= token < n_vocab; NaN for any other, so that a slip cannot pass for an answer. */
void pd_model_embed(const struct pd_model *m, int32_t token, float *out /* [n_embd] */);

/* The weights alone, for a model whose gguf and cfg are set (pd_model_open calls it; so do tests and the fuzz target). Nothing points into gguf afterwards. */
int pd_weights_load(struct pd_model *m, struct pd_threads *threads, struct pd_err *e);
#endif
