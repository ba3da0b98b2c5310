#!/usr/bin/env python3
"""pd-trace on what a live router decided (a tiny model, both ways): why, replay, drift, regret and ls, whole and damaged."""
import os
import tempfile

from fake import Router
from pdset import Worker
from tap import done, lines, ok, one_line, records, run, trace

tmp = tempfile.TemporaryDirectory()
REQS = [{"id": i, "token_ids": [1 + (i * 37 + k * 11) % 300 for k in range(20 + 9 * (i % 20))], "max_tokens": 2 + i % 9, "temperature": 0, "ignore_eos": True, "stream": True}
        for i in range(96)]
w = [Worker(tmp.name, "p0", "prefill"), Worker(tmp.name, "d0", "decode"), Worker(tmp.name, "d1", "decode", "--role", "both")]
r = Router(os.path.join(tmp.name, "r"), "--policy", "random", "--seed", "3", "--shadow", "conditional", workers=w)
for i in range(0, len(REQS), 6):
    r.ask(*REQS[i:i + 6])
r.stop()
for x in w:
    x.end()
log = r.trace
recs = records(run(trace("merge", "--format", "json", log)).stdout)
routes = {x["run"]: x for x in recs if x["pd"] == "route"}
outs = {x["run"]: x for x in recs if x["pd"] == "outcome"}
only = f"{tmp.name}/routes.mp"
open(only, "wb").write(run(trace("cat", "--format", "msgpack"), lines(x for x in recs if x["pd"] in ("route", "outcome"))).stdout)
ok(len(routes) == len(outs) == len(REQS), "a log of a live router", (len(routes), len(outs)))

# ---- ls ----
a, b = run(trace("ls", "--format", "json", log)), run(trace("ls", "--format", "json", only))
rows = {x["run"]: x for x in records(b.stdout)}
ok(set(rows) == set(routes) and a.returncode == b.returncode == 0, "ls: a file of decisions alone lists its runs", b.stdout[:500] + b.stderr)
ok(all(rows[x["run"]]["mode"] == x["mode"] and rows[x["run"]]["tokens"] == x["tokens"] and rows[x["run"]]["state"] == "completed" for x in records(a.stdout)),
   "ls: with the modes and tokens that the events tell", (a.stdout[:300], b.stdout[:300]))
x = run(["sh", "-c", f"{trace()[0]} ls {only} | awk 'NR==1{{print $1}}'"])
first = x.stdout.decode().strip()
ok(first in routes, "ls prints the run first", x.stdout)

# ---- why ----
x = run(trace("why", first, only))
text = x.stdout.decode()
o, q = outs[first], routes[first]
ok(x.returncode == 0 and text.startswith(f"run {first}, decision 1 of 1, ") and "\nshadow     conditional would have taken " in text and q["reason"] in text, "why: in words", text)
ok(text.splitlines()[-1].startswith("completion ") and f" {o['completion_us'] / 1e3:.1f}  " in text.splitlines()[-1] and text.splitlines()[-1].endswith("P95"), "why: and what it took", text)
rows = records(b"".join(run(trace("why", "--format", "json", k, log)).stdout for k in list(routes)[-20:]))
good = [x for x in rows if x["chosen"]["mode"] == routes[x["run"]]["chosen"]["mode"] and x["outcome"]["as_decided"] and
        {t["name"]: t["took_ms"] for t in x["outcome"]["terms"]} == {k[:-3]: v / 1e3 for k, v in outs[x["run"]].items() if k.endswith("_us") and k[:-3] in
                                                                     ("queue", "prefill", "transfer", "sync", "ttft", "tpot", "completion")}]
ok(len(rows) == len(good) == 20, "why --format json: the record's numbers", rows[:1])
both = [{y["mode"] for y in x["ways"]} for x in rows]
ok(all(x == {"local", "remote"} for x in both), "why: the best of both ways", both)
x = run(trace("why", first[:3], only))
ok(x.returncode == 2 and one_line(x.stderr) and b"several runs" in x.stderr, "why: too short a beginning", x.stderr)
x = run(trace("why", first, *[y.trace for y in w]))
ok(x.returncode == 1 and one_line(x.stderr) and first.encode() in x.stderr and b"no route record: name the trace of the router" in x.stderr, "why: a worker's log does not know", x.stderr)
x = run(trace("why", only))
ok(x.returncode == 2 and b"pd-trace why 01JDV3K5 router.trace" in x.stderr, "why: without a run", x.stderr)

# ---- replay ----
for f, name in ((log, "the trace"), (only, "decisions alone")):
    x = run(trace("replay", f, "--expect-identical"))
    ok(x.returncode == 0 and x.stdout == b"96 decisions: 96 identical, 0 different, 0 unreadable\n", f"replay: byte by byte the same: {name}", x.stdout + x.stderr)
x = run(["sh", "-c", f"{trace()[0]} cat {only} | {trace()[0]} replay --expect-identical"])
ok(x.returncode == 0 and b"96 identical" in x.stdout, "replay: from JSON Lines too", x.stdout + x.stderr)
x = run(trace("replay", "--policy", "fixed", "--format", "json", only))
*rows, s = records(x.stdout)
want = [k for k, v in routes.items() if v["chosen"]["mode"] != "remote"]
ok(x.returncode == 0 and {y["run"] for y in rows} >= set(want) and all(y["now"]["mode"] == "remote" for y in rows) and s["summary"]["now"] == {"aggregated": 0, "remote": 96, "local": 0, "nobody": 0},
   "replay --policy: what fixed would have done", (len(want), x.stdout[-500:]))
ok(abs(sum(y["gain_ms"] or 0 for y in rows) - s["summary"]["gain_ms"]) < 0.01 * len(rows) and
   all(y["gain_ms"] is None or abs(y["was"]["completion_ms"] - y["now"]["completion_ms"] - y["gain_ms"]) < 0.002 for y in rows), "replay --policy: gains add up", s)
x = run(trace("replay", "--policy", "conditional", "--format", "json", only))
*rows, s = records(x.stdout)
bad = [y for y in rows if y["now"]["d"] != routes[y["run"]]["shadow"]["chosen"]["d"] or y["now"]["mode"] != routes[y["run"]]["shadow"]["chosen"]["mode"]]
ok(len(rows) > 10 and not bad, "replay --policy: the shadow had said so", bad[:1])
liar = [dict(y, chosen=dict(y["chosen"], mode="local" if y["chosen"]["mode"] == "local" else "remote"), propensity=0.125) if y["pd"] == "route" and y["run"] == first else y
        for y in recs if y["pd"] == "route"]
x = run(trace("replay", "--expect-identical"), run(trace("cat", "--format", "msgpack"), lines(liar)).stdout)
ok(x.returncode == 4 and x.stdout.startswith(f"{first}  decision 1: propensity was 0.125, is 0.".encode()) and b"95 identical, 1 different" in x.stdout, "replay: what was tampered with", x.stdout)
whole = open(only, "rb").read()
torn = whole[:len(whole) // 2] + whole[len(whole) // 2 + 40:]
x, y = run(trace("replay", "--expect-identical"), torn), run(trace("replay", "--expect-identical", "--strict"), torn)
ok(x.returncode == 0 and b"torn" in x.stderr and y.returncode == 9, "replay: a torn record is counted, and 9 under --strict", (x.stdout, x.stderr, y.returncode))
x = run(trace("replay", "--expect-identical", w[0].trace))
ok(x.returncode == 1 and one_line(x.stderr) and b"name the trace of a router" in x.stderr, "replay: nothing is not identical", x.stderr)

# ---- drift, regret ----
x = run(trace("drift", "--format", "json", only))
rows = records(x.stdout)
terms = {y["term"]: y for y in rows if "term" in y and "worker" not in y and "path" not in y}
ok(x.returncode == 0 and set(terms) == {"cache", "queue", "prefill", "transfer", "sync", "tpot", "ttft", "completion"} and terms["ttft"]["n"] == 96 and "first" in rows[-1],
   "drift: every term", x.stdout[-800:] + x.stderr)
below = sum(outs[k]["ttft_us"] <= v["estimate"]["ttft"][1] for k, v in routes.items())
ok(abs(terms["ttft"]["covered"] - below / 96) < 1e-6 and terms["transfer"]["n"] == sum("transfer_us" in y for y in outs.values()), "drift: the coverage that the records have", (below, terms["ttft"]))
ok({y["worker"] for y in rows if y.get("term") == "prefill" and "worker" in y} == {y["p"] or y["d"] for y in outs.values()}, "drift: worker by worker", rows)
x = run(trace("drift", only))
ok(x.returncode == 0 and b"96 runs, decided from " in x.stdout and b"\nqueue " in x.stdout, "drift in words", x.stdout + x.stderr)
x = run(trace("regret", "--format", "json", "--above", "0s,0%", only))
s, *rows = records(x.stdout)
s = s["summary"]
ok(x.returncode == 0 and s["judged"] == 96 and s["drawn"] == 96 and s["misjudged"] == len(rows) > 0 and s["most_ms"] == rows[0]["regret_ms"] and
   all(abs(y["took_ms"] - outs[y["run"]]["completion_us"] / 1e3) < 1e-6 and abs(max(0, y["took_ms"] + y["others_ms"] - y["other_ms"] - y["other_others_ms"]) - y["regret_ms"]) < 0.005
       for y in rows), "regret: run by run", (s, rows[:2], x.stderr))
x = run(trace("regret", only))
ok(x.returncode == 0 and b"96 of them can be judged" in x.stdout and b"\nnot known " in x.stdout, "regret in words", x.stdout + x.stderr)
x = run(trace("stats", only))
ok(b"outcomes             96\n" in x.stdout and b"r_ttft" in x.stdout, "stats count decisions", x.stdout)
for args, what in ((("replay", "--policy", "thresold", only), b"--policy: 'thresold' is not known"), (("replay", "--policy", "fixed", "--expect-identical", only), b"give it or --policy"),
                   (("drift", "--window", "5", only), b"example: --window 1m"), (("regret", "--above", "5", only), b"example: --above 10ms,20%"), (("ls", "--window", "1s", only), b"it is for drift"),
                   (("drift", "--window", "1us", only), b"at most 1000"), (("why", "--policy", "fixed", first, only), b"it is for replay")):
    x = run(trace(*args))
    ok(x.returncode == 2 and one_line(x.stderr) and what in x.stderr, f"usage: {' '.join(args[:2])}", x.stderr)
done()
