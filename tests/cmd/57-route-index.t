#!/usr/bin/env python3
"""What the router knows of the KV that its workers hold: from their events, over either connection; a prompt goes where its beginning is. Events that do not follow,
lie, or come from another life; workers that send none; memory that is bounded."""
import os
import socket
import threading
import time

import tap
from fake import at, block_hashes, Fake, Holder, results, right, Router, router, tmp, until
from packed import msgpack
from pdset import Worker
from tap import B, ok, one_line, run

def prompt(k, n):
    return [1 + (k * 131 + i * 7) % 250 for i in range(n)]


def ask(r, ids, **kw):
    return results(r.ask(dict({"token_ids": ids, "max_tokens": 2, "ignore_eos": True}, **kw)))[0]


def route(r):
    """The last decision."""
    return [e for e in r.events() if e["pd"] == "route"][-1]


def row(r, w):
    x = [x for x in route(r)["d"] if x["worker"] == w.name][0]
    return dict({"hit_blocks": 0, "index": None, "index_age_us": 0}, **x)


def ends(r, name):
    rc, err = r.stop()
    c = run([f"{B}/bin/pd-trace", "check", r.trace])
    ok(rc == 0 and c.returncode == 0, f"{name}: drained, and the trace holds every invariant", (rc, err[-1500:], c.stdout, c.stderr))
    return err


# ---- events of fake workers ----

a, b = Holder(at("a")), Holder(at("b"), blocks=1000)
r = router(workers=[a, b])
b.register = r.path             # both ways: one of them is asked
threading.Thread(target=b.dial_in, daemon=True).start()
ok(until(lambda: len(a.asked) == len(b.asked) == 1) and a.asked[0]["follow"] and "seq" not in a.asked[0] and r.until("index_known", 2), "workers are asked for events, once each", (a.asked, b.asked))
X, Y = prompt(1, 100), prompt(2, 100)
a.store(X)
b.store(X[:40])
b.store(Y)
ok(r.until("index_copies", 14) and r.ledger()["index_blocks"] == 12, "what they store is known", r.ledger())
to = [ask(r, p)["decode_worker"] for p in (X, X, X, Y, Y)]
ok(to == [a.name] * 3 + [b.name] * 2, "a prompt goes to the worker that holds most of its beginning", to)
x = ask(r, X)
ok((row(r, a)["hit_blocks"], row(r, b)["hit_blocks"]) == (6, 2) and row(r, a)["index"] == "events" and 0 <= row(r, a)["index_age_us"] < 1000000 and route(r)["degraded"] == []
   and route(r)["versions"]["index"] > 0 and tap.b64(route(r)["input"]["digest"]) == block_hashes(a.fp, X)[-1], "the route record tells how much each holds, how that is known and how old it is", route(r))
ask(r, X, cache_salt="s")
ok(row(r, a)["hit_blocks"] == row(r, b)["hit_blocks"] == 0, "with another salt it is another prompt", route(r))
a.store(X, salt=b"s")
ok(r.until("index_copies", 20) and ask(r, X, cache_salt="s")["decode_worker"] == a.name and row(r, a)["hit_blocks"] == 6, "whose blocks are known by it")
ask(r, X, cache_salt="s" * 257)
ok(row(r, a)["hit_blocks"] == 0 and route(r)["degraded"] == [], "what has so long a key is cached by no worker", route(r))
a.remove(X, 1)
ok(r.until("index_copies", 15) and ask(r, X)["decode_worker"] == b.name and row(r, a)["hit_blocks"] == 1, "nor what has left")
got = r.ask({"prompt": "text", "max_tokens": 2})
ok(right(got, {"prompt": "text", "max_tokens": 2}) and route(r)["degraded"] == ["no_token_ids"] and row(r, a)["index"] is None, "text is routed by load alone, and the record says so", route(r))
b.publish(b.event("cleared"))
ok(r.until("index_copies", 7), "all of one is cleared", r.ledger())

# ---- that do not follow, and lie ----

a.store(X)
r.until("index_copies", 12)
n = len(a.asked)
a.change += 1                   # one is lost
a.snapshots = False
a.store(Y)
ok(until(lambda: len(a.asked) == n + 1) and "seq" not in a.asked[-1] and r.until("index_in_doubt", 1) and r.ledger()["index_copies"] == 12, "after a gap a snapshot is asked for", (a.asked, r.ledger()))
x = ask(r, X)
ok(row(r, a)["hit_blocks"] == 0 and row(r, a)["index"] == "doubt" and "index_in_doubt" in route(r)["degraded"], "meanwhile nothing is believed, and the record says so", route(r))
a.store(prompt(3, 64))
g = r.ledger()
ok(g["index_gaps"] == 1 and g["index_in_doubt"] == 1, "changes that come before it are not held against it again", g)
ok(until(lambda: len(a.asked) == n + 2, 5), "it is asked for again, when none comes", a.asked)
a.publish(a.whole())
ok(r.until("index_known", 2) and r.until("index_copies", len(a.held)) and ask(r, Y)["decode_worker"] == a.name and row(r, a)["hit_blocks"] == 6, "with it all is right again", r.ledger())
for say, ev, words in (
        ("of another block size", lambda c: c.event("stored", block_hashes(c.fp, Y, 32), size=32), "blocks of 32 tokens"),
        ("of a part that is not due", lambda c: dict(c.whole(), part=3, parts=5), "part 3"),
        ("that is none", lambda c: {"pd": "kvevent", "v": 1, "life": c.pub, "seq": 7, "op": "eaten"}, "eaten"),
        ("of another life in the middle", lambda c: dict(c.event("stored", block_hashes(c.fp, prompt(9, 32))), life=b"somebody"), "another life")):
    before, c = r.ledger(), Holder(at("c"), register=r.path)
    until(lambda: c.sinks)
    c.store(Y)
    c.publish(ev(c))
    ok(until(lambda: len(c.asked) == 2) and r.until("index_in_doubt", 0) and r.until("index_copies", len(a.held) + 6), f"one {say}: doubted, asked for, and right again", r.ledger())
    c.publish(c.event("cleared"))
    c.die()
    err = open(r.path + ".err").read()
    ok(words in err and "what it holds is not known any more" in err and r.ledger()["index_refused"] + r.ledger()["index_gaps"] == before["index_refused"] + before["index_gaps"] + 1, "and said aloud", err)
before = r.ledger()
a.snapshots = True
a.change += 1
dup = a.event("stored", block_hashes(a.fp, prompt(20, 32)), seq=a.change)
a.held.update(zip(block_hashes(a.fp, prompt(20, 32)), (bytes(16), bytes(16))))
a.publish(dup, dup, dup)
ok(r.until("index_copies", len(a.held)) and r.ledger()["index_events"] == before["index_events"] + 1 and r.ledger()["index_gaps"] == before["index_gaps"], "one that comes three times counts once", r.ledger())
a.store(prompt(30, 64), first=2)
ok(r.until("index_copies", len(a.held)), "a chain whose parent it does not hold is taken as it is")
lie = [os.urandom(16) for _ in range(1100)]
b.held = {}
b.publish(b.event("stored", lie[:600]), b.event("stored", lie[600:]))
ok(r.until("index_refused", before["index_refused"] + 1) and "more than 1000 blocks" in open(r.path + ".err").read() and r.until("index_copies", len(a.held)), "who tells of more blocks than it has is not believed", r.ledger())

# ---- connections and lives ----

n = len(a.asked)
for c in a.conns[:]:
    c.close()
a.sinks.clear()
ok(until(lambda: len(a.asked) == n + 1) and a.asked[-1].get("seq") == a.change and a.asked[-1].get("life") == a.pub and r.ledger()["index_copies"] == len(a.held),
   "a connection that comes back goes on where it was", a.asked[-1])
a.store(prompt(31, 48))
ok(r.until("index_copies", len(a.held)), "without a snapshot")
a.die()
a.life, a.pub, a.change, a.held = os.urandom(8), os.urandom(8), 0, {}
a.sinks.clear()
a.start()
ok(r.until("index_copies", 0) and until(lambda: "seq" not in a.asked[-1]), "another process holds nothing of what the one before held", r.ledger())
a.store(X)
ok(r.until("index_copies", 6), "and tells of what it holds")
err = ends(r, "events")
ok("blocks of 32 tokens, from a worker that registered blocks of 16" in err, "a warning names both sizes")

r = router("--gone-after", "300ms", "--suspect-after", "200ms", workers=[])
h = [Holder(at("h"), register=r.path) for _ in range(3)]
r.until("index_known", 3)
for k, w in enumerate(h):
    w.store(prompt(k, 160))
r.until("index_copies", 30)
h[0].beats = False
h[1].die()
ok(r.until("index_copies", 10) and r.until("index_known", 1), "who is silent or gone for long leaves the index", r.ledger())
h[0].beats = True
ok(r.until("index_copies", 20) and "seq" not in h[0].asked[-1], "and is asked anew when it is back", r.ledger())
ends(r, "gone")

# ---- without events ----

a, b = Fake(at("a")), Fake(at("b"))
r = router(workers=[a, b])
first = ask(r, X)["decode_worker"]
ok(route(r)["degraded"] == ["approximate"] and row(r, a)["index"] == "guess" and r.ledger()["index_guessed"] == 2, "a worker that sends no events is guessed at, and the record says so", route(r))
to = [ask(r, X + [9] * k)["decode_worker"] for k in range(6)]
ok(set(to) == {first} and row(r, a if first == a.name else b)["hit_blocks"] == 6, "it is presumed to hold what it was sent", to)
to = {ask(r, prompt(50 + k, 64))["decode_worker"] for k in range(16)}
ok(to == {a.name, b.name}, "other prompts still go to both")
ends(r, "without events")

# ---- a bound of memory ----

x = run([f"{B}/bin/pd-route", "--listen", f"unix:{at('r')}", "--index-bytes", "1000"])
ok(x.returncode == 2 and b"--index-bytes: '1000'" in x.stderr and one_line(x.stderr), "--index-bytes of less than 1MiB: usage", x)
a = Holder(at("a"), blocks=1 << 20)
r = router("--index-bytes", "1MiB", workers=[a])
r.until("index_known", 1)
for k in range(100):
    a.publish(a.event("stored", [os.urandom(16) for _ in range(1000)]))
r.until("index_events", 100)
g = r.ledger()
ok(g["index_bytes"] <= 1 << 20 and g["index_forgotten"] + g["index_blocks"] == 100000 and g["index_blocks"] > 10000 and g["index_known"] == 1, "--index-bytes bounds the index: the rest is forgotten", g)
ends(r, "memory")


# ---- real workers, and a relay that loses an event ----

class Relay:
    """Between the router and a worker; `lose` says which of the worker's records are not passed on."""

    def __init__(self, path, to):
        self.path, self.to, self.lose, self.lost = path, to, lambda rec: False, 0
        self.l = socket.socket(socket.AF_UNIX)
        self.l.bind(path)
        self.l.listen(16)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            s = self.l.accept()[0]
            t = socket.socket(socket.AF_UNIX)
            t.connect(self.to)
            threading.Thread(target=self.pump, args=(s, t), daemon=True).start()
            threading.Thread(target=self.back, args=(t, s), daemon=True).start()

    def pump(self, src, dst):
        while d := self.recv(src):
            dst.sendall(d)
        self.shut(dst)

    def recv(self, s):
        try:
            return s.recv(65536)
        except OSError:
            return b""

    def shut(self, s):
        try:
            s.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def back(self, src, dst):
        u = msgpack.Unpacker(max_buffer_size=1 << 27)
        while d := self.recv(src):
            u.feed(d)
            for rec in u:
                if self.lose(rec):
                    self.lost += 1
                    continue
                try:
                    dst.sendall(msgpack.packb(rec))
                except OSError:
                    return
        self.shut(dst)


w = Worker(tmp.name, "w0", "decode", "--role", "both", mem="1MiB")
relay = Relay(at("relay"), w.path)
r = router("--worker", f"unix:{relay.path}")
r.until("workers_ready", 1)
v = Worker(tmp.name, "w1", "decode", "--role", "both", "--register", f"unix:{r.path}", mem="1MiB")
ok(r.until("index_known", 2), "real workers, one named and one that registers, tell of what they hold", r.ledger())


def agree():
    """The router's index against the workers' own ledgers."""
    def same():
        return r.ledger()["index_copies"] == w.ledger()["blocks_cached"] + v.ledger()["blocks_cached"]
    return until(same, 5)


def hits(ids):
    """What the router thought that the worker held, and what it held."""
    res = ask(r, ids)
    x = [d for d in route(r)["d"] if d["worker"] == res["decode_worker"]][0]
    return x.get("hit_blocks", 0), res["cached_tokens"] // 16, res["decode_worker"]


P = [prompt(60 + k, 100) for k in range(8)]
cold = [hits(p) for p in P]
ok(agree() and all(x[:2] == (0, 0) for x in cold) and len({x[2] for x in cold}) == 2, "prompts that nobody has go to both", cold)
warm = [hits(p) for p in P]
ok([x[2] for x in warm] == [x[2] for x in cold] and all(x[:2] == (6, 6) for x in warm), "and again to the one that holds them, which finds them there", (cold, warm))
tails = [hits(p + prompt(90 + k, 50)) for k, p in enumerate(P)]
ok([x[2] for x in tails] == [x[2] for x in cold] and all(x[:2] == (6, 6) for x in tails), "also with another end", tails)
relay.lose = lambda rec: rec.get("pd") == "kvevent" and relay.lost == 0
k = 0
while relay.lost == 0 and k < 20:
    ask(r, prompt(200 + k, 60))
    k += 1
time.sleep(0.2)
before = r.ledger()
while r.ledger()["index_gaps"] == 0 and k < 40:
    ask(r, prompt(200 + k, 60))
    k += 1
ok(relay.lost == 1 and before["index_gaps"] == 0 and r.ledger()["index_gaps"] == 1 and r.until("index_known", 2) and r.ledger()["index_snapshots"] == 3,
   "an event that is lost on the way is noticed at the next one, and a snapshot comes", (before, r.ledger()))
ok(agree() and "comes after change" in open(r.path + ".err").read(), "and the index is what the workers hold", (r.ledger(), w.ledger(), v.ledger()))
again = [hits(p) for p in P]
ok(all(x[0] == x[1] for x in again), "block by block", again)
for k in range(40):             # past what the pools hold: blocks are evicted
    ask(r, prompt(300 + k, 250))
some = [hits(prompt(300 + k, 250)) for k in (0, 20, 39)]
ok(agree() and all(x[0] == x[1] for x in some) and w.ledger()["blocks_free"] < 64, "also while blocks are evicted", (some, r.ledger(), w.ledger(), v.ledger()))
# ---- text, with a tokenizer ----

rt = router("-m", tap.TINY, workers=[w, v])
rt.until("index_known", 2)
texts = [f"Long before there were {k} foxes in the hills, people told each other of them. " * 3 for k in range(6)]
asked = [dict({"prompt": t, "max_tokens": 3, "seed": k}) for k, t in enumerate(texts)] + [{"messages": [{"role": "user", "content": texts[0]}], "max_tokens": 3, "seed": 1}]
cold = [results(rt.ask(q))[0] for q in asked]
until(lambda: rt.ledger()["index_copies"] == w.ledger()["blocks_cached"] + v.ledger()["blocks_cached"], 5)
got = []
for q in asked:
    x = results(rt.ask(q))[0]
    d = [d for d in route(rt)["d"] if d["worker"] == x["decode_worker"]][0]
    got.append((x, d, route(rt)))
ok(all(x["decode_worker"] == c["decode_worker"] and x["tokens"] == c["tokens"] and x["text"] == c["text"] for (x, _, _), c in zip(got, cold)), "with -m text goes where its beginning is, to the same tokens", (got, cold))
ok(all(d["hit_blocks"] == x["cached_tokens"] // 16 > 2 and e["degraded"] in ([], ["no_topology"]) and e["input"]["exact"] and e["input"]["n_tokens"] == x["prompt_tokens"] for x, d, e in got),
   "whose blocks are counted as its worker counts them", got)
own = Router(at("r"), workers=[w, v])
plain = [results(own.ask(q))[0] for q in asked]
ok([(x["tokens"], x["prompt_tokens"]) for x in plain] == [(x["tokens"], x["prompt_tokens"]) for x in cold], "and to the same as where the worker tokenises", (plain, cold))
own.stop()
f = Fake(at("f"))
rf = router("-m", tap.TINY, workers=[f])
x = rf.ask({"prompt": "Once upon a time", "max_tokens": 2})
ok(right(x, {"prompt": "Once upon a time", "max_tokens": 2}) and "token_ids" not in f.requests[-1] and f.requests[-1]["prompt"] == "Once upon a time" and "no_token_ids" in route(rf)["degraded"],
   "a worker of another tokenizer gets the text as it came", f.requests)
err = ends(rf, "another tokenizer")
ok(err.count("its tokenizer is not that of -m") == 1, "which is said once", err)
big = {"prompt": "x" * (2 << 20), "max_tokens": 2}
x = results(rt.ask(big))
ok(len(x) == 1 and x[0]["finish_reason"] == "error" and route(rt)["degraded"][0] == "no_token_ids", "text past 1 MiB is not tokenised here", x)
x = rt.ask({"prompt": "x" * 9000, "max_tokens": 2})
ok(results(x)[0]["finish_reason"] == "error" and "context" in [e for e in x if e["pd"] == "error"][0]["message"], "what is longer than every context is refused here", x)
ends(rt, "text")
x = run([f"{B}/bin/pd-route", "--listen", f"unix:{at('r')}", "-m", "/nonexistent"])
ok(x.returncode == 1 and b"/nonexistent" in x.stderr and one_line(x.stderr), "a model that is not there", x)
x = run([f"{B}/bin/pd-route", "--listen", f"unix:{at('r')}", "--chat-template", "chatml"])
ok(x.returncode == 2 and b"--chat-template" in x.stderr, "--chat-template without -m: usage", x)

w.kill()
ok(r.until("workers_ready", 1) and ask(r, P[0])["decode_worker"].endswith(str(v.p.pid)), "the rest goes on when one is killed")
ends(r, "real workers")
v.end()
tap.done()
