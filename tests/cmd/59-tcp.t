#!/usr/bin/env python3
"""TCP, plain and with keys: filters on two ends, a whole set of daemons, and peers that may not come in."""
import os
import re
import socket
import subprocess
import tempfile
import time

import tap
from tap import B, TINY, decode, lines, ok, prefill, results, run, trace

tmp = tempfile.TemporaryDirectory()
REQS = [{"id": i, "prompt": f"Once upon a time there were {i} foxes" * (1 + i % 4), "max_tokens": 5 + i % 7, "temperature": 0.8, "seed": i} for i in range(12)]
ARGS = ["-t", "1", "--chunk", "32", "--max-seqs", "8", "--kv-mem", "4MiB"]


def key_file(name, *ids):
    path = os.path.join(tmp.name, name)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as f:
        for i in ids:
            f.write(i + " " + (i.encode().hex() * 32)[:64] + "\n")
    return path


GOOD, OTHER, BOTH, OPEN = key_file("good", "new"), key_file("other", "old"), key_file("both", "old", "new"), key_file("open", "new")
WRONG = key_file("wrong", "new")
with open(WRONG, "w") as f:
    f.write("new " + "ab" * 32 + "\n")
os.chmod(OPEN, 0o644)


def tokens(recs):
    return {(r["id"], r["choice"]): (r["tokens"], r["text"], r["finish_reason"]) for r in recs}


class Proc:
    """A command whose stderr is read for where it listens."""

    def __init__(self, cmd, data=None, env=None):
        self.err = os.path.join(tmp.name, f"err{time.monotonic_ns()}")
        self.out = self.err + ".out"
        self.p = subprocess.Popen(cmd, stdin=subprocess.PIPE if data is not None else subprocess.DEVNULL, stdout=open(self.out, "wb"), stderr=open(self.err, "wb"))
        if data is not None:
            self.p.stdin.write(data.encode())
            self.p.stdin.close()

    def said(self):
        return open(self.err, errors="replace").read()

    def says(self, word, seconds=10):
        end = time.time() + seconds
        while word not in self.said() and time.time() < end:
            time.sleep(0.02)
        return word in self.said()

    def at(self, word):
        end = time.time() + 60
        while time.time() < end and self.p.poll() is None:
            m = re.search(word + r".*?(tcp:\S+:\d+)", self.said())
            if m:
                return m.group(1)
            time.sleep(0.01)
        return "tcp:127.0.0.1:1"

    def end(self, sig=None):
        if sig:
            self.p.send_signal(sig)
        try:
            return self.p.wait(60)
        except subprocess.TimeoutExpired:
            self.p.kill()
            return -1


kv = run(prefill(*ARGS, m=TINY), lines(REQS)).stdout
want = tokens(results(run(decode(*ARGS, "--format", "json", m=TINY), kv).stdout))

# ---- filters ----
for name, mine, theirs in (("plain", [], []), ("a key", ["--key-file", GOOD], ["--key-file", GOOD]), ("an old and a new key", ["--key-file", GOOD], ["--key-file", BOTH])):
    d = Proc(decode(*ARGS, "--format", "json", "-i", "tcp-listen:127.0.0.1:0", *theirs, m=TINY))
    r = run(prefill(*ARGS, "-o", d.at("listening on"), *mine, m=TINY), lines(REQS))
    rc = d.end()
    ok(r.returncode == 0 and rc == 0 and tokens(results(open(d.out, "rb").read())) == want, f"filters over TCP, {name}: the results are the pipe's", (r, rc, d.said()))
p = Proc(prefill(*ARGS, "-o", "tcp-listen:localhost:0", m=TINY), lines(REQS))
r = run(decode(*ARGS, "--format", "json", "-i", p.at("listening on"), m=TINY))
ok(r.returncode == 0 and p.end() == 0 and tokens(results(r.stdout)) == want, "the other way round: decode connects", (r, p.said()))

d = Proc(decode(*ARGS, "--format", "json", "-i", "tcp-listen:127.0.0.1:0", "--key-file", GOOD, m=TINY))
at = d.at("listening on")
for name, args, here, there in (("a wrong key", ["--key-file", WRONG], "has another key by the id 'new'", "has another key by the id 'new'"),
                                ("an old key", ["--key-file", OTHER], "does not know the key with the id 'old'", "the id 'old', which is not in this key file"),
                                ("no key", [], "--key-file", "speaks no TLS")):
    r = run(prefill(*ARGS, "-o", at, *args, m=TINY), lines(REQS))
    ok(r.returncode in (1, 6) and tap.one_line(r.stderr) and here in r.stderr.decode() and d.says(there) and d.p.poll() is None,
       f"{name}: told at both ends, and the listener goes on waiting", (r, d.said()))
s = socket.create_connection(("127.0.0.1", int(at.rsplit(":", 1)[1])))
s.close()
r = run(prefill(*ARGS, "-o", at, "--key-file", GOOD, m=TINY), lines(REQS))
ok(r.returncode == 0 and d.end() == 0 and tokens(results(open(d.out, "rb").read())) == want, "after all of them the good one is served", (r, d.said()))
d = Proc(decode(*ARGS, "-i", "tcp-listen:127.0.0.1:0", "--format", "json", m=TINY))
r = run(prefill(*ARGS, "-o", d.at("listening on"), "--key-file", GOOD, m=TINY), lines(REQS))
rc = d.end()
ok(r.returncode == 1 and b"--key-file" in r.stderr and rc == 1 and "speaks TLS and this one does not (give --key-file)" in d.said(), "a key against none: told at both ends",
   (r, rc, d.said()))

# A stream that is cut: with TLS that is never taken for its end.
for args, status in (([], 0), (["--key-file", GOOD], 6)):
    c = Proc(trace("cat", "-i", "tcp-listen:127.0.0.1:0", *args))
    port = c.at("listening on")
    w = subprocess.Popen(trace("cat", "--format", "msgpack", "-o", port, *args), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    w.stdin.write(kv)
    w.stdin.flush()
    end = time.time() + 30
    while time.time() < end and os.path.getsize(c.out) < len(kv):
        time.sleep(0.02)
    w.kill()
    w.wait()
    w.stdin.close()
    rc = c.end()
    ok(rc == status and (status == 0 or "went away" in c.said()), f"a writer that is killed between two records, {'TLS' if args else 'plain'}: exit {status}", (rc, c.said()))

for args, why in ((["-o", "tcp:192.0.2.1:9"], "--key-file FILE for TLS, or --insecure"), (["-i", "tcp-listen::0"], "--insecure"), (["-i", "tcp:localhost"], "the port is missing"),
                  (["-i", "tcp:localhost:9", "--key-file", OPEN], "chmod 600"), (["-i", "tcp:localhost:9", "--key-file", "/no/such"], "cannot open this key file"),
                  (["-i", "tcp:localhost:9", "--key-file", TINY], "chmod 600")):
    r = run(decode(*ARGS, *args, m=TINY), b"")
    ok(r.returncode == 2 and tap.one_line(r.stderr) and why in r.stderr.decode(), f"{' '.join(args)}: usage", r)
r = run(decode(*ARGS, "-i", "tcp:127.0.0.1:1", "--connect-timeout", "200ms", m=TINY))
ok(r.returncode == 5 and b"within 200 ms" in r.stderr, "nobody there: exit 5", r)

# ---- a set ----
for name, args in (("plain", []), ("with a key", ["--key-file", GOOD])):
    sock = os.path.join(tmp.name, "R" + name[0])
    traces = [os.path.join(tmp.name, f"{name[0]}{x}.trace") for x in "rpd"]
    listen = ["--listen", "tcp-listen:127.0.0.1:0", *args]
    d = Proc(decode(*ARGS, *listen, "--trace", traces[2], m=TINY))
    d_at = d.at("ready:")
    r = Proc([f"{B}/bin/pd-route", "--listen", "unix:" + sock, *listen, "--worker", d_at, "--trace", traces[0]])
    r_at = r.at("ready:")
    p = Proc(prefill(*ARGS, *listen, "--register", r_at, "--trace", traces[1], m=TINY))
    ask = [f"{B}/bin/pd-route", "--status", r_at, *args, "--format", "msgpack"]
    end = time.time() + 30
    while time.time() < end and len([x for x in run(trace("cat"), run(ask).stdout).stdout.splitlines() if b'"state":"ready"' in x]) < 2:
        time.sleep(0.05)
    x = run(["socat", "-t", "600", "-", "UNIX-CONNECT:" + sock], lines(REQS))
    got = results(x.stdout)
    ok(tokens(got) == want and {g["mode"] for g in got} == {"remote"} and all(g["fallback"] is None for g in got), f"router and workers over TCP, {name}: the results are the pipe's",
       (x, r.said(), p.said(), d.said()))
    x = run([f"{B}/bin/pd-route", "--status", d_at, *args])
    ok(x.returncode == 0 and b"decode@" in x.stdout, f"{name}: --status over TCP", x)
    if args:
        x = run([f"{B}/bin/pd-route", "--status", d_at])
        ok(x.returncode == 1 and b"--key-file" in x.stderr, f"{name}: not without the key", x)
        x = run([f"{B}/bin/pd-route", "--status", d_at, "--key-file", WRONG])
        ok(x.returncode == 1 and b"another key" in x.stderr and d.says("another key"), f"{name}: nor with a wrong one", (x, d.said()))
    ends = [w.end(15) for w in (r, p, d)]
    ok(ends == [0, 0, 0], f"{name}: all drain", (ends, r.said(), p.said(), d.said()))
    c = run(trace("check", *traces))
    ok(c.returncode == 0 and b"violations 0" in c.stdout, f"{name}: the traces hold", c)
x = run(prefill(*ARGS, "--listen", "tcp-listen::0", m=TINY))
ok(x.returncode == 2 and b"--key-file" in x.stderr and b"--insecure" in x.stderr, "a daemon beyond this host without a key: usage", x)
p = Proc(prefill(*ARGS, "--listen", "tcp-listen::0", "--insecure", m=TINY))
at = p.at("ready:")
ok(at.startswith(("tcp:0.0.0.0:", "tcp:[::]:")) and p.end(15) == 0, "unless it is told to be", p.said())
for cmd in (prefill, decode):
    x = run(cmd("--advertise", "tcp:127.0.0.1:1", m=TINY), b"")
    ok(x.returncode == 2 and b"--advertise" in x.stderr and b"daemons" in x.stderr, "--advertise without --listen: usage", x)
tap.done()
