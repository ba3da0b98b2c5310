#!/usr/bin/env python3
"""KV that is not what it should be, or not there any more: a byte flipped on its way, a lease that ran out, a prefill worker of another life or another model. It is
never used: the prompt is computed where it is decoded, to the same bits, and the result says why."""
import time

from rig import BIN, PLAIN, Proc, Set, modes, ok, reqs, tap, told, undisturbed

WANT = reqs(10)
REF = undisturbed(WANT)


def kinds(c):
    return [(r.get("fallback") or "").split(":")[0] for r in c.of("result")]


for via in ("shm", "inline"):
    for nth in (1, 2, 7):
        name = f"a byte flipped in the {nth}. chunk by {via}"
        s = Set(1, 1, faults={"d0": f"flip:fail:{nth}"}, d=["--via", via, "--prefix-cache", "off"], p=["--prefix-cache", "off"])
        c = s.client()
        c.send(*WANT)
        ok(c.wait(len(WANT)) and told(c.of("result")) == REF, f"{name}: the output is the same", modes(c))
        ok(sorted(kinds(c)) == [""] * 9 + ["integrity"], f"{name}: one run was computed anew, for want of integrity", modes(c))
        s.end(name)

name = "a lease that runs out before it is read"
s = Set(1, 1, faults={"d0": "kv_transfer_started:stop:1"}, p=["--lease", "300ms"])
c = s.client()
c.send(*WANT)
ok(s["d0"].struck(), f"{name}: the decode worker stands still")
end = time.time() + 5
while s["p0"].ledger()["leases_live"] and time.time() < end:
    time.sleep(0.02)
g = s["p0"].ledger()
ok(g["leases_live"] == 0 and g["leases_expired"] >= 1 and g["blocks_leased"] == 0, f"{name}: its blocks come back", g)
s["d0"].cont()
ok(c.wait(len(WANT)) and told(c.of("result")) == REF, f"{name}: the output is the same", modes(c))
ok("lease_ended" in kinds(c), f"{name}: a late read was refused, and the result says so", modes(c))
s.end(name, bound="60s")

name = "a prefill worker that begins a new life meanwhile"
s = Set(1, 1, faults={"d0": "kv_transfer_started:stop:1"})
c = s.client()
c.send(*WANT)
ok(s["d0"].struck(), f"{name}: the decode worker stands still")
s["p0"].kill()
s["p0"].start()
time.sleep(0.1)
s["d0"].cont()
ok(c.wait(len(WANT)) and told(c.of("result")) == REF, f"{name}: the output is the same", modes(c))
ok(set(kinds(c)) - {""}, f"{name}: what the old one offered was not used", modes(c))
s.end(name, bound="60s")

name = "a prefill worker of another model"
s = Set(0, 1)
other = Proc(s.dir, "p9", [f"{BIN}/bin/pd-prefill", "-m", "testdata/tiny/llama-q8_0.gguf", "-t", "1", "--kv-mem", "8MiB", "--register", f"unix:{s.r.path}"])
s.workers["p9"] = other
s.workers_ready(2)
c = s.client()
c.send(*WANT)
end = time.time() + 20
c.wait(len(WANT), seconds=20)
ok(all(told(c.of("result"))[k] == REF[k] or told(c.of("result"))[k][2] == "blocked" for k in told(c.of("result"))) and len(c.of("result")) == len(WANT),
   f"{name}: no run gets its KV", modes(c))
ok(other.ledger()["published"] == 0 and s["d0"].ledger()["remote"] == 0, f"{name}: and none is asked of it", other.ledger())
x = tap.run([f"{PLAIN}/bin/pd-route", "--check", "--worker", f"unix:{s['d0'].path}", "--worker", f"unix:{other.path}"])
ok(x.returncode == 3 and b"refused" in x.stdout and b"weight" in x.stdout, f"{name}: pd-route --check names the field", x)
s.end(name)
tap.done()
