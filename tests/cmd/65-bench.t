#!/usr/bin/env python3
"""pd-bench gen, load, score, calibrate: workloads of the asked shape, by seed, at their times; what was noted of their answers, and the figures of that; nothing that was
slow, failed or never came is left out; bad input in one line."""
import json
import os
import signal
import subprocess
import tempfile
import time

import tap
from tap import B, TINY, decode, handles_signals, ok, one_line, prefill, results, run

BENCH = f"{B}/bin/pd-bench"
tmp = tempfile.mkdtemp()


def gen(*args, **kw):
    return run([BENCH, "gen", *args], **kw)


def jsonl(out):
    return [json.loads(x) for x in out.decode().splitlines()]


def refused(args, says, status=2):
    r = run([BENCH, *args])
    return r.returncode == status and one_line(r.stderr) and says in r.stderr.decode() and not r.stdout, r.stderr


def generate():
    a, b, c = (gen("-n", "50", "--rate", "20", "--seed", s) for s in ("1", "1", "2"))
    ok(a.returncode == 0 and a.stdout == b.stdout and a.stdout != c.stdout and not a.stderr, "the same seed, the same bytes; another one, others", a.stderr)
    j = jsonl(gen("-n", "50", "--rate", "20", "--seed", "1", "--format", "json", "--isl", "10-20", "--osl", "3", "--slo", "ttft=500ms,tpot=50ms").stdout)
    ok(len(j) == 50 and all(10 <= len(r["token_ids"]) <= 20 and r["max_tokens"] == 3 and r["ignore_eos"] and r["slo"] == {"ttft_ms": 500.0, "tpot_ms": 50.0} for r in j)
       and [r["arrival_us"] for r in j] == sorted(r["arrival_us"] for r in j), "requests of the asked shape, in order of arrival", j[0])
    j = jsonl(gen("-n", "400", "--format", "json", "--class", "name=chat,weight=3,isl=8", "--class", "name=doc,isl=40,osl=2").stdout)
    of = {c: [r for r in j if r["class"] == c] for c in ("chat", "doc")}
    ok(all(len(r["token_ids"]) == 8 for r in of["chat"]) and all(len(r["token_ids"]) == 40 and r["max_tokens"] == 2 for r in of["doc"]) and 250 < len(of["chat"]) < 350,
       "classes in a mix, by weight", {c: len(v) for c, v in of.items()})
    j = jsonl(gen("-n", "30", "--format", "json", "-m", TINY, "--isl", "600").stdout)
    ok(all(len(r["token_ids"]) + r["max_tokens"] <= 512 and min(r["token_ids"]) >= 32 for r in j), "into the model's context", j[0]["max_tokens"])
    log = os.path.join(tmp, "log.jsonl")
    with open(log, "w") as f:
        for i, ids in enumerate([[1, 2, 3], [1, 2, 4], [1, 2, 3]]):
            f.write(json.dumps({"timestamp": 1000 * (i // 2), "input_length": 1500, "output_length": 64, "hash_ids": ids}) + "\n")
    j = jsonl(gen("--trace", log, "--length-scale", "0.03125", "--format", "json").stdout)
    ids = [r["token_ids"] for r in j]
    ok([r["arrival_us"] for r in j] == [0, 500000, 1000000] and [len(x) for x in ids] == [47] * 3 and ids[0] == ids[2] and ids[0][:32] == ids[1][:32]
       and ids[0][32:] != ids[1][32:] and [r["reusable_tokens"] for r in j] == [0, 32, 47] and [r["max_tokens"] for r in j] == [2] * 3,
       "a log's times, lengths and prefixes, scaled", j)
    j = jsonl(gen("--trace", log, "--raw-times", "--time-scale", "0.5", "--format", "json").stdout)
    ok([r["arrival_us"] for r in j] == [0, 0, 500000], "its times as they are, and scaled", [r["arrival_us"] for r in j])


def pipeline():
    req = gen("-n", "6", "--isl", "5-40", "--osl", "7", "--rate", "40", "--prefix", "partial").stdout
    pre = run(prefill(), req)
    dec = run(decode("--format", "json"), pre.stdout)
    got = results(dec.stdout)
    ok(dec.returncode == 0 and sorted(r["id"] for r in got) == [f"r-{i}" for i in range(6)] and all(r["completion_tokens"] == 7 for r in got),
       "gen | pd-prefill | pd-decode: each answer of the asked length", dec.stderr)
    t0 = time.monotonic()
    r = gen("-n", "11", "--arrivals", "even", "--rate", "20", "--pace", "--format", "json")
    took = time.monotonic() - t0
    j = jsonl(r.stdout)
    ok(r.returncode == 0 and took >= 0.5 and len({x["start_us"] for x in j}) == 1 and b"send lag P50" in r.stderr, "--pace: at their times, and the lag told", (took, r.stderr))
    p = subprocess.Popen([BENCH, "gen", "-n", "1000", "--rate", "1", "--pace"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    time.sleep(0.3)
    p.terminate()
    ok(p.wait(timeout=10) == 0, "--pace ends when it is told to", p.returncode)
    p.stdout.close()


def score(data, *args):
    r = run([BENCH, "score", "--format", "json", *args], data)
    return json.loads(r.stdout) if r.returncode == 0 else {"stderr": r.stderr}


def load(reqs, at, *args, **kw):
    return run([BENCH, "load", "-i", reqs, *(["-o", at] if at else ["--self-test"]), *args], **kw)


def scores():
    reqs = os.path.join(tmp, "reqs.mp")
    req = gen("-n", "12", "--isl", "5-40", "--osl", "4", "--rate", "40").stdout
    open(reqs, "wb").write(req)
    out = run(decode("--stream"), run(prefill(), req).stdout).stdout
    s = score(out, "--requests", reqs, "--slo", "ttft=30s")
    ok(s.get("basis") == "reported" and s["requests"] == s["ended"] == 12 and s["figures"]["ttft"]["formula"] == "first-accepted" and s["figures"]["ttft"]["n"] == 12
       and s["figures"]["itl"]["n"] == 36 and s["met"] == 12 and s["output_tokens"] == 48 and s["mode"] == {"remote": 12} and s["span_s"] == 0, "a pipeline that is not paced: as reported", s)
    out = run([f"{B}/bin/pd-kvsend", "-i", "-", "-o", "-"], run(prefill(), req).stdout)
    s = score(run(decode(), out.stdout).stdout, "--requests", reqs)
    ok(out.returncode == 0 and s.get("ended") == 12 and s["mode"] == {"remote": 12} and s["kv_bytes"] > 0 and s["transferred_tokens"] == s["prompt_tokens"] > 0, "with pd-kvsend between", (out.stderr, s))
    half = results(run(decode("--format", "json"), run(prefill(), req).stdout).stdout)[:6]
    s = score(tap.lines(half), "--requests", reqs, "--slo", "ttft=30s")
    ok(s.get("requests") == 12 and s["unanswered"] == 6 and s["with_slo"] == 12 and s["met"] == 6, "what nobody answered is in the denominator", s)
    env = dict(os.environ, BENCH=BENCH, T=tap.model, B=B)
    r = run(["bash", "-c", 'set -o pipefail; cd "$0" && "$BENCH" gen -n 20 --rate 40 --isl 8 --osl 4 --pace | tee paced.mp | "$B/bin/pd-prefill" -m "$T" | '
             '"$B/bin/pd-decode" -m "$T" --stream | "$BENCH" score --requests paced.mp --format json', tmp], env=env)
    s = json.loads(r.stdout) if r.stdout else {}
    ok(s.get("basis") == "seen" and s["figures"]["ttft"]["n"] == 20 and s["figures"]["ttft"]["formula"] == "first_seen-scheduled" and 0.2 < s["span_s"] < 5, "a paced one: seen, from the schedule", (s, r.stderr))


def loads():
    reqs = os.path.join(tmp, "load.mp")
    open(reqs, "wb").write(gen("-n", "40", "--rate", "80", "--isl", "5-40", "--osl", "6", "--slo", "ttft=20s,tpot=5s", "--class", "name=a", "--class", "name=b,osl=1").stdout)
    want = {r["id"]: r for r in jsonl(run(tap.trace("cat", reqs)).stdout)}
    at = "unix:" + os.path.join(tmp, "d0")
    worker = subprocess.Popen(decode("--listen", at, "--role", "both"), stderr=subprocess.DEVNULL)
    router = subprocess.Popen([f"{B}/bin/pd-route", "--worker", at, "--listen", f"unix:{tmp}/r"], stderr=subprocess.DEVNULL)
    for name, to in (("worker", at), ("router", f"unix:{tmp}/r")):
        r = load(reqs, to, "--format", "json")
        got = {x["id"]: x for x in results(r.stdout)}
        ok(r.returncode == 0 and set(got) == set(want) and all(x["sched_us"] == want[i]["arrival_us"] and x["sched_us"] <= x["sent_us"] <= x["first_us"] <= x["done_us"]
           and x["class"] == want[i]["class"] and x["slo"] == want[i]["slo"] and len(x.get("gaps_us", [])) == x["completion_tokens"] - 1 == want[i]["max_tokens"] - 1
           for i, x in got.items()), f"a {name} under an open load: every request, with its times", r.stderr)
        s = score(r.stdout)
        n_b = sum(x["class"] == "b" for x in want.values())
        ok(s.get("basis") == "scheduled" and s["requests"] == s["ended"] == s["met"] == 40 and s["figures"]["tpot"]["n"] == 40 - n_b and s["figures"]["itl"]["n"] == 5 * (40 - n_b)
           and abs(s["offered_s"] / (39e6 / (max(x["arrival_us"] for x in want.values()) - min(x["arrival_us"] for x in want.values()))) - 1) < 1e-6
           and {c["class"]: c["requests"] for c in s["classes"]} == {"a": 40 - n_b, "b": n_b}, f"and its score ({name})", s)
    r = load(reqs, at, "--concurrency", "4", "--no-stream")
    s = score(r.stdout)
    ok(s.get("basis") == "sent" and s["ended"] == 40 and "ttft" not in s["figures"] and s["figures"]["e2e"]["n"] == 40, "closed, and without streams", s)
    # The worker stands still for 0.6 s: a client that waited for answers would note one slow request, this one all that were to arrive meanwhile.
    p = subprocess.Popen([BENCH, "load", "-i", reqs, "-o", at, "--format", "json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    time.sleep(0.25)
    worker.send_signal(signal.SIGSTOP)
    time.sleep(0.6)
    worker.send_signal(signal.SIGCONT)
    late = [x for x in results(p.communicate(timeout=60)[0]) if x["first_us"] - x["sched_us"] > 150000]
    ok(len(late) >= 8 and max(x["first_us"] - x["sched_us"] for x in late) > 300000, "a stall is in the times of all that were to arrive in it", len(late))
    worker.send_signal(signal.SIGSTOP)
    r = load(reqs, at, "--idle", "300ms", "--format", "json")
    worker.send_signal(signal.SIGCONT)
    s = score(r.stdout)
    ok(r.returncode == 5 and b"nothing came for 0.3 s; 40 of 40 requests" in r.stderr and s["requests"] == s["failed"] == 40 and s["attainment"][0] == 0, "nobody answers: given up, each request failed", (r.returncode, r.stderr, s))
    slow = os.path.join(tmp, "slow.mp")
    gen("-n", "40", "--arrivals", "even", "--rate", "20", "--isl", "8", "--osl", "4", "-o", slow)
    p = subprocess.Popen([BENCH, "load", "-i", slow, "-o", at, "--format", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(0.8)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    s = score(out)
    ok(p.returncode == 6 and s["requests"] == 40 and s["failed"] > 5 and s["ended"] > 0 and len(jsonl(out)) == 40 + s["failed"], "interrupted: what was not sent has failed, with an error each",
       (p.returncode, err, s))
    p = subprocess.Popen([BENCH, "load", "-i", slow, "-o", at, "--format", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(0.8)
    worker.kill()
    out, err = p.communicate(timeout=60)
    s = score(out)
    ok(p.returncode != 0 and s["requests"] == 40 and s["failed"] > 5 and s["ended"] > 0 and len(jsonl(out)) == 40 + s["failed"], "the worker dies: all that it owed failed, with an error each",
       (p.returncode, err, s))
    worker.wait()
    key = os.path.join(tmp, "key")
    with open(os.open(key, os.O_CREAT | os.O_WRONLY, 0o600), "w") as f:
        f.write("k1 " + "ab" * 32 + "\n")
    p = subprocess.Popen(decode("--listen", "tcp-listen:127.0.0.1:0", "--key-file", key, "--role", "both"), stderr=subprocess.PIPE)
    where = "tcp:" + next(w for w in p.stderr.readline().decode().replace(",", " ").split() if "127.0.0.1:" in w).split("tcp-listen:")[-1].split("tcp:")[-1]
    r = load(reqs, where, "--key-file", key)
    s = score(r.stdout)
    ok(r.returncode == 0 and s["ended"] == 40 and s["figures"]["ttft"]["n"] == 40, "over TCP, with a key", (r.stderr, s))
    r = load(reqs, where)
    ok(r.returncode == 7 and b"give --key-file" in r.stderr and score(r.stdout)["failed"] == 40, "and without one: refused, and told why", r.stderr)
    p.kill()
    p.communicate()
    router.terminate()
    router.wait()
    r = load(reqs, at, "--connect-timeout", "200ms")
    ok(r.returncode == 7 and one_line(r.stderr) and not r.stdout, "nobody is there", (r.returncode, r.stderr))
    r = load(reqs, None)
    s = score(r.stdout)
    ok(r.returncode == 0 and s["ended"] == 40 and s["figures"]["ttft"]["p50"][0] < 50, "--self-test: the client's own floor", (r.stderr, s))


def calibrates():
    out = os.path.join(tmp, "profile.json")
    r = run([BENCH, "calibrate", "-m", TINY, "-t", "1", "--quick", "--note", 'a "note"\n', "-o", out])
    p = json.load(open(out)) if r.returncode == 0 else {}
    c = p.get("classes", [{}])[0]
    ok(r.returncode == 0 and p["pd"] == "profile" and p["made"]["note"] == 'a "note"\n' and c["threads"] == 1 and c["model"].startswith("tiny") and c["kv_token_bytes"] > 0
       and {len(c[t]["theta"]) for t in ("prefill", "decode", "mixed")} == {3} and {len(c[t]["theta"]) for t in ("pack", "unpack")} == {2}, "calibrate: a profile", (r.stderr, p))
    every = [(t, c[t]) for t in ("prefill", "decode", "mixed", "pack", "unpack") if t in c] + [(x["scheme"], x) for x in p.get("paths", [])]
    ok({t for t, _ in every} >= {"prefill", "decode", "mixed", "pack", "unpack", "shm", "tcp", "inline"} and all(len(x["rows"]) >= len(x["theta"]) and min(x["theta"]) >= 0 < max(x["theta"])
       and all(row[-1] > 0 for row in x["rows"]) for _, x in every) and all(t in r.stdout.decode() for t, _ in every), "every cost has rows and coefficients", (r.stdout, every))

    def off(t, x):                      # the largest relative distance of a row from its fit, worked out here
        th, pre, dec = x["theta"], c["prefill"]["theta"], c["decode"]["theta"]
        form = {"prefill": lambda n, ctx: (n, n * (ctx + n / 2)), "decode": lambda b, kv: (b, kv),
                "mixed": lambda n, ctx, b, kv: (pre[0] + pre[1] * n + pre[2] * n * (ctx + n / 2), dec[0] + dec[1] * b + dec[2] * kv)}.get(t, lambda b: (b,))
        return max(abs(row[-1] / (th[0] + sum(a * q for a, q in zip(th[1:], form(*row[:-1])))) - 1) for row in x["rows"])
    ok(all(abs(off(t, x) - x["worst"]) < 1e-3 * (1 + x["worst"]) for t, x in every), "the fits are of the forms that pd-profile(5) tells", [(t, off(t, x), x["worst"]) for t, x in every])
    p = subprocess.Popen([BENCH, "calibrate", "-m", TINY, "--no-paths", "-o", out + "2"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    handles_signals(p)
    time.sleep(0.2)
    p.terminate()
    err = p.communicate(timeout=60)[1]
    ok(p.returncode == 6 and one_line(err) and not os.path.exists(out + "2"), "interrupted, it leaves no profile", (p.returncode, err))


def refusals():
    bad = os.path.join(tmp, "bad.csv")
    with open(bad, "w") as f:
        f.write("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,x,4\n")
    for args, says, *status in [(["gen", "--rate", "0"], "--rate"), (["gen", "--isl", "5-"], "--isl"), (["gen", "--arrivals", "often"], "--arrivals"),
                                (["gen", "--prefix", "trace"], "need a trace"), (["gen", "--class", "isl=x"], "--class: isl"), (["gen", "--slo", "e2e=1s"], "--slo"),
                                (["gen", "--trace", bad], "line 2: ContextTokens: 'x'", 4), (["gen", "--trace", "/nowhere"], "/nowhere", 1),
                                (["gen", "--arrivals", "onoff"], "--on 2s"), (["gen", "--reps", "3"], "--reps"), (["load"], "-o:"), (["load", "-o", "file"], "-o:"), (["load", "-o", "unix:x", "--self-test"], "--self-test"),
                                (["load", "-i", "/dev/null", "-o", "unix:x"], "no request", 1), (["score", "-i", "/dev/null"], "no result", 1), (["score", "--slo", "5ms"], "--slo"),
                                (["calibrate"], "-m:"), (["calibrate", "-m", TINY, "--reps", "99"], "--reps"),
                                (["calibrate", "-m", "/nowhere", "--no-paths"], "/nowhere", 1), (["nothing"], "no verb"), (["-v", "gen"], "the verb comes first")]:
        good, note = refused(args, says, *status)
        ok(good, f"refused: {' '.join(args[:3])}".replace(tmp, "."), note)


tap.model = os.path.abspath(TINY)
generate()
pipeline()
scores()
loads()
calibrates()
refusals()
tap.done()
