#!/usr/bin/env python3
"""pd-route --policy conditional and random on a tiny model: every way gives the same text, each decision is recorded whole, and what came of it beside it."""
import os
import socket
import tempfile

import tap
from fake import D, P, results, Router, router
from packed import msgpack
from pdset import ARGS, Worker
from tap import B, TINY, ok, run

tmp = tempfile.TemporaryDirectory()
REQS = [{"id": i, "token_ids": [1 + (i * 37 + k * 11) % 300 for k in range(20 + 9 * (i % 20))], "max_tokens": 2 + i % 9, "temperature": 0.9, "seed": i, "ignore_eos": True, "stream": i % 3 > 0}
        for i in range(120)]
want = {r["id"]: r["tokens"] for r in tap.results(run([f"{B}/bin/pd-decode", "-m", TINY, *ARGS, "--kv-mem", "4MiB", "--format", "json"], tap.lines(REQS)).stdout)}


def metrics(at):
    s = socket.socket(socket.AF_UNIX)
    s.connect(at)
    s.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return b"".join(iter(lambda: s.recv(65536), b"")).decode()


def play(name, *args):
    folder = os.path.join(tmp.name, name)
    os.mkdir(folder)
    w = [Worker(folder, "p0", "prefill"), Worker(folder, "d0", "decode"), Worker(folder, "d1", "decode", "--role", "both")]
    r = Router(os.path.join(folder, "r"), *args, "--metrics", f"unix:{folder}/m", workers=w)
    got = []
    for i in range(0, len(REQS), 12):
        got += r.ask(*REQS[i:i + 12])
    m = metrics(f"{folder}/m")
    rc, err = r.stop()
    for x in w:
        x.end()
    res = results(got)
    ok({x["id"]: x["tokens"] for x in res} == want and len(res) == len(REQS), f"{name}: every run gives what one process gives", [x for x in res if x["tokens"] != want[x["id"]]][:2])
    ev = r.events()
    out = {x["run"]: x for x in ev if x["pd"] == "outcome"}
    routes = {x["run"]: x for x in ev if x["pd"] == "route" and (x["run"] not in out or x["attempt"] == out[x["run"]]["attempt"])}      # one that is slow may be given up as late
    ok(set(routes) == set(out) == {x["run"] for x in res} and all(out[k]["op"] == x["op"] and out[k]["mode"] == x["chosen"]["mode"] and out[k]["d"] == x["chosen"]["d"] and
                                                                  out[k]["p"] == x["chosen"]["p"] for k, x in routes.items()), f"{name}: an outcome for each decision", (routes, out))
    by = {x["run"]: x for x in res}
    bad = [x for k, x in out.items() if x["completion_tokens"] != by[k]["completion_tokens"] or x["prompt_tokens"] != by[k]["prompt_tokens"] or not x["completion_us"] > 0 or
           not x.get("prefill_us", 1) > 0 or x.get("queue_us", 0) < 0 or ("transfer_us" in x and x["mode"] != "remote") or x["ttft_us"] > x["completion_us"]]
    known = [x for x in out.values() if "prefill_us" in x and "queue_us" in x and (x["mode"] == "remote") == ("transfer_us" in x)]     # decode may end before prefill has told
    ok(not bad and len(known) > 0.3 * len(out), f"{name}: with what each part took", bad[:3])
    c = run([f"{B}/bin/pd-trace", "check", r.trace, *[x.trace for x in w]])
    ok(rc == 0 and c.returncode == 0, f"{name}: drained, and the logs hold every invariant", (err[-1000:], c.stdout, c.stderr))
    return routes, out, m, r.trace


routes, out, m, _ = play("random", "--policy", "random", "--seed", "3")
modes = [x["chosen"]["mode"] for x in routes.values()]
ok(min(modes.count("remote"), modes.count("local")) > 20 and all(0 < x["propensity"] < 1 or "late" in x for x in routes.values()), "random takes every way", modes)
ok(len({x["seed"]["$b64"] for x in routes.values()}) == len(routes), "by a seed a decision")
last = list(routes.values())[-1]
p, d = last["p"][0], last["d"][0]
ok(all(len(x) == 2 and 0 < x[0] <= x[1] for x in (p["prefill"], d["prefill"], d["tpot"], last["pairs"][-1]["transfer"])), "by then each cost has been learnt", last)
n = {x.split('"')[1]: int(x.split()[1]) for x in m.splitlines() if x.startswith("pd_estimates_total{")}
below = {x.split('"')[1]: int(x.split()[1]) for x in m.splitlines() if x.startswith("pd_estimates_covered_total{")}
ok(all(n[k] > 3 and 0 < below[k] <= n[k] for k in ("prefill", "transfer", "tpot", "ttft")), "and held against what it was", (n, below))

routes, out, m, trace = play("conditional", "--policy", "conditional", "--risk", "0.9", "--temperature", "0.01", "--shadow", "fixed")
first, last = list(routes.values())[0], list(routes.values())[-1]
known = all(not (w[k] + [0])[2] & 1 for w in last["d"] for k in ("queue", "prefill", "tpot"))       # each run teaches these; what it costs others, only one that had company
ok("cold" in first["degraded"] and any("cold" not in x["degraded"] for x in routes.values()) and known and last["risk"] == 0.9 and last["temperature"] == 0.01, "conditional says that it guesses until it knows", (first, last))
ok(all(x["shadow"]["policy"] == "fixed" and x["shadow"]["chosen"]["mode"] == "remote" for x in routes.values()), "what the shadow would have done is beside it", last)
ok(max(len(x["pairs"]) for x in routes.values()) == 5 and
   all(x["pairs"][x["chosen"]["pair"]]["score"] <= 1.25 * min(y["score"] for y in x["pairs"] if y["score"] >= 0) for x in routes.values()), "among all ways one of the best is taken", last)
ok("pd_shadow_total" in m and max(len(msgpack.packb(x)) for x in routes.values()) < 4000, "a record is small")


# what a prefill worker held of a prompt is told, and learnt by: what nobody foresaw makes no prompt cheap that it does not hold
class Held(P):
    """100 us a token that it computes; of every other prompt it has all but the last block, and nobody knew."""
    def answer(self, c, req):
        n, held = len(req["token_ids"]), (len(req["token_ids"]) - 16) * (req["id"] % 2)
        us = 100 * (n - held)
        c.put({"pd": "kv", "v": 1, "run": req["run"], "payload": None, "t": {"queue_us": 10, "prefill_us": us, "total_us": us + 10, "cached_tokens": held}})


class Taker(D):
    def result(self, req, *a, **k):
        return dict(super().result(req, *a, **k), prompt_tokens=len(req.get("token_ids", ())))


r = router("--policy", "fixed", workers=[Held(), Taker()])
for i in range(60):
    r.ask({"id": i, "token_ids": [i + 1] * 512, "max_tokens": 2})
r.stop()
ev = r.events()
out, last = [x for x in ev if x["pd"] == "outcome"], [x for x in ev if x["pd"] == "route"][-1]
ok([x["p_cached_tokens"] for x in out] == [0, 496] * 30 and not any("cached_expected" in x for x in out), "an outcome tells what its prefill worker held, and what was expected of it", out[:3])
ok(40000 < last["p"][0]["prefill"][1] < 65000, "what a prefill took is learnt by what was computed, not by what was foreseen", last["p"])

for args, word in ((["--policy", "conditionall"], "conditional"), (["--policy", "threshold:0"], "threshold:512"), (["--risk", "1"], "0.999"), (["--temperature", "x"], "--temperature"),
                   (["--shadow", "fixed:3"], "--shadow"), (["--profile", "/nowhere"], "/nowhere")):
    x = run([f"{B}/bin/pd-route", "--listen", f"unix:{tmp.name}/x", *args])
    ok(x.returncode in (1, 2) and word in x.stderr.decode(errors="replace") and x.stderr.count(b"\n") == 1, f"{' '.join(args)} is refused in a line", x.stderr)

tap.done()
