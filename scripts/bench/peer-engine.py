#!/usr/bin/env python3
"""Time llama.cpp as pd-bench engine times pd: with the Python that scripts/bench/build-peer prints,
    peer-engine.py MODEL THREADS TESTS REPS
TESTS are ppN (a prompt of N random tokens, in micro-batches of 512, logits of the last token alone) and tgN (N tokens one after another),
from an empty context or, with @dD, after D tokens; by commas. Flash attention, f16 KV. One JSON line a test, with the median of REPS after one warm-up."""
import json
import os
import random
import re
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import peer


def main():
    path, threads, tests, reps = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[4])
    peer.require_llamafile()
    shape = {}
    for test in tests:
        m = re.fullmatch(r"(pp|tg)(\d+)(?:@d(\d+))?", test)
        if not m:
            sys.exit(f"peer-engine: unknown test '{test}'; use ppN, tgN, ppN@dD or tgN@dD")
        shape[test] = m[1], int(m[2]), int(m[3] or 0)
    longest = max(n + depth for _, n, depth in shape.values())
    engine = peer.Engine(path, threads, (longest + 255) // 256 * 256 + 256)
    rng = random.Random(1)
    for test in tests:
        kind, n, depth = shape[test]
        rates = []
        engine.clear()
        for at in range(0, depth, 512):
            engine.fill([rng.randrange(engine.vocab) for _ in range(min(512, depth - at))], last=False)
            engine.run()
        for rep in range(reps + 1):
            ids = [rng.randrange(engine.vocab) for _ in range(n)]
            engine.back_to(depth)
            spent = 0.0
            if kind == "pp":
                for at in range(0, n, 512):
                    part = ids[at:at + 512]
                    engine.fill(part, last=at + len(part) == n)      # filling ctypes arrays is our cost, not llama.cpp's
                    start = time.perf_counter()
                    engine.run()
                    spent += time.perf_counter() - start
            else:
                for t in ids:
                    engine.fill([t])
                    start = time.perf_counter()
                    engine.run()
                    spent += time.perf_counter() - start
            if rep > 0:
                rates.append(n / spent)
        print(json.dumps({"test": test, "threads": threads, "value": statistics.median(rates), "unit": "tok/s", "n": reps,
                          "all": [round(r, 1) for r in rates], "build": peer.build_id()}), flush=True)


if __name__ == "__main__":
    main()
