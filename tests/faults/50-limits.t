#!/usr/bin/env python3
"""Too little of something: blocks, descriptors, memory, disk; and workers that lie. What cannot be done fails alone and is told; the process lives and goes on."""
import os
import resource
import socket
import sys
import time

from rig import ARGS, BIN, PLAIN, TINY, Client, Set, modes, ok, reqs, tap, told, undisturbed

WANT = reqs(10)
REF = undisturbed(WANT)

# a block of 16 tokens is 4 KiB in this model
for what, n in (("set", (1, 1, 0)), ("aggregated worker", (0, 0, 1))):
    name = f"an {what} out of blocks" if what[0] == "a" else f"a {what} out of blocks"
    s = Set(*n, mem="96KiB")
    many = reqs(40)
    c = s.client()
    c.send(*many)
    ok(c.wait(len(many), seconds=100) and told(c.of("result")) == undisturbed(many), f"{name}: all runs end, and are the same", modes(c)[:9])
    s.end(name)

name = "out of descriptors"
few = {x: (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))) for x in ("d0", "r")}
s = Set(1, 1, limits=few)
crowd = []
for _ in range(80):
    k = socket.socket(socket.AF_UNIX)
    k.settimeout(0.2)
    try:
        k.connect(s.r.path)
        crowd.append(k)
    except OSError:
        break
time.sleep(0.5)
ok(s.r.alive(), f"{name}: it lives", s.r.said()[-400:])
for k in crowd:
    k.close()
time.sleep(0.3)
c = s.client()
c.send(*WANT)
ok(c.wait(len(WANT)) and told(c.of("result")) == REF, f"{name}: and serves when there are some again", modes(c))
s.end(name)

name = "a disk that is full"
s = Set(1, 1)
for x in s.all():
    x.p.kill()
    x.p.wait()
    x.trace = "/dev/full"
    x.start()
s.workers_ready(2)
c = s.client()
c.send(*WANT)
ok(c.wait(len(WANT)) and told(c.of("result")) == REF, f"{name}: the trace is lost, and told; the runs are served", modes(c))
ok(all("/dev/full" in x.said() for x in s.all()), f"{name}: each says so", [x.said() for x in s.all()])
s.end(name, check=False)

HASTY = [dict(q, timeouts_ms={"prefill": 3000}) for q in WANT]         # KV that one end lost without a word is not waited for longer

# Every so many allocations, reads and writes of a serving process refused once: at worst runs fail, each with a class; the process serves the next ones.
for who in ("p0", "d0", "r", "a0"):
    for point in ("malloc", "write", "read"):
        s = Set(*((0, 0, 1) if who == "a0" else (1, 1, 0)), p=["--lease", "1s"])
        bad = []
        for nth in range(1, 60 if point == "malloc" else 16, 7 if point == "malloc" else 3):
            s[who].end()
            base = 400 if point == "malloc" else 0      # the first hundreds are of its start
            try:
                s[who].start(f"{point}:fail:{base + nth * 17}")
            except RuntimeError:
                continue                    # refused at its start: it said so and ended
            s.workers_ready(len(s.workers), 5)
            c = s.client()
            c.send(*HASTY)
            whole = c.wait(len(WANT), seconds=25)
            got = told(c.of("result"))
            wrong = [k for k, v in got.items() if v != REF[k] and v[2] not in ("error", "blocked", "cancelled")]
            if (not whole and not c.gone) or wrong or not s[who].alive():       # a client that was closed knows that it must ask again
                bad.append((point, nth, modes(c), s[who].said()[-300:]))
            for _ in range(3):              # the refusal may still be to come: it strikes once
                d = s.client()
                d.send(*HASTY)
                if d.wait(len(WANT), seconds=25) and told(d.of("result")) == REF:
                    break
            else:
                bad.append((point, nth, "afterwards", modes(d), d.of("error")[:2], s[who].said()[-300:]))
            if (left := s.quiet(5)):
                bad.append((point, nth, "held for ever", left, s[who].said()[-600:]))
        name = f"{point} refused in {who} now and then"
        ok(not bad, f"{name}: what fails is told, nothing is wrong, and it serves on", bad)
        s.end(name, check=False)

# ---- workers that lie ----

import fake                     # noqa: E402  tests/cmd/fake.py

name = "a worker that says it has nothing to do, and never answers"
s = Set(0, 0, 1, route=["--policy", "aggregated"])
k = s.client()
k.send(*WANT)
k.wait(len(WANT))
f = Client(s["a0"].path)
f.send({"pd": "status", "v": 1, "follow": True})
f.wait(1, "worker")
mine = f.of("worker")[0]
f.close()
liar = fake.Fake(os.path.join(s.dir, "liar"), serve=fake.silent, start=False)
base_record = liar.record
liar.record = lambda: dict(base_record(), fingerprint=mine["fingerprint"], layout=mine["layout"], numerics=mine["numerics"], model_revision=mine["model_revision"])
liar.register = s.r.path
liar.start()
s.workers_ready(2)
c = s.client()
c.send(*[dict(q, timeouts_ms={"first_token": 1500}) for q in WANT])
c.wait(len(WANT), seconds=20)
got = told(c.of("result"))
errs = c.of("error")
ok(len(got) == len(WANT) and all(v == REF[k] or v[2] == "error" for k, v in got.items()) and all(e["class"] == "timeout" for e in errs) and liar.requests,
   f"{name}: its runs end in time with a class, the others are right", (modes(c), errs[:2]))
liar.die()
end = time.time() + 10
s.workers_ready(1, 10)
c = s.client()
c.send(*WANT)
ok(c.wait(len(WANT)) and told(c.of("result")) == REF, f"{name}: and when it is gone the others do all", modes(c))
s.end(name)

name = "a worker that says it is of our model, and gives other KV"
s = Set(0, 1)
from rig import Proc            # noqa: E402
other = Proc(s.dir, "p9", [f"{BIN}/bin/pd-prefill", "-m", "testdata/tiny/llama-q8_0.gguf", *ARGS, "--kv-mem", "8MiB"])
s.workers["p9"] = other
f = Client(s["d0"].path)
f.send({"pd": "status", "v": 1, "follow": True})
f.wait(1, "worker")
mine = f.of("worker")[0]
f.close()
liar = fake.Fake(other.path + ".front", role="prefill", serve=fake.silent, start=False)
base2 = liar.record
liar.record = lambda: dict(base2(), fingerprint=mine["fingerprint"], layout=mine["layout"], numerics=mine["numerics"],
                           model_revision=mine["model_revision"], capacity=mine["capacity"])
pipes = []


def forward(self, c, req):
    """What the router sends to the liar goes to the worker of another model, and back."""
    if not pipes:
        pipes.append(Client(other.path))
    pipes[0].send(req)
    n = 0
    end = time.time() + 10
    while time.time() < end:
        for r in [r for r in list(pipes[0].got) if r.get("run") == req["run"]][n:]:
            n += 1
            c.put(r)
        time.sleep(0.01)


liar.serve = forward
liar.register = s.r.path
liar.start()
s.workers_ready(2)
c = s.client()
c.send(*WANT)
ok(c.wait(len(WANT), seconds=30) and told(c.of("result")) == REF, f"{name}: the decode worker compares for itself, and computes", modes(c))
ok(s["d0"].ledger()["remote"] == 0 and liar.requests, f"{name}: nothing of it was used", s["d0"].ledger())
liar.die()
for p in pipes:
    p.close()
s.end(name, check=False)
tap.done()
