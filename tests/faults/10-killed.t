#!/usr/bin/env python3
"""Each process killed (kill -9) and stopped (SIGSTOP) at each state that it tells, in a set of two prefill and two decode workers and a router, while runs stream.
The clients get what an undisturbed set gives, to the bit, or, where the router itself is gone, the same from its successor when they repeat their key."""
import time

from rig import Set, modes, ok, reqs, tap, told, undisturbed

ROUTE = ["--gone-after", "2500ms", "--suspect-after", "1500ms"]
WANT = reqs(12)
REF = undisturbed(WANT)
P_STATES = ("accepted", "prefill_started", "lease_granted", "kv_transfer_started", "lease_read", "prefill_completed", "kv_published", "lease_released")
D_STATES = ("accepted", "kv_transfer_started", "kv_transfer_completed", "decode_started", "streaming", "completed")


def drill(who, state, how):
    name = f"{who} {'killed' if how == 'kill' else 'stopped'} at {state}"
    s = Set(2, 2, faults={who: f"{state}:{how}:2"}, p=["--lease", "4s"], route=ROUTE)
    c = s.client()
    c.send(*[dict(q, stream=True) for q in WANT])
    struck = s[who].struck()
    ok(struck, f"{name}: it comes to that", (modes(c), s[who].said()[-500:]))
    ok(c.wait(len(WANT)) and told(c.of("result")) == REF, f"{name}: every run ends as if nothing had been", (modes(c), c.of("error")))
    streams = {}
    for t in c.of("token"):
        streams.setdefault(t["run"], []).append((t["pos"], t["token"]))
    ok(all(streams.get(r["run"]) == list(enumerate(r["tokens"])) for r in c.of("result")), f"{name}: no token twice, none missing", streams)
    s[who].cont() if s[who].alive() else None
    again = s.client()          # and the set goes on serving
    again.send(*WANT)
    ok(again.wait(len(WANT)) and told(again.of("result")) == REF, f"{name}: and after it", modes(again))
    s.end(name, bound="60s" if how == "stop" else "1s")


for how in ("kill", "stop"):
    for state in P_STATES:
        drill("p0", state, how)
    for state in D_STATES:
        drill("d0", state, how)

# An early first token is out, without its text, when its decode worker dies: another begins anew, and the text comes with the second token; also of several choices.
for n in (1, 3):
    name = f"decode worker killed with early first tokens out, n {n}"
    many = [dict(q, n=n) for q in reqs(10)]
    ref = undisturbed(many)
    s = Set(1, 2, faults={"d0": "kv_transfer_started:stop:1", "d1": "kv_transfer_started:stop:1"}, route=["--early-first-token"])
    c = s.client()
    c.send(*[dict(q, stream=True) for q in many])
    ok(c.wait(10 * n, "token") and s["d0"].struck() and s["d1"].struck() and all(t["pos"] == 0 and t["text"] == "" for t in c.of("token")), f"{name}: they are out", c.got[:3])
    s["d0"].kill()
    s["d1"].cont()
    whole = {}
    ok(c.wait(10 * n), f"{name}: all runs end", modes(c))
    for t in c.of("token"):
        whole.setdefault((t["run"], t.get("choice", 0)), []).append(t)
    ends = {(r["run"], r["choice"]): r for r in c.of("result")}
    moved = [r for r in ends.values() if (r["fallback"] or "").startswith("migrated")]
    ok(told(c.of("result")) == ref and moved, f"{name}: as if nothing had been", modes(c))
    ok(all([t["token"] for t in whole[k]] == r["tokens"] and "".join(t["text"] for t in whole[k]) == r["text"] and [t["pos"] for t in whole[k]] == list(range(len(r["tokens"])))
           for k, r in ends.items()), f"{name}: the streams hold each token and all text once", [(k, [t["text"] for t in whole[k]], r["text"]) for k, r in ends.items()])
    s.end(name, bound="60s")
tap.done()
