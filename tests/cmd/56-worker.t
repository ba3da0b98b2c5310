#!/usr/bin/env python3
"""pd-decode --listen --role both, the aggregated worker: many clients share one batch, each gets what the filter gives, to the bit; clients that vanish, stall or cancel
leave nothing behind; a drain finishes what is in hand. On a tiny model."""
import atexit
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time

import tap
from packed import msgpack
from tap import B, TINY, ok, run

tmp = tempfile.TemporaryDirectory()
ARGS = ["-m", TINY, "-t", "1", "--chunk", "32", "--max-seqs", "8", "--kv-mem", "4MiB"]
TOKEN = bytes(range(16))


def reqs(n, **kw):
    return [dict({"id": i, "prompt": f"Once upon a time there were {i} foxes" * (1 + i % 4), "max_tokens": 5 + i % 7, "temperature": 0.8, "seed": i}, **kw) for i in range(n)]


class Daemon:
    def __init__(self, name, *args):
        self.path = os.path.join(tmp.name, name)
        self.trace = self.path + ".trace"
        r, w = os.pipe()
        self.err = open(self.path + ".err", "w+b")
        self.p = subprocess.Popen([f"{B}/bin/pd-decode", *ARGS, "--listen", f"unix:{self.path}", "--role", "both", "--ready-fd", str(w), "--trace", self.trace, *args],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.err, pass_fds=[w])
        os.close(w)
        atexit.register(self.p.kill)
        self.fd = os.fdopen(r, "rb")
        self.ready = self.fd.readline()

    def dial(self):
        s = socket.socket(socket.AF_UNIX)
        s.settimeout(60)
        s.connect(self.path)
        return s

    def ask(self, records, form="json"):
        """All answers to these records, the client half-closed."""
        s = self.dial()
        if form == "json":
            s.sendall(tap.lines(records).encode())
        else:
            s.sendall(b"".join(msgpack.packb(r) for r in records))
        s.shutdown(socket.SHUT_WR)
        data = b""
        while True:
            d = s.recv(65536)
            if not d:
                break
            data += d
        s.close()
        if form == "json":
            return tap.records(data)
        u = msgpack.Unpacker()
        u.feed(data)
        return list(u)

    def ledger(self):
        return self.ask([{"pd": "status", "v": 1}])[0]["ledger"]

    def until(self, key, want, seconds=20):
        end = time.time() + seconds
        while (got := self.ledger()[key]) != want and time.time() < end:
            time.sleep(0.02)
        return got == want

    def end(self, sig=signal.SIGTERM):
        self.p.send_signal(sig)
        try:
            rc = self.p.wait(60)
        except subprocess.TimeoutExpired:
            self.p.kill()
            rc = -1
        self.err.seek(0)
        return rc, self.err.read().decode()


def tokens(records):
    return {r["id"]: (r["tokens"], r["text"], r["finish_reason"]) for r in records if r.get("pd") == "result"}


def quiet(d):
    """Nothing is held any more."""
    g = d.ledger()
    return d.until("runs", 0) and d.until("blocks_used", 0) and d.until("sequences", 0) and d.until("connections", 1), g


# ---- what comes out ----

filtered = tokens(tap.results(run([f"{B}/bin/pd-decode", *ARGS, "--format", "json"], tap.lines(reqs(40))).stdout))
d = Daemon("a", "--metrics", "unix:" + os.path.join(tmp.name, "a.http"))
ok(d.ready == b"READY=1\n" and len(filtered) == 40, "a worker becomes ready", d.ready)
ok(tokens(d.ask(reqs(40))) == filtered, "one client's results are the filter's, to the bit")
ok(tokens(d.ask(reqs(40), "msgpack")) == filtered, "in msgpack too")
# ---- the prefix cache ----

again = [r for r in d.ask(reqs(40)) if r.get("pd") == "result"]
ok(tokens(again) == filtered and all(0 < r["cached_tokens"] < r["prompt_tokens"] for r in again if r["prompt_tokens"] > 16) and any(r["cached_tokens"] for r in again),
   "what was computed before is not computed again, and the results are the same to the bit", [(r["prompt_tokens"], r["cached_tokens"]) for r in again][:8])
salted = [[r for r in d.ask(reqs(40, cache_salt=s)) if r.get("pd") == "result"] for s in ("one", "two", "one")]
ok(all(tokens(s) == filtered for s in salted) and any(r["cached_tokens"] for r in salted[2]) and
   max(r["cached_tokens"] for r in salted[1]) < max(r["cached_tokens"] for r in salted[2]), "another cache_salt shares nothing with the others", [max(r["cached_tokens"] for r in s) for s in salted])
g = d.ledger()
ok(g["blocks_cached"] > 0 and g["blocks_used"] == 0 and g["rows_cached"] > 0, "the ledger says what is cached", g)
off = Daemon("off", "--prefix-cache", "off")
ok([tokens(off.ask(reqs(40))) for _ in range(2)] == [filtered] * 2 and off.ledger()["blocks_cached"] == 0 and off.ledger()["rows_cached"] == 0, "--prefix-cache off: nothing is kept")
off.end()
lru = Daemon("lru", "--prefix-cache", "lru")
ok([tokens(lru.ask(reqs(40))) for _ in range(2)] == [filtered] * 2 and lru.ledger()["blocks_cached"] > 0, "--prefix-cache lru")
lru.end()
bad = [run([f"{B}/bin/pd-decode", *ARGS, "--listen", "unix:" + os.path.join(tmp.name, "bad"), "--role", "both", "--prefix-cache", "maybe"], b""),
       run([f"{B}/bin/pd-decode", *ARGS, "--prefix-cache", "on"], b"")]
ok([b.returncode for b in bad] == [2, 2] and b"maybe" in bad[0].stderr and b"daemons" in bad[1].stderr, "--prefix-cache: unknown words and filters are refused", bad)

# ---- priorities and times of stages ----

one = Daemon("one", "--max-seqs", "4", "--chunk", "8", "--prefix-cache", "off")
first = [{"id": "first", "prompt": "Once upon a time there were", "max_tokens": 200, "ignore_eos": True, "priority": 100, "n": 128}] * 2      # while these run, all others come
order = [r["id"] for r in one.ask(first + [dict(r, priority=p) for r, p in zip(reqs(8, prompt="Once upon a time there were many foxes " * 4), (0, 0, 3, -2, 9, 1, 9, 0))])
         if r.get("pd") == "result" and r["id"] != "first"]
ok(order == [4, 6, 2, 5, 0, 1, 7, 3], "higher priority first, in the order of arrival where it is equal", order)
late = [r for r in one.ask(first + [{"id": "late", "prompt": "Many foxes were there", "timeouts_ms": {"queue": 1}}, {"id": "bad", "prompt": "x", "timeouts_ms": {"prefill": 0}},
                                   {"id": "hurry", "prompt": "Once upon a time " * 14, "priority": 50, "timeouts_ms": {"first_token": 1}}]) if r.get("id") in ("late", "bad", "hurry")]
errs = {r["id"]: r for r in late if r["pd"] == "error"}
ok(errs["late"]["class"] == errs["hurry"]["class"] == "timeout" and "stage queue" in errs["late"]["message"] and "stage first_token" in errs["hurry"]["message"] and
   errs["bad"]["class"] == "failed" and "timeouts_ms.prefill is 0" in errs["bad"]["message"], "a run past the time of a stage fails alone, and is told which", errs)
ok(sorted(r["finish_reason"] for r in late if r["pd"] == "result") == ["error"] * 3 and quiet(one)[0], "each with its result, and nothing stays behind")
one.end()

many = [None] * 12


def client(i):
    many[i] = tokens(d.ask(reqs(40), "json" if i % 2 else "msgpack"))


threads = [threading.Thread(target=client, args=(i,)) for i in range(12)]
[t.start() for t in threads]
[t.join() for t in threads]
ok(all(m == filtered for m in many), "and those of twelve clients at once, with more runs than are taken in", [len(m or ()) for m in many])
got = d.ask([dict(r, stream=i < 3) for i, r in enumerate(reqs(6))])
seen = {}
for r in got:
    if r["pd"] == "token":
        seen.setdefault(r["run"], []).append((r["pos"], r["token"], r["text"]))
res = {r["run"]: r for r in got if r["pd"] == "result"}
ok(len(seen) == 3 and all([p for p, _, _ in t] == list(range(len(t))) and [x for _, x, _ in t] == res[run_]["tokens"] and "".join(s for _, _, s in t) == res[run_]["text"]
                          for run_, t in seen.items()), "tokens are streamed to who asks for them", got)
ok(all(r["mode"] == "aggregated" and r["decode_worker"].startswith("both@") for r in res.values()), "a result says how and where", res)
got = d.ask([dict(reqs(1)[0], n=3)])
ok(sorted(r.get("choice", 0) for r in got) == [0, 1, 2], "a result a choice", got)

# ---- bad input ----

s = d.dial()
s.sendall(b'{"id":1,"prompt":"a","max_tokens":0}\nnot json\n{"id":2,"prompt":"a","max_tokens":2}\n{"pd":"kv"}\n{"id":3,"prompt":"x","adapter":"none"}\n'
          b'{"id":4,"prompt":' + json.dumps("word " * 4000).encode() + b"}\n")
s.shutdown(socket.SHUT_WR)
got = tap.records(b"".join(iter(lambda: s.recv(65536), b"")))
by = {r.get("id"): r for r in got if r["pd"] == "result"}
ok({k: v["finish_reason"] for k, v in by.items()} == {1: "error", 2: "length", 3: "error", 4: "error", None: "error"} and sum(r["pd"] == "error" for r in got) == 5,
   "a bad request fails alone, with an error and a result", got)
RUN = "01M8PAW1CACQM7WS4V0NE4983X"
got = d.ask([dict(r, run=RUN, max_tokens=40) for r in reqs(2)]) + d.ask([dict(reqs(1)[0], run=RUN)])
ok(sorted(r["finish_reason"] == "error" for r in got if r["pd"] == "result") == [False, True, True], "a run is not begun twice", got)

# ---- ends ----

LONG = {"prompt": "The", "max_tokens": 200000, "ignore_eos": True}      # to the end of the context
before = d.ledger()["cancelled"]
s = d.dial()
s.sendall(tap.lines([dict(LONG, stream=True, n=16)] * 8).encode())
s.recv(100)
s.close()
held, g = quiet(d)
ok(held and d.ledger()["cancelled"] > before, "a client that vanishes has its runs cancelled", g)
children = [subprocess.Popen(["python3", "-c", "import socket,sys,time\ns=socket.socket(socket.AF_UNIX);s.connect(sys.argv[1]);s.sendall(sys.argv[2].encode());time.sleep(60)",
                              d.path, tap.lines([dict(LONG, stream=True)] * 4)]) for _ in range(5)]
d.until("connections", 6)
[c.kill() for c in children]
[c.wait() for c in children]
held, g = quiet(d)
ok(held, "so have clients that are killed", g)

def asked(run_):
    return [{"pd": "cancel", "run": run_, "cancel_token": bytes(16)}, {"pd": "cancel", "run": run_}, {"pd": "cancel", "run": RUN[:-1] + "Z", "cancel_token": TOKEN},
            {"pd": "cancel", "run": run_, "cancel_token": TOKEN}]


for i in range(50):             # a tiny model may be done before the question comes
    s, query = d.dial(), d.dial()
    name = RUN[:-2] + "0123456789"[i // 10] + "0123456789"[i % 10]
    s.sendall(msgpack.packb(dict(LONG, id=1, run=name, cancel_token=TOKEN, stream=True, n=4)))
    u, got = msgpack.Unpacker(), []
    while len(got) < 3:
        u.feed(s.recv(4096))
        got += list(u)
    query.sendall(b"".join(msgpack.packb(r) for r in asked(name)))
    query.shutdown(socket.SHUT_WR)
    v = msgpack.Unpacker()
    for chunk in iter(lambda: query.recv(65536), b""):
        v.feed(chunk)
    q = list(v)
    s.shutdown(socket.SHUT_WR)
    for chunk in iter(lambda: s.recv(65536), b""):
        u.feed(chunk)
        got += list(u)
    if q[3].get("state") == "cancelled":
        break
ok([r.get("state") for r in q] == [None, None, "unknown", "cancelled"] and "not that of run" in q[0]["message"] and "missing" in q[1]["message"],
   "a run is cancelled by who has its token", q)
res = [r for r in got if r["pd"] == "result"]
streamed = [[r["token"] for r in got if r["pd"] == "token" and r.get("choice", 0) == c] for c in range(4)]
ok([r["finish_reason"] for r in res] in (["cancelled"] * 4, ["length"] * 4) and all(r["tokens"] == streamed[r.get("choice", 0)] for r in res), "its client gets what there was", res)

# ---- slow readers ----

slow = []
for _ in range(4):
    s = d.dial()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.sendall(tap.lines([dict(LONG, stream=True, logprobs=True, top_logprobs=8, n=2)] * 6).encode())
    slow.append(s)
ok(tokens(d.ask(reqs(40))) == filtered, "clients that do not read stop nobody else")
data = b"".join(iter(lambda: slow[0].recv(65536) if not slow[0].shutdown(socket.SHUT_WR) else b"", b""))
got = tap.records(data)
ok(sum(r["pd"] == "result" for r in got) == 12, "and who reads later gets all", len(got))
[s.close() for s in slow]
held, g = quiet(d)
ok(held, "and then all is free again", g)

s = socket.socket(socket.AF_UNIX)
s.connect(os.path.join(tmp.name, "a.http"))
s.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
text = b"".join(iter(lambda: s.recv(65536), b"")).decode()
m = dict(line.rsplit(" ", 1) for line in text.split("\r\n\r\n", 1)[1].splitlines() if not line.startswith("#"))
ok(int(m['pd_runs_total{end="completed"}']) > 500 and m["pd_runs_in_hand"] == "0" and m['pd_kv_blocks{state="used"}'] == "0" and int(m["pd_ttft_seconds_count"]) > 500,
   "metrics agree", text)

# ---- drain ----

s = d.dial()
s.sendall(tap.lines(reqs(20)).encode())
idle = d.dial()
d.until("connections", 3)
rc, err = d.end()
s.settimeout(10)
got = tap.records(b"".join(iter(lambda: s.recv(65536), b"")))
ok(rc == 0 and "draining" in err and not os.path.exists(d.path), "SIGTERM drains", (rc, err[-500:]))
ok(len(got) > 0 and all(filtered[r["id"]] == (r["tokens"], r["text"], r["finish_reason"]) for r in got) and [r["id"] for r in got if r["id"] == 0], "and finishes what is in hand", got)
check = run([f"{B}/bin/pd-trace", "check", d.trace])
ok(check.returncode == 0, "the trace holds every invariant", check.stdout + check.stderr)

d = Daemon("b")
s = d.dial()
s.sendall(tap.lines([dict(LONG, n=4)] * 8).encode())
d.until("runs", 8)
d.p.send_signal(signal.SIGTERM)
time.sleep(0.1)
rc, err = d.end()
ok(rc in (0, 6), "a second signal stops at once", (rc, err))
check = run([f"{B}/bin/pd-trace", "check", d.trace])
ok(check.returncode == 0, "and the trace still tells every end", check.stdout + check.stderr)

# ---- usage ----

base = [f"{B}/bin/pd-decode", *ARGS]
for args, why in ((["--listen", f"unix:{tmp.name}/u", "--role", "prefill"], "no role of this command"),
                  (["--listen", f"unix:{tmp.name}/u", "--via", "shm,rfc1149"], "no transport"), (["--listen", "tcp:1", "--role", "both"], "port is missing"),
                  (["--listen", f"unix:{tmp.name}/u", "--role", "both", "--text"], "are for filters"), (["--metrics", "http:127.0.0.1:0"], "are for daemons"),
                  (["--listen", f"unix:{tmp.name}/u", "--role", "both", "--metrics", "http:0.0.0.0:0"], "not loopback"),
                  (["--listen", f"unix:{tmp.name}/u", "--role", "both", "--ready-fd", "77"], "not open"),
                  (["--listen", f"unix:{tmp.name}/u", "--role", "both", "--max-connections", "0"], "--max-connections")):
    r = run(base + args, timeout=30)
    ok(r.returncode == 2 and why in r.stderr.decode() and tap.one_line(r.stderr) and not os.path.exists(f"{tmp.name}/u"), f"usage: {' '.join(args)[-60:]}", (r.returncode, r.stderr))
tap.done()
