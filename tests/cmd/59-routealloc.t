#!/usr/bin/env python3
"""An allocation refused in the router while it serves (make V=fault): each run comes out as without, or fails by a typed error or a connection that closes; the
router lives, serves the next one, holds nothing, has left nothing with a worker, and drains."""
import json
import os
import re
import socket
import tempfile
import threading
import time

import tap
from fake import Decode, Holder, Prefill, results, right, Router, tokens, tokens_of, until
from packed import msgpack
from tap import B, ok, run

tmp = tempfile.TemporaryDirectory()
V = os.environ.get("V", "")
if V == "tsan":
    print("1..0 # SKIP no fault points in V=tsan")
    raise SystemExit
FAULT = B if V else f"{B}/fault"        # of the plain build's own: V=fault, which `make check` has made
count = os.path.join(tmp.name, "count")
TOKEN = bytes(range(16))
PATIENCE = 12


def request(no, **kw):
    return dict({"id": no, "run": f"01M8PAW1CACQM7WS4V0NE498{no:02d}", "prompt": f"p{no}", "max_tokens": 6, "stream": True}, **kw)


MANY = [request(1), request(2, n=3), request(3, prompt="refused", stream=False), request(4, prompt="moves", logprobs=True),
        request(5, deadline_ms=20000, timeouts_ms={"queue": 19000, "first_token": 20000}), request(6, adapter="x"), request(7, max_tokens=0)]
MANY += [{k: v for k, v in request(8, token_ids=list(range(1, 60))).items() if k != "prompt"}]
KEYED, JOINS, AGAIN = [request(n, prompt="keyed", idempotency_key="k", run=request(10)["run"]) for n in (10, 11, 12)]
TEXT = request(20)
HELD, TOLD = request(30, prompt="held", cancel_token=TOKEN), request(31, prompt="held")
LAST = request(40)
OTHER_ENDS = {6: "error", 7: "error", 30: "cancelled", 31: "cancelled"}


def prefill(self, c, req):
    self.error(c, req, "retry") if req.get("prompt") == "refused" else self.prefill(c, req)


class P(Holder, Prefill):
    """Publishes what it holds, and loses an event."""

    def on_events(self, c, r):
        super().on_events(c, r)
        self.store(MANY[-1]["token_ids"])
        self.remove(MANY[-1]["token_ids"], 2)
        if len(self.asked) == 1:
            self.change += 1
            self.store([9] * 40)


class D(Decode):
    def decode(self, c, req):
        if req.get("prompt") == "moves" and not req["route"].get("resume"):
            self.whole(c, req, until=2, results=False)
            self.die()
        elif req.get("prompt") != "held":
            super().decode(c, req)

    def on_cancel(self, c, r):
        self.pending.pop(r["run"], None)
        c.put(*[self.result(x, [], finish="cancelled") for x in self.requests if x["run"] == r["run"]][:1])


class Client(threading.Thread):
    """Sends, half-closes, reads all: got, and whether it was left waiting."""

    def __init__(self, r, *records, text=False, late=()):
        super().__init__(daemon=True)
        self.r, self.records, self.text, self.late = r, records, text, late
        self.got, self.hung = [], True
        self.start()

    def run(self):
        data = b""
        try:
            s = self.r.dial()
            s.settimeout(PATIENCE)
            s.sendall(tap.lines(self.records).encode() if self.text else b"".join(msgpack.packb(x) for x in self.records))
            if self.late:
                until(lambda: self.late[0](), 3)
                s.sendall(b"".join(msgpack.packb(x) for x in self.late[1]))
            s.shutdown(socket.SHUT_WR)
            while piece := s.recv(1 << 16):
                data += piece
        except TimeoutError:
            return
        except OSError:
            pass
        if self.text:
            self.got = [json.loads(x) for x in data.decode().split("\n")[:-1]]
        else:
            u = msgpack.Unpacker(strict_map_key=False)
            u.feed(data)
            self.got = list(u)
        self.hung = False

    def fate(self, req):
        """same, error, closed; else what is wrong."""
        res = [x for x in results(self.got) if x.get("id") == req["id"]]
        mine = [x for x in self.got if x.get("run") == (res[0]["run"] if res else req["run"]) and (x["pd"] != "result" or x in res)]
        if self.hung:
            return "left waiting"
        for i in range(req.get("n", 1)):
            if [t[:2] for t in tokens(mine, i)] != list(enumerate(tokens_of(req, i)))[:len(tokens(mine, i))]:
                return f"wrong tokens {tokens(mine, i)}"
        if len({x["choice"] for x in res}) != len(res):
            return f"two results {res}"
        if req["id"] in OTHER_ENDS:
            return "same" if [x["finish_reason"] for x in res] == [OTHER_ENDS[req["id"]]] else "closed" if not res else self.typed(mine, res)
        if all(right(mine, req, i) for i in range(req.get("n", 1))):
            return "same"
        return "closed" if len(res) < req.get("n", 1) else self.typed(mine, res)

    def typed(self, mine, res):
        bad = [x for x in res if x["finish_reason"] == "error"]
        return "error" if bad and any(x["pd"] == "error" and x["class"] for x in mine) else f"untyped {mine}"


turn = 0


def one(when):
    """What became of each run, and what is not as it should be."""
    global turn
    turn += 1
    at = lambda name: os.path.join(tmp.name, f"{name}{turn}")
    workers = [P(at("p"), serve=prefill, beat=0.3), Prefill(at("q"), serve=prefill, beat=0.3), *[D(at(x), beat=0.3, serve=D.decode) for x in "def"]]
    decoders = workers[2:]
    r = Router(at("r"), "--wait", "3s", workers=workers, build=FAULT, env={"PD_FAULT": f"malloc:fail:{when}", "PD_FAULT_COUNT": count})
    try:
        if not r.ready:
            rc, err = r.stop()
            return ["not begun"], [] if rc == 8 and tap.one_line(err.encode()) else [f"status {rc}: {err}"]
        has = lambda run_: lambda: any(x["run"] == run_ for w in decoders for x in w.requests)
        clients = [(Client(r, *MANY), MANY), *[(Client(r, q), [q]) for q in (KEYED, JOINS, AGAIN)], (Client(r, TEXT, text=True), [TEXT]),
                   (Client(r, HELD), [HELD]), (Client(r, TOLD, late=(has(TOLD["run"]), [{"pd": "cancel", "v": 1, "run": TOLD["run"]}])), [TOLD])]
        Client(r, {"pd": "status", "v": 1, "follow": True}).join(0.01)
        until(has(HELD["run"]), 3)
        for _ in range(3):      # the first may be refused
            Client(r, {"pd": "cancel", "v": 1, "run": HELD["run"], "cancel_token": TOKEN}).join(PATIENCE)
        [c.join(PATIENCE + 1) for c, _ in clients]
        clients.append((Client(r, LAST), [LAST]))
        clients[-1][0].join(PATIENCE + 1)
        fates = [c.fate(q) for c, qs in clients for q in qs]
        bad = [(q["id"], f) for (q, f) in zip([q for _, qs in clients for q in qs], fates) if f not in ("same", "error", "closed")]
        bad += [] if r.p.poll() is None else ["the router is dead"]
        for key in ("runs", "queued", "at_workers"):
            r.until(key, 0, 3)
        held = {k: v for k, v in r.ledger().items() if k in ("runs", "queued", "at_workers") and v}
        bad += [held] if held else []
        left = lambda: [x for d in decoders if d.alive for x in d.pending.values() if x[0] in d.conns]
        bad += [] if until(lambda: not left(), 2) else ["left with a worker", left()]
        rc, err = r.stop()
        check = run([f"{B}/bin/pd-trace", "check", r.trace])
        bad += [] if rc == 0 else [f"status {rc}: {err[-1500:]}"]
        bad += [] if check.returncode == 0 else [check.stdout.decode()[-1500:], check.stderr.decode()[-500:]]
        return fates, bad
    finally:
        r.p.kill()
        r.err.close()
        [w.die() for w in workers if w.alive]


# ---- a run that never came to be gives back nothing that it did not take ----

Q = {"id": 1, "prompt": "x", "max_tokens": 4}


def quiet(when):
    """A pair of two fingerprints, and a router that allocates nothing but for who asks; what came of one request, and of the next."""
    global turn
    turn += 1
    p, d = Prefill(os.path.join(tmp.name, f"p{turn}"), beat=30), Decode(os.path.join(tmp.name, f"d{turn}"), beat=30, fp={"software": "pd 0.2"})
    r = Router(os.path.join(tmp.name, f"r{turn}"), "--worker", f"unix:{p.path}", "--worker", f"unix:{d.path}", build=FAULT, env={"PD_FAULT": f"malloc:fail:{when}", "PD_FAULT_COUNT": count + ".quiet"})
    time.sleep(0.2)
    got = r.ask(Q) if when < 10 ** 9 else []
    errors = [x["message"] for x in got if x["pd"] == "error"]
    mode = [x["mode"] for x in results(r.ask(Q))] if errors and "a run's choices" in errors[0] else None
    r.stop()
    [w.die() for w in (p, d) if w.alive]
    return mode


quiet(10 ** 9)
begun = int(re.search(r"malloc\D+(\d+)", open(count + ".quiet").read()).group(1))
mode = None
for when in range(begun - 10, begun + 60):
    if mode := quiet(when):
        break
ok(mode == ["remote"], "a run whose choices find no room is refused, and takes no worker's fingerprint with it", mode)

fates, bad = one(10 ** 9)
last = int(re.search(r"malloc\D+(\d+)", open(count).read()).group(1))
ok(set(fates) == {"same"} and not bad, f"{last} allocations, none refused", (fates, bad))
first = 1
if not os.environ.get("LONG"):
    step = max(1, last // 40)
else:
    step = 1
seen, wrong = {}, []
for when in range(first, last + 1, step):
    fates, bad = one(when)
    for f in set(fates):
        seen[f[:20]] = seen.get(f[:20], 0) + 1
    if bad:
        wrong.append((when, bad))
ok(not wrong, f"one of them refused, each {step}: {seen}", wrong)
ok(seen.get("same", 0) > len(range(first, last + 1, step)) / 2 and seen.get("error", 0) > 0, "and some were felt", seen)
tap.done()
