#!/usr/bin/env python3
"""pd-route when workers fail a run in ways that are rare: a prefill worker lost under policies that also run locally, twice, late; what counts against a path and
against the limits of fallbacks; who waits behind whom; and that each of these decisions is told. With workers that do as they are told."""
import threading
import time

import tap
from fake import at, checked, D, die, Fake, P, Prefill, results, right, router, silent, tmp, tokens_of, until
from tap import ok, records, run, trace

def error(action, message="no", klass="failed"):
    return lambda self, c, req: self.error(c, req, action, message, klass)


def of(r, kind):
    return [x for x in r.events() if x["pd"] == kind]


def why(r, run_id):
    """In words, and as rows."""
    return run(trace("why", run_id, r.trace)).stdout.decode(), records(run(trace("why", "--format", "json", run_id, r.trace)).stdout)


class Client:
    """Stays; what came is in .got."""

    def __init__(self, r, *recs):
        self.c, self.got = r.client(*recs), []
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for x in self.c.records():
            self.got.append(x)

    def of(self, kind):
        return [x for x in list(self.got) if x["pd"] == kind]


Q = {"id": "a", "prompt": "hello", "max_tokens": 6}
IDS = {"id": "a", "token_ids": list(range(1, 201)), "max_tokens": 6}
BUSY = {"prefill_tokens_ahead": 500000, "waiting": 9}    # with that at D, conditional goes elsewhere

# ---- a prefill worker is lost, and none is left: policies that also run locally ----

for policy in ("conditional", "threshold:16", "dynamo:16", "llmd:16"):
    for serve, kind in ((die, "prefill_worker_gone"), (error("retry"), "prefill_failed")):
        p, d = P(serve=serve), D(load=BUSY if policy == "conditional" else None)
        r = router("--policy", policy, workers=[p, d])
        time.sleep(0.2)                 # what it reports twice is believed
        got = r.ask(IDS)
        ok(len(p.requests) == 1 and right(got, IDS) and results(got)[0]["mode"] == "local" and results(got)[0]["fallback"].startswith(kind) and r.p.poll() is None,
           f"{policy}, {kind}: the one prefill worker fails, its decode worker computes", (got, len(p.requests), r.p.poll()))
        checked(r, policy, p, d)

# ---- a second one: what came of it is told of that ----

lock, order = threading.Lock(), []


def first_refuses(self, c, req):
    with lock:
        order.append(self)
        n = len(order)
    self.error(c, req, "retry") if n == 1 else self.prefill(c, req)


p, d = [P(serve=first_refuses) for _ in range(2)], D()
r = router(workers=p + [d])
got = r.ask(Q)
a, b = sorted(of(r, "route"), key=lambda x: x["attempt"])
o = of(r, "outcome")[0]
ok(right(got, Q) and (a["attempt"], b["attempt"]) == (1, 2) and [a["chosen"]["p"], b["chosen"]["p"]] == [w.name for w in order] and a["op"] == b["op"], "a second prefill worker, by the same op", (a, b))
ok(o["attempt"] == 2 and o["p"] == order[1].name and o["mode"] == "remote", "the outcome is of the second", o)
words, rows = why(r, o["run"])
ok(["outcome" in x for x in rows] == [False, True] and words.count("\noutcome ") == 1, "and `why` tells it there alone", (words, rows))
checked(r, "second", *p, d)

# ---- late, and past the limits ----

LONG = dict(Q, prompt="x" * 400)        # counts as 101 tokens; a tenth of 128 blocks of 16 has room for two
p, d = P(serve=Prefill.answer), D(blocks=128)
d.taken = lambda c, req: None
r = router("--wait", "1500ms", workers=[p, d])
c = Client(r, *[dict(LONG, id=i) for i in range(6)])
ok(until(lambda: len(p.requests) == 6 and len(d.pending) == 6, 5), "six runs wait for KV that is published")
time.sleep(0.2)
p.die()
ok(until(lambda: r.ledger()["fallbacks_now"] == 2, 5), "their prefill worker dies: its decode worker computes as many as it may", r.ledger())
ok(until(lambda: len(d.cancels) == 4, 5) and until(lambda: len(c.of("result")) == 4, 8) and all(x["finish_reason"] == "shed" for x in c.of("result")), "the others are shed", c.got)
local = [q for q in d.requests if q["route"]["mode"] == "local"]
ok(len(local) == 2, "it never had more than two to compute", len(local))
for q in local:
    d.whole(d.conns[-1], q)
ok(until(lambda: len(c.of("result")) == 6, 5) and r.until("fallbacks_now", 0), "those two come to their end, and are counted no more", (c.got[-1:], r.ledger()))
ended = c.of("error")[0]["run"]
words, rows = why(r, ended)
last = [x for x in of(r, "route") if x["run"] == ended][-1]
ok(last["cause"].startswith("shed: the workers compute as much for others as they may") and last["attempt"] > 1 and "shed: " in words, "what was shed has a decision that says so", (words, last))
x = run(trace("replay", "--expect-identical", r.trace))
ok(x.returncode == 0, "all of them can be made again", x.stdout + x.stderr)
checked(r, "late", d)


def by_itself(self, c, req):
    """It did not get the KV, and says so at the end."""
    res = self.result(req, tokens_of(req))
    res.update(mode="local", fallback="out_of_blocks: so it says")
    c.put(res)


p, d = P(), D()
d.taken = lambda c, req: by_itself(d, c, req)
r = router("--fallback-rate", "0.5", "--wait", "2s", workers=[p, d])
got = [results(r.ask(dict(Q, id=i)))[0]["mode"] for i in range(3)]
p.serve = error("abort")
x = r.ask(Q)
ok(got == ["local"] * 3 and results(x)[0]["finish_reason"] == "shed" and "the rate of fallbacks" in [y for y in x if y["pd"] == "error"][0]["message"], "those that a decode worker declares count too", x)
ok(r.ledger()["fallbacks_now"] == 0, "and are over when they are told", r.ledger())
checked(r, "declared", p, d)

# ---- at most one fallback a run ----


def publish_then(what):
    def go(self, c, req):
        self.answer(c, req)
        time.sleep(0.1)
        what(self)
    return go


lock, order = threading.Lock(), []


def each(*serves):
    def one(self, c, req):
        with lock:
            n = len(order)
            order.append(self)
        serves[n](self, c, req)
    return one


serve = each(publish_then(lambda w: w.die()), error("abort", "no more"))
p, ds = [P(serve=serve) for _ in range(2)], [D(), D()]
for x in ds:
    x.taken = lambda c, req: None
r = router(workers=p + ds)
c = Client(r, Q)
ok(until(lambda: any(q["route"]["mode"] == "local" for x in ds for q in x.requests), 5), "a run falls back")
next(x for x in ds if x.requests).die()
ok(until(lambda: len(c.of("result")) == 1, 5), "its decode worker dies: it is done again, with a prefill worker that fails it too", c.got)
ok(len(order) == 2 and c.of("result")[0]["finish_reason"] == "shed" and "has fallen back before" in c.of("error")[0]["message"] and c.of("error")[0]["retry_after_ms"] >= 100, "a second time it is shed", c.got)
checked(r, "one", *p, *ds)

# ---- what is no fault of the path ----

p, d = P(serve=error("abort", "the deadline of 5 ms has passed", "timeout")), D()
r = router(workers=[p, d])
for i in range(4):
    r.ask(dict(Q, id=i))
p.serve = Prefill.prefill
ok(r.ledger()["breakers_open"] == 0 and results(r.ask(Q))[0]["mode"] == "remote", "a request's own limits, passed in prefill, open no breaker", r.ledger())
p.serve = lambda w, c, req: w.error(c, req, "retry", "it does not reach its decode worker", "timeout")
for i in range(3):
    r.ask(dict(Q, id=i))
ok(r.ledger()["breakers_open"] == 1, "a decode worker that is not reached does", r.ledger())
checked(r, "prefill's limits", p, d)
for limit, opens in ((1, 0), (60000, 1), (None, 1)):
    p, d = P(), D()

    def late(c, req):
        res = d.result(req, tokens_of(req))
        res.update(mode="local", fallback="transfer_timeout: it took too long")
        c.put(res)

    d.taken = late
    r = router(workers=[p, d])
    for i in range(3):
        r.ask(dict(Q, id=i, **({"timeouts_ms": {"transfer": limit}} if limit else {})))
    ok(r.ledger()["breakers_open"] == opens, f"a transfer that is late by a limit of {limit} ms: {opens} open", r.ledger())
    checked(r, "transfer's limits", p, d)

# ---- a decode worker is lost with the probe of a breaker ----

p, d = P(), D()
d.taken = lambda c, req: d.put_failed(c, req)


def put_failed(c, req):
    res = d.result(req, tokens_of(req))
    res.update(mode="local", fallback="kv_failed: so it says")
    c.put(res)


d.put_failed = put_failed
file = at("ledger")
r = router("--ledger", file, workers=[p, d])
for i in range(3):
    r.ask(dict(Q, id=i))
ok(r.ledger()["breakers_open"] == 1, "a breaker is open")
p.serve, d.taken = silent, d.whole
time.sleep(1.3)
n = len(p.requests)
c = Client(r, Q)
ok(until(lambda: len(p.requests) == n + 1, 5), "a probe goes")
p.serve = Prefill.prefill
d.die()
ok(r.until("queued", 1), "its decode worker dies", r.ledger())
d.start()
ok(until(lambda: len(c.of("result")) == 1, 8) and c.of("result")[0]["mode"] == "remote", "and comes back: the next probe may go there", c.got)
ok(r.ledger()["kv_unread_runs"] == 0 and r.ledger()["at_workers"] == 0, "nothing is held", r.ledger())
checked(r, "probe", p, d)

# ---- who waits behind whom ----


class A(Fake):
    def __init__(self, **kw):
        super().__init__(at("a"), **kw)


def ids(n, **kw):
    return dict({"id": f"n{n}", "token_ids": list(range(1, n + 1)), "max_tokens": 4}, **kw)


small, large = A(context=64), A()
r = router("--policy", "aggregated", "--wait", "3s", workers=[small, large])
large.die()
r.until("workers_ready", 1)
c = Client(r, ids(100), *[ids(101 + i) for i in range(20)])
ok(r.until("queued", 21), "prompts that only a worker takes that is gone")
t0 = time.time()
got = r.ask(*[dict(Q, id=i) for i in range(10)], *[ids(20 + i) for i in range(10)])
ok(len(results(got)) == 20 and all(x["finish_reason"] == "length" for x in results(got)) and time.time() - t0 < 1.5, "the others are not made to wait for it", (got[:2], time.time() - t0))
ok(until(lambda: len(c.of("result")) == 21, 8) and all(x["finish_reason"] == "blocked" for x in c.of("result")), "those are blocked", c.got[:2])
blocked = c.of("result")[0]["run"]
words, rows = why(r, blocked)
rec = [x for x in of(r, "route") if x["run"] == blocked]
ok(len(rec) == 1 and rec[0]["cause"].startswith("blocked") and "a context of 64" in words and "not reachable" in words and "with that the run ended" in words, "`why` of a blocked run says who was excluded", (words, rec))
checked(r, "context", small)

small, large = A(context=64), A(max_runs=2, serve=silent)       # it takes one
r = router("--policy", "aggregated", workers=[small, large])
c = Client(r, *[ids(100 + i) for i in range(3)])
ok(until(lambda: len(large.requests) == 1 and r.until("queued", 2), 5), "a worker with a large context is full")
got = r.ask(*[dict(Q, id=i) for i in range(10)])
ok(len(results(got)) == 10, "the one beside it serves what it can", got[:2])
t0 = time.time()
got = r.ask(ids(70000))
ok(results(got)[0]["finish_reason"] == "error" and time.time() - t0 < 1, "and one that fits nowhere is told at once", got)
c.c.close()
large.die()
checked(r, "room", small)

small, large, d = P(blocks=4), P(max_runs=2, serve=silent), D()         # 64 tokens; one run
r = router(workers=[small, large, d])
c = Client(r, *[ids(100 + i) for i in range(3)])
ok(until(lambda: len(large.requests) == 1 and r.until("queued", 2), 5), "the one prefill worker that has blocks for them is full")
t0 = time.time()
got = r.ask(*[ids(20 + i) for i in range(10)])
ok([x["prefill_worker"] for x in results(got)] == [small.name] * 10 and time.time() - t0 < 1.5, "what the other has blocks for is not made to wait", (got[:2], time.time() - t0))
c.c.close()
large.die()
checked(r, "blocks", small, d)

# 64 tokens at once; 204 for others
p, small, large = P(), D(context=64), D(blocks=128)
large.taken = lambda c, req: None
r = router("--wait", "4s", workers=[p, small, large])
p.die()
r.until("workers_ready", 2)
c = Client(r, *[ids(100 + i) for i in range(3)])
ok(until(lambda: r.ledger()["fallbacks_now"] == 2 and len(large.requests) == 2, 5), "no prefill worker, and the decode worker that takes them computes as many as it may", r.ledger())
t0 = time.time()
got = r.ask(ids(20))
ok([(x["mode"], x["decode_worker"]) for x in results(got)] == [("local", small.name)] and time.time() - t0 < 2.5, "what an idle one takes does not wait behind them", (got, time.time() - t0))
c.c.close()
large.die()
checked(r, "behind", small)

# ---- decisions that were told of nowhere ----

p, d = P(serve=error("abort", "too long")), D()
r = router(workers=[p, d])
got = r.ask(Q)
a, b = sorted(of(r, "route"), key=lambda x: x["attempt"])
o = of(r, "outcome")[0]
ok(b["chosen"]["mode"] == "local" and b["fallback"].startswith("prefill_failed") and b["attempt"] == 2 and b["op"] == a["op"] and b["input"].get("local"), "that a decode worker computes the prompt is a decision", b)
ok(o["attempt"] == 2 and o["mode"] == "local", "and the outcome is of that", o)
x = run(trace("replay", "--expect-identical", r.trace))
ok(x.returncode == 0, "which can be made again", x.stdout + x.stderr)
checked(r, "alone", p, d)

# ---- KV that is late ----

class Timed(P):
    """Publishes in 10 ms; `lost` counts those whose KV does not arrive, `slow` is how long it takes."""
    lost, slow = 0, 0

    def prefill(self, c, req):
        c.put({"pd": "kv", "v": 1, "run": req["run"], "payload": None, "t": {"queue_us": 100, "prefill_us": 10000, "total_us": 10100, "cached_tokens": 0}})
        if self.lost:
            self.lost -= 1
            return
        time.sleep(self.slow)
        D.by_path[req["route"]["d"]["at"]].give(req["run"], req["route"]["op"])


class Weighed(D):
    """deaf: what it is told on the way comes when it has the KV already."""
    deaf = False

    def result(self, req, *a, **k):
        return dict(super().result(req, *a, **k), prompt_tokens=len(req["token_ids"]), ttft_ms=14.0, kv_bytes=1 << 20)

    def decode(self, c, req):
        if not (self.deaf and req["route"].get("again")):
            super().decode(c, req)


def late_set(*args, warm=40):
    p, d = Timed(), Weighed(serve=Weighed.decode)
    d.taken = d.whole
    p.serve = Timed.prefill
    r = router("--policy", "fixed", *args, workers=[p, d])
    for i in range(warm):
        r.ask({"id": i, "token_ids": [i + 1] * 100, "max_tokens": 3, "stream": True})
    return p, d, r


one = {"id": "late", "token_ids": [999] * 100, "max_tokens": 3, "stream": True}
p, d, r = late_set()
p.lost = 1
t0 = time.time()
got = r.ask(one)
took = time.time() - t0
x = results(got)[0]
ok(right(got, one) and 1 < took < 5 and x["mode"] == "local" and x["fallback"].startswith("transfer_slow: its KV is on its way for"), "KV that does not come is given up when computing is sooner", (took, x))
a, b = sorted((x for x in of(r, "route") if x["run"] == got[-1]["run"]), key=lambda x: x["attempt"])
l = b["late"]
ok(a["chosen"]["mode"] == "remote" and b["chosen"]["mode"] == "local" and b["attempt"] == 2 and b["fallback"].startswith("transfer_slow") and l["rest_us"] > l["local_us"] > 0 and
   l["since_us"] > 1000000 and l["way"][0] < l["since_us"], "which is a decision, with what it went by", b)
o = [x for x in of(r, "outcome") if x["run"] == b["run"]][0]
ok(o["attempt"] == 2 and o["mode"] == "local" and o["p"] is None and r.ledger()["fallbacks_now"] == 0, "the outcome is of it", o)
x = run(trace("replay", "--expect-identical", r.trace))
ok(x.returncode == 0 and "on its way for" in why(r, b["run"])[0], "it can be made again, and is told", x.stdout + x.stderr)
for i in range(2):
    p.lost = 1
    r.ask(dict(one, id=i, token_ids=[998 - i] * 100))
ok(r.ledger()["breakers_open"] == 1, "and counts against its path", r.ledger())
checked(r, "late", p, d)

p, d, r = late_set()
p.slow, d.deaf = 1.6, True
got = r.ask(one)
x = results(got)[0]
o = [x for x in of(r, "outcome") if x["run"] == got[-1]["run"]][0]
ok(right(got, one) and x["mode"] == "remote" and not x["fallback"] and o["attempt"] == 1 and o["mode"] == "remote" and o["p"] == p.name, "KV that comes while it is given up is used, and the outcome is of the first decision",
   (x, o))
checked(r, "late, and there", p, d)

p, d, r = late_set(warm=3)
p.slow = 1.6
got = r.ask(one)
ok(results(got)[0]["mode"] == "remote" and not any("late" in x for x in of(r, "route")), "by a guess nothing is given up", got[-1])
checked(r, "late, cold", p, d)

# ---- who registers with a record that is no good ----

d = D()
r = router("--gone-after", "300ms", workers=[d])
refused = []
for i in range(40):
    bad = dict(d.record(), listen=f"unix:{tmp.name}/nobody{i}", **({"capacity": 5} if i % 2 else {"fingerprint": "none"}))
    c = Client(r, bad)
    refused.append(until(lambda: c.of("error"), 5))
    c.c.close()
ok(all(refused), "is told so", refused)
ok(r.ledger()["workers"] == 1, "and is not kept for ever", r.ledger())
checked(r, "bad records", d)
tap.done()
