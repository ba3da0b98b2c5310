#!/usr/bin/env python3
"""The whole set on a tiny model: pd-route, pd-prefill and pd-decode daemons, clients with streams, and processes that are killed, stopped and drained in the middle
of it. Every client gets what the filters give, to the bit; no token twice, none missing; the logs of all of them, merged, hold every invariant."""
import atexit
import glob
import os
import signal
import tempfile
import threading
import time

import tap
from fake import results, Router, until
from pdset import ARGS, Worker
from tap import B, TINY, ok, run

tmp = tempfile.TemporaryDirectory()
N = 24


def requests(n=N, stream=True, tokens=130):
    return [{"id": i, "prompt": f"Once upon a time there were {i} foxes. " * (1 + i % 4), "max_tokens": tokens - i, "temperature": 0.9, "seed": i, "ignore_eos": True,
             "logprobs": i % 2 == 0, "stream": stream and i % 4 != 3} for i in range(n)]


def told(records):
    return {(r["id"], r["choice"]): (r["tokens"], r["text"], r["finish_reason"], r.get("logprobs")) for r in records if r.get("pd") == "result"}


def filtered(reqs):
    return told(tap.results(run([f"{B}/bin/pd-decode", "-m", TINY, *ARGS, "--kv-mem", "4MiB", "--format", "json"], tap.lines(reqs)).stdout))


want = filtered(requests())


class Set:
    count = 0

    def __init__(self, p, d, *args, role="decode", **kw):
        Set.count += 1
        self.dir, self.role = os.path.join(tmp.name, f"s{Set.count}"), role
        os.mkdir(self.dir)
        self.w = {f"p{i}": Worker(self.dir, f"p{i}", "prefill", *self.args("p"), **kw) for i in range(p)}
        self.w.update({f"d{i}": Worker(self.dir, f"d{i}", "decode", *self.args("d"), **kw) for i in range(d)})
        self.r = Router(os.path.join(self.dir, "r"), *args, workers=list(self.w.values()))
        atexit.register(self.r.p.kill)

    def args(self, name):
        return ["--role", self.role] if self.role == "both" or name[0] == "d" else []

    def again(self, name):
        """The same worker anew, on the same socket."""
        self.w[name] = Worker(self.dir, name, "decode" if name[0] == "d" else "prefill", *self.args(name))
        self.r.until("workers_ready", len(self.w))

    def play(self, reqs, when=None, do=None):
        """All answers; when so many tokens have come, `do` it."""
        c = self.r.client(*reqs)
        c.s.shutdown(1)
        got, n = [], 0
        for r in c.records():
            got.append(r)
            n += r["pd"] == "token"
            if do and n >= when:
                do()
                do = None
        c.s.close()
        return got, do is None

    def end(self, name):
        rc, err = self.r.stop()
        for w in self.w.values():
            if w.p.poll() is None:
                w.p.send_signal(signal.SIGCONT)
                w.end()
        c = run([f"{B}/bin/pd-trace", "check", *glob.glob(f"{self.dir}/*.trace")])
        ok(rc == 0 and c.returncode == 0, f"{name}: the logs hold every invariant", (rc, err[-800:], c.stdout[-1500:], c.stderr))
        return c.stdout.decode()


def whole(got, reqs):
    """Why the streams are not what they should be; empty when they are."""
    res = {r["run"]: r for r in results(got)}
    seen = {}
    for r in got:
        if r["pd"] == "token":
            seen.setdefault(r["run"], []).append(r)
    bad = [r for r in got if r["pd"] == "error"]
    for name, t in seen.items():
        if name not in res or [x["pos"] for x in t] != list(range(len(t))) or [x["token"] for x in t] != res[name]["tokens"] or "".join(x["text"] for x in t) != res[name]["text"]:
            bad.append((name, [x["pos"] for x in t][:5], len(t), res.get(name)))
    if len(res) != len(reqs) or len(seen) != sum(bool(q.get("stream")) for q in reqs):
        bad.append((len(res), len(seen)))
    return bad


def modes(got):
    return sorted({(r["mode"], (r["fallback"] or "").split(":")[0]) for r in results(got)})


# ---- aggregated, fixed, early ----

s = Set(0, 2, role="both")
got, _ = s.play(requests())
ok(told(got) == want and not whole(got, requests()) and modes(got) == [("aggregated", "")], "aggregated: what the filter gives", (modes(got), whole(got, requests())[:2]))
for i in range(10):             # the one that is killed may have just finished
    got, done = s.play(requests(), 60 * i + 30, s.w["d0"].kill)
    good = done and told(got) == want and not whole(got, requests())
    moved = ("local", "migrated") in modes(got)
    if moved or not good:
        break
    s.again("d0")
ok(good, "a worker is killed in the middle: the same", (modes(got), whole(got, requests())[:2]))
ok(moved, "streams have moved", modes(got))
s.end("aggregated")

for args, name in (((), "fixed"), (("--early-first-token",), "early first token")):
    s = Set(2, 2, *args)
    got, _ = s.play(requests())
    ok(told(got) == want and not whole(got, requests()) and modes(got) == [("remote", "")], f"{name}: what the filter gives", (modes(got), whole(got, requests())[:2]))
    two = [dict(q, n=2, id=q["id"] + 100, max_tokens=20) for q in requests(8)]
    got, _ = s.play(two)
    ok(told(got) == filtered(two), f"{name}: two choices", modes(got))
    clients = [None] * 6

    def client(i):
        clients[i] = s.play(requests())[0]

    threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    ok(all(told(g) == want and not whole(g, requests()) for g in clients), f"{name}: six clients at once", [modes(g) for g in clients])
    ok(all(w.until({"runs": 0})[0] for w in s.w.values()) and s.r.ledger()["at_workers"] == 0, f"{name}: nothing is held", [w.ledger() for w in s.w.values()])
    s.end(name)

# ---- killed ----

for role, place in (("decode", "killed"), ("both", "killed, of role both")):
    s = Set(2, 2, role=role)
    moved = False
    for name, when in (("d0", 30), ("d1", 900), ("d0", 200), ("p0", 1), ("p1", 60), ("d1", 100), ("d0", 400), ("p0", 2)):
        got, done = s.play(requests(), when, s.w[name].kill)
        ok(done and told(got) == want and not whole(got, requests()), f"{place}: {name} after {when} tokens: what the filter gives", (modes(got), whole(got, requests())[:2]))
        moved |= ("local", "migrated") in modes(got)
        s.again(name)
    ok(moved, f"{place}: streams have moved")
    got, _ = s.play(requests())
    ok(told(got) == want and modes(got) == [("remote", "")], f"{place}: and when all are back it is as before", modes(got))
    s.w["p0"].kill(), s.w["p1"].kill()
    got, _ = s.play(requests())
    ok(told(got) == want and not whole(got, requests()) and modes(got) == [("local", "no_prefill_worker")], f"{place}: without any prefill worker decode does it", modes(got))
    s.end(place)
    ok(all(w.p.returncode == 0 for n, w in s.w.items() if n[0] == "d"), f"{place}: and the others have ended well")

s = Set(1, 1, role="both")
for when in (20, 400, 900):     # its streams go on at the worker that had prefilled them; what has none yet waits for it, or goes there too
    for _ in range(10):         # the one that is killed may have just finished
        got, done = s.play(requests(), when, lambda: (s.w["d0"].kill(), s.again("d0")))
        good = done and told(got) == want and not whole(got, requests())
        moved = ("local", "migrated") in modes(got)
        if moved or not good:
            break
    ok(good, f"of two of role both one is killed after {when} tokens: what the filter gives", (modes(got), whole(got, requests())[:2]))
    ok(moved and {r["decode_worker"] for r in results(got) if (r["fallback"] or "").startswith("migrated")} == {s.w["p0"].status()["worker"]},
       "and the other one goes on with its streams", modes(got))
ok(all(w.until({"runs": 0, "blocks_used": 0, "leases_live": 0, "expected": 0})[0] for w in s.w.values()), "nothing is held", [w.ledger() for w in s.w.values()])
s.end("two of role both")

# ---- stopped ----

s = Set(2, 2, "--suspect-after", "1500ms", "--gone-after", "2500ms")
for name, when in (("d0", 100), ("p0", 1)):
    w = s.w[name]
    got, done = s.play(requests(), when, lambda: w.p.send_signal(signal.SIGSTOP))
    ok(done and told(got) == want and not whole(got, requests()), f"{name} is stopped: what the filter gives", (modes(got), whole(got, requests())[:2]))
    w.p.send_signal(signal.SIGCONT)
    ok(s.r.until("workers_ready", 4), "it comes back", s.r.ledger())
    ok(w.until({"runs": 0})[0], "with nothing in hand", w.ledger())
got, _ = s.play(requests())
ok(told(got) == want and not whole(got, requests()), "and is used again", modes(got))
s.end("stopped")

# ---- drained, one after the other, under load ----

s = Set(2, 2)
got = []
stop = threading.Event()


def load():
    while not stop.is_set():
        got.append(s.play(requests(12))[0])


threads = [threading.Thread(target=load) for _ in range(3)]
[t.start() for t in threads]
rcs = []
for name in ("d0", "p0", "d1", "p1"):
    time.sleep(0.3)
    rcs.append((name, s.w[name].end()[0]))
    s.again(name)
stop.set()
[t.join() for t in threads]
few = filtered(requests(12))
bad = [x for g in got for x in whole(g, requests(12))]
ok(all(rc == 0 for _, rc in rcs), "each worker is drained and started anew under load", rcs)
ok(len(got) > 3 and all(told(g) == few for g in got) and not bad, "no client has noticed", (len(got), bad[:2]))
s.end("drained")

# ---- a rolling update: another epoch ----

s = Set(1, 1)
got.clear()
stop.clear()
threads = [threading.Thread(target=load) for _ in range(2)]
[t.start() for t in threads]
time.sleep(0.3)
new = [Worker(s.dir, "p9", "prefill", "--epoch", "7", "--register", f"unix:{s.r.path}"), Worker(s.dir, "d9", "decode", "--role", "decode", "--epoch", "7", "--register", f"unix:{s.r.path}")]
s.r.until("workers_ready", 4)
time.sleep(0.3)
rcs = [s.w[n].end()[0] for n in ("p0", "d0")]
time.sleep(0.3)
stop.set()
[t.join() for t in threads]
bad = [x for g in got for x in whole(g, requests(12))]
ok(rcs == [0, 0] and all(told(g) == few for g in got) and not bad, "a rolling update under load: no client has noticed", (rcs, len(got), bad[:2]))
pairs = {(r["prefill_worker"], r["decode_worker"]) for g in got for r in results(g) if r["mode"] == "remote"}
ok(len(pairs) == 2 and len({p for p, _ in pairs}) == 2 and len({d for _, d in pairs}) == 2, "and no KV has crossed", pairs)
s.w.update(p9=new[0], d9=new[1])
s.end("rolling update")

# ---- prefill workers of other blocks than decode's ----

s = Set(0, 0, "--policy", "fixed")
s.w = {"p0": Worker(s.dir, "p0", "prefill", "--block-size", "32", "--register", f"unix:{s.r.path}"),
       "d0": Worker(s.dir, "d0", "decode", "--allow-convert", "block_size", "--register", f"unix:{s.r.path}")}
s.r.until("workers_ready", 2)
got, _ = s.play(requests())
ok(told(got) == want and modes(got) == [("remote", "")] and not whole(got, requests()), "KV of blocks of 32 into blocks of 16: to the bit", (modes(got), whole(got, requests())[:2]))
ok({r.get("converted") for r in results(got)} == {"block_size"}, "and every result says converted", {r.get("converted") for r in results(got)})
x = run([f"{B}/bin/pd-route", "--check", "--worker", s.w["p0"].at, "--worker", s.w["d0"].at])
ok(x.returncode == 0 and b"converted" in x.stdout and b"block_size differs (prefill 32, decode 16)" in x.stdout, "--check says so too, and 0", (x.returncode, x.stdout, x.stderr))
x = run([f"{B}/bin/pd-trace", "cat", os.path.join(s.dir, "r.trace")])
chosen = [r["chosen"] for r in tap.records(x.stdout) if r["pd"] == "route" and r["chosen"]]
ok(len(chosen) == N and all(c.get("converted") == "block_size" for c in chosen), "the route says converted", chosen[:1])
s.end("converted")

# ---- clients that go ----

s = Set(1, 1)
for i in range(30):
    c = s.r.client(*requests(8))
    if i % 3:
        next(c.records())
    c.close()
held = [w.until({"runs": 0})[0] for w in s.w.values()]
ok(all(held) and s.r.until("runs", 0) and s.r.ledger()["at_workers"] == 0, "clients that vanish leave nothing behind", ([w.ledger() for w in s.w.values()], s.r.ledger()))
got, _ = s.play(requests())
ok(told(got) == want, "and nobody else has noticed", modes(got))
s.end("clients")
tap.done()
