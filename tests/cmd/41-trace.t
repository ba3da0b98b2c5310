#!/usr/bin/env python3
"""pd-trace on logs: what the filters write passes the check, whatever became of the runs; what is broken is found with its two records; the verbs and their
exit statuses. A tiny model, no network."""
import json
import os
import signal
import subprocess
import tempfile
import time

import tap
from tap import decode, lines, ok, one_line, prefill, records, results, run, trace

tmp = tempfile.mkdtemp()
REQS = [{"id": i, "prompt": p, "max_tokens": m, "n": n, "temperature": 0.7} for i, (p, m, n) in
        enumerate([("Once upon a time", 12, 1), ("One", 1, 1), ("Two choices", 6, 2), ("word " * 40, 8, 1), ("Both end at once", 1, 3)])]


def log(name):
    return f"{tmp}/{name}.trace"


def events(*files):
    return [r for r in records(run(trace("merge", "--format", "json", *files)).stdout) if r["pd"] == "event"]


def check(*args):
    x = run(trace("check", "--format", "json", *args))
    rows = records(x.stdout)
    return x.returncode, [r for r in rows if "rule" in r], rows[-1]["summary"] if rows else {}, x.stderr


def passes(name, *files, want=()):
    rc, bad, s, err = check(*files)
    ok(rc == 0 and not bad and all(s.get(k) == v for k, v in want), f"{name}: the log passes", (rc, bad, s, err))


# ---- what the filters write ----
a = run(prefill("--trace", log("p")), lines(REQS))
b = run(decode("--format", "json", "--trace", log("d")), a.stdout)
runs = {r["run"] for r in results(b.stdout)}
passes("apart", log("p"), log("d"), want=[("completed", 5), ("runs", 5), ("handed_over", 0), ("begun_elsewhere", 0), ("processes", 2)])
passes("prefill's alone", log("p"), want=[("handed_over", 5)])
passes("decode's alone", log("d"), want=[("completed", 5), ("begun_elsewhere", 5)])
run(decode("--trace", log("agg")), lines(REQS))
passes("aggregated", log("agg"), want=[("completed", 5)])
ok([e["state"] for e in events(log("agg")) if e.get("run") == events(log("agg"))[1]["run"]] ==
   ["accepted", "prefill_started", "prefill_completed", "decode_started", "streaming", "streaming", "completed"], "a life in one process", events(log("agg")))
p = subprocess.Popen(["sh", "-c", f"{' '.join(prefill('--trace', log('both')))} | {' '.join(decode('--trace', log('both')))}"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
p.communicate(lines(REQS * 10).encode())
passes("a pipe, both in one file", log("both"), want=[("completed", 50)])
run(prefill("--trace", log("h5"), "-o", f"{tmp}/a.h5"), lines(REQS))
run(decode("--trace", log("h5"), "-i", f"{tmp}/a.h5"))
passes("through a dump", log("h5"), want=[("completed", 5)])
a = run(prefill("--trace", log("bad")), lines(REQS[:1]) + '{"prompt":"x","top_p":7}\n{"nonsense\n' + lines([{"prompt": "w " * 5000}]) + lines(REQS[3:4]))
b = run(decode("--trace", log("bad")), a.stdout)
passes("requests that fail", log("bad"), want=[("completed", 2), ("failed", 3)])
x = run(decode("--trace", log("bad2")), lines(REQS[:1]) + '{"prompt":"x","top_p":7}\n{"nonsense\n' + lines([{"prompt": "w " * 5000}]))
passes("and in one process", log("bad2"), want=[("completed", 1), ("failed", 3)])
a = run(prefill("--trace", log("cut")), lines(REQS))
run(decode("--trace", log("cut")), a.stdout[:-3000])
passes("a stream that was cut", log("cut"))
recs = records(run(trace("cat", "--format", "json"), a.stdout).stdout)
for r in recs:
    if r["pd"] == "chunk":
        r["xxh3"] = {"$b64": "AAAAAAAAAAA="}
damaged = run(trace("cat", "--format", "msgpack"), lines(recs)).stdout
run(prefill("--trace", log("fb")), b"")
b = run(decode("--trace", log("fb"), "--format", "json"), damaged)
rc, bad, s, err = check(log("fb"))
ok(rc == 0 and not bad and s["completed"] == 5, "KV that failed its checks, recomputed: the log passes", (rc, bad, s, err))
x = run(trace("stats", log("fb")))
ok(b"fallback: integrity" in x.stdout and b"fallback             3\n" in x.stdout, "stats counts fallbacks by reason", x.stdout)
b = run(decode("--trace", log("refuse"), "--on-mismatch", "fail"), damaged)
passes("refused", log("refuse"), want=[("failed", 3), ("completed", 2)])


def big(name, *args, sig):
    """A run that takes a while, and a signal in the midst of it."""
    p = subprocess.Popen(decode("--trace", log(name), *args), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    p.stdin.write(lines([{"prompt": "Once", "max_tokens": 230, "ignore_eos": True, "n": 16, "logprobs": True}] * 12).encode())
    p.stdin.flush()
    end = time.time() + 30
    while time.time() < end and not (os.path.exists(log(name)) and b"streaming" in open(log(name), "rb").read()):
        time.sleep(0.01)
    for s in sig:
        p.send_signal(s)
        time.sleep(0.05)
    p.stdin.close()
    p.stdout.read()
    return p.wait(60)


rc = big("stop", sig=[signal.SIGTERM, signal.SIGTERM])
code, bad, s, err = check(log("stop"))
ok(code == 0 and not bad and (s["cancelled"] > 0 or rc != 6), "stopped at once: what was in hand is cancelled, by the log too", (rc, code, bad, s))
rc = big("kill", sig=[signal.SIGKILL])
code, bad, s, err = check(log("kill"))
ok(code == 0 and s["lost"] == len(bad) > 0 and {b["verdict"] for b in bad} == {"lost"} and s["processes_lost"] == 1, "killed: reported as lost, no violation", (rc, code, bad[:2], s))
ok(check("--strict", log("kill"))[0] == 9, "which --strict takes to be 9")
run(prefill("--trace", log("kill")), lines(REQS[:1]))
code, bad, s, err = check(log("kill"))
ok(code == 0 and s["handed_over"] == 1, "another process goes on with the file", s)
text = "".join(json.dumps({"prompt": "One two three", "max_tokens": 3}) + "\n" for _ in range(200))
run(decode("--trace", log("rot"), "--trace-max", "16KiB"), text)
code, bad, s, err = check(log("rot"))
ok(code == 0 and not bad and max(os.path.getsize(log("rot")), os.path.getsize(log("rot") + ".1")) <= 16384 and s["runs"] > 20, "--trace-max: two files, whole, and what is in them passes", (code, bad[:3], s))
x = run(decode("--trace", log("x"), "--trace-max", "12"), b"")
ok(x.returncode == 2 and one_line(x.stderr) and b"example: --trace-max 64MiB" in x.stderr, "--trace-max: a bad size", x.stderr)

# ---- ls, show, stats, merge ----
x = run(trace("ls", log("p"), log("d")))
ids = [line.split()[0] for line in x.stdout.decode().splitlines()]
ok(x.returncode == 0 and set(ids) == runs and len(ids) == 5, "ls: a line a run, its id first", x.stdout)
rows = records(run(trace("ls", "--format", "json", log("p"), log("d"))).stdout)
ok({r["run"] for r in rows} == runs and all(r["state"] == "completed" and r["mode"] == "remote" and r["e2e_ms"] >= r["ttft_ms"] > 0 for r in rows), "ls --format json", rows)
ok(sorted(r["tokens"] for r in rows) == sorted(sum(len(r["tokens"]) for r in results(run(decode("--format", "json"), run(prefill(), lines([q])).stdout).stdout)) for q in REQS),
   "with the tokens that went out", rows)
one = [r["run"] for r in rows if r["tokens"] == 12 or r["tokens"] == 8][0]
x = run(trace("show", one, log("d"), log("p")))
text = x.stdout.decode()
names = [line.split()[0] for line in text.splitlines()[2:]]
ok(x.returncode == 0 and {"queue", "prefill", "transfer", "publish", "wait", "first", "stream", "completed"} <= set(names) and text.count("[") == len(names) and "prefill@" in text and "decode@" in text,
   "show: a stage a line, over both processes", text)
x = run(trace("show", "--format", "json", one, log("d"), log("p")))
w = json.loads(x.stdout)
ok(w["run"] == one and w["state"] == "completed" and {s["name"] for s in w["stages"]} == set(names) and all(s["at_ms"] >= 0 for s in w["stages"]), "show --format json", w)
x = run(trace("show", "--format", "json", events(log("agg"))[1]["run"], log("agg")))
ok([s["name"] for s in json.loads(x.stdout)["stages"]] == ["queue", "prefill", "first", "stream", "completed"], "show: what was computed where it is decoded has no stage of publishing", x.stdout)
routed = [{"pd": "event", "v": 1, "run": one, "state": s, "role": role, "where": "remote", "worker": role, "t_us": 10**15 + 10 * i, "mono_us": 10**9 + 10 * i}
          for i, (s, role) in enumerate([("accepted", "route"), ("route_selected", "route"), ("prefill_started", "prefill"), ("completed", "route")])]
x = run(trace("show", "--format", "json", one), lines(routed))
ok([s["name"] for s in json.loads(x.stdout)["stages"]][:3] == ["route", "queue", "prefill"], "show: in order of their beginning", x.stdout + x.stderr)
x = run(trace("ls", "--format", "json"), lines([e for e in routed if e["role"] == "route"]))
ok(json.loads(x.stdout)["mode"] == "remote", "ls: the router's log alone tells the mode that was chosen", x.stdout + x.stderr)
x = run(trace("show", "01", log("d"), log("p")))
ok(x.returncode == 2 and one_line(x.stderr) and b"several runs" in x.stderr, "show: too short a beginning", x.stderr)
x = run(trace("show", "01ARZ3NDEKTSV4RRFFQ69G5FAV", log("d")))
ok(x.returncode == 1 and b"no event of run 01ARZ3NDEKTSV4RRFFQ69G5FAV" in x.stderr, "show: a run that is not there", x.stderr)
x = run(trace("show", log("d")))
ok(x.returncode == 2 and b"is no run id" in x.stderr and one_line(x.stderr), "show: a file where the run is expected", x.stderr)
rows = {r["name"]: r for r in records(run(trace("stats", "--format", "json", log("p"), log("d"))).stdout)}
ok({"queue", "prefill", "publish", "transfer", "wait", "first", "stream", "ttft", "tpot", "e2e"} <= set(rows) and rows["runs"]["value"] == 5 and rows["ttft"]["n"] == 5 and
   all(r["min"] <= r["p50"] <= r["p90"] <= r["p99"] <= r["max"] for r in rows.values() if "p50" in r), "stats: every stage, quantiles in order", rows)
x = run(trace("stats", log("p"), log("d")))
ok(b"P50" in x.stdout and b"ttft" in x.stdout and b"tpot" in x.stdout, "stats in words", x.stdout)
m = run(trace("merge", "-o", f"{tmp}/m.trace", log("d"), log("p")))
ev = events(f"{tmp}/m.trace")
ok(m.returncode == 0 and len(ev) == len(events(log("p"))) + len(events(log("d"))) and [e["t_us"] for e in ev] == sorted(e["t_us"] for e in ev), "merge: one log, by time", m.stderr)
passes("merged", f"{tmp}/m.trace", want=[("completed", 5)])
x, y = run(trace("ls", f"{tmp}/m.trace")), run(trace("ls", log("p"), log("d")))
ok(x.stdout == y.stdout, "and the same to ls", (x.stdout, y.stdout))
x = run(trace("ls"), open(f"{tmp}/m.trace", "rb").read())
ok(x.stdout == y.stdout, "from standard input too", x.stdout)
x = run(trace("ls", "-i", f"{tmp}/m.trace"))
ok(x.stdout == y.stdout, "and by -i", x.stdout)
x = run(["sh", "-c", f"{tap.B}/bin/pd-trace cat {tmp}/m.trace | {tap.B}/bin/pd-trace ls"])
ok(x.stdout == y.stdout, "and as JSON Lines", x.stdout)

# ---- what is broken ----
whole = open(f"{tmp}/m.trace", "rb").read()


def broken(name, change, rule):
    recs = records(run(trace("cat", f"{tmp}/m.trace")).stdout)
    open(f"{tmp}/b.trace", "wb").write(run(trace("cat", "--format", "msgpack"), lines(change(recs))).stdout)
    code, bad, s, err = check(f"{tmp}/b.trace")
    good = code == 4 and [b["rule"] for b in bad] == [rule] and bad[0]["run"] in runs and bad[0]["second"]["file"] == f"{tmp}/b.trace" and bad[0]["first"]["offset"] >= 0
    x = run(trace("check", f"{tmp}/b.trace"))
    text = x.stdout.decode().splitlines()
    ok(good and x.returncode == 4 and text[0].startswith(bad[0]["run"]) and rule in text[0] and len(text) == 4 and all(t.startswith("    ") and "b.trace:" in t for t in text[1:3]),
       f"{name}: exit 4, the run and the two records ({rule})", (code, bad, s, x.stdout))


def without(state):
    def change(recs):
        i = [i for i, r in enumerate(recs) if r.get("run") == one and r["state"] == state][-1]
        return recs[:i] + recs[i + 1:]
    return change


def twice(state):
    def change(recs):
        i = [i for i, r in enumerate(recs) if r.get("run") == one and r["state"] == state][0]
        return recs[:i + 1] + recs[i:]
    return change


broken("no prefill_started", without("prefill_started"), "order")
broken("decode that did not wait for the transfer", without("kv_transfer_completed"), "order")
broken("no end", without("completed"), "run_open")
broken("an end that comes twice", twice("completed"), "after_end")
broken("a first token that comes twice", twice("streaming"), "first_token")
broken("positions that are missing", without("streaming"), "token_count")
cut = whole[:len(whole) // 2] + whole[len(whole) // 2 + 40:]
open(f"{tmp}/t.trace", "wb").write(cut)
code, bad, s, err = check(f"{tmp}/t.trace")
ok(code == 0 and s["torn"] >= 1 and s["violations"] == 0 and b"torn" in err, "a torn record: counted, exit 0", (code, bad, s, err))
ok(check("--strict", f"{tmp}/t.trace")[0] == 9 and run(trace("ls", "--strict", f"{tmp}/t.trace")).returncode == 9 and run(trace("merge", "--strict", f"{tmp}/t.trace")).returncode == 9,
   "which --strict takes to be 9")
open(f"{tmp}/no.trace", "wb").write(b"this is no log\n" * 10)
x = run(trace("check", f"{tmp}/no.trace"))
ok(x.returncode == 4 and one_line(x.stderr) and b"there is no record in it" in x.stderr, "what is no log: exit 4", x.stderr)
x = run(trace("check", f"{tmp}/absent.trace"))
ok(x.returncode == 1 and one_line(x.stderr) and b"absent.trace" in x.stderr, "an absent file", x.stderr)
for args, what in ((("check", "--bound", "7", log("p")), b"--bound 500ms"), (("follow", "--last", "-4", log("p")), b"--last 10"), (("ls", "-o", "x", log("p")), b"-o is for"), (("sho",), b"ls, show, check"),
                   ((), b"which verb? (cat, ls, show"), (("ls", "--run", one), b"--run: ls has no use for it (it is for cat, follow, kv, verify)"),
                   (("kv", "ls", "--tokens", "0:4", "x.h5"), b"--tokens: kv ls has no use for it (it is for kv slice)"),
                   (("follow", "--bound", "1s"), b"it is for check"), (("cat", "--strict"), b"it is for ls, show, check, merge")):
    x = run(trace(*args))
    ok(x.returncode == 2 and one_line(x.stderr) and what in x.stderr, f"usage: {' '.join(args[:2])}", x.stderr)
x = run(["sh", "-c", f"{tap.B}/bin/pd-trace cat {tmp}/m.trace >/dev/full || echo $?; {tap.B}/bin/pd-trace stats {tmp}/m.trace >/dev/full || echo $?"])
ok(x.stdout == b"8\n8\n", "a full disk: 8", x.stdout + x.stderr)

# ---- follow ----
live = f"{tmp}/live.trace"
open(live, "wb").write(whole)
p = subprocess.Popen(trace("follow", "--last", "2", live), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
first = [p.stdout.readline() for _ in range(2)]
ok(all(b"gone" in f or b"completed" in f for f in first), "follow: the last events that are there", first)
os.rename(live, live + ".1")
run(decode("--trace", live), lines(REQS[:1]))
seen = [p.stdout.readline() for _ in range(8)]
ok(b"starting" in seen[0] and b"accepted" in seen[1] and b"completed" in seen[-1], "then what comes, also in a file that took its place", seen)
p.send_signal(signal.SIGINT)
ok(p.wait(10) == 0, "until it is interrupted, which is no error", p.stderr.read())
p = subprocess.Popen(trace("follow", "--format", "json", "--run", one[:24], "--last", "1000", f"{tmp}/m.trace"), stdout=subprocess.PIPE)
row = json.loads(p.stdout.readline())
ok(row["state"] == "accepted", "follow --run --format json", row)
p.stdout.close()
p.kill()
p.wait()
subprocess.run(["rm", "-rf", tmp])
tap.done()
