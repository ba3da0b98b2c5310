#!/usr/bin/env python3
"""Time llama.cpp as pd-bench engine times pd: with the Python that scripts/bench/build-peer prints,
    echo 'pp512 2 on 3' | peer-engine.py MODEL [FOLDER]
Reads lines `TEST THREADS FLASH REPS`, and answers each with a line of JSON; the first line of all tells the build and where the weights lie.
TEST is ppN (a prompt of N random tokens, in micro-batches of 512, logits of the last token alone) or tgN (N tokens one after another), from
an empty context or, with @dD, after D tokens, which are computed once, on half of the cores (with all of them a busy machine makes it take
minutes), or taken from the state that another peer-engine with the same MODEL has left in FOLDER; FLASH, attention, on or off; f16 KV. The
value is the median of REPS, in tokens a second. Before these an untimed one, short when the same has been asked before. On a machine that
others use a run can take minutes: decoding stops after ENOUGH seconds, and the rate is of the tokens there are; no further repetition is begun
after as many; an untimed one that took so long counts, and stands alone. The model and the contexts stay, so an answer costs no more than its runs."""
import json
import os
import random
import re
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import peer

SHORT = {"pp": 64, "tg": 4}
ENOUGH = 10


class Bench:
    def __init__(self, path, folder=None):
        self.model, self.folder = peer.Model(path), folder
        self.engines = {}       # (flash, depth): a context that holds depth tokens
        self.warm = set()
        self.rng = random.Random(1)

    def engine(self, flash, n, depth):
        have = self.engines.get((flash, depth))
        if have and have.room >= n + depth:
            return have
        if have:
            have.free()
        room = (max(n, 512) + depth + 255) // 256 * 256
        e = self.engines[flash, depth] = peer.Engine(self.model, (len(os.sched_getaffinity(0)) + 1) // 2, room, flash=flash, outputs=1)
        e.room = room
        state = self.folder and os.path.join(self.folder, f"{depth}-flash-{'on' if flash else 'off'}")
        if not (state and os.path.exists(state) and e.load(state)):
            for at in range(0, depth, 512):
                e.fill(self.ids(e, min(512, depth - at)), last=False)
                e.run()
            if state and depth:
                e.save(state + ".new")
                os.rename(state + ".new", state)
        e.pool.pause()
        return e

    def ids(self, e, n):
        return [self.rng.randrange(e.vocab) for _ in range(n)]

    def once(self, e, kind, n, depth):
        """Tokens a second of one run. Filling ctypes arrays is our cost, not llama.cpp's."""
        ids, step, spent = self.ids(e, n), 512 if kind == "pp" else 1, 0.0
        e.back_to(depth)
        for at in range(0, n, step):
            part = ids[at:at + step]
            e.fill(part, last=kind == "tg" or at + len(part) == n)
            start = time.perf_counter()
            e.run()
            spent += time.perf_counter() - start
            if kind == "tg" and spent > ENOUGH:
                break
        return (at + len(part)) / spent

    def answer(self, test, threads, flash, reps):
        m = re.fullmatch(r"(pp|tg)(\d+)(?:@d(\d+))?", test)
        if not m or flash not in ("on", "off"):
            sys.exit(f"peer-engine: '{test} {threads} {flash} {reps}' is no question; ask ppN, tgN, ppN@dD or tgN@dD, threads, on or off, repetitions")
        kind, n, depth = m[1], int(m[2]), int(m[3] or 0)
        e = self.engine(flash == "on", n, depth)
        e.use_threads(threads)
        key = kind, n, depth, flash, threads
        begun = time.monotonic()
        first = self.once(e, kind, min(n, SHORT[kind]) if key in self.warm else n, depth)
        rates = [first] if key not in self.warm and time.monotonic() > begun + ENOUGH else []
        self.warm.add(key)
        begun = time.monotonic()
        if rates:
            reps = 1
        while len(rates) < reps and (not rates or time.monotonic() < begun + ENOUGH):
            rates.append(self.once(e, kind, n, depth))
        e.pool.pause()
        return {"test": test, "threads": threads, "flash": flash == "on", "value": statistics.median(rates), "unit": "tok/s", "n": len(rates),
                "all": [round(r, 1) for r in rates]}


def main():
    peer.require_best()
    bench = Bench(*sys.argv[1:])
    print(json.dumps({"build": peer.build_id(), "buffers": bench.model.buffers}), flush=True)
    for line in sys.stdin:
        test, threads, flash, reps = line.split()
        print(json.dumps(bench.answer(test, int(threads), flash, int(reps))), flush=True)


if __name__ == "__main__":
    main()
