"""What the Python tests of commands share: TAP on stdout, running the build's commands, reading what they write."""
import base64
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time

B = os.path.abspath(os.environ.get("B", "build"))
TINY = "testdata/tiny/llama-q4_1.gguf"
model = TINY            # of prefill() and decode() when they name none; a test may set it
count = failed = 0


def ok(cond, name, note=""):
    """One result; `note` is told on stderr when it failed."""
    global count, failed
    count += 1
    failed += not cond
    print(f"{'ok' if cond else 'not ok'} {count} - {name}", flush=True)
    if not cond:
        print(f"# {str(note)[-2500:]}".replace("\n", "\n# "), file=sys.stderr, flush=True)


def skip(name, why):
    global count
    count += 1
    print(f"ok {count} - {name} # SKIP {why}", flush=True)


def done():
    """The plan, and out with the right status."""
    print(f"1..{count}")
    sys.exit(failed > 0)


def run(cmd, data=b"", env=None, timeout=300, **kw):
    """A command to its end; status -1 when it hangs. env: variables to add."""
    if isinstance(data, str):
        data = data.encode()
    try:
        return subprocess.run(cmd, input=data, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout, env=dict(os.environ, **(env or {})), **kw)
    except subprocess.TimeoutExpired as e:
        return subprocess.CompletedProcess(cmd, -1, e.stdout or b"", (e.stderr or b"") + b"it hung")


def prefill(*args, m=None):
    return [f"{B}/bin/pd-prefill", "-m", m or model, *args]


def decode(*args, m=None):
    return [f"{B}/bin/pd-decode", "-m", m or model, *args]


def trace(*args):
    return [f"{B}/bin/pd-trace", *args]


def lines(reqs):
    return "".join(json.dumps(r) + "\n" for r in reqs)


def records(out):
    return [json.loads(x) for x in out.decode().split("\n") if x]      # splitlines would split within a text too


def results(out):
    return [r for r in records(out) if r.get("pd") == "result"]


def b64(v):
    """bin, as JSON has it."""
    return base64.b64decode(v["$b64"])


def one_line(err):
    return len([x for x in err.decode(errors="replace").splitlines() if x]) == 1


def wait_for(p, cond):
    until = time.monotonic() + 60
    while time.monotonic() < until and p.poll() is None and not cond():
        time.sleep(0.01)


def handles_signals(p):
    """SIGTERM is counted from here on, not deadly."""
    wait_for(p, lambda: any(x.startswith("SigCgt") and int(x.split()[1], 16) >> (signal.SIGTERM - 1) & 1 for x in open(f"/proc/{p.pid}/status")))


def has_read(p):
    """What was written to its standard input, a pipe: all of it."""
    wait_for(p, lambda: fcntl.ioctl(p.stdin, termios.FIONREAD, bytes(4)) == bytes(4))
