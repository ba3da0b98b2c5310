#!/usr/bin/env python3
"""Memory of the engine on the real model: at most the packed weights, the KV pool in use and 100 MiB. Never looks at a clock."""
import json
import os
import re
import subprocess
import sys

import tap
from tap import decode, lines, ok, prefill, records, run

MODEL = os.environ.get("PD_MODEL")
if not MODEL or os.environ.get("V"):
    print("1..0 # SKIP " + ("sanitizers have memory of their own" if MODEL else "no model (scripts/fetch-model fetches it)"))
    sys.exit(0)
tap.model = MODEL
MIB, SLAB = 1 << 20, 64
REQ = lines([{"id": i, "prompt": f"{i} It was the best of times, it was the worst of times.", "max_tokens": 8, "temperature": 0} for i in range(4)]).encode()


def serve(cmd, data, last):
    """The command after its work, its input still open: MiB of its own memory and of shared (the pool), and of packed weights as it tells them."""
    p = subprocess.Popen(cmd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        p.stdin.write(data)
        p.stdin.flush()
        answered = last(p.stdout)
        status = dict(x.split(":", 1) for x in open(f"/proc/{p.pid}/status").read().splitlines())
        anon, shm = (int(status[k].split()[0]) * 1024 / MIB for k in ("RssAnon", "RssShmem"))
        p.stdin.close()
        err = p.stderr.read()
        p.stdout.read()
        packed = re.search(rb"(\d+) MB packed", err)
        return answered and p.wait(60) == 0, anon, shm, int(packed[1]) * 1e6 / MIB if packed else 0
    finally:
        p.kill()


def results(n):
    def last(f):
        return sum(json.loads(f.readline())["pd"] == "result" for _ in range(n)) == n
    return last


def prefilled(n):
    """kv records of n runs: enough to know that the last of them has been written."""
    def last(f):
        c = subprocess.Popen(tap.trace("cat"), stdin=f, stdout=subprocess.PIPE)
        seen = 0
        while seen < n:
            seen += json.loads(c.stdout.readline())["pd"] == "kv"
        c.kill()
        return True
    return last


kv = run(prefill(), REQ).stdout
for name, cmd, data, last in (("decode of requests", decode("-v", "--format", "json"), REQ, results(4)), ("decode of KV", decode("-v", "--format", "json"), kv, results(4)),
                              ("prefill", prefill("-v"), REQ, prefilled(4))):
    done, anon, shm, packed = serve(cmd, data, last)
    ok(done and packed > 50 and 1 < anon <= packed + 100 and 0 < shm <= SLAB, f"{name}: {anon:.0f} MiB for {packed:.0f} MiB of weights, {shm:.0f} MiB of KV",
       (done, anon, shm, packed))
x = run([f"{tap.B}/bin/pd-bench", "engine", "-m", MODEL, "--tests", "pp16", "--all", "--reps", "1", "--format", "json"])
rows = {r["name"]: r for r in records(x.stdout)}
over = rows["memory_beyond_weights_and_kv"]["value"] if x.returncode == 0 else -1
ok(0 < over <= 100, f"a full step of prompt: {over:.0f} MiB beyond weights and KV", (x.returncode, x.stderr, rows.keys()))
tap.done()
