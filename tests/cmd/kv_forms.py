"""Called by 46-convert.t."""
import base64
import json
import os
import re
import subprocess
import sys
import tempfile
import time

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

# --- dumps in other blocks
def kv(*args):
    return run(tap.trace("kv", *args))


def numbers(path, run_id):
    with h5py.File(path) as h:
        g = h["runs"][run_id]
        return [g[f"layers/{l:03}/{x}"][:] for l in range(len(g["layers"])) for x in "kv"], bytes(g.attrs["descriptor"]), g["block_hashes"].shape


def chunks(recs, run_id):
    """K and V of each layer as numpy sees them in the records, by the definition of pd-wire(5)."""
    offer = next(x for x in recs if x["pd"] == "offer" and x["run"] == run_id)
    y, n = offer["layout"], offer["n_tokens"]
    blocks, out = -(-n // y["block_size"]), {}
    for c in recs:
        if c["pd"] != "chunk" or c["run"] != run_id:
            continue
        a = np.frombuffer(base64.b64decode(c["data"]["$b64"]), np.uint16)
        if y["order"] == "HND":
            a = a.reshape(2, c["blocks"], y["kv_heads"], y["block_size"], y["head_dim"]).transpose(0, 1, 3, 2, 4)
        else:
            a = a.reshape(2, c["blocks"], y["block_size"], y["kv_heads"], y["head_dim"])
        for v in range(2):
            whole = out.setdefault((c["layer0"], v), np.zeros((blocks * y["block_size"], y["kv_heads"], y["head_dim"]), np.uint16))
            t = c["block0"] * y["block_size"]
            whole[t:t + c["blocks"] * y["block_size"]] = a[v].reshape(-1, y["kv_heads"], y["head_dim"])
    return {k: x[:n] for k, x in out.items()}, all(not x[n:].any() for x in out.values())


LIKE_DUMP = lambda a, b: len(a[0]) == len(b[0]) and all(np.array_equal(x.view(np.uint16), y.view(np.uint16)) for x, y in zip(a[0], b[0]))
base = at("base.h5")
prefill("-o", base)
runs = [x["run"] for x in tap.records(kv("ls", "--format", "json", base).stdout)]
want = answers(run(tap.decode("--format", "json", "-i", base)))
records_of = lambda path: tap.records(run(tap.trace("cat", path)).stdout)
first = {r: chunks(records_of(base), r)[0] for r in runs}
for size, order in ((1, None), (7, "hnd"), (16, "nhd"), (32, None), (32, "nhd"), (64, "NHD"), (300, "hnd")):
    name = at(f"{size}{order}.h5")
    r = kv("convert", base, "-o", name, "--block-size", str(size), *(["--order", order] if order else []))
    good = r.returncode == 0 and kv("verify", "-q", name).returncode == 0
    ok(good, f"into blocks of {size}, {order or 'as it was'}: made, and verifies", (r.stderr, kv("verify", name)))
    if not good:
        continue
    ls = tap.records(kv("ls", "--format", "json", name).stdout)
    ok([(x["run"], x["block_size"], x["order"]) for x in ls] == [(r, size, (order or "hnd").upper()) for r in runs], "ls tells the new layout", ls)
    recs = records_of(name)
    same = True
    for r in runs:
        got, tail = chunks(recs, r)
        same &= tail and got.keys() == first[r].keys() and all(np.array_equal(got[k], first[r][k]) for k in got) and LIKE_DUMP(numbers(base, r), numbers(name, r))
    ok(same, "h5py and the records give the numbers that were there, and zero tails")
    ok(kv("diff", base, name).returncode == 0, "diff finds nothing", kv("diff", base, name).stdout)
    what = ",".join([*(["block_size"] if size != 16 else []), *(["order"] if order and order.lower() == "nhd" else [])])
    desc = json.loads(numbers(name, runs[0])[1])
    ok(desc.get("converted", "") == what and desc["fingerprint"]["fields"]["block_size"] == size and desc["gen"] != json.loads(numbers(base, runs[0])[1])["gen"],
       f"its descriptor says converted '{what}'", desc.get("converted"))
    # decode: refused without leave, by name; with it the same answers
    r = run(tap.decode("--format", "json", "-i", name))
    named = "block_size differs (prefill %d, decode 16)" % size if size != 16 else "order differs (prefill NHD, decode HND)"
    if what:
        ok(all(named in (x[4] or "") for x in answers(r)) and [x[1] for x in answers(r)] == [x[1] for x in want], f"decode computes it again: {named}", answers(r))
        for part in what.split(",") if "," in what else []:
            r = run(tap.decode("--format", "json", "-i", name, "--allow-convert", part))
            ok(all(x[3] == "local" for x in answers(r)), f"{part} alone is not enough", answers(r))
    r = run(tap.decode("--format", "json", "-i", name, "--strict", *(["--allow-convert", what] if what else [])))
    ok(r.returncode == 0 and answers(r) == want and all(x.get("converted", "") == what for x in tap.results(r.stdout)), f"with --allow-convert {what}: the same answers, and it says so",
       (r.stderr, r.stdout[-500:]))
    if what == "block_size,order":      # by a sender, to decode over TCP
        with open(at("err"), "wb") as err:
            d = subprocess.Popen(tap.decode("--format", "json", "-i", "tcp-listen:127.0.0.1:0", "--strict", "--allow-convert", what), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err)
        while not (m := re.search(r"listening on (tcp:\S+)", open(at("err")).read())) and d.poll() is None:
            time.sleep(0.02)
        r = run([f"{B}/bin/pd-kvsend", "-i", name, "-o", m.group(1)])
        got = d.communicate(timeout=60)[0]
        x = subprocess.CompletedProcess([], d.returncode, got, b"")
        ok(r.returncode == 0 and d.returncode == 0 and answers(x) == want and all(y["converted"] == what for y in tap.results(got)), "and over TCP, by pd-kvsend", (r.stderr, open(at("err")).read()))
    if what == "block_size" and size <= 256:
        r = run(tap.decode("--format", "json", "-i", name, "--strict", "--block-size", str(size)))
        ok(r.returncode == 0 and answers(r) == want and not any("converted" in x for x in tap.results(r.stdout)), f"decode of blocks of {size} goes on from it as it is", r.stderr)
    # and back
    back = at("back.h5")
    r = kv("convert", name, "-o", back, "--block-size", "16", "--order", "hnd")
    again = {r: chunks(records_of(back), r)[0] for r in runs}
    ok(r.returncode == 0 and all(np.array_equal(again[r][k], first[r][k]) for r in runs for k in first[r]) and
       json.loads(numbers(back, runs[0])[1])["fingerprint"] == json.loads(numbers(base, runs[0])[1])["fingerprint"], "and back: the numbers and the fingerprint that it had", r.stderr)

for args, text in ((["--block-size", "0"], b"into what?"), (["--block-size", "-3"], b"out of range"), (["--order", "dnh"], b"'dnh' is unknown"), (["--block-size", "70000"], b"out of range")):
    r = kv("convert", base, "-o", at("no.h5"), *args)
    ok(r.returncode == 2 and text in r.stderr and not os.path.exists(at("no.h5")), f"{' '.join(args)}: exit 2", r.stderr)
wide = at("wide.h5")
prefill("--kv-dtype", "f32", "-o", wide)
r = kv("convert", wide, "-o", at("no.h5"), "--block-size", "65536")
ok(r.returncode == 4 and b"does not fit" in r.stderr and not os.path.exists(at("no.h5")), "a block larger than a record: refused", (r.returncode, r.stderr))
r = kv("convert", base, "-o", at("huge.h5"), "--block-size", "65536", "--order", "nhd")
ok(r.returncode == 0 and kv("verify", "-q", at("huge.h5")).returncode == 0 and kv("diff", base, at("huge.h5")).returncode == 0, "one that just fits is made", r.stderr)
r = kv("convert", base, "--block-size", "32")
ok(r.returncode == 2, "without -o: exit 2", r.stderr)
r = kv("convert", base, "-o", at("one.h5"), "--block-size", "32", "--run", runs[1])
ok(r.returncode == 0 and [x["run"] for x in tap.records(kv("ls", "--format", "json", at("one.h5")).stdout)] == [runs[1]], "--run: that one alone", r.stderr)
r = run(tap.decode("--allow-convert", "block_size,tp"))
ok(r.returncode == 2 and b"'tp' cannot be converted: no worker of this build is split by heads" in r.stderr, "--allow-convert tp: exit 2, and why", r.stderr)
r = run(tap.decode("--allow-convert", "kv_dtype"))
ok(r.returncode == 2 and b"'kv_dtype' cannot be converted" in r.stderr, "what changes values is never converted: exit 2", r.stderr)

# --- heads split among ranks and merged again, in either order and any block size: what numpy makes of the dump
for parts, size, order in ((2, 16, "hnd"), (2, 16, "nhd"), (2, 5, "nhd"), (1, 64, "hnd"), (2, 64, "nhd")):
    out = at("heads.bin")
    r = run([f"{B}/tools/kv_heads", base, runs[2], str(parts), str(size), order, out])
    got = np.fromfile(out, np.uint16) if r.returncode == 0 else np.zeros(0, np.uint16)
    layers, n = numbers(base, runs[2])[0], len(numbers(base, runs[2])[0][0])
    blocks, want_bytes = -(-n // size), []
    for rank in range(parts):
        for a in layers:
            heads = a.shape[1] // parts
            w = np.zeros((blocks * size, heads, a.shape[2]), np.uint16)
            w[:n] = a.view(np.uint16)[:, rank * heads:(rank + 1) * heads]
            w = w.reshape(blocks, size, heads, a.shape[2])
            want_bytes.append((w.transpose(0, 2, 1, 3) if order == "hnd" else w).ravel())
    ok(r.returncode == 0 and np.array_equal(got, np.concatenate(want_bytes)), f"split into {parts} of {order} in blocks of {size}, and merged: in every bit", r.stderr)

# --- in the stream: prefill in blocks of another size, decode converts on the way, also what is coded
for size in (1, 5, 32, 128):
    for extra in ([], ["--codec", "zstd"]):
        data = prefill("--block-size", str(size), *extra)
        r = decode(data, "--allow-convert", "block_size", "--strict")
        ok(r.returncode == 0 and answers(r) == want and {x["converted"] for x in tap.results(r.stdout)} == {"block_size"}, f"blocks of {size} {' '.join(extra)}into 16: the same answers", r.stderr)
    r = decode(data)
    ok(all(x[3] == "local" and f"block_size differs (prefill {size}, decode 16)" in x[4] for x in answers(r)), "without leave: computed again, and why", answers(r))
r = decode(prefill("--block-size", "32"), "--allow-convert", "block_size", "--on-mismatch", "fail")
ok(r.returncode == 0 and answers(r) == want, "converted is no mismatch", r.stderr)

tap.done()
