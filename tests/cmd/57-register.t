#!/usr/bin/env python3
"""What a worker says of itself: --describe, who follows its status, routers that it dials; epochs. On a tiny model."""
import atexit
import json
import os
import signal
import socket
import subprocess
import tempfile
import time

import tap
from packed import msgpack
from tap import decode, lines, ok, one_line, prefill, records, results, run

tmp = tempfile.TemporaryDirectory()


def at(name):
    return os.path.join(tmp.name, name)


# ---- --describe ----

p, d = run(prefill("--describe")), run(decode("--describe", "--format", "json", "--listen", "unix:d0", "--epoch", "7", "--domain", "rack-1", "--max-seqs", "3", "--kv-mem", "4MiB"), cwd=None)
pw, dw = msgpack.unpackb(p.stdout), json.loads(d.stdout)
ok(p.returncode == d.returncode == 0 and p.stderr == d.stderr == b"" and list(pw)[:2] == ["pd", "v"] and pw["pd"] == dw["pd"] == "worker", "--describe prints one worker record", (p, d))
ok(pw["role"] == "prefill" and dw["role"] == "decode" and pw["worker"].startswith("prefill@") and dw["worker"].startswith("decode@"), "with its role")
ok(len(pw["fingerprint"]["fields"]) > 30 and dw["fingerprint"]["fields"]["block_size"] == 16 and pw["layout"]["layers"] == pw["fingerprint"]["fields"]["layers"]
   and pw["model_revision"].split("@")[1] == pw["fingerprint"]["fields"]["weights_digest"].hex()[:12] and pw["numerics"] == pw["fingerprint"]["fields"]["numerics"],
   "the fingerprint with all its fields, the layout, the revision", pw)
ok(dw["epoch"] == 7 and dw["domain"] == "rack-1" and dw["listen"] == f"unix:{os.getcwd()}/d0" and "listen" not in pw and pw["domain"] == "local" and pw["epoch"] == 0, "epoch, domain and an absolute address", dw)
one = dw["layout"]["layers"] * dw["layout"]["kv_heads"] * dw["layout"]["head_dim"] * 16 * 2 * 2
ok(dw["capacity"] == {"blocks": (4 << 20) // one, "block_size": 16, "max_seqs": 3, "max_runs": 12, "context": dw["capacity"]["context"]} and dw["capacity"]["context"] > 0,
   "capacity is what the options give", (dw["capacity"], one))
ok(set(dw["load"].values()) == {0} and dw["via"] == ["shm", "tcp", "inline"] and "seq" not in dw and "life" not in dw, "no load and no life: it serves nothing")
x = run(prefill("--describe", "-o", at("workers")))
open(at("workers"), "ab").write(p.stdout)
y = run(tap.trace("cat", at("workers")))
ok(x.returncode == 0 and [r["role"] for r in records(y.stdout)] == ["prefill", "prefill"], "cat of such records is a file that can be looked at", y)
for args, say in ((["--epoch", "-1"], b"--epoch"), (["--epoch", "x"], b"--epoch"), (["--domain", ""], b"--domain"), (["--domain", "x" * 64], b"--domain")):
    x = run(prefill("--describe", *args))
    ok(x.returncode == 2 and say in x.stderr and one_line(x.stderr) and not x.stdout, f"{' '.join(args)[:30]}: usage", x)
x = run(decode("--describe", "--role", "cook"))
ok(x.returncode == 2 and b"--role: 'cook'" in x.stderr, "an unknown role: usage", x)
x = run(decode("--describe", "--listen", "tcp:1"))
ok(x.returncode == 2 and b"tcp:1" in x.stderr, "an endpoint that is none: usage", x)
long = "unix:" + os.path.join(tmp.name, "x" * 107)
for args in (["--listen", f"unix:{at('u')}", "--register", long], ["--listen", long]):
    x = run(decode(*args), timeout=20)
    ok(x.returncode == 2 and args[-2].encode() in x.stderr and b"107 bytes" in x.stderr and one_line(x.stderr) and not os.path.exists(at("u")), f"{args[-2]} with a path that nobody can dial: usage", x)
deep = os.path.join(tmp.name, "d" * 100)
os.mkdir(deep)
x = run([*decode("--listen", "unix:R", m=os.path.abspath(tap.TINY))], cwd=deep, timeout=20)
ok(x.returncode == 2 and b"--listen" in x.stderr and b"107 bytes" in x.stderr and not os.listdir(deep), "nor one that is short only from here", x)
x = run(decode("--register", "unix:R"))
ok(x.returncode == 2 and b"--register" in x.stderr, "--register is for daemons", x)

# ---- epochs ----

REQ = [{"id": 1, "prompt": "Once upon a time", "max_tokens": 6}]
kv = run(prefill("--epoch", "1", "--domain", "here"), lines(REQ)).stdout
ok(b"epoch\x01" in kv and b"domain\xa4here" in kv, "a descriptor carries epoch and domain")
same, other, strict = [run(decode("--format", "json", "--epoch", e, *a), kv) for e, a in (("1", ()), ("2", ()), ("2", ("--on-mismatch", "fail")))]
a, b = results(same.stdout)[0], results(other.stdout)[0]
ok(a["mode"] == "remote" and b["mode"] == "local" and "epoch differs (prefill 1, decode 2)" in b["fallback"] and a["tokens"] == b["tokens"] and other.returncode == 0,
   "KV of another epoch is not used: computed here, to the same tokens", (same, other))
ok(strict.returncode == 3 and b"epoch differs" in strict.stderr, "or refused: exit 3", strict)


# ---- a daemon ----

class Daemon:
    def __init__(self, name, *args, mem="4MiB"):
        self.path = at(name)
        r, w = os.pipe()
        self.err = open(self.path + ".err", "w+b")
        self.p = subprocess.Popen(decode("-t", "1", "--chunk", "32", "--max-seqs", "4", "--kv-mem", mem, "--listen", f"unix:{self.path}", "--role", "both", "--ready-fd", str(w), *args),
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.err, pass_fds=[w])
        os.close(w)
        atexit.register(self.p.kill)
        os.fdopen(r, "rb").readline()

    def says(self):
        return open(self.path + ".err").read()

    def end(self):
        self.p.send_signal(signal.SIGTERM)
        try:
            return self.p.wait(60)
        except subprocess.TimeoutExpired:
            self.p.kill()
            return -1


class Peer:
    """One end of a connection that speaks msgpack."""
    def __init__(self, s):
        self.s, self.u = s, msgpack.Unpacker()
        s.settimeout(30)

    def send(self, *recs):
        self.s.sendall(b"".join(map(msgpack.packb, recs)))

    def next(self):
        """The next record; None at the end."""
        while True:
            for r in self.u:
                return r
            data = self.s.recv(65536)
            if not data:
                return None
            self.u.feed(data)

    def until(self, what, most=60):
        for _ in range(most):
            r = self.next()
            if r is None or what(r):
                return r


def dial(path):
    s = socket.socket(socket.AF_UNIX)
    s.connect(path)
    return Peer(s)


d = Daemon("d0", "--epoch", "3")
f = dial(d.path)
t0 = time.time()
f.send({"pd": "status", "follow": True})
first = f.next()
at_once = time.time() - t0
ok(first["pd"] == "worker" and first["state"] == "ready" and first["role"] == "both" and first["listen"] == f"unix:{d.path}" and first["pid"] == d.p.pid and first["epoch"] == 3
   and len(first["life"]) == 8 and len(first["boot"]) == 16 and first["beat_us"] == 1000000 and at_once < 0.5, "status with follow: the worker record at once", (at_once, first))
beats = [f.next(), f.next()]
ok([r["seq"] for r in beats] == [first["seq"] + 1, first["seq"] + 2] and 0.9 < time.time() - t0 < 3.5 and all({**r, "seq": 0} == {**first, "seq": 0} for r in beats),
   "and one each heartbeat, numbered", (time.time() - t0, beats))
half = dial(d.path)             # as socat is, when its input ends
half.s.sendall(b'{"pd":"status","follow":true}\n')
half.s.shutdown(socket.SHUT_WR)
time.sleep(2.5)
got = half.s.recv(1 << 20).decode().splitlines()
ok(len(got) >= 3 and all(json.loads(x)["pd"] == "worker" for x in got), "one that has ended its writing follows too, in JSON", got)
half.s.close()
c = dial(d.path)
MANY = [{"token_ids": [1 + i % 200 for i in range(100)], "max_tokens": 100, "id": i, "ignore_eos": True} for i in range(16)]
sent = 0


def loaded(x):
    return x["runs"] == 16 and x["seqs"] > 0 and x["blocks_used"] > 0 and x["kv_tokens"] > 0 and 0 < x["waiting"] <= 16 and x["prefill_tokens_ahead"] > 0


busy, until = None, time.time() + 60
while not busy or not loaded(busy) and time.time() < until:     # asked between two heartbeats it answers
    if not busy or not busy["runs"]:                            # a tiny model may be done before it is asked
        c.send(*MANY)
        sent += len(MANY)
    f.send({"pd": "status"})
    busy = f.next()["load"]
ok(loaded(busy) and busy["blocks_used"] <= first["capacity"]["blocks"], "the load is that of the moment", busy)
f.send({"pd": "cancel"})
e = f.until(lambda r: r["pd"] != "worker")
ok(e["pd"] == "error" and "belongs on another" in e["message"], "other records are told that this is no place for them", e)
done = [c.next() for _ in range(sent)]
idle = f.until(lambda r: r["load"]["runs"] == 0)["load"]
ok(all(r["pd"] == "result" for r in done) and set(idle.values()) == {0}, "and back to nothing", idle)
c.send({"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True})
c.next()
d.p.send_signal(signal.SIGTERM)
last = f.until(lambda r: r["state"] != "ready")
ok(last["state"] == "draining", "a drain is told at once", last)
ok(c.until(lambda r: r["pd"] == "result", 300)["finish_reason"] == "length" and d.p.wait(60) == 0 and f.until(lambda r: False) is None,
   "who follows does not keep it: it ends, and the connection says so")

# ---- routers ----

def listen(path):
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(20)
    if os.path.exists(path):
        os.unlink(path)
    s.bind(path)
    s.listen(8)
    return s


R = at("R")
d = Daemon("d1", "--register", f"unix:{R}", "--register", f"unix:{at('Q')}")
time.sleep(0.3)
r = listen(R)
peer = Peer(r.accept()[0])
a, b = peer.next(), peer.next()
ok(a["pd"] == "worker" and a["state"] == "ready" and b["seq"] > a["seq"] and b["life"] == a["life"], "--register dials a router that comes later, and sends the same", (a, b))
r.close()
peer.s.close()
time.sleep(0.5)
r = listen(R)
t0 = time.time()
peer = Peer(r.accept()[0])
waited = time.time() - t0
again = peer.next()
ok(again["life"] == a["life"] and again["seq"] > b["seq"] and waited < 3, "and dials again when it comes back", waited)
said = d.says()
ok(said.count("the router is gone") == 1 and said.count(f"{at('Q')}: cannot connect") == 1 and said.count("the router is there") == 2, "each is told once, not at every try", said)
peer.send({"pd": "error", "v": 1, "class": "incompatible", "code": 3, "message": "block_size differs (here 32, there 16)"})
peer.s.close()
for i in range(2):              # refused each time
    peer = Peer(r.accept()[0])
    peer.next()
    peer.send({"pd": "error", "v": 1, "class": "incompatible", "code": 3, "message": "block_size differs (here 32, there 16)"})
    peer.s.close()
said = d.says()
ok(said.count("block_size differs") == 1, "what a router says against it is told, once", said)
peer = Peer(r.accept()[0])
peer.next()
peer.send({"pd": "status", "follow": True, "events": True})
snap = peer.until(lambda x: x["pd"] != "worker")
c = dial(d.path)
c.send({"token_ids": list(range(1, 41)), "max_tokens": 1})
c.next()
stored = peer.until(lambda x: x["pd"] != "worker")
peer.send({"pd": "status", "events": True})
whole = peer.until(lambda x: x["pd"] != "worker")
ok((snap["op"], snap["seq"], "hashes" in snap, stored["op"], stored["seq"], len(stored["hashes"])) == ("snapshot", 0, False, "stored", 1, 32) and
   (whole["op"], whole["seq"], whole["hashes"]) == ("snapshot", 1, stored["hashes"]), "a router that asks is told of the prefix cache over the registration, and again when it asks again",
   (snap, stored, whole))
d.p.send_signal(signal.SIGTERM)
ok((d.p.wait(30), peer.until(lambda x: x["state"] == "draining", 9)["state"]) == (0, "draining") and peer.until(lambda x: False) is None, "a router hears of the drain, and does not keep it")
d = Daemon("d2", mem="1MiB")
stat = dial(d.path)
fds = was = None
while fds is None or fds != was:        # at its start it still makes the memory that it keeps ready
    was = fds
    stat.send({"pd": "status"})
    fds = stat.next()["ledger"]["fds"]
    time.sleep(0.5)
for i in range(40):
    f = dial(d.path)
    f.send({"pd": "status", "follow": True, "events": True})
    f.next()
    f.s.close()
for _ in range(100):
    stat.send({"pd": "status"})
    now = stat.next()["ledger"]
    if now["connections"] == 1:
        break
    time.sleep(0.05)
ok(now["connections"] == 1 and now["fds"] == fds and now["answers_owed"] == 0, "followers that go leave nothing", now)


# ---- who follows events keeps an image of the prefix cache ----

class Image:
    """Rebuilt from kvevents alone."""

    def __init__(self):
        self.blocks, self.seq, self.life, self.snapshots, self.gap = {}, None, None, 0, False

    def take(self, r):
        h = [r["hashes"][i:i + 16] for i in range(0, len(r.get("hashes", b"")), 16)]
        ids = [r["token_ids"][i:i + 4 * r["block_size"]] for i in range(0, len(r.get("token_ids", b"")), 4 * r.get("block_size", 1))]
        if r["op"] == "snapshot":
            if not r.get("part"):
                self.blocks, self.life = {}, r["life"]
                self.snapshots += 1
            up = [r["parents"][i:i + 16] for i in range(0, len(r.get("parents", b"")), 16)]
        else:
            self.gap |= self.seq is None or r["seq"] != self.seq + 1 or r["life"] != self.life
            up = [r.get("parent", bytes(16)), *h]
        self.seq = r["seq"]
        if r["op"] in ("stored", "snapshot"):
            self.gap |= any(x in self.blocks for x in h)
            self.blocks.update(zip(h, zip(up, ids)))
        elif r["op"] == "removed":
            self.gap |= any(self.blocks.pop(x, None) is None for x in h)
        else:
            self.blocks = {}


def subscribe(image, **kw):
    f = dial(d.path)
    f.send({"pd": "status", "follow": True, "events": True, **kw})
    return f, image


def until_quiet(f, image):
    """Reads all that came before the answer to a record that has no business here."""
    f.send({"pd": "mark"})
    while (r := f.next())["pd"] != "error":
        if r["pd"] == "kvevent":
            image.take(r)
    return image


def ask(n, first=0, **kw):
    s = dial(d.path)
    s.send(*[dict({"id": i, "prompt": f"Long before there were {i % 7} foxes " * (2 + i % 5) + str(i), "max_tokens": 4, "seed": i}, **kw) for i in range(first, first + n)])
    got = 0
    while got < n:
        got += s.next().get("pd") == "result"
    s.s.close()


early = subscribe(Image())
ask(30)
until_quiet(*early)
late = subscribe(Image())
until_quiet(*late)
stat.send({"pd": "status"})
g = stat.next()["ledger"]
ok(early[1].blocks and early[1].blocks == late[1].blocks and len(late[1].blocks) == g["blocks_cached"] and not early[1].gap and early[1].seq == late[1].seq > 3,
   "one who came first and one who came late have the same image, and it is the cache", (len(early[1].blocks), len(late[1].blocks), g["blocks_cached"], early[1].seq))
ok(early[1].snapshots == 1 and late[1].snapshots == 1 and all(up == bytes(16) or up in late[1].blocks for up, _ in late[1].blocks.values()), "each had one snapshot, and every chain is whole")
late[0].s.close()
for i in range(4):
    ask(100, 100 * i, cache_salt=str(i))        # past what the pool holds: blocks go
until_quiet(*early)
back = subscribe(late[1], life=late[1].life, seq=late[1].seq)
until_quiet(*back)
stat.send({"pd": "status"})
g = stat.next()["ledger"]
ok(early[1].blocks == back[1].blocks and len(back[1].blocks) == g["blocks_cached"] and not early[1].gap and g["blocks_free"] < 30 and g["blocks_used"] == 0,
   "also after blocks went, for one who was away and came back", (len(early[1].blocks), len(back[1].blocks), g))
again = subscribe(back[1], life=early[1].life, seq=early[1].seq)
ask(3, 1000)
until_quiet(*again)
until_quiet(*early)
ok(again[1].blocks == early[1].blocks and again[1].snapshots == back[1].snapshots and not again[1].gap, "who names the last change that he knows needs no snapshot")
other = subscribe(Image(), life=b"somebody", seq=5)
ok(until_quiet(*other).blocks == early[1].blocks and other[1].snapshots == 1, "of another life nothing is known: a snapshot")
n = other[1].snapshots
other[0].send({"pd": "status", "events": True})
ok(until_quiet(*other).blocks == early[1].blocks and other[1].snapshots == n + 1, "who asks again gets a snapshot again, on the same connection")
other[0].send({"pd": "status", "events": True, "life": early[1].life, "seq": early[1].seq})
ok(until_quiet(*other).snapshots == n + 1, "or what follows the change that it names: nothing yet")
other[0].send({"pd": "status", "events": False})
ask(2, 2000)
seq = until_quiet(*early).seq
ok(until_quiet(*other).seq < seq, "or no more of them")
for f in early, back, again, other:
    f[0].s.close()
stat.send({"pd": "status"})
now = stat.next()["ledger"]
slow = dial(d.path)             # never reads
slow.send({"pd": "status", "follow": True})
many = [{"pd": "status"}] * 200
slow.s.settimeout(2)
try:
    for _ in range(40):
        slow.send(*many)
except (socket.timeout, BrokenPipeError, ConnectionResetError):
    pass
stat.send({"pd": "status"})
ok(stat.next()["ledger"]["rss_bytes"] < now["rss_bytes"] + (32 << 20), "nor does one that never reads grow it")
ok(d.end() == 0, "nor keep it")
x = run(decode("--listen", f"unix:{at('d3')}", "--role", "both", "--register", "tcp:1"))
ok(x.returncode == 2 and b"--register: tcp:1" in x.stderr, "--register names what it cannot dial", x)
tap.done()
