#!/usr/bin/env python3
"""A hostile and clumsy user, and an unreliable world: requests at their extremes, descriptors that lie and are whole, streams out of order and torn, pools
that are too small, peers that stop, vanish or stall, closed descriptors, odd files. Never a crash, never a hang, never a wrong token. On tiny models."""
import base64
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time

import tap
from tap import B, handles_signals, ok, results, run

LONG = os.environ.get("LONG") == "1"
MODEL = "testdata/tiny/llama-q4_1.gguf"
SPM = "testdata/tiny/llama-spm.gguf"
RUN = "01M8PAW1CACQM7WS4V0NE4983X"
BLOCK = 16 * 2 * 2 * 2 * 16 * 2         # bytes of a KV block of MODEL: 16 tokens, 2 layers, K and V, 2 heads of 16, f16


def sh(script):
    return run(["bash", "-c", script], timeout=60)


def prefill(*args, m=MODEL):
    return [f"{B}/bin/pd-prefill", "-m", m, "-t", "1", *args]


def decode(*args, m=MODEL):
    return [f"{B}/bin/pd-decode", "-m", m, "-t", "1", *args]


def lines(recs):
    return "".join(json.dumps(r) + "\n" for r in recs).encode()


def records(stream):
    return [json.loads(x) for x in run([f"{B}/bin/pd-trace", "cat", "--format", "json"], stream).stdout.decode().split("\n") if x]


def packed(recs):
    return run([f"{B}/bin/pd-trace", "cat", "--format", "msgpack"], lines(recs)).stdout


def sealed(recs):
    return run([f"{B}/tools/seal"], packed(recs)).stdout


def key(out):
    return sorted((str(r.get("id")), r.get("choice", 0), tuple(r["tokens"]), r["text"], r["finish_reason"]) for r in results(out))


def sane(*xs):
    return all(0 <= x.returncode <= 9 and b"Sanitizer" not in x.stderr and b"runtime error" not in x.stderr for x in xs)


def brief(*xs):
    return [(x.returncode, x.stdout[-600:], x.stderr[-600:]) for x in xs]


GOOD = {"id": "good", "prompt": "Hi", "max_tokens": 2, "temperature": 0}
P = {"id": "x", "prompt": "Hello there", "max_tokens": 6}


def both(reqs):
    """Aggregated and apart."""
    data = reqs if isinstance(reqs, bytes) else lines(reqs)
    pre = run(prefill(), data)
    return run(decode("--format", "json"), data), pre, run(decode("--format", "json"), pre.stdout)


def served(x, mode=None):
    return [r for r in results(x.stdout) if r.get("id") == "good" and len(r.get("tokens", [])) == 2 and mode in (None, r["mode"])]


# --- requests ---------------------------------------------------------------------------------------------------------------------------------------

def extremes():
    every = list(range(1000))
    fields = [dict(temperature=1e-45), dict(temperature=1e-40, top_k=3), dict(temperature=1e-30, top_p=0.5), dict(temperature=100, top_p=1e-45), dict(top_p=1e-30), dict(min_p=1),
              dict(top_k=2147483647), dict(repetition_penalty=1000, logit_bias={"1": 1e4, "2": -1e4}), dict(repetition_penalty=0.001, temperature=0),
              dict(frequency_penalty=-2, presence_penalty=-2, max_tokens=60, ignore_eos=True), dict(logit_bias={str(i): -1e4 for i in range(1000)}), dict(top_logprobs=128, n=128, logprobs=True),
              dict(stop=["e"], max_tokens=40, ignore_eos=True, n=8), dict(stop=["ab", "abc", "b", "a", "&&", "&&&"], max_tokens=40, ignore_eos=True, n=8), dict(stop=[]), dict(seed=2**63 - 1),
              dict(stop="&", n=3, max_tokens=20), dict(id="x" * 100000), dict(id=2**63 - 1), dict(id=-2**63), dict(id="\0"), dict(id=""), dict(id=None),
              dict(route={"mode": "local"}, deadline_ms=600000, timeouts_ms={"queue": 1}, slo={"ttft_ms": 1})]
    x = both([dict(P, id=i) | f for i, f in enumerate(fields)])
    ok(sane(*x) and not any(y.returncode for y in x) and key(x[0].stdout) == key(x[2].stdout) and len(results(x[0].stdout)) >= len(fields), "every field at its extremes: served, the same apart", brief(*x))
    refused = [dict(min_tokens=7, ignore_eos=True), dict(stop=[""]), dict(seed=2**63), dict(logit_bias={"1": -1e30}), dict(id=1.5), dict(id=[1]), dict(id={"a": 1}), dict(id=True)]
    for f in refused:
        x = both([dict(P, **f), GOOD])
        ok(sane(*x) and [y.returncode for y in x] == [1, 1, 1] and served(x[0]) and served(x[2], "remote") and len(results(x[2].stdout)) == 2, f"{f}: refused alone, and decode tells too", brief(*x))
    for f in (dict(temperature=0), dict(), dict(top_k=5), dict(top_p=0.5, n=3)):        # every token of the vocabulary banned
        x = both([dict(P, stop_token_ids=every, min_tokens=6, **f), GOOD])
        ok(sane(*x) and x[0].returncode == x[1].returncode == x[2].returncode == 1 and b"no token is left" in x[1].stderr and len(x[0].stderr.splitlines()) == 1 and served(x[0]) and served(x[2])
           and len(results(x[0].stdout)) == len(results(x[2].stdout)) == 1 + f.get("n", 1), f"all tokens banned {f}: an error by name, a result a choice", brief(*x))
    seeded = [(r["tokens"], r["text"]) for r in results(run(decode("--format", "json"), lines([dict(P, seed=2**63 - 1)])).stdout)]
    x = run(decode("--format", "json", "--seed", str(2**63 - 1)), lines([P]))
    ok(x.returncode == 0 and [(r["tokens"], r["text"]) for r in results(x.stdout)] == seeded, "--seed takes what a request's seed takes", brief(x))
    for v in (2**63, -1, "x", "", "1e3"):
        x = run(decode("--text", "--seed", str(v)), lines([P]))
        ok(x.returncode == 2 and len(x.stderr.splitlines()) == 1 and b"--seed" in x.stderr, f"--seed {v}: exit 2", brief(x))
    raw = {"NaN": b"\xcb\x7f\xf8\0\0\0\0\0\0", "an extension": b"\xc7\x03\x04abc", "past 2^63": b"\xcf" + b"\xff" * 8, "broken text": b"\xa1\xff"}
    tail = packed([GOOD])
    for name, value in raw.items():
        x = both(b"\x82\xa2id" + value + b"\xa6prompt\xa1x" + tail)
        ok(sane(*x) and x[0].returncode == x[1].returncode == 1 and served(x[0]) and served(x[2]), f"an id that is {name}: refused alone", brief(*x))
        x = both(b"\x82\xa2pd\xa7weather\xa1t" + value + tail)
        ok(sane(*x) and x[0].returncode == 1 and served(x[0]) and served(x[2]) and b"weather" not in x[0].stdout, f"an unknown record with a value that is {name}: JSON cannot have it, the rest goes on", brief(*x))
        y = run(decode("--text"), b"\x82\xa2pd\xa7weather\xa1t" + value + tail)
        ok(y.returncode == 0 and y.stdout, "and --text never minds", brief(y))
    nest = lambda n: [nest(n - 1)] if n else 1
    for name, req in (("a field", dict(P, field=nest(15))), ("route", dict(P, route={"a": nest(14)})), ("a message", {"id": "x", "messages": [{"role": "user", "content": "hi", "y": nest(13)}], "max_tokens": 2})):
        x = both([req, GOOD])
        ok(sane(*x) and x[0].returncode == 0 and x[1].returncode == 1 and b"descriptor" in x[1].stderr and served(x[2], "remote"), f"{name} too deep for a descriptor: fails alone, before anything of it is sent", brief(*x))
    x = run(prefill(), lines([dict(P, field="y" * (16 * 2**20 - 800)), GOOD]))
    y = run(decode("--format", "json"), x.stdout)
    ok(sane(x, y) and x.returncode == 1 and b"--max-record" in x.stderr and served(y, "remote"), "a request that leaves a descriptor no room: fails alone", brief(x, y))
    x = run(decode("--format", "json"), b'{"prompt":"' + b"a" * (40 << 20) + b'"}\n' + lines([GOOD]))
    ok(sane(x) and x.returncode == 1 and served(x), "a line of 40 MB: refused alone", brief(x))
    x = both([{"id": i, "token_ids": [i], "echo": True, "max_tokens": 2, "temperature": 0} for i in range(320)] + [GOOD])
    ok(sane(*x) and not any(y.returncode for y in x) and len(results(x[0].stdout)) == 321 and key(x[0].stdout) == key(x[2].stdout), "echo of tokens that are no whole characters", brief(*x))


def order_of_text():
    reqs = [{"id": 0, "prompt": "aaa", "max_tokens": 30, "ignore_eos": True, "temperature": 0}, {"id": 1, "prompt": "bbb", "max_tokens": 1, "temperature": 0},
            {"id": 2, "prompt": "c " * 60, "max_tokens": 9, "temperature": 0}, {"id": 3, "token_ids": [7], "max_tokens": 1, "temperature": 0}, {"id": 4, "token_ids": [9], "max_tokens": 5, "temperature": 0}]
    x = run(decode("--text"), lines(reqs))
    for args in ([], ["--chunk", "16"], ["--kv-mem", str(9 * BLOCK), "--max-seqs", "1"]):
        y = run(decode("--text"), run(prefill(*args), lines(reqs)).stdout)
        ok(x.returncode == y.returncode == 0 and x.stdout == y.stdout, f"texts come in order of input, those of runs that end at prefill too {args}", (x, y))


def boundaries():
    """Prompts and pools at the edges of blocks."""
    for bs in (1, 3, 16, 1024):
        for n in (15, 16, 17, 32, 33):
            reqs = [{"id": f"{n}.{k}", "token_ids": [(i * 7 + k) % 300 + 3 for i in range(n)], "max_tokens": 6, "seed": k, "ignore_eos": True} for k in range(3)]
            ref, need, bad = key(run(decode("--format", "json"), lines(reqs)).stdout), (n + 5 + bs - 1) // bs, []     # the last token needs no KV
            for have in {need, need - 1, (n + bs) // bs, (n + bs - 1) // bs} - {0}:
                args = ["--block-size", str(bs), "--kv-mem", str(have * bs * BLOCK // 16)]
                agg, pre = run(decode("--format", "json", *args), lines(reqs)), run(prefill(*args), lines(reqs))
                apart = run(decode("--format", "json", *args), pre.stdout)
                for x in (agg, apart):
                    rs = [k for k in key(x.stdout) if k[4] != "error"]
                    if not sane(x, pre) or len(results(x.stdout)) != 3 or any(k not in ref for k in rs) or (have >= need) != (x.returncode == 0):
                        bad.append((have, need, brief(x, pre)))
            ok(not bad, f"blocks of {bs}, prompts of {n}: pools just enough serve, others say so", bad)
    ctx = [{"id": n, "token_ids": [5] * n, "max_tokens": 9, "ignore_eos": True, "temperature": 0} for n in (253, 254, 255, 256, 257)]
    x = both(ctx)
    got = {r["id"]: len(r["tokens"]) for r in results(x[0].stdout)}
    ok(sane(*x) and key(x[0].stdout) == key(x[2].stdout) and got == {253: 3, 254: 2, 255: 1, 256: 0, 257: 0}, "prompts at the end of the context", (got, brief(*x)))


# --- streams ----------------------------------------------------------------------------------------------------------------------------------------

def interleaved(rng, runs):
    runs, out = [list(r) for r in runs], []
    while runs:
        r = rng.choice(runs)
        out.append(r.pop(0))
        if not r:
            runs.remove(r)
    return out


def pools():
    """Many runs at once through pools that hold a few: imports that wait for runs, runs that wait for imports."""
    rng = random.Random(5)
    reqs = [{"id": i, "token_ids": [(j * 3 + i) % 300 + 3 for j in range(rng.choice([5, 15, 16, 17, 40, 60]))], "max_tokens": rng.choice([1, 4, 12]), "seed": i, "n": rng.choice([1, 1, 1, 3]),
             "ignore_eos": True} for i in range(50)]
    ref = key(run(decode("--format", "json"), lines(reqs)).stdout)
    by = {}
    for r in records(run(prefill(), lines(reqs)).stdout):
        by.setdefault(r["run"], []).append(r)
    runs = list(by.values())
    bare = [[q] for q in reqs if q["id"] not in [r[-1]["request"]["id"] for r in runs[:25]]]
    orders = {"in order": sum(runs, []), "50 offers before any kv": [r[0] for r in runs] + sum((r[1:-1] for r in runs), []) + [r[-1] for r in runs], "shuffled together": interleaved(rng, runs),
              "shuffled with bare requests": interleaved(rng, runs[:25] + bare)}
    for name, recs in orders.items():
        data = packed(recs)
        for blocks, seqs in ((10, 1), (12, 4), (20, 64), (400, 4)):
            x = run(decode("--format", "json", "--kv-mem", str(blocks * BLOCK), "--max-seqs", str(seqs)), data)
            ok(x.returncode == 0 and key(x.stdout) == ref, f"50 runs {name}, {blocks} blocks, {seqs} at once", brief(x))
    big = [r for r in runs if len(r) > 2][:6]
    small = [dict(q, n=1, max_tokens=3) for q in reqs[:8]]
    for seqs in (1, 64):        # the imports stall, and hold the pool
        p = subprocess.Popen(decode("--format", "json", "--kv-mem", str(10 * BLOCK), "--max-seqs", str(seqs)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        p.stdin.write(packed([r[0] for r in big] + small))
        p.stdin.flush()
        os.set_blocking(p.stdout.fileno(), False)
        got, until = b"", time.time() + 30
        while time.time() < until and len(results(got[:got.rfind(b"\n") + 1])) < 8:
            time.sleep(0.1)
            got += p.stdout.read() or b""
        n = len(results(got))
        os.set_blocking(p.stdout.fileno(), True)
        rest, err = p.communicate(packed(sum((r[1:] for r in big), [])), timeout=60)
        ok(n == 8 and p.returncode == 0 and all(k in ref for k in key(rest)) and {str(r[-1]["request"]["id"]) for r in big} == {k[0] for k in key(rest)},
           f"imports that hold the pool and stall: bare requests go on, the imports end well afterwards ({seqs} at once)", (n, p.returncode, rest[-500:], err[-500:]))
    x = run(decode("--format", "json", "--kv-mem", str(12 * BLOCK), "--max-seqs", "4"), packed(small + [r[0] for r in big]))
    ok(x.returncode == 4 and sum(r["finish_reason"] != "error" for r in results(x.stdout)) == 8, "a stream that ends with offers open: who decodes goes on", brief(x))
    data = packed(sum(runs, []))
    x = run(decode("--format", "json"), data + data)
    ok(x.returncode == 4 and key(x.stdout) == ref, "a stream twice: each run once", brief(x))
    same = [json.loads(json.dumps(r)) for r in interleaved(rng, [r for r in runs if len(r) > 2][:4])]
    for r in same:
        r["run"] = RUN
    x = run(decode("--format", "json"), sealed(same))
    ok(x.returncode == 0 and len(results(x.stdout)) >= 4 and all(k in ref for k in key(x.stdout)) and {r["mode"] for r in results(x.stdout)} == {"remote"},
       "four runs of one id, interleaved: told apart by their generation", brief(x))
    one = [r for r in runs if len(r) > 2][0]
    told = packed(one[:-1] + [{"pd": "error", "v": 1, "run": one[0]["run"], "class": "exhausted", "code": 8, "message": "it failed there", "action": "abort"}])
    x = run(decode("--format", "json"), told + packed([GOOD]))
    ok(x.returncode == 8 and len(results(x.stdout)) == 1 and served(x), "an error from upstream ends its run on its way: no second answer", brief(x))


# --- descriptors that lie, and are whole --------------------------------------------------------------------------------------------------------------

REQ = {"id": "x", "token_ids": [(i * 7) % 300 + 3 for i in range(20)], "max_tokens": 6, "temperature": 0.9, "seed": 3}


def put(path, value):
    def edit(r):
        for k in path[:-1]:
            r = r[k]
        r[path[-1]] = value
    return edit


def liars():
    base = records(run(prefill(), lines([REQ])).stdout)
    good, want = run(prefill(), lines([GOOD])).stdout, results(run(decode("--format", "json"), lines([REQ])).stdout)[0]["tokens"]
    x = run(decode("--format", "json"), sealed(base))
    ok([r["mode"] for r in results(x.stdout)] == ["remote"] and sealed(base) == packed(base), "the seal leaves an honest stream as it is", brief(x))
    req, pay, first = base[-1]["request"], base[-1]["payload"], base[-1]["first"]
    ids = lambda v: {"$b64": base64.b64encode(b"".join(i.to_bytes(4, "little", signed=True) for i in v)).decode()}
    lies = []           # name, edit of offer and kv, may the tokens be others (since the request is another)
    for k in ("bytes", "chunk_bytes", "n_chunks", "chunk_blocks"):
        lies += [(f"payload.{k} = {v}", put(("payload", k), v), False) for v in (0, 1, 2**31, 2**32 - 1, 2**63 - 1, -1)]
    for k in ("block_size", "layers", "kv_heads", "head_dim"):
        lies += [(f"layout.{k} = {v}", put(("layout", k), v), False) for v in (0, 1, 65536, 2**31, 2**32 - 1, -1)]
    for v in ([], [2**31 - 1] * 20, [-1] * 20, [5] * 100000, [320] * 20):
        lies.append((f"{len(v)} tokens {v[:1]}", lambda r, v=v: r.update(token_ids=ids(v), n_tokens=len(v)), False))
    lies += [(f"n_tokens = {v}", put(("n_tokens",), v), False) for v in (0, 19, 21, 2**32 - 1, -1)]
    for name, v in (("two", first * 2), ("10000", first * 10000), ("outside", [{"token": 320, "logprob": 0.0}]), ("far outside", [{"token": 2**31 - 1, "logprob": 0.0}]),
                    ("negative", [{"token": -1, "logprob": 0.0}]), ("a list of nothing", []), ("null", None)):
        lies.append((f"first tokens: {name}", lambda r, v=v: r["pd"] == "kv" and r.update(first=v), False))
    for v in (dict(n=10000), dict(n=0), dict(n=3), dict(max_tokens=0), dict(max_tokens=-1), dict(temperature=-1.0), dict(repetition_penalty=0.0), dict(top_p=0.0), dict(adapter="x"), dict(seed=-5),
              dict(prompt="x", messages=[{"role": "user", "content": "x"}]), dict(id={"a": 1})):
        lies.append((f"a request with {v}", put(("request",), dict(req, **v)), False))
    lies += [("an empty request", put(("request",), {}), True), ("max_tokens 2^31-1", put(("request", "max_tokens"), 2**31 - 1), True)]
    for name, v in (("of another scheme", dict(pay, scheme="shm")), ("with a codec", dict(pay, codec="lz4")), ("without", None)):
        lies.append((f"payload {name}", put(("payload",), v), False))
    lies += [("a lease", put(("lease",), {"ttl_us": 1}), False), ("times that are absurd", put(("t",), {"total_us": 2**63 - 1}), False), ("a worker of 100 kB", put(("worker",), "w" * 100000), False)]
    for name, edit, other in lies:
        for only_kv in (False, True):
            recs = json.loads(json.dumps(base))
            for r in recs:
                if r["pd"] == "kv" or (r["pd"] == "offer" and not only_kv):
                    edit(r)
            data, bad = sealed(recs) + good, []
            for args in (["--format", "json"], ["--format", "json", "--on-mismatch", "fail"], ["--text"]):
                x = run(decode(*args), data)
                if not sane(x) or (args[0] == "--text" and not x.stdout):
                    bad.append((args, brief(x)))
                if args[0] == "--format":
                    mine = [r for r in results(x.stdout) if r.get("id") != "good"]
                    wrong = [r for r in mine if r["finish_reason"] != "error" and r["tokens"] != want and not other and r.get("choice", 0) == 0]
                    if not served(x, "remote") or not mine or wrong:
                        bad.append((args, wrong, brief(x)))
            ok(not bad, f"{name}{' in the kv alone' if only_kv else ''}", bad)
    at = [i for i, r in enumerate(base) if r["pd"] == "chunk"]
    for k, vs in (("index", (1, 2**32 - 1)), ("layer0", (1, 2**32 - 1)), ("layers", (0, 2, 2**32 - 1)), ("block0", (1, 2**32 - 1)), ("blocks", (0, 1, 2**32 - 1)), ("raw_len", (0, 2**63 - 1)),
                  ("data", ({"$b64": ""}, {"$b64": "AAAA" * 1000000}))):
        for v in vs:
            recs = json.loads(json.dumps(base))
            recs[at[0]][k] = v
            x = run(decode("--format", "json"), sealed(recs) + good)
            mine = [r for r in results(x.stdout) if r.get("id") == "x"]
            ok(sane(x) and served(x, "remote") and len(mine) == 1 and mine[0]["mode"] == "local" and mine[0]["tokens"] == want, f"a chunk of {k} {str(v)[:24]}: recomputed", brief(x))
    x = run(decode("--format", "json"), run(prefill(m=SPM), lines([P])).stdout)
    ok(x.returncode == 3 and results(x.stdout)[0]["finish_reason"] == "error" and b"tokenizer" in x.stderr, "KV of a model with another tokenizer: its ids are not run here", brief(x))
    x = run(decode("--format", "json"), run(prefill(m=SPM), lines([dict(P, max_tokens=1)])).stdout)
    ok(x.returncode == 3 and results(x.stdout)[0]["finish_reason"] == "error", "nor is its first token taken", brief(x))


# --- mutations ----------------------------------------------------------------------------------------------------------------------------------------

def mutate(rng, b, n=None):
    b = bytearray(b)
    for _ in range(n or rng.choice([1, 1, 1, 2, 4, 16])):
        p, k = rng.randrange(len(b)), rng.randrange(5)
        if k == 0:
            b[p] ^= 1 << rng.randrange(8)
        elif k == 1:
            b[p] = rng.randrange(256)
        elif k == 2 and len(b) > 200:
            del b[p:p + rng.choice([1, 2, 8, 100])]
        elif k == 3:
            b[p:p] = rng.randbytes(rng.choice([1, 4, 50]))
        else:
            q = rng.randrange(len(b))
            b[p:p] = b[q:q + rng.choice([1, 10, 200])]
    return bytes(b)


def mutations():
    seed = int(time.time()) if LONG else 1
    rng, n = random.Random(seed), 4000 if LONG else 300
    reqs = [{"id": "a", "token_ids": [(i * 7) % 300 + 3 for i in range(20)], "max_tokens": 5, "temperature": 0.9, "seed": 3}, {"id": "b", "prompt": "Hello", "max_tokens": 1, "logprobs": True, "top_logprobs": 2},
            {"id": "c", "prompt": "Colour", "max_tokens": 4, "n": 2, "seed": 9, "stop": ["zz"]}, {"id": "d", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}]
    want = {(r["id"], r.get("choice", 0)): r["tokens"] for r in results(run(decode("--format", "json"), lines(reqs)).stdout)}
    stream = run(prefill("--chunk", "8"), lines(reqs)).stdout
    recs = records(stream)
    parts, text = [packed([r]) for r in recs], lines(recs).splitlines(keepends=True)
    bad = []
    for i in range(n):
        how = i % 4
        if how == 0:
            data = mutate(rng, stream)
        elif how == 1:          # records lost, doubled, exchanged, damaged
            rr = list(parts)
            for _ in range(rng.choice([1, 2, 5])):
                p, q, k = rng.randrange(len(rr)), rng.randrange(len(rr)), rng.randrange(4)
                if k == 0 and len(rr) > 1:
                    rr.pop(p)
                elif k == 1:
                    rr.insert(q, rr[p])
                elif k == 2:
                    rr[p], rr[q] = rr[q], rr[p]
                else:
                    rr[p] = mutate(rng, rr[p], 1)
            data = b"".join(rr)
        elif how == 2:          # cut and joined
            data = stream[:rng.randrange(len(stream))] + stream[rng.randrange(len(stream)):]
        else:                   # the JSON form
            tt = list(text)
            p = rng.randrange(len(tt))
            tt[p] = mutate(rng, tt[p])
            data = b"".join(tt)
        args = rng.choice([["--format", "json"], ["--format", "json", "--on-mismatch", "fail"], ["--format", "json", "-k", "--kv-mem", "32KiB", "--max-seqs", "1"], ["--format", "json", "--stream"], ["--text"]])
        x = run(decode(*args), data, timeout=60)
        wrong = [] if args == ["--text"] else [r for r in results(x.stdout) if r.get("finish_reason") in ("stop", "length") and want.get((r.get("id"), r.get("choice", 0))) != r["tokens"]]
        if not sane(x) or wrong:
            bad.append((i, args, wrong, brief(x)))
    ok(not bad, f"{n} mutations of a stream (seed {seed}): no crash, no hang, no wrong token", bad[:3])


# --- the world ----------------------------------------------------------------------------------------------------------------------------------------

def start(cmd):
    return subprocess.Popen(cmd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def end(p, timeout=30):
    try:
        out, err = p.communicate(timeout=timeout)
        return p.returncode, out, err
    except subprocess.TimeoutExpired:
        p.kill()
        return (-1, *p.communicate())


def listening(path):
    until = time.time() + 30
    while time.time() < until and not any(path in x for x in open("/proc/net/unix")):
        time.sleep(0.02)


def descriptors_and_files(tmp):
    one = f"{tmp}/one"
    open(one, "wb").write(lines([GOOD]))
    pre, dec = " ".join(prefill()), " ".join(decode())
    run(prefill("-i", one, "-o", f"{tmp}/a.kv"))
    want = run(decode("--text", "-i", f"{tmp}/a.kv")).stdout
    x = sh(f"{dec} --text <&-")
    ok(x.returncode == 1 and b"Bad file" in x.stderr and not x.stdout, "stdin closed: told, and the model is not read as input", brief(x))
    for name, script in (("decode", f"{dec} --text -i {one} >&-"), ("prefill", f"{pre} -i {one} >&-"), ("decode with --trace", f"{dec} --text -i {one} --trace {tmp}/t >&-")):
        x = sh(script)
        ok(x.returncode == 1 and b"Bad file" in x.stderr and len(x.stderr.splitlines()) == 1, f"{name}, stdout closed: told", brief(x))
    ok(want not in open(f"{tmp}/t", "rb").read(), "and no text went into the trace")
    x = sh(f"{dec} --text -i {one} -o {tmp}/out <&- >&- 2>&-; cat {tmp}/out")
    ok(x.stdout == want, "all three closed: the file is right", brief(x))
    x = sh(f"(echo '{{}}'; for i in 1 2 3 4; do echo bad; done; cat {one}) | {dec} --text 2>&-")
    ok(x.stdout == want, "messages to a closed stderr do not go into KV memory", brief(x))
    os.mkfifo(f"{tmp}/fifo")
    p = start(decode("--text", "-i", f"{tmp}/fifo"))
    open(f"{tmp}/fifo", "wb").write(open(f"{tmp}/a.kv", "rb").read())
    got = end(p)
    ok(got[:2] == (0, want), "a FIFO as -i loses no byte", got)
    p = start(prefill("-i", one, "-o", f"{tmp}/fifo"))
    got = run(decode("--text", "-i", f"{tmp}/fifo"))
    ok(got.stdout == want and end(p)[0] == 0, "a FIFO as -o", got)
    for args in (["-i", f"{tmp}/fifo"], ["-i", one, "-o", f"{tmp}/fifo"]):
        p = start(decode("--text", *args))
        handles_signals(p)
        time.sleep(0.3)
        p.send_signal(signal.SIGTERM)
        ok(end(p, 10)[0] == 6, f"SIGTERM while a FIFO waits for its other side ({args[-2]})")
    x = sh(f"cp {tmp}/a.kv {tmp}/s; {dec} -i {tmp}/s -o {tmp}/s --text && cat {tmp}/s")
    ok(x.stdout == want, "-i and -o the same file", brief(x))
    x = sh(f"echo old >{tmp}/target; ln -s target {tmp}/link; {dec} -i {one} -o {tmp}/link --text && cat {tmp}/target && test -L {tmp}/link")
    ok(x.returncode == 0 and x.stdout == want, "-o through a link: its target is written, the link stays", brief(x))
    for spec, rc in ((tmp, 2), (f"{tmp}/none/x", 1), ("/dev/full", 8)):
        x = run(decode("--text", "-i", one, "-o", spec))
        ok(x.returncode == rc and len(x.stderr.splitlines()) == 1, f"-o {os.path.basename(spec)}: one line, exit {rc}", brief(x))


def sockets(tmp):
    s, want = f"{tmp}/sock", run(decode("--text"), lines([GOOD])).stdout
    kv = run(prefill(), lines([GOOD])).stdout
    old = socket.socket(socket.AF_UNIX)
    old.bind(s)
    old.close()
    d = start(decode("--text", "-i", f"unix-listen:{s}"))
    listening(s)
    p = run(prefill("-o", f"unix:{s}"), lines([GOOD]))
    ok(p.returncode == 0 and end(d)[:2] == (0, want), "a stale socket is replaced")
    d = start(decode("--text", "-i", f"unix-listen:{s}"))
    listening(s)
    x = run(decode("--text", "-i", f"unix-listen:{s}"))
    p = run(prefill("-o", f"unix:{s}"), lines([GOOD]))
    got = end(d)
    ok(x.returncode == 2 and got[:2] == (0, want), "a second listener is refused, and the first still has its one peer", (x.stderr, got))
    for reset in (False, True):
        d = start(decode("--format", "json", "-i", f"unix-listen:{s}"))
        listening(s)
        c = socket.socket(socket.AF_UNIX)
        c.connect(s)
        c.sendall(kv[:len(kv) // 2])
        if reset:
            c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        c.close()
        ok(end(d)[0] == 4, "a peer that vanishes in mid stream: exit 4")
    many = f"{tmp}/many"
    open(many, "wb").write(lines([{"id": i, "prompt": "w " * 100, "max_tokens": 4} for i in range(1000)]))
    d = start(prefill("-i", many, "-o", f"unix-listen:{s}"))
    listening(s)
    c = socket.socket(socket.AF_UNIX)
    c.connect(s)
    c.recv(1000)
    c.close()
    got = end(d)
    ok(got[0] == 6 and len(got[2].splitlines()) == 1, "a reader that vanishes in mid stream: exit 6", got)
    for args in (["-i", f"unix-listen:{s}"], ["--connect-timeout", "60s", "-i", f"unix:{s}"]):
        for wait in (0, 0.5):           # before it waits, and while it does
            d = start(decode("--text", *args))
            handles_signals(d)
            time.sleep(wait)
            d.send_signal(signal.SIGTERM)
            ok(end(d, 10)[0] == 6 and not os.path.exists(s), f"SIGTERM {'while' if wait else 'before'} nobody comes ({args[-1].split(':')[0]}): exit 6, no name left")
    for spec in ("unix-listen:/tmp/" + "x" * 200, f"unix-listen:{many}", f"unix-listen:{tmp}/no/such", f"unix:{tmp}/no/such", f"unix:{many}"):
        x = run(decode("--text", "--connect-timeout", "200ms", "-i", spec))
        ok(x.returncode in ({5} if spec.startswith("unix:") else {1, 2}) and len(x.stderr.splitlines()) == 1, f"{spec[:24]}...: one line", brief(x))


def life_and_death(tmp):
    many = f"{tmp}/runs"
    open(many, "wb").write(lines([{"id": i, "prompt": "word " * 40, "max_tokens": 20, "ignore_eos": True, "temperature": 0} for i in range(600)]))
    p = subprocess.Popen(prefill("-i", many), stdout=subprocess.PIPE)
    d = subprocess.Popen(decode("--format", "json", "-o", f"{tmp}/out"), stdin=p.stdout, stderr=subprocess.PIPE)
    p.stdout.close()
    for _ in range(5):
        for q in (p, d):
            if q.poll() is None:
                q.send_signal(signal.SIGSTOP)
                time.sleep(0.1)
                q.send_signal(signal.SIGCONT)
                time.sleep(0.03)
    d.communicate(timeout=120)
    rs = results(open(f"{tmp}/out", "rb").read())
    ok(p.wait() == d.returncode == 0 and len(rs) == 600 and len({tuple(r["tokens"]) for r in rs}) == 1, "either side stopped and continued: every run, the same tokens", (p.returncode, d.returncode, len(rs)))
    p = subprocess.Popen(prefill("-i", many), stdout=subprocess.PIPE)
    d = subprocess.Popen(decode("--format", "json"), stdin=p.stdout, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    p.stdout.close()
    time.sleep(0.4)
    p.kill()
    out, err = d.communicate(timeout=120)
    good = [r for r in results(out) if r["finish_reason"] != "error"]
    ok(d.returncode in (0, 4) and {tuple(r["tokens"]) for r in good} <= {tuple(rs[0]["tokens"])}, "prefill killed in mid stream: what came whole is right", (d.returncode, err[-300:]))
    p.wait()


def faults(tmp):
    """Memory that runs out, reads and writes that fail: in the builds that can play them."""
    reqs = [{"id": "a", "prompt": "hello there my friend", "max_tokens": 4, "n": 3, "logprobs": True, "top_logprobs": 2, "stop": ["zz"]}, {"id": "b", "token_ids": [5, 6, 7], "max_tokens": 1, "echo": True},
            {"id": "c", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}]
    want = {(r["id"], r.get("choice", 0)): r["tokens"] for r in results(run(decode("--format", "json"), lines(reqs)).stdout)}
    kv, rng = run(prefill(), lines(reqs)).stdout, random.Random(1)
    run(prefill("-o", f"{tmp}/f.h5"), lines(reqs))
    ways = {"prefill": (prefill(), lines(reqs)), "decode": (decode("--format", "json"), kv), "aggregated": (decode("--format", "json", "--stream"), lines(reqs)),
            "into a dump": (prefill("-o", f"{tmp}/g.h5"), lines(reqs)), "from a dump": (decode("--format", "json", "-i", f"{tmp}/f.h5"), b""), "text": (decode("--text"), kv)}
    for name, (cmd, data) in ways.items():
        env = dict(os.environ, PD_FAULT_COUNT=f"{tmp}/passes")
        subprocess.run(cmd, input=data, env=env, stdout=subprocess.DEVNULL)
        if not os.path.exists(f"{tmp}/passes"):
            ok(True, f"faults, {name} # SKIP no fault points in this build")
            continue
        words, bad = open(f"{tmp}/passes").read().split(), []
        os.unlink(f"{tmp}/passes")
        for point, n in ((words[i], max(int(words[k + 1]) for k in range(0, len(words), 2) if words[k] == words[i])) for i in range(0, 12, 2)):
            for at in sorted(rng.sample(range(1, n + 1), min(n, 1000 if LONG else 25))):
                os.environ["PD_FAULT"] = f"{point}:fail:{at}"
                x = run(cmd, data)
                del os.environ["PD_FAULT"]
                out = x.stdout[:x.stdout.rfind(b"\n") + 1] if "json" in cmd else b""
                wrong = [r for r in results(out) if r["finish_reason"] != "error" and want[(r["id"], r.get("choice", 0))] != r["tokens"]]
                if not sane(x) or wrong or (x.returncode and not x.stderr):
                    bad.append((point, at, wrong, brief(x)))
        ok(not bad, f"faults, {name}: told, never a crash, never a wrong token", bad[:3])


def memory(tmp):
    """20,000 tiny requests: memory has its level after the first few thousand."""
    n = 20000 if LONG or not os.environ.get("V") else 2000
    data = f"{tmp}/tiny"
    with open(data, "wb") as f:
        for i in range(n):
            f.write(lines([{"id": i, "prompt": f"n {i % 7}" if i % 50 else "", "max_tokens": 2 + i % 2, "seed": i, "n": 1 + (i % 5 == 0), "stop": ["x"], "logprobs": True, "echo": i % 2 == 0}]))
    p = subprocess.Popen(prefill("-q", "-i", data), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    d = subprocess.Popen(decode("--format", "json", "-o", f"{tmp}/tiny.out"), stdin=p.stdout, stderr=subprocess.DEVNULL)
    p.stdout.close()
    seen = {p: [], d: []}
    while d.poll() is None:
        for q in seen:
            try:
                seen[q] += [int(x.split()[1]) for x in open(f"/proc/{q.pid}/status") if x.startswith("VmRSS")]
            except OSError:
                pass
        time.sleep(0.2)
    p.wait()
    total = len(results(open(f"{tmp}/tiny.out", "rb").read()))
    level = [(v[len(v) // 3], max(v[len(v) // 3:])) for v in seen.values() if len(v) > 5]
    ok(p.returncode == d.returncode == 1 and total == n + n // 5, f"{n} requests: every one has its results", (p.returncode, d.returncode, total))
    if os.environ.get("V"):
        return                  # a sanitizer's own memory grows
    ok(len(level) == 2 and all(b <= a + 2048 for a, b in level), "and memory stays level in both", level)


with tempfile.TemporaryDirectory() as folder:
    extremes()
    order_of_text()
    boundaries()
    pools()
    liars()
    mutations()
    descriptors_and_files(folder)
    sockets(folder)
    life_and_death(folder)
    faults(folder)
    memory(folder)
tap.done()
