#!/usr/bin/env python3
"""Shapes and mixtures of weights that no file of testdata has: made from one that is there, so that the answer is known."""
import os
import subprocess
import sys
import tempfile

import tap
from tap import B, ok, run

PY = os.environ.get("PD_PY")
if not PY or subprocess.run([PY, "-c", "import gguf"], stderr=subprocess.DEVNULL).returncode:
    print("1..0 # SKIP the Python package gguf is missing (scripts/setup installs it)")
    sys.exit(0)
if os.path.realpath(sys.executable) != os.path.realpath(PY) and "PD_WIDTHS" not in os.environ:
    os.environ["PD_WIDTHS"] = "1"
    os.execv(PY, [PY, *sys.argv])
import gguf
import numpy as np

T = gguf.GGMLQuantizationType
IDS = " ".join(str(7 * i % 300) for i in range(40)) + "\n"


def write(path, source, change, ff=None):
    """The model again. change(name, values as float32): values and type."""
    reader = gguf.GGUFReader(f"testdata/tiny/{source}.gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        value = ff if ff and field.name == "llama.feed_forward_length" else field.contents()
        writer.add_key_value(field.name, value, kind, sub_type=field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for t in reader.tensors:
        values, kind = change(t.name, gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32))
        data = values if kind == T.F32 else gguf.quants.quantize(values, kind)
        writer.add_tensor(t.name, data, raw_shape=None if kind in (T.F32, T.F16) else data.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(path, *args):
    out = path + ".logits"
    x = run([f"{B}/bin/pd-bench", "logits", "-m", path, "--ids", ids, "-o", out, *args])
    ok(x.returncode == 0, f"{os.path.basename(path)} {' '.join(args)}: logits", x.stderr)
    return np.fromfile(out, np.float32) if x.returncode == 0 else np.zeros(1, np.float32)


def error(a, b):
    return float(np.abs(a - b).max() / np.abs(b).max()) if a.shape == b.shape else np.inf


with tempfile.TemporaryDirectory() as tmp:
    ids = f"{tmp}/ids"
    open(ids, "w").write(IDS)
    whole = lambda name, v: (v, T.F32)

    # a feed-forward width that ends within a group of 32: with columns of zeros behind it nothing changes
    def narrow(name, v):
        return (v[:144] if "ffn_gate" in name or "ffn_up" in name else v[:, :144] if "ffn_down" in name else v), T.F32

    def padded(name, v):
        v = narrow(name, v)[0]
        if "ffn_gate" in name or "ffn_up" in name:
            v = np.concatenate([v, np.ones((16, v.shape[1]), np.float32)])
        elif "ffn_down" in name:
            v = np.concatenate([v, np.zeros((v.shape[0], 16), np.float32)], axis=1)
        return v, T.F32

    write(f"{tmp}/w144.gguf", "llama-f32", narrow, 144)
    write(f"{tmp}/w160.gguf", "llama-f32", padded, 160)
    want = logits(f"{tmp}/w160.gguf")
    for args in ([], ["--chunk", "3", "-t", "2"], ["--chunk", "1", "-t", "1"]):
        ok(np.array_equal(logits(f"{tmp}/w144.gguf", *args), want), f"a width of 144 is one of 160 with zeros behind it {' '.join(args)}")

    # gate and up that want their activations in different forms
    rounded = lambda name, v: (gguf.quants.dequantize(gguf.quants.quantize(v, T.BF16), T.BF16).astype(np.float32) if "ffn_gate" in name else v, T.F32)
    mixed = lambda name, v: (v, T.BF16 if "ffn_gate" in name else T.F32)
    other = lambda name, v: (v, T.Q8_0 if "ffn_up" in name else T.F16 if "ffn_" in name else T.F32)
    write(f"{tmp}/plain.gguf", "llama-f32", rounded)
    write(f"{tmp}/bf16gate.gguf", "llama-f32", mixed)
    write(f"{tmp}/q8up.gguf", "llama-f32", other)
    want = logits(f"{tmp}/plain.gguf")
    for name in ("bf16gate", "q8up"):
        first = logits(f"{tmp}/{name}.gguf")
        ok(0 < error(first, want) < 0.03, f"{name}: near the same weights in float32", error(first, want))
        ok(np.array_equal(logits(f"{tmp}/{name}.gguf", "--chunk", "5", "-t", "2"), first), f"{name}: the same in chunks")
tap.done()
