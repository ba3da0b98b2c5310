"""Called by 40-kv.t."""
import json
import os
import random
import re
import shutil
import struct
import sys
import tempfile
import zlib

import h5py
import numpy as np

import tap
from tap import B, ok, run

tmp = tempfile.mkdtemp()


def kv(*args):
    return run([f"{B}/bin/pd-trace", "kv", *args])


def at(name):
    return os.path.join(tmp, name)


def prefill(name, prompts, model="llama-f16", *args):
    reqs = tap.lines({"id": i, "prompt": p, "max_tokens": 4, "temperature": 0} for i, p in enumerate(prompts))
    r = run(tap.prefill("-o", at(name), *args, m=f"testdata/tiny/{model}.gguf"), reqs)
    if r.returncode:
        print(f"Bail out! pd-prefill: {r.stderr.decode()}")
        sys.exit(1)
    return at(name)


def lines(r):
    return tap.records(r.stdout)


TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom."

# The same numbers in every program, for each type that KV has.
for dtype, bits in (("f16", 16), ("bf16", 16), ("f32", 32)):
    f = prefill(f"{dtype}.h5", [TEXT], "llama-f16", "--kv-dtype", dtype)
    ls = lines(kv("ls", "--format", "json", f))[0]
    st = lines(kv("stat", "--format", "json", f))
    good = len(st) == ls["layers"] * 2 * ls["kv_heads"] and ls["dtype"] == dtype
    with h5py.File(f) as h:
        g = h["runs"][ls["run"]]
        tokens = g["tokens"][:]
        shapes = {g[f"layers/{l:03}/{x}"].shape for l in range(ls["layers"]) for x in "kv"}
        for s in st:
            d = g[f"layers/{s['layer']:03}/{s['kv']}"][:].astype(np.float64)[:, s["head"], :]
            rms = float(np.sqrt((d * d).mean()))
            good &= np.float32(d.min()) == np.float32(s["min"]) and np.float32(d.max()) == np.float32(s["max"]) and d.size == s["n"] and s["nan"] == s["inf"] == 0
            good &= abs(d.mean() - s["mean"]) <= 1e-12 and abs(rms - s["rms"]) <= 1e-12 and rms > 0
        desc = json.loads(bytes(g.attrs["descriptor"]))
        meta = (g.attrs["n_tokens"], desc["n_tokens"], len(tokens), desc["run"], desc["payload"]["scheme"])
    ok(good and shapes == {(ls["tokens"], ls["kv_heads"], ls["head_dim"])}, f"{dtype}: h5py reads the numbers that stat tells", st[:2])
    ok(meta == (ls["tokens"],) * 3 + (ls["run"], "h5") and desc["first"], f"{dtype}: attributes and descriptor agree", meta)
    head = run(["h5dump", "-H", f]).stdout.decode()
    ok("H5T_IEEE_F32LE" in head if bits == 32 else f"{bits}-bit little-endian floating-point" in head, f"{dtype}: h5dump names the type", head[-800:])
    n = f"/runs/{ls['run']}/layers/001/k" if ls["layers"] > 1 else f"/runs/{ls['run']}/layers/000/k"
    out = run(["h5dump", "-y", "-w", "0", "-m", "%.9g", "-d", n, f])
    body = out.stdout.decode().split("DATA {")[1].split("}")[0]
    shown = np.array([float(x) for x in re.findall(r"[-+0-9.e]+", body)], dtype=np.float64)
    with h5py.File(f) as h:
        real = h[n][:].astype(np.float64).ravel()
    ok(out.returncode == 0 and shown.shape == real.shape and (shown.astype(np.float32) == real.astype(np.float32)).all(), f"{dtype}: h5dump shows the same numbers",
       (shown[:4], real[:4], out.stderr))
a = at("f16.h5")

# Verbs on what is whole
run_id = lines(kv("ls", "--format", "json", a))[0]["run"]
r = kv("ls", a)
ok(r.returncode == 0 and re.match(rb"[0-9A-HJKMNP-TV-Z]{26}  \d+ tokens  \d+ layers", r.stdout), "ls prints the run id first", r)
r = kv("quickcheck", a, at("bf16.h5"))
ok(r.returncode == 0 and r.stdout.count(b": ok,") == 2, "quickcheck takes several files", r)
ok(kv("quickcheck", "-q", a).stdout == b"", "quickcheck -q says nothing of what is well")
r = kv("verify", a)
ok(r.returncode == 0 and b"verified" in r.stdout, "verify", r)
r = kv("diff", a, a)
ok(r.returncode == 0 and b"the same" in r.stdout, "a file does not differ from itself", r)
b = prefill("b.h5", [TEXT])
ok(kv("diff", a, b).returncode == 0, "nor do two runs of one prompt", kv("diff", a, b).stdout)
c = prefill("c.h5", [TEXT.replace("worst", "wurst")])
r = kv("diff", a, c)
j = lines(kv("diff", "--format", "json", a, c))
first = next((x for x in j if "token" in x["what"] and "first" in x["what"]), None)
same = int(first["what"].split()[1].rstrip(",")) if first else -1
ok(r.returncode == 1 and first, "another prompt differs, and from which token on is told", r.stdout)
ok(all(x["first_token"] >= same and x["max_abs"] > 0 and 0 < x["max_rel"] for x in j if x["what"] == "kv") and any(x["what"] == "kv" for x in j),
   "no KV before that token differs", j[:3])
r = kv("diff", a, at("f32.h5"))
ok(r.returncode == 1 and b"dtype differs: f16, f32" in r.stdout, "types that differ are named", r.stdout[:300])
with h5py.File(a) as x, h5py.File(c) as y:
    kx, ky = (h["runs"][list(h["runs"])[0]]["layers/000/k"][:].astype(np.float64) for h in (x, y))
    n = min(len(kx), len(ky))
    want = np.abs(kx[:n, 0] - ky[:n, 0]).max()
got = [z["max_abs"] for z in j if z["what"] == "kv" and z["layer"] == 0 and z["kv"] == "k" and z["head"] == 0]
ok(len(got) == 1 and abs(got[0] - want) < 1e-7, "diff's largest difference is numpy's", (got, want))

# Several runs in one file
m = prefill("many.h5", [TEXT, "Call me Ishmael.", "x"])
ids = [z["run"] for z in lines(kv("ls", "--format", "json", m))]
ok(len(ids) == 3, "ls lists each run")
ok([z["run"] for z in lines(kv("ls", "--format", "json", "--run", ids[1], m))] == [ids[1]], "--run chooses one")
r = kv("diff", a, m)
ok(r.returncode == 1 and b"presence of a run differs" in r.stdout, "runs without a partner differ", r.stdout)
r = kv("png", "-o", at("x.png"), m)
ok(r.returncode == 2 and b"--run" in r.stderr and not os.path.exists(at("x.png")), "png of several runs asks which", r.stderr)
r = kv("stat", "--run", "01ARZ3NDEKTSV4RRFFQ69G5FAV", m)
ok(r.returncode == 1 and b"has no run" in r.stderr, "a run that is not there is told", r)

# Slices
r = kv("slice", "--tokens", ":9", "-o", at("s.h5"), a)
with h5py.File(a) as x, h5py.File(at("s.h5")) as y:
    gx, gy = x["runs"][run_id], y["runs"][run_id]
    equal = (gx["tokens"][:9] == gy["tokens"][:]).all() and all((gx["layers"][l][z][:9] == gy["layers"][l][z][:]).all() for l in gx["layers"] for z in "kv")
    fps = (gx.attrs["fingerprint"], gy.attrs["fingerprint"])
ok(r.returncode == 0 and equal, "the first nine tokens as a file of their own", r.stderr)
ok(fps[0] == fps[1], "a beginning in all layers keeps the fingerprint")
ok(kv("verify", at("s.h5")).returncode == 0, "and it verifies", kv("verify", at("s.h5")))
nl = lines(kv("ls", "--format", "json", a))[0]["layers"]
r = kv("slice", "--tokens", "5:12", "--layers", f"{nl - 1}:{nl}", "-o", at("t.h5"), a)
with h5py.File(a) as x, h5py.File(at("t.h5")) as y:
    gx, gy = x["runs"][run_id], y["runs"][run_id]
    equal = list(gy["layers"]) == ["000"] and (gx["layers"][f"{nl - 1:03}"]["v"][5:12] == gy["layers/000/v"][:]).all()
    fp = json.loads(bytes(gy.attrs["fingerprint"]))
ok(r.returncode == 0 and equal and "slice" in fp and kv("verify", at("t.h5")).returncode == 0, "a part from the middle is marked in its fingerprint", r.stderr)
r = run([f"{B}/bin/pd-decode", "-m", "testdata/tiny/llama-f16.gguf", "-i", at("t.h5"), "--format", "json", "--on-mismatch", "fail"])
ok(r.returncode in (3, 4) and not any(json.loads(x).get("tokens") for x in r.stdout.decode().splitlines()), "and decode gives no token from it", (r.returncode, r.stderr, r.stdout))
for args, text in ((["--tokens", "9:9"], b"is no part"), (["--tokens", "0:99999"], b"is no part"), (["--layers", "0:99"], b"is no part"), (["--tokens", "x:2"], b"--tokens"),
                   (["--tokens", "7"], b"no range")):
    r = kv("slice", *args, "-o", at("no.h5"), a)
    ok(r.returncode == 2 and text in r.stderr and not os.path.exists(at("no.h5")), f"slice {' '.join(args)}: usage, and no file", r.stderr)

# png: a real picture of the right size
r = kv("png", "-o", at("p.png"), a)
p = open(at("p.png"), "rb").read()
w, h = struct.unpack(">II", p[16:24])
idat, pos = b"", 8
while pos < len(p):
    size, kind = struct.unpack(">I4s", p[pos:pos + 8])
    ok_crc = zlib.crc32(p[pos + 4:pos + 8 + size]) == struct.unpack(">I", p[pos + 8 + size:pos + 12 + size])[0]
    if kind == b"IDAT":
        idat += p[pos + 8:pos + 8 + size]
    pos += 12 + size
raw = zlib.decompress(idat)
ntok = lines(kv("ls", "--format", "json", a))[0]["tokens"]
ok(r.returncode == 0 and p[:8] == b"\x89PNG\r\n\x1a\n" and ok_crc and w % ntok == 0 and (h - 4) % (2 * nl) == 0 and len(raw) == h * (3 * w + 1) and len(set(raw)) > 20,
   "png writes a picture: a column a token, a row a layer", (w, h, ntok, nl, len(raw), r.stderr))

# Usage
for args in ([], ["nonsense", a], ["ls"], ["diff", a], ["slice", a], ["png", "-o", at("q.png")], ["ls", "--run", "x", a]):
    r = kv(*args)
    ok(r.returncode == 2 and r.stderr.count(b"\n") == 1, f"kv {' '.join(args[:2])}: one line, status 2", r)
r = kv("verify", at("absent.h5"), a)
ok(r.returncode == 1 and b"absent.h5" in r.stderr and b"verified" in r.stdout, "an absent file does not hide the next", r)
r = kv("verify", "README.md" if os.path.exists("README.md") else "Makefile")
ok(r.returncode == 4 and b"not an HDF5 file" in r.stderr, "what is no dump is said to be none", r)

# Damage. Every status is 0 or 4, there is one line on what is wrong, nothing is left behind.
whole = open(a, "rb").read()
big = prefill("big.h5", [TEXT * 5])
data = open(big, "rb").read()
ntok = lines(kv("ls", "--format", "json", big))[0]["tokens"]
refused = saved = 0
last, bad = 0, []
for i in range(1, 51):
    # ten cuts in the metadata at the head of the file, forty in the chunks behind
    open(at("cut.h5"), "wb").write(data[:(1 << 20) * i // 11 if i <= 10 else (1 << 20) + (len(data) - (1 << 20)) * (i - 10) // 41])
    r = kv(["quickcheck", "verify", "stat", "ls"][i % 4], at("cut.h5"))
    if r.returncode != 4 or r.stderr.count(b"\n") != 1 or b"cut" not in r.stderr:
        bad.append((i, r))
    r = kv("salvage", "-o", at("saved.h5"), at("cut.h5"))
    if r.returncode == 4 and not os.path.exists(at("saved.h5")):
        refused += 1
    elif r.returncode == 0 and kv("verify", at("saved.h5")).returncode == 0 and b"lost: tokens" in r.stderr:
        got = lines(kv("ls", "--format", "json", at("saved.h5")))[0]["tokens"]
        with h5py.File(big) as x, h5py.File(at("saved.h5")) as y:
            gx, gy = (z["runs"][list(z["runs"])[0]] for z in (x, y))
            if got < last or not all((gx["layers"][l][z][:got] == gy["layers"][l][z][:]).all() for l in gx["layers"] for z in "kv"):
                bad.append((i, got))
        saved, last = saved + 1, got
        os.remove(at("saved.h5"))
    else:
        bad.append((i, r))
ok(not bad and refused + saved == 50, f"cut at 50 places: refused clearly, {saved} times salvaged (the last with {last} of {ntok} tokens)", bad[:2])

rnd = random.Random(7)
bad = []
for i in range(40):
    d = bytearray(whole)
    place = rnd.randrange(1 << 20, len(d))
    d[place] ^= 1 << rnd.randrange(8)
    open(at("flip.h5"), "wb").write(d)
    r = kv("verify", at("flip.h5"))
    if r.returncode != 4 or not re.search(rb"layer \d+ block \d+ [KV]: ", r.stdout):
        bad.append((place, r))
ok(not bad, "verify finds a flipped bit in any chunk, and names layer and block", bad[:2])
open(at("flip.h5"), "wb").write(d)
r = run([f"{B}/bin/pd-decode", "-m", "testdata/tiny/llama-f16.gguf", "-i", at("flip.h5"), "--format", "json", "--on-mismatch", "fail"])
ok(r.returncode == 4 and not any(json.loads(x).get("tokens") for x in r.stdout.decode().splitlines() if x), "decode --on-mismatch fail gives no token from it: exit 4", (r.returncode, r.stderr, r.stdout))
r = run([f"{B}/bin/pd-decode", "-m", "testdata/tiny/llama-f16.gguf", "-i", at("flip.h5"), "--format", "json"])
rs = [x for x in map(json.loads, r.stdout.decode().splitlines()) if x["pd"] == "result"]
ok(r.returncode == 0 and rs and all((x["mode"], (x["fallback"] or "")[:9]) in (("remote", ""), ("local", "integrity")) and x["tokens"] for x in rs)
   and sum(x["mode"] == "local" for x in rs) == 1, "decode recomputes the damaged run, and serves the others", (r.returncode, r.stderr, r.stdout))

used = len(whole[:1 << 20].rstrip(b"\0"))
bad = []
for i in range(60):
    d = bytearray(whole)
    for _ in range(rnd.randrange(1, 4)):
        d[rnd.randrange(used)] = rnd.randrange(256)
    open(at("mut.h5"), "wb").write(d)
    verb = rnd.choice(["ls", "quickcheck", "verify", "stat"])
    r = kv(verb, at("mut.h5"))
    if r.returncode not in (0, 4) or (r.returncode == 4 and not r.stderr):
        bad.append((i, verb, r))
ok(not bad, "60 mutations of the file's structure: status 0 or 4, never a crash", bad[:2])
ok(not [x for x in os.listdir(tmp) if ".tmp." in x], "nothing half-written is left", os.listdir(tmp))

# A dump is a stream to cat, and what cat writes decodes to the same tokens.
r = run([f"{B}/bin/pd-trace", "cat", "--format", "msgpack", a])
dec = [f"{B}/bin/pd-decode", "-m", "testdata/tiny/llama-f16.gguf", "--format", "json"]
x, y = run(dec, r.stdout), run([*dec, "-i", a])
toks = [json.loads(z.stdout)["tokens"] for z in (x, y) if z.returncode == 0]
ok(len(toks) == 2 and toks[0] == toks[1] and len(toks[0]) > 0, "cat of a dump decodes as the dump does", (x, y))

shutil.rmtree(tmp)
tap.done()
