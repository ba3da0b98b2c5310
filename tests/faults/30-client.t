#!/usr/bin/env python3
"""A client that goes away while its runs are in each state (some process is held there until he is gone), one that reads nothing, one that cancels: blocks, leases and
transfers are free within a second, others are served."""
import os
import time

from rig import Set, modes, ok, reqs, tap, told, undisturbed

WANT = reqs(10)
REF = undisturbed(WANT)
AT = [("p0", x) for x in ("accepted", "prefill_started", "lease_granted", "kv_transfer_started", "prefill_completed", "kv_published")] + \
     [("d0", x) for x in ("accepted", "kv_transfer_started", "kv_transfer_completed", "decode_started", "streaming")] + [("r", x) for x in ("accepted", "route_selected", "streaming")]

for how in ("gone", "cancels"):
    for who, state in AT:
        name = f"client {how} while {who} is at {state}"
        s = Set(1, 1, faults={who: f"{state}:stop:2"}, p=["--lease", "20s"])
        c = s.client()
        token = os.urandom(16)
        runs = [dict(q, stream=True, max_tokens=200, ignore_eos=True, cancel_token=token, run=f"01M8PAHHAT80TXBD0XZ6M6EG{i:02d}") for i, q in enumerate(WANT)]
        c.send(*runs)
        ok(s[who].struck() and s[who].stopped(), f"{name}: it comes to that")
        if how == "gone":
            c.close()
        else:
            c.send(*[{"pd": "cancel", "v": 1, "run": q["run"]} for q in runs])
        time.sleep(0.05)
        s[who].cont()
        t0 = time.time()
        left = s.quiet(5)
        took = time.time() - t0
        ok(not left and took < 1, f"{name}: all is free in {took * 1000:.0f} ms", left)
        if how == "cancels":
            ok(c.wait(len(runs), seconds=5) and all(r["finish_reason"] in ("cancelled", "length") for r in c.of("result")), f"{name}: each run ends once", modes(c))
        other = s.client()
        other.send(*WANT)
        ok(other.wait(len(WANT)) and told(other.of("result")) == REF, f"{name}: others are served", (modes(other)[:2], other.of("result")[:1], s.r.said()[-600:]))
        s.end(name, bound="60s")

name = "a client that does not read"
s = Set(1, 1)
c = s.client()
import socket
slow = socket.socket(socket.AF_UNIX)
slow.connect(s.r.path)
import msgpack
slow.sendall(b"".join(msgpack.packb(dict(q, stream=True, max_tokens=200, ignore_eos=True, n=4)) for q in reqs(100)))
for _ in range(5):
    c.send(*WANT)
ok(c.wait(5 * len(WANT)), f"{name}: others are served meanwhile", modes(c))
u, n = msgpack.Unpacker(strict_map_key=False), 0
slow.settimeout(60)
while n < 400:
    data = slow.recv(1 << 16)
    if not data:
        break
    u.feed(data)
    n += sum(r.get("pd") == "result" for r in u)
ok(n == 400, f"{name}: and it gets all once it reads", n)
slow.close()
s.end(name)
tap.done()
