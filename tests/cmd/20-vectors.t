#!/bin/sh
# The golden vectors against an independent msgpack: Python's reads what our encoders wrote, and writes the same bytes from our JSON.
# tests/unit/test_vectors.c holds the same files against our own encoders and decoders.
PY=${PD_PY:-${PD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pd}/venv/bin/python3}
exec "$PY" - <<'EOF'
import base64, glob, json, os, struct, sys
import msgpack

def from_json(v):
    """The rule of pd-wire(5): {"$b64": ...} is bytes; a map whose only key has more dollars loses one."""
    if isinstance(v, list):
        return [from_json(x) for x in v]
    if not isinstance(v, dict):
        return v
    if len(v) == 1:
        key, = v
        if key == "$b64":
            return base64.b64decode(v[key], validate=True)
        if key.lstrip("$") == "b64" and key.startswith("$$"):
            return {key[1:]: from_json(v[key])}
    return {k: from_json(x) for k, x in v.items()}

names = sorted(f[:-len(".msgpack")] for f in glob.glob("testdata/vectors/*.msgpack"))
kinds, n, bad = set(), 0, 0
def check(ok, what):
    global n, bad
    n += 1
    bad += not ok
    print("ok" if ok else "not ok", n, "-", what)

def same_types(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_types(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_types, a, b))
    return struct.pack("d", a) == struct.pack("d", b) if isinstance(a, float) else a == b

print(f"1..{3 * len(names) + 3}")
for name in names:
    packed = open(name + ".msgpack", "rb").read()
    text = from_json(json.load(open(name + ".json")))
    read = msgpack.unpackb(packed, raw=False, strict_map_key=True)
    kinds.add(read.get("pd"))
    short = os.path.basename(name)
    check(same_types(read, text), f"{short}: Python's msgpack reads what the JSON says")
    check(msgpack.packb(text, use_bin_type=True) == packed, f"{short}: Python's msgpack writes the same bytes")
    check(list(read)[:2] == ["pd", "v"] and read["v"] == 1, f"{short}: pd and v come first")
check(kinds == {"request", "offer", "kv", "chunk", "token", "result", "error", "event",
                "hello", "accept", "done", "verified", "release", "status", "cancel", "slab", "worker", "kvevent", "carry", "route", "outcome"}, "every kind has a vector")
kv = msgpack.unpackb(open("testdata/vectors/kv.msgpack", "rb").read())
check(list(kv)[-1] == "sum" and struct.unpack("<%di" % kv["n_tokens"], kv["token_ids"])[5] == 338, "kv: sum is last, token_ids are little-endian int32")
load = lambda name: msgpack.unpackb(open(f"testdata/vectors/{name}.msgpack", "rb").read())
sent, resumed = load("request-routed")["route"], load("request-resumed")["route"]
check(list(sent) == ["op", "policy", "mode", "p", "d", "early", "fallback", "future"] and sent["fallback"] is None and sent["p"]["at"] == "unix:/run/pd/p0"
      and resumed["p"] is None and struct.unpack("<3i", resumed["resume"]) == (1, 450, 7483), "route: p and fallback are null where there is none, resume is little-endian int32")
sys.exit(bad > 0)
EOF
