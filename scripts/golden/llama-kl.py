#!/usr/bin/env python3
"""How far llama.cpp's logits are from those of the same weights in float32: the bar for pd's accuracy. By hand:
    $(scripts/bench/build-peer) scripts/golden/llama-kl.py $(scripts/fetch-model) testdata/text/opticks.ids >testdata/golden-llama/kl.json
KL(reference || llama.cpp) in nats at every position of every window; each window is one llama_decode of 512 tokens."""
import hashlib
import json
import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [here, os.path.join(here, "..", "bench")]
import peer
import reference


def main():
    path, ids_path = sys.argv[1:]
    windows = reference.read_windows(ids_path)
    ref = reference.Reference(path)
    scores = {}
    engines = {flash: peer.Engine(path, threads=1, n_ctx=512, flash=flash) for flash in (True, False)}
    for flash in engines:
        scores[flash] = reference.Score()
    for ids in windows:
        truth = ref.logits(ids)
        for flash, engine in engines.items():
            engine.clear()
            engine.feed(ids, every=True)
            scores[flash].add(truth, peer.np.stack([engine.logits(i) for i in range(len(ids))]))
    with open(path, "rb") as f:
        digest = hashlib.sha256(f.read()).hexdigest()
    print(json.dumps({
        "made_by": "scripts/golden/llama-kl.py", "model": os.path.basename(path), "sha256": digest, "ids": os.path.basename(ids_path),
        "ids_sha256": reference.ids_digest(windows), "windows": len(windows), "window_tokens": windows.shape[1],
        "build": peer.build_id(), "threads": 1, "kv": "f16",
        "llama": {"flash_attention": True, **scores[True].summary()},
        "llama_without_flash_attention": {"flash_attention": False, **scores[False].summary()}}, indent=1))


if __name__ == "__main__":
    main()
