#!/usr/bin/env python3
"""Every allocation, read, write, fsync and mapping of the commands refused once (a build with fault points, base/fault.h): the exit status says what happened,
one line says why, and what is at the output's name is whole or is not there. Every fifth allocation; in V=fault and with LONG=1 each of them."""
import json
import os
import shutil
import sys
import tempfile

import tap
from tap import lines, ok, records, results, run

V = os.environ.get("V", "")
if V == "tsan":
    print("1..0 # SKIP no fault points in V=tsan")
    sys.exit(0)
if not V:       # of the plain build's own: V=fault, which `make check` has made
    plain, tap.B = tap.B, f"{tap.B}/fault"
else:
    plain = tap.B
STEP = 1 if V == "fault" or os.environ.get("LONG") == "1" else 5
tmp = tempfile.mkdtemp()
out = f"{tmp}/out"
# What a refused call may end in. A recovered one is 0: then the output is the same as without it. A stream that cannot be read on leaves a run without its end: 4.
STATUS = {"malloc": {0, 8}, "write": {0, 8}, "mmap": {0, 8}, "read": {0, 1, 4}, "fsync": {0, 1}, "tmpfile": {0}}
REQ = [{"id": "a", "run": "01M8PAHHAT80TXBD0XZ6M6EGMJ", "prompt": "It was the best of times", "max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 2},
       {"id": "b", "run": "01M8PAHHAT80TXBD0XZ6M6EGMK", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "seed": 5, "n": 2, "stop": ["zz"]}]


def once(cmd, data, fault=None, count=None, child=None):
    """The command in an empty folder and with an empty cache."""
    for d in (out, f"{tmp}/cache"):
        shutil.rmtree(d, ignore_errors=True)
    os.mkdir(out)
    env = {"PD_CACHE": f"{tmp}/cache", **({"PD_FAULT": fault} if fault else {}), **({"PD_FAULT_COUNT": count} if count else {}), **({"PD_CHILD_FAULT": child} if child else {})}
    return run(cmd, data, env=env)


def answers(text):
    return sorted((str(r["id"]), r.get("choice", 0), r["tokens"], r["text"], r["finish_reason"], r.get("logprobs")) for r in results(text))


def kv_holds(name):
    """What a prefill's output decodes to, without faults: None when it is no whole stream or file."""
    x = run([f"{plain}/bin/pd-decode", "-m", tap.TINY, "--format", "json", "-i", name])
    return answers(x.stdout) if x.returncode in (0, 1, 8) and b"ends inside" not in x.stderr else None


def text_holds(name):
    text = open(name, "rb").read()
    return answers(text) if not text or text.endswith(b"\n") else None


def file_holds(name):
    x = run([f"{plain}/bin/pd-trace", "kv", "verify", name])
    return x.stdout.split(b":", 1)[1] if x.returncode == 0 else None


def picture_holds(name):
    return open(name, "rb").read()[-12:]        # IEND


def drill(what, cmd, data, name, holds):
    """name: of the output in its folder; holds(path): what is in it, or None when it is not whole."""
    counts = f"{tmp}/counts"
    if os.path.exists(counts):
        os.remove(counts)
    x = once(cmd, data, count=counts)
    if x.returncode or os.listdir(out) != [name]:
        ok(False, f"{what}: without faults", (x.returncode, x.stderr, os.listdir(out)))
        return
    want = holds(f"{out}/{name}")
    words = open(counts).read().split()
    passes = dict(zip(words[::2], map(int, words[1::2])))
    for point, n_passes in passes.items():
        bad, refused = [], 0
        for n in range(1, n_passes + 1, STEP if point == "malloc" else 1):
            x = once(cmd, data, fault=f"{point}:fail:{n}")
            left = os.listdir(out)
            got = holds(f"{out}/{name}") if left == [name] else None
            refused += x.returncode != 0
            wrong = ("status" if x.returncode not in STATUS[point] else "nothing is said" if x.returncode and not x.stderr.strip() else "what is left" if left not in ([], [name]) else
                     "not whole" if left and got is None else "no output" if x.returncode == 0 and not left else "another answer" if x.returncode == 0 and got != want else None)
            if wrong:
                bad.append((n, wrong, x.returncode, left, x.stderr[-300:]))
        if n_passes:
            ok(not bad and (refused or point in ("tmpfile", "mmap")), f"{what}: {point} refused, {n_passes} times in all", (len(bad), bad[:3]))


data = lines(REQ)
kv, h5 = f"{tmp}/in.kv", f"{tmp}/in.h5"
for name in (kv, h5):
    run([f"{plain}/bin/pd-prefill", "-m", tap.TINY, "-o", name], data)
drill("prefill to a file", tap.prefill("-o", f"{out}/x.kv"), data, "x.kv", kv_holds)
drill("prefill to a dump", tap.prefill("-o", f"{out}/x.h5"), data, "x.h5", kv_holds)
drill("decode of a stream", tap.decode("-i", kv, "--format", "json", "-o", f"{out}/x"), b"", "x", text_holds)
drill("decode of a dump", tap.decode("-i", h5, "--format", "json", "-o", f"{out}/x"), b"", "x", text_holds)
drill("decode of requests", tap.decode("--format", "json", "-o", f"{out}/x"), data, "x", text_holds)
drill("kv slice", tap.trace("kv", "slice", "-q", "--run", REQ[0]["run"], "--tokens", "3:9", "-o", f"{out}/s.h5", h5), b"", "s.h5", file_holds)
drill("kv png", tap.trace("kv", "png", "-q", "--run", REQ[0]["run"], "-o", f"{out}/p.png", h5), b"", "p.png", picture_holds)

log, log2 = f"{tmp}/in.trace", f"{tmp}/in2.trace"
for name, reqs in ((log, REQ), (log2, REQ[:1])):
    run([f"{plain}/bin/pd-decode", "-m", tap.TINY, "--trace", name, "--format", "json"], lines([{k: v for k, v in r.items() if k != "run"} for r in reqs]))
for verb in ("check", "ls", "stats", "show 01"):
    files = f"{log2}" if verb == "show 01" else f"{log} {log2}"
    drill(f"trace {verb}", ["sh", "-c", f"exec {tap.B}/bin/pd-trace {verb} {files} >{out}/x"], b"", "x", lambda name: open(name, "rb").read())
drill("trace merge", tap.trace("merge", "-o", f"{out}/x", log, log2), b"", "x", lambda name: open(name, "rb").read())

# The child that reads dumps. A run that it had begun is discarded, which is 4 and wins; before that, what it lacks is not the file's fault.
want = answers(once(tap.decode("-i", h5, "--format", "json"), b"").stdout)
for point, step in (("malloc", STEP * 8 - 7), ("write", 1), ("read", STEP)):
    bad, n = [], 1
    while n < 2000:
        x = once(tap.decode("-i", h5, "--format", "json"), b"", child=f"{point}:fail:{n}")
        if x.returncode == 0 and answers(x.stdout) == want:
            break
        if x.returncode not in ({4} if b"is discarded" in x.stderr else set()) | {1 if point == "read" else 8} or not x.stderr.strip():
            bad.append((n, x.returncode, x.stderr[-300:]))
        n += step
    ok(not bad and 1 < n < 2000, f"a dump's reader: {point} refused, up to the {n}th", (len(bad), bad[:3]))
shutil.rmtree(tmp)
tap.done()
