#!/usr/bin/env python3
"""pd-kvsend's memory and its turns: runs of several senders that wait for room never wait for each other, a busy end hears who answers, and no number of peers is too many to be heard."""
import os
import resource
import socket
import subprocess
import tempfile
import threading
import time

import tap
from pdset import msgpack
from tap import B, decode, lines, ok, prefill, records, results, run

tmp = tempfile.mkdtemp()


def kvsend(*args):
    return [f"{B}/bin/pd-kvsend", *args]


def start(cmd, **kw):
    return subprocess.Popen(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kw)


def split(stream):
    """Its records, as bytes."""
    u, at, out = msgpack.Unpacker(max_buffer_size=1 << 30), 0, []
    u.feed(stream)
    while at < len(stream):
        u.skip()
        out.append(stream[at:u.tell()])
        at = u.tell()
    return out


def kind(rec):
    return msgpack.unpackb(rec)["pd"]


def runs(n, words=40, first=0):
    """n runs, each the list of its records."""
    out = run(prefill(), lines([{"id": i, "prompt": f"{i} " + "word " * words, "max_tokens": 2, "seed": i} for i in range(first, first + n)])).stdout
    by = {}
    for r in split(out):
        by.setdefault(msgpack.unpackb(r)["run"], []).append(r)
    return list(by.values())


def key(kv):
    return {r["id"]: (tuple(r["tokens"]), r["fallback"]) for r in results(run(decode("--format", "json"), kv).stdout) if r["finish_reason"] != "error"}


def finish(procs, until=20):
    """Statuses; those that hang are killed."""
    end, out = time.time() + until, []
    for p in procs:
        try:
            out.append(p.wait(max(0.1, end - time.time())))
        except subprocess.TimeoutExpired:
            p.kill()
            out.append("hung")
    return out


R = runs(12)
SIZE = sum(len(x) for x in R[0]) + 2000
ROOM = str(2 * SIZE + SIZE // 2)        # of two runs


def interleaved(a, b):
    """b comes whole in the middle of a."""
    return a[:-2], [b[0]], b[1:] + a[-2:]


# ---- two senders, whose second runs find no room
for out in (["--chunk", "4KiB"], ["--codec", "zstd"], ["-o", f"{tmp}/room.h5"], ["-o", f"unix:{tmp}/far"]):
    far = start(kvsend("-i", f"unix-listen:{tmp}/far")) if "far" in out[-1] else None
    x = start(kvsend("--kv-mem", ROOM, "--peers", "2", "-i", f"unix-listen:{tmp}/two", *out))
    got = []
    reader = threading.Thread(target=lambda p=far or x: got.append(p.stdout.read()))
    reader.start()
    t = []
    for i in range(2):
        c = socket.socket(socket.AF_UNIX)
        while c.connect_ex(f"{tmp}/two"):
            time.sleep(0.01)
        t.append((c, interleaved(R[2 * i], R[2 * i + 1])))
    for part in range(3):
        for c, parts in t:
            c.sendall(b"".join(parts[part]))
        time.sleep(0.4 if far is None else 1.2)
    for c, _ in t:
        c.close()
    codes = finish([x] + ([far] if far else []))
    reader.join(20)
    err = x.stderr.read()
    kv = run(kvsend("-i", f"{tmp}/room.h5")).stdout if out[-1].endswith("h5") else got[0]
    k = key(kv)
    whole = 4 - sum(f is not None for _, f in k.values()) - (4 - len(k) if out[-1].endswith("h5") else 0)       # a dump has no place for a run without its KV
    ok("hung" not in codes and codes[0] in (0, 8) and (len(k) == 4 or out[-1].endswith("h5")) and whole >= 3,
       f"{out}: two senders that wait for room do not wait for each other: one run loses its KV, at the most", (codes, k, err))

# One sender: what is whole stands behind the one that waits for the rest of its chunks.
x = start(kvsend("--kv-mem", ROOM, "--chunk", "4KiB"), stdin=subprocess.PIPE)
a, b, c = R[4:7]
x.stdin.write(b"".join(a[:-2] + b + c + a[-2:]))
x.stdin.close()
got = []
reader = threading.Thread(target=lambda: got.append(x.stdout.read()))
reader.start()
(code,) = finish([x])
reader.join(20)
k = key(got[0])
ok(code == 8 and sorted(k) == [4, 5, 6] and sum(f is not None for _, f in k.values()) == 1, "one sender, three runs in room for two: the third one loses its KV", (code, k, x.stderr.read()))

# ---- a run that is whole does not wait for one that has not begun to come
for args in (["--via", "inline"], ["--via", "shm"]):
    r = start(kvsend("-i", f"unix-listen:{tmp}/held"))
    t = start(kvsend(*args, "-o", f"unix:{tmp}/held"), stdin=subprocess.PIPE)
    first, second = R[7], R[8]
    t.stdin.write(b"".join([first[0]] + second))        # of the first one nothing but its offer
    t.stdin.flush()
    want, got, whole = sum(map(len, second)) - 500, bytearray(), threading.Event()

    def read(p=r, got=got, whole=whole, want=want):
        while d := p.stdout.read1(1 << 16):
            got.extend(d)
            if len(got) > want:
                whole.set()
    reader = threading.Thread(target=read)
    reader.start()
    came = whole.wait(5)
    t.stdin.write(b"".join(first[1:]))
    t.stdin.close()
    codes = finish([t, r])
    reader.join(20)
    k = key(bytes(got))
    ok(came and codes == [0, 0] and sorted(k) == [7, 8] and not any(f for _, f in k.values()), f"{args}: a run that is whole goes out while one before it has only been offered", (came, codes, k))
    order = [msgpack.unpackb(x).get("run") for x in split(bytes(got))]
    ok(sum(order[i] != order[i - 1] for i in range(1, len(order))) == 1, "and one after the other", order)

# ---- a busy sender hears the answers meanwhile
many = b"".join(run(prefill(), lines([{"id": i, "prompt": f"{i} " + "word " * 40, "max_tokens": 2, "seed": i} for i in range(900)])).stdout for _ in range(4))
open(f"{tmp}/many.kv", "wb").write(many)
for via in ("shm", "inline"):
    r = start(kvsend("-i", f"unix-listen:{tmp}/busy", "-o", "/dev/null"))
    x = run(kvsend("--via", via, "--kv-mem", "1GiB", "--trace", f"{tmp}/t{via}", "-i", f"{tmp}/many.kv", "-o", f"unix:{tmp}/busy"), timeout=120)
    ev = [e for e in records(run([f"{B}/bin/pd-trace", "cat", "--format", "json", f"{tmp}/t{via}"]).stdout) if e.get("state") == "kv_moved"]
    ok(x.returncode == 0 and r.wait(20) == 0 and len(ev) == 3600 and ev[0]["queue_runs"] < 1800, f"--via {via}: the first of 3600 runs is through before the half of them is read",
       (x.returncode, x.stderr, ev[0]["queue_runs"] if ev else None))

# ---- more peers than anybody thought of
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if hard != resource.RLIM_INFINITY and hard < 4000:
    tap.skip("1280 receivers", f"this system lets a process have {hard} descriptors")
else:
    resource.setrlimit(resource.RLIMIT_NOFILE, (4000, hard))
    x = start(kvsend("--peers", "256", *[a for i in range(5) for a in ("-o", f"unix-listen:{tmp}/p{i}")]), stdin=subprocess.PIPE)
    crowd = []
    for i in range(5):
        for _ in range(256):
            c = socket.socket(socket.AF_UNIX)
            while c.connect_ex(f"{tmp}/p{i}"):
                time.sleep(0.01)
            crowd.append(c)
    time.sleep(1)
    crowd[-1].close()
    (code,) = finish([x], 5)
    err = x.stderr.read()
    ok(code == 6 and b"the reader went away" in err, "1280 receivers: the last one's going is seen", (code, err))
tap.done()
