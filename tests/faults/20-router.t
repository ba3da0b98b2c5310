#!/usr/bin/env python3
"""The router killed and stopped at each state that it tells. Killed: its workers are left with nothing, and who repeats his key at its successor gets the same
stream from position 0. Stopped: nothing is lost, it goes on."""
from rig import Set, modes, ok, reqs, tap, told, undisturbed

WANT = [dict(q, idempotency_key=f"key-{q['id']}") for q in reqs(12)]
REF = undisturbed(WANT)
STATES = ("accepted", "route_selected", "streaming", "completed")

for state in STATES:
    name = f"router killed at {state}"
    s = Set(1, 1, 1, faults={"r": f"{state}:kill:3"}, p=["--lease", "4s"])
    c = s.client()
    c.send(*[dict(q, stream=True) for q in WANT])
    ok(s["r"].struck() and not s["r"].alive(), f"{name}: it comes to that")
    first = told(c.of("result"))
    ok(all(first[k] == REF[k] for k in first), f"{name}: what came before is right", first)
    left = s.quiet(10)
    ok(not left, f"{name}: the workers drop what nobody waits for", left)
    s["r"].start()
    s.workers_ready(3)
    again = s.client()
    again.send(*[dict(q, stream=True) for q in WANT])
    ok(again.wait(12) and told(again.of("result")) == REF, f"{name}: its successor gives the same to who repeats his key", modes(again))
    streams = {}
    for t in again.of("token"):
        streams.setdefault(t["run"], []).append((t["pos"], t["token"]))
    ok(all(streams.get(r["run"]) == list(enumerate(r["tokens"])) for r in again.of("result")), f"{name}: from position 0, each token once")
    steps = sum(w.ledger()["steps"] for w in s.workers.values())
    third = s.client()
    third.send(*WANT)
    ok(third.wait(12) and told(third.of("result")) == REF and sum(w.ledger()["steps"] for w in s.workers.values()) == steps, f"{name}: and a third time, computing nothing", modes(third))
    s.end(name)

for state in STATES:
    name = f"router stopped at {state}"
    s = Set(1, 1, 1, faults={"r": f"{state}:stop:3"}, p=["--lease", "4s"])
    c = s.client()
    c.send(*[dict(q, stream=True) for q in WANT])
    ok(s["r"].struck() and s["r"].stopped(), f"{name}: it comes to that")
    s["r"].cont()
    ok(c.wait(12) and told(c.of("result")) == REF, f"{name}: it goes on where it was", modes(c))
    s.end(name, bound="60s")

tap.done()
