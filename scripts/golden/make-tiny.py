#!/usr/bin/env python3
"""Make the tiny Llama models of testdata/tiny, their golden logits, the dequantisation goldens of testdata/dequant, and seeds for tests/fuzz/fuzz_gguf.

Run by hand, in an environment that has numpy, gguf, torch and transformers (made with torch 2.15, transformers 5.24, gguf 0.19):
    scripts/golden/make-tiny.py [ROOT of the tree]

For each NAME.gguf there are NAME.tokens.bin (int32) and NAME.logits.bin (float32 [n_tokens, n_vocab]): what Hugging Face's LlamaForCausalLM answers in
float32 with the weights as the file holds them (a quantised file's weights are dequantised by gguf-py first). The same seed gives the same files.
"""
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as T
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]

TEXT = """The river ran past the mill and under the old stone bridge, and in the evening the miller sat by the water and counted the boats.
There were three of them in spring, seven in the summer, and none when the ice came. "Where do they go?" asked the child. "Down to the sea," said
the miller, "and then there is no counting them any more." The child thought about this for a while, and then threw a stone into the river and
watched the rings go out, one after the other, until the other bank sent them back again. In the morning the first boat of the year came round the
bend, with a red sail and a dog that stood in the bow and barked at the bridge, the mill and the miller, and the child ran along the bank as far as
the last of the willows, and waved. That is what the counting is for, the miller said in the evening: so that one knows what has come back."""

CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


# --- vocabularies ---

def byte_symbols():
    """GPT-2's printable stand-ins for the 256 bytes."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {}, 0
    for b in range(256):
        table[b] = chr(b if b in keep else 256 + extra)
        extra += b not in keep
    return table


def learn_merges(words, n):
    """The n most frequent pairs, one after the other. words: lists of symbols."""
    merges = []
    while len(merges) < n:
        count = {}
        for w in words:
            for pair in zip(w, w[1:]):
                count[pair] = count.get(pair, 0) + 1
        a, b = max(count, key=lambda p: (count[p], p))
        merges.append((a, b))
        for w in words:
            i = 0
            while i < len(w) - 1:
                if (w[i], w[i + 1]) == (a, b):
                    w[i:i + 2] = [a + b]
                i += 1
    return merges


def bpe_vocab(w, n_vocab):
    sym = byte_symbols()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [[sym[b] for b in (" " * (i > 0) + word).encode()] for i, word in enumerate(TEXT.split())]
    merges = learn_merges(words, n_vocab - 256 - len(special))
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(special + [sym[b] for b in range(256)] + [a + b for a, b in merges])
    w.add_token_types([3] * len(special) + [1] * (n_vocab - len(special)))
    w.add_token_merges([f"{a} {b}" for a, b in merges])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_pad_token_id(2)
    w.add_add_bos_token(False)
    w.add_add_space_prefix(False)
    w.add_chat_template(CHATML)


def spm_vocab(w, n_vocab):
    words = [list("\u2581" + word) for word in TEXT.split()]
    letters = sorted({c for word in words for c in word})
    head = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    merged = [a + b for a, b in learn_merges(words, n_vocab - len(head) - len(letters))]
    pieces = merged + letters
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list(head + pieces)
    w.add_token_scores([0.0] * len(head) + [-float(i) for i in range(len(pieces))])
    w.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces))
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)
    w.add_add_space_prefix(True)


# --- K types, which gguf-py only reads: round to the nearest of what a block can hold ---

def halves(x):
    return np.ascontiguousarray(x.astype(np.float16)).view(np.uint8).reshape(len(x), -1)


def k_scale_min(blocks, levels):
    """Per 32 weights a 6-bit scale and minimum; d, dmin, the 12 bytes of them, and the integers."""
    sub = blocks.reshape(len(blocks), 8, 32)
    low = np.minimum(sub.min(-1), 0)
    scale = (sub.max(-1) - low) / levels
    d = (scale.max(-1) / 63).astype(np.float16).astype(np.float32)
    dmin = ((-low).max(-1) / 63).astype(np.float16).astype(np.float32)
    one = np.float32(1)
    sc = np.clip(np.rint(scale / np.where(d == 0, one, d)[:, None]), 0, 63).astype(np.uint8)
    m = np.clip(np.rint(-low / np.where(dmin == 0, one, dmin)[:, None]), 0, 63).astype(np.uint8)
    step = d[:, None] * sc
    q = np.rint((sub + (dmin[:, None] * m)[:, :, None]) / np.where(step == 0, one, step)[:, :, None])
    q = np.clip(q, 0, levels).astype(np.uint8)
    packed = np.concatenate([sc[:, :4] | (sc[:, 4:] >> 4) << 6, m[:, :4] | (m[:, 4:] >> 4) << 6, (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4], axis=1)
    return np.concatenate([halves(d[:, None]), halves(dmin[:, None]), packed], axis=1), q


def q4_k(blocks):
    head, q = k_scale_min(blocks, 15)
    return np.concatenate([head, (q[:, 0::2] | q[:, 1::2] << 4).reshape(len(q), 128)], axis=1)


def q5_k(blocks):
    head, q = k_scale_min(blocks, 31)
    high = np.zeros((len(q), 32), np.uint8)
    for j in range(8):
        high |= (q[:, j] >> 4) << j
    return np.concatenate([head, high, ((q[:, 0::2] & 15) | (q[:, 1::2] & 15) << 4).reshape(len(q), 128)], axis=1)


def q6_k(blocks):
    sub = blocks.reshape(len(blocks), 16, 16)
    scale = np.abs(sub).max(-1) / 31
    d = (scale.max(-1) / 127).astype(np.float16).astype(np.float32)
    sc = np.clip(np.rint(scale / np.where(d == 0, np.float32(1), d)[:, None]), 0, 127).astype(np.int8)
    step = d[:, None] * sc
    q = np.clip(np.rint(sub / np.where(step == 0, np.float32(1), step)[:, :, None]), -32, 31).astype(np.int8) + 32
    q = q.astype(np.uint8).reshape(len(q), 2, 4, 32)
    low = np.stack([(q[:, :, 0] & 15) | (q[:, :, 2] & 15) << 4, (q[:, :, 1] & 15) | (q[:, :, 3] & 15) << 4], axis=2).reshape(len(q), 128)
    high = (q[:, :, 0] >> 4 | (q[:, :, 1] >> 4) << 2 | (q[:, :, 2] >> 4) << 4 | (q[:, :, 3] >> 4) << 6).reshape(len(q), 64)
    return np.concatenate([low, high, sc.view(np.uint8), halves(d[:, None])], axis=1)


K = {T.Q4_K: q4_k, T.Q5_K: q5_k, T.Q6_K: q6_k}


def quantize(w, qtype):
    if qtype in K:
        return K[qtype](w.reshape(-1, 256)).reshape(len(w), -1)
    return gguf.quants.quantize(w, qtype)


# --- weights ---

class Shape:
    def __init__(self, layers=2, embd=64, heads=4, kv=2, head_dim=16, ff=160, vocab=320, ctx=256, theta=10000.0, eps=1e-5, tied=True):
        self.__dict__.update(locals())


def make_weights(s, seed):
    """In Hugging Face's names and order of rows."""
    rng = np.random.default_rng(seed)

    def mat(n_out, n_in, gain=1.0):
        return (rng.standard_normal((n_out, n_in)) * gain / np.sqrt(n_in)).astype(np.float32)

    def norm(n):
        return (1 + 0.2 * rng.standard_normal(n)).astype(np.float32)

    w = {"model.embed_tokens.weight": mat(s.vocab, s.embd, 3.0), "model.norm.weight": norm(s.embd)}
    if not s.tied:
        w["lm_head.weight"] = mat(s.vocab, s.embd, 3.0)
    for i in range(s.layers):
        p = f"model.layers.{i}."
        w[p + "input_layernorm.weight"] = norm(s.embd)
        w[p + "post_attention_layernorm.weight"] = norm(s.embd)
        w[p + "self_attn.q_proj.weight"] = mat(s.heads * s.head_dim, s.embd, 2.0)
        w[p + "self_attn.k_proj.weight"] = mat(s.kv * s.head_dim, s.embd, 2.0)
        w[p + "self_attn.v_proj.weight"] = mat(s.kv * s.head_dim, s.embd)
        w[p + "self_attn.o_proj.weight"] = mat(s.embd, s.heads * s.head_dim)
        w[p + "mlp.gate_proj.weight"] = mat(s.ff, s.embd, 1.5)
        w[p + "mlp.up_proj.weight"] = mat(s.ff, s.embd, 1.5)
        w[p + "mlp.down_proj.weight"] = mat(s.embd, s.ff)
    return w


NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def gguf_name(name):
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, i, rest = stem.split(".", 3)
        return f"blk.{i}.{NAMES[rest]}.weight"
    return NAMES[stem] + ".weight"


def heads_of(name, s):
    return s.heads if "q_proj" in name else s.kv if "k_proj" in name else 0


def to_pairs(w, n_heads):
    """Rows of each head from halves (x_i with x_{i + d/2}) to adjacent pairs, as GGUF has them."""
    return w.reshape(n_heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def to_halves(w, n_heads):
    return w.reshape(n_heads, -1, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


# --- models ---

def llama3_factors(s, factor, low, high, original):
    inv = 1.0 / s.theta ** (np.arange(0, s.head_dim, 2, dtype=np.float64) / s.head_dim)
    out = []
    for f in inv:
        wavelen = 2 * np.pi / f
        if wavelen < original / high:
            out.append(1.0)
        elif wavelen > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelen - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def golden_logits(s, weights, tokens, rope):
    config = LlamaConfig(vocab_size=s.vocab, hidden_size=s.embd, intermediate_size=s.ff, num_hidden_layers=s.layers, num_attention_heads=s.heads,
                         num_key_value_heads=s.kv, head_dim=s.head_dim, rms_norm_eps=s.eps, max_position_embeddings=s.ctx, tie_word_embeddings=s.tied,
                         rope_parameters={"rope_theta": s.theta, **rope}, attn_implementation="eager")
    model = LlamaForCausalLM(config).float().eval()
    state = {k: torch.from_numpy(v.copy()) for k, v in weights.items()}
    if s.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def make_model(name, s, qtype, seed, vocab=bpe_vocab, n_tokens=24, rope=None, mixed=None, folder="testdata/tiny"):
    """rope: Hugging Face's rope parameters. mixed: {part of a GGUF name: type} for tensors that differ from qtype. n_tokens 0: no golden logits."""
    rope = rope or {"rope_type": "default"}
    path = ROOT / folder / f"{name}.gguf"
    w = gguf.GGUFWriter(path, "llama")
    w.add_name(f"tiny {name}")
    w.add_description("random weights for tests, made by scripts/golden/make-tiny.py")
    w.add_block_count(s.layers)
    w.add_context_length(s.ctx)
    w.add_embedding_length(s.embd)
    w.add_feed_forward_length(s.ff)
    w.add_head_count(s.heads)
    w.add_head_count_kv(s.kv)
    w.add_layer_norm_rms_eps(s.eps)
    w.add_rope_freq_base(s.theta)
    w.add_rope_dimension_count(s.head_dim)
    w.add_vocab_size(s.vocab)
    if s.head_dim * s.heads != s.embd:
        w.add_key_length(s.head_dim)
        w.add_value_length(s.head_dim)
    if rope["rope_type"] == "linear":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        w.add_tensor("rope_freqs.weight", llama3_factors(s, rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"],
                                                         rope["original_max_position_embeddings"]))
    vocab(w, s.vocab)
    held = {}
    for hf, x in make_weights(s, seed).items():
        n = heads_of(hf, s)
        gname = gguf_name(hf)
        if x.ndim == 1:
            w.add_tensor(gname, x)
            held[hf] = x
            continue
        if n:
            x = to_pairs(x, n)
        t = next((v for k, v in (mixed or {}).items() if k in gname), qtype)
        data = quantize(x, t)
        w.add_tensor(gname, data, raw_dtype=t)
        back = gguf.quants.dequantize(data, t).astype(np.float32).reshape(x.shape)
        assert np.abs(back - x).max() < 0.2 * np.abs(x).max(), (name, gname)
        held[hf] = to_halves(back, n) if n else back
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    if not n_tokens:
        return
    tokens = np.random.default_rng(seed + 1).integers(3, s.vocab, n_tokens)
    logits = golden_logits(s, held, tokens.tolist(), rope)
    tokens.astype("<i4").tofile(path.with_suffix(".tokens.bin"))
    logits.astype("<f4").tofile(path.with_suffix(".logits.bin"))
    print(f"{path.name}: {path.stat().st_size} bytes, logits {logits.shape} std {logits.std():.2f} max {np.abs(logits).max():.2f}")


def make_dequant():
    """TYPE.bin: u32 number of elements, u32 bytes of blocks, the blocks, the float32 values that gguf-py makes of them."""
    rng = np.random.default_rng(7)
    for t in (T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q4_K, T.Q5_K, T.Q6_K):
        block, size = gguf.GGML_QUANT_SIZES[t]
        n = 1024 // block
        raw = rng.integers(0, 256, (n, size), dtype=np.uint8)
        if block == 1:
            x = (rng.standard_normal(n) * np.exp2(rng.integers(-20, 10, n))).astype(np.float32)
            raw = gguf.quants.quantize(x, t).view(np.uint8).reshape(n, size)
        else:       # any bytes are a block, but its scales must be numbers
            at = [208] if t == T.Q6_K else [0, 2] if t in (T.Q4_1, T.Q5_1, T.Q4_K, T.Q5_K) else [0]
            for a in at:
                raw[:, a:a + 2] = halves((rng.standard_normal((n, 1)) * np.exp2(rng.integers(-16, 3, (n, 1)))).astype(np.float32))
        values = gguf.quants.dequantize(raw.view(np.float32 if t == T.F32 else np.float16) if t in (T.F32, T.F16) else raw, t).astype("<f4")
        assert values.size == 1024 and np.isfinite(values).all()
        with open(ROOT / "testdata/dequant" / f"{t.name}.bin", "wb") as f:
            f.write(np.array([values.size, raw.size], "<u4").tobytes() + raw.tobytes() + values.tobytes())


def main():
    seeds = "tests/fuzz/corpus/gguf"
    for d in ("testdata/tiny", "testdata/dequant", seeds):
        (ROOT / d).mkdir(parents=True, exist_ok=True)
    make_dequant()
    base, one = Shape(), Shape(layers=1, tied=False)
    for t in (T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1):
        make_model(f"llama-{t.name.lower()}", base, t, 11)
    make_model("llama-untied", one, T.F32, 12)
    make_model("llama-linear", Shape(layers=1, kv=1, tied=False), T.F16, 13, n_tokens=48, rope={"rope_type": "linear", "factor": 4.0})
    make_model("llama-llama3", one, T.F16, 14, n_tokens=48, rope={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                                                  "original_max_position_embeddings": 64})
    make_model("llama-spm", Shape(layers=1, head_dim=32, vocab=352, tied=False), T.F16, 15, vocab=spm_vocab)
    wide = Shape(layers=1, embd=256, heads=8, kv=2, head_dim=32, ff=256)        # K types want rows of 256
    for t in (T.Q4_K, T.Q5_K, T.Q6_K):
        make_model(f"llama-{t.name.lower()}", wide, t, 16)
    least = Shape(layers=1, embd=32, heads=2, kv=1, ff=32, vocab=4, tied=False)
    for t in (T.F16, T.Q4_1):
        make_model(t.name.lower(), least, t, 18, vocab=lambda w, n: None, n_tokens=0, folder=seeds, mixed={"attn_v": T.Q8_0},
                   rope={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64})
    make_model("llama-mixed", wide, T.Q4_K, 17, mixed={"attn_v": T.Q6_K, "ffn_down": T.Q6_K, "token_embd": T.Q8_0, "ffn_up": T.Q5_0})


main()
