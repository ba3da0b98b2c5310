#!/usr/bin/env python3
"""pd-route with workers that do as they are told: who gets what, what is done when workers fail, what clients see of it. Every failure path, one by one."""
import json
import os
import signal
import socket
import threading
import time

import tap
from fake import at, checked, Fake, results, right, router, silent, tmp, tokens, tokens_of, until
from packed import msgpack
from tap import B, ok, run

Q = {"id": "a", "prompt": "hello", "max_tokens": 6}
S = dict(Q, stream=True)
TOKEN = bytes(range(16))

# ---- aggregated ----

a, b = Fake(at("a")), Fake(at("b"))
r = router(workers=[a, b])
got = r.ask(Q)
ok(r.ready == b"READY=1\n" and right(got, Q) and results(got)[0]["id"] == "a", "a request is answered", got)
got = r.ask(S)
ok(right(got, S), "with tokens when it asks for them", got)
route = (a.requests + b.requests)[0]["route"]
ok(route["mode"] == "aggregated" and route["policy"] == "aggregated" and route["p"] is None and len(route["op"]) == 16 and route["d"]["at"].startswith("unix:/"), "its worker is told how", route)
many = [None] * 8


def client(i):
    many[i] = r.ask(*[dict(S, id=k, prompt=f"p{i}.{k}") for k in range(25)])


threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
ok(all(sorted(x["id"] for x in results(m)) == list(range(25)) for m in many), "eight clients at once get an answer to each request", [len(m) for m in many])
ok(min(len(a.requests), len(b.requests)) > 50, "both workers have their share", (len(a.requests), len(b.requests)))
s = r.dial()
s.sendall(tap.lines([dict(S, id=5), Q]).encode())
s.shutdown(socket.SHUT_WR)
got = tap.records(b"".join(iter(lambda: s.recv(65536), b"")))
ok([x["id"] for x in results(got)] in ([5, "a"], ["a", 5]) and len(tokens(got)) == 6, "a client that writes JSON Lines is answered in it", got)
s = r.dial()
s.sendall(b'{"id":1,"prompt":"a","max_tokens":0}\nnot json\n{"pd":"kv"}\n{"id":2,"prompt":"a","max_tokens":2}\n')
s.shutdown(socket.SHUT_WR)
got = tap.records(b"".join(iter(lambda: s.recv(65536), b"")))
ok({x.get("id"): x["finish_reason"] for x in results(got)} == {1: "error", None: "error", 2: "length"} and sum(x["pd"] == "error" for x in got) == 3,
   "a bad request fails alone, with an error and a result", got)
RUN = "01M8PAW1CACQM7WS4V0NE4983X"
got = r.ask(dict(Q, run=RUN), dict(Q, run=RUN, id="b"))
ok({x["id"]: x["finish_reason"] for x in results(got)} == {"a": "length", "b": "error"} and results(got)[0]["run"] == RUN or results(got)[1]["run"] == RUN, "a run is not begun twice", got)
got = r.ask(dict(Q, n=3))
ok(sorted(x["choice"] for x in results(got)) == [0, 1, 2] and all(right(got, dict(Q, n=3), i) for i in range(3)), "a result a choice", got)


def odd(self, c, req):
    c.put(dict(Fake.token(req, 0), later={"kept": [1, 2.5, None]}))
    self.whole(c, req, first=1)


a.serve = b.serve = odd
got = r.ask(S)
ok(right(got, S) and [x for x in got if x["pd"] == "token"][0]["later"] == {"kept": [1, 2.5, None]}, "what is not known in a token record passes unchanged", got)
a.serve = b.serve = Fake.whole
slow = dict(a=0.0)


def after(self, c, req):
    time.sleep(0.3)
    self.whole(c, req)


a.serve = b.serve = after
t0 = time.time()
got = r.ask(dict(S, id=9))
res = results(got)[0]
ok(250 < res["e2e_ms"] < 3000 and 250 < res["ttft_ms"] <= res["e2e_ms"], "the times of a result are its client's", res)
a.serve = b.serve = Fake.whole
checked(r, "aggregated")
ev = r.events()
routes = [x for x in ev if x["pd"] == "route"]
ok(len(routes) > 200 and {x["chosen"]["d"] for x in routes} == {a.name, b.name} and all(len(x["d"]) == 2 and x["policy"] == "aggregated" for x in routes), "each decision is in the trace", routes[:1])
a.die(), b.die()

# ---- load ----

a, b = Fake(at("a"), serve=silent, max_runs=5), Fake(at("b"), serve=silent, max_runs=5, load={"prefill_tokens_ahead": 4000})
r = router(workers=[a, b])
c = r.client(*[dict(Q, id=i) for i in range(12)])
ok(until(lambda: len(a.requests) == 4 and len(b.requests) == 4) and r.until("queued", 4), "no worker gets more than it takes in; the rest waits", (len(a.requests), len(b.requests), r.ledger()))
first = [x["id"] for x in a.requests[:3]]
ok(first == [0, 1, 2], "the one that reports less ahead goes first", (first, [x["id"] for x in b.requests]))
a.serve = b.serve = Fake.whole
for w in (a, b):
    for q in list(w.requests):
        w.whole(next(k for k in w.conns if k.s.fileno() >= 0 and k is w.conns[-1]), q)
c.s.shutdown(socket.SHUT_WR)
got = list(c.records())
ok(sorted(x["id"] for x in results(got)) == list(range(12)), "and goes on when there is room", got)
checked(r, "load")
a.die(), b.die()

# ---- decode workers fail ----


def die_after(n):
    """The first that gets it brings n tokens, and is dead."""
    def serve(self, c, req):
        if n:
            self.whole(c, req, until=n, results=False)
            time.sleep(0.05)
        self.die()
    return serve


def pair(serve, *args, **kw):
    """Two workers; the one that is asked first does as `serve` says, the other is well."""
    lock, used = threading.Lock(), []

    def first(self, c, req):
        with lock:
            mine = not used
            used.append(self)
        serve(self, c, req) if mine else self.whole(c, req)
    w = [Fake(at("a"), serve=first, **kw), Fake(at("b"), serve=first, **kw)]
    return w, router(*args, workers=w), used


for q, n, what in ((Q, 0, "before it said anything"), (S, 0, "before its first token"), (dict(Q, n=3), 0, "with three choices")):
    w, r, used = pair(die_after(n))
    got = r.ask(q)
    ok(all(right(got, q, i) for i in range(q.get("n", 1))) and len(used) == 2 and r.ledger()["retries"] == 1, f"decode worker dies {what}: another one", got)
    checked(r, what)
w, r, used = pair(die_after(3))
got = r.ask(S)
res = results(got)[0]
second = used[1].requests[-1]["route"]
ok(right(got, S) and res["mode"] == "local" and res["fallback"].startswith("migrated"), "it dies while streaming: the stream goes on elsewhere, no token twice, none missing", got)
ok(second["resume"] == b"".join(t.to_bytes(4, "little") for t in tokens_of(S)[:3]) and second["mode"] == "local" and second["fallback"].startswith("migrated"), "from what went out", second)
checked(r, "migration")
ev = [x["state"] for x in r.events() if x["pd"] == "event" and x.get("run") == res["run"]]
ok(ev == ["accepted", "route_selected", "streaming", "streaming", "migrated", "route_selected", "streaming", "completed"], "as the trace tells", ev)
w, r, used = pair(die_after(3))
got = r.ask(dict(Q, stream=False, n=1))
ok(right(got, Q) and results(got)[0]["fallback"] is None and used[1].requests[-1]["route"].get("resume") is None, "whose tokens nobody saw begins again", got)
checked(r, "again")
w, r, used = pair(die_after(2))
got = r.ask(dict(S, n=2))
ok([x["finish_reason"] for x in results(got)] == ["error"] * 2 and any("n = 1" in x.get("message", "") for x in got) and
   all(x["tokens"] == [t for _, t, _ in tokens(got, x["choice"])] for x in results(got)), "several choices in mid-stream: a typed error, and what there was", got)
checked(r, "choices")


def gap(self, c, req):
    c.put(Fake.token(req, 0), Fake.token(req, 2))


w, r, used = pair(gap)
got = r.ask(S)
ok(right(got, S) and until(lambda: used[0].cancels), "a worker that leaves out a position loses the run", got)
checked(r, "gap")


def twice(self, c, req):
    c.put(Fake.token(req, 0), Fake.token(req, 0), Fake.token(req, 1), Fake.token(req, 0))
    self.whole(c, req, first=1)
    self.whole(c, req)


w, r, used = pair(twice)
got = r.ask(S)
ok(right(got, S), "a worker that repeats itself is heard once", got)
checked(r, "repeats")
for action, n in (("reroute", 2), ("retry", 2), ("abort", 1)):
    w, r, used = pair(lambda self, c, req: self.error(c, req, action))
    got = r.ask(S)
    ok((right(got, S) and len(got) == 7) if n == 2 else ([x["pd"] for x in got] == ["error", "result"] and len(used) == 1), f"an error whose action is {action}", got)
    checked(r, action)


def poison(self, c, req):
    self.die()


w = [Fake(at("w"), serve=poison) for _ in range(5)]
r = router("--attempts", "3", workers=w)
got = r.ask(Q)
ok(results(got)[0]["finish_reason"] == "error" and sum(not x.alive for x in w) == 3 and "3 attempts" in got[0]["message"], "a request that kills workers kills no more than it may", got)
checked(r, "poison")
[x.die() for x in w if x.alive]

# a worker that comes back under the same name
a = Fake(at("a"), serve=die_after(2))
r = router("--wait", "8s", workers=[a])
c = r.client(S)
ok(until(lambda: not a.alive), "the only worker dies in mid-stream")
b = Fake(a.path)
c.s.shutdown(socket.SHUT_WR)
got = list(c.records())
ok(right(got, S) and b.requests[0]["route"]["resume"], "and the stream goes on when it is back", got)
checked(r, "back")
b.die()
go = threading.Event()


def on_word(self, c, req):
    self.whole(c, req, until=2, results=False)
    go.wait(10)
    self.die()


a = Fake(at("a"), serve=on_word)
r = router("--wait", "300ms", workers=[a])
c = r.client(S)
until(lambda: a.requests)
b = Fake(at("b"), numerics="fake-2", register=r.path)
r.until("workers_ready", 2)
go.set()
c.s.shutdown(socket.SHUT_WR)
got = list(c.records())
ok(results(got)[0]["finish_reason"] == "error" and results(got)[0]["tokens"] == tokens_of(S)[:2] and any("numerics fake-2" in x.get("message", "") for x in got) and not b.requests,
   "where nobody has the same numerics it ends with an error that says so", got)
checked(r, "numerics")
b.die()

# ---- silence ----

a, b = Fake(at("a"), serve=silent), Fake(at("b"))
r = router("--suspect-after", "200ms", "--gone-after", "700ms", workers=[a, b])
b.beats = False
time.sleep(0.4)
n = len(b.requests)
c = r.client(*[dict(S, id=i) for i in range(3)])
ok(until(lambda: len(a.requests) == 3) and len(b.requests) == n, "a silent worker gets nothing new", (len(a.requests), len(b.requests)))
b.beats = True
time.sleep(0.15)
a.beats = False
c.s.shutdown(socket.SHUT_WR)
got = list(c.records())
ok(sorted(x["id"] for x in results(got)) == [0, 1, 2] and len(tokens(got)) == 18 and len(b.requests) == 3, "and loses what it has when it counts as gone", got)
err = checked(r, "silence")
ok("no heartbeat for" in err and "counts as gone" in err, "which is told", err)
a.die(), b.die()

# ---- drain of a worker ----

a, b = Fake(at("a"), serve=silent, beat=0.2), Fake(at("b"), serve=silent, beat=0.2)
r = router(workers=[a, b])
c = r.client(S)
until(lambda: a.requests or b.requests)
gone, other = (a, b) if a.requests else (b, a)
other.serve = Fake.whole
gone.state = "draining"
k = r.client(*[dict(Q, id=i) for i in range(4)])    # some of these meet a worker that has not been heard to drain
r.until("workers_ready", 1)
for q in list(gone.requests)[1:]:
    gone.error(gone.conns[-1], q, "reroute")
k.s.shutdown(socket.SHUT_WR)
got = list(k.records())
ok(len(results(got)) == 4 and not [x for x in got if x["pd"] == "error"], "what a draining worker sends back goes to another", got)
got = r.ask(*[dict(Q, id=i) for i in range(4)])
n = len(gone.requests)
ok(len(results(got)) == 4 and not [x for x in results(got) if x["finish_reason"] != "length"], "a worker that drains gets nothing more", got)
gone.whole(gone.conns[-1], gone.requests[0])
gone.conns[-1].close()
c.s.shutdown(socket.SHUT_WR)
got = list(c.records())
ok(right(got, S) and len(gone.requests) == n and results(got)[0]["decode_worker"] == gone.name, "and finishes what it has", got)
a.serve = b.serve = silent
gone.state = "ready"
r.until("workers_ready", 2)
gone.state = other.state = "ready"
c = r.client(S)
n = len(a.requests) + len(b.requests)
until(lambda: any(x["run"] for w in (a, b) for x in w.requests[-1:] if x.get("stream") and x is not gone.requests[0]))
holder = a if a.requests and a.requests[-1].get("stream") and a.requests[-1] is not gone.requests[0] else b
rest = b if holder is a else a
rest.serve = Fake.whole
holder.state = "draining"
time.sleep(0.3)
[k.close() for k in list(holder.conns)]
c.s.shutdown(socket.SHUT_WR)
got = list(c.records())
ok(right(got, S) and results(got)[0]["decode_worker"] == rest.name, "what it had not read when it closed goes to another", got)
checked(r, "drain of a worker")
a.die(), b.die()

# ---- epochs ----

old, new = Fake(at("o"), epoch=1), Fake(at("n"), epoch=2)
r = router(workers=[old])
ok(right(r.ask(Q), Q) and len(old.requests) == 1, "the old epoch serves while it is alone")
r.stop()
r = router(workers=[old, new])
n = len(old.requests)
ok(all(right(r.ask(dict(Q, id=i)), Q) for i in range(5)) and len(new.requests) == 5 and len(old.requests) == n, "new runs go to the newest epoch", (len(old.requests) - n, len(new.requests)))
new.state = "draining"
until(lambda: right(r.ask(Q), Q) and len(old.requests) > n, 3)
ok(len(old.requests) > n, "unless it is not ready")
rows = [x["excluded"] for y in r.events() if y["pd"] == "route" for x in y["d"] if x["excluded"]]
ok("epoch 1, new runs go to 2" in rows and "draining" in rows, "with the reason in the trace", rows)
checked(r, "epochs")
old.die(), new.die()

# ---- nobody ----

r = router("--wait", "300ms", "--policy", "aggregated", "--worker", f"unix:{tmp.name}/nobody")
t0 = time.time()
got = r.ask(Q)
res = results(got)[0]
ok(res["finish_reason"] == "blocked" and [x["reason"] for x in res["excluded"]] == ["has not registered"] and 0.25 < time.time() - t0 < 4, "no worker: blocked, with the list", got)
t0 = time.time()
got = r.ask(dict(Q, deadline_ms=60))
ok(results(got)[0]["finish_reason"] == "blocked" and time.time() - t0 < 0.28, "or at its deadline, which is sooner", (got, time.time() - t0))
c = r.client(Q)
time.sleep(0.1)
late = Fake(at("l"), register=r.path)
c.s.shutdown(socket.SHUT_WR)
got = list(c.records())
ok(right(got, Q) and r.ledger()["workers"] == 2, "a worker that registers meanwhile gets it", got)
got = r.ask(dict(Q, adapter="x"))
ok(results(got)[0]["finish_reason"] in ("error", "blocked") and "adapter 'x'" in got[0]["message"], "what no worker has is said at once", got)
checked(r, "nobody")
late.die()

# ---- cancel ----


def some(self, c, req):
    self.whole(c, req, until=2, results=False)


a = Fake(at("a"), serve=some)
a.on_cancel = lambda c, q: c.put(a.result(next(x for x in a.requests if x["run"] == q["run"]), tokens_of(S)[:2], finish="cancelled"))
r = router(workers=[a])


def cancel_of(run_, token=TOKEN, **more):
    return dict({"pd": "cancel", "v": 1, "run": run_}, **({"cancel_token": token} if token else {}), **more)


c = r.client(dict(S, run=RUN, cancel_token=TOKEN))
until(lambda: a.requests)
q = r.ask(cancel_of(RUN, None), cancel_of(RUN, bytes(16)), cancel_of(RUN[:-1] + "Z"), cancel_of(RUN))
ok([x.get("state") for x in q] == [None, None, "unknown", "cancelled"] and "missing" in q[0]["message"] and "not that of run" in q[1]["message"], "a run is cancelled by who has its token", q)
c.s.shutdown(socket.SHUT_WR)
got = list(c.records())
ok([x["finish_reason"] for x in results(got)] == ["cancelled"] and len(tokens(got)) == 2 and results(got)[0]["tokens"] == tokens_of(S)[:2], "its client gets what there was", got)
c = r.client(dict(S, run=RUN[:-1] + "Y"))
until(lambda: len(a.requests) == 2)
c.put(cancel_of(RUN[:-1] + "Y", None))
c.s.shutdown(socket.SHUT_WR)
got = list(c.records())
ok([x["finish_reason"] for x in results(got)] == ["cancelled"], "its own client needs no token", got)
n = len(a.cancels)
c = r.client(*[dict(S, id=i) for i in range(3)])
until(lambda: len(a.requests) == 5)
c.close()
ok(until(lambda: len(a.cancels) == n + 3) and r.until("runs", 0), "a client that is gone has its runs cancelled", (len(a.cancels) - n, r.ledger()))
a.on_cancel = lambda c, q: None
c = r.client(dict(S, run=RUN[:-1] + "W"))
until(lambda: len(a.requests) == 6)
c.put(cancel_of(RUN[:-1] + "W", None))
t0 = time.time()
c.s.shutdown(socket.SHUT_WR)
got = list(c.records())
ok([x["finish_reason"] for x in results(got)] == ["cancelled"] and results(got)[0]["tokens"] == tokens_of(S)[:2] and 0.8 < time.time() - t0 < 2,
   "a worker that does not confirm is not waited for longer than a second", (got, time.time() - t0))
ok(r.until("runs", 0) and r.ledger()["at_workers"] == 0, "and nothing is held", r.ledger())
checked(r, "cancel")
a.die()

# ---- idempotency ----

a = Fake(at("a"), serve=some)
r = router("--idempotency-ttl", "1500ms", workers=[a])
K = dict(S, idempotency_key="k1", seed=1)
c1 = r.client(dict(K, id=1))
until(lambda: a.requests)
c2 = r.client(dict(K, id=2))
c3 = r.client(dict(K, id=3, stream=False))
time.sleep(0.1)
req = a.requests[0]
a.conns[-1].put(*[Fake.token(req, i) for i in range(2, 6)], a.result(req, tokens_of(req)))
out = []
for c in (c1, c2, c3):
    c.s.shutdown(socket.SHUT_WR)
    out.append(list(c.records()))
ok(len(a.requests) == 1 and right(out[0], K) and right(out[1], K) and right(out[2], Q), "who repeats a key joins the run, and gets the tokens from the first on", out)
ok([results(x)[0]["id"] for x in out] == [1, 2, 3] and len({results(x)[0]["run"] for x in out}) == 1, "with his own id")
got = r.ask(dict(K, id=4))
ok(right(got, K) and results(got)[0]["id"] == 4 and len(a.requests) == 1, "after its end it is told again", got)
got = r.ask(dict(K, id=5, max_tokens=7))
ok(results(got)[0]["finish_reason"] == "error" and "another request" in got[0]["message"], "another request with the key is refused", got)
n = len(a.cancels)
c = r.client(dict(K, idempotency_key="k2"))
until(lambda: len(a.requests) == 2)
c.close()
time.sleep(0.1)
c = r.client(dict(K, idempotency_key="k2"))
time.sleep(0.1)
req = a.requests[1]
a.conns[-1].put(*[Fake.token(req, i) for i in range(2, 6)], a.result(req, tokens_of(req)))
c.s.shutdown(socket.SHUT_WR)
got = list(c.records())
ok(right(got, K) and len(a.requests) == 2 and len(a.cancels) == n, "a run with a key outlives its client, who may come back", got)
a.serve = Fake.whole
ok(until(lambda: r.ledger()["keys"] == 0, 5) and right(r.ask(K), K) and len(a.requests) == 3, "and is forgotten in time", r.ledger())
checked(r, "keys")
a.die()

# ---- time ----

a = Fake(at("a"), serve=silent, max_runs=2)
a.on_cancel = lambda c, q: c.put(a.result(next(x for x in a.requests if x["run"] == q["run"]), [], finish="cancelled"))
r = router(workers=[a])
c = r.client(Q)
until(lambda: a.requests)
for more, what, least in (({"deadline_ms": 200}, "its deadline", 0.2), ({"timeouts_ms": {"queue": 150}}, "timeouts_ms.queue", 0.15), ({"timeouts_ms": {"first_token": 250}}, "timeouts_ms.first_token", 0.25)):
    t0 = time.time()
    got = r.ask(dict(Q, **more))
    ok(results(got)[0]["finish_reason"] == "error" and got[0]["class"] == "timeout" and what in got[0]["message"] and least <= time.time() - t0 < least + 1,
       f"a run that waits ends at {what}", (got, time.time() - t0))
a.capacity["max_runs"] = 16
time.sleep(0.15)
n = len(a.cancels)
for more, what in (({"deadline_ms": 200}, "its deadline"), ({"timeouts_ms": {"first_token": 200}}, "timeouts_ms.first_token")):
    t0 = time.time()
    got = r.ask(dict(Q, **more))
    ok(results(got)[0]["finish_reason"] == "error" and what in got[0]["message"] and 0.2 < time.time() - t0 < 2, f"so does one at a worker that forgets: {what}", (got, time.time() - t0))
ok(until(lambda: len(a.cancels) == n + 2), "which is told to drop it", a.cancels)
ok(100 < [x for x in a.requests if "deadline_ms" in x][0]["deadline_ms"] <= 200, "what is left of a deadline goes to the worker", a.requests)
c.close()
checked(r, "time")
a.die()

# ---- who waits ----

gate = threading.Event()
order = []


def one_by_one(self, c, req):
    gate.wait(20)
    self.whole(c, req)


a = Fake(at("a"), serve=one_by_one, max_runs=1)
r = router(workers=[a])
c = r.client(dict(Q, id="first"))
until(lambda: a.requests)
c.put(*[dict(Q, id=f"{p}{x}", priority=p) for x in "ab" for p in (0, -200, 3, -100, 200, 100)])
k = r.client(dict(Q, id="other", priority=3), dict(Q, id="none"))
ok(r.until("queued", 14), "runs wait for a worker with room", r.ledger())
time.sleep(0.2)
gate.set()
[x.s.shutdown(socket.SHUT_WR) for x in (c, k)]
got = [list(x.records()) for x in (c, k)]
order = [x["id"] for x in a.requests]
want = ["first", "200a", "100a", "200b", "100b", "3a", "3b", "other", "0a", "0b", "none", "-200a", "-100a", "-200b", "-100b"]
ok(order == want, "who waits is taken by priority, a hundred at the most, then by age", order)
waited = [x["route"].get("waited_us", 0) for x in a.requests]
ok(waited[0] < 150000 < min(waited[1:]) <= max(waited) < 20e6, "and its worker is told how long it has waited", waited)
checked(r, "priority")
a.die()
gate.clear()
a = Fake(at("a"), serve=one_by_one, max_runs=1)
r = router(workers=[a])
T = {"queue": 5000, "prefill": 700, "transfer": 600, "first_token": 4000, "later": 1}
c = r.client(dict(Q, timeouts_ms=T))
until(lambda: a.requests)
c.put(dict(Q, timeouts_ms=T))
time.sleep(0.25)
gate.set()
c.s.shutdown(socket.SHUT_WR)
got = list(c.records())
at_once, late = [x["timeouts_ms"] for x in a.requests]
ok(4900 < at_once["queue"] <= 5000 and 3900 < at_once["first_token"] <= 4000 and 3000 < late["queue"] < 4800 and 2000 < late["first_token"] < 3800 and
   all({k: v for k, v in x.items() if k not in ("queue", "first_token")} == {"prefill": 700, "transfer": 600, "later": 1} for x in (at_once, late)),
   "workers are told what is left of the times that count from acceptance", a.requests)
checked(r, "times that are left")
a.die()
w, r, used = pair(die_after(2))
got = r.ask(dict(S, timeouts_ms=T))
ok(right(got, S) and "queue" in used[0].requests[0]["timeouts_ms"] and used[1].requests[0]["timeouts_ms"] == {"prefill": 700, "transfer": 600, "later": 1},
   "and of none of those once they are past", [x.requests for x in used])
checked(r, "times that are past")

# who has found nobody, and then somebody who is full
gate.clear()
r = router("--wait", "600ms", "--policy", "aggregated")
c = r.client(*[dict(Q, id=i) for i in range(4)])
r.until("queued", 4)
a = Fake(at("a"), serve=one_by_one, max_runs=1, register=r.path)
until(lambda: a.requests)
time.sleep(0.8)
ok(r.ledger()["queued"] == 3, "who waits for room is not blocked because nobody was there before", r.ledger())
gate.set()
c.s.shutdown(socket.SHUT_WR)
got = list(c.records())
ok([x["finish_reason"] for x in results(got)] == ["length"] * 4, "and is served", got)
checked(r, "room after nobody")
a.die()

# two decode workers: the stream of one is to go on, while others wait
go = threading.Event()


def one_then_die(self, c, req):
    self.whole(c, req, until=2, results=False)
    go.wait(20)
    self.die()


gate.clear()
a, b = Fake(at("a"), serve=one_then_die, max_runs=1), Fake(at("b"), serve=one_by_one, max_runs=1)
r = router(workers=[a, b])
c = r.client(*[dict(S, id=i) for i in range(4)])
until(lambda: a.requests and b.requests)
k = r.client(*[dict(Q, id=f"high{i}", priority=9) for i in range(3)])
r.until("queued", 5)
moves = a.requests[0]["id"]
go.set()
ok(until(lambda: not a.alive) and r.until("queued", 6), "a stream that is to go on waits with the others", r.ledger())
gate.set()
[x.s.shutdown(socket.SHUT_WR) for x in (c, k)]
got = [list(x.records()) for x in (c, k)]
ok([x["id"] for x in b.requests][1] == moves and "resume" in b.requests[1]["route"] and [x["id"] for x in b.requests][2:5] == ["high0", "high1", "high2"] and
   sorted(x["id"] for x in results(got[0])) == [0, 1, 2, 3] and len(tokens(got[0])) == 24, "and goes before them, whatever their priority", [x["id"] for x in b.requests])
checked(r, "a stream that waits")
b.die()

# ---- slow clients ----

a = Fake(at("a"))
r = router(workers=[a])
BIG = dict(S, max_tokens=20000)
slow = []
for i in range(3):
    k = r.client(*[dict(BIG, id=j) for j in range(4)])
    slow.append(k)
ok(all(right(r.ask(S), S) for _ in range(5)), "clients that do not read stop nobody else")
slow[0].s.shutdown(socket.SHUT_WR)
got = list(slow[0].records())
ok(len(results(got)) == 4 and len(tokens(got)) == 80000, "and who reads later gets all", len(got))
[k.close() for k in slow]
ok(r.until("runs", 0), "and then nothing is held", r.ledger())
checked(r, "slow")
a.die()

# ---- the end of the router ----

a = Fake(at("a"), serve=after)
r = router("--metrics", f"unix:{tmp.name}/m", workers=[a])
s = socket.socket(socket.AF_UNIX)
s.connect(f"{tmp.name}/m")
got = r.ask(S)
s.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
m = b"".join(iter(lambda: s.recv(65536), b"")).decode()
ok('pd_runs_total{end="completed"} 1' in m and 'pd_routes_total{mode="aggregated"} 1' in m and "pd_ttft_seconds_count 1" in m and "pd_runs_in_hand 0" in m, "metrics agree", m)
c = r.client(*[dict(S, id=i) for i in range(5)])
until(lambda: len(a.requests) == 6)
rc, err = r.stop()
got = list(c.records())
ok(rc == 0 and sorted(x["id"] for x in results(got)) == list(range(5)) and not os.path.exists(r.path), "SIGTERM: what is in hand is finished", (rc, err, got))
a.serve = silent
r = router(workers=[a])
c = r.client(S)
until(lambda: len(a.requests) == 7)
r.p.send_signal(signal.SIGTERM)
time.sleep(0.2)
rc, err = r.stop()
chk = run([f"{B}/bin/pd-trace", "check", r.trace])
ok(rc == 6 and chk.returncode == 0, "a second signal ends it, and the trace tells every end", (rc, err, chk.stdout))
a.die()

# ---- asking ----

# ---- what is in hand is bounded in bytes too ----

r = router("--wait", "60s")
c = r.client()
one = msgpack.packb(dict(Q, x="y" * (1 << 20)))
threading.Thread(target=lambda: c.s.sendall(one * 400), daemon=True).start()
def ledger():
    return json.loads(run([f"{B}/bin/pd-route", "--status", f"unix:{r.path}", "--format", "json"]).stdout)["ledger"]
until(lambda: ledger()["runs"] >= 256, 20)
time.sleep(0.3)
g = ledger()
ok(256 <= g["runs"] <= 260 and g["request_bytes"] < 262 << 20 and g["rss_bytes"] < 500 << 20, "400 requests of a megabyte: as many are read as 256 MiB hold", g)
a = Fake(at("a"), register=r.path)
until(lambda: ledger()["completed"] == 400, 60)
g = ledger()
ok(g["completed"] == 400 and g["runs"] == 0 and g["request_bytes"] == 0, "the others follow as runs end", g)
c.close()
a.die()
checked(r, "large requests")
long = dict(Q, idempotency_key="k" * 1025)
r = router("--wait", "100ms")
got = r.ask(long)
ok(results(got)[0]["finish_reason"] == "error" and "1024" in got[0]["message"], "a key is of a bounded length", got)
checked(r, "a long key")

a = Fake(at("a"))
r = router(workers=[a])
st = run([f"{B}/bin/pd-route", "--status", f"unix:{r.path}"])
ok(st.returncode == 0 and b"route@" in st.stdout and b"workers_ready            1" in st.stdout, "--status tells the ledger", st.stdout)
st = run([f"{B}/bin/pd-route", "--status", f"unix:{r.path}", "--format", "json"])
ok(json.loads(st.stdout)["ledger"]["workers"] == 1, "in JSON", st.stdout)
st = run([f"{B}/bin/pd-route", "--status", f"unix:{r.path}", "--format", "msgpack"])
ok(msgpack.unpackb(st.stdout)["worker"] == a.name, "in msgpack it tells the workers", st.stdout[:200])
st = run([f"{B}/bin/pd-route", "--status", f"unix:{tmp.name}/none", "--connect-timeout", "100ms"])
ok(st.returncode == 5 and tap.one_line(st.stderr), "or that nobody is there", (st.returncode, st.stderr))
checked(r, "asking")
a.die()
for args, why in ((["--listen", f"unix:{tmp.name}/u", "--policy", "best"], "--policy"), (["--listen", f"unix:{tmp.name}/u", "--worker", "tcp:x"], "--worker"), ([], "nothing to do"),
                  (["--listen", f"unix:{tmp.name}/u", "--wait", "3"], "--wait"), (["--check"], "of which workers"), (["--status", "unix:x", "--check"], "exclude"),
                  (["--listen", f"unix:{tmp.name}/u", "--attempts", "0"], "--attempts"), (["--listen", f"unix:{tmp.name}/u", "--worker", "unix:" + "x" * 200], "107 bytes"), (["--listen", f"unix:{tmp.name}/u", "--format", "json"], "--format")):
    x = run([f"{B}/bin/pd-route", *args], timeout=20)
    ok(x.returncode == 2 and why in x.stderr.decode() and tap.one_line(x.stderr), f"usage: {' '.join(args)[-60:]}", (x.returncode, x.stderr))
tap.done()
