#!/usr/bin/env python3
"""What a stream should not bring and does: run ids that come twice, replays, a broken offer, KV of another model; readers that stand still. On tiny models."""
import signal
import subprocess
import tempfile
import time

import tap
from tap import decode, lines, ok, prefill, results, run, trace

OTHER = "testdata/tiny/llama-q8_0.gguf"
RUN = "01M8PAHHAT80TXBD0XZ6M6EGMJ"


def twice(tmp):
    data = lines([{"id": "first", "run": RUN, "prompt": "x y", "max_tokens": 3}, {"id": "second", "run": RUN, "prompt": "z", "max_tokens": 3}])
    x = run(prefill(), data)
    y = run(decode("--format", "json"), x.stdout)
    rs = {r["id"]: r for r in results(y.stdout)}
    ok(x.returncode == 1 and y.returncode == 1 and set(rs) == {"first", "second"} and len(results(y.stdout)) == 2 and rs["first"]["mode"] == "remote"
       and len(rs["first"]["tokens"]) == 3 and rs["second"]["finish_reason"] == "error" and RUN.encode() in x.stderr,
       "a run id that comes twice: the first is served, the second refused", (x.stderr, y.stdout, y.stderr))
    x = run(decode("--format", "json"), data)
    rs = {r["id"]: r for r in results(x.stdout)}
    ok(x.returncode == 1 and len(rs["first"]["tokens"]) == 3 and rs["second"]["finish_reason"] == "error" and rs["second"]["run"] != RUN, "the same aggregated", (x.stdout, x.stderr))
    x = run(prefill("-o", f"{tmp}/a.h5"), data)
    y = run(decode("--format", "json", "-i", f"{tmp}/a.h5"))
    ok(x.returncode == 1 and [r["id"] for r in results(y.stdout)] == ["first"], "and a dump keeps the first", (x.stderr, y.stdout, y.stderr))


def replays():
    """A whole run again, when it has been answered: no second result."""
    kv = run(prefill(), lines([{"id": "a", "prompt": "x y", "max_tokens": 3}])).stdout
    p = subprocess.Popen(decode("--format", "json"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    p.stdin.write(kv)
    p.stdin.flush()
    line = p.stdout.readline()          # the result: it is answered
    out, err = p.communicate(kv, timeout=60)
    ok(len(results(line)) == 1 and not out and p.returncode == 4 and len(err.splitlines()) == 1 and b"offer came twice" in err, "a run replayed after its end: one line, exit 4, no second result",
       (line, out, err, p.returncode))


def broken_offer():
    kv = bytearray(run(prefill(), lines([{"id": "a", "prompt": "x " * 40, "max_tokens": 3}, {"id": "b", "prompt": "y", "max_tokens": 2}])).stdout)
    kv[kv.index(b"epoch") + 5] ^= 1
    x = run(decode("--format", "json"), bytes(kv))
    rs = {r["id"]: r for r in results(x.stdout)}
    ok(x.returncode == 0 and len(results(x.stdout)) == 2 and rs["a"]["mode"] == "local" and rs["a"]["fallback"].startswith("integrity") and len(rs["a"]["tokens"]) == 3
       and rs["b"]["mode"] == "remote" and len(x.stderr.splitlines()) == 1,
       "a flipped bit in an offer: its kv is whole, so it is recomputed and named; the next run is served", (x.returncode, x.stdout, x.stderr))
    x = run(decode("--format", "json", "--on-mismatch", "fail"), bytes(kv))
    rs = results(x.stdout)
    ok(x.returncode == 4 and len(rs) == 2 and sum(r["finish_reason"] == "error" and not r["tokens"] for r in rs) == 1 and len(x.stderr.splitlines()) == 1,
       "the same under --on-mismatch fail: exit 4, one error", (x.returncode, x.stdout, x.stderr))


def other_model():
    """A request that ends at prefill brings no KV, but its token is no less another model's."""
    req = lines([{"id": "a", "token_ids": [1, 2, 3], "max_tokens": 1, "temperature": 0}])
    theirs, mine = run(prefill(m=OTHER), req).stdout, results(run(decode("--format", "json"), req).stdout)[0]["tokens"]
    x = run(decode("--format", "json"), theirs)
    r = results(x.stdout)[0]
    ok(x.returncode == 0 and r["mode"] == "local" and "weights_digest differs" in r["fallback"] and r["tokens"] == mine, "the first token of another model is not used", (x.stdout, x.stderr))
    x = run(decode("--format", "json", "--on-mismatch", "fail"), theirs)
    ok(x.returncode == 3 and b"weights_digest differs" in x.stderr and results(x.stdout)[0]["finish_reason"] == "error", "and with --on-mismatch fail it is refused: exit 3", (x.stdout, x.stderr))
    r = results(run(decode("--format", "json"), run(prefill(), req).stdout).stdout)[0]
    ok(r["mode"] == "remote" and r["tokens"] == mine and r["transferred_tokens"] == 0, "that of the same model is, and nothing was transferred", r)


def stands(p):
    """Whether a process waits in the end: a second without work, however long a busy machine takes to get there."""
    worked, until = None, time.time() + 120
    while p.poll() is None and time.time() < until:
        now = open(f"/proc/{p.pid}/stat").read().rsplit(")", 1)[1].split()[11:13]
        if now == worked:
            return True
        worked = now
        time.sleep(1)
    return False


def stands_still():
    many = lines([{"prompt": "word " * 40, "max_tokens": 30, "temperature": 0} for _ in range(400)])
    for name, cmd in (("prefill", prefill()), ("decode", decode("--stream"))):
        with tempfile.TemporaryFile() as f:
            f.write(many.encode())
            f.seek(0)
            p = subprocess.Popen(cmd, stdin=f, stdout=subprocess.PIPE, stderr=subprocess.PIPE)      # nobody reads
            blocked = stands(p)
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


def dump_for_records(folder):
    """A dump where records are read: named for what it is."""
    path = f"{folder}/dump.h5"
    run(prefill("-o", path), lines([{"prompt": "abc", "max_tokens": 2}]))
    data = open(path, "rb").read()
    for name, cmd in (("decode", decode("--text")), ("prefill --lines", prefill("--lines")), ("trace cat", trace("cat"))):
        r = run(cmd, data)
        ok(r.returncode == 4 and not r.stdout and b"KV dump (HDF5)" in r.stderr and b"-i FILE" in r.stderr, f"a dump on {name}'s standard input: told that it is one, exit 4", r)


with tempfile.TemporaryDirectory() as folder:
    twice(folder)
    dump_for_records(folder)
    replays()
    broken_offer()
    other_model()
    stands_still()
tap.done()
