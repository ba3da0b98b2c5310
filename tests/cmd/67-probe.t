#!/usr/bin/env python3
"""pd-kvsend --probe against a listener, or a way to it, that misbehaves: one that never stops writing, one where nothing more arrives after a while; and where
a faster way should have been used and was not: 1, and why."""
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time

import tap
from tap import B, ok, one_line

tmp = tempfile.mkdtemp()


def start(*args):
    return subprocess.Popen([f"{B}/bin/pd-kvsend", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def between(name, pass_on, floods):
    """A listener of pd-kvsend, and before it one that passes on so many bytes, then none; or that adds records of its own without end."""
    rx = start("-i", f"unix-listen:{tmp}/{name}.to", "-o", "/dev/null")
    front = socket.socket(socket.AF_UNIX)
    front.bind(f"{tmp}/{name}")
    front.listen(5)
    while not os.path.exists(f"{tmp}/{name}.to"):
        time.sleep(0.01)

    def back(a, b):
        many = b"\x82\xa2pd\xa7padding\xa1v\x01" * 50000
        try:
            a.sendall(b.recv(1 << 16))          # its hello
            while floods:
                a.sendall(many)
            while got := b.recv(1 << 16):
                a.sendall(got)
        except OSError:
            pass

    def forth():
        a, _ = front.accept()
        b = socket.socket(socket.AF_UNIX)
        b.connect(f"{tmp}/{name}.to")
        threading.Thread(target=back, args=(a, b), daemon=True).start()
        left = pass_on
        try:
            while left > 0 and (got := a.recv(min(left, 1 << 16))):
                b.sendall(got)
                left -= len(got)
            time.sleep(300)
        except OSError:
            pass

    threading.Thread(target=forth, daemon=True).start()
    return rx


def one_only(kind, name, closes):
    """A listener of pd-kvsend, and before it one that passes on what its first connection says, and lets no other one through: they wait, or find nobody there."""
    at = f"{tmp}/{name}"
    rx = start("-i", f"unix-listen:{at}.to", "-o", "/dev/null") if kind == "unix" else start("-i", "tcp-listen:127.0.0.1:0", "-o", "/dev/null", "-v")
    to = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    front = socket.socket(to.family)
    if kind == "unix":
        while not os.path.exists(f"{at}.to"):
            time.sleep(0.01)
        front.bind(at)
        dest = f"{at}.to"
    else:
        while b"127.0.0.1:" not in (line := rx.stderr.readline()):
            assert line, "it does not listen"
        dest = ("127.0.0.1", int(line.split(b"127.0.0.1:")[1].split()[0].strip(b",;.")))
        front.bind(("127.0.0.1", 0))
        at = "127.0.0.1:%d" % front.getsockname()[1]
    front.listen(5)
    to.connect(dest)

    def pump(a, b):
        try:
            while got := a.recv(1 << 16):
                b.sendall(got)
            b.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def serve():
        a, _ = front.accept()
        if closes:
            front.close()
            if kind == "unix":
                os.unlink(at)
        threading.Thread(target=pump, args=(to, a), daemon=True).start()
        pump(a, to)

    threading.Thread(target=serve, daemon=True).start()
    return rx, f"{kind}:{at}"


def slow(name, at, env=None, *args):
    """What a probe there says: its status, its standard error, its record."""
    x = subprocess.run([f"{B}/bin/pd-kvsend", "--probe", at, "--probe-max", "16KiB", "--format", "json", *args], capture_output=True, timeout=100, env=dict(os.environ, **(env or {})))
    return x, json.loads(x.stdout or b'{"slow": null, "rows": []}')


NO_DEVICE = """
#include <errno.h>
#include <infiniband/verbs.h>
static struct ibv_device *all[2] = { (struct ibv_device *)"", 0 };
struct ibv_device **ibv_get_device_list(int *n) { *n = 1; return all; }
void ibv_free_device_list(struct ibv_device **l) { (void)l; }
const char *ibv_get_device_name(struct ibv_device *d) { (void)d; return "mlx5_7"; }
struct ibv_context *ibv_open_device(struct ibv_device *d) { (void)d; errno = EACCES; return 0; }
"""


def devices():
    """A library to preload: the host has one RDMA device, which this user may not open."""
    with open(f"{tmp}/dev.c", "w") as f:
        f.write(NO_DEVICE)
    x = subprocess.run(["cc", "-shared", "-fPIC", "-o", f"{tmp}/dev.so", f"{tmp}/dev.c"], capture_output=True)
    assert x.returncode == 0, x.stderr
    return {"LD_PRELOAD": f"{tmp}/dev.so"}


rxs = [between("flood", 1 << 40, True), between("stall", 12 << 20, False)]
since = time.monotonic()
flood = start("--via", "inline", "--probe", f"unix:{tmp}/flood", "--probe-max", "16KiB")
stall = start("--via", "inline", "--probe", f"unix:{tmp}/stall", "--probe-max", "1MiB")
try:
    out, err = stall.communicate(timeout=120)
    ok(stall.returncode == 0 and b"4 KiB" in out and b"16 KiB" in out and b"larger ones were left out" in out and b"within 30 s" in out,
       "what is too slow for a size is left out; the rows before it are told", (stall.returncode, out, err))
    out, err = flood.communicate(timeout=120 - (time.monotonic() - since))
    ok(flood.returncode == 5 and one_line(err) and b"no answer within 30 s" in err, "a listener that never stops writing: told, and over", (flood.returncode, out, err))
except subprocess.TimeoutExpired:
    ok(False, "a probe ends", f"{stall.poll()} {flood.poll()}")
for p in (*rxs, flood, stall):
    p.kill()
    p.communicate()

for kind, best, closes, why in (("unix", "shm", True, "cannot connect"), ("unix", "shm", False, "4096 bytes by shm were not verified within 30 s"), ("tcp", "tcp", True, "Connection refused"),
                                ("tcp", "tcp", False, "no stream of data stood within")):
    rx, at = one_only(kind, f"{kind}{closes}", closes)
    x, r = slow(best, at)
    ok(x.returncode == 1 and one_line(x.stderr) and f"{best} should have been used and was not: ".encode() in x.stderr and why.encode() in x.stderr
       and r["slow"] and {w["scheme"] for w in r["rows"]} == {"inline"}, f"{best}, and no second connection ({'nobody there' if closes else 'nobody answers'})", (x, r))
    rx.kill()
    rx.communicate()

if os.path.exists("/sys/class/infiniband") or not shutil.which("cc") or "asan" in B or "tsan" in B:
    tap.skip("a device that cannot be opened", "there are devices, or nothing to make one with")
else:
    env = devices()
    for there, here, status in ((env, env, 1), ({}, env, 0), (env, {}, 0), ({}, {}, 0)):
        s = socket.socket()
        s.bind(("127.0.0.1", 0))
        at = "127.0.0.1:%d" % s.getsockname()[1]
        s.close()
        rx = subprocess.Popen([f"{B}/bin/pd-kvsend", "-i", f"tcp-listen:{at}", "-o", "/dev/null"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ, **there))
        x, r = slow("rdma", f"tcp:{at}", here)
        ok(x.returncode == status and bool(r["slow"]) == bool(status) and {"tcp"} <= {w["scheme"] for w in r["rows"]}
           and (not status or (b"rdma should have been used and was not: mlx5_7 cannot be opened: Permission denied" in x.stderr)),
           f"an RDMA device that cannot be opened: {'at both ends: told' if status else 'nothing is amiss where an end has none'}", (x, r))
        rx.kill()
        rx.communicate()
subprocess.run(["rm", "-rf", tmp])
tap.done()
