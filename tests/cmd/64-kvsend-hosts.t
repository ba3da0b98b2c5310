#!/usr/bin/env python3
"""The pipeline over two hosts: each a network namespace of its own, a veth pair between them. What decode makes of it is what the direct pipe gives, to the bit; on links of
1 and 10 Gb/s too, and when the link goes away in the middle and comes back."""
import atexit
import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import tap
from tap import B, decode, lines, ok, prefill, records, results, run, skip

os.environ["PATH"] += ":/usr/sbin:/sbin"
HA, HB = f"pd{os.getpid()}a", f"pd{os.getpid()}b"      # the sender's host, the receiver's
AT = "10.213.7.2:7000"
tmp = tempfile.mkdtemp()
tap.model = "testdata/tiny/llama-f32.gguf"
REQS = [{"id": i, "prompt": f"word {i} " * 22, "max_tokens": 4, "seed": i, "logprobs": True} for i in range(40)]
KEYS, KV = f"{tmp}/keys", f"{tmp}/a.kv"
with open(os.open(KEYS, os.O_WRONLY | os.O_CREAT, 0o600), "w") as f:
    f.write("a " + "5a" * 32 + "\n")


def ip(*args):
    return run(["ip", *args])


def clean():
    for ns in (HA, HB):
        for pid in ip("netns", "pids", ns).stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        ip("netns", "del", ns)
    shutil.rmtree(tmp, ignore_errors=True)


def hosts():
    """None, or why there are none."""
    if not shutil.which("ip"):
        return "there is no ip (iproute2) here"
    for cmd in (f"netns add {HA}", f"netns add {HB}", f"link add e0 netns {HA} mtu 1500 type veth peer name e0 netns {HB}", f"-n {HA} addr add 10.213.7.1/24 dev e0",
                f"-n {HB} addr add 10.213.7.2/24 dev e0", f"-n {HA} link set e0 up", f"-n {HB} link set e0 up"):
        x = ip(*cmd.split())
        if x.returncode:
            return f"no network namespaces with veth here: ip {cmd}: {(x.stderr.decode().strip().splitlines() or ['?'])[0]}"
    return None


def shape(rate):
    """Both directions. None, or why not."""
    for ns in (HA, HB):
        x = ip("netns", "exec", ns, "tc", "qdisc", "replace", "dev", "e0", "root", "tbf", "rate", rate, "burst", "32kb" if rate == "4mbit" else "2mb", "latency", "100ms")
        if x.returncode:
            return f"tc: no tbf in this kernel: {x.stderr.decode().strip().splitlines()[0]}"
    return None


def sent():
    """Bytes that have left the sender's host."""
    return int(ip("netns", "exec", HA, "cat", "/sys/class/net/e0/statistics/tx_bytes").stdout)


def shell(ns, *cmds, **kw):
    """A pipeline on a host; its status is that of the first that fails."""
    line = " | ".join(shlex.join(c) for c in cmds)
    return subprocess.Popen(["ip", "netns", "exec", ns, "bash", "-o", "pipefail", "-c", line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kw)


def kvsend(*args):
    return [f"{B}/bin/pd-kvsend", "-v", *args]


def key(out):
    return sorted((r["id"], r["tokens"], r["text"], r["finish_reason"], r.get("logprobs"), r["mode"], r["fallback"]) for r in results(out))


def two(keys=(), tx=(), middle=None):
    """The pipeline over both hosts: statuses, the results, what all said, bytes that left the sender's host. middle(sender's process) runs meanwhile."""
    before = sent()
    d = shell(HB, kvsend(*keys, "-i", f"tcp-listen:{AT}"), decode("--format", "json"))
    p = shell(HA, prefill(), kvsend(*keys, *tx, "-o", f"tcp:{AT}"), stdin=subprocess.PIPE)
    p.stdin.write(lines(REQS).encode())
    p.stdin.close()
    p.stdin = None
    if middle:
        middle(p)
    rest = []
    for x in (d, p):
        try:
            rest.append(x.communicate(timeout=40))
        except subprocess.TimeoutExpired:
            x.kill()
            rest.append((b"", b"it hung"))
    return (p.returncode, d.returncode), key(rest[0][0]), (rest[1][1] + rest[0][1]).decode(errors="replace"), sent() - before


def senders():
    """The pd-kvsend processes on the sender's host."""
    for pid in map(int, ip("netns", "pids", HA).stdout.split()):
        if os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "pd-kvsend":
            yield pid


def impatient(pid):
    """Half a minute until the kernel gives a silent connection up is too long here: the process's sockets are made to do so after 0.4 s."""
    libc, n = ctypes.CDLL(None, use_errno=True), 0
    pidfd = os.pidfd_open(pid)
    for fd in os.listdir(f"/proc/{pid}/fd"):
        if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:"):
            mine = libc.syscall(438, pidfd, int(fd), 0)     # pidfd_getfd
            if mine < 0:
                continue
            with socket.socket(fileno=mine) as s:
                if s.family == socket.AF_INET:
                    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 400)
                    n += 1
    os.close(pidfd)
    return n


def part(share):
    """Wait until that share of the KV has left the sender's host."""
    start, end = sent(), time.time() + 15
    while sent() - start < share * BYTES and time.time() < end:
        time.sleep(0.02)


def link(up):
    ip("-n", HB, "link", "set", "e0", "up" if up else "down")


atexit.register(clean)
for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(s, lambda *_: sys.exit(1))
why = hosts()
if why:
    print(f"1..0 # SKIP {why}")
    sys.exit(0)
kv = run(prefill(), lines(REQS)).stdout
BYTES = len(kv)
REF = key(run(decode("--format", "json"), kv).stdout)
ok(len(REF) == len(REQS) and {r[6] for r in REF} == {None}, "the direct pipe gives what is compared with")
KEYED = ["--key-file", KEYS]

for rate in (None, "1gbit", "10gbit"):
    name = f"a link of {rate.replace('gbit', ' Gb/s')}" if rate else "a link as it is"
    why = rate and shape(rate)
    if why:
        skip(name, why)
        continue
    rc, got, err, n = two(KEYED)
    ok(rc == (0, 0) and got == REF and "KV comes by tcp" in err and n > BYTES / 2, f"{name}, with keys: bit-identical to the direct pipe", (rc, n, BYTES, err))
rc, got, err, n = two(["--insecure"])
ok(rc == (0, 0) and got == REF, "in the clear, as it was spelled out", (rc, err))
x = shell(HA, kvsend("-o", f"tcp:{AT}"), stdin=subprocess.DEVNULL)
out, err = x.communicate(timeout=20)
ok(x.returncode == 2 and b"--key-file" in err and b"--insecure" in err, "between hosts not without either", (x.returncode, err))


# ---- the link goes away in the middle
def away(seconds, cut):
    def middle(p):
        part(0.5)
        pid = next(senders(), None)
        if cut:
            seen.append(pid and impatient(pid))
        link(False)
        time.sleep(seconds)
        link(True)
    return middle


why = shape("4mbit")
for name, seconds, cut in (("shorter than a connection lasts", 1, False), ("and the connections end", 2, True)):
    name = f"the link is away {name}"
    if why:
        skip(name, why)
        continue
    seen = []
    trace = f"{tmp}/t{cut}"
    rc, got, err, n = two(KEYED, ["--resume", "20s", "--trace", trace, "--chunk", "4KiB", *(["--via", "tcp"] if cut else [])], away(seconds, cut))
    if cut and not seen[0]:
        skip(name, "this kernel lends no descriptors of another process (pidfd_getfd)")
        continue
    ok(rc == (0, 0) and got == REF and ("the connection was lost" in err) == cut, f"{name}: bit-identical, and nothing is computed again", (rc, err))
    ev = [e for e in records(run([f"{B}/bin/pd-trace", "cat", "--format", "json", trace]).stdout) if e.get("state") == "kv_moved"]
    tries, skipped = (sum(e[k] for e in ev) for k in ("retries", "skipped_bytes"))
    ok(len(ev) == len(REQS) and all(e["whole"] for e in ev) and (tries > 0) == (skipped > 0) == cut and n < 1.3 * BYTES,      # from the start again: 1.5
       f"{name}: only what was missing is sent again ({n} bytes left for {BYTES})", (tries, skipped, ev[:3]))
    if cut:
        ok({e["cause"] for e in ev} == {"tcp"}, f"{name}: KV went over streams of its own", {e["cause"] for e in ev})
tap.done()
