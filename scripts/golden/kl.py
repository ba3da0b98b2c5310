#!/usr/bin/env python3
"""Compare pd's logits with the float32 reference and with llama.cpp's distance from it. Needs what scripts/setup installs, no more:
    build/bin/pd-bench logits -m M --ids testdata/text/opticks.ids -o build/logits.f32
    kl.py M testdata/text/opticks.ids build/logits.f32 [--windows N] [--golden testdata/golden-llama/kl.json]
The logits file is raw little-endian float32, [windows x tokens, vocab], no header; with --windows it holds the first N windows only, and
both engines are judged on these. Prints one JSON line; exit 1 if pd's mean KL is more than 1.05 times llama.cpp's. The reference takes
some seconds of CPU a window. Digests in the golden file guard against comparing figures of another model or text."""
import argparse
import hashlib
import json
import os
import sys

import numpy as np

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, here)
import reference

BAR = 1.05


def main():
    args = argparse.ArgumentParser()
    args.add_argument("model")
    args.add_argument("ids")
    args.add_argument("logits")
    args.add_argument("--windows", type=int)
    args.add_argument("--golden", default=os.path.join(here, "..", "..", "testdata", "golden-llama", "kl.json"))
    args = args.parse_args()
    model, ids_path, logits_path, golden_path = args.model, args.ids, args.logits, args.golden
    with open(golden_path) as f:
        golden = json.load(f)
    windows = reference.read_windows(ids_path)
    if reference.ids_digest(windows) != golden["ids_sha256"]:
        sys.exit(f"kl: {ids_path} is not the text that {golden_path} was measured on")
    with open(model, "rb") as f:
        if hashlib.sha256(f.read()).hexdigest() != golden["sha256"]:
            sys.exit(f"kl: {model} is not the file that {golden_path} was measured on")
    windows = windows[:args.windows]
    ref = reference.Reference(model)
    vocab = ref.tensors["token_embd.weight"].shape[0]
    want = windows.size * vocab * 4
    if os.path.getsize(logits_path) != want:
        sys.exit(f"kl: {logits_path} has {os.path.getsize(logits_path)} bytes, not {windows.size} x {vocab} x 4 = {want}")
    logits = np.memmap(logits_path, dtype="<f4", mode="r", shape=(*windows.shape, vocab))
    score = reference.Score()
    for ids, ours in zip(windows, logits):
        score.add(ref.logits(ids), np.asarray(ours))
    ours, llama = score.summary(), float(np.mean(golden["llama"]["kl_by_window"][:len(windows)]))
    ratio = ours["kl_mean"] / llama
    print(json.dumps({**ours, "llama_kl_mean": llama, "ratio": ratio, "bar": BAR, "llama_build": golden["build"]}))
    sys.exit(ratio > BAR)


if __name__ == "__main__":
    main()
