#!/usr/bin/env python3
"""The reference that quantised engines are measured against: a Llama forward pass in float32 numpy over the weights of a GGUF file,
each dequantised to float32. Nothing is shared with pd or llama.cpp but the file. Needs numpy and gguf (scripts/setup has both).

    reference.py MODEL.gguf IDS.txt            the same through Hugging Face transformers in float32, and how far the two are apart
                                               (needs torch and transformers; by hand, when this file changes)

IDS files have one window a line: decimal token ids with spaces between. Each window starts at position 0."""
import hashlib
import os
import sys

import numpy as np


def read_windows(path):
    with open(path) as f:
        windows = [[int(t) for t in line.split()] for line in f if line.strip()]
    if len({len(w) for w in windows}) != 1:
        sys.exit(f"{path}: windows of different lengths")
    return np.array(windows, dtype=np.int64)


def ids_digest(windows):
    return hashlib.sha256(windows.astype("<i4").tobytes()).hexdigest()


def read_gguf(path):
    """(config, tensors): tensors by name in float32, [rows, columns] as numpy has them."""
    import gguf
    reader = gguf.GGUFReader(path)

    def get(key, default=None):
        field = reader.get_field(key)
        return default if field is None else field.contents()

    if get("general.architecture") != "llama":
        sys.exit(f"{path}: not of the Llama family but {get('general.architecture')}")
    if get("llama.rope.scaling.type", "none") != "none" or any(t.name.startswith("rope_freqs") for t in reader.tensors):
        sys.exit(f"{path}: scaled RoPE, which this reference does not know")
    heads = get("llama.attention.head_count")
    config = dict(layers=get("llama.block_count"), width=get("llama.embedding_length"), heads=heads,
                  kv_heads=get("llama.attention.head_count_kv", heads), ff=get("llama.feed_forward_length"),
                  eps=float(get("llama.attention.layer_norm_rms_epsilon")), theta=float(get("llama.rope.freq_base", 10000.0)))
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
    config["head_dim"] = tensors["blk.0.attn_q.weight"].shape[0] // heads
    if get("llama.rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        sys.exit(f"{path}: RoPE over a part of the head, which this reference does not know")
    return config, tensors


class Reference:
    def __init__(self, path):
        self.config, self.tensors = read_gguf(path)

    def _norm(self, x, name):
        mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
        return (x / np.sqrt(mean + self.config["eps"])).astype(np.float32) * self.tensors[name]

    def _rope(self, x):
        """x [n, heads, head_dim]; in GGUF files of this family the pairs that turn together are adjacent."""
        n, _, dim = x.shape
        angle = np.arange(n)[:, None] * self.config["theta"] ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
        cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
        a, b = x[..., 0::2], x[..., 1::2]
        return np.stack((a * cos - b * sin, a * sin + b * cos), axis=-1).reshape(x.shape).astype(np.float32)

    def logits(self, ids):
        """[n, vocab] float32 for one sequence from position 0."""
        c, t = self.config, self.tensors
        n, group = len(ids), c["heads"] // c["kv_heads"]
        x = t["token_embd.weight"][ids]
        mask = np.triu(np.full((n, n), -np.inf, dtype=np.float32), 1)
        for layer in range(c["layers"]):
            w = lambda name: t[f"blk.{layer}.{name}.weight"]
            h = self._norm(x, f"blk.{layer}.attn_norm.weight")
            q = self._rope((h @ w("attn_q").T).reshape(n, c["heads"], c["head_dim"]))
            k = self._rope((h @ w("attn_k").T).reshape(n, c["kv_heads"], c["head_dim"]))
            v = (h @ w("attn_v").T).reshape(n, c["kv_heads"], c["head_dim"])
            out = np.empty((n, c["heads"], c["head_dim"]), dtype=np.float32)
            for i in range(c["heads"]):
                s = q[:, i] @ k[:, i // group].T / np.float32(np.sqrt(c["head_dim"])) + mask
                s = np.exp(s - s.max(axis=-1, keepdims=True))
                out[:, i] = (s / s.sum(axis=-1, keepdims=True, dtype=np.float64).astype(np.float32)) @ v[:, i // group]
            x = x + out.reshape(n, -1) @ w("attn_output").T
            h = self._norm(x, f"blk.{layer}.ffn_norm.weight")
            gate = h @ w("ffn_gate").T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w("ffn_up").T)) @ w("ffn_down").T
        x = self._norm(x, "output_norm.weight")
        return x @ t["output.weight" if "output.weight" in t else "token_embd.weight"].T


def log_softmax(logits):
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def kl(reference, other):
    """KL(reference || other) in nats, one a row."""
    p, q = log_softmax(reference), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(axis=-1)


class Score:
    """Sums up rows of (reference, engine) logits; refuses what is not finite, so that no NaN passes for a small KL."""

    def __init__(self):
        self.kls, self.same = [], 0

    def add(self, reference, engine):
        if not np.isfinite(engine).all():
            sys.exit("logits that are not finite")
        self.kls.append(kl(reference, engine))
        self.same += int((reference.argmax(axis=-1) == engine.argmax(axis=-1)).sum())

    def summary(self):
        k = np.concatenate(self.kls)
        return {"positions": len(k), "kl_mean": float(k.mean()), "kl_p99": float(np.quantile(k, 0.99)), "kl_max": float(k.max()),
                "same_top": self.same / len(k), "kl_by_window": [float(w.mean()) for w in self.kls]}


def transformers_model(config, tensors):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def halves(name, heads):
        """GGUF's adjacent pairs back to Hugging Face's halves."""
        w = tensors[name]
        return w.reshape(heads, w.shape[0] // heads // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)

    vocab = tensors["token_embd.weight"].shape[0]
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab, hidden_size=config["width"], intermediate_size=config["ff"], num_hidden_layers=config["layers"],
        num_attention_heads=config["heads"], num_key_value_heads=config["kv_heads"], head_dim=config["head_dim"],
        rms_norm_eps=config["eps"], rope_theta=config["theta"], rope_parameters={"rope_type": "default", "rope_theta": config["theta"]},
        max_position_embeddings=8192, tie_word_embeddings=False, attn_implementation="eager")).float().eval()
    state = {"model.embed_tokens.weight": tensors["token_embd.weight"], "model.norm.weight": tensors["output_norm.weight"],
             "lm_head.weight": tensors.get("output.weight", tensors["token_embd.weight"])}
    for i in range(config["layers"]):
        at, to = f"blk.{i}.", f"model.layers.{i}."
        state[to + "self_attn.q_proj.weight"] = halves(at + "attn_q.weight", config["heads"])
        state[to + "self_attn.k_proj.weight"] = halves(at + "attn_k.weight", config["kv_heads"])
        for ours, theirs in (("attn_v", "self_attn.v_proj"), ("attn_output", "self_attn.o_proj"), ("ffn_gate", "mlp.gate_proj"),
                             ("ffn_up", "mlp.up_proj"), ("ffn_down", "mlp.down_proj"), ("attn_norm", "input_layernorm"),
                             ("ffn_norm", "post_attention_layernorm")):
            state[to + theirs + ".weight"] = tensors[at + ours + ".weight"]
    missing, unexpected = model.load_state_dict({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in state.items()}, strict=False)
    if missing or unexpected:
        sys.exit(f"transformers wants {missing} and does not know {unexpected}")
    return model


def main():
    import importlib.metadata
    import json
    import torch
    model_path, ids_path = sys.argv[1:]
    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    windows = read_windows(ids_path)
    reference = Reference(model_path)
    other = transformers_model(reference.config, reference.tensors)
    score, apart = Score(), 0.0
    with torch.no_grad():
        for ids in windows:
            a, b = reference.logits(ids), other(torch.from_numpy(ids)[None]).logits[0].numpy()
            score.add(b, a)
            apart = max(apart, float(np.abs(a - b).max()))
    print(json.dumps({"transformers": importlib.metadata.version("transformers"), "torch": torch.__version__, "max_abs_logit_difference": apart,
                      **score.summary()}))


if __name__ == "__main__":
    main()
