#!/usr/bin/env python3
"""Workers of role both: two of them, each giving KV to the other and answering by itself, all at once; by every transport, to the bit what the filter gives. They are
cancelled, stopped and killed in the middle of it, a run comes back to its giver to be decoded, and their pools are as small as can be: they never wait for each
other. Each time every count is back at its start, and the merged log keeps every rule. And behind a router, with pd-route's own policies."""
import os
import re
import signal
import socket
import time

import tap
from pdset import Scene, folder, msgpack, reqs, results, whole, why
from tap import B, TINY, ok, records, run

FILTER = whole(reqs(30))
LONG = dict(prompt="A long tale of a fox " * 8, max_tokens=60, ignore_eos=True, temperature=0.7, seed=9)
TALE = whole([dict(LONG, id="t")])
KEYS = os.path.join(folder.name, "keys")
with open(os.open(KEYS, os.O_WRONLY | os.O_CREAT, 0o600), "w") as f:
    f.write("k1 " + os.urandom(32).hex() + "\n")


def pair(s, *args, **kw):
    A, W = s.both("A", "prefill", *args, **kw), s.both("B", "decode", *args, **kw)
    if "--listen" in args:
        for w in (A, W):
            w.at, w.name = re.search(r"ready: .*(tcp:127.0.0.1:\d+)", w.said()).group(1), w.status()["worker"]
    return A, W


def crossing(s, A, W, rs, **kw):
    """Each of them from A to B and from B to A, at once."""
    runs = []
    for q in rs:
        runs += [s.R.remote(dict(q), A, W, **kw), s.R.remote(dict(q), W, A, **kw)]
    return runs


def by_kv(s, runs):
    return all(s.R.result(r) and s.R.result(r)["mode"] == "remote" and s.R.result(r)["fallback"] is None for r in runs)


# ---- by every transport, both ways at once ----

TCP = ["--listen", "tcp-listen:127.0.0.1:0"]
for name, args, via in (("shm", (), "shm"), ("shm, in place", ("--in-place",), "shm"), ("inline", ("--via", "inline"), "inline"), ("tcp", (*TCP, "--via", "tcp"), "tcp"),
                        ("tcp, sealed", (*TCP, "--key-file", KEYS), "tcp")):
    s = Scene(name)
    A, W = pair(s, *args)
    fds = None
    for turn in range(2):
        runs = crossing(s, A, W, reqs(30))
        bare = [s.R.local(q, w, mode="aggregated") for q in reqs(10) for w in (A, W)]
        s.ok(s.R.wait(runs + bare) and results(s.R, runs) == FILTER and results(s.R, bare).items() <= FILTER.items(), "sixty that cross and twenty whole ones are the filter's to the bit",
             why(s.R, runs))
        s.ok(all({x["tokens"][0] for x in s.R.of(r, "result")} for r in runs) and by_kv(s, runs), "those that cross by KV, all of them", why(s.R, runs))
        A.until({"runs": 0})
        W.until({"runs": 0})
        g, h = A.ledger(), W.ledger()
        fds = fds or (g["fds"], h["fds"])
    s.ok(all(x[f"given_{via}"] == x[f"taken_{via}"] == 60 and x["published"] == 60 and x["completed"] == 80 and x["not_taken"] == x["not_given"] == x["failed"] == 0 for x in (g, h)) and
         g["given_bytes"] == h["taken_bytes"] and h["given_bytes"] == g["taken_bytes"], "each counts what it gave and what it took", (g, h))
    s.ok((g["fds"], h["fds"]) == fds, "no descriptor is left behind", (fds, g["fds"], h["fds"]))
    s.end()

# ---- what it says of itself ----

s = Scene("its registration")
A, W = pair(s)
c = socket.socket(socket.AF_UNIX)
c.settimeout(60)
c.connect(A.path)
c.sendall(msgpack.packb({"pd": "status", "v": 1, "follow": True}))
u = msgpack.Unpacker()


def said():
    while True:
        for r in u:
            return r
        u.feed(c.recv(65536))


w = said()
s.ok(w["role"] == "both" and w["prefer"] == "prefill" and "gives" in w["caps"] and w["worker"].startswith("both@"), "role, the side it prefers, that it gives", w)
W.p.send_signal(signal.SIGSTOP)
runs = [s.R.remote(dict(id=i, token_ids=[5 + i] * 200, max_tokens=4), A, W) for i in range(30)]
seen = {"prefill_tokens_ahead": 0, "blocks_leased": 0, "runs": 0}
end = time.time() + 20
while time.time() < end and not all(seen.values()):
    s.R.pump(0)
    c.sendall(msgpack.packb({"pd": "status", "v": 1}))
    w = said()
    seen = {k: max(v, w["load"][k]) for k, v in seen.items()}
s.ok(all(seen.values()), "its heartbeats count what is to be given, too", seen)
W.p.send_signal(signal.SIGCONT)
s.ok(s.R.wait(runs), "and it goes on", why(s.R, runs))
c.close()
m = run([f"{B}/bin/pd-prefill", "-m", TINY, "--role", "both", "--describe", "--format", "json"])
ok(records(m.stdout)[0]["prefer"] == "prefill" and "gives" in records(m.stdout)[0]["caps"], "pd-prefill --role both --describe", m)
m = run([f"{B}/bin/pd-decode", "-m", TINY, "--role", "both", "--prefer", "prefill", "--describe", "--format", "json"])
ok(records(m.stdout)[0]["role"] == "both" and records(m.stdout)[0]["prefer"] == "prefill", "pd-decode --role both --prefer prefill is the same kind", m)
m = run([f"{B}/bin/pd-decode", "-m", TINY, "--describe", "--format", "json"])
ok("prefer" not in records(m.stdout)[0] and "gives" not in records(m.stdout)[0]["caps"], "a decode worker gives nothing, and prefers nothing", m)
for cmd, words, args in (("decode", "--role: 'prefill' is no role of this command (decode or both)", ("--role", "prefill")), ("prefill", "--role: 'decode' is no role of this command", ("--role", "decode")),
                         ("decode", "--prefer: a worker of role decode has one side (add --role both)", ("--prefer", "prefill")),
                         ("prefill", "--prefer: 'both' is no side of a worker", ("--role", "both", "--prefer", "both")),
                         ("decode", "--lease: it is for workers that give KV (--role both)", ("--lease", "3s")),
                         ("prefill", "--in-place: it is for workers that take KV (--role both)", ("--in-place",)),
                         ("prefill", "--allow-convert: it is for workers that take KV", ("--allow-convert", "order"))):
    m = run([f"{B}/bin/pd-{cmd}", "-m", TINY, "--listen", f"unix:{folder.name}/no", *args])
    ok(m.returncode == 2 and words in m.stderr.decode(), f"refused: {words}", m)
s.end()

# ---- cancels, at each state, while the other direction goes on ----

for state in ("queued", "computed", "offered", "decoding"):
    s = Scene(f"cancelled when {state}")
    A, W = pair(s)
    s.R.wait(crossing(s, A, W, reqs(1)))        # they know each other
    others = []
    if state == "offered":      # its decode worker does not read
        W.p.send_signal(signal.SIGSTOP)
    many = [dict(LONG, id=i, max_tokens=4000 if state == "decoding" else 60, prompt=LONG["prompt"] * (8 if state == "computed" else 1), stream=True) for i in range(6)]
    runs = [s.R.remote(q, A, W) for q in many] + ([s.R.remote(q, W, A) for q in many] if state != "offered" else [])
    if state == "computed":
        A.until({"runs": len(runs)}, 2)
    if state == "offered":
        s.ok(s.R.wait(runs, "kv"), "published", s.R.got)
    if state == "decoding":
        s.ok(s.R.wait(runs, "token", n=3), "streaming", s.R.got)
    keep = [] if state == "offered" else crossing(s, A, W, reqs(5))
    for r in runs:
        s.R.cancel(r, A, W)
    if state == "offered":
        s.ok(A.until({"runs": 0, "leases_live": 0})[0], "what was leased is free while its decode worker stands still", A.ledger())
        W.p.send_signal(signal.SIGCONT)
    s.R.pump(0)
    for r in runs:
        if r["run"] not in s.R.ended:
            s.R.event(r["run"], "cancelled")
            s.R.ended.add(r["run"])
    s.ok(s.R.wait(keep) and results(s.R, keep).items() <= FILTER.items(), "the others go on", why(s.R, keep))
    s.ok(s.R.wait(runs, ("result", "error")), "each is answered", s.R.got)
    s.end()

# ---- one of them goes away ----

s = Scene("one is killed")
A, W = pair(s, "--lease", "3s")
s.R.wait(crossing(s, A, W, reqs(2)))
W.p.send_signal(signal.SIGSTOP)
given, taken = [s.R.remote(q, A, W) for q in reqs(20)], [s.R.remote(q, W, A) for q in reqs(20, timeouts_ms={"prefill": 2000})]
s.ok(s.R.wait(given, "kv"), "it had published for the other", s.R.got)
W.kill()
for r in given:                 # who gave them has them back, to decode: with the KV that it still leases, or without
    s.R.event(r["run"], "retry")
    s.R.event(r["run"], "route_selected")
    s.R.local(r, A, new=False, op=os.urandom(16))
s.ok(s.R.wait(given + taken) and results(s.R, given + taken) == dict(whole(reqs(20))), "it computes what the other would have given, and decodes what it had given", why(s.R, given + taken))
s.ok({s.R.result(r)["mode"] for r in given + taken} == {"local"}, "and says so", why(s.R, given + taken))
s.ok(sum(s.R.result(r)["cached_tokens"] for r in given) > 0, "what it had computed to give is in its cache", why(s.R, given))
s.end()

s = Scene("who decodes a run gives another one of that name")
A, W = pair(s)
C = s.both("C", "decode")
A.p.send_signal(signal.SIGSTOP)         # nothing comes of it
runs = [s.R.remote(q, A, W) for q in reqs(20)]
time.sleep(0.2)
for r in runs:                  # another attempt: who was to decode it gives it now, and ends what it had of it by a result that nobody wants
    s.R.ended.add(r["run"])
    s.R.event(r["run"], "retry")
    s.R.event(r["run"], "route_selected")
    op = os.urandom(16) if r["id"] % 2 else None
    for w in (C, W):
        s.R.to(w).send(s.R.route(r, "remote", W, C, op=op))
good = s.R.wait(runs, n=2)
got = {x["run"]: x for r in runs for x in s.R.of(r, "result") if x["finish_reason"] != "cancelled"}
s.ok(good and len(got) == 20 and {(x["id"], 0): (x["tokens"], x["text"], x["finish_reason"]) for x in got.values()} == whole(reqs(20)), "they are the filter's to the bit", s.R.got)
s.ok({(x["mode"], x["fallback"]) for x in got.values()} == {("remote", None)}, "by KV", got)
for run_, x in got.items():
    s.R.event(run_, "streaming", choice=0, pos=0, tokens=len(x["tokens"]))
    s.R.event(run_, "completed", tokens=len(x["tokens"]))
A.p.send_signal(signal.SIGCONT)
for r in runs:
    s.R.cancel(r, A)
s.end()

s = Scene("who gave a run takes it from another")
A, W = pair(s, "--lease", "5s")
C = s.both("C", "prefill")
s.R.wait(crossing(s, A, W, reqs(1)))
W.p.send_signal(signal.SIGSTOP)
runs = [s.R.remote(q, A, W) for q in reqs(5)]
s.ok(s.R.wait(runs, "kv"), "it has published", s.R.got)
W.kill()
for r in runs:
    s.R.event(r["run"], "retry")
    s.R.event(r["run"], "route_selected")
    s.R.to(C).send(s.R.route(r, "remote", C, A, op=b"another attempt!"))
C.until({"published": 5})
time.sleep(0.3)                 # it has been offered, before the run is heard of
for r in runs:
    s.R.to(A).send(s.R.route(r, "remote", C, A, op=b"another attempt!"))
s.ok(s.R.wait(runs) and results(s.R, runs).items() <= FILTER.items() and by_kv(s, runs), "its KV is used", why(s.R, runs))
s.end()

s = Scene("both ends named alike")
A, W = pair(s)
r = s.R.remote(reqs(1)[0], A, A, first="p")
s.ok(s.R.wait([r], "error") and s.R.of(r, "error")[0]["message"].startswith("route: p and d are both this worker"), "refused with the remedy", s.R.got)
s.end()

# ---- pools as small as can be ----

# A pool of 16 blocks, runs of 8 (128 tokens): were all of it given away, neither would have room for what the other gives, for ever.
SMALL = [dict(id=i, token_ids=[3 + (7 * i + j) % 200 for j in range(113 + i % 8)], max_tokens=6, temperature=0, ignore_eos=True) for i in range(8)]
WANT = whole(SMALL)
for name, args in (("copied", ()), ("in place", ("--in-place",)), ("inline", ("--via", "inline"))):
    s = Scene(f"two pools of 16 blocks, {name}")
    A, W = pair(s, "--prefix-cache", "off", *args, mem="64KiB")
    t = time.time()
    runs = crossing(s, A, W, SMALL)
    s.ok(s.R.wait(runs, seconds=60) and results(s.R, runs) == WANT, "sixteen that cross are the filter's to the bit", why(s.R, runs))
    took = time.time() - t
    s.ok(by_kv(s, runs) and took < 15, "by KV, and nobody waited for the other", (took, why(s.R, runs)))
    s.ok(all(w.ledger()["leases_revoked"] == 0 and w.ledger()["not_taken"] == 0 for w in (A, W)), "no lease had to be revoked", (A.ledger(), W.ledger()))
    s.end()

s = Scene("a prompt of more than half of the pool")
A, W = pair(s, mem="64KiB")
big = dict(id="big", token_ids=[3 + j % 200 for j in range(140)], max_tokens=6, temperature=0, ignore_eos=True)
r = s.R.remote(big, A, W)
s.ok(s.R.wait([r], "error") and "needs 9 KV blocks, and a worker that decodes too gives 8 at the most" in s.R.of(r, "error")[0]["message"], "is not given", s.R.got)
s.R.local(r, W, new=False, fallback="prefill_failed: it is too large")
s.ok(s.R.wait([r]) and results(s.R, [r]) == whole([big]), "and can be computed where it is decoded", s.R.got)
s.end()

# What decodes needs more than half, and half is leased to another, which does not come for it. Somebody has to give way: the lease, after a while.
large = [dict(id=n, token_ids=[9 + j % 100 for j in range(100)], max_tokens=100, temperature=0, ignore_eos=True) for n in "AB"]
s = Scene("a run that outgrows the half that is its")
A, W = pair(s, "--prefix-cache", "off", mem="64KiB")
s.R.wait(crossing(s, A, W, SMALL[:1]))
W.p.send_signal(signal.SIGSTOP)
given = s.R.remote(SMALL[1], A, W)
s.ok(s.R.wait([given], "kv") and A.ledger()["blocks_leased"] == 8, "half is leased", A.ledger())
r = s.R.local(large[0], A, mode="aggregated")
s.ok(s.R.wait([r], seconds=10) and results(s.R, [r]) == whole(large[:1]) and A.ledger()["leases_revoked"] == 1, "the lease is revoked for it", (A.ledger(), A.said()))
W.p.send_signal(signal.SIGCONT)
s.ok(s.R.wait([given]) and results(s.R, [given]).items() <= WANT.items() and s.R.result(given)["mode"] == "local", "and who had it computes that KV", why(s.R, [given]))
s.end()

s = Scene("two of them, at two workers that give to each other")
A, W = pair(s, "--prefix-cache", "off", mem="64KiB")
for w in (A, W):
    w.p.send_signal(signal.SIGSTOP)
runs = [s.R.local(q, w, mode="aggregated") for q, w in zip(large, (A, W))]
crossed = crossing(s, A, W, SMALL[:4])
for w in (A, W):
    w.p.send_signal(signal.SIGCONT)
s.ok(s.R.wait(runs + crossed, seconds=60) and results(s.R, runs + crossed) == {**whole(large), **whole(SMALL[:4])}, "all end, to the bit", why(s.R, runs + crossed))
s.end()

tap.done()
