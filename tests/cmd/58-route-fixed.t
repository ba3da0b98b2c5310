#!/usr/bin/env python3
"""pd-route --policy fixed with workers that do as they are told: prefill here, decode there, and what is done when one of the two fails at each point."""
import threading
import time

import tap
from fake import checked, D, die, P, results, right, router, tokens, tokens_of, until
from tap import B, ok, run

Q = {"id": "a", "prompt": "hello", "max_tokens": 6}
S = dict(Q, stream=True)

# ---- as it should be ----

p, d = P(), D()
r = router(workers=[p, d])
got = r.ask(S)
a, b = p.requests[0], d.requests[0]
ok(right(got, S) and results(got)[0]["mode"] == "remote" and results(got)[0]["prefill_worker"] == p.name and results(got)[0]["decode_worker"] == d.name, "prefill here, decode there", got)
ok(a["route"] == b["route"] and a["route"]["policy"] == "fixed" and a["route"]["p"]["at"] == "unix:" + p.path and a["route"]["d"] == {"worker": d.name, "at": "unix:" + d.path} and
   not a["route"]["early"] and a["run"] == b["run"] and len(a["route"]["op"]) == 16, "both are told the same", (a, b))
got = r.ask(dict(S, n=3))
ok(all(right(got, dict(S, n=3), i) for i in range(3)), "three choices", got)
got = r.ask(*[dict(S, id=i, prompt=f"p{i}") for i in range(100)])
ok(sorted(x["id"] for x in results(got)) == list(range(100)) and len(tokens(got)) == 600, "a hundred runs")
ok(r.until("runs", 0) and r.ledger()["at_workers"] == 0 and r.ledger()["fallbacks"] == 0 and not p.cancels, "nothing is held", r.ledger())
checked(r, "fixed", p, d)

p, d = [P(), P(), P()], [D(), D()]
r = router(workers=p + d)
got = r.ask(*[dict(S, id=i, prompt=f"p{i}") for i in range(120)])
ok(len(results(got)) == 120 and min(len(w.requests) for w in p) > 20 and min(len(w.requests) for w in d) > 30, "each worker of several has its share", [len(w.requests) for w in p + d])
ev = [x for x in r.events() if x["pd"] == "route"]
ok(len(ev) == 120 and all(len(x["p"]) == 3 and len(x["d"]) == 2 and x["chosen"]["mode"] == "remote" and x["chosen"]["p"] and x["chosen"]["d"] for x in ev), "each pair is in the trace", ev[:1])
checked(r, "shares", *p, *d)

# ---- prefill fails ----


def prefillers(*serves):
    """The n-th prefill worker to be asked does as serves[n] says."""
    lock, order = threading.Lock(), []

    def one(self, c, req):
        with lock:
            n = len(order)
            order.append(self)
        serves[n](self, c, req) if n < len(serves) else self.prefill(c, req)
    return [P(serve=one) for _ in range(3)], order


def error(action, message="no"):
    return lambda self, c, req: self.error(c, req, action, message)


for serve, what in ((die, "dies"), (error("retry"), "says retry"), (error("reroute"), "drains")):
    p, order = prefillers(serve)
    d = D()
    r = router(workers=p + [d])
    got = r.ask(S)
    res = results(got)[0]
    ok(right(got, S) and res["mode"] == "remote" and res["fallback"] is None and len(order) == 2 and order[0] is not order[1], f"prefill worker {what}: another one", (got, len(order)))
    ops = {x["route"]["op"] for w in p for x in w.requests} | {x["route"]["op"] for x in d.requests}
    ok(len(ops) == 1 and until(lambda: [x["route"]["p"]["worker"] for x in d.requests] == [w.name for w in order]), "by the same op, and decode knows which", d.requests)
    ok(r.ledger()["retries"] == 1 and r.until("runs", 0) and r.ledger()["at_workers"] == 0, "nothing is held", r.ledger())
    checked(r, what, *p, d)
for serves, kind, n in (((die, die), "prefill_worker_gone", 2), ((die, error("retry", "out of it")), "prefill_failed: out of it", 2), ((error("abort", "too long"),), "prefill_failed: too long", 1)):
    p, order = prefillers(*serves)
    d = D()
    r = router(workers=p + [d])
    got = r.ask(S)
    res = results(got)[0]
    ok(right(got, S) and res["mode"] == "local" and res["fallback"].startswith(kind) and len(order) == n, f"and then decode does it alone: {kind}", (got, len(order)))
    last = d.requests[-1]["route"]
    ok(last["mode"] == "local" and last["p"] is None and last["fallback"] == res["fallback"] and until(lambda: len(d.requests) == n + 1), "as it was told", d.requests)
    ok(r.until("runs", 0) and r.ledger()["at_workers"] == 0 and r.ledger()["fallbacks"] == 1, "nothing is held", r.ledger())
    checked(r, kind, *p, d)


def publish_and_die(self, c, req):
    self.answer(c, req)
    time.sleep(0.1)
    self.die()


p, d = P(serve=publish_and_die), D()
r = router(workers=[p, d])
c = r.client(S)
ok(until(lambda: not p.alive), "a prefill worker dies after it has published")
time.sleep(0.1)
ok(until(lambda: len(d.requests) == 2) and d.requests[1]["route"]["mode"] == "local" and not d.cancels, "decode is told to compute, if it still waits", d.requests)
c.s.shutdown(1)
got = list(c.records())
ok(right(got, S) and results(got)[0]["fallback"].startswith("prefill_worker_gone"), "and the run goes on", got)
checked(r, "published", p, d)


def slow(self, c, req):
    pass


def alone(self, c, req):
    """By itself, and slowly: the tokens, then the end."""
    req = dict(req, route=dict(req["route"], mode="local", fallback="prefill_timeout: by itself"))
    self.whole(c, req, until=2, results=False)
    hold.wait(10)
    self.whole(c, req, first=2)


hold = threading.Event()
p, d = P(serve=slow), D(serve=alone)
r = router(workers=[p, d])
c = r.client(S)
ok(until(lambda: len(p.cancels) == 1), "decode went on without it: prefill is told to stop", p.cancels)
hold.set()
got = list((c.s.shutdown(1), c.records())[1])
ok(right(got, S), "and nobody waits for it", got)
got = r.ask(S)
ok(right(got, S) and until(lambda: len(p.cancels) == 2), "at the end of the run at the latest", (got, p.cancels))
ok(r.ledger()["at_workers"] == 0, "and is not counted as busy", r.ledger())
checked(r, "without", p, d)

# ---- decode fails ----

p, ds, order = P(), [], []


def first_dies(n):
    def taken(self):
        def go(c, req):
            order.append(self)
            if len(order) > 1:
                self.whole(c, req)
                return
            if n:
                self.whole(c, req, until=n, results=False)
                time.sleep(0.05)
            self.die()
        return go
    return taken


for n, q, mode in ((0, S, "remote"), (0, Q, "remote"), (3, S, "local")):
    order.clear()
    p, ds = P(), [D(), D()]
    for w in ds:
        w.taken = first_dies(n)(w)
    r = router(workers=[p, *ds])
    got = r.ask(q)
    res = results(got)[0]
    ok(right(got, q) and res["mode"] == mode and len(order) == 2, f"decode worker dies after {n} tokens", (got, len(order)))
    if n:
        route = order[1].requests[-1]["route"]
        ok(route["resume"] == b"".join(t.to_bytes(4, "little") for t in tokens_of(S)[:3]) and res["fallback"].startswith("migrated") and len(p.requests) == 1, "the stream goes on elsewhere", route)
    else:
        ok(len({x["route"]["op"] for x in p.requests}) == 2 and [x["route"]["d"]["worker"] for x in p.requests] == [w.name for w in order], "prefill gives to the other one, by another op", p.requests)
    checked(r, f"decode {n}", p, *ds)

p, ds, order2 = P(serve=slow), [D(), D()], []
r = router(workers=[p, *ds])
c = r.client(S)
until(lambda: p.requests and any(w.requests for w in ds))
first = next(w for w in ds if w.requests)
other = next(w for w in ds if w is not first)
p.serve = P.prefill
first.die()
c.s.shutdown(1)
got = list(c.records())
ok(right(got, S) and not p.cancels and len(p.requests) == 2 and len(other.requests) == 1, "it dies while prefill works: prefill is told the other one, and goes on", (got, p.cancels))
checked(r, "decode and prefill", p, *ds)

# ---- who fits ----

good, bad = P(), P(fp={"rope_theta": 5000.0})
d = D()
r = router(workers=[bad, good, d])
got = r.ask(*[dict(S, id=i) for i in range(20)])
ok(len(results(got)) == 20 and not bad.requests and len(good.requests) == 20, "a prefill worker of another model is never asked", len(bad.requests))
rows = [x for y in r.events() if y["pd"] == "route" for x in y["p"] if x["excluded"]]
ok(len(rows) == 20 and all(x["worker"] == bad.name and "rope_theta differs (prefill 5000, decode 10000)" in x["excluded"] for x in rows), "and why is in the trace", rows[:1])
good.die()
r.until("workers_ready", 2)
got = r.ask(dict(Q, deadline_ms=300))
res = results(got)[0]
ok(res["finish_reason"] == "blocked" and any("rope_theta differs" in x["reason"] for x in res["excluded"]) and not bad.requests, "where none fits the run is blocked, with the field", got)
x = run([f"{B}/bin/pd-route", "--check", "--worker", f"unix:{r.path}"])
ok(x.returncode == 3 and b"refused" in x.stdout and b"rope_theta differs (prefill 5000" in x.stdout and bad.name.encode() in x.stderr and tap.one_line(x.stderr), "--check says so, and 3", (x.returncode, x.stdout, x.stderr))
checked(r, "fits", bad)
block = P(fp={"block_size": 32})
soft = P(fp={"software": "pd 0.2"})
x = run([f"{B}/bin/pd-route", "--check", "--format", "json", *[y for w in (block, soft, d) for y in ("--worker", f"unix:{w.path}")]])
pairs = {y["p"]: y for y in tap.records(x.stdout)}
ok(x.returncode == 3 and pairs[block.name]["match"] == "convertible" and "block_size differs (prefill 32, decode 16)" in pairs[block.name]["why"] and pairs[soft.name]["match"] == "ok" and
   "software differs" in pairs[soft.name]["why"], "a pair that a conversion could bridge, and one that differs in software alone", (x.returncode, x.stdout, x.stderr))
x = run([f"{B}/bin/pd-route", "--check", *[y for w in (soft, d) for y in ("--worker", f"unix:{w.path}")]])
ok(x.returncode == 0 and b"ok" in x.stdout, "0 when all is well", (x.returncode, x.stdout, x.stderr))
block.die(), soft.die()

# ---- no prefill worker ----

p = P()
r = router(workers=[p, d])
right(r.ask(Q), Q)
p.die()
r.until("workers_ready", 1)
t0 = time.time()
got = r.ask(S)
res = results(got)[0]
ok(right(got, S) and res["mode"] == "local" and res["fallback"].startswith("no_prefill_worker") and p.name in res["fallback"] and 0.8 < time.time() - t0 < 3, "none is there for a second: decode does it alone", (got, time.time() - t0))
c = r.client(S)
time.sleep(0.2)
q = P(register=r.path)
c.s.shutdown(1)
got = list(c.records())
ok(right(got, S) and results(got)[0]["mode"] == "remote" and len(q.requests) == 1, "one that comes in time is used", got)
checked(r, "no prefill", q, d)

for wait in ("1s", "300ms", "30ms"):
    p, d = P(), D()
    r = router("--policy", "fixed", "--wait", wait, workers=[p, d])
    p.die()
    r.until("workers_ready", 1)
    got = r.ask(*[dict(S, id=i) for i in range(3)])
    ok([(x["finish_reason"], x["mode"]) for x in results(got)] == [("length", "local")] * 3, f"decode does it alone before a run that waits {wait} is blocked", got[-3:])
    checked(r, f"no prefill, {wait}", d)

# ---- rolling update ----

old, new = (P(epoch=1), D(epoch=1)), [P(epoch=2), None]
r = router(workers=[*old, new[0]])
got = r.ask(*[dict(S, id=i) for i in range(10)])
ok(len(results(got)) == 10 and not new[0].requests, "an epoch that is not complete gets nothing", len(new[0].requests))
hold = threading.Event()
old[1].taken = lambda c, req: (hold.wait(10), old[1].whole(c, req))
c = r.client(*[dict(S, id=i) for i in range(5)])
until(lambda: len(old[1].requests) == 15)
new[1] = D(epoch=2, register=r.path)
r.until("workers_ready", 4)
got = r.ask(*[dict(S, id=i) for i in range(10)])
ok(len(results(got)) == 10 and len(new[0].requests) == 10 and len(new[1].requests) == 10 and len(old[1].requests) == 15, "once it is, all new runs", (len(new[0].requests), len(old[1].requests)))
hold.set()
c.s.shutdown(1)
got = list(c.records())
ok(len(results(got)) == 5 and all(x["decode_worker"] == old[1].name for x in results(got)), "the old one finishes what it has", got)
pairs = {(x["chosen"]["p"], x["chosen"]["d"]) for x in r.events() if x["pd"] == "route"}
ok(pairs == {(old[0].name, old[1].name), (new[0].name, new[1].name)}, "and no KV crosses", pairs)
[w.die() for w in old]
ok(len(results(r.ask(*[dict(S, id=i) for i in range(5)]))) == 5 and r.ledger()["failed"] == 0, "then it can go")
checked(r, "rolling update", *new)

# ---- cancel ----

p, d = P(serve=slow), D()
d.on_cancel = lambda c, q: c.put(d.result(next(x for x in d.requests if x["run"] == q["run"]), [], finish="cancelled"))
r = router(workers=[p, d])
c = r.client(dict(S, cancel_token=bytes(16), run="01M8PAW1CACQM7WS4V0NE4983X"))
until(lambda: p.requests)
r.ask({"pd": "cancel", "v": 1, "run": "01M8PAW1CACQM7WS4V0NE4983X", "cancel_token": bytes(16)})
c.s.shutdown(1)
got = list(c.records())
ok([x["finish_reason"] for x in results(got)] == ["cancelled"] and until(lambda: len(p.cancels) == 1 and len(d.cancels) == 1), "a cancel goes to both", (got, p.cancels, d.cancels))
c = r.client(*[dict(S, id=i) for i in range(4)])
until(lambda: len(p.requests) == 5)
c.close()
ok(until(lambda: len(p.cancels) == 5 and len(d.cancels) == 5) and r.until("runs", 0) and r.ledger()["at_workers"] == 0, "so does the end of a client", (p.cancels, d.cancels))
checked(r, "cancel", p, d)

# ---- room ----

p, d = P(), D(blocks=20)
hold.clear()
d.taken = lambda c, req: (hold.wait(10), d.whole(c, req))
r = router(workers=[p, d])
c = r.client(*[{"id": i, "token_ids": list(range(1, 101)), "max_tokens": 60} for i in range(4)])
ok(until(lambda: len(d.requests) == 2) and r.until("queued", 2), "decode gets no more KV than it has room for, output counted", (len(d.requests), r.ledger()))
hold.set()
c.s.shutdown(1)
got = list(c.records())
ok(len(results(got)) == 4, "the rest comes after", len(got))
checked(r, "room", p, d)
tap.done()
