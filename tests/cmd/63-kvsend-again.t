#!/usr/bin/env python3
"""Connections of pd-kvsend that are made again, or late: a peer that answers late, one that was away for longer than a lease lives, forwarders that accept and hang up, two receivers
that come back in another order. Nothing is lost, and nothing is computed again."""
import signal
import socket
import subprocess
import tempfile
import threading
import time

import tap
from kvs import key, kvsend, made, start
from pdset import msgpack
from tap import ok, run

tmp = tempfile.mkdtemp()
KV = made()
open(f"{tmp}/a.kv", "wb").write(KV)


def listening(path):
    """It is not enough that the name exists: bind comes before listen."""
    return any(x[3] == "00010000" and x[-1] == path for x in map(str.split, open("/proc/net/unix")) if len(x) > 7)


REF = key(KV)
ok(len(REF) == 60 and not any(f for _, f in REF.values()), "what is compared with")


class Out:
    """What a process writes to stdout, to its end."""

    def __init__(self, p):
        self.p, self.b = p, bytearray()
        self.t = threading.Thread(target=self.read)
        self.t.start()

    def read(self):
        while d := self.p.stdout.read1(1 << 16):
            self.b.extend(d)

    def end(self, until=20):
        """Its status, or "hung"."""
        try:
            rc = self.p.wait(until)
        except subprocess.TimeoutExpired:
            self.p.kill()
            rc = "hung"
        self.t.join()
        return rc


class Forwarder:
    """Between two ends of a Unix socket, no descriptors. plan: what becomes of each connection in turn: ("cut", bytes), ("shut",): accepted and hung up, ("late", seconds): forwarded
    after a while; when it is over all are forwarded. down(): all that are forwarded are hung up."""

    def __init__(self, path, to, plan=()):
        self.to, self.plan, self.n, self.live = to, list(plan), 0, []
        self.l = socket.socket(socket.AF_UNIX)
        self.l.bind(path)
        self.l.listen(64)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            c = self.l.accept()[0]
            self.n += 1
            what = self.plan.pop(0) if self.plan else ("pass",)
            if what[0] == "shut":
                c.close()
                continue
            threading.Thread(target=self.pair, args=(c, what), daemon=True).start()

    def pair(self, c, what):
        if what[0] == "late":
            time.sleep(what[1])
        d, end = socket.socket(socket.AF_UNIX), time.time() + 10
        while d.connect_ex(self.to):
            if time.time() > end:
                c.close()
                return
            time.sleep(0.01)
        self.live.append((c, d))
        left = [what[1] if what[0] == "cut" else 1 << 60]
        for x, y in ((c, d), (d, c)):
            threading.Thread(target=self.pump, args=(x, y, left), daemon=True).start()

    def pump(self, x, y, left):
        try:
            while b := x.recv(16384):
                left[0] -= len(b)
                if left[0] < 0:
                    break
                y.sendall(b)
        except OSError:
            pass
        for s in (x, y):
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def down(self):
        for pair in self.live:
            for s in pair:
                try:
                    s.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass


# ---- away for longer than a lease lives: 33 s, beside all that follows
far1 = start(kvsend("-i", f"unix-listen:{tmp}/lease"))
out1 = Out(far1)
away = start(kvsend("--via", "inline", "--resume", "120s", "--connect-timeout", "20s", "-o", f"unix:{tmp}/lease"), stdin=subprocess.PIPE)
away.stdin.write(KV[:200000])
away.stdin.flush()
time.sleep(1)
far1.send_signal(signal.SIGSTOP)        # it takes what comes, and acknowledges nothing
away.stdin.write(KV[200000:500000])
away.stdin.flush()
time.sleep(1)
far1.kill()
far1.wait()
gone = time.time()

# ---- a sender whose first KV takes a while: 7 s, beside all that follows
slow_rx = start(kvsend("-i", f"unix-listen:{tmp}/slow"))
slow_out = Out(slow_rx)
slow = start(kvsend("-o", f"unix:{tmp}/slow"), stdin=subprocess.PIPE)
slow_since = time.time()

# ---- a peer that reads the hello late
for what in ("before the hello", "with plain records before it"):
    data = KV if what.startswith("before") else b"".join(msgpack.packb({"pd": "note", "v": 1, "text": "x" * 900, "i": i}) for i in range(600)) + KV
    r = start(kvsend("-i", f"unix-listen:{tmp}/late"))
    while not listening(f"{tmp}/late"):
        time.sleep(0.01)
    r.send_signal(signal.SIGSTOP)
    t = start(kvsend("-o", f"unix:{tmp}/late"), stdin=subprocess.PIPE)
    feed = threading.Thread(target=lambda: (t.stdin.write(data), t.stdin.close()))
    feed.start()
    told = b""
    if data is KV:
        told = t.stderr.readline()      # that it does not answer
    else:
        time.sleep(3)
    r.send_signal(signal.SIGCONT)
    out = Out(r)
    codes = [Out(t).end(), out.end()]
    feed.join()
    err = told + t.stderr.read() + r.stderr.read()
    ok(codes == [0, 0] and key(bytes(out.b)) == REF and (b"does not answer the hello" in err) == what.startswith("before") and
       out.b.count(b"\xa4note") == (0 if what.startswith("before") else 600), f"a peer that stood still for 3 s {what}: all comes", (codes, err))
# A reader of plain records sees two hellos, and no other record that was not put in.
l = socket.socket(socket.AF_UNIX)
l.bind(f"{tmp}/mute")
l.listen(1)
t = start(kvsend("-i", f"{tmp}/a.kv", "-o", f"unix:{tmp}/mute"))
c = l.accept()[0]
got = bytearray()
while d := c.recv(1 << 16):
    got.extend(d)
u = msgpack.Unpacker(max_buffer_size=1 << 30)
u.feed(bytes(got))
kinds = [(r["pd"], r.get("caps")) for r in u]
ok(t.wait(20) == 0 and [k for k in kinds if k[0] == "hello"][1:] == [("hello", ["plain"])] and key(bytes(got)) == REF, "a reader of plain records is told by a hello that it is taken back", kinds[:3])

# ---- forwarders that accept and hang up
relay = Forwarder(f"{tmp}/f1", f"{tmp}/g1", [("cut", 300000)] + [("shut",)] * 14)
r = start(kvsend("--resume", "20s", "-i", f"unix-listen:{tmp}/g1"))
out = Out(r)
t = run(kvsend("--via", "inline", "--resume", "20s", "-i", f"{tmp}/a.kv", "-o", f"unix:{tmp}/f1"), timeout=60)
rc = out.end()
ok((t.returncode, rc) == (0, 0) and key(bytes(out.b)) == REF and relay.n == 16, "a forwarder that accepts and hangs up 14 times: the one that dials is patient", (t.returncode, rc, relay.n, t.stderr))
relay = Forwarder(f"{tmp}/f2", f"{tmp}/g2", [("cut", 300000)] + [("shut",)] * 1000000)
r = start(kvsend("--resume", "1s", "-i", f"unix-listen:{tmp}/g2"))
out, t0 = Out(r), time.time()
t = run(kvsend("--via", "inline", "--resume", "1500ms", "-i", f"{tmp}/a.kv", "-o", f"unix:{tmp}/f2"), timeout=60)
took, rc = time.time() - t0, out.end()
ok(t.returncode == 5 and b"--resume" in t.stderr and 1.4 < took < 8 and relay.n < 40 and len(t.stderr.splitlines()) < 6, "one that does nothing else: until --resume is over, not too often, and that is said once",
   (t.returncode, took, relay.n, t.stderr))

relay = Forwarder(f"{tmp}/f3", f"{tmp}/g3", [("cut", 300000)] + [("shut",)] * 5)
t = start(kvsend("--via", "inline", "--resume", "20s", "-i", f"{tmp}/a.kv", "-o", f"unix-listen:{tmp}/g3"))
r = start(kvsend("--resume", "20s", "-i", f"unix:{tmp}/f3"))
out, said = Out(r), Out(t)
codes = [said.end(), out.end()]
ok(codes == [0, 0] and key(bytes(out.b)) == REF and relay.n == 7, "the same for a receiver that dials", (codes, relay.n, t.stderr.read(), r.stderr.read()))

# ---- two receivers that come back in another order
for first in (0, 1):
    relays = [Forwarder(f"{tmp}/s{first}{i}", f"{tmp}/swap{first}", [("pass",), ("late", 0.4 if i == first else 0)]) for i in range(2)]
    t = start(kvsend("--via", "inline", "--peers", "2", "--resume", "20s", "-o", f"unix-listen:{tmp}/swap{first}"), stdin=subprocess.PIPE)
    rx = []
    for i in range(2):
        rx.append(start(kvsend("--resume", "20s", "-i", f"unix:{tmp}/s{first}{i}")))
        while not relays[i].live:
            time.sleep(0.01)
        time.sleep(0.2)
    outs = [Out(r) for r in rx]
    t.stdin.write(KV[:400000])
    t.stdin.flush()
    time.sleep(0.5)
    for x in relays:
        x.down()
    time.sleep(0.1)
    t.stdin.write(KV[400000:])
    t.stdin.close()
    codes = [Out(t).end(), *[o.end() for o in outs]]
    ok(codes == [0, 0, 0] and all(key(bytes(o.b)) == REF for o in outs), f"two receivers, of which number {first} comes back last: each gets what was its own", (codes, [x.n for x in relays], t.stderr.read(), [r.stderr.read() for r in rx]))

time.sleep(max(0, slow_since + 7 - time.time()))
slow.stdin.write(KV)
slow.stdin.close()
codes = [Out(slow).end(), slow_out.end()]
ok(codes == [0, 0] and key(bytes(slow_out.b)) == REF, "a sender that says nothing for 7 s is waited for", (codes, slow.stderr.read(), slow_rx.stderr.read()))

# ---- the one that was away
time.sleep(max(0, gone + 33 - time.time()))
far2 = start(kvsend("-i", f"unix-listen:{tmp}/lease"))
out = Out(far2)
away.stdin.write(KV[500000:])
away.stdin.close()
codes = [Out(away).end(30), out.end()]
err = away.stderr.read()
k = {**key(bytes(out.b)), **{i: v for i, v in key(bytes(out1.b)).items() if not v[1]}}
ok(codes == [0, 0] and b"lease" not in err.replace(b"/lease", b"") and k == REF, "a receiver that was away for 33 s: no KV is lost", (codes, err, len(k), [i for i in k if k[i] != REF[i]]))
tap.done()
