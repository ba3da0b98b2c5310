#!/usr/bin/env python3
"""pd-bench gen: workloads of the asked shape, by seed, at their times, through the pipeline; bad options and logs in one line."""
import json
import os
import subprocess
import tempfile
import time

import tap
from tap import B, TINY, decode, ok, one_line, prefill, results, run

BENCH = f"{B}/bin/pd-bench"
tmp = tempfile.mkdtemp()


def gen(*args, **kw):
    return run([BENCH, "gen", *args], **kw)


def jsonl(out):
    return [json.loads(x) for x in out.decode().splitlines()]


def refused(args, says, status=2):
    r = run([BENCH, *args])
    return r.returncode == status and one_line(r.stderr) and says in r.stderr.decode() and not r.stdout, r.stderr


def generate():
    a, b, c = (gen("-n", "50", "--rate", "20", "--seed", s) for s in ("1", "1", "2"))
    ok(a.returncode == 0 and a.stdout == b.stdout and a.stdout != c.stdout and not a.stderr, "the same seed, the same bytes; another one, others", a.stderr)
    j = jsonl(gen("-n", "50", "--rate", "20", "--seed", "1", "--format", "json", "--isl", "10-20", "--osl", "3", "--slo", "ttft=500ms,tpot=50ms").stdout)
    ok(len(j) == 50 and all(10 <= len(r["token_ids"]) <= 20 and r["max_tokens"] == 3 and r["ignore_eos"] and r["slo"] == {"ttft_ms": 500.0, "tpot_ms": 50.0} for r in j)
       and [r["arrival_us"] for r in j] == sorted(r["arrival_us"] for r in j), "requests of the asked shape, in order of arrival", j[0])
    j = jsonl(gen("-n", "400", "--format", "json", "--class", "name=chat,weight=3,isl=8", "--class", "name=doc,isl=40,osl=2").stdout)
    of = {c: [r for r in j if r["class"] == c] for c in ("chat", "doc")}
    ok(all(len(r["token_ids"]) == 8 for r in of["chat"]) and all(len(r["token_ids"]) == 40 and r["max_tokens"] == 2 for r in of["doc"]) and 250 < len(of["chat"]) < 350,
       "classes in a mix, by weight", {c: len(v) for c, v in of.items()})
    j = jsonl(gen("-n", "30", "--format", "json", "-m", TINY, "--isl", "600").stdout)
    ok(all(len(r["token_ids"]) + r["max_tokens"] <= 512 and min(r["token_ids"]) >= 32 for r in j), "into the model's context", j[0]["max_tokens"])
    log = os.path.join(tmp, "log.jsonl")
    with open(log, "w") as f:
        for i, ids in enumerate([[1, 2, 3], [1, 2, 4], [1, 2, 3]]):
            f.write(json.dumps({"timestamp": 1000 * (i // 2), "input_length": 1500, "output_length": 64, "hash_ids": ids}) + "\n")
    j = jsonl(gen("--trace", log, "--length-scale", "0.03125", "--format", "json").stdout)
    ids = [r["token_ids"] for r in j]
    ok([r["arrival_us"] for r in j] == [0, 500000, 1000000] and [len(x) for x in ids] == [47] * 3 and ids[0] == ids[2] and ids[0][:32] == ids[1][:32]
       and ids[0][32:] != ids[1][32:] and [r["reusable_tokens"] for r in j] == [0, 32, 47] and [r["max_tokens"] for r in j] == [2] * 3,
       "a log's times, lengths and prefixes, scaled", j)
    j = jsonl(gen("--trace", log, "--raw-times", "--time-scale", "0.5", "--format", "json").stdout)
    ok([r["arrival_us"] for r in j] == [0, 0, 500000], "its times as they are, and scaled", [r["arrival_us"] for r in j])


def pipeline():
    req = gen("-n", "6", "--isl", "5-40", "--osl", "7", "--rate", "40", "--prefix", "partial").stdout
    pre = run(prefill(), req)
    dec = run(decode("--format", "json"), pre.stdout)
    got = results(dec.stdout)
    ok(dec.returncode == 0 and sorted(r["id"] for r in got) == [f"r-{i}" for i in range(6)] and all(r["completion_tokens"] == 7 for r in got),
       "gen | pd-prefill | pd-decode: each answer of the asked length", dec.stderr)
    t0 = time.monotonic()
    r = gen("-n", "11", "--arrivals", "even", "--rate", "20", "--pace", "--format", "json")
    took = time.monotonic() - t0
    j = jsonl(r.stdout)
    ok(r.returncode == 0 and took >= 0.5 and len({x["start_us"] for x in j}) == 1 and b"send lag P50" in r.stderr, "--pace: at their times, and the lag told", (took, r.stderr))
    p = subprocess.Popen([BENCH, "gen", "-n", "1000", "--rate", "1", "--pace"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    time.sleep(0.3)
    p.terminate()
    ok(p.wait(timeout=10) == 0, "--pace ends when it is told to", p.returncode)
    p.stdout.close()


def refusals():
    bad = os.path.join(tmp, "bad.csv")
    with open(bad, "w") as f:
        f.write("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,x,4\n")
    for args, says, *status in [(["gen", "--rate", "0"], "--rate"), (["gen", "--isl", "5-"], "--isl"), (["gen", "--arrivals", "often"], "--arrivals"),
                                (["gen", "--prefix", "trace"], "need a trace"), (["gen", "--class", "isl=x"], "--class: isl"), (["gen", "--slo", "e2e=1s"], "--slo"),
                                (["gen", "--trace", bad], "line 2: ContextTokens: 'x'", 4), (["gen", "--trace", "/nowhere"], "/nowhere", 1),
                                (["gen", "--arrivals", "onoff"], "--on 2s"), (["gen", "--reps", "3"], "--reps"), (["nothing"], "no verb"), (["-v", "gen"], "the verb comes first")]:
        good, note = refused(args, says, *status)
        ok(good, f"refused: {' '.join(args[:3])}".replace(tmp, "."), note)


generate()
pipeline()
refusals()
tap.done()
