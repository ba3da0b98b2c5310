#!/usr/bin/env python3
"""P/D by real daemons on a tiny model, with the router played by script: KV by shm, inline and tcp, over Unix sockets, TCP and TLS, many runs at once, to the bit what
the filter and the aggregated worker give; what the decode worker holds already is not sent; and at the end of each scene every count is back at its start, and
the merged log of all keeps every rule."""
import json
import os
import re
import socket
import tempfile
import threading
import time

import pdset
import tap
from pdset import Router, Worker, at_start, check, reqs, results, whole
from tap import B, TINY, ok, run

tmp = tempfile.TemporaryDirectory()


def close(name, R, *workers):
    """The end of a scene."""
    good, why = at_start(*[w for w in workers if w.p.poll() is None])
    ok(good, f"{name}: every count is back at its start", why)
    R.close()
    ends = [w.end() for w in workers if w.p.poll() is None]
    ok(all(rc == 0 for rc, _ in ends), f"{name}: all drain", ends)
    c = check(R.path, *[w.trace for w in workers])
    ok(c.returncode == 0, f"{name}: the merged log keeps every rule", c.stdout + c.stderr)


KEYS = os.path.join(tmp.name, "keys")
with open(os.open(KEYS, os.O_WRONLY | os.O_CREAT, 0o600), "w") as f:
    f.write("k1 " + os.urandom(32).hex() + "\n")
TCP = ["--listen", "tcp-listen:127.0.0.1:0"]
NET = {"inline+tcp": TCP, "tcp+tcp": TCP, "tcp+key": [*TCP, "--key-file", KEYS]}
FILTER = whole(reqs(30))
for name in ("shm", "inline", *NET):
    via, net = name.split("+")[0], NET.get(name, [])
    P = Worker(tmp.name, name + "P", "prefill", *(net[2:] if net else []))
    D = Worker(tmp.name, name + "D", "decode", "--via", via, *net)
    if net:
        D.at = re.search(r"ready: .*(tcp:127.0.0.1:\d+)", D.said()).group(1)
    R = Router(os.path.join(tmp.name, name + "R.trace"))
    r = R.remote(reqs(1)[0], P, D)
    good = R.wait([r])
    ok(good and results(R, [r]).items() <= FILTER.items(), f"{name}: one run, prefilled there and decoded here, is the filter's to the bit", R.got)
    x, k = R.result(r), R.of(r, "kv")[0]
    ok(x and x["mode"] == "remote" and x["fallback"] is None and x["transferred_tokens"] == x["prompt_tokens"] and x["recomputed_tokens"] == 0 and x["kv_bytes"] > 0 and
       x["prefill_worker"].startswith("prefill@") and x["decode_worker"].startswith("decode@"), f"{name}: its result says how it came", x)
    ok(k["payload"] is None and k["lease"] is None and k["first"][0]["token"] == x["tokens"][0] and k["t"]["total_us"] > 0 and "route" not in k["request"],
       f"{name}: the router has the kv, with first token and times", k)
    fds = P.ledger()["fds"], D.ledger()["fds"]
    for first in ("d", "p"):
        runs = [R.remote(q, P, D, first=first) for q in reqs(30)]
        ok(R.wait(runs) and results(R, runs) == FILTER, f"{name}: thirty at once, {first} asked first", [R.got[r["run"]][-1] for r in runs if not R.of(r, "result")])
        modes = [R.result(r)["mode"] for r in runs]
        ok(modes == ["remote"] * 30, f"{name}: all of them by KV", [(R.result(r)["mode"], R.result(r)["fallback"]) for r in runs])
    three = reqs(4, n=3, logprobs=True, top_logprobs=2)
    runs = [R.remote(dict(q, stream=True), P, D) for q in three]
    for r in runs:
        R.expect(r, 3)
    ok(R.wait(runs, n=3) and results(R, runs) == whole(three), f"{name}: n > 1", R.got)
    ok(all(R.out[r["run"]] == {x["choice"]: x["tokens"] for x in R.of(r, "result")} for r in runs), f"{name}: and its tokens are streamed, each once", R.out)
    one = dict(reqs(1)[0], max_tokens=1)
    r = R.remote(one, P, D)
    ok(R.wait([r]) and results(R, [r]) == whole([one]), f"{name}: a run of one token", R.got[r["run"]])
    bare = [R.request(q) for q in reqs(5)]
    for q in bare:
        R.to(D).send({k: v for k, v in q.items()})
    loc = [R.local(q, D) for q in reqs(5)]
    agg = [R.local(q, D, mode="aggregated") for q in reqs(5)]
    ok(R.wait(bare + loc + agg) and results(R, bare).items() <= FILTER.items() and results(R, loc).items() <= FILTER.items() and results(R, agg).items() <= FILTER.items() and
       [R.result(r)["mode"] for r in bare + loc + agg] == ["aggregated"] * 5 + ["local"] * 5 + ["aggregated"] * 5, f"{name}: bare, local and aggregated requests are run whole", R.got)
    g, h = P.ledger(), D.ledger()
    ok(g[f"given_{via}"] == 66 == h[f"taken_{via}"] and g["given_bytes"] == h["taken_bytes"] > 0 and h["not_taken"] == 0, f"{name}: the ledgers count the same", (g, h))
    moved = [m for m in map(json.loads, run(tap.trace("cat", "--format", "json", P.trace)).stdout.splitlines()) if m.get("state") == "kv_moved"]
    ok(len(moved) == 66 and all(m["offered_bytes"] == m["skipped_bytes"] + m["sent_bytes"] and m["cause"] == via and 0 <= m["exposed_us"] <= m["complete_us"] and
                                (m["wire_bytes"] > 0) == (via != "shm") for m in moved) and sum(m["sent_bytes"] for m in moved) == g["given_bytes"],
       f"{name}: the trace tells of each what its way took, and what of that computing did not hide", moved[:2])
    ok((g["fds"], h["fds"]) == fds, f"{name}: no descriptor is left behind", (fds, g["fds"], h["fds"]))
    close(name, R, P, D)

# KV in blocks of another size: with leave it is converted on the way, whatever the way; without it the two never meet
for via in ("shm", "inline", "tcp,inline"):
    for size in ("5", "32"):
        P = Worker(tmp.name, f"{via}{size}P", "prefill", "-v", "--via", via, "--block-size", size)
        D = Worker(tmp.name, f"{via}{size}D", "decode", "--via", via, "--in-place", "--allow-convert", "block_size", *(["--listen", "tcp-listen:127.0.0.1:0"] if via[0] == "t" else []))
        if via[0] == "t":
            D.over_tcp()
        R = Router(os.path.join(tmp.name, f"{via}{size}R.trace"))
        runs = [R.remote(q, P, D) for q in reqs(30)]
        name = f"{via}, blocks of {size} into 16"
        ok(R.wait(runs) and results(R, runs) == FILTER, f"{name}: thirty at once are the filter's to the bit", [R.got[r["run"]][-1] for r in runs if not R.of(r, "result")])
        said = [(R.result(r)["mode"], R.result(r)["fallback"], R.result(r).get("converted")) for r in runs]
        ok(said == [("remote", None, "block_size")] * 30, f"{name}: all by KV, and their results say converted", said)
        if via[0] == "t":
            ok("connected, by inline (tcp: what has to be converted cannot be read straight into its place)" in P.said(), f"{name}: in the stream over TCP, and it is said why", P.said())
        close(name, R, P, D)
P = Worker(tmp.name, "otherP", "prefill", "--block-size", "32")
D = Worker(tmp.name, "otherD", "decode", "--allow-convert", "order")
R = Router(os.path.join(tmp.name, "otherR.trace"))
r = R.remote(dict(reqs(1)[0], timeouts_ms={"prefill": 1000}), P, D)
ok(R.wait([r]) and R.result(r)["mode"] == "local" and results(R, [r]).items() <= FILTER.items() and "converted" not in R.result(r), "without leave: computed here", R.got[r["run"]])
ok("block_size differs (prefill 32, decode 16)" in D.said() + P.said(), "and the refusal names the field and both values", (D.said(), P.said()))
close("without leave", R, P, D)
P = Worker(tmp.name, "onlyP", "prefill", "--via", "tcp", "--block-size", "32")
D = Worker(tmp.name, "onlyD", "decode", "--via", "tcp", "--allow-convert", "block_size", "--listen", "tcp-listen:127.0.0.1:0").over_tcp()
R = Router(os.path.join(tmp.name, "onlyR.trace"))
r = R.remote(dict(reqs(1)[0], timeouts_ms={"prefill": 1000}), P, D)
ok(R.wait([r]) and R.result(r)["mode"] == "local" and results(R, [r]).items() <= FILTER.items() and "tcp: what has to be converted" in D.said() + P.said(),
   "by streams alone it cannot be converted: computed here, and it is said", (R.got[r["run"]], P.said(), D.said()))
close("streams alone", R, P, D)

# ---- a forwarder between the two that takes one connection, and leaves the others where they knock ----

class OneOnly:
    def __init__(self, to):
        self.l = socket.create_server(("127.0.0.1", 0), backlog=50)
        self.at, self.p = "tcp:127.0.0.1:%d" % self.l.getsockname()[1], to.p
        self.name = to.name
        self.to = ("127.0.0.1", int(to.at.rsplit(":", 1)[1]))
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        a, b = self.l.accept()[0], socket.create_connection(self.to)
        for x, y in ((a, b), (b, a)):
            threading.Thread(target=self.pump, args=(x, y), daemon=True).start()

    def pump(self, x, y):
        while d := x.recv(65536):
            y.sendall(d)


P = Worker(tmp.name, "fwdP", "prefill", "-v")
D = Worker(tmp.name, "fwdD", "decode", "--listen", "tcp-listen:127.0.0.1:0").over_tcp()
R = Router(os.path.join(tmp.name, "fwdR.trace"))
t0 = time.monotonic()
between, r = OneOnly(D), R.request(reqs(1)[0])
R.event(r["run"], "route_selected")
for w in (D, P):
    R.to(w).send(R.route(r, "remote", P, between))
ok(R.wait([r]) and results(R, [r]).items() <= FILTER.items() and R.result(r)["mode"] == "remote" and time.monotonic() - t0 < 6,
   f"a forwarder of one connection: by KV, after {time.monotonic() - t0:.1f} s", R.got)
ok("by tcp, inline (tcp: no stream of data stood within 2000 ms)" in P.said() and D.ledger()["taken_inline"] == 1, "and it is said that it goes in the stream, and why", P.said())
close("forwarder", R, P, D)

# ---- blocks that the decode worker holds are not sent ----

TOLD = "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 2
ASKED = [dict(id=i, prompt=TOLD + end, max_tokens=12, temperature=0.8, seed=i, ignore_eos=True) for i, end in
         enumerate(("Who sleeps?", "And what does the dog do then, one wonders?", "", "Is it a red fox?"))]
WANT = whole(ASKED)
BLOCK, RANGE = 4096, 32     # bytes of KV of a block of 16 tokens; tokens of a chunk (--chunk 32)


def given(P, R, runs):
    """Bytes that went from P while these runs were served: (all well, bytes)."""
    before = P.ledger()["given_bytes"]
    rs = runs()
    good = R.wait(rs) and results(R, rs).items() <= WANT.items() and all(R.result(r)["mode"] == "remote" and not R.result(r)["fallback"] for r in rs)
    P.until({"moves": 0})
    return good, [R.result(r) for r in rs], P.ledger()["given_bytes"] - before


def size_of(x, held=0):
    return ((x["prompt_tokens"] + 15) // 16 - held // 16) * BLOCK


for how, via, args in (("inline", "inline", ()), ("shm, copied", "shm", ()), ("shm, in place", "shm", ("--in-place",))):
    P = Worker(tmp.name, how + "P", "prefill", "--via", "shm,inline")
    D = Worker(tmp.name, how + "D", "decode", "--via", via, *args)
    R = Router(os.path.join(tmp.name, how + "R.trace"))
    if args:                # what is read in place does not stay
        a = R.local(ASKED[0], D)
        ok(R.wait([a]) and results(R, [a]).items() <= WANT.items(), f"{how}: a run of its own", R.got)
    else:
        good, (x,), sent = given(P, R, lambda: [R.remote(ASKED[0], P, D)])
        ok(good and sent == size_of(x) == x["kv_bytes"] and x["cached_tokens"] == 0 and x["transferred_tokens"] == x["prompt_tokens"], f"{how}: the first one is sent whole", (x, sent))
    good, (x,), sent = given(P, R, lambda: [R.remote(ASKED[1], P, D)])
    held = x["cached_tokens"]
    ok(good and held >= 64 and held % RANGE == 0 and sent == size_of(x, held) == x["kv_bytes"], f"{how}: of one that begins alike the rest is sent, and it comes out the same",
       (x, sent, D.ledger()))
    ok(x["transferred_tokens"] == x["prompt_tokens"] - held and x["recomputed_tokens"] == 0 and D.ledger()["held_blocks"] == held // 16, f"{how}: and its result says so", x)
    good, (x,), sent = given(P, R, lambda: [R.remote(ASKED[0], P, D)])
    ok(good and x["cached_tokens"] >= held and sent == size_of(x, x["cached_tokens"]), f"{how}: the same again", (x, sent))
    good, (x,), sent = given(P, R, lambda: [R.remote(dict(ASKED[3], cache_salt="another tenant"), P, D)])
    ok(good and x["cached_tokens"] == 0 and sent == size_of(x), f"{how}: nothing of it for another tenant", (x, sent))
    good, xs, sent = given(P, R, lambda: [R.remote(q, P, D) for q in ASKED * 5])
    ok(good and sent == sum(size_of(x, x["cached_tokens"]) for x in xs) and all(x["cached_tokens"] for x in xs), f"{how}: twenty at once", (xs, sent))
    close(how, R, P, D)

for via in ("inline", "shm"):
    P = Worker(tmp.name, via + "eP", "prefill")
    D = Worker(tmp.name, via + "eD", "decode", "--via", via, mem="64KiB")      # 16 blocks
    R = Router(os.path.join(tmp.name, via + "eR.trace"))
    good, (x,), _ = given(P, R, lambda: [R.remote(ASKED[0], P, D)])
    ok(good and D.ledger()["blocks_cached"] >= 7, f"{via}: held after the first", D.ledger())
    others = [dict(id=f"other{i}", prompt=f"{i} tales of another kind: " * 10, max_tokens=20, seed=i, ignore_eos=True) for i in range(3)]
    WANT.update(whole(others))
    a = [R.local(q, D) for q in others]
    ok(R.wait(a) and results(R, a).items() <= WANT.items(), f"{via}: others evict it", R.got)
    good, (x,), sent = given(P, R, lambda: [R.remote(ASKED[1], P, D)])
    ok(good and x["cached_tokens"] < held and sent == size_of(x, x["cached_tokens"]), f"{via}: what was evicted is sent again, and it comes out the same", (x, sent))
    close(via + ", evicted", R, P, D)

tap.done()
