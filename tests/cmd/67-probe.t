#!/usr/bin/env python3
"""pd-kvsend --probe against a listener, or a way to it, that misbehaves: one that never stops writing, one where nothing more arrives after a while."""
import os
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
subprocess.run(["rm", "-rf", tmp])
tap.done()
