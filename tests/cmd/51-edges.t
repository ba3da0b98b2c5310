#!/usr/bin/env python3
"""What a stream should not bring and does: run ids that come twice, readers that stand still. On a tiny model."""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

B = os.path.abspath(os.environ.get("B", "build"))
MODEL = "testdata/tiny/llama-q4_1.gguf"
RUN = "01M8PAHHAT80TXBD0XZ6M6EGMJ"
count = failed = 0


def ok(cond, name, note=""):
    global count, failed
    count += 1
    failed += not cond
    print(f"{'ok' if cond else 'not ok'} {count} - {name}", flush=True)
    if not cond:
        print(f"# {str(note)[-1500:]}".replace("\n", "\n# "), file=sys.stderr, flush=True)


def run(cmd, data=b""):
    return subprocess.run(cmd, input=data.encode() if isinstance(data, str) else data, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300)


def prefill(*args):
    return [f"{B}/bin/pd-prefill", "-m", MODEL, *args]


def decode(*args):
    return [f"{B}/bin/pd-decode", "-m", MODEL, *args]


def lines(reqs):
    return "".join(json.dumps(r) + "\n" for r in reqs)


def results(out):
    return [r for r in map(json.loads, out.decode().splitlines()) if r["pd"] == "result"]


def twice(tmp):
    data = lines([{"id": "first", "run": RUN, "prompt": "x y", "max_tokens": 3}, {"id": "second", "run": RUN, "prompt": "z", "max_tokens": 3}])
    x = run(prefill(), data)
    y = run(decode("--format", "json"), x.stdout)
    rs = {r["id"]: r for r in results(y.stdout)}
    ok(x.returncode == 1 and y.returncode == 1 and set(rs) == {"first", "second"} and len(results(y.stdout)) == 2 and rs["first"]["mode"] == "remote"
       and len(rs["first"]["tokens"]) == 3 and rs["second"]["finish_reason"] == "error" and RUN.encode() in x.stderr,
       "a run id that comes twice: the first is served, the second refused", (x.stderr, y.stdout, y.stderr))
    x = run(prefill("-o", f"{tmp}/a.h5"), data)
    y = run(decode("--format", "json", "-i", f"{tmp}/a.h5"))
    ok(x.returncode == 1 and [r["id"] for r in results(y.stdout)] == ["first"], "and a dump keeps the first", (x.stderr, y.stdout, y.stderr))


def stands_still():
    many = lines([{"prompt": "word " * 40, "max_tokens": 30, "temperature": 0} for _ in range(400)])
    for name, cmd in (("prefill", prefill()), ("decode", decode("--stream"))):
        with tempfile.TemporaryFile() as f:
            f.write(many.encode())
            f.seek(0)
            p = subprocess.Popen(cmd, stdin=f, stdout=subprocess.PIPE, stderr=subprocess.PIPE)      # nobody reads
            time.sleep(3)
            blocked = p.poll() is None
            p.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            p.send_signal(signal.SIGTERM)
            try:
                p.wait(10)
                err = p.stderr.read()
                ok(blocked and p.returncode == 6 and len(err.splitlines()) == 1, f"{name}, its reader stands still: a second SIGTERM ends it, exit 6", (blocked, p.returncode, err))
            except subprocess.TimeoutExpired:
                p.kill()
                ok(False, f"{name}, its reader stands still: a second SIGTERM ends it, exit 6", "it went on")


with tempfile.TemporaryDirectory() as folder:
    twice(folder)
    stands_still()
print(f"1..{count}")
sys.exit(failed > 0)
