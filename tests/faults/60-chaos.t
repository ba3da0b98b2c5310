#!/usr/bin/env python3
"""Everything at once: clients of all manners on one set, whose workers are killed, stopped and drained at random moments meanwhile. Each request ends with exactly one
result a choice, which is that of an undisturbed run or a typed error; metrics can be read at any time; afterwards nothing is left.
CHAOS_SEED, CHAOS_N (requests a round), CHAOS_SLOW (a factor on waiting, for sanitizers)."""
import base64
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import traceback

from rig import ARGS, PLAIN, TINY, Set, msgpack, ok, tap

SEED, N, SLOW = int(os.environ.get("CHAOS_SEED", "1")), int(os.environ.get("CHAOS_N", "250")), float(os.environ.get("CHAOS_SLOW", "1"))
problems, counts, lock = [], {}, threading.Lock()


def problem(*what):
    with lock:
        problems.append(what)


def count(what):
    with lock:
        counts[what] = counts.get(what, 0) + 1


def request(i):
    q = {"prompt": f"Once upon a time there were {i} foxes " * (1 + i % 6), "max_tokens": 4 + i * 7 % 40, "temperature": 0.8 if i % 3 else 0, "seed": i}
    if i % 4 == 0:
        q.update(max_tokens=150, ignore_eos=True)
    if i % 5 == 1:
        q["n"] = 3
    if i % 7 == 2:
        q["stop"] = ["a", " the"]
    if i % 4 == 3:
        q.update(logprobs=True, top_logprobs=2)
    if i % 6 == 5:
        q["echo"] = True
    if i % 8 == 4:
        q.update(top_k=5, repetition_penalty=1.2)
    return q


POOL = [request(i) for i in range(24)]
REF = {}
for x in tap.results(tap.run([f"{PLAIN}/bin/pd-decode", "-m", TINY, *ARGS, "--kv-mem", "8MiB", "--format", "json"], tap.lines(dict(q, id=i) for i, q in enumerate(POOL))).stdout):
    REF.setdefault(x["id"], {})[x["choice"]] = x


class C:
    """A client, in msgpack or JSON."""

    def __init__(self, path, js=False):
        self.s = socket.socket(socket.AF_UNIX)
        self.s.connect(path)
        self.s.settimeout(60 * SLOW)
        self.js, self.u, self.rest = js, msgpack.Unpacker(strict_map_key=False), b""

    def send(self, *recs):
        self.s.sendall(b"".join(json.dumps(r).encode() + b"\n" if self.js else msgpack.packb(r) for r in recs))

    def some(self):
        """The next records; at the end: ConnectionError."""
        while True:
            data = self.s.recv(1 << 16)
            if not data:
                raise ConnectionError("closed")
            if self.js:
                *lines, self.rest = (self.rest + data).split(b"\n")
                out = [json.loads(x) for x in lines if x]
            else:
                self.u.feed(data)
                out = list(self.u)
            if out:
                return out

    def until(self, n):
        """All records up to the n-th result."""
        out = []
        while sum(r["pd"] == "result" for r in out) < n:
            out += self.some()
        return out


def judge(how, qi, q, recs):
    """The records of one request."""
    res, toks, errors = {}, {}, [r for r in recs if r["pd"] == "error"]
    for r in recs:
        c = r.get("choice", 0)
        if r["pd"] == "result":
            if c in res:
                problem(how, qi, "two results", r)
            res[c] = r
        elif r["pd"] == "token":
            t = toks.setdefault(c, [])
            if r["pos"] != len(t) or c in res:
                problem(how, qi, "position", r["pos"], "where", len(t), "is next")
            t.append(r)
    for c, ts in toks.items():
        if [t["token"] for t in ts] != REF[qi][c]["tokens"][:len(ts)]:
            problem(how, qi, "other tokens", [t["token"] for t in ts], REF[qi][c]["tokens"])
    if sorted(res) != list(range(POOL[qi].get("n", 1))):
        problem(how, qi, "results of choices", sorted(res))
    for c, r in res.items():
        want = REF[qi][c]
        count(r["finish_reason"])
        if r["finish_reason"] not in ("stop", "length"):
            if r["finish_reason"] not in ("error", "blocked", "shed", "cancelled") or (r["finish_reason"] != "cancelled" and not errors):
                problem(how, qi, "an end that is not typed", r)
            continue
        for k in ("tokens", "text", "finish_reason", "prompt_tokens", "completion_tokens", "logprobs"):
            if r.get(k) != want.get(k) and (k != "logprobs" or max(abs(a - b) for a, b in zip(r[k], want[k])) > 1e-5 or len(r[k]) != len(want[k])):
                problem(how, qi, k, "differ", r.get(k), want.get(k), r["mode"], r["fallback"])
        if q["stream"] and [t["token"] for t in toks.get(c, [])] != r["tokens"]:
            problem(how, qi, "streamed and told differ", len(toks.get(c, [])), len(r["tokens"]), r["fallback"])
        if q["stream"] and not q.get("stop") and not q.get("echo") and "".join(t["text"] for t in toks[c]) != r["text"]:
            problem(how, qi, "text streamed and told differ", "".join(t["text"] for t in toks[c]), r["text"], r["fallback"])


JUNK = [b"\xc1" * 50, b'{"prompt": ', b"{not json}\n" * 3, bytes(range(128, 256)), msgpack.packb(POOL[0])[:-3], b"\xdf\xff\xff\xff\xff", b"\n\n", b"[1,2]\n", b"\x81\xa2pd\xa5hello",
        msgpack.packb({"pd": "worker", "v": 1}), msgpack.packb({"pd": "cancel"}), msgpack.packb({"pd": "token", "run": "x"}), b"{" * 10000 + b"\n"]


def one(k, path, rnd):
    how = rnd.choice(["plain"] * 8 + ["cancel", "cancel_token", "close", "half", "deadline", "never", "key", "key_left", "junk", "pipeline", "large"])
    qi = rnd.randrange(len(POOL))
    q = dict(POOL[qi], id=f"{k}", stream=rnd.random() < 0.6)
    n = q.get("n", 1)
    c = C(path, rnd.random() < 0.4)
    more = []
    count(how)
    try:
        if how in ("plain", "half", "deadline", "large"):
            if how == "deadline":
                q["deadline_ms"] = rnd.choice([1, 1, 5, 20, 100])
            if how == "large":
                q["x"] = "y" * (3 << 20)
            c.send(q)
            if how == "half":
                c.s.shutdown(socket.SHUT_WR)
            judge(how, qi, q, c.until(n))
            if how == "half" and c.s.recv(1):
                problem(how, "goes on after the end")
        elif how in ("cancel", "cancel_token"):
            run, token = "0" + "".join(rnd.choice("0123456789ABCDEFGHJKMNPQRSTVWXYZ") for _ in range(25)), rnd.randbytes(16)
            c.send(dict(q, run=run, max_tokens=200, ignore_eos=True, cancel_token={"$b64": base64.b64encode(token).decode()} if c.js else token))
            time.sleep(rnd.random() * 0.05)
            t0 = time.time()
            if how == "cancel":
                c.send({"pd": "cancel", "v": 1, "run": run})
            else:
                more.append(C(path))
                for t in (rnd.randbytes(16), token):        # the first is a wrong one
                    more[0].send({"pd": "cancel", "v": 1, "run": run, "cancel_token": t})
                    kind = more[0].some()[0]["pd"]
                    if kind not in ("error", "status") or (t == token and kind == "error"):
                        problem(how, "answered by", kind)
            ends = {r["finish_reason"] for r in c.until(n) if r["pd"] == "result"}
            if time.time() - t0 > 5 * SLOW or not ends <= {"cancelled", "length", "stop", "error", "blocked"}:
                problem(how, ends, "after", time.time() - t0)
        elif how == "close":
            c.send(q)
            time.sleep(rnd.random() * 0.05)
        elif how == "never":
            c.send(*[dict(q, id=i, stream=True, max_tokens=100, ignore_eos=True) for i in range(20)])
            time.sleep(rnd.random())
        elif how in ("key", "key_left"):
            q["idempotency_key"] = f"{k} {rnd.random()}"
            more = [C(path, rnd.random() < 0.5) for _ in range(2)]
            for i, x in enumerate([c, *more]):
                x.send(dict(q, id=i))
            if how == "key_left":       # who brought it goes away
                time.sleep(rnd.random() * 0.02)
                c.s.close()
            got = [(i, x.until(n)) for i, x in enumerate([c, *more]) if how == "key" or i]
            more.append(C(path))
            more[-1].send(dict(q, id="late"))
            got.append(("late", more[-1].until(n)))
            runs = set()
            for i, recs in got:
                judge(how, qi, q, recs)
                runs |= {r["run"] for r in recs if r["pd"] == "result"}
                if {r["id"] for r in recs if r["pd"] == "result"} != {i}:
                    problem(how, "the id of another", i, recs[-1])
            if len(runs) > 1 and all(r["finish_reason"] in ("stop", "length") for _, recs in got for r in recs if r["pd"] == "result"):
                problem(how, "ran twice", runs)
        elif how == "junk":
            c.s.sendall(rnd.choice(JUNK))
            c.s.settimeout(0.2)
            if rnd.random() < 0.5:
                c.s.shutdown(socket.SHUT_WR)
                c.s.settimeout(20 * SLOW)
            try:
                while c.s.recv(65536):
                    pass
            except TimeoutError:
                pass
        elif how == "pipeline":
            qs = [dict(POOL[i % len(POOL)], id=i, stream=False) for i in range(60)]
            threading.Thread(target=c.send, args=qs, daemon=True).start()
            by_run = {}
            for r in c.until(sum(x.get("n", 1) for x in qs)):
                by_run.setdefault(r["run"], []).append(r)
            for recs in by_run.values():
                i = next(r["id"] for r in recs if r["pd"] == "result")
                judge(how, i % len(POOL), qs[i], recs)
    except OSError as e:
        problem(how, qi, "no answer", e)
    except Exception:
        problem(how, qi, traceback.format_exc())
    finally:
        for x in (c, *more):
            x.s.close()


def disturb(s, stop, rnd):
    stands = {}

    def go_on():
        while stands or not stop.is_set():
            time.sleep(0.02)
            for name, t in list(stands.items()):
                if time.time() > t:
                    stands.pop(name)        # first: it may be stopped anew meanwhile
                    s[name].cont()
    again = threading.Thread(target=go_on)
    again.start()
    while not stop.is_set():
        time.sleep(rnd.random() * 0.15 * SLOW)
        w = s[rnd.choice([x for x in s.workers if x not in stands] or list(s.workers))]
        what = rnd.choice(["killed", "stopped", "drained"])
        count(what)
        if what == "killed":
            w.kill()
            time.sleep(rnd.random() * 0.3)
            w.start()
        elif what == "stopped":
            w.stop()
            stands[w.name] = time.time() + rnd.random() * 1.5
        else:
            w.p.terminate()
            if rnd.random() < 0.3:
                time.sleep(rnd.random() * 0.1)
                w.p.terminate()
            try:
                if w.p.wait(30 * SLOW) not in (0, 6):
                    problem("drain", w.name, w.p.returncode, w.said()[-500:])
            except subprocess.TimeoutExpired:
                problem("drain", w.name, "not in time", w.said()[-300:])
                w.kill()
            w.start()
    again.join()
    for name in stands:             # stopped as the last thing, when nobody looked any more
        s[name].cont()


LINE = re.compile(r'([a-z0-9_]+(?:\{(?:[a-z_]+="(?:[^"\\]|\\.)*",?)+\})?) -?[0-9.]+')


def scrape(path, stop):
    """Metrics of the router, over and over: text of the right form, no line twice."""
    while not stop.is_set():
        with socket.socket(socket.AF_UNIX) as k:
            k.connect(path)
            k.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            text = b"".join(iter(lambda: k.recv(1 << 16), b"")).decode().partition("\r\n\r\n")[2]
        names = [m and m[1] for m in (LINE.fullmatch(x) for x in text.splitlines() if not x.startswith("# "))]
        if not names or None in names or len(names) != len(set(names)):
            problem("metrics", [x for x in text.splitlines() if x[:1] != "#" and not LINE.fullmatch(x)][:3], len(names) - len(set(names)))
        time.sleep(0.05)


def round_of(name, seed, **kw):
    shm = set(os.listdir("/dev/shm"))
    metrics = f"/tmp/pd-chaos-{os.getpid()}"
    s = Set(2, 2, 1, p=["--lease", "3s"], **dict(kw, route=["--metrics", f"unix:{metrics}", *kw.get("route", [])]))
    fds = s.r.ledger()["fds"]
    stop, todo, before = threading.Event(), iter(range(N)), len(problems)

    def client(rnd):
        while True:
            with lock:
                k = next(todo, None)
            if k is None:
                return
            one(k, s.r.path, rnd)
    others = [threading.Thread(target=disturb, args=(s, stop, random.Random(seed))), threading.Thread(target=scrape, args=(metrics, stop))]
    clients = [threading.Thread(target=client, args=(random.Random(seed * 100 + i),)) for i in range(6)]
    for t in others + clients:
        t.start()
    for t in clients:
        t.join()
    stop.set()
    for t in others:
        t.join()
    ok(len(problems) == before, f"{name}: each request has its end", problems[before:before + 5])
    bad, end = s.quiet(30), time.time() + 5
    while s.r.ledger()["fds"] > fds and time.time() < end:
        time.sleep(0.1)
    ok(not bad and s.r.ledger()["fds"] <= fds, f"{name}: descriptors are back too", (bad, s.r.ledger()["fds"], fds))
    s.end(name, bound="60s")
    left = [x for x in os.listdir(s.dir) if not x.endswith((".trace", ".err"))] + sorted(set(os.listdir("/dev/shm")) - shm) + [x for x in [metrics] if os.path.exists(x)]
    ok(not left, f"{name}: nothing is left", left)


round_of("chaos", SEED)
round_of("chaos, in place, early first tokens", SEED + 1, d=["--in-place"], route=["--early-first-token"])
round_of("chaos, few blocks", SEED + 2, mem="96KiB")
print("#", SEED, counts, file=sys.stderr)
tap.done()
