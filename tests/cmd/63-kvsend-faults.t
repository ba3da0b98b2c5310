#!/usr/bin/env python3
"""pd-kvsend when things go wrong: dropped connections go on where they were, damage costs one computation, the dead and the slow are told and bounded. What decode makes of it
is right, always."""
import json
import os
import random
import resource
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time

import tap
from kvs import have_met, key, kvsend, made, start
from pdset import msgpack
from tap import B, decode, lines, ok, prefill, records, results, run

tmp = tempfile.mkdtemp()
random.seed(11)
KV = made()
open(f"{tmp}/a.kv", "wb").write(KV)


def peak(pid):
    return int([x for x in open(f"/proc/{pid}/status") if x.startswith("VmHWM")][0].split()[1]) >> 10


REF = key(KV)
ok(len(REF) == 60 and not any(f for _, f in REF.values()), "what is compared with")


class Relay:
    """Between two ends of a Unix socket, descriptors too. plan: for each connection in turn (cut after so many bytes, flip the byte at); then it lets all pass."""

    def __init__(self, path, to, plan):
        self.to, self.plan, self.n = to, list(plan), 0
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(16)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            c, _ = self.listener.accept()
            self.n += 1
            threading.Thread(target=self.pump, args=(c, *(self.plan.pop(0) if self.plan else (None, None))), daemon=True).start()

    def pump(self, c, cut, flip):
        until = time.time() + 5
        d = socket.socket(socket.AF_UNIX)
        while True:
            try:
                d.connect(self.to)
                break
            except OSError:
                if time.time() > until:
                    c.close()
                    return
                time.sleep(0.01)
        n = 0
        while True:
            for x in select.select([c, d], [], [])[0]:
                to = d if x is c else c
                try:
                    b, fds, _, _ = socket.recv_fds(x, 4096, 16)
                except OSError:
                    b, fds = b"", []
                over = not b or (cut is not None and n + len(b) > cut)
                if flip is not None and n <= flip < n + len(b):
                    b = b[:flip - n] + bytes([b[flip - n] ^ 4]) + b[flip - n + 1:]
                try:
                    if fds:             # they belong to the record that came last
                        k = b.rindex(b"\xa2pd\xa4slab") - 1
                        to.sendall(b[:k])
                        socket.send_fds(to, [b[k:]], fds)
                    else:
                        to.sendall(b[:cut - n] if over and b else b)
                except OSError:
                    pass
                for f in fds:
                    os.close(f)
                n += len(b)
                if over:
                    for s in (c, d):
                        try:
                            s.shutdown(socket.SHUT_RDWR)
                        except OSError:
                            pass
                        s.close()
                    return


def through(i, plan, via, tx=(), rx=()):
    """The stream through two of them and a relay: both statuses, what came out, what they said, how often it was dialled."""
    relay = Relay(f"{tmp}/r{i}", f"{tmp}/s{i}", plan)
    out = []
    r = start(kvsend(*rx, "-i", f"unix-listen:{tmp}/s{i}"))
    reader = threading.Thread(target=lambda: out.append(r.stdout.read()))
    reader.start()
    t = run(kvsend("--via", via, *tx, "-i", f"{tmp}/a.kv", "-o", f"unix:{tmp}/r{i}"), timeout=60)
    reader.join(30)
    hung = reader.is_alive()
    if hung:
        r.kill()
        reader.join()
    err = t.stderr + r.stderr.read()
    return t.returncode, -1 if hung else r.wait(), out[0], err, relay.n


# ---- dropped connections
for i in range(8):
    via = ("inline", "shm", "shm,inline")[i % 3]
    plan = [(random.randrange(1, len(KV) // 2), None) for _ in range(1 + i % 4)]
    t, r, out, err, n = through(i, plan, via, tx=["--trace", f"{tmp}/t{i}"])
    ok((t, r) == (0, 0) and key(out) == REF, f"dropped after {[c for c, _ in plan]} bytes, --via {via}: it goes on, and nothing is computed again", (t, r, err))
ev = [e for i in range(8) for e in records(run([f"{B}/bin/pd-trace", "cat", "--format", "json", f"{tmp}/t{i}"]).stdout) if e.get("state") == "kv_moved"]
ok(any(e["retries"] for e in ev) and any(e["retries"] and e["skipped_bytes"] for e in ev) and all(e["whole"] for e in ev),
   "what was verified before is not sent again, and the trace says so", [e for e in ev if e["retries"]][:3])
for codec, less in (("zstd", True), ("none", False)):
    t, r, out, err, n = through("w" + codec, [], "inline", tx=["--codec", codec, "--trace", f"{tmp}/tw{codec}"])
    ev = [e for e in records(run([f"{B}/bin/pd-trace", "cat", "--format", "json", f"{tmp}/tw{codec}"]).stdout) if e.get("state") == "kv_moved"]
    ok((t, r) == (0, 0) and len(ev) == 60 and all((e["wire_bytes"] < e["sent_bytes"]) if less else e["wire_bytes"] == e["sent_bytes"] for e in ev), f"--codec {codec}: what went over the wire is told as it went", ev[:2])
t, r, out, err, n = through("strict", [(300000, None)], "inline", tx=["--strict"], rx=["--strict"])
ok((t, r) == (9, 9) and key(out) == REF, "--strict: 9, though all is there", (t, r, err))
# By shm, then without it: the receiver that comes after the drop allows another transport. A new process, which has nothing: all that was not acknowledged goes there.
rx = [start(kvsend("--via", "shm", "-i", f"unix-listen:{tmp}/x", "-o", f"{tmp}/x1.kv"))]
fifo_r, fifo_w = os.pipe()
t = start(kvsend("--connect-timeout", "20s", "-o", f"unix:{tmp}/x"), stdin=fifo_r)
half = KV.index(b"\xa2kv", len(KV) // 2)
os.write(fifo_w, KV[:60000])
have_met(f"{tmp}/x", t)
time.sleep(0.3)
rx[0].kill()
rx[0].wait()
rx.append(start(kvsend("--via", "inline", "-i", f"unix-listen:{tmp}/x")))
threading.Thread(target=lambda: (os.write(fifo_w, KV[60000:]) if len(KV) < 60000 else [os.write(fifo_w, KV[k:k + 65536]) for k in range(60000, len(KV), 65536)], os.close(fifo_w))).start()
os.close(fifo_r)
out = rx[1].stdout.read()
got = key(out)
ok(t.wait() == 0 and rx[1].wait() == 0 and len(got) >= 50 and all(REF[k] == v for k, v in got.items()) and not os.path.exists(f"{tmp}/x1.kv"),
   "a receiver that was killed and started anew, with another transport: it goes on with what the dead one had not", (len(got), t.stderr.read(), rx[1].stderr.read()))

# ---- damage on the way
for i in range(10):
    k = random.randrange(2000, 1200000)
    t, r, out, err, n = through(f"f{i}", [(None, k)], "inline")
    got = key(out)
    ok(t in (0, 4) and r in (0, 4) and sorted(got) == sorted(REF) and all(got[x][0] == REF[x][0] for x in REF) and sum(f is not None for _, f in got.values()) <= 20,
       f"a flipped bit at {k}: the right tokens all the same", (t, r, {x: got.get(x) for x in REF if got.get(x) != REF[x]}, err))

# ---- a receiver that is dialled again and says nothing: the other one gets its KV meanwhile
with open(os.open(f"{tmp}/key", os.O_WRONLY | os.O_CREAT, 0o600), "w") as f:
    f.write("k " + "ab" * 32 + "\n")
key_args = ["--key-file", f"{tmp}/key"]
mute = socket.socket()
mute.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
mute.bind(("127.0.0.1", 0))
port = mute.getsockname()[1]
mute.close()
rx = [start(kvsend(*key_args, "-i", f"tcp-listen:127.0.0.1:{port}")), subprocess.Popen(kvsend("-i", f"unix-listen:{tmp}/b"), stdout=open(f"{tmp}/b.out", "wb"), stderr=subprocess.PIPE)]
t = start(kvsend(*key_args, "--resume", "9s", "--connect-timeout", "20s", "-o", f"tcp:127.0.0.1:{port}", "-o", f"unix:{tmp}/b"), stdin=subprocess.PIPE)
t.stdin.write(KV[:60000])
t.stdin.flush()
time.sleep(0.5)
rx[0].kill()
rx[0].wait()
mute = socket.socket()
mute.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
mute.bind(("127.0.0.1", port))
mute.listen(16)
time.sleep(0.5)             # it is in the middle of a handshake that nobody answers
was, t0 = os.path.getsize(f"{tmp}/b.out"), time.time()
t.stdin.write(KV[60000:400000])
t.stdin.flush()
while os.path.getsize(f"{tmp}/b.out") < was + 200000 and time.time() < t0 + 8:
    time.sleep(0.02)
took = time.time() - t0
ok(took < 2, f"one receiver is dialled again and does not answer: the other one goes on, after {took:.2f} s", (was, os.path.getsize(f"{tmp}/b.out"), t.stderr.read1() if took >= 2 else ""))
for p in (t, *rx):
    p.kill()
    p.wait()
mute.close()

# ---- a sender that carries more than it is let: records that no receiver has taken are bounded
a = socket.socket(socket.AF_UNIX)
a.bind(f"{tmp}/catch")
a.listen(1)
t = start(kvsend("--via", "inline", "-i", f"{tmp}/a.kv", "-o", f"unix:{tmp}/catch"))
c, _ = a.accept()
u = msgpack.Unpacker()
while True:
    d = c.recv(65536)
    u.feed(d)
    try:
        hello = u.unpack()
        break
    except msgpack.OutOfData:
        pass
t.kill()
t.wait()
for size in (60000, 40, 0, "tiny", "ends"):      # tiny: behind as many as fit in front of a reader that stands still
    r = start(kvsend("--max-record", "1MiB", "-i", f"unix-listen:{tmp}/flood{size}"))
    c = socket.socket(socket.AF_UNIX)
    while c.connect_ex(f"{tmp}/flood{size}"):
        time.sleep(0.01)
    c.sendall(msgpack.packb(hello))
    body = msgpack.packb({"pd": "note", "v": 1, "text": "x" * (size if isinstance(size, int) else 60000)}) if size else b""
    seq, cut, end = 0, False, time.time() + 60
    try:
        while time.time() < end:
            what = {"end": True} if size == "ends" else {"rec": body if size != "tiny" or seq < 25 else b"\x82\xa2pd\xa1x\xa1v\x01"}
            n = 25 if size == "tiny" else 100
            c.sendall(b"".join(msgpack.packb({"pd": "carry", "v": 1, "seq": seq + i + 1, **what}) for i in range(n)))
            seq += n
    except OSError:
        cut = True
    held = int(next((l for l in open(f"/proc/{r.pid}/status") if l.startswith("VmHWM")), "x 0").split()[1]) >> 10      # MiB at the most
    r.stdout.close()
    try:
        rc = r.wait(20)
    except subprocess.TimeoutExpired:
        rc = "hung"
        r.kill()
    err = r.stderr.read()
    ok(cut and rc not in (0, "hung") and (os.environ.get("V") in ("asan", "tsan") or held < 40) and (size != "tiny" or seq < 200000) and (b"after the end" if size == "ends" else b"does not wait" if size else b"no record in it") in err,
       f"carried records ({size} bytes) without end: refused, not kept, and the sender is cut off", (rc, cut, held, seq, err))

# ---- more runs at once than a stream may have: those that are too many lose their KV
crowd = run(prefill(), lines([{"id": i, "prompt": f"{i}", "max_tokens": 2, "seed": i} for i in range(1100)])).stdout
u, at, by = msgpack.Unpacker(max_buffer_size=1 << 30), 0, ([], [])
u.feed(crowd)
while at < len(crowd):
    u.skip()
    rec, at = crowd[at:u.tell()], u.tell()
    by[msgpack.unpackb(rec)["pd"] != "offer"].append(rec)
x = run(kvsend(), b"".join(by[0] + by[1]))
u = msgpack.Unpacker(max_buffer_size=1 << 30)
u.feed(x.stdout)
went = [r["pd"] for r in u]
ok(len(by[0]) == 1100 and x.returncode in (4, 8) and x.stderr.count(b"an offer is refused") == 1 and went.count("offer") == 1024 and went.count("kv") == 1100,
   "1100 offers before the first chunk: 1024 runs go on", (x.returncode, x.stderr[:500], went.count("offer"), went.count("kv")))

# ---- streams that end too early
cuts = [1, 40, 700, KV.index(b"\xa5chunk") + 8, KV.index(b"\xa4data") + 100, len(KV) // 3, len(KV) - 1]
for cut in cuts:
    x = run(kvsend(), KV[:cut])
    got = key(x.stdout)
    ok(x.returncode == 4 and all(REF[k] == v for k, v in got.items()), f"a stream cut at byte {cut}: 4, and what is whole is right", (x.returncode, x.stderr, len(got)))
    r = start(kvsend("--resume", "200ms", "-i", f"unix-listen:{tmp}/c"))
    x = run(kvsend("-o", f"unix:{tmp}/c"), KV[:cut])
    out = r.stdout.read()
    got = key(out)
    ok(x.returncode == 4 and r.wait() in (0, 4) and all(REF[k] == v for k, v in got.items()), f"the same by transfer", (x.returncode, r.returncode, x.stderr, r.stderr.read()))

# ---- killed
for victim in ("sender", "receiver"):
    for fed in (100, 5000, 200000, 900000):
        r = start(kvsend("--resume", "300ms", "-i", f"unix-listen:{tmp}/k"))
        t = start(kvsend("--resume", "300ms", "-o", f"unix:{tmp}/k"), stdin=subprocess.PIPE)
        out = []
        reader = threading.Thread(target=lambda: out.append(r.stdout.read()))
        reader.start()
        try:
            t.stdin.write(KV[:fed])
            t.stdin.flush()
        except BrokenPipeError:
            pass
        have_met(f"{tmp}/k", t)
        time.sleep(0.15)
        (t if victim == "sender" else r).kill()
        if victim == "receiver":
            try:
                t.stdin.write(KV[fed:])
                t.stdin.close()
            except BrokenPipeError:
                pass
        reader.join(20)
        try:
            rest = (r if victim == "sender" else t).wait(20)
        except subprocess.TimeoutExpired:
            rest = "hung"
        for p in (r, t):
            p.kill()
            p.wait()
        got = key(out[0])
        # Plain records before the first KV end like any stream; a transfer that is not gone on with is told.
        ok(rest in ((0, 4, 5) if victim == "sender" else (5, 6)) and all(REF[k] == v for k, v in got.items()), f"the {victim} killed after {fed} bytes: the other one ends, by name",
           (rest, len(got), r.stderr.read(), t.stderr.read()))

# ---- slow readers, and none
big = run(prefill(), lines([{"id": i, "prompt": f"{i} " + "word " * 40, "max_tokens": 2, "seed": i} for i in range(900)])).stdout
open(f"{tmp}/big.kv", "wb").write(big)
x = start(kvsend("-i", f"{tmp}/big.kv"))
time.sleep(1)
mem = peak(x.pid)
out = x.stdout.read()
ok(len(big) > 24 << 20 and mem < (100 if os.environ.get("V") == "asan" else 32) and out == big and x.wait() == 0, f"a reader that waits: {len(big) >> 20} MiB, and {mem} MiB of memory", x.stderr.read())
r = start(kvsend("--kv-mem", "4MiB", "-i", f"unix-listen:{tmp}/m"))
t = start(kvsend("--kv-mem", "4MiB", "-i", f"{tmp}/big.kv", "-o", f"unix:{tmp}/m"))
time.sleep(7)       # longer than the transfer's own patience with an answer
mem = peak(r.pid), peak(t.pid)
out = r.stdout.read()
ok(max(mem) < (200 if os.environ.get("V") == "asan" else 40) and t.wait() == 0 and r.wait() == 0 and len(out) > 0.95 * len(big), f"the same by transfer, for 7 s: {mem} MiB, and nothing is given up", t.stderr.read() + r.stderr.read())
ok(key(out) == key(big), "and it is all there")
x = run(kvsend("--kv-mem", "16KiB", "--chunk", "4KiB", "-k"), run(prefill(), lines([{"id": 1, "prompt": "word " * 45, "max_tokens": 2}])).stdout)
y = results(run(decode("--format", "json"), x.stdout).stdout)
ok(x.returncode == 8 and b"--kv-mem" in x.stderr and len(y) == 1 and y[0]["fallback"], "a run that can have no room: 8, and it is computed again", (x.stderr, y))
x = run(["bash", "-c", f"{B}/bin/pd-kvsend -i {tmp}/big.kv | head -c 100000 >/dev/null; exit ${{PIPESTATUS[0]}}"])
ok(x.returncode == 6 and b"reader went away" in x.stderr, "a reader that goes: 6", (x.returncode, x.stderr))
x = run(kvsend("-i", f"{tmp}/a.kv", "-o", "/dev/full"))
ok(x.returncode == 8 and b"No space" in x.stderr, "a full disk: 8", (x.returncode, x.stderr))
x = run(["bash", "-c", f"trap '' XFSZ; ulimit -f 100; {B}/bin/pd-kvsend -i {tmp}/big.kv -o {tmp}/never.kv"])
ok(x.returncode in (1, 8) and not os.path.exists(f"{tmp}/never.kv"), "a file that cannot grow is not left behind", (x.returncode, x.stderr))
x = run(["bash", "-c", f"trap '' XFSZ; ulimit -f 100; {B}/bin/pd-kvsend -i {tmp}/big.kv -o {tmp}/never.h5"])
ok(x.returncode in (1, 4, 8) and not os.path.exists(f"{tmp}/never.h5"), "nor a dump", (x.returncode, x.stderr))

# ---- signals
x = start(kvsend("-i", f"unix-listen:{tmp}/w"))
time.sleep(0.2)
x.terminate()
ok(x.wait(10) == 6 and not os.path.exists(f"{tmp}/w"), "waiting for a peer, then SIGTERM: 6, and the name is gone", x.stderr.read())
x = start(kvsend("-i", f"{tmp}/big.kv"))
time.sleep(0.3)
x.terminate()
time.sleep(0.2)
x.terminate()
try:
    rc = x.wait(10)
except subprocess.TimeoutExpired:
    rc = "hung"
    x.kill()
ok(rc == 6, "two of them while the reader stands still: 6, at once", (rc, x.stderr.read()))

# More peers than descriptors: those that are too many wait, and nobody spins.
x = start(kvsend("--peers", "30", "-i", f"unix-listen:{tmp}/few", "-o", "/dev/null"), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12)))
for _ in range(200):
    if os.path.exists(f"{tmp}/few"):
        break
    time.sleep(0.02)
crowd = [socket.socket(socket.AF_UNIX) for _ in range(20)]
for c in crowd:
    c.connect(f"{tmp}/few")
time.sleep(0.5)
ticks = []
for wait in 1.5, 0:
    ticks.append(sum(map(int, open(f"/proc/{x.pid}/stat").read().split()[13:15])))
    time.sleep(wait)
few = len(os.listdir(f"/proc/{x.pid}/fd"))
ok(few == 12 and ticks[1] - ticks[0] < 30, "no descriptor is left for a peer: it waits, and the processor is let alone", (few, ticks))
for c in crowd:
    c.close()
x.kill()
x.wait()
tap.done()
