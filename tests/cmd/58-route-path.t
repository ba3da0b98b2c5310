#!/usr/bin/env python3
"""Where KV goes: domains, maintenance, breakers, pairs on hold, limits of fallbacks, and what a router that was killed left at its workers; with workers that do as
they are told."""
import os
import threading
import time

import tap
from fake import at, checked, D, P, results, right, router, silent, tokens_of, until
from tap import B, ok, run

def topology(text, path=None):
    path = path or at("topology")
    with open(path + ".new", "w") as f:
        f.write(text)
    os.rename(path + ".new", path)
    return path


def told(r):
    r.err.flush()
    return open(r.err.name).read()


def routes(r):
    return [x for x in r.events() if x["pd"] == "route"]


def locally(kind):
    """A decode worker that computes it itself, and says why."""
    def taken(self, c, req):
        res = self.result(req, tokens_of(req))
        res.update(mode="local", fallback=f"{kind}: so it says")
        c.put(res)
    return taken


class Client:
    """Stays; what came is in .got."""

    def __init__(self, r, *records):
        self.c, self.got = r.client(*records), []
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for x in self.c.records():
            self.got.append(x)

    def of(self, kind):
        return [x for x in list(self.got) if x["pd"] == kind]


def by(d, how):
    d.taken = (lambda c, req: how(d, c, req)) if how else d.whole


Q = {"id": "a", "prompt": "hello", "max_tokens": 6}

# ---- domains ----


def racks(p, d):
    return f"domain rackA rack\ndomain rackB rack\nworker unix:{p[0].path} in rackB\nworker unix:{p[1].path} in rackA\nworker unix:{d.path} in rackA\n"


p, d = [P(), P()], D()
r = router("--topology", topology(racks(p, d)), "--domain", "require:rack", workers=p + [d])
got = r.ask(*[dict(Q, id=i) for i in range(10)])
ok(len(results(got)) == 10 and len(p[1].requests) == 10 and not p[0].requests, "a required domain: only who is in it", [len(w.requests) for w in p])
rec = routes(r)[-1]
row = [x for x in rec["p"] if x["at"] == "unix:" + p[0].path][0]
ok(row["excluded"] == "domain required rackA" and row["x"] == "domain", "the record says so", rec["p"])
ok({(x["kind"], x.get("excluded")) for x in rec["paths"]} == {("rack", None), ("cross", "domain required rackA")} and rec["versions"]["topology"] > 0, "and of each path what it is", rec["paths"])
p[1].die()
got = r.ask(dict(Q, deadline_ms=1500))
ok(results(got)[0]["finish_reason"] == "blocked" and any(x["reason"] == "domain required rackA" for x in results(got)[0]["excluded"]), "nobody in it: blocked, and nobody else's KV is taken", got)
checked(r, "required", *p, d)

p, d = [P(), P()], D()
r = router("--topology", topology(racks(p, d)), "--domain", "prefer:rack", workers=p + [d])
r.ask(*[dict(Q, id=i) for i in range(10)])
ok(len(p[1].requests) == 10 and not p[0].requests, "a preferred one: who is in it, while there is somebody")
p[1].die()
got = r.ask(Q)
ok(right(got, Q) and results(got)[0]["mode"] == "remote" and len(p[0].requests) == 1, "then others", got)
checked(r, "preferred", *p, d)

# ---- a file that changes ----

p, d = [P(), P()], D()
t = topology(f"domain A rack\nworker unix:{p[0].path} in A\n")
r = router("--topology", t, "-v", workers=p + [d])
topology(f"domain A rack maintenance\nworker unix:{p[0].path} in A\n", t)
ok(until(lambda: told(r).count(f"{t}: version ") == 2, 5), "a topology that changed is read", told(r)[-600:])
r.ask(*[dict(Q, id=i) for i in range(6)])
ok(len(p[1].requests) == 6 and not p[0].requests and [x for x in routes(r)[-1]["p"] if x["at"] == "unix:" + p[0].path][0]["excluded"] == "maintenance", "who is maintained gets nothing")
topology(f"domain A rack\nworker unix:{p[1].path} in B\n", t)
ok(until(lambda: "line 2: there is no domain 'B'" in told(r) and "the topology stays as it was" in told(r), 5), "one that is no good is told with its line", told(r)[-600:])
time.sleep(2.2)
ok(told(r).count("stays as it was") == 1 and r.ledger()["domains"] == 1, "once, and the old one holds")
r.ask(Q)
ok(not p[0].requests, "still")
topology(f"domain A rack\nworker unix:{p[0].path} in A\n", t)
ok(until(lambda: told(r).count(f"{t}: version ") == 3, 5) and r.ask(*[dict(Q, id=i) for i in range(6)]) and p[0].requests, "a good one again")
checked(r, "topology", *p, d)

c = run([f"{B}/bin/pd-route", "--listen", f"unix:{at('r')}", "--topology", topology("domain a local in b\n")])
ok(c.returncode == 2 and b"line 1: there is no domain 'b' (add a line: domain b CLASS)" in c.stderr, "at the start a bad one is an error", (c.returncode, c.stderr))
c = run([f"{B}/bin/pd-route", "--check", "--topology", topology("domain a local\ndomain b local\npath a b bandwidth 10GB/s\n")])
ok(c.returncode == 0 and b"good, 2 domains; 1 of 1 path lines say no latency: their class's" in c.stdout, "--check tells what is filled", (c.stdout, c.stderr))

# ---- breakers ----

p, d = P(), D()
by(d, locally("transfer_timeout"))
r = router("-v", workers=[p, d])
for i in range(3):
    r.ask(dict(Q, id=i))
ok(len(p.requests) == 3 and until(lambda: "breaker is open" in told(r), 2), "three transfers that fail open the breaker", told(r)[-500:])


def openings():
    return told(r).count("breaker is open")


end = time.time() + 20
while openings() < 3 and time.time() < end:     # two probes that fail: 2 s, 4 s
    r.ask(Q)
by(d, None)
n = len(p.requests)
got = r.ask(Q)
why = [x["fallback"] for x in routes(r) if x.get("fallback")]
ok(right(got, Q) and results(got)[0]["mode"] == "local" and len(p.requests) == n and why and "breaker open" in why[-1], "meanwhile no KV goes there: after a second it is computed where it is decoded", (got, why))
ok(any(x["p"] and (x["p"][0].get("excluded") or "").startswith("breaker open") for x in routes(r)) or "breaker open" in results(got)[0]["fallback"], "the record says `breaker open`", got)
end = time.time() + 20
while "breaker is closed" not in told(r) and time.time() < end:
    got = r.ask(Q)
ok(results(got)[0]["mode"] == "remote" and r.ledger()["breakers_open"] == 0, "two probes that go well close it", told(r)[-500:])
n = len(p.requests)
for i in range(5):
    r.ask(dict(Q, id=i))
ok(len(p.requests) == n + 5 and r.ledger()["breakers_open"] == 0, "and all goes as before", (n, len(p.requests)))
checked(r, "breaker", p, d)

p, d = P(), [D(), D()]
by(d[0], locally("kv_failed"))
r = router(workers=[p, *d])
got = r.ask(*[dict(Q, id=i, prompt=f"p{i}") for i in range(20)])
n = len(d[0].requests)
r.ask(*[dict(Q, id=i, prompt=f"p{i}") for i in range(20)])
ok(len(d[1].requests) >= 28 and len(d[0].requests) - n <= 1, "with another decode worker there, runs go to that one", ([len(x.requests) for x in d], n))
checked(r, "breaker of one of two", p, *d)

# ---- on hold ----

p, d, file = P(), D(), at("ledger")
by(d, locally("integrity"))
r = router("--ledger", file, workers=[p, d])
got = r.ask(Q)
by(d, None)
ok(right(got, Q) and until(lambda: r.ledger()["holds"] == 1, 2) and f"KV from unix:{p.path} to unix:{d.path} is on hold until it is released" in told(r), "KV that failed a check puts its pair on hold", told(r)[-600:])
got = r.ask(Q)
ok(results(got)[0]["mode"] == "local" and "hold: integrity: so it says" in results(got)[0]["fallback"] and len(p.requests) == 1, "no KV goes there any more", got)
c = run([f"{B}/bin/pd-route", "--holds", "--router", f"unix:{r.path}"])
ok(c.stdout.decode().startswith(f"unix:{p.path},unix:{d.path}  integrity: so it says (run "), "--holds lists it", (c.stdout, c.stderr))
r.p.kill()
r.p.wait()
r = router("--ledger", file, workers=[p, d], where=r.path)
ok("1 pairs are on hold" in told(r) and r.ledger()["holds"] == 1, "it outlives the router", told(r))
got = r.ask(Q)
ok(len(p.requests) == 1 and results(got)[0]["mode"] == "local", "and holds")
c = run([f"{B}/bin/pd-route", "--release", f"{p.name},unix:nowhere", "--reason", "x", "--router", f"unix:{r.path}"])
ok(c.returncode == 1 and b"is not on hold (--holds lists who is)" in c.stderr, "a pair that is not held cannot be released", (c.returncode, c.stderr))
c = run([f"{B}/bin/pd-route", "--release", f"{p.name},{d.name}", "--reason", "cable changed", "--router", f"unix:{r.path}"])
ok(c.returncode == 0 and c.stdout == b"released 1\n" and "released from hold: cable changed" in told(r), "by name it is, with the reason", (c.returncode, c.stdout, c.stderr))
got = r.ask(Q)
ok(results(got)[0]["mode"] == "remote" and len(p.requests) == 2, "and KV goes there again", got)
log = [x for x in r.events() if x["pd"] == "ledger"]
ok([(x["do"], x.get("cause", x.get("reason", "")).split(":")[0]) for x in log] == [("hold", "integrity"), ("release", "cable changed")], "both are in the trace", log)
checked(r, "hold", p, d)
r = router("--ledger", file, workers=[])
ok(r.ledger()["holds"] == 0, "what was released stays so")
r.stop()

# ---- limits of fallbacks ----

# A prompt counts as a guess of a token a 4 bytes: 101 of these.
LONG = dict(Q, prompt="x" * 400)
p, ds = P(), [D(blocks=128), D(blocks=128)]     # of 16 tokens: 2048, a tenth of which is 204
for x in ds:
    x.taken = lambda c, req: None       # takes it, and does not come to its end
r = router("--wait", "4s", workers=[p, *ds])
p.die()
r.until("workers_ready", 2)
c = Client(r, *[dict(LONG, id=i) for i in range(12)])
# two a worker: one is 101 tokens, two are 202, three would be 303
ok(until(lambda: r.ledger()["fallbacks_now"] == 4 and all(len(x.requests) == 2 for x in ds), 5), "a tenth of a worker's tokens at a time", (r.ledger(), [len(x.requests) for x in ds]))
ok(until(lambda: len(c.of("result")) == 8, 10) and all(x["finish_reason"] == "shed" for x in c.of("result")), "what waits too long is shed", c.got)
errors = c.of("error")
ok(len(errors) == 8 and all(x["retry_after_ms"] >= 100 and "as much for others as they may" in x["message"] for x in errors) and r.ledger()["shed"] == 8, "with the time after which it may be asked for again", errors[:1])
ok(all(len(x.requests) == 2 for x in ds), "and was given to nobody")
for x in ds:
    by(x, None)
    for q in list(x.requests):
        x.whole(x.conns[-1], q)
ok(until(lambda: len(c.of("result")) == 12, 5) and r.until("fallbacks_now", 0), "those that run come to their end", (c.got[-1:], r.ledger()))
got = r.ask(LONG)
ok(right(got, LONG) and results(got)[0]["mode"] == "local", "and there is room again", got)
checked(r, "limits", *ds)

p, d = P(), D()
r = router("--fallback-rate", "2", "--wait", "1600ms", workers=[p, d])
p.die()
r.until("workers_ready", 1)
got = r.ask(*[dict(Q, id=i) for i in range(10)])
done = [x for x in results(got) if x["finish_reason"] == "length"]
shed = [x for x in got if x["pd"] == "error"]
ok(3 <= len(done) <= 6 and len(shed) == 10 - len(done) and all("the rate of fallbacks" in x["message"] and 0 < x["retry_after_ms"] <= 60000 for x in shed), "so many a second", (len(done), shed[:1]))
checked(r, "rate", d)

# Prefill workers die with runs at their decode worker, which would compute them all at once.
p, d = P(serve=silent), D(blocks=128)
d.taken = lambda c, req: None
r = router("--wait", "1500ms", workers=[p, d])
c = Client(r, *[dict(LONG, id=i) for i in range(6)])
ok(until(lambda: len(p.requests) == 6 and len(d.pending) == 6, 5), "six runs wait for KV at a decode worker")
p.die()
ok(until(lambda: r.ledger()["fallbacks_now"] == 2, 5), "their prefill worker dies: it computes two", r.ledger())
ok(until(lambda: len(d.cancels) == 4, 5), "and drops the others", d.cancels)
ok(until(lambda: len(c.of("result")) == 4, 8) and all(x["finish_reason"] == "shed" for x in c.of("result")), "which are shed, as it does not come to an end of those", c.got)
checked_runs = [q for q in d.requests if q["route"]["mode"] == "local"]
ok(len(checked_runs) == 2, "it never had more than two to compute", len(checked_runs))
for q in checked_runs:
    d.whole(d.conns[-1], q)
ok(until(lambda: len(c.of("result")) == 6, 5), "those two come to their end", c.got[-1:])
checked(r, "storm", d)

# ---- what a killed router left ----


class Kept(P):
    """Has its KV until it is told to drop it, as one does whose connection to the router hangs."""

    def prefill(self, c, req):
        self.answer(c, req)

    def on_cancel(self, c, r):
        mine = [q for q in self.requests if q["run"] == r["run"]]
        good = mine and r.get("cancel_token") == mine[-1].get("cancel_token") is not None
        c.put({"pd": "status", "v": 1, "run": r["run"], "state": "cancelled" if good else "unknown"})


class Waits(D):
    on_cancel = Kept.on_cancel


p, d, file = Kept(serve=Kept.prefill), Waits(), at("ledger")
r = router("--ledger", file, workers=[p, d])
c = Client(r, *[dict(Q, id=i) for i in range(5)])
ok(until(lambda: len(p.requests) == 5 and len(d.pending) == 5 and r.ledger()["kv_unread_runs"] == 5, 5), "five runs whose KV is not read yet", r.ledger())
ok(all(len(q["cancel_token"]) == 16 for q in p.requests) and len({q["cancel_token"] for q in p.requests}) == 5, "each has a token of its own")
ok(os.stat(file).st_mode & 0o777 == 0o600, "the ledger is its owner's alone")
r.p.kill()
r.p.wait()
r = router("--ledger", file, workers=[p, d], where=r.path)
ok("5 runs of a former life are to be dropped" in told(r), "its successor knows them", told(r))
ok(r.until("left_over", 0) and len({x["run"] for x in p.cancels}) == 5 and len({x["run"] for x in d.cancels}) == 5, "and has them dropped at both workers", (len(p.cancels), len(d.cancels), r.ledger()))
ok(until(lambda: "(5 runs were still there)" in told(r), 3) and r.ledger()["kv_unread_runs"] == 0, "and says so", told(r)[-300:])
checked(r, "left over", p, d)
r = router("--ledger", file)
ok(r.ledger()["left_over"] == 0, "nothing is left for the next one")
c = run([f"{B}/bin/pd-route", "--listen", f"unix:{at('r')}", "--ledger", file])
ok(c.returncode == 2 and b"another router has this ledger" in c.stderr, "two routers do not share one", c.stderr)
r.stop()

tap.done()
