#!/usr/bin/env python3
"""pd-trace verify: what a decode worker reads back of a run's KV, held against its publisher's record (a stream, a dump, the prefill worker itself), while it
decodes and after it; and a bit of its memory that flips is found and named."""
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time

import pdset
import tap
from pdset import ARGS, Router, Worker, ulid
from tap import B, TINY, ok, run

tmp = tempfile.TemporaryDirectory()
LONG = "Once upon a time there were nine foxes and a hen " * 4


def request(i, **kw):
    return dict({"id": i, "run": ulid(), "prompt": f"{i} " + LONG, "max_tokens": 6, "temperature": 0.8, "seed": i}, **kw)


def verify(at, r, *args):
    return run([f"{B}/bin/pd-trace", "verify", at, "--run", r if isinstance(r, str) else r["run"], *args])


def keep(name, *rs, args=()):
    """The publisher's records of the same runs, by the filter."""
    path = os.path.join(tmp.name, name)
    for out in (path + ".kv", path + ".h5"):
        x = run([f"{B}/bin/pd-prefill", "-m", TINY, *ARGS, *args, "--kv-mem", "4MiB", "-o", out], tap.lines(list(rs)))
        if x.returncode:
            raise RuntimeError(x.stderr)
    return path + ".kv", path + ".h5"


def remote(R, r, P, D, **kw):
    return R.remote({k: v for k, v in r.items() if k != "run"}, P, D, run=r["run"], **kw)


def found(x):
    return [json.loads(line) for line in x.stdout.decode().splitlines()]


def stopped(D, r, *args, meanwhile=lambda: None):
    """Asked while D stands still in the middle of the run: it answers before the rest of it is decoded."""
    D.p.send_signal(signal.SIGSTOP)
    p = subprocess.Popen([f"{B}/bin/pd-trace", "verify", D.at, "--run", r["run"], "--format", "json", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(0.2)
    meanwhile()
    D.p.send_signal(signal.SIGCONT)
    out, err = p.communicate(timeout=60)
    return subprocess.CompletedProcess(p.args, p.returncode, out, err)


def long_runs():
    return [request(2, max_tokens=1500, temperature=0, stream=True, ignore_eos=True) for _ in range(20)]


def while_it_runs(R, P, D, runs, *args):
    """It decodes for a moment only: of these runs the first that was met on its way."""
    for r in runs:
        remote(R, r, P, D)
        R.wait([r], "token")
        x = stopped(D, r, *args)
        R.wait([r])
        if x.returncode not in (0, 1, 5) or (x.returncode == 0 and found(x)[-1]["state"] == "decoding"):
            break
    return x


TCP = ["--listen", "tcp-listen:127.0.0.1:0"]
for name, via, net, args in (("shm", "shm", [], []), ("shm, in place", "shm", [], ["--in-place"]), ("inline", "inline", [], []), ("tcp", "tcp", TCP, [])):
    P = Worker(tmp.name, name + "P", "prefill")
    D = Worker(tmp.name, name + "D", "decode", "--via", via, *net, *args)
    if net:
        D.at = re.search(r"ready: .*(tcp:127.0.0.1:\d+)", D.said()).group(1)
    R = Router(os.path.join(tmp.name, name + "R.trace"))
    a, longs = request(1), long_runs()
    stream, dump = keep(name.replace(", ", "-"), a, *longs)

    x = while_it_runs(R, P, D, longs, "--with", stream)
    f = found(x)[-1] if x.stdout else {}
    ok(x.returncode == 0 and f["compared"] == f["blocks"] == 9 and f["differ"] == 0 and f["lease"] == ("reading" if args else "released"),
       f"{name}: while it decodes: equal to the stream that was kept, its last block too", x)

    remote(R, a, P, D)
    R.wait([a])
    good, g = D.until({"runs": 0})
    ok(good and g[f"taken_{via}"] >= 2, f"{name}: they came by it", g)
    for kept in (stream, dump):
        x = verify(D.at, a, "--with", kept)
        if args:                # what was read in place is not in the cache
            ok(x.returncode == 1 and tap.one_line(x.stderr) and b"holds no block" in x.stderr, f"{name}: after it nothing is there", x)
        else:
            ok(x.returncode == 0 and b"equal: 0 of 16 sums differ" in x.stdout and b"8 of 9 blocks read" in x.stdout and b"left out" in x.stdout,
               f"{name}: after it: what is cached is equal to {kept[-3:]}", x)
    if args:
        x = while_it_runs(R, P, D, long_runs(), "--with", P.at)
        f = found(x)[-1] if x.stdout else {}
        ok(x.returncode == 0 and f["compared"] == 9 and f["differ"] == 0, f"{name}: equal to what the prefill worker has under its lease", x)
    elif via == "inline":
        x = verify(D.at, a)
        ok(x.returncode == 0 and b"8 of 9 blocks read" in x.stdout and a["run"].encode() in x.stdout, "without a record: what is there", x)
        x = verify(P.at, a)
        ok(x.returncode == 1 and tap.one_line(x.stderr) and b"unknown" in x.stderr, "the prefill worker has forgotten it", x)
        # ---- what cannot be compared, and what is not there ----
        x = verify(D.at, ulid(), "--with", stream)
        ok(x.returncode == 1 and tap.one_line(x.stderr) and b"is unknown here" in x.stderr, "an unknown run: exit 1", x)
        for what, kw in (("of blocks of another size", {"args": ["--block-size", "32"]}), ("of another prompt", {"prompt": "Something else"})):
            other, _ = keep("other", dict(a, **{k: v for k, v in kw.items() if k != "args"}), args=kw.get("args", []))
            x = verify(D.at, a, "--with", other)
            ok(x.returncode == 3 and tap.one_line(x.stderr) and b"differs" in x.stderr, f"a record {what}: exit 3", x)
        x = verify(D.at, a, "--with", "/no/such")
        ok(x.returncode == 1 and tap.one_line(x.stderr), "no such record", x)
        for bad in ([], [D.at], [D.at, "--run", "x"], [D.at, D.at, "--run", a["run"]]):
            x = run([f"{B}/bin/pd-trace", "verify", *bad])
            ok(x.returncode == 2 and tap.one_line(x.stderr), f"verify {len(bad)} arguments: usage", x)
    good, g = D.until({"runs": 0, "blocks_used": 0, "blocks_borrowed": 0})
    ok(good, f"{name}: no block is held any more", g)
    R.close()
    ends = [D.end(), P.end()]
    ok([rc for rc, _ in ends] == [0, 0], f"{name}: both drain", ends)

# ---- the prefill worker dies while its memory is read in place, and who asks goes away meanwhile ----
for lease, wait in (("30s", 0), ("1s", 1.3)):
    P = Worker(tmp.name, f"kP{lease}", "prefill", "--lease", lease)
    D = Worker(tmp.name, f"kD{lease}", "decode", "--via", "shm", "--in-place")
    R = Router(os.path.join(tmp.name, f"kR{lease}.trace"))
    for r in long_runs()[:3]:
        remote(R, r, P, D)
        R.wait([r], "token")
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(D.path)
            s.sendall(pdset.msgpack.packb({"pd": "status", "v": 1, "verify": r["run"]}))
        R.wait([r])
    good, g = D.until({"runs": 0, "blocks_used": 0, "blocks_borrowed": 0, "in_place": 0})
    ok(good, "who asks and goes away leaves nothing held", g)
    r = long_runs()[0]
    remote(R, r, P, D)
    R.wait([r], "token")
    x = stopped(D, r, meanwhile=lambda: (P.kill(), time.sleep(wait)))
    R.wait([r])
    if not wait:
        ok((x.returncode == 0 and found(x)[-1]["lease"] in ("reading", "released")) or (x.returncode == 1 and b"(it is over)" in x.stderr),
           "a prefill worker that is gone: what it left is read on", x)
    else:
        ok((x.returncode == 5 and tap.one_line(x.stderr) and b"is over" in x.stderr) or (x.returncode == 0 and found(x)[-1]["lease"] == "released") or
           (x.returncode == 1 and b"(it is over)" in x.stderr), "and when its lease has run out: exit 5, unless the KV has been computed again already, or the whole run", x)
    good, g = D.until({"runs": 0, "blocks_used": 0, "blocks_borrowed": 0, "in_place": 0})
    ok(good, "the lease is over: no block is held any more", g)
    R.close()
    D.end()

# ---- a bit that flips in the decode worker's memory, after the KV was verified ----
V = os.environ.get("V", "")
if V == "tsan":
    tap.skip("a bit that flips", "no fault points in V=tsan")
else:
    pdset.B = B if V else f"{B}/fault"
    P = Worker(tmp.name, "fP", "prefill")
    D = Worker(tmp.name, "fD", "decode", "--via", "inline", env={"PD_FAULT": "flip_held:fail:2"})
    R = Router(os.path.join(tmp.name, "fR.trace"))
    a, b = request(1), request(3)
    stream, dump = keep("flip", a, b)
    for r in (a, b):
        remote(R, r, P, D)
        R.wait([r])
    D.until({"runs": 0})
    x = verify(D.at, a, "--with", stream)
    ok(x.returncode == 0, "the run before the flip is equal", x)
    for kept in (stream, dump):
        x = verify(D.at, b, "--with", kept)
        said = x.stderr.decode()
        ok(x.returncode == 4 and tap.one_line(x.stderr) and "sums that differ: 1, the first block 4, layer 1 (" in said and "is held" in said and
           "was published" in said and b"differs: 1 of 16" in x.stdout, f"a flipped bit is found and named, against {kept[-3:]}", x)
    x = verify(D.at, b, "--with", stream, "--format", "json")
    f = found(x)
    ok(x.returncode == 4 and f[0]["block"] == 4 and f[0]["layer"] == 1 and f[0]["held"] != f[0]["published"] and f[-1]["differ"] == 1, "and as JSON", x)
    R.close()
    D.end()
    P.end()
tap.done()
