#!/usr/bin/env python3
"""Hostile model files (hostile.py makes them) through the commands: each is refused in one line that names file, field and place, within a second and 64 MiB,
or loads. And files that shrink, are written to, replaced or removed while they are loaded and afterwards. LONG=1: every value of every field."""
import os
import random
import signal
import shutil
import subprocess
import sys
import tempfile
import time

import hostile
import tap
from tap import ok, results

V, LONG = os.environ.get("V", ""), os.environ.get("LONG") == "1"
SECONDS = 20 if V in ("asan", "tsan") else 1
MIB = 1 << 20 if V in ("asan", "tsan") else 64      # a sanitizer has memory of its own
REQUEST = b'{"id":"a","prompt":"Hi there","max_tokens":3,"temperature":0}\n'
tmp = tempfile.mkdtemp()
# A process inherits the peak of the one that starts it: a small one does that, told a line each time.
starter = subprocess.Popen([sys.executable, "-S", "-c", """import os, sys, time
for line in sys.stdin:
    out, err, *cmd = line.rstrip().split(' ')
    start = time.monotonic()
    pid = os.posix_spawn(cmd[0], cmd, os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 0, out, os.O_RDONLY, 0), (os.POSIX_SPAWN_OPEN, 1, '/dev/null', os.O_WRONLY, 0),
                         (os.POSIX_SPAWN_OPEN, 2, err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)])
    _, status, used = os.wait4(pid, 0)
    print(os.waitstatus_to_exitcode(status), time.monotonic() - start, used.ru_maxrss / 1024, flush=True)
"""], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
model = f"{tmp}/model.gguf"
worst = {"s": 0.0, "mib": 0.0}


def load(name="pd-prefill", data=REQUEST):
    """(status, stderr, seconds, peak MiB) of a command that loads `model` and has one request. All of the memory counts, libraries too."""
    with open(f"{tmp}/in", "wb") as f:
        f.write(data)
    starter.stdin.write(f"{tmp}/in {tmp}/err /usr/bin/timeout -s KILL 60 {tap.B}/bin/{name} -q -t 2 -m {model}\n")
    starter.stdin.flush()
    status, seconds, mib = starter.stdout.readline().split()
    return int(status), open(f"{tmp}/err", "rb").read(), float(seconds), float(mib)


def write(data):
    if os.path.exists(model):
        os.unlink(model)
    data(model) if callable(data) else open(model, "wb").write(data)


def wrong(x, statuses, says):
    """What is wrong with how a file was met, or None."""
    status, err, seconds, mib = x
    worst["mib"] = max(worst["mib"], mib if status else 0)
    for _ in range(3):              # a busy machine takes its time
        if seconds <= SECONDS:
            break
        seconds = min(seconds, load()[2])
    worst["s"] = max(worst["s"], seconds)
    if status not in statuses:
        return "status"
    if seconds > SECONDS or (mib > MIB and status):
        return "time" if seconds > SECONDS else "memory"
    if not status:
        return None
    text = err.decode(errors="replace")
    # A file that loads and computes nonsense (a type that has the size of another's data) is found out by a run, which the line names then.
    if len(text.splitlines()) != 1 or (model not in text and not ("run 0" in text and "the model file is damaged" in text)) or "Sanitizer" in text or any(ord(c) < 32 for c in text[:-1]):
        return "not one clean line that names the file"
    lacking = [s for s in says if s not in text]
    return f"lacks {lacking}" if lacking else None


def named():
    for name, data, status, says in hostile.named():
        write(data)
        x = load()
        bad = wrong(x, {0, 3, 4} if status is None else {status}, says if status else ())
        ok(not bad, name, (bad, x))
    ok(not os.path.exists(hostile.OWNED), "no template ran")


def every_field():
    """No value of any field does more than be refused."""
    bad, n = [], 0
    todo = list(hostile.fields(1, 1))
    if not LONG:
        todo = random.Random(11).sample(todo, 100 if V else 300)
    elif V:
        todo = random.Random().sample(todo, 2000)
    for name, data in todo:
        write(data)
        x = load("pd-decode" if n % 4 == 3 else "pd-prefill")
        n += 1
        # A request may fail (1): an id that is another token, a template that is another.
        why = wrong(x, {0, 3, 4} | ({1} if x[0] == 1 and b"run 0" in x[1] else set()), ())
        if why and x[0] != 1:
            bad.append((name, why, x))
    ok(not bad, f"{n} files with one field changed: refused in one line, or good", (len(bad), bad[:3]))


# --- files that change under way ---

faulty = f"{tap.B}/fault" if not V else tap.B
MODELS = ("llama-q4_1", "llama-untied")


def good(name):
    write(lambda path: shutil.copy(f"{hostile.DIR}/{name}.gguf", path))


def overwrite():
    with open(model, "r+b") as f:
        f.seek(-4000, 2)
        f.write(bytes(4000))
    os.utime(model, (1, 1))         # the clock of files is coarse


def replace():
    shutil.copy(f"{hostile.DIR}/llama-spm.gguf", f"{model}.new")
    os.rename(f"{model}.new", model)


def stopped(cmd, env, change):
    """The command, stopped where PD_FAULT says; `change` happens meanwhile. (process, whether it stopped)"""
    with open(f"{tmp}/request", "wb") as f:
        f.write(REQUEST)
    with open(f"{tmp}/request", "rb") as f:
        p = subprocess.Popen(cmd, stdin=f, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ, PD_CACHE=f"{tmp}/cache", **env))
    _, status = os.waitpid(p.pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        p.returncode = os.waitstatus_to_exitcode(status)
        return p, False
    change()
    os.kill(p.pid, signal.SIGCONT)
    return p, True


def answer(out):
    return [(r["tokens"], r["text"]) for r in results(out)]


def while_loading():
    """At each read of loading in turn, so that no moment is left out."""
    for name in MODELS:
        good(name)
        cmd = [f"{faulty}/bin/pd-decode", "-q", "-t", "2", "-m", model, "--format", "json"]
        want = answer(tap.run(cmd, REQUEST).stdout)
        size = os.path.getsize(model)
        ways = {"cut to nothing": (lambda: os.truncate(model, 0), 4), "cut to a page": (lambda: os.truncate(model, 4096), 4), "cut by a byte": (lambda: os.truncate(model, size - 1), 4),
                "written to": (overwrite, 4), "replaced by rename": (replace, 0), "removed": (lambda: os.unlink(model), 0)}
        for what, (change, expected) in ways.items():
            bad, n, seen = [], 0, []
            while n < 500:
                good(name)
                shutil.rmtree(f"{tmp}/cache", ignore_errors=True)
                p, was = stopped(cmd, {"PD_FAULT": f"read:stop:{n + 1}"}, change)
                out, err = p.communicate(timeout=60)
                if not was:
                    break
                n += 1
                seen.append(p.returncode)
                told = len(err.splitlines()) == 1 and model.encode() in err and (b"rename" in err or b"shorter" in err)
                if p.returncode not in (expected, 0) or (answer(out) != want if p.returncode == 0 else not told):
                    bad.append((n, p.returncode, out, err))
            # Once all is read nothing matters any more.
            ok(not bad and n > 10 and seen == sorted(seen, reverse=True) and seen.count(expected) > 10, f"{name}.gguf {what} at each of {n} reads: "
               + ("the same answer" if not expected else "told in one line until it is loaded"), (len(bad), bad[:3], seen))


def afterwards():
    """A process that has loaded lives on whatever becomes of the file."""
    for name in MODELS:
        for what, change in (("cut to nothing", lambda: os.truncate(model, 0)), ("overwritten", lambda: open(model, "r+b").write(os.urandom(200000))), ("removed", lambda: os.unlink(model))):
            for tool, args in (("pd-decode", ("--format", "json")), ("pd-prefill", ("--format", "json"))):
                got = []
                for disturbed in (False, True):
                    good(name)
                    p = subprocess.Popen([f"{tap.B}/bin/{tool}", "-q", "-m", model, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                    p.stdin.write(REQUEST)
                    p.stdin.flush()
                    first = p.stdout.readline()
                    if disturbed:
                        change()
                    p.stdin.write(b'{"id":"b","prompt":"It was the best of times, it was the worst","max_tokens":9,"temperature":0}\n' * 3)
                    p.stdin.close()
                    rest, err = p.stdout.read(), p.stderr.read()
                    p.wait()
                    tokens = [r["tokens"] for r in results(first + rest)] if tool == "pd-decode" else [r["first"] for r in tap.records(first + rest) if r["pd"] == "kv"]
                    got.append((p.returncode, tokens, err))
                ok(got[0] == got[1] and got[0][0] == 0 and len(got[0][1]) == 4, f"{tool}: {name}.gguf {what} after the first answer: the others are the same", got)


def dumps():
    """A dump that is cut while its reader reads it."""
    dump, back = f"{tmp}/d.h5", f"{tmp}/back.h5"
    good("llama-q4_1")
    tap.run([f"{tap.B}/bin/pd-prefill", "-q", "-m", model, "-o", back], tap.lines([{"id": i, "prompt": f"{i} " + "It was the best of times. " * 4, "max_tokens": 4, "temperature": 0} for i in range(3)]))
    cmd = [f"{faulty}/bin/pd-decode", "-q", "-m", model, "--format", "json", "-i", dump]
    shutil.copy(back, dump)
    want = {r["id"]: r["tokens"] for r in results(tap.run(cmd).stdout)}
    size, bad, n = os.path.getsize(dump), [], 0
    for cut in (0, 100, size // 3, size - 1):
        at = 1
        while at < 2000:
            shutil.copy(back, dump)
            p = subprocess.Popen(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ, PD_CHILD_FAULT=f"read:stop:{at}"))
            child = None
            while p.poll() is None and child is None:
                for pid in open(f"/proc/{p.pid}/task/{p.pid}/children").read().split():
                    if open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] == "T":
                        child = int(pid)
                time.sleep(0.002)
            if child:
                os.truncate(dump, cut)
                os.kill(child, signal.SIGCONT)
            out, err = p.communicate(timeout=60)
            if child is None:
                break
            n += 1
            rs = [r for r in results(out) if r["finish_reason"] != "error"]
            if p.returncode not in (0, 4) or any(want[r["id"]] != r["tokens"] for r in rs) or (p.returncode == 0) != (len(rs) == 3) or (p.returncode and dump.encode() not in err and b"run 0" not in err):
                bad.append((cut, at, p.returncode, err, out[-300:]))
            at += 1 if LONG else 7
    ok(not bad and want and n > 20, f"a dump cut at {n} reads of its reader: told, and what is served is right", (len(bad), bad[:3]))


# --- requests and records ---

FIELDS = ("id", "run", "prompt", "messages", "token_ids", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "presence_penalty", "frequency_penalty",
          "repetition_penalty", "logit_bias", "ignore_eos", "logprobs", "top_logprobs", "echo", "n", "adapter", "cache_salt", "deadline_ms", "timeouts_ms", "slo", "cancel_token", "priority", "idempotency_key",
          "arrival_us", "route", "v", "no such field")
VALUES = (None, True, False, 0, 1, -1, 127, 2**31, -2**31, 2**32, 2**53, 2**63 - 1, -2**63, 0.5, -0.5, 1e308, -1e308, 5e-324, "", "x", "\0", "x" * 100000, [], [0], [-1], [2**31], [None], [[]], ["a", 1], ["a"] * 100,
          list(range(5000)), {}, {"a": 1}, {"0": 1}, {"-1": 1e308}, {"role": "user"}, [{"role": "user"}], [{"role": 1, "content": 2}], [{"role": "user", "content": "x"}] * 50, {"$b64": "!"}, {"$b64": "AAAA"})


def requests():
    """Every field of a request with every odd value, in one stream: each is served or refused alone, by the name of the field."""
    reqs = [{"id": f"{f}.{i}", "prompt": "Hi", "max_tokens": 1, f: v} for f in FIELDS for i, v in enumerate(VALUES) if f != "id"]
    reqs += [{"prompt": "Hi", "max_tokens": 1, "id": v} for v in VALUES]
    data = tap.lines(reqs + [{"id": "last", "prompt": "Hi", "max_tokens": 1}]).encode()
    good("llama-q4_1")
    for tool in ("pd-decode", "pd-prefill"):
        x = tap.run([f"{tap.B}/bin/{tool}", "-m", model, "--format", "json"], data)
        rs = tap.records(x.stdout)
        served = {str(r.get("id")) for r in rs if r["pd"] == "result"} if tool == "pd-decode" else {str(r["request"].get("id")) for r in rs if r["pd"] == "kv"}
        told = [r for r in rs if r["pd"] == "error"]
        short = [r for r in told if not r.get("message")]
        ok(x.returncode in (1, 3) and "last" in served and not short and len(told) > 300 and b"Sanitizer" not in x.stderr, f"{tool}: {len(reqs)} requests with one odd value, {len(told)} refused one by one", (x.returncode, x.stderr[-800:], short[:3]))
    broken = {"no end": b'{"id":"a","prompt":"Hi', "two objects": b"{}{}\n", "a list": b"[]\n", "a word": b"{\"a\":nul}\n", "a number too long": b'{"max_tokens":' + b"9" * 100000 + b"}\n", "deep lists": b'{"a":' + b"[" * 100000 + b"\n",
              "deep maps": b'{"a":' * 50000 + b"\n", "broken text": b'{"prompt":"\xff\xfe"}\n', "half a surrogate": b'{"prompt":"\\ud800"}\n', "a key twice": b'{"prompt":"a","prompt":"b"}\n', "infinity": b'{"temperature":1e999}\n',
              "NaN": b'{"temperature":NaN}\n', "a map of 2^32": b"\xdf\xff\xff\xff\xff", "a list of 2^32": b"\x81\xa6prompt\xdd\xff\xff\xff\xff", "text of 4 GiB": b"\x81\xa6prompt\xdb\xff\xff\xff\xffabc",
              "bytes of 4 GiB": b"\x81\xa2id\xc6\xff\xff\xff\xff", "an extension of 4 GiB": b"\x81\xa2id\xc9\xff\xff\xff\xff\x01", "deep": b"\x81\xa1a" * 100000, "never used": b"\x81\xa1a\xc1", "a key that is a number": b"\x81\x01\x01",
              "nothing but a map": b"\x80" * 5, "zeros": bytes(1000)}
    for name, bad in broken.items():
        for tool in ("pd-prefill", "pd-decode"):
            x = load(tool, bad)
            ok(x[0] in (1, 2, 3, 4) and x[1].strip() and x[2] <= SECONDS + 3 and x[3] <= MIB and b"Sanitizer" not in x[1], f"{tool}, input: {name}", x)


named()
every_field()
requests()
if V == "tsan":
    tap.skip("files that change", "no fault points in V=tsan")
else:
    while_loading()
    dumps()
afterwards()
starter.stdin.close()
starter.wait()
print(f"# the slowest took {worst['s']:.2f} s, the largest {worst['mib']:.0f} MiB", flush=True)
shutil.rmtree(tmp)
tap.done()
