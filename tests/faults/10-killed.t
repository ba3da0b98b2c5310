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

tap.done()
