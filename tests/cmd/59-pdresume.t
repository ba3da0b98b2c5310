#!/usr/bin/env python3
"""A transfer's connection is cut at byte k, by a relay between the workers: the prefill worker connects anew, the decode worker names the chunks that it has
verified, and the rest is sent; where that does not come about in time it computes the prompt itself. Each time the output is what an undisturbed run gives, each
chunk is taken once, every count is back at its start, and the merged log keeps every rule."""
import json
import os
import tempfile

import tap
from pdset import ARGS, Router, Worker, check
from relay import Relay
from tap import B, TINY, ok, run

tmp = tempfile.TemporaryDirectory()
REQ = dict(prompt="The quick brown fox jumps over the lazy dog, and then it sleeps for a while. " * 3, max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)
OUT = tap.results(run([f"{B}/bin/pd-decode", "-m", TINY, *ARGS, "--kv-mem", "4MiB", "--format", "json"], tap.lines([REQ])).stdout)[0]
CHUNK = 4096                    # bytes of the largest one (--chunk 32)
number = 0


class Scene:
    def __init__(self, via, *args):
        global number
        number += 1
        self.dir = os.path.join(tmp.name, str(number))
        os.mkdir(self.dir)
        self.P = Worker(self.dir, "P", "prefill", "--via", via, "--lease", "2s")
        self.D = Worker(self.dir, "D", "decode", "--via", via, *args)
        self.R = Router(os.path.join(self.dir, "R.trace"))
        self.n = 0

    def one(self, cuts, seconds=30, **kw):
        """A run over a relay of its own, nothing of it held: (result, relay)."""
        self.n += 1
        y = Relay(os.path.join(self.dir, f"relay{self.n}"), self.D, cuts, **kw)
        r = self.R.request(dict(REQ, id=self.n, cache_salt=f"{self.n:03}"))
        self.R.event(r["run"], "route_selected")
        self.R.to(self.D).send(self.R.route(r, "remote", self.P, y))
        self.R.to(self.P).send(self.R.route(r, "remote", self.P, y))
        if not self.R.wait([r], seconds=seconds, kind=("result", "error")):
            return False, None, y
        if not self.R.result(r):        # as a router does when its prefill worker gives up
            self.R.event(r["run"], "fallback")
            self.R.local(r, self.D, new=False, fallback="prefill_failed: " + self.R.of(r, "error")[0]["message"])
        good = self.R.wait([r], seconds=seconds) and self.R.result(r)["tokens"] == OUT["tokens"] and self.R.result(r)["text"] == OUT["text"]
        self.free = self.P.until({"runs": 0, "moves": 0, "leases_live": 0, "blocks_used": 0}, 5), self.D.until({"runs": 0, "moves": 0, "expected": 0, "blocks_used": 0}, 5)
        y.close()
        return good, self.R.result(r), y

    def end(self, name):
        ok(all(f for f, _ in self.free), f"{name}: every count is back at its start", self.free)
        g = self.P.ledger()
        ok(g["leases_granted"] == g["leases_released"] + g["leases_expired"] + g["leases_revoked"], f"{name}: every lease has ended once", g)
        self.R.close()
        ends = [w.end() for w in (self.P, self.D)]
        ok(all(rc == 0 for rc, _ in ends) and not any(x in e for _, e in ends for x in ("not held", "Sanitizer", "runtime error")), f"{name}: both drain", ends)
        moved = [m for m in map(json.loads, run(tap.trace("cat", "--format", "json", self.P.trace)).stdout.splitlines()) if m.get("state") == "kv_moved"]
        ok(any(m["retries"] for m in moved) and all(m["skipped_bytes"] == 0 and m["sent_bytes"] >= m["offered_bytes"] for m in moved) and
           g["given_bytes"] == sum(m["offered_bytes"] for m in moved), f"{name}: of what went in several goes nothing counts as skipped", (g, moved))
        c = check(self.R.path, self.P.trace, self.D.trace)
        ok(c.returncode == 0, f"{name}: the merged log keeps every rule", c.stdout + c.stderr)


for via, args in (("inline", ()), ("shm", ()), ("shm", ("--in-place",))):
    name = " ".join((via, *args))
    s = Scene(via, *args)
    good, x, y = s.one([])
    out, back = y.conns[0]["out"], y.conns[0]["back"]
    whole = x["kv_bytes"]
    ok(good and x["mode"] == "remote" and len(y.conns) == 1 and whole == 10 * CHUNK, f"{name}: undisturbed, {out} bytes go out and {back} come back", (x, y.conns))
    ks = [("out", k) for k in sorted({1, 100, out // 8, out // 4, out // 2, out * 3 // 4, out * 7 // 8, out - 3000, out - 100, out - 1})]
    ks += [("back", k) for k in sorted({1, back // 2, back - 150, back - 60, back - 1})]
    for way, k in ks:
        resumed = s.D.ledger()["resumed"]
        good, x, y = s.one([(way, k)])
        again = sum(c["out"] for c in y.conns)
        resumed = s.D.ledger()["resumed"] - resumed
        # towards the end it depends on what comes in one piece whether so much is said; what is said once more (hello, offer, kv), and a chunk that was on its way
        most = out + 6000 + (CHUNK + 600 if via == "inline" else 0)
        ok(good and x["mode"] == "remote" and x["fallback"] is None and x["kv_bytes"] == whole and (y.conns[0][way] >= k or k > out - 700) and again <= most,
           f"{name}: cut after {k} bytes {way}: it goes on{' with what was there' if resumed else ''}", (y.conns, again, most, resumed, x and x["mode"], x and x["fallback"], s.D.said()[-500:], s.P.said()[-500:]))
    for way, at in (("out", [out // 4, out // 3, out // 3]), ("back", [back // 2, back // 2])):
        good, x, y = s.one([(way, k) for k in at])
        ok(good and x["mode"] == "remote" and sum(c["cut"] for c in y.conns) >= 2, f"{name}: cut {len(at)} times {way}, and it goes on each time", (x, y.conns))
    good, x, y = s.one([("out", out // 2)], absent=0.3)
    ok(good and x["mode"] == "remote" and x["fallback"] is None, f"{name}: cut, and nobody there for 0.3 s: it goes on", (x, y.conns))
    good, x, y = s.one([("out", out * 3 // 4)], absent=6)
    ok(good and x["mode"] == "local" and x["fallback"].startswith("prefill_worker_gone") and x["transferred_tokens"] == 0 and x["e2e_ms"] < 4000,
       f"{name}: cut, and nobody there for long: it computes the prompt itself", (x, y.conns))
    good, x, y = s.one([("out", 2000)] * 50)
    ok(good and x["mode"] == "local" and x["fallback"].split(":")[0] in ("prefill_worker_gone", "prefill_failed") and len(y.conns) < 10,
       f"{name}: cut each time: it computes the prompt itself", (x, len(y.conns)))
    if via == "inline":
        g = s.D.ledger()
        ok(g["resumed"] >= 5, f"{name}: {g['resumed']} went on with what was there", g)
        ok(g["committed"] >= 1, f"{name}: {g['committed']} were said to be taken over the next connection", g)
    s.end(name)

tap.done()
