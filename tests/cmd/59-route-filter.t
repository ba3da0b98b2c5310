#!/usr/bin/env python3
"""pd-route -w between two commands: each request goes on with its route inside, what is to be local passes the prefill by, and the text is the same either way."""
import json
import os
import subprocess
import tempfile

import tap
from tap import B, TINY, lines, ok, one_line, records, run

tmp = tempfile.TemporaryDirectory()
W = os.path.join(tmp.name, "workers")
REQS = [{"id": i, "prompt": f"Once upon a time there were {i} foxes. " * (1 + i % 3), "max_tokens": 3 + i % 5, "seed": i, "ignore_eos": True} for i in range(24)]


def describe(*cmd):
    return run([f"{B}/bin/{cmd[0]}", "-m", TINY, *cmd[1:], "--describe"]).stdout


def route(*args, data=lines(REQS), w=W, **kw):
    return run([f"{B}/bin/pd-route", "-w", w, *args], data, **kw)


def pipe(*args):
    trace = os.path.join(tmp.name, "t" + str(len(os.listdir(tmp.name))))
    sh = f'"{B}/bin/pd-route" -w "{W}" --trace "{trace}" {" ".join(args)} | "{B}/bin/pd-prefill" -m "{TINY}" -t 1 | "{B}/bin/pd-kvsend" -i - -o - | "{B}/bin/pd-decode" -m "{TINY}" -t 1 --format json'
    x = subprocess.run(["sh", "-c", sh], input=lines(REQS).encode(), capture_output=True, timeout=300)
    got = {r["id"]: r for r in tap.results(x.stdout)}
    ev = records(run([f"{B}/bin/pd-trace", "cat", trace]).stdout)
    return x, got, {r["run"]: r for r in ev if r["pd"] == "route"}


with open(W, "wb") as f:
    f.write(describe("pd-prefill") + describe("pd-decode") + describe("pd-decode", "--role", "both"))
want = {r["id"]: (r["tokens"], r["text"]) for r in tap.results(run([f"{B}/bin/pd-decode", "-m", TINY, "-t", "1", "--format", "json"], lines(REQS)).stdout)}

x = route("--format", "json")
out = [json.loads(l) for l in x.stdout.splitlines()]
ok(x.returncode == 0 and len(out) == 24 and all(r["pd"] == "request" and r["route"]["mode"] == "remote" and r["route"]["policy"] == "fixed" and r["route"]["p"] for r in out),
   "with a prefill worker in the file: fixed", x.stderr)
ok({r["route"]["d"]["worker"].split("@")[0] for r in out} == {"decode", "both"} and [r["id"] for r in out] == list(range(24)), "workers take turns; the order stays", out)
ok(route("--format", "json").stdout.count(b'"remote"') == 24 and all(a["max_tokens"] == b["max_tokens"] and a["prompt"] == b["prompt"] for a, b in zip(out, REQS)), "a request keeps what it asks for", out[0])

for policy, modes in (("fixed", {"remote"}), ("aggregated", {"aggregated"}), ("conditional", {"local"}), ("threshold:15", {"local", "remote"}), ("random", {"local", "remote"})):
    x, got, routes = pipe("--policy", policy, "--seed", "3")
    ok({k: (r["tokens"], r["text"]) for k, r in got.items()} == want and x.returncode == 0, f"{policy}: the text of one process", x.stderr)
    ok({r["mode"] for r in got.values()} == modes and all(routes[r["run"]]["chosen"]["mode"] == r["mode"] for r in got.values()), f"{policy}: done as was decided",
       [(r["mode"], routes[r["run"]]["reason"]) for r in got.values()][:5])

x = route(data=b'{"pd":"status","v":1}\n{"id":1,"prompt":"x","max_tokens":0}\n{"id":2,"prompt":"x"}\n', w=W)
out = records(run([f"{B}/bin/pd-trace", "cat"], x.stdout).stdout)
ok(x.returncode == 1 and [r["pd"] for r in out] == ["status", "error", "result", "request"] and out[2]["finish_reason"] == "error" and out[2]["id"] == 1,
   "other records pass; a bad request is answered, and the next goes on", (x.stderr, out))
x = route(data=b'{"id":1,"prompt":"x","adapter":"none has it","n":2}\n')
out = records(run([f"{B}/bin/pd-trace", "cat"], x.stdout).stdout)
ok(x.returncode == 7 and [r["pd"] for r in out] == ["error", "result", "result"] and out[1]["finish_reason"] == "blocked" and len(out[1]["excluded"]) == 3 and
   "adapter" in out[1]["excluded"][0]["reason"], "one that nobody may have is blocked, with the list", (x.stderr, out))
names = [r["worker"] for r in records(run([f"{B}/bin/pd-trace", "cat"], open(W, "rb").read()).stdout)]
T = os.path.join(tmp.name, "topology")
with open(T, "w") as f:
    for i, n in enumerate(names):
        f.write(f"domain rack{i} rack\nworker {n} in rack{i}\n")
x = route("--policy", "fixed", "--topology", T, "--domain", "require:rack", data=b'{"id":1,"prompt":"x"}\n')
out = records(run([f"{B}/bin/pd-trace", "cat"], x.stdout).stdout)
ok(x.returncode == 7 and "domain required rack" in x.stderr.decode() and out[-1]["finish_reason"] == "blocked", "--domain holds between two commands too: no pair crosses racks", (x.stderr, out))
x = route("--policy", "fixed", "--topology", T, "--domain", "prefer:rack", data=b'{"id":1,"prompt":"x"}\n')
out = records(run([f"{B}/bin/pd-trace", "cat"], x.stdout).stdout)
ok(x.returncode == 0 and out[0]["route"]["mode"] == "remote", "what is only preferred does not block", (x.stderr, out))

# a profile without the class of a worker: said once a class, with what serves instead
w = records(run([f"{B}/bin/pd-trace", "cat"], open(W, "rb").read()).stdout)[0]
F = os.path.join(tmp.name, "profile")
fit = {"theta": [100, 10, 0], "rows": [[64, 0, 740]]}
right = {"model": w["model_revision"], "cpu": w["cpu"], "threads": w["threads"], "prefill": fit, "decode": fit}
for what, change, words in (("it has", {}, ()), ("of another model", {"model": "other@000000000000"}, ("class of",)), ("of other kernels", {"cpu": "abacus"}, ("class of",)),
                            ("of more threads", {"threads": w["threads"] + 1}, ("class of",)), ("without decode", {"decode": None}, ("decode in its class of",)),
                            ("without prefill and decode", {"decode": None, "prefill": None}, ("prefill and decode in its class of",))):
    with open(F, "w") as f:
        json.dump({"pd": "profile", "v": 1, "classes": [dict(right, **change)]}, f)
    x = route("--policy", "conditional", "--profile", F, "--trace", F + ".trace", data=lines(REQS[:1]))
    told = x.stderr.decode()
    ok(x.returncode == 0 and told.count("\n") == len(words) and all(s in told for s in (*words, *((w["worker"], w["model_revision"], w["cpu"], f"{w['threads']} threads", "guess") if words else ()))),
       f"--profile with a class {what}: {'a line says what is missing, of whom, and what serves' if words else 'nothing to say'}", told)
    if words and what != "without decode":
        d = next(r for r in records(run([f"{B}/bin/pd-trace", "cat", F + ".trace"]).stdout) if r["pd"] == "route")["d"][0]
        ok(len(d["prefill"]) == 3 and d["prefill"][2] & 1, f"--profile with a class {what}: its costs are marked as a guess", d)
    os.unlink(F + ".trace")

empty = os.path.join(tmp.name, "empty")
open(empty, "w").close()
for args, word, rc in ((["-w", empty], "no worker", 1), (["-w", "/nowhere"], "/nowhere", 1), (["-w", W, "--worker", "unix:x"], "--listen", 2), (["-w", W, "--policy", "x"], "--policy", 2),
                       (["-w", W, "--domain", "require:rack"], "--topology", 2), (["-w", W, "--topology", "/nowhere"], "/nowhere", 1),
                       *((["-w", W, o, v], "--listen", 2) for o, v in (("--wait", "3s"), ("--ledger", "L"), ("--fallback-max", "5%"), ("--fallback-rate", "3"), ("-m", TINY),
                                                                       ("--chat-template", "chatml"), ("--trace-max", "1MiB")))):
    x = run([f"{B}/bin/pd-route", *args], b"")
    ok(x.returncode == rc and word in x.stderr.decode() and one_line(x.stderr), f"pd-route {' '.join(args[::2])}: refused in a line", x.stderr)

tap.done()
