#!/usr/bin/env python3
"""pd-kvsend between every two kinds of ends: what decode makes of it is what the direct pipe gives, to the bit."""
import os
import socket
import subprocess
import tempfile
import threading
import time

import tap
from tap import B, decode, lines, ok, prefill, records, results, run

tmp = tempfile.mkdtemp()
REQS = [{"id": i, "prompt": f"word {i} " * (i + 1), "max_tokens": 1 if i == 3 else 6, "seed": i, "logprobs": True} for i in range(12)]
REQS.append({"id": "local", "prompt": "not yet prefilled", "max_tokens": 4, "temperature": 0})      # put in as a request: it passes through


def kvsend(*args):
    return [f"{B}/bin/pd-kvsend", *args]


def key(out):
    return sorted((str(r["id"]), r["tokens"], r["text"], r["finish_reason"], r.get("logprobs"), r["mode"], r["fallback"]) for r in results(out))


def start(cmd, **kw):
    return subprocess.Popen(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kw)


x = run(prefill(), lines(REQS[:-1]))
# A bare request in front, and a record of a kind that nobody knows, in the middle.
KV = run([f"{B}/bin/pd-trace", "cat", "--format", "msgpack"], lines(REQS[-1:])).stdout + b"\x83\xa2pd\xa6future\xa1v\x01\xa1x\xc4\x03abc" + x.stdout
open(f"{tmp}/a.kv", "wb").write(KV)
direct = run(decode("--format", "json"), KV)
REF = key(direct.stdout)
ok(direct.returncode == 0 and len(REF) == len(REQS), "the direct pipe gives what is compared with", direct.stderr)


def same(out, name, err=b""):
    return ok(key(out) == REF and any(r.get("pd") == "future" for r in records(out)), name, (err, out[-600:]))


# ---- plain streams
x = run(kvsend(), KV)
ok(x.returncode == 0 and x.stdout == KV and not x.stderr, "pipe to pipe: the same bytes", x.stderr)
x = run(kvsend("-i", f"{tmp}/a.kv", "-o", f"{tmp}/b.kv"))
ok(x.returncode == 0 and open(f"{tmp}/b.kv", "rb").read() == KV, "file to file: the same bytes", x.stderr)
for chunk in ("1", "3KiB", "64MiB"):
    x = run(kvsend("--chunk", chunk), KV)
    y = run(decode("--format", "json"), x.stdout)
    same(y.stdout, f"--chunk {chunk}: the same", x.stderr + y.stderr)
for codec in ("zstd", "auto", "none"):
    x = run(kvsend("--codec", codec), KV)
    y = run(kvsend(), x.stdout)
    z = run(decode("--format", "json"), y.stdout)
    same(z.stdout, f"--codec {codec}, and on as it comes: the same", x.stderr + y.stderr + z.stderr)
    if codec == "zstd":
        c = start(kvsend("-i", f"unix-listen:{tmp}/z"))
        t = run(kvsend("-o", f"unix:{tmp}/z"), x.stdout)
        same(run(decode("--format", "json"), c.stdout.read()).stdout, "what comes coded goes on by transfer: the same", t.stderr + c.stderr.read())
        ok(c.wait() == 0 and t.returncode == 0, "in good order")
# by transfer over TCP: a relay counts what passes
def relayed(*args):
    """(bytes that the sender wrote, the receiver's output, both errors)"""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    c = start(kvsend("-i", f"tcp-listen:127.0.0.1:{port}"))
    listen = socket.create_server(("127.0.0.1", 0))
    t = start(kvsend(*args, "-o", f"tcp:127.0.0.1:{listen.getsockname()[1]}", "-i", f"{tmp}/wide.kv"))
    out = threading.Thread(target=lambda: outs.append(c.stdout.read()))
    outs, count = [], [0]
    out.start()
    listen.settimeout(30)
    a = listen.accept()[0]
    a.settimeout(None)
    for _ in range(200):
        try:
            b = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)

    def pump(x, y, n):
        while d := x.recv(1 << 16):
            n[0] += len(d)
            y.sendall(d)
        y.shutdown(socket.SHUT_WR)
    both = [threading.Thread(target=pump, args=v, daemon=True) for v in ((a, b, count), (b, a, [0]))]
    [v.start() for v in both]
    try:
        codes = t.wait(30), c.wait(30)
    except subprocess.TimeoutExpired:
        codes = t.kill(), c.kill()
    out.join(30)
    return count[0], outs[0], codes, t.stderr.read() + c.stderr.read()


WIDE = [{"id": i, "prompt": "It was the best of times, it was the worst of times. " * 3, "max_tokens": 4, "temperature": 0} for i in range(3)]
open(f"{tmp}/wide.kv", "wb").write(run(prefill("--kv-dtype", "bf16"), lines(WIDE)).stdout)
want = key(run(decode("--kv-dtype", "bf16", "--format", "json", "-i", f"{tmp}/wide.kv")).stdout)
plain = relayed("--via", "inline")
for args in (["--codec", "zstd"], ["--codec", "zstd", "--via", "inline"], ["--codec", "auto"]):
    n, got, codes, err = relayed(*args)
    good = codes == (0, 0) and key(run(decode("--kv-dtype", "bf16", "--format", "json"), got).stdout) == want
    ok(good and (n < 0.85 * plain[0] or args[1] == "auto"), f"{' '.join(args)} over TCP: the same, in {n} of {plain[0]} bytes", (codes, err))
x = run(kvsend("--format", "json"), KV)
y = run(kvsend("--chunk", "4KiB", "--format", "json"), x.stdout)
z = run(decode("--format", "json"), y.stdout)
same(z.stdout, "as JSON Lines, with other chunks: the same", x.stderr + y.stderr + z.stderr)
x = run(kvsend("-o", f"{tmp}/1.kv", "-o", f"{tmp}/2.kv", "-o", "-"), KV)
ok(x.stdout == KV and open(f"{tmp}/1.kv", "rb").read() == KV and open(f"{tmp}/2.kv", "rb").read() == KV, "several receivers: each gets everything", x.stderr)

# ---- dumps
long = lines([{"id": 1, "prompt": "hello " * 40, "max_tokens": 8, "seed": 1}, {"id": 2, "prompt": "there", "max_tokens": 8, "seed": 2}])
ref2 = key(run(decode("--format", "json"), run(prefill(), long).stdout).stdout)
x = run(kvsend("-o", f"{tmp}/a.h5"), run(prefill(), long).stdout)
y = run(decode("--format", "json", "-i", f"{tmp}/a.h5"))
ok(x.returncode == 0 and key(y.stdout) == ref2, "into a dump: decode goes on from it", x.stderr + y.stderr)
run(prefill("-o", f"{tmp}/b.h5"), long)
d = [run([f"{B}/bin/pd-trace", "kv", "diff", f"{tmp}/a.h5", f"{tmp}/{n}.h5"]) for n in ("a", "b")]
ok(d[0].returncode == 0, "and it is a whole one", d[0].stderr)
x = run(kvsend("-i", f"{tmp}/a.h5"))
y = run(decode("--format", "json"), x.stdout)
ok(x.returncode == 0 and key(y.stdout) == ref2, "from a dump", x.stderr + y.stderr)
x = run(kvsend("-i", f"{tmp}/a.h5", "-o", f"{tmp}/c.h5"))
ok(x.returncode == 0 and key(run(decode("--format", "json", "-i", f"{tmp}/c.h5")).stdout) == ref2, "from a dump into a dump", x.stderr)

# ---- sockets: plain at the far end, and two of a kind, who dials and who listens, shm and inline
for way in ("unix", "unix-listen"):
    other = "unix" if way == "unix-listen" else "unix-listen"
    d = start(decode("--format", "json", "-i", f"{way}:{tmp}/s"))
    x = run(kvsend("-i", f"{tmp}/a.kv", "-o", f"{other}:{tmp}/s"))
    out, err = d.communicate(timeout=60)
    same(out, f"to decode on {way}, which speaks no transfer protocol: the same", x.stderr + err)
    ok(x.returncode == 0 and b"does not answer the hello" in x.stderr, "and it says so", x.stderr)
    p = start(prefill("-o", f"{way}:{tmp}/s"), stdin=subprocess.PIPE)
    x = start(kvsend("-i", f"{other}:{tmp}/s"))
    p.stdin.write(lines(REQS[:-1]).encode())
    p.stdin.close()
    y = run(decode("--format", "json"), x.stdout.read())
    ok(p.wait() == 0 and x.wait() == 0 and key(y.stdout) == [r for r in REF if r[0] != "local"], f"from prefill on {way}: the same", x.stderr.read() + y.stderr)
    for via in ("shm", "inline", "shm,inline"):
        x = start(kvsend("-v", "-i", f"{other}:{tmp}/s"))
        p = start(kvsend("-v", "--via", via, "-i", f"{tmp}/a.kv", "-o", f"{way}:{tmp}/s"))
        y = run(decode("--format", "json"), x.stdout.read())
        err = x.stderr.read() + p.stderr.read()
        same(y.stdout, f"two of them, the sender's end {way}, --via {via}: the same", err + y.stderr)
        ok(p.wait() == 0 and x.wait() == 0 and f"KV comes by {via.split(',')[0]}".encode() in err, "and by that way", err)
        ok(not os.path.exists(f"{tmp}/s"), "and the socket's name is gone")

# ---- TCP, in the clear on this host and with keys
def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


with open(f"{tmp}/keys", "w") as f:
    f.write("a " + "5a" * 32 + "\n")
os.chmod(f"{tmp}/keys", 0o600)
with open(f"{tmp}/others", "w") as f:
    f.write("a " + "5b" * 32 + "\n")
os.chmod(f"{tmp}/others", 0o600)
for keys in ([], ["--key-file", f"{tmp}/keys"]):
    what = "with keys" if keys else "in the clear"
    for way, other in (("tcp", "tcp-listen"), ("tcp-listen", "tcp")):
        at = f"127.0.0.1:{port()}"
        x = start(kvsend("-v", *keys, "-i", f"{other}:{at}"))
        p = start(kvsend("-v", *keys, "-i", f"{tmp}/a.kv", "-o", f"{way}:{at}"))
        y = run(decode("--format", "json"), x.stdout.read())
        told = p.stderr.read()
        err = x.stderr.read() + told
        same(y.stdout, f"two of them over TCP {what}, the sender's end {way}: the same", err + y.stderr)
        ok(p.wait() == 0 and x.wait() == 0 and b"KV comes by" in err, "by the transfer protocol", err)
        ok(told.count(b" bytes by tcp in ") >= 11 and told.count(b" bytes by ") == told.count(b" bytes by tcp in "), "all of it by tcp, the first as well", told)
        ok(b"a stream of data" not in err and b"reset by peer" not in err, "a good end says nothing of its streams", err)
    at = f"127.0.0.1:{port()}"
    d = start(decode("--format", "json", *keys, "-i", f"tcp-listen:{at}"))
    x = run(kvsend(*keys, "-i", f"{tmp}/a.kv", "-o", f"tcp:{at}"))
    out, err = d.communicate(timeout=60)
    same(out, f"to decode over TCP {what}, which speaks no transfer protocol: the same", x.stderr + err)
at = f"127.0.0.1:{port()}"
x = start(kvsend(*keys, "-i", f"tcp-listen:{at}"))
p = run(kvsend("--key-file", f"{tmp}/others", "-i", f"{tmp}/a.kv", "-o", f"tcp:{at}"))
q = run(kvsend("--connect-timeout", "1s", "--resume", "100ms", "-i", f"{tmp}/a.kv", "-o", f"tcp:{at}"))
r = start(kvsend(*keys, "-i", f"{tmp}/a.kv", "-o", f"tcp:{at}"))
y = run(decode("--format", "json"), x.stdout.read())
ok(p.returncode not in (0, -1) and q.returncode not in (0, -1), "a wrong key and no key get nowhere", (p.returncode, q.returncode, p.stderr, q.stderr))
same(y.stdout, "and take no place of one that has the right one", r.stderr.read() + x.stderr.read() + y.stderr)
ok(r.wait() == 0 and x.wait() == 0, "which goes well")

a = start(kvsend("-i", f"unix-listen:{tmp}/s1", "-o", f"unix:{tmp}/s2"))
b = start(kvsend("-i", f"unix-listen:{tmp}/s2", "-o", f"unix:{tmp}/s3", "--chunk", "2KiB"))
c = start(kvsend("-i", f"unix-listen:{tmp}/s3"))
p = run(prefill("-o", f"unix:{tmp}/s1"), lines(REQS[:-1]))
y = run(decode("--format", "json"), c.stdout.read())
ok([q.wait() for q in (a, b, c)] == [0, 0, 0] and key(y.stdout) == [r for r in REF if r[0] != "local"], "a chain of three: the same",
   p.stderr + b"".join(q.stderr.read() for q in (a, b, c)) + y.stderr)

# Each end has its own way, as its name says.
at = f"127.0.0.1:{port()}"
for a, b in ((f"tcp-listen:{at}", f"shm:{tmp}/w2"), (f"shm-listen:{tmp}/w1", f"tcp:{at}")):
    c = start(kvsend("-v", "-i", b.replace(":", "-listen:", 1)))
    m = start(kvsend("-v", "-i", a, "-o", b))
    p = start(kvsend("-v", "-i", f"{tmp}/a.kv", "-o", a.replace("-listen", "")))
    y = run(decode("--format", "json"), c.stdout.read())
    codes, err = [q.wait(20) for q in (p, m, c)], m.stderr.read()
    ways = [w.split()[0].decode().rstrip(",") for w in err.split(b" by ")[1:] if w.startswith((b"shm", b"tcp"))]
    ok(codes == [0, 0, 0] and key(y.stdout) == REF and ways[:2] == [a[:3], b[:3]], f"from {a[:3]} to {b[:3]}: each end by its own", (codes, ways[:2], err[-800:]))

# ---- several senders, several receivers
c = start(kvsend("-i", f"unix-listen:{tmp}/s", "--peers", "3"))
senders = [start(kvsend("-o", f"unix:{tmp}/s"), stdin=subprocess.PIPE) for _ in range(3)]
for i, s in enumerate(senders):
    s.stdin.write(run(prefill(), lines(REQS[4 * i:4 * i + 4])).stdout)
    s.stdin.close()
y = run(decode("--format", "json"), c.stdout.read())
ok([s.wait() for s in senders] == [0, 0, 0] and c.wait() == 0 and key(y.stdout) == [r for r in REF if r[0] != "local"], "three senders at one listening end: the same",
   c.stderr.read() + y.stderr)
rx = [start(kvsend("-i", f"unix-listen:{tmp}/r{i}", "-o", f"{tmp}/r{i}.kv")) for i in range(2)]
x = run(kvsend("-i", f"{tmp}/a.kv", "-o", f"unix:{tmp}/r0", "-o", f"unix:{tmp}/r1", "-o", f"{tmp}/r2.h5"))
ok([r.wait() for r in rx] == [0, 0] and x.returncode == 1 and b"no place" in x.stderr, "two receivers by transfer and a dump, which has no place for what is no KV",
   x.stderr + b"".join(r.stderr.read() for r in rx))
for i in range(2):
    same(run(decode("--format", "json", "-i", f"{tmp}/r{i}.kv")).stdout, f"receiver {i}: the same")

# ---- the probe
for spec in ("unix", "tcp"):
    at = f"{tmp}/s" if spec == "unix" else f"127.0.0.1:{port()}"
    for args in ([], ["--format", "json"]):
        rx = start(kvsend("-i", f"{spec}-listen:{at}", "-o", "/dev/null"))
        x = run(kvsend("--probe", f"{spec}:{at}", "--probe-max", "4MiB", *args))
        ok(x.returncode == 0 and rx.wait() == 0, f"a probe over {spec} {args}; it counts as the listener's one peer", x.stderr + rx.stderr.read())
        best = "shm" if spec == "unix" else "inline"
        if args:
            (r,) = records(x.stdout)
            ok(r["pd"] == "path" and r["class"] == "local" and r["slow"] is None and {w["bytes"] for w in r["rows"]} == {4096 << 2 * i for i in range(6)}
               and all(w["bytes_s"] > 0 and w["ceiling_bytes_s"] > 0 and w["p50_us"] <= w["p99_us"] for w in r["rows"]), "a path record", r)
            ok((r["rows"][0]["scheme"] == "shm") == (spec == "unix"), "by the best way", r["rows"][0])
        else:
            ok(b"P99 us" in x.stdout and b"4 MiB" in x.stdout, "a table", x.stdout)
rx = start(kvsend("--via", "inline", "-i", f"unix-listen:{tmp}/s", "-o", "/dev/null"))
x = run(kvsend("--probe", f"unix:{tmp}/s", "--probe-max", "16KiB"))
ok(x.returncode == 1 and b"shm should have been used and was not: the other end does not allow it" in x.stderr and rx.wait() == 0, "a faster way that was not used: 1, and why", x.stderr)
rx = start(kvsend("-i", f"unix-listen:{tmp}/s", "-o", "/dev/null"))
x = run(kvsend("--via", "inline", "--probe", f"unix:{tmp}/s", "--probe-max", "16KiB"))
ok(x.returncode == 0 and rx.wait() == 0, "unless it was not wanted", x.stderr)
for spec, keys in (("unix", []), ("tcp", []), ("tcp", ["--key-file", f"{tmp}/keys"])):
    at = f"{tmp}/s" if spec == "unix" else f"127.0.0.1:{port()}"
    rx = start(kvsend(*keys, "-i", f"{spec}-listen:{at}", "-o", "/dev/null"))
    for _ in range(2):
        x = run(kvsend("--status", f"{spec}:{at}", *keys))
        ok(x.returncode == 1 and len(x.stderr.splitlines()) == 1 and b"which has no ledger" in x.stderr and rx.poll() is None, f"--status of it over {spec} {keys[:1]}: told so", x.stderr)
    x = run(kvsend("--probe", f"{spec}:{at}", "--probe-max", "16KiB", *keys))
    ok(x.returncode == 0 and rx.wait() == 0, "which did not take the place of its peer", x.stderr + rx.stderr.read())
at = f"127.0.0.1:{port()}"
x = start(kvsend("--key-file", f"{tmp}/keys", "-i", f"tcp-listen:{at}"))
crowd = []
for _ in range(80):
    c = socket.socket()
    while c.connect_ex(("127.0.0.1", int(at.split(":")[1]))):
        c.close()
        c = socket.socket()
        time.sleep(0.01)
    crowd.append(c)
p = run(kvsend("--key-file", f"{tmp}/keys", "-i", f"{tmp}/a.kv", "-o", f"tcp:{at}"))
y = run(decode("--format", "json"), x.stdout.read())
ok(p.returncode == 0 and x.wait(20) == 0 and key(y.stdout) == REF, "80 who prove no key and say nothing lock nobody out", (p.stderr, x.stderr.read()))
for c in crowd:
    c.close()
x = run(kvsend("-i", "tcp-listen::7012", "-o", "/dev/null"))
ok(x.returncode == 2 and b"tcp-listen::7012 is not loopback" in x.stderr, "an endpoint is told as it was typed", x.stderr)
rx = start(kvsend("-i", f"unix-listen:{tmp}/s", "--kv-mem", "1MiB", "-o", "/dev/null"))
x = run(kvsend("--probe", f"unix:{tmp}/s", "--probe-max", "4MiB"))
ok(b"larger ones were left out" in x.stdout, "what has no room there is left out, and it says so", (x.stdout, x.stderr))
rx.wait()
d = start(decode("-i", f"unix-listen:{tmp}/s"))
x = run(kvsend("--probe", f"unix:{tmp}/s"))
ok(x.returncode == 5 and b"no pd-kvsend takes probes there" in x.stderr, "nobody who takes probes", x.stderr)
d.wait()
x = run(kvsend("--probe", f"unix:{tmp}/s", "--connect-timeout", "50ms"))
ok(x.returncode == 5 and len(x.stderr.splitlines()) == 1, "nobody there", x.stderr)

# ---- bad input
bad = bytearray(KV)
at = KV.index(b"\xa4data") + 40
bad[at] ^= 1
for args in ([], ["--chunk", "3KiB"]):
    x = run(kvsend(*args), bytes(bad))
    y = run(decode("--format", "json"), x.stdout)
    ok(x.returncode == 4 and b"checksum" in x.stderr, f"a flipped bit {args}: exit 4, by name", x.stderr)
    got = {r[0]: r for r in key(y.stdout)}
    ok(len(got) == len(REF) and sorted(r[:5] for r in got.values()) == [r[:5] for r in REF] and sum(r[6] is not None for r in got.values()) == 1,
       "that run alone is computed again, to the same bits", y.stdout[-500:])
c = start(kvsend("-i", f"unix-listen:{tmp}/s"))
x = run(kvsend("-o", f"unix:{tmp}/s"), bytes(bad))
y = run(decode("--format", "json"), c.stdout.read())
ok(x.returncode == 4 and sorted(r[:5] for r in key(y.stdout)) == [r[:5] for r in REF], "the same by transfer", x.stderr + c.stderr.read() + y.stderr)
c.wait()
x = run(kvsend(), KV[:-30])
ok(x.returncode == 4 and b"ends inside a record" in x.stderr and len(x.stderr.splitlines()) <= 2, "a cut stream: exit 4, and where", x.stderr)
ok(key(run(decode("--format", "json"), x.stdout).stdout) != REF and KV.startswith(x.stdout), "and what was whole went on")
x = run(kvsend(), b"\x93\x01\x02\x03")
ok(x.returncode == 4, "no records at all", x.stderr)
x = run(kvsend(), b"")
ok(x.returncode == 0 and x.stdout == b"", "an empty stream is fine", x.stderr)
stray = KV[KV.index(b"\x8d\xa2pd\xa5chunk") if b"\x8d\xa2pd\xa5chunk" in KV else KV.index(b"\xa2pd\xa5chunk") - 1:]
x, y = run(kvsend(), stray), run(kvsend("-k"), stray)
ok(x.returncode == 4 and b"not being received" in x.stderr, "chunks of no run: exit 4", x.stderr)
ok(y.returncode in (0, 4) and b"were dropped" in y.stderr and b"not being received" not in y.stderr, "-k counts them", y.stderr)
for args, what in ((["--via", "pigeon"], b"--via"), (["--peers", "0"], b"--peers"), (["--chunk", "x"], b"--chunk"), (["--kv-mem", "1"], b"--kv-mem"), (["--resume", "5"], b"--resume"),
                   (["a"], b"'a'"), (["-i", "tcpp:"], b"tcpp:")):
    x = run(kvsend(*args))
    ok(x.returncode in (1, 2) and what in x.stderr and len(x.stderr.splitlines()) == 1, f"{' '.join(args)}: one line, status 2", x.stderr)
tap.done()
