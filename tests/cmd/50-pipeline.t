#!/usr/bin/env python3
"""The main job, end to end, on the real model (PD_MODEL) or, without it, on a tiny one: text, results, files, sockets, dumps; the same tokens every way;
bad input and broken streams: one clear line, the right exit status, never a wrong token."""
import base64
import json
import os
import resource
import signal
import subprocess
import tempfile
import time

import tap
from tap import B, TINY, decode, has_read, lines, ok, one_line, prefill, records, results, run, skip, trace

MODEL = tap.model = os.environ.get("PD_MODEL") or TINY
tmp = tempfile.mkdtemp()


def key(out):
    """What must be equal: tokens, text, reason of each choice of each request."""
    return sorted(((str(r["id"]), r.get("choice", 0)), r["tokens"], r["text"], r["finish_reason"], r.get("logprobs")) for r in results(out))


REQS = [
    {"id": "greedy", "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
    {"id": 2, "prompt": "Once upon a time", "max_tokens": 12, "seed": 7, "logprobs": True},
    {"id": "k", "prompt": "def fib(n):", "max_tokens": 12, "top_k": 40, "temperature": 0.8, "seed": 3},
    {"id": "p", "prompt": "1, 2, 3,", "max_tokens": 12, "top_p": 0.9, "seed": 4, "frequency_penalty": 0.5},
    {"id": "m", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 12, "min_p": 0.05, "seed": 5, "repetition_penalty": 1.1},
    {"id": "n", "prompt": "Three colours:", "max_tokens": 8, "n": 3, "seed": 6, "presence_penalty": 0.2},
    {"id": "ids", "token_ids": [10, 20, 30, 40], "max_tokens": 8, "seed": 8, "ignore_eos": True, "min_tokens": 8},
    {"id": "bias", "prompt": "Yes or no?", "max_tokens": 4, "temperature": 0, "logit_bias": {"42": 100}},
    {"id": "long", "prompt": "word " * 60, "max_tokens": 10, "temperature": 0, "stop": ["zzz"]},
    {"id": "one", "prompt": "Only the first", "max_tokens": 1, "temperature": 0},
]
for req in REQS:
    req["logprobs"] = True      # so that what is compared is the bits of the logits, not only what was drawn from them


def main():
    data = lines(REQS)
    agg = run(decode("--format", "json"), data)
    ref = key(agg.stdout)
    ok(agg.returncode == 0 and len(ref) == len(REQS) + 2, "aggregated: every request gives a result a choice", agg.stderr)
    bias = [r for r in results(agg.stdout) if r["id"] == "bias"][0]
    ok(bias["tokens"] == [42] * 4, "logit_bias decides", bias)
    pre = run(prefill(), data)
    ok(pre.returncode == 0 and not pre.stderr, "prefill alone", pre.stderr)
    dec = run(decode("--format", "json"), pre.stdout)
    ok(dec.returncode == 0 and key(dec.stdout) == ref, "apart through a pipe: the same tokens, texts, logprobs", dec.stderr)
    modes = {r["mode"] for r in results(dec.stdout)}
    ok(modes == {"remote"} and all(r["fallback"] is None for r in results(dec.stdout)), "and the results say remote, without fallback", modes)
    want = {"run", "id", "text", "tokens", "prompt_tokens", "completion_tokens", "cached_tokens", "transferred_tokens", "recomputed_tokens", "finish_reason", "mode",
            "fallback", "ttft_ms", "tpot_ms", "e2e_ms", "kv_bytes", "kv_ms", "fingerprint", "gen", "prefill_worker", "decode_worker"}
    r = results(dec.stdout)[0]
    ok(want <= set(r), "a result has every field", want - set(r))
    for args, env in [(["--chunk", "1"], {}), (["--chunk", "7", "-t", "1"], {}), (["--chunk", "64", "-t", "2", "--max-seqs", "2"], {}), (["--max-seqs", "1", "--chunk", "512"], {}),
                      (["-t", "1"], {"PD_CPU": "scalar"}), (["-t", "2"], {"PD_CPU": "avx2"})]:
        if env.get("PD_CPU") == "scalar" and MODEL != TINY:
            some, mine = REQS[:1], [x for x in ref if x[0][0] == "greedy"]
        else:
            some, mine = REQS, ref
        x = run(decode("--format", "json", *args), lines(some), env=env)
        ok(key(x.stdout) == mine, f"aggregated with {' '.join(args)} {env or ''}: the same", x.stderr)
    x = run(prefill("--chunk", "16"), data)
    y = run(decode("--format", "json", "--chunk", "5"), x.stdout)
    ok(key(y.stdout) == ref, "prefill in chunks of 16, decode: the same", y.stderr)

    # the ways in and out
    x = run(prefill("-o", f"{tmp}/a.h5"), data)
    y = run(decode("--format", "json", "-i", f"{tmp}/a.h5"))
    ok(x.returncode == 0 and y.returncode == 0 and key(y.stdout) == ref, "through a dump file: the same", x.stderr + y.stderr)
    run(prefill("-o", f"{tmp}/l.h5"), lines([REQS[8]]))
    x = run(trace("kv", "slice", "--tokens", "0:20", "-o", f"{tmp}/s.h5", f"{tmp}/l.h5"))
    y = run(decode("--format", "json", "-i", f"{tmp}/s.h5"))
    cut = records(run(trace("cat", "--format", "json"), run(prefill(), lines([REQS[8]])).stdout).stdout)[0]["token_ids"]["$b64"]
    ids = [int.from_bytes(base64.b64decode(cut)[i:i + 4], "little") for i in range(0, 80, 4)]
    z = run(decode("--format", "json"), lines([{**{k: v for k, v in REQS[8].items() if k != "prompt"}, "token_ids": ids}]))
    ok(x.returncode == 0 and y.returncode == 0 and results(y.stdout)[0]["tokens"] == results(z.stdout)[0]["tokens"] and results(y.stdout)[0]["transferred_tokens"] == 19,
       "decode goes on from a slice of a dump", (x.stderr, y.stderr, y.stdout[-300:]))
    x = run(prefill("-o", f"{tmp}/none.h5"), '{"prompt":""}\n')
    ok(x.returncode == 1 and not os.path.exists(f"{tmp}/none.h5"), "a dump of nothing is not made", x.stderr)
    run(prefill("-o", f"{tmp}/a.kv"), data)
    y = run(decode("--format", "json", "-i", f"{tmp}/a.kv", "-o", f"{tmp}/out.json"))
    ok(y.returncode == 0 and key(open(f"{tmp}/out.json", "rb").read()) == ref, "through a file, into a file: the same", y.stderr)
    j = run(trace("cat", "--format", "json", f"{tmp}/a.kv"))
    k = run(trace("cat", "--format", "msgpack"), j.stdout)
    ok(k.stdout == open(f"{tmp}/a.kv", "rb").read() and len(k.stdout) > 0, "pd-trace cat to JSON and back is lossless", j.stderr + k.stderr)
    y = run(decode("--format", "json"), j.stdout)
    ok(key(y.stdout) == ref, "decode reads the JSON form too", y.stderr)
    for a, b in (("unix-listen", "unix"), ("unix", "unix-listen")):
        sock = f"{tmp}/s-{a}"
        d = subprocess.Popen(decode("--format", "json", "-i", f"{a}:{sock}"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        p = run(prefill("-o", f"{b}:{sock}"), data)
        out, err = d.communicate(timeout=120)
        ok(p.returncode == 0 and d.returncode == 0 and key(out) == ref, f"decode on {a}, prefill on {b}: the same", p.stderr + err)
        ok(not os.path.exists(sock), "and the socket's name is gone")
    text = run(decode("--text"), lines([REQS[0], REQS[3]])).stdout
    t = {x[0]: x[2] for x in ref}
    ok(text.decode() == t[("greedy", 0)] + "\n" + t[("p", 0)] + "\n", "--text writes texts in order of input", text)
    x = run(decode("--lines", "--text"), "The capital of France is\n")
    ok(x.returncode == 0 and len(x.stdout) > 2, "--lines takes prompts", x.stderr)
    x = run(decode("--stream", "--format", "json"), lines(REQS[:2]))
    toks = records(x.stdout)
    per = {}
    for z in toks:
        if z["pd"] == "token":
            per.setdefault(z["run"], []).append(z)
    good = all("".join(z["text"] for z in per[r["run"]]) == r["text"] and [z["token"] for z in per[r["run"]]] == r["tokens"]
               and [z["pos"] for z in per[r["run"]]] == list(range(len(r["tokens"]))) for r in results(x.stdout))
    ok(good and len(per) == 2, "--stream: tokens join to the result", x.stdout)
    word = t[("greedy", 0)].split()[2] if len(t[("greedy", 0)].split()) > 2 else None
    if word:
        x = results(run(decode("--format", "json"), lines([dict(REQS[0], stop=[word])])).stdout)[0]
        ok(x["finish_reason"] == "stop" and word not in x["text"] and t[("greedy", 0)].startswith(x["text"]), "a stop string ends the text before it", x)
    x = results(run(decode("--format", "json"), lines([dict(REQS[0], echo=True)])).stdout)[0]
    ok(x["text"] == REQS[0]["prompt"] + t[("greedy", 0)], "echo", x["text"])
    many = [{"id": i, "prompt": f"Number {i}", "max_tokens": 3, "seed": i} for i in range(150)]
    a = run(decode("--format", "json"), lines(many))
    b = run(decode("--format", "json"), run(prefill(), lines(many)).stdout)
    ok(len(results(a.stdout)) == 150 and key(a.stdout) == key(b.stdout), "150 requests in one stream: the same apart", a.stderr + b.stderr)
    x = run(prefill(), lines([dict(REQS[0], my_field={"a": [1, 2.5, None]})]))
    rec = records(run(trace("cat", "--format", "json"), x.stdout).stdout)[-1]
    ok(x.returncode == 0 and rec["request"].get("my_field") == {"a": [1, 2.5, None]}, "an unknown field is passed along", rec.get("request"))
    x = run(trace("cat", "--format", "msgpack"), '{"pd":"weather","v":1,"sky":"blue"}\n')
    y = run(decode("--format", "json"), x.stdout)
    ok(y.returncode == 0 and json.loads(y.stdout)["sky"] == "blue", "an unknown kind passes through", y.stderr)

    # identity and integrity
    x = run(prefill("--block-size", "32"), data)
    y = run(decode("--format", "json"), x.stdout)
    rs = results(y.stdout)
    ok(y.returncode == 0 and key(y.stdout) == ref and any("block_size differs (prefill 32, decode 16)" in (r["fallback"] or "") for r in rs) and b"block_size" in y.stderr,
       "another block size: recomputed, the same tokens, named in result and on stderr", y.stderr)
    y = run(decode("--format", "json", "--strict"), x.stdout)
    ok(y.returncode == 9, "--strict: exit 9", y.returncode)
    one = run(prefill("--block-size", "32"), lines(REQS[:1])).stdout
    y = run(decode("--format", "json", "--on-mismatch", "fail"), one)
    ok(y.returncode == 3 and b"block_size differs (prefill 32, decode 16)" in y.stderr and results(y.stdout)[0]["finish_reason"] == "error",
       "--on-mismatch fail: exit 3, the field and both values", y.stderr)
    y = run(decode("--format", "json", m="testdata/tiny/llama-q8_0.gguf"), run(prefill(m=TINY), lines([dict(REQS[6], token_ids=[1, 2, 3])])).stdout)
    ok(y.returncode == 0 and "weights_digest differs" in results(y.stdout)[0]["fallback"], "KV of other weights is not used", y.stderr)
    kv = run(prefill("--chunk", "16"), lines([REQS[8]])).stdout
    mine = [z for z in ref if z[0][0] == "long"]
    recs = records(run(trace("cat", "--format", "json"), kv).stdout)
    chunks = [i for i, r in enumerate(recs) if r["pd"] == "chunk"]

    def again(edit):
        rs2 = [json.loads(json.dumps(r)) for r in recs]
        edit(rs2)
        return run(trace("cat", "--format", "msgpack"), lines(rs2)).stdout

    def flip(rs2):
        c = rs2[chunks[3]]
        raw = bytearray(base64.b64decode(c["data"]["$b64"]))
        raw[1000] ^= 4
        c["data"]["$b64"] = base64.b64encode(raw).decode()

    def swap(rs2):
        a1, a2 = rs2[chunks[2]], rs2[chunks[4]]
        a1["data"], a2["data"], a1["xxh3"], a2["xxh3"] = a2["data"], a1["data"], a2["xxh3"], a1["xxh3"]

    edits = {"a flipped byte in a chunk": flip, "right bytes in a wrong place": swap, "a replayed chunk": lambda q: q.insert(chunks[5], dict(q[chunks[3]])),
             "a missing chunk": lambda q: q.pop(chunks[3]), "a chunk of a lying length": lambda q: q[chunks[1]].update(raw_len=q[chunks[1]]["raw_len"] + 2),
             "a chunk of another generation": lambda q: q[chunks[1]].update(gen={"$b64": base64.b64encode(b"x" * 16).decode()}),
             "a kv without its offer": lambda q: (q.pop(0), [q.pop(0) for _ in chunks])}
    for name, edit in edits.items():
        broken = again(edit)
        y = run(decode("--format", "json"), broken)
        rs = results(y.stdout)
        ok(y.returncode == 0 and key(y.stdout) == mine and rs[0]["mode"] == "local" and rs[0]["fallback"].startswith("integrity") and one_line(y.stderr),
           f"{name}: recomputed to the same tokens, and named", (y.returncode, y.stderr, [r.get("fallback") for r in rs]))
        y = run(decode("--format", "json", "--on-mismatch", "fail"), broken)
        ok(y.returncode == 4 and results(y.stdout)[0]["finish_reason"] == "error", f"{name}, --on-mismatch fail: exit 4", (y.returncode, y.stderr))
    y = run(decode("--format", "json"), again(lambda q: q[-1].update(n_tokens=q[-1]["n_tokens"] - 1)))
    ok(y.returncode == 4 and results(y.stdout)[0]["finish_reason"] == "error", "a descriptor whose sum is wrong is refused, not recomputed", (y.returncode, y.stderr))
    for cut in (1, 40, len(kv) // 3, len(kv) // 2, len(kv) - 200, len(kv) - 1):
        y = run(decode("--format", "json"), kv[:cut])
        ok(y.returncode == 4 and y.stderr and not any(r["tokens"] for r in results(y.stdout)), f"a stream cut at {cut} of {len(kv)}: exit 4, no token", (y.returncode, y.stderr))
    two = run(prefill("--max-seqs", "1"), lines(REQS[:2])).stdout
    y = run(decode("--format", "json"), two[:-100])
    ok(y.returncode == 4 and any(r.get("id") == "greedy" and r["tokens"] for r in results(y.stdout)), "what came whole before a cut is served", (y.returncode, y.stderr))

    # bad requests
    bad = {
        "broken JSON": '{"id":1,"prompt":"x"\n', "a duplicate key": '{"prompt":"x","prompt":"y"}\n', "invalid UTF-8": b'{"prompt":"a\xff\xfe"}\n', "an empty prompt": '{"prompt":""}\n',
        "no prompt": '{"id":3}\n', "two prompts": '{"prompt":"x","token_ids":[1]}\n', "a prompt of the wrong type": '{"prompt":17}\n', "max_tokens negative": '{"prompt":"x","max_tokens":-1}\n',
        "max_tokens huge": '{"prompt":"x","max_tokens":99999999999999999999}\n', "temperature negative": '{"prompt":"x","temperature":-1}\n', "top_p 0": '{"prompt":"x","top_p":0}\n',
        "top_p 2": '{"prompt":"x","top_p":2}\n', "n 0": '{"prompt":"x","n":0}\n', "n huge": '{"prompt":"x","n":1000000}\n', "a negative seed": '{"prompt":"x","seed":-1}\n',
        "token ids outside": '{"token_ids":[99999999]}\n', "token ids negative": '{"token_ids":[-1]}\n', "token ids empty": '{"token_ids":[]}\n', "a role without content": '{"messages":[{"role":"user"}]}\n',
        "an adapter": '{"prompt":"x","adapter":"lora1"}\n', "temperature NaN": '{"prompt":"x","temperature":NaN}\n', "a list": '[1,2]\n', "stop of the wrong type": '{"prompt":"x","stop":[1]}\n',
        "min_p 2": '{"prompt":"x","min_p":2}\n', "repetition_penalty 0": '{"prompt":"x","repetition_penalty":0}\n', "logit_bias to a word": '{"prompt":"x","logit_bias":{"cat":1}}\n',
    }
    good = '{"id":"good","prompt":"Hi","max_tokens":2,"temperature":0}\n'
    for name, line in bad.items():
        line = line.encode() if isinstance(line, str) else line
        x = run(prefill(m=TINY), line + good.encode())
        y = run(decode("--format", "json", m=TINY), x.stdout)
        z = run(decode("--format", "json", m=TINY), line + good.encode())
        if name == "a list":        # not a record at all: the stream is refused before anything
            ok(x.returncode != 0 and z.returncode != 0 and one_line(x.stderr), f"{name}: refused", (x.returncode, x.stderr))
            continue
        want_rc = 3 if name == "an adapter" else 1
        ok(x.returncode == want_rc and z.returncode == want_rc and one_line(x.stderr) and one_line(z.stderr), f"{name}: one line, exit {want_rc}", (x.returncode, x.stderr, z.returncode, z.stderr))
        oks = [r for r in results(y.stdout) if r.get("id") == "good"], [r for r in results(z.stdout) if r.get("id") == "good"]
        ok(y.returncode == want_rc and all(len(o) == 1 and len(o[0]["tokens"]) == 2 for o in oks) and sum(r["finish_reason"] == "error" for r in results(y.stdout)) == 1,
           f"{name}: the next request is served, the bad one has one result", (y.returncode, y.stdout, y.stderr))
    x = run(decode("--format", "json", m=TINY), '{"prompt":"' + "hello " * 20000 + '"}\n')
    ok(x.returncode == 1 and b"context is " in x.stderr and one_line(x.stderr), "a prompt past the context: both numbers", x.stderr[-300:])
    x = run(decode("--kv-mem", "16KiB", "--format", "json", m=TINY), '{"prompt":"' + "hello " * 20 + '"}\n')
    ok(x.returncode == 8 and b"--kv-mem" in x.stderr, "a prompt past the pool: exit 8 and the remedy", (x.returncode, x.stderr))

    # bad models and options
    open(f"{tmp}/junk.gguf", "wb").write(b"not a model at all, but long enough to be read as one" * 10)
    for args, name in ((["-m", f"{tmp}/junk.gguf"], "junk"), (["-m", f"{tmp}/none.gguf"], "a missing file"), (["-m", tmp], "a folder")):
        x = run([f"{B}/bin/pd-decode", "--text", *args], good)
        ok(0 < x.returncode < 9 and one_line(x.stderr), f"a model that is {name}: one line", (x.returncode, x.stderr))
    for args in (["--chunk", "0x"], ["--chunk", "-3"], ["--block-size", "99999"], ["--kv-dtype", "q4"], ["--format", "xml"], ["--nonsense"], ["-t", "-1"], ["--kv-mem", "lots"],
                 ["--on-mismatch", "pray"], ["--text", "--format", "json"], ["-o", "x.h5"], ["-i", "tcp:localhost"], ["extra"]):
        x = run(decode(*args, m=TINY), good)
        ok(x.returncode == 2 and one_line(x.stderr), f"{' '.join(args)}: usage", (x.returncode, x.stderr))
    x = run([f"{B}/bin/pd-decode"], good)
    ok(x.returncode == 2 and b"-m" in x.stderr, "no model: usage")
    x = run(decode(m=TINY), good, env={"PD_CPU": "sse9"})
    ok(x.returncode == 2 and b"sse9" in x.stderr, "PD_CPU unknown: usage", x.stderr)
    for c in ("pd-prefill", "pd-decode", "pd-trace", "pd-bench"):
        x, y = run([f"{B}/bin/{c}", "--help"]), run([f"{B}/bin/{c}", "--version"])
        ok(x.returncode == 0 and b"Usage" in x.stdout and y.returncode == 0 and y.stdout.startswith(c.encode()), f"{c} --help, --version", (x, y))

    x = run(decode("--format", "json"), lines([dict(REQS[0], id="late", deadline_ms=1, max_tokens=2000, ignore_eos=True), REQS[7]]))
    rs = {r["id"]: r for r in results(x.stdout)}
    ok(x.returncode == 5 and b"deadline of 1 ms" in x.stderr and rs["late"]["finish_reason"] == "error" and len(rs["bias"]["tokens"]) == 4, "a deadline ends its run alone: exit 5", (x.returncode, x.stderr))

    # the world
    x = run(["bash", "-c", f"set -o pipefail; {' '.join(prefill())} | head -c 10 >/dev/null; echo ${{PIPESTATUS[0]}}"], data)
    ok(x.stdout.strip() == b"6" and b"pipe" in x.stderr.lower(), "the reader goes away: exit 6, told", (x.stdout, x.stderr))
    x = run(["bash", "-c", f"{' '.join(prefill())} >/dev/full"], data)
    ok(x.returncode == 8 and one_line(x.stderr), "a full disk: exit 8", (x.returncode, x.stderr))
    mount = f"mkdir {tmp}/small && mount -t tmpfs -o size=64k none {tmp}/small"
    if run(["unshare", "-m", "bash", "-c", mount]).returncode == 0:
        for name in ("full.kv", "full.h5"):
            x = run(["unshare", "-m", "bash", "-c", f"rmdir {tmp}/small; {mount}; {' '.join(prefill('-o', f'{tmp}/small/{name}'))}; rc=$?; ls -A {tmp}/small; exit $rc"], data)
            ok(x.returncode == 8 and not x.stdout and one_line(x.stderr), f"no room for {name}: exit 8, nothing half-written", (x.returncode, x.stdout, x.stderr))
    else:
        for name in ("full.kv", "full.h5"):
            skip(f"no room for {name}", "no right to mount a small tmpfs here")
    x = run(prefill("-o", f"{tmp}/no/such/dir.kv"), good)
    ok(x.returncode == 1 and one_line(x.stderr), "an output folder that is not there", (x.returncode, x.stderr))
    p = subprocess.Popen(decode("--format", "json"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    p.stdin.write(lines([dict(REQS[0], max_tokens=60, ignore_eos=True)]).encode())
    p.stdin.flush()
    has_read(p)
    time.sleep(0.3)
    p.send_signal(signal.SIGTERM)
    try:
        p.wait(60)
        out = p.stdout.read()
        ok(p.returncode == 6 and len(results(out)) == 1 and len(results(out)[0]["tokens"]) == 60, "SIGTERM: what was taken in is finished, exit 6", (p.returncode, out))
    except subprocess.TimeoutExpired:
        p.kill()
        ok(False, "SIGTERM: what was taken in is finished, exit 6", "it went on")
    p.stdin.close()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for cmd in (prefill(), decode(), [f"{B}/bin/pd-kvsend", "-i", "-", "-o", "-"]):     # slabs and connections are a descriptor each
        p = subprocess.Popen(cmd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard)))
        until = time.monotonic() + 10
        while resource.prlimit(p.pid, resource.RLIMIT_NOFILE)[0] != hard and time.monotonic() < until:
            time.sleep(0.01)
        ok(resource.prlimit(p.pid, resource.RLIMIT_NOFILE) == (hard, hard), f"{os.path.basename(cmd[0])} allows itself the descriptors that it may have")
        p.communicate()
    x = run(decode("--text", m=TINY), b"")
    ok(x.returncode == 0 and x.stdout == b"", "no input: no output, exit 0", (x.returncode, x.stderr))
    x = run(prefill("--trace", f"{tmp}/t.log"), lines(REQS[:1]))
    ev = records(run(trace("cat", "--format", "json", f"{tmp}/t.log")).stdout)
    ok([e["state"] for e in ev] == ["starting", "accepted", "prefill_started", "kv_transfer_started", "prefill_completed", "kv_published", "gone"],
       "--trace tells the life of a run", ev)


main()
subprocess.run(["rm", "-rf", tmp])
tap.done()
