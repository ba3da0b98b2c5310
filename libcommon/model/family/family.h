/* A model family as data: which tensors a file of this architecture holds, and what shape each has. Adding a family is one file with such a table
 * and a line in family.c. Whatever the table does not name is refused, never ignored: an unknown tensor would change the result. */
#ifndef PD_MODEL_FAMILY_H
#define PD_MODEL_FAMILY_H
#include <stdbool.h>

enum pd_tensor_role {
    PD_T_EMBD, PD_T_OUT_NORM, PD_T_OUTPUT, PD_T_ROPE_FREQS,                                     /* once a model */
    PD_T_ATTN_NORM, PD_T_Q, PD_T_K, PD_T_V, PD_T_O, PD_T_FFN_NORM, PD_T_GATE, PD_T_UP, PD_T_DOWN,   /* once a layer */
    PD_T_N_ROLES
};
enum pd_tensor_dim { PD_D_ONE, PD_D_EMBD, PD_D_FF, PD_D_VOCAB, PD_D_HEADS /* n_heads * head_dim */, PD_D_KV /* n_kv_heads * head_dim */, PD_D_ROT /* n_rot / 2 */ };

/* name: as in the file; of a layer's tensor what follows "blk.N.". ne0 (fastest, the inputs), ne1 (the outputs; ONE: a vector, kept as floats). */
struct pd_family_tensor { const char *name; enum pd_tensor_role role; bool layer, optional; enum pd_tensor_dim ne0, ne1; };

struct pd_family {
    const char *arch;               /* general.architecture */
    bool rope_pairs;                /* this family's GGUF files hold q and k rows permuted so that adjacent pairs rotate */
    const struct pd_family_tensor *tensor; int n_tensors;
};
const struct pd_family *pd_family_find(const char *arch);      /* NULL: not supported */
#define PD_FAMILY_LIST "llama"
extern const struct pd_family pd_family_llama;
#endif
