/* Llama 1 to 3, and what shares its block: SmolLM2, TinyLlama, Mistral without a window. RMS norm, rotary attention with grouped heads, SwiGLU. */
#include "family.h"

static const struct pd_family_tensor tensors[] = {
    { "token_embd.weight",  PD_T_EMBD,       .ne0 = PD_D_EMBD, .ne1 = PD_D_VOCAB },
    { "output_norm.weight", PD_T_OUT_NORM,   .ne0 = PD_D_EMBD },
    { "output.weight",      PD_T_OUTPUT,     .ne0 = PD_D_EMBD, .ne1 = PD_D_VOCAB, .optional = true },  /* absent: the embedding, tied */
    { "rope_freqs.weight",  PD_T_ROPE_FREQS, .ne0 = PD_D_ROT, .optional = true },                      /* Llama 3.1's scaling, worked out */
    { "attn_norm.weight",   PD_T_ATTN_NORM,  .layer = true, .ne0 = PD_D_EMBD },
    { "attn_q.weight",      PD_T_Q,          .layer = true, .ne0 = PD_D_EMBD, .ne1 = PD_D_HEADS },
    { "attn_k.weight",      PD_T_K,          .layer = true, .ne0 = PD_D_EMBD, .ne1 = PD_D_KV },
    { "attn_v.weight",      PD_T_V,          .layer = true, .ne0 = PD_D_EMBD, .ne1 = PD_D_KV },
    { "attn_output.weight", PD_T_O,          .layer = true, .ne0 = PD_D_HEADS, .ne1 = PD_D_EMBD },
    { "ffn_norm.weight",    PD_T_FFN_NORM,   .layer = true, .ne0 = PD_D_EMBD },
    { "ffn_gate.weight",    PD_T_GATE,       .layer = true, .ne0 = PD_D_EMBD, .ne1 = PD_D_FF },
    { "ffn_up.weight",      PD_T_UP,         .layer = true, .ne0 = PD_D_EMBD, .ne1 = PD_D_FF },
    { "ffn_down.weight",    PD_T_DOWN,       .layer = true, .ne0 = PD_D_FF, .ne1 = PD_D_EMBD },
};

const struct pd_family pd_family_llama = { "llama", true, tensors, sizeof tensors / sizeof *tensors };
