#!/usr/bin/env python3
"""A decode worker reads KV where the prefill worker has it (--in-place), through a decode that lasts longer than the lease, and the connection is cut in the middle
of it: it reads on, and what comes next ends as it must. The next connection renews the lease and releases it; where none comes it reads until the lease is over and
computes the rest itself; where the run is over first the next connection says so at once; a prefill worker that died leaves the memory as it is, a decode worker
that died has its lease taken back. Each time the output is what an undisturbed run gives and each lease ends once."""
import os
import subprocess
import tempfile
import time

import tap
from pdset import ARGS, Router, Worker, check
from relay import Relay
from tap import B, ok, run

try:
    M = os.environ.get("PD_MODEL") or subprocess.check_output(["scripts/fetch-model"], text=True, stderr=subprocess.DEVNULL).strip()
except subprocess.CalledProcessError:
    print("1..0 # SKIP no model (scripts/fetch-model fetches it), and the tiny one is done in no time")
    raise SystemExit

tmp = tempfile.TemporaryDirectory()
REQ = dict(prompt="The quick brown fox jumps over the lazy dog, and then it sleeps for a while. " * 3, max_tokens=16, temperature=0.8, seed=5, ignore_eos=True, stream=True)


def alone():
    return tap.results(run([f"{B}/bin/pd-decode", "-m", M, *ARGS, "--kv-mem", "64MiB", "--format", "json"], tap.lines([dict(REQ, stream=False)])).stdout)[0]


# It decodes for two seconds or more, by itself: twice a lease; also if the machine was busy while that was measured, and is not later.
REQ["max_tokens"] = min(1500, max(16 if os.environ.get("V") else 300, int(2200 / alone()["tpot_ms"])))
OUT = alone()
FREE = {"runs": 0, "moves": 0, "leases_live": 0, "blocks_used": 0}


class Scene:
    """One run, over a relay (or not), that streams and is read in place. absent: see Relay."""

    def __init__(self, name, lease, relay=True, absent=0):
        self.name = name
        self.dir = os.path.join(tmp.name, name.replace(" ", "_"))
        os.mkdir(self.dir)
        self.lease = lease
        self.P = Worker(self.dir, "P", "prefill", "--via", "shm", "--lease", f"{lease}s", mem="64MiB", m=M)
        self.D = Worker(self.dir, "D", "decode", "--via", "shm", "--in-place", mem="64MiB", m=M)
        self.R = Router(os.path.join(self.dir, "R.trace"))
        self.y = Relay(os.path.join(self.dir, "relay"), self.D, absent=absent) if relay else None
        self.send(dict(REQ, prompt="Once upon a time", max_tokens=2))   # memory that is touched for the first time takes its time
        self.R.wait([self.r])
        for w in (self.P, self.D):
            w.until({k: v for k, v in FREE.items() if w is self.P or k != "leases_live"}, 5)
        self.was = {w: w.ledger() for w in (self.P, self.D)}
        self.send(REQ)
        while len(self.R.of(self.r, "token")) < 4 and not self.R.result(self.r):
            self.R.pump()
        self.ok(self.D.ledger()["in_place"] == 1 and not self.R.result(self.r), "it streams, and reads in place", self.D.ledger())

    def send(self, q):
        r = self.r = self.R.request(q)
        self.R.event(r["run"], "route_selected")
        for w in (self.D, self.P):
            self.R.to(w).send(self.R.route(r, "remote", self.P, self.y or self.D))

    def more(self, w, key):
        return w.ledger()[key] - self.was[w][key]

    def ok(self, cond, name, note=""):
        ok(cond, f"{self.name}: {name}", note)

    def result(self, mode="remote", fallback=None):
        self.R.wait([self.r])
        x = self.R.result(self.r) or {}
        said = (x.get("fallback") or "").split(":")[0] or None
        self.ok(x.get("tokens") == OUT["tokens"] and x["text"] == OUT["text"] and [t["token"] for t in self.R.of(self.r, "token")] == x["tokens"],
                "the output is the same, and no token left twice", x)
        self.ok(x["mode"] == mode and said == fallback, f"{mode}, {fallback}", (x["mode"], x["fallback"], self.D.said()[-600:], self.P.said()[-600:]))

    def free(self, w, seconds, why):
        t0 = time.monotonic()
        good, g = w.until({k: v for k, v in FREE.items() if w is self.P or k != "leases_live"}, seconds)
        self.ok(good, f"{why}: all is free after {(time.monotonic() - t0) * 1000:.0f} ms", g)

    def ends(self, **want):
        have = {k: self.more(self.P, "leases_" + k) for k in ("granted", "released", "expired", "revoked")}
        self.ok(have == {"granted": 1, "released": 0, "expired": 0, "revoked": 0, **want}, f"its lease ended once: {want}", have)

    def end(self, *workers):
        self.R.close()
        said = [w.end() for w in workers]
        self.ok(all(rc == 0 for rc, _ in said) and not any(x in e for _, e in said for x in ("not held", "Sanitizer", "runtime error")), "drained", said)
        c = check(self.R.path, self.P.trace, self.D.trace)
        self.ok(c.returncode == 0, "the merged log keeps every rule", c.stdout + c.stderr)
        if self.y:
            self.y.close()


s = Scene("it comes back", 1, absent=0.15)
s.y.cut_all()
t0 = time.monotonic()
s.result()
took = time.monotonic() - t0
s.free(s.P, 1, "released")
s.ok(took > s.lease and s.more(s.D, "resumed") == 1 and len(s.y.conns) == 2, f"it read for {took:.1f} s more, over the second connection", (s.D.ledger(), s.y.conns))
s.ok(s.more(s.P, "given_shm") == 1 and s.more(s.D, "taken_shm") == 1, "it was given once", (s.P.ledger(), s.D.ledger()))
s.ends(released=1)
s.end(s.P, s.D)

s = Scene("it does not come back", 1, absent=None)
before = len(s.R.of(s.r, "token"))
s.y.cut_all()
t0 = time.monotonic()
while "lease_ended" not in s.D.said() and time.monotonic() - t0 < 10:
    s.R.pump(0.01)
took, more = time.monotonic() - t0, len(s.R.of(s.r, "token")) - before
s.ok(s.lease * 0.7 < took < s.lease * 1.5 + OUT["tpot_ms"] / 1000 and more > min(4, took * 250 / OUT["tpot_ms"]), f"it read on for {took:.2f} s of a lease of {s.lease} s, {more} tokens more, and no longer")
s.result(fallback="lease_ended")
s.free(s.P, 3, "expired")
s.ends(expired=1)
s.end(s.P, s.D)

s = Scene("it comes back after the end", 20, absent=None)
s.y.cut_all()
s.result()
s.ok(s.P.ledger()["leases_live"] == 1 and s.D.until({"in_place": 0, "blocks_borrowed": 0, "runs": 0}, 2)[0], "which its prefill worker has not heard of", s.P.ledger())
s.y.open()
s.free(s.P, 1, "told over the next connection")
s.ok(s.more(s.D, "committed") == 1, "as what had not been acknowledged", s.D.ledger())
s.ends(released=1)
s.end(s.P, s.D)

s = Scene("its prefill worker is killed", 20, relay=False)
s.P.kill()
s.result()
s.ok(s.D.until({"in_place": 0, "blocks_borrowed": 0, "runs": 0}, 2)[0], "nothing is borrowed any more", s.D.ledger())
s.end(s.D)

s = Scene("its decode worker is killed", 60, relay=False)
s.D.kill()
s.R.event(s.r["run"], "failed")
s.free(s.P, 4, "long before the lease is over")
s.ends(revoked=1)
s.end(s.P)

tap.done()
