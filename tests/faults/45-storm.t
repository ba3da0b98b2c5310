#!/usr/bin/env python3
"""All prefill workers are killed at once under an open load: each decode worker takes in as many of their prompts as it may, so many of them are begun a second,
what is too much is shed with the time after which to ask again, and the streams that run go on at their pace."""
import json
import os
import statistics
import subprocess
import threading
import time

from rig import PLAIN, Set, ok, tap

BENCH = f"{PLAIN}/bin/pd-bench"
CAP = 256                       # tokens at once, of one decode worker: two of these prompts
PAUSE = 10000                   # us: a gap that this machine makes by itself now and then
ISL, OSL, SECONDS = 128, 120, 6


def gen(path, n, *args):
    x = tap.run([BENCH, "gen", "-n", str(n), "--isl", str(ISL), "--osl", str(OSL), "-o", path, *args])
    assert x.returncode == 0, x.stderr


def load(at, reqs, *args):
    return subprocess.Popen([BENCH, "load", "-i", reqs, "-o", f"unix:{at}", "--idle", "20s", "--format", "json", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def p99(values):
    return sorted(values)[int(0.99 * (len(values) - 1))] if values else 0


def storm(policy):
    name = f"both prefill workers killed under {policy}"
    s = Set(2, 2, p=["--lease", "4s"], route=["--policy", policy, "--fallback-max", str(CAP), "--fallback-rate", "10", "--wait", "2s"])
    warm, reqs = os.path.join(s.dir, "warm.mp"), os.path.join(s.dir, "reqs.mp")
    gen(warm, 60)
    t0 = time.time()
    x = load(s.r.path, warm, "--concurrency", "12", "--no-stream")
    x.communicate(timeout=100)
    rate = min(60, 0.8 * 60 / (time.time() - t0))
    n = int(rate * SECONDS)
    gen(reqs, n, "--arrivals", "even", "--rate", f"{rate:.2f}")
    x, most = load(s.r.path, reqs), [0]
    killed = threading.Event()

    def watch():
        while x.poll() is None:
            most[0] = max(most[0], s.r.ledger().get("fallbacks_now", 0))
            time.sleep(0.02)

    t = threading.Thread(target=watch)
    begun = time.time()
    t.start()
    threading.Timer(SECONDS / 2, lambda: (s["p0"].p.kill(), s["p1"].p.kill(), killed.set())).start()
    out, err = x.communicate(timeout=120)
    t.join()
    recs = [json.loads(y) for y in out.decode().split("\n") if y]
    res, errors = [y for y in recs if y["pd"] == "result"], [y for y in recs if y["pd"] == "error"]
    ends = {k: sum(y["finish_reason"] == k for y in res) for k in {y["finish_reason"] for y in res}}
    ok(killed.is_set() and len(res) == n and set(ends) <= {"length", "stop", "shed"}, f"{name}: each run ends, by itself or shed", (ends, rate, err[-500:], [y["message"] for y in errors][:2]))
    fits = CAP // ISL
    ok(most[0] <= 2 * fits, f"{name}: no decode worker computes more of their prompts at once than it may", (most, fits))
    shed = [y for y in errors if y["message"].startswith("shed")]
    ok(len(shed) == ends.get("shed", 0) and (policy != "fixed" or len(shed) > 9) and all(y["retry_after_ms"] >= 100 for y in shed), f"{name}: what is shed is told when to come again", shed[:1])
    cut = SECONDS / 2 * 1e6
    early = [y for y in res if y.get("first_us", 1e18) < cut and y["finish_reason"] != "shed"]
    ok(early and all(y["finish_reason"] in ("length", "stop") for y in early), f"{name}: the streams that had begun come to their end", ends)
    before, after = [], []
    for y in res:
        at = y.get("first_us", 0)
        for g in y.get("gaps_us", []):
            at += g
            (before if at < cut else after).append(g)
    calm, storm_ = p99(before), p99(after)
    print(f"# {name}: {rate:.1f} a second; of gaps P99 {calm} us before and {storm_} us after; {ends}, at most {most[0]} fallbacks at once", flush=True)
    for p in ("p0", "p1"):
        s[p].p.wait()
    s.end(name, bound="2s")
    return storm_ / max(calm, PAUSE)


for policy in ("fixed", "conditional"):
    ratios = [storm(policy) for _ in range(3)]
    ok(statistics.median(ratios) <= 1.5, f"{policy}: the running streams' P99 gap is at most 1.5 times that of before", ratios)
tap.done()
