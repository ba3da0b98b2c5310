"""Called by 46-convert.t."""
import base64
import json
import os
import sys
import tempfile

import h5py
import numpy as np

import tap
from tap import B, ok, run

tmp = tempfile.mkdtemp()
tap.model = "testdata/tiny/llama-f16.gguf"
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
REQS = tap.lines({"id": i, "prompt": TEXT * n, "max_tokens": 12, "temperature": 0} for i, n in enumerate((1, 2, 3)))


def at(name):
    return os.path.join(tmp, name)


def prefill(*args):
    r = run(tap.prefill(*args), REQS)
    if r.returncode:
        print(f"Bail out! pd-prefill {args}: {r.stderr.decode()}")
        sys.exit(1)
    return r.stdout


def decode(data, *args):
    return run(tap.decode("--format", "json", *args), data)


def answers(r):
    """What must not depend on the way of the KV."""
    return sorted((x["id"], x["tokens"], x["finish_reason"], x["mode"], x["fallback"]) for x in tap.results(r.stdout))


def bit(d, *args):
    return tap.records(prefill("--kv-dtype", d, "--format", "json", *args))


# --- coded on the way
for d in ("bf16", "f16"):
    plain = prefill("--kv-dtype", d)
    want = answers(decode(plain, "--kv-dtype", d))
    ok(len(want) == 3 and all(x[3] == "remote" and not x[4] for x in want), f"{d}: three runs with their KV", want)
    for codec in ("zstd", "auto"):
        r = decode(prefill("--kv-dtype", d, "--codec", codec), "--kv-dtype", d, "--strict")
        ok(r.returncode == 0 and answers(r) == want, f"{d}, --codec {codec}: the same answers", r.stderr)
    recs = bit(d, "--codec", "zstd")
    kinds = {x["codec"] for x in recs if x["pd"] == "chunk"}
    said = {x["payload"]["codec"] for x in recs if x["pd"] in ("offer", "kv")}
    smaller = sum(len(base64.b64decode(x["data"]["$b64"])) for x in recs if x["pd"] == "chunk")
    raw = sum(x["raw_len"] for x in recs if x["pd"] == "chunk")
    ok("zstd" in kinds and said == {"zstd"} and smaller < raw * (0.8 if d == "bf16" else 0.95), f"{d}: chunks are smaller ({smaller} of {raw} bytes)", (kinds, said))
    r = decode(tap.lines(recs), "--kv-dtype", d)
    ok(answers(r) == want, f"{d}: also as JSON", r.stderr)
    for where, name in ((0.25, "mantissas"), (0.9, "exponents")):
        bad = json.loads(json.dumps(recs))
        c = next(x for x in bad if x["pd"] == "chunk" and x["codec"] == "zstd")
        p = bytearray(base64.b64decode(c["data"]["$b64"]))
        p[int(len(p) * where)] ^= 4
        c["data"]["$b64"] = base64.b64encode(p).decode()
        r = decode(tap.lines(bad), "--kv-dtype", d)
        got = answers(r)
        ok([x[1] for x in got] == [x[1] for x in want] and sum(bool(x[4] and "integrity" in x[4]) for x in got) == 1, f"{d}: a changed byte among the {name}: that run is computed here", (got, r.stderr))

r = run(tap.prefill("--kv-dtype", "f32", "--codec", "zstd"), REQS)
ok(r.returncode == 2 and b"--codec zstd" in r.stderr and b"--codec auto" in r.stderr, "--codec zstd of f32: exit 2, and what to do", r.stderr)
auto = bit("f32", "--codec", "auto")
ok({x["codec"] for x in auto if x["pd"] == "chunk"} == {"none"} and {x["payload"]["codec"] for x in auto if x["pd"] == "offer"} == {"none"}, "--codec auto of f32: none")
r = run(tap.prefill("--codec", "lz4"), REQS)
ok(r.returncode == 2 and b"'lz4' is unknown (none, zstd or auto)" in r.stderr, "an unknown codec: exit 2", r.stderr)
r = run(tap.prefill("--codec", "zstd", "-o", at("x.h5")), REQS)
ok(r.returncode == 2 and not os.path.exists(at("x.h5")), "a dump has a codec of its own: exit 2", r.stderr)

tap.done()
