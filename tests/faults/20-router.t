#!/usr/bin/env python3
"""The router killed and stopped at each state that it tells. Killed: its workers are left with nothing, and who repeats his key at its successor gets the same
stream from position 0. Stopped: nothing is lost, it goes on."""
import os
import socket
import threading
import time

from rig import Proc, Set, modes, ok, reqs, tap, told, undisturbed

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


class Hang:
    """Stands between a router and a worker, and when the router is gone the worker is not told: as over a network that lost a host."""

    def __init__(self, path, to):
        self.path, self.to, self.hang = path, to, True
        s = socket.socket(socket.AF_UNIX)
        s.bind(path)
        s.listen(50)
        threading.Thread(target=self.accept, args=(s,), daemon=True).start()

    def accept(self, s):
        while True:
            a, _ = s.accept()
            b = socket.socket(socket.AF_UNIX)
            try:
                b.connect(self.to)
            except OSError:
                a.close()
                continue
            threading.Thread(target=self.copy, args=(a, b, True), daemon=True).start()
            threading.Thread(target=self.copy, args=(b, a, False), daemon=True).start()

    def copy(self, a, b, from_router):
        while True:
            try:
                data = a.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                break
            try:
                b.sendall(data)
            except OSError:
                pass            # what a worker tells a router that is gone is lost
        if not from_router:
            b.close()


name = "router killed in mid-stream, its connections hang"
# One stream has begun; the KV of others waits at the prefill worker for a decode worker that stands still.
for kept in (False, True):
    s = Set(1, 1, 0, p=["--lease", "60s"])
    s.r.end()
    hang = [Hang(s.workers[x].path + ".hang", s.workers[x].path) for x in ("p0", "d0")]
    cmd = [s.r.cmd[0], *[y for h in hang for y in ("--worker", f"unix:{h.path}")], "--policy", "fixed"]
    s.r = Proc(s.dir, "r1", cmd + (["--ledger", os.path.join(s.dir, "ledger")] if kept else []))
    s.workers_ready(2)
    c = s.client()
    c.send(dict(WANT[0], max_tokens=400, ignore_eos=True, stream=True))
    ok(c.wait(1, "token", 20), f"{name}: tokens come" + ("" if kept else ", without a ledger"))
    s["d0"].stop()
    c.send(*[dict(q, stream=True) for q in WANT[1:]])
    end = time.time() + 10
    while s["p0"].ledger().get("leases_live") != 11 and time.time() < end:
        time.sleep(0.02)
    ok(s["p0"].ledger()["leases_live"] == 11, f"{name}: eleven runs' KV waits to be read", s["p0"].ledger())
    s.r.kill()
    s.r.start()
    end = time.time() + 5
    while s.busy(s["p0"]) and time.time() < end:
        time.sleep(0.02)
    left = s.busy(s["p0"])
    if not kept:
        ok(left.get("leases_live") == 11, f"{name}: without a ledger it waits until its leases end", left)
        for p in s.all():
            p.kill()
        continue
    ok(not left, f"{name}: its successor has it dropped by the ledger", (left, s.r.said()[-600:]))
    s["d0"].cont()
    end = time.time() + 10
    while s.r.ledger().get("left_over") and time.time() < end:
        time.sleep(0.02)
    ok(any(f" {n} runs of a former life are to be dropped" in s.r.said() for n in (11, 12)) and "what a former life left at the workers is dropped" in s.r.said(), f"{name}: and at the decode worker, once it goes on", s.r.said()[-600:])
    again = s.client()
    again.send(*WANT)
    ok(again.wait(12) and told(again.of("result")) == REF, f"{name}: it serves as before", modes(again))
    s.end(name, check=False)

tap.done()
